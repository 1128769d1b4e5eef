//! Whether and when to start again: one engine, whose presets are data.
//!
//! A *crash* is an ending nobody asked for and the policy does not forgive. Crashes are counted until a child has
//! stayed ready for `Policy::healthy`, or somebody resumes; no other thing forgives them. A restart at once
//! after a first crash (`First::AtOnce`) counts as crash 1 like any other, toward giving up too, but takes no delay
//! from the list: the crash after it gets the first one.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::exit::{Cause, How};

/// How many endings are remembered; the oldest is forgotten first.
pub const RECENT_MAX: usize = 10;
/// Who forgets us again and again is met anew no more often than this.
const FORGOT_GAP: Duration = Duration::from_secs(1);

/// All that distinguishes one way of starting again from another. Any mix is allowed.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    pub delays: Delays,
    /// Up to this many hundredths of a delay are added to it by chance, so that many children do not return in step.
    pub jitter_percent: u32,
    /// Too many crashes in too short a time; a list of delays alone does not see this.
    pub flapping: Option<Flapping>,
    pub first: First,
    /// For `First::AtOnce`: how long a child must have been ready to earn it.
    pub first_ready_min: Duration,
    /// A child that has been ready for so long clears the count.
    pub healthy: Duration,
    /// This many restarts are made for one count of crashes; the next crash gives up. `None` is no limit.
    pub restarts_max: Option<u32>,
    /// An exit by `exit::RESTART_CODE` restarts at once, but no sooner than so long after the last such restart. `None`: it
    /// is a crash like another.
    pub request_gap: Option<Duration>,
    /// Leaving in peace is final; otherwise it is a crash, as for a child that nobody but us can call back.
    pub clean_leaves: bool,
}

/// The delay before restart n of a count.
#[derive(Clone, Debug, PartialEq)]
pub enum Delays {
    /// `(from, delay)`, rising: the last entry whose `from` is not above n holds.
    Steps(Vec<(u32, Duration)>),
    /// `first` doubled with each restart, at most `max`.
    Doubling { first: Duration, max: Duration },
}

/// `crashes` within `within`, the present one among them, is flapping: the delay is then at least `delay`. At most
/// `RECENT_MAX` crashes can be told apart.
#[derive(Clone, Debug, PartialEq)]
pub struct Flapping {
    pub crashes: u32,
    pub within: Duration,
    pub delay: Duration,
}

/// What the first crash of a child that had served well is answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First {
    AtOnce,
    Delay,
}

impl Policy {
    /// For one server behind one client: peace ends it, 42 restarts it, and it is never given up.
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

    /// For one backend of many: every ending is a crash, the delays double, and a hopeless one is given up.
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

    /// For an agent a person works with: short delays, long ones when it flaps, a halt at the fifth failure.
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
                // Beyond 2^31 the cap has long been reached by any delay worth the name.
                let factor = 1u32 << n.saturating_sub(1).min(31);
                first.saturating_mul(factor).min(*max)
            }
        }
    }
}

/// What is to be done about an ending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    StartAt {
        at: Instant,
        delay: Duration,
        why: Why,
    },
    /// `within` is the time from the first crash of the count to this one; none if there was but one.
    GiveUp {
        crashes: u32,
        within: Option<Duration>,
    },
    /// Nothing is planned: it left on purpose, or somebody had it stopped and knows what comes next.
    Left,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It had served well until its first crash.
    AtOnce,
    /// It asked for a restart, too soon after the last one.
    Throttled,
    Backoff,
    /// It asked for a restart.
    Requested,
}

/// How the child fares in the eyes of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Healthy,
    /// It flaps.
    Degraded,
    /// It was given up.
    Halted,
}

/// One ending of the past.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Past {
    pub how: How,
    pub cause: Cause,
    pub at: Instant,
    /// How long it had been the child in place; nothing if no process came to be.
    pub uptime: Duration,
    counted: bool,
}

impl Past {
    /// For whoever asks from outside.
    pub fn to_json(&self, now: Instant) -> Value {
        json!({
            "how": self.how.to_string(),
            "exit": self.how.to_json(),
            "crashed": matches!(self.cause, Cause::Crashed | Cause::NeverReady),
            "seconds_ago": now.saturating_duration_since(self.at).as_secs_f64(),
            "uptime_s": self.uptime.as_secs_f64(),
        })
    }
}

/// The history of one place that children fill one after the other. It hears of the child that serves or is meant
/// to: never of one that drains, nor of a candidate before it takes over.
#[derive(Clone, Debug)]
pub struct Restarts {
    policy: Policy,
    dice: SplitMix,
    /// Newest last, at most `RECENT_MAX`.
    recent: VecDeque<Past>,
    place: Place,
    count: Count,
    restarts: u32,
    any_started: bool,
    /// When a child last came up because its predecessor had asked for it.
    last_requested: Option<Instant>,
}

#[derive(Clone, Debug)]
enum Place {
    /// `requested`: the start that is planned, if one is, was asked for by the child that is gone.
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
    /// The first of them was answered at once and used up no delay.
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
            place: Place::Empty { requested: false },
            count: Count::CLEAR,
            restarts: 0,
            any_started: false,
            last_requested: None,
        }
    }

    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// A process came to be, as the last verdict planned it or as the very first. For one that somebody asked for,
    /// say `replaced` instead.
    pub fn child_started(&mut self, now: Instant) {
        if let Place::Empty { requested: true } = self.place {
            self.last_requested = Some(now);
        }
        self.take_place(now);
    }

    /// The child in place finished its handshake. Saying it twice changes nothing.
    pub fn child_ready(&mut self, now: Instant) {
        if let Place::Taken { ready: ready @ None, .. } = &mut self.place {
            *ready = Some(now);
        }
    }

    /// A restart or reload that was asked for put a new child in place: no delay, the count is kept. For a reload this
    /// is the takeover, and `child_ready` follows at once. To forgive a give-up, say `resumed` before.
    pub fn replaced(&mut self, now: Instant) {
        self.forgive_if_healthy(now);
        self.take_place(now);
    }

    /// The child in place, or one that should have come to be, is gone.
    pub fn child_ended(&mut self, cause: Cause, how: How, now: Instant) -> Verdict {
        self.forgive_if_healthy(now);
        let (uptime, ready_for) = match self.place {
            Place::Empty { .. } => (Duration::ZERO, None),
            Place::Taken { since, ready } => {
                (now.saturating_duration_since(since), ready.map(|ready| now.saturating_duration_since(ready)))
            }
        };
        let counted = self.is_crash(cause);
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(Past { how, cause, at: now, uptime, counted });
        self.place = Place::Empty { requested: false };

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

    /// The child was stopped because it was not needed: starting the next one is no restart.
    pub fn rested(&mut self) {
        self.any_started = false;
    }

    /// Somebody forgives all crashes.
    pub fn resumed(&mut self) {
        self.count = Count::CLEAR;
    }

    /// Every replacement of a child by another, asked for or not.
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// Crashes not forgiven by now.
    pub fn crashes(&self, now: Instant) -> u32 {
        if self.is_healthy(now) { 0 } else { self.count.crashes }
    }

    pub fn state(&self, now: Instant) -> State {
        if self.is_healthy(now) { State::Healthy } else { self.count.state }
    }

    /// The last endings, oldest first, at most `RECENT_MAX`.
    pub fn recent(&self) -> impl DoubleEndedIterator<Item = &Past> {
        self.recent.iter()
    }

    fn take_place(&mut self, now: Instant) {
        self.restarts += u32::from(self.any_started);
        self.any_started = true;
        self.place = Place::Taken { since: now, ready: None };
    }

    fn is_healthy(&self, now: Instant) -> bool {
        matches!(self.place, Place::Taken { ready: Some(ready), .. }
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
        self.place = Place::Empty { requested: true };
        match self.last_requested.map(|last| last + gap) {
            Some(at) if now < at => Verdict::StartAt { at, delay: at - now, why: Why::Throttled },
            _ => Verdict::StartAt { at: now, delay: Duration::ZERO, why: Why::Requested },
        }
    }

    /// The delay of a child that flaps. Forgiven crashes do not count, recent as they may be.
    fn flapping_delay(&self, now: Instant) -> Option<Duration> {
        let flapping = self.policy.flapping.as_ref()?;
        let lately = self.recent.iter().rev().filter(|past| past.counted).take(self.count.crashes as usize);
        let crashes = lately.filter(|past| now.saturating_duration_since(past.at) <= flapping.within).count();
        (crashes >= flapping.crashes as usize).then_some(flapping.delay)
    }
}

/// Chance that a test can repeat: Steele, Lea and Flood's splitmix64.
#[derive(Clone, Debug)]
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between nothing and `percent` hundredths of `whole`.
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

    /// A place, its clock, and children that end as told.
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

        /// The child in place is ready for so long (never, if `None`), then exits; then the verdict is carried out.
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
    fn a_child_that_served_well_returns_at_once_the_first_time() {
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
            // It neither counts as a crash nor forgives one.
            (1,  Some(100),   Why::Backoff,   1_000),
            (42, NEVER,       Why::Requested, 0),
            (1,  NEVER,       Why::Backoff,   1_000),
            (1,  NEVER,       Why::Backoff,   1_000),
            (42, Some(4_000), Why::Requested, 0),
            (1,  NEVER,       Why::Backoff,   5_000),
        ]);
    }

    #[test]
    fn who_forgets_us_is_met_anew_at_once_and_then_once_a_second() {
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
        // A person does not wait for that start; theirs is none of the kind that is throttled.
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

        // A new try, by whoever makes it, does not forgive; only time and `resumed` do.
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

        // The restart at once is one of those allowed.
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
    fn health_shows_as_soon_as_it_is_reached() {
        let mut story = Story::new(Policy::session());
        for _ in 0..3 {
            story.exit(1, NEVER);
        }
        story.restarts.child_ready(story.now);
        story.restarts.child_ready(story.now + secs(30));
        let (before, after) = (story.now + Duration::from_millis(59_999), story.now + secs(60));
        assert_eq!((story.restarts.crashes(before), story.restarts.state(before)), (3, State::Degraded));
        assert_eq!((story.restarts.crashes(after), story.restarts.state(after)), (0, State::Healthy));
        // Health of the old child outlives its replacement.
        story.restarts.replaced(after);
        assert_eq!(story.restarts.crashes(after), 0);
    }

    #[test]
    fn leaving_in_peace_is_the_policys_to_judge() {
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
    fn what_was_asked_for_keeps_the_count_and_counts_as_a_restart() {
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
    fn a_child_that_could_not_be_started_is_a_crash_but_replaced_nobody() {
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
    fn the_last_ten_endings_are_kept() {
        let mut story = Story::new(Policy::watchdog());
        for code in 100..115 {
            story.exit(code, NEVER);
        }
        let codes: Vec<_> = story.restarts.recent().map(|past| past.how.to_string()).collect();
        assert_eq!(codes.len(), RECENT_MAX);
        assert_eq!((codes[0].as_str(), codes[9].as_str()), ("exit code 105", "exit code 114"));
    }
}
