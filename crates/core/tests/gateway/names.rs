//! Which backend owns a name, and what happens to names that look alike to clients.

use std::collections::{BTreeMap, BTreeSet};

use crate::story::*;

fn bare(name: &str) -> Backend {
    Backend { prefix: String::new(), ..stdio(name) }
}

fn listed(story: &mut Story) -> Vec<String> {
    story.ask(1, json!("list"), "tools/list", json!({})).pass(ms(100));
    let list = story.heard(1).json();
    let tools = list["result"]["tools"].as_array().unwrap_or_else(|| panic!("no tools: {list}"));
    tools.iter().map(|tool| tool["name"].as_str().expect("a name").to_owned()).collect()
}

fn comes_up(story: &mut Story, index: usize) {
    let link = story.connected[index];
    story.up.insert(link.serial, link);
    story.event(Event::LinkUp { link, pid: Some(1) });
}

fn kept(tools: &[&str]) -> Offer {
    Offer { tools: tools.iter().map(|name| tool(name).to_string().into()).collect(), ..Offer::default() }
}

fn owners(story: &Story) -> serde_json::Value {
    story.gateway.status(story.now).to_json()["collisions"].clone()
}

/// A call by this name reaches that backend.
#[track_caller]
fn reaches(story: &mut Story, name: &str, backend: &str) {
    story.call(1, 99, name);
    let (link, told) = story.told(backend);
    story.answer(link, &told["id"], json!({})).heard(1);
}

#[test]
fn a_backend_that_comes_up_later_does_not_take_over_a_name_that_clients_were_shown() {
    let makers = [("a", maker(&["echo"])), ("b", maker(&["echo"]))];
    let mut story = Story::new(settings(vec![bare("a"), bare("b")]), &makers);
    story.auto = false;
    story.event(Event::TimePassed);
    comes_up(&mut story, 1);
    story.shake(1).pass(secs(6));
    assert_eq!(listed(&mut story), ["echo"]);
    reaches(&mut story, "echo", "b");
    // The first backend of the configuration becomes ready only now.
    comes_up(&mut story, 0);
    reaches(&mut story, "echo", "b");
    let clash = json!([{"list": "tools", "name": "echo", "offered_by": "b", "left_out": "a"}]);
    assert_eq!(owners(&story), clash);
    story.hears_nothing(1);
    // A restart of either does not change the owner.
    for name in ["a", "b"] {
        story.auto = true;
        let link = story.link(name);
        story.pass(secs(70)).dies(link).pass(secs(5));
        reaches(&mut story, "echo", "b");
    }
    assert_eq!(owners(&story), clash);
}

#[test]
fn before_a_client_has_seen_a_list_the_order_of_the_configuration_decides() {
    let makers = [("a", maker(&["echo"])), ("b", maker(&["echo"]))];
    let mut story = Story::new(settings(vec![bare("a"), bare("b")]), &makers);
    story.auto = false;
    story.event(Event::TimePassed);
    comes_up(&mut story, 1);
    comes_up(&mut story, 0);
    story.shake(1);
    reaches(&mut story, "echo", "a");
    assert_eq!(owners(&story), json!([{"list": "tools", "name": "echo", "offered_by": "a", "left_out": "b"}]));
}

#[test]
fn a_cached_catalogue_owns_its_names_from_the_start() {
    let cached = BTreeMap::from([("a".to_owned(), kept(&["echo"])), ("b".to_owned(), kept(&["echo"]))]);
    let makers = [("a", maker(&["echo"])), ("b", maker(&["echo"]))];
    let mut story = Story::with_kept(settings(vec![bare("a"), bare("b")]), &makers, cached);
    assert_eq!(owners(&story), json!([{"list": "tools", "name": "echo", "offered_by": "a", "left_out": "b"}]));
    story.auto = false;
    story.event(Event::TimePassed);
    assert!(story.notes.iter().any(|note| note.contains("`echo`")), "{:?}", story.notes);
    story.shake(1);
    comes_up(&mut story, 1);
    comes_up(&mut story, 0);
    reaches(&mut story, "echo", "a");
}

#[test]
fn a_name_that_its_owner_no_longer_offers_goes_to_no_other_backend() {
    let makers = [("a", maker(&["echo", "more"])), ("b", maker(&["echo"]))];
    let mut story = Story::new(settings(vec![bare("a"), bare("b")]), &makers);
    story.event(Event::TimePassed).shake(1);
    assert_eq!(listed(&mut story), ["echo", "more"]);
    story.maker("a").tools.remove(0);
    let link = story.link("a");
    let changed = json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"});
    story.link_says(link, changed.clone()).hears(1, changed.clone());
    assert_eq!(listed(&mut story), ["more"]);
    story.call(1, 2, "echo");
    let error = story.heard(1).json()["error"].clone();
    assert_eq!(error["code"], -32602);
    assert!(error["message"].as_str().is_some_and(|text| text.contains("`a`") && text.contains("`b`")), "{error}");
    story.told_nothing("b");
    // The owner offers it again.
    story.maker("a").tools.push(tool("echo"));
    story.link_says(link, changed.clone()).hears(1, changed);
    reaches(&mut story, "echo", "a");
}

#[test]
fn a_call_of_a_switched_off_tool_reaches_no_other_backend() {
    for what in [Switch::Backend("a".into()), Switch::Tool("echo".into())] {
        let makers = [("a", maker(&["echo"])), ("b", maker(&["echo"]))];
        let mut story = Story::new(settings(vec![bare("a"), bare("b")]), &makers);
        story.event(Event::TimePassed).shake(1);
        story.event(Event::SwitchAsked { ticket: 1, what: what.clone(), off: true });
        story.clients.clear();
        story.call(1, 2, "echo").told_nothing("b");
        assert!(story.heard(1).text.contains("switched off"), "{what:?}");
        let called = story.called.last().expect("it is counted");
        assert_eq!(called.outcome, Outcome::SwitchedOff);
        assert_eq!((called.backend.as_deref(), called.tool.as_deref()), (Some("a"), Some("echo")), "{what:?}");
        assert!(called.is_known);
        assert_eq!(owners(&story)[0]["offered_by"], "a", "{what:?}");
    }
}

#[test]
fn an_invented_name_is_not_reported_as_known() {
    let mut configured = settings(vec![stdio("a"), stdio("b")]);
    configured.switched_off = vec![Switch::Backend("a".into())];
    configured.limits.held_max = 0;
    let mut story = Story::new(configured, &[("a", maker(&["echo"])), ("b", maker(&["echo"]))]);
    story.auto = false;
    story.event(Event::TimePassed).shake(1);
    for (name, outcome) in [("a__made_up", Outcome::SwitchedOff), ("b__made_up", Outcome::Unavailable)] {
        story.call(1, 2, name).heard(1);
        let called = story.called.last().expect("it is counted");
        assert_eq!((called.outcome, called.is_known), (outcome, false), "{name}");
        assert!(called.backend.is_some(), "{name}");
    }
}

#[test]
fn a_change_of_the_configuration_frees_names_but_its_order_alone_does_not() {
    let makers = [("a", maker(&["echo"])), ("b", maker(&["echo"]))];
    let mut story = Story::new(settings(vec![bare("a"), bare("b")]), &makers);
    story.event(Event::TimePassed).shake(1);
    reaches(&mut story, "echo", "a");
    let mut configure = |backends: Vec<Backend>, owner: &str| {
        story.event(Event::Configured(Box::new(settings(backends))));
        story.clients.clear();
        reaches(&mut story, "echo", owner);
        story.clients.clear();
    };
    configure(vec![bare("b"), bare("a")], "a");
    configure(vec![bare("b"), Backend { deny: vec![Pattern("echo".into())], ..bare("a") }], "b");
    configure(vec![bare("a"), bare("b")], "b");
    configure(vec![bare("a"), stdio("b")], "a");
    configure(vec![bare("b")], "b");
}

#[test]
fn two_backends_can_exchange_their_prefixes() {
    let prefixed = |name: &str, prefix: &str| Backend { prefix: prefix.into(), ..stdio(name) };
    let makers = [("a", maker(&["echo"])), ("b", maker(&["echo"]))];
    let mut story = Story::new(settings(vec![prefixed("a", "x_"), prefixed("b", "y_")]), &makers);
    story.event(Event::TimePassed).shake(1);
    reaches(&mut story, "x_echo", "a");
    story.event(Event::Configured(Box::new(settings(vec![prefixed("a", "y_"), prefixed("b", "x_")]))));
    story.clients.clear();
    reaches(&mut story, "x_echo", "b");
    reaches(&mut story, "y_echo", "a");
    assert_eq!(owners(&story), json!([]));
}

#[test]
fn names_that_look_alike_get_a_suffix_in_any_order() {
    let mut orders = BTreeSet::new();
    for tools in [["get.item", "get_item", "get/item"], ["get/item", "get.item", "get_item"]] {
        let mut story = Story::simple(&[("a", maker(&tools))]);
        let mut shown = listed(&mut story);
        assert_eq!(owners(&story), json!([]));
        for name in &shown {
            assert!(name.len() <= 64 && name.starts_with("a__get_item"), "{name}");
            story.call(1, 5, name);
            let (link, told) = story.told("a");
            let own = told["params"]["name"].as_str().expect("a name").to_owned();
            assert_eq!(own == "get_item", name == "a__get_item", "{own} is {name}");
            story.answer(link, &told["id"], json!({})).heard(1);
        }
        shown.sort();
        shown.dedup();
        assert_eq!(shown.len(), 3);
        orders.insert(shown);
    }
    assert_eq!(orders.len(), 1, "the order of a list does not matter: {orders:?}");
}

#[test]
fn backends_whose_prefixes_look_alike_do_not_collide() {
    let prefixed = |name: &str| Backend { prefix: format!("{name}__"), ..stdio(name) };
    let long = "l".repeat(80);
    let makers = [("my.server", maker(&["read", &long])), ("my server", maker(&["read", &long]))];
    let backends = vec![prefixed("my.server"), prefixed("my server")];
    let mut story = Story::new(settings(backends), &makers);
    story.event(Event::TimePassed).shake(1);
    let shown = listed(&mut story);
    assert_eq!(shown.iter().collect::<BTreeSet<_>>().len(), 4, "{shown:?}");
    assert!(shown.iter().all(|name| name.len() <= 64), "{shown:?}");
    assert_eq!(owners(&story), json!([]));
    for (name, backend) in shown.iter().zip(["my.server", "my.server", "my server", "my server"]) {
        reaches(&mut story, name, backend);
    }
}

#[test]
fn a_name_that_was_shown_stays_with_its_tool_when_a_look_alike_is_added() {
    let mut story = Story::simple(&[("a", maker(&["get.item"]))]);
    assert_eq!(listed(&mut story), ["a__get_item"]);
    story.maker("a").tools.insert(0, tool("get_item"));
    let link = story.link("a");
    story.link_says(link, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})).heard(1);
    story.call(1, 2, "a__get_item");
    assert_eq!(story.told("a").1["params"]["name"], "get.item");
    let suffixed = listed(&mut story).into_iter().find(|name| name != "a__get_item").expect("two tools");
    story.call(1, 3, &suffixed);
    assert_eq!(story.told("a").1["params"]["name"], "get_item");
}

#[test]
fn a_name_listed_twice_by_one_backend_counts_once() {
    let mut story = Story::simple(&[("a", maker(&["echo", "echo"]))]);
    assert_eq!(listed(&mut story), ["a__echo"]);
    assert!(story.notes.iter().any(|note| note.contains("lists the tool `a__echo` twice")), "{:?}", story.notes);
}

/// A backend that knows an unkeyed hash can choose names that share it. Merging 20,000 of them would take minutes.
#[test]
fn names_that_share_an_unkeyed_hash_are_merged_as_any_others() {
    let tools = names_of_one_hash(20_000);
    let tools: Vec<&str> = tools.iter().map(String::as_str).collect();
    let backends: Vec<Backend> = (0..2).map(|n| bare(&format!("b{n}"))).collect();
    let cached = backends.iter().map(|backend| (backend.name.clone(), kept(&tools))).collect();
    let mut story = Story::with_kept(settings(backends), &[], cached);
    story.auto = false;
    story.event(Event::TimePassed);
    assert_eq!(story.gateway.status(story.now).to_json()["collision_count"], 10_000);
}

#[test]
fn many_names_that_collide_are_merged_quickly_and_reported_in_a_bounded_way() {
    let tools: Vec<String> = (0..20_000).map(|n| format!("t{n}")).collect();
    let tools: Vec<&str> = tools.iter().map(String::as_str).collect();
    let backends: Vec<Backend> = (0..4).map(|n| bare(&format!("b{n}"))).collect();
    let cached = backends.iter().map(|backend| (backend.name.clone(), kept(&tools))).collect();
    let mut story = Story::with_kept(settings(backends), &[], cached);
    story.auto = false;
    story.event(Event::TimePassed);
    let status = story.gateway.status(story.now).to_json();
    // All backends together have a limit, so each keeps 5,000 names.
    assert_eq!(status["collision_count"], 15_000);
    assert_eq!(status["collisions"].as_array().map(Vec::len), Some(100));
    assert!(story.notes.len() < 100, "{}", story.notes.len());
    assert!(story.notes.iter().any(|note| note.contains("more names")), "{:?}", story.notes.last());
}

#[test]
fn all_backends_together_list_a_bounded_number_of_elements_and_a_small_list_is_whole() {
    let tools: Vec<String> = (0..30_000).map(|n| format!("t{n}")).collect();
    let tools: Vec<&str> = tools.iter().map(String::as_str).collect();
    let backends = vec![stdio("a"), stdio("b"), stdio("small"), stdio("c")];
    let cached = backends
        .iter()
        .map(|backend| (backend.name.clone(), kept(if backend.name == "small" { &tools[..50] } else { &tools })))
        .collect();
    let mut story = Story::with_kept(settings(backends), &[], cached);
    story.auto = false;
    story.event(Event::TimePassed);
    let of = |prefix: &str| story.gateway.tools().filter(|(shown, _, _)| shown.starts_with(prefix)).count();
    assert_eq!([of("a__"), of("b__"), of("small__"), of("c__")], [6_650, 6_650, 50, 6_650]);
    let notes: Vec<&String> = story.notes.iter().filter(|note| note.contains("are left out")).collect();
    assert_eq!(notes.len(), 3, "{notes:?}");
    assert!(notes[0].starts_with("a: 23350 of the elements"), "{notes:?}");
}

#[test]
fn many_backends_with_short_lists_lose_nothing() {
    let tools: Vec<String> = (0..30).map(|n| format!("t{n}")).collect();
    let tools: Vec<&str> = tools.iter().map(String::as_str).collect();
    let backends: Vec<Backend> = (0..1_000).map(|n| stdio(&format!("b{n}"))).collect();
    let cached = backends.iter().map(|backend| (backend.name.clone(), kept(&tools))).collect();
    let mut story = Story::with_kept(settings(backends), &[], cached);
    story.auto = false;
    story.event(Event::TimePassed);
    assert_eq!(story.gateway.tools().count(), 30_000);
}

#[test]
fn all_backends_together_list_a_bounded_number_of_bytes() {
    let large = |n: usize| json!({"name": format!("t{n}"), "description": "x".repeat(100_000)});
    let tools: Vec<serde_json::Value> = (0..150).map(large).collect();
    let backends: Vec<Backend> = ["a", "b"].map(stdio).into();
    let makers = ["a", "b"].map(|name| (name, Maker { tools: tools.clone(), ..maker(&[]) }));
    let mut story = Story::new(settings(backends), &makers);
    story.event(Event::TimePassed);
    let count = story.gateway.tools().count();
    assert!((160..=167).contains(&count), "{count}");
}
