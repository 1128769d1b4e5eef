//! Refused requests are recorded, and pages of listed origins may use the gateway from a real browser.

use std::{
    io::{Read, Write},
    net::TcpListener,
    thread,
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{
    web::{Session, Web},
    world::{Gate, HASTY, backend},
};
use crate::{
    mcp::client::{Place, VERSION, initialize_params, until},
    support::browser::Browser,
};

const KEY: &str = "key-of-the-machine-that-builds";

fn auth() -> String {
    let sha256: String = Sha256::digest(KEY.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    format!(
        "[[auth.key]]\nname = \"ci\"\nsha256 = \"{sha256}\"\nrole = \"all\"\n[role.all]\nallow = [\"*\"]\n\
         [rates.tool.one__pid]\nper_minute = 1\nburst = 1\n"
    )
}

/// The records of refusals of one kind: how many were written, and how many were only counted.
fn refusals(gate: &Gate, kind: &str) -> (u64, u64) {
    let records = gate.place.audit_of("request_refused");
    let of_kind = records.iter().map(|record| &record["props"]).filter(|props| props["outcome"] == kind);
    of_kind.fold((0, 0), |(written, counted), props| {
        let is_one = u64::from(props["peer"].is_string());
        (written + is_one, counted + props["suppressed"].as_u64().unwrap_or(0))
    })
}

#[test]
fn refused_requests_are_in_the_audit_log_and_in_the_metrics() {
    let place = Place::new();
    let schema = json!({"type": "object", "properties": {"path": {"type": "string"}}});
    let tools = place.write("tools.json", &json!([{"name": "read", "inputSchema": schema}]).to_string());
    let gate = Gate::listen(place, &(backend("one", &["--tools", &tools], HASTY) + &auth()));
    until("what it offers", || (gate.backend("one")["catalogue"] == "confirmed").then_some(()));
    const FLOOD: u64 = 120;
    let mut web = Web::connect(&gate.address);
    for _ in 0..FLOOD {
        let headers = [("content-type", "application/json"), ("accept", "application/json, text/event-stream")];
        assert_eq!(web.ask("POST", "/mcp", &headers, b"{}").status, 401);
    }
    // All are accounted for, either written or counted.
    until("the count of refusals", || {
        let (written, counted) = refusals(&gate, "unauthenticated");
        (written + counted == FLOOD).then_some(())
    });
    let first = gate.place.recorded("request_refused", 1);
    assert_eq!(first["method"], "POST /mcp", "{first}");
    assert!(first["peer"].as_str().is_some_and(|peer| peer.starts_with("127.0.0.1:")), "{first}");
    assert!(first["reason"].as_str().is_some_and(|reason| reason.contains("API key is required")), "{first}");
    assert!(first.get("who").is_none(), "no client is known: {first}");

    let origin = [("origin", "https://evil.example")];
    assert_eq!(Web::connect(&gate.address).ask("GET", "/mcp", &origin, b"").status, 403);
    let mut misnamed = Web::connect(&gate.address);
    misnamed.address = "evil.example".into();
    assert_eq!(misnamed.get("/mcp").status, 403);
    until("both", || (refusals(&gate, "bad_origin").0 == 1 && refusals(&gate, "bad_host").0 == 1).then_some(()));
    let bearer = format!("Bearer {KEY}");
    let metrics = Web::connect(&gate.address).ask("GET", "/metrics", &[("authorization", &bearer)], b"").text();
    for (reason, count) in [("unauthenticated", FLOOD), ("bad_origin", 1), ("bad_host", 1)] {
        let line = format!("outlast_requests_refused_total{{reason=\"{reason}\"}} {count}");
        assert!(metrics.contains(&line), "{line}: {metrics}");
    }

    // Calls that a guard refuses are recorded as calls, with client, address and session.
    let mut session = Session::open_as(&gate.address, Some(KEY));
    session.call("one__pid", json!({}));
    session.ask("tools/call", json!({"name": "one__pid", "arguments": {}}));
    session.ask("tools/call", json!({"name": "one__read", "arguments": {"path": 7}}));
    for outcome in ["answered", "rate_limited", "bad_arguments"] {
        let props = until(outcome, || {
            let calls = gate.place.audit_of("call_ended");
            calls.into_iter().map(|mut record| record["props"].take()).find(|props| props["outcome"] == outcome)
        });
        assert_eq!(props["who"], "ci", "{props}");
        assert!(props["peer"].as_str().is_some_and(|peer| peer.starts_with("127.0.0.1:")), "{props}");
        assert!(props["session"].as_str().is_some_and(|digits| session.id.starts_with(digits)), "{props}");
    }
    // Requests of operators are recorded with their name, too.
    assert!(gate.outlast(&["switch", "--off", "one__pid"]).status.success());
    for event in ["operator_requested", "switched"] {
        let props = gate.place.recorded(event, 1);
        assert!(props["who"].as_str().is_some_and(|who| who.starts_with("uid ")), "{props}");
    }
    gate.end();
}

/// A page with its own origin.
fn page_server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let _ = stream.read(&mut [0; 4096]);
            let body = "<!doctype html><title>a page</title>";
            let head = "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close";
            let _ = stream.write_all(format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).as_bytes());
        }
    });
    format!("http://{address}")
}

#[test]
fn a_page_of_a_listed_origin_uses_the_gateway_and_another_cannot() {
    let Some(browser) = Browser::find("a_page_of_a_listed_origin_uses_the_gateway_and_another_cannot") else { return };
    let (listed, other) = (page_server(), page_server());
    let config = format!("[gateway]\norigins = [\"{listed}\"]\n{}", backend("one", &[], HASTY) + &auth());
    let gate = Gate::listen(Place::new(), &config);
    gate.is("one", "ready");
    let body = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": initialize_params(VERSION)});
    let script = |key: &str| {
        format!(
            "window.told = null;\
             fetch('http://{}/mcp', {{ method: 'POST', headers: {{ 'Content-Type': 'application/json',\
             'Accept': 'application/json, text/event-stream', 'Authorization': 'Bearer {key}',\
             'Mcp-Protocol-Version': '{VERSION}' }}, body: JSON.stringify({body}) }})\
             .then(async answer => {{ window.told = [answer.status, answer.headers.get('mcp-session-id')?.length ?? 0,\
             answer.headers.get('www-authenticate') ?? '', (await answer.json()).result?.serverInfo?.name ?? ''] }})\
             .catch(error => {{ window.told = [error.name] }});",
            gate.address
        )
    };
    let ask = |key: &str| -> Value {
        browser.run(&script(key));
        browser.until("the answer to the page", "return window.told")
    };
    browser.open(&listed);
    assert_eq!(ask(KEY), json!([200, 32, "", "outlast"]), "the page reads the answer and its session");
    let refused = ask("wrong");
    assert_eq!(refused[0], 401, "a page must see why it was refused: {refused}");
    assert!(refused[2].as_str().is_some_and(|challenge| challenge.starts_with("Bearer")), "{refused}");
    browser.open(&other);
    assert_eq!(ask(KEY), json!(["TypeError"]), "the browser does not show the answer to another page");
    gate.end();
}
