//! A minimal HTTP client: one connection, one request at a time.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
};

use serde_json::{Value, json};

use crate::mcp::client::{INITIALIZED, PATIENCE, VERSION, initialize_params};

/// One connection, kept open.
pub(crate) struct Web {
    /// Its `Host` header.
    pub address: String,
    stream: BufReader<TcpStream>,
}

pub(crate) struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The JSON-RPC messages in it, whether it came as JSON or as a stream of events.
    pub(crate) fn messages(&self) -> Vec<Value> {
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
    pub(crate) fn connect(address: &str) -> Web {
        let stream = TcpStream::connect(address).expect("the gateway listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream.set_nodelay(true).expect("a socket");
        Web { address: address.to_owned(), stream: BufReader::new(stream) }
    }

    pub(crate) fn ask(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        self.send(method, path, headers, body);
        self.reply()
    }

    /// Sends a request whose answer is read piece by piece.
    pub(crate) fn begin(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        self.send(method, path, headers, body);
    }

    /// Sends bytes as they are.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).expect("the gateway listens");
    }

    /// The whole answer to a request that was sent before.
    pub(crate) fn answer(&mut self) -> Reply {
        self.reply()
    }

    fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        let mut head =
            format!("{method} {path} HTTP/1.1\r\nhost: {}\r\ncontent-length: {}\r\n", self.address, body.len());
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body);
        self.stream.get_mut().write_all(&bytes).expect("the gateway listens");
    }

    pub(crate) fn get(&mut self, path: &str) -> Reply {
        self.ask("GET", path, &[], b"")
    }

    fn reply(&mut self) -> Reply {
        let mut reply = self.head();
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

    /// Status and headers of a response whose body is not read yet.
    pub(crate) fn head(&mut self) -> Reply {
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
        Reply { status, headers, body: Vec::new() }
    }

    /// The id of the next event of a stream.
    pub(crate) fn event_id(&mut self) -> String {
        loop {
            if let Some(id) = self.line().strip_prefix("id: ") {
                return id.to_owned();
            }
        }
    }

    /// The next message of a stream.
    pub(crate) fn event(&mut self) -> Value {
        loop {
            if let Some(data) = self.line().strip_prefix("data: ") {
                return serde_json::from_str(data).expect("JSON");
            }
        }
    }

    /// The same for an event that this causes.
    pub(crate) fn event_id_after(&mut self, cause: impl FnOnce()) -> String {
        cause();
        self.event_id()
    }

    /// The id of the next event, or nothing at the end of a chunked body.
    pub(crate) fn next_event_id(&mut self) -> Option<String> {
        loop {
            let line = self.line();
            match line.strip_prefix("id: ") {
                Some(id) => return Some(id.to_owned()),
                None if line == "0" => return None,
                None => {}
            }
        }
    }

    /// Reads a stream to its end; true if that is the end of a chunked body, and not of the connection.
    pub(crate) fn is_ended(&mut self) -> bool {
        loop {
            if self.line() == "0" {
                return true;
            }
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        let read = self.stream.read_line(&mut line).expect("an answer in time");
        assert!(read > 0, "the gateway hung up");
        line.trim_end().to_owned()
    }
}

/// The id of the request of [`Session::begin`].
pub(crate) const BEGUN_ID: &str = "begun";

/// A session of the handshake era.
pub(crate) struct Session {
    web: Web,
    pub id: String,
    /// The credentials of the client.
    pub token: Option<String>,
    version: &'static str,
    next_id: u64,
}

impl Session {
    pub(crate) fn open(address: &str) -> Session {
        Session::open_as(address, None)
    }

    pub(crate) fn open_as(address: &str, token: Option<&str>) -> Session {
        Session::open_with(address, token, VERSION)
    }

    pub(crate) fn open_with(address: &str, token: Option<&str>, version: &'static str) -> Session {
        let token = token.map(|token| format!("Bearer {token}"));
        let session = Session { web: Web::connect(address), id: String::new(), token, version, next_id: 1 };
        session.initialized(initialize_params(version))
    }

    /// With these client capabilities.
    pub(crate) fn open_declaring(address: &str, capabilities: Value) -> Session {
        Session::open_declaring_as(address, None, capabilities)
    }

    pub(crate) fn open_declaring_as(address: &str, token: Option<&str>, capabilities: Value) -> Session {
        let token = token.map(|token| format!("Bearer {token}"));
        let (web, version) = (Web::connect(address), VERSION);
        let session = Session { web, id: String::new(), token, version, next_id: 1 };
        let mut params = initialize_params(version);
        params["capabilities"] = capabilities;
        session.initialized(params)
    }

    fn initialized(mut self, params: Value) -> Session {
        let session = &mut self;
        let reply = session.post(&json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}));
        assert_eq!(reply.status, 200, "{}", reply.text());
        session.id = reply.header("mcp-session-id").expect("a session id").to_owned();
        let reply = session.post(&serde_json::from_str(INITIALIZED).expect("JSON"));
        assert_eq!(reply.status, 202, "{}", reply.text());
        self
    }

    /// The same session over another connection.
    pub(crate) fn reconnect(&mut self, address: &str) {
        self.web = Web::connect(address);
    }

    /// A request without a body.
    pub(crate) fn send(&mut self, method: &str) -> Reply {
        let mut headers = vec![("accept", "text/event-stream"), ("mcp-session-id", self.id.as_str())];
        if let Some(token) = &self.token {
            headers.push(("authorization", token));
        }
        self.web.ask(method, "/mcp", &headers, b"")
    }

    /// Resumes a stream after this event, and reads it to its end.
    pub(crate) fn resume(&mut self, last: &str) -> Reply {
        let mut headers =
            vec![("accept", "text/event-stream"), ("mcp-session-id", self.id.as_str()), ("last-event-id", last)];
        if let Some(token) = &self.token {
            headers.push(("authorization", token));
        }
        self.web.ask("GET", "/mcp", &headers, b"")
    }

    /// Starts a call on a connection of its own and does not wait for its answer.
    pub(crate) fn begin(&self, tool: &str, arguments: &Value, progress_token: Option<&str>) -> Web {
        let mut params = json!({"name": tool, "arguments": arguments});
        if let Some(token) = progress_token {
            params["_meta"] = json!({"progressToken": token});
        }
        let message = json!({"jsonrpc": "2.0", "id": BEGUN_ID, "method": "tools/call", "params": params});
        self.begin_body(message.to_string().as_bytes())
    }

    /// The same with a body as it is.
    pub(crate) fn begin_body(&self, body: &[u8]) -> Web {
        let mut web = Web::connect(&self.web.address);
        web.send("POST", "/mcp", &post_headers(&self.id, self.token.as_deref(), self.version), body);
        web
    }

    pub(crate) fn post(&mut self, message: &Value) -> Reply {
        let headers = post_headers(&self.id, self.token.as_deref(), self.version);
        self.web.ask("POST", "/mcp", &headers, message.to_string().as_bytes())
    }

    pub(crate) fn ask(&mut self, method: &str, params: Value) -> Value {
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
    pub(crate) fn result(&mut self, tool: &str, arguments: Value) -> Value {
        let mut answer = self.ask("tools/call", json!({"name": tool, "arguments": arguments}));
        assert!(answer["result"].is_object(), "{tool}: {answer}");
        answer["result"].take()
    }

    /// The text of a call that must succeed.
    pub(crate) fn call(&mut self, tool: &str, arguments: Value) -> String {
        let result = self.result(tool, arguments);
        assert_ne!(result["isError"], true, "{tool}: {result}");
        crate::mcp::client::text(&result)
    }

    pub(crate) fn tools(&mut self) -> Vec<String> {
        let answer = self.ask("tools/list", json!({}));
        let tools = answer["result"]["tools"].as_array().unwrap_or_else(|| panic!("no list: {answer}"));
        tools.iter().map(|tool| tool["name"].as_str().expect("a name").to_owned()).collect()
    }
}

fn post_headers<'a>(session: &'a str, token: Option<&'a str>, version: &'a str) -> Vec<(&'static str, &'a str)> {
    let mut headers = vec![
        ("content-type", "application/json"),
        ("accept", "application/json, text/event-stream"),
        ("mcp-protocol-version", version),
    ];
    headers.extend((!session.is_empty()).then_some(("mcp-session-id", session)));
    headers.extend(token.map(|token| ("authorization", token)));
    headers
}

/// One request of the stateless era, from a client with these capabilities.
pub(crate) fn stateless(address: &str, method: &str, mut params: Value, capabilities: Value) -> Reply {
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
