//! Colours for a terminal that shows them, and the same text without colours for all other outputs.

use std::{
    env,
    io::{self, IsTerminal},
    sync::LazyLock,
};

use outlast_core::visible;

use crate::state::home;

/// Stands in front of each colour until [`finish`] makes an escape sequence of it. It is another one in each process, so
/// no text of other origin can hold it.
static MARK: LazyLock<String> = LazyLock::new(|| format!("\x0e{:016x}{:016x}", home::random(), home::random()));

/// A painted text as a terminal gets it: with its colours, and without any other escape sequence.
pub(crate) fn finish(text: &str) -> String {
    let mut pieces = text.split(MARK.as_str());
    let mut shown = visible::text(pieces.next().unwrap_or_default()).into_owned();
    for piece in pieces {
        let (code, rest) = piece.split_once('m').unwrap_or((piece, ""));
        shown.push_str(&format!("\x1b[{code}m{}", visible::text(rest)));
    }
    shown
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Paint {
    is_on: bool,
}

impl Paint {
    #[cfg(test)]
    pub(crate) fn plain() -> Paint {
        Paint { is_on: false }
    }

    /// For what goes to stdout. `NO_COLOR` with anything in it means none.
    pub(crate) fn stdout() -> Paint {
        let is_refused = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let is_dumb = env::var_os("TERM").is_some_and(|term| term == "dumb");
        Paint { is_on: io::stdout().is_terminal() && !is_refused && !is_dumb }
    }

    pub(crate) fn is_on(self) -> bool {
        self.is_on
    }

    pub(crate) fn red(self, text: &str) -> String {
        self.in_colour("31", text)
    }

    pub(crate) fn green(self, text: &str) -> String {
        self.in_colour("32", text)
    }

    pub(crate) fn yellow(self, text: &str) -> String {
        self.in_colour("33", text)
    }

    pub(crate) fn cyan(self, text: &str) -> String {
        self.in_colour("36", text)
    }

    pub(crate) fn bold(self, text: &str) -> String {
        self.in_colour("1", text)
    }

    pub(crate) fn dim(self, text: &str) -> String {
        self.in_colour("2", text)
    }

    fn in_colour(self, code: &str, text: &str) -> String {
        if self.is_on { format!("{mark}{code}m{text}{mark}0m", mark = *MARK) } else { text.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_colours_reach_the_terminal() {
        let paint = Paint { is_on: true };
        let text = format!("{} \x1b[32mtheirs\x1b[8m\x0e31m\n", paint.red("ours\x1b]0;title\x07\u{202e}"));
        assert_eq!(finish(&text), "\x1b[31mours?\x1b[0m theirs?31m\n");
        assert_eq!(finish(&Paint::plain().red("plain\tx")), "plain\tx");
    }
}
