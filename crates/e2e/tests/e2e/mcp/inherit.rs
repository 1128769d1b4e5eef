//! W2: the literal design of the old watchdog, where the server has outlast's own stdin and stdout, and why it is not
//! the default.

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::client::{Client, PUPPET, Place, Setup, signal};
use crate::gateway::world::outlast;
use crate::support::peers::{Peers, Project, Server};

/// A server of one shell function, which needs no handshake: it answers each line with its process id, and exits to
/// be restarted on request.
const SIMPLE: &str = r#"#!/bin/sh
while read -r line; do
  id=${line#*\"id\":}
  case "$line" in
    *leave*) exit 42 ;;
    *crash*) exit 3 ;;
    *end*) exit 0 ;;
    *) echo "{\"jsonrpc\":\"2.0\",\"id\":${id%%[,\}]*},\"result\":$$}" ;;
  esac
done
"#;

fn pid(client: &mut Client) -> Value {
    client.ask("who", json!({}))["result"].take()
}

#[test]
fn a_server_without_a_handshake_is_restarted_on_the_same_pipes() {
    let place = Place::new();
    let server = place.script("server", SIMPLE);
    let mut client = Setup::new(&place).options(["--inherit"]).command([server.as_str()]).start();
    let first = pid(&mut client);
    client.notify("leave", json!({}));
    let second = pid(&mut client);
    assert_ne!(first, second);
    client.notify("crash", json!({}));
    assert_ne!(pid(&mut client), second);
    assert_eq!(place.recorded("server_exiting", 1)["exit_code"], 42);
    assert_eq!(place.recorded("server_crashed", 1)["exit_code"], 3);
    let state: Value = serde_json::from_slice(&outlast(&place, &["state", "--json"]).stdout).expect("JSON");
    let ends = state["last_exits"].as_array().expect("a list");
    assert_eq!(ends.last().map(|end| (&end["crashed"], &end["exit"]["code"])), Some((&json!(true), &json!(3))));
    client.notify("end", json!({}));
    assert_eq!(client.wait().code(), Some(0));
    assert_eq!(place.audit_of("server_started").len(), 3);
}

#[test]
fn an_inheriting_server_has_no_time_limit() {
    let place = Place::new();
    let mut client = Setup::new(&place).options(["--inherit"]).ready();
    let pid = client.server_pid();
    assert_eq!(client.call("sleep", json!({"ms": 400})), "slept");
    assert_eq!(client.server_pid(), pid);
    assert_eq!(place.audit_of("server_started").len(), 1);
    client.end();
}

#[test]
fn an_inheriting_server_stops_with_outlast_and_at_the_end_of_stdin() {
    let place = Place::new();
    let setup = Setup::new(&place).hasty().options(["--inherit"]);
    let mut client = setup.clone().puppet(["--ignore-eof", "--ignore-term"]).ready();
    client.call("grandchild", json!({"setsid": true, "ignore_term": true}));
    signal(client.pid(), Signal::SIGTERM);
    assert_eq!(client.wait().code(), Some(0));
    assert_eq!(place.family(), [0; 0]);
    drop(client);
    setup.ready().end();
}

#[test]
fn a_strict_server_refuses_calls_after_a_restart_without_a_handshake() {
    let place = Place::new();
    let inherit = Setup::new(&place).options(["--inherit"]).command([PUPPET, "--own-restart"]);
    let mut client = inherit.ready();
    client.call("echo", json!({"text": "works"}));
    client.line(r#"{"jsonrpc":"2.0","id":"lost","method":"tools/call","params":{"name":"restart_server"}}"#);
    place.recorded("server_started", 2);
    let answer = client.ask("tools/call", json!({"name": "echo", "arguments": {"text": "x"}}));
    assert_eq!(answer["error"]["message"], "Received request before initialization was complete", "{answer}");
}

/// The same with a real SDK: this is what the relay is for.
#[test]
fn a_real_server_needs_the_relay() {
    let Some(peers) = Peers::find("mcp::inherit::a_real_server_needs_the_relay") else { return };
    let project = Project::new(&peers, Server::PythonMcp1);
    let command: Vec<&str> = project.command.iter().map(String::as_str).collect();
    let place = Place::new();
    let mut inherited = Setup::new(&place).options(["--inherit"]).command(command.clone()).ready();
    let mut relayed = Setup::new(&place).command(command).ready();
    for client in [&mut inherited, &mut relayed] {
        assert_eq!(client.call("echo", json!({"text": "before"})), "before");
        let pid: u32 = client.call("pid", json!({})).parse().expect("a pid");
        signal(pid, Signal::SIGKILL);
    }
    place.recorded("server_crashed", 2);
    assert_eq!(relayed.call("echo", json!({"text": "after"})), "after");
    // The new server reads requests for the old one, and does not know the client.
    let answer = inherited.ask("tools/call", json!({"name": "echo", "arguments": {"text": "after"}}));
    assert!(answer["error"].is_object(), "{answer}");
    relayed.end();
}
