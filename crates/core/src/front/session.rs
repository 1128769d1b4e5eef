//! One session of the handshake era: its open requests, its streams, and the events that a client may have missed.

use std::{
    collections::{HashMap, VecDeque},
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::{BufMut, Bytes, BytesMut};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use super::{
    Action, AnswerKind, Limits, Refusal, SessionId,
    frames::{self, EventId},
    record::{Change, RECORD_BYTES_MAX, Record, RecordKey, SessionState},
    saved::{SavedEvent, SavedSession, SavedStored},
    sooner,
};
use crate::{
    gateway::{Client, Said, SavedWho, Who},
    mcp::revision,
    message::{self, Id, Message},
    saved::{Moment, Octets},
};

/// The stream that belongs to no request.
const GENERAL: u32 = 0;
/// General streams that one session may have open; with one more the oldest ends. Each message goes to the newest.
const GENERAL_MAX: usize = 4;
/// [`Limits::quiet`] of revisions whose streams begin with an event that has only an id, unless that is shorter. A client can resume the stream after a restart of the
/// gateway. Without a response, some clients end their whole session when the connection breaks.
const QUIET_PRIMED: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Session<R> {
    client: Client,
    id: SessionId,
    /// The client was told the id, with the first words of the answer to `initialize`.
    is_id_told: bool,
    who: Rc<Who>,
    /// Where its newest request came from.
    peer: Rc<str>,
    /// The `initialize` that has no answer yet.
    opening: Option<Id>,
    /// As `initialize` was answered.
    version: String,
    posts: FxHashMap<u32, Post<R>>,
    /// By request, the POST it came with.
    requests: FxHashMap<Id, u32>,
    next_post: u32,
    general: VecDeque<Stream<R>>,
    /// The last event of the general stream that was sent.
    general_sent: u64,
    events: VecDeque<KeptEvent>,
    events_bytes: usize,
    /// The upper half is a number of this run of the gateway: 0 in the one that opened the session, random in a later one.
    next_event: u64,
    /// When something was last heard of it.
    seen: Instant,
    stored: Stored,
}

/// What is stored of a session, and whether it is.
#[derive(Debug)]
struct Stored {
    state: SessionState,
    outcome: Outcome,
    /// Of the newest write, as the session numbers them.
    write: u32,
    /// When that began.
    since: Instant,
    /// Open requests that change what is stored.
    changes: Vec<(Id, Change)>,
    /// Answers that wait for a write.
    held: Vec<Held>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// Nothing was written yet, or records are not kept.
    None,
    Stored,
    /// The newest write failed or takes too long.
    Failed,
    /// The client's `initialize` is longer than a record may be: nothing is ever written.
    TooLong,
}

#[derive(Debug)]
pub(super) struct Held {
    pub message: Bytes,
    pub about: Id,
    write: u32,
    until: Instant,
}

/// A POST with requests, until each has its answer.
#[derive(Debug)]
struct Post<R> {
    /// Requests of it without an answer.
    open: usize,
    is_batch: bool,
    is_opening: bool,
    /// Its request, unless it is a batch. Part of the event ids.
    request: Option<Id>,
    /// Answers that wait for the others of their batch.
    answers: Vec<Bytes>,
    /// The event with its newest answer; 0 if there is none.
    answered: u64,
    state: PostState<R>,
}

#[derive(Debug)]
enum PostState<R> {
    /// The response has not begun.
    Quiet { response: R, since: Instant },
    /// The response is a stream, which may have lost its reader.
    Events(Option<Stream<R>>),
    /// The client left before there was an event to resume from.
    Lost,
}

#[derive(Debug)]
struct Stream<R> {
    response: R,
    /// When something was last sent on it.
    fed: Instant,
}

#[derive(Debug)]
struct KeptEvent {
    stream: u32,
    number: u64,
    /// The event with the answer before it in its stream, which may not be kept any more; 0 if there is none. Only a batch
    /// has several answers.
    answered: u64,
    frame: Bytes,
}

impl KeptEvent {
    fn save(&self) -> SavedEvent {
        SavedEvent { stream: self.stream, number: self.number, answered: self.answered, frame: Octets::of(&self.frame) }
    }

    fn restore(saved: SavedEvent) -> KeptEvent {
        KeptEvent { stream: saved.stream, number: saved.number, answered: saved.answered, frame: saved.frame.bytes() }
    }
}

/// Which stream a GET asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamStart {
    /// The events of this stream after this one, and all that follow.
    After { stream: u32, number: u64 },
    /// The stream of a request that was lost with an earlier run of the gateway: a new one with an error as its answer.
    Lost(Id),
}

/// Why there is no such stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoStream {
    NotAnId,
    Forgotten,
}

impl<R: Clone + PartialEq> Session<R> {
    /// `opening` is the id of the `initialize` that `response` belongs to.
    pub(super) fn opened(
        client: Client,
        id: SessionId,
        who: Rc<Who>,
        peer: Rc<str>,
        opening: Id,
        response: R,
        now: Instant,
    ) -> Session<R> {
        let mut session = Session::new(client, id, who, peer.clone(), now);
        session.opening = Some(opening.clone());
        session.post([opening], false, peer, response, now);
        session
    }

    /// A session that an earlier run of the gateway opened. `run` tells its events from those of all other runs.
    pub(super) fn restored(
        client: Client,
        id: SessionId,
        who: Rc<Who>,
        state: SessionState,
        peer: Rc<str>,
        run: u32,
        now: Instant,
    ) -> Session<R> {
        let mut session = Session::new(client, id, who, peer, now);
        session.is_id_told = true;
        session.version = state.version.to_string();
        session.next_event = u64::from(run) << 32 | 1;
        session.general_sent = session.next_event - 1;
        session.stored.state = state;
        session.stored.outcome = Outcome::Stored;
        session
    }

    fn new(client: Client, id: SessionId, who: Rc<Who>, peer: Rc<str>, now: Instant) -> Session<R> {
        Session {
            client,
            id,
            is_id_told: false,
            who,
            peer,
            opening: None,
            version: String::new(),
            posts: FxHashMap::default(),
            requests: FxHashMap::default(),
            next_post: GENERAL + 1,
            general: VecDeque::new(),
            general_sent: 0,
            events: VecDeque::new(),
            events_bytes: 0,
            next_event: 1,
            seen: now,
            stored: Stored {
                state: SessionState::default(),
                outcome: Outcome::None,
                write: 0,
                since: now,
                changes: Vec::new(),
                held: Vec::new(),
            },
        }
    }

    pub fn client(&self) -> Client {
        self.client
    }

    /// As `initialize` was answered; later requests may not name the revision.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Whether a request with this id is open.
    pub fn has(&self, id: &Id) -> bool {
        self.requests.contains_key(id)
    }

    /// The stream of a GET: the general one, or the one that has the event of this id.
    pub fn stream(&self, last: Option<&str>) -> Result<StreamStart, NoStream> {
        let general = StreamStart::After { stream: GENERAL, number: self.general_sent };
        let Some(last) = last else { return Ok(general) };
        let EventId { stream, number, request } = EventId::read(last).ok_or(NoStream::NotAnId)?;
        if number >> 32 != self.next_event >> 32 {
            // Events of an earlier run are not kept. What this run has for the general stream is all new to the client. A
            // request with the same id that is open now gets its own answer.
            let lost = request.filter(|id| stream != GENERAL && !self.requests.contains_key(id));
            return Ok(lost.map_or(general, StreamStart::Lost));
        }
        let is_open = stream == GENERAL || self.posts.contains_key(&stream);
        let is_known = is_open || self.events.iter().any(|event| event.stream == stream);
        match is_known && !self.has_dropped_answer(stream, number) {
            true => Ok(StreamStart::After { stream, number }),
            false => Err(NoStream::Forgotten),
        }
    }

    /// Whether an answer came in this stream after this event and is not kept any more. A client that continued the stream
    /// there would wait for that answer for ever.
    fn has_dropped_answer(&self, stream: u32, number: u64) -> bool {
        let next = self.events.iter().find(|event| event.stream == stream && event.number > number);
        let answered = match next {
            Some(event) => event.answered,
            None => self.posts.get(&stream).map_or(0, |post| post.answered),
        };
        answered > number
    }

    /// Nothing before the client was told.
    pub(super) fn id(&self) -> Option<SessionId> {
        self.is_id_told.then_some(self.id)
    }

    pub(super) fn secret_id(&self) -> SessionId {
        self.id
    }

    /// True the first time.
    pub(super) fn tell_id(&mut self) -> bool {
        !std::mem::replace(&mut self.is_id_told, true)
    }

    pub(super) fn peer(&self) -> &Rc<str> {
        &self.peer
    }

    pub(super) fn is_of(&self, who: &Who) -> bool {
        std::ptr::eq(&*self.who, who) || *self.who == *who
    }

    /// Whether it belongs to a client of this name, with whatever rights.
    pub(super) fn is_named(&self, who: &Who) -> bool {
        self.who.name == who.name
    }

    /// One copy for all sessions of a client.
    pub(super) fn share_who(&mut self, known: &mut HashMap<String, Rc<Who>>) {
        match known.get(&self.who.name) {
            Some(who) if **who == *self.who => self.who = who.clone(),
            _ => drop(known.insert(self.who.name.clone(), self.who.clone())),
        }
    }

    pub(super) fn is_opening(&self, about: Option<&Id>) -> bool {
        self.opening.is_some() && self.opening.as_ref() == about
    }

    pub(super) fn events_bytes(&self) -> usize {
        self.events_bytes
    }

    pub(super) fn heard(&mut self, now: Instant) {
        self.seen = now;
    }

    /// The client's own `initialize`, to be stored.
    pub(super) fn keep_opening(&mut self, initialize: &[u8]) {
        match initialize.len() <= RECORD_BYTES_MAX {
            true => self.stored.state.initialize = String::from_utf8_lossy(initialize).into(),
            false => self.stored.outcome = Outcome::TooLong,
        }
    }

    /// An open request that changes what is stored, if its answer is a result.
    pub(super) fn add_change(&mut self, id: Id, change: Change) {
        if self.stored.outcome != Outcome::TooLong {
            self.stored.changes.push((id, change));
        }
    }

    /// True if the request was one that changes what is stored, and its answer must wait until that is written.
    pub(super) fn changes(&mut self, about: Option<&Id>, message: &[u8], is_result: bool) -> bool {
        let Some(about) = about.filter(|_| self.stored.outcome != Outcome::TooLong) else { return false };
        if self.is_opening(Some(about)) {
            self.stored.state.version = version_of(message).unwrap_or_default().into();
            return is_result;
        }
        let Some(at) = self.stored.changes.iter().position(|(id, _)| id == about) else { return false };
        let (_, change) = self.stored.changes.remove(at);
        if is_result {
            self.stored.state.apply(change);
        }
        is_result
    }

    /// Begins another write of what is stored.
    pub(super) fn store(&mut self, key: RecordKey, now: Instant, out: &mut Vec<Action<R>>) {
        self.stored.write += 1;
        self.stored.since = now;
        let record = Record { who: (*self.who).clone(), state: self.stored.state.clone() };
        out.push(Action::Store { client: self.client, key, write: self.stored.write, record });
    }

    /// An answer waits for the newest write.
    pub(super) fn hold(&mut self, message: Bytes, about: Id, until: Instant) {
        self.stored.held.push(Held { message, about, write: self.stored.write, until });
    }

    /// A write ended; the answers that waited for it.
    pub(super) fn was_stored(&mut self, write: u32, is_ok: bool) -> Vec<Held> {
        if write == self.stored.write {
            self.stored.outcome = if is_ok { Outcome::Stored } else { Outcome::Failed };
        }
        self.take_held(|held| held.write <= write)
    }

    /// The answers that have waited long enough; their session is served without a record.
    pub(super) fn overdue(&mut self, now: Instant) -> Vec<Held> {
        let overdue = self.take_held(|held| held.until <= now);
        if !overdue.is_empty() {
            self.stored.outcome = Outcome::Failed;
        }
        overdue
    }

    fn take_held(&mut self, is_due: impl Fn(&Held) -> bool) -> Vec<Held> {
        if self.stored.held.is_empty() {
            return Vec::new();
        }
        let (due, rest) = std::mem::take(&mut self.stored.held).into_iter().partition(is_due);
        self.stored.held = rest;
        due
    }

    pub(super) fn held_until(&self) -> Option<Instant> {
        self.stored.held.iter().map(|held| held.until).min()
    }

    /// A record may be in the store.
    pub(super) fn may_be_stored(&self) -> bool {
        self.stored.write > 0 || self.stored.outcome == Outcome::Stored
    }

    pub(super) fn is_unrecorded(&self) -> bool {
        matches!(self.stored.outcome, Outcome::Failed | Outcome::TooLong)
    }

    /// When its record is to be written again, so that the store knows that the session was used.
    pub(super) fn renewal(&self, after: Duration) -> Option<Instant> {
        let was_used = self.idle_since().is_none_or(|since| since > self.stored.since);
        self.renewal_if_used(after).filter(|_| was_used)
    }

    /// The same for a session that is just used.
    pub(super) fn renewal_if_used(&self, after: Duration) -> Option<Instant> {
        self.may_be_stored().then(|| self.stored.since + after)
    }

    /// A POST with these requests.
    pub(super) fn post(
        &mut self,
        ids: impl AsRef<[Id]> + IntoIterator<Item = Id>,
        is_batch: bool,
        peer: Rc<str>,
        response: R,
        now: Instant,
    ) {
        let number = self.next_post;
        self.next_post += 1;
        self.peer = peer;
        let post = Post {
            open: ids.as_ref().len(),
            is_batch,
            is_opening: self.is_opening(ids.as_ref().first()),
            request: ids.as_ref().first().filter(|_| !is_batch).cloned(),
            answers: Vec::new(),
            answered: 0,
            state: PostState::Quiet { response, since: now },
        };
        self.posts.insert(number, post);
        self.requests.extend(ids.into_iter().map(|id| (id, number)));
        self.seen = now;
    }

    /// A message of the gateway. The answer to a request that is not open any more is dropped.
    pub(super) fn tell(
        &mut self,
        message: Bytes,
        said: Said,
        about: Option<&Id>,
        limits: &Limits,
        now: Instant,
        out: &mut Vec<Action<R>>,
    ) {
        if said == Said::Result && self.is_opening(about) {
            self.version = version_of(&message).unwrap_or_default();
            self.opening = None;
        }
        let number = about.and_then(|id| self.requests.get(id)).copied();
        let is_answer = said != Said::Other;
        let Some((number, post)) = number.and_then(|number| Some((number, self.posts.get_mut(&number)?))) else {
            if !is_answer {
                self.send(GENERAL, None, &message, limits, now, out);
            }
            return;
        };
        let request = post.request.clone().filter(|_| !is_answer);
        if let (true, Some(id)) = (is_answer, about) {
            self.requests.remove(id);
            post.open -= 1;
        }
        let is_over = post.open == 0;
        match &mut post.state {
            PostState::Quiet { response, .. } if is_over => {
                let (body, kind) = match post.is_batch {
                    true => (join(&post.answers, &message), AnswerKind::Batch),
                    false => (message, AnswerKind::OfSession(said)),
                };
                let session = Some(self.id).filter(|_| post.is_opening && self.is_id_told);
                out.push(Action::Answer { response: response.clone(), session, body, kind });
            }
            PostState::Quiet { .. } if is_answer => post.answers.push(message),
            PostState::Quiet { .. } => {
                self.open_events(number, limits, now, out);
                self.send(number, request, &message, limits, now, out);
            }
            PostState::Events(_) => {
                self.send(number, request, &message, limits, now, out);
                if is_answer {
                    self.note_answer(number);
                }
            }
            PostState::Lost if !is_answer => self.send(GENERAL, None, &message, limits, now, out),
            PostState::Lost => {}
        }
        if is_over && let Some(Post { state: PostState::Events(Some(stream)), .. }) = self.remove_post(number) {
            out.push(Action::EndEvents { response: stream.response });
        }
    }

    /// The tables of an idle session are freed: most sessions are idle, and there may be thousands.
    fn remove_post(&mut self, number: u32) -> Option<Post<R>> {
        let post = self.posts.remove(&number);
        if self.posts.is_empty() {
            self.posts = FxHashMap::default();
            self.requests = FxHashMap::default();
        }
        post
    }

    /// The client cancelled this request: nothing more comes for it. A POST that has no other ends without an answer.
    pub(super) fn cancelled(&mut self, id: &Id, out: &mut Vec<Action<R>>) {
        let Some(number) = self.requests.remove(id) else { return };
        self.stored.changes.retain(|(open, _)| open != id);
        let Some(post) = self.posts.get_mut(&number) else { return };
        post.open -= 1;
        if post.open > 0 {
            return;
        }
        let Some(mut post) = self.remove_post(number) else { return };
        match (post.state, post.answers.pop()) {
            (PostState::Quiet { response, .. }, Some(last)) => {
                let (body, kind) = (join(&post.answers, &last), AnswerKind::Batch);
                out.push(Action::Answer { response, session: None, body, kind });
            }
            (PostState::Quiet { response, .. }, None) => {
                // Without an event there is no id, so the client does not try to resume it.
                out.push(Action::OpenEvents { response: response.clone(), client: self.client, session: None });
                out.push(Action::EndEvents { response });
            }
            (PostState::Events(stream), _) => {
                if !post.is_batch {
                    // A client that resumed it would wait for an answer, again and again.
                    self.drop_events_of(number);
                }
                out.extend(stream.map(|stream| Action::EndEvents { response: stream.response }));
            }
            (PostState::Lost, _) => {}
        }
    }

    /// The GET of a stream that [`Session::stream`] found: what the client missed is sent first.
    pub(super) fn listen(&mut self, start: StreamStart, response: R, now: Instant, out: &mut Vec<Action<R>>) {
        self.seen = now;
        out.push(Action::OpenEvents { response: response.clone(), client: self.client, session: None });
        let (number, after) = match start {
            StreamStart::After { stream, number } => (stream, number),
            StreamStart::Lost(request) => {
                // Without an event id: a client that misses this answer returns with the old id and gets it again.
                let frame = frames::event(None, &lost_in_restart(&request));
                out.push(Action::SendEvent { response: response.clone(), frame, is_missed: true });
                return out.push(Action::EndEvents { response });
            }
        };
        for event in self.events.iter().filter(|event| event.stream == number && event.number > after) {
            out.push(Action::SendEvent { response: response.clone(), frame: event.frame.clone(), is_missed: true });
        }
        let stream = Stream { response, fed: now };
        if number == GENERAL {
            self.general_sent = self.next_event - 1;
            self.general.push_back(stream);
            if self.general.len() > GENERAL_MAX
                && let Some(oldest) = self.general.pop_front()
            {
                out.push(Action::EndEvents { response: oldest.response });
            }
        } else if let Some(post) = self.posts.get_mut(&number) {
            let state = std::mem::replace(&mut post.state, PostState::Events(Some(stream)));
            if let PostState::Events(Some(older)) = state {
                out.push(Action::EndEvents { response: older.response });
            }
        } else {
            out.push(Action::EndEvents { response: stream.response });
        }
    }

    /// The reader of a stream is gone. In this era that cancels nothing.
    pub(super) fn reader_left(&mut self, response: &R, now: Instant) {
        self.seen = now;
        self.general.retain(|open| open.response != *response);
        for post in self.posts.values_mut() {
            if let PostState::Events(reader) = &mut post.state
                && reader.as_ref().is_some_and(|open| open.response == *response)
            {
                *reader = None;
            }
        }
    }

    /// The client of a POST left before the response began.
    pub(super) fn asker_left(&mut self, left: &R, now: Instant) {
        self.seen = now;
        for post in self.posts.values_mut() {
            match &post.state {
                PostState::Quiet { response, .. } | PostState::Events(Some(Stream { response, .. }))
                    if response == left =>
                {
                    post.state = PostState::Lost;
                }
                _ => {}
            }
        }
    }

    /// How long a request may wait for its answer before its response becomes a stream.
    pub(super) fn quiet(&self, limits: &Limits) -> Duration {
        match self.version.as_str() >= revision::FIRST_WITH_PRIMING {
            true => limits.quiet.min(QUIET_PRIMED),
            false => limits.quiet,
        }
    }

    /// Some request has waited so long that its answer becomes a stream.
    pub(super) fn is_slow(&self, limits: &Limits, now: Instant) -> bool {
        let quiet = self.quiet(limits);
        let is_slow = |post: &Post<R>| matches!(post.state, PostState::Quiet { since, .. } if since + quiet <= now);
        self.posts.values().any(is_slow)
    }

    /// Opens streams for requests that take long, and sends pings. Says when to look again.
    pub(super) fn time_passed(&mut self, limits: &Limits, now: Instant, out: &mut Vec<Action<R>>) -> Option<Instant> {
        let mut next = None;
        let mut slow = Vec::new();
        let quiet = self.quiet(limits);
        for (number, post) in &self.posts {
            match &post.state {
                PostState::Quiet { since, .. } if *since + quiet <= now => slow.push(*number),
                PostState::Quiet { since, .. } => sooner(&mut next, Some(*since + quiet)),
                PostState::Events(_) | PostState::Lost => {}
            }
        }
        slow.sort_unstable();
        for number in slow {
            self.open_events(number, limits, now, out);
        }
        let posts = self.posts.values_mut().filter_map(|post| match &mut post.state {
            PostState::Events(stream) => stream.as_mut(),
            PostState::Quiet { .. } | PostState::Lost => None,
        });
        for stream in posts.chain(&mut self.general) {
            if stream.fed + limits.ping <= now {
                out.push(Action::Ping { response: stream.response.clone() });
                stream.fed = now;
            }
            sooner(&mut next, Some(stream.fed + limits.ping));
        }
        next
    }

    /// When it ends if nothing more is heard of it; never while a response is open.
    pub(super) fn expires(&self, limits: &Limits) -> Option<Instant> {
        Some(self.idle_since()? + limits.session_ttl)
    }

    /// Nothing while a response is open.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let is_open = |post: &Post<R>| matches!(post.state, PostState::Quiet { .. } | PostState::Events(Some(_)));
        (self.general.is_empty() && !self.posts.values().any(is_open)).then_some(self.seen)
    }

    /// Answers every open request: its outcome is unknown.
    pub(super) fn answer_lost(&mut self, limits: &Limits, now: Instant, out: &mut Vec<Action<R>>) {
        let mut open: Vec<(u32, Id)> = self.requests.iter().map(|(id, number)| (*number, id.clone())).collect();
        open.sort_unstable_by(|one, other| {
            one.0.cmp(&other.0).then_with(|| one.1.to_string().cmp(&other.1.to_string()))
        });
        for (_, id) in open {
            self.tell(lost_in_restart(&id), Said::Error, Some(&id), limits, now, out);
        }
    }

    /// Ends every response; one that has not begun is refused.
    pub(super) fn end(&mut self, why: Refusal, out: &mut Vec<Action<R>>) {
        let mut posts: Vec<(u32, Post<R>)> = self.posts.drain().collect();
        posts.sort_unstable_by_key(|(number, _)| *number);
        for (_, post) in posts {
            match post.state {
                PostState::Quiet { response, .. } => out.push(Action::Refuse { response, why }),
                PostState::Events(stream) => {
                    out.extend(stream.map(|stream| Action::EndEvents { response: stream.response }));
                }
                PostState::Lost => {}
            }
        }
        out.extend(self.general.drain(..).map(|stream| Action::EndEvents { response: stream.response }));
        self.requests.clear();
        self.stored.held.clear();
    }

    /// Ends the streams that belong to no request.
    pub(super) fn end_general(&mut self, out: &mut Vec<Action<R>>) {
        out.extend(self.general.drain(..).map(|stream| Action::EndEvents { response: stream.response }));
    }

    /// A request is open, or its answer waits for the store.
    pub(super) fn is_busy(&self) -> bool {
        self.opening.is_some() || !self.posts.is_empty() || !self.stored.held.is_empty()
    }

    /// Without its streams: they end before. A request with an answer that its client cannot get any more is over.
    pub(super) fn save(&self, now: Instant) -> SavedSession {
        let Stored { state, outcome, write, since, .. } = &self.stored;
        SavedSession {
            client: self.client,
            id: format!("{:032x}", self.id),
            who: SavedWho::of(&self.who),
            peer: self.peer.to_string(),
            version: self.version.clone(),
            next_post: self.next_post,
            general_sent: self.general_sent,
            events: self.events.iter().map(KeptEvent::save).collect(),
            next_event: self.next_event,
            seen: Moment::of(self.seen, now),
            stored: SavedStored {
                version: state.version.to_string(),
                initialize: state.initialize.to_string(),
                level: state.level.as_deref().map(str::to_owned),
                watches: state.watches.iter().map(|uri| uri.to_string()).collect(),
                outcome: *outcome,
                write: *write,
                since: Moment::of(*since, now),
            },
        }
    }

    /// None if its id is not one.
    pub(super) fn restore(saved: SavedSession, now: Instant) -> Option<Session<R>> {
        let id = SessionId::from_str_radix(&saved.id, 16).ok()?;
        let events: VecDeque<KeptEvent> = saved.events.into_iter().map(KeptEvent::restore).collect();
        let stored = saved.stored;
        Some(Session {
            is_id_told: true,
            version: saved.version,
            next_post: saved.next_post,
            general_sent: saved.general_sent,
            events_bytes: events.iter().map(|event| event.frame.len()).sum(),
            events,
            next_event: saved.next_event,
            seen: saved.seen.at(now),
            stored: Stored {
                state: SessionState {
                    version: stored.version.into(),
                    initialize: stored.initialize.into(),
                    level: stored.level.map(Into::into),
                    watches: stored.watches.into_iter().map(Into::into).collect(),
                },
                outcome: stored.outcome,
                write: stored.write,
                since: stored.since.at(now),
                changes: Vec::new(),
                held: Vec::new(),
            },
            ..Session::new(saved.client, id, Rc::new(saved.who.who()), saved.peer.into(), now)
        })
    }

    pub(super) fn drop_oldest_event(&mut self) {
        if let Some(oldest) = self.events.pop_front() {
            self.events_bytes -= oldest.frame.len();
        }
    }

    fn drop_events_of(&mut self, number: u32) {
        self.events.retain(|event| event.stream != number);
        self.events_bytes = self.events.iter().map(|event| event.frame.len()).sum();
    }

    /// The response becomes a stream of events; answers of its batch that waited are the first of them.
    fn open_events(&mut self, number: u32, limits: &Limits, now: Instant, out: &mut Vec<Action<R>>) {
        let Some(post) = self.posts.get_mut(&number) else { return };
        let PostState::Quiet { response, .. } = &post.state else { return };
        let response = response.clone();
        let session = Some(self.id).filter(|_| post.is_opening && self.is_id_told);
        out.push(Action::OpenEvents { response: response.clone(), client: self.client, session });
        post.state = PostState::Events(Some(Stream { response, fed: now }));
        let (answers, request) = (std::mem::take(&mut post.answers), post.request.clone());
        if self.version.as_str() >= revision::FIRST_WITH_PRIMING {
            let frame = frames::prime(&EventId { stream: number, number: self.next_event, request });
            self.keep(number, frame, limits, now, out);
        }
        for answer in answers {
            self.send(number, None, &answer, limits, now, out);
            self.note_answer(number);
        }
    }

    /// The newest event of this stream contains an answer.
    fn note_answer(&mut self, number: u32) {
        if let Some(post) = self.posts.get_mut(&number) {
            post.answered = self.next_event - 1;
        }
    }

    /// `request` is the one that this stream has yet to answer.
    fn send(
        &mut self,
        number: u32,
        request: Option<Id>,
        message: &[u8],
        limits: &Limits,
        now: Instant,
        out: &mut Vec<Action<R>>,
    ) {
        let frame = frames::event(Some(&EventId { stream: number, number: self.next_event, request }), message);
        self.keep(number, frame, limits, now, out);
    }

    /// Sends an event to the reader of that stream, and keeps it for resumption.
    fn keep(&mut self, number: u32, frame: Bytes, limits: &Limits, now: Instant, out: &mut Vec<Action<R>>) {
        self.events_bytes += frame.len();
        let answered = self.posts.get(&number).map_or(0, |post| post.answered);
        self.events.push_back(KeptEvent { stream: number, number: self.next_event, answered, frame: frame.clone() });
        while self.events.len() > limits.events_max || self.events_bytes > limits.events_bytes_max {
            self.drop_oldest_event();
        }
        let reader = match number {
            GENERAL => self.general.back_mut(),
            _ => self.posts.get_mut(&number).and_then(|post| match &mut post.state {
                PostState::Events(stream) => stream.as_mut(),
                PostState::Quiet { .. } | PostState::Lost => None,
            }),
        };
        if let Some(stream) = reader {
            stream.fed = now;
            out.push(Action::SendEvent { response: stream.response.clone(), frame, is_missed: false });
            if number == GENERAL {
                self.general_sent = self.next_event;
            }
        }
        self.next_event += 1;
    }
}

/// Answers of a batch, as one.
fn join(answers: &[Bytes], last: &Bytes) -> Bytes {
    let mut body =
        BytesMut::with_capacity(answers.iter().map(|answer| answer.len() + 1).sum::<usize>() + last.len() + 2);
    body.put_u8(b'[');
    for answer in answers {
        body.put_slice(answer.trim_ascii());
        body.put_u8(b',');
    }
    body.put_slice(last.trim_ascii());
    body.put_u8(b']');
    body.freeze()
}

/// The answer to a request that was in flight when the gateway ended, or when another replica took the session over.
fn lost_in_restart(request: &Id) -> Bytes {
    const WORDS: &str =
        "The gateway ended while this was running. It may or may not have taken effect: check before repeating it.";
    const DATA: &str = r#"{"from":"outlast","reason":"gateway_ended","outcome":"unknown"}"#;
    message::error_line(&request.to_string(), 7001, WORDS, Some(DATA))
}

fn version_of(message: &[u8]) -> Option<String> {
    let Ok(Message::Response { result: Some(result), .. }) = message::parse(message) else { return None };
    message::pick_text(result, "protocolVersion")
}
