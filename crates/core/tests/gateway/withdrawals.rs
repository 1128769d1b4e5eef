//! In a cluster the guards are at the replica of the client, and calls may wait at the host of their backend.

use crate::story::*;

const WITHDRAW: &str = "notifications/outlast/withdraw";
const WITHDRAWN: i64 = 7031;

fn of(backend: Backend, is_host: bool, maker: Maker) -> Story {
    let given = Settings { is_host, ..settings(vec![backend]) };
    let mut story = Story::new(given, &[("a", maker)]);
    story.event(Event::TimePassed);
    story.shake(1);
    story
}

fn off(story: &mut Story) {
    story.event(Event::SwitchAsked { ticket: 1, what: Switch::Tool("a__x".into()), off: true }).heard(1);
}

#[test]
fn a_call_at_a_host_is_withdrawn_when_its_tool_is_switched_off() {
    let mut story = of(Backend { placement: Placement::One, ..stdio("a") }, false, maker(&["x", "y"]));
    story.call(1, 1, "a__x").call(1, 2, "a__y");
    let ((link, first), (_, second)) = (story.told("a"), story.told("a"));
    off(&mut story);
    let (_, told) = story.told("a");
    assert_eq!(told, json!({"jsonrpc": "2.0", "method": WITHDRAW, "params": {"requestId": first["id"]}}));
    story.told_nothing("a");
    // The host has not sent it.
    let error = json!({"code": WITHDRAWN, "message": "not sent"});
    story.link_says(link, json!({"jsonrpc": "2.0", "id": first["id"], "error": error}));
    let answer = story.heard(1).json();
    assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(1), &json!(7013)), "{answer}");
    // Another call is not affected. A server that answers with this code by itself changes nothing.
    story.link_says(link, json!({"jsonrpc": "2.0", "id": second["id"], "error": error}));
    assert_eq!(story.heard(1).json()["error"]["code"], WITHDRAWN);
}

#[test]
fn a_call_that_its_host_had_sent_gets_its_answer() {
    let mut story = of(Backend { placement: Placement::One, ..stdio("a") }, false, maker(&["x"]));
    story.call(1, 1, "a__x");
    let (link, told) = story.told("a");
    off(&mut story);
    story.answer(link, &told["id"], json!({"content": []}));
    assert_eq!(story.heard(1).json()["result"], json!({"content": []}));
}

#[test]
fn calls_of_a_client_are_withdrawn_when_its_credentials_expire_or_are_revoked() {
    for until in [ms(0), secs(2)] {
        let mut story = of(Backend { placement: Placement::One, ..stdio("a") }, false, maker(&["x"]));
        story.event(Event::ClientAllowed { client: 1, until: Some(story.now + secs(2)) });
        story.call(1, 1, "a__x").told("a");
        if until.is_zero() {
            story.event(Event::ClientAllowed { client: 1, until: Some(story.now) });
        }
        story.pass(until);
        assert_eq!(story.told("a").1["method"], WITHDRAW);
    }
}

#[test]
fn without_a_cluster_nothing_is_withdrawn() {
    let mut story = of(stdio("a"), false, maker(&["x"]));
    story.call(1, 1, "a__x").told("a");
    off(&mut story);
    story.told_nothing("a");
}

#[test]
fn a_host_refuses_a_withdrawn_call_that_it_has_not_sent() {
    let mut story = of(Backend { prefix: String::new(), ..stdio("a") }, true, maker(&["x"]));
    let link = story.link("a");
    let withdraw = |id: u64| json!({"jsonrpc": "2.0", "method": WITHDRAW, "params": {"requestId": id}}).to_string();
    // It was sent: the withdrawal comes too late.
    story.call(1, 1, "x");
    let (_, told) = story.told("a");
    story.say(1, &withdraw(1)).hears_nothing(1);
    story.answer(link, &told["id"], json!({"content": []}));
    assert_eq!(story.heard(1).json()["id"], 1);

    story.auto = false;
    story.dies(link);
    story.call(1, 2, "x").call(1, 3, "x").say(1, &withdraw(2));
    let refused = story.heard(1).json();
    assert_eq!((&refused["id"], &refused["error"]["code"]), (&json!(2), &json!(WITHDRAWN)));
    story.auto = true;
    story.pass(secs(5));
    let link = story.link("a");
    story.up.insert(link.serial, link);
    story.event(Event::LinkUp { link, pid: None });
    let sent: Vec<_> = story.links.iter().filter(|(_, text)| text.contains("tools/call")).collect();
    assert_eq!(sent.len(), 1, "{sent:?}");
}

#[test]
fn a_withdrawn_call_is_not_sent_a_second_time_after_a_crash() {
    let mut maker = maker(&["x"]);
    maker.tools[0]["annotations"] = json!({"readOnlyHint": true});
    let backend = Backend { prefix: String::new(), retry_annotated: true, ..stdio("a") };
    for is_withdrawn in [false, true] {
        let mut story = of(backend.clone(), true, maker.clone());
        let link = story.link("a");
        story.call(1, 1, "x").told("a");
        if is_withdrawn {
            story.say(1, &json!({"jsonrpc": "2.0", "method": WITHDRAW, "params": {"requestId": 1}}).to_string());
        }
        story.links.clear();
        story.dies(link);
        story.pass(secs(5));
        let is_sent = story.links.iter().any(|(_, text)| text.contains("tools/call"));
        assert_eq!(is_sent, !is_withdrawn);
        if is_withdrawn {
            assert_eq!(story.heard(1).json()["error"]["code"], WITHDRAWN);
        }
    }
}

#[test]
fn a_gateway_that_is_no_host_refuses_the_notification() {
    let mut story = of(stdio("a"), false, maker(&["x"]));
    let note = json!({"jsonrpc": "2.0", "method": WITHDRAW, "params": {"requestId": 1}});
    story.say(1, &note.to_string());
    assert_eq!(story.refused_notes.len(), 1);
}
