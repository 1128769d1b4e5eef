//! Numbers for calls, links and all else that needs one, and random numbers from the seed of this run.
//! It does not know what a number is used for.

use std::collections::BTreeMap;

use super::{saved::SavedIds, slots::SlotKey};
use crate::restarts::SplitMix;

#[derive(Debug)]
pub(super) struct Ids {
    next: u64,
    seed: SplitMix,
    /// How many links there were in slots that were removed and may be made again.
    generations: BTreeMap<SlotKey, u64>,
}

impl Ids {
    pub(super) fn new(seed: u64) -> Ids {
        Ids { next: 1, seed: SplitMix(seed), generations: BTreeMap::new() }
    }

    pub(super) fn save(&self) -> SavedIds {
        SavedIds {
            next: self.next,
            seed: self.seed.0,
            generations: self.generations.iter().map(|(key, generation)| (*key, *generation)).collect(),
        }
    }

    pub(super) fn restore(saved: SavedIds) -> Ids {
        Ids { next: saved.next, seed: SplitMix(saved.seed), generations: saved.generations.into_iter().collect() }
    }

    /// Numbers from here on, so that they differ from those of another machine.
    pub(super) fn begin_at(&mut self, first: u64) {
        self.next = self.next.max(first);
    }

    /// A number that was not given before.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// The number that will be given next.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// How many links a slot had before it was removed.
    pub(super) fn generation(&mut self, key: SlotKey) -> u64 {
        self.generations.remove(&key).unwrap_or(0)
    }

    pub(super) fn keep_generation(&mut self, key: SlotKey, generation: u64) {
        self.generations.insert(key, generation);
    }

    /// The seed of a new slot's restart policy.
    pub(super) fn slot_seed(&mut self) -> u64 {
        self.seed.0 ^ self.number().wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// It is not for secrets: a client that guesses a `requestState` still needs the name of the client that it belongs to.
    pub(super) fn random(&mut self) -> u64 {
        self.seed.next()
    }
}
