//! Reliable, ordered streams of messages between the instances of a cluster, over a network that may delay, drop, duplicate
//! and reorder packets. It does not know what a message means, and carries no packet itself.
//!
//! Between two instances there is one *channel*. Each side has a number for it, which grows from channel to channel; a
//! packet carries both, so packets of an earlier channel are recognised and dropped. Nothing is published on a channel
//! before the peer has answered a probe with both numbers. Packets with frames are numbered; a side that misses a number
//! reports it, and the other side sends all packets from there on again, byte by byte the same.
//!
//! A side gives a channel up when the peer has ended or is silent for [`SILENT_AFTER`]; its next channel has another number,
//! from which the peer learns that the streams of the earlier one have ended. So a message is delivered at most once, and a
//! message of which no byte was published is known to be unsent.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use rustc_hash::FxHashMap;

use crate::{cut, restarts::SplitMix};

mod channel;
mod events;
mod incoming;
mod outgoing;
mod packet;

use channel::{Channel, HeaderMeaning, Order};
pub use events::{Action, Counts, End, Event, Limits, PeerCounts};
use incoming::{Incoming, Joined, Refusal};
use outgoing::{Outgoing, Wrote};
use packet::{FRAME_HEAD_MAX, Frame, Frames, HEADER_LEN, Header, Wire};

/// A process of a replica: a random number, chosen at the start of the process.
pub type Instance = u64;
/// The handle of a stream on this side. It is never used twice in a process.
pub type Stream = u64;

/// A peer with open streams from which nothing was received for so long is probed; so often, until it answers.
pub const PROBE_EVERY: Duration = Duration::from_millis(150);
/// How long the answer to a probe is waited for. Then the next one is sent.
pub const PROBE_MAX: Duration = Duration::from_millis(200);
/// A peer with open streams from which nothing was received for so long is given up.
pub const SILENT_AFTER: Duration = Duration::from_secs(3);

/// Streams to one peer that one side may open. One more is lost at once.
pub const STREAMS_MAX: usize = 1 << 17;
/// Instances that are known. With one more, the idle one that was silent longest is forgotten; if none is idle, the new one
/// is refused.
pub const PEERS_MAX: usize = 1024;
/// The smallest packet: a header, and one frame that makes progress.
pub const PACKET_MIN: usize = 256;
/// A longer reason of an abort is cut.
const WHY_MAX: usize = 1024;
/// So many streams that have ended may be left in a queue, besides one for each that has not.
const ENDED_READY_MAX: usize = 64;
/// Packets are cut from buffers of this size.
const BUFFER: usize = 64 << 10;
/// The peer is told of what was consumed when it is this part of a window.
const CREDIT_PART: usize = 4;

const ENDED: &str = "the replica has ended";
const SILENT: &str = "the replica does not answer";
const LEFT: &str = "the replica has left the cluster";
const RENEWED: &str = "the replica has given the connection up";
const TOO_MANY_STREAMS: &str = "too many streams are open to the replica";
const TOO_MANY_PEERS: &str = "too many replicas are connected";
const LONG: &str = "the NATS server takes only shorter packets than those on their way to the replica";
const BROKEN: &str = "the replica sent a packet that cannot be read";

/// The streams of one instance.
#[derive(Debug)]
pub struct Streams {
    own: Instance,
    limits: Limits,
    random: SplitMix,
    next_stream: Stream,
    /// The number of the channel that was begun last.
    last_channel: u64,
    is_connected: bool,
    peers: BTreeMap<Instance, Peer>,
    streams: FxHashMap<Stream, Entry>,
    /// Actions that follow from probes, until the next call that can return them.
    pending: Vec<Action>,
    buffer: BytesMut,
    /// Without the peers.
    counts: Counts,
}

/// Another instance.
#[derive(Debug)]
struct Peer {
    channel: Channel,
    /// How many streams there are, of both sides.
    streams: usize,
    /// The streams that the peer opened, by its handles.
    accepted: FxHashMap<u64, Stream>,
    /// Streams that have frames to send. Names at most as many that have ended, and [`ENDED_READY_MAX`].
    ready: VecDeque<Stream>,
}

impl Peer {
    fn new(channel: Channel) -> Peer {
        Peer { channel, streams: 0, accepted: FxHashMap::default(), ready: VecDeque::new() }
    }

    fn is_active(&self) -> bool {
        self.streams > 0 || self.channel.unacked() > 0
    }

    fn deadline(&self, is_connected: bool) -> Option<Instant> {
        self.channel.deadline(self.is_active(), is_connected)
    }
}

/// One stream.
#[derive(Debug)]
struct Entry {
    route: Route,
    out: Outgoing,
    incoming: Incoming,
    /// The driver knows it, and has not ended it.
    is_known: bool,
    /// It is in the ready queue of its peer.
    is_ready: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    Peer {
        instance: Instance,
        wire: Wire,
    },
    /// The other end is a stream of this instance too.
    Local {
        other: Stream,
    },
}

impl Entry {
    fn new(route: Route, out: Outgoing) -> Entry {
        let is_known = out.is_opening();
        Entry { route, out, incoming: Incoming::default(), is_known, is_ready: false }
    }

    /// Writes what is to be sent of it, one message at most.
    fn write(&mut self, packet: &mut BytesMut, limits: &Limits) -> Wrote {
        let Route::Peer { wire, .. } = self.route else { return Wrote::All };
        if self.out.is_opened() && self.incoming.freed() >= limits.window.div_ceil(CREDIT_PART) {
            if packet.len() + FRAME_HEAD_MAX > limits.packet_max {
                return Wrote::NoRoom;
            }
            Frame::Credit { wire, amount: self.incoming.take_freed() as u64 }.write(packet);
        }
        self.out.write(wire, packet, limits)
    }
}

/// The peer broke the rules of the format.
struct Broken;

impl Streams {
    /// The seed is for the numbers of channels; to be taken from random numbers of the operating system.
    pub fn new(own: Instance, seed: u64, limits: Limits) -> Streams {
        let mut random = SplitMix(seed);
        let last_channel = random.next() >> 1;
        Streams {
            own,
            limits: Limits { packet_max: limits.packet_max.max(PACKET_MIN), ..limits },
            random,
            next_stream: 1,
            last_channel,
            is_connected: false,
            peers: BTreeMap::new(),
            streams: FxHashMap::default(),
            pending: Vec::new(),
            buffer: BytesMut::new(),
            counts: Counts::default(),
        }
    }

    /// The longest packet that the message server takes. To be told before [`Event::Connected`]. Packets are sent again as
    /// they were, so a peer that has not acknowledged longer ones is given up.
    pub fn set_packet_max(&mut self, packet_max: usize, actions: &mut Vec<Action>) {
        self.limits.packet_max = packet_max.max(PACKET_MIN);
        let is_stuck = |peer: &Peer| peer.channel.longest_unacked() > self.limits.packet_max;
        let stuck: Vec<Instance> =
            self.peers.iter().filter(|(_, peer)| is_stuck(peer)).map(|(instance, _)| *instance).collect();
        for instance in stuck {
            self.give_up(instance, LONG, actions);
        }
    }

    /// A handle that was not given before.
    pub fn next_stream(&mut self) -> Stream {
        self.next_stream += 1;
        self.next_stream - 1
    }

    /// The sender of a packet or probe, for [`Event::Received`] and [`Streams::probed`].
    pub fn sender(packet: &[u8]) -> Option<Instance> {
        Header::read(packet).map(|header| header.from)
    }

    pub fn handle(&mut self, event: Event, now: Instant, actions: &mut Vec<Action>) {
        actions.append(&mut self.pending);
        match event {
            Event::Connected => {
                self.is_connected = true;
                self.peers.values_mut().for_each(|peer| peer.channel.connected());
            }
            Event::Disconnected => {
                self.is_connected = false;
                self.peers.values_mut().for_each(|peer| peer.channel.disconnected());
            }
            Event::Opened { stream, to, hello } if to == self.own => self.open_local(stream, hello, actions),
            Event::Opened { stream, to, hello } => self.open(stream, to, hello, now, actions),
            Event::Sent { stream, message } => self.send(stream, message, actions),
            Event::Consumed { stream, bytes } => self.consumed(stream, bytes, actions),
            Event::Closed { stream } => self.close(stream, actions),
            Event::Aborted { stream, why } => self.abort(stream, why, actions),
            Event::Received { from, packet } => self.received(from, &packet, now, actions),
            Event::ProbeAnswered { of, packet } => {
                if let Some(peer) = self.peers.get_mut(&of) {
                    peer.channel.probe_ended();
                    self.received(of, &packet, now, actions);
                }
            }
            Event::ProbeFailed { of, is_dead: true } => self.give_up(of, ENDED, actions),
            Event::ProbeFailed { of, is_dead: false } => {
                if let Some(peer) = self.peers.get_mut(&of) {
                    peer.channel.probe_ended();
                }
            }
            Event::Left { instance } => self.give_up(instance, LEFT, actions),
            Event::TimePassed => self.time_passed(now, actions),
        }
    }

    fn time_passed(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.peers.values_mut().for_each(|peer| peer.channel.time_passed(now));
        let is_silent = |peer: &Peer| {
            let at = peer.channel.silent_at(peer.is_active(), self.is_connected);
            at.is_some_and(|at| at <= now)
        };
        let silent: Vec<Instance> =
            self.peers.iter().filter(|(_, peer)| is_silent(peer)).map(|(instance, _)| *instance).collect();
        for instance in silent {
            self.give_up(instance, SILENT, actions);
        }
    }

    /// Packs what waits into as few packets as possible. To be called once after the events of a turn of the loop; without
    /// it nothing is sent.
    pub fn flush(&mut self, now: Instant, actions: &mut Vec<Action>) {
        actions.append(&mut self.pending);
        if !self.is_connected {
            return;
        }
        for (&to, peer) in &mut self.peers {
            let is_active = peer.is_active();
            if peer.channel.takes_probe(is_active, now) {
                let packet = bare(&mut peer.channel, false, self.own, to);
                actions.push(Action::Probe { to, packet, within: PROBE_MAX });
            }
            for packet in peer.channel.resend(now) {
                self.counts.resent += 1;
                actions.push(Action::Publish { to, packet });
            }
            while !peer.ready.is_empty()
                && peer.channel.has_room(&self.limits)
                && let Some(packet) =
                    pack(peer, &mut self.streams, self.own, to, &self.limits, &mut self.buffer, actions)
            {
                peer.channel.published(packet.clone(), now);
                actions.push(Action::Publish { to, packet });
            }
            let asks = peer.channel.takes_ask(now);
            if asks || peer.channel.must_publish(now) {
                let packet = bare(&mut peer.channel, asks, self.own, to);
                actions.push(Action::Publish { to, packet });
            }
        }
    }

    /// The answer to a probe. Empty if the probe is not in the format. Actions that follow from it come with the next call
    /// of [`Streams::flush`].
    pub fn probed(&mut self, from: Instance, packet: &[u8], now: Instant) -> Bytes {
        let Some(header) = self.header(from, packet).filter(|_| packet.len() == HEADER_LEN) else {
            return Bytes::new();
        };
        let mut actions = std::mem::take(&mut self.pending);
        let seen = self.read(&header, now, &mut actions);
        self.pending = actions;
        let Some(peer) = self.peers.get_mut(&from) else { return Bytes::new() };
        if seen == HeaderMeaning::Current {
            peer.channel.reached(&header, now);
        }
        bare(&mut peer.channel, false, self.own, from)
    }

    /// Too much waits on this stream: the driver should send no more until [`Action::Room`].
    pub fn is_full(&self, stream: Stream) -> bool {
        self.streams.get(&stream).is_some_and(|entry| entry.out.is_full())
    }

    /// When [`Event::TimePassed`] and [`Streams::flush`] are wanted next.
    pub fn deadline(&self) -> Option<Instant> {
        self.peers.values().filter_map(|peer| peer.deadline(self.is_connected)).min()
    }

    pub fn counts(&self) -> Counts {
        let mut queued: BTreeMap<Instance, usize> = BTreeMap::new();
        for entry in self.streams.values() {
            if let Route::Peer { instance, .. } = entry.route {
                *queued.entry(instance).or_default() += entry.out.queued();
            }
        }
        let peers = self.peers.iter().map(|(instance, peer)| PeerCounts {
            instance: *instance,
            is_established: peer.channel.is_established(),
            streams: peer.streams,
            unacked: peer.channel.unacked(),
            queued: queued.get(instance).copied().unwrap_or(0),
            heard: peer.channel.heard_at(),
        });
        Counts { peers: peers.collect(), ..self.counts.clone() }
    }
}

/// A packet without frames.
fn bare(channel: &mut Channel, asks: bool, own: Instance, to: Instance) -> Bytes {
    let header = Header { asks, ..channel.header(own, to) };
    Bytes::copy_from_slice(&header.bytes())
}

/// The next packet with frames: of each stream one message after the other, in turns. None if no stream has any.
fn pack(
    peer: &mut Peer,
    streams: &mut FxHashMap<Stream, Entry>,
    own: Instance,
    to: Instance,
    limits: &Limits,
    buffer: &mut BytesMut,
    actions: &mut Vec<Action>,
) -> Option<Bytes> {
    if buffer.capacity() < HEADER_LEN + FRAME_HEAD_MAX {
        buffer.reserve(BUFFER);
    }
    buffer.resize(HEADER_LEN, 0);
    while let Some(stream) = peer.ready.pop_front() {
        let Some(entry) = streams.get_mut(&stream) else { continue };
        let wrote = entry.write(buffer, limits);
        if entry.out.takes_room(limits) && entry.is_known {
            actions.push(Action::Room { stream });
        }
        match wrote {
            Wrote::Some => peer.ready.push_back(stream),
            Wrote::All => entry.is_ready = false,
            Wrote::Last => forget(stream, streams, peer),
            Wrote::NoRoom => {
                peer.ready.push_front(stream);
                break;
            }
        }
    }
    if buffer.len() == HEADER_LEN {
        buffer.clear();
        return None;
    }
    buffer[..HEADER_LEN].copy_from_slice(&peer.channel.header(own, to).bytes());
    Some(buffer.split().freeze())
}

fn forget(stream: Stream, streams: &mut FxHashMap<Stream, Entry>, peer: &mut Peer) {
    let Some(entry) = streams.remove(&stream) else { return };
    peer.streams -= 1;
    if let Route::Peer { wire: Wire { id, is_opener: false }, .. } = entry.route {
        peer.accepted.remove(&id);
    }
    if peer.ready.len() > 2 * peer.streams + ENDED_READY_MAX {
        peer.ready.retain(|stream| streams.contains_key(stream));
    }
}

/// What the driver does with streams.
impl Streams {
    fn open(&mut self, stream: Stream, to: Instance, hello: Bytes, now: Instant, actions: &mut Vec<Action>) {
        if let Some(why) = self.refusal(to, hello.len()) {
            actions.push(Action::End { stream, how: End::Lost(why), is_opened: false, unsent: Vec::new() });
            return;
        }
        if !self.peers.contains_key(&to) {
            let channel = self.new_channel(None, now);
            self.peers.insert(to, Peer::new(channel));
        }
        let wire = Wire { id: stream, is_opener: true };
        let entry = Entry::new(Route::Peer { instance: to, wire }, Outgoing::opening(hello, &self.limits));
        self.insert(stream, to, entry, now);
        self.mark_ready(stream);
    }

    /// Why a stream cannot be opened.
    fn refusal(&mut self, to: Instance, hello_len: usize) -> Option<String> {
        if hello_len > self.limits.message_max {
            return Some(outgoing::too_long(hello_len as u64, &self.limits));
        }
        match self.peers.get(&to).map(|peer| peer.streams - peer.accepted.len()) {
            Some(opened) => (opened >= STREAMS_MAX).then(|| TOO_MANY_STREAMS.to_owned()),
            None => (!self.has_room_for_peer()).then(|| TOO_MANY_PEERS.to_owned()),
        }
    }

    /// Adds a stream of a peer that exists.
    fn insert(&mut self, stream: Stream, instance: Instance, entry: Entry, now: Instant) {
        let Some(peer) = self.peers.get_mut(&instance) else { return };
        if !peer.is_active() {
            peer.channel.activate(self.is_connected, now);
        }
        peer.streams += 1;
        let earlier = self.streams.insert(stream, entry);
        debug_assert!(earlier.is_none(), "the handle {stream} is used twice");
    }

    fn mark_ready(&mut self, stream: Stream) {
        let Some(entry) = self.streams.get_mut(&stream) else { return };
        if let Route::Peer { instance, .. } = entry.route
            && !entry.is_ready
            && let Some(peer) = self.peers.get_mut(&instance)
        {
            entry.is_ready = true;
            peer.ready.push_back(stream);
        }
    }

    fn send(&mut self, stream: Stream, message: Bytes, actions: &mut Vec<Action>) {
        let Some(entry) = self.streams.get_mut(&stream).filter(|entry| entry.is_known) else {
            self.counts.late_messages += 1;
            return;
        };
        let pushed = entry.out.push(message, &self.limits);
        match (pushed, entry.route) {
            (Err(why), _) => self.fail(stream, why, actions),
            (Ok(()), Route::Peer { .. }) => self.mark_ready(stream),
            (Ok(()), Route::Local { .. }) => self.pump(stream, actions),
        }
    }

    /// A limit is exceeded: the stream ends on both sides.
    fn fail(&mut self, stream: Stream, why: String, actions: &mut Vec<Action>) {
        let Some(entry) = self.streams.get_mut(&stream) else { return };
        if entry.is_known {
            actions.push(end_of(stream, entry, End::Lost(why.clone())));
        }
        self.abort(stream, why, actions);
    }

    fn consumed(&mut self, stream: Stream, bytes: usize, actions: &mut Vec<Action>) {
        let Some(entry) = self.streams.get_mut(&stream).filter(|entry| entry.is_known) else { return };
        entry.incoming.consume(bytes);
        match entry.route {
            Route::Peer { .. } if entry.incoming.freed() >= self.limits.window.div_ceil(CREDIT_PART) => {
                self.mark_ready(stream);
            }
            Route::Peer { .. } => {}
            Route::Local { other } => {
                let freed = entry.incoming.take_freed();
                if let Some(sender) = self.streams.get_mut(&other) {
                    sender.out.consumed(freed as u64);
                }
                self.pump(other, actions);
            }
        }
    }

    fn close(&mut self, stream: Stream, actions: &mut Vec<Action>) {
        let Some(entry) = self.streams.get_mut(&stream).filter(|entry| entry.is_known) else { return };
        entry.is_known = false;
        entry.incoming.release();
        entry.out.close();
        match entry.route {
            Route::Peer { .. } => self.mark_ready(stream),
            Route::Local { other } => {
                let freed = entry.incoming.take_freed();
                if let Some(sender) = self.streams.get_mut(&other) {
                    sender.out.consumed(freed as u64);
                }
                self.pump(other, actions);
                self.pump(stream, actions);
            }
        }
    }

    fn abort(&mut self, stream: Stream, why: String, actions: &mut Vec<Action>) {
        let Some(entry) = self.streams.get_mut(&stream) else { return };
        entry.is_known = false;
        match entry.route {
            Route::Peer { instance, .. } if !entry.out.is_opened() => {
                if let Some(peer) = self.peers.get_mut(&instance) {
                    forget(stream, &mut self.streams, peer);
                }
            }
            Route::Peer { .. } => {
                entry.incoming.release();
                entry.out.abort(cut::head(&why, WHY_MAX.min(self.limits.packet_max / 4)).to_owned());
                self.mark_ready(stream);
            }
            Route::Local { other } => {
                self.streams.remove(&stream);
                self.end_local(other, End::Aborted(why), actions);
            }
        }
    }

    fn open_local(&mut self, stream: Stream, hello: Bytes, actions: &mut Vec<Action>) {
        if hello.len() > self.limits.message_max {
            let how = End::Lost(outgoing::too_long(hello.len() as u64, &self.limits));
            actions.push(Action::End { stream, how, is_opened: false, unsent: Vec::new() });
            return;
        }
        let other = self.next_stream();
        for (end, other) in [(stream, other), (other, stream)] {
            let entry = Entry { is_known: true, ..Entry::new(Route::Local { other }, Outgoing::accepted()) };
            self.streams.insert(end, entry);
        }
        actions.push(Action::Accept { stream: other, from: self.own, hello });
    }

    /// Delivers what waits on a stream whose other end is here too.
    fn pump(&mut self, stream: Stream, actions: &mut Vec<Action>) {
        while let Some(entry) = self.streams.get_mut(&stream)
            && let Route::Local { other } = entry.route
        {
            if entry.out.is_drained() {
                self.streams.remove(&stream);
                self.end_local(other, End::Closed, actions);
                return;
            }
            let Some(message) = entry.out.take(&self.limits) else { return };
            if entry.out.takes_room(&self.limits) && entry.is_known {
                actions.push(Action::Room { stream });
            }
            let receiver = self.streams.get_mut(&other).filter(|receiver| receiver.is_known);
            match receiver {
                Some(receiver) => {
                    receiver.incoming.deliver(message.len());
                    actions.push(Action::Deliver { stream: other, message });
                }
                None => {
                    self.counts.late_messages += 1;
                    if let Some(entry) = self.streams.get_mut(&stream) {
                        entry.out.consumed(outgoing::cost(message.len()) as u64);
                    }
                }
            }
        }
    }

    fn end_local(&mut self, stream: Stream, how: End, actions: &mut Vec<Action>) {
        if let Some(mut entry) = self.streams.remove(&stream)
            && entry.is_known
        {
            actions.push(end_of(stream, &mut entry, how));
        }
    }
}

fn end_of(stream: Stream, entry: &mut Entry, how: End) -> Action {
    let is_opened = entry.out.is_opened();
    Action::End { stream, how, is_opened, unsent: entry.out.unsent() }
}

/// What comes from peers.
impl Streams {
    /// The header, if the packet is for us.
    fn header(&mut self, from: Instance, packet: &[u8]) -> Option<Header> {
        let is_ours = |header: &Header| header.from == from && header.to == self.own && from != self.own;
        let header = Header::read(packet).filter(is_ours);
        self.counts.unreadable += u64::from(header.is_none());
        header
    }

    fn received(&mut self, from: Instance, packet: &Bytes, now: Instant, actions: &mut Vec<Action>) {
        let Some(header) = self.header(from, packet) else { return };
        let seen = self.read(&header, now, actions);
        let has_frames = packet.len() > HEADER_LEN;
        let Some(peer) = self.peers.get_mut(&from) else { return };
        match seen {
            HeaderMeaning::Current if has_frames => {
                match peer.channel.order(header.number, packet.len(), &self.limits, now) {
                    Order::Next => self.take(from, packet, now, actions),
                    Order::Duplicate => self.counts.duplicates += 1,
                    Order::Early => self.counts.out_of_order += 1,
                }
            }
            HeaderMeaning::Current => peer.channel.reached(&header, now),
            HeaderMeaning::Late | HeaderMeaning::Impossible => {}
            HeaderMeaning::Greeting | HeaderMeaning::Renewed => peer.channel.tell(),
        }
    }

    /// Reads a header, and does what follows for the channel.
    fn read(&mut self, header: &Header, now: Instant, actions: &mut Vec<Action>) -> HeaderMeaning {
        let Some(peer) = self.peers.get_mut(&header.from) else {
            if self.has_room_for_peer() {
                let channel = self.new_channel(Some(header.source), now);
                self.peers.insert(header.from, Peer::new(channel));
            }
            return HeaderMeaning::Greeting;
        };
        let seen = peer.channel.read(header, now);
        match seen {
            HeaderMeaning::Late => self.counts.late_packets += 1,
            HeaderMeaning::Impossible => self.counts.unreadable += 1,
            HeaderMeaning::Renewed => self.renew(header.from, header.source, now, actions),
            HeaderMeaning::Current | HeaderMeaning::Greeting => {}
        }
        seen
    }

    /// Applies the frames of a packet, in their order.
    fn take(&mut self, from: Instance, packet: &Bytes, now: Instant, actions: &mut Vec<Action>) {
        let mut frames = Frames::of(packet);
        loop {
            let applied = match frames.next() {
                Ok(Some(frame)) => self.apply(from, frame, packet, now, actions),
                Ok(None) => return,
                Err(_) => Err(Broken),
            };
            if applied.is_err() {
                self.counts.unreadable += 1;
                self.give_up(from, BROKEN, actions);
                return;
            }
        }
    }

    fn apply(
        &mut self,
        from: Instance,
        frame: Frame<'_>,
        packet: &Bytes,
        now: Instant,
        actions: &mut Vec<Action>,
    ) -> Result<(), Broken> {
        if let Frame::Open { wire, .. } = frame {
            let handle = self.next_stream();
            let Some(peer) = self.peers.get_mut(&from) else { return Ok(()) };
            if peer.accepted.len() >= STREAMS_MAX || peer.accepted.insert(wire.id, handle).is_some() {
                return Err(Broken);
            }
            let wire = Wire { is_opener: false, ..wire };
            self.insert(handle, from, Entry::new(Route::Peer { instance: from, wire }, Outgoing::accepted()), now);
        }
        let wire = frame.wire();
        let Some(stream) = self.stream_of(from, wire) else {
            self.counts.late_messages += u64::from(matches!(frame, Frame::Begin { .. }));
            return Ok(());
        };
        let Some(entry) = self.streams.get_mut(&stream) else { return Ok(()) };
        let joined = match frame {
            Frame::Open { total, part, .. } => entry.incoming.begin(total, part, true, packet, &self.limits),
            Frame::Begin { total, .. } if entry.out.is_ending() => {
                self.counts.late_messages += 1;
                entry.incoming.drop_message(total, &self.limits);
                self.mark_ready(stream);
                return Ok(());
            }
            Frame::Part { .. } if entry.out.is_ending() => return Ok(()),
            Frame::Begin { total, part, .. } => entry.incoming.begin(total, part, false, packet, &self.limits),
            Frame::Part { part, .. } => entry.incoming.part(part),
            Frame::Credit { amount, .. } => {
                if !entry.out.consumed(amount) {
                    return Err(Broken);
                }
                self.mark_ready(stream);
                return Ok(());
            }
            Frame::Close { .. } => {
                self.ended(stream, from, End::Closed, actions);
                return Ok(());
            }
            Frame::Abort { why, .. } => {
                self.ended(stream, from, End::Aborted(cut::head(why, WHY_MAX).to_owned()), actions);
                return Ok(());
            }
        };
        match joined {
            Ok(None) => {}
            Ok(Some(Joined::Hello(hello))) => {
                entry.is_known = true;
                actions.push(Action::Accept { stream, from, hello });
            }
            Ok(Some(Joined::Message(message))) => actions.push(Action::Deliver { stream, message }),
            Err(Refusal::Limit(why)) => self.fail(stream, why, actions),
            Err(Refusal::Broken) => return Err(Broken),
        }
        Ok(())
    }

    /// The stream that a frame names.
    fn stream_of(&self, from: Instance, wire: Wire) -> Option<Stream> {
        if wire.is_opener {
            return self.peers.get(&from)?.accepted.get(&wire.id).copied();
        }
        let ours = Route::Peer { instance: from, wire: Wire { id: wire.id, is_opener: true } };
        self.streams.get(&wire.id).filter(|entry| entry.route == ours).map(|_| wire.id)
    }

    /// The peer has ended a stream.
    fn ended(&mut self, stream: Stream, from: Instance, how: End, actions: &mut Vec<Action>) {
        if let Some(entry) = self.streams.get_mut(&stream)
            && entry.is_known
        {
            actions.push(end_of(stream, entry, how));
        }
        if let Some(peer) = self.peers.get_mut(&from) {
            forget(stream, &mut self.streams, peer);
        }
    }
}

/// The beginnings and ends of channels.
impl Streams {
    fn new_channel(&mut self, heard: Option<u64>, now: Instant) -> Channel {
        self.last_channel += 1 + (self.random.next() >> 40);
        Channel::new(self.last_channel, heard, now)
    }

    /// Whether one more instance can be known; forgets one that is idle if that is needed.
    fn has_room_for_peer(&mut self) -> bool {
        if self.peers.len() >= PEERS_MAX {
            let idle = self.peers.iter().filter(|(_, peer)| !peer.is_active());
            let Some((&oldest, _)) = idle.min_by_key(|(_, peer)| peer.channel.heard_at()) else { return false };
            self.peers.remove(&oldest);
        }
        true
    }

    /// Ends all streams of a peer, and forgets its channel.
    fn give_up(&mut self, instance: Instance, why: &str, actions: &mut Vec<Action>) {
        if self.peers.remove(&instance).is_some() {
            self.lose(instance, why, |_| true, actions);
        }
    }

    /// The peer began another channel. Streams of which it knows nothing continue in the new one.
    fn renew(&mut self, instance: Instance, source: u64, now: Instant, actions: &mut Vec<Action>) {
        self.lose(instance, RENEWED, |entry| entry.out.is_opened(), actions);
        let channel = self.new_channel(Some(source), now);
        let mut peer = Peer::new(channel);
        peer.ready = self.streams_of(instance).into();
        peer.streams = peer.ready.len();
        if peer.is_active() {
            peer.channel.activate(self.is_connected, now);
        }
        self.peers.insert(instance, peer);
    }

    fn lose(&mut self, instance: Instance, why: &str, is_lost: impl Fn(&Entry) -> bool, actions: &mut Vec<Action>) {
        for stream in self.streams_of(instance) {
            if self.streams.get(&stream).is_some_and(&is_lost)
                && let Some(mut entry) = self.streams.remove(&stream)
                && entry.is_known
            {
                actions.push(end_of(stream, &mut entry, End::Lost(why.to_owned())));
            }
        }
    }

    /// In the order of their handles.
    fn streams_of(&self, instance: Instance) -> Vec<Stream> {
        let is_of = |route: Route| matches!(route, Route::Peer { instance: of, .. } if of == instance);
        let mut streams: Vec<Stream> =
            self.streams.iter().filter(|(_, entry)| is_of(entry.route)).map(|(stream, _)| *stream).collect();
        streams.sort_unstable();
        streams
    }
}
