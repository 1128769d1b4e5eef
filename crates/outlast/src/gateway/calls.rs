//! The records of calls that are not written to the audit log yet. They are written together, at most a short time
//! later.

use std::time::{Duration, Instant};

use outlast_core::gateway::Called;

use crate::state::journal::{Journal, Origin};

/// Records are written when the buffer exceeds this.
const BATCH_MAX: usize = 64 << 10;
/// Records are written after this time.
const WAIT_MAX: Duration = Duration::from_millis(250);

#[derive(Debug, Default)]
pub(super) struct Calls {
    lines: String,
    due: Option<Instant>,
}

impl Calls {
    /// Adds a record and returns its line, for subscribers.
    pub(super) fn add(&mut self, called: &Called, origin: &Origin, journal: &mut Journal, now: Instant) -> &str {
        if self.lines.len() >= BATCH_MAX {
            self.write(journal);
        }
        let from = self.lines.len();
        journal.call_ended(called, origin, &mut self.lines);
        self.due.get_or_insert(now + WAIT_MAX);
        &self.lines[from..]
    }

    /// When to call `time_passed`.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.due
    }

    pub(super) fn time_passed(&mut self, journal: &mut Journal, now: Instant) {
        if self.due.is_some_and(|due| due <= now) {
            self.write(journal);
        }
    }

    /// Writes all records, before another record that must follow them.
    pub(super) fn write(&mut self, journal: &mut Journal) {
        self.due = None;
        if !self.lines.is_empty() {
            journal.write_many(&self.lines);
            self.lines.clear();
        }
    }
}
