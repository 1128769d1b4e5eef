//! The control socket: an asynchronous listener for the server, and a blocking stream with a timeout for clients. The
//! messages are defined in the control crate.

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
#[cfg(target_os = "linux")]
use nix::sys::socket::getsockopt;
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

use super::{
    handover::{Handover, Received},
    stream::{Sink, Source, socket_streams},
};

/// The longest path of a socket on every supported Unix: macOS has room for 104 bytes, the last of them zero.
const SOCKET_PATH_MAX: usize = 103;

/// The backlog of connections that are not accepted yet. A further client gets an error at once, or waits until its
/// timeout.
const KNOCKING_MAX: i32 = 128;

/// Accepts only processes of the same user. Dropping it removes the socket file.
#[derive(Debug)]
pub struct Listener {
    listener: UnixListener,
    path: PathBuf,
}

impl Listener {
    /// Closes the directory to other users. A socket file whose process was killed is replaced; if a process still
    /// listens on it, the error is `AddrInUse`.
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

    /// Keeps the socket for the next program; its file stays.
    pub fn keep(&self, handover: &mut Handover) -> i32 {
        handover.keep(self.listener.as_fd())
    }

    /// The socket that the last program kept, at the same path.
    pub fn restore(received: &mut Received, number: i32, path: &Path) -> io::Result<Listener> {
        let listener = net::UnixListener::from(received.take(number)?);
        listener.set_nonblocking(true)?;
        Ok(Listener { listener: UnixListener::from_std(listener)?, path: path.to_owned() })
    }

    /// The next connection from a process of the same user; others are closed. Makes no system call while no client
    /// connects.
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
        // A process that cleans up abandoned sockets may have removed it already.
        let _ = fs::remove_file(&self.path);
    }
}

/// A client that has connected, or a server that outlast has connected to.
#[derive(Debug)]
pub struct Peer(UnixStream);

impl Peer {
    pub fn keep(&self, handover: &mut Handover) -> i32 {
        handover.keep(self.0.as_fd())
    }

    /// A connection that the last program kept.
    pub fn restore(received: &mut Received, number: i32) -> io::Result<Peer> {
        let stream = net::UnixStream::from(received.take(number)?);
        stream.set_nonblocking(true)?;
        Ok(Peer(UnixStream::from_std(stream)?))
    }

    /// Registers a connection with the current runtime. The timeout applied to connecting only.
    pub fn of(line: BlockingStream) -> io::Result<Peer> {
        line.0.set_nonblocking(true)?;
        Ok(Peer(UnixStream::from_std(line.0)?))
    }

    /// The peer has closed both directions, and reads nothing any more.
    pub fn is_gone(&self) -> bool {
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::empty())];
        let gone = PollFlags::POLLHUP | PollFlags::POLLERR;
        poll(&mut fds, PollTimeout::ZERO).is_ok() && fds[0].revents().is_some_and(|found| found.intersects(gone))
    }

    /// Appends the available bytes. Ready with 0 at the end of the stream.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut BytesMut) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            match self.0.try_read_buf(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => return Poll::Ready(other),
            }
        }
    }

    /// Writes as much as the kernel accepts at once.
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

impl Peer {
    /// The two directions of the connection. Dropping the sink ends the input of the other side.
    pub fn into_streams(self) -> io::Result<(Source, Sink)> {
        socket_streams(self.0.into_std()?.into())
    }
}

/// A blocking connection to a control socket. Reads and writes fail with `WouldBlock` after the timeout.
#[derive(Debug)]
pub struct BlockingStream(pub(super) net::UnixStream);

impl BlockingStream {
    /// The timeout applies to connecting too: the backlog of a hung server may be full.
    pub fn connect(path: &Path, patience: Duration) -> io::Result<BlockingStream> {
        let fd = new_socket()?;
        setsockopt(&fd, sockopt::SendTimeout, &time_val(patience))?;
        connect_to(std::os::fd::AsRawFd::as_raw_fd(&fd), &UnixAddr::new(path)?)?;
        let line = BlockingStream(net::UnixStream::from(fd));
        line.set_patience(Some(patience))?;
        Ok(line)
    }

    /// Whether a process of this user, or of the administrator, is at the other end.
    pub fn is_own_user(&self) -> bool {
        #[cfg(target_os = "linux")]
        let uid = getsockopt(&self.0, sockopt::PeerCredentials).map(|peer| peer.uid());
        #[cfg(not(target_os = "linux"))]
        let uid = nix::unistd::getpeereid(&self.0).map(|(uid, _)| uid.as_raw());
        uid.is_ok_and(|uid| uid == geteuid().as_raw() || uid == 0)
    }

    /// `None` waits without a limit.
    pub fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        let patience = patience.map(|patience| patience.max(Duration::from_millis(1)));
        self.0.set_read_timeout(patience)?;
        self.0.set_write_timeout(patience)
    }
}

impl Read for BlockingStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for BlockingStream {
    /// A closed peer is an error and never a SIGPIPE: a program that uses this as a library may not have disabled the
    /// signal.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        #[cfg(not(target_vendor = "apple"))]
        let flags = MsgFlags::MSG_NOSIGNAL;
        // On Apple systems this is an option of the socket.
        #[cfg(target_vendor = "apple")]
        let flags = MsgFlags::empty();
        Ok(send(std::os::fd::AsRawFd::as_raw_fd(&self.0), bytes, flags)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Creates a directory if needed, and closes it to other users. A directory of another user is an error, because its
/// owner could replace anything in it.
pub fn claim_dir(dir: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir)?;
    // A symbolic link is not followed: its target could be changed after the check.
    let found = fs::symlink_metadata(dir)?;
    if !found.is_dir() || found.uid() != geteuid().as_raw() {
        return Err(io::Error::new(ErrorKind::PermissionDenied, format!("{} belongs to another user", dir.display())));
    }
    if found.mode() & 0o077 != 0 {
        fs::set_permissions(dir, Permissions::from_mode(0o700))?;
    }
    Ok(())
}

/// True if this user owns the file, or if there is none.
pub fn is_ours(path: &Path) -> bool {
    fs::symlink_metadata(path).map_or(true, |found| found.uid() == geteuid().as_raw())
}

/// Possible paths of the socket of this id, the best first: in the registry directory, or, if that path is too long
/// for a socket, in a short directory named after the user.
pub fn sockets(dir: &Path, id: &str) -> Vec<PathBuf> {
    let name = format!("outlast-{}", geteuid());
    let mut dirs = vec![dir.to_owned(), std::env::temp_dir().join(&name), Path::new("/tmp").join(&name)];
    dirs.dedup();
    let paths = dirs.into_iter().map(|dir| dir.join(format!("{id}.sock")));
    // A path that is not UTF-8 could not be written to the registry.
    paths.filter(|path| path.to_str().is_some_and(|text| text.len() <= SOCKET_PATH_MAX)).collect()
}

/// Removes a socket file. Any other kind of file at this path stays.
pub fn remove_socket(path: &Path) {
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        // Another process may have removed it already.
        let _ = fs::remove_file(path);
    }
}

fn listen_at(path: &Path) -> io::Result<net::UnixListener> {
    let fd = new_socket()?;
    // On Linux the socket file is created with the mode that the socket has here. On other systems the mode is set
    // after the creation; until then the permissions of the directory protect it.
    #[cfg(target_os = "linux")]
    nix::sys::stat::fchmod(&fd, nix::sys::stat::Mode::from_bits_truncate(0o600))?;
    bind(std::os::fd::AsRawFd::as_raw_fd(&fd), &UnixAddr::new(path)?)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    listen(&fd, Backlog::new(KNOCKING_MAX)?)?;
    Ok(net::UnixListener::from(fd))
}

/// Closed on exec, so that children do not inherit it.
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
    // SAFETY: the descriptor is open, and the option is read from an int that outlives the call.
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
    fn sockets_of_a_deep_directory_are_created_elsewhere() {
        assert_eq!(sockets(Path::new("/home/me/run"), "py-1")[0], Path::new("/home/me/run/py-1.sock"));
        let deep = PathBuf::from(format!("/home/{}", "deep/".repeat(40)));
        let paths = sockets(&deep, "py-1");
        assert!(!paths.is_empty());
        for path in paths {
            assert!(!path.starts_with(&deep) && path.as_os_str().len() <= SOCKET_PATH_MAX, "{path:?}");
        }
    }
}
