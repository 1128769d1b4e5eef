//! Badly behaved servers, clients that close early, and what the user sees of both.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    path::Path,
    process::{Child, ChildStderr, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{OUTLAST, PUPPET};

/// Nothing here takes long; a longer wait would never end.
const PATIENCE: Duration = Duration::from_secs(60);

/// An `outlast mcp` with a client, in a temporary directory.
struct Session {
    /// Kept until the end.
    _directory: TempDir,
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Receiver<String>,
    stderr: Option<ChildStderr>,
}

impl Session {
    fn start(options: &[&str], command: &[&str]) -> Session {
        let directory = tempfile::tempdir().unwrap();
        let mut child = program(directory.path())
            .args(options)
            .arg("--")
            .args(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stderr) = (child.stdin.take(), child.stderr.take());
        let stdout = lines(child.stdout.take().unwrap());
        Session { _directory: directory, child, stdin, stdout, stderr }
    }

    /// Reads the lines on stderr and drops them.
    fn unheard(mut self) -> Session {
        drop(lines(self.stderr.take().unwrap()));
        self
    }

    fn open(&mut self) -> Value {
        let answer = self.ask("initialize", json!({"protocolVersion": "2025-11-25", "capabilities": {}}));
        self.say(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        answer
    }

    fn say(&mut self, message: &Value) {
        self.stdin.as_mut().unwrap().write_all(format!("{message}\n").as_bytes()).unwrap();
    }

    fn ask(&mut self, method: &str, params: Value) -> Value {
        self.say(&json!({"jsonrpc": "2.0", "id": method, "method": method, "params": params}));
        loop {
            let message: Value = serde_json::from_str(&self.stdout.recv_timeout(PATIENCE).unwrap()).unwrap();
            if message["id"] == method {
                return message;
            }
        }
    }

    fn call(&mut self, tool: &str, arguments: Value) -> Value {
        self.ask("tools/call", json!({"name": tool, "arguments": arguments}))["result"].take()
    }

    fn status(&mut self) -> Value {
        self.call("server_status", json!({}))["structuredContent"].take()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stdin = None;
        let _ = self.child.wait();
    }
}

fn program(cwd: &Path) -> Command {
    let mut command = Command::new(OUTLAST);
    command.arg("mcp").current_dir(cwd).env("HOME", cwd).env_remove("OUTLAST_PUPPET");
    command
}

fn lines(stream: impl Read + Send + 'static) -> Receiver<String> {
    let (send, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            // A test that has ended reads no more, and the writer must not fail.
            let _ = send.send(line);
        }
    });
    lines
}

#[test]
fn a_server_that_floods_its_stderr_does_not_delay_the_exit() {
    // It closes stdout, ignores SIGTERM and writes to stderr as fast as it can: its stderr never ends.
    let flood = "trap '' TERM; exec >&-; exec yes 'and another thing' >&2";
    let mut session = Session::start(&["--term-grace", "0.2"], &["sh", "-c", flood]).unheard();
    let since = Instant::now();
    let instructions = session.open()["result"]["instructions"].as_str().unwrap().to_owned();
    assert!(instructions.contains("closed its stdout"), "{instructions}");
    assert_eq!(session.status()["last_exit"], "closed its stdout");
    assert!(since.elapsed() < PATIENCE);
}

#[test]
fn the_last_stderr_is_kept_without_a_line_feed_and_with_a_daemon_on_the_pipe() {
    let words = "setsid sleep 600 & read line; printf 'fatal: no such table' >&2; exit 3";
    let mut session = Session::start(&[], &["sh", "-c", words]).unheard();
    session.open();
    assert_eq!(session.status()["stderr_tail"], "fatal: no such table");
}

#[test]
fn a_long_line_of_stderr_is_quoted_by_its_end() {
    let words = "read line; head -c 100000 /dev/zero | tr '\\0' x >&2; echo ' at last' >&2; exit 3";
    let mut session = Session::start(&[], &["sh", "-c", words]).unheard();
    session.open();
    let tail = session.status()["stderr_tail"].as_str().unwrap().to_owned();
    assert!(tail.ends_with("x at last"), "{tail}");
}

#[test]
fn a_slow_reader_of_stderr_delays_no_request() {
    const SERVER: &str = r#"(while :; do echo "one more line of a server that has much to say"; done >&2) &
        while read -r line; do
            case $line in
                *initialize*) result='{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"s","version":"1"}}' ;;
                *) result='{}' ;;
            esac
            case $line in
                *'"id":'*) id=${line#*\"id\":\"}; echo '{"jsonrpc":"2.0","id":"'"${id%%\"*}"'","result":'"$result"'}' ;;
            esac
        done"#;
    let mut session = Session::start(&[], &["sh", "-c", SERVER]);
    let mut stderr = session.stderr.take().unwrap();
    thread::spawn(move || {
        let mut piece = [0; 4096];
        // The reader is slow on purpose: far slower than the server writes, and never fully blocked.
        while stderr.read(&mut piece).is_ok_and(|count| count > 0) {
            thread::sleep(Duration::from_millis(90));
        }
    });
    session.open();
    let since = Instant::now();
    for _ in 0..20 {
        session.ask("ping", json!({}));
    }
    // Each would wait for the reader for a second or more.
    assert!(since.elapsed() < Duration::from_secs(15), "{:?}", since.elapsed());
}

#[test]
fn a_client_that_sends_everything_and_closes_stdin_is_answered() {
    let directory = tempfile::tempdir().unwrap();
    let all = [
        json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-11-25"}}),
        json!({"jsonrpc": "2.0", "method": "notifications/initialized"}),
        json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "echo", "arguments": {"text": "hi"}}}),
    ];
    let file = directory.path().join("all");
    fs::write(&file, all.map(|message| format!("{message}\n")).concat()).unwrap();
    // The end of stdin arrives together with its start, and before any server can be ready.
    for _ in 0..5 {
        let output = program(directory.path()).args(["--", PUPPET]).stdin(File::open(&file).unwrap()).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains(r#""text":"hi""#), "{said}");
        assert_eq!(output.status.code(), Some(0));
    }
}
