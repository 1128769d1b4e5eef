//! Texts cut to a number of bytes, between two characters.

/// The beginning of a text.
pub fn head(text: &str, bytes_max: usize) -> &str {
    let end = (0..=bytes_max.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

/// The end of a text.
pub fn tail(text: &str, bytes_max: usize) -> &str {
    let from = (text.len().saturating_sub(bytes_max)..text.len()).find(|from| text.is_char_boundary(*from));
    &text[from.unwrap_or(text.len())..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_character_is_split() {
        #[rustfmt::skip]
        let table = [
            // text   bytes  head   tail
            ("",      3,     "",    ""),
            ("abc",   0,     "",    ""),
            ("abc",   2,     "ab",  "bc"),
            ("abc",   3,     "abc", "abc"),
            ("abc",   9,     "abc", "abc"),
            ("aéa",   2,     "a",   "a"),
            ("aéa",   3,     "aé",  "éa"),
            ("🦀",    3,     "",    ""),
        ];
        for (text, bytes, begins, ends) in table {
            assert_eq!((head(text, bytes), tail(text, bytes)), (begins, ends), "{text} {bytes}");
        }
    }
}
