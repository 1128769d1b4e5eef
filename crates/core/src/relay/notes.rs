//! What the relay noticed and people may want to know: the last notes, and counts of dropped messages.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// How many notes are kept; the oldest is forgotten first.
const NOTES_MAX: usize = 10;

/// For `noted` in `server_status`.
#[derive(Debug, Default)]
pub(super) struct Notes(VecDeque<String>);

impl Notes {
    /// False if it is the same as the last one.
    pub(super) fn push(&mut self, text: &str) -> bool {
        if self.0.back().is_some_and(|last| last == text) {
            return false;
        }
        self.0.push_back(text.to_owned());
        if self.0.len() > NOTES_MAX {
            self.0.pop_front();
        }
        true
    }

    pub(super) fn restore(notes: VecDeque<String>) -> Notes {
        Notes(notes)
    }

    pub(super) fn to_vec(&self) -> Vec<String> {
        self.0.iter().cloned().collect()
    }
}

/// Messages that were not forwarded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dropped {
    pub from_server: u64,
    pub from_client: u64,
    /// Of those from a server, the lines that went to stderr instead.
    pub not_json: u64,
}
