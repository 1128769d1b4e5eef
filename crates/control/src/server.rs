//! The server side of the control socket. It is polled by one owner, has no task of its own, and never waits for a
//! slow client.

use std::{
    collections::{HashMap, VecDeque},
    io,
    path::Path,
    task::{Context, Poll, Waker},
};

use bytes::{Buf, BytesMut};
#[cfg(unix)]
use outlast_core::saved::Octets;
#[cfg(unix)]
use outlast_os::handover::{Handover, Received};
use outlast_os::{Listener, Peer};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::wire::{self, Frames, Refusal, Request};

/// At this many connections a new client replaces the one that has been idle for longest. If all of them wait for an
/// answer or for events, the new one is refused.
const CLIENTS_MAX: usize = 128;
/// At most this many clients may subscribe, so that connections remain for other clients.
const SUBSCRIBERS_MAX: usize = 32;
/// Connections accepted in one turn of the loop; further ones are accepted in the next turn.
const ACCEPTS_MAX: usize = 8;
/// A client with this many unanswered requests is not read from until one of them is answered.
const UNANSWERED_MAX: usize = 16;
/// A client with more unsent bytes than this is disconnected. The buffer holds the longest answer and many events.
const OUTBOX_MAX: usize = 2 << 20;

/// A request of a client. Its ticket must be answered exactly once.
#[derive(Debug)]
pub struct Asked {
    pub ticket: u64,
    pub method: String,
    pub params: Value,
}

/// A connection that was taken out of the server, to be used with another protocol.
#[derive(Debug)]
pub struct Taken {
    pub peer: Peer,
    /// Bytes that were received and not read.
    pub frames: Frames,
    /// Bytes that are still to be sent.
    pub outbox: BytesMut,
}

#[derive(Debug)]
pub struct Server {
    listener: Listener,
    clients: VecDeque<Client>,
    next_client: u64,
    /// Counts accepted clients and requests. The client with the smallest number has been idle for longest.
    turn: u64,
    /// By ticket: the client, and the id that it gave its request.
    tickets: HashMap<u64, (u64, u64)>,
    next_ticket: u64,
}

#[derive(Debug)]
struct Client {
    key: u64,
    peer: Peer,
    frames: Frames,
    outbox: BytesMut,
    unanswered: usize,
    is_subscribed: bool,
    /// The turn of its last request, or of its connection.
    heard_at: u64,
    hearing: Hearing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Hearing {
    Open,
    /// The client sends no more. It is disconnected when it has its answers.
    Ended,
    /// The client took too little of what was sent to it, or has disconnected.
    Lost,
}

enum Incoming {
    Nothing,
    Request(Request),
}

impl Server {
    /// The path comes from [`os::sockets`](outlast_os::sockets).
    pub fn bind(path: &Path) -> io::Result<Server> {
        let listener = Listener::bind(path)?;
        // Ticket 0 stands for no client.
        let (clients, tickets) = (VecDeque::new(), HashMap::new());
        Ok(Server { listener, clients, next_client: 1, turn: 0, tickets, next_ticket: 1 })
    }

    /// The next request. Before it returns `Pending`, it has sent what the sockets accept.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Asked> {
        // Clients that disconnected free their places before new ones are accepted.
        let asked = self.hear(cx).or_else(|| if self.accept(cx) { self.hear(cx) } else { None });
        asked.map_or(Poll::Pending, Poll::Ready)
    }

    fn hear(&mut self, cx: &mut Context<'_>) -> Option<Asked> {
        for _ in 0..self.clients.len() {
            let Some(mut client) = self.clients.pop_front() else { break };
            let heard = client.poll(cx);
            let asked = match heard {
                Incoming::Request(request) => Some(self.note(&mut client, request)),
                Incoming::Nothing => None,
            };
            if client.is_over() {
                self.tickets.retain(|_, (key, _)| *key != client.key);
            } else {
                self.clients.push_back(client);
            }
            if asked.is_some() {
                return asked;
            }
        }
        None
    }

    /// Answers the request of this ticket. If its client has disconnected, the answer is dropped.
    pub fn answer(&mut self, ticket: u64, result: &Result<Value, Refusal>) {
        let Some((key, id)) = self.tickets.remove(&ticket) else { return };
        if let Some(client) = self.clients.iter_mut().find(|client| client.key == key) {
            client.unanswered -= 1;
            client.put(&wire::answer(Some(id), result));
        }
    }

    /// Answers, and hands over the connection of the client that asked. `None` if the client has disconnected.
    pub fn take(&mut self, ticket: u64, result: &Result<Value, Refusal>) -> Option<Taken> {
        let key = self.tickets.get(&ticket).map(|(key, _)| *key);
        self.answer(ticket, result);
        let at = self.clients.iter().position(|client| Some(client.key) == key)?;
        let client = self.clients.remove(at)?;
        self.tickets.retain(|_, (key, _)| *key != client.key);
        Some(Taken { peer: client.peer, frames: client.frames, outbox: client.outbox })
    }

    /// Whether the client that asked is still connected.
    pub fn is_waited_for(&self, ticket: u64) -> bool {
        let key = self.tickets.get(&ticket).map(|(key, _)| *key);
        self.clients.iter().any(|client| Some(client.key) == key && !client.is_gone())
    }

    /// From now on the client of this ticket receives every record.
    pub fn subscribe(&mut self, ticket: u64) {
        let subscribers = self.clients.iter().filter(|client| client.is_subscribed && !client.is_gone()).count();
        if subscribers >= SUBSCRIBERS_MAX {
            let message = format!("{SUBSCRIBERS_MAX} clients are already subscribed, which is the limit");
            return self.answer(ticket, &Err(Refusal::new("too_many_subscribers", message)));
        }
        let key = self.tickets.get(&ticket).map(|(key, _)| *key);
        if let Some(client) = self.clients.iter_mut().find(|client| Some(client.key) == key) {
            client.is_subscribed = true;
        }
        self.answer(ticket, &Ok(json!({"subscribed": true})));
    }

    /// Sends an audit record, as its line, to the subscribed clients.
    pub fn record(&mut self, line: &str) {
        if self.clients.iter().any(|client| client.is_subscribed)
            && let Some(frame) = wire::record(line)
        {
            self.tell_all(&frame);
        }
    }

    /// Sends an event to the subscribed clients.
    pub fn event(&mut self, about: &Value) {
        if self.clients.iter().any(|client| client.is_subscribed)
            && let Some(frame) = wire::event(about)
        {
            self.tell_all(&frame);
        }
    }

    fn tell_all(&mut self, frame: &[u8]) {
        for client in self.clients.iter_mut().filter(|client| client.is_subscribed) {
            client.put(frame);
        }
    }

    /// Writes what the sockets accept right now, before the server is dropped.
    pub fn flush(&mut self) {
        let mut cx = Context::from_waker(Waker::noop());
        for client in &mut self.clients {
            client.flush(&mut cx);
        }
    }

    /// True if a client was accepted.
    fn accept(&mut self, cx: &mut Context<'_>) -> bool {
        for accepted in 0..ACCEPTS_MAX {
            // The error is about a client that has disconnected already, or about a lack of descriptors; the next
            // turn of the loop tries again.
            let Poll::Ready(Ok(peer)) = self.listener.poll_accept(cx) else { return accepted > 0 };
            self.turn += 1;
            let mut client = Client::new(self.next_client, self.turn, peer);
            self.next_client += 1;
            if self.clients.len() == CLIENTS_MAX {
                // Clients that disconnected while they waited for an answer.
                self.clients.retain(|client| !client.is_gone());
                self.make_room(cx);
            }
            if self.clients.len() < CLIENTS_MAX {
                self.clients.push_back(client);
            } else {
                let message = format!("{CLIENTS_MAX} clients are already connected, which is the limit");
                client.put(&wire::answer(None, &Err(Refusal::new("too_many_clients", message))));
                client.flush(cx);
            }
        }
        cx.waker().wake_by_ref();
        true
    }

    /// Disconnects the client that has been idle for longest, among those that wait for nothing.
    fn make_room(&mut self, cx: &mut Context<'_>) {
        let silent = self.clients.iter().enumerate().filter(|(_, client)| client.is_idle());
        let longest = silent.min_by_key(|(_, client)| client.heard_at).map(|(at, _)| at);
        let Some(mut client) = longest.and_then(|at| self.clients.remove(at)) else { return };
        let message = format!("{CLIENTS_MAX} clients are connected, and this one was idle longest");
        client.put(&wire::answer(None, &Err(Refusal::new("too_many_clients", message))));
        client.flush(cx);
    }

    fn note(&mut self, client: &mut Client, request: Request) -> Asked {
        self.turn += 1;
        client.heard_at = self.turn;
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        client.unanswered += 1;
        self.tickets.insert(ticket, (client.key, request.id));
        Asked { ticket, method: request.method, params: request.params }
    }
}

/// The server as saved state. The sockets are kept by a [`Handover`](outlast_os::handover::Handover).
#[cfg(unix)]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedServer {
    listener: i32,
    clients: Vec<SavedClient>,
    next_client: u64,
    turn: u64,
    /// Ticket, client and the id of the request.
    tickets: Vec<(u64, u64, u64)>,
    next_ticket: u64,
}

#[cfg(unix)]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SavedClient {
    key: u64,
    peer: i32,
    frames: Octets,
    outbox: Octets,
    unanswered: usize,
    is_subscribed: bool,
    heard_at: u64,
    hearing: Hearing,
}

#[cfg(unix)]
impl Server {
    pub fn save(&self, handover: &mut Handover) -> SavedServer {
        let clients = self.clients.iter().map(|client| SavedClient {
            key: client.key,
            peer: client.peer.keep(handover),
            frames: Octets::of(client.frames.rest()),
            outbox: Octets::of(&client.outbox),
            unanswered: client.unanswered,
            is_subscribed: client.is_subscribed,
            heard_at: client.heard_at,
            hearing: client.hearing,
        });
        let clients = clients.collect();
        let mut tickets: Vec<_> = self.tickets.iter().map(|(ticket, (key, id))| (*ticket, *key, *id)).collect();
        tickets.sort_unstable();
        SavedServer {
            listener: self.listener.keep(handover),
            clients,
            next_client: self.next_client,
            turn: self.turn,
            tickets,
            next_ticket: self.next_ticket,
        }
    }

    pub fn restore(saved: SavedServer, received: &mut Received, path: &Path) -> io::Result<Server> {
        let mut clients = VecDeque::new();
        for client in saved.clients {
            clients.push_back(Client {
                key: client.key,
                peer: Peer::restore(received, client.peer)?,
                frames: Frames::after(&client.frames.bytes()),
                outbox: BytesMut::from(client.outbox.bytes()),
                unanswered: client.unanswered,
                is_subscribed: client.is_subscribed,
                heard_at: client.heard_at,
                hearing: client.hearing,
            });
        }
        Ok(Server {
            listener: Listener::restore(received, saved.listener, path)?,
            clients,
            next_client: saved.next_client,
            turn: saved.turn,
            tickets: saved.tickets.into_iter().map(|(ticket, key, id)| (ticket, (key, id))).collect(),
            next_ticket: saved.next_ticket,
        })
    }
}

impl Client {
    fn new(key: u64, heard_at: u64, peer: Peer) -> Client {
        Client {
            key,
            peer,
            frames: Frames::default(),
            outbox: BytesMut::new(),
            unanswered: 0,
            is_subscribed: false,
            heard_at,
            hearing: Hearing::Open,
        }
    }

    /// It waits for no answer and no event.
    fn is_idle(&self) -> bool {
        self.unanswered == 0 && !self.is_subscribed
    }

    /// It neither sends nor reads any more.
    fn is_gone(&self) -> bool {
        self.hearing != Hearing::Open && self.peer.is_gone()
    }

    fn is_over(&self) -> bool {
        match self.hearing {
            Hearing::Open => false,
            Hearing::Ended => self.unanswered == 0 && self.outbox.is_empty(),
            Hearing::Lost => true,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Incoming {
        loop {
            self.flush(cx);
            if self.hearing != Hearing::Open || self.unanswered >= UNANSWERED_MAX {
                return Incoming::Nothing;
            }
            match self.frames.next_frame() {
                Ok(Some(frame)) => match Request::read(&frame) {
                    Ok(request) => return Incoming::Request(request),
                    Err((id, refusal)) => self.put(&wire::answer(id, &Err(refusal))),
                },
                Err(too_long) => {
                    self.put(&wire::answer(None, &Err(Refusal::new("too_long", too_long.to_string()))));
                    // The start of the next frame is not known any more.
                    self.hearing = Hearing::Ended;
                }
                Ok(None) => {
                    let Poll::Ready(read) = self.peer.poll_read(cx, self.frames.room()) else {
                        return Incoming::Nothing;
                    };
                    match read {
                        Ok(count) if count > 0 => {}
                        Ok(_) if !self.is_subscribed => self.hearing = Hearing::Ended,
                        Ok(_) | Err(_) => self.hearing = Hearing::Lost,
                    }
                }
            }
        }
    }

    fn put(&mut self, frame: &[u8]) {
        if self.outbox.len() + frame.len() > OUTBOX_MAX {
            self.hearing = Hearing::Lost;
        }
        if self.hearing != Hearing::Lost {
            self.outbox.extend_from_slice(frame);
        }
    }

    fn flush(&mut self, cx: &mut Context<'_>) {
        while !self.outbox.is_empty() && self.hearing != Hearing::Lost {
            match self.peer.poll_write(cx, &self.outbox) {
                Poll::Pending => return,
                Poll::Ready(Ok(count)) => self.outbox.advance(count),
                Poll::Ready(Err(_)) => self.hearing = Hearing::Lost,
            }
        }
        if self.outbox.is_empty() && self.outbox.capacity() > 0 {
            self.outbox = BytesMut::new();
        }
    }
}
