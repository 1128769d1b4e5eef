//! What clients and users of NATS must not reach: sessions of other clients through any replica, and secrets.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::{Arc, Mutex},
    thread,
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{
    super::{
        web::{BEGUN_ID, Reply, Session},
        world::{Gate, HASTY, backend},
    },
    Team,
};
use crate::{
    mcp::client::{PUPPET, Place, until},
    support::nats::NatsPrograms,
};

/// Keys of these clients, with one role for all.
fn keys(names: &[&str]) -> String {
    let key = |name: &&str| {
        let hash: String = Sha256::digest(name.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[auth.key]]\nname = \"client-{name}\"\nsha256 = \"{hash}\"\nrole = \"all\"\n")
    };
    names.iter().map(key).collect::<String>() + "[role.all]\nallow = [\"*\"]\n"
}

#[test]
fn nothing_of_a_session_is_reached_by_another_client_through_any_replica() {
    let Some(mut team) = Team::new("gateway::replicas::security::nothing_of_a_session") else { return };
    team.more = keys(&["ann", "ben"]);
    let (a, b) = (team.start("a"), team.start("b"));
    for tool in ["each__ask", "one__ask"] {
        let mut session = Session::open_declaring_as(&a.address, Some("ann"), json!({"elicitation": {}}));
        let params = json!({"message": "ready?", "requestedSchema": {"type": "object", "properties": {}}});
        let asks = json!({"method": "elicitation/create", "params": params});
        let mut stream = session.begin(tool, &asks, Some("token"));
        stream.head();
        let event = stream.event_id();
        let question = stream.event();
        assert_eq!(question["method"], "elicitation/create", "{question}");

        let answer = |action: &str| json!({"jsonrpc": "2.0", "id": question["id"], "result": {"action": action}});
        let cancels = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": BEGUN_ID}});
        let asks = |method: &str, params: Value| json!({"jsonrpc": "2.0", "id": 9, "method": method, "params": params});
        for gate in [&b, &a] {
            // With the session's id, and the credentials of another client.
            session.reconnect(&gate.address);
            session.token = Some("Bearer ben".to_owned());
            let is_unknown = |what: &str, reply: Reply| {
                assert_eq!(reply.status, 404, "{what}: {}", reply.text());
                assert!(!reply.text().contains("ready?"), "{what}: {}", reply.text());
            };
            is_unknown("an answer", session.post(&answer("accept")));
            is_unknown("a cancellation", session.post(&cancels));
            is_unknown("a call", session.post(&asks("tools/call", json!({"name": "each__pid", "arguments": {}}))));
            is_unknown("a subscription", session.post(&asks("resources/subscribe", json!({"uri": "puppet://one"}))));
            is_unknown("a level", session.post(&asks("logging/setLevel", json!({"level": "debug"}))));
            is_unknown("a resumed stream", session.resume(&event));
            is_unknown("a stream", session.send("GET"));
            is_unknown("a delete", session.send("DELETE"));
            // With an own session: the ids of the other one mean nothing in it.
            let mut own = Session::open_declaring_as(&gate.address, Some("ben"), json!({"elicitation": {}}));
            own.post(&answer("accept"));
            own.post(&cancels);
            let resumed = own.resume(&event);
            assert!(resumed.status >= 400, "{}: {}", resumed.status, resumed.text());
        }
        // Its own client answers at the other replica.
        session.reconnect(&b.address);
        session.token = Some("Bearer ann".to_owned());
        assert_eq!(session.post(&answer("decline")).status, 202);
        let said = stream.event();
        let text = said["result"]["content"][0]["text"].as_str().unwrap_or_default();
        assert!(text.contains("decline") && !text.contains("accept"), "{tool}: {said}");
    }
    a.end();
    b.end();
}

/// All that NATS sends to a user that may read everything.
fn listen_to_all(port: u16) -> Arc<Mutex<Vec<u8>>> {
    let mut line = TcpStream::connect(("127.0.0.1", port)).expect("NATS listens");
    let hello = r#"{"verbose":false,"headers":true,"user":"reader","pass":"known"}"#;
    write!(line, "CONNECT {hello}\r\nSUB > 1\r\nPING\r\n").expect("NATS reads");
    let heard = Arc::new(Mutex::new(Vec::new()));
    let shared = heard.clone();
    thread::spawn(move || {
        let mut part = [0; 1 << 16];
        // To the end of the server.
        while let Ok(length @ 1..) = line.read(&mut part) {
            shared.lock().expect("no test holds it for long").extend_from_slice(&part[..length]);
            if part[..length].ends_with(b"PING\r\n") && line.write_all(b"PONG\r\n").is_err() {
                return;
            }
        }
    });
    until("the subscription", || contains(&heard.lock().expect("no panic"), "PONG").then_some(()));
    heard
}

fn contains(bytes: &[u8], text: &str) -> bool {
    memchr::memmem::find(bytes, text.as_bytes()).is_some()
}

#[test]
fn no_secret_is_sent_to_nats_or_stored_there() {
    let Some(programs) = NatsPrograms::find("gateway::replicas::security::no_secret_is_sent_to_nats") else { return };
    let users = "{ user: reader, password: known }, { user: outlast, password: nats-s3cret }";
    let team = Team::with(programs.one_with(
        crate::support::nats::Version::Newest,
        &format!("jetstream {{}}\nauthorization {{ users: [{users}] }}"),
    ));
    let heard = listen_to_all(team.nats.port);
    let (secrets, token) = (["env-s3cret", "path-s3cret", "nats-s3cret"], "token-s3cret");
    // Its processes write a secret to stderr, whose end is quoted in errors, and one has it in its path.
    let config = |replica: &str| {
        let own = format!("env = {{ TOKEN = \"${{ENV_SECRET}}\" }}\nplacement = \"one\"\n{HASTY}");
        let shell = format!("echo \"the token $TOKEN\" >&2; exec {PUPPET} --era legacy");
        format!("[cluster]\nnats = {:?}\nname = \"team\"\nreplica = {replica:?}\n", team.nats.url())
            + "user = \"outlast\"\npassword = \"${NATS_SECRET}\"\n"
            + &keys(&[token])
            + &backend("each", &["--era", "legacy"], HASTY)
            + &format!("[[backend]]\nname = \"one\"\ncommand = \"sh\"\nargs = [\"-c\", {shell:?}]\n{own}\n")
            + &format!(
                "[[backend]]\nname = \"lost\"\ncommand = \"/nowhere/${{PATH_SECRET}}\"\nplacement = \"one\"\n{HASTY}\n"
            )
    };
    let start = |replica: &str| {
        let names = ["ENV_SECRET", "PATH_SECRET", "NATS_SECRET"].into_iter().zip(secrets);
        Gate::listen_with(Place::new(), &config(replica), |setup| {
            names.fold(setup, |setup, (name, value)| setup.env(name, value))
        })
    };
    let gates = [start("a"), start("b")];
    for gate in &gates {
        until("NATS", || (gate.state()["cluster"]["connected"] == true).then_some(()));
        gate.is("one", "ready");
    }
    for gate in &gates {
        let mut session = Session::open_as(&gate.address, Some(token));
        for other in &gates {
            session.reconnect(&other.address);
            assert_eq!(session.call("each__echo", json!({"text": "forwarded"})), "forwarded");
            // The error quotes what the process wrote.
            let crashed = session.ask("tools/call", json!({"name": "one__crash", "arguments": {}})).to_string();
            assert!(crashed.contains("the token"), "{crashed}");
            until("the next process", || (session.result("one__pid", json!({}))["isError"] != true).then_some(()));
            session.ask("tools/call", json!({"name": "lost__echo", "arguments": {}}));
        }
    }
    let state = gates[0].outlast(&["state", "--cluster", "--json"]);
    let audit = until("the audit of both", || {
        let text = gates[1].outlast(&["audit", "--cluster", "--json"]).stdout;
        (contains(&text, "\"id\":\"a-") && contains(&text, "\"id\":\"b-")).then_some(text)
    });
    // What must be there: a record of a session with its client, and records of the audit.
    let store = until("the records in the files of NATS", || {
        let store = team.nats.stored();
        (contains(&store, &format!("client-{token}")) && contains(&store, "\"event_type\"")).then_some(store)
    });
    let heard = heard.lock().expect("no panic").clone();
    assert!(contains(&heard, "forwarded") && contains(&heard, "the token"), "the listener hears packets");
    let hash: String = Sha256::digest(token.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    for (where_, bytes) in [("heard", &heard), ("stored", &store), ("audit", &audit), ("state", &state.stdout)] {
        for secret in secrets.iter().copied().chain([hash.as_str(), &format!("Bearer {token}"), "earer"]) {
            assert!(!contains(bytes, secret), "{secret} was {where_}");
        }
    }
    gates.into_iter().for_each(Gate::end);
}
