//! How long the turns of the loop take: the longest one since the figures were last read. It does not limit them.

use std::time::{Duration, Instant};

use outlast_os as os;

use super::TURN_MAX;

/// For how long the CPU clock is read in each turn, after the start and after a turn that was longer than [`TURN_MAX`]. It
/// costs a system call, which a turn of usual length would notice.
const START_WATCHED: Duration = Duration::from_secs(2);
const WATCHED: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Turns {
    longest: Longest,
    cpu_until: Instant,
    /// The CPU time of this thread when the turn began, if it is measured.
    cpu_began: Option<Duration>,
}

/// The longest turn.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Longest {
    /// Includes the time in which other processes had the core.
    pub(super) elapsed: Duration,
    /// Of turns whose CPU time was measured.
    pub(super) cpu: Duration,
}

impl Turns {
    pub(super) fn new(now: Instant) -> Turns {
        Turns { longest: Longest::default(), cpu_until: now + START_WATCHED, cpu_began: None }
    }

    pub(super) fn begin(&mut self, now: Instant) {
        self.cpu_began = if now < self.cpu_until { os::thread_cpu_time() } else { None };
    }

    pub(super) fn end(&mut self, elapsed: Duration, now: Instant) {
        if let Some(began) = self.cpu_began.take()
            && let Some(ended) = os::thread_cpu_time()
        {
            self.longest.cpu = self.longest.cpu.max(ended.saturating_sub(began));
        }
        self.longest.elapsed = self.longest.elapsed.max(elapsed);
        if elapsed > TURN_MAX {
            self.cpu_until = self.cpu_until.max(now + WATCHED);
        }
    }

    /// The longest turn since the last call.
    pub(super) fn take(&mut self) -> Longest {
        std::mem::take(&mut self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_time_of_turns_is_measured_after_a_long_one() {
        let start = Instant::now();
        let mut turns = Turns::new(start);
        let later = start + START_WATCHED;
        turns.begin(later);
        assert!(turns.cpu_began.is_none());
        turns.end(TURN_MAX, later);
        turns.begin(later);
        assert!(turns.cpu_began.is_none());
        turns.end(2 * TURN_MAX, later);
        turns.begin(later + WATCHED / 2);
        assert_eq!(turns.cpu_began.is_some(), os::thread_cpu_time().is_some());
        turns.end(Duration::ZERO, later + WATCHED / 2);
        assert_eq!(turns.take().elapsed, 2 * TURN_MAX);
        assert_eq!(turns.take().elapsed, Duration::ZERO, "it was read");
        turns.begin(later + WATCHED);
        assert!(turns.cpu_began.is_none());
    }
}
