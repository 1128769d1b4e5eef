//! Target `control`: the control socket's frames, first as bytes in pieces of any size, then the real server on a
//! socket.
//!
//! Each line of a script is one step (see [`World::play`]). At the end all requests are answered, and each whole
//! frame that a client sent must have had exactly one answer.

use std::{
    collections::{HashMap, VecDeque},
    future::poll_fn,
    io::Read,
    net::Shutdown,
    os::unix::net::UnixStream,
    task::Poll,
};

use outlast_control::{
    server::{Asked, Server},
    wire::{self, FRAME_MAX, Frames, Refusal, Request, Said},
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::{
    connection::{Connection, WRITES_MAX},
    script,
};

/// Clients of one script; the server's own limit is higher.
const CLIENTS_MAX: usize = 6;
/// Turns of the server without input or output, after which it is idle.
const IDLE_TURNS: usize = 3;

pub fn run(input: &[u8]) {
    check_frames(input);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut world = World::new(runtime);
    for line in script::lines(input) {
        world.play(line);
    }
    world.finish();
}

/// The frame reader finds the same frames however their bytes arrive, and does not allocate for an announced length.
fn check_frames(input: &[u8]) {
    let bytes = script::expand(input);
    let whole = frames_of(&bytes, usize::MAX);
    let piece = usize::from(input.first().copied().unwrap_or(0)) + 1;
    assert!(whole == frames_of(&bytes, piece), "other frames in pieces of {piece}");
    for frame in &whole.0 {
        if let Ok(request) = Request::read(frame) {
            assert!(
                Request::read(request.to_json().as_bytes()) == Ok(request),
                "a request is not read as it was written"
            );
        }
        let _ = Said::read(frame);
        let _ = wire::viewer_size(frame);
    }
}

fn frames_of(bytes: &[u8], piece: usize) -> (Vec<Vec<u8>>, bool) {
    let mut frames = Frames::default();
    let mut found = Vec::new();
    for piece in bytes.chunks(piece.min(bytes.len().max(1))) {
        frames.room().extend_from_slice(piece);
        assert!(frames.room().capacity() <= 2 * (bytes.len() + (8 << 10)), "room was made for what was announced");
        loop {
            match frames.next_frame() {
                Ok(Some(frame)) => found.push(frame.to_vec()),
                Ok(None) => break,
                Err(_) => return (found, true),
            }
        }
    }
    (found, false)
}

struct Client {
    connection: Connection<UnixStream>,
    is_subscribed: bool,
}

struct World {
    runtime: Runtime,
    server: Server,
    dir: TempDir,
    clients: Vec<Client>,
    tickets: VecDeque<Asked>,
    asked: usize,
}

impl World {
    fn new(runtime: Runtime) -> World {
        let dir = tempfile::tempdir().expect("a directory");
        let inside = runtime.enter();
        let server = Server::bind(&dir.path().join("s")).expect("a socket");
        drop(inside);
        World { runtime, server, dir, clients: Vec::new(), tickets: VecDeque::new(), asked: 0 }
    }

    fn play(&mut self, line: &[u8]) {
        let (kind, rest) = script::split(line);
        let digit = usize::from(rest.first().copied().unwrap_or(b'0').wrapping_sub(b'0'));
        let text = rest.get(1..).unwrap_or_default();
        match kind {
            // A client connects, half-closes, or disconnects.
            b'+' => self.connect(),
            b'h' => {
                if let Some(Client { connection, .. }) = self.client(digit) {
                    let _ = connection.stream.shutdown(Shutdown::Write);
                    connection.is_half_closed = true;
                }
            }
            b'-' if !self.clients.is_empty() => {
                let at = digit % self.clients.len();
                self.clients.remove(at);
            }
            // The client sends bytes, a frame, a request, or a frame with another length before it: `L0 1048577 {}`.
            b'b' => self.send(digit, text),
            b'f' => {
                if let Some(frame) = std::str::from_utf8(text).ok().and_then(wire::frame) {
                    self.send(digit, &frame);
                }
            }
            b'q' => {
                let method = String::from_utf8_lossy(text).into_owned();
                let id = script::number(text);
                let request = Request { id, method, params: json!({}) }.to_json();
                self.send(digit, &wire::frame(&request).unwrap_or_default());
            }
            b'L' => {
                let (length, body) = crate::relay::halves(text.trim_ascii_start());
                let length = u32::try_from(script::number(length)).unwrap_or(u32::MAX);
                self.send(digit, &[&length.to_be_bytes(), body].concat());
            }
            // The oldest request is answered, refused or becomes a subscription; an event goes to all.
            b'a' => self.answer(&Ok(json!({"text": String::from_utf8_lossy(&rest)}))),
            b'e' => self.answer(&Err(Refusal::new("no", String::from_utf8_lossy(&rest)))),
            b's' => {
                if let Some(asked) = self.tickets.pop_front() {
                    self.server.subscribe(asked.ticket);
                    // Only the answer shows which client that is, so all are marked.
                    self.clients.iter_mut().for_each(|client| client.is_subscribed = true);
                }
            }
            b'v' => self.server.event(&json!({"event": String::from_utf8_lossy(&rest)})),
            _ => {}
        }
        self.turn();
    }

    fn client(&mut self, digit: usize) -> Option<&mut Client> {
        let count = self.clients.len();
        if count == 0 { None } else { self.clients.get_mut(digit % count) }
    }

    fn connect(&mut self) {
        if self.clients.len() >= CLIENTS_MAX {
            return;
        }
        let stream = UnixStream::connect(self.dir.path().join("s")).expect("the server listens");
        stream.set_nonblocking(true).expect("a socket");
        self.clients.push(Client { connection: Connection::new(stream), is_subscribed: false });
    }

    fn send(&mut self, digit: usize, bytes: &[u8]) {
        let mut rest = bytes;
        for _ in 0..WRITES_MAX {
            let Some(left) = self.client(digit).and_then(|client| client.connection.write(rest)) else { return };
            rest = left;
            self.turn();
        }
    }

    /// Runs the server until it is idle; requests wait for a line of the script.
    fn turn(&mut self) {
        let mut idle = 0;
        while idle < IDLE_TURNS {
            let server = &mut self.server;
            let asked = self.runtime.block_on(async {
                // The reactor must run for the sockets to be ready.
                tokio::task::yield_now().await;
                poll_fn(|cx| Poll::Ready(server.poll(cx))).await
            });
            idle += 1;
            if let Poll::Ready(asked) = asked {
                self.asked += 1;
                self.tickets.push_back(asked);
                idle = 0;
            }
            for Client { connection, .. } in &mut self.clients {
                let mut piece = [0; 4 << 10];
                while let Ok(count @ 1..) = connection.stream.read(&mut piece) {
                    connection.received.extend_from_slice(&piece[..count]);
                    idle = 0;
                }
            }
        }
    }

    fn answer(&mut self, result: &Result<Value, Refusal>) {
        if let Some(asked) = self.tickets.pop_front() {
            self.server.answer(asked.ticket, result);
        }
    }

    fn finish(mut self) {
        self.turn();
        while !self.tickets.is_empty() {
            self.answer(&Ok(json!({})));
            self.turn();
        }
        for client in &self.clients {
            client.check();
        }
    }
}

impl Client {
    /// Each whole frame that it sent has one answer, under its id where it has one.
    fn check(&self) {
        let (sent, is_refused) = model(&self.connection.sent);
        let (received, is_broken) = model(&self.connection.received);
        assert!(!is_broken, "the server announced a frame over its limit");
        let mut owed: HashMap<Option<u64>, usize> = HashMap::new();
        for frame in &sent {
            let value: Option<Value> = serde_json::from_slice(frame).ok();
            *owed.entry(value.and_then(|value| value["id"].as_u64())).or_default() += 1;
        }
        if is_refused {
            *owed.entry(None).or_default() += 1;
        }
        for frame in received {
            let value: Value = serde_json::from_slice(frame).unwrap_or_else(|error| panic!("not JSON ({error})"));
            if value.get("event").is_some() {
                assert!(self.is_subscribed, "an event without a subscription: {value}");
                continue;
            }
            assert!(value.get("ok").is_some() != value.get("error").is_some(), "neither answer nor refusal: {value}");
            let owed = owed.get_mut(&value["id"].as_u64()).filter(|owed| **owed > 0);
            *owed.unwrap_or_else(|| panic!("an answer to what was never asked: {value}")) -= 1;
        }
        // The server drops a half-closed subscriber with all its open requests.
        if self.is_subscribed && self.connection.is_half_closed {
            return;
        }
        owed.retain(|_, count| *count > 0);
        assert!(owed.is_empty(), "frames were never answered: {owed:?}");
    }
}

/// The frames in a stream of bytes, by an independent parser, and whether it ends with a refused length.
fn model(mut bytes: &[u8]) -> (Vec<&[u8]>, bool) {
    let mut frames = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<4>() {
        let length = u32::from_be_bytes(*head) as usize;
        if length > FRAME_MAX {
            return (frames, true);
        }
        let Some((frame, rest)) = rest.split_at_checked(length) else { break };
        frames.push(frame);
        bytes = rest;
    }
    (frames, false)
}
