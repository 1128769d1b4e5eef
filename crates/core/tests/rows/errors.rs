//! The errors of outlast itself (e1-e6), word for word.

use crate::story::*;

#[test]
fn e1_the_server_ended_while_it_was_running() {
    for (how, words, exit) in [
        (code(1), "exit code 1", json!({"code": 1})),
        (How::Exited(Exit::Signal(9)), "signal 9 (SIGKILL)", json!({"signal": 9})),
        (How::ClosedStdout, "closed its stdout", json!({"why": "closed its stdout"})),
    ] {
        let mut story = Story::legacy();
        story.client(&ask(1, "acme/do"));
        for n in 0..12 {
            story.child_logs(1, &format!("line {n}"));
        }
        story.exits(1, how);
        let error = story.client_hears_error(1, 7001, "server_ended", "unknown");
        assert_eq!(
            error["message"],
            format!(
                "The server ended ({words}) while `acme/do` was running; it may or may not have taken effect: check \
                 before repeating it. It starts again in 1.0 s. Last stderr line: line 11"
            )
        );
        let lines: Vec<String> = (2..12).map(|n| format!("line {n}")).collect();
        assert_eq!(
            error["data"],
            json!({"from": "outlast", "reason": "server_ended", "outcome": "unknown", "generation": 1, "exit": exit,
                "stderr": lines, "retry_after_ms": 1000})
        );
    }
}

#[test]
fn e1_stderr_is_quoted_up_to_2_kib() {
    let mut story = Story::legacy();
    story.client(&ask(1, "acme/do"));
    story.child_logs(1, &"a".repeat(1500));
    story.child_logs(1, &"b".repeat(1500));
    story.exits(1, code(1));
    let error = story.client_hears_error(1, 7001, "server_ended", "unknown");
    assert_eq!(error["data"]["stderr"], json!(["a".repeat(548), "b".repeat(1500)]));
}

#[test]
fn e1_a_server_that_is_restarted_at_once_is_being_started() {
    let mut story = Story::legacy();
    story.passes(secs(5));
    story.client(&ask(1, "acme/do"));
    story.exits(1, code(1));
    story.was_done(&["start"]);
    let error = story.client_hears_error(1, 7001, "server_ended", "unknown");
    assert_eq!(error["data"]["retry_after_ms"], 0);
    assert!(error["message"].as_str().is_some_and(|words| words.ends_with("It is being started now.")), "{error}");
}

#[test]
fn e2_the_server_is_down() {
    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.client(&ask(1, "acme/do"));
    story.passes(secs(1));
    story.started(2);
    story.passes(secs(29));
    let error = story.client_hears_error(1, 7002, "server_down", "not_sent");
    assert_eq!(error["message"], "`acme/do` was not run: the server is down (exit code 1). It is being started now.");

    // A pipe took it, so it may have run.
    let mut story = Story::legacy();
    story.client(&ask(1, "resources/read"));
    story.exits(1, code(1));
    story.passes(secs(1));
    story.started(2);
    story.passes(secs(29));
    let error = story.client_hears_error(1, 7002, "server_down", "unknown");
    assert_eq!(
        error["message"],
        "`resources/read` was not answered: the server is down (exit code 1). It is being started now."
    );
}

#[test]
fn e2_is_sent_at_once_if_the_next_try_is_too_late() {
    let far = |settings: &mut Settings| {
        settings.policy.delays = outlast_core::restarts::Delays::Steps(vec![(1, secs(1)), (2, secs(31))]);
    };
    let mut story = Story::legacy_with(ALL, far);
    story.exits(1, code(1));
    story.client(&ask(1, "acme/do"));
    story.passes(secs(1));
    story.started(2);
    story.exits(2, code(1));
    let error = story.client_hears_error(1, 7002, "server_down", "not_sent");
    assert_eq!(error["message"], "`acme/do` was not run: the server is down (exit code 1). It starts again in 31.0 s.");
    assert_eq!(error["data"]["retry_after_ms"], 31_000);
    story.client(&ask(2, "acme/do"));
    story.client_hears_error(2, 7002, "server_down", "not_sent");
}

#[test]
fn e3_the_server_is_not_started_again_by_itself() {
    let mut story = Story::legacy_with(ALL, |settings| settings.policy.restarts_max = Some(1));
    story.exits(1, code(1));
    story.client(&ask(1, "acme/do"));
    story.passes(secs(1));
    story.started(2);
    story.passes(secs(2));
    story.exits(2, code(7));
    let error = story.client_hears_error(1, 7003, "gave_up", "not_sent");
    assert_eq!(
        error["message"],
        "`acme/do` was not run: the server is not running (exit code 7; 2 crashes in 3 s). It is not started again by \
         itself: call `restart_server`."
    );
    assert_eq!(error["data"]["retry_after_ms"], json!(null));
    story.client(&ask(2, "acme/do"));
    story.client_hears_error(2, 7003, "gave_up", "not_sent");
}

#[test]
fn e4_too_many_requests_are_held() {
    let mut story = Story::legacy();
    story.exits(1, code(1));
    for id in 0..256 {
        story.client(&ask(id, "acme/do"));
    }
    story.client_hears_nothing();
    story.client(&ask(256, "acme/do"));
    let error = story.client_hears_error(256, 7004, "hold_full", "not_sent");
    assert_eq!(
        error["message"],
        "`acme/do` was not run: 256 requests are already waiting for the server. It starts again in 1.0 s."
    );
    story.client(&note("acme/n"));
    story.passes(secs(1));
    story.comes_up(2);
    assert_eq!(story.told_server(2).len(), 2 + 256, "the notification was one too many as well");

    let mut story = Story::legacy_with(ALL, |settings| settings.limits.holding.held_bytes_max = 80);
    story.exits(1, code(1));
    story.client(&ask(1, "acme/do")).client(&ask(2, "acme/do"));
    story.client_hears_error(2, 7004, "hold_full", "not_sent");
}

#[test]
fn e5_the_drain_of_the_old_server_is_over() {
    let mut story = Story::legacy();
    story.client(&ask(1, "acme/do"));
    story.reloads();
    story.comes_up(2);
    story.forget();
    story.passes(secs(60));
    let error = story.client_hears_error(1, 7005, "drain_over", "unknown");
    assert_eq!(
        error["message"],
        "The server was reloaded and the old one stopped after 60 s with `acme/do` unfinished; it may or may not have \
         taken effect."
    );
    assert_eq!(error["data"]["generation"], 1);
}

#[test]
fn e6_outlast_is_stopping() {
    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.client(&ask(1, "acme/do"));
    story.client_leaves(ClientEnd::Closed);
    let error = story.client_hears_error(1, 7006, "stopping", "not_sent");
    assert_eq!(error["message"], "`acme/do` was not run: outlast is stopping.");
    assert_eq!(error["data"]["retry_after_ms"], json!(null));

    let mut story = Story::legacy();
    story.client(&ask(1, "acme/do"));
    story.client_leaves(ClientEnd::Closed);
    story.exits(1, How::Stopped);
    let error = story.client_hears_error(1, 7006, "stopping", "unknown");
    assert_eq!(error["message"], "`acme/do` may or may not have taken effect: outlast is stopping.");
}
