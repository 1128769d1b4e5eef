//! Starts `hop.rs` where it can run.

#[cfg(unix)]
#[path = "../hop.rs"]
mod hop;

use std::process::ExitCode;

#[cfg(unix)]
fn main() -> ExitCode {
    hop::main()
}

#[cfg(not(unix))]
fn main() -> ExitCode {
    eprintln!("error: this program runs on Unix only");
    ExitCode::from(2)
}
