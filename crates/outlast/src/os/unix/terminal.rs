//! The terminal on stdout.
#![expect(unsafe_code, reason = "the size of a terminal is asked by an ioctl that nix does not wrap")]

use std::{io, os::unix::process::CommandExt, path::Path, process::Command};

/// Columns and rows of the terminal on stdout; none if it is no terminal or does not know.
pub fn terminal_size() -> Option<(u16, u16)> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: this request writes one `winsize`, which is there and ours; a descriptor that is no terminal is an error.
    let result = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    (result == 0 && size.ws_col > 0 && size.ws_row > 0).then_some((size.ws_col, size.ws_row))
}

/// The terminal on stdin, by its device and by the login or window it belongs to: a device's name is used again, a
/// session leader with its start time is not.
pub fn terminal_identity() -> Option<String> {
    let device = nix::unistd::ttyname(super::outer::stdin()).ok()?;
    let leader = u32::try_from(nix::unistd::getsid(None).ok()?.as_raw()).ok()?;
    Some(format!("{} {leader} {}", device.display(), super::born(leader)?))
}

/// Ends a process without a warning, by its bare id: for `outlast demo` alone, which plays the one who does such
/// things to the demo's server. All else signals through a household, which cannot hit a stranger.
pub fn kill_hard(pid: u32) -> io::Result<()> {
    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };
    // Zero and negative numbers would mean whole groups, and 1 is the system's.
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 1).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(kill(Pid::from_raw(pid), Signal::SIGKILL)?)
}

/// Stops us until somebody says to go on, as Ctrl-Z does where nobody has turned that off. Where nobody could say so, as
/// without a shell that knows of jobs, it does nothing.
pub fn suspend() {
    use nix::sys::signal::{Signal, raise};
    let _ = raise(Signal::SIGTSTP);
}

/// Another program takes our place, if all is well; what comes back is why not.
pub fn become_program(program: &Path, args: &[&str]) -> io::Error {
    Command::new(program).args(args).exec()
}
