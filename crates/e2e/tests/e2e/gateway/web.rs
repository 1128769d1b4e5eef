//! A client over HTTP that is as plain as can be: one connection, one request at a time.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
};

use serde_json::{Value, json};

use crate::mcp::client::{INITIALIZED, PATIENCE, VERSION, initialize_params};

/// One connection, kept open.
pub struct Web {
    /// What it says in `Host`.
    pub address: String,
    stream: BufReader<TcpStream>,
}

pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The JSON-RPC messages in it, whether it came as JSON or as a stream of events.
    pub fn messages(&self) -> Vec<Value> {
        let text = self.text();
        if self.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream")) {
            let data = text.lines().filter_map(|line| line.strip_prefix("data:"));
            return data.filter_map(|data| serde_json::from_str(data.trim_start()).ok()).collect();
        }
        match serde_json::from_str(&text) {
            Ok(Value::Array(messages)) => messages,
            Ok(message) => vec![message],
            Err(_) => vec![],
        }
    }
}

impl Web {
    pub fn connect(address: &str) -> Web {
        let stream = TcpStream::connect(address).expect("somebody listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream.set_nodelay(true).expect("a socket");
        Web { address: address.to_owned(), stream: BufReader::new(stream) }
    }

    pub fn ask(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        let mut head =
            format!("{method} {path} HTTP/1.1\r\nhost: {}\r\ncontent-length: {}\r\n", self.address, body.len());
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body);
        self.stream.get_mut().write_all(&bytes).expect("the gateway listens");
        self.reply()
    }

    pub fn get(&mut self, path: &str) -> Reply {
        self.ask("GET", path, &[], b"")
    }

    fn reply(&mut self) -> Reply {
        let status = self.line();
        let status = status.split(' ').nth(1).and_then(|code| code.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status line"));
        let mut headers = Vec::new();
        loop {
            let line = self.line();
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').expect("a header");
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let mut reply = Reply { status, headers, body: Vec::new() };
        if reply.header("transfer-encoding") == Some("chunked") {
            loop {
                let length = usize::from_str_radix(self.line().trim(), 16).expect("the length of a chunk");
                let from = reply.body.len();
                reply.body.resize(from + length, 0);
                self.stream.read_exact(&mut reply.body[from..]).expect("a whole chunk");
                self.line();
                if length == 0 {
                    break;
                }
            }
        } else if let Some(length) = reply.header("content-length").and_then(|length| length.parse().ok()) {
            reply.body.resize(length, 0);
            self.stream.read_exact(&mut reply.body).expect("a whole body");
        }
        reply
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        let read = self.stream.read_line(&mut line).expect("an answer in time");
        assert!(read > 0, "the gateway hung up");
        line.trim_end().to_owned()
    }
}

/// A session of the handshake era.
pub struct Session {
    web: Web,
    pub id: String,
    /// As which client.
    pub token: Option<String>,
    next_id: u64,
}

impl Session {
    pub fn open(address: &str) -> Session {
        Session::open_as(address, None)
    }

    pub fn open_as(address: &str, token: Option<&str>) -> Session {
        let token = token.map(|token| format!("Bearer {token}"));
        let mut session = Session { web: Web::connect(address), id: String::new(), token, next_id: 1 };
        let reply = session.post(&json!({
            "jsonrpc": "2.0", "id": 0, "method": "initialize", "params": initialize_params(VERSION),
        }));
        assert_eq!(reply.status, 200, "{}", reply.text());
        session.id = reply.header("mcp-session-id").expect("a session id").to_owned();
        let reply = session.post(&serde_json::from_str(INITIALIZED).expect("JSON"));
        assert_eq!(reply.status, 202, "{}", reply.text());
        session
    }

    pub fn post(&mut self, message: &Value) -> Reply {
        let mut headers = vec![
            ("content-type", "application/json"),
            ("accept", "application/json, text/event-stream"),
            ("mcp-protocol-version", VERSION),
        ];
        if !self.id.is_empty() {
            headers.push(("mcp-session-id", &self.id));
        }
        if let Some(token) = &self.token {
            headers.push(("authorization", token));
        }
        self.web.ask("POST", "/mcp", &headers, message.to_string().as_bytes())
    }

    pub fn ask(&mut self, method: &str, params: Value) -> Value {
        let id = self.next_id;
        self.next_id += 1;
        let reply = self.post(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
        assert_eq!(reply.status, 200, "{method}: {}", reply.text());
        let messages = reply.messages();
        let mut answers: Vec<&Value> = messages.iter().filter(|message| message["id"] == id).collect();
        let answer = answers.pop().unwrap_or_else(|| panic!("{method}: no answer in {}", reply.text()));
        assert!(answers.is_empty(), "{method}: answered twice in {}", reply.text());
        answer.clone()
    }

    /// The result of a call, error or not.
    pub fn result(&mut self, tool: &str, arguments: Value) -> Value {
        let mut answer = self.ask("tools/call", json!({"name": tool, "arguments": arguments}));
        assert!(answer["result"].is_object(), "{tool}: {answer}");
        answer["result"].take()
    }

    /// The text of a call that must succeed.
    pub fn call(&mut self, tool: &str, arguments: Value) -> String {
        let result = self.result(tool, arguments);
        assert_ne!(result["isError"], true, "{tool}: {result}");
        crate::mcp::client::text(&result)
    }

    pub fn tools(&mut self) -> Vec<String> {
        let answer = self.ask("tools/list", json!({}));
        let tools = answer["result"]["tools"].as_array().unwrap_or_else(|| panic!("no list: {answer}"));
        tools.iter().map(|tool| tool["name"].as_str().expect("a name").to_owned()).collect()
    }
}

/// One request of the stateless era, from a client that can do that much.
pub fn stateless(address: &str, method: &str, mut params: Value, capabilities: Value) -> Reply {
    params["_meta"]["io.modelcontextprotocol/protocolVersion"] = json!("2026-07-28");
    params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = capabilities;
    let name = params["name"].as_str().unwrap_or_default().to_owned();
    let mut headers = vec![
        ("content-type", "application/json"),
        ("accept", "application/json, text/event-stream"),
        ("mcp-protocol-version", "2026-07-28"),
        ("mcp-method", method),
    ];
    if !name.is_empty() {
        headers.push(("mcp-name", &name));
    }
    let message = json!({"jsonrpc": "2.0", "id": "one", "method": method, "params": params});
    Web::connect(address).ask("POST", "/mcp", &headers, message.to_string().as_bytes())
}
