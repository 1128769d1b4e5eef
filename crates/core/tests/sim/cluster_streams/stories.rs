//! Two or three instances, and a network that does what a story says.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use bytes::Bytes;
use outlast_core::cluster::streams::{Action, End, Event, Instance, Limits, SILENT_AFTER, Stream, Streams};

use crate::{birth, ms};

const A: Instance = 0xa;
const B: Instance = 0xb;

const LIMITS: Limits = Limits { packet_max: 1_000, message_max: 5_000, window: 2_000, unacked_max: 4_000 };

/// What a driver was told of streams.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Told {
    Accepted(Stream, Bytes),
    Delivered(Stream, Bytes),
    Room(Stream),
    /// With the number of unsent messages.
    Ended(Stream, End, bool, usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Post {
    Packet(Bytes),
    Probe(Bytes),
}

struct Side {
    own: Instance,
    machine: Streams,
    told: Vec<Told>,
    /// What was sent and has not arrived.
    out: VecDeque<Post>,
    is_alive: bool,
}

struct Story {
    now: Instant,
    sides: [Side; 2],
}

impl Side {
    fn new(own: Instance) -> Side {
        Side { own, machine: Streams::new(own, own, LIMITS), told: Vec::new(), out: VecDeque::new(), is_alive: true }
    }

    fn handle(&mut self, event: Event, now: Instant) {
        let mut actions = Vec::new();
        self.machine.handle(event, now, &mut actions);
        self.carry_out(actions);
    }

    fn flush(&mut self, now: Instant) {
        let mut actions = Vec::new();
        self.machine.flush(now, &mut actions);
        self.carry_out(actions);
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Publish { packet, .. } => self.out.push_back(Post::Packet(packet)),
                Action::Probe { packet, .. } => self.out.push_back(Post::Probe(packet)),
                Action::Accept { stream, hello, .. } => self.told.push(Told::Accepted(stream, hello)),
                Action::Deliver { stream, message } => self.told.push(Told::Delivered(stream, message)),
                Action::Room { stream } => self.told.push(Told::Room(stream)),
                Action::End { stream, how, is_opened, unsent } => {
                    self.told.push(Told::Ended(stream, how, is_opened, unsent.len()));
                }
            }
        }
    }

    fn open(&mut self, to: Instance, hello: &'static str, now: Instant) -> Stream {
        let stream = self.machine.next_stream();
        self.handle(Event::Opened { stream, to, hello: hello.into() }, now);
        stream
    }

    fn send(&mut self, stream: Stream, message: impl Into<Bytes>, now: Instant) {
        self.handle(Event::Sent { stream, message: message.into() }, now);
    }
}

impl Story {
    fn new() -> Story {
        let now = birth();
        let mut sides = [Side::new(A), Side::new(B)];
        sides.iter_mut().for_each(|side| side.handle(Event::Connected, now));
        Story { now, sides }
    }

    /// Two instances with a stream from the first to the second. Returns the handles on both sides.
    fn opened() -> (Story, Stream, Stream) {
        let mut story = Story::new();
        let stream = story.sides[0].open(B, "hello", story.now);
        story.settle();
        let [Told::Accepted(accepted, hello)] = &story.take(1)[..] else { panic!("not accepted") };
        assert_eq!(hello, "hello");
        (story, stream, *accepted)
    }

    fn take(&mut self, side: usize) -> Vec<Told> {
        std::mem::take(&mut self.sides[side].told)
    }

    fn flush(&mut self) {
        self.sides.iter_mut().for_each(|side| side.flush(self.now));
    }

    /// One packet or probe arrives at the other side.
    fn arrive(&mut self, from: usize) -> bool {
        let Some(post) = self.sides[from].out.pop_front() else { return false };
        let (now, own) = (self.now, self.sides[from].own);
        let [first, second] = &mut self.sides;
        let (sender, receiver) = if from == 0 { (first, second) } else { (second, first) };
        match post {
            Post::Probe(_) if !receiver.is_alive => {
                sender.handle(Event::ProbeFailed { of: receiver.own, is_dead: true }, now);
            }
            _ if !receiver.is_alive => {}
            Post::Packet(packet) => receiver.handle(Event::Received { from: own, packet }, now),
            Post::Probe(packet) => {
                let answer = receiver.machine.probed(own, &packet, now);
                sender.handle(Event::ProbeAnswered { of: receiver.own, packet: answer }, now);
            }
        }
        true
    }

    /// Until nothing is on its way.
    fn settle(&mut self) {
        self.flush();
        while self.arrive(0) || self.arrive(1) {
            self.flush();
        }
    }

    /// Time passes, with all deadlines and without loss.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        self.settle();
        while let Some(at) = self.sides.iter().filter_map(|side| side.machine.deadline()).min()
            && at <= until
        {
            self.now = at.max(self.now);
            let now = self.now;
            self.sides.iter_mut().for_each(|side| side.handle(Event::TimePassed, now));
            self.settle();
        }
        self.now = until;
    }

    /// Time passes for the first side only, and everything that it sends is lost.
    fn pass_alone(&mut self, time: Duration) {
        let until = self.now + time;
        loop {
            let side = &mut self.sides[0];
            side.handle(Event::TimePassed, self.now);
            side.flush(self.now);
            if side.out.iter().any(|post| matches!(post, Post::Probe(_))) {
                side.handle(Event::ProbeFailed { of: B, is_dead: false }, self.now);
            }
            side.out.clear();
            match side.machine.deadline() {
                Some(at) if at <= until => self.now = at.max(self.now + ms(1)),
                _ => break,
            }
        }
        self.now = until;
    }
}

fn lost(stream: Stream, why: &str, is_opened: bool, unsent: usize) -> Told {
    Told::Ended(stream, End::Lost(why.into()), is_opened, unsent)
}

fn bytes(len: usize, fill: u8) -> Bytes {
    vec![fill; len].into()
}

#[test]
fn the_first_contact_is_a_probe_and_a_turn_is_one_packet() {
    let mut story = Story::new();
    let now = story.now;
    let first = story.sides[0].open(B, "first", now);
    let second = story.sides[0].open(B, "second", now);
    story.sides[0].send(first, "one", now);
    story.sides[0].send(second, "", now);
    story.sides[0].send(first, "two", now);
    story.flush();
    assert!(matches!(story.sides[0].out.make_contiguous(), [Post::Probe(_)]));

    story.arrive(0);
    story.flush();
    assert!(matches!(story.sides[0].out.make_contiguous(), [Post::Packet(_)]), "all frames are in one packet");
    story.settle();
    let told = story.take(1);
    let [Told::Accepted(one, _), Told::Accepted(two, _), ..] = told[..] else { panic!("{told:?}") };
    let expected = [
        Told::Accepted(one, "first".into()),
        Told::Accepted(two, "second".into()),
        Told::Delivered(one, "one".into()),
        Told::Delivered(two, "".into()),
        Told::Delivered(one, "two".into()),
    ];
    assert_eq!(told, expected);

    // The answer carries the acknowledgement.
    story.sides[1].send(one, "answer", now);
    story.settle();
    assert_eq!(story.take(0), [Told::Delivered(first, "answer".into())]);
    assert_eq!(story.sides[0].machine.counts().peers[0].unacked, 0);
    // Without an answer it comes after 20 ms.
    assert!(story.sides[1].machine.counts().peers[0].unacked > 0);
    story.pass(ms(20));
    assert_eq!(story.sides[1].machine.counts().peers[0].unacked, 0);
}

#[test]
fn nothing_is_taken_by_an_instance_that_is_dead_at_the_first_contact() {
    let mut story = Story::new();
    story.sides[1].is_alive = false;
    let stream = story.sides[0].open(B, "hello", story.now);
    story.sides[0].send(stream, "call", story.now);
    story.settle();
    assert_eq!(story.take(0), [lost(stream, "the replica has ended", false, 1)]);
    assert_eq!(story.sides[0].machine.deadline(), None);
}

#[test]
fn nothing_is_taken_by_an_instance_that_died_while_no_stream_was_open() {
    let (mut story, stream, _) = Story::opened();
    story.sides[0].handle(Event::Closed { stream }, story.now);
    story.pass(ms(4_000));
    story.sides[1].is_alive = false;
    let stream = story.sides[0].open(B, "hello", story.now);
    story.settle();
    assert_eq!(story.take(0), [lost(stream, "the replica has ended", false, 0)]);
}

#[test]
fn a_dead_instance_is_noticed_and_what_was_published_counts_as_taken() {
    let (mut story, stream, _) = Story::opened();
    story.sides[1].is_alive = false;
    story.sides[0].send(stream, "call", story.now);
    story.flush();
    story.sides[0].handle(Event::Disconnected, story.now);
    story.sides[0].send(stream, "another", story.now);
    story.sides[0].handle(Event::Connected, story.now);
    story.pass(ms(160));
    assert_eq!(story.take(0), [lost(stream, "the replica has ended", true, 1)]);
}

#[test]
fn a_missing_packet_is_reported_and_sent_again_with_all_after_it() {
    let (mut story, stream, accepted) = Story::opened();
    for message in ["one", "two", "three"] {
        story.sides[0].send(stream, message, story.now);
        story.flush();
    }
    story.sides[0].out.pop_front();
    story.settle();
    let messages = ["one", "two", "three"].map(|message| Told::Delivered(accepted, message.into()));
    assert_eq!(story.take(1), messages);
    assert_eq!(story.sides[0].machine.counts().resent, 3);
    assert_eq!(story.sides[1].machine.counts().out_of_order, 2);

    // The last one is missing: after 250 ms without progress the peer is asked what it has.
    story.sides[0].send(stream, "four", story.now);
    story.flush();
    story.sides[0].out.clear();
    story.pass(ms(249));
    story.pass(ms(1));
    assert_eq!(story.take(1), [Told::Delivered(accepted, "four".into())]);
}

#[test]
fn a_packet_that_arrives_twice_is_delivered_once() {
    let (mut story, stream, accepted) = Story::opened();
    story.sides[0].send(stream, "one", story.now);
    story.flush();
    let packet = story.sides[0].out[0].clone();
    story.sides[0].out.push_back(packet);
    story.settle();
    assert_eq!(story.take(1), [Told::Delivered(accepted, "one".into())]);
    assert_eq!(story.sides[1].machine.counts().duplicates, 1);
}

#[test]
fn a_slow_consumer_stops_the_sender_until_it_consumes() {
    let (mut story, stream, accepted) = Story::opened();
    for fill in 0..10 {
        story.sides[0].send(stream, bytes(900, fill), story.now);
    }
    assert!(story.sides[0].machine.is_full(stream));
    story.settle();
    // The third one begins below the window of 2,000 bytes and exceeds it.
    let delivered = |fills: std::ops::Range<u8>| -> Vec<Told> {
        fills.map(|fill| Told::Delivered(accepted, bytes(900, fill))).collect()
    };
    assert_eq!(story.take(1), delivered(0..3));
    assert_eq!(story.take(0), []);
    story.pass(ms(5_000));
    assert_eq!(story.take(1), [], "a consumer may take its time");

    for done in 3..10 {
        story.sides[1].handle(Event::Consumed { stream: accepted, bytes: 900 }, story.now);
        story.settle();
        assert_eq!(story.take(1), delivered(done..done + 1));
    }
    assert_eq!(story.take(0), [Told::Room(stream)]);
    assert!(!story.sides[0].machine.is_full(stream));
}

#[test]
fn a_long_hello_fills_its_stream() {
    let mut story = Story::new();
    let stream = story.sides[0].machine.next_stream();
    story.sides[0].handle(Event::Opened { stream, to: B, hello: bytes(5_000, 1) }, story.now);
    assert!(story.sides[0].machine.is_full(stream));
    story.sides[0].send(stream, bytes(5_000, 2), story.now);
    story.settle();
    assert_eq!(story.take(0), [Told::Room(stream)]);
    assert!(matches!(story.take(1)[..], [Told::Accepted(..), Told::Delivered(..)]));
}

#[test]
fn a_stream_whose_queue_is_too_long_ends() {
    let (mut story, stream, accepted) = Story::opened();
    let mut sent = 0;
    while story.sides[0].told.is_empty() {
        story.sides[0].send(stream, bytes(900, 0), story.now);
        story.flush();
        sent += 1;
    }
    let why = "more than 18000 bytes wait to be sent";
    assert_eq!(story.take(0), [lost(stream, why, true, sent - 3)]);
    story.settle();
    assert_eq!(story.take(1)[3..], [Told::Ended(accepted, End::Aborted(why.into()), true, 0)]);
}

#[test]
fn a_long_message_is_split_and_other_streams_are_not_blocked() {
    let (mut story, stream, accepted) = Story::opened();
    let other = story.sides[0].open(B, "other", story.now);
    story.settle();
    let [Told::Accepted(accepted_other, _)] = story.take(1)[..] else { panic!("not accepted") };
    story.sides[0].send(stream, bytes(5_000, 1), story.now);
    story.sides[0].send(other, "short", story.now);
    story.settle();
    let expected = [Told::Delivered(accepted_other, "short".into()), Told::Delivered(accepted, bytes(5_000, 1))];
    assert_eq!(story.take(1), expected);
}

#[test]
fn a_message_above_the_limit_ends_its_stream_on_both_sides() {
    let (mut story, stream, accepted) = Story::opened();
    story.sides[0].send(stream, bytes(5_001, 1), story.now);
    let why = "a message of 5001 bytes is longer than the limit of 5000 bytes";
    assert_eq!(story.take(0), [lost(stream, why, true, 1)]);
    story.settle();
    assert_eq!(story.take(1), [Told::Ended(accepted, End::Aborted(why.into()), true, 0)]);
}

#[test]
fn a_message_above_the_limit_of_the_receiver_ends_its_stream_on_both_sides() {
    let mut story = Story::new();
    story.sides[1].machine = Streams::new(B, 1, Limits { message_max: 1_500, ..LIMITS });
    story.sides[1].handle(Event::Connected, story.now);
    let stream = story.sides[0].open(B, "hello", story.now);
    story.settle();
    let [Told::Accepted(accepted, _)] = story.take(1)[..] else { panic!("not accepted") };
    story.sides[0].send(stream, bytes(5_000, 1), story.now);
    story.settle();
    let why = "a message of 5000 bytes is longer than the limit of 1500 bytes";
    assert_eq!(story.take(1), [lost(accepted, why, true, 0)]);
    assert_eq!(story.take(0), [Told::Ended(stream, End::Aborted(why.into()), true, 0)]);
    let counts = story.sides[1].machine.counts();
    assert_eq!((counts.peers[0].streams, counts.unreadable), (0, 0));
}

#[test]
fn a_stream_closes_after_all_that_was_sent() {
    let (mut story, stream, accepted) = Story::opened();
    story.sides[0].send(stream, bytes(3_000, 1), story.now);
    story.sides[0].send(stream, "last", story.now);
    story.sides[0].handle(Event::Closed { stream }, story.now);
    story.sides[0].send(stream, "late", story.now);
    story.settle();
    assert_eq!(story.take(1), [Told::Delivered(accepted, bytes(3_000, 1))], "the rest waits for the consumer");

    // What the other side sends to a closed stream is dropped.
    story.sides[1].send(accepted, "unheard", story.now);
    story.settle();
    assert_eq!(story.take(0), []);
    assert_eq!(story.sides[0].machine.counts().late_messages, 2);

    story.sides[1].handle(Event::Consumed { stream: accepted, bytes: 3_000 }, story.now);
    story.settle();
    let end = Told::Ended(accepted, End::Closed, true, 0);
    assert_eq!(story.take(1), [Told::Delivered(accepted, "last".into()), end]);
    story.pass(ms(100));
    let is_idle = |side: &Side| side.machine.counts().peers.iter().all(|peer| (peer.streams, peer.unacked) == (0, 0));
    assert!(story.sides.iter().all(is_idle));
    assert!(story.sides.iter().all(|side| side.machine.deadline().is_none()));
}

#[test]
fn two_ends_that_close_while_long_messages_arrive_do_not_wait_for_each_other() {
    let (mut story, stream, accepted) = Story::opened();
    for (side, stream) in [(0, stream), (1, accepted)] {
        story.sides[side].send(stream, bytes(5_000, 1), story.now);
        story.sides[side].send(stream, "last", story.now);
    }
    story.flush();
    story.arrive(0);
    story.arrive(1);
    for (side, stream) in [(0, stream), (1, accepted)] {
        story.sides[side].handle(Event::Closed { stream }, story.now);
    }
    story.pass(ms(100));
    assert_eq!((story.take(0), story.take(1)), (vec![], vec![]));
    let is_idle = |side: &Side| side.machine.counts().peers.iter().all(|peer| (peer.streams, peer.unacked) == (0, 0));
    assert!(story.sides.iter().all(is_idle));
}

#[test]
fn an_abort_drops_what_waits() {
    let (mut story, stream, accepted) = Story::opened();
    for _ in 0..4 {
        story.sides[0].send(stream, bytes(900, 1), story.now);
    }
    story.sides[0].handle(Event::Aborted { stream, why: "the client left".into() }, story.now);
    let unopened = story.sides[0].open(B, "never seen", story.now);
    story.sides[0].handle(Event::Aborted { stream: unopened, why: "the client left".into() }, story.now);
    story.settle();
    assert_eq!(story.take(1), [Told::Ended(accepted, End::Aborted("the client left".into()), true, 0)]);
    assert_eq!(story.take(0), []);
}

#[test]
fn nothing_is_published_without_a_connection_and_all_of_it_after() {
    let (mut story, stream, accepted) = Story::opened();
    story.sides[0].handle(Event::Disconnected, story.now);
    story.sides[0].send(stream, "one", story.now);
    story.pass_alone(ms(2_500));
    assert!(story.sides[0].out.is_empty());
    story.sides[0].handle(Event::Connected, story.now);
    story.settle();
    assert_eq!(story.take(1), [Told::Delivered(accepted, "one".into())]);
    assert_eq!(story.take(0), []);
}

#[test]
fn a_connection_that_is_down_for_three_seconds_loses_its_streams() {
    let (mut story, stream, _) = Story::opened();
    story.sides[0].handle(Event::Disconnected, story.now);
    story.sides[0].send(stream, "one", story.now);
    story.pass_alone(ms(2_999));
    assert_eq!(story.take(0), []);
    story.pass_alone(ms(1));
    assert_eq!(story.take(0), [lost(stream, "the replica does not answer", true, 1)]);
}

#[test]
fn a_silent_instance_is_given_up_and_learns_it_from_the_next_channel() {
    let (mut story, stream, accepted) = Story::opened();
    story.sides[0].send(stream, "one", story.now);
    story.flush();
    let late = story.sides[0].out[0].clone();
    story.pass_alone(SILENT_AFTER);
    assert_eq!(story.take(0), [lost(stream, "the replica does not answer", true, 0)]);

    // A stream of which nothing was published continues in the next channel.
    story.sides[1].handle(Event::Disconnected, story.now);
    let waiting = story.sides[1].open(A, "wait", story.now);
    story.sides[1].send(waiting, "for it", story.now);
    story.sides[1].handle(Event::Connected, story.now);
    story.settle();
    let ends = story.take(1);
    assert_eq!(ends, [lost(accepted, "the replica has given the connection up", true, 0)]);
    let told = story.take(0);
    let [Told::Accepted(other, _), ..] = told[..] else { panic!("{told:?}") };
    assert_eq!(told, [Told::Accepted(other, "wait".into()), Told::Delivered(other, "for it".into())]);

    // A packet of the earlier channel is dropped.
    story.sides[0].out.push_back(late);
    story.settle();
    assert_eq!(story.take(1), []);
    assert_eq!(story.sides[1].machine.counts().late_packets, 1);
}

#[test]
fn a_process_that_did_not_run_asks_before_it_gives_up() {
    let (mut story, stream, accepted) = Story::opened();
    story.now += ms(2_900);
    story.sides[0].handle(Event::TimePassed, story.now);
    story.now += ms(200);
    story.sides[0].handle(Event::TimePassed, story.now);
    assert_eq!(story.take(0), []);
    story.sides[0].send(stream, "still here", story.now);
    story.settle();
    assert_eq!(story.take(1), [Told::Delivered(accepted, "still here".into())]);
}

#[test]
fn an_instance_that_left_loses_its_streams() {
    let (mut story, stream, _) = Story::opened();
    story.sides[0].handle(Event::Left { instance: B }, story.now);
    assert_eq!(story.take(0), [lost(stream, "the replica has left the cluster", true, 0)]);
    story.sides[0].send(stream, "late", story.now);
    assert_eq!(story.sides[0].machine.counts().late_messages, 1);
}

#[test]
fn a_stream_to_the_own_instance_needs_no_packets() {
    let mut story = Story::new();
    story.sides[0].handle(Event::Disconnected, story.now);
    let stream = story.sides[0].open(A, "hello", story.now);
    for fill in 0..6 {
        story.sides[0].send(stream, bytes(900, fill), story.now);
    }
    let told = story.take(0);
    let Told::Accepted(accepted, _) = told[0] else { panic!("{told:?}") };
    assert_eq!(told.len(), 1 + 3, "the window holds here too: {told:?}");
    assert!(story.sides[0].machine.is_full(stream));

    story.sides[0].send(accepted, "answer", story.now);
    assert_eq!(story.take(0), [Told::Delivered(stream, "answer".into())]);
    story.sides[0].handle(Event::Closed { stream }, story.now);
    for fill in 3..6 {
        story.sides[0].handle(Event::Consumed { stream: accepted, bytes: 900 }, story.now);
        let mut expected = vec![Told::Delivered(accepted, bytes(900, fill))];
        expected.extend((fill == 5).then_some(Told::Ended(accepted, End::Closed, true, 0)));
        assert_eq!(story.take(0), expected);
    }

    let stream = story.sides[0].open(A, "hello", story.now);
    story.sides[0].handle(Event::Aborted { stream, why: "enough".into() }, story.now);
    let told = story.take(0);
    assert!(matches!(&told[1], Told::Ended(_, End::Aborted(why), true, 0) if why == "enough"), "{told:?}");
    assert_eq!(story.sides[0].machine.deadline(), None);
    assert!(story.sides[0].out.is_empty());
}

#[test]
fn packets_are_no_longer_than_the_server_takes() {
    let (mut story, stream, accepted) = Story::opened();
    let now = story.now;
    let longest = |side: &Side| {
        let lens = side.out.iter().map(|post| match post {
            Post::Packet(packet) | Post::Probe(packet) => packet.len(),
        });
        lens.max().unwrap_or(0)
    };
    // A server with a smaller limit, while nothing is on its way: the stream continues with smaller packets.
    for side in &mut story.sides {
        side.handle(Event::Disconnected, now);
        let mut actions = Vec::new();
        side.machine.set_packet_max(300, &mut actions);
        side.carry_out(actions);
        side.handle(Event::Connected, now);
    }
    story.sides[0].send(stream, bytes(2_000, 1), now);
    story.settle();
    assert_eq!(story.take(1), [Told::Delivered(accepted, bytes(2_000, 1))]);
    story.sides[1].handle(Event::Consumed { stream: accepted, bytes: 2_000 }, now);
    story.settle();
    story.take(0);

    // A larger one, whose packets are on their way when the smaller one is back: they cannot be sent again.
    let mut actions = Vec::new();
    story.sides[0].machine.set_packet_max(1_000, &mut actions);
    assert!(actions.is_empty());
    story.sides[0].send(stream, bytes(900, 2), now);
    story.flush();
    assert!(longest(&story.sides[0]) > 900);
    story.sides[0].handle(Event::Disconnected, now);
    story.sides[0].out.clear();
    story.sides[0].machine.set_packet_max(300, &mut actions);
    story.sides[0].carry_out(actions);
    let why = "the NATS server takes only shorter packets than those on their way to the replica";
    assert_eq!(story.take(0), [lost(stream, why, true, 0)]);
    // The next stream is on a new channel.
    story.sides[0].handle(Event::Connected, now);
    story.sides[0].open(B, "next", now);
    story.settle();
    let told = story.take(1);
    assert!(
        matches!(&told[..], [Told::Ended(old, ..), Told::Accepted(_, hello)] if *old == accepted && hello == "next")
    );
}
