//! Slow and failing first starts (b1, k1 to k5), and heartbeats (p1 to p4), on real processes.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use super::client::{INITIALIZED, OUTLAST, PUPPET, Place, Setup, VERSION, initialize_params};
use crate::support::peers::Peers;

const OURS: [&str; 3] = ["restart_server", "verify_server_restarted", "server_status"];
const SLOW: &str = "--slow-start 6000";

fn cache_files(place: &Place) -> Vec<PathBuf> {
    let entries = fs::read_dir(place.join(".local/state/outlast/starts"));
    entries.into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

#[test]
fn outlast_answers_for_a_slow_server_and_later_from_the_cache() {
    let place = Place::new();
    let slow = || Setup::new(&place).env("OUTLAST_PUPPET", SLOW).options(["--answer-after", "1"]);

    let mut client = slow().start();
    let opened = client.ask("initialize", initialize_params(VERSION))["result"].take();
    assert_eq!(opened["serverInfo"]["name"], "outlast", "{opened}");
    assert!(opened["instructions"].to_string().contains("is still starting"), "{opened}");
    client.line(INITIALIZED);
    assert_eq!(client.tool_names(), OURS);
    assert_eq!(client.status()["state"], "starting");
    assert_eq!(client.call("echo", json!({"text": "held"})), "held");
    client.next("notifications/tools/list_changed");
    assert!(client.tool_names().contains(&"echo".to_owned()));
    assert_eq!(place.audit_of("server_started").len(), 1, "it went on starting");
    assert!(place.audit_of("server_crashed").is_empty());
    client.end();

    let files = cache_files(&place);
    assert_eq!(files.len(), 1, "{files:?}");
    let mode = |path: &PathBuf| fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
    assert_eq!((mode(&files[0]), mode(&files[0].parent().expect("a folder").to_owned())), (0o600, 0o700));

    let mut client = slow().start();
    let opened = client.ask("initialize", initialize_params(VERSION))["result"].take();
    assert_eq!(opened["serverInfo"]["name"], "puppet", "{opened}");
    client.line(INITIALIZED);
    let names = client.tool_names();
    assert!(names.contains(&"echo".to_owned()) && names.contains(&"restart_server".to_owned()), "{names:?}");
    assert_eq!(client.status()["state"], "starting");
    assert_eq!(client.call("echo", json!({"text": "held"})), "held");
    // The comparison asks the server for its tools; after its answer, nothing was announced.
    client.restart();
    assert_eq!(client.count("notifications/tools/list_changed"), 0);
    client.end();

    // A file with other permissions than outlast sets is not trusted, which is reported once.
    fs::set_permissions(&files[0], fs::Permissions::from_mode(0o666)).expect("the file is ours");
    let mut client = slow().start();
    let opened = client.ask("initialize", initialize_params(VERSION))["result"].take();
    assert_eq!(opened["serverInfo"]["name"], "outlast", "{opened}");
    let warnings = client.stderr_lines().iter().filter(|line| line.contains("is ignored")).count();
    assert_eq!(warnings, 1, "{}", client.stderr_text());
    client.line(INITIALIZED);
    client.end();
    place.is_swept();
}

#[test]
fn a_cached_discover_is_answered_and_the_calls_behind_it_wait() {
    let place = Place::new();
    let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {}});
    let with = |mut params: Value| {
        params["_meta"] = meta.clone();
        params
    };
    let mut client = Setup::new(&place).start();
    client.ask("server/discover", with(json!({})));
    client.ask("tools/list", with(json!({})));
    client.end();

    let mut client = Setup::new(&place).env("OUTLAST_PUPPET", SLOW).options(["--answer-after", "1"]).start();
    let found = client.ask("server/discover", with(json!({})))["result"].take();
    assert_eq!(found["supportedVersions"], json!(["2026-07-28"]), "{found}");
    assert_eq!(found["ttlMs"], 0, "{found}");
    let listed = client.ask("tools/list", with(json!({})))["result"].take();
    assert!(listed["tools"].as_array().is_some_and(|tools| tools.len() > OURS.len()), "{listed}");
    let answer = client.ask("tools/call", with(json!({"name": "echo", "arguments": {"text": "held"}})));
    assert_eq!(answer["result"]["content"][0]["text"], "held", "{answer}");
    client.end();
}

#[test]
fn a_crash_late_in_the_start_does_not_fail_the_opening() {
    let place = Place::new();
    // Fails once, after a while, as a package that is fetched over a bad connection.
    let script =
        format!("#!/bin/sh\n[ -e again ] && exec {PUPPET}\ntouch again\nsleep 2.4\necho no network >&2\nexit 1\n");
    let server = place.script("server", &script);
    let mut client = Setup::new(&place).command([server.as_str()]).start();
    let opened = client.ask("initialize", initialize_params(VERSION))["result"].take();
    // On a busy machine the second server may be ready within the second.
    let name = opened["serverInfo"]["name"].as_str().unwrap_or_default().to_owned();
    assert!(["outlast", "puppet"].contains(&name.as_str()), "{opened}");
    assert_eq!(place.audit_of("server_crashed").len(), 1, "answered at the first end");
    client.line(INITIALIZED);
    assert_eq!(client.call("echo", json!({"text": "mended"})), "mended");
    client.end();
}

#[test]
fn a_server_that_exits_0_is_started_by_the_next_request_again_and_again() {
    let place = Place::new();
    let mut client = Setup::new(&place).options(["--on-clean-exit", "restart"]).ready();
    let mut pids = vec![client.server_pid()];
    for round in 1..=3 {
        let waits = client.send_call("sleep", json!({"ms": 60_000}));
        client.call("exit", json!({}));
        let failure = client.answer(waits)["result"]["_meta"]["outlast/failure"].take();
        assert_eq!(failure["reason"], "server_ended", "{failure}");
        place.recorded("server_stopped", round);
        assert_eq!(client.status()["state"], "stopped");
        pids.push(client.server_pid());
    }
    pids.dedup();
    assert_eq!(pids.len(), 4);
    assert!(place.audit_of("server_crashed").is_empty());
    client.end();
}

#[test]
fn a_long_call_has_a_heartbeat_until_its_server_reports_progress() {
    let place = Place::new();
    let mut client = Setup::new(&place).options(["--heartbeat", "0.2"]).ready();
    let call = |tool: &str, arguments: Value, token: &str| json!({"name": tool, "arguments": arguments, "_meta": {"progressToken": token}});
    let id = client.request("tools/call", call("sleep", json!({"ms": 1500}), "a"));
    let values: Vec<f64> = (0..2)
        .map(|_| client.next("notifications/progress")["params"]["progress"].as_f64().expect("a number"))
        .collect();
    assert!(values[0] < values[1] && values[1] < 1e-3, "{values:?}");
    client.answer(id);
    client.count("notifications/progress");
    client.heard.clear();

    let id = client.request("tools/call", call("progress", json!({"steps": 3, "ms": 700}), "b"));
    client.answer(id);
    client.count("notifications/progress");
    let heard: Vec<f64> = client.heard.drain(..).filter_map(|message| message["params"]["progress"].as_f64()).collect();
    assert!(heard.is_sorted_by(|a, b| a < b), "{heard:?}");
    assert!(heard.iter().filter(|value| **value >= 1.0).count() >= 2, "the server's own: {heard:?}");
    let first_own = heard.iter().position(|value| *value >= 1.0).expect("counted above");
    assert!(heard[first_own..].iter().all(|value| *value >= 1.0), "none after it: {heard:?}");
    client.end();
}

const PYTHON: &str = r#"
import asyncio, json, os, sys
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

async def main():
    server = StdioServerParameters(command=sys.argv[1], args=sys.argv[2:], env=dict(os.environ))
    async with stdio_client(server) as (read, write):
        async with ClientSession(read, write) as session:
            opened = await asyncio.wait_for(session.initialize(), 5)
            tools = [tool.name for tool in (await session.list_tools()).tools]
            answer = await session.call_tool("echo", {"text": "hello"})
            print(json.dumps({"server": opened.serverInfo.name, "tools": tools, "text": answer.content[0].text}))

asyncio.run(main())
"#;

const NODE: &str = r#"
import { Client } from 'SDK/client/index.js';
import { StdioClientTransport } from 'SDK/client/stdio.js';
const client = new Client({ name: 'slow', version: '1.0.0' });
const [command, ...args] = process.argv.slice(2);
await client.connect(new StdioClientTransport({ command, args, env: process.env }), { timeout: 5000 });
const tools = (await client.listTools()).tools.map((tool) => tool.name);
const answer = await client.callTool({ name: 'echo', arguments: { text: 'hello' } });
console.log(JSON.stringify({ server: client.getServerVersion().name, tools, text: answer.content[0].text }));
await client.close();
"#;

/// The server takes longer than the client's timeout, in its first run and in one with a cache.
#[test]
fn real_clients_with_a_timeout_of_5_s_open_a_server_that_takes_longer() {
    let Some(peers) = Peers::find("real_clients_with_a_timeout_of_5_s_open_a_server_that_takes_longer") else { return };
    let sdk = peers.package("sdk/dist/esm").display().to_string();
    let clients = [
        (peers.python("python-1"), "client.py", PYTHON.to_owned()),
        (peers.node(), "client.mjs", NODE.replace("SDK", &sdk)),
    ];
    for (program, file, script) in clients {
        let place = Place::new();
        let script = place.write(file, &script);
        for (server, has_echo) in [("outlast", false), ("puppet", true)] {
            let output = Command::new(&program)
                .arg(&script)
                .args([OUTLAST, "mcp", "--answer-after", "1", "--", PUPPET])
                .current_dir(place.path())
                .env("HOME", place.path())
                .env("OUTLAST_PUPPET", "--slow-start 9000")
                .stdin(Stdio::null())
                .output()
                .expect("the client starts");
            let said = String::from_utf8_lossy(&output.stdout);
            let said: Value = serde_json::from_str(said.trim())
                .unwrap_or_else(|_| panic!("{file}: {said}\n{}", String::from_utf8_lossy(&output.stderr)));
            assert_eq!((&said["server"], &said["text"]), (&json!(server), &json!("hello")), "{file}: {said}");
            let tools = said["tools"].as_array().expect("a list");
            assert_eq!(tools.contains(&json!("echo")), has_echo, "{file}: {said}");
            assert!(tools.contains(&json!("restart_server")), "{file}: {said}");
        }
        place.is_swept();
    }
}
