//! Starts `bench/main.rs` where it can run: the benchmark reads /proc.

#[cfg(unix)]
#[path = "../bench/main.rs"]
mod bench;

use std::process::ExitCode;

#[cfg(unix)]
fn main() -> ExitCode {
    bench::main()
}

#[cfg(not(unix))]
fn main() -> ExitCode {
    eprintln!("error: this program runs on Unix only");
    ExitCode::from(2)
}
