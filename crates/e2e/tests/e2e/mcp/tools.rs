//! T1–T5: the tools with which an agent restarts its server, and the files that they write.

use std::{
    collections::BTreeSet,
    fs,
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};

use super::client::{Client, Place, Setup, text};

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs_f64()
}

fn verify(client: &mut Client, since: f64) -> Value {
    let result = client.result("verify_server_restarted", json!({"since_timestamp": since}));
    assert_ne!(result["isError"], true, "{result}");
    let verdict: Value = serde_json::from_str(&text(&result)).expect("the text is the same JSON");
    assert_eq!(verdict, result["structuredContent"]);
    verdict
}

fn error(verdict: &Value) -> &str {
    assert_eq!(verdict["restarted"], false, "{verdict}");
    verdict["error"].as_str().unwrap_or_else(|| panic!("no error in {verdict}"))
}

fn marker(path: &str) -> Value {
    serde_json::from_slice(&fs::read(path).expect("a marker")).expect("a marker is JSON")
}

#[test]
fn a_restart_is_verified_by_its_marker() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    let common = place.join(".outlast/restart_marker");
    let before = now();
    assert_eq!(error(&verify(&mut client, before)), "Restart marker not found");

    let old = client.server_pid();
    let result = client.result("restart_server", json!({"reason": "new \"code\""}));
    let report = result["structuredContent"].clone();
    assert_eq!(serde_json::from_str::<Value>(&text(&result)).expect("JSON"), report, "text and structure agree");
    for (field, is_right) in [
        ("old_pid", report["old_pid"] == old),
        ("new_pid", report["new_pid"].is_u64()),
        ("generation", report["generation"] == 2),
        ("took_ms", report["took_ms"].is_u64()),
        ("ended", report.get("ended").is_some()),
        ("tools", report["tools"].is_object()),
        ("stderr_tail", report["stderr_tail"].is_string()),
    ] {
        assert!(is_right, "{field} in {report}");
    }

    let verdict = verify(&mut client, before);
    assert_eq!(verdict["restarted"], true, "{verdict}");
    assert_eq!((&verdict["previous_pid"], &verdict["current_pid"]), (&report["old_pid"], &report["new_pid"]));
    assert_eq!(verdict["reason"], "new \"code\"");
    assert!(verdict["time_since_restart"].as_f64().is_some_and(|seconds| (0.0..60.0).contains(&seconds)), "{verdict}");
    assert!(verdict["iso_time"].as_str().is_some_and(|time| time.starts_with("20") && time.contains('T')), "{verdict}");
    assert!(verdict.get("error").is_none_or(Value::is_null), "{verdict}");

    let written = marker(&common);
    assert!(written["timestamp"].as_f64().is_some_and(|time| before <= time && time <= now()), "{written}");
    assert_eq!((&written["pid"], &written["reason"]), (&json!(old), &json!("new \"code\"")));
    assert_eq!(written["iso_time"], verdict["iso_time"]);
    let id = written["id"].as_str().expect("an id");
    assert_eq!(marker(&format!("{common}.{id}")), written, "its own copy");

    assert!(error(&verify(&mut client, now() + 1000.0)).contains("before since_timestamp"));
    fs::write(&common, "{\"timestamp\": 12").expect("the project is ours");
    assert!(error(&verify(&mut client, before)).starts_with("Failed to parse restart marker"));

    // A marker of another instance is ignored, even a new one.
    let other = json!({"timestamp": now() + 500.0, "pid": 1, "reason": "theirs", "iso_time": "x", "id": "other-1"});
    fs::write(&common, other.to_string()).expect("the project is ours");
    assert_eq!(verify(&mut client, before)["reason"], "new \"code\"");
    let mut neighbour = Setup::new(&place).ready();
    assert_eq!(error(&verify(&mut neighbour, before)), "Restart marker not found");

    let result = client.result("verify_server_restarted", json!({"since_timestamp": "yesterday"}));
    assert_eq!(result["isError"], true, "{result}");
    let result = client.result("restart_server", json!({"reason": 1}));
    assert_eq!(result["isError"], true, "{result}");

    // A marker without a ready server does not prove a restart.
    client.kill_server();
    place.recorded("server_crashed", 1);
    assert!(error(&verify(&mut client, before)).contains("no server is ready"));
    client.end();
    neighbour.end();
}

#[test]
fn the_marker_path_can_be_configured() {
    let place = Place::new();
    let mut client = Setup::new(&place).options(["--marker", ".st3/.restart_marker"]).ready();
    let before = now();
    let report = client.restart();
    let written = marker(&place.join(".st3/.restart_marker"));
    assert_eq!(written["pid"], report["old_pid"]);
    assert!(!place.path().join(".outlast/restart_marker").exists());
    assert_eq!(verify(&mut client, before)["restarted"], true);
    client.end();
}

#[test]
fn the_tools_of_outlast_can_be_turned_off() {
    let place = Place::new();
    let mut client = Setup::new(&place).options(["--no-tools"]).ready();
    let names = client.tool_names();
    assert!(names.contains(&"echo".to_owned()) && !names.iter().any(|name| name.contains("server_")), "{names:?}");
    let result = client.result("restart_server", json!({}));
    assert_eq!(text(&result), "Unknown tool: restart_server", "it is the server's to answer");
    client.end();
}

#[test]
fn server_status_reports_the_state() {
    let place = Place::new();
    let mut client = Setup::new(&place).options(["--name", "My Server"]).ready();
    client.call("stderr", json!({"text": "warming up"}));
    let status = client.status();
    assert_eq!((&status["state"], &status["name"]), (&json!("ready"), &json!("My Server")), "{status}");
    assert_eq!((&status["generation"], &status["restarts"]), (&json!(1), &json!(0)), "{status}");
    assert_eq!((&status["last_exits"], &status["next_try_s"]), (&json!([]), &Value::Null), "{status}");
    assert!(status["id"].as_str().is_some_and(|id| id.starts_with("my-server-")), "{status}");
    assert!(status["uptime_s"].is_f64(), "{status}");
    super::client::until("the server's stderr", || {
        client.status()["stderr_tail"].as_str().is_some_and(|tail| tail.contains("warming up")).then_some(())
    });
    assert_eq!(client.status()["pid"], client.server_pid());
    client.end();
}

#[test]
fn every_event_is_in_the_audit_log() {
    let place = Place::new();
    let broken = place.join("broken");
    let mut client =
        Setup::new(&place).options(["--max-restarts", "2"]).puppet(["--own-restart", "--fail-if", &broken]).ready();
    client.tool_names();
    client.result("outlast_restart_server", json!({"reason": "why not"}));
    client.result("verify_server_restarted", json!({"since_timestamp": 0}));
    for _ in 0..2 {
        client.call("restart_server", json!({}));
    }
    fs::write(&broken, "token=secret").expect("the project is ours");
    client.result("outlast_restart_server", json!({"reason": "a bad edit"}));
    client.call("echo", json!({"text": "a secret argument"}));
    client.kill_server();
    place.recorded("gave_up", 1);
    client.end();

    let records = place.audit();
    let mut seen = BTreeSet::new();
    for record in &records {
        for field in ["timestamp", "level", "logger", "message"] {
            assert!(record[field].is_string(), "{field} in {record}");
        }
        let time = record["timestamp"].as_str().expect("checked");
        assert!(time.len() == "2026-01-01T00:00:00.000Z".len() && time.ends_with('Z'), "{time}");
        seen.insert(record["props"]["event_type"].as_str().expect("an event").to_owned());
        assert!(record["props"]["id"].as_str().is_some_and(|id| id.starts_with("outlast-puppet-")), "{record}");
    }
    for event in [
        "instance_started",
        "server_started",
        "server_restart_requested",
        "restart_marker_written",
        "server_exiting",
        "server_restart_verified",
        "restart_throttled",
        "reload_failed",
        "server_crashed",
        "gave_up",
        "instance_ended",
    ] {
        assert!(seen.contains(event), "{event} in {seen:?}");
    }
    let whole = records.iter().map(Value::to_string).collect::<String>();
    assert!(!whole.contains("secret"), "{whole}");
    let of = |event: &str| place.audit_of(event)[0]["props"].clone();
    assert_eq!(of("server_restart_requested")["reason"], "why not");
    assert_eq!(of("restart_marker_written")["reason"], "why not");
    assert_eq!(of("reload_failed")["reason"], "a bad edit");
    assert_eq!(of("server_started")["generation"], 1);
    assert!(of("server_crashed")["pid"].is_u64());
    assert!(of("gave_up")["crashes"].is_u64());
    // The announcement comes before the restart.
    let at = |event: &str, nth: usize| {
        let places = records.iter().enumerate().filter(|(_, record)| record["props"]["event_type"] == event);
        places.map(|(at, _)| at).nth(nth).expect("it is there")
    };
    assert!(at("server_restart_requested", 0) < at("restart_marker_written", 0));
    assert!(at("restart_marker_written", 0) < at("server_started", 1));
}
