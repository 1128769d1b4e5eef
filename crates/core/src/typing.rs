//! What a person typed last, to know whose wish it was that the agent ended.
//!
//! Not all that comes from a terminal is typing: it answers questions, and reports focus and mouse by itself.

use std::time::{Duration, Instant};

use crate::session::LastInput;

/// An agent that was sent away is gone within this; one that ends later ends for a reason of its own.
pub const FAREWELL_HOLDS: Duration = Duration::from_secs(30);
/// A longer line is no word for leaving; what is beyond is not kept.
const LINE_MAX: usize = 64;
/// A longer sequence is none; what follows is typing again.
const SEQUENCE_MAX: usize = 256;

const CTRL_C: u8 = 0x03;
const CTRL_D: u8 = 0x04;
/// Takes the line back.
const CTRL_U: u8 = 0x15;
const ESCAPE: u8 = 0x1b;

#[derive(Clone, Debug)]
pub struct Typing {
    /// What an agent understands as a wish to leave, when Enter follows.
    words: &'static [&'static str],
    line: Vec<u8>,
    sequence: Sequence,
    farewell: Option<Instant>,
}

#[derive(Clone, Debug)]
enum Sequence {
    None,
    Escape,
    /// `ESC [`, and what came since.
    Control(Vec<u8>),
    /// `ESC ]`, `ESC P` and their like, up to their terminator: only a terminal says these.
    Text {
        length: usize,
        escape: bool,
    },
}

impl Typing {
    pub fn new(words: &'static [&'static str]) -> Typing {
        Typing { words, line: Vec::new(), sequence: Sequence::None, farewell: None }
    }

    /// These bytes came from the person's terminal.
    pub fn typed(&mut self, bytes: &[u8], now: Instant) {
        for &byte in bytes {
            self.byte(byte, now);
        }
    }

    /// Somebody else put something in, or a new agent is there: no farewell is pending.
    pub fn interrupted(&mut self) {
        self.farewell = None;
        self.line.clear();
    }

    pub fn last(&self, now: Instant) -> LastInput {
        match self.farewell {
            Some(at) if now.saturating_duration_since(at) <= FAREWELL_HOLDS => LastInput::Farewell,
            _ => LastInput::Other,
        }
    }

    fn byte(&mut self, byte: u8, now: Instant) {
        match &mut self.sequence {
            Sequence::None if byte == ESCAPE => self.sequence = Sequence::Escape,
            Sequence::None => self.key(byte, now),
            Sequence::Escape => match byte {
                b'[' => self.sequence = Sequence::Control(Vec::new()),
                b']' | b'P' | b'_' | b'^' | b'X' => self.sequence = Sequence::Text { length: 0, escape: false },
                ESCAPE => {}
                // Alt and a key, or the Escape key and then another.
                byte => {
                    self.sequence = Sequence::None;
                    self.key(byte, now);
                }
            },
            Sequence::Control(parameters) => match byte {
                0x40..=0x7e => {
                    let parameters = std::mem::take(parameters);
                    self.sequence = Sequence::None;
                    self.control(&parameters, byte, now);
                }
                _ if parameters.len() < SEQUENCE_MAX => parameters.push(byte),
                _ => self.sequence = Sequence::None,
            },
            Sequence::Text { length, escape } => {
                let is_over = byte == 0x07 || (*escape && byte == b'\\') || *length >= SEQUENCE_MAX;
                *escape = byte == ESCAPE;
                *length += 1;
                if is_over {
                    self.sequence = Sequence::None;
                }
            }
        }
    }

    /// Keys may come as sequences too: `CSI 99;5u` is Ctrl-C for one who asked the terminal to tell keys apart.
    fn control(&mut self, parameters: &[u8], last: u8, now: Instant) {
        if last != b'u' {
            return;
        }
        let text = std::str::from_utf8(parameters).unwrap_or_default();
        let mut parts = text.split(';');
        let number = |part: Option<&str>| part.and_then(|part| part.split(':').next()?.parse::<u32>().ok());
        let (key, modifiers) = (number(parts.next()), number(parts.next()).unwrap_or(1).saturating_sub(1));
        let has_control = modifiers & 4 != 0;
        match key {
            Some(99) if has_control => self.key(CTRL_C, now),
            Some(100) if has_control => self.key(CTRL_D, now),
            Some(117) if has_control => self.key(CTRL_U, now),
            Some(13) => self.key(b'\r', now),
            _ => {}
        }
    }

    fn key(&mut self, byte: u8, now: Instant) {
        self.farewell = None;
        match byte {
            CTRL_C | CTRL_D => {
                self.line.clear();
                self.farewell = Some(now);
            }
            b'\r' | b'\n' => {
                let line = String::from_utf8_lossy(&self.line);
                if self.words.contains(&line.trim()) {
                    self.farewell = Some(now);
                }
                self.line.clear();
            }
            0x08 | 0x7f => _ = self.line.pop(),
            CTRL_U => self.line.clear(),
            byte if self.line.len() < LINE_MAX => self.line.push(byte),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "a test needs some instant to count from")]
    fn birth() -> Instant {
        Instant::now()
    }

    #[test]
    fn a_farewell_is_known_by_its_keys() {
        use LastInput::*;
        #[rustfmt::skip]
        let table = [
            ("",                                Other),
            ("hello\r",                         Other),
            ("\x03",                            Farewell),
            ("\x04",                            Farewell),
            ("\x03x",                           Other),
            ("/exit\r",                         Farewell),
            ("/exit",                           Other),
            ("  /quit \r",                      Farewell),
            ("say /exit\r",                     Other),
            ("/exitx\x7f\r",                    Farewell),
            ("/exit\rno\r",                     Other),
            ("never mind\x15/exit\r",           Farewell),
            ("never mind\x1b[117;5u/exit\r",    Farewell),
            ("/exit\x15\r",                     Other),
            // What a terminal says by itself does not take it back.
            ("\x03\x1b[I\x1b[3;7R\x1b[?62;c",   Farewell),
            ("\x03\x1b]11;rgb:0/0/0\x07",       Farewell),
            ("\x03\x1b]11;rgb:0/0/0\x1b\\",     Farewell),
            ("\x03\x1b[<0;3;4M",                Farewell),
            // The same keys, told apart.
            ("\x1b[99;5u",                      Farewell),
            ("\x1b[100;5:1u",                   Farewell),
            ("\x1b[99;5u\x1b[97;1u",            Farewell),
            ("\x1b[99u",                        Other),
            ("\x03\x1bx",                       Other),
        ];
        for (keys, expected) in table {
            // However they are cut.
            for size in [1, 2, 100] {
                let mut typing = Typing::new(&["/exit", "/quit"]);
                for piece in keys.as_bytes().chunks(size) {
                    typing.typed(piece, birth());
                }
                assert_eq!(typing.last(birth()), expected, "{keys:?} by {size}");
            }
        }
    }

    #[test]
    fn a_farewell_is_not_for_ever() {
        let now = birth();
        let mut typing = Typing::new(&[]);
        typing.typed(b"\x03", now);
        assert_eq!(typing.last(now + FAREWELL_HOLDS), LastInput::Farewell);
        assert_eq!(typing.last(now + FAREWELL_HOLDS + Duration::from_millis(1)), LastInput::Other);
        typing.interrupted();
        assert_eq!(typing.last(now), LastInput::Other);
    }

    #[test]
    fn nothing_grows_without_bound() {
        let mut typing = Typing::new(&["/exit"]);
        for start in ["", "\x1b[", "\x1b]"] {
            typing.typed(start.as_bytes(), birth());
            typing.typed(&[b'1'; 10_000], birth());
        }
        assert!(typing.line.len() <= LINE_MAX);
        typing.typed(b"\r/exit\r", birth());
        assert_eq!(typing.last(birth()), LastInput::Farewell);
    }
}
