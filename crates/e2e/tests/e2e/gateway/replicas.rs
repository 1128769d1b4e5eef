//! Several gateways as one: real replicas, a real NATS, and clients that may use any replica for each request.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::{
    web::{BEGUN_ID, Session},
    world::{Gate, HASTY, backend},
};
use crate::{
    mcp::client::{PUPPET, Place, is_alive, signal, until},
    support::{
        nats::{NatsPrograms, NatsServer, Version},
        peers::{Client, Peer, Peers, Project, Server},
    },
};

mod large;
mod minority;
mod security;

/// A replica with a backend of its own (`each`) and one that runs once in the cluster (`one`). The latter holds a lock while it
/// runs: a second process at the same time would exit with 99.
struct Team {
    nats: NatsServer,
    lock: TempDir,
    more: String,
    of_backends: String,
}

impl Team {
    fn new(test: &str) -> Option<Team> {
        Some(Team::with(NatsPrograms::find(test)?.one()))
    }

    fn with(nats: NatsServer) -> Team {
        let lock = TempDir::new().expect("a directory");
        Team { nats, lock, more: String::new(), of_backends: String::new() }
    }

    fn lock(&self) -> PathBuf {
        self.lock.path().join("lock")
    }

    /// What the process of `one` was told.
    fn log(&self) -> PathBuf {
        self.lock.path().join("log")
    }

    /// Waits until so many calls that sleep for long have reached `one`.
    fn sleeps(&self, count: usize) {
        until("the call to run", || {
            let log = fs::read_to_string(self.log()).unwrap_or_default();
            (log.lines().filter(|line| line.contains("600000")).count() >= count).then_some(())
        });
    }

    fn config(&self, replica: &str) -> String {
        let url = self.nats.url();
        let own = format!("{HASTY}\n{}", self.of_backends);
        let flags = ["--era", "legacy", "--resources", "--logging"];
        let lock = self.lock();
        let log = self.log();
        let args =
            ["-n", "-E", "99", &lock.to_string_lossy(), PUPPET, "--era", "legacy", "--log", &log.to_string_lossy()]
                .map(|arg| format!("{arg:?}"));
        format!("[cluster]\nnats = {url:?}\nname = \"team\"\nreplica = {replica:?}\n{}\n", self.more)
            + &backend("each", &flags, &own)
            + &format!(
                "[[backend]]\nname = \"one\"\ncommand = \"flock\"\nargs = [{}]\nplacement = \"one\"\n{HASTY}\n",
                args.join(", ")
            )
    }

    /// A replica that is part of the cluster.
    fn start(&self, replica: &str) -> Gate {
        let gate = self.start_alone(replica);
        until("NATS", || (gate.state()["cluster"]["connected"] == true).then_some(()));
        gate.is("each", "ready");
        gate.is("one", "ready");
        until("what they offer", || {
            ["each", "one"].iter().all(|name| gate.backend(name)["catalogue"] == "confirmed").then_some(())
        });
        gate
    }

    fn start_alone(&self, replica: &str) -> Gate {
        Gate::listen(Place::new(), &self.config(replica))
    }
}

/// No process of `one` has ever met another.
fn never_two(gates: &[&Gate]) {
    for gate in gates {
        let text = fs::read_to_string(gate.place.path().join(".outlast/audit.jsonl")).expect("an audit log");
        assert!(!text.contains("\"exit_code\":99"), "two processes at the same time:\n{text}");
    }
}

fn owner<'a>(gates: &[&'a Gate]) -> (&'a Gate, Vec<&'a Gate>) {
    let name = until("an owner", || gates[0].backend("one")["owner"].as_str().map(str::to_owned));
    let is_owner = |gate: &&&Gate| gate.state()["cluster"]["replica"] == name.as_str();
    let owner = gates.iter().find(is_owner).unwrap_or_else(|| panic!("no gate is {name}"));
    (owner, gates.iter().copied().filter(|gate| !std::ptr::eq(*gate, *owner)).collect())
}

fn kill(gate: Gate, how: Signal) -> Place {
    let Gate { place, mut client, .. } = gate;
    signal(client.pid(), how);
    client.wait();
    place
}

#[test]
fn any_replica_serves_a_session() {
    for children in ["shared", "per_session"] {
        let Some(mut team) = Team::new("gateway::replicas::any_replica_serves_a_session") else { return };
        team.of_backends = format!("children = {children:?}");
        let (a, b) = (team.start("a"), team.start("b"));
        let mut session = a.session();
        let pid = session.call("each__pid", json!({}));
        session.ask("logging/setLevel", json!({"level": "warning"}));
        // The same process answers: the request is forwarded to the home of the session.
        session.reconnect(&b.address);
        assert_eq!(session.call("each__pid", json!({})), pid);
        let state: Value = serde_json::from_str(&session.call("each__state", json!({}))).expect("JSON");
        assert_eq!(state["level"], "warning");
        let uri = session.ask("resources/list", json!({}))["result"]["resources"][0]["uri"].clone();
        assert_eq!(session.ask("resources/subscribe", json!({"uri": uri}))["result"], json!({}));
        // Progress arrives on the stream of a forwarded call.
        let mut stream = session.begin("each__progress", &json!({"steps": 3, "ms": 10}), Some("token"));
        let reply = stream.answer();
        let steps = reply.messages().iter().filter(|message| message["method"] == "notifications/progress").count();
        assert_eq!(steps, 3, "{}", reply.text());
        // A body of several packets.
        let large = "x".repeat(3 << 20);
        assert_eq!(session.call("each__echo", json!({"text": large})), large);
        assert_eq!(session.call("one__echo", json!({"text": large})), large);
        // Both replicas use the process of the owner.
        let placed = session.call("one__pid", json!({}));
        session.reconnect(&a.address);
        assert_eq!(session.call("one__pid", json!({})), placed);
        session.reconnect(&b.address);
        assert_eq!(session.send("DELETE").status, 200);
        for gate in [&a, &b] {
            session.reconnect(&gate.address);
            assert_eq!(session.post(&json!({"jsonrpc": "2.0", "id": 1, "method": "ping"})).status, 404);
        }
        never_two(&[&a, &b]);
        a.end();
        b.end();
    }
}

#[test]
fn a_session_is_not_served_to_another_client_by_any_replica() {
    let Some(mut team) = Team::new("gateway::replicas::a_session_is_not_served_to_another_client") else { return };
    let key = |name: &str| {
        let hash: String = Sha256::digest(name.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[auth.key]]\nname = \"{name}\"\nsha256 = \"{hash}\"\nrole = \"all\"\n")
    };
    team.more = key("ann") + &key("ben") + "[role.all]\nallow = [\"*\"]\n";
    let (a, b) = (team.start("a"), team.start("b"));
    let mut session = Session::open_as(&a.address, Some("ann"));
    for gate in [&b, &a] {
        session.reconnect(&gate.address);
        session.token = Some("Bearer ben".to_owned());
        let reply = session.post(&json!({"jsonrpc": "2.0", "id": 1, "method": "ping"}));
        assert_eq!(reply.status, 404, "{}", reply.text());
        assert_eq!(session.send("DELETE").status, 404);
        session.token = Some("Bearer ann".to_owned());
        assert_eq!(session.call("each__echo", json!({"text": "mine"})), "mine");
    }
    // Invented ids are read from NATS, and not found.
    session.id = "0123456789abcdef0123456789abcdef".to_owned();
    assert_eq!(session.post(&json!({"jsonrpc": "2.0", "id": 1, "method": "ping"})).status, 404);
    a.end();
    b.end();
}

#[test]
fn a_session_continues_when_its_home_is_killed() {
    for children in ["shared", "per_session"] {
        let Some(mut team) = Team::new("gateway::replicas::a_session_continues_when_its_home_is_killed") else {
            return;
        };
        team.of_backends = format!("children = {children:?}");
        let (a, b) = (team.start("a"), team.start("b"));
        let mut session = a.session();
        session.ask("logging/setLevel", json!({"level": "error"}));
        session.reconnect(&b.address);
        // A call that was forwarded when its home was killed fails once, and says so.
        let mut web = session.begin("each__sleep", &json!({"ms": 600_000}), None);
        until("the call to run", || (a.backend("each")["in_flight"].as_u64() != Some(0)).then_some(()));
        let place = kill(a, Signal::SIGKILL);
        let reply = web.answer();
        let answers: Vec<Value> = reply.messages().into_iter().filter(|message| message["id"] == BEGUN_ID).collect();
        match answers.as_slice() {
            [answer] => assert_eq!(answer["error"]["data"]["outcome"], "unknown", "{answer}"),
            // Its response had become a stream, which ended: the client resumes it.
            [] => assert_eq!(reply.header("content-type"), Some("text/event-stream")),
            more => panic!("answered twice: {more:?}"),
        }
        assert_eq!(session.call("each__echo", json!({"text": "next"})), "next");
        let state: Value = serde_json::from_str(&session.call("each__state", json!({}))).expect("JSON");
        assert_eq!(state["level"], "error", "the handshake was repeated, {children}");
        // The replica comes back under its name, and forwards to the new home.
        let config = team.config("a");
        let a = Gate::listen(place, &config);
        a.is("each", "ready");
        session.reconnect(&a.address);
        assert_eq!(session.call("each__echo", json!({"text": "forwarded"})), "forwarded");
        never_two(&[&a, &b]);
        a.end();
        b.end();
    }
}

#[test]
fn another_replica_takes_over_a_backend_whose_owner_is_lost() {
    let Some(team) = Team::new("gateway::replicas::another_replica_takes_over_a_backend") else { return };
    let (a, b) = (team.start("a"), team.start("b"));
    let (first, others) = owner(&[&a, &b]);
    let other = others[0];
    let mut session = other.session();
    let before = session.call("one__pid", json!({}));
    // The process crashes: it is restarted by its owner, and a call in flight is answered.
    let web = session.begin("one__sleep", &json!({"ms": 600_000}), None);
    team.sleeps(1);
    signal(before.parse().expect("a pid"), Signal::SIGKILL);
    assert_eq!(failed(web)["outcome"], "unknown");
    let second = session.call("one__pid", json!({}));
    assert_ne!(second, before);
    // The owner hangs. Its process is killed before the lease ends, and the other replica starts one of its own.
    let web = session.begin("one__sleep", &json!({"ms": 600_000}), None);
    team.sleeps(2);
    signal(first.client.pid(), Signal::SIGSTOP);
    assert_eq!(failed(web)["outcome"], "unknown");
    let third = until("the takeover", || {
        let result = session.result("one__pid", json!({}));
        (result["isError"] != true).then(|| crate::mcp::client::text(&result))
    });
    assert_ne!(third, second);
    let is_old_alive = is_alive(second.parse().expect("a pid"));
    assert!(!is_old_alive, "the old process has ended before the new one starts");
    // It runs again, and uses the process of the new owner.
    signal(first.client.pid(), Signal::SIGCONT);
    let mut late = first.session();
    until("the owner that was stopped", || {
        let result = late.result("one__pid", json!({}));
        (result["isError"] != true && crate::mcp::client::text(&result) == third).then_some(())
    });
    never_two(&[&a, &b]);
    // A clean stop releases the lease.
    let (left, leaving) = match std::ptr::eq(other, &a) {
        true => (b, a),
        false => (a, b),
    };
    leaving.end();
    let mut session = left.session();
    until("the takeover", || (session.result("one__pid", json!({}))["isError"] != true).then_some(()));
    never_two(&[&left]);
    left.end();
}

/// The data of the error that a call ended with.
fn failed(mut web: super::web::Web) -> Value {
    let reply = web.answer();
    let answer = reply.messages().into_iter().find(|message| message["id"] == BEGUN_ID);
    let answer = answer.unwrap_or_else(|| panic!("no answer: {}", reply.text()));
    match &answer["error"]["data"] {
        Value::Null => answer["result"]["_meta"]["outlast/failure"].clone(),
        data => data.clone(),
    }
}

#[test]
fn switches_apply_to_all_replicas_and_to_those_that_join_later() {
    let Some(team) = Team::new("gateway::replicas::switches_apply_to_all_replicas") else { return };
    let (a, b) = (team.start("a"), team.start("b"));
    let (mut in_a, mut in_b) = (a.session(), b.session());
    assert_eq!(in_b.call("each__echo", json!({"text": "on"})), "on");
    assert!(a.outlast(&["switch", "--off", "each__echo"]).status.success());
    until("the switch on the other replica", || (!in_b.tools().contains(&"each__echo".to_owned())).then_some(()));
    assert!(!in_a.tools().contains(&"each__echo".to_owned()));
    let c = team.start("c");
    until("the switch on a new replica", || (!c.session().tools().contains(&"each__echo".to_owned())).then_some(()));
    // A backend that is off stops at its owner, whichever replica was asked.
    let pid: String = in_a.call("one__pid", json!({}));
    assert!(c.outlast(&["switch", "--off", "one"]).status.success());
    until("the end of its process", || (!PathBuf::from(format!("/proc/{pid}")).exists()).then_some(()));
    assert!(b.outlast(&["switch", "--on", "one"]).status.success());
    until("the next process", || {
        let answer = in_a.ask("tools/call", json!({"name": "one__pid", "arguments": {}}));
        let result = &answer["result"];
        (result.is_object() && result["isError"] != true && crate::mcp::client::text(result) != pid).then_some(())
    });
    assert!(c.outlast(&["switch", "--on", "each__echo"]).status.success());
    until("the switch on the first replica", || in_a.tools().contains(&"each__echo".to_owned()).then_some(()));
    a.end();
    b.end();
    c.end();
}

#[test]
fn replicas_serve_alone_without_nats_and_join_again() {
    let Some(mut team) = Team::new("gateway::replicas::replicas_serve_alone_without_nats") else { return };
    let (a, b) = (team.start("a"), team.start("b"));
    let mut session = a.session();
    assert_eq!(session.call("each__echo", json!({"text": "with"})), "with");
    team.nats.kill();
    until("the loss to show", || (a.state()["cluster"]["connected"] == false).then_some(()));
    assert_eq!(session.call("each__echo", json!({"text": "without"})), "without");
    // It is ready for what it can serve, and says what it cannot.
    let mut web = super::web::Web::connect(&a.address);
    let ready = web.get("/ready");
    let body: Value = serde_json::from_str(&ready.text()).expect("JSON");
    assert_eq!((ready.status, &body["cluster"]["connected"]), (200, &json!(false)), "{body}");
    assert!(web.get("/metrics").text().contains("\noutlast_cluster_connected 0\n"));
    let mut local = b.session();
    assert_eq!(local.call("each__echo", json!({"text": "local"})), "local");
    assert_eq!(b.state()["cluster"]["sessions_local"], 1);
    // The lease ends, and with it the process.
    until("the process of the owner to end", || {
        [&a, &b].iter().all(|gate| gate.backend("one")["state"] != "ready").then_some(())
    });
    team.nats.restart();
    for gate in [&a, &b] {
        until("NATS again", || (gate.state()["cluster"]["connected"] == true).then_some(()));
    }
    session.reconnect(&b.address);
    let said = until("the session on the other replica", || {
        let reply = session.post(&json!({"jsonrpc": "2.0", "id": "x", "method": "ping"}));
        (reply.status == 200).then_some(reply)
    });
    assert_eq!(said.messages()[0]["result"], json!({}));
    until("the backend that runs once", || (local.result("one__pid", json!({}))["isError"] != true).then_some(()));
    never_two(&[&a, &b]);
    a.end();
    b.end();
}

/// What a user of NATS without permissions for the cluster is told when it subscribes.
fn subscribe_as_stranger(port: u16, subject: &str) -> String {
    let mut line = TcpStream::connect(("127.0.0.1", port)).expect("NATS listens");
    let hello = r#"{"verbose":false,"user":"stranger","pass":"known"}"#;
    write!(line, "CONNECT {hello}\r\nSUB {subject} 1\r\nPING\r\n").expect("NATS reads");
    let (mut said, mut part) = (String::new(), [0; 4096]);
    while !said.contains("PONG") {
        let length = line.read(&mut part).expect("NATS answers");
        assert!(length > 0, "NATS closed the connection: {said}");
        said += &String::from_utf8_lossy(&part[..length]);
    }
    said
}

#[test]
fn the_permissions_of_the_example_are_enough_and_others_see_nothing() {
    let Some(programs) = NatsPrograms::find("gateway::replicas::the_permissions_of_the_example") else { return };
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/cluster/nats.conf");
    let example = fs::read_to_string(example).expect("the example");
    let (_, users) = example.split_once("authorization {").expect("it has users");
    let users = users.replace("v1.tools", "v1.team").replace("v1_tools", "v1_team").replace("$NATS_PASSWORD", "right");
    let stranger = "{ user: stranger, password: known, permissions: { publish: \"own.>\", subscribe: \"own.>\" } }";
    let users = users.replacen("users: [", &format!("users: [ {stranger}"), 1);
    let lines = format!("jetstream {{}}\nauthorization {{{users}");
    let mut team = Team::with(programs.one_with(Version::Newest, &lines));
    team.more = "user = \"outlast\"\npassword = \"right\"".to_owned();
    let (a, b) = (team.start("a"), team.start("b"));
    let mut session = a.session();
    assert_eq!(session.call("one__echo", json!({"text": "at the owner"})), "at the owner");
    session.reconnect(&b.address);
    assert_eq!(session.call("one__echo", json!({"text": "from the other"})), "from the other");
    assert_eq!(session.call("each__echo", json!({"text": "forwarded"})), "forwarded");
    assert_eq!(b.state()["cluster"]["sessions_local"], 0);
    assert!(a.outlast(&["switch", "--off", "each__echo"]).status.success());
    until("the switch on the other replica", || {
        (!b.session().tools().contains(&"each__echo".to_owned())).then_some(())
    });
    // The records of both replicas can be read from the stream.
    until("the audit of both", || {
        let output = a.outlast(&["audit", "--cluster", "--json"]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (text.contains("\"id\":\"a-") && text.contains("\"id\":\"b-")).then_some(())
    });
    for subject in [">", "outlast.v1.team.>", "$KV.>", "$JS.API.>"] {
        let said = subscribe_as_stranger(team.nats.port, subject);
        assert!(said.contains("Permissions Violation"), "{subject}: {said}");
    }
    a.end();
    b.end();
}

#[test]
fn requests_of_a_backend_reach_the_client_of_another_replica() {
    let Some(team) = Team::new("gateway::replicas::requests_of_a_backend_reach_the_client") else { return };
    let (a, b) = (team.start("a"), team.start("b"));
    let (_, others) = owner(&[&a, &b]);
    let mut session = Session::open_declaring(&others[0].address, json!({"elicitation": {}}));
    let params = json!({"message": "ready?", "requestedSchema": {"type": "object", "properties": {}}});
    let mut stream =
        session.begin("one__ask", &json!({"method": "elicitation/create", "params": params}), Some("token"));
    stream.head();
    let question = stream.event();
    assert_eq!(question["method"], "elicitation/create", "{question}");
    let answer = json!({"jsonrpc": "2.0", "id": question["id"], "result": {"action": "decline"}});
    assert_eq!(session.post(&answer).status, 202);
    let said = stream.event();
    assert!(said["result"]["content"][0]["text"].as_str().is_some_and(|text| text.contains("decline")), "{said}");
    a.end();
    b.end();
}

/// Sends each request to the next replica. It closes the client's connection after each response.
struct Balancer {
    address: String,
}

impl Balancer {
    fn start(replicas: Vec<String>) -> Balancer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        let next = Arc::new(AtomicUsize::new(0));
        thread::spawn(move || {
            for client in listener.incoming() {
                let Ok(client) = client else { return };
                let replica = replicas[next.fetch_add(1, Ordering::Relaxed) % replicas.len()].clone();
                thread::spawn(move || drop(pass_on(client, &replica)));
            }
        });
        Balancer { address }
    }
}

fn pass_on(mut client: TcpStream, replica: &str) -> std::io::Result<()> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        client.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let text = String::from_utf8_lossy(&head).into_owned();
    let length = text
        .lines()
        .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length:").map(|value| value.trim().parse()))
        .map_or(0, |length| length.unwrap_or(0));
    let mut body = vec![0; length];
    client.read_exact(&mut body)?;
    let mut replica = TcpStream::connect(replica)?;
    let lines: Vec<&str> =
        text.trim_end().lines().filter(|line| !line.to_ascii_lowercase().starts_with("connection:")).collect();
    replica.write_all(format!("{}\r\nConnection: close\r\n\r\n", lines.join("\r\n")).as_bytes())?;
    replica.write_all(&body)?;
    std::io::copy(&mut replica, &mut client)?;
    client.shutdown(std::net::Shutdown::Both)
}

#[test]
fn real_clients_use_another_replica_for_each_request() {
    let Some(peers) = Peers::find("gateway::replicas::real_clients_use_another_replica") else { return };
    let Some(mut team) = Team::new("gateway::replicas::real_clients_use_another_replica") else { return };
    team.of_backends = "children = \"per_session\"".to_owned();
    let gates: Vec<Gate> = ["a", "b", "c"].into_iter().map(|name| team.start(name)).collect();
    let balancer = Balancer::start(gates.iter().map(|gate| gate.address.clone()).collect());
    let url = format!("http://{}/mcp", balancer.address);
    for client in [
        Client::PythonMcp1,
        Client::PythonMcp2Handshake,
        Client::PythonFastmcpHandshake,
        Client::TsSdk1,
        Client::TsClient2,
        Client::Rmcp,
    ] {
        let project = Project::new(&peers, Server::Filesystem);
        let mut peer = Peer::connect(client, &project, &url)
            .unwrap_or_else(|error| panic!("{client:?}: {error}\n{}", project.stderr_tail()));
        let mut pids = Vec::new();
        for round in 0..6 {
            let text = format!("round {round}");
            let said = peer.call("each__echo", json!({"text": text})).expect("an answer");
            assert_eq!(said.text, text, "{client:?}");
            pids.push(peer.call("each__pid", json!({})).expect("an answer").text);
            assert!(!peer.call("one__pid", json!({})).expect("an answer").is_error, "{client:?}");
        }
        pids.dedup();
        assert_eq!(pids.len(), 1, "{client:?}: its session has one process, on one replica: {pids:?}");
    }
    never_two(&gates.iter().collect::<Vec<_>>());
    gates.into_iter().for_each(Gate::end);
}
