//! A world around the HTTP front: clients post, listen, disconnect and resume; a gateway answers in its own order; a
//! store writes records, or fails to; and the gateway is killed and started again at any moment.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use bytes::Bytes;
use outlast_core::{
    front::{Action, Event, HttpFront, Limits, Saved, record::Change},
    gateway::{Client, Said},
    message::{self, Id, Message},
};

use super::{
    Dice, birth,
    http::{Clients, Found, Head, Response, hash},
    ms, seeds,
    story::{Played, Story, play},
};

/// Number of seeds unless `OUTLAST_SEEDS` sets another.
const SEEDS: u64 = 500;
const STEPS: usize = 200;

#[test]
fn each_request_is_answered_once_and_each_event_reaches_one_client_once() {
    let (from, seeds) = seeds(SEEDS);
    (from..from + seeds).for_each(play::<World>);
}

/// Another program continues with the sessions whenever no request is open. All promises hold as without that.
#[test]
fn another_program_goes_on_with_the_sessions() {
    let (from, seeds) = seeds(SEEDS);
    (from..from + seeds).for_each(play::<UpgradedWorld>);
    let mut world = UpgradedWorld::new(from);
    world.run();
    assert!(world.0.handovers.is_some_and(|(_, count)| count > 0));
}

/// A program reads what the last one wrote. If this fails, the format of the state has changed: it needs a new version
/// (`outlast::upgrade`), a migration from this one, and a file of its own.
#[test]
fn the_format_of_saved_sessions_is_that_of_its_version() {
    // The clock of a system that was just started does not reach back that far.
    let now = birth() + Duration::from_secs(24 * 3600);
    for line in include_str!("front/saved-1.jsonl").lines() {
        let saved: Saved = serde_json::from_str(line).unwrap();
        let wide = Limits { events_total_max: usize::MAX, ..limits() };
        let again = HttpFront::<Response>::restore(wide, Some(hash), saved, now).save(now).unwrap();
        assert_eq!(serde_json::to_string(&again).unwrap(), line);
    }
}

pub(crate) fn limits() -> Limits {
    Limits {
        sessions_max: 6,
        sessions_of_client_max: 4,
        session_ttl: ms(5_000),
        ping: ms(700),
        quiet: ms(400),
        events_max: 12,
        events_bytes_max: 1_500,
        events_total_max: 4_000,
    }
}

struct World {
    story: Story,
    dice: Dice,
    born: Instant,
    now: Instant,
    front: HttpFront<Response>,
    http: Clients,
    next_word: u64,
    /// Clients as the gateway knows them, and their open requests.
    gateway: BTreeMap<Client, Vec<Id>>,
    /// When another program continues, and how often it did.
    handovers: Option<(Dice, u64)>,
}

impl Played for World {
    fn new(seed: u64) -> World {
        let now = birth();
        World {
            story: Story::default(),
            dice: Dice::new(seed),
            born: now,
            now,
            front: HttpFront::new(limits(), Some(hash)),
            http: Clients::new(),
            next_word: 1,
            gateway: BTreeMap::new(),
            handovers: None,
        }
    }

    fn story(&mut self) -> &mut Story {
        &mut self.story
    }

    fn run(&mut self) {
        for _ in 0..STEPS {
            match self.dice.below(20) {
                0 => self.open_session(),
                1..=3 => self.post(),
                4 => self.post_alone(),
                5 | 6 => self.gateway_answers(),
                7 | 8 => self.gateway_says(),
                9 => {
                    if let Some(index) = self.any_session()
                        && let Some(event) = self.http.listen(index, &self.front, &mut self.dice)
                    {
                        self.handle(event);
                    }
                }
                10 => {
                    if let Some(event) = self.http.break_off(&mut self.dice) {
                        self.handle(event);
                    }
                }
                11 | 12 => {
                    let unread = self.http.unread();
                    if !unread.is_empty() {
                        self.http.read(self.dice.pick(&unread));
                    }
                }
                13 => self.cancel_or_end(),
                14 => {
                    let usable = self.http.usable();
                    if !usable.is_empty() {
                        self.http.probe(self.dice.pick(&usable), &self.front);
                    }
                }
                15..=17 => self.store(),
                18 if self.dice.one_in(4) => self.restart(),
                18 => {}
                _ => self.pass_time(),
            }
            self.check();
            self.hand_over();
        }
        self.finish();
    }
}

/// A world in which other programs take over.
struct UpgradedWorld(World);

impl Played for UpgradedWorld {
    fn new(seed: u64) -> UpgradedWorld {
        let mut world = World::new(seed);
        world.handovers = Some((Dice::new(seed ^ 0x5eed_0005), 0));
        UpgradedWorld(world)
    }

    fn story(&mut self) -> &mut Story {
        self.0.story()
    }

    fn run(&mut self) {
        self.0.run();
    }
}

impl World {
    fn wall(&self) -> Duration {
        self.now - self.born
    }

    fn handle(&mut self, event: Event<Response>) -> usize {
        self.story.tell(self.now - self.born, ">", &event);
        let mut actions = Vec::new();
        self.front.handle(event, self.now, &mut actions);
        let count = actions.len();
        for action in actions {
            self.story.tell(self.now - self.born, "  <", &action);
            self.check_marker(&action);
            if let Some(action) = self.http.act(action, self.now) {
                self.act(action);
            }
        }
        count
    }

    /// Every message of the gateway carries the number of its client.
    fn check_marker(&self, action: &Action<Response>) {
        match action {
            Action::SendEvent { response, frame, .. } => {
                let client = self.http.responses[response].client;
                let text = std::str::from_utf8(frame).unwrap();
                // Only the answer to a request that was lost with a gateway has no id; `read` checks whose it was.
                let is_its_own = text.ends_with("data:\n\n")
                    || text.starts_with("data:")
                    || text.contains(&format!("\"client\":{client}}}"));
                assert!(is_its_own, "{text} was sent to client {client}");
            }
            Action::Answer { body, .. } => assert!(body.windows(9).any(|part| part == b"\"result\":")),
            _ => {}
        }
    }

    fn act(&mut self, action: Action<Response>) {
        match action {
            Action::SessionCame { client, .. } | Action::RequestCame { client, .. } => {
                assert!(self.gateway.insert(client, Vec::new()).is_none(), "client {client} came twice");
            }
            Action::Said { client, message, .. } | Action::SaidLong { client, message, .. } => {
                let open = self.gateway.get_mut(&client).expect("it came first");
                if let Ok(Message::Request { id, .. }) = message::parse(&message) {
                    open.push(id.parse().unwrap());
                }
            }
            Action::SessionRestored { client, who, state } => {
                assert!(self.gateway.insert(client, Vec::new()).is_none(), "client {client} came twice");
                let session = self.http.sessions.iter().find(|session| session.client == client).unwrap();
                assert_eq!(*who, *self.http.people[session.who]);
                let place = |level: Option<i128>| session.levels.iter().position(|known| Some(*known) == level);
                let restored = place(state.level.as_deref().map(|level| level.parse().unwrap()));
                let is_known = session.is_unrecorded || restored >= place(session.level_set);
                assert!(is_known, "{:?} was set, and {:?} is restored", session.level_set, state.level);
            }
            Action::Left { client, .. } => {
                assert!(self.gateway.remove(&client).is_some(), "{client} left twice");
                self.http.session_of(client).into_iter().for_each(|session| session.is_over = true);
            }
            other => panic!("{other:?} is for a client"),
        }
    }

    /// Any session that its client may still use. A session from before a restart is restored.
    fn any_session(&mut self) -> Option<usize> {
        let usable = self.http.usable();
        if usable.is_empty() {
            return None;
        }
        let index = self.dice.pick(&usable);
        match self.http.find(index, &self.front, &mut self.dice) {
            Found::Open => {}
            Found::Stored(event) => {
                self.handle(*event);
            }
            Found::Lost => {
                assert!(self.http.sessions[index].is_unrecorded, "session {index} was lost");
                return None;
            }
        }
        let session = &self.http.sessions[index];
        let found = self.front.session(session.id.unwrap(), &self.http.people[session.who]);
        assert!(found.is_some(), "session {index} was not restored");
        Some(index)
    }

    fn store(&mut self) {
        let is_ok = !self.dice.one_in(12);
        if let Some(event) = self.http.store(is_ok, self.now, self.wall()) {
            self.handle(event);
        }
    }

    /// Another program continues, if no request is open. Connections stay open, but every stream ends.
    fn hand_over(&mut self) {
        let Some((dice, count)) = &mut self.handovers else { return };
        let is_open = self.gateway.values().any(|open| !open.is_empty()) || !self.http.ops.is_empty();
        if is_open || self.front.busy().is_some() || !dice.one_in(3) {
            return;
        }
        *count += 1;
        self.handle(Event::HandoverBegan);
        let counts = self.front.counts(self.now);
        let saved = self.front.save(self.now).expect("no request is open");
        let text = serde_json::to_string(&saved).expect("a state is JSON");
        let read: Saved = serde_json::from_str(&text).expect("it was just written");
        assert_eq!(read, saved);
        self.front = HttpFront::restore(limits(), Some(hash), read, self.now);
        assert_eq!(self.front.save(self.now).as_ref(), Ok(&saved));
        let loaded = self.http.loaded(self.wall());
        self.handle(loaded);
        let after = self.front.counts(self.now);
        assert_eq!((counts.sessions, counts.sessions_stored), (after.sessions, after.sessions_stored));
        assert_eq!(counts.sessions_unrecorded, after.sessions_unrecorded);
    }

    /// The gateway is killed, and a new one is started.
    fn restart(&mut self) {
        let wall = self.wall();
        self.http.gateway_died(&mut self.dice, wall);
        self.gateway.clear();
        self.now += ms(self.dice.below(200));
        self.front = HttpFront::new(limits(), Some(hash));
        let loaded = self.http.loaded(self.wall());
        self.handle(loaded);
    }

    fn open_session(&mut self) {
        let who = self.dice.below(2) as usize;
        if self.front.has_room(&self.http.people[who], true).is_ok() {
            let event = self.http.open(who, request(0, "initialize"), &mut self.dice);
            self.handle(event);
        }
    }

    fn post(&mut self) {
        let Some(index) = self.any_session() else { return };
        let count = if self.dice.one_in(5) { 2 } else { 1 };
        let requests = (0..count).map(|_| {
            let id = self.http.next_id(index);
            let change = (count == 1 && self.dice.one_in(3)).then(|| Change::Level(id.to_string().into()));
            self.http.sessions[index].level_requests.extend(change.as_ref().map(|_| id));
            (id, request(id, "call"), change)
        });
        let requests = requests.collect();
        let event = self.http.post(index, requests);
        self.handle(event);
    }

    fn post_alone(&mut self) {
        let event = self.http.post_alone(self.dice.below(2) as usize, request(7, "call"));
        self.handle(event);
    }

    fn gateway_answers(&mut self) {
        let busy: Vec<Client> = self.gateway.iter().filter(|(_, open)| !open.is_empty()).map(|(c, _)| *c).collect();
        if busy.is_empty() {
            return;
        }
        let client = self.dice.pick(&busy);
        let open = self.gateway.get_mut(&client).unwrap();
        let at = self.dice.below(open.len() as u64) as usize;
        let about = open.remove(at);
        if let (Id::Integer(id), Some(session)) = (&about, self.http.session_of(client))
            && session.level_requests.contains(id)
        {
            session.levels.push(*id);
        }
        let result = format!(r#"{{"protocolVersion":"2025-11-25","client":{client}}}"#);
        let message = message::result_line(&about, &result);
        self.handle(Event::Told { client, message, about: Some(about), said: Said::Result });
    }

    fn gateway_says(&mut self) {
        let clients: Vec<Client> = self.gateway.keys().copied().collect();
        if clients.is_empty() {
            return;
        }
        let client = self.dice.pick(&clients);
        let word = self.next_word;
        self.next_word += 1;
        let open = &self.gateway[&client];
        let about = if open.is_empty() || self.dice.one_in(2) { None } else { Some(self.dice.pick(open)) };
        let message =
            format!(r#"{{"jsonrpc":"2.0","method":"word","params":{{"word":{word},"client":{client}}}}}"#).into();
        self.handle(Event::Told { client, message, about, said: Said::Other });
    }

    fn cancel_or_end(&mut self) {
        let Some(index) = self.any_session() else { return };
        let client = self.http.sessions[index].client;
        if self.dice.one_in(6) {
            self.handle(Event::Ended { client });
            return;
        }
        let Some(id) = self.http.sessions[index].open.keys().next().copied() else { return };
        // The client does not know whether it was carried out.
        if self.http.sessions[index].level_requests.contains(&id) {
            return;
        }
        self.gateway.get_mut(&client).unwrap().retain(|open| *open != Id::Integer(id));
        let event = self.http.cancel(index, id);
        self.handle(event);
    }

    fn pass_time(&mut self) {
        match (self.front.deadline(), self.dice.below(3)) {
            (Some(due), 0) => self.now = self.now.max(due),
            (_, 1) => self.now += ms(self.dice.below(500)),
            _ => self.now += ms(1),
        }
        let is_early = self.front.deadline().is_none_or(|due| self.now < due);
        let done = self.handle(Event::TimePassed);
        assert!(!is_early || done == 0, "time passed early, and something was done");
        assert_eq!(self.handle(Event::TimePassed), 0, "time passed twice");
        self.http.check_store_time(self.now);
    }

    fn check(&self) {
        let counts = self.front.counts(self.now);
        assert!(counts.sessions + counts.sessions_stored <= limits().sessions_max, "{counts:?}");
        assert_eq!(counts.sessions + counts.requests, self.gateway.len());
        assert!(self.front.kept_bytes() <= limits().events_total_max);
    }

    /// Everything is answered and read: a client that stayed connected has every answer.
    fn finish(&mut self) {
        while self.gateway.values().any(|open| !open.is_empty()) || !self.http.ops.is_empty() {
            self.gateway_answers();
            self.store();
        }
        while let Some(response) = self.http.unread().first() {
            self.http.read(*response);
        }
        for session in &self.http.sessions {
            for (id, (response, _)) in &session.open {
                let seen = &self.http.responses[response];
                let is_excused = seen.is_broken || seen.head == Some(Head::Refused) || session.is_over;
                assert!(is_excused, "request {id} of {} has no answer", session.client);
            }
        }
        for single in &self.http.singles {
            let seen = &self.http.responses[&single.response];
            let is_answered = matches!(seen.head, Some(Head::Whole(_) | Head::Refused)) || seen.is_ended;
            assert!(is_answered, "the request of {} has no answer", single.client);
        }
        // All sessions expire.
        let open = self.http.responses.iter().filter(|(_, seen)| !seen.is_broken);
        for (response, client) in open.map(|(response, seen)| (*response, seen.client)).collect::<Vec<_>>() {
            self.handle(Event::ReaderLeft { client, response });
        }
        for _ in 0..1_000 {
            let Some(due) = self.front.deadline() else { break };
            self.now = self.now.max(due);
            self.handle(Event::TimePassed);
        }
        while !self.http.ops.is_empty() {
            self.store();
        }
        assert!(self.gateway.is_empty(), "{:?} never left", self.gateway);
        assert!(self.http.disk.is_empty(), "{:?} are stored for ever", self.http.disk.keys());
        assert_eq!(self.front.kept_bytes(), 0);
    }
}

fn request(id: i128, method: &str) -> Bytes {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{{}}}}"#).into()
}
