//! The answers of the front itself: refusals, each with an HTTP status and a JSON-RPC error that says what to do.

use bytes::Bytes;
use hyper::StatusCode;
use outlast_core::{
    front::{NoStream, SessionId},
    gateway::Said,
    message::{self, Message},
};

use super::stream::{Answer, Content, Owner, Reply};

pub(super) const JSON: &str = "application/json";
pub(super) const EVENTS: &str = "text/event-stream";

pub(super) const NOT_JSON: i32 = -32700;
pub(super) const INVALID_REQUEST: i32 = -32600;
pub(super) const NO_SUCH_METHOD: i32 = -32601;
pub(super) const INVALID_PARAMS: i32 = -32602;
pub(super) const HEADER_MISMATCH: i32 = -32020;
pub(super) const MISSING_CAPABILITY: i32 = -32021;
pub(super) const UNSUPPORTED_VERSION: i32 = -32022;

/// The HTTP status for an error of the stateless era. An error of a backend's own method has status 200.
pub(super) fn status_of(code: Option<i64>) -> StatusCode {
    match code.and_then(|code| i32::try_from(code).ok()) {
        Some(NO_SUCH_METHOD) => StatusCode::NOT_FOUND,
        Some(NOT_JSON | INVALID_REQUEST | HEADER_MISMATCH | MISSING_CAPABILITY | UNSUPPORTED_VERSION) => {
            StatusCode::BAD_REQUEST
        }
        _ => StatusCode::OK,
    }
}

impl Answer {
    pub(super) fn json(status: StatusCode, session: Option<SessionId>, body: Bytes) -> Box<Answer> {
        Box::new(Answer {
            status,
            session,
            kind: JSON,
            headers: Vec::new(),
            content: Content::Whole(body),
            refused: None,
        })
    }

    pub(super) fn events(session: Option<SessionId>, reply: Reply, owner: Owner) -> Box<Answer> {
        let content = Content::Events(reply, owner);
        Box::new(Answer { status: StatusCode::OK, session, kind: EVENTS, headers: Vec::new(), content, refused: None })
    }

    /// An answer without a body.
    pub(super) fn empty(status: StatusCode) -> Box<Answer> {
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
    pub(super) fn error(status: StatusCode, id: &str, code: i32, message: &str, data: Option<&str>) -> Box<Answer> {
        Answer::json(status, None, message::error_line(id, code, message, data))
    }

    pub(super) fn refusal(status: StatusCode, message: &str) -> Box<Answer> {
        Answer::error(status, "null", INVALID_REQUEST, message, None)
    }

    /// Sets the kind of the refusal for audit and metrics, if the status alone does not tell it.
    pub(super) fn because(mut self: Box<Self>, kind: &'static str) -> Box<Answer> {
        self.refused = Some(kind);
        self
    }

    /// The kind of the refusal, if this refuses a request.
    pub(super) fn refusal_kind(&self) -> &'static str {
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

    /// Adds a header, if there is one.
    pub(super) fn with_all(self: Box<Self>, header: Option<(&'static str, String)>) -> Box<Answer> {
        match header {
            Some((name, value)) => self.with(name, value),
            None => self,
        }
    }

    pub(super) fn with(mut self: Box<Self>, name: &'static str, value: impl Into<String>) -> Box<Answer> {
        self.headers.push((name, value.into()));
        self
    }
}

/// The `Retry-After` header, in whole seconds, of a request that was refused temporarily.
pub(super) fn retry_after(message: &[u8], said: Said) -> Option<(&'static str, String)> {
    const MEMBER: &[u8] = b"\"retry_after_ms\"";
    if said != Said::Error || memchr::memmem::find(message, MEMBER).is_none() {
        return None;
    }
    let Ok(Message::Response { error: Some(error), .. }) = message::parse_again(message) else { return None };
    let [data] = message::pick(error, ["data"])?;
    let [from, millis] = message::pick(data?, ["from", "retry_after_ms"])?;
    let millis: u64 = millis.filter(|_| from.is_some_and(|from| from.get() == "\"outlast\""))?.get().parse().ok()?;
    Some(("retry-after", millis.div_ceil(1000).to_string()))
}

pub(super) fn session_ended() -> Box<Answer> {
    Answer::refusal(StatusCode::NOT_FOUND, "this session has ended: send initialize without Mcp-Session-Id")
}

pub(super) fn closing() -> Box<Answer> {
    Answer::refusal(StatusCode::SERVICE_UNAVAILABLE, "the gateway is stopping").with("retry-after", "5")
}

/// The replica that serves a session cannot be found out, or not be reached.
pub(super) fn no_home() -> Box<Answer> {
    let message = "the replica of this session cannot be reached: try again";
    Answer::refusal(StatusCode::SERVICE_UNAVAILABLE, message).with("retry-after", "1")
}

pub(super) fn no_such_session() -> Box<Answer> {
    Answer::refusal(
        StatusCode::NOT_FOUND,
        "there is no such session, or it has ended: send initialize without Mcp-Session-Id",
    )
}

pub(super) fn no_stream(why: NoStream) -> Box<Answer> {
    let message = match why {
        NoStream::NotAnId => "the Last-Event-ID is not one of this session",
        NoStream::Forgotten => "what came after this Last-Event-ID in its stream is not kept any more",
    };
    Answer::refusal(StatusCode::BAD_REQUEST, message)
}

pub(super) fn session_needed() -> Box<Answer> {
    Answer::refusal(
        StatusCode::BAD_REQUEST,
        "the Mcp-Session-Id header is missing: send the one from the answer to initialize",
    )
}

pub(super) fn too_many_sessions(max: usize) -> Box<Answer> {
    let message = format!("{max} sessions are in use, which is the limit: end one with DELETE, or try again later");
    Answer::refusal(StatusCode::SERVICE_UNAVAILABLE, &message).with("retry-after", "10")
}

pub(super) fn method_not_allowed(allow: &'static str, message: &str) -> Box<Answer> {
    Answer::refusal(StatusCode::METHOD_NOT_ALLOWED, message).with("allow", allow)
}

pub(super) fn mismatch(id: &str, message: &str) -> Box<Answer> {
    Answer::error(StatusCode::BAD_REQUEST, id, HEADER_MISMATCH, message, None)
}

pub(super) fn unsupported(id: &str, requested: &str, supported: &[&str]) -> Box<Answer> {
    let data = serde_json::json!({"supported": supported, "requested": requested}).to_string();
    let message = format!("protocol version {requested} is not supported");
    Answer::error(StatusCode::BAD_REQUEST, id, UNSUPPORTED_VERSION, &message, Some(&data))
}

#[cfg(test)]
mod tests {
    use super::*;

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
