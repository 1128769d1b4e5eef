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

/// Every exit code that outlast has of its own stands in the table, also in `outlast help exit-codes`.
#[test]
fn every_exit_code_is_in_the_book() {
    let topic = TOPICS.iter().find(|topic| topic.name == "exit-codes").unwrap();
    let rows = topic.page.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" |"));
    let codes: BTreeSet<u8> =
        rows.flat_map(|(codes, _)| codes.split(", ")).filter_map(|code| code.parse().ok()).collect();
    use outlast::report::{FAILURE, NOT_EXECUTABLE, NOT_FOUND, TIMED_OUT, USAGE};
    assert_eq!(codes, BTreeSet::from([0, FAILURE, USAGE, TIMED_OUT, NOT_EXECUTABLE, NOT_FOUND]));
    assert!(topic.page.contains("128 + n"), "signals");
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
