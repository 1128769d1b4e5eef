//! The lines that wait in front of a child's pipe: when the client is still read, and which requests are refused. A
//! server that reads slows the client down (backpressure); one that reads nothing at all does not stop the conversation.

use std::{collections::BTreeMap, time::Instant};

use bytes::Bytes;

use super::{Class, Current, Open, Place, Relay, ends::AT_ONCE};

/// A queue that has reached `queued_bytes_max`, as the driver last reported it.
#[derive(Debug)]
pub(super) struct Backlog {
    bytes: usize,
    /// When the queue last became shorter, or reached the bound.
    since: Instant,
    /// The pipe took nothing for `unread_max`. Stays true until the queue is below the bound again.
    stalled: bool,
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
        let max = self.settings.limits.queued_bytes_max;
        let Some(child) = self.children.get_mut(&generation) else { return };
        child.backlog = match child.backlog.take() {
            _ if bytes < max => None,
            Some(backlog) if bytes >= backlog.bytes => Some(Backlog { bytes, ..backlog }),
            Some(backlog) => Some(Backlog { bytes, since: now, ..backlog }),
            None => Some(Backlog { bytes, since: now, stalled: false }),
        };
    }

    /// From here on the driver reports a child's queue.
    pub fn queued_bytes_max(&self) -> usize {
        self.settings.limits.queued_bytes_max
    }

    /// Whether the driver reads the client's input.
    pub fn reads_client(&self) -> bool {
        let stop = self.settings.limits.queued_bytes_stop;
        self.backlogs().all(|backlog| backlog.stalled && backlog.bytes < stop)
    }

    /// The queue of a child that is being stopped does not count: the child ends soon, and its queue with it.
    fn backlogs(&self) -> impl Iterator<Item = &Backlog> {
        self.children.values().filter(|child| !child.stopping).filter_map(|child| child.backlog.as_ref())
    }

    /// When a queue that does not become shorter counts as stalled.
    pub(super) fn backlog_deadline(&self) -> Option<Instant> {
        self.backlogs()
            .filter(|backlog| !backlog.stalled)
            .map(|backlog| backlog.since + self.settings.limits.unread_max)
            .min()
    }

    pub(super) fn backlogs_time_passed(&mut self, now: Instant) {
        let unread_max = self.settings.limits.unread_max;
        for backlog in self.children.values_mut().filter_map(|child| child.backlog.as_mut()) {
            backlog.stalled |= backlog.since + unread_max <= now;
        }
    }

    /// The child has stopped reading, and its queue is at the bound.
    pub(super) fn is_stalled(&self, generation: u32) -> bool {
        let backlog = self.children.get(&generation).and_then(|child| child.backlog.as_ref());
        backlog.is_some_and(|backlog| backlog.stalled)
    }

    /// The bytes that wait for the serving child, once they are at the bound.
    pub(super) fn queued_bytes(&self) -> Option<usize> {
        let child = self.children.get(&self.live()?)?;
        child.backlog.as_ref().map(|backlog| backlog.bytes)
    }

    /// Why a request is refused with e4 now.
    pub(super) fn full(&self) -> Full {
        match self.current {
            Current::Fresh(n) | Current::Serving(n) if self.is_stalled(n) => Full::Queued,
            _ if self.held.len() >= self.settings.limits.held_max => Full::Held,
            _ => Full::HeldBytes,
        }
    }

    /// There is no space for it: e4, or e1 for one that some pipe took before.
    pub(super) fn refuse_full(&mut self, open: &Open, now: Instant) {
        let failure = if open.taken {
            self.failure(7001, "server_ended", open, now)
        } else {
            self.failure(7004, "hold_full", open, now)
        };
        self.fail(open, &failure);
    }

    /// The limit in words, for e4's message.
    pub(super) fn full_in_words(&self) -> String {
        let limits = &self.settings.limits;
        match self.full() {
            Full::Held if limits.held_max == 1 => "1 request already waits for the server".into(),
            Full::Held => format!("{} requests already wait for the server", limits.held_max),
            Full::HeldBytes => {
                format!("it does not fit into the {} that may wait for the server", size(limits.held_bytes_max))
            }
            Full::Queued => {
                format!("{} already wait for the server, which does not read its input", size(limits.queued_bytes_max))
            }
        }
    }

    /// Lines that the pipe of a replaced child has not begun to take: they go to the server that replaced it, in
    /// client order, as if never sent.
    pub(super) fn taken_back(&mut self, generation: u32, unsent: Vec<(u64, Bytes)>, now: Instant) {
        let unsent: BTreeMap<u64, Bytes> = unsent.into_iter().collect();
        let draining = self.draining.iter().find(|draining| draining.generation == generation);
        match draining.map(|draining| draining.at_once) {
            Some(true) => self.drain_over_but(generation, AT_ONCE, unsent, now),
            is_draining => {
                for (seq, line) in unsent {
                    self.give_back(generation, seq, line, now);
                }
                if is_draining.is_some() {
                    self.drained(generation);
                }
            }
        }
        self.begin_queued(now);
    }

    /// One such line.
    pub(super) fn give_back(&mut self, generation: u32, seq: u64, line: Bytes, now: Instant) {
        match self.opens.get_mut(&seq) {
            Some(open) if open.place == Place::On(generation) => {
                let open = self.close(seq);
                if open.cancelled {
                    self.forget(&open);
                } else if open.class == Class::Ping && self.live().is_none() {
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
