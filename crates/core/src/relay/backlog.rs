//! The lines that wait in front of a child's pipe: when the client is still read, and which requests are refused. A
//! server that reads slows the client down (backpressure); one that reads nothing at all does not stop the conversation.

use std::{collections::BTreeMap, time::Instant};

use bytes::Bytes;

use super::{
    Relay,
    endpoint::Endpoint,
    failures::FailureKind,
    requests::{Class, OpenRequest},
    saved::SavedBacklog,
    servers::Current,
};
use crate::saved::Moment;

/// A queue that has reached `queued_bytes_max`, as the driver last reported it.
#[derive(Debug)]
pub(super) struct Backlog {
    bytes: usize,
    /// When the queue last became shorter, or reached the bound.
    since: Instant,
    /// The pipe took nothing for `unread_max`. Stays true until the queue is below the bound again.
    stalled: bool,
}

impl Backlog {
    pub(super) fn save(&self, now: Instant) -> SavedBacklog {
        SavedBacklog { bytes: self.bytes, since: Moment::of(self.since, now), stalled: self.stalled }
    }

    pub(super) fn restore(saved: SavedBacklog, now: Instant) -> Backlog {
        Backlog { bytes: saved.bytes, since: saved.since.at(now), stalled: saved.stalled }
    }
}

/// The limit that made outlast refuse a request (e4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Full {
    /// Too many messages are held.
    Held,
    /// Too many bytes are held.
    HeldBytes,
    /// The serving child does not read its input.
    Queued,
}

impl Full {
    /// The name of the limit, for programs.
    pub(super) fn limit(self) -> &'static str {
        match self {
            Full::Held => "held_max",
            Full::HeldBytes => "held_bytes_max",
            Full::Queued => "queued_bytes_max",
        }
    }
}

impl Relay {
    /// The driver's report: this many bytes wait for the child's pipe. It comes on every change above the bound, and
    /// once when the queue falls below it.
    pub(super) fn queue_changed(&mut self, generation: u32, bytes: usize, now: Instant) {
        let max = self.settings.limits.queue.queued_bytes_max;
        let Some(child) = self.servers.get_mut(generation) else { return };
        child.backlog = match child.backlog.take() {
            _ if bytes < max => None,
            Some(backlog) if bytes >= backlog.bytes => Some(Backlog { bytes, ..backlog }),
            Some(backlog) => Some(Backlog { bytes, since: now, ..backlog }),
            None => Some(Backlog { bytes, since: now, stalled: false }),
        };
    }

    /// From here on the driver reports a child's queue.
    pub fn queued_bytes_max(&self) -> usize {
        self.settings.limits.queue.queued_bytes_max
    }

    /// Whether the driver reads the client's input.
    pub fn reads_client(&self) -> bool {
        let stop = self.settings.limits.queue.queued_bytes_stop;
        self.backlogs().all(|backlog| backlog.stalled && backlog.bytes < stop)
    }

    /// The queue of a child that is being stopped does not count: the child ends soon, and its queue with it.
    fn backlogs(&self) -> impl Iterator<Item = &Backlog> {
        self.servers.running().filter_map(|(_, child)| child.backlog.as_ref())
    }

    /// When the queue of this child, if it does not become shorter, counts as stalled.
    pub(super) fn backlog_deadline(&self, child: &Endpoint) -> Option<Instant> {
        let backlog = child.backlog.as_ref().filter(|backlog| !backlog.stalled)?;
        Some(backlog.since + self.settings.limits.queue.unread_max)
    }

    pub(super) fn backlog_stalls(&mut self, generation: u32) {
        if let Some(backlog) = self.servers.get_mut(generation).and_then(|child| child.backlog.as_mut()) {
            backlog.stalled = true;
        }
    }

    /// The child has stopped reading, and its queue is at the bound.
    pub(super) fn is_stalled(&self, generation: u32) -> bool {
        let backlog = self.servers.get(generation).and_then(|child| child.backlog.as_ref());
        backlog.is_some_and(|backlog| backlog.stalled)
    }

    /// The bytes that wait for the serving child, once they are at the bound.
    pub(super) fn queued_bytes(&self) -> Option<usize> {
        let child = self.servers.get(self.servers.slot.live()?)?;
        child.backlog.as_ref().map(|backlog| backlog.bytes)
    }

    /// Why a request is refused with e4 now.
    pub(super) fn full(&self) -> Full {
        match *self.servers.slot.current() {
            Current::Fresh(n) | Current::Serving(n) if self.is_stalled(n) => Full::Queued,
            _ if self.requests.held_len() >= self.settings.limits.holding.held_max => Full::Held,
            _ => Full::HeldBytes,
        }
    }

    /// There is no space for it: e4, or e1 for one that some pipe took before.
    pub(super) fn refuse_full(&mut self, open: &OpenRequest, now: Instant) {
        let failure = if open.taken {
            self.failure(FailureKind::ServerEnded, open, now)
        } else {
            self.failure(FailureKind::HoldFull, open, now)
        };
        self.fail(open, &failure);
    }

    /// The limit in words, for e4's message.
    pub(super) fn full_sentence(&self) -> String {
        let limits = &self.settings.limits;
        match self.full() {
            Full::Held if limits.holding.held_max == 1 => "1 request is already waiting for the server".into(),
            Full::Held => format!("{} requests are already waiting for the server", limits.holding.held_max),
            Full::HeldBytes => {
                format!("it does not fit into the {} that can wait for the server", size(limits.holding.held_bytes_max))
            }
            Full::Queued => {
                format!(
                    "{} are already waiting for the server, which does not read its stdin",
                    size(limits.queue.queued_bytes_max)
                )
            }
        }
    }

    /// Lines that the pipe of a replaced child has not begun to take: they go to the server that replaced it, in
    /// client order, as if never sent.
    pub(super) fn taken_back(&mut self, generation: u32, unsent: Vec<(u64, Bytes)>, now: Instant) {
        let unsent: BTreeMap<u64, Bytes> = unsent.into_iter().collect();
        let draining = self.servers.draining_of(generation);
        match draining.map(|draining| draining.at_once) {
            Some(true) => self.drain_over_but(generation, FailureKind::AtOnce, unsent, now),
            is_draining => {
                for (seq, line) in unsent {
                    self.give_back(generation, seq, line, now);
                }
                if is_draining.is_some() {
                    self.drained(generation);
                }
            }
        }
    }

    /// One such line.
    pub(super) fn give_back(&mut self, generation: u32, seq: u64, line: Bytes, now: Instant) {
        match self.requests.get_mut(seq) {
            Some(open) if open.is_on(generation) => {
                let open = self.close(seq);
                if open.cancelled {
                    self.forget(&open);
                } else if open.class == Class::Ping && self.servers.slot.live().is_none() {
                    self.answer_result(&open, "{}");
                } else {
                    self.again(open, line, now);
                }
            }
            Some(open) => {
                // It was asked again when this child was replaced, which shows now not to have heard it.
                open.resent = open.resent.saturating_sub(1);
                open.taken = open.resent > 0;
            }
            None => self.untracked_again(seq, &line, now),
        }
    }
}

fn size(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} bytes"),
        1024..1_048_576 => format!("{} KiB", bytes / 1024),
        _ => format!("{} MiB", bytes / 1_048_576),
    }
}
