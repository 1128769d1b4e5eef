//! What is known of a waiting agent, and the requests that wait, as saved state. Settings are not part of it.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Condition, Turn, Waiter, Waiting};
use crate::{saved::Moment, stance::Stance};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    is_running: bool,
    has_written: bool,
    last_output: Moment,
    last_input: Option<(Moment, bool)>,
    look_at: Option<Moment>,
    candidate: Option<(Stance, Moment)>,
    stance: Stance,
    is_waiting: bool,
    is_settled: bool,
    is_in_turn: bool,
    has_reports: bool,
    has_entered: bool,
    has_hung: bool,
    turn: Turn,
    waiters: Vec<SavedWaiter>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SavedWaiter {
    ticket: u64,
    #[serde(rename = "wish")]
    condition: Condition,
    until: Option<Moment>,
}

impl Waiting {
    pub fn save(&self, now: Instant) -> Saved {
        let moment = |at: Instant| Moment::of(at, now);
        Saved {
            is_running: self.is_running,
            has_written: self.has_written,
            last_output: moment(self.last_output),
            last_input: self.last_input.map(|(at, enter)| (moment(at), enter)),
            look_at: self.look_at.map(moment),
            candidate: self.candidate.map(|(stance, at)| (stance, moment(at))),
            stance: self.stance,
            is_waiting: self.is_waiting,
            is_settled: self.is_settled,
            is_in_turn: self.is_in_turn,
            has_reports: self.has_reports,
            has_entered: self.has_entered,
            has_hung: self.has_hung,
            turn: self.turn,
            waiters: self
                .waiters
                .iter()
                .map(|waiter| SavedWaiter {
                    ticket: waiter.ticket,
                    condition: waiter.condition.clone(),
                    until: waiter.until.map(moment),
                })
                .collect(),
        }
    }

    /// The first two arguments are those of [`Waiting::new`].
    pub fn restore(reads_screen: bool, hang_after: Option<Duration>, saved: Saved, now: Instant) -> Waiting {
        let at = |moment: Moment| moment.at(now);
        Waiting {
            reads_screen,
            hang_after,
            is_running: saved.is_running,
            has_written: saved.has_written,
            last_output: at(saved.last_output),
            last_input: saved.last_input.map(|(moment, enter)| (at(moment), enter)),
            look_at: saved.look_at.map(at),
            candidate: saved.candidate.map(|(stance, moment)| (stance, at(moment))),
            stance: saved.stance,
            is_waiting: saved.is_waiting,
            is_settled: saved.is_settled,
            is_in_turn: saved.is_in_turn,
            has_reports: saved.has_reports,
            has_entered: saved.has_entered,
            has_hung: saved.has_hung,
            turn: saved.turn,
            waiters: saved
                .waiters
                .into_iter()
                .map(|waiter| Waiter {
                    ticket: waiter.ticket,
                    condition: waiter.condition,
                    until: waiter.until.map(at),
                })
                .collect(),
        }
    }
}
