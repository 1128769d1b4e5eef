//! Drives the state machine of the HTTP front: its responses, the connections, and the events for the owner of the
//! front.
//!
//! Everything runs on one thread, and a borrow never lasts beyond one call: only wakers are called from here, and
//! they only schedule a task.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    net::IpAddr,
    rc::Rc,
    sync::{Arc, atomic::AtomicUsize},
    task::{Context, Poll, Waker},
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use hyper::StatusCode;
use outlast_core::{
    count::count,
    front::{
        Action, AnswerKind, Caller, Event, HttpFront, Loaded, NoStream, Posted, Refusal, Session, SessionId, frames,
        record::{Record, RecordKey},
    },
    gateway::{Front, Said, Who},
    message::{self, Id, Message, Outline, Walk},
};
use rustc_hash::FxHashMap;
#[cfg(unix)]
use serde::{Deserialize, Serialize};
use tokio::{net::TcpStream, sync::oneshot};
#[cfg(unix)]
use {
    outlast_core::{front, saved::Octets},
    outlast_os::handover::Handover,
};

use super::{
    Auth, Counts, FrontEvent, Limits, Page, PageAnswer, Refused, answers,
    socket::{Connection, Ends, Pass, Totals},
    stream::{Answer, Content, Owner, Reply},
};
use crate::{
    gateway::session_store::{SessionStore, StoreEvent, record_key},
    state::journal::{Origin, SessionLabel},
};

pub(super) type Shared = Rc<RefCell<FrontDriver>>;

/// Open status pages; further ones are refused.
const WATCHERS_MAX: usize = 32;
/// A reader that read nothing for this long is slow, and is closed before a reader that was only just sent much.
const SLOW_AFTER: Duration = Duration::from_secs(1);
/// Connections that are being closed beside those that count for `connections_max`; at the limit a new one is refused.
const CLOSING_MAX: usize = 64;

pub(super) struct FrontDriver {
    limits: Limits,
    front: HttpFront<Reply>,
    store: Option<Box<dyn SessionStore>>,
    /// Wakers of connections that wait until the store is loaded; `None` once it is.
    loading: Option<Vec<Waker>>,
    /// A buffer that is reused for each event.
    actions: Vec<Action<Reply>>,
    next_client: u64,
    /// The credentials of each session's newest request.
    passes: FxHashMap<u64, Rc<Pass>>,
    /// The addresses of answered single requests, by client, until the owner is told that they ended.
    answered: FxHashMap<u64, Rc<str>>,
    /// Events for the owner.
    heard: VecDeque<FrontEvent>,
    owner: Option<Waker>,
    pages: FxHashMap<u64, Reply>,
    next_ticket: u64,
    /// Streams of status pages, and the time of the last event on each.
    watchers: FxHashMap<u64, (Reply, Instant)>,
    connections: FxHashMap<u64, Rc<Connection>>,
    next_connection: u64,
    totals: Rc<Totals>,
    /// Bytes of bodies that are being read or parsed, of all connections. A thread that parses one releases them.
    bodies: Arc<AtomicUsize>,
    /// When connections and watchers must be checked again.
    due: Option<Instant>,
    /// The same for the state machine.
    front_due: Option<Instant>,
    is_closing: bool,
    /// Wakers of idle connections, while no request may begin.
    held: Option<Vec<Waker>>,
    /// Responses that another replica sends; dropping the sender ends its stream.
    forwards: FxHashMap<u64, oneshot::Sender<()>>,
    next_forward: u64,
    /// The sockets of connections that were handed over, each with the bytes that were read and not used.
    handed_over: Vec<(TcpStream, Bytes)>,
}

impl FrontDriver {
    pub(super) fn new(limits: Limits) -> FrontDriver {
        FrontDriver {
            front: HttpFront::new(limits.of_sessions(), None),
            store: None,
            loading: None,
            limits,
            actions: Vec::new(),
            // 0 is the client on stdin, and stands for no ticket.
            next_client: 1,
            passes: FxHashMap::default(),
            answered: FxHashMap::default(),
            heard: VecDeque::new(),
            owner: None,
            pages: FxHashMap::default(),
            next_ticket: 1,
            watchers: FxHashMap::default(),
            connections: FxHashMap::default(),
            next_connection: 1,
            totals: Rc::default(),
            bodies: Arc::default(),
            due: None,
            front_due: None,
            is_closing: false,
            held: None,
            forwards: FxHashMap::default(),
            next_forward: 1,
            handed_over: Vec::new(),
        }
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(super) fn set_limits(&mut self, limits: Limits, now: Instant) {
        self.handle(Event::Configured(limits.of_sessions()), now);
        self.limits = limits;
        // Under the new limits some connections may have been idle for too long already.
        self.wake_by(now);
    }

    /// To be called before the first connection.
    pub(super) fn keep_sessions(&mut self, store: Box<dyn SessionStore>) {
        self.front = HttpFront::new(self.limits.of_sessions(), Some(record_key));
        self.store = Some(store);
        self.loading = Some(Vec::new());
    }

    pub(super) fn poll_store(&mut self, cx: &mut Context<'_>) {
        while let Some(Poll::Ready(event)) = self.store.as_mut().map(|store| store.poll(cx)) {
            let now = Instant::now();
            match event {
                StoreEvent::Loaded(records) => {
                    self.handle(Event::Loaded { records }, now);
                    self.loading.take().into_iter().flatten().for_each(Waker::wake);
                }
                StoreEvent::Written { client, write, is_ok } => {
                    self.handle(Event::Stored { client, write, is_ok }, now);
                }
                StoreEvent::Note(text) => self.hear(FrontEvent::Note(text)),
            }
        }
    }

    pub(super) fn is_loading(&self) -> bool {
        self.loading.is_some()
    }

    /// Ready when the sessions of an earlier gateway are loaded.
    pub(super) fn poll_loaded(&mut self, cx: &Context<'_>) -> Poll<()> {
        match &mut self.loading {
            Some(waiting) => {
                waiting.push(cx.waker().clone());
                Poll::Pending
            }
            None => Poll::Ready(()),
        }
    }

    fn handle(&mut self, event: Event<Reply>, now: Instant) {
        let mut actions = std::mem::take(&mut self.actions);
        self.front.handle(event, now, &mut actions);
        for action in actions.drain(..) {
            self.act(action);
        }
        self.actions = actions;
        let due = self.front.deadline();
        if due.is_some_and(|due| self.front_due.is_none_or(|known| due < known)) {
            self.front_due = due;
            self.wake();
        }
    }

    fn act(&mut self, action: Action<Reply>) {
        match action {
            Action::SessionCame { client, who } => {
                self.hear(FrontEvent::Came { client, front: Front::Session, who: (*who).clone() });
            }
            Action::SessionRestored { client, who, state } => {
                self.hear(FrontEvent::Restored { client, who: (*who).clone(), state });
            }
            Action::RequestCame { client, who } => {
                self.hear(FrontEvent::Came { client, front: Front::Request, who: (*who).clone() });
            }
            Action::Said { client, message, outline: Some(outline) } => {
                self.hear(FrontEvent::Requested { client, message, outline });
            }
            Action::Said { client, message, outline: None } => self.hear(FrontEvent::Said { client, message }),
            Action::SaidLong { client, message, walk } => self.hear(FrontEvent::SaidLong { client, message, walk }),
            Action::Left { client, peer } => {
                self.passes.remove(&client);
                if let Some(peer) = peer {
                    self.answered.insert(client, peer);
                }
                self.hear(FrontEvent::Left { client });
            }
            Action::Answer { response, session, body, kind } => response.answer(whole(session, body, kind)),
            Action::Refuse { response, why } => response.answer(match why {
                Refusal::SessionEnded => answers::session_ended(),
                Refusal::Stopping => answers::closing(),
            }),
            Action::OpenEvents { response, client, session } => {
                response.answer(Answer::events(session, response.clone(), Owner::Client(client)));
            }
            Action::SendEvent { response, frame, is_missed } => {
                let bytes_max = if is_missed { usize::MAX } else { self.limits.stream_bytes_max };
                response.send(frame, bytes_max);
            }
            Action::Ping { response } => response.ping(),
            Action::EndEvents { response } => response.end(),
            Action::Store { client, key, write, record } => {
                if let Some(store) = &mut self.store {
                    store.put(client, key, write, &record);
                    self.wake();
                }
            }
            Action::Unstore { key } => {
                if let Some(store) = &mut self.store {
                    store.remove(key);
                    self.wake();
                }
            }
        }
    }

    // Credentials.

    /// A request of a session came with these credentials.
    pub(super) fn allow_session(&mut self, client: u64, pass: Rc<Pass>) {
        let until = pass.until;
        let before = self.passes.insert(client, pass).map(|before| before.until);
        if before.map_or(until.is_some(), |before| before != until) {
            self.hear_allowed(client, until);
        }
    }

    /// The same for a single request.
    pub(super) fn allow_request(&mut self, client: u64, pass: &Pass) {
        if pass.until.is_some() {
            self.hear_allowed(client, pass.until);
        }
    }

    fn hear_allowed(&mut self, client: u64, until: Option<SystemTime>) {
        let left = until.map(|until| until.duration_since(SystemTime::now()).unwrap_or_default());
        self.hear(FrontEvent::Allowed { client, until: left.map(|left| Instant::now() + left) });
    }

    /// After a change of the authentication, sessions whose credentials are no longer valid are not served. Single
    /// requests end with their connection.
    pub(super) fn check_passes(&mut self, auth: &Auth, now: Instant) {
        let mut over = Vec::new();
        for (client, pass) in &mut self.passes {
            if !pass.is_good(auth) {
                // The next request with valid credentials is reported.
                let until = Some(SystemTime::UNIX_EPOCH);
                *pass = Rc::new(Pass { credentials: pass.credentials.clone(), who: pass.who.clone(), until });
                over.push(*client);
            }
        }
        for client in over {
            self.hear(FrontEvent::Allowed { client, until: Some(now) });
        }
    }

    /// The same for a request that another replica has checked and forwarded.
    pub(super) fn allow_forwarded(&mut self, client: u64, until: Option<SystemTime>) {
        if until.is_some() {
            self.hear_allowed(client, until);
        }
    }

    // For a cluster.

    /// The record of a session whose home this replica is now.
    pub(super) fn load(&mut self, key: RecordKey, record: Record, now: Instant) {
        let records = vec![Loaded { key, record, age: Duration::ZERO }];
        self.handle(Event::Loaded { records }, now);
    }

    pub(super) fn session_moved(&mut self, key: RecordKey, now: Instant) {
        self.handle(Event::Moved { key }, now);
    }

    /// Stands for the connection of a client to another replica.
    pub(super) fn connection_of_replica(&self, peer: Rc<str>, now: Instant) -> Rc<Connection> {
        Connection::of_replica(peer, self.totals.clone(), now)
    }

    pub(super) fn add_forward(&mut self, left: oneshot::Sender<()>) -> u64 {
        let number = self.next_forward;
        self.next_forward += 1;
        self.forwards.insert(number, left);
        number
    }

    // For the owner of the front.

    pub(super) fn next_heard(&mut self) -> Option<FrontEvent> {
        let heard = self.heard.pop_front();
        if let Some(FrontEvent::Left { client }) = &heard {
            self.answered.remove(client);
        }
        heard
    }

    /// The address of a client, and its session.
    pub(super) fn origin(&self, client: u64) -> Origin {
        match self.front.origin(client) {
            Some((peer, session)) => {
                Origin { peer: Some(peer.clone()), session: session.map(|id| SessionLabel::Http((id >> 96) as u32)) }
            }
            None => Origin { peer: self.answered.get(&client).cloned(), session: None },
        }
    }

    /// Reports a request that was refused here.
    pub(super) fn refused(&mut self, refused: Refused) {
        self.hear(FrontEvent::Refused(Box::new(refused)));
    }

    /// Wakes the polling task when there is an event or an earlier deadline.
    pub(super) fn poll_heard(&mut self, cx: &Context<'_>) -> Poll<FrontEvent> {
        if let Some(heard) = self.next_heard() {
            return Poll::Ready(heard);
        }
        if self.owner.as_ref().is_none_or(|known| !known.will_wake(cx.waker())) {
            self.owner = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.due.into_iter().chain(self.front_due).min()
    }

    pub(super) fn tell(&mut self, client: u64, message: Bytes, about: Option<Id>, said: Said, now: Instant) {
        self.handle(Event::Told { client, message, about, said }, now);
        self.shed_backlog(now);
    }

    /// Closes slow connections, those with the most unsent bytes first, until the rest fits.
    pub(super) fn shed_backlog(&self, now: Instant) {
        while self.totals.unsent() > self.limits.responses_max {
            let waiting = self.connections.values().filter(|connection| connection.waiting() > 0);
            let slow = waiting.filter_map(|connection| {
                let stalled_for = connection.stalled_for(now)?;
                Some(((stalled_for >= SLOW_AFTER, connection.waiting()), connection))
            });
            let Some((_, slowest)) = slow.max_by_key(|(rank, _)| *rank) else { return };
            slowest.cut();
        }
    }

    /// The owner has finished with this client, so its departure is not reported.
    pub(super) fn drop_client(&mut self, client: u64, now: Instant) {
        self.passes.remove(&client);
        self.handle(Event::Dropped { client }, now);
    }

    pub(super) fn answer_page(&mut self, ticket: u64, answer: PageAnswer) {
        let Some(reply) = self.pages.remove(&ticket) else { return };
        let PageAnswer { status, kind, headers, body } = answer;
        reply.answer(Box::new(Answer {
            status,
            session: None,
            kind,
            headers,
            content: Content::Whole(body),
            refused: None,
        }));
    }

    pub(super) fn watch(&mut self, ticket: u64, now: Instant) {
        let Some(reply) = self.pages.remove(&ticket) else { return };
        if self.watchers.len() >= WATCHERS_MAX {
            let message = format!("{WATCHERS_MAX} status pages are open, which is the limit");
            let status = StatusCode::SERVICE_UNAVAILABLE;
            return reply.answer(Answer::refusal(status, &message).with("retry-after", "10"));
        }
        // The head of the answer is sent with the first bytes of its body.
        reply.ping();
        reply.answer(Answer::events(None, reply.clone(), Owner::Page(ticket)));
        self.watchers.insert(ticket, (reply, now));
        self.wake_by(now + self.limits.ping);
    }

    pub(super) fn has_watchers(&self) -> bool {
        !self.watchers.is_empty()
    }

    /// To one watcher, or to all.
    pub(super) fn publish(&mut self, ticket: Option<u64>, name: &str, data: &str, now: Instant) {
        let frame = frames::named(name, data);
        for (key, (reply, fed)) in &mut self.watchers {
            if ticket.is_none_or(|ticket| ticket == *key) {
                reply.send(frame.clone(), self.limits.stream_bytes_max);
                *fed = now;
            }
        }
        self.shed_backlog(now);
    }

    pub(super) fn counts(&self, now: Instant) -> Counts {
        let counts = self.front.counts(now);
        Counts {
            connections: self.connections.len(),
            sessions: counts.sessions,
            sessions_stored: counts.sessions_stored,
            sessions_unrecorded: counts.sessions_unrecorded,
            requests: counts.requests,
            stateless: counts.stateless,
        }
    }

    /// Accepts no more connections. Streams end; a connection closes after its current answer.
    pub(super) fn close(&mut self, now: Instant) {
        self.is_closing = true;
        self.handle(Event::Stopped, now);
        self.store.as_mut().into_iter().for_each(|store| store.close());
        for (reply, _) in self.watchers.values() {
            reply.end();
        }
        for connection in self.connections.values() {
            connection.close();
        }
    }

    pub(super) fn connections(&self) -> impl Iterator<Item = &Rc<Connection>> {
        self.connections.values()
    }

    pub(super) fn is_closing(&self) -> bool {
        self.is_closing
    }

    pub(super) fn is_over(&self) -> bool {
        self.connections.is_empty()
    }

    // For another program.

    /// While requests are held, no connection is accepted and none reads the next request. The requests stay in the
    /// buffers of the system, where another program finds them.
    pub(super) fn hold_requests(&mut self, wanted: bool) {
        match (&mut self.held, wanted) {
            (None, true) => self.held = Some(Vec::new()),
            (Some(_), false) => self.held.take().into_iter().flatten().for_each(Waker::wake),
            _ => {}
        }
    }

    pub(super) fn holds_requests(&self) -> bool {
        self.held.is_some()
    }

    /// Ready when a connection may read its next request.
    pub(super) fn poll_requests_begin(&mut self, cx: &Context<'_>) -> Poll<()> {
        match &mut self.held {
            Some(waiting) => {
                waiting.push(cx.waker().clone());
                Poll::Pending
            }
            None => Poll::Ready(()),
        }
    }

    /// The answer of a connection was sent.
    pub(super) fn connection_rests(&mut self) {
        if self.held.is_some() {
            self.wake();
        }
    }

    /// Why another program cannot take over now.
    pub(super) fn busy(&self) -> Option<String> {
        let serving = self.connections.values().filter(|connection| connection.is_serving()).count();
        if let Some(busy) = self.front.busy() {
            Some(busy.to_string())
        } else if serving > 0 || !self.heard.is_empty() || !self.pages.is_empty() {
            let responses = count(serving.max(1), "HTTP response is", "HTTP responses are");
            Some(format!("{responses} being sent"))
        } else if self.loading.is_some() || self.store.as_ref().is_some_and(|store| store.is_busy()) {
            Some("records of sessions are being written or read".to_owned())
        } else {
            None
        }
    }

    /// Ends all streams, and asks for the socket of each connection.
    pub(super) fn begin_handover(&mut self, now: Instant) {
        self.handle(Event::HandoverBegan, now);
        self.watchers.values().for_each(|(reply, _)| reply.end());
        self.connections.values().for_each(|connection| connection.hand_over(true));
    }

    /// The connections that are left stay; returns the sockets of the others.
    pub(super) fn end_handover(&mut self) -> Vec<(TcpStream, Bytes)> {
        self.connections.values().for_each(|connection| connection.hand_over(false));
        std::mem::take(&mut self.handed_over)
    }

    pub(super) fn handed_over(&mut self, socket: (TcpStream, Bytes)) {
        self.handed_over.push(socket);
    }

    /// The sockets of all connections are there.
    pub(super) fn poll_handed_over(&mut self, cx: &Context<'_>) -> Poll<()> {
        self.owner = Some(cx.waker().clone());
        if self.connections.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    }

    #[cfg(unix)]
    pub(super) fn save(&self, handover: &mut Handover, now: Instant) -> SavedFront {
        let save = |(tcp, unread): &(TcpStream, Bytes)| (handover.keep_tcp(tcp), Octets::of(unread));
        SavedFront {
            connections: self.handed_over.iter().map(save).collect(),
            next_client: self.next_client,
            next_ticket: self.next_ticket,
            front: self.front.sketch(now),
        }
    }

    /// After [`FrontDriver::keep_sessions`].
    #[cfg(unix)]
    pub(super) fn go_on(&mut self, saved: SavedFront, now: Instant) {
        let hash = self.store.is_some().then_some(record_key as fn(SessionId) -> RecordKey);
        self.front = HttpFront::restore(self.limits.of_sessions(), hash, saved.front, now);
        self.front_due = self.front.deadline();
        (self.next_client, self.next_ticket) = (saved.next_client, saved.next_ticket);
    }

    // For connections.

    pub(super) fn connection_came(&mut self, ends: Ends, now: Instant) -> Option<(u64, Rc<Connection>)> {
        if self.is_closing {
            return None;
        }
        let (key, connection) = (self.next_connection, Connection::new(ends, self.totals.clone(), now));
        self.make_room(&connection);
        let staying = self.connections.values().filter(|connection| !connection.is_cut()).count();
        if staying >= self.limits.connections_max || self.connections.len() >= staying + CLOSING_MAX {
            return None;
        }
        self.next_connection += 1;
        self.connections.insert(key, connection.clone());
        self.wake_by(now + self.limits.idle_timeout);
        Some((key, connection))
    }

    /// Closes a connection that waits for a request if the origin of the new one has too many of them. If all places are
    /// taken, it is one of the origin with the most, unless the new one is of that origin.
    fn make_room(&self, new: &Connection) {
        let mut waiting: HashMap<Option<IpAddr>, Vec<(Instant, &Connection)>> = HashMap::new();
        let mut staying = 0;
        for connection in self.connections.values().filter(|connection| !connection.is_cut()) {
            staying += 1;
            if let Some(since) = connection.waits_since() {
                waiting.entry(connection.origin()).or_default().push((since, connection));
            }
        }
        let own = waiting.get(&new.origin()).map_or(0, Vec::len);
        let from = if own >= self.limits.idle_of_address_max {
            waiting.get(&new.origin())
        } else if staying >= self.limits.connections_max {
            waiting.values().max_by_key(|waiting| waiting.len()).filter(|most| most.len() > own)
        } else {
            None
        };
        if let Some((_, connection)) = from.and_then(|waiting| waiting.iter().min_by_key(|(since, _)| *since)) {
            connection.cut();
        }
    }

    pub(super) fn connection_left(&mut self, key: u64) {
        self.connections.remove(&key);
        if self.is_closing || self.held.is_some() {
            self.wake();
        }
    }

    /// Bytes of all bodies that are being read or parsed.
    pub(super) fn bodies(&self) -> &Arc<AtomicUsize> {
        &self.bodies
    }

    /// Opens the session of this id if an earlier gateway stored it for this client.
    pub(super) fn restore(&mut self, id: SessionId, who: &Who, connection: &Connection, now: Instant) {
        if self.front.has_stored()
            && self.front.session(id, who).is_none()
            && let Some(key) = self.front.stored(id, who)
        {
            let (client, peer) = (self.next_client(), connection.peer().clone());
            self.handle(Event::Returned { client, key, id, peer, random: random_id() as u32 }, now);
        }
    }

    /// The session of this id, if it belongs to this client.
    pub(super) fn session(&self, id: SessionId, who: &Who) -> Option<&Session<Reply>> {
        self.front.session(id, who)
    }

    /// A session of that id is open, whichever client it belongs to.
    pub(super) fn has_session(&self, id: SessionId) -> bool {
        self.front.has_session(id)
    }

    /// An `initialize`. Its answer carries the session id.
    pub(super) fn open_session(
        &mut self,
        who: &Rc<Who>,
        id: Id,
        message: Bytes,
        connection: &Rc<Connection>,
        now: Instant,
    ) -> Result<Exchange, Box<Answer>> {
        let is_known = connection.is_known();
        self.front.has_room(who, is_known).map_err(answers::too_many_sessions)?;
        let (client, reply) = (self.next_client(), Reply::new(connection.clone()));
        let (peer, response, random) = (connection.peer().clone(), reply.clone(), random_id());
        let who = who.clone();
        self.handle(Event::Opened { client, who, is_known, peer, id, message, response, random }, now);
        Ok(Exchange { owner: Owner::Client(client), is_session: true, reply })
    }

    /// Requests within a session.
    pub(super) fn post(
        &mut self,
        client: u64,
        requests: Posted,
        connection: &Rc<Connection>,
        now: Instant,
    ) -> Exchange {
        let reply = Reply::new(connection.clone());
        let (peer, response) = (connection.peer().clone(), reply.clone());
        self.handle(Event::Posted { client, peer, requests, response }, now);
        Exchange { owner: Owner::Client(client), is_session: true, reply }
    }

    /// Messages that need no answer.
    pub(super) fn note(&mut self, client: u64, messages: Vec<Bytes>, now: Instant) {
        self.handle(Event::Noted { client, messages }, now);
    }

    /// The same for a long response to a request of the gateway.
    pub(super) fn note_long(&mut self, client: u64, message: Bytes, walk: Box<Walk>, now: Instant) {
        self.handle(Event::NotedLong { client, message, walk }, now);
    }

    /// `info` is the client's description of itself.
    pub(super) fn request(
        &mut self,
        who: &Rc<Who>,
        info: Option<&str>,
        message: Bytes,
        outline: Option<Outline>,
        connection: &Rc<Connection>,
        now: Instant,
    ) -> Exchange {
        let (client, reply) = (self.next_client(), Reply::new(connection.clone()));
        let caller = Caller::of(who, connection.peer_ip(), info);
        let (who, peer, response) = (who.clone(), connection.peer().clone(), reply.clone());
        self.handle(Event::Requested { client, who, caller, peer, message, outline, response }, now);
        Exchange { owner: Owner::Client(client), is_session: false, reply }
    }

    /// A GET. Its response is a stream.
    pub(super) fn listen(
        &mut self,
        id: SessionId,
        who: &Who,
        last: Option<&str>,
        connection: &Rc<Connection>,
        now: Instant,
    ) -> Result<(u64, Box<Answer>), Box<Answer>> {
        self.restore(id, who, connection, now);
        let session = self.session(id, who).ok_or_else(answers::no_such_session)?;
        let (client, stream) = (session.client(), session.stream(last).map_err(answers::no_stream)?);
        let reply = Reply::new(connection.clone());
        self.handle(Event::Listened { client, stream, response: reply.clone() }, now);
        let answer = reply.take().ok_or_else(|| answers::no_stream(NoStream::Forgotten))?;
        Ok((client, answer))
    }

    /// A DELETE.
    pub(super) fn end_session(&mut self, client: u64, now: Instant) {
        self.handle(Event::Ended { client }, now);
    }

    pub(super) fn ask_page(&mut self, mut page: Page, connection: &Rc<Connection>) -> Exchange {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        page.ticket = ticket;
        let reply = Reply::new(connection.clone());
        self.pages.insert(ticket, reply.clone());
        self.hear(FrontEvent::Page(Box::new(page)));
        Exchange { owner: Owner::Page(ticket), is_session: false, reply }
    }

    /// The connection of a request closed before its response began.
    pub(super) fn asker_left(&mut self, owner: Owner, reply: &Reply, now: Instant) {
        match owner {
            Owner::Page(ticket) => drop(self.pages.remove(&ticket)),
            Owner::Forward(number) => drop(self.forwards.remove(&number)),
            Owner::Client(client) => self.handle(Event::AskerLeft { client, response: reply.clone() }, now),
        }
    }

    pub(super) fn reader_left(&mut self, owner: Owner, reply: &Reply, now: Instant) {
        match owner {
            Owner::Page(ticket) => drop(self.watchers.remove(&ticket)),
            Owner::Forward(number) => drop(self.forwards.remove(&number)),
            Owner::Client(client) => self.handle(Event::ReaderLeft { client, response: reply.clone() }, now),
        }
    }

    // Time.

    /// Deadlines must be checked no later than this.
    pub(super) fn wake_by(&mut self, at: Instant) {
        if self.due.is_none_or(|due| at < due) {
            self.due = Some(at);
            self.wake();
        }
    }

    pub(super) fn time_passed(&mut self, now: Instant) {
        let mut next: Option<Instant> = None;
        let mut look_at = |at: Instant| next = Some(next.map_or(at, |known| known.min(at)));
        for connection in self.connections.values() {
            match connection.deadline(&self.limits) {
                Some(deadline) if deadline <= now => connection.cut(),
                Some(deadline) => look_at(deadline),
                None => {}
            }
        }
        for (reply, fed) in self.watchers.values_mut() {
            if *fed + self.limits.ping <= now {
                reply.ping();
                *fed = now;
            }
            look_at(*fed + self.limits.ping);
        }
        self.due = next;
        self.front_due = None;
        self.handle(Event::TimePassed, now);
    }

    fn next_client(&mut self) -> u64 {
        self.next_client += 1;
        self.next_client - 1
    }

    fn hear(&mut self, heard: FrontEvent) {
        self.heard.push_back(heard);
        self.wake();
    }

    fn wake(&mut self) {
        if let Some(waker) = self.owner.take() {
            waker.wake();
        }
    }
}

/// The front as saved state.
#[cfg(unix)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedFront {
    /// Descriptors of connections, each with the bytes that were read and not used.
    pub(super) connections: Vec<(i32, Octets)>,
    next_client: u64,
    next_ticket: u64,
    front: front::Saved,
}

/// An HTTP request that was forwarded and has no answer yet.
pub(super) struct Exchange {
    pub owner: Owner,
    pub is_session: bool,
    pub reply: Reply,
}

/// An answer as one body.
fn whole(session: Option<SessionId>, body: Bytes, kind: AnswerKind) -> Box<Answer> {
    let (status, retry_after) = match kind {
        AnswerKind::OfSession(said) => (StatusCode::OK, answers::retry_after(&body, said)),
        AnswerKind::Batch => (StatusCode::OK, None),
        AnswerKind::Stateless(said) => {
            let code = if said == Said::Error { error_code(&body) } else { None };
            (answers::status_of(code), answers::retry_after(&body, said))
        }
    };
    Answer::json(status, session, body).with_all(retry_after)
}

fn error_code(message: &[u8]) -> Option<i64> {
    let Ok(Message::Response { error: Some(error), .. }) = message::parse_again(message) else { return None };
    message::pick(error, ["code"])?[0]?.get().parse().ok()
}

/// 128 unguessable bits from the operating system.
pub(super) fn random_id() -> u128 {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the operating system has random numbers");
    u128::from_ne_bytes(bytes)
}
