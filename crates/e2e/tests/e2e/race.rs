//! Ends that meet at a bad moment: nobody is left waiting, and nothing that was said is lost.

use std::{
    io::{BufRead, BufReader, Read, Write},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{OUTLAST, PUPPET};

/// Nothing here takes long; who waits longer waits for ever.
const PATIENCE: Duration = Duration::from_secs(20);
/// More than the outbox to a client takes before its server is no longer listened to.
const MUCH: usize = 4 << 20;

/// An `outlast mcp` whose client reads only when it is told to.
struct Session {
    _place: TempDir,
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Session {
    fn start(server: &[&str]) -> Session {
        let place = tempfile::tempdir().unwrap();
        let mut child = Command::new(OUTLAST)
            .arg("mcp")
            .arg("--")
            .args(server)
            .current_dir(place.path())
            .env("HOME", place.path())
            .env_remove("OUTLAST_PUPPET")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut session = Session { _place: place, child, stdout };
        session.ask("initialize", json!({"protocolVersion": "2025-06-18", "capabilities": {}}));
        assert_eq!(session.hear()["id"], "initialize");
        session.say(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        session
    }

    fn say(&mut self, message: &Value) {
        self.child.stdin.as_mut().unwrap().write_all(format!("{message}\n").as_bytes()).unwrap();
    }

    fn ask(&mut self, method: &str, params: Value) {
        self.say(&json!({"jsonrpc": "2.0", "id": method, "method": method, "params": params}));
    }

    fn call(&mut self, id: &str, tool: &str, arguments: Value) {
        let params = json!({"name": tool, "arguments": arguments});
        self.say(&json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}));
    }

    fn hear(&mut self) -> Value {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// A line goes to the client whole, so who has its beginning knows that all of it has come as far as outlast.
    fn hear_the_beginning(&mut self) -> Vec<u8> {
        let mut beginning = vec![0; 1];
        self.stdout.read_exact(&mut beginning).unwrap();
        beginning.extend_from_slice(self.stdout.buffer());
        self.stdout.consume(beginning.len() - 1);
        beginning
    }

    fn hear_the_rest(&mut self, mut beginning: Vec<u8>) -> Value {
        self.stdout.read_until(b'\n', &mut beginning).unwrap();
        serde_json::from_slice(&beginning).unwrap()
    }

    fn ended(&mut self) -> ExitStatus {
        let (tell, hear) = mpsc::channel();
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        thread::spawn(move || {
            if hear.recv_timeout(PATIENCE).is_err() {
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            }
        });
        let status = self.child.wait().unwrap();
        let _ = tell.send(());
        status
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.child.stdin = None;
        self.ended();
    }
}

#[test]
fn a_client_that_leaves_without_having_read_is_let_go() {
    let mut session = Session::start(&[PUPPET]);
    session.call("much", "big", json!({"bytes": MUCH}));
    session.hear_the_beginning();
    session.child.stdin = None;
    assert_eq!(session.ended().code(), Some(0));
}

#[test]
fn a_client_that_leaves_a_server_that_does_not_read_is_let_go() {
    let mut session = Session::start(&[PUPPET]);
    session.call("hang", "hang", json!({"answer": true}));
    assert_eq!(session.hear()["id"], "hang");
    // More than is kept for a server, so that the end of what the client says cannot be read.
    let mut stdin = session.child.stdin.take().unwrap();
    let all = thread::spawn(move || {
        let line = format!(r#"{{"jsonrpc":"2.0","method":"notifications/x","params":"{}"}}"#, "x".repeat(MUCH));
        for _ in 0..2 {
            writeln!(stdin, "{line}").unwrap();
        }
        writeln!(stdin, r#"{{"jsonrpc":"2.0","method":"notifications/y"}}"#).unwrap();
    });
    all.join().unwrap();
    assert_eq!(session.ended().code(), Some(0));
}

#[test]
fn a_client_that_reads_again_is_heard_again() {
    let mut session = Session::start(&[PUPPET]);
    for round in 0..5 {
        session.call("much", "big", json!({"bytes": MUCH}));
        let beginning = session.hear_the_beginning();
        let ids: Vec<String> = (0..10).map(|number| format!("{round}.{number}")).collect();
        for id in &ids {
            session.call(id, "echo", json!({"text": "x".repeat(1000)}));
        }
        assert_eq!(session.hear_the_rest(beginning)["id"], "much");
        for id in &ids {
            assert_eq!(session.hear()["id"], *id);
        }
    }
}
