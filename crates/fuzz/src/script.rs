//! Inputs are scripts: one event per line, its kind in the first byte, so that a corpus can be read and written by
//! hand.
//!
//! `@(text*count)` is the text repeated, so that an input with 100,000 brackets has only a few bytes. Every byte
//! string is a valid script.

/// The longest expanded line; a repetition that would exceed it is left out.
const EXPANDED_MAX: usize = 256 << 10;
/// How many lines of a script are played; the others are ignored.
const LINES_MAX: usize = 400;

/// The lines of a script, not yet expanded.
pub fn lines(input: &[u8]) -> impl Iterator<Item = &[u8]> {
    input.split(|byte| *byte == b'\n').take(LINES_MAX)
}

/// The kind of a line and the rest of it.
pub fn split(line: &[u8]) -> (u8, Vec<u8>) {
    match line.split_first() {
        Some((kind, rest)) => (*kind, expand(rest)),
        None => (0, Vec::new()),
    }
}

/// The text with every `@(text*count)` expanded. Other text is unchanged.
pub fn expand(text: &[u8]) -> Vec<u8> {
    let mut expanded = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        let (piece, count, next) = repetition(rest).unwrap_or((&rest[..1], 1, after));
        let room = EXPANDED_MAX.saturating_sub(expanded.len());
        for _ in 0..count.min(room / piece.len().max(1)) {
            expanded.extend_from_slice(piece);
        }
        debug_assert!(first == rest[0]);
        rest = next;
    }
    expanded
}

/// `@(text*count)` at the start of `text`: the repeated text, the count, and the text after it.
fn repetition(text: &[u8]) -> Option<(&[u8], usize, &[u8])> {
    let inside = text.strip_prefix(b"@(")?;
    let close = inside.iter().position(|byte| *byte == b')')?;
    let star = inside[..close].iter().rposition(|byte| *byte == b'*')?;
    let count = std::str::from_utf8(&inside[star + 1..close]).ok()?.parse().ok()?;
    Some((&inside[..star], count, &inside[close + 1..]))
}

/// The number at the start of a text.
pub fn number(text: &[u8]) -> u64 {
    let digits = text.iter().take(18).take_while(|byte| byte.is_ascii_digit());
    digits.fold(0, |number, digit| number * 10 + u64::from(digit - b'0'))
}

#[cfg(test)]
mod tests {
    use super::{EXPANDED_MAX, expand};

    #[test]
    fn repetitions_are_written_out_up_to_the_limit() {
        let table: [(&str, &str); 6] = [
            ("a@([*3)b", "a[[[b"),
            ("@({\"a\":*2)1@(}*2)", "{\"a\":{\"a\":1}}"),
            ("@(a*b*2)", "a*ba*b"),
            ("@(x)", "@(x)"),
            ("@(x*)@(", "@(x*)@("),
            ("@(*9)", ""),
        ];
        for (text, expanded) in table {
            assert_eq!(String::from_utf8_lossy(&expand(text.as_bytes())), expanded, "{text}");
        }
        assert_eq!(expand(b"@(ab*99999999999)").len(), EXPANDED_MAX);
    }
}
