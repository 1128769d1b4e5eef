//! Splits bytes into lines without copying them. It does not read from a pipe itself.

use bytes::{Bytes, BytesMut};
use outlast_core::{redact, saved::Octets};
use serde::{Deserialize, Serialize};

/// A longer line is skipped, and its beginning reported.
pub(crate) const LINE_MAX: usize = 64 << 20;
/// How much of a line over the limit is kept, to find out which request it answers.
const START_KEPT: usize = 4 << 10;
/// Free space for one read.
const READ_ROOM: usize = 64 << 10;
/// The default capacity of a pipe.
const PIPE_USUAL: usize = 64 << 10;
/// A buffer that held a long line is freed when it is empty and larger than this.
const BUFFER_KEPT: usize = 256 << 10;

/// The buffer of a reader.
#[derive(Debug)]
pub(crate) struct Lines {
    buffer: BytesMut,
    /// Bytes that are known to contain no line feed.
    scanned: usize,
    /// The rest of a line over the limit is still to be skipped.
    skipping: bool,
    /// The recent length of lines: space for one is reserved at once.
    usual: usize,
    max: usize,
    /// A longer line is split into pieces of at most `max` instead.
    in_pieces: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// With its line feed.
    Whole(Bytes),
    /// The line was over the limit; this is its beginning.
    TooLong(Bytes),
}

impl Default for Lines {
    fn default() -> Self {
        Lines::new(LINE_MAX)
    }
}

impl Lines {
    pub(crate) fn new(max: usize) -> Lines {
        Lines { buffer: BytesMut::new(), scanned: 0, skipping: false, usual: 0, max, in_pieces: false }
    }

    /// For text such as stderr: a longer line is split, and no part of it is lost. It is not split within a secret, so
    /// some more of it is read before.
    pub(crate) fn in_pieces(max: usize) -> Lines {
        Lines { in_pieces: true, ..Lines::new(max) }
    }

    /// The buffer for the next read; it always has free space.
    pub(crate) fn room(&mut self) -> &mut BytesMut {
        if self.buffer.is_empty() && self.buffer.capacity() > BUFFER_KEPT.max(2 * self.usual) {
            self.buffer = BytesMut::new();
        }
        if self.buffer.capacity() - self.buffer.len() < READ_ROOM / 2 {
            // For a long line the space is doubled each time, so that it is moved rarely.
            let wanted = self.usual.saturating_sub(self.buffer.len()).max(self.buffer.len()).max(READ_ROOM);
            self.buffer.reserve(wanted);
        }
        &mut self.buffer
    }

    /// The current line does not fit into a pipe of default capacity.
    pub(crate) fn is_long(&self) -> bool {
        self.buffer.len() >= PIPE_USUAL
    }

    /// The next line, if it is complete.
    pub(crate) fn next_line(&mut self) -> Option<Line> {
        loop {
            let end = memchr::memchr(b'\n', &self.buffer[self.scanned..]);
            let length = end.map_or(self.buffer.len(), |at| self.scanned + at);
            let is_known = end.is_some() || length > self.max + redact::PIECE_AHEAD;
            if self.in_pieces && length > self.max && is_known {
                let at = redact::piece_end(&self.buffer[..length], self.max);
                self.scanned = 0;
                return Some(Line::Whole(self.buffer.split_to(at).freeze()));
            }
            match end {
                Some(at) => {
                    let line = self.buffer.split_to(self.scanned + at + 1).freeze();
                    self.scanned = 0;
                    self.usual = line.len().max(self.usual - self.usual / 8);
                    if std::mem::take(&mut self.skipping) {
                        continue; // The end of a line that was reported already.
                    }
                    if line.len() > self.max {
                        return Some(Line::TooLong(line.slice(..START_KEPT.min(line.len()))));
                    }
                    return Some(Line::Whole(line));
                }
                None if self.skipping => {
                    self.buffer.clear();
                    self.scanned = 0;
                    return None;
                }
                None if self.buffer.len() > self.max && !self.in_pieces => {
                    let start = Bytes::copy_from_slice(&self.buffer[..START_KEPT.min(self.buffer.len())]);
                    self.buffer = BytesMut::new();
                    self.scanned = 0;
                    self.skipping = true;
                    return Some(Line::TooLong(start));
                }
                None => {
                    self.scanned = self.buffer.len();
                    return None;
                }
            }
        }
    }

    /// The rest at the end without a line feed; a line feed is added.
    pub(crate) fn rest(&mut self) -> Option<Line> {
        if self.buffer.is_empty() || std::mem::take(&mut self.skipping) {
            return None;
        }
        self.scanned = 0;
        let mut line = self.buffer.split();
        line.extend_from_slice(b"\n");
        Some(Line::Whole(line.freeze()))
    }
}

/// A reader's buffer as saved state: lines that were not passed on yet, and the beginning of one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedLines {
    buffer: Octets,
    skipping: bool,
}

impl Lines {
    pub(crate) fn save(&self) -> SavedLines {
        SavedLines { buffer: Octets::of(&self.buffer), skipping: self.skipping }
    }

    /// Continues with the beginning of a line that another program has read.
    pub(crate) fn go_on(self, saved: SavedLines) -> Lines {
        Lines { buffer: saved.buffer.bytes().into(), skipping: saved.skipping, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(lines: &mut Lines, text: &str) -> Vec<Line> {
        lines.room().extend_from_slice(text.as_bytes());
        std::iter::from_fn(|| lines.next_line()).collect()
    }

    fn whole(text: &'static str) -> Line {
        Line::Whole(Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn lines_are_complete_wherever_chunks_are_split() {
        let mut lines = Lines::new(100);
        assert_eq!(feed(&mut lines, "one\ntw"), [whole("one\n")]);
        assert_eq!(feed(&mut lines, ""), []);
        assert_eq!(feed(&mut lines, "o\n\nthree"), [whole("two\n"), whole("\n")]);
        assert_eq!(lines.rest(), Some(whole("three\n")));
        assert_eq!(lines.rest(), None);
    }

    #[test]
    fn a_line_is_completed_after_an_upgrade_in_its_middle() {
        let mut lines = Lines::new(8);
        assert_eq!(feed(&mut lines, "one\ntw"), [whole("one\n")]);
        let mut lines = Lines::new(8).go_on(lines.save());
        assert_eq!(feed(&mut lines, "o\n"), [whole("two\n")]);
        assert_eq!(feed(&mut lines, "123456789"), [Line::TooLong(Bytes::from_static(b"123456789"))]);
        let mut lines = Lines::new(8).go_on(lines.save());
        assert_eq!(feed(&mut lines, "rest\nnext\n"), [whole("next\n")]);
    }

    #[test]
    fn a_line_over_the_limit_is_split_on_request() {
        let mut lines = Lines::in_pieces(8);
        assert_eq!(feed(&mut lines, "123456789"), [], "more may follow");
        assert_eq!(feed(&mut lines, "0\nab\n"), [whole("12345678"), whole("90\n"), whole("ab\n")]);
        assert_eq!(feed(&mut lines, "12345 7890\n"), [whole("12345 "), whole("7890\n")]);
        assert_eq!(feed(&mut lines, "1234567ü\n"), [whole("1234567"), whole("ü\n")]);
        let long = "x".repeat(8 + redact::PIECE_AHEAD);
        assert_eq!(feed(&mut lines, &long), []);
        assert_eq!(feed(&mut lines, "x"), [whole("xxxxxxxx")]);
        assert_eq!(lines.rest(), Some(Line::Whole((long[7..].to_owned() + "\n").into())));
    }

    #[test]
    fn a_line_over_the_limit_is_reported_once_and_skipped() {
        let mut lines = Lines::new(8);
        assert_eq!(feed(&mut lines, "123456789"), [Line::TooLong(Bytes::from_static(b"123456789"))]);
        assert_eq!(feed(&mut lines, "more of it"), []);
        assert_eq!(feed(&mut lines, "end\nnext\n"), [whole("next\n")]);
        assert_eq!(
            feed(&mut lines, "1234567890\nok\n"),
            [Line::TooLong(Bytes::from_static(b"1234567890\n")), whole("ok\n")]
        );
    }
}
