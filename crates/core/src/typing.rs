//! What a person typed last, which tells whether the person ended the agent. Injected input is not typing, and neither are
//! the replies, focus and mouse reports of a terminal.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::{
    keys::{self, Press},
    saved::{Moment, Octets},
    session::LastInput,
    vt::{self, Token},
};

/// An agent exits within this time after a quit; a later exit has another cause.
pub const QUIT_HOLDS: Duration = Duration::from_secs(30);
/// Bytes of a line that are kept; a longer line is no quit word.
const LINE_MAX: usize = 64;
/// A longer unfinished sequence is dropped; what follows is typing again.
const SEQUENCE_MAX: usize = 256;

const CTRL_C: u8 = 0x03;
const CTRL_D: u8 = 0x04;
/// Erases the line.
const CTRL_U: u8 = 0x15;

#[derive(Clone, Debug)]
pub struct Typing {
    /// The agent's quit words: one of them and Enter is a quit.
    quit_words: &'static [&'static str],
    line: Vec<u8>,
    /// The beginning of a sequence whose end has not arrived yet.
    held: Vec<u8>,
    quit_at: Option<Instant>,
}

/// The same as saved state; the quit words are those of the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    line: Octets,
    held: Octets,
    #[serde(rename = "farewell")]
    quit_at: Option<Moment>,
}

impl Typing {
    pub fn save(&self, now: Instant) -> Saved {
        Saved {
            line: Octets::of(&self.line),
            held: Octets::of(&self.held),
            quit_at: self.quit_at.map(|at| Moment::of(at, now)),
        }
    }

    pub fn restore(quit_words: &'static [&'static str], saved: Saved, now: Instant) -> Typing {
        Typing {
            quit_words,
            line: saved.line.bytes().to_vec(),
            held: saved.held.bytes().to_vec(),
            quit_at: saved.quit_at.map(|at| at.at(now)),
        }
    }

    pub fn new(quit_words: &'static [&'static str]) -> Typing {
        Typing { quit_words, line: Vec::new(), held: Vec::new(), quit_at: None }
    }

    /// These bytes came from the person's terminal.
    pub fn typed(&mut self, bytes: &[u8], now: Instant) {
        let all = [std::mem::take(&mut self.held), bytes.to_vec()].concat();
        let mut rest = &all[..];
        while !rest.is_empty() {
            match vt::input(rest) {
                Some((token, length)) => {
                    self.token(&token, now);
                    rest = &rest[length..];
                }
                None if rest.len() < SEQUENCE_MAX => {
                    self.held = rest.to_vec();
                    break;
                }
                None => rest = &rest[SEQUENCE_MAX..],
            }
        }
    }

    /// Another program sent input, or a new agent runs: no quit is pending.
    pub fn interrupted(&mut self) {
        self.quit_at = None;
        self.line.clear();
    }

    pub fn last(&self, now: Instant) -> LastInput {
        match self.quit_at {
            Some(at) if now.saturating_duration_since(at) <= QUIT_HOLDS => LastInput::Quit,
            _ => LastInput::Other,
        }
    }

    fn token(&mut self, token: &Token<'_>, now: Instant) {
        match token {
            Token::Byte(vt::ESCAPE) => {}
            // With Escape: Alt and a key, or the Escape key and then another.
            Token::Byte(key) | Token::Escape(key) => self.key(*key, now),
            token => match Press::of(token) {
                Some(Press { code: 13, .. }) => self.key(b'\r', now),
                Some(Press { code: code @ (99 | 100 | 117), modifiers }) if modifiers & keys::CONTROL != 0 => {
                    self.key(code as u8 & 0x1f, now);
                }
                _ => {}
            },
        }
    }

    fn key(&mut self, byte: u8, now: Instant) {
        self.quit_at = None;
        match byte {
            CTRL_C | CTRL_D => {
                self.line.clear();
                self.quit_at = Some(now);
            }
            b'\r' | b'\n' => {
                let line = String::from_utf8_lossy(&self.line);
                if self.quit_words.contains(&line.trim()) {
                    self.quit_at = Some(now);
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
    fn a_quit_is_recognized_by_its_keys() {
        use LastInput::*;
        #[rustfmt::skip]
        let table = [
            ("",                                Other),
            ("hello\r",                         Other),
            ("\x03",                            Quit),
            ("\x04",                            Quit),
            ("\x03x",                           Other),
            ("/exit\r",                         Quit),
            ("/exit",                           Other),
            ("  /quit \r",                      Quit),
            ("say /exit\r",                     Other),
            ("/exitx\x7f\r",                    Quit),
            ("/exit\rno\r",                     Other),
            ("never mind\x15/exit\r",           Quit),
            ("never mind\x1b[117;5u/exit\r",    Quit),
            ("/exit\x15\r",                     Other),
            // Replies and reports of the terminal do not clear it.
            ("\x03\x1b[I\x1b[3;7R\x1b[?62;c",   Quit),
            ("\x03\x1b]11;rgb:0/0/0\x07",       Quit),
            ("\x03\x1b]11;rgb:0/0/0\x1b\\",     Quit),
            ("\x03\x1b[<0;3;4M",                Quit),
            // The same keys as sequences.
            ("\x1b[99;5u",                      Quit),
            ("\x1b[100;5:1u",                   Quit),
            ("\x1b[99;5u\x1b[97;1u",            Quit),
            ("\x1b[27;5;99~",                   Quit),
            ("\x1b[99;5u\x1b[99;5:3u",          Quit),
            ("\x1bOP/exit\r",                  Quit),
            ("\x1b[99u",                        Other),
            ("\x03\x1bx",                       Other),
        ];
        for (keys, expected) in table {
            // In reads of any size.
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
    fn a_quit_expires() {
        let now = birth();
        let mut typing = Typing::new(&[]);
        typing.typed(b"\x03", now);
        assert_eq!(typing.last(now + QUIT_HOLDS), LastInput::Quit);
        assert_eq!(typing.last(now + QUIT_HOLDS + Duration::from_millis(1)), LastInput::Other);
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
        assert_eq!(typing.last(birth()), LastInput::Quit);
    }
}
