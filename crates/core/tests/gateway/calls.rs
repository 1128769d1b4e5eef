//! Calls: to their backends and back, progress, cancellation, timeouts and limits.

use crate::story::*;

#[test]
fn a_call_reaches_its_backend_by_its_own_name_and_comes_back_with_its_own_id() {
    let mut story = Story::simple(&[("a", maker(&["echo"])), ("b", maker(&["echo"]))]);
    let table = [r#"7"#, r#""x""#, r#""\u0061b""#, r#"-3"#, r#"12345678901234567890123456789012345678901234567890"#];
    for id in table {
        story.say(1, &format!(r#"{{"id":{id}, "jsonrpc":"2.0","method":"tools/call","params":{{"name":"b__echo","arguments":{{"big":1.50e3,"s":"\u00e9"}},"future":[1]}}}}"#));
        let (link, told) = story.told("b");
        assert_eq!(told["params"]["name"], "echo");
        assert!(told["id"].is_u64(), "{told}");
        story.told_nothing("a");
        let ours = told["id"].clone();
        story.event(Event::LinkSaid {
            link,
            message: format!(r#"{{"jsonrpc":"2.0","result":{{"content":[], "n":1.50e3}},"id":{ours}}}"#).into(),
        });
        let heard = story.heard(1);
        assert_eq!(heard.text, format!(r#"{{"jsonrpc":"2.0","result":{{"content":[], "n":1.50e3}},"id":{id}}}"#));
        assert_eq!(heard.about, Id::parse(id));
    }
    assert!(
        story.called.iter().all(|called| called.outcome == Outcome::Answered && called.backend.as_deref() == Some("b"))
    );
    assert_eq!(story.called.len(), table.len());
}

#[test]
fn a_message_that_was_parsed_before_is_heard_like_any_other() {
    let mut story = Story::simple(&[("a", maker(&["echo"]))]);
    story.call(1, 5, "a__echo");
    let (link, told) = story.told("a");
    let said = |text: String| {
        let walk = Box::new(outlast_core::message::Walk::of(text.as_bytes()));
        Event::LinkSaidLong { link, message: text.into(), walk }
    };
    story.event(said("[1,]".to_owned()));
    assert_eq!(story.diverted.pop(), Some((link, "[1,]".to_owned(), false)));
    let ours = &told["id"];
    story.event(said(format!(r#"{{"jsonrpc":"2.0","result":{{"content":[], "n":1.50e3}},"id":{ours}}}"#)));
    assert_eq!(story.heard(1).text, r#"{"jsonrpc":"2.0","result":{"content":[], "n":1.50e3},"id":5}"#);
}

#[test]
fn a_line_that_is_not_json_is_diverted_and_changes_nothing() {
    let mut story = Story::simple(&[("a", maker(&["echo"]))]);
    story.call(1, 5, "a__echo");
    let (link, told) = story.told("a");
    let babbles = [
        ("listening on 3000\n", false),
        ("{\"half\":\n", false),
        ("\u{fffd}\n", false),
        ("42\n", true),
        ("{\"level\":\"info\",\"msg\":\"up\"}\n", true),
        ("{\"method\":\"GET\",\"path\":\"/\"}\n", true),
    ];
    for (babble, is_json) in babbles {
        story.event(Event::LinkSaid { link, message: babble.into() });
        assert_eq!(story.diverted.pop(), Some((link, babble.to_owned(), is_json)));
        story.hears_nothing(1);
    }
    assert_eq!(story.status("a")["links"][0]["garbage"], 6);
    story.answer(link, &told["id"], json!({"content": []}));
    assert_eq!(story.heard(1).json()["id"], 5);
    assert!(story.diverted.is_empty());
}

#[test]
fn the_payload_is_forwarded_unread() {
    let mut story = Story::simple(&[("a", maker(&["echo"]))]);
    story.say(1, "{\"jsonrpc\":\"2.0\",\"id\":1,\n \"method\":\"tools/call\",\"params\":{\"name\":\"a__echo\",\"arguments\":{\"x\":1.0,\"y\":10000000000000000000000}}}\n");
    let (_, text) = story.links.pop().expect("it was told");
    assert!(text.contains(r#""arguments":{"x":1.0,"y":10000000000000000000000}"#), "{text}");
}

#[test]
fn progress_has_the_clients_own_token() {
    let mut story = Story::simple(&[("a", maker(&["slow"]))]);
    for token in [json!("tok"), json!(1)] {
        story.ask(1, json!(5), "tools/call", json!({"name": "a__slow", "_meta": {"progressToken": token, "x": 1}}));
        let (link, told) = story.told("a");
        let ours = told["params"]["_meta"]["progressToken"].clone();
        assert_eq!(told["params"]["_meta"]["x"], 1);
        story.link_says(link, json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": ours, "progress": 1}}));
        let heard = story.heard(1);
        assert_eq!(heard.json()["params"], json!({"progressToken": token, "progress": 1}));
        assert_eq!(heard.about, Some(Id::Integer(5)));
        story.answer(link, &told["id"], json!({})).heard(1);
    }
}

#[test]
fn a_cancelled_call_is_cancelled_at_its_backend_and_gets_no_answer() {
    let mut story = Story::simple(&[("a", maker(&["slow"]))]);
    story.shake(2).call(1, 5, "a__slow").call(2, 5, "a__slow");
    let (link, first) = story.told("a");
    let (_, second) = story.told("a");
    story.say(1, r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":5,"reason":"no"}}"#);
    let (_, note) = story.told("a");
    assert_eq!(note["method"], "notifications/cancelled");
    assert_eq!(note["params"], json!({"requestId": first["id"], "reason": "no"}));
    story.answer(link, &first["id"], json!({})).hears_nothing(1);
    story
        .answer(link, &second["id"], json!({"ok": 1}))
        .hears(2, json!({"jsonrpc": "2.0", "id": 5, "result": {"ok": 1}}));
    assert_eq!(
        story.called.iter().map(|called| called.outcome).collect::<Vec<_>>(),
        [Outcome::Cancelled, Outcome::Answered]
    );
}

#[test]
fn a_late_call_fails_and_is_cancelled_and_progress_gives_it_time() {
    let mut story = Story::simple(&[("a", maker(&["slow"]))]);
    story.ask(1, json!(5), "tools/call", json!({"name": "a__slow", "_meta": {"progressToken": 1}}));
    let (link, told) = story.told("a");
    for _ in 0..3 {
        story.pass(secs(50));
        story.link_says(link, json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": told["id"], "progress": 1}})).heard(1);
    }
    story.pass(secs(59)).hears_nothing(1).pass(secs(2));
    let answer = story.heard(1).json();
    assert_eq!(answer["result"]["isError"], true);
    assert_eq!(answer["result"]["_meta"]["outlast/failure"]["reason"], "timed_out");
    let (_, note) = story.told("a");
    assert_eq!((&note["method"], &note["params"]["requestId"]), (&json!("notifications/cancelled"), &told["id"]));
    assert_eq!(story.called[0].outcome, Outcome::TimedOut);
}

#[test]
fn progress_does_not_extend_a_call_beyond_call_max() {
    let mut story = Story::simple(&[("a", maker(&["slow"]))]);
    story.ask(1, json!(5), "tools/call", json!({"name": "a__slow", "_meta": {"progressToken": 1}}));
    let (link, told) = story.told("a");
    for _ in 0..19 {
        story.pass(secs(30));
        story.link_says(link, json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": told["id"], "progress": 1}})).heard(1);
    }
    story.pass(secs(31));
    assert_eq!(story.heard(1).json()["result"]["isError"], true);
}

#[test]
fn a_child_that_is_silent_after_a_late_call_is_killed_unless_it_answers_a_ping() {
    for is_alive in [true, false] {
        let mut story = Story::simple(&[("a", maker(&["slow"]))]);
        let link = story.link("a");
        story.call(1, 5, "a__slow").pass(secs(61)).heard(1);
        story.told("a");
        story.told("a");
        let (_, ping) = story.told("a");
        assert_eq!(ping["method"], "ping");
        if is_alive {
            story.answer(link, &ping["id"], json!({}));
        }
        story.call(1, 6, "a__slow").told("a");
        story.pass(secs(6));
        assert_eq!(story.disconnected.contains(&(link, true)), !is_alive);
        if !is_alive {
            assert_eq!(story.heard(1).json()["id"], 6);
            story.dies(link);
            assert_ne!(story.link("a"), link);
            assert!(story.status("a")["last_exit"]["words"].as_str().is_some_and(|words| words.contains("hung")));
        }
    }
}

#[test]
fn a_child_that_is_silent_after_a_cancelled_call_is_replaced_and_its_other_calls_may_finish() {
    for is_alive in [true, false] {
        let mut story = Story::simple(&[("a", maker(&["slow", "other"]))]);
        let link = story.link("a");
        story.call(1, 5, "a__slow").call(1, 6, "a__other");
        story.told("a");
        let (_, other) = story.told("a");
        story.say(1, r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":5}}"#);
        assert_eq!(story.told("a").1["method"], "notifications/cancelled");
        let (_, ping) = story.told("a");
        assert_eq!(ping["method"], "ping");
        story.pass(secs(1));
        let status = story.status("a");
        assert_eq!((&status["stalled"], &status["oldest_request_s"]), (&json!(true), &json!(1.0)));
        if is_alive {
            story.answer(link, &ping["id"], json!({}));
        }
        assert_eq!(story.status("a")["stalled"], !is_alive);
        story.pass(secs(5));
        assert_eq!(story.link("a") != link, !is_alive);
        assert_eq!(story.recorded("server_hung"), usize::from(!is_alive));
        assert!(!story.disconnected.contains(&(link, true)), "the other call may finish");
        story.hears_nothing(1);
        story.answer(link, &other["id"], json!({"content": []}));
        assert_eq!(story.heard(1).json()["id"], 6);
    }
}

#[test]
fn a_child_does_not_count_as_hung_because_outlast_was_suspended() {
    let mut story = Story::simple(&[("a", maker(&["slow"]))]);
    let link = story.link("a");
    story.call(1, 5, "a__slow");
    story.told("a");
    story.say(1, r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":5}}"#);
    story.now += secs(600);
    story.event(Event::TimePassed);
    assert_eq!((story.recorded("server_hung"), story.link("a")), (0, link));
    story.pass(secs(6));
    assert_eq!(story.recorded("server_hung"), 1);
}

#[test]
fn a_call_of_something_unknown_gets_an_error() {
    let mut story = Story::simple(&[("a", maker(&["echo"])), ("b", maker(&[]))]);
    story.call(1, 1, "a__nothing").call(1, 2, "zzz").ask(1, json!(3), "strange/method", json!({}));
    for (id, code) in [(1, -32602), (2, -32602), (3, -32601)] {
        let answer = story.heard(1).json();
        assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(id), &json!(code)), "{answer}");
    }
    assert!(story.called.iter().all(|called| called.outcome == Outcome::Unknown));
}

#[test]
fn an_unknown_method_goes_to_the_only_backend() {
    let mut story = Story::simple(&[("a", maker(&[]))]);
    story.ask(1, json!("q"), "acme/thing", json!({"x": 1}));
    let (link, told) = story.told("a");
    assert_eq!((&told["method"], &told["params"]), (&json!("acme/thing"), &json!({"x": 1})));
    story.link_says(link, json!({"jsonrpc": "2.0", "id": told["id"], "error": {"code": -5, "message": "no"}}));
    story.hears(1, json!({"jsonrpc": "2.0", "id": "q", "error": {"code": -5, "message": "no"}}));
    assert_eq!(story.called[0].outcome, Outcome::Failed);
}

#[test]
fn a_batch_is_answered_as_one() {
    let mut story = Story::new(settings(vec![stdio("a")]), &[("a", maker(&["echo"]))]);
    story.came(1, Front::Session, local());
    story.say(1, r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-03-26","capabilities":{},"clientInfo":{"name":"c","version":"1"}}}"#);
    assert_eq!(story.heard(1).json()["result"]["protocolVersion"], "2025-03-26");
    story.say(1, r#"[{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a__echo"}},{"jsonrpc":"2.0","method":"notifications/initialized"},{"jsonrpc":"2.0","id":"2","method":"ping"},17]"#);
    story.hears_nothing(1);
    let (link, told) = story.told("a");
    story.answer(link, &told["id"], json!({"ok": true}));
    let heard = story.heard(1);
    assert_eq!(heard.about, Some(Id::Integer(1)));
    let answers = heard.json();
    assert_eq!(answers.as_array().map(Vec::len), Some(3), "{answers}");
    assert!(answers.as_array().expect("seen").contains(&json!({"jsonrpc": "2.0", "id": 1, "result": {"ok": true}})));
}

#[test]
fn a_client_that_leaves_gets_no_answer_to_its_batch() {
    let mut story = Story::new(settings(vec![stdio("a")]), &[("a", maker(&["slow"]))]);
    story.came(1, Front::Session, local());
    story.say(1, r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-03-26","capabilities":{},"clientInfo":{"name":"c","version":"1"}}}"#);
    story.heard(1);
    story.say(1, r#"[{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a__slow"}},{"jsonrpc":"2.0","id":2,"method":"ping"}]"#);
    story.told("a");
    story.event(Event::ClientLeft { client: 1 }).hears_nothing(1);
}

#[test]
fn more_in_flight_than_allowed_is_refused() {
    let mut configured = settings(vec![stdio("a")]);
    configured.limits.in_flight_max = 2;
    let mut story = Story::new(configured, &[("a", maker(&["slow"]))]);
    story.event(Event::TimePassed).shake(1).call(1, 1, "a__slow").call(1, 2, "a__slow").call(1, 3, "a__slow");
    let refused = story.heard(1).json();
    assert_eq!((&refused["id"], &refused["error"]["data"]["reason"]), (&json!(3), &json!("too_many_in_flight")));
    let (link, told) = story.told("a");
    story.answer(link, &told["id"], json!({})).heard(1);
    story.call(1, 4, "a__slow").hears_nothing(1);
}

#[test]
fn a_client_that_leaves_cancels_its_calls() {
    let mut story = Story::simple(&[("a", maker(&["slow"]))]);
    story.call(1, 5, "a__slow");
    let (link, told) = story.told("a");
    story.event(Event::ClientLeft { client: 1 });
    let (_, note) = story.told("a");
    assert_eq!((&note["method"], &note["params"]["requestId"]), (&json!("notifications/cancelled"), &told["id"]));
    story.answer(link, &told["id"], json!({})).hears_nothing(1);
    assert_eq!(story.status("a")["in_flight"], 0);
}
