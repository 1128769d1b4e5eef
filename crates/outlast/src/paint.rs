//! Colours for people who see them, and the same words for those who do not.

use std::{
    env,
    io::{self, IsTerminal},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paint {
    is_on: bool,
}

impl Paint {
    pub fn plain() -> Paint {
        Paint { is_on: false }
    }

    /// For what goes to stdout. `NO_COLOR` with anything in it means none.
    pub fn stdout() -> Paint {
        let is_refused = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let is_dumb = env::var_os("TERM").is_some_and(|term| term == "dumb");
        Paint { is_on: io::stdout().is_terminal() && !is_refused && !is_dumb }
    }

    pub fn is_on(self) -> bool {
        self.is_on
    }

    pub fn red(self, text: &str) -> String {
        self.in_colour("31", text)
    }

    pub fn green(self, text: &str) -> String {
        self.in_colour("32", text)
    }

    pub fn yellow(self, text: &str) -> String {
        self.in_colour("33", text)
    }

    pub fn cyan(self, text: &str) -> String {
        self.in_colour("36", text)
    }

    pub fn bold(self, text: &str) -> String {
        self.in_colour("1", text)
    }

    pub fn dim(self, text: &str) -> String {
        self.in_colour("2", text)
    }

    fn in_colour(self, code: &str, text: &str) -> String {
        if self.is_on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}
