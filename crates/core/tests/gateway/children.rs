//! How many processes a backend has, and when they go.

use crate::story::*;

fn one(backend: Backend, maker: Maker) -> Story {
    let name = backend.name.clone();
    let mut story = Story::new(settings(vec![backend]), &[(&name, maker)]);
    story.event(Event::TimePassed);
    story
}

#[test]
fn each_session_has_a_child_of_its_own() {
    let mut story = one(Backend { children: Children::PerSession, ..stdio("a") }, maker(&["x"]));
    story.shake(1).shake(2).call(1, 1, "a__x").call(2, 1, "a__x");
    let (first, _) = story.told("a");
    let (second, _) = story.told("a");
    assert_ne!(first, second);
    // What its child asks is for nobody else.
    let ask = json!({"jsonrpc": "2.0", "id": "q", "method": "roots/list"});
    story.link_says(second, ask).hears_nothing(1);
    assert_eq!(story.heard(2).json()["method"], "roots/list");
    story.say(2, r#"{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}"#);
    let (told, note) = story.told("a");
    assert_eq!((told, &note["method"]), (second, &json!("notifications/roots/list_changed")));
    story.event(Event::ClientLeft { client: 2 });
    assert!(story.disconnected.iter().any(|(link, _)| *link == second));
    assert!(!story.disconnected.iter().any(|(link, _)| *link == first));
    // A stateless client has no session.
    story.links.clear();
    story.post(10, json!(1), "tools/call", json!({"name": "a__x"}));
    assert_eq!(story.told("a").0, story.connected[0]);
}

#[test]
fn a_pool_grows_while_all_are_busy_and_no_further() {
    let mut story = one(Backend { children: Children::Pool(2), ..stdio("a") }, maker(&["x"]));
    story.shake(1);
    for id in 0..6 {
        story.call(1, id, "a__x");
    }
    assert_eq!(story.connected.len(), 2);
    let mut counts = std::collections::BTreeMap::new();
    while !story.links.iter().all(|(_, text)| !text.contains("tools/call")) {
        let (link, told) = story.told("a");
        if told["method"] == "tools/call" {
            *counts.entry(link.serial).or_insert(0) += 1;
        }
    }
    assert_eq!(counts.into_values().collect::<Vec<_>>(), [3, 3]);
}

#[test]
fn a_child_that_nobody_calls_is_stopped_and_started_by_the_next_call() {
    let mut story = one(Backend { idle_stop: Some(secs(60)), ..stdio("a") }, maker(&["x"]));
    let first = story.link("a");
    story.shake(1).pass(secs(30)).call(1, 1, "a__x");
    let (link, told) = story.told("a");
    story.pass(secs(59));
    assert!(story.disconnected.is_empty());
    story.answer(link, &told["id"], json!({})).heard(1);
    story.pass(secs(61));
    assert_eq!(story.disconnected, [(first, false)]);
    story.call(1, 2, "a__x").dies(first);
    assert_ne!(story.link("a"), first);
    let (link, told) = story.told("a");
    assert_eq!(link, story.link("a"));
    story.answer(link, &told["id"], json!({})).heard(1);
    story.pass(secs(61)).dies(link);
    assert_eq!(story.status("a")["state"], "idle");
    assert_eq!(story.status("a")["crashes"], 0);
    story.call(1, 3, "a__x");
    assert_eq!(story.told("a").0, story.link("a"));
}

#[test]
fn every_end_of_a_child_is_recorded_whoever_wished_it() {
    let mut story = one(stdio("a"), maker(&["x"]));
    let stopped = |story: &Story| -> Vec<(Option<String>, Option<u64>)> {
        let records = story.records.iter().filter(|record| record.event == outlast_core::record::Event::ServerStopped);
        records.map(|record| (record.id.clone(), record.generation)).collect()
    };
    let first = story.link("a");
    story.event(Event::RestartAsked { ticket: 1, backend: None, reason: "new".into() });
    let second = story.link("a");
    assert_ne!(first, second);
    assert_eq!(stopped(&story), [], "it is not over yet");
    story.dies(first);
    assert_eq!(stopped(&story), [(Some("a".to_owned()), Some(1))]);
    story.event(Event::SwitchAsked { ticket: 2, what: Switch::Backend("a".into()), off: true }).dies(second);
    assert_eq!(stopped(&story).last(), Some(&(Some("a".to_owned()), Some(2))));
    assert_eq!(stopped(&story).len(), 2);
}

#[test]
fn what_was_turned_off_and_on_again_keeps_its_history() {
    let mut story = one(stdio("a"), maker(&["x"]));
    let link = story.link("a");
    story.pass(secs(6)).dies(link);
    let told = |story: &Story| {
        let status = story.status("a");
        (status["restarts"].clone(), status["last_exits"][0]["exit"]["signal"].clone())
    };
    assert_eq!(told(&story), (json!(1), json!(9)));
    for off in [true, false] {
        story.event(Event::SwitchAsked { ticket: 1, what: Switch::Backend("a".into()), off });
        assert_eq!(told(&story), (json!(1), json!(9)), "off: {off}");
    }
    let link = story.link("a");
    story.pass(secs(6)).dies(link);
    assert_eq!(told(&story).0, json!(2));
}

#[test]
fn who_asks_for_a_restart_that_fails_hears_so_at_once() {
    let mut story = one(stdio("a"), Maker { mute: true, ..maker(&["x"]) });
    for ticket in [1, 2] {
        story.event(match ticket {
            1 => Event::RestartAsked { ticket, backend: Some("a".into()), reason: "why not".into() },
            _ => Event::ResumeAsked { ticket, backend: Some("a".into()) },
        });
        let link = story.link("a");
        story.dies(link);
        let (answered, result) = story.answers.last().cloned().expect("an answer");
        let words = result.expect_err("it failed");
        assert_eq!(answered, ticket);
        assert!(words.contains("did not come up") && words.contains("started again in"), "{words}");
        assert_eq!(story.status("a")["state"], "waiting");
    }
}

#[test]
fn a_child_above_its_memory_is_replaced_without_a_failed_call() {
    let mut story = one(Backend { memory_max: Some(100 << 20), ..stdio("a") }, maker(&["x"]));
    story.shake(1).call(1, 1, "a__x");
    let (old, told) = story.told("a");
    story.event(Event::Measured { link: old, rss: 50 << 20 });
    assert_eq!(story.connected.len(), 1);
    story.event(Event::Measured { link: old, rss: 101 << 20 });
    assert_eq!(story.connected.len(), 2);
    let new = story.link("a");
    story.call(1, 2, "a__x");
    assert_eq!(story.told("a").0, new);
    assert!(story.disconnected.is_empty());
    story.answer(old, &told["id"], json!({"ok": 1})).hears(1, json!({"jsonrpc": "2.0", "id": 1, "result": {"ok": 1}}));
    assert_eq!(story.disconnected, [(old, false)]);
    story.dies(old).hears_nothing(1);
    assert_eq!((&story.status("a")["state"], &story.status("a")["restarts"]), (&json!("ready"), &json!(1)));
}

#[test]
fn a_restart_takes_over_when_it_is_ready_and_says_so() {
    let mut story = one(stdio("a"), maker(&["x"]));
    let old = story.link("a");
    story.event(Event::RestartAsked { ticket: 5, backend: Some("a".into()), reason: "test".into() });
    assert_eq!(story.answers.len(), 1);
    assert!(
        matches!(&story.answers[0], (5, Ok(result)) if result["links"][0]["generation"] == 2),
        "{:?}",
        story.answers
    );
    assert_eq!(story.disconnected, [(old, false)]);
    // One that does not come up leaves the old one where it is.
    let serving = story.link("a");
    story.auto = false;
    story.event(Event::RestartAsked { ticket: 6, backend: None, reason: "test".into() });
    let broken = story.link("a");
    assert_ne!(broken, serving);
    story.dies(broken);
    assert!(
        matches!(&story.answers[1], (6, Err(words)) if words.contains("the old one goes on")),
        "{:?}",
        story.answers
    );
    assert_eq!(story.status("a")["state"], "ready");
    story.event(Event::RestartAsked { ticket: 7, backend: Some("b".into()), reason: "test".into() });
    assert!(matches!(&story.answers[2], (7, Err(words)) if words.contains("`b`")));
}

#[test]
fn what_was_given_up_is_resumed() {
    let mut story =
        one(Backend { policy: Policy { restarts_max: Some(0), ..Policy::exponential() }, ..stdio("a") }, maker(&["x"]));
    let link = story.link("a");
    story.dies(link);
    assert_eq!(story.status("a")["state"], "given_up");
    story.event(Event::ResumeAsked { ticket: 1, backend: None });
    assert_eq!(story.status("a")["state"], "ready");
    assert!(story.answers[0].1.is_ok());
    assert_eq!(story.status("a")["crashes"], 0);
}

#[test]
fn a_task_belongs_to_who_made_it_and_to_the_process_that_works_on_it() {
    let mut story = Story::simple(&[("a", maker(&["x"])), ("b", maker(&["y"]))]);
    story.shake(2).ask(1, json!(1), "tools/call", json!({"name": "a__x", "task": {"ttl": 1000}}));
    let (link, told) = story.told("a");
    story.answer(link, &told["id"], json!({"task": {"taskId": "t1", "status": "working"}})).heard(1);
    story.ask(1, json!(2), "tasks/get", json!({"taskId": "t1"}));
    let (_, told) = story.told("a");
    assert_eq!((&told["method"], &told["params"]["taskId"]), (&json!("tasks/get"), &json!("t1")));
    story.answer(link, &told["id"], json!({"taskId": "t1"})).heard(1);
    story.ask(2, json!(3), "tasks/result", json!({"taskId": "t1"}));
    assert_eq!(story.heard(2).json()["error"]["code"], -32602);
    let news = json!({"jsonrpc": "2.0", "method": "notifications/tasks/status", "params": {"taskId": "t1", "status": "completed"}});
    story.link_says(link, news.clone()).hears(1, news).hears_nothing(2);
    let about = json!({"io.modelcontextprotocol/related-task": {"taskId": "t1"}});
    story.call(2, 4, "a__x").told("a");
    story.call(1, 5, "a__x").told("a");
    story.link_says(
        link,
        json!({"jsonrpc": "2.0", "id": "q", "method": "elicitation/create", "params": {"_meta": about}}),
    );
    assert_eq!(story.heard(1).json()["method"], "elicitation/create");
    story.pass(secs(6)).dies(link);
    story.clients.clear();
    story.ask(1, json!(6), "tasks/get", json!({"taskId": "t1"}));
    assert_eq!(story.heard(1).json()["error"]["code"], -32602);
}

#[test]
fn a_pool_does_not_wait_for_one_that_was_given_up() {
    let backend = Backend {
        children: Children::Pool(2),
        policy: Policy { restarts_max: Some(1), jitter_percent: 0, ..Policy::exponential() },
        ..stdio("a")
    };
    let mut story = one(backend, maker(&["x"]));
    story.shake(1).call(1, 1, "a__x").call(1, 2, "a__x");
    let (first, second) = (story.connected[0], story.connected[1]);
    // One is given up, the other comes back in a while.
    story.dies(first).pass(secs(1));
    story.auto = false;
    let again = story.link("a");
    story.dies(again).dies(second);
    story.clients.clear();
    story.call(1, 3, "a__x").call(1, 4, "a__x").hears_nothing(1);
    assert_eq!(story.status("a")["held"], 2);
}
