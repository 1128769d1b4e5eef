//! Error texts of the operating system, as they are shown to people.

/// The text of a system error without its number and, where it begins with a plain word, without its capital letter.
pub fn plain(cause: &str) -> String {
    let words = match cause.rfind(" (os error ") {
        Some(at) if cause.ends_with(')') => &cause[..at],
        _ => cause,
    };
    // Only an ordinary word gets a small letter: `Permission denied`, not `I/O error`.
    let mut letters = words.chars();
    match (letters.next(), letters.next()) {
        (Some(first), Some(second)) if first.is_ascii_uppercase() && second.is_ascii_lowercase() => {
            format!("{}{}", first.to_ascii_lowercase(), &words[1..])
        }
        _ => words.to_owned(),
    }
}
