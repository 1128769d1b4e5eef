//! A usage limit as saved state. What is to happen at a limit is a setting, and not part of it.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::{Limit, OnLimit, ShownNotice, State};
use crate::saved::Moment;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    state: SavedState,
    is_running: bool,
    is_armed: bool,
    is_sending: bool,
    look_at: Option<Moment>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SavedState {
    Free,
    Limited { seen: ShownNotice, due: Option<i64>, tries: u32 },
    Continuing { seen: ShownNotice, tries: u32, until: Moment, is_submitted: bool },
}

impl Limit {
    pub fn save(&self, now: Instant) -> Saved {
        let state = match self.state.clone() {
            State::Free => SavedState::Free,
            State::Limited { seen, due, tries } => SavedState::Limited { seen, due, tries },
            State::Continuing { seen, tries, until, is_submitted } => {
                SavedState::Continuing { seen, tries, until: Moment::of(until, now), is_submitted }
            }
        };
        Saved {
            state,
            is_running: self.is_running,
            is_armed: self.is_armed,
            is_sending: self.is_sending,
            look_at: self.look_at.map(|at| Moment::of(at, now)),
        }
    }

    pub fn restore(on_limit: OnLimit, saved: Saved, now: Instant) -> Limit {
        let state = match saved.state {
            SavedState::Free => State::Free,
            SavedState::Limited { seen, due, tries } => State::Limited { seen, due, tries },
            SavedState::Continuing { seen, tries, until, is_submitted } => {
                State::Continuing { seen, tries, until: until.at(now), is_submitted }
            }
        };
        Limit {
            on_limit,
            state,
            is_running: saved.is_running,
            is_armed: saved.is_armed,
            is_sending: saved.is_sending,
            look_at: saved.look_at.map(|at| at.at(now)),
        }
    }
}
