//! Cross-origin requests of browsers, as in the Fetch standard: only pages of listed origins may read the answers.
//!
//! Clients authenticate by headers that their script sets, never by cookies, so `Access-Control-Allow-Credentials` is
//! not sent.

use hyper::{
    HeaderMap, Request, StatusCode,
    header::{self, HeaderName, HeaderValue},
};

use super::{
    headers::{Names, single},
    request::{Told, is_endpoint},
    stream::Answer,
};

const METHODS: &str = "GET, POST, DELETE";
/// Headers that a page may set, besides those that begin with `mcp-`.
const HEADERS: [&str; 8] = [
    "accept",
    "authorization",
    "content-type",
    "last-event-id",
    "x-api-key",
    "x-outlast-profile",
    "traceparent",
    "tracestate",
];
/// Headers of an answer that a page may read.
const EXPOSED: &str = "Mcp-Session-Id, Mcp-Protocol-Version, WWW-Authenticate, Retry-After";
/// How long a browser may cache the answer to a preflight, in seconds.
const MAX_AGE: &str = "600";
/// A preflight with more header names is refused.
const NAMES_MAX: usize = 64;

/// Which CORS headers an answer gets.
pub(super) enum Cors {
    /// The page of this origin may read the answer.
    Open(HeaderValue),
    /// It may not; `Vary` keeps caches from mixing such answers with others.
    Closed,
}

impl Cors {
    /// `None` if no origin is configured: then answers do not depend on the origin.
    pub(super) fn of<B>(names: &Names, request: &Request<B>) -> Option<Cors> {
        if names.origins.is_empty() || !is_endpoint(request.uri().path()) {
            return None;
        }
        let origin = request.headers().get(header::ORIGIN);
        let listed = origin.filter(|origin| origin.to_str().is_ok_and(|origin| names.has_origin(origin.trim())));
        Some(listed.map_or(Cors::Closed, |origin| Cors::Open(origin.clone())))
    }

    pub(super) fn put_into(self, headers: &mut HeaderMap) {
        headers.append(header::VARY, HeaderValue::from_static("Origin"));
        if let Cors::Open(origin) = self {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
        }
    }
}

/// Whether this is a preflight request.
pub(super) fn is_preflight(headers: &HeaderMap) -> bool {
    headers.contains_key(header::ORIGIN) && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// The answer to a preflight. It needs no authentication: a preflight carries no credentials.
pub(super) fn preflight(names: &Names, headers: &HeaderMap) -> Told {
    let refuse = |why: &str| Err(Answer::refusal(StatusCode::FORBIDDEN, why).because("bad_origin"));
    match single(headers, header::ORIGIN) {
        Ok(Some(origin)) if names.has_origin(origin) => {}
        _ => return refuse("this Origin is not allowed: `gateway.origins` lists the allowed ones"),
    }
    let mut allowed = Vec::new();
    for value in headers.get_all(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        for name in value.to_str().unwrap_or_default().split(',').map(str::trim).filter(|name| !name.is_empty()) {
            let Ok(name) = HeaderName::try_from(name) else { return refuse("a header with this name is not allowed") };
            if name.as_str().starts_with("mcp-") || HEADERS.contains(&name.as_str()) {
                allowed.push(name.as_str().to_owned());
            }
        }
    }
    if allowed.len() > NAMES_MAX {
        return refuse("too many headers are requested");
    }
    let mut answer = Answer::empty(StatusCode::NO_CONTENT)
        .with("access-control-allow-methods", METHODS)
        .with("access-control-max-age", MAX_AGE);
    if !allowed.is_empty() {
        answer = answer.with("access-control-allow-headers", allowed.join(", "));
    }
    // Browsers also ask whether a public page may reach a private network.
    if headers.contains_key("access-control-request-private-network") {
        answer = answer.with("access-control-allow-private-network", "true");
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        map
    }

    fn names() -> Names {
        Names { origins: vec!["https://app.example.com".into()], ..Names::default() }
    }

    #[test]
    fn a_preflight_is_answered_for_listed_origins_and_known_headers() {
        let asked = |origin: &'static str, wanted: &'static str| {
            let asked = headers(&[
                ("origin", origin),
                ("access-control-request-method", "POST"),
                ("access-control-request-headers", wanted),
            ]);
            assert!(is_preflight(&asked));
            preflight(&names(), &asked)
        };
        let told = asked("https://app.example.com", "content-type, Authorization,mcp-session-id,x-evil, Mcp-Param-A");
        let answer = told.unwrap_or_else(|answer| panic!("{answer:?}"));
        assert_eq!(answer.status, StatusCode::NO_CONTENT);
        let allowed = answer.headers.iter().find(|(name, _)| *name == "access-control-allow-headers");
        assert_eq!(
            allowed.map(|(_, value)| value.as_str()),
            Some("content-type, authorization, mcp-session-id, mcp-param-a")
        );
        for origin in ["https://evil.example", "http://app.example.com", "https://app.example.com:444", "null"] {
            assert_eq!(asked(origin, "").err().map(|answer| answer.status), Some(StatusCode::FORBIDDEN), "{origin}");
        }
        assert!(!is_preflight(&headers(&[("origin", "https://app.example.com")])));
    }

    #[test]
    fn only_pages_of_listed_origins_may_read_an_answer() {
        let table = [
            ("/mcp", Some("https://app.example.com"), true, true),
            ("/mcp", Some("https://evil.example"), true, false),
            ("/mcp", Some("http://localhost:3000"), true, false),
            ("/mcp/small", Some("https://app.example.com"), true, true),
            ("/mcp", None, true, false),
            ("/api/state", Some("https://app.example.com"), false, false),
        ];
        for (path, origin, varies, opens) in table {
            let mut request = Request::builder().uri(path);
            if let Some(origin) = origin {
                request = request.header("origin", origin);
            }
            let mut answer = HeaderMap::new();
            if let Some(cors) = Cors::of(&names(), &request.body(()).unwrap()) {
                cors.put_into(&mut answer);
            }
            assert_eq!(answer.contains_key("vary"), varies, "{path} {origin:?}");
            let allowed = answer.get("access-control-allow-origin").map(|value| value.to_str().unwrap());
            assert_eq!(allowed, origin.filter(|_| opens), "{path} {origin:?}");
            assert!(!answer.contains_key("access-control-allow-credentials"));
        }
        let request = Request::builder().uri("/mcp").header("origin", "https://app.example.com").body(()).unwrap();
        assert!(Cors::of(&Names::default(), &request).is_none());
    }
}
