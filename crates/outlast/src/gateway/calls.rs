//! The records of calls on their way to the audit log: many at once, and never later than a moment after.

use std::time::{Duration, Instant};

use outlast_core::gateway::Called;

use crate::journal::{Journal, Origin};

/// What waits is written before more comes than this.
const BATCH_MAX: usize = 64 << 10;
/// What waits is written after this.
const WAIT_MAX: Duration = Duration::from_millis(250);

#[derive(Debug, Default)]
pub struct Calls {
    lines: String,
    due: Option<Instant>,
}

impl Calls {
    /// Its line, for those who listen.
    pub fn add(&mut self, called: &Called, origin: &Origin, journal: &mut Journal, now: Instant) -> &str {
        if self.lines.len() >= BATCH_MAX {
            self.write(journal);
        }
        let from = self.lines.len();
        journal.call_ended(called, origin, &mut self.lines);
        self.due.get_or_insert(now + WAIT_MAX);
        &self.lines[from..]
    }

    /// When to say that time passed.
    pub fn deadline(&self) -> Option<Instant> {
        self.due
    }

    pub fn time_passed(&mut self, journal: &mut Journal, now: Instant) {
        if self.due.is_some_and(|due| due <= now) {
            self.write(journal);
        }
    }

    /// All that waits: something comes that is to stand after it.
    pub fn write(&mut self, journal: &mut Journal) {
        self.due = None;
        if !self.lines.is_empty() {
            journal.write_many(&self.lines);
            self.lines.clear();
        }
    }
}
