//! One replica: its computer with clock, keeper and disk, and its process, which drives the machines as the program does.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use bytes::Bytes;
use outlast_core::{
    cluster::{
        BootTime, Instance,
        audit_log::{self, AuditLog},
        homes::{self, Home, Homes, Outcome, Stored},
        leases::{self, Lease, Leases},
        shares::{self, Shares},
    },
    front::record::RecordKey,
    gateway::Who,
};

use super::{
    Happening, World,
    clock::Clock,
    ledger::{Reply, Request, What, level, record},
    nats::{Answer, Bucket, Change, Op, Value},
};
use crate::{check, ms};

/// How long the driver waits for an answer of NATS.
const ANSWER_MAX: Duration = ms(2_000);
/// A replica that answers no probe for so long is silent.
const SILENCE: Duration = ms(3_000);
/// How long a request waits for its home.
const FORWARD_MAX: Duration = ms(8_000);
/// How often a request that was refused by a replica is asked for again.
const REFUSED_MAX: u32 = 3;
/// The largest batch of audit records: a few lines.
const BATCH_MAX: usize = 40;
/// How long a process that was asked to stop may take.
const STOP_MAX: Duration = ms(5_000);
/// A process that did not run for so long was paused.
const PAUSE: Duration = ms(2_000);

/// A computer.
pub(super) struct Node {
    pub(super) name: String,
    pub(super) clock: Clock,
    pub(super) process: Option<Process>,
    pub(super) due: Due,
    /// It cannot reach NATS, nor the other replicas.
    pub(super) is_cut: bool,
    /// When it could reach NATS again.
    pub(super) whole_since: Duration,
    /// Since when it is suspended.
    pub(super) suspended: Option<Duration>,
    /// Since when its process is stopped by a signal.
    pub(super) paused: Option<Duration>,
    /// The processes of backends, as the keeper knows them.
    pub(super) hosts: BTreeMap<String, Host>,
    pub(super) disk: Disk,
}

/// When a machine of the process has to know that time passed. To ask all of them is slow.
pub(super) enum Due {
    Known(Option<Duration>),
    Unknown,
}

#[derive(Default)]
pub(super) struct Disk {
    /// The numbers of the audit records.
    pub(super) audit: Vec<u64>,
    /// How many of them are in the stream, and in how many messages.
    pub(super) published: usize,
    pub(super) messages_checked: usize,
    /// What the shares asked to remember, and when.
    remembered: Option<(u32, Duration, BootTime)>,
}

pub(super) struct Host {
    number: u64,
    /// The process that started it.
    process: u64,
    until: BootTime,
}

pub(super) struct Process {
    pub(super) number: u64,
    pub(super) instance: Instance,
    pub(super) leases: Leases,
    pub(super) homes: Homes,
    pub(super) shares: Shares,
    pub(super) audit: AuditLog,
    /// The number of its connection to NATS.
    connection: Option<u64>,
    /// What it received while it did not run.
    inbox: VecDeque<Delivery>,
    watch: VecDeque<Change>,
    operations: BTreeMap<u64, Operation>,
    /// Sessions that are open here.
    sessions: BTreeMap<RecordKey, (Who, u64)>,
    tickets: BTreeMap<u64, Ask>,
    forwards: BTreeMap<u64, (Ask, Instance)>,
    /// Replicas that are probed.
    checks: BTreeMap<Instance, u64>,
    pub(super) owners: BTreeMap<String, (String, Instance)>,
    /// Orders to the keeper are carried out one after the other.
    keeper_until: Duration,
    stop_until: Option<Duration>,
}

/// What was asked of NATS.
#[derive(Debug, Clone)]
enum Operation {
    LeaseRead { backend: String },
    LeaseWrite { backend: String, attempt: u64 },
    HomeRead { key: RecordKey, number: u64 },
    HomeTake { key: RecordKey, number: u64 },
    SharesRead,
    SharesWrite { attempt: u64 },
    AuditLast,
    AuditPublish { batch: u64 },
    Create { key: RecordKey },
    Store { ask: Ask },
    Delete,
}

/// A request that is to be answered.
#[derive(Debug, Clone)]
pub(super) struct Ask {
    pub(super) request: Request,
    pub(super) from: From,
    pub(super) refusals: u32,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum From {
    Client,
    /// Forwarded by another replica, with its number of it.
    Replica {
        instance: Instance,
        forward: u64,
    },
}

/// What a process receives.
#[derive(Debug, Clone)]
pub(super) enum Delivery {
    Answer {
        operation: u64,
        answer: Answer,
    },
    /// No answer came.
    Expired {
        operation: u64,
    },
    Watch {
        connection: u64,
    },
    /// The connection is broken: noticed only if it still is, unless NATS closed it.
    Broken {
        connection: u64,
        is_closed: bool,
    },
    Reconnect,
    Packet {
        from: Instance,
        packet: Packet,
    },
    NoResponders {
        of: Instance,
        packet: Packet,
    },
    Silence {
        instance: Instance,
        check: u64,
    },
    ForwardExpired {
        forward: u64,
    },
    /// It has ended, and its name has another instance.
    Left {
        instance: Instance,
    },
    Keeper(leases::Action),
    HostGone {
        backend: String,
    },
    Configured(BTreeSet<String>),
    Asked(Ask),
    Appended {
        up_to: u64,
    },
    Loaded(audit_log::Loaded),
    Stop,
    Stopped,
}

/// Messages between replicas. With the machine of the streams in this world, they are what its streams carry.
#[derive(Debug, Clone)]
pub(super) enum Packet {
    Probe,
    ProbeAnswer,
    Forward { forward: u64, request: Request },
    Forwarded { forward: u64, reply: Option<Reply> },
    Call { backend: String, call: u64 },
    CallAnswer { call: u64 },
}

impl Node {
    pub(super) fn due(&mut self) -> Option<Duration> {
        if self.is_frozen() {
            return None;
        }
        let process = self.process.as_ref()?;
        if let Due::Known(due) = self.due {
            return due;
        }
        let due = process.due(&self.clock);
        self.due = Due::Known(due);
        due
    }

    pub(super) fn is_frozen(&self) -> bool {
        self.suspended.is_some() || self.paused.is_some()
    }
}

impl Process {
    pub(super) fn connection(&self) -> Option<u64> {
        self.connection
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop_until.is_some()
    }

    /// When one of its machines has to know that time passed.
    fn due(&self, clock: &Clock) -> Option<Duration> {
        let boot = [self.leases.deadline(), self.shares.deadline()].into_iter().flatten().min();
        let instant = [self.homes.deadline(), self.audit.deadline()].into_iter().flatten().min();
        let boot = boot.map(|boot| clock.when(boot));
        boot.into_iter().chain(instant.map(|instant| clock.when_instant(instant))).min()
    }
}

impl World {
    pub(super) fn boot(&self, node: usize) -> BootTime {
        self.nodes[node].clock.boot(self.now)
    }

    pub(super) fn process(&mut self, node: usize) -> &mut Process {
        self.nodes[node].due = Due::Unknown;
        self.nodes[node].process.as_mut().expect("it runs")
    }

    pub(super) fn is_reachable(&self, node: usize) -> bool {
        self.is_nats_up && !self.nodes[node].is_cut && self.nodes[node].suspended.is_none()
    }

    /// A new process under the name of this node.
    pub(super) fn start(&mut self, node: usize) {
        if self.nodes[node].process.is_some() || self.nodes[node].suspended.is_some() {
            return;
        }
        let (number, instance) = (self.number(), self.dice.below(u64::MAX));
        let name = self.nodes[node].name.clone();
        let process = Process {
            number,
            instance,
            leases: Leases::new(name.clone(), instance),
            homes: Homes::new(Home { name: name.clone(), instance }),
            shares: Shares::new(name.clone(), instance, self.dice.below(u64::MAX)),
            audit: AuditLog::new(name, BATCH_MAX),
            connection: None,
            inbox: VecDeque::new(),
            watch: VecDeque::new(),
            operations: BTreeMap::new(),
            sessions: BTreeMap::new(),
            tickets: BTreeMap::new(),
            forwards: BTreeMap::new(),
            checks: BTreeMap::new(),
            owners: BTreeMap::new(),
            keeper_until: self.now,
            stop_until: None,
        };
        self.story.tell(self.now, "start", &(node, instance));
        self.nodes[node].process = Some(process);
        if let Some((parts, age, then)) = self.nodes[node].disk.remembered {
            let age = age + self.boot(node).since(then);
            self.shares(node, shares::Event::Remembered { parts, age });
            if self.nodes[node].process.is_none() {
                return;
            }
        }
        let up_to = self.nodes[node].disk.audit.last().copied().unwrap_or(0);
        self.audit(node, audit_log::Event::Appended { up_to });
        let backends = self.config.clone();
        self.leases(node, leases::Event::Configured { backends });
        self.deliver_within(node, 1_000, Delivery::Reconnect);
    }

    /// `kill -9`. The keeper ends the hosts.
    pub(super) fn kill(&mut self, node: usize) {
        let Some(process) = self.nodes[node].process.take() else { return };
        self.story.tell(self.now, "kill", &(node, process.instance));
        self.nodes[node].paused = None;
        // A connection that is closed reaches NATS, or is noticed there later.
        match self.is_reachable(node) {
            true => drop(self.served.remove(&process.instance)),
            false => self.at(ms(10_000), Happening::Forgotten { instance: process.instance }),
        }
        let hosts: Vec<(String, u64)> =
            self.nodes[node].hosts.iter().map(|(backend, host)| (backend.clone(), host.number)).collect();
        for (backend, number) in hosts {
            let soon = self.within(100);
            self.at(soon, Happening::HostEnds { node, backend, number });
        }
    }

    pub(super) fn deliver_within(&mut self, node: usize, most: u64, delivery: Delivery) {
        let delay = self.within(most);
        self.deliver(node, delay, delivery);
    }

    pub(super) fn deliver(&mut self, node: usize, delay: Duration, delivery: Delivery) {
        let Some(process) = self.nodes[node].process.as_ref().map(|process| process.number) else { return };
        self.at(delay, Happening::Deliver { node, process, delivery });
    }

    pub(super) fn receive(&mut self, node: usize, delivery: Delivery) {
        if self.nodes[node].is_frozen() {
            // The signal to end ends a stopped process when it continues.
            return self.process(node).inbox.push_back(delivery);
        }
        self.tick(node);
        if self.nodes[node].process.is_none() {
            return;
        }
        self.story.tell(self.now, "  <", &(node, &delivery));
        match delivery {
            Delivery::Answer { operation, answer } => {
                if let Some(operation) = self.process(node).operations.remove(&operation) {
                    self.answered(node, operation, Some(answer));
                }
            }
            Delivery::Expired { operation } => {
                if let Some(operation) = self.process(node).operations.remove(&operation) {
                    self.answered(node, operation, None);
                }
            }
            Delivery::Watch { connection } => self.watched(node, connection),
            Delivery::Broken { connection, is_closed } => {
                let is_current = self.process(node).connection == Some(connection);
                if is_current && (is_closed || !self.is_reachable(node)) {
                    self.disconnect(node);
                }
            }
            Delivery::Reconnect => self.reconnect(node),
            Delivery::Packet { from, packet } => self.packet(node, from, packet),
            Delivery::NoResponders { of, packet } => match packet {
                Packet::Probe => self.lost(node, of),
                Packet::Forward { forward, .. } => {
                    self.lost(node, of);
                    self.forward_failed(node, forward);
                }
                _ => {}
            },
            Delivery::Silence { instance, check } => {
                if self.process(node).checks.get(&instance) == Some(&check) {
                    self.lost(node, instance);
                }
            }
            Delivery::ForwardExpired { forward } => self.forward_failed(node, forward),
            Delivery::Left { instance } => self.lost(node, instance),
            Delivery::Keeper(action) => self.tell_keeper(node, action),
            Delivery::HostGone { backend } => self.leases(node, leases::Event::HostGone { backend }),
            Delivery::Configured(backends) => self.leases(node, leases::Event::Configured { backends }),
            Delivery::Asked(ask) => self.ask(node, ask),
            Delivery::Appended { up_to } => self.audit(node, audit_log::Event::Appended { up_to }),
            Delivery::Loaded(loaded) => self.audit(node, audit_log::Event::Loaded(loaded)),
            Delivery::Stop => {
                self.process(node).stop_until = Some(self.now + STOP_MAX);
                self.leases(node, leases::Event::StopAsked);
                if self.nodes[node].process.is_some() {
                    self.shares(node, shares::Event::StopAsked);
                }
                self.deliver(node, ms(50), Delivery::Stopped);
            }
            Delivery::Stopped => {
                let now = self.now;
                let process = self.process(node);
                let is_over = process.leases.is_over() && process.shares.is_over();
                match is_over || process.stop_until.is_some_and(|until| until <= now) {
                    true => self.kill(node),
                    false => self.deliver(node, ms(50), Delivery::Stopped),
                }
            }
        }
    }

    /// The process runs again: after a pause, all that it knows may be outdated. A delivery can pause it again; the rest of
    /// its inbox then waits.
    pub(super) fn thaw(&mut self, node: usize, since: Duration) {
        if self.nodes[node].process.is_none() {
            return;
        }
        let clock = &self.nodes[node].clock;
        if clock.boot(self.now).since(clock.boot(since)) >= PAUSE {
            self.homes(node, homes::Event::Paused);
        }
        self.tick(node);
        while !self.nodes[node].is_frozen()
            && let Some(process) = &mut self.nodes[node].process
            && let Some(delivery) = process.inbox.pop_front()
        {
            self.receive(node, delivery);
        }
    }

    /// Each machine whose deadline is over is told. It may not ask for the same moment again.
    pub(super) fn tick(&mut self, node: usize) {
        let (boot, instant) = (self.boot(node), self.nodes[node].clock.instant(self.now));
        let process = self.process(node);
        if process.leases.deadline().is_some_and(|due| due <= boot) {
            self.leases(node, leases::Event::TimePassed);
            let next = self.process(node).leases.deadline();
            check!(self, next.is_none_or(|next| next > boot), "{node}: the deadline of the leases stays");
        }
        if self.process(node).homes.deadline().is_some_and(|due| due <= instant) {
            self.homes(node, homes::Event::TimePassed);
            let next = self.process(node).homes.deadline();
            check!(self, next.is_none_or(|next| next > instant), "{node}: the deadline of the homes stays");
        }
        if self.process(node).audit.deadline().is_some_and(|due| due <= instant) {
            self.audit(node, audit_log::Event::TimePassed);
        }
        if self.nodes[node]
            .process
            .as_ref()
            .is_some_and(|process| process.shares.deadline().is_some_and(|due| due <= boot))
        {
            self.shares(node, shares::Event::TimePassed);
            let next = self.nodes[node].process.as_ref().and_then(|process| process.shares.deadline());
            check!(self, next.is_none_or(|next| next > boot), "{node}: the deadline of the shares stays");
        }
    }

    // The machines, and what they ask for.

    fn leases(&mut self, node: usize, event: leases::Event) {
        let (boot, mut actions) = (self.boot(node), Vec::new());
        self.process(node).leases.handle(event, boot, &mut actions);
        for action in actions {
            self.story.tell(self.now, "  >", &(node, &action));
            match action {
                leases::Action::Read { backend } => {
                    let op = Op::Read { bucket: Bucket::Leases, key: backend.clone() };
                    self.operate(node, op, Operation::LeaseRead { backend });
                }
                leases::Action::Write { backend, expected, lease } => {
                    let value = Some(Value::lease(&lease));
                    let op = Op::Write { bucket: Bucket::Leases, key: backend.clone(), expected, value };
                    self.operate(node, op, Operation::LeaseWrite { backend, attempt: lease.attempt });
                }
                leases::Action::Owner { backend, owner } => {
                    let owners = &mut self.process(node).owners;
                    match owner {
                        Some(owner) => drop(owners.insert(backend, owner)),
                        None => drop(owners.remove(&backend)),
                    }
                }
                action => {
                    // One after the other, a little later; and not before the process runs.
                    let delay = self.within(20);
                    let now = self.now;
                    let process = self.process(node);
                    process.keeper_until = (now + delay).max(process.keeper_until + Duration::from_micros(1));
                    let delay = process.keeper_until - now;
                    self.deliver(node, delay, Delivery::Keeper(action));
                }
            }
        }
    }

    fn homes(&mut self, node: usize, event: homes::Event) {
        let (instant, mut actions) = (self.nodes[node].clock.instant(self.now), Vec::new());
        self.process(node).homes.handle(event, instant, &mut actions);
        for action in actions {
            self.story.tell(self.now, "  >", &(node, &action));
            match action {
                homes::Action::Read { key, number } => {
                    let op = Op::Read { bucket: Bucket::Sessions, key: key.to_string() };
                    self.operate(node, op, Operation::HomeRead { key, number });
                }
                homes::Action::Take { key, number, expected, record, home } => {
                    let (bucket, value) = (Bucket::Sessions, Some(Value::session(key, &record, &home)));
                    let op = Op::Write { bucket, key: key.to_string(), expected, value };
                    self.operate(node, op, Operation::HomeTake { key, number });
                }
                homes::Action::Check { instance } => self.probe(node, instance),
                homes::Action::Answer { ticket, outcome } => {
                    let ask = self.process(node).tickets.remove(&ticket);
                    check!(self, ask.is_some(), "{node}: ticket {ticket} is answered twice");
                    if let Some(ask) = ask {
                        self.outcome(node, ask, outcome);
                    }
                }
                homes::Action::Drop { key } => drop(self.process(node).sessions.remove(&key)),
            }
        }
    }

    fn shares(&mut self, node: usize, event: shares::Event) {
        let (boot, mut actions) = (self.boot(node), Vec::new());
        self.process(node).shares.handle(event, boot, &mut actions);
        for action in actions {
            self.story.tell(self.now, "  >", &(node, &action));
            match action {
                shares::Action::Read => {
                    let op = Op::Read { bucket: Bucket::State, key: "shares".into() };
                    self.operate(node, op, Operation::SharesRead);
                }
                shares::Action::Write { attempt, expected, table } => {
                    let value = Some(Value::table(&table));
                    let op = Op::Write { bucket: Bucket::State, key: "shares".into(), expected, value };
                    self.operate(node, op, Operation::SharesWrite { attempt });
                }
                shares::Action::Share { .. } => {}
                shares::Action::Remember { parts, age } => {
                    self.nodes[node].disk.remembered = Some((parts, age, boot));
                }
            }
            // A process can end between any two of them.
            if !self.is_calm && self.dice.one_in(500) {
                self.kill(node);
                let later = self.within(5_000);
                return self.at(later, Happening::Start { node });
            }
        }
    }

    pub(super) fn audit(&mut self, node: usize, event: audit_log::Event) {
        let (instant, mut actions) = (self.nodes[node].clock.instant(self.now), vec![]);
        self.process(node).audit.handle(event, instant, &mut actions);
        for action in actions {
            self.story.tell(self.now, "  >", &(node, &action));
            let subject = self.nodes[node].name.clone();
            match action {
                audit_log::Action::ReadLast => {
                    self.operate(node, Op::ReadLast { subject }, Operation::AuditLast);
                }
                audit_log::Action::Load { after, bytes_max } => {
                    let loaded = self.load(node, after, bytes_max);
                    // A slow disk. What was published before may take effect meanwhile.
                    let delay = if self.is_calm || self.dice.one_in(2) { Duration::ZERO } else { self.within(8_000) };
                    self.deliver(node, delay, Delivery::Loaded(loaded));
                }
                audit_log::Action::Publish { batch, id, expected_last, body } => {
                    let op = Op::Publish { subject, id, expected_last, body };
                    self.operate(node, op, Operation::AuditPublish { batch });
                }
            }
        }
    }

    fn load(&self, node: usize, after: Option<u64>, bytes_max: usize) -> audit_log::Loaded {
        let mut loaded = audit_log::Loaded { after, is_end: true, ..audit_log::Loaded::default() };
        let mut bytes = 0;
        for number in
            self.nodes[node].disk.audit.iter().copied().filter(|number| after.is_none_or(|after| after < *number))
        {
            let line = Bytes::from(format!("{number}\n"));
            bytes += line.len();
            if bytes > bytes_max && !loaded.lines.is_empty() {
                loaded.is_end = false;
                break;
            }
            loaded.lines.push(audit_log::Line { number, bytes: line });
        }
        loaded
    }

    // NATS.

    fn operate(&mut self, node: usize, op: Op, operation: Operation) {
        let number = self.number();
        let process = self.process(node);
        if process.connection.is_none() {
            return self.answered(node, operation, None);
        }
        let process_number = process.number;
        process.operations.insert(number, operation);
        let is_write = matches!(op, Op::Write { .. } | Op::Publish { .. });
        let delay = self.latency();
        self.at(delay, Happening::Arrive { node, process: process_number, operation: number, op });
        let expires = self.nodes[node].clock.when(self.boot(node) + ANSWER_MAX) - self.now;
        self.deliver(node, expires, Delivery::Expired { operation: number });
        if is_write && self.pauses.remove(&node) {
            self.pause(node);
            if self.cuts.remove(&node) {
                let soon = ms(50) + self.within(1_000);
                self.at(soon, Happening::Cut { node });
            }
        }
    }

    /// The answer to what was asked of NATS; nothing if there is none, so that the outcome is not known.
    fn answered(&mut self, node: usize, operation: Operation, answer: Option<Answer>) {
        match operation {
            Operation::LeaseRead { backend } => match answer {
                Some(Answer::Found(Some((revision, value)))) => {
                    let lease = value.and_then(lease_of);
                    self.leases(node, leases::Event::Changed { backend, revision, lease });
                }
                Some(_) => self.leases(node, leases::Event::Changed { backend, revision: 0, lease: None }),
                None => {}
            },
            Operation::LeaseWrite { backend, attempt } => {
                let result = match answer {
                    Some(Answer::Done(revision)) => leases::Written::Done { revision },
                    Some(_) => leases::Written::Conflict,
                    None => leases::Written::Unknown,
                };
                self.leases(node, leases::Event::Written { backend, attempt, result });
            }
            Operation::HomeRead { key, number } => {
                let found = match answer {
                    Some(Answer::Found(Some((revision, Some(Value::Session(stored)))))) => {
                        let (record, home) = (*stored).clone();
                        homes::Found::Some(Box::new(Stored { revision, record, home }))
                    }
                    Some(_) => homes::Found::None,
                    None => homes::Found::Failed,
                };
                self.homes(node, homes::Event::Read { key, number, found });
            }
            Operation::HomeTake { key, number } => {
                let result = written(answer);
                self.homes(node, homes::Event::Written { key, number, result });
            }
            Operation::SharesRead => {
                let found = match answer {
                    Some(Answer::Found(Some((revision, Some(Value::Table(table)))))) => {
                        shares::Found::Some { revision, table: (*table).clone() }
                    }
                    Some(_) => shares::Found::None,
                    None => shares::Found::Failed,
                };
                self.shares(node, shares::Event::Read { found });
            }
            Operation::SharesWrite { attempt } => {
                let result = match answer {
                    Some(Answer::Done(revision)) => shares::Written::Done { revision },
                    Some(_) => shares::Written::Conflict,
                    None => shares::Written::Unknown,
                };
                self.shares(node, shares::Event::Written { attempt, result });
            }
            Operation::AuditLast => {
                let last = match answer {
                    Some(Answer::Last(Some((sequence, id)))) => audit_log::Last::Some { sequence, id },
                    Some(_) => audit_log::Last::None,
                    None => audit_log::Last::Failed,
                };
                self.audit(node, audit_log::Event::LastRead { last });
            }
            Operation::AuditPublish { batch } => {
                let result = match answer {
                    Some(Answer::Done(sequence)) => audit_log::Published::Done { sequence },
                    Some(_) => audit_log::Published::WrongLast,
                    None => audit_log::Published::Failed,
                };
                self.audit(node, audit_log::Event::Published { batch, result });
            }
            Operation::Create { key } => {
                let revision = match answer {
                    Some(Answer::Done(revision)) => Some(revision),
                    _ => None,
                };
                self.homes(node, homes::Event::Opened { key, revision });
                // `initialize` is answered now.
                if let Some((who, _)) = self.process(node).sessions.get(&key).cloned() {
                    self.ledger.opened(key, who, revision.is_some());
                }
            }
            Operation::Store { ask } => self.stored(node, ask, answer),
            Operation::Delete => {}
        }
    }

    fn watched(&mut self, node: usize, connection: u64) {
        if self.process(node).connection != Some(connection) {
            return;
        }
        if !self.is_reachable(node) {
            return self.deliver(node, ms(100), Delivery::Watch { connection });
        }
        let Some(Change { bucket, key, revision, value }) = self.process(node).watch.pop_front() else { return };
        match bucket {
            Bucket::Leases => {
                let lease = value.and_then(lease_of);
                self.leases(node, leases::Event::Changed { backend: key, revision, lease });
            }
            Bucket::Sessions => {
                let key = RecordKey(u128::from_str_radix(&key, 16).expect("it was written so"));
                let home = value.and_then(|value| value.home().cloned());
                if self.process(node).homes.is_of_interest(key) {
                    self.homes(node, homes::Event::Changed { key, revision, home });
                }
            }
            Bucket::State => {
                let table = match value {
                    Some(Value::Table(table)) => Some((*table).clone()),
                    _ => None,
                };
                self.shares(node, shares::Event::Changed { revision, table });
            }
        }
    }

    /// A change is on its way to a process that watches.
    pub(super) fn notify(&mut self, node: usize, change: Change) {
        let most = if self.dice.one_in(20) { 400 } else { 30 };
        let Some(process) = &mut self.nodes[node].process else { return };
        let Some(connection) = process.connection else { return };
        process.watch.push_back(change);
        self.deliver_within(node, most, Delivery::Watch { connection });
    }

    fn disconnect(&mut self, node: usize) {
        self.story.tell(self.now, "disconnected", &node);
        let process = self.process(node);
        process.connection = None;
        process.watch.clear();
        let instance = process.instance;
        for operation in std::mem::take(&mut process.operations).into_values() {
            self.answered(node, operation, None);
            if self.nodes[node].process.is_none() {
                return;
            }
        }
        self.served.remove(&instance);
        self.leases(node, leases::Event::Disconnected);
        self.homes(node, homes::Event::Disconnected);
        self.audit(node, audit_log::Event::Disconnected);
        self.shares(node, shares::Event::Disconnected);
        if self.nodes[node].process.is_some() {
            self.retry_connection(node);
        }
    }

    /// Not so often where hours pass.
    fn retry_connection(&mut self, node: usize) {
        let most = if self.is_slow && !self.is_calm { 300_000 } else { 800 };
        self.deliver_within(node, most, Delivery::Reconnect);
    }

    fn reconnect(&mut self, node: usize) {
        if self.process(node).connection.is_some() {
            return;
        }
        if !self.is_reachable(node) {
            return self.retry_connection(node);
        }
        let connection = self.number();
        let name = self.nodes[node].name.clone();
        let process = self.process(node);
        process.connection = Some(connection);
        let (instance, number) = (process.instance, process.number);
        self.story.tell(self.now, "connected", &(node, connection));
        // The others learn that the name has another instance.
        let earlier: Vec<Instance> = self.instances.entry(name).or_default().to_vec();
        if earlier.last() != Some(&instance) {
            self.instances.entry(self.nodes[node].name.clone()).or_default().push(instance);
            if let Some(left) = earlier.last().copied() {
                for other in 0..self.nodes.len() {
                    if other != node && self.is_reachable(other) {
                        self.deliver_within(other, 2_000, Delivery::Left { instance: left });
                    }
                }
            }
        }
        self.served.insert(instance, (node, number));
        for bucket in [Bucket::Leases, Bucket::State] {
            for change in self.nats.entries(bucket) {
                self.notify(node, change);
            }
        }
        self.leases(node, leases::Event::Connected);
        self.homes(node, homes::Event::Connected);
        self.audit(node, audit_log::Event::Connected);
        self.shares(node, shares::Event::Connected);
    }

    // Other replicas.

    pub(super) fn send(&mut self, node: usize, to: Instance, packet: Packet) {
        let process = self.process(node);
        let (from, is_connected) = (process.instance, process.connection.is_some());
        if is_connected && self.is_reachable(node) {
            let delay = self.latency();
            self.at(delay, Happening::Send { node, from, to, packet });
        }
    }

    fn probe(&mut self, node: usize, instance: Instance) {
        if self.process(node).checks.contains_key(&instance) {
            return;
        }
        let check = self.number();
        self.process(node).checks.insert(instance, check);
        self.send(node, instance, Packet::Probe);
        self.deliver(node, SILENCE, Delivery::Silence { instance, check });
    }

    fn lost(&mut self, node: usize, instance: Instance) {
        self.process(node).checks.remove(&instance);
        self.homes(node, homes::Event::Lost { instance });
        let forwards = &self.process(node).forwards;
        let failed: Vec<u64> =
            forwards.iter().filter(|(_, (_, to))| *to == instance).map(|(forward, _)| *forward).collect();
        for forward in failed {
            self.forward_failed(node, forward);
        }
    }

    fn packet(&mut self, node: usize, from: Instance, packet: Packet) {
        match packet {
            Packet::Probe => self.send(node, from, Packet::ProbeAnswer),
            Packet::ProbeAnswer => {
                self.process(node).checks.remove(&from);
                self.homes(node, homes::Event::Alive { instance: from });
            }
            Packet::Forward { forward, request } => {
                let from = From::Replica { instance: from, forward };
                self.ask(node, Ask { request, from, refusals: 0 });
            }
            Packet::Forwarded { forward, reply } => {
                let Some((mut ask, _)) = self.process(node).forwards.remove(&forward) else { return };
                match reply {
                    Some(reply) => self.reply(node, ask, reply),
                    None => {
                        self.homes(node, homes::Event::Refused { key: ask.request.key, by: from });
                        ask.refusals += 1;
                        match ask.refusals < REFUSED_MAX {
                            true => self.ask(node, ask),
                            false => self.reply(node, ask, Reply::TryAgain),
                        }
                    }
                }
            }
            Packet::Call { backend, call } => {
                let number = self.process(node).number;
                if self.nodes[node].hosts.get(&backend).is_some_and(|host| host.process == number) {
                    let executed = self.ledger.execute(call);
                    self.must(executed);
                    self.send(node, from, Packet::CallAnswer { call });
                }
            }
            Packet::CallAnswer { call } => drop(self.ledger.answered.insert(call)),
        }
    }

    /// A call of a backend that one replica runs.
    pub(super) fn call(&mut self, node: usize, backend: &str) -> u64 {
        let call = self.number();
        let owner = self.process(node).owners.get(backend).cloned();
        if let Some((_, instance)) = owner {
            self.send(node, instance, Packet::Call { backend: backend.to_owned(), call });
        }
        call
    }

    // Sessions.

    pub(super) fn open_session(&mut self, node: usize, key: RecordKey, who: &Who) {
        let process = self.process(node);
        process.sessions.insert(key, (who.clone(), 0));
        let home = Home { name: String::new(), instance: process.instance };
        let home = Home { name: self.nodes[node].name.clone(), ..home };
        let value = Some(Value::session(key, &record(who, 0), &home));
        let op = Op::Write { bucket: Bucket::Sessions, key: key.to_string(), expected: 0, value };
        self.operate(node, op, Operation::Create { key });
    }

    fn ask(&mut self, node: usize, ask: Ask) {
        let ticket = self.number();
        let (key, who) = (ask.request.key, ask.request.who.clone());
        self.process(node).tickets.insert(ticket, ask);
        self.homes(node, homes::Event::Asked { ticket, key, who });
    }

    fn outcome(&mut self, node: usize, ask: Ask, outcome: Outcome) {
        match outcome {
            Outcome::Here => self.serve(node, ask),
            Outcome::Restore { record, revision } => {
                let key = ask.request.key;
                check!(self, record.who == ask.request.who, "{ask:?} restores a session of another principal");
                let restored = self.ledger.restored(key, &record);
                // The answer to its take may reach it after another replica has taken the session from it, which it
                // notices soon. Until then it may have an older record, as a home that was replaced has. No write of it
                // takes effect, and what the other one stored is checked when it is stored.
                if self.is_home_or_should_know(node, key) {
                    self.must(restored);
                }
                let level = level(&record);
                let is_new = self.process(node).sessions.insert(key, (record.who, level)).is_none();
                check!(self, is_new, "{key} is restored although it is open");
                self.homes(node, homes::Event::Opened { key, revision: Some(revision) });
                self.serve(node, ask);
            }
            Outcome::Forward { to } => match ask.from {
                From::Replica { instance, forward } => {
                    self.send(node, instance, Packet::Forwarded { forward, reply: None });
                }
                From::Client => {
                    let forward = self.number();
                    let request = ask.request.clone();
                    self.process(node).forwards.insert(forward, (ask, to.instance));
                    self.send(node, to.instance, Packet::Forward { forward, request });
                    self.probe(node, to.instance);
                    self.deliver(node, FORWARD_MAX, Delivery::ForwardExpired { forward });
                }
            },
            Outcome::NotFound => self.reply(node, ask, Reply::NotFound),
            Outcome::Unavailable => self.reply(node, ask, Reply::TryAgain),
        }
    }

    fn forward_failed(&mut self, node: usize, forward: u64) {
        if let Some((ask, _)) = self.process(node).forwards.remove(&forward) {
            self.reply(node, ask, Reply::TryAgain);
        }
    }

    fn serve(&mut self, node: usize, ask: Ask) {
        let key = ask.request.key;
        let open = self.process(node).sessions.get(&key).cloned();
        let Some((who, level)) = open else {
            // The request before this one may have ended it.
            let is_deleted = self.ledger.sessions.get(&key).is_none_or(|session| session.is_deleted);
            check!(self, is_deleted, "{node}: {key} is said to be open");
            return self.reply(node, ask, Reply::NotFound);
        };
        if who != ask.request.who {
            return self.reply(node, ask, Reply::NotFound);
        }
        self.check_home(node, key);
        let home = Home { name: self.nodes[node].name.clone(), instance: self.process(node).instance };
        match ask.request.what {
            What::Call => self.reply(node, ask, Reply::Served),
            What::SetLevel(new) => match self.process(node).homes.revision(key) {
                Some(expected) => {
                    // The session has the level before it is stored: a write beside this one contains it.
                    let level = new.max(level);
                    self.process(node).sessions.insert(key, (who.clone(), level));
                    let value = Value::session(key, &record(&who, level), &home);
                    let (bucket, value) = (Bucket::Sessions, Some(value));
                    let op = Op::Write { bucket, key: key.to_string(), expected, value };
                    self.operate(node, op, Operation::Store { ask });
                }
                None => self.reply(node, ask, Reply::TryAgain),
            },
            What::Delete => {
                let expected = self.process(node).homes.revision(key);
                self.process(node).sessions.remove(&key);
                self.homes(node, homes::Event::Closed { key });
                if let Some(expected) = expected {
                    let op = Op::Write { bucket: Bucket::Sessions, key: key.to_string(), expected, value: None };
                    self.operate(node, op, Operation::Delete);
                }
                self.reply(node, ask, Reply::Served);
            }
        }
    }

    fn stored(&mut self, node: usize, ask: Ask, answer: Option<Answer>) {
        let key = ask.request.key;
        match answer {
            Some(Answer::Done(revision)) => {
                self.homes(node, homes::Event::Stored { key, revision });
                self.reply(node, ask, Reply::Served);
            }
            Some(_) => {
                self.homes(node, homes::Event::Conflicted { key });
                self.reply(node, ask, Reply::TryAgain);
            }
            None => self.reply(node, ask, Reply::TryAgain),
        }
    }

    fn reply(&mut self, node: usize, ask: Ask, reply: Reply) {
        self.story.tell(self.now, "  reply", &(node, &ask, reply));
        match ask.from {
            From::Client => {
                let replied = self.ledger.replied(&ask.request, reply);
                self.must(replied);
            }
            From::Replica { instance, forward } => {
                self.send(node, instance, Packet::Forwarded { forward, reply: Some(reply) });
            }
        }
    }

    // The keeper.

    fn tell_keeper(&mut self, node: usize, action: leases::Action) {
        let number = self.number();
        let process = self.process(node).number;
        match action {
            leases::Action::Start { backend, until } => {
                check!(self, !self.nodes[node].hosts.contains_key(&backend), "{node}: {backend} is started twice");
                if until <= self.boot(node) {
                    return self.deliver_within(node, 50, Delivery::HostGone { backend });
                }
                self.ledger.hosts += 1;
                self.nodes[node].hosts.insert(backend.clone(), Host { number, process, until });
                self.check_hosts(&backend);
                self.watch_host(node, backend, number);
            }
            leases::Action::Extend { backend, until } => {
                if let Some(host) = self.nodes[node].hosts.get_mut(&backend) {
                    host.until = host.until.max(until);
                }
            }
            leases::Action::Stop { backend, at_once } => {
                let number = self.nodes[node].hosts.get(&backend).map(|host| host.number);
                let most = if at_once { 100 } else { 3_000 };
                let soon = self.within(most);
                if let Some(number) = number {
                    self.at(soon, Happening::HostEnds { node, backend, number });
                }
            }
            _ => {}
        }
    }

    /// The keeper looks again when the host may no longer live.
    fn watch_host(&mut self, node: usize, backend: String, number: u64) {
        let Some(host) = self.nodes[node].hosts.get(&backend) else { return };
        let when = self.nodes[node].clock.when(host.until).max(self.now);
        self.at(when - self.now, Happening::KeeperDue { node, backend, number });
    }

    /// The keeper does not depend on the process. It stands still while the computer is suspended.
    pub(super) fn keeper_due(&mut self, node: usize, backend: String, number: u64) {
        if self.nodes[node].suspended.is_some() {
            return;
        }
        let Some(host) = self.nodes[node].hosts.get(&backend).filter(|host| host.number == number) else { return };
        match host.until <= self.boot(node) {
            true => self.host_ends(node, &backend, number),
            false => self.watch_host(node, backend, number),
        }
    }

    pub(super) fn host_ends(&mut self, node: usize, backend: &str, number: u64) {
        if self.nodes[node].suspended.is_some() {
            let backend = backend.to_owned();
            return self.at(ms(500), Happening::HostEnds { node, backend, number });
        }
        let Some(host) = self.nodes[node].hosts.get(backend).filter(|host| host.number == number) else { return };
        let process = host.process;
        self.nodes[node].hosts.remove(backend);
        self.story.tell(self.now, "host ends", &(node, backend));
        if self.nodes[node].process.as_ref().is_some_and(|running| running.number == process) {
            self.deliver_within(node, 50, Delivery::HostGone { backend: backend.to_owned() });
        }
    }

    /// The computer continues: what may no longer live is killed first.
    pub(super) fn resume(&mut self, node: usize) {
        let Some(since) = self.nodes[node].suspended.take() else { return };
        self.nodes[node].clock.suspend(since, self.now);
        self.nodes[node].due = Due::Unknown;
        self.story.tell(self.now, "resume", &node);
        let process = self.nodes[node].process.as_ref().map(|process| process.number);
        let hosts: Vec<(String, u64, bool)> = self.nodes[node]
            .hosts
            .iter()
            .map(|(backend, host)| (backend.clone(), host.number, Some(host.process) == process))
            .collect();
        for (backend, number, is_of_process) in hosts {
            match is_of_process {
                true => self.keeper_due(node, backend, number),
                false => self.host_ends(node, &backend, number),
            }
        }
        for backend in self.nodes[node].hosts.keys().cloned().collect::<Vec<_>>() {
            self.check_hosts(&backend);
        }
        self.thaw(node, since);
    }
}

fn written(answer: Option<Answer>) -> homes::Written {
    match answer {
        Some(Answer::Done(revision)) => homes::Written::Done { revision },
        Some(_) => homes::Written::Conflict,
        None => homes::Written::Failed,
    }
}

fn lease_of(value: Value) -> Option<Lease> {
    match value {
        Value::Lease(lease) => Some((*lease).clone()),
        _ => None,
    }
}
