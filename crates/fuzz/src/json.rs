//! A reference checker for JSON: it shares no code with the one under test, and does not recurse either.

/// The top level of a JSON text.
pub enum Top<'a> {
    /// The members in their order, names decoded if possible.
    Object(Vec<(String, &'a str)>),
    Array(Vec<&'a str>),
    Scalar,
}

/// Reads a JSON text; `None` if it is invalid.
pub fn read(text: &[u8]) -> Option<Top<'_>> {
    let text = std::str::from_utf8(text).ok()?;
    let mut at = Cursor { text, at: 0 };
    at.space();
    let (mut members, mut elements) = (Vec::new(), Vec::new());
    // One entry for each open container: whether it is an object.
    let mut open: Vec<bool> = Vec::new();
    let (mut name, mut begun) = ("", 0);
    let first = at.peek()?;
    'value: loop {
        if open.len() == 1 {
            begun = at.at;
        }
        match at.peek()? {
            container @ (b'{' | b'[') => {
                at.at += 1;
                at.space();
                let is_object = container == b'{';
                if at.peek()? != container + 2 {
                    open.push(is_object);
                    if is_object {
                        let key = at.name()?;
                        name = if open.len() == 1 { key } else { name };
                    }
                    continue 'value;
                }
                at.at += 1;
            }
            b'"' => drop(at.string()?),
            _ => at.scalar()?,
        }
        // A value has ended.
        loop {
            if open.len() == 1 {
                let value = &text[begun..at.at];
                if open[0] { members.push((decoded(name), value)) } else { elements.push(value) }
            }
            at.space();
            let Some(&is_object) = open.last() else {
                return (at.at == text.len()).then_some(match first {
                    b'{' => Top::Object(members),
                    b'[' => Top::Array(elements),
                    _ => Top::Scalar,
                });
            };
            match at.peek()? {
                b',' => {
                    at.at += 1;
                    at.space();
                    if is_object {
                        let key = at.name()?;
                        name = if open.len() == 1 { key } else { name };
                    }
                    continue 'value;
                }
                b'}' if is_object => {}
                b']' if !is_object => {}
                _ => return None,
            }
            at.at += 1;
            open.pop();
        }
    }
}

/// A JSON string → its content; a string that no Rust string can hold is returned unchanged.
pub fn decoded(string: &str) -> String {
    serde_json::from_str(string).unwrap_or_else(|_| string.to_owned())
}

struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while self.peek().is_some_and(|byte| b" \t\r\n".contains(&byte)) {
            self.at += 1;
        }
    }

    /// A member's name with the colon and the space after it.
    fn name(&mut self) -> Option<&'a str> {
        let name = self.string()?;
        self.space();
        if self.peek()? != b':' {
            return None;
        }
        self.at += 1;
        self.space();
        Some(name)
    }

    fn string(&mut self) -> Option<&'a str> {
        let begun = self.at;
        if self.peek()? != b'"' {
            return None;
        }
        self.at += 1;
        loop {
            let byte = self.peek()?;
            self.at += 1;
            match byte {
                b'"' => return Some(&self.text[begun..self.at]),
                0..0x20 => return None,
                b'\\' => {
                    let escape = self.peek()?;
                    self.at += 1;
                    match escape {
                        b'u' => {
                            let digits = self.text.as_bytes().get(self.at..self.at + 4)?;
                            if !digits.iter().all(u8::is_ascii_hexdigit) {
                                return None;
                            }
                            self.at += 4;
                        }
                        _ if b"\"\\/bfnrt".contains(&escape) => {}
                        _ => return None,
                    }
                }
                _ => {}
            }
        }
    }

    /// A number or one of the three literals.
    fn scalar(&mut self) -> Option<()> {
        let rest = &self.text[self.at..];
        if let Some(word) = ["true", "false", "null"].into_iter().find(|word| rest.starts_with(word)) {
            self.at += word.len();
            return Some(());
        }
        if self.peek()? == b'-' {
            self.at += 1;
        }
        match self.peek()? {
            b'0' => self.at += 1,
            _ => self.digits()?,
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Some(())
    }

    fn digits(&mut self) -> Option<()> {
        let begun = self.at;
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        (self.at > begun).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Top, read};

    #[test]
    fn the_reference_checker_agrees_with_serde_json() {
        let table = [
            "",
            " ",
            "{}",
            "[]",
            "[1,2]",
            "[1,]",
            "{\"a\":1}",
            "{\"a\":1,}",
            "{\"a\"}",
            "{a:1}",
            "\"\\u12aF\"",
            "\"\\ud800\"",
            "\"\\x\"",
            "\"\n\"",
            "01",
            "-0",
            "-",
            "1.",
            "1.5e-3",
            "1e",
            "nul",
            "null",
            "true]",
            "[[[]],{}]",
            "{\"a\":{\"b\":[]}} x",
        ];
        for text in table {
            let theirs = serde_json::from_str::<&serde_json::value::RawValue>(text).is_ok();
            assert_eq!(read(text.as_bytes()).is_some(), theirs, "{text:?}");
        }
        assert!(read(&[b'[', 0xff, b']']).is_none());
        let deep = format!("{}{}", "[".repeat(1 << 20), "]".repeat(1 << 20));
        assert!(matches!(read(deep.as_bytes()), Some(Top::Array(elements)) if elements.len() == 1));
    }

    #[test]
    fn top_level_members_are_reported() {
        let Some(Top::Object(members)) = read(br#" {"a":{"b":[1]}, "\u0063" : "x", "a":2}"#) else {
            panic!("an object")
        };
        let members: Vec<(&str, &str)> = members.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        assert_eq!(members, [("a", r#"{"b":[1]}"#), ("c", r#""x""#), ("a", "2")]);
    }
}
