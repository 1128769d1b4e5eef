//! Secrets in texts of any origin, recognized by their form or by the name before them, and replaced by `…`.
//!
//! This is for what is printed and logged: a text without anything that looks like a secret is returned as it is. Values
//! of references are hidden by [`crate::secret::Mask`], which knows them exactly.

use std::borrow::Cow;

use crate::visible;

/// Replaces a secret.
pub const HIDDEN: &str = "…";

/// Parts of a name whose value is a secret.
const TELLING: [&str; 12] = [
    "key",
    "token",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "credential",
    "auth",
    "bearer",
    "cookie",
    "signature",
    "private",
];
/// The same for words that other words begin with, such as `path`: only the whole word counts.
const TELLING_WORDS: [&str; 6] = ["pat", "pwd", "pass", "pw", "jwt", "sas"];
/// Under these names a value is a secret also in a sentence: `Password: hunter2`.
const PASSWORDS: [&str; 6] = ["password", "passwd", "passphrase", "pwd", "pass", "secret"];
const PASSWORD_MIN: usize = 4;
/// The same for all other names (`token: …`) if the value is this long and has a digit.
const IN_SENTENCE_MIN: usize = 16;
/// `?sig=…` is a signature if it is long. A short value is the number of a signal.
const SIGNATURE: &str = "sig";
const SIGNATURE_MIN: usize = 20;

/// The prefixes of well-known tokens, and how many characters must follow.
const TOKENS: [(&str, usize); 40] = [
    ("github_pat_", 16),
    ("ghp_", 16),
    ("gho_", 16),
    ("ghu_", 16),
    ("ghs_", 16),
    ("ghr_", 16),
    ("glpat-", 16),
    ("sk-", 16),
    ("sk_live_", 12),
    ("sk_test_", 12),
    ("rk_live_", 12),
    ("whsec_", 16),
    ("AKIA", 16),
    ("ASIA", 16),
    ("AIza", 30),
    ("ya29.", 16),
    ("xoxa-", 10),
    ("xoxb-", 10),
    ("xoxp-", 10),
    ("xoxr-", 10),
    ("xoxs-", 10),
    ("xoxe-", 10),
    ("xoxe.", 10),
    ("xapp-", 10),
    ("glrt-", 16),
    ("gldt-", 16),
    ("GOCSPX-", 16),
    ("dckr_pat_", 16),
    ("hvs.", 20),
    ("lin_api_", 16),
    ("figd_", 16),
    ("tskey-", 16),
    ("AGE-SECRET-KEY-1", 24),
    ("hf_", 24),
    ("npm_", 24),
    ("pypi-", 24),
    ("dop_v1_", 24),
    ("shpat_", 16),
    ("SG.", 24),
    ("outlast_", 64),
];
/// A JSON web token: two objects and a signature in base64url, with dots between.
const JWT: &str = "eyJ";
const JWT_MIN: usize = 24;
/// Words before a credential in a header.
const SCHEMES: [&str; 3] = ["bearer", "basic", "token"];
const CREDENTIAL_MIN: usize = 6;
/// A private key in PEM: a line that begins it, lines of base64, a line that ends it.
const KEY_BEGIN: &str = "-----BEGIN ";
const KEY_END: &str = "-----END ";
const KEY_NAME: &str = "PRIVATE KEY";
const KEY_LABEL_MAX: usize = 64;
/// The lines of a private key have at least this many characters; only the last may have fewer.
const KEY_LINE_MIN: usize = 16;
/// A longer name is not a name. This bounds the work on a text that is made to be slow.
const NAME_MAX: usize = 64;
/// The longest escape before a word, of a colour: `\u001b[38;2;255;255;255m`.
const ESCAPE_MAX: usize = 24;
/// Quotation marks of JSON in JSON in JSON have many backslashes.
const QUOTE_MAX: usize = 8;
/// How much of a text is read to recognize a token; the token itself may be longer.
const LOOKED_AT_MAX: usize = 2048;

/// Whether a value under this name is probably a secret: `GITHUB_TOKEN`, `--api-key`, `Password`.
pub fn tells(name: &str) -> bool {
    let small = name.to_ascii_lowercase();
    TELLING.iter().any(|telling| small.contains(telling))
        || small.split(|letter: char| !letter.is_ascii_alphanumeric()).any(|word| TELLING_WORDS.contains(&word))
}

/// A command line with its secrets replaced.
pub fn command(words: &[String]) -> Vec<String> {
    let mut shown = Vec::with_capacity(words.len());
    let mut is_value = false;
    for word in words {
        let is_option = word.starts_with('-') && word.len() > 1;
        let name = word.split_once(['=', ':']).map(|(name, _)| name).filter(|name| !name.contains("//") && tells(name));
        shown.push(match name {
            // The whole text after the name, because a value may contain blanks and any punctuation.
            Some(name) if !name.contains(['?', ';', '&', ' ', '"']) => format!("{}{HIDDEN}", &word[..=name.len()]),
            _ if is_value && !is_option => HIDDEN.to_owned(),
            _ => text(word).into_owned(),
        });
        is_value = is_option && name.is_none() && tells(word);
    }
    shown
}

/// A text with everything that looks like a secret replaced. A line that contains one is returned without its escape
/// sequences, which may stand between a name and its value.
pub fn text(text: &str) -> Cow<'_, str> {
    if !has_escapes(text) && !text.contains(KEY_BEGIN) {
        return scan(text);
    }
    let (mut shown, mut has_secrets) = (String::with_capacity(text.len()), false);
    let mut lines = Lines::default();
    for (number, line) in text.split('\n').enumerate() {
        if number > 0 {
            shown.push('\n');
        }
        let line = lines.line(line);
        has_secrets |= matches!(line, Cow::Owned(_));
        shown.push_str(&line);
    }
    if has_secrets { Cow::Owned(shown) } else { Cow::Borrowed(text) }
}

/// Redacts a text that arrives line by line: a private key has several lines.
#[derive(Debug, Default)]
pub struct Lines {
    /// The private key that the last line belongs to.
    key: Option<PrivateKey>,
}

impl Lines {
    /// One line, without its line feed.
    pub fn line<'a>(&mut self, line: &'a str) -> Cow<'a, str> {
        // First with its escape sequences: an unfinished one can take the beginning of a secret with it.
        let whole = if has_escapes(line) { scan(line) } else { Cow::Borrowed(line) };
        let shown = if has_escapes(line) { visible::text(&whole) } else { Cow::Borrowed(line) };
        match self.key.as_mut().map(|key| key.part(&shown)) {
            Some(KeyPart::Body(at)) => return Cow::Owned(format!("{}{HIDDEN}", scan(&shown[..at]))),
            // The text around a header is not checked, so it may contain another secret.
            Some(KeyPart::Head) => {}
            Some(KeyPart::None) | None => self.key = None,
        }
        if let Some(after) = key_begin(&shown) {
            let rest = &shown[after..];
            let end = rest.find(KEY_END);
            self.key = end.is_none().then(PrivateKey::default);
            // The whole key in one line, with spaces or `\n` in place of line feeds.
            let body = rest[..end.unwrap_or(rest.len())].trim_start();
            let is_key = end.is_some() || body.starts_with("\\n") || run(body, 0, is_base64) >= KEY_LINE_MIN;
            if is_key && !body.is_empty() {
                let (before, end) = (scan(&shown[..after]), scan(&rest[end.unwrap_or(rest.len())..]));
                return Cow::Owned(format!("{before}{HIDDEN}{end}"));
            }
        }
        match (scan(&shown), &whole) {
            (Cow::Borrowed(_), Cow::Borrowed(_)) => Cow::Borrowed(line),
            (redacted, _) => Cow::Owned(redacted.into_owned()),
        }
    }
}

#[derive(Debug, Default)]
struct PrivateKey {
    has_body: bool,
}

enum KeyPart {
    /// Base64, from this position of the line on.
    Body(usize),
    /// A header of the key, or an empty line.
    Head,
    /// Not a part of a key.
    None,
}

impl PrivateKey {
    fn part(&mut self, line: &str) -> KeyPart {
        let line = line.trim_end();
        if line.is_empty() || ["Proc-Type: ", "DEK-Info: "].iter().any(|name| line.contains(name)) {
            return KeyPart::Head;
        }
        // Before it there may be a time or a level.
        let start = line.rfind(' ').map_or(0, |at| at + 1);
        let is_only = line[..start].trim_start().is_empty();
        let is_body =
            line[start..].bytes().all(is_base64) && (line.len() - start >= KEY_LINE_MIN || self.has_body && is_only);
        self.has_body |= is_body;
        if is_body { KeyPart::Body(start) } else { KeyPart::None }
    }
}

/// The end of the mark that begins a private key.
fn key_begin(line: &str) -> Option<usize> {
    let label = line.rfind(KEY_BEGIN)? + KEY_BEGIN.len();
    let length = run_up_to(line, label, KEY_LABEL_MAX, |byte| byte.is_ascii_uppercase() || byte == b' ');
    let after = label + length;
    (line[label..after].contains(KEY_NAME) && line[after..].starts_with("-----")).then_some(after + 5)
}

fn has_escapes(text: &str) -> bool {
    text.contains(['\x1b', '\u{9b}'])
}

fn is_base64(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=')
}

/// A text without private keys and escape sequences.
fn scan(text: &str) -> Cow<'_, str> {
    let mut shown = String::new();
    // Everything before this position is in `shown`.
    let mut done = 0;
    while let Some((_, secret)) = next_secret(text, done) {
        shown.push_str(&text[done..secret.start]);
        shown.push_str(HIDDEN);
        done = secret.end;
    }
    if done == 0 {
        return Cow::Borrowed(text);
    }
    shown.push_str(&text[done..]);
    Cow::Owned(shown)
}

/// The next secret from a position on, which is the beginning of the text or the end of a secret; and where the name
/// begins by which it was recognized.
fn next_secret(text: &str, mut at: usize) -> Option<(usize, std::ops::Range<usize>)> {
    let bytes = text.as_bytes();
    while at < bytes.len() {
        // Only a letter at the beginning of a word can begin a token or a name.
        let is_start =
            bytes[at].is_ascii_alphabetic() && (at == 0 || !is_word(bytes[at - 1]) || follows_escape(text, at));
        if !is_start {
            at += 1;
            continue;
        }
        let secret = token(text, at).or_else(|| named(text, at)).or_else(|| credential(text, at));
        if let Some(secret) = secret.or_else(|| option(text, at)).or_else(|| user_info(text, at)) {
            return Some((at, secret));
        }
        // Not beyond the next beginning of a word: an escape looks like a part of the word behind it.
        let is_in_word = |next: &usize| bytes.get(*next).is_some_and(|byte| is_word(*byte));
        let is_in_escape = at > 0 && matches!(bytes[at - 1], b'\\' | b'%' | b'[');
        let escape = if is_in_escape { ESCAPE_MAX } else { 0 };
        let begins = (at + 1..).take(escape).take_while(is_in_word).find(|next| follows_escape(text, *next));
        at = begins.unwrap_or_else(|| at + bytes[at..].iter().take_while(|byte| is_word(**byte)).count().max(1));
    }
    None
}

/// Whether the text before this position is an escape, as in JSON (`\n`, `\u0022`), in an address (`%3D`), or of a colour
/// that is itself escaped (`\u001b[31m`). Its last letter is no part of the word behind it.
fn follows_escape(text: &str, at: usize) -> bool {
    let before = &text.as_bytes()[at.saturating_sub(ESCAPE_MAX)..at];
    let ends_in_hex = |count: usize| before.iter().rev().take(count).all(u8::is_ascii_hexdigit);
    match before {
        [.., b'\\', b'n' | b'r' | b't' | b'b' | b'f'] => true,
        [.., b'%', _, _] if ends_in_hex(2) => true,
        [.., b'\\', b'x', _, _] if ends_in_hex(2) => true,
        [.., b'\\', b'u', _, _, _, _] if ends_in_hex(4) => true,
        [color @ .., b'm'] => {
            let digits = color.iter().rev().take_while(|byte| byte.is_ascii_digit() || **byte == b';').count();
            let start = &color[..color.len() - digits];
            ["u001b[", "u001B[", "x1b[", "x1B[", "033["].iter().any(|escape| start.ends_with(escape.as_bytes()))
        }
        _ => false,
    }
}

/// How much of a text must be known beyond the position at which [`piece_end`] cuts it.
pub const PIECE_AHEAD: usize = 4 << 10;

/// Where a line that is longer than `max` is cut, so that neither part contains a half of a secret, or a value without
/// its name: both parts are redacted by themselves. A secret that is longer than half of `max` is cut nevertheless.
pub fn piece_end(line: &[u8], max: usize) -> usize {
    let known = &line[..line.len().min(max + PIECE_AHEAD)];
    let plain: String = known.iter().map(|byte| if byte.is_ascii() { char::from(*byte) } else { '?' }).collect();
    // The secrets that begin before the cut, each with its name. They do not overlap.
    let mut secrets: Vec<std::ops::Range<usize>> = Vec::new();
    let mut done = 0;
    while let Some((name, secret)) = next_secret(&plain, done).filter(|(name, _)| *name < max) {
        done = secret.end;
        // The dashes of an option belong to its name.
        secrets.push(plain[..name].trim_end_matches('-').len()..secret.end);
    }
    let next_of = |end: usize| secrets.get(secrets.partition_point(|secret| secret.end <= end));
    let is_outside = |end: &usize| next_of(*end).is_none_or(|secret| *end <= secret.start);
    let begins_secret = |end: usize| next_of(end).is_some_and(|secret| secret.start == end);
    let follows = |end: usize, is_of: fn(u8) -> bool| end > 0 && is_of(plain.as_bytes()[end - 1]);
    let ends = || (max / 2..=max).rev().filter(is_outside);
    let blank = ends().find(|end| follows(*end, |byte| byte.is_ascii_whitespace()) || begins_secret(*end));
    let mark = || ends().find(|end| follows(*end, |byte| !is_token(byte) && !is_base64(byte) && byte != b'?'));
    // Not inside a UTF-8 character, which has at most four bytes.
    let is_letter = |at: &usize| line.get(*at).is_none_or(|byte| byte & 0xC0 != 0x80);
    let anywhere = || (max.saturating_sub(3)..=max).rev().find(is_letter).unwrap_or(max).max(1);
    let Some(end) = blank.or_else(mark) else { return anywhere() };
    let label_end = (end + KEY_BEGIN.len() + KEY_LABEL_MAX).min(plain.len());
    match plain[..label_end].rfind(KEY_BEGIN) {
        Some(begin) if (max / 2..end).contains(&begin) && !plain[begin..end].contains(KEY_END) => begin,
        _ => end,
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

fn is_token(byte: u8) -> bool {
    is_word(byte) || byte == b'-'
}

/// How many bytes from a position on match, up to a limit.
fn run_up_to(text: &str, at: usize, max: usize, is_of: impl Fn(u8) -> bool) -> usize {
    text.as_bytes()[at..].iter().take(max).take_while(|byte| is_of(**byte)).count()
}

/// How many bytes from a position on match.
fn run(text: &str, at: usize, is_of: impl Fn(u8) -> bool) -> usize {
    text.as_bytes()[at..].iter().take_while(|byte| is_of(**byte)).count()
}

/// A token with a known prefix.
fn token(text: &str, at: usize) -> Option<std::ops::Range<usize>> {
    let rest = &text[at..];
    if rest.starts_with(JWT) {
        let is_part = |byte| is_token(byte) || byte == b'.' || byte == b'=';
        let length = run_up_to(text, at, LOOKED_AT_MAX, is_part);
        let is_jwt = length == LOOKED_AT_MAX || length >= JWT_MIN && rest[..length].matches('.').count() >= 2;
        return is_jwt.then(|| at..at + run(text, at, is_part));
    }
    let (start, least) = TOKENS.iter().find(|(start, _)| rest.starts_with(start))?;
    let is_part = |byte| is_token(byte) || byte == b'.';
    // A run of other characters is not read to its end: such runs may contain many beginnings of a token.
    let length = match *start {
        "AKIA" | "ASIA" => run(text, at + 4, |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit()),
        start => run(text, at + start.len(), is_part),
    };
    let end = at + start.len() + length;
    let is_whole = !text.as_bytes().get(end).copied().is_some_and(is_part);
    (is_whole && length >= *least).then_some(at..end)
}

/// The value in `name=value`, `name: value` and `"name": "value"`, if the name is that of a secret.
fn named(text: &str, at: usize) -> Option<std::ops::Range<usize>> {
    let bytes = text.as_bytes();
    let end = at + run_up_to(text, at, NAME_MAX + 1, |byte| is_token(byte) || byte == b'.');
    // `${NAME:-otherwise}` is a reference.
    if end - at > NAME_MAX || text[..at].ends_with("${") {
        return None;
    }
    let mut next = end + run_up_to(text, end, QUOTE_MAX, |byte| matches!(byte, b'"' | b'\'' | b' ' | b'\\'));
    let encoded = bytes.get(next..next + 3).filter(|mark| mark.eq_ignore_ascii_case(b"%3d"));
    let mark = if encoded.is_some() { b'=' } else { *bytes.get(next).filter(|byte| matches!(byte, b'=' | b':'))? };
    // Of `request.headers.token` and `key.rs` the last part is the name. This is checked last because few words come
    // this far.
    let name = text[at..end].rsplit('.').next().unwrap_or_default();
    let is_signature = name.eq_ignore_ascii_case(SIGNATURE);
    // A server's challenge contains no secret of the client.
    if !tells(name) && !is_signature || name.eq_ignore_ascii_case("www-authenticate") {
        return None;
    }
    next += encoded.map_or(1, <[u8]>::len);
    // `https://…` is an address, and `x::y` a path.
    if mark == b':' && matches!(bytes.get(next), Some(b'/' | b':')) {
        return None;
    }
    next += run(text, next, |byte| byte == b' ');
    // A reference is not a secret. This is checked first, because a text may contain many.
    if text[next..].trim_start_matches(['"', '\'', '\\']).starts_with("${") {
        return None;
    }
    let is_header = ["authorization", "cookie"].iter().any(|header| ends_with(name, header));
    // In a sentence a colon is followed by words.
    let is_sentence = mark == b':' && bytes[next - 1] == b' ' && !name.contains(['-', '_']) && !is_header;
    let is_value = |byte: u8| !byte.is_ascii_whitespace() && !matches!(byte, b'&' | b';' | b',' | b'"' | b'\'' | b')');
    let slashes = run_up_to(text, next, QUOTE_MAX, |byte| byte == b'\\');
    let (start, length) = match bytes.get(next)? {
        quote @ (b'"' | b'\'') => (next + 1, run(text, next + 1, |byte| byte != *quote && byte != b'\n')),
        // JSON within a JSON text.
        b'\\' if bytes.get(next + slashes) == Some(&b'"') => {
            let start = next + slashes + 1;
            (start, run(text, start, |byte| !matches!(byte, b'"' | b'\\' | b'\n')))
        }
        // The next parameter of an address that is itself a parameter.
        _ if encoded.is_some() => {
            let is_more =
                |at: &usize| bytes.get(*at).is_some_and(|byte| is_value(*byte)) && !bytes[*at..].starts_with(b"%26");
            (next, (next..).take_while(is_more).count())
        }
        _ => {
            let word = next + run(text, next, is_word);
            // `Authorization: Bearer abc`: the scheme is a separate word.
            let is_scheme = SCHEMES.iter().any(|scheme| text[next..word].eq_ignore_ascii_case(scheme));
            match (is_scheme && bytes.get(word) == Some(&b' '), is_sentence) {
                (true, true) => return credential(text, next),
                (true, false) => {
                    let value = word + run(text, word, |byte| byte == b' ');
                    (value, run(text, value, is_value))
                }
                (false, true) => (next, in_sentence(name, &text[next..])?),
                (false, false) if is_header && mark == b':' => {
                    (next, run(text, next, |byte| byte != b'\n' && byte != b'"' && byte != b'\''))
                }
                (false, false) => (next, run(text, next, is_value)),
            }
        }
    };
    let value = &text[start..start + length];
    let is_long = !is_signature || length >= SIGNATURE_MIN;
    (length > 0 && is_long && value != HIDDEN).then_some(start..start + length)
}

fn ends_with(name: &str, end: &str) -> bool {
    name.len().checked_sub(end.len()).is_some_and(|at| name.as_bytes()[at..].eq_ignore_ascii_case(end.as_bytes()))
}

/// The length of the value after `name: ` in a sentence, if it is more than a word.
fn in_sentence(name: &str, rest: &str) -> Option<usize> {
    let length =
        run_up_to(rest, 0, LOOKED_AT_MAX, |byte| !byte.is_ascii_whitespace() && !matches!(byte, b'"' | b'\'' | b','));
    let value = rest[..length].trim_end_matches(['.', ',', ';', ':', ')']);
    let is_password = PASSWORDS.iter().any(|password| ends_with(name, password));
    let is_secret = match is_password {
        true => value.len() >= PASSWORD_MIN && value.bytes().any(|byte| !byte.is_ascii_alphabetic()),
        false => {
            let is_part = |byte| is_token(byte) || matches!(byte, b'.' | b'+' | b'/' | b'=' | b'~');
            value.len() >= IN_SENTENCE_MIN
                && value.bytes().all(is_part)
                && value.bytes().any(|byte| byte.is_ascii_digit())
        }
    };
    is_secret.then_some(value.len())
}

/// The value in `Bearer value`.
fn credential(text: &str, at: usize) -> Option<std::ops::Range<usize>> {
    let end = at + run(text, at, is_word);
    let is_scheme = SCHEMES.iter().any(|scheme| text[at..end].eq_ignore_ascii_case(scheme));
    if !is_scheme || text.as_bytes().get(end) != Some(&b' ') {
        return None;
    }
    let length = run(text, end + 1, |byte| is_token(byte) || matches!(byte, b'.' | b'=' | b'+' | b'/' | b'~'));
    let value = &text[end + 1..end + 1 + length];
    // `token expired` is a sentence, and `Bearer realm="x"` is a challenge, which names parameters.
    let is_challenge = value.ends_with('=') && text[end + 1 + length..].starts_with('"');
    let is_value = !is_challenge && value.bytes().any(|byte| !byte.is_ascii_lowercase());
    (length >= CREDENTIAL_MIN && is_value).then_some(end + 1..end + 1 + length)
}

/// The value in `--pat value`, as in a command line that a server prints. A value of small letters only may be the next
/// word of a sentence about the option.
fn option(text: &str, at: usize) -> Option<std::ops::Range<usize>> {
    let before = text[..at].strip_suffix('-')?.trim_end_matches('-');
    let end = at + run_up_to(text, at, NAME_MAX + 1, is_token);
    let is_inside_word = before.chars().next_back().is_some_and(char::is_alphanumeric);
    if end - at > NAME_MAX || is_inside_word || text.as_bytes().get(end) != Some(&b' ') {
        return None;
    }
    let quote = text.as_bytes().get(end + 1).copied().filter(|byte| matches!(byte, b'"' | b'\''));
    let start = end + 1 + usize::from(quote.is_some());
    let length = run(text, start, |byte| match quote {
        Some(quote) => byte != quote && byte != b'\n',
        None => !byte.is_ascii_whitespace() && !matches!(byte, b'"' | b'\'' | b'`' | b',' | b')'),
    });
    let value = &text[start..start + length];
    let is_value = length >= CREDENTIAL_MIN && value.bytes().any(|byte| !byte.is_ascii_lowercase());
    (is_value && !value.starts_with(['-', '$']) && tells(&text[at..end])).then_some(start..start + length)
}

/// `user:password` in `scheme://user:password@host`.
fn user_info(text: &str, at: usize) -> Option<std::ops::Range<usize>> {
    let is_scheme = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
    let end = at + run_up_to(text, at, NAME_MAX, is_scheme);
    let start = end + text[end..].starts_with("://").then_some(3)?;
    let length =
        run(text, start, |byte| !byte.is_ascii_whitespace() && !matches!(byte, b'/' | b'?' | b'#' | b'"' | b'\''));
    let user = text[start..start + length].rfind('@')?;
    (user > 0).then_some(start..start + user)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line of a server that is cut into pieces shows no more than the whole line does.
    #[test]
    fn a_long_line_is_cut_between_secrets() {
        let key =
            format!("-----BEGIN RSA PRIVATE KEY-----\\n{}\\n-----END RSA PRIVATE KEY-----", "MIIEowIB".repeat(40));
        let secrets = [
            ("ghp_0123456789abcdefABCDEF0123456789abcd", "89abcdefABCDEF"),
            ("Authorization: Bearer head-S3cret-value", "S3cret"),
            (r#"{"password": "two words-S3cret"}"#, "S3cret"),
            ("--api-key arg-S3cret", "S3cret"),
            ("postgres://user:pw-S3cret@host/", "S3cret"),
            (key.as_str(), "MIIEowIB"),
        ];
        for (secret, part) in secrets {
            for filler in ["word ", "x", "ü", "a=b;"] {
                // Positions of the cut within the secret, and some around it.
                for shift in (0..secret.len() + 8).step_by(if secret.len() > 99 { 7 } else { 1 }) {
                    let start = 2048 + 4 - shift;
                    let mut line = filler.repeat(start / filler.len());
                    line.push(' ');
                    line.push_str(secret);
                    line.push_str(" and ");
                    line.push_str(&filler.repeat(4200 / filler.len()));
                    let end = piece_end(line.as_bytes(), 2048);
                    assert!((1024..=2048).contains(&end) && line.is_char_boundary(end), "{secret} {filler} {end}");
                    let mut lines = Lines::default();
                    let shown = [lines.line(&line[..end]).into_owned(), lines.line(&line[end..]).into_owned()].concat();
                    assert!(!shown.contains(part), "{secret} {filler} {shift} {end}");
                }
            }
        }
        // The only blank is inside another secret, whose name begins before the range of the cut.
        let line = format!(
            "{}\"authorization\":\"Bearer head-S3cret\",{}\"t\":\"ghp_0123456789abcdefABCDEF0123456789abcd\"{}",
            "\"a\":1,".repeat(167),
            "\"b\":2,".repeat(165),
            ",\"c\":3".repeat(600)
        );
        let end = piece_end(line.as_bytes(), 2048);
        let mut lines = Lines::default();
        let shown = [lines.line(&line[..end]).into_owned(), lines.line(&line[end..]).into_owned()].concat();
        assert!((1024..=2048).contains(&end), "{end}");
        assert!(!shown.contains("S3cret") && !shown.contains("89abcd"), "{shown}");
        // A secret without an end is cut somewhere.
        assert_eq!(piece_end("x".repeat(9000).as_bytes(), 2048), 2048);
        assert_eq!(piece_end(format!("token={}", "x".repeat(9000)).as_bytes(), 2048), 2048);
        assert_eq!(piece_end("ü".repeat(9000).as_bytes(), 2047), 2046);
    }

    fn words(command: &str) -> Vec<String> {
        command.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn command_lines_are_shown_without_secrets() {
        let table = [
            ("server --port 1 -v", "server --port 1 -v"),
            ("server --api-key sk-1 --port 1", "server --api-key … --port 1"),
            ("server --api-key=sk-1 --port=1", "server --api-key=… --port=1"),
            ("server --pat abc --path /x", "server --pat … --path /x"),
            ("server --no-auth --port 1", "server --no-auth --port 1"),
            ("env GITHUB_TOKEN=ghp_1 A=1 server", "env GITHUB_TOKEN=… A=1 server"),
            (
                "mcp-remote https://x.y/mcp --header Authorization:Bearer_1",
                "mcp-remote https://x.y/mcp --header Authorization:…",
            ),
            ("pg postgres://me:pw@host/db", "pg postgres://…@host/db"),
            ("x ghp_0123456789abcdefABCDEF0123456789abcd", "x …"),
            ("x https://h/mcp?key=abc&x=1", "x https://h/mcp?key=…&x=1"),
            ("x Server=h;Password=hunter2;Database=d", "x Server=h;Password=…;Database=d"),
            ("npx @scope/server-auth ./monkey.py", "npx @scope/server-auth ./monkey.py"),
        ];
        for (line, shown) in table {
            assert_eq!(command(&words(line)).join(" "), shown, "{line}");
        }
    }

    #[test]
    fn secrets_are_recognized_in_any_text() {
        let jwt = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl";
        let table = [
            ("nothing in it", "nothing in it"),
            (r#"{"msg":"failed\nghp_0123456789abcdefABCD\tAKIAIOSFODNN7EXAMPLE"}"#, r#"{"msg":"failed\n…\t…"}"#),
            (r"\u0022ghp_0123456789abcdefABCD\u0022", r"\u0022…\u0022"),
            (r"\u001b[1;31mghp_0123456789abcdefABCD\u001b[0m", r"\u001b[1;31m…\u001b[0m"),
            (r"\x1b[mBearer\nBearer abcdef-0123", r"\x1b[mBearer\nBearer …"),
            ("?next=https%3A%2F%2Fh%2F%3Ftoken%3Dabc123%26page%3D2", "?next=https%3A%2F%2Fh%2F%3Ftoken%3D…%26page%3D2"),
            ("%20ghp_0123456789abcdefABCD%ABghp_0123456789abcdefABCD", "%20…%AB…"),
            (r#"{\\\"token\\\":\\\"abc\\\"}"#, r#"{\\\"token\\\":\\\"…\\\"}"#),
            (r"C:\new\tokens\report%20monkey", r"C:\new\tokens\report%20monkey"),
            ("401 for ghp_0123456789abcdefABCD.", "401 for …"),
            ("github_pat_11ABCDEFG0123456789_abcdefghij", "…"),
            ("sk-ant-api03-abcdefghijklmnop is wrong", "… is wrong"),
            ("AKIAIOSFODNN7EXAMPLE", "…"),
            ("AKIAlowercaseisnot1", "AKIAlowercaseisnot1"),
            ("glpat-abcdefghij0123456789", "…"),
            ("xoxb-123456789012-abc", "…"),
            ("GET /x?key=abc123&page=2", "GET /x?key=…&page=2"),
            ("Password=hunter2; next", "Password=…; next"),
            ("pwd=x", "pwd=…"),
            (r#"{"token": "abc", "name": "x"}"#, r#"{"token": "…", "name": "x"}"#),
            (r#""API_KEY": "${API_KEY}""#, r#""API_KEY": "${API_KEY}""#),
            (r#""KEY": "${API_KEY:-none}""#, r#""KEY": "${API_KEY:-none}""#),
            ("api_key = 'abc d'", "api_key = '…'"),
            ("Authorization: Bearer abcdef0123", "Authorization: Bearer …"),
            ("authorization: Basic dXNlcjpwdw==", "authorization: Basic …"),
            ("sent Bearer ABCDEF012345", "sent Bearer …"),
            ("started x --pat pAtS3cret --path /a/B1", "started x --pat … --path /a/B1"),
            ("x --api-key 'a b c D' -token Abcdef1 y", "x --api-key '…' -token … y"),
            ("use --token to pass one, or --api-key ${API_KEY}", "use --token to pass one, or --api-key ${API_KEY}"),
            ("a pass-key Abcdef1", "a pass-key Abcdef1"),
            (r#"WWW-Authenticate: Bearer error="invalid_token""#, r#"WWW-Authenticate: Bearer error="invalid_token""#),
            ("the token expired yesterday", "the token expired yesterday"),
            ("KeyError: name", "KeyError: name"),
            ("invalid token: expected `}`", "invalid token: expected `}`"),
            ("mongodb+srv://u:p@host/db", "mongodb+srv://…@host/db"),
            ("https://host/path@2", "https://host/path@2"),
            ("a sk-learn package", "a sk-learn package"),
            ("task-0123456789abcdef0123", "task-0123456789abcdef0123"),
            ("src/auth/key.rs:12:3", "src/auth/key.rs:12:3"),
            ("Ünïcode ghp_0123456789abcdefABCD ü", "Ünïcode … ü"),
            // The scheme and the credential are two words under any name, with or without a blank after the colon.
            ("Proxy-Authorization: Basic dXNlcjpwdw==", "Proxy-Authorization: Basic …"),
            ("authorization:Basic dXNlcjpwdw==", "authorization:Basic …"),
            ("Authorization=Bearer abcdef", "Authorization=Bearer …"),
            ("Authorization: Bearer lowercase", "Authorization: Bearer …"),
            ("Authorization: Basic YTo=", "Authorization: Basic …"),
            ("X-Auth-Token: Bearer abc123x; next", "X-Auth-Token: Bearer …; next"),
            ("-H 'Authorization: Bearer abc123'", "-H 'Authorization: Bearer …'"),
            ("password: hunter2", "password: …"),
            ("Password: Tr0ub4dor&3 was refused", "Password: … was refused"),
            ("wrong password: try again", "wrong password: try again"),
            ("token: 0123456789abcdef0123", "token: …"),
            ("unexpected token: line 12", "unexpected token: line 12"),
            // JSON in a JSON text.
            (r#"{\"token\":\"abc\",\"name\":\"x\"}"#, r#"{\"token\":\"…\",\"name\":\"x\"}"#),
            ("https://x.blob/a?sv=1&sig=AbCdEfGhIjKlMnOpQrStUvWx%3D", "https://x.blob/a?sv=1&sig=…"),
            ("killed sig=9", "killed sig=9"),
            ("xoxs-1234567890-abc xoxe.xoxp-1-Mi0yLTEyMzQ1 hvs.CAESIJ0123456789abcdef", "… … …"),
            // Private keys: as lines, as one line, and mentions of one.
            (
                "a -----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nMIIEowIBAAKCAQEA1c7+\nab3=\n-----END RSA PRIVATE KEY----- b",
                "a -----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\n…\n…\n-----END RSA PRIVATE KEY----- b",
            ),
            (
                "12:00 -----BEGIN OPENSSH PRIVATE KEY-----\n12:00 b3BlbnNzaC1rZXktdjEAAAAA\nexit 1",
                "12:00 -----BEGIN OPENSSH PRIVATE KEY-----\n12:00 …\nexit 1",
            ),
            (
                "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4 token=hunter22\ntoken=hunter22 MIIEowIBAAKCAQEA",
                "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4 token=…\ntoken=… …",
            ),
            (r"-----BEGIN PRIVATE KEY-----\nMIIEow\n", "-----BEGIN PRIVATE KEY-----…"),
            (
                "x -----BEGIN PRIVATE KEY-----MIIE-----END PRIVATE KEY----- y",
                "x -----BEGIN PRIVATE KEY-----…-----END PRIVATE KEY----- y",
            ),
            (
                "expecting -----BEGIN PRIVATE KEY----- here\nexit code 1",
                "expecting -----BEGIN PRIVATE KEY----- here\nexit code 1",
            ),
            ("-----BEGIN CERTIFICATE-----\nMIIEowIBAAKCAQEA1c7+", "-----BEGIN CERTIFICATE-----\nMIIEowIBAAKCAQEA1c7+"),
            // Colours around a secret.
            ("use \x1b[33mghp_0123456789abcdefABCD\x1b[0m", "use …"),
            ("{ token\x1b[39m: \x1b[32m'abc'\x1b[39m }", "{ token: '…' }"),
            ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
            ("\x1b[ ghp_0123456789abcdefABCD", "…"),
            ("", ""),
        ];
        for (line, shown) in table {
            assert_eq!(text(line), shown);
        }
        assert_eq!(text(&format!("a {jwt} b")), "a … b");
        assert_eq!(text(&format!("url?x={jwt}")), "url?x=…");
    }

    #[test]
    fn a_long_text_is_scanned_in_one_pass() {
        // Quadratic work would take very long.
        for piece in [
            "key",
            "\\n",
            "\\nkey",
            "%3D",
            "token%3D",
            "token%3D%26",
            "[m",
            "1m",
            "\\\\\\\"key",
            "eyJ",
            "eyJ-",
            "a-",
            "key-",
            "key.",
            "a://",
            "bearer ",
            "\"key\": ",
            "ghp_",
            "x@",
            "=",
            "-key ",
            "-key A",
            "AKIA-",
            "key=${-",
            "key='${-",
            "key=",
            "key: ",
            "cookie: ",
            "authorization: a",
            "-----BEGIN ",
            "-----BEGIN PRIVATE KEY-----",
            "-----BEGIN PRIVATE KEY-----\n",
            "-----BEGIN PRIVATE KEY-----\nMIIEowIBAAKCAQEA1c7+\n",
            "\x1b[",
            "token: A0",
            "password: A0 ",
            "authorization:basic ",
            "sig=",
            r#"token\":\""#,
        ] {
            let long = piece.repeat(20_000);
            assert!(text(&long).len() <= long.len());
        }
    }
}
