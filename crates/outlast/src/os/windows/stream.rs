//! Bytes in and out: a child's pipes in the reactor, anything else on a thread.
#![expect(unsafe_code, reason = "makes a pipe")]

use std::{
    fs::File,
    future::Future,
    io::{self, IoSlice},
    os::windows::io::FromRawHandle,
    pin::{Pin, pin},
    ptr,
    task::{Context, Poll},
};

use bytes::BytesMut;
use tokio::{
    io::{AsyncReadExt, AsyncWrite},
    process::{ChildStderr, ChildStdin, ChildStdout},
};
use windows_sys::Win32::System::Pipes::CreatePipe;

use super::job::check;
use crate::os::threaded::{Reader, Writer};

/// Something to read.
#[derive(Debug)]
pub struct Source(pub(super) From);

#[derive(Debug)]
pub(super) enum From {
    Stdout(ChildStdout),
    Stderr(ChildStderr),
    Thread(Reader),
}

impl Source {
    /// Reads into the spare capacity of `buf`; 0 is the end. Cancel-safe.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut BytesMut) -> Poll<io::Result<usize>> {
        if buf.len() == buf.capacity() {
            buf.reserve(8 * 1024);
        }
        match &mut self.0 {
            From::Stdout(stdout) => pin!(stdout.read_buf(buf)).poll(cx),
            From::Stderr(stderr) => pin!(stderr.read_buf(buf)).poll(cx),
            From::Thread(reader) => reader.poll_read(cx, buf),
        }
    }
}

impl Source {
    /// Pipes have the room they were made with.
    pub fn widen(&self) {}

    /// What is there at this moment.
    pub fn read_now(&mut self, buf: &mut BytesMut) -> Option<io::Result<usize>> {
        match self.poll_read(&mut Context::from_waker(std::task::Waker::noop()), buf) {
            Poll::Ready(read) => Some(read),
            Poll::Pending => None,
        }
    }
}

/// Something to write. Dropping it closes a child's pipe.
#[derive(Debug)]
pub struct Sink(pub(super) To);

#[derive(Debug)]
pub(super) enum To {
    Child(ChildStdin),
    Thread(Writer),
}

impl Sink {
    /// As [`Source::widen`].
    pub fn widen(&self) {}

    /// Writes what fits. After `Pending` the next call must begin with the same bytes.
    pub fn poll_write(&mut self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match &mut self.0 {
            To::Child(stdin) => Pin::new(stdin).poll_write_vectored(cx, slices),
            To::Thread(writer) => writer.poll_write(cx, slices),
        }
    }
}

/// Our own stdin, whatever it is.
pub fn stdin() -> io::Result<Source> {
    Ok(Source(From::Thread(Reader::begin("outlast-stdin", io::stdin())?)))
}

/// Our own stdout, whatever it is.
pub fn stdout() -> io::Result<Sink> {
    Ok(Sink(To::Thread(Writer::begin("outlast-stdout", io::stdout())?)))
}

/// Here a hang-up is learned of by the next read or write, on the threads that do them.
#[derive(Debug)]
pub struct Hangups;

impl Hangups {
    pub fn begin() -> io::Result<Hangups> {
        Ok(Hangups)
    }

    pub fn poll_stdin(&mut self, _cx: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }

    pub fn poll_stdout(&mut self, _cx: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}

pub(super) fn pipe() -> io::Result<(File, File)> {
    let (mut read, mut write) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the call fills in two new handles, which nobody else owns.
    unsafe {
        check(CreatePipe(&raw mut read, &raw mut write, ptr::null(), 0))?;
        Ok((File::from_raw_handle(read), File::from_raw_handle(write)))
    }
}
