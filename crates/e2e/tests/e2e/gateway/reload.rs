//! A new configuration for a running gateway.

use nix::sys::signal::Signal;
use serde_json::json;

use super::{
    web::{Session, Web},
    world::{Gate, backend},
};
use crate::mcp::client::{Place, Setup, is_alive, signal, until};

#[test]
fn a_changed_file_affects_only_changed_backends() {
    let keep = backend("keep", &[], "");
    let config = [keep.clone(), backend("change", &[], ""), backend("remove", &[], "")].concat();
    let gate = Gate::listen(Place::new(), &config);
    let mut session = gate.session();
    let (kept, changed, removed) = (gate.child("keep"), gate.child("change"), gate.child("remove"));
    let next = [keep, backend("change", &["--prompts"], ""), backend("add", &[], "")].concat();
    gate.place.write("outlast.toml", &next);
    let configured = gate.place.recorded("configured", 1);
    assert_eq!(configured["detail"], "added add; changed change; removed remove", "{configured}");
    until("the removed one to be gone", || (!is_alive(removed)).then_some(()));
    until("the changed one to be replaced", || (!is_alive(changed)).then_some(()));
    assert_ne!(session.call("add__pid", json!({})), "");
    assert_ne!(session.call("change__pid", json!({})), changed.to_string());
    assert_eq!(session.call("keep__pid", json!({})), kept.to_string(), "in the same session");
    let tools = session.tools();
    assert!(!tools.iter().any(|tool| tool.starts_with("remove__")), "{tools:?}");
    gate.end();
}

#[test]
fn a_broken_file_is_reported_and_the_old_settings_stay() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], ""));
    let one = gate.child("one");
    gate.place.write("outlast.toml", "[[backend]]\nname = \"one\"\ncomand = \"x\"\n");
    let refused = gate.place.recorded("reload_failed", 1);
    let detail = refused["detail"].as_str().unwrap_or_default();
    for words in ["outlast.toml:3", "comand", "command"] {
        assert!(detail.contains(words), "{words} in {detail}");
    }
    assert_eq!(gate.child("one"), one);
    assert_eq!(gate.session().call("one__pid", json!({})), one.to_string());
    // An operator who connects after the change sees it, too.
    let said = |args: &[&str]| String::from_utf8(gate.outlast(args).stdout).expect("text");
    for args in [&["ps"][..], &["top", "--once"]] {
        let said = said(args);
        assert!(said.contains("running, reload failed"), "{args:?}: {said}");
    }
    let state = said(&["state", "gateway"]);
    assert!(state.contains("the previous configuration stays in force: outlast.toml:3"), "{state}");
    // `outlast reload` prints the same error.
    let output = gate.outlast(&["reload"]);
    assert_eq!(output.status.code(), Some(1));
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(words.contains("outlast.toml:3"), "{words}");
    gate.end();
}

/// A program that saves a file may empty it or remove it first.
#[test]
fn a_file_that_is_empty_or_gone_is_an_unfinished_save() {
    let config = backend("one", &[], "");
    let gate = Gate::listen(Place::new(), &config);
    let one = gate.child("one");
    for (count, text) in ["", " \n\n"].into_iter().enumerate() {
        gate.place.write("outlast.toml", text);
        let refused = gate.place.recorded("reload_failed", count + 1);
        let detail = refused["detail"].as_str().unwrap_or_default();
        for words in ["`outlast.toml` is empty", "may not have finished", "leave a comment in it"] {
            assert!(detail.contains(words), "{words} in {detail}");
        }
        assert_eq!(gate.session().call("one__pid", json!({})), one.to_string());
    }
    // The rest of the save is read without a request.
    gate.place.write("outlast.toml", &(config.clone() + &backend("two", &[], "")));
    gate.place.recorded("configured", 1);
    gate.child("two");
    assert_eq!(gate.child("one"), one);
    // With a comment, the file is meant as it is.
    gate.place.write("outlast.toml", "# no backend\n");
    assert_eq!(gate.place.recorded("configured", 2)["detail"], "removed one, two");
    until("the backend to be removed", || (!is_alive(one)).then_some(()));
    // A file that was empty before is not unfinished.
    gate.place.write("outlast.toml", "");
    gate.place.recorded("configured", 3);
    gate.end();

    // The same for a file that the gateway found itself, and that is gone.
    let place = Place::new();
    place.write("outlast.toml", &config);
    assert!(super::world::outlast(&place, &["trust"]).status.success());
    let gate = Gate::listen_with(place, &config, Setup::found);
    let one = gate.child("one");
    std::fs::remove_file(gate.place.path().join("outlast.toml")).expect("ours");
    let detail = gate.place.recorded("reload_failed", 1)["detail"].to_string();
    assert!(detail.contains("`outlast.toml` is gone"), "{detail}");
    gate.place.write("outlast.toml", &config);
    gate.place.recorded("configured", 1);
    assert_eq!(gate.child("one"), one);
    gate.end();
}

/// Also a FIFO in its place, on which a reader would block.
#[test]
fn a_key_set_that_cannot_be_used_is_reported_and_the_old_settings_stay() {
    let config = backend("one", &[], "");
    let gate = Gate::listen(Place::new(), &config);
    let one = gate.child("one");
    nix::unistd::mkfifo(&gate.place.path().join("fifo.json"), nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    gate.place.write("torn.json", "{\"keys\": [");
    gate.place.write("empty.json", "{\"keys\": []}");
    let table = [
        // file       why
        ("fifo.json", "it is a FIFO, not a file"),
        ("torn.json", "it is not a JWK set"),
        ("empty.json", "there is no key for RS256 or ES256 in it"),
        ("gone.json", "no such file"),
    ];
    for (count, (file, why)) in table.into_iter().enumerate() {
        let auth = format!("[auth.jwt]\njwks = \"{file}\"\nissuer = \"me\"\naudience = [\"you\"]\n");
        gate.place.write("outlast.toml", &(config.clone() + &auth));
        let refused = gate.place.recorded("reload_failed", count + 1);
        let detail = refused["detail"].as_str().unwrap_or_default();
        assert!(detail.contains(file) && detail.contains(why), "{file}: {detail}");
        assert_eq!(gate.session().call("one__pid", json!({})), one.to_string(), "without a token, as before");
    }
    gate.end();
}

#[test]
fn a_hangup_signal_reads_the_configuration_again() {
    let place = Place::new();
    place.write("outlast.toml", &backend("one", &[], ""));
    let gate = Gate::listen_with(place, &backend("one", &[], ""), |setup| setup.options(["--no-watch"]));
    let one = gate.child("one");
    gate.place.write("outlast.toml", &[backend("one", &[], ""), backend("two", &[], "")].concat());
    assert_eq!(gate.place.audit_of("configured").len(), 0, "the file is not watched");
    signal(gate.client.pid(), Signal::SIGHUP);
    gate.place.recorded("configured", 1);
    gate.child("two");
    assert_eq!(gate.child("one"), one);
    let words = gate.outlast(&["reload"]);
    assert!(words.status.success(), "{words:?}");
    assert!(String::from_utf8_lossy(&words.stdout).contains("the backends are unchanged"), "{words:?}");
    gate.end();
}

#[test]
fn a_changed_endpoint_keeps_connected_clients() {
    let config = |front: &str| format!("[gateway]\n{front}\n{}", backend("one", &[], ""));
    let gate = Gate::configured(Place::new(), &config("listen = \"127.0.0.1:0\""), |setup| setup);
    let one = gate.child("one").to_string();
    let mut session = gate.session();
    let status = |address: &str| {
        let page = [("origin", "https://gate.example")];
        Web::connect(address).ask("GET", "/health", &page, b"").status
    };
    assert_eq!(status(&gate.address), 403);

    // Names and bounds.
    gate.place
        .write("outlast.toml", &config("listen = \"127.0.0.1:0\"\nhosts = [\"gate.example\"]\nbody_max = \"1KiB\""));
    gate.place.recorded("configured", 1);
    assert_eq!(status(&gate.address), 200);
    let long = json!({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {"x": "x".repeat(2000)}});
    assert_eq!(Session::open(&gate.address).post(&long).status, 413);

    // Another address: existing connections stay, new ones use the new address.
    gate.place.write("outlast.toml", &config("listen = \"127.0.0.2:0\""));
    gate.place.recorded("configured", 2);
    let line = gate.client.says("listening on http://127.0.0.2:");
    let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect("an address");
    assert_eq!(gate.state()["listen"], format!("http://{address}/mcp"));
    assert_eq!(Session::open(address).call("one__pid", json!({})), one);
    assert_eq!(session.call("one__pid", json!({})), one, "on the connection that it has");
    assert!(std::net::TcpStream::connect(&gate.address).is_err(), "the old address is closed");

    // An address that is in use changes nothing.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("it is bound").port();
    gate.place.write("outlast.toml", &config(&format!("listen = \"127.0.0.1:{port}\"\nhosts = [\"gate.example\"]")));
    let refused = gate.place.recorded("reload_failed", 1);
    assert!(refused["detail"].as_str().is_some_and(|words| words.contains("cannot listen")), "{refused}");
    assert_eq!(status(address), 403);
    assert_eq!(session.call("one__pid", json!({})), one);

    // Whether there is an endpoint at all is fixed at the start.
    gate.place.write("outlast.toml", &backend("one", &[], ""));
    gate.client.says("adding or removing the HTTP endpoint takes effect at the next start");
    assert_eq!(Session::open(address).call("one__pid", json!({})), one);
    gate.end();
}

/// `outlast reload` fails with these words, and the child stays.
fn refused(gate: &Gate, config: &str, words: &[&str]) {
    gate.place.write("outlast.toml", config);
    let output = gate.outlast(&["reload"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    for words in words {
        assert!(said.contains(words), "{words} in {said}");
    }
}

#[test]
fn a_bad_change_of_a_backend_leaves_the_old_child_serving_and_is_reported_everywhere() {
    let place = Place::new();
    let broken = place.join("broken");
    let good = backend("one", &[], "");
    let gate = Gate::listen_with(place, &good, |setup| setup.options(["--no-watch"]));
    let old = gate.child("one");
    let mut session = gate.session();
    let serves = |session: &mut Session, pid: u32| assert_eq!(session.call("one__pid", json!({})), pid.to_string());
    serves(&mut session, old);

    // No such command.
    let missing = "[[backend]]\nname = \"one\"\ncommand = \"/nowhere/at/all\"\n";
    refused(&gate, missing, &["one", "could not be started", "the old one keeps serving"]);
    serves(&mut session, old);
    let failed = gate.place.recorded("reload_failed", 1);
    assert_eq!((&failed["backend"], &failed["kind"]), (&json!("one"), &json!("backend")), "{failed}");
    assert!(failed["detail"].as_str().is_some_and(|words| words.contains("could not be started")), "{failed}");
    let state = gate.backend("one");
    assert_eq!((&state["state"], &state["last_reload"]["ok"]), (&json!("ready"), &json!(false)), "{state}");
    assert_ne!(state["command"], "/nowhere/at/all", "what runs is shown");
    let said = |args: &[&str]| String::from_utf8_lossy(&gate.outlast(args).stdout).into_owned();
    assert!(said(&["ps"]).contains("ready, reload failed"), "{}", said(&["ps"]));
    let one = said(&["state", "gateway/one"]);
    assert!(one.contains("reload     failed ") && one.contains("could not be started"), "{one}");

    // A command that exits before it is ready, with its stderr; one that is not a server; one that cannot be reached.
    gate.place.write("broken", "no database\n");
    refused(&gate, &backend("one", &["--fail-if", &broken], ""), &["no database", "the old one keeps serving"]);
    let silent = "[[backend]]\nname = \"one\"\ncommand = \"sleep\"\nargs = [\"600\"]\nstart_timeout = \"200ms\"\n";
    refused(&gate, silent, &["did not finish its handshake in 0.2 s"]);
    refused(&gate, "[[backend]]\nname = \"one\"\nurl = \"http://127.0.0.1:1/mcp\"\n", &["127.0.0.1:1"]);
    serves(&mut session, old);
    gate.place.recorded("reload_failed", 4);
    assert_eq!(gate.place.audit_of("server_crashed").len(), 0, "the one that serves never crashed");

    // It is restarted with the settings that worked.
    signal(old, Signal::SIGKILL);
    until("another child", || (gate.child("one") != old).then_some(()));
    serves(&mut session, gate.child("one"));
    assert_eq!(gate.backend("one")["last_reload"]["ok"], false);

    // A change that works takes over, and the failure is cleared.
    let old = gate.child("one");
    gate.place.write("outlast.toml", &backend("one", &["--prompts"], ""));
    let output = gate.outlast(&["reload"]);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("changed one"), "{output:?}");
    let new = gate.child("one");
    assert_ne!(new, old);
    serves(&mut session, new);
    until("the old one to be gone", || (!is_alive(old)).then_some(()));
    assert!(gate.backend("one")["last_reload"].is_null());
    assert!(!said(&["ps"]).contains("reload failed"));
    gate.end();
}

#[test]
fn a_session_and_a_pool_keep_their_children_until_a_change_works() {
    for children in ["children = \"per_session\"", "children = { pool = 2 }"] {
        let good = backend("one", &[], children);
        let gate = Gate::listen_with(Place::new(), &good, |setup| setup.options(["--no-watch"]));
        let mut session = gate.session();
        let own = session.call("one__pid", json!({}));
        let missing = format!("[[backend]]\nname = \"one\"\ncommand = \"/nowhere/at/all\"\n{children}\n");
        refused(&gate, &missing, &["could not be started"]);
        assert_eq!(session.call("one__pid", json!({})), own, "{children}");
        gate.place.write("outlast.toml", &backend("one", &["--prompts"], children));
        let output = gate.outlast(&["reload"]);
        assert!(output.status.success(), "{output:?}");
        let new = session.call("one__pid", json!({}));
        assert_ne!(new, own, "{children}");
        let old: u32 = own.parse().expect("a pid");
        until("the old one to be gone", || (!is_alive(old)).then_some(()));
        gate.end();
    }
}
