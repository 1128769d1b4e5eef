//! W7, b1–b6: a server that is broken from the start can be repaired without its client noticing.

use std::{fs, os::unix::fs::PermissionsExt};

use serde_json::{Value, json};

use super::client::{Client, INITIALIZED, PUPPET, Place, Setup, VERSION, initialize_params, text};

/// From the first message to working tools, on one connection.
fn is_repaired(place: &Place, client: &mut Client, cause: &str, repair: impl FnOnce()) {
    let opened = client.ask("initialize", initialize_params(VERSION))["result"].take();
    assert_eq!(opened["protocolVersion"], VERSION, "{opened}");
    assert_eq!(opened["serverInfo"]["name"], "outlast", "{opened}");
    assert_eq!(opened["capabilities"]["tools"]["listChanged"], true, "{opened}");
    let instructions = opened["instructions"].as_str().expect("it says what to do");
    assert!(instructions.contains("restart_server") && instructions.contains("server_status"), "{instructions}");
    client.line(INITIALIZED);
    let mut ours = client.tool_names();
    ours.sort();
    assert_eq!(ours, ["restart_server", "server_status", "verify_server_restarted"]);
    assert_eq!(client.ask("prompts/list", json!({}))["result"]["prompts"], json!([]));
    let status = client.status();
    assert!(status.to_string().contains(cause), "{cause}: {status}");
    let result = client.result("restart_server", json!({}));
    assert_eq!(result["isError"], true, "still broken: {result}");
    assert!(text(&result).contains(cause), "{cause}: {result}");

    repair();
    let report = client.restart();
    assert!(report["new_pid"].is_u64(), "{report}");
    assert!(report["tools"]["added"].as_array().is_some_and(|added| added.contains(&json!("echo"))), "{report}");
    client.next("notifications/tools/list_changed");
    let names = client.tool_names();
    assert!(names.contains(&"echo".to_owned()) && names.contains(&"restart_server".to_owned()), "{names:?}");
    assert_eq!(client.call("echo", json!({"text": "repaired"})), "repaired");
    assert_eq!(report["new_pid"], client.server_pid());
    assert_eq!(client.status()["state"], "ready");
    assert!(!place.audit_of("server_crashed").is_empty());
}

fn script() -> String {
    format!("#!/bin/sh\nexec {PUPPET} \"$@\"\n")
}

#[test]
fn a_missing_command_is_repaired_by_creating_it() {
    let place = Place::new();
    let server = place.join("server");
    let mut client = Setup::new(&place).command([server.as_str()]).start();
    is_repaired(&place, &mut client, "no program named", || drop(place.script("server", &script())));
    client.end();
    place.is_swept();
}

#[test]
fn a_command_that_is_not_executable_is_repaired_by_making_it_so() {
    let place = Place::new();
    let server = place.write("server", &script());
    let mut client = Setup::new(&place).command([server.as_str()]).start();
    is_repaired(&place, &mut client, "not executable", || {
        fs::set_permissions(&server, fs::Permissions::from_mode(0o755)).expect("the file is ours");
    });
    client.end();
}

#[test]
fn a_command_that_exits_at_once_is_repaired_by_fixing_it() {
    let place = Place::new();
    let broken = place.write("broken", "ImportError: no module named server");
    let mut client = Setup::new(&place).puppet(["--fail-if", &broken]).start();
    is_repaired(&place, &mut client, "ImportError", || fs::remove_file(&broken).expect("the file is there"));
    client.end();
}

#[test]
fn the_stderr_of_a_short_run_is_never_lost() {
    let place = Place::new();
    let broken = place.write("broken", "ImportError");
    let mut client = Setup::new(&place).puppet(["--fail-if", &broken]).start();
    let opened = client.ask("initialize", initialize_params(VERSION));
    assert_eq!(opened["result"]["serverInfo"]["name"], "outlast", "{opened}");
    client.line(INITIALIZED);
    for _ in 0..100 {
        let result = client.result("restart_server", json!({}));
        assert!(text(&result).contains("ImportError"), "{result}");
    }
    client.end();
}

#[test]
fn a_repaired_server_of_an_older_version_is_accepted() {
    let place = Place::new();
    let broken = place.write("broken", "ImportError");
    let mut client = Setup::new(&place).puppet(["--fail-if", &broken, "--version-only", "2024-11-05"]).start();
    is_repaired(&place, &mut client, "ImportError", || fs::remove_file(&broken).expect("the file is there"));
    assert!(client.status()["noted"].to_string().contains("2024-11-05"));
    client.end();
}

#[test]
fn a_discover_is_refused_as_by_an_old_server_and_initialize_follows() {
    let place = Place::new();
    let broken = place.write("broken", "ImportError");
    let mut client = Setup::new(&place).puppet(["--fail-if", &broken]).start();
    let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {}});
    let answer = client.ask("server/discover", json!({"_meta": meta}));
    assert_eq!(answer["error"]["code"], -32601, "{answer}");
    is_repaired(&place, &mut client, "ImportError", || fs::remove_file(&broken).expect("the file is there"));
    client.end();
}

#[test]
fn a_give_up_is_reported_and_a_restart_overrides_it() {
    let place = Place::new();
    let broken = place.join("broken");
    let mut client = Setup::new(&place).options(["--max-restarts", "1"]).puppet(["--fail-if", &broken]).ready();
    fs::write(&broken, "disk is full").expect("the project is ours");
    client.kill_server();
    let gave_up = place.recorded("gave_up", 1);
    assert!(gave_up["crashes"].is_u64(), "{gave_up}");
    let status = client.status();
    assert_eq!((&status["state"], &status["next_try_s"]), (&json!("given_up"), &Value::Null), "{status}");
    let result = client.result("echo", json!({"text": "x"}));
    let data = super::client::failure(&result);
    assert_eq!((&data["reason"], &data["retry_after_ms"]), (&json!("gave_up"), &Value::Null), "{data}");
    assert!(text(&result).contains("restart_server"), "{result}");
    fs::remove_file(&broken).expect("the file is there");
    client.restart();
    assert_eq!(client.call("echo", json!({"text": "back"})), "back");
    client.end();
}

#[test]
fn a_server_that_is_not_ready_in_time_is_stopped_and_its_client_gets_an_error() {
    let place = Place::new();
    let more = place.write("more", "--slow-start\n600000\n");
    let setup = Setup::new(&place).hasty().options(["--start-timeout", "0.3"]);
    let mut client = setup.puppet(["--ignore-term", "--more", &more]).start();
    is_repaired(&place, &mut client, "did not finish its handshake", || fs::remove_file(&more).expect("it is there"));
    client.end();
    place.is_swept();
}

#[test]
fn an_exit_before_the_handshake_is_a_crash() {
    let place = Place::new();
    let mut client = Setup::new(&place).command(["true"]).start();
    let opened = client.ask("initialize", initialize_params(VERSION));
    assert_eq!(opened["result"]["serverInfo"]["name"], "outlast", "{opened}");
    let crash = place.recorded("server_crashed", 1);
    assert!(crash["exit_code"] == 0 || crash["detail"] == "closed its stdout", "{crash}");
    client.line(INITIALIZED);
    assert_eq!(client.status()["pid"], Value::Null);
    client.end();
}
