//! The clocks of one computer: both drift, and one of them stands still while the computer is suspended.

use std::time::{Duration, Instant};

use outlast_core::cluster::BootTime;

#[derive(Debug)]
pub(super) struct Clock {
    /// How much faster it is than the time of the world, in millionths.
    drift: i64,
    /// What it showed when the world began.
    offset: Duration,
    suspended: Duration,
    birth: Instant,
}

impl Clock {
    pub(super) fn new(drift: i64, offset: Duration, birth: Instant) -> Clock {
        Clock { drift, offset, suspended: Duration::ZERO, birth }
    }

    pub(super) fn boot(&self, now: Duration) -> BootTime {
        let micros = now.as_micros() as u64;
        let rate = (1_000_000 + self.drift) as u64;
        BootTime(self.offset + Duration::from_micros(micros * rate / 1_000_000))
    }

    pub(super) fn instant(&self, now: Duration) -> Instant {
        self.birth + (self.boot(now).0 - self.suspended)
    }

    /// When the clock shows this.
    pub(super) fn when(&self, boot: BootTime) -> Duration {
        let micros = boot.0.saturating_sub(self.offset).as_nanos().div_ceil(1_000) as u64;
        let rate = (1_000_000 + self.drift) as u64;
        let mut when = Duration::from_micros(micros * 1_000_000 / rate);
        while self.boot(when) < boot {
            when += Duration::from_micros(1);
        }
        when
    }

    pub(super) fn when_instant(&self, instant: Instant) -> Duration {
        self.when(BootTime(instant.saturating_duration_since(self.birth) + self.suspended))
    }

    /// The computer was suspended from one moment to the other.
    pub(super) fn suspend(&mut self, from: Duration, to: Duration) {
        self.suspended += self.boot(to).since(self.boot(from));
    }
}
