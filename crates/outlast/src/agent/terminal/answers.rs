//! The agent's answers: when a turn is over, its last answer comes from the agent's hook or from its own file, and goes into
//! events. What a line of a file means is decided in core (`turn_record`).

use outlast_core::{turn_record, waiting};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Terminal, limits::tail_of};

/// A longer answer is cut in events.
const ANSWER_MAX: usize = 64 << 10;
/// The end of the agent's file that is searched.
const TAIL_MAX: u64 = 2 << 20;

/// The answer to the last turn. It is written to a saved state as it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Answers {
    last: Option<Answer>,
    /// The agent has not been seen to wait since.
    is_new: bool,
    /// What a hook reported of the turn that ends.
    reported: Option<Answer>,
    /// The record of the last answer that was found in a file.
    record: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Answer {
    text: String,
    /// Of the whole answer.
    bytes: usize,
}

impl Answer {
    fn new(mut text: String, bytes: usize) -> Answer {
        let cut = (0..=ANSWER_MAX.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(cut);
        Answer { text, bytes }
    }
}

impl Answers {
    pub(super) fn reported(&mut self, text: Option<String>, bytes: usize) {
        self.reported = text.map(|text| Answer::new(text, bytes));
    }

    /// The members of an event or a result that tell the answer to the last turn.
    pub(super) fn add_to(&self, about: &mut Value) {
        if let Some(answer) = &self.last {
            about["answer"] = answer.text.as_str().into();
            about["answer_bytes"] = answer.bytes.into();
        }
    }

    /// The same, once for each answer.
    pub(super) fn add_new_to(&mut self, about: &mut Value) {
        if std::mem::take(&mut self.is_new) {
            self.add_to(about);
        }
    }
}

impl Terminal {
    /// A turn is over. `is_reported`: by the agent's hooks.
    pub(super) fn turn_ended(&mut self, is_reported: bool) {
        let found = self.turn_files().iter().find_map(|file| {
            let tail = tail_of(file, TAIL_MAX)?;
            turn_record::answer(self.agent.kind(), tail.split(|byte| *byte == b'\n'))
        });
        let record = found.as_ref().map(|answer| answer.record.clone());
        // Enter may have run a command of the agent, or chosen from a menu.
        let is_turn = is_reported || !self.agent.has_files() || (record.is_some() && record != self.answers.record);
        if is_turn {
            let from_file = found.map(|answer| Answer::new(answer.text.clone(), answer.text.len()));
            self.answers.last = self.answers.reported.take().or(from_file);
            self.answers.record = record;
            self.answers.is_new = true;
        }
        self.watch(waiting::Event::AnswerKnown);
        if is_turn {
            self.journal.event("turn_ended", &[]);
            let mut about = json!({"answer": null});
            self.answers.add_to(&mut about);
            self.notify("turn_ended", about, false);
        }
    }
}
