//! Reading of headers: what a client accepts, what it sends, and from where it was made to.

use std::net::IpAddr;

use hyper::{
    HeaderMap,
    header::{self, AsHeaderName, HeaderName, HeaderValue},
};

use crate::base64;

/// A header that says two things says nothing.
#[derive(Debug, PartialEq, Eq)]
pub struct Ambiguous;

/// The value of a header that may stand once. One that is not text says nothing either.
pub fn single(headers: &HeaderMap, name: impl AsHeaderName) -> Result<Option<&str>, Ambiguous> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(Ambiguous);
    }
    text(value).map(Some)
}

fn text(value: &HeaderValue) -> Result<&str, Ambiguous> {
    value.to_str().map(|text| text.trim_matches([' ', '\t'])).map_err(|_| Ambiguous)
}

/// The headers that every request is judged by, found in one go.
#[derive(Debug, Clone, Copy, Default)]
pub struct Head<'a> {
    pub session: Once<'a>,
    pub version: Once<'a>,
    /// The profile that a client asks for.
    pub profile: Once<'a>,
    host: Once<'a>,
    origin: Once<'a>,
    kind: Once<'a>,
    encoding: Once<'a>,
    /// Answers as JSON and as events, if there was a word about it.
    accepted: Option<(bool, bool)>,
    has_credentials: bool,
}

/// A header that may stand once.
#[derive(Debug, Clone, Copy, Default)]
pub enum Once<'a> {
    #[default]
    Absent,
    Is(&'a HeaderValue),
    Twice,
}

impl<'a> Once<'a> {
    fn add(&mut self, value: &'a HeaderValue) {
        *self = if self.is_absent() { Once::Is(value) } else { Once::Twice };
    }

    pub fn is_absent(self) -> bool {
        matches!(self, Once::Absent)
    }

    pub fn text(self) -> Result<Option<&'a str>, Ambiguous> {
        match self {
            Once::Absent => Ok(None),
            Once::Is(value) => text(value).map(Some),
            Once::Twice => Err(Ambiguous),
        }
    }
}

impl<'a> Head<'a> {
    pub fn of(headers: &'a HeaderMap) -> Head<'a> {
        let mut head = Head::default();
        for (name, value) in headers {
            match name.as_str() {
                "host" => head.host.add(value),
                "origin" => head.origin.add(value),
                "content-type" => head.kind.add(value),
                "content-encoding" => head.encoding.add(value),
                "mcp-session-id" => head.session.add(value),
                "mcp-protocol-version" => head.version.add(value),
                "x-outlast-profile" => head.profile.add(value),
                "authorization" | "x-api-key" => head.has_credentials = true,
                "accept" => {
                    let (json, events) = accepted(value);
                    let (had_json, had_events) = head.accepted.unwrap_or_default();
                    head.accepted = Some((had_json || json, had_events || events));
                }
                _ => {}
            }
        }
        head
    }

    /// Whether answers as JSON and as events are welcome. Without a word about it, everything is.
    pub fn accepts(&self) -> (bool, bool) {
        self.accepted.unwrap_or((true, true))
    }

    /// Whether the body is JSON, and not packed.
    pub fn is_json(&self) -> bool {
        let is_json = match self.kind {
            Once::Is(value) if value == "application/json" => true,
            kind => {
                let kind = kind.text().ok().flatten().unwrap_or_default();
                kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
            }
        };
        let is_plain = match self.encoding.text() {
            Ok(None) => true,
            Ok(Some(encoding)) => encoding.eq_ignore_ascii_case("identity"),
            Err(Ambiguous) => false,
        };
        is_json && is_plain
    }

    /// By which a request shows whose it is; mostly none.
    pub fn credentials(&self, headers: &HeaderMap) -> HeaderMap {
        let mut credentials = HeaderMap::new();
        if self.has_credentials {
            for name in [header::AUTHORIZATION, HeaderName::from_static("x-api-key")] {
                for value in headers.get_all(&name) {
                    credentials.append(&name, value.clone());
                }
            }
        }
        credentials
    }
}

/// What one line of `Accept` lets in.
fn accepted(value: &HeaderValue) -> (bool, bool) {
    // What nearly every client sends.
    if value == "application/json, text/event-stream" {
        return (true, true);
    }
    let (mut json, mut events) = (false, false);
    for range in value.to_str().unwrap_or_default().split(',') {
        let mut parts = range.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default();
        if parts.any(is_zero_quality) {
            continue;
        }
        let is = |known: &str| kind.eq_ignore_ascii_case(known);
        json |= is("application/json") || is("application/*") || is("*/*");
        events |= is("text/event-stream") || is("text/*") || is("*/*");
    }
    (json, events)
}

/// `q=0`, in any of its spellings, means: not this.
fn is_zero_quality(parameter: &str) -> bool {
    let Some((name, value)) = parameter.split_once('=') else { return false };
    name.trim().eq_ignore_ascii_case("q") && value.trim().parse::<f32>().is_ok_and(|quality| quality == 0.0)
}

/// The value behind `=?base64?…?=`, or the text itself. Nothing, if what is packed is no text.
pub fn unpack(value: &str) -> Option<String> {
    match value.strip_prefix("=?base64?").and_then(|rest| rest.strip_suffix("?=")) {
        Some(packed) => String::from_utf8(base64::decode(packed)?).ok(),
        None => Some(value.to_owned()),
    }
}

/// A session id as we write it: 32 hexadecimal digits.
pub fn session_id(text: &str) -> Option<u128> {
    let half = |digits: &str| {
        digits.bytes().try_fold(0_u64, |id, byte| {
            let digit = match byte {
                b'0'..=b'9' => byte - b'0',
                b'a'..=b'f' => byte - b'a' + 10,
                _ => return None,
            };
            Some(id << 4 | u64::from(digit))
        })
    };
    let (high, low) = text.split_at_checked(16).filter(|_| text.len() == 32)?;
    Some(u128::from(half(high)?) << 64 | u128::from(half(low)?))
}

/// The host in `host:port`, without brackets; nothing if it is no such thing.
pub fn host_of(authority: &str) -> Option<&str> {
    let (host, port) = if let Some(rest) = authority.strip_prefix('[') {
        let (host, rest) = rest.split_once(']')?;
        host.parse::<std::net::Ipv6Addr>().ok()?;
        (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) })
    } else {
        match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        }
    };
    let is_host = !host.is_empty() && !host.bytes().any(|byte| b"/@?# \\".contains(&byte));
    (is_host && port.is_none_or(|port| port.parse::<u16>().is_ok())).then_some(host)
}

/// A name that no other machine can answer for.
pub fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// From which pages and under which names we may be reached. A name server that points a stranger's name at this
/// machine lets that stranger's pages reach us: they are known by these two headers.
#[derive(Debug, Clone, Default)]
pub struct Names {
    /// Further hosts, without a port.
    pub hosts: Vec<String>,
    /// Further origins, as browsers write them: `https://example.com`.
    pub origins: Vec<String>,
    /// Whoever comes must prove who it is, so its name for us does not matter.
    pub any_host: bool,
}

/// A name under which we do not answer, or whose pages may not use us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Misnamed {
    Host,
    Origin,
}

impl Misnamed {
    /// For the client.
    pub fn words(self) -> &'static str {
        match self {
            Misnamed::Host => "this gateway does not answer to that Host",
            Misnamed::Origin => "pages of that Origin may not use this gateway",
        }
    }

    /// For audit and metrics.
    pub fn kind(self) -> &'static str {
        match self {
            Misnamed::Host => "bad_host",
            Misnamed::Origin => "bad_origin",
        }
    }
}

impl Names {
    pub fn has_host(&self, host: &str) -> bool {
        is_loopback(host) || self.hosts.iter().any(|known| known.eq_ignore_ascii_case(host))
    }

    /// Whether pages of this origin were explicitly let in.
    pub fn has_origin(&self, origin: &str) -> bool {
        self.origins.iter().any(|known| known.eq_ignore_ascii_case(origin))
    }

    pub fn check(&self, head: &Head<'_>, uri_authority: Option<&str>) -> Result<(), Misnamed> {
        const HOST: Misnamed = Misnamed::Host;
        const ORIGIN: Misnamed = Misnamed::Origin;
        // A request line with a whole address in it overrules the header.
        let host = match (head.host.text(), uri_authority) {
            (Err(Ambiguous), _) => return Err(HOST),
            (Ok(_), Some(authority)) => Some(authority),
            (Ok(host), None) => host,
        };
        let host = host.and_then(host_of).ok_or(HOST)?;
        if !self.any_host && !self.has_host(host) {
            return Err(HOST);
        }
        let Some(origin) = head.origin.text().map_err(|_| ORIGIN)? else { return Ok(()) };
        if self.has_origin(origin) {
            return Ok(());
        }
        let authority = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        let from = authority.and_then(host_of).ok_or(ORIGIN)?;
        // Under a name that anybody may give us, a page is ours only if it was loaded under the same.
        if self.has_host(from) || (self.any_host && from.eq_ignore_ascii_case(host)) { Ok(()) } else { Err(ORIGIN) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(
                HeaderName::from_bytes(name.as_bytes()).unwrap(),
                HeaderValue::from_bytes(value.as_bytes()).unwrap(),
            );
        }
        map
    }

    #[test]
    fn what_a_client_accepts() {
        let table: &[(&[&str], (bool, bool))] = &[
            (&[], (true, true)),
            (&["application/json, text/event-stream"], (true, true)),
            (&["application/json", "text/event-stream"], (true, true)),
            (&["text/event-stream,application/json;q=0.1"], (true, true)),
            (&["*/*"], (true, true)),
            (&["APPLICATION/JSON , Text/*"], (true, true)),
            (&["application/json"], (true, false)),
            (&["text/event-stream"], (false, true)),
            (&["text/html,application/xhtml+xml"], (false, false)),
            (&["application/json;q=0, text/event-stream"], (false, true)),
            (&["application/json; Q=0.000, */*; q=0"], (false, false)),
            (&["application/jsonp, text/event-streams"], (false, false)),
            (&[""], (false, false)),
            (&[",,;,=;q"], (false, false)),
            (&["\u{fc}"], (false, false)),
        ];
        for (values, expected) in table {
            let lines: Vec<_> = values.iter().map(|value| ("accept", *value)).collect();
            assert_eq!(Head::of(&headers(&lines)).accepts(), *expected, "{values:?}");
        }
    }

    #[test]
    fn what_a_client_sends() {
        let table: &[(&[(&str, &str)], bool)] = &[
            (&[("content-type", "application/json")], true),
            (&[("content-type", "Application/JSON; charset=utf-8")], true),
            (&[("content-type", " application/json ;x")], true),
            (&[], false),
            (&[("content-type", "text/plain")], false),
            (&[("content-type", "application/json5")], false),
            (&[("content-type", "application/x-www-form-urlencoded")], false),
            (&[("content-type", "application/json"), ("content-type", "text/plain")], false),
            (&[("content-type", "application/json"), ("content-encoding", "gzip")], false),
            (&[("content-type", "application/json"), ("content-encoding", "identity")], true),
        ];
        for (lines, expected) in table {
            assert_eq!(Head::of(&headers(lines)).is_json(), *expected, "{lines:?}");
        }
    }

    #[test]
    fn credentials_are_kept_and_nothing_else() {
        type Lines = &'static [(&'static str, &'static str)];
        let table: &[(Lines, Lines)] = &[
            (&[("host", "localhost"), ("mcp-session-id", "7")], &[]),
            (&[("host", "localhost"), ("authorization", "Bearer a")], &[("authorization", "Bearer a")]),
            (&[("x-api-key", "a"), ("accept", "*/*")], &[("x-api-key", "a")]),
            (
                &[("authorization", "a"), ("x-api-key", "b"), ("authorization", "c")],
                &[("authorization", "a"), ("authorization", "c"), ("x-api-key", "b")],
            ),
        ];
        for (lines, kept) in table {
            let map = headers(lines);
            assert_eq!(Head::of(&map).credentials(&map), headers(kept), "{lines:?}");
        }
    }

    #[test]
    fn packed_values_are_unpacked_and_others_are_not() {
        let table = [
            ("plain", Some("plain")),
            ("", Some("")),
            ("=?base64?SGVsbG8sIOS4lueVjA==?=", Some("Hello, 世界")),
            ("=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?=", Some("=?base64?literal?=")),
            ("=?base64??=", Some("")),
            ("=?base64?", Some("=?base64?")),
            ("=?BASE64?aGk=?=", Some("=?BASE64?aGk=?=")),
            ("=?base64?aGk=", Some("=?base64?aGk=")),
            ("=?base64?aGk?=", None),
            ("=?base64?*?=", None),
            ("=?base64?/w==?=", None),
        ];
        for (value, expected) in table {
            assert_eq!(unpack(value).as_deref(), expected, "{value}");
        }
    }

    #[test]
    fn session_ids_are_ours_or_nothing() {
        assert_eq!(session_id("000102030405060708090a0b0c0d0e0f"), Some(0x0001_0203_0405_0607_0809_0a0b_0c0d_0e0f));
        for text in ["", "0", "000102030405060708090A0B0C0D0E0F", "+00102030405060708090a0b0c0d0e0f", &"0".repeat(33)] {
            assert_eq!(session_id(text), None, "{text}");
        }
    }

    #[test]
    fn hosts_are_found_in_authorities() {
        let table = [
            ("localhost", Some("localhost")),
            ("localhost:80", Some("localhost")),
            ("127.0.0.1:8080", Some("127.0.0.1")),
            ("[::1]:8080", Some("::1")),
            ("[::1]", Some("::1")),
            ("example.com.:1", Some("example.com.")),
            ("", None),
            (":80", None),
            ("localhost:", None),
            ("localhost:99999", None),
            ("[::1", None),
            ("[::1]x", None),
            ("[evil]:1", None),
            ("user@localhost", None),
            ("localhost/x", None),
            ("a:b:c", None),
        ];
        for (authority, host) in table {
            assert_eq!(host_of(authority), host, "{authority:?}");
        }
    }

    #[test]
    fn strangers_pages_are_kept_out() {
        let plain = Names::default();
        let configured =
            Names { hosts: vec!["gate.example".into()], origins: vec!["https://app.example".into()], any_host: false };
        let guarded = Names { any_host: true, ..Names::default() };
        let table: &[(&Names, &str, Option<&str>, bool)] = &[
            (&plain, "localhost:8080", None, true),
            (&plain, "127.0.0.1:8080", None, true),
            (&plain, "127.9.9.9", None, true),
            (&plain, "[::1]:8080", None, true),
            (&plain, "LOCALHOST", None, true),
            (&plain, "evil.example:8080", None, false),
            (&plain, "localhost.evil.example", None, false),
            (&plain, "127.0.0.1.evil.example", None, false),
            (&plain, "192.168.0.2:8080", None, false),
            (&plain, "", None, false),
            (&plain, "localhost:8080", Some("http://localhost:8080"), true),
            (&plain, "localhost:8080", Some("http://127.0.0.1:3000"), true),
            (&plain, "localhost:8080", Some("http://evil.example"), false),
            (&plain, "localhost:8080", Some("http://localhost.evil.example"), false),
            (&plain, "localhost:8080", Some("http://localhost@evil.example"), false),
            (&plain, "localhost:8080", Some("null"), false),
            (&plain, "localhost:8080", Some(""), false),
            (&plain, "localhost:8080", Some("file://localhost"), false),
            (&configured, "gate.example", None, true),
            (&configured, "gate.example:443", Some("https://gate.example"), true),
            (&configured, "gate.example", Some("https://app.example"), true),
            (&configured, "gate.example", Some("https://app.example.evil"), false),
            (&configured, "other.example", None, false),
            (&guarded, "whatever.example", None, true),
            (&guarded, "whatever.example:8443", Some("https://whatever.example"), true),
            (&guarded, "whatever.example", Some("https://other.example"), false),
        ];
        for (names, host, origin, is_welcome) in table {
            let mut lines = vec![("host", *host)];
            lines.extend(origin.map(|origin| ("origin", origin)));
            assert_eq!(names.check(&Head::of(&headers(&lines)), None).is_ok(), *is_welcome, "{host} {origin:?}");
        }
        // Two of one are a trick, none is no HTTP/1.1, and a whole address in the request line counts.
        assert!(plain.check(&Head::of(&headers(&[("host", "localhost"), ("host", "evil")])), None).is_err());
        assert!(plain.check(&Head::of(&headers(&[])), None).is_err());
        assert!(plain.check(&Head::of(&headers(&[("host", "localhost")])), Some("evil.example")).is_err());
        let origins = [("host", "localhost"), ("origin", "http://localhost"), ("origin", "http://evil.example")];
        assert!(plain.check(&Head::of(&headers(&origins)), None).is_err());
    }

    /// Whatever stands in a header, reading it ends, without a panic, and never lets a stranger in.
    #[test]
    fn nonsense_in_headers_is_only_refused() {
        let pieces = [
            "localhost",
            ":",
            "[",
            "]",
            "::1",
            "@",
            "/",
            "http://",
            "evil",
            ".",
            ";",
            ",",
            "q=0",
            "=?base64?",
            "?=",
            "%",
            " ",
        ];
        let mut dice = 0x2545_f491_4f6c_dd1d_u64;
        for _ in 0..20_000 {
            let mut text = String::new();
            for _ in 0..1 + dice % 6 {
                dice ^= dice << 13;
                dice ^= dice >> 7;
                dice ^= dice << 17;
                text.push_str(pieces[(dice % pieces.len() as u64) as usize]);
            }
            let map = headers(&[("host", &text), ("accept", &text), ("content-type", &text)]);
            let head = Head::of(&map);
            let _ = (head.accepts(), head.is_json(), unpack(&text), session_id(&text));
            if Names::default().check(&head, None).is_ok() {
                assert!(is_loopback(host_of(text.trim()).unwrap()), "{text:?}");
                assert!(!text.contains("evil"), "{text:?}");
            }
        }
    }
}
