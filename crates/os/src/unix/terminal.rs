//! The terminal on stdout, and replacing or suspending this process.
#![expect(unsafe_code, reason = "the size of a terminal is asked by an ioctl that nix does not wrap")]

use std::{io, os::unix::process::CommandExt, path::Path, process::Command};

/// Columns and rows of the terminal on stdout; `None` if stdout is no terminal or does not report a size.
pub fn terminal_size() -> Option<(u16, u16)> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: this request writes one `winsize`, which outlives the call; a descriptor that is no terminal is an
    // error.
    let result = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    (result == 0 && size.ws_col > 0 && size.ws_row > 0).then_some((size.ws_col, size.ws_row))
}

/// Identifies the terminal on stdin by its device and its session leader: the name of a device is reused, a session
/// leader with its start time is not.
pub fn terminal_identity() -> Option<String> {
    let device = nix::unistd::ttyname(super::outer::stdin()).ok()?;
    let leader = u32::try_from(nix::unistd::getsid(None).ok()?.as_raw()).ok()?;
    Some(format!("{} {leader} {}", device.display(), super::start_stamp(leader)?))
}

/// Kills a process by its process id. Only for `outlast demo`, which crashes the demo's server. All other code
/// signals through `ChildProcesses`, which cannot signal an unrelated process.
pub fn kill_hard(pid: u32) -> io::Result<()> {
    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };
    // Zero and negative numbers mean process groups, and 1 is init.
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 1).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(kill(Pid::from_raw(pid), Signal::SIGKILL)?)
}

/// Stops this process until it is continued, as Ctrl-Z does. Does nothing if SIGTSTP is ignored, or in an orphaned
/// process group, which no shell with job control could continue.
pub fn suspend() {
    use nix::sys::signal::{Signal, raise};
    let _ = raise(Signal::SIGTSTP);
}

/// Replaces this process by another program. Returns only on failure, with the reason.
pub fn become_program(program: &Path, args: &[&str]) -> io::Error {
    Command::new(program).args(args).exec()
}
