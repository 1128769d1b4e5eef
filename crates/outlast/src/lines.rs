//! Bytes in, whole lines out, without copying them.

use bytes::{Bytes, BytesMut};

/// A longer line is skipped, and its beginning reported.
pub const LINE_MAX: usize = 64 << 20;
/// How much of a line that is too long is kept, to find out whose it is.
const START_KEPT: usize = 4 << 10;
/// Room made for one read.
const READ_ROOM: usize = 64 << 10;
/// What a pipe holds if nobody widened it.
const PIPE_USUAL: usize = 64 << 10;
/// A buffer that once held a long line is given back when it is empty and larger than this.
const BUFFER_KEPT: usize = 256 << 10;

/// A reader's buffer.
#[derive(Debug)]
pub struct Lines {
    buffer: BytesMut,
    /// Bytes already known to hold no line feed.
    scanned: usize,
    /// The rest of a line that is too long is on its way.
    skipping: bool,
    /// How long lines have been of late: room for one is made at once.
    usual: usize,
    max: usize,
    /// A longer line comes in pieces of at most `max` instead.
    in_pieces: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// With its line feed.
    Whole(Bytes),
    /// It was longer than allowed; this is how it began.
    TooLong(Bytes),
}

impl Default for Lines {
    fn default() -> Self {
        Lines::new(LINE_MAX)
    }
}

impl Lines {
    pub fn new(max: usize) -> Lines {
        Lines { buffer: BytesMut::new(), scanned: 0, skipping: false, usual: 0, max, in_pieces: false }
    }

    /// For words that are worth something by themselves: a longer line comes in pieces, and nothing of it is lost.
    pub fn in_pieces(max: usize) -> Lines {
        Lines { in_pieces: true, ..Lines::new(max) }
    }

    /// Where the next read goes: there is always room.
    pub fn room(&mut self) -> &mut BytesMut {
        if self.buffer.is_empty() && self.buffer.capacity() > BUFFER_KEPT.max(2 * self.usual) {
            self.buffer = BytesMut::new();
        }
        if self.buffer.capacity() - self.buffer.len() < READ_ROOM / 2 {
            // A long line doubles the room each time, so that it is moved seldom.
            let wanted = self.usual.saturating_sub(self.buffer.len()).max(self.buffer.len()).max(READ_ROOM);
            self.buffer.reserve(wanted);
        }
        &mut self.buffer
    }

    /// A line is on its way that does not fit an ordinary pipe.
    pub fn is_long(&self) -> bool {
        self.buffer.len() >= PIPE_USUAL
    }

    /// The next line, if it is all there.
    pub fn next_line(&mut self) -> Option<Line> {
        loop {
            let end = memchr::memchr(b'\n', &self.buffer[self.scanned..]);
            if self.in_pieces && end.map_or(self.buffer.len(), |at| self.scanned + at) > self.max {
                // Not within a letter of more than one byte, of which there are four at most.
                let is_letter = |at: &usize| self.buffer[*at] & 0xC0 != 0x80;
                let at = (self.max.saturating_sub(3)..=self.max).rev().find(is_letter).unwrap_or(self.max);
                self.scanned = 0;
                return Some(Line::Whole(self.buffer.split_to(at.max(1)).freeze()));
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
                None if self.buffer.len() > self.max => {
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

    /// What stands at the end without a line feed; it gets one.
    pub fn rest(&mut self) -> Option<Line> {
        if self.buffer.is_empty() || std::mem::take(&mut self.skipping) {
            return None;
        }
        self.scanned = 0;
        let mut line = self.buffer.split();
        line.extend_from_slice(b"\n");
        Some(Line::Whole(line.freeze()))
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
    fn lines_come_whole_however_they_arrive() {
        let mut lines = Lines::new(100);
        assert_eq!(feed(&mut lines, "one\ntw"), [whole("one\n")]);
        assert_eq!(feed(&mut lines, ""), []);
        assert_eq!(feed(&mut lines, "o\n\nthree"), [whole("two\n"), whole("\n")]);
        assert_eq!(lines.rest(), Some(whole("three\n")));
        assert_eq!(lines.rest(), None);
    }

    #[test]
    fn a_line_too_long_comes_in_pieces_where_that_is_wanted() {
        let mut lines = Lines::in_pieces(8);
        assert_eq!(feed(&mut lines, "12345678"), []);
        assert_eq!(feed(&mut lines, "9"), [whole("12345678")]);
        assert_eq!(
            feed(&mut lines, "0\nab\n1234567890123456789"),
            [whole("90\n"), whole("ab\n"), whole("12345678"), whole("90123456")]
        );
        assert_eq!(lines.rest(), Some(whole("789\n")));
        assert_eq!(feed(&mut lines, "1234567ü\n"), [whole("1234567"), whole("ü\n")]);
    }

    #[test]
    fn a_line_too_long_is_reported_once_and_skipped() {
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
