//! The text that makes an agent continue with a turn that a crash interrupted. It decides whether the text is to be sent; the
//! driver sends it, and the crash policy bounds how often an agent is started again.

use serde::{Deserialize, Serialize};

use crate::session::{Class, Mode};

/// How often the text is sent if the agent does not take it: one that has just started may drop keys.
pub const TRIES_MAX: u32 = 5;

#[derive(Clone, Debug, Default)]
pub struct OnResume {
    text: Option<String>,
    /// A turn was interrupted, and the agent was not told to continue yet.
    is_owed: bool,
    /// How often the agent did not take it.
    failures: u32,
}

/// The same as saved state; the text is a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    is_owed: bool,
    failures: u32,
}

impl OnResume {
    pub fn save(&self) -> Saved {
        Saved { is_owed: self.is_owed, failures: self.failures }
    }

    /// Continues where the last program was.
    pub fn go_on(&mut self, saved: Saved) {
        (self.is_owed, self.failures) = (saved.is_owed && self.is_wanted(), saved.failures);
    }

    /// Without a text nothing is ever sent.
    pub fn new(text: Option<String>) -> OnResume {
        OnResume { text, is_owed: false, failures: 0 }
    }

    pub fn is_wanted(&self) -> bool {
        self.text.is_some()
    }

    /// A turn was interrupted, and the agent was not told yet.
    pub fn is_owed(&self) -> bool {
        self.is_owed
    }

    /// outlast itself ended during a turn, and the session continues.
    pub fn was_interrupted(&mut self) {
        self.is_owed = self.is_wanted();
    }

    /// An agent exited. `was_at_work`: during a turn.
    pub fn agent_ended(&mut self, class: Class, was_at_work: bool) {
        match class {
            Class::Transient | Class::Flapping | Class::Halted => self.is_owed |= was_at_work && self.is_wanted(),
            // A person or a program ended it on purpose.
            Class::Asked | Class::Clean | Class::User => self.is_owed = false,
        }
    }

    /// A new conversation has no turn to continue with.
    pub fn agent_started(&mut self, mode: Mode) {
        self.is_owed &= mode == Mode::Continue;
        self.failures = 0;
    }

    /// A turn was submitted, by a person or a program.
    pub fn turn_began(&mut self) {
        self.is_owed = false;
    }

    /// The text was not submitted, and is not in the input field any more. False if it was tried often enough.
    pub fn failed(&mut self) -> bool {
        self.failures += 1;
        self.is_owed = self.is_wanted() && self.failures < TRIES_MAX;
        self.is_owed
    }

    /// The agent waits at its prompt: the text to send, once.
    pub fn waits(&mut self) -> Option<String> {
        std::mem::take(&mut self.is_owed).then(|| self.text.clone()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    enum Step {
        Ended(Class, bool),
        Started(Mode),
        Turn,
        Interrupted,
    }

    #[test]
    fn the_text_is_due_once_for_each_turn_that_a_crash_interrupted() {
        use Class::*;
        use Mode::*;
        use Step::*;
        #[rustfmt::skip]
        let table: [(&[Step], bool); 13] = [
            (&[Ended(Transient, true),  Started(Continue)],                                        true),
            (&[Ended(Flapping, true),   Started(Continue)],                                        true),
            // After `outlast resume`.
            (&[Ended(Halted, true),     Started(Continue)],                                        true),
            (&[Ended(Transient, false), Started(Continue)],                                        false),
            (&[Ended(Asked, true),      Started(Continue)],                                        false),
            (&[Ended(User, true),       Started(Continue)],                                        false),
            (&[Ended(Clean, true),      Started(Continue)],                                        false),
            (&[Ended(Transient, true),  Started(Fresh)],                                           false),
            // The next agent crashes before it could be told.
            (&[Ended(Transient, true),  Started(Continue), Ended(Transient, false), Started(Continue)], true),
            (&[Ended(Transient, true),  Started(Continue), Turn],                                  false),
            (&[Ended(Transient, true),  Started(Continue), Ended(Asked, false), Started(Continue)], false),
            (&[Interrupted,             Started(Continue)],                                        true),
            (&[Started(Fresh)],                                                                    false),
        ];
        for (number, (steps, expected)) in table.iter().enumerate() {
            for text in [Some("go on".to_owned()), None] {
                let mut owed = OnResume::new(text.clone());
                for step in *steps {
                    match step {
                        Ended(class, was_at_work) => owed.agent_ended(*class, *was_at_work),
                        Started(mode) => owed.agent_started(*mode),
                        Turn => owed.turn_began(),
                        Interrupted => owed.was_interrupted(),
                    }
                }
                assert_eq!(owed.waits(), text.filter(|_| *expected), "row {number}");
                assert_eq!(owed.waits(), None, "row {number}: once");
            }
        }
    }

    #[test]
    fn a_text_that_the_agent_did_not_accept_is_repeated_a_limited_number_of_times() {
        let mut owed = OnResume::new(Some("go on".to_owned()));
        owed.agent_ended(Class::Transient, true);
        owed.agent_started(Mode::Continue);
        let mut sent = 0;
        while owed.waits().is_some() {
            sent += 1;
            owed.failed();
        }
        assert_eq!(sent, TRIES_MAX);
        assert!(!OnResume::new(None).failed());
    }
}
