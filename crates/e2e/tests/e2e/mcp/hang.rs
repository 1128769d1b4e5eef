//! Servers that hang (y1 to y9), restarts that do not wait (f1 to f4), too much memory (z1), and servers that exit by
//! their own restart tool (x4, x4b), on real processes.

use std::{fs, path::PathBuf, process::Command};

use serde_json::{Value, json};

use super::client::{Client, OUTLAST, Place, Setup, failure, text, until};
use crate::support::peers::Peers;

fn outlast(place: &Place, args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(OUTLAST)
        .args(args)
        .current_dir(place.path())
        .env("HOME", place.path())
        .output()
        .expect("the program starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_server_that_hangs_is_replaced_after_a_cancelled_call() {
    let place = Place::new();
    let mut client = Setup::new(&place).hasty().options(["--drain", "1"]).puppet(["--resources"]).ready();
    let before = client.server_pid();
    let paying = client.send_call("sleep", json!({"ms": 3_600_000}));
    let hangs = client.send_call("hang", json!({}));
    let listed = client.request("resources/list", json!({}));
    client.cancel(hangs);
    // Until the ping is answered or times out, the status shows the server as stalled.
    let status = client.status();
    assert_eq!((&status["stalled"], &status["state"]), (&json!(true), &json!("ready")), "{status}");
    assert!(status["oldest_request_s"].is_f64(), "{status}");
    let (_, ps, _) = outlast(&place, &["ps"]);
    assert!(ps.contains("ready, stalled"), "{ps}");
    let (_, state, _) = outlast(&place, &["state"]);
    assert!(state.contains("stalled    the server does not answer"), "{state}");
    let (_, top, _) = outlast(&place, &["top"]);
    assert!(top.contains("ready, stalled"), "{top}");

    let record = place.recorded("server_hung", 1);
    assert_eq!(record["pid"], before);
    assert!(record["detail"].to_string().contains("`hang` was cancelled"), "{record}");
    // A request that may be repeated is answered by the new server; a call is not.
    assert!(client.answer(listed)["result"]["resources"].is_array());
    let answer = client.answer(paying);
    let failed = failure(&answer["result"]);
    assert_eq!((&failed["reason"], &failed["outcome"]), (&json!("server_hung"), &json!("unknown")), "{answer}");
    assert!(text(&answer["result"]).starts_with("The server hung ("), "{answer}");
    assert_ne!(client.server_pid(), before);
    assert_eq!(client.status()["stalled"], false);
    client.says("ERROR: MCP server hung");
    client.end();
    place.is_swept();
}

#[test]
fn a_slow_server_keeps_running_after_a_call_timed_out() {
    let place = Place::new();
    place.write("outlast.toml", "[mcp.tool.pid]\ncall_timeout = \"0s\"\n");
    let mut client = Setup::new(&place).options(["--call-timeout", "300ms"]).ready();
    let before = client.server_pid();
    let result = client.result("sleep", json!({"ms": 3_600_000}));
    assert_eq!(failure(&result)["reason"], "call_timeout", "{result}");
    assert!(text(&result).contains("was not answered within 0.3 s"), "{result}");
    // It answers the ping, so it is not replaced: after that the status shows no stall.
    until("the answer to the ping", || (client.status()["stalled"] == false).then_some(()));
    assert_eq!(client.server_pid(), before);
    assert!(place.audit_of("server_hung").is_empty());
    client.end();
}

#[test]
fn a_restart_at_once_does_not_wait_for_a_hung_call() {
    let place = Place::new();
    let mut client = Setup::new(&place).hasty().options(["--drain", "3600"]).ready();
    let hangs = client.send_call("hang", json!({}));
    let (code, stdout, stderr) = outlast(&place, &["restart", "--now"]);
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    let answer = client.answer(hangs);
    assert_eq!(failure(&answer["result"])["reason"], "at_once", "{answer}");
    let hangs = client.send_call("hang", json!({}));
    let result = client.result("restart_server", json!({"force": true}));
    assert_ne!(result["isError"], true, "{result}");
    let answer = client.answer(hangs);
    assert_eq!(failure(&answer["result"])["reason"], "at_once", "{answer}");
    client.call("echo", json!({"text": "x"}));
    client.end();
    place.is_swept();
}

#[cfg(target_os = "linux")]
#[test]
fn a_server_that_uses_too_much_memory_is_replaced() {
    let place = Place::new();
    let mut client = Setup::new(&place).options(["--memory-max", "64KiB"]).ready();
    let before = client.server_pid();
    let record = place.recorded("server_too_large", 1);
    assert_eq!(record["pid"], before);
    place.recorded("server_started", 2);
    until("the new server", || (client.server_pid() != before).then_some(()));
    client.says("WARNING: MCP server uses too much memory");
    // It is too large again, and not replaced again at once.
    assert_eq!(place.audit_of("server_too_large").len(), 1);
    client.end();
}

/// The tools of documents 001 (answers, then exits half a second later) and 003 (exits inside the tool), and one
/// whose answer may say that it ran only if it did.
const SERVER: &str = r#"
import asyncio, json, logging, os, sys
from datetime import datetime, timezone
from pathlib import Path
IMPORT
server = SERVER("restarts")
logger = logging.getLogger("admin")


async def delayed_exit():
    """Exit with code 42 after delay to allow response delivery."""
    await asyncio.sleep(0.5)
    logging.shutdown()
    logger.info("Server exiting for restart (exit code 42)")
    Path("exiting").write_text("42")
    sys.exit(42)


@server.tool()
async def answers_then_exits(reason: str = "code changes") -> str:
    asyncio.create_task(delayed_exit())
    return f"Server restart scheduled (reason: {reason})."


@server.tool()
def exits_inside(reason: str = "code changes") -> str:
    marker_path = Path(".st3/.restart_marker")
    marker_path.parent.mkdir(exist_ok=True)
    marker_path.write_text(json.dumps({"pid": os.getpid(), "reason": reason}, indent=2))
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(42)


@server.tool()
async def exits_inside_async(reason: str = "code changes") -> str:
    sys.exit(42)


@server.tool()
def transfer() -> str:
    with open("transfers", "a") as file:
        file.write("1\n")
    return "transferred"


server.run()
"#;

fn python_servers(test: &str) -> Vec<(PathBuf, &'static str, &'static str)> {
    let Some(peers) = Peers::find(test) else { return Vec::new() };
    vec![
        (peers.python("python-1"), "from mcp.server.fastmcp import FastMCP", "FastMCP"),
        (peers.python("python-2"), "from mcp.server.mcpserver import MCPServer", "MCPServer"),
    ]
}

fn ran(place: &Place) -> usize {
    fs::read_to_string(place.join("transfers")).unwrap_or_default().lines().count()
}

/// Starts a Python server whose `tool` is its restart tool.
fn python_server(place: &Place, (python, import, class): &(PathBuf, &str, &str), tool: &str) -> Client {
    let source = SERVER.replace("IMPORT", import).replace("SERVER(", &format!("{class}("));
    let script = place.write("server.py", &source.replace(tool, "restart_server"));
    let python = python.display().to_string();
    let patient = ["--start-timeout", "170", "--hold", "170", "--answer-after", "170"];
    let mut client = Setup::new(place).options(patient).command([python.as_str(), script.as_str()]).ready();
    assert!(client.tool_names().contains(&"outlast_restart_server".to_owned()), "the server's own keeps its name");
    client
}

#[test]
fn python_servers_restart_by_their_own_tool_without_a_further_message() {
    let test = "python_servers_restart_by_their_own_tool_without_a_further_message";
    for python in python_servers(test) {
        for tool in ["answers_then_exits", "exits_inside", "exits_inside_async"] {
            let place = Place::new();
            let mut client = python_server(&place, &python, tool);
            let begun = std::time::Instant::now();
            let result = client.result("restart_server", json!({"reason": "new code"}));
            assert_eq!(result["isError"], false, "{tool} with {}: {result}", python.2);
            // The test sends nothing before the next server was started.
            place.recorded("server_started", 2);
            println!("{tool} with {}: restarted after {:.1?}", python.2, begun.elapsed());
            assert_eq!(client.call("transfer", json!({})), "transferred");
            assert_eq!(ran(&place), 1);
            client.end();
            place.is_swept();
        }
    }
}

#[test]
fn a_call_to_an_exiting_python_server_succeeds_only_if_it_ran() {
    let test = "a_call_to_an_exiting_python_server_succeeds_only_if_it_ran";
    for python in python_servers(test) {
        let place = Place::new();
        let mut client = python_server(&place, &python, "answers_then_exits");
        for round in 1..=3 {
            let result = client.result("restart_server", json!({}));
            assert_eq!(result["isError"], false, "{result}");
            until("the server's exit", || fs::remove_file(place.join("exiting")).ok());
            let before = ran(&place);
            let result: Value = client.result("transfer", json!({}));
            let has_run = ran(&place) > before;
            assert!(result["isError"] == true || has_run, "{}, round {round}: {result}", python.2);
            place.recorded("server_started", round + 1);
        }
        client.end();
        place.is_swept();
    }
}
