//! W6, W7: the server is replaced while its client is connected. The client loses no request, and its lists stay
//! correct.

use std::{collections::BTreeMap, fs};

use serde_json::{Value, json};

use super::client::{Client, Place, Setup, failure, is_alive, text, until};
use crate::gateway::world::outlast;

#[test]
fn fifty_reloads_under_load_fail_no_call() {
    const RELOADS: u64 = 50;
    const IN_FLIGHT: usize = 16;
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    let mut words = BTreeMap::new();
    let mut calls = 0;
    let load = |client: &mut Client, words: &mut BTreeMap<String, String>, calls: &mut u64| {
        while words.len() < IN_FLIGHT {
            *calls += 1;
            // One call in four is slow, so that there is always a call to drain.
            let (id, said) = match *calls % 4 {
                0 => (client.send_call("sleep", json!({"ms": 20})), "slept".to_owned()),
                _ => (client.send_call("echo", json!({"text": format!("call {calls}")})), format!("call {calls}")),
            };
            words.insert(id.to_string(), said);
        }
    };
    load(&mut client, &mut words, &mut calls);
    for generation in 2..=RELOADS + 1 {
        let restart = client.send_call("restart_server", json!({"reason": "under load"})).to_string();
        loop {
            let (id, answer) = client.any_answer();
            if id == restart {
                assert_eq!(answer["result"]["structuredContent"]["generation"], generation, "{answer}");
                break;
            }
            let said = words.remove(&id).expect("it was asked");
            assert_eq!(answer["result"]["isError"], false, "{answer}");
            assert_eq!(text(&answer["result"]), said);
            load(&mut client, &mut words, &mut calls);
        }
        // Two old servers may finish their calls beside the current one; a third would end the first.
        while client.status()["draining"] == 2 {}
    }
    while !words.is_empty() {
        let (id, answer) = client.any_answer();
        assert_eq!(text(&answer["result"]), words.remove(&id).expect("it was asked"));
    }
    assert_eq!(client.status()["restarts"], RELOADS);
    assert!(calls > RELOADS * 4, "only {calls} calls were made");
    assert!(client.heard.is_empty(), "{:?}", client.heard);
    client.end();
    place.is_swept();
}

#[test]
fn a_broken_reload_keeps_the_old_server_and_quotes_the_new_one() {
    let place = Place::new();
    let broken = place.join("broken");
    let mut client = Setup::new(&place).puppet(["--fail-if", &broken]).ready();
    let old = client.server_pid();
    fs::write(&broken, "SyntaxError: line 3").expect("the project is ours");
    let result = client.result("restart_server", json!({"reason": "an edit"}));
    assert_eq!(result["isError"], true, "{result}");
    for words in ["exit code 3", "SyntaxError: line 3"] {
        assert!(text(&result).contains(words), "{words}: {result}");
    }
    assert_eq!(client.server_pid(), old);
    let failed = place.recorded("reload_failed", 1);
    assert_eq!(failed["reason"], "an edit", "{failed}");
    assert!(!failed.to_string().contains("SyntaxError"), "what a server wrote is not in the audit log: {failed}");
    assert_eq!(place.audit_of("server_crashed"), Vec::<Value>::new());

    // A client that did not request the reload sees that it failed, too.
    let said = |args: &[&str]| String::from_utf8(outlast(&place, args).stdout).unwrap();
    assert!(said(&["ps"]).contains("ready, reload failed"), "{}", said(&["ps"]));
    assert!(said(&["top", "--once"]).contains("ready, reload failed"), "{}", said(&["top", "--once"]));
    let state = said(&["state"]);
    assert!(state.contains("reload     failed ") && state.contains("exit code 3"), "{state}");
    fs::remove_file(&broken).expect("the file is there");
    let report = client.restart();
    assert!(!said(&["ps"]).contains("reload failed"), "the new code runs");
    assert_eq!(report["old_pid"], old);
    assert_eq!(report["generation"], 3, "a failed one uses a number up");
    for restart in ["restart #1", "restart #2"] {
        client.says(restart);
        assert_eq!(client.stderr_text().matches(restart).count(), 1, "{}", client.stderr_text());
    }
    client.end();
}

#[test]
fn a_server_of_another_version_does_not_take_over() {
    let place = Place::new();
    let more = place.join("more");
    let mut client = Setup::new(&place).puppet(["--more", &more]).ready();
    let old = client.server_pid();
    place.write("more", "--version-only\n2024-11-05\n");
    let result = client.result("restart_server", json!({}));
    assert!(text(&result).contains("2024-11-05") && text(&result).contains("2025-06-18"), "{result}");
    assert_eq!(result["isError"], true);
    assert_eq!(client.server_pid(), old);
    place.write("more", "--era\nmodern\n");
    let result = client.result("restart_server", json!({}));
    assert_eq!(result["isError"], true, "{result}");
    assert_eq!(client.server_pid(), old);
    client.end();
    place.is_swept();
}

#[test]
fn replace_stops_the_old_server_first() {
    let place = Place::new();
    // It cannot run twice: the second process finds the lock.
    let script = place.script(
        "server",
        &format!("#!/bin/sh\nmkdir lock || exit 9\ntrap 'rmdir lock' EXIT\n{} \"$@\"\n", super::client::PUPPET),
    );
    let beside = Setup::new(&place).command([script.as_str()]);
    let mut client = beside.clone().ready();
    assert_eq!(client.result("restart_server", json!({}))["isError"], true);
    client.end();

    let mut client = beside.options(["--reload", "replace"]).ready();
    let old = client.server_pid();
    let slow = client.send_call("sleep", json!({"ms": 500}));
    let marked = place.audit_of("restart_marker_written").len();
    let restart = client.send_call("restart_server", json!({}));
    place.recorded("restart_marker_written", marked + 1);
    let held = client.send_call("pid", json!({}));
    assert_eq!(text(&client.answer(slow)["result"]), "slept", "drained first");
    let answer = client.answer(restart);
    assert_eq!(answer["result"]["isError"], false, "{answer}");
    assert!(answer["result"]["structuredContent"]["ended"].is_string(), "{answer}");
    assert!(!is_alive(old));
    let new: u32 = text(&client.answer(held)["result"]).parse().expect("a pid");
    assert_ne!(new, old);
    client.end();
    place.is_swept();
}

#[test]
fn a_build_runs_before_a_reload_and_its_failure_keeps_the_old_server() {
    let place = Place::new();
    let build = "cat source >> built && echo compiled && test ! -e broken || { echo 'error[E1]: no' >&2; exit 7; }";
    place.write("source", "a");
    let mut client = Setup::new(&place).options(["--build", build]).ready();
    assert!(!place.path().join("built").exists(), "not before the first start");
    let old = client.server_pid();
    client.restart();
    assert_eq!(fs::read_to_string(place.join("built")).expect("a file"), "a");
    let kept = client.server_pid();
    assert_ne!(kept, old);

    place.write("broken", "");
    let result = client.result("restart_server", json!({}));
    assert_eq!(result["isError"], true, "{result}");
    for words in ["exit code 7", "compiled", "error[E1]: no"] {
        assert!(text(&result).contains(words), "{words}: {result}");
    }
    assert_eq!(client.server_pid(), kept);
    assert_eq!(place.audit_of("server_started").len(), 2, "nothing was started");
    client.end();
    place.is_swept();
}

#[test]
fn a_change_of_a_watched_file_reloads_and_a_file_ignored_by_git_does_not() {
    let place = Place::new();
    fs::create_dir_all(place.path().join("src/made")).expect("the project is ours");
    fs::create_dir(place.path().join(".git")).expect("the project is ours");
    place.write(".gitignore", "made/\n*.pyc\n");
    place.write("src/server.py", "1");
    let mut client = Setup::new(&place).options(["--watch", "src"]).ready();
    let old = client.server_pid();
    // The ignored file changes first: if it counted, it would be in the reason.
    place.write("src/made/cache", "x");
    place.write("src/server.pyc", "x");
    place.write("src/server.py", "2");
    let asked = place.recorded("server_restart_requested", 1);
    let reason = asked["reason"].as_str().expect("a reason");
    assert!(reason.contains("server.py") && !reason.contains("pyc") && !reason.contains("cache"), "{reason}");
    place.recorded("server_started", 2);
    until("the new server to serve", || (client.server_pid() != old).then_some(()));
    client.says("Reloaded in");
    client.end();
}

/// Each save comes right after the start that the previous one caused, as a write of the server itself would.
#[test]
fn many_quick_saves_mute_nothing_for_long_and_the_last_one_is_served() {
    let place = Place::new();
    let tools = place.join("src/tools.json");
    let save = |number: u64| place.write("src/tools.json", &json!([{"name": format!("version_{number}")}]).to_string());
    fs::create_dir(place.path().join("src")).expect("the project is ours");
    save(0);
    let mut client = Setup::new(&place).options(["--watch", "src"]).puppet(["--tools", &tools]).ready();
    // The fifth change right after a start mutes the file; on a busy machine some changes may come later.
    let (mut number, mut starts) = (0, 1);
    while place.audit_of("watch_muted").is_empty() {
        number += 1;
        save(number);
        starts += 1;
        until("a start or a muted file", || {
            let is_started = place.audit_of("server_started").len() >= starts;
            (is_started || !place.audit_of("watch_muted").is_empty()).then_some(())
        });
    }
    assert_eq!(place.audit_of("watch_muted")[0]["props"]["detail"], "src/tools.json");
    for _ in 0..3 {
        number += 1;
        save(number);
    }
    let last = format!("version_{number}");
    until("the last save to be served", || client.tool_names().contains(&last).then_some(()));
    client.end();
    place.is_swept();
}

/// The puppet logs its input beside its source.
#[test]
fn a_muted_file_is_shown_until_a_restart_is_requested() {
    let place = Place::new();
    let log = place.join("src/heard.txt");
    fs::create_dir(place.path().join("src")).expect("the project is ours");
    let mut client =
        Setup::new(&place).options(["--name", "weather", "--watch", "src"]).puppet(["--log", &log]).ready();
    place.write("src/server.py", "1");
    place.recorded("watch_muted", 1);
    assert_eq!(client.status()["muted"], json!(["src/heard.txt"]));
    for (args, words) in [(&["state", "weather"][..], "src/heard.txt"), (&["top", "--once"], ", 1 file muted")] {
        let said = String::from_utf8(outlast(&place, args).stdout).expect("text");
        assert!(said.contains(words), "{args:?}: {said}");
    }
    client.restart();
    place.recorded("watch_unmuted", 1);
    client.end();
    place.is_swept();
}

#[test]
fn a_file_with_an_old_time_reloads_and_so_does_a_touch() {
    let place = Place::new();
    fs::create_dir_all(place.path().join("src")).expect("the project is ours");
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(1_000_000);
    let aged = |name: &str| {
        let file = fs::File::options().append(true).open(place.write(name, name)).expect("a file");
        file.set_modified(old).expect("the file is ours");
    };
    aged("src/server.py");
    aged("other.py");
    fs::create_dir(place.path().join("package")).expect("the project is ours");
    aged("package/module.py");
    let client = Setup::new(&place).options(["--watch", "src"]).ready();
    // As `mv` does.
    fs::rename(place.join("other.py"), place.join("src/server.py")).expect("the project is ours");
    place.recorded("server_started", 2);
    // As `cp -p` and `tar x` do.
    aged("src/copied.py");
    place.recorded("server_started", 3);
    // A whole directory.
    fs::rename(place.join("package"), place.join("src/package")).expect("the project is ours");
    place.recorded("server_started", 4);
    // As `touch` does: both times, nothing else.
    let now = std::time::SystemTime::now();
    let file = fs::File::options().append(true).open(place.join("src/server.py")).expect("a file");
    file.set_times(fs::FileTimes::new().set_accessed(now).set_modified(now)).expect("the file is ours");
    place.recorded("server_started", 5);
    client.end();
}

#[test]
fn slow_calls_finish_on_the_old_server_while_the_new_one_serves() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    let old = client.server_pid();
    let slow = client.send_call("sleep", json!({"ms": 700}));
    let progress = client.request(
        "tools/call",
        json!({"name": "progress", "arguments": {"steps": 3, "ms": 200}, "_meta": {"progressToken": "t"}}),
    );
    let report = client.restart();
    assert_eq!(report["ended"], Value::Null, "it drains: {report}");
    assert_ne!(client.server_pid(), old, "the new one serves");
    assert_eq!(client.status()["draining"], 1);
    assert!(!client.has_answer(slow));
    assert_eq!(text(&client.answer(slow)["result"]), "slept");
    assert_eq!(text(&client.answer(progress)["result"]), "3 steps");
    assert_eq!(client.count("notifications/progress"), 3);
    until("the old server to end", || (!is_alive(old)).then_some(()));
    client.end();
}

#[test]
fn a_call_longer_than_the_drain_fails_and_draining_servers_are_limited() {
    let place = Place::new();
    let mut client = Setup::new(&place).hasty().options(["--drain", "0.3"]).ready();
    let stuck = client.send_call("sleep", json!({"ms": 600_000}));
    client.restart();
    let answer = client.answer(stuck);
    let data = failure(&answer["result"]);
    assert_eq!((&data["reason"], &data["outcome"]), (&json!("drain_over"), &json!("unknown")), "{data}");
    client.end();

    let mut client = Setup::new(&place).hasty().ready();
    let mut stuck = Vec::new();
    for _ in 0..3 {
        stuck.push(client.send_call("sleep", json!({"ms": 600_000})));
        client.restart();
    }
    // Two servers may drain; the third ended the drain of the first.
    let answer = client.answer(stuck[0]);
    assert_eq!(failure(&answer["result"])["reason"], "drain_over", "{answer}");
    assert_eq!(client.status()["draining"], 2);
    assert!(!client.has_answer(stuck[1]) && !client.has_answer(stuck[2]));
    client.end();
    place.is_swept();
}

#[test]
fn list_changes_are_announced_and_described_in_the_restart_answer() {
    let place = Place::new();
    let tool = |name: &str, words: &str| json!({"name": name, "description": words, "inputSchema": {"type": "object"}});
    let tools =
        place.write("tools.json", &json!([tool("stays", "1"), tool("goes", "1"), tool("turns", "1")]).to_string());
    let mut client = Setup::new(&place).puppet(["--tools", &tools, "--prompts", "--no-list-changed"]).start();
    let opened = client.ask("initialize", super::client::initialize_params(super::client::VERSION));
    assert_eq!(opened["result"]["capabilities"]["tools"]["listChanged"], true, "promised for the child: {opened}");
    client.line(super::client::INITIALIZED);
    let changed = "notifications/tools/list_changed";
    client.tool_names();
    client.ask("prompts/list", json!({}));

    // The same tools in another order are the same list.
    place.write("tools.json", &json!([tool("turns", "1"), tool("goes", "1"), tool("stays", "1")]).to_string());
    let report = client.restart();
    assert_eq!(report["tools"], json!({"added": [], "removed": [], "changed": []}));
    client.call("echo", json!({"text": "after"}));
    assert_eq!(client.count(changed), 0);

    place.write("tools.json", &json!([tool("stays", "1"), tool("turns", "2"), tool("comes", "1")]).to_string());
    let report = client.restart();
    assert_eq!(report["tools"], json!({"added": ["comes"], "removed": ["goes"], "changed": ["turns"]}));
    client.next(changed);
    let names = client.tool_names();
    assert!(names.contains(&"comes".to_owned()) && !names.contains(&"goes".to_owned()), "{names:?}");

    // The client knows the new list, so nothing is announced.
    client.restart();
    client.call("echo", json!({"text": "after"}));
    assert_eq!(client.count(changed), 0);
    assert_eq!(client.count("notifications/prompts/list_changed"), 0);
    client.end();
}

#[test]
fn a_paged_list_is_compared_completely_and_contains_our_tools_once() {
    let place = Place::new();
    let tools = place.write("tools.json", "[]");
    let mut client = Setup::new(&place).puppet(["--tools", &tools, "--page", "5"]).ready();
    let (mut names, mut params) = (Vec::new(), json!({}));
    loop {
        let mut result = client.ask("tools/list", params)["result"].take();
        let Value::Array(page) = result["tools"].take() else { panic!("{result}") };
        names.extend(page.iter().map(|tool| tool["name"].as_str().expect("a name").to_owned()));
        let Value::String(cursor) = result["nextCursor"].take() else { break };
        params = json!({"cursor": cursor});
    }
    for ours in ["restart_server", "server_status", "verify_server_restarted"] {
        assert_eq!(names.iter().filter(|name| *name == ours).count(), 1, "{names:?}");
    }
    client.restart();
    client.call("echo", json!({"text": "after"}));
    assert_eq!(client.count("notifications/tools/list_changed"), 0);
    place.write("tools.json", r#"[{"name":"last","inputSchema":{"type":"object"}}]"#);
    assert_eq!(client.restart()["tools"]["added"], json!(["last"]), "on the last page");
    client.next("notifications/tools/list_changed");
    client.end();
}

#[test]
fn requests_during_a_restart_share_the_next_restart() {
    let place = Place::new();
    let more = place.join("more");
    let mut client = Setup::new(&place).puppet(["--more", &more]).ready();
    place.write("more", "--slow-start\n300\n");
    let first = client.send_call("restart_server", json!({"reason": "one"}));
    let rest: Vec<u64> =
        ["two", "three", "four"].map(|reason| client.send_call("restart_server", json!({"reason": reason}))).into();
    let mut generation = |id| client.answer(id)["result"]["structuredContent"]["generation"].clone();
    assert_eq!(generation(first), 2);
    for id in rest {
        assert_eq!(generation(id), 3, "the three share one");
    }
    client.end();
}
