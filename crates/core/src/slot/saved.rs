//! A slot as saved state. One whose candidate is on its way cannot be saved: its owner waits until the candidate serves or
//! has failed.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Crashes, Current, Slot, Until};
use crate::{
    restarts::{self, Policy, Restarts},
    saved::Moment,
};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved<K> {
    restarts: restarts::Saved,
    current: SavedCurrent<K>,
    last: Option<K>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SavedCurrent<K> {
    None,
    Fresh(K),
    Replaying(K),
    Serving(K),
    Down { at: Moment },
    GivenUp { crashes: Option<(u32, Option<Duration>)>, until: SavedUntil },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SavedUntil {
    Asked,
    Called,
    At(Moment),
}

impl<K: Copy> Slot<K> {
    /// None while there is a candidate.
    pub fn save(&self, now: Instant) -> Option<Saved<K>> {
        let moment = |at: Instant| Moment::of(at, now);
        let current = match &self.current {
            Current::None => SavedCurrent::None,
            Current::Fresh(child) => SavedCurrent::Fresh(*child),
            Current::Replaying(child) => SavedCurrent::Replaying(*child),
            Current::Serving(child) => SavedCurrent::Serving(*child),
            Current::Down { at } => SavedCurrent::Down { at: moment(*at) },
            Current::GivenUp { crashes, until } => SavedCurrent::GivenUp {
                crashes: crashes.map(|crashes| (crashes.number, crashes.within)),
                until: match until {
                    Until::Asked => SavedUntil::Asked,
                    Until::Called => SavedUntil::Called,
                    Until::At(at) => SavedUntil::At(moment(*at)),
                },
            },
        };
        self.candidate.is_none().then(|| Saved { restarts: self.restarts.save(now), current, last: self.last })
    }

    pub fn restore(policy: Policy, saved: Saved<K>, now: Instant) -> Slot<K> {
        let current = match saved.current {
            SavedCurrent::None => Current::None,
            SavedCurrent::Fresh(child) => Current::Fresh(child),
            SavedCurrent::Replaying(child) => Current::Replaying(child),
            SavedCurrent::Serving(child) => Current::Serving(child),
            SavedCurrent::Down { at } => Current::Down { at: at.at(now) },
            SavedCurrent::GivenUp { crashes, until } => Current::GivenUp {
                crashes: crashes.map(|(number, within)| Crashes { number, within }),
                until: match until {
                    SavedUntil::Asked => Until::Asked,
                    SavedUntil::Called => Until::Called,
                    SavedUntil::At(at) => Until::At(at.at(now)),
                },
            },
        };
        Slot { restarts: Restarts::restore(policy, saved.restarts, now), current, candidate: None, last: saved.last }
    }
}
