//! The control socket: not on Windows yet. An instance says so once, and all else goes on.

use std::{
    io::{self, ErrorKind, Read, Write},
    path::{Path, PathBuf},
    task::{Context, Poll},
    time::Duration,
};

use bytes::BytesMut;

/// Whether there are control sockets here, or a sentence that says why not.
pub const SOCKETS: Result<(), &str> = Err("there is no control socket on Windows yet");

/// Nothing is bound, so no path is too long.
pub const SOCKET_PATH_MAX: usize = usize::MAX;

/// There are none of these: the types stand here so that all else is the same on every system.
#[derive(Debug)]
pub enum Listener {}

#[derive(Debug)]
pub struct Peer(());

#[derive(Debug)]
pub enum Line {}

impl Listener {
    pub fn bind(_path: &Path) -> io::Result<Listener> {
        Err(not_yet())
    }

    pub fn poll_accept(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<Peer>> {
        match *self {}
    }
}

impl Peer {
    pub fn of(line: Line) -> io::Result<Peer> {
        match line {}
    }

    pub fn is_gone(&self) -> bool {
        true
    }

    pub fn poll_read(&mut self, _cx: &mut Context<'_>, _buffer: &mut BytesMut) -> Poll<io::Result<usize>> {
        Poll::Ready(Err(not_yet()))
    }

    pub fn poll_write(&mut self, _cx: &mut Context<'_>, _bytes: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Err(not_yet()))
    }
}

impl Line {
    pub fn connect(_path: &Path, _patience: Duration) -> io::Result<Line> {
        Err(not_yet())
    }

    pub fn set_patience(&self, _patience: Option<Duration>) -> io::Result<()> {
        match *self {}
    }
}

impl Read for Line {
    fn read(&mut self, _buffer: &mut [u8]) -> io::Result<usize> {
        match *self {}
    }
}

impl Write for Line {
    fn write(&mut self, _bytes: &[u8]) -> io::Result<usize> {
        match *self {}
    }

    fn flush(&mut self) -> io::Result<()> {
        match *self {}
    }
}

pub fn claim_dir(_dir: &Path) -> io::Result<()> {
    Err(not_yet())
}

pub fn short_dirs() -> Vec<PathBuf> {
    Vec::new()
}

pub fn remove_socket(_path: &Path) {}

/// Nothing is registered here, so nobody is asked for.
pub fn born(_pid: u32) -> Option<String> {
    None
}

fn not_yet() -> io::Error {
    io::Error::new(ErrorKind::Unsupported, SOCKETS.err().unwrap_or_default())
}
