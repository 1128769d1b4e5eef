//! The pseudo terminal of a child: the child has one end as its controlling terminal, outlast has the other.
#![expect(unsafe_code, reason = "the size of a terminal is set by an ioctl that nix does not wrap")]

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    pty::{Winsize, openpty},
    sys::termios::{InputFlags, SetArg, tcgetattr, tcsetattr},
};

use super::{
    handover::{Handover, Received},
    outer,
    stream::{Sink, Source, terminal_stream},
};
use crate::Size;

/// Sets the size of a child's terminal.
#[derive(Debug)]
pub struct Window(OwnedFd);

impl Window {
    /// The child gets a SIGWINCH, unless the size is the same.
    pub fn resize(&self, size: Size) -> io::Result<()> {
        let size = winsize(size);
        // SAFETY: the request reads one `winsize`, which outlives the call.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Keeps the terminal for the next program.
    pub fn keep(&self, handover: &mut Handover) -> i32 {
        handover.keep(self.0.as_fd())
    }

    /// The terminal that the last program kept.
    pub fn restore(received: &mut Received, number: i32) -> io::Result<Window> {
        received.take(number).map(Window)
    }
}

/// The ends of outlast, and the end of the child.
pub(super) struct Pair {
    pub source: Source,
    pub sink: Sink,
    pub window: Window,
    pub theirs: OwnedFd,
}

/// Opens a terminal that has this size from the first byte on. Its settings are those of the user's terminal, or the
/// defaults.
pub(super) fn open(size: Size) -> io::Result<Pair> {
    let like = outer::settings();
    let pair = openpty(Some(&winsize(size)), like.as_ref())?;
    for end in [&pair.master, &pair.slave] {
        fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    }
    if like.is_none() {
        let mut settings = tcgetattr(&pair.slave)?;
        // Input is UTF-8, and an erase removes a whole character.
        #[cfg(any(target_os = "linux", target_os = "macos"))]
        settings.input_flags.insert(InputFlags::IUTF8);
        tcsetattr(&pair.slave, SetArg::TCSANOW, &settings)?;
    }
    let (source, sink) = terminal_stream(pair.master.try_clone()?, pair.master.try_clone()?)?;
    Ok(Pair { source, sink, window: Window(pair.master), theirs: pair.slave })
}

fn winsize(size: Size) -> Winsize {
    Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: size.width, ws_ypixel: size.height }
}
