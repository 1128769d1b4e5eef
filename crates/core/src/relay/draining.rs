//! Servers that were replaced: they finish what they were asked and stop. Which server replaces them is decided in
//! `restart`.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use bytes::Bytes;

use super::{
    Relay,
    events::Action,
    failures::{FailureKind, Loss},
    servers::{Draining, LastEnd},
};
use crate::exit::How;

impl Relay {
    /// A replaced child finishes what it was asked, and goes.
    pub(super) fn drain(&mut self, generation: u32, now: Instant) {
        let limits = &self.settings.limits;
        let (until, draining_max) = (now + limits.draining.drain_max, limits.draining.draining_max);
        let reason = self.reloads.reason().unwrap_or_else(|| "replaced by a new server".into());
        let at_once = self.reloads.is_at_once();
        self.servers.drain(Draining { generation, until, reason, at_once });
        if let Some(child) = self.servers.get_mut(generation) {
            child.fetches.clear();
        }
        self.forget_hang(generation);
        if self.hung(generation).is_some() {
            self.leave_hung(generation, now);
        }
        let finishing: Vec<u32> = self.servers.finishing().map(|(generation, _)| generation).collect();
        if finishing.len() > draining_max {
            let unawaited = finishing.iter().find(|generation| !self.requests.is_awaited(**generation));
            self.drain_over(*unawaited.unwrap_or(&finishing[0]), FailureKind::DrainOver, now);
        }
        self.drained(generation);
        // What it has not read goes to the server that replaces it. While there is none, only a child that has stopped
        // reading gives its queue back: one that reads may still answer.
        let replaced = self.servers.slot.serving().is_some();
        if !self.servers.is_stopping(generation) && (replaced || at_once || self.is_stalled(generation)) {
            self.act(Action::TakeBack(generation));
        }
    }

    /// One more server may have to finish its calls without any other being cut short.
    pub(super) fn has_room_to_drain(&self) -> bool {
        let awaited = self.servers.draining().iter().filter(|draining| self.requests.is_awaited(draining.generation));
        awaited.count() < self.settings.limits.draining.draining_max
    }

    /// Stops a draining child that has nothing left to do.
    pub(super) fn drained(&mut self, generation: u32) {
        if !self.requests.has_calls_on(generation) && !self.servers.is_stopping(generation) {
            self.retire(generation);
        }
    }

    pub(super) fn drain_over(&mut self, generation: u32, kind: FailureKind, now: Instant) {
        self.drain_over_but(generation, kind, BTreeMap::new(), now);
    }

    /// The same, but for lines that the child has not read: these go to the server that replaced it, in client order with
    /// what may be asked twice.
    pub(super) fn drain_over_but(
        &mut self,
        generation: u32,
        kind: FailureKind,
        mut unsent: BTreeMap<u64, Bytes>,
        now: Instant,
    ) {
        let end = LastEnd { how: How::Stopped, generation, pid: 0, stderr: self.servers.stderr(generation) };
        let hung = self.hung(generation).map(str::to_owned);
        let hung = hung.as_deref();
        let seqs: BTreeSet<u64> = self.requests.on(generation).into_iter().chain(unsent.keys().copied()).collect();
        for seq in seqs {
            if let Some(line) = unsent.remove(&seq) {
                self.give_back(generation, seq, line, now);
                continue;
            }
            let mut open = self.close(seq);
            open.taken = true;
            if let Some(open) = self.salvage(open, true, now) {
                let kind = if hung.is_some() { FailureKind::ServerHung } else { kind };
                let failure = self.failure_of(&Loss { kind, open: &open, end: &end, hung }, now);
                self.fail(&open, &failure);
            }
        }
        self.retire(generation);
    }

    pub(super) fn retire(&mut self, generation: u32) {
        self.cancel_asked(generation);
        let record = self.servers.retire(generation);
        record.into_iter().for_each(|record| self.record(record));
        self.stop(generation, How::Stopped);
    }
}
