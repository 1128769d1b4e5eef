//! The HTTP endpoint: the form of its address, its output, profiles by path, and which connections count as clients.

use std::{
    io::{BufRead, BufReader, Write},
    net::TcpStream,
};

use serde_json::{Value, json};

use super::{
    web::{Web, stateless},
    world::{Gate, backend},
};
use crate::mcp::client::{PATIENCE, Place, Setup, VERSION, initialize_params, until};

#[test]
fn a_port_alone_means_this_machine() {
    for written in ["localhost:0", ":0", "0"] {
        let gate =
            Gate::configured(Place::new(), &backend("one", &[], ""), |setup| setup.options(["--listen", written]));
        assert!(gate.address.starts_with("127.0.0.1:"), "{written}: {}", gate.address);
        gate.end();
        let config = format!("[gateway]\nlisten = {written:?}\n\n{}", backend("one", &[], ""));
        let gate = Gate::configured(Place::new(), &config, |setup| setup);
        assert!(gate.address.starts_with("127.0.0.1:"), "{written}: {}", gate.address);
        gate.end();
    }
}

#[test]
fn the_status_page_has_an_address_that_is_printed() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], ""));
    let page = format!("http://{}/", gate.address);
    gate.client.says(&format!("status page: {page}"));
    assert_eq!(gate.state()["status_page"], page);
    let words = String::from_utf8_lossy(&gate.outlast(&["state"]).stdout).into_owned();
    assert!(words.contains(&page), "{words}");
    assert!(!gate.client.stderr_text().contains("without TLS"), "on loopback there is nothing to warn of");
    gate.end();
}

#[test]
fn beyond_loopback_plain_http_is_warned_of() {
    // The hash of `open sesame`.
    let config = "[auth]\n[[auth.key]]\nname = \"anna\"\n\
                  sha256 = \"41ef4bb0b23661e66301aac36066912dac037827b4ae63a7b1165a5aa93ed4eb\"\n\n";
    let place = Place::new();
    place.write("outlast.toml", &[config, &backend("one", &[], "")].concat());
    let client = Setup::gateway(&place).options(["--listen", "0.0.0.0:0"]).hasty().start();
    let warning = client.says("without TLS");
    assert!(warning.contains("warning") && warning.contains("tls = {"), "{warning}");
}

#[test]
fn a_profile_can_be_chosen_by_path_or_header() {
    let config = "[profile.small]\nallow = [\"one__echo\"]\n\n".to_owned() + &backend("one", &[], "");
    let gate = Gate::listen(Place::new(), &config);
    gate.child("one");
    let tools = |path: &str, more: &[(&str, &str)]| -> Vec<String> {
        let mut web = Web::connect(&gate.address);
        let mut headers = vec![("content-type", "application/json"), ("accept", "application/json, text/event-stream")];
        headers.extend(more);
        let opening = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": initialize_params(VERSION)});
        let opened = web.ask("POST", path, &headers, opening.to_string().as_bytes());
        assert_eq!(opened.status, 200, "{}", opened.text());
        let id = opened.header("mcp-session-id").expect("a session").to_owned();
        headers.push(("mcp-session-id", &id));
        let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"});
        let reply = web.ask("POST", path, &headers, list.to_string().as_bytes());
        let answer = reply.messages().into_iter().find(|message| message["id"] == 1).expect("an answer");
        let tools = answer["result"]["tools"].as_array().expect("tools").clone();
        tools.iter().map(|tool| tool["name"].as_str().expect("a name").to_owned()).collect()
    };
    assert!(tools("/mcp", &[]).len() > 1);
    assert_eq!(tools("/mcp/small", &[]), ["one__echo"]);
    assert_eq!(tools("/mcp", &[("x-outlast-profile", "small")]), ["one__echo"]);
    gate.end();
}

#[test]
fn clients_of_both_eras_are_counted() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], ""));
    gate.child("one");
    assert_eq!(gate.state()["clients"], 0);
    let _session = gate.session();
    assert_eq!(gate.state()["clients"], 1);
    for _ in 0..3 {
        let reply = stateless(&gate.address, "tools/call", json!({"name": "one__echo", "arguments": {}}), json!({}));
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    let state = gate.state();
    assert_eq!(state["clients"], 2, "one session, and one client without one");
    assert_eq!(state["clients_by_kind"], json!({"stdio": 0, "sessions": 1, "stateless": 1}));
    let metrics = Web::connect(&gate.address).get("/metrics").text();
    assert!(metrics.contains("outlast_clients 2"), "{metrics}");
    gate.end();
}

#[test]
fn a_status_page_opened_later_shows_earlier_events() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], ""));
    let pid = gate.child("one");
    crate::mcp::client::signal(pid, nix::sys::signal::Signal::SIGKILL);
    gate.place.recorded("server_crashed", 1);
    until("another process", || (gate.child("one") != pid).then_some(()));
    let mut stream = TcpStream::connect(&gate.address).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let head = format!("GET /api/events HTTP/1.1\r\nhost: {}\r\naccept: text/event-stream\r\n\r\n", gate.address);
    stream.write_all(head.as_bytes()).expect("it reads");
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    lines.by_ref().find(|line| line == "event: history").expect("the history comes first");
    let data = lines.next().expect("its data");
    let history: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
    let events: Vec<&str> = history
        .as_array()
        .expect("an array")
        .iter()
        .filter_map(|record| record["props"]["event_type"].as_str())
        .collect();
    assert!(events.contains(&"server_started") && events.contains(&"server_crashed"), "{events:?}");
    gate.end();
}
