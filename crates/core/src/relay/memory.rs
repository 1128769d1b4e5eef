//! A bound on the server's memory (`--memory-max`, rows z1 and z2). How memory is measured is not known here.

use std::time::Instant;

use super::{Relay, events::Origin, restart::Ticket};
use crate::{record, record::Record, saved::Moment};

/// What is remembered of servers that used too much.
#[derive(Debug, Default)]
pub(super) struct MemoryLimit {
    /// When a server was last replaced because of its memory.
    replaced: Option<Instant>,
}

impl MemoryLimit {
    pub(super) fn save(&self, now: Instant) -> Option<Moment> {
        self.replaced.map(|at| Moment::of(at, now))
    }

    pub(super) fn restore(replaced: Option<Moment>, now: Instant) -> MemoryLimit {
        MemoryLimit { replaced: replaced.map(|at| at.at(now)) }
    }
}

impl Relay {
    /// Above its limit the serving child is replaced: a new one comes up beside it. Not at every measurement: a server
    /// that needs more from the start would be restarted without end.
    pub(super) fn server_measured(&mut self, generation: u32, bytes: u64, now: Instant) {
        let Some(max) = self.settings.memory_max.filter(|max| bytes > *max) else { return };
        let gap = self.settings.limits.hang.memory_gap;
        let is_soon = self.memory_limit.replaced.is_some_and(|last| now.saturating_duration_since(last) < gap);
        if self.servers.slot.serving() != Some(generation) || self.is_leaving() || self.reloads.is_running() || is_soon
        {
            return;
        }
        self.memory_limit.replaced = Some(now);
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let detail = format!("it uses {} MiB, more than {} MiB", mib(bytes), mib(max));
        let pid = self.servers.pid(generation);
        let record = Record::new(record::Event::ServerTooLarge);
        self.record(Record { pid, generation: Some(generation.into()), detail: Some(detail.clone()), ..record });
        self.restart_asked(Ticket::Outside(0), Origin::Memory, detail, false, now);
    }
}
