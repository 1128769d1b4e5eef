//! Servers that hang (y1 to y9, e7, e8), restarts that do not wait (f1 to f4), servers that use too much memory (z1,
//! z2), and servers that cannot exit after a call of their own restart tool (x4b).

use std::time::Duration;

use crate::story::*;

fn no_tools(settings: &mut Settings) {
    settings.tools = false;
}

fn ping(k: u32) -> String {
    ask(private(k), "ping")
}

fn with_reason(id: u32, tool: &str, reason: &str) -> String {
    ask_with(id, "tools/call", &format!(r#"{{"name":"{tool}","arguments":{{"reason":"{reason}"}}}}"#))
}

/// The client's answer when the server exited by its own restart tool.
fn back(id: u32, pid: u32) -> String {
    let text = format!("The server exited to restart, as requested, and is ready again (pid {pid}).");
    result(id, &format!(r#"{{"content":[{{"text":"{text}","type":"text"}}],"isError":false}}"#))
}

#[test]
fn x4b_a_server_that_answered_its_restart_call_and_does_not_exit_gets_a_ping() {
    let mut story = Story::legacy_with(ALL, no_tools);
    story.client(&with_reason(1, "restart_server", "new code"));
    story.child(1, &result(1, "{}"));
    story.forget();
    story.passes(ms(699));
    story.child_hears_nothing(1);
    story.passes(ms(1));
    story.child_hears(1, &[&ping(1)]);
    // The line makes it exit, and a call that arrived meanwhile never ran.
    story.client(&call(2, "transfer"));
    story.exits(1, code(42));
    story.client_hears_failed_call(2, "server_ended", "unknown");
    story.was_done(&["start"]);
    story.comes_up(2);
    story.client_hears_nothing();
}

#[test]
fn x4b_a_restart_call_without_an_answer_is_answered_when_the_next_server_is_ready() {
    let mut story = Story::legacy_with(ALL, no_tools);
    story.client(&call(1, "restart_server"));
    story.forget();
    story.passes(ms(999));
    story.child_hears_nothing(1);
    story.passes(ms(1));
    story.child_hears(1, &[&ping(1)]);
    story.exits(1, code(42));
    story.client_hears_nothing();
    story.comes_up(2);
    story.client_hears(&[&back(1, 1002)]);
}

#[test]
fn x4b_a_server_that_answers_the_ping_is_left_alone() {
    let mut story = Story::legacy_with(ALL, no_tools);
    story.client(&call(1, "restart_server"));
    story.passes(secs(1));
    story.answers_private(1, "ping", "{}");
    story.forget();
    story.passes(secs(100));
    story.was_done(&[]);
    story.child_hears_nothing(1);
    // Its answer is late, and the exit is expected from then on.
    story.child(1, &result(1, "{}"));
    story.client_hears(&[&result(1, "{}")]);
    story.passes(ms(700));
    story.child_hears(1, &[&ping(2)]);
}

#[test]
fn x4b_a_server_that_neither_exits_nor_answers_is_replaced() {
    let mut story = Story::legacy_with(ALL, no_tools);
    story.client(&with_reason(1, "restart_server", "new\\ncode"));
    story.passes(secs(2));
    story.was_done(&["close stdin 1", "mark 1001: new code"]);
    assert_eq!(story.recorded("server_restart_requested"), ["server"]);
    story.marker_is_written();
    story.was_done(&["start"]);
    // The end of stdin makes most servers exit; this one does not.
    story.comes_up(2);
    story.client_hears(&[&back(1, 1002)]);
    let did = story.did();
    assert_eq!(did[..2], ["stop 1: was stopped", "ready 2"], "{did:?}");

    let mut story = Story::legacy_with(ALL, no_tools);
    story.client(&call(1, "restart_server")).child(1, &result(1, "{}"));
    story.forget();
    story.passes(ms(1_700));
    story.was_done(&["close stdin 1", "mark 1001: `restart_server` was called"]);
    story.marker_is_written();
    story.exits(1, code(42));
    story.comes_up(2);
    assert_eq!(story.did()[..2], ["start", "ready 2"], "one new server");
    story.client_hears_nothing();
}

/// A server that is stopped before the next one starts (`--reload replace`) may still answer its restart call.
#[test]
fn x4b_an_answer_that_comes_before_the_next_server_is_ready_is_forwarded() {
    let mut story = Story::legacy_with(ALL, |settings| {
        no_tools(settings);
        settings.reload = Reload::Replace;
    });
    story.client(&call(1, "restart_server")).client(&call(2, "t"));
    story.passes(secs(2));
    story.marker_is_written();
    let refused = r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"no"}}"#;
    story.child(1, refused);
    story.client_hears(&[refused]);
}

#[test]
fn x4b_a_failed_restart_does_not_leave_a_server_without_stdin() {
    let mut story = Story::legacy_with(ALL, no_tools);
    story.client(&call(1, "restart_server"));
    story.passes(secs(2));
    story.marker_is_written();
    story.forget();
    story.start_fails("no such file");
    let did = story.did();
    assert_eq!(did[0], "stop 1: hung: silent for 1 s", "{did:?}");
    assert!(did[1].contains("No server is serving."), "{did:?}");
    story.exits(1, How::Hung(secs(1)));
    story.client_hears_nothing();
    story.passes(secs(1));
    story.comes_up(2);
    story.client_hears(&[&back(1, 1002)]);
}

#[test]
fn x4b_the_tool_can_be_named_and_the_stateless_era_uses_discover() {
    let mut story = Story::modern_with(|settings| settings.restart_tool = "reboot".into());
    story.client(&modern(1, "tools/call", r#""name":"restart","arguments":{}"#));
    story.client(&modern(2, "tools/call", r#""name":"reboot","arguments":{}"#));
    story.forget();
    story.passes(secs(1));
    story.child_hears(1, &[&ask_with(private(1), "server/discover", &format!(r#"{{"_meta":{META}}}"#))]);
    story.exits(1, code(42));
    let failed = story.told_client();
    assert_eq!(failed.len(), 1);
    failed_call(&parsed(&failed[0]), 1, "server_ended", "unknown");
    story.comes_up(2);
    assert_eq!(parsed(&story.answer())["result"]["isError"], false);
}

// ---- H1 ---------------------------------------------------------------------------------------------------

/// A call was cancelled, and five seconds later the server counts as hung and is being replaced.
fn hung() -> Story {
    let mut story = Story::legacy();
    story.client(&call(1, "slow")).client(&cancel(1));
    story.child_hears(1, &[&call(1, "slow"), &cancel(1), &ping(1)]);
    story.passes(ms(4_999));
    story.was_done(&[]);
    story.passes(ms(1));
    story
}

#[test]
fn y1_a_server_that_answers_neither_a_cancelled_call_nor_a_ping_is_replaced() {
    let mut story = hung();
    story.was_done(&["mark 1001: the server hung"]);
    let record = story.record("server_hung");
    assert_eq!((record.pid, record.generation), (Some(1001), Some(1)));
    assert_eq!(
        record.detail.as_deref(),
        Some("`slow` was cancelled, and neither it nor a ping was answered within 5 s")
    );
    story.marker_is_written();
    story.comes_up(2);
    let did = story.did();
    assert_eq!(did[..3], ["start", "stop 1: was stopped", "ready 2"], "nothing is left to drain: {did:?}");
    story.client_hears_nothing();
}

#[test]
fn y1_an_answer_to_the_call_or_to_the_ping_clears_the_server() {
    let mut story = Story::legacy();
    story.client(&call(1, "slow")).client(&call(2, "other")).client(&cancel(1));
    story.child(1, &result(2, "{}"));
    story.passes(secs(4));
    story.answers_private(1, "ping", "{}");
    story.passes(secs(100));
    story.was_done(&[]);

    let mut story = Story::legacy();
    story.client(&call(1, "slow")).client(&cancel(1));
    story.child(1, &result(1, "{}"));
    story.passes(secs(100));
    story.was_done(&[]);

    // Two calls were cancelled: one late answer accounts for one of them.
    let mut story = Story::legacy();
    story.client(&call(1, "slow")).client(&call(2, "slower")).client(&cancel(1)).client(&cancel(2));
    assert_eq!(story.told_server(1).iter().filter(|line| line.contains("ping")).count(), 1);
    story.child(1, &result(1, "{}"));
    story.passes(secs(5));
    story.was_done(&["mark 1001: the server hung"]);
}

#[test]
fn y1_the_stateless_era_uses_discover() {
    let mut story = Story::modern();
    story.client(&modern(1, "tools/call", r#""name":"slow""#)).client(&cancel(1));
    let told = story.told_server(1);
    assert_eq!(parsed(&told[2])["method"], "server/discover", "{told:?}");
    story.passes(secs(5));
    story.was_done(&["mark 1001: the server hung"]);
}

#[test]
fn y2_a_request_that_needs_no_work_is_unanswered_for_30_s_while_no_other_is_open() {
    for request in ["tools/list", "ping", "logging/setLevel", "prompts/list"] {
        let mut story = Story::legacy();
        story.client(&ask(1, request));
        story.forget();
        story.passes(ms(29_999));
        story.child_hears_nothing(1);
        story.passes(ms(1));
        story.child_hears(1, &[&ping(1)]);
        story.passes(ms(4_999));
        story.was_done(&[]);
        story.passes(ms(1));
        story.was_done(&["mark 1001: the server hung"]);
        let detail = story.record("server_hung").detail;
        assert_eq!(detail, Some(format!("{request} was not answered for 30 s, nor a ping within 5 s")));
    }
}

#[test]
fn y2_a_long_call_is_no_hang() {
    let mut story = Story::legacy();
    story.client(&call(1, "long")).client(&ask(2, "tools/list"));
    story.forget();
    story.passes(secs(3_600));
    story.child_hears_nothing(1);
    // After the call has ended, the list has 30 s more.
    story.child(1, &result(1, "{}"));
    story.passes(ms(29_999));
    story.child_hears_nothing(1);
    story.passes(ms(1));
    story.child_hears(1, &[&ping(1)]);

    // A call alone is never checked, nor a list that was answered.
    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list")).child(1, &result(1, r#"{"tools":[]}"#));
    story.client(&call(2, "long"));
    story.forget();
    story.passes(secs(3_600));
    story.child_hears_nothing(1);
}

#[test]
fn y2_our_own_requests_after_a_handshake_count_too() {
    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list")).child(1, &result(1, r#"{"tools":[]}"#));
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up(2);
    story.forget();
    story.passes(secs(30));
    assert_eq!(story.told_server(2).len(), 1, "a ping");
    story.passes(secs(5));
    story.was_done(&["mark 1002: the server hung"]);
}

#[test]
fn y3_a_call_that_takes_too_long_is_cancelled_and_fails() {
    let mut story = Story::legacy_with(ALL, |settings| settings.call_timeout = Some(secs(10)));
    story.client(&call(1, "slow")).client(&ask(2, "resources/read"));
    story.forget();
    story.passes(ms(9_999));
    story.client_hears_nothing();
    story.passes(ms(1));
    let answer = parsed(&story.answer());
    let text = failed_call(&answer, 1, "call_timeout", "unknown");
    assert_eq!(
        text,
        "`slow` was not answered within 10 s and was cancelled; it may or may not have taken effect: check before \
         repeating it."
    );
    let told = story.told_server(1);
    assert_eq!(parsed(&told[0])["params"]["requestId"], 1);
    assert_eq!(parsed(&told[0])["params"]["reason"], "no answer within 10 s");
    assert_eq!(told[1..], [ping(1)], "and then as y1");
    // Its late answer is dropped, and shows that the server does not hang.
    story.child(1, &result(1, "{}"));
    story.client_hears_nothing();
    story.passes(secs(100));
    story.was_done(&[]);
}

#[test]
fn y3_progress_begins_the_time_anew_and_a_tool_may_have_its_own() {
    let mut story = Story::legacy_with(ALL, |settings| settings.call_timeout = Some(secs(10)));
    story.client(&ask_with(1, "tools/call", r#"{"name":"slow","_meta":{"progressToken":7}}"#));
    for progress in 1..5 {
        story.passes(secs(9));
        story.child(
            1,
            &format!(
                r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":7,"progress":{progress}}}}}"#
            ),
        );
    }
    assert_eq!(story.told_client().len(), 4);
    story.passes(secs(10));
    story.client_hears_failed_call(1, "call_timeout", "unknown");
    // The client has its answer, so no progress follows, until a new call has the token.
    let progress = r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":7,"progress":9}}"#;
    story.child(1, progress);
    story.client_hears_nothing();
    story.client(&ask_with(2, "tools/call", r#"{"name":"slow","_meta":{"progressToken":7}}"#));
    story.child(1, progress);
    assert_eq!(story.told_client().len(), 1);

    let table = [("slow", None), ("quick", Some(2)), ("other", Some(10))];
    for (tool, expected) in table {
        let mut story = Story::legacy_with(ALL, |settings| {
            settings.call_timeout = Some(secs(10));
            settings.call_timeouts = [("slow".into(), Duration::ZERO), ("quick".into(), secs(2))].into();
        });
        story.client(&call(1, tool));
        story.passes(secs(expected.unwrap_or(3_600)) - ms(1));
        story.client_hears_nothing();
        story.passes(ms(1));
        assert_eq!(story.told_client().len(), usize::from(expected.is_some()), "{tool}");
    }
}

#[test]
fn y4_safe_requests_move_to_the_new_server_and_others_drain() {
    let mut story = Story::legacy();
    story.client(&call(1, "slow"));
    story.client(&ask_with(2, "resources/read", r#"{"uri":"a"}"#)).client(&call(3, "pay")).client(&ask(4, "ping"));
    story.client(&cancel(1));
    story.passes(secs(5));
    story.marker_is_written();
    story.forget();
    story.started(2);
    story.shakes_hands(2, ALL);
    story.client_hears(&[&result(4, "{}")]);
    let told = story.told_server(2);
    assert!(told.contains(&ask_with(2, "resources/read", r#"{"uri":"a"}"#)), "{told:?}");
    story.child(2, &result(2, "{}"));
    story.client_hears(&[&result(2, "{}")]);
    story.passes(ms(59_999));
    story.client_hears_nothing();
    story.passes(ms(1));
    let text = story.client_hears_failed_call(3, "server_hung", "unknown");
    assert_eq!(
        text,
        "The server hung (`slow` was cancelled, and neither it nor a ping was answered within 5 s) and was replaced \
         before it answered `pay`; it may or may not have taken effect: check before repeating it."
    );
}

#[test]
fn y4_where_two_cannot_run_they_wait_for_the_new_server() {
    let mut story = Story::legacy_with(ALL, |settings| settings.reload = Reload::Replace);
    story.client(&call(1, "slow")).client(&ask_with(2, "resources/read", r#"{"uri":"a"}"#)).client(&cancel(1));
    story.passes(secs(5));
    story.forget();
    story.marker_is_written();
    story.was_done(&["stop 1: was stopped"]);
    story.exits(1, How::Stopped);
    story.comes_up(2);
    assert!(story.told_server(2).contains(&ask_with(2, "resources/read", r#"{"uri":"a"}"#)));
}

#[test]
fn y5_a_deadline_that_is_seen_late_begins_anew_once() {
    let mut story = Story::legacy();
    story.client(&call(1, "slow")).client(&cancel(1));
    story.is_stopped_for(secs(600));
    story.was_done(&[]);
    story.passes(ms(4_999));
    story.was_done(&[]);
    story.passes(ms(1));
    story.was_done(&["mark 1001: the server hung"]);

    let mut story = Story::legacy_with(ALL, |settings| settings.call_timeout = Some(secs(10)));
    story.client(&call(1, "slow"));
    story.is_stopped_for(secs(600));
    story.client_hears_nothing();
    story.passes(secs(10));
    story.client_hears_failed_call(1, "call_timeout", "unknown");
}

#[test]
fn y6_a_failed_replacement_keeps_the_hung_server_and_is_reported() {
    let mut story = hung();
    story.marker_is_written();
    story.forget();
    story.start_fails("no such file");
    assert_eq!(story.recorded("reload_failed").len(), 1);
    assert_eq!(story.status()["stalled"], true);
    story.client(&ask(2, "tools/list"));
    story.child_hears(1, &[&ask(2, "tools/list")]);
    // The next sign of a hang causes the next attempt.
    story.did();
    story.passes(secs(35));
    story.was_done(&["mark 1001: the server hung"]);
}

#[test]
fn y7_the_status_shows_a_stall_and_its_duration() {
    let mut story = Story::legacy();
    let shown = |story: &Story| (story.status()["stalled"].clone(), story.status()["oldest_request_s"].clone());
    assert_eq!(shown(&story), (json!(false), json!(null)));
    story.client(&call(1, "slow"));
    story.passes(secs(10));
    story.client(&call(2, "quick"));
    story.passes(secs(1));
    assert_eq!(shown(&story), (json!(false), json!(11.0)));
    story.child(1, &result(2, "{}"));
    story.passes(secs(29));
    assert_eq!(shown(&story), (json!(false), json!(40.0)), "it answered another one 29 s ago");
    story.passes(secs(1));
    assert_eq!(shown(&story), (json!(true), json!(41.0)));
    story.child(1, &note("notifications/message"));
    assert_eq!(shown(&story).0, json!(false));
    story.client(&cancel(1));
    assert_eq!(shown(&story), (json!(true), json!(null)), "a ping decides");
    story.answers_private(1, "ping", "{}");
    assert_eq!(shown(&story), (json!(false), json!(null)));
}

#[test]
fn y8_no_ping_is_sent_without_a_server_or_a_client() {
    let mut story = Story::fresh();
    story.client(INITIALIZE).client(&ask(1, "tools/list")).client(&cancel(1));
    assert!(!story.told_server(1).iter().any(|line| line.contains("outlast-")));

    let mut story = Story::legacy_with(ALL, |settings| settings.call_timeout = Some(secs(10)));
    story.client(&call(1, "slow")).client(&call(2, "slow")).client(&cancel(2));
    story.client_leaves(ClientEnd::Closed);
    story.forget();
    story.passes(secs(100));
    story.was_done(&[]);
    story.client_hears_nothing();
}

#[test]
fn y9_a_hung_server_that_exits_is_reported_as_hung() {
    let mut story = Story::legacy();
    story.client(&call(1, "slow")).client(&call(2, "pay")).client(&cancel(1));
    story.passes(secs(5));
    story.exits(1, How::Exited(Exit::Signal(9)));
    story.client_hears_failed_call(2, "server_hung", "unknown");
}

#[test]
fn e7_a_request_lost_to_a_hung_server_is_an_error_with_its_own_code() {
    let mut story = Story::legacy();
    story.client(&call(1, "slow")).client(&ask(2, "x/unheard")).client(&cancel(1));
    story.passes(secs(5));
    story.exits(1, code(1));
    let error = story.client_hears_error(2, 7009, "server_hung", "unknown");
    assert_eq!(error["data"]["exit"], json!(null));
    assert_eq!(error["data"]["generation"], 1);
}

#[test]
fn e8_a_task_that_takes_too_long_is_an_error_with_its_own_code() {
    let mut story = Story::legacy_with(ALL, |settings| settings.call_timeout = Some(ms(1_500)));
    story.child_logs(1, "working");
    story.client(&ask_with(1, "tools/call", r#"{"name":"slow","task":{}}"#));
    story.passes(ms(1_500));
    let error = story.client_hears_error(1, 7016, "call_timeout", "unknown");
    assert_eq!(error["data"]["stderr"], json!(["working"]));
    assert!(error["message"].as_str().is_some_and(|text| text.contains("within 1.5 s")), "{error}");
}

// ---- restarts that do not wait ----------------------------------------------------------------------------

#[test]
fn f1_a_restart_at_once_fails_or_moves_the_calls_of_the_old_server() {
    let mut story = Story::legacy();
    story.client(&call(1, "slow")).client(&ask_with(2, "resources/read", r#"{"uri":"a"}"#)).client(&call(3, "queued"));
    story.asks_restart_now(7);
    story.marker_is_written();
    story.client_hears_nothing();
    story.forget();
    story.comes_up(2);
    // Lines that the old server has not read go to the new one; the other calls are not waited for.
    story.gives_back(1, &["queued"]);
    let text = story.client_hears_failed_call(1, "at_once", "unknown");
    assert_eq!(
        text,
        "The server was restarted at once, as requested, with `slow` unfinished; it may or may not have taken effect."
    );
    let told = story.told_server(2);
    assert!(told.contains(&ask_with(2, "resources/read", r#"{"uri":"a"}"#)), "{told:?}");
    assert!(told.contains(&call(3, "queued")), "{told:?}");
    let did = story.did();
    assert!(did.contains(&"stop 1: was stopped".to_owned()), "{did:?}");
    assert!(!did.iter().any(|done| done.contains("draining")), "{did:?}");
}

#[test]
fn f2_servers_that_drain_already_stop_too() {
    let mut story = Story::legacy();
    story.client(&call(1, "slow"));
    story.reloads();
    story.comes_up(2);
    story.gives_back(1, &[]);
    story.forget();
    story.asks_restart_now(8);
    story.client_hears_failed_call(1, "at_once", "unknown");
    assert_eq!(story.did()[0], "stop 1: was stopped");
}

#[test]
fn f3_it_applies_to_a_running_restart_too() {
    let mut story = Story::legacy();
    story.client(&call(1, "slow"));
    story.reloads();
    story.asks_restart_now(8);
    story.comes_up(2);
    story.gives_back(1, &[]);
    story.client_hears_failed_call(1, "at_once", "unknown");
}

#[test]
fn f4_the_tool_has_an_argument_for_it() {
    let restart = |force: &str| {
        ask_with(1, "tools/call", &format!(r#"{{"name":"restart_server","arguments":{{"force":{force}}}}}"#))
    };
    let mut story = Story::legacy();
    story.client(&call(2, "slow")).client(&restart("true"));
    story.marker_is_written();
    story.comes_up(2);
    story.forget();
    story.gives_back(1, &[]);
    story.client_hears_failed_call(2, "at_once", "unknown");

    let mut story = Story::legacy();
    story.client(&call(2, "slow")).client(&restart("false"));
    story.marker_is_written();
    story.comes_up(2);
    story.forget();
    story.gives_back(1, &[]);
    story.client_hears_nothing();

    let mut story = Story::legacy();
    story.client(&restart("1"));
    let answer = parsed(&story.answer());
    assert_eq!(answer["result"]["content"][0]["text"], "`force` must be true or false.");
    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list")).child(1, &result(1, r#"{"tools":[]}"#));
    let tools = parsed(&story.answer())["result"]["tools"].clone();
    assert_eq!(tools[0]["inputSchema"]["properties"]["force"]["type"], "boolean");
}

#[test]
fn f4_without_blue_green_the_old_server_is_stopped_before_its_calls_are_over() {
    let mut story = Story::legacy_with(ALL, |settings| settings.reload = Reload::Replace);
    story.client(&call(1, "slow"));
    story.asks_restart_now(7);
    story.forget();
    story.marker_is_written();
    story.gives_back(1, &[]);
    story.client_hears_failed_call(1, "at_once", "unknown");
    story.was_done(&["stop 1: was stopped"]);
    story.exits(1, How::Stopped);
    story.was_done(&["start"]);
}

// ---- memory -----------------------------------------------------------------------------------------------

#[test]
fn z1_a_server_above_its_limit_is_replaced_and_its_calls_finish() {
    let mut story = Story::legacy_with(ALL, |settings| settings.memory_max = Some(512 << 20));
    story.client(&call(1, "slow"));
    story.measured(1, 512 << 20);
    story.was_done(&[]);
    story.measured(1, (600 << 20) + 1);
    let record = story.record("server_too_large");
    assert_eq!((record.pid, record.generation), (Some(1001), Some(1)));
    assert_eq!(record.detail.as_deref(), Some("it uses 601 MiB, more than 512 MiB"));
    story.was_done(&["mark 1001: it uses 601 MiB, more than 512 MiB"]);
    story.marker_is_written();
    story.measured(1, 700 << 20);
    story.comes_up(2);
    story.forget();
    story.child(1, &result(1, "{}"));
    story.client_hears(&[&result(1, "{}")]);
}

#[test]
fn z2_a_server_that_is_above_it_again_is_not_replaced_within_a_minute() {
    let mut story = Story::legacy_with(ALL, |settings| settings.memory_max = Some(1 << 20));
    story.measured(1, 2 << 20);
    story.marker_is_written();
    story.comes_up(2);
    story.forget();
    story.passes(ms(59_999));
    story.measured(2, 2 << 20);
    story.was_done(&[]);
    story.passes(ms(1));
    story.measured(2, 2 << 20);
    story.was_done(&["mark 1002: it uses 2 MiB, more than 1 MiB"]);
    // Only the current server is checked, and none without a limit.
    let mut story = Story::legacy();
    story.measured(1, 2 << 30);
    story.measured(7, 2 << 30);
    story.was_done(&[]);
}
