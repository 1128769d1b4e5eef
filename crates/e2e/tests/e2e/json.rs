//! What programs read: every `--json` gives the fields that the book promises, and no others.

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

/// Fields by name; those of the value itself under the empty one.
type Fields = BTreeMap<String, BTreeSet<String>>;

/// The page for programs: the fields of each command, and of what is in them.
fn promised() -> BTreeMap<String, Fields> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/programs.md");
    let text = fs::read_to_string(page).unwrap();
    let names = |text: &str| text.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<String>>();
    let mut all = BTreeMap::new();
    for row in text.lines().filter_map(|line| line.strip_prefix("| `outlast ")) {
        let (command, cells) = row.split_once("` | ").expect("a row has cells");
        let (own, nested) = cells.trim_end_matches(" |").split_once(" | ").unwrap_or((cells, ""));
        let mut fields = Fields::from([(String::new(), names(own).into_iter().collect())]);
        for group in nested.split(';').map(names).filter(|group| !group.is_empty()) {
            fields.insert(group[0].clone(), group[1..].iter().cloned().collect());
        }
        all.insert(command.to_owned(), fields);
    }
    all
}

/// Adds the fields of a value, or of all that are in a list, and of what stands under one of these names in it.
fn gather(value: &Value, name: &str, wanted: &Fields, found: &mut Fields) {
    match value {
        Value::Array(all) => all.iter().for_each(|one| gather(one, name, wanted, found)),
        Value::Object(members) => {
            let fields = found.entry(name.to_owned()).or_default();
            fields.extend(members.keys().cloned());
            for (inner, value) in members.iter().filter(|(inner, _)| wanted.contains_key(*inner)) {
                gather(value, inner, wanted, found);
            }
        }
        _ => {}
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
fn every_command_gives_programs_what_the_book_promises() {
    let promised = promised();
    let (mut all, mut without) = (BTreeSet::new(), Vec::new());
    commands_with_json(&Cli::command(), "", &mut all, &mut without);
    assert_eq!(all.iter().collect::<Vec<_>>(), promised.keys().collect::<Vec<_>>(), "each has a row, and only those");
    // These speak a protocol, sit at a terminal, or print what is a file by itself.
    let rest = ["mcp", "gateway", "run", "attach", "config schema", "help", "completions", "man"];
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
    let lines: [(&str, &[&str]); 31] = [
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
        ("restart", &["restart", "gateway/one"]),
        ("restart", &["restart", "gateway"]),
        ("restart", &["restart", "night"]),
        ("resume", &["resume", "weather"]),
        ("resume", &["resume", "night"]),
        ("switch", &["switch", "gateway", "--off", "one__echo"]),
        ("reload", &["reload", "gateway"]),
        ("inject", &["inject", "night", "x", "--enter"]),
        ("wait-for", &["wait-for", "night", "--quiet", "0.1"]),
        ("send", &["send", "night", "hello"]),
        ("screen", &["screen", "night"]),
        ("logs", &["logs", "weather"]),
        ("logs", &["logs", "night"]),
        ("audit", &["audit"]),
        ("config show", &["config", "show"]),
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
        // The doctor finds things wrong in a world as small as this, and says so.
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
        let wanted = &promised[command];
        values.iter().for_each(|value| gather(value, "", wanted, found.entry(command).or_default()));
    }
    weather.end();
    for (command, wanted) in &promised {
        let found = &found[command.as_str()];
        for (name, fields) in wanted {
            let missing: Vec<&String> = fields.difference(&found[name]).collect();
            assert!(missing.is_empty(), "outlast {command} --json has no {missing:?} in {name:?}");
            let more: Vec<&String> = found[name].difference(fields).collect();
            // These tell all that is known of a moment, which the book does not list.
            let may_have_more = matches!(command.as_str(), "state" | "audit");
            assert!(more.is_empty() || may_have_more, "outlast {command} --json also has {more:?} in {name:?}");
        }
    }
    gate.end();
}

#[test]
fn a_failure_is_an_object_too() {
    let place = Place::new();
    for args in
        [&["state", "nobody"][..], &["gateway", "check", "--config", "none.toml"], &["wrap"], &["send", "x", "y"]]
    {
        let output = outlast(&place, &[args, &["--json"]].concat());
        let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{args:?}: {output:?}"));
        let error = &said["error"];
        assert!(error["message"].is_string() && error["hint"].is_string(), "{args:?}: {said}");
        assert_eq!(error["exit_code"].as_i64(), output.status.code().map(i64::from), "{args:?}: {said}");
        let words = String::from_utf8(output.stderr).unwrap();
        assert!(words.starts_with(&format!("error: {}", error["message"].as_str().unwrap())), "{args:?}: {words}");
    }
    // What prints records prints nothing else.
    let output = outlast(&place, &["logs", "nobody", "--json"]);
    assert_eq!((output.stdout.as_slice(), output.status.code()), (&b""[..], Some(1)));
}
