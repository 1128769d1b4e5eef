//! The control socket: a listener in the reactor for us, a plain blocking stream for those who ask.

use std::{
    fs::{self, Permissions},
    io::{self, ErrorKind, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            fs::{FileTypeExt, MetadataExt, PermissionsExt},
            net,
        },
    },
    path::{Path, PathBuf},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::BytesMut;
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        socket::{
            AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr, bind, connect as connect_to, listen, send,
            setsockopt, socket, sockopt,
        },
        time::{TimeVal, TimeValLike},
    },
    unistd::geteuid,
};
use tokio::net::{UnixListener, UnixStream};

/// The longest path a socket can have on every Unix we know: macOS has room for 104 bytes, the last of them zero.
const SOCKET_PATH_MAX: usize = 103;

/// How many may knock before we open; a further one is told at once, or waits as long as it has patience.
const KNOCKING_MAX: i32 = 128;

/// Opens only to processes of our own user. The name is removed with it.
#[derive(Debug)]
pub struct Listener {
    listener: UnixListener,
    path: PathBuf,
}

impl Listener {
    /// The directory lets nobody else in from now on. A name left behind by someone who was killed is taken over; one
    /// that somebody answers to is `AddrInUse`.
    pub fn bind(path: &Path) -> io::Result<Listener> {
        claim_dir(path.parent().unwrap_or(Path::new("/")))?;
        let listener = match listen_at(path) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && is_abandoned(path) => {
                fs::remove_file(path)?;
                listen_at(path)?
            }
            other => other?,
        };
        listener.set_nonblocking(true)?;
        Ok(Listener { listener: UnixListener::from_std(listener)?, path: path.to_owned() })
    }

    /// The next of our own user's processes to knock; others are turned away unheard. While nobody knocks this asks
    /// the kernel nothing.
    pub fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Peer>> {
        loop {
            let (stream, _) = ready!(self.listener.poll_accept(cx))?;
            if stream.peer_cred().is_ok_and(|peer| peer.uid() == geteuid().as_raw()) {
                return Poll::Ready(Ok(Peer(stream)));
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Whoever looked for strays may have been quicker.
        let _ = fs::remove_file(&self.path);
    }
}

/// One who knocked.
#[derive(Debug)]
pub struct Peer(UnixStream);

impl Peer {
    /// To somebody's control socket, as a part of the runtime we are in. The patience is for connecting.
    pub fn of(line: Line) -> io::Result<Peer> {
        line.0.set_nonblocking(true)?;
        Ok(Peer(UnixStream::from_std(line.0)?))
    }

    /// It has closed its end altogether, and hears nothing any more.
    pub fn is_gone(&self) -> bool {
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::empty())];
        let gone = PollFlags::POLLHUP | PollFlags::POLLERR;
        poll(&mut fds, PollTimeout::ZERO).is_ok() && fds[0].revents().is_some_and(|found| found.intersects(gone))
    }

    /// Appends what there is. Ready with 0 at the end.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut BytesMut) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            match self.0.try_read_buf(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => return Poll::Ready(other),
            }
        }
    }

    /// Writes as much as the kernel takes at once.
    pub fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            match self.0.try_write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => return Poll::Ready(other),
            }
        }
    }
}

/// A stream to somebody's control socket, which waits. Reading and writing fail with `WouldBlock` when the patience
/// is over.
#[derive(Debug)]
pub struct Line(net::UnixStream);

impl Line {
    /// The patience holds for connecting too: whoever hangs may have a full queue before the door.
    pub fn connect(path: &Path, patience: Duration) -> io::Result<Line> {
        let fd = new_socket()?;
        setsockopt(&fd, sockopt::SendTimeout, &time_val(patience))?;
        connect_to(std::os::fd::AsRawFd::as_raw_fd(&fd), &UnixAddr::new(path)?)?;
        let line = Line(net::UnixStream::from(fd));
        line.set_patience(Some(patience))?;
        Ok(line)
    }

    /// `None` waits for as long as it takes.
    pub fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        let patience = patience.map(|patience| patience.max(Duration::from_millis(1)));
        self.0.set_read_timeout(patience)?;
        self.0.set_write_timeout(patience)
    }
}

impl Read for Line {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Line {
    /// Whoever is gone is an error and never a signal: in somebody else's process nobody has turned SIGPIPE off.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        #[cfg(not(target_vendor = "apple"))]
        let flags = MsgFlags::MSG_NOSIGNAL;
        // There it is a property of the socket.
        #[cfg(target_vendor = "apple")]
        let flags = MsgFlags::empty();
        Ok(send(std::os::fd::AsRawFd::as_raw_fd(&self.0), bytes, flags)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Makes sure that a directory is there, is ours, and lets nobody else in. A directory of ours that does is closed; a
/// directory that is not ours is an error, because its owner could put anything in our place.
pub fn claim_dir(dir: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir)?;
    // Not what a link leads to: that could be changed after the look.
    let found = fs::symlink_metadata(dir)?;
    if !found.is_dir() || found.uid() != geteuid().as_raw() {
        return Err(io::Error::new(ErrorKind::PermissionDenied, format!("{} is not ours", dir.display())));
    }
    if found.mode() & 0o077 != 0 {
        fs::set_permissions(dir, Permissions::from_mode(0o700))?;
    }
    Ok(())
}

/// Whether somebody else could have put this here. What is not there is nobody's.
pub fn is_ours(path: &Path) -> bool {
    fs::symlink_metadata(path).map_or(true, |found| found.uid() == geteuid().as_raw())
}

/// Where the socket of this id may lie, the best place first: where all that runs is noted, or somewhere short, named by
/// the user, if that is too deep for a socket.
pub fn sockets(dir: &Path, id: &str) -> Vec<PathBuf> {
    let name = format!("outlast-{}", geteuid());
    let mut dirs = vec![dir.to_owned(), std::env::temp_dir().join(&name), Path::new("/tmp").join(&name)];
    dirs.dedup();
    let paths = dirs.into_iter().map(|dir| dir.join(format!("{id}.sock")));
    // One that is not UTF-8 could not be written down for others.
    paths.filter(|path| path.to_str().is_some_and(|text| text.len() <= SOCKET_PATH_MAX)).collect()
}

/// Removes a socket's name, and nothing else that may have come to stand there.
pub fn remove_socket(path: &Path) {
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        // Another reader may have been quicker.
        let _ = fs::remove_file(path);
    }
}

fn listen_at(path: &Path) -> io::Result<net::UnixListener> {
    let fd = new_socket()?;
    // On Linux the name is born with the mode that the socket has by now. Elsewhere it has it a moment later, and
    // until then the directory keeps others away.
    #[cfg(target_os = "linux")]
    nix::sys::stat::fchmod(&fd, nix::sys::stat::Mode::from_bits_truncate(0o600))?;
    bind(std::os::fd::AsRawFd::as_raw_fd(&fd), &UnixAddr::new(path)?)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    listen(&fd, Backlog::new(KNOCKING_MAX)?)?;
    Ok(net::UnixListener::from(fd))
}

/// Closed on exec: children get what they are meant to have and no more.
fn new_socket() -> io::Result<OwnedFd> {
    #[cfg(target_os = "linux")]
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    #[cfg(not(target_os = "linux"))]
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::empty(), None)?;
    fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    #[cfg(target_vendor = "apple")]
    without_signal(&fd)?;
    Ok(fd)
}

#[cfg(target_vendor = "apple")]
#[expect(unsafe_code, reason = "nix does not know this option")]
fn without_signal(fd: &OwnedFd) -> io::Result<()> {
    let (on, length) = (1 as libc::c_int, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the descriptor is ours and open, and the option is read from an int that lives through the call.
    let set = unsafe {
        let fd = std::os::fd::AsRawFd::as_raw_fd(fd);
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_NOSIGPIPE, (&raw const on).cast(), length)
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn is_abandoned(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
        && net::UnixStream::connect(path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

fn time_val(patience: Duration) -> TimeVal {
    TimeVal::microseconds(i64::try_from(patience.as_micros()).unwrap_or(i64::MAX).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deep_directory_has_its_sockets_elsewhere() {
        assert_eq!(sockets(Path::new("/home/me/run"), "py-1")[0], Path::new("/home/me/run/py-1.sock"));
        let deep = PathBuf::from(format!("/home/{}", "deep/".repeat(40)));
        let paths = sockets(&deep, "py-1");
        assert!(!paths.is_empty());
        for path in paths {
            assert!(!path.starts_with(&deep) && path.as_os_str().len() <= SOCKET_PATH_MAX, "{path:?}");
        }
    }
}
