//! The reason of a restart: free text from agents, users and files, made safe for logs, terminals and markers.

use crate::{cut::head, redact};

/// The longest reason in bytes; a longer one is cut and ends in `…`.
pub const REASON_MAX: usize = 500;

/// How much of a text is read: a secret at the limit is recognized before the text is cut.
const READ_MAX: usize = 2 * REASON_MAX;

/// One line without secrets, control characters, line separators and bidirectional controls, at most [`REASON_MAX`]
/// bytes long. Runs of white space become one space. An empty text becomes "no reason given".
pub fn one_line(text: &str) -> String {
    const CUT: &str = "…";
    let mut line = String::new();
    let mut is_after_space = false;
    for letter in text.chars() {
        if letter.is_control() || letter.is_whitespace() {
            is_after_space = true;
        } else if !is_invisible(letter) {
            if std::mem::take(&mut is_after_space) && !line.is_empty() {
                line.push(' ');
            }
            line.push(letter);
        }
        if line.len() > READ_MAX {
            break;
        }
    }
    match redact::text(&line) {
        line if line.len() > REASON_MAX => format!("{}{CUT}", head(&line, REASON_MAX - CUT.len())),
        line if line.is_empty() => "no reason given".into(),
        line => line.into_owned(),
    }
}

/// Characters that change how the text around them is displayed, or that are not displayed at all. The two joiners stay,
/// because some scripts need them.
fn is_invisible(letter: char) -> bool {
    matches!(letter,
        '\u{ad}' | '\u{61c}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_text_becomes_one_clean_line() {
        let table = [
            ("code changes", "code changes"),
            ("  two\n\n lines\r\n", "two lines"),
            ("\u{1b}]0;title\u{7}x\u{9b}31m", "]0;title x 31m"),
            ("a\u{202e}b\u{2069}c\u{feff}d\u{85}e\u{2029}f", "abcd e f"),
            ("نمی\u{200c}خواهم", "نمی\u{200c}خواهم"),
            ("use ghp_0123456789abcdefABCD, --pat S3cret1 and Password=x", "use …, --pat … and Password=…"),
            ("", "no reason given"),
            ("\0\n\u{200b}", "no reason given"),
        ];
        for (text, line) in table {
            assert_eq!(one_line(text), line);
        }
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        assert_eq!(one_line(&"x".repeat(REASON_MAX)), "x".repeat(REASON_MAX));
        let long = one_line(&"ä".repeat(REASON_MAX));
        assert!(long.len() <= REASON_MAX && long.ends_with("ä…"), "{long}");
        assert_eq!(one_line(&long), long, "what is clean stays as it is");
        let secret = format!("{} ghp_0123456789abcdefABCD", "x".repeat(REASON_MAX - 10));
        assert!(!one_line(&secret).contains("ghp_"), "a secret is hidden before the text is cut");
    }
}
