//! Notifications and answers of the client (n1-n10).

use crate::story::*;

fn down() -> Story {
    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.forget();
    story
}

/// The first line that a later child receives.
fn replayed(k: u32) -> String {
    INITIALIZE.replace("\"id\":0", &format!("\"id\":{}", private(k)))
}

#[test]
fn n1_initialized_is_kept_for_the_replay() {
    let mut story = Story::fresh();
    story.client(INITIALIZE).child(1, &result(0, &initialize_result("2025-11-25", ALL)));
    story.client(INITIALIZED);
    story.child_hears(1, &[INITIALIZE, INITIALIZED]);
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up(2);
    story.child_hears(2, &[&replayed(1), INITIALIZED]);

    let mut story = Story::fresh();
    story.client(INITIALIZE).child(1, &result(0, &initialize_result("2025-11-25", ALL)));
    story.exits(1, code(1));
    story.client(INITIALIZED);
    story.passes(secs(1));
    story.started(2);
    story.child_hears(2, &[&replayed(1)]);
    story.child(2, &result(private(1), &initialize_result("2025-11-25", ALL)));
    story.child_hears(2, &[INITIALIZED]);
}

#[test]
fn n1_messages_of_a_client_that_does_not_wait_for_answers_stay_in_order() {
    let mut story = Story::unborn_with(quick);
    story.client(INITIALIZE).client(INITIALIZED).client(&ask(1, "tools/list"));
    story.started(1);
    story.child_hears(1, &[INITIALIZE, INITIALIZED, &ask(1, "tools/list")]);
    story.exits(1, code(1));
    story.passes(ms(500));
    story.started(2);
    story.child_hears(2, &[INITIALIZE, INITIALIZED, &ask(1, "tools/list")]);
}

#[test]
fn n1_the_next_child_gets_initialized_once_after_a_handshake_by_outlast() {
    let mut story = Story::not_started();
    story.client(INITIALIZE).client(INITIALIZED);
    story.start_fails("no such file");
    story.passes(secs(1));
    story.comes_up(1);
    story.child_hears(
        1,
        &[
            &replayed(1),
            INITIALIZED,
            &ask_with(private(2), "tools/list", "{}"),
            &ask_with(private(3), "prompts/list", "{}"),
            &ask_with(private(4), "resources/list", "{}"),
            &ask_with(private(5), "resources/templates/list", "{}"),
        ],
    );
}

#[test]
fn n1_a_second_opening_has_its_own_initialized() {
    let mut story = Story::legacy();
    story.client(&INITIALIZE.replace("\"id\":0", "\"id\":1"));
    story.child(1, &result(1, &initialize_result("2025-11-25", ALL)));
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up(2);
    story.child_hears(2, &[&replayed(1)]);
    story.client(INITIALIZED);
    story.child_hears(2, &[INITIALIZED]);
}

#[test]
fn n2_a_held_request_that_is_cancelled_is_dropped() {
    let mut story = down();
    story.client(&call(1, "t")).client(&cancel(1));
    story.passes(secs(1));
    story.comes_up(2);
    story.child_hears(2, &[&replayed(1), INITIALIZED]);
    story.passes(secs(60));
    story.client_hears_nothing();

    let mut story = Story::legacy();
    story.client(&ask(1, "prompts/list"));
    story.exits(1, code(1));
    story.client(&cancel(1));
    story.passes(secs(1));
    story.comes_up(2);
    story.child_hears(2, &[&replayed(1), INITIALIZED]);
    story.client_hears_nothing();
}

#[test]
fn n3_the_cancellation_of_a_running_request_goes_to_its_child() {
    let mut story = Story::legacy();
    story.client(&call(1, "t")).client(&ask(2, "prompts/list")).client(&cancel(1)).client(&cancel(2));
    // A ping of the relay follows the first cancellation (y1).
    let ping = ask(private(1), "ping");
    story.child_hears(1, &[&call(1, "t"), &ask(2, "prompts/list"), &cancel(1), &ping, &cancel(2)]);
    story.child(1, &result(1, "{}"));
    story.client_hears(&[&result(1, "{}")]);
    story.exits(1, code(1));
    story.client_hears_nothing();
    story.passes(secs(1));
    story.comes_up(2);
    story.child_hears(2, &[&replayed(2), INITIALIZED]);
    story.client_hears_nothing();
}

#[test]
fn n3_a_call_on_a_draining_child_is_cancelled_there() {
    let mut story = Story::legacy();
    story.client(&call(1, "t"));
    story.reloads();
    story.comes_up(2);
    story.forget();
    story.client(&cancel(1));
    story.child_hears(1, &[&cancel(1)]);
    story.child_hears_nothing(2);
    story.child(1, &result(1, "{}"));
    story.client_hears(&[&result(1, "{}")]);
    story.was_done(&["stop 1: was stopped"]);
}

#[test]
fn n4_a_cancelled_restart_continues_without_an_answer() {
    let mut story = Story::legacy();
    story.client(&call(1, "restart_server")).client(&cancel(1));
    story.marker_is_written();
    story.comes_up(2);
    story.passes(secs(120));
    story.client_hears_nothing();
    story.child_hears_nothing(1);
    story.was_done(&["mark 1001: code changes", "start", "stop 1: was stopped", "ready 2"]);
}

#[test]
fn n5_a_cancelled_listen_is_over() {
    let listen = modern(5, "subscriptions/listen", r#""notifications":{"toolsListChanged":true}"#);
    let mut story = Story::modern();
    story.client(&listen).client(&cancel(5));
    story.child_hears(1, &[&listen, &cancel(5)]);
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up(2);
    assert_eq!(story.told_server(2).len(), 1, "only the private discover");
    story.client_hears_nothing();

    let mut story = Story::modern();
    story.exits(1, code(1));
    story.client(&listen);
    story.forget();
    story.client(&cancel(5));
    story.passes(secs(1));
    story.comes_up(2);
    assert_eq!(story.told_server(2).len(), 1, "only the private discover");
    story.client_hears_nothing();
}

#[test]
fn n6_other_cancellations_go_to_the_child_that_serves() {
    let mut story = Story::fresh_with(quick);
    story.client(INITIALIZE).client(&cancel(0)).client(&cancel(9));
    story.child_hears(1, &[INITIALIZE, &cancel(0), &cancel(9)]);
    story.exits(1, code(1));
    story.passes(ms(500));
    story.started(2);
    story.child_hears(2, &[INITIALIZE]);

    let mut story = down();
    story.client(&cancel(9));
    story.passes(secs(1));
    story.comes_up(2);
    story.child_hears(2, &[&replayed(1), INITIALIZED]);
}

#[test]
fn n7_progress_goes_to_the_child_that_waits_for_it() {
    let progress = |token: &str| {
        format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":1}}}}"#
        )
    };
    let mut story = Story::legacy();
    story.client(&call(1, "t"));
    story.child(1, &ask_with(1, "sampling/createMessage", r#"{"_meta":{"progressToken":"x"}}"#));
    story.reloads();
    story.comes_up(2);
    story.forget();
    story.client(&progress(r#""x""#)).client(&progress(r#""y""#));
    story.child_hears(1, &[&progress(r#""x""#)]);
    story.child_hears(2, &[&progress(r#""y""#)]);

    let mut story = down();
    story.client(&progress("1"));
    story.passes(secs(1));
    story.comes_up(2);
    story.child_hears(2, &[&replayed(1), INITIALIZED]);
}

#[test]
fn n8_changed_roots_are_sent_only_to_a_serving_child() {
    let changed = note("notifications/roots/list_changed");
    let mut story = Story::legacy();
    story.client(&changed);
    story.child_hears(1, &[&changed]);
    story.exits(1, code(1));
    story.client(&changed);
    story.passes(secs(1));
    story.comes_up(2);
    story.child_hears(2, &[&replayed(1), INITIALIZED]);
}

#[test]
fn n9_an_unknown_notification_is_held_in_order() {
    let mut story = Story::legacy();
    story.client(&note("acme/n"));
    story.child_hears(1, &[&note("acme/n")]);
    story.exits(1, code(1));
    story.client(&call(1, "t")).client(&note("acme/m")).client(&call(2, "t"));
    story.passes(secs(1));
    story.comes_up(2);
    story.child_hears(2, &[&replayed(1), INITIALIZED, &call(1, "t"), &note("acme/m"), &call(2, "t")]);

    let mut story = Story::legacy_with(ALL, |settings| settings.policy.restarts_max = Some(0));
    story.exits(1, code(1));
    story.client(&note("acme/n"));
    story.reloads();
    story.comes_up(2);
    story.child_hears(2, &[&replayed(1), INITIALIZED]);
}

#[test]
fn n9_an_unwritten_notification_keeps_its_order_among_the_requests() {
    let mut story = Story::legacy();
    story.client(&call(1, "t")).client(&note("acme/m")).client(&call(2, "t"));
    story.reloads();
    story.comes_up(2);
    story.forget();
    story.exits_unsent(1, code(1), &["tools/call", "acme/m"]);
    story.child_hears(2, &[&call(1, "t"), &note("acme/m"), &call(2, "t")]);
}

#[test]
fn n10_an_answer_reaches_only_the_child_that_asked() {
    let mut story = Story::legacy();
    story.child(1, &ask(1, "roots/list"));
    story.client_hears(&[&ask(1, "roots/list")]);
    let answer = r#"{"jsonrpc":"2.0", "id":1, "result":{"roots":[1.0]}}"#;
    story.client(answer);
    story.child_hears(1, &[answer]);
    story.client(answer);
    story.child_hears_nothing(1);

    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up(2);
    story.forget();
    story.child(2, &ask(r#""a""#, "roots/list"));
    story.client_hears(&[&ask(private(2), "roots/list")]);
    story.client(&format!(r#"{{"id": {} ,"jsonrpc":"2.0","result":{{}}}}"#, private(2)));
    story.child_hears(2, &[r#"{"id": "a" ,"jsonrpc":"2.0","result":{}}"#]);

    story.child(2, &ask(3, "roots/list"));
    story.exits(2, code(1));
    story.client_hears(&[&ask(private(3), "roots/list"), &cancelled(private(3))]);
    story.passes(secs(1));
    story.comes_up(3);
    story.forget();
    story.client(&result(private(3), "{}"));
    story.child_hears_nothing(3);
}

#[test]
fn n10_a_modern_client_has_nothing_to_answer() {
    let mut story = Story::modern();
    story.client(&result(1, "{}"));
    story.child_hears_nothing(1);
}
