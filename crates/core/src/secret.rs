//! Configured texts in which references such as `${TOKEN}` were resolved, and a mask for texts that may quote them.
//!
//! A [`Resolved`] knows which of its parts came from a reference, and prints the reference instead. A [`Mask`] replaces
//! the same values in texts of other origin: errors, stderr, answers.

use std::{borrow::Cow, fmt, ops::Range};

use serde_json::Value;

/// A shorter value is masked where it is printed by itself, but not searched for in other texts, where it would be
/// found by chance.
pub const SEARCHED_MIN: usize = 8;
/// Values that one mask knows; with one more the shortest is forgotten.
pub const SECRETS_MAX: usize = 4096;

/// A part of a text that came from a reference.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    pub at: Range<usize>,
    /// The name in the reference: `TOKEN` of `${TOKEN}`.
    pub name: String,
}

/// A configured text with its references resolved. `Display` and `Debug` show the references; only [`Resolved::expose`]
/// shows what they stand for.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Resolved {
    value: String,
    /// In order, without overlaps.
    parts: Vec<Part>,
}

impl Resolved {
    /// The parts must be ranges of the value, in order.
    pub fn new(value: String, parts: Vec<Part>) -> Resolved {
        debug_assert!(parts.iter().all(|part| value.get(part.at.clone()).is_some()), "the parts are of another text");
        Resolved { value, parts }
    }

    /// The same text with a prefix.
    pub fn after(self, before: &str) -> Resolved {
        let shift = |part: Part| Part { at: part.at.start + before.len()..part.at.end + before.len(), ..part };
        Resolved { value: format!("{before}{}", self.value), parts: self.parts.into_iter().map(shift).collect() }
    }

    /// The real value, for the code that needs it.
    pub fn expose(&self) -> &str {
        &self.value
    }

    /// The names in the references.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(|part| part.name.as_str())
    }

    /// The parts that came from references: name and value.
    fn secrets(&self) -> impl Iterator<Item = (&str, &str)> {
        self.parts.iter().map(|part| (part.name.as_str(), &self.value[part.at.clone()]))
    }
}

impl fmt::Display for Resolved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut end = 0;
        for part in &self.parts {
            write!(f, "{}${{{}}}", &self.value[end..part.at.start], part.name)?;
            end = part.at.end;
        }
        f.write_str(&self.value[end..])
    }
}

impl fmt::Debug for Resolved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

impl From<&str> for Resolved {
    fn from(value: &str) -> Resolved {
        Resolved { value: value.to_owned(), parts: Vec::new() }
    }
}

impl From<String> for Resolved {
    fn from(value: String) -> Resolved {
        Resolved { value, parts: Vec::new() }
    }
}

/// The values of references, to be replaced wherever a text is printed or served.
#[derive(Clone, Default)]
pub struct Mask {
    /// Longest first, so that a value that contains another one is replaced whole: value and replacement.
    known: Vec<(String, String)>,
}

impl Mask {
    /// Learns all values of references in a text. Earlier values are kept, because processes that were started with
    /// them may still print them.
    pub fn learn(&mut self, text: &Resolved) {
        for (name, value) in text.secrets() {
            let shown = format!("${{{name}}}");
            let quoted = serde_json::to_string(value).unwrap_or_default();
            let encoded = percent_encoded(value);
            // A log is read line by line, and a value may be printed as JSON or as part of an address.
            let forms = [value, quoted.trim_matches('"')].into_iter().chain(value.lines().map(str::trim));
            let forms = forms.chain(encoded.iter().map(String::as_str));
            for form in forms.filter(|form| form.len() >= SEARCHED_MIN) {
                if !self.known.iter().any(|(known, _)| known == form) {
                    self.known.push((form.to_owned(), shown.clone()));
                }
            }
        }
        self.known.sort_by_key(|(value, _)| std::cmp::Reverse(value.len()));
        self.known.truncate(SECRETS_MAX);
    }

    pub fn hide<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let mut text = Cow::Borrowed(text);
        for (value, shown) in &self.known {
            if text.contains(value.as_str()) {
                text = Cow::Owned(text.replace(value.as_str(), shown));
            }
        }
        text
    }

    /// Masks every text in a JSON value, names of members included.
    pub fn hide_in(&self, value: &mut Value) {
        if self.known.is_empty() {
            return;
        }
        match value {
            Value::String(text) => {
                if let Cow::Owned(hidden) = self.hide(text) {
                    *text = hidden;
                }
            }
            Value::Array(members) => members.iter_mut().for_each(|member| self.hide_in(member)),
            Value::Object(members) => {
                for (name, mut member) in std::mem::take(members) {
                    self.hide_in(&mut member);
                    members.insert(self.hide(&name).into_owned(), member);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

/// The forms of a value in an address: in a path or in a query, with hexadecimal digits of either case. Nothing if they
/// equal the value.
fn percent_encoded(value: &str) -> Vec<String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    if value.bytes().all(is_plain) {
        return Vec::new();
    }
    let mut forms = Vec::new();
    for (kept, space) in [("", "%20"), ("/", "%20"), ("", "+"), ("/", "+")] {
        for is_lower in [false, true] {
            let mut form = String::new();
            for byte in value.bytes() {
                match byte {
                    byte if is_plain(byte) || kept.as_bytes().contains(&byte) => form.push(char::from(byte)),
                    b' ' => form.push_str(space),
                    byte if is_lower => form.push_str(&format!("%{byte:02x}")),
                    byte => form.push_str(&format!("%{byte:02X}")),
                }
            }
            forms.push(form);
        }
    }
    forms
}

impl fmt::Debug for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mask of {} values", self.known.len())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn resolved(parts: &[(&str, Option<&str>)]) -> Resolved {
        let (mut value, mut secret) = (String::new(), Vec::new());
        for (text, name) in parts {
            let start = value.len();
            value.push_str(text);
            secret.extend(name.map(|name| Part { at: start..value.len(), name: name.to_owned() }));
        }
        Resolved::new(value, secret)
    }

    #[test]
    fn a_resolved_text_prints_its_references() {
        let table = [
            (resolved(&[("plain", None)]), "plain", "plain"),
            (resolved(&[("Bearer ", None), ("s3cret", Some("TOKEN"))]), "Bearer s3cret", "Bearer ${TOKEN}"),
            (
                resolved(&[("http://h/?key=", None), ("k", Some("K")), ("&x=1", None)]),
                "http://h/?key=k&x=1",
                "http://h/?key=${K}&x=1",
            ),
            (resolved(&[("a", Some("A")), ("b", Some("B"))]), "ab", "${A}${B}"),
            (resolved(&[("", Some("EMPTY"))]), "", "${EMPTY}"),
        ];
        for (text, value, shown) in table {
            assert_eq!((text.expose(), text.to_string().as_str()), (value, shown));
            assert_eq!(format!("{text:?}"), format!("{shown:?}"));
            assert_eq!(text.clone().after("x/").to_string(), format!("x/{shown}"));
        }
    }

    #[test]
    fn a_mask_hides_values_in_other_texts() {
        let mut mask = Mask::default();
        mask.learn(&resolved(&[("Bearer ", None), ("s3cret-token", Some("TOKEN"))]));
        mask.learn(&resolved(&[("s3cret-token-and-more", Some("LONG"))]));
        mask.learn(&resolved(&[("short", Some("SHORT"))]));
        mask.learn(&resolved(&[("-----BEGIN\nline one of it\nab\n", Some("PEM"))]));
        mask.learn(&resolved(&[("quo\"ted-value", Some("QUOTED"))]));
        mask.learn(&resolved(&[("p@ss/wörd & more", Some("ENCODED"))]));
        let table = [
            ("nothing in it", "nothing in it"),
            ("GET /?key=p%40ss%2Fw%C3%B6rd%20%26%20more failed", "GET /?key=${ENCODED} failed"),
            ("GET /p%40ss/w%C3%B6rd%20%26%20more failed", "GET /${ENCODED} failed"),
            ("GET /?key=p%40ss%2fw%c3%b6rd+%26+more failed", "GET /?key=${ENCODED} failed"),
            ("401 for s3cret-token at s3cret-token", "401 for ${TOKEN} at ${TOKEN}"),
            ("x=s3cret-token-and-more", "x=${LONG}"),
            ("a short word", "a short word"),
            ("> line one of it", "> ${PEM}"),
            (r#"{"key":"quo\"ted-value"}"#, r#"{"key":"${QUOTED}"}"#),
            ("Bearer ", "Bearer "),
        ];
        for (text, hidden) in table {
            assert_eq!(mask.hide(text), hidden);
        }
        let mut value = json!({"a": ["s3cret-token", 1, null], "s3cret-token": {"b": "x s3cret-token"}});
        mask.hide_in(&mut value);
        assert_eq!(value, json!({"a": ["${TOKEN}", 1, null], "${TOKEN}": {"b": "x ${TOKEN}"}}));
        assert_eq!(format!("{mask:?}"), "Mask of 22 values");
    }
}
