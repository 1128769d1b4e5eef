//! Requests of the client, by the state of the server (q1-q18).

use crate::story::*;

const PROMPTS: &str = r#"{"prompts":[{"name":"p"}]}"#;

/// The policy gives up at the first crash.
fn hopeless(settings: &mut Settings) {
    settings.policy.restarts_max = Some(0);
}

fn given_up() -> Story {
    let mut story = Story::legacy_with(ALL, hopeless);
    story.exits(1, code(1));
    story.forget();
    story
}

fn down() -> Story {
    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.forget();
    story
}

#[test]
fn q1_an_initialize_waits_for_a_server_and_is_sent_again_after_one_end() {
    let mut story = Story::unborn_with(quick);
    story.client(INITIALIZE);
    story.client_hears_nothing();
    story.started(1);
    story.child_hears(1, &[INITIALIZE]);
    story.exits(1, code(1));
    story.client_hears_nothing();
    story.passes(ms(500));
    story.was_done(&["start"]);
    story.started(2);
    story.child_hears(2, &[INITIALIZE]);
    story.child(2, &result(0, &initialize_result("2025-11-25", r#"{"tools":{}}"#)));
    story.client_hears(&[&result(0, &initialize_result("2025-11-25", r#"{"tools":{"listChanged":true}}"#))]);
    story.was_done(&["ready 2"]);
}

#[test]
fn q2_a_discover_is_answered_with_the_last_good_result_while_down() {
    let mut story = Story::modern();
    story.exits(1, code(1));
    story.client(&modern(1, "server/discover", ""));
    let answer = parsed(&story.answer());
    assert_eq!(answer["id"], 1);
    assert_eq!(answer["result"]["supportedVersions"], json!(["2026-07-28"]));
    assert_eq!(answer["result"]["capabilities"]["tools"], json!({"listChanged": true}));

    let mut story = Story::unborn_with(hopeless);
    story.client(&modern(1, "server/discover", ""));
    story.client_hears_nothing();
    story.start_fails("no such file");
    story.client_hears(&[&error(1, -32601, "Method not found")]);
    story.client(&modern(2, "server/discover", ""));
    story.client_hears(&[&error(2, -32601, "Method not found")]);
}

#[test]
fn q3_tools_are_listed_from_memory_while_down() {
    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list"));
    story.child_hears(1, &[&ask(1, "tools/list")]);
    story.child(1, &result(1, r#"{"tools":[{"name":"a"}]}"#));
    let page = story.answer();
    assert_eq!(tool_names(&page), ["a", OURS[0], OURS[1], OURS[2]]);
    story.exits(1, code(1));
    story.client(&ask(1, "tools/list"));
    story.client_hears(&[&page]);
}

#[test]
fn q3_a_list_never_seen_waits_and_then_has_only_our_tools() {
    let mut story = down();
    story.client(&ask(1, "tools/list"));
    story.client_hears_nothing();
    story.passes(secs(1));
    story.started(2);
    story.passes(secs(29));
    assert_eq!(tool_names(&story.answer()), OURS);

    let mut story = given_up();
    story.client(&ask(1, "tools/list"));
    assert_eq!(tool_names(&story.answer()), OURS);
}

#[test]
fn q3_the_list_of_a_server_without_tools_has_our_tools() {
    let mut story = Story::legacy_with(r#"{"prompts":{}}"#, |_| {});
    story.client(&ask(1, "tools/list"));
    assert_eq!(tool_names(&story.answer()), OURS);
    story.child_hears_nothing(1);

    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list"));
    story.child(1, &error(1, -32601, "Method not found"));
    assert_eq!(tool_names(&story.answer()), OURS);
}

#[test]
fn q3_an_incomplete_list_does_not_replace_the_last_complete_list() {
    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list")).child(1, &result(1, r#"{"tools":[{"name":"a"}]}"#));
    story.client(&ask(2, "tools/list")).child(1, &result(2, r#"{"tools":[{"name":"b"}],"nextCursor":"x"}"#));
    story.exits(1, code(1));
    story.forget();
    story.client(&ask(3, "tools/list"));
    assert_eq!(tool_names(&story.answer()), ["a", OURS[0], OURS[1], OURS[2]]);
}

#[test]
fn q4_other_lists_are_served_from_memory_or_wait() {
    for (method, list) in [
        ("prompts/list", PROMPTS),
        ("resources/list", r#"{"resources":[{"uri":"u:1","size":1.0}]}"#),
        ("resources/templates/list", r#"{"resourceTemplates":[{"uriTemplate":"u:{x}"}]}"#),
    ] {
        let mut story = Story::legacy();
        story.client(&ask(1, method)).child(1, &result(1, list));
        story.client_hears(&[&result(1, list)]);
        story.exits(1, code(1));
        story.client(&ask(2, method));
        story.client_hears(&[&result(2, list)]);

        let mut story = down();
        story.client(&ask(1, method));
        story.client_hears_nothing();
        story.passes(secs(1));
        story.started(2);
        story.passes(secs(29));
        story.client_hears_error(1, 7002, "server_down", "not_sent");

        let mut story = given_up();
        story.client(&ask(1, method));
        story.client_hears_error(1, 7003, "gave_up", "not_sent");
    }
}

#[test]
fn q5_a_cursor_is_forwarded_unchanged_and_refused_without_a_server() {
    let asked = r#"{"jsonrpc":"2.0", "id":1,"method":"prompts/list","params":{"cursor":"a\u0062"}}"#;
    let refused = error(1, -32602, "this cursor belongs to a previous server; start again without a cursor");
    let mut story = Story::legacy();
    story.client(asked);
    story.child_hears(1, &[asked]);
    story.exits(1, code(1));
    story.client_hears_nothing();
    story.passes(secs(1));
    story.comes_up(2);
    assert!(story.told_server(2).contains(&asked.to_owned()), "sent again as it is");
    story.exits(2, code(1));
    story.client_hears_error(1, 7001, "ended_again", "unknown");

    let mut story = down();
    story.client(asked);
    story.passes(secs(1));
    story.started(2);
    story.passes(secs(30));
    story.client_hears(&[&refused]);

    let mut story = given_up();
    story.client(asked);
    story.client_hears(&[&refused]);
}

#[test]
fn q5_a_cursor_goes_to_a_child_that_lacks_the_family_too() {
    let asked = ask_with(1, "prompts/list", r#"{"cursor":"b"}"#);
    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up_with(2, r#"{"tools":{}}"#);
    story.forget();
    story.client(&asked);
    story.child_hears(2, &[&asked]);
}

#[test]
fn q6_reads_are_sent_again_unless_they_carry_a_single_use_value() {
    for method in ["resources/read", "prompts/get", "completion/complete", "tasks/get", "tasks/list", "tasks/result"] {
        let mut story = Story::legacy();
        story.client(&ask(1, method));
        story.exits(1, code(1));
        story.client_hears_nothing();
        story.passes(secs(1));
        story.comes_up(2);
        assert_eq!(story.told_server(2).last(), Some(&ask(1, method)), "sent again");
        story.child(2, &result(1, "{}"));
        story.client_hears(&[&result(1, "{}")]);

        for once in [r#"{"requestState":"s"}"#, r#"{"inputResponses":{}}"#] {
            let mut story = Story::legacy();
            story.client(&ask_with(1, method, once));
            story.exits(1, code(1));
            story.client_hears_error(1, 7001, "server_ended", "unknown");
        }

        let mut story = given_up();
        story.client(&ask(1, method));
        story.client_hears_error(1, 7003, "gave_up", "not_sent");

        let mut story = down();
        story.client(&ask(1, method));
        story.passes(secs(1));
        story.started(2);
        story.passes(secs(29));
        story.client_hears_error(1, 7002, "server_down", "not_sent");
    }
}

#[test]
fn q7_a_ping_is_answered_while_no_server_runs() {
    let mut story = Story::legacy();
    story.client(&ask(1, "ping"));
    story.child_hears(1, &[&ask(1, "ping")]);
    story.exits(1, code(1));
    story.client_hears(&[&result(1, "{}")]);
    story.client(&ask(2, "ping"));
    story.client_hears(&[&result(2, "{}")]);
    story.passes(secs(1));
    story.started(2);
    story.client(&ask(3, "ping"));
    story.client_hears(&[&result(3, "{}")]);

    let mut story = given_up();
    story.client(&ask(4, "ping"));
    story.client_hears(&[&result(4, "{}")]);
}

#[test]
fn q7_a_ping_that_waits_for_the_first_child_is_answered_when_that_fails() {
    let mut story = Story::not_started();
    story.client(&ask(1, "ping"));
    story.client_hears_nothing();
    story.start_fails("no such file");
    story.client_hears(&[&result(1, "{}")]);
}

#[test]
fn q8_our_tools_answer_in_every_state() {
    for mut story in [Story::legacy(), down(), given_up()] {
        story.client(&call(1, "server_status"));
        let answer = parsed(&story.answer());
        assert_eq!(answer["result"]["isError"], false);
        assert_eq!(answer["result"]["structuredContent"]["name"], "s");
        story.child_hears_nothing(1);
    }
}

#[test]
fn q9_a_call_in_flight_fails_once_with_an_unknown_outcome() {
    let mut story = Story::legacy();
    story.client(&call(1, "t"));
    story.child_logs(1, "boom");
    story.exits(1, code(3));
    let text = story.client_hears_failed_call(1, "server_ended", "unknown");
    assert_eq!(
        text,
        "The server ended (exit code 3) while `t` was running; it may or may not have taken effect: check before \
         repeating it. It starts again in 1.0 s.\n\nstderr of the server:\nboom"
    );
    story.passes(secs(1));
    story.comes_up(2);
    story.child_hears(2, &[INITIALIZE.replace("\"id\":0", r#""id":"outlast-r-1""#).as_str(), INITIALIZED]);
    story.client_hears_nothing();
}

#[test]
fn q9_a_call_while_down_is_held_and_then_fails_with_the_time_of_the_next_try() {
    let mut story = down();
    story.client(&call(1, "t"));
    story.client_hears_nothing();
    story.passes(secs(1));
    story.started(2);
    story.passes(secs(29));
    let text = story.client_hears_failed_call(1, "server_down", "not_sent");
    assert_eq!(text, "`t` was not run: the server is down (exit code 1). It is being started now.");

    let mut story = given_up();
    story.client(&call(1, "t"));
    story.client_hears_failed_call(1, "gave_up", "not_sent");
}

#[test]
fn q9_a_call_that_was_not_written_goes_to_the_next_child() {
    let mut story = Story::legacy();
    story.client(&call(1, "t")).client(&call(2, "t"));
    story.exits_unsent(1, code(1), &[r#""id":2"#]);
    story.client_hears_failed_call(1, "server_ended", "unknown");
    story.passes(secs(1));
    story.comes_up(2);
    assert_eq!(story.told_server(2).last(), Some(&call(2, "t")));
    story.exits(2, code(1));
    story.client_hears_failed_call(2, "server_ended", "unknown");
}

#[test]
fn q9_only_an_annotated_call_is_sent_again_and_only_if_allowed() {
    let tools = r#"{"tools":[{"name":"r","annotations":{"readOnlyHint":true}},{"name":"i","annotations":{"idempotentHint":true}},{"name":"w","annotations":{"readOnlyHint":false}}]}"#;
    for (retry, tool, params, again) in [
        (Retry::Annotated, "r", "", true),
        (Retry::Annotated, "i", "", true),
        (Retry::Annotated, "w", "", false),
        (Retry::Annotated, "x", "", false),
        (Retry::Annotated, "r", r#","requestState":"s""#, false),
        (Retry::Annotated, "r", r#","inputResponses":{}"#, false),
        (Retry::Never, "r", "", false),
    ] {
        let mut story = Story::legacy_with(ALL, |settings| settings.retry = retry);
        story.client(&ask(1, "tools/list")).child(1, &result(1, tools));
        story.forget();
        let asked = ask_with(2, "tools/call", &format!(r#"{{"name":"{tool}"{params}}}"#));
        story.client(&asked);
        story.exits(1, code(1));
        story.passes(secs(1));
        story.comes_up(2);
        assert_eq!(story.told_server(2).contains(&asked), again, "{asked} {retry:?}");
        if !again {
            story.client_hears_failed_call(2, "server_ended", "unknown");
        }
    }
    let mut story = Story::legacy_with(ALL, |settings| settings.retry = Retry::Annotated);
    story.client(&ask(1, "tools/list")).child(1, &result(1, tools));
    story.forget();
    story.client(&ask_with(2, "tools/call", r#"{"name":"r","task":{}}"#));
    story.exits(1, code(1));
    story.client_hears_error(2, 7001, "server_ended", "unknown");
}

#[test]
fn q10_a_listen_is_acknowledged_while_no_server_runs() {
    let listen = modern(5, "subscriptions/listen", r#""notifications":{"toolsListChanged":true}"#);
    let acknowledged = r#"{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{"_meta":{"io.modelcontextprotocol/subscriptionId":5},"notifications":{"toolsListChanged":true}}}"#;
    let mut story = Story::modern();
    story.client(&listen);
    story.child_hears(1, &[&listen]);
    story.client_hears_nothing();

    let mut story = Story::modern();
    story.exits(1, code(1));
    story.client(&listen);
    story.client_hears(&[acknowledged]);
    story.passes(secs(60));
    story.client_hears_nothing();

    let mut story = Story::not_started();
    story.client(&listen);
    story.start_fails("no such file");
    story.client_hears(&[acknowledged]);
}

#[test]
fn q11_a_log_level_is_remembered_at_its_result() {
    let asked = ask_with(1, "logging/setLevel", r#"{"level":"debug"}"#);
    let mut story = Story::legacy();
    story.client(&asked);
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up(2);
    assert_eq!(story.told_server(2).last(), Some(&asked), "sent again as it had no result");
    story.child(2, &result(1, "{}"));
    story.client_hears(&[&result(1, "{}")]);
    story.exits(2, code(1));
    story.passes(secs(1));
    story.comes_up(3);
    assert_eq!(
        story.told_server(3).last(),
        Some(&ask_with(private(3), "logging/setLevel", r#"{"level":"debug"}"#)),
        "restored in our own name"
    );

    let mut story = given_up();
    story.client(&asked);
    story.client_hears_error(1, 7003, "gave_up", "not_sent");
}

#[test]
fn q12_the_set_of_subscriptions_changes_at_the_result() {
    let subscribe = |id| ask_with(id, "resources/subscribe", r#"{"uri":"u:1"}"#);
    let unsubscribe = ask_with(3, "resources/unsubscribe", r#"{"uri":"u:1"}"#);
    let mut story = Story::legacy();
    story.client(&subscribe(1)).child(1, &error(1, -32002, "no"));
    story.client(&subscribe(2)).child(1, &result(2, "{}"));
    story.client(&unsubscribe);
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up(2);
    let told = story.told_server(2);
    assert_eq!(told[2..], [ask_with(private(2), "resources/subscribe", r#"{"uri":"u:1"}"#), unsubscribe]);
    story.child(2, &result(3, "{}"));
    story.exits(2, code(1));
    story.passes(secs(1));
    story.comes_up(3);
    assert_eq!(story.told_server(3).len(), 2, "initialize and initialized are all");
}

#[test]
fn q13_any_other_request_is_never_sent_twice() {
    let mut story = Story::legacy();
    story.client(&ask(1, "acme/do"));
    story.child_hears(1, &[&ask(1, "acme/do")]);
    story.exits(1, code(1));
    story.client_hears_error(1, 7001, "server_ended", "unknown");

    let mut story = down();
    story.client(&ask(1, "acme/do"));
    story.passes(secs(1));
    story.comes_up(2);
    assert_eq!(story.told_server(2).last(), Some(&ask(1, "acme/do")));

    let mut story = given_up();
    story.client(&ask(1, "acme/do"));
    let error = story.client_hears_error(1, 7003, "gave_up", "not_sent");
    assert_eq!(
        error["message"],
        "`acme/do` was not run: the server is not running (exit code 1; 1 crash). It is not started again by \
         itself: call `restart_server`."
    );
}

#[test]
fn q14_a_capability_that_is_missing_now_is_answered_by_outlast() {
    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up_with(2, "{}");
    story.forget();
    for (id, method, answer) in [
        (1, "prompts/list", r#"{"prompts":[]}"#),
        (2, "resources/list", r#"{"resources":[]}"#),
        (3, "resources/templates/list", r#"{"resourceTemplates":[]}"#),
        (4, "completion/complete", r#"{"completion":{"values":[]}}"#),
        (5, "logging/setLevel", "{}"),
        (6, "resources/subscribe", "{}"),
        (7, "resources/unsubscribe", "{}"),
    ] {
        story.client(&ask(id, method));
        story.client_hears(&[&result(id, answer)]);
    }
    story.client(&ask(8, "tools/list"));
    assert_eq!(tool_names(&story.answer()), OURS);
    story.child_hears_nothing(2);
}

#[test]
fn q14_a_capability_of_a_discover_result_that_is_missing_now_is_answered_by_outlast() {
    let mut story = Story::modern();
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up_with(2, r#"{"tools":{}}"#);
    story.forget();
    story.client(&modern(1, "prompts/list", ""));
    let answer = parsed(&story.answer());
    assert_eq!(answer["result"]["prompts"], json!([]));
    assert_eq!(answer["result"]["resultType"], "complete");
}

#[test]
fn q15_a_request_sent_again_once_fails_at_the_next_exit() {
    let mut story = Story::legacy();
    story.client(&ask(1, "prompts/list"));
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up(2);
    story.exits(2, code(1));
    story.client_hears_error(1, 7001, "ended_again", "unknown");
}

#[test]
fn q15_requests_sent_again_are_held_in_client_order_up_to_the_limit() {
    let mut story = Story::legacy_with(ALL, |settings| settings.limits.holding.held_max = 2);
    story.client(&ask(1, "prompts/list")).client(&ask(2, "resources/list"));
    story.client(&ask(3, "tools/list")).client(&call(4, "t"));
    story.exits_unsent(1, code(1), &[r#""id":4"#]);
    let told = story.told_client();
    assert_eq!(told.len(), 2, "{told:#?}");
    let third = parsed(&told[0]);
    assert_eq!((&third["id"], &third["error"]["data"]["reason"]), (&json!(3), &json!("server_ended")));
    let text = failed_call(&parsed(&told[1]), 4, "hold_full", "not_sent");
    assert_eq!(text, "`t` was not run: 2 requests are already waiting for the server. It starts again in 1.0 s.");
    story.passes(secs(1));
    story.comes_up(2);
    assert_eq!(story.told_server(2)[2..], [ask(1, "prompts/list"), ask(2, "resources/list")]);
}

#[test]
fn q16_an_id_used_twice_gets_two_answers() {
    let mut story = Story::legacy();
    story.client(&call(1, "a")).client(&call(1, "b"));
    story.child_hears(1, &[&call(1, "a"), &call(1, "b")]);
    story.child(1, &result(1, r#"{"x":1}"#));
    story.exits(1, code(1));
    let told = story.told_client();
    assert_eq!(told[0], result(1, r#"{"x":1}"#));
    let text = failed_call(&parsed(&told[1]), 1, "server_ended", "unknown");
    assert!(text.contains("`b`"), "the first one had its answer: {text}");
    assert_eq!(told.len(), 2);
}

#[test]
fn q16_ids_match_by_type_and_value() {
    for (asked, answered) in [
        ("1", "1"),
        (r#""a""#, r#""\u0061""#),
        ("-7", "-7"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
    ] {
        let mut story = Story::legacy();
        story.client(&call(asked, "t")).child(1, &result(answered, "{}"));
        story.client_hears(&[&result(answered, "{}")]);
    }
    let mut story = Story::legacy();
    story.client(&call(1, "t")).child(1, &result(r#""1""#, "{}"));
    story.client_hears_nothing();
}

#[test]
fn q17_a_request_with_an_unusable_id_is_forwarded_and_not_tracked() {
    for id in ["null", "1.5"] {
        let mut story = Story::legacy();
        story.client(&call(id, "t"));
        story.child_hears(1, &[&call(id, "t")]);
        story.child(1, &result(id, "{}"));
        story.client_hears(&[&result(id, "{}")]);
        story.client(&call(id, "t"));
        story.exits(1, code(1));
        story.client_hears_nothing();
    }
    let mut story = Story::legacy();
    story.client(&call("null", "t"));
    story.exits_unsent(1, code(1), &["null"]);
    story.passes(secs(1));
    story.comes_up(2);
    assert_eq!(story.told_server(2).last(), Some(&call("null", "t")), "what no pipe took is sent to the next");
}

#[test]
fn q18_a_line_that_is_not_json_is_refused_and_not_forwarded() {
    for line in ["{", "nonsense", r#"{"id":1,}"#] {
        let mut story = Story::legacy();
        story.client(line);
        let answer = parsed(&story.answer());
        assert_eq!(answer["error"]["code"], -32700);
        assert!(answer.as_object().is_some_and(|answer| answer["id"].is_null()));
        story.child_hears_nothing(1);
    }
}

#[test]
fn q1_a_second_opening_waits_no_longer_than_other_requests() {
    let mut story = down();
    story.client(&INITIALIZE.replace("\"id\":0", "\"id\":1"));
    story.passes(secs(1));
    story.started(2);
    story.passes(secs(28));
    story.client_hears_nothing();
    story.passes(secs(1));
    assert_eq!(parsed(&story.answer())["result"]["serverInfo"]["name"], "outlast");
}

#[test]
fn q2_a_discover_that_is_no_opening_waits_no_longer_than_other_requests() {
    let mut story = Story::fresh();
    story.client(&modern(1, "tools/list", "")).child(1, &result(1, r#"{"tools":[]}"#));
    story.exits(1, code(1));
    story.forget();
    story.client(&modern(2, "server/discover", ""));
    story.passes(secs(1));
    story.started(2);
    story.passes(secs(29));
    story.client_hears(&[&error(2, -32601, "Method not found")]);
}

#[test]
fn q10_a_listen_that_lost_its_child_before_the_acknowledgement_gets_one() {
    let listen = modern(5, "subscriptions/listen", r#""notifications":{"toolsListChanged":true}"#);
    let mut story = Story::modern_with(hopeless);
    story.client(&listen);
    story.exits(1, code(1));
    assert_eq!(parsed(&story.answer())["method"], "notifications/subscriptions/acknowledged");
}

#[test]
fn q10_a_listen_outlives_its_child_at_any_limit_of_kept_requests() {
    let listen = modern(5, "subscriptions/listen", r#""notifications":{"toolsListChanged":true}"#);
    let mut story = Story::modern_with(|settings| settings.limits.holding.held_bytes_max = 10);
    story.client(&listen);
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up(2);
    assert_eq!(story.told_server(2).last(), Some(&listen));
}

#[test]
fn q14_settings_that_outlast_accepted_are_sent_to_the_first_child_that_supports_them() {
    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up_with(2, "{}");
    story.client(&ask_with(1, "logging/setLevel", r#"{"level":"debug"}"#));
    story.client(&ask_with(2, "resources/subscribe", r#"{"uri":"u:1"}"#));
    story.client(&ask_with(3, "resources/subscribe", r#"{"uri":"u:2"}"#));
    story.client(&ask_with(4, "resources/unsubscribe", r#"{"uri":"u:2"}"#));
    story.exits(2, code(1));
    story.passes(secs(1));
    story.comes_up(3);
    assert_eq!(
        story.told_server(3)[2..],
        [
            ask_with(private(3), "logging/setLevel", r#"{"level":"debug"}"#),
            ask_with(private(4), "resources/subscribe", r#"{"uri":"u:1"}"#)
        ]
    );
}

#[test]
fn q16_a_cancellation_means_the_oldest_of_an_id() {
    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.forget();
    story.client(&call(1, "a")).client(&call(1, "b")).client(&cancel(1));
    story.passes(secs(1));
    story.comes_up(2);
    assert_eq!(story.told_server(2)[2..], [call(1, "b")]);
}

#[test]
fn q18_a_line_too_long_is_refused_under_its_own_id() {
    for (start, id) in [
        (r#"{"jsonrpc":"2.0","id":"a","method":"tools/call","params":{"name":"xxxx"#, json!("a")),
        (r#"{"params":{"id":7,"x":"xxxxx"#, json!(null)),
    ] {
        let mut story = Story::legacy();
        story.happens(Event::ClientSaidTooMuch(start.into()));
        let answer = parsed(&story.answer());
        assert_eq!((&answer["id"], &answer["error"]["code"]), (&id, &json!(-32600)));
        story.child_hears_nothing(1);
    }
}

#[test]
fn q15_a_request_too_large_to_keep_is_not_sent_again() {
    let mut story = Story::legacy_with(ALL, |settings| settings.limits.holding.held_bytes_max = 80);
    story.client(&ask(1, "prompts/list")).client(&ask(2, "resources/list"));
    story.exits(1, code(1));
    story.client_hears_error(2, 7001, "server_ended", "unknown");
}

#[test]
fn q1_a_second_opening_on_a_serving_child_has_no_time_limit() {
    let mut story = Story::legacy();
    story.client(&INITIALIZE.replace("\"id\":0", "\"id\":1"));
    story.passes(secs(600));
    story.was_done(&[]);
}
