//! W2, W3: a new child receives the messages of the old one's opening, in the client's own bytes, and the client
//! notices nothing.

use serde_json::{Value, json};

use super::client::{META, Place, Setup, VERSION, signal, text};
use nix::sys::signal::Signal;

/// Returns the id of a line; everything else in it must be the client's bytes.
fn private_id(line: &str, original: &str, id: &str) -> String {
    let (before, after) = original.split_once(id).expect("the id is in the line");
    let private = line
        .strip_prefix(before)
        .and_then(|rest| rest.strip_suffix(after))
        .unwrap_or_else(|| panic!("{line}\nis not, but for its id,\n{original}"));
    assert!(private.starts_with("\"outlast-"), "{private}");
    private.to_owned()
}

#[test]
fn a_new_child_gets_the_whole_handshake_and_then_held_requests() {
    let place = Place::new();
    let log = place.join("log");
    let mut client = Setup::new(&place).puppet(["--log", &log, "--resources", "--logging"]).start();

    let initialize = r#"{ "method":"initialize", "id" : "op\u0065n","params":{"protocolVersion":"2025-06-18","capabilities":{ },"odd":1.0,"clientInfo":{"name":"proof","version":"1"}}, "jsonrpc":"2.0" }"#;
    let initialized =
        r#"{"jsonrpc":"2.0",  "method":"notifications/initialized", "params":{"big":12345678901234567890}}"#;
    let set_level = r#"{"jsonrpc":"2.0","id":-7,"method":"logging/setLevel","params":{ "level":"error" }}"#;
    let subscribe =
        r#"{"jsonrpc":"2.0","id":100,"method":"resources/subscribe","params":{"uri":"puppet://a","odd":[ ]}}"#;
    client.owed(r#""open""#);
    client.line(initialize);
    assert_eq!(client.answer_to(r#""open""#)["result"]["protocolVersion"], VERSION);
    client.line(initialized);
    client.ask("logging/setLevel", json!({"level": "debug"}));
    client.owed("-7");
    client.line(set_level);
    client.answer_to("-7");
    client.owed("100");
    client.line(subscribe);
    client.answer_to("100");
    client.ask("resources/subscribe", json!({"uri": "puppet://b"}));
    client.ask("resources/unsubscribe", json!({"uri": "puppet://b"}));

    let old = client.kill_server();
    place.recorded("server_crashed", 1);
    let held = r#"{"jsonrpc":"2.0","id":"h\n","method":"tools/call","params":{"name":"state" ,"arguments":{"n":1.0}}}"#;
    client.owed(r#""h\n""#);
    client.line(held);
    let answer = client.answer_to(r#""h\n""#);
    let state: Value = serde_json::from_str(&text(&answer["result"])).expect("JSON");
    assert_eq!(state["level"], "error");
    assert_eq!(state["subscribed"], json!(["puppet://a"]));
    assert_eq!(state["phase"], "Ready");

    let new = client.server_pid();
    assert_ne!(new, old);
    let heard: Vec<String> =
        place.log("log").into_iter().filter(|(pid, _)| *pid == new).map(|(_, line)| line).collect();
    let private = [
        private_id(&heard[0], initialize, r#""op\u0065n""#),
        private_id(&heard[2], set_level, "-7"),
        private_id(&heard[3], subscribe, "100"),
    ];
    assert_eq!(heard[1], initialized);
    assert_eq!(heard[4], held);
    assert_eq!(heard.len(), 6, "the handshake, what was held, and our question for the pid: {heard:#?}");
    assert!(private[0] != private[1] && private[1] != private[2], "{private:?}");
    assert!(client.heard.is_empty(), "the client was told nothing: {:?}", client.heard);
    client.end();
}

#[test]
fn a_stateless_child_is_detected_by_discover_and_its_listens_are_opened_again() {
    let place = Place::new();
    let (log, tools) = (place.join("log"), place.write("tools.json", "[]"));
    let mut client = Setup::new(&place).puppet(["--log", &log, "--tools", &tools, "--resources"]).start();
    client.keep_raw();

    client.owed(r#""d""#);
    client.line(&format!(r#"{{"jsonrpc":"2.0","id":"d","method":"server/discover","params":{{{META}}}}}"#));
    let discovered = client.answer_to(r#""d""#)["result"].take();
    assert_eq!(discovered["supportedVersions"], json!(["2026-07-28"]));
    assert_eq!(discovered["capabilities"]["tools"]["listChanged"], true);
    assert!(discovered["ttlMs"].as_u64().is_some_and(|ttl| ttl <= 5_000), "{discovered}");

    let listen = format!(
        r#"{{"jsonrpc":"2.0", "id":"l\u0031", "method":"subscriptions/listen","params":{{"notifications":{{ "toolsListChanged":true,"resourceSubscriptions":["puppet://a"] }},{META}}}}}"#
    );
    client.owed(r#""l1""#);
    client.line(&listen);
    let acknowledged = client.next("notifications/subscriptions/acknowledged");
    let subscription = "io.modelcontextprotocol/subscriptionId";
    assert_eq!(acknowledged["params"]["_meta"][subscription], "l1");
    assert_eq!(acknowledged["params"]["notifications"]["toolsListChanged"], true);

    let names = |client: &mut super::client::Client, id: &str| -> Vec<String> {
        client.owed(id);
        client.line(&format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/list","params":{{{META}}}}}"#));
        let mut answer = client.answer_to(id);
        assert_eq!(answer["result"]["resultType"], "complete", "{answer}");
        let Value::Array(tools) = answer["result"]["tools"].take() else { panic!("{answer}") };
        tools.iter().map(|tool| tool["name"].as_str().expect("a name").to_owned()).collect()
    };
    let before = names(&mut client, "10");
    for name in ["echo", "restart_server", "server_status", "verify_server_restarted"] {
        assert_eq!(before.iter().filter(|listed| *listed == name).count(), 1, "{name} in {before:?}");
    }

    // The next child is asked with the last `_meta`, without the members that belong to one request.
    let meta = r#""_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{"elicitation":{ }},"progressToken":"p","io.modelcontextprotocol/logLevel":"debug","mine":1.0}"#;
    client.owed("11");
    client.line(&format!(
        r#"{{"jsonrpc":"2.0","id":11,"method":"tools/call","params":{{"name":"pid","arguments":{{}},{meta}}}}}"#
    ));
    let old: u32 = text(&client.answer_to("11")["result"]).parse().expect("a pid");

    place.write("tools.json", r#"[{"name":"late","inputSchema":{"type":"object"},"_meta":{"puppet/as":"pid"}}]"#);
    signal(old, Signal::SIGKILL);
    place.recorded("server_crashed", 1);
    let held = format!(
        r#"{{"jsonrpc":"2.0","id":12, "method":"tools/call","params":{{"name":"late","arguments":{{"n":1e5}},{meta}}}}}"#
    );
    client.owed("12");
    client.line(&held);
    let new: u32 = text(&client.answer_to("12")["result"]).parse().expect("a pid");
    assert_ne!(new, old);

    let changed = client.next("notifications/tools/list_changed");
    assert_eq!(changed["params"]["_meta"][subscription], "l1", "{changed}");
    let after = names(&mut client, "13");
    assert!(after.contains(&"late".to_owned()) && after.contains(&"restart_server".to_owned()), "{after:?}");

    let heard: Vec<String> =
        place.log("log").into_iter().filter(|(pid, _)| *pid == new).map(|(_, line)| line).collect();
    let discover: Value = serde_json::from_str(&heard[0]).expect("JSON");
    assert_eq!(discover["method"], "server/discover");
    assert!(discover["id"].as_str().is_some_and(|id| id.starts_with("outlast-")), "{discover}");
    let meta = &discover["params"]["_meta"];
    assert_eq!(meta["io.modelcontextprotocol/clientCapabilities"], json!({"elicitation": {}}), "{discover}");
    assert_eq!((&meta["mine"], meta.get("progressToken")), (&json!(1.0), None), "{discover}");
    assert_eq!(meta.get("io.modelcontextprotocol/logLevel"), None, "{discover}");
    let place_of = |line: &str| heard.iter().position(|heard| heard == line).unwrap_or_else(|| panic!("{heard:#?}"));
    assert!(place_of(&listen) < place_of(&held), "{heard:#?}");

    // The reopened subscription works, under the id that the client knows.
    client.owed("14");
    client.line(&format!(
        r#"{{"jsonrpc":"2.0","id":14,"method":"tools/call","params":{{"name":"touch","arguments":{{"uri":"puppet://a"}},{META}}}}}"#
    ));
    assert_eq!(text(&client.answer_to("14")["result"]), "announced to 1");
    assert_eq!(client.next("notifications/resources/updated")["params"]["_meta"][subscription], "l1");
    assert_eq!(client.count("notifications/subscriptions/acknowledged"), 0, "once is enough");
    assert_eq!(client.count("notifications/tools/list_changed"), 0, "one for all");
    // A subscription is open until it is cancelled, and then needs no answer.
    assert_eq!(client.owes(), 1);
}

#[test]
fn a_reload_replays_the_handshake_and_answers_of_the_old_child_are_delivered() {
    let place = Place::new();
    let log = place.join("log");
    let mut client = Setup::new(&place).puppet(["--log", &log]).ready();
    let old = client.server_pid();
    let slow = client.send_call("sleep", json!({"ms": 300}));
    let report = client.restart();
    assert_eq!(report["old_pid"], old);
    assert_eq!(text(&client.answer(slow)["result"]), "slept");
    let new = client.server_pid();
    assert_eq!(report["new_pid"], new);
    let methods: Vec<Value> = place
        .log("log")
        .into_iter()
        .filter(|(pid, _)| *pid == new)
        .map(|(_, line)| serde_json::from_str::<Value>(&line).expect("JSON")["method"].take())
        .collect();
    assert_eq!(methods, ["initialize", "notifications/initialized", "tools/call"]);
    client.end();
    place.is_swept();
}
