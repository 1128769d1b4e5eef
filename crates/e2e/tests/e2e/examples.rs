//! The examples of the repository, each copied into a directory of its own and run with the real program.

use std::{fs, os::unix::fs::symlink, path::Path, process::Command};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    gateway::{
        web::Session,
        world::{Gate, outlast_in},
    },
    mcp::client::{Place, Setup, signal, until},
    support::{COMPOSER, OUTLAST, nats::NatsPrograms, peers::Peers},
};

/// A copy of an example, with the Python environment of the peers in place of its own.
fn copy(name: &str, peers: Option<&Peers>) -> Place {
    let place = Place::new();
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name);
    for file in fs::read_dir(example).unwrap().flatten() {
        fs::copy(file.path(), place.path().join(file.file_name())).unwrap();
    }
    if let Some(peers) = peers {
        let python = peers.python("python-2");
        symlink(python.parent().and_then(Path::parent).unwrap(), place.path().join(".venv")).unwrap();
    }
    place
}

fn text(result: &Value) -> &str {
    result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text: {result}"))
}

#[test]
fn the_server_is_reloaded_when_it_is_saved() {
    let Some(peers) = Peers::find("the_server_is_reloaded_when_it_is_saved") else { return };
    let place = copy("reloading-server", Some(&peers));
    let config = fs::read_to_string(place.path().join(".mcp.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let words: Vec<&str> =
        config["mcpServers"]["prices"]["args"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    let at = words.iter().position(|word| *word == "--").expect("the server's command follows `--`");
    assert_eq!(words[0], "mcp");
    let setup = Setup::new(&place).options(words[1..at].iter().copied()).command(words[at + 1..].iter().copied());
    let mut client = setup.hasty().ready();
    assert_eq!(client.call("price", json!({"item": "tea"})), "tea: 5.00");

    let source = fs::read_to_string(place.path().join("server.py")).unwrap();
    place.write("server.py", &source.replace("VAT = 0.19", "VAT = 0.07"));
    until("the reload", || (client.call("price", json!({"item": "tea"})) == "tea: 4.49").then_some(()));

    // After a syntax error the old rules stay in force.
    place.write("server.py", &source.replace("VAT = 0.19", "VAT = ("));
    place.recorded("reload_failed", 1);
    assert_eq!(client.call("price", json!({"item": "tea"})), "tea: 4.49");

    // The next call after a crash is answered by a new server.
    place.write("server.py", &source);
    until("the reload", || (client.call("price", json!({"item": "tea"})) == "tea: 5.00").then_some(()));
    let pid = client.status()["pid"].as_u64().expect("a process id");
    signal(pid.try_into().expect("a process id"), Signal::SIGKILL);
    place.recorded("server_crashed", 1);
    assert_eq!(client.call("price", json!({"item": "tea"})), "tea: 5.00");
}

#[test]
fn the_gateway_of_a_team_requires_keys_and_applies_roles() {
    let Some(peers) = Peers::find("the_gateway_of_a_team_requires_keys_and_applies_roles") else { return };
    let place = copy("team-gateway", Some(&peers));
    let check = outlast_in(place.path(), &["gateway", "check", "--config", "outlast.toml"]);
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stderr));

    let gateway = Setup::gateway(&place).options(["--listen", "127.0.0.1:0"]).hasty().start();
    let line = gateway.says("listening on http://");
    let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect("an address").to_owned();
    let readme = fs::read_to_string(place.path().join("README.md")).unwrap();
    let key = |role: &str| {
        let key = format!("example-{role}-key-0123456789");
        assert!(readme.contains(&key), "the README names the key of the {role}");
        key
    };
    let session = |role: &str| {
        let mut session = Session::open_as(&address, Some(&key(role)));
        until("both backends", || (session.tools().len() >= 2).then_some(()));
        session
    };
    let mut editor = session("editor");
    until("the notes", || editor.tools().contains(&"notes__add".to_owned()).then_some(()));
    assert_eq!(editor.call("notes__add", json!({"text": "buy milk"})), "added");

    let mut reader = session("reader");
    assert!(!reader.tools().contains(&"notes__add".to_owned()), "{:?}", reader.tools());
    assert_eq!(reader.call("notes__search", json!({"word": "milk"})), "buy milk");
    let refused = reader.ask("tools/call", json!({"name": "notes__add", "arguments": {"text": "x"}}));
    assert_eq!(refused["error"]["code"], 7014, "{refused}");

    // Each session has its own counter.
    assert_eq!(text(&editor.result("counter__next_number", json!({}))), "1");
    assert_eq!(text(&editor.result("counter__next_number", json!({}))), "2");
    assert_eq!(text(&reader.result("counter__next_number", json!({}))), "1");
}

#[test]
fn two_replicas_on_one_machine_use_one_process() {
    let Some(peers) = Peers::find("two_replicas_on_one_machine_use_one_process") else { return };
    let Some(programs) = NatsPrograms::find("two_replicas_on_one_machine_use_one_process") else { return };
    let nats = programs.one();
    let places = ["a", "b"].map(|replica| {
        let place = copy("cluster", None);
        let text = fs::read_to_string(place.path().join("one-machine.toml")).unwrap();
        // The server is installed already.
        let (node, server) = (peers.node(), peers.package("server-memory/dist/index.js"));
        let text = text
            .replace("nats://127.0.0.1:4222", &nats.url())
            .replace("${REPLICA}", replica)
            .replace("\"npx\"", &format!("{node:?}"))
            .replace("\"-y\", \"@modelcontextprotocol/server-memory\"", &format!("{server:?}"));
        place.write("outlast.toml", &text);
        place
    });
    let gates = places.map(|place| {
        let text = fs::read_to_string(place.path().join("outlast.toml")).unwrap();
        Gate::listen(place, &text)
    });
    let entity = json!({"entities": [{"name": "tea", "entityType": "drink", "observations": ["hot"]}]});
    let mut sessions = gates.each_ref().map(|gate| {
        gate.is("memory", "ready");
        let mut session = gate.session();
        until("its tools", || (!session.tools().is_empty()).then_some(()));
        session
    });
    sessions[0].call("memory__create_entities", entity);
    assert!(sessions[1].call("memory__read_graph", json!({})).contains("tea"), "both use one process");
    gates.into_iter().for_each(Gate::end);
}

#[test]
fn the_agent_gets_each_task_and_is_stopped_at_the_end() {
    let place = copy("agent-overnight", None);
    fs::create_dir(place.path().join("bin")).unwrap();
    for (name, program) in [("outlast", OUTLAST), ("claude", COMPOSER)] {
        symlink(program, place.path().join("bin").join(name)).unwrap();
    }
    let mut script = Command::new(place.path().join("overnight.sh"));
    script.env_clear().env("HOME", place.path()).env("TURN", "1m");
    script.env("PATH", format!("{}:/usr/bin:/bin", place.path().join("bin").display()));
    let output = script.output().unwrap();
    let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{printed}");

    let screen = fs::read_to_string(place.path().join("screen.txt")).unwrap();
    let tasks = fs::read_to_string(place.path().join("tasks.txt")).unwrap();
    for task in tasks.lines() {
        assert!(screen.contains(task), "`{task}` is not on the screen:\n{screen}");
    }
    let ps = outlast_in(place.path(), &["ps"]);
    assert!(String::from_utf8_lossy(&ps.stdout).contains("Nothing runs"), "the session was stopped");
    assert!(fs::read_to_string(place.path().join("events.log")).unwrap_or_default().contains("waiting_for_input"));
}
