//! Messages of the relay itself: its tools, its failures, and the answers that it gives in place of a server.

use std::time::Duration;

use serde_json::{Value, json};

use crate::{cut::tail, exit::How, mcp::meta::SERVER_INFO, message::quote, record::millis};

/// The three tools that outlast adds to a server's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tool {
    Restart,
    Verify,
    Status,
}

impl Tool {
    pub(super) const ALL: [Tool; 3] = [Tool::Restart, Tool::Verify, Tool::Status];

    pub(super) fn name(self) -> &'static str {
        match self {
            Tool::Restart => "restart_server",
            Tool::Verify => "verify_server_restarted",
            Tool::Status => "server_status",
        }
    }

    /// Its definition, under the name it is listed by.
    pub(super) fn definition(self, listed: &str, server: &str) -> String {
        let (description, schema, read_only) = match self {
            Tool::Restart => (
                format!(
                    "Restart the `{server}` MCP server, for example to load changed code. The connection stays open. \
                     Returns when the new server has finished its handshake, with both process ids and the changes \
                     of its tools. If the new server does not start, returns the error and its stderr, and the old \
                     server keeps serving."
                ),
                json!({"type": "object", "properties": {
                    "reason": {"type": "string", "default": "code changes", "description": "The reason, for the audit log"},
                    "force": {"type": "boolean", "default": false,
                        "description": "Do not wait for calls in flight: they fail when the new server is ready"}}}),
                false,
            ),
            Tool::Verify => (
                format!(
                    "Check whether the `{server}` MCP server was restarted after a given time (Unix time in seconds). \
                     Works while the server is down."
                ),
                json!({"type": "object", "properties": {"since_timestamp": {"type": "number",
                    "description": "Unix time in seconds, taken before the restart was requested"}},
                    "required": ["since_timestamp"]}),
                true,
            ),
            Tool::Status => (
                format!(
                    "Show the state of the `{server}` MCP server: process id, uptime, restarts, how it last ended, \
                     when the next start is, and the end of its stderr. Works while the server is down."
                ),
                json!({"type": "object", "properties": {}}),
                true,
            ),
        };
        json!({
            "name": listed,
            "description": description,
            "inputSchema": schema,
            "annotations": {"readOnlyHint": read_only, "destructiveHint": false, "idempotentHint": true,
                "openWorldHint": false},
        })
        .to_string()
    }
}

/// A request that outlast has to fail.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub code: i32,
    pub reason: &'static str,
    /// Whether some server may have acted on it.
    pub outcome: Outcome,
    pub message: String,
    pub generation: u32,
    pub how: Option<How>,
    pub stderr: Vec<String>,
    pub next: Next,
    /// The name of the limit that was reached, if one was.
    pub limit: Option<&'static str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Unknown,
    NotSent,
}

/// What happens next to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    In(Duration),
    Now,
    /// Not by itself.
    Asked,
    /// There is nothing to say: another one serves already, or outlast is leaving.
    Nothing,
}

impl Next {
    pub(super) fn sentence(self, restart_tool: Option<&str>) -> String {
        match self {
            Next::In(delay) => format!("It starts again in {:.1} s.", delay.as_secs_f64()),
            Next::Now => "It is being started now.".into(),
            Next::Asked => match restart_tool {
                Some(tool) => format!("It is not started again by itself: call `{tool}`."),
                None => "It is not started again by itself: run `outlast restart`.".into(),
            },
            Next::Nothing => String::new(),
        }
    }

    fn retry_after_ms(self) -> Value {
        match self {
            Next::In(delay) => json!(millis(delay)),
            Next::Now => json!(0),
            Next::Asked | Next::Nothing => Value::Null,
        }
    }
}

const STDERR_LINES_MAX: usize = 10;
const STDERR_BYTES_MAX: usize = 2048;

impl Failure {
    pub(super) fn data(&self) -> Value {
        let mut data = json!({
            "from": "outlast",
            "reason": self.reason,
            "outcome": match self.outcome { Outcome::Unknown => "unknown", Outcome::NotSent => "not_sent" },
            "generation": self.generation,
            "exit": self.how.as_ref().map(How::to_json),
            "stderr": last_lines(&self.stderr, STDERR_LINES_MAX, STDERR_BYTES_MAX),
            "retry_after_ms": self.next.retry_after_ms(),
        });
        if let Some(limit) = self.limit {
            data["limit"] = json!(limit);
        }
        data
    }

    /// For a JSON-RPC error: the message, with the last line of stderr if it reports the server's exit.
    pub(super) fn as_one_line(&self) -> String {
        let last = self.stderr.iter().rev().map(|line| line.trim()).find(|line| !line.is_empty());
        match last.filter(|_| self.code == 7001) {
            Some(line) => format!("{} Last stderr line: {line}", self.message),
            None => self.message.clone(),
        }
    }

    /// For a tool call: a result that the model gets to see.
    pub(super) fn as_tool_result(&self, modern: bool) -> String {
        let stderr = last_lines(&self.stderr, STDERR_LINES_MAX, STDERR_BYTES_MAX);
        let text = if stderr.is_empty() {
            self.message.clone()
        } else {
            format!("{}\n\nstderr of the server:\n{}", self.message, stderr.join("\n"))
        };
        tool_result(&text, None, true, Some(("outlast/failure", self.data())), modern)
    }
}

/// The end of some lines, within a number of lines and bytes.
pub(super) fn last_lines(lines: &[String], lines_max: usize, bytes_max: usize) -> Vec<String> {
    let (mut kept, mut bytes) = (Vec::new(), 0);
    for line in lines.iter().rev().take(lines_max) {
        let room = bytes_max - bytes;
        if line.len() <= room {
            kept.push(line.clone());
            bytes += line.len();
            continue;
        }
        kept.extend(Some(tail(line, room)).filter(|end| !end.is_empty()).map(str::to_owned));
        break;
    }
    kept.reverse();
    kept
}

/// The result of a tool call, as JSON.
pub(super) fn tool_result(
    text: &str,
    structured: Option<&Value>,
    is_error: bool,
    meta: Option<(&str, Value)>,
    modern: bool,
) -> String {
    let mut result = json!({"content": [{"type": "text", "text": text}], "isError": is_error});
    if let Some(structured) = structured {
        result["structuredContent"] = structured.clone();
    }
    if let Some((name, value)) = meta {
        result["_meta"] = json!({name: value});
    }
    dress(result, modern)
}

/// A discover result that a server gave earlier. A client must ask again before it relies on it.
pub(super) fn from_memory(discovered: &str) -> String {
    match serde_json::from_str::<Value>(discovered) {
        Ok(mut result) if result.is_object() => {
            result["ttlMs"] = json!(0);
            result["cacheScope"] = json!("private");
            if !result["_meta"].is_object() {
                result["_meta"] = json!({});
            }
            dress(result, true)
        }
        _ => discovered.to_owned(),
    }
}

/// What every result of the stateless era carries.
pub(super) fn dress(mut result: Value, modern: bool) -> String {
    if modern {
        result["resultType"] = json!("complete");
        result["_meta"][SERVER_INFO] = server_info();
    }
    result.to_string()
}

pub(super) fn server_info() -> Value {
    json!({"name": "outlast", "version": env!("CARGO_PKG_VERSION")})
}

/// A list from memory. `inside` is the inside of a JSON array.
pub(super) fn list_result(member: &str, inside: &str, modern: bool) -> String {
    let member = quote(member);
    if modern {
        let info = server_info();
        format!(
            r#"{{{member}:[{inside}],"ttlMs":0,"cacheScope":"private","resultType":"complete","_meta":{{"{SERVER_INFO}":{info}}}}}"#
        )
    } else {
        format!("{{{member}:[{inside}]}}")
    }
}
