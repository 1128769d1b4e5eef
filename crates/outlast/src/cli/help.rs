//! `outlast help`: explains a command, or prints a topic of the book.

use clap::CommandFactory;
use std::process::ExitCode;

use crate::{
    cli::{
        self,
        paint::Paint,
        report::{self, Report},
        table,
    },
    operator::instances::print,
};

/// Each page is a section of the book, word for word; a test compares them.
pub const TOPICS: [Topic; 9] = [
    topic("concepts", "how outlast works, and its terms", include_str!("help/concepts.md")),
    topic("crash", "what happens to requests when the server crashes", include_str!("help/crash.md")),
    topic(
        "policies",
        "when a crashed server is started again, and when outlast gives up",
        include_str!("help/policies.md"),
    ),
    topic("watch", "reloading a server while its client stays connected", include_str!("help/watch.md")),
    topic("control", "commands for running instances", include_str!("help/control.md")),
    topic("files", "the files that outlast writes", include_str!("help/files.md")),
    topic("eras", "the handshake and the stateless revisions of MCP", include_str!("help/eras.md")),
    topic("clients", "the configuration files of each client", include_str!("help/clients.md")),
    topic("exit-codes", "exit codes of outlast and of servers", include_str!("help/exit-codes.md")),
];

/// The commands in groups: a title, and each command with a description. A test checks that none is missing.
const GROUPS: [(&str, &[(&str, &str)]); 5] = [
    (
        "Run and supervise",
        &[
            ("mcp", "one MCP stdio server, for one client"),
            ("gateway", "many MCP servers behind one endpoint, on stdio or HTTP"),
            ("run", "an interactive agent (claude, codex, …) in its own terminal"),
            ("restore", "start interrupted sessions of `run` again, after a reboot or a kill"),
        ],
    ),
    (
        "Set up",
        &[
            ("demo", "show a crash, a reload and a broken reload in ten seconds"),
            ("wrap", "put outlast in front of your clients' MCP servers"),
            ("unwrap", "undo `wrap`"),
            ("doctor", "find problems, and how to fix them"),
            ("config", "show or check what `outlast.toml` sets"),
            ("startup", "restore interrupted sessions at each login"),
            ("trust", "allow a project's file to set commands, environment and listeners"),
        ],
    ),
    (
        "Control what runs",
        &[
            ("ps", "list everything that runs under outlast, in every project"),
            ("top", "the same, live"),
            ("state", "show one instance: its server, its restarts, its stderr"),
            ("pid", "print the process id of its server"),
            ("restart", "reload a server, or restart an agent"),
            ("stop", "stop an instance"),
            ("resume", "start a server or an agent that was given up"),
            ("upgrade", "replace the program of running instances by the one on disk"),
            ("switch", "turn a tool or a backend of a gateway off or on"),
            ("reload", "make a gateway read its configuration again"),
            ("logs", "show the log of an instance and its server's stderr"),
            ("audit", "show starts, crashes and restarts, with their reasons"),
        ],
    ),
    (
        "Control an agent",
        &[
            ("attach", "show its terminal here"),
            ("screen", "print its screen"),
            ("send", "send it a text, and verify that it arrived"),
            ("inject", "type into its terminal"),
            ("wait-for", "wait for a text, for silence or for its prompt"),
        ],
    ),
    (
        "Learn more",
        &[
            ("help", "explain a command or a topic; `outlast help topics` lists them"),
            ("completions", "print a completion script for your shell"),
            ("man", "write man pages"),
        ],
    ),
];

/// The help of the whole program lists its commands in groups.
pub const TEMPLATE: &str = "{about-with-newline}\n{usage-heading} {usage}{after-help}\n\nOptions:\n{options}\n";

/// The commands in their groups.
pub fn groups() -> String {
    let group = |(title, commands): &(&str, &[(&str, &str)])| {
        let lines = commands.iter().map(|(name, about)| format!("  {name:11}  {about}"));
        format!("{title}:\n{}", lines.collect::<Vec<_>>().join("\n"))
    };
    let groups: Vec<String> = GROUPS.iter().map(group).collect();
    format!("{}\n\n`outlast COMMAND --help` lists the options of a command.", groups.join("\n\n"))
}

/// Longer lines are hard to read, even on a wide terminal.
const WIDTH_MAX: usize = 100;

pub struct Topic {
    pub name: &'static str,
    pub about: &'static str,
    pub page: &'static str,
}

const fn topic(name: &'static str, about: &'static str, page: &'static str) -> Topic {
    Topic { name, about, page }
}

pub fn help(arguments: &cli::Help) -> Result<ExitCode, Report> {
    let width = table::room().unwrap_or(WIDTH_MAX).min(WIDTH_MAX);
    let mut command = cli::Cli::command().term_width(width);
    command.build();
    let Some((first, rest)) = arguments.words.split_first() else {
        return print(&command.render_long_help().to_string());
    };
    if first == "topics" && rest.is_empty() {
        return print(&topics());
    }
    if let Some(topic) = TOPICS.iter().find(|topic| topic.name == first && rest.is_empty()) {
        return print(&render(topic.page, width, Paint::stdout()));
    }
    let mut found = &mut command;
    for word in &arguments.words {
        found = match found.find_subcommand_mut(word) {
            Some(found) => found,
            None => return Err(unknown(word)),
        };
    }
    print(&found.render_long_help().to_string())
}

fn topics() -> String {
    let lines = TOPICS.iter().map(|topic| format!("  {:10}  {}\n", topic.name, topic.about));
    format!("Topics for `outlast help TOPIC`:\n{}", lines.collect::<String>())
}

fn unknown(word: &str) -> Report {
    let command = cli::Cli::command();
    let commands = command.get_subcommands().filter(|command| !command.is_hide_set()).map(clap::Command::get_name);
    let names = commands.chain(TOPICS.iter().map(|topic| topic.name));
    let near = names
        .map(|name| (strsim::osa_distance(word, name), name))
        .filter(|(slips, name)| *slips <= name.len() / 3)
        .min();
    let hint = match near {
        Some((_, name)) => format!("did you mean `{name}`?"),
        None => "`outlast help` lists the commands, `outlast help topics` lists the topics".to_owned(),
    };
    Report::new(report::USAGE, format!("no command or topic is named `{word}`")).hint(hint)
}

/// Renders the few Markdown elements of a page for a terminal: a heading, paragraphs, lists, tables of two columns.
fn render(page: &str, width: usize, paint: Paint) -> String {
    let mut shown = String::new();
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(title) = line.strip_prefix("## ") {
            shown.push_str(&format!("{}\n", paint.bold(title)));
        } else if line.starts_with('|') {
            let mut rows = vec![line];
            while let Some(row) = lines.next_if(|line| line.starts_with('|')) {
                rows.push(row);
            }
            shown.push_str(&render_table(&rows, width, paint));
        } else if line.is_empty() {
            shown.push('\n');
        } else {
            // A paragraph or a list item ends where another element begins.
            let mut text = line.to_owned();
            while let Some(more) = lines.next_if(|line| !line.is_empty() && !line.starts_with(['|', '-', '#'])) {
                text.push(' ');
                text.push_str(more.trim_start());
            }
            let margin = if text.starts_with("- ") { 2 } else { 0 };
            shown.push_str(&format!("{}\n", painted(&fill(&text, width, margin, paint), paint)));
        }
    }
    shown
}

fn render_table(rows: &[&str], width: usize, paint: Paint) -> String {
    let cells = |row: &str| {
        let (left, right) = row.trim_matches('|').split_once('|')?;
        Some((left.trim().to_owned(), right.trim().to_owned()))
    };
    let rows: Vec<(String, String)> = rows
        .iter()
        .filter_map(|row| cells(row))
        .filter(|(left, _)| !left.is_empty() && !left.starts_with("--"))
        .collect();
    let left = rows.iter().map(|(left, _)| seen(left, paint).chars().count()).max().unwrap_or_default().min(width / 2);
    let mut shown = String::new();
    for (name, words) in rows {
        let name = seen(&name, paint);
        let margin = left + 4;
        let text = fill(&format!("{}{}", " ".repeat(margin), words), width, margin, paint);
        // A cell that is too long for its column gets a line of its own.
        let first = if name.chars().count() > left {
            format!("  {}\n{text}", paint.cyan(&name))
        } else {
            let blank = " ".repeat(left - name.chars().count() + 2);
            format!("  {}{blank}{}", paint.cyan(&name), text.trim_start())
        };
        shown.push_str(&format!("{}\n", painted(&first, paint)));
    }
    shown
}

/// Wraps a text into lines of at most `width`; all lines except the first have a margin.
fn fill(text: &str, width: usize, margin: usize, paint: Paint) -> String {
    let indent = text.len() - text.trim_start().len();
    let mut filled = " ".repeat(indent);
    let mut column = indent;
    let mut is_first = true;
    for word in words(text) {
        let length = seen(&word, paint).chars().count();
        if !is_first && column + 1 + length > width {
            filled.push_str(&format!("\n{}", " ".repeat(margin)));
            column = margin;
        } else if !is_first {
            filled.push(' ');
            column += 1;
        }
        filled.push_str(&word);
        column += length;
        is_first = false;
    }
    filled
}

/// Splits at spaces, except within backticks.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut is_quoted = false;
    for piece in text.split_whitespace() {
        match words.last_mut() {
            Some(last) if is_quoted => {
                last.push(' ');
                last.push_str(piece);
            }
            _ => words.push(piece.to_owned()),
        }
        is_quoted ^= piece.matches('`').count() % 2 == 1;
    }
    words
}

/// The visible part of a text. Without colours, backticks stay and mark where a command begins and ends.
fn seen(text: &str, paint: Paint) -> String {
    let text = text.replace('*', "");
    if paint.is_on() { text.replace('`', "") } else { text }
}

/// Replaces backticks and asterisks by colours, if colours are on.
fn painted(text: &str, paint: Paint) -> String {
    if !paint.is_on() {
        return seen(text, paint);
    }
    let mut shown = String::new();
    for (at, piece) in text.split('`').enumerate() {
        if at % 2 == 1 {
            shown.push_str(&paint.cyan(piece));
        } else {
            for (at, piece) in piece.split('*').enumerate() {
                shown.push_str(&if at % 2 == 1 { paint.bold(piece) } else { piece.to_owned() });
            }
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_in_one_group() {
        let command = cli::Cli::command();
        let visible = command.get_subcommands().filter(|command| !command.is_hide_set());
        let mut commands: Vec<&str> = visible.map(clap::Command::get_name).collect();
        let mut grouped: Vec<&str> =
            GROUPS.iter().flat_map(|(_, commands)| commands.iter().map(|(name, _)| *name)).collect();
        commands.sort_unstable();
        grouped.sort_unstable();
        assert_eq!(grouped, commands);
        insta::assert_snapshot!(cli::Cli::command().term_width(80).render_help());
    }

    #[test]
    fn every_topic_reads_well_in_a_terminal() {
        let mut all = topics();
        for topic in TOPICS {
            let page = render(topic.page, 80, Paint::plain());
            for line in page.lines() {
                assert!(line.chars().count() <= 80, "{}: {line}", topic.name);
                assert!(!line.contains('|'), "{}: {line}", topic.name);
            }
            all.push_str(&format!("\n{page}"));
        }
        insta::assert_snapshot!(all);
    }

    #[test]
    fn no_topic_has_the_name_of_a_command() {
        let command = cli::Cli::command();
        for topic in TOPICS {
            assert!(command.find_subcommand(topic.name).is_none(), "{}", topic.name);
        }
    }

    #[test]
    fn a_typo_in_a_topic_gets_a_suggestion() {
        let mut words = String::new();
        for word in ["polices", "restat", "exit-code", "nonsense"] {
            words.push_str(&unknown(word).to_string());
        }
        insta::assert_snapshot!(words, @"
        error: no command or topic is named `polices`
          hint: did you mean `policies`?
        error: no command or topic is named `restat`
          hint: did you mean `restart`?
        error: no command or topic is named `exit-code`
          hint: did you mean `exit-codes`?
        error: no command or topic is named `nonsense`
          hint: `outlast help` lists the commands, `outlast help topics` lists the topics
        ");
    }
}
