//! Byte streams: a child's pipes in the reactor, other files on a thread (`threaded.rs`).
#![expect(unsafe_code, reason = "creates a pipe, and sets which processes inherit which end")]

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
use windows_sys::Win32::{
    Foundation::{HANDLE_FLAG_INHERIT, SetHandleInformation},
    System::{
        Console::{GetStdHandle, STD_ERROR_HANDLE, STD_INPUT_HANDLE, STD_OUTPUT_HANDLE},
        Pipes::CreatePipe,
    },
};

use super::job::check;
use crate::threaded::{Reader, Writer};

/// A readable stream.
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
    /// Does nothing: a pipe keeps the size that it was created with.
    pub fn widen(&self) {}

    /// Reads what is available now.
    pub fn read_now(&mut self, buf: &mut BytesMut) -> Option<io::Result<usize>> {
        match self.poll_read(&mut Context::from_waker(std::task::Waker::noop()), buf) {
            Poll::Ready(read) => Some(read),
            Poll::Pending => None,
        }
    }
}

/// A writable stream. Dropping it closes a child's pipe.
#[derive(Debug)]
pub struct Sink(pub(super) To);

#[derive(Debug)]
pub(super) enum To {
    Child(ChildStdin),
    Thread(Writer),
}

impl Sink {
    /// Like [`Source::widen`].
    pub fn widen(&self) {}

    /// Writes what fits. After `Pending` the next call must begin with the same bytes.
    pub fn poll_write(&mut self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match &mut self.0 {
            To::Child(stdin) => Pin::new(stdin).poll_write_vectored(cx, slices),
            To::Thread(writer) => writer.poll_write(cx, slices),
        }
    }
}

/// The stdin of this process, of any file type.
pub fn stdin() -> io::Result<Source> {
    Ok(Source(From::Thread(Reader::begin("outlast-stdin", io::stdin())?)))
}

/// The stdout of this process, of any file type.
pub fn stdout() -> io::Result<Sink> {
    Ok(Sink(To::Thread(Writer::begin("outlast-stdout", io::stdout())?)))
}

/// Reports nothing on Windows: the next read or write, on its thread, notices a hangup.
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
    // SAFETY: the call returns two new handles without another owner.
    unsafe {
        check(CreatePipe(&raw mut read, &raw mut write, ptr::null(), 0))?;
        Ok((File::from_raw_handle(read), File::from_raw_handle(write)))
    }
}

/// Makes the standard handles of outlast not inheritable: a process that reads outlast's stdout to its end would
/// otherwise wait for outlast's children too.
pub(super) fn keep_own_streams() {
    for stream in [STD_INPUT_HANDLE, STD_OUTPUT_HANDLE, STD_ERROR_HANDLE] {
        // SAFETY: the handle belongs to the process; an invalid handle is an error, and then there is nothing to
        // change.
        unsafe { SetHandleInformation(GetStdHandle(stream), HANDLE_FLAG_INHERIT, 0) };
    }
}
