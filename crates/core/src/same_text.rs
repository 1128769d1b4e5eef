//! Whether two texts are equal although their form changed on the way: agents and terminals wrap lines, drop
//! invisible characters, compose letters and draw emoji in their own way. No Unicode tables: a run of characters with
//! combining marks matches any other run that is not ASCII.

/// How exactly a draft on the screen contains a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    No,
    /// All ASCII characters match, and some other characters are in place of the rest.
    Loosely,
    Exactly,
}

/// How many characters at the end of a text are compared; earlier ones may have been scrolled out of a small
/// composer.
const END_MAX: usize = 12;
/// A longer text may have been wrapped, so that the last line has only its end.
const LINE_MIN: usize = 40;

/// Whether an agent's record of a turn is this text. `is_cut`: only the start of the record is known.
pub fn is_recorded_as(record: &str, is_cut: bool, text: &str) -> bool {
    let (mut record, text) = (tokens(record), tokens(text));
    if is_cut {
        // The cut may be inside the last run.
        record.pop();
        return !record.is_empty() && record.len() <= text.len() && record.iter().zip(&text).all(|(a, b)| a.is_same(b));
    }
    record.len() == text.len() && record.iter().zip(&text).all(|(a, b)| a.is_same(b))
}

/// Whether the draft ends with the end of this text, or is itself the end of a long text.
pub fn held_at_end(draft: &str, text: &str) -> Held {
    let (draft_letters, text_letters) = (without_blanks(draft), without_blanks(text));
    let end = text_letters.char_indices().rev().nth(END_MAX - 1).map_or(0, |(at, _)| at);
    let is_long = text_letters.chars().count() > LINE_MIN;
    let is_rest = is_long && !draft_letters.is_empty() && text_letters.ends_with(&draft_letters);
    if is_rest || draft_letters.ends_with(&text_letters[end..]) {
        return Held::Exactly;
    }
    let (draft, text) = (tokens(draft), tokens(text));
    let end = &text[text.len().saturating_sub(END_MAX)..];
    let is_end = |of: &[Token], end: &[Token]| {
        end.len() <= of.len() && of[of.len() - end.len()..].iter().zip(end).all(|(a, b)| a.looks_like(b))
    };
    let is_rest = || is_long && !draft.is_empty() && is_end(&text, &draft);
    if is_end(&draft, end) || is_rest() { Held::Loosely } else { Held::No }
}

pub fn is_blank(letter: char) -> bool {
    letter.is_whitespace() || letter == '\u{a0}'
}

fn without_blanks(text: &str) -> String {
    text.chars().filter(|letter| !is_blank(*letter)).collect()
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Ascii(char),
    /// Characters that are not ASCII, and ASCII letters with combining marks.
    Run {
        letters: String,
        has_marks: bool,
    },
}

impl Token {
    /// A run with marks may have been composed into other characters, or decomposed.
    fn is_same(&self, other: &Token) -> bool {
        match (self, other) {
            (Token::Run { has_marks: true, .. }, Token::Run { .. })
            | (Token::Run { .. }, Token::Run { has_marks: true, .. }) => true,
            (one, other) => one == other,
        }
    }

    /// On a screen any run may look like any other: a terminal may draw only part of an emoji.
    fn looks_like(&self, other: &Token) -> bool {
        self == other || matches!((self, other), (Token::Run { .. }, Token::Run { .. }))
    }
}

fn tokens(text: &str) -> Vec<Token> {
    let mut tokens: Vec<Token> = Vec::new();
    for letter in text.chars().filter(|letter| !is_blank(*letter) && !is_invisible(*letter)) {
        if letter.is_ascii() {
            tokens.push(Token::Ascii(letter));
            continue;
        }
        let is_mark = is_mark(letter);
        // A letter with a combining mark is no longer ASCII.
        let base = match tokens.last() {
            Some(Token::Ascii(base)) if is_mark => Some(*base),
            _ => None,
        };
        if base.is_some() {
            tokens.pop();
        }
        if !matches!(tokens.last(), Some(Token::Run { .. })) {
            tokens.push(Token::Run { letters: String::new(), has_marks: false });
        }
        if let Some(Token::Run { letters, has_marks }) = tokens.last_mut() {
            letters.extend(base.into_iter().chain([letter]));
            *has_marks |= is_mark;
        }
    }
    tokens
}

/// Characters without width or meaning of their own: joiners, direction marks, variation selectors, tags.
fn is_invisible(letter: char) -> bool {
    matches!(letter,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
        | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{e0000}'..='\u{e0fff}')
}

/// Characters that are composed with the preceding one: combining marks, Hangul Jamo, kana marks.
fn is_mark(letter: char) -> bool {
    matches!(letter,
        '\u{300}'..='\u{36f}' | '\u{653}'..='\u{655}' | '\u{93c}' | '\u{1100}'..='\u{11ff}' | '\u{1ab0}'..='\u{1aff}'
        | '\u{1dc0}'..='\u{1dff}' | '\u{20d0}'..='\u{20ff}' | '\u{3099}'..='\u{309a}' | '\u{fe20}'..='\u{fe2f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_known_in_another_form() {
        #[rustfmt::skip]
        let table = [
            // record                       text                                    is the same
            ("hello",                       "hello",                                true),
            ("tab    here",                 "tab\there",                            true),
            ("two\nlines",                  " two\r\nlines \n",                     true),
            ("ab",                          "a\u{200b}b\u{feff}",                   true),
            ("caf\u{e9} \u{e9}",            "cafe\u{301} e\u{301}",                 true),
            ("日\u{e9}本",                   "日e\u{301}本",                          true),
            ("가나",                         "\u{1100}\u{1161}\u{1102}\u{1161}",     true),
            ("👨‍👩‍👧 fam 👍🏽",                 "👨‍👩‍👧 fam 👍🏽",                         true),
            ("❤ red",                       "❤\u{fe0f} red",                        true),
            ("hello",                       "hello \\",                             false),
            ("see src/x.rs",                "see @x",                               false),
            ("/help",                       "/hel",                                 false),
            ("日本",                         "日本語",                                false),
            ("👨 fam",                      "👨‍👩‍👧 fam",                             false),
            ("cafe",                        "cafe\u{301}",                          false),
            ("hello",                       "",                                     false),
        ];
        for (record, text, expected) in table {
            assert_eq!(is_recorded_as(record, false, text), expected, "{record:?} {text:?}");
        }
        assert!(is_recorded_as("a long te", true, "a long text") && !is_recorded_as("a long te", true, "a lo"));
        assert!(!is_recorded_as("é", true, "something else"), "nothing of it is certain");
    }

    #[test]
    fn a_text_is_known_by_its_end() {
        let long = format!("{}the very end of it", "x ".repeat(6000));
        #[rustfmt::skip]
        let table = [
            // on the screen                    text                held
            ("hello there",                     "hello there",      Held::Exactly),
            ("hello\nthere",                    "hello  there\n",   Held::Exactly),
            ("ready> hello",                    "hello",            Held::Exactly),
            ("",                                "hello",            Held::No),
            ("hell",                            "hello",            Held::No),
            ("… the very end of\u{a0}it",       &long,              Held::Exactly),
            ("of it",                           &long,              Held::Exactly),
            ("it",                              "exit",             Held::No),
            ("é日本",                            "日本",              Held::Exactly),
            ("ab",                              "a\u{200b}b",       Held::Loosely),
            ("caf\u{e9}",                       "cafe\u{301}",      Held::Loosely),
            ("👨‍ fam",                          "👨‍👩‍👧 fam",         Held::Loosely),
            ("👍",                              "👍🏽",              Held::Loosely),
            ("",                                "👍🏽",              Held::No),
            ("ends in",                         "ends in \\",       Held::No),
        ];
        for (draft, text, expected) in table {
            assert_eq!(held_at_end(draft, text), expected, "{draft:?} {text:?}");
        }
    }
}
