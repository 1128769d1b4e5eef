//! Children that start, serve and end at random, around one `Restarts`, beside a simple model of the count.

use std::time::{Duration, Instant};

use outlast_core::exit::{Cause, Exit, How, classify};
use outlast_core::restarts::{First, Policy, RECENT_MAX, Restarts, State, Verdict, Why};

use crate::{Dice, birth, ms};

#[test]
fn restart_policies_keep_their_promises() {
    for seed in 0..2_000 {
        World::new(seed).run();
    }
}

struct World {
    seed: u64,
    dice: Dice,
    now: Instant,
    policy: Policy,
    restarts: Restarts,
    /// The model: crashes since the count was last cleared, starts, and starts that exit code 42 requested.
    crashes: u32,
    starts: u32,
    requested: Vec<Instant>,
}

impl World {
    fn new(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        let mut policy = dice.pick(&[Policy::watchdog(), Policy::exponential(), Policy::session()]);
        // Any combination of settings is allowed.
        if dice.one_in(3) {
            policy.first = dice.pick(&[First::AtOnce, First::Delay]);
            policy.restarts_max = dice.pick(&[None, Some(0), Some(1), Some(3)]);
            policy.request_gap = dice.pick(&[None, Some(ms(1_000))]);
            policy.clean_leaves = dice.one_in(2);
            policy.flapping = dice.pick(&[None, Policy::session().flapping]);
        }
        let restarts = Restarts::new(policy.clone(), seed);
        World { seed, dice, now: birth(), policy, restarts, crashes: 0, starts: 0, requested: vec![] }
    }

    fn run(mut self) {
        self.restarts.child_started(self.now);
        self.starts += 1;
        for _ in 0..60 {
            self.one_child();
            assert_eq!(self.restarts.restarts(), self.starts - 1, "seed {}", self.seed);
            assert_eq!(self.restarts.crashes(self.now), self.crashes, "seed {}", self.seed);
            assert!(self.restarts.recent().count() <= RECENT_MAX);
        }
        for pair in self.requested.windows(2) {
            let gap = self.policy.request_gap.unwrap_or_default();
            assert!(pair[1] - pair[0] >= gap, "seed {}: two restarts by 42 within the gap", self.seed);
        }
    }

    /// The current child becomes ready or not, ends or is replaced, and the next one starts.
    fn one_child(&mut self) {
        let ready_for = match self.dice.below(3) {
            0 => None,
            _ => Some(ms(self.dice.pick(&[0, 300, 4_999, 5_000, 59_999, 60_000, 100_000]))),
        };
        self.now += ms(self.dice.below(2_000));
        if let Some(ready_for) = ready_for {
            self.restarts.child_ready(self.now);
            self.now += ready_for;
        }
        if ready_for.is_some_and(|ready_for| ready_for >= self.policy.healthy) {
            self.crashes = 0;
        }
        if self.dice.one_in(8) {
            self.restarts.replaced(self.now);
            self.starts += 1;
            return;
        }
        let how = match self.dice.one_in(8) {
            true => How::Forgot("404".into()),
            false => How::Exited(Exit::Code(self.dice.pick(&[0, 1, 1, 1, 42]))),
        };
        let asked = self.dice.one_in(8);
        let cause = classify(&how, asked, ready_for.is_some());
        let before = self.crashes;
        self.crashes += u32::from(self.is_crash(cause));
        let verdict = self.restarts.child_ended(cause, how, self.now);
        self.judge(cause, ready_for, before, verdict);
    }

    fn is_crash(&self, cause: Cause) -> bool {
        match cause {
            Cause::Asked | Cause::Forgot => false,
            Cause::Clean => !self.policy.clean_leaves,
            Cause::RestartRequested => self.policy.request_gap.is_none(),
            Cause::Crashed | Cause::NeverReady => true,
        }
    }

    fn judge(&mut self, cause: Cause, ready_for: Option<Duration>, before: u32, verdict: Verdict) {
        let seed = self.seed;
        let spent = self.policy.restarts_max.is_some_and(|max| before >= max);
        match verdict {
            Verdict::Left => {
                let comes_back = self.is_crash(cause) || matches!(cause, Cause::RestartRequested | Cause::Forgot);
                assert!(!comes_back, "seed {seed}: {cause:?} left");
                // A request starts it again.
                self.restarts.replaced(self.now);
                self.starts += 1;
            }
            Verdict::GiveUp { crashes, .. } => {
                assert!(self.is_crash(cause) && spent, "seed {seed}: gave up with restarts left");
                assert_eq!(crashes, self.crashes, "seed {seed}");
                assert_eq!(self.restarts.state(self.now), State::Halted, "seed {seed}");
                if self.dice.one_in(2) {
                    self.restarts.resumed();
                    self.crashes = 0;
                }
                self.now += ms(300_000);
                self.restarts.child_started(self.now);
                self.starts += 1;
            }
            Verdict::StartAt { at, delay, why } => {
                assert_eq!(at, self.now + delay, "seed {seed}");
                let well = ready_for.is_some_and(|ready_for| ready_for >= self.policy.first_ready_min);
                let free = self.policy.first == First::AtOnce && before == 0 && well && self.is_crash(cause);
                assert_eq!(why == Why::AtOnce, free, "seed {seed}: at once is for the first crash after good service");
                match why {
                    Why::AtOnce | Why::Requested => assert!(delay.is_zero(), "seed {seed}"),
                    Why::Throttled => assert!(delay <= ms(1_000), "seed {seed}"),
                    Why::Backoff => assert!(delay >= ms(1_000) && delay <= ms(90_000), "seed {seed}: {delay:?}"),
                }
                let requested = matches!(why, Why::Throttled | Why::Requested);
                assert_eq!(requested, !self.is_crash(cause), "seed {seed}: {cause:?} for {why:?}");
                assert!(requested || !spent, "seed {seed}: one restart too many");
                self.now = at;
                if requested {
                    self.requested.push(at);
                }
                self.restarts.child_started(at);
                self.starts += 1;
            }
        }
    }
}
