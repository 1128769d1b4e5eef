//! Byte streams: pipes and sockets in the reactor, other files on a thread (`threaded.rs`).
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
        socket::{MsgFlags, Shutdown, sendmsg, shutdown},
        stat::{SFlag, fstat},
        uio::writev,
    },
};
use tokio::io::{Interest, unix::AsyncFd};

use super::handover::{Handover, Received};
use crate::threaded::{Reader, Writer};

/// The buffer space that is reserved if the caller's buffer is full: a read of 0 bytes would look like the end.
const ROOM_MIN: usize = 8 * 1024;

/// The most slices that the kernel accepts in one call.
const SLICES_MAX: usize = 1024;

/// The size of an enlarged pipe, where the system allows it: a long line then needs a few iterations of the loop
/// instead of dozens.
#[cfg(target_os = "linux")]
const PIPE_ROOM: i32 = 1024 * 1024;

/// A readable stream.
#[derive(Debug)]
pub struct Source(From);

#[derive(Debug)]
enum From {
    Reactor(AsyncFd<Stream>),
    Thread(Reader),
}

/// A writable stream. Dropping it closes a child's pipe.
#[derive(Debug)]
pub struct Sink(To);

#[derive(Debug)]
enum To {
    Reactor(AsyncFd<Stream>),
    Thread(Writer),
}

impl Source {
    /// Reads into the spare capacity of `buf`, with one system call when bytes are available; 0 is the end.
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
                    // A short read means that the pipe is empty: later bytes and the end cause a new edge, so no
                    // further read has to return EAGAIN.
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
    /// Keeps the descriptor for the next program. `None` if a thread reads it: what that thread has read would be lost.
    pub fn keep(&self, handover: &mut Handover) -> Option<i32> {
        match &self.0 {
            From::Reactor(fd) => Some(handover.keep(fd.get_ref().fd.as_fd())),
            From::Thread(_) => None,
        }
    }

    /// A child's pipe or terminal that the last program kept.
    pub fn restore(received: &mut Received, number: i32) -> io::Result<Source> {
        Ok(Source(From::Reactor(watch(Stream::restored(received.take(number)?)?, Interest::READABLE)?)))
    }

    /// A thread reads it: a file or a terminal.
    pub fn is_threaded(&self) -> bool {
        matches!(self.0, From::Thread(_))
    }

    /// Enlarges the pipe. Called after long lines have been seen.
    pub fn widen(&self) {
        if let From::Reactor(fd) = &self.0 {
            widen(fd.get_ref().fd.as_fd());
        }
    }

    /// Reads what is available now, without the reactor, which may not have the event yet.
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
    /// Like [`Source::keep`].
    pub fn keep(&self, handover: &mut Handover) -> Option<i32> {
        match &self.0 {
            To::Reactor(fd) => Some(handover.keep(fd.get_ref().fd.as_fd())),
            To::Thread(_) => None,
        }
    }

    /// Like [`Source::restore`].
    pub fn restore(received: &mut Received, number: i32) -> io::Result<Sink> {
        Ok(Sink(To::Reactor(watch(Stream::restored(received.take(number)?)?, Interest::WRITABLE)?)))
    }

    /// The writing half of a connection that the last program kept: dropping it ends the input of the other side.
    pub fn restore_half(received: &mut Received, number: i32) -> io::Result<Sink> {
        let mut stream = Stream::restored(received.take(number)?)?;
        stream.is_writing_half = true;
        Ok(Sink(To::Reactor(watch(stream, Interest::WRITABLE)?)))
    }

    /// Like [`Source::is_threaded`].
    pub fn is_threaded(&self) -> bool {
        matches!(self.0, To::Thread(_))
    }

    /// A thread is writing: another program would not know how much of it was written.
    pub fn is_writing(&self) -> bool {
        matches!(&self.0, To::Thread(writer) if writer.is_busy())
    }

    /// Like [`Source::widen`].
    pub fn widen(&self) {
        if let To::Reactor(fd) = &self.0 {
            widen(fd.get_ref().fd.as_fd());
        }
    }

    /// Writes what fits, with one system call when there is room. Bytes reported as written are in the kernel. After
    /// `Pending` the next call must begin with the same bytes.
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
                    // A short write means that the pipe is full, and the next read at the other end causes a new
                    // edge.
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

/// The stdin of this process, of any file type.
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

/// The stdout of this process, of any file type. A closed reader is an error here, never a signal.
pub fn stdout() -> io::Result<Sink> {
    let (fd, kind) = own(libc::STDOUT_FILENO)?;
    Ok(Sink(match kind {
        Kind::Other => To::Thread(Writer::begin("outlast-stdout", File::from(fd))?),
        kind => To::Reactor(watch(Stream::borrowed(fd, kind, true)?, Interest::WRITABLE)?),
    }))
}

/// Reports that the other ends of stdin and stdout are closed while outlast neither reads nor writes, for example
/// while a server accepts no more input.
#[derive(Debug)]
pub struct Hangups {
    stdin: Option<AsyncFd<Stream>>,
    stdout: Option<AsyncFd<Stream>>,
}

impl Hangups {
    pub fn begin() -> io::Result<Hangups> {
        // Each descriptor is watched for the direction that its end of a pipe does not have. So data causes no
        // wake-up, and a hangup, which epoll always reports, does.
        Ok(Hangups {
            stdin: hangup_of(libc::STDIN_FILENO, Interest::WRITABLE)?,
            stdout: hangup_of(libc::STDOUT_FILENO, Interest::READABLE)?,
        })
    }

    /// Ready when all writers of stdin are gone; bytes written before may still be in the pipe.
    pub fn poll_stdin(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &self.stdin {
            Some(fd) => fd.poll_read_ready(cx).map(drop),
            None => Poll::Pending,
        }
    }

    /// Ready when all readers of stdout are gone.
    pub fn poll_stdout(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &self.stdout {
            Some(fd) => fd.poll_write_ready(cx).map(drop),
            None => Poll::Pending,
        }
    }
}

/// On other systems than Linux the reactor does not report hangups; the next read or write does.
fn hangup_of(number: RawFd, interest: Interest) -> io::Result<Option<AsyncFd<Stream>>> {
    let (fd, kind) = own(number)?;
    if kind == Kind::Other || cfg!(not(target_os = "linux")) {
        return Ok(None);
    }
    let stream =
        Stream { fd, is_socket: kind == Kind::Socket, is_terminal: false, flags_before: None, is_writing_half: false };
    watch(stream, interest).map(Some)
}

/// A pipe that a child reads from: outlast's end, and the child's end, which is blocking as a child expects.
pub(super) fn pipe_to_child() -> io::Result<(Sink, OwnedFd)> {
    let (theirs, ours) = pipe()?;
    let ours = Stream::ours(ours)?;
    Ok((Sink(To::Reactor(watch(ours, Interest::WRITABLE)?)), theirs))
}

/// A pipe that a child writes to.
pub(super) fn pipe_from_child() -> io::Result<(Source, OwnedFd)> {
    let (ours, theirs) = pipe()?;
    let ours = Stream::ours(ours)?;
    Ok((Source(From::Reactor(watch(ours, Interest::READABLE)?)), theirs))
}

/// A connected socket as two streams.
pub(super) fn socket_streams(socket: OwnedFd) -> io::Result<(Source, Sink)> {
    let [mut source, mut sink] = [Stream::ours(socket.try_clone()?)?, Stream::ours(socket)?];
    source.is_socket = true;
    (sink.is_socket, sink.is_writing_half) = (true, true);
    Ok((Source(From::Reactor(watch(source, Interest::READABLE)?)), Sink(To::Reactor(watch(sink, Interest::WRITABLE)?))))
}

/// Two ends of one connection within this process.
pub fn stream_pair() -> io::Result<[(Source, Sink); 2]> {
    let (one, other) = std::os::unix::net::UnixStream::pair()?;
    Ok([socket_streams(one.into())?, socket_streams(other.into())?])
}

/// The ends of terminals that are not shared with other processes: one to read, one to write.
pub(super) fn terminal_stream(read: OwnedFd, write: OwnedFd) -> io::Result<(Source, Sink)> {
    let [mut read, mut write] = [Stream::ours(read)?, Stream::ours(write)?];
    read.is_terminal = true;
    write.is_terminal = true;
    Ok((Source(From::Reactor(watch(read, Interest::READABLE)?)), Sink(To::Reactor(watch(write, Interest::WRITABLE)?))))
}

/// Both ends close on exec: a child gets its three descriptors and no others.
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
    // SAFETY: a stream owns its descriptor, never changes it, and keeps it open until it is dropped.
    unsafe { AsyncFd::register_with_interest(stream, interest) }.map_err(|error| error.into_parts().1)
}

fn widen(pipe: BorrowedFd<'_>) {
    // A user has a limit for all pipes together. At the limit the pipe keeps its size and works; a socket stays as it
    // is, too.
    #[cfg(target_os = "linux")]
    let _ = fcntl(pipe, FcntlArg::F_SETPIPE_SZ(PIPE_ROOM));
    #[cfg(not(target_os = "linux"))]
    let _ = pipe;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Pipe,
    Socket,
    /// Files, which epoll refuses, and terminals, whose open file description is shared with the shell and must not
    /// change.
    Other,
}

/// A duplicate of a standard descriptor, and its type.
fn own(number: RawFd) -> io::Result<(OwnedFd, Kind)> {
    // SAFETY: std opens /dev/null in place of closed standard descriptors at start, and outlast never closes them.
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

/// A nonblocking pipe or socket.
#[derive(Debug)]
struct Stream {
    fd: OwnedFd,
    is_socket: bool,
    /// A terminal returns a few thousand bytes at a time, even if more are available.
    is_terminal: bool,
    /// The original flags of an open file description that is shared with the parent process; restored on drop.
    flags_before: Option<OFlag>,
    /// The writing half of a socket: dropping it ends the input of the other side.
    is_writing_half: bool,
}

impl Stream {
    fn ours(fd: OwnedFd) -> io::Result<Stream> {
        set_nonblocking(&fd)?;
        Ok(Stream { fd, is_socket: false, is_terminal: false, flags_before: None, is_writing_half: false })
    }

    fn restored(fd: OwnedFd) -> io::Result<Stream> {
        let mut stream = Stream::ours(fd)?;
        stream.is_terminal = nix::unistd::isatty(&stream.fd).unwrap_or(false);
        let mode = SFlag::from_bits_truncate(fstat(&stream.fd)?.st_mode) & SFlag::S_IFMT;
        stream.is_socket = mode == SFlag::S_IFSOCK;
        Ok(stream)
    }

    /// `restores` is false if another stream has the same open file description and is dropped later.
    fn borrowed(fd: OwnedFd, kind: Kind, restores: bool) -> io::Result<Stream> {
        let is_socket = kind == Kind::Socket;
        // On Linux each call on a socket passes MSG_DONTWAIT, so the flags of the shared open file description stay
        // as they are.
        if is_socket && cfg!(target_os = "linux") {
            return Ok(Stream { fd, is_socket, is_terminal: false, flags_before: None, is_writing_half: false });
        }
        let before = set_nonblocking(&fd)?;
        let changed = restores && !before.contains(OFlag::O_NONBLOCK);
        let flags_before = changed.then_some(before);
        Ok(Stream { fd, is_socket, is_terminal: false, flags_before, is_writing_half: false })
    }

    fn read(&self, buf: &mut BytesMut) -> io::Result<usize> {
        let room = buf.spare_capacity_mut();
        let fd = self.fd.as_raw_fd();
        // SAFETY: the pointer and length describe mutably borrowed memory; the kernel only writes there.
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
        if self.is_writing_half {
            // The other side may be gone already.
            let _ = shutdown(self.fd.as_raw_fd(), Shutdown::Write);
        }
        if let Some(before) = self.flags_before {
            // The process that shares the description may have exited; then the flags do not matter.
            let _ = fcntl(&self.fd, FcntlArg::F_SETFL(before));
        }
    }
}
