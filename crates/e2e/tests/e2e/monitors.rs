//! Servers that kill or stop the processes of outlast that watch them: their calls are answered, no process of them
//! stays, and other servers are not affected.

use std::{
    collections::BTreeSet,
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::{
    gateway::world::{Gate, HASTY, backend},
    mcp::client::{Place, Setup, is_alive, proc_number, signal, text, until},
    support::processes::below,
};

/// A descendant of the puppet in its own session, without outlast's tag in its environment.
fn stray() -> serde_json::Value {
    json!({"setsid": true, "ignore_term": true, "clear_env": true})
}

#[test]
fn a_server_that_kills_or_stops_its_monitor_is_replaced_and_its_strays_are_swept() {
    for (name, keeper) in [("SIGKILL", false), ("SIGSTOP", false), ("SIGKILL", true), ("SIGSTOP", true)] {
        let place = Place::new();
        let mut client = Setup::new(&place).hasty().ready();
        let first_keeper = client.keeper();
        let first = client.server_pid();
        let below: u32 = client.call("grandchild", stray()).parse().expect("a pid");
        let result = client.result("signal_above", json!({"signal": name, "keeper": keeper}));
        assert_eq!(result["isError"], true, "{name}: {result}");
        assert!(text(&result).contains("SIGKILL"), "the kernel ended it with its monitor: {result}");
        assert_ne!(client.server_pid(), first);
        until("the stray to be swept", || (!is_alive(below) && !is_alive(first)).then_some(()));
        client.says("was killed or stopped; the process and its children are ended");
        if keeper {
            client.says("the keeper process was killed or stopped; a new one was started");
            assert_ne!(client.keeper(), first_keeper);
        }
        // The new processes do the same work.
        let below: u32 = client.call("grandchild", stray()).parse().expect("a pid");
        client.restart();
        until("the stray of the replaced server to be swept", || (!is_alive(below)).then_some(()));
        client.end();
        place.is_swept();
    }
}

#[test]
fn a_backend_that_ends_monitor_and_keeper_affects_no_other_backend() {
    for name in ["SIGKILL", "SIGSTOP"] {
        let config = [backend("bad", &[], HASTY), backend("good", &[], HASTY)].concat();
        let gate = Gate::listen(Place::new(), &config);
        let mut session = gate.session();
        let good = session.call("good__pid", json!({}));
        let bad = session.call("bad__pid", json!({}));
        let limits = |pid: &str| std::fs::read_to_string(format!("/proc/{pid}/limits")).expect("it runs");
        let limits_before = limits(&bad);
        let below: u32 = session.call("bad__grandchild", stray()).parse().expect("a pid");
        let result = session.result("bad__signal_above", json!({"signal": name, "keeper": true}));
        assert_eq!(result["isError"], true, "{result}");
        assert_eq!(session.call("good__pid", json!({})), good);
        let again = session.call("bad__pid", json!({}));
        assert_ne!(again, bad);
        assert_eq!(limits(&again), limits_before, "a replaced keeper hands on what outlast was given");
        until("the stray to be swept", || (!is_alive(below)).then_some(()));
        // The monitor of the other backend has lost its keeper; its exit is still noticed.
        let result = session.result("good__signal_above", json!({"signal": name}));
        assert_eq!(result["isError"], true, "{result}");
        assert_ne!(session.call("good__pid", json!({})), good);
        gate.end();
    }
}

#[test]
fn a_kill_of_outlast_leaves_nothing_behind_after_a_kill_of_its_keeper() {
    let place = Place::new();
    let mut client = Setup::new(&place).puppet(["--ignore-eof", "--ignore-term"]).ready();
    let server = client.server_pid();
    let below: u32 = client.call("grandchild", stray()).parse().expect("a pid");
    let monitor = u32::try_from(proc_number(server, "PPid:").expect("it runs")).expect("a pid");
    signal(client.keeper(), Signal::SIGKILL);
    client.says("the keeper process was killed or stopped; a new one was started");
    assert_eq!(client.server_pid(), server, "it goes on");
    let keeper = until("the new keeper", || {
        let is_keeper = |pid: &u32| *pid != monitor && proc_number(*pid, "PPid:") == Some(u64::from(client.pid()));
        crate::mcp::client::pids().find(is_keeper)
    });
    signal(client.pid(), Signal::SIGKILL);
    for pid in [server, below, monitor, keeper] {
        until("all to be gone", || (!is_alive(pid)).then_some(()));
    }
}

/// No process can be ended by the end of its parent while it is stopped, unless it is continued first.
#[test]
fn a_kill_of_outlast_leaves_no_stopped_keeper_or_monitor_behind() {
    for (stops_keeper, stops_monitor) in [(true, false), (false, true), (true, true)] {
        let place = Place::new();
        let mut client = Setup::new(&place).puppet(["--ignore-eof", "--ignore-term"]).ready();
        let (server, keeper) = (client.server_pid(), client.keeper());
        let below: u32 = client.call("grandchild", stray()).parse().expect("a pid");
        let monitor = u32::try_from(proc_number(server, "PPid:").expect("it runs")).expect("a pid");
        // While outlast is stopped, it continues no other process.
        signal(client.pid(), Signal::SIGSTOP);
        for pid in
            [(stops_keeper, keeper), (stops_monitor, monitor)].into_iter().filter_map(|(is, pid)| is.then_some(pid))
        {
            signal(pid, Signal::SIGSTOP);
        }
        signal(client.pid(), Signal::SIGKILL);
        for (what, pid) in [("server", server), ("stray", below), ("monitor", monitor), ("keeper", keeper)] {
            until(&format!("the {what} to be gone"), || (!is_alive(pid)).then_some(()));
        }
    }
}

/// A process and when it started, because ids are used again.
type Process = (u32, String);

fn started(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in brackets, may contain anything.
    stat.rsplit(')').next()?.split_whitespace().nth(19).map(str::to_owned)
}

fn all_below(outlast: u32) -> Vec<Process> {
    let pids = below(outlast.into()).into_iter().filter_map(|pid| u32::try_from(pid).ok());
    pids.filter_map(|pid| Some((pid, started(pid)?))).collect()
}

fn is_named(pid: u32, name: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name)
}

#[test]
fn a_server_that_ends_all_keepers_and_monitors_again_and_again_hangs_no_call_and_leaves_nothing() {
    const ROUNDS: usize = 24;
    const ANSWER_MAX: Duration = Duration::from_secs(10);
    let names = ["one", "two", "three"];
    let config = names.map(|name| backend(name, &["--ignore-eof", "--ignore-term"], HASTY)).concat();
    let gate = Gate::listen(Place::new(), &config);
    for name in names {
        gate.is(name, "ready");
    }
    let mut session = gate.session();
    let strays =
        names.map(|name| -> u32 { session.call(&format!("{name}__grandchild"), stray()).parse().expect("a pid") });
    let mut seen: BTreeSet<Process> = strays.iter().filter_map(|pid| Some((*pid, started(*pid)?))).collect();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let is_over = &is_over;
        let callers = names.map(|name| {
            let mut session = gate.session();
            scope.spawn(move || {
                let (mut answered, mut longest) = (0, Duration::ZERO);
                while !is_over.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    // A result or an error, but an answer.
                    session.result(&format!("{name}__sleep"), json!({"ms": 20}));
                    longest = longest.max(begun.elapsed());
                    answered += 1;
                }
                (answered, longest)
            })
        });
        // Signals of any process of this user have the same effect as those of a server.
        let outlast = gate.client.pid();
        for round in 0..ROUNDS {
            let number = if round % 2 == 0 { Signal::SIGKILL } else { Signal::SIGSTOP };
            let all = all_below(outlast);
            seen.extend(all.iter().cloned());
            let is_target = |pid: u32| match round / 2 % 3 {
                0 => is_named(pid, "outlast-monitor"),
                1 => is_named(pid, "outlast-keeper"),
                _ => is_named(pid, "outlast-monitor") || is_named(pid, "outlast-keeper"),
            };
            let targets: Vec<Process> = all.into_iter().filter(|(pid, _)| is_target(*pid)).collect();
            for (pid, _) in &targets {
                // It may have ended meanwhile.
                let _ = kill(Pid::from_raw(i32::try_from(*pid).expect("a pid")), number);
            }
            let is_there = |(pid, start): &Process| is_alive(*pid) && started(*pid).as_ref() == Some(start);
            let begun = Instant::now();
            until("the signalled processes to be gone", || (!targets.iter().any(is_there)).then_some(()));
            assert!(begun.elapsed() < Duration::from_secs(5), "{number}: noticed after {:?}", begun.elapsed());
        }
        is_over.store(true, Ordering::Relaxed);
        for caller in callers {
            let (answered, longest) = caller.join().expect("every call was answered");
            assert!(answered > 0 && longest < ANSWER_MAX, "{answered} answers, the slowest after {longest:?}");
        }
    });
    // All of them serve again.
    for name in names {
        until("a call that succeeds", || {
            (session.result(&format!("{name}__pid"), json!({}))["isError"] != true).then_some(())
        });
    }
    seen.extend(all_below(gate.client.pid()));
    gate.end();
    until("all processes to be gone", || {
        let left = seen.iter().filter(|(pid, start)| is_alive(*pid) && started(*pid).as_ref() == Some(start)).count();
        (left == 0).then_some(())
    });
}
