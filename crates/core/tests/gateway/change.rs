//! Changes of the configuration while clients are connected.

use crate::story::*;

fn tools(story: &mut Story, client: u64) -> Vec<String> {
    story.ask(client, json!("list"), "tools/list", json!({}));
    let list = story.heard(client).json();
    let tools = list["result"]["tools"].as_array().expect("tools");
    tools.iter().map(|tool| tool["name"].as_str().expect("a name").to_owned()).collect()
}

fn changed() -> serde_json::Value {
    json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
}

#[test]
fn the_same_configuration_changes_nothing() {
    let mut story = Story::simple(&[("a", maker(&["x"])), ("b", maker(&["y"]))]);
    story.call(1, 1, "a__x");
    story.event(Event::Configured(Box::new(settings(vec![stdio("a"), stdio("b")])))).hears_nothing(1);
    assert_eq!(story.connected.len(), 2);
    assert!(story.disconnected.is_empty());
}

#[test]
fn only_changed_backends_are_restarted() {
    let mut story = Story::simple(&[("a", maker(&["x"])), ("b", maker(&["y"]))]);
    story.set_maker("c", maker(&["z"]));
    let (a, b) = (story.link("a"), story.link("b"));
    story.call(1, 1, "b__y");
    let (_, told) = story.told("b");
    // One backend stays, one is removed, one is added.
    story.event(Event::Configured(Box::new(settings(vec![stdio("a"), stdio("c")]))));
    assert_eq!(story.connected.len(), 3);
    assert!(story.disconnected.is_empty(), "b has a call to finish");
    story.hears(1, changed());
    story.hears(1, changed()).hears_nothing(1);
    assert_eq!(tools(&mut story, 1), ["a__x", "c__z"]);
    story.event(Event::LinkSaid {
        link: b,
        message: json!({"jsonrpc": "2.0", "id": told["id"], "result": {"ok": 1}}).to_string().into(),
    });
    story.hears(1, json!({"jsonrpc": "2.0", "id": 1, "result": {"ok": 1}}));
    assert_eq!(story.disconnected, [(b, false)]);
    story.call(1, 2, "b__y");
    assert_eq!(story.heard(1).json()["error"]["code"], -32602);
    story.call(1, 3, "a__x");
    assert_eq!(story.told("a").0, a);
}

#[test]
fn a_changed_command_starts_another_child_and_held_calls_go_there() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    let old = story.link("a");
    story.call(1, 1, "a__x");
    let (_, told) = story.told("a");
    let mut other = stdio("a");
    other.kind =
        Kind::Stdio { command: "other".into(), args: vec![], env: Default::default(), cwd: None, sandbox: None };
    story.event(Event::Configured(Box::new(settings(vec![other]))));
    assert_eq!(story.connected.len(), 2);
    story.call(1, 2, "a__x");
    assert_eq!(story.told("a").0, story.link("a"));
    story.answer(old, &told["id"], json!({})).heard(1);
    assert_eq!(story.disconnected, [(old, false)]);
    assert_eq!(story.status("a")["state"], "ready");
}

#[test]
fn a_changed_prefix_renames_tools_and_restarts_no_process() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.event(Event::Configured(Box::new(settings(vec![Backend { prefix: "new_".into(), ..stdio("a") }]))));
    story.hears(1, changed());
    assert_eq!(tools(&mut story, 1), ["new_x"]);
    assert_eq!(story.connected.len(), 1);
}

#[test]
fn a_changed_backend_that_was_given_up_is_tried_again() {
    let hopeless = Backend { policy: Policy { restarts_max: Some(0), ..Policy::exponential() }, ..stdio("a") };
    let mut story = Story::new(settings(vec![hopeless.clone()]), &[("a", maker(&["x"]))]);
    story.event(Event::TimePassed);
    let link = story.link("a");
    story.dies(link);
    assert_eq!(story.status("a")["state"], "given_up");
    story.event(Event::Configured(Box::new(settings(vec![Backend { call_timeout: secs(7), ..hopeless }]))));
    assert_eq!(story.status("a")["state"], "ready");
}

#[test]
fn changed_roles_and_rates_apply_at_once() {
    let mut story = Story::simple(&[("a", maker(&["x", "y"]))]);
    story.shake_as(2, Who { name: "r".into(), role: Some("r".into()), profile: None }, json!({}));
    let mut configured = settings(vec![stdio("a")]);
    configured.roles.insert("r".into(), Role { allow: vec![Pattern("a__x".into())], deny: vec![] });
    story.event(Event::Configured(Box::new(configured)));
    story.hears(2, changed()).hears_nothing(1);
    assert_eq!(tools(&mut story, 2), ["a__x"]);
    assert_eq!(tools(&mut story, 1), ["a__x", "a__y"]);
}

#[test]
fn a_backend_that_comes_back_keeps_its_number() {
    let mut story = Story::simple(&[("a", maker(&["x"])), ("b", maker(&["y"]))]);
    let number = story.number("b");
    story.event(Event::Configured(Box::new(settings(vec![stdio("a")]))));
    assert!(story.gateway.backend(number).is_none());
    story.event(Event::Configured(Box::new(settings(vec![stdio("b"), stdio("a")]))));
    assert_eq!(story.number("b"), number);
    story.call(1, 1, "b__y").told("b");
}

#[test]
fn a_replaced_link_does_not_change_the_offer() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    let old = story.link("a");
    story.call(1, 1, "a__x").told("a");
    // The backend is asked again for its tools, and replaced before it answers.
    story.maker("a").mute = true;
    story.link_says(old, changed());
    let (_, asked) = story.told("a");
    assert_eq!(asked["method"], "tools/list");
    story.maker("a").mute = false;
    story.event(Event::RestartAsked { ticket: 1, backend: None, reason: "why not".into() });
    assert_ne!(story.link("a"), old);
    story.answer(old, &asked["id"], json!({"tools": [tool("gone")]})).hears_nothing(1);
    assert_eq!(tools(&mut story, 1), ["a__x"]);
}
