//! Whether a program's output has switched its terminal to the alternate screen, for drivers that keep no model of the screen.

use serde::{Deserialize, Serialize};

use crate::{
    saved::Octets,
    vt::{self, Token, Unfinished},
};

const PRIVATE_MODE: &[u8] = b"\x1b[?";
/// The private modes that switch to the alternate screen.
const MODES: [&[u8]; 3] = [b"47", b"1047", b"1049"];
/// A longer sequence sets no mode that matters here.
const SEQUENCE_MAX: usize = 64;

/// Follows the output of one program. It is replaced when the program exits, which may happen on the alternate screen.
#[derive(Debug, Default)]
pub struct AlternateScreen {
    pub is_on: bool,
    /// A sequence may be cut between two reads.
    unfinished: Unfinished,
}

/// The same as saved state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    is_on: bool,
    unfinished: Octets,
}

impl AlternateScreen {
    pub fn save(&self) -> Saved {
        Saved { is_on: self.is_on, unfinished: Octets::of(self.unfinished.bytes()) }
    }

    pub fn restore(saved: Saved) -> AlternateScreen {
        let mut unfinished = Unfinished::default();
        unfinished.pass(&saved.unfinished.bytes());
        AlternateScreen { is_on: saved.is_on, unfinished }
    }

    pub fn pass(&mut self, bytes: &[u8]) {
        let before = self.unfinished.bytes();
        if before.is_empty() || before.len() > SEQUENCE_MAX {
            self.find_modes(bytes);
        } else {
            // Only the beginning completes the sequence that was cut.
            let end = bytes.len().min(SEQUENCE_MAX);
            let joint = [before, &bytes[..end]].concat();
            self.find_modes(&joint);
            self.find_modes(bytes);
        }
        self.unfinished.pass(bytes);
    }

    fn find_modes(&mut self, bytes: &[u8]) {
        for at in memchr::memmem::find_iter(bytes, PRIVATE_MODE) {
            let Some((Token::Control { parameters, end }, _)) = vt::output(&bytes[at..]) else { continue };
            let is_on = match end {
                b'h' => true,
                b'l' => false,
                _ => continue,
            };
            if parameters[1..].split(|byte| *byte == b';').any(|mode| MODES.contains(&mode)) {
                self.is_on = is_on;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alternate_screen_is_noticed_in_reads_of_any_size() {
        let on = b"text\x1b[?1049h more \x1b[?25l and more of it";
        let off = [&on[..], b"\x1b[?1049l\x1b[?25h"].concat();
        let several = b"\x1b[?25l\x1b[?2004;1047;25h and \x1b[\x1b[?1;2c";
        let back = [&several[..], b"\x1b[?47;1l\x1b[?2004h"].concat();
        for size in 1..back.len() {
            let all = [(&on[..], true), (&off[..], false), (&several[..], true), (&back[..], false)];
            for (bytes, expected) in all {
                let mut alternate = AlternateScreen::default();
                for piece in bytes.chunks(size) {
                    alternate.pass(piece);
                }
                assert_eq!(alternate.is_on, expected, "read by {size}");
            }
        }
    }
}
