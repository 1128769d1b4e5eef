//! Calls at any rate against token buckets and a circuit breaker, compared with simple models of both.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use outlast_core::gateway::{
    Rate, Rates,
    guard::{Breaker, Buckets, Circuit, Health, Pass},
};

use crate::{Dice, birth, ms};

#[test]
fn no_pair_gets_more_than_its_rate_and_burst() {
    for seed in 0..500 {
        Crowd::new(seed).run();
    }
}

/// A few clients that call a few tools, with fewer buckets than there are pairs.
struct Crowd {
    seed: u64,
    dice: Dice,
    now: Instant,
    rate: Rate,
    buckets: Buckets,
    max: usize,
    let_through: BTreeMap<(u64, u64), Vec<Instant>>,
}

impl Crowd {
    fn new(seed: u64) -> Crowd {
        let mut dice = Dice::new(seed);
        let rate = Rate { per_minute: dice.pick(&[1, 7, 60, 599, 6_000]), burst: dice.pick(&[1, 2, 5, 50]) };
        let max = dice.pick(&[1, 4, 100]);
        let rates = Rates { default: Some(rate), tools: vec![] };
        let buckets = Buckets::with_max(rates, max);
        Crowd { seed, dice, now: birth(), rate, buckets, max, let_through: BTreeMap::new() }
    }

    fn run(mut self) {
        for _ in 0..400 {
            self.now += ms(self.dice.pick(&[0, 0, 0, 1, 17, 100, 1_000, 20_000]));
            let (who, tool) = (self.dice.below(3), self.dice.below(3));
            match self.buckets.take(&who.to_string(), &tool.to_string(), self.now) {
                Ok(()) => self.let_through.entry((who, tool)).or_default().push(self.now),
                Err(wait) => {
                    assert!(!wait.retry_after.is_zero(), "seed {}: refused, and told to come at once", self.seed);
                    // If there is room for all buckets, the reported wait is exact.
                    if self.max > 9 && self.dice.one_in(3) {
                        self.now += wait.retry_after;
                        let said = self.buckets.take(&who.to_string(), &tool.to_string(), self.now);
                        assert_eq!(said, Ok(()), "seed {}", self.seed);
                        self.let_through.entry((who, tool)).or_default().push(self.now);
                    }
                }
            }
            assert!(self.buckets.len() <= self.max, "seed {}", self.seed);
        }
        for times in self.let_through.values() {
            self.judge(times);
        }
    }

    /// In any period: at most the burst, and the tokens that were added meanwhile.
    fn judge(&self, times: &[Instant]) {
        for (first, from) in times.iter().enumerate() {
            for (last, to) in times.iter().enumerate().skip(first) {
                let nanos = (*to - *from).as_nanos() * u128::from(self.rate.per_minute);
                let most = u128::from(self.rate.burst) + nanos / 60_000_000_000;
                assert!(
                    ((last - first) as u128) < most,
                    "seed {}: {} in {:?}",
                    self.seed,
                    last - first + 1,
                    *to - *from
                );
            }
        }
    }
}

#[test]
fn a_half_open_circuit_passes_exactly_one_call() {
    for seed in 0..2_000 {
        Circuitry::new(seed).run();
    }
}

struct Circuitry {
    seed: u64,
    dice: Dice,
    now: Instant,
    breaker: Breaker,
    failures_max: u32,
    open_for: Duration,
    /// Calls that were let through and have not ended, and whether each is a probe.
    out: Vec<(Pass, bool)>,
}

impl Circuitry {
    fn new(seed: u64) -> Circuitry {
        let mut dice = Dice::new(seed);
        let (failures_max, open_for) = (dice.pick(&[1, 2, 5]), ms(dice.pick(&[1, 500, 30_000])));
        let breaker = Breaker::new(failures_max, open_for);
        Circuitry { seed, dice, now: birth(), breaker, failures_max, open_for, out: vec![] }
    }

    fn run(mut self) {
        for _ in 0..200 {
            self.now += ms(self.dice.pick(&[0, 0, 1, 400, 10_000]));
            if self.dice.one_in(2) {
                self.call();
            } else if !self.out.is_empty() {
                self.end_one();
            }
            let probes = self.out.iter().filter(|(_, is_probe)| *is_probe).count();
            let half_open = self.breaker.state() == Circuit::HalfOpen;
            assert_eq!(probes, usize::from(half_open), "seed {}: {probes} probes", self.seed);
        }
        // In any state: after all calls have ended and time has passed, one successful call closes it.
        while !self.out.is_empty() {
            self.end_one();
        }
        self.now += self.open_for;
        let pass = self.breaker.ask(self.now).expect("a circuit is never open for ever");
        self.breaker.heard(pass, Health::Well, self.now);
        assert_eq!(self.breaker.state(), Circuit::Closed { failures: 0 }, "seed {}", self.seed);
    }

    fn call(&mut self) {
        let before = self.breaker.state();
        let said = self.breaker.ask(self.now);
        match before {
            Circuit::Closed { .. } => assert!(said.is_ok(), "seed {}", self.seed),
            Circuit::Open { until } => assert_eq!(said.is_ok(), self.now >= until, "seed {}", self.seed),
            Circuit::HalfOpen => assert!(said.is_err(), "seed {}: a second probe", self.seed),
        }
        if let Ok(pass) = said {
            self.out.push((pass, !matches!(before, Circuit::Closed { .. })));
        }
    }

    fn end_one(&mut self) {
        let index = self.dice.below(self.out.len() as u64) as usize;
        let (pass, is_probe) = self.out.swap_remove(index);
        let health = self.dice.pick(&[Health::Well, Health::Ill, Health::Ill, Health::Unknown]);
        let before = self.breaker.state();
        let opened = self.breaker.heard(pass, health, self.now);
        match (before, is_probe) {
            (Circuit::Closed { failures }, false) if opened => {
                assert!(health == Health::Ill && failures + 1 >= self.failures_max, "seed {}", self.seed);
            }
            (_, true) => assert_eq!(opened, health == Health::Ill, "seed {}: a probe decides", self.seed),
            _ => assert!(!opened, "seed {}: old news opened it", self.seed),
        }
        if !matches!(before, Circuit::Closed { .. }) && !is_probe {
            assert_eq!(self.breaker.state(), before, "seed {}: old news changed it", self.seed);
        }
        if opened {
            assert_eq!(self.breaker.state(), Circuit::Open { until: self.now + self.open_for }, "seed {}", self.seed);
        }
    }
}
