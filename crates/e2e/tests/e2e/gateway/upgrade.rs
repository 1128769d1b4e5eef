//! U1: `outlast gateway` becomes another program. Clients and servers see nothing of it except that streams end and are
//! resumed, and a program that cannot take over leaves everything as it was.

use std::{
    collections::BTreeMap,
    env, fs,
    process::Output,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{
    web::{BEGUN_ID, Session, Web, stateless},
    world::{Gate, HASTY, backend, outlast_in},
};
use crate::{
    mcp::client::{OUTLAST, Place, signal, text, until},
    support::{
        copy_program,
        peers::{Client, Peer, Peers, Project, Server},
    },
};

/// The program under test with another format of the state, and a migration to it.
const NEXT: &str = env!("CARGO_BIN_EXE_outlast-next");
const KEY: &str = "key-of-ann";

/// How many upgrades in a row; `OUTLAST_UPGRADES` sets another number.
fn upgrades() -> usize {
    env::var("OUTLAST_UPGRADES").ok().and_then(|number| number.parse().ok()).unwrap_or(10)
}

fn auth() -> String {
    let hash: String = Sha256::digest(KEY.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("[[auth.key]]\nname = \"ann\"\nsha256 = \"{hash}\"\nrole = \"all\"\n[role.all]\nallow = [\"*\"]\n")
}

/// A shared backend, one with a process for each session, and a pool. Each has a log, and all share a ledger.
fn config(place: &Place, more: &str) -> String {
    let ledger = place.join("ledger");
    let one = |name: &str, children: &str| {
        let log = place.join(&format!("{name}.log"));
        let flags = ["--era", "legacy", "--resources", "--logging", "--log", &log, "--ledger", &ledger];
        backend(name, &flags, &format!("{HASTY}\nchildren = {children}"))
    };
    one("all", "\"shared\"") + &one("own", "\"per_session\"") + &one("pool", "{ pool = 2 }") + more
}

fn upgrade(gate: &Gate, args: &[&str]) -> Output {
    gate.outlast(&[&["upgrade"], args].concat())
}

fn upgraded(gate: &Gate, program: &str) -> Value {
    let output = upgrade(gate, &["--program", program, "--json"]);
    assert!(output.status.success(), "{output:?}\n{}", gate.client.stderr_text());
    let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(answer["upgraded"], true, "{answer}");
    answer
}

/// What a refused upgrade says.
fn refused(gate: &Gate, program: &str) -> String {
    let output = upgrade(gate, &["--program", program]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8(output.stderr).expect("text")
}

/// How many handshakes each process of a backend has seen.
fn handshakes(place: &Place, backend: &str) -> BTreeMap<u32, usize> {
    let mut count = BTreeMap::new();
    for (pid, line) in place.log(&format!("{backend}.log")) {
        if line.contains("\"method\":\"initialize\"") {
            *count.entry(pid).or_insert(0) += 1;
        }
    }
    count
}

/// Each number in the ledger, sorted.
fn ledger(place: &Place) -> Vec<u64> {
    let done = fs::read_to_string(place.path().join("ledger")).expect("calls were made");
    let mut done: Vec<u64> = done.lines().map(|line| line.split(' ').next().unwrap().parse().unwrap()).collect();
    done.sort_unstable();
    done
}

/// One call with a number of its own. One in four is slow, so that calls are open at each upgrade.
fn numbered(call: u64) -> (&'static str, Value, String) {
    match call % 4 {
        0 => ("sleep", json!({"ms": 15, "call": call}), "slept".to_owned()),
        _ => ("echo", json!({"call": call}), json!({"call": call}).to_string()),
    }
}

/// Clients that call until they are told to stop. Each has one connection, which must stay open.
struct Load {
    workers: Vec<thread::JoinHandle<()>>,
    is_over: Arc<AtomicBool>,
    calls: Arc<AtomicU64>,
}

impl Load {
    fn start(address: &str, token: Option<&'static str>) -> Load {
        let mut load = Load { workers: Vec::new(), is_over: Arc::default(), calls: Arc::default() };
        for backend in ["all", "all", "own", "own", "pool", "pool"] {
            let mut session = Session::open_as(address, token);
            let id = session.id.clone();
            load.work(move |call| {
                let (tool, arguments, said) = numbered(call);
                assert_eq!(session.call(&format!("{backend}__{tool}"), arguments), said);
                assert_eq!(session.id, id);
            });
        }
        // A client of the stateless era makes a connection for each request.
        if token.is_none() {
            let address = address.to_owned();
            load.work(move |call| {
                let (tool, arguments, said) = numbered(call);
                let params = json!({"name": format!("all__{tool}"), "arguments": arguments});
                let reply = stateless(&address, "tools/call", params, json!({}));
                assert_eq!(reply.status, 200, "{}", reply.text());
                assert_eq!(text(&reply.messages()[0]["result"]), said);
            });
        }
        load
    }

    fn work(&mut self, mut call: impl FnMut(u64) + Send + 'static) {
        let (is_over, calls) = (self.is_over.clone(), self.calls.clone());
        self.workers.push(thread::spawn(move || {
            while !is_over.load(Ordering::SeqCst) {
                call(calls.fetch_add(1, Ordering::SeqCst) + 1);
            }
        }));
    }

    /// The number of calls, all of which were answered as they should be.
    fn end(self) -> u64 {
        self.is_over.store(true, Ordering::SeqCst);
        self.workers.into_iter().for_each(|worker| worker.join().expect("every call is answered"));
        self.calls.load(Ordering::SeqCst)
    }
}

#[test]
fn upgrades_under_load_lose_and_repeat_no_call() {
    for (token, more) in [(None, String::new()), (Some(KEY), auth())] {
        let place = Place::new();
        let config = config(&place, &more);
        let gate = Gate::listen(place, &config);
        ["all", "own", "pool"].iter().for_each(|name| drop(gate.is(name, "ready")));
        let pid = gate.client.pid();
        let load = Load::start(&gate.address, token);
        until("calls of all clients", || (load.calls.load(Ordering::SeqCst) > 100).then_some(()));
        let processes = |gate: &Gate| -> Vec<BTreeMap<u32, usize>> {
            ["all", "own", "pool"].map(|name| handshakes(&gate.place, name)).into()
        };
        // A pool starts its second process when the first is busy.
        until("the whole pool", || (handshakes(&gate.place, "pool").len() == 2).then_some(()));
        let (before, restarts) = (processes(&gate), gate.state()["restarts"].clone());
        let count = upgrades();
        let mut pauses = Vec::new();
        for number in 0..count {
            // The second half reads the state of the first by a migration.
            let answer = upgraded(&gate, if number < count / 2 { OUTLAST } else { NEXT });
            pauses.push(answer["pause_ms"].as_f64().expect("a number"));
            let calls = load.calls.load(Ordering::SeqCst);
            until("more calls", || (load.calls.load(Ordering::SeqCst) > calls + 20).then_some(()));
        }
        let calls = load.end();
        assert_eq!(ledger(&gate.place), (1..=calls).collect::<Vec<u64>>(), "each call was executed once");
        assert_eq!(processes(&gate), before, "no new process and no new handshake");
        let state = gate.state();
        assert_eq!((&state["restarts"], &state["outlast_pid"]), (&restarts, &json!(pid)));
        assert_eq!(state["clients_by_kind"]["sessions"], 6);
        let records = gate.place.audit_of("upgraded");
        assert_eq!(records.len(), count);
        let migrated = "the state had version 1, and this program writes version 2";
        let details = records.iter().map(|record| record["props"]["detail"].as_str().unwrap_or_default());
        assert_eq!(details.filter(|detail| detail.contains(migrated)).count(), 1, "{records:?}");
        assert_eq!(gate.place.audit_of("instance_started").len(), 1);
        pauses.sort_by(f64::total_cmp);
        println!("{count} upgrades, {calls} calls; requests waited {} to {} ms", pauses[0], pauses[count - 1]);
        gate.end();
    }
}

#[test]
fn the_client_on_stdio_notices_nothing() {
    const IN_FLIGHT: usize = 8;
    let place = Place::new();
    let config = config(&place, "");
    let mut gate = Gate::stdio(place, &config);
    for name in ["all", "own", "pool"] {
        until("what it offers", || (gate.backend(name)["catalogue"] == "confirmed").then_some(()));
    }
    assert_eq!(gate.client.call("own__echo", json!({"text": "warm"})), "warm");
    gate.client.heard.clear();
    let before = ["all", "own"].map(|name| handshakes(&gate.place, name));
    let home = gate.place.path().to_owned();
    let work = thread::spawn(move || {
        for number in 0..upgrades() {
            let program = if number < upgrades() / 2 { OUTLAST } else { NEXT };
            let output = outlast_in(&home, &["upgrade", "--program", program, "--json"]);
            let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            assert_eq!(answer["upgraded"], true, "upgrade {number}: {output:?}");
        }
    });
    let mut words = BTreeMap::new();
    let mut calls = 0;
    while !work.is_finished() || !words.is_empty() {
        while words.len() < IN_FLIGHT && !work.is_finished() {
            calls += 1;
            let (tool, arguments, said) = numbered(calls);
            let backend = if calls % 3 == 0 { "own" } else { "all" };
            words.insert(gate.client.send_call(&format!("{backend}__{tool}"), arguments).to_string(), said);
        }
        let (id, answer) = gate.client.any_answer();
        let said = words.remove(&id).expect("it was asked, and not answered before");
        assert_eq!(text(&answer["result"]), said, "{answer}");
    }
    work.join().expect("every upgrade succeeds");
    assert!(gate.client.heard.is_empty(), "{:?}", gate.client.heard);
    assert_eq!(ledger(&gate.place), (1..=calls).collect::<Vec<u64>>());
    assert_eq!(["all", "own"].map(|name| handshakes(&gate.place, name)), before);

    // A line that is half read is completed by the next program.
    gate.client.owed("\"half\"");
    gate.client.raw(br#"{"jsonrpc":"2.0","id":"half","method":"tools/call","params":{"name":"all__echo","argu"#);
    upgraded(&gate, NEXT);
    gate.client.raw(b"ments\":{\"text\":\"whole\"}}}\n");
    assert_eq!(text(&gate.client.answer_to("\"half\"")["result"]), "whole");
    gate.end();
}

/// The GET stream of a session, from this event or from now on.
fn listen(address: &str, session: &Session, last: Option<&str>) -> Web {
    let mut web = Web::connect(address);
    let mut headers = vec![("accept", "text/event-stream"), ("mcp-session-id", session.id.as_str())];
    headers.extend(last.map(|last| ("last-event-id", last)));
    web.begin("GET", "/mcp", &headers, b"");
    let head = web.head();
    assert_eq!((head.status, head.header("content-type")), (200, Some("text/event-stream")));
    web
}

/// The number in the id of an event.
fn number(id: &str) -> u64 {
    id.split('-').nth(1).and_then(|number| number.parse().ok()).expect("a number")
}

#[test]
fn streams_are_resumed_with_nothing_lost_or_twice() {
    let place = Place::new();
    let config = config(&place, "");
    let gate = Gate::listen(place, &config);
    gate.is("all", "ready");
    let (mut session, mut other) = (gate.session(), gate.session());
    let listed = session.ask("resources/list", json!({}));
    let uris: Vec<String> = listed["result"]["resources"]
        .as_array()
        .expect("resources")
        .iter()
        .filter_map(|resource| resource["uri"].as_str().map(str::to_owned))
        .collect();
    let uri = uris[0].clone();
    assert_eq!(session.ask("resources/subscribe", json!({"uri": uri}))["result"], json!({}));
    assert_eq!(session.ask("logging/setLevel", json!({"level": "warning"}))["result"], json!({}));
    let mut touch = || assert!(other.call("all__touch", json!({"uri": uri})).starts_with("announced"));

    let mut stream = listen(&gate.address, &session, None);
    touch();
    let first = stream.event_id();
    for round in 0..3 {
        let program = if round == 0 { OUTLAST } else { NEXT };
        let last = stream.event_id_after(&mut touch);
        upgraded(&gate, program);
        assert!(stream.is_ended(), "the stream ends with the old program");
        // Both are kept for the client, which has neither.
        touch();
        touch();
        stream = listen(&gate.address, &session, Some(&last));
        let (one, two) = (stream.event_id(), stream.event_id());
        assert_eq!((number(&one), number(&two)), (number(&last) + 1, number(&last) + 2), "round {round}");
        // The first event is still kept, and a client may go back to it.
        let mut again = listen(&gate.address, &session, Some(&first));
        assert_eq!(number(&again.event_id()), number(&first) + 1);
        stream = listen(&gate.address, &session, Some(&two));
    }

    // The stream of a request, which its client left before the answer.
    let mut begun = session.begin("all__progress", &json!({"steps": 3, "ms": 20}), Some("token"));
    begun.head();
    let last = begun.event_id();
    drop(begun);
    upgraded(&gate, NEXT);
    let reply = session.resume(&last);
    let messages = reply.messages();
    assert_eq!(messages.len(), 3, "two more steps and the answer: {}", reply.text());
    assert_eq!(messages[2]["id"], BEGUN_ID);
    // The level and the subscription are as they were, and the backend was not told again.
    let state: Value = serde_json::from_str(&session.call("all__state", json!({}))).expect("JSON");
    assert_eq!((&state["level"], &state["subscribed"]), (&json!("warning"), &json!([uri])));
    let told = gate.place.log("all.log").iter().filter(|(_, line)| line.contains("resources/subscribe")).count();
    assert_eq!((told, handshakes(&gate.place, "all").values().sum::<usize>()), (1, 1));
    gate.end();
}

/// Connections stay open, whatever was read of the next request, and one that is not accepted yet is served.
#[test]
fn connections_are_taken_over() {
    let place = Place::new();
    let config = config(&place, "");
    let gate = Gate::listen(place, &config);
    gate.is("all", "ready");
    let mut many: Vec<Web> = (0..100).map(|_| Web::connect(&gate.address)).collect();
    let mut idle = Web::connect(&gate.address);
    let mut half = Web::connect(&gate.address);
    assert_eq!((idle.get("/health").status, half.get("/health").status), (200, 200));
    for program in [OUTLAST, NEXT, NEXT] {
        half.raw(b"GET /health HTTP/1.1\r\nhost: ");
        // The gateway reads both in the order in which they came.
        assert_eq!(idle.get("/health").status, 200);
        upgraded(&gate, program);
        half.raw(format!("{}\r\n\r\n", half.address).as_bytes());
        assert_eq!(half.answer().status, 200);
        assert_eq!(idle.get("/health").status, 200);
        assert!(many.iter_mut().all(|one| one.get("/health").status == 200));
    }
    gate.end();
}

/// After it was postponed, an upgrade takes place although there are requests all the time.
#[test]
fn a_postponed_upgrade_takes_place_under_load() {
    let place = Place::new();
    let config = config(&place, "");
    let gate = Gate::listen(place, &config);
    ["all", "own", "pool"].iter().for_each(|name| drop(gate.is(name, "ready")));
    let session = gate.session();
    let mut long = session.begin("all__sleep", &json!({"ms": 11_000}), None);
    until("the call to run", || gate.place.log("all.log").iter().any(|(_, line)| line.contains("11000")).then_some(()));
    let load = Load::start(&gate.address, None);
    let output = upgrade(&gate, &["--program", NEXT, "--json"]);
    let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(answer["upgraded"], false, "{answer}");
    long.answer();
    gate.place.recorded("upgraded", 1);
    let calls = load.end();
    assert_eq!(ledger(&gate.place), (1..=calls).collect::<Vec<u64>>());
    gate.end();
}

/// Clients that resume their streams after each upgrade get every event once, while a backend reports changes all the time.
#[test]
fn streams_under_load_lose_and_repeat_no_event() {
    const CLIENTS: usize = 3;
    let place = Place::new();
    let config = config(&place, "");
    let gate = Gate::listen(place, &config);
    gate.is("all", "ready");
    let mut other = gate.session();
    let listed = other.ask("resources/list", json!({}));
    let uri = listed["result"]["resources"][0]["uri"].clone();
    let (is_over, touches) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    // How many events there are in all, once that is known.
    let expected = Arc::new(AtomicU64::new(u64::MAX));
    let readers: Vec<thread::JoinHandle<Vec<u64>>> = (0..CLIENTS)
        .map(|_| {
            let mut session = gate.session();
            assert_eq!(session.ask("resources/subscribe", json!({"uri": uri}))["result"], json!({}));
            let mut stream = listen(&gate.address, &session, None);
            let (address, expected) = (gate.address.clone(), expected.clone());
            thread::spawn(move || {
                let mut numbers: Vec<u64> = Vec::new();
                let mut last = None;
                loop {
                    match stream.next_event_id() {
                        Some(id) => {
                            numbers.push(number(&id));
                            last = Some(id);
                        }
                        None if numbers.len() as u64 >= expected.load(Ordering::SeqCst) => return numbers,
                        None => stream = listen(&address, &session, last.as_deref()),
                    }
                }
            })
        })
        .collect();
    let toucher = thread::spawn({
        let (is_over, touches) = (is_over.clone(), touches.clone());
        move || {
            while !is_over.load(Ordering::SeqCst) {
                assert!(other.call("all__touch", json!({"uri": uri})).starts_with("announced"));
                touches.fetch_add(1, Ordering::SeqCst);
                thread::sleep(Duration::from_millis(2));
            }
        }
    });
    for round in 0..upgrades() {
        upgraded(&gate, if round < upgrades() / 2 { OUTLAST } else { NEXT });
        let before = touches.load(Ordering::SeqCst);
        until("more changes", || (touches.load(Ordering::SeqCst) > before + 10).then_some(()));
    }
    is_over.store(true, Ordering::SeqCst);
    toucher.join().expect("every call is answered");
    let count = touches.load(Ordering::SeqCst);
    expected.store(count, Ordering::SeqCst);
    // Each upgrade ends the streams of the clients, until each has all events.
    while readers.iter().any(|reader| !reader.is_finished()) {
        upgraded(&gate, NEXT);
    }
    for reader in readers {
        let numbers = reader.join().expect("every stream is resumed");
        assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
        assert_eq!(numbers.len() as u64, count, "one event for each change");
    }
    gate.end();
}

#[test]
fn a_long_call_postpones_the_upgrade() {
    let place = Place::new();
    let config = config(&place, "");
    let gate = Gate::listen(place, &config);
    let child = gate.child("all");
    let (session, mut other) = (gate.session(), gate.session());
    let mut long = session.begin("all__sleep", &json!({"ms": 12_000}), None);
    until("the call to run", || gate.place.log("all.log").iter().any(|(_, line)| line.contains("12000")).then_some(()));
    let home = gate.place.path().to_owned();
    let asked = thread::spawn(move || outlast_in(&home, &["upgrade", "--program", NEXT, "--json"]));
    // A request that comes meanwhile waits, and is served by the old program once the upgrade is postponed.
    thread::sleep(Duration::from_millis(500));
    assert_eq!(other.call("all__echo", json!({"text": "meanwhile"})), "meanwhile");
    let answer: Value = serde_json::from_slice(&asked.join().expect("it answers").stdout).expect("JSON");
    assert_eq!((&answer["upgraded"], &answer["postponed"]), (&json!(false), &json!("1 request is open")));
    assert_eq!(gate.place.audit_of("upgraded").len(), 0);
    // It takes place as soon as the call is over.
    let reply = long.answer();
    assert_eq!(reply.messages().iter().filter(|message| message["id"] == BEGUN_ID).count(), 1, "{}", reply.text());
    gate.place.recorded("upgraded", 1);
    assert_eq!(gate.child("all"), child);
    assert_eq!(other.call("all__echo", json!({"text": "after"})), "after");
    gate.end();
}

#[test]
fn a_question_to_a_client_is_answered_before_the_upgrade() {
    let place = Place::new();
    let config = config(&place, "");
    let gate = Gate::listen(place, &config);
    gate.is("own", "ready");
    let mut session = Session::open_declaring(&gate.address, json!({"roots": {}}));
    let mut asks = session.begin("own__ask", &json!({"method": "roots/list", "params": {}}), None);
    asks.head();
    let question = asks.event();
    assert_eq!(question["method"], "roots/list");
    let home = gate.place.path().to_owned();
    let asked = thread::spawn(move || outlast_in(&home, &["upgrade", "--program", NEXT, "--json"]));
    gate.client.says("Requested by");
    // The answer is one more request over HTTP, which is not held.
    let answer = json!({"jsonrpc": "2.0", "id": question["id"], "result": {"roots": []}});
    assert_eq!(session.post(&answer).status, 202);
    assert_eq!(asks.event()["id"], BEGUN_ID);
    let answer: Value = serde_json::from_slice(&asked.join().expect("it answers").stdout).expect("JSON");
    assert_eq!(answer["upgraded"], true, "{answer}");
    gate.end();
}

#[test]
fn backoffs_switches_and_counts_go_on() {
    let place = Place::new();
    let fail = place.join("fail");
    let late = "delay_first = \"3s\"\ndelay_max = \"3s\"\nfirst_restart = \"delay\"\nmax_restarts = 0";
    let hopeless = "delay_first = \"10ms\"\ndelay_max = \"10ms\"\nmax_restarts = 1";
    let config = config(&place, "")
        + &backend("late", &["--era", "legacy"], late)
        + &backend("hopeless", &["--era", "legacy", "--fail-if", &fail], hopeless);
    let gate = Gate::listen(place, &config);
    ["all", "late", "hopeless"].iter().for_each(|name| drop(gate.is(name, "ready")));
    let mut session = gate.session();
    assert_eq!(session.call("all__echo", json!({"text": "one"})), "one");
    // One was restarted, one is off, one waits, one was given up.
    let pid = gate.child("all");
    signal(pid, Signal::SIGKILL);
    until("a new process", || (gate.is("all", "ready")["pid"] != pid).then_some(()));
    assert!(gate.outlast(&["switch", "--off", "own"]).status.success());
    fs::write(&fail, "").expect("a file");
    signal(gate.child("hopeless"), Signal::SIGKILL);
    gate.is("hopeless", "given_up");
    signal(gate.child("late"), Signal::SIGKILL);
    gate.is("late", "backoff");
    let before = gate.state();
    upgraded(&gate, NEXT);
    let after = gate.state();
    let of = |state: &Value, name: &str, member: &str| {
        let backends = state["backends"].as_array().expect("backends");
        backends.iter().find(|backend| backend["name"] == name).map(|backend| backend[member].clone())
    };
    for name in ["all", "own", "late", "hopeless", "pool"] {
        for member in ["state", "restarts", "pid", "tools", "last_exit", "catalogue", "answered"] {
            assert_eq!(of(&before, name, member), of(&after, name, member), "{member} of {name}");
        }
    }
    for name in ["late", "hopeless"] {
        let left = |state: &Value| of(state, name, "next_try_s").and_then(|left| left.as_f64()).expect("a time");
        assert!(left(&after) <= left(&before) && left(&after) > 0.0, "{name}: {} {}", left(&before), left(&after));
    }
    assert!(after["uptime_s"].as_f64() > before["uptime_s"].as_f64());
    gate.is("late", "ready");
    assert!(gate.outlast(&["switch", "--on", "own"]).status.success());
    assert_eq!(session.call("own__echo", json!({"text": "on"})), "on");
    gate.end();
}

#[test]
fn a_changed_file_is_applied_as_a_reload() {
    let place = Place::new();
    let config = config(&place, "");
    let gate = Gate::listen_with(place, &config, |setup| setup.options(["--no-watch"]));
    let child = gate.child("all");
    let mut session = gate.session();
    // A file that cannot be read changes nothing.
    gate.place.write("outlast.toml", "[[backend]]\nname = 1\n");
    upgraded(&gate, OUTLAST);
    assert_eq!((gate.child("all"), session.call("all__echo", json!({"text": "old"}))), (child, "old".to_owned()));
    until("the refusal", || gate.state()["last_reload"]["error"].is_string().then_some(()));
    // Another one is applied by the new program.
    gate.place.write("outlast.toml", &(config.clone() + &backend("added", &["--era", "legacy"], HASTY)));
    upgraded(&gate, NEXT);
    until("the new backend", || {
        gate.state()["backends"].as_array()?.iter().any(|one| one["name"] == "added").then_some(())
    });
    gate.is("added", "ready");
    assert_eq!(gate.child("all"), child);
    assert_eq!(session.call("added__echo", json!({"text": "new"})), "new");
    // A backend that runs under other settings than the file has could not be started again by the next program.
    let failing = backend("added", &["--era", "legacy", "--fail-if", &gate.place.join("outlast.toml")], HASTY);
    gate.place.write("outlast.toml", &(config.clone() + &failing));
    assert!(!gate.outlast(&["reload"]).status.success());
    let said = refused(&gate, NEXT);
    assert!(said.contains("the changed configuration of the backend `added` was not applied"), "{said}");
    assert_eq!(session.call("added__echo", json!({"text": "still"})), "still");
    gate.place.write("outlast.toml", &(config.clone() + &backend("added", &["--era", "legacy"], HASTY)));
    assert!(gate.outlast(&["reload"]).status.success());
    // An unchanged one is no reload.
    let reloads = gate.place.audit_of("configured").len();
    assert!(reloads > 1, "{reloads}");
    upgraded(&gate, NEXT);
    // This one waits until the files have been read.
    upgraded(&gate, NEXT);
    assert_eq!(session.call("added__echo", json!({"text": "same"})), "same");
    assert_eq!(gate.place.audit_of("configured").len(), reloads);
    gate.end();
}

#[test]
fn upgrades_during_crashes_and_reloads() {
    let place = Place::new();
    let config = config(&place, "");
    let gate = Gate::listen(place, &config);
    gate.is("all", "ready");
    let mut session = gate.session();
    for round in 0..6 {
        let program = if round < 3 { OUTLAST } else { NEXT };
        match round % 3 {
            0 => signal(gate.child("all"), Signal::SIGKILL),
            1 => drop(gate.outlast(&["restart", "--reason", "a test", "all"])),
            _ => {
                let more = backend(&format!("extra{round}"), &["--era", "legacy", "--slow-start", "300"], HASTY);
                gate.place.write("outlast.toml", &(config.clone() + &more));
            }
        }
        upgraded(&gate, program);
        assert_eq!(session.call("all__echo", json!({"text": "still here"})), "still here");
    }
    gate.is("extra5", "ready");
    gate.end();
}

#[test]
fn sigusr2_upgrades_to_the_program_on_disk() {
    let place = Place::new();
    let program = place.join("outlast-on-disk");
    copy_program(OUTLAST, &program);
    let config = config(&place, "");
    let gate = Gate::listen_with(place, &config, |setup| setup.program(&program));
    let child = gate.child("all");
    let mut session = gate.session();
    let new = gate.place.join("new");
    copy_program(NEXT, &new);
    fs::rename(&new, &program).expect("the file is ours");
    signal(gate.client.pid(), Signal::SIGUSR2);
    let record = gate.place.recorded("upgraded", 1);
    assert!(record["detail"].as_str().is_some_and(|detail| detail.contains("writes version 2")), "{record}");
    assert_eq!((gate.child("all"), session.call("all__echo", json!({"text": "on"}))), (child, "on".to_owned()));
    // The sessions are recorded as before: after a kill they continue.
    assert_eq!(gate.state()["sessions"], json!({"open": 1, "stored": 0, "unrecorded": 0}));
    gate.end();
}

#[test]
fn a_program_that_cannot_take_over_changes_nothing() {
    let place = Place::new();
    let config = config(&place, "");
    let gate = Gate::listen(place, &config);
    let child = gate.child("all");
    let mut session = gate.session();
    let stream = listen(&gate.address, &session, None);
    let older = "#!/bin/sh\necho \"error: unrecognized subcommand 'check-state'\" >&2\nexit 2\n";
    let refusing = "#!/bin/sh\necho \"error: the state cannot be read\" >&2\nexit 1\n";
    // It proves that it can read the state, and then it is no program.
    let broken = format!("#!{OUTLAST}-not-there\n");
    let table = [
        (gate.place.script("silent", "#!/bin/sh\nexit 0\n"), "it is not outlast"),
        (gate.place.script("older", older), "an older version of outlast"),
        (gate.place.script("refusing", refusing), "the state cannot be read"),
        (gate.place.script("broken", &broken), "no such file"),
    ];
    for (number, (program, words)) in table.iter().enumerate() {
        let said = refused(&gate, program);
        assert!(said.contains(words), "{program}: {said}");
        gate.place.recorded("upgrade_failed", number + 1);
        assert_eq!((gate.child("all"), session.call("all__echo", json!({"text": "x"}))), (child, "x".to_owned()));
    }
    // The file is replaced after the check: the process is still the old program, and all connections are back.
    let swapped = gate.place.script("swapped", &swapping(&gate.place));
    let said = refused(&gate, &swapped);
    assert!(said.contains("cannot upgrade to"), "{said}");
    assert_eq!((gate.child("all"), session.call("all__echo", json!({"text": "y"}))), (child, "y".to_owned()));
    drop(stream);
    upgraded(&gate, NEXT);
    let said = refused(&gate, OUTLAST);
    assert!(said.contains("the state has version 2, and this program reads versions up to 1"), "{said}");
    assert_eq!((gate.child("all"), session.call("all__echo", json!({"text": "z"}))), (child, "z".to_owned()));
    gate.end();
}

/// A script that proves that it can read any state, and then replaces itself with a file that cannot be executed.
fn swapping(place: &Place) -> String {
    let own = place.join("swapped");
    format!(
        "#!/bin/sh\ncat > /dev/null\nprintf 'nothing' > {own}.new\nchmod 755 {own}.new\nmv {own}.new {own}\n\
             echo '{{\"outlast\":\"0\"}}'\n"
    )
}

#[test]
fn http_backends_keep_their_sessions() {
    let inner_place = Place::new();
    let inner = Gate::listen(inner_place, &backend("deep", &["--era", "legacy", "--resources"], HASTY));
    inner.is("deep", "ready");
    let far = format!("[[backend]]\nname = \"far\"\nurl = \"http://{}/mcp\"\nera = \"handshake\"\n\n", inner.address);
    let both = format!("[[backend]]\nname = \"both\"\nurl = \"http://{}/mcp\"\n\n", inner.address);
    let outer = Gate::listen(Place::new(), &(far + &both));
    ["far", "both"].iter().for_each(|name| drop(outer.is(name, "ready")));
    let mut session = outer.session();
    assert_eq!(session.call("far__deep__echo", json!({"text": "before"})), "before");
    assert_eq!(session.call("both__deep__echo", json!({"text": "before"})), "before");
    let open = inner.state()["sessions"]["open"].clone();
    for round in 0..3 {
        upgraded(&outer, if round == 0 { OUTLAST } else { NEXT });
        for name in ["far", "both"] {
            assert_eq!(session.call(&format!("{name}__deep__echo"), json!({"text": "after"})), "after");
        }
        assert_eq!(inner.state()["sessions"]["open"], open, "no session was opened or ended");
        assert_eq!(outer.state()["restarts"], 0);
    }
    outer.end();
    inner.end();
}

#[test]
fn real_clients_of_python_go_on() {
    let Some(peers) = Peers::find("gateway::upgrade::real_clients_of_python_go_on") else { return };
    let place = Place::new();
    let config = config(&place, "");
    let gate = Gate::listen(place, &config);
    ["all", "own"].iter().for_each(|name| drop(gate.is(name, "ready")));
    let child = gate.child("all");
    let url = format!("http://{}/mcp", gate.address);
    let mut clients: Vec<(Client, Peer, Project)> = [Client::PythonMcp1, Client::PythonMcp2Handshake, Client::TsSdk1]
        .into_iter()
        .map(|client| {
            let project = Project::new(&peers, Server::Filesystem);
            let peer = Peer::connect_as(client, &project, &url, None);
            (client, peer.unwrap_or_else(|error| panic!("{client:?}: {error}\n{}", project.stderr_tail())), project)
        })
        .collect();
    let sessions = gate.state()["sessions"]["open"].clone();
    let mut own = BTreeMap::new();
    for round in 0..4 {
        for (client, peer, project) in &mut clients {
            for backend in ["all", "own"] {
                let said = peer.call(&format!("{backend}__echo"), json!({"text": "on"}));
                assert!(
                    said.as_ref().is_ok_and(|said| said.text == "on"),
                    "{client:?}: {said:?} {}",
                    project.stderr_tail()
                );
            }
            let pid = peer.call("own__pid", json!({})).expect("a pid").text;
            assert_eq!(*own.entry(format!("{client:?}")).or_insert(pid.clone()), pid, "{client:?} keeps its process");
            peer.begin_call("all__sleep", json!({"ms": 300})).expect("a call");
        }
        until("the calls to run", || {
            let log = gate.place.log("all.log");
            (log.iter().filter(|(_, line)| line.contains("\"ms\":300")).count() == clients.len() * (round + 1))
                .then_some(())
        });
        // The calls are open when the upgrade is requested, and are answered first.
        upgraded(&gate, if round == 0 { OUTLAST } else { NEXT });
        for (client, peer, project) in &mut clients {
            let said = peer.end_call();
            assert!(
                said.as_ref().is_ok_and(|said| said.text == "slept"),
                "{client:?}: {said:?} {}",
                project.stderr_tail()
            );
        }
    }
    assert_eq!((&gate.state()["sessions"]["open"], gate.child("all")), (&sessions, child));
    assert_eq!(handshakes(&gate.place, "all").values().sum::<usize>(), 1);
    drop(clients);
    gate.end();
}
