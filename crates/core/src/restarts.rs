//! Whether and when to start a child again: one policy engine, whose presets are data.
//!
//! A *crash* is an end that was not requested and that the policy does not forgive. Crashes are counted until a child
//! has stayed ready for `Policy::healthy`, or an operator resumes; nothing else resets the count. An immediate
//! restart after a first crash (`First::AtOnce`) counts as crash 1 like any other, toward giving up too, but takes no
//! delay from the list: the next crash gets the first delay.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::exit::{Cause, How, HowStatus};

mod saved;

pub use saved::{Saved, SavedPast};

/// How many ends are kept; the oldest is dropped first.
pub const RECENT_MAX: usize = 10;
/// The shortest time between two new sessions with a server that forgets its session again and again.
const FORGOT_GAP: Duration = Duration::from_secs(1);

/// The parameters of a restart policy. Any combination is allowed.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    pub delays: Delays,
    /// Up to this percentage of a delay is added to it at random, so that many children do not restart at the same
    /// time.
    pub jitter_percent: u32,
    /// Too many crashes in too short a time; a list of delays alone does not detect this.
    pub flapping: Option<Flapping>,
    pub first: First,
    /// For `First::AtOnce`: how long a child must have been ready for an immediate restart.
    pub first_ready_min: Duration,
    /// A child that has been ready for this long clears the count.
    pub healthy: Duration,
    /// How many restarts one count of crashes allows; the next crash gives up. `None` is no limit.
    pub restarts_max: Option<u32>,
    /// An exit with `exit::RESTART_CODE` restarts at once, but not before this time after the last such restart.
    /// `None`: it counts as a crash.
    pub request_gap: Option<Duration>,
    /// An exit with 0 is final; otherwise it is a crash, as for a child that only outlast can start again.
    pub clean_leaves: bool,
}

/// The delay before restart n of a count.
#[derive(Clone, Debug, PartialEq)]
pub enum Delays {
    /// `(from, delay)`, rising: the last entry with `from <= n` applies.
    Steps(Vec<(u32, Duration)>),
    /// `first` doubled with each restart, at most `max`.
    Doubling { first: Duration, max: Duration },
}

/// `crashes` within `within`, the current one included, is flapping: the delay is then at least `delay`. At most
/// `RECENT_MAX` crashes are known.
#[derive(Clone, Debug, PartialEq)]
pub struct Flapping {
    pub crashes: u32,
    pub within: Duration,
    pub delay: Duration,
}

/// What follows the first crash of a child that had been ready for long enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First {
    AtOnce,
    Delay,
}

impl Policy {
    /// For one server behind one client: exit code 0 is final, 42 restarts it, and it is never given up.
    pub fn watchdog() -> Policy {
        Policy {
            delays: Delays::Steps(vec![(1, secs(1)), (4, secs(5)), (11, secs(10))]),
            jitter_percent: 0,
            flapping: None,
            first: First::AtOnce,
            first_ready_min: secs(5),
            healthy: secs(60),
            restarts_max: None,
            request_gap: Some(secs(1)),
            clean_leaves: true,
        }
    }

    /// For one of many backends: every end is a crash, the delays double, and a backend that keeps crashing is given
    /// up.
    pub fn exponential() -> Policy {
        Policy {
            delays: Delays::Doubling { first: secs(1), max: secs(60) },
            jitter_percent: 50,
            flapping: None,
            first: First::AtOnce,
            first_ready_min: secs(5),
            healthy: secs(60),
            restarts_max: Some(5),
            request_gap: None,
            clean_leaves: false,
        }
    }

    /// For an agent with a person at it: short delays, long ones when it flaps, a halt at the fifth failure.
    pub fn session() -> Policy {
        Policy {
            delays: Delays::Steps(vec![(1, secs(2))]),
            jitter_percent: 0,
            flapping: Some(Flapping { crashes: 3, within: secs(60), delay: secs(30) }),
            first: First::Delay,
            first_ready_min: secs(5),
            healthy: secs(60),
            restarts_max: Some(4),
            request_gap: None,
            clean_leaves: true,
        }
    }
}

impl Delays {
    fn of(&self, n: u32) -> Duration {
        match self {
            Delays::Steps(steps) => {
                steps.iter().rev().find(|(from, _)| *from <= n).map_or(Duration::ZERO, |(_, delay)| *delay)
            }
            Delays::Doubling { first, max } => {
                // Any realistic delay reaches its maximum before 2^31.
                let factor = 1u32 << n.saturating_sub(1).min(31);
                first.saturating_mul(factor).min(*max)
            }
        }
    }
}

/// What follows the end of a child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    StartAt {
        at: Instant,
        delay: Duration,
        why: Why,
    },
    /// `within` is the time from the first crash of the count to this one; none if there was only one.
    GiveUp {
        crashes: u32,
        within: Option<Duration>,
    },
    /// No start is planned: the child exited on purpose, or its owner stopped it and decides what follows.
    Left,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The first crash of a child that had been ready for long enough.
    AtOnce,
    /// The child requested a restart too soon after the last one.
    Throttled,
    Backoff,
    /// The child requested a restart.
    Requested,
}

/// The state of the child as the policy sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Healthy,
    /// It flaps.
    Degraded,
    /// It was given up.
    Halted,
}

/// One earlier end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Past {
    pub how: How,
    pub cause: Cause,
    pub at: Instant,
    /// How long it had been the current child; zero if no process was created.
    pub uptime: Duration,
    counted: bool,
}

impl Past {
    pub fn to_json(&self, now: Instant) -> Value {
        json!(self.status(now))
    }

    pub fn status(&self, now: Instant) -> PastStatus {
        PastStatus {
            how: self.how.to_string(),
            exit: self.how.status(),
            crashed: matches!(self.cause, Cause::Crashed | Cause::NeverReady),
            seconds_ago: now.saturating_duration_since(self.at).as_secs_f64(),
            uptime_s: self.uptime.as_secs_f64(),
        }
    }
}

/// The end of a child, in the JSON of states.
#[derive(Debug, Clone, Serialize)]
pub struct PastStatus {
    pub how: String,
    pub exit: HowStatus,
    pub crashed: bool,
    pub seconds_ago: f64,
    pub uptime_s: f64,
}

/// The restart history of one slot, which children fill one after the other. It records the child that serves or
/// is meant to serve, but no draining child, and no candidate before it takes over.
#[derive(Clone, Debug)]
pub struct Restarts {
    policy: Policy,
    dice: SplitMix,
    /// Newest last, at most `RECENT_MAX`.
    recent: VecDeque<Past>,
    occupancy: Occupancy,
    count: Count,
    restarts: u32,
    any_started: bool,
    /// When a child was last started because its predecessor requested it.
    last_requested: Option<Instant>,
}

#[derive(Clone, Debug)]
enum Occupancy {
    /// `requested`: the previous child requested the planned start, if there is one.
    Empty {
        requested: bool,
    },
    Taken {
        since: Instant,
        ready: Option<Instant>,
    },
}

/// The crashes that are not forgiven.
#[derive(Clone, Debug)]
struct Count {
    crashes: u32,
    first_at: Option<Instant>,
    /// The first of them was restarted at once and used no delay.
    first_was_free: bool,
    state: State,
}

impl Count {
    const CLEAR: Count = Count { crashes: 0, first_at: None, first_was_free: false, state: State::Healthy };
}

impl Restarts {
    /// `seed` is for the jitter.
    pub fn new(policy: Policy, seed: u64) -> Restarts {
        Restarts {
            policy,
            dice: SplitMix(seed),
            recent: VecDeque::with_capacity(RECENT_MAX),
            occupancy: Occupancy::Empty { requested: false },
            count: Count::CLEAR,
            restarts: 0,
            any_started: false,
            last_requested: None,
        }
    }

    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// A process was created: the first one, or the one that the last verdict planned. For a requested restart call
    /// `replaced` instead.
    pub fn child_started(&mut self, now: Instant) {
        if let Occupancy::Empty { requested: true } = self.occupancy {
            self.last_requested = Some(now);
        }
        self.take_place(now);
    }

    /// The current child finished its handshake. A second call changes nothing.
    pub fn child_ready(&mut self, now: Instant) {
        if let Occupancy::Taken { ready: ready @ None, .. } = &mut self.occupancy {
            *ready = Some(now);
        }
    }

    /// A requested restart or reload put a new child in place: no delay, and the count is kept. For a reload this is
    /// the takeover, and `child_ready` follows at once. To reset a give-up, call `resumed` before.
    pub fn replaced(&mut self, now: Instant) {
        self.forgive_if_healthy(now);
        self.take_place(now);
    }

    /// The current child ended, or the next one could not be started.
    pub fn child_ended(&mut self, cause: Cause, how: How, now: Instant) -> Verdict {
        self.forgive_if_healthy(now);
        let (uptime, ready_for) = match self.occupancy {
            Occupancy::Empty { .. } => (Duration::ZERO, None),
            Occupancy::Taken { since, ready } => {
                (now.saturating_duration_since(since), ready.map(|ready| now.saturating_duration_since(ready)))
            }
        };
        let counted = self.is_crash(cause);
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(Past { how, cause, at: now, uptime, counted });
        self.occupancy = Occupancy::Empty { requested: false };

        if counted {
            self.crashed(ready_for, now)
        } else if cause == Cause::RestartRequested {
            self.requested(self.policy.request_gap.unwrap_or(Duration::ZERO), now)
        } else if cause == Cause::Forgot {
            self.requested(FORGOT_GAP, now)
        } else {
            Verdict::Left
        }
    }

    /// The child was stopped because it was not needed: the next start does not count as a restart.
    pub fn rested(&mut self) {
        self.any_started = false;
    }

    /// An operator resets the count of crashes.
    pub fn resumed(&mut self) {
        self.count = Count::CLEAR;
    }

    /// Every replacement of a child by another, requested or not.
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// Crashes that are not forgiven by now.
    pub fn crashes(&self, now: Instant) -> u32 {
        if self.is_healthy(now) { 0 } else { self.count.crashes }
    }

    pub fn state(&self, now: Instant) -> State {
        if self.is_healthy(now) { State::Healthy } else { self.count.state }
    }

    /// The last ends, oldest first, at most `RECENT_MAX`.
    pub fn recent(&self) -> impl DoubleEndedIterator<Item = &Past> {
        self.recent.iter()
    }

    /// When the current child was put in its place.
    pub fn since(&self) -> Option<Instant> {
        match self.occupancy {
            Occupancy::Taken { since, .. } => Some(since),
            Occupancy::Empty { .. } => None,
        }
    }

    /// When the current child finished its handshake.
    pub fn ready_since(&self) -> Option<Instant> {
        match self.occupancy {
            Occupancy::Taken { ready, .. } => ready,
            Occupancy::Empty { .. } => None,
        }
    }

    fn take_place(&mut self, now: Instant) {
        self.restarts += u32::from(self.any_started);
        self.any_started = true;
        self.occupancy = Occupancy::Taken { since: now, ready: None };
    }

    fn is_healthy(&self, now: Instant) -> bool {
        matches!(self.occupancy, Occupancy::Taken { ready: Some(ready), .. }
            if now.saturating_duration_since(ready) >= self.policy.healthy)
    }

    fn forgive_if_healthy(&mut self, now: Instant) {
        if self.is_healthy(now) {
            self.count = Count::CLEAR;
        }
    }

    fn is_crash(&self, cause: Cause) -> bool {
        match cause {
            Cause::Asked | Cause::Forgot => false,
            Cause::Clean => !self.policy.clean_leaves,
            Cause::RestartRequested => self.policy.request_gap.is_none(),
            Cause::Crashed | Cause::NeverReady => true,
        }
    }

    fn crashed(&mut self, ready_for: Option<Duration>, now: Instant) -> Verdict {
        let first_at = *self.count.first_at.get_or_insert(now);
        self.count.crashes += 1;
        let crashes = self.count.crashes;
        if self.policy.restarts_max.is_some_and(|max| max < crashes) {
            self.count.state = State::Halted;
            let within = (crashes > 1).then(|| now.saturating_duration_since(first_at));
            return Verdict::GiveUp { crashes, within };
        }
        let flapping = self.flapping_delay(now);
        self.count.state = if flapping.is_some() { State::Degraded } else { State::Healthy };

        let served_well = ready_for.is_some_and(|ready_for| ready_for >= self.policy.first_ready_min);
        if crashes == 1 && served_well && self.policy.first == First::AtOnce && flapping.is_none() {
            self.count.first_was_free = true;
            return Verdict::StartAt { at: now, delay: Duration::ZERO, why: Why::AtOnce };
        }
        let delay = self.policy.delays.of(crashes - u32::from(self.count.first_was_free));
        let delay = delay.max(flapping.unwrap_or(Duration::ZERO));
        let delay = delay + self.dice.share_of(delay, self.policy.jitter_percent);
        Verdict::StartAt { at: now + delay, delay, why: Why::Backoff }
    }

    fn requested(&mut self, gap: Duration, now: Instant) -> Verdict {
        self.occupancy = Occupancy::Empty { requested: true };
        match self.last_requested.map(|last| last + gap) {
            Some(at) if now < at => Verdict::StartAt { at, delay: at - now, why: Why::Throttled },
            _ => Verdict::StartAt { at: now, delay: Duration::ZERO, why: Why::Requested },
        }
    }

    /// The delay of a child that flaps. Forgiven crashes do not count, even recent ones.
    fn flapping_delay(&self, now: Instant) -> Option<Duration> {
        let flapping = self.policy.flapping.as_ref()?;
        let lately = self.recent.iter().rev().filter(|past| past.counted).take(self.count.crashes as usize);
        let crashes = lately.filter(|past| now.saturating_duration_since(past.at) <= flapping.within).count();
        (crashes >= flapping.crashes as usize).then_some(flapping.delay)
    }
}

/// Random numbers that a test can repeat: Steele, Lea and Flood's splitmix64.
#[derive(Clone, Debug)]
pub(crate) struct SplitMix(pub(crate) u64);

impl SplitMix {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A random duration up to `percent` hundredths of `whole`.
    fn share_of(&mut self, whole: Duration, percent: u32) -> Duration {
        let chance = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        whole.mul_f64(f64::from(percent) / 100.0 * chance)
    }
}

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::{Exit, classify};

    #[expect(clippy::disallowed_methods, reason = "a test needs some instant to count from")]
    fn birth() -> Instant {
        Instant::now()
    }

    /// A restart history, its clock, and children that exit as the test says.
    struct Story {
        restarts: Restarts,
        now: Instant,
    }

    impl Story {
        fn new(policy: Policy) -> Story {
            let mut story = Story { restarts: Restarts::new(policy, 7), now: birth() };
            story.restarts.child_started(story.now);
            story
        }

        /// The current child is ready for so long (never, if `None`), then exits; then the verdict is carried out.
        fn exit(&mut self, code: i32, ready_for: Option<u64>) -> Verdict {
            if let Some(millis) = ready_for {
                self.restarts.child_ready(self.now);
                self.now += Duration::from_millis(millis);
            }
            let how = How::Exited(Exit::Code(code));
            let verdict = self.restarts.child_ended(classify(&how, false, ready_for.is_some()), how, self.now);
            if let Verdict::StartAt { at, .. } = verdict {
                self.now = at;
                self.restarts.child_started(at);
            }
            verdict
        }

        fn delay(&mut self, code: i32, ready_for: Option<u64>) -> (Why, u64) {
            match self.exit(code, ready_for) {
                Verdict::StartAt { delay, why, .. } => (why, delay.as_millis() as u64),
                verdict => panic!("expected a start, not {verdict:?}"),
            }
        }
    }

    const NEVER: Option<u64> = None;

    fn expect_delays(policy: Policy, table: &[(i32, Option<u64>, Why, u64)]) {
        let mut story = Story::new(policy);
        for (line, &(code, ready_for, why, delay)) in table.iter().enumerate() {
            assert_eq!(story.delay(code, ready_for), (why, delay), "line {line}");
        }
    }

    #[test]
    fn watchdog_delays_grow_in_steps() {
        #[rustfmt::skip]
        expect_delays(Policy::watchdog(), &[
            // exit, ready for ms, why, delay ms
            (1, NEVER,        Why::Backoff, 1_000),
            (1, Some(100),    Why::Backoff, 1_000),
            (1, NEVER,        Why::Backoff, 1_000),
            (1, NEVER,        Why::Backoff, 5_000),
            (1, NEVER,        Why::Backoff, 5_000),
            (1, NEVER,        Why::Backoff, 5_000),
            (0, NEVER,        Why::Backoff, 5_000),
            (1, NEVER,        Why::Backoff, 5_000),
            (1, NEVER,        Why::Backoff, 5_000),
            (1, NEVER,        Why::Backoff, 5_000),
            (1, NEVER,        Why::Backoff, 10_000),
            (1, NEVER,        Why::Backoff, 10_000),
            (1, Some(59_999), Why::Backoff, 10_000),
            (1, Some(60_000), Why::AtOnce,  0),
        ]);
    }

    #[test]
    fn a_stable_child_is_restarted_at_once_the_first_time() {
        #[rustfmt::skip]
        expect_delays(Policy::watchdog(), &[
            (1, Some(5_000),  Why::AtOnce,  0),
            (1, Some(5_000),  Why::Backoff, 1_000),
            (1, Some(59_000), Why::Backoff, 1_000),
            (1, NEVER,        Why::Backoff, 1_000),
            (1, NEVER,        Why::Backoff, 5_000),
            (1, Some(60_000), Why::AtOnce,  0),
            (1, NEVER,        Why::Backoff, 1_000),
        ]);
        #[rustfmt::skip]
        expect_delays(Policy::watchdog(), &[
            (1, Some(4_999), Why::Backoff, 1_000),
            (1, Some(5_000), Why::Backoff, 1_000),
        ]);
        #[rustfmt::skip]
        expect_delays(Policy { first: First::Delay, ..Policy::watchdog() }, &[
            (1, Some(5_000),  Why::Backoff, 1_000),
            (1, Some(5_000),  Why::Backoff, 1_000),
            (1, Some(60_000), Why::Backoff, 1_000),
        ]);
    }

    #[test]
    fn a_restart_by_42_is_at_once_and_at_most_one_each_second() {
        #[rustfmt::skip]
        expect_delays(Policy::watchdog(), &[
            (42, NEVER,       Why::Requested, 0),
            (42, NEVER,       Why::Throttled, 1_000),
            (42, Some(300),   Why::Throttled, 700),
            (42, Some(1_000), Why::Requested, 0),
            // It does not count as a crash, and it forgives none.
            (1,  Some(100),   Why::Backoff,   1_000),
            (42, NEVER,       Why::Requested, 0),
            (1,  NEVER,       Why::Backoff,   1_000),
            (1,  NEVER,       Why::Backoff,   1_000),
            (42, Some(4_000), Why::Requested, 0),
            (1,  NEVER,       Why::Backoff,   5_000),
        ]);
    }

    #[test]
    fn a_lost_session_is_opened_again_at_once_and_then_once_a_second() {
        let mut restarts = Restarts::new(Policy::exponential(), 1);
        let forgot = || How::Forgot("404".into());
        let mut now = birth();
        for expected in [Duration::ZERO, secs(1), secs(1)] {
            restarts.child_started(now);
            restarts.child_ready(now);
            let verdict = restarts.child_ended(Cause::Forgot, forgot(), now);
            let Verdict::StartAt { at, delay, .. } = verdict else { panic!("{verdict:?}") };
            assert_eq!(delay, expected);
            now = at;
        }
        assert_eq!(restarts.crashes(now), 0, "nothing crashed");
    }

    #[test]
    fn the_throttle_counts_from_the_restart_that_was_made() {
        let mut story = Story::new(Policy::watchdog());
        story.delay(42, NEVER);
        let t = story.now;
        let how = || How::Exited(Exit::Code(42));
        let verdict = story.restarts.child_ended(Cause::RestartRequested, how(), t);
        assert_eq!(verdict, Verdict::StartAt { at: t + secs(1), delay: secs(1), why: Why::Throttled });
        // A manual restart does not wait for that start, and it does not count for the throttle.
        story.restarts.replaced(t + Duration::from_millis(500));
        let verdict = story.restarts.child_ended(Cause::RestartRequested, how(), t + secs(1));
        assert_eq!(verdict, Verdict::StartAt { at: t + secs(1), delay: Duration::ZERO, why: Why::Requested });
    }

    #[test]
    fn exponential_doubles_to_a_cap_and_makes_exactly_as_many_restarts_as_allowed() {
        let exact = Policy { jitter_percent: 0, ..Policy::exponential() };
        let mut story = Story::new(exact.clone());
        for delay in [1_000, 2_000, 4_000, 8_000, 16_000] {
            assert_eq!(story.delay(1, NEVER), (Why::Backoff, delay));
        }
        assert_eq!(story.restarts.restarts(), 5);
        assert_eq!(story.exit(1, NEVER), Verdict::GiveUp { crashes: 6, within: Some(secs(31)) });
        assert_eq!(story.restarts.state(story.now), State::Halted);

        // A new attempt does not reset the count; only time and `resumed` do.
        story.restarts.child_started(story.now);
        assert!(matches!(story.exit(1, Some(59_999)), Verdict::GiveUp { crashes: 7, .. }));
        story.restarts.resumed();
        story.restarts.child_started(story.now);
        assert_eq!(story.delay(1, NEVER), (Why::Backoff, 1_000));

        let endless = Policy { restarts_max: None, ..exact.clone() };
        #[rustfmt::skip]
        expect_delays(endless, &[
            (1, Some(5_000), Why::AtOnce,  0),
            (1, NEVER,       Why::Backoff, 1_000),
            (1, NEVER,       Why::Backoff, 2_000),
            (1, NEVER,       Why::Backoff, 4_000),
            (1, NEVER,       Why::Backoff, 8_000),
            (1, NEVER,       Why::Backoff, 16_000),
            (1, NEVER,       Why::Backoff, 32_000),
            (1, NEVER,       Why::Backoff, 60_000),
            (1, NEVER,       Why::Backoff, 60_000),
        ]);

        // The immediate restart counts toward the limit.
        let mut story = Story::new(exact.clone());
        for delay in [0, 1_000, 2_000, 4_000, 8_000] {
            assert_eq!(story.delay(1, (delay == 0).then_some(5_000)).1, delay);
        }
        assert!(matches!(story.exit(1, NEVER), Verdict::GiveUp { crashes: 6, .. }));

        let mut never = Story::new(Policy { restarts_max: Some(0), ..exact });
        assert_eq!(never.exit(1, NEVER), Verdict::GiveUp { crashes: 1, within: None });
    }

    #[test]
    fn very_many_crashes_do_not_overflow_the_delay() {
        let doubling = Delays::Doubling { first: secs(1), max: secs(60) };
        for n in [7, 31, 32, 33, 64, u32::MAX] {
            assert_eq!(doubling.of(n), secs(60));
        }
    }

    #[test]
    fn jitter_adds_up_to_half_and_the_cap_is_before_it() {
        let policy = Policy { restarts_max: None, ..Policy::exponential() };
        let (mut least, mut most) = (u64::MAX, 0);
        for seed in 0..200 {
            let mut story = Story { restarts: Restarts::new(policy.clone(), seed), now: birth() };
            for base in [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000] {
                let (_, delay) = story.delay(1, NEVER);
                assert!((base..=base + base / 2).contains(&delay), "seed {seed}: {delay} for {base}");
                (least, most) = (least.min(delay * 100 / base), most.max(delay * 100 / base));
            }
        }
        assert!(least <= 102 && most >= 148, "all of the range is used: {least}..{most}");
    }

    #[test]
    fn a_session_halts_at_its_fifth_failure_in_a_row() {
        let mut story = Story::new(Policy::session());
        #[rustfmt::skip]
        let table = [
            // exit, ready for ms, delay, state
            (1,   Some(10_000), 2_000,  State::Healthy),
            (1,   Some(10_000), 2_000,  State::Healthy),
            (143, Some(10_000), 30_000, State::Degraded),
            (1,   Some(10_000), 30_000, State::Degraded),
        ];
        for (code, ready_for, delay, state) in table {
            assert_eq!(story.delay(code, ready_for), (Why::Backoff, delay));
            assert_eq!(story.restarts.state(story.now), state);
        }
        assert!(matches!(story.exit(1, Some(10_000)), Verdict::GiveUp { crashes: 5, .. }));
        assert_eq!(story.restarts.state(story.now), State::Halted);

        story.restarts.resumed();
        assert_eq!(story.restarts.state(story.now), State::Healthy);
        story.restarts.child_started(story.now);
        assert_eq!(story.delay(1, NEVER), (Why::Backoff, 2_000), "what was forgiven does not flap");
    }

    #[test]
    fn slow_failures_do_not_flap_but_halt() {
        let mut story = Story::new(Policy::session());
        for _ in 0..4 {
            assert_eq!(story.delay(1, Some(45_000)), (Why::Backoff, 2_000));
            assert_eq!(story.restarts.state(story.now), State::Healthy);
        }
        assert!(matches!(story.exit(1, Some(45_000)), Verdict::GiveUp { crashes: 5, .. }));
    }

    #[test]
    fn a_session_is_healthy_60_s_after_its_agent_is_ready() {
        let mut story = Story::new(Policy::session());
        for _ in 0..3 {
            story.exit(1, NEVER);
        }
        story.restarts.child_ready(story.now);
        story.restarts.child_ready(story.now + secs(30));
        let (before, after) = (story.now + Duration::from_millis(59_999), story.now + secs(60));
        assert_eq!((story.restarts.crashes(before), story.restarts.state(before)), (3, State::Degraded));
        assert_eq!((story.restarts.crashes(after), story.restarts.state(after)), (0, State::Healthy));
        // The count stays cleared after the child is replaced.
        story.restarts.replaced(after);
        assert_eq!(story.restarts.crashes(after), 0);
    }

    #[test]
    fn the_policy_decides_what_a_clean_exit_means() {
        #[rustfmt::skip]
        let table = [
            // policy, exit 0 after ready, exit 42
            (Policy::watchdog(), Verdict::Left, Why::Requested),
            (Policy::session(),  Verdict::Left, Why::Backoff),
        ];
        for (policy, clean, asks) in table {
            assert_eq!(Story::new(policy.clone()).exit(0, Some(100)), clean);
            assert_eq!(Story::new(policy).delay(42, Some(100)).0, asks);
        }
        let mut backend = Story::new(Policy { jitter_percent: 0, ..Policy::exponential() });
        assert_eq!(backend.delay(0, Some(100)), (Why::Backoff, 1_000));
        assert_eq!(backend.delay(42, Some(100)), (Why::Backoff, 2_000));
    }

    #[test]
    fn a_requested_restart_keeps_the_crash_count_and_counts_as_a_restart() {
        let mut story = Story::new(Policy::watchdog());
        for _ in 0..4 {
            story.exit(1, NEVER);
        }
        let stopped = story.restarts.child_ended(Cause::Asked, How::Stopped, story.now);
        assert_eq!(stopped, Verdict::Left);
        story.restarts.replaced(story.now);
        assert_eq!((story.restarts.crashes(story.now), story.restarts.restarts()), (4, 5));
        assert_eq!(story.delay(1, Some(10_000)), (Why::Backoff, 5_000));
        assert_eq!(story.restarts.restarts(), 6);
    }

    #[test]
    fn a_failed_start_is_a_crash_but_no_restart() {
        let mut story = Story::new(Policy::watchdog());
        story.now += secs(3);
        story.restarts.child_ended(Cause::Crashed, How::ClosedStdout, story.now);
        let how = How::CouldNotStart("no such file".into());
        let verdict = story.restarts.child_ended(Cause::NeverReady, how.clone(), story.now + secs(1));
        assert_eq!(verdict, Verdict::StartAt { at: story.now + secs(2), delay: secs(1), why: Why::Backoff });
        assert_eq!((story.restarts.crashes(story.now), story.restarts.restarts()), (2, 0));
        let recent: Vec<_> = story.restarts.recent().map(|past| (past.how.clone(), past.uptime)).collect();
        assert_eq!(recent, [(How::ClosedStdout, secs(3)), (how, Duration::ZERO)]);
    }

    #[test]
    fn the_last_ten_exits_are_kept() {
        let mut story = Story::new(Policy::watchdog());
        for code in 100..115 {
            story.exit(code, NEVER);
        }
        let codes: Vec<_> = story.restarts.recent().map(|past| past.how.to_string()).collect();
        assert_eq!(codes.len(), RECENT_MAX);
        assert_eq!((codes[0].as_str(), codes[9].as_str()), ("exit code 105", "exit code 114"));
    }
}
