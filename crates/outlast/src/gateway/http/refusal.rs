//! What an HTTP error status means: a lost session, missing credentials, or a refusal. It does not decide whether to
//! repeat the request.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use hyper::{
    HeaderMap, StatusCode,
    header::{DATE, RETRY_AFTER, WWW_AUTHENTICATE},
};
use outlast_core::{
    gateway::Refused,
    message::{self, Id, Message},
};

/// How much of the body of a refusal is read.
pub(super) const REFUSAL_MAX: usize = 64 << 10;
/// How much of it is quoted.
const EXCERPT_MAX: usize = 300;
/// How much of a `WWW-Authenticate` header is quoted.
const CHALLENGE_MAX: usize = 500;

/// An error status with its body.
#[derive(Debug)]
pub(super) struct Refusal {
    status: StatusCode,
    challenge: Option<String>,
    retry_after: Option<Duration>,
    body: Bytes,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, headers: &HeaderMap, body: Bytes) -> Refusal {
        let challenges: Vec<_> = headers
            .get_all(WWW_AUTHENTICATE)
            .iter()
            .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
            .collect();
        let challenge = one_line(&challenges.join(", "), CHALLENGE_MAX);
        Refusal { status, challenge, retry_after: retry_after(headers), body }
    }

    /// A JSON-RPC error with its id, as JSON or in an event. A server may send it without the id of the request.
    fn error(&self) -> Option<(Option<Id>, String)> {
        let text = std::str::from_utf8(&self.body).ok()?;
        let in_event = || text.lines().find_map(|line| line.strip_prefix("data:"));
        let json = if text.trim_start().starts_with('{') { text } else { in_event()? };
        match message::parse(json.as_bytes()).ok()? {
            Message::Response { id, error: Some(error), .. } if is_error_object(error) => {
                Some((id.parse(), error.get().replace(['\n', '\r'], " ")))
            }
            _ => None,
        }
    }

    /// The answer to a request, if the server sent a JSON-RPC error. Missing credentials and a busy server concern all
    /// requests, whatever the body says.
    pub(super) fn answer(&self, id: &Id) -> Option<Bytes> {
        if matches!(self.status.as_u16(), 401 | 403 | 429 | 503) {
            return None;
        }
        let (answered, error) = self.error()?;
        // A server that fails while it works on a request may have acted on it, so an error without our id is not an
        // answer.
        let is_ours = answered.as_ref() == Some(id) || answered.is_none() && !self.status.is_server_error();
        is_ours.then(|| message::line(format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#)))
    }

    /// Whether the server refused a request because it does not know its session.
    ///
    /// The specification says 404. The TypeScript SDK says `400 Bad Request: No valid session ID provided` or, with one
    /// transport for all, `400 Bad Request: Server not initialized`; servers on it repeat the id of the request. The Python
    /// SDK says `404 Session not found`, and 400 in older releases; rmcp says `404 Not Found: Session not found`, and
    /// `401 Unauthorized: Session not found` in older releases; others `400 Invalid session ID`.
    pub(super) fn forgets_session(&self, id: Option<&Id>) -> bool {
        let said = || {
            let text = String::from_utf8_lossy(&self.body).to_ascii_lowercase();
            const LOST: [&str; 13] = [
                "not found",
                "could not find",
                "no valid",
                "not valid",
                "invalid",
                "missing",
                "unknown",
                "expired",
                "terminated",
                "closed",
                "required",
                "does not exist",
                "no transport",
            ];
            text.contains("server not initialized")
                || text.contains("session") && LOST.iter().any(|words| text.contains(words))
        };
        match self.status {
            StatusCode::NOT_FOUND => {
                // An answer to this request, such as an unknown method, is an answer.
                let is_answer = self.error().is_some_and(|(answered, _)| answered.is_some() && answered.as_ref() == id);
                !is_answer || said()
            }
            StatusCode::BAD_REQUEST | StatusCode::GONE => said(),
            StatusCode::UNAUTHORIZED => self.challenge.is_none() && said(),
            _ => false,
        }
    }

    pub(super) fn is_denied(&self) -> bool {
        matches!(self.status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
    }

    /// The server and its message, on one line.
    pub(super) fn words(&self, server: &str) -> String {
        let words = format!("{server} answered {}", worded(self.status));
        self.excerpt().map_or_else(|| words.clone(), |excerpt| format!("{words}: {excerpt}"))
    }

    pub(super) fn refused(self, server: &str, line: Bytes) -> Box<Refused> {
        Box::new(Refused {
            status: self.status.as_u16(),
            words: format!("{server} answered {}", worded(self.status)),
            body: self.excerpt(),
            challenge: self.challenge,
            retry_after: self.retry_after,
            line,
        })
    }

    /// The beginning of the message.
    fn excerpt(&self) -> Option<String> {
        one_line(&String::from_utf8_lossy(&self.body), EXCERPT_MAX)
    }
}

fn is_error_object(error: message::Raw<'_>) -> bool {
    let Some([code, words]) = message::pick(error, ["code", "message"]) else { return false };
    code.is_some_and(|code| code.get().parse::<i64>().is_ok())
        && words.is_some_and(|words| words.get().starts_with('"'))
}

pub(super) fn worded(status: StatusCode) -> String {
    match status.canonical_reason() {
        Some(reason) => format!("{} {reason}", status.as_u16()),
        None => status.as_u16().to_string(),
    }
}

/// Without control characters, and within the limit.
fn one_line(text: &str, max: usize) -> Option<String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let joined: String = words.join(" ").chars().filter(|letter| !letter.is_control()).take(max).collect();
    (!joined.is_empty()).then_some(joined)
}

/// The pause that the server asks for: in seconds, or as a date, relative to the date of the response because clocks
/// differ.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name| Some(headers.get(name)?.to_str().ok()?.trim());
    let wish = text(RETRY_AFTER)?;
    if let Ok(seconds) = wish.parse::<u32>() {
        return Some(Duration::from_secs(seconds.into()));
    }
    let then = httpdate::parse_http_date(wish).ok()?;
    let now = text(DATE).and_then(|date| httpdate::parse_http_date(date).ok()).unwrap_or_else(SystemTime::now);
    // A date in the past means no pause.
    Some(then.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn refusal(status: u16, challenge: Option<&'static str>, body: &'static str) -> Refusal {
        let mut headers = HeaderMap::new();
        headers.extend(challenge.map(|challenge| (WWW_AUTHENTICATE, HeaderValue::from_static(challenge))));
        Refusal::new(StatusCode::from_u16(status).unwrap(), &headers, Bytes::from_static(body.as_bytes()))
    }

    #[test]
    fn a_lost_session_is_recognized_in_each_known_form() {
        #[rustfmt::skip]
        let table = [
            // status, challenge, body, forgotten
            (404, None, "", true),
            (404, None, "<h1>Not Found</h1>", true),
            (404, None, r#"{"jsonrpc":"2.0","error":{"code":-32001,"message":"Session not found"},"id":null}"#, true),
            (404, None, r#"{"jsonrpc":"2.0","id":"server-error","error":{"code":-32600,"message":"Session not found"}}"#, true),
            (404, None, r#"{"jsonrpc":"2.0","id":7,"error":{"code":-32001,"message":"Session not found"}}"#, true),
            (404, None, r#"{"jsonrpc":"2.0","id":7,"error":{"code":-32601,"message":"Method not found"}}"#, false),
            (404, None, "Not Found: Session not found", true),
            (404, None, "Could not find session", true),
            (400, None, r#"{"jsonrpc":"2.0","error":{"code":-32000,"message":"Bad Request: No valid session ID provided"}}"#, true),
            (400, None, r#"{"jsonrpc":"2.0","error":{"code":-32000,"message":"Bad Request: No valid session ID provided"},"id":7}"#, true),
            (400, None, r#"{"jsonrpc":"2.0","error":{"code":-32000,"message":"Bad Request: Server not initialized"},"id":null}"#, true),
            (400, None, "event: message\ndata: {\"jsonrpc\":\"2.0\",\"error\":{\"code\":-32000,\"message\":\"Bad Request: Server not initialized\"},\"id\":null}\n\n", true),
            (400, None, "Bad Request: No valid session ID provided", true),
            (400, None, "Invalid session ID", true),
            (400, None, "Bad Request: Session ID is required", true),
            (400, None, "Invalid or missing session ID", true),
            (400, None, "No transport found for sessionId", true),
            (400, None, r#"{"jsonrpc":"2.0","id":7,"error":{"code":-32602,"message":"Invalid params"}}"#, false),
            (400, None, "Bad Request: Unsupported protocol version", false),
            (401, None, "Unauthorized: Session not found", true),
            (401, Some("Bearer"), "Your session has expired", false),
            (401, None, r#"{"error":"invalid_token"}"#, false),
            (403, None, "session not found", false),
            (500, None, "session not found", false),
        ];
        for (status, challenge, body, forgotten) in table {
            assert_eq!(
                refusal(status, challenge, body).forgets_session(Some(&Id::Integer(7))),
                forgotten,
                "{status} {body}"
            );
        }
    }

    #[test]
    fn only_an_error_of_json_rpc_is_an_answer() {
        let error = r#"{"jsonrpc":"2.0","id":7,"error":{"code":-32020,"message":"m"}}"#;
        #[rustfmt::skip]
        let table = [
            (400, r#"{"id":7,"error":{"code":-32020,"message":"m"}}"#, true),
            (400, r#"{"id":null,"error":{"code":-32020,"message":"m"}}"#, true),
            (400, "data: {\"id\":7,\"error\":{\"code\":-32020,\"message\":\"m\"}}\n\n", true),
            (500, r#"{"id":7,"error":{"code":-32020,"message":"m"}}"#, true),
            (500, r#"{"id":null,"error":{"code":-32020,"message":"m"}}"#, false),
            (400, r#"{"id":8,"error":{"code":-32020,"message":"m"}}"#, false),
            (400, r#"{"id":7,"error":"invalid_token"}"#, false),
            (400, r#"{"id":7,"error":{"message":"m"}}"#, false),
            (400, r#"{"id":7,"error":{"code":"E1","message":"m"}}"#, false),
            (401, r#"{"id":7,"error":{"code":-32020,"message":"m"}}"#, false),
            (429, r#"{"id":7,"error":{"code":-32020,"message":"m"}}"#, false),
            (400, "<html>", false),
            (400, "", false),
        ];
        for (status, body, is_answer) in table {
            let answer = refusal(status, None, body).answer(&Id::Integer(7));
            let expected = is_answer.then(|| format!("{error}\n"));
            assert_eq!(answer.map(|line| String::from_utf8(line.to_vec()).unwrap()), expected, "{status} {body}");
        }
    }

    #[test]
    fn a_quoted_challenge_is_one_short_line() {
        let mut headers = HeaderMap::new();
        headers.append(WWW_AUTHENTICATE, HeaderValue::from_bytes(b"Bearer realm=\"a\tb\xff\"").unwrap());
        headers.append(WWW_AUTHENTICATE, HeaderValue::try_from("x".repeat(2000)).unwrap());
        let refused = Refusal::new(StatusCode::UNAUTHORIZED, &headers, Bytes::new()).refused("http://a", Bytes::new());
        let challenge = refused.challenge.unwrap();
        assert!(challenge.starts_with("Bearer realm=\"a b\u{fffd}\", xxx"), "{challenge}");
        assert_eq!(challenge.chars().count(), CHALLENGE_MAX);
    }

    #[test]
    fn retry_after_is_in_seconds_or_a_date() {
        const DATED: &str = "Fri, 31 Dec 1999 23:59:50 GMT";
        #[rustfmt::skip]
        let table = [
            // retry-after                      date         pause
            (Some("3"),                         None,        Some(3)),
            (Some(" 0 "),                       None,        Some(0)),
            (Some("Fri, 31 Dec 1999 23:59:59 GMT"), Some(DATED), Some(9)),
            (Some("Friday, 31-Dec-99 23:59:52 GMT"), Some(DATED), Some(2)),
            (Some("Fri, 31 Dec 1999 23:59:40 GMT"), Some(DATED), Some(0)),
            // Without a date of the server our own is used, and that pause is long over.
            (Some("Fri, 31 Dec 1999 23:59:59 GMT"), None,    Some(0)),
            (Some("soon"),                      Some(DATED), None),
            (Some("-1"),                        None,        None),
            (Some("99999999999999999999"),      None,        None),
            (None,                              Some(DATED), None),
        ];
        for (wish, date, pause) in table {
            let mut headers = HeaderMap::new();
            headers.extend(wish.map(|wish| (RETRY_AFTER, HeaderValue::from_static(wish))));
            headers.extend(date.map(|date| (DATE, HeaderValue::from_static(date))));
            assert_eq!(retry_after(&headers), pause.map(Duration::from_secs), "{wish:?} {date:?}");
        }
    }
}
