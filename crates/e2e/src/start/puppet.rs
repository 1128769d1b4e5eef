//! Starts `puppet.rs` where it can run: the puppet reads pipes with poll, and sends and blocks signals.

#[cfg(unix)]
#[path = "../puppet.rs"]
mod puppet;

use std::process::ExitCode;

#[cfg(unix)]
fn main() -> ExitCode {
    puppet::main()
}

#[cfg(not(unix))]
fn main() -> ExitCode {
    eprintln!("error: this program runs on Unix only");
    ExitCode::from(2)
}
