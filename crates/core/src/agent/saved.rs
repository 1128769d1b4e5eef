//! What is known of an agent and its conversation, as saved state. Its command line and its profile are not part of it.

use serde::{Deserialize, Serialize};

use super::{Agent, Kept, Prompt};
use crate::saved::Octets;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    conversation: Option<String>,
    starts: u32,
    kept: Kept,
    /// The arguments of its command line that are known to be the initial prompt, by their places.
    prompts: Vec<usize>,
}

/// A search for the prompt that is not over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SavedPrompt {
    seen: usize,
    tail: Octets,
}

impl Agent {
    pub fn save(&self) -> Saved {
        Saved {
            conversation: self.conversation.clone(),
            starts: self.starts,
            kept: self.kept,
            prompts: self.line.prompts(),
        }
    }

    /// Continues with what the last program knew of the same agent.
    pub fn restore(&mut self, saved: Saved) {
        self.conversation = saved.conversation;
        self.starts = saved.starts;
        self.kept = saved.kept;
        self.line.set_prompts(&saved.prompts);
    }

    /// The search for the prompt, from where the last program was.
    pub fn prompt_again(&self, saved: SavedPrompt) -> Prompt {
        let new = self.prompt();
        Prompt { seen: saved.seen.min(new.signs.len()), tail: saved.tail.bytes().to_vec(), ..new }
    }
}

impl Prompt {
    pub fn save(&self) -> SavedPrompt {
        SavedPrompt { seen: self.seen, tail: Octets::of(&self.tail) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        agent::{Kind, Profile},
        session::Mode,
    };

    #[test]
    fn the_next_program_knows_the_conversation_and_the_prompt_that_was_sent() {
        let words = ["fast", "deploy"].map(str::to_owned);
        let new = || Agent::new("./wrap.sh", &words, Profile::Named(Kind::Claude));
        let mut agent = new();
        agent.start(Mode::Fresh, "0b6f4a3e-0000-4000-8000-000000000001", None);
        agent.took_turn("deploy");
        let text = serde_json::to_string(&agent.save()).unwrap();
        let mut again = new();
        again.restore(serde_json::from_str(&text).unwrap());
        assert_eq!(again.save(), agent.save());
        let next = again.start(Mode::Continue, "unused", None);
        assert_eq!(next, agent.start(Mode::Continue, "unused", None));
        assert!(!next.args.contains(&"deploy".to_owned()), "{next:?}");
    }

    #[test]
    fn a_prompt_that_is_half_seen_is_found() {
        let agent = Agent::new("claude", &[], Profile::ByName);
        let signs = "\x1b[?2004h text ❯".as_bytes();
        for cut in 1..signs.len() {
            let mut prompt = agent.prompt();
            assert!(!prompt.is_in(&signs[..cut]));
            let mut again = agent.prompt_again(prompt.save());
            assert!(again.is_in(&signs[cut..]), "cut at {cut}");
        }
    }
}
