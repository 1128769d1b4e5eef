//! Text of any origin made safe for a terminal: nothing in it moves the cursor, changes colours, hides or reorders text.

use std::borrow::Cow;

use crate::vt;

/// Replaces a control character.
pub const CONTROL: char = '?';

/// A text without escape sequences. Line feeds and tabs stay; any other control character becomes `?`.
pub fn text(text: &str) -> Cow<'_, str> {
    if text.chars().all(|letter| !is_control(letter) || letter == '\n' || letter == '\t') {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        let after = &rest[letter.len_utf8()..];
        rest = match letter {
            '\n' | '\t' => {
                shown.push(letter);
                after
            }
            // As at the end of a line of a Windows file.
            '\r' if after.starts_with('\n') => after,
            '\x1b' if after.starts_with('[') => after_control(&after[1..]),
            '\u{9b}' => after_control(after),
            '\x1b' if after.starts_with([']', 'P', 'X', '^', '_']) => after_string(&after[1..]),
            '\u{9d}' | '\u{90}' | '\u{98}' | '\u{9e}' | '\u{9f}' => after_string(after),
            letter => {
                shown.push(if is_control(letter) { CONTROL } else { letter });
                after
            }
        };
    }
    Cow::Owned(shown)
}

/// The same as one line of a log: text after a line feed is indented, so that it cannot look like another line.
pub fn line(text: &str) -> Cow<'_, str> {
    match self::text(text) {
        shown if shown.contains('\n') => Cow::Owned(shown.replace('\n', "\n    ")),
        shown => shown,
    }
}

/// The same without line feeds and tabs, for one cell of a table or a name in a list.
pub fn cell(text: &str) -> String {
    self::text(text).replace(['\n', '\t'], " ")
}

/// A JSON text in which the characters that control a terminal are escaped. JSON itself escapes only the first 32.
pub fn json(text: &str) -> Cow<'_, str> {
    let is_hidden = |letter: char| is_control(letter) && letter as u32 >= 0x7f;
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        if is_hidden(letter) {
            // Two units for a character beyond the first plane.
            for unit in letter.encode_utf16(&mut [0; 2]) {
                shown.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            shown.push(letter);
        }
    }
    Cow::Owned(shown)
}

/// Characters that control a terminal or the order of what it shows: C0, DEL, C1, bidirectional controls, separators of
/// lines and paragraphs, tags.
pub fn is_control(letter: char) -> bool {
    letter.is_control()
        || matches!(letter,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
            | '\u{e0000}'..='\u{e007f}')
}

/// The text after a control sequence, or after its beginning if the rest cannot belong to it.
fn after_control(rest: &str) -> &str {
    let length = vt::control_parameters(rest.as_bytes());
    let has_end = matches!(rest.as_bytes().get(length), Some(0x40..=0x7e));
    &rest[length + usize::from(has_end)..]
}

/// The text after a string such as a title. BEL, ST, any other Escape and the end of the line end it.
fn after_string(rest: &str) -> &str {
    let Some(end) = rest.find(['\x07', '\u{9c}', '\x1b', '\n']) else { return "" };
    let rest = &rest[end..];
    rest.strip_prefix("\x1b\\").or_else(|| rest.strip_prefix(['\x07', '\u{9c}', '\x1b'])).unwrap_or(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_cannot_control_a_terminal() {
        let table = [
            ("plain\ttext\n", "plain\ttext\n"),
            ("\x1b[31mred\x1b[0m", "red"),
            ("\u{9b}31mred", "red"),
            ("\x1b]0;title\x07x", "x"),
            ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
            ("\x1b]0;unfinished\nnext", "\nnext"),
            ("\x1bPdevice\x1b\\x", "x"),
            ("a\x1bcb", "a?cb"),
            ("\x1b[2J\x1b[Hgone", "gone"),
            ("over\rwritten", "over?written"),
            ("line\r\n", "line\n"),
            ("\x07\x08\x7f", "???"),
            ("a\u{202e}b\u{2066}c", "a?b?c"),
            ("a\u{2028}b", "a?b"),
            ("żółw 🐢 e\u{301}", "żółw 🐢 e\u{301}"),
            ("\x1b", "?"),
            ("\x1b[", ""),
        ];
        for (given, shown) in table {
            assert_eq!(text(given), shown, "{given:?}");
            assert!(!text(given).contains(|letter| is_control(letter) && letter != '\n' && letter != '\t'));
        }
    }

    #[test]
    fn a_line_cannot_look_like_another_line() {
        let forged = "ready\n[2026-01-01T00:00:00.000Z] [SUPERVISOR] Restart requested";
        assert_eq!(line(forged), "ready\n    [2026-01-01T00:00:00.000Z] [SUPERVISOR] Restart requested");
        assert_eq!(line("a\rb\x0bc\u{85}d"), "a?b?c?d");
    }

    #[test]
    fn json_stays_the_same_value() {
        let value = serde_json::json!({"a\u{9b}": "\u{202e}\x1b\u{e0041}ż"});
        let shown = json(&value.to_string()).into_owned();
        assert_eq!(shown, r#"{"a\u009b":"\u202e\u001b\udb40\udc41ż"}"#);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }
}
