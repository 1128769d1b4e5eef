//! Several replicas with the machines of the cluster, around one NATS whose answers are lost or late: computers are cut off,
//! suspended, and have clocks that drift; processes are paused, killed, stopped and started again under their name.
//!
//! The ledger shows a session that is lost or served to another client. After every step, at most one replica runs a backend,
//! and the parts of the budgets in use do not exceed the whole. When there are no more faults, everything is served again.

mod clock;
mod ledger;
mod nats;
mod replica;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use outlast_core::{
    cluster::{Instance, shares::WHOLE},
    front::record::{Record, RecordKey},
    gateway::Who,
};

use crate::{
    Dice, birth, check, ms, seeds,
    story::{Played, Story, play},
};
use clock::Clock;
use ledger::{Ledger, Request, What, who};
use nats::{Answer, Bucket, Nats, Op, Value};
use replica::{Ask, Delivery, Disk, Due, From, Node, Packet};

/// Number of seeds unless `OUTLAST_SEEDS` sets another.
const SEEDS: u64 = 300;
/// Faults and requests of one world.
const ACTS: usize = 220;
/// What happens in one world, at most.
const STEPS_MAX: u64 = 400_000;
/// How long NATS keeps a connection that does not answer.
const IDLE_MAX: Duration = ms(10_000);
/// How long a replica may serve a session that another has taken over, once both could know it: until it notices a broken
/// connection and has connected again, or until the watch has told it.
const STALE_MAX: Duration = ms(2_500);
/// How long it may take until each backend has an owner again: the lease, and a few seconds.
const REST: Duration = ms(15_000);
/// How long a call takes at most while there are no faults.
const CALL_MAX: Duration = ms(1_500);
const BACKENDS: [&str; 3] = ["notes", "search", "mail"];

#[test]
fn one_owner_one_home_one_budget_and_a_whole_log() {
    play_every_second(0);
}

/// The other seeds, on another thread.
#[test]
fn one_owner_one_home_one_budget_and_a_whole_log_again() {
    play_every_second(1);
}

fn play_every_second(first: u64) {
    /// One of the threads has found a seed that fails: the other stops.
    static FOUND: AtomicBool = AtomicBool::new(false);
    struct Found;
    impl Drop for Found {
        fn drop(&mut self) {
            if std::thread::panicking() {
                FOUND.store(true, Ordering::Relaxed);
            }
        }
    }
    let _found = Found;
    let (from, seeds) = seeds(SEEDS);
    let mut left = (from..from + seeds).filter(|seed| seed % 2 == first);
    while let Some(seed) = left.next().filter(|_| !FOUND.load(Ordering::Relaxed)) {
        play::<World>(seed);
    }
}

/// All that can happen does happen.
#[test]
fn the_world_is_not_empty() {
    let (mut taken, mut hosts, mut published, mut served) = (0, 0, 0, 0);
    for seed in 0..20 {
        let mut world = World::new(seed);
        world.run();
        let ledger = &world.ledger;
        taken += ledger.taken;
        hosts += ledger.hosts;
        published += ledger.published;
        served += ledger.served;
    }
    assert!(taken > 20 && hosts > 100 && published > 200 && served > 200, "{taken} {hosts} {published} {served}");
}

struct World {
    story: Story,
    dice: Dice,
    now: Duration,
    steps: u64,
    queue: BTreeMap<(Duration, u64), Happening>,
    /// Numbers that are used once.
    numbers: u64,
    nodes: Vec<Node>,
    nats: Nats,
    is_nats_up: bool,
    /// Processes that have a connection, as NATS knows it.
    served: BTreeMap<Instance, (usize, u64)>,
    /// All instances that had a name, the newest last.
    instances: BTreeMap<String, Vec<Instance>>,
    /// Backends that run once in the cluster.
    config: BTreeSet<String>,
    ledger: Ledger,
    /// Many answers of NATS are lost.
    is_lossy: bool,
    /// Processes that are paused right after they have sent their next write.
    pauses: BTreeSet<usize>,
    /// Of these, processes that are cut off meanwhile: they continue with the answer to the write, and cannot write again.
    cuts: BTreeSet<usize>,
    /// One in so many acts is a fault.
    calm_acts: u64,
    /// Hours pass, for what takes as long.
    is_slow: bool,
    /// There are no more faults.
    is_calm: bool,
}

#[derive(Debug)]
enum Happening {
    /// A request arrives at NATS.
    Arrive {
        node: usize,
        process: u64,
        operation: u64,
        op: Op,
    },
    Deliver {
        node: usize,
        process: u64,
        delivery: Delivery,
    },
    /// A message to another replica is at NATS.
    Send {
        node: usize,
        from: Instance,
        to: Instance,
        packet: Packet,
    },
    /// NATS has noticed that the process ended.
    Forgotten {
        instance: Instance,
    },
    /// NATS looks whether a connection still answers.
    Idle {
        node: usize,
        instance: Instance,
    },
    KeeperDue {
        node: usize,
        backend: String,
        number: u64,
    },
    HostEnds {
        node: usize,
        backend: String,
        number: u64,
    },
    Start {
        node: usize,
    },
    Wake {
        node: usize,
        since: Duration,
    },
    Resume {
        node: usize,
    },
    Cut {
        node: usize,
    },
    Heal,
    NatsUp,
}

impl Played for World {
    fn new(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        let birth: Instant = birth();
        let is_slow = dice.one_in(16);
        let calm_acts = dice.pick(&[5, 10, 20]);
        let count = 3 + dice.below(5) as usize;
        let nodes = (0..count).map(|index| Node {
            name: format!("r{index}"),
            clock: Clock::new(dice.below(40_001) as i64 - 20_000, Duration::from_secs(dice.below(100_000)), birth),
            process: None,
            due: Due::Unknown,
            is_cut: false,
            whole_since: Duration::ZERO,
            suspended: None,
            paused: None,
            hosts: BTreeMap::new(),
            disk: Disk::default(),
        });
        World {
            story: Story::default(),
            nodes: nodes.collect(),
            dice,
            now: Duration::ZERO,
            steps: 0,
            queue: BTreeMap::new(),
            numbers: 0,
            nats: Nats::default(),
            is_nats_up: true,
            served: BTreeMap::new(),
            instances: BTreeMap::new(),
            config: if is_slow { BTreeSet::new() } else { BACKENDS.map(str::to_owned).into() },
            ledger: Ledger::default(),
            is_lossy: false,
            pauses: BTreeSet::new(),
            cuts: BTreeSet::new(),
            calm_acts,
            is_slow,
            is_calm: false,
        }
    }

    fn story(&mut self) -> &mut Story {
        &mut self.story
    }

    fn run(&mut self) {
        for node in 0..self.nodes.len() {
            let delay = self.within(2_000);
            self.at(delay, Happening::Start { node });
        }
        for _ in 0..ACTS {
            self.act();
            let time = match self.dice.below(20) {
                0 => ms(self.dice.below(8_000)),
                1 if self.is_slow => Duration::from_secs(self.dice.below(1_500)),
                2..7 => ms(self.dice.below(1_000)),
                _ => ms(self.dice.below(100)),
            };
            self.pass(time);
        }
        self.rest();
    }
}

impl World {
    fn fail(&self, what: &str) -> ! {
        panic!("{what}, after {:?}", self.now);
    }

    fn must(&self, result: Result<(), String>) {
        if let Err(what) = result {
            self.fail(&what);
        }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn at(&mut self, delay: Duration, happening: Happening) {
        let number = self.number();
        self.queue.insert((self.now + delay, number), happening);
    }

    fn within(&mut self, most: u64) -> Duration {
        Duration::from_micros(self.dice.below(most * 1_000 + 1))
    }

    /// Of a message to NATS or back. A delay of seconds is a fault: without faults, a call that passes NATS four times is
    /// answered within `CALL_MAX`.
    fn latency(&mut self) -> Duration {
        let most = match self.dice.below(150) {
            0 if !self.is_calm => 1_900,
            1..6 if !self.is_calm => 700,
            0..6 => 300,
            _ => 10,
        };
        self.within(most)
    }

    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            let due = self.due();
            let next = self.queue.first_key_value().map(|((at, _), _)| *at);
            let timer = due.filter(|(at, _)| next.is_none_or(|next| *at < next));
            match (timer, next) {
                (Some((at, node)), _) if at <= end => {
                    self.now = self.now.max(at);
                    self.tick(node);
                }
                (None, Some(at)) if at <= end => {
                    self.now = self.now.max(at);
                    let Some((_, happening)) = self.queue.pop_first() else { break };
                    self.happen(happening);
                }
                _ => break,
            }
            self.steps += 1;
            check!(self, self.steps < STEPS_MAX, "the world does not come to rest");
            self.check();
        }
        self.now = end;
    }

    /// The next deadline of a machine.
    fn due(&mut self) -> Option<(Duration, usize)> {
        let mut next: Option<(Duration, usize)> = None;
        for (index, node) in self.nodes.iter_mut().enumerate() {
            if let Some(due) = node.due()
                && next.is_none_or(|(next, _)| due < next)
            {
                next = Some((due, index));
            }
        }
        next
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Arrive { node, process, operation, op } => self.arrive(node, process, operation, op),
            Happening::Deliver { node, process, delivery } => {
                if self.nodes[node].process.as_ref().is_some_and(|running| running.number == process) {
                    self.receive(node, delivery);
                }
            }
            Happening::Send { node, from, to, packet } => self.pass_on(node, from, to, packet),
            Happening::Forgotten { instance } => drop(self.served.remove(&instance)),
            Happening::Idle { node, instance } => {
                let is_silent = self.nodes[node].is_frozen() || !self.is_reachable(node);
                if is_silent && self.served.contains_key(&instance) {
                    self.close(node);
                }
            }
            Happening::KeeperDue { node, backend, number } => self.keeper_due(node, backend, number),
            Happening::HostEnds { node, backend, number } => self.host_ends(node, &backend, number),
            Happening::Start { node } => self.start(node),
            Happening::Wake { node, since } => {
                if self.nodes[node].paused == Some(since) {
                    self.nodes[node].paused = None;
                    self.story.tell(self.now, "wake", &node);
                    self.thaw(node, since);
                }
            }
            Happening::Resume { node } => self.resume(node),
            Happening::Cut { node } => self.cut_from(node, 1),
            Happening::Heal => self.heal(),
            Happening::NatsUp => {
                if !self.is_nats_up {
                    self.story.tell(self.now, "NATS is up", &());
                    self.is_nats_up = true;
                    self.mark_whole();
                }
            }
        }
    }

    fn arrive(&mut self, node: usize, process: u64, operation: u64, op: Op) {
        if !self.is_reachable(node) && !self.is_calm || !self.is_nats_up {
            // The packet is lost, or is sent again later, also after its process has ended.
            if matches!(op, Op::Write { .. } | Op::Publish { .. }) && self.dice.one_in(2) {
                let later = self.within(20_000);
                self.at(later, Happening::Arrive { node, process, operation, op });
            }
            return;
        }
        // It is on its way for long: its sender no longer waits.
        if !self.is_calm && self.dice.one_in(60) {
            let later = self.within(15_000);
            return self.at(later, Happening::Arrive { node, process, operation, op });
        }
        let (answer, change) = self.nats.apply(&op, self.now);
        self.story.tell(self.now, "NATS", &(node, &op, &answer));
        match &op {
            Op::Publish { subject, .. } => self.check_audit(subject),
            Op::Write { key, value: Some(Value::Session(session)), .. } if matches!(answer, Answer::Done(_)) => {
                self.check_record(key, &session.0);
            }
            _ => {}
        }
        if let Some(change) = change {
            for watcher in 0..self.nodes.len() {
                let instance = self.nodes[watcher].process.as_ref().map(|process| process.instance);
                if instance.is_some_and(|instance| self.served.contains_key(&instance)) {
                    self.notify(watcher, change.clone());
                }
            }
        }
        let is_lost = self.dice.one_in(if self.is_lossy { 3 } else { 40 }) && !self.is_calm;
        if !is_lost && self.is_reachable(node) {
            let delay = self.latency();
            self.at(delay, Happening::Deliver { node, process, delivery: Delivery::Answer { operation, answer } });
        }
    }

    /// NATS passes a message on, or knows no receiver.
    fn pass_on(&mut self, node: usize, from: Instance, to: Instance, packet: Packet) {
        if !self.is_nats_up {
            return;
        }
        let delay = self.latency();
        match self.served.get(&to).copied() {
            Some((other, process)) if self.is_reachable(other) => {
                let delivery = Delivery::Packet { from, packet };
                self.at(delay, Happening::Deliver { node: other, process, delivery });
            }
            Some(_) => {}
            None if self.is_reachable(node)
                && self.nodes[node].process.as_ref().is_some_and(|process| process.instance == from) =>
            {
                self.deliver(node, delay, Delivery::NoResponders { of: to, packet });
            }
            None => {}
        }
    }

    /// NATS closes the connection of a process.
    fn close(&mut self, node: usize) {
        let Some(process) = &self.nodes[node].process else { return };
        let (instance, connection) = (process.instance, process.connection());
        self.served.remove(&instance);
        if let Some(connection) = connection {
            self.deliver_within(node, 1_000, Delivery::Broken { connection, is_closed: true });
        }
    }

    /// NATS closes a connection that does not answer for long.
    fn expect_silence(&mut self, node: usize) {
        if let Some(instance) = self.nodes[node].process.as_ref().map(|process| process.instance) {
            self.at(IDLE_MAX, Happening::Idle { node, instance });
        }
    }

    fn mark_whole(&mut self) {
        for node in &mut self.nodes {
            node.whole_since = self.now;
        }
    }

    fn heal(&mut self) {
        if self.nodes.iter().any(|node| node.is_cut) {
            self.story.tell(self.now, "heal", &());
            self.nodes.iter_mut().for_each(|node| node.is_cut = false);
            self.mark_whole();
        }
    }

    /// A fault, or a request.
    fn act(&mut self) {
        let node = self.dice.below(self.nodes.len() as u64) as usize;
        if self.dice.one_in(self.calm_acts) {
            return self.fault(node);
        }
        match self.dice.below(50) {
            0..8 => self.open(node),
            8..34 => self.request(node),
            34..42 => self.append(node),
            _ if self.is_running(node) => {
                let backend = self.dice.pick(&BACKENDS);
                self.call(node, backend);
            }
            _ => {}
        }
    }

    fn fault(&mut self, node: usize) {
        match self.dice.below(15) {
            0 | 1 => self.cut(),
            2 => self.heal(),
            3 => self.stop_nats(),
            4 => self.is_lossy = !self.is_lossy,
            5 => self.close(node),
            6 | 7 => self.pause(node),
            8 => drop(self.pauses.insert(node)),
            9 => self.suspend(node),
            10 | 11 if self.nodes[node].suspended.is_none() => {
                self.kill(node);
                let later = self.lasting(12_000);
                self.at(later, Happening::Start { node });
            }
            12 => self.stop(node),
            13 if !self.is_slow => self.configure(),
            14 => {
                self.pauses.insert(node);
                self.cuts.insert(node);
            }
            _ => {}
        }
    }

    /// How long a fault lasts: often only a moment.
    fn lasting(&mut self, most: u64) -> Duration {
        match self.dice.below(3) {
            0 if self.is_slow => self.within(6_000_000),
            0 => self.within(most),
            1 => self.within(most / 4),
            _ => self.within(most / 20),
        }
    }

    fn is_running(&self, node: usize) -> bool {
        let node = &self.nodes[node];
        !node.is_frozen() && node.process.as_ref().is_some_and(|process| !process.is_stopping())
    }

    /// From one computer to all of them.
    fn cut(&mut self) {
        let count = 1 + self.dice.below(self.nodes.len() as u64) as usize;
        let first = self.dice.below(self.nodes.len() as u64) as usize;
        self.cut_from(first, count);
    }

    fn cut_from(&mut self, first: usize, count: usize) {
        if self.is_calm {
            return;
        }
        for index in 0..count {
            let node = (first + index) % self.nodes.len();
            self.story.tell(self.now, "cut", &node);
            self.nodes[node].is_cut = true;
            if let Some(connection) = self.nodes[node].process.as_ref().and_then(|process| process.connection()) {
                let delay = ms(500) + self.within(2_500);
                self.deliver(node, delay, Delivery::Broken { connection, is_closed: false });
            }
            self.expect_silence(node);
        }
        let later = self.lasting(25_000);
        self.at(later, Happening::Heal);
    }

    fn stop_nats(&mut self) {
        self.story.tell(self.now, "NATS is down", &());
        self.is_nats_up = false;
        self.served.clear();
        for node in 0..self.nodes.len() {
            self.close(node);
        }
        let later = self.lasting(15_000);
        self.at(later, Happening::NatsUp);
    }

    fn pause(&mut self, node: usize) {
        if self.nodes[node].is_frozen() || self.nodes[node].process.is_none() {
            return;
        }
        self.story.tell(self.now, "pause", &node);
        self.nodes[node].paused = Some(self.now);
        self.expect_silence(node);
        let (since, later) = (self.now, self.lasting(30_000));
        self.at(later, Happening::Wake { node, since });
    }

    fn suspend(&mut self, node: usize) {
        if self.nodes[node].is_frozen() {
            return;
        }
        self.story.tell(self.now, "suspend", &node);
        self.nodes[node].suspended = Some(self.now);
        self.expect_silence(node);
        let later = self.lasting(40_000);
        self.at(later, Happening::Resume { node });
    }

    fn stop(&mut self, node: usize) {
        if self.is_running(node) {
            self.deliver(node, Duration::ZERO, Delivery::Stop);
            let later = ms(6_000) + self.within(6_000);
            self.at(later, Happening::Start { node });
        }
    }

    /// An operator changes the files of all replicas, one after the other.
    fn configure(&mut self) {
        let mut backends: BTreeSet<String> = BACKENDS.map(str::to_owned).into();
        if self.dice.one_in(2) {
            backends.remove(self.dice.pick(&BACKENDS));
        }
        self.config = backends.clone();
        for node in 0..self.nodes.len() {
            self.deliver_within(node, 3_000, Delivery::Configured(backends.clone()));
        }
    }

    fn open(&mut self, node: usize) {
        if self.is_running(node) {
            let key = RecordKey(u128::from(self.number()));
            let who = self.any_client();
            self.open_session(node, key, &who);
        }
    }

    fn any_client(&mut self) -> Who {
        who(self.dice.pick(&["anna", "bert", "cleo"]))
    }

    /// A request for any session, sometimes of another client, to any replica.
    fn request(&mut self, node: usize) {
        let keys: Vec<RecordKey> = self.ledger.sessions.keys().copied().collect();
        if keys.is_empty() {
            return;
        }
        let key = self.dice.pick(&keys);
        let other = self.any_client();
        let (is_own, choice) = (!self.dice.one_in(8), self.dice.below(20));
        let Some(session) = self.ledger.sessions.get_mut(&key) else { return };
        let who = if is_own { session.who.clone() } else { other };
        let what = match choice {
            0 if who == session.who => {
                session.is_deleted = true;
                What::Delete
            }
            1..5 => {
                session.level_asked += 1;
                What::SetLevel(session.level_asked)
            }
            _ => What::Call,
        };
        self.ask_at(node, Request { key, who, what });
    }

    fn ask_at(&mut self, node: usize, request: Request) {
        let ask = Ask { request, from: From::Client, refusals: 0 };
        self.deliver_within(node, 10, Delivery::Asked(ask));
    }

    /// A record is in the local file before the machine knows it.
    fn append(&mut self, node: usize) {
        if !self.is_running(node) {
            return;
        }
        for _ in 0..=self.dice.below(20) {
            let up_to = self.nodes[node].disk.audit.last().copied().unwrap_or(0) + 1;
            self.nodes[node].disk.audit.push(up_to);
            self.deliver_within(node, 20, Delivery::Appended { up_to });
        }
    }

    // The promises.

    fn check(&mut self) {
        let mut sum = 0;
        for node in &self.nodes {
            if let Some(process) = node.process.as_ref().filter(|_| !node.is_frozen()) {
                sum += process.shares.parts();
            }
        }
        check!(self, sum <= WHOLE, "more than the whole budget is in use: {sum}");
    }

    /// Processes of a suspended computer do not run.
    fn check_hosts(&mut self, backend: &str) {
        let awake = self.nodes.iter().filter(|node| node.suspended.is_none());
        let owners: Vec<&str> =
            awake.filter(|node| node.hosts.contains_key(backend)).map(|node| node.name.as_str()).collect();
        check!(self, owners.len() <= 1, "{backend} runs on {owners:?} at the same time");
    }

    /// The replica that a session belongs to if it is not this one, and since when.
    fn other_home(&self, node: usize, key: RecordKey) -> Option<(String, Duration)> {
        let entry = self.nats.entry(Bucket::Sessions, &key.to_string())?;
        let home = entry.value.as_ref().and_then(|value| value.home())?;
        let process = self.nodes[node].process.as_ref()?;
        (home.instance != process.instance).then(|| (home.name.clone(), entry.changed))
    }

    /// False only while this replica cannot know yet that another one has taken the session over.
    fn is_home_or_should_know(&self, node: usize, key: RecordKey) -> bool {
        self.other_home(node, key).is_none_or(|(_, since)| {
            let known_since = since.max(self.nodes[node].whole_since);
            self.is_reachable(node) && known_since + STALE_MAX < self.now && !self.is_slow
        })
    }

    /// A replica is about to serve a session.
    fn check_home(&mut self, node: usize, key: RecordKey) {
        if let Some((home, since)) = self.other_home(node, key) {
            let name = &self.nodes[node].name;
            let should_know = self.is_home_or_should_know(node, key);
            check!(self, !should_know, "{key} is served by {name} although {home} has been its home since {since:?}");
        }
    }

    /// A record that is stored, also by a replica that takes the session over, has all that its client was told.
    fn check_record(&self, key: &str, record: &Record) {
        let key = RecordKey(u128::from_str_radix(key, 16).expect("it was written so"));
        self.must(self.ledger.stored(key, record));
    }

    /// What is in the stream is the beginning of the local log: so is what the last message adds to it.
    fn check_audit(&mut self, replica: &str) {
        let Some(node) = self.nodes.iter_mut().find(|node| node.name == replica) else { return };
        let messages = self.nats.messages(replica);
        while let Some(message) = messages.get(node.disk.messages_checked) {
            node.disk.messages_checked += 1;
            for line in String::from_utf8_lossy(&message.body).lines() {
                let expected = node.disk.audit.get(node.disk.published).map(u64::to_string);
                node.disk.published += 1;
                assert_eq!(Some(line), expected.as_deref(), "{replica} published another record than the next");
            }
        }
        self.ledger.published += 1;
    }

    /// There are no more faults: each backend has an owner again, each session is served, each budget is used, each
    /// record is published.
    fn rest(&mut self) {
        self.is_calm = true;
        self.pauses.clear();
        self.cuts.clear();
        self.is_lossy = false;
        self.story.tell(self.now, "no more faults", &());
        self.heal();
        self.is_nats_up = true;
        self.mark_whole();
        self.config = BACKENDS.map(str::to_owned).into();
        for node in 0..self.nodes.len() {
            self.resume(node);
            if let Some(since) = self.nodes[node].paused.take() {
                self.thaw(node, since);
            }
            let backends = self.config.clone();
            self.deliver(node, ms(3_000), Delivery::Configured(backends));
            self.deliver_within(node, 800, Delivery::Reconnect);
        }
        // What is still on its way arrives now.
        let (late, queue) = std::mem::take(&mut self.queue)
            .into_iter()
            .partition::<BTreeMap<_, _>, _>(|(_, happening)| matches!(happening, Happening::Arrive { .. }));
        self.queue = queue;
        for happening in late.into_values() {
            let soon = self.within(500);
            self.at(soon, happening);
        }
        for _ in 0..12 {
            self.pass(ms(500));
            (0..self.nodes.len()).for_each(|node| self.start(node));
        }
        self.pass(REST);

        let mut calls = Vec::new();
        for backend in BACKENDS {
            let owner = self.nodes.iter().position(|node| node.hosts.contains_key(backend));
            check!(self, owner.is_some(), "{backend} has no owner");
            let Some(owner) = owner else { return };
            let instance = self.process(owner).instance;
            for node in 0..self.nodes.len() {
                let known = self.process(node).owners.get(backend).map(|(_, instance)| *instance);
                check!(self, known == Some(instance), "{node} does not know that {owner} is the owner of {backend}");
                calls.push((node, backend, self.call(node, backend)));
            }
        }
        self.pass(CALL_MAX);
        for (node, backend, call) in calls {
            check!(self, self.ledger.answered.contains(&call), "{node}: {backend} does not answer");
        }
        let parts: Vec<u32> =
            self.nodes.iter().filter_map(|node| node.process.as_ref()).map(|process| process.shares.parts()).collect();
        let equal = WHOLE / self.nodes.len() as u32;
        check!(self, parts.iter().all(|parts| *parts == equal), "the budget is shared as {parts:?}");
        self.serve_all();
        for node in 0..self.nodes.len() {
            let Node { name, disk: Disk { audit, published, .. }, .. } = &self.nodes[node];
            let (count, local) = (*published, audit.len());
            check!(self, count == local, "{name} published {count} of {local} records");
        }
    }

    fn serve_all(&mut self) {
        let live = self.ledger.sessions.iter_mut().filter(|(_, session)| session.is_stored && !session.is_deleted);
        let keys: Vec<(RecordKey, Who)> = live
            .map(|(key, session)| {
                session.is_served = false;
                (*key, session.who.clone())
            })
            .collect();
        for _ in 0..6 {
            for (key, who) in &keys {
                if !self.ledger.sessions[key].is_served {
                    let node = self.dice.below(self.nodes.len() as u64) as usize;
                    self.ask_at(node, Request { key: *key, who: who.clone(), what: What::Call });
                }
            }
            self.pass(ms(1_500));
            if keys.iter().all(|(key, _)| self.ledger.sessions[key].is_served) {
                return;
            }
        }
        let lost = keys.iter().find(|(key, _)| !self.ledger.sessions[key].is_served);
        check!(self, lost.is_none(), "{lost:?} is not served again");
    }
}
