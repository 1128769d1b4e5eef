//! Messages of a child, by its role (s1-s13).

use crate::story::*;

/// Child 2 is a candidate whose handshake runs; child 1 serves.
fn with_candidate() -> Story {
    let mut story = Story::legacy();
    story.reloads();
    story.started(2);
    story.forget();
    story
}

/// Child 1 drains with call 1 open; child 2 serves.
fn with_draining() -> Story {
    let mut story = Story::legacy();
    let asked = ask_with(1, "tools/call", r#"{"name":"t","_meta":{"progressToken":"p"}}"#);
    story.client(&asked);
    story.reloads();
    story.comes_up(2);
    story.forget();
    story
}

#[test]
fn s1_answers_are_passed_and_the_last_one_stops_a_draining_child() {
    let mut story = with_draining();
    story.client(&call(2, "t"));
    story.child_hears(2, &[&call(2, "t")]);
    let answer = r#"{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":1e2}}"#;
    story.child(1, answer);
    story.client_hears(&[answer]);
    story.was_done(&["stop 1: was stopped"]);
    story.child(2, &result(2, "{}"));
    story.client_hears(&[&result(2, "{}")]);
}

#[test]
fn s2_answers_to_our_own_requests_are_not_forwarded() {
    let mut story = Story::legacy();
    story.client(&ask_with(1, "logging/setLevel", r#"{"level":"debug"}"#)).child(1, &result(1, "{}"));
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up(2);
    story.told_client();
    story.child(2, &result(private(2), "{}"));
    story.client_hears_nothing();
}

#[test]
fn s3_answers_to_unknown_requests_are_dropped() {
    for mut story in [Story::legacy(), with_candidate(), with_draining()] {
        story.child(1, &result(77, "{}"));
        story.child(2, &result(77, "{}"));
        story.client_hears_nothing();
    }
    let mut story = with_draining();
    story.child(2, &result(1, "{}"));
    story.client_hears_nothing();
    story.child(1, &result(1, "{}"));
    story.told_client();
    story.child(1, &result(1, "{}"));
    story.client_hears_nothing();
}

#[test]
fn s4_an_error_without_an_id_is_forwarded_from_the_serving_child() {
    for line in [
        r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"no"}}"#,
        r#"{"jsonrpc":"2.0","error":{"code":-32700,"message":"no"}}"#,
    ] {
        let mut story = Story::legacy();
        story.child(1, line);
        story.client_hears(&[line]);
        let mut story = with_candidate();
        story.child(2, line);
        story.client_hears_nothing();
        let mut story = with_draining();
        story.child(1, line);
        story.client_hears_nothing();
    }
}

#[test]
fn s5_a_ping_of_a_child_that_does_not_serve_is_answered_by_outlast() {
    let mut story = Story::legacy();
    story.child(1, &ask(1, "ping"));
    story.client_hears(&[&ask(1, "ping")]);
    let mut story = with_candidate();
    story.child(2, &ask(1, "ping"));
    story.child_hears(2, &[&result(1, "{}")]);
    story.client_hears_nothing();
    let mut story = with_draining();
    story.child(1, &ask(1, "ping"));
    story.child_hears(1, &[&result(1, "{}")]);
    story.client_hears_nothing();
}

#[test]
fn s6_requests_made_before_serving_are_passed_on_taking_over() {
    let mut story = with_candidate();
    story.child(2, &ask(1, "roots/list")).child(2, &ask(2, "roots/list"));
    story.client_hears_nothing();
    story.child(2, &result(private(1), &initialize_result("2025-11-25", ALL)));
    story.client_hears(&[&ask(private(2), "roots/list"), &ask(private(3), "roots/list")]);

    let mut story = with_draining();
    story.child(1, &ask(1, "roots/list"));
    story.client_hears(&[&ask(1, "roots/list")]);
}

#[test]
fn s6_too_many_requests_before_serving_fail_the_handshake() {
    let mut story = Story::legacy_with(ALL, |settings| settings.limits.handshake.early_max = 2);
    story.reloads();
    story.started(2);
    story.forget();
    for id in 1..=3 {
        story.child(2, &ask(id, "roots/list"));
    }
    let did = story.did();
    assert_eq!(did[0], "stop 2: failed its handshake: sent more than 2 requests before it was ready");
    assert!(did[1].starts_with("refuse 7: "), "{did:?}");
    story.client_hears_nothing();
}

#[test]
fn s7_a_modern_child_may_not_send_requests() {
    let mut story = Story::modern();
    story.child(1, &ask(1, "roots/list"));
    story.client_hears_nothing();
    story.child_hears_nothing(1);
    story.client(&modern(1, "tools/call", r#""name":"t""#));
    story.client_leaves(ClientEnd::Closed);
    story.child(1, &ask(1, "roots/list"));
    story.client_hears_nothing();
}

#[test]
fn s8_progress_of_a_repeated_request_only_rises() {
    let progress = |value: &str| {
        format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":"p","progress":{value}}}}}"#
        )
    };
    let mut story = Story::legacy();
    let asked = ask_with(1, "resources/read", r#"{"uri":"u","_meta":{"progressToken":"p"}}"#);
    story.client(&asked);
    story.child(1, &progress("3")).child(1, &progress("5"));
    story.client_hears(&[&progress("3"), &progress("5")]);
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up(2);
    story.child(2, &progress("4")).child(2, &progress("5")).child(2, &progress("5.5"));
    story.client_hears(&[&progress("5.5")]);

    let mut story = with_candidate();
    story.child(2, &progress("1"));
    story.client_hears_nothing();

    let mut story = with_draining();
    story.child(1, &progress("1"));
    story.client_hears(&[&progress("1")]);
    story.child(1, &progress("1").replace("\"p\"", "\"q\""));
    story.client_hears_nothing();
}

#[test]
fn s9_logs_and_unknown_notifications_are_forwarded_from_serving_and_draining_children() {
    for method in ["notifications/message", "acme/n"] {
        let mut story = Story::legacy();
        story.child(1, &note(method));
        story.client_hears(&[&note(method)]);
        let mut story = with_candidate();
        story.child(2, &note(method));
        story.client_hears_nothing();
        let mut story = with_draining();
        story.child(1, &note(method));
        story.client_hears(&[&note(method)]);
    }
}

#[test]
fn s10_list_changed_is_forwarded_only_from_the_serving_child_and_only_if_announced() {
    let changed = note("notifications/prompts/list_changed");
    let mut story = Story::legacy();
    story.child(1, &changed);
    story.client_hears(&[&changed]);
    let mut story = Story::legacy_with(r#"{"tools":{}}"#, |_| {});
    story.child(1, &changed);
    story.client_hears_nothing();
    let mut story = with_candidate();
    story.child(2, &changed);
    story.client_hears_nothing();
    let mut story = with_draining();
    story.child(1, &changed);
    story.client_hears_nothing();
}

#[test]
fn s11_a_resource_update_is_forwarded_only_from_the_serving_child() {
    let updated = r#"{"jsonrpc":"2.0","method":"notifications/resources/updated","params":{"uri":"u:1"}}"#;
    let mut story = Story::legacy();
    story.child(1, updated);
    story.client_hears(&[updated]);
    let mut story = with_candidate();
    story.child(2, updated);
    story.client_hears_nothing();
    let mut story = with_draining();
    story.child(1, updated);
    story.client_hears_nothing();
}

#[test]
fn s12_a_child_cancels_its_own_request() {
    let mut story = Story::legacy();
    story.child(1, &ask(1, "roots/list")).child(1, &cancel(1));
    story.client_hears(&[&ask(1, "roots/list"), &cancel(1)]);

    let mut story = with_draining();
    story.child(2, &ask(1, "roots/list")).child(2, &cancel(1));
    story.client_hears(&[&ask(private(2), "roots/list"), &cancel(private(2))]);
    story.client(&result(private(2), "{}"));
    story.child_hears_nothing(2);
    story.child(1, &ask(4, "roots/list")).child(1, &cancel(4));
    story.client_hears(&[&ask(4, "roots/list"), &cancel(4)]);

    let mut story = with_candidate();
    story.child(2, &ask(1, "roots/list")).child(2, &ask(2, "roots/list")).child(2, &cancel(1));
    story.child(2, &result(private(1), &initialize_result("2025-11-25", ALL)));
    story.client_hears(&[&ask(private(2), "roots/list")]);
}

#[test]
fn s13_messages_on_a_listen_count_only_from_the_serving_child() {
    let acknowledged = r#"{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{"_meta":{"io.modelcontextprotocol/subscriptionId":5},"notifications":{"toolsListChanged":true}}}"#;
    let mut story = Story::modern();
    story.client(&modern(5, "subscriptions/listen", r#""notifications":{"toolsListChanged":true}"#));
    story.client(&modern(6, "tools/call", r#""name":"t""#));
    story.reloads();
    story.started(2);
    story.child(2, acknowledged);
    story.client_hears_nothing();
    story.shakes_hands(2, ALL);
    story.child(1, acknowledged);
    story.child(1, &result(5, "{}"));
    story.passes(secs(2));
    story.client_hears_nothing();
    story.child(2, acknowledged);
    story.client_hears(&[acknowledged]);
}
