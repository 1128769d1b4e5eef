//! outlast's own tools, and calls that it has to answer itself (t1-t4).

use crate::story::*;

#[test]
fn t1_a_server_keeps_its_own_names() {
    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list"));
    story.child(
        1,
        &result(
            1,
            r#"{"tools":[{"name":"restart_server"},{"name":"server_status"},{"name":"outlast_server_status"}]}"#,
        ),
    );
    assert_eq!(
        tool_names(&story.answer())[3..],
        ["outlast_restart_server", "verify_server_restarted", "outlast_outlast_server_status"]
    );
    story.told_server(1);
    story.client(&call(2, "restart_server")).client(&call(3, "server_status"));
    story.child_hears(1, &[&call(2, "restart_server"), &call(3, "server_status")]);
    story.client(&call(4, "outlast_outlast_server_status"));
    assert_eq!(parsed(&story.answer())["id"], 4);
    story.was_done(&[]);
}

#[test]
fn t1_a_clash_on_a_later_page_renames_ours_and_is_announced() {
    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list")).child(1, &result(1, r#"{"tools":[{"name":"a"}],"nextCursor":"2"}"#));
    assert_eq!(tool_names(&story.answer())[1..], OURS);
    story.client(&ask_with(2, "tools/list", r#"{"cursor":"2"}"#));
    story.child(1, &result(2, r#"{"tools":[{"name":"server_status"}]}"#));
    let told = story.told_client();
    assert_eq!(told[1..], [note("notifications/tools/list_changed")], "{told:#?}");
    story.forget();
    story.client(&call(3, "server_status"));
    story.child_hears(1, &[&call(3, "server_status")]);
}

#[test]
fn t1_a_clash_that_a_reload_brings_is_a_change_of_the_list() {
    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list")).child(1, &result(1, r#"{"tools":[{"name":"server_status"}]}"#));
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up(2);
    story.told_client();
    story.answers_private(2, "tools/list", r#"{"tools":[]}"#);
    story.client_hears(&[&note("notifications/tools/list_changed")]);
    story.client(&call(2, "server_status"));
    assert_eq!(parsed(&story.answer())["result"]["isError"], false);
}

#[test]
fn t2_a_restart_is_answered_when_the_tools_are_compared() {
    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list")).child(1, &result(1, r#"{"tools":[{"name":"a"},{"name":"b"}]}"#));
    story.forget();
    story.client(&ask_with(2, "tools/call", r#"{"name":"restart_server","arguments":{"reason":"more tools"}}"#));
    story.was_done(&["mark 1001: more tools"]);
    story.marker_is_written();
    story.passes(ms(250));
    story.comes_up(2);
    story.child_logs(2, "hello");
    story.client_hears_nothing();
    story.answers_private(2, "tools/list", r#"{"tools":[{"name":"b","x":1},{"name":"c"}]}"#);
    let told = story.told_client();
    assert_eq!(told.len(), 2, "{told:#?}");
    let at = told.iter().position(|line| line.contains("\"id\":2")).unwrap_or_default();
    let answer = parsed(&told[at]);
    assert_eq!(told[1 - at], note("notifications/tools/list_changed"));
    let report = &answer["result"]["structuredContent"];
    assert_eq!(
        report,
        &json!({"old_pid": 1001, "new_pid": 1002, "generation": 2, "took_ms": 250, "ended": null,
            "tools": {"added": ["c"], "removed": ["a"], "changed": ["b"]}, "stderr_tail": "hello"})
    );
    assert_eq!(answer["result"]["isError"], false);
    assert_eq!(parsed(answer["result"]["content"][0]["text"].as_str().unwrap_or_default()), *report);
}

#[test]
fn t2_a_failed_restart_reports_the_reason_and_the_stderr() {
    let mut story = Story::legacy();
    story.client(&call(1, "restart_server"));
    story.marker_is_written();
    story.started(2);
    story.child_logs(2, "SyntaxError");
    story.exits(2, code(1));
    let answer = parsed(&story.answer());
    assert_eq!(answer["result"]["isError"], true);
    let text = answer["result"]["content"][0]["text"].as_str().unwrap_or_default();
    assert_eq!(
        text,
        "The restart failed: the new server ended before it was ready (exit code 1). The old server (pid 1001) keeps \
         serving.\n\nstderr of the new server:\nSyntaxError"
    );
    story.client(&call(2, "t"));
    assert_eq!(story.told_server(1), [call(2, "t")]);
}

#[test]
fn t2_wrong_arguments_are_one_sentence() {
    for (name, arguments) in [
        ("restart_server", r#"{"reason":5}"#),
        ("restart_server", "[]"),
        ("verify_server_restarted", "{}"),
        ("verify_server_restarted", r#"{"since_timestamp":"1"}"#),
    ] {
        let mut story = Story::legacy();
        story.client(&ask_with(1, "tools/call", &format!(r#"{{"name":"{name}","arguments":{arguments}}}"#)));
        let answer = parsed(&story.answer());
        assert_eq!(answer["result"]["isError"], true, "{name} {arguments}");
        story.was_done(&[]);
    }
}

#[test]
fn t2_a_long_restart_is_reported_as_running() {
    let mut story = Story::legacy_with(ALL, |settings| settings.limits.handshake.handshake_max = secs(300));
    story.client(&call(1, "restart_server"));
    story.marker_is_written();
    story.started(2);
    story.passes(secs(55));
    let answer = parsed(&story.answer());
    assert_eq!(answer["result"]["isError"], false);
    let text = answer["result"]["content"][0]["text"].as_str().unwrap_or_default();
    assert!(text.contains("still running") && text.contains("`server_status`"), "{text}");
    story.shakes_hands(2, ALL);
    story.client_hears_nothing();
    assert_eq!(story.status()["pid"], 1002);
}

#[test]
fn t2_a_restart_is_verified_by_its_marker_and_a_child_started_after_it() {
    let verify =
        ask_with(1, "tools/call", r#"{"name":"verify_server_restarted","arguments":{"since_timestamp":1000000.5}}"#);
    let read = |timestamp: f64| {
        let mut story = Story::legacy();
        story.passes(secs(2));
        story.reloads();
        story.comes_up(2);
        story.forget();
        story.client(&verify);
        let did = story.did();
        let key = did[0].strip_prefix("read ").and_then(|key| key.parse().ok()).unwrap_or_default();
        let reading =
            Reading::Valid { timestamp, pid: 1001, reason: "new code".into(), iso_time: "2026-01-01T00:00:00Z".into() };
        story.happens(Event::MarkerRead { key, reading, unix: 1_000_010.0 });
        parsed(&story.answer())["result"]["structuredContent"].clone()
    };
    assert_eq!(
        read(1_000_001.0),
        json!({"restarted": true, "restart_timestamp": 1_000_001.0, "current_pid": 1002, "previous_pid": 1001,
            "reason": "new code", "time_since_restart": 9.0, "iso_time": "2026-01-01T00:00:00Z"})
    );
    for timestamp in [999_999.0, 1_000_003.0] {
        let verdict = read(timestamp);
        assert_eq!(verdict["restarted"], false, "{verdict}");
        assert!(verdict["error"].is_string(), "{verdict}");
    }
}

#[test]
fn t3_a_call_that_outlast_fails_is_a_result_that_the_model_sees() {
    let mut story = Story::legacy();
    story.client(&call(1, "t"));
    story.child_logs(1, "Traceback");
    story.exits(1, How::Exited(Exit::Signal(9)));
    let answer = parsed(&story.answer());
    assert_eq!(
        answer["result"]["_meta"]["outlast/failure"],
        json!({"from": "outlast", "reason": "server_ended", "outcome": "unknown", "generation": 1,
            "exit": {"signal": 9}, "stderr": ["Traceback"], "retry_after_ms": 1000})
    );
    failed_call(&answer, 1, "server_ended", "unknown");
}

#[test]
fn t4_a_legacy_task_and_all_other_methods_get_errors() {
    let mut story = Story::legacy();
    story.client(&ask_with(1, "tools/call", r#"{"name":"t","task":{"ttl":1}}"#));
    story.exits(1, code(1));
    story.client_hears_error(1, 7001, "server_ended", "unknown");

    let mut story = Story::modern();
    story.client(&modern(1, "tools/call", r#""name":"t","task":{}"#));
    story.exits(1, code(1));
    story.client_hears_failed_call(1, "server_ended", "unknown");
}

#[test]
fn t4_the_status_has_the_number_of_answered_calls_and_their_times() {
    let mut story = Story::legacy();
    let before = story.status()["calls"].as_u64().unwrap();
    for id in 1..=3 {
        story.client(&call(id, "a"));
        story.passes(ms(100));
        story.child(1, &result(id, "{}"));
    }
    story.client(&call(4, "a"));
    story.exits(1, code(1));
    let status = story.status();
    assert_eq!(status["calls"], before + 3, "a call that failed was not answered by a server: {status}");
    assert!((80.0..120.0).contains(&status["p50_ms"].as_f64().unwrap()), "{status}");
    assert!(status["calls_per_s"].as_f64().unwrap() > 0.0, "{status}");
    assert_eq!(status["last_exits"][0]["crashed"], true, "{status}");
    story.passes(secs(60));
    assert_eq!(story.status()["p50_ms"], serde_json::Value::Null);
}
