//! Whether the agent is on the alternate screen, for those who do without the model of it.

const BEGINNING: &[u8] = b"\x1b[?";
/// The private modes that go to the alternate screen.
const MODES: [&[u8]; 3] = [b"47", b"1047", b"1049"];
/// A longer sequence sets no mode that matters here.
const SEQUENCE_MAX: usize = 64;

/// Whether what passes has gone to the alternate screen. It is left when an agent dies there.
#[derive(Debug, Default)]
pub struct Alternate {
    pub is_on: bool,
    /// The end of what passed: the sequence may be cut in two.
    tail: Vec<u8>,
}

impl Alternate {
    pub fn pass(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        if !self.tail.is_empty() {
            // Up to the end of the sequence that was cut.
            let is_inside = |byte: &u8| matches!(byte, b'[' | b'?' | b'0'..=b'9' | b';');
            let end = bytes.iter().position(|byte| !is_inside(byte)).map_or(bytes.len(), |end| end + 1);
            self.tail.extend_from_slice(&bytes[..end]);
            let joint = std::mem::take(&mut self.tail);
            self.look(&joint);
            rest = &bytes[end..];
        }
        self.look(rest);
    }

    fn look(&mut self, bytes: &[u8]) {
        for at in memchr::memmem::find_iter(bytes, BEGINNING) {
            let inside = &bytes[at + BEGINNING.len()..];
            let Some(length) = inside.iter().position(|byte| !matches!(byte, b'0'..=b'9' | b';')) else {
                return self.keep(&bytes[at..]);
            };
            let is_on = match inside[length] {
                b'h' => true,
                b'l' => false,
                _ => continue,
            };
            if inside[..length].split(|byte| *byte == b';').any(|mode| MODES.contains(&mode)) {
                self.is_on = is_on;
            }
        }
        // The beginning itself may be cut.
        if let Some(length) = (1..BEGINNING.len()).rev().find(|length| bytes.ends_with(&BEGINNING[..*length])) {
            self.keep(&bytes[bytes.len() - length..]);
        }
    }

    fn keep(&mut self, tail: &[u8]) {
        if tail.len() <= SEQUENCE_MAX {
            self.tail.extend_from_slice(tail);
        }
    }
}

/// Appends, and forgets all but the last `max`.
pub(super) fn keep_last(kept: &mut Vec<u8>, bytes: &[u8], max: usize) {
    let bytes = &bytes[bytes.len().saturating_sub(max)..];
    let excess = (kept.len() + bytes.len()).saturating_sub(max);
    kept.drain(..excess.min(kept.len()));
    kept.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alternate_screen_is_noticed_however_it_is_cut() {
        let on = b"text\x1b[?1049h more \x1b[?25l and more of it";
        let off = [&on[..], b"\x1b[?1049l\x1b[?25h"].concat();
        let several = b"\x1b[?25l\x1b[?2004;1047;25h and \x1b[\x1b[?1;2c";
        let back = [&several[..], b"\x1b[?47;1l\x1b[?2004h"].concat();
        for size in 1..back.len() {
            let all = [(&on[..], true), (&off[..], false), (&several[..], true), (&back[..], false)];
            for (bytes, expected) in all {
                let mut alternate = Alternate::default();
                for piece in bytes.chunks(size) {
                    alternate.pass(piece);
                }
                assert_eq!(alternate.is_on, expected, "cut by {size}");
            }
        }
    }

    #[test]
    fn the_last_bytes_are_kept() {
        let mut kept = Vec::new();
        for piece in [&b"abc"[..], b"", b"defgh", b"i"] {
            keep_last(&mut kept, piece, 4);
        }
        assert_eq!(kept, b"fghi");
    }
}
