//! How many calls were answered lately and how quickly. It costs each call a few additions.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::saved::Moment;

/// The figures cover one to two of these periods: a full half is replaced by the next.
const HALF: Duration = Duration::from_secs(15);
/// Four buckets per power of two, from a microsecond to more than half an hour, so that a figure is off by an eighth
/// at most.
const BUCKETS: usize = 128;

#[derive(Debug, Default)]
pub struct Pace {
    answered: u64,
    /// Allocated with the first call, so that an unused instance takes no memory.
    window: Option<Box<Window>>,
}

#[derive(Debug)]
struct Window {
    now: Half,
    before: Half,
}

#[derive(Debug, Clone)]
struct Half {
    began: Instant,
    count: u32,
    buckets: [u32; BUCKETS],
}

/// The figures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figures {
    /// All calls that were ever answered.
    pub answered: u64,
    pub per_second: f64,
    /// None if no call was answered lately.
    pub p50: Option<Duration>,
    pub p99: Option<Duration>,
}

impl Pace {
    /// Counts a call that was sent at `asked` and is answered now.
    pub fn note(&mut self, asked: Instant, now: Instant) {
        self.answered += 1;
        let window =
            self.window.get_or_insert_with(|| Box::new(Window { now: Half::empty(now), before: Half::empty(now) }));
        window.turn(now);
        window.now.count += 1;
        window.now.buckets[bucket(now.saturating_duration_since(asked))] += 1;
    }

    pub fn figures(&self, now: Instant) -> Figures {
        let mut figures = Figures { answered: self.answered, per_second: 0.0, p50: None, p99: None };
        let Some(window) = &self.window else { return figures };
        let halves: Vec<&Half> = [&window.before, &window.now]
            .into_iter()
            .filter(|half| half.count > 0 && now.saturating_duration_since(half.began) < 2 * HALF)
            .collect();
        let count: u64 = halves.iter().map(|half| u64::from(half.count)).sum();
        let Some(oldest) = halves.iter().map(|half| half.began).min() else { return figures };
        // The rate of a first call is not extrapolated: less than a second counts as one second.
        let seconds = now.saturating_duration_since(oldest).as_secs_f64().max(1.0);
        figures.per_second = count as f64 / seconds;
        let at = |share: f64| {
            let mut left = ((count as f64 * share).ceil() as u64).max(1);
            (0..BUCKETS).find_map(|at| {
                let here: u64 = halves.iter().map(|half| u64::from(half.buckets[at])).sum();
                let found = left <= here;
                left = left.saturating_sub(here);
                found.then(|| middle(at))
            })
        };
        figures.p50 = at(0.5);
        figures.p99 = at(0.99);
        figures
    }
}

/// As saved state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    answered: u64,
    /// The current half and the one before.
    window: Option<[SavedHalf; 2]>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SavedHalf {
    began: Moment,
    /// Without the empty ones.
    buckets: BTreeMap<usize, u32>,
}

impl Pace {
    pub fn save(&self, now: Instant) -> Saved {
        let save = |half: &Half| SavedHalf {
            began: Moment::of(half.began, now),
            buckets: half.buckets.iter().copied().enumerate().filter(|(_, count)| *count > 0).collect(),
        };
        let window = self.window.as_ref().map(|window| [save(&window.now), save(&window.before)]);
        Saved { answered: self.answered, window }
    }

    pub fn restore(saved: Saved, now: Instant) -> Pace {
        let restore = |saved: SavedHalf| {
            let mut half = Half::empty(saved.began.at(now));
            for (at, count) in saved.buckets.into_iter().filter(|(at, _)| *at < BUCKETS) {
                half.buckets[at] = count;
                half.count += count;
            }
            half
        };
        let window = saved.window.map(|halves| {
            let [now, before] = halves.map(restore);
            Box::new(Window { now, before })
        });
        Pace { answered: saved.answered, window }
    }
}

impl Window {
    fn turn(&mut self, now: Instant) {
        if now.saturating_duration_since(self.now.began) >= HALF {
            self.before = std::mem::replace(&mut self.now, Half::empty(now));
        }
    }
}

impl Half {
    fn empty(now: Instant) -> Half {
        Half { began: now, count: 0, buckets: [0; BUCKETS] }
    }
}

/// The power of two, and the two binary digits after the first.
fn bucket(took: Duration) -> usize {
    let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    if micros < 4 {
        return micros as usize;
    }
    let power = micros.ilog2();
    let digits = (micros >> (power - 2)) & 3;
    (((power << 2) as usize) | digits as usize).min(BUCKETS - 1)
}

fn middle(bucket: usize) -> Duration {
    if bucket < 4 {
        return Duration::from_micros(bucket as u64);
    }
    let (power, digits) = ((bucket >> 2) as u32, (bucket & 3) as u64);
    let width = 1_u64 << (power.max(2) - 2);
    Duration::from_micros((4 + digits) * width + width / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start() -> Instant {
        #[expect(clippy::disallowed_methods, reason = "any moment will do to count from")]
        Instant::now()
    }

    #[test]
    fn every_duration_has_a_bucket_near_to_it() {
        let mut last = 0;
        for micros in (0..200_u64).chain((200..10_000_000).step_by(977)).chain([u64::MAX]) {
            let at = bucket(Duration::from_micros(micros));
            assert!(last <= at && at < BUCKETS, "{micros}");
            last = at;
            if micros < 1 << 31 {
                let off = middle(at).as_micros().abs_diff(u128::from(micros));
                assert!(off * 8 <= u128::from(micros).max(1) * 2, "{micros} is shown as {:?}", middle(at));
            }
        }
    }

    #[test]
    fn the_figures_cover_the_last_window() {
        let start = start();
        let mut pace = Pace::default();
        let nothing = Figures { answered: 0, per_second: 0.0, p50: None, p99: None };
        assert_eq!(pace.figures(start), nothing);
        // 100 calls in 10 s, 99 of a millisecond and one of a second.
        for n in 0..100_u64 {
            let at = start + Duration::from_millis(n * 100);
            let took = Duration::from_millis(if n == 50 { 1000 } else { 1 });
            pace.note(at - took.min(Duration::from_millis(n * 100)), at);
        }
        let now = start + Duration::from_secs(10);
        let figures = pace.figures(now);
        assert_eq!(figures.answered, 100);
        assert!((9.0..11.0).contains(&figures.per_second), "{figures:?}");
        assert!((900..1150).contains(&figures.p50.unwrap().as_micros()), "{figures:?}");
        assert!((900..1150).contains(&figures.p99.unwrap().as_micros()), "{figures:?}");

        // A later slow call is not hidden by older fast calls.
        let later = start + Duration::from_secs(40);
        pace.note(later - Duration::from_secs(2), later);
        pace.note(later - Duration::from_secs(2), later + Duration::from_secs(16));
        let figures = pace.figures(later + Duration::from_secs(16));
        assert_eq!(figures.answered, 102);
        assert!(figures.p50.unwrap().as_secs() >= 1, "{figures:?}");

        let quiet = pace.figures(later + Duration::from_secs(60));
        assert_eq!(quiet, Figures { answered: 102, ..nothing });
    }
}
