//! Every client with every server: the server is killed, exits to be restarted, is reloaded, and is reloaded into a
//! broken version and repaired. All the while the client keeps its only connection and gets right answers.

use crate::support::outlast;
use crate::support::peers::{Client, Era, Peer, Peers, Project, Said, Server, text};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::time::Instant;

#[test]
fn python_mcp2() {
    every_server("matrix::python_mcp2", Client::PythonMcp2);
}

#[test]
fn python_mcp1() {
    every_server("matrix::python_mcp1", Client::PythonMcp1);
}

#[test]
fn python_fastmcp() {
    every_server("matrix::python_fastmcp", Client::PythonFastmcp);
}

#[test]
fn ts_sdk1() {
    every_server("matrix::ts_sdk1", Client::TsSdk1);
}

#[test]
fn ts_client2() {
    every_server("matrix::ts_client2", Client::TsClient2);
}

#[test]
fn ts_client2_auto() {
    every_server("matrix::ts_client2_auto", Client::TsClient2Auto);
}

#[test]
fn rmcp() {
    every_server("matrix::rmcp", Client::Rmcp);
}

#[test]
fn rmcp_auto() {
    every_server("matrix::rmcp_auto", Client::RmcpAuto);
}

/// The Inspector sends one request and exits, so this shows only that it works through outlast.
#[test]
fn inspector() {
    let Some(peers) = Peers::find("matrix::inspector") else { return };
    each(&peers, |project| {
        let command = through_outlast(project);
        let listed = project.inspect(&["--method", "tools/list"], &command)?;
        let names: Vec<String> = listed["tools"]
            .as_array()
            .map(|tools| tools.iter().filter_map(|tool| tool["name"].as_str().map(str::to_owned)).collect())
            .unwrap_or_default();
        offers_all(project, &names)?;

        let (tool, arguments, answer) = question(project);
        let mut asked = vec!["--method", "tools/call", "--tool-name", tool];
        let arguments: Vec<String> = arguments
            .as_object()
            .expect("arguments are named")
            .iter()
            .map(|(name, value)| format!("{name}={}", value.as_str().expect("arguments are text")))
            .collect();
        for argument in &arguments {
            asked.extend(["--tool-arg", argument]);
        }
        let said = project.inspect(&asked, &command)?;
        expect(said["content"][0]["text"].as_str().is_some_and(|text| text.contains(answer)), || {
            format!("{tool} through the Inspector: {said}")
        })
    });
}

/// The peers without outlast: shows their own behaviour after a change of their versions, with `OUTLAST_DIRECT=1
/// cargo xtask test direct`.
#[test]
fn direct() {
    if std::env::var_os("OUTLAST_DIRECT").is_none() {
        return;
    }
    let Some(peers) = Peers::find("matrix::direct") else { return };
    for client in [
        Client::PythonMcp2,
        Client::PythonMcp1,
        Client::PythonFastmcp,
        Client::TsSdk1,
        Client::TsClient2,
        Client::TsClient2Auto,
        Client::Rmcp,
        Client::RmcpAuto,
    ] {
        each(&peers, |project| {
            let mut peer = Peer::start(client, project, &project.command)?;
            same_era(&peer, project.server.era_with(client))?;
            answers(&mut peer, project)?;
            peer.close()
        });
    }
}

fn every_server(test: &str, client: Client) {
    let Some(peers) = Peers::find(test) else { return };
    each(&peers, |project| outlives_everything(client, project));
}

/// Without this limit, a program that never answers would make the test wait for every server in turn.
const FAILURES_MAX: usize = 3;

/// One failure does not hide the next: the story runs with all servers, then all failures are reported.
fn each(peers: &Peers, story: impl Fn(&Project) -> Result<(), String>) {
    let mut failures = Vec::new();
    for server in Server::ALL {
        if failures.len() == FAILURES_MAX {
            failures.push(format!("with {server:?} and after: not tried"));
            break;
        }
        let begun = Instant::now();
        let project = Project::new(peers, server);
        match story(&project) {
            Ok(()) => println!("{server:?}: {:.1?}", begun.elapsed()),
            Err(error) => failures.push(format!("with {server:?}: {error}\n{}", project.stderr_tail())),
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

fn outlives_everything(client: Client, project: &Project) -> Result<(), String> {
    let mut peer = Peer::start(client, project, &through_outlast(project))?;
    same_era(&peer, project.server.era_with(client))?;
    offers_all(project, &peer.tools()?)?;
    answers(&mut peer, project)?;

    survives_a_kill(&mut peer, project)?;
    match project.server {
        Server::Everything | Server::Memory | Server::Filesystem => {
            reload(&mut peer)?;
            answers(&mut peer, project)?;
        }
        _ => {
            survives_exit_42(&mut peer, project)?;
            survives_reloads(&mut peer, project)?;
        }
    }
    offers_all(project, &peer.tools()?)?;
    peer.close()
}

fn survives_a_kill(peer: &mut Peer, project: &Project) -> Result<(), String> {
    let before = server_pid(peer)?;
    kill(before, Signal::SIGKILL).map_err(|error| format!("cannot kill the server {before}: {error}"))?;

    // A call that was open when the server exited may fail, once, as the answer of a tool; the next one waits for the
    // new server.
    let (tool, arguments, _) = question(project);
    let first = peer.call(tool, arguments).map_err(|error| format!("after kill -9: {error}"))?;
    if first.is_error {
        answers(peer, project).map_err(|error| format!("after kill -9, the second time: {error}"))?;
    } else {
        right(project, &first).map_err(|error| format!("after kill -9: {error}"))?;
    }
    let after = server_pid(peer)?;
    expect(after != before, || format!("the killed server {before} is still said to serve"))
}

fn survives_exit_42(peer: &mut Peer, project: &Project) -> Result<(), String> {
    let before = server_pid(peer)?;
    let said = peer.call("exit42", json!({}))?;
    // The call that made it exit succeeds when the new server is ready.
    expect(!said.is_error, || format!("the call that asked for exit 42 should succeed once it is back: {said:?}"))?;
    answers(peer, project).map_err(|error| format!("after exit 42: {error}"))?;
    let after = server_pid(peer)?;
    expect(after != before, || format!("the server {before} left with 42 and is still said to serve"))
}

fn survives_reloads(peer: &mut Peer, project: &Project) -> Result<(), String> {
    project.write_version("2");
    reload(peer)?;
    serves_version(peer, "2").map_err(|error| format!("after a reload: {error}"))?;

    project.write_broken();
    let before = server_pid(peer)?;
    let said = peer.call("restart_server", json!({"reason": "a broken edit"}))?;
    expect(said.is_error && said.text.contains("SyntaxError"), || {
        format!("a broken reload should fail and quote the server's stderr: {said:?}")
    })?;
    serves_version(peer, "2").map_err(|error| format!("after a broken reload: {error}"))?;
    let kept = server_pid(peer)?;
    expect(kept == before, || format!("a broken reload replaced {before} by {kept}"))?;

    project.write_version("3");
    reload(peer)?;
    serves_version(peer, "3").map_err(|error| format!("after the repair: {error}"))?;
    answers(peer, project)
}

fn reload(peer: &mut Peer) -> Result<(), String> {
    let before = server_pid(peer)?;
    let said = peer.call("restart_server", json!({"reason": "an edit"}))?;
    expect(!said.is_error, || format!("the reload failed: {}", said.text))?;
    let (old, new) = (said.field("old_pid"), said.field("new_pid"));
    expect(old == before.as_raw() && new.is_u64() && new != old, || format!("the reload of {before} says: {said:?}"))?;
    let after = server_pid(peer)?;
    expect(new == after.as_raw(), || format!("the reload promised {new}, and {after} serves"))
}

fn serves_version(peer: &mut Peer, version: &str) -> Result<(), String> {
    let said = peer.call("version", json!({}))?;
    expect(!said.is_error && said.text == version, || format!("version {version} should serve: {said:?}"))?;
    // The pid that the server reports, and the one that outlast reports.
    let (own, told) = (peer.call("pid", json!({}))?.text, server_pid(peer)?);
    expect(own == told.to_string(), || format!("the server is {own}, the program says {told}"))
}

/// The pid of the current child, as outlast reports it.
fn server_pid(peer: &mut Peer) -> Result<Pid, String> {
    let said = peer.call("server_status", json!({}))?;
    let pid = said.field("pid").as_i64().and_then(|pid| i32::try_from(pid).ok()).filter(|&pid| 1 < pid);
    pid.map(Pid::from_raw).ok_or_else(|| format!("server_status names no process: {said:?}"))
}

/// One call that each server can answer, and a part of the right answer.
fn question(project: &Project) -> (&'static str, Value, &'static str) {
    match project.server {
        Server::Everything => ("echo", json!({"message": "it lives"}), "Echo: it lives"),
        Server::Memory => ("search_nodes", json!({"query": "outlast"}), "a connection outlasts a process"),
        Server::Filesystem => {
            ("read_text_file", json!({"path": text(&project.path().join("hello.txt"))}), "hello from a file")
        }
        _ => ("echo", json!({"text": "it lives: ü 漢 🦀"}), "it lives: ü 漢 🦀"),
    }
}

fn answers(peer: &mut Peer, project: &Project) -> Result<(), String> {
    let (tool, arguments, _) = question(project);
    let said = peer.call(tool, arguments)?;
    right(project, &said)
}

fn right(project: &Project, said: &Said) -> Result<(), String> {
    let (tool, _, answer) = question(project);
    expect(!said.is_error && said.text.contains(answer), || format!("{tool} answered {said:?}"))
}

fn offers_all(project: &Project, offered: &[String]) -> Result<(), String> {
    let (own, ..) = question(project);
    let wanted = [own, "restart_server", "server_status", "verify_server_restarted"];
    expect(wanted.iter().all(|name| offered.iter().any(|tool| tool == name)), || {
        format!("tools/list should offer {wanted:?}, and offers {offered:?}")
    })
}

fn same_era(peer: &Peer, era: Era) -> Result<(), String> {
    expect(peer.era() == era, || format!("the two agree on {era:?} by themselves, and here on {}", peer.version))
}

/// With long time limits: on a busy machine a server in Python may take half a minute to start.
const PATIENT: [&str; 10] =
    ["mcp", "--start-timeout", "170", "--hold", "170", "--answer-after", "170", "--restart-tool", "exit42", "--"];

fn through_outlast(project: &Project) -> Vec<String> {
    let before = [text(&outlast())].into_iter().chain(PATIENT.map(str::to_owned));
    before.chain(project.command.iter().cloned()).collect()
}

fn expect(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}
