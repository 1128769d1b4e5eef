//! How deep a TOML text may be nested, checked before it is parsed. toml_edit's parser recurses, and its own limit does not
//! hold for every broken text: a table without a key (`{{}a={{}a=…`) closes a level that it never opened.

use toml_parser::{Source, lexer::TokenKind};

/// Levels of lists and tables, far above what a configuration needs. A deeper text is refused.
pub(crate) const NESTING_MAX: usize = 32;

/// The offset at which the text is nested too deep. Only a bracket that fits the innermost open one closes a level, so
/// that the count of a broken text is never below the levels that the parser enters.
pub(crate) fn too_deep(text: &str) -> Option<usize> {
    let mut open = Vec::new();
    for token in Source::new(text).lex() {
        let kind = token.kind();
        match kind {
            TokenKind::LeftSquareBracket | TokenKind::LeftCurlyBracket if open.len() == NESTING_MAX => {
                return Some(token.span().start());
            }
            TokenKind::LeftSquareBracket => open.push(TokenKind::RightSquareBracket),
            TokenKind::LeftCurlyBracket => open.push(TokenKind::RightCurlyBracket),
            _ if open.last() == Some(&kind) => drop(open.pop()),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_counted_outside_of_strings_and_comments() {
        let deep = |text: &str| too_deep(&text.replace('%', &"[".repeat(NESTING_MAX + 1)));
        let table = [
            // text                                   too deep at
            ("a = %", Some(4 + NESTING_MAX)),
            ("a = \"%\"", None),
            ("a = '''%\n%'''", None),
            ("# %\na = 1", None),
            ("[a]\nb = [{c = [{d = 1}]}]\n[[e]]\n", None),
        ];
        for (text, expected) in table {
            assert_eq!(deep(text), expected, "{text}");
        }
        let flat = "[[a]]\nb = [{c = 1}, {d = [2]}]\n".repeat(1_000);
        assert_eq!(too_deep(&flat), None);
    }

    #[test]
    fn brackets_that_open_no_level_of_the_parser_close_none() {
        for text in ["{{}a=", "{[]a=", "[{]}", "{ ] a = {"] {
            let text = format!("x = {}", text.repeat(2_000));
            assert!(too_deep(&text).is_some(), "{}", &text[..20]);
        }
    }
}
