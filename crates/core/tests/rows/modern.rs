//! The stateless era (m1-m7).

use crate::story::*;

const FILTER: &str = r#""notifications":{"toolsListChanged":true}"#;
const URIS: &str = r#""notifications":{"resourceSubscriptions":["u:1"]}"#;

fn listen(id: u32, filter: &str) -> String {
    modern(id, "subscriptions/listen", filter)
}

fn acknowledged(id: u32, filter: &str) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{{"_meta":{{"io.modelcontextprotocol/subscriptionId":{id}}},{filter}}}}}"#
    )
}

fn changed(id: u32) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/tools/list_changed","params":{{"_meta":{{"io.modelcontextprotocol/subscriptionId":{id}}}}}}}"#
    )
}

/// Subscription 5 is acknowledged on child 1, and the client holds a list of tools.
fn listening() -> Story {
    let mut story = Story::modern();
    story.client(&listen(5, FILTER)).child(1, &acknowledged(5, FILTER));
    story.client(&modern(1, "tools/list", "")).child(1, &result(1, r#"{"tools":[{"name":"a"}],"ttlMs":0}"#));
    story.forget();
    story
}

fn child_exits_and_is_replaced(story: &mut Story) {
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up(2);
}

#[test]
fn m1_local_results_have_the_members_of_their_era() {
    let info = json!({"name": "outlast", "version": env!("CARGO_PKG_VERSION")});
    let mut story = Story::modern();
    story.client(&modern(1, "tools/list", "")).child(1, &result(1, r#"{"tools":[],"ttlMs":9,"cacheScope":"public"}"#));
    story.exits(1, code(1));
    story.forget();
    for (id, method) in [(2, "tools/list"), (3, "server/discover")] {
        story.client(&modern(id, method, ""));
        let answer = parsed(&story.answer());
        let result = &answer["result"];
        assert_eq!(result["resultType"], "complete", "{method}");
        assert_eq!(result["_meta"]["io.modelcontextprotocol/serverInfo"], info, "{method}");
        assert_eq!(result["ttlMs"], 0, "{method}");
        assert_eq!(result["cacheScope"], "private", "{method}");
    }
    story.client(&modern(4, "tools/call", r#""name":"server_status""#));
    let answer = parsed(&story.answer());
    assert_eq!(answer["result"]["resultType"], "complete");
    assert_eq!(answer["result"]["_meta"]["io.modelcontextprotocol/serverInfo"], info);
    assert!(answer["result"].get("ttlMs").is_none());

    let mut story = Story::legacy();
    story.client(&call(1, "server_status"));
    let answer = parsed(&story.answer());
    assert!(answer["result"].get("resultType").is_none() && answer["result"].get("_meta").is_none());
}

#[test]
fn m2_listens_are_opened_again_with_the_clients_bytes() {
    let mut story = listening();
    child_exits_and_is_replaced(&mut story);
    let told = story.told_server(2);
    assert_eq!(told[1], listen(5, FILTER));
    story.told_client();
    story.child(2, &acknowledged(5, FILTER));
    story.client_hears_nothing();
    assert!(story.recorded("protocol_noted").is_empty());

    let mut story = listening();
    child_exits_and_is_replaced(&mut story);
    story.forget();
    story.child(2, &acknowledged(5, r#""notifications":{"toolsListChanged":false}"#));
    story.client_hears_nothing();
    assert_eq!(story.recorded("protocol_noted").len(), 1, "a child that grants less is recorded");
}

#[test]
fn m3_a_refused_listen_is_kept_if_outlast_can_serve_it() {
    let mut story = Story::modern();
    story.client(&listen(5, FILTER)).child(1, &error(5, -32601, "no"));
    story.client_hears(&[&acknowledged(5, FILTER)]);

    let mut story = Story::modern();
    story.client(&listen(5, URIS)).child(1, &error(5, -32601, "no"));
    story.client_hears(&[&error(5, -32601, "no")]);

    let mut story = Story::modern();
    story.client(&listen(5, URIS)).child(1, &acknowledged(5, URIS));
    child_exits_and_is_replaced(&mut story);
    story.forget();
    story.child(2, &error(5, -32601, "no"));
    let answer = parsed(&story.answer());
    assert_eq!((&answer["id"], &answer["result"]["resultType"]), (&json!(5), &json!("complete")));
    assert_eq!(answer["result"]["_meta"]["io.modelcontextprotocol/subscriptionId"], 5);
    assert_eq!(answer["result"]["_meta"]["io.modelcontextprotocol/serverInfo"]["name"], "outlast");
}

#[test]
fn m4_a_change_is_sent_once_to_each_listen_that_asked() {
    let mut story = listening();
    story.client(&listen(6, FILTER)).child(1, &acknowledged(6, FILTER));
    story.client(&listen(7, URIS)).child(1, &acknowledged(7, URIS));
    story.told_client();
    child_exits_and_is_replaced(&mut story);
    story.answers_private(2, "tools/list", r#"{"tools":[{"name":"b"}]}"#);
    story.client_hears(&[&changed(5), &changed(6)]);
}

#[test]
fn m4_a_change_without_a_listen_is_sent_after_the_next_restart() {
    let mut story = Story::modern();
    story.client(&modern(1, "tools/list", "")).child(1, &result(1, r#"{"tools":[{"name":"a"}],"ttlMs":0}"#));
    child_exits_and_is_replaced(&mut story);
    story.told_client();
    story.answers_private(2, "tools/list", r#"{"tools":[{"name":"b"}]}"#);
    story.client_hears_nothing();
    story.client(&listen(5, FILTER)).child(2, &acknowledged(5, FILTER));
    story.exits(2, code(1));
    story.passes(secs(1));
    story.comes_up(3);
    story.told_client();
    story.answers_private(3, "tools/list", r#"{"tools":[{"name":"b"}]}"#);
    story.client_hears(&[&changed(5)]);
}

#[test]
fn m5_a_teardown_is_delayed_by_500_ms() {
    for teardown in [result(5, r#"{"resultType":"complete"}"#), cancel(5)] {
        let mut story = listening();
        story.child(1, &teardown);
        story.passes(ms(499));
        story.client_hears_nothing();
        story.passes(ms(1));
        story.client_hears(&[&teardown]);
        child_exits_and_is_replaced(&mut story);
        assert!(!story.told_server(2).contains(&listen(5, FILTER)), "it is over");

        let mut story = listening();
        story.child(1, &teardown);
        child_exits_and_is_replaced(&mut story);
        assert!(story.told_server(2).contains(&listen(5, FILTER)), "the child was leaving");
        story.passes(secs(4));
        story.client_hears_nothing();
    }
}

#[test]
fn m5_at_the_takeover_the_listens_of_the_old_child_are_cancelled() {
    let mut story = listening();
    story.reloads();
    story.comes_up(2);
    let told = story.told_server(1);
    assert_eq!(told.len(), 1, "{told:#?}");
    let note = parsed(&told[0]);
    assert_eq!((&note["method"], &note["params"]["requestId"]), (&json!("notifications/cancelled"), &json!(5)));
    assert!(story.did().contains(&"stop 1: was stopped".to_owned()), "a listen delays no drain");
    assert!(story.told_server(2).contains(&listen(5, FILTER)));
}

#[test]
fn m6_an_input_request_closes_its_request_and_the_retry_is_a_new_request() {
    let question = r#"{"resultType":"input_required","requestState":"s","inputRequests":{}}"#;
    let mut story = Story::modern();
    story.client(&modern(1, "tools/call", r#""name":"t""#)).child(1, &result(1, question));
    story.client_hears(&[&result(1, question)]);
    story.exits(1, code(1));
    story.client_hears_nothing();
    let retry = modern(2, "tools/call", r#""name":"t","requestState":"s","inputResponses":{}"#);
    story.client(&retry);
    story.passes(secs(1));
    story.comes_up(2);
    assert_eq!(story.told_server(2).last(), Some(&retry), "held like others");
    story.exits(2, code(1));
    story.client_hears_failed_call(2, "server_ended", "unknown");
}

#[test]
fn m7_methods_that_the_era_lacks_are_forwarded_like_unknown_methods() {
    for method in ["ping", "logging/setLevel", "resources/subscribe"] {
        let mut story = Story::modern();
        story.client(&modern(1, method, ""));
        story.child_hears(1, &[&modern(1, method, "")]);
        story.exits(1, code(1));
        story.client_hears_error(1, 7001, "server_ended", "unknown");
        story.passes(secs(1));
        story.comes_up(2);
        assert_eq!(story.told_server(2).len(), 1, "nothing is restored: {method}");
    }
}
