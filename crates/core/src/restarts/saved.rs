//! The restart history of a slot as saved state. The policy is not part of it: the program that restores it has its own.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Count, Occupancy, Past, Policy, Restarts, SplitMix, State};
use crate::{
    exit::{Cause, How},
    saved::Moment,
};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    dice: u64,
    recent: Vec<SavedPast>,
    occupancy: SavedOccupancy,
    crashes: u32,
    first_crash: Option<Moment>,
    first_was_free: bool,
    state: State,
    restarts: u32,
    any_started: bool,
    last_requested: Option<Moment>,
}

/// One earlier end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SavedPast {
    how: How,
    cause: Cause,
    at: Moment,
    uptime: Duration,
    counted: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SavedOccupancy {
    Empty { requested: bool },
    Taken { since: Moment, ready: Option<Moment> },
}

impl Past {
    pub fn save(&self, now: Instant) -> SavedPast {
        SavedPast {
            how: self.how.clone(),
            cause: self.cause,
            at: Moment::of(self.at, now),
            uptime: self.uptime,
            counted: self.counted,
        }
    }
}

impl SavedPast {
    pub fn restore(self, now: Instant) -> Past {
        Past { how: self.how, cause: self.cause, at: self.at.at(now), uptime: self.uptime, counted: self.counted }
    }
}

impl Restarts {
    pub fn save(&self, now: Instant) -> Saved {
        let moment = |at: Instant| Moment::of(at, now);
        Saved {
            dice: self.dice.0,
            recent: self.recent.iter().map(|past| past.save(now)).collect(),
            occupancy: match self.occupancy {
                Occupancy::Empty { requested } => SavedOccupancy::Empty { requested },
                Occupancy::Taken { since, ready } => {
                    SavedOccupancy::Taken { since: moment(since), ready: ready.map(moment) }
                }
            },
            crashes: self.count.crashes,
            first_crash: self.count.first_at.map(moment),
            first_was_free: self.count.first_was_free,
            state: self.count.state,
            restarts: self.restarts,
            any_started: self.any_started,
            last_requested: self.last_requested.map(moment),
        }
    }

    pub fn restore(policy: Policy, saved: Saved, now: Instant) -> Restarts {
        let at = |moment: Moment| moment.at(now);
        Restarts {
            policy,
            dice: SplitMix(saved.dice),
            recent: saved.recent.into_iter().map(|past| past.restore(now)).collect(),
            occupancy: match saved.occupancy {
                SavedOccupancy::Empty { requested } => Occupancy::Empty { requested },
                SavedOccupancy::Taken { since, ready } => Occupancy::Taken { since: at(since), ready: ready.map(at) },
            },
            count: Count {
                crashes: saved.crashes,
                first_at: saved.first_crash.map(at),
                first_was_free: saved.first_was_free,
                state: saved.state,
            },
            restarts: saved.restarts,
            any_started: saved.any_started,
            last_requested: saved.last_requested.map(at),
        }
    }
}
