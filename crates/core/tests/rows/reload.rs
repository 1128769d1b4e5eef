//! Reload without a gap (r1-r9).

use crate::story::*;

#[test]
fn r1_the_marker_is_on_disk_before_the_old_server_is_touched() {
    let mut story = Story::legacy();
    story.asks_restart(7, Origin::Control, "new code");
    assert_eq!(story.recorded("server_restart_requested"), ["control"]);
    story.was_done(&["mark 1001: new code"]);
    story.marker_is_written();
    assert_eq!(story.recorded("restart_marker_written"), ["restart_marker"]);
    story.was_done(&["start"]);

    let mut story = Story::legacy();
    story.asks_restart(7, Origin::Control, "new code");
    story.did();
    story.marker_is_not_written("read-only file system");
    assert_eq!(story.recorded("restart_marker_failed"), ["read-only file system"]);
    story.was_done(&["start"]);
}

#[test]
fn r2_a_build_runs_first_and_its_failure_keeps_the_old_server() {
    let mut story = Story::legacy_with(ALL, |settings| settings.build = true);
    story.reloads();
    story.was_done(&["mark 1001: new code", "build"]);
    story.happens(Event::BuildEnded(Ok(())));
    story.was_done(&["start"]);

    let mut story = Story::legacy_with(ALL, |settings| settings.build = true);
    story.reloads();
    story.forget();
    story.happens(Event::BuildEnded(Err("error[E0425]\nat line 3".into())));
    let did = story.did();
    assert_eq!(did.len(), 1, "{did:?}");
    let report = parsed(did[0].strip_prefix("refuse 7: ").unwrap_or_default());
    assert_eq!(
        report["error"],
        "The restart failed: the build failed: error[E0425]. The old server (pid 1001) keeps serving."
    );
    assert_eq!(report["stderr_tail"], "at line 3");
    assert_eq!(story.recorded("reload_failed").len(), 1);
    story.client(&call(1, "t"));
    story.child_hears(1, &[&call(1, "t")]);
}

#[test]
fn r3_a_new_server_that_cannot_be_started_leaves_the_old_server() {
    let mut story = Story::legacy();
    story.reloads();
    story.forget();
    story.start_fails("no such file");
    let did = story.did();
    assert!(did[0].starts_with("refuse 7: "), "{did:?}");
    assert!(did[0].contains("could not be started: no such file"), "{did:?}");
    assert_eq!(did.len(), 1);
    assert_eq!(story.recorded("reload_failed").len(), 1);
    story.client(&call(1, "t"));
    story.child_hears(1, &[&call(1, "t")]);
    assert_eq!(story.status()["crashes"], 0, "a failed reload is no crash");
}

#[test]
fn r4_a_new_server_that_fails_its_handshake_leaves_the_old_server() {
    for (answer, words) in [
        (Some(error(private(1), -32603, "no")), "refused the handshake: no"),
        (
            Some(result(private(1), &initialize_result("2024-11-05", "{}"))),
            "speaks 2024-11-05, the client was promised 2025-11-25",
        ),
        (None, "did not finish its handshake in 30 s"),
    ] {
        let mut story = Story::legacy();
        story.reloads();
        story.started(2);
        story.forget();
        match &answer {
            Some(answer) => drop(story.child(2, answer)),
            None => story.passes(secs(30)),
        }
        let did = story.did();
        assert!(did[0].starts_with("stop 2: ") && did[0].contains(words), "{did:?}");
        assert!(did[1].starts_with("refuse 7: ") && did[1].contains(words), "{did:?}");
        assert_eq!(did.len(), 2);
        story.exits(2, How::Stopped);
        story.was_done(&[]);
        story.client(&call(1, "t"));
        story.child_hears(1, &[&call(1, "t")]);
    }
}

#[test]
fn r5_taking_over_is_one_step() {
    let mut story = Story::legacy();
    story.client(&call(1, "slow"));
    story.reloads();
    story.started(2);
    story.client(&call(2, "before"));
    story.child(2, &ask(1, "roots/list"));
    story.forget();
    story.child(2, &result(private(1), &initialize_result("2025-11-25", ALL)));
    story.client_hears(&[&ask(private(2), "roots/list")]);
    story.client(&call(3, "after"));
    story.child_hears(1, &[]);
    story.child_hears(2, &[INITIALIZED, &call(3, "after")]);
    let did = story.did();
    assert_eq!(did[0], "ready 2");
    assert_eq!(story.status()["draining"], 1);
}

#[test]
fn r6_the_old_server_finishes_its_calls() {
    let mut story = Story::legacy();
    story.child(1, &ask(1, "roots/list"));
    story.client(&call(1, "slow")).client(&ask(2, "prompts/list")).client(&call(3, "slower"));
    story.reloads();
    story.comes_up(2);
    story.forget();
    story.passes(secs(30));
    story.child(1, &result(1, "{}"));
    story.client_hears(&[&result(1, "{}")]);
    story.passes(secs(29));
    story.was_done(&[]);
    story.passes(secs(1));
    story.was_done(&["stop 1: was stopped"]);
    let told = story.told_client();
    let text = failed_call(&parsed(&told[0]), 3, "drain_over", "unknown");
    assert_eq!(
        text,
        "The server was reloaded and the old one stopped after 60 s with `slower` unfinished; it may or may not have \
         taken effect."
    );
    assert_eq!(told[1..], [cancelled(1)]);
    story.child_hears(2, &[&ask(2, "prompts/list")]);
    story.child(1, &result(3, "{}"));
    story.client_hears_nothing();
}

#[test]
fn r6_a_restart_waits_while_too_many_finish_their_calls() {
    let mut story = Story::legacy();
    for generation in 2..=3 {
        story.client(&call(generation, "slow"));
        story.reloads();
        story.comes_up(generation);
    }
    assert_eq!(story.status()["draining"], 2);
    story.client(&call(4, "slow"));
    story.forget();
    story.asks_restart(7, Origin::Control, "new code");
    story.was_done(&[]);
    story.passes(secs(4));
    story.was_done(&[]);
    story.child(1, &result(2, "{}"));
    story.client_hears(&[&result(2, "{}")]);
    let did = story.did();
    assert_eq!(did.last().map(String::as_str), Some("mark 1003: new code"), "{did:?}");
    story.child(2, &result(3, "{}"));
    story.marker_is_written();
    story.comes_up(4);
    story.client_hears(&[&result(3, "{}")]);
    assert_eq!(story.status()["draining"], 1);
}

#[test]
fn r6_a_restart_waits_until_its_timeout_or_a_cancellation() {
    for is_cancelled in [false, true] {
        let mut story = Story::legacy();
        for generation in 2..=3 {
            story.client(&call(generation, "slow"));
            story.reloads();
            story.comes_up(generation);
        }
        story.forget();
        story.asks_restart(7, Origin::Control, "new code");
        story.was_done(&[]);
        if is_cancelled {
            story.client(&cancelled(3));
            story.client_hears_nothing();
        } else {
            story.passes(secs(5));
        }
        let did = story.did();
        assert!(did.contains(&"mark 1003: new code".to_owned()), "{did:?}");
    }
}

#[test]
fn r6_a_restart_does_not_wait_for_cancelled_requests() {
    let mut story = Story::legacy();
    for generation in 2..=4 {
        story.client(&call(generation, "slow"));
        story.client(&cancelled(generation));
        story.reloads();
        story.comes_up(generation);
    }
    assert!(story.did().contains(&"stop 1: was stopped".to_owned()));
    story.client_hears_nothing();
    assert_eq!(story.status()["draining"], 2);
}

#[test]
fn r6_a_draining_server_without_calls_does_not_count_toward_the_limit() {
    let mut story = Story::legacy();
    for generation in 2..=3 {
        story.client(&call(generation, "slow"));
        if generation == 3 {
            story.client(&cancelled(2));
        }
        story.reloads();
        story.comes_up(generation);
    }
    story.forget();
    story.reloads();
    story.comes_up(4);
    story.client_hears_nothing();
    assert!(story.did().contains(&"stop 1: was stopped".to_owned()));
    assert_eq!(story.status()["draining"], 1);
}

#[test]
fn r7_the_answer_waits_for_the_comparison_up_to_a_limit() {
    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list")).child(1, &result(1, r#"{"tools":[{"name":"a"}]}"#));
    story.reloads();
    story.comes_up(2);
    story.forget();
    story.passes(ms(4999));
    story.was_done(&[]);
    story.passes(ms(1));
    story.client_hears(&[&note("notifications/tools/list_changed")]);
    let did = story.did();
    assert!(did[0].starts_with("answer 7: "), "{did:?}");
    assert_eq!(parsed(did[0].strip_prefix("answer 7: ").unwrap_or_default())["tools"]["compared"], false);
}

#[test]
fn r8_the_answer_says_how_the_old_server_ends() {
    let mut story = Story::legacy();
    story.client(&call(1, "a")).client(&call(2, "b")).client(&call(3, "c"));
    story.reloads();
    story.passes(ms(120));
    story.started(2);
    story.child_logs(2, "listening");
    story.shakes_hands(2, ALL);
    let did = story.did();
    let report = parsed(did.last().and_then(|did| did.strip_prefix("answer 7: ")).unwrap_or_default());
    assert_eq!((&report["old_pid"], &report["new_pid"]), (&json!(1001), &json!(1002)));
    assert_eq!((&report["generation"], &report["took_ms"]), (&json!(2), &json!(120)));
    assert_eq!(report["ended"], json!(null));
    assert!(report["draining"].as_str().is_some_and(|words| words.starts_with("3 calls left")), "{report}");
    assert_eq!(report["stderr_tail"], "listening");
}

#[test]
fn r9_a_server_that_cannot_run_twice_is_stopped_first() {
    let mut story = Story::legacy_with(ALL, |settings| settings.reload = Reload::Replace);
    story.client(&call(1, "slow"));
    story.reloads();
    story.was_done(&["mark 1001: new code"]);
    story.client(&call(2, "held"));
    assert_eq!(story.told_server(1), [call(1, "slow")]);
    story.child(1, &result(1, "{}"));
    story.client_hears(&[&result(1, "{}")]);
    story.was_done(&["stop 1: was stopped"]);
    story.exits(1, How::Stopped);
    story.was_done(&["start"]);
    story.comes_up(2);
    assert_eq!(story.told_server(2).last(), Some(&call(2, "held")));
    let did = story.did();
    assert_eq!(did[0], "ready 2");
    let report = parsed(did[1].strip_prefix("answer 7: ").unwrap_or_default());
    assert_eq!(report["ended"], "was stopped");
}

#[test]
fn r9_a_failed_new_server_leaves_no_old_server() {
    let mut story = Story::legacy_with(ALL, |settings| settings.reload = Reload::Replace);
    story.reloads();
    story.exits(1, How::Stopped);
    story.started(2);
    story.forget();
    story.exits(2, code(1));
    let did = story.did();
    assert!(did[0].starts_with("refuse 7: ") && did[0].contains("No server is serving."), "{did:?}");
    story.passes(secs(1));
    story.was_done(&["start"]);
}

/// Only the client that requested a reload gets its result, so the status shows it, too.
#[test]
fn r8_the_status_shows_the_result_of_the_last_reload() {
    let mut story = Story::legacy();
    assert!(story.status()["last_reload"].is_null());
    story.asks_restart(0, Origin::Watch, "changed: server.py");
    story.marker_is_written();
    story.started(2);
    story.child_logs(2, "SyntaxError");
    story.exits(2, code(1));
    let last = &story.status()["last_reload"];
    assert_eq!((&last["ok"], &last["reason"]), (&false.into(), &"changed: server.py".into()));
    assert_eq!(last["error"], "the new server ended before it was ready (exit code 1)");
    assert_eq!(last["stderr_tail"], "SyntaxError");
    story.reloads();
    story.comes_up(3);
    assert_eq!(story.status()["last_reload"]["ok"], true);
}
