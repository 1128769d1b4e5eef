//! Backends that crash, hang or never become ready, while clients keep their sessions.

use std::{fs, thread};

use nix::sys::signal::Signal;
use serde_json::json;

use super::{
    web::Web,
    world::{Gate, HASTY, backend},
};
use crate::mcp::client::{Place, descriptors, is_alive, proc_number, signal, until};

#[test]
fn a_call_in_flight_at_a_crash_fails_with_an_error() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], HASTY));
    let mut session = gate.session();
    let result = session.result("one__crash", json!({"code": 3}));
    assert_eq!(result["isError"], true, "{result}");
    let words = crate::mcp::client::text(&result);
    assert!(words.contains("exit code 3"), "{words}");
    // The same session continues; the call waits for the new child.
    assert_eq!(session.call("one__echo", json!({"text": "back"})), "back");
    let crashed = gate.place.recorded("server_crashed", 1);
    assert_eq!((&crashed["backend"], &crashed["kind"]), (&json!("one"), &json!("backend")), "{crashed}");
    gate.end();
}

/// The long answer is still being parsed when the process is gone.
#[test]
fn calls_after_a_long_last_answer_go_to_the_next_process() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], HASTY));
    let pid = gate.child("one");
    let mut session = gate.session();
    session.call("one__stderr", json!({"text": "the last words"}));
    let bytes = 40 << 20;
    let mut last = session.begin("one__exit", &json!({"code": 3, "bytes": bytes}), None);
    until("the process to be gone", || (!is_alive(pid)).then_some(()));
    assert_ne!(session.call("one__pid", json!({})), pid.to_string());
    assert_eq!(crate::mcp::client::text(&last.answer().messages()[0]["result"]).len(), bytes);
    let end = gate.backend("one")["stderr_tail"].to_string();
    assert!(end.contains("the last words"), "{end}");
    gate.end();
}

#[test]
fn a_backend_that_never_starts_blocks_no_other() {
    let config = [
        backend("good", &[], ""),
        "[[backend]]\nname = \"missing\"\ncommand = \"/nowhere/at/all\"\nmax_restarts = 1\ndelay_first = \"10ms\"\n\n"
            .to_owned(),
        "[[backend]]\nname = \"silent\"\ncommand = \"sleep\"\nargs = [\"600\"]\n\n".to_owned(),
    ];
    let gate = Gate::listen(Place::new(), &config.concat());
    let mut session = gate.session();
    assert_eq!(session.call("good__echo", json!({"text": "at once"})), "at once");
    assert!(session.tools().iter().any(|tool| tool == "good__echo"));
    let missing = gate.is("missing", "given_up");
    assert!(missing["next_try_s"].as_f64().is_some_and(|seconds| 200.0 < seconds), "tried again later: {missing}");
    assert!(missing["last_exit"].as_str().is_some_and(|exit| exit.contains("could not be started")), "{missing}");
    // The last cause is shown wherever the backend is shown.
    assert!(missing["reason"].as_str().is_some_and(|why| why.contains("could not be started")), "{missing}");
    for args in [&["ps"][..], &["state", "missing"], &["ps", "--json"]] {
        let said = String::from_utf8_lossy(&gate.outlast(args).stdout).into_owned();
        assert!(said.contains("could not be"), "{args:?}: {said}");
    }
    let served = Web::connect(&gate.address).get("/api/state").text();
    assert!(served.contains("the last one: could not be started"), "{served}");
    assert_eq!(gate.backend("silent")["state"], "starting");
    gate.place.recorded("gave_up", 1);
    gate.end();
}

#[test]
fn a_backend_that_hangs_is_replaced_and_its_calls_end_in_time() {
    let config = [backend("one", &[], &format!("{HASTY}\ncall_timeout = \"1s\"")), backend("two", &[], "")];
    let gate = Gate::listen(Place::new(), &config.concat());
    let (one, two) = (gate.child("one"), gate.child("two"));
    let mut session = gate.session();
    signal(one, Signal::SIGSTOP);
    let result = session.result("one__echo", json!({"text": "not executed"}));
    assert_eq!(result["isError"], true, "{result}");
    assert_eq!(session.call("two__pid", json!({})), two.to_string());
    until("the child to be replaced", || (!is_alive(one)).then_some(()));
    assert_ne!(session.call("one__pid", json!({})), one.to_string());
    gate.end();
}

#[test]
fn killing_the_gateway_leaves_no_child() {
    let config = [backend("one", &["--ignore-eof", "--ignore-term"], ""), backend("two", &[], "")];
    let mut gate = Gate::listen(Place::new(), &config.concat());
    let (one, two) = (gate.child("one"), gate.child("two"));
    let mut session = gate.session();
    let below = session.call("one__grandchild", json!({"setsid": true, "ignore_term": true}));
    let below: u32 = below.parse().expect("a pid");
    signal(gate.client.pid(), Signal::SIGKILL);
    gate.client.wait();
    for pid in [one, two, below] {
        until(&format!("{pid} to be gone"), || (!is_alive(pid)).then_some(()));
    }
}

#[test]
fn a_thousand_kills_leave_nothing_behind() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], HASTY));
    let mut session = gate.session();
    let gateway = gate.client.pid();
    let keeper = gate.client.keeper();
    let mut early = (0, 0);
    for kill in 1..=1000 {
        let pid: u32 = session.call("one__pid", json!({})).parse().expect("a pid");
        if kill == 100 {
            // Measured while a child serves, as at the end: its pipes count.
            early = (descriptors(gateway).len(), proc_number(gateway, "VmRSS:").expect("it runs"));
        }
        signal(pid, Signal::SIGKILL);
        // A call that was open when the child exited may fail; the next one waits for the new child.
        session.result("one__echo", json!({"text": "still here"}));
    }
    session.call("one__echo", json!({"text": "still here"}));
    let (descriptors_early, memory_early) = early;
    until("the descriptors to be as before", || (descriptors(gateway).len() <= descriptors_early + 1).then_some(()));
    let memory = proc_number(gateway, "VmRSS:").expect("it runs");
    assert!(memory < memory_early + 4096, "{memory_early} kB after 100 kills, {memory} kB after 1000");
    let zombies = || {
        let all = fs::read_dir("/proc").expect("a process table").flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let ours = pids.filter(|pid| {
            let parent = proc_number(*pid, "PPid:");
            parent == Some(u64::from(gateway)) || parent == Some(u64::from(keeper))
        });
        ours.filter(|pid| *pid != keeper && !is_alive(*pid)).count()
    };
    until("no zombie to be left", || (zombies() == 0).then_some(()));
    assert!(gate.backend("one")["restarts"].as_u64().is_some_and(|restarts| restarts >= 1000));
    gate.end();
}

#[test]
fn thirty_two_sessions_outlast_every_backend_in_turn() {
    const SESSIONS: usize = 32;
    const NAMES: [&str; 4] = ["a", "b", "c", "d"];
    let config: String = NAMES.iter().map(|name| backend(name, &[], HASTY)).collect();
    let gate = Gate::listen(Place::new(), &config);
    for name in NAMES {
        gate.child(name);
    }
    let stop = std::sync::atomic::AtomicBool::new(false);
    let rounds = |session: &mut super::web::Session, number: usize| {
        let (mut answered, mut failed) = (0usize, 0usize);
        let mut turn = number;
        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
            let name = NAMES[turn % NAMES.len()];
            let text = format!("{number} {turn}");
            let result = session.result(&format!("{name}__echo"), json!({"text": text}));
            if result["isError"] == true {
                failed += 1;
            } else {
                assert_eq!(crate::mcp::client::text(&result), text, "the answer of another client");
                answered += 1;
            }
            turn += 1;
        }
        (answered, failed)
    };
    let sums: Vec<(usize, usize)> = thread::scope(|scope| {
        let rounds = &rounds;
        let all: Vec<_> = (0..SESSIONS)
            .map(|number| {
                let mut session = gate.session();
                scope.spawn(move || rounds(&mut session, number))
            })
            .collect();
        let before: Vec<u32> = NAMES.iter().map(|name| gate.child(name)).collect();
        for (at, name) in NAMES.iter().enumerate() {
            signal(before[at], Signal::SIGKILL);
            let replaced = until(&format!("{name} to be back"), || {
                let backend = gate.backend(name);
                let pid = backend["pid"].as_u64().filter(|pid| *pid != u64::from(before[at]))?;
                (backend["state"] == "ready").then_some(pid)
            });
            assert!(is_alive(u32::try_from(replaced).expect("a pid")));
            // The other backends were not restarted.
            for (other, pid) in before.iter().enumerate().skip(at + 1) {
                assert_eq!(gate.child(NAMES[other]), *pid, "{}", NAMES[other]);
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        all.into_iter().map(|thread| thread.join().expect("no session hangs or ends")).collect()
    });
    let answered: usize = sums.iter().map(|(answered, _)| answered).sum();
    let failed: usize = sums.iter().map(|(_, failed)| failed).sum();
    println!("{answered} answered, {failed} were running at a crash");
    // One session has one open call, so a crash fails at most one call of each.
    assert!(failed <= SESSIONS * NAMES.len() && answered > SESSIONS * NAMES.len(), "{answered} and {failed}");
    gate.end();
}

#[test]
fn a_backend_that_only_answers_pings_is_replaced_and_a_backend_with_one_slow_tool_is_not() {
    let config = backend("one", &[], &format!("{HASTY}\ncall_timeout = \"2s\""));
    let gate = Gate::listen(Place::new(), &config);
    let one = gate.child("one");
    let mut session = gate.session();
    // Slow for one call: meanwhile it answers others.
    let mut other = gate.session();
    let slow = thread::spawn(move || other.result("one__sleep", json!({"ms": 60_000})));
    until("the slow call to be over", || {
        assert_eq!(session.call("one__pid", json!({})), one.to_string());
        slow.is_finished().then_some(())
    });
    assert_eq!(slow.join().expect("a call")["isError"], true);

    // It reads everything, and answers all requests but calls.
    assert_eq!(session.call("one__deaf", json!({})), "deaf");
    let late = session.result("one__echo", json!({"text": "late"}));
    assert_eq!(late["_meta"]["outlast/failure"]["reason"], "timed_out", "{late}");
    until("the child to be replaced", || (!is_alive(one)).then_some(()));
    assert_eq!(session.call("one__pid", json!({})), gate.child("one").to_string());
    let state = gate.backend("one");
    assert_eq!(gate.place.audit_of("server_crashed").len(), 0, "it did not crash: {state}");
    gate.client.says("has answered no call since a late one");
    gate.end();
}

#[test]
fn requests_that_a_crashed_child_did_not_receive_go_to_the_next() {
    let log = Place::new();
    let path = log.join("received");
    let gate = Gate::listen(Place::new(), &backend("one", &["--log", &path], HASTY));
    let one = gate.child("one");
    let mut session = gate.session();
    assert_eq!(session.call("one__hang", json!({"answer": true})), "hangs");
    // Its pipe takes a part of the first of these, and nothing of the others.
    let calls: Vec<_> = (0..4)
        .map(|number| {
            let mut session = gate.session();
            let text = format!("{number}{}", "x".repeat(1 << 20));
            thread::spawn(move || (session.call("one__echo", json!({"text": text.clone()})) == text, number))
        })
        .collect();
    until("all of them to be under way", || (gate.backend("one")["in_flight"] == 4).then_some(()));
    signal(one, Signal::SIGKILL);
    for call in calls {
        let (is_same, number) = call.join().expect("a call");
        assert!(is_same, "call {number} came back as another");
    }
    let received = fs::read_to_string(&path).expect("a log");
    let echoes = received.lines().filter(|line| line.contains("tools/call") && line.contains("xxxx"));
    assert_eq!(echoes.count(), 4, "each was done once");
    gate.end();
}
