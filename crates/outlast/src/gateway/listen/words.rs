//! What the front itself has to say: refusals, each with its status and a JSON-RPC error that says what to do.

use std::rc::Rc;

use bytes::Bytes;
use hyper::StatusCode;
use outlast_core::{
    gateway::Said,
    message::{self, Message},
};

use super::stream::{Answer, Content, Place, Stream};

pub const JSON: &str = "application/json";
pub const EVENTS: &str = "text/event-stream";

/// Revisions with a handshake, which clients may name in their headers.
pub const HANDSHAKE: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];
/// Revisions where each request stands for itself.
pub const STATELESS: [&str; 1] = ["2026-07-28"];
/// The one revision with batches.
pub const WITH_BATCHES: &str = "2025-03-26";

pub const NOT_JSON: i32 = -32700;
pub const INVALID_REQUEST: i32 = -32600;
pub const NO_SUCH_METHOD: i32 = -32601;
pub const INVALID_PARAMS: i32 = -32602;
pub const HEADER_MISMATCH: i32 = -32020;
pub const MISSING_CAPABILITY: i32 = -32021;
pub const UNSUPPORTED_VERSION: i32 = -32022;

/// Whether it names a revision without a handshake, be it one we know or a later one.
pub fn is_stateless(version: &str) -> bool {
    let is_date = version.len() == 10
        && version.bytes().enumerate().all(|(at, byte)| match at {
            4 | 7 => byte == b'-',
            _ => byte.is_ascii_digit(),
        });
    is_date && version > HANDSHAKE[0]
}

/// Whether streams of this revision begin with an event that is nothing but an id.
pub fn has_priming(version: &str) -> bool {
    version >= "2025-11-25"
}

/// How an error of the stateless era travels. One that a backend's own method gave is a good answer to HTTP.
pub fn status_of(code: Option<i64>) -> StatusCode {
    match code.and_then(|code| i32::try_from(code).ok()) {
        Some(NO_SUCH_METHOD) => StatusCode::NOT_FOUND,
        Some(NOT_JSON | INVALID_REQUEST | HEADER_MISMATCH | MISSING_CAPABILITY | UNSUPPORTED_VERSION) => {
            StatusCode::BAD_REQUEST
        }
        _ => StatusCode::OK,
    }
}

impl Answer {
    pub fn json(status: StatusCode, session: Option<u128>, body: Bytes) -> Box<Answer> {
        Box::new(Answer {
            status,
            session,
            kind: JSON,
            headers: Vec::new(),
            content: Content::Whole(body),
            refused: None,
        })
    }

    pub fn events(session: Option<u128>, stream: Rc<Stream>, place: Place) -> Box<Answer> {
        let content = Content::Events(stream, place);
        Box::new(Answer { status: StatusCode::OK, session, kind: EVENTS, headers: Vec::new(), content, refused: None })
    }

    /// Nothing more needs to be said.
    pub fn empty(status: StatusCode) -> Box<Answer> {
        Box::new(Answer {
            status,
            session: None,
            kind: JSON,
            headers: Vec::new(),
            content: Content::Nothing,
            refused: None,
        })
    }

    /// `id` is JSON.
    pub fn error(status: StatusCode, id: &str, code: i32, message: &str, data: Option<&str>) -> Box<Answer> {
        Answer::json(status, None, message::error_line(id, code, message, data))
    }

    pub fn refusal(status: StatusCode, message: &str) -> Box<Answer> {
        Answer::error(status, "null", INVALID_REQUEST, message, None)
    }

    /// Says for audit and metrics what was wrong, where the status alone does not.
    pub fn because(mut self: Box<Self>, kind: &'static str) -> Box<Answer> {
        self.refused = Some(kind);
        self
    }

    /// What was wrong, if this refuses a request.
    pub fn refusal_kind(&self) -> &'static str {
        self.refused.unwrap_or(match self.status {
            StatusCode::UNAUTHORIZED => "unauthenticated",
            StatusCode::FORBIDDEN => "forbidden",
            StatusCode::NOT_FOUND => "not_found",
            StatusCode::METHOD_NOT_ALLOWED => "method_not_allowed",
            StatusCode::PAYLOAD_TOO_LARGE => "too_large",
            StatusCode::REQUEST_TIMEOUT => "too_slow",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded",
            _ => "bad_request",
        })
    }

    /// With a header, if there is one to add.
    pub fn with_all(self: Box<Self>, header: Option<(&'static str, String)>) -> Box<Answer> {
        match header {
            Some((name, value)) => self.with(name, value),
            None => self,
        }
    }

    pub fn with(mut self: Box<Self>, name: &'static str, value: impl Into<String>) -> Box<Answer> {
        self.headers.push((name, value.into()));
        self
    }
}

/// When a request that was refused for now may be sent again, as a header in whole seconds.
pub fn retry_after(message: &[u8], said: Said) -> Option<(&'static str, String)> {
    const MEMBER: &[u8] = b"\"retry_after_ms\"";
    if said != Said::Error || memchr::memmem::find(message, MEMBER).is_none() {
        return None;
    }
    let Ok(Message::Response { error: Some(error), .. }) = message::parse(message) else { return None };
    let [data] = message::pick(error, ["data"])?;
    let [from, millis] = message::pick(data?, ["from", "retry_after_ms"])?;
    let millis: u64 = millis.filter(|_| from.is_some_and(|from| from.get() == "\"outlast\""))?.get().parse().ok()?;
    Some(("retry-after", millis.div_ceil(1000).to_string()))
}

pub fn session_ended() -> Box<Answer> {
    Answer::refusal(StatusCode::NOT_FOUND, "this session has ended: send initialize without Mcp-Session-Id")
}

pub fn closing() -> Box<Answer> {
    Answer::refusal(StatusCode::SERVICE_UNAVAILABLE, "the gateway is stopping").with("retry-after", "5")
}

pub fn no_such_session() -> Box<Answer> {
    Answer::refusal(
        StatusCode::NOT_FOUND,
        "there is no such session, or it has ended: send initialize without Mcp-Session-Id",
    )
}

pub fn session_needed() -> Box<Answer> {
    Answer::refusal(
        StatusCode::BAD_REQUEST,
        "the Mcp-Session-Id header is missing: send the one that came with the answer to initialize",
    )
}

pub fn too_many_sessions(max: usize) -> Box<Answer> {
    let message = format!("{max} sessions are in use, which is the limit: end one with DELETE, or try again later");
    Answer::refusal(StatusCode::SERVICE_UNAVAILABLE, &message).with("retry-after", "10")
}

pub fn method_not_allowed(allow: &'static str, message: &str) -> Box<Answer> {
    Answer::refusal(StatusCode::METHOD_NOT_ALLOWED, message).with("allow", allow)
}

pub fn mismatch(id: &str, message: &str) -> Box<Answer> {
    Answer::error(StatusCode::BAD_REQUEST, id, HEADER_MISMATCH, message, None)
}

pub fn unsupported(id: &str, requested: &str, supported: &[&str]) -> Box<Answer> {
    let data = serde_json::json!({"supported": supported, "requested": requested}).to_string();
    let message = format!("protocol version {requested} is not supported");
    Answer::error(StatusCode::BAD_REQUEST, id, UNSUPPORTED_VERSION, &message, Some(&data))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_names_its_era() {
        let table = [
            ("2026-07-28", true),
            ("2027-01-01", true),
            ("2025-11-25", false),
            ("2025-03-26", false),
            ("1999-01-01", false),
            ("draft", false),
            ("", false),
            ("2026-07-2x", false),
            ("2026/07/28", false),
            ("2026-07-281", false),
        ];
        for (version, is) in table {
            assert_eq!(is_stateless(version), is, "{version}");
        }
    }

    #[test]
    fn an_error_has_the_status_that_the_revision_gives_it() {
        let table = [
            (Some(-32601), 404),
            (Some(-32700), 400),
            (Some(-32600), 400),
            (Some(-32020), 400),
            (Some(-32021), 400),
            (Some(-32022), 400),
            (Some(-32602), 200),
            (Some(-32603), 200),
            (Some(1), 200),
            (Some(i64::MAX), 200),
            (None, 200),
        ];
        for (code, status) in table {
            assert_eq!(status_of(code).as_u16(), status, "{code:?}");
        }
    }
}
