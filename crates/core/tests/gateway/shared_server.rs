//! One server that many clients use as if each had it alone.

use crate::story::*;

fn clients(capabilities: &str) -> SharedClients {
    SharedClients {
        capabilities: capabilities.into(),
        info: Some(r#"{"name":"first","version":"3"}"#.into()),
        version: Some("2025-06-18".into()),
    }
}

const ALL: &str = r#"{"sampling":{},"elicitation":{},"roots":{}}"#;

impl Story {
    fn joins(&mut self, client: u64) -> &mut Story {
        let who = Who { name: client.to_string(), role: None, profile: None };
        self.came(client, Front::Lines, who).initializes(client, "2025-11-25").heard(client);
        self.say(client, r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#)
    }

    fn initializes(&mut self, client: u64, version: &str) -> &mut Story {
        let capabilities: serde_json::Value = serde_json::from_str(ALL).expect("JSON");
        let info = json!({"name": "c", "version": "1"});
        let params = json!({"protocolVersion": version, "capabilities": capabilities, "clientInfo": info});
        self.ask(client, json!("hello"), "initialize", params)
    }
}

#[test]
fn the_server_answers_the_handshake_itself() {
    let mut story = Story::shared(clients(ALL), Maker { mute: true, ..maker(&["x"]) });
    story.came(1, Front::Lines, local()).initializes(1, "2025-11-25").hears_nothing(1);
    let (link, opened) = story.told("s");
    assert_eq!(
        opened["params"],
        json!({"protocolVersion": "2025-06-18", "capabilities": {"sampling": {}, "elicitation": {}, "roots": {}}, "clientInfo": {"name": "first", "version": "3"}})
    );
    let own = json!({"protocolVersion": "2025-06-18", "capabilities": {"tools": {}, "experimental": {"e": 1}}, "serverInfo": {"name": "own", "version": "9", "icons": []}, "instructions": "# not\nchanged", "more": [1]});
    story.answer(link, &opened["id"], own.clone()).hears_nothing(1);
    let (_, listed) = story.told("s");
    story.answer(link, &listed["id"], json!({"tools": [tool("x")]}));
    story.hears(1, json!({"jsonrpc": "2.0", "id": "hello", "result": own}));
    // An older client gets the revision that it asked for.
    story.came(2, Front::Lines, local()).initializes(2, "2024-11-05");
    let mut older = own;
    older["protocolVersion"] = json!("2024-11-05");
    story.hears(2, json!({"jsonrpc": "2.0", "id": "hello", "result": older}));
    // A client of the stateless era.
    story.came(3, Front::Lines, local()).ask_stateless(3, json!(1), "server/discover", json!({}));
    let found = story.heard(3).json()["result"].clone();
    assert_eq!(found["capabilities"], older["capabilities"]);
    assert_eq!(found["instructions"], "# not\nchanged");
    assert_eq!(found["_meta"]["io.modelcontextprotocol/serverInfo"]["name"], "own");
}

#[test]
fn names_and_arguments_reach_the_server_unchanged() {
    let long = "n".repeat(2000);
    let mut story = Story::shared(clients("{}"), maker(&["a.b c", "ü/ö", &long]));
    story.joins(1).ask(1, json!(1), "tools/list", json!({}));
    let names: Vec<serde_json::Value> = story.heard(1).json()["result"]["tools"]
        .as_array()
        .expect("tools")
        .iter()
        .map(|tool| tool["name"].clone())
        .collect();
    assert_eq!(names, [json!("a.b c"), json!("ü/ö"), json!(long)]);
    // A listed tool, one that is not listed, arguments that a guard would refuse, members that are there twice.
    for said in [
        r#"{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"a.b c","arguments":{"bad":1}}}"#,
        r#"{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"hidden","arguments":{}}}"#,
        r#"{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{"name":"ü/ö","Name":"x","arguments":{"a":1,"a":2}}}"#,
        r#"{"jsonrpc":"2.0","id":5,"method":"prompts/get","params":{"name":"hidden"}}"#,
        r#"{"jsonrpc":"2.0","id":6,"method":"own/method","params":{"x":[1]}}"#,
    ] {
        story.say(1, said);
        let number = story.number("s");
        let at = story.links.iter().position(|(link, text)| link.backend == number && text.contains("params"));
        let (_, text) = story.links.remove(at.unwrap_or_else(|| panic!("{said} was not forwarded")));
        let params = |text: &str| text[text.find(r#""params""#).expect("params")..].to_owned();
        assert_eq!(params(&text), params(said));
    }
    story.hears_nothing(1);
    story.say(1, r#"{"jsonrpc":"2.0","method":"notifications/own","params":{"y":1}}"#);
    assert_eq!(story.told("s").1["method"], "notifications/own");
    let link = story.link("s");
    story.link_says(link, json!({"jsonrpc": "2.0", "method": "notifications/theirs"}));
    assert_eq!(story.heard(1).json()["method"], "notifications/theirs");
}

#[test]
fn the_relay_alone_decides_about_timeouts() {
    let mut story = Story::shared(clients("{}"), maker(&["x"]));
    story.joins(1).joins(2).call(1, 1, "x").call(2, 1, "x");
    let (link, first) = story.told("s");
    let (_, second) = story.told("s");
    let back = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}});
    story.say(1, &back.to_string());
    assert_eq!(story.told("s").1["params"]["requestId"], first["id"]);
    story.pass(secs(100_000)).told_nothing("s").hears_nothing(1).hears_nothing(2);
    story.answer(link, &second["id"], json!({"done": true}));
    story.hears(2, json!({"jsonrpc": "2.0", "id": 1, "result": {"done": true}})).hears_nothing(1);
}

/// The relay does not know of parked calls: for the server they may be over.
#[test]
fn a_parked_call_ends_in_time_though_its_server_reported_progress() {
    let mut story = Story::shared(clients(ALL), maker(&["x"]));
    let declared = json!({"name": "x", "_meta": {"progressToken": "p"}});
    story.came(1, Front::Lines, local()).ask_stateless(1, json!(1), "tools/call", declared);
    let (link, told) = story.told("s");
    let ask = json!({"jsonrpc": "2.0", "id": "q", "method": "elicitation/create", "params": {}});
    story.link_says(link, ask).pass(ms(20));
    assert_eq!(story.heard(1).json()["result"]["resultType"], "input_required");
    let progress = json!({"jsonrpc": "2.0", "method": "notifications/progress",
        "params": {"progressToken": told["params"]["_meta"]["progressToken"], "progress": 1}});
    story.link_says(link, progress).answer(link, &told["id"], json!({"content": []}));
    story.event(Event::ClientLeft { client: 1 }).pass(secs(301));
    let status = story.gateway.status(story.now).to_json();
    assert_eq!(status["under_way"]["calls"], 0, "{status}");
}

#[test]
fn clients_with_other_capabilities_share_another_server() {
    let story = Story::shared(clients(r#"{"roots":{"listChanged":true},"sampling":{}}"#), maker(&["x"]));
    let admitted = |capabilities: &str| story.gateway.admit(capabilities).map_err(|apart| apart.with_equals);
    assert_eq!(admitted(r#"{ "sampling": {}, "roots": {"listChanged": true} }"#), Ok(()));
    for other in ["{}", r#"{"sampling":{}}"#, r#"{"roots":{"listChanged":false},"sampling":{}}"#, "nonsense"] {
        assert_eq!(admitted(other), Err(true), "{other}");
    }
}

#[test]
fn a_server_that_asks_for_roots_keeps_one_client() {
    let mut story = Story::shared(clients(ALL), maker(&["x"]));
    story.joins(1).joins(2).joins(3).call(2, 1, "x");
    let (link, _) = story.told("s");
    story.link_says(link, json!({"jsonrpc": "2.0", "id": "r", "method": "roots/list"}));
    assert_eq!(story.heard(2).json()["method"], "roots/list", "its call is the only one in flight");
    let separated: Vec<u64> = story.separated.iter().map(|(client, _)| *client).collect();
    assert_eq!(separated, [1, 3]);
    let apart = story.gateway.admit(ALL).expect_err("it has a client");
    assert!(apart.why.contains("roots") && !apart.with_equals, "{apart:?}");
    for client in [1, 2, 3] {
        story.event(Event::ClientLeft { client });
    }
    assert!(story.gateway.admit(ALL).is_err(), "the server has the roots of a client that left");
}

#[test]
fn a_question_right_after_the_handshake_waits_for_a_client() {
    let mut story = Story::shared(clients(ALL), maker(&["x"]));
    let link = story.link("s");
    story.link_says(link, json!({"jsonrpc": "2.0", "id": "r", "method": "roots/list"}));
    story.came(1, Front::Lines, local()).initializes(1, "2025-11-25");
    assert!(story.heard(1).json()["result"].is_object());
    story.hears_nothing(1).told_nothing("s");
    story.say(1, r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
    let asked = story.heard(1).json();
    assert_eq!(asked["method"], "roots/list");
    story.say(1, &json!({"jsonrpc": "2.0", "id": asked["id"], "result": {"roots": []}}).to_string());
    assert_eq!(story.told("s").1, json!({"jsonrpc": "2.0", "id": "r", "result": {"roots": []}}));
}

#[test]
fn a_question_for_the_cancelled_call_of_the_last_client_does_not_wait_for_the_next_one() {
    let mut story = Story::shared(clients(ALL), maker(&["x"]));
    story.joins(1).call(1, 1, "x");
    let (link, _) = story.told("s");
    story.event(Event::ClientLeft { client: 1 });
    assert_eq!(story.told("s").1["method"], "notifications/cancelled");
    story.link_says(link, json!({"jsonrpc": "2.0", "id": "q", "method": "elicitation/create", "params": {}}));
    let (_, refused) = story.told("s");
    assert_eq!((&refused["id"], &refused["error"]["code"]), (&json!("q"), &json!(-32800)));
    story.joins(2).hears_nothing(2);
    assert!(story.gateway.admit(ALL).is_ok());
    // Later it cannot be for that call.
    story.event(Event::ClientLeft { client: 2 }).pass(secs(31));
    story.link_says(link, json!({"jsonrpc": "2.0", "id": "q", "method": "elicitation/create", "params": {}}));
    story.told_nothing("s").joins(3);
    assert_eq!(story.heard(3).json()["method"], "elicitation/create");
}

#[test]
fn a_question_for_an_unknown_client_separates_all_but_the_first() {
    let elicit = json!({"jsonrpc": "2.0", "id": 1, "method": "elicitation/create", "params": {}});
    for in_flight in [&[][..], &[2, 3]] {
        let mut story = Story::shared(clients(ALL), maker(&["x"]));
        story.joins(1).joins(2).joins(3);
        let link = story.link("s");
        for client in in_flight {
            story.call(*client, 1, "x").told("s");
        }
        story.link_says(link, elicit.clone());
        assert_eq!(story.told("s").1["error"]["code"], 7020);
        let separated: Vec<u64> = story.separated.iter().map(|(client, _)| *client).collect();
        assert_eq!(separated, [2, 3], "{in_flight:?}");
        story.link_says(link, elicit.clone());
        assert_eq!(story.separated.len(), 2, "they are told once");
    }
}

#[test]
fn a_question_that_no_client_can_answer_separates_none() {
    let mut story = Story::shared(clients("{}"), maker(&["x"]));
    story.joins(1).joins(2);
    let link = story.link("s");
    for method in ["roots/list", "elicitation/create", "sampling/createMessage"] {
        story.link_says(link, json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": {}}));
        assert!(story.told("s").1["error"].is_object(), "{method}");
    }
    assert!(story.separated.is_empty() && story.gateway.exclusive().is_none());
}

#[test]
fn logs_and_subscriptions_reach_the_clients_that_want_them() {
    let resources = vec![json!({"name": "r", "uri": "r://1"})];
    let mut story = Story::shared(clients("{}"), Maker { resources, ..maker(&["x"]) });
    story.joins(1).joins(2);
    for (client, level) in [(1, "error"), (2, "info")] {
        story.ask(client, json!(1), "logging/setLevel", json!({"level": level})).heard(client);
        assert_eq!(story.told("s").1["params"]["level"], level, "the lowest level that a client wants");
    }
    story.ask(2, json!(2), "resources/subscribe", json!({"uri": "r://1"})).heard(2);
    let (link, _) = story.told("s");
    story.link_says(
        link,
        json!({"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": {"uri": "r://1"}}),
    );
    assert_eq!(story.heard(2).json()["method"], "notifications/resources/updated");
    story.call(1, 3, "x").call(2, 3, "x");
    let log = |level: &str| json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": level, "data": 1}});
    story.link_says(link, log("info")).hears_nothing(1).hears(2, log("info"));
    story.link_says(link, log("error")).hears(1, log("error")).hears(2, log("error"));
}
