//! The handshake of each later child, and the answers when the first one is broken (h1-h4, b1-b6).

use crate::story::*;

fn replayed(k: u32) -> String {
    INITIALIZE.replace("\"id\":0", &format!("\"id\":{}", private(k)))
}

/// Child 1 crashed; child 2 runs and has sent nothing.
fn replaying() -> Story {
    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.passes(secs(1));
    story.forget();
    story.started(2);
    story
}

#[test]
fn h1_a_later_child_gets_the_clients_own_opening_under_a_private_id() {
    let mut story = replaying();
    story.child_hears(2, &[&replayed(1)]);
    story.was_done(&[]);
    story.client_hears_nothing();
    story.child(2, &error(private(1), -32603, "no database"));
    story.was_done(&["stop 2: failed its handshake: refused the handshake: no database"]);
    story.client_hears_nothing();
}

#[test]
fn h1_a_handshake_without_an_answer_times_out() {
    let mut story = replaying();
    story.passes(secs(29));
    story.was_done(&[]);
    story.passes(secs(1));
    story.was_done(&["stop 2: did not finish its handshake in 30 s"]);
    story.exits(2, How::HandshakeLate(secs(30)));
    story.passes(secs(1));
    story.was_done(&["start"]);
}

#[test]
fn h2_a_later_child_must_use_the_version_the_client_knows() {
    let mut story = replaying();
    story.child(2, &result(private(1), &initialize_result("2025-11-25", ALL)));
    story.was_done(&["ready 2"]);
    story.client_hears_nothing();
    for version in ["2025-06-18", "2099-01-01"] {
        let mut story = replaying();
        story.child(2, &result(private(1), &initialize_result(version, ALL)));
        let words = format!(
            "stop 2: failed its handshake: speaks {version}, the client was promised 2025-11-25: reconnect the client to use the new server"
        );
        story.was_done(&[&words]);
    }
}

#[test]
fn h3_settings_of_the_client_are_repeated_if_the_child_supports_them() {
    let mut story = Story::legacy();
    story.client(&ask_with(1, "logging/setLevel", r#"{"level":"debug"}"#)).child(1, &result(1, "{}"));
    story.client(&ask_with(2, "resources/subscribe", r#"{"uri":"u:b"}"#)).child(1, &result(2, "{}"));
    story.client(&ask_with(3, "resources/subscribe", r#"{"uri":"u:a"}"#)).child(1, &result(3, "{}"));
    story.exits(1, code(1));
    story.client(&call(4, "t"));
    story.passes(secs(1));
    story.forget();
    story.comes_up(2);
    story.was_done(&["ready 2"]);
    story.child_hears(
        2,
        &[
            &replayed(1),
            INITIALIZED,
            &ask_with(private(2), "logging/setLevel", r#"{"level":"debug"}"#),
            &ask_with(private(3), "resources/subscribe", r#"{"uri":"u:a"}"#),
            &ask_with(private(4), "resources/subscribe", r#"{"uri":"u:b"}"#),
            &call(4, "t"),
        ],
    );
    story.child(2, &error(private(3), -32002, "gone"));
    story.client_hears_nothing();
    assert_eq!(story.recorded("protocol_noted"), ["The new server refused to restore a subscription: gone"]);
    story.exits(2, code(1));
    story.told_client();
    story.passes(secs(1));
    story.comes_up_with(3, r#"{"tools":{},"resources":{}}"#);
    story.child_hears(3, &[&replayed(5), INITIALIZED]);
}

#[test]
fn h4_a_modern_child_gets_a_discover_with_the_clients_latest_meta() {
    let mut story = Story::modern();
    story.client(r#"{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/logLevel":"debug","progressToken":1,"x":1.0}}}"#);
    story.child(1, &result(1, r#"{"tools":[]}"#));
    story.exits(1, code(1));
    story.passes(secs(1));
    story.forget();
    story.started(2);
    story.child_hears(
        2,
        &[&ask_with(
            private(1),
            "server/discover",
            r#"{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","x":1.0}}"#,
        )],
    );
    story.child(2, &result(private(1), &discover_result(ALL)));
    story.was_done(&["ready 2"]);
    story.client_hears_nothing();
}

#[test]
fn h4_a_child_of_another_version_or_era_fails() {
    for (answer, words) in [
        (
            result(private(1), r#"{"supportedVersions":["2027-01-01"],"capabilities":{}}"#),
            "speaks 2027-01-01, the client speaks 2026-07-28: reconnect the client to use the new server",
        ),
        (
            error(private(1), -32022, "not that"),
            "speaks another version (not that): reconnect the client to use the new server",
        ),
        (
            error(private(1), -32601, "Method not found"),
            "refused `server/discover`, so it does not speak the client's era: Method not found",
        ),
    ] {
        let mut story = Story::modern();
        story.exits(1, code(1));
        story.passes(secs(1));
        story.forget();
        story.started(2);
        story.child(2, &answer);
        story.was_done(&[&format!("stop 2: failed its handshake: {words}")]);
    }
}

#[test]
fn b1_an_opening_is_answered_by_outlast_at_the_second_exit_before_ready() {
    let mut story = Story::fresh_with(quick);
    story.client(INITIALIZE);
    story.exits(1, code(1));
    story.client_hears_nothing();
    story.passes(ms(500));
    story.started(2);
    story.exits(2, code(1));
    let answer = parsed(&story.answer());
    assert_eq!((&answer["id"], &answer["result"]["serverInfo"]["name"]), (&json!(0), &json!("outlast")));

    let mut story = Story::fresh_with(quick);
    story.client(&modern(0, "server/discover", ""));
    story.exits(1, code(1));
    story.client_hears_nothing();
    story.passes(ms(500));
    story.started(2);
    story.exits(2, code(1));
    story.client_hears(&[&error(0, -32601, "Method not found")]);
}

#[test]
fn b1_an_opening_is_answered_by_outlast_one_second_after_the_first_exit_before_ready() {
    for exit in [0, 1] {
        let mut story = Story::fresh_with(quick);
        story.client(INITIALIZE);
        story.passes(ms(2_400));
        story.exits(1, code(exit));
        story.passes(ms(999));
        story.client_hears_nothing();
        story.started(2);
        story.child_hears(2, &[INITIALIZE]);
        story.forget();
        story.passes(ms(1));
        assert_eq!(parsed(&story.answer())["result"]["serverInfo"]["name"], "outlast");
        // The next child has the client's own `initialize`; its answer now completes the relay's handshake.
        story.client(INITIALIZED);
        story.client(&call(1, "t"));
        story.child_hears_nothing(2);
        story.child(2, &result(0, &initialize_result("2025-11-25", ALL)));
        story.client_hears_nothing();
        assert_eq!(story.told_server(2)[..2], [INITIALIZED.to_owned(), call(1, "t")]);
        story.was_done(&["ready 2"]);
    }

    // The next child is ready by then: the client does not notice the end.
    let mut story = Story::fresh_with(quick);
    story.client(INITIALIZE);
    story.exits(1, code(1));
    story.passes(ms(500));
    story.started(2);
    story.child(2, &result(0, &initialize_result("2025-11-25", r#"{"tools":{}}"#)));
    story.passes(secs(60));
    story.client_hears(&[&result(0, &initialize_result("2025-11-25", r#"{"tools":{"listChanged":true}}"#))]);

    let mut story = Story::fresh_with(quick);
    story.client(&modern(0, "server/discover", ""));
    story.exits(1, code(1));
    story.passes(ms(500));
    story.started(2);
    story.passes(ms(500));
    story.client_hears(&[&error(0, -32601, "Method not found")]);

    // An opening after the end also waits for a second; with a running child it is a slow start.
    let mut story = Story::fresh();
    story.exits(1, code(1));
    story.client(INITIALIZE);
    story.passes(ms(999));
    story.client_hears_nothing();
    story.passes(ms(1));
    assert_eq!(parsed(&story.answer())["result"]["serverInfo"]["name"], "outlast");
    let mut story = Story::fresh();
    story.exits(1, code(1));
    story.passes(secs(1));
    story.started(2);
    story.client(INITIALIZE);
    story.passes(secs(19));
    story.client_hears_nothing();
}

#[test]
fn b1_an_opening_is_answered_by_outlast_at_the_first_failed_start() {
    let mut story = Story::not_started();
    story.client(INITIALIZE);
    story.start_fails("permission denied");
    let answer = parsed(&story.answer());
    let words = answer["result"]["instructions"].as_str().unwrap_or_default();
    assert!(words.contains("could not be started: permission denied"), "{words}");
    assert!(words.contains("`server_status` shows its stderr; fix it, then call `restart_server`"), "{words}");
}

#[test]
fn b1_an_opening_is_answered_by_outlast_at_a_give_up_and_if_the_next_try_is_late() {
    let mut story = Story::fresh_with(|settings| settings.policy.restarts_max = Some(0));
    story.client(INITIALIZE);
    story.exits(1, code(1));
    assert_eq!(parsed(&story.answer())["result"]["serverInfo"]["name"], "outlast");

    let mut story = Story::fresh_with(|settings| {
        settings.policy.delays = outlast_core::restarts::Delays::Steps(vec![(1, secs(9))]);
    });
    story.client(INITIALIZE);
    story.exits(1, code(1));
    assert_eq!(parsed(&story.answer())["result"]["serverInfo"]["name"], "outlast");
}

#[test]
fn b1_the_wait_for_a_slow_child_is_limited() {
    let mut story = Story::fresh();
    story.client(INITIALIZE);
    story.passes(ms(19_999));
    story.client_hears_nothing();
    story.passes(ms(1));
    let answer = parsed(&story.answer());
    assert_eq!(answer["result"]["serverInfo"]["name"], "outlast");
    assert!(answer["result"]["instructions"].to_string().contains("is still starting"), "{answer}");
    story.was_done(&[]);
    story.passes(secs(100));
    story.was_done(&["stop 1: did not finish its handshake in 120 s"]);

    let mut story = Story::fresh_with(|settings| settings.answer_after = Some(secs(200)));
    story.client(INITIALIZE);
    story.passes(secs(119));
    story.client_hears_nothing();
    story.was_done(&[]);
    story.passes(secs(1));
    story.was_done(&["stop 1: did not finish its handshake in 120 s"]);
    story.exits(1, How::HandshakeLate(secs(120)));
    assert_eq!(parsed(&story.answer())["result"]["serverInfo"]["name"], "outlast");

    let mut story = Story::fresh();
    story.client(&modern(0, "server/discover", ""));
    story.passes(secs(120));
    story.was_done(&["stop 1: did not finish its handshake in 120 s"]);
    story.exits(1, How::HandshakeLate(secs(120)));
    story.client_hears(&[&error(0, -32601, "Method not found")]);
}

#[test]
fn b2_outlast_answers_the_handshake_itself() {
    for (asked, told) in [
        ("2024-11-05", "2024-11-05"),
        ("2025-03-26", "2025-03-26"),
        ("2025-06-18", "2025-06-18"),
        ("2025-11-25", "2025-11-25"),
        ("2099-01-01", "2025-11-25"),
    ] {
        let mut story = Story::not_started();
        story.start_fails("no such file");
        story.client(&INITIALIZE.replace("2025-11-25", asked));
        let answer = parsed(&story.answer());
        assert_eq!(answer["result"]["protocolVersion"], told);
        assert_eq!(
            answer["result"]["capabilities"],
            json!({
                "tools": {"listChanged": true},
                "prompts": {"listChanged": true},
                "resources": {"listChanged": true, "subscribe": true},
                "logging": {},
                "completions": {},
            })
        );
        story.client(INITIALIZED);
        for (method, empty) in [
            ("prompts/list", r#"{"prompts":[]}"#),
            ("resources/list", r#"{"resources":[]}"#),
            ("resources/templates/list", r#"{"resourceTemplates":[]}"#),
        ] {
            story.client(&ask(2, method));
            story.client_hears(&[&result(2, empty)]);
        }
        story.client(&ask(3, "tools/list"));
        assert_eq!(tool_names(&story.answer()), OURS);
    }
}

#[test]
fn b2_a_broken_start_that_the_client_never_saw_makes_no_list_known() {
    let mut story = Story::not_started();
    story.start_fails("no such file");
    story.passes(secs(1));
    story.started(1);
    story.client(INITIALIZE).child(1, &result(0, &initialize_result("2025-11-25", ALL)));
    story.client(INITIALIZED);
    story.exits(1, code(1));
    story.forget();
    story.client(&ask(1, "prompts/list"));
    story.client_hears_nothing();
}

#[test]
fn b3_a_discover_without_a_server_is_refused_as_a_legacy_server_does() {
    let mut story = Story::not_started();
    story.client(&modern(0, "server/discover", ""));
    story.start_fails("no such file");
    story.client_hears(&[&error(0, -32601, "Method not found")]);
    story.client(&INITIALIZE.replace("\"id\":0", "\"id\":1"));
    let answer = parsed(&story.answer());
    assert_eq!((&answer["id"], &answer["result"]["serverInfo"]["name"]), (&json!(1), &json!("outlast")));
}

#[test]
fn b4_a_modern_client_without_a_server_has_our_tools_and_empty_lists() {
    let mut story = Story::not_started();
    story.client(&modern(1, "tools/list", "")).client(&modern(2, "prompts/list", ""));
    story.client(&modern(3, "tools/call", r#""name":"t""#));
    story.start_fails("no such file");
    let told = story.told_client();
    assert_eq!(told.len(), 2, "the call is held: {told:#?}");
    assert_eq!(tool_names(&told[0]), OURS);
    assert_eq!(parsed(&told[1])["result"]["prompts"], json!([]));
    story.client(&modern(4, "resources/list", ""));
    assert_eq!(parsed(&story.answer())["result"]["resources"], json!([]));
    story.client(&modern(5, "tools/call", r#""name":"server_status""#));
    assert_eq!(parsed(&story.answer())["result"]["isError"], false);
    story.passes(secs(1));
    story.comes_up(1);
    let told = story.told_server(1);
    assert!(told.contains(&modern(3, "tools/call", r#""name":"t""#)), "{told:#?}");
}

#[test]
fn b4_a_modern_client_is_answered_one_second_after_the_first_end() {
    let listen = modern(2, "subscriptions/listen", r#""notifications":{"toolsListChanged":true}"#);
    let mut story = Story::fresh_with(quick);
    story.client(&modern(1, "tools/list", "")).client(&listen).client(&modern(3, "resources/list", ""));
    story.exits(1, code(1));
    story.client(&modern(4, "prompts/list", "")).client(&modern(5, "tools/call", r#""name":"t""#));
    let told = story.told_client();
    assert_eq!(told.len(), 1, "the listen is acknowledged: {told:#?}");
    story.passes(ms(999));
    story.started(2);
    story.client_hears_nothing();
    story.passes(ms(1));
    let told = story.told_client();
    assert_eq!(told.len(), 3, "the call is held or with the new child: {told:#?}");
    assert_eq!(tool_names(&told[0]), OURS);
    assert_eq!(parsed(&told[1])["result"]["resources"], json!([]));
    assert_eq!(parsed(&told[2])["result"]["prompts"], json!([]));
    // The child was sent these requests before; its answers are not forwarded, except the one to the call.
    story.child(2, &result(1, r#"{"tools":[{"name":"late"}]}"#));
    story.client_hears_nothing();
    story.child(2, &result(5, "{}"));
    story.client_hears(&[&result(5, "{}")]);
    story.shakes_hands(2, ALL);
    story.was_done(&["start", "ready 2"]);
    story.answers_private(2, "tools/list", r#"{"tools":[{"name":"t"}]}"#);
    let told = story.told_client();
    assert!(told.len() == 1 && told[0].contains("tools/list_changed"), "{told:#?}");
}

#[test]
fn b4_a_modern_client_of_a_slow_server_has_our_tools_after_a_while() {
    let mut story = Story::fresh();
    story.client(&modern(1, "tools/list", "")).client(&modern(2, "tools/call", r#""name":"t""#));
    story.passes(ms(19_999));
    story.client_hears_nothing();
    story.forget();
    story.passes(ms(1));
    assert_eq!(tool_names(&story.answer()), OURS);
    assert_eq!(story.private_request(1).1, "server/discover");
    story.client(&modern(3, "prompts/list", ""));
    assert_eq!(parsed(&story.answer())["result"]["prompts"], json!([]));
    story.shakes_hands(1, ALL);
    story.was_done(&["ready 1"]);
    story.child(1, &result(2, "{}"));
    story.client_hears(&[&result(2, "{}")]);
}

#[test]
fn b5_other_capabilities_are_accepted_and_lists_that_were_empty_are_announced() {
    let mut story = Story::not_started();
    story.start_fails("no such file");
    story.client(INITIALIZE).client(INITIALIZED);
    story.passes(secs(1));
    story.forget();
    story.comes_up_with(1, r#"{"prompts":{}}"#);
    story.client_hears_nothing();
    story.answers_private(1, "prompts/list", r#"{"prompts":[{"name":"p"}]}"#);
    story.client_hears(&[&note("notifications/prompts/list_changed")]);
    story.client(&ask(1, "resources/list"));
    story.client_hears(&[&result(1, r#"{"resources":[]}"#)]);

    let mut story = Story::legacy_with(r#"{"tools":{}}"#, |_| {});
    story.exits(1, code(1));
    story.passes(secs(1));
    story.comes_up(2);
    story.told_client();
    story.child(2, &note("notifications/prompts/list_changed"));
    story.client_hears_nothing();
    story.client(&ask(1, "prompts/list"));
    assert_eq!(story.told_server(2).last(), Some(&ask(1, "prompts/list")), "relayed if used");
    let noted = story.status()["noted"].to_string();
    assert!(noted.contains("prompts") && noted.contains("reconnect"), "{noted}");
}

#[test]
fn b6_after_a_handshake_by_outlast_an_older_version_is_accepted() {
    let opened = || {
        let mut story = Story::not_started();
        story.start_fails("no such file");
        story.client(INITIALIZE).client(INITIALIZED);
        story.passes(secs(1));
        story.forget();
        story.started(1);
        story
    };
    let mut story = opened();
    story.child(1, &result(private(1), &initialize_result("2025-03-26", "{}")));
    story.was_done(&["ready 1"]);
    assert_eq!(
        story.recorded("conversation_noted"),
        ["The server uses MCP revision 2025-03-26; the client was told 2025-11-25: reconnect the client"]
    );
    // The same again, and then a server with the version that the client was told.
    for (generation, k, version) in [(2, 2, "2025-03-26"), (3, 3, "2025-11-25")] {
        story.exits(generation - 1, code(1));
        story.passes(secs(1));
        story.forget();
        story.started(generation);
        story.child(generation, &result(private(k), &initialize_result(version, "{}")));
        story.was_done(&[&format!("ready {generation}")]);
    }
    for version in ["2026-01-01", "1999-01-01", ""] {
        let mut story = opened();
        story.child(1, &result(private(1), &initialize_result(version, "{}")));
        let did = story.did();
        assert!(did[0].starts_with("stop 1: failed its handshake: speaks "), "{version}: {did:?}");
    }
}

#[test]
fn b2_list_requests_sent_with_the_opening_are_answered_with_it() {
    let mut story = Story::not_started();
    story.client(INITIALIZE).client(INITIALIZED).client(&ask(1, "tools/list")).client(&call(2, "t"));
    story.start_fails("no such file");
    let told = story.told_client();
    assert_eq!(told.len(), 2, "the call is held: {told:#?}");
    assert_eq!(tool_names(&told[1]), OURS);
}

#[test]
fn b3_a_probe_that_outlast_refused_is_not_repeated_to_the_next_child() {
    let initialize = INITIALIZE.replace("\"id\":0", "\"id\":1");
    let mut story = Story::not_started();
    story.client(&modern(0, "server/discover", ""));
    story.start_fails("no such file");
    story.passes(secs(1));
    story.started(1);
    story.child_hears_nothing(1);
    story.forget();
    story.client(&initialize);
    story.child_hears(1, &[&initialize]);
    story.was_done(&[]);
}
