//! The texts that were sent with a key, as saved state, so that the next program does not send them again. A text that is
//! being sent is not saved, but waited for.

use serde::{Deserialize, Serialize};

use super::{Sends, Sent};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    remembered: Vec<(String, Sent)>,
}

impl Sends {
    /// `None` while a text is being sent.
    pub fn save(&self) -> Option<Saved> {
        let saved = Saved { remembered: self.remembered.iter().cloned().collect() };
        (!self.is_busy()).then_some(saved)
    }

    /// Continues with what the last program remembered.
    pub fn go_on(&mut self, saved: Saved) {
        self.remembered = saved.remembered.into();
    }
}
