//! Which lines of an agent's history a terminal has in its own scrollback already, so that a viewer that attaches again is not
//! shown them twice. Lines are compared by hash; the screen itself is not kept here.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// Terminals that are remembered; above it the one that detached longest ago is forgotten and gets the whole history
/// again.
pub const TERMINALS_MAX: usize = 16;

/// Lines as hashes: those that have left the screen at its top, the oldest first, and those on the screen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownLines {
    pub history: Vec<u64>,
    pub screen: Vec<u64>,
}

#[derive(Clone, Debug, Default)]
pub struct SeenLines {
    /// The last one is the one that was remembered last.
    terminals: VecDeque<(String, ShownLines)>,
}

impl SeenLines {
    /// The terminals, the one that left longest ago first.
    pub fn save(&self) -> Vec<(String, ShownLines)> {
        self.terminals.iter().cloned().collect()
    }

    pub fn restore(terminals: Vec<(String, ShownLines)>) -> SeenLines {
        SeenLines { terminals: terminals.into() }
    }

    /// This terminal shows all of this.
    pub fn remember(&mut self, terminal: String, shown: ShownLines) {
        self.terminals.retain(|(known, _)| *known != terminal);
        if self.terminals.len() == TERMINALS_MAX {
            self.terminals.pop_front();
        }
        self.terminals.push_back((terminal, shown));
    }

    /// How many of the oldest lines of the history, as it is now, this terminal has already. A terminal that is not known
    /// has none.
    pub fn already(&self, terminal: &str, history: &[u64]) -> usize {
        let Some((_, seen)) = self.terminals.iter().find(|(known, _)| known == terminal) else { return 0 };
        // A history loses lines at its beginning and gains lines at its end: the end of the old one is the beginning of
        // the new one. After a change of width no lines agree, and all of it is new.
        let kept = (0..seen.history.len()).map(|lost| &seen.history[lost..]).find(|rest| history.starts_with(rest));
        let kept = kept.map_or(0, <[u64]>::len);
        if kept == 0 && !seen.history.is_empty() {
            return 0;
        }
        // Lines that were on the screen then follow, as far as the agent did not overwrite them.
        let followed = history[kept..].iter().zip(&seen.screen).take_while(|(new, old)| new == old).count();
        kept + followed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_a_terminal_has_are_not_shown_again() {
        #[rustfmt::skip]
        let table = [
            // history then   screen then  history now           already there
            (&[][..],         &[1, 2][..], &[][..],              0),
            (&[],             &[1, 2],     &[1, 2, 3],           2),
            (&[1, 2, 3],      &[4, 5],     &[1, 2, 3],           3),
            (&[1, 2, 3],      &[4, 5],     &[1, 2, 3, 4, 9, 8],  4),
            (&[1, 2, 3],      &[4, 5],     &[2, 3, 4, 5, 6],     4),
            // All lines have left the history, or the width changed.
            (&[1, 2, 3],      &[4, 5],     &[7, 8, 9],           0),
            (&[1, 2, 3],      &[4, 5],     &[],                  0),
            (&[1, 2, 1, 2],   &[3],        &[1, 2, 3, 4],        3),
        ];
        for (history, screen, now, expected) in table {
            let mut seen = SeenLines::default();
            let shown = ShownLines { history: history.to_vec(), screen: screen.to_vec() };
            seen.remember("a".to_owned(), shown.clone());
            assert_eq!(seen.already("a", now), expected, "{history:?} {screen:?} {now:?}");
            assert_eq!(seen.already("b", now), 0);
        }
    }

    #[test]
    fn the_terminal_that_detached_first_is_forgotten() {
        let mut seen = SeenLines::default();
        let shown = ShownLines { history: vec![1], screen: vec![] };
        for terminal in 0..=TERMINALS_MAX {
            seen.remember(terminal.to_string(), shown.clone());
            seen.remember(TERMINALS_MAX.to_string(), shown.clone());
        }
        let last = TERMINALS_MAX.to_string();
        assert_eq!(["0", "1", &last].map(|terminal| seen.already(terminal, &[1])), [0, 1, 1]);
    }
}
