//! Text of any origin as a terminal may show it: nothing in it moves the cursor, changes colours, hides or reorders text.

use std::borrow::Cow;

/// Stands for a control character.
pub const CONTROL: char = '?';

/// A text without escape sequences. Line feeds and tabs stay; any other control character becomes `?`.
pub fn text(text: &str) -> Cow<'_, str> {
    if text.chars().all(|letter| !is_control(letter) || letter == '\n' || letter == '\t') {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\n' | '\t' => shown.push(letter),
            // As at the end of a line in a file from Windows.
            '\r' if letters.peek() == Some(&'\n') => {}
            '\x1b' if letters.next_if_eq(&'[').is_some() => skip_sequence(&mut letters),
            '\u{9b}' => skip_sequence(&mut letters),
            '\x1b' if letters.next_if(|next| matches!(next, ']' | 'P' | 'X' | '^' | '_')).is_some() => {
                skip_string(&mut letters);
            }
            '\u{9d}' | '\u{90}' | '\u{98}' | '\u{9e}' | '\u{9f}' => skip_string(&mut letters),
            letter if is_control(letter) => shown.push(CONTROL),
            letter => shown.push(letter),
        }
    }
    Cow::Owned(shown)
}

/// The same as one line: what follows a line feed cannot look like another line.
pub fn line(text: &str) -> Cow<'_, str> {
    match self::text(text) {
        shown if shown.contains('\n') => Cow::Owned(shown.replace('\n', "\n    ")),
        shown => shown,
    }
}

/// A JSON text in which the characters that a terminal could obey are escaped. JSON itself escapes only the first 32.
pub fn json(text: &str) -> Cow<'_, str> {
    let is_hidden = |letter: char| is_control(letter) && letter as u32 >= 0x7f;
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        if is_hidden(letter) {
            // Two units beyond the first plane.
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

/// Up to the final letter of a control sequence, or to the first character that cannot be in one.
fn skip_sequence(letters: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    while letters.next_if(|letter| matches!(letter, '\x20'..='\x3f')).is_some() {}
    letters.next_if(|letter| matches!(letter, '\x40'..='\x7e'));
}

/// Up to the end of a string such as a title: BEL, ST, or the end of the line.
fn skip_string(letters: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    while let Some(letter) = letters.next_if(|letter| *letter != '\n') {
        match letter {
            '\x07' | '\u{9c}' => return,
            '\x1b' => {
                letters.next_if_eq(&'\\');
                return;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_text_steers_a_terminal() {
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
    fn a_line_forges_no_other_line() {
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
