//! Upgrade in place: a running instance becomes another program by `execve`, and its connections, children and sockets
//! stay. What is saved of an instance is decided by its driver.

use std::{env, path::PathBuf};

use outlast_control::{registry::Program, wire::Refusal};

#[cfg(unix)]
pub(crate) mod check_state;
#[cfg(unix)]
pub(crate) mod format;
#[cfg(unix)]
pub(crate) mod requests;

/// The version of this program, as in `--version`.
pub(crate) const OWN_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Why there is no upgrade in place on Windows.
#[cfg(windows)]
pub(crate) const NOT_ON_WINDOWS: &str = "Windows cannot replace the program of a running process";

/// The file that this process runs, by the name that a package manager would replace: a symbolic link stays one.
pub(crate) fn own_program() -> Option<Program> {
    let running = env::current_exe().ok()?;
    let called = env::args_os().next().map(PathBuf::from);
    let found = called.and_then(|called| match called.components().count() {
        1 => env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join(&called)).find(|path| path.is_file()),
        _ => std::path::absolute(called).ok(),
    });
    let is_same = |path: &PathBuf| path.canonicalize().is_ok_and(|real| real == running);
    Program::of(found.filter(is_same).unwrap_or(running), OWN_VERSION)
}

/// The answer where no upgrade is possible.
pub(crate) fn unsupported(why: &str) -> Refusal {
    Refusal::new("not_supported", format!("it cannot be upgraded in place: {why}"))
}
