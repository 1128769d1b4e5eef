//! The gateway itself is stopped or killed and started again: its HTTP sessions continue.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{
    web::{BEGUN_ID, Session},
    world::{Gate, HASTY, backend},
};
use crate::{
    mcp::client::{PATIENCE, Place, VERSION, signal, until},
    support::peers::{Client, Era, Peer, Peers, Project, Server},
};

const ANN: &str = "key-of-ann";
const BEN: &str = "key-of-ben";

fn auth() -> String {
    let key = |name: &str, key: &str| {
        let hash: String = Sha256::digest(key.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[auth.key]]\nname = \"{name}\"\nsha256 = \"{hash}\"\nrole = \"all\"\n")
    };
    key("ann", ANN) + &key("ben", BEN) + "[role.all]\nallow = [\"*\"]\n"
}

/// A configuration with a fixed port.
fn config(port: u16, children: &str, more: &str) -> String {
    let own = format!("{HASTY}\nchildren = {children:?}");
    let flags = ["--era", "legacy", "--resources", "--logging"];
    format!("[gateway]\nlisten = \"127.0.0.1:{port}\"\n\n") + &backend("one", &flags, &own) + more
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a port").port()
}

fn start(place: Place, config: &str) -> Gate {
    Gate::configured(place, config, |setup| setup)
}

fn end(gate: Gate, how: Signal) -> Place {
    let Gate { place, mut client, .. } = gate;
    signal(client.pid(), how);
    client.wait();
    place
}

fn restart(gate: Gate, how: Signal, config: &str) -> Gate {
    start(end(gate, how), config)
}

/// The files with the records, in any state directory of this project.
fn records(gate: &Gate) -> BTreeSet<PathBuf> {
    let dirs = fs::read_dir(gate.place.path().join(".outlast/gateway-sessions")).expect("a directory");
    let files = dirs.flat_map(|dir| fs::read_dir(dir.expect("a directory").path()).expect("a directory"));
    files
        .map(|file| file.expect("a file").path())
        .filter(|path| path.extension().is_some_and(|e| e == "json"))
        .collect()
}

#[test]
fn a_session_continues_after_a_restart_with_its_level_and_subscriptions() {
    for children in ["shared", "per_session"] {
        for (token, more) in [(None, String::new()), (Some(ANN), auth())] {
            for how in [Signal::SIGKILL, Signal::SIGTERM] {
                let config = config(free_port(), children, &more);
                let mut gate = start(Place::new(), &config);
                gate.is("one", "ready");
                until("what it offers", || (gate.backend("one")["catalogue"] == "confirmed").then_some(()));
                let mut session = Session::open_as(&gate.address, token);
                session.ask("logging/setLevel", json!({"level": "warning"}));
                let listed = session.ask("resources/list", json!({}));
                let uri = listed["result"]["resources"][0]["uri"].clone();
                assert_eq!(session.ask("resources/subscribe", json!({"uri": uri}))["result"], json!({}), "{listed}");
                assert_eq!(session.call("one__echo", json!({"text": "before"})), "before");
                let before = records(&gate);
                assert_eq!(before.len(), 1);
                for path in &before {
                    assert_eq!(fs::metadata(path).expect("a file").permissions().mode() & 0o777, 0o600);
                    let text = fs::read_to_string(path).expect("a file");
                    assert!(!text.contains(&session.id), "the id is a secret");
                }

                gate = restart(gate, how, &config);
                session.reconnect(&gate.address);
                assert_eq!(session.call("one__echo", json!({"text": "after"})), "after", "{children} {how}");
                // The new process of the backend was told the client's level and subscription.
                let state = until("level and subscription", || {
                    let state: Value = serde_json::from_str(&session.call("one__state", json!({}))).expect("JSON");
                    (state["level"] == "warning" && state["subscribed"] == json!([uri])).then_some(state)
                });
                assert_eq!(state["level"], "warning");
                assert_eq!(records(&gate), before, "the same session");
                let sessions = gate.state()["sessions"].clone();
                assert_eq!(sessions, json!({"open": 1, "stored": 0, "unrecorded": 0}));

                // A second restart; then the client ends the session.
                gate = restart(gate, how, &config);
                session.reconnect(&gate.address);
                assert_eq!(gate.state()["sessions"]["stored"], 1);
                assert_eq!(session.send("DELETE").status, 200);
                until("the record to be removed", || records(&gate).is_empty().then_some(()));
                assert_eq!(session.send("DELETE").status, 404);
                gate.end();
            }
        }
    }
}

#[test]
fn a_session_is_served_only_to_its_own_client() {
    let config = config(free_port(), "shared", &auth());
    let gate = start(Place::new(), &config);
    let ann = Session::open_as(&gate.address, Some(ANN));
    let gate = restart(gate, Signal::SIGKILL, &config);
    let mut ben = Session::open_as(&gate.address, Some(BEN));
    let own = std::mem::replace(&mut ben.id, ann.id.clone());
    let ping = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"});
    assert_eq!(ben.post(&ping).status, 404, "the session of another client");
    ben.id = "0123456789abcdef0123456789abcdef".into();
    assert_eq!(ben.post(&ping).status, 404, "an invented session");
    ben.id = own;
    assert_eq!(ben.post(&ping).status, 200);
    let mut ann = ann;
    ann.reconnect(&gate.address);
    assert_eq!(ann.post(&ping).status, 200);
    gate.end();
}

#[test]
fn a_session_that_expired_while_no_gateway_ran_is_gone() {
    let place = Place::new();
    let config = config(free_port(), "shared", "").replacen("[gateway]\n", "[gateway]\nsession_idle = \"1h\"\n", 1);
    let gate = start(place, &config);
    let (mut old, mut young) = (gate.session(), gate.session());
    let both = records(&gate);
    old.ask("ping", json!({}));
    let place = end(gate, Signal::SIGKILL);
    // The record of one session was written long ago, that of the other has a time in the future.
    let key = |id: &str| -> String {
        let number = u128::from_str_radix(id, 16).expect("an id");
        Sha256::digest(number.to_be_bytes()).iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    };
    for path in &both {
        let is_old = path.to_string_lossy().contains(&key(&old.id));
        let time = match is_old {
            true => std::time::SystemTime::now() - Duration::from_secs(7200),
            false => std::time::SystemTime::now() + Duration::from_secs(7200),
        };
        fs::File::options().write(true).open(path).and_then(|file| file.set_modified(time)).expect("a file of ours");
    }
    let gate = start(place, &config);
    gate.client.says("the clock was set back");
    old.reconnect(&gate.address);
    assert_eq!(old.post(&json!({"jsonrpc": "2.0", "id": 1, "method": "ping"})).status, 404);
    young.reconnect(&gate.address);
    assert_eq!(young.ask("ping", json!({}))["result"], json!({}));
    until("the expired record to be removed", || (records(&gate).len() == 1).then_some(()));
    gate.end();
}

#[test]
fn records_that_cannot_be_used_affect_no_other_session() {
    let config = config(free_port(), "shared", "");
    let gate = start(Place::new(), &config);
    let mut sessions: Vec<Session> = (0..5).map(|_| gate.session()).collect();
    let paths: Vec<PathBuf> = records(&gate).into_iter().collect();
    let place = end(gate, Signal::SIGKILL);
    let text = |at: usize| fs::read_to_string(&paths[at]).expect("a record");
    fs::write(&paths[0], text(0).replacen("revision", "revisiom", 1)).expect("damaged");
    fs::write(&paths[1], text(1).replacen("\"version\":1", "\"version\":9", 1)).expect("of a later version");
    fs::write(&paths[2], text(3)).expect("of another session");
    fs::write(paths[3].with_extension("txt"), "notes").expect("not ours");
    let gate = start(place, &config);
    let said = gate.client.says("3 session records cannot be used");
    for words in ["it is damaged", "it has version 9", "it was written for another session", "must initialize again"] {
        assert!(said.contains(words), "{said}");
    }
    let mut served = 0;
    for session in &mut sessions {
        session.reconnect(&gate.address);
        let reply = session.post(&json!({"jsonrpc": "2.0", "id": 1, "method": "ping"}));
        served += usize::from(reply.status == 200);
    }
    assert_eq!(served, 2);
    assert!(paths[1].exists() && !paths[0].exists() && !paths[2].exists(), "a later version may know its record");
    gate.end();
}

#[test]
fn where_nothing_can_be_written_sessions_are_served_without_a_record() {
    let config = config(free_port(), "shared", "");
    let gate = start(Place::new(), &config);
    // The directory is there when a record is.
    gate.session();
    let dir = fs::read_dir(gate.place.path().join(".outlast/gateway-sessions")).expect("a directory").next();
    let dir = dir.expect("a directory").expect("a directory").path();
    // A directory in place of each temporary file: no file can be opened there. Permissions would not stop root.
    let place = end(gate, Signal::SIGKILL);
    fs::remove_dir_all(&dir).expect("ours");
    fs::write(&dir, "a file in the way").expect("ours");
    let gate = start(place, &config);
    let said = gate.client.says("sessions do not survive a restart of the gateway");
    assert!(said.contains("; make it a directory that only this user can write to"), "{said}");
    let mut session = gate.session();
    assert_eq!(session.call("one__echo", json!({"text": "served"})), "served");
    assert_eq!(gate.state()["sessions"]["unrecorded"], 1);
    let metrics = super::web::Web::connect(&gate.address).get("/metrics").text();
    assert!(metrics.contains("outlast_sessions_unrecorded 1"), "{metrics}");
    gate.end();
}

/// The command that makes a directory read-only for the gateway alone, in two ways. Root ignores permissions unless it
/// drops the capabilities for that.
#[cfg(target_os = "linux")]
fn read_only_ways(dir: &Path) -> Vec<(&'static str, String)> {
    let is_root = nix::unistd::geteuid().is_root();
    let drop_rights = match is_root {
        true => "exec setpriv --bounding-set=-dac_override,-dac_read_search -- \"$@\"",
        false => "",
    };
    let dir = dir.display();
    let mount = format!("mount --bind {dir} {dir} && mount -o remount,bind,ro {dir} && exec \"$@\"");
    let root = if is_root { "" } else { "--map-root-user" };
    let unshare = format!("unshare {root} --mount --propagation private");
    let mut ways = vec![("a directory without write permission", drop_rights.to_owned())];
    let can_mount = Command::new("sh").args(["-c", &format!("{unshare} true")]).output();
    match can_mount.is_ok_and(|output| output.status.success()) {
        true => ways.push(("a read-only file system", format!("exec {unshare} sh -c '{mount}' sh \"$@\""))),
        false => {
            let skipped =
                "SKIPPED a part of gateway::restarts::in_a_read_only_directory: no mount namespace is permitted\n";
            io::stderr().write_all(skipped.as_bytes()).expect("stderr is open");
        }
    }
    ways
}

#[cfg(target_os = "linux")]
#[test]
fn in_a_read_only_directory_stored_sessions_continue_and_new_sessions_have_no_record() {
    let config = config(free_port(), "shared", "");
    let gate = start(Place::new(), &config);
    let mut stored = gate.session();
    let before = records(&gate);
    let dir = before.first().and_then(|path| path.parent()).expect("a record").to_owned();
    let mut place = end(gate, Signal::SIGKILL);
    for (way, words) in read_only_ways(&dir) {
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o500)).expect("ours");
        let gate = Gate::configured(place, &config, |setup| setup.before(&words));
        let mut new = gate.session();
        let said = gate.client.says("sessions do not survive a restart of the gateway");
        let cause = ["ermission denied", "ead-only file system"];
        assert!(cause.iter().any(|words| said.contains(words)), "{way}: {said}");
        assert!(said.contains("make it a directory that only this user can write to"), "{way}: {said}");
        assert_eq!(new.call("one__echo", json!({"text": "new"})), "new", "{way}");
        stored.reconnect(&gate.address);
        assert_eq!(stored.call("one__echo", json!({"text": "stored"})), "stored", "{way}");
        assert_eq!(gate.state()["sessions"], json!({"open": 2, "stored": 0, "unrecorded": 1}), "{way}");
        assert_eq!(records(&gate), before, "{way}");
        place = end(gate, Signal::SIGTERM);
    }
    // With write permission, all is as before.
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).expect("ours");
    let gate = start(place, &config);
    stored.reconnect(&gate.address);
    assert_eq!(stored.call("one__echo", json!({"text": "again"})), "again");
    gate.session();
    assert_eq!(records(&gate).len(), 2);
    gate.end();
}

/// A file that may not grow beyond 8 kB is a disk that is full when the record of a talkative client is written.
#[test]
fn on_a_full_disk_sessions_are_served_and_those_without_a_record_are_counted() {
    let config = config(free_port(), "shared", "");
    let gate = Gate::configured(Place::new(), &config, |setup| setup.before("trap '' XFSZ; ulimit -f 16"));
    let mut small = gate.session();
    let mut initialize = json!({
        "jsonrpc": "2.0", "id": 0, "method": "initialize",
        "params": {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "long", "version": "1"}},
    });
    initialize["params"]["clientInfo"]["title"] = "x".repeat(20_000).into();
    let mut web = super::web::Web::connect(&gate.address);
    let headers = [
        ("content-type", "application/json"),
        ("accept", "application/json, text/event-stream"),
        ("mcp-protocol-version", VERSION),
    ];
    let reply = web.ask("POST", "/mcp", &headers, initialize.to_string().as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.text());
    gate.client.says("sessions do not survive a restart of the gateway");
    assert_eq!(small.call("one__echo", json!({"text": "served"})), "served");
    assert_eq!(gate.state()["sessions"]["unrecorded"], 1);
    assert_eq!(records(&gate).len(), 1);

    let gate = restart(gate, Signal::SIGKILL, &config);
    small.reconnect(&gate.address);
    assert_eq!(small.call("one__echo", json!({"text": "again"})), "again");
    gate.end();
}

#[test]
fn two_gateways_never_use_the_same_records() {
    let (port, other) = (free_port(), free_port());
    let place = Place::new();
    let first = start(place, &config(port, "shared", ""));
    let mut session = first.session();
    // Gateways with the same name and address share a lock, which the first one holds. A second gateway could not
    // listen beside it, so the test checks the lock itself.
    let dir = records(&first).into_iter().next().expect("a record").parent().expect("a directory").to_owned();
    let lock = fs::File::options().write(true).open(dir.join("lock")).expect("a lock");
    let taken = nix::fcntl::Flock::lock(lock, nix::fcntl::FlockArg::LockExclusiveNonblock);
    assert!(taken.is_err(), "the gateway holds the lock");
    let place = end(first, Signal::SIGKILL);
    // Another process holds the lock: the gateway serves, and reports that it stores no sessions.
    let lock = fs::File::options().write(true).open(dir.join("lock")).expect("a lock");
    let taken = nix::fcntl::Flock::lock(lock, nix::fcntl::FlockArg::LockExclusiveNonblock).expect("free after kill -9");
    let second = start(place, &config(port, "shared", ""));
    second.client.says("another gateway uses");
    assert_eq!(second.session().ask("ping", json!({}))["result"], json!({}));
    drop(taken);
    // With another address it is another gateway, with its own records.
    let place = end(second, Signal::SIGKILL);
    let third = start(place, &config(other, "shared", ""));
    third.session();
    session.reconnect(&third.address);
    assert_eq!(session.post(&json!({"jsonrpc": "2.0", "id": 1, "method": "ping"})).status, 404);
    assert_eq!(records(&third).iter().filter(|path| !path.starts_with(&dir)).count(), 1);
    third.end();
}

/// One request over a new connection; an error if the connection breaks before the answer is complete.
fn try_call(address: &str, id: &str, token: Option<&str>, text: &str) -> io::Result<(u16, String)> {
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "one__echo", "arguments": {"text": text}}});
    let body = body.to_string();
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let token = token.map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default();
    write!(
        stream,
        "POST /mcp HTTP/1.1\r\nhost: {address}\r\ncontent-length: {}\r\ncontent-type: application/json\r\nconnection: close\r\n\
         accept: application/json, text/event-stream\r\nmcp-protocol-version: {VERSION}\r\nmcp-session-id: {id}\r\n{token}\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok());
    status.map(|status| (status, answer)).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Sessions of a plain client that call all the time, each on new connections.
struct Load {
    workers: Vec<thread::JoinHandle<([usize; ROUNDS], usize)>>,
    is_over: Arc<AtomicBool>,
    round: Arc<AtomicUsize>,
}

/// Sessions that load the gateway.
const LOAD: usize = 32;
/// The gateway runs so many times in a test under load: it is killed twice.
const ROUNDS: usize = 3;
/// Calls that a session may make after the end of the load until one of the last round is answered.
const TRIES_AFTER_END: usize = 100;

impl Load {
    fn start(address: &str, token: Option<&'static str>) -> Load {
        let ids: Vec<String> = (0..LOAD).map(|_| Session::open_as(address, token).id).collect();
        let is_over = Arc::new(AtomicBool::new(false));
        let round = Arc::new(AtomicUsize::new(0));
        let work = |id: String| {
            let (address, is_over, round) = (address.to_owned(), is_over.clone(), round.clone());
            thread::spawn(move || {
                // Calls that were answered in each round, and those whose connection broke.
                let (mut answered, mut broken) = ([0_usize; ROUNDS], 0_usize);
                let mut tries_left = TRIES_AFTER_END;
                loop {
                    let at = round.load(Ordering::SeqCst);
                    // A session may be open again before its first call is answered: that answer is waited for.
                    if is_over.load(Ordering::SeqCst) {
                        if answered[at] > 0 || tries_left == 0 {
                            break;
                        }
                        tries_left -= 1;
                    }
                    match try_call(&address, &id, token, "load") {
                        Ok((200, answer)) if answer.contains("load") => answered[at] += 1,
                        Ok((status, answer)) => panic!("{status}: {answer}"),
                        Err(_) => broken += 1,
                    }
                    thread::sleep(Duration::from_millis(5));
                }
                (answered, broken)
            })
        };
        let workers = ids.into_iter().map(work).collect();
        Load { workers, is_over, round }
    }

    /// The gateway was started again.
    fn next_round(&self) {
        self.round.fetch_add(1, Ordering::SeqCst);
    }

    /// Each session was served in each round.
    fn end(self) {
        self.is_over.store(true, Ordering::SeqCst);
        for worker in self.workers {
            let (answered, broken) = worker.join().expect("no session was refused");
            assert!(answered.iter().all(|count| *count > 0), "{answered:?}, {broken} broken");
        }
    }
}

/// Each combination: with `shared` and `per_session` backends, with auth and without.
fn combinations() -> [(&'static str, Option<&'static str>, String); 4] {
    [
        ("shared", None, String::new()),
        ("shared", Some(ANN), auth()),
        ("per_session", None, String::new()),
        ("per_session", Some(ANN), auth()),
    ]
}

/// Waits until these sessions are open, and checks that no other is stored.
fn all_are_back(gate: &Gate, count: usize) {
    let sessions = json!({"open": count, "stored": 0, "unrecorded": 0});
    until("every session to be used again", || (gate.state()["sessions"] == sessions).then_some(()));
    assert_eq!(records(gate).len(), count, "no session was opened anew");
}

#[test]
fn thirty_two_sessions_under_load_continue_after_kill_9() {
    for (children, token, more) in combinations() {
        let config = config(free_port(), children, &more);
        let mut gate = start(Place::new(), &config);
        gate.is("one", "ready");
        let load = Load::start(&gate.address, token);
        for _ in 1..ROUNDS {
            thread::sleep(Duration::from_millis(700));
            gate = restart(gate, Signal::SIGKILL, &config);
            gate.is("one", "ready");
            load.next_round();
        }
        all_are_back(&gate, LOAD);
        thread::sleep(Duration::from_millis(700));
        load.end();
        gate.end();
    }
}

const REAL_CLIENTS: [Client; 6] = [
    Client::PythonMcp1,
    Client::PythonMcp2Handshake,
    Client::PythonFastmcpHandshake,
    Client::TsSdk1,
    Client::TsClient2,
    Client::Rmcp,
];

/// One client of each SDK, connected to this gateway. Each has a session.
fn real_clients(peers: &Peers, gate: &Gate, token: Option<&str>) -> Vec<(Client, Peer, Project)> {
    let before = records(gate).len();
    let url = format!("http://{}/mcp", gate.address);
    let connect = |client: Client| {
        let project = Project::new(peers, Server::Filesystem);
        let peer = Peer::connect_as(client, &project, &url, token);
        let peer = peer.unwrap_or_else(|error| panic!("{client:?}: {error}\n{}", project.stderr_tail()));
        assert_eq!(peer.era(), Era::Handshake, "{client:?}");
        (client, peer, project)
    };
    let all: Vec<_> = REAL_CLIENTS.into_iter().map(connect).collect();
    assert_eq!(records(gate).len(), before + all.len(), "each has a session, which is stored");
    all
}

/// A connection error ends only the call, not the client. The clients of Python end if their response has not begun.
fn survives_errors(client: Client) -> bool {
    matches!(client, Client::TsSdk1 | Client::TsClient2 | Client::Rmcp)
}

/// Starts a call of each of these clients that ends only with the gateway, and waits until the backend runs all of them.
fn begin_calls<'a>(gate: &Gate, clients: impl Iterator<Item = &'a mut (Client, Peer, Project)>) {
    let running = || gate.place.log("calls.log").iter().filter(|(_, line)| line.contains("600000")).count();
    let mut expected = running();
    for (client, peer, _) in clients {
        peer.begin_call("one__sleep", json!({"ms": 600_000})).unwrap_or_else(|error| panic!("{client:?}: {error}"));
        expected += 1;
    }
    until("the calls to run", || (running() == expected).then_some(()));
}

/// Waits until the response to each call that runs has begun, as a stream: that of a later call has.
fn responses_have_begun(gate: &Gate, token: Option<&str>) -> Session {
    let session = Session::open_with(&gate.address, token, "2025-11-25");
    let head = session.begin("one__sleep", &json!({"ms": 600_000}), None).head();
    assert_eq!(head.header("content-type"), Some("text/event-stream"));
    session
}

/// Each call that was in flight ends with an error, which is returned.
fn end_calls<'a>(clients: impl Iterator<Item = &'a mut (Client, Peer, Project)>) -> Vec<String> {
    let mut errors = Vec::new();
    for (client, peer, project) in clients {
        match peer.end_call() {
            Ok(said) => panic!("{client:?}: a call in flight did not fail: {said:?}\n{}", project.stderr_tail()),
            Err(error) => errors.push(format!("{client:?}: {error}")),
        }
    }
    errors
}

/// The next call of each client succeeds.
fn next_calls_succeed(clients: &mut [(Client, Peer, Project)], round: usize) {
    let mut failures = Vec::new();
    for (client, peer, project) in clients {
        let text = format!("round {round}");
        match peer.call("one__echo", json!({"text": text})) {
            Ok(said) if said.text == text && !said.is_error => {}
            said => failures.push(format!("{client:?}, {text}: {said:?}\n{}", project.stderr_tail())),
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

/// The configuration with a log of what the backend was told.
fn logged(config: &str) -> String {
    config.replacen("\"--logging\"", "\"--logging\", \"--log\", \"calls.log\"", 1)
}

/// The clients of six SDKs continue on the same session: the files of the records have the hashes of the session ids as
/// their names.
#[test]
fn real_clients_continue_under_load_after_kill_9() {
    let Some(peers) = Peers::find("gateway::restarts::real_clients_continue_under_load_after_kill_9") else { return };
    for (children, token, more) in combinations() {
        let config = logged(&config(free_port(), children, &more));
        let mut gate = start(Place::new(), &config);
        until("what it offers", || (gate.backend("one")["catalogue"] == "confirmed").then_some(()));
        let load = Load::start(&gate.address, token);
        let mut clients = real_clients(&peers, &gate, token);
        let before = records(&gate);
        // The responses have begun: each client resumes its stream, and learns there that its call was lost.
        next_calls_succeed(&mut clients, 0);
        begin_calls(&gate, clients.iter_mut());
        let mut other = responses_have_begun(&gate, token);
        gate = restart(gate, Signal::SIGKILL, &config);
        let errors = end_calls(clients.iter_mut());
        assert!(errors.iter().all(|error| error.contains("The gateway ended while this was running")), "{errors:?}");
        next_calls_succeed(&mut clients, 1);
        other.reconnect(&gate.address);
        assert_eq!(other.send("DELETE").status, 200);
        load.next_round();
        // The responses have not begun.
        begin_calls(&gate, clients.iter_mut().filter(|(client, ..)| survives_errors(*client)));
        gate = restart(gate, Signal::SIGKILL, &config);
        end_calls(clients.iter_mut().filter(|(client, ..)| survives_errors(*client)));
        next_calls_succeed(&mut clients, 2);
        load.next_round();
        all_are_back(&gate, LOAD + clients.len());
        assert_eq!(records(&gate), before, "{children}: the same sessions");
        next_calls_succeed(&mut clients, ROUNDS);
        load.end();
        drop(clients);
        gate.end();
    }
}

/// The id of the last event names the request. After the restart the stream is a new one, with the answer to that
/// request and nothing else.
#[test]
fn the_stream_of_a_lost_request_begins_anew() {
    let config = config(free_port(), "shared", "");
    let gate = start(Place::new(), &config);
    gate.is("one", "ready");
    let mut session = gate.session();
    let mut stream = session.begin("one__progress", &json!({"steps": 1000, "ms": 1000}), Some("token"));
    stream.head();
    let last = stream.event_id();
    let gate = restart(gate, Signal::SIGKILL, &config);
    session.reconnect(&gate.address);
    for _ in 0..2 {
        let reply = session.resume(&last);
        assert_eq!((reply.status, reply.header("content-type")), (200, Some("text/event-stream")), "{}", reply.text());
        let answers = reply.messages();
        assert_eq!(answers.len(), 1, "{}", reply.text());
        assert_eq!((&answers[0]["id"], &answers[0]["error"]["code"]), (&json!(BEGUN_ID), &json!(7001)));
        let data = json!({"from": "outlast", "reason": "gateway_ended", "outcome": "unknown"});
        assert_eq!(answers[0]["error"]["data"], data);
    }
    assert_eq!(session.call("one__echo", json!({"text": "after"})), "after");
    for wrong in ["nonsense", "1-2-3", "9-1-tzz"] {
        assert_eq!(session.resume(wrong).status, 400, "{wrong}");
    }
    gate.end();
}
