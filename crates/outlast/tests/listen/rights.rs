//! Credentials that expire or are removed while a request is being answered.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use outlast::gateway::listen::Limits;
use serde_json::json;

use crate::support::{Front, Wire, limits, only_bert, request, two_people};

const VERSION: &str = "2025-11-25";

fn listen(front: &Front, path: &str, headers: &[(&str, &str)]) -> Wire {
    let mut wire = front.connect();
    let mut all = vec![("host", "localhost"), ("accept", "text/event-stream")];
    all.extend(headers);
    wire.send_head(&format!("GET {path}"), &all);
    assert_eq!(wire.head().status, 200);
    wire
}

#[test]
fn a_client_without_valid_credentials_is_disconnected() {
    let front = Front::with(limits(), || Some(two_people()));
    let (anna, bert) = (("authorization", "Bearer anna"), ("authorization", "Bearer bert"));
    let (mut annas, annas_id) = front.session_as(VERSION, &[anna]);
    let (mut berts, berts_id) = front.session_as(VERSION, &[bert]);
    let (annas_session, berts_session) = (("mcp-session-id", annas_id.as_str()), ("mcp-session-id", berts_id.as_str()));
    let mut annas_stream = listen(&front, "/mcp", &[anna, annas_session]);
    let mut berts_stream = listen(&front, "/mcp", &[bert, berts_session]);
    let mut annas_page = listen(&front, "/api/events", &[anna]);
    let mut annas_call = front.connect();
    annas_call.send_post(&[anna, annas_session], &request(1, "hold", json!({})));
    front.wait_for("said 1 hold");

    let note = r#"{"jsonrpc":"2.0","method":"only bert stays"}"#;
    assert_eq!(berts.post(&[bert, berts_session], note).status, 202);
    assert!(annas_stream.is_closed());
    assert!(annas_page.is_closed());
    assert!(annas_call.is_closed());
    assert_eq!(annas.post(&[anna, annas_session], &request(2, "echo", json!({}))).status, 401);

    let say = request(2, "say to all", json!({"arguments": "bert"}));
    assert_eq!(berts.post(&[bert, berts_session], &say).status, 200);
    assert_eq!(berts_stream.event().unwrap().1["params"]["data"], "\"bert\"", "he is where he was");
}

#[test]
fn a_client_without_credentials_is_disconnected_when_auth_is_added() {
    let front = Front::new();
    let (mut wire, id) = front.session(VERSION);
    let mut stream = listen(&front, "/mcp", &[("mcp-session-id", &id)]);
    wire.post(&[("mcp-session-id", &id)], r#"{"jsonrpc":"2.0","method":"only bert stays"}"#);
    assert!(stream.is_closed());
}

#[test]
fn a_response_ends_with_its_token() {
    static HAS_ENDED: AtomicBool = AtomicBool::new(false);
    let front = Front::with(Limits { ping: Duration::from_millis(50), ..limits() }, || {
        let (before, after) = (two_people(), only_bert());
        Some(Box::new(move |headers| if HAS_ENDED.load(Ordering::Relaxed) { after(headers) } else { before(headers) }))
    });
    let (anna, bert) = (("authorization", "Bearer anna"), ("authorization", "Bearer bert"));
    let mut annas_page = listen(&front, "/api/events", &[anna]);
    let mut berts_page = listen(&front, "/api/events", &[bert]);
    assert_eq!(annas_page.chunk().as_deref(), Some(":\n\n"));
    HAS_ENDED.store(true, Ordering::Relaxed);
    assert!(annas_page.is_closed());
    for _ in 0..8 {
        assert!(berts_page.chunk().is_some(), "he hears signs of life still");
    }
}
