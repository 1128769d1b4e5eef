//! Pages for people and their instruments: the front checks, the owner answers.

use crate::support::{Front, limits, two_people};

#[test]
fn pages_are_answered_by_the_owner() {
    let front = Front::new();
    let mut wire = front.connect();
    let answer = wire.ask("GET /health?verbose=1", &[]);
    assert_eq!((answer.status, answer.body.as_str()), (200, "/health "));
    assert_eq!(front.wait_for("page"), "page GET /health verbose=1 local");
    for path in ["/ready", "/metrics", "/api/state"] {
        assert_eq!(wire.ask(&format!("GET {path}"), &[]).body, format!("{path} "));
    }
    let answer = wire.ask("DELETE /health", &[]);
    assert_eq!((answer.status, answer.header("allow")), (405, Some("GET")));
    let answer = wire.ask("POST /health", &[]);
    assert_eq!((answer.status, answer.header("allow")), (405, Some("GET")));
}

#[test]
fn only_health_is_for_strangers() {
    let front = Front::with(limits(), || Some(two_people()));
    let mut wire = front.connect();
    for (path, status) in [("/health", 200), ("/ready", 200), ("/metrics", 401), ("/api/state", 401)] {
        assert_eq!(wire.ask(&format!("GET {path}"), &[]).status, status, "{path}");
        assert_eq!(wire.ask(&format!("GET {path}"), &[("authorization", "Bearer anna")]).status, 200, "{path}");
    }
    front.wait_for("page GET /metrics  anna");
}

#[test]
fn whoever_watches_hears_what_is_published() {
    let front = Front::new();
    let mut wire = front.connect();
    wire.send_head("GET /api/events", &[("host", "localhost")]);
    assert_eq!(wire.head().header("content-type"), Some("text/event-stream"));
    assert_eq!(wire.chunk().unwrap(), ":\n\n");
    assert_eq!(wire.chunk().unwrap(), "event: hello\ndata: {}\n\n");
}

#[test]
fn one_who_leaves_before_the_answer_is_forgotten() {
    let front = Front::new();
    let mut wire = front.connect();
    wire.send_head("GET /api/never", &[("host", "localhost")]);
    front.wait_for("page GET /api/never");
    drop(wire);
    // The owner never answers, and the front still ends when it is told to: see the support.
    assert_eq!(front.connect().ask("GET /health", &[]).status, 200);
}
