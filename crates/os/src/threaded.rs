//! Streams that block a thread: terminals, regular files, and on Windows all of them but the pipes of children.
//! Streams that the reactor can poll are in `stream.rs`.

use std::{
    io::{self, ErrorKind, IoSlice, Read, Write},
    task::{Context, Poll, ready},
    thread,
};

use bytes::{Buf, Bytes, BytesMut};
use tokio::sync::mpsc;

/// The most bytes of one read or write.
const CHUNK_MAX: usize = 64 * 1024;
/// Chunks read ahead. At this bound the thread waits, so that the writer at the other end waits too (backpressure).
const CHUNKS_AHEAD_MAX: usize = 2;

/// Reads on a thread of its own. The thread ends with the stream or with the process: a blocking read cannot be
/// cancelled.
#[derive(Debug)]
pub(super) struct Reader {
    chunks: mpsc::Receiver<io::Result<Bytes>>,
    rest: Bytes,
}

impl Reader {
    pub(super) fn begin(name: &str, mut from: impl Read + Send + 'static) -> io::Result<Reader> {
        let (tell, chunks) = mpsc::channel(CHUNKS_AHEAD_MAX);
        thread::Builder::new().name(name.into()).spawn(move || {
            let mut space = vec![0; CHUNK_MAX];
            loop {
                let chunk = match from.read(&mut space) {
                    Ok(0) => return,
                    Ok(count) => Ok(Bytes::copy_from_slice(&space[..count])),
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(error) => Err(error),
                };
                let is_last = chunk.is_err();
                if tell.blocking_send(chunk).is_err() || is_last {
                    return;
                }
            }
        })?;
        Ok(Reader { chunks, rest: Bytes::new() })
    }

    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut BytesMut) -> Poll<io::Result<usize>> {
        if self.rest.is_empty() {
            match ready!(self.chunks.poll_recv(cx)) {
                Some(chunk) => self.rest = chunk?,
                None => return Poll::Ready(Ok(0)),
            }
        }
        let count = self.rest.len().min(buf.capacity() - buf.len());
        buf.extend_from_slice(&self.rest[..count]);
        self.rest.advance(count);
        Poll::Ready(Ok(count))
    }
}

/// Writes on a thread of its own, one chunk at a time. A chunk is reported as written only after the write: no
/// reported byte is lost if the process exits right after.
#[derive(Debug)]
pub(super) struct Writer {
    chunks: mpsc::Sender<Vec<u8>>,
    results: mpsc::Receiver<io::Result<usize>>,
    is_busy: bool,
}

impl Writer {
    pub(super) fn begin(name: &str, mut to: impl Write + Send + 'static) -> io::Result<Writer> {
        let (chunks, mut work) = mpsc::channel::<Vec<u8>>(1);
        let (tell, results) = mpsc::channel(1);
        thread::Builder::new().name(name.into()).spawn(move || {
            while let Some(chunk) = work.blocking_recv() {
                let result = to.write_all(&chunk).and_then(|()| to.flush()).map(|()| chunk.len());
                if tell.blocking_send(result).is_err() {
                    return;
                }
            }
        })?;
        Ok(Writer { chunks, results, is_busy: false })
    }

    /// A chunk is being written, or its result was not taken yet.
    #[cfg(unix)]
    pub(super) fn is_busy(&self) -> bool {
        self.is_busy
    }

    /// While this is pending, a chunk is being written, so the next call must begin with the same bytes.
    pub(super) fn poll_write(&mut self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        if !self.is_busy {
            let mut chunk = Vec::new();
            for slice in slices {
                let room = CHUNK_MAX - chunk.len();
                chunk.extend_from_slice(&slice[..slice.len().min(room)]);
            }
            if chunk.is_empty() {
                return Poll::Ready(Ok(0));
            }
            if self.chunks.try_send(chunk).is_err() {
                return Poll::Ready(Err(ErrorKind::BrokenPipe.into()));
            }
            self.is_busy = true;
        }
        let result = ready!(self.results.poll_recv(cx)).unwrap_or_else(|| Err(ErrorKind::BrokenPipe.into()));
        self.is_busy = false;
        Poll::Ready(result)
    }
}
