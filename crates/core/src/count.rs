//! A number with its noun in the right form.

/// "1 call", "2 calls": `one` and `many` are the two forms of the noun.
pub fn count(number: impl TryInto<u64> + std::fmt::Display + Copy, one: &str, many: &str) -> String {
    let is_one = number.try_into().is_ok_and(|number| number == 1);
    format!("{number} {}", if is_one { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular_and_all_others_are_plural() {
        assert_eq!([0, 1, 2].map(|n: usize| count(n, "crash", "crashes")), ["0 crashes", "1 crash", "2 crashes"]);
    }
}
