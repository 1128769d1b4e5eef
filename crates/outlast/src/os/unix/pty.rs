//! A terminal for a child: it has one end as its controlling terminal, we have the other.
#![expect(unsafe_code, reason = "the size of a terminal is set by an ioctl that nix does not wrap")]

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    pty::{Winsize, openpty},
    sys::termios::{InputFlags, SetArg, tcgetattr, tcsetattr},
};

use super::{
    outer,
    stream::{Sink, Source, terminal_stream},
};
use crate::os::Size;

/// Our end of a child's terminal, as far as its size goes.
#[derive(Debug)]
pub struct Window(OwnedFd);

impl Window {
    /// The child hears of it by SIGWINCH, unless it is the size it has.
    pub fn resize(&self, size: Size) -> io::Result<()> {
        let size = winsize(size);
        // SAFETY: the request reads one `winsize`, which is there.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Our ends, and the child's.
pub(super) struct Pair {
    pub source: Source,
    pub sink: Sink,
    pub window: Window,
    pub theirs: OwnedFd,
}

/// Of this size from the first byte on. It behaves as the terminal we are on does, or as any terminal would.
pub(super) fn open(size: Size) -> io::Result<Pair> {
    let like = outer::settings();
    let pair = openpty(Some(&winsize(size)), like.as_ref())?;
    for end in [&pair.master, &pair.slave] {
        fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    }
    if like.is_none() {
        let mut settings = tcgetattr(&pair.slave)?;
        // What is typed is UTF-8, and erased by the letter.
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
