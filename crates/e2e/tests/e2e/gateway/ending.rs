//! In every case the gateway exits soon and leaves no process.

use std::time::Instant;

use nix::sys::signal::Signal;
use serde_json::json;

use super::world::{Gate, backend};
use crate::mcp::client::{BUSY, Place, Setup, signal};

#[test]
fn open_requests_are_answered_before_the_gateway_exits() {
    let mut gate = Gate::stdio(Place::new(), &backend("one", &[], ""));
    gate.child("one");
    let id = gate.client.send_call("one__sleep", json!({"ms": 300}));
    gate.client.close_stdin();
    let answer = gate.client.answer(id);
    assert_eq!(answer["result"]["content"][0]["text"], "slept", "{answer}");
    assert_eq!(gate.client.wait().code(), Some(0));
    gate.place.is_swept();
}

#[test]
fn a_client_that_sends_everything_at_once_and_leaves_is_answered() {
    let place = Place::new();
    place.write("outlast.toml", &backend("one", &[], ""));
    let mut client = Setup::gateway(&place).options(["--stdio"]).hasty().start();
    client.request("initialize", crate::mcp::client::initialize_params(crate::mcp::client::VERSION));
    client.line(crate::mcp::client::INITIALIZED);
    client.send_call("one__echo", json!({"text": "all at once"}));
    client.end();
    place.is_swept();
}

#[test]
fn a_signal_ends_it_even_between_two_starts() {
    let config = [
        backend("good", &["--ignore-eof"], ""),
        "[[backend]]\nname = \"bad\"\ncommand = \"false\"\ndelay_first = \"50s\"\n\n".to_owned(),
    ];
    let mut gate = Gate::listen(Place::new(), &config.concat());
    gate.child("good");
    gate.is("bad", "backoff");
    let crashes = gate.place.audit_of("server_started").len();
    let since = Instant::now();
    signal(gate.client.pid(), Signal::SIGTERM);
    assert_eq!(gate.client.wait().code(), Some(0));
    // One second and the grace, which is half a second here.
    assert!(since.elapsed() < std::time::Duration::from_millis(1500) + BUSY, "{:?}", since.elapsed());
    assert_eq!(gate.place.audit_of("server_started").len(), crashes, "nothing is started at the end");
    gate.place.is_swept();
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let place = Place::new();
    place.write("outlast.toml", &backend("stubborn", &["--ignore-eof", "--ignore-term"], ""));
    let mut client = Setup::gateway(&place)
        .options(["--listen", "127.0.0.1:0", "--stdin-grace", "60", "--term-grace", "60"])
        .start();
    client.says("listening on");
    place.recorded("server_started", 1);
    signal(client.pid(), Signal::SIGINT);
    client.says("SIGINT received");
    signal(client.pid(), Signal::SIGINT);
    assert_eq!(client.wait().code(), Some(0));
    place.is_swept();
}

#[test]
fn a_client_that_closes_the_gateways_stdout_ends_it() {
    let mut gate = Gate::stdio(Place::new(), &backend("one", &[], ""));
    gate.client.break_stdout();
    assert_eq!(gate.client.wait().code(), Some(0));
    gate.place.is_swept();
}

#[test]
fn an_idle_gateway_uses_no_cpu() {
    let config: String = (0..3).map(|number| backend(&format!("b{number}"), &[], "")).collect();
    let gate = Gate::listen(Place::new(), &config);
    for number in 0..3 {
        gate.child(&format!("b{number}"));
    }
    let mut session = gate.session();
    session.call("b0__echo", json!({"text": "the last for a while"}));
    let ticks = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", gate.client.pid())).expect("it runs");
        let fields: Vec<u64> =
            stat.rsplit_once(") ").expect("a name").1.split(' ').filter_map(|f| f.parse().ok()).collect();
        fields[10] + fields[11]
    };
    // The last records may still be on their way into the log, on a busy machine for long.
    let is_idle = || {
        let before = ticks();
        std::thread::sleep(std::time::Duration::from_secs(3));
        ticks() == before
    };
    assert!((0..10).any(|_| is_idle()), "no clock tick of 10 ms in 3 s");
    gate.end();
}
