//! Target `http`: raw bytes and well-formed requests of two users on connections to the real HTTP front.
//!
//! Each line of a script is one step (see [`World::play`]). Every response must be well-formed, and messages for a
//! client of one user never appear on a connection without that user's token. Time does not pass within a script.

use std::{
    collections::{BTreeMap, HashMap},
    future::poll_fn,
    io::Read,
    net::{Shutdown, TcpStream},
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use hyper::{HeaderMap, StatusCode};
use memchr::memmem;
use outlast::gateway::{
    listen::{Auth, FrontEvent, Limits, Listen, Options, PageAnswer, Unauthorized},
    mirrored::Budget,
};
use outlast_core::{
    gateway::{Front, Said, Who},
    message::{Id, Message, error_line, parse, result_line},
};
use socket2::SockRef;
use tokio::{runtime::Runtime, task::LocalSet};

use crate::{
    connection::{Connection, WRITES_MAX},
    json, script,
};

const CONNECTIONS_MAX: usize = 6;
/// Turns of the front without input, after which it is idle.
const IDLE_TURNS: usize = 4;
/// A tag before the number of the client in every message to it.
const TAG: &str = "Zq9#";
const PEOPLE: [&str; 2] = ["anna", "bert"];
/// The limit for bodies here, small enough that a script can reach it.
const BODY_MAX: usize = 64 << 10;

pub fn run(input: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut world = World::new(runtime);
    for line in script::lines(input) {
        world.play(line);
    }
    world.finish();
}

fn auth() -> Auth {
    Box::new(|headers: &HeaderMap| {
        let token = headers.get("authorization").and_then(|value| value.to_str().ok()).unwrap_or_default();
        let name = token.strip_prefix("Bearer ").filter(|name| PEOPLE.contains(name));
        let refused = || Unauthorized { challenge: "Bearer realm=\"outlast\"".into(), why: "no such token".into() };
        Ok(Who { name: name.ok_or_else(refused)?.into(), role: None, profile: None }.into())
    })
}

/// A client as the front reported it.
struct Client {
    who: String,
    front: Front,
    held: Vec<Id>,
}

struct World {
    runtime: Runtime,
    tasks: LocalSet,
    listen: Listen,
    connections: Vec<Connection<TcpStream>>,
    clients: BTreeMap<u64, Client>,
    /// Includes clients that have disconnected.
    owners: HashMap<u64, String>,
}

impl World {
    fn new(runtime: Runtime) -> World {
        let inside = runtime.enter();
        let limits = Limits {
            body_max: BODY_MAX,
            bodies_max: 4 * BODY_MAX,
            sessions_max: 8,
            sessions_of_client_max: 4,
            stream_bytes_max: 32 << 10,
            events_max: 8,
            events_bytes_max: 4 << 10,
            events_total_max: 16 << 10,
            quiet: Duration::ZERO,
            ..Limits::default()
        };
        let mut listen = Listen::bind(Options {
            address: ([127, 0, 0, 1], 0).into(),
            hosts: vec!["gate.example".into()],
            origins: vec![],
            auth: Some(auth()),
            tls: None,
            profiles: vec!["small".into()],
            limits,
        })
        .expect("a free port of loopback");
        let tool =
            br#"{"name":"mirrored","inputSchema":{"properties":{"region":{"type":"string","x-mcp-header":"Region"}}}}"#;
        listen.set_mirrors(Budget::default().mirrors_of(tool).into_iter().collect());
        drop(inside);
        World {
            runtime,
            tasks: LocalSet::new(),
            listen,
            connections: Vec::new(),
            clients: BTreeMap::new(),
            owners: HashMap::new(),
        }
    }

    /// One line of the script: a kind, the digit of a connection, and the rest.
    fn play(&mut self, line: &[u8]) {
        let (kind, rest) = script::split(line);
        let digit = usize::from(rest.first().copied().unwrap_or(b'0').wrapping_sub(b'0'));
        let text = rest.get(1..).unwrap_or_default();
        match kind {
            b'+' => self.connect(),
            b'h' => {
                if let Some(connection) = self.connection(digit) {
                    let _ = connection.stream.shutdown(Shutdown::Write);
                    connection.is_half_closed = true;
                }
            }
            b'-' if !self.connections.is_empty() => {
                let at = digit % self.connections.len();
                self.connections.remove(at).check(&self.owners);
            }
            // Raw bytes, or bytes with a line end of HTTP.
            b'b' => self.send(digit, text),
            b'l' => self.send(digit, &[text, b"\r\n"].concat()),
            // A request of a user, with a session and a body: `P0as{"jsonrpc":…}`. See `request`.
            b'P' => self.request(digit, "POST", text, b""),
            b'G' => self.request(digit, "GET", text, b""),
            b'D' => self.request(digit, "DELETE", text, b""),
            // A stream is resumed after an event: `R0as2-4294967297-n5`.
            b'R' => {
                let (head, last) = text.split_at(text.len().min(2));
                self.request(digit, "GET", head, last);
            }
            // The machine behind the front answers held requests, sends to all, or drops a client.
            b'w' => self.release(),
            b'n' => {
                for client in self.clients.keys().copied().collect::<Vec<u64>>() {
                    let line = format!(
                        r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"data":"{TAG}{client}#"}}}}"#
                    );
                    self.tell(client, line, None, Said::Other);
                }
            }
            b'k' => {
                if let Some((client, _)) = self.clients.pop_first() {
                    self.listen.drop_client(client);
                }
            }
            _ => {}
        }
        self.turn();
    }

    fn connection(&mut self, digit: usize) -> Option<&mut Connection<TcpStream>> {
        let count = self.connections.len();
        if count == 0 { None } else { self.connections.get_mut(digit % count) }
    }

    fn connect(&mut self) {
        if self.connections.len() >= CONNECTIONS_MAX {
            return;
        }
        let stream = TcpStream::connect(self.listen.address()).expect("the front listens");
        // Closed by a reset: thousands of scripts leave no connection in TIME_WAIT.
        let _ = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
        let _ = stream.set_nodelay(true);
        stream.set_nonblocking(true).expect("a socket");
        self.connections.push(Connection::new(stream));
    }

    /// `who` is `a`, `b` or neither; `session` is `s` (the user's own), `t` (the other user's), `m` (none, of the
    /// stateless era) or neither.
    fn request(&mut self, digit: usize, method: &str, text: &[u8], last_event: &[u8]) {
        let (who, session) = (text.first().copied().unwrap_or(0), text.get(1).copied().unwrap_or(0));
        let body = text.get(2..).unwrap_or_default();
        let mut head = format!(
            "{method} /mcp HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/json, text/event-stream\r\ncontent-type: application/json\r\n"
        );
        let person = match who {
            b'a' => Some(0),
            b'b' => Some(1),
            _ => None,
        };
        if let Some(person) = person {
            head.push_str(&format!("authorization: Bearer {}\r\n", PEOPLE[person]));
        }
        let id = match (session, person) {
            (b's', Some(person)) => self.session_of(person),
            (b't', Some(person)) => self.session_of(1 - person),
            (b's' | b't', None) => self.session_of(0),
            _ => None,
        };
        if let Some(id) = id {
            head.push_str(&format!("mcp-session-id: {id}\r\n"));
        }
        if session == b'm' {
            head.push_str("mcp-protocol-version: 2026-07-28\r\n");
            if let Ok(Message::Request { method, params, .. }) = parse(body)
                && method.bytes().all(|byte| byte.is_ascii_graphic())
            {
                head.push_str(&format!("mcp-method: {method}\r\n"));
                let name = params.name().and_then(|name| name.text()).unwrap_or_default();
                if name.bytes().all(|byte| byte.is_ascii_graphic()) && !name.is_empty() {
                    head.push_str(&format!("mcp-name: {name}\r\n"));
                }
            }
        }
        if let Some(last) = std::str::from_utf8(last_event).ok().filter(|last| !last.is_empty() && !last.contains('\r'))
        {
            head.push_str(&format!("last-event-id: {last}\r\n"));
        }
        if method == "POST" {
            head.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        self.send(digit, &[head.as_bytes(), b"\r\n", body].concat());
    }

    fn send(&mut self, digit: usize, bytes: &[u8]) {
        let mut rest = bytes;
        for _ in 0..WRITES_MAX {
            let Some(left) = self.connection(digit).and_then(|connection| connection.write(rest)) else { return };
            rest = left;
            self.turn();
        }
    }

    /// Runs the front until it is idle, and the machine behind it answers.
    fn turn(&mut self) {
        let mut idle = 0;
        while idle < IDLE_TURNS {
            let listen = &mut self.listen;
            let heard = self.runtime.block_on(self.tasks.run_until(async {
                for _ in 0..4 {
                    tokio::task::yield_now().await;
                }
                poll_fn(|cx| Poll::Ready(listen.poll(cx))).await
            }));
            idle += 1;
            if let Poll::Ready(heard) = heard {
                self.hear(heard);
                idle = 0;
            }
            for connection in &mut self.connections {
                let mut piece = [0; 16 << 10];
                while let Ok(count @ 1..) = connection.stream.read(&mut piece) {
                    connection.received.extend_from_slice(&piece[..count]);
                    idle = 0;
                }
            }
        }
    }

    /// The last session id that a user was given, from connections without the other user's token.
    fn session_of(&self, person: usize) -> Option<String> {
        let shown = |connection: &Connection<TcpStream>, name: &str| {
            contains(&connection.sent, format!("Bearer {name}").as_bytes())
        };
        let own = self
            .connections
            .iter()
            .rev()
            .filter(|connection| shown(connection, PEOPLE[person]) && !shown(connection, PEOPLE[1 - person]));
        own.filter_map(|connection| last_session(&connection.received)).next()
    }

    // ---- the machine behind the front -----------------------------------------------------------

    fn hear(&mut self, heard: FrontEvent) {
        match heard {
            FrontEvent::Came { client, front, who } => {
                assert!(PEOPLE.contains(&who.name.as_str()), "a client without a token was accepted: {who:?}");
                assert!(self.owners.insert(client, who.name.clone()).is_none(), "client {client} came twice");
                self.clients.insert(client, Client { who: who.name, front, held: Vec::new() });
            }
            FrontEvent::Said { client, message } => self.said(client, &message),
            FrontEvent::Requested { client, message, outline } => {
                assert!(outline.read(&message).is_some(), "the outline is not of its message: {message:?}");
                self.said(client, &message);
            }
            FrontEvent::SaidLong { client, message, walk } => {
                assert!(walk.read(&message).is_ok(), "the walk is not of its message");
                self.said(client, &message);
            }
            FrontEvent::Left { client } => {
                assert!(self.clients.remove(&client).is_some(), "client {client} left twice")
            }
            FrontEvent::Page(page) => {
                assert!(PEOPLE.contains(&page.who.name.as_str()), "a page for a client without a token");
                let body: Bytes = format!("{:?}", page.path).into();
                let answer = PageAnswer { status: StatusCode::OK, kind: "text/plain", headers: vec![], body };
                self.listen.answer_page(page.ticket, answer);
            }
            // The front has no store.
            FrontEvent::Restored { .. } | FrontEvent::Note(_) => panic!("{heard:?}"),
            FrontEvent::Allowed { .. } | FrontEvent::Refused(_) => {}
        }
    }

    fn said(&mut self, client: u64, message: &Bytes) {
        assert!(json::read(message).is_some(), "the front let something through that is not JSON: {message:?}");
        let known = self.clients.get_mut(&client).unwrap_or_else(|| panic!("client {client} is not there"));
        let Ok(message) = parse(message) else { panic!("the front let through what cannot be read: {message:?}") };
        let Message::Request { id, method, .. } = message else {
            assert!(known.front != Front::Request || !matches!(message, Message::Batch(_)), "a batch of one request");
            return;
        };
        let Some(id) = id.parse() else {
            let line = error_line("null", -32600, "an id must be a string or a whole number", None);
            return self.listen.tell(client, line, None, Said::Error);
        };
        match &*method {
            "hold" | "subscriptions/listen" => known.held.push(id),
            "fail" => {
                let line = error_line(&id.to_string(), -32601, "no such method", None);
                self.listen.tell(client, line, Some(id), Said::Error);
            }
            "words" => {
                for _ in 0..20 {
                    let text = "w".repeat(1_000);
                    let line = format!(
                        r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"data":"{TAG}{client}#{text}"}}}}"#
                    );
                    self.tell(client, line, Some(&id), Said::Other);
                }
                self.answer(client, &id);
            }
            _ => self.answer(client, &id),
        }
    }

    fn answer(&mut self, client: u64, id: &Id) {
        let line = result_line(id, &format!(r#"{{"protocolVersion":"2025-11-25","tag":"{TAG}{client}#"}}"#));
        self.listen.tell(client, line, Some(id.clone()), Said::Result);
    }

    fn tell(&mut self, client: u64, line: String, about: Option<&Id>, said: Said) {
        self.listen.tell(client, (line + "\n").into(), about.cloned(), said);
    }

    fn release(&mut self) {
        let held: Vec<(u64, Vec<Id>)> =
            self.clients.iter_mut().map(|(client, known)| (*client, std::mem::take(&mut known.held))).collect();
        for (client, ids) in held {
            ids.iter().for_each(|id| self.answer(client, id));
        }
    }

    fn finish(mut self) {
        self.release();
        self.turn();
        let counts = self.listen.counts();
        assert!(counts.connections <= self.connections.len(), "connections are kept that are gone");
        let sessions = self.clients.values().filter(|client| client.front == Front::Session);
        let mut of_person: HashMap<&str, usize> = HashMap::new();
        sessions.for_each(|client| *of_person.entry(&client.who).or_default() += 1);
        assert!(of_person.values().all(|count| *count <= 4), "too many sessions of one person");
        for connection in std::mem::take(&mut self.connections) {
            connection.check(&self.owners);
        }
        self.listen.close();
    }
}

impl Connection<TcpStream> {
    /// All received bytes are responses of HTTP/1.1, and all of them are for a user whose token was sent on this
    /// connection.
    fn check(&self, owners: &HashMap<u64, String>) {
        let text = String::from_utf8_lossy(&self.received);
        for (at, _) in text.match_indices(TAG) {
            let client = script::number(&text.as_bytes()[at + TAG.len()..]);
            let owner = owners.get(&client).map_or("", String::as_str);
            let is_shown = contains(&self.sent, format!("Bearer {owner}").as_bytes());
            assert!(!owner.is_empty() && is_shown, "what is of {owner:?} was told to another: {text}");
        }
        let asked = count(&self.sent, b"HTTP/1");
        let mut rest = &self.received[..];
        let mut responses = 0;
        while !rest.is_empty() {
            // `100 Continue` comes before the response.
            responses += usize::from(!rest.starts_with(b"HTTP/1.1 100"));
            assert!(responses <= asked + 1, "{responses} responses to {asked} requests: {text}");
            match response(rest, contains(&self.sent, b"HEAD ")) {
                Some(next) => rest = next,
                // The stream is not complete yet.
                None => break,
            }
        }
    }
}

/// Reads one response; returns the bytes after it, or nothing if it is not complete.
fn response(bytes: &[u8], may_lack_body: bool) -> Option<&[u8]> {
    let Some(end) = memmem::find(bytes, b"\r\n\r\n") else {
        assert!(b"HTTP/1.1 ".starts_with(&bytes[..bytes.len().min(9)]) || bytes.starts_with(b"HTTP/1."), "no head");
        return None;
    };
    let head = std::str::from_utf8(&bytes[..end]).expect("a head is text");
    let mut lines = head.split("\r\n");
    let status =
        lines.next().and_then(|line| line.strip_prefix("HTTP/1.1 ").or_else(|| line.strip_prefix("HTTP/1.0 ")));
    let status: u16 =
        status.and_then(|rest| rest.get(..3)?.parse().ok()).unwrap_or_else(|| panic!("no status: {head}"));
    let headers: Vec<(String, &str)> = lines
        .map(|line| {
            let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("no header: {line:?} in {head}"));
            (name.to_ascii_lowercase(), value.trim())
        })
        .collect();
    let all =
        |name: &str| headers.iter().filter(|(known, _)| known == name).map(|(_, value)| *value).collect::<Vec<_>>();
    let (lengths, codings, kinds) = (all("content-length"), all("transfer-encoding"), all("content-type"));
    assert!(lengths.len() + codings.len() <= 1, "two lengths: {head}");
    assert!(kinds.len() <= 1 && all("mcp-session-id").len() <= 1, "a header twice: {head}");
    let rest = &bytes[end + 4..];
    if status / 100 == 1 || status == 204 || status == 304 || may_lack_body {
        // After a HEAD the length is that of a body which is not sent.
        return (!may_lack_body).then_some(rest);
    }
    let kind = kinds.first().copied().unwrap_or_default();
    if let Some(length) = lengths.first() {
        let length: usize = length.parse().unwrap_or_else(|_| panic!("no length: {head}"));
        let (body, rest) = rest.split_at_checked(length)?;
        if kind.starts_with("application/json") {
            assert!(json::read(body).is_some(), "a body that is not JSON: {:?}", String::from_utf8_lossy(body));
        }
        return Some(rest);
    }
    if codings.is_empty() {
        // The body ends with the connection.
        return None;
    }
    assert!(codings == ["chunked"], "another coding: {head}");
    let mut rest = rest;
    loop {
        let line = memmem::find(rest, b"\r\n")?;
        let size = std::str::from_utf8(&rest[..line]).ok().and_then(|size| usize::from_str_radix(size, 16).ok());
        let size = size.unwrap_or_else(|| panic!("no size of a chunk: {:?}", String::from_utf8_lossy(&rest[..line])));
        let chunk = rest.get(line + 2..line + 2 + size)?;
        let after = rest.get(line + 2 + size..line + 4 + size)?;
        assert!(after == b"\r\n", "a chunk without an end");
        if kind.starts_with("text/event-stream") {
            check_events(chunk);
        }
        rest = &rest[line + 4 + size..];
        if size == 0 {
            return Some(rest);
        }
    }
}

/// Every field of an event is one that clients know, and its data is JSON.
fn check_events(chunk: &[u8]) {
    let text = std::str::from_utf8(chunk).expect("events are text");
    for line in text.lines() {
        let is_known =
            line.is_empty() || [":", "id:", "event:", "data:", "retry:"].iter().any(|name| line.starts_with(name));
        assert!(is_known, "no field of an event: {line:?}");
        if let Some(data) = line.strip_prefix("data:").map(str::trim).filter(|data| !data.is_empty()) {
            assert!(json::read(data.as_bytes()).is_some(), "data that is not JSON: {data:?}");
        }
    }
}

fn last_session(received: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(received);
    let at = text.rfind("mcp-session-id: ")? + "mcp-session-id: ".len();
    text[at..].split("\r\n").next().map(str::to_owned)
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    memmem::find(text, part).is_some()
}

fn count(text: &[u8], part: &[u8]) -> usize {
    memmem::find_iter(text, part).count()
}
