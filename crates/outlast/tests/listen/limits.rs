//! Limits of bodies, heads, times, connections and sessions. A slow client does not delay the others.

use std::{
    io::Write,
    time::{Duration, Instant},
};

use outlast::gateway::listen::Limits;
use serde_json::json;

use crate::support::{Front, PATIENCE, initialize, limits, request, two_people};

const NEWEST: &str = "2025-11-25";
const SHORT: Duration = Duration::from_millis(100);

#[test]
fn a_body_that_is_too_large_is_refused_before_it_is_read() {
    let front = Front::with(Limits { body_max: 2000, ..limits() }, || None);
    let post = [("host", "localhost"), ("content-type", "application/json")];
    // By the announced length: no byte of it was sent.
    let mut wire = front.connect();
    wire.send_head("POST /mcp", &[post[0], post[1], ("content-length", "2001")]);
    let answer = wire.answer();
    assert_eq!((answer.status, answer.header("connection")), (413, Some("close")));
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("2000 bytes"));
    // By the received bytes, if no length was announced.
    let mut wire = front.connect();
    wire.send_head("POST /mcp", &[post[0], post[1], ("transfer-encoding", "chunked")]);
    for _ in 0..3 {
        wire.send(&format!("{:x}\r\n{}\r\n", 1000, "x".repeat(1000)));
    }
    assert_eq!(wire.answer().status, 413);
    // A body of exactly the limit is accepted, in one chunk or in many.
    let mut wire = front.connect();
    let body = initialize(NEWEST);
    let body = format!("{body}{}", " ".repeat(2000 - body.len()));
    assert_eq!(wire.post(&[], &body).status, 200);
    let mut wire = front.connect();
    wire.send_head("POST /mcp", &[post[0], post[1], ("transfer-encoding", "chunked")]);
    for piece in body.as_bytes().chunks(7) {
        wire.send(&format!("{:x}\r\n{}\r\n", piece.len(), std::str::from_utf8(piece).unwrap()));
    }
    wire.send("0\r\n\r\n");
    assert_eq!(wire.answer().status, 200);
}

#[test]
fn all_bodies_together_are_bounded() {
    let front = Front::with(Limits { bodies_max: 3000, ..limits() }, || None);
    let head = [("host", "localhost"), ("content-type", "application/json"), ("transfer-encoding", "chunked")];
    let mut first = front.connect();
    first.send_head("POST /mcp", &head);
    let piece = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
    first.send(&piece(&" ".repeat(2000)));
    // Until the first chunk is counted, another body of its size has room.
    let status = loop {
        let mut second = front.connect();
        second.send_head("POST /mcp", &head);
        second.send(&piece(&format!("{}{}", " ".repeat(2000), initialize(NEWEST))));
        second.send("0\r\n\r\n");
        let answer = second.answer();
        if answer.status != 200 {
            assert_eq!(answer.header("retry-after"), Some("1"));
            break answer.status;
        }
    };
    assert_eq!(status, 503);
    first.send(&piece(&initialize(NEWEST)));
    first.send("0\r\n\r\n");
    assert_eq!(first.answer().status, 200, "who came first is served");
    let mut third = front.connect();
    assert_eq!(third.post(&[], &initialize(NEWEST)).status, 200, "what was taken is given back");
}

/// A request of this many bytes whose parsing takes long.
fn long_request(id: i32, method: &str, bytes: usize) -> String {
    let start = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{{"arguments":[1"#);
    format!("{start}{}]}}}}", ",1".repeat((bytes - start.len() - 3) / 2))
}

/// Whether another body of 200 bytes is refused because of all bodies together.
fn is_full(front: &Front) -> bool {
    let head = [("host", "localhost"), ("content-type", "application/json"), ("transfer-encoding", "chunked")];
    let mut wire = front.connect();
    wire.send_head("POST /mcp", &head);
    wire.send(&format!("c8\r\n{:200}\r\n0\r\n\r\n", ""));
    match wire.answer().status {
        503 => true,
        400 => false,
        other => panic!("{other}"),
    }
}

#[test]
fn a_body_counts_until_it_is_parsed() {
    let long = long_request(1, "echo", 24 << 20);
    let front = Front::with(Limits { bodies_max: long.len() + 100, body_max: 32 << 20, ..limits() }, || None);
    let (_session, id) = front.session(NEWEST);
    let mut wire = front.connect();
    wire.send_post(&[("mcp-session-id", &id)], &long);
    let until = Instant::now() + PATIENCE;
    while !is_full(&front) {
        assert!(Instant::now() < until, "the whole body never counted");
    }
    // The client leaves.
    drop(wire);
    while is_full(&front) {
        assert!(Instant::now() < until, "it counts for ever");
    }
}

#[test]
fn long_messages_of_some_kinds_are_refused() {
    let front = Front::new();
    let long = " ".repeat(5 << 20);
    let answer = front.connect().post(&[], &initialize(NEWEST).replace("\"t\"", &format!("\"{long}\"")));
    assert_eq!((answer.status, &answer.json()["id"]), (413, &json!(0)));
    for body in [
        format!(r#"[{{"jsonrpc":"2.0","id":1,"method":"ping"}}{long}]"#),
        format!(r#"{{"jsonrpc":"2.0","method":"notifications/initialized"{long}}}"#),
    ] {
        let answer = front.connect().post(&[], &body);
        assert_eq!((answer.status, &answer.json()["id"]), (413, &json!(null)));
    }
}

#[test]
fn messages_of_a_session_do_not_overtake_one_that_is_parsed() {
    let long = long_request(7, "hold", 24 << 20);
    let front = Front::with(Limits { bodies_max: long.len() + 100, body_max: 32 << 20, ..limits() }, || None);
    let ((mut wire, id), (mut other, other_id)) = (front.session(NEWEST), front.session(NEWEST));
    wire.send_post(&[("mcp-session-id", &id)], &long);
    let until = Instant::now() + PATIENCE;
    while !is_full(&front) {
        assert!(Instant::now() < until, "the whole body never counted");
    }
    // Another session does not wait.
    assert_eq!(other.post(&[("mcp-session-id", &other_id)], &request(1, "echo", json!({}))).status, 200);
    let cancel = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}});
    assert_eq!(front.connect().post(&[("mcp-session-id", &id)], &cancel.to_string()).status, 202);
    front.wait_for("said 1 hold");
    front.wait_for("said 1 notifications/cancelled");
    // A cancelled request has no answer.
    assert_eq!(wire.answer().body, "");
}

#[test]
fn responses_that_wait_for_slow_readers_are_bounded_together() {
    const MIB: usize = 1 << 20;
    let front = Front::with(Limits { responses_max: 72 * MIB, ..limits() }, || None);
    // The largest is requested first, so that it has been slow for the longest time.
    let mut slow: Vec<_> = [48, 32, 32]
        .into_iter()
        .map(|size| {
            let (mut wire, id) = front.session(NEWEST);
            wire.send_post(&[("mcp-session-id", &id)], &request(1, "big", json!({"arguments": size * MIB})));
            front.wait_for("said");
            front.wait_for("said");
            (wire, size)
        })
        .collect();
    let (mut largest, _) = slow.remove(0);
    // A client that reads is served meanwhile.
    let (mut other, id) = front.session(NEWEST);
    let answer = other.post(&[("mcp-session-id", &id)], &request(2, "echo", json!({"arguments": 1})));
    assert_eq!(answer.json()["result"], 1);
    assert!(largest.read_to_end() < 48 * MIB, "it was disconnected before it had all of it");
    for (mut wire, size) in slow {
        assert!(wire.answer().body.len() > size * MIB, "the others get what they asked for");
    }
    // Freed memory can be used again.
    let (mut wire, id) = front.session(NEWEST);
    let answer = wire.post(&[("mcp-session-id", &id)], &request(1, "big", json!({"arguments": 48 * MIB})));
    assert!(answer.body.len() > 48 * MIB);
}

#[test]
fn a_head_that_does_not_end_is_disconnected() {
    let front = Front::with(Limits { head_timeout: SHORT, ..limits() }, || None);
    let (mut other, id) = front.session(NEWEST);
    let mut wire = front.connect();
    wire.send("POST /mcp HTTP/1.1\r\nhost: localhost\r\n");
    // A byte now and then does not extend the deadline.
    while wire.tcp.write_all(b"x").is_ok() && wire.tcp.peek(&mut [0]).is_err() {
        std::thread::yield_now();
    }
    assert!(wire.is_closed());
    let answer = other.post(&[("mcp-session-id", &id)], &request(1, "echo", json!({})));
    assert_eq!(answer.status, 200, "other clients are served");
}

#[test]
fn a_body_that_does_not_end_is_refused() {
    let front = Front::with(Limits { body_timeout: SHORT, ..limits() }, || None);
    let mut wire = front.connect();
    let head = [("host", "localhost"), ("content-type", "application/json"), ("content-length", "100")];
    wire.send_head("POST /mcp", &head);
    wire.send("{");
    let answer = wire.answer();
    assert_eq!((answer.status, answer.header("connection")), (408, Some("close")));
    assert!(wire.is_closed());
    // Or one that breaks off.
    let mut wire = front.connect();
    wire.send_head("POST /mcp", &head);
    wire.send("{");
    wire.half_close();
    assert!(wire.is_closed());
    assert!(front.heard().is_empty());
}

#[test]
fn an_idle_connection_is_closed() {
    // Long enough for a busy machine to send a request in between.
    let front = Front::with(Limits { idle_timeout: 15 * SHORT, ..limits() }, || None);
    assert!(front.connect().is_closed(), "before the first request");
    let (mut wire, _) = front.session(NEWEST);
    assert!(wire.is_closed(), "between two");
    // While an answer is outstanding, the connection may be idle.
    let (mut wire, id) = front.session("2025-06-18");
    let session = [("mcp-session-id", id.as_str())];
    wire.send_post(&session, &request(1, "hold", json!({})));
    front.wait_for("said 2 hold");
    assert!(front.connect().is_closed(), "time passes");
    front.connect().post(&session, r#"{"jsonrpc":"2.0","method":"release"}"#);
    assert_eq!(wire.answer().json()["result"], "released");
}

#[test]
fn a_head_that_is_too_large_is_refused() {
    let front = Front::new();
    let mut wire = front.connect();
    let long = "x".repeat(40 << 10);
    wire.send_head("GET /health", &[("host", "localhost"), ("x-long", &long)]);
    assert_eq!(wire.answer().status, 431);
    let many: Vec<_> = (0..150).map(|number| (format!("x-{number}"), "y")).collect();
    let mut many: Vec<_> = many.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    many.push(("host", "localhost"));
    let mut wire = front.connect();
    wire.send_head("GET /health", &many);
    assert_eq!(wire.answer().status, 431);
}

#[test]
fn a_connection_above_the_limit_is_refused() {
    let front = Front::with(Limits { connections_max: 2, ..limits() }, || None);
    let (first, _) = front.session(NEWEST);
    let (_second, _) = front.session(NEWEST);
    let mut third = front.connect();
    third.send_post(&[], &initialize(NEWEST));
    let answer = third.answer();
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("5")));
    drop(first);
    // There is room as soon as the connection is closed.
    while front.connect().post(&[], &initialize(NEWEST)).status != 200 {}
}

#[test]
fn sessions_are_bounded_and_the_longest_idle_is_evicted() {
    let front = Front::with(Limits { sessions_max: 2, ..limits() }, || None);
    let (mut wire, first) = front.session(NEWEST);
    let (_, second) = front.session(NEWEST);
    let ask = |wire: &mut crate::support::Wire, session: &str| {
        wire.post(&[("mcp-session-id", session)], &request(1, "echo", json!({}))).status
    };
    assert_eq!(ask(&mut wire, &first), 200);
    let (_, third) = front.session(NEWEST);
    front.wait_for("left 2");
    assert_eq!((ask(&mut wire, &first), ask(&mut wire, &second), ask(&mut wire, &third)), (200, 404, 200));

    // A session in use stays, and the new client has to wait.
    let mut open = Vec::new();
    for session in [&first, &third] {
        let mut stream = front.connect();
        stream.send_head(
            "GET /mcp",
            &[("host", "localhost"), ("accept", "text/event-stream"), ("mcp-session-id", session)],
        );
        assert_eq!(stream.head().status, 200);
        open.push(stream);
    }
    let answer = wire.post(&[], &initialize(NEWEST));
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("10")));
    assert_eq!((ask(&mut wire, &first), ask(&mut wire, &third)), (200, 200));
}

#[test]
fn no_client_ends_the_session_of_another() {
    let front = Front::with(Limits { sessions_max: 3, sessions_of_client_max: 2, ..limits() }, || Some(two_people()));
    let open = |token: &str| {
        let answer = front.connect().post(&[("authorization", token)], &initialize(NEWEST));
        (answer.status, answer.header("mcp-session-id").unwrap_or_default().to_owned())
    };
    let ask = |token: &str, session: &str| {
        let headers = [("authorization", token), ("mcp-session-id", session)];
        front.connect().post(&headers, &request(1, "echo", json!({}))).status
    };
    let (anna, bert) = ("Bearer anna", "Bearer bert");
    let (_, first) = open(anna);
    let berts: Vec<(u16, String)> = (0..4).map(|_| open(bert)).collect();
    assert!(berts.iter().all(|(status, _)| *status == 200), "{berts:?}");
    // Only a session of the same client was ended: it has two left, and the other client has its own.
    assert_eq!(ask(anna, &first), 200);
    let left: Vec<u16> = berts.iter().map(|(_, id)| ask(bert, id)).collect();
    assert_eq!(left, [404, 404, 200, 200]);
    // All places are taken: a new session evicts one of the same client.
    assert_eq!(open(anna).0, 200);
    assert_eq!((ask(anna, &first), ask(bert, &berts[3].1)), (404, 200));
}

#[test]
fn an_address_with_many_idle_connections_loses_the_oldest() {
    let front = Front::with(Limits { idle_of_address_max: 2, ..limits() }, || None);
    let mut wires: Vec<crate::support::Wire> = Vec::new();
    for _ in 0..4 {
        let mut wire = front.connect();
        assert_eq!(wire.post(&[], &initialize(NEWEST)).status, 200);
        wires.push(wire);
    }
    assert!(wires[0].is_closed() && wires[1].is_closed());
    assert_eq!(wires[3].post(&[], &initialize(NEWEST)).status, 200);
}

/// Connections that arrive together, or that have sent the beginning of a request, count as idle ones do.
#[test]
fn a_flood_of_connections_takes_no_more_places_than_an_address_has() {
    for begun in ["", "POST /mcp HT"] {
        let front = Front::with(Limits { idle_of_address_max: 4, connections_max: 16, ..limits() }, || None);
        let mut flood: Vec<crate::support::Wire> = Vec::new();
        for number in 0..40 {
            let mut wire = front.connect_from(2 + number % 8);
            // The front may have closed it already.
            wire.try_send(begun);
            flood.push(wire);
        }
        let mut wire = front.connect();
        assert_eq!(wire.post(&[], &initialize(NEWEST)).status, 200);
        let mut open = || flood.iter_mut().filter_map(|wire| (!wire.is_closed_now()).then_some(())).count();
        while open() > 3 {}
        assert_eq!(open(), 3, "the others and the last one are the four of the address");
    }
}

#[test]
fn an_unused_session_expires() {
    let front = Front::with(Limits { session_ttl: SHORT, ..limits() }, || None);
    let (mut wire, id) = front.session(NEWEST);
    front.wait_for("left 1");
    let session = [("mcp-session-id", id.as_str())];
    assert_eq!(wire.post(&session, &request(1, "echo", json!({}))).status, 404);

    // A session with an open stream stays, however long it is idle.
    let (client, id, stream) = loop {
        let (_, id) = front.session(NEWEST);
        let client = front.wait_for("came").split(' ').nth(1).unwrap().to_owned();
        let mut stream = front.connect();
        stream
            .send_head("GET /mcp", &[("host", "localhost"), ("accept", "text/event-stream"), ("mcp-session-id", &id)]);
        // On a busy machine it may have ended before.
        if stream.head().status == 200 {
            break (client, id, stream);
        }
    };
    front.session(NEWEST);
    let other = front.wait_for("came").split(' ').nth(1).unwrap().to_owned();
    front.wait_for(&format!("left {other}"));
    let answer = wire.post(&[("mcp-session-id", &id)], &request(1, "echo", json!({})));
    assert_eq!(answer.status, 200, "others came and went");
    drop(stream);
    front.wait_for(&format!("left {client}"));
}

#[test]
fn a_slow_reader_is_disconnected_and_delays_no_other() {
    let front = Front::with(Limits { stream_bytes_max: 1 << 20, ..limits() }, || None);
    let (mut wire, id) = front.session("2025-06-18");
    let session = [("mcp-session-id", id.as_str())];
    // 64 MB in messages of 64 kB each, and it reads none of them.
    let mut slow = front.connect();
    slow.send_post(&session, &request(1, "words", json!({"arguments": [1000, 65536]})));
    front.wait_for("said 1 words");
    let answer = wire.post(&session, &request(2, "echo", json!({"arguments": "at once"})));
    assert_eq!(answer.json()["result"], "at once");
    front.wait_for("all is told");
    slow.head();
    let mut count = 0;
    while slow.chunk().is_some() {
        count += 1;
    }
    assert!(count < 1000, "{count}");
}

#[test]
fn an_unread_answer_is_dropped() {
    let front = Front::with(Limits { write_timeout: SHORT, ..limits() }, || None);
    let (mut wire, id) = front.session(NEWEST);
    let session = [("mcp-session-id", id.as_str())];
    let mut slow = front.connect();
    slow.send_post(&session, &request(1, "big", json!({"arguments": 64 << 20})));
    front.wait_for("said 1 big");
    // It is disconnected while it does not read: of two connections one is left.
    let deadline = Instant::now() + PATIENCE;
    while wire.ask("GET /api/counts", &[]).json() != json!([1, 1, 0]) {
        assert!(Instant::now() < deadline, "it is still there");
        std::thread::sleep(SHORT);
    }
    let (mut count, mut piece) = (0, vec![0; 64 << 10]);
    loop {
        match std::io::Read::read(&mut slow.tcp, &mut piece) {
            Ok(0) | Err(_) => break,
            Ok(more) => count += more,
        }
    }
    assert!(count < 64 << 20, "{count}");
    assert_eq!(wire.post(&session, &request(2, "echo", json!({}))).status, 200);
}
