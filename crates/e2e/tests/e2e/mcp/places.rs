//! C4, C5: where nothing can be written down, and where many write at once.

use std::{collections::BTreeSet, fs, os::unix::fs::symlink, thread};

use serde_json::json;

use super::client::{Place, Setup};

#[test]
fn a_full_disk_costs_the_audit_log_and_is_said_once() {
    let place = Place::new();
    fs::create_dir(place.path().join(".outlast")).expect("the project is ours");
    symlink("/dev/full", place.path().join(".outlast/audit.jsonl")).expect("the project is ours");
    let mut client = Setup::new(&place).ready();
    client.says("cannot be written");
    for _ in 0..3 {
        client.restart();
    }
    assert_eq!(client.call("echo", json!({"text": "on"})), "on");
    client.close_stdin();
    assert_eq!(client.wait().code(), Some(0));
    let words = client.last_words();
    assert_eq!(words.matches("cannot be written").count(), 1, "{words}");
    assert!(words.contains("No space left on device"), "{words}");
    client.end();
}

#[test]
fn without_any_state_directory_it_serves_and_says_so() {
    let place = Place::new();
    // Root may write anywhere, so a file stands in the way, here and at home.
    place.write(".outlast", "");
    place.write(".local", "");
    let mut client = Setup::new(&place).ready();
    client.says("no state directory can be written");
    let report = client.restart();
    assert_eq!(report["generation"], 2, "{report}");
    let verdict = client.result("verify_server_restarted", json!({"since_timestamp": 0}));
    assert_eq!(verdict["structuredContent"]["restarted"], false, "{verdict}");
    client.end();
}

#[test]
fn a_project_that_cannot_be_written_to_is_kept_at_home() {
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
fn a_project_two_hundred_letters_deep_is_like_any_other() {
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
fn eight_instances_in_one_project_and_one_in_another_do_not_meet() {
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
