//! Starts `echo.rs` where it can run: the echo server reads and writes bare descriptors.

#[cfg(unix)]
#[path = "../echo.rs"]
mod echo;

use std::process::ExitCode;

#[cfg(unix)]
fn main() -> ExitCode {
    echo::main()
}

#[cfg(not(unix))]
fn main() -> ExitCode {
    eprintln!("error: this program runs on Unix only");
    ExitCode::from(2)
}
