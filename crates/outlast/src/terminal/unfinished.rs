//! The beginning of a sequence or letter whose end the agent has not written yet. Whoever is painted a picture needs it,
//! because the end comes to everybody.

/// A longer one is some picture or file; its end will look odd to who came in the middle.
const UNFINISHED_MAX: usize = 64 << 10;
/// So far back the beginning is looked for. What began before is known from the bytes before.
const LOOK_BACK: usize = 4 << 10;

const ESCAPE: u8 = 0x1b;

#[derive(Debug, Default)]
pub(super) struct Unfinished(Vec<u8>);

impl Unfinished {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn pass(&mut self, bytes: &[u8]) {
        if self.0.is_empty() {
            let recent = &bytes[bytes.len().saturating_sub(LOOK_BACK)..];
            self.0.extend_from_slice(&recent[recent.len() - unfinished(recent)..]);
            return;
        }
        self.0.extend_from_slice(bytes);
        let left = unfinished(&self.0);
        if left > UNFINISHED_MAX {
            self.0 = Vec::new();
        }
        self.0.drain(..self.0.len().saturating_sub(left));
    }
}

/// How many bytes at the end are the beginning of something.
fn unfinished(bytes: &[u8]) -> usize {
    // Only the last can be unfinished: an Escape ends whatever was open before it.
    let Some(at) = memchr::memrchr(ESCAPE, bytes) else { return half_letter(bytes) };
    let rest = &bytes[at..];
    let is_unfinished = match &rest[1..] {
        // It may be the first half of what ends a string.
        [] => return bytes.len() - begins_string(&bytes[..at]).unwrap_or(at),
        [b'[', after @ ..] => after.iter().all(|byte| (0x20..0x40).contains(byte)),
        [b']', after @ ..] => !after.contains(&0x07),
        [b'P' | b'_' | b'^' | b'X', ..] | [b' '..=b'/'] => true,
        _ => false,
    };
    if is_unfinished { rest.len() } else { half_letter(rest) }
}

/// Where a string begins that is still open at the end.
fn begins_string(bytes: &[u8]) -> Option<usize> {
    let at = memchr::memrchr(ESCAPE, bytes)?;
    let is_open = match &bytes[at + 1..] {
        [b']', after @ ..] => !after.contains(&0x07),
        [b'P' | b'_' | b'^' | b'X', ..] => true,
        _ => false,
    };
    is_open.then_some(at)
}

/// A letter may be up to four bytes.
fn half_letter(bytes: &[u8]) -> usize {
    for back in 1..=bytes.len().min(3) {
        let byte = bytes[bytes.len() - back];
        let length = match byte {
            0xc0..=0xdf => 2,
            0xe0..=0xef => 3,
            0xf0..=0xf7 => 4,
            0x80..=0xbf => continue,
            _ => return 0,
        };
        return if back < length { back } else { 0 };
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_end_yet_is_kept() {
        #[rustfmt::skip]
        let table: [(&[u8], &[u8]); 16] = [
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
    fn it_does_not_grow_without_bound() {
        let mut unfinished = Unfinished::default();
        unfinished.pass(b"\x1b]52;c;");
        for _ in 0..1000 {
            unfinished.pass(&[b'x'; 1000]);
            assert!(unfinished.bytes().len() <= UNFINISHED_MAX);
        }
    }
}
