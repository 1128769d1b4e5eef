//! Input of a terminal: key presses, the detach key, and replies that the terminal sends by itself.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    saved::Octets,
    vt::{self, ESCAPE, Token},
};

const PASTE_BEGINS: &[u8] = b"\x1b[200~";
const PASTE_ENDS: &[u8] = b"\x1b[201~";
/// A longer unfinished sequence is passed on as it is.
const SEQUENCE_MAX: usize = 4 << 10;

/// The keys that detach a terminal from a session, pressed one after the other: `ctrl-\`, `ctrl-a d`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetachKey {
    /// Empty: there is no detach key.
    keys: Vec<Key>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    letter: u8,
    has_control: bool,
}

impl Default for DetachKey {
    fn default() -> DetachKey {
        DetachKey { keys: vec![Key { letter: b'\\', has_control: true }] }
    }
}

impl DetachKey {
    pub fn parse(text: &str) -> Result<DetachKey, String> {
        if text == "none" {
            return Ok(DetachKey { keys: Vec::new() });
        }
        let keys: Vec<Key> = text.split_whitespace().map(Key::parse).collect::<Result<_, _>>()?;
        match keys[..] {
            [first] | [first, _] if first.has_control => Ok(DetachKey { keys }),
            _ => Err(
                "expected one key with Ctrl, optionally followed by another key: ctrl-\\, ctrl-], ctrl-a d, or none"
                    .into(),
            ),
        }
    }
}

impl fmt::Display for DetachKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.keys.is_empty() {
            return f.write_str("none");
        }
        for (at, key) in self.keys.iter().enumerate() {
            let (space, control) = (if at > 0 { " " } else { "" }, if key.has_control { "ctrl-" } else { "" });
            write!(f, "{space}{control}{}", char::from(key.letter))?;
        }
        Ok(())
    }
}

impl Key {
    fn parse(text: &str) -> Result<Key, String> {
        let lower = text.to_ascii_lowercase();
        let (letter, has_control) = match lower.strip_prefix("ctrl-").or_else(|| lower.strip_prefix("c-")) {
            Some(letter) => (letter, true),
            None => (text, false),
        };
        let is_known = |letter: u8| match has_control {
            true => letter.is_ascii_lowercase() || b"\\]^_@".contains(&letter),
            false => letter.is_ascii_graphic(),
        };
        match letter.as_bytes() {
            [letter] if is_known(*letter) => Ok(Key { letter: *letter, has_control }),
            _ => Err(format!("no key is named `{text}`")),
        }
    }

    fn is(self, token: &Token<'_>) -> bool {
        let plain = if self.has_control { self.letter.to_ascii_uppercase() & 0x1f } else { self.letter };
        match token {
            Token::Byte(byte) => *byte == plain,
            token => Press::of(token).is_some_and(|press| {
                press.code == u32::from(self.letter) && press.modifiers == if self.has_control { CONTROL } else { 0 }
            }),
        }
    }
}

/// The Ctrl key in [`Press::modifiers`].
pub const CONTROL: u32 = 4;

/// A key press that a terminal reports as a sequence: `CSI 92;5u` (kitty) or `CSI 27;5;92~` (xterm).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Press {
    /// The key's character, without modifiers.
    pub code: u32,
    /// Shift 1, Alt 2, Ctrl 4; without Caps Lock and Num Lock.
    pub modifiers: u32,
}

impl Press {
    /// None for any other sequence, and for the release of a key.
    pub fn of(token: &Token<'_>) -> Option<Press> {
        let Token::Control { parameters, end } = token else { return None };
        let text = std::str::from_utf8(parameters).ok()?;
        let mut parts = text.split(';').map(|part| part.split(':').next().unwrap_or_default().parse::<u32>().ok());
        let (code, modifiers) = match (end, parts.next()??) {
            (b'u', code) => (code, parts.next().flatten().unwrap_or(1)),
            (b'~', 27) => {
                let modifiers = parts.next()??;
                (parts.next()??, modifiers)
            }
            _ => return None,
        };
        let is_release = text.ends_with(":3");
        (!is_release).then_some(Press { code, modifiers: modifiers.saturating_sub(1) & 0b0011_1111 })
    }
}

/// Finds the detach key in typed input. Pasted text is not searched.
#[derive(Clone, Debug)]
pub struct DetachFilter {
    wanted: DetachKey,
    is_pasting: bool,
    /// The first of two keys, kept back until the second is known.
    held: Vec<u8>,
}

/// What the filter lets through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filtered {
    pub bytes: Vec<u8>,
    /// The detach key was pressed after these bytes; what came after it is dropped.
    pub detaches: bool,
}

/// The same as saved state; the key is a setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedDetachFilter {
    is_pasting: bool,
    held: Octets,
}

impl DetachFilter {
    pub fn save(&self) -> SavedDetachFilter {
        SavedDetachFilter { is_pasting: self.is_pasting, held: Octets::of(&self.held) }
    }

    pub fn restore(wanted: DetachKey, saved: SavedDetachFilter) -> DetachFilter {
        DetachFilter { wanted, is_pasting: saved.is_pasting, held: saved.held.bytes().to_vec() }
    }

    pub fn new(wanted: DetachKey) -> DetachFilter {
        DetachFilter { wanted, is_pasting: false, held: Vec::new() }
    }

    /// True if all of this passes unchanged, which is the usual case.
    pub fn is_plain(&self, bytes: &[u8]) -> bool {
        let may_matter = |byte: &u8| *byte == ESCAPE || self.wanted.keys.iter().any(|key| key.is(&Token::Byte(*byte)));
        self.wanted.keys.is_empty() || (self.held.is_empty() && !bytes.iter().any(may_matter))
    }

    pub fn pass(&mut self, bytes: &[u8]) -> Filtered {
        let mut filtered = Filtered { bytes: Vec::with_capacity(bytes.len()), detaches: false };
        let mut rest = bytes;
        while !rest.is_empty() {
            let taken = self.next(rest, &mut filtered);
            if filtered.detaches {
                self.held.clear();
                break;
            }
            rest = &rest[taken..];
        }
        filtered
    }

    fn next(&mut self, rest: &[u8], filtered: &mut Filtered) -> usize {
        if self.is_pasting {
            let end = memchr::memmem::find(rest, PASTE_ENDS);
            let taken = end.map_or(rest.len(), |at| at + PASTE_ENDS.len());
            self.is_pasting = end.is_none();
            filtered.bytes.extend_from_slice(&rest[..taken]);
            return taken;
        }
        self.is_pasting = rest.starts_with(PASTE_BEGINS);
        // A sequence that is cut passes byte by byte: no key is held back for it.
        let (token, length) = vt::input(rest).unwrap_or((Token::Byte(rest[0]), 1));
        let at = usize::from(!self.held.is_empty());
        match self.wanted.keys.get(at) {
            Some(key) if key.is(&token) => {
                filtered.detaches = at + 1 == self.wanted.keys.len();
                self.held.extend_from_slice(&rest[..length]);
            }
            _ => {
                filtered.bytes.append(&mut self.held);
                filtered.bytes.extend_from_slice(&rest[..length]);
            }
        }
        length
    }
}

/// Removes the replies of a terminal that the agent did not ask: another terminal answers for the session.
#[derive(Clone, Debug, Default)]
pub struct ReplyFilter {
    /// The beginning of a sequence whose end has not arrived yet.
    held: Vec<u8>,
}

impl ReplyFilter {
    /// What it holds back, for the next program.
    pub fn save(&self) -> Octets {
        Octets::of(&self.held)
    }

    pub fn restore(held: Octets) -> ReplyFilter {
        ReplyFilter { held: held.bytes().to_vec() }
    }

    pub fn strip(&mut self, bytes: &[u8]) -> Vec<u8> {
        let all = [std::mem::take(&mut self.held), bytes.to_vec()].concat();
        let mut kept = Vec::with_capacity(all.len());
        let mut rest = &all[..];
        while !rest.is_empty() {
            let length = match vt::input(rest) {
                Some((token, length)) if is_reply(&token) => {
                    rest = &rest[length..];
                    continue;
                }
                Some((_, length)) => length,
                // An Escape alone is a key.
                None if rest.len() > 1 && rest.len() < SEQUENCE_MAX => {
                    self.held = rest.to_vec();
                    break;
                }
                None => 1,
            };
            kept.extend_from_slice(&rest[..length]);
            rest = &rest[length..];
        }
        kept
    }
}

/// True if these bytes contain a key press or a mouse button, not only replies and focus reports.
pub fn has_key(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    while let Some((token, length)) = vt::input(rest) {
        let is_focus = matches!(token, Token::Control { parameters: b"", end: b'I' | b'O' });
        if !is_reply(&token) && !is_focus {
            return true;
        }
        rest = &rest[length..];
    }
    rest.len() == 1
}

/// True for what a terminal sends as an answer to a query.
fn is_reply(token: &Token<'_>) -> bool {
    let (parameters, end) = match token {
        Token::Control { parameters, end } => (*parameters, *end),
        Token::String { .. } => return true,
        _ => return false,
    };
    match (parameters.first(), end) {
        // Attributes, modes, keyboard flags.
        (Some(b'?' | b'>'), b'c' | b'u' | b'y' | b'n') => true,
        (_, b'y') => parameters.contains(&b'$'),
        (Some(b'0' | b'3'), b'n') => true,
        // A cursor position. Shift-F3 and its like have the same form with 1 as their first number.
        (Some(b'0'..=b'9'), b'R') => parameters.contains(&b';') && !parameters.starts_with(b"1;"),
        (Some(b'4' | b'8' | b'6'), b't') => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(keys: &str) -> DetachFilter {
        DetachFilter::new(DetachKey::parse(keys).unwrap())
    }

    #[test]
    fn a_detach_key_is_parsed_and_printed() {
        for text in ["ctrl-\\", "ctrl-]", "ctrl-a d", "none", "ctrl-^ ctrl-d"] {
            assert_eq!(DetachKey::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(DetachKey::parse("C-B D").unwrap().to_string(), "ctrl-b D");
        assert_eq!(DetachKey::default(), DetachKey::parse("ctrl-\\").unwrap());
        for text in ["", "x", "ctrl-", "ctrl-1", "ctrl-a b c", "d ctrl-a", "ctrl-ä", "alt-x"] {
            assert!(DetachKey::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_detach_key_is_found_in_every_encoding() {
        #[rustfmt::skip]
        let table = [
            // keys       typed                          passes              detaches
            ("ctrl-\\",   "hello",                       "hello",            false),
            ("ctrl-\\",   "ab\x1ccd",                    "ab",               true),
            ("ctrl-\\",   "a\x1b[92;5u",                 "a",                true),
            ("ctrl-\\",   "a\x1b[92;5:1u",               "a",                true),
            ("ctrl-\\",   "a\x1b[92;69u",                "a",                true), // caps lock
            ("ctrl-\\",   "\x1b[92;5:3u",                "\x1b[92;5:3u",     false), // released
            ("ctrl-\\",   "\x1b[92;6u",                  "\x1b[92;6u",       false),
            ("ctrl-\\",   "\x1b[27;5;92~",               "",                 true),
            ("ctrl-\\",   "\x1b[200~a\x1cb\x1b[201~c",   "\x1b[200~a\x1cb\x1b[201~c", false),
            ("ctrl-\\",   "\x1b[200~a\x1b[201~\x1c",     "\x1b[200~a\x1b[201~", true),
            ("ctrl-]",    "\x1c\x1d",                    "\x1c",             true),
            ("ctrl-a d",  "x\x01d",                      "x",                true),
            ("ctrl-a d",  "x\x01xd",                     "x\x01xd",          false),
            ("ctrl-a d",  "\x1b[97;5u\x1b[100u",         "",                 true),
            ("none",      "\x1c",                        "\x1c",             false),
        ];
        for (keys, typed, passes, detaches) in table {
            let passed = filter(keys).pass(typed.as_bytes());
            assert_eq!((passed.bytes, passed.detaches), (passes.into(), detaches), "{keys}: {typed:?}");
        }
    }

    #[test]
    fn two_keys_may_arrive_in_separate_reads() {
        let mut filter = filter("ctrl-a d");
        assert!(filter.is_plain(b"hello"));
        assert_eq!(filter.pass(b"\x01"), Filtered { bytes: Vec::new(), detaches: false });
        assert!(!filter.is_plain(b"x"));
        assert_eq!(filter.pass(b"x"), Filtered { bytes: b"\x01x".to_vec(), detaches: false });
        assert_eq!(filter.pass(b"\x01"), Filtered { bytes: Vec::new(), detaches: false });
        assert!(filter.pass(b"d").detaches);
    }

    #[test]
    fn replies_are_removed_and_keys_are_kept() {
        #[rustfmt::skip]
        let table = [
            // sent                          kept            has a key
            ("hello",                        "hello",        true),
            ("\x1b",                         "\x1b",         true),
            ("\x1b[A\x1bOP\x1bx",            "\x1b[A\x1bOP\x1bx", true),
            ("\x1b[?62;22c",                 "",             false),
            ("\x1b[>1;10;0c",                "",             false),
            ("\x1b[12;40R",                  "",             false),
            ("\x1b[1;2R",                    "\x1b[1;2R",    true), // Shift-F3
            ("\x1b[?0u",                     "",             false),
            ("\x1b[97;5u",                   "\x1b[97;5u",   true),
            ("\x1b[?2004;2$y",               "",             false),
            ("\x1b[0n",                      "",             false),
            ("\x1b[8;24;80t",                "",             false),
            ("\x1b]11;rgb:0/0/0\x07",        "",             false),
            ("\x1b]11;rgb:0/0/0\x1b\\x",     "x",            true),
            ("\x1bP>|xterm(390)\x1b\\",      "",             false),
            ("\x1b[I",                       "\x1b[I",       false),
            ("\x1b[<0;3;4M",                 "\x1b[<0;3;4M", true),
            ("a\x1b[?6cb",                   "ab",           true),
        ];
        for (said, kept, is_key) in table {
            let mut replies = ReplyFilter::default();
            assert_eq!(replies.strip(said.as_bytes()), kept.as_bytes(), "{said:?}");
            assert_eq!(has_key(said.as_bytes()), is_key, "{said:?}");
            // Cut anywhere but after an Escape, which is then a key of its own.
            for at in 1..said.len() {
                if !said.is_char_boundary(at) || said.as_bytes()[at - 1] == ESCAPE {
                    continue;
                }
                let mut replies = ReplyFilter::default();
                let all = [replies.strip(&said.as_bytes()[..at]), replies.strip(&said.as_bytes()[at..])].concat();
                assert_eq!(all, kept.as_bytes(), "{said:?} cut at {at}");
            }
        }
    }

    #[test]
    fn an_unfinished_sequence_is_not_held_without_bound() {
        let mut replies = ReplyFilter::default();
        for _ in 0..100 {
            replies.strip(b"\x1b]11;");
            replies.strip(&[b'x'; 1000]);
            assert!(replies.held.len() < SEQUENCE_MAX);
        }
    }
}
