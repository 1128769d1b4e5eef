//! Whether the agent is on the alternate screen, for those who do without the model of it.

const SWITCH: &[u8] = b"\x1b[?1049";

/// Whether what passes has gone to the alternate screen. It is left when an agent dies there.
#[derive(Debug, Default)]
pub struct Alternate {
    pub is_on: bool,
    /// The end of what passed: the sequence may be cut in two.
    tail: Vec<u8>,
}

impl Alternate {
    pub fn pass(&mut self, bytes: &[u8]) {
        let across = SWITCH.len();
        if !self.tail.is_empty() {
            let joint = [&self.tail, &bytes[..bytes.len().min(across)]].concat();
            self.look(&joint);
        }
        self.look(bytes);
        if bytes.len() >= across {
            self.tail.clear();
        }
        keep_last(&mut self.tail, bytes, across);
    }

    fn look(&mut self, bytes: &[u8]) {
        for at in memchr::memmem::find_iter(bytes, SWITCH) {
            match bytes.get(at + SWITCH.len()) {
                Some(b'h') => self.is_on = true,
                Some(b'l') => self.is_on = false,
                _ => {}
            }
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
        for size in 1..on.len() {
            for (bytes, expected) in [(&on[..], true), (&off[..], false)] {
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
