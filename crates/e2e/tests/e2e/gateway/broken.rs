//! What is wrong is said at once, with its place and its mending, and nothing is half-started.

use std::{net::TcpListener, process::Output};

use super::world::{backend, outlast};
use crate::mcp::client::Place;

/// What is said of a configuration that cannot be, and that nobody was started for it.
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

/// A backend that leaves a trace when it is started.
fn traced() -> String {
    "[[backend]]\nname = \"traced\"\ncommand = \"touch\"\nargs = [\"started\"]\n\n".to_owned()
}

#[test]
fn a_typo_is_told_with_its_line() {
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
fn a_variable_that_is_not_set_is_named() {
    let config =
        traced() + "[[backend]]\nname = \"one\"\ncommand = \"x\"\nenv = { TOKEN = \"${OUTLAST_NO_SUCH_TOKEN}\" }\n";
    insta::assert_snapshot!(refused(&config, &["--stdio"]));
}

#[test]
fn a_port_in_use_is_said() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    insta::assert_snapshot!(refused(&traced(), &["--listen", &address]).replace(&address, "ADDRESS"));
}

#[test]
fn a_key_set_that_cannot_be_read_is_said() {
    let config = traced() + "[auth.jwt]\njwks = \"keys.json\"\nissuer = \"me\"\naudience = [\"you\"]\n";
    insta::assert_snapshot!("jwks_missing", refused(&config, &["--listen", "127.0.0.1:0"]));
    let place = Place::new();
    place.write("outlast.toml", &config);
    place.write("keys.json", "{\"keys\": 1}");
    let output = outlast(&place, &["gateway", "--listen", "127.0.0.1:0"]);
    insta::assert_snapshot!("jwks_nonsense", words(&place, &output));
}

#[test]
fn listening_beyond_this_machine_wants_auth() {
    insta::assert_snapshot!(refused(&traced(), &["--listen", "0.0.0.0:0"]));
}

#[test]
fn no_configuration_is_no_gateway() {
    let place = Place::new();
    let output = outlast(&place, &["gateway", "--stdio"]);
    insta::assert_snapshot!("no_configuration", words(&place, &output));
    let output = outlast(&place, &["gateway", "--stdio", "--config", "nowhere.toml"]);
    insta::assert_snapshot!("no_such_file", words(&place, &output));
}
