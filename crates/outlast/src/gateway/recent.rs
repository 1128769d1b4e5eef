//! Events of the last hour, for a status page that is opened now. Calls are not included: the audit log has them.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Older events are dropped.
const AGE_MAX: Duration = Duration::from_secs(3600);
/// Above this number the oldest event is dropped.
const EVENTS_MAX: usize = 200;
/// Bytes of all events; above this the oldest are dropped.
const BYTES_MAX: usize = 1 << 20;

/// Each event as one line of JSON.
#[derive(Debug, Default)]
pub(super) struct Recent {
    events: VecDeque<(Instant, Box<str>)>,
    bytes: usize,
}

impl Recent {
    pub(super) fn add(&mut self, line: &str, now: Instant) {
        let line = line.trim_end();
        self.bytes += line.len();
        self.events.push_back((now, line.into()));
        while let Some((at, oldest)) = self.events.front() {
            let is_old = now.saturating_duration_since(*at) > AGE_MAX;
            if !is_old && self.events.len() <= EVENTS_MAX && self.bytes <= BYTES_MAX {
                break;
            }
            self.bytes -= oldest.len();
            self.events.pop_front();
        }
    }

    /// A JSON array, oldest first.
    pub(super) fn json(&self, now: Instant) -> String {
        let recent = self.events.iter().filter(|(at, _)| now.saturating_duration_since(*at) <= AGE_MAX);
        let lines: Vec<&str> = recent.map(|(_, line)| &**line).collect();
        format!("[{}]", lines.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_kept_for_an_hour_and_within_limits() {
        let begin = Instant::now();
        let mut recent = Recent::default();
        recent.add("1\n", begin);
        recent.add("2\n", begin + AGE_MAX);
        assert_eq!(recent.json(begin + AGE_MAX), "[1,2]");
        assert_eq!(recent.json(begin + AGE_MAX + Duration::from_secs(1)), "[2]");
        for n in 0..1_000 {
            recent.add(&n.to_string(), begin + AGE_MAX);
        }
        assert_eq!(recent.events.len(), EVENTS_MAX);
        assert!(recent.json(begin + AGE_MAX).ends_with("998,999]"));
        for _ in 0..5 {
            recent.add(&"x".repeat(BYTES_MAX / 3), begin + AGE_MAX);
        }
        assert!(recent.bytes <= BYTES_MAX && recent.events.len() == 3, "{} {}", recent.bytes, recent.events.len());
        recent.add("last", begin + AGE_MAX * 3);
        assert_eq!((recent.events.len(), recent.bytes), (1, 4));
    }
}
