//! The queue of lines for a pipe, in order. Lines that the pipe did not accept can be taken back.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    task::{Context, Poll},
};

use bytes::Bytes;
use outlast_core::saved::Octets;
use outlast_os::Sink;
use serde::{Deserialize, Serialize};

/// Above this the source that fills the outbox is not read.
pub(crate) const BYTES_HIGH: usize = 1 << 20;
/// Lines written in one system call.
const SLICES_MAX: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct Outbox {
    lines: VecDeque<(Bytes, Option<u64>)>,
    /// How many bytes of the first line the pipe has accepted.
    taken: usize,
    bytes: usize,
}

impl Outbox {
    pub(crate) fn put(&mut self, line: Bytes, mark: Option<u64>) {
        self.bytes += line.len();
        self.lines.push_back((line, mark));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// There is room for more.
    pub(crate) fn is_below(&self, bytes: usize) -> bool {
        self.bytes < bytes
    }

    /// How many bytes the pipe has not accepted yet.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn clear(&mut self) {
        *self = Outbox::default();
    }

    /// Writes what the pipe accepts. Ready when the outbox is empty, or the pipe is closed.
    pub(crate) fn poll_flush(&mut self, sink: &mut Sink, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
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

    /// Takes back the marked lines of which no byte was written; the rest is still written.
    pub(crate) fn take_back(&mut self) -> Vec<(u64, Bytes)> {
        let mut taken_back = Vec::new();
        let mut begun = self.taken > 0;
        for (line, mark) in std::mem::take(&mut self.lines) {
            match mark {
                Some(mark) if !begun => {
                    self.bytes -= line.len();
                    taken_back.push((mark, line));
                }
                _ => self.lines.push_back((line, mark)),
            }
            begun = false;
        }
        taken_back
    }

    /// The marked lines whose last byte before the line feed was not written: no reader can have parsed them.
    pub(crate) fn unsent(&mut self) -> Vec<(u64, Bytes)> {
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

/// A queue as saved state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedOutbox {
    lines: Vec<(Octets, Option<u64>)>,
    /// How many bytes of the first line the pipe has accepted.
    taken: usize,
}

impl Outbox {
    pub(crate) fn save(&self) -> SavedOutbox {
        let lines = self.lines.iter().map(|(line, mark)| (Octets::of(line), *mark)).collect();
        SavedOutbox { lines, taken: self.taken }
    }

    pub(crate) fn restore(saved: SavedOutbox) -> Outbox {
        let mut outbox = Outbox::default();
        saved.lines.into_iter().for_each(|(line, mark)| outbox.put(line.bytes(), mark));
        outbox.taken = saved.taken.min(outbox.lines.front().map_or(0, |(line, _)| line.len()));
        outbox.bytes -= outbox.taken;
        outbox
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partly_written_line_is_not_taken_back() {
        let mut outbox = Outbox::default();
        let table = [("one\n", Some(1)), ("two\n", None), ("three\n", Some(3)), ("four\n", Some(4))];
        for (line, mark) in table {
            outbox.put(Bytes::from_static(line.as_bytes()), mark);
        }
        outbox.took(2);
        let marks: Vec<u64> = outbox.take_back().into_iter().map(|(mark, _)| mark).collect();
        assert_eq!((marks, outbox.bytes()), (vec![3, 4], "e\n".len() + "two\n".len()));
        outbox.took(2);
        assert_eq!(outbox.lines.len(), 1, "the unmarked line is still to be written");

        outbox.took(1);
        let saved = outbox.save();
        outbox = Outbox::restore(saved.clone());
        assert_eq!((outbox.save(), outbox.bytes(), outbox.taken), (saved, "wo\n".len(), 1), "another program goes on");

        outbox.put(Bytes::from_static(b"five\n"), Some(5));
        assert_eq!(outbox.take_back().len(), 1, "nothing of it was taken");
    }
}
