//! Processes that exit at the same time as another event: no command hangs, and no output is lost.

use std::{
    io::{BufRead, BufReader, Read, Write},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{OUTLAST, PUPPET};

/// Nothing here takes long; a longer wait would never end.
const PATIENCE: Duration = Duration::from_secs(60);
/// More than the queue to a client takes before its server is no longer read.
const MUCH: usize = 4 << 20;

/// An `outlast mcp` whose client reads only when the test says so. It is killed after a time limit, which also ends a
/// wait for its exit.
struct Session {
    place: TempDir,
    child: Child,
    stdout: BufReader<ChildStdout>,
    stderr: Receiver<String>,
    _watchdog: Sender<()>,
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
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (tell, stderr) = mpsc::channel();
        let said = BufReader::new(child.stderr.take().unwrap());
        thread::spawn(move || said.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
        let pid = Pid::from_raw(child.id().cast_signed());
        let (_watchdog, called_off) = mpsc::channel();
        thread::spawn(move || {
            if called_off.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                let _ = kill(pid, Signal::SIGKILL);
            }
        });
        let mut session = Session { place, child, stdout, stderr, _watchdog };
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

    /// A line is written to the client whole, so that its start shows that outlast has all of it.
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

    fn logged(&self, words: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.stderr.recv_timeout(deadline.saturating_duration_since(Instant::now())).unwrap().contains(words) {}
    }

    fn touch(&self, name: &str) {
        std::fs::write(self.place.path().join(name), "").unwrap();
    }

    fn ended(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.child.stdin = None;
        self.ended();
    }
}

#[test]
fn outlast_exits_when_a_client_leaves_without_reading() {
    let mut session = Session::start(&[PUPPET]);
    session.call("much", "big", json!({"bytes": MUCH}));
    session.hear_the_beginning();
    session.child.stdin = None;
    assert_eq!(session.ended().code(), Some(0));
}

#[test]
fn outlast_exits_when_a_client_leaves_a_server_that_does_not_read() {
    let mut session = Session::start(&[PUPPET]);
    session.call("hang", "hang", json!({"answer": true}));
    assert_eq!(session.hear()["id"], "hang");
    // More than the queue for a server holds, so that the end of the client's input cannot be read.
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
fn a_client_that_reads_again_is_served_again() {
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

/// Sends in steps what the test needs, and then reads no more, but keeps running.
const DEAF: &str = r#"
    read -r initialize
    echo '{"jsonrpc":"2.0","id":"initialize","result":{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"deaf","version":"1"}}}'
    read -r initialized
    read -r much
    read -r little
    until [ -e much ]; do sleep 0.01; done
    printf '{"jsonrpc":"2.0","id":"much","result":{"content":[{"type":"text","text":"'
    head -c 4194304 /dev/zero | tr '\0' x
    echo '"}]}}'
    until [ -e little ]; do sleep 0.01; done
    echo '{"jsonrpc":"2.0","id":"little","result":{"content":[]}}'
    exec 0<&-
    sleep 60
"#;

#[test]
fn output_before_a_give_up_reaches_a_slow_client() {
    let mut session = Session::start(&["sh", "-c", DEAF]);
    session.call("much", "much", json!({}));
    session.call("little", "little", json!({}));
    // It never reads all of this, so that outlast notices when it stops reading.
    session.say(&json!({"jsonrpc": "2.0", "method": "notifications/x", "params": {"text": "x".repeat(1 << 20)}}));
    session.call("heard", "server_status", json!({}));
    assert_eq!(session.hear()["id"], "heard");
    session.touch("much");
    let beginning = session.hear_the_beginning();
    session.touch("little");
    session.logged("closed its stdin");
    assert_eq!(session.hear_the_rest(beginning)["id"], "much");
    let little = session.hear();
    assert_eq!((&little["id"], &little["result"]), (&json!("little"), &json!({"content": []})));
}
