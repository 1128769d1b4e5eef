//! The timer table of a gateway: one entry for each kind of deadline, which is never later than the first of its kind.
//! What is done when an entry is due is decided in [`super::Gateway::fire`].

use std::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Timer {
    /// A call is late, or its questions are put to the client.
    Calls,
    /// A request is sent again to a busy HTTP backend.
    Resends,
    /// A link is late with its handshake, has drained long enough, hangs, is idle, or is to be subscribed to again.
    Links,
    /// Requests wait no longer for a backend's offer.
    OfferWaits,
    /// More of the calls that waited for a slot are sent.
    Releases,
    /// A large list that changed is read again.
    Lists,
    /// Changed offers are merged.
    Catalogue,
    /// Links are stopped although calls are in flight there.
    Stop,
    /// A slot is started.
    Slots,
}

impl Timer {
    /// In the order in which they fire.
    pub(super) const ALL: [Timer; 9] = [
        Timer::Calls,
        Timer::Resends,
        Timer::Links,
        Timer::OfferWaits,
        Timer::Releases,
        Timer::Lists,
        Timer::Catalogue,
        Timer::Stop,
        Timer::Slots,
    ];
}

/// Arming costs one comparison, because there is one deadline for each call. An entry may turn out to be too early, as when
/// the call that it was armed for was answered: then nothing is done, and it is set to the time that is right.
#[derive(Debug, Default)]
pub(super) struct TimerTable([Option<Instant>; Timer::ALL.len()]);

impl TimerTable {
    /// Something of this kind is due then.
    pub(super) fn arm(&mut self, timer: Timer, at: Instant) {
        let entry = &mut self.0[timer as usize];
        *entry = Some(entry.map_or(at, |before| before.min(at)));
    }

    /// This is the first deadline of its kind.
    pub(super) fn set(&mut self, timer: Timer, at: Option<Instant>) {
        self.0[timer as usize] = at;
    }

    /// The first deadline of all.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.iter().flatten().min().copied()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a test needs some instant to count from")]
    fn the_next_deadline_is_the_earliest_entry() {
        let start = Instant::now();
        let at = |secs| start + Duration::from_secs(secs);
        let mut timers = TimerTable::default();
        assert_eq!(timers.next(), None);
        timers.arm(Timer::Calls, at(5));
        timers.arm(Timer::Links, at(3));
        timers.arm(Timer::Calls, at(9));
        assert_eq!(timers.next(), Some(at(3)));
        timers.set(Timer::Links, None);
        assert_eq!(timers.next(), Some(at(5)));
        timers.set(Timer::Calls, Some(at(9)));
        assert_eq!(timers.next(), Some(at(9)));
    }
}
