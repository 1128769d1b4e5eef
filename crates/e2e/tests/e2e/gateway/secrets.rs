//! Values of references are shown nowhere, and the data of the status page is only for the user that runs the
//! gateway.

use std::{
    fs,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
};

use serde_json::json;

use super::{
    web::Web,
    world::{Gate, backend},
};
use crate::mcp::client::{Place, until};

const SECRET: &str = "s3cret-Value/0123456789";

/// Every file below a directory.
fn files(directory: &std::path::Path, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            files(&path, found);
        } else if let Ok(bytes) = fs::read(&path) {
            found.push((path.display().to_string(), String::from_utf8_lossy(&bytes).into_owned()));
        }
    }
}

#[test]
fn values_of_references_are_shown_nowhere() {
    // A server that prints its own secret and exits, an address with a secret, a missing program, and a running
    // backend.
    let config = backend("one", &[], "env = { KEY = \"k-${API_KEY}\" }")
        + r#"
[[backend]]
name = "loud"
command = "/bin/sh"
args = ["-c", "echo \"my key is $KEY\" >&2; exit 3", "--endpoint=http://h/?key=${API_KEY}"]
env = { KEY = "${API_KEY}" }
delay_first = "60s"
first_restart = "delay"
[[backend]]
name = "web"
url = "http://127.0.0.1:1/mcp?key=${API_KEY}"
headers = { Authorization = "Bearer ${API_KEY}" }
[[backend]]
name = "missing"
command = "/nowhere/${API_KEY}"
"#;
    let gate = Gate::listen_with(Place::new(), &config, |setup| setup.env("API_KEY", SECRET));
    let mut session = gate.session();
    gate.is("one", "ready");
    for name in ["loud", "web", "missing"] {
        until(&format!("{name} to fail"), || gate.backend(name)["last_exit"].is_string().then_some(()));
    }
    let mut shown = Vec::new();
    // The backend's own answer is forwarded to the client unread.
    assert_eq!(session.call("one__env", json!({"name": "KEY"})), format!("k-{SECRET}"));
    session.call("one__stderr", json!({"text": format!("the key is {SECRET}")}));
    gate.client.says("[one] the key is ${API_KEY}");
    for name in ["loud", "web", "missing"] {
        let answer = session.ask("tools/call", json!({"name": format!("{name}__x"), "arguments": {}}));
        shown.push((format!("the answer of {name}"), answer.to_string()));
    }
    let api = Web::connect(&gate.address).get("/api/state");
    assert_eq!(api.status, 200, "{}", api.text());
    shown.push(("/api/state".into(), api.text()));
    shown.push(("/metrics".into(), Web::connect(&gate.address).get("/metrics").text()));
    let commands: [&[&str]; 8] = [
        &["state"],
        &["state", "--json"],
        &["state", "gateway/loud", "--json"],
        &["ps"],
        &["ps", "--json"],
        &["logs", "gateway"],
        &["audit", "--json"],
        &["restart", "gateway/missing"],
    ];
    for command in commands {
        let output = gate.outlast(command);
        let said = [output.stdout, output.stderr].concat();
        shown.push((format!("{command:?}"), String::from_utf8_lossy(&said).into_owned()));
    }
    for command in [&["config", "show"][..], &["gateway", "check"], &["gateway", "check", "--json"]] {
        let mut outlast = Command::new(crate::mcp::client::OUTLAST);
        outlast.args(command).current_dir(gate.place.path()).env("HOME", gate.place.path()).env("API_KEY", SECRET);
        let output = outlast.stdin(Stdio::null()).output().expect("the program runs");
        let said = [output.stdout, output.stderr].concat();
        shown.push((format!("{command:?}"), String::from_utf8_lossy(&said).into_owned()));
    }
    let loud = gate.backend("loud");
    assert!(text_of(&loud["command"]).contains("key=${API_KEY}"), "{loud}");
    assert!(loud.to_string().contains("my key is ${API_KEY}"), "{loud}");
    assert!(text_of(&gate.backend("web")["command"]).ends_with("/mcp?key=${API_KEY}"), "{}", gate.backend("web"));
    shown.push(("stderr".into(), gate.client.stderr_text()));
    files(&gate.place.path().join(".outlast"), &mut shown);
    files(&gate.place.path().join(".local"), &mut shown);
    for (place, text) in &shown {
        assert!(!text.contains(SECRET), "the secret is in {place}: {text}");
    }
    gate.end();
}

fn text_of(value: &serde_json::Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The response that another user of this machine gets, by a program that runs as that user.
fn get_as_another_user(address: &str, path: &str, header: &str) -> String {
    let (host, port) = address.split_once(':').expect("an address");
    let script = format!(
        "exec 3<>/dev/tcp/{host}/{port}; printf 'GET {path} HTTP/1.1\\r\\nhost: {address}\\r\\n{header}connection: close\\r\\n\\r\\n' >&3; cat <&3"
    );
    let output = Command::new("/bin/bash")
        .args(["-c", &script])
        .uid(65534)
        .gid(65534)
        .current_dir("/")
        .stdin(Stdio::null())
        .output()
        .expect("a shell");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn another_local_user_reads_the_state_only_with_the_token() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED another_local_user_reads_the_state_only_with_the_token: only root can be another user");
        return;
    }
    let gate = Gate::listen(Place::new(), &backend("one", &[], ""));
    gate.is("one", "ready");
    for path in ["/api/state", "/api/token", "/api/events"] {
        let answer = get_as_another_user(&gate.address, path, "");
        assert!(answer.starts_with("HTTP/1.1 403"), "{path}: {answer}");
    }
    assert!(get_as_another_user(&gate.address, "/health", "").starts_with("HTTP/1.1 200"));
    // This test runs as the user of the gateway.
    assert_eq!(Web::connect(&gate.address).get("/api/state").status, 200);
    let page = gate.state()["page"].as_str().expect("an address").to_owned();
    let token = page.split("#token=").nth(1).expect("a token").to_owned();
    let answer = get_as_another_user(&gate.address, "/api/state", &format!("x-outlast-token: {token}\\r\\n"));
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"backends\""), "{answer}");
    let wrong = get_as_another_user(&gate.address, "/api/state", &format!("x-outlast-token: {}\\r\\n", "0".repeat(32)));
    assert!(wrong.starts_with("HTTP/1.1 403"), "{wrong}");
    let refused = gate.place.recorded("request_refused", 1);
    assert_eq!((&refused["outcome"], &refused["method"]), (&json!("other_user"), &json!("GET /api/state")));
    assert!(refused["peer"].as_str().is_some_and(|peer| peer.starts_with("127.0.0.1:")), "{refused}");
    gate.end();
}

/// Secrets that are recognized by their form, in the stderr of a backend.
#[test]
fn secrets_on_stderr_are_shown_nowhere() {
    let token = "ghp_0123456789abcdefABCDEF0123456789abcd";
    let gate = Gate::listen(Place::new(), &backend("one", &[], super::world::HASTY));
    let mut session = gate.session();
    session.call("one__stderr", json!({"text": format!("using {token}")}));
    let last = until("its stderr", || gate.backend("one")["last_stderr"].as_str().map(str::to_owned));
    assert_eq!(last, "using …");
    crate::mcp::client::signal(gate.child("one"), nix::sys::signal::Signal::SIGKILL);
    gate.place.recorded("server_crashed", 1);
    let state = gate.is("one", "ready").to_string() + &gate.state().to_string();
    assert!(state.contains("using …") && !state.contains(token), "{state}");
    gate.end();
}
