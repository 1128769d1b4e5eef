//! The book keeps its promises: its commands are commands, its links lead somewhere, its topics are the program's.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use clap::{CommandFactory, Parser};
use outlast::{
    cli::Cli,
    help::TOPICS,
    wrap::servers::{self, Format, How},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every page: its path and its text.
fn pages() -> Vec<(PathBuf, String)> {
    let folders = ["docs", "docs/internals"].map(|folder| fs::read_dir(root().join(folder)).unwrap());
    let book = folders.into_iter().flatten().map(|file| file.unwrap().path());
    let mut paths: Vec<PathBuf> = book.filter(|path| path.extension().is_some_and(|ending| ending == "md")).collect();
    paths.push(root().join("README.md"));
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

/// Every file below a directory: its path and its text, empty if it is none.
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

/// The words of a line as a shell would have them, up to a comment or what the shell does with the output.
pub fn words(line: &str) -> Vec<String> {
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

/// Help is an answer, too.
fn parses(words: &[String]) -> Result<(), String> {
    match Cli::try_parse_from(words) {
        Ok(_) => Ok(()),
        Err(error) if error.exit_code() == 0 => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// The command is there, and has these options.
fn is_known(words: &[String]) -> Result<(), String> {
    let cli = Cli::command();
    let command = cli.find_subcommand(&words[1]).ok_or_else(|| format!("there is no command `{}`", words[1]))?;
    let options = words.iter().map(|word| word.trim_matches(['[', ']', '…'])).take_while(|word| *word != "--");
    for option in options.filter_map(|word| word.strip_prefix("--")).filter(|option| *option != "help") {
        let is_there = command.get_arguments().any(|argument| argument.get_long() == Some(option));
        is_there.then_some(()).ok_or_else(|| format!("there is no option `--{option}`"))?;
    }
    Ok(())
}

/// Every command of ours in a block for shells, and where it stands.
pub fn commands() -> Vec<(String, String)> {
    let mut all = Vec::new();
    for (path, text) in pages() {
        for (language, line, block) in blocks(&text) {
            if !matches!(language.as_str(), "sh" | "bash" | "console") {
                continue;
            }
            for (at, command) in block.lines().enumerate() {
                let command = command.trim_start().trim_start_matches("$ ");
                // What another program is told to start.
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
        // Brackets mean that something may be left out: such a line is for reading, and its words are looked up.
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
            // Some are excerpts, and are no configuration of anything.
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
fn every_command_that_is_named_is_there() {
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

/// A reader of the audit log finds every event that it can hold.
#[test]
fn every_event_of_the_audit_log_is_in_the_book() {
    let page = fs::read_to_string(root().join("docs/files.md")).unwrap();
    for event in outlast_core::record::Event::ALL {
        assert!(page.contains(&format!("`{}`", event.name())), "docs/files.md does not name {}", event.name());
    }
}

/// Every field that a record can have is in the table of its page. The record names all fields, so that one more does not
/// compile here before it is known.
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
    let (_, table) = page.split_once("| field | |\n").expect("the table is there");
    let (table, _) = table.split_once("\n\n").expect("the table ends");
    let cells = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
    let named: BTreeSet<String> =
        cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect();
    assert_eq!(fields, named);
}

/// Every exit code that outlast has of its own stands in the table, also in `outlast help exit-codes`. They all have
/// names in `report.rs`, and no other file has a number.
#[test]
fn every_exit_code_is_in_the_book() {
    let topic = TOPICS.iter().find(|topic| topic.name == "exit-codes").unwrap();
    let rows = topic.page.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" |"));
    let codes: BTreeSet<u8> =
        rows.flat_map(|(codes, _)| codes.split(", ")).filter_map(|code| code.parse().ok()).collect();
    let source = root().join("crates/outlast/src");
    let names = fs::read_to_string(source.join("report.rs")).unwrap();
    let named = names.lines().filter_map(|line| {
        let (_, value) = line.strip_prefix("pub const ")?.split_once(": u8 = ")?;
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

/// A newcomer in a fresh clone types two commands; what follows is the first use of the program.
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

/// What exit code 0 means is stated where a newcomer reads, with what `outlast wrap` makes of it (H4).
#[test]
fn what_exit_code_0_means_is_stated_in_readme_and_book() {
    for page in ["README.md", "docs/mcp.md", "docs/wrap.md"] {
        let text = fs::read_to_string(root().join(page)).unwrap();
        assert!(text.contains("`--on-clean-exit restart`"), "{page}");
    }
}

#[test]
fn every_link_leads_somewhere() {
    let mut count = 0;
    for (path, text) in pages() {
        for piece in text.split("](").skip(1) {
            let target = piece.split(')').next().unwrap_or_default();
            if target.contains("://") || target.starts_with('#') {
                continue;
            }
            let file = target.split('#').next().unwrap_or_default();
            let place = path.parent().unwrap().join(file);
            assert!(place.exists(), "{}: {target}", path.display());
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
fn what_help_says_stands_in_the_book_word_for_word() {
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
                assert!(tests.contains(name), "there is no test `{name}`");
            }
        }
    }
}
