//! Changed files: which of them cause a reload, and which are muted for now. How files are watched and read is not known
//! here.

use std::time::Instant;

use super::{Relay, events::Origin, restart::Ticket};
use crate::{
    debounce::{Changed, Judged, Print},
    record,
    record::Record,
};

/// How many muted files the status names.
const MUTED_SHOWN: usize = 20;

impl Relay {
    pub(super) fn files_changed(&mut self, changed: Changed, prints: &[Option<Print>], now: Instant) {
        let judged = self.habits.judge(changed, prints, now);
        self.follow_judged(judged, now);
    }

    pub(super) fn muted_files_due(&mut self, now: Instant) {
        let judged = self.habits.time_passed(now);
        self.follow_judged(judged, now);
    }

    /// A person or an agent asked for a restart: every file counts again.
    pub(super) fn unmute_files(&mut self) {
        let unmuted = self.habits.restart_requested();
        self.record_paths(record::Event::WatchUnmuted, unmuted);
    }

    /// The first of them, as text.
    pub(super) fn muted_files(&self) -> Vec<String> {
        self.habits.muted().into_iter().take(MUTED_SHOWN).map(|path| path.display().to_string()).collect()
    }

    fn follow_judged(&mut self, judged: Judged, now: Instant) {
        self.record_paths(record::Event::WatchUnmuted, judged.unmuted);
        self.record_paths(record::Event::WatchMuted, judged.muted);
        if let Some(changed) = judged.changed {
            self.restart_asked(Ticket::Outside(0), Origin::Watch, reason(&changed), false, now);
        }
    }

    fn record_paths(&mut self, event: record::Event, paths: Vec<std::path::PathBuf>) {
        for path in paths {
            self.record(Record { detail: Some(path.display().to_string()), ..Record::new(event) });
        }
    }
}

fn reason(changed: &Changed) -> String {
    let names: Vec<String> = changed.paths.iter().map(|path| path.display().to_string()).collect();
    let more = if changed.more > 0 { format!(" and {} more", changed.more) } else { String::new() };
    match names.is_empty() {
        true => "files changed".into(),
        false => format!("changed: {}{more}", names.join(", ")),
    }
}
