//! Lines on their way into a pipe, in order; what the pipe did not take can be had back.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    task::{Context, Poll},
};

use bytes::Bytes;

use crate::os::Sink;

/// Above this the side that fills the outbox is not listened to.
pub const BYTES_HIGH: usize = 1 << 20;
/// A server that does not read must not keep the client from saying so, so its outbox takes more.
pub const SERVER_BYTES_HIGH: usize = 8 << 20;
/// Lines handed over in one system call.
const SLICES_MAX: usize = 64;

#[derive(Debug, Default)]
pub struct Outbox {
    lines: VecDeque<(Bytes, Option<u64>)>,
    /// How much of the first line the pipe has taken.
    taken: usize,
    bytes: usize,
}

impl Outbox {
    pub fn put(&mut self, line: Bytes, mark: Option<u64>) {
        self.bytes += line.len();
        self.lines.push_back((line, mark));
    }

    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// There is room for more.
    pub fn is_below(&self, bytes: usize) -> bool {
        self.bytes < bytes
    }

    pub fn clear(&mut self) {
        *self = Outbox::default();
    }

    /// Writes what the pipe takes. Ready when the outbox is empty, or the pipe refuses for good.
    pub fn poll_flush(&mut self, sink: &mut Sink, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.lines.is_empty() {
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            let mut count = 0;
            for ((line, _), slice) in self.lines.iter().zip(&mut slices) {
                let from = if count == 0 { self.taken } else { 0 };
                *slice = IoSlice::new(&line[from..]);
                count += 1;
            }
            match sink.poll_write(cx, &slices[..count]) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Ready(Ok(written)) => self.took(written),
            }
        }
        Poll::Ready(Ok(()))
    }

    fn took(&mut self, mut written: usize) {
        self.bytes -= written;
        while let Some((line, _)) = self.lines.front() {
            let left = line.len() - self.taken;
            if written < left {
                self.taken += written;
                return;
            }
            written -= left;
            self.taken = 0;
            self.lines.pop_front();
        }
    }

    /// The marked lines of which the pipe did not take the last byte before the line feed: no reader can have made
    /// sense of them.
    pub fn unsent(&mut self) -> Vec<(u64, Bytes)> {
        let taken = std::mem::take(&mut self.taken);
        let lines = std::mem::take(&mut self.lines);
        self.bytes = 0;
        lines
            .into_iter()
            .enumerate()
            .filter(|(index, (line, _))| *index > 0 || taken + 1 < line.len())
            .filter_map(|(_, (line, mark))| Some((mark?, line)))
            .collect()
    }
}
