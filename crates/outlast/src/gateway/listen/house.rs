//! All that the connections and the owner of the front share: who is there, what was heard, what has to happen when.
//!
//! Everything runs on one thread, and a borrow never lasts beyond one call: nobody is called back from in here but by
//! wakers, which only note that somebody is to be polled.

use std::{
    cell::RefCell,
    collections::VecDeque,
    hash::BuildHasher,
    net::IpAddr,
    rc::Rc,
    task::{Context, Poll, Waker},
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use outlast_core::{
    gateway::{Front, Said, Who},
    message::{self, Id, Message, Outline},
};
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::{
    Auth, Counts, Heard, Limits, Page, PageAnswer, Refused,
    session::{NoStream, Session, ping, sooner},
    socket::{Backlog, Ends, Line, Pass},
    stream::{self, Answer, Content, Place, Reply, Stream},
    words,
};

use crate::journal::{Origin, SessionLabel};

pub type Shared = Rc<RefCell<House>>;

/// Open status pages; one more is refused.
const WATCHERS_MAX: usize = 32;
/// A client of the stateless era has no connection of its own: it counts as there for so long after its last request.
pub const STATELESS_FOR: Duration = Duration::from_secs(300);
/// Clients of the stateless era that are told apart; beyond it those are forgotten that were silent longest.
const STATELESS_MAX: usize = 4096;
/// A reader that took nothing for so long is slow, and is closed before one that has only just been told much.
const SLOW_AFTER: Duration = Duration::from_secs(1);

pub struct House {
    pub limits: Limits,
    heard: VecDeque<Heard>,
    driver: Option<Waker>,
    guests: FxHashMap<u64, Guest>,
    /// By their ids, which nobody but us makes up.
    sessions: FxHashMap<u128, u64>,
    next_client: u64,
    pages: FxHashMap<u64, (Rc<Reply>, Rc<Line>)>,
    next_ticket: u64,
    watchers: FxHashMap<u64, Rc<Stream>>,
    /// Requests that were answered, by client, until the owner has heard that they are over: where each came from.
    answered: FxHashMap<u64, Rc<str>>,
    lines: FxHashMap<u64, Rc<Line>>,
    next_line: u64,
    backlog: Rc<Backlog>,
    /// When each client of the stateless era was last heard, by who and where it is and what it calls itself.
    stateless: FxHashMap<u64, Instant>,
    /// Bytes of bodies that are being read, of all connections.
    pub bodies: usize,
    /// Bytes of events that all sessions keep.
    events_bytes: usize,
    /// When time must be looked at again.
    due: Option<Instant>,
    is_closing: bool,
}

enum Guest {
    Session(Box<Session>),
    Request(Request),
}

impl Guest {
    fn is_session_of(&self, who: &Who) -> bool {
        matches!(self, Guest::Session(session) if session.who.name == who.name)
    }
}

/// One POST of the stateless era.
struct Request {
    way: Way,
    began: Instant,
    peer: Rc<str>,
}

enum Way {
    Quiet(Rc<Reply>, Rc<Line>),
    Events(Rc<Stream>),
}

impl House {
    pub fn new(limits: Limits) -> House {
        House {
            limits,
            heard: VecDeque::new(),
            driver: None,
            guests: FxHashMap::default(),
            sessions: FxHashMap::default(),
            // 0 is nobody, here and among the tickets.
            next_client: 1,
            pages: FxHashMap::default(),
            next_ticket: 1,
            watchers: FxHashMap::default(),
            answered: FxHashMap::default(),
            lines: FxHashMap::default(),
            next_line: 1,
            backlog: Rc::default(),
            stateless: FxHashMap::default(),
            bodies: 0,
            events_bytes: 0,
            due: None,
            is_closing: false,
        }
    }

    // By what right clients are here.

    /// A request of a client came with these credentials.
    pub fn allow(&mut self, place: Place, pass: Rc<Pass>) {
        let Place::Client(client, _) = place else { return };
        let until = pass.until;
        let before = match self.guests.get_mut(&client) {
            Some(Guest::Session(session)) => session.pass.replace(pass).map(|before| before.until),
            Some(Guest::Request(_)) => None,
            None => return,
        };
        if before.map_or(until.is_some(), |before| before != until) {
            let left = until.map(|until| until.duration_since(SystemTime::now()).unwrap_or_default());
            self.hear(Heard::Allowed { client, until: left.map(|left| Instant::now() + left) });
        }
    }

    /// Who may come has changed: sessions whose credentials are no longer good are not served any more. Single requests
    /// end with their connection.
    pub fn check_passes(&mut self, auth: &Auth, now: Instant) {
        let is_over = |session: &Session| session.pass.as_ref().is_none_or(|pass| !pass.is_good(auth));
        let sessions = self.guests.values_mut().filter_map(|guest| match guest {
            Guest::Session(session) if is_over(session) => Some(session),
            _ => None,
        });
        let over: Vec<u64> = sessions
            .map(|session| {
                // The next request with good credentials is told of.
                let until = Some(SystemTime::UNIX_EPOCH);
                session.pass = session
                    .pass
                    .take()
                    .map(|pass| Rc::new(Pass { credentials: pass.credentials.clone(), who: pass.who.clone(), until }));
                session.client
            })
            .collect();
        for client in over {
            self.hear(Heard::Allowed { client, until: Some(now) });
        }
    }

    // What the owner asks.

    pub fn next_heard(&mut self) -> Option<Heard> {
        let heard = self.heard.pop_front();
        if let Some(Heard::Left { client }) = &heard {
            self.answered.remove(client);
        }
        heard
    }

    /// Where a client is, and its session.
    pub fn origin(&self, client: u64) -> Origin {
        match self.guests.get(&client) {
            Some(Guest::Session(session)) => Origin {
                peer: session.peer.clone(),
                session: session.id.map(|id| SessionLabel::Http((id >> 96) as u32)),
            },
            Some(Guest::Request(request)) => Origin { peer: Some(request.peer.clone()), session: None },
            None => Origin { peer: self.answered.get(&client).cloned(), session: None },
        }
    }

    /// A request was refused here.
    pub fn refused(&mut self, refused: Refused) {
        self.hear(Heard::Refused(Box::new(refused)));
    }

    /// Whoever asks in vain is woken when there is something.
    pub fn poll_heard(&mut self, cx: &Context<'_>) -> Poll<Heard> {
        if let Some(heard) = self.next_heard() {
            return Poll::Ready(heard);
        }
        if self.driver.as_ref().is_none_or(|known| !known.will_wake(cx.waker())) {
            self.driver = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    pub fn tell(&mut self, client: u64, message: Bytes, about: Option<&Id>, said: Said, now: Instant) {
        let Some(guest) = self.guests.get_mut(&client) else { return };
        match guest {
            Guest::Session(session) => {
                let opens = session.opening.is_some() && about == session.opening.as_ref();
                if session.id.is_none() && said != Said::Error {
                    let id = mint();
                    session.id = Some(id);
                    self.sessions.insert(id, client);
                }
                if opens && said == Said::Result {
                    session.version = version_of(&message).unwrap_or_default();
                    session.opening = None;
                }
                let kept = session.events_bytes;
                session.tell(message, said, about, &self.limits, now);
                self.events_bytes = self.events_bytes + session.events_bytes - kept;
                if opens && said == Said::Error {
                    self.forget(client);
                } else {
                    self.make_room();
                }
            }
            Guest::Request(request) => {
                let is_answer = said != Said::Other;
                match &request.way {
                    Way::Quiet(reply, _) if is_answer => {
                        let code = if said == Said::Error { error_code(&message) } else { None };
                        let retry_after = words::retry_after(&message, said);
                        reply.tell(Answer::json(words::status_of(code), None, message).with_all(retry_after));
                    }
                    Way::Quiet(..) => {
                        let stream = request.open_events(client, now);
                        stream.put(stream::event(None, &message), self.limits.stream_bytes_max, now);
                    }
                    Way::Events(stream) => {
                        stream.put(stream::event(None, &message), self.limits.stream_bytes_max, now);
                        if is_answer {
                            stream.end();
                        }
                    }
                }
                if is_answer {
                    self.leave(client);
                }
            }
        }
        let ping = now + self.limits.ping;
        self.want(ping);
        self.shed_backlog(now);
    }

    /// Closes slow connections, those with the most waiting bytes first, until the rest fits.
    pub fn shed_backlog(&self, now: Instant) {
        while self.backlog.bytes() > self.limits.responses_max {
            let stalled = self.lines.values().filter(|line| line.waiting() > 0);
            let slow = stalled.filter_map(|line| {
                let stalled_for = line.stalled_for(now)?;
                Some(((stalled_for >= SLOW_AFTER, line.waiting()), line))
            });
            let Some((_, slowest)) = slow.max_by_key(|(rank, _)| *rank) else { return };
            slowest.cut();
        }
    }

    /// The machine has done with this client; nothing of that is heard back.
    pub fn drop_client(&mut self, client: u64) {
        match self.remove(client) {
            Some(Guest::Session(mut session)) => session.end(words::session_ended),
            Some(Guest::Request(Request { way: Way::Quiet(reply, _), .. })) => reply.tell(words::closing()),
            Some(Guest::Request(Request { way: Way::Events(stream), .. })) => stream.end(),
            None => {}
        }
    }

    pub fn answer_page(&mut self, ticket: u64, answer: PageAnswer) {
        let Some((reply, _)) = self.pages.remove(&ticket) else { return };
        let PageAnswer { status, kind, headers, body } = answer;
        reply.tell(Box::new(Answer {
            status,
            session: None,
            kind,
            headers,
            content: Content::Whole(body),
            refused: None,
        }));
    }

    pub fn watch(&mut self, ticket: u64, now: Instant) {
        let Some((reply, line)) = self.pages.remove(&ticket) else { return };
        if self.watchers.len() >= WATCHERS_MAX {
            let message = format!("{WATCHERS_MAX} status pages are open, which is the limit");
            let status = hyper::StatusCode::SERVICE_UNAVAILABLE;
            return reply.tell(Answer::refusal(status, &message).with("retry-after", "10"));
        }
        let stream = Stream::new(line, now);
        // The head of the answer leaves with the first bytes of its body.
        stream.put(Bytes::from_static(stream::PING), self.limits.stream_bytes_max, now);
        reply.tell(Answer::events(None, stream.clone(), Place::Page(ticket)));
        self.watchers.insert(ticket, stream);
        let ping = now + self.limits.ping;
        self.want(ping);
    }

    pub fn has_watchers(&self) -> bool {
        !self.watchers.is_empty()
    }

    /// For one watcher, or for all.
    pub fn publish(&mut self, ticket: Option<u64>, name: &str, data: &str, now: Instant) {
        let frame = stream::named(name, data);
        for (_, stream) in self.watchers.iter().filter(|(key, _)| ticket.is_none_or(|ticket| ticket == **key)) {
            stream.put(frame.clone(), self.limits.stream_bytes_max, now);
        }
        self.shed_backlog(now);
    }

    pub fn counts(&self, now: Instant) -> Counts {
        let sessions = self.guests.values().filter(|guest| matches!(guest, Guest::Session(_))).count();
        let stateless = self.stateless.values().filter(|heard| **heard + STATELESS_FOR > now).count();
        let requests = self.guests.len() - sessions;
        Counts { connections: self.lines.len(), sessions, requests, stateless }
    }

    /// From here on nobody new is served. Streams end; a connection closes when it has given the answer it is at.
    pub fn close(&mut self) {
        self.is_closing = true;
        for guest in self.guests.values_mut() {
            match guest {
                Guest::Session(session) => session.end(words::closing),
                Guest::Request(Request { way: Way::Events(stream), .. }) => stream.end(),
                Guest::Request(Request { way: Way::Quiet(reply, _), .. }) => reply.tell(words::closing()),
            }
        }
        for stream in self.watchers.values() {
            stream.end();
        }
        for line in self.lines.values() {
            line.close();
        }
    }

    pub fn lines(&self) -> impl Iterator<Item = &Rc<Line>> {
        self.lines.values()
    }

    pub fn is_closing(&self) -> bool {
        self.is_closing
    }

    pub fn is_over(&self) -> bool {
        self.lines.is_empty()
    }

    // What connections ask.

    pub fn line_came(&mut self, ends: Ends, now: Instant) -> Option<(u64, Rc<Line>)> {
        if self.lines.len() >= self.limits.connections_max || self.is_closing {
            return None;
        }
        let (key, line) = (self.next_line, Line::new(ends, self.backlog.clone(), now));
        self.close_idlest(&line);
        self.next_line += 1;
        self.lines.insert(key, line.clone());
        let idle = now + self.limits.idle_timeout;
        self.want(idle);
        Some((key, line))
    }

    /// An address that holds too many connections without using them loses the one that was idle longest.
    fn close_idlest(&self, new: &Line) {
        let address = new.peer_ip();
        let idle = self.lines.values().filter(|line| line.peer_ip() == address);
        let idle: Vec<(Instant, &Rc<Line>)> = idle.filter_map(|line| Some((line.idle_since()?, line))).collect();
        if idle.len() >= self.limits.idle_of_address_max
            && let Some((_, line)) = idle.into_iter().min_by_key(|(since, _)| *since)
        {
            line.cut();
        }
    }

    pub fn line_left(&mut self, key: u64) {
        self.lines.remove(&key);
        if self.is_closing {
            self.wake();
        }
    }

    /// The session of that id, if it is this one's.
    pub fn session(&mut self, id: u128, who: &Who, now: Instant) -> Option<&mut Session> {
        let client = self.sessions.get(&id)?;
        match self.guests.get_mut(client) {
            Some(Guest::Session(session)) if std::ptr::eq(&*session.who, who) || *session.who == *who => {
                session.seen = now;
                Some(session)
            }
            _ => None,
        }
    }

    /// An `initialize`. The session has no id before it is answered.
    pub fn open_session(
        &mut self,
        who: Rc<Who>,
        id: Id,
        message: Bytes,
        line: Rc<Line>,
        now: Instant,
    ) -> Result<Exchange, Box<Answer>> {
        let all = self.guests.values().filter(|guest| matches!(guest, Guest::Session(_))).count();
        let own = self.guests.values().filter(|guest| guest.is_session_of(&who)).count();
        // Without authentication all clients have one name.
        let own_max = if line.is_known() { self.limits.sessions_of_client_max } else { usize::MAX };
        for (count, max) in [(own, own_max), (all, self.limits.sessions_max)] {
            if count >= max {
                match self.end_idlest(&who) {
                    true => break,
                    false => return Err(words::too_many_sessions(max)),
                }
            }
        }
        let client = self.next_client();
        let mut session = Session::new(client, who.clone(), now);
        session.opening = Some(id.clone());
        let reply = Rc::new(Reply::default());
        let number = session.post([id], false, reply.clone(), line, now);
        self.guests.insert(client, Guest::Session(Box::new(session)));
        self.hear(Heard::Came { client, front: Front::Session, who: (*who).clone() });
        self.hear(Heard::Said { client, message });
        let soonest = now + self.limits.quiet.min(self.limits.session_ttl);
        self.want(soonest);
        Ok(Exchange { place: Place::Client(client, number), reply })
    }

    /// One request within a session.
    pub fn ask(
        &mut self,
        session: u128,
        id: Id,
        message: Bytes,
        outline: Option<Outline>,
        line: Rc<Line>,
        now: Instant,
    ) -> Option<Exchange> {
        let (client, exchange) = self.post(session, [id], false, line, now)?;
        self.hear_request(client, message, outline);
        Some(exchange)
    }

    /// Requests within a session that came together; the messages are all parts of the batch, in their order.
    pub fn ask_batch(
        &mut self,
        session: u128,
        ids: Vec<Id>,
        messages: Vec<Bytes>,
        line: Rc<Line>,
        now: Instant,
    ) -> Option<Exchange> {
        let (client, exchange) = self.post(session, ids, true, line, now)?;
        self.hear_all(client, messages, now);
        Some(exchange)
    }

    fn post(
        &mut self,
        session: u128,
        ids: impl AsRef<[Id]> + IntoIterator<Item = Id>,
        is_batch: bool,
        line: Rc<Line>,
        now: Instant,
    ) -> Option<(u64, Exchange)> {
        let client = *self.sessions.get(&session)?;
        let Some(Guest::Session(session)) = self.guests.get_mut(&client) else { return None };
        let reply = Rc::new(Reply::default());
        let number = session.post(ids, is_batch, reply.clone(), line, now);
        let quiet = now + self.limits.quiet;
        self.want(quiet);
        Some((client, Exchange { place: Place::Client(client, number), reply }))
    }

    /// What needs no answer.
    pub fn note(&mut self, session: u128, messages: Vec<Bytes>, now: Instant) {
        let Some(client) = self.sessions.get(&session).copied() else { return };
        self.hear_all(client, messages, now);
    }

    /// `info` is what the client says of itself.
    pub fn ask_stateless(
        &mut self,
        who: &Who,
        info: Option<&str>,
        message: Bytes,
        outline: Option<Outline>,
        line: Rc<Line>,
        now: Instant,
    ) -> Exchange {
        self.heard_stateless(who, line.peer_ip(), info, now);
        let client = self.next_client();
        let reply = Rc::new(Reply::default());
        let peer = line.peer().clone();
        self.guests.insert(client, Guest::Request(Request { way: Way::Quiet(reply.clone(), line), began: now, peer }));
        self.hear(Heard::Came { client, front: Front::Request, who: who.clone() });
        self.hear_request(client, message, outline);
        let quiet = now + self.limits.quiet;
        self.want(quiet);
        Exchange { place: Place::Client(client, 0), reply }
    }

    pub fn listen(
        &mut self,
        session: u128,
        last: Option<&str>,
        line: Rc<Line>,
        now: Instant,
    ) -> Result<(Rc<Stream>, Place), NoStream> {
        let client = *self.sessions.get(&session).ok_or(NoStream::Forgotten)?;
        let Some(Guest::Session(session)) = self.guests.get_mut(&client) else { return Err(NoStream::Forgotten) };
        let stream = session.listen(last, line, now)?;
        let ping = now + self.limits.ping;
        self.want(ping);
        Ok(stream)
    }

    /// A client ends its session.
    pub fn end_session(&mut self, id: u128) {
        if let Some(client) = self.sessions.get(&id).copied() {
            self.forget(client);
        }
    }

    pub fn ask_page(&mut self, mut page: Page, line: Rc<Line>) -> Exchange {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        page.ticket = ticket;
        let reply = Rc::new(Reply::default());
        self.pages.insert(ticket, (reply.clone(), line));
        self.hear(Heard::Page(Box::new(page)));
        Exchange { place: Place::Page(ticket), reply }
    }

    /// Whoever asked is gone before it was told anything.
    pub fn asker_left(&mut self, place: Place, now: Instant) {
        match place {
            Place::Page(ticket) => drop(self.pages.remove(&ticket)),
            Place::Client(client, number) => match self.guests.get_mut(&client) {
                // Nobody knows the id of a session whose opening was not answered.
                Some(Guest::Session(session)) if session.id.is_none() => self.leave(client),
                Some(Guest::Session(session)) => session.poster_left(number, now),
                Some(Guest::Request(_)) => self.leave(client),
                None => {}
            },
        }
    }

    pub fn reader_left(&mut self, place: Place, stream: &Rc<Stream>, now: Instant) {
        match place {
            Place::Page(ticket) => drop(self.watchers.remove(&ticket)),
            Place::Client(client, number) => match self.guests.get_mut(&client) {
                Some(Guest::Session(session)) => {
                    session.reader_left(number, stream, now);
                    let over = now + self.limits.session_ttl;
                    self.want(over);
                }
                // In the stateless era to leave is to cancel.
                Some(Guest::Request(_)) => self.leave(client),
                None => {}
            },
        }
    }

    // Time.

    /// Time is to be looked at no later than this.
    pub fn want(&mut self, at: Instant) {
        if self.due.is_none_or(|due| at < due) {
            self.due = Some(at);
            self.wake();
        }
    }

    pub fn sweep(&mut self, now: Instant) {
        let limits = self.limits.clone();
        let mut next = None;
        for line in self.lines.values() {
            match line.deadline(&limits) {
                Some(deadline) if deadline <= now => line.cut(),
                Some(deadline) => sooner(&mut next, deadline),
                None => {}
            }
        }
        let mut expired = Vec::new();
        for (client, guest) in &mut self.guests {
            match guest {
                Guest::Session(session) => {
                    if session.id.is_none() && session.is_slow(&limits, now) {
                        let id = mint();
                        session.id = Some(id);
                        self.sessions.insert(id, *client);
                    }
                    let kept = session.events_bytes;
                    if let Some(at) = session.sweep(&limits, now) {
                        sooner(&mut next, at);
                    }
                    self.events_bytes = self.events_bytes + session.events_bytes - kept;
                    let over = session.seen + limits.session_ttl;
                    match session.is_attended() {
                        true => {}
                        false if over <= now => expired.push(*client),
                        false => sooner(&mut next, over),
                    }
                }
                Guest::Request(request) => {
                    if matches!(request.way, Way::Quiet(..)) && request.began + limits.quiet <= now {
                        let stream = request.open_events(*client, now);
                        stream.put(Bytes::from_static(stream::PING), limits.stream_bytes_max, now);
                    }
                    match &request.way {
                        Way::Quiet(..) => sooner(&mut next, request.began + limits.quiet),
                        Way::Events(stream) => ping(stream, &limits, now, &mut next),
                    }
                }
            }
        }
        for stream in self.watchers.values() {
            ping(stream, &limits, now, &mut next);
        }
        self.due = next;
        for client in expired {
            self.forget(client);
        }
        self.make_room();
    }

    fn heard_stateless(&mut self, who: &Who, peer: Option<IpAddr>, info: Option<&str>, now: Instant) {
        let client = FxBuildHasher.hash_one((&who.name, &who.profile, peer, info));
        if self.stateless.insert(client, now).is_none() && self.stateless.len() > STATELESS_MAX {
            let mut heard: Vec<Instant> = self.stateless.values().copied().collect();
            let (_, middle, _) = heard.select_nth_unstable(STATELESS_MAX / 2);
            let middle = *middle;
            self.stateless.retain(|_, heard| *heard > middle);
        }
    }

    // The house itself.

    fn next_client(&mut self) -> u64 {
        self.next_client += 1;
        self.next_client - 1
    }

    /// What a session says. A request that it cancels has no answer, so what waits for one is let go here.
    fn hear_all(&mut self, client: u64, messages: Vec<Bytes>, now: Instant) {
        for message in messages {
            let id = cancelled(&message);
            self.hear(Heard::Said { client, message });
            if let (Some(id), Some(Guest::Session(session))) = (id, self.guests.get_mut(&client)) {
                let kept = session.events_bytes;
                session.cancelled(&id, now);
                self.events_bytes = self.events_bytes + session.events_bytes - kept;
            }
        }
    }

    fn hear_request(&mut self, client: u64, message: Bytes, outline: Option<Outline>) {
        self.hear(match outline {
            Some(outline) => Heard::Asked { client, message, outline },
            None => Heard::Said { client, message },
        });
    }

    fn hear(&mut self, heard: Heard) {
        self.heard.push_back(heard);
        self.wake();
    }

    fn wake(&mut self) {
        if let Some(waker) = self.driver.take() {
            waker.wake();
        }
    }

    fn remove(&mut self, client: u64) -> Option<Guest> {
        let guest = self.guests.remove(&client)?;
        if let Guest::Session(session) = &guest {
            self.events_bytes -= session.events_bytes;
            if let Some(id) = session.id {
                self.sessions.remove(&id);
            }
        }
        Some(guest)
    }

    /// The client is gone by itself.
    fn leave(&mut self, client: u64) {
        if let Some(guest) = self.remove(client) {
            if let Guest::Request(request) = guest {
                self.answered.insert(client, request.peer);
            }
            self.hear(Heard::Left { client });
        }
    }

    /// The session is over, and whoever waits for something of it is let go.
    fn forget(&mut self, client: u64) {
        if let Some(Guest::Session(mut session)) = self.remove(client) {
            session.end(words::session_ended);
            self.hear(Heard::Left { client });
        }
    }

    /// Makes room for a new session of a client, by ending one of its own; false if it has none, or all are in use.
    fn end_idlest(&mut self, who: &Who) -> bool {
        let idle = self.guests.iter().filter_map(|(client, guest)| match guest {
            Guest::Session(session) if guest.is_session_of(who) && !session.is_attended() => {
                Some((session.seen, *client))
            }
            _ => None,
        });
        let idlest = idle.min();
        idlest.map(|(_, client)| self.forget(client)).is_some()
    }

    /// Events that all sessions keep together are bounded; whoever keeps the most forgets first.
    fn make_room(&mut self) {
        while self.events_bytes > self.limits.events_total_max {
            let sessions = self.guests.values_mut().filter_map(|guest| match guest {
                Guest::Session(session) => Some(session),
                Guest::Request(_) => None,
            });
            let Some(largest) = sessions.max_by_key(|session| session.events_bytes) else { return };
            let kept = largest.events_bytes;
            largest.forget_event();
            self.events_bytes = self.events_bytes + largest.events_bytes - kept;
        }
    }
}

impl Request {
    fn open_events(&mut self, client: u64, now: Instant) -> Rc<Stream> {
        let Way::Quiet(reply, line) = &self.way else { unreachable!("only what is quiet becomes a stream") };
        let stream = Stream::new(line.clone(), now);
        reply.tell(Answer::events(None, stream.clone(), Place::Client(client, 0)));
        self.way = Way::Events(stream.clone());
        stream
    }
}

/// An HTTP request that was handed on and has no answer yet.
pub struct Exchange {
    pub place: Place,
    pub reply: Rc<Reply>,
}

fn error_code(message: &[u8]) -> Option<i64> {
    let Ok(Message::Response { error: Some(error), .. }) = message::parse(message) else { return None };
    message::pick(error, ["code"])?[0]?.get().parse().ok()
}

/// The request that this message cancels, if it does.
fn cancelled(message: &[u8]) -> Option<Id> {
    let Ok(Message::Notification { method, params }) = message::parse(message) else { return None };
    if method != "notifications/cancelled" {
        return None;
    }
    Id::parse(params.request_id()?.get())
}

fn version_of(message: &[u8]) -> Option<String> {
    let Ok(Message::Response { result: Some(result), .. }) = message::parse(message) else { return None };
    message::pick_text(result, "protocolVersion")
}

/// From the operating system: whoever guesses it is somebody else.
pub fn mint() -> u128 {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the operating system has random numbers");
    u128::from_ne_bytes(bytes)
}
