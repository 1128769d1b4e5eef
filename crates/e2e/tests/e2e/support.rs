//! What the stories share.

#[cfg(target_os = "linux")]
pub mod browser;
pub mod peers;
#[cfg(target_os = "linux")]
pub mod service;

use std::path::PathBuf;

/// The program under test, and the server that does as it is told.
pub const OUTLAST: &str = named(option_env!("CARGO_BIN_EXE_outlast-under-test"));
pub const PUPPET: &str = named(option_env!("CARGO_BIN_EXE_outlast-puppet"));
/// The agent that has a composer and nothing else.
#[cfg(target_os = "linux")]
pub const COMPOSER: &str = named(option_env!("CARGO_BIN_EXE_outlast-composer"));

/// A check for another system does not build the programs, and has no names for them; nothing is run there.
const fn named(name: Option<&'static str>) -> &'static str {
    match name {
        Some(name) => name,
        None => "cargo names the program when it builds one",
    }
}

/// The program under test. Some ways to type-check for another system leave its name out of the build; a run of the
/// tests always has it.
pub fn outlast() -> PathBuf {
    let named = option_env!("CARGO_BIN_EXE_outlast-under-test").map(PathBuf::from);
    named
        .or_else(|| std::env::var_os("CARGO_BIN_EXE_outlast-under-test").map(PathBuf::from))
        .expect("cargo names the program under test")
}
