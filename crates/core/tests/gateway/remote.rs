//! Backends over HTTP that forget their session, require credentials, are busy or answer with something other than
//! JSON-RPC.

use bytes::Bytes;
use outlast_core::gateway::Refused;
use serde_json::Value;

use crate::story::*;

const CHALLENGE: &str = "Bearer realm=\"x\"";

/// One ready backend over HTTP with a tool and a resource, and one client.
fn far() -> Story {
    far_as(http("a"))
}

fn far_as(backend: Backend) -> Story {
    let mut a = maker(&["x", "y"]);
    a.resources = vec![json!({"uri": "file:///a", "name": "a"})];
    let mut story = Story::new(settings(vec![backend]), &[("a", a)]);
    story.shake(1);
    assert_eq!(story.status("a")["state"], "ready");
    story
}

fn id_of(told: &Value) -> Id {
    Id::parse(&told["id"].to_string()).expect("an id")
}

fn lost(story: &mut Story, link: Link, told: &Value, was_sent: bool) {
    story.event(Event::RequestLost { link, id: id_of(told), was_sent, why: "it was refused".into() });
}

fn refused(status: u16, told: &Value) -> Box<Refused> {
    let line = Bytes::from(format!("{told}\n"));
    let (words, challenge) = (format!("http://a answered {status}"), Some(CHALLENGE.to_owned()));
    Box::new(Refused { status, words, challenge, body: Some("why".into()), retry_after: None, line })
}

fn refuse(story: &mut Story, link: Link, told: &Value, status: u16, retry_after: Option<u64>) {
    let mut refused = refused(status, told);
    refused.retry_after = retry_after.map(secs);
    story.event(Event::RequestRefused { link, id: id_of(told), refused });
}

fn failing(story: &mut Story, link: Link, how: How) {
    story.up.remove(&link.serial);
    story.event(Event::LinkFailing { link, how });
}

fn down(story: &mut Story, link: Link) {
    let (how, stderr_tail) = (How::Lost("over".into()), String::new());
    story.event(Event::LinkDown { link, how, stderr_tail, unsent: vec![] });
}

#[test]
fn calls_refused_with_their_session_are_sent_again_on_the_next_one() {
    let mut story = far();
    story.call(1, 1, "a__x").call(1, 2, "a__x").call(1, 3, "a__y");
    let told: Vec<(Link, Value)> = (0..3).map(|_| story.told("a")).collect();
    let old = told[0].0;
    story.auto = false;
    failing(&mut story, old, How::Forgot("it does not know our session any more".into()));
    let new = story.link("a");
    assert_ne!(new, old, "the next session is opened at once");
    // Two calls are refused before the next session is ready; the third is still running.
    lost(&mut story, old, &told[0].1, false);
    lost(&mut story, old, &told[1].1, false);
    story.hears_nothing(1).told_nothing("a");
    story.up.insert(new.serial, new);
    story.event(Event::LinkUp { link: new, pid: None });
    for id in [1, 2] {
        let (link, told) = story.told("a");
        assert_eq!(link, new);
        story.answer(link, &told["id"], json!({"content": [], "n": id}));
        assert_eq!(story.heard(1).json()["id"], id);
    }
    story.answer(old, &told[2].1["id"], json!({"content": []}));
    assert_eq!(story.heard(1).json(), json!({"jsonrpc": "2.0", "id": 3, "result": {"content": []}}));
    // Only then is the old link closed; its end was recorded once.
    assert_eq!(story.disconnected, [(old, false)]);
    down(&mut story, old);
    let ends = story
        .records
        .iter()
        .filter(|record| record.detail.as_deref().is_some_and(|text| text.contains("does not know our session")));
    assert_eq!(ends.count(), 1, "{:#?}", story.records);
    assert_eq!(story.status("a")["state"], "ready");
}

#[test]
fn a_call_that_never_reached_a_server_that_went_away_waits_for_the_next_one() {
    let mut story = far();
    story.call(1, 1, "a__x");
    let (old, told) = story.told("a");
    failing(&mut story, old, How::Lost("cannot connect".into()));
    lost(&mut story, old, &told, false);
    down(&mut story, old);
    story.hears_nothing(1).pass(secs(2));
    let (new, told) = story.told("a");
    assert_ne!(new, old);
    story
        .answer(new, &told["id"], json!({"content": []}))
        .hears(1, json!({"jsonrpc": "2.0", "id": 1, "result": {"content": []}}));
}

#[test]
fn a_call_is_not_sent_again_for_ever_nor_after_it_may_have_run() {
    let mut story = far();
    story.call(1, 1, "a__x");
    for session in 0..4 {
        let (link, told) = story.told("a");
        failing(&mut story, link, How::Forgot("it does not know our session any more".into()));
        lost(&mut story, link, &told, false);
        down(&mut story, link);
        if session < 3 {
            story.hears_nothing(1).pass(secs(2));
        }
    }
    let failure = story.heard(1).json()["result"]["_meta"]["outlast/failure"].clone();
    assert_eq!(failure["outcome"], "not_run", "{failure}");
    story.pass(secs(2)).call(1, 2, "a__x");
    let (link, told) = story.told("a");
    failing(&mut story, link, How::Lost("reset".into()));
    lost(&mut story, link, &told, true);
    let failure = story.heard(1).json()["result"]["_meta"]["outlast/failure"].clone();
    assert_eq!(failure["outcome"], "unknown", "{failure}");
}

#[test]
fn calls_lost_together_are_one_failure() {
    let mut story = far_as(Backend { breaker_failures: 2, ..http("a") });
    for id in 1..=5 {
        story.call(1, id, "a__x");
    }
    let told: Vec<(Link, Value)> = (0..5).map(|_| story.told("a")).collect();
    for (link, told) in &told {
        lost(&mut story, *link, told, true);
        assert_eq!(story.heard(1).json()["result"]["isError"], true);
    }
    assert_eq!(story.status("a")["circuit"]["state"], "closed");
    // Refusals one after the other are failures in a row.
    story.pass(ms(1)).call(1, 6, "a__x");
    let (link, told) = story.told("a");
    lost(&mut story, link, &told, true);
    assert_eq!(story.status("a")["circuit"]["state"], "open");
}

#[test]
fn a_handshake_denied_without_credentials_is_not_tried_in_the_other_era() {
    for status in [401, 403] {
        let mut a = maker(&["x"]);
        a.mute = true;
        let mut story = Story::new(settings(vec![http("a")]), &[("a", a)]);
        story.event(Event::TimePassed);
        let (link, told) = story.told("a");
        assert_eq!(told["method"], "server/discover");
        refuse(&mut story, link, &told, status, None);
        story.told_nothing("a");
        assert_eq!(story.disconnected, [(link, true)]);
        down(&mut story, link);
        let state = story.status("a");
        assert_eq!(state["state"], "waiting", "{state}");
        let words = state["last_exit"]["words"].as_str().expect("words").to_owned();
        assert!(
            words.contains(&status.to_string()) && words.contains(CHALLENGE) && words.contains("`outlast reload`"),
            "{words}"
        );
        let record = story.records.iter().find(|record| record.detail.as_deref() == Some(&*words));
        assert!(record.is_some(), "{:#?}", story.records);
    }
}

#[test]
fn a_call_that_needs_credentials_is_refused_and_its_backend_is_not_ready() {
    let mut story = far();
    story.call(1, 1, "a__x").call(1, 2, "a__y");
    let ((link, first), (_, second)) = (story.told("a"), story.told("a"));
    story.maker("a").mute = true;
    refuse(&mut story, link, &first, 401, None);
    let error = story.heard(1).json()["error"].clone();
    assert_eq!(error["code"], 401, "{error}");
    let data = &error["data"];
    let about = (&data["reason"], &data["outcome"], &data["www_authenticate"], &data["body"]);
    assert_eq!(about, (&json!("unauthorized"), &json!("not_run"), &json!(CHALLENGE), &json!("why")), "{data}");
    assert!(data["hint"].as_str().is_some_and(|hint| hint.contains("`headers`")), "{data}");
    assert_ne!(story.status("a")["state"], "ready");
    // An answer to another call on that link is still forwarded.
    story.answer(link, &second["id"], json!({"content": []}));
    assert_eq!(story.heard(1).json()["result"], json!({"content": []}));
    down(&mut story, link);
    // The next attempt is refused too, and a call need not wait for the one after it.
    story.pass(secs(2)).call(1, 3, "a__x").hears_nothing(1);
    let (link, told) = story.told("a");
    refuse(&mut story, link, &told, 401, None);
    down(&mut story, link);
    for id in 3..=4 {
        let error = story.heard(1).json()["error"].clone();
        assert_eq!((&error["code"], &error["data"]["outcome"]), (&json!(401), &json!("not_run")), "{id}: {error}");
        if id == 3 {
            story.call(1, 4, "a__x");
        }
    }
}

#[test]
fn refused_credentials_are_reported_as_not_accepted() {
    let kind = Kind::Http {
        url: "http://a/mcp".into(),
        headers: [("authorization".to_owned(), "Bearer b".into())].into(),
        is_sse: false,
    };
    let mut story = far_as(Backend { kind, ..http("a") });
    story.call(1, 1, "a__x");
    let (link, told) = story.told("a");
    refuse(&mut story, link, &told, 401, None);
    let message = story.heard(1).json()["error"]["message"].as_str().expect("words").to_owned();
    assert!(message.contains("did not accept the `Authorization` header"), "{message}");
}

#[test]
fn a_forbidden_call_does_not_end_the_session() {
    let mut story = far();
    story.call(1, 1, "a__x");
    let (link, told) = story.told("a");
    refuse(&mut story, link, &told, 403, None);
    let error = story.heard(1).json()["error"].clone();
    assert_eq!((&error["code"], &error["data"]["reason"]), (&json!(403), &json!("forbidden")), "{error}");
    assert_eq!(story.status("a")["state"], "ready");
    assert!(story.notes.iter().any(|note| note.contains("403") && note.contains(CHALLENGE)), "{:?}", story.notes);
}

#[test]
fn a_stream_that_needs_credentials_ends_the_session_and_a_forbidden_stream_does_not() {
    for (status, state) in [(401, "waiting"), (403, "ready")] {
        let mut story = far();
        story.pass(secs(6)).maker("a").mute = true;
        let link = story.link("a");
        story.event(Event::LinkDenied { link, refused: refused(status, &json!({})) });
        let known = story.status("a");
        // The first crash of a backend that had been ready for long enough causes an immediate restart.
        let is_it = known["state"] == state || status == 401 && known["state"] == "connecting";
        assert!(is_it, "{status}: {known}");
        if status == 401 {
            assert!(known["last_exit"]["words"].as_str().is_some_and(|words| words.contains(CHALLENGE)), "{known}");
        }
    }
}

#[test]
fn a_busy_backend_gets_safe_requests_again_when_it_asks() {
    let mut story = far();
    story.ask(1, json!(1), "resources/read", json!({"uri": "file:///a"}));
    let (link, told) = story.told("a");
    refuse(&mut story, link, &told, 429, Some(3));
    story.pass(ms(2900)).hears_nothing(1).told_nothing("a").pass(ms(200));
    assert_eq!(story.told("a"), (link, told.clone()), "the same request, when it was asked for");
    refuse(&mut story, link, &told, 503, None);
    story.pass(secs(1));
    let (link, told) = story.told("a");
    story
        .answer(link, &told["id"], json!({"contents": []}))
        .hears(1, json!({"jsonrpc": "2.0", "id": 1, "result": {"contents": []}}));
    // A `Retry-After` beyond the client's timeout counts as a refusal.
    story.ask(1, json!(2), "resources/read", json!({"uri": "file:///a"}));
    let (link, told) = story.told("a");
    refuse(&mut story, link, &told, 429, Some(600));
    let error = story.heard(1).json()["error"].clone();
    assert_eq!((&error["code"], &error["data"]["retry_after_ms"]), (&json!(429), &json!(600_000)), "{error}");
}

/// A 503 without `Retry-After` may come from a proxy whose server has run the request.
#[test]
fn a_busy_backend_that_may_have_run_a_request_gets_it_once_more() {
    // Refused again, as not run, or lost: the client must not be told that it was not run.
    for end in ["503", "429", "lost"] {
        let mut story = far();
        story.ask(1, json!(1), "resources/read", json!({"uri": "file:///a"}));
        let (link, told) = story.told("a");
        refuse(&mut story, link, &told, 503, None);
        story.pass(secs(1));
        assert_eq!(story.told("a"), (link, told.clone()));
        match end {
            "503" => refuse(&mut story, link, &told, 503, None),
            "429" => refuse(&mut story, link, &told, 429, Some(600)),
            _ => lost(&mut story, link, &told, true),
        }
        story.pass(secs(10)).told_nothing("a");
        let error = story.heard(1).json()["error"].clone();
        assert_eq!(error["data"]["outcome"], "unknown", "{end}: {error}");
    }
    // A refusal that says that the request was not run does not count.
    let mut story = far();
    story.ask(1, json!(1), "resources/read", json!({"uri": "file:///a"}));
    let (link, told) = story.told("a");
    for retry_after in [Some(1), None, Some(1)] {
        refuse(&mut story, link, &told, 503, retry_after);
        story.pass(secs(2));
        assert_eq!(story.told("a"), (link, told.clone()));
    }
}

#[test]
fn a_call_to_a_busy_backend_is_not_repeated_and_gets_a_retry_time() {
    #[rustfmt::skip]
    let table = [
        // status, retry-after, outcome, retry_after_ms
        (429, Some(7), "not_run", json!(7000)),
        (429, None,    "not_run", Value::Null),
        (503, Some(7), "not_run", json!(7000)),
        // The response may come from a proxy that lost its server.
        (503, None,    "unknown", Value::Null),
        (500, Some(7), "unknown", Value::Null),
    ];
    for (status, retry_after, outcome, millis) in table {
        let mut story = far();
        story.call(1, 1, "a__x");
        let (link, told) = story.told("a");
        refuse(&mut story, link, &told, status, retry_after);
        let answer = story.heard(1).json();
        let data = if answer["error"].is_object() {
            &answer["error"]["data"]
        } else {
            &answer["result"]["_meta"]["outlast/failure"]
        };
        assert_eq!((&data["outcome"], &data["retry_after_ms"]), (&json!(outcome), &millis), "{answer}");
        story.pass(secs(10)).told_nothing("a");
        assert_eq!(story.status("a")["state"], "ready");
    }
}

#[test]
fn a_busy_backend_is_opened_after_its_retry_time() {
    let mut a = maker(&["x"]);
    a.mute = true;
    let mut story = Story::new(settings(vec![http("a")]), &[("a", a)]);
    story.event(Event::TimePassed);
    let (link, told) = story.told("a");
    refuse(&mut story, link, &told, 503, Some(5));
    story.maker("a").mute = false;
    story.pass(secs(6));
    assert_eq!(story.status("a")["state"], "ready");
    assert_eq!(story.connected.len(), 1);
}

#[test]
fn a_busy_request_that_is_cancelled_is_not_sent_again() {
    let mut story = far();
    story.ask(1, json!(1), "resources/read", json!({"uri": "file:///a"}));
    let (link, told) = story.told("a");
    refuse(&mut story, link, &told, 429, Some(3));
    story.say(1, r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#);
    assert_eq!(story.told("a").1["method"], "notifications/cancelled");
    story.pass(secs(10)).told_nothing("a").hears_nothing(1);
}

#[test]
fn an_answer_that_is_no_json_rpc_response_becomes_an_error_response() {
    #[rustfmt::skip]
    let table = [
        // members of the answer,                             the client gets
        (r#""error":"invalid_token""#,                        None),
        (r#""error":null"#,                                   None),
        (r#""error":{"code":1}"#,                             None),
        (r#""error":{"code":"E","message":"m"}"#,             None),
        (r#""error":{"code":1.5,"message":"m"}"#,             None),
        (r#""result":{"content":[]},"error":null"#,           Some(json!({"result": {"content": []}}))),
        (r#""result":null,"error":{"code":1,"message":"m"}"#, Some(json!({"error": {"code": 1, "message": "m"}}))),
        (r#""error":{"code":1,"message":"m"}"#,               Some(json!({"error": {"code": 1, "message": "m"}}))),
    ];
    for is_http in [true, false] {
        for (members, expected) in &table {
            let mut story = if is_http { far() } else { Story::simple(&[("a", maker(&["x"]))]) };
            story.call(1, 7, "a__x");
            let (link, told) = story.told("a");
            let message = format!(r#"{{"jsonrpc":"2.0","id":{},{members}}}"#, told["id"]);
            story.event(Event::LinkSaid { link, message: message.into() });
            let mut answer = story.heard(1).json();
            match expected {
                Some(expected) => {
                    let mut expected = expected.clone();
                    (expected["jsonrpc"], expected["id"]) = (json!("2.0"), json!(7));
                    assert_eq!(answer, expected, "{members}");
                }
                None => {
                    assert_eq!(answer["id"].take(), 7);
                    let failure = &answer["result"]["_meta"]["outlast/failure"];
                    assert_eq!(
                        (&failure["reason"], &failure["outcome"]),
                        (&json!("backend_ended"), &json!("unknown")),
                        "{members}: {answer}"
                    );
                }
            }
            story.hears_nothing(1);
        }
    }
}
