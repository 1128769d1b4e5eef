//! Starts `conformance/main.rs` where it can run.

#[cfg(unix)]
#[path = "../conformance/main.rs"]
mod conformance;

use std::process::ExitCode;

#[cfg(unix)]
fn main() -> ExitCode {
    conformance::main()
}

#[cfg(not(unix))]
fn main() -> ExitCode {
    eprintln!("error: this program runs on Unix only");
    ExitCode::from(2)
}
