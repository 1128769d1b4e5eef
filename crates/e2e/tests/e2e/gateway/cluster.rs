//! `[cluster]`: what a gateway says about a NATS that it cannot use. Nothing is started then.

use std::{
    io::Write,
    net::TcpListener,
    process::Output,
    thread::{self, JoinHandle},
};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::json;

use super::world::{Gate, backend, outlast};
use crate::{
    mcp::client::Place,
    support::nats::{NatsPrograms, Version},
};

/// A gateway with one backend in this cluster.
fn config(nats: &str, more: &str) -> String {
    format!(
        "[cluster]\nnats = {nats:?}\nname = \"team\"\nreplica = \"a\"\n{more}\n{}",
        backend("one", &["--log", "log"], "")
    )
}

fn config_of_one(more: &str, port: u16) -> String {
    config(&format!("nats://127.0.0.1:{port}"), more)
}

/// The report of a start that fails, and that of a check.
fn refused(place: &Place, config: &str) -> String {
    place.write("outlast.toml", config);
    let words = |output: Output| {
        let text = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(output.stdout.is_empty(), "{text}");
        text
    };
    let started = words(outlast(place, &["gateway", "--listen", "127.0.0.1:0"]));
    assert!(!place.path().join("log").exists(), "a backend was started");
    assert!(!place.path().join(".outlast").exists(), "a file was written");
    place.is_swept();
    let checked = words(outlast(place, &["gateway", "check", "--config", "outlast.toml"]));
    assert_eq!(started, checked, "a check says the same");
    started
}

/// A port on which nothing listens.
fn closed_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound").port()
}

#[test]
fn nats_that_is_down_is_an_error_only_if_it_is_required() {
    let port = closed_port();
    let place = Place::new();
    let words = refused(&place, &config_of_one("required = true", port));
    assert_eq!(
        words,
        format!(
            "error: cannot reach NATS at nats://127.0.0.1:{port}\n  because: connection refused\n  \
             hint: start nats-server, or correct `nats` in [cluster]\n"
        )
    );

    let gate = Gate::listen(Place::new(), &config_of_one("", port));
    gate.client.says("warning: the gateway starts alone, and joins the cluster later: cannot reach NATS at");
    gate.child("one");
    gate.end();
}

#[test]
fn nats_without_what_a_cluster_needs_is_refused() {
    let Some(programs) = NatsPrograms::find("nats_without_what_a_cluster_needs_is_refused") else { return };
    let user = "user = \"ann\"\npassword = \"wrong\"";
    let table = [
        (
            "authorization { user: ann, password: right }\njetstream {}",
            user,
            "refuses the credentials of this replica\n  because: authorization violation\n  hint: correct `credentials`,",
        ),
        ("", "", "offers no JetStream\n"),
        ("max_payload: 32KB\njetstream {}", "", "accepts messages up to 32768 bytes, and outlast needs 65536\n"),
        ("jetstream {}", "replicas = 3", "cannot create the bucket `outlast_v1_team_replicas` in NATS\n"),
        (
            "jetstream {}\nauthorization { users: [{ user: ann, password: wrong, permissions: { \
             publish: { deny: \"$JS.API.>\" } } }] }",
            user,
            "the NATS user of this replica lacks a permission\n  because: it may not publish to \"$JS.API",
        ),
        (
            "jetstream {}\nauthorization { users: [{ user: ann, password: wrong, permissions: { \
             subscribe: { deny: \"outlast.v1.team.replica.>\" } } }] }",
            user,
            "lacks a permission\n  because: it may not subscribe to \"outlast.v1.team.replica.",
        ),
        (
            "jetstream {}\nauthorization { users: [{ user: ann, password: wrong, permissions: { \
             publish: { deny: \"$KV.>\" } } }] }",
            user,
            "lacks a permission\n  because: it may not publish to \"$KV.outlast_v1_team_replicas.check\"",
        ),
    ];
    for (nats, cluster, expected) in table {
        let server = programs.one_with(Version::Newest, nats);
        // Whether NATS is required does not matter: these mistakes do not pass by themselves.
        let place = Place::new();
        place.write("outlast.toml", &config_of_one(cluster, server.port));
        let output = outlast(&place, &["gateway", "--listen", "127.0.0.1:0"]);
        let words = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(1), "{words}");
        assert!(words.contains(expected) && words.contains("  hint: "), "{nats}: {words}");
        assert!(!words.contains("wrong"), "{words}");
        assert!(!place.path().join("log").exists() && !place.path().join(".outlast").exists(), "nothing was started");
        place.is_swept();
    }
}

#[test]
fn an_older_server_is_refused_and_the_oldest_supported_one_works() {
    // No server that is older can be fetched, so its greeting is imitated.
    let (port, server) = greets(
        "INFO {\"server_id\":\"x\",\"version\":\"2.9.25\",\"headers\":true,\"max_payload\":1048576}\r\nPONG\r\n",
    );
    let words = refused(&Place::new(), &config_of_one("", port));
    let expected = format!(
        "error: NATS at nats://127.0.0.1:{port} has version 2.9.25, and outlast needs 2.10 or newer\n  \
         hint: install a newer nats-server\n"
    );
    assert_eq!(words, expected);
    drop(server);

    let Some(programs) = NatsPrograms::find("an_older_server_is_refused_and_the_oldest_supported_one_works") else {
        return;
    };
    let server = programs.one_with(Version::Oldest, "jetstream {}");
    let place = Place::new();
    place.write("outlast.toml", &config_of_one("required = true", server.port));
    let check = || {
        let output = outlast(&place, &["gateway", "check", "--config", "outlast.toml"]);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8(output.stdout).expect("text")
    };
    let words = check();
    assert!(words.contains("cluster    team, as a\n"), "{words}");
    assert!(words.contains("version 2.10.26; its buckets will be created\n"), "{words}");
    let gate = Gate::listen(Place::new(), &config_of_one("required = true", server.port));
    gate.child("one");
    // While it runs, another replica cannot have its name.
    gate.end();
    assert!(check().contains("version 2.10.26\n"), "the buckets are there");
}

/// Sends a line to each client and then says nothing.
fn greets(line: &'static str) -> (u16, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let server = thread::spawn(move || {
        let mut clients = Vec::new();
        // One for the start, one for the check.
        for _ in 0..2 {
            let (mut client, _) = listener.accept().expect("a client");
            client.write_all(line.as_bytes()).expect("it reads");
            clients.push(client);
        }
    });
    (port, server)
}

#[test]
fn a_bucket_of_another_version_is_refused() {
    let Some(programs) = NatsPrograms::find("a_bucket_of_another_version_is_refused") else { return };
    let server = programs.one();
    let mut client = server.client();
    let name = "KV_outlast_v1_team_leases";
    let bucket = |description: &str| {
        json!({
            "name": name, "subjects": ["$KV.outlast_v1_team_leases.>"], "description": description, "retention": "limits",
            "storage": "file", "num_replicas": 1, "max_msgs_per_subject": 1, "discard": "new", "max_consumers": -1,
            "max_msgs": -1, "max_bytes": -1, "max_age": 0,
        })
    };
    let created = client.jetstream(&format!("STREAM.CREATE.{name}"), &bucket("outlast cluster state, version 2"));
    assert!(created["error"].is_null(), "{created}");
    let place = Place::new();
    let words = refused(&place, &config_of_one("", server.port));
    assert_eq!(
        words,
        "error: the bucket `outlast_v1_team_leases` was not made by this version of outlast\n  because: its description is \
         `outlast cluster state, version 2`\n  hint: use another `name` or `prefix` in [cluster], or the version of \
         outlast that made it\n"
    );
}

#[test]
fn two_replicas_cannot_have_one_name() {
    let Some(programs) = NatsPrograms::find("two_replicas_cannot_have_one_name") else { return };
    let server = programs.one();
    // The buckets are there after the first start.
    let gate = Gate::listen(Place::new(), &config_of_one("required = true", server.port));
    gate.end();
    // A replica as another gateway sees it: an entry, and a process that answers.
    let mut client = server.client();
    let entry = json!({
        "instance": "00000000000000ff", "name": "a", "version": "0.1.0", "started": 1, "address": "127.0.0.1:7332",
    });
    client.subscribe("outlast.v1.team.replica.00000000000000ff", 2);
    let put = client.request("$KV.outlast_v1_team_replicas.a", entry.to_string().as_bytes());
    assert!(String::from_utf8_lossy(&put).contains("\"seq\""), "{put:?}");
    let other = thread::spawn(move || {
        for _ in 0..2 {
            let asked = client.next();
            client.publish(&asked.reply.expect("a request"), b"");
        }
    });
    let words = refused(&Place::new(), &config_of_one("", server.port));
    assert_eq!(
        words,
        "error: another replica of this cluster has the name `a`\n  because: it listens on 127.0.0.1:7332 and answers\n  \
         hint: give each replica its own name: `replica` in [cluster]\n"
    );
    other.join().expect("both were answered");
}

/// The certificates of an authority, a server and a client, as files.
fn certificates(place: &Place) {
    let key = || KeyPair::generate().expect("a key");
    let mut root = CertificateParams::new(vec![]).expect("no names are wrong");
    root.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let root_key = key();
    place.write("ca.pem", &root.self_signed(&root_key).expect("a root").pem());
    let issuer = Issuer::new(root, root_key);
    for name in ["server", "client"] {
        let key = key();
        let own = CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]);
        let own = own.and_then(|own| own.signed_by(&key, &issuer)).expect("a certificate");
        place.write(&format!("{name}.pem"), &own.pem());
        place.write(&format!("{name}.key"), &key.serialize_pem());
    }
}

#[test]
fn a_replica_identifies_itself_in_each_way() {
    let Some(programs) = NatsPrograms::find("a_replica_identifies_itself_in_each_way") else { return };
    let files = Place::new();
    certificates(&files);
    // A key pair for this test alone.
    files.write("seed", "SUAFS2OFZ7TABWWFJIU4W6MTZZQTM5ZOMBF7KK5FOVSRM3UIV6OS2HFCVQ\n");
    let nkey = "UDPNDZF5H2P7WIXAS4E6R4F3AR74UNGZVUFRU4TXANGI65E5YSHID6SF";
    let tls = |more: &str| {
        let file = |name: &str| files.join(name);
        format!(
            "tls {{ cert_file: {:?}, key_file: {:?}, ca_file: {:?}, {more} }}",
            file("server.pem"),
            file("server.key"),
            file("ca.pem")
        )
    };
    let path = |key: &str, name: &str| format!("{key} = {:?}\n", files.join(name));
    let ca = path("tls_ca", "ca.pem");
    let own = format!("{ca}{}{}", path("tls_cert", "client.pem"), path("tls_key", "client.key"));
    let table = [
        (
            "authorization { user: ann, password: right }".to_owned(),
            "user = \"ann\"\npassword = \"right\"".to_owned(),
            "",
        ),
        ("authorization { token: right }".to_owned(), "token = \"right\"".to_owned(), ""),
        ("authorization { token: right }".to_owned(), "token = \"other\"".to_owned(), "refuses the credentials"),
        (format!("authorization {{ users: [{{ nkey: {nkey} }}] }}"), path("nkey", "seed"), ""),
        (tls(""), ca.clone(), ""),
        (tls(""), String::new(), "cannot use TLS with NATS"),
        (tls("verify: true"), own, ""),
        (tls("verify: true"), ca, "NATS"),
    ];
    for (nats, cluster, refusal) in table {
        let server = programs.one_with(Version::Newest, &format!("jetstream {{}}\n{nats}"));
        let place = Place::new();
        place.write("outlast.toml", &config_of_one(&format!("{cluster}\nrequired = true"), server.port));
        let output = outlast(&place, &["gateway", "check", "--config", "outlast.toml"]);
        let words = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(i32::from(!refusal.is_empty())), "{nats} {cluster}: {words}");
        assert!(words.contains(refusal) && !words.contains("right"), "{nats} {cluster}: {words}");
    }
}

#[test]
fn a_cluster_of_three_keeps_three_copies() {
    let Some(programs) = NatsPrograms::find("a_cluster_of_three_keeps_three_copies") else { return };
    let mut cluster = programs.three();
    let urls: Vec<String> = cluster.urls().iter().map(|url| format!("{url:?}")).collect();
    let text = |replicas: u32| {
        let more = format!("required = true\nreplicas = {replicas}");
        config("", &more).replace("nats = \"\"", &format!("nats = [{}]", urls.join(", ")))
    };
    let gate = Gate::listen(Place::new(), &text(3));
    gate.child("one");
    gate.end();
    let info = cluster.nodes[0].client().jetstream("STREAM.INFO.KV_outlast_v1_team_leases", &json!({}));
    assert_eq!(info["config"]["num_replicas"], 3, "{info}");
    let words = refused(&Place::new(), &text(1));
    assert!(
        words.contains("the bucket `outlast_v1_team_replicas` has 3 copies in NATS, and `replicas` is 1\n"),
        "{words}"
    );
    assert!(words.contains("hint: set `replicas = 3` in [cluster]"), "{words}");

    // One server of three is gone: the others do.
    let leader = cluster.has_leader();
    cluster.node(&leader).kill();
    cluster.has_leader();
    let gate = Gate::listen(Place::new(), &text(3));
    gate.child("one");
    gate.end();
}

#[test]
fn a_file_that_is_not_trusted_opens_no_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("a socket");
    let place = Place::new();
    place.write("outlast.toml", &config_of_one("", listener.local_addr().expect("bound").port()));
    let output = outlast(&place, &["gateway", "check"]);
    let words = String::from_utf8(output.stdout).expect("text");
    assert!(words.contains("nats       not checked, because the file is not trusted\n"), "{words}");
    assert!(listener.accept().is_err(), "outlast connected");
}
