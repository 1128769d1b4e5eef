//! The HTTP front: sessions of the handshake era, and single requests of the stateless era.
//!
//! The driver reports what clients send and what the gateway says to them; the machine decides which response carries it,
//! as one JSON body or as events. It knows a response only by a handle, which it gives back in its actions. Connections,
//! HTTP syntax and credentials are the driver's.

use std::{
    collections::BinaryHeap,
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use rustc_hash::FxHashMap;

use crate::{
    gateway::{Client, Said, Who},
    mcp::notification,
    message::{self, Id, Message, Outline, Walk},
};

pub mod frames;
pub mod record;
mod records;
mod request;
mod saved;
mod session;
mod session_ids;
mod stateless_clients;

use record::{Change, Record, RecordKey, SessionState};
use records::Records;
use request::Request;
pub use saved::{Busy, Saved};
pub use session::{NoStream, Session, StreamStart};
use session_ids::SessionIds;
pub use stateless_clients::Caller;
use stateless_clients::StatelessClients;

/// The number of a session, which only its client knows: 128 random bits.
pub type SessionId = u128;

/// How long an answer waits until its session is stored; then the session is served without a record.
pub const STORE_MAX: Duration = Duration::from_secs(1);
/// How often in its time to live the record of a session is written again while the session is used.
const RENEWALS: u32 = 8;

/// Bounds, and what happens at each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// With a session more, the one of the same client that was idle longest ends; if none of it is idle, the new one is
    /// refused.
    pub sessions_max: usize,
    /// The same for the sessions of one client, where clients authenticate.
    pub sessions_of_client_max: usize,
    /// A session ends if it has no open response and sent no request for this long.
    pub session_ttl: Duration,
    /// A stream that was silent for so long gets a ping.
    pub ping: Duration,
    /// A request without an answer for so long is answered by a stream, which the client can resume. At most a second in
    /// revisions that can resume each stream.
    pub quiet: Duration,
    /// Events that a session keeps for resumption; older ones are dropped.
    pub events_max: usize,
    pub events_bytes_max: usize,
    /// Of all sessions together; the session that keeps the most drops its oldest first.
    pub events_total_max: usize,
}

/// What happened. `R` is the handle of a response.
#[derive(Debug)]
pub enum Event<R> {
    /// A POST with `initialize`. [`HttpFront::has_room`] said that a session may be opened.
    Opened {
        client: Client,
        who: Rc<Who>,
        /// The client is authenticated.
        is_known: bool,
        peer: Rc<str>,
        id: Id,
        message: Bytes,
        response: R,
        /// Becomes the session's id.
        random: u128,
    },
    /// A POST with requests of a session, none of which has the id of one that is open.
    Posted {
        client: Client,
        peer: Rc<str>,
        requests: Posted,
        response: R,
    },
    /// A POST of a session with nothing that has an answer.
    Noted {
        client: Client,
        messages: Vec<Bytes>,
    },
    /// The same with one long response to a request of the gateway, which was parsed before.
    NotedLong {
        client: Client,
        message: Bytes,
        walk: Box<Walk>,
    },
    /// A POST of the stateless era.
    Requested {
        client: Client,
        who: Rc<Who>,
        caller: Caller,
        peer: Rc<str>,
        message: Bytes,
        outline: Option<Outline>,
        response: R,
    },
    /// A request of a session that is stored and not open here: [`HttpFront::stored`] found its key.
    Returned {
        client: Client,
        key: RecordKey,
        id: SessionId,
        peer: Rc<str>,
        random: u32,
    },
    /// The records that the store has, at the start.
    Loaded {
        records: Vec<Loaded>,
    },
    /// A write that [`Action::Store`] asked for has ended.
    Stored {
        client: Client,
        write: u32,
        is_ok: bool,
    },
    /// Another replica of the cluster serves this session now. It ends here, and its record stays.
    Moved {
        key: RecordKey,
    },
    /// A GET: a stream as [`Session::stream`] found it.
    Listened {
        client: Client,
        stream: StreamStart,
        response: R,
    },
    /// A DELETE.
    Ended {
        client: Client,
    },
    /// The connection of a POST is gone before its response began.
    AskerLeft {
        client: Client,
        response: R,
    },
    /// The connection of a stream is gone, or its end was sent.
    ReaderLeft {
        client: Client,
        response: R,
    },
    /// The gateway says something. Without the request that it is about, a message goes to the general stream.
    Told {
        client: Client,
        message: Bytes,
        about: Option<Id>,
        said: Said,
    },
    /// The gateway has finished with this client.
    Dropped {
        client: Client,
    },
    Configured(Limits),
    /// Another program takes over: streams that belong to no request end, and clients resume them there.
    HandoverBegan,
    /// The gateway stops.
    Stopped,
    TimePassed,
}

/// The requests of one POST, with all that came together with them.
#[derive(Debug)]
pub enum Posted {
    One {
        id: Id,
        message: Bytes,
        outline: Option<Outline>,
        change: Option<Change>,
    },
    /// The messages are all members of the batch, in their order.
    Batch {
        ids: Vec<Id>,
        messages: Vec<Bytes>,
        changes: Vec<(Id, Change)>,
    },
}

/// A stored session.
#[derive(Debug)]
pub struct Loaded {
    pub key: RecordKey,
    pub record: Record,
    /// How long ago it was written.
    pub age: Duration,
}

/// What is to be done. The first six are for the gateway, in this order.
#[derive(Debug)]
pub enum Action<R> {
    SessionCame {
        client: Client,
        who: Rc<Who>,
    },
    /// A session that an earlier run of the gateway opened, with what its client has told.
    SessionRestored {
        client: Client,
        who: Rc<Who>,
        state: Box<SessionState>,
    },
    RequestCame {
        client: Client,
        who: Rc<Who>,
    },
    Said {
        client: Client,
        message: Bytes,
        /// Of a request that the driver has read.
        outline: Option<Outline>,
    },
    SaidLong {
        client: Client,
        message: Bytes,
        walk: Box<Walk>,
    },
    /// Never of a client that the gateway dropped.
    Left {
        client: Client,
        /// Where a single request came from; it may still be asked for until the gateway hears this.
        peer: Option<Rc<str>>,
    },
    /// The whole response.
    Answer {
        response: R,
        /// Told with this response for the first time.
        session: Option<SessionId>,
        body: Bytes,
        kind: AnswerKind,
    },
    Refuse {
        response: R,
        why: Refusal,
    },
    /// The response is a stream from here on.
    OpenEvents {
        response: R,
        client: Client,
        session: Option<SessionId>,
    },
    SendEvent {
        response: R,
        frame: Bytes,
        /// Part of what a client missed: its size is bounded already.
        is_missed: bool,
    },
    /// If nothing else waits to be sent.
    Ping {
        response: R,
    },
    /// What was sent on this stream is all of it.
    EndEvents {
        response: R,
    },
    /// To be answered by [`Event::Stored`]. Writes of one key are carried out in their order.
    Store {
        client: Client,
        key: RecordKey,
        write: u32,
        record: Record,
    },
    /// After all writes of that key.
    Unstore {
        key: RecordKey,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerKind {
    /// To one request of a session.
    OfSession(Said),
    Batch,
    /// To a request of the stateless era.
    Stateless(Said),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    SessionEnded,
    Stopping,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub sessions: usize,
    /// Stored sessions whose clients have not come back since the start.
    pub sessions_stored: usize,
    /// Sessions that a restart would end, because their records could not be written.
    pub sessions_unrecorded: usize,
    /// Of the stateless era, not yet answered; subscriptions among them.
    pub requests: usize,
    /// Clients of the stateless era that sent a request in the last five minutes.
    pub stateless: usize,
}

#[derive(Debug)]
enum Entry<R> {
    Session(Box<Session<R>>),
    Request(Request<R>),
}

#[derive(Debug)]
pub struct HttpFront<R> {
    limits: Limits,
    clients: FxHashMap<Client, Entry<R>>,
    /// Sessions whose ids were told to their clients.
    sessions: SessionIds,
    sessions_open: usize,
    stateless: StatelessClients,
    /// If sessions are stored.
    records: Option<Records>,
    /// Records stay in the store from here on.
    is_stopping: bool,
    /// Bytes of events that all sessions keep.
    events_bytes: usize,
    /// Nothing is due before.
    due: Option<Instant>,
}

impl<R: Clone + PartialEq> HttpFront<R> {
    /// With a hash for the ids of sessions, sessions are stored.
    pub fn new(limits: Limits, hash: Option<fn(SessionId) -> RecordKey>) -> HttpFront<R> {
        HttpFront {
            limits,
            records: hash.map(Records::new),
            is_stopping: false,
            clients: FxHashMap::default(),
            sessions: SessionIds::new(hash),
            sessions_open: 0,
            stateless: StatelessClients::default(),
            events_bytes: 0,
            due: None,
        }
    }

    pub fn handle(&mut self, event: Event<R>, now: Instant, out: &mut Vec<Action<R>>) {
        match event {
            Event::Opened { client, who, is_known, peer, id, message, response, random } => {
                self.make_room_for_session(&who, is_known, out);
                let mut session = Session::opened(client, random, who.clone(), peer, id, response, now);
                if self.records.is_some() {
                    session.keep_opening(&message);
                }
                self.clients.insert(client, Entry::Session(Box::new(session)));
                self.sessions_open += 1;
                out.push(Action::SessionCame { client, who });
                out.push(Action::Said { client, message, outline: None });
                self.wake_by(now + self.limits.quiet.min(self.limits.session_ttl));
            }
            Event::Posted { client, peer, requests, response } => {
                self.posted(client, peer, requests, response, now, out)
            }
            Event::Noted { client, messages } => self.noted(client, messages, now, out),
            Event::NotedLong { client, message, walk } => {
                self.noted(client, Vec::new(), now, out);
                out.push(Action::SaidLong { client, message, walk });
            }
            Event::Requested { client, who, caller, peer, message, outline, response } => {
                self.stateless.heard(caller, now);
                self.clients.insert(client, Entry::Request(Request::new(client, peer, response, now)));
                out.push(Action::RequestCame { client, who });
                out.push(Action::Said { client, message, outline });
                self.wake_by(now + self.limits.quiet);
            }
            Event::Returned { client, key, id, peer, random } => self.returned(client, key, id, peer, random, now, out),
            Event::Loaded { records } => self.loaded(records, now, out),
            Event::Stored { client, write, is_ok } => {
                if let Some(Entry::Session(session)) = self.clients.get_mut(&client) {
                    let held = session.was_stored(write, is_ok);
                    self.release(client, held, now, out);
                }
            }
            Event::Moved { key } => self.moved(key, now, out),
            Event::Listened { client, stream, response } => {
                if let Some(Entry::Session(session)) = self.clients.get_mut(&client) {
                    session.listen(stream, response, now, out);
                    let renewal = session.renewal_if_used(self.limits.session_ttl / RENEWALS);
                    sooner(&mut self.due, renewal);
                    self.wake_by(now + self.limits.ping);
                }
            }
            Event::Ended { client } => self.end_session(client, out),
            Event::AskerLeft { client, response } => match self.clients.get_mut(&client) {
                // Its client never learned the id of a session that was not opened.
                Some(Entry::Session(session)) if session.id().is_none() => self.leave(client, out),
                Some(Entry::Session(session)) => {
                    session.asker_left(&response, now);
                    let renewal = session.renewal_if_used(self.limits.session_ttl / RENEWALS);
                    sooner(&mut self.due, renewal);
                }
                Some(Entry::Request(_)) => self.leave(client, out),
                None => {}
            },
            Event::ReaderLeft { client, response } => match self.clients.get_mut(&client) {
                Some(Entry::Session(session)) => {
                    session.reader_left(&response, now);
                    let renewal = session.renewal_if_used(self.limits.session_ttl / RENEWALS);
                    sooner(&mut self.due, renewal);
                    self.wake_by(now + self.limits.session_ttl);
                }
                // In the stateless era a client cancels its request by closing the stream.
                Some(Entry::Request(_)) => self.leave(client, out),
                None => {}
            },
            Event::Told { client, message, about, said } => self.told(client, message, about, said, now, out),
            Event::Dropped { client } => match self.remove(client, out) {
                Some(Entry::Session(mut session)) => session.end(Refusal::SessionEnded, out),
                Some(Entry::Request(request)) => request.end(out),
                None => {}
            },
            Event::Configured(limits) => {
                self.limits = limits;
                // Some sessions may have been idle for too long by now.
                self.wake_by(now);
            }
            Event::HandoverBegan => {
                self.clients.values_mut().for_each(|entry| match entry {
                    Entry::Session(session) => session.end_general(out),
                    Entry::Request(_) => {}
                });
            }
            Event::Stopped => {
                self.is_stopping = true;
                for entry in self.clients.values_mut() {
                    match entry {
                        Entry::Session(session) => session.end(Refusal::Stopping, out),
                        Entry::Request(request) => request.end(out),
                    }
                }
            }
            // Early or twice changes nothing.
            Event::TimePassed => self.time_passed(now, out),
        }
    }

    /// When `TimePassed` is due. It may turn out that no timer has fired.
    pub fn deadline(&self) -> Option<Instant> {
        self.due
    }

    /// The session of that id, if it is this client's.
    pub fn session(&self, id: SessionId, who: &Who) -> Option<&Session<R>> {
        match self.clients.get(&self.sessions.of_id(id)?) {
            Some(Entry::Session(session)) if session.is_of(who) => Some(session),
            _ => None,
        }
    }

    /// A session of that id is open, whichever client it belongs to.
    pub fn has_session(&self, id: SessionId) -> bool {
        self.sessions.of_id(id).is_some()
    }

    /// Whether there are sessions of an earlier run of the gateway whose clients have not come back.
    pub fn has_stored(&self) -> bool {
        self.dormant() > 0
    }

    /// The record of a session that an earlier run of the gateway opened, if it is this client's.
    pub fn stored(&self, id: SessionId, who: &Who) -> Option<RecordKey> {
        self.records.as_ref()?.find(id, who)
    }

    /// Whether a client may open a session; the error is the limit that is reached and that no idle session can make room
    /// for.
    pub fn has_room(&self, who: &Who, is_known: bool) -> Result<(), usize> {
        match self.limit_reached(who, is_known) {
            Some(max) if self.idlest_stored(who).is_none() && self.idlest_session(who).is_none() => Err(max),
            _ => Ok(()),
        }
    }

    /// Bytes of events that all sessions keep for resumption.
    pub fn kept_bytes(&self) -> usize {
        self.events_bytes
    }

    pub fn counts(&self, now: Instant) -> Counts {
        Counts {
            sessions: self.sessions_open,
            sessions_stored: self.dormant(),
            sessions_unrecorded: self.open_sessions().filter(|session| session.is_unrecorded()).count(),
            requests: self.clients.len() - self.sessions_open,
            stateless: self.stateless.count(now),
        }
    }

    /// Where the newest request of a client came from, and its session.
    pub fn origin(&self, client: Client) -> Option<(&Rc<str>, Option<SessionId>)> {
        match self.clients.get(&client)? {
            Entry::Session(session) => Some((session.peer(), session.id())),
            Entry::Request(request) => Some((request.peer(), None)),
        }
    }

    fn posted(
        &mut self,
        client: Client,
        peer: Rc<str>,
        requests: Posted,
        response: R,
        now: Instant,
        out: &mut Vec<Action<R>>,
    ) {
        let Some(Entry::Session(session)) = self.clients.get_mut(&client) else {
            return out.push(Action::Refuse { response, why: Refusal::SessionEnded });
        };
        sooner(&mut self.due, session.renewal_if_used(self.limits.session_ttl / RENEWALS));
        let quiet = session.quiet(&self.limits);
        match requests {
            Posted::One { id, message, outline, change } => {
                if let Some(change) = change.filter(|_| self.records.is_some()) {
                    session.add_change(id.clone(), change);
                }
                session.post([id], false, peer, response, now);
                out.push(Action::Said { client, message, outline });
            }
            Posted::Batch { ids, messages, changes } => {
                if self.records.is_some() {
                    changes.into_iter().for_each(|(id, change)| session.add_change(id, change));
                }
                session.post(ids, true, peer, response, now);
                self.noted(client, messages, now, out);
            }
        }
        self.wake_by(now + quiet);
    }

    /// A request that the client cancels gets no answer, so its response ends here.
    fn noted(&mut self, client: Client, messages: Vec<Bytes>, now: Instant, out: &mut Vec<Action<R>>) {
        let Some(Entry::Session(session)) = self.clients.get_mut(&client) else { return };
        let kept = session.events_bytes();
        session.heard(now);
        sooner(&mut self.due, session.renewal_if_used(self.limits.session_ttl / RENEWALS));
        for message in messages {
            let cancelled = cancelled(&message);
            out.push(Action::Said { client, message, outline: None });
            if let Some(id) = cancelled {
                session.cancelled(&id, out);
            }
        }
        self.events_bytes = self.events_bytes + session.events_bytes() - kept;
    }

    fn told(
        &mut self,
        client: Client,
        message: Bytes,
        about: Option<Id>,
        said: Said,
        now: Instant,
        out: &mut Vec<Action<R>>,
    ) {
        match self.clients.get_mut(&client) {
            Some(Entry::Session(session)) => {
                if let Some(records) = &self.records
                    && said != Said::Other
                    && session.changes(about.as_ref(), &message, said == Said::Result)
                    && let Some(about) = about
                {
                    session.store(records.key(session.secret_id()), now, out);
                    session.hold(message, about, now + STORE_MAX);
                    return self.wake_by(now + STORE_MAX);
                }
                self.deliver(client, message, about, said, now, out);
            }
            Some(Entry::Request(request)) => {
                request.tell(&message, said, now, out);
                if said != Said::Other {
                    self.leave(client, out);
                }
            }
            None => return,
        }
        self.wake_by(now + self.limits.ping);
    }

    /// A message for a session that waits for nothing more.
    fn deliver(
        &mut self,
        client: Client,
        message: Bytes,
        about: Option<Id>,
        said: Said,
        now: Instant,
        out: &mut Vec<Action<R>>,
    ) {
        let Some(Entry::Session(session)) = self.clients.get_mut(&client) else { return };
        let is_opening = session.is_opening(about.as_ref());
        if said != Said::Error && session.tell_id() {
            self.sessions.insert(session.secret_id(), client);
        }
        let kept = session.events_bytes();
        session.tell(message, said, about.as_ref(), &self.limits, now, out);
        self.events_bytes = self.events_bytes + session.events_bytes() - kept;
        if is_opening && said == Said::Error {
            self.end_session(client, out);
        } else {
            self.drop_events();
        }
    }

    /// Answers that waited for a write, or waited long enough.
    fn release(&mut self, client: Client, held: Vec<session::Held>, now: Instant, out: &mut Vec<Action<R>>) {
        for session::Held { message, about, .. } in held {
            self.deliver(client, message, Some(about), Said::Result, now, out);
            self.wake_by(now + self.limits.ping);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "an event with all its members")]
    fn returned(
        &mut self,
        client: Client,
        key: RecordKey,
        id: SessionId,
        peer: Rc<str>,
        random: u32,
        now: Instant,
        out: &mut Vec<Action<R>>,
    ) {
        let Some((who, state)) = self.records.as_mut().and_then(|records| records.take(key)) else { return };
        // 0 is the run that opened the session.
        let session = Session::restored(client, id, who.clone(), (*state).clone(), peer, random | 1, now);
        self.clients.insert(client, Entry::Session(Box::new(session)));
        self.sessions.insert(id, client);
        self.sessions_open += 1;
        out.push(Action::SessionRestored { client, who, state });
        self.wake_by(now + self.limits.session_ttl / RENEWALS);
    }

    fn loaded(&mut self, mut records: Vec<Loaded>, now: Instant, out: &mut Vec<Action<R>>) {
        let room = self.limits.sessions_max.saturating_sub(self.sessions_open);
        if let Some(store) = &mut self.records {
            // Sessions that the last program of this process handed over are open already.
            records.retain(|loaded| self.sessions.of_key(loaded.key).is_none());
            let ttl = self.limits.session_ttl + self.limits.session_ttl / RENEWALS;
            let dropped = store.load(records, ttl, room, now);
            out.extend(dropped.into_iter().map(|key| Action::Unstore { key }));
            self.wake_by(now);
        }
    }

    /// The session continues elsewhere, so its open requests are not refused as those of a session that has ended.
    fn moved(&mut self, key: RecordKey, now: Instant, out: &mut Vec<Action<R>>) {
        let Some(records) = &mut self.records else { return };
        records.take(key);
        let Some(client) = self.sessions.of_key(key) else { return };
        if let Some(Entry::Session(mut session)) = self.take_out(client) {
            session.answer_lost(&self.limits, now, out);
            session.end(Refusal::SessionEnded, out);
            out.push(Action::Left { client, peer: None });
        }
    }

    fn dormant(&self) -> usize {
        self.records.as_ref().map_or(0, Records::dormant)
    }

    fn time_passed(&mut self, now: Instant, out: &mut Vec<Action<R>>) {
        let limits = &self.limits;
        let renew_after = limits.session_ttl / RENEWALS;
        let mut next = None;
        let mut expired = Vec::new();
        let mut released = Vec::new();
        if let Some(records) = &mut self.records {
            let over = records.expire(limits.session_ttl + renew_after, now, &mut next);
            out.extend(over.into_iter().map(|key| Action::Unstore { key }));
        }
        for (client, entry) in &mut self.clients {
            match entry {
                Entry::Session(session) => {
                    if session.is_slow(limits, now) && session.tell_id() {
                        self.sessions.insert(session.secret_id(), *client);
                    }
                    let kept = session.events_bytes();
                    sooner(&mut next, session.time_passed(limits, now, out));
                    self.events_bytes = self.events_bytes + session.events_bytes() - kept;
                    match session.expires(limits) {
                        Some(over) if over <= now => expired.push(*client),
                        over => sooner(&mut next, over),
                    }
                    if let Some(records) = &self.records {
                        let overdue = session.overdue(now);
                        if !overdue.is_empty() {
                            released.push((*client, overdue));
                        }
                        sooner(&mut next, session.held_until());
                        if session.renewal(renew_after).is_some_and(|at| at <= now) {
                            session.store(records.key(session.secret_id()), now, out);
                        }
                        sooner(&mut next, session.renewal(renew_after));
                    }
                }
                Entry::Request(request) => sooner(&mut next, Some(request.time_passed(limits, now, out))),
            }
        }
        self.due = next;
        released.sort_unstable_by_key(|(client, _)| *client);
        for (client, held) in released {
            self.release(client, held, now, out);
        }
        // In the order in which they came, whatever the map's order is.
        expired.sort_unstable();
        for client in expired {
            self.end_session(client, out);
        }
        self.drop_events();
    }

    fn wake_by(&mut self, at: Instant) {
        sooner(&mut self.due, Some(at));
    }

    fn remove(&mut self, client: Client, out: &mut Vec<Action<R>>) -> Option<Entry<R>> {
        let entry = self.take_out(client)?;
        if let Entry::Session(session) = &entry
            && let Some(records) = self.records.as_ref().filter(|_| session.may_be_stored() && !self.is_stopping)
        {
            out.push(Action::Unstore { key: records.key(session.secret_id()) });
        }
        Some(entry)
    }

    /// Without a word about its record.
    fn take_out(&mut self, client: Client) -> Option<Entry<R>> {
        let entry = self.clients.remove(&client)?;
        if let Entry::Session(session) = &entry {
            self.sessions_open -= 1;
            self.events_bytes -= session.events_bytes();
            if let Some(id) = session.id() {
                self.sessions.remove(id);
            }
        }
        Some(entry)
    }

    fn leave(&mut self, client: Client, out: &mut Vec<Action<R>>) {
        let peer = match self.remove(client, out) {
            Some(Entry::Request(request)) => Some(request.into_peer()),
            Some(Entry::Session(_)) => None,
            None => return,
        };
        out.push(Action::Left { client, peer });
    }

    /// The session is over, and every response of it ends.
    fn end_session(&mut self, client: Client, out: &mut Vec<Action<R>>) {
        if let Some(Entry::Session(mut session)) = self.remove(client, out) {
            session.end(Refusal::SessionEnded, out);
            out.push(Action::Left { client, peer: None });
        }
    }

    /// The limit that one session more would exceed.
    fn limit_reached(&self, who: &Who, is_known: bool) -> Option<usize> {
        // Without authentication all clients have one name.
        if is_known {
            let own = self.open_sessions().filter(|session| session.is_named(who)).count();
            let own = own + self.records.as_ref().map_or(0, |records| records.dormant_of(who));
            if own >= self.limits.sessions_of_client_max {
                return Some(self.limits.sessions_of_client_max);
            }
        }
        (self.sessions_open + self.dormant() >= self.limits.sessions_max).then_some(self.limits.sessions_max)
    }

    /// The stored session of a client that was used longest ago. Its client may never come back.
    fn idlest_stored(&self, who: &Who) -> Option<RecordKey> {
        self.records.as_ref()?.idlest(who)
    }

    fn idlest_session(&self, who: &Who) -> Option<Client> {
        let own = self.open_sessions().filter(|session| session.is_named(who));
        own.filter_map(|session| Some((session.idle_since()?, session.client()))).min().map(|(_, client)| client)
    }

    fn make_room_for_session(&mut self, who: &Who, is_known: bool, out: &mut Vec<Action<R>>) {
        if self.limit_reached(who, is_known).is_none() {
            return;
        }
        if let Some(key) = self.idlest_stored(who) {
            self.records.as_mut().and_then(|records| records.take(key));
            out.push(Action::Unstore { key });
        } else if let Some(idlest) = self.idlest_session(who) {
            self.end_session(idlest, out);
        }
    }

    fn open_sessions(&self) -> impl Iterator<Item = &Session<R>> {
        self.clients.values().filter_map(|entry| match entry {
            Entry::Session(session) => Some(&**session),
            Entry::Request(_) => None,
        })
    }

    /// If the events do not fit, drops those of the sessions that keep the most. An eighth of the limit is free then, so
    /// that all sessions are seldom compared.
    fn drop_events(&mut self) {
        if self.events_bytes <= self.limits.events_total_max {
            return;
        }
        let target = self.limits.events_total_max - self.limits.events_total_max / 8;
        let mut by_size: BinaryHeap<(usize, Client)> =
            self.open_sessions().map(|session| (session.events_bytes(), session.client())).collect();
        while let Some((kept, client)) = by_size.pop().filter(|(kept, _)| *kept > 0 && self.events_bytes > target) {
            let Some(Entry::Session(largest)) = self.clients.get_mut(&client) else { continue };
            largest.drop_oldest_event();
            self.events_bytes = self.events_bytes + largest.events_bytes() - kept;
            by_size.push((largest.events_bytes(), client));
        }
    }
}

fn sooner(next: &mut Option<Instant>, at: Option<Instant>) {
    *next = next.iter().copied().chain(at).min();
}

/// The request that this message cancels, if it does.
fn cancelled(message: &[u8]) -> Option<Id> {
    let Ok(Message::Notification { method, params }) = message::parse(message) else { return None };
    if method != notification::CANCELLED {
        return None;
    }
    Id::parse(params.request_id()?.get())
}
