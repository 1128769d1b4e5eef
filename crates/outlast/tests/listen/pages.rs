//! Pages for people and for monitoring: the front checks the request, the owner answers.

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
fn the_status_page_is_public_and_contains_no_data() {
    let front = Front::with(limits(), || Some(two_people()));
    let mut wire = front.connect();
    let answer = wire.ask("GET /", &[]);
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/html; charset=utf-8")));
    let policy = answer.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"), "{policy}");
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
    assert!(answer.body.contains("<title>outlast gateway</title>"));
    assert_eq!(wire.ask("HEAD /", &[]).status, 200);
    assert!(front.heard().is_empty(), "no request reached the owner");
}

#[test]
fn an_operator_request_needs_the_token_of_the_page() {
    let front = Front::new();
    let mut wire = front.connect();
    let answer = wire.ask("GET /api/token", &[]);
    assert_eq!((answer.status, answer.header("cache-control")), (200, Some("no-store")));
    assert_eq!(answer.header("access-control-allow-origin"), None, "no page of another origin may read it");
    let token = answer.json()["token"].as_str().unwrap().to_owned();
    assert_eq!(token.len(), 32);

    let mut order = |headers: &[(&str, &str)]| {
        let mut all = vec![("host", "localhost:7"), ("content-type", "application/json"), ("content-length", "2")];
        all.extend(headers);
        wire.send_head("POST /api/restart", &all);
        wire.send("{}");
        wire.answer()
    };
    let token = ("x-outlast-token", token.as_str());
    assert_eq!(order(&[token]).body, "/api/restart {}");
    assert_eq!(order(&[token, ("origin", "http://localhost:7")]).status, 200);
    assert_eq!(order(&[]).status, 403);
    assert_eq!(order(&[("x-outlast-token", "00000000000000000000000000000000")]).status, 403);
    assert_eq!(order(&[token, ("origin", "http://localhost:8")]).status, 403, "another port is another page");
    assert_eq!(order(&[token, ("sec-fetch-site", "cross-site")]).status, 403);
    let orders = front.heard().iter().filter(|heard| heard.starts_with("page POST /api/restart")).count();
    assert_eq!(orders, 2, "what was refused never reached the owner");
}

#[test]
fn only_health_is_public() {
    let front = Front::with(limits(), || Some(two_people()));
    let mut wire = front.connect();
    for (path, status) in
        [("/health", 200), ("/ready", 200), ("/metrics", 401), ("/api/state", 401), ("/api/token", 401)]
    {
        assert_eq!(wire.ask(&format!("GET {path}"), &[]).status, status, "{path}");
        assert_eq!(wire.ask(&format!("GET {path}"), &[("authorization", "Bearer anna")]).status, 200, "{path}");
    }
    front.wait_for("page GET /metrics  anna");
}

#[test]
fn a_watching_page_gets_published_events() {
    let front = Front::new();
    let mut wire = front.connect();
    wire.send_head("GET /api/events", &[("host", "localhost")]);
    assert_eq!(wire.head().header("content-type"), Some("text/event-stream"));
    assert_eq!(wire.chunk().unwrap(), ":\n\n");
    assert_eq!(wire.chunk().unwrap(), "event: hello\ndata: {}\n\n");
}

#[test]
fn a_page_that_disconnects_before_the_answer_is_dropped() {
    let front = Front::new();
    let mut wire = front.connect();
    wire.send_head("GET /api/never", &[("host", "localhost")]);
    front.wait_for("page GET /api/never");
    drop(wire);
    // The owner never answers, and the front still stops when it is told to: see the support module.
    assert_eq!(front.connect().ask("GET /health", &[]).status, 200);
}
