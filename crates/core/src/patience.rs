//! A wait that ends at a deadline, except when this process itself did not run in time to see it. It holds no clock.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::saved::Moment;

/// A deadline that is noticed later than this was missed by outlast (stopped by a signal, starved, resumed from suspend).
const LATE: Duration = Duration::from_secs(1);

/// How long something is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    length: Duration,
    until: Instant,
    is_rearmed: bool,
}

impl Patience {
    pub fn new(length: Duration, now: Instant) -> Patience {
        Patience { length, until: now + length, is_rearmed: false }
    }

    pub fn deadline(&self) -> Instant {
        self.until
    }

    pub fn length(&self) -> Duration {
        self.length
    }

    /// Whether the wait is over. A deadline that is more than a second in the past begins anew, once: what was waited for
    /// may be there already, unread.
    pub fn is_over(&mut self, now: Instant) -> bool {
        if now < self.until {
            return false;
        }
        if now > self.until + LATE && !self.is_rearmed {
            *self = Patience { length: self.length, until: now + self.length, is_rearmed: true };
            return false;
        }
        true
    }
}

/// As saved state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    length: Duration,
    until: Moment,
    is_rearmed: bool,
}

impl Patience {
    pub fn save(&self, now: Instant) -> Saved {
        Saved { length: self.length, until: Moment::of(self.until, now), is_rearmed: self.is_rearmed }
    }

    pub fn restore(saved: Saved, now: Instant) -> Patience {
        Patience { length: saved.length, until: saved.until.at(now), is_rearmed: saved.is_rearmed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a test needs some instant to count from")]
    fn a_deadline_seen_late_counts_the_second_time() {
        let birth = Instant::now();
        let at = |seconds: f64| birth + Duration::from_secs_f64(seconds);
        let length = Duration::from_secs(5);
        let table: [(&[(f64, bool)], f64); 5] = [
            // looked at, over                                deadline
            (&[(4.9, false), (5.0, true)], 5.0),
            (&[(6.0, true)], 5.0),
            (&[(6.1, false), (11.0, false), (11.1, true)], 11.1),
            (&[(6.1, false), (500.0, true)], 11.1),
            (&[(0.0, false)], 5.0),
        ];
        for (looks, deadline) in table {
            let mut patience = Patience::new(length, birth);
            for (seconds, over) in looks {
                assert_eq!(patience.is_over(at(*seconds)), *over, "{looks:?} at {seconds}");
            }
            assert_eq!(patience.deadline(), at(deadline), "{looks:?}");
        }
    }
}
