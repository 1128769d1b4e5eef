//! What operators see of a cluster, and what passes through NATS: real replicas and a real NATS.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::{Arc, Mutex},
    thread,
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{
    web::{Session, Web},
    world::{Gate, HASTY, backend},
};
use crate::{
    mcp::client::{OUTLAST, PUPPET, Place, signal, until},
    support::nats::{NatsPrograms, NatsServer, Version},
};

/// Of a reference in the configuration.
const SECRET: &str = "s3cret-Value/0123456789";
/// The key of a client, and its hash.
const KEY: &str = "open sesame";
const KEY_SHA256: &str = "41ef4bb0b23661e66301aac36066912dac037827b4ae63a7b1165a5aa93ed4eb";
const PASSWORD: &str = "of-the-replicas";

/// A replica with one backend on each and one that runs once. Both get the secret.
fn config(nats: &NatsServer, replica: &str, more: &str) -> String {
    let env = "env = { KEY = \"${API_KEY}\" }";
    format!("[cluster]\nnats = {:?}\nname = \"team\"\nreplica = {replica:?}\n{more}\n", nats.url())
        + &backend("each", &[], &format!("{HASTY}\n{env}"))
        + &format!("[[backend]]\nname = \"one\"\ncommand = {PUPPET:?}\nplacement = \"one\"\n{HASTY}\n{env}\n")
}

fn start(nats: &NatsServer, replica: &str, more: &str) -> Gate {
    let gate = Gate::listen_with(Place::new(), &config(nats, replica, more), |setup| {
        setup.env("API_KEY", SECRET).env("NATS_PASSWORD", PASSWORD)
    });
    until("NATS", || (gate.state()["cluster"]["connected"] == true).then_some(()));
    gate.is("each", "ready");
    gate.is("one", "ready");
    gate
}

/// A line of the metrics of a gateway.
fn metric(gate: &Gate, name: &str) -> Option<f64> {
    let text = Web::connect(&gate.address).get("/metrics").text();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned))?;
    line.parse().ok()
}

fn cluster_state(gate: &Gate) -> Value {
    gate.json(&["state", "--cluster"])
}

fn names(state: &Value, list: &str) -> Vec<String> {
    let all = state[list].as_array().unwrap_or_else(|| panic!("no {list} in {state}"));
    all.iter().filter_map(|one| one["name"].as_str().map(str::to_owned)).collect()
}

#[test]
fn n5_operators_see_replicas_owners_leases_backlog_and_nats() {
    let Some(programs) = NatsPrograms::find("gateway::members::n5_operators_see_replicas") else { return };
    let nats = programs.one();
    let (a, b) = (start(&nats, "a", ""), start(&nats, "b", ""));
    let state = until("both replicas", || {
        let state = cluster_state(&a);
        (names(&state, "replicas") == ["a", "b"] && state["unreachable"] == json!([])).then_some(state)
    });
    assert_eq!((&state["nats"]["connected"], &state["nats"]["server"]), (&json!(true), &json!(nats.url())), "{state}");
    let one = |state: &Value| {
        let all = state["backends"].as_array().cloned().unwrap_or_default();
        all.into_iter().find(|backend| backend["name"] == "one" && backend["state"] == "ready")
    };
    let owned = one(&state).unwrap_or_else(|| panic!("no `one` in {state}"));
    let owner = owned["owner"].as_str().unwrap_or_default().to_owned();
    assert!(["a", "b"].contains(&owner.as_str()) && owned["pid"].is_u64(), "{owned}");
    assert!(owned["lease_until_s"].as_f64().is_some_and(|left| (0.0..=10.0).contains(&left)), "{owned}");
    // The backlog is published.
    until("an empty backlog", || (metric(&a, "outlast_cluster_audit_backlog") == Some(0.0)).then_some(()));
    for (name, value) in [("replicas", 2.0), ("connected", 1.0), ("watches_down", 0.0), ("sessions_local", 0.0)] {
        assert_eq!(metric(&a, &format!("outlast_cluster_{name}")), Some(value), "{name}");
    }
    let leases: f64 = [&a, &b].iter().filter_map(|gate| metric(gate, "outlast_cluster_owned")).sum();
    assert!((leases - 1.0).abs() < 0.1, "{leases} leases on one backend");
    // What the status page shows.
    let page: Value = serde_json::from_str(&Web::connect(&a.address).get("/api/cluster").text()).expect("JSON");
    assert_eq!((names(&page, "replicas"), &page["nats"]["connected"]), (names(&state, "replicas"), &json!(true)));
    // Every command, through the replica that does not run it.
    let (asked, at_owner) = if owner == "a" { (&b, &a) } else { (&a, &b) };
    let listed = asked.json(&["ps", "--cluster"]);
    let kinds = |kind: &str| listed.as_array().map_or(0, |all| all.iter().filter(|row| row["kind"] == kind).count());
    assert_eq!((kinds("gateway"), kinds("backend")), (2, 3), "{listed}");
    let before = owned["pid"].as_u64();
    let restarted = asked.outlast(&["restart", "--cluster", "one"]);
    assert!(restarted.status.success(), "{restarted:?}");
    until("the next process at the owner", || {
        let pid = one(&cluster_state(asked)).and_then(|one| one["pid"].as_u64());
        (pid.is_some() && pid != before).then_some(())
    });
    assert_eq!(at_owner.backend("one")["owner"], owner.as_str());
    let switched = asked.outlast(&["switch", "--cluster", "--off", "each__echo"]);
    assert!(switched.status.success(), "{switched:?}");
    until("the switch on all", || {
        [&a, &b].iter().all(|gate| cluster_state(gate)["switches"] == json!([{"tool": "each__echo"}])).then_some(())
    });
    // U1: its leases and streams cannot be handed over, so the program is not replaced in place.
    let refused = asked.outlast(&["upgrade", "--program", OUTLAST]);
    let words = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && words.contains("a replica of a cluster is not upgraded in place"), "{words}");
    assert!(words.contains("hint: stop it and start it again"), "{words}");
    // A replica that is killed is missing after its registration has expired.
    let Gate { place: _place, client: mut lost, .. } = b;
    signal(lost.pid(), Signal::SIGKILL);
    lost.wait();
    until("the lost replica to be forgotten", || {
        (names(&cluster_state(&a), "replicas") == ["a"] && metric(&a, "outlast_cluster_replicas") == Some(1.0))
            .then_some(())
    });
    a.end();
}

#[test]
fn a_watch_that_is_lost_is_reported_and_opened_again() {
    let Some(programs) = NatsPrograms::find("gateway::members::a_watch_that_is_lost") else { return };
    for version in [Version::Oldest, Version::Newest] {
        watch_is_lost(&programs.one_with(version, "jetstream {}"));
    }
}

fn watch_is_lost(nats: &NatsServer) {
    let a = start(nats, "a", "");
    let mut client = nats.client();
    for bucket in ["sessions", "state"] {
        let stream = format!("KV_outlast_v1_team_{bucket}");
        let found = client.jetstream(&format!("CONSUMER.NAMES.{stream}"), &json!({}));
        let consumer = found["consumers"][0].as_str().unwrap_or_else(|| panic!("no consumer: {found}"));
        let deleted = client.jetstream(&format!("CONSUMER.DELETE.{stream}.{consumer}"), &json!({}));
        assert_eq!(deleted["success"], true, "{deleted}");
        a.client.says(&format!("changes of `{bucket}` in NATS are not reported at the moment"));
        a.client.says(&format!("changes of `{bucket}` in NATS are reported again"));
    }
    assert_eq!(metric(&a, "outlast_cluster_watches_lost_total"), Some(2.0));
    assert_eq!(metric(&a, "outlast_cluster_watches_down"), Some(0.0));
    assert_eq!(a.state()["cluster"]["watches_down"], json!([]));
    let counted = &cluster_state(&a)["counters"]["watches_lost"];
    assert_eq!(*counted, 2);
    // What another replica changes is heard again.
    let b = start(nats, "b", "");
    assert!(b.outlast(&["switch", "--off", "each__echo"]).status.success());
    until("the switch", || (cluster_state(&a)["switches"] == json!([{"tool": "each__echo"}])).then_some(()));
    // A session that was opened before is served by the other replica.
    let mut session = a.session();
    session.reconnect(&b.address);
    assert_eq!(session.call("one__echo", json!({"text": "from the other"})), "from the other");
    a.end();
    b.end();
}

/// Reads every message of an account.
struct Tap {
    heard: Arc<Mutex<Vec<u8>>>,
    stream: TcpStream,
}

impl Tap {
    fn open(port: u16) -> Tap {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("NATS listens");
        let hello = json!({"verbose": false, "headers": true, "user": "all", "pass": "known"});
        write!(stream, "CONNECT {hello}\r\nSUB > 1\r\nPING\r\n").expect("NATS reads");
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (mut reader, to) = (stream.try_clone().expect("a socket"), Arc::clone(&heard));
        thread::spawn(move || {
            let mut part = vec![0; 64 << 10];
            while let Ok(length @ 1..) = reader.read(&mut part) {
                if part[..length].windows(6).any(|bytes| bytes == b"PING\r\n") {
                    let _ = reader.write_all(b"PONG\r\n");
                }
                to.lock().expect("no thread panics").extend_from_slice(&part[..length]);
            }
        });
        let tap = Tap { heard, stream };
        until("the subscription", || tap.has("PONG").then_some(()));
        tap
    }

    fn has(&self, text: &str) -> bool {
        let heard = self.heard.lock().expect("no thread panics");
        heard.windows(text.len()).any(|bytes| bytes == text.as_bytes())
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

#[test]
fn no_secret_passes_through_nats() {
    let Some(programs) = NatsPrograms::find("gateway::members::no_secret_passes_through_nats") else { return };
    let users = format!("users: [{{ user: outlast, password: \"{PASSWORD}\" }}, {{ user: all, password: known }}]");
    let nats = programs.one_with(Version::Newest, &format!("jetstream {{}}\nauthorization {{ {users} }}"));
    let tap = Tap::open(nats.port);
    let auth = format!(
        "user = \"outlast\"\npassword = \"${{NATS_PASSWORD}}\"\n\n[[auth.key]]\nname = \"ann\"\nsha256 = {KEY_SHA256:?}\n"
    );
    let (a, b) = (start(&nats, "a", &auth), start(&nats, "b", &auth));
    // The secret is known to the processes of both backends.
    let environment = std::fs::read(format!("/proc/{}/environ", a.child("each"))).expect("it runs");
    assert!(String::from_utf8_lossy(&environment).contains(SECRET));
    let mut session = Session::open_as(&a.address, Some(KEY));
    for gate in [&a, &b] {
        session.reconnect(&gate.address);
        assert_eq!(session.call("each__echo", json!({"text": "of the session"})), "of the session");
        assert_eq!(session.call("one__echo", json!({"text": "of the owner"})), "of the owner");
    }
    session.ask("logging/setLevel", json!({"level": "error"}));
    assert!(a.outlast(&["switch", "--off", "each__sleep"]).status.success());
    assert!(b.outlast(&["restart", "--cluster", "each"]).status.success());
    until("the records of both", || {
        let output = a.outlast(&["audit", "--cluster", "--json"]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (text.contains("\"id\":\"a-") && text.contains("\"id\":\"b-")).then_some(())
    });
    let state = cluster_state(&a).to_string();
    assert!(!state.contains(SECRET) && !state.contains(PASSWORD), "{state}");
    // The home leaves, and another replica takes the session over. A home that is killed would be noticed late, because the
    // tap receives what is for it.
    a.end();
    session.reconnect(&b.address);
    until("the session at the other replica", || {
        let reply = session.post(&json!({"jsonrpc": "2.0", "id": "x", "method": "ping"}));
        (reply.status == 200).then_some(())
    });
    assert_eq!(session.call("each__echo", json!({"text": "taken over"})), "taken over");
    // The tap has heard all of it.
    until("the messages", || tap.has("\"ann\"").then_some(()));
    assert!(tap.has("outlast.v1.team.replica.") && tap.has("$KV.outlast_v1_team_sessions."));
    assert!(tap.has("of the session") || tap.has("of the owner"), "messages between replicas pass through NATS");
    for secret in [SECRET, KEY, PASSWORD] {
        assert!(!tap.has(secret), "`{secret}` has passed through NATS");
    }
    b.end();
}
