use std::process::ExitCode;

fn main() -> ExitCode {
    outlast::main_of_next_version(std::env::args_os())
}
