//! What an agent is doing, read from its window: the title, and the structure of the screen. It searches for no
//! phrase that a conversation could contain: text of the conversation is indented or follows a mark, and the agent's
//! own elements are not.

use serde::{Deserialize, Serialize};

use crate::agent::Kind;

/// What the window shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stance {
    /// A sign of work.
    Busy,
    /// An input line.
    Prompt,
    /// A choice for the person.
    Dialog,
    /// Nothing that is known.
    #[default]
    Unclear,
}

impl Stance {
    pub fn word(self) -> &'static str {
        match self {
            Stance::Busy => "busy",
            Stance::Prompt => "prompt",
            Stance::Dialog => "dialog",
            Stance::Unclear => "unclear",
        }
    }

    pub fn wants_input(self) -> bool {
        matches!(self, Stance::Prompt | Stance::Dialog)
    }
}

/// An agent's window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// The lines of the screen from the top, without trailing blanks; only what the running agent wrote.
    pub lines: Vec<String>,
    pub title: Option<String>,
    pub is_cursor_visible: bool,
}

/// What was seen, and whether it counts at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sight {
    pub stance: Stance,
    /// The window would show it if the agent worked. Otherwise a prompt counts only after the agent has been quiet.
    pub is_sure: bool,
}

/// The last non-empty lines that are examined: what stands above them is older conversation.
const LINES_MAX: usize = 30;
/// A line with at least this many strokes, and with little else, is a rule.
const RULE_MIN: usize = 4;
/// The frames of the spinner at the beginning of claude's progress line.
const SPINNER: [char; 8] = ['·', '✢', '✳', '✶', '✻', '✽', '*', '∗'];
/// Borders that are drawn around the input line.
const BORDERS: [char; 6] = ['│', '┃', '|', '║', '▏', ' '];

pub fn of(kind: Kind, view: &View) -> Sight {
    let sure = |stance| Sight { stance, is_sure: true };
    if view.title.as_deref().is_some_and(has_spinner) && matches!(kind, Kind::Claude | Kind::Codex) {
        return sure(Stance::Busy);
    }
    let lines: Vec<&str> = view.lines.iter().map(String::as_str).filter(|line| !line.trim().is_empty()).collect();
    let lines = &lines[lines.len().saturating_sub(LINES_MAX)..];
    match kind {
        // While it writes an answer, it removes its progress line for moments at a time.
        Kind::Claude => Sight { stance: claude(lines, view.is_cursor_visible), is_sure: false },
        // Only its title shows that it works: while it writes an answer, its screen looks as when it waits.
        Kind::Codex => Sight { stance: codex(lines, view.is_cursor_visible), is_sure: view.title.is_some() },
        Kind::Described | Kind::Shell | Kind::Other | Kind::NotInteractive => Sight::default(),
    }
}

/// True if the title begins with a frame of an animation, which both agents show while they work.
fn has_spinner(title: &str) -> bool {
    title.chars().next().is_some_and(|first| ('\u{2801}'..='\u{28ff}').contains(&first))
}

/// claude has a composer under a rule at the bottom, or a dialog under a rule instead. While it works, a progress
/// line stands above the composer and begins in the first column, where no text of the conversation begins.
fn claude(lines: &[&str], is_cursor_visible: bool) -> Stance {
    let composer = (0..lines.len()).rev().find(|at| is_composer(lines, *at));
    if composer.is_none() && is_dialog(lines, is_cursor_visible) {
        return Stance::Dialog;
    }
    let above = &lines[..composer.unwrap_or(lines.len())];
    // Between the two stand tips and tasks, which are indented, and queued messages.
    let mut drawn = above.iter().rev().filter(|line| !line.starts_with([' ', '❯', '>', '!']) && !is_rule(line));
    match (drawn.next().is_some_and(|line| is_progress(line)), composer) {
        (true, _) => Stance::Busy,
        (false, Some(_)) => Stance::Prompt,
        (false, None) => Stance::Unclear,
    }
}

/// The options of a dialog have a mark; a dialog that only wants a key hides the cursor.
fn is_dialog(lines: &[&str], is_cursor_visible: bool) -> bool {
    let rule = lines.iter().rposition(|line| is_rule(line));
    let below = &lines[rule.map_or(0, |rule| rule + 1)..];
    let is_choice = |line: &&str| {
        let chosen = line.trim_start_matches(BORDERS).strip_prefix('❯');
        chosen.is_some_and(|rest| line.starts_with(BORDERS) || is_numbered(rest.trim()))
    };
    below.iter().any(is_choice) || (rule.is_some() && !below.is_empty() && !is_cursor_visible)
}

/// The first line of a composer: the sign at its beginning (`!` for a shell command), and a rule or a border around it.
pub(crate) fn is_composer(lines: &[&str], at: usize) -> bool {
    let is_framed = at > 0 && is_rule(lines[at - 1]);
    let rest = lines[at].trim_start_matches(BORDERS);
    is_framed && (lines[at].starts_with(['❯', '>', '!']) || (lines[at].starts_with(BORDERS) && rest.starts_with('>')))
}

/// `✻ Thinking… (3s · ↓ 17 tokens)`, in the first column. A finished turn has `✻ Cooked for 26s`.
fn is_progress(line: &str) -> bool {
    let mut letters = line.chars();
    letters.next().is_some_and(|first| SPINNER.contains(&first)) && letters.next() == Some(' ') && line.contains('…')
}

/// `✻ Cooked for 26s`, in the first column.
pub(crate) fn is_finished(line: &str) -> bool {
    let mut letters = line.chars();
    letters.next().is_some_and(|first| SPINNER.contains(&first)) && letters.next() == Some(' ') && !line.contains('…')
}

/// codex has a composer with the cursor in it, or a choice, for which it hides the cursor.
fn codex(lines: &[&str], is_cursor_visible: bool) -> Stance {
    let Some(last) = lines.iter().rev().find_map(|line| line.strip_prefix(['›', '!'])) else {
        return Stance::Unclear;
    };
    let is_choice = !is_cursor_visible && is_numbered(last.trim());
    if is_choice { Stance::Dialog } else { Stance::Prompt }
}

fn is_numbered(text: &str) -> bool {
    let digits = text.chars().take_while(char::is_ascii_digit).count();
    digits > 0 && text[digits..].starts_with(['.', ')'])
}

pub(crate) fn is_rule(line: &str) -> bool {
    let strokes = line.chars().filter(|letter| matches!(letter, '─' | '━' | '▔')).count();
    // The rule above a dialog has another stroke, and in a narrow window a label takes up half of it.
    let is_mostly = strokes * 2 > line.trim().chars().count() || line.starts_with('▔');
    strokes >= RULE_MIN && is_mostly
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLAUDE: Kind = Kind::Claude;
    const CODEX: Kind = Kind::Codex;

    /// A screen; `^` before it hides the cursor, as claude always does, and `TITLE|` sets a title.
    fn view(screen: &str) -> View {
        let (title, screen) = screen.split_once('|').filter(|(title, _)| !title.contains('\n')).unwrap_or(("", screen));
        let (screen, is_cursor_visible) = screen.strip_prefix('^').map_or((screen, true), |screen| (screen, false));
        let title = Some(title.to_owned()).filter(|title| !title.is_empty());
        View { lines: screen.lines().map(str::to_owned).collect(), title, is_cursor_visible }
    }

    #[test]
    fn the_stance_is_read_from_the_window() {
        use Stance::*;
        #[rustfmt::skip]
        let table = [
            // claude
            (CLAUDE, "|",                                                                        Unclear),
            (CLAUDE, "|Welcome to Claude Code",                                                  Unclear),
            (CLAUDE, "|^──────\n❯ \n──────\n  ? for shortcuts",                                  Prompt),
            (CLAUDE, "|^──────\n❯ Try \"fix lint errors\"\n──────\n  auto mode on",              Prompt),
            (CLAUDE, "|──────\n❯ half drawn",                                                    Prompt),
            (CLAUDE, "|╭────╮\n│ > hello │\n╰────╯",                                             Prompt),
            (CLAUDE, "|^✻ Thinking… (3s · esc to interrupt)\n──────\n❯ \n──────",                Busy),
            (CLAUDE, "|^* Tinkering… (17s · ↓ 75 tokens)\n\n──────\n❯ \n──────\n  my-status 42%\n  auto mode on", Busy),
            (CLAUDE, "|^✶ Working on it…\n  ⎿  Tip: a tip\n──────\n❯ typed ahead\n──────",       Busy),
            (CLAUDE, "|^✻ Thinking… (esc to interrupt)",                                         Busy),
            (CLAUDE, "|^✶ Working…\n❯ a message that waits\n──────\n❯ \n──────",                  Busy),
            (CLAUDE, "|^✶ A notice…\n● an answer after it\n  more\n──────\n❯ \n──────",          Prompt),
            (CLAUDE, "|^● done\n──────\n! echo hi\n──────\n  ! for shell mode",                  Prompt),
            (CLAUDE, "|^✶ Working…\n❯ this waits\n! echo this too\n──────\n❯ \n──────",        Busy),
            (CLAUDE, "|❯ an old question",                                                       Unclear),
            (CLAUDE, "|^✻ Cooked for 26s · done 7:53 PM\n──────\n❯ \n──────\n  my-status 42%",   Prompt),
            // The conversation contains words and lines that look like the agent's own.
            (CLAUDE, "|^● press esc to interrupt\n  ✻ Thinking… (3s · esc to interrupt)\n──────\n❯ \n──────", Prompt),
            (CLAUDE, "|^❯ 1. press esc to interrupt\n● * Working…\n  ❯ 1. Yes\n──────\n❯ \n──────", Prompt),
            (CLAUDE, "|^● done\n──────\n❯ 1. as typed\n──────\n  esc to interrupt",              Prompt),
            (CLAUDE, "|^──────\n Do you want to proceed?\n ❯ 1. Yes\n   2. No\n\n Esc to cancel", Dialog),
            (CLAUDE, "|^──────\n Bash command\n Do you want to proceed?\n ❯ No\n   Yes\n Esc to cancel", Dialog),
            (CLAUDE, "|Do you want to proceed?\n❯ 1. Yes\n  2. No",                              Dialog),
            (CLAUDE, "|^──────\n  Auto mode can't check actions\n  Enter to stay · Esc to cancel", Dialog),
            (CLAUDE, "|│ Do you trust this folder? │\n│ ❯ 1. Yes, proceed │\n│   2. No │",       Dialog),
            (CLAUDE, "✳ p|^● done\n▔▔▔▔▔▔▔▔▔▔\n   Settings  Status   Config\n   Version: 2\n   Esc to cancel", Dialog),
            (CLAUDE, "✳ p|^● done\n▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔ ◐ medium · /effort ▔\n   Help  General",    Dialog),
            (CLAUDE, "⠐ Fix it|^──────\n❯ \n──────",                                             Busy),
            (CLAUDE, "✳ Fix it|^──────\n❯ \n──────",                                             Prompt),
            // codex
            (CODEX,  "|› Ask Codex to do anything\n\n  100% context left",                       Prompt),
            (CODEX,  "p|• press esc to interrupt\n\n› Ask Codex to do anything",                 Prompt),
            (CODEX,  "⠴ p|• words\n\n› Ask Codex to do anything",                                Busy),
            (CODEX,  "p|› 1. a question\n• answer\n› Ask Codex to do anything",                  Prompt),
            (CODEX,  "p|› old\n• answer\n! echo hi",                                            Prompt),
            (CODEX,  "p|^› 1. old\n• answer\n! echo hi",                                        Prompt),
            (CODEX,  "p|^Allow command?\n› 1. Yes\n  2. No\nPress Enter to confirm",             Dialog),
            (CODEX,  "p|^› an old question\n• answer\nAllow?\n› 2. No",                          Dialog),
            (CODEX,  "|> You are in /tmp",                                                       Unclear),
            // No profile, no stance.
            (Kind::Other, "⠴ p|──────\n❯ ",                                                      Unclear),
        ];
        for (kind, screen, expected) in table {
            assert_eq!(of(kind, &view(screen)).stance, expected, "{screen}");
        }
    }

    #[test]
    fn a_prompt_is_sure_only_where_work_would_show() {
        assert!(!of(CLAUDE, &view("|^──────\n❯ \n──────")).is_sure);
        assert!(of(CODEX, &view("p|› Ask Codex")).is_sure);
        assert!(!of(CODEX, &view("|› Ask Codex")).is_sure);
    }

    #[test]
    fn old_output_does_not_count() {
        let mut lines = vec!["✻ Thinking… (1s)".to_owned()];
        lines.extend((0..LINES_MAX).map(|n| format!("  line {n}")));
        lines.extend(["──────".to_owned(), "❯ ".to_owned()]);
        assert_eq!(of(CLAUDE, &View { lines, ..View::default() }).stance, Stance::Prompt);
    }
}
