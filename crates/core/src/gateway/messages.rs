//! Messages of the gateway itself: failures, and members that one era requires and the other does not have.
//! When a call fails is decided elsewhere.

use std::{ops::Range, time::Duration};

use serde_json::{Value, json};

use super::{Era, Outcome, calls::CallKind, clients::ClientState, http_refusals::Refused, subscriptions::Level};
use crate::{
    count::count,
    cut::head,
    exit::{Denied, How},
    json::Raw,
    mcp::{meta, revision},
    message,
    message::{Params, pick, quote},
};

/// How long a client of the stateless era may cache a list, in milliseconds. A change is announced earlier.
pub(super) const TTL_MS: u32 = 5_000;

const STDERR_LINES_MAX: usize = 10;
const STDERR_SHOWN_MAX: usize = 2048;

/// The name and version of the gateway, as clients and backends see them.
pub(super) fn info() -> String {
    format!(r#"{{"name":"outlast","title":"outlast gateway","version":"{}"}}"#, env!("CARGO_PKG_VERSION"))
}

/// When a backend that is down is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    In(Duration),
    Now,
    /// It is not tried by itself.
    Nothing,
}

impl Next {
    fn sentence(self) -> String {
        match self {
            Next::In(delay) => format!(" It is tried again in {:.1} s.", delay.as_secs_f64()),
            Next::Now => " It is being started now.".into(),
            Next::Nothing => String::new(),
        }
    }

    fn seconds(self) -> Option<f64> {
        match self {
            Next::In(delay) => Some((delay.as_secs_f64() * 1000.0).ceil() / 1000.0),
            Next::Now => Some(0.0),
            Next::Nothing => None,
        }
    }
}

/// A failed request, with all that its answer says.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub code: i32,
    pub reason: &'static str,
    pub outcome: Outcome,
    pub message: String,
    /// The failure of a tool call is shown to the model; a refusal by a guard is an error for the client.
    pub is_told_to_model: bool,
    backend: Option<String>,
    /// The backend may have run it.
    may_have_run: bool,
    next: Next,
    /// Further members of the data.
    more: Vec<(&'static str, Value)>,
    exit: Option<Value>,
    stderr: Vec<String>,
}

/// A replica asks the host of a backend not to send a call that it has not sent yet.
pub(super) const WITHDRAW: &str = "notifications/outlast/withdraw";
/// The code of the host's answer to such a call. Clients do not get it.
pub(super) const WITHDRAWN: i64 = 7031;

impl Failure {
    fn new(code: i32, reason: &'static str, outcome: Outcome, backend: &str, message: String) -> Failure {
        Failure {
            code,
            reason,
            outcome,
            message,
            is_told_to_model: true,
            backend: (!backend.is_empty()).then(|| backend.to_owned()),
            may_have_run: false,
            next: Next::Nothing,
            more: Vec::new(),
            exit: None,
            stderr: Vec::new(),
        }
    }

    /// An error for the client: a guard refused the call.
    fn refusal(code: i32, reason: &'static str, outcome: Outcome, backend: &str, message: String) -> Failure {
        Failure { is_told_to_model: false, ..Failure::new(code, reason, outcome, backend, message) }
    }

    pub(super) fn lost(backend: &str, how: &How, stderr: &str, next: Next) -> Failure {
        let again = next.sentence();
        let message = format!(
            "The backend `{backend}` ended while this was running ({how}). It may or may not have taken effect: check \
             before repeating it.{again}"
        );
        Failure {
            may_have_run: true,
            next,
            exit: Some(how.to_json()),
            stderr: last_lines(stderr),
            ..Failure::new(7001, "backend_ended", Outcome::Lost, backend, message)
        }
    }

    pub(super) fn lost_request(backend: &str, why: &str, was_sent: bool) -> Failure {
        let known = if was_sent {
            "It may or may not have taken effect: check before repeating it."
        } else {
            "It was not run."
        };
        let message = format!("The backend `{backend}` did not answer: {why}. {known}");
        Failure { may_have_run: was_sent, ..Failure::new(7001, "backend_ended", Outcome::Lost, backend, message) }
    }

    /// The backend answered 401 or 403, now or when it was last tried.
    pub(super) fn denied_by(backend: &str, denied: &Denied, body: Option<&str>, next: Next) -> Failure {
        let message =
            format!("This was not run: the backend `{backend}` refused our credentials: {denied}.{}", next.sentence());
        let (reason, outcome) = match denied.status {
            401 => ("unauthorized", Outcome::Unavailable),
            _ => ("forbidden", Outcome::Failed),
        };
        let mut more = vec![("status", json!(denied.status)), ("hint", json!(denied.hint()))];
        more.extend(denied.challenge.as_ref().map(|challenge| ("www_authenticate", json!(challenge))));
        more.extend(body.map(|body| ("body", json!(body))));
        Failure { next, more, ..Failure::refusal(denied.status.into(), reason, outcome, backend, message) }
    }

    /// The backend refused it with another status, and did not run it.
    pub(super) fn refused_by(backend: &str, refused: &Refused) -> Failure {
        let next = refused.retry_after.map_or(Next::Nothing, Next::In);
        let when = match next {
            Next::In(delay) => format!(" Try again in {:.0} s.", delay.as_secs_f64()),
            _ => String::new(),
        };
        let words = &refused.words;
        let message = format!("This was not run: the backend `{backend}` refused it: {words}.{when}");
        let (reason, outcome) = match refused.is_busy() {
            true => ("busy", Outcome::Unavailable),
            false => ("refused", Outcome::Failed),
        };
        let mut more = vec![("status", json!(refused.status))];
        more.extend(refused.body.as_ref().map(|body| ("body", json!(body))));
        Failure { next, more, ..Failure::refusal(refused.status.into(), reason, outcome, backend, message) }
    }

    pub(super) fn down(backend: &str, how: Option<&How>, stderr: &str, next: Next) -> Failure {
        let how_words = how.map_or_else(|| "it is not ready yet".into(), How::to_string);
        let message = format!("This was not run: the backend `{backend}` is down ({how_words}).{}", next.sentence());
        Failure {
            next,
            exit: how.map(How::to_json),
            stderr: last_lines(stderr),
            ..Failure::new(7002, "backend_down", Outcome::Unavailable, backend, message)
        }
    }

    pub(super) fn gave_up(backend: &str, why: &str, how: Option<&How>, stderr: &str, next: Next) -> Failure {
        let message = format!(
            "This was not run: the backend `{backend}` was given up ({why}).{} `outlast resume` starts it at once.",
            next.sentence()
        );
        Failure {
            next,
            exit: how.map(How::to_json),
            stderr: last_lines(stderr),
            ..Failure::new(7003, "gave_up", Outcome::Unavailable, backend, message)
        }
    }

    pub(super) fn hold_full(backend: &str, held: usize) -> Failure {
        let calls = count(held, "call is already waiting", "calls are already waiting");
        let message = format!("This was not run: {calls} for the backend `{backend}`.");
        Failure::new(7004, "hold_full", Outcome::Unavailable, backend, message)
    }

    pub(super) fn held_bytes(backend: &str, max: usize) -> Failure {
        let message = format!(
            "This was not run: more than {} MiB of this client's requests would wait for backends; one is `{backend}`.",
            max >> 20
        );
        Failure::new(7004, "hold_full", Outcome::Unavailable, backend, message)
    }

    pub(super) fn all_borrowed(backend: &str, max: usize) -> Failure {
        let message =
            format!("This was not run: all {max} processes of the backend `{backend}` are used by other clients.");
        Failure::new(7008, "all_lent", Outcome::Unavailable, backend, message)
    }

    pub(super) fn children_max(backend: &str, max: usize) -> Failure {
        let processes = count(max, "process", "processes");
        let message = format!(
            "This was not run: the backend `{backend}` has {processes} for other sessions, which is its `children_max`. \
             Try again when one of those sessions has ended."
        );
        Failure::new(7008, "children_max", Outcome::Unavailable, backend, message)
    }

    pub(super) fn stopping(backend: &str) -> Failure {
        Failure::new(
            7006,
            "stopping",
            Outcome::Unavailable,
            backend,
            "This was not run: the gateway is stopping.".into(),
        )
    }

    pub(super) fn removed(backend: &str) -> Failure {
        let message = "This was not run: its backend is no longer configured.".into();
        Failure::new(7007, "removed", Outcome::Unavailable, backend, message)
    }

    pub(super) fn timed_out(backend: &str, after: Duration) -> Failure {
        let message = format!(
            "The backend `{backend}` did not answer within {:.1} s; the call was cancelled. It may or may not \
             have taken effect.",
            after.as_secs_f64()
        );
        Failure { may_have_run: true, ..Failure::new(7010, "timed_out", Outcome::TimedOut, backend, message) }
    }

    pub(super) fn too_many(max: usize) -> Failure {
        let requests = count(max, "request of this client is", "requests of this client are");
        let message = format!("This was not run: {requests} already in flight.");
        Failure::refusal(7011, "too_many_in_flight", Outcome::RateLimited, "", message)
    }

    pub(super) fn rate_limited(backend: &str, tool: &str, wait: Duration) -> Failure {
        let message = format!("`{tool}` was called too often; try again in {:.1} s.", wait.as_secs_f64());
        Failure {
            next: Next::In(wait),
            ..Failure::refusal(7012, "rate_limited", Outcome::RateLimited, backend, message)
        }
    }

    pub(super) fn switched_off(backend: &str, what: &str) -> Failure {
        let message = format!("{what} was switched off by the operator.");
        Failure::refusal(7013, "switched_off", Outcome::SwitchedOff, backend, message)
    }

    pub(super) fn denied(backend: &str, role: Option<&str>, what: &str) -> Failure {
        let message = match role.filter(|role| !role.is_empty()) {
            Some(role) => format!("The role `{role}` may not use {what}."),
            None => format!("A client without a role may not use {what}."),
        };
        Failure::refusal(7014, "denied", Outcome::Denied, backend, message)
    }

    pub(super) fn revoked(backend: &str) -> Failure {
        let message = "This was not run: the credentials of this client expired or were revoked.".into();
        Failure::refusal(7014, "denied", Outcome::Denied, backend, message)
    }

    pub(super) fn withdrawn(backend: &str) -> Failure {
        let message = "This was not run: the client's replica withdrew it before it was sent.".into();
        Failure::refusal(WITHDRAWN as i32, "withdrawn", Outcome::Denied, backend, message)
    }

    pub(super) fn circuit_open(backend: &str, wait: Duration) -> Failure {
        let message = format!(
            "This was not run: the backend `{backend}` failed too often in a row; no calls are sent to it for {:.1} s.",
            wait.as_secs_f64()
        );
        Failure { next: Next::In(wait), ..Failure::new(7015, "circuit_open", Outcome::CircuitOpen, backend, message) }
    }

    pub(super) fn bad_arguments(backend: &str, tool: &str, why: &str) -> Failure {
        let message = format!("This was not run: the arguments do not fit the schema of `{tool}`: {why}");
        Failure::new(-32602, "bad_arguments", Outcome::BadArguments, backend, message)
    }

    /// The backend began the call, and asked for something that it did not get.
    pub(super) fn no_input(backend: &str, why: &str) -> Failure {
        let message = format!("The backend `{backend}` did not continue: {why}.");
        Failure { may_have_run: true, ..Failure::new(7021, "no_input", Outcome::Failed, backend, message) }
    }

    /// The same for a call that a backend had begun before: it was sent again, or was to continue with the client's input.
    pub(super) fn of_begun_call(mut self) -> Failure {
        self.may_have_run = true;
        if let Some(why) = self.message.strip_prefix("This was not run: ") {
            self.message = format!("This was not continued, and may or may not have taken effect: {why}");
        }
        self
    }

    pub(super) fn same_task(backend: &str) -> Failure {
        let message = format!(
            "The backend `{backend}` gave a task the id of another client's task. It runs, but cannot be queried."
        );
        Failure { may_have_run: true, ..Failure::refusal(7022, "same_task", Outcome::Failed, backend, message) }
    }

    pub(super) fn long_task(backend: &str, max: usize) -> Failure {
        let message = format!(
            "The backend `{backend}` made a task with an id of more than {max} bytes. It runs, but cannot be queried."
        );
        Failure { may_have_run: true, ..Failure::refusal(7022, "long_task", Outcome::Failed, backend, message) }
    }

    pub(super) fn unknown(message: String) -> Failure {
        Failure::refusal(-32602, "unknown", Outcome::Unknown, "", message)
    }

    pub(super) fn method_unknown(message: String) -> Failure {
        Failure::refusal(-32601, "unknown_method", Outcome::Unknown, "", message)
    }

    pub(super) fn data(&self) -> Value {
        let mut data = json!({"from": "outlast", "reason": self.reason});
        if let Some(backend) = &self.backend {
            data["backend"] = json!(backend);
            data["outcome"] = json!(if self.may_have_run { "unknown" } else { "not_run" });
        }
        if let Some(seconds) = self.next.seconds() {
            data["retryAfter"] = json!(seconds);
            data["retry_after_ms"] = json!((seconds * 1000.0).round() as u64);
        }
        for (name, value) in &self.more {
            data[*name] = value.clone();
        }
        if let Some(exit) = &self.exit {
            data["exit"] = exit.clone();
        }
        if !self.stderr.is_empty() {
            data["stderr"] = json!(self.stderr);
        }
        data
    }

    pub(super) fn as_tool_result(&self, era: Era) -> String {
        let text = match self.stderr.is_empty() {
            true => self.message.clone(),
            false => format!("{}\n\nstderr of the backend:\n{}", self.message, self.stderr.join("\n")),
        };
        tool_result(&text, true, era, Some(self.data()))
    }
}

/// A tool's result with one text.
pub(super) fn tool_result(text: &str, is_error: bool, era: Era, failure: Option<Value>) -> String {
    let mut result = json!({"content": [{"type": "text", "text": text}], "isError": is_error});
    if let Some(failure) = failure {
        result["_meta"] = json!({"outlast/failure": failure});
    }
    if era == Era::Stateless {
        result["resultType"] = json!("complete");
    }
    result.to_string()
}

/// Whether it is an error of JSON-RPC: an object with an integer code and a message.
pub(super) fn is_error_object(error: Raw<'_>) -> bool {
    let Some([code, message]) = pick(error, ["code", "message"]) else { return false };
    code.is_some_and(|code| code.get().parse::<i64>().is_ok())
        && message.is_some_and(|text| text.get().starts_with('"'))
}

fn last_lines(text: &str) -> Vec<String> {
    let mut bytes = 0;
    let mut lines: Vec<String> = text
        .lines()
        .rev()
        .take(STDERR_LINES_MAX)
        .take_while(|line| {
            bytes += line.len();
            bytes <= STDERR_SHOWN_MAX
        })
        .map(str::to_owned)
        .collect();
    lines.reverse();
    lines
}

/// The members that a result of the handshake era lacks in the stateless era, as an edit.
pub(super) fn complete(message: &[u8], result: Raw<'_>, what: CallKind) -> Option<(Range<usize>, String)> {
    let [kind, ttl, scope] = pick(result, ["resultType", "ttlMs", "cacheScope"])?;
    let mut added = Vec::new();
    if kind.is_none() {
        added.push(r#""resultType":"complete""#.to_owned());
    }
    if what == CallKind::Read {
        // Another call may change the resource without a notification.
        added.extend(ttl.is_none().then(|| r#""ttlMs":0"#.to_owned()));
        added.extend(scope.is_none().then(|| r#""cacheScope":"private""#.to_owned()));
    }
    if added.is_empty() {
        return None;
    }
    let edit = message::Edit::append(message, result, &added.join(","));
    Some((edit.at, edit.with))
}

/// The members of `_meta` that a request of the handshake era lacks in the stateless era.
pub(super) fn meta_members(client_state: Option<&ClientState>) -> String {
    let (info, capabilities) = match client_state {
        Some(client_state) => (client_state.info(), client_state.capabilities()),
        None => (None, None),
    };
    let own = info.is_none().then(self::info).unwrap_or_default();
    // In the handshake era a client gets all logs unless it set a level; in the stateless era it gets none.
    let level = client_state.map_or_else(String::new, |client_state| {
        let level = client_state.subscriptions.level().map_or("debug", Level::word);
        format!(r#","{}":"{level}""#, meta::LOG_LEVEL)
    });
    format!(
        r#""{}":"{}","{}":{},"{}":{}{level}"#,
        meta::PROTOCOL_VERSION,
        revision::STATELESS,
        meta::CLIENT_INFO,
        info.unwrap_or(&own),
        meta::CLIENT_CAPABILITIES,
        capabilities.unwrap_or("{}"),
    )
}

/// The `_meta` of a request without the members of the stateless era, and with the gateway's progress token.
pub(super) fn meta_of_handshake(members: Raw<'_>, token: &str) -> Option<String> {
    const ONLY_STATELESS: [&str; 4] =
        [meta::PROTOCOL_VERSION, meta::CLIENT_CAPABILITIES, meta::CLIENT_INFO, meta::LOG_LEVEL];
    let mut plain = String::from("{");
    members.for_each_member(|name, value| {
        let text = message::text(name).unwrap_or_default();
        if ONLY_STATELESS.contains(&text.as_str()) {
            return;
        }
        if plain.len() > 1 {
            plain.push(',');
        }
        plain.push_str(name.get());
        plain.push(':');
        plain.push_str(if text == meta::PROGRESS_TOKEN { token } else { value.get() });
    })?;
    plain.push('}');
    Some(plain)
}

/// Adds members to the `_meta` of a request, which may not have any.
pub(super) fn add_meta(message: &[u8], params: &Params<'_>, members: &str) -> (Range<usize>, String) {
    let edit = match (params.meta(), params.whole()) {
        (Some(meta), _) if meta.get().starts_with('{') => message::Edit::append(message, meta, members),
        (_, Some(whole)) => message::Edit::append(message, whole, &format!(r#""_meta":{{{members}}}"#)),
        _ => {
            let end = message.trim_ascii_end().len() - 1;
            return (end..end, format!(r#","params":{{"_meta":{{{members}}}}}"#));
        }
    };
    (edit.at, edit.with)
}

/// A text cut to a length.
pub(super) fn cut(text: &str, max: usize) -> String {
    match head(text, max) {
        whole if whole.len() == text.len() => text.to_owned(),
        begin => format!("{begin}…"),
    }
}

/// The message and code of a JSON-RPC error.
pub(super) fn error_words(error: Raw<'_>) -> String {
    let [message, code] = pick(error, ["message", "code"]).unwrap_or_default();
    let code = code.map_or_else(String::new, |code| format!(" ({})", cut(code.get(), 20)));
    let message = message.and_then(Raw::text).unwrap_or_else(|| "an error without a message".into());
    format!("{}{code}", cut(&message, 300))
}

/// The code for a missing resource in the handshake era. The stateless era has the code for invalid parameters.
const RESOURCE_UNKNOWN: i64 = -32002;

/// The error that a backend gets if it asks for something that the request did not declare. A failure that contains
/// this text failed for this reason.
const UNDECLARED: &str = "the request that this is for did not declare the capability ";

pub(super) fn undeclared(capability: &str) -> String {
    format!("{UNDECLARED}`{capability}`")
}

/// The capability that such a failure names.
pub(super) fn undeclared_in(failure: Raw<'_>) -> Option<&'static str> {
    let text = failure.get();
    let after = memchr::memmem::find(text.as_bytes(), UNDECLARED.as_bytes())? + UNDECLARED.len();
    let named = |capability: &&str| text[after..].strip_prefix('`').is_some_and(|rest| rest.starts_with(*capability));
    ["sampling", "elicitation", "roots"].into_iter().find(named)
}

/// The code of an error in the stateless era, if it differs.
pub(super) fn error_for_stateless(message: &[u8], error: Raw<'_>) -> Option<(Range<usize>, &'static str)> {
    let code = pick(error, ["code"])?[0]?;
    (error_code(error)? == RESOURCE_UNKNOWN).then(|| (message::place(message, code), "-32602"))
}

pub(super) fn error_code(error: Raw<'_>) -> Option<i64> {
    pick(error, ["code"])?[0]?.get().parse().ok()
}

/// A member with a string value.
pub(super) fn member(name: &str, value: &str) -> String {
    format!("{}:{}", quote(name), quote(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_the_stateless_era_are_removed_for_the_handshake_era() {
        #[rustfmt::skip]
        let table = [
            (r#"{}"#, r#"{}"#),
            (r#"{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{}}"#, r#"{}"#),
            (r#"{"io.modelcontextprotocol/clientInfo":{"a":1},"own":[1, 2],"io.modelcontextprotocol/logLevel":"info"}"#, r#"{"own":[1, 2]}"#),
            (r#"{"progressToken":"x","io.modelcontextprotocol\/protocolVersion":"2026-07-28"}"#, r#"{"progressToken":7}"#),
            (r#"{"io.modelcontextprotocol/related-task":{"taskId":"t"}}"#, r#"{"io.modelcontextprotocol/related-task":{"taskId":"t"}}"#),
        ];
        for (meta, plain) in table {
            let raw = Raw::parse(meta).expect("JSON");
            assert_eq!(meta_of_handshake(raw, "7").as_deref(), Some(plain), "{meta}");
        }
    }
}
