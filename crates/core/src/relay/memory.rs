//! A bound on the server's memory (`--memory-max`, rows z1 and z2). How memory is measured is not known here.

use std::time::Instant;

use super::{Current, Origin, Relay, restart::Ticket};
use crate::record::{self, Record};

impl Relay {
    /// Above its limit the serving child is replaced: a new one comes up beside it. Not at every measurement: a server
    /// that needs more from the start would be restarted without end.
    pub(super) fn server_measured(&mut self, generation: u32, bytes: u64, now: Instant) {
        let Some(max) = self.settings.memory_max.filter(|max| bytes > *max) else { return };
        let gap = self.settings.limits.memory_gap;
        let is_soon = self.memory_replaced.is_some_and(|last| now.saturating_duration_since(last) < gap);
        if self.current != Current::Serving(generation) || self.is_leaving() || self.restart.is_some() || is_soon {
            return;
        }
        self.memory_replaced = Some(now);
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let detail = format!("it uses {} MiB, more than {} MiB", mib(bytes), mib(max));
        let pid = self.children.get(&generation).map(|child| child.pid);
        let record = Record::new(record::Event::ServerTooLarge);
        self.record(Record { pid, generation: Some(generation.into()), detail: Some(detail.clone()), ..record });
        self.restart_asked(Ticket::Outside(0), Origin::Memory, detail, false, now);
    }
}
