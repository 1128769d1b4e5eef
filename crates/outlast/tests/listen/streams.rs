//! Streams of the handshake era: messages before an answer, messages of no request, and resumption.

use std::time::Duration;

use serde_json::json;

use crate::support::{Front, Wire, limits, request};

const NEWEST: &str = "2025-11-25";
const BEFORE: &str = "2025-06-18";

fn listen(front: &Front, session: &str, last: Option<&str>) -> Wire {
    let mut wire = front.connect();
    let mut headers = vec![("host", "localhost"), ("accept", "text/event-stream"), ("mcp-session-id", session)];
    headers.extend(last.map(|last| ("last-event-id", last)));
    wire.send_head("GET /mcp", &headers);
    wire
}

fn release(wire: &mut Wire, session: &str) {
    let answer = wire.post(&[("mcp-session-id", session)], r#"{"jsonrpc":"2.0","method":"release"}"#);
    assert_eq!(answer.status, 202);
}

#[test]
fn messages_of_a_request_precede_its_answer() {
    let front = Front::new();
    for (version, is_primed) in [(NEWEST, true), (BEFORE, false)] {
        let (mut wire, id) = front.session(version);
        wire.send_post(&[("mcp-session-id", &id)], &request(1, "words", json!({"arguments": [2, 1]})));
        let head = wire.head();
        assert_eq!((head.status, head.header("content-type")), (200, Some("text/event-stream")));
        let mut ids = Vec::new();
        if is_primed {
            let (id, data) = wire.event().unwrap();
            assert!(data.is_null(), "an id to come back to, before anything can be lost");
            ids.push(id);
        }
        for number in ["0 x", "1 x"] {
            let (id, event) = wire.event().unwrap();
            assert_eq!(event["params"]["data"], number);
            ids.push(id);
        }
        let (last, event) = wire.event().unwrap();
        assert_eq!(event, json!({"jsonrpc": "2.0", "id": 1, "result": 2}));
        ids.push(last);
        assert_eq!(wire.event(), None, "the answer ends the stream");
        let count = ids.len();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), count, "each event has an id of its own");
    }
}

#[test]
fn a_server_request_uses_the_stream_of_its_request() {
    let front = Front::new();
    let (mut wire, id) = front.session(BEFORE);
    let session = [("mcp-session-id", id.as_str())];
    let mut other = front.connect();
    other.send_post(&session, &request(9, "ask back", json!({})));
    other.head();
    let (_, asked) = other.event().unwrap();
    assert_eq!(asked["method"], "ping");
    let response = json!({"jsonrpc": "2.0", "id": asked["id"], "result": {"fine": true}}).to_string();
    assert_eq!(wire.post(&session, &response).status, 202);
    assert_eq!(other.event().unwrap().1, json!({"jsonrpc": "2.0", "id": 9, "result": {"fine": true}}));
    assert_eq!(other.event(), None);
}

#[test]
fn messages_of_no_request_wait_for_the_get_stream() {
    let front = Front::new();
    let (mut wire, id) = front.session(BEFORE);
    let session = [("mcp-session-id", id.as_str())];
    let say = |wire: &mut Wire, text: &str| {
        assert_eq!(wire.post(&session, &request(1, "say to all", json!({"arguments": text}))).status, 200);
    };
    say(&mut wire, "before a stream was open");
    let mut first = listen(&front, &id, None);
    assert_eq!(first.head().header("content-type"), Some("text/event-stream"));
    assert_eq!(first.event().unwrap().1["params"]["data"], "\"before a stream was open\"");
    say(&mut wire, "live");
    let (seen, event) = first.event().unwrap();
    assert_eq!(event["params"]["data"], "\"live\"");

    // A second stream takes over, and no message is sent twice.
    let mut second = listen(&front, &id, None);
    second.head();
    say(&mut wire, "to the newest");
    assert_eq!(second.event().unwrap().1["params"]["data"], "\"to the newest\"");

    // It disconnected without reading the last message, which is sent again on resumption.
    drop(second);
    drop(first);
    say(&mut wire, "while no stream was open");
    let mut third = listen(&front, &id, Some(&seen));
    third.head();
    assert_eq!(third.event().unwrap().1["params"]["data"], "\"to the newest\"");
    assert_eq!(third.event().unwrap().1["params"]["data"], "\"while no stream was open\"");
}

#[test]
fn a_broken_stream_is_resumed_where_it_ended() {
    let front = Front::new();
    let (mut wire, id) = front.session(NEWEST);
    let session = [("mcp-session-id", id.as_str())];
    let mut call = front.connect();
    call.send_post(&session, &request(1, "hold after a word", json!({})));
    call.head();
    let (primed, _) = call.event().unwrap();
    let (first, _) = call.event().unwrap();
    drop(call);

    // A disconnect does not cancel: the machine continues, and its answer is kept.
    let mut again = listen(&front, &id, Some(&primed));
    again.head();
    assert_eq!(again.event().unwrap().0, first, "what was missed comes again");
    drop(again);
    release(&mut wire, &id);
    let mut again = listen(&front, &id, Some(&first));
    assert_eq!(again.head().status, 200);
    assert_eq!(again.event().unwrap().1["result"], "released");
    assert_eq!(again.event(), None, "and that is its end");
    assert!(front.heard().iter().all(|heard| !heard.starts_with("left")));

    // A stream that is resumed while it is open continues there, and the old connection is closed.
    let mut call = front.connect();
    call.send_post(&session, &request(2, "hold after a word", json!({})));
    call.head();
    let (primed, _) = call.event().unwrap();
    call.event().unwrap();
    let mut again = listen(&front, &id, Some(&primed));
    again.head();
    assert_eq!(again.event().unwrap().1["params"]["data"], "first");
    assert_eq!(call.event(), None);
    release(&mut wire, &id);
    assert_eq!(again.event().unwrap().1["id"], 2);

    for (last, status) in [("nonsense", 400), ("77-1", 400), ("", 400), (primed.as_str(), 200)] {
        let mut wire = listen(&front, &id, Some(last));
        assert_eq!(wire.head().status, status, "{last:?}");
    }
}

#[test]
fn events_kept_for_a_session_are_bounded() {
    let front = Front::with(outlast::gateway::listen::Limits { events_max: 3, ..limits() }, || None);
    let (mut wire, id) = front.session(BEFORE);
    for text in ["a", "b", "c", "d", "e"] {
        let body = request(1, "say to all", json!({"arguments": text}));
        assert_eq!(wire.post(&[("mcp-session-id", &id)], &body).status, 200);
    }
    let mut general = listen(&front, &id, Some("0-0"));
    general.head();
    for text in ["\"c\"", "\"d\"", "\"e\""] {
        assert_eq!(general.event().unwrap().1["params"]["data"], text);
    }
}

#[test]
fn events_kept_for_all_sessions_are_bounded() {
    let limits = outlast::gateway::listen::Limits { events_total_max: 3000, ..limits() };
    let front = Front::with(limits, || None);
    let (mut wire, small) = front.session(BEFORE);
    let (_, large) = front.session(BEFORE);
    let mut say = |session: &str, text: &str| {
        let body = request(1, "say to all", json!({"arguments": text}));
        assert_eq!(wire.post(&[("mcp-session-id", session)], &body).status, 200);
    };
    say(&small, "kept");
    for _ in 0..10 {
        say(&large, &"x".repeat(500));
    }
    let mut general = listen(&front, &small, None);
    general.head();
    assert_eq!(general.event().unwrap().1["params"]["data"], "\"kept\"", "who keeps most forgets first");
    let mut general = listen(&front, &large, None);
    general.head();
    let (first, _) = general.event().unwrap();
    assert!(first.split_once('-').unwrap().1.parse::<u32>().unwrap() > 5, "{first}");
}

#[test]
fn a_long_request_becomes_a_stream() {
    let limits = outlast::gateway::listen::Limits {
        quiet: Duration::from_millis(50),
        ping: Duration::from_millis(50),
        ..limits()
    };
    let front = Front::with(limits, || None);
    let (mut wire, id) = front.session(NEWEST);
    let mut call = front.connect();
    call.send_post(&[("mcp-session-id", &id)], &request(1, "hold", json!({})));
    assert_eq!(call.head().header("content-type"), Some("text/event-stream"));
    let (primed, data) = call.event().unwrap();
    assert!(data.is_null());
    assert_eq!(call.chunk().unwrap(), ":\n\n", "a sign of life");
    drop(call);
    release(&mut wire, &id);
    let mut again = listen(&front, &id, Some(&primed));
    again.head();
    assert_eq!(again.event().unwrap().1["result"], "released", "nothing is lost");
    // The stateless era has streams too, but no resumption.
    let mut wire = front.connect();
    let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28",
                      "io.modelcontextprotocol/clientCapabilities": {}});
    let headers = [("mcp-protocol-version", "2026-07-28"), ("mcp-method", "hold")];
    wire.send_post(&headers, &request(1, "hold", json!({"_meta": meta})));
    assert_eq!(wire.head().header("content-type"), Some("text/event-stream"));
    assert_eq!(wire.chunk().unwrap(), ":\n\n");
}

#[test]
fn an_answer_to_a_closed_connection_is_dropped() {
    let front = Front::new();
    let (mut wire, id) = front.session(NEWEST);
    let mut call = front.connect();
    call.send_post(&[("mcp-session-id", &id)], &request(1, "hold", json!({})));
    front.wait_for("said 1 hold");
    drop(call);
    // The connection has ended when another one can take its place.
    release(&mut wire, &id);
    let answer = wire.post(&[("mcp-session-id", &id)], &request(1, "echo", json!({"arguments": 1})));
    assert_eq!(answer.json()["result"], 1, "the id is free, and the session goes on");
}

/// A cancelled request gets no answer, so the front must end its POST.
#[test]
fn a_cancelled_request_ends_without_an_answer() {
    let front = Front::new();
    let (mut wire, id) = front.session(NEWEST);
    let session = [("mcp-session-id", id.as_str())];
    let cancel =
        |id: &str| format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#);

    // No message was sent for it yet.
    let mut held = front.connect();
    held.send_post(&session, &request(5, "hold", json!({})));
    front.wait_for("said 1 hold");
    assert_eq!(wire.post(&session, &cancel("\"5\"")).status, 202, "a string is another id");
    assert_eq!(wire.post(&session, &request(5, "echo", json!({}))).status, 400, "it is still in flight");
    assert_eq!(wire.post(&session, &cancel("5")).status, 202);
    front.wait_for("said 1 notifications/cancelled");
    let head = held.head();
    assert_eq!((head.status, head.header("content-type")), (200, Some("text/event-stream")));
    assert_eq!(held.event(), None);
    assert_eq!(wire.post(&session, &request(5, "echo", json!({}))).status, 200, "the id is free again");

    // It is a stream already: a client that resumed it would wait for ever.
    let mut held = front.connect();
    held.send_post(&session, &request(6, "hold after a word", json!({})));
    assert_eq!(held.head().header("content-type"), Some("text/event-stream"));
    held.event().unwrap();
    let (first, _) = held.event().unwrap();
    wire.post(&session, &cancel("6"));
    assert_eq!(held.event(), None);
    assert_eq!(listen(&front, &id, Some(&first)).head().status, 400);

    // The machine's answer is too late, and is dropped.
    release(&mut wire, &id);
    assert_eq!(wire.post(&session, &request(7, "echo", json!({"arguments": 1}))).json()["result"], 1);
}

#[test]
fn only_the_cancelled_requests_of_a_batch_have_no_answer() {
    let front = Front::new();
    let (mut wire, id) = front.session("2025-03-26");
    let session = [("mcp-session-id", id.as_str())];
    let mut held = front.connect();
    let batch = format!("[{},{}]", request(1, "echo", json!({"arguments": 1})), request(2, "hold", json!({})));
    held.send_post(&session, &batch);
    front.wait_for("said 1 hold");
    wire.post(&session, r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":2}}"#);
    assert_eq!(held.answer().json(), json!([{"jsonrpc": "2.0", "id": 1, "result": 1}]));
}
