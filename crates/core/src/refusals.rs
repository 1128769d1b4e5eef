//! Which refused requests are written to the audit log: of each kind a bounded number a second. All are counted.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// Records of one kind in one second; further ones are only counted, and their number is written with the next record of that
/// kind or at the end of the second.
pub const RECORDS_MAX: u32 = 10;
const SECOND: Duration = Duration::from_secs(1);

/// Kinds are names in the program, so there are few of them.
#[derive(Debug, Default)]
pub struct Refusals {
    kinds: BTreeMap<&'static str, Kind>,
}

#[derive(Debug)]
struct Kind {
    /// When the second began.
    since: Instant,
    written: u32,
    suppressed: u64,
}

impl Refusals {
    /// Whether it is to be written, and if so, how many of its kind were not written before it.
    pub fn add(&mut self, kind: &'static str, now: Instant) -> Option<u64> {
        let known = self.kinds.entry(kind).or_insert(Kind { since: now, written: 0, suppressed: 0 });
        if known.since + SECOND <= now {
            (known.since, known.written) = (now, 0);
        }
        if known.written >= RECORDS_MAX {
            known.suppressed += 1;
            return None;
        }
        known.written += 1;
        Some(std::mem::take(&mut known.suppressed))
    }

    /// When numbers are due that nothing was written with.
    pub fn deadline(&self) -> Option<Instant> {
        self.kinds.values().filter(|kind| kind.suppressed > 0).map(|kind| kind.since + SECOND).min()
    }

    /// The kinds whose second is over, and how many of each were not written.
    pub fn due(&mut self, now: Instant) -> Vec<(&'static str, u64)> {
        let over = self.kinds.iter_mut().filter(|(_, kind)| kind.suppressed > 0 && kind.since + SECOND <= now);
        over.map(|(name, kind)| (*name, std::mem::take(&mut kind.suppressed))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "some instant to count from")]
    fn a_bounded_number_a_second_is_written_and_the_rest_is_counted() {
        let begin = Instant::now();
        let at = |millis: u64| begin + Duration::from_millis(millis);
        let mut refusals = Refusals::default();
        let written = (0..1_000).filter(|n| refusals.add("a", at(n / 2)).is_some()).count();
        assert_eq!(written, RECORDS_MAX as usize);
        assert_eq!(refusals.add("b", at(500)), Some(0), "each kind has its own bound");
        assert_eq!(refusals.deadline(), Some(at(1_000)));
        assert_eq!(refusals.due(at(999)), []);
        // The next record brings the number with it.
        assert_eq!(refusals.add("a", at(1_000)), Some(990));
        assert_eq!((refusals.deadline(), refusals.due(at(5_000))), (None, vec![]));
        // Without one the number is written by itself.
        for _ in 0..30 {
            refusals.add("a", at(6_000));
        }
        assert_eq!((refusals.deadline(), refusals.due(at(7_000))), (Some(at(7_000)), vec![("a", 20)]));
        assert_eq!(refusals.deadline(), None);
    }
}
