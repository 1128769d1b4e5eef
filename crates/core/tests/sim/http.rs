//! HTTP clients of the front, with the responses that they read and the store that keeps their sessions.
//!
//! Clients decide what to send; the world tells the front. Each response and each event is checked when it is sent and
//! when it is read: it begins once, belongs to its client, and no event is read twice.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use outlast_core::{
    front::{
        Action, Caller, Event, HttpFront, Loaded, Posted, STORE_MAX, SessionId, StreamStart,
        record::{Change, Record, RecordKey},
    },
    gateway::{Client, Who},
    message::{self, Id, Message},
};

use crate::Dice;

/// Handle of a response.
pub(crate) type Response = u32;

pub(crate) struct Clients {
    pub people: [Rc<Who>; 2],
    next_client: Client,
    next_response: Response,
    pub responses: BTreeMap<Response, Seen>,
    pub sessions: Vec<Session>,
    pub singles: Vec<Single>,
    /// Records, and the wall clock when each was written.
    pub disk: BTreeMap<RecordKey, (Vec<u8>, Duration)>,
    /// Operations that the store has not carried out yet.
    pub ops: VecDeque<Op>,
}

pub(crate) enum Op {
    Put { client: Client, key: RecordKey, write: u32, text: Vec<u8>, since: Instant },
    Remove { key: RecordKey },
}

pub(crate) fn hash(id: SessionId) -> RecordKey {
    RecordKey(id.rotate_left(7) ^ 0x5555)
}

/// What the machine sent on one response.
#[derive(Default)]
pub(crate) struct Seen {
    pub client: Client,
    pub head: Option<Head>,
    /// Sent and not yet read.
    frames: VecDeque<Bytes>,
    pub is_ended: bool,
    pub is_broken: bool,
}

#[derive(Debug, PartialEq)]
pub(crate) enum Head {
    Whole(Bytes),
    Refused,
    Events,
}

impl Seen {
    pub(crate) fn has_news(&self) -> bool {
        let has_body = matches!(&self.head, Some(Head::Whole(body)) if !body.is_empty());
        !self.is_broken && (!self.frames.is_empty() || has_body)
    }
}

/// One client of the handshake era.
pub(crate) struct Session {
    pub client: Client,
    pub who: usize,
    pub id: Option<SessionId>,
    next_request: i128,
    /// Requests with the response that each waits on, and the last event that was read there.
    pub open: BTreeMap<i128, (Response, Option<String>)>,
    /// Requests that were lost with a gateway, with the last event that was read.
    lost: BTreeMap<i128, String>,
    general: Option<Response>,
    general_last: Option<String>,
    /// Ids of all events that were read.
    read: BTreeSet<String>,
    pub answered: BTreeSet<i128>,
    /// Lost requests that were answered after a restart.
    refused: BTreeSet<i128>,
    /// An answer may already have been sent.
    cancelled: BTreeSet<i128>,
    /// Requests that set a level.
    pub level_requests: BTreeSet<i128>,
    /// The same in the order in which the gateway carried them out, and the newest whose answer was read.
    pub levels: Vec<i128>,
    pub level_set: Option<i128>,
    /// The store failed or was too slow for it.
    pub is_unrecorded: bool,
    pub is_over: bool,
}

pub(crate) struct Single {
    pub client: Client,
    pub response: Response,
}

/// What the front knows of a session that its client uses again.
pub(crate) enum Found {
    Open,
    /// The front is told first.
    Stored(Box<Event<Response>>),
    Lost,
}

impl Clients {
    pub(crate) fn new() -> Clients {
        let who = |name: &str| Rc::new(Who { name: name.into(), role: None, profile: None });
        Clients {
            people: [who("anna"), who("bert")],
            next_client: 1,
            next_response: 1,
            responses: BTreeMap::new(),
            sessions: Vec::new(),
            singles: Vec::new(),
            disk: BTreeMap::new(),
            ops: VecDeque::new(),
        }
    }

    fn new_response(&mut self, client: Client) -> Response {
        let response = self.next_response;
        self.next_response += 1;
        self.responses.insert(response, Seen { client, ..Seen::default() });
        response
    }

    fn new_client(&mut self) -> Client {
        self.next_client += 1;
        self.next_client - 1
    }

    pub(crate) fn session_of(&mut self, client: Client) -> Option<&mut Session> {
        self.sessions.iter_mut().find(|session| session.client == client)
    }

    // ---- what clients send ----------------------------------------------------------------------

    /// Opens a session with an `initialize` of the id 0.
    pub(crate) fn open(&mut self, who: usize, message: Bytes, dice: &mut Dice) -> Event<Response> {
        let client = self.new_client();
        let response = self.new_response(client);
        self.sessions.push(Session {
            client,
            who,
            id: None,
            next_request: 1,
            open: BTreeMap::from([(0, (response, None))]),
            lost: BTreeMap::new(),
            general: None,
            general_last: None,
            read: BTreeSet::new(),
            answered: BTreeSet::new(),
            refused: BTreeSet::new(),
            cancelled: BTreeSet::new(),
            level_requests: BTreeSet::new(),
            levels: Vec::new(),
            level_set: None,
            is_unrecorded: false,
            is_over: false,
        });
        let random = u128::from(client) << 96 | u128::from(dice.below(1 << 40));
        let (who, peer, id) = (self.people[who].clone(), "peer".into(), Id::Integer(0));
        Event::Opened { client, who, is_known: true, peer, id, message, response, random }
    }

    /// Sessions that their clients may use.
    pub(crate) fn usable(&self) -> Vec<usize> {
        let is_open = |session: &Session| !session.is_over && session.id.is_some() && session.answered.contains(&0);
        (0..self.sessions.len()).filter(|index| is_open(&self.sessions[*index])).collect()
    }

    /// The client of a session sends something: the front has the session, or finds its record.
    pub(crate) fn find(&mut self, index: usize, front: &HttpFront<Response>, dice: &mut Dice) -> Found {
        let who = self.people[self.sessions[index].who].clone();
        let id = self.sessions[index].id.expect("it is usable");
        if front.session(id, &who).is_some() {
            return Found::Open;
        }
        let Some(key) = front.stored(id, &who) else {
            self.sessions[index].is_over = true;
            return Found::Lost;
        };
        let client = self.new_client();
        self.sessions[index].client = client;
        let random = dice.below(u64::from(u32::MAX)) as u32;
        Found::Stored(Box::new(Event::Returned { client, key, id, peer: "peer".into(), random }))
    }

    /// An id for the next request of a session.
    pub(crate) fn next_id(&mut self, index: usize) -> i128 {
        let session = &mut self.sessions[index];
        session.next_request += 1;
        session.next_request - 1
    }

    /// A POST with one request, or with a batch of them.
    pub(crate) fn post(&mut self, index: usize, requests: Vec<(i128, Bytes, Option<Change>)>) -> Event<Response> {
        let client = self.sessions[index].client;
        let response = self.new_response(client);
        self.sessions[index].open.extend(requests.iter().map(|(id, ..)| (*id, (response, None))));
        let requests = match <[_; 1]>::try_from(requests) {
            Ok([(id, message, change)]) => Posted::One { id: Id::Integer(id), message, outline: None, change },
            Err(requests) => Posted::Batch {
                ids: requests.iter().map(|(id, ..)| Id::Integer(*id)).collect(),
                messages: requests.into_iter().map(|(_, message, _)| message).collect(),
                changes: Vec::new(),
            },
        };
        Event::Posted { client, peer: "peer".into(), requests, response }
    }

    /// A POST of the stateless era.
    pub(crate) fn post_alone(&mut self, who: usize, message: Bytes) -> Event<Response> {
        let who = self.people[who].clone();
        let client = self.new_client();
        let response = self.new_response(client);
        self.singles.push(Single { client, response });
        let caller = Caller::of(&who, None, None);
        Event::Requested { client, who, caller, peer: "peer".into(), message, outline: None, response }
    }

    /// A GET of the general stream, or of the stream of a request whose connection broke or whose gateway was killed.
    pub(crate) fn listen(
        &mut self,
        index: usize,
        front: &HttpFront<Response>,
        dice: &mut Dice,
    ) -> Option<Event<Response>> {
        if !self.sessions[index].lost.is_empty() && dice.one_in(2) {
            return self.listen_to_lost(index, front, dice);
        }
        let (client, id) = (self.sessions[index].client, self.sessions[index].id.expect("it is usable"));
        let is_broken = |response: &Response| self.responses[response].is_broken;
        let resumable = self.sessions[index].open.iter().find(|(_, (at, last))| is_broken(at) && last.is_some());
        let resumed = resumable.map(|(_, (at, last))| (*at, last.clone()));
        let last = match &resumed {
            Some((_, last)) => last.clone(),
            None if self.sessions[index].general.is_some() => return None,
            None => self.sessions[index].general_last.clone(),
        };
        let found = front.session(id, &self.people[self.sessions[index].who]).expect("it is open");
        let stream = found.stream(last.as_deref()).ok()?;
        let response = self.new_response(client);
        let session = &mut self.sessions[index];
        match resumed {
            Some((broken, _)) => {
                let of_it = session.open.values_mut().filter(|(at, _)| *at == broken);
                of_it.for_each(|(at, _)| *at = response);
            }
            None => session.general = Some(response),
        }
        Some(Event::Listened { client, stream, response })
    }

    /// An id from before a restart is always accepted: the lost request is answered, or the stream is a general one.
    fn listen_to_lost(
        &mut self,
        index: usize,
        front: &HttpFront<Response>,
        dice: &mut Dice,
    ) -> Option<Event<Response>> {
        let (client, id) = (self.sessions[index].client, self.sessions[index].id.expect("it is usable"));
        let lost: Vec<i128> = self.sessions[index].lost.keys().copied().collect();
        let request = dice.pick(&lost);
        let last = self.sessions[index].lost[&request].clone();
        let found = front.session(id, &self.people[self.sessions[index].who]).expect("it is open");
        let stream = found.stream(Some(&last)).expect("a clean stream");
        let names_request = last.matches('-').count() == 2;
        assert_eq!(stream == StreamStart::Lost(Id::Integer(request)), names_request, "{last}");
        if !names_request && self.sessions[index].general.is_some() {
            return None;
        }
        let response = self.new_response(client);
        if !names_request {
            // A batch: each of its members is lost.
            self.sessions[index].lost.remove(&request);
            self.sessions[index].general = Some(response);
        }
        Some(Event::Listened { client, stream, response })
    }

    /// The connection of a response breaks: unread bytes are lost.
    pub(crate) fn break_off(&mut self, dice: &mut Dice) -> Option<Event<Response>> {
        let is_whole = |seen: &Seen| matches!(seen.head, Some(Head::Whole(_) | Head::Refused));
        let is_open = |seen: &Seen| !seen.is_broken && !seen.is_ended && !is_whole(seen);
        let open: Vec<Response> = self.responses.iter().filter(|(_, seen)| is_open(seen)).map(|(r, _)| *r).collect();
        if open.is_empty() {
            return None;
        }
        let response = dice.pick(&open);
        let seen = self.responses.get_mut(&response).expect("listed above");
        seen.is_broken = true;
        seen.frames.clear();
        let (client, has_head) = (seen.client, seen.head.is_some());
        if let Some(session) = self.sessions.iter_mut().find(|session| session.general == Some(response)) {
            session.general = None;
        }
        self.singles.retain(|single| single.response != response);
        Some(match has_head {
            true => Event::ReaderLeft { client, response },
            false => Event::AskerLeft { client, response },
        })
    }

    /// The client cancels a request, and may still get the answer.
    pub(crate) fn cancel(&mut self, index: usize, id: i128) -> Event<Response> {
        let session = &mut self.sessions[index];
        session.open.remove(&id);
        session.cancelled.insert(id);
        let client = session.client;
        let text = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id},"client":{client}}}}}"#
        );
        Event::Noted { client, messages: vec![text.into()] }
    }

    /// A request by another client, or with an invented id, does not find the session.
    pub(crate) fn probe(&self, index: usize, front: &HttpFront<Response>) {
        let session = &self.sessions[index];
        let id = session.id.expect("it is usable");
        let other = &self.people[1 - session.who];
        assert!(front.session(id, other).is_none(), "session {index} was served to another client");
        assert!(front.stored(id, other).is_none(), "the record of session {index} was found for another client");
        assert!(front.session(id ^ 1, &self.people[session.who]).is_none(), "an invented id was served");
    }

    // ---- what the front sends -------------------------------------------------------------------

    /// Checks and keeps what goes to a client or to the store. Everything else is for the gateway.
    pub(crate) fn act(&mut self, action: Action<Response>, now: Instant) -> Option<Action<Response>> {
        match action {
            Action::Answer { response, session, body, .. } => {
                let seen = self.responses.get_mut(&response).expect("it was made here");
                assert_eq!(seen.head, None, "response {response} begins twice");
                seen.head = Some(Head::Whole(body));
                self.learn(response, session);
            }
            Action::Refuse { response, .. } => {
                let seen = self.responses.get_mut(&response).expect("it was made here");
                assert_eq!(seen.head, None, "response {response} begins twice");
                seen.head = Some(Head::Refused);
            }
            Action::OpenEvents { response, client, session } => {
                let seen = self.responses.get_mut(&response).expect("it was made here");
                assert_eq!((&seen.head, seen.client), (&None, client), "response {response}");
                seen.head = Some(Head::Events);
                self.learn(response, session);
            }
            Action::SendEvent { response, frame, .. } => {
                let seen = self.responses.get_mut(&response).expect("it was made here");
                assert_eq!(seen.head, Some(Head::Events), "an event before the head of {response}");
                assert!(!seen.is_ended, "an event after the end of {response}");
                seen.frames.push_back(frame);
            }
            Action::Ping { response } => {
                let seen = &self.responses[&response];
                assert!(seen.head == Some(Head::Events) && !seen.is_ended, "a ping outside of a stream");
            }
            Action::EndEvents { response } => {
                let seen = self.responses.get_mut(&response).expect("it was made here");
                assert_eq!(seen.head, Some(Head::Events));
                seen.is_ended = true;
            }
            Action::Store { client, key, write, record } => {
                let text = record.encode(key).expect("a record of a test is short");
                self.ops.push_back(Op::Put { client, key, write, text, since: now });
            }
            Action::Unstore { key } => {
                self.ops.push_back(Op::Remove { key });
                let of = |session: &&mut Session| session.id.is_some_and(|id| hash(id) == key);
                self.sessions.iter_mut().filter(of).for_each(|session| session.is_over = true);
            }
            action => return Some(action),
        }
        None
    }

    /// A client learns its session's id, and only from the answer to its own `initialize`.
    fn learn(&mut self, response: Response, id: Option<SessionId>) {
        let Some(id) = id else { return };
        let seen = &self.responses[&response];
        // A slow response begins before `initialize` is answered, and the client may not use the id before that.
        let is_answer = matches!(seen.head, Some(Head::Whole(_)));
        let client = seen.client;
        let is_stored = self.disk.contains_key(&hash(id));
        let session = self.session_of(client).expect("it was opened here");
        assert_eq!(session.id.replace(id), None, "the id was told twice");
        assert!(!is_answer || is_stored || session.is_unrecorded, "answered before it was stored");
    }

    /// Responses with something that was not read yet.
    pub(crate) fn unread(&self) -> Vec<Response> {
        self.responses.iter().filter(|(_, seen)| seen.has_news()).map(|(response, _)| *response).collect()
    }

    /// A client reads the next event of a response, or its whole body: the client, and the messages.
    pub(crate) fn read(&mut self, response: Response) -> (Client, Vec<Bytes>) {
        let seen = self.responses.get_mut(&response).expect("listed as unread");
        let client = seen.client;
        let (event, body) = match &mut seen.head {
            Some(Head::Whole(body)) => (None, std::mem::take(body)),
            _ => {
                let frame = seen.frames.pop_front().expect("listed as unread");
                let text = std::str::from_utf8(&frame).expect("events are text");
                let (event, data) = match text.strip_prefix("id: ") {
                    Some(text) => text.split_once('\n').map(|(id, data)| (Some(id), data)).expect("an id is a line"),
                    None => (None, text),
                };
                let data = data.strip_prefix("data:").expect("an event has data").trim();
                (event.map(str::to_owned), Bytes::copy_from_slice(data.as_bytes()))
            }
        };
        let is_event = matches!(self.responses[&response].head, Some(Head::Events));
        if let Some(session) = self.session_of(client) {
            match event {
                Some(event) => {
                    session.read_event(response, event);
                    session.read_answers(&body);
                }
                None if is_event => {
                    if !session.read_refusal(&body) {
                        return (client, Vec::new());
                    }
                }
                None => session.read_answers(&body),
            }
        }
        let messages = match message::parse(&body) {
            Ok(Message::Batch(members)) => {
                members.iter().map(|member| Bytes::copy_from_slice(member.get().as_bytes())).collect()
            }
            _ if body.is_empty() => Vec::new(),
            _ => vec![body],
        };
        (client, messages)
    }

    // ---- the store ------------------------------------------------------------------------------

    /// The store carries out its next operation, or fails.
    pub(crate) fn store(&mut self, is_ok: bool, now: Instant, wall: Duration) -> Option<Event<Response>> {
        let op = self.ops.pop_front()?;
        let Op::Put { client, write, since, .. } = op else {
            self.write(op, wall);
            return None;
        };
        if since + STORE_MAX <= now || !is_ok {
            self.unrecorded(client);
        }
        if is_ok {
            self.write(op, wall);
        }
        Some(Event::Stored { client, write, is_ok })
    }

    fn write(&mut self, op: Op, wall: Duration) {
        match op {
            Op::Put { key, text, .. } => drop(self.disk.insert(key, (text, wall))),
            Op::Remove { key } => drop(self.disk.remove(&key)),
        }
    }

    fn unrecorded(&mut self, client: Client) {
        self.sessions.iter_mut().filter(|one| one.client == client).for_each(|session| session.is_unrecorded = true);
    }

    /// Sessions whose records take too long are served without one.
    pub(crate) fn check_store_time(&mut self, now: Instant) {
        let late = self.ops.iter().filter_map(|op| match op {
            Op::Put { client, since, .. } if *since + STORE_MAX <= now => Some(*client),
            _ => None,
        });
        late.collect::<Vec<Client>>().into_iter().for_each(|client| self.unrecorded(client));
    }

    // ---- the end of a gateway -------------------------------------------------------------------

    /// The gateway is killed: every connection breaks, and writes may or may not have reached the disk.
    pub(crate) fn gateway_died(&mut self, dice: &mut Dice, wall: Duration) {
        for _ in 0..dice.below(self.ops.len() as u64 + 1) {
            let op = self.ops.pop_front().expect("counted above");
            self.write(op, wall);
        }
        // A lost removal leaves a session that its client does not use.
        self.ops.clear();
        self.singles.clear();
        for seen in self.responses.values_mut() {
            seen.is_broken = true;
            seen.frames.clear();
        }
        for session in &mut self.sessions {
            session.general = None;
            let open = std::mem::take(&mut session.open);
            session.lost.extend(open.into_iter().filter_map(|(id, (_, last))| Some((id, last?))));
            // Its client was not told that the session is open.
            session.is_over |= !session.answered.contains(&0);
        }
    }

    /// The records that the next gateway finds.
    pub(crate) fn loaded(&self, wall: Duration) -> Event<Response> {
        let records = self.disk.iter().map(|(key, (text, written))| {
            let record = Record::decode(*key, text).expect("it was encoded here");
            Loaded { key: *key, record, age: wall.saturating_sub(*written) }
        });
        Event::Loaded { records: records.collect() }
    }
}

impl Session {
    fn read_event(&mut self, response: Response, event: String) {
        assert!(self.read.insert(event.clone()), "event {event} was delivered twice");
        let place = match self.general == Some(response) {
            true => Some(&mut self.general_last),
            false => self.open.values_mut().find(|(at, _)| *at == response).map(|(_, last)| last),
        };
        let Some(last) = place else { return };
        let number = |id: &str| id.split('-').nth(1).expect("an id has two parts").parse::<u64>().expect("a number");
        let (old, new) = (last.as_deref().map(number), number(&event));
        assert!(old.is_none_or(|old| old < new || old >> 32 != new >> 32), "event {event} is out of order");
        *last = Some(event);
    }

    /// The answer to a request that was lost with a gateway. False if it came before: the client may have asked for it
    /// twice.
    fn read_refusal(&mut self, body: &[u8]) -> bool {
        let Ok(Message::Response { id, error: Some(_), .. }) = message::parse(body) else {
            panic!("{body:?} has no id")
        };
        let Some(Id::Integer(id)) = id.parse() else { panic!("{body:?} answers no request") };
        let is_lost = self.lost.remove(&id).is_some() && self.answered.insert(id);
        assert!(is_lost || self.refused.contains(&id), "request {id} was not lost");
        self.refused.insert(id)
    }

    fn read_answers(&mut self, body: &[u8]) {
        let answers = match message::parse(body) {
            Ok(Message::Batch(members)) => members.iter().map(|member| member.get().as_bytes()).collect(),
            _ => vec![body],
        };
        for answer in answers {
            let Ok(Message::Response { id, .. }) = message::parse(answer) else { continue };
            let Some(Id::Integer(id)) = id.parse() else { panic!("{answer:?} answers no request") };
            assert!(self.answered.insert(id), "request {id} was answered twice");
            let place = |level: Option<i128>| self.levels.iter().position(|known| Some(*known) == level);
            if place(Some(id)) > place(self.level_set) {
                self.level_set = Some(id);
            }
            let is_known = self.open.remove(&id).is_some() || self.cancelled.contains(&id);
            assert!(is_known, "request {id} was not open");
        }
    }
}
