//! The demo's server: strict, of the handshake era, and configured by the file that it reads at its start.
//!
//! The file stands for a server's code: to change it and restart is a reload, and an invalid file is a syntax error.

use std::{
    fs,
    io::{self, BufRead, Write},
    path::Path,
    process::{self, ExitCode},
    thread,
    time::Duration,
};

use outlast_core::mcp::{method, notification, revision};
use serde::Deserialize;
use serde_json::{Value, json};

/// The content of the server's file.
#[derive(Debug, Clone, Deserialize)]
struct Code {
    version: u32,
    tools: Vec<Tool>,
}

#[derive(Debug, Clone, Deserialize)]
struct Tool {
    name: String,
    description: String,
    /// How long a call takes; calls of the same tool run in parallel.
    #[serde(default)]
    takes_ms: u64,
}

/// Serves on stdin and stdout until stdin ends.
pub(crate) fn serve(file: &Path) -> ExitCode {
    let code = match load(file) {
        Ok(code) => code,
        Err(trace) => {
            let _ = writeln!(io::stderr(), "{trace}");
            return ExitCode::FAILURE;
        }
    };
    let mut server = Server { code, phase: Phase::New };
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        // A line that is not JSON has no id that could be answered.
        if let Ok(message) = serde_json::from_str(&line) {
            server.hear(&message);
        }
    }
    ExitCode::SUCCESS
}

fn load(file: &Path) -> Result<Code, String> {
    let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
    let text = fs::read_to_string(file).map_err(|error| format!("cannot read {name}: {error}"))?;
    serde_json::from_str(&text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        let source = text.lines().nth(line.saturating_sub(1)).unwrap_or_default();
        let words = error.to_string();
        let what = words.split(" at line ").next().unwrap_or_default();
        format!(
            "error: {what}\n  --> {name}:{line}:{column}\n   | {source}\n   | {:>column$}\nthe server cannot start",
            "^"
        )
    })
}

struct Server {
    code: Code,
    phase: Phase,
}

#[derive(PartialEq)]
enum Phase {
    New,
    Initializing,
    Ready,
}

impl Server {
    fn hear(&mut self, message: &Value) {
        let method = message["method"].as_str();
        let Some(id) = message.get("id") else {
            if method == Some(notification::INITIALIZED) && self.phase == Phase::Initializing {
                self.phase = Phase::Ready;
            }
            return;
        };
        match method {
            Some(method::INITIALIZE) => {
                self.phase = Phase::Initializing;
                let result = json!({
                    "protocolVersion": revision::NEWEST_HANDSHAKE,
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "demo", "version": self.code.version.to_string()},
                });
                answer(id, &result);
            }
            Some(method::PING) => answer(id, &json!({})),
            Some(_) if self.phase != Phase::Ready => {
                refuse(id, -32602, "Received request before initialization was complete");
            }
            Some(method::TOOLS_LIST) => {
                let tools: Vec<Value> = self.code.tools.iter().map(Tool::listed).collect();
                answer(id, &json!({"tools": tools}));
            }
            Some(method::TOOLS_CALL) => self.call(id, &message["params"]),
            Some(_) => refuse(id, -32601, "Method not found"),
            // A response: this server sends no requests.
            None => {}
        }
    }

    fn call(&self, id: &Value, params: &Value) {
        let name = params["name"].as_str().unwrap_or_default();
        let Some(tool) = self.code.tools.iter().find(|tool| tool.name == name) else {
            return refuse(id, -32602, &format!("Unknown tool: {name}"));
        };
        let done = json!({"n": params["arguments"]["n"], "version": self.code.version, "pid": process::id()});
        let result = json!({"content": [{"type": "text", "text": done.to_string()}], "structuredContent": done});
        if tool.takes_ms == 0 {
            return answer(id, &result);
        }
        let (id, time) = (id.clone(), Duration::from_millis(tool.takes_ms));
        // A slow tool only sleeps. Its thread ends with the process.
        let slow = {
            let (id, result) = (id.clone(), result.clone());
            thread::Builder::new().spawn(move || {
                thread::sleep(time);
                answer(&id, &result);
            })
        };
        if slow.is_err() {
            answer(&id, &result);
        }
    }
}

impl Tool {
    fn listed(&self) -> Value {
        json!({
            "name": self.name,
            "description": self.description,
            "inputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        })
    }
}

fn answer(id: &Value, result: &Value) {
    say(&json!({"jsonrpc": "2.0", "id": id, "result": result}));
}

fn refuse(id: &Value, code: i32, message: &str) {
    say(&json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}}));
}

fn say(message: &Value) {
    // One write under one lock; a client that no longer reads will close stdin too.
    let _ = io::stdout().lock().write_all(format!("{message}\n").as_bytes());
}
