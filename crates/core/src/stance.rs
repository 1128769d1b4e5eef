//! What an agent is doing, read off its screen as a person would.

/// What the screen says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stance {
    /// It works, and says so.
    Busy,
    /// It shows where one types.
    Prompt,
    /// It wants a choice.
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

/// What an agent shows, by which its stance is known.
#[derive(Clone, Copy, Debug)]
pub struct Signs {
    /// At the beginning of the line one types in, and before the choice that is chosen.
    pub prompt: &'static [&'static str],
    /// Anywhere near the end, in small letters.
    pub busy: &'static [&'static str],
    /// Beside a list of choices.
    pub dialog: &'static [&'static str],
}

/// So many lines at the end are looked at, empty ones not counted: above stands what was said before.
const LINES_MAX: usize = 30;

pub const CLAUDE: Signs = Signs {
    prompt: &["❯", ">"],
    busy: &["esc to interrupt", "ctrl+c to interrupt"],
    dialog: &["esc to cancel", "enter to confirm", "enter to select", "esc to exit"],
};

pub const CODEX: Signs = Signs {
    prompt: &["›", "▌"],
    busy: &["esc to interrupt"],
    dialog: &["press enter to", "enter to confirm", "esc to cancel", "enter to submit"],
};

/// Borders that are drawn around the line one types in.
const BORDERS: [char; 6] = ['│', '┃', '|', '║', '▏', ' '];

pub fn of(signs: &Signs, lines: &[String]) -> Stance {
    let end: Vec<&str> =
        lines.iter().rev().map(|line| line.trim()).filter(|line| !line.is_empty()).take(LINES_MAX).collect();
    let lower: Vec<String> = end.iter().map(|line| line.to_lowercase()).collect();
    let has = |words: &[&str]| lower.iter().any(|line| words.iter().any(|word| line.contains(word)));
    if has(signs.busy) {
        return Stance::Busy;
    }
    let inside = end.iter().map(|line| line.trim_start_matches(BORDERS));
    let typed: Vec<&str> =
        inside.filter_map(|line| signs.prompt.iter().find_map(|sign| line.strip_prefix(sign))).map(str::trim).collect();
    let is_choice = |rest: &&str| {
        let digits = rest.chars().take_while(char::is_ascii_digit).count();
        digits > 0 && rest[digits..].starts_with(['.', ')'])
    };
    if typed.iter().any(is_choice) || (has(signs.dialog) && !typed.is_empty()) {
        return Stance::Dialog;
    }
    if typed.is_empty() { Stance::Unclear } else { Stance::Prompt }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stance_is_read_off_the_screen() {
        use Stance::*;
        #[rustfmt::skip]
        let table = [
            // claude
            (CLAUDE, "",                                                                        Unclear),
            (CLAUDE, "Welcome to Claude Code",                                                  Unclear),
            (CLAUDE, "──────\n❯ \n──────\n  ? for shortcuts",                                   Prompt),
            (CLAUDE, "──────\n❯ Try \"fix lint errors\"\n──────\n  auto mode on",               Prompt),
            (CLAUDE, "╭────╮\n│ > hello │\n╰────╯",                                             Prompt),
            (CLAUDE, "✻ Thinking… (3s · esc to interrupt)\n──────\n❯ \n──────",                 Busy),
            (CLAUDE, "* Working… (ctrl+c to interrupt)\n❯ ",                                    Busy),
            // A task in the background: the composer is there, and it still works.
            (CLAUDE, "❯ \n  1 shell · Esc to interrupt",                                        Busy),
            (CLAUDE, "Do you want to proceed?\n❯ 1. Yes\n  2. No\n\nEsc to cancel",             Dialog),
            (CLAUDE, "│ Do you trust this folder? │\n│ ❯ 1. Yes, proceed │\n│   2. No │",        Dialog),
            (CLAUDE, "Select model\n  Default\n❯ Opus\n Enter to confirm · Esc to exit",        Dialog),
            // codex
            (CODEX,  "› Ask Codex to do anything\n\n  100% context left",                       Prompt),
            (CODEX,  "• Working (2s • esc to interrupt)\n\n› Ask Codex to do anything",         Busy),
            (CODEX,  "Allow command?\n› 1. Yes\n  2. No\nPress Enter to confirm",               Dialog),
            (CODEX,  "> You are in /tmp",                                                       Unclear),
        ];
        for (signs, screen, expected) in table {
            let lines: Vec<String> = screen.lines().map(str::to_owned).collect();
            assert_eq!(of(&signs, &lines), expected, "{screen}");
        }
    }

    #[test]
    fn what_was_said_long_before_does_not_count() {
        let mut lines = vec!["esc to interrupt".to_owned()];
        lines.extend((0..LINES_MAX).map(|n| format!("line {n}")));
        lines.push("❯ ".to_owned());
        assert_eq!(of(&CLAUDE, &lines), Stance::Prompt);
    }
}
