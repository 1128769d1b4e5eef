//! Checks the book: its commands parse, its links have targets, its topics are those of the program.

#[cfg(target_os = "linux")]
mod tutorial;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use clap::{CommandFactory, Parser};
use outlast::{
    adopt::servers::{self, Format, How},
    cli::{Cli, help::TOPICS},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every page: its path and its text.
fn pages() -> Vec<(PathBuf, String)> {
    let folders = ["docs", "docs/internals"].map(|folder| fs::read_dir(root().join(folder)).unwrap());
    let book = folders.into_iter().flatten().map(|file| file.unwrap().path());
    let mut paths: Vec<PathBuf> = book.filter(|path| path.extension().is_some_and(|ending| ending == "md")).collect();
    paths.extend(["README.md", "CONTRIBUTING.md", "SECURITY.md"].map(|name| root().join(name)));
    let examples = texts_below(root().join("examples")).into_iter().map(|(path, _)| path);
    paths.extend(examples.filter(|path| path.extension().is_some_and(|ending| ending == "md")));
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

/// Every file below a directory: its path and its text, empty if it is not text.
fn texts_below(dir: PathBuf) -> Vec<(PathBuf, String)> {
    let (mut found, mut left) = (Vec::new(), vec![dir]);
    while let Some(next) = left.pop() {
        for entry in fs::read_dir(next).unwrap().flatten() {
            if entry.file_type().unwrap().is_dir() {
                left.push(entry.path());
            } else {
                found.push((entry.path(), fs::read_to_string(entry.path()).unwrap_or_default()));
            }
        }
    }
    found
}

/// A block between fences: its language, the number of its first line, its text.
fn blocks(text: &str) -> Vec<(String, usize, String)> {
    let mut blocks = Vec::new();
    let mut open: Option<(String, usize, String)> = None;
    for (at, line) in text.lines().enumerate() {
        match (&mut open, line.trim_start().strip_prefix("```")) {
            (None, Some(language)) => open = Some((language.trim().to_owned(), at + 2, String::new())),
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some((_, _, block)), None) => *block += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a block does not end");
    blocks
}

/// The words of a line as a shell splits them, up to a comment, a pipe or a redirection.
pub(crate) fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for letter in line.chars().chain([' ']) {
        match (quote, letter) {
            (Some(open), letter) if letter == open => quote = None,
            (Some(_), letter) => word.get_or_insert_default().push(letter),
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, '#' | '|' | '>' | ';' | '&') if word.is_none() => break,
            (None, ' ') => words.extend(word.take()),
            (None, letter) => word.get_or_insert_default().push(letter),
        }
    }
    words
}

/// A request for help is valid, too.
fn parses(words: &[String]) -> Result<(), String> {
    match Cli::try_parse_from(words) {
        Ok(_) => Ok(()),
        Err(error) if error.exit_code() == 0 => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// The command exists, and has these options.
fn is_known(words: &[String]) -> Result<(), String> {
    let cli = Cli::command();
    let command = cli.find_subcommand(&words[1]).ok_or_else(|| format!("unknown command `{}`", words[1]))?;
    let options = words.iter().map(|word| word.trim_matches(['[', ']', '…'])).take_while(|word| *word != "--");
    for option in options.filter_map(|word| word.strip_prefix("--")).filter(|option| *option != "help") {
        let is_there = command.get_arguments().any(|argument| argument.get_long() == Some(option));
        is_there.then_some(()).ok_or_else(|| format!("unknown option `--{option}`"))?;
    }
    Ok(())
}

/// Every outlast command in a shell block, and its place.
pub(crate) fn commands() -> Vec<(String, String)> {
    let mut all = Vec::new();
    for (path, text) in pages() {
        for (language, line, block) in blocks(&text) {
            if !matches!(language.as_str(), "sh" | "bash" | "console") {
                continue;
            }
            for (at, command) in block.lines().enumerate() {
                let command = command.trim_start().trim_start_matches("$ ");
                // The outlast command that another program is told to start.
                let command = command.find(" -- outlast ").map_or(command, |at| &command[at + 4..]);
                if words(command).first().is_some_and(|first| first == "outlast") {
                    all.push((format!("{}:{}", path.display(), line + at), command.to_owned()));
                }
            }
        }
    }
    all
}

#[test]
fn every_command_in_the_book_can_be_typed() {
    let commands = commands();
    for (place, command) in &commands {
        let words = words(command);
        // Brackets mark optional parts: such a line cannot be parsed, and its words are looked up.
        let is_usage = words.iter().any(|word| word.starts_with('['));
        let parsed = if is_usage { is_known(&words) } else { parses(&words) };
        if let Err(error) = parsed {
            panic!("{place}: `{command}`\n{error}");
        }
    }
    assert!(commands.len() > 60, "only {} commands were found", commands.len());
}

#[test]
fn every_configuration_in_the_book_works() {
    let mut count = 0;
    for (path, text) in pages() {
        for (language, line, block) in blocks(&text) {
            let format = match language.as_str() {
                "json" | "jsonc" => Format::Json,
                "toml" => Format::Toml,
                _ => continue,
            };
            // Some blocks are excerpts, and are not a complete configuration.
            for server in servers::read(&block, format).unwrap_or_default() {
                let How::Starts(program) = &server.how else { continue };
                if !program.command.text.ends_with("outlast") {
                    continue;
                }
                let args = program.args.iter().flat_map(|args| &args.words).map(|word| word.text.clone());
                let words: Vec<String> = ["outlast".to_owned()].into_iter().chain(args).collect();
                if let Err(error) = parses(&words) {
                    panic!("{}:{line}: {words:?}\n{error}", path.display());
                }
                count += 1;
            }
        }
    }
    assert!(count >= 7, "only {count} configurations were found");
}

#[test]
fn every_named_command_exists() {
    let cli = Cli::command();
    for (path, text) in pages() {
        for piece in text.split('`').skip(1).step_by(2) {
            let Some(rest) = piece.strip_prefix("outlast ") else { continue };
            let Some(name) = rest.split([' ', '\n', '/']).next() else { continue };
            let is_placeholder = name.starts_with(['-', '…', '<']) || name == "COMMAND";
            assert!(is_placeholder || cli.find_subcommand(name).is_some(), "{}: `outlast {name}`", path.display());
        }
    }
}

/// A `cargo xtask COMMAND` in a page or a workflow is a command of xtask.
#[test]
fn every_named_xtask_command_exists() {
    let xtask = fs::read_to_string(root().join("xtask/src/main.rs")).unwrap();
    let workflows = texts_below(root().join(".github"));
    let mut count = 0;
    for (path, text) in pages().into_iter().chain(workflows) {
        for rest in text.split("cargo xtask ").skip(1) {
            let name: String = rest.chars().take_while(char::is_ascii_lowercase).collect();
            let is_there = name == "help" || name.is_empty() || xtask.contains(&format!("\"{name}\" =>"));
            assert!(is_there, "{}: `cargo xtask {name}`", path.display());
            count += 1;
        }
    }
    assert!(count > 10, "only {count} commands were found");
}

/// The book lists every event of the audit log.
#[test]
fn every_event_of_the_audit_log_is_in_the_book() {
    let page = fs::read_to_string(root().join("docs/files.md")).unwrap();
    for event in outlast_core::record::Event::ALL {
        assert!(page.contains(&format!("`{}`", event.name())), "docs/files.md does not name {}", event.name());
    }
}

/// The table of the page has every field of a record. The record here names all fields, so that a new field does not
/// compile before it is added here.
#[test]
fn every_field_of_the_audit_log_is_in_the_book() {
    use outlast_core::record::{Event, OfGateway, Record};
    let text = || Some("x".to_owned());
    let gateway = OfGateway {
        backend: text(),
        who: text(),
        role: text(),
        method: text(),
        tool: text(),
        outcome: Some("x"),
        peer: text(),
        session: text(),
        suppressed: Some(1),
    };
    let second = Some(std::time::Duration::from_secs(1));
    let record = Record {
        event: Event::ServerCrashed,
        id: text(),
        kind: Some("mcp"),
        reason: text(),
        pid: Some(1),
        previous_pid: Some(1),
        generation: Some(1),
        exit_code: Some(1),
        signal: Some(1),
        detail: text(),
        crashes: Some(1),
        restarts: Some(1),
        delay: second,
        uptime: second,
        took: second,
        lost: Some(1),
        gateway: Some(Box::new(gateway)),
    };
    let line: serde_json::Value = serde_json::from_str(&record.to_line("2026-01-13T14:32:45.123Z", "outlast")).unwrap();
    let fields: BTreeSet<String> = line["props"].as_object().unwrap().keys().cloned().collect();
    let page = fs::read_to_string(root().join("docs/files.md")).unwrap();
    let (_, table) = page.split_once("| field | meaning |\n").expect("the table is there");
    let (table, _) = table.split_once("\n\n").expect("the table ends");
    let cells = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
    let named: BTreeSet<String> =
        cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect();
    assert_eq!(fields, named);
}

/// Every exit code of outlast itself is in the table, also in `outlast help exit-codes`. They all have names in
/// `report.rs`, and no other file has a number.
#[test]
fn every_exit_code_is_in_the_book() {
    let topic = TOPICS.iter().find(|topic| topic.name == "exit-codes").unwrap();
    let rows = topic.page.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" |"));
    let codes: BTreeSet<u8> =
        rows.flat_map(|(codes, _)| codes.split(", ")).filter_map(|code| code.parse().ok()).collect();
    let source = root().join("crates/outlast/src");
    let names = fs::read_to_string(source.join("cli/report.rs")).unwrap();
    let named = names.lines().filter_map(|line| {
        let (_, value) = line.strip_prefix("pub(crate) const ")?.split_once(": u8 = ")?;
        value.trim_end_matches(';').parse().ok()
    });
    assert_eq!(codes, named.chain([0]).collect());
    assert!(topic.page.contains("128 + n"), "signals");
    for (path, text) in texts_below(source) {
        for start in ["ExitCode::from(", "Report::new("] {
            let after = text.split(start).skip(1).filter_map(|rest| rest.trim_start().chars().next());
            let numbers = after.filter(|letter| ('1'..='9').contains(letter)).count();
            assert_eq!(numbers, 0, "{}: a code without a name after {start}", path.display());
        }
    }
}

/// A newcomer in a fresh clone types two commands; the first use of the program follows.
#[test]
fn the_quick_start_has_two_commands_and_then_the_first_use() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let (_, section) = readme.split_once("## Quick start\n").expect("there is a quick start");
    let (section, _) = section.split_once("\n## ").expect("it ends");
    let blocks = blocks(section);
    let shells: Vec<Vec<String>> = blocks
        .iter()
        .filter(|(language, _, _)| language == "sh")
        .map(|(_, _, block)| block.lines().map(|line| words(line).join(" ")).collect())
        .collect();
    assert_eq!(shells[0], ["cargo run --release -- demo", "cargo xtask test"]);
    assert!(shells[1].contains(&"outlast wrap".to_owned()), "{shells:?}");
}

/// The meaning of exit code 0 is stated where a newcomer reads, with the effect of `outlast wrap` (H4).
#[test]
fn readme_and_book_state_the_meaning_of_exit_code_0() {
    for page in ["README.md", "docs/mcp.md", "docs/wrap.md"] {
        let text = fs::read_to_string(root().join(page)).unwrap();
        assert!(text.contains("`--on-clean-exit restart`"), "{page}");
    }
}

/// The anchors of the headings of a page, as mdbook and forges make them.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let anchor = |heading: &str| -> String {
        let kept =
            heading.to_lowercase().chars().map(|letter| if letter == ' ' { '-' } else { letter }).collect::<String>();
        kept.chars().filter(|letter| letter.is_alphanumeric() || "-_".contains(*letter)).collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn every_link_has_a_target() {
    let mut count = 0;
    for (path, text) in pages() {
        for piece in text.split("](").skip(1) {
            let target = piece.split(')').next().unwrap_or_default();
            if target.contains("://") {
                continue;
            }
            // A link within the page.
            let target = if target.starts_with('#') {
                &format!("{}{target}", path.file_name().unwrap().display())
            } else {
                target
            };
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let place = path.parent().unwrap().join(file);
            assert!(place.exists(), "{}: {target}", path.display());
            if !heading.is_empty() {
                let page = fs::read_to_string(&place).unwrap();
                assert!(anchors(&page).contains(heading), "{}: {target}", path.display());
            }
            count += 1;
        }
    }
    assert!(count > 40, "only {count} links were found");
}

#[test]
fn every_page_is_in_both_lists_of_pages() {
    let docs = root().join("docs");
    let listed = |list: &str| -> BTreeSet<String> {
        let text = fs::read_to_string(docs.join(list)).unwrap();
        text.split("](").skip(1).filter_map(|piece| piece.split(')').next()).map(str::to_owned).collect()
    };
    let names = pages().into_iter().filter(|(path, _)| path.starts_with(&docs));
    let names: BTreeSet<String> =
        names.map(|(path, _)| path.strip_prefix(&docs).unwrap().to_string_lossy().into_owned()).collect();
    let except = |name: &str| -> BTreeSet<String> {
        names.iter().filter(|known| *known != name && *known != "SUMMARY.md").cloned().collect()
    };
    assert_eq!(listed("README.md"), except("README.md"));
    assert_eq!(listed("SUMMARY.md"), except("SUMMARY.md"));
}

#[test]
fn help_topics_are_quoted_from_the_book() {
    let pages = pages();
    for topic in TOPICS {
        let is_there = pages.iter().any(|(_, text)| text.contains(topic.page));
        assert!(is_there, "the topic `{}` and the book differ", topic.name);
    }
}

/// Every row of the threat model names tests that exist, and every entry point has its table.
#[test]
fn every_defence_in_the_threat_model_has_its_tests() {
    let mut tests = BTreeSet::new();
    for (_, text) in texts_below(root().join("crates")) {
        let named = text.split("#[test]").skip(1).filter_map(|rest| rest.split_once("fn ")?.1.split_once('('));
        tests.extend(named.map(|(name, _)| name.to_owned()));
    }
    let page = fs::read_to_string(root().join("docs/threats.md")).unwrap();
    let sections: Vec<&str> = page.split("\n## ").skip(1).collect();
    assert_eq!(sections.len(), 7, "client, server, repository, other user, network, web page, terminal");
    for section in sections {
        let (title, table) = section.split_once("|---|---|---|\n").expect("each entry point has a table");
        let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| ")).collect();
        assert!(!rows.is_empty(), "{title}");
        for row in rows {
            let named = row.trim_end_matches(" |").rsplit(" | ").next().unwrap_or_default();
            let named: Vec<&str> = named.split('`').skip(1).step_by(2).collect();
            assert!(!named.is_empty(), "no test: {row}");
            for name in named {
                assert!(tests.contains(name), "no test is named `{name}`");
            }
        }
    }
}
