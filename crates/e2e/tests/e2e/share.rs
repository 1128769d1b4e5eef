//! `outlast mcp --share`: many clients, one server process, and a hub that may be killed at any time.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{Read, Write},
    os::unix::{
        fs::{MetadataExt, PermissionsExt, symlink},
        net::UnixStream,
    },
    path::Path,
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    gateway::world::outlast_in,
    mcp::client::{Client, INITIALIZED, OUTLAST, Place, Setup, failure, is_alive, signal, text, until},
    mcp::upgrade::upgrades,
    support::{
        copy_program, outlast,
        peers::{Client as Sdk, Peer, Peers, Project, Server, text as text_of},
    },
};

/// A hub that is left by a failed test ends soon.
const LINGER: &str = "2s";
const CLIENTS: usize = 10;
/// The program under test with another format of the state, and a migration to it.
const NEXT: &str = env!("CARGO_BIN_EXE_outlast-next");

fn sharing(place: &Place) -> Setup {
    Setup::new(place).options(["--share", "--linger", LINGER])
}

/// A client with these capabilities.
fn open_as(setup: Setup, capabilities: &Value) -> Client {
    let mut client = setup.start();
    let info = json!({"name": "proof", "version": "1"});
    let params = json!({"protocolVersion": "2025-06-18", "capabilities": capabilities, "clientInfo": info});
    let answer = client.ask("initialize", params);
    assert!(answer["result"].is_object(), "{answer}");
    client.line(INITIALIZED);
    client
}

/// All that runs in a place.
fn listed(place: &Place) -> Vec<Value> {
    let output = outlast_in(place.path(), &["ps", "--json"]);
    serde_json::from_slice(&output.stdout).expect("an array of rows")
}

/// The hub that all clients use.
fn hub(place: &Place) -> Value {
    let rows = listed(place);
    let mut hubs = rows.into_iter().filter(|row| row["state"] != "unresponsive");
    let hub = hubs.next().expect("a hub");
    assert_eq!(hubs.next(), None, "one hub");
    hub
}

fn pid_of(row: &Value, member: &str) -> u32 {
    row[member].as_u64().and_then(|pid| u32::try_from(pid).ok()).unwrap_or_else(|| panic!("no {member}: {row}"))
}

/// The last client has left, and nothing is left running.
fn is_over(place: &Place) {
    until("the hub to end", || listed(place).is_empty().then_some(()));
    place.is_swept();
    let left = fs::read_dir(place.path().join(".local/state/outlast/share")).expect("the directory of hubs");
    let left: Vec<_> = left.flatten().map(|file| file.file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn ten_simultaneous_starts_have_one_hub() {
    let place = Place::new();
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| sharing(&place).start()).collect();
    clients.iter_mut().for_each(Client::open);
    let pids: BTreeSet<u32> = clients.iter_mut().map(Client::server_pid).collect();
    assert_eq!(pids.len(), 1, "one server");
    let names = clients[3].tool_names();
    for name in ["echo", "restart_server", "verify_server_restarted", "server_status"] {
        assert!(names.iter().any(|known| known == name), "{name} is not in {names:?}");
    }
    let hub = hub(&place);
    assert_eq!(hub["share"]["clients"].as_array().map(Vec::len), Some(CLIENTS), "{hub}");
    let users: BTreeSet<u64> = hub["share"]["clients"]
        .as_array()
        .expect("clients")
        .iter()
        .filter_map(|client| client["pid"].as_u64())
        .collect();
    assert_eq!(users, clients.iter().map(|client| u64::from(client.pid())).collect(), "{hub}");
    assert_eq!(place.audit_of("instance_started").len(), 1, "no other hub was started");
    assert!(is_private(&place), "the files of the hub");
    clients.into_iter().for_each(Client::end);
    is_over(&place);
}

/// Only this user can use the files of a hub.
fn is_private(place: &Place) -> bool {
    let dir = place.path().join(".local/state/outlast/share");
    let modes = |path: &std::path::Path| fs::symlink_metadata(path).expect("it is there").permissions().mode() & 0o777;
    let files = fs::read_dir(&dir).expect("the directory of hubs").flatten();
    let sockets: Vec<u32> = files
        .filter(|file| file.path().extension().is_some_and(|extension| extension == "sock"))
        .map(|file| modes(&file.path()))
        .collect();
    modes(&dir) == 0o700 && sockets == [0o600]
}

/// Each client sends many calls while the hub and the server are killed again and again. Every call is answered once, to
/// the client that sent it, and none is executed twice.
#[test]
fn clients_outlast_their_hub_and_their_server() {
    const ROUNDS: usize = 40;
    const BURST: usize = 5;
    const KILLS: usize = 8;
    let place = Place::new();
    let setup = sharing(&place).puppet(["--ledger", "ledger"]);
    let done = AtomicUsize::new(0);
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| setup.clone().start()).collect();
    clients.iter_mut().for_each(Client::open);
    let outcomes: Vec<(Client, BTreeMap<u64, bool>)> = thread::scope(|scope| {
        let threads: Vec<_> = clients
            .into_iter()
            .enumerate()
            .map(|(index, client)| {
                scope.spawn({
                    let done = &done;
                    move || {
                        let outcome = load(client, index, ROUNDS, BURST);
                        done.fetch_add(1, Ordering::SeqCst);
                        outcome
                    }
                })
            })
            .collect();
        let mut kills = 0;
        while done.load(Ordering::SeqCst) < CLIENTS {
            // A kill is followed by the next one when the clients are served again.
            let rows: Vec<Value> = listed(&place).into_iter().filter(|row| row["state"] == "ready").collect();
            let Some(row) = rows.first() else { continue };
            let victim = if kills % 2 == 0 { "pid" } else { "child_pid" };
            if let Some(pid) = row[victim].as_u64().filter(|_| kills < KILLS) {
                let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), Signal::SIGKILL);
                kills += 1;
            }
        }
        assert!(kills >= KILLS / 2, "only {kills} kills");
        threads.into_iter().map(|thread| thread.join().expect("a client")).collect()
    });
    let ledger = fs::read_to_string(place.path().join("ledger")).expect("the ledger");
    let mut executed: BTreeMap<u64, usize> = BTreeMap::new();
    for line in ledger.lines() {
        *executed.entry(line.split(' ').next().expect("a number").parse().expect("a number")).or_default() += 1;
    }
    let (mut answered, mut failed) = (0, 0);
    for (mut client, outcome) in outcomes {
        assert_eq!(outcome.len(), ROUNDS * BURST);
        for (call, is_done) in outcome {
            let times = executed.get(&call).copied().unwrap_or(0);
            assert!(times <= 1, "call {call} was executed {times} times");
            assert!(!is_done || times == 1, "call {call} was answered and not executed");
            if is_done { answered += 1 } else { failed += 1 }
        }
        assert_eq!(client.call("echo", json!({"text": "still connected"})), "still connected");
        client.end();
    }
    println!("{answered} calls were answered, {failed} failed");
    assert!(answered > failed, "{answered} calls were answered, {failed} failed");
    is_over(&place);
}

/// Sends bursts of calls; whether each was executed, by its number.
fn load(mut client: Client, index: usize, rounds: usize, burst: usize) -> (Client, BTreeMap<u64, bool>) {
    let mut outcome = BTreeMap::new();
    for round in 0..rounds {
        let calls: Vec<(u64, u64)> = (0..burst)
            .map(|step| {
                let call = ((index * rounds + round) * burst + step) as u64;
                (client.send_call("echo", json!({"call": call, "client": index})), call)
            })
            .collect();
        for (id, call) in calls {
            let answer = client.answer(id);
            let result = &answer["result"];
            let is_done = result["isError"] != true;
            match is_done {
                true => {
                    let said: Value = serde_json::from_str(&text(result)).expect("the arguments");
                    assert_eq!(said, json!({"call": call, "client": index}), "an answer to another client");
                }
                false => assert!(failure(result)["reason"].is_string(), "{answer}"),
            }
            outcome.insert(call, is_done);
        }
    }
    (client, outcome)
}

/// Clients on three SDKs use one Python server at once, and stay connected while server and hub are killed.
#[test]
fn ten_real_clients_of_three_sdks() {
    let Some(peers) = Peers::find("share::ten_real_clients_of_three_sdks") else { return };
    let project = Project::new(&peers, Server::PythonMcp1);
    let script = text_of(&Peers::script("servers/python_shared.py"));
    let python = text_of(&peers.python("python-1"));
    // Each SDK passes on other variables, and clients share a server only if these are equal.
    let env =
        ["/usr/bin/env", "-i", "PATH=/usr/bin:/bin", &format!("HOME={}", text_of(&project.path()))].map(str::to_owned);
    let own = [&*text_of(&outlast()), "mcp", "--share", "--linger", LINGER, "--"].map(str::to_owned);
    let command: Vec<String> = env.into_iter().chain(own).chain([python, script]).collect();
    let kinds = [Sdk::PythonMcp1, Sdk::TsSdk1, Sdk::Rmcp];
    let start = |index: usize| {
        let peer = Peer::start(kinds[index % kinds.len()], &project, &command);
        peer.unwrap_or_else(|error| panic!("{error}\n{}", project.stderr_tail()))
    };
    let mut clients: Vec<Peer> = (0..CLIENTS).map(start).collect();
    let rows = || -> Vec<Value> {
        let output = outlast_in(&project.path(), &["ps", "--json"]);
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout).expect("an array of rows");
        rows.into_iter().filter(|row| row["state"] == "ready").collect()
    };
    let hub = rows().pop().expect("a hub");
    assert_eq!(hub["share"]["clients"].as_array().map(Vec::len), Some(CLIENTS), "{hub}");
    // Each hears of its own work, and of no other.
    let all_work = |clients: &mut Vec<Peer>| {
        thread::scope(|scope| {
            for (index, client) in clients.iter_mut().enumerate() {
                scope.spawn(move || {
                    for round in 0..3 {
                        let (tag, steps) = (format!("client {index}, round {round}"), 3 + index);
                        let (said, heard) = client.progress("work", json!({"tag": tag, "steps": steps})).expect("work");
                        assert!(!said.is_error && said.text == tag, "{tag}: {said:?}");
                        assert_eq!(heard, vec![tag; steps]);
                    }
                });
            }
        });
    };
    all_work(&mut clients);
    let pids = |clients: &mut Vec<Peer>| -> BTreeSet<String> {
        clients.iter_mut().map(|client| client.call("pid", json!({})).expect("a pid").text).collect()
    };
    let first = pids(&mut clients);
    assert_eq!(first.len(), 1, "one server");
    for victim in ["child_pid", "pid"] {
        let hub = rows().pop().expect("a hub");
        signal(pid_of(&hub, victim), Signal::SIGKILL);
        until("the next server", || {
            let row = rows().pop()?;
            let is_next = row["child_pid"] != hub["child_pid"]
                && row["share"]["clients"].as_array().map(Vec::len) == Some(CLIENTS);
            is_next.then_some(())
        });
        all_work(&mut clients);
    }
    assert!(first.is_disjoint(&pids(&mut clients)));
    for client in clients {
        client.close().unwrap_or_else(|error| panic!("{error}\n{}", project.stderr_tail()));
    }
    until("the hub to end", || rows().is_empty().then_some(()));
}

/// All clients use the same ids and tokens.
#[test]
fn messages_reach_the_client_that_they_belong_to() {
    let place = Place::new();
    let setup = sharing(&place).puppet(["--resources", "--logging", "--log", "log"]);
    let [mut one, mut two, mut three] = [(); 3].map(|()| setup.clone().ready());

    // Progress.
    let params = |steps: u64| json!({"name": "progress", "arguments": {"steps": steps, "ms": 20}, "_meta": {"progressToken": "t"}});
    let (first, second) = (one.request("tools/call", params(3)), two.request("tools/call", params(5)));
    one.answer(first);
    two.answer(second);
    assert_eq!((one.count("notifications/progress"), two.count("notifications/progress")), (3, 5));
    assert!(one.heard.iter().chain(&two.heard).all(|note| note["params"]["progressToken"] == "t"));
    assert_eq!(three.count("notifications/progress"), 0);

    // Cancellation: the same id of another client continues.
    let (first, second) = (one.send_call("sleep", json!({"ms": 60_000})), two.send_call("sleep", json!({"ms": 300})));
    assert_eq!(first, second, "the ids collide");
    one.cancel(first);
    assert_eq!(text(&two.answer(second)["result"]), "slept");
    let cancelled =
        || place.log("log").into_iter().filter(|(_, line)| line.contains("notifications/cancelled")).count();
    until("the cancellation", || (cancelled() == 1).then_some(()));

    // Subscriptions.
    one.ask("resources/subscribe", json!({"uri": "puppet://a"}));
    two.ask("resources/subscribe", json!({"uri": "puppet://b"}));
    three.call("touch", json!({"uri": "puppet://a"}));
    three.call("touch", json!({"uri": "puppet://b"}));
    assert_eq!(one.next("notifications/resources/updated")["params"]["uri"], "puppet://a");
    assert_eq!(two.next("notifications/resources/updated")["params"]["uri"], "puppet://b");
    for client in [&mut one, &mut two, &mut three] {
        client.ask("ping", json!({}));
        assert_eq!(client.count("notifications/resources/updated"), 0);
    }

    // Log levels.
    one.ask("logging/setLevel", json!({"level": "error"}));
    two.ask("logging/setLevel", json!({"level": "debug"}));
    two.call("log", json!({"level": "info", "text": "for two"}));
    assert_eq!(two.next("notifications/message")["params"]["data"], "for two");
    one.call("log", json!({"level": "info", "text": "for no client"}));
    one.call("log", json!({"level": "error", "text": "for one"}));
    assert_eq!(one.next("notifications/message")["params"]["data"], "for one");
    assert_eq!(three.count("notifications/message"), 0);

    // Subscriptions and levels are repeated on the next hub.
    signal(pid_of(&hub(&place), "pid"), Signal::SIGKILL);
    until("the next hub", || {
        let answer = three.ask("tools/call", json!({"name": "state", "arguments": {}}));
        let state: Value = serde_json::from_str(answer["result"]["content"][0]["text"].as_str()?).ok()?;
        let subscribed = state["subscribed"].as_array().map(Vec::len);
        (subscribed == Some(2) && state["level"] == "debug").then_some(())
    });
    three.call("touch", json!({"uri": "puppet://a"}));
    assert_eq!(one.next("notifications/resources/updated")["params"]["uri"], "puppet://a");
    [one, two, three].into_iter().for_each(Client::end);
    is_over(&place);
}

#[test]
fn commands_and_tools_act_on_the_one_server() {
    let place = Place::new();
    place.write("watched", "1");
    let setup = sharing(&place).options(["--name", "shared", "--watch", "watched"]).hasty();
    let [mut one, mut two] = [(); 2].map(|()| setup.clone().ready());
    let first = one.server_pid();

    let report = two.restart();
    assert_eq!((&report["old_pid"], &report["generation"]), (&json!(first), &json!(2)), "{report}");
    let second = one.server_pid();
    assert_eq!(json!(second), report["new_pid"]);
    assert_eq!(one.status()["pid"], second);
    let verified = one.result("verify_server_restarted", json!({"since_timestamp": 0}))["structuredContent"].clone();
    assert_eq!(verified["restarted"], true, "{verified}");

    let output = outlast_in(place.path(), &["restart", "shared", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    assert_eq!(report["old_pid"], second, "{report}");
    let third = two.server_pid();
    assert_eq!(json!(third), report["new_pid"]);

    place.write("watched", "2");
    place.recorded("server_started", 4);
    until("the reload", || (one.server_pid() != third && two.server_pid() != third).then_some(()));

    let log = String::from_utf8(outlast_in(place.path(), &["logs", "shared"]).stdout).expect("text");
    assert!(log.contains("proof (pid") && log.contains("Restart requested by tool"), "{log}");
    let said = String::from_utf8(outlast_in(place.path(), &["ps"]).stdout).expect("text");
    assert_eq!(said.matches("connected").count(), 2, "{said}");

    // A stop ends the clients, as it would end each outlast without a hub.
    let stopped = outlast_in(place.path(), &["stop", "shared"]);
    assert!(stopped.status.success(), "{stopped:?}");
    assert_eq!((one.wait().code(), two.wait().code()), (Some(0), Some(0)));
    is_over(&place);
}

/// The server's own restart tool, with exit code 42 (W10).
#[test]
fn a_server_restarts_itself_for_all_clients() {
    let place = Place::new();
    let setup = sharing(&place).puppet(["--own-restart"]);
    let [mut one, mut two] = [(); 2].map(|()| setup.clone().ready());
    let first = two.server_pid();
    let result = one.result("restart_server", json!({}));
    assert_ne!(result["isError"], true, "{result}");
    until("another server", || (two.server_pid() != first).then_some(()));
    assert_eq!(one.server_pid(), two.server_pid());
    // A server that leaves on purpose ends the clients, as without a hub.
    one.send_call("exit", json!({"code": 0}));
    assert_eq!((one.wait().code(), two.wait().code()), (Some(0), Some(0)));
    is_over(&place);
}

#[test]
fn a_hub_waits_for_the_next_client_and_ends() {
    let place = Place::new();
    let mut first = sharing(&place).ready();
    let (server, process) = (first.server_pid(), pid_of(&hub(&place), "pid"));
    first.end();
    let mut second = sharing(&place).ready();
    assert_eq!(second.server_pid(), server, "it was still there");
    assert_ne!(process, second.pid());
    second.end();
    until("the end of hub and server", || (!is_alive(process) && !is_alive(server)).then_some(()));
    is_over(&place);
}

#[test]
fn a_silent_client_starts_no_hub() {
    let place = Place::new();
    sharing(&place).start().end();
    assert!(listed(&place).is_empty() && place.audit().is_empty());
}

/// U1: each client becomes another program while it has calls in flight. The hub, the server and the clients' programs see
/// nothing of it.
#[test]
fn thin_clients_become_another_program_under_load() {
    const ROUNDS: usize = 40;
    const BURST: usize = 5;
    let place = Place::new();
    let program = place.join("outlast-on-disk");
    copy_program(OUTLAST, &program);
    let setup = sharing(&place).program(&program).puppet(["--log", "log", "--ledger", "ledger"]);
    let mut clients: Vec<Client> = (0..3).map(|_| setup.clone().start()).collect();
    clients.iter_mut().for_each(Client::open);
    let pids: Vec<u32> = clients.iter().map(Client::pid).collect();
    let before = hub(&place);
    let server = clients[0].server_pid();
    let outcomes: Vec<(Client, BTreeMap<u64, bool>)> = thread::scope(|scope| {
        let threads: Vec<_> = clients
            .into_iter()
            .enumerate()
            .map(|(index, client)| scope.spawn(move || load(client, index, ROUNDS, BURST)))
            .collect();
        for source in [OUTLAST, OUTLAST, NEXT] {
            // As a package manager does: another file takes the name.
            let new = place.join("new");
            copy_program(source, &new);
            fs::rename(&new, &program).expect("the file is ours");
            let is_new = |pid: &u32| {
                fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|path| path == std::path::Path::new(&program))
            };
            pids.iter().for_each(|pid| signal(*pid, Signal::SIGUSR2));
            until("the new program", || pids.iter().all(is_new).then_some(()));
        }
        threads.into_iter().map(|thread| thread.join().expect("every call is answered")).collect()
    });
    let mut calls = 0;
    for (client, outcome) in &outcomes {
        calls += outcome.len();
        assert!(outcome.values().all(|is_done| *is_done), "no call failed: {outcome:?}");
        assert!(client.heard.is_empty(), "{:?}", client.heard);
    }
    let after = hub(&place);
    for member in ["id", "pid", "child_pid", "generation", "restarts"] {
        assert_eq!(after[member], before[member], "{member}");
    }
    let users = |hub: &Value| hub["share"]["clients"].as_array().map(Vec::len);
    assert_eq!((users(&before), users(&after)), (Some(3), Some(3)));
    let ledger = fs::read_to_string(place.path().join("ledger")).expect("calls were made");
    assert_eq!(ledger.lines().count(), calls, "each call was executed once");
    assert_eq!(place.log("log").iter().filter(|(_, line)| line.contains("initialize")).count(), 2, "one handshake");
    let mut clients: Vec<Client> = outcomes.into_iter().map(|(client, _)| client).collect();
    assert_eq!(clients[1].server_pid(), server);
    // A program that cannot take over changes nothing.
    fs::remove_file(&program).expect("the file is ours");
    place.script("outlast-on-disk", "#!/bin/sh\nexit 0\n");
    pids.iter().for_each(|pid| signal(*pid, Signal::SIGUSR2));
    assert_eq!(clients[2].call("echo", json!({"text": "still here"})), "still here");
    // The next hub is joined by the new program.
    signal(pid_of(&after, "pid"), Signal::SIGKILL);
    // A call at the wrong moment fails, as at any crash.
    until("the next hub", || {
        let result = clients[0].result("pid", json!({}));
        (result["isError"] != true && text(&result) != server.to_string()).then_some(())
    });
    clients.into_iter().for_each(Client::end);
    is_over(&place);
}

/// U1: the hub becomes another program while its clients have calls in flight, and its clients follow. The server and the
/// clients' programs see nothing of it.
#[test]
fn a_hub_becomes_another_program_under_load() {
    const BURST: usize = 5;
    let upgrades = upgrades();
    let rounds = upgrades * 20;
    let place = Place::new();
    let setup = sharing(&place).options(["--name", "shared"]).puppet(["--log", "log", "--ledger", "ledger"]);
    let mut clients: Vec<Client> = (0..3).map(|_| setup.clone().start()).collect();
    clients.iter_mut().for_each(Client::open);
    let pids: Vec<u32> = clients.iter().map(Client::pid).collect();
    let before = hub(&place);
    let server = clients[0].server_pid();
    let upgrade = |program: &str| {
        let output = outlast_in(place.path(), &["upgrade", "shared", "--program", program, "--json"]);
        assert!(output.status.success(), "{output:?}");
        let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(answer["upgraded"], true, "{answer}");
        answer["pause_ms"].as_f64().expect("a number")
    };
    let mut pauses = Vec::new();
    let outcomes: Vec<(Client, BTreeMap<u64, bool>)> = thread::scope(|scope| {
        let threads: Vec<_> = clients
            .into_iter()
            .enumerate()
            .map(|(index, client)| scope.spawn(move || load(client, index, rounds, BURST)))
            .collect();
        // The second half reads the state of the first by a migration.
        for number in 0..upgrades {
            pauses.push(upgrade(if number < upgrades / 2 { OUTLAST } else { NEXT }));
        }
        threads.into_iter().map(|thread| thread.join().expect("every call is answered")).collect()
    });
    println!("the hub paused for {pauses:?} ms");
    let mut calls = 0;
    for (client, outcome) in &outcomes {
        calls += outcome.len();
        assert!(outcome.values().all(|is_done| *is_done), "no call failed: {outcome:?}");
        assert!(client.heard.is_empty(), "{:?}", client.heard);
    }
    let after = hub(&place);
    for member in ["id", "pid", "child_pid", "generation", "restarts"] {
        assert_eq!(after[member], before[member], "{member}");
    }
    let users = |hub: &Value| hub["share"]["clients"].clone();
    assert_eq!(users(&before), users(&after));
    let ledger = fs::read_to_string(place.path().join("ledger")).expect("calls were made");
    assert_eq!(ledger.lines().count(), calls, "each call was executed once");
    assert_eq!(place.log("log").iter().filter(|(_, line)| line.contains("initialize")).count(), 2, "one handshake");
    assert_eq!(place.audit_of("upgraded").len(), upgrades);
    let is_next = |pid: &u32| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|path| path == Path::new(NEXT));
    until("the clients to follow", || pids.iter().all(is_next).then_some(()));

    let mut clients: Vec<Client> = outcomes.into_iter().map(|(client, _)| client).collect();
    assert_eq!(clients[1].server_pid(), server);
    // A client that comes now joins the same hub, whose name is still claimed.
    let mut late = setup.clone().ready();
    assert_eq!(late.server_pid(), server);
    // A program that cannot take over changes nothing.
    let wrong = place.script("wrong", "#!/bin/sh\nexit 0\n");
    let refused = outlast_in(place.path(), &["upgrade", "--all", "--program", &wrong]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("it is not outlast"), "{refused:?}");
    assert_eq!(late.call("echo", json!({"text": "still here"})), "still here");
    // A call that is open for long postpones the upgrade, and new calls are served meanwhile.
    let long = clients[0].send_call("sleep", json!({"ms": 14_000}));
    let output = outlast_in(place.path(), &["upgrade", "shared"]);
    let said = String::from_utf8(output.stdout).expect("text");
    assert!(said.contains("Postponed the upgrade of shared") && said.contains("1 request is open"), "{said}");
    assert_eq!(clients[1].call("echo", json!({"text": "meanwhile"})), "meanwhile");
    assert_eq!(text(&clients[0].answer(long)["result"]), "slept");
    place.recorded("upgraded", upgrades + 1);
    // The next hub is joined by the new program.
    signal(pid_of(&after, "pid"), Signal::SIGKILL);
    until("the next hub", || {
        let result = clients[0].result("pid", json!({}));
        (result["isError"] != true && text(&result) != server.to_string()).then_some(())
    });
    clients.into_iter().chain([late]).for_each(Client::end);
    is_over(&place);
}

/// A question of the server to a client is answered before the hub becomes another program.
#[test]
fn a_hub_waits_for_the_answer_of_a_client() {
    let place = Place::new();
    let capabilities = json!({"sampling": {}});
    let setup = sharing(&place).options(["--name", "shared"]);
    let [mut one, mut two] = [(); 2].map(|()| open_as(setup.clone(), &capabilities));
    let server = one.server_pid();
    let asking = one.send_call("ask", json!({"method": "sampling/createMessage"}));
    let question = one.next("sampling/createMessage");
    let home = place.path().to_owned();
    let upgrade = thread::spawn(move || outlast_in(&home, &["upgrade", "shared", "--program", NEXT, "--json"]));
    // Requests pass while the client is asked.
    assert_eq!(two.call("echo", json!({"text": "passes"})), "passes");
    let answer = json!({"jsonrpc": "2.0", "id": question["id"], "result": {"said": "yes"}});
    one.line(&answer.to_string());
    assert!(text(&one.answer(asking)["result"]).contains("yes"));
    let output = upgrade.join().expect("it answers");
    let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(answer["upgraded"], true, "{answer}");
    // What one client of this server could do, the next program knows.
    let asking = two.send_call("ask", json!({"method": "sampling/createMessage"}));
    let question = two.next("sampling/createMessage");
    let answer = json!({"jsonrpc": "2.0", "id": question["id"], "result": {"said": "again"}});
    two.line(&answer.to_string());
    assert!(text(&two.answer(asking)["result"]).contains("again"));
    assert_eq!((one.server_pid(), two.server_pid()), (server, server));
    [one, two].into_iter().for_each(Client::end);
    is_over(&place);
}

/// A client has connected, and greets the hub when that has begun to end: it is told to start the next one, and does not
/// end with this one.
#[test]
fn a_client_is_not_welcomed_by_a_hub_that_ends() {
    let place = Place::new();
    let grace = ["--share", "--linger", "100ms", "--stdin-grace", "3s"];
    let client = Setup::new(&place).options(grace).puppet(["--ignore-eof"]).ready();
    let sockets = fs::read_dir(place.path().join(".local/state/outlast/share")).expect("the directory of hubs");
    let mut sockets = sockets.flatten().map(|file| file.path());
    let socket = sockets.find(|path| path.extension().is_some_and(|extension| extension == "sock")).expect("a socket");
    let mut late = UnixStream::connect(&socket).expect("the hub listens");
    client.end();
    until("the end of the hub to begin", || (!socket.exists()).then_some(()));
    let hello = json!({"v": 1, "pid": 1, "parent": 1, "cwd": "/", "capabilities": "{}"});
    writeln!(late, "!{hello}").expect("the hub has not ended");
    let mut said = String::new();
    late.read_to_string(&mut said).expect("the hub closes the connection");
    assert_eq!(said, "", "neither a welcome nor the end of the client");
    is_over(&place);
}

#[test]
fn a_hub_that_gets_a_signal_ends_alone() {
    let place = Place::new();
    let mut client = sharing(&place).ready();
    let server = client.server_pid();
    signal(pid_of(&hub(&place), "pid"), Signal::SIGTERM);
    // A call at the wrong moment fails, as at any crash.
    until("another server", || {
        let result = client.result("pid", json!({}));
        (result["isError"] != true && text(&result) != server.to_string()).then_some(())
    });
    client.end();
    is_over(&place);
}

#[test]
fn clients_with_other_capabilities_do_not_share() {
    let place = Place::new();
    let (plain, asking) = (json!({}), json!({"sampling": {}}));
    let mut clients = [&plain, &asking, &plain, &asking].map(|capabilities| open_as(sharing(&place), capabilities));
    let pids: Vec<u32> = clients.iter_mut().map(Client::server_pid).collect();
    assert!(pids[0] == pids[2] && pids[1] == pids[3] && pids[0] != pids[1], "{pids:?}");
    let rows = listed(&place);
    assert_eq!((rows.len(), &rows[1]["share"]["scope"]), (2, &json!("equals")), "{rows:?}");
    let said = String::from_utf8(outlast_in(place.path(), &["ps"]).stdout).expect("text");
    assert!(said.contains("shared only by clients with equal capabilities"), "{said}");
    clients.into_iter().for_each(Client::end);
    is_over(&place);
}

/// The call that is in flight when a client has to move is answered by the server that it leaves.
#[test]
fn a_server_that_asks_for_roots_has_one_client() {
    let place = Place::new();
    let capabilities = json!({"roots": {}});
    let [mut one, mut two] = [(); 2].map(|()| open_as(sharing(&place), &capabilities));
    let shared = one.server_pid();
    assert_eq!(two.server_pid(), shared);
    let asking = one.send_call("ask", json!({"method": "roots/list"}));
    let question = one.next("roots/list");
    let slow = two.send_call("sleep", json!({"ms": 300}));
    let answer = json!({"jsonrpc": "2.0", "id": question["id"], "result": {"roots": [{"uri": "file:///one"}]}});
    one.line(&answer.to_string());
    assert!(text(&one.answer(asking)["result"]).contains("file:///one"));
    assert_eq!(text(&two.answer(slow)["result"]), "slept");
    two.says("has a server of its own");
    until("its own server", || (two.server_pid() != shared).then_some(()));
    assert_eq!(one.server_pid(), shared);
    let mut three = open_as(sharing(&place), &capabilities);
    assert!(![shared, two.server_pid()].contains(&three.server_pid()), "a third server");
    let own: Vec<Value> = listed(&place).into_iter().filter(|row| row["share"]["scope"] == "own").collect();
    assert_eq!(own.len(), 2, "{own:?}");
    assert!(own.iter().all(|row| row["share"]["why_not_all"].as_str().is_some_and(|why| why.contains("roots"))));
    let said = String::from_utf8(outlast_in(place.path(), &["ps"]).stdout).expect("text");
    assert_eq!(said.matches("not shared: the server asks for the roots").count(), 3, "{said}");
    [one, two, three].into_iter().for_each(Client::end);
    is_over(&place);
}

/// The directory of hubs is a link, or belongs to another user.
#[test]
fn hubs_are_not_searched_in_directories_of_other_users() {
    let place = Place::new();
    let state = place.path().join(".local/state/outlast");
    fs::create_dir_all(&state).expect("the home is ours");
    let dir = state.join("share");
    fs::create_dir_all(place.path().join("elsewhere")).expect("the home is ours");
    symlink(place.path().join("elsewhere"), &dir).expect("a link");
    if nix::unistd::geteuid().is_root() {
        fs::remove_file(&dir).expect("it is ours");
        fs::create_dir(&dir).expect("the home is ours");
        std::os::unix::fs::chown(&dir, Some(61_017), Some(61_017)).expect("root may");
        assert_eq!(fs::metadata(&dir).expect("it is there").uid(), 61_017);
    }
    let [mut one, mut two] = [(); 2].map(|()| sharing(&place).ready());
    assert_ne!(one.server_pid(), two.server_pid(), "each has its own server");
    let said = one.says("is not shared");
    assert!(said.contains("belongs to another user"), "{said}");
    let rows = listed(&place);
    assert!(
        rows.iter().all(|row| row["share"]["why_not_all"].as_str().is_some_and(|why| why.contains("another user")))
    );
    [one, two].into_iter().for_each(Client::end);
    place.is_swept();
}

/// No file can be made in the directory of hubs: each client gets a hub that needs none.
#[test]
fn a_full_disk_gives_each_client_its_own_server() {
    let mount = "mount -t tmpfs -o nr_inodes=1,mode=700 none \"$HOME/.local/state/outlast/share\"";
    let may_mount = || Command::new("unshare").args(["-m", "true"]).status().is_ok_and(|status| status.success());
    if !nix::unistd::geteuid().is_root() || !may_mount() {
        eprintln!("SKIPPED share::a_full_disk_gives_each_client_its_own_server: it needs to mount a file system");
        return;
    }
    let place = Place::new();
    fs::create_dir_all(place.path().join(".local/state/outlast/share")).expect("the home is ours");
    let before = format!("exec unshare -m sh -c '{mount} && exec \"$@\"' sh \"$@\"");
    let [mut one, mut two] = [(); 2].map(|()| sharing(&place).before(&before).ready());
    assert_ne!(one.server_pid(), two.server_pid());
    let said = one.says("has a server of its own");
    assert!(said.contains("no space left on device"), "{said}");
    signal(one.server_pid(), Signal::SIGKILL);
    until("another server", || {
        one.result("pid", json!({}))["isError"].as_bool().is_none_or(|error| !error).then_some(())
    });
    [one, two].into_iter().for_each(Client::end);
    place.is_swept();
}
