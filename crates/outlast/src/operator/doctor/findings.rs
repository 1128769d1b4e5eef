//! The findings of `outlast doctor`, as text and as JSON. It does not look for problems.

use outlast_core::visible::cell;
use serde_json::{Value, json};

use crate::cli::{paint::Paint, table};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    /// There is nothing to check.
    Absent,
    /// No problem is known, but the server was not started.
    Untested,
    Fine,
    /// Not a problem, but useful to know.
    Remark,
    Problem,
}

impl Level {
    fn word(self) -> &'static str {
        match self {
            Level::Absent => "absent",
            Level::Untested => "untested",
            Level::Fine => "fine",
            Level::Remark => "remark",
            Level::Problem => "problem",
        }
    }

    fn mark(self) -> &'static str {
        match self {
            Level::Absent => "·",
            Level::Untested => "?",
            Level::Fine => "✓",
            Level::Remark => "!",
            Level::Problem => "✗",
        }
    }
}

/// What a finding is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Area {
    Program,
    Client,
    Server,
    Instance,
    State,
    Orphan,
}

impl Area {
    const ALL: [Area; 6] = [Area::Program, Area::Client, Area::Server, Area::Instance, Area::State, Area::Orphan];

    fn word(self) -> &'static str {
        match self {
            Area::Program => "program",
            Area::Client => "client",
            Area::Server => "server",
            Area::Instance => "instance",
            Area::State => "state",
            Area::Orphan => "orphan",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Area::Program => "outlast",
            Area::Client => "Clients",
            Area::Server => "Servers",
            Area::Instance => "What runs",
            Area::State => "State directory",
            Area::Orphan => "Orphans",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Finding {
    pub level: Level,
    pub area: Area,
    /// The file or directory, if several findings share it as their heading.
    pub place: String,
    pub subject: String,
    pub says: String,
    pub details: Vec<String>,
    pub mend: Option<String>,
    /// The server was not started.
    pub is_untested: bool,
}

impl Finding {
    pub(super) fn new(level: Level, area: Area, subject: impl Into<String>, says: impl Into<String>) -> Finding {
        let (place, details, mend) = (String::new(), Vec::new(), None);
        let is_untested = level == Level::Untested;
        Finding { level, area, place, subject: subject.into(), says: says.into(), details, mend, is_untested }
    }

    pub(super) fn mend(self, mend: impl Into<String>) -> Finding {
        Finding { mend: Some(mend.into()), ..self }
    }
}

pub(super) fn count(findings: &[Finding], level: Level) -> usize {
    findings.iter().filter(|finding| finding.level == level).count()
}

pub(super) fn in_json(findings: &[Finding]) -> Value {
    let all: Vec<Value> = findings
        .iter()
        .map(|finding| {
            json!({
                "level": finding.level.word(),
                "area": finding.area.word(),
                "place": (!finding.place.is_empty()).then_some(&finding.place),
                "subject": finding.subject,
                "says": finding.says,
                "details": finding.details,
                "mend": finding.mend,
                "untested": finding.is_untested,
            })
        })
        .collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "problems": count(findings, Level::Problem),
        "remarks": count(findings, Level::Remark),
        "findings": all,
    })
}

pub(super) fn in_words(findings: &[Finding], paint: Paint, width: Option<usize>) -> String {
    let mut words = String::new();
    for area in Area::ALL {
        let here: Vec<&Finding> = findings.iter().filter(|finding| finding.area == area).collect();
        if here.is_empty() {
            continue;
        }
        words.push_str(&format!("{}\n", paint.bold(area.title())));
        let column = here.iter().map(|finding| cell(&finding.subject).chars().count()).max().unwrap_or_default();
        let mut place = "";
        for (at, finding) in here.iter().enumerate() {
            if finding.place != place {
                place = &finding.place;
                words.push_str(&format!("  {}\n", paint.dim(&cell(place))));
            }
            // A fix that is the same for several findings of one place is printed once, with the last of them.
            let is_said_later = here[at + 1..].iter().any(|later| later.place == place && later.mend == finding.mend);
            let mend = finding.mend.as_deref().filter(|_| place.is_empty() || !is_said_later);
            words.push_str(&one_in_words(finding, mend, column, paint, width));
        }
        words.push('\n');
    }
    let (problems, remarks) = (count(findings, Level::Problem), count(findings, Level::Remark));
    let counted = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let untested = match findings.iter().filter(|finding| finding.is_untested).count() {
        0 => String::new(),
        count => format!(", {} not tested", counted(count, "server")),
    };
    words.push_str(&match (problems, remarks) {
        (0, 0) if untested.is_empty() => paint.green("All is well."),
        (0, 0) => paint.green(&format!("No problem{untested}.")),
        (0, remarks) => paint.yellow(&format!("No problem, {}{untested}.", counted(remarks, "remark"))),
        (problems, 0) => paint.red(&format!("{}{untested}.", counted(problems, "problem"))),
        (problems, remarks) => {
            paint.red(&format!("{}, {}{untested}.", counted(problems, "problem"), counted(remarks, "remark")))
        }
    });
    words.push('\n');
    words
}

fn one_in_words(finding: &Finding, mend: Option<&str>, column: usize, paint: Paint, width: Option<usize>) -> String {
    let margin = if finding.place.is_empty() { "  " } else { "    " };
    let mark = match finding.level {
        Level::Absent | Level::Untested => paint.dim(finding.level.mark()),
        Level::Fine => paint.green(finding.level.mark()),
        Level::Remark => paint.yellow(finding.level.mark()),
        Level::Problem => paint.red(finding.level.mark()),
    };
    let subject = format!("{:column$}", cell(&finding.subject));
    let below = format!("{margin}  {}  ", " ".repeat(column));
    let says = table::hanging(&cell(&finding.says), below.len(), width);
    let mut words = format!("{margin}{mark} {subject}  {says}\n");
    for detail in &finding.details {
        let room = width.map(|width| width.saturating_sub(below.len() + "│ ".chars().count()));
        // Keeps the indentation of a quoted line, and puts the bar before each of its wrapped lines.
        let detail = cell(detail);
        let text = detail.trim_start();
        let indent = &detail[..detail.len() - text.len()];
        let text = table::hanging(text, indent.chars().count(), room).replace('\n', &format!("\n{below}│ "));
        words.push_str(&format!("{below}{}\n", paint.dim(&format!("│ {indent}{text}"))));
    }
    if let Some(mend) = mend {
        let mend = table::hanging(&cell(mend), below.len() + "fix: ".len(), width);
        words.push_str(&format!("{below}{} {mend}\n", paint.cyan("fix:")));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> Vec<Finding> {
        let server = |level, name: &str, says: &str| Finding {
            place: "Claude Code  ~/.claude.json".into(),
            ..Finding::new(level, Area::Server, name, says)
        };
        vec![
            Finding::new(Level::Fine, Area::Program, "0.1.0", "/home/me/.cargo/bin/outlast"),
            Finding::new(Level::Fine, Area::Client, "Claude Code", "~/.claude.json"),
            server(Level::Fine, "weather", "wrapped; answers in 120 ms: weather 1.2, 2025-11-25, 5 tools"),
            server(Level::Remark, "notes", "not wrapped; answers in 80 ms").mend("outlast wrap --client claude-code"),
            Finding {
                details: vec!["Traceback (most recent call last):".into(), "ValueError: \x1b[31mno token".into()],
                ..server(Level::Problem, "github", "wrapped; it ended with exit code 1 before it answered")
            }
            .mend("run it by hand: github-mcp stdio"),
            server(Level::Untested, "figma", "reached over the network; not tested"),
            Finding::new(Level::Problem, Area::Orphan, "4711", "belongs to `weather-1abcd`, which is gone: sleep 300")
                .mend("kill 4711"),
        ]
    }

    #[test]
    fn each_finding_has_a_fix() {
        insta::assert_snapshot!(in_words(&findings(), Paint::plain(), None));
        insta::assert_snapshot!(in_words(&findings()[..3], Paint::plain(), None).lines().last().unwrap(), @"All is well.");
        let untested = [findings()[0].clone(), findings()[5].clone()];
        insta::assert_snapshot!(in_words(&untested, Paint::plain(), None).lines().last().unwrap(), @"No problem, 1 server not tested.");
        insta::assert_snapshot!(in_words(&findings()[2..3], Paint::plain(), Some(50)), @"
        Servers
          Claude Code  ~/.claude.json
            ✓ weather  wrapped; answers in 120 ms: weather
                       1.2, 2025-11-25, 5 tools

        All is well.
        ");
        let line = "    a line that a server wrote, and that is longer than the terminal is wide";
        let quoted = [Finding { details: vec![line.into()], mend: None, ..findings()[4].clone() }];
        insta::assert_snapshot!(in_words(&quoted, Paint::plain(), Some(50)), @"
        Servers
          Claude Code  ~/.claude.json
            ✗ github  wrapped; it ended with exit code 1
                      before it answered
                      │     a line that a server wrote,
                      │     and that is longer than the
                      │     terminal is wide

        1 problem.
        ");
        insta::assert_snapshot!(in_words(&findings()[..4], Paint::plain(), None).lines().last().unwrap(), @"No problem, 1 remark.");
    }

    #[test]
    fn findings_are_the_same_in_json() {
        let told = in_json(&findings());
        assert_eq!((&told["problems"], &told["remarks"]), (&json!(2), &json!(1)));
        insta::assert_snapshot!(serde_json::to_string_pretty(&told["findings"][4]).unwrap());
    }
}
