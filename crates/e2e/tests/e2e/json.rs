//! The output for programs: every `--json` has the fields that the book promises, and no others.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use clap::CommandFactory;
use outlast::cli::Cli;
use serde_json::Value;

use crate::{
    gateway::world::{Gate, backend, outlast},
    mcp::client::{Place, Setup, until},
};

/// Fields by the name of their object; those of the top level under the empty name.
type Fields = BTreeMap<String, BTreeSet<String>>;

/// The page for programs: the fields of each command, and of the objects in them.
fn promised() -> BTreeMap<String, Fields> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/programs.md");
    let text = fs::read_to_string(page).unwrap();
    let names = |text: &str| text.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<String>>();
    let mut all = BTreeMap::new();
    for row in text.lines().filter_map(|line| line.strip_prefix("| `outlast ")) {
        let (command, cells) = row.split_once("` | ").expect("a row has cells");
        let (own, nested) = cells.trim_end_matches(" |").split_once(" | ").unwrap_or((cells, ""));
        // `state` has a row for each kind of instance.
        let fields: &mut Fields = all.entry(command.to_owned()).or_default();
        fields.entry(String::new()).or_default().extend(names(own));
        for group in nested.split(';').map(names).filter(|group| !group.is_empty()) {
            fields.entry(group[0].clone()).or_default().extend(group[1..].iter().cloned());
        }
    }
    all
}

/// Fields that are optional according to the page: the list below the table, and `props` of the audit log.
fn promised_at_times() -> Fields {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let names = |text: &str| text.split('`').skip(1).step_by(2).map(str::to_owned).collect::<BTreeSet<String>>();
    let page = fs::read_to_string(docs.join("programs.md")).unwrap();
    let (_, list) = page.split_once("only if they apply:\n\n").expect("the list is there");
    let (list, _) = list.split_once("\n\n").expect("the list ends");
    let mut fields = Fields::from([(String::new(), BTreeSet::new())]);
    for item in list.split("\n- ") {
        let (name, inside) = item.trim_start_matches("- ").split_once(':').expect("a name and what it is");
        let name = name.trim_matches('`').to_owned();
        fields.get_mut("").expect("made above").insert(name.clone());
        fields.insert(name, names(inside));
    }
    let page = fs::read_to_string(docs.join("files.md")).unwrap();
    let (_, table) = page.split_once("| field | meaning |\n").expect("the table is there");
    let (table, _) = table.split_once("\n\n").expect("the table ends");
    let cells = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
    fields.insert("props".to_owned(), cells.flat_map(names).collect());
    fields
}

/// Adds the fields of a value, or of all elements of a list, and of every object in it under its name.
fn gather(value: &Value, name: &str, found: &mut Fields) {
    match value {
        Value::Array(all) => all.iter().for_each(|one| gather(one, name, found)),
        Value::Object(members) => {
            let fields = found.entry(name.to_owned()).or_default();
            fields.extend(members.keys().cloned());
            // Configured values may have any form.
            members
                .iter()
                .filter(|(inner, _)| *inner != "value")
                .for_each(|(inner, value)| gather(value, inner, found));
        }
        _ => {}
    }
}

/// The first cells of the table of `docs/files.md` about this directory.
fn promised_files(directory: &str) -> Vec<String> {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/files.md")).unwrap();
    let (_, table) = page.split_once(&format!("| in `{directory}` | content |\n")).expect("the table is there");
    let (table, _) = table.split_once("\n\n").expect("the table ends");
    let cells = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

/// Whether a path matches this pattern, in which `<id>` stands for any name.
fn is_of_form(path: &str, form: &str) -> bool {
    let mut parts = form.split('<').map(|part| part.split_once('>').map_or(part, |(_, rest)| rest));
    let Some(mut rest) = parts.next().and_then(|first| path.strip_prefix(first)) else { return false };
    let parts: Vec<&str> = parts.collect();
    for (at, part) in parts.iter().enumerate() {
        let is_last = at + 1 == parts.len();
        let found = if is_last { rest.strip_suffix(part).map(|_| rest.len() - part.len()) } else { rest.find(part) };
        match found {
            Some(at) if at > 0 && !rest[..at].contains('/') => rest = &rest[at + part.len()..],
            _ => return false,
        }
    }
    rest.is_empty()
}

/// Every file below a directory, as paths from there.
fn files_below(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut left = vec![directory.to_owned()];
    while let Some(next) = left.pop() {
        for entry in fs::read_dir(&next).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => left.push(entry.path()),
                _ => found.push(entry.path().strip_prefix(directory).unwrap().to_str().unwrap().to_owned()),
            }
        }
    }
    found
}

/// Checks that the book names every file that running instances keep on disk.
fn every_file_is_in_the_book(place: &Place) {
    for (directory, below) in [(".outlast/", ".outlast"), ("~/.local/state/outlast/", ".local/state/outlast")] {
        let forms = promised_files(directory);
        let found = files_below(&place.path().join(below));
        assert!(found.len() >= 3, "{found:?}");
        for file in found {
            assert!(forms.iter().any(|form| is_of_form(&file, form)), "docs/files.md does not name {directory}{file}");
        }
    }
}

#[test]
fn file_formats_are_distinguished() {
    let table = [
        ("logs/a-1.log", "logs/<id>.log", true),
        ("logs/a-1.log.1", "logs/<id>.log", false),
        ("logs/.log", "logs/<id>.log", false),
        ("wrapped/ab/original", "wrapped/<hash>/original", true),
        ("wrapped/ab/cd/original", "wrapped/<hash>/original", false),
        ("audit.jsonl", "audit.jsonl", true),
        ("audit.jsonl2", "audit.jsonl", false),
    ];
    for (path, form, expected) in table {
        assert_eq!(is_of_form(path, form), expected, "{path} {form}");
    }
}

/// Every command that has the option, by its words.
fn commands_with_json(command: &clap::Command, words: &str, all: &mut BTreeSet<String>, without: &mut Vec<String>) {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        let words = format!("{words} {}", below.get_name()).trim().to_owned();
        if below.get_arguments().any(|argument| argument.get_id() == "json") {
            all.insert(words.clone());
        } else if !below.has_subcommands() || words == "gateway" {
            without.push(words.clone());
        }
        commands_with_json(below, &words, all, without);
    }
}

#[test]
fn json_output_of_every_command_matches_the_book() {
    let promised = promised();
    let (mut all, mut without) = (BTreeSet::new(), Vec::new());
    commands_with_json(&Cli::command(), "", &mut all, &mut without);
    assert_eq!(all.iter().collect::<Vec<_>>(), promised.keys().collect::<Vec<_>>(), "each has a row, and only those");
    // These speak a protocol, need a terminal, or print or write a file.
    let rest = [
        "mcp",
        "gateway",
        "run",
        "startup enable",
        "startup disable",
        "attach",
        "config schema",
        "help",
        "completions",
        "man",
    ];
    assert_eq!(without, rest);

    let gate = Gate::listen(Place::new(), &backend("one", &[], ""));
    let place = &gate.place;
    let mut weather = Setup::new(place).options(["--name", "weather"]).hasty().ready();
    weather.kill_server();
    until("the server is back", || (weather.tool_names().len() > 3).then_some(()));
    let night = ["run", "-d", "--session", "night", "--", "sh", "-c", "printf 'ready> '; exec cat"];
    assert!(outlast(place, &night).status.success());
    until("the agent is ready", || {
        let state = gate.json(&["state", "night"]);
        (state["state"] == "ready").then_some(())
    });
    place.write("clients.json", r#"{"mcpServers": {"a": {"command": "python"}, "b": {"url": "http://x/"}}}"#);
    let lines: [(&str, &[&str]); 39] = [
        ("ps", &["ps"]),
        ("top", &["top"]),
        ("state", &["state", "weather"]),
        ("state", &["state", "gateway"]),
        ("state", &["state", "gateway/one"]),
        ("state", &["state", "night"]),
        ("pid", &["pid", "weather"]),
        ("pid", &["pid", "night"]),
        ("pid", &["pid", "gateway/one"]),
        ("restart", &["restart", "weather"]),
        ("state", &["state", "weather"]),
        ("ps", &["ps"]),
        ("restart", &["restart", "gateway/one"]),
        ("restart", &["restart", "gateway"]),
        ("restart", &["restart", "night"]),
        ("upgrade", &["upgrade", "weather"]),
        ("resume", &["resume", "weather"]),
        ("resume", &["resume", "night"]),
        ("switch", &["switch", "gateway", "--off", "one__echo"]),
        ("reload", &["reload", "gateway"]),
        ("inject", &["inject", "night", "x", "--enter"]),
        ("wait-for", &["wait-for", "night", "--quiet", "0.1"]),
        ("send", &["send", "night", "hello"]),
        ("screen", &["screen", "night"]),
        ("restore", &["restore"]),
        ("startup status", &["startup", "status"]),
        ("logs", &["logs", "weather"]),
        ("logs", &["logs", "night"]),
        ("audit", &["audit"]),
        ("config show", &["config", "show"]),
        ("trust", &["trust", "--show"]),
        ("trust", &["trust"]),
        ("trust", &["trust", "--remove"]),
        ("gateway check", &["gateway", "check"]),
        ("gateway hash-key", &["gateway", "hash-key", "ann"]),
        ("wrap", &["wrap", "--yes", "clients.json"]),
        ("unwrap", &["unwrap", "--yes", "clients.json"]),
        ("doctor", &["doctor", "--no-start"]),
        ("demo", &["demo"]),
    ];
    let mut found: BTreeMap<&str, Fields> = BTreeMap::new();
    let ends =
        [("stop", vec!["stop", "night"]), ("stop", vec!["stop", "weather"]), ("stop", vec!["stop", "gateway/one"])];
    for (command, args) in lines.into_iter().map(|(command, args)| (command, args.to_vec())).chain(ends) {
        let output = outlast(place, &[&args[..], &["--json"]].concat());
        let said = String::from_utf8(output.stdout).unwrap();
        let said_wrong = || format!("{args:?}: {said}\n{}", String::from_utf8_lossy(&output.stderr));
        // The doctor finds problems in this small world, and its exit code shows that.
        assert!(output.status.success() || command == "doctor", "{}", said_wrong());
        let values: Vec<Value> = match command {
            "logs" | "audit" => said.lines().map(|line| serde_json::from_str(line).unwrap()).collect(),
            _ => vec![serde_json::from_str(&said).unwrap_or_else(|_| panic!("{}", said_wrong()))],
        };
        assert!(!values.is_empty(), "{}", said_wrong());
        if matches!(command, "wrap" | "unwrap") {
            let (file, done) = (&values[0]["files"][0], format!("{command}ped"));
            assert_eq!((&file["written"], &file["servers"][0]["outcome"]), (&true.into(), &done.into()), "{file}");
            assert_eq!(file["servers"][1]["outcome"], "left", "{file}");
        }
        values.iter().for_each(|value| gather(value, "", found.entry(command).or_default()));
        if matches!(command, "wrap" | "demo") {
            every_file_is_in_the_book(place);
        }
    }
    weather.end();
    let at_times = promised_at_times();
    for (command, wanted) in &promised {
        let found = &found[command.as_str()];
        let nothing = BTreeSet::new();
        for (name, fields) in wanted {
            let missing: Vec<&String> = fields.difference(found.get(name).unwrap_or(&nothing)).collect();
            assert!(missing.is_empty(), "outlast {command} --json has no {missing:?} in {name:?}");
        }
        for (name, fields) in found {
            let known = |field: &&String| {
                [wanted, &at_times].into_iter().any(|known| known.get(name).unwrap_or(&nothing).contains(*field))
            };
            let more: Vec<&String> = fields.iter().filter(|field| !known(field)).collect();
            assert!(more.is_empty(), "docs/programs.md does not name {more:?} in {name:?} of outlast {command} --json");
        }
    }
    gate.end();
}

#[test]
fn a_failure_is_an_object_too() {
    let place = Place::new();
    for args in
        [&["state", "unknown"][..], &["gateway", "check", "--config", "none.toml"], &["wrap"], &["send", "x", "y"]]
    {
        let output = outlast(&place, &[args, &["--json"]].concat());
        let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{args:?}: {output:?}"));
        let error = &said["error"];
        assert!(error["message"].is_string() && error["hint"].is_string(), "{args:?}: {said}");
        assert_eq!(error["exit_code"].as_i64(), output.status.code().map(i64::from), "{args:?}: {said}");
        let words = String::from_utf8(output.stderr).unwrap();
        assert!(words.starts_with(&format!("error: {}", error["message"].as_str().unwrap())), "{args:?}: {words}");
    }
    // A command that prints records prints nothing else.
    let output = outlast(&place, &["logs", "unknown", "--json"]);
    assert_eq!((output.stdout.as_slice(), output.status.code()), (&b""[..], Some(1)));
}
