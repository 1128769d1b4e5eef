//! outlast: the connection outlasts the process. Drivers, the operating system, and words for people.

use std::{ffi::OsString, process::ExitCode};

pub mod audit;
pub mod home;
pub mod marker;
pub mod os;
pub mod report;
pub mod watch;

/// The whole program, callable from a test.
pub fn main(_args: impl IntoIterator<Item = OsString>) -> ExitCode {
    ExitCode::SUCCESS
}
