//! Both eras, on both sides.

use crate::story::*;

const VERSION: &str = "io.modelcontextprotocol/protocolVersion";
const SUBSCRIPTION: &str = "io.modelcontextprotocol/subscriptionId";

fn modern(tools: &[&str]) -> Maker {
    Maker { handshake: false, stateless: true, ..maker(tools) }
}

#[test]
fn a_stateless_client_calls_a_handshake_backend() {
    let mut story = Story::simple(&[("a", maker(&["echo"]))]);
    story.post(10, json!("s"), "tools/call", json!({"name": "a__echo", "arguments": {"x": 1}}));
    let (link, told) = story.told("a");
    assert_eq!((&told["params"]["name"], &told["params"]["arguments"]), (&json!("echo"), &json!({"x": 1})));
    story.answer(link, &told["id"], json!({"content": [], "isError": false}));
    story.hears(
        10,
        json!({"jsonrpc": "2.0", "id": "s", "result": {"content": [], "isError": false, "resultType": "complete"}}),
    );
    assert_eq!(story.called[0].outcome, Outcome::Answered);
}

#[test]
fn a_stateless_client_gets_cache_hints_with_what_it_reads() {
    let mut a = maker(&[]);
    a.resources = vec![json!({"uri": "file:///a", "name": "a"})];
    let mut story = Story::simple(&[("a", a)]);
    story.post(10, json!(1), "resources/read", json!({"uri": "file:///a"}));
    let (link, told) = story.told("a");
    story.answer(link, &told["id"], json!({"contents": []}));
    story.hears(10, json!({"jsonrpc": "2.0", "id": 1, "result": {"contents": [], "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}}));
    story.post(11, json!(1), "tools/list", json!({}));
    let list = story.heard(11).json();
    for member in ["resultType", "ttlMs", "cacheScope"] {
        assert!(list["result"].get(member).is_some(), "{member}: {list}");
    }
}

#[test]
fn a_stateless_request_must_declare_its_revision_and_capabilities() {
    let mut story = Story::simple(&[("a", maker(&["echo"]))]);
    let table = [
        (json!({}), -32602),
        (json!({"_meta": {VERSION: "2026-07-28"}}), -32602),
        (json!({"_meta": {VERSION: "1999-01-01", "io.modelcontextprotocol/clientCapabilities": {}}}), -32022),
    ];
    for (index, (params, code)) in table.into_iter().enumerate() {
        let client = 20 + index as u64;
        story.came(client, Front::Request, local()).ask(client, json!(1), "tools/list", params);
        let answer = story.heard(client).json();
        assert_eq!(answer["error"]["code"], code, "{answer}");
        if code == -32022 {
            assert_eq!(answer["error"]["data"]["requested"], "1999-01-01");
            assert_eq!(answer["error"]["data"]["supported"][0], "2026-07-28");
        }
    }
    // Methods that only the other era has.
    let gone = ["initialize", "ping", "logging/setLevel", "resources/subscribe", "tasks/result"];
    for (index, method) in gone.into_iter().enumerate() {
        let client = 30 + index as u64;
        story.post(client, json!(1), method, json!({"uri": "x", "level": "info"}));
        assert_eq!(story.heard(client).json()["error"]["code"], -32601, "{method}");
    }
}

#[test]
fn a_missing_resource_has_the_error_code_of_the_clients_era() {
    let mut a = maker(&[]);
    a.resources = vec![json!({"uri": "file:///a", "name": "a"})];
    let mut story = Story::simple(&[("a", a)]);
    let gone = json!({"code": -32002, "message": "gone", "data": {"code": -32002}});
    let gone_for_stateless = json!({"code": -32602, "message": "gone", "data": {"code": -32002}});
    for (client, expected) in [(10, &gone_for_stateless), (1, &gone)] {
        let params = json!({"uri": "file:///a"});
        match client {
            10 => story.post(client, json!(1), "resources/read", params),
            _ => story.ask(client, json!(1), "resources/read", params),
        };
        let (link, told) = story.told("a");
        story.link_says(link, json!({"jsonrpc": "2.0", "id": told["id"], "error": gone}));
        assert_eq!(story.heard(client).json()["error"], *expected);
    }
}

#[test]
fn a_stateless_client_discovers() {
    let mut story = Story::simple(&[("a", maker(&["echo"]))]);
    story.post(10, json!(1), "server/discover", json!({}));
    let result = story.heard(10).json()["result"].clone();
    assert_eq!(result["supportedVersions"][0], "2026-07-28");
    assert_eq!(result["resultType"], "complete");
    assert_eq!(result["capabilities"]["tools"]["listChanged"], true);
    assert_eq!(result["_meta"]["io.modelcontextprotocol/serverInfo"]["name"], "outlast");
    assert!(result["ttlMs"].is_u64() && result["cacheScope"].is_string(), "{result}");
    assert_eq!(result["instructions"], "# a\nuse a");
}

#[test]
fn on_stdio_a_client_of_either_era_must_open_first() {
    let mut story = Story::new(settings(vec![stdio("a")]), &[("a", maker(&["echo"]))]);
    story.came(1, Front::Lines, local()).ask(1, json!(1), "tools/list", json!({}));
    assert_eq!(story.heard(1).json()["error"]["code"], -32602);
    story.ask(1, json!(2), "ping", json!({})).hears(1, json!({"jsonrpc": "2.0", "id": 2, "result": {}}));
    story.ask_stateless(1, json!(3), "server/discover", json!({}));
    assert_eq!(story.heard(1).json()["result"]["resultType"], "complete");
    story.ask_stateless(1, json!(4), "tools/call", json!({"name": "a__echo"}));
    let (link, told) = story.told("a");
    story.answer(link, &told["id"], json!({}));
    assert_eq!(story.heard(1).json()["result"]["resultType"], "complete");
    // Python clients may fall back to the handshake after a discovery.
    story.ask(
        1,
        json!(5),
        "initialize",
        json!({"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}),
    );
    assert_eq!(story.heard(1).json()["result"]["protocolVersion"], "2024-11-05");
    story.ask(1, json!(6), "tools/list", json!({}));
    assert_eq!(story.heard(1).json()["result"].get("resultType"), None);
}

#[test]
fn a_stateless_child_is_detected_and_used_in_its_era() {
    let mut story = Story::simple(&[("a", modern(&["echo"]))]);
    assert_eq!(story.status("a")["era"], "stateless");
    story.call(1, 7, "a__echo");
    let (link, told) = story.told("a");
    assert_eq!(told["params"]["name"], "echo");
    assert_eq!(told["params"]["_meta"][VERSION], "2026-07-28");
    assert_eq!(told["params"]["_meta"]["io.modelcontextprotocol/clientInfo"]["name"], "client 1");
    assert_eq!(
        told["params"]["_meta"]["io.modelcontextprotocol/clientCapabilities"],
        json!({"sampling": {}, "elicitation": {}, "roots": {}})
    );
    let level = "io.modelcontextprotocol/logLevel";
    assert_eq!(told["params"]["_meta"][level], "debug", "a client of the other era hears logs without asking");
    story.answer(link, &told["id"], json!({"content": [], "resultType": "complete"}));
    assert_eq!(story.heard(1).json()["id"], 7);
    story.ask(1, json!(70), "logging/setLevel", json!({"level": "error"}));
    story.heard(1);
    story.call(1, 71, "a__echo");
    let (link, told) = story.told("a");
    assert_eq!(told["params"]["_meta"][level], "error");
    story.answer(link, &told["id"], json!({"content": [], "resultType": "complete"}));
    story.heard(1);
    // Existing members of `_meta` are kept.
    story.ask(1, json!(8), "tools/call", json!({"name": "a__echo", "_meta": {"progressToken": "t"}}));
    let told = story.told("a").1;
    assert_eq!(told["params"]["_meta"]["progressToken"], told["id"]);
    assert_eq!(told["params"]["_meta"][VERSION], "2026-07-28");
}

#[test]
fn a_child_of_neither_era_fails_with_its_first_error() {
    let neither = Maker { handshake: false, stateless: false, ..maker(&[]) };
    let mut story = Story::new(settings(vec![stdio("a")]), &[("a", neither)]);
    story.event(Event::TimePassed);
    let link = story.link("a");
    assert_eq!(story.disconnected, [(link, true)]);
    story.dies(link);
    let words = story.status("a")["last_exit"]["words"].as_str().expect("words").to_owned();
    assert!(words.contains("stateless only (-32022)"), "{words}");
}

#[test]
fn an_http_backend_of_both_eras_gets_each_clients_era() {
    let both = Maker { stateless: true, ..maker(&["echo"]) };
    let mut story = Story::new(settings(vec![http("a")]), &[("a", both)]);
    story.shake(1);
    story.call(1, 1, "a__echo");
    let (handshake, told) = story.told("a");
    assert_eq!(told["params"].get("_meta"), None, "{told}");
    story.answer(handshake, &told["id"], json!({})).hears(1, json!({"jsonrpc": "2.0", "id": 1, "result": {}}));
    story.post(10, json!(2), "tools/call", json!({"name": "a__echo"}));
    let (stateless, told) = story.told("a");
    assert_ne!(handshake, stateless);
    story.answer(stateless, &told["id"], json!({"resultType": "complete"}));
    story.hears(10, json!({"jsonrpc": "2.0", "id": 2, "result": {"resultType": "complete"}}));
    assert_eq!(story.connected.len(), 2);
}

#[test]
fn an_http_backend_of_the_handshake_era_is_detected_by_discovery() {
    let mut story = Story::new(settings(vec![http("a")]), &[("a", maker(&["echo"]))]);
    story.shake(1);
    assert_eq!(story.status("a")["era"], "handshake");
    assert_eq!(story.connected.len(), 1);
}

#[test]
fn a_lost_http_request_is_repeated_if_it_was_not_sent() {
    let mut a = maker(&["echo"]);
    a.resources = vec![json!({"uri": "file:///a", "name": "a"})];
    for (method, params, was_sent, again) in [
        ("tools/call", json!({"name": "a__echo"}), true, false),
        ("resources/read", json!({"uri": "file:///a"}), true, true),
    ] {
        let mut story = Story::new(settings(vec![http("a")]), &[("a", a.clone())]);
        story.shake(1).ask(1, json!(1), method, params);
        let (link, told) = story.told("a");
        let id = Id::parse(&told["id"].to_string()).expect("an id");
        story.event(Event::RequestLost { link, id: id.clone(), was_sent, why: "reset".into() });
        match again {
            true => {
                let (_, told) = story.told("a");
                let id = Id::parse(&told["id"].to_string()).expect("an id");
                story.hears_nothing(1).event(Event::RequestLost { link, id, was_sent: true, why: "reset".into() });
                assert_eq!(story.heard(1).json()["error"]["code"], 7001);
            }
            false => assert_eq!(story.heard(1).json()["result"]["isError"], true),
        }
        assert_eq!(story.status("a")["state"], "ready");
    }
}

#[test]
fn a_subscription_is_acknowledged_and_gets_changes_under_its_own_id() {
    let mut a = maker(&["echo"]);
    a.resources = vec![json!({"uri": "file:///a", "name": "a"})];
    for era in ["handshake", "stateless"] {
        let mut a = a.clone();
        (a.handshake, a.stateless) = (era == "handshake", era == "stateless");
        let mut story = Story::simple(&[("a", a)]);
        story.links.clear();
        story.post(
            10,
            json!("sub"),
            "subscriptions/listen",
            json!({"notifications": {"toolsListChanged": true, "resourceSubscriptions": ["file:///a", "no://where"]}}),
        );
        let first = story.heard(10);
        assert_eq!(first.json()["method"], "notifications/subscriptions/acknowledged");
        assert_eq!(first.json()["params"]["_meta"][SUBSCRIPTION], "sub");
        assert_eq!(first.about, Some(Id::text("sub")));
        let link = story.link("a");
        let wanted = story.links.iter().map(|(_, text)| parsed(text)).collect::<Vec<_>>();
        let (method, place) = match era {
            "handshake" => ("resources/subscribe", "/params/uri"),
            _ => ("subscriptions/listen", "/params/notifications/resourceSubscriptions/0"),
        };
        assert!(
            wanted.iter().any(|told| told["method"] == method && told.pointer(place) == Some(&json!("file:///a"))),
            "{wanted:#?}"
        );

        story.link_says(link, json!({"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": {"uri": "file:///a", "_meta": {SUBSCRIPTION: 99}}}));
        story.hears(10, json!({"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": {"uri": "file:///a", "_meta": {SUBSCRIPTION: "sub"}}}));
        story.maker("a").tools.push(tool("more"));
        story.link_says(link, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}));
        story.hears(10, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed", "params": {"_meta": {SUBSCRIPTION: "sub"}}}));
        story.hears(1, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})).hears_nothing(1);

        // Another child gets the same subscription.
        story.links.clear();
        story.pass(secs(6)).dies(link);
        assert!(
            story.links.iter().any(|(_, text)| parsed(text)["method"] == method && text.contains("file:///a")),
            "{:#?}",
            story.links
        );
        story.event(Event::StopAsked);
        let end = story.heard(10).json();
        assert_eq!((&end["id"], &end["result"]["_meta"][SUBSCRIPTION]), (&json!("sub"), &json!("sub")));
    }
}

#[test]
fn a_handshake_client_watches_a_stateless_backends_resource() {
    let mut a = modern(&[]);
    a.resources = vec![json!({"uri": "file:///a", "name": "a"})];
    let mut story = Story::simple(&[("a", a)]);
    let link = story.link("a");
    story.links.clear();
    story.shake(2).ask(1, json!(1), "resources/subscribe", json!({"uri": "file:///a"}));
    story.hears(1, json!({"jsonrpc": "2.0", "id": 1, "result": {}}));
    assert!(story.links.iter().any(|(_, text)| text.contains("subscriptions/listen") && text.contains("file:///a")));
    story.link_says(link, json!({"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": {"uri": "file:///a", "_meta": {SUBSCRIPTION: 99}}}));
    story.hears(
        1,
        json!({"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": {"uri": "file:///a"}}),
    );
    story.hears_nothing(2);
    // A batch reports a resource once, and the resource above one that changed.
    let changed =
        |uri: &str| json!({"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": {"uri": uri}});
    let all = [changed("file:///a"), changed("file:///b"), changed("file:///a"), changed("file:///a/b/c")];
    story.link_says(link, json!(all));
    story.hears(1, changed("file:///a")).hears(1, changed("file:///a/b/c")).hears_nothing(1);
    story.links.clear();
    story.ask(1, json!(2), "resources/unsubscribe", json!({"uri": "file:///a"})).heard(1);
    assert!(story.links.iter().any(|(_, text)| text.contains("subscriptions/listen") && !text.contains("file:///a")));
}

#[test]
fn a_resource_is_watched_until_its_last_subscriber_is_unsubscribed() {
    let mut a = maker(&[]);
    a.resources = vec![json!({"uri": "file:///a", "name": "a"}), json!({"uri": "file:///b", "name": "b"})];
    let mut story = Story::simple(&[("a", a)]);
    story.shake(2).ask(1, json!(1), "resources/subscribe", json!({"uri": "file:///b"})).heard(1);
    assert_eq!(story.told("a").1["params"]["uri"], "file:///b");
    for client in [1, 2] {
        story.ask(client, json!(2), "resources/subscribe", json!({"uri": "file:///a"})).heard(client);
    }
    assert_eq!(story.told("a").1["params"]["uri"], "file:///a");
    story.told_nothing("a");
    story.ask(1, json!(3), "resources/unsubscribe", json!({"uri": "file:///a"})).heard(1);
    story.told_nothing("a");
    story.ask(2, json!(3), "resources/unsubscribe", json!({"uri": "file:///a"})).heard(2);
    let (_, told) = story.told("a");
    assert_eq!((&told["method"], &told["params"]["uri"]), (&json!("resources/unsubscribe"), &json!("file:///a")));
}

/// A client could otherwise keep as many bytes in memory as a body may have, a thousand times.
#[test]
fn a_resource_with_a_long_address_is_not_subscribed_to() {
    // The only backend with resources owns every address.
    let mut story = Story::simple(&[("a", maker(&[]))]);
    let (longest, longer) = ("x".repeat(8 << 10), "x".repeat((8 << 10) + 1));
    story.ask(1, json!(1), "resources/subscribe", json!({"uri": longer})).told_nothing("a");
    assert_eq!(story.heard(1).json()["error"]["code"], -32602);
    story.ask(1, json!(2), "resources/subscribe", json!({"uri": longest})).heard(1);
    assert_eq!(story.told("a").1["params"]["uri"], longest);
    let wants = json!({"notifications": {"resourceSubscriptions": [longer, "short"]}});
    story.post(10, json!(1), "subscriptions/listen", wants);
    assert_eq!(story.heard(10).json()["params"]["notifications"]["resourceSubscriptions"], json!(["short"]));
}

#[test]
fn a_client_that_leaves_is_unsubscribed() {
    let mut a = maker(&[]);
    a.resources = vec![json!({"uri": "file:///a", "name": "a"})];
    let mut story = Story::simple(&[("a", a)]);
    story.shake(2);
    for client in [1, 2] {
        story.ask(client, json!(1), "resources/subscribe", json!({"uri": "file:///a"})).heard(client);
    }
    assert_eq!(story.told("a").1["method"], "resources/subscribe");
    story.told_nothing("a").event(Event::ClientLeft { client: 1 }).told_nothing("a");
    story.event(Event::ClientLeft { client: 2 });
    assert_eq!(story.told("a").1["method"], "resources/unsubscribe");
}

#[test]
fn a_subscription_that_a_backend_ends_is_opened_again_and_a_refused_one_is_not() {
    for how in ["result", "cancelled", "lost", "refused"] {
        let mut story = Story::new(settings(vec![http("a")]), &[("a", modern(&["x"]))]);
        story.shake(1);
        let listens =
            |story: &Story| story.links.iter().filter(|(_, text)| text.contains("subscriptions/listen")).count();
        let (link, text) =
            story.links.iter().find(|(_, text)| text.contains("subscriptions/listen")).cloned().expect("one");
        let id = parsed(&text)["id"].clone();
        let said = match how {
            "result" => json!({"jsonrpc": "2.0", "id": id, "result": {"resultType": "complete"}}),
            "cancelled" => json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}}),
            _ => json!({"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "what?"}}),
        };
        if how == "lost" {
            let id = Id::parse(&id.to_string()).expect("an id");
            story.event(Event::RequestLost { link, id, was_sent: true, why: "cut".into() });
        } else {
            story.link_says(link, said);
        }
        // A change in the meantime is detected.
        story.maker("a").tools.push(tool("y"));
        story.pass(secs(29)).hears_nothing(1);
        assert_eq!(listens(&story), 1, "{how}");
        story.pass(secs(2));
        if how == "refused" {
            assert_eq!(listens(&story), 1);
            story.hears_nothing(1);
        } else {
            assert_eq!(listens(&story), 2, "{how}");
            story.hears(1, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}));
        }
    }
}
