//! All edits of messages (d1-d6): the other bytes stay as they came.

use crate::story::*;

#[test]
fn d1_an_opening_promises_changed_lists_and_our_tools() {
    for (tools, from, to) in [
        (
            true,
            r#"{"jsonrpc":"2.0" , "id":0,"result":{"capabilities":{"tools":{ },"prompts":{"listChanged":false,"x":1.50},"resources":{"subscribe":true}},"protocolVersion":"2025-11-25","acme":[1,  2]}}"#,
            r#"{"jsonrpc":"2.0" , "id":0,"result":{"capabilities":{"tools":{ "listChanged":true},"prompts":{"listChanged":true,"x":1.50},"resources":{"subscribe":true,"listChanged":true}},"protocolVersion":"2025-11-25","acme":[1,  2]}}"#,
        ),
        (
            true,
            r#"{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":"2025-11-25","capabilities":{"logging":{}}}}"#,
            r#"{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":"2025-11-25","capabilities":{"logging":{},"tools":{"listChanged":true}}}}"#,
        ),
        (
            true,
            r#"{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":"2025-11-25","capabilities":{}}}"#,
            r#"{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{"listChanged":true}}}}"#,
        ),
        (
            false,
            r#"{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":"2025-11-25","capabilities":{"prompts":{}}}}"#,
            r#"{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":"2025-11-25","capabilities":{"prompts":{"listChanged":true}}}}"#,
        ),
    ] {
        let mut story = Story::fresh_with(|settings| settings.tools = tools);
        story.client(INITIALIZE).child(1, from);
        story.client_hears(&[to]);
    }
}

#[test]
fn d2_a_discover_promises_the_same_and_is_not_cached_for_long() {
    for (from, to) in [
        (
            r#"{"jsonrpc":"2.0","id":0,"result":{"ttlMs": 60000.0,"supportedVersions":["2026-07-28"],"capabilities":{"prompts":{}},"cacheScope":"public"}}"#,
            r#"{"jsonrpc":"2.0","id":0,"result":{"ttlMs": 5000,"supportedVersions":["2026-07-28"],"capabilities":{"prompts":{"listChanged":true},"tools":{"listChanged":true}},"cacheScope":"public"}}"#,
        ),
        (
            r#"{"jsonrpc":"2.0","id":0,"result":{"ttlMs":4e3,"capabilities":{"tools":{"listChanged":true}}}}"#,
            r#"{"jsonrpc":"2.0","id":0,"result":{"ttlMs":4e3,"capabilities":{"tools":{"listChanged":true}}}}"#,
        ),
    ] {
        let mut story = Story::fresh();
        story.client(&modern(0, "server/discover", "")).child(1, from);
        story.client_hears(&[to]);
    }
}

#[test]
fn d3_our_tools_follow_the_last_tool_of_the_first_page() {
    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list"));
    story
        .child(1, r#"{"result":{"tools":[ {"name":"a","n":1.0} ],"nextCursor":"2","acme":{}},"id":1,"jsonrpc":"2.0"}"#);
    let page = story.answer();
    assert!(page.starts_with(r#"{"result":{"tools":[ {"name":"a","n":1.0} ,{"#), "{page}");
    assert!(page.ends_with(r#"}],"nextCursor":"2","acme":{}},"id":1,"jsonrpc":"2.0"}"#), "{page}");
    assert_eq!(tool_names(&page), ["a", OURS[0], OURS[1], OURS[2]]);
    let second = r#"{"jsonrpc":"2.0","id":2,"result":{"tools":[{"name":"b"}]}}"#;
    story.client(&ask_with(2, "tools/list", r#"{"cursor":"2"}"#)).child(1, second);
    story.client_hears(&[second]);

    story.client(&ask(3, "tools/list")).child(1, &result(3, r#"{"tools":[]}"#));
    assert_eq!(tool_names(&story.answer()), OURS);

    let page = r#"{"jsonrpc":"2.0","id":1,"result":{"tools":[]}}"#;
    let mut story = Story::legacy_with(ALL, |settings| settings.tools = false);
    story.client(&ask(1, "tools/list")).child(1, page);
    story.client_hears(&[page]);
}

#[test]
fn d3_a_modern_page_is_not_cached_for_long_and_keeps_its_scope() {
    let mut story = Story::modern_with(|settings| settings.tools = false);
    story.client(&modern(1, "tools/list", ""));
    story.child(1, &result(1, r#"{"tools":[],"ttlMs":5001,"cacheScope":"public"}"#));
    story.client_hears(&[&result(1, r#"{"tools":[],"ttlMs":5000,"cacheScope":"public"}"#)]);
}

#[test]
fn d4_the_first_acknowledgement_promises_the_changes_asked_for() {
    let acknowledged = |granted: &str| {
        format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{{"_meta":{{"io.modelcontextprotocol/subscriptionId":5}},"notifications":{granted}}}}}"#
        )
    };
    for (from, to) in [
        ("{}", r#"{"toolsListChanged":true,"promptsListChanged":true}"#),
        (r#"{"acme":1.0}"#, r#"{"acme":1.0,"toolsListChanged":true,"promptsListChanged":true}"#),
        (
            r#"{"promptsListChanged":false, "toolsListChanged":true}"#,
            r#"{"promptsListChanged":true, "toolsListChanged":true}"#,
        ),
        (r#"{"promptsListChanged":false}"#, r#"{"promptsListChanged":true,"toolsListChanged":true}"#),
    ] {
        let mut story = Story::modern();
        let filter =
            r#""notifications":{"toolsListChanged":true,"promptsListChanged":true,"resourcesListChanged":false}"#;
        story.client(&modern(5, "subscriptions/listen", filter));
        story.child(1, &acknowledged(from));
        story.client_hears(&[&acknowledged(to)]);
    }
}

#[test]
fn d5_ids_of_later_generations_cannot_collide() {
    let mut story = Story::legacy();
    story.child(1, &ask(1, "roots/list"));
    story.client(&call(9, "t"));
    story.reloads();
    story.comes_up(2);
    story.forget();
    story.child(2, r#"{"method":"roots/list", "id" : 1 ,"jsonrpc":"2.0","acme":1.0}"#);
    story.client_hears(&[r#"{"method":"roots/list", "id" : "outlast-r-2" ,"jsonrpc":"2.0","acme":1.0}"#]);
    story.client(&result(private(2), "{}")).client(&result(1, "{}"));
    story.child_hears(2, &[&result(1, "{}")]);
    story.child_hears(1, &[&result(1, "{}")]);
}

#[test]
fn d6_all_other_messages_are_forwarded_unchanged() {
    let odd = r#"{ "acme":1.00,"jsonrpc":"2.0","id":1,"result":{"prompts":[{"name":"p"}],"nextCursor":"c","ttlMs":99999999}}"#;
    let mut story = Story::modern();
    story.client(&modern(1, "prompts/list", "")).child(1, odd);
    story.client_hears(&[odd]);
    let asked = r#"{ "jsonrpc":"2.0","id" :"\u0041","method":"tools/call","params":{"name":"t","arguments":{"n":1e400,"s":"\/"}} }"#;
    story.forget();
    story.client(asked);
    story.child_hears(1, &[asked]);
}
