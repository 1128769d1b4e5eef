//! Starts `chaos/main.rs` where it can run: it finds processes in /proc, and needs Linux for that.

#[cfg(target_os = "linux")]
#[path = "../chaos/main.rs"]
mod chaos;

use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    chaos::main()
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    eprintln!("error: this program runs on Linux only");
    ExitCode::from(2)
}
