//! A client, servers and a driver around one `Relay`, all as badly behaved as the protocol allows.
//!
//! Every message carries a number of its own (`"n":17`), so that the world can check for each line whose it is,
//! whether it is unchanged, and whether it may be sent here.

mod checks;
mod client;
mod servers;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    panic::AssertUnwindSafe,
    time::Instant,
};

use bytes::Bytes;
use outlast_core::{
    exit::{Exit, How},
    record,
    relay::{
        Action, ClientEnd, Event, Limits, NotWritten, OnCleanExit, Origin, Reading, Relay, Reload, Retry, Saved,
        Settings,
    },
    restarts::Policy,
};
use serde_json::Value;

use crate::{Dice, birth, check, ms, seeds};
use client::{Ask, Client, Sent};
use servers::{Said, Server};

#[test]
fn every_conversation_outlasts_its_servers() {
    let (from, seeds) = seeds(2_000);
    for seed in from..from + seeds {
        World::new(seed).run();
    }
}

/// The same, with many restarts while calls are open: drains overlap, and progress comes from several processes.
#[test]
fn conversations_survive_many_restarts_with_open_calls() {
    let (from, seeds) = seeds(2_000);
    for seed in from..from + seeds.div_ceil(4) {
        let mut world = World::new(seed);
        world.hasty = true;
        world.run();
    }
}

/// Before any event another program may continue with the saved conversation. No difference can be seen from outside.
#[test]
fn a_conversation_survives_an_upgrade_at_any_moment() {
    let (from, seeds) = seeds(2_000);
    let mut upgrades = 0;
    for seed in from..from + seeds.div_ceil(16) {
        for hasty in [false, true] {
            let mut plain = World::new(seed);
            plain.hasty = hasty;
            let mut upgraded = World::new(seed);
            (upgraded.hasty, upgraded.upgrades) = (hasty, Some((Dice::new(seed ^ 0x5eed_0003), 0)));
            let (plain, upgraded) = (plain.run(), upgraded.run());
            let differs = plain.story.iter().zip(&upgraded.story).find(|(one, other)| one != other);
            assert_eq!((differs, plain.story.len()), (None, upgraded.story.len()), "seed {seed}, hasty {hasty}");
            upgrades += upgraded.upgrades.map_or(0, |(_, count)| count);
        }
    }
    // Restarts, which are not saved, run for most of the time in these worlds.
    assert!(upgrades > seeds / 4, "{upgrades} upgrades");
}

/// A program reads what the last one wrote. If this fails, the format of the state has changed: it needs a new version
/// (`outlast::upgrade`), a migration from this one, and a file of its own.
#[test]
fn the_format_of_a_saved_conversation_is_that_of_its_version() {
    let settings = World::new(0).settings;
    for line in include_str!("relay/saved-1.jsonl").lines() {
        let saved: Saved = serde_json::from_str(line).unwrap();
        let now = birth();
        let again = Relay::restore(settings.clone(), saved, now).save(now).unwrap();
        assert_eq!(serde_json::to_string(&again).unwrap(), line);
    }
}

/// Conversations that failed once, each in its own way. A change of the random numbers makes other worlds of them.
#[test]
fn conversations_that_failed_once_succeed() {
    let table = [
        (22, "a server that was late with its handshake and being stopped was still sent requests"),
        (39, "a client that went back to the handshake era during a restart made two starts at once"),
        (18, "tools told of in our own words were never compared with those of the server that came"),
        (243, "a client that listed again from memory was not told again of what had changed"),
        (89, "a change was announced that the client had just been shown"),
        (95, "the results of the stateless era kept their long ttl once the client was gone"),
        (124, "the end of a subscription was forwarded from a server that was being stopped"),
        (175, "a notification stayed held after giving up"),
        (349, "a request that no pipe took was said to have been taken, as its drain had been over"),
        (372, "an opening was failed at the second end instead of being answered in our own words"),
        (535, "who asked while outlast left by itself got no answer"),
        (849, "a ping that had waited for the first server was failed"),
        (1193, "a ping beyond the limits of the hold was failed"),
        (950, "a ping was failed when its drain was over"),
        (2118, "a candidate in the middle of its probe, and a client that went back to the handshake era"),
        (2223, "a restart and a change of era in one: two servers were started and one was forgotten"),
        (2399, "an unsent notification was told after the requests that followed it"),
        (428, "a list that had waited in a batch was not known to be outdated"),
        (2486, "a changed file waited for a handshake that the client had not begun"),
        (2698, "a batch waited for ever for a member that was cancelled"),
        (1913, "the end of a subscription was not seen as one once the client was gone"),
        (3338, "a refused opening brought a client back that was gone"),
        (3661, "a cancelled probe was answered when the client went back to the handshake era"),
        (6491, "a server older than was told was let in, and every other one refused from then on"),
        (15113, "a server older than was told decided whether the client may send batches"),
        (9226, "the lists of a server that was being stopped were still timed"),
        (13091, "a cancellation was not heard while outlast left by itself"),
        (13974, "a changed file waited for a cancelled request"),
        (11255, "a server that never answered a probe was waited for without end"),
        (13147, "a second opening announced a list that was never compared"),
        (20509, "a list that had waited in a batch overtook a newer one"),
        (35881, "an opening was held for a server that had exited and was not started again"),
        (124396, "a restart waited for the answer to a probe that was cancelled"),
        (65, "an opening was asked a third time, as a restart had been asked for meanwhile"),
    ];
    for (seed, _what_broke) in table {
        World::new(seed).run();
    }
}

const RANDOM: &str = "x7q";
/// The servers' own tool that makes them exit with 42.
const RESTART_TOOL: &str = "restart_here";
const STORY_MAX: usize = 400;
const REST_MAX: u32 = 5_000;

/// What the current event was about, for the checks that follow it.
enum Told {
    /// The client sent the message of this number.
    Said(u64),
    /// The client sent several at once, or a message without a number.
    Something,
    Started(u32),
    /// A server sent the message of this number.
    Heard(u32, u64),
    Down(u32, How),
    Time,
    Other,
}

struct World {
    seed: u64,
    dice: Dice,
    born: Instant,
    now: Instant,
    relay: Relay,
    settings: Settings,
    story: VecDeque<String>,
    next_number: u64,
    /// No further faults.
    calm: bool,
    /// No server ends and no restart is requested in this world.
    peaceful: bool,
    hasty: bool,
    /// Children whose queues the relay asked for, and the queue lengths that it was last told.
    take_back: Vec<u32>,
    queues: BTreeMap<u32, usize>,
    /// Requests refused because the server did not read.
    refused: Vec<u64>,
    /// Revisions whose cache the relay asked for, and the lists of the entry that it was given.
    caching: Vec<String>,
    cached: [Option<Vec<Value>>; 4],
    has_entry: bool,
    ever_ready: bool,
    /// Servers that counted as hung.
    hung: Vec<u32>,
    more: Dice,
    /// If another program may continue before an event: random numbers, and how often one did.
    upgrades: Option<(Dice, u64)>,
    /// Servers may have tools with the names of outlast's tools.
    clash: bool,

    start_due: bool,
    next_generation: u32,
    building: bool,
    marking: bool,
    reading: Vec<u64>,
    servers: BTreeMap<u32, Server>,
    base_lists: servers::Lists,
    said: HashMap<u64, Said>,

    client: Client,
    sent: HashMap<u64, Sent>,
    asks: BTreeMap<u64, Ask>,
    /// Members of the client's batches.
    batches: HashMap<u64, Vec<u64>>,
    /// Error lines of outlast without an id that are due at once.
    nulls_due: u32,
    /// By the id that the client knows.
    questions: HashMap<String, client::Question>,

    next_ticket: u64,
    tickets_waiting: Vec<u64>,
    tickets_running: Vec<u64>,
    finished_now: bool,
    /// The generation that the current event makes ready.
    becoming: Option<u32>,
    /// The generation whose end the current event reports.
    ending: Option<u32>,
    /// A server exited on purpose, and outlast may exit with it.
    may_leave: bool,
    /// outlast exits with it.
    left: bool,
    gone: Option<ClientEnd>,
    ended: bool,
    any_end: bool,
    announced: [bool; 3],
    /// Families of which the client has asked for a list in a batch.
    batched: [bool; 3],
    /// The last discover result that the client received.
    discovered: Option<Value>,
    /// Generations whose requests the relay just answered itself, because they can send nothing more.
    cancelled_for: Vec<u32>,
}

impl World {
    fn new(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        // A second random generator for later additions, so that the seeds above keep their worlds.
        let mut more = Dice::new(seed ^ 0x5eed_0002);
        let now = birth();
        let small = dice.one_in(3);
        let mut policy = dice.pick(&[Policy::watchdog(), Policy::watchdog(), Policy::exponential(), Policy::session()]);
        policy.first_ready_min = ms(500);
        policy.healthy = ms(8_000);
        let mut settings = Settings {
            id: "s1".into(),
            name: "sim".into(),
            tools: !dice.one_in(4),
            retry: if dice.one_in(2) { Retry::Never } else { Retry::Annotated },
            reload: if dice.one_in(3) { Reload::Replace } else { Reload::BlueGreen },
            build: dice.one_in(2),
            on_clean_exit: if dice.one_in(2) { OnCleanExit::End } else { OnCleanExit::Restart },
            answer_after: None,
            cache: more.one_in(2),
            heartbeat: more.one_in(3).then_some(ms(400)),
            restart_tool: RESTART_TOOL.into(),
            call_timeout: None,
            call_timeouts: BTreeMap::new(),
            memory_max: Some(1 << 20),
            policy,
            seed,
            random: RANDOM.into(),
            limits: Limits::default(),
        };
        let limits = &mut settings.limits;
        limits.holding.hold_max = ms(3_000);
        limits.holding.held_max = if small { 3 } else { 256 };
        limits.holding.held_bytes_max = if small { 700 } else { 1 << 20 };
        limits.holding.opening_wait = ms(1_500);
        limits.handshake.first_handshake_max = ms(4_000);
        limits.handshake.handshake_max = ms(2_000);
        limits.draining.drain_max = ms(3_000);
        limits.draining.draining_max = if small { 1 } else { 2 };
        limits.lists.list_max = ms(400);
        limits.lists.list_bytes_max = if dice.one_in(8) { 60 } else { 4 << 20 };
        limits.restart.restart_wait = ms(5_000);
        limits.messages.teardown_wait = ms(100);
        limits.handshake.early_max = 3;
        limits.messages.batch_max = 5;
        limits.queue.queued_bytes_max = if more.one_in(4) { 250 } else { 8 << 20 };
        limits.queue.queued_bytes_stop = 2_000;
        limits.queue.unread_max = ms(300);
        limits.early.answer_after_cached = ms(700);
        limits.early.answer_after_uncached = ms(2_000);
        limits.early.broken_after = ms(600);
        limits.cache.cache_read_after = ms(50);
        limits.cache.cache_read_max = ms(200);
        let clash = dice.one_in(6);
        let peaceful = dice.one_in(6);
        if peaceful {
            settings.limits.hang.ping_max = ms(1 << 30);
            settings.limits.restart.restart_ping_max = ms(1 << 30);
        } else {
            settings.call_timeout = more.one_in(3).then_some(ms(1_500));
            settings.call_timeouts = [("t1".to_owned(), ms(300)), ("t2".to_owned(), ms(0))].into();
            settings.limits.restart.restart_answered_wait = ms(70);
            settings.limits.restart.restart_called_wait = ms(100);
            settings.limits.restart.restart_ping_max = ms(100);
            settings.limits.hang.ping_max = ms(500);
            settings.limits.hang.quiet_max = ms(3_000);
            settings.limits.hang.memory_gap = ms(2_000);
        }
        World {
            seed,
            born: now,
            now,
            relay: Relay::new(settings.clone()),
            settings,
            story: VecDeque::new(),
            next_number: 1,
            calm: false,
            peaceful,
            hasty: false,
            take_back: Vec::new(),
            queues: BTreeMap::new(),
            refused: Vec::new(),
            caching: Vec::new(),
            cached: [None, None, None, None],
            has_entry: false,
            ever_ready: false,
            hung: Vec::new(),
            more,
            upgrades: None,
            clash,
            start_due: true,
            next_generation: 1,
            building: false,
            marking: false,
            reading: Vec::new(),
            servers: BTreeMap::new(),
            base_lists: servers::lists(&mut dice, clash),
            said: HashMap::new(),
            client: Client::new(&mut dice),
            sent: HashMap::new(),
            asks: BTreeMap::new(),
            batches: HashMap::new(),
            nulls_due: 0,
            questions: HashMap::new(),
            next_ticket: 1,
            tickets_waiting: Vec::new(),
            tickets_running: Vec::new(),
            finished_now: false,
            becoming: None,
            ending: None,
            may_leave: false,
            left: false,
            discovered: None,
            cancelled_for: Vec::new(),
            gone: None,
            ended: false,
            any_end: false,
            announced: [false; 3],
            batched: [false; 3],
            dice,
        }
    }

    fn run(mut self) -> World {
        let steps = 40 + self.dice.below(130);
        for _ in 0..steps {
            if self.ended {
                break;
            }
            self.step();
        }
        if self.gone.is_none() && self.dice.one_in(4) && !self.ended {
            self.client_ends();
        }
        self.rest();
        self.check_rest();
        if !self.ended {
            let saved = self.relay.save(self.now).map(|_| ());
            check!(self, saved.is_ok(), "a conversation at rest cannot be saved: {saved:?}");
        }
        self
    }

    /// Another program continues, if the relay can be saved now.
    fn upgrade(&mut self) {
        let Some((dice, count)) = &mut self.upgrades else { return };
        if !dice.one_in(3) {
            return;
        }
        let Ok(saved) = self.relay.save(self.now) else { return };
        *count += 1;
        let text = serde_json::to_string(&saved).expect("a state is JSON");
        let read: Saved = serde_json::from_str(&text).unwrap_or_else(|error| self.fail(&format!("{error} in {text}")));
        check!(self, read == saved, "saved {saved:?}, read {read:?}");
        // Names that were given out already are not those of the new program.
        let settings = Settings { id: "other".into(), random: "other".into(), ..self.settings.clone() };
        let relay = Relay::restore(settings, read, self.now);
        check!(self, relay.save(self.now).as_ref() == Ok(&saved), "saved {saved:?}, then {:?}", relay.save(self.now));
        check!(self, relay.deadline() == self.relay.deadline(), "another deadline after an upgrade");
        check!(self, relay.reads_client() == self.relay.reads_client(), "another backpressure after an upgrade");
        self.relay = relay;
    }

    fn step(&mut self) {
        self.turn();
        self.report_queues();
    }

    fn turn(&mut self) {
        if self.hasty && self.dice.one_in(3) {
            return self.hurry();
        }
        match self.dice.below(100) {
            0..=29 => self.client_speaks(),
            30..=44 => self.server_reads(),
            45..=68 => self.server_speaks(),
            69..=76 => self.time_passes(),
            77..=88 => {
                self.driver_goes_on();
            }
            89..=93 if !self.peaceful => self.server_ends(),
            94..=96 if !self.peaceful => self.restart_is_asked(),
            97 if self.dice.one_in(8) && self.gone.is_none() => self.client_ends(),
            98 if !self.peaceful && self.more.one_in(3) && !self.ended => self.server_grows(),
            _ => self.server_logs(),
        }
    }

    fn hurry(&mut self) {
        let new = self.any_server(|server| server.alive && !server.serves && server.stop.is_none());
        match (self.dice.below(4), new) {
            (0, None) if !self.peaceful && !self.start_due && !self.marking && !self.building => {
                self.restart_is_asked()
            }
            (0 | 1, Some(generation)) => self.server_hurries(generation),
            (0 | 1, None) => {
                self.driver_goes_on();
            }
            _ => {
                if let Some(generation) = self.any_server(Server::can_progress) {
                    self.server_progresses(generation);
                } else {
                    self.server_reads();
                }
            }
        }
    }

    /// Everything that has begun ends, and no further fault occurs.
    fn rest(&mut self) {
        self.calm = true;
        for _ in 0..REST_MAX {
            if self.ended {
                return;
            }
            if self.driver_goes_on() || self.server_moves() {
                self.report_queues();
                continue;
            }
            let must_end = |server: &&Server| server.alive && (server.stop.is_some() || server.stdin_closed);
            if let Some(generation) = self.servers.values().find(must_end).map(|server| server.generation) {
                self.end_server(generation);
                continue;
            }
            match self.relay.deadline() {
                Some(deadline) => {
                    self.now = self.now.max(deadline);
                    self.happen(Event::TimePassed, Told::Time);
                }
                None => return,
            }
        }
        self.fail("it never comes to rest");
    }

    // ---- what the driver does ---------------------------------------------------------------------

    /// The driver carries out a pending action.
    fn driver_goes_on(&mut self) -> bool {
        let mut due = Vec::new();
        due.extend(self.start_due.then_some(0));
        due.extend(self.building.then_some(1));
        due.extend(self.marking.then_some(2));
        due.extend((!self.reading.is_empty()).then_some(3));
        due.extend((!self.caching.is_empty()).then_some(4));
        if due.is_empty() {
            return false;
        }
        match self.dice.pick(&due) {
            0 => {
                self.start_due = false;
                if !self.calm && !self.peaceful && self.dice.one_in(8) {
                    self.any_end = true;
                    self.happen(Event::StartFailed("permission denied".into()), Told::Other);
                } else {
                    let generation = self.next_generation;
                    self.next_generation += 1;
                    let server = self.new_server(generation);
                    self.servers.insert(generation, server);
                    let event = Event::ServerStarted { generation, pid: 1_000 + generation, unix: 1e9 };
                    self.happen(event, Told::Started(generation));
                }
            }
            1 => {
                self.building = false;
                let fails = !self.calm && self.dice.one_in(3) || self.gone.is_some() || self.left;
                let result = if fails { Err("error: no\nmore".to_owned()) } else { Ok(()) };
                self.happen(Event::BuildEnded(result), Told::Other);
            }
            2 => {
                self.marking = false;
                let unwritten = || NotWritten { why: "read-only".into(), timestamp: 6.0, iso_time: "then".into() };
                let result = if self.dice.one_in(6) { Err(unwritten()) } else { Ok("marker".to_owned()) };
                self.happen(Event::MarkerWritten(result), Told::Other);
            }
            4 => {
                let revision = self.caching.remove(0);
                let entry = self.cache_entry(&revision);
                self.happen(Event::CacheRead { revision, entry }, Told::Other);
            }
            _ => {
                let key = self.reading.remove(0);
                let path = "marker".to_owned();
                let reading = match self.dice.below(3) {
                    0 => Reading::Missing { path },
                    1 => Reading::Corrupt { path, error: "torn".into() },
                    _ => Reading::Valid { timestamp: 5.0, pid: 3, reason: "why".into(), iso_time: "then".into() },
                };
                self.happen(Event::MarkerRead { key, reading, unix: 1e9 }, Told::Other);
            }
        }
        true
    }

    fn time_passes(&mut self) {
        self.now += ms(self.dice.pick(&[0, 1, 10, 50, 100, 200, 500, 1_000, 4_000]));
        if let Some(deadline) = self.relay.deadline() {
            if self.dice.one_in(4) {
                self.now = self.now.max(deadline);
            }
            // Sometimes another event comes first.
            if deadline <= self.now && !self.dice.one_in(6) {
                self.happen(Event::TimePassed, Told::Time);
            }
        }
    }

    fn restart_is_asked(&mut self) {
        if self.ended {
            return;
        }
        let origin = self.dice.pick(&[Origin::Control, Origin::Control, Origin::Watch]);
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.tickets_waiting.push(ticket);
        self.any_end = true;
        let (reason, at_once) = (format!("r{}", ticket % 3), self.more.one_in(4));
        self.happen(Event::RestartAsked { ticket, origin, reason, at_once }, Told::Other);
    }

    fn server_grows(&mut self) {
        if let Some(generation) = self.any_server(|server| server.alive) {
            let bytes = self.more.below(3) << 19;
            self.happen(Event::ServerMeasured { generation, bytes }, Told::Other);
        }
    }

    fn client_ends(&mut self) {
        let end = if self.dice.one_in(3) { ClientEnd::Broken } else { ClientEnd::Closed };
        self.gone = Some(end);
        self.happen(Event::ClientEnded(end), Told::Other);
    }

    fn server_logs(&mut self) {
        if let Some(generation) = self.any_server(|server| server.alive) {
            let number = self.number();
            self.happen(Event::ServerLogged(generation, format!("line {number} of stderr")), Told::Other);
        }
    }

    fn server_ends(&mut self) {
        // A server that was told to stop is the likeliest to exit.
        let stopping = self.any_server(|server| server.alive && server.stop.is_some());
        let generation = if self.dice.one_in(3) { None } else { stopping };
        if let Some(generation) = generation.or_else(|| self.any_server(|server| server.alive)) {
            self.end_server(generation);
        }
    }

    fn end_server(&mut self, generation: u32) {
        let dice = &mut self.dice;
        let server = self.servers.get_mut(&generation).expect("it is alive");
        let own = match dice.below(12) {
            0 => How::Exited(Exit::Code(0)),
            1..=2 => How::Exited(Exit::Code(42)),
            3 => How::ClosedStdout,
            4..=6 => How::Exited(Exit::Signal(9)),
            _ => How::Exited(Exit::Code(1)),
        };
        let how = match &server.stop {
            Some(how) if self.calm || !dice.one_in(5) => how.clone(),
            _ => own,
        };
        self.any_end = true;
        // Lines that the pipe did not take are returned.
        let mut unsent = Vec::new();
        for (index, line) in server.inbox.drain(..).enumerate() {
            let taken = index < server.taken;
            if let Some(sent) = line.number.and_then(|number| self.sent.get_mut(&number)) {
                sent.note_fate(generation, taken);
            }
            if let (false, Some(mark)) = (taken, line.mark) {
                unsent.push((mark, line.bytes));
            }
        }
        server.taken = 0;
        server.alive = false;
        self.may_leave = self.may_leave_after(&self.servers[&generation], &how);
        let event = Event::ServerWentDown { generation, how: how.clone(), unsent };
        self.happen(event, Told::Down(generation, how));
    }

    // ---- one event ----------------------------------------------------------------------------------

    fn happen(&mut self, event: Event, told: Told) {
        self.upgrade();
        self.tell(&format!("{event:?}"));
        self.finished_now = false;
        let mut actions = Vec::new();
        let handled = std::panic::catch_unwind(AssertUnwindSafe(|| self.relay.handle(event, self.now, &mut actions)));
        check!(self, handled.is_ok(), "the relay panicked");
        self.before(&told, &actions);
        let any = !actions.is_empty();
        let mut last_told: HashMap<u32, u64> = HashMap::new();
        for action in actions {
            if !matches!(action, Action::Record(_)) {
                self.tell(&format!("    {action:?}"));
            }
            self.act(action, &mut last_told);
        }
        self.after(&told, any);
        while let Some(generation) = self.take_back.pop() {
            self.give_back(generation);
        }
        if !matches!(told, Told::Time) && self.dice.one_in(3) {
            self.time_passes_early();
        }
    }

    /// An entry that an earlier run may have saved, or none, or an unusable one.
    fn cache_entry(&mut self, revision: &str) -> Option<String> {
        if self.more.one_in(4) {
            return self.more.one_in(2).then(|| "torn".to_owned());
        }
        let told = match revision {
            client::VERSION => format!(r#""supportedVersions":["{revision}"]"#),
            _ if self.more.one_in(5) => r#""protocolVersion":"2025-03-26""#.to_owned(),
            _ => format!(r#""protocolVersion":"{revision}""#),
        };
        self.has_entry = true;
        let mut lists = Vec::new();
        for kind in 0..4 {
            if self.more.one_in(4) {
                continue;
            }
            let own = servers::lists(&mut self.more, self.clash)[kind].clone();
            let own = if self.more.one_in(2) { self.base_lists[kind].clone() } else { own };
            let items: Vec<Value> = own.iter().map(|(key, variant)| servers::item(kind, key, *variant)).collect();
            lists.push(format!(r#""{}":{}"#, client::MEMBERS[kind], Value::from(items.clone())));
            self.cached[kind] = Some(items);
        }
        Some(format!(
            r#"{{"layout":1,"revision":"{revision}","opening":{{{told},"capabilities":{{"tools":{{}},"prompts":{{}},"resources":{{}}}},"serverInfo":{{"name":"cached"}}}},"lists":{{{}}}}}"#,
            lists.join(",")
        ))
    }

    /// Returns the queue of a replaced server to the relay: the lines that its pipe has not taken.
    fn give_back(&mut self, generation: u32) {
        let Some(server) = self.servers.get_mut(&generation).filter(|server| server.alive) else { return };
        let mut unsent = Vec::new();
        let rest = server.inbox.split_off(server.taken);
        for line in rest {
            let Some(mark) = line.mark else {
                server.inbox.push_back(line);
                continue;
            };
            if let Some(sent) = line.number.and_then(|number| self.sent.get_mut(&number)) {
                sent.note_fate(generation, false);
            }
            unsent.push((mark, line.bytes));
        }
        self.happen(Event::TakenBack { generation, unsent }, Told::Other);
    }

    /// The driver reports how many bytes wait for each pipe, from a bound on.
    fn report_queues(&mut self) {
        let max = self.settings.limits.queue.queued_bytes_max;
        let waiting = |server: &Server| server.inbox.iter().skip(server.taken).map(|line| line.bytes.len()).sum();
        let queues: Vec<(u32, usize)> =
            self.servers.values().filter(|server| server.alive).map(|s| (s.generation, waiting(s))).collect();
        for (generation, bytes) in queues {
            let told = self.queues.get(&generation).copied().unwrap_or(0);
            if bytes != told && (bytes >= max || told >= max) && !self.ended {
                self.queues.insert(generation, bytes);
                self.happen(Event::ServerQueue { generation, bytes }, Told::Other);
            }
        }
    }

    /// The driver may be early or late: an extra call changes nothing.
    fn time_passes_early(&mut self) {
        let deadline = self.relay.deadline();
        if deadline.is_none_or(|deadline| self.now < deadline) {
            let mut actions = Vec::new();
            self.relay.handle(Event::TimePassed, self.now, &mut actions);
            check!(self, actions.is_empty(), "11: acted before its time: {actions:?}");
            check!(self, self.relay.deadline() == deadline, "11: another deadline after a call too many");
        }
    }

    fn act(&mut self, action: Action, last_told: &mut HashMap<u32, u64>) {
        check!(self, !self.ended || matches!(action, Action::Record(_)), "12: acted after the end: {action:?}");
        match action {
            Action::TellClient(line) => self.client_hears(&line),
            Action::TellServer { generation, line, mark } => self.server_is_told(generation, line, mark, last_told),
            Action::TakeBack(generation) => self.take_back.push(generation),
            Action::CloseStdin(generation) => {
                let server = self.servers.get_mut(&generation).expect("it was started");
                let twice = std::mem::replace(&mut server.stdin_closed, true);
                check!(self, !twice && self.servers[&generation].alive, "x4b: the stdin of {generation} is closed");
            }
            Action::ReadCache(revision) => {
                check!(self, self.settings.cache && !self.ever_ready, "k1: the cache is read without need");
                self.caching.push(revision);
            }
            Action::SaveCache { entry, .. } => {
                check!(self, self.settings.cache, "k5: saved without a cache");
                let fine = entry.is_none_or(|entry| serde_json::from_str::<Value>(&entry).is_ok());
                check!(self, fine, "k5: saved what is no JSON");
            }
            Action::Build => {
                check!(self, !self.building, "two builds at once");
                check!(self, self.gone.is_none(), "12: a build after the client's end");
                self.building = true;
            }
            Action::StopBuild => check!(self, self.building, "stopped no build"),
            Action::Start => {
                check!(self, !self.start_due, "4: two starts at once");
                check!(self, self.gone.is_none(), "12: a start after the client's end");
                self.start_due = true;
            }
            Action::Stop { generation, how } => {
                let leaving = self.gone.is_some() || self.may_leave || self.left;
                let server = self.servers.get_mut(&generation).expect("only what was started is stopped");
                let (alive, again) = (server.alive, server.stop.is_some());
                server.retired |= !leaving;
                server.stop = Some(how);
                check!(self, alive && !again, "4: generation {generation} stopped twice, or when it was gone");
            }
            Action::MarkReady(generation) => self.server_is_ready(generation),
            Action::WriteMarker { .. } => {
                check!(self, !self.marking && !self.building, "12: a restart began while another one runs");
                check!(self, self.tickets_running.is_empty(), "12: a restart began before the last one was answered");
                self.tickets_running = std::mem::take(&mut self.tickets_waiting);
                self.finished_now = false;
                self.marking = true;
                self.any_end = true;
            }
            Action::ReadMarker(key) => self.reading.push(key),
            Action::Record(record) => {
                let generation = record.generation.and_then(|generation| u32::try_from(generation).ok());
                self.hung.extend(generation.filter(|_| record.event == record::Event::ServerHung));
            }
            Action::Divert { .. } => {}
            // A restart that the relay itself requested.
            Action::Answer { ticket: 0, .. } => {}
            Action::Answer { ticket, .. } => {
                if let Some(index) = self.tickets_running.iter().position(|running| *running == ticket) {
                    self.tickets_running.swap_remove(index);
                    self.finished_now = true;
                } else if let Some(index) = self.tickets_waiting.iter().position(|waiting| *waiting == ticket) {
                    check!(
                        self,
                        self.gone.is_some() || self.may_leave || self.left,
                        "12: ticket {ticket} answered before its run"
                    );
                    self.tickets_waiting.swap_remove(index);
                } else {
                    self.fail(&format!("12: ticket {ticket} answered twice"));
                }
            }
            Action::End(code) => {
                check!(self, code == 0, "ended with {code}");
                check!(self, self.gone.is_some() || self.may_leave || self.left, "12: ended by itself");
                check!(self, self.servers.values().all(|server| !server.alive), "4: ended with children left");
                self.ended = true;
            }
        }
    }

    // ---- telling --------------------------------------------------------------------------------------

    fn tell(&mut self, line: &str) {
        let mut line = format!("{:6} {line}", (self.now - self.born).as_millis());
        if line.len() > 420 {
            let end = (0..=420).rev().find(|&end| line.is_char_boundary(end)).unwrap_or(0);
            line.truncate(end);
        }
        self.story.push_back(line);
        if self.story.len() > STORY_MAX {
            self.story.pop_front();
        }
    }

    fn fail(&self, why: &str) -> ! {
        let story: Vec<&str> = self.story.iter().map(String::as_str).collect();
        let settings = &self.settings;
        let facts = format!(
            "hasty {}, tools {}, {:?}, {:?}, build {}, clean exit {:?}, {:?} client, held_max {}, clash {}",
            self.hasty,
            settings.tools,
            settings.retry,
            settings.reload,
            settings.build,
            settings.on_clean_exit,
            self.client.era,
            settings.limits.holding.held_max,
            self.clash,
        );
        panic!("seed {}: {why}\n{facts}\n{}\n=> seed {}: {why}", self.seed, story.join("\n"), self.seed);
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number - 1
    }

    fn any_server(&mut self, holds: impl Fn(&Server) -> bool) -> Option<u32> {
        let found: Vec<u32> = self.servers.values().filter(|server| holds(server)).map(|s| s.generation).collect();
        (!found.is_empty()).then(|| self.dice.pick(&found))
    }

    /// The generation that gets the client's messages, as far as the world knows.
    fn serving(&self) -> Option<u32> {
        self.servers
            .values()
            .rev()
            .find(|s| s.alive && s.serves && !s.draining && s.stop.is_none())
            .map(|s| s.generation)
    }
}

/// The number in a line.
fn number_of(line: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(line).ok()?;
    let at = text.find(r#""n":"#)? + 4;
    let digits: String = text[at..].chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

/// An id as the other side would write it.
fn id_text(id: &Value) -> String {
    id.to_string()
}

fn is_private(id: &Value) -> bool {
    id.as_str().is_some_and(|id| id.starts_with(&format!("outlast-{RANDOM}-")))
}

fn bytes(text: String) -> Bytes {
    let mut text = text.into_bytes();
    text.push(b'\n');
    text.into()
}
