//! Instances of a cluster that open streams to each other over a network that delays, drops, duplicates, reorders and
//! partitions packets, and that lose their connection, are paused, and are killed: around `Streams`.

mod hostile;
mod stories;

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    time::{Duration, Instant},
};

use bytes::Bytes;
use outlast_core::cluster::streams::{Action, End, Event, Instance, Limits, PROBE_EVERY, Stream, Streams};

use crate::{
    Dice, birth, check, ms, seeds,
    story::{Played, Story, play},
};

#[test]
fn streams_deliver_each_message_once_in_order_and_end_once() {
    let (from, count) = seeds(500);
    for seed in from..from + count {
        play::<World>(seed);
    }
}

#[test]
fn the_world_delivers_much_and_loses_some() {
    let mut total = Seen::default();
    for seed in 0..40 {
        let mut world = World::new(seed);
        world.run();
        total.add(&world.seen);
    }
    let Seen { delivered, joined, closed, aborted, lost, unsent, resent, renewed, late } = total;
    assert!(delivered > 2_000 && joined > 200, "{delivered} messages, {joined} of them in parts");
    assert!(closed > 200 && aborted > 50 && lost > 200, "{closed} closed, {aborted} aborted, {lost} lost");
    assert!(unsent > 50 && resent > 500, "{unsent} unsent, {resent} packets sent again");
    assert!(renewed > 10 && late > 10, "{renewed} channels renewed, {late} late packets");
}

/// After so long without faults no stream is lost any more; and then everything is delivered, or ended.
const LOST_WITHIN: Duration = ms(3_400);
const DELIVERED_WITHIN: Duration = ms(1_200);
/// After so long without streams nothing is known of the peers that were only heard.
const FORGOTTEN_WITHIN: Duration = ms(3_400);
/// How often the promises about time are checked.
const CHECK_EVERY: Duration = ms(20);
/// The longest delay of a packet.
const DELAY_MAX: u64 = 3_000;
/// Where a packet has the number of its channel.
const CHANNEL: Range<usize> = 20..28;
/// How often the drivers look at their streams while the world settles.
const SETTLE_TICK: Duration = ms(40);

/// What all worlds together did.
#[derive(Debug, Default)]
struct Seen {
    delivered: u64,
    joined: u64,
    closed: u64,
    aborted: u64,
    lost: u64,
    unsent: u64,
    resent: u64,
    renewed: u64,
    late: u64,
}

impl Seen {
    fn add(&mut self, other: &Seen) {
        self.delivered += other.delivered;
        self.joined += other.joined;
        self.closed += other.closed;
        self.aborted += other.aborted;
        self.lost += other.lost;
        self.unsent += other.unsent;
        self.resent += other.resent;
        self.renewed += other.renewed;
        self.late += other.late;
    }
}

struct World {
    story: Story,
    dice: Dice,
    start: Instant,
    now: Instant,
    limits: Limits,
    /// There are no faults in this world.
    is_calm: bool,
    /// The network and the processes have faults now.
    has_faults: bool,
    /// Streams may be lost, for what happens or happened.
    may_lose: bool,
    /// Drivers that send although a stream is full.
    is_rude: bool,
    nodes: Vec<Node>,
    /// When instances were killed.
    dead: BTreeMap<Instance, Instant>,
    next_instance: Instance,
    /// What is on its way, by the time of its arrival.
    agenda: BTreeMap<(Instant, u64), Travel>,
    sent: u64,
    /// Whether packets pass between two places: a place is on the side of its bit.
    cut: Option<u64>,
    /// When a cut was last seen.
    cut_at: Instant,
    /// When the first instance last received something from the second.
    arrivals: BTreeMap<(Instance, Instance), Instant>,
    checked_at: Instant,
    calls: Vec<Call>,
    seen: Seen,
}

/// A process of a replica, and its driver.
struct Node {
    instance: Instance,
    machine: Streams,
    is_connected: bool,
    paused_until: Option<Instant>,
    inbox: VecDeque<Arrival>,
    /// When it was last paused, and when it was last paused or not connected.
    paused_at: Instant,
    disturbed_at: Instant,
    /// Probes without an outcome.
    probes: BTreeMap<u64, Instance>,
    /// Since the connection is up.
    last_probes: BTreeMap<Instance, LastProbe>,
    /// The streams that the driver knows and that have not ended.
    sides: BTreeMap<Stream, Side>,
    actions: Vec<Action>,
    /// The deadline of the machine, if nothing has happened since it was asked.
    deadline: Option<Option<Instant>>,
}

impl Node {
    fn deadline(&mut self) -> Option<Instant> {
        *self.deadline.get_or_insert_with(|| self.machine.deadline())
    }
}

struct LastProbe {
    channel: Vec<u8>,
    at: Instant,
}

/// One end of a stream.
struct Side {
    call: usize,
    end: usize,
    since: Instant,
    /// Lengths of messages that were delivered and not consumed.
    backlog: VecDeque<usize>,
    is_slow: bool,
    /// The driver saw that the stream is full.
    is_waiting: bool,
}

/// What the world knows of a stream. End 0 opened it.
struct Call {
    of: [Instance; 2],
    hello: Bytes,
    is_accepted: bool,
    /// The opener was told that nothing was published.
    is_unopened: bool,
    /// By the end that sends.
    lanes: [Lane; 2],
    ends: [Option<How>; 2],
}

#[derive(Default)]
struct Lane {
    sent: Vec<Bytes>,
    delivered: usize,
    /// From here on the messages were reported as unsent.
    unsent_from: Option<usize>,
}

#[derive(Debug, PartialEq, Eq)]
enum How {
    /// By its own driver.
    Closed,
    Aborted(String),
    Told(End),
    Killed,
}

#[derive(Debug)]
struct Travel {
    to: Instance,
    arrival: Arrival,
}

#[derive(Debug, Clone)]
enum Arrival {
    Packet { from: Instance, packet: Bytes },
    Probe { from: Instance, packet: Bytes, ticket: u64 },
    Answer { of: Instance, packet: Bytes, ticket: u64 },
    NoAnswer { of: Instance, ticket: u64, is_dead: bool },
    Left { instance: Instance },
    Connected,
    Woken,
}

impl Played for World {
    fn new(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        let now = birth();
        let packet_max = dice.pick(&[256, 300, 512, 1_024, 4_096]);
        let limits = Limits {
            packet_max,
            message_max: packet_max * dice.pick(&[2, 5, 9]),
            window: packet_max * dice.pick(&[1, 2, 4]),
            unacked_max: packet_max * dice.pick(&[1, 2, 4, 16]),
        };
        let (has_faults, is_rude) = (!dice.one_in(8), dice.one_in(10));
        let mut world = World {
            story: Story::default(),
            dice,
            start: now,
            now,
            limits,
            is_calm: !has_faults,
            has_faults,
            may_lose: has_faults,
            is_rude: is_rude && has_faults,
            nodes: Vec::new(),
            dead: BTreeMap::new(),
            next_instance: 100,
            agenda: BTreeMap::new(),
            sent: 0,
            cut: None,
            cut_at: now,
            arrivals: BTreeMap::new(),
            checked_at: now,
            calls: Vec::new(),
            seen: Seen::default(),
        };
        for _ in 0..world.dice.pick(&[3, 3, 3, 4, 5, 7]) {
            let node = world.new_node();
            world.nodes.push(node);
        }
        world
    }

    fn story(&mut self) -> &mut Story {
        &mut self.story
    }

    fn run(&mut self) {
        for place in 0..self.nodes.len() {
            self.connect(place);
        }
        let mut next_tick = self.now;
        let until = self.now + ms(self.dice.pick(&[300, 600, 1_000, 2_000, 4_500]));
        while self.now < until {
            self.advance(next_tick);
            if self.now == next_tick {
                self.act();
                next_tick += ms(1 + self.dice.below(40));
            }
        }
        self.stop_faults();
        self.drain(DELIVERED_WITHIN);
        self.check_delivered();
        for place in 0..self.nodes.len() {
            self.close_all(place);
        }
        self.drain(FORGOTTEN_WITHIN);
        self.check_empty();
    }
}

impl World {
    fn new_node(&mut self) -> Node {
        self.next_instance += 1 + self.dice.below(1 << 40);
        let (instance, seed) = (self.next_instance, self.dice.below(u64::MAX));
        Node {
            instance,
            machine: Streams::new(instance, seed, self.limits.clone()),
            is_connected: false,
            paused_until: None,
            inbox: VecDeque::new(),
            paused_at: self.now,
            disturbed_at: self.now,
            probes: BTreeMap::new(),
            last_probes: BTreeMap::new(),
            sides: BTreeMap::new(),
            actions: Vec::new(),
            deadline: None,
        }
    }

    fn fail(&self, why: &str) -> ! {
        panic!("at {} ms: {why}", self.now.duration_since(self.start).as_millis());
    }

    fn tell(&mut self, mark: &str, what: &impl std::fmt::Debug) {
        let at = self.now.duration_since(self.start);
        self.story.tell(at, mark, what);
    }

    fn place_of(&self, instance: Instance) -> Option<usize> {
        self.nodes.iter().position(|node| node.instance == instance)
    }

    /// Continues to what happens next, at the latest to `until`.
    fn advance(&mut self, until: Instant) {
        let awake = self.nodes.iter_mut().enumerate().filter(|(_, node)| node.paused_until.is_none());
        let timer = awake.filter_map(|(place, node)| Some((node.deadline()?, place))).min();
        let arrival = self.agenda.first_key_value().map(|(key, _)| *key);
        let at = [Some(until), timer.map(|(at, _)| at), arrival.map(|(at, _)| at)].into_iter().flatten().min();
        self.now = at.unwrap_or(until).max(self.now);
        if let Some(key) = arrival
            && key.0 <= self.now
        {
            let travel = self.agenda.remove(&key).expect("it is in the agenda");
            self.arrive(travel);
        } else if let Some((at, place)) = timer
            && at <= self.now
        {
            self.time_passes(place);
        }
        if self.checked_at + CHECK_EVERY <= self.now {
            self.checked_at = self.now;
            self.check_times();
        }
    }

    fn time_passes(&mut self, place: usize) {
        self.handle(place, Event::TimePassed);
        self.flush(place);
        let next = self.nodes[place].machine.deadline();
        check!(self, next.is_none_or(|at| at > self.now), "the deadline of {place} stays: {next:?}");
    }

    fn arrive(&mut self, travel: Travel) {
        let place = self.place_of(travel.to);
        if let Arrival::Probe { from, ticket, .. } = travel.arrival
            && place.is_none_or(|place| !self.nodes[place].is_connected)
        {
            // The message server answers for an instance that does not listen.
            let arrival = Arrival::NoAnswer { of: travel.to, ticket, is_dead: true };
            if !self.is_cut(from, travel.to) {
                self.put(ms(1), from, arrival);
            }
            return;
        }
        let Some(place) = place else { return };
        if let Arrival::Woken = travel.arrival {
            if self.nodes[place].paused_until.is_some_and(|until| until <= self.now) {
                self.wake(place);
            }
            return;
        }
        if self.nodes[place].paused_until.is_some() {
            self.nodes[place].inbox.push_back(travel.arrival);
            return;
        }
        self.receive(place, travel.arrival);
        if !self.dice.one_in(4) {
            self.flush(place);
        } else if let Some(((at, _), _)) = self.agenda.first_key_value()
            && *at > self.now
        {
            self.flush(place);
        }
    }

    /// Without a flush.
    fn receive(&mut self, place: usize, arrival: Arrival) {
        let node = &mut self.nodes[place];
        let own = node.instance;
        match arrival {
            Arrival::Packet { from, packet } if node.is_connected => {
                self.arrivals.insert((own, from), self.now);
                self.handle(place, Event::Received { from, packet });
            }
            Arrival::Probe { from, packet, ticket } if node.is_connected => {
                self.arrivals.insert((own, from), self.now);
                let answer = node.machine.probed(from, &packet, self.now);
                node.deadline = None;
                check!(self, !answer.is_empty(), "{place} cannot read the probe of {from}");
                self.tell("?", &(place, "was probed by", from));
                self.flush(place);
                self.travel(own, from, Arrival::Answer { of: own, packet: answer, ticket });
            }
            Arrival::Answer { of, packet, ticket } => {
                if node.probes.remove(&ticket).is_some() {
                    self.arrivals.insert((own, of), self.now);
                    self.handle(place, Event::ProbeAnswered { of, packet });
                }
            }
            Arrival::NoAnswer { of, ticket, is_dead } => {
                if node.probes.remove(&ticket).is_some() {
                    self.handle(place, Event::ProbeFailed { of, is_dead });
                }
            }
            Arrival::Left { instance } => self.handle(place, Event::Left { instance }),
            Arrival::Connected => self.connect(place),
            Arrival::Packet { .. } | Arrival::Probe { .. } | Arrival::Woken => {}
        }
    }

    fn connect(&mut self, place: usize) {
        if !std::mem::replace(&mut self.nodes[place].is_connected, true) {
            self.handle(place, Event::Connected);
            self.flush(place);
        }
    }

    fn wake(&mut self, place: usize) {
        self.tell("!", &(place, "wakes"));
        let node = &mut self.nodes[place];
        node.paused_until = None;
        (node.paused_at, node.disturbed_at) = (self.now, self.now);
        let mut inbox = std::mem::take(&mut node.inbox);
        if self.dice.one_in(2) {
            self.time_passes(place);
        }
        while let Some(arrival) = inbox.pop_front() {
            self.receive(place, arrival);
        }
        self.time_passes(place);
    }

    fn handle(&mut self, place: usize, event: Event) {
        self.tell(">", &(place, &event));
        let node = &mut self.nodes[place];
        node.machine.handle(event, self.now, &mut node.actions);
        self.carry_out(place);
    }

    fn flush(&mut self, place: usize) {
        let node = &mut self.nodes[place];
        node.machine.flush(self.now, &mut node.actions);
        let has_changed = !node.actions.is_empty();
        self.carry_out(place);
        if has_changed {
            self.check_memory(place);
        }
    }

    fn carry_out(&mut self, place: usize) {
        self.nodes[place].deadline = None;
        let mut actions = std::mem::take(&mut self.nodes[place].actions);
        for action in actions.drain(..) {
            self.tell("<", &(place, &action));
            let node = &mut self.nodes[place];
            let (own, is_connected) = (node.instance, node.is_connected);
            match action {
                Action::Publish { to, packet } => {
                    check!(self, is_connected, "{place} publishes without a connection");
                    check!(self, packet.len() <= self.limits.packet_max, "a packet of {} bytes", packet.len());
                    check!(self, Streams::sender(&packet) == Some(own), "the sender is not {own}");
                    self.travel(own, to, Arrival::Packet { from: own, packet });
                }
                Action::Probe { to, packet, within } => {
                    check!(self, is_connected, "{place} probes without a connection");
                    self.sent += 1;
                    let ticket = self.sent;
                    let probe = LastProbe { channel: packet[CHANNEL].to_vec(), at: self.now };
                    let is_early = |last: &LastProbe| last.channel == probe.channel && last.at + PROBE_EVERY > self.now;
                    check!(self, !node.last_probes.get(&to).is_some_and(is_early), "{to} is probed too often");
                    node.last_probes.insert(to, probe);
                    node.probes.insert(ticket, to);
                    self.put(within, own, Arrival::NoAnswer { of: to, ticket, is_dead: false });
                    self.travel(own, to, Arrival::Probe { from: own, packet, ticket });
                }
                Action::Accept { stream, from, hello } => self.accepted(place, stream, from, hello),
                Action::Deliver { stream, message } => self.delivered(place, stream, message),
                Action::Room { stream } => {
                    let is_full = node.machine.is_full(stream);
                    match node.sides.get_mut(&stream) {
                        Some(side) => side.is_waiting = is_full,
                        None => self.fail("room on a stream that has ended"),
                    }
                }
                Action::End { stream, how, is_opened, unsent } => self.ended(place, stream, how, is_opened, unsent),
            }
        }
        self.nodes[place].actions = actions;
    }

    fn accepted(&mut self, place: usize, stream: Stream, from: Instance, hello: Bytes) {
        let own = self.nodes[place].instance;
        let id = hello.first_chunk().map_or(usize::MAX, |id| u64::from_be_bytes(*id) as usize);
        check!(self, id < self.calls.len(), "a hello that was not sent");
        let call = &mut self.calls[id];
        let is_right = call.of == [from, own] && call.hello == hello;
        let is_first = !std::mem::replace(&mut call.is_accepted, true) && !call.is_unopened;
        check!(self, is_right, "call {id} comes from {from} at {own}");
        check!(self, is_first, "call {id} is accepted twice, or was reported as not opened");
        let is_slow = self.dice.one_in(3);
        let side = Side { call: id, end: 1, since: self.now, backlog: VecDeque::new(), is_slow, is_waiting: false };
        let earlier = self.nodes[place].sides.insert(stream, side);
        check!(self, earlier.is_none(), "the handle {stream} is used twice");
    }

    fn delivered(&mut self, place: usize, stream: Stream, message: Bytes) {
        let Some(side) = self.nodes[place].sides.get_mut(&stream) else { self.fail("a message on an ended stream") };
        side.backlog.push_back(message.len());
        let unconsumed: usize = side.backlog.iter().sum();
        let (call, lane) = (side.call, &mut self.calls[side.call].lanes[1 - side.end]);
        let expected = lane.sent.get(lane.delivered).filter(|_| lane.unsent_from.is_none_or(|at| lane.delivered < at));
        let is_right = expected == Some(&message);
        lane.delivered += 1;
        self.seen.delivered += 1;
        self.seen.joined += u64::from(message.len() > self.limits.packet_max);
        check!(self, is_right, "call {call}: not the next message: {message:?}");
        let held_max = self.limits.window + self.limits.message_max;
        check!(self, unconsumed <= held_max, "call {call}: {unconsumed} bytes are not consumed");
    }

    fn ended(&mut self, place: usize, stream: Stream, how: End, is_opened: bool, unsent: Vec<Bytes>) {
        let Some(side) = self.nodes[place].sides.remove(&stream) else { self.fail("the end of an ended stream") };
        let (id, end) = (side.call, side.end);
        let call = &mut self.calls[id];
        let lane = &mut call.lanes[end];
        let is_tail = lane.sent.ends_with(&unsent);
        let unsent_from = lane.sent.len() - unsent.len().min(lane.sent.len());
        let is_undelivered = lane.delivered <= unsent_from;
        lane.unsent_from = Some(unsent_from);
        call.is_unopened = !is_opened;
        self.seen.unsent += unsent.len() as u64;
        let is_possible = match &how {
            End::Closed => {
                self.seen.closed += 1;
                let lane = &call.lanes[1 - end];
                call.ends[1 - end] == Some(How::Closed) && lane.delivered == lane.sent.len()
            }
            End::Aborted(why) => {
                self.seen.aborted += 1;
                match &call.ends[1 - end] {
                    Some(How::Aborted(reason) | How::Told(End::Lost(reason))) => reason == why,
                    _ => false,
                }
            }
            End::Lost(why) => {
                self.seen.lost += 1;
                self.seen.renewed += u64::from(why.contains("given the connection up"));
                self.may_lose || self.dead.contains_key(&call.of[1 - end])
            }
        };
        let was_accepted = call.is_accepted;
        let other = call.ends[end].replace(How::Told(how));
        check!(self, other.is_none(), "call {id}: end {end} ends twice");
        check!(self, is_tail && is_undelivered, "call {id}: not the unsent messages of end {end}");
        check!(self, is_opened || !was_accepted, "call {id} is reported as not opened");
        check!(self, is_possible, "call {id}: end {end} cannot end like this: {:?}", self.calls[id].ends);
    }

    /// Sends something over the network with its faults.
    fn travel(&mut self, from: Instance, to: Instance, arrival: Arrival) {
        if !self.has_faults || self.dead.contains_key(&to) {
            self.put(ms(1), to, arrival);
            return;
        }
        if self.is_cut(from, to) || self.dice.one_in(15) {
            return;
        }
        let delay = match self.dice.below(20) {
            0 => self.dice.below(400),
            1..4 => self.dice.below(20),
            _ => 1,
        };
        if self.dice.one_in(15) {
            let delay_max = self.dice.pick(&[60, 60, 60, DELAY_MAX]);
            let delay = self.dice.below(delay_max);
            self.put(ms(delay), to, arrival.clone());
        }
        self.put(ms(delay), to, arrival);
    }

    fn put(&mut self, delay: Duration, to: Instance, arrival: Arrival) {
        self.sent += 1;
        self.agenda.insert((self.now + delay, self.sent), Travel { to, arrival });
    }

    fn is_cut(&self, from: Instance, to: Instance) -> bool {
        let side = |instance| self.place_of(instance).map(|place| self.cut.unwrap_or(0) >> place & 1);
        self.cut.is_some() && side(from) != side(to)
    }
}

/// What drivers and the world do by themselves.
impl World {
    fn act(&mut self) {
        let place = self.dice.below(self.nodes.len() as u64) as usize;
        if self.has_faults && self.dice.one_in(25) {
            self.disturb(place);
        }
        if self.nodes[place].paused_until.is_some() {
            return;
        }
        for _ in 0..1 + self.dice.below(6) {
            match self.dice.below(20) {
                0..3 => self.open(place),
                3..12 => self.send(place),
                12 | 13 => self.end_one(place),
                _ => {}
            }
        }
        self.consume(place, false);
        self.flush(place);
    }

    fn disturb(&mut self, place: usize) {
        let now = self.now;
        match self.dice.below(12) {
            0 | 1 => self.kill(place),
            2..5 if self.nodes[place].paused_until.is_none() => {
                let pause = ms(self.dice.pick(&[40, 400, 1_500, 2_950, 4_000]));
                let node = &mut self.nodes[place];
                (node.paused_until, node.paused_at) = (Some(now + pause), now);
                let instance = node.instance;
                self.tell("!", &(place, "is paused"));
                self.put(pause, instance, Arrival::Woken);
            }
            5..8 if self.nodes[place].is_connected && self.nodes[place].paused_until.is_none() => {
                self.nodes[place].is_connected = false;
                self.nodes[place].last_probes.clear();
                let probes = std::mem::take(&mut self.nodes[place].probes);
                self.handle(place, Event::Disconnected);
                if self.dice.one_in(2) {
                    probes.values().for_each(|of| {
                        self.handle(place, Event::ProbeFailed { of: *of, is_dead: false });
                    });
                }
                self.flush(place);
                let delay = ms(self.dice.pick(&[1, 100, 900, 2_950, 3_300]));
                let instance = self.nodes[place].instance;
                self.put(delay, instance, Arrival::Connected);
            }
            8..11 => {
                let mask = self.dice.below(1 << self.nodes.len());
                self.cut = self.cut.is_none().then_some(mask);
                self.tell("!", &("cut", self.cut));
            }
            _ => {}
        }
    }

    fn kill(&mut self, place: usize) {
        self.tell("!", &(place, "is killed"));
        let node = self.new_node();
        let instance = node.instance;
        let old = std::mem::replace(&mut self.nodes[place], node);
        for side in old.sides.values() {
            self.calls[side.call].ends[side.end] = Some(How::Killed);
        }
        let counts = old.machine.counts();
        (self.seen.resent, self.seen.late) = (self.seen.resent + counts.resent, self.seen.late + counts.late_packets);
        self.dead.insert(old.instance, self.now);
        self.put(ms(50), instance, Arrival::Connected);
        for to in self.nodes.iter().map(|node| node.instance).collect::<Vec<_>>() {
            if self.dice.one_in(2) {
                let delay = ms(self.dice.below(3_000));
                self.put(delay, to, Arrival::Left { instance: old.instance });
            }
        }
    }

    fn open(&mut self, place: usize) {
        let own = self.nodes[place].instance;
        let mut to = self.nodes[self.dice.below(self.nodes.len() as u64) as usize].instance;
        if self.dice.one_in(12) && !self.dead.is_empty() {
            let dead: Vec<Instance> = self.dead.keys().copied().collect();
            to = self.dice.pick(&dead);
        }
        let id = self.calls.len();
        let len = self.message_len().max(8);
        let mut hello = vec![id as u8; len];
        hello[..8].copy_from_slice(&(id as u64).to_be_bytes());
        let hello = Bytes::from(hello);
        self.calls.push(Call {
            of: [own, to],
            hello: hello.clone(),
            is_accepted: false,
            is_unopened: false,
            lanes: [Lane::default(), Lane::default()],
            ends: [None, None],
        });
        let is_slow = self.dice.one_in(3);
        let node = &mut self.nodes[place];
        let stream = node.machine.next_stream();
        let side = Side { call: id, end: 0, since: self.now, backlog: VecDeque::new(), is_slow, is_waiting: false };
        node.sides.insert(stream, side);
        self.handle(place, Event::Opened { stream, to, hello });
    }

    /// At most `message_max`.
    fn message_len(&mut self) -> usize {
        let (packet, message) = (self.limits.packet_max as u64, self.limits.message_max as u64);
        let max = self.dice.pick(&[1, 20, 20, packet, packet, 3 * packet, message]).min(message);
        self.dice.below(max + 1) as usize
    }

    fn any_stream(&mut self, place: usize) -> Option<Stream> {
        let streams: Vec<Stream> = self.nodes[place].sides.keys().copied().collect();
        (!streams.is_empty()).then(|| self.dice.pick(&streams))
    }

    fn send(&mut self, place: usize) {
        let Some(stream) = self.any_stream(place) else { return };
        for _ in 0..1 + self.dice.below(4) {
            let mut len = self.message_len();
            if self.has_faults && self.dice.one_in(300) {
                len = self.limits.message_max + 1;
            }
            let node = &mut self.nodes[place];
            let is_full = node.machine.is_full(stream);
            let Some(side) = node.sides.get_mut(&stream) else { return };
            check!(self, !side.is_waiting || is_full, "there is room on {stream}, and it was not told");
            let side = self.nodes[place].sides.get_mut(&stream).expect("it was there");
            side.is_waiting = is_full;
            if is_full && !self.is_rude {
                return;
            }
            self.sent += 1;
            let mut bytes = vec![self.sent as u8; len];
            let mark = self.sent.to_be_bytes();
            bytes.iter_mut().zip(mark.iter().rev()).for_each(|(byte, mark)| *byte = *mark);
            let message = Bytes::from(bytes);
            self.calls[side.call].lanes[side.end].sent.push(message.clone());
            self.handle(place, Event::Sent { stream, message });
        }
    }

    fn end_one(&mut self, place: usize) {
        let Some(stream) = self.any_stream(place) else { return };
        let event = match self.dice.one_in(3) {
            true => Event::Aborted { stream, why: format!("reason {}", self.sent) },
            false => Event::Closed { stream },
        };
        self.end_by_driver(place, stream, event);
    }

    fn end_by_driver(&mut self, place: usize, stream: Stream, event: Event) {
        let side = self.nodes[place].sides.remove(&stream).expect("the driver ends what it knows");
        self.calls[side.call].ends[side.end] = Some(match &event {
            Event::Aborted { why, .. } => How::Aborted(why.clone()),
            _ => How::Closed,
        });
        self.handle(place, event);
    }

    fn consume(&mut self, place: usize, is_all: bool) {
        let streams: Vec<Stream> = self.nodes[place].sides.keys().copied().collect();
        for stream in streams {
            let Some(side) = self.nodes[place].sides.get_mut(&stream) else { continue };
            if side.backlog.is_empty() || (side.is_slow && !is_all && !self.dice.one_in(8)) {
                continue;
            }
            // One by one, or all together.
            let together = self.dice.one_in(2);
            let backlog = std::mem::take(&mut side.backlog);
            match together {
                true => self.handle(place, Event::Consumed { stream, bytes: backlog.iter().sum() }),
                false => backlog.into_iter().for_each(|bytes| {
                    self.handle(place, Event::Consumed { stream, bytes });
                }),
            }
        }
    }

    fn stop_faults(&mut self) {
        self.tell("!", &"faults stop");
        (self.has_faults, self.cut) = (false, None);
        for place in 0..self.nodes.len() {
            if self.nodes[place].paused_until.is_some() {
                self.wake(place);
            }
            self.connect(place);
            self.close_some(place);
        }
        // Streams may still be lost for what happened before.
        self.drain(LOST_WITHIN);
        self.may_lose = false;
    }

    /// The drivers consume everything; packets are not disturbed.
    fn drain(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            let tick = self.now + SETTLE_TICK;
            while self.now < tick {
                self.advance(tick);
            }
            for place in 0..self.nodes.len() {
                self.consume(place, true);
                self.flush(place);
            }
        }
    }

    /// Two of three streams.
    fn close_some(&mut self, place: usize) {
        let streams: Vec<Stream> = self.nodes[place].sides.keys().copied().collect();
        for stream in streams {
            if !self.dice.one_in(3) && self.nodes[place].sides.contains_key(&stream) {
                self.end_by_driver(place, stream, Event::Closed { stream });
            }
        }
        self.flush(place);
    }

    fn close_all(&mut self, place: usize) {
        let streams: Vec<Stream> = self.nodes[place].sides.keys().copied().collect();
        for stream in streams {
            if self.nodes[place].sides.contains_key(&stream) {
                self.end_by_driver(place, stream, Event::Closed { stream });
            }
        }
        self.flush(place);
    }
}

/// Promises.
impl World {
    /// How soon a dead or silent peer is noticed.
    fn check_times(&mut self) {
        let now = self.now;
        if self.cut.is_some() {
            self.cut_at = now;
        }
        for node in &mut self.nodes {
            if node.paused_until.is_some() {
                node.paused_at = now;
            }
            if node.paused_until.is_some() || !node.is_connected {
                node.disturbed_at = now;
            }
        }
        for node in self.nodes.iter().filter(|node| node.paused_until.is_none()) {
            for (stream, side) in &node.sides {
                let other = self.calls[side.call].of[1 - side.end];
                let heard = self.arrivals.get(&(node.instance, other)).copied().unwrap_or(self.start);
                let heard = heard.max(side.since);
                if other == node.instance {
                    continue;
                }
                let silent = now.duration_since(heard.max(node.paused_at));
                check!(
                    self,
                    silent <= ms(3_200) + CHECK_EVERY,
                    "{stream} of {} is silent since {silent:?}",
                    node.instance
                );
                if let Some(died) = self.dead.get(&other) {
                    let since = heard.max(node.disturbed_at).max(self.cut_at).max(*died);
                    let dead = now.duration_since(since);
                    check!(self, dead <= ms(500) + CHECK_EVERY, "{other} is dead since {dead:?} for {}", node.instance);
                }
            }
        }
    }

    /// What a machine holds.
    fn check_memory(&self, place: usize) {
        let Limits { packet_max, message_max, window, unacked_max } = self.limits;
        for peer in self.nodes[place].machine.counts().peers {
            let unacked_max = unacked_max.max(packet_max);
            check!(self, peer.unacked <= unacked_max, "{} bytes are not acknowledged", peer.unacked);
            let queued_max = peer.streams * (4 * window + 2 * message_max);
            check!(self, peer.queued <= queued_max, "{} bytes wait", peer.queued);
        }
    }

    /// Faults have stopped and time has passed: streams that did not end have delivered everything.
    fn check_delivered(&self) {
        for (id, call) in self.calls.iter().enumerate() {
            match &call.ends {
                [None, None] => {
                    let is_complete = call.lanes.iter().all(|lane| lane.delivered == lane.sent.len());
                    check!(self, call.is_accepted && is_complete, "call {id}: not everything is delivered");
                }
                [None, end] => self.fail(&format!("call {id}: the opener was not told of {end:?}")),
                [end, None] if call.is_accepted => {
                    self.fail(&format!("call {id}: the acceptor was not told of {end:?}"))
                }
                [Some(How::Closed), None] if self.is_calm => {
                    self.fail(&format!("call {id} was closed and never accepted"))
                }
                _ => {}
            }
        }
        for place in 0..self.nodes.len() {
            for peer in self.nodes[place].machine.counts().peers {
                check!(self, peer.unacked == 0 && peer.queued == 0, "{place} has not sent everything: {peer:?}");
            }
            for (stream, side) in &self.nodes[place].sides {
                let is_full = self.nodes[place].machine.is_full(*stream);
                check!(self, !is_full && !side.is_waiting, "{stream} of {place} is full");
            }
        }
    }

    /// All streams were closed: nothing is left, and nothing is waited for.
    fn check_empty(&mut self) {
        for place in 0..self.nodes.len() {
            let node = &self.nodes[place];
            check!(self, node.sides.is_empty(), "{place} has open streams");
            let counts = node.machine.counts();
            let is_empty = counts.peers.iter().all(|peer| (peer.streams, peer.unacked, peer.queued) == (0, 0, 0));
            check!(self, is_empty, "{place} is not empty: {counts:?}");
            check!(self, node.machine.deadline().is_none(), "{place} still waits: {counts:?}");
            check!(self, counts.unreadable == 0, "{place} could not read {} packets", counts.unreadable);
            self.seen.resent += counts.resent;
            self.seen.late += counts.late_packets;
        }
        let is_over = |call: &Call| call.ends[0].is_some() && (call.ends[1].is_some() || !call.is_accepted);
        check!(self, self.calls.iter().all(is_over), "a stream has not ended on both sides");
    }
}
