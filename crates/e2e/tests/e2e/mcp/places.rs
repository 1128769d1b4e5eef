//! C4, C5: directories without write access, and many instances that write at once.

use std::{collections::BTreeSet, fs, os::unix::fs::symlink, thread};

use serde_json::json;

use super::client::{Place, Setup};

#[test]
fn an_audit_log_that_cannot_be_written_is_reported_once() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    // A link that is there before the start makes outlast use another directory.
    fs::remove_file(place.path().join(".outlast/audit.jsonl")).expect("the project is ours");
    symlink("/dev/full", place.path().join(".outlast/audit.jsonl")).expect("the project is ours");
    client.restart();
    client.says("cannot be written");
    for _ in 0..3 {
        client.restart();
    }
    assert_eq!(client.call("echo", json!({"text": "on"})), "on");
    // Without the link it continues, and reports what is missing.
    fs::remove_file(place.path().join(".outlast/audit.jsonl")).expect("the project is ours");
    client.restart();
    let degraded = place.recorded("audit_degraded", 1);
    assert!(degraded["lost"].as_u64().is_some_and(|lost| lost >= 10), "{degraded}");
    client.close_stdin();
    assert_eq!(client.wait().code(), Some(0));
    let words = client.last_words();
    assert_eq!(words.matches("cannot be written").count(), 1, "{words}");
    assert!(words.contains("it is a symbolic link"), "{words}");
    client.end();
}

#[test]
fn without_a_state_directory_outlast_serves_and_reports_it() {
    let place = Place::new();
    // Root may write anywhere, so a file is in place of the directory, here and in the home directory.
    place.write(".outlast", "");
    place.write(".local", "");
    let mut client = Setup::new(&place).ready();
    client.says("no state directory can be written");
    let report = client.restart();
    assert_eq!(report["generation"], 2, "{report}");
    let verdict = client.result("verify_server_restarted", json!({"since_timestamp": 0}));
    let verdict = &verdict["structuredContent"];
    assert_eq!((&verdict["restarted"], &verdict["previous_pid"]), (&json!(true), &report["old_pid"]), "{verdict}");
    assert!(verdict["marker_error"].is_string() && report["marker_error"].is_string(), "{verdict} {report}");
    client.end();
}

/// A file that may not grow acts as a disk that takes the start of a record, and then nothing.
#[test]
fn a_full_disk_tears_no_line_of_the_audit_log() {
    let place = Place::new();
    let mut client = Setup::new(&place).before("trap '' XFSZ; ulimit -f 8").ready();
    for _ in 0..8 {
        client.restart();
    }
    client.says("cannot be written");
    client.end();
    let audit = fs::read_to_string(place.path().join(".outlast/audit.jsonl")).expect("an audit log");
    assert!(audit.ends_with('\n') && audit.len() > 2_000, "{audit}");
    for line in audit.lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap_or_else(|error| panic!("{error}: {line:?}"));
    }
}

#[test]
fn a_restart_without_its_marker_is_reported_as_it_was() {
    let place = Place::new();
    fs::create_dir_all(place.path().join(".outlast/restart_marker/in the way")).expect("the project is ours");
    let mut client = Setup::new(&place).ready();
    let report = client.restart();
    assert!(report["marker_error"].is_string() && report["generation"] == 2, "{report}");
    let verdict = client.result("verify_server_restarted", json!({"since_timestamp": 0}));
    let verdict = &verdict["structuredContent"];
    assert_eq!((&verdict["restarted"], &verdict["current_pid"]), (&json!(true), &report["new_pid"]), "{verdict}");
    assert_eq!(verdict["marker_error"], report["marker_error"]);
    place.recorded("restart_marker_failed", 1);
    client.end();
}

#[test]
fn old_logs_are_removed_at_the_start_and_that_of_an_instance_that_runs_is_not() {
    let place = Place::new();
    let first = Setup::new(&place).options(["--name", "first"]).ready();
    let logs = place.path().join(".outlast/logs");
    let names = || {
        let entries = fs::read_dir(&logs).expect("the logs").flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<BTreeSet<String>>()
    };
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(400 * 24 * 3600);
    let age = |name: &str| {
        let file = fs::File::options().append(true).create(true).open(logs.join(name)).expect("a log");
        file.set_modified(long_ago).expect("the log is ours");
    };
    let running = names().into_iter().next().expect("the log of the first");
    ["gone-1.log", "gone-1.log.1", "gone-2.log"].into_iter().for_each(age);
    age(&running);
    let second = Setup::new(&place).options(["--name", "second"]).ready();
    super::client::until("old logs to go", || (!names().iter().any(|name| name.starts_with("gone"))).then_some(()));
    assert!(names().contains(&running), "{:?}", names());
    assert_eq!(names().len(), 2, "{:?}", names());
    first.end();
    second.end();
}

#[test]
fn the_state_of_a_read_only_project_is_in_the_home_directory() {
    let (place, home) = (Place::new(), Place::new());
    place.write(".outlast", "in the way");
    let mut client = Setup::new(&place).home(home.path()).ready();
    client.restart();
    client.end();
    let projects = home.path().join(".local/state/outlast/projects");
    let kept: Vec<_> = fs::read_dir(projects).expect("a folder").flatten().collect();
    assert_eq!(kept.len(), 1);
    assert!(kept[0].path().join("audit.jsonl").is_file() && kept[0].path().join("restart_marker").is_file());
}

#[test]
fn a_project_path_of_two_hundred_characters_works() {
    let place = Place::new();
    let deep = place.path().join("d".repeat(100)).join("e".repeat(100));
    fs::create_dir_all(&deep).expect("the project is ours");
    let mut client = Setup::new(&place).cwd(&deep).ready();
    client.restart();
    client.end();
    assert!(deep.join(".outlast/audit.jsonl").is_file());
    assert_eq!(fs::read_to_string(deep.join(".outlast/.gitignore")).expect("it ignores itself").trim(), "*");
}

#[test]
fn instances_in_one_project_and_in_another_are_independent() {
    let (place, other) = (Place::new(), Place::new());
    thread::scope(|scope| {
        for n in 0..9 {
            let place = if n == 8 { &other } else { &place };
            scope.spawn(move || {
                let mut client = Setup::new(place).options(["--name", "same"]).ready();
                let mut pid = client.server_pid();
                for round in 0..5 {
                    let report = client.restart();
                    assert_eq!(report["old_pid"], pid, "{report}");
                    pid = client.server_pid();
                    assert_eq!(report["new_pid"], pid, "{report}");
                    let verdict = client.result("verify_server_restarted", json!({"since_timestamp": 0}));
                    assert_eq!(verdict["structuredContent"]["current_pid"], pid, "round {round}: {verdict}");
                    assert_eq!(verdict["structuredContent"]["restarted"], true, "round {round}: {verdict}");
                }
                client.end();
            });
        }
    });
    let started = place.audit_of("instance_started");
    let ids: BTreeSet<&str> = started.iter().map(|record| record["props"]["id"].as_str().expect("an id")).collect();
    assert_eq!(ids.len(), 8, "{ids:?}");
    for id in ids {
        assert!(place.path().join(format!(".outlast/logs/{id}.log")).is_file(), "{id}");
        let records = place.audit().into_iter().filter(|record| record["props"]["id"] == id);
        assert_eq!(records.filter(|record| record["props"]["event_type"] == "server_started").count(), 6);
    }
    assert_eq!(place.audit_of("server_restart_requested").len(), 40);
    assert_eq!(other.audit_of("instance_started").len(), 1);
    place.is_swept();
}
