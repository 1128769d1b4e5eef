//! U1: `outlast mcp` becomes another program. The client and the server see nothing of it, and a program that cannot take
//! over leaves everything as it was.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, SystemTime},
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::client::{OUTLAST, Place, Setup, is_alive, signal, text};
use crate::{gateway::world::outlast, support::copy_program};

/// The program under test with another format of the state, and a migration to it.
const NEXT: &str = env!("CARGO_BIN_EXE_outlast-next");

/// Upgrades in a row under load. Before a release there are more: `OUTLAST_UPGRADES=100`.
pub(crate) fn upgrades() -> usize {
    std::env::var("OUTLAST_UPGRADES").ok().and_then(|text| text.parse().ok()).unwrap_or(10)
}

fn upgrade(place: &Place, args: &[&str]) -> Output {
    outlast(place, &[&["upgrade"], args].concat())
}

fn upgraded(place: &Place, program: &str) -> Value {
    let output = upgrade(place, &["--program", program, "--json"]);
    assert!(output.status.success(), "{output:?}");
    let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(answer["upgraded"], true, "{answer}");
    answer
}

/// What a refused upgrade says.
fn refused(place: &Place, program: &str) -> String {
    let output = upgrade(place, &["--program", program]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn upgrades_under_load_lose_and_repeat_no_call() {
    let upgrades = upgrades();
    const IN_FLIGHT: usize = 16;
    let place = Place::new();
    let (log, ledger) = (place.join("log"), place.join("ledger"));
    let mut client = Setup::new(&place).puppet(["--log", &log, "--ledger", &ledger]).ready();
    let (pid, server) = (client.pid(), client.server_pid());
    let mut words = BTreeMap::new();
    let mut calls = 0;
    let mut pauses = Vec::new();
    let home = place.path().to_owned();
    let work = thread::spawn(move || {
        for number in 0..upgrades {
            // The second half reads the state of the first by a migration.
            let program = if number < upgrades / 2 { OUTLAST } else { NEXT };
            let output = crate::gateway::world::outlast_in(&home, &["upgrade", "--program", program, "--json"]);
            assert!(output.status.success(), "upgrade {number}: {output:?}");
            let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
            assert_eq!(answer["upgraded"], true, "upgrade {number}: {answer}");
            pauses.push(answer["pause_ms"].as_f64().expect("a number"));
        }
        pauses
    });
    while !work.is_finished() || !words.is_empty() {
        while words.len() < IN_FLIGHT && !work.is_finished() {
            calls += 1;
            let (tool, arguments, said) = match calls % 4 {
                // One call in four is slow, so that calls are open at each upgrade.
                0 => ("sleep", json!({"ms": 20, "call": calls}), "slept".to_owned()),
                _ => ("echo", json!({"call": calls}), json!({"call": calls}).to_string()),
            };
            words.insert(client.send_call(tool, arguments).to_string(), said);
        }
        let (id, answer) = client.any_answer();
        let said = words.remove(&id).expect("it was asked, and not answered before");
        assert_eq!(text(&answer["result"]), said, "{answer}");
    }
    let pauses = work.join().expect("every upgrade succeeds");
    assert!(pauses.iter().all(|pause| *pause > 0.0), "{pauses:?}");

    assert_eq!((client.pid(), client.server_pid()), (pid, server));
    assert!(client.heard.is_empty(), "{:?}", client.heard);
    let heard = place.log("log");
    assert_eq!(heard.iter().filter(|(_, line)| line.contains("initialize")).count(), 2, "one handshake");
    let done = fs::read_to_string(&ledger).expect("calls were made");
    let mut done: Vec<u64> = done.lines().map(|line| line.split(' ').next().unwrap().parse().unwrap()).collect();
    done.sort_unstable();
    assert_eq!(done, (1..=calls).collect::<Vec<u64>>(), "each call was executed once");
    assert!(calls > upgrades as u64 * 4, "only {calls} calls were made");

    let records = place.audit_of("upgraded");
    assert_eq!(records.len(), upgrades);
    let migrated = "the state had version 1, and this program writes version 2";
    let details = records.iter().map(|record| record["props"]["detail"].as_str().unwrap_or_default());
    assert_eq!(details.filter(|detail| detail.contains(migrated)).count(), 1, "{records:?}");
    assert_eq!(place.audit_of("instance_started").len(), 1);
    client.end();
    place.is_swept();
}

#[test]
fn a_line_that_is_half_read_is_completed_by_the_next_program() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    for program in [OUTLAST, NEXT] {
        client.owed("\"half\"");
        client.raw(br#"{"jsonrpc":"2.0","id":"half","method":"tools/call","params":{"name":"echo","argu"#);
        upgraded(&place, program);
        client.raw(b"ments\":{\"text\":\"whole\"}}}\n");
        assert_eq!(text(&client.answer_to("\"half\"")["result"]), "whole");
    }
    client.end();
    place.is_swept();
}

#[test]
fn sigusr2_and_the_program_on_disk() {
    let place = Place::new();
    let program = place.join("outlast-on-disk");
    copy_program(OUTLAST, &program);
    let mut client = Setup::new(&place).program(&program).ready();
    let ps = |place: &Place| String::from_utf8(outlast(place, &["ps"]).stdout).expect("text");
    assert!(!ps(&place).contains("older program"), "{}", ps(&place));

    // As a package manager does: another file takes the name.
    let new = place.join("new");
    copy_program(NEXT, &new);
    let later = SystemTime::now() + Duration::from_secs(60);
    fs::File::options().write(true).open(&new).and_then(|file| file.set_modified(later)).expect("the file is ours");
    fs::rename(&new, &program).expect("the file is ours");
    let said = ps(&place);
    assert!(said.contains("1 instance runs an older program than the one on disk"), "{said}");

    let server = client.server_pid();
    signal(client.pid(), Signal::SIGUSR2);
    let record = place.recorded("upgraded", 1);
    assert!(record["detail"].as_str().is_some_and(|detail| detail.contains("writes version 2")), "{record}");
    assert_eq!(client.server_pid(), server);
    assert!(!ps(&place).contains("older program"), "{}", ps(&place));
    client.end();
    place.is_swept();
}

#[test]
fn a_program_that_cannot_take_over_changes_nothing() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    let server = client.server_pid();
    let copy = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = fs::read(OUTLAST).expect("the program");
        change(&mut bytes);
        let (draft, path) = (place.join(&format!("{name}.draft")), place.join(name));
        fs::write(&draft, bytes).and_then(|()| fs::set_permissions(&draft, fs::Permissions::from_mode(0o755))).unwrap();
        copy_program(&draft, &path);
        path
    };
    // The machine in the header of an ELF file.
    let other_machine = copy("other-machine", &|bytes| bytes[18] ^= 0x55);
    let locked = place.script("locked", "#!/bin/sh\n");
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o644)).expect("the file is ours");
    let open = place.script("open", "#!/bin/sh\n");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).expect("the file is ours");
    let older = place.script("older", "#!/bin/sh\necho \"error: unrecognized subcommand 'check-state'\" >&2\nexit 2\n");
    // It passes the check, and another file has its name when the process is to become it.
    let replaced = format!(
        "#!/bin/sh\nprintf '#!/bin/sh\\n' > \"$0.new\"; chmod 755 \"$0.new\"; mv \"$0.new\" \"$0\"\nexec {OUTLAST} \"$@\"\n"
    );
    let mut table = vec![
        (place.script("replaced", &replaced), "the file was replaced after it was checked"),
        (other_machine, "it is not a program for this machine"),
        (place.script("silent", "#!/bin/sh\nexit 0\n"), "it is not outlast"),
        (place.script("talker", "#!/bin/sh\necho '{}'\n"), "it is not outlast"),
        (older, "an older version of outlast"),
        (locked, "it is not executable"),
        (open, "every user can write to it"),
        (place.path().display().to_string(), "it is not a file"),
    ];
    let foreign = place.script("foreign", "#!/bin/sh\n");
    // Only root can give a file away.
    if chown(&foreign, Some(65534), None).is_ok() && fs::metadata(&foreign).unwrap().uid() == 65534 {
        table.push((foreign, "it belongs to another user"));
    }
    for (number, (program, words)) in table.iter().enumerate() {
        let said = refused(&place, program);
        assert!(said.contains(words), "{program}: {said}");
        let record = place.recorded("upgrade_failed", number + 1);
        assert!(record["detail"].as_str().is_some_and(|detail| detail.contains(words)), "{record}");
        assert_eq!(client.server_pid(), server, "{program}");
    }
    let missing = upgrade(&place, &["--program", "/no/such/program"]);
    assert!(String::from_utf8_lossy(&missing.stderr).contains("no such file"), "{missing:?}");

    // A program with an older format of the state.
    upgraded(&place, NEXT);
    let said = refused(&place, OUTLAST);
    assert!(said.contains("the state has version 2, and this program reads versions up to 1"), "{said}");
    assert_eq!((client.server_pid(), place.audit_of("upgraded").len()), (server, 1));
    client.end();
    place.is_swept();
}

#[test]
fn without_space_for_the_state_the_old_program_continues() {
    let place = Place::new();
    // No file can be longer than one and a half kibibytes, the state too.
    let mut client = Setup::new(&place).before("trap '' XFSZ; ulimit -f 3").ready();
    let server = client.server_pid();
    let said = refused(&place, OUTLAST);
    assert!(said.contains("the state of the instance cannot be saved"), "{said}");
    assert!(said.contains("hint: free some memory or disk space"), "{said}");
    assert_eq!(client.server_pid(), server);
    client.end();
}

#[test]
fn an_upgrade_waits_for_a_reload() {
    let place = Place::new();
    let more = place.join("more");
    let mut client = Setup::new(&place).puppet(["--more", &more]).ready();
    let old = client.server_pid();
    place.write("more", "--slow-start\n1000\n");
    let restart = client.send_call("restart_server", json!({"reason": "an edit"}));
    place.recorded("server_started", 2);
    upgraded(&place, NEXT);
    let answer = client.answer(restart);
    assert_eq!(answer["result"]["structuredContent"]["generation"], 2, "{answer}");
    assert_ne!(client.server_pid(), old);
    let order: Vec<String> = place.audit().iter().map(|record| record["props"]["event_type"].to_string()).collect();
    let at = |event: &str| order.iter().rposition(|found| found.contains(event)).expect("it is recorded");
    assert!(at("server_started") < at("upgraded"), "{order:?}");
    client.end();
    place.is_swept();
}

#[test]
fn an_upgrade_that_waits_for_long_is_postponed_and_done_later() {
    let place = Place::new();
    let build = "while [ ! -e go ]; do sleep 0.05; done";
    let mut client = Setup::new(&place).options(["--build", build]).ready();
    let restart = client.send_call("restart_server", json!({"reason": "an edit"}));
    place.recorded("restart_marker_written", 1);
    let output = upgrade(&place, &["--program", NEXT]);
    let said = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success() && said.contains("a restart of the server is running"), "{said}");
    assert_eq!(place.audit_of("upgraded").len(), 0);
    place.write("go", "");
    assert_eq!(client.answer(restart)["result"]["isError"], false);
    place.recorded("upgraded", 1);
    assert_eq!(client.status()["generation"], 2);
    client.end();
    place.is_swept();
}

#[test]
fn an_upgrade_during_a_crash_and_a_backoff() {
    let place = Place::new();
    let mut client = Setup::new(&place).options(["--first-restart", "delay"]).ready();
    for round in 1..=3 {
        let server = client.kill_server();
        place.recorded("server_crashed", round);
        let held = client.send_call("echo", json!({"text": "held"}));
        upgraded(&place, if round == 1 { OUTLAST } else { NEXT });
        assert_eq!(text(&client.answer(held)["result"]), "held");
        assert!(!is_alive(server));
        assert_eq!(client.status()["restarts"], round);
    }
    let crashes = place.audit_of("server_crashed");
    let counts: Vec<&Value> = crashes.iter().map(|record| &record["props"]["crashes"]).collect();
    assert_eq!(counts, [1, 2, 3], "the next program knows the crashes");
    client.end();
    place.is_swept();
}

#[test]
fn an_instance_that_cannot_be_upgraded_reports_the_reason() {
    let place = Place::new();
    let client = Setup::new(&place).options(["--inherit"]).start();
    place.recorded("server_started", 1);
    let said = refused(&place, OUTLAST);
    assert!(said.contains("it cannot be upgraded in place: the server has the client's own pipes"), "{said}");
    client.end();

    // A thread writes to a file, and would lose what it has not written.
    let place = Place::new();
    let file = fs::File::create(place.path().join("stdout")).expect("the project is ours");
    let mut child = Command::new(OUTLAST)
        .args(["mcp", "--", super::client::PUPPET])
        .current_dir(place.path())
        .env("HOME", place.path())
        .stdin(Stdio::piped())
        .stdout(file)
        .stderr(Stdio::null())
        .spawn()
        .expect("the program starts");
    place.recorded("server_started", 1);
    let said = refused(&place, OUTLAST);
    assert!(said.contains("stdin and stdout must be pipes or sockets"), "{said}");
    drop(child.stdin.take());
    child.wait().expect("it ends with its client");
}

#[test]
fn all_instances_are_upgraded_and_those_that_cannot_be_are_named() {
    let place = Place::new();
    let mut clients = ["one", "two"].map(|name| Setup::new(&place).options(["--name", name]).ready());
    let all = |expected: Option<i32>| {
        let output = upgrade(&place, &["--all", "--json"]);
        assert_eq!(output.status.code(), expected, "{output:?}");
        serde_json::from_slice::<Vec<Value>>(&output.stdout).expect("a list")
    };
    let answers = all(Some(0));
    assert_eq!(answers.iter().map(|answer| &answer["upgraded"]).collect::<Vec<_>>(), [true, true], "{answers:?}");
    let session = outlast(&place, &["run", "-d", "--session", "night", "--", "cat"]);
    assert!(session.status.success(), "{session:?}");
    let answers = all(Some(0));
    assert_eq!(answers.iter().filter(|answer| answer["upgraded"] == true).count(), 3, "{answers:?}");
    let inherited = Setup::new(&place).options(["--name", "three", "--inherit"]).start();
    place.recorded("server_started", 4);
    let answers = all(Some(1));
    let refusal = answers.iter().find(|answer| answer["error"].is_object()).expect("every instance is named");
    let because = refusal["error"]["because"].as_str().unwrap_or_default();
    assert!(because.contains("the server has the client's own pipes"), "{refusal}");
    assert_eq!(place.audit_of("upgraded").len(), 8);
    inherited.end();
    assert!(outlast(&place, &["stop", "night"]).status.success());
    for client in &mut clients {
        assert_eq!(client.call("echo", json!({"text": "still here"})), "still here");
    }
    clients.into_iter().for_each(|client| client.end());
    place.is_swept();
}
