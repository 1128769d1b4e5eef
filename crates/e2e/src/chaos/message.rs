//! The requests of the clients of the run, and the meaning of answers.

use serde_json::{Value, json};

use super::{ledger::Answer, random::Random};

pub(super) const VERSION: &str = "2025-11-25";
pub(super) const STATELESS_VERSION: &str = "2026-07-28";

pub(super) fn initialize() -> Value {
    let params =
        json!({"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "chaos", "version": "1"}});
    json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params})
}

pub(super) fn initialized() -> Value {
    json!({"jsonrpc": "2.0", "method": "notifications/initialized"})
}

/// A request whose number is not known yet.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub method: &'static str,
    /// Of a tool call: the tool.
    pub tool: Option<String>,
    pub arguments: Value,
}

impl Request {
    pub(super) fn tool(name: impl Into<String>, arguments: Value) -> Request {
        Request { method: "tools/call", tool: Some(name.into()), arguments }
    }

    /// The usual requests of clients. `prefix` comes before the names of tools.
    pub(super) fn any(random: &mut Random, prefix: &str) -> Request {
        let named = |name: &str| format!("{prefix}{name}");
        match random.between(0, 100) {
            0..72 => Request::tool(named("echo"), json!({})),
            72..87 => Request::tool(named("sleep"), json!({"ms": random.between(1, 60)})),
            87..94 => Request::tool(named("big"), json!({"bytes": random.between(10_000, 300_000)})),
            _ => Request { method: "tools/list", tool: None, arguments: json!({}) },
        }
    }

    pub(super) fn is_tool(&self) -> bool {
        self.tool.is_some()
    }

    /// Whether the answer repeats the arguments.
    pub(super) fn is_echo(&self) -> bool {
        self.tool.as_ref().is_some_and(|tool| tool.ends_with("echo"))
    }

    pub(super) fn message(&self, call: u64) -> Value {
        let params = match &self.tool {
            None => json!({}),
            Some(tool) => {
                let mut arguments = self.arguments.clone();
                arguments["call"] = call.into();
                json!({"name": tool, "arguments": arguments})
            }
        };
        json!({"jsonrpc": "2.0", "id": call, "method": self.method, "params": params})
    }
}

/// What an answer says about its call.
pub(super) fn meaning(message: &Value, call: u64, is_echo: bool) -> Answer {
    let result = &message["result"];
    let failure = match result.is_object() {
        true => &result["_meta"]["outlast/failure"],
        false => &message["error"]["data"],
    };
    match failure["outcome"].as_str() {
        // The relay and the gateway use different names for it.
        Some("not_sent" | "not_run") => return Answer::NotSent,
        Some("unknown") => return Answer::Unknown,
        _ => {}
    }
    if !result.is_object() || result["isError"] == true {
        let error = &message["error"];
        let text = match error["message"].as_str() {
            Some(text) => format!("{} {text}", error["code"]),
            None => result["content"][0]["text"].as_str().unwrap_or("an error without a message").to_owned(),
        };
        return Answer::Refused(text.chars().take(80).collect());
    }
    let text = result["content"][0]["text"].as_str().unwrap_or_default();
    let echoed = || serde_json::from_str::<Value>(text).ok().and_then(|arguments| arguments["call"].as_u64());
    if is_echo && echoed() != Some(call) {
        return Answer::Foreign(text.chars().take(200).collect());
    }
    Answer::Done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_distinguished() {
        let table = [
            (json!({"result": {"content": [{"text": "{\"call\":7}"}]}}), Answer::Done),
            (json!({"result": {"content": [{"text": "{\"call\":8}"}]}}), Answer::Foreign("{\"call\":8}".into())),
            (
                json!({"result": {"isError": true, "_meta": {"outlast/failure": {"outcome": "unknown"}}}}),
                Answer::Unknown,
            ),
            (
                json!({"result": {"isError": true, "_meta": {"outlast/failure": {"outcome": "not_run"}}}}),
                Answer::NotSent,
            ),
            (json!({"error": {"code": 7004, "data": {"outcome": "not_sent"}}}), Answer::NotSent),
            (json!({"error": {"code": 1, "message": "no"}}), Answer::Refused("1 no".into())),
            (json!({"result": {"isError": true, "content": [{"text": "no"}]}}), Answer::Refused("no".into())),
        ];
        for (message, answer) in table {
            assert_eq!(meaning(&message, 7, true), answer, "{message}");
        }
    }
}
