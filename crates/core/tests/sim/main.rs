//! Seeded worlds around the machines: each owns time and random numbers, and checks its invariants after every step.

mod cluster;
mod cluster_streams;
mod front;
mod gateway;
mod guard;
mod http;
mod joined;
mod kernel;
mod life;
mod limit;
mod mcp_server;
mod relay;
mod restarts;
mod send;
mod session;
mod story;
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

/// A failure prints the story that led to it.
macro_rules! check {
    ($world:expr, $holds:expr, $($words:tt)+) => {
        match $holds {
            true => {}
            false => $world.fail(&format!($($words)+)),
        }
    };
}
use check;

/// Random numbers that a seed repeats.
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

/// Whether another program continues with the machine of a world, now and then.
#[derive(Default)]
struct Upgrades {
    dice: Option<Dice>,
    count: u64,
}

impl Upgrades {
    /// With dice of its own, so that the world is the same with and without upgrades.
    fn at_any_moment(seed: u64) -> Upgrades {
        Upgrades { dice: Some(Dice::new(seed ^ 0x5eed_0003)), count: 0 }
    }

    /// What the next program reads of this state, if it is to continue now.
    fn take_over<T>(&mut self, save: impl FnOnce() -> Option<T>) -> Option<T>
    where
        T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug,
    {
        if !self.dice.as_mut()?.one_in(3) {
            return None;
        }
        let saved = save()?;
        self.count += 1;
        let text = serde_json::to_string(&saved).expect("a state is JSON");
        let read = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"));
        assert_eq!(saved, read);
        Some(read)
    }
}

/// The first seed and the number of seeds, by `OUTLAST_SEED_FROM` and `OUTLAST_SEEDS`.
fn seeds(default: u64) -> (u64, u64) {
    let number = |name: &str, default: u64| match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")),
        Err(_) => default,
    };
    (number("OUTLAST_SEED_FROM", 0), number("OUTLAST_SEEDS", default))
}
