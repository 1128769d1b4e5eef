//! Servers that kill or stop the processes of outlast that watch them: their calls are answered, no process of them
//! stays, and other servers are not affected.

use serde_json::json;

use crate::{
    gateway::world::{Gate, HASTY, backend},
    mcp::client::{Place, Setup, is_alive, proc_number, signal, text, until},
};
use nix::sys::signal::Signal;

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
