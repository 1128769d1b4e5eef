//! Backends that exit, hang or are stopped, and the calls that wait for them.

use bytes::Bytes;

use crate::story::*;

#[test]
fn calls_in_flight_fail_at_a_crash_and_other_backends_serve_on() {
    let mut story = Story::simple(&[("a", maker(&["x"])), ("b", maker(&["y"]))]);
    story.call(1, 1, "a__x").call(1, 2, "b__y");
    let link = story.link("a");
    story.pass(secs(6)).dies(link);
    let answer = story.heard(1).json();
    assert_eq!(answer["id"], 1);
    assert_eq!(answer["result"]["isError"], true);
    let text = answer["result"]["content"][0]["text"].as_str().expect("words");
    assert!(
        text.contains("SIGKILL") && text.contains("may or may not have taken effect") && text.contains("boom"),
        "{text}"
    );
    assert_eq!(story.called[0].outcome, Outcome::Lost);
    let (b, told) = story.told("b");
    story.answer(b, &told["id"], json!({})).heard(1);
    // It had been ready for long enough, so it is restarted at once.
    assert_eq!(story.connected.len(), 3);
    story.told("a");
    story.call(1, 3, "a__x");
    assert_eq!(story.told("a").0, story.link("a"));
}

#[test]
fn the_status_has_answered_calls_their_times_and_the_last_exits() {
    let mut story = Story::simple(&[("a", maker(&["x"])), ("b", maker(&["y"]))]);
    for id in 1..=4 {
        story.call(1, id, "a__x");
        let (link, told) = story.told("a");
        story.pass(ms(100)).answer(link, &told["id"], json!({})).heard(1);
    }
    story.pass(secs(6));
    let link = story.link("a");
    story.call(1, 5, "a__x").dies(link).heard(1);
    let (busy, idle) = (story.status("a"), story.status("b"));
    assert_eq!((&busy["calls"], &idle["calls"]), (&json!(4), &json!(0)), "what was lost was not answered");
    assert!(busy["calls_per_s"].as_f64().is_some_and(|rate| rate > 0.1), "{busy}");
    assert!(busy["p50_ms"].as_f64().is_some_and(|half| (85.0..115.0).contains(&half)), "{busy}");
    assert_eq!(idle["p50_ms"], json!(null));
    let ends = busy["last_exits"].as_array().expect("a list");
    assert_eq!((ends.len(), &ends[0]["crashed"], &ends[0]["exit"]["signal"]), (1, &json!(true), &json!(9)), "{busy}");
    assert_eq!(idle["last_exits"], json!([]));
    assert_eq!(story.gateway.status(story.now).to_json()["calls"], 4);
}

#[test]
fn the_start_of_one_backend_does_not_delay_that_of_another() {
    let mut story = Story::simple(&[("a", maker(&["x"])), ("b", maker(&["y"]))]);
    // The second crash in a row is restarted after a delay.
    for name in ["a", "b"] {
        let link = story.link(name);
        story.dies(link);
        let link = story.link(name);
        story.pass(ms(200)).dies(link);
        assert_eq!(story.status(name)["state"], "waiting");
    }
    let (soon, later) = (story.status("a")["next_try_ms"].clone(), story.status("b")["next_try_ms"].clone());
    assert!(soon.as_u64() < later.as_u64(), "{soon} {later}");
    story.pass(ms(later.as_u64().expect("a time")));
    assert_eq!(
        (story.status("a")["state"].clone(), story.status("b")["state"].clone()),
        (json!("ready"), json!("ready"))
    );
}

#[test]
fn a_crash_under_load_opens_no_circuit_and_later_calls_wait() {
    let configured = settings(vec![Backend { breaker_failures: 2, ..stdio("a") }]);
    let mut story = Story::new(configured, &[("a", maker(&["x"]))]);
    story.shake(1);
    for id in 1..=5 {
        story.call(1, id, "a__x");
    }
    let link = story.link("a");
    story.dies(link);
    for _ in 1..=5 {
        assert_eq!(story.heard(1).json()["result"]["isError"], true);
    }
    story.call(1, 6, "a__x").hears_nothing(1);
    let status = story.status("a");
    assert_eq!((&status["held"], &status["circuit"]["state"]), (&json!(1), &json!("closed")));
    for _ in 1..=5 {
        story.told("a");
    }
    story.pass(secs(1));
    assert_eq!(story.told("a").0, story.link("a"), "the next child got it");
}

#[test]
fn a_call_to_a_backend_that_is_down_waits_then_is_sent_or_fails_with_the_next_try() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    let link = story.link("a");
    story.dies(link);
    assert_eq!(story.status("a")["state"], "waiting");
    assert_eq!(story.status("a")["next_try_ms"], 1000);
    story.call(1, 1, "a__x").hears_nothing(1).told_nothing("a");
    assert_eq!(story.status("a")["held"], 1);
    story.pass(secs(1));
    assert_eq!(story.told("a").1["params"]["name"], "x");

    story.auto = false;
    let link = story.link("a");
    story.pass(ms(10)).dies(link);
    story.heard(1);
    story.call(1, 2, "a__x").pass(secs(31));
    let answer = story.heard(1).json();
    assert_eq!(answer["result"]["_meta"]["outlast/failure"]["reason"], "backend_down", "{answer}");
}

#[test]
fn after_too_many_crashes_calls_fail_at_once_until_the_next_try() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.call(1, 1, "a__x");
    for crash in 0..6 {
        let link = story.link("a");
        story.dies(link);
        if crash < 5 {
            story.pass(secs(61));
            story.pass(ms(1));
            // Time is set back, so that no crash is forgiven.
            story.now -= secs(61);
        }
    }
    assert_eq!(story.status("a")["state"], "given_up");
    story.heard(1);
    story.call(1, 2, "a__x");
    let answer = story.heard(1).json();
    assert_eq!(answer["result"]["_meta"]["outlast/failure"]["reason"], "gave_up", "{answer}");
    // Every report of the give-up names the last cause.
    let gave_up = story.records.iter().find(|record| record.event == outlast_core::record::Event::GaveUp);
    let said = [
        gave_up.and_then(|record| record.detail.clone()).expect("a record"),
        answer["result"]["content"][0]["text"].as_str().expect("words").to_owned(),
        story.status("a")["reason"].as_str().expect("words").to_owned(),
        story.status("a")["last_exit"]["words"].as_str().expect("words").to_owned(),
    ];
    for words in said {
        assert!(words.contains("signal 9"), "{words}");
    }
    let before = story.connected.len();
    story.pass(secs(301));
    assert_eq!(story.connected.len(), before + 1);
    assert_eq!(story.status("a")["state"], "ready");
}

#[test]
fn a_safe_call_is_repeated_once() {
    let mut a = maker(&["x"]);
    a.resources = vec![json!({"uri": "file:///a", "name": "a"})];
    let mut story = Story::simple(&[("a", a)]);
    story.pass(secs(6)).ask(1, json!(1), "resources/read", json!({"uri": "file:///a"}));
    let (link, _) = story.told("a");
    story.dies(link).hears_nothing(1);
    let (again, told) = story.told("a");
    assert_ne!(again, link);
    assert_eq!(told["params"]["uri"], "file:///a");
    story.dies(again);
    assert_eq!(story.heard(1).json()["error"]["code"], 7001);
}

#[test]
fn an_annotated_tool_is_repeated_only_if_configured() {
    for allowed in [false, true] {
        let mut a = maker(&[]);
        a.tools = vec![json!({"name": "x", "inputSchema": {}, "annotations": {"readOnlyHint": true}})];
        let backend = Backend { retry_annotated: allowed, ..stdio("a") };
        let mut story = Story::new(settings(vec![backend]), &[("a", a)]);
        story.shake(1).pass(secs(6)).call(1, 1, "a__x");
        let (link, _) = story.told("a");
        story.dies(link);
        match allowed {
            true => assert_ne!(story.told("a").0, link),
            false => assert_eq!(story.heard(1).json()["result"]["isError"], true),
        }
    }
}

#[test]
fn a_handshake_that_takes_too_long_is_a_crash() {
    let mut silent = maker(&["x"]);
    silent.mute = true;
    let mut story = Story::new(settings(vec![stdio("a")]), &[("a", silent)]);
    story.event(Event::TimePassed).pass(secs(31));
    let link = story.link("a");
    assert_eq!(story.disconnected, [(link, true)]);
    story.dies(link);
    let status = story.status("a");
    assert_eq!((&status["state"], &status["crashes"]), (&json!("waiting"), &json!(1)));
    assert!(status["last_exit"]["words"].as_str().is_some_and(|words| words.contains("handshake")), "{status}");
}

#[test]
fn calls_beyond_the_hold_limit_fail_at_once() {
    let mut configured = settings(vec![stdio("a")]);
    configured.limits.held_max = 2;
    let mut story = Story::new(configured, &[("a", maker(&["x"]))]);
    story.shake(1);
    let link = story.link("a");
    story.auto = false;
    story.dies(link);
    story.call(1, 1, "a__x").call(1, 2, "a__x").call(1, 3, "a__x");
    let answer = story.heard(1).json();
    assert_eq!(
        (&answer["id"], &answer["result"]["_meta"]["outlast/failure"]["reason"]),
        (&json!(3), &json!("hold_full"))
    );
    story.hears_nothing(1);
}

#[test]
fn unsent_lines_go_to_the_next_process() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.pass(secs(6));
    let token = json!({"name": "a__x", "arguments": {"n": [1.0, 2e3]}, "_meta": {"progressToken": "mine"}});
    story.call(1, 1, "a__x").ask(1, json!("two"), "tools/call", token);
    let (link, _) = story.told("a");
    let (_, second) = story.told("a");
    let line = format!("{second}\n");
    story.dies_without(
        link,
        vec![Bytes::from(line.clone()), Bytes::from_static(b"{\"jsonrpc\":\"2.0\",\"method\":\"x\"}")],
    );
    // The first call may have run; the second was not read.
    assert_eq!(story.heard(1).json()["result"]["_meta"]["outlast/failure"]["outcome"], "unknown");
    story.hears_nothing(1);
    let (next, again) = story.told("a");
    assert_ne!(next, link);
    assert_eq!(again, parsed(&line), "word for word");
    // From then on it is a call like any other.
    let progress = json!({"progressToken": again["params"]["_meta"]["progressToken"], "progress": 1});
    story.link_says(next, json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": progress}));
    assert_eq!(story.heard(1).json()["params"]["progressToken"], "mine");
    story.answer(next, &again["id"], json!({"content": []}));
    story.hears(1, json!({"jsonrpc": "2.0", "id": "two", "result": {"content": []}}));
    assert_eq!(story.status("a")["in_flight"], 0);
}

#[test]
fn unsent_lines_are_not_sent_to_a_process_of_another_era() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.pass(secs(6)).post(10, json!(1), "tools/call", json!({"name": "a__x"}));
    let (link, told) = story.told("a");
    story.set_maker("a", Maker { handshake: false, stateless: true, ..maker(&["x"]) });
    story.dies_without(link, vec![Bytes::from(format!("{told}\n"))]);
    let failure = story.heard(10).json()["result"]["_meta"]["outlast/failure"].clone();
    assert_eq!(failure["outcome"], "not_run", "{failure}");
}

#[test]
fn a_process_that_answers_only_pings_is_replaced() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    let ping = |story: &mut Story| {
        let at = story.links.iter().position(|(_, text)| text.contains("\"ping\"")).expect("a ping");
        let (link, text) = story.links.remove(at);
        story.answer(link, &parsed(&text)["id"], json!({}));
    };
    // Slow for one call, and not for others: it is not replaced.
    story.call(1, 1, "a__x").pass(secs(1)).call(1, 2, "a__x");
    let (old, _) = story.told("a");
    let (_, second) = story.told("a");
    story.pass(secs(1)).answer(old, &second["id"], json!({})).pass(secs(59));
    ping(&mut story);
    assert_eq!(story.connected.len(), 1);
    // No answer since the late call: another process starts beside it, and takes over.
    story.links.clear();
    story.clients.clear();
    story.call(1, 3, "a__x").pass(secs(61));
    assert_eq!(story.heard(1).json()["result"]["_meta"]["outlast/failure"]["reason"], "timed_out");
    assert_eq!(story.connected.len(), 1);
    ping(&mut story);
    assert_eq!(story.connected.len(), 2);
    assert_eq!(story.disconnected, [(old, false)]);
    assert!(story.notes.last().is_some_and(|note| note.contains("answered no call")), "{:?}", story.notes);
    story.dies(old).links.clear();
    assert_eq!((&story.status("a")["state"], &story.status("a")["crashes"]), (&json!("ready"), &json!(0)));
    // A replacement does not reset the circuit breaker: it opens as without one.
    let mut ill = Story::new(settings(vec![Backend { breaker_failures: 2, ..stdio("a") }]), &[("a", maker(&["x"]))]);
    ill.event(Event::TimePassed);
    ill.shake(1).call(1, 1, "a__x").pass(secs(61));
    ping(&mut ill);
    assert_eq!(ill.connected.len(), 2);
    ill.clients.clear();
    ill.call(1, 2, "a__x").pass(secs(61)).clients.clear();
    ill.call(1, 3, "a__x");
    assert_eq!(ill.heard(1).json()["result"]["_meta"]["outlast/failure"]["reason"], "circuit_open");
    // A backend that stays slow is not replaced again and again.
    story.call(1, 4, "a__x").pass(secs(59)).pass(secs(2));
    let before = story.connected.len();
    story.call(1, 5, "a__x").pass(secs(30));
    assert!(story.connected.len() - before <= 1);
}

#[test]
fn stopping_answers_open_calls_and_starts_no_process() {
    let mut story = Story::simple(&[("a", maker(&["x"])), ("b", maker(&["y"]))]);
    story.call(1, 1, "a__x");
    let (link, told) = story.told("a");
    story.event(Event::StopAsked);
    assert_eq!(story.disconnected, [(story.link("b"), false)]);
    story.call(1, 2, "b__y");
    assert_eq!(story.heard(1).json()["result"]["_meta"]["outlast/failure"]["reason"], "stopping");
    story.answer(link, &told["id"], json!({"ok": 1})).hears(1, json!({"jsonrpc": "2.0", "id": 1, "result": {"ok": 1}}));
    assert!(story.disconnected.contains(&(link, false)));
    let b = story.link("b");
    story.dies(link).dies(b);
    assert!(story.over);
    assert_eq!(story.connected.len(), 2);
}

#[test]
fn stopping_has_a_deadline() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.call(1, 1, "a__x").event(Event::StopAsked).hears_nothing(1).pass(secs(2));
    assert_eq!(story.heard(1).json()["result"]["isError"], true);
    let link = story.link("a");
    story.dies(link);
    assert!(story.over);
}
