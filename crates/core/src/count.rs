//! A number with its noun in the right form; a list of names as a part of a sentence.

/// "1 call", "2 calls": `one` and `many` are the two forms of the noun.
pub fn count(number: impl TryInto<u64> + std::fmt::Display + Copy, one: &str, many: &str) -> String {
    let is_one = number.try_into().is_ok_and(|number| number == 1);
    format!("{number} {}", if is_one { one } else { many })
}

/// `a`, `b` or `c`; or another last word.
pub fn one_of(values: &[String], last_word: &str) -> String {
    let quoted: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} {last_word} {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_one_is_singular_and_all_others_are_plural() {
        assert_eq!([0, 1, 2].map(|n: usize| count(n, "crash", "crashes")), ["0 crashes", "1 crash", "2 crashes"]);
    }
}
