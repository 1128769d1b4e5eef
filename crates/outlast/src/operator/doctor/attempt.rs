//! One trial conversation with a server: the requests that are sent to it, and what its answers mean. It starts no
//! process.

use outlast_core::mcp::{meta, method, notification, revision};
use serde_json::{Value, json};

const HELLO: u64 = 1;
const LIST: u64 = 2;
const DISCOVER: u64 = 3;
const MODERN_LIST: u64 = 4;

/// The progress of the conversation. It starts with the handshake, which all servers but purely stateless ones
/// understand.
#[derive(Debug, Default)]
pub(super) struct Attempt {
    answer: Answer,
    /// Lines on its stdout that are no messages.
    noise: usize,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Answer {
    /// The name and version that the server reports.
    pub server: String,
    pub protocol: String,
    /// `None` if it offers none.
    pub tools: Option<usize>,
    pub noise: usize,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    Wait,
    Say(Vec<String>),
    Answers(Answer),
    Refuses(String),
}

impl Attempt {
    pub(super) fn hello(&self) -> String {
        let params = json!({"protocolVersion": revision::NEWEST_HANDSHAKE, "capabilities": {},
            "clientInfo": {"name": "outlast-doctor", "version": env!("CARGO_PKG_VERSION")}});
        line(&json!({"jsonrpc": "2.0", "id": HELLO, "method": method::INITIALIZE, "params": params}))
    }

    pub(super) fn heard(&mut self, text: &str) -> Step {
        if text.trim().is_empty() {
            return Step::Wait;
        }
        let Ok(message) = serde_json::from_str::<Value>(text) else {
            self.noise += 1;
            return Step::Wait;
        };
        if !message["method"].is_null() {
            // A request or a notification of the server. It needs no answer before the next step.
            return Step::Wait;
        }
        let error = message["error"]["message"].as_str().unwrap_or("without output").to_owned();
        let is_error = !message["error"].is_null();
        let result = &message["result"];
        match message["id"].as_u64() {
            Some(HELLO) if is_error => Step::Say(vec![modern(DISCOVER, method::DISCOVER)]),
            Some(HELLO) => {
                self.answer.server = named(&result["serverInfo"]);
                self.answer.protocol = result["protocolVersion"].as_str().unwrap_or("?").to_owned();
                let initialized = json!({"jsonrpc": "2.0", "method": notification::INITIALIZED});
                let list = json!({"jsonrpc": "2.0", "id": LIST, "method": method::TOOLS_LIST, "params": {}});
                match &result["capabilities"]["tools"] {
                    Value::Null => Step::Answers(self.answered()),
                    _ => Step::Say(vec![line(&initialized), line(&list)]),
                }
            }
            Some(DISCOVER) if is_error => Step::Refuses(error),
            Some(DISCOVER) => {
                self.answer.protocol = revision::STATELESS.to_owned();
                self.answer.server = named(&result["_meta"][meta::SERVER_INFO]);
                match &result["capabilities"]["tools"] {
                    Value::Null => Step::Answers(self.answered()),
                    _ => Step::Say(vec![modern(MODERN_LIST, method::TOOLS_LIST)]),
                }
            }
            // The handshake succeeded, so the server works; it may not have this list.
            Some(LIST | MODERN_LIST) => {
                self.answer.tools = result["tools"].as_array().map(Vec::len);
                Step::Answers(self.answered())
            }
            _ => Step::Wait,
        }
    }

    fn answered(&self) -> Answer {
        Answer { noise: self.noise, ..self.answer.clone() }
    }
}

fn modern(id: u64, method: &str) -> String {
    let meta = json!({meta::PROTOCOL_VERSION: revision::STATELESS, meta::CLIENT_CAPABILITIES: {}});
    line(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": {"_meta": meta}}))
}

fn named(info: &Value) -> String {
    let text = |member: &str| info[member].as_str().unwrap_or_default();
    format!("{} {}", text("name"), text("version")).trim().to_owned()
}

fn line(message: &Value) -> String {
    format!("{message}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_of_either_era_is_recognized() {
        let mut attempt = Attempt::default();
        assert!(attempt.hello().contains("\"initialize\""));
        assert_eq!(attempt.heard("Listening on stdio"), Step::Wait);
        assert_eq!(attempt.heard(r#"{"jsonrpc":"2.0","id":9,"method":"roots/list"}"#), Step::Wait);
        let hello = r#"{"id":1,"result":{"protocolVersion":"2025-06-18","serverInfo":{"name":"w","version":"1"},"capabilities":{"tools":{}}}}"#;
        assert!(matches!(attempt.heard(hello), Step::Say(lines) if lines.len() == 2));
        let answer = Answer { server: "w 1".into(), protocol: "2025-06-18".into(), tools: Some(2), noise: 1 };
        assert_eq!(attempt.heard(r#"{"id":2,"result":{"tools":[{},{}]}}"#), Step::Answers(answer));

        let mut attempt = Attempt::default();
        let refusal = r#"{"id":1,"error":{"code":-32022,"message":"no"}}"#;
        assert!(matches!(attempt.heard(refusal), Step::Say(lines) if lines[0].contains("server/discover")));
        let discovered =
            r#"{"id":3,"result":{"capabilities":{},"_meta":{"io.modelcontextprotocol/serverInfo":{"name":"m"}}}}"#;
        let answer = Answer { server: "m".into(), protocol: revision::STATELESS.into(), tools: None, noise: 0 };
        assert_eq!(attempt.heard(discovered), Step::Answers(answer));
    }

    #[test]
    fn a_server_that_refuses_both_eras_is_broken_with_its_reason() {
        let mut attempt = Attempt::default();
        attempt.heard(r#"{"id":1,"error":{"code":-32000,"message":"no token"}}"#);
        assert_eq!(
            attempt.heard(r#"{"id":3,"error":{"code":-32601,"message":"no such method"}}"#),
            Step::Refuses("no such method".into())
        );
    }
}
