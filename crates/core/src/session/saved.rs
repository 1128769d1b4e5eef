//! A session as saved state, so that another program can continue with its agent. The policy is not part of it; a start or a
//! stop that is under way is not saved, but waited for.

use std::{fmt, time::Instant};

use serde::{Deserialize, Serialize};

use super::{Mode, Phase, Session};
use crate::{
    exit::How,
    restarts::{Policy, State as Health},
    saved::Moment,
    slot::{self, Slot},
};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    slot: slot::Saved<u32>,
    has_terminal: bool,
    phase: SavedPhase,
    next_mode: Mode,
    last_code: u8,
    last_exit: Option<How>,
    has_run: bool,
    keeps_conversation: bool,
    health: Health,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SavedPhase {
    Running { mode: Mode },
    Asking { ask_at: Option<Moment> },
    Away,
}

/// Why a session cannot be saved now. `Display` completes the sentence "... because".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Busy {
    Starting,
    Stopping,
    Ending,
}

impl fmt::Display for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Busy::Starting => "the agent is being started",
            Busy::Stopping => "the agent is being stopped",
            Busy::Ending => "the session is ending",
        })
    }
}

impl Session {
    /// Why it cannot be saved now.
    pub fn busy(&self) -> Option<Busy> {
        match self.phase {
            Phase::Starting { .. } => Some(Busy::Starting),
            Phase::Running { wish: Some(_), .. } => Some(Busy::Stopping),
            Phase::Over => Some(Busy::Ending),
            Phase::Running { wish: None, .. } | Phase::Asking { .. } | Phase::Away => None,
        }
    }

    pub fn save(&self, now: Instant) -> Result<Saved, Busy> {
        if let Some(busy) = self.busy() {
            return Err(busy);
        }
        let phase = match self.phase {
            Phase::Running { mode, .. } => SavedPhase::Running { mode },
            Phase::Asking { ask_at } => SavedPhase::Asking { ask_at: ask_at.map(|at| Moment::of(at, now)) },
            Phase::Away => SavedPhase::Away,
            Phase::Starting { .. } | Phase::Over => return Err(Busy::Starting),
        };
        Ok(Saved {
            // An agent has no candidate: the next one starts when the last one has ended.
            slot: self.slot.save(now).ok_or(Busy::Starting)?,
            has_terminal: self.has_terminal,
            phase,
            next_mode: self.next_mode,
            last_code: self.last_code,
            last_exit: self.last_exit.clone(),
            has_run: self.has_run,
            keeps_conversation: self.keeps_conversation,
            health: self.health,
        })
    }

    pub fn restore(policy: Policy, saved: Saved, now: Instant) -> Session {
        Session {
            slot: Slot::restore(policy, saved.slot, now),
            has_terminal: saved.has_terminal,
            phase: match saved.phase {
                SavedPhase::Running { mode } => Phase::Running { mode, wish: None },
                SavedPhase::Asking { ask_at } => Phase::Asking { ask_at: ask_at.map(|at| at.at(now)) },
                SavedPhase::Away => Phase::Away,
            },
            // Requests are answered at a start, and none is under way.
            tickets: Vec::new(),
            old_pid: None,
            next_mode: saved.next_mode,
            last_code: saved.last_code,
            last_exit: saved.last_exit,
            has_run: saved.has_run,
            keeps_conversation: saved.keeps_conversation,
            health: saved.health,
        }
    }
}
