//! Packets that no honest peer sends: random bytes, and packets of real conversations with changed bytes. They never panic
//! and never make a machine hold more than its limits; an honest peer is served as before.

use bytes::Bytes;
use outlast_core::cluster::streams::{Action, Event, Instance, Limits, PEERS_MAX, Stream, Streams};

use crate::{Dice, birth, ms, seeds};

const OWN: Instance = 1;
const PEER: Instance = 2;
const LIMITS: Limits = Limits { packet_max: 600, message_max: 3_000, window: 1_200, unacked_max: 2_400 };
/// Bytes that a stream may hold of what it receives: four windows, and a message.
const HELD_MAX: usize = 4 * LIMITS.window + 2 * LIMITS.message_max;

#[test]
fn random_packets_are_dropped_and_peers_are_bounded() {
    let mut dice = Dice::new(1);
    let now = birth();
    let mut machine = connected(OWN);
    let mut actions = Vec::new();
    for number in 0..12_000u64 {
        let from = 10 + dice.below(3 * PEERS_MAX as u64);
        let mut packet: Vec<u8> = (0..dice.below(120)).map(|_| dice.below(256) as u8).collect();
        if number % 4 != 0 && packet.len() >= 20 {
            packet[..4].copy_from_slice(&[b'o', b's', 1, dice.below(4) as u8]);
            packet[4..12].copy_from_slice(&from.to_be_bytes());
            packet[12..20].copy_from_slice(&OWN.to_be_bytes());
        }
        match number % 3 {
            0 => drop(machine.probed(from, &packet, now)),
            1 => machine.handle(Event::Received { from, packet: packet.into() }, now, &mut actions),
            _ => machine.handle(Event::ProbeAnswered { of: from, packet: packet.into() }, now, &mut actions),
        }
        if number % 64 == 0 {
            machine.flush(now, &mut actions);
        }
    }
    machine.flush(now, &mut actions);
    assert!(machine.counts().unreadable > 500);
    assert_eq!(machine.counts().peers.len(), PEERS_MAX);
    assert!(actions.drain(..).all(|action| matches!(action, Action::Publish { .. })));

    // They are forgotten, as they are not heard again.
    let later = machine.deadline().expect("peers that only greeted are forgotten");
    machine.handle(Event::TimePassed, later, &mut actions);
    assert_eq!((machine.counts().peers.len(), machine.deadline()), (0, None));
    assert!(actions.is_empty());
}

#[test]
fn changed_packets_never_panic_and_never_exceed_the_limits() {
    let (from, count) = seeds(200);
    let mut broken = 0;
    for seed in from..from + count {
        broken += conversation(seed);
    }
    assert!(count < 100 || broken > count, "only {broken} packets were unreadable");
}

fn connected(own: Instance) -> Streams {
    let mut machine = Streams::new(own, own, LIMITS);
    machine.handle(Event::Connected, birth(), &mut Vec::new());
    machine
}

/// Two machines talk, and some packets to the first one are changed. Returns how many it could not read.
fn conversation(seed: u64) -> u64 {
    let mut dice = Dice::new(seed);
    let mut now = birth();
    let (mut own, mut peer) = (connected(OWN), connected(PEER));
    let (mut to_own, mut to_peer) = (Vec::new(), Vec::new());
    let mut held: Vec<(Stream, usize)> = Vec::new();
    let mut streams: Vec<Stream> = Vec::new();
    let mut seen: Vec<Bytes> = Vec::new();
    for _ in 0..150 {
        now += ms(dice.below(40));
        match dice.below(6) {
            0 => {
                let stream = peer.next_stream();
                streams.push(stream);
                peer.handle(Event::Opened { stream, to: OWN, hello: bytes(&mut dice) }, now, &mut to_own);
            }
            1..5 if !streams.is_empty() => {
                let stream = dice.pick(&streams);
                peer.handle(Event::Sent { stream, message: bytes(&mut dice) }, now, &mut to_own);
            }
            _ if !streams.is_empty() => {
                let stream = streams.swap_remove(dice.below(streams.len() as u64) as usize);
                peer.handle(Event::Closed { stream }, now, &mut to_own);
            }
            _ => {}
        }
        for (machine, actions) in [(&mut own, &mut to_peer), (&mut peer, &mut to_own)] {
            machine.handle(Event::TimePassed, now, actions);
            machine.flush(now, actions);
        }
        for action in to_own.drain(..) {
            let (packet, is_probe) = match action {
                Action::Publish { packet, .. } => (packet, false),
                Action::Probe { packet, .. } => (packet, true),
                _ => continue,
            };
            seen.push(packet.clone());
            let packet = match dice.below(8) {
                0 => changed(&packet, &mut dice),
                1 => changed(&dice.pick(&seen), &mut dice),
                _ => packet,
            };
            match is_probe {
                true => {
                    let packet = own.probed(PEER, &packet, now);
                    peer.handle(Event::ProbeAnswered { of: OWN, packet }, now, &mut Vec::new());
                }
                false => own.handle(Event::Received { from: PEER, packet }, now, &mut to_peer),
            }
        }
        for action in to_peer.drain(..) {
            match action {
                Action::Publish { packet, .. } => {
                    peer.handle(Event::Received { from: OWN, packet }, now, &mut to_own);
                }
                Action::Probe { packet, .. } => {
                    let packet = peer.probed(OWN, &packet, now);
                    own.handle(Event::ProbeAnswered { of: PEER, packet }, now, &mut Vec::new());
                }
                Action::Accept { stream, hello, .. } => {
                    assert!(hello.len() <= LIMITS.message_max);
                    held.push((stream, 0));
                }
                Action::Deliver { stream, message } => {
                    assert!(message.len() <= LIMITS.message_max);
                    let held = held.iter_mut().find(|(of, _)| *of == stream).expect("it was accepted");
                    held.1 += message.len();
                    assert!(held.1 <= HELD_MAX, "seed {seed}: {} bytes are held", held.1);
                }
                Action::End { stream, .. } => held.retain(|(of, _)| *of != stream),
                Action::Room { .. } => {}
            }
        }
        let counts = own.counts();
        assert!(counts.peers.len() <= 1 && counts.peers.iter().all(|peer| peer.unacked <= LIMITS.unacked_max));
    }
    own.counts().unreadable
}

fn bytes(dice: &mut Dice) -> Bytes {
    vec![dice.below(256) as u8; dice.below(2_000) as usize].into()
}

/// With some bytes changed, removed or added.
fn changed(packet: &Bytes, dice: &mut Dice) -> Bytes {
    let mut packet = packet.to_vec();
    for _ in 0..1 + dice.below(3) {
        // Mostly behind the addresses and numbers, so that it is not dropped at once.
        let from = dice.pick(&[0, 28, 52, 52, 52]).min(packet.len().saturating_sub(1));
        let at = from + dice.below((packet.len() - from).clamp(1, 40) as u64) as usize;
        match dice.below(4) {
            0 if at < packet.len() => packet[at] = dice.below(256) as u8,
            1 if at < packet.len() => packet[at] ^= 1 << dice.below(8),
            2 => packet.truncate(at.max(1)),
            _ => packet.insert(at.min(packet.len()), dice.below(256) as u8),
        }
    }
    packet.into()
}
