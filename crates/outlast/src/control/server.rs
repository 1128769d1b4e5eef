//! The listening side: one owner, no task of its own, and nobody who is slow is waited for.

use std::{
    collections::{HashMap, VecDeque},
    io,
    path::Path,
    task::{Context, Poll, Waker},
};

use bytes::{Buf, BytesMut};
use serde_json::{Value, json};

use super::wire::{self, Frames, Refusal, Request};
use crate::os::{Listener, Peer};

/// At so many connections a new client takes the place of the one that has been silent for longest. If each of them
/// waits for an answer or for events, the new one is told so and let go.
const CLIENTS_MAX: usize = 128;
/// So many may subscribe, so that others always find a place.
const SUBSCRIBERS_MAX: usize = 32;
/// Let in at one turn of the loop; further ones at the next.
const ACCEPTS_MAX: usize = 8;
/// A client that asked for so much and has no answer yet is not listened to until it has one.
const UNANSWERED_MAX: usize = 16;
/// A client that lets more than this wait is let go. It holds the longest answer and a good many events.
const OUTBOX_MAX: usize = 2 << 20;

/// Something a client wants. The ticket is for its answer; each gets exactly one.
#[derive(Debug)]
pub struct Asked {
    pub ticket: u64,
    pub method: String,
    pub params: Value,
}

/// A connection that is taken out: from now on it speaks of something else.
#[derive(Debug)]
pub struct Taken {
    pub peer: Peer,
    /// What came and was not read.
    pub frames: Frames,
    /// What is still to be sent.
    pub outbox: BytesMut,
}

#[derive(Debug)]
pub struct Server {
    listener: Listener,
    clients: VecDeque<Client>,
    next_client: u64,
    /// Counts what was heard: the client with the smallest number has been silent for longest.
    turn: u64,
    /// Whose request a ticket is: the client and its id for it.
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
    /// When it last said something whole.
    heard_at: u64,
    hearing: Hearing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hearing {
    Open,
    /// It says no more, and goes when it has its answers.
    Ended,
    /// It let too much wait, or is gone.
    Lost,
}

enum Heard {
    Nothing,
    Request(Request),
}

impl Server {
    /// Where [`os::sockets`](crate::os::sockets) says.
    pub fn bind(path: &Path) -> io::Result<Server> {
        let listener = Listener::bind(path)?;
        // The first ticket is not 0, which means nobody.
        let (clients, tickets) = (VecDeque::new(), HashMap::new());
        Ok(Server { listener, clients, next_client: 1, turn: 0, tickets, next_ticket: 1 })
    }

    /// The next thing somebody wants. `Pending` has also sent what could be sent.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Asked> {
        // Those who left make room for those who come.
        let asked = self.hear(cx).or_else(|| if self.accept(cx) { self.hear(cx) } else { None });
        asked.map_or(Poll::Pending, Poll::Ready)
    }

    fn hear(&mut self, cx: &mut Context<'_>) -> Option<Asked> {
        for _ in 0..self.clients.len() {
            let Some(mut client) = self.clients.pop_front() else { break };
            let heard = client.poll(cx);
            let asked = match heard {
                Heard::Request(request) => Some(self.note(&mut client, request)),
                Heard::Nothing => None,
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

    /// Answers what was asked under this ticket. Whoever asked may be gone, and then nobody is told.
    pub fn answer(&mut self, ticket: u64, result: &Result<Value, Refusal>) {
        let Some((key, id)) = self.tickets.remove(&ticket) else { return };
        if let Some(client) = self.clients.iter_mut().find(|client| client.key == key) {
            client.unanswered -= 1;
            client.put(&wire::answer(Some(id), result));
        }
    }

    /// Answers, and hands over the connection of whoever asked. None if they are gone.
    pub fn take(&mut self, ticket: u64, result: &Result<Value, Refusal>) -> Option<Taken> {
        let key = self.tickets.get(&ticket).map(|(key, _)| *key);
        self.answer(ticket, result);
        let at = self.clients.iter().position(|client| Some(client.key) == key)?;
        let client = self.clients.remove(at)?;
        self.tickets.retain(|_, (key, _)| *key != client.key);
        Some(Taken { peer: client.peer, frames: client.frames, outbox: client.outbox })
    }

    /// Whether somebody is still there for the answer.
    pub fn is_waited_for(&self, ticket: u64) -> bool {
        let key = self.tickets.get(&ticket).map(|(key, _)| *key);
        self.clients.iter().any(|client| Some(client.key) == key && !client.is_gone())
    }

    /// From now on the client that asked under this ticket hears of every record.
    pub fn subscribe(&mut self, ticket: u64) {
        let subscribers = self.clients.iter().filter(|client| client.is_subscribed && !client.is_gone()).count();
        if subscribers >= SUBSCRIBERS_MAX {
            let message = format!("{SUBSCRIBERS_MAX} clients have subscribed already, which is the limit");
            return self.answer(ticket, &Err(Refusal::new("too_many_subscribers", message)));
        }
        let key = self.tickets.get(&ticket).map(|(key, _)| *key);
        if let Some(client) = self.clients.iter_mut().find(|client| Some(client.key) == key) {
            client.is_subscribed = true;
        }
        self.answer(ticket, &Ok(json!({"subscribed": true})));
    }

    /// An audit record, as its line, for those who subscribed.
    pub fn record(&mut self, line: &str) {
        if self.clients.iter().any(|client| client.is_subscribed)
            && let Some(frame) = wire::record(line)
        {
            self.tell_all(&frame);
        }
    }

    /// Something else that happened, for the same.
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

    /// Hands to the kernel what it takes right now: the last words.
    pub fn flush(&mut self) {
        let mut cx = Context::from_waker(Waker::noop());
        for client in &mut self.clients {
            client.flush(&mut cx);
        }
    }

    /// True if somebody came.
    fn accept(&mut self, cx: &mut Context<'_>) -> bool {
        for accepted in 0..ACCEPTS_MAX {
            // An error is about one who knocked and left, or about our own lack of descriptors, and then the next
            // turn of the loop tries again.
            let Poll::Ready(Ok(peer)) = self.listener.poll_accept(cx) else { return accepted > 0 };
            self.turn += 1;
            let mut client = Client::new(self.next_client, self.turn, peer);
            self.next_client += 1;
            if self.clients.len() == CLIENTS_MAX {
                // A client that left while it waited for an answer need not have one.
                self.clients.retain(|client| !client.is_gone());
                self.make_room(cx);
            }
            if self.clients.len() < CLIENTS_MAX {
                self.clients.push_back(client);
            } else {
                let message = format!("{CLIENTS_MAX} clients are connected already, which is the limit");
                client.put(&wire::answer(None, &Err(Refusal::new("too_many_clients", message))));
                client.flush(cx);
            }
        }
        cx.waker().wake_by_ref();
        true
    }

    /// Lets the client go that has been silent for longest, of those that wait for nothing.
    fn make_room(&mut self, cx: &mut Context<'_>) {
        let silent = self.clients.iter().enumerate().filter(|(_, client)| client.is_idle());
        let longest = silent.min_by_key(|(_, client)| client.heard_at).map(|(at, _)| at);
        let Some(mut client) = longest.and_then(|at| self.clients.remove(at)) else { return };
        let message = format!("{CLIENTS_MAX} clients are connected, and this one was silent for longest");
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

    /// It waits for no answer and for no event.
    fn is_idle(&self) -> bool {
        self.unanswered == 0 && !self.is_subscribed
    }

    /// It says no more, and listens no more either.
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

    fn poll(&mut self, cx: &mut Context<'_>) -> Heard {
        loop {
            self.flush(cx);
            if self.hearing != Hearing::Open || self.unanswered >= UNANSWERED_MAX {
                return Heard::Nothing;
            }
            match self.frames.next_frame() {
                Ok(Some(frame)) => match Request::read(&frame) {
                    Ok(request) => return Heard::Request(request),
                    Err((id, refusal)) => self.put(&wire::answer(id, &Err(refusal))),
                },
                Err(too_long) => {
                    self.put(&wire::answer(None, &Err(Refusal::new("too_long", too_long.to_string()))));
                    // Where the next frame begins is not known any more.
                    self.hearing = Hearing::Ended;
                }
                Ok(None) => {
                    let Poll::Ready(read) = self.peer.poll_read(cx, self.frames.room()) else { return Heard::Nothing };
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
