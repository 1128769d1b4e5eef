//! Parses headers: what a client accepts, what it sends, and the host and origin of its request.

use std::net::IpAddr;

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use hyper::{
    HeaderMap,
    header::{self, AsHeaderName, HeaderName, HeaderValue},
};
use outlast_core::mcp;

/// A header that occurs more than once, or whose value is not text.
#[derive(Debug, PartialEq, Eq)]
pub struct Ambiguous;

/// The value of a header that may occur once, if it is present.
pub(super) fn single(headers: &HeaderMap, name: impl AsHeaderName) -> Result<Option<&str>, Ambiguous> {
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

/// The headers that every request is checked by, collected in one pass.
#[derive(Debug, Clone, Copy, Default)]
pub struct Head<'a> {
    pub session: Once<'a>,
    pub version: Once<'a>,
    /// The profile that a client requests.
    pub profile: Once<'a>,
    host: Once<'a>,
    origin: Once<'a>,
    kind: Once<'a>,
    encoding: Once<'a>,
    /// Whether JSON and event streams are accepted, if there is an `Accept` header.
    accepted: Option<(bool, bool)>,
    has_credentials: bool,
}

/// A header that may occur once.
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
                mcp::header::SESSION_ID => head.session.add(value),
                mcp::header::PROTOCOL_VERSION => head.version.add(value),
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

    /// Whether JSON and event streams are accepted. Without an `Accept` header both are.
    pub fn accepts(&self) -> (bool, bool) {
        self.accepted.unwrap_or((true, true))
    }

    /// Whether the body is JSON without a content encoding.
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

    /// The headers that authenticate a request; mostly none.
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

/// What one `Accept` header allows.
fn accepted(value: &HeaderValue) -> (bool, bool) {
    // The value that nearly every client sends.
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

/// `q=0`, in any spelling, excludes a type.
fn is_zero_quality(parameter: &str) -> bool {
    let Some((name, value)) = parameter.split_once('=') else { return false };
    name.trim().eq_ignore_ascii_case("q") && value.trim().parse::<f32>().is_ok_and(|quality| quality == 0.0)
}

/// The decoded value of `=?base64?…?=`, or the text itself. `None` if the decoded bytes are not text.
pub(super) fn unpack(value: &str) -> Option<String> {
    match value.strip_prefix("=?base64?").and_then(|rest| rest.strip_suffix("?=")) {
        Some(packed) => String::from_utf8(BASE64.decode(packed).ok()?).ok(),
        None => Some(value.to_owned()),
    }
}

/// A session id in its canonical form: 32 hexadecimal digits.
pub(super) fn session_id(text: &str) -> Option<u128> {
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

/// The host in `host:port`, without brackets; `None` if the text has another form.
pub(super) fn host_of(authority: &str) -> Option<&str> {
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

/// A name that always means this machine.
pub(super) fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The origins and host names that are accepted. With DNS rebinding, an attacker's name resolves to this machine, so
/// that the attacker's pages can reach it; the `Host` and `Origin` headers reveal that.
#[derive(Debug, Clone, Default)]
pub struct Names {
    /// Further hosts, without a port.
    pub hosts: Vec<String>,
    /// Further origins, as browsers write them: `https://example.com`.
    pub origins: Vec<String>,
    /// All clients must authenticate, so the host name does not matter.
    pub any_host: bool,
}

/// A host name under which the front does not answer, or an origin that may not use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Misnamed {
    Host,
    Origin,
}

impl Misnamed {
    /// The text for the client.
    pub fn words(self) -> &'static str {
        match self {
            Misnamed::Host => "this Host is not allowed",
            Misnamed::Origin => "this Origin is not allowed",
        }
    }

    /// The name for audit and metrics.
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

    /// Whether this origin is listed in the configuration.
    pub fn has_origin(&self, origin: &str) -> bool {
        self.origins.iter().any(|known| known.eq_ignore_ascii_case(origin))
    }

    pub fn check(&self, head: &Head<'_>, uri_authority: Option<&str>) -> Result<(), Misnamed> {
        const HOST: Misnamed = Misnamed::Host;
        const ORIGIN: Misnamed = Misnamed::Origin;
        // An absolute URI in the request line overrides the header.
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
        // With any host name accepted, a page has access only if it was loaded under the same name.
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
    fn the_accept_header_is_parsed() {
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
    fn the_content_type_header_is_parsed() {
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
    fn only_session_ids_of_our_form_are_read() {
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
    fn pages_of_other_origins_are_refused_by_their_headers() {
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
        // Two `Host` headers are an attack, none is not HTTP/1.1, and an absolute URI in the request line counts.
        assert!(plain.check(&Head::of(&headers(&[("host", "localhost"), ("host", "evil")])), None).is_err());
        assert!(plain.check(&Head::of(&headers(&[])), None).is_err());
        assert!(plain.check(&Head::of(&headers(&[("host", "localhost")])), Some("evil.example")).is_err());
        let origins = [("host", "localhost"), ("origin", "http://localhost"), ("origin", "http://evil.example")];
        assert!(plain.check(&Head::of(&headers(&origins)), None).is_err());
    }

    /// Parsing of arbitrary headers terminates, does not panic, and never accepts a foreign origin.
    #[test]
    fn invalid_headers_are_refused() {
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
