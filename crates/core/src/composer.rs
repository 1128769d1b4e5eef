//! The composer of an agent, the place on its screen for input: whether it is visible, and what it holds.

use crate::{
    agent::Kind,
    same_text::{self, Held, is_blank},
};

/// A line with at least this many strokes, and with little else, is a rule.
const RULE_MIN: usize = 10;
/// In both agents this sign instead of the usual one marks a shell command.
const SHELL_SIGN: char = '!';
/// What both agents show instead of a long text.
const STANDS_FOR_A_PASTE: &str = "[Pasted";
/// What codex shows below a draft that it submits later.
const CODEX_STARTS: &str = "Waiting for startup";

/// The part of a screen that matters here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Row by row; faint letters are blank, because the agent wrote them.
    pub lines: Vec<String>,
    /// The last line that is not empty, with its faint letters.
    pub last_line: String,
    /// Row and column.
    pub cursor: (usize, usize),
    pub is_cursor_visible: bool,
    /// It supports bracketed paste.
    pub takes_pastes: bool,
    /// It needs even Enter as a sequence.
    pub takes_sequences: bool,
}

/// The text in a visible composer; without a profile, the text before the cursor.
pub fn draft(kind: Kind, seen: &Seen) -> Option<String> {
    match kind {
        Kind::Claude => between_rules(seen),
        Kind::Codex => at_the_cursor(seen),
        Kind::Described | Kind::Shell | Kind::Other | Kind::NotInteractive => before_the_cursor(seen),
    }
}

/// Whether the input line is completely empty, without its sign: claude makes the sign faint while it works.
pub fn is_bare(kind: Kind, seen: &Seen) -> bool {
    let row = seen.cursor.0.min(seen.lines.len());
    let (above, below) = seen.lines.split_at(row);
    let first = above.iter().rposition(|line| is_rule(line));
    let length = below.iter().position(|line| is_rule(line));
    let (Kind::Claude, Some(first), Some(length)) = (kind, first, length) else { return false };
    length > 0 && seen.lines[first + 1..row + length].iter().all(|line| line.trim_matches(is_blank).is_empty())
}

/// Whether the agent has taken Enter and submits the draft once it has started. Until then it shows the draft.
pub fn submits_later(kind: Kind, seen: &Seen) -> bool {
    kind == Kind::Codex && seen.last_line.trim_start().starts_with(CODEX_STARTS)
}

/// Whether a text is in a draft: its end, because its beginning may be out of sight, or what the agent shows instead
/// of it.
pub fn holds(draft: &str, text: &str) -> Held {
    if draft.contains(STANDS_FOR_A_PASTE) { Held::Exactly } else { same_text::held_at_end(draft, text) }
}

/// claude: a line that begins with its sign under a rule, up to the next rule.
fn between_rules(seen: &Seen) -> Option<String> {
    let is_first = |at: &usize| seen.lines[*at].starts_with(['❯', SHELL_SIGN]) && is_rule(&seen.lines[*at - 1]);
    let first = (1..seen.lines.len()).rev().find(is_first)?;
    let length = seen.lines[first..].iter().position(|line| is_rule(line))?;
    // In a dialog with such a line the cursor is elsewhere.
    let rows = first..first + length;
    rows.contains(&seen.cursor.0).then(|| joined(&seen.lines[rows], '❯'))
}

fn is_rule(line: &str) -> bool {
    let strokes = line.chars().filter(|letter| *letter == '─').count();
    strokes >= RULE_MIN && strokes * 2 > line.trim().chars().count()
}

/// codex: a line that begins with its sign, and those below it down to the cursor and to the next blank line.
fn at_the_cursor(seen: &Seen) -> Option<String> {
    let row = seen.cursor.0.min(seen.lines.len().checked_sub(1)?);
    let first = (0..=row).rev().find(|at| seen.lines[*at].starts_with(['›', SHELL_SIGN]))?;
    let below = seen.lines[row..].iter().position(|line| line.trim().is_empty()).map_or(row + 1, |blank| row + blank);
    seen.is_cursor_visible.then(|| joined(&seen.lines[first..below.max(row + 1)], '›'))
}

fn before_the_cursor(seen: &Seen) -> Option<String> {
    let line = seen.lines.get(seen.cursor.0)?;
    Some(line.chars().take(seen.cursor.1).collect::<String>().trim_end().to_owned())
}

/// The sign of a shell command is part of what was typed.
fn joined(lines: &[String], sign: char) -> String {
    let is_shell = lines.first().is_some_and(|line| line.starts_with(SHELL_SIGN));
    let trimmed = |(row, line): (usize, &String)| {
        let line = if row == 0 { line.strip_prefix([sign, SHELL_SIGN]).unwrap_or(line) } else { line };
        line.trim_matches(is_blank).to_owned()
    };
    let text = lines.iter().enumerate().map(trimmed).collect::<Vec<_>>().join("\n");
    if is_shell { format!("{SHELL_SIGN}{}", text.trim()) } else { text.trim().to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(cursor: (usize, usize), text: &str) -> Seen {
        let lines = text.lines().map(str::to_owned).collect();
        let last_line = text.lines().last().unwrap_or_default().to_owned();
        Seen { lines, last_line, cursor, is_cursor_visible: true, takes_pastes: true, takes_sequences: false }
    }

    #[test]
    fn a_composer_is_recognized() {
        const RULE: &str = "────────────────────                                        ";
        let claude = |inside: &str| format!("❯ an old question\n● an answer\n{RULE}\n{inside}\n{RULE}\n  auto mode on");
        #[rustfmt::skip]
        let table = [
            // agent        cursor   the screen                                       the draft
            (Kind::Claude, (3, 2),  claude("❯\u{a0}"),                               Some("")),
            (Kind::Claude, (3, 2),  claude("❯ hello"),                               Some("hello")),
            (Kind::Claude, (4, 6),  claude("❯ two\n  lines"),                        Some("two\nlines")),
            // A shell command, with its sign.
            (Kind::Claude, (3, 2),  claude("! echo hi"),                             Some("!echo hi")),
            (Kind::Claude, (3, 2),  claude("! "),                                    Some("!")),
            (Kind::Codex,  (3, 2),  "› an old one\n\n• answer\n! ls\n\n  model".to_owned(), Some("!ls")),
            // A choice, not a composer.
            (Kind::Claude, (0, 0),  format!("{RULE}\n Trust this folder?\n ❯ 1. Yes\n   2. No"), None),
            (Kind::Claude, (0, 0),  claude("❯ 1. Yes"),                              None),
            (Kind::Claude, (0, 2),  "❯ an old question".to_owned(),                  None),
            (Kind::Claude, (1, 2),  format!("{RULE}\n❯ half drawn"),                 None),
            (Kind::Codex,  (3, 2),  "› an old one\n\n• answer\n›\n\n  model · ~".to_owned(), Some("")),
            (Kind::Codex,  (1, 7),  "› two\n  lines\n\n  model · ~".to_owned(),      Some("two\nlines")),
            (Kind::Codex,  (0, 2),  "› two\n  lines\n\n  model · ~".to_owned(),      Some("two\nlines")),
            (Kind::Codex,  (0, 0),  "  loading".to_owned(),                          None),
            (Kind::Other,  (1, 9),  "hello\nready> ab   and more".to_owned(),        Some("ready> ab")),
            (Kind::Other,  (7, 0),  "hello".to_owned(),                              None),
        ];
        for (kind, cursor, screen, expected) in table {
            assert_eq!(draft(kind, &seen(cursor, &screen)).as_deref(), expected, "{kind:?}\n{screen}");
        }
        let hidden = Seen { is_cursor_visible: false, ..seen((0, 2), "› 1. Yes, proceed") };
        assert_eq!(draft(Kind::Codex, &hidden), None, "a choice, not a composer");
        for kind in [Kind::Claude, Kind::Codex, Kind::Other] {
            assert_eq!(draft(kind, &Seen::default()), None);
        }
    }

    #[test]
    fn the_mark_of_a_long_paste_counts_as_the_text() {
        let long = "words ".repeat(2000);
        for draft in ["[Pasted text #1 +120 lines]", "[Pasted Content 12120 chars]"] {
            assert_eq!(holds(draft, &long), Held::Exactly);
        }
        assert_eq!(holds("words", &long), Held::Exactly);
        assert_eq!(holds("", &long), Held::No);
    }
}
