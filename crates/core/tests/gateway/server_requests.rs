//! Requests of backends to clients, and logs.

use crate::story::*;

fn elicit(id: serde_json::Value) -> serde_json::Value {
    json!({"jsonrpc": "2.0", "id": id, "method": "elicitation/create", "params": {"message": "name?", "requestedSchema": {}}})
}

#[test]
fn a_question_goes_to_the_client_whose_call_it_is_for_and_the_answer_back() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.shake(2).call(2, 5, "a__x");
    let (link, _) = story.told("a");
    for id in [json!("q1"), json!(5)] {
        story.link_says(link, elicit(id.clone()));
        let asked = story.heard(2);
        assert_eq!(asked.json()["method"], "elicitation/create");
        assert_eq!(asked.about, Some(Id::Integer(5)));
        let ours = asked.json()["id"].clone();
        story.hears_nothing(1);
        story
            .say(1, &json!({"jsonrpc": "2.0", "id": ours, "result": {"action": "theft"}}).to_string())
            .told_nothing("a");
        story.say(2, &json!({"jsonrpc": "2.0", "id": ours, "result": {"action": "accept"}}).to_string());
        assert_eq!(story.told("a").1, json!({"jsonrpc": "2.0", "id": id, "result": {"action": "accept"}}));
        story.say(2, &json!({"jsonrpc": "2.0", "id": ours, "result": {}}).to_string()).told_nothing("a");
    }
}

#[test]
fn with_calls_of_two_clients_a_question_is_refused() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.shake(2).call(1, 1, "a__x").call(2, 1, "a__x");
    let (link, _) = story.told("a");
    story.told("a");
    story.link_says(link, elicit(json!(1)));
    let answer = story.told("a").1;
    assert!(answer["error"]["message"].as_str().is_some_and(|words| words.contains("per_session")), "{answer}");
    story.hears_nothing(1).hears_nothing(2);
}

#[test]
fn a_question_for_a_cancelled_call_reaches_no_other_client() {
    for laid_by in ["time", "answer"] {
        let mut story = Story::simple(&[("a", maker(&["x"]))]);
        story.shake(2).call(1, 1, "a__x").call(2, 1, "a__x");
        let (link, first) = story.told("a");
        story.told("a");
        let back = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}});
        story.say(1, &back.to_string()).told("a");
        assert_eq!(story.told("a").1["method"], "ping", "whether it hangs");
        story.link_says(link, elicit(json!("q"))).hears_nothing(1).hears_nothing(2);
        assert_eq!(story.told("a").1["error"]["code"], 7020);
        match laid_by {
            "time" => drop(story.pass(secs(31))),
            _ => drop(story.answer(link, &first["id"], json!({})).hears_nothing(1)),
        }
        story.link_says(link, elicit(json!("q2"))).hears_nothing(1);
        assert_eq!(story.heard(2).json()["method"], "elicitation/create", "{laid_by}");
    }
}

#[test]
fn on_stdio_a_stateless_client_is_asked_only_for_the_right_call() {
    let mut story = Story::new(settings(vec![stdio("a")]), &[("a", maker(&["x"]))]);
    story.came(1, Front::Lines, local());
    story.ask_stateless(1, json!(1), "tools/call", json!({"name": "a__x"}));
    let (link, told) = story.told("a");
    story.ask_stateless(1, json!(2), "tools/call", json!({"name": "a__x"})).told("a");
    story.link_says(link, elicit(json!("q"))).pass(ms(20)).hears_nothing(1);
    assert_eq!(story.told("a").1["error"]["code"], 7020);
    story.answer(link, &told["id"], json!({})).heard(1);
    story.link_says(link, elicit(json!("q"))).pass(ms(20));
    let asked = story.heard(1).json();
    assert_eq!((&asked["id"], &asked["result"]["resultType"]), (&json!(2), &json!("input_required")));
}

#[test]
fn over_http_a_question_belongs_to_the_call_of_its_stream() {
    let mut story = Story::new(settings(vec![http("a")]), &[("a", maker(&["x"]))]);
    story.event(Event::TimePassed);
    story.shake(1).shake(2).call(1, 1, "a__x").call(2, 1, "a__x");
    story.post(10, json!(1), "tools/call", json!({"name": "a__x"}));
    let told: Vec<(Link, serde_json::Value)> = (0..3).map(|_| story.told("a")).collect();
    let says = |story: &mut Story, at: usize, message: serde_json::Value| {
        let (link, id) = (told[at].0, Id::parse(&told[at].1["id"].to_string()).expect("a number"));
        story.event(Event::LinkSaidFor { link, id, message: message.to_string().into(), walk: None });
    };
    says(&mut story, 1, elicit(json!("q")));
    story.hears_nothing(1);
    let asked = story.heard(2);
    assert_eq!((&asked.json()["method"], asked.about), (&json!("elicitation/create"), Some(Id::Integer(1))));
    says(&mut story, 2, elicit(json!("q2")));
    story.pass(ms(20)).hears_nothing(1).hears_nothing(2);
    assert_eq!(story.heard(10).json()["result"]["resultType"], "input_required");
    // The same for logs, and for notifications about a server request.
    let log = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "error", "data": "d"}});
    for note in [log, json!({"jsonrpc": "2.0", "method": "notifications/elicitation/complete"})] {
        says(&mut story, 0, note.clone());
        story.hears_nothing(2).hears(1, note);
    }
    // Outside a stream the client is unknown, and a call that has ended asks no more.
    story.link_says(told[0].0, elicit(json!("q3")));
    assert_eq!(story.told("a").1["error"]["code"], 7020);
    story.answer(told[1].0, &told[1].1["id"], json!({})).clients.clear();
    says(&mut story, 1, elicit(json!("q4")));
    assert_eq!(story.told("a").1["id"], "q", "the question of the call that is over");
    let late = story.told("a").1;
    assert_eq!((&late["id"], &late["error"]["code"]), (&json!("q4"), &json!(-32800)));
    story.hears_nothing(1);
}

#[test]
fn a_client_without_the_capability_is_not_asked() {
    let mut story = Story::new(settings(vec![stdio("a")]), &[("a", maker(&["x"]))]);
    story.shake_as(1, local(), json!({"sampling": {}})).call(1, 1, "a__x");
    let (link, _) = story.told("a");
    story.link_says(link, elicit(json!(1)));
    assert_eq!(story.told("a").1["error"]["code"], -32601);
    story.hears_nothing(1);
    story.link_says(link, json!({"jsonrpc": "2.0", "id": 2, "method": "sampling/createMessage", "params": {}}));
    assert_eq!(story.heard(1).json()["method"], "sampling/createMessage");
}

#[test]
fn a_question_ends_with_its_backend_its_call_or_its_client() {
    for end in ["death", "call", "client", "backend"] {
        let mut story = Story::simple(&[("a", maker(&["x"]))]);
        story.call(1, 5, "a__x");
        let (link, told) = story.told("a");
        story.link_says(link, elicit(json!("q")));
        let ours = story.heard(1).json()["id"].clone();
        match end {
            "death" => drop(story.dies(link)),
            "call" => drop(story.answer(link, &told["id"], json!({}))),
            "client" => drop(story.event(Event::ClientLeft { client: 1 })),
            _ => drop(story.link_says(
                link,
                json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "q"}}),
            )),
        }
        if end == "client" {
            let told = [story.told("a").1, story.told("a").1];
            assert!(told.iter().any(|told| told["id"] == "q" && told.get("error").is_some()), "{told:?}");
            continue;
        }
        let heard: Vec<_> = story.clients.drain(..).map(|heard| heard.json()).collect();
        assert!(
            heard
                .iter()
                .any(|heard| heard["method"] == "notifications/cancelled" && heard["params"]["requestId"] == ours),
            "{end}: {heard:?}"
        );
        story.links.clear();
        story.say(1, &json!({"jsonrpc": "2.0", "id": ours, "result": {}}).to_string()).told_nothing("a");
    }
}

#[test]
fn a_question_stays_open_when_an_unrelated_call_of_the_same_client_ends() {
    // Which of the two calls caused it is unknown, so the request stays open as long as one of them is.
    for first in [0, 1] {
        let mut story = Story::simple(&[("a", maker(&["x"]))]);
        story.call(1, 1, "a__x").call(1, 2, "a__x");
        let told = [story.told("a"), story.told("a")];
        let link = told[0].0;
        story.link_says(link, elicit(json!("q")));
        let ours = story.heard(1).json()["id"].clone();
        story.answer(link, &told[first].1["id"], json!({})).told_nothing("a");
        assert_eq!(story.heard(1).json()["id"], first as u64 + 1);
        story.hears_nothing(1);
        // A later call keeps it open too: the backend may be working on either.
        story.call(1, 3, "a__x");
        let (_, third) = story.told("a");
        story.answer(link, &told[1 - first].1["id"], json!({})).told_nothing("a").heard(1);
        story.hears_nothing(1);
        story.say(1, &json!({"jsonrpc": "2.0", "id": ours, "result": {"action": "accept"}}).to_string());
        assert_eq!(story.told("a").1, json!({"jsonrpc": "2.0", "id": "q", "result": {"action": "accept"}}));

        // The second request ends with the last call, on the stream of that call and before its answer.
        story.call(1, 4, "a__x");
        let (_, fourth) = story.told("a");
        story.link_says(link, elicit(json!("q2")));
        let ours = story.heard(1).json()["id"].clone();
        story.answer(link, &fourth["id"], json!({})).heard(1);
        story.hears_nothing(1).answer(link, &third["id"], json!({}));
        let withdrawn = story.heard(1);
        assert_eq!((&withdrawn.json()["params"]["requestId"], withdrawn.about), (&ours, Some(Id::Integer(3))));
        assert_eq!(story.heard(1).json()["id"], 3);
        assert_eq!(story.told("a").1["error"]["code"], -32800);
    }
}

#[test]
fn a_question_whose_call_is_known_ends_with_that_call_and_no_other() {
    // The only call that was open at the time caused it.
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.call(1, 1, "a__x");
    let (link, first) = story.told("a");
    story.link_says(link, elicit(json!("q"))).heard(1);
    story.call(1, 2, "a__x").told("a");
    story.answer(link, &first["id"], json!({}));
    assert_eq!(story.heard(1).json()["method"], "notifications/cancelled");
    assert_eq!(story.told("a").1["error"]["code"], -32800);

    // Over HTTP the stream identifies the call.
    let mut story = Story::new(settings(vec![http("a")]), &[("a", maker(&["x"]))]);
    story.event(Event::TimePassed);
    story.shake(1).call(1, 1, "a__x").call(1, 2, "a__x").call(1, 3, "a__x");
    let told: Vec<(Link, serde_json::Value)> = (0..3).map(|_| story.told("a")).collect();
    let id = Id::parse(&told[1].1["id"].to_string()).expect("a number");
    story.event(Event::LinkSaidFor { link: told[1].0, id, message: elicit(json!("q")).to_string().into(), walk: None });
    assert_eq!(story.heard(1).about, Some(Id::Integer(2)));
    story.answer(told[2].0, &told[2].1["id"], json!({})).told_nothing("a").heard(1);
    story.hears_nothing(1).answer(told[1].0, &told[1].1["id"], json!({}));
    assert_eq!(story.heard(1).json()["method"], "notifications/cancelled");

    // A cancelled call may still be running, so one open call is no proof.
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.call(1, 1, "a__x").call(1, 2, "a__x");
    let (link, _) = story.told("a");
    let (_, second) = story.told("a");
    let back = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}});
    story.say(1, &back.to_string()).told("a");
    assert_eq!(story.told("a").1["method"], "ping", "whether it hangs");
    story.link_says(link, elicit(json!("q"))).heard(1);
    story.call(1, 3, "a__x").told("a");
    story.answer(link, &second["id"], json!({})).told_nothing("a").heard(1);
    story.hears_nothing(1);
}

#[test]
fn a_call_waits_for_the_answer_to_its_question() {
    // A call has a timeout of a minute, and of ten minutes at most.
    for calls in [1, 2] {
        let mut story = Story::simple(&[("a", maker(&["x"]))]);
        for id in 1..=calls {
            story.call(1, id, "a__x");
        }
        let (link, told) = story.told("a");
        story.links.clear();
        story.pass(secs(50)).link_says(link, elicit(json!("q")));
        let ours = story.heard(1).json()["id"].clone();
        story.pass(secs(200)).hears_nothing(1).told_nothing("a");
        story.say(1, &json!({"jsonrpc": "2.0", "id": ours, "result": {"action": "accept"}}).to_string());
        assert_eq!(story.told("a").1["result"]["action"], "accept");
        // After the answer the call has its usual timeout again.
        story.pass(secs(59)).hears_nothing(1).answer(link, &told["id"], json!({}));
        assert_eq!(story.heard(1).json()["id"], 1);

        // A request that is never answered does not keep a call open for ever.
        story.call(1, 7, "a__x").told("a");
        story.link_says(link, elicit(json!("q2"))).heard(1);
        story.pass(secs(301));
        let heard: Vec<_> = story.clients.drain(..).map(|heard| heard.json()).collect();
        assert!(heard.iter().any(|heard| heard["id"] == 7), "{heard:?}");
        assert!(heard.iter().any(|heard| heard["method"] == "notifications/cancelled"), "{heard:?}");
    }
}

#[test]
fn a_question_outside_of_calls_does_not_end_with_a_call() {
    let mut story =
        Story::new(settings(vec![Backend { children: Children::PerSession, ..stdio("a") }]), &[("a", maker(&["x"]))]);
    story.shake(1).call(1, 1, "a__x");
    let (link, first) = story.told("a");
    // Roots belong to the session, whichever call is open at the time.
    story.link_says(link, json!({"jsonrpc": "2.0", "id": "r", "method": "roots/list"}));
    assert_eq!(story.heard(1).json()["method"], "roots/list");
    story.answer(link, &first["id"], json!({})).told_nothing("a").heard(1);
    story.hears_nothing(1);
    // The same for a request that came between calls.
    story.link_says(link, elicit(json!("q"))).heard(1);
    story.call(1, 2, "a__x");
    let (_, second) = story.told("a");
    story.answer(link, &second["id"], json!({})).told_nothing("a").heard(1);
    story.hears_nothing(1);
}

#[test]
fn a_stateless_client_gets_the_question_as_a_result_and_answers_with_its_next_request() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.post(10, json!(1), "tools/call", json!({"name": "a__x"}));
    let (link, told) = story.told("a");
    story.link_says(link, elicit(json!("q"))).pass(ms(20));
    let answer = story.heard(10).json();
    assert_eq!((&answer["id"], &answer["result"]["resultType"]), (&json!(1), &json!("input_required")));
    let (name, request) = answer["result"]["inputRequests"].as_object().and_then(|all| all.iter().next()).expect("one");
    assert_eq!(
        request,
        &json!({"method": "elicitation/create", "params": {"message": "name?", "requestedSchema": {}}})
    );
    story.event(Event::ClientLeft { client: 10 }).told_nothing("a");

    let state = answer["result"]["requestState"].clone();
    story.post(11, json!(2), "tools/call", json!({"name": "a__x", "requestState": state, "inputResponses": {name: {"action": "accept", "content": {"n": 1}}}}));
    assert_eq!(
        story.told("a").1,
        json!({"jsonrpc": "2.0", "id": "q", "result": {"action": "accept", "content": {"n": 1}}})
    );
    story.hears_nothing(11).answer(link, &told["id"], json!({"content": []}));
    story.hears(11, json!({"jsonrpc": "2.0", "id": 2, "result": {"content": [], "resultType": "complete"}}));
    // The state of a retry can be used once.
    story.post(12, json!(3), "tools/call", json!({"name": "a__x", "requestState": state, "inputResponses": {}}));
    assert_eq!(story.heard(12).json()["error"]["code"], -32602);
    assert_eq!(story.status("a")["in_flight"], 0);
}

/// A stateless backend, and a client of the handshake era.
fn translated() -> Story {
    let stateless = Maker { handshake: false, stateless: true, ..maker(&["x"]) };
    let mut story = Story::simple(&[("a", stateless)]);
    story.call(1, 1, "a__x");
    story
}

fn input_required(requests: serde_json::Value) -> serde_json::Value {
    json!({"resultType": "input_required", "inputRequests": requests, "requestState": "s"})
}

#[test]
fn a_backend_that_always_needs_more_input_is_stopped_after_16_rounds() {
    for asks_client in [false, true] {
        let mut story = translated();
        let mut rounds = 0;
        while story.links.iter().any(|(_, text)| text.contains("tools/call")) {
            rounds += 1;
            assert!(rounds <= 17, "it never ends");
            let (link, told) = story.told("a");
            let requests = match asks_client {
                true => {
                    json!({"q": {"method": "elicitation/create", "params": {"message": "?", "requestedSchema": {}}}})
                }
                false => json!({}),
            };
            story.answer(link, &told["id"], input_required(requests));
            if asks_client && rounds <= 16 {
                let asked = story.heard(1).json()["id"].clone();
                story.say(1, &json!({"jsonrpc": "2.0", "id": asked, "result": {"action": "accept"}}).to_string());
            }
        }
        assert_eq!(rounds, 17);
        let failed = story.heard(1).json();
        assert_eq!((&failed["id"], &failed["result"]["isError"]), (&json!(1), &json!(true)));
        assert!(failed.to_string().contains("more than 16 times"), "{failed}");
        assert_eq!(story.status("a")["in_flight"], 0);
        assert_eq!(story.called.len(), 1);
    }
}

#[test]
fn rounds_of_input_share_one_call_max() {
    let mut story = translated();
    // Each round takes 50 s, and the whole call 600 s at most.
    for round in 1..=11 {
        let (link, told) = story.told("a");
        story.pass(secs(50)).answer(link, &told["id"], input_required(json!({})));
        assert!(round < 12);
    }
    story.told("a");
    story.pass(secs(49)).hears_nothing(1);
    story.pass(secs(2));
    assert_eq!(story.heard(1).json()["result"]["_meta"]["outlast/failure"]["reason"], "timed_out");
    // A request that the client does not answer ends by then, too.
    let mut story = translated();
    let (link, told) = story.told("a");
    let question = json!({"q": {"method": "elicitation/create", "params": {"message": "?", "requestedSchema": {}}}});
    story.answer(link, &told["id"], input_required(question));
    assert_eq!(story.heard(1).json()["method"], "elicitation/create");
    story.pass(secs(601));
    let heard: Vec<serde_json::Value> = (0..2).map(|_| story.heard(1).json()).collect();
    assert!(heard.iter().any(|heard| heard["id"] == 1), "{heard:?}");
}

/// A backend cannot fill the memory of the gateway, or of a client, with questions in one result.
#[test]
fn a_result_with_too_many_questions_fails_its_call() {
    for (count, fails) in [(64, false), (65, true), (10_000, true)] {
        let mut story = translated();
        let (link, told) = story.told("a");
        let question = json!({"method": "elicitation/create", "params": {"message": "?", "requestedSchema": {}}});
        let questions: serde_json::Map<String, serde_json::Value> =
            (0..count).map(|n| (format!("q{n}"), question.clone())).collect();
        story.answer(link, &told["id"], input_required(json!(questions)));
        let first = story.heard(1).json();
        assert_eq!(first["result"]["isError"] == true, fails, "{count}: {first}");
        assert_eq!(first["method"] == "elicitation/create", !fails, "{count}: {first}");
        if fails {
            assert!(first.to_string().contains("more than 64 requests"), "{first}");
            story.hears_nothing(1);
            assert_eq!(story.status("a")["in_flight"], 0);
        }
    }
}

#[test]
fn a_parked_call_has_so_many_questions_and_the_next_is_refused() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.post(10, json!(1), "tools/call", json!({"name": "a__x"}));
    let (link, _) = story.told("a");
    story.link_says(link, elicit(json!("first"))).pass(ms(20));
    assert!(story.heard(10).json()["result"]["requestState"].is_string());
    // The client has to answer the first one; the others wait.
    for n in 1..64 {
        story.link_says(link, elicit(json!(n)));
    }
    story.told_nothing("a");
    story.link_says(link, elicit(json!("one more")));
    let (_, refused) = story.told("a");
    assert_eq!((&refused["id"], &refused["error"]["code"]), (&json!("one more"), &json!(-32601)));
}

#[test]
fn a_loop_of_input_ends_when_its_client_leaves() {
    let mut story = translated();
    let (link, told) = story.told("a");
    story.answer(link, &told["id"], input_required(json!({})));
    let (_, again) = story.told("a");
    story.event(Event::ClientLeft { client: 1 });
    let (_, note) = story.told("a");
    assert_eq!((&note["method"], &note["params"]["requestId"]), (&json!("notifications/cancelled"), &again["id"]));
    story.answer(link, &again["id"], input_required(json!({}))).told_nothing("a");
}

#[test]
fn a_parked_call_that_asks_again_and_again_is_stopped_after_16_rounds() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.post(10, json!(1), "tools/call", json!({"name": "a__x"}));
    let (link, told) = story.told("a");
    let mut client = 10;
    for round in 1..=16 {
        story.link_says(link, elicit(json!(format!("q{round}")))).pass(ms(20));
        let answer = story.heard(client).json();
        let state = answer["result"]["requestState"].clone();
        assert!(state.is_string(), "{answer}");
        story.event(Event::ClientLeft { client });
        client += 1;
        story.post(
            client,
            json!(1),
            "tools/call",
            json!({"name": "a__x", "requestState": state, "inputResponses": {"ask0": {"action": "accept"}}}),
        );
        story.told("a");
    }
    story.link_says(link, elicit(json!("last"))).pass(ms(20));
    let failed = story.heard(client).json();
    assert!(failed.to_string().contains("more than 16 times"), "{failed}");
    let mut told_back = vec![story.told("a").1];
    told_back.extend(story.links.drain(..).map(|(_, text)| parsed(&text)));
    assert!(told_back.iter().any(|note| note["params"]["requestId"] == told["id"]), "{told_back:?}");
    assert_eq!(story.status("a")["in_flight"], 0);
}

/// The next request of the client names another tool, so its own guards say nothing about the parked call.
#[test]
fn a_parked_call_is_checked_again_when_its_client_continues_it() {
    for answered in [false, true] {
        let mut story = Story::simple(&[("a", maker(&["x", "y"]))]);
        story.post(10, json!(1), "tools/call", json!({"name": "a__x"}));
        let (link, told) = story.told("a");
        story.link_says(link, elicit(json!("q"))).pass(ms(20));
        let state = story.heard(10).json()["result"]["requestState"].clone();
        if answered {
            story.answer(link, &told["id"], json!({"content": []}));
        }
        story.event(Event::SwitchAsked { ticket: 1, what: Switch::Tool("a__x".into()), off: true });
        story.clients.clear();
        let again = json!({"name": "a__y", "requestState": state, "inputResponses": {"ask0": {"action": "accept"}}});
        story.post(11, json!(2), "tools/call", again);
        let refused = story.heard(11).json();
        assert_eq!((&refused["id"], &refused["error"]["code"]), (&json!(2), &json!(7013)), "{refused}");
        let told_back: Vec<_> = story.links.drain(..).map(|(_, text)| parsed(&text)).collect();
        assert!(!told_back.iter().any(|line| line["result"].is_object()), "{told_back:?}");
        if !answered {
            assert!(told_back.iter().any(|line| line["id"] == "q" && line["error"].is_object()), "{told_back:?}");
            assert!(told_back.iter().any(|note| note["params"]["requestId"] == told["id"]), "{told_back:?}");
        }
        assert_eq!(story.status("a")["in_flight"], 0);
    }
}

#[test]
fn simultaneous_questions_are_sent_together() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.post(10, json!(1), "tools/call", json!({"name": "a__x"}));
    let (link, told) = story.told("a");
    let sample = json!({"jsonrpc": "2.0", "id": 2, "method": "sampling/createMessage", "params": {}});
    story.link_says(link, elicit(json!(1))).pass(ms(10)).link_says(link, sample).hears_nothing(10).pass(ms(10));
    let asked = story.heard(10).json()["result"].clone();
    let methods: Vec<&str> =
        ["ask0", "ask1"].iter().filter_map(|name| asked["inputRequests"][name]["method"].as_str()).collect();
    assert_eq!(methods, ["elicitation/create", "sampling/createMessage"]);
    let responses = json!({"ask0": {"action": "accept"}, "ask1": {"role": "assistant"}});
    let again = json!({"name": "a__x", "requestState": asked["requestState"], "inputResponses": responses});
    story.post(11, json!(2), "tools/call", again);
    assert_eq!([story.told("a").1["id"].clone(), story.told("a").1["id"].clone()], [json!(1), json!(2)]);
    // A request whose call is answered in time is not sent.
    story.link_says(link, elicit(json!(3))).answer(link, &told["id"], json!({"content": []}));
    story.hears(11, json!({"jsonrpc": "2.0", "id": 2, "result": {"content": [], "resultType": "complete"}}));
    story.pass(secs(1)).hears_nothing(11);
}

#[test]
fn another_client_cannot_continue_a_parked_call() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.post(10, json!(1), "tools/call", json!({"name": "a__x"}));
    let (link, _) = story.told("a");
    story.link_says(link, elicit(json!("q"))).pass(ms(20));
    let state = story.heard(10).json()["result"]["requestState"].clone();
    story.came(11, Front::Request, Who { name: "mallory".into(), ..local() });
    story.ask_stateless(
        11,
        json!(2),
        "tools/call",
        json!({"name": "a__x", "requestState": state, "inputResponses": {}}),
    );
    assert_eq!(story.heard(11).json()["error"]["code"], -32602);
    story.told_nothing("a");
}

#[test]
fn an_abandoned_parked_call_is_cancelled() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.post(10, json!(1), "tools/call", json!({"name": "a__x"}));
    let (link, told) = story.told("a");
    story.link_says(link, elicit(json!("q"))).pass(ms(20)).heard(10);
    story.event(Event::ClientLeft { client: 10 }).pass(secs(301));
    let (_, note) = story.told("a");
    assert_eq!((&note["method"], &note["params"]["requestId"]), (&json!("notifications/cancelled"), &told["id"]));
    assert_eq!(story.called.last().map(|called| called.outcome), Some(Outcome::TimedOut));
}

/// On a shared link a question may be attributed to a call that the process has not read yet.
#[test]
fn a_question_ends_with_its_process_if_the_call_goes_to_the_next_one() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.post(10, json!(1), "tools/call", json!({"name": "a__x"}));
    let at = story.links.iter().position(|(_, text)| text.contains("tools/call")).expect("the call was sent");
    let (link, text) = story.links.remove(at);
    story.link_says(link, elicit(json!("q"))).dies_without(link, vec![format!("{text}\n").into()]);
    story.pass(secs(2)).hears_nothing(10);
    let (link, told) = story.told("a");
    assert_eq!(told["method"], "tools/call");
    story.answer(link, &told["id"], json!({"content": []}));
    story.hears(10, json!({"jsonrpc": "2.0", "id": 1, "result": {"content": [], "resultType": "complete"}}));
}

/// The deadline of a parked call is that of its client, who has five minutes.
#[test]
fn progress_does_not_move_the_deadline_of_a_parked_call() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.post(10, json!(1), "tools/call", json!({"name": "a__x", "_meta": {"progressToken": "p"}}));
    let (link, told) = story.told("a");
    let progress = json!({"jsonrpc": "2.0", "method": "notifications/progress",
        "params": {"progressToken": told["params"]["_meta"]["progressToken"], "progress": 1}});
    story.link_says(link, elicit(json!("q"))).pass(ms(20)).heard(10);
    // `call_timeout` is a minute.
    story.pass(secs(10)).link_says(link, progress.clone()).pass(secs(280)).told_nothing("a");
    story.link_says(link, progress).pass(secs(20));
    let (_, note) = story.told("a");
    assert_eq!((&note["method"], &note["params"]["requestId"]), (&json!("notifications/cancelled"), &told["id"]));
}

#[test]
fn an_early_answer_waits_for_the_next_request() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.post(10, json!(1), "tools/call", json!({"name": "a__x"}));
    let (link, told) = story.told("a");
    story.link_says(link, elicit(json!("q"))).pass(ms(20));
    let state = story.heard(10).json()["result"]["requestState"].clone();
    story.event(Event::ClientLeft { client: 10 }).answer(link, &told["id"], json!({"content": []}));
    assert_eq!(story.status("a")["in_flight"], 0);
    story.post(11, json!(2), "tools/call", json!({"name": "a__x", "requestState": state, "inputResponses": {}}));
    story.hears(11, json!({"jsonrpc": "2.0", "id": 2, "result": {"content": [], "resultType": "complete"}}));
}

#[test]
fn a_stateless_backends_question_is_put_to_a_handshake_client_and_asked_again_with_its_answers() {
    let modern = Maker { handshake: false, stateless: true, ..maker(&["x"]) };
    let mut story = Story::simple(&[("a", modern)]);
    story.ask(1, json!(5), "tools/call", json!({"name": "a__x", "arguments": {"k": 1}}));
    let (link, told) = story.told("a");
    let requests = json!({"who": {"method": "elicitation/create", "params": {"message": "name?"}}, "where": {"method": "roots/list"}});
    story.answer(
        link,
        &told["id"],
        json!({"resultType": "input_required", "inputRequests": requests, "requestState": "st"}),
    );
    let mut answers = vec![];
    for _ in 0..2 {
        let asked = story.heard(1);
        assert_eq!(asked.about, Some(Id::Integer(5)));
        answers.push(asked.json());
    }
    story.told_nothing("a");
    for asked in &answers {
        let result = if asked["method"] == "roots/list" { json!({"roots": []}) } else { json!({"action": "accept"}) };
        story.say(1, &json!({"jsonrpc": "2.0", "id": asked["id"], "result": result}).to_string());
    }
    let (_, again) = story.told("a");
    assert_ne!(again["id"], told["id"]);
    assert_eq!(again["params"]["requestState"], "st");
    assert_eq!(again["params"]["inputResponses"], json!({"who": {"action": "accept"}, "where": {"roots": []}}));
    assert_eq!((&again["params"]["name"], &again["params"]["arguments"]), (&json!("x"), &json!({"k": 1})));
    story.answer(link, &again["id"], json!({"resultType": "complete", "content": []}));
    let heard = story.heard(1).json();
    assert_eq!((&heard["id"], &heard["result"]["content"]), (&json!(5), &json!([])));
}

/// The backend began the call before it asked, so the call is not sent from its beginning to the next process.
#[test]
fn a_call_whose_input_did_not_reach_its_backend_fails_and_is_not_begun_again() {
    let modern = Maker { handshake: false, stateless: true, ..maker(&["x"]) };
    let mut story = Story::simple(&[("a", modern)]);
    story.ask(1, json!(5), "tools/call", json!({"name": "a__x", "arguments": {"k": 1}}));
    let (link, told) = story.told("a");
    let requests = json!({"who": {"method": "elicitation/create", "params": {"message": "name?"}}});
    story.answer(link, &told["id"], json!({"resultType": "input_required", "inputRequests": requests}));
    let asked = story.heard(1).json();
    story.say(1, &json!({"jsonrpc": "2.0", "id": asked["id"], "result": {"action": "accept"}}).to_string());
    let (_, again) = story.told("a");
    story.dies_without(link, vec![format!("{again}\n").into()]);
    let failure = story.heard(1).json()["result"]["_meta"]["outlast/failure"].clone();
    assert_eq!((&failure["reason"], &failure["outcome"]), (&json!("backend_ended"), &json!("unknown")));
    story.pass(secs(5));
    story.told_nothing("a");
}

#[test]
fn a_call_that_asked_for_input_that_its_client_cannot_give_may_have_run() {
    let modern = Maker { handshake: false, stateless: true, ..maker(&["x"]) };
    let mut story = Story::simple(&[("a", modern)]);
    story.shake_as(2, local(), json!({}));
    story.ask(2, json!(5), "tools/call", json!({"name": "a__x"}));
    let (link, told) = story.told("a");
    let requests = json!({"who": {"method": "elicitation/create", "params": {"message": "name?"}}});
    story.answer(link, &told["id"], json!({"resultType": "input_required", "inputRequests": requests}));
    let failure = story.heard(2).json()["result"]["_meta"]["outlast/failure"].clone();
    assert_eq!((&failure["reason"], &failure["outcome"]), (&json!("no_input"), &json!("unknown")));
}

#[test]
fn a_question_passes_unchanged_between_stateless_peers() {
    let modern = Maker { handshake: false, stateless: true, ..maker(&["x"]) };
    let mut story = Story::simple(&[("a", modern)]);
    story.post(10, json!(1), "tools/call", json!({"name": "a__x"}));
    let (link, told) = story.told("a");
    let question = json!({"resultType": "input_required", "inputRequests": {"k": {"method": "roots/list"}}, "requestState": "theirs"});
    story.answer(link, &told["id"], question.clone()).hears(10, json!({"jsonrpc": "2.0", "id": 1, "result": question}));
    story.post(
        11,
        json!(2),
        "tools/call",
        json!({"name": "a__x", "requestState": "theirs", "inputResponses": {"k": {"roots": []}}}),
    );
    let told = story.told("a").1;
    assert_eq!(
        (&told["params"]["requestState"], &told["params"]["inputResponses"]),
        (&json!("theirs"), &json!({"k": {"roots": []}}))
    );
}

#[test]
fn logs_go_to_clients_by_their_level() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.shake(2);
    let link = story.link("a");
    let log = |level: &str| json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": level, "data": "d"}});
    story
        .ask(1, json!(1), "logging/setLevel", json!({"level": "error"}))
        .hears(1, json!({"jsonrpc": "2.0", "id": 1, "result": {}}));
    assert_eq!(story.told("a").1["params"], json!({"level": "error"}));
    story.ask(2, json!(1), "logging/setLevel", json!({"level": "info"})).heard(2);
    assert_eq!(story.told("a").1["params"], json!({"level": "info"}));
    story.call(1, 7, "a__x").call(2, 7, "a__x");
    story.link_says(link, log("warning")).hears_nothing(1).hears(2, log("warning"));
    story.link_says(link, log("error")).hears(1, log("error")).hears(2, log("error"));
    story.ask(2, json!(2), "logging/setLevel", json!({"level": "loud"}));
    assert_eq!(story.heard(2).json()["error"]["code"], -32602);
    // The next child gets the level too.
    story.links.clear();
    story.pass(secs(6)).dies(link);
    assert_eq!(story.told("a").1["params"], json!({"level": "info"}));

    // While the backend works for one client, the others do not get its logs.
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    let link = story.link("a");
    story.shake(2).call(2, 7, "a__x").link_says(link, log("error")).hears_nothing(1);
    assert_eq!(story.heard(2).about, Some(Id::Integer(7)));
    let modern = Maker { handshake: false, stateless: true, ..maker(&["x"]) };
    let mut story = Story::simple(&[("a", modern)]);
    let link = story.link("a");
    story.shake(2).link_says(link, log("error")).hears_nothing(1).hears_nothing(2);
    story.call(1, 7, "a__x").link_says(link, log("error")).hears(1, log("error")).hears_nothing(2);
    story.call(2, 7, "a__x").link_says(link, log("error")).hears_nothing(1).hears_nothing(2);

    // A stateless request gets the logs of its own work, if it asked for them.
    for (level, hears) in [(Some("info"), true), (Some("error"), false), (None, false)] {
        let mut story = Story::simple(&[("a", maker(&["x"]))]);
        let meta = level.map_or_else(|| json!({}), |level| json!({"io.modelcontextprotocol/logLevel": level}));
        story.post(10, json!("p"), "tools/call", json!({"name": "a__x", "_meta": meta}));
        let link = story.link("a");
        story.link_says(link, log("warning"));
        match hears {
            true => assert_eq!(story.heard(10).about, Some(Id::text("p"))),
            false => drop(story.hears_nothing(10)),
        }
    }
}

#[test]
fn a_log_message_of_a_shared_backend_reaches_only_clients_that_may_have_caused_it() {
    let log = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "error", "data": "d"}});
    let strange = json!({"jsonrpc": "2.0", "method": "notifications/elicitation/complete"});
    let as_role = |role: &str| Who { name: role.into(), role: Some(role.into()), profile: None };
    let mut configured = settings(vec![stdio("a")]);
    let pattern = |text: &str| Pattern(text.into());
    configured.roles.insert("reader".into(), Role { allow: vec![pattern("a__read")], deny: vec![] });
    configured.roles.insert("admin".into(), Role { allow: vec![pattern("*")], deny: vec![] });
    let mut story = Story::new(configured, &[("a", maker(&["read", "write"]))]);
    story.shake_as(1, as_role("reader"), json!({})).shake_as(2, as_role("admin"), json!({}));
    let link = story.link("a");

    // Without an open call the message may be about any earlier work.
    story.link_says(link, log.clone()).hears_nothing(1).hears_nothing(2);

    // Both clients may have caused it, and both may see the only tool that runs.
    story.call(1, 1, "a__read").call(2, 1, "a__read");
    let (_, read) = story.told("a");
    let (_, also_read) = story.told("a");
    story.link_says(link, log.clone()).hears(1, log.clone()).hears(2, log.clone());

    // It may be about `write`, which the reader may not see.
    story.call(2, 2, "a__write");
    let (_, write) = story.told("a");
    story.link_says(link, log.clone()).hears_nothing(1).hears(2, log.clone());
    // The same after the call was cancelled, as long as the backend may still work on it.
    let back = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 2}});
    story.say(2, &back.to_string()).told("a");
    story.answer(link, &also_read["id"], json!({})).heard(2);
    story.link_says(link, log.clone()).hears_nothing(1).hears_nothing(2);
    story.link_says(link, strange.clone()).hears_nothing(1).hears_nothing(2);
    story.answer(link, &write["id"], json!({}));
    story.link_says(link, log.clone()).hears(1, log.clone()).hears_nothing(2);
    story.link_says(link, strange.clone()).hears(1, strange).hears_nothing(2);
    story.answer(link, &read["id"], json!({})).heard(1);
    story.link_says(link, log).hears_nothing(1).hears_nothing(2);
}

#[test]
fn a_client_with_a_link_of_its_own_gets_all_logs_of_it() {
    let log = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "error", "data": "d"}});
    let own = Backend { children: Children::PerSession, ..stdio("a") };
    let mut story = Story::new(settings(vec![own]), &[("a", maker(&["x"]))]);
    story.shake(1).shake(2).call(1, 1, "a__x");
    let (link, told) = story.told("a");
    story.answer(link, &told["id"], json!({})).heard(1);
    story.link_says(link, log.clone()).hears(1, log.clone()).hears_nothing(2);
    // A single client on stdio has every backend to itself.
    let mut story = Story::new(settings(vec![stdio("a")]), &[("a", maker(&["x"]))]);
    story.came(1, Front::Lines, local());
    story
        .ask(
            1,
            json!(1),
            "initialize",
            json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}),
        )
        .heard(1);
    story.say(1, r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
    let link = story.link("a");
    story.link_says(link, log.clone()).hears(1, log);
}

#[test]
fn a_ping_is_answered_here_in_both_directions() {
    let mut story = Story::simple(&[("a", maker(&[]))]);
    let link = story.link("a");
    story.link_says(link, json!({"jsonrpc": "2.0", "id": "p", "method": "ping"}));
    assert_eq!(story.told("a").1, json!({"jsonrpc": "2.0", "id": "p", "result": {}}));
    story.ask(1, json!("p"), "ping", json!({})).hears(1, json!({"jsonrpc": "2.0", "id": "p", "result": {}}));
}

#[test]
fn the_only_client_on_stdio_owns_every_backend() {
    let mut story = Story::new(settings(vec![stdio("a")]), &[("a", maker(&["x"]))]);
    story.came(1, Front::Lines, local());
    let opening = parsed(&story.opened[0]);
    assert_eq!(opening["params"]["capabilities"]["roots"], json!({"listChanged": true}), "{opening}");
    let link = story.link("a");
    let roots = json!({"jsonrpc": "2.0", "id": "r", "method": "roots/list"});
    story.link_says(link, roots.clone());
    assert_eq!(story.told("a").1["error"]["code"], -32601, "it has not said what it can do");
    story.ask(1, json!(1), "initialize", json!({"protocolVersion": "2025-11-25", "capabilities": {"roots": {}}, "clientInfo": {"name": "c", "version": "1"}})).heard(1);
    story.say(1, r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
    assert_eq!(story.told("a").1["method"], "notifications/roots/list_changed");
    // No call is open, and still it can only be for this client.
    story.link_says(link, roots.clone());
    let asked = story.heard(1).json();
    assert_eq!(asked["method"], "roots/list");
    story.say(1, &json!({"jsonrpc": "2.0", "id": asked["id"], "result": {"roots": []}}).to_string());
    assert_eq!(story.told("a").1, json!({"jsonrpc": "2.0", "id": "r", "result": {"roots": []}}));
    story.say(1, r#"{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}"#);
    assert_eq!(story.told("a").1["method"], "notifications/roots/list_changed");
    // With a second client the owner of a server request is unknown.
    story.shake(2).link_says(link, roots);
    assert_eq!(story.told("a").1["error"]["code"], 7020);
}

#[test]
fn an_undeclared_capability_has_an_error_of_its_own() {
    let undeclared = |story: &mut Story, link: Link| {
        story.link_says(link, json!({"jsonrpc": "2.0", "id": "q", "method": "roots/list"}));
        let refused = story.told("a").1;
        assert_eq!(refused["error"]["code"], -32601);
        refused["error"]["message"].as_str().expect("words").to_owned()
    };
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.post(10, json!(1), "tools/call", json!({"name": "a__x"}));
    let (link, told) = story.told("a");
    let words = undeclared(&mut story, link);
    story.link_says(
        link,
        json!({"jsonrpc": "2.0", "id": told["id"], "error": {"code": -32603, "message": format!("MCP error -32601: {words}")}}),
    );
    let error = story.heard(10).json()["error"].clone();
    assert_eq!((&error["code"], &error["data"]), (&json!(-32021), &json!({"requiredCapabilities": {"roots": {}}})));
    assert_eq!(story.called.last().map(|called| called.outcome), Some(Outcome::Failed));

    // Many servers put an error into a result. A result without an error, or with another error, is forwarded as it
    // is.
    for (text, is_error, is_ours) in [(&*words, true, true), (&*words, false, false), ("no such file", true, false)] {
        story.post(11, json!(2), "tools/call", json!({"name": "a__x"}));
        let (_, told) = story.told("a");
        undeclared(&mut story, link);
        let result = json!({"content": [{"type": "text", "text": text}], "isError": is_error});
        story.answer(link, &told["id"], result);
        let heard = story.heard(11).json();
        assert_eq!(heard["error"]["code"] == -32021, is_ours, "{heard}");
        assert_eq!(heard["result"]["isError"].is_boolean(), !is_ours, "{heard}");
    }
}
