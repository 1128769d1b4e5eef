//! W5, W9, W10, x1–x6: requests when the server exits, and outlast when the server exits on purpose.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::client::{
    BUSY, INITIALIZED, OUTLAST, PUPPET, Place, Setup, VERSION, failure, initialize_params, is_alive, signal, text,
    until,
};

#[test]
fn sixty_four_in_flight_get_one_answer_each_from_twenty_kills() {
    let place = Place::new();
    let mut client = Setup::new(&place).puppet(["--prompts", "--resources", "--logging"]).ready();
    for round in 1..=20 {
        let pid = client.server_pid();
        // A stopped process takes input until its pipe is full, and answers nothing.
        signal(pid, Signal::SIGSTOP);
        let mut asked = Vec::new();
        for n in 0..64 {
            let (method, params) = match n % 8 {
                0 => ("tools/list", json!({})),
                1 => ("resources/read", json!({"uri": "puppet://a"})),
                2 => ("ping", json!({})),
                3 => ("prompts/get", json!({"name": "greet"})),
                4 => ("no/such/method", json!({})),
                _ => ("tools/call", json!({"name": "echo", "arguments": {"text": "x"}})),
            };
            asked.push((n % 8, client.request(method, params)));
        }
        // The first status counts requests in the queues; by the second the queues were written.
        assert_eq!(client.status()["in_flight"], 64);
        client.status();
        signal(pid, Signal::SIGKILL);

        // Requests that fail, or that outlast answers itself, are answered at the exit, long before the next server.
        for (kind, id) in asked.iter().filter(|(kind, _)| [2, 4, 5, 6, 7].contains(kind)) {
            let answer = client.answer(*id);
            let data = match kind {
                2 => {
                    assert_eq!(answer["result"], json!({}), "ping is answered");
                    continue;
                }
                4 => {
                    assert_eq!(answer["error"]["code"], 7001, "{answer}");
                    &answer["error"]["data"]
                }
                _ => {
                    assert!(text(&answer["result"]).contains("`echo`"), "{answer}");
                    failure(&answer["result"])
                }
            };
            assert_eq!(data["from"], "outlast");
            assert_eq!(data["reason"], "server_ended");
            assert_eq!(data["outcome"], "unknown");
            assert_eq!(data["exit"]["signal"], 9, "{data}");
            assert_eq!(data["generation"], round, "{data}");
        }
        assert_eq!(place.audit_of("server_started").len(), round, "no new server yet");

        let report = client.restart();
        assert_eq!(report["generation"], round + 1, "{report}");
        for (kind, id) in asked.iter().filter(|(kind, _)| [0, 1, 3].contains(kind)) {
            let answer = client.answer(*id);
            let new = report["new_pid"].to_string();
            match kind {
                0 => assert!(answer["result"]["tools"].as_array().is_some_and(|tools| tools.len() > 3), "{answer}"),
                1 => assert_eq!(answer["result"]["contents"][0]["text"], new, "asked again of the new one"),
                _ => assert!(answer.to_string().contains(&new), "asked again of the new one: {answer}"),
            }
        }
        assert_eq!(client.owes(), 0);
    }
    assert_eq!(client.status()["restarts"], 20);
    client.end();
    place.is_swept();
}

#[test]
fn while_the_server_is_down_pings_are_answered_and_requests_wait_for_it() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    let old = client.kill_server();
    place.recorded("server_crashed", 1);
    let waits = client.send_call("pid", json!({}));
    assert_eq!(client.ask("ping", json!({}))["result"], json!({}));
    let status = client.status();
    assert_eq!(status["state"], "backoff", "{status}");
    assert_eq!((&status["held"], &status["pid"]), (&json!(1), &Value::Null), "{status}");
    assert!(status["next_try_s"].as_f64().is_some_and(|seconds| seconds <= 1.0), "{status}");
    assert_eq!(status["last_exits"][0]["exit"]["signal"], 9, "{status}");
    assert!(!client.has_answer(waits));
    let new: u32 = text(&client.answer(waits)["result"]).parse().expect("a pid");
    assert_ne!(new, old);
    let crash = &place.audit_of("server_crashed")[0];
    assert_eq!(crash["level"], "ERROR");
    assert_eq!(crash["props"]["signal"], 9);
    assert_eq!(crash["props"]["pid"], old);
    client.end();
}

#[test]
fn a_request_that_cannot_be_held_long_enough_is_refused_with_the_time_of_the_next_try() {
    let place = Place::new();
    let mut client = Setup::new(&place).options(["--hold", "0.1", "--name", "short"]).ready();
    client.kill_server();
    place.recorded("server_crashed", 1);
    let result = client.result("echo", json!({"text": "x"}));
    let data = failure(&result);
    assert_eq!((&data["reason"], &data["outcome"]), (&json!("server_down"), &json!("not_sent")), "{data}");
    assert!(data["retry_after_ms"].as_u64().is_some_and(|ms| 0 < ms && ms <= 1000), "{data}");
    assert!(text(&result).contains("was not run"), "{result}");
    let answer = client.ask("resources/read", json!({"uri": "a"}));
    assert_eq!(answer["error"]["code"], 7002, "{answer}");
    place.recorded("server_started", 2);
    client.end();
}

#[test]
fn only_an_annotated_tool_is_retried_and_only_if_configured() {
    let place = Place::new();
    let crash = json!({"puppet/as": "crash"});
    let schema = json!({"type": "object"});
    let tools = json!([
        {"name": "reads", "inputSchema": schema, "annotations": {"readOnlyHint": true}, "_meta": crash},
        {"name": "same", "inputSchema": schema, "annotations": {"idempotentHint": true}, "_meta": crash},
        {"name": "writes", "inputSchema": schema, "annotations": {"readOnlyHint": false}, "_meta": crash},
    ]);
    let tools = place.write("tools.json", &tools.to_string());
    // Exit code 42 is restarted at once, and only a crash is tested here, so each case has its own instance.
    for (retry, tool, again) in [
        ("annotated", "reads", true),
        ("annotated", "same", true),
        ("annotated", "writes", false),
        ("never", "reads", false),
    ] {
        let mut client = Setup::new(&place).options(["--retry", retry]).puppet(["--tools", &tools]).ready();
        client.tool_names();
        let once = place.join(&format!("{retry}-{tool}"));
        let result = client.result(tool, json!({"once": once, "code": 3}));
        if again {
            assert_eq!(text(&result), "survived", "{retry} {tool}: {result}");
        } else {
            let data = failure(&result);
            assert_eq!(data["exit"]["code"], 3, "{retry} {tool}: {result}");
            assert_eq!(data["outcome"], "unknown");
        }
        client.end();
    }
    // A request that ended two servers in a row is not sent a third time.
    let mut client = Setup::new(&place).options(["--retry", "annotated"]).puppet(["--tools", &tools]).ready();
    client.tool_names();
    let result = client.result("reads", json!({}));
    assert_eq!(failure(&result)["reason"], "ended_again", "{result}");
    assert_eq!(place.audit_of("server_crashed").len(), 6);
    client.end();
}

#[test]
fn a_failed_call_quotes_the_last_stderr() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    client.call("stderr", json!({"text": "about to fall over"}));
    let result = client.result("crash", json!({"code": 9}));
    assert!(text(&result).contains("exit code 9"), "{result}");
    assert!(text(&result).contains("about to fall over"), "{result}");
    assert_eq!(failure(&result)["stderr"], json!(["about to fall over"]), "{result}");
    assert!(client.says("about to fall over").starts_with("[outlast-puppet] "), "tagged");
    client.says("crash #1; restarting in 1.0 s");
    client.end();
}

#[test]
fn exit_0_ends_outlast_after_every_request_is_answered() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    let waits = client.send_call("sleep", json!({"ms": 600_000}));
    let leaves = client.send_call("exit", json!({}));
    assert_eq!(text(&client.answer(leaves)["result"]), "exits");
    let answer = client.answer(waits);
    assert_eq!(failure(&answer["result"])["exit"]["code"], 0, "{answer}");
    assert_eq!(client.wait().code(), Some(0), "with the client still there");
    assert_eq!(place.recorded("instance_ended", 1)["exit_code"], 0);
    client.end();
}

#[test]
fn a_server_that_exited_with_0_can_be_started_again() {
    let place = Place::new();
    let mut client = Setup::new(&place).options(["--on-clean-exit", "restart"]).ready();
    let old = client.server_pid();
    client.call("exit", json!({}));
    until("the end of the server", || (!is_alive(old)).then_some(()));
    place.recorded("server_stopped", 1);
    assert_eq!(client.status()["state"], "stopped");
    assert_eq!(place.audit_of("server_started").len(), 1, "no request needs it");
    assert_ne!(client.server_pid(), old);
    client.end();
}

#[test]
fn exit_42_is_a_success_of_the_call_that_caused_it_and_is_throttled() {
    let place = Place::new();
    let mut client = Setup::new(&place).puppet(["--own-restart"]).ready();
    let names = client.tool_names();
    assert!(names.contains(&"restart_server".into()) && names.contains(&"outlast_restart_server".into()), "{names:?}");
    assert!(names.contains(&"server_status".into()), "only the name that is taken changes: {names:?}");

    let mut pids = vec![client.server_pid()];
    let begun = Instant::now();
    for _ in 0..3 {
        // The server's own tool, because the server has one of that name.
        client.call("restart_server", json!({}));
        pids.push(client.server_pid());
    }
    assert!(begun.elapsed() >= Duration::from_secs(2), "one a second at most");
    pids.dedup();
    assert_eq!(pids.len(), 4, "a new server each time");
    let throttled = place.recorded("restart_throttled", 1);
    assert!(throttled["pid"].is_u64() && throttled["generation"].is_u64(), "{throttled}");
    assert_eq!(throttled["exit_code"], 42, "{throttled}");
    assert_eq!(place.audit_of("server_crashed"), Vec::<Value>::new());
    assert!(place.audit_of("server_exiting").iter().any(|record| record["props"]["exit_code"] == 42));

    // The server itself answers, then exits.
    client.call("restart_server", json!({"answer": true}));
    place.recorded("server_exiting", 4);
    client.server_pid();
    let report = client.result("outlast_restart_server", json!({}));
    assert_eq!(report["structuredContent"]["generation"], 6, "{report}");
    client.end();
}

#[test]
fn a_grandchild_that_holds_stdout_does_not_delay_the_report_of_an_exit() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    let held = json!({"hold_stdout": true, "setsid": true, "ignore_term": true});
    let grandchild: u32 = client.call("grandchild", held).parse().expect("a pid");
    let waits = client.send_call("sleep", json!({"ms": 600_000}));
    let begun = Instant::now();
    client.kill_server();
    let answer = client.answer(waits);
    assert_eq!(failure(&answer["result"])["exit"]["signal"], 9, "{answer}");
    assert!(begun.elapsed() < Duration::from_millis(100) + BUSY, "{:?}", begun.elapsed());
    until("the grandchild to be swept", || (!is_alive(grandchild)).then_some(()));
    client.call("echo", json!({"text": "on"}));
    client.end();
    place.is_swept();
}

#[test]
fn a_server_that_closes_its_stdout_is_replaced() {
    let place = Place::new();
    let mut client = Setup::new(&place).hasty().puppet(["--ignore-eof", "--ignore-term"]).ready();
    let old = client.server_pid();
    let result = client.result("close_stdout", json!({}));
    assert_eq!(failure(&result)["exit"]["why"], "closed its stdout", "{result}");
    assert_ne!(client.server_pid(), old);
    assert!(!is_alive(old));
    client.end();
}

#[test]
fn a_server_that_does_not_read_blocks_no_other_server() {
    let place = Place::new();
    let mut client = Setup::new(&place).hasty().options(["--drain", "0.2"]).puppet(["--ignore-term"]).ready();
    client.call("hang", json!({"answer": true}));
    // More than a pipe holds.
    let lost: Vec<u64> = (0..3).map(|_| client.send_call("echo", json!({"text": "x".repeat(250_000)}))).collect();
    let status = client.status();
    assert_eq!(status["in_flight"], 3, "{status}");
    assert_eq!(
        client.ask("tools/call", json!({"name": "verify_server_restarted", "arguments": {"since_timestamp": 0}}))["result"]
            ["structuredContent"]["restarted"],
        false
    );
    client.restart();
    client.call("echo", json!({"text": "the new one reads"}));
    for id in lost {
        let answer = client.answer(id);
        let data = failure(&answer["result"]);
        assert_eq!(data["reason"], "drain_over", "{data}");
    }
    client.call("hang", json!({"answer": true}));
    client.send_call("echo", json!({"text": "x".repeat(900_000)}));
    // It still exits.
    client.end();
    place.is_swept();
}

/// A client that exits in the middle of a line, with more input than all queues hold.
#[test]
fn the_exit_of_a_client_is_noticed_while_the_server_reads_nothing() {
    let place = Place::new();
    let call = |tool: &str, arguments: Value| {
        let params = json!({"name": tool, "arguments": arguments});
        format!("{}\n", json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}))
    };
    let initialize = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": initialize_params(VERSION)});
    let first = format!("{initialize}\n{INITIALIZED}\n{}", call("hang", json!({"answer": true})));
    let first = place.write("first", &first);
    let words = place.write("words", &call("echo", json!({"text": "x".repeat(900_000)})).repeat(20));
    let mut client = Command::new("sh")
        .args(["-c", "cat \"$1\"; read go; exec cat \"$2\"", "client", &first, &words])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a shell starts");
    let mut outlast = Command::new(OUTLAST)
        .args(["mcp", "--stdin-grace", "0.2", "--term-grace", "0.3", "--", PUPPET, "--ignore-term"])
        .current_dir(place.path())
        .env("HOME", place.path())
        .stdin(client.stdout.take().expect("stdout is piped"))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program starts");
    let mut answers = BufReader::new(outlast.stdout.take().expect("stdout is piped")).lines();
    answers.by_ref().take(2).for_each(|line| drop(line.expect("an answer")));
    client.stdin.take().expect("stdin is piped").write_all(b"go\n").expect("the shell reads");
    let read = || {
        let mut fds = fs::read_dir(format!("/proc/{}/fd", client.id())).ok()?.flatten();
        let fd = fds.find(|fd| fs::read_link(fd.path()).is_ok_and(|path| path == Path::new(&words)))?;
        fs::read_to_string(format!("/proc/{}/fdinfo/{}", client.id(), fd.file_name().to_str()?)).ok()
    };
    // It is blocked when it reads nothing more for a while.
    let (mut last, mut same) = (None, 0);
    until("the client to be stuck", || {
        let now = read();
        same = if now.is_some() && now == last { same + 1 } else { 0 };
        last = now;
        (same == 100).then_some(())
    });
    client.kill().expect("our child");
    client.wait().expect("our child");
    let status = until("the end of the program", || outlast.try_wait().expect("our child"));
    assert_eq!(status.code(), Some(0));
    place.is_swept();
}

#[test]
fn requests_of_a_crashed_server_are_cancelled_and_late_answers_dropped() {
    let place = Place::new();
    let log = place.join("log");
    let mut client = Setup::new(&place).puppet(["--log", &log]).ready();
    let asking = client.send_call("ask", json!({"method": "roots/list"}));
    let question = client.next("roots/list");
    assert_eq!(question["id"], 0, "the first server's ids are its own");
    client.kill_server();
    let answer = client.answer(asking);
    failure(&answer["result"]);
    assert_eq!(client.next("notifications/cancelled")["params"]["requestId"], question["id"]);
    client.line(r#"{"jsonrpc":"2.0","id":0,"result":{"late":true}}"#);

    // The ids of the next server start from 0 again, and are distinguished.
    let asking = client.send_call("ask", json!({"method": "roots/list"}));
    let question = client.next("roots/list");
    assert!(question["id"].as_str().is_some_and(|id| id.starts_with("outlast-")), "{question}");
    client.line(r#"{"jsonrpc":"2.0","id":0,"result":{"late":"still"}}"#);
    client.line(&format!(r#"{{"jsonrpc":"2.0","id":{},"result":{{"roots":[]}}}}"#, question["id"]));
    let said = text(&client.answer(asking)["result"]);
    assert_eq!(said, r#"{"jsonrpc":"2.0","id":0,"result":{"roots":[]}}"#, "its own id is restored");
    assert!(place.log("log").iter().all(|(_, line)| !line.contains("late")), "late answers were dropped");
    client.end();
}

#[test]
fn the_number_of_held_requests_is_limited() {
    const HELD_MAX: usize = 256;
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    client.kill_server();
    place.recorded("server_crashed", 1);
    let asked: Vec<u64> = (0..HELD_MAX + 10).map(|_| client.send_call("pid", json!({}))).collect();
    let new = text(&client.answer(asked[0])["result"]);
    for id in &asked[1..HELD_MAX] {
        assert_eq!(text(&client.answer(*id)["result"]), new);
    }
    for id in &asked[HELD_MAX..] {
        let answer = client.answer(*id);
        let data = failure(&answer["result"]);
        assert_eq!((&data["reason"], &data["outcome"]), (&json!("hold_full"), &json!("not_sent")), "{data}");
    }
    client.end();
}

#[test]
fn a_server_that_was_stable_is_restarted_at_once() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    client.call("sleep", json!({"ms": 5_100}));
    client.kill_server();
    let crash = place.recorded("server_crashed", 1);
    assert_eq!(crash["delay_ms"], 0, "{crash}");
    client.call("echo", json!({"text": "back"}));
    client.kill_server();
    let crash = place.recorded("server_crashed", 2);
    assert_eq!(crash["delay_ms"], 1000, "only the first time: {crash}");
    client.end();
}

#[test]
fn an_unread_stderr_of_outlast_does_not_block_it() {
    let place = Place::new();
    let mut client = Setup::new(&place).deaf().ready();
    // More than a pipe holds, in many lines and in one.
    for _ in 0..30 {
        client.call("stderr", json!({"text": "x".repeat(5_000)}));
    }
    client.call("stderr", json!({"text": "x".repeat(500_000)}));
    client.result("crash", json!({}));
    assert_eq!(client.call("echo", json!({"text": "on"})), "on");
    client.end();
}
