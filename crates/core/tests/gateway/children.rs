//! How many processes a backend has, when they are started and stopped, and tasks.

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
    // A request of its child reaches no other client.
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

/// A call of a stateless client with these capabilities.
fn lent_call(story: &mut Story, client: u64, name: &str, capabilities: serde_json::Value) -> (Link, serde_json::Value) {
    story.came(client, Front::Request, Who { name: name.into(), ..local() });
    let meta = json!({"io.modelcontextprotocol/clientCapabilities": capabilities});
    story.ask_stateless(client, json!(1), "tools/call", json!({"name": "a__x", "_meta": meta}));
    story.told("a")
}

#[test]
fn a_stateless_call_that_can_be_asked_is_alone_on_its_child() {
    let mut story = one(Backend { children: Children::PerSession, ..stdio("a") }, maker(&["x"]));
    let asks = json!({"elicitation": {"form": {}}});
    let (first, told) = lent_call(&mut story, 10, "ann", asks.clone());
    assert_ne!(first, story.connected[0], "the first one is only asked for what there is");
    let opening = parsed(story.opened.last().expect("a handshake"));
    assert_eq!(opening["params"]["capabilities"]["roots"], json!({}), "{opening}");
    // It is not asked again for the lists: all processes of a backend offer the same.
    assert!(!story.links.iter().any(|(link, text)| *link == first && text.contains("/list")));

    // A second call at the same time has another child, and each request of a child reaches the right client.
    let (second, other) = lent_call(&mut story, 11, "ann", asks.clone());
    assert_ne!(first, second);
    for (link, client) in [(second, 11), (first, 10)] {
        let question = json!({"jsonrpc": "2.0", "id": "q", "method": "elicitation/create", "params": {"to": client}});
        story.link_says(link, question).pass(ms(20));
        let asked = story.heard(client).json();
        assert_eq!(asked["result"]["inputRequests"]["ask0"]["params"]["to"], client, "{asked}");
        story.hears_nothing(21 - client).event(Event::ClientLeft { client });
    }
    // While they wait for their clients, a third call can run.
    let (third, its) = lent_call(&mut story, 12, "ann", asks.clone());
    assert!(third != first && third != second);
    story.answer(third, &its["id"], json!({"content": []})).heard(12);
    story.answer(first, &told["id"], json!({"content": []})).answer(second, &other["id"], json!({"content": []}));

    // The next call under the same name reuses a free child, whatever the client's capabilities; a call under another
    // name does not.
    let (again, told) = lent_call(&mut story, 13, "ann", json!({}));
    assert_eq!(again, first);
    let (theirs, _) = lent_call(&mut story, 14, "bob", asks.clone());
    assert!([first, second, third].iter().all(|link| *link != theirs));
    // Calls of clients that cannot be asked share a child, but not with a call that can be asked.
    assert_eq!(lent_call(&mut story, 15, "ann", json!({})).0, first);
    assert_eq!(lent_call(&mut story, 16, "ann", asks).0, second);
    story.link_says(first, json!({"jsonrpc": "2.0", "id": "q", "method": "roots/list"}));
    let refused = story.told("a").1;
    assert!(refused["error"]["message"].as_str().is_some_and(|words| words.contains("`roots`")), "{refused}");
    story.answer(first, &told["id"], json!({"content": []})).heard(13);
}

#[test]
fn a_borrowed_child_with_a_cancelled_call_cannot_ask_another_client() {
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
        // A message shows that it does not hang.
        story.link_says(link, json!({"jsonrpc": "2.0", "method": "notifications/message"}));
        story.links.clear();
        story.clients.clear();
        let (next, told) = lent_call(&mut story, 11, "ann", asks.clone());
        assert_ne!(next, link, "{end}");
        story.answer(next, &told["id"], json!({"content": []})).heard(11);
        spoiled.push(link);
    }
    // Its requests reach no client now, and a call that cannot be asked may still use it.
    story.link_says(spoiled[1], json!({"jsonrpc": "2.0", "id": "q", "method": "sampling/createMessage"}));
    assert_eq!(story.told("a").1["error"]["code"], 7020);
    let (link, told) = lent_call(&mut story, 12, "ann", json!({}));
    assert!(spoiled.contains(&link));
    story.answer(link, &told["id"], json!({"content": []})).heard(12);
}

#[test]
fn a_call_that_waits_for_an_unusable_borrowed_child_gets_a_new_one() {
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
fn borrowed_children_are_limited_and_stopped_when_idle() {
    let mut story = one(Backend { children: Children::PerSession, ..stdio("a") }, maker(&["x"]));
    let asks = json!({"roots": {}});
    let mut lent = Vec::new();
    for client in 0..16 {
        lent.push(lent_call(&mut story, 100 + client, "ann", asks.clone()));
    }
    // A further call under the same name waits for the first free child; a call under another name fails at once.
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
    // Now a child is free: another name may use its place, but not its process.
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
fn a_stateless_backend_lends_no_children() {
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
fn an_idle_child_is_stopped_and_started_by_the_next_call() {
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
    // Neither start counts as a restart. A crash causes one.
    assert_eq!(story.status("a")["restarts"], 0);
    assert!(story.records.iter().all(|record| record.restarts.unwrap_or(0) == 0), "{:#?}", story.records);
    let link = story.link("a");
    story.pass(secs(6)).dies(link);
    assert_eq!(story.status("a")["restarts"], 1);
}

#[test]
fn every_exit_of_a_child_is_recorded() {
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
fn a_backend_that_was_off_keeps_its_history() {
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
fn a_failed_restart_is_answered_at_once() {
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
        assert!(words.contains("did not start") && words.contains("started again in"), "{words}");
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
    // If the new process does not become ready, the old one stays.
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
    // The failure is recorded as well.
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
fn a_backend_that_was_given_up_is_resumed() {
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
fn a_task_is_checked_again_when_its_tool_is_switched_off() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.ask(1, json!(1), "tools/call", json!({"name": "a__x", "task": {"ttl": 1000}}));
    let (link, told) = story.told("a");
    story.answer(link, &told["id"], json!({"task": {"taskId": "t1", "status": "working"}}));
    let handle = story.heard(1).json()["result"]["task"]["taskId"].clone();
    story.event(Event::SwitchAsked { ticket: 1, what: Switch::Tool("a__x".into()), off: true }).heard(1);
    for method in ["tasks/get", "tasks/result"] {
        story.ask(1, json!(2), method, json!({"taskId": handle}));
        assert_eq!(story.heard(1).json()["error"]["code"], 7013, "{method}");
    }
    story.ask(1, json!(3), "tasks/cancel", json!({"taskId": handle}));
    assert_eq!(story.told("a").1["method"], "tasks/cancel");
}

#[test]
fn a_task_belongs_to_its_client_and_to_the_process_that_works_on_it() {
    let mut story = Story::simple(&[("a", maker(&["x"])), ("b", maker(&["y"]))]);
    story.shake(2).ask(1, json!(1), "tools/call", json!({"name": "a__x", "task": {"ttl": 1000}}));
    let (link, told) = story.told("a");
    story.answer(link, &told["id"], json!({"task": {"taskId": "t1", "status": "working"}}));
    let made = story.heard(1).json();
    assert_eq!(made["result"]["task"]["status"], "working");
    let handle = made["result"]["task"]["taskId"].as_str().expect("a handle").to_owned();
    assert!(handle.starts_with("outlast.task1.") && handle.ends_with(".a.t1"), "{handle}");
    // The backend sees its own id in both directions, the client sees the handle.
    for method in ["tasks/get", "tasks/cancel", "tasks/result"] {
        story.ask(1, json!(2), method, json!({"taskId": handle}));
        let (_, told) = story.told("a");
        assert_eq!((&told["method"], &told["params"]["taskId"]), (&json!(method), &json!("t1")));
        let related = json!({"io.modelcontextprotocol/related-task": {"taskId": "t1"}});
        story.answer(link, &told["id"], json!({"taskId": "t1", "_meta": related}));
        let related = json!({"io.modelcontextprotocol/related-task": {"taskId": handle}});
        story.hears(1, json!({"jsonrpc": "2.0", "id": 2, "result": {"taskId": handle, "_meta": related}}));
    }
    // Neither another client nor the backend's own id gives access to it.
    for (client, id) in [(2, handle.as_str()), (2, "t1"), (1, "t1")] {
        story.ask(client, json!(3), "tasks/result", json!({"taskId": id}));
        assert_eq!(story.heard(client).json()["error"]["code"], -32602, "{id}");
    }
    let news = |id: &str| json!({"jsonrpc": "2.0", "method": "notifications/tasks/status", "params": {"taskId": id, "status": "completed"}});
    story.link_says(link, news("t1")).hears(1, news(&handle)).hears_nothing(2);
    story.link_says(link, news(&handle)).hears_nothing(1).hears_nothing(2);
    let about = json!({"io.modelcontextprotocol/related-task": {"taskId": "t1"}});
    story.call(2, 4, "a__x").told("a");
    story.call(1, 5, "a__x").told("a");
    story.link_says(
        link,
        json!({"jsonrpc": "2.0", "id": "q", "method": "elicitation/create", "params": {"_meta": about}}),
    );
    let asked = story.heard(1).json();
    assert_eq!(asked["method"], "elicitation/create");
    let about = &asked["params"]["_meta"];
    assert_eq!(about["io.modelcontextprotocol/related-task"]["taskId"], handle);
    // The answer has the handle, too.
    let answer = json!({"jsonrpc": "2.0", "id": asked["id"], "result": {"action": "accept", "_meta": about}});
    story.say(1, &answer.to_string());
    let (_, told) = story.told("a");
    assert_eq!(told["result"]["_meta"]["io.modelcontextprotocol/related-task"]["taskId"], "t1");
    story.pass(secs(6)).dies(link);
    story.clients.clear();
    story.ask(1, json!(6), "tasks/get", json!({"taskId": handle}));
    assert_eq!(story.heard(1).json()["error"]["code"], -32602);
}

/// Makes a backend create a task with this id; returns its link and the client's answer.
fn make_task(story: &mut Story, client: u64, backend: &str, tool: &str, id: &str) -> (Link, serde_json::Value) {
    story.ask(client, json!(1), "tools/call", json!({"name": tool, "task": {}}));
    let (link, told) = story.told(backend);
    story.answer(link, &told["id"], json!({"task": {"taskId": id, "status": "working"}}));
    (link, story.heard(client).json())
}

#[test]
fn task_ids_of_different_backends_and_sessions_do_not_collide() {
    let mut story = Story::simple(&[("a", maker(&["x"])), ("b", maker(&["y"]))]);
    story.shake(2);
    let handle = |made: &serde_json::Value| made["result"]["task"]["taskId"].as_str().expect("a handle").to_owned();
    // Two clients and two backends, whose task ids are all equal.
    let (a, of_a) = make_task(&mut story, 1, "a", "a__x", "1");
    let (b, of_b) = make_task(&mut story, 2, "b", "b__y", "1");
    let (_, another) = make_task(&mut story, 1, "a", "a__x", "\"ä.%2e\n");
    let (of_a, of_b, another) = (handle(&of_a), handle(&of_b), handle(&another));
    assert_ne!(of_a, of_b);
    for (client, backend, handle, own) in [(1, "a", &of_a, "1"), (2, "b", &of_b, "1"), (1, "a", &another, "\"ä.%2e\n")]
    {
        story.ask(client, json!(2), "tasks/get", json!({"taskId": handle}));
        let (_, told) = story.told(backend);
        assert_eq!((&told["method"], &told["params"]["taskId"]), (&json!("tasks/get"), &json!(own)));
    }
    let news = |id: &str| json!({"jsonrpc": "2.0", "method": "notifications/tasks/status", "params": {"taskId": id, "status": "completed"}});
    story.link_says(b, news("1")).hears(2, news(&of_b)).hears_nothing(1);
    story.link_says(a, news("1")).hears(1, news(&of_a)).hears_nothing(2);
    // If the backend gives two clients the same task, the first client keeps it.
    let (_, refused) = make_task(&mut story, 2, "a", "a__x", "1");
    assert_eq!((&refused["error"]["code"], &refused["error"]["data"]["reason"]), (&json!(7022), &json!("same_task")));
    let (_, refused) = make_task(&mut story, 2, "a", "a__x", &"x".repeat(1025));
    assert_eq!((&refused["error"]["code"], &refused["error"]["data"]["reason"]), (&json!(7022), &json!("long_task")));
    story.ask(1, json!(3), "tasks/get", json!({"taskId": of_a}));
    assert_eq!(story.told("a").1["method"], "tasks/get");
    // On another backend the same client has another task.
    let (_, of_b) = make_task(&mut story, 1, "b", "b__y", "2");
    story.ask(1, json!(4), "tasks/get", json!({"taskId": handle(&of_b)}));
    assert_eq!(story.told("b").1["params"]["taskId"], "2");
}

#[test]
fn a_request_names_only_tasks_of_its_own_client_and_backend() {
    let mut story = Story::simple(&[("a", maker(&["x"])), ("b", maker(&["y"]))]);
    story.shake(2);
    let (_, made) = make_task(&mut story, 1, "a", "a__x", "t1");
    let handle = made["result"]["task"]["taskId"].clone();
    let related =
        |id: &serde_json::Value| json!({"progressToken": "p", "io.modelcontextprotocol/related-task": {"taskId": id}});
    story.ask(1, json!(2), "tools/call", json!({"name": "a__x", "_meta": related(&handle)}));
    let (_, told) = story.told("a");
    assert_eq!(told["params"]["_meta"]["io.modelcontextprotocol/related-task"]["taskId"], "t1");
    assert_eq!(told["params"]["_meta"]["progressToken"], told["id"]);
    for (client, tool, id) in
        [(2, "a__x", &handle), (2, "a__x", &json!("t1")), (1, "a__x", &json!("t1")), (1, "b__y", &handle)]
    {
        story.ask(client, json!(3), "tools/call", json!({"name": tool, "_meta": related(id)}));
        assert_eq!(story.heard(client).json()["error"]["code"], -32602, "{tool} {id}");
        assert!(!story.links.iter().any(|(_, text)| text.contains("tools/call")), "{tool} {id}");
    }
}

/// The tasks of a stateless client belong to its name, whichever process of a pool created them.
#[test]
fn processes_of_a_pool_may_give_their_tasks_the_same_ids() {
    let mut story = one(Backend { children: Children::Pool(2), ..stdio("a") }, maker(&["x"]));
    let mut handles = Vec::new();
    for client in [10, 11] {
        story.post(client, json!(1), "tools/call", json!({"name": "a__x"}));
    }
    for client in [10, 11] {
        let (link, told) = story.told("a");
        story.answer(link, &told["id"], json!({"resultType": "task", "taskId": "1", "status": "working"}));
        handles.push((link, story.heard(client).json()["result"]["taskId"].clone()));
    }
    assert_ne!(handles[0], handles[1]);
    for (client, (link, handle)) in [(12, &handles[0]), (13, &handles[1])] {
        story.post(client, json!(2), "tasks/get", json!({"taskId": handle}));
        let (asked, told) = story.told("a");
        assert_eq!((&asked, &told["params"]["taskId"]), (link, &json!("1")));
    }
}

#[test]
fn many_tasks_of_one_client_do_not_displace_those_of_others() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.shake(2);
    let make = |story: &mut Story, client: u64, id: &str| {
        make_task(story, client, "a", "a__x", id).1["result"]["task"]["taskId"].clone()
    };
    let other = make(&mut story, 2, "other");
    let own: Vec<serde_json::Value> = (0..300).map(|n| make(&mut story, 1, &n.to_string())).collect();
    for (client, id, handle, known) in
        [(2, "other", &other, true), (1, "299", &own[299], true), (1, "44", &own[44], true), (1, "43", &own[43], false)]
    {
        story.ask(client, json!(2), "tasks/get", json!({"taskId": handle}));
        match known {
            true => assert_eq!(story.told("a").1["params"]["taskId"], id),
            false => assert_eq!(story.heard(client).json()["error"]["code"], -32602),
        }
    }
}

#[test]
fn a_pool_does_not_wait_for_a_process_that_was_given_up() {
    let backend = Backend {
        children: Children::Pool(2),
        policy: Policy { restarts_max: Some(1), jitter_percent: 0, ..Policy::exponential() },
        ..stdio("a")
    };
    let mut story = one(backend, maker(&["x"]));
    story.shake(1).call(1, 1, "a__x").call(1, 2, "a__x");
    let (first, second) = (story.connected[0], story.connected[1]);
    // One backend is given up, the other restarts after a delay.
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
    let own =
        |handle: &serde_json::Value| handle.as_str().expect("an id").rsplit('.').next().unwrap_or_default().to_owned();
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
        tasks.iter().map(|task| own(&task["taskId"])).collect()
    };
    assert_eq!((&first["id"], ids(&first)), (&json!("l"), vec!["t1".to_owned(), "t2".to_owned()]));
    let cursor = first["result"]["nextCursor"].clone();
    story.ask(1, json!(2), "tasks/list", json!({"cursor": cursor}));
    says(&mut story, "a", true);
    let second = story.heard(1).json();
    assert_eq!((ids(&second), second["result"].get("nextCursor")), (vec!["t3".to_owned()], None));

    // A task that its backend no longer knows is left out, and a crash of a backend completes the list.
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
    assert_eq!(story.gateway.status(story.now).to_json()["under_way"]["lists_of_tasks"], 0);
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
    // Clients that have a process keep it.
    story.call(1, 2, "a__x").hears_nothing(1);
    // A client that leaves frees a place.
    story.event(Event::ClientLeft { client: 2 }).call(3, 2, "a__x").hears_nothing(3);
    let ask = |text: &String| text.contains("tools/call");
    assert_eq!(story.links.iter().filter(|(_, text)| ask(text)).count(), 4);
}

#[test]
fn a_process_that_no_call_needs_makes_room_for_a_session() {
    let backend = Backend { children: Children::PerSession, children_max: 1, ..stdio("a") };
    let mut story = one(backend, maker(&["x"]));
    let (lent, told) = lent_call(&mut story, 7, "bob", json!({}));
    story.shake(1).call(1, 1, "a__x");
    assert_eq!(story.heard(1).json()["result"]["_meta"]["outlast/failure"]["reason"], "children_max");
    story.answer(lent, &told["id"], json!({})).heard(7);
    story.call(1, 2, "a__x").hears_nothing(1);
    assert!(story.disconnected.iter().any(|(link, _)| *link == lent));
    assert_ne!(story.told("a").0, lent);
    // The other way round no process is freed.
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
    // A call that arrives while its lists are read keeps the process running.
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
    // The backend never ran, so that no process can fail.
    story.event(Event::Configured(Box::new(settings(vec![other(&lazy())]))));
    let probe = story.link("a");
    assert_eq!(story.disconnected, [(probe, false)]);
    story.dies(probe);
    assert_eq!(story.status("a")["state"], "idle");
    // Now it has run: a bad change is detected before a call needs it.
    story.auto = false;
    story.event(Event::Configured(Box::new(settings(vec![lazy()]))));
    let bad = story.link("a");
    assert_ne!(bad, probe);
    story.dies(bad);
    assert_eq!(story.status("a")["last_reload"]["ok"], false);
    assert_eq!(story.gateway.backends().next(), Some(&other(&lazy())));
    // A good change is stopped again after its lists were read.
    story.auto = true;
    story.event(Event::Configured(Box::new(settings(vec![lazy()]))));
    let good = story.link("a");
    assert!(story.disconnected.contains(&(good, false)));
    assert_eq!(story.gateway.backends().next(), Some(&lazy()));
}
