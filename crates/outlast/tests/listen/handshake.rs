//! The handshake era: which requests belong to a session, by its id and revision.

use serde_json::json;

use crate::support::{Front, Wire, initialize, limits, request, two_people};

const NEWEST: &str = "2025-11-25";

fn with(session: &str) -> [(&'static str, &str); 1] {
    [("mcp-session-id", session)]
}

#[test]
fn a_session_opens_with_the_answer_to_initialize() {
    let front = Front::new();
    let mut wire = front.connect();
    let answer = wire.post(&[], &initialize(NEWEST));
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.json()["result"]["protocolVersion"], NEWEST);
    let id = answer.header("mcp-session-id").unwrap().to_owned();
    assert_eq!(id.len(), 32);
    assert_eq!(front.wait_for("came"), "came 1 Session local");

    // One connection serves the whole conversation.
    let answer = wire.post(&with(&id), &request("a", "echo", json!({"arguments": {"x": [1, 2.0]}})));
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json(), json!({"jsonrpc": "2.0", "id": "a", "result": {"x": [1, 2.0]}}));
    assert_eq!(answer.header("mcp-session-id"), None, "it is given once");

    let (_, other) = front.session(NEWEST);
    assert_ne!(id, other);
}

#[test]
fn no_session_opens_with_an_error() {
    let front = Front::new();
    let answer = front.connect().post(&[], &initialize("refuse"));
    assert_eq!((answer.status, answer.code()), (200, Some(-32602)));
    assert_eq!(answer.header("mcp-session-id"), None);
    front.wait_for("left 1");
}

#[test]
fn a_request_without_a_session_is_refused() {
    let front = Front::new();
    let (mut wire, id) = front.session(NEWEST);
    let ping = request(1, "echo", json!({}));
    let unknown = "0".repeat(32);
    let table: &[(&[(&str, &str)], u16)] = &[
        (&[], 400),
        (&[("mcp-session-id", &unknown)], 404),
        (&[("mcp-session-id", "nonsense")], 404),
        (&[("mcp-session-id", &id), ("mcp-session-id", &id)], 404),
        (&[("mcp-session-id", &id)], 200),
        (&[("mcp-session-id", &id), ("mcp-protocol-version", NEWEST)], 200),
        (&[("mcp-session-id", &id), ("mcp-protocol-version", "2025-06-18")], 200),
        (&[("mcp-session-id", &id), ("mcp-protocol-version", "1999-01-01")], 400),
        (&[("mcp-session-id", &id), ("mcp-protocol-version", "nonsense")], 400),
    ];
    for (headers, status) in table {
        let answer = wire.post(headers, &ping);
        assert_eq!(answer.status, *status, "{headers:?} {answer:?}");
        if *status != 200 {
            assert!(answer.json()["error"]["message"].is_string(), "{answer:?}");
        }
    }
    // An initialize with the id of an ended session opens nothing.
    assert_eq!(wire.post(&with(&unknown), &initialize(NEWEST)).status, 404);
    // A client whose session has ended must learn that first, whatever else is wrong.
    assert_eq!(wire.post(&with(&unknown), r#"{"jsonrpc":"2.0","id":1.5,"method":"echo"}"#).status, 404);
    assert_eq!(wire.post(&with(&id), r#"{"jsonrpc":"2.0","id":1.5,"method":"echo"}"#).status, 400);
}

#[test]
fn notifications_and_responses_get_no_answer() {
    let front = Front::new();
    let (mut wire, id) = front.session(NEWEST);
    for body in [
        r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#,
        r#"{"jsonrpc":"2.0","id":7,"result":{}}"#,
        r#"{"jsonrpc":"2.0","id":7,"error":{"code":1,"message":"x"}}"#,
    ] {
        let answer = wire.post(&with(&id), body);
        assert_eq!((answer.status, answer.body.as_str()), (202, ""), "{body}");
        assert_eq!(answer.header("content-type"), None);
    }
    front.wait_for("said 1 notifications/initialized");
    front.wait_for("said 1 response 7");
}

#[test]
fn a_body_must_be_one_json_rpc_message() {
    let front = Front::new();
    let (mut wire, id) = front.session(NEWEST);
    let table = [
        ("{", -32700),
        ("", -32700),
        ("hello", -32700),
        (r#"{"jsonrpc":"2.0","id":1,"method":"echo"} trailing"#, -32700),
        ("17", -32600),
        ("{}", -32600),
        (r#"{"jsonrpc":"2.0","id":null,"method":"echo"}"#, -32600),
        (r#"{"jsonrpc":"2.0","id":1.5,"method":"echo"}"#, -32600),
        (r#"[{"jsonrpc":"2.0","id":1,"method":"echo"}]"#, -32600),
        ("[]", -32600),
    ];
    for (body, code) in table {
        let answer = wire.post(&with(&id), body);
        assert_eq!((answer.status, answer.code()), (400, Some(code)), "{body}");
        assert!(answer.json()["id"].is_null(), "{body}");
    }
    assert_eq!(wire.post(&with(&id), &request(1, "echo", json!({}))).status, 200, "and the connection goes on");
}

#[test]
fn content_type_and_accept_are_checked() {
    let front = Front::new();
    let (mut wire, id) = front.session(NEWEST);
    let session = ("mcp-session-id", id.as_str());
    let body = request(1, "echo", json!({}));
    let table = [
        (("content-type", "text/plain"), 415),
        (("content-type", ""), 415),
        (("content-encoding", "gzip"), 415),
        (("accept", "application/json"), 406),
        (("accept", "text/event-stream"), 406),
        (("accept", "text/html"), 406),
        (("accept", "*/*"), 200),
        (("accept", ""), 200),
        (("content-type", "application/json; charset=utf-8"), 200),
    ];
    for (header, status) in table {
        assert_eq!(wire.post(&[session, header], &body).status, status, "{header:?}");
    }
    assert_eq!(wire.ask("GET /mcp", &[session, ("accept", "application/json")]).status, 406);
    let answer = wire.ask("PUT /mcp", &[session]);
    assert_eq!((answer.status, answer.header("allow")), (405, Some("GET, POST, DELETE")));
    assert_eq!(wire.ask("GET /elsewhere", &[]).status, 404);
}

#[test]
fn batches_belong_to_one_revision() {
    let front = Front::new();
    let (mut wire, id) = front.session("2025-03-26");
    let ask = |id: i32, method: &str| request(id, method, json!({"arguments": id}));
    let note = r#"{"jsonrpc":"2.0","method":"notifications/x"}"#;

    let answer = wire.post(&with(&id), &format!("[{},{note},{}]", ask(1, "echo"), ask(2, "echo")));
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.json(),
        json!([{"jsonrpc": "2.0", "id": 1, "result": 1}, {"jsonrpc": "2.0", "id": 2, "result": 2}])
    );
    assert_eq!(wire.post(&with(&id), &format!("[{note},{note}]")).status, 202);
    for (body, why) in [
        ("[]".to_owned(), "empty"),
        (format!("[{},{}]", ask(1, "echo"), ask(1, "echo")), "twice"),
        (format!("[{}]", initialize("2025-03-26")), "initialize"),
        ("[17]".to_owned(), "no message"),
        (format!("[{}]", vec![note; 1001].join(",")), "too many"),
    ] {
        assert_eq!(wire.post(&with(&id), &body).code(), Some(-32600), "{why}");
    }

    // A message before the last answer makes a stream of it.
    wire.send_post(&with(&id), &format!("[{},{}]", ask(3, "echo"), request(4, "words", json!({"arguments": [1, 1]}))));
    let head = wire.head();
    assert_eq!(head.header("content-type"), Some("text/event-stream"));
    assert_eq!(wire.event().unwrap().1["id"], 3);
    assert_eq!(wire.event().unwrap().1["method"], "notifications/message");
    assert_eq!(wire.event().unwrap().1["id"], 4);
    assert_eq!(wire.event(), None);
}

#[test]
fn an_id_in_flight_cannot_be_used_again() {
    let front = Front::new();
    let (mut wire, id) = front.session(NEWEST);
    let mut other = front.connect();
    other.send_post(&with(&id), &request(5, "hold", json!({})));
    front.wait_for("said 1 hold");
    let answer = wire.post(&with(&id), &request(5, "echo", json!({})));
    assert_eq!((answer.status, answer.code()), (400, Some(-32600)));
    assert_eq!(wire.post(&with(&id), &request("5", "echo", json!({}))).status, 200, "a string is another id");
    wire.post(&with(&id), r#"{"jsonrpc":"2.0","method":"release"}"#);
    assert_eq!(other.answer().json()["result"], "released");
    assert_eq!(wire.post(&with(&id), &request(5, "echo", json!({}))).status, 200, "it is free again");
}

#[test]
fn a_long_id_is_refused_before_it_is_compared_with_others() {
    let front = Front::new();
    let (mut wire, id) = front.session("2025-03-26");
    let (longest, longer) = ("i".repeat(1 << 10), "i".repeat((1 << 10) + 1));
    let answer = wire.post(&with(&id), &request(&*longer, "echo", json!({"arguments": 1})));
    assert_eq!((answer.status, answer.code()), (400, Some(-32600)));
    assert_eq!(answer.json()["id"], longer);
    let batch = format!("[{},{}]", request(1, "echo", json!({})), request(&*longer, "echo", json!({})));
    assert_eq!(wire.post(&with(&id), &batch).code(), Some(-32600));
    let answer = wire.post(&with(&id), &request(&*longest, "echo", json!({"arguments": 1})));
    assert_eq!((answer.status, &answer.json()["id"]), (200, &json!(longest)));
}

#[test]
fn a_session_ends_by_delete() {
    let front = Front::new();
    let (mut wire, id) = front.session(NEWEST);
    let mut stream = front.connect();
    stream.send_head("GET /mcp", &[("host", "localhost"), ("mcp-session-id", &id), ("accept", "text/event-stream")]);
    assert_eq!(stream.head().status, 200);
    let mut held = front.connect();
    held.send_post(&with(&id), &request(5, "hold", json!({})));
    front.wait_for("said 1 hold");

    assert_eq!(wire.ask("DELETE /mcp", &with(&id)).status, 200);
    front.wait_for("left 1");
    assert_eq!(stream.event(), None, "its stream is over");
    assert_eq!(held.answer().status, 404, "and so is what was open");
    assert_eq!(wire.post(&with(&id), &request(1, "echo", json!({}))).status, 404);
    assert_eq!(wire.ask("DELETE /mcp", &with(&id)).status, 404);
    assert_eq!(wire.ask("DELETE /mcp", &[]).status, 400);
}

#[test]
fn the_machine_can_end_a_session() {
    let front = Front::new();
    let (mut wire, id) = front.session(NEWEST);
    wire.post(&with(&id), r#"{"jsonrpc":"2.0","method":"drop me"}"#);
    front.wait_for("said 1 drop me");
    // The machine handles events in order, so by the next answer the session has ended.
    let (_, _) = front.session(NEWEST);
    assert_eq!(wire.post(&with(&id), &request(1, "echo", json!({}))).status, 404);
    assert!(front.heard().iter().all(|heard| heard != "left 1"), "who was dropped does not leave");
}

#[test]
fn a_session_belongs_to_its_client() {
    let front = Front::with(limits(), || Some(two_people()));
    let anna = ("authorization", "Bearer anna");
    let bert = ("authorization", "Bearer bert");
    let (mut wire, id) = front.session_as(NEWEST, &[anna]);
    assert_eq!(front.wait_for("came"), "came 1 Session anna");
    let session = ("mcp-session-id", id.as_str());
    let body = request(1, "echo", json!({}));

    assert_eq!(wire.post(&[anna, session], &body).status, 200);
    assert_eq!(wire.post(&[bert, session], &body).status, 404, "as if it were not there");
    assert_eq!(wire.ask("GET /mcp", &[bert, session, ("accept", "text/event-stream")]).status, 404);
    assert_eq!(wire.ask("DELETE /mcp", &[bert, session]).status, 404);

    for headers in [&[session][..], &[session, ("authorization", "Bearer carl")]] {
        let answer = wire.post(headers, &body);
        assert_eq!((answer.status, answer.json()["error"]["message"].as_str()), (401, Some("who are you?")));
        assert_eq!(answer.header("www-authenticate"), Some("Bearer realm=\"outlast\""));
    }
    assert_eq!(wire.post(&[anna, session], &body).status, 200, "and it lives on");
}

#[test]
fn pages_of_other_origins_are_refused() {
    let front = Front::new();
    let table: &[(&[(&str, &str)], u16)] = &[
        (&[("host", "localhost:1")], 200),
        (&[("host", "[::1]:1")], 200),
        (&[("host", "gate.example")], 200),
        (&[("host", "gate.example"), ("origin", "https://gate.example")], 200),
        (&[("host", "localhost"), ("origin", "http://localhost:5173")], 200),
        (&[("host", "rebound.example")], 403),
        (&[("host", "")], 403),
        (&[("host", "localhost"), ("origin", "http://rebound.example")], 403),
        (&[("host", "localhost"), ("origin", "null")], 403),
    ];
    for (headers, status) in table {
        let mut wire: Wire = front.connect();
        assert_eq!(wire.post(headers, &initialize(NEWEST)).status, *status, "{headers:?}");
        assert_eq!(wire.ask("GET /health", headers).status, *status, "pages too: {headers:?}");
    }
    // An absolute address in the request line takes precedence.
    assert_eq!(front.connect().ask("GET http://rebound.example/health", &[]).status, 403);
}
