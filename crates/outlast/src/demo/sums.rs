//! The result of the demo as JSON, for programs.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::story::{Story, Sum};

/// The table at the end, and the promises that were broken.
pub(super) fn in_json(story: &Story, now: Instant) -> Value {
    let scenes = story.scenes.iter().map(|scene| {
        let mut row = row(&scene.sum());
        row["title"] = scene.title.into();
        row["at_ms"] = millis(scene.at).into();
        row
    });
    json!({
        "scenes": scenes.collect::<Vec<Value>>(),
        "all": row(&story.sum()),
        "restarts": story.restarts,
        "took_ms": millis(story.elapsed(now)),
        "complaints": story.complaints,
    })
}

fn row(sum: &Sum) -> Value {
    json!({
        "calls": sum.made,
        "answered": sum.answered,
        "failed": sum.failed,
        "lost": sum.waiting,
        "restarts": sum.restarts,
        "longest_pause_ms": millis(sum.pause),
    })
}

/// As precise as it was measured.
fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1_000_000.0).round() / 1000.0
}
