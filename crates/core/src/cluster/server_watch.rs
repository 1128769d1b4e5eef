//! Whether the NATS server of a replica still answers for JetStream, and when others are tried instead. A server that lost its
//! peers keeps its connections, so nothing else tells. How a server is tried is the driver's work.

use std::time::{Duration, Instant};

/// JetStream is silent if it answered nothing for so long. A replica asks every 2 s.
pub const SILENT_AFTER: Duration = Duration::from_secs(5);
/// The first pause after all other servers were tried. It doubles up to the last: in an election, no server answers.
pub const PAUSE_FIRST: Duration = Duration::from_secs(2);
pub const PAUSE_MAX: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub struct ServerWatch {
    answered: Instant,
    /// When the others are tried, if JetStream is silent until then.
    try_at: Instant,
    pause: Duration,
}

impl ServerWatch {
    /// JetStream has just answered on a new connection.
    pub fn new(now: Instant) -> ServerWatch {
        ServerWatch { answered: now, try_at: now + SILENT_AFTER, pause: PAUSE_FIRST }
    }

    pub fn answered(&mut self, now: Instant) {
        *self = ServerWatch::new(now);
    }

    /// Whether another server is used, if JetStream answers there.
    pub fn is_silent(&self, now: Instant) -> bool {
        self.answered + SILENT_AFTER <= now
    }

    /// When the other servers are to be tried. An answer puts it off.
    pub fn deadline(&self) -> Instant {
        self.try_at
    }

    /// None of the other servers can be used.
    pub fn tried(&mut self, now: Instant) {
        self.try_at = self.try_at.max(now + self.pause);
        self.pause = (self.pause * 2).min(PAUSE_MAX);
    }
}
