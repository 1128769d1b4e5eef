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
}

/// A call of the stateless era, of a client that says so much of itself.
fn lent_call(story: &mut Story, client: u64, name: &str, capabilities: serde_json::Value) -> (Link, serde_json::Value) {
    story.came(client, Front::Request, Who { name: name.into(), ..local() });
    let meta = json!({"io.modelcontextprotocol/clientCapabilities": capabilities});
    story.ask_stateless(client, json!(1), "tools/call", json!({"name": "a__x", "_meta": meta}));
    story.told("a")
}

#[test]
fn a_stateless_clients_call_is_alone_on_a_child_if_it_can_be_asked() {
    let mut story = one(Backend { children: Children::PerSession, ..stdio("a") }, maker(&["x"]));
    let asks = json!({"elicitation": {"form": {}}});
    let (first, told) = lent_call(&mut story, 10, "ann", asks.clone());
    assert_ne!(first, story.connected[0], "the first one is only asked for what there is");
    let opening = parsed(story.opened.last().expect("a handshake"));
    assert_eq!(opening["params"]["capabilities"]["roots"], json!({}), "{opening}");
    // It is not asked again what all of them offer.
    assert!(!story.links.iter().any(|(link, text)| *link == first && text.contains("/list")));

    // Another call at the same time has another child, and each question goes where it belongs.
    let (second, other) = lent_call(&mut story, 11, "ann", asks.clone());
    assert_ne!(first, second);
    for (link, client) in [(second, 11), (first, 10)] {
        let question = json!({"jsonrpc": "2.0", "id": "q", "method": "elicitation/create", "params": {"to": client}});
        story.link_says(link, question).pass(ms(20));
        let asked = story.heard(client).json();
        assert_eq!(asked["result"]["inputRequests"]["ask0"]["params"]["to"], client, "{asked}");
        story.hears_nothing(21 - client).event(Event::ClientLeft { client });
    }
    // While they wait for their clients, a third one is not in their way.
    let (third, its) = lent_call(&mut story, 12, "ann", asks.clone());
    assert!(third != first && third != second);
    story.answer(third, &its["id"], json!({"content": []})).heard(12);
    story.answer(first, &told["id"], json!({"content": []})).answer(second, &other["id"], json!({"content": []}));

    // The next one of the same name takes one that is there, whatever its client can do; one of another name never does.
    let (again, told) = lent_call(&mut story, 13, "ann", json!({}));
    assert_eq!(again, first);
    let (theirs, _) = lent_call(&mut story, 14, "bob", asks.clone());
    assert!([first, second, third].iter().all(|link| *link != theirs));
    // Those who cannot be asked anything need not be alone, and do not join one that can.
    assert_eq!(lent_call(&mut story, 15, "ann", json!({})).0, first);
    assert_eq!(lent_call(&mut story, 16, "ann", asks).0, second);
    story.link_says(first, json!({"jsonrpc": "2.0", "id": "q", "method": "roots/list"}));
    let refused = story.told("a").1;
    assert!(refused["error"]["message"].as_str().is_some_and(|words| words.contains("`roots`")), "{refused}");
    story.answer(first, &told["id"], json!({"content": []})).heard(13);
}

#[test]
fn a_lent_child_whose_call_was_taken_back_asks_nobody_else() {
    let mut story = one(Backend { children: Children::PerSession, ..stdio("a") }, maker(&["x"]));
    let asks = json!({"sampling": {}});
    let mut spoiled = Vec::new();
    for end in ["left", "late"] {
        let (link, _) = lent_call(&mut story, 10, "ann", asks.clone());
        match end {
            "left" => drop(story.event(Event::ClientLeft { client: 10 })),
            _ => drop(
                story
                    .pass(secs(59))
                    .link_says(link, json!({"jsonrpc": "2.0", "method": "notifications/message"}))
                    .pass(secs(2)),
            ),
        }
        // It does not hang.
        story.link_says(link, json!({"jsonrpc": "2.0", "method": "notifications/message"}));
        story.links.clear();
        story.clients.clear();
        let (next, told) = lent_call(&mut story, 11, "ann", asks.clone());
        assert_ne!(next, link, "{end}");
        story.answer(next, &told["id"], json!({"content": []})).heard(11);
        spoiled.push(link);
    }
    // What it asks now is for nobody, and who cannot be asked may still use it.
    story.link_says(spoiled[1], json!({"jsonrpc": "2.0", "id": "q", "method": "sampling/createMessage"}));
    assert_eq!(story.told("a").1["error"]["code"], 7020);
    let (link, told) = lent_call(&mut story, 12, "ann", json!({}));
    assert!(spoiled.contains(&link));
    story.answer(link, &told["id"], json!({"content": []})).heard(12);
}

#[test]
fn who_waits_for_a_lent_child_that_is_spoiled_gets_a_new_one() {
    let mut story = one(Backend { children: Children::PerSession, ..stdio("a") }, maker(&["x"]));
    let asks = json!({"roots": {}});
    let lent: Vec<Link> = (0..16).map(|client| lent_call(&mut story, 100 + client, "ann", asks.clone()).0).collect();
    story.came(200, Front::Request, Who { name: "ann".into(), ..local() });
    let meta = json!({"io.modelcontextprotocol/clientCapabilities": asks});
    story.ask_stateless(200, json!(1), "tools/call", json!({"name": "a__x", "_meta": meta})).told_nothing("a");
    story.event(Event::ClientLeft { client: 115 });
    assert_eq!(story.disconnected, [(lent[15], false)]);
    story.links.clear();
    story.dies(lent[15]);
    let (link, told) = story.told("a");
    assert_eq!(link, story.link("a"));
    story.answer(link, &told["id"], json!({"content": []})).heard(200);
    assert_eq!(story.status("a")["crashes"], 0);
}

#[test]
fn lent_children_are_bounded_in_number_and_go_when_nobody_needs_them() {
    let mut story = one(Backend { children: Children::PerSession, ..stdio("a") }, maker(&["x"]));
    let asks = json!({"roots": {}});
    let mut lent = Vec::new();
    for client in 0..16 {
        lent.push(lent_call(&mut story, 100 + client, "ann", asks.clone()));
    }
    // One more of the same name waits for the first that is free; another name has nothing to wait for.
    story.came(200, Front::Request, Who { name: "ann".into(), ..local() });
    let meta = json!({"io.modelcontextprotocol/clientCapabilities": asks});
    story.ask_stateless(200, json!(1), "tools/call", json!({"name": "a__x", "_meta": meta.clone()}));
    story.told_nothing("a").hears_nothing(200);
    story.came(201, Front::Request, Who { name: "bob".into(), ..local() });
    story.ask_stateless(201, json!(1), "tools/call", json!({"name": "a__x", "_meta": meta.clone()}));
    assert_eq!(story.heard(201).json()["result"]["_meta"]["outlast/failure"]["reason"], "all_lent");
    let (link, told) = lent.pop().expect("16");
    story.answer(link, &told["id"], json!({"content": []}));
    let (again, waited) = story.told("a");
    assert_eq!(again, link);
    story.answer(link, &waited["id"], json!({"content": []})).heard(200);
    // Now one is free, and another name may have its place, though not its process.
    let (theirs, told) = lent_call(&mut story, 202, "bob", asks);
    assert!(story.disconnected.contains(&(link, false)) && theirs != link);
    story.dies(link).answer(theirs, &told["id"], json!({"content": []}));
    for (link, told) in lent {
        story.answer(link, &told["id"], json!({"content": []}));
    }
    story.pass(secs(61));
    let going: Vec<Link> = story.disconnected.iter().map(|(link, _)| *link).filter(|gone| *gone != link).collect();
    assert_eq!(going.len(), 16);
    for link in going {
        story.dies(link);
    }
    let links = story.status("a")["links"].as_array().cloned().unwrap_or_default();
    assert_eq!(links.len(), 1, "only the first is left: {links:?}");
    assert_eq!(story.status("a")["state"], "ready");
}

#[test]
fn a_stateless_backend_has_nothing_to_lend() {
    let modern = Maker { handshake: false, stateless: true, ..maker(&["x"]) };
    let mut story = one(Backend { children: Children::PerSession, ..stdio("a") }, modern);
    let (link, _) = lent_call(&mut story, 10, "ann", json!({"sampling": {}}));
    assert_eq!(link, story.connected[0]);
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
    // Neither start was a restart. A crash is followed by one.
    assert_eq!(story.status("a")["restarts"], 0);
    assert!(story.records.iter().all(|record| record.restarts.unwrap_or(0) == 0), "{:#?}", story.records);
    let link = story.link("a");
    story.pass(secs(6)).dies(link);
    assert_eq!(story.status("a")["restarts"], 1);
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
    assert_eq!(story.status("a")["generation"], 3, "it counts on");
    let link = story.link("a");
    story.pass(secs(6)).dies(link);
    assert_eq!(told(&story).0, json!(2));
    assert_eq!(story.status("a")["generation"], 4);
    let mut other = stdio("a");
    other.kind = Kind::Stdio { command: "b".into(), args: vec![], env: Default::default(), cwd: None, sandbox: None };
    story.event(Event::Configured(Box::new(settings(vec![other]))));
    assert_eq!(story.status("a")["generation"], 5);
    story.event(Event::Configured(Box::new(settings(vec![stdio("b")]))));
    story.event(Event::Configured(Box::new(settings(vec![stdio("b"), stdio("a")]))));
    assert_eq!(story.status("a")["generation"], 6, "by its name, though it was away");
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
        matches!(&story.answers[1], (6, Err(words)) if words.contains("the old one keeps serving")),
        "{:?}",
        story.answers
    );
    assert_eq!(story.status("a")["state"], "ready");
    // It is not only the requester who learns of it.
    let last_reload = story.status("a")["last_reload"].take();
    assert_eq!(last_reload["ok"], false, "{last_reload}");
    assert!(last_reload["error"].as_str().is_some_and(|error| error.contains("did not start")), "{last_reload}");
    let failed = |record: &&outlast_core::record::Record| record.event == outlast_core::record::Event::ReloadFailed;
    let recorded: Vec<_> = story.records.iter().filter(failed).map(|record| record.id.clone()).collect();
    assert_eq!(recorded, [Some("a".to_owned())]);
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
fn task_ids_of_different_backends_and_sessions_do_not_collide() {
    let mut story = Story::simple(&[("a", maker(&["x"])), ("b", maker(&["y"]))]);
    story.shake(2);
    let make = |story: &mut Story, client: u64, backend: &str, tool: &str| {
        story.ask(client, json!(1), "tools/call", json!({"name": tool, "task": {}}));
        let (link, told) = story.told(backend);
        story.answer(link, &told["id"], json!({"task": {"taskId": "1", "status": "working"}}));
        (link, story.heard(client).json())
    };
    let (a, made) = make(&mut story, 1, "a", "a__x");
    assert!(made["result"].is_object(), "{made}");
    // Another client, another backend: each has its own.
    let (b, made) = make(&mut story, 2, "b", "b__y");
    assert!(made["result"].is_object(), "{made}");
    for (client, backend) in [(1, "a"), (2, "b")] {
        story.ask(client, json!(2), "tasks/get", json!({"taskId": "1"}));
        assert_eq!(story.told(backend).1["method"], "tasks/get");
    }
    let news = json!({"jsonrpc": "2.0", "method": "notifications/tasks/status", "params": {"taskId": "1", "status": "completed"}});
    story.link_says(b, news.clone()).hears(2, news.clone()).hears_nothing(1);
    story.link_says(a, news.clone()).hears(1, news).hears_nothing(2);
    // Where nothing could tell two apart, the second one has no task: the first stays where it is.
    let (_, refused) = make(&mut story, 2, "a", "a__x");
    assert_eq!(refused["error"]["code"], 7022, "{refused}");
    let (_, refused) = make(&mut story, 1, "b", "b__y");
    assert_eq!(refused["error"]["code"], 7022, "{refused}");
    story.ask(1, json!(3), "tasks/get", json!({"taskId": "1"}));
    assert_eq!(story.told("a").1["method"], "tasks/get");
}

#[test]
fn a_client_with_many_tasks_does_not_make_those_of_others_forgotten() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.shake(2);
    let make = |story: &mut Story, client: u64, id: &str| {
        story.ask(client, json!(1), "tools/call", json!({"name": "a__x", "task": {}}));
        let (link, told) = story.told("a");
        story.answer(link, &told["id"], json!({"task": {"taskId": id, "status": "working"}})).heard(client);
    };
    make(&mut story, 2, "other");
    for n in 0..300 {
        make(&mut story, 1, &n.to_string());
    }
    for (client, id, known) in [(2, "other", true), (1, "299", true), (1, "44", true), (1, "43", false)] {
        story.ask(client, json!(2), "tasks/get", json!({"taskId": id}));
        match known {
            true => assert_eq!(story.told("a").1["params"]["taskId"], id),
            false => assert_eq!(story.heard(client).json()["error"]["code"], -32602),
        }
    }
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

#[test]
fn a_client_lists_its_own_tasks_wherever_they_are() {
    let with_tasks = Maker { capabilities: json!({"tools": {}, "tasks": {"list": {}}}), ..maker(&["x"]) };
    let mut limited = settings(vec![stdio("a"), stdio("b")]);
    limited.limits.page = 2;
    let mut story = Story::new(limited, &[("a", with_tasks.clone()), ("b", with_tasks)]);
    story.event(Event::TimePassed);
    story.shake(1).shake(2);
    let make = |story: &mut Story, client: u64, backend: &str, task: &str| {
        let params = json!({"name": format!("{backend}__x"), "task": {}});
        story.ask(client, json!(task), "tools/call", params);
        let (link, told) = story.told(backend);
        story.answer(link, &told["id"], json!({"task": {"taskId": task, "status": "working"}})).heard(client);
    };
    for (client, backend, task) in [(1, "a", "t1"), (2, "a", "other"), (1, "b", "t2"), (1, "a", "t3")] {
        make(&mut story, client, backend, task);
    }
    let says = |story: &mut Story, backend: &str, knows: bool| {
        let (link, told) = story.told(backend);
        assert_eq!(told["method"], "tasks/get");
        match knows {
            true => story.answer(link, &told["id"], json!({"taskId": told["params"]["taskId"], "status": "working"})),
            false => story.link_says(
                link,
                json!({"jsonrpc": "2.0", "id": told["id"], "error": {"code": -32602, "message": "expired"}}),
            ),
        };
    };
    story.ask(1, json!("l"), "tasks/list", json!({}));
    says(&mut story, "b", true);
    story.hears_nothing(1);
    says(&mut story, "a", true);
    let first = story.heard(1).json();
    let ids = |page: &serde_json::Value| -> Vec<String> {
        let tasks = page["result"]["tasks"].as_array().expect("a list");
        tasks.iter().map(|task| task["taskId"].as_str().expect("an id").to_owned()).collect()
    };
    assert_eq!((&first["id"], ids(&first)), (&json!("l"), vec!["t1".to_owned(), "t2".to_owned()]));
    let cursor = first["result"]["nextCursor"].clone();
    story.ask(1, json!(2), "tasks/list", json!({"cursor": cursor}));
    says(&mut story, "a", true);
    let second = story.heard(1).json();
    assert_eq!((ids(&second), second["result"].get("nextCursor")), (vec!["t3".to_owned()], None));

    // What its backend knows no more is left out, and a backend that dies keeps nobody waiting.
    story.ask(2, json!(3), "tasks/list", json!({}));
    says(&mut story, "a", false);
    story.hears(2, json!({"jsonrpc": "2.0", "id": 3, "result": {"tasks": []}}));
    story.ask(2, json!(4), "tasks/list", json!({}));
    let link = story.told("a").0;
    story.dies(link).hears(2, json!({"jsonrpc": "2.0", "id": 4, "result": {"tasks": []}}));
    story.ask(1, json!(5), "tasks/list", json!({"cursor": "theirs"}));
    assert_eq!(story.heard(1).json()["error"]["code"], -32602);
    story.post(10, json!(1), "tasks/list", json!({}));
    assert_eq!(story.heard(10).json()["error"]["code"], -32601);
    assert_eq!(story.gateway.status(story.now)["under_way"]["lists_of_tasks"], 0);
}

#[test]
fn sessions_have_a_bounded_number_of_processes() {
    let backend = Backend { children: Children::PerSession, children_max: 2, idle_stop: Some(secs(60)), ..stdio("a") };
    let mut story = one(backend, maker(&["x"]));
    story.shake(1).shake(2).shake(3).call(1, 1, "a__x").call(2, 1, "a__x").call(3, 1, "a__x");
    let answer = story.heard(3).json();
    let words = answer["result"]["content"][0]["text"].as_str().unwrap_or_default();
    assert!(words.contains("`children_max`") && words.contains("2 processes"), "{answer}");
    assert_eq!(answer["result"]["_meta"]["outlast/failure"]["reason"], "children_max");
    // Those that have a process keep it.
    story.call(1, 2, "a__x").hears_nothing(1);
    // One that ends makes room.
    story.event(Event::ClientLeft { client: 2 }).call(3, 2, "a__x").hears_nothing(3);
    let ask = |text: &String| text.contains("tools/call");
    assert_eq!(story.links.iter().filter(|(_, text)| ask(text)).count(), 4);
}

#[test]
fn a_process_that_no_call_needs_makes_room_for_a_session() {
    let backend = Backend { children: Children::PerSession, children_max: 1, ..stdio("a") };
    let mut story = one(backend, maker(&["x"]));
    let (lent, told) = lent_call(&mut story, 7, "somebody", json!({}));
    story.shake(1).call(1, 1, "a__x");
    assert_eq!(story.heard(1).json()["result"]["_meta"]["outlast/failure"]["reason"], "children_max");
    story.answer(lent, &told["id"], json!({})).heard(7);
    story.call(1, 2, "a__x").hears_nothing(1);
    assert!(story.disconnected.iter().any(|(link, _)| *link == lent));
    assert_ne!(story.told("a").0, lent);
    // And the other way round there is none.
    story.came(8, Front::Request, local());
    story.ask_stateless(8, json!(1), "tools/call", json!({"name": "a__x", "arguments": {}}));
    assert_eq!(story.heard(8).json()["result"]["_meta"]["outlast/failure"]["reason"], "children_max");
}

fn lazy() -> Backend {
    Backend { start: Start::Lazy, ..stdio("a") }
}

/// A catalogue of an earlier run.
fn kept() -> std::collections::BTreeMap<String, Offer> {
    let capabilities = json!({"tools": {}, "resources": {"subscribe": true}}).to_string().into();
    let resources = vec![json!({"uri": "r://a/1", "name": "one"}).to_string().into()];
    let offer = Offer { tools: vec![tool("x").to_string().into()], resources, capabilities, ..Offer::default() };
    [("a".to_owned(), offer)].into()
}

#[test]
fn a_lazy_child_starts_with_the_first_request_that_needs_it() {
    type Need = fn(&mut Story);
    let needs: [(&str, Need); 4] = [
        ("a call", |story| {
            story.call(1, 1, "a__x");
        }),
        ("a tool that the cache does not have", |story| {
            story.call(1, 1, "a__y");
        }),
        ("a resource", |story| {
            story.ask(1, json!(1), "resources/read", json!({"uri": "r://a/1"}));
        }),
        ("a subscription", |story| {
            story.ask(1, json!(1), "resources/subscribe", json!({"uri": "r://a/1"}));
        }),
    ];
    for (what, need) in needs {
        let mut story = Story::with_kept(settings(vec![lazy()]), &[("a", maker(&["x"]))], kept());
        story.event(Event::TimePassed).shake(1).pass(secs(600));
        story.ask(1, json!("list"), "tools/list", json!({}));
        assert_eq!(story.heard(1).json()["result"]["tools"][0]["name"], "a__x", "{what}");
        assert!(story.connected.is_empty(), "{what}");
        let status = story.status("a");
        assert_eq!((&status["state"], &status["catalogue"]), (&json!("idle"), &json!("stale")), "{what}");
        need(&mut story);
        assert_eq!(story.connected.len(), 1, "{what}");
        story.pass(secs(50));
        assert!(story.disconnected.is_empty(), "{what}: without idle_stop it stays");
    }
}

#[test]
fn a_lazy_child_without_a_cached_catalogue_is_started_once_to_read_it() {
    let mut story = one(lazy(), maker(&["x"]));
    let probe = story.link("a");
    assert_eq!(story.disconnected, [(probe, false)]);
    assert_eq!(story.kept.len(), 1);
    story.up.remove(&probe.serial);
    let stopped =
        Event::LinkDown { link: probe, how: How::Exited(Exit::Code(0)), stderr_tail: String::new(), unsent: vec![] };
    story.event(stopped).shake(1).pass(secs(600));
    let status = story.status("a");
    assert_eq!((&status["state"], &status["catalogue"]), (&json!("idle"), &json!("confirmed")));
    assert_eq!((&status["crashes"], &status["last_reload"]), (&json!(0), &json!(null)));
    assert_eq!(story.connected.len(), 1);
    story.call(1, 1, "a__x");
    let (link, told) = story.told("a");
    assert_ne!(link, probe);
    story.answer(link, &told["id"], json!({})).heard(1);
    story.pass(secs(600));
    assert_eq!(story.disconnected.len(), 1);
    // A call that comes while it is asked makes it stay.
    let mut story = Story::new(settings(vec![lazy()]), &[("a", maker(&["x"]))]);
    story.auto = false;
    story.event(Event::TimePassed).shake(1).call(1, 1, "a__x");
    let link = story.link("a");
    story.up.insert(link.serial, link);
    story.event(Event::LinkUp { link, pid: None }).told("a");
    assert!(story.disconnected.is_empty());
}

#[test]
fn a_lazy_child_that_is_changed_is_asked_what_it_offers() {
    let other = |backend: &Backend| {
        let kind =
            Kind::Stdio { command: "other".into(), args: vec![], env: Default::default(), cwd: None, sandbox: None };
        Backend { kind, ..backend.clone() }
    };
    let mut story = Story::with_kept(settings(vec![lazy()]), &[("a", maker(&["x"]))], kept());
    story.event(Event::TimePassed).shake(1);
    // It never ran, so nothing can be broken.
    story.event(Event::Configured(Box::new(settings(vec![other(&lazy())]))));
    let probe = story.link("a");
    assert_eq!(story.disconnected, [(probe, false)]);
    story.dies(probe);
    assert_eq!(story.status("a")["state"], "idle");
    // Now it has run: a bad change is found out before a call meets it.
    story.auto = false;
    story.event(Event::Configured(Box::new(settings(vec![lazy()]))));
    let bad = story.link("a");
    assert_ne!(bad, probe);
    story.dies(bad);
    assert_eq!(story.status("a")["last_reload"]["ok"], false);
    assert_eq!(story.gateway.backends().next(), Some(&other(&lazy())));
    // And a good one is stopped again when its lists were read.
    story.auto = true;
    story.event(Event::Configured(Box::new(settings(vec![lazy()]))));
    let good = story.link("a");
    assert!(story.disconnected.contains(&(good, false)));
    assert_eq!(story.gateway.backends().next(), Some(&lazy()));
}
