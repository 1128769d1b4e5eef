use std::process::ExitCode;

fn main() -> ExitCode {
    outlast::main(std::env::args_os())
}
