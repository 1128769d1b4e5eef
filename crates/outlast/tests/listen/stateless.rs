//! The stateless era: each POST is independent.

use serde_json::{Value, json};

use crate::support::{Answer, Front, Wire, request};

const VERSION: &str = "2026-07-28";

fn meta(version: &str) -> Value {
    json!({"io.modelcontextprotocol/protocolVersion": version, "io.modelcontextprotocol/clientCapabilities": {}})
}

fn ask(id: impl Into<Value>, method: &str, mut params: Value) -> String {
    params["_meta"] = meta(VERSION);
    request(id, method, params)
}

fn headers(method: &str) -> Vec<(&str, &str)> {
    vec![("mcp-protocol-version", VERSION), ("mcp-method", method)]
}

fn post(wire: &mut Wire, method: &str, params: Value) -> Answer {
    wire.post(&headers(method), &ask(1, method, params))
}

#[test]
fn a_request_is_answered_and_its_client_is_dropped() {
    let front = Front::new();
    let mut wire = front.connect();
    let answer = wire.post(&headers("echo"), &ask("a", "echo", json!({"arguments": 5})));
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
    assert_eq!(answer.json(), json!({"jsonrpc": "2.0", "id": "a", "result": 5}));
    assert_eq!(front.wait_for("came"), "came 1 Request local");
    front.wait_for("left 1");
    // The same id again, at once: the requests are independent.
    assert_eq!(wire.post(&headers("echo"), &ask("a", "echo", json!({"arguments": 6}))).json()["result"], 6);
    front.wait_for("left 2");
}

#[test]
fn headers_and_body_must_agree() {
    let front = Front::new();
    let mut wire = front.connect();
    let version = ("mcp-protocol-version", VERSION);
    let call = ask(7, "tools/call", json!({"name": "ä", "arguments": {}}));
    let method = ("mcp-method", "tools/call");
    let table: &[(&[(&str, &str)], u16)] = &[
        (&[version, method, ("mcp-name", "=?base64?w6Q=?=")], 200),
        (&[version, method, ("mcp-name", "a")], 400),
        (&[version, method], 400),
        (&[version, ("mcp-method", "tools/list"), ("mcp-name", "=?base64?w6Q=?=")], 400),
        (&[version, ("mcp-name", "=?base64?w6Q=?=")], 400),
        (&[method, ("mcp-name", "=?base64?w6Q=?=")], 400),
        (&[("mcp-protocol-version", "2025-11-25"), method, ("mcp-name", "=?base64?w6Q=?=")], 400),
    ];
    for (headers, status) in table {
        let answer = wire.post(headers, &call);
        assert_eq!(answer.status, *status, "{headers:?} {answer:?}");
        assert_eq!(answer.code(), (*status == 400).then_some(-32020), "{headers:?}");
        assert_eq!(answer.json()["id"], 7, "the error names its request");
    }
    let mirrored = ask(7, "tools/call", json!({"name": "mirrored", "arguments": {"region": "eu"}}));
    let usual = [version, method, ("mcp-name", "mirrored")];
    let post = |wire: &mut Wire, region: Option<&str>| {
        let mut headers = usual.to_vec();
        headers.extend(region.map(|region| ("mcp-param-region", region)));
        wire.post(&headers, &mirrored)
    };
    assert_eq!(post(&mut wire, Some("eu")).status, 200);
    assert_eq!(post(&mut wire, Some("us")).code(), Some(-32020));
    assert_eq!(post(&mut wire, None).code(), Some(-32020));
}

#[test]
fn the_meta_must_be_complete_and_of_a_known_revision() {
    let front = Front::new();
    let mut wire = front.connect();
    let answer = wire.post(&headers("echo"), &request(1, "echo", json!({})));
    assert_eq!((answer.status, answer.code()), (400, Some(-32602)));
    let half = json!({"_meta": {"io.modelcontextprotocol/protocolVersion": VERSION}});
    assert_eq!(wire.post(&headers("echo"), &request(1, "echo", half)).code(), Some(-32602));

    let future = request(1, "echo", json!({"_meta": meta("2030-01-01")}));
    let answer = wire.post(&[("mcp-protocol-version", "2030-01-01"), ("mcp-method", "echo")], &future);
    assert_eq!((answer.status, answer.code()), (400, Some(-32022)));
    assert_eq!(answer.json()["error"]["data"], json!({"supported": [VERSION], "requested": "2030-01-01"}));

    let initialize = crate::support::initialize("2025-11-25");
    assert_eq!(wire.post(&headers("initialize"), &initialize).code(), Some(-32020), "which era is it?");
    assert!(front.heard().is_empty(), "none of this reached the machine");
}

#[test]
fn the_error_code_sets_the_status() {
    let front = Front::new();
    let mut wire = front.connect();
    for (code, status) in [(-32601, 404), (-32021, 400), (-32022, 400), (-32602, 200), (-32603, 200), (17, 200)] {
        let answer = post(&mut wire, "fail", json!({"arguments": code}));
        assert_eq!((answer.status, answer.code()), (status, Some(code)), "{code}");
    }
}

#[test]
fn there_are_no_sessions() {
    let front = Front::new();
    let mut wire = front.connect();
    for start in ["GET /mcp", "DELETE /mcp"] {
        let answer = wire.ask(start, &[("mcp-protocol-version", VERSION), ("mcp-session-id", "x")]);
        assert_eq!((answer.status, answer.header("allow")), (405, Some("POST")), "{start}");
    }
    let mut with_session = headers("echo");
    with_session.extend([("mcp-session-id", "nonsense"), ("last-event-id", "1-1")]);
    let answer = wire.post(&with_session, &ask(1, "echo", json!({"arguments": 1})));
    assert_eq!((answer.status, answer.header("mcp-session-id")), (200, None), "what means nothing is ignored");

    let version = [("mcp-protocol-version", VERSION)];
    let note = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#;
    assert_eq!(wire.post(&version, note).status, 202);
    assert_eq!(wire.post(&version, r#"{"jsonrpc":"2.0","id":1,"result":{}}"#).code(), Some(-32600));
    assert_eq!(wire.post(&version, &format!("[{}]", ask(1, "echo", json!({})))).code(), Some(-32600));
}

#[test]
fn a_message_before_the_answer_starts_a_stream() {
    let front = Front::new();
    let mut wire = front.connect();
    wire.send_post(&headers("words"), &ask(1, "words", json!({"arguments": [2, 3]})));
    let head = wire.head();
    assert_eq!((head.status, head.header("content-type")), (200, Some("text/event-stream")));
    assert_eq!(head.header("x-accel-buffering"), Some("no"));
    for number in 0..2 {
        let (id, event) = wire.event().unwrap();
        assert_eq!((id.as_str(), event["params"]["data"].as_str()), ("", Some(format!("{number} xxx").as_str())));
    }
    assert_eq!(wire.event().unwrap().1, json!({"jsonrpc": "2.0", "id": 1, "result": 2}));
    assert_eq!(wire.event(), None);
    front.wait_for("left 1");
    assert_eq!(post(&mut wire, "echo", json!({"arguments": 1})).status, 200, "the connection goes on");
}

#[test]
fn a_disconnect_cancels_the_request() {
    let front = Front::new();
    // Before the first message.
    let mut wire = front.connect();
    wire.send_post(&headers("hold"), &ask(1, "hold", json!({})));
    front.wait_for("said 1 hold");
    drop(wire);
    front.wait_for("left 1");
    // During a stream.
    let mut wire = front.connect();
    wire.send_post(&headers("hold after a word"), &ask(1, "hold after a word", json!({})));
    wire.head();
    wire.event().unwrap();
    drop(wire);
    front.wait_for("left 2");
    // A client that only closes its sending side has cancelled too: it looks the same as one that is gone.
    let mut wire = front.connect();
    wire.send_post(&headers("hold"), &ask(1, "hold", json!({})));
    front.wait_for("said 3 hold");
    wire.half_close();
    front.wait_for("left 3");
    assert!(wire.is_closed());
}

#[test]
fn a_disconnect_is_noticed_behind_the_beginning_of_another_request() {
    let front = Front::new();
    for client in 1..=2 {
        let mut wire = front.connect();
        wire.send_post(&headers("hold"), &ask(1, "hold", json!({})));
        front.wait_for(&format!("said {client} hold"));
        wire.send("POST /mcp HT");
        drop(wire);
        front.wait_for(&format!("left {client}"));
    }
    // Requests that follow at once are answered, one after the other.
    let mut wire = front.connect();
    for _ in 0..3 {
        wire.send_post(&headers("echo"), &ask(1, "echo", json!({})));
    }
    for _ in 0..3 {
        assert_eq!(wire.answer().status, 200);
    }
}

#[test]
fn a_subscription_is_a_long_stream() {
    let front = Front::new();
    let mut wire = front.connect();
    wire.send_post(&headers("subscriptions/listen"), &ask("listen:0", "subscriptions/listen", json!({})));
    assert_eq!(wire.head().header("content-type"), Some("text/event-stream"));
    assert_eq!(wire.event().unwrap().1["params"]["data"], "acknowledged");
    let (mut other, session) = front.session("2025-11-25");
    other.post(&[("mcp-session-id", &session)], r#"{"jsonrpc":"2.0","method":"release"}"#);
    assert_eq!(wire.event().unwrap().1["id"], "listen:0", "its answer is its end");
    assert_eq!(wire.event(), None);
}

#[test]
fn stateless_clients_are_counted_by_identity() {
    let front = Front::new();
    let named = |wire: &mut Wire, name: &str| {
        let mut params = json!({"arguments": 1, "_meta": meta(VERSION)});
        params["_meta"]["io.modelcontextprotocol/clientInfo"] = json!({"name": name, "version": "1"});
        assert_eq!(wire.post(&headers("echo"), &request(1, "echo", params)).json()["result"], 1);
    };
    let count = || front.connect().ask("GET /api/stateless", &[]).body;
    assert_eq!(count(), "0");
    let mut wire = front.connect();
    named(&mut wire, "one");
    named(&mut wire, "one");
    named(&mut front.connect(), "one");
    assert_eq!(count(), "1");
    named(&mut wire, "two");
    assert_eq!(count(), "2");
    // A session is counted as one.
    front.session("2025-11-25");
    assert_eq!(count(), "2");
}
