//! An error is reported at once, with its place and a fix, and no backend is started.

use std::{net::TcpListener, process::Output};

use super::world::{Gate, backend, outlast};
use crate::mcp::client::Place;

/// The error of an invalid configuration; checks that no backend was started.
fn refused(config: &str, args: &[&str]) -> String {
    let place = Place::new();
    place.write("outlast.toml", config);
    words(&place, &outlast(&place, &[&["gateway"], args].concat()))
}

fn words(place: &Place, output: &Output) -> String {
    assert!(output.stdout.is_empty(), "{output:?}");
    assert_eq!(place.audit(), Vec::<serde_json::Value>::new(), "nothing was begun");
    assert!(!place.path().join("started").exists(), "no backend was started");
    let words = String::from_utf8_lossy(&output.stderr).replace(&place.path().display().to_string(), "DIR");
    format!("{words}exit code {}", output.status.code().expect("no signal"))
}

/// A backend that writes a file when it is started.
fn traced() -> String {
    "[[backend]]\nname = \"traced\"\ncommand = \"touch\"\nargs = [\"started\"]\n\n".to_owned()
}

#[test]
fn a_typo_is_reported_with_its_line() {
    let config = traced() + "[[backend]]\nname = \"one\"\ncomand = \"x\"\n";
    insta::assert_snapshot!(refused(&config, &["--listen", "127.0.0.1:0"]));
}

#[test]
fn two_backends_of_one_name_are_refused() {
    let config = traced()
        + &backend("one", &[], "").replace(crate::mcp::client::PUPPET, "puppet")
        + "[[backend]]\nname = \"one\"\ncommand = \"x\"\n";
    insta::assert_snapshot!(refused(&config, &["--stdio"]));
}

#[test]
fn two_backends_of_one_prefix_are_refused() {
    let config = traced()
        + "[[backend]]\nname = \"one\"\ncommand = \"x\"\nprefix = \"fs_\"\n\n"
        + "[[backend]]\nname = \"two\"\ncommand = \"x\"\nprefix = \"fs_\"\n";
    insta::assert_snapshot!(refused(&config, &["--stdio"]), @r"
    error: outlast.toml:14:1: `backend.two.prefix`: the backend `one` has the same prefix `fs_`, so both would offer the same names
      hint: give one of them another `prefix`
    exit code 2
    ");
}

#[test]
fn names_that_collide_in_catalogues_are_reported_with_both_owners() {
    let place = Place::new();
    let config = [backend("one", &[], "prefix = \"\""), backend("two", &[], "prefix = \"\"")].concat();
    let gate = Gate::listen(place, &config);
    gate.child("one");
    gate.child("two");
    let collision = |value: &serde_json::Value| {
        let all = value["collisions"].as_array().cloned().unwrap_or_default();
        all.into_iter().find(|one| one["list"] == "tools" && one["name"] == "echo")
    };
    let expected = serde_json::json!({"list": "tools", "name": "echo", "offered_by": "one", "left_out": "two"});
    let state = crate::mcp::client::until("both to be heard", || Some(gate.state()).filter(|s| collision(s).is_some()));
    assert_eq!(collision(&state), Some(expected.clone()));
    let words = String::from_utf8_lossy(&gate.outlast(&["state"]).stdout).into_owned();
    assert!(words.contains("  collision  tools: `echo` belongs to one; that of two is left out\n"), "{words}");
    gate.session().call("echo", serde_json::json!({"text": "hello"}));
    // The cached catalogues give the same result without a running gateway, whatever its name was.
    let Gate { place, mut client, .. } = gate;
    crate::mcp::client::signal(client.pid(), nix::sys::signal::Signal::SIGTERM);
    client.wait();
    drop(client);
    let output = outlast(&place, &["gateway", "check", "--json"]);
    let check: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(collision(&check), Some(expected));
    let words = String::from_utf8_lossy(&outlast(&place, &["gateway", "check"]).stdout).into_owned();
    assert!(words.contains("collision  tools: `echo` belongs to one; that of two is left out\n"), "{words}");
}

#[test]
fn a_variable_that_is_not_set_is_named() {
    let config =
        traced() + "[[backend]]\nname = \"one\"\ncommand = \"x\"\nenv = { TOKEN = \"${OUTLAST_NO_SUCH_TOKEN}\" }\n";
    insta::assert_snapshot!(refused(&config, &["--stdio"]));
}

#[test]
fn a_port_in_use_is_an_error() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    insta::assert_snapshot!(refused(&traced(), &["--listen", &address]).replace(&address, "ADDRESS"));
}

#[test]
fn a_key_set_that_cannot_be_read_is_an_error() {
    let config = traced() + "[auth.jwt]\njwks = \"keys.json\"\nissuer = \"me\"\naudience = [\"you\"]\n";
    insta::assert_snapshot!("jwks_missing", refused(&config, &["--listen", "127.0.0.1:0"]));
    let place = Place::new();
    place.write("outlast.toml", &config);
    place.write("keys.json", "{\"keys\": 1}");
    let output = outlast(&place, &["gateway", "--listen", "127.0.0.1:0"]);
    insta::assert_snapshot!("jwks_nonsense", words(&place, &output));
}

#[test]
fn listening_beyond_this_machine_requires_auth() {
    insta::assert_snapshot!(refused(&traced(), &["--listen", "0.0.0.0:0"]));
}

#[test]
fn without_a_configuration_a_gateway_does_not_start() {
    let place = Place::new();
    let output = outlast(&place, &["gateway", "--stdio"]);
    insta::assert_snapshot!("no_configuration", words(&place, &output));
    let output = outlast(&place, &["gateway", "--stdio", "--config", "nowhere.toml"]);
    insta::assert_snapshot!("no_such_file", words(&place, &output));
}
