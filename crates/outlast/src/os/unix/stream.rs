//! Bytes in and out: pipes and sockets in the reactor, anything else on a thread.
#![expect(unsafe_code, reason = "reads into spare capacity, borrows descriptors 0 and 1, joins the reactor")]

use std::{
    fs::File,
    io::{self, ErrorKind, IoSlice},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    task::{Context, Poll, Waker, ready},
};

use bytes::BytesMut;
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::{
        socket::{MsgFlags, sendmsg},
        stat::{SFlag, fstat},
        uio::writev,
    },
};
use tokio::io::{Interest, unix::AsyncFd};

use crate::os::threaded::{Reader, Writer};

/// What is read when the caller brought no room at all, as a read of nothing would look like an end.
const ROOM_MIN: usize = 8 * 1024;

/// The most slices the kernel takes at once.
const SLICES_MAX: usize = 1024;

/// Room in a widened pipe, where the system allows it: a long line then passes in a few turns of the loop
/// rather than in dozens.
#[cfg(target_os = "linux")]
const PIPE_ROOM: i32 = 1024 * 1024;

/// Something to read.
#[derive(Debug)]
pub struct Source(From);

#[derive(Debug)]
enum From {
    Reactor(AsyncFd<Stream>),
    Thread(Reader),
}

/// Something to write. Dropping it closes a child's pipe.
#[derive(Debug)]
pub struct Sink(To);

#[derive(Debug)]
enum To {
    Reactor(AsyncFd<Stream>),
    Thread(Writer),
}

impl Source {
    /// Reads into the spare capacity of `buf`, in one system call when there is something; 0 is the end.
    /// Cancel-safe.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut BytesMut) -> Poll<io::Result<usize>> {
        if buf.len() == buf.capacity() {
            buf.reserve(ROOM_MIN);
        }
        let fd = match &mut self.0 {
            From::Reactor(fd) => fd,
            From::Thread(reader) => return reader.poll_read(cx, buf),
        };
        loop {
            let mut readiness = ready!(fd.poll_read_ready(cx))?;
            let room = buf.spare_capacity_mut().len();
            match fd.get_ref().read(buf) {
                Ok(count) => {
                    // Less than there was room for means drained: what comes later, the end included,
                    // raises a new edge, so there is no need to be told EAGAIN.
                    if 0 < count && count < room && !fd.get_ref().is_terminal {
                        readiness.clear_ready();
                    }
                    return Poll::Ready(Ok(count));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => readiness.clear_ready(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl Source {
    /// Long lines have been seen: makes room for them in the pipe.
    pub fn widen(&self) {
        if let From::Reactor(fd) = &self.0 {
            widen(fd.get_ref().fd.as_fd());
        }
    }

    /// What is there at this moment, without asking the reactor, which may not have heard of it yet.
    pub fn read_now(&mut self, buf: &mut BytesMut) -> Option<io::Result<usize>> {
        if buf.len() == buf.capacity() {
            buf.reserve(ROOM_MIN);
        }
        match &mut self.0 {
            From::Reactor(fd) => match fd.get_ref().read(buf) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => None,
                read => Some(read),
            },
            From::Thread(reader) => match reader.poll_read(&mut Context::from_waker(Waker::noop()), buf) {
                Poll::Ready(read) => Some(read),
                Poll::Pending => None,
            },
        }
    }
}

impl Sink {
    /// As [`Source::widen`].
    pub fn widen(&self) {
        if let To::Reactor(fd) = &self.0 {
            widen(fd.get_ref().fd.as_fd());
        }
    }

    /// Writes what fits, in one system call when there is room. What is reported as written is in the
    /// kernel's hands. After `Pending` the next call must begin with the same bytes.
    pub fn poll_write(&mut self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let slices = &slices[..slices.len().min(SLICES_MAX)];
        let fd = match &mut self.0 {
            To::Reactor(fd) => fd,
            To::Thread(writer) => return writer.poll_write(cx, slices),
        };
        loop {
            let mut readiness = ready!(fd.poll_write_ready(cx))?;
            match fd.get_ref().write(slices) {
                Ok(count) => {
                    // Less than was offered means full, and the reader's next step raises a new edge.
                    let offered: usize = slices.iter().map(|slice| slice.len()).sum();
                    if 0 < count && count < offered && !fd.get_ref().is_terminal {
                        readiness.clear_ready();
                    }
                    return Poll::Ready(Ok(count));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => readiness.clear_ready(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

/// Our own stdin, whatever it is.
pub fn stdin() -> io::Result<Source> {
    let (fd, kind) = own(libc::STDIN_FILENO)?;
    Ok(Source(match kind {
        Kind::Other => From::Thread(Reader::begin("outlast-stdin", File::from(fd))?),
        kind => {
            let stream = Stream::borrowed(fd, kind, !is_same_file(libc::STDIN_FILENO, libc::STDOUT_FILENO))?;
            From::Reactor(watch(stream, Interest::READABLE)?)
        }
    }))
}

/// Our own stdout, whatever it is. A reader that went away is an error here, never a signal.
pub fn stdout() -> io::Result<Sink> {
    let (fd, kind) = own(libc::STDOUT_FILENO)?;
    Ok(Sink(match kind {
        Kind::Other => To::Thread(Writer::begin("outlast-stdout", File::from(fd))?),
        kind => To::Reactor(watch(Stream::borrowed(fd, kind, true)?, Interest::WRITABLE)?),
    }))
}

/// Learns that the other ends of our stdin and stdout are gone while we neither read nor write, as with a server
/// that takes nothing more, or before there is anything to say.
#[derive(Debug)]
pub struct Hangups {
    stdin: Option<AsyncFd<Stream>>,
    stdout: Option<AsyncFd<Stream>>,
}

impl Hangups {
    pub fn begin() -> io::Result<Hangups> {
        // Each is watched for the very thing its end cannot do. So nothing that passes wakes us, and a hang-up,
        // which is always told, does.
        Ok(Hangups {
            stdin: hangup_of(libc::STDIN_FILENO, Interest::WRITABLE)?,
            stdout: hangup_of(libc::STDOUT_FILENO, Interest::READABLE)?,
        })
    }

    /// Ready when nobody can write to our stdin any more; what was written before may still be in it.
    pub fn poll_stdin(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &self.stdin {
            Some(fd) => fd.poll_read_ready(cx).map(drop),
            None => Poll::Pending,
        }
    }

    /// Ready when nobody can read our stdout any more.
    pub fn poll_stdout(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &self.stdout {
            Some(fd) => fd.poll_write_ready(cx).map(drop),
            None => Poll::Pending,
        }
    }
}

/// Elsewhere than on Linux the reactor has no such word; there the next read or write tells.
fn hangup_of(number: RawFd, interest: Interest) -> io::Result<Option<AsyncFd<Stream>>> {
    let (fd, kind) = own(number)?;
    if kind == Kind::Other || cfg!(not(target_os = "linux")) {
        return Ok(None);
    }
    watch(Stream { fd, is_socket: kind == Kind::Socket, is_terminal: false, flags_before: None }, interest).map(Some)
}

/// A pipe for a child to read from: our end, and the child's, which blocks as a child expects.
pub(super) fn pipe_to_child() -> io::Result<(Sink, OwnedFd)> {
    let (theirs, ours) = pipe()?;
    let ours = Stream::ours(ours)?;
    Ok((Sink(To::Reactor(watch(ours, Interest::WRITABLE)?)), theirs))
}

/// A pipe for a child to write to.
pub(super) fn pipe_from_child() -> io::Result<(Source, OwnedFd)> {
    let (ours, theirs) = pipe()?;
    let ours = Stream::ours(ours)?;
    Ok((Source(From::Reactor(watch(ours, Interest::READABLE)?)), theirs))
}

/// Ends of terminals that are ours alone: one to read, one to write.
pub(super) fn terminal_stream(read: OwnedFd, write: OwnedFd) -> io::Result<(Source, Sink)> {
    let [mut read, mut write] = [Stream::ours(read)?, Stream::ours(write)?];
    read.is_terminal = true;
    write.is_terminal = true;
    Ok((Source(From::Reactor(watch(read, Interest::READABLE)?)), Sink(To::Reactor(watch(write, Interest::WRITABLE)?))))
}

/// Both ends close on exec: a child gets the three descriptors it is meant to have and no more.
pub(super) fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    #[cfg(target_os = "linux")]
    return Ok(nix::unistd::pipe2(OFlag::O_CLOEXEC)?);
    #[cfg(not(target_os = "linux"))]
    {
        use nix::fcntl::FdFlag;
        let (read, write) = nix::unistd::pipe()?;
        for end in [&read, &write] {
            fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        }
        Ok((read, write))
    }
}

pub(super) fn set_nonblocking(fd: impl AsFd) -> io::Result<OFlag> {
    let before = OFlag::from_bits_retain(fcntl(fd.as_fd(), FcntlArg::F_GETFL)?);
    if !before.contains(OFlag::O_NONBLOCK) {
        fcntl(fd.as_fd(), FcntlArg::F_SETFL(before | OFlag::O_NONBLOCK))?;
    }
    Ok(before)
}

fn watch(stream: Stream, interest: Interest) -> io::Result<AsyncFd<Stream>> {
    // SAFETY: a stream owns its descriptor, never changes it, and keeps it open for as long as it is.
    unsafe { AsyncFd::register_with_interest(stream, interest) }.map_err(|error| error.into_parts().1)
}

fn widen(pipe: BorrowedFd<'_>) {
    // A user has a limit for all pipes together. At the limit the pipe stays as it is, and works; so does a socket.
    #[cfg(target_os = "linux")]
    let _ = fcntl(pipe, FcntlArg::F_SETPIPE_SZ(PIPE_ROOM));
    #[cfg(not(target_os = "linux"))]
    let _ = pipe;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Pipe,
    Socket,
    /// Files, which epoll refuses, and terminals, whose description the shell shares and needs as it is.
    Other,
}

/// A duplicate of one of our standard descriptors, and what it is.
fn own(number: RawFd) -> io::Result<(OwnedFd, Kind)> {
    // SAFETY: std opens /dev/null in place of closed standard descriptors at start, and we never close them.
    let fd = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned()?;
    let kind = match SFlag::from_bits_truncate(fstat(&fd)?.st_mode) & SFlag::S_IFMT {
        SFlag::S_IFIFO => Kind::Pipe,
        SFlag::S_IFSOCK => Kind::Socket,
        _ => Kind::Other,
    };
    Ok((fd, kind))
}

fn is_same_file(one: RawFd, other: RawFd) -> bool {
    // SAFETY: as in `own`.
    let [one, other] = [one, other].map(|number| fstat(unsafe { BorrowedFd::borrow_raw(number) }));
    matches!((one, other), (Ok(one), Ok(other)) if (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino))
}

/// A pipe or socket that never blocks us.
#[derive(Debug)]
struct Stream {
    fd: OwnedFd,
    is_socket: bool,
    /// A terminal hands over a few thousand bytes at a time, whatever else it has.
    is_terminal: bool,
    /// The flags of a description we share with whoever started us, to be put back.
    flags_before: Option<OFlag>,
}

impl Stream {
    fn ours(fd: OwnedFd) -> io::Result<Stream> {
        set_nonblocking(&fd)?;
        Ok(Stream { fd, is_socket: false, is_terminal: false, flags_before: None })
    }

    /// `restores`: false when another of our streams has the same description and outlives this one.
    fn borrowed(fd: OwnedFd, kind: Kind, restores: bool) -> io::Result<Stream> {
        let is_socket = kind == Kind::Socket;
        // On Linux each call on a socket says that it must not block, so the description that we share
        // with others stays as they know it.
        if is_socket && cfg!(target_os = "linux") {
            return Ok(Stream { fd, is_socket, is_terminal: false, flags_before: None });
        }
        let before = set_nonblocking(&fd)?;
        let changed = restores && !before.contains(OFlag::O_NONBLOCK);
        Ok(Stream { fd, is_socket, is_terminal: false, flags_before: changed.then_some(before) })
    }

    fn read(&self, buf: &mut BytesMut) -> io::Result<usize> {
        let room = buf.spare_capacity_mut();
        let fd = self.fd.as_raw_fd();
        // SAFETY: the pointer and length are those of memory we borrow mutably; the kernel only writes there.
        let count = unsafe {
            if self.is_socket {
                libc::recv(fd, room.as_mut_ptr().cast(), room.len(), libc::MSG_DONTWAIT)
            } else {
                libc::read(fd, room.as_mut_ptr().cast(), room.len())
            }
        };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        // SAFETY: the kernel has filled `count` bytes of the spare capacity.
        unsafe { buf.set_len(buf.len() + count) };
        Ok(count)
    }

    fn write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.is_socket {
            return Ok(sendmsg::<()>(self.fd.as_raw_fd(), slices, &[], MsgFlags::MSG_DONTWAIT, None)?);
        }
        Ok(writev(&self.fd, slices)?)
    }
}

impl AsRawFd for Stream {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(before) = self.flags_before {
            // Whoever gave us the description may be gone, and then nobody minds.
            let _ = fcntl(&self.fd, FcntlArg::F_SETFL(before));
        }
    }
}
