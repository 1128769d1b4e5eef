//! A front with a scripted machine behind it, and a client that sends exactly the given bytes.

use std::{
    collections::{HashMap, VecDeque},
    future::poll_fn,
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    sync::mpsc::{self, Receiver, Sender},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use bytes::Bytes;
use hyper::{HeaderMap, StatusCode};
use outlast::gateway::{
    listen::{Auth, FrontEvent, Limits, Listen, ListenError, Options, PageAnswer, Unauthorized},
    mirrored::Budget,
};
use outlast_core::{
    gateway::{Said, Who},
    message::{Id, Message, Params, Raw, parse, result_line},
};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use tokio::sync::oneshot;

/// Longer than any step takes on a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What the machine received, as text: `came 1 session local`, `said 1 echo`, `left 1`.
pub(crate) struct Front {
    pub address: SocketAddr,
    heard: Receiver<String>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

pub(crate) fn limits() -> Limits {
    Limits::default()
}

/// Two users with a token each; any other token is refused.
pub(crate) fn two_people() -> Auth {
    Box::new(|headers: &HeaderMap| {
        let token = headers.get("authorization").and_then(|value| value.to_str().ok()).unwrap_or_default();
        let name = match token {
            "Bearer anna" => "anna",
            "Bearer bert" => "bert",
            _ => {
                return Err(Unauthorized { challenge: "Bearer realm=\"outlast\"".into(), why: "who are you?".into() });
            }
        };
        Ok(Who { name: name.into(), role: None, profile: None }.into())
    })
}

/// The credentials of all other users have expired.
pub(crate) fn only_bert() -> Auth {
    let two = two_people();
    Box::new(move |headers: &HeaderMap| {
        let who = two(headers)?;
        let ended = Unauthorized { challenge: "Bearer".into(), why: "not any more".into() };
        if who.who.name == "bert" { Ok(who) } else { Err(ended) }
    })
}

impl Front {
    pub(crate) fn new() -> Front {
        Front::with(limits(), || None)
    }

    /// The authentication is created on the front's own thread.
    pub(crate) fn with(limits: Limits, auth: fn() -> Option<Auth>) -> Front {
        let (heard_by, heard) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let (ready, is_ready) = mpsc::channel();
        let thread = std::thread::Builder::new().spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            tokio::task::LocalSet::new().block_on(&runtime, async move {
                let options = Options {
                    address: ([127, 0, 0, 1], 0).into(),
                    hosts: vec!["gate.example".into()],
                    origins: vec![],
                    auth: auth(),
                    tls: None,
                    profiles: vec!["small".into(), "with space".into()],
                    limits,
                };
                let mut listen = Listen::bind(options).unwrap();
                let tool = br#"{"name":"mirrored","inputSchema":{"properties":{"region":{"type":"string","x-mcp-header":"Region"}}}}"#;
                listen.set_mirrors(Budget::default().mirrors_of(tool).into_iter().collect());
                ready.send(listen.address()).unwrap();
                let (held, waiting, later) = (Vec::new(), HashMap::new(), VecDeque::new());
                Machine { listen, heard_by, held, waiting, later }.run(stopped).await;
            });
        });
        Front { address: is_ready.recv().unwrap(), heard, stop: Some(stop), thread: Some(thread.unwrap()) }
    }

    pub(crate) fn connect(&self) -> Wire {
        Wire::connect(self.address)
    }

    /// A connection from another loopback address, where the system has more than one.
    pub(crate) fn connect_from(&self, last: u8) -> Wire {
        let last = if cfg!(target_os = "linux") { last } else { 1 };
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, last], 0)).into()).unwrap();
        socket.connect(&self.address.into()).unwrap();
        Wire::over(socket.into())
    }

    /// Waits until the machine received this; earlier entries are skipped.
    #[track_caller]
    pub(crate) fn wait_for(&self, start: &str) -> String {
        let until = Instant::now() + PATIENCE;
        let mut others = Vec::new();
        while let Ok(heard) = self.heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
            if heard.starts_with(start) {
                return heard;
            }
            others.push(heard);
        }
        panic!("never heard {start:?}, but {others:?}");
    }

    /// What was received so far and not taken yet.
    pub(crate) fn heard(&self) -> Vec<String> {
        self.heard.try_iter().collect()
    }

    /// An open session and its id.
    pub(crate) fn session(&self, version: &str) -> (Wire, String) {
        self.session_as(version, &[])
    }

    pub(crate) fn session_as(&self, version: &str, headers: &[(&str, &str)]) -> (Wire, String) {
        let mut wire = self.connect();
        let answer = wire.post(headers, &initialize(version));
        assert_eq!(answer.status, 200, "{answer:?}");
        let id = answer.header("mcp-session-id").expect("a session id").to_owned();
        (wire, id)
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        let _ = self.stop.take().map(|stop| stop.send(()));
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.unwrap().expect("the front did not panic");
        }
    }
}

pub(crate) fn initialize(version: &str) -> String {
    json!({"jsonrpc": "2.0", "id": 0, "method": "initialize",
           "params": {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}})
    .to_string()
}

pub(crate) fn request(id: impl Into<Value>, method: &str, params: Value) -> String {
    json!({"jsonrpc": "2.0", "id": id.into(), "method": method, "params": params}).to_string()
}

struct Machine {
    listen: Listen,
    heard_by: Sender<String>,
    /// Requests that wait for a `release`.
    held: Vec<(u64, Id)>,
    /// Requests to the client, and the request that each belongs to.
    waiting: HashMap<Id, (u64, Id)>,
    /// Sent one by one, one in each turn of the loop.
    later: VecDeque<(u64, Bytes, Id)>,
}

impl Machine {
    async fn run(mut self, mut stopped: oneshot::Receiver<()>) {
        loop {
            let heard = tokio::select! {
                heard = poll_fn(|cx| self.listen.poll(cx)) => heard,
                () = tokio::task::yield_now(), if !self.later.is_empty() => {
                    if let Some((client, message, about)) = self.later.pop_front() {
                        self.tell(client, message, Some(&about));
                    }
                    if self.later.is_empty() {
                        let _ = self.heard_by.send("all is told".into());
                    }
                    continue;
                }
                _ = &mut stopped => break,
            };
            let _ = self.heard_by.send(match &heard {
                FrontEvent::Came { client, front, who } => {
                    let profile = who.profile.as_ref().map(|profile| format!(" as {profile}")).unwrap_or_default();
                    format!("came {client} {front:?} {}{profile}", who.name)
                }
                FrontEvent::Said { client, message }
                | FrontEvent::SaidLong { client, message, .. }
                | FrontEvent::Requested { client, message, .. } => {
                    format!("said {client} {}", name_of(message))
                }
                FrontEvent::Left { client } => format!("left {client}"),
                FrontEvent::Page(page) => {
                    format!("page {} {} {} {}", page.method, page.path, page.query, page.who.name)
                }
                // Refusals have a list of their own.
                FrontEvent::Refused(_) | FrontEvent::Allowed { .. } => continue,
                FrontEvent::Restored { client, who, .. } => format!("restored {client} {}", who.name),
                FrontEvent::Note(text) => format!("note {text}"),
            });
            match heard {
                FrontEvent::Restored { .. } | FrontEvent::Note(_) => {}
                FrontEvent::Said { client, message }
                | FrontEvent::SaidLong { client, message, .. }
                | FrontEvent::Requested { client, message, .. } => self.said(client, &message),
                FrontEvent::Page(page) if page.path == "/api/events" => {
                    self.listen.watch(page.ticket);
                    self.listen.publish(Some(page.ticket), "hello", "{}");
                }
                FrontEvent::Page(page) if page.path == "/api/never" => {}
                FrontEvent::Page(page) if page.path == "/api/stateless" => {
                    let body = self.listen.counts().stateless.to_string().into();
                    let answer = PageAnswer { status: StatusCode::OK, kind: "application/json", headers: vec![], body };
                    self.listen.answer_page(page.ticket, answer);
                }
                FrontEvent::Page(page) if page.path == "/api/counts" => {
                    let counts = self.listen.counts();
                    let body = json!([counts.connections, counts.sessions, counts.requests]).to_string().into();
                    let answer = PageAnswer { status: StatusCode::OK, kind: "application/json", headers: vec![], body };
                    self.listen.answer_page(page.ticket, answer);
                }
                FrontEvent::Page(page) => {
                    let body = format!("{} {}", page.path, String::from_utf8_lossy(&page.body));
                    let answer =
                        PageAnswer { status: StatusCode::OK, kind: "text/plain", headers: vec![], body: body.into() };
                    self.listen.answer_page(page.ticket, answer);
                }
                FrontEvent::Left { client } => self.held.retain(|(held, _)| *held != client),
                FrontEvent::Allowed { .. } => {}
                FrontEvent::Came { .. } | FrontEvent::Refused(_) => {}
            }
        }
        self.listen.close();
        // Connections that clients hold open end by themselves.
        poll_fn(|cx| self.listen.poll_over(cx)).await;
    }

    fn tell(&mut self, client: u64, message: Bytes, about: Option<&Id>) {
        let said = match parse(&message) {
            Ok(Message::Response { error: Some(_), .. }) => Said::Error,
            Ok(Message::Response { .. }) => Said::Result,
            _ => Said::Other,
        };
        self.listen.tell(client, message, about.cloned(), said);
    }

    fn said(&mut self, client: u64, message: &Bytes) {
        match parse(message).expect("the front lets nothing through that is not JSON") {
            Message::Request { id, method, params } => self.asked(client, id.parse().unwrap(), &method, &params),
            Message::Response { id, result, .. } => {
                let Some((client, about)) = self.waiting.remove(&id.parse().unwrap()) else { return };
                let line = result_line(&about, result.map_or("null", Raw::get));
                self.tell(client, line, Some(&about));
            }
            Message::Notification { method, .. } if method == "release" => {
                for (client, id) in std::mem::take(&mut self.held) {
                    self.tell(client, result_line(&id, "\"released\""), Some(&id));
                }
            }
            Message::Notification { method, .. } if method == "only bert stays" => {
                self.listen.set_auth(Some(only_bert())).unwrap();
            }
            Message::Notification { method, .. } if method == "drop me" => self.listen.drop_client(client),
            _ => {}
        }
    }

    fn asked(&mut self, client: u64, id: Id, method: &str, params: &Params<'_>) {
        let note = |text: &str| -> Bytes {
            json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": text}}).to_string().into()
        };
        let arguments = params.arguments().map_or("null", Raw::get);
        let answer = match method {
            "initialize" => {
                let version = params.protocol_version().and_then(Raw::text).unwrap_or_default();
                if version == "refuse" {
                    let line = outlast_core::message::error_line(&id.to_string(), -32602, "no such version", None);
                    return self.tell(client, line, Some(&id));
                }
                json!({"protocolVersion": version, "capabilities": {}}).to_string()
            }
            "echo" | "tools/call" | "tools/list" => arguments.to_owned(),
            // Held until a `release`.
            "hold" | "subscriptions/listen" => {
                self.held.push((client, id.clone()));
                if method == "subscriptions/listen" {
                    self.tell(client, note("acknowledged"), Some(&id));
                }
                return;
            }
            "hold after a word" => {
                self.tell(client, note("first"), Some(&id));
                self.held.push((client, id));
                return;
            }
            // That many messages of that many bytes, then the answer.
            "words" => {
                let [count, size] = serde_json::from_str(arguments).unwrap();
                let words = (0..count).map(|number| note(&format!("{number} {}", "x".repeat(size))));
                let all = words.chain([result_line(&id, &count.to_string())]);
                self.later.extend(all.map(|line| (client, line, id.clone())));
                return;
            }
            "say to all" => {
                self.tell(client, note(arguments), None);
                "null".into()
            }
            "ask back" => {
                let ours = Id::text(&format!("ours {id}"));
                let line = json!({"jsonrpc": "2.0", "id": format!("ours {id}"), "method": "ping"}).to_string();
                self.tell(client, line.into(), Some(&id));
                self.waiting.insert(ours, (client, id));
                return;
            }
            "fail" => {
                let code = arguments.parse().unwrap();
                let line = outlast_core::message::error_line(&id.to_string(), code, "as told", None);
                return self.tell(client, line, Some(&id));
            }
            "big" => format!("\"{}\"", "x".repeat(arguments.parse().unwrap())),
            other => panic!("the test asked for {other}"),
        };
        self.tell(client, result_line(&id, &answer), Some(&id));
    }
}

fn name_of(message: &[u8]) -> String {
    match parse(message) {
        Ok(Message::Request { method, .. } | Message::Notification { method, .. }) => method.into_owned(),
        Ok(Message::Response { id, .. }) => format!("response {}", id.parse().unwrap()),
        other => format!("{other:?}"),
    }
}

/// One connection, byte by byte.
pub(crate) struct Wire {
    pub tcp: TcpStream,
    buffer: Vec<u8>,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    pub(crate) fn code(&self) -> Option<i64> {
        self.json()["error"]["code"].as_i64()
    }
}

impl Wire {
    pub(crate) fn connect(address: SocketAddr) -> Wire {
        Wire::over(TcpStream::connect(address).unwrap())
    }

    fn over(tcp: TcpStream) -> Wire {
        tcp.set_read_timeout(Some(PATIENCE)).unwrap();
        tcp.set_nodelay(true).unwrap();
        Wire { tcp, buffer: Vec::new() }
    }

    pub(crate) fn send(&mut self, text: &str) {
        self.tcp.write_all(text.as_bytes()).unwrap();
    }

    /// A POST to the endpoint; given headers replace the usual ones, and an empty one removes it.
    pub(crate) fn send_post(&mut self, headers: &[(&str, &str)], body: &str) {
        self.send_post_to("/mcp", headers, body);
    }

    pub(crate) fn send_post_to(&mut self, path: &str, headers: &[(&str, &str)], body: &str) {
        let mut all = vec![
            ("host", "127.0.0.1"),
            ("content-type", "application/json"),
            ("accept", "application/json, text/event-stream"),
        ];
        all.retain(|(name, _)| headers.iter().all(|(other, _)| other != name));
        all.extend(headers.iter().filter(|(_, value)| !value.is_empty()));
        let length = body.len().to_string();
        all.push(("content-length", &length));
        self.send_head(&format!("POST {path}"), &all);
        self.send(body);
    }

    pub(crate) fn post_to(&mut self, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        self.send_post_to(path, headers, body);
        self.answer()
    }

    pub(crate) fn send_head(&mut self, start: &str, headers: &[(&str, &str)]) {
        let mut head = format!("{start} HTTP/1.1\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        self.send(&format!("{head}\r\n"));
    }

    pub(crate) fn post(&mut self, headers: &[(&str, &str)], body: &str) -> Answer {
        self.send_post(headers, body);
        self.answer()
    }

    /// Any other request, without a body.
    pub(crate) fn ask(&mut self, start: &str, headers: &[(&str, &str)]) -> Answer {
        let mut all = vec![("host", "127.0.0.1")];
        all.retain(|(name, _)| headers.iter().all(|(other, _)| other != name));
        all.extend(headers);
        self.send_head(start, &all);
        if start.starts_with("HEAD ") { self.head() } else { self.answer() }
    }

    /// The head of a response that is a stream.
    pub(crate) fn head(&mut self) -> Answer {
        let end = loop {
            if let Some(at) = self.buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                break at;
            }
            assert!(self.fill(), "closed within a head: {:?}", String::from_utf8_lossy(&self.buffer));
        };
        let head = String::from_utf8(self.buffer[..end].to_vec()).unwrap();
        self.buffer.drain(..end + 4);
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines.map(|line| line.split_once(": ").unwrap());
        let headers = headers.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect();
        Answer { status, headers, body: String::new() }
    }

    /// A whole answer.
    pub(crate) fn answer(&mut self) -> Answer {
        let mut answer = self.head();
        match answer.header("content-length").map(|length| length.parse::<usize>().unwrap()) {
            Some(length) => {
                while self.buffer.len() < length {
                    assert!(self.fill(), "closed within a body");
                }
                answer.body = String::from_utf8(self.buffer.drain(..length).collect()).unwrap();
            }
            None if answer.header("transfer-encoding") == Some("chunked") => {
                while let Some(chunk) = self.chunk() {
                    answer.body.push_str(&chunk);
                }
            }
            None => {}
        }
        answer
    }

    /// The next chunk of a stream; `None` at its end.
    pub(crate) fn chunk(&mut self) -> Option<String> {
        let at = loop {
            if let Some(at) = self.buffer.windows(2).position(|window| window == b"\r\n") {
                break at;
            }
            if !self.fill() {
                return None;
            }
        };
        let size = usize::from_str_radix(std::str::from_utf8(&self.buffer[..at]).unwrap(), 16).unwrap();
        while self.buffer.len() < at + 2 + size + 2 {
            if !self.fill() {
                return None;
            }
        }
        let chunk = String::from_utf8(self.buffer[at + 2..at + 2 + size].to_vec()).unwrap();
        self.buffer.drain(..at + 2 + size + 2);
        (size > 0).then_some(chunk)
    }

    /// The next event with data, and its id; pings are skipped. `None` at the end of the stream.
    pub(crate) fn event(&mut self) -> Option<(String, Value)> {
        loop {
            let chunk = self.chunk()?;
            let field = |name: &str| chunk.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
            let id = field("id:").unwrap_or_default().to_owned();
            match field("data:") {
                Some("") => return Some((id, Value::Null)),
                Some(data) => return Some((id, serde_json::from_str(data).unwrap())),
                None => assert!(chunk.starts_with(':'), "{chunk:?}"),
            }
        }
    }

    /// Whether the other side has closed, after everything it sent was read.
    /// Whether it is closed by now. What was received is discarded.
    pub(crate) fn is_closed_now(&mut self) -> bool {
        self.tcp.set_nonblocking(true).unwrap();
        let mut bytes = [0; 1024];
        loop {
            match self.tcp.read(&mut bytes) {
                Ok(1..) => {}
                Ok(0) => return true,
                Err(error) => return error.kind() != ErrorKind::WouldBlock,
            }
        }
    }

    pub(crate) fn try_send(&mut self, text: &str) {
        let _ = self.tcp.write_all(text.as_bytes());
    }

    pub(crate) fn is_closed(&mut self) -> bool {
        while self.fill() {}
        true
    }

    /// Reads the rest, and returns its length in bytes.
    pub(crate) fn read_to_end(&mut self) -> usize {
        while self.fill() {}
        self.buffer.len()
    }

    pub(crate) fn half_close(&mut self) {
        self.tcp.shutdown(Shutdown::Write).unwrap();
    }

    /// False at the end. A timeout fails the test.
    fn fill(&mut self) -> bool {
        let mut piece = [0; 16 << 10];
        match self.tcp.read(&mut piece) {
            Ok(count) => {
                self.buffer.extend_from_slice(&piece[..count]);
                count > 0
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset => false,
            Err(error) => panic!("nothing came: {error}; so far {:?}", String::from_utf8_lossy(&self.buffer)),
        }
    }
}

#[test]
fn a_public_address_needs_authentication() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _inside = runtime.enter();
    let options = |auth| Options {
        address: ([0, 0, 0, 0], 0).into(),
        hosts: vec![],
        origins: vec![],
        auth,
        tls: None,
        profiles: vec![],
        limits: limits(),
    };
    let Err(error) = Listen::bind(options(None)) else { panic!("it listens") };
    assert!(matches!(error, ListenError::Unguarded { .. }));
    assert_eq!(error.to_string(), "refusing to listen on 0.0.0.0:0 without authentication");
    assert_eq!(error.hint().as_deref(), Some("configure authentication (`[auth]`), or listen on 127.0.0.1:0"));
    let mut listen = Listen::bind(options(Some(two_people()))).unwrap();
    assert!(matches!(listen.set_auth(None), Err(ListenError::Unguarded { .. })));
    assert!(listen.set_auth(Some(two_people())).is_ok());
}

/// Other systems have only one loopback address.
#[cfg(target_os = "linux")]
#[test]
fn a_listener_moves_completely_or_not_at_all() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _inside = runtime.enter();
    let options = |address: SocketAddr, auth| Options {
        address,
        hosts: vec![],
        origins: vec![],
        auth,
        tls: None,
        profiles: vec![],
        limits: limits(),
    };
    let is_open = |address: SocketAddr| TcpStream::connect(address).is_ok();
    let mut listen = Listen::bind(options(([127, 0, 0, 1], 0).into(), None)).unwrap();
    let first = listen.address();
    assert!(!listen.configure(options(([127, 0, 0, 1], 0).into(), None)).unwrap(), "nothing is new");
    assert_eq!(listen.address(), first);

    // Its own port at all addresses, and back: it does not collide with itself.
    let everywhere = SocketAddr::from(([0, 0, 0, 0], first.port()));
    let refused = listen.configure(options(everywhere, None));
    assert!(matches!(refused, Err(ListenError::Unguarded { .. })));
    assert!(listen.configure(options(everywhere, Some(two_people()))).unwrap());
    assert_eq!(listen.address(), everywhere);
    assert!(listen.configure(options(first, None)).unwrap());
    assert!(is_open(first));

    // Another process has the port at another address.
    let other = std::net::TcpListener::bind(("127.0.0.2", first.port())).unwrap();
    let refused = listen.configure(options(everywhere, Some(two_people())));
    assert!(matches!(refused, Err(ListenError::Os { .. })));
    assert_eq!(listen.address(), first);
    assert!(is_open(first), "it listens where it did");
    let refused = listen.configure(options(other.local_addr().unwrap(), None));
    assert!(matches!(refused, Err(ListenError::Os { .. })));
    assert!(is_open(first));
}

#[test]
fn a_port_in_use_is_reported() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _inside = runtime.enter();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let options =
        Options { address, hosts: vec![], origins: vec![], auth: None, tls: None, profiles: vec![], limits: limits() };
    let Err(error) = Listen::bind(options) else { panic!("it listens") };
    assert_eq!(error.to_string(), format!("cannot listen on {address}"));
    assert!(error.hint().unwrap().contains("another port"), "{:?}", error.hint());
}
