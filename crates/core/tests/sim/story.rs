//! The trace of a world that failed. Writing it costs more than the world, so a world is played with it only after it
//! failed without.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    time::Duration,
};

/// Lines that are kept; the oldest are dropped.
const LINES_MAX: usize = 1_000;
/// Characters of one line.
const LINE_MAX: usize = 420;

#[derive(Default)]
pub(crate) struct Story {
    lines: VecDeque<String>,
    is_told: bool,
}

impl Story {
    pub(crate) fn tell(&mut self, at: Duration, mark: &str, what: &impl std::fmt::Debug) {
        if !self.is_told {
            return;
        }
        if self.lines.len() == LINES_MAX {
            self.lines.pop_front();
        }
        let words: String = format!("{what:?}").replace("\\\"", "\"").chars().take(LINE_MAX).collect();
        self.lines.push_back(format!("{:>8} {mark} {words}", at.as_millis()));
    }
}

/// A world that a seed repeats.
pub(crate) trait Played {
    fn new(seed: u64) -> Self;
    fn story(&mut self) -> &mut Story;
    /// Panics if a promise is broken.
    fn run(&mut self);
}

/// Plays the world of a seed. A failure prints the trace that led to it, and how to repeat it.
pub(crate) fn play<W: Played>(seed: u64) {
    let Err(panic) = catch_unwind(|| W::new(seed).run()) else { return };
    let mut again = W::new(seed);
    again.story().is_told = true;
    let outcome = catch_unwind(AssertUnwindSafe(|| again.run()));
    eprintln!("{}", again.story().lines.make_contiguous().join("\n"));
    eprintln!("seed {seed} fails; again: OUTLAST_SEED_FROM={seed} OUTLAST_SEEDS=1");
    assert!(outcome.is_err(), "seed {seed} fails only sometimes: the world does not depend on its seed alone");
    resume_unwind(panic);
}
