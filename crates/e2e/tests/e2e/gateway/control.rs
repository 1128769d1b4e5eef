//! A gateway and its backends, viewed and controlled from another terminal.

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::world::{Gate, HASTY, backend, outlast};
use crate::mcp::client::{PUPPET, Place, is_alive, signal, until};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn ps_shows_a_gateway_and_its_backends() {
    let gate = Gate::listen(Place::new(), &[backend("one", &[], ""), backend("two", &[], "")].concat());
    let (one, two) = (gate.child("one"), gate.child("two"));
    let rows = gate.json(&["ps"]);
    let rows = rows.as_array().expect("an array");
    let id = rows[0]["id"].as_str().expect("an id").to_owned();
    let kinds: Vec<&str> = rows.iter().filter_map(|row| row["kind"].as_str()).collect();
    assert_eq!(kinds, ["gateway", "backend", "backend"]);
    let row = |name: &str| rows.iter().find(|row| row["id"] == format!("{id}/{name}")).expect("a row").clone();
    assert_eq!((&row("one")["child_pid"], &row("two")["child_pid"]), (&json!(one), &json!(two)));
    for row in rows {
        for member in ["id", "kind", "state", "pid", "cwd", "socket", "uptime_s", "restarts"] {
            assert!(!row[member].is_null(), "{member} of {row}");
        }
        assert_eq!(row["pid"], gate.client.pid(), "outlast's own");
    }
    let words = text(&gate.outlast(&["ps"]).stdout);
    assert!(words.contains("/one") && words.contains("backend") && words.contains("ready"), "{words}");
    gate.end();
}

#[test]
fn a_backend_is_addressed_by_its_name() {
    let gate = Gate::listen(Place::new(), &[backend("one", &[], ""), backend("two", &[], "")].concat());
    let (one, two) = (gate.child("one"), gate.child("two"));
    let id = gate.state()["id"].as_str().expect("an id").to_owned();
    for name in [format!("{id}/one"), "gateway/one".to_owned(), "one".to_owned()] {
        let state = gate.json(&["state", &name]);
        assert_eq!((&state["pid"], &state["kind"]), (&json!(one), &json!("backend")), "{name}: {state}");
        assert_eq!(state["id"], format!("{id}/one"));
    }
    assert_eq!(text(&gate.outlast(&["pid", "two"]).stdout).trim(), two.to_string());

    let restarted = gate.outlast(&["restart", "one", "--reason", "by name"]);
    assert!(restarted.status.success(), "{}", text(&restarted.stderr));
    assert!(text(&restarted.stdout).contains(&format!("Restarted {id}/one")), "{}", text(&restarted.stdout));
    assert_ne!(gate.child("one"), one);
    assert_eq!(gate.child("two"), two, "not touched");
    let requested = gate.place.recorded("server_restart_requested", 1);
    assert_eq!((&requested["backend"], &requested["reason"]), (&json!("one"), &json!("by name")));

    let unknown = gate.outlast(&["state", "gateway/three"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(text(&unknown.stderr).contains("no backend is named \"three\"; known are one, two"), "{unknown:?}");
    gate.end();
}

#[test]
fn a_stopped_backend_does_not_run_until_it_is_resumed() {
    let gate = Gate::listen(Place::new(), &[backend("one", &[], HASTY), backend("two", &[], "")].concat());
    let mut session = gate.session();
    let one = gate.child("one");
    let stopped = gate.outlast(&["stop", "one"]);
    assert!(stopped.status.success(), "{}", text(&stopped.stderr));
    until("the child to be gone", || (!is_alive(one)).then_some(()));
    let refused = session.ask("tools/call", json!({"name": "one__echo", "arguments": {}}));
    let words = refused.to_string();
    assert!(words.contains("off"), "{words}");
    assert_eq!(session.call("two__echo", json!({"text": "goes on"})), "goes on");
    let resumed = gate.outlast(&["resume", "one"]);
    assert!(resumed.status.success(), "{}", text(&resumed.stderr));
    assert_eq!(session.call("one__echo", json!({"text": "back"})), "back");
    let id = gate.state()["id"].as_str().expect("an id").to_owned();
    let nothing = gate.outlast(&["resume", &id]);
    assert_eq!(text(&nothing.stdout), format!("Nothing to resume: {id} is running\n"), "no backend was restarted");
    gate.end();
}

#[test]
fn a_tool_is_switched_off_and_on() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], ""));
    let mut session = gate.session();
    session.call("one__echo", json!({"text": "on"}));
    let off = gate.outlast(&["switch", "--off", "one__echo"]);
    assert!(off.status.success(), "{}", text(&off.stderr));
    let refused = session.ask("tools/call", json!({"name": "one__echo", "arguments": {"text": "off"}}));
    assert!(refused.to_string().contains("off"), "{refused}");
    assert_eq!(session.call("one__pid", json!({})), gate.child("one").to_string(), "another tool goes on");
    assert!(gate.outlast(&["switch", "--on", "one__echo"]).status.success());
    assert_eq!(session.call("one__echo", json!({"text": "on"})), "on");
    assert_eq!(gate.place.audit_of("switched").len(), 2);
    let nothing = gate.outlast(&["switch"]);
    assert_eq!(nothing.status.code(), Some(2), "{}", text(&nothing.stderr));
    gate.end();
}

#[test]
fn only_existing_tools_are_switched_off_even_if_their_backend_is_down() {
    let place = Place::new();
    let broken = place.join("broken");
    let mut gate =
        Gate::listen(place, &backend("one", &["--fail-if", &broken], "max_restarts = 1\ndelay_first = \"10ms\""));
    until("what it offers", || (gate.backend("one")["catalogue"] == "confirmed").then_some(()));
    for (name, meant) in
        [("one__ecoh", "did you mean `one__echo`?"), ("oen", "did you mean `one`?"), ("what", "`outlast state`")]
    {
        let wrong = gate.outlast(&["switch", "--off", name]);
        let words = text(&wrong.stderr);
        assert_eq!(wrong.status.code(), Some(1), "{words}");
        assert!(
            words.contains(&format!("no backend and no tool is named `{name}`")) && words.contains(meant),
            "{words}"
        );
    }
    assert_eq!(gate.place.audit_of("switched").len(), 0);
    // After the next start it is known from the cache, and is not started.
    signal(gate.client.pid(), Signal::SIGTERM);
    gate.client.wait();
    gate.place.write("broken", "no");
    let config = std::fs::read_to_string(gate.place.join("outlast.toml")).expect("ours");
    let gate = Gate::listen(gate.place, &config);
    gate.is("one", "given_up");
    assert!(gate.outlast(&["switch", "--off", "one__echo"]).status.success());
    assert_eq!(gate.state()["switched_off"], json!([{"tool": "one__echo"}]));
    gate.end();
}

#[test]
fn generations_continue_after_a_backend_was_off() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], ""));
    let first = gate.child("one");
    assert_eq!(gate.backend("one")["generation"], 1);
    assert!(gate.outlast(&["switch", "--off", "one"]).status.success());
    until("it to be gone", || (!is_alive(first)).then_some(()));
    assert!(gate.outlast(&["switch", "--on", "one"]).status.success());
    gate.child("one");
    assert_eq!(gate.backend("one")["generation"], 2);
    gate.place.write("outlast.toml", &backend("one", &["--prompts"], ""));
    gate.place.recorded("configured", 1);
    until("its next life", || (gate.backend("one")["generation"] == 3).then_some(()));
    gate.end();
}

#[test]
fn logs_and_audit_can_be_limited_to_a_backend() {
    let gate = Gate::listen(Place::new(), &[backend("one", &[], HASTY), backend("two", &[], "")].concat());
    let mut session = gate.session();
    session.call("one__stderr", json!({"text": "one speaks"}));
    session.call("two__stderr", json!({"text": "two speaks"}));
    session.result("one__crash", json!({}));
    gate.place.recorded("server_crashed", 1);
    let logs = text(&gate.outlast(&["logs", "one"]).stdout);
    assert!(logs.contains("one speaks") && logs.contains("crashed") && !logs.contains("two"), "{logs}");
    let all = text(&gate.outlast(&["logs"]).stdout);
    assert!(all.contains("one speaks") && all.contains("two speaks"), "{all}");
    let audit = text(&gate.outlast(&["audit", "gateway/one", "--json"]).stdout);
    let records: Vec<Value> = audit.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert!(records.iter().any(|record| record["props"]["event_type"] == "server_crashed"), "{audit}");
    assert!(records.iter().all(|record| record["props"]["backend"] == "one"), "{audit}");
    gate.end();
}

#[test]
fn every_call_is_recorded_without_its_arguments() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], ""));
    let mut session = gate.session();
    session.call("one__echo", json!({"text": "a secret word"}));
    let called = until("the call in the audit log", || {
        let all = gate.place.audit_of("call_ended");
        all.into_iter().map(|record| record["props"].clone()).find(|props| props["tool"] == "one__echo")
    });
    for (member, value) in [("backend", "one"), ("outcome", "answered"), ("method", "tools/call"), ("who", "local")] {
        assert_eq!(called[member], value, "{called}");
    }
    assert!(called["took_ms"].is_u64(), "{called}");
    assert!(!called.to_string().contains("a secret word"));
    gate.end();
}

#[test]
fn a_gateway_is_stopped_from_outside() {
    let mut gate = Gate::listen(Place::new(), &backend("one", &[], ""));
    gate.child("one");
    let stopped = outlast(&gate.place, &["stop"]);
    assert!(stopped.status.success(), "{}", text(&stopped.stderr));
    assert_eq!(gate.client.wait().code(), Some(0));
    gate.place.is_swept();
}

#[test]
fn a_restart_that_fails_shows_the_output_of_the_new_process() {
    let place = Place::new();
    let broken = place.join("broken");
    let text =
        format!("#!/bin/sh\nif [ -e {broken} ]; then echo 'no such table: users' >&2; exit 3; fi\nexec {PUPPET}\n");
    let script = place.script("server.sh", &text);
    let config = format!("[[backend]]\nname = \"one\"\ncommand = {script:?}\n{HASTY}\n");
    let gate = Gate::listen(place, &config);
    let before = gate.child("one");
    gate.place.write("broken", "");
    let failed = gate.outlast(&["restart", "one"]);
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert_eq!(failed.status.code(), Some(1), "{said}");
    for part in ["exit code 3", "the old one keeps serving", "its stderr:", "no such table: users"] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
    let report = gate.json(&["restart", "one"]);
    assert_eq!(report["error"]["stderr_tail"].as_str().map(str::trim), Some("no such table: users"), "{report}");
    assert_eq!(gate.child("one"), before);
    gate.end();
}

#[test]
fn a_start_after_an_idle_stop_is_no_restart() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], "idle_stop = \"100ms\""));
    let mut session = gate.session();
    session.call("one__pid", json!({}));
    gate.is("one", "idle");
    session.call("one__pid", json!({}));
    assert_eq!(gate.backend("one")["restarts"], 0);
    gate.client.says("(restart #0, generation 2)");
    let started = gate.place.recorded("server_started", 2);
    assert_eq!(started["restarts"], 0, "{started}");
    let metrics = super::web::Web::connect(&gate.address).get("/metrics").text();
    let restarts: Vec<&str> = metrics.lines().filter(|line| line.starts_with("outlast_backend_restarts")).collect();
    assert!(restarts.iter().all(|line| line.ends_with(" 0")), "{restarts:?}");
    gate.end();
}
