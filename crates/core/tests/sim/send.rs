//! Agents that are slow, ignore input or have exited, and people who type, around `Sends`.

use std::collections::BTreeSet;
use std::time::Instant;

use outlast_core::agent::Kind;
use outlast_core::composer::Seen;
use outlast_core::send::{Action, Letter, Sends, Source};

use crate::{Dice, birth, ms};

#[test]
fn every_text_is_answered_once_and_reported_as_sent_only_if_it_was() {
    let received: usize = (0..1_000).map(|seed| World::new(seed).run()).sum();
    assert!(received > 2_000, "only {received} texts arrived in all these worlds");
}

/// A simple codex: its composer holds the pasted text until Enter.
struct World {
    seed: u64,
    dice: Dice,
    now: Instant,
    sends: Sends,
    is_up: bool,
    is_covered: bool,
    draft: String,
    /// The draft contains text that a person typed.
    is_persons: bool,
    received: Vec<String>,
    /// Turns that the agent has not recorded yet.
    unrecorded: Vec<String>,
    waiting: BTreeSet<u64>,
    tickets: u64,
}

impl World {
    fn new(seed: u64) -> World {
        World {
            seed,
            dice: Dice::new(seed),
            now: birth(),
            sends: Sends::new(Kind::Codex, None),
            is_up: true,
            is_covered: false,
            draft: String::new(),
            is_persons: false,
            received: Vec::new(),
            unrecorded: Vec::new(),
            waiting: BTreeSet::new(),
            tickets: 0,
        }
    }

    /// Returns how many texts arrived.
    fn run(mut self) -> usize {
        for _ in 0..200 {
            self.step();
            // The deadline is never in the past again and again.
            self.look();
            if let Some(at) = self.sends.deadline() {
                assert!(at > self.now, "seed {}: it would look without end", self.seed);
            }
        }
        let actions = self.sends.is_over();
        self.act(actions);
        assert!(self.waiting.is_empty(), "seed {}: {:?} were never answered", self.seed, self.waiting);
        self.received.len()
    }

    fn step(&mut self) {
        match self.dice.below(14) {
            0 | 1 => {
                self.tickets += 1;
                let ticket = self.tickets;
                let letter = Letter {
                    text: format!("text number {ticket} of this world"),
                    submit: !self.dice.one_in(6),
                    patience: ms(self.dice.below(40_000)),
                    key: self.dice.one_in(3).then(|| format!("key {ticket}")),
                };
                self.waiting.insert(ticket);
                let actions = self.sends.asked(ticket, letter, self.now);
                self.act(actions);
            }
            2 if self.dice.one_in(4) => {
                self.is_up = false;
                (self.draft, self.is_persons) = (String::new(), false);
                let actions = self.sends.agent_ended();
                self.act(actions);
            }
            3 => self.is_up = true,
            4 => self.is_covered = self.dice.one_in(3),
            5 if self.is_up && self.draft.is_empty() => (self.draft, self.is_persons) = ("a thought".into(), true),
            6 | 7 if self.is_persons => (self.draft, self.is_persons) = (String::new(), false),
            9 | 10 if !self.unrecorded.is_empty() => {
                let text = self.unrecorded.remove(0);
                let actions = self.sends.recorded(&text, Source::Rollout, self.now);
                self.act(actions);
            }
            8 => self.now = self.sends.deadline().unwrap_or(self.now).max(self.now),
            _ => self.now += ms(self.dice.below(1_500)),
        }
    }

    fn look(&mut self) {
        let line = format!("› {}", self.draft);
        let seen = Seen {
            lines: if self.is_covered { vec!["a dialog".into()] } else { vec![line, String::new()] },
            cursor: (0, 2),
            is_cursor_visible: true,
            takes_pastes: true,
            ..Seen::default()
        };
        let actions = self.sends.look(&seen, self.is_up, self.now);
        self.act(actions);
    }

    fn act(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Type(bytes) => self.typed(&String::from_utf8(bytes).unwrap()),
                Action::AwaitRecord => {}
                Action::Remove(_) => {
                    assert!(self.is_up && !self.is_covered, "seed {}: keys for a dialog", self.seed);
                    if !self.dice.one_in(4) {
                        (self.draft, self.is_persons) = (String::new(), false);
                    }
                }
                Action::Answer { ticket, result } => {
                    assert!(self.waiting.remove(&ticket), "seed {}: {ticket} was answered twice", self.seed);
                    let text = format!("text number {ticket} of this world");
                    let times = self.received.iter().filter(|received| **received == text).count();
                    match result {
                        Ok(sent) if sent.is_submitted() => assert_eq!(times, 1, "seed {}: {text}", self.seed),
                        _ => assert!(times <= 1, "seed {}: {text} was received {times} times", self.seed),
                    }
                }
            }
        }
    }

    fn typed(&mut self, keys: &str) {
        assert!(self.is_up, "seed {}: typed while no agent ran", self.seed);
        match keys.strip_prefix("\x1b[200~").and_then(|rest| rest.strip_suffix("\x1b[201~")) {
            Some(text) => {
                assert!(!self.is_persons && !self.is_covered, "seed {}: typed where something is", self.seed);
                // The agent may ignore the paste.
                if !self.dice.one_in(8) {
                    self.draft.push_str(text);
                }
            }
            None => {
                assert_eq!(keys, "\r");
                assert!(!self.is_covered, "seed {}: Enter for a dialog", self.seed);
                match self.dice.below(9) {
                    _ if self.draft.is_empty() => {}
                    // Enter is ignored, or makes a choice, or does something other than submit.
                    0 | 1 => {}
                    2 => self.draft = "what was chosen instead".into(),
                    3 => self.draft = String::new(),
                    _ => {
                        let text = std::mem::take(&mut self.draft);
                        self.received.push(text.clone());
                        self.unrecorded.extend((!self.dice.one_in(6)).then_some(text));
                    }
                }
            }
        }
    }
}
