//! Many clients and many backends of both eras around one `Gateway`, none of which behaves better than it must.
//!
//! Every request, question and answer carries a number of its own, so that the world knows of each message it sees again
//! whose it is, whether it is still the same, and whether it may be where it is.

mod clients;
mod servers;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    panic::AssertUnwindSafe,
    time::{Duration, Instant},
};

use bytes::Bytes;
use outlast_core::{
    exit::{Exit, How},
    gateway::{
        Action, Backend, Called, Children, EraChoice, Event, Fit, Front, Gateway, Kind, Limits, Link, Pattern, Profile,
        Rates, Refused, Said, Schemas, Sender, Settings, Start, Switch, Who,
    },
    json::Raw,
    message::{self, Id, Outline},
    restarts::Policy,
};
use serde_json::Value;

use crate::{Dice, birth, ms};
use clients::Client;
use servers::Server;

#[test]
fn every_request_is_answered_once_and_to_who_asked() {
    let (from, seeds) = seeds();
    for seed in from..from + seeds {
        World::new(seed).run();
    }
}

fn seeds() -> (u64, u64) {
    let number = |name: &str, default: u64| match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")),
        Err(_) => default,
    };
    (number("OUTLAST_SEED_FROM", 0), number("OUTLAST_SEEDS", 2_000))
}

const STORY_MAX: usize = 300;
const STEPS: u64 = 130;
const REST_MAX: u32 = 3_000;

struct AllFit;

impl Schemas for AllFit {
    fn check(&mut self, _schema: &[u8], _arguments: Raw<'_>) -> Fit {
        Fit::Fits
    }
}

/// What is wrong is told with the story that led there.
macro_rules! check {
    ($world:expr, $holds:expr, $($words:tt)+) => {
        match $holds {
            true => {}
            false => $world.fail(&format!($($words)+)),
        }
    };
}
use check;

pub struct World {
    seed: u64,
    dice: Dice,
    gateway: Gateway,
    now: Instant,
    born: Instant,
    settings: Settings,
    clients: BTreeMap<u64, Client>,
    next_client: u64,
    servers: BTreeMap<u64, Server>,
    serials: BTreeSet<u64>,
    /// Events that the world owes the gateway, in order.
    owed: VecDeque<Event>,
    next_number: u64,
    /// How often servers heard each request, and which of them never left.
    heard: BTreeMap<u64, u32>,
    /// The link that each request was last sent to.
    heard_on: BTreeMap<u64, u64>,
    /// Whose request each was.
    asked_by: BTreeMap<u64, u64>,
    next_ticket: u64,
    tickets: BTreeSet<u64>,
    story: VecDeque<String>,
    is_told: bool,
    /// Everybody does as they should, and nothing new is begun.
    resting: bool,
    stopping: bool,
    over: bool,
    /// Requests that must be answered before the event at hand is over: `(client, id)`.
    due_now: Vec<(u64, String)>,
    /// Questions that were taken back in the event at hand while their calls were open. A link that the gateway ends takes
    /// its questions back before its calls fail.
    taken_back: Vec<(u64, Value)>,
}

impl World {
    fn new(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        let count = 1 + dice.below(4);
        let backends = (0..count).map(|index| backend(&format!("b{index}"), &mut dice)).collect();
        let mut profiles = BTreeMap::new();
        if dice.one_in(3) {
            let deny = vec![Pattern("b0__t1".into())];
            profiles.insert("p".to_owned(), Profile { deny, search: dice.one_in(3), ..Profile::default() });
        }
        let settings = Settings {
            backends,
            profiles,
            default_profile: None,
            roles: BTreeMap::new(),
            rates: Rates::default(),
            switched_off: vec![],
            forward_unknown: false,
            limits: Limits {
                hold: Duration::from_secs(1 + dice.below(30)),
                held_max: 1 + dice.below(20) as usize,
                in_flight_max: 5 + dice.below(50) as usize,
                page: 1 + dice.below(5) as usize,
                retry_given_up: Duration::from_secs(30 + dice.below(300)),
            },
        };
        let now = birth();
        World {
            seed,
            gateway: Gateway::new(settings.clone(), seed, BTreeMap::new(), Box::new(AllFit)),
            dice,
            now,
            born: now,
            settings,
            clients: BTreeMap::new(),
            next_client: 1,
            servers: BTreeMap::new(),
            serials: BTreeSet::new(),
            owed: VecDeque::new(),
            next_number: 1,
            heard: BTreeMap::new(),
            heard_on: BTreeMap::new(),
            asked_by: BTreeMap::new(),
            next_ticket: 1,
            tickets: BTreeSet::new(),
            story: VecDeque::new(),
            is_told: false,
            resting: false,
            stopping: false,
            over: false,
            due_now: Vec::new(),
            taken_back: Vec::new(),
        }
    }

    /// The story costs more than the world, so it is written only when it is needed.
    fn run(mut self) {
        let seed = self.seed;
        let is_told = self.is_told;
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| {
            for _ in 0..STEPS {
                self.step();
            }
            if seed.is_multiple_of(3) {
                // In the middle of everything: whoever waits is answered all the same.
                self.stop();
                let waits = self.clients.iter().find(|(_, client)| !client.open.is_empty()).map(|(client, _)| *client);
                check!(self, waits.is_none(), "client {waits:?} waits for a gateway that is over");
                check!(self, self.tickets.is_empty(), "an operator waits for a gateway that is over");
                return;
            }
            self.rest();
            self.quiet();
            self.stop();
        }));
        if let Err(panic) = outcome {
            if !is_told {
                let mut again = World::new(seed);
                again.is_told = true;
                again.run();
            } else {
                eprintln!("seed {seed}:\n{}", self.story.make_contiguous().join("\n"));
            }
            eprintln!("again: OUTLAST_SEED_FROM={seed} OUTLAST_SEEDS=1");
            std::panic::resume_unwind(panic);
        }
    }

    fn fail(&self, words: &str) -> ! {
        panic!("seed {}: {words}", self.seed);
    }

    fn tell(&mut self, mark: &str, what: &impl std::fmt::Debug) {
        if !self.is_told {
            return;
        }
        if self.story.len() == STORY_MAX {
            self.story.pop_front();
        }
        let at = self.now.duration_since(self.born).as_millis();
        let words: String = format!("{what:?}").replace("\\\"", "\"").chars().take(420).collect();
        self.story.push_back(format!("{at:>8} {mark} {words}"));
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number - 1
    }

    fn step(&mut self) {
        match self.dice.below(20) {
            0 => self.client_comes(),
            1..=6 => self.client_acts(),
            7..=12 => {
                // Most of the time a server is quick.
                for _ in 0..1 + self.dice.below(6) {
                    self.server_acts();
                }
            }
            13 if self.dice.one_in(3) => self.server_ends(),
            13..=16 => {
                for _ in 0..1 + self.dice.below(8) {
                    self.pay();
                }
            }
            17 => {
                let millis = self.dice.pick(&[1, 1, 20, 20, 300, 300, 2_000, 9_000, 40_000]);
                self.deliver_before(ms(millis));
                self.pass(ms(millis));
            }
            18 => self.operator_acts(),
            _ if self.dice.one_in(4) => {
                let wait = self.gateway.deadline().map(|due| due.saturating_duration_since(self.now));
                self.deliver_before(wait.unwrap_or_default());
                if let Some(due) = self.gateway.deadline() {
                    self.now = self.now.max(due);
                    self.handle(Event::TimePassed);
                }
            }
            _ => self.handle(Event::TimePassed),
        }
    }

    /// Time passes in order: whatever is due on the way is told.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        for turn in 0.. {
            check!(self, turn < 10_000, "time does not pass: {:?}", self.gateway.deadline());
            match self.gateway.deadline().filter(|due| *due <= end) {
                Some(due) => {
                    self.now = self.now.max(due);
                    self.handle(Event::TimePassed);
                }
                None => break,
            }
        }
        self.now = end;
    }

    /// Nothing is on its way for longer than the gateway remembers the calls that were taken back.
    fn deliver_before(&mut self, time: Duration) {
        while time >= ms(9_000) && !self.owed.is_empty() {
            self.pay();
        }
    }

    /// One of the events that the world owes.
    fn pay(&mut self) {
        if let Some(event) = self.owed.pop_front() {
            self.handle(event);
        }
    }

    fn operator_acts(&mut self) {
        let ticket = self.next_ticket;
        let name = format!("b{}", self.dice.below(5));
        let backend = (!self.dice.one_in(4)).then_some(name.clone());
        self.next_ticket += 1;
        match self.dice.below(6) {
            0 => {
                self.tickets.insert(ticket);
                self.handle(Event::RestartAsked { ticket, backend, reason: "why not".into() });
            }
            1 => {
                self.tickets.insert(ticket);
                self.handle(Event::ResumeAsked { ticket, backend });
            }
            2 => {
                self.tickets.insert(ticket);
                let what =
                    if self.dice.one_in(2) { Switch::Backend(name) } else { Switch::Tool(format!("{name}__t0")) };
                let off = self.dice.one_in(2);
                self.handle(Event::SwitchAsked { ticket, what, off });
            }
            3 => {
                if let Some(serial) = self.some_server() {
                    let link = self.servers[&serial].link;
                    self.handle(Event::Measured { link, rss: 1 << 40 });
                }
            }
            _ => self.reconfigure(),
        }
    }

    fn reconfigure(&mut self) {
        let mut settings = self.settings.clone();
        match self.dice.below(5) {
            0 if settings.backends.len() > 1 => {
                let index = self.dice.below(settings.backends.len() as u64) as usize;
                settings.backends.remove(index);
            }
            1 => {
                let free = (0..6)
                    .map(|index| format!("b{index}"))
                    .find(|name| !settings.backends.iter().any(|backend| backend.name == *name));
                if let Some(name) = free {
                    let new = backend(&name, &mut self.dice);
                    settings.backends.push(new);
                }
            }
            2 => {
                let index = self.dice.below(settings.backends.len() as u64) as usize;
                let name = settings.backends[index].name.clone();
                settings.backends[index] = backend(&name, &mut self.dice);
            }
            3 => settings.backends.rotate_left(1),
            _ => settings.limits.page = 1 + self.dice.below(6) as usize,
        }
        self.settings = settings.clone();
        self.handle(Event::Configured(Box::new(settings)));
        if self.dice.one_in(2) {
            let ticket = self.next_ticket;
            self.next_ticket += 1;
            self.tickets.insert(ticket);
            self.handle(Event::OutcomeAsked { ticket });
        }
    }

    fn handle(&mut self, event: Event) {
        self.server_news(&event);
        if let Event::ClientSaid { client, .. } | Event::ClientAsked { client, .. } = &event
            && !self.clients.contains_key(client)
        {
            return;
        }
        self.tell(">", &event);
        let time_passed = matches!(event, Event::TimePassed);
        let dead = match &event {
            Event::LinkDown { link, .. } => Some(link.serial),
            _ => None,
        };
        let actions = self.gateway.handle(event, self.now);
        for action in actions {
            self.act(action);
        }
        for (client, id) in std::mem::take(&mut self.due_now) {
            let open = self.clients.get(&client).is_some_and(|client| client.open.contains_key(&id));
            check!(self, !open, "client {client} still waits for {id}, though its backend is dead");
        }
        for (client, question) in std::mem::take(&mut self.taken_back) {
            let is_wanted = self.clients.contains_key(&client) && self.is_wanted(client, &question);
            check!(self, !is_wanted, "client {client} need not answer {question}, and the call that it is for goes on");
        }
        if let Some(dead) = dead {
            let asked = self.clients.iter().find(|(_, client)| client.is_asked_by(dead)).map(|(client, _)| *client);
            check!(self, asked.is_none(), "client {asked:?} is still asked by link {dead}, which is dead");
            let status = self.gateway.status(self.now);
            let links =
                status["backends"].as_array().into_iter().flatten().filter_map(|backend| backend["links"].as_array());
            let waits = links.flatten().any(|link| link["state"] == "given_up" && link["held"] != 0);
            check!(self, !waits, "something waits for what was given up: {status}");
        }
        if let Some(due) = self.gateway.deadline().filter(|_| time_passed) {
            check!(self, due > self.now, "what is due at once was not done");
        }
    }

    fn act(&mut self, action: Action) {
        self.tell("  <", &action);
        match action {
            Action::TellClient { client, message, about, said } => self.client_hears(client, &message, about, said),
            Action::DropClient { client } => self.fail(&format!("client {client} was dropped")),
            Action::Connect { link } => self.server_starts(link),
            Action::TellLink { link, message } => self.server_hears(link, &message),
            Action::Disconnect { link, .. } => {
                check!(self, self.servers.contains_key(&link.serial), "{link:?} was stopped and is not there");
                if let Some(server) = self.servers.get_mut(&link.serial) {
                    server.leaving = true;
                }
            }
            Action::Called(called) => self.count(&called),
            Action::Answer { ticket, .. } => {
                check!(self, self.tickets.remove(&ticket), "ticket {ticket} was answered twice");
            }
            Action::Over => {
                check!(self, self.stopping && self.servers.is_empty(), "over too soon");
                self.over = true;
            }
            Action::Keep { backend, .. } => {
                check!(self, self.settings.backends.iter().any(|known| known.name == backend), "who is {backend}?");
            }
            Action::Divert { link, message } => {
                let is_message = outlast_core::message::is_json_rpc(&message);
                check!(self, !is_message, "what {link:?} said was taken for no message");
            }
            Action::NotificationRefused(refused) => {
                let is_clients = matches!(refused.from, Sender::Client { .. });
                check!(self, is_clients, "{refused:?}: servers here send only what they may");
            }
            Action::Record(_) | Action::Note(_) => {}
        }
    }

    fn count(&mut self, called: &Called) {
        if let Some(client) = self.clients.get_mut(&called.client)
            && ["tools/call", "resources/read"].contains(&&*called.method)
        {
            client.called += 1;
        }
    }

    /// From here on everybody behaves, and all that is open comes to its end.
    fn rest(&mut self) {
        self.resting = true;
        for turn in 0.. {
            check!(self, turn < REST_MAX, "there is no rest: {}", self.gateway.status(self.now));
            if let Some(event) = self.owed.pop_front() {
                self.handle(event);
            } else if self.server_finishes() || self.client_finishes() {
            } else if self.is_waiting() {
                match self.gateway.deadline() {
                    Some(due) => {
                        self.now = self.now.max(due);
                        self.handle(Event::TimePassed);
                    }
                    None => self.fail("somebody waits, and nothing will happen"),
                }
            } else {
                break;
            }
        }
    }

    fn is_waiting(&self) -> bool {
        self.clients.values().any(|client| client.open.values().any(|request| !request.listens))
            || !self.tickets.is_empty()
    }

    /// Nothing is kept of what is over.
    fn quiet(&mut self) {
        let leaving: Vec<u64> = self.clients.keys().copied().collect();
        for client in leaving {
            check!(
                self,
                self.clients[&client].is_counted(),
                "client {client}: {} calls were counted, {} made",
                self.clients[&client].called,
                self.clients[&client].countable
            );
            self.client_leaves(client);
        }
        // Calls that waited for a client's next try, and whatever else time alone can end.
        self.pass(Duration::from_secs(2_000));
        while !self.owed.is_empty() || self.server_finishes() {
            self.pay();
        }
        let status = self.gateway.status(self.now);
        let under_way = &status["under_way"];
        for table in ["calls", "asked_of_clients", "batches", "waiting_for_offers", "errands"] {
            check!(self, under_way[table] == 0, "something is left of {table}: {status}");
        }
        let held: u64 =
            status["backends"].as_array().into_iter().flatten().filter_map(|backend| backend["held"].as_u64()).sum();
        check!(self, held == 0, "something is held: {status}");
        let links =
            status["backends"].as_array().into_iter().flatten().filter_map(|backend| backend["links"].as_array());
        let busy = links.flatten().any(|link| link["in_flight"] != 0);
        check!(self, !busy, "a link works on nothing and is busy: {status}");
        // One subscription for each stateless link, and nothing else.
        let own = under_way["own_requests"].as_u64().unwrap_or(0);
        check!(self, own <= self.servers.len() as u64, "{own} requests of ours are open: {status}");
        check!(self, under_way["links"] == self.servers.len(), "links that are not there: {status}");
        check!(self, status["clients"] == 0, "clients that are not there: {status}");
    }

    fn stop(&mut self) {
        self.resting = true;
        self.stopping = true;
        self.handle(Event::StopAsked);
        for _ in 0..5_000 {
            if self.over && self.owed.is_empty() {
                break;
            }
            match self.owed.pop_front() {
                Some(event) => self.handle(event),
                None if self.server_finishes() => {}
                None => self.pass(Duration::from_secs(1)),
            }
        }
        check!(self, self.over, "it does not end: {}", self.gateway.status(self.now));
    }
}

fn backend(name: &str, dice: &mut Dice) -> Backend {
    let is_http = dice.one_in(3);
    let version = dice.below(3);
    let kind = match is_http {
        true => Kind::Http { url: format!("http://{name}/{version}").into(), headers: BTreeMap::new(), is_sse: false },
        false => Kind::Stdio {
            command: name.into(),
            args: vec![version.to_string().into()],
            env: BTreeMap::new(),
            cwd: None,
            sandbox: None,
        },
    };
    let children = match dice.below(4) {
        0 if !is_http => Children::PerSession,
        1 if !is_http => Children::Pool(1 + dice.below(3) as u32),
        _ => Children::Shared,
    };
    Backend {
        inherit_env: dice.one_in(4),
        name: name.into(),
        kind,
        prefix: if dice.one_in(6) { String::new() } else { format!("{name}__") },
        allow: vec![],
        deny: vec![],
        children,
        children_max: 1 + dice.below(20) as usize,
        start: if dice.one_in(4) { Start::Lazy } else { Start::Eager },
        era: EraChoice::Auto,
        policy: Policy { restarts_max: Some(dice.below(6) as u32), ..Policy::exponential() },
        call_timeout: Duration::from_secs(5 + dice.below(30)),
        call_max: Duration::from_secs(40 + dice.below(60)),
        start_timeout: Duration::from_secs(5 + dice.below(20)),
        idle_stop: dice.one_in(4).then(|| Duration::from_secs(5 + dice.below(100))),
        memory_max: dice.one_in(3).then_some(1 << 30),
        breaker_failures: if dice.one_in(3) { 2 } else { 0 },
        breaker_open: Duration::from_secs(10),
        retry_annotated: dice.one_in(2),
    }
}

fn parsed(message: &[u8]) -> Value {
    serde_json::from_slice(message).unwrap_or_else(|error| panic!("not JSON ({error}): {message:?}"))
}
