//! What outlast reports about a server: states, reasons, stray output and the wording of failures.

use outlast_core::debounce::Changed;

use crate::story::*;

/// A call of one of outlast's own tools.
fn call_ours(id: u32, tool: &str, arguments: &str) -> String {
    ask_with(id, "tools/call", &format!(r#"{{"name":"{tool}","arguments":{arguments}}}"#))
}

fn structured(answer: &str) -> serde_json::Value {
    parsed(answer)["result"]["structuredContent"].clone()
}

#[test]
fn status_keeps_the_last_generation_while_the_server_is_down() {
    let mut story = Story::legacy_with(ALL, |settings| settings.policy.restarts_max = Some(1));
    assert_eq!(story.status()["generation"], 1);
    story.exits(1, code(1));
    assert_eq!((&story.status()["generation"], &story.status()["pid"]), (&json!(1), &json!(null)));
    story.passes(secs(1));
    story.start_fails("no such file");
    assert_eq!(story.status()["generation"], 1);
    story.asks_restart(7, Origin::Control, "again");
    story.marker_is_written();
    story.started(2);
    assert_eq!(story.status()["generation"], 2);
    story.exits(2, code(1));
    assert_eq!((&story.status()["state"], &story.status()["generation"]), (&json!("given_up"), &json!(2)));

    // With `--reload replace` the old server drains while no server is current.
    let mut story = Story::legacy_with(ALL, |settings| settings.reload = Reload::Replace);
    story.client(&call(1, "t"));
    story.reloads();
    assert_eq!(story.status()["generation"], 1);
}

#[test]
fn retry_after_is_null_where_no_start_is_planned() {
    // A reload ended the drain of the old server: the new one already serves.
    let mut story = Story::legacy();
    story.client(&ask(1, "acme/do"));
    story.reloads();
    story.comes_up(2);
    story.forget();
    story.passes(secs(60));
    let error = story.client_hears_error(1, 7005, "drain_over", "unknown");
    assert_eq!(error["data"]["retry_after_ms"], json!(null));

    // The server exited on purpose, and outlast exits with it.
    let mut story = Story::legacy();
    story.client(&ask(1, "acme/do"));
    story.exits(1, code(0));
    let error = story.client_hears_error(1, 7001, "server_ended", "unknown");
    assert_eq!(error["data"]["retry_after_ms"], json!(null));
}

#[test]
fn json_that_is_not_json_rpc_goes_to_stderr() {
    let lines = [
        r#"{"level":"info","msg":"listening"}"#,
        r#"{"id":1,"level":"info"}"#,
        r#"{"level":"error","error":"no token"}"#,
        r#"{"id":77,"result":"cached","msg":"done"}"#,
        r#"{"method":"GET","path":"/health"}"#,
        r#"{"id":5,"method":"GET","path":"/health"}"#,
        "[1,2,3]",
        "[]",
        "42",
        r#""ready""#,
        "null",
    ];
    for make in [Story::legacy, Story::modern] {
        for line in lines {
            let mut story = make();
            story.client(&call(1, "t"));
            story.child(1, line);
            story.client_hears_nothing();
            story.was_done(&[&format!("divert 1 as JSON: {line}")]);
            assert_eq!(story.status()["stdout_not_json"], 1, "{line}");
            story.child(1, &result(1, "{}"));
            story.client_hears(&[&result(1, "{}")]);
        }
    }
    // An answer to an open request reaches the client even without its version: the request is open, and the client
    // decides whether it accepts such an answer.
    let mut story = Story::legacy();
    story.client(&call(1, "t"));
    story.child(1, r#"{"id":1,"result":{}}"#);
    story.client_hears(&[r#"{"id":1,"result":{}}"#]);
    // From an array only the elements that are not messages are removed.
    let mut story = Story::legacy();
    story.child(1, r#"[{"jsonrpc":"2.0","method":"notifications/message","params":{}}]"#);
    assert_eq!(story.told_client().len(), 1);
}

#[test]
fn a_byte_order_mark_before_the_first_line_is_skipped() {
    let mut story = Story::fresh();
    story.client(INITIALIZE);
    story.child(1, &format!("\u{feff}{}", result(0, &initialize_result("2025-11-25", ALL))));
    let answer = story.answer();
    assert!(answer.starts_with(r#"{"jsonrpc":"2.0","id":0,"result""#), "{answer}");
    assert_eq!(story.status()["stdout_not_json"], json!(null));
    story.child(1, "\u{feff}hello");
    assert!(story.did().contains(&"divert 1: hello".to_owned()), "for people it is left out as well");
}

#[test]
fn every_server_exiting_has_its_reason() {
    // The old server has nothing to finish.
    let mut story = Story::legacy();
    story.reloads();
    story.comes_up(2);
    assert_eq!(story.record("server_exiting").reason.as_deref(), Some("new code"));

    // The old server finishes a call, and the restart is over long before.
    let mut story = Story::legacy();
    story.client(&call(1, "t"));
    story.reloads();
    story.comes_up(2);
    story.passes(secs(10));
    story.forget();
    story.child(1, &result(1, "{}"));
    assert_eq!(story.record("server_exiting").reason.as_deref(), Some("new code"));

    // The old server exits by itself while it drains.
    let mut story = Story::legacy();
    story.client(&call(1, "t"));
    story.reloads();
    story.comes_up(2);
    story.passes(secs(10));
    story.forget();
    story.exits(1, code(1));
    assert_eq!(story.record("server_exiting").reason.as_deref(), Some("new code"));

    // The old server exits to be restarted.
    let mut story = Story::legacy();
    story.forget();
    story.exits(1, code(42));
    let reason = story.record("server_exiting").reason;
    assert_eq!(reason.as_deref(), Some("the server exited with code 42, which asks for a restart"));
}

#[test]
fn a_reason_is_one_clean_line_of_bounded_length_everywhere() {
    let dirty = "line one\r\nline\ttwo \u{1b}[31mred\u{7} \u{202e}evil\u{2066}\u{2028}end\u{200f}";
    let clean = "line one line two [31mred evil end";
    let mut story = Story::legacy();
    story.asks_restart(7, Origin::Control, dirty);
    assert_eq!(story.record("server_restart_requested").reason.as_deref(), Some(clean));
    assert_eq!(story.status()["restart"]["reason"], clean);
    story.was_done(&[&format!("mark 1001: {clean}")]);
    story.marker_is_written();
    assert_eq!(story.record("restart_marker_written").reason.as_deref(), Some(clean));
    story.comes_up(2);
    assert_eq!(story.status()["last_reload"]["reason"], clean);

    // Too long, or empty.
    let mut story = Story::legacy();
    story.client(&call_ours(1, "restart_server", &json!({"reason": "x".repeat(10_000)}).to_string()));
    let reason = story.record("server_restart_requested").reason.unwrap_or_default();
    assert!(reason.len() <= outlast_core::reason::REASON_MAX && reason.ends_with('…'), "{reason}");
    let mut story = Story::legacy();
    story.client(&call_ours(1, "restart_server", r#"{"reason":" \n "}"#));
    assert_eq!(story.record("server_restart_requested").reason.as_deref(), Some("no reason given"));

    // Many requests that are joined.
    let mut story = Story::legacy();
    story.reloads();
    for n in 0..1_000 {
        story.asks_restart(100 + n, Origin::Control, &format!("reason {n} {}", "y".repeat(100)));
    }
    story.forget();
    story.comes_up(2);
    let reason = story.record("server_restart_requested").reason.unwrap_or_default();
    assert!(reason.starts_with("reason 0 "), "{reason}");
    assert!(reason.len() <= outlast_core::reason::REASON_MAX, "{}", reason.len());
}

#[test]
fn a_restart_whose_marker_could_not_be_written_is_still_reported_as_a_restart() {
    let why = "No space left on device";
    for reading in [
        Reading::Missing { path: "restart_marker".into() },
        Reading::Corrupt { path: "restart_marker".into(), error: "EOF".into() },
        Reading::Valid { timestamp: 999_000.0, pid: 1, reason: "an older one".into(), iso_time: "then".into() },
    ] {
        let mut story = Story::legacy();
        story.passes(secs(5));
        story.client(&call_ours(1, "restart_server", r#"{"reason":"new code"}"#));
        story.marker_is_not_written(why);
        assert_eq!(story.recorded("restart_marker_failed"), [why]);
        story.passes(secs(1));
        story.comes_up(2);
        let report = structured(&story.answer());
        assert_eq!(report["marker_error"], why, "{report}");
        assert_eq!(report["generation"], 2);

        story.client(&call_ours(2, "verify_server_restarted", r#"{"since_timestamp":1000004}"#));
        let key = story.did().iter().find_map(|done| done.strip_prefix("read ")?.parse().ok()).expect("it is read");
        story.happens(Event::MarkerRead { key, reading: reading.clone(), unix: 1_000_008.0 });
        let verdict = structured(&story.answer());
        assert_eq!(verdict["restarted"], true, "{verdict}");
        assert_eq!(verdict["restart_timestamp"], 1_000_005.0, "{verdict}");
        assert_eq!((&verdict["previous_pid"], &verdict["current_pid"]), (&json!(1001), &json!(1002)));
        assert_eq!((&verdict["reason"], &verdict["iso_time"]), (&json!("new code"), &json!("at 1000005")));
        assert_eq!((&verdict["time_since_restart"], &verdict["marker_error"]), (&json!(3.0), &json!(why)));

        // For a later time the answer is that it was not restarted.
        story.client(&call_ours(3, "verify_server_restarted", r#"{"since_timestamp":1000006}"#));
        let key = story.did().iter().find_map(|done| done.strip_prefix("read ")?.parse().ok()).expect("it is read");
        story.happens(Event::MarkerRead { key, reading, unix: 1_000_008.0 });
        assert_eq!(structured(&story.answer())["restarted"], false);
    }
    // A later marker that was written counts again.
    let mut story = Story::legacy();
    story.asks_restart(7, Origin::Control, "first");
    story.marker_is_not_written(why);
    story.comes_up(2);
    story.asks_restart(8, Origin::Control, "second");
    story.marker_is_written();
    story.did();
    story.comes_up(3);
    assert!(story.did().iter().all(|done| !done.contains("marker_error")));
    story.client(&call_ours(2, "verify_server_restarted", r#"{"since_timestamp":5}"#));
    let key = story.did().iter().find_map(|done| done.strip_prefix("read ")?.parse().ok()).expect("it is read");
    story.happens(Event::MarkerRead { key, reading: Reading::Missing { path: "m".into() }, unix: 1_000_008.0 });
    assert_eq!(structured(&story.answer())["restarted"], false, "the marker was removed");

    // The restart fails as well.
    let mut story = Story::legacy();
    story.asks_restart(7, Origin::Control, "first");
    story.marker_is_not_written(why);
    story.did();
    story.start_fails("no such file");
    let did = story.did();
    let report = parsed(did[0].strip_prefix("refuse 7: ").unwrap_or_default());
    assert_eq!(report["marker_error"], why, "{report}");
}

#[test]
fn a_file_that_changes_right_after_each_start_is_muted_and_shown() {
    let change = |story: &mut Story, print: u64| {
        let changed = Changed { paths: vec!["run.txt".into()], ..Changed::default() };
        story.happens(Event::FilesChanged { changed, prints: vec![Some(print)] });
    };
    let mut story = Story::legacy();
    assert_eq!(story.status()["muted"], json!([]));
    story.passes(secs(10));
    let (mut generation, mut print) = (1, 0);
    // The first change comes at any time, the next ones right after the starts that they cause.
    for _ in 0..5 {
        print += 1;
        change(&mut story, print);
        assert!(story.did().contains(&format!("mark {}: changed: run.txt", 1000 + generation)));
        story.marker_is_written();
        generation += 1;
        story.comes_up(generation);
        story.passes(ms(300));
    }
    story.forget();
    change(&mut story, 50);
    story.was_done(&[]);
    assert_eq!(story.recorded("watch_muted"), ["run.txt"]);
    assert_eq!(story.status()["muted"], json!(["run.txt"]));
    // Its content differs from the loaded content, so it is loaded once more.
    story.passes(secs(2));
    assert!(story.did().contains(&format!("mark {}: changed: run.txt", 1000 + generation)));
    story.marker_is_written();
    generation += 1;
    story.comes_up(generation);
    story.forget();
    // The file changes right after that start, so the server writes it.
    change(&mut story, 51);
    story.passes(secs(30));
    assert!(story.did().is_empty());
    assert_eq!(story.status()["muted"], json!(["run.txt"]));

    // A requested restart unmutes it, and so does a quiet minute.
    story.asks_restart(7, Origin::Control, "new code");
    assert_eq!(story.recorded("watch_unmuted"), ["run.txt"]);
    assert_eq!(story.status()["muted"], json!([]));
    story.marker_is_written();
    generation += 1;
    story.comes_up(generation);
    change(&mut story, 52);
    assert_eq!(story.recorded("watch_muted"), ["run.txt"]);
    story.passes(secs(61));
    assert_eq!(story.recorded("watch_unmuted"), ["run.txt"]);
    assert_eq!(story.status()["muted"], json!([]));
    assert_eq!(story.status()["generation"], generation, "it was not loaded for that");
}

// ---- wording --------------------------------------------------------------------------------------------

#[test]
fn a_stderr_line_is_quoted_once() {
    for lines in [&["only"][..], &["first", "only"]] {
        let mut story = Story::legacy();
        story.client(&call(1, "t"));
        for line in lines {
            story.child_logs(1, line);
        }
        story.exits(1, code(1));
        let text = story.client_hears_failed_call(1, "server_ended", "unknown");
        assert_eq!(text.matches("only").count(), 1, "{text}");
    }
    // A JSON-RPC error has one line in its message and the rest as data.
    let mut story = Story::legacy();
    story.client(&ask(1, "acme/do"));
    story.child_logs(1, "only");
    story.exits(1, code(1));
    let error = story.client_hears_error(1, 7001, "server_ended", "unknown");
    assert!(error["message"].as_str().is_some_and(|text| text.ends_with("Last stderr line: only")), "{error}");
}

#[test]
fn counted_things_have_the_right_number() {
    for (calls, words) in [(1, "1 call left on the old server"), (2, "2 calls left on the old server")] {
        let mut story = Story::legacy();
        for id in 0..calls {
            story.client(&call(id + 1, "t"));
        }
        story.reloads();
        story.did();
        story.comes_up(2);
        let did = story.did();
        assert!(did.iter().any(|done| done.contains(&format!("\"draining\":\"{words}\""))), "{did:?}");
    }
    let mut story = Story::legacy_with(ALL, |settings| settings.policy.restarts_max = Some(0));
    story.exits(1, code(1));
    story.client(&ask(1, "acme/do"));
    let error = story.client_hears_error(1, 7003, "gave_up", "not_sent");
    let message = error["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("; 1 crash") && !message.contains("crashes"), "{message}");
}

#[test]
fn only_requests_with_effects_may_have_taken_effect() {
    let safe = [
        "tools/list",
        "prompts/list",
        "resources/read",
        "prompts/get",
        "completion/complete",
        "logging/setLevel",
        "resources/subscribe",
    ];
    for method in safe {
        // Re-sent once, and the server exited again.
        let mut story = Story::legacy();
        story.client(&ask_with(1, method, r#"{"uri":"u"}"#));
        story.exits(1, code(1));
        story.passes(secs(1));
        story.comes_up(2);
        story.forget();
        story.exits(2, code(1));
        let error = story.client_hears_error(1, 7001, "ended_again", "unknown");
        let message = error["message"].as_str().unwrap_or_default();
        assert!(!message.contains("effect"), "{message}");
        assert!(
            message.starts_with(&format!("The server ended (exit code 1) before it answered `{method}`.")),
            "{message}"
        );

        // It waited too long for the next server.
        let mut story = Story::legacy();
        story.client(&ask_with(1, method, r#"{"uri":"u"}"#));
        story.exits(1, code(1));
        story.passes(secs(1));
        story.started(2);
        story.passes(secs(29));
        for answer in story.told_client() {
            assert!(!answer.contains("effect"), "{answer}");
        }
        // outlast stops before the answer.
        let mut story = Story::legacy();
        story.client(&ask_with(1, method, r#"{"uri":"u"}"#));
        story.client_leaves(ClientEnd::Closed);
        story.exits(1, How::Stopped);
        let error = story.client_hears_error(1, 7006, "stopping", "unknown");
        assert_eq!(error["message"], format!("`{method}` was not answered: outlast is stopping."));
    }
    let mut story = Story::legacy();
    story.client(&call(1, "t"));
    story.exits(1, code(1));
    let text = story.client_hears_failed_call(1, "server_ended", "unknown");
    assert!(text.contains("it may or may not have taken effect"), "{text}");
}

#[test]
fn another_protocol_version_says_to_reconnect_the_client() {
    let mut story = Story::legacy();
    story.reloads();
    story.started(2);
    let (id, _) = story.private_request(2);
    story.did();
    story.child(2, &result(id, &initialize_result("2025-06-18", ALL)));
    let did = story.did();
    let refused = did.iter().find_map(|done| done.strip_prefix("refuse 7: ")).expect("the restart fails");
    let error = parsed(refused)["error"].as_str().unwrap_or_default().to_owned();
    let words = "speaks 2025-06-18, the client was promised 2025-11-25: reconnect the client to use the new server";
    assert!(error.contains(words), "{error}");

    let mut story = Story::modern();
    story.reloads();
    story.started(2);
    let (id, _) = story.private_request(2);
    story.did();
    story.child(2, &result(id, r#"{"supportedVersions":["2027-01-01"],"capabilities":{}}"#));
    let did = story.did();
    assert!(did.iter().any(|done| done.contains("reconnect the client to use the new server")), "{did:?}");
}

#[test]
fn ordinary_events_are_not_called_odd() {
    for event in outlast_core::record::Event::ALL {
        assert!(!event.message().to_lowercase().contains("odd"), "{}", event.message());
    }
    // A server with more capabilities than the client knows is a reason to reconnect, and not an error.
    let mut story = Story::legacy_with(r#"{"tools":{}}"#, |_| {});
    story.reloads();
    story.comes_up_with(2, r#"{"tools":{},"prompts":{}}"#);
    assert_eq!(story.status()["noted"].as_array().map(Vec::len), Some(1));
    let record = story.record("conversation_noted");
    assert_eq!(record.event.level(), "INFO");
}
