//! The merged lists that clients see.

use std::collections::BTreeMap;

use outlast_core::{front::record::SessionState, gateway::Busy};
use serde_json::Value;

use crate::story::*;

fn names(list: &serde_json::Value, member: &str) -> Vec<String> {
    let items = list["result"][member].as_array().unwrap_or_else(|| panic!("no {member}: {list}"));
    items.iter().map(|item| item["name"].as_str().expect("a name").to_owned()).collect()
}

#[test]
fn lists_are_merged_in_the_order_of_the_file_and_pages_follow_each_other() {
    let mut many = maker(&["t0", "t1", "t2", "t3", "t4"]);
    many.page = 2;
    let mut configured = settings(vec![stdio("b"), stdio("a")]);
    configured.limits.page = 4;
    let mut story = Story::new(configured, &[("a", many), ("b", maker(&["x"]))]);
    story.shake(1).ask(1, json!(1), "tools/list", json!({}));
    let first = story.heard(1).json();
    assert_eq!(names(&first, "tools"), ["b__x", "a__t0", "a__t1", "a__t2"]);
    let cursor = first["result"]["nextCursor"].clone();
    story.ask(1, json!(2), "tools/list", json!({"cursor": cursor}));
    let second = story.heard(1).json();
    assert_eq!(names(&second, "tools"), ["a__t3", "a__t4"]);
    assert_eq!(second["result"].get("nextCursor"), None);
    story.ask(1, json!(3), "tools/list", json!({"cursor": "c2"}));
    assert_eq!(story.heard(1).json()["error"]["code"], -32602);
    assert_eq!(
        story.kept.iter().map(|(name, offer)| (name.as_str(), offer.tools.len())).collect::<BTreeMap<_, _>>(),
        BTreeMap::from([("a", 5), ("b", 1)])
    );
}

#[test]
fn names_fit_every_client() {
    let mut story =
        Story::simple(&[("a", maker(&["with.dot", "with/slash", &"l".repeat(80), &format!("{}x", "l".repeat(79))]))]);
    story.ask(1, json!(1), "tools/list", json!({}));
    let shown = names(&story.heard(1).json(), "tools");
    assert_eq!(&shown[..2], ["a__with_dot", "a__with_slash"]);
    assert!(shown.iter().all(|name| name.len() <= 64), "{shown:?}");
    assert_eq!(shown.len(), 4);
    story.call(1, 2, &shown[3]);
    assert_eq!(story.told("a").1["params"]["name"], format!("{}x", "l".repeat(79)));
    story.call(1, 3, "a__with_dot");
    assert_eq!(story.told("a").1["params"]["name"], "with.dot");
}

#[test]
fn a_name_offered_twice_belongs_to_the_first_backend() {
    let bare = |name: &str| Backend { prefix: String::new(), ..stdio(name) };
    let makers = [("a", maker(&["echo"])), ("b", maker(&["echo", "more"]))];
    let mut story = Story::new(settings(vec![bare("a"), bare("b")]), &makers);
    story.shake(1).ask(1, json!(1), "tools/list", json!({}));
    assert_eq!(names(&story.heard(1).json(), "tools"), ["echo", "more"]);
    story.call(1, 2, "echo").told("a");
    assert!(
        story.notes.iter().any(|note| note.contains("`echo`") && note.contains('a') && note.starts_with("b:")),
        "{:?}",
        story.notes
    );
    let status = story.gateway.status(story.now).to_json();
    assert_eq!(status["collisions"], json!([{"list": "tools", "name": "echo", "offered_by": "a", "left_out": "b"}]));
}

#[test]
fn only_clients_that_see_a_change_are_notified() {
    let mut story = Story::simple(&[("a", maker(&["echo"])), ("b", maker(&["x"]))]);
    let link = story.link("a");
    let changed = json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"});
    story.link_says(link, changed.clone()).hears_nothing(1);
    story.maker("a").tools.push(tool("new"));
    story.link_says(link, changed.clone()).hears(1, changed.clone()).hears_nothing(1);
    story.ask(1, json!(1), "tools/list", json!({}));
    assert_eq!(names(&story.heard(1).json(), "tools"), ["a__echo", "a__new", "b__x"]);
    // A crash alone changes no list.
    story.pass(secs(10)).dies(link).hears_nothing(1);
    assert_eq!(story.status("a")["state"], "ready");
    story.maker("a").tools.clear();
    let link = story.link("a");
    story.pass(secs(70)).dies(link).hears(1, changed);
}

#[test]
fn a_cached_catalogue_is_served_at_once_and_marked_stale() {
    let kept =
        BTreeMap::from([("a".to_owned(), Offer { tools: vec![tool("old").to_string().into()], ..Offer::default() })]);
    let mut story = Story::with_kept(settings(vec![stdio("a")]), &[("a", maker(&["new"]))], kept);
    story.auto = false;
    story.shake(1).ask(1, json!(1), "tools/list", json!({}));
    assert_eq!(names(&story.heard(1).json(), "tools"), ["a__old"]);
    assert_eq!(story.status("a")["catalogue"], "stale");
    story.call(1, 2, "a__new").hears_nothing(1);
    let link = story.connected[0];
    story.up.insert(link.serial, link);
    story.event(Event::LinkUp { link, pid: Some(1) });
    assert_eq!(story.status("a")["catalogue"], "confirmed");
    assert_eq!(story.told("a").1["params"]["name"], "new");
    story.hears(1, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}));
    assert_eq!(story.kept.len(), 1);
}

#[test]
fn a_list_waits_shortly_for_unknown_offers_and_not_for_failed_backends() {
    let mut story = Story::new(settings(vec![stdio("a"), stdio("b")]), &[("a", maker(&["x"])), ("b", maker(&["y"]))]);
    story.auto = false;
    story.shake(1).ask(1, json!(1), "tools/list", json!({})).hears_nothing(1);
    let (a, b) = (story.connected[0], story.connected[1]);
    story.up.insert(a.serial, a);
    story.event(Event::LinkUp { link: a, pid: None });
    story.hears(1, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})).hears_nothing(1);
    story.dies(b);
    assert_eq!(names(&story.heard(1).json(), "tools"), ["a__x"]);

    let mut story = Story::new(settings(vec![stdio("a")]), &[("a", maker(&["x"]))]);
    story.auto = false;
    // The first list waits for a moment and no longer, even if the backend has been starting for long.
    story.shake(1).pass(secs(6));
    story.ask(1, json!(1), "tools/list", json!({})).pass(ms(99)).hears_nothing(1);
    story.pass(ms(1));
    assert!(names(&story.heard(1).json(), "tools").is_empty());
    // Later lists do not wait again.
    story.ask(1, json!(2), "tools/list", json!({}));
    assert!(names(&story.heard(1).json(), "tools").is_empty());
    let link = story.link("a");
    story.up.insert(link.serial, link);
    story.event(Event::LinkUp { link, pid: None });
    story.hears(1, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}));
}

#[test]
fn a_stateless_client_must_not_cache_an_incomplete_list() {
    let mut story = Story::new(settings(vec![stdio("a"), stdio("b")]), &[("a", maker(&["x"])), ("b", maker(&["y"]))]);
    story.auto = false;
    story.event(Event::TimePassed);
    let (a, b) = (story.connected[0], story.connected[1]);
    story.up.insert(a.serial, a);
    story.event(Event::LinkUp { link: a, pid: None });
    story.post(1, json!(1), "tools/list", json!({})).pass(ms(100));
    let list = story.heard(1).json();
    assert_eq!((names(&list, "tools"), &list["result"]["ttlMs"]), (vec!["a__x".to_owned()], &json!(0)));
    story.up.insert(b.serial, b);
    story.event(Event::LinkUp { link: b, pid: None });
    story.post(2, json!(1), "tools/list", json!({}));
    let list = story.heard(2).json();
    assert_eq!((names(&list, "tools").len(), &list["result"]["ttlMs"]), (2, &json!(5000)));
}

#[test]
fn a_resource_goes_to_its_lister_then_to_a_template_then_to_the_only_backend() {
    let mut a = maker(&[]);
    a.resources = vec![json!({"uri": "file:///a", "name": "a"})];
    let mut b = maker(&[]);
    b.templates = vec![json!({"uriTemplate": "log://{day}/x", "name": "l"})];
    let mut story = Story::simple(&[("a", a), ("b", b)]);
    let read = |story: &mut Story, uri: &str| {
        story.ask(1, json!(1), "resources/read", json!({"uri": uri}));
    };
    read(&mut story, "file:///a");
    assert_eq!(story.told("a").1["params"]["uri"], "file:///a");
    read(&mut story, "log://monday/x");
    story.told("b");
    read(&mut story, "who://knows");
    assert_eq!(story.heard(1).json()["error"]["code"], -32002);
    story.post(10, json!(1), "resources/read", json!({"uri": "who://knows"}));
    assert_eq!(story.heard(10).json()["error"]["code"], -32602);

    let mut lonely = maker(&[]);
    lonely.capabilities = json!({"tools": {}});
    let mut story = Story::simple(&[("a", maker(&[])), ("b", lonely)]);
    read(&mut story, "who://knows");
    story.told("a");
}

#[test]
fn prompts_and_completions_are_renamed_on_their_way() {
    let mut a = maker(&[]);
    a.prompts = vec![json!({"name": "greet"})];
    a.templates = vec![json!({"uriTemplate": "log://{day}", "name": "l"})];
    let mut story = Story::simple(&[("a", a), ("b", maker(&[]))]);
    story.ask(1, json!(1), "prompts/list", json!({}));
    assert_eq!(names(&story.heard(1).json(), "prompts"), ["a__greet"]);
    story.ask(1, json!(2), "prompts/get", json!({"name": "a__greet"}));
    assert_eq!(story.told("a").1["params"]["name"], "greet");
    let argument = json!({"name": "who", "value": "x"});
    story.ask(
        1,
        json!(3),
        "completion/complete",
        json!({"argument": argument, "ref": {"type": "ref/prompt", "name": "a__greet"}}),
    );
    assert_eq!(
        story.told("a").1["params"],
        json!({"argument": argument, "ref": {"type": "ref/prompt", "name": "greet"}})
    );
    story.ask(
        1,
        json!(4),
        "completion/complete",
        json!({"argument": argument, "ref": {"type": "ref/resource", "uri": "log://{day}"}}),
    );
    story.told("a");
}

#[test]
fn a_resource_request_waits_for_an_unknown_offer() {
    let mut a = maker(&[]);
    a.resources = vec![json!({"uri": "file:///a", "name": "a"})];
    let mut story = Story::new(settings(vec![stdio("b"), stdio("a")]), &[("a", a), ("b", maker(&[]))]);
    story.auto = false;
    story.shake(1).ask(1, json!(1), "resources/read", json!({"uri": "file:///a"})).hears_nothing(1);
    story.ask(1, json!(2), "resources/read", json!({"uri": "file:///none"})).hears_nothing(1);
    for link in story.connected.clone() {
        story.up.insert(link.serial, link);
        story.event(Event::LinkUp { link, pid: None });
    }
    assert_eq!(story.told("a").1["params"]["uri"], "file:///a");
    let heard: Vec<_> = story.clients.drain(..).map(|heard| heard.json()).filter(|said| said["id"] == 2).collect();
    assert_eq!(heard[0]["error"]["code"], -32002, "{heard:?}");
}

/// Reports a changed list whenever it was read, for ten seconds. Returns how often it was read.
fn changes_all_the_time(story: &mut Story, tools: usize) -> usize {
    let link = story.link("a");
    let (end, mut reads) = (story.now + secs(10), 0);
    story.maker("a").mute = true;
    while story.now < end {
        story.link_says(link, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}));
        while let Some(at) = story.links.iter().position(|(_, text)| text.contains("tools/list")) {
            let (_, text) = story.links.remove(at);
            reads += 1;
            let names: Vec<Value> = (0..tools).map(|n| tool(&format!("t{n}of{reads}"))).collect();
            story.answer(link, &parsed(&text)["id"], json!({"tools": names}));
        }
        story.pass(ms(100));
    }
    reads
}

#[test]
fn a_large_list_that_changes_all_the_time_is_read_once_a_second() {
    let mut story = Story::simple(&[("a", maker(&["one"]))]);
    let reads = changes_all_the_time(&mut story, 2_000);
    assert!((9..=12).contains(&reads), "{reads}");
    // The last change is not forgotten.
    story.pass(secs(2));
    assert_eq!(story.links.iter().filter(|(_, text)| text.contains("tools/list")).count(), 1);
}

/// A client and a backend `a` with a list of 600 tools, which answers nothing from now on.
fn large_list() -> Story {
    let tools: Vec<String> = (0..600).map(|n| format!("t{n}")).collect();
    let mut story = Story::simple(&[("a", maker(&tools.iter().map(String::as_str).collect::<Vec<_>>()))]);
    story.maker("a").mute = true;
    story
}

fn list_changed() -> Value {
    json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
}

#[test]
fn a_large_list_is_read_once_at_a_time() {
    let mut story = large_list();
    let link = story.link("a");
    story.link_says(link, list_changed()).told_nothing("a");
    // The pause is over, and its timer has not fired yet.
    story.now += secs(1);
    story.link_says(link, list_changed());
    let (_, asked) = story.told("a");
    story.event(Event::TimePassed).told_nothing("a");
    story.answer(link, &asked["id"], json!({"tools": [tool("one")], "nextCursor": "c1"}));
    let (_, asked) = story.told("a");
    story.answer(link, &asked["id"], json!({"tools": [tool("two")]}));
    let tools: Vec<&str> = story.gateway.tools().map(|(shown, _, _)| shown).collect();
    assert_eq!(tools, ["a__one", "a__two"]);
    story.pass(secs(5)).told_nothing("a");
}

#[test]
fn a_changed_list_of_a_link_that_drains_is_not_read() {
    let mut story = large_list();
    let link = story.link("a");
    story.call(1, 1, "a__t0").told("a");
    story.link_says(link, list_changed());
    story.maker("a").mute = false;
    story.event(Event::RestartAsked { ticket: 7, backend: Some("a".into()), reason: "a test".into() });
    story.maker("a").mute = true;
    assert_ne!(story.link("a"), link, "another link serves");
    story.pass(secs(5));
    assert!(!story.links.iter().any(|(told, text)| *told == link && text.contains("tools/list")), "{:?}", story.links);
}

#[test]
fn a_changed_list_is_read_after_an_upgrade() {
    let mut story = large_list();
    let link = story.link("a");
    story.link_says(link, list_changed()).told_nothing("a");
    story.upgrade(settings(vec![stdio("a")])).event(Event::TimePassed);
    assert_eq!(story.told("a").1["method"], "tools/list");
    story.told_nothing("a");
}

#[test]
fn the_old_list_does_not_count_when_it_is_read_again() {
    let mut story = Story::simple(&[("a", maker(&[]))]);
    let large = Value::from("x".repeat(1 << 20));
    let tools: Vec<Value> = (0..10).map(|n| json!({"name": format!("t{n}"), "description": large})).collect();
    story.set_maker("a", Maker { tools, ..maker(&[]) });
    let link = story.link("a");
    for _ in 0..2 {
        story.pass(secs(2)).link_says(link, list_changed());
        assert_eq!(story.gateway.tools().count(), 10);
    }
}

#[test]
fn a_switch_subscribes_to_resources_whose_offer_waits_to_be_merged() {
    let tools: Vec<String> = (0..2_000).map(|n| format!("t{n}")).collect();
    let tools: Vec<&str> = tools.iter().map(String::as_str).collect();
    let capabilities = json!({"tools": {}, "resources": {"subscribe": true, "listChanged": true}});
    let of = |tools: &[&str]| Maker { capabilities: capabilities.clone(), ..maker(tools) };
    let mut story = Story::simple(&[("a", of(&tools)), ("b", of(&["one"]))]);
    let state = SessionState {
        version: "2025-11-25".into(),
        initialize: "{}".into(),
        level: None,
        watches: ["r://x".into()].into(),
    };
    story.pass(secs(5)).event(Event::ClientRestored { client: 2, who: local(), state: state.into() });
    let changed = json!({"jsonrpc": "2.0", "method": "notifications/resources/list_changed"});
    let link = story.link("b");
    // The pause begins with the first change.
    for uri in ["r://y", "r://x"] {
        story.maker("b").resources.push(json!({"uri": uri, "name": "r"}));
        story.link_says(link, changed.clone()).told_nothing("b");
    }
    story.event(Event::SwitchAsked { ticket: 1, what: Switch::Tool("a__t0".into()), off: true });
    let (_, told) = story.told("b");
    assert_eq!((&told["method"], &told["params"]["uri"]), (&json!("resources/subscribe"), &json!("r://x")));
}

#[test]
fn an_element_that_does_not_fit_hides_no_other() {
    let of = |name: &str, bytes: usize| json!({"name": name, "description": "x".repeat(bytes), "inputSchema": {}});
    let mut a = maker(&["small", "other"]);
    a.tools.insert(0, of("huge", 10 << 20));
    let b = Maker { tools: (0..12).map(|n| of(&format!("t{n}"), 1 << 20)).collect(), ..maker(&[]) };
    let story = Story::simple(&[("a", a), ("b", b)]);
    let tools: Vec<String> = story.gateway.tools().map(|(name, ..)| name.to_owned()).collect();
    assert_eq!(tools.iter().filter(|name| name.starts_with("a__")).collect::<Vec<_>>(), ["a__small", "a__other"]);
}

#[test]
fn a_small_list_is_read_at_every_change() {
    let mut story = Story::simple(&[("a", maker(&["one"]))]);
    assert_eq!(changes_all_the_time(&mut story, 20), 100);
}

#[test]
fn changes_of_a_large_catalogue_are_merged_together() {
    let tools: Vec<String> = (0..4_000).map(|n| format!("t{n}")).collect();
    let tools: Vec<&str> = tools.iter().map(String::as_str).collect();
    let large = Maker { page: 10_000, ..maker(&tools) };
    let mut story = Story::simple(&[("a", large.clone()), ("b", large), ("c", maker(&["one"]))]);
    story.pass(secs(5));
    for name in ["a", "b"] {
        story.maker(name).tools.pop();
    }
    let before = story.gateway.catalogue_version();
    for (round, name) in ["c", "a", "b", "c", "c"].into_iter().enumerate() {
        let link = story.link(name);
        story.maker("c").tools.push(tool(&format!("more{round}")));
        story.link_says(link, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}));
    }
    assert_eq!(story.gateway.catalogue_version(), before + 1, "the first change, at once");
    assert_eq!(story.gateway.tools().count(), 4_000 * 2 + 2);
    // The next program would not know that clients must be told.
    assert_eq!(story.gateway.busy(), Some(Busy::Merging));
    story.pass(ms(200));
    assert_eq!(story.gateway.busy(), None);
    assert_eq!(story.gateway.catalogue_version(), before + 2, "the others, together");
    assert_eq!(story.gateway.tools().count(), 3_999 * 2 + 6);
}
