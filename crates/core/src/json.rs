//! Checks JSON text without building values: it reads every byte once and keeps only the positions of parts.
//!
//! A relay reads a few members of each line and must know that the rest is valid JSON. Long strings, which are most
//! of a payload, are skipped in blocks.

/// A piece of valid JSON text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Raw<'a>(&'a str);

impl<'a> Raw<'a> {
    /// Checks that the text is one JSON value, with nothing but white space around it.
    pub fn parse(text: &'a str) -> Option<Raw<'a>> {
        let mut scan = Scan::new(text);
        let raw = scan.value()?;
        scan.is_over().then_some(raw)
    }

    /// A part of a text that was already checked as a whole.
    pub(crate) fn checked(text: &'a str) -> Raw<'a> {
        Raw(text)
    }

    pub fn get(self) -> &'a str {
        self.0
    }

    /// A string's content, unescaped.
    pub fn text(self) -> Option<String> {
        match self.plain() {
            Some(plain) => Some(plain.to_owned()),
            None => serde_json::from_str(self.0).ok(),
        }
    }

    /// A string's content, if nothing in it is escaped.
    pub fn plain(self) -> Option<&'a str> {
        let inner = self.0.strip_prefix('"')?.strip_suffix('"')?;
        (!inner.contains('\\')).then_some(inner)
    }

    /// Calls `each` for the members of an object, in their order; `None` if the value is not an object.
    pub fn for_each_member(self, mut each: impl FnMut(Raw<'a>, Raw<'a>)) -> Option<()> {
        Scan::checked(self.0).object(|scan, name| {
            let value = scan.value()?;
            each(name, value);
            Some(())
        })
    }

    /// The first elements of an array, and whether there are more; `None` if the value is not an array.
    pub fn first_elements(self, max: usize) -> Option<(Vec<Raw<'a>>, bool)> {
        let mut scan = Scan::checked(self.0);
        let mut elements = Vec::new();
        scan.eat(b'[')?;
        while scan.next_byte()? != b']' {
            if elements.len() == max {
                return Some((elements, true));
            }
            elements.push(scan.value()?);
            if scan.next_byte()? == b',' {
                scan.at += 1;
            }
        }
        Some((elements, false))
    }
}

/// How deep containers may be nested in a message. This check needs one bit per level, but the servers and clients
/// that receive the message recurse.
pub const DEPTH_MAX: usize = 10_000;

/// A pass over a text, from its start to its end. It does not recurse.
#[derive(Debug)]
pub struct Scan<'a> {
    text: &'a str,
    at: usize,
    is_too_deep: bool,
    /// The text was checked before, so only the ends of values are looked for.
    is_checked: bool,
}

/// Whether each open container is an object or an array: one bit each, so that the usual depth needs no allocation.
#[derive(Default)]
struct Depth {
    bits: u64,
    count: usize,
    spilled: Vec<u64>,
}

impl Depth {
    fn push(&mut self, is_object: bool) {
        if self.count > 0 && self.count.is_multiple_of(64) {
            self.spilled.push(self.bits);
        }
        self.bits = self.bits << 1 | u64::from(is_object);
        self.count += 1;
    }

    fn pop(&mut self) {
        self.count -= 1;
        self.bits >>= 1;
        if self.count > 0 && self.count.is_multiple_of(64) {
            self.bits = self.spilled.pop().expect("pushed at this depth");
        }
    }

    fn is_object(&self) -> bool {
        self.bits & 1 == 1
    }
}

impl<'a> Scan<'a> {
    pub fn new(text: &'a str) -> Scan<'a> {
        Scan { text, at: 0, is_too_deep: false, is_checked: false }
    }

    /// For a text that was checked before.
    pub(crate) fn checked(text: &'a str) -> Scan<'a> {
        Scan { is_checked: true, ..Scan::new(text) }
    }

    /// Whether a value so far was nested deeper than [`DEPTH_MAX`] levels.
    pub fn is_too_deep(&self) -> bool {
        self.is_too_deep
    }

    /// The offset of the next byte to read.
    pub fn position(&self) -> usize {
        self.at
    }

    #[inline(always)]
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    /// The next byte that is not white space.
    #[inline(always)]
    pub fn next_byte(&mut self) -> Option<u8> {
        match self.peek()? {
            byte if byte > b' ' => Some(byte),
            _ => self.next_byte_after_space(),
        }
    }

    #[cold]
    fn next_byte_after_space(&mut self) -> Option<u8> {
        loop {
            match self.peek()? {
                b' ' | b'\t' | b'\n' | b'\r' => self.at += 1,
                byte => return Some(byte),
            }
        }
    }

    pub fn is_over(&mut self) -> bool {
        self.next_byte().is_none()
    }

    #[inline(always)]
    fn eat(&mut self, byte: u8) -> Option<()> {
        (self.next_byte()? == byte).then(|| self.at += 1)
    }

    /// Reads an object; `each` is called at each member's value and must read that value.
    pub fn object(&mut self, mut each: impl FnMut(&mut Self, Raw<'a>) -> Option<()>) -> Option<()> {
        self.eat(b'{')?;
        if self.next_byte()? == b'}' {
            self.at += 1;
            return Some(());
        }
        loop {
            let name = self.name()?;
            each(self, name)?;
            match self.next_byte()? {
                b',' => self.at += 1,
                b'}' => {
                    self.at += 1;
                    return Some(());
                }
                _ => return None,
            }
        }
    }

    /// Reads an array.
    pub fn array(&mut self, mut each: impl FnMut(Raw<'a>)) -> Option<()> {
        self.eat(b'[')?;
        if self.next_byte()? == b']' {
            self.at += 1;
            return Some(());
        }
        loop {
            each(self.value()?);
            match self.next_byte()? {
                b',' => self.at += 1,
                b']' => {
                    self.at += 1;
                    return Some(());
                }
                _ => return None,
            }
        }
    }

    /// A member's name and its colon.
    #[inline]
    fn name(&mut self) -> Option<Raw<'a>> {
        self.next_byte()?;
        let start = self.at;
        self.string()?;
        let name = Raw(&self.text[start..self.at]);
        self.eat(b':')?;
        Some(name)
    }

    /// Reads one value of any kind.
    pub fn value(&mut self) -> Option<Raw<'a>> {
        let first = self.next_byte()?;
        let start = self.at;
        match first {
            b'"' => self.string()?,
            b'-' | b'0'..=b'9' => self.number()?,
            b'{' | b'[' if self.is_checked => self.at = end_of_checked(self.text.as_bytes(), start)?,
            _ => self.skip()?,
        }
        Some(Raw(&self.text[start..self.at]))
    }

    fn skip(&mut self) -> Option<()> {
        let mut depth = Depth::default();
        loop {
            self.is_too_deep |= depth.count > DEPTH_MAX;
            match self.next_byte()? {
                b'{' => {
                    self.at += 1;
                    if self.next_byte()? == b'}' {
                        self.at += 1;
                    } else {
                        depth.push(true);
                        self.name()?;
                        continue;
                    }
                }
                b'[' => {
                    self.at += 1;
                    if self.next_byte()? == b']' {
                        self.at += 1;
                    } else {
                        depth.push(false);
                        continue;
                    }
                }
                b'"' => self.string()?,
                b'-' | b'0'..=b'9' => self.number()?,
                b't' => self.word("true")?,
                b'f' => self.word("false")?,
                b'n' => self.word("null")?,
                _ => return None,
            }
            // A value ended; the containers around it may end here, too.
            loop {
                if depth.count == 0 {
                    return Some(());
                }
                match (self.next_byte()?, depth.is_object()) {
                    (b',', true) => {
                        self.at += 1;
                        self.name()?;
                        break;
                    }
                    (b',', false) => {
                        self.at += 1;
                        break;
                    }
                    (b'}', true) | (b']', false) => {
                        self.at += 1;
                        depth.pop();
                    }
                    _ => return None,
                }
            }
        }
    }

    fn word(&mut self, word: &str) -> Option<()> {
        self.text[self.at..].starts_with(word).then(|| self.at += word.len())
    }

    #[inline(always)]
    fn string(&mut self) -> Option<()> {
        let (quote, rest) = self.text.as_bytes().get(self.at..)?.split_first()?;
        if *quote != b'"' {
            return None;
        }
        self.at += 1;
        // Fast path: most names are shorter than a word.
        if let Some(word) = rest.first_chunk() {
            let length = plain_in(*word);
            if rest.get(length) == Some(&b'"') {
                self.at += length + 1;
                return Some(());
            }
        }
        self.long_string()
    }

    /// Reads the rest of a string, from any position in it.
    fn long_string(&mut self) -> Option<()> {
        let bytes = self.text.as_bytes();
        loop {
            self.at += plain_length(&bytes[self.at..]);
            match *bytes.get(self.at)? {
                b'"' => {
                    self.at += 1;
                    return Some(());
                }
                b'\\' => self.at = end_of_escapes(bytes, self.at)?,
                _ => return None,
            }
        }
    }

    fn digits(&mut self) -> Option<()> {
        let start = self.at;
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        (self.at > start).then_some(())
    }

    fn number(&mut self) -> Option<()> {
        if self.peek()? == b'-' {
            self.at += 1;
        }
        if self.peek()? == b'0' {
            self.at += 1;
        } else {
            self.digits()?;
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
}

/// The end of the escapes that begin here and follow each other.
fn end_of_escapes(bytes: &[u8], mut at: usize) -> Option<usize> {
    while bytes.get(at) == Some(&b'\\') {
        match bytes.get(at + 1)? {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => at += 2,
            b'u' => {
                let digits: [u8; 4] = *bytes.get(at + 2..)?.first_chunk()?;
                if !digits.iter().fold(true, |all, digit| all & digit.is_ascii_hexdigit()) {
                    return None;
                }
                at += 6;
            }
            _ => return None,
        }
    }
    Some(at)
}

/// The end of the object or array that begins at `start`, in a text that was checked. Blocks without a quotation mark
/// are skipped as long as the container cannot end in them.
fn end_of_checked(bytes: &[u8], start: usize) -> Option<usize> {
    let (mut at, mut depth) = (start, 0);
    loop {
        while let Some(block) = bytes.get(at..)?.first_chunk::<BLOCK>() {
            let count = |is_it: fn(u8) -> bool| block.iter().map(|byte| u8::from(is_it(*byte))).sum::<u8>();
            let closing = usize::from(count(|byte| matches!(byte, b']' | b'}')));
            if count(|byte| byte == b'"') > 0 || depth <= closing {
                break;
            }
            depth = depth + usize::from(count(|byte| matches!(byte, b'[' | b'{'))) - closing;
            at += BLOCK;
        }
        // Byte by byte, to the end of a string or of the block.
        let end = bytes.len().min(at + BLOCK);
        if at == end {
            return None;
        }
        while at < end {
            match bytes[at] {
                b'"' => {
                    at = end_of_checked_string(bytes, at)?;
                    continue;
                }
                b'[' | b'{' => depth += 1,
                b']' | b'}' => depth -= 1,
                _ => {}
            }
            at += 1;
            if depth == 0 {
                return Some(at);
            }
        }
    }
}

/// The end of the string that begins at `start`, in a text that was checked: its first quotation mark after an even
/// number of backslashes.
fn end_of_checked_string(bytes: &[u8], start: usize) -> Option<usize> {
    let mut at = start + 1;
    loop {
        let quote = at + memchr::memchr(b'"', bytes.get(at..)?)?;
        let backslashes = bytes[at..quote].iter().rev().take_while(|byte| **byte == b'\\').count();
        at = quote + 1;
        if backslashes % 2 == 0 {
            return Some(at);
        }
    }
}

/// How many bytes come before the first byte that ends a run of plain text: a quote, a backslash, or a control
/// character.
fn plain_length(bytes: &[u8]) -> usize {
    let mut length = 0;
    loop {
        for _ in 0..SHORT_WORDS {
            let Some(word) = bytes[length..].first_chunk() else { return length + plain_rest(&bytes[length..]) };
            let plain = plain_in(*word);
            length += plain;
            if plain < WORD {
                return length;
            }
        }
        // The check of a block has no early exit, so that it compiles to a few vector instructions.
        length += bytes[length..].chunks_exact(BLOCK).take_while(|block| is_plain(block)).count() * BLOCK;
    }
}

fn plain_rest(bytes: &[u8]) -> usize {
    bytes.iter().position(|byte| matches!(byte, b'"' | b'\\' | 0..b' ')).unwrap_or(bytes.len())
}

fn is_plain(block: &[u8]) -> bool {
    let ends = |byte: u8| u8::from(byte == b'"') | u8::from(byte == b'\\') | u8::from(byte < b' ');
    block.iter().fold(0, |found, byte| found | ends(*byte)) == 0
}

/// Bytes that are checked at once.
const BLOCK: usize = 64;
/// Words that are checked one by one before the first block.
const SHORT_WORDS: usize = 4;

const WORD: usize = 8;

/// How many bytes at the start of a word are plain.
#[inline(always)]
fn plain_in(word: [u8; WORD]) -> usize {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const TOPS: u64 = 0x8080_8080_8080_8080;
    let word = u64::from_le_bytes(word);
    let zeros = |word: u64| word.wrapping_sub(ONES) & !word;
    let quote = zeros(word ^ (ONES * b'"' as u64));
    let backslash = zeros(word ^ (ONES * b'\\' as u64));
    let control = word.wrapping_sub(ONES * b' ' as u64) & !word;
    // The top bit of each byte that ends the run. The lowest set bit is exact; a borrow may set others above it.
    let ends = (quote | backslash | control) & TOPS;
    ends.trailing_zeros() as usize / 8
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::de::IgnoredAny;

    fn agrees(text: &str) {
        let theirs = serde_json::from_str::<IgnoredAny>(text).is_ok();
        assert_eq!(Raw::parse(text).is_some(), theirs, "{text:?}");
    }

    /// A text that was checked is split in the same way as a text that is checked meanwhile.
    #[test]
    fn a_checked_text_is_split_in_the_same_way() {
        let strings = ["\"\"", "\"a\"", r#""\"""#, r#""\\""#, r#""\\\"]}[{,""#, "\"]\"", "\"{\""];
        let long = format!("\"{}\\\\\"", "[x]\\n".repeat(40));
        let mut values: Vec<String> = strings.into_iter().map(str::to_owned).chain([long]).collect();
        values.extend(["1", "-2.5e3", "true", "null", "[]", "{}"].map(str::to_owned));
        let mut dice = Dice(1);
        for round in 0..2_000 {
            let count = dice.roll(8);
            let picked: Vec<String> = (0..count).map(|_| values[dice.roll(values.len())].clone()).collect();
            let space = ["", " ", "\n  "][dice.roll(3)];
            let depth = [0, 1, 3, 70, 200][dice.roll(5)];
            let members: Vec<String> =
                picked.iter().enumerate().map(|(n, value)| format!("\"m{n}\":{space}{value}")).collect();
            let inner = match round % 2 {
                0 => format!("[{}]", picked.join(&format!("{space},"))),
                _ => format!("{{{space}{}}}", members.join(",")),
            };
            let whole = format!("{}{inner}{space}{}", "[".repeat(depth), "]".repeat(depth));
            if values.len() < 200 && whole.len() < 4_000 {
                values.push(whole.clone());
            }
            let text = format!("[{whole},{whole} ,7]");
            let mut checking = Vec::new();
            Scan::new(&text).array(|element| checking.push(element)).expect("valid");
            let (checked, is_cut) = Raw::parse(&text).expect("valid").first_elements(9).expect("an array");
            assert_eq!((checked, is_cut), (checking, false), "{text}");
            let (first, is_cut) = Raw::parse(&text).expect("valid").first_elements(2).expect("an array");
            assert_eq!((first.len(), is_cut), (2, true), "{text}");
        }
    }

    struct Dice(u64);

    impl Dice {
        fn roll(&mut self, sides: usize) -> usize {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) as usize % sides
        }
    }

    #[test]
    fn valid_json_is_the_same_as_for_serde_json() {
        let table = [
            "",
            " ",
            "1",
            "-1",
            "-",
            "01",
            "-0",
            "1.",
            "1.5",
            ".5",
            "1e5",
            "1E+5",
            "1e",
            "1e-",
            "1e5.2",
            "--1",
            "+1",
            "true",
            "tru",
            "truex",
            "null",
            "nul",
            "false",
            "\"\"",
            "\"a",
            "\"\\u12\"",
            "\"\\u12zz\"",
            "\"\\uD800\"",
            "\"\\x\"",
            "\"\t\"",
            "\"a\\\"b\"",
            "[]",
            "[",
            "]",
            "[1,]",
            "[,1]",
            "[1 2]",
            "[1,2] ",
            "[[[]]]",
            "[[[]]",
            "{}",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1,}",
            "{\"a\":1 \"b\":2}",
            "{\"a\":1,\"b\":{\"c\":[1,{}]}}",
            "{a:1}",
            "{\"a\":1}}",
            "{1:2}",
            "\u{feff}{}",
            "{\"a\":\"\u{1}\"}",
            "{\t\"a\"\t:\t1\t}",
            "[1,{\"a\":[]},\"x\"]x",
            "\"é\"",
            "[}",
            "{]",
        ];
        for text in table {
            agrees(text);
        }
        let deep = |n: usize| format!("{}{}", "[{\"a\":".repeat(n), "1}]".to_owned() + &"}]".repeat(n - 1));
        for n in [1, 31, 32, 33, 64, 65, 200] {
            assert!(Raw::parse(&deep(n)).is_some(), "{n} deep");
            assert!(Raw::parse(&deep(n)[..deep(n).len() - 1]).is_none(), "{n} deep, cut");
        }
        let long = format!("\"{}\\n{}\"", "x".repeat(100), "y".repeat(100));
        agrees(&long);
        agrees(&long.replace('y', "\u{2}"));
    }

    /// For any message with a few changed bytes, both parsers give the same result.
    #[test]
    fn invalid_json_is_the_same_as_for_serde_json() {
        let seed = br#"{"jsonrpc":"2.0","id":-12.5e3,"method":"a\u00e9b","params":{"x":[true,false,null,{}],"long":"0123456789012345678901234567890123456789\\"}}"#;
        let alphabet = b"{}[]\",:\\ 0-+.eEtfnu1x\x01\t";
        let mut dice = Dice(1);
        let mut dice = |sides: usize| dice.roll(sides);
        for _ in 0..20_000 {
            let mut bytes = seed.to_vec();
            for _ in 0..=dice(3) {
                let at = dice(bytes.len());
                match dice(3) {
                    0 => bytes[at] = alphabet[dice(alphabet.len())],
                    1 => drop(bytes.remove(at)),
                    _ => bytes.insert(at, alphabet[dice(alphabet.len())]),
                }
            }
            if let Ok(text) = String::from_utf8(bytes) {
                agrees(&text);
            }
        }
    }
}
