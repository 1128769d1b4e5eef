//! Slow first starts (k1 to k5) and heartbeats (p1 to p4).

use crate::story::*;

const REVISION: &str = "2025-11-25";
const OURS: [&str; 3] = ["restart_server", "verify_server_restarted", "server_status"];

fn cached(settings: &mut Settings) {
    settings.cache = true;
}

/// The cache entry of a run whose server offered everything and one tool.
fn entry() -> String {
    let mut story = Story::legacy_with(ALL, cached);
    story.client(&ask(1, "tools/list")).child(1, &result(1, r#"{"tools":[{"name":"t","x":1}]}"#));
    story.passes(secs(2));
    story.saved().expect("it is saved two seconds after the last change")
}

fn modern_entry() -> String {
    let mut story = Story::modern_with(cached);
    story.client(&modern(1, "tools/list", "")).child(1, &result(1, r#"{"tools":[{"name":"t","x":1}]}"#));
    story.client_leaves(ClientEnd::Closed);
    story.saved().expect("it is saved when the client leaves")
}

fn names(line: &str) -> Vec<String> {
    let line = parsed(line);
    let tools = line["result"]["tools"].as_array().unwrap_or_else(|| panic!("no list: {line}"));
    tools.iter().filter_map(|tool| tool["name"].as_str()).map(str::to_owned).collect()
}

/// A client has waited three seconds for a slow child 1, and was answered from this entry.
fn early(entry: &str) -> Story {
    let mut story = Story::fresh_with(cached);
    story.client(INITIALIZE);
    story.passes(ms(250));
    story.was_done(&["read cache 2025-11-25"]);
    story.cache_is_read(REVISION, Some(entry));
    story.passes(ms(2_749));
    story.client_hears_nothing();
    story.passes(ms(1));
    story
}

#[test]
fn k1_the_cache_answers_for_a_slow_first_server() {
    let mut story = early(&entry());
    let promised = ALL.replace(r#"":{}"#, r#"":{"listChanged":true}"#);
    let answer = parsed(&story.answer());
    assert_eq!(answer["result"]["serverInfo"], json!({"name": "s", "version": "1"}), "the server's own");
    assert_eq!(answer["result"]["capabilities"]["tools"], parsed(&promised)["tools"]);
    assert_eq!(answer["result"]["capabilities"]["resources"], json!({"subscribe": true, "listChanged": true}));
    story.forget();
    story.client(INITIALIZED).client(&ask(1, "tools/list")).client(&call(2, "t")).client(&ask(3, "prompts/list"));
    let mut tools = vec!["t".to_owned()];
    tools.extend(OURS.map(str::to_owned));
    assert_eq!(names(&story.answer()), tools, "the call and the unknown list are held");
    story.client(&call(4, "server_status"));
    assert_eq!(parsed(&story.answer())["result"]["structuredContent"]["state"], "starting");
    story.child_hears_nothing(1);

    story.child(1, &result(0, &initialize_result(REVISION, ALL)));
    story.was_done(&["ready 1"]);
    let told = story.told_server(1);
    assert_eq!(told[..3], [INITIALIZED.to_owned(), call(2, "t"), ask(3, "prompts/list")]);
    story.client_hears_nothing();
}

#[test]
fn k1_a_server_that_answers_in_time_is_not_replaced_by_the_cache() {
    let mut story = Story::fresh_with(cached);
    story.client(INITIALIZE);
    story.passes(ms(249));
    story.child(1, &result(0, &initialize_result(REVISION, "{}")));
    story.was_done(&["ready 1"]);
    let mut story = Story::fresh_with(cached);
    story.client(INITIALIZE);
    story.passes(secs(1));
    story.cache_is_read(REVISION, Some(&entry()));
    story.passes(secs(1));
    story.child(1, &result(0, &initialize_result(REVISION, "{}")));
    assert_eq!(parsed(&story.answer())["result"]["capabilities"], json!({"tools": {"listChanged": true}}));
    story.passes(secs(60));
    story.client_hears_nothing();
}

/// A server that answers lists before the handshake also answers the one that it has when the handshake is late.
#[test]
fn k1_a_list_is_left_to_a_server_that_has_answered_pages_of_it() {
    let mut story = Story::fresh_with(|_| {});
    story.client(INITIALIZE).client(&ask(1, "resources/list"));
    story.child(1, &result(1, r#"{"resources":[],"nextCursor":"2"}"#)).client(&ask(2, "resources/list"));
    story.forget();
    story.passes(secs(20));
    assert_eq!(parsed(&story.answer())["result"]["serverInfo"]["name"], "outlast");
    let list = result(2, r#"{"resources":[]}"#);
    story.child(1, &list);
    assert_eq!(story.answer(), list);
}

#[test]
fn k2_list_changed_follows_only_where_the_lists_differ() {
    for (tools, told) in [(r#"{"name":"t","x":1}"#, 0), (r#"{"name":"t","x":2}"#, 1), (r#"{"name":"u"}"#, 1)] {
        let mut story = early(&entry());
        story.client(INITIALIZED).client(&ask(1, "tools/list"));
        story.forget();
        story.child(1, &result(0, &initialize_result(REVISION, ALL)));
        story.answers_private(1, "tools/list", &format!(r#"{{"tools":[{tools}]}}"#));
        let heard = story.told_client();
        assert_eq!(heard, vec![note("notifications/tools/list_changed"); told], "{tools}");
    }
}

#[test]
fn k3_the_wait_is_as_configured_or_depends_on_the_cache() {
    let without_lists = entry().replace(r#""tools":[{"name":"t","x":1}]"#, "");
    let table = [
        (None, Some(entry()), ms(3_000)),
        (None, Some(without_lists), ms(20_000)),
        (None, None, ms(20_000)),
        (Some(ms(500)), Some(entry()), ms(500)),
        (Some(ms(500)), None, ms(500)),
        (Some(ms(0)), Some(entry()), ms(0)),
    ];
    for (asked, entry, after) in table {
        let mut story = Story::fresh_with(|settings| {
            cached(settings);
            settings.answer_after = asked;
        });
        story.client(INITIALIZE);
        story.passes(ms(250).min(after));
        story.cache_is_read(REVISION, entry.as_deref());
        if after > ms(250) {
            story.passes(after - ms(251));
            story.client_hears_nothing();
        }
        story.passes(ms(1));
        let name = parsed(&story.answer())["result"]["serverInfo"]["name"].clone();
        assert_eq!(name, if entry.is_some() { "s" } else { "outlast" }, "{asked:?}");
    }

    // A disk that does not answer counts as an absent cache.
    let mut story = Story::fresh_with(|settings| {
        cached(settings);
        settings.answer_after = Some(ms(100));
    });
    story.client(INITIALIZE);
    story.passes(ms(1_099));
    story.client_hears_nothing();
    story.passes(ms(1));
    assert_eq!(parsed(&story.answer())["result"]["serverInfo"]["name"], "outlast");
    story.cache_is_read(REVISION, Some(&entry()));
    story.client_hears_nothing();
}

#[test]
fn k3_an_unusable_entry_is_ignored_with_one_warning() {
    let table = [
        "no json",
        "[]",
        r#"{"layout":2,"revision":"2025-11-25","opening":{},"lists":{}}"#,
        r#"{"layout":1,"revision":"2025-06-18","opening":{},"lists":{}}"#,
        r#"{"layout":1,"revision":"2025-11-25","opening":{}}"#,
    ];
    for entry in table {
        let mut story = Story::fresh_with(cached);
        story.client(INITIALIZE);
        story.passes(ms(250));
        story.cache_is_read(REVISION, Some(entry));
        let noted = story.recorded("conversation_noted");
        assert!(noted.len() == 1 && noted[0].contains("is ignored"), "{entry}: {noted:?}");
        story.passes(secs(19));
        story.client_hears_nothing();
    }
}

#[test]
fn k4_only_a_cached_discover_is_answered() {
    let mut story = Story::fresh_with(cached);
    story.client(&modern(0, "server/discover", ""));
    story.passes(ms(250));
    story.was_done(&["read cache 2026-07-28"]);
    story.cache_is_read("2026-07-28", None);
    story.passes(secs(100));
    story.client_hears_nothing();

    let mut story = Story::fresh_with(cached);
    story.client(&modern(0, "server/discover", ""));
    story.passes(ms(250));
    story.cache_is_read("2026-07-28", Some(&modern_entry()));
    story.passes(ms(2_750));
    let answer = parsed(&story.answer());
    assert_eq!(answer["result"]["supportedVersions"], json!(["2026-07-28"]));
    assert_eq!(answer["result"]["ttlMs"], 0);
    assert_eq!(answer["result"]["capabilities"]["tools"], json!({"listChanged": true}));
    story.forget();
    story.client(&modern(1, "tools/list", "")).client(&modern(2, "tools/call", r#""name":"t""#));
    assert_eq!(names(&story.answer())[0], "t");
    story.child_hears_nothing(1);
    // Its answer to the client's own probe completes its handshake.
    story.child(1, &result(0, &discover_result(ALL)));
    story.was_done(&["ready 1"]);
    assert_eq!(story.told_server(1)[0], modern(2, "tools/call", r#""name":"t""#));
    story.answers_private(1, "tools/list", r#"{"tools":[{"name":"t","x":1}]}"#);
    story.client_hears_nothing();
}

#[test]
fn k4_of_two_probes_the_first_answer_is_the_handshake() {
    let mut story = Story::fresh_with(cached);
    story.client(&modern(0, "server/discover", "")).client(&modern(1, "server/discover", ""));
    story.passes(ms(250));
    story.cache_is_read("2026-07-28", Some(&modern_entry()));
    story.passes(secs(3));
    assert_eq!(story.told_client().len(), 2);
    story.forget();
    story.child(1, &result(0, &discover_result(ALL)));
    story.was_done(&["ready 1"]);
    story.child(1, &result(1, &discover_result(ALL)));
    story.was_done(&[]);
    story.client_hears_nothing();
}

#[test]
fn k4_after_a_cached_discover_and_an_exit_the_next_child_is_probed() {
    let mut story = Story::fresh_with(cached);
    story.client(&modern(0, "server/discover", ""));
    story.passes(ms(250));
    story.cache_is_read("2026-07-28", Some(&modern_entry()));
    story.passes(secs(3));
    story.exits(1, code(1));
    story.passes(secs(1));
    story.forget();
    story.comes_up(2);
    assert_eq!(story.private_request(2).1, "server/discover");
    story.was_done(&["ready 2"]);
}

#[test]
fn k5_a_server_with_a_newer_revision_is_asked_for_the_revision_the_client_knows() {
    let old = entry().replace(r#""protocolVersion":"2025-11-25""#, r#""protocolVersion":"2025-06-18""#);
    let mut story = early(&old);
    assert_eq!(parsed(&story.answer())["result"]["protocolVersion"], "2025-06-18");
    story.child(1, &result(0, &initialize_result(REVISION, ALL)));
    assert!(story.removed(), "the next client is not told this");
    story.exits(1, code(1));
    story.passes(secs(1));
    story.forget();
    story.started(2);
    let told = story.told_server(2);
    assert_eq!(parsed(&told[0])["params"]["protocolVersion"], "2025-06-18");
    let id = parsed(&told[0])["id"].to_string();
    story.child(2, &result(id, &initialize_result("2025-06-18", ALL)));
    story.was_done(&["ready 2"]);
}

#[test]
fn k5_the_saved_entry_is_from_the_server_and_bounded() {
    let entry = parsed(&entry());
    assert_eq!(entry["lists"], json!({"tools": [{"name": "t", "x": 1}]}), "without ours");
    assert_eq!(entry["opening"]["capabilities"], parsed(ALL), "without our promises");

    let mut story = Story::legacy_with(ALL, |settings| {
        cached(settings);
        settings.limits.cache.cache_bytes_max = 400;
    });
    let big = "x".repeat(400);
    story.client(&ask(1, "tools/list")).child(1, &result(1, &format!(r#"{{"tools":[{{"name":"{big}"}}]}}"#)));
    story.passes(secs(2));
    assert!(story.removed(), "an older entry would be wrong");

    let mut story = Story::legacy_with(ALL, |_| {});
    story.client(&ask(1, "tools/list")).child(1, &result(1, r#"{"tools":[]}"#));
    story.passes(secs(10));
    assert_eq!(story.saved(), None, "there is no cache");
}

#[test]
fn k5_a_call_that_waits_too_long_for_a_slow_start_fails() {
    let mut story = early(&entry());
    story.forget();
    story.client(&ask(1, "acme/do"));
    story.passes(secs(30));
    let error = story.client_hears_error(1, 7002, "server_down", "not_sent");
    assert_eq!(error["message"], "`acme/do` was not run: the server is still starting. It is being started now.");
}

// ---- heartbeats -------------------------------------------------------------------------------------------

fn beating(settings: &mut Settings) {
    settings.heartbeat = Some(secs(10));
}

fn call_with_token(id: u32) -> String {
    ask_with(id, "tools/call", &format!(r#"{{"name":"t","arguments":{{}},"_meta":{{"progressToken":"p{id}"}}}}"#))
}

fn progress(token: &str, value: &str) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":"{token}","progress":{value}}}}}"#
    )
}

#[test]
fn p1_a_call_without_progress_gets_heartbeats_until_its_answer() {
    let mut story = Story::legacy_with(ALL, beating);
    story.client(&call_with_token(1)).client(&call(2, "t"));
    story.passes(ms(9_999));
    story.client_hears_nothing();
    story.passes(ms(1));
    let first = parsed(&story.answer());
    assert_eq!(first["method"], "notifications/progress");
    assert_eq!((&first["params"]["progressToken"], &first["params"]["progress"]), (&json!("p1"), &json!(0.000001)));
    assert_eq!(first["params"]["message"], "The server has not answered yet (10 s)");
    story.passes(secs(20));
    let values: Vec<_> = story.told_client().iter().map(|line| parsed(line)["params"]["progress"].clone()).collect();
    assert_eq!(values, [json!(0.000002), json!(0.000003)]);
    story.child(1, &result(1, "{}"));
    story.client_hears(&[&result(1, "{}")]);
    story.passes(secs(60));
    story.client_hears_nothing();
}

#[test]
fn p2_real_progress_ends_the_heartbeat_and_never_falls_below_it() {
    let mut story = Story::legacy_with(ALL, beating);
    story.client(&call_with_token(1));
    story.passes(secs(10));
    story.forget();
    story.child(1, &progress("p1", "0"));
    story.client_hears_nothing();
    story.passes(secs(10));
    assert_eq!(story.told_client().len(), 1, "nothing of the server's was told yet");
    for value in ["0.1", "1", "2"] {
        story.child(1, &progress("p1", value));
        story.client_hears(&[&progress("p1", value)]);
    }
    story.passes(secs(60));
    story.client_hears_nothing();

    let mut story = Story::legacy_with(ALL, beating);
    story.client(&call_with_token(1)).child(1, &progress("p1", "0"));
    story.client_hears(&[&progress("p1", "0")]);
    story.passes(secs(60));
    story.client_hears_nothing();
}

#[test]
fn p3_a_call_that_waits_for_a_server_has_a_heartbeat_and_a_cancelled_one_has_none() {
    let mut story = Story::legacy_with(ALL, beating);
    story.exits(1, code(1));
    story.client(&call_with_token(1)).client(&call_with_token(2));
    story.passes(ms(500));
    story.client(&cancel(2));
    story.passes(ms(500));
    story.started(2);
    story.passes(secs(9));
    let told = story.told_client();
    assert_eq!(told.len(), 1, "{told:#?}");
    assert!(told[0].contains(r#""p1""#) && told[0].contains("waits for the server"), "{told:#?}");
    story.shakes_hands(2, ALL);
    story.client(&cancel(1));
    story.passes(secs(60));
    story.client_hears_nothing();
}

#[test]
fn p4_without_the_option_there_is_none() {
    let mut story = Story::legacy();
    story.client(&call_with_token(1));
    story.passes(secs(600));
    story.client_hears_nothing();
}
