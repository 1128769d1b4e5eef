//! Shared by the tests.

#[cfg(target_os = "linux")]
pub(crate) mod browser;
#[cfg(target_os = "linux")]
pub(crate) mod nats;
pub(crate) mod peers;
#[cfg(target_os = "linux")]
pub(crate) mod processes;
#[cfg(target_os = "linux")]
pub(crate) mod service;

use std::path::PathBuf;
#[cfg(target_os = "linux")]
use std::{path::Path, process::Command};

/// The program under test, and the puppet.
pub(crate) const OUTLAST: &str = named(option_env!("CARGO_BIN_EXE_outlast-under-test"));
pub(crate) const PUPPET: &str = named(option_env!("CARGO_BIN_EXE_outlast-puppet"));
/// The test agent with a composer and nothing else.
#[cfg(target_os = "linux")]
pub(crate) const COMPOSER: &str = named(option_env!("CARGO_BIN_EXE_outlast-composer"));

/// A check for another system does not build the programs, and has no names for them; nothing is run there.
const fn named(name: Option<&'static str>) -> &'static str {
    match name {
        Some(name) => name,
        None => "cargo names the program when it builds one",
    }
}

/// Copies a program. Another process writes the copy: a process that another test starts at that moment would inherit the
/// descriptor from this process, and as long as one is open for writing, the copy cannot be executed.
#[cfg(target_os = "linux")]
pub(crate) fn copy_program(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    let status = Command::new("cp").args([from.as_ref(), to.as_ref()]).status();
    assert!(status.is_ok_and(|status| status.success()), "{} is copied", from.as_ref().display());
}

/// The program under test. Some ways to type-check for another system leave its name out of the build; a run of the
/// tests always has it.
pub(crate) fn outlast() -> PathBuf {
    let named = option_env!("CARGO_BIN_EXE_outlast-under-test").map(PathBuf::from);
    named
        .or_else(|| std::env::var_os("CARGO_BIN_EXE_outlast-under-test").map(PathBuf::from))
        .expect("cargo names the program under test")
}
