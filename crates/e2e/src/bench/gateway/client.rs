//! A blocking MCP client over HTTP: one connection, one session, one write per call.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use memchr::memmem;
use serde_json::Value;

/// No answer of a working subject takes this long.
const ANSWER_MAX: Duration = Duration::from_secs(20);

pub(in crate::bench) struct Session {
    stream: TcpStream,
    address: String,
    id: Option<String>,
    buffer: Vec<u8>,
    next: u64,
    echo_tool: String,
}

impl Session {
    /// A session that is initialised, and has answered one echo call.
    pub(in crate::bench) fn open(address: &str) -> io::Result<Session> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        let mut session = Session {
            stream,
            address: address.into(),
            id: None,
            buffer: Vec::new(),
            next: 1,
            echo_tool: "echo".into(),
        };
        let params =
            r#"{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"bench","version":"1"}}"#;
        let opened = session.ask("initialize", params)?;
        if !opened.contains("protocolVersion") {
            return Err(io::Error::other(format!("answered initialize with {opened}")));
        }
        session.post(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#)?;
        session.hear()?;
        let tools = session.ask("tools/list", "{}")?;
        let tools: Value = serde_json::from_str(&tools)?;
        let mut names =
            tools["result"]["tools"].as_array().into_iter().flatten().filter_map(|tool| tool["name"].as_str());
        // Gateways put the name of the server before the name of the tool.
        let name = names.find(|name| name.ends_with("echo")).ok_or_else(|| io::Error::other("lists no tool `echo`"))?;
        session.echo_tool = name.to_owned();
        session.send_call()?;
        let answer = session.hear()?;
        if is_failed(&answer) || !answer.contains("xxxx") {
            return Err(io::Error::other(format!("echoed {answer}")));
        }
        Ok(session)
    }

    /// The tool that [`Session::call`] calls.
    pub(in crate::bench) fn choose_tool(&mut self, tool: &str) {
        tool.clone_into(&mut self.echo_tool);
    }

    /// The same session over another connection.
    pub(in crate::bench) fn reconnect(&mut self, address: &str) -> io::Result<()> {
        self.stream = TcpStream::connect(address)?;
        self.stream.set_nodelay(true)?;
        self.stream.set_read_timeout(Some(ANSWER_MAX))?;
        self.buffer.clear();
        address.clone_into(&mut self.address);
        Ok(())
    }

    fn ask(&mut self, method: &str, params: &str) -> io::Result<String> {
        let id = self.next;
        self.next += 1;
        self.post(&format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{params}}}"#))?;
        self.hear()
    }

    pub(in crate::bench) fn subscribe(&mut self, uri: &str) -> io::Result<()> {
        self.ask("resources/subscribe", &format!(r#"{{"uri":"{uri}"}}"#)).map(drop)
    }

    /// About a hundred bytes of arguments.
    pub(in crate::bench) fn send_call(&mut self) -> io::Result<()> {
        let (id, tool, text) = (self.next, &self.echo_tool, "x".repeat(90));
        self.next += 1;
        let params = format!(r#"{{"name":"{tool}","arguments":{{"text":"{text}"}}}}"#);
        self.post(&format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{params}}}"#))
    }

    /// Calls any tool, with arguments as JSON. False if the answer is a failure.
    pub(in crate::bench) fn call_tool(&mut self, tool: &str, arguments: &str) -> io::Result<bool> {
        self.ask("tools/call", &format!(r#"{{"name":"{tool}","arguments":{arguments}}}"#))
            .map(|answer| !is_failed(&answer))
    }

    /// Calls the echo tool. False if the answer is a failure.
    pub(in crate::bench) fn call(&mut self) -> io::Result<bool> {
        self.send_call()?;
        self.hear_call()
    }

    /// Reads the answer to a call that was sent before. False if it is a failure.
    pub(in crate::bench) fn hear_call(&mut self) -> io::Result<bool> {
        self.hear().map(|answer| !is_failed(&answer))
    }

    fn post(&mut self, body: &str) -> io::Result<()> {
        let session = match &self.id {
            Some(id) => format!("mcp-session-id: {id}\r\nmcp-protocol-version: 2025-11-25\r\n"),
            None => String::new(),
        };
        let text = format!(
            "POST /mcp HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\naccept: application/json, text/event-stream\r\n{session}content-length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        );
        self.stream.write_all(text.as_bytes())
    }

    /// The whole next answer: its JSON, out of its body or event stream.
    fn hear(&mut self) -> io::Result<String> {
        loop {
            if let Some((answer, length)) = self.parse()? {
                self.buffer.drain(..length);
                return Ok(answer);
            }
            let mut chunk = [0; 16 << 10];
            let read = self.stream.read(&mut chunk)?;
            if read == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed the connection"));
            }
            self.buffer.extend_from_slice(&chunk[..read]);
        }
    }

    /// The answer at the start of the buffer and its length, if it is complete.
    fn parse(&mut self) -> io::Result<Option<(String, usize)>> {
        let Some(head) = memmem::find(&self.buffer, b"\r\n\r\n") else { return Ok(None) };
        let text = String::from_utf8_lossy(&self.buffer[..head]).to_ascii_lowercase();
        let header = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .map(|value| value.trim().to_owned())
        };
        let rest = &self.buffer[head + 4..];
        let (body, length) = if header("transfer-encoding").is_some_and(|value| value.contains("chunked")) {
            match unchunk(rest) {
                Some(found) => found,
                None => return Ok(None),
            }
        } else {
            let length: usize = header("content-length").and_then(|value| value.parse().ok()).unwrap_or(0);
            if rest.len() < length {
                return Ok(None);
            }
            (rest[..length].to_vec(), length)
        };
        if let Some(id) = header("mcp-session-id") {
            // Header names are case-insensitive, ids are not.
            let original = String::from_utf8_lossy(&self.buffer[..head]);
            let at = text.find(&id).expect("it was found in it");
            self.id = Some(original[at..at + id.len()].to_owned());
        }
        let body = String::from_utf8(body).map_err(io::Error::other)?;
        let is_events = header("content-type").is_some_and(|value| value.starts_with("text/event-stream"));
        let answer = if is_events { last_answer(&body) } else { body };
        Ok(Some((answer, head + 4 + length)))
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// The body without its chunk framing, and its length with it; none if it is not complete.
fn unchunk(mut rest: &[u8]) -> Option<(Vec<u8>, usize)> {
    let (whole, mut body) = (rest.len(), Vec::new());
    loop {
        let line = memmem::find(rest, b"\r\n")?;
        let size = std::str::from_utf8(&rest[..line]).ok()?.split(';').next()?.trim();
        let size = usize::from_str_radix(size, 16).ok()?;
        rest = &rest[line + 2..];
        if rest.len() < size + 2 {
            return None;
        }
        body.extend_from_slice(&rest[..size]);
        rest = &rest[size + 2..];
        if size == 0 {
            return Some((body, whole - rest.len()));
        }
    }
}

/// The last event of a stream, which answers the call.
fn last_answer(events: &str) -> String {
    let mut data = events.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim);
    data.rfind(|text| text.contains("\"id\":")).unwrap_or_default().to_owned()
}

/// The CPU time of the longest turn of the gateway's loop since the last call, or since its start.
pub(super) fn longest_turn(address: &str) -> io::Result<Duration> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(ANSWER_MAX))?;
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let value = answer.lines().find_map(|line| line.strip_prefix("outlast_loop_turn_cpu_seconds_max "));
    let seconds = value.and_then(|value| value.trim().parse().ok());
    seconds.map(Duration::from_secs_f64).ok_or_else(|| io::Error::other(format!("answered {answer}")))
}

/// Asks about a session that does not exist, until the gateway answers.
pub(super) fn is_missing(address: &str) -> io::Result<()> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(ANSWER_MAX))?;
    let id = "0".repeat(32);
    write!(stream, "DELETE /mcp HTTP/1.1\r\nhost: {address}\r\nmcp-session-id: {id}\r\nconnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    match answer.starts_with("HTTP/1.1 404") {
        true => Ok(()),
        false => Err(io::Error::other(format!("answered {answer}"))),
    }
}

fn is_failed(answer: &str) -> bool {
    !answer.contains("\"result\"") || answer.contains("\"isError\":true")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunked_body_ends_where_it_says() {
        assert_eq!(unchunk(b"3\r\nabc\r\n2;x\r\nde\r\n0\r\n\r\nmore"), Some((b"abcde".to_vec(), 22)));
        assert_eq!(unchunk(b"3\r\nabc\r\n0\r\n"), None);
        assert_eq!(unchunk(b"3\r\nab"), None);
    }

    #[test]
    fn the_answer_is_found_among_events() {
        let events = "event: message\ndata: {\"method\":\"n\"}\n\nid: 1\ndata: {\"id\":7,\"result\":{}}\n\n";
        assert_eq!(last_answer(events), "{\"id\":7,\"result\":{}}");
        assert!(!is_failed(&last_answer(events)) && is_failed("{\"error\":{}}"));
    }
}
