//! A client of the gateway over HTTP: one connection, one request at a time.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::TcpStream,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    ledger::{Answer, HUNG_AFTER, Ledger},
    message::{Request, STATELESS_VERSION, VERSION, initialize, initialized, meaning},
};

const PART: &str = "gateway";
/// The key of all clients. Only gateways that do not listen on loopback ask for it.
const KEY: &str = "chaos";
/// Its hash, as a gateway has it in its configuration.
pub(super) const KEY_SHA256: &str = "5d5bddb577102d0a960bcf6fea9050c10fe5e9feddcb5c2170ccab872db9ee87";

pub(super) struct Http {
    address: String,
    ledger: Arc<Ledger>,
    stream: Option<BufReader<TcpStream>>,
    /// None in the stateless era.
    session: Option<String>,
    /// Between two pieces of an answer.
    pause: Option<Duration>,
    /// When the current call counts as hung. Pings of the gateway on the stream do not postpone it.
    hung_at: Instant,
}

pub(super) struct Reply {
    pub status: u16,
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The JSON-RPC messages in it, whether it came as JSON or as a stream of events.
    pub(super) fn messages(&self) -> Vec<Value> {
        let text = String::from_utf8_lossy(&self.body);
        if self.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream")) {
            let data = text.lines().filter_map(|line| line.strip_prefix("data:"));
            return data.filter_map(|data| serde_json::from_str(data.trim_start()).ok()).collect();
        }
        serde_json::from_str(&text).into_iter().collect()
    }
}

impl Http {
    /// A client of the stateless era.
    pub(super) fn stateless(address: &str, ledger: &Arc<Ledger>) -> Http {
        Http {
            address: address.to_owned(),
            ledger: Arc::clone(ledger),
            stream: None,
            session: None,
            pause: None,
            hung_at: Instant::now(),
        }
    }

    /// A client with a session.
    pub(super) fn open(address: &str, ledger: &Arc<Ledger>) -> io::Result<Http> {
        let mut http = Http::stateless(address, ledger);
        http.session = Some(String::new());
        let reply = http.post(&initialize(), None)?;
        let session = reply.header("mcp-session-id").map(str::to_owned);
        http.session = Some(session.ok_or_else(|| io::Error::other(format!("no session: HTTP {}", reply.status)))?);
        http.post(&initialized(), None)?;
        Ok(http)
    }

    /// Another connection with the same session.
    pub(super) fn again(&self) -> Http {
        let mut http = Http::stateless(&self.address, &self.ledger);
        http.session.clone_from(&self.session);
        http
    }

    /// The next request goes to this address, over a connection of its own.
    pub(super) fn switch(&mut self, address: &str) {
        address.clone_into(&mut self.address);
        self.stream = None;
    }

    pub(super) fn has_session(&self) -> bool {
        self.session.is_some()
    }

    /// Reads answers in pieces, with this pause between them.
    pub(super) fn read_slowly(&mut self, pause: Duration) {
        self.pause = Some(pause);
    }

    /// Makes a call and waits for its answer. None once the run is over.
    pub(super) fn call(&mut self, request: &Request) -> Option<u64> {
        let call = self.ledger.sent(PART, request.is_tool())?;
        let message = self.message(request, call);
        match self.post(&message, request.tool.as_deref()) {
            Ok(reply) => self.take(call, request, &reply),
            // The read timed out.
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                self.stream = None;
                self.ledger.hung(call);
            }
            Err(error) => {
                self.stream = None;
                self.ledger.breach(format!("gateway: the connection of call {call} failed: {error}"));
                self.ledger.ended(call);
            }
        }
        Some(call)
    }

    /// Makes a call and closes the connection before an answer can come.
    pub(super) fn vanish(mut self, request: &Request) {
        let Some(call) = self.ledger.sent(PART, request.is_tool()) else { return };
        let message = self.message(request, call);
        self.ledger.ended(call);
        // If it cannot be sent, it was not sent.
        let _ = self.send(&message, request.tool.as_deref());
    }

    /// The request with a number, as a client of this era sends it.
    pub(super) fn message(&self, request: &Request, call: u64) -> Value {
        let mut message = request.message(call);
        if self.session.is_none() {
            message["params"]["_meta"] = json!({
                "io.modelcontextprotocol/protocolVersion": STATELESS_VERSION,
                "io.modelcontextprotocol/clientCapabilities": {},
            });
        }
        message
    }

    fn take(&self, call: u64, request: &Request, reply: &Reply) {
        let messages = reply.messages();
        let answers: Vec<&Value> = messages.iter().filter(|message| message["id"] == call).collect();
        if reply.status == 404 {
            self.ledger.breach(format!("gateway: the session of call {call} is gone"));
        }
        for answer in &answers {
            self.ledger.answered(call, meaning(answer, call, request.is_echo()));
        }
        if answers.is_empty() {
            let text: String = String::from_utf8_lossy(&reply.body).chars().take(200).collect();
            if reply.status == 200 {
                self.ledger.breach(format!("gateway: no answer to call {call} in the response: {text}"));
            }
            self.ledger.answered(call, Answer::Refused(format!("HTTP {}: {text}", reply.status)));
        }
    }

    pub(super) fn post(&mut self, message: &Value, tool: Option<&str>) -> io::Result<Reply> {
        self.send(message, tool)?;
        self.reply()
    }

    fn send(&mut self, message: &Value, tool: Option<&str>) -> io::Result<()> {
        let body = message.to_string();
        let mut head = format!(
            "POST /mcp HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
             authorization: Bearer {KEY}\r\naccept: application/json, text/event-stream\r\ncontent-length: {}\r\n",
            self.address,
            body.len()
        );
        match self.session.as_deref() {
            None => {
                let method = message["method"].as_str().unwrap_or_default();
                head.push_str(&format!("mcp-protocol-version: {STATELESS_VERSION}\r\nmcp-method: {method}\r\n"));
                head.extend(tool.map(|tool| format!("mcp-name: {tool}\r\n")));
            }
            Some("") => head.push_str(&format!("mcp-protocol-version: {VERSION}\r\n")),
            Some(id) => head.push_str(&format!("mcp-protocol-version: {VERSION}\r\nmcp-session-id: {id}\r\n")),
        }
        if self.stream.is_none() {
            let stream = TcpStream::connect(&self.address)?;
            stream.set_nodelay(true)?;
            self.stream = Some(BufReader::new(stream));
        }
        self.hung_at = Instant::now() + HUNG_AFTER;
        let stream = self.stream.as_mut().expect("it was connected").get_mut();
        stream.write_all(format!("{head}\r\n{body}").as_bytes())
    }

    fn reply(&mut self) -> io::Result<Reply> {
        let status = self.line()?;
        let status = status.split(' ').nth(1).and_then(|code| code.parse().ok());
        let status = status.ok_or_else(|| io::Error::other("no status line"))?;
        let mut reply = Reply { status, headers: Vec::new(), body: Vec::new() };
        loop {
            let line = self.line()?;
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').ok_or_else(|| io::Error::other("no header"))?;
            reply.headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        if reply.header("transfer-encoding") == Some("chunked") {
            loop {
                let length = usize::from_str_radix(self.line()?.trim(), 16);
                let length = length.map_err(|_| io::Error::other("no length of a chunk"))?;
                self.body(&mut reply.body, length)?;
                self.line()?;
                if length == 0 {
                    break;
                }
            }
        } else if let Some(length) = reply.header("content-length").and_then(|length| length.parse().ok()) {
            self.body(&mut reply.body, length)?;
        }
        Ok(reply)
    }

    fn body(&mut self, body: &mut Vec<u8>, mut length: usize) -> io::Result<()> {
        let piece_max = if self.pause.is_some() { 16 << 10 } else { usize::MAX };
        while length > 0 {
            let (from, piece) = (body.len(), length.min(piece_max));
            body.resize(from + piece, 0);
            self.reader()?.read_exact(&mut body[from..])?;
            length -= piece;
            if let Some(pause) = self.pause {
                thread::sleep(pause);
            }
        }
        Ok(())
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.reader()?.read_line(&mut line)? == 0 {
            return Err(io::Error::other("closed before the answer was complete"));
        }
        Ok(line.trim_end().to_owned())
    }

    fn reader(&mut self) -> io::Result<&mut BufReader<TcpStream>> {
        let left = self.hung_at.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let stream = self.stream.as_mut().ok_or_else(|| io::Error::other("not connected"))?;
        stream.get_ref().set_read_timeout(Some(left))?;
        Ok(stream)
    }
}
