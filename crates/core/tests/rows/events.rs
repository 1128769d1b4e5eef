//! What follows each event (x1-x20).

use crate::story::*;

fn replayed(k: u32) -> String {
    INITIALIZE.replace("\"id\":0", &format!("\"id\":{}", private(k)))
}

fn hopeless(settings: &mut Settings) {
    settings.policy.restarts_max = Some(0);
}

#[test]
fn x1_all_answers_due_at_an_exit_are_sent_at_once_and_in_client_order() {
    let mut story = Story::legacy();
    story.child(1, &ask(5, "roots/list"));
    story.told_client();
    story.client(&call(1, "a")).client(&ask(2, "prompts/list")).client(&ask(3, "ping")).client(&ask(4, "acme/do"));
    story.exits(1, code(1));
    let told = story.told_client();
    assert_eq!(told.len(), 4, "{told:#?}");
    assert_eq!(told[0], cancelled(5));
    failed_call(&parsed(&told[1]), 1, "server_ended", "unknown");
    assert_eq!(told[2], result(3, "{}"));
    assert_eq!(parsed(&told[3])["error"]["code"], 7001);
    story.client(&call(6, "b"));
    story.passes(secs(1));
    story.comes_up(2);
    story.child_hears(2, &[&replayed(1), INITIALIZED, &ask(2, "prompts/list"), &call(6, "b")]);
}

#[test]
fn x1_answers_of_an_ended_child_are_dropped() {
    let mut story = Story::legacy();
    story.client(&ask(1, "prompts/list"));
    story.exits(1, code(1));
    story.child(1, &result(1, r#"{"prompts":[]}"#));
    story.client_hears_nothing();
}

#[test]
fn x2_nothing_is_replayed_for_a_client_that_has_not_opened() {
    let mut story = Story::fresh();
    story.client(&call(1, "t"));
    story.exits(1, code(1));
    story.client_hears_failed_call(1, "server_ended", "unknown");
    story.passes(secs(1));
    story.started(2);
    story.child_hears_nothing(2);
    story.client(INITIALIZE);
    story.child_hears(2, &[INITIALIZE]);
}

#[test]
fn x3_a_clean_exit_of_the_server_ends_outlast() {
    let mut story = Story::legacy();
    story.client(&call(1, "t"));
    story.exits(1, code(0));
    story.client_hears_failed_call(1, "server_ended", "unknown");
    story.was_done(&["end 0"]);

    let mut story = Story::fresh();
    story.client(INITIALIZE);
    story.exits(1, code(0));
    story.was_done(&[]);
    story.passes(secs(1));
    story.was_done(&["start"]);
}

#[test]
fn x3_or_the_next_request_starts_it_again() {
    let mut story = Story::legacy_with(ALL, |settings| settings.on_clean_exit = OnCleanExit::Restart);
    story.client(&call(1, "t"));
    story.exits(1, code(0));
    story.client_hears_failed_call(1, "server_ended", "unknown");
    story.passes(secs(3600));
    story.was_done(&[]);
    story.client(&ask(2, "ping"));
    story.client_hears(&[&result(2, "{}")]);
    story.was_done(&[]);
    story.client(&call(3, "t"));
    story.was_done(&["start"]);
    story.client(&call(4, "t"));
    story.was_done(&[]);
    story.comes_up(2);
    assert_eq!(story.told_server(2)[2..], [call(3, "t"), call(4, "t")]);
    story.client_hears_nothing();
}

#[test]
fn x3_a_request_that_is_sent_again_starts_it_too() {
    let mut story = Story::legacy_with(ALL, |settings| settings.on_clean_exit = OnCleanExit::Restart);
    story.client(&ask(1, "prompts/list"));
    story.exits(1, code(0));
    story.was_done(&["start"]);
    story.comes_up(2);
    assert_eq!(story.told_server(2).last(), Some(&ask(1, "prompts/list")));
}

#[test]
fn x4_the_call_that_caused_the_exit_is_answered_when_the_server_is_ready_again() {
    for (calls, due) in [
        (&["restart_server", "other"][..], Some("restart_server")),
        (&["transfer"][..], None),
        (&["a", "b"][..], None),
        (&["restart_server", "restart_server"][..], None),
    ] {
        let mut story = Story::legacy_with(ALL, |settings| settings.tools = false);
        for (id, tool) in (1..).zip(calls) {
            story.client(&call(id, tool));
        }
        story.exits(1, code(42));
        story.was_done(&["start"]);
        let failed = story.told_client();
        assert_eq!(failed.len(), calls.len() - usize::from(due.is_some()), "{calls:?}");
        story.comes_up(2);
        let told = story.told_client();
        match due {
            Some(_) => {
                assert_eq!(
                    told,
                    [result(
                        1,
                        r#"{"content":[{"text":"The server exited to restart, as requested, and is ready again (pid 1002).","type":"text"}],"isError":false}"#
                    )]
                );
            }
            None => assert_eq!(told, [""; 0]),
        }
    }
}

#[test]
fn x4_the_answer_fits_the_schema_that_the_tool_promised() {
    let words = "The server exited to restart, as requested, and is ready again (pid 1002).";
    for (schema, expected) in [
        (
            r#"{"type":"object","properties":{"result":{"type":"string"}},"required":["result"]}"#,
            json!({"content": [{"type": "text", "text": words}], "isError": false, "structuredContent": {"result": words}}),
        ),
        (
            r#"{"type":"object","properties":{"ok":{"type":"boolean"}}}"#,
            json!({"content": [{"type": "text", "text": format!("restarted: {words}")}], "isError": true}),
        ),
        (
            r#"{"type":"object","properties":{"result":{"type":"string"},"n":{"type":"number"}}}"#,
            json!({"content": [{"type": "text", "text": format!("restarted: {words}")}], "isError": true}),
        ),
    ] {
        let mut story = Story::legacy();
        story.client(&ask(1, "tools/list"));
        story.child(1, &result(1, &format!(r#"{{"tools":[{{"name":"restart_server","outputSchema":{schema}}}]}}"#)));
        story.client(&call(2, "restart_server"));
        story.exits(1, code(42));
        story.forget();
        story.comes_up(2);
        assert_eq!(parsed(&story.answer())["result"], expected);
    }
}

#[test]
fn x4_a_server_that_does_not_start_again_is_an_error() {
    let mut story = Story::legacy_with(ALL, |settings| settings.tools = false);
    story.client(&call(1, "restart_server"));
    story.exits(1, code(42));
    story.started(2);
    story.exits(2, code(3));
    story.client_hears_nothing();
    story.passes(secs(30));
    let answer = parsed(&story.answer());
    assert_eq!(answer["result"]["isError"], true);
    assert_eq!(
        answer["result"]["content"][0]["text"],
        "The server exited to restart, as requested, and is not ready again: exit code 3."
    );
}

#[test]
fn x4_a_task_call_fails_and_a_call_of_a_draining_child_is_answered_at_once() {
    let mut story = Story::legacy_with(ALL, |settings| settings.tools = false);
    story.client(&ask_with(1, "tools/call", r#"{"name":"restart_server","task":{}}"#));
    story.exits(1, code(42));
    story.client_hears_error(1, 7001, "server_ended", "unknown");

    let mut story = Story::legacy_with(ALL, |settings| settings.tools = false);
    story.client(&call(1, "restart_server"));
    story.reloads();
    story.comes_up(2);
    story.forget();
    story.exits(1, code(42));
    assert_eq!(parsed(&story.answer())["result"]["isError"], false);
}

#[test]
fn x4_exits_in_a_row_are_throttled() {
    let mut story = Story::legacy();
    story.exits(1, code(42));
    story.was_done(&["start"]);
    story.comes_up(2);
    story.forget();
    story.passes(ms(400));
    story.exits(2, code(42));
    story.was_done(&[]);
    story.passes(ms(600));
    story.was_done(&["start"]);
}

#[test]
fn x5_a_child_that_closes_its_stdout_has_ended() {
    let mut story = Story::legacy();
    story.client(&call(1, "t"));
    story.exits(1, How::ClosedStdout);
    let text = story.client_hears_failed_call(1, "server_ended", "unknown");
    assert!(text.starts_with("The server ended (closed its stdout) while"), "{text}");
    story.passes(secs(1));
    story.was_done(&["start"]);
}

#[test]
fn x6_messages_before_the_exit_count() {
    let mut story = Story::legacy();
    story.client(&call(1, "t")).client(&call(2, "t"));
    story.child(1, &result(1, "{}"));
    story.exits(1, code(1));
    let told = story.told_client();
    assert_eq!(told[0], result(1, "{}"));
    failed_call(&parsed(&told[1]), 2, "server_ended", "unknown");
    assert_eq!(told.len(), 2);
}

#[test]
fn x7_a_candidate_takes_the_place_of_a_server_that_ends() {
    let mut story = Story::legacy();
    story.client(&call(1, "t"));
    story.reloads();
    story.started(2);
    story.forget();
    story.exits(1, code(1));
    story.client_hears_failed_call(1, "server_ended", "unknown");
    story.client(&call(2, "t"));
    story.passes(secs(5));
    story.was_done(&[]);
    assert_eq!(story.status()["crashes"], 1);
    story.child(2, &result(private(1), &initialize_result("2025-11-25", ALL)));
    story.child_hears(2, &[INITIALIZED, &call(2, "t")]);
    let did = story.did();
    assert_eq!(did[0], "ready 2");
    assert!(did[1].starts_with("answer 7: "), "{did:?}");
}

#[test]
fn x7_a_server_that_ends_while_the_build_runs_waits_for_the_build() {
    for exit in [0, 1] {
        let mut story = Story::legacy_with(ALL, |settings| settings.build = true);
        story.reloads();
        story.forget();
        story.exits(1, code(exit));
        story.passes(secs(5));
        story.was_done(&[]);
        story.client(&call(1, "t"));
        story.client_hears_nothing();
        story.happens(Event::BuildEnded(Ok(())));
        story.was_done(&["start"]);
        story.comes_up(2);
        assert_eq!(story.told_server(2).last(), Some(&call(1, "t")));
        let did = story.did();
        assert!(did[1].starts_with("answer 7: "), "{did:?}");
    }
    let mut story = Story::legacy_with(ALL, |settings| settings.build = true);
    story.reloads();
    story.forget();
    story.exits(1, code(1));
    story.passes(secs(5));
    story.happens(Event::BuildEnded(Err("no".into())));
    story.passes(ms(1));
    let did = story.did();
    assert!(did[0].starts_with("refuse 7: "), "{did:?}");
    assert_eq!(did[1..], ["start"], "the policy goes on");
}

#[test]
fn x7_a_server_that_ends_while_the_candidate_is_spawned_is_replaced_by_it() {
    let mut story = Story::legacy();
    story.reloads();
    story.exits(1, code(1));
    story.client(&call(1, "t"));
    story.passes(secs(5));
    story.was_done(&["mark 1001: new code", "start"]);
    story.comes_up(2);
    assert_eq!(story.told_server(2).last(), Some(&call(1, "t")));
}

#[test]
fn x8_the_end_of_a_candidate_is_no_crash() {
    let mut story = Story::legacy();
    story.client(&call(1, "t"));
    story.reloads();
    story.started(2);
    story.forget();
    story.exits(2, code(1));
    let did = story.did();
    assert!(did[0].starts_with("refuse 7: "), "{did:?}");
    assert_eq!(story.status()["crashes"], 0);
    story.child(1, &result(1, "{}"));
    story.client_hears(&[&result(1, "{}")]);
}

#[test]
fn x9_requests_left_by_a_draining_child_go_to_the_current_child_at_once() {
    let mut story = Story::legacy();
    story.client(&call(1, "a")).client(&ask(2, "prompts/list")).client(&call(3, "b"));
    story.reloads();
    story.comes_up(2);
    story.forget();
    story.exits_unsent(1, code(1), &[r#""id":3"#]);
    let text = story.client_hears_failed_call(1, "server_ended", "unknown");
    assert!(text.ends_with("check before repeating it."), "{text}");
    story.child_hears(2, &[&ask(2, "prompts/list"), &call(3, "b")]);
    assert_eq!(story.status()["crashes"], 0);
    story.was_done(&[]);
}

#[test]
fn x10_a_draining_child_is_never_started_again() {
    let mut story = Story::legacy();
    story.client(&call(1, "slow"));
    story.reloads();
    story.comes_up(2);
    story.client(&call(2, "t"));
    story.forget();
    story.exits(2, code(1));
    story.client_hears_failed_call(2, "server_ended", "unknown");
    story.client(&call(3, "t"));
    story.child_hears_nothing(1);
    story.child(1, &result(1, "{}"));
    story.client_hears(&[&result(1, "{}")]);
    story.passes(secs(1));
    story.was_done(&["stop 1: was stopped", "start"]);
    story.comes_up(3);
    assert_eq!(story.told_server(3).last(), Some(&call(3, "t")));
}

#[test]
fn x11_requests_of_an_ended_child_are_cancelled_under_the_id_the_client_knows() {
    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up(2);
    story.child(2, &ask(1, "roots/list")).child(2, &ask(2, "roots/list"));
    story.client(&result(private(3), "{}"));
    story.forget();
    story.exits(2, code(1));
    story.client_hears(&[&cancelled(private(2))]);

    let mut story = Story::legacy();
    story.child(1, &ask(1, "roots/list"));
    story.reloads();
    story.told_client();
    story.comes_up(2);
    story.client_hears(&[&cancelled(1)]);
    story.client(&result(1, "{}"));
    story.child_hears_nothing(1);
}

#[test]
fn x12_a_restart_of_a_serving_child_runs_beside_it() {
    let mut story = Story::legacy();
    story.reloads();
    story.started(2);
    story.client(&call(1, "t"));
    story.child_hears(1, &[&call(1, "t")]);
    story.shakes_hands(2, ALL);
    story.client(&call(2, "t"));
    assert_eq!(story.told_server(2).last(), Some(&call(2, "t")));
}

#[test]
fn x13_a_restart_skips_the_backoff_and_forgives_a_give_up() {
    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.reloads();
    story.was_done(&["mark 1001: new code", "start"]);
    story.comes_up(2);
    let did = story.did();
    assert_eq!(did[0], "ready 2");
    assert!(did[1].starts_with("answer 7: "), "{did:?}");

    let mut story = Story::legacy_with(ALL, hopeless);
    story.exits(1, code(1));
    story.passes(secs(100));
    story.was_done(&[]);
    story.reloads();
    story.was_done(&["mark 1001: new code", "start"]);
    story.started(2);
    story.child_logs(2, "still broken");
    story.exits(2, code(1));
    let did = story.did();
    assert!(did[0].starts_with("refuse 7: ") && did[0].contains("still broken"), "{did:?}");
    story.client(&call(1, "t"));
    story.client_hears_failed_call(1, "gave_up", "not_sent");
    // Only time in service and `resume` clear the count.
    assert_eq!(story.status()["crashes"], 2);
}

#[test]
fn x14_a_requested_restart_does_not_wait_for_a_handshake() {
    // A fresh server with an open request of the client's opening.
    let mut story = Story::fresh();
    story.client(INITIALIZE);
    story.reloads();
    story.was_done(&["mark 1001: new code", "stop 1: was stopped", "start"]);
    story.started(2);
    assert_eq!(story.told_server(2), [INITIALIZE]);
    story.exits(1, How::Stopped);
    story.client_hears_nothing();
    story.was_done(&[]);
    story.child(2, &result(0, &initialize_result("2025-11-25", ALL)));
    assert_eq!(parsed(&story.answer())["id"], 0);
    let did = story.did();
    assert_eq!(did[0], "ready 2");
    assert!(did[1].starts_with("answer 7: "), "{did:?}");
    story.child_hears_nothing(2);

    // A new server in its handshake, and a call that waits for it.
    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.passes(secs(1));
    story.started(2);
    story.client(&call(1, "t"));
    story.forget();
    story.reloads();
    story.was_done(&["mark 1002: new code", "stop 2: was stopped", "start"]);
    story.exits(2, How::Stopped);
    story.comes_up(3);
    assert_eq!(story.told_server(3).last(), Some(&call(1, "t")));
    story.client_hears_nothing();
}

#[test]
fn x14_a_restart_request_is_answered_if_the_new_child_does_not_answer_the_opening() {
    let mut story = Story::fresh();
    story.client(INITIALIZE);
    story.reloads();
    story.exits(1, How::Stopped);
    story.started(2);
    story.forget();
    story.child_logs(2, "ImportError");
    story.exits(2, code(1));
    let did = story.did();
    assert!(did[0].starts_with("refuse 7: ") && did[0].contains("ImportError"), "{did:?}");
}

#[test]
fn x14_a_changed_file_does_not_disturb_a_handshake() {
    let mut story = Story::fresh();
    story.client(INITIALIZE);
    story.asks_restart(7, Origin::Watch, "src/a.py changed");
    story.was_done(&[]);
    story.child(1, &result(0, &initialize_result("2025-11-25", ALL)));
    story.was_done(&["ready 1", "mark 1001: src/a.py changed"]);

    let mut story = Story::not_started();
    story.asks_restart(7, Origin::Watch, "src/a.py changed");
    story.was_done(&[]);
    story.started(1);
    story.was_done(&["mark 1001: src/a.py changed"]);
}

#[test]
fn x15_requests_during_a_restart_share_the_next_restart() {
    let mut story = Story::legacy();
    story.reloads();
    story.asks_restart(8, Origin::Watch, "a");
    story.asks_restart(9, Origin::Control, "b");
    story.started(2);
    story.asks_restart(10, Origin::Control, "a");
    story.forget();
    story.child(2, &result(private(1), &initialize_result("2025-11-25", ALL)));
    let did = story.did();
    assert!(did.iter().any(|did| did.starts_with("answer 7: ")), "{did:?}");
    assert_eq!(did.last().map(String::as_str), Some("mark 1002: a; b"));
    story.marker_is_written();
    story.started(3);
    story.exits(3, code(1));
    let did = story.did();
    let refused: Vec<&str> = did.iter().filter_map(|did| did.strip_prefix("refuse ")).collect();
    assert_eq!(refused.len(), 3, "{did:?}");
    assert!(refused[0].starts_with("8: ") && refused[1].starts_with("9: ") && refused[2].starts_with("10: "));
    assert!(!did.iter().any(|did| did.starts_with("mark ")), "and no more than one");
}

#[test]
fn x15_a_restart_that_failed_lets_the_next_one_run_too() {
    let mut story = Story::legacy();
    story.reloads();
    story.asks_restart(8, Origin::Control, "again");
    story.started(2);
    story.forget();
    story.exits(2, code(1));
    let did = story.did();
    assert!(did[0].starts_with("refuse 7: "), "{did:?}");
    assert_eq!(did[1..], ["mark 1001: again"]);
}

#[test]
fn x16_answers_still_due_are_forwarded_after_the_end_of_stdin() {
    let mut story = Story::legacy();
    story.client(&call(1, "a")).client(&call(2, "b"));
    story.forget();
    story.client_leaves(ClientEnd::Closed);
    story.was_done(&["stop 1: was stopped"]);
    story.child(1, &result(1, "{}"));
    story.client_hears(&[&result(1, "{}")]);
    story.exits(1, How::Stopped);
    story.client_hears_failed_call(2, "stopping", "unknown");
    story.was_done(&["end 0"]);
}

#[test]
fn x17_a_client_that_leaves_while_no_server_runs_ends_outlast_at_once() {
    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.client(&call(1, "t")).client(&ask(2, "acme/do"));
    story.forget();
    story.client_leaves(ClientEnd::Closed);
    let told = story.told_client();
    assert_eq!(told.len(), 2);
    failed_call(&parsed(&told[0]), 1, "stopping", "not_sent");
    story.was_done(&["end 0"]);
    story.client_leaves(ClientEnd::Closed);
    story.passes(secs(100));
    story.was_done(&[]);

    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.passes(secs(1));
    story.started(2);
    story.client(&call(1, "t"));
    story.forget();
    story.client_leaves(ClientEnd::Closed);
    story.client_hears_failed_call(1, "stopping", "not_sent");
    story.was_done(&["stop 2: was stopped"]);
    story.exits(2, How::Stopped);
    story.was_done(&["end 0"]);

    let mut story = Story::not_started();
    story.client_leaves(ClientEnd::Closed);
    story.was_done(&[]);
    story.started(1);
    story.was_done(&["stop 1: was stopped"]);
    story.exits(1, How::Stopped);
    story.was_done(&["end 0"]);
}

#[test]
fn x17_a_waiting_call_of_outlasts_tool_is_answered() {
    let mut story = Story::legacy();
    story.client(&call(1, "restart_server"));
    story.asks_restart(8, Origin::Control, "b");
    story.forget();
    story.client_leaves(ClientEnd::Closed);
    assert_eq!(parsed(&story.answer())["id"], 1);
    let did = story.did();
    assert!(did.iter().any(|did| did.starts_with("refuse 8: ")), "{did:?}");
    story.marker_is_written();
    story.exits(1, How::Stopped);
    story.was_done(&["end 0"]);
    story.asks_restart(9, Origin::Control, "c");
    let did = story.did();
    assert!(did[0].starts_with("refuse 9: "), "{did:?}");
}

#[test]
fn x18_build_and_candidate_are_stopped_and_nothing_is_started() {
    let mut story = Story::legacy_with(ALL, |settings| settings.build = true);
    story.reloads();
    story.forget();
    story.client_leaves(ClientEnd::Closed);
    let did = story.did();
    assert!(did.contains(&"stop build".to_owned()) && did.contains(&"stop 1: was stopped".to_owned()), "{did:?}");
    story.exits(1, How::Stopped);
    story.was_done(&[]);
    story.happens(Event::BuildEnded(Err("killed".into())));
    story.was_done(&["end 0"]);

    let mut story = Story::legacy();
    story.client(&call(1, "slow"));
    story.reloads();
    story.comes_up(2);
    story.reloads();
    story.started(3);
    story.forget();
    story.client_leaves(ClientEnd::Closed);
    let did = story.did();
    for generation in 1..=3 {
        assert!(did.contains(&format!("stop {generation}: was stopped")), "{did:?}");
    }
    story.child(1, &result(1, "{}"));
    story.client_hears(&[&result(1, "{}")]);
    story.child(3, &result(private(2), &initialize_result("2025-11-25", ALL)));
    for generation in 1..=3 {
        story.exits(generation, How::Stopped);
    }
    story.client_hears_nothing();
    story.was_done(&["end 0"]);
}

#[test]
fn x18_nothing_is_sent_to_a_client_that_does_not_read() {
    let mut story = Story::legacy();
    story.client(&call(1, "a"));
    story.child(1, &ask(1, "roots/list"));
    story.forget();
    story.client_leaves(ClientEnd::Broken);
    story.child(1, &note("notifications/message"));
    story.exits(1, How::Stopped);
    story.client_hears_nothing();
    story.was_done(&["stop 1: was stopped", "end 0"]);

    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.client(&call(1, "a"));
    story.forget();
    story.client_leaves(ClientEnd::Broken);
    story.client_hears_nothing();
    story.was_done(&["end 0"]);
}

/// A client and a server that agreed on the only version with batches.
fn batching() -> Story {
    let mut story = Story::fresh_with(|settings| settings.limits.messages.batch_max = 4);
    story.client(&INITIALIZE.replace("2025-11-25", "2025-03-26"));
    story.child(1, &result(0, &initialize_result("2025-03-26", ALL)));
    story.client(INITIALIZED);
    story.forget();
    story
}

#[test]
fn x19_a_batch_is_sent_singly_and_answered_whole() {
    let mut story = batching();
    story.client(&format!("[{}, {},{}]", call(1, "a"), note("acme/n"), call(2, "b")));
    story.child_hears(1, &[&call(1, "a"), &note("acme/n"), &call(2, "b")]);
    story.child(1, &result(2, "{}"));
    story.client_hears_nothing();
    story.child(1, &result(1, "{}"));
    story.client_hears(&[&format!("[{},{}]", result(2, "{}"), result(1, "{}"))]);

    story.client(&format!("[{},{}]", call(3, "a"), call(4, "b"))).child(1, &result(3, "{}")).client(&cancel(4));
    story.client_hears(&[&format!("[{}]", result(3, "{}"))]);
    story.exits(1, code(1));
    story.client_hears_nothing();
    story.client(&format!("[{},{}]", call(5, "a"), ask(6, "ping")));
    story.client_hears_nothing();
    story.client(&cancel(5));
    story.client_hears(&[&format!("[{}]", result(6, "{}"))]);
}

#[test]
fn x19_invalid_batches_are_refused() {
    let mut story = batching();
    story.client("[]");
    let answer = parsed(&story.answer());
    assert_eq!((&answer["error"]["code"], &answer["id"]), (&json!(-32600), &json!(null)));
    let long: Vec<String> = (0..5).map(|id| call(id, "a")).collect();
    story.client(&format!("[{}]", long.join(",")));
    let answer = parsed(&story.answer());
    assert_eq!((&answer["error"]["code"], &answer["id"]), (&json!(-32600), &json!(null)));
    story.client(&format!("[{}]", note("acme/n")));
    story.client_hears_nothing();
    story.child_hears(1, &[&note("acme/n")]);
    story.client(&format!("[{},{}]", INITIALIZE, ask(2, "acme/do"))).child(1, &result(2, "{}"));
    let answer = parsed(&story.answer());
    assert_eq!((&answer[0]["error"]["code"], &answer[0]["id"]), (&json!(-32600), &json!(0)));
    assert_eq!(answer[1]["id"], 2);
}

#[test]
fn x19_a_servers_batch_is_split_and_other_versions_pass_it() {
    let mut story = batching();
    story.client(&call(1, "a"));
    story.child(1, &format!("[{},{}]", note("acme/n"), result(1, "{}")));
    story.client_hears(&[&note("acme/n"), &result(1, "{}")]);

    let mut story = Story::legacy();
    let batch = format!("[{},{}]", call(1, "a"), call(2, "b"));
    story.client(&batch);
    story.child_hears(1, &[&batch]);
    let answers = format!("[{}]", result(1, "{}"));
    story.child(1, &answers);
    story.client_hears(&[&answers]);
    story.exits(1, code(1));
    story.client(&batch);
    story.client_hears_nothing();
    story.passes(secs(1));
    story.comes_up(2);
    story.child_hears(2, &[&replayed(1), INITIALIZED]);
}

#[test]
fn x19_a_batch_within_a_batch_is_dropped_however_deep() {
    let mut story = batching();
    let nested = |inner: &str| format!("{}{inner}{}", "[".repeat(9_000), "]".repeat(9_000));
    story.client(&nested(&call(1, "a")));
    story.client_hears_nothing();
    story.child_hears(1, &[]);
    story.client(&call(2, "b"));
    story.child(1, &nested(&result(2, "{}")));
    story.client_hears_nothing();
    story.child(1, &result(2, "{}"));
    story.client_hears(&[&result(2, "{}")]);
}

#[test]
fn a_message_nested_too_deeply_is_refused_under_its_own_id() {
    let deep = format!("{}{}", "[".repeat(15_000), "]".repeat(15_000));
    let mut story = Story::legacy();
    story.client(&format!(
        r#"{{"jsonrpc":"2.0","method":"tools/call","params":{{"name":"a","arguments":{deep}}},"id":7}}"#
    ));
    let answer = parsed(&story.answer());
    assert_eq!((&answer["error"]["code"], &answer["id"]), (&json!(-32600), &json!(7)));
    assert!(
        answer["error"]["message"].as_str().is_some_and(|text| text.contains("nested deeper than 10000")),
        "{answer}"
    );
    story.client(&deep);
    let answer = parsed(&story.answer());
    assert_eq!((&answer["error"]["code"], &answer["id"]), (&json!(-32600), &json!(null)));
    story.client(&call(1, "a"));
    story.child_hears(1, &[&call(1, "a")]);
    story.child(1, &result(1, &format!(r#"{{"x":{deep}}}"#)));
    let answer = parsed(&story.answer());
    assert_eq!((&answer["error"]["code"], &answer["id"]), (&json!(-32603), &json!(1)));
}

#[test]
fn x20_a_child_that_refused_the_probe_is_initialised_in_place() {
    let initialize = INITIALIZE.replace("\"id\":0", "\"id\":1");
    let mut story = Story::fresh();
    story.client(&modern(0, "server/discover", "")).child(1, &error(0, -32601, "Method not found"));
    story.forget();
    story.client(&initialize);
    story.child_hears(1, &[&initialize]);
    story.was_done(&[]);
}

#[test]
fn x20_a_child_that_may_be_locked_to_the_other_era_is_replaced() {
    let initialize = INITIALIZE.replace("\"id\":0", "\"id\":1");
    for answer in [Some(result(0, &discover_result(ALL))), Some(error(0, -32022, "no")), None] {
        let mut story = Story::fresh();
        story.client(&modern(0, "server/discover", ""));
        if let Some(answer) = &answer {
            story.child(1, answer);
        }
        story.forget();
        story.client(&initialize);
        let mut did = story.did();
        did.sort();
        assert_eq!(did, ["start", "stop 1: was stopped"]);
        match answer {
            Some(_) => story.client_hears_nothing(),
            None => story.client_hears(&[&error(0, -32601, "Method not found")]),
        }
        story.started(2);
        story.child_hears(2, &[&initialize]);
        story.child(1, &result(0, "{}"));
        story.exits(1, How::Stopped);
        story.client_hears_nothing();
        story.child(2, &result(1, &initialize_result("2025-11-25", ALL)));
        assert_eq!(parsed(&story.answer())["id"], 1);
        story.was_done(&["ready 2"]);
    }
}

#[test]
fn x20_a_private_probe_in_flight_ends_with_its_child() {
    let initialize = INITIALIZE.replace("\"id\":0", "\"id\":1");
    // The end of a child that was to replace a crashed one.
    let mut story = Story::modern();
    story.exits(1, code(1));
    story.passes(secs(1));
    story.started(2);
    story.forget();
    story.client(&initialize);
    let mut did = story.did();
    did.sort();
    assert_eq!(did, ["start", "stop 2: was stopped"]);
    story.child(2, &result(private(1), &discover_result(ALL)));
    story.started(3);
    story.child_hears(3, &[&initialize]);

    // The end of a candidate.
    let mut story = Story::modern();
    story.reloads();
    story.started(2);
    story.forget();
    story.client(&initialize);
    let mut did = story.did();
    did.sort();
    assert_eq!(did, ["start", "stop 1: was stopped", "stop 2: was stopped"]);
    story.child(2, &result(private(1), &discover_result(ALL)));
    story.exits(2, How::Stopped);
    story.exits(1, How::Stopped);
    story.started(3);
    story.child_hears(3, &[&initialize]);
    story.child(3, &result(1, &initialize_result("2025-11-25", ALL)));
    let did = story.did();
    assert_eq!(did[0], "ready 3");
    assert!(did[1].starts_with("answer 7: "), "{did:?}");

    // The end of a candidate that is still being started.
    let mut story = Story::modern();
    story.reloads();
    story.forget();
    story.client(&initialize);
    story.was_done(&["stop 1: was stopped"]);
    story.started(2);
    story.child_hears(2, &[&initialize]);
}

#[test]
fn x18_a_restart_that_waits_for_the_old_one_starts_nothing_either() {
    let mut story = Story::legacy_with(ALL, |settings| settings.reload = Reload::Replace);
    story.client(&call(1, "slow"));
    story.reloads();
    story.forget();
    story.client_leaves(ClientEnd::Closed);
    story.child(1, &result(1, "{}"));
    story.client_hears(&[&result(1, "{}")]);
    story.exits(1, How::Stopped);
    let did = story.did();
    assert_eq!(did.last().map(String::as_str), Some("end 0"), "{did:?}");
}

#[test]
fn x7_after_a_failed_build_held_requests_start_a_server_that_exited() {
    let mut story = Story::legacy_with(ALL, |settings| settings.build = true);
    story.reloads();
    story.forget();
    story.exits(1, code(0));
    story.client(&call(1, "t"));
    story.happens(Event::BuildEnded(Err("no".into())));
    story.passes(ms(1));
    assert_eq!(story.did()[1..], ["start"]);

    let mut story = Story::legacy_with(ALL, |settings| {
        hopeless(settings);
        settings.build = true;
    });
    story.reloads();
    story.forget();
    story.exits(1, code(1));
    story.client(&call(1, "t"));
    story.client_hears_nothing();
    story.happens(Event::BuildEnded(Err("no".into())));
    story.client_hears_failed_call(1, "gave_up", "not_sent");
}

#[test]
fn x3_requests_while_outlast_is_stopping_are_answered_too() {
    let mut story = Story::legacy();
    story.client(&call(1, "slow"));
    story.reloads();
    story.comes_up(2);
    story.forget();
    story.exits(2, code(0));
    story.was_done(&["stop 1: was stopped"]);
    story.client(&call(2, "t"));
    story.client_hears_failed_call(2, "stopping", "not_sent");
    story.child(1, &result(1, "{}"));
    story.client_hears(&[&result(1, "{}")]);
    story.exits(1, How::Stopped);
    story.was_done(&["end 0"]);
}

#[test]
fn x14_a_changed_file_restarts_a_child_without_an_opening_at_once() {
    let mut story = Story::fresh();
    story.client(&modern(0, "server/discover", "")).child(1, &error(0, -32601, "Method not found"));
    story.asks_restart(7, Origin::Watch, "src/a.py changed");
    story.was_done(&["mark 1001: src/a.py changed"]);
    story.marker_is_written();
    story.started(2);
    assert!(story.did().iter().any(|did| did.starts_with("answer 7: ")));
}

#[test]
fn x14_a_refused_opening_leaves_the_client_unopened() {
    let mut story = Story::unborn_with(|settings| settings.limits.holding.held_max = 1);
    story.client(&call(1, "t")).client(INITIALIZE);
    story.client_hears_error(0, 7004, "hold_full", "not_sent");
    story.started(1);
    story.forget();
    story.reloads();
    story.started(2);
    assert!(story.did().iter().any(|did| did.starts_with("answer 7: ")), "there is no handshake to wait for");
    story.client(INITIALIZE);
    assert_eq!(story.told_server(2).last().map(String::as_str), Some(INITIALIZE));
}

#[test]
fn x20_a_child_that_once_answered_in_the_other_era_is_replaced_regardless_of_later_answers() {
    let mut story = Story::modern();
    story.client(&modern(1, "server/discover", "")).child(1, &error(1, -32603, "busy"));
    story.forget();
    story.client(INITIALIZE);
    let mut did = story.did();
    did.sort();
    assert_eq!(did, ["start", "stop 1: was stopped"]);
}

#[test]
fn x20_a_restart_asked_for_meanwhile_shares_the_start() {
    let mut story = Story::modern();
    story.asks_restart(7, Origin::Control, "new code");
    story.forget();
    story.client(INITIALIZE);
    story.did();
    story.marker_is_written();
    story.was_done(&[]);
    story.started(2);
    story.child_hears(2, &[INITIALIZE]);
    story.child(2, &result(0, &initialize_result("2025-11-25", ALL)));
    let did = story.did();
    assert_eq!(did[0], "ready 2");
    assert!(did[1].starts_with("answer 7: "), "{did:?}");
}

#[test]
fn x20_a_plain_request_after_a_refused_probe_does_not_select_the_stateless_era() {
    let mut story = Story::fresh();
    story.client(&modern(0, "server/discover", "")).child(1, &error(0, -32601, "Method not found"));
    story.client(&ask(1, "acme/do")).child(1, &result(1, "{}"));
    story.was_done(&[]);
    story.forget();
    story.client(INITIALIZE);
    story.child_hears(1, &[INITIALIZE]);
}
