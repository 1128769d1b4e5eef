//! A changed backend is tried beside the process that serves, and takes over only when it works.

use crate::story::*;

/// The same backend with another command.
fn other(backend: &Backend) -> Backend {
    let kind = Kind::Stdio { command: "other".into(), args: vec![], env: Default::default(), cwd: None, sandbox: None };
    Backend { kind, ..backend.clone() }
}

fn configured(backends: Vec<Backend>) -> Event {
    Event::Configured(Box::new(settings(backends)))
}

/// One ready backend, one client, and new links that become ready only when the test says so.
fn serving(backend: &Backend) -> Story {
    let mut story = Story::new(settings(vec![backend.clone()]), &[(&backend.name, maker(&["x"]))]);
    story.event(Event::TimePassed).shake(1);
    assert_eq!(story.status("a")["state"], "ready");
    story.auto = false;
    story
}

fn comes_up(story: &mut Story, link: Link) {
    story.up.insert(link.serial, link);
    story.event(Event::LinkUp { link, pid: Some(1000 + link.serial as u32) });
}

fn could_not_start(story: &mut Story, link: Link) {
    let how = How::CouldNotStart("no such command".into());
    story.event(Event::LinkDown { link, how, stderr_tail: "cannot find it\n".into(), unsent: vec![] });
}

/// The link that a call of the client reaches.
fn reached(story: &mut Story, id: u64) -> Link {
    story.call(1, id, "a__x");
    let at = story.links.iter().position(|(_, text)| text.contains("tools/call")).expect("the call was sent");
    let (link, text) = story.links.remove(at);
    let told = parsed(&text);
    story.answer(link, &told["id"], json!({}));
    assert_eq!(story.heard(1).json()["id"], id);
    link
}

fn failed_reloads(story: &Story) -> Vec<String> {
    let is_failed = |record: &&Record| record.event == outlast_core::record::Event::ReloadFailed;
    story.records.iter().filter(is_failed).map(|record| record.detail.clone().unwrap_or_default()).collect()
}

#[test]
fn a_changed_command_takes_over_when_its_lists_are_read() {
    let backend = stdio("a");
    let mut story = serving(&backend);
    let old = story.link("a");
    story.event(configured(vec![other(&backend)]));
    let new = story.link("a");
    assert_ne!(new, old);
    assert_eq!(story.gateway.settings_of(new).map(|settings| &settings.kind), Some(&other(&backend).kind));
    assert_eq!(reached(&mut story, 1), old, "the old one serves while the new one starts");
    // The handshake alone is not enough.
    story.maker("a").mute = true;
    comes_up(&mut story, new);
    let (_, hello) = story.told("a");
    let capabilities = story.maker("a").capabilities.clone();
    story.answer(new, &hello["id"], json!({"protocolVersion": "2025-11-25", "capabilities": capabilities}));
    assert_eq!(reached(&mut story, 2), old);
    assert_eq!(story.status("a")["restart"]["reason"], "its configuration changed");
    story.maker("a").mute = false;
    while let Some(index) = story.links.iter().position(|(link, text)| *link == new && text.contains("/list\"")) {
        let (_, text) = story.links.remove(index);
        let asked = parsed(&text);
        let result = match asked["method"].as_str() {
            Some("tools/list") => json!({"tools": [tool("x"), tool("y")]}),
            Some("prompts/list") => json!({"prompts": []}),
            Some("resources/list") => json!({"resources": []}),
            _ => json!({"resourceTemplates": []}),
        };
        story.answer(new, &asked["id"], result);
    }
    story.hears(1, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}));
    assert_eq!(reached(&mut story, 3), new);
    assert_eq!(story.disconnected, [(old, false)]);
    let status = story.status("a");
    assert_eq!((&status["restart"], &status["last_reload"]), (&json!(null), &json!(null)));
    assert_eq!(story.kept.len(), 2, "the catalogue is cached for the new command");
    assert!(failed_reloads(&story).is_empty());
}

#[test]
fn a_bad_change_keeps_the_old_process_and_settings_and_is_reported() {
    let backend = stdio("a");
    let mut story = serving(&backend);
    let old = story.link("a");
    let bad = Backend { prefix: "new_".into(), call_timeout: secs(7), ..other(&backend) };
    story.event(configured(vec![bad.clone()])).event(Event::OutcomeAsked { ticket: 3 });
    assert!(story.answers.is_empty());
    let new = story.link("a");
    could_not_start(&mut story, new);
    assert_eq!(reached(&mut story, 1), old);
    assert!(story.disconnected.is_empty());
    let failed = failed_reloads(&story);
    assert!(failed[0].contains("no such command") && failed[0].contains("cannot find it"), "{failed:?}");
    let status = story.status("a");
    assert_eq!(status["last_reload"]["ok"], false, "{status}");
    assert!(status["last_reload"]["error"].as_str().is_some_and(|words| words.contains("no such command")), "{status}");
    assert!(
        matches!(&story.answers[..], [(3, Err(words))] if words.contains("a: ") && words.contains("the old one keeps serving")),
        "{:?}",
        story.answers
    );
    assert_eq!(story.gateway.backends().next(), Some(&backend));
    // After a crash it is restarted with the old settings.
    story.auto = true;
    story.dies(old);
    assert_eq!(story.gateway.backends().next(), Some(&backend));
    assert_eq!(story.status("a")["last_reload"]["ok"], false);
    // The same configuration again is another attempt.
    story.event(configured(vec![bad.clone()])).event(Event::OutcomeAsked { ticket: 4 });
    assert!(matches!(&story.answers[1], (4, Ok(_))), "{:?}", story.answers);
    assert_eq!(story.gateway.backends().next(), Some(&bad));
    assert_eq!(story.status("a")["last_reload"], json!(null));
    story.heard(1);
    story.call(1, 2, "new_x").told("a");
}

#[test]
fn a_reverted_change_is_no_longer_a_failure() {
    let backend = stdio("a");
    let mut story = serving(&backend);
    story.event(configured(vec![other(&backend)]));
    let new = story.link("a");
    could_not_start(&mut story, new);
    assert_eq!(story.status("a")["last_reload"]["ok"], false);
    story.event(configured(vec![backend.clone()]));
    assert_eq!(story.status("a")["last_reload"], json!(null));
    assert_eq!(story.connected.len(), 2);
}

#[test]
fn every_failed_trial_leaves_the_old_process_serving() {
    let refused = |story: &mut Story, new: Link| {
        comes_up(story, new);
        for _ in 0..2 {
            let (link, asked) = story.told("a");
            let error = json!({"code": -32603, "message": "not today"});
            story.link_says(link, json!({"jsonrpc": "2.0", "id": asked["id"], "error": error}));
        }
    };
    let late = |story: &mut Story, new: Link| {
        comes_up(story, new);
        story.pass(secs(6));
    };
    let died = |story: &mut Story, new: Link| {
        comes_up(story, new);
        story.dies(new);
    };
    type Fail<'a> = &'a dyn Fn(&mut Story, Link);
    let table: [(&str, Fail<'_>, &str); 3] = [
        ("its handshake is refused", &refused, "not today"),
        ("it is late, by its own new bound", &late, "5 s"),
        ("it dies", &died, "signal 9"),
    ];
    for (case, fail, words) in table {
        let backend = stdio("a");
        let mut story = serving(&backend);
        let old = story.link("a");
        story.maker("a").mute = true;
        story.event(configured(vec![Backend { start_timeout: secs(5), ..other(&backend) }]));
        let new = story.link("a");
        fail(&mut story, new);
        for (link, _) in story.disconnected.clone() {
            assert_eq!(link, new, "{case}");
            story.dies(link);
        }
        let failed = failed_reloads(&story);
        assert!(failed.len() == 1 && failed[0].contains(words), "{case}: {failed:?}");
        assert_eq!(reached(&mut story, 9), old, "{case}");
        assert_eq!(story.status("a")["crashes"], 0, "{case}: it is no crash of the one that serves");
    }
}

#[test]
fn a_process_without_a_tool_list_does_not_take_over() {
    let backend = stdio("a");
    let mut story = serving(&backend);
    let old = story.link("a");
    story.event(configured(vec![other(&backend)]));
    let new = story.link("a");
    story.maker("a").mute = true;
    comes_up(&mut story, new);
    let (_, hello) = story.told("a");
    story.answer(new, &hello["id"], json!({"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}));
    let (_, asked) = story.told("a");
    assert_eq!(asked["method"], "tools/list");
    let error = json!({"code": -32603, "message": "the database is gone"});
    story.link_says(new, json!({"jsonrpc": "2.0", "id": asked["id"], "error": error}));
    assert_eq!(story.disconnected.len(), 1);
    story.dies(new);
    let failed = failed_reloads(&story);
    assert!(failed[0].contains("tools/list") && failed[0].contains("the database is gone"), "{failed:?}");
    assert_eq!(reached(&mut story, 1), old);
}

#[test]
fn an_address_that_cannot_be_reached_does_not_take_over() {
    let backend = http("a");
    let mut story = Story::new(settings(vec![backend.clone()]), &[("a", Maker { stateless: true, ..maker(&["x"]) })]);
    story.event(Event::TimePassed).shake(1);
    let first = reached(&mut story, 1);
    story.auto = false;
    let kind = Kind::Http { url: "http://elsewhere/mcp".into(), headers: Default::default(), is_sse: false };
    story.event(configured(vec![Backend { kind, ..backend }]));
    let new = story.link("a");
    story.maker("a").mute = true;
    comes_up(&mut story, new);
    for _ in 0..2 {
        let (link, asked) = story.told("a");
        assert_eq!(link, new);
        let id = Id::Integer(asked["id"].as_i64().expect("a number").into());
        story.event(Event::RequestLost { link, id, was_sent: false, why: "connection refused".into() });
    }
    story.dies(new);
    let failed = failed_reloads(&story);
    assert!(failed[0].contains("connection refused"), "{failed:?}");
    story.maker("a").mute = false;
    assert_eq!(reached(&mut story, 2), first);
}

#[test]
fn a_session_keeps_its_child_until_the_changed_one_works() {
    let backend = Backend { children: Children::PerSession, ..stdio("a") };
    let mut story = serving(&backend);
    story.auto = true;
    let own = reached(&mut story, 1);
    story.auto = false;
    let before = story.connected.len();
    // A bad change is tried once, not in every session.
    story.event(configured(vec![other(&backend)]));
    assert_eq!(story.connected.len(), before + 1);
    let new = story.link("a");
    could_not_start(&mut story, new);
    assert_eq!(reached(&mut story, 2), own);
    assert!(story.disconnected.is_empty());
    // A good change is tried first, and then replaces the child of the session in the same way.
    story.event(configured(vec![other(&backend)])).event(Event::OutcomeAsked { ticket: 1 });
    let first = story.link("a");
    comes_up(&mut story, first);
    let second = story.link("a");
    assert_ne!(second, first);
    assert_eq!(reached(&mut story, 3), own, "its own child serves it until the next is there");
    assert!(story.answers.is_empty());
    comes_up(&mut story, second);
    assert_eq!(reached(&mut story, 4), second);
    assert!(matches!(&story.answers[..], [(1, Ok(_))]), "{:?}", story.answers);
}

#[test]
fn a_pool_is_replaced_one_by_one_and_its_size_changes_in_place() {
    let backend = Backend { children: Children::Pool(2), ..stdio("a") };
    let mut story = serving(&backend);
    story.auto = true;
    story.call(1, 1, "a__x").call(1, 2, "a__x");
    let (first, told) = story.told("a");
    let (second, told_second) = story.told("a");
    assert_ne!(first, second);
    story.answer(first, &told["id"], json!({})).heard(1);
    story.answer(second, &told_second["id"], json!({})).heard(1);
    // A smaller pool: one process is stopped, and none is started.
    let connected = story.connected.len();
    story.event(configured(vec![Backend { children: Children::Pool(1), ..backend.clone() }]));
    assert_eq!(story.connected.len(), connected);
    assert_eq!(story.disconnected, [(second, false)]);
    assert_eq!(reached(&mut story, 3), first);
    story.event(configured(vec![backend.clone()]));
    assert_eq!(story.connected.len(), connected);
    story.call(1, 4, "a__x").call(1, 5, "a__x");
    let links = [story.told("a").0, story.told("a").0];
    assert!(links[0] == first && links[1] != first);
    // Another command: both are replaced, and the first is tried before the second.
    story.auto = false;
    story.event(configured(vec![other(&backend)]));
    let new = story.link("a");
    let connected = story.connected.len();
    comes_up(&mut story, new);
    assert_eq!(story.connected.len(), connected + 1);
    story.call(1, 6, "a__x");
    assert_eq!(story.told("a").0, new);
}

#[test]
fn a_shared_child_becomes_a_pool_when_the_pool_works() {
    let backend = stdio("a");
    let mut story = serving(&backend);
    let old = story.link("a");
    let pool = Backend { children: Children::Pool(2), ..backend.clone() };
    story.event(configured(vec![pool.clone()]));
    let new = story.link("a");
    could_not_start(&mut story, new);
    assert_eq!(reached(&mut story, 1), old);
    assert_eq!(story.status("a")["links"].as_array().map(Vec::len), Some(1));
    story.event(configured(vec![pool]));
    let new = story.link("a");
    assert_eq!(reached(&mut story, 2), old);
    comes_up(&mut story, new);
    assert_eq!(reached(&mut story, 3), new);
    assert_eq!(story.disconnected, [(old, false)]);
}

#[test]
fn changing_to_per_session_and_back_needs_no_new_shared_child() {
    let backend = stdio("a");
    let mut story = serving(&backend);
    let shared = story.link("a");
    story.event(configured(vec![Backend { children: Children::PerSession, ..backend.clone() }]));
    assert_eq!(story.connected.len(), 1);
    story.auto = true;
    let own = reached(&mut story, 1);
    assert_ne!(own, shared);
    story.event(configured(vec![backend]));
    assert_eq!(story.disconnected, [(own, false)]);
    assert_eq!(reached(&mut story, 2), shared);
}

#[test]
fn the_last_of_several_changes_counts() {
    let backend = stdio("a");
    let mut story = serving(&backend);
    let old = story.link("a");
    story.event(configured(vec![other(&backend)])).event(Event::OutcomeAsked { ticket: 1 });
    let first = story.link("a");
    // The same change is already being tried.
    story.event(configured(vec![other(&backend)])).event(Event::OutcomeAsked { ticket: 2 });
    assert_eq!(story.link("a"), first);
    // Another change replaces it, and a restart waits for it.
    let kind = Kind::Stdio { command: "third".into(), args: vec![], env: Default::default(), cwd: None, sandbox: None };
    let third = Backend { kind, ..backend.clone() };
    story.event(configured(vec![third.clone()])).event(Event::OutcomeAsked { ticket: 3 });
    assert_eq!(story.disconnected, [(first, true)]);
    let second = story.link("a");
    assert_ne!(second, first);
    assert!(story.answers.iter().all(|(ticket, result)| *ticket < 3 && result.is_err()), "{:?}", story.answers);
    assert_eq!(story.answers.len(), 2);
    story.event(Event::RestartAsked { ticket: 4, backend: None, reason: "test".into() });
    assert_eq!(story.link("a"), second);
    story.dies(first);
    assert!(failed_reloads(&story).is_empty(), "it was taken back");
    comes_up(&mut story, second);
    assert!(matches!(&story.answers[2..], [(_, Ok(_)), (_, Ok(_))]), "{:?}", story.answers);
    assert_eq!(reached(&mut story, 1), second);
    assert_eq!(story.disconnected[1..], [(old, false)]);
    assert_eq!(story.gateway.backends().next(), Some(&third));
}

#[test]
fn a_restart_that_waits_for_a_trial_is_answered_when_the_change_is_reverted() {
    let backend = stdio("a");
    let mut story = serving(&backend);
    let old = story.link("a");
    story.event(Event::RestartAsked { ticket: 1, backend: None, reason: "test".into() });
    let first = story.link("a");
    assert_ne!(first, old);
    story.event(configured(vec![other(&backend)]));
    assert_eq!(story.disconnected, [(first, true)]);
    assert!(story.answers.is_empty(), "it waits for the trial: {:?}", story.answers);
    story.event(configured(vec![backend.clone()]));
    assert!(matches!(&story.answers[..], [(1, Err(words))] if words.contains("meanwhile")), "{:?}", story.answers);
    assert_eq!(reached(&mut story, 1), old);
}

#[test]
fn a_change_of_a_backend_that_is_turned_off_renames_its_tools_at_once() {
    let backend = stdio("a");
    let mut story = serving(&backend);
    story.ask(1, json!(1), "tools/list", json!({})).heard(1);
    story.event(configured(vec![Backend { prefix: "new__".into(), ..other(&backend) }]));
    let names = |story: &Story| story.gateway.names_to_switch().collect::<Vec<_>>();
    assert_eq!(names(&story), ["a", "a__x"], "the old process serves");
    story.event(Event::SwitchAsked { ticket: 1, what: Switch::Backend("a".into()), off: true });
    assert_eq!(names(&story), ["a", "new__x"]);
    // The old name is free.
    let taker = Backend { prefix: "a__".into(), ..stdio("b") };
    story.set_maker("b", maker(&["x"]));
    story.auto = true;
    story.event(configured(vec![Backend { prefix: "new__".into(), ..other(&backend) }, taker]));
    story.event(Event::TimePassed).call(1, 2, "a__x");
    assert_eq!(story.told("b").1["params"]["name"], "x");
}

#[test]
fn a_trial_ends_when_its_backend_is_turned_off_removed_or_stopped() {
    let backend = stdio("a");
    for case in ["off", "removed", "back", "stopped"] {
        let mut story = serving(&backend);
        let old = story.link("a");
        story.event(configured(vec![other(&backend), stdio("b")])).event(Event::OutcomeAsked { ticket: 1 });
        let new = *story.connected.iter().rev().find(|link| link.backend == old.backend).expect("a link");
        match case {
            "off" => {
                let what = Switch::Backend("a".into());
                story.event(Event::SwitchAsked { ticket: 2, what, off: true });
                assert_eq!(story.gateway.backends().next(), Some(&other(&backend)), "nothing serves it meanwhile");
            }
            "removed" => {
                story.event(configured(vec![stdio("b")]));
            }
            "back" => {
                story.event(configured(vec![backend.clone(), stdio("b")]));
            }
            _ => {
                story.event(Event::StopAsked);
            }
        }
        assert!(story.disconnected.iter().any(|(link, _)| *link == new), "{case}");
        assert_eq!(story.disconnected.iter().any(|(link, _)| *link == old), case != "back", "{case}");
        assert!(story.answers.iter().any(|(ticket, _)| *ticket == 1), "{case}");
        story.dies(new);
        assert!(failed_reloads(&story).is_empty(), "{case}");
    }
}

#[test]
fn the_serving_process_may_crash_during_a_trial() {
    let backend = stdio("a");
    let mut story = serving(&backend);
    let old = story.link("a");
    story.event(configured(vec![other(&backend)]));
    let new = story.link("a");
    story.dies(old).call(1, 1, "a__x");
    comes_up(&mut story, new);
    let (link, told) = story.told("a");
    assert_eq!(link, new, "the call that waited goes to the new one");
    story.answer(link, &told["id"], json!({})).heard(1);
    assert_eq!(story.status("a")["state"], "ready");
    story.pass(secs(90));
    assert_eq!(reached(&mut story, 2), new);
}

#[test]
fn the_restart_count_does_not_fall_after_a_change() {
    let policy = Policy { restarts_max: Some(2), jitter_percent: 0, ..Policy::exponential() };
    let backend = Backend { policy, ..stdio("a") };
    let mut story = serving(&backend);
    story.auto = true;
    for _ in 0..3 {
        let link = story.link("a");
        story.dies(link).pass(secs(10));
    }
    let status = story.status("a");
    assert_eq!((&status["state"], &status["restarts"]), (&json!("given_up"), &json!(2)));
    let exits = status["last_exits"].as_array().map(Vec::len);
    story.event(configured(vec![other(&backend)]));
    let status = story.status("a");
    assert_eq!((&status["state"], &status["restarts"]), (&json!("ready"), &json!(2)));
    assert_eq!(status["last_exits"].as_array().map(Vec::len), exits);
    // The same with another policy, for a running process.
    story.event(configured(vec![Backend { policy: Policy::watchdog(), ..other(&backend) }]));
    assert_eq!(story.status("a")["restarts"], 2);
}

#[test]
fn a_backend_that_never_worked_is_changed_without_a_trial() {
    let backend = stdio("a");
    let mut story = Story::new(settings(vec![backend.clone()]), &[("a", maker(&["x"]))]);
    story.auto = false;
    story.event(Event::TimePassed).shake(1);
    let never = story.link("a");
    could_not_start(&mut story, never);
    story.event(configured(vec![other(&backend)])).event(Event::OutcomeAsked { ticket: 1 });
    assert!(matches!(&story.answers[..], [(1, Ok(_))]), "nothing serves that could go on: {:?}", story.answers);
    assert_eq!(story.gateway.backends().next(), Some(&other(&backend)));
    let new = story.link("a");
    assert_ne!(new, never);
    comes_up(&mut story, new);
    story.heard(1);
    assert_eq!(reached(&mut story, 1), new);
}
