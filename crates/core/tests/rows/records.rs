//! What operators see: records with numbers to query, a marker that names the old server, a count of crashes.

use crate::story::*;

/// Gives up at the first crash.
fn hopeless(settings: &mut Settings) {
    settings.policy = Policy { restarts_max: Some(0), ..Policy::exponential() };
}

#[test]
fn giving_up_names_the_server_and_its_end() {
    let mut story = Story::legacy_with(ALL, hopeless);
    story.exits(1, code(9));
    let record = story.record("gave_up");
    assert_eq!((record.pid, record.generation, record.exit_code), (Some(1001), Some(1), Some(9)));
    assert_eq!((record.crashes, record.detail.as_deref()), (Some(1), Some("1 crash")));
}

#[test]
fn a_throttled_restart_names_the_server_and_its_end() {
    let mut story = Story::legacy();
    story.exits(1, code(42));
    story.comes_up(2);
    story.forget();
    story.exits(2, code(42));
    let record = story.record("restart_throttled");
    assert_eq!((record.pid, record.generation, record.exit_code), (Some(1002), Some(2), Some(42)));
    assert_eq!(record.delay, Some(secs(1)));
}

#[test]
fn a_restart_names_the_generation_it_replaces() {
    let mut story = Story::legacy();
    story.reloads();
    assert_eq!(story.record("restart_marker_written").generation, Some(1));
    story.start_fails("no");
    assert_eq!(story.record("reload_failed").generation, Some(1));
}

#[test]
fn the_marker_names_the_old_server_even_if_that_is_gone() {
    let mut story = Story::legacy_with(ALL, hopeless);
    story.exits(1, code(9));
    story.forget();
    story.asks_restart(7, Origin::Control, "mended");
    story.was_done(&["mark 1001: mended"]);
    assert_eq!(story.record("server_restart_requested").pid, Some(1001));
}

#[test]
fn a_restart_keeps_the_count_of_crashes_and_forgiveness_clears_it() {
    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.asks_restart(7, Origin::Control, "now");
    story.marker_is_written();
    story.comes_up(2);
    assert_eq!(story.status()["crashes"], 1);
    story.exits(2, code(1));
    assert_eq!(story.status()["crashes"], 2);
    story.happens(Event::Forgiven);
    assert_eq!(story.status()["crashes"], 0);
}

#[test]
fn lines_that_are_not_json_are_counted() {
    let mut story = Story::legacy();
    assert_eq!(story.status().get("stdout_not_json"), None);
    story.child(1, "Welcome!").child(1, "Listening on stdio");
    assert_eq!(story.status()["stdout_not_json"], 2);
}
