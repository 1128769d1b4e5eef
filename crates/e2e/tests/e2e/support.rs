//! What the stories share.

pub mod peers;

use std::path::PathBuf;

/// The program under test. Some ways to type-check for another system leave its name out of the build; a run of the
/// tests always has it.
pub fn outlast() -> PathBuf {
    let named = option_env!("CARGO_BIN_EXE_outlast-under-test").map(PathBuf::from);
    named
        .or_else(|| std::env::var_os("CARGO_BIN_EXE_outlast-under-test").map(PathBuf::from))
        .expect("cargo names the program under test")
}
