//! Seeded worlds around the machines: each owns time and dice, and checks its promises after every step.

mod gateway;
mod guard;
mod life;
mod relay;
mod restarts;
mod send;
mod session;
mod terminal;
mod waiting;

use std::time::{Duration, Instant};

#[expect(clippy::disallowed_methods, reason = "a world needs some instant to count from")]
fn birth() -> Instant {
    Instant::now()
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Chance that a seed repeats.
struct Dice(u64);

impl Dice {
    fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Below `n`, by xorshift.
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize].clone()
    }
}
