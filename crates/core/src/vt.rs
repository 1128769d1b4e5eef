//! Splits the byte stream of a terminal into single bytes and escape sequences. It knows the structure of a sequence, not its
//! meaning.
//!
//! Both directions share control sequences (CSI) and strings (OSC, DCS, SOS, PM, APC). They differ in what else may follow an
//! Escape: in output it selects a character set or a mode, in input it is the Alt key, and `ESC O` begins a function key (SS3).

pub const ESCAPE: u8 = 0x1b;
const BELL: u8 = 0x07;
/// These two end a sequence without effect.
const CANCEL: u8 = 0x18;
const SUBSTITUTE: u8 = 0x1a;
/// Unfinished strings above this are forgotten; a viewer that attaches in the middle of one sees its end as text.
const UNFINISHED_MAX: usize = 64 << 10;
/// How far back the start of an unfinished sequence is searched in one chunk of output.
const LOOK_BACK: usize = 4 << 10;

/// The piece at the beginning of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token<'a> {
    /// Outside of any sequence: a control character, a letter, or one byte of a letter.
    Byte(u8),
    /// `CSI parameters final`; the parameters include intermediate bytes.
    Control { parameters: &'a [u8], end: u8 },
    /// An operating system command, device control or application string: `ESC kind text terminator`. An Escape that is not
    /// part of its terminator ends it, too.
    String { kind: u8, text: &'a [u8] },
    /// `ESC O key`, input only.
    FunctionKey(u8),
    /// An Escape and the byte that belongs to it: the Alt key in input, `ESC 7` or `ESC ( B` in output.
    Escape(u8),
    /// The beginning of a control sequence, ended by a byte that cannot be in one. That byte is not part of the token.
    Malformed,
}

/// The first token of a program's output, with its length. None if its end is missing.
pub fn output(bytes: &[u8]) -> Option<(Token<'_>, usize)> {
    match bytes {
        [ESCAPE, b'[', rest @ ..] => control(rest),
        [ESCAPE, kind @ (b']' | b'P' | b'X' | b'^' | b'_'), rest @ ..] => string(*kind, rest),
        [ESCAPE, rest @ ..] => {
            let intermediates = rest.iter().take_while(|byte| matches!(byte, b' '..=b'/')).count();
            let end = *rest.get(intermediates)?;
            Some((Token::Escape(end), intermediates + 2))
        }
        [byte, ..] => Some((Token::Byte(*byte), 1)),
        [] => None,
    }
}

/// The first token of what a terminal sends: keys, mouse and focus reports, and replies to queries. None if its end is missing.
pub fn input(bytes: &[u8]) -> Option<(Token<'_>, usize)> {
    match bytes {
        [ESCAPE, b'[', rest @ ..] => control(rest),
        [ESCAPE, kind @ (b']' | b'P' | b'^' | b'_'), rest @ ..] => string(*kind, rest),
        [ESCAPE, b'O', key, ..] => Some((Token::FunctionKey(*key), 3)),
        [ESCAPE] | [ESCAPE, b'O'] | [] => None,
        // A second Escape may begin a sequence of its own.
        [ESCAPE, ESCAPE, ..] => Some((Token::Byte(ESCAPE), 1)),
        [ESCAPE, key, ..] => Some((Token::Escape(*key), 2)),
        [byte, ..] => Some((Token::Byte(*byte), 1)),
    }
}

/// A control sequence, from the byte after `ESC [` on.
fn control(rest: &[u8]) -> Option<(Token<'_>, usize)> {
    let length = control_parameters(rest);
    Some(match rest.get(length)? {
        end @ 0x40..=0x7e => (Token::Control { parameters: &rest[..length], end: *end }, length + 3),
        _ => (Token::Malformed, length + 2),
    })
}

/// How many bytes of a control sequence are there before its final byte.
pub fn control_parameters(rest: &[u8]) -> usize {
    rest.iter().take_while(|byte| matches!(byte, 0x20..=0x3f)).count()
}

/// A string, from the byte after its introducer on. BEL ends an operating system command only.
fn string(kind: u8, rest: &[u8]) -> Option<(Token<'_>, usize)> {
    let end = match kind {
        b']' => memchr::memchr2(ESCAPE, BELL, rest),
        _ => memchr::memchr(ESCAPE, rest),
    }?;
    let terminator = match rest[end..] {
        [BELL, ..] => 1,
        [ESCAPE, b'\\', ..] => 2,
        [ESCAPE] => return None,
        _ => 0,
    };
    Some((Token::String { kind, text: &rest[..end] }, 2 + end + terminator))
}

/// The beginning of an output sequence or letter whose end the program has not written yet. A viewer that gets a picture of
/// the screen needs it, because the end is sent to all viewers.
#[derive(Debug, Default)]
pub struct Unfinished {
    bytes: Vec<u8>,
    is_cut: bool,
}

impl Unfinished {
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// A sequence is open that is too long to be kept.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    pub fn pass(&mut self, bytes: &[u8]) {
        let mut bytes = bytes;
        if self.is_cut {
            let ends = |byte: &u8| matches!(*byte, ESCAPE | BELL | CANCEL | SUBSTITUTE);
            let Some(end) = bytes.iter().position(ends) else { return };
            self.is_cut = false;
            bytes = &bytes[end..];
        }
        if self.bytes.is_empty() {
            let (older, recent) = bytes.split_at(bytes.len().saturating_sub(LOOK_BACK));
            // An Escape ends whatever was open before it.
            let begun = memchr::memrchr(ESCAPE, older).filter(|_| memchr::memchr(ESCAPE, recent).is_none());
            self.is_cut = begun.is_some_and(|at| output(&bytes[at..]).is_none());
            if !self.is_cut {
                self.bytes.extend_from_slice(&recent[recent.len() - unfinished(recent)..]);
            }
            return;
        }
        self.bytes.extend_from_slice(bytes);
        let left = unfinished(&self.bytes);
        if left > UNFINISHED_MAX {
            self.bytes = Vec::new();
            self.is_cut = true;
        }
        self.bytes.drain(..self.bytes.len().saturating_sub(left));
    }
}

/// How many bytes at the end are the beginning of a sequence or letter.
fn unfinished(bytes: &[u8]) -> usize {
    // An Escape ends whatever was open before it, so only the last one can begin an unfinished sequence. If it is the last
    // byte, it may also be the first half of a terminator.
    let Some(last) = memchr::memrchr(ESCAPE, bytes) else { return unfinished_letter(bytes) };
    let before = if last + 1 == bytes.len() { memchr::memrchr(ESCAPE, &bytes[..last]) } else { None };
    match before.into_iter().chain([last]).find(|start| output(&bytes[*start..]).is_none()) {
        Some(start) => bytes.len() - start,
        None => unfinished_letter(&bytes[last..]),
    }
}

/// How many bytes at the end are the beginning of a UTF-8 letter, which has up to four bytes.
fn unfinished_letter(bytes: &[u8]) -> usize {
    for back in 1..=bytes.len().min(3) {
        let tail = &bytes[bytes.len() - back..];
        if matches!(tail[0], 0x80..=0xbf) {
            continue;
        }
        // Bytes that cannot become a letter are finished.
        let is_open = std::str::from_utf8(tail).is_err_and(|error| error.error_len().is_none());
        return if is_open { back } else { 0 };
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes, and the token and length that are expected at their beginning.
    type Row<'a> = (&'a [u8], Option<(Token<'a>, usize)>);

    #[test]
    fn output_is_split_by_structure() {
        use Token::*;
        #[rustfmt::skip]
        let table: [Row<'_>; 18] = [
            (b"",                    None),
            (b"ab",                  Some((Byte(b'a'), 1))),
            (b"\x1b",                None),
            (b"\x1b[31mx",           Some((Control { parameters: b"31", end: b'm' }, 5))),
            (b"\x1b[?25",            None),
            (b"\x1b[0 q",            Some((Control { parameters: b"0 ", end: b'q' }, 5))),
            (b"\x1b[3\x1b[4m",       Some((Malformed, 3))),
            (b"\x1b[3\n",            Some((Malformed, 3))),
            (b"\x1b]2;a\x07b",       Some((String { kind: b']', text: b"2;a" }, 6))),
            (b"\x1b]2;a\x1b\\b",     Some((String { kind: b']', text: b"2;a" }, 7))),
            (b"\x1b]2;a\x1b",        None),
            (b"\x1b]2;a\x1b[m",      Some((String { kind: b']', text: b"2;a" }, 5))),
            (b"\x1bPq\x07",          None),
            (b"\x1bPq\x07\x1b\\",    Some((String { kind: b'P', text: b"q\x07" }, 6))),
            (b"\x1bXsos\x1b\\",      Some((String { kind: b'X', text: b"sos" }, 7))),
            (b"\x1b7x",              Some((Escape(b'7'), 2))),
            (b"\x1b(Bx",             Some((Escape(b'B'), 3))),
            (b"\x1b(",               None),
        ];
        for (bytes, expected) in table {
            assert_eq!(output(bytes), expected, "{bytes:?}");
        }
    }

    #[test]
    fn input_is_split_by_structure() {
        use Token::*;
        #[rustfmt::skip]
        let table: [Row<'_>; 9] = [
            (b"\x1b",            None),
            (b"\x1bO",           None),
            (b"\x1bOP",          Some((FunctionKey(b'P'), 3))),
            (b"\x1bx",           Some((Escape(b'x'), 2))),
            (b"\x1b(",           Some((Escape(b'('), 2))),
            (b"\x1bX",           Some((Escape(b'X'), 2))),
            (b"\x1b\x1b[A",      Some((Byte(ESCAPE), 1))),
            (b"\x1b[1;5C",       Some((Control { parameters: b"1;5", end: b'C' }, 6))),
            (b"\x1b]11;c\x07",   Some((String { kind: b']', text: b"11;c" }, 7))),
        ];
        for (bytes, expected) in table {
            assert_eq!(input(bytes), expected, "{bytes:?}");
        }
    }

    #[test]
    fn every_token_has_a_length_within_the_bytes() {
        let alphabet = b"\x1b[]P\\O(7?1;m\x07\n\xe2x";
        for number in 0..alphabet.len().pow(4) {
            let bytes: Vec<u8> =
                (0..4u32).map(|at| alphabet[number / alphabet.len().pow(at) % alphabet.len()]).collect();
            for split in [output, input] {
                if let Some((_, length)) = split(&bytes) {
                    assert!((1..=bytes.len()).contains(&length), "{bytes:?}");
                }
            }
        }
    }

    #[test]
    fn an_unfinished_sequence_or_letter_is_kept() {
        #[rustfmt::skip]
        let table: [(&[u8], &[u8]); 20] = [
            (b"a\xc0",                       b""),
            (b"a\xe0\x80",                   b""),
            (b"",                           b""),
            (b"text",                       b""),
            (b"text\x1b",                   b"\x1b"),
            (b"text\x1b[38;5",              b"\x1b[38;5"),
            (b"text\x1b[38;5;1m",           b""),
            (b"text\x1b[31mred",            b""),
            (b"\x1b]2;a tit",               b"\x1b]2;a tit"),
            (b"\x1b]2;a title\x07",         b""),
            (b"\x1b]2;a title\x1b",         b"\x1b]2;a title\x1b"),
            (b"\x1b]2;a title\x1b\\x",      b""),
            (b"\x1bP+q544e",                b"\x1bP+q544e"),
            (b"\x1b(",                      b"\x1b("),
            (b"\x1b(B",                     b""),
            (b"a\xe2\x94",                  b"\xe2\x94"),
            (b"a\xe2\x94\x80",              b""),
            (b"\x1b[0m\xf0\x9f",            b"\xf0\x9f"),
            (b"\x1b[0m\x1b",                b"\x1b"),
            (b"\x1b]2;a\xe2",               b"\x1b]2;a\xe2"),
        ];
        for (bytes, expected) in table {
            let mut whole = Unfinished::default();
            whole.pass(bytes);
            assert_eq!(whole.bytes(), expected, "{bytes:?}");
            let mut cut = Unfinished::default();
            for byte in bytes {
                cut.pass(&[*byte]);
            }
            assert_eq!(cut.bytes(), expected, "{bytes:?} by the byte");
        }
    }

    #[test]
    fn an_unfinished_string_does_not_grow_without_bound() {
        let mut unfinished = Unfinished::default();
        unfinished.pass(b"\x1b]52;c;");
        for _ in 0..1000 {
            unfinished.pass(&[b'x'; 1000]);
            assert!(unfinished.bytes().len() <= UNFINISHED_MAX);
        }
        assert!(unfinished.is_cut());
        unfinished.pass(b"xx\x07text\x1b[3");
        assert_eq!((unfinished.bytes(), unfinished.is_cut()), (&b"\x1b[3"[..], false));
        // In one piece, with and without its end.
        let long = [&b"\x1b]52;c;"[..], &[b'x'; 2 * LOOK_BACK]].concat();
        let mut unfinished = Unfinished::default();
        unfinished.pass(&long);
        assert!(unfinished.is_cut() && unfinished.bytes().is_empty());
        let mut finished = Unfinished::default();
        finished.pass(&[&long[..], b"\x1b\\text"].concat());
        assert!(!finished.is_cut() && finished.bytes().is_empty());
    }
}
