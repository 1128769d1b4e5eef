//! Durations as people write them, on the command line and in files: one syntax for both.

use std::time::Duration;

const WANTED: &str = "expected a duration such as 30s, 1m, 1h30m or 250ms, or a number of seconds";

/// `30s`, `5m`, `1h30m`, `250ms`, `2d`; each part may have a fraction. A number without a unit is one of seconds.
pub(crate) fn parse(text: &str) -> Option<Duration> {
    let text = text.trim();
    if let Ok(seconds) = text.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let mut total = 0.0;
    let mut rest = text;
    while !rest.is_empty() {
        let number = rest.find(|letter: char| !letter.is_ascii_digit() && letter != '.')?;
        let unit = rest[number..].find(|letter: char| !letter.is_ascii_alphabetic()).map_or(rest.len(), |n| number + n);
        let seconds = match &rest[number..unit] {
            "ms" => 0.001,
            "s" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3_600.0,
            "d" => 86_400.0,
            _ => return None,
        };
        total += rest[..number].parse::<f64>().ok()? * seconds;
        rest = &rest[unit..];
    }
    if text.is_empty() { None } else { Duration::try_from_secs_f64(total).ok() }
}

/// The value of an option.
pub(crate) fn argument(text: &str) -> Result<Duration, String> {
    match parse(text) {
        Some(duration) => Ok(duration),
        None if text.trim_start().starts_with('-') => Err("a duration cannot be negative".to_owned()),
        None => Err(WANTED.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_syntax_is_read_everywhere() {
        let table = [
            ("30", Some(30_000)),
            ("0.5", Some(500)),
            ("30s", Some(30_000)),
            ("1.5m", Some(90_000)),
            ("1h30m", Some(5_400_000)),
            ("250ms", Some(250)),
            ("2d", Some(172_800_000)),
            (" 1m ", Some(60_000)),
            ("0", Some(0)),
            ("", None),
            ("soon", None),
            ("5x", None),
            ("s", None),
            ("-1", None),
            ("1s2", None),
            ("inf", None),
            ("1e300", None),
        ];
        for (text, millis) in table {
            assert_eq!(parse(text), millis.map(Duration::from_millis), "{text:?}");
        }
        assert_eq!(argument("-2").unwrap_err(), "a duration cannot be negative");
        assert_eq!(argument("soon").unwrap_err(), WANTED);
    }
}
