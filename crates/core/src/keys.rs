//! What comes from a terminal: the key that leaves, and what a terminal says by itself.

use std::fmt;

const ESCAPE: u8 = 0x1b;
const PASTE_BEGINS: &[u8] = b"\x1b[200~";
const PASTE_ENDS: &[u8] = b"\x1b[201~";
/// A longer sequence is none, and passes as it is.
const SEQUENCE_MAX: usize = 4 << 10;

/// The keys that leave a session, one after the other: `ctrl-\`, `ctrl-a d`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetachKey {
    /// None of them: there is no such key.
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
            _ => {
                Err("one key with Ctrl is wanted, and perhaps another after it: ctrl-\\, ctrl-], ctrl-a d, or none"
                    .into())
            }
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
            _ => Err(format!("there is no key `{text}`")),
        }
    }

    /// How many bytes at the beginning are this key, in whichever way a terminal says it.
    fn length_in(self, bytes: &[u8]) -> Option<usize> {
        let plain = if self.has_control { self.letter.to_ascii_uppercase() & 0x1f } else { self.letter };
        if bytes.first() == Some(&plain) {
            return Some(1);
        }
        // `CSI 92;5u` and `CSI 27;5;92~`, by those who were asked to tell keys apart.
        let sequence = bytes.strip_prefix(b"\x1b[")?;
        let end = sequence.iter().position(|byte| (0x40..=0x7e).contains(byte))?;
        let text = std::str::from_utf8(&sequence[..end]).ok()?;
        let mut parts = text.split(';').map(|part| part.split(':').next().unwrap_or_default().parse::<u32>().ok());
        let (letter, modifiers) = match (sequence[end], parts.next()??) {
            (b'u', letter) => (letter, parts.next().flatten().unwrap_or(1)),
            (b'~', 27) => {
                let modifiers = parts.next()??;
                (parts.next()??, modifiers)
            }
            _ => return None,
        };
        // Caps lock and num lock are no wish.
        let held = modifiers.saturating_sub(1) & 0b0011_1111;
        let wanted = if self.has_control { 4 } else { 0 };
        // A key that is let go is told too.
        let is_release = text.ends_with(":3");
        (letter == u32::from(self.letter) && held == wanted && !is_release).then_some(2 + end + 1)
    }
}

/// Watches what is typed for the key that leaves. What is pasted is no key.
#[derive(Clone, Debug)]
pub struct Leaving {
    wanted: DetachKey,
    is_pasting: bool,
    /// The first of two keys, kept back until the second is known.
    held: Vec<u8>,
}

/// What is left of what was typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passed {
    pub bytes: Vec<u8>,
    /// The key was pressed, after these bytes; what came after it is gone.
    pub leaves: bool,
}

impl Leaving {
    pub fn new(wanted: DetachKey) -> Leaving {
        Leaving { wanted, is_pasting: false, held: Vec::new() }
    }

    /// Whether all of this passes as it is, which is the usual case.
    pub fn is_plain(&self, bytes: &[u8]) -> bool {
        let may_matter =
            |byte: &u8| *byte == ESCAPE || self.wanted.keys.iter().any(|key| key.length_in(&[*byte]).is_some());
        self.wanted.keys.is_empty() || (self.held.is_empty() && !bytes.iter().any(may_matter))
    }

    pub fn pass(&mut self, bytes: &[u8]) -> Passed {
        let mut passed = Passed { bytes: Vec::with_capacity(bytes.len()), leaves: false };
        let mut rest = bytes;
        while !rest.is_empty() {
            let taken = self.next(rest, &mut passed);
            if passed.leaves {
                self.held.clear();
                break;
            }
            rest = &rest[taken..];
        }
        passed
    }

    fn next(&mut self, rest: &[u8], passed: &mut Passed) -> usize {
        if self.is_pasting {
            let end = rest.windows(PASTE_ENDS.len()).position(|window| window == PASTE_ENDS);
            let taken = end.map_or(rest.len(), |at| at + PASTE_ENDS.len());
            self.is_pasting = end.is_none();
            passed.bytes.extend_from_slice(&rest[..taken]);
            return taken;
        }
        if rest.starts_with(PASTE_BEGINS) {
            self.is_pasting = true;
            passed.bytes.append(&mut self.held);
            passed.bytes.extend_from_slice(PASTE_BEGINS);
            return PASTE_BEGINS.len();
        }
        let at = usize::from(!self.held.is_empty());
        match self.wanted.keys.get(at).and_then(|key| key.length_in(rest)) {
            Some(length) if at + 1 == self.wanted.keys.len() => {
                passed.leaves = true;
                length
            }
            Some(length) => {
                self.held.extend_from_slice(&rest[..length]);
                length
            }
            None => {
                passed.bytes.append(&mut self.held);
                passed.bytes.push(rest[0]);
                1
            }
        }
    }
}

/// Takes out what a terminal says by itself, for one whose terminal was not asked.
#[derive(Clone, Debug, Default)]
pub struct Replies {
    /// The beginning of a sequence whose end is not here yet.
    held: Vec<u8>,
}

impl Replies {
    pub fn strip(&mut self, bytes: &[u8]) -> Vec<u8> {
        let all = [std::mem::take(&mut self.held), bytes.to_vec()].concat();
        let mut kept = Vec::with_capacity(all.len());
        let mut rest = &all[..];
        while !rest.is_empty() {
            match sequence(rest) {
                Some(Sequence { length, is_reply: true }) => rest = &rest[length..],
                Some(Sequence { length, is_reply: false }) => {
                    kept.extend_from_slice(&rest[..length]);
                    rest = &rest[length..];
                }
                // An Escape alone is a key.
                None if rest.len() > 1 && rest.len() < SEQUENCE_MAX => {
                    self.held = rest.to_vec();
                    break;
                }
                None => {
                    kept.push(rest[0]);
                    rest = &rest[1..];
                }
            }
        }
        kept
    }
}

/// Whether somebody pressed a key or a button in this, and it is not all what a terminal says by itself.
pub fn has_key(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    while !rest.is_empty() {
        match sequence(rest) {
            Some(Sequence { length, is_reply }) => {
                let is_focus = matches!(&rest[..length], b"\x1b[I" | b"\x1b[O");
                if !is_reply && !is_focus {
                    return true;
                }
                rest = &rest[length..];
            }
            None => return rest.len() == 1,
        }
    }
    false
}

struct Sequence {
    length: usize,
    is_reply: bool,
}

/// The first key or sequence; none if its end is missing.
fn sequence(bytes: &[u8]) -> Option<Sequence> {
    let key = |length| Some(Sequence { length, is_reply: false });
    let reply = |length| Some(Sequence { length, is_reply: true });
    match bytes {
        [ESCAPE, b'[', rest @ ..] => {
            let end = rest.iter().position(|byte| (0x40..=0x7e).contains(byte))?;
            let (parameters, last, length) = (&rest[..end], rest[end], end + 3);
            match (parameters.first(), last) {
                // Attributes, modes, keyboard flags.
                (Some(b'?' | b'>'), b'c' | b'u' | b'y' | b'n') => reply(length),
                (_, b'y') if parameters.contains(&b'$') => reply(length),
                (Some(b'0' | b'3'), b'n') => reply(length),
                // A place on the screen; F3 with Shift and its like look the same but for the first number.
                (Some(b'0'..=b'9'), b'R') if parameters.contains(&b';') && !parameters.starts_with(b"1;") => {
                    reply(length)
                }
                (Some(b'4' | b'8' | b'6'), b't') => reply(length),
                _ => key(length),
            }
        }
        [ESCAPE, b']' | b'P' | b'_' | b'^', rest @ ..] => {
            let bell = rest.iter().position(|byte| *byte == 0x07).map(|at| at + 1);
            let string = rest.windows(2).position(|window| window == b"\x1b\\").map(|at| at + 2);
            let end = [bell, string].into_iter().flatten().min()?;
            reply(end + 2)
        }
        [ESCAPE, b'O', _, ..] => key(3),
        [ESCAPE] | [ESCAPE, b'O'] => None,
        [ESCAPE, _, ..] => key(2),
        _ => key(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaving(keys: &str) -> Leaving {
        Leaving::new(DetachKey::parse(keys).unwrap())
    }

    #[test]
    fn a_key_is_named_as_people_do() {
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
    fn the_key_is_known_however_a_terminal_says_it() {
        #[rustfmt::skip]
        let table = [
            // keys       typed                          passes              leaves
            ("ctrl-\\",   "hello",                       "hello",            false),
            ("ctrl-\\",   "ab\x1ccd",                    "ab",               true),
            ("ctrl-\\",   "a\x1b[92;5u",                 "a",                true),
            ("ctrl-\\",   "a\x1b[92;5:1u",               "a",                true),
            ("ctrl-\\",   "a\x1b[92;69u",                "a",                true), // caps lock
            ("ctrl-\\",   "\x1b[92;5:3u",                "\x1b[92;5:3u",     false), // let go
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
        for (keys, typed, passes, leaves) in table {
            let passed = leaving(keys).pass(typed.as_bytes());
            assert_eq!((passed.bytes, passed.leaves), (passes.into(), leaves), "{keys}: {typed:?}");
        }
    }

    #[test]
    fn two_keys_may_come_apart() {
        let mut leaving = leaving("ctrl-a d");
        assert!(leaving.is_plain(b"hello"));
        assert_eq!(leaving.pass(b"\x01"), Passed { bytes: Vec::new(), leaves: false });
        assert!(!leaving.is_plain(b"x"));
        assert_eq!(leaving.pass(b"x"), Passed { bytes: b"\x01x".to_vec(), leaves: false });
        assert_eq!(leaving.pass(b"\x01"), Passed { bytes: Vec::new(), leaves: false });
        assert!(leaving.pass(b"d").leaves);
    }

    #[test]
    fn what_a_terminal_says_by_itself_is_taken_out_and_keys_are_not() {
        #[rustfmt::skip]
        let table = [
            // said                          kept            has a key
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
            let mut replies = Replies::default();
            assert_eq!(replies.strip(said.as_bytes()), kept.as_bytes(), "{said:?}");
            assert_eq!(has_key(said.as_bytes()), is_key, "{said:?}");
            // Cut anywhere but after an Escape, which is a key of its own.
            for at in 1..said.len() {
                if !said.is_char_boundary(at) || said.as_bytes()[at - 1] == ESCAPE {
                    continue;
                }
                let mut replies = Replies::default();
                let all = [replies.strip(&said.as_bytes()[..at]), replies.strip(&said.as_bytes()[at..])].concat();
                assert_eq!(all, kept.as_bytes(), "{said:?} cut at {at}");
            }
        }
    }

    #[test]
    fn a_sequence_without_end_is_not_kept_for_ever() {
        let mut replies = Replies::default();
        for _ in 0..100 {
            replies.strip(b"\x1b]11;");
            replies.strip(&[b'x'; 1000]);
            assert!(replies.held.len() < SEQUENCE_MAX);
        }
    }
}
