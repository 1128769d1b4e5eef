//! Lines that wait for a server that does not read (u1 to u3), and the limit that e4 names.

use serde_json::Value;

use crate::story::*;

const MIB: usize = 1 << 20;

/// A call waits on child 1, whose queue has been at the bound for a second.
fn stalled() -> Story {
    let mut story = Story::legacy();
    story.client(&call(1, "t"));
    story.queue_is(1, 8 * MIB);
    story.passes(secs(1));
    story.forget();
    story
}

#[test]
fn u1_a_server_that_reads_slows_the_client_down() {
    let mut story = Story::legacy();
    story.queue_is(1, 8 * MIB - 1);
    assert!(story.reads_client());
    story.queue_is(1, 9 * MIB);
    assert!(!story.reads_client(), "backpressure");
    for left in (8 * MIB..9 * MIB).rev().step_by(100 << 10) {
        story.passes(ms(900));
        story.queue_is(1, left);
        assert!(!story.reads_client(), "it still reads, however slowly");
    }
    story.client(&call(1, "t"));
    story.child_hears_last(1, &call(1, "t"));
    story.queue_is(1, 0);
    assert!(story.reads_client());
}

#[test]
fn u2_requests_for_a_server_that_reads_nothing_are_refused_and_the_client_is_read() {
    let mut story = stalled();
    assert!(story.reads_client());
    story.client(&ask(2, "acme/do"));
    let error = story.client_hears_error(2, 7004, "hold_full", "not_sent");
    assert_eq!(
        error["message"],
        "`acme/do` was not run: 8 MiB are already waiting for the server, which does not read its stdin. Call \
         `restart_server` to replace it."
    );
    assert_eq!(error["data"]["limit"], "queued_bytes_max");
    assert_eq!((&error["data"]["generation"], &error["data"]["exit"]), (&1.into(), &Value::Null), "it runs");
    story.client(&call(3, "t"));
    assert_eq!(parsed(&story.answer())["result"]["_meta"]["outlast/failure"]["limit"], "queued_bytes_max");
    story.client(&call(4, "server_status"));
    let status = parsed(&story.answer());
    assert_eq!(status["result"]["structuredContent"]["queued_bytes"], 8 * MIB);
    story.forget();
    story.client(&cancel(1));
    story.child_hears(1, &[&cancel(1), &ask(private(1), "ping")]);

    story.queue_is(1, 32 * MIB);
    assert!(!story.reads_client(), "the second bound");
    story.queue_is(1, 31 * MIB);
    assert!(story.reads_client());
    story.client(&ask(5, "acme/do"));
    story.client_hears_error(5, 7004, "hold_full", "not_sent");
    story.queue_is(1, MIB);
    story.client(&ask(6, "acme/do"));
    story.child_hears(1, &[&ask(6, "acme/do")]);
}

#[test]
fn u2_the_error_is_about_the_server_that_runs() {
    let mut story = Story::legacy();
    story.exits(1, code(3));
    story.comes_up(2);
    story.client(&call(1, "t"));
    story.queue_is(2, 8 * MIB);
    story.passes(secs(1));
    story.forget();
    story.client(&ask(2, "acme/do"));
    let data = story.client_hears_error(2, 7004, "hold_full", "not_sent")["data"].take();
    assert_eq!((&data["generation"], &data["exit"]), (&2.into(), &Value::Null), "{data}");
}

#[test]
fn u3_the_queue_of_a_replaced_server_goes_to_the_new_one_in_client_order() {
    let mut story = Story::legacy();
    story.client(&call(1, "begun")).client(&call(2, "left")).client(&call(3, "gone")).client(&note("acme/left"));
    story.client(&cancel(3)).client(&ask(4, "left/list"));
    story.reloads();
    story.forget();
    story.comes_up(2);
    story.forget();
    story.gives_back(1, &["left", "gone"]);
    story.child_hears(2, &[&call(2, "left"), &note("acme/left"), &ask(4, "left/list")]);
    story.client_hears_nothing();
    story.was_done(&[]);
    // It may still answer requests that it has read; then it has nothing left to do.
    story.child(1, &result(1, "{}"));
    story.client_hears(&[&result(1, "{}")]);
    story.was_done(&["stop 1: was stopped"]);
    story.child(2, &result(2, "{}"));
    story.client_hears(&[&result(2, "{}")]);
}

#[test]
fn u3_a_replaced_server_with_only_queued_requests_is_stopped_at_once() {
    let mut story = stalled();
    story.reloads();
    story.forget();
    story.comes_up(2);
    story.gives_back(1, &["tools/call"]);
    assert!(story.did().contains(&"stop 1: was stopped".to_owned()));
    story.child_hears_last(2, &call(1, "t"));
    assert!(story.reads_client(), "the queue of a child that is being stopped does not count");
}

#[test]
fn u3_with_reload_replace_only_a_stalled_server_gives_its_queue_back() {
    for stalls in [false, true] {
        let mut story = Story::legacy_with(ALL, |settings| settings.reload = Reload::Replace);
        story.client(&call(1, "t"));
        if stalls {
            story.queue_is(1, 8 * MIB);
            story.passes(secs(1));
        }
        story.forget();
        story.reloads();
        assert_eq!(story.is_asked_back(1), stalls);
    }
}

#[test]
fn e4_names_the_limit_that_was_reached() {
    let table = [
        (1, 8 * MIB, "held_max", "1 request is already waiting for the server"),
        (256, 80, "held_bytes_max", "it does not fit into the 80 bytes that can wait for the server"),
    ];
    for (count, bytes, limit, words) in table {
        let mut story = Story::legacy_with(ALL, |settings| {
            settings.limits.holding.held_max = count;
            settings.limits.holding.held_bytes_max = bytes;
        });
        story.exits(1, code(1));
        story.client(&ask(1, "acme/do")).client(&ask(2, "acme/do"));
        let error = story.client_hears_error(2, 7004, "hold_full", "not_sent");
        let message = error["message"].as_str().unwrap_or_default();
        assert_eq!((error["data"]["limit"].as_str(), message.contains(words)), (Some(limit), true), "{message}");
    }
}
