//! A user whose process limit is reached: outlast continues without new threads and processes, and starts them later.

use std::{os::unix::fs::chown, process::Command};

use nix::sys::signal::Signal;
use serde_json::json;

use crate::{
    gateway::world::{Gate, HASTY, backend},
    mcp::client::{Place, Setup, signal, until},
};

/// How many processes and threads the user may have.
const PROCESSES_MAX: u32 = 60;

/// A directory of a user that has no other process. None if that is not possible here.
fn place_of(user: u32, test: &str) -> Option<Place> {
    let runs = |program| Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    if !nix::unistd::geteuid().is_root() || !runs("setpriv") || !runs("prlimit") {
        eprintln!("SKIPPED {test}: it needs root, setpriv and prlimit, to run outlast as another user");
        return None;
    }
    let place = Place::new();
    chown(place.path(), Some(user), Some(user)).expect("root may");
    Some(place)
}

/// Starts outlast as that user.
fn run_as(user: u32, setup: Setup) -> Setup {
    run_with(user, PROCESSES_MAX, setup)
}

fn run_with(user: u32, processes_max: u32, setup: Setup) -> Setup {
    setup.before(&format!(
        "exec setpriv --reuid {user} --regid {user} --clear-groups prlimit --nproc={processes_max} \"$@\""
    ))
}

/// From now on a process of that user may start no further process or thread, or as many as the limit of the user
/// allows.
fn limit(user: u32, pid: u32, processes_max: u32) {
    let user = user.to_string();
    let output = Command::new("setpriv")
        .args(["--reuid", &user, "--regid", &user, "--clear-groups", "prlimit", "--pid", &pid.to_string()])
        .arg(format!("--nproc={processes_max}:"))
        .output()
        .expect("setpriv runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_backend_that_uses_up_all_processes_ends_neither_the_gateway_nor_the_others() {
    let name = "a_backend_that_uses_up_all_processes_ends_neither_the_gateway_nor_the_others";
    let Some(place) = place_of(61_001, name) else { return };
    let config = [backend("greedy", &[], HASTY), backend("good", &[], HASTY)].concat();
    let gate = Gate::listen_with(place, &config, |setup| run_as(61_001, setup));
    let mut session = gate.session();
    let good: u32 = session.call("good__pid", json!({})).parse().expect("a pid");
    let started: u32 = session.call("greedy__use_up_processes", json!({})).parse().expect("a number");
    assert!(0 < started && started < PROCESSES_MAX, "{started}");

    // Reading the configuration needs a thread, and none can be started: that is recorded, and the gateway continues.
    gate.place.write("outlast.toml", &format!("{config}\n"));
    signal(gate.client.pid(), Signal::SIGHUP);
    let failed = gate.place.recorded("reload_failed", 1);
    assert!(failed["detail"].as_str().is_some_and(|why| why.contains("no thread can be started")), "{failed}");
    assert_eq!(session.call("good__echo", json!({"text": "still here"})), "still here");

    // A backend that crashes now cannot be started, and outlast retries until it can.
    let keeper = gate.client.keeper();
    limit(61_001, keeper, 1);
    signal(good, Signal::SIGKILL);
    until("a start that fails", || {
        gate.place
            .audit()
            .into_iter()
            .find(|record| record["props"]["backend"] == "good" && record.to_string().contains("could not be started"))
    });
    assert_eq!(session.call("greedy__echo", json!({"text": "serves"})), "serves");
    assert_eq!(session.call("greedy__free_processes", json!({})), "freed");
    limit(61_001, keeper, PROCESSES_MAX);
    let again: u32 = session.call("good__pid", json!({})).parse().expect("a pid");
    assert_ne!(again, good);
    gate.end();
}

/// Running backends continue serving: without the process that checks arguments, calls pass unchecked, and that is
/// reported.
#[test]
fn without_a_process_for_schemas_calls_pass_unchecked_until_there_is_one() {
    let name = "without_a_process_for_schemas_calls_pass_unchecked_until_there_is_one";
    let Some(place) = place_of(61_004, name) else { return };
    let tools = json!([{"name": "choice", "inputSchema": {"properties": {"mode": {"pattern": "^read$"}}}}]);
    let tools = place.write("tools.json", &tools.to_string());
    let gate = Gate::listen_with(place, &backend("one", &["--tools", &tools], HASTY), |setup| run_as(61_004, setup));
    let mut session = gate.session();
    until("the tools", || session.tools().contains(&"one__choice".to_owned()).then_some(()));
    session.call("one__echo", json!({"text": "its backend runs"}));
    let keeper = gate.client.keeper();
    limit(61_004, keeper, 1);
    assert_ne!(session.result("one__choice", json!({"mode": "none"}))["isError"], true);
    let record = gate.place.recorded("schema_unchecked", 1);
    assert!(record["reason"].as_str().is_some_and(|why| why.contains("could not be started")), "{record}");
    limit(61_004, keeper, PROCESSES_MAX);
    until("a check", || (session.result("one__choice", json!({"mode": "none"}))["isError"] == true).then_some(()));
    gate.end();
}

#[test]
fn a_relay_without_threads_restarts_its_server_all_the_same() {
    let name = "a_relay_without_threads_restarts_its_server_all_the_same";
    let Some(place) = place_of(61_002, name) else { return };
    let watched = place.write("server.txt", "one");
    let setup = Setup::new(&place).options(["--watch", &watched]).hasty();
    let mut client = run_as(61_002, setup).ready();
    let first = client.call("pid", json!({}));
    limit(61_002, client.pid(), 1);
    // The marker of a restart is written by a thread.
    let restarted = client.result("restart_server", json!({"reason": "no threads"}));
    assert_ne!(restarted["isError"], true, "{restarted}");
    let failed = place.recorded("restart_marker_failed", 1);
    assert!(failed["detail"].as_str().is_some_and(|why| why.contains("no thread can be started")), "{failed}");
    let second = client.call("pid", json!({}));
    assert_ne!(first, second);
    let status = client.status();
    assert!(status.to_string().contains("no threads"), "{status}");
    // A changed file is compared with its last content by a thread. Without one it counts as changed.
    place.write("server.txt", "two");
    until("a new server", || (client.call("pid", json!({})) != second).then_some(()));
    client.end();
}

#[test]
fn a_watch_that_gets_no_thread_is_refused_with_the_reason() {
    let name = "a_watch_that_gets_no_thread_is_refused_with_the_reason";
    let Some(place) = place_of(61_003, name) else { return };
    let watched = place.write("server.txt", "one");
    // outlast and its keeper are two processes.
    let mut client = run_with(61_003, 2, Setup::new(&place).options(["--watch", &watched])).start();
    assert_eq!(client.wait().code(), Some(2));
    client.says("no thread can be started");
    assert!(!client.stderr_text().contains("panicked"), "{}", client.stderr_text());
}
