//! Long messages, which another thread parsed: the gateway does not parse them again. In these tests a part of each message
//! is no longer JSON after it was parsed, so a message that is parsed again is lost.

use bytes::Bytes;
use outlast_core::message::{Outline, Walk, parse};
use serde_json::Value;

use crate::story::*;

/// It becomes [`NOT_JSON`].
fn part() -> Value {
    json!([12345])
}

fn with_bad_part(text: &str) -> Bytes {
    assert!(text.contains("[12345]"), "{text}");
    text.replace("[12345]", NOT_JSON).into()
}

fn says_long(story: &mut Story, client: u64, message: &Value) {
    let text = message.to_string();
    let walk = Box::new(Walk::of(text.as_bytes()));
    story.event(Event::ClientSaidLong { client, message: with_bad_part(&text), walk });
}

fn requests_long(story: &mut Story, client: u64, id: u64, params: &str) {
    let text = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{params}}}"#);
    let outline = Outline::of(text.as_bytes(), &parse(text.as_bytes()).expect("JSON")).expect("a request");
    story.event(Event::ClientRequested { client, message: with_bad_part(&text), outline });
}

/// What a link was told, as text.
#[track_caller]
fn told(story: &mut Story) -> (Link, String) {
    story.links.retain(|(_, text)| text.contains(NOT_JSON));
    assert!(!story.links.is_empty(), "nothing was told; notes: {:?}", story.notes);
    story.links.remove(0)
}

fn sample() -> Value {
    json!({"jsonrpc": "2.0", "id": "q", "method": "sampling/createMessage", "params": {}})
}

#[test]
fn an_answer_of_a_client_to_a_backend_of_either_era() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.call(1, 1, "a__x");
    let (link, _) = story.told("a");
    story.link_says(link, sample());
    let asked = story.heard(1).json()["id"].clone();
    says_long(&mut story, 1, &json!({"jsonrpc": "2.0", "id": asked, "result": {"content": part()}}));
    assert_eq!(told(&mut story).1, format!(r#"{{"jsonrpc":"2.0","id":"q","result":{{"content":{NOT_JSON}}}}}"#));

    let mut story = Story::simple(&[("a", Maker { handshake: false, stateless: true, ..maker(&["x"]) })]);
    story.call(1, 1, "a__x");
    let (link, first) = story.told("a");
    let requests = json!({"q": {"method": "sampling/createMessage", "params": {}}});
    story.answer(link, &first["id"], json!({"resultType": "input_required", "inputRequests": requests}));
    let asked = story.heard(1).json()["id"].clone();
    says_long(&mut story, 1, &json!({"jsonrpc": "2.0", "id": asked, "result": {"content": part()}}));
    let again = told(&mut story).1;
    assert!(again.contains(&format!(r#""inputResponses":{{"q":{{"content":{NOT_JSON}}}}}"#)), "{again}");
}

#[test]
fn a_batch_of_a_backend() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.call(1, 1, "a__x").call(1, 2, "a__x");
    let ((link, first), (_, second)) = (story.told("a"), story.told("a"));
    let answer = |told: &Value| json!({"jsonrpc": "2.0", "id": told["id"], "result": {"content": part()}});
    let text = json!([answer(&first), answer(&second)]).to_string();
    let walk = Box::new(Walk::of(text.as_bytes()));
    story.event(Event::LinkSaidLong { link, message: with_bad_part(&text), walk });
    for id in [1, 2] {
        let heard = story.heard(1).text;
        assert!(heard.contains(&format!(r#""id":{id},"#)) && heard.contains(NOT_JSON), "{heard}");
    }
}

#[test]
fn a_line_that_is_no_message() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    let link = story.link("a");
    let text = r#"{"a":[12345]}"#;
    let walk = Box::new(Walk::of(text.as_bytes()));
    story.event(Event::LinkSaidLong { link, message: with_bad_part(text), walk });
    assert!(story.diverted.pop().is_some_and(|(_, _, is_json)| is_json));
}

#[test]
fn a_request_with_an_ambiguous_member() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    requests_long(&mut story, 1, 1, r#"{"arguments":{"x":[12345]},"name":"a__x","Name":1}"#);
    let answer = story.heard(1).json();
    assert!(answer["error"]["message"].as_str().is_some_and(|words| words.contains("`Name`")), "{answer}");
    story.told_nothing("a");
}

#[test]
fn requests_that_waited_are_sent_in_portions_and_in_order() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    let link = story.link("a");
    story.auto = false;
    story.dies(link);
    let call = |story: &mut Story, id: u64, bytes: usize| {
        story.ask(1, json!(id), "tools/call", json!({"name": "a__x", "arguments": {"n": id, "t": "x".repeat(bytes)}}));
    };
    for id in 1..=5 {
        call(&mut story, id, 3 << 20);
    }
    story.pass(secs(5));
    let link = story.link("a");
    story.up.insert(link.serial, link);
    let told = |story: &mut Story| -> Vec<Value> {
        let all = story.links.drain(..).map(|(_, text)| parsed(&text));
        all.filter(|told| told["method"] == "tools/call").map(|told| told["params"]["arguments"]["n"].clone()).collect()
    };
    story.event(Event::LinkUp { link, pid: None });
    assert_eq!(told(&mut story), [1, 2]);
    call(&mut story, 6, 1);
    assert_eq!(told(&mut story), [0; 0], "it does not overtake");
    // Two further portions, each as soon as the deadline of the machine says.
    story.pass(ms(0));
    assert_eq!(told(&mut story), [3, 4, 5, 6]);
    call(&mut story, 7, 1);
    assert_eq!(told(&mut story), [7]);
}

#[test]
fn a_request_that_waits() {
    let call = r#"{"name":"a__x","arguments":{"x":[12345]}}"#;
    // For the offer of its backend, and for its link.
    let kept = [("a".to_owned(), Offer { tools: vec![tool("x").to_string().into()], ..Offer::default() })];
    for kept in [Default::default(), kept.into()] {
        let mut story = Story::with_kept(settings(vec![stdio("a")]), &[("a", maker(&["x"]))], kept);
        story.auto = false;
        story.shake(1);
        requests_long(&mut story, 1, 1, call);
        let link = story.link("a");
        story.up.insert(link.serial, link);
        story.event(Event::LinkUp { link, pid: None });
        assert!(told(&mut story).1.contains(NOT_JSON));
    }

    // For the check of its arguments.
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    requests_long(&mut story, 1, 1, r#"{"name":"a__x","arguments":{"x":[12345],"y":"later"}}"#);
    let ticket = story.checks.pop().expect("a check").ticket;
    story.event(Event::Checked { ticket, fit: Fit::Fits });
    assert!(told(&mut story).1.contains(NOT_JSON));

    // For the next process, because the last one did not get it.
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    requests_long(&mut story, 1, 1, call);
    let (link, line) = told(&mut story);
    story.dies_without(link, vec![(line + "\n").into()]);
    story.pass(secs(5));
    assert!(told(&mut story).1.contains(NOT_JSON));
}
