//! Many clients and many backends of both eras around one `Gateway`. They behave as badly as the protocol allows.
//!
//! Every request, server request and answer carries a number, so that the world can check for each message which
//! client it belongs to, whether it is unchanged, and whether it may be sent here.

mod clients;
mod servers;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use bytes::Bytes;
use outlast_core::{
    exit::{Exit, How},
    gateway::{
        Action, Backend, Called, Children, EraChoice, Event, Fit, Front, Gateway, Kind, Limits, Link, Pattern,
        Placement, Profile, Rates, Refused, Said, Saved, Schemas, Sender, Settings, SharedClients, Start, Switch, Who,
    },
    json::Raw,
    message::{self, Id, Outline},
    restarts::Policy,
};
use serde_json::{Value, json};

use crate::{
    Dice, birth, check, ms, seeds,
    story::{Played, Story, play},
};
use clients::Client;
use servers::Server;

#[test]
fn every_request_is_answered_once_and_to_its_client() {
    let (from, seeds) = seeds(2_000);
    (from..from + seeds).for_each(play::<World>);
}

/// The same machine in front of one server that all clients use as their own.
#[test]
fn clients_that_share_a_server_are_kept_apart() {
    let (from, seeds) = seeds(500);
    (from..from + seeds).for_each(play::<SharedWorld>);
}

/// Whenever the gateway can be saved, another program may continue with it. All promises hold as without that.
#[test]
fn another_program_goes_on_at_idle_moments() {
    let (from, seeds) = seeds(500);
    (from..from + seeds).for_each(play::<UpgradedWorld>);
    let mut handovers = 0;
    for seed in from..from + seeds.min(20) {
        let mut world = UpgradedWorld::new(seed);
        world.run();
        handovers += world.0.handovers.as_ref().map_or(0, |(_, count)| *count);
    }
    assert!(handovers > seeds.min(20), "{handovers} handovers");
}

/// The same for the hub of a shared server.
#[test]
fn another_program_goes_on_with_a_shared_server() {
    let (from, seeds) = seeds(500);
    (from..from + seeds).for_each(play::<UpgradedSharedWorld>);
    let mut handovers = 0;
    for seed in from..from + seeds.min(20) {
        let mut world = UpgradedSharedWorld::new(seed);
        world.run();
        handovers += world.0.handovers.as_ref().map_or(0, |(_, count)| *count);
    }
    assert!(handovers > seeds.min(20), "{handovers} handovers");
}

/// A program reads what the last one wrote. If this fails, the format of the state has changed: it needs a new version
/// (`outlast::upgrade`), a migration from this one, and a file of its own.
#[test]
fn the_format_of_a_saved_gateway_is_that_of_its_version() {
    for line in include_str!("gateway/saved-1.jsonl").lines() {
        let saved: Saved = serde_json::from_str(line).unwrap();
        // The clock of a system that was just started does not reach back that far.
        let now = birth() + Duration::from_secs(24 * 3600);
        let written: Value = serde_json::from_str(line).unwrap();
        let numbers = written["numbers"].as_object().unwrap();
        let mut dice = Dice::new(1);
        let backends = written["backends"].as_array().unwrap().iter().map(|saved| {
            let (name, _) = numbers.iter().find(|(_, number)| **number == saved["number"]).unwrap();
            let slots = written["slots"].as_array().unwrap().iter().map(|slot| &slot["key"]);
            let is_pool = slots.filter(|key| key["backend"] == saved["number"]).any(|key| key["sharing"]["pool"] == 0);
            let children = if is_pool { Children::Pool(3) } else { Children::Shared };
            Backend { children, ..backend(name, false, &mut dice) }
        });
        let backends = backends.collect();
        let settings = Settings { backends, ..World::new(0).settings };
        let again = Gateway::restore(settings, saved, Box::new(AllFit::default()), |_| true, now).save(now).unwrap();
        assert_eq!(serde_json::to_string(&again).unwrap(), line);
    }
}

const STEPS: u64 = 130;
const REST_MAX: u32 = 3_000;

/// All arguments fit; every third result comes later.
#[derive(Default)]
pub(crate) struct AllFit(u64);

impl Schemas for AllFit {
    fn check(&mut self, _schema: &[u8], _arguments: Raw<'_>) -> Option<Fit> {
        self.0 += 1;
        (!self.0.is_multiple_of(3)).then_some(Fit::Fits)
    }
}

pub(crate) struct World {
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
    /// Events that the world will report to the gateway, in order.
    owed: VecDeque<Event>,
    next_number: u64,
    /// How often servers received each request, without lines that were not written.
    heard: BTreeMap<u64, u32>,
    /// The link that each request was last sent to.
    heard_on: BTreeMap<u64, u64>,
    /// The client of each request.
    asked_by: BTreeMap<u64, u64>,
    /// The capabilities of all clients, if they share one server.
    shared: Option<Value>,
    next_ticket: u64,
    tickets: BTreeSet<u64>,
    story: Story,
    /// All clients and servers behave well, and nothing new begins.
    resting: bool,
    stopping: bool,
    over: bool,
    /// Requests that must be answered within the current event: `(client, id)`.
    due_now: Vec<(u64, String)>,
    /// Server requests that were cancelled in the current event while their calls were open. A link that the gateway
    /// ends cancels its server requests before its calls fail.
    taken_back: Vec<(u64, Value)>,
    /// When another program continues, and how often it did.
    handovers: Option<(Dice, u64)>,
}

impl Played for World {
    fn new(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        let count = 1 + dice.below(4);
        let backends = (0..count).map(|index| backend(&format!("b{index}"), dice.one_in(3), &mut dice)).collect();
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
            is_host: false,
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
            gateway: Gateway::new(settings.clone(), seed, BTreeMap::new(), Box::new(AllFit::default())),
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
            shared: None,
            next_ticket: 1,
            tickets: BTreeSet::new(),
            story: Story::default(),
            resting: false,
            stopping: false,
            over: false,
            due_now: Vec::new(),
            taken_back: Vec::new(),
            handovers: None,
        }
    }

    fn story(&mut self) -> &mut Story {
        &mut self.story
    }

    fn run(&mut self) {
        for _ in 0..STEPS {
            self.step();
        }
        if self.seed.is_multiple_of(3) {
            // A stop in the middle: every open request is still answered.
            self.stop();
            let waits = self.clients.iter().find(|(_, client)| !client.open.is_empty()).map(|(client, _)| *client);
            check!(self, waits.is_none(), "client {waits:?} waits for a gateway that is over");
            check!(self, self.tickets.is_empty(), "an operator waits for a gateway that is over");
            return;
        }
        self.rest();
        self.quiet();
        self.stop();
    }
}

impl World {
    fn fail(&self, words: &str) -> ! {
        panic!("seed {}: {words}", self.seed);
    }

    fn tell(&mut self, mark: &str, what: &impl std::fmt::Debug) {
        self.story.tell(self.now.duration_since(self.born), mark, what);
    }

    /// What a shared server is given years for is not waited for.
    fn deadline(&self) -> Option<Instant> {
        let year = Duration::from_secs(365 * 24 * 3600);
        self.gateway.deadline().filter(|due| self.shared.is_none() || *due < self.now + year)
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
                // Most of the time a server answers quickly.
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
            18 if self.shared.is_none() => self.operator_acts(),
            _ if self.dice.one_in(4) => {
                let wait = self.deadline().map(|due| due.saturating_duration_since(self.now));
                self.deliver_before(wait.unwrap_or_default());
                if let Some(due) = self.deadline() {
                    self.now = self.now.max(due);
                    self.handle(Event::TimePassed);
                }
            }
            _ => self.handle(Event::TimePassed),
        }
    }

    /// Time passes, with an event at each deadline on the way.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        for turn in 0.. {
            check!(self, turn < 10_000, "time does not pass: {:?}", self.deadline());
            match self.deadline().filter(|due| *due <= end) {
                Some(due) => {
                    self.now = self.now.max(due);
                    self.handle(Event::TimePassed);
                }
                None => break,
            }
        }
        self.now = end;
    }

    /// No message is in transit for longer than the gateway remembers cancelled calls.
    fn deliver_before(&mut self, time: Duration) {
        while time >= ms(9_000) && !self.owed.is_empty() {
            self.pay();
        }
    }

    /// Reports one of the pending events.
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
                    let new = backend(&name, self.dice.one_in(3), &mut self.dice);
                    settings.backends.push(new);
                }
            }
            2 => {
                let index = self.dice.below(settings.backends.len() as u64) as usize;
                let name = settings.backends[index].name.clone();
                settings.backends[index] = backend(&name, self.dice.one_in(3), &mut self.dice);
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
        // A client that leaves and a server that ends are gone already in this world.
        if !matches!(event, Event::ClientLeft { .. } | Event::LinkDown { .. }) {
            self.hand_over();
        }
        self.server_news(&event);
        if let Event::ClientSaid { client, .. } | Event::ClientRequested { client, .. } = &event
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
            let status = self.gateway.status(self.now).to_json();
            let links =
                status["backends"].as_array().into_iter().flatten().filter_map(|backend| backend["links"].as_array());
            let waits = links.flatten().any(|link| link["state"] == "given_up" && link["held"] != 0);
            check!(self, !waits, "something waits for what was given up: {status}");
        }
        self.check_separation();
        if let Some(due) = self.deadline().filter(|_| time_passed) {
            check!(self, due > self.now, "what is due at once was not done");
        }
    }

    /// Another program continues, if the gateway can be saved now.
    fn hand_over(&mut self) {
        let Some((dice, _)) = &mut self.handovers else { return };
        if self.gateway.busy().is_some() || !dice.one_in(3) {
            return;
        }
        self.tell(">", &"handover");
        for action in self.gateway.handle(Event::HandoverBegan, self.now) {
            self.act(action);
        }
        // Clients whose subscriptions just ended have not left yet.
        let Ok(saved) = self.gateway.save(self.now) else { return };
        if let Some((_, count)) = &mut self.handovers {
            *count += 1;
        }
        let text = serde_json::to_string(&saved).expect("a state is JSON");
        let read: Saved = serde_json::from_str(&text).unwrap_or_else(|error| self.fail(&format!("{error} in {text}")));
        check!(self, read == saved, "saved {saved:?}, read {read:?}");
        let settings = Settings { backends: self.gateway.backends().cloned().collect(), ..self.settings.clone() };
        let mut gateway = match self.shared {
            Some(_) => Gateway::restore_shared_server("b0", read, self.now).expect("the server is shared"),
            None => Gateway::restore(settings, read, Box::new(AllFit::default()), |_| true, self.now),
        };
        check!(self, gateway.exclusive() == self.gateway.exclusive(), "{:?}", gateway.exclusive());
        let again = gateway.save(self.now);
        check!(self, again.as_ref() == Ok(&saved) || self.has_http(), "saved {saved:?}, then {again:?}");
        let (before, after) = (self.gateway.status(self.now).to_json(), gateway.status(self.now).to_json());
        for table in ["backends", "catalogue", "collisions", "switched_off"] {
            check!(self, before[table] == after[table], "{table} was {}, and is {}", before[table], after[table]);
        }
        let resumed: Vec<Link> = gateway.links().into_iter().filter(|link| self.is_http(*link)).collect();
        std::mem::swap(&mut self.gateway, &mut gateway);
        for link in resumed {
            for action in self.gateway.handle(Event::LinkResumed { link }, self.now) {
                self.act(action);
            }
        }
    }

    fn has_http(&self) -> bool {
        self.gateway.backends().any(|backend| matches!(backend.kind, Kind::Http { .. }))
    }

    fn is_http(&self, link: Link) -> bool {
        self.gateway.backend(link.backend).is_some_and(|backend| matches!(backend.kind, Kind::Http { .. }))
    }

    fn act(&mut self, action: Action) {
        self.tell("  <", &action);
        match action {
            Action::TellClient { client, message, about, said } => self.client_hears(client, &message, about, said),
            Action::Separate { client, .. } => self.client_is_separated(client),
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
            Action::Divert { link, message, .. } => {
                let is_message = outlast_core::message::is_json_rpc(&message);
                check!(self, !is_message, "what {link:?} said was taken for no message");
            }
            Action::NotificationRefused(refused) => {
                let is_clients = matches!(refused.from, Sender::Client { .. });
                check!(self, is_clients, "{refused:?}: servers here send only what they may");
            }
            Action::Check(job) => self.owed.push_back(Event::Checked { ticket: job.ticket, fit: Fit::Fits }),
            Action::Record(_) | Action::Note(_) | Action::DropCheck { .. } => {}
        }
    }

    fn count(&mut self, called: &Called) {
        if let Some(client) = self.clients.get_mut(&called.client)
            && ["tools/call", "resources/read"].contains(&&*called.method)
        {
            client.called += 1;
        }
    }

    /// From here on clients and backends behave well, and every open request is answered.
    fn rest(&mut self) {
        self.resting = true;
        for turn in 0.. {
            check!(self, turn < REST_MAX, "there is no rest: {}", self.gateway.status(self.now).to_json());
            if let Some(event) = self.owed.pop_front() {
                self.handle(event);
            } else if self.server_finishes() || self.client_finishes() {
            } else if self.is_waiting() {
                match self.deadline() {
                    Some(due) => {
                        self.now = self.now.max(due);
                        self.handle(Event::TimePassed);
                    }
                    None => {
                        let open: Vec<_> = self
                            .clients
                            .iter()
                            .filter(|(_, client)| !client.open.is_empty())
                            .map(|(client, state)| (client, state.open.keys().collect::<Vec<_>>()))
                            .collect();
                        let words = format!("a request waits, and no event will come: {open:?} {:?}", self.tickets);
                        self.fail(&words)
                    }
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

    /// No state of ended requests is kept.
    fn quiet(&mut self) {
        let leaving: Vec<u64> = self.clients.keys().copied().collect();
        for client in leaving {
            // A handover ends the subscription of a single request.
            if !self.clients.contains_key(&client) {
                continue;
            }
            check!(
                self,
                self.clients[&client].is_counted(),
                "client {client}: {} calls were counted, {} made",
                self.clients[&client].called,
                self.clients[&client].countable
            );
            self.client_leaves(client);
        }
        // Calls that waited for a client's retry, and all else that only time can end.
        self.pass(Duration::from_secs(2_000));
        while !self.owed.is_empty() || self.server_finishes() {
            self.pay();
        }
        let status = self.gateway.status(self.now).to_json();
        let under_way = &status["under_way"];
        for table in ["calls", "asked_of_clients", "batches", "waiting_for_offers", "waiting_for_checks", "errands"] {
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
        check!(self, self.over, "it does not end: {}", self.gateway.status(self.now).to_json());
    }
}

/// Any settings of a backend.
pub(crate) fn backend(name: &str, is_http: bool, dice: &mut Dice) -> Backend {
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
        placement: Placement::Every,
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

/// A world in which other programs take over.
struct UpgradedWorld(World);

impl Played for UpgradedWorld {
    fn new(seed: u64) -> UpgradedWorld {
        let mut world = World::new(seed);
        world.handovers = Some((Dice::new(seed ^ 0x5eed_0004), 0));
        UpgradedWorld(world)
    }

    fn story(&mut self) -> &mut Story {
        self.0.story()
    }

    fn run(&mut self) {
        self.0.run();
    }
}

/// A world in which other programs take over the hub of a shared server.
struct UpgradedSharedWorld(World);

impl Played for UpgradedSharedWorld {
    fn new(seed: u64) -> UpgradedSharedWorld {
        let SharedWorld(mut world) = SharedWorld::new(seed);
        world.handovers = Some((Dice::new(seed ^ 0x5eed_0006), 0));
        UpgradedSharedWorld(world)
    }

    fn story(&mut self) -> &mut Story {
        self.0.story()
    }

    fn run(&mut self) {
        self.0.run();
    }
}

/// A world in which the only server is a relay, which answers everything.
struct SharedWorld(World);

impl Played for SharedWorld {
    fn new(seed: u64) -> SharedWorld {
        let mut world = World::new(seed);
        let capabilities = match seed % 3 {
            0 => json!({}),
            1 => json!({"elicitation": {}, "sampling": {}}),
            _ => json!({"elicitation": {}, "sampling": {}, "roots": {}}),
        };
        let clients = SharedClients { capabilities: capabilities.to_string(), info: None, version: None };
        world.gateway = Gateway::of_shared_server("b0", clients, seed);
        world.settings.backends = world.gateway.backends().cloned().collect();
        world.settings.profiles.clear();
        world.shared = Some(capabilities);
        SharedWorld(world)
    }

    fn story(&mut self) -> &mut Story {
        self.0.story()
    }

    fn run(&mut self) {
        self.0.run();
    }
}

fn parsed(message: &[u8]) -> Value {
    serde_json::from_slice(message).unwrap_or_else(|error| panic!("not JSON ({error}): {message:?}"))
}
