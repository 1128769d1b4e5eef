//! Instances are listed and controlled from another terminal, and a broken control client disturbs no other client.
//!
//! That other users are refused cannot be tested here, because it needs a second user. The tests check that only this
//! user can access the directory and the socket.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::{
        fs::{FileTypeExt, MetadataExt},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Output, Stdio},
    sync::mpsc::{self, Receiver},
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

/// A user with a home directory and a project.
pub(crate) struct World {
    pub home: TempDir,
    pub project: TempDir,
}

impl World {
    pub(crate) fn new() -> World {
        World { home: tempfile::tempdir().unwrap(), project: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.home.path().join(".local/state/outlast/run")
    }

    pub(crate) fn command(&self, cwd: &Path) -> Command {
        let mut command = Command::new(OUTLAST);
        command.current_dir(cwd).env("HOME", self.home.path()).env_remove("OUTLAST_PUPPET");
        command
    }

    fn outlast_in(&self, cwd: &Path, args: &[&str]) -> Output {
        self.command(cwd).args(args).stdin(Stdio::null()).output().unwrap()
    }

    pub(crate) fn outlast(&self, args: &[&str]) -> Output {
        self.outlast_in(self.project.path(), args)
    }

    pub(crate) fn ps(&self) -> Vec<Value> {
        let output = self.outlast(&["ps", "--json"]);
        serde_json::from_str::<Vec<Value>>(&text(&output.stdout)).unwrap()
    }

    pub(crate) fn start(&self, name: &str, flags: &[&str]) -> Session {
        self.start_in(self.project.path(), &["--name", name], flags)
    }

    pub(crate) fn start_in(&self, cwd: &Path, options: &[&str], flags: &[&str]) -> Session {
        let mut child = self
            .command(cwd)
            .arg("mcp")
            .args(options)
            .args(["--", PUPPET])
            .args(flags)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take();
        let stdout = lines(child.stdout.take().unwrap());
        let stderr = lines(child.stderr.take().unwrap());
        let mut session = Session { child, stdin, stdout, stderr };
        session.open();
        session
    }
}

/// An `outlast mcp` and its client.
pub(crate) struct Session {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Receiver<String>,
    stderr: Receiver<String>,
}

impl Session {
    fn open(&mut self) {
        self.ask("initialize", json!({"protocolVersion": "2025-06-18", "capabilities": {}}));
        self.say(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        self.ask("tools/list", json!({}));
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

    pub(crate) fn call(&mut self, tool: &str, arguments: Value) -> String {
        let answer = self.ask("tools/call", json!({"name": tool, "arguments": arguments}));
        answer["result"]["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
    }

    pub(crate) fn pid(&mut self) -> u64 {
        self.call("pid", json!({})).parse().unwrap()
    }

    /// Waits for a line of the log.
    fn logged(&self, words: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let line = self.stderr.recv_timeout(deadline.saturating_duration_since(Instant::now())).unwrap();
            if line.contains(words) {
                return line;
            }
        }
    }

    fn ended(mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stdin = None;
        let _ = self.child.wait();
    }
}

fn lines(stream: impl Read + Send + 'static) -> Receiver<String> {
    let (tell, hear) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let _ = tell.send(line);
        }
    });
    hear
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

pub(crate) fn text_of(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text")).to_owned()
}

pub(crate) fn said(output: &Output) -> (Option<i32>, String, String) {
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// A client of the socket that knows only the frames.
pub(crate) struct Wire(pub UnixStream);

impl Wire {
    pub(crate) fn connect(entry: &Value) -> Wire {
        let stream = UnixStream::connect(text_of(&entry["socket"])).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Wire(stream)
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        let length = u32::try_from(bytes.len()).unwrap();
        self.0.write_all(&[&length.to_be_bytes(), bytes].concat()).unwrap();
    }

    pub(crate) fn ask(&mut self, id: u64, method: &str, params: Value) {
        self.send(json!({"v": 1, "id": id, "method": method, "params": params}).to_string().as_bytes());
    }

    pub(crate) fn hear(&mut self) -> Value {
        self.try_hear().unwrap()
    }

    /// None if the other side has closed the connection.
    pub(crate) fn try_hear(&mut self) -> Option<Value> {
        let mut head = [0; 4];
        self.0.read_exact(&mut head).ok()?;
        let mut body = vec![0; u32::from_be_bytes(head) as usize];
        self.0.read_exact(&mut body).ok()?;
        Some(serde_json::from_slice(&body).unwrap())
    }

    fn is_ended(&mut self) -> bool {
        matches!(self.0.read(&mut [0; 1]), Ok(0) | Err(_))
    }
}

#[test]
fn a_server_is_restarted_over_the_socket() {
    let world = World::new();
    let mut session = world.start("py", &[]);
    let old = session.pid();
    let entry = &world.ps()[0];
    let mut wire = Wire::connect(entry);
    wire.ask(7, "pid", json!({}));
    assert_eq!(wire.hear(), json!({"id": 7, "ok": {"pid": old}}));
    wire.ask(8, "restart", json!({"reason": "a test", "mode": "fresh"}));
    let answer = wire.hear();
    let new = session.pid();
    assert_eq!(
        (&answer["id"], &answer["ok"]["old_pid"], &answer["ok"]["new_pid"]),
        (&json!(8), &json!(old), &json!(new))
    );
    assert_ne!(old, new);
    wire.ask(9, "state", json!({}));
    let state = &wire.hear()["ok"];
    assert_eq!((&state["pid"], &state["restarts"], &state["kind"]), (&json!(new), &json!(1), &json!("mcp")));
    assert_eq!(state["outlast_pid"], session.child.id());
    assert_eq!(state["socket"], entry["socket"]);
    wire.ask(10, "fly", json!({}));
    assert_eq!(wire.hear()["error"]["code"], "unknown_method");
}

#[test]
fn a_server_is_restarted_from_another_terminal() {
    let world = World::new();
    let tools = world.project.path().join("tools.json");
    fs::write(&tools, r#"[{"name":"old","inputSchema":{}},{"name":"same","inputSchema":{}}]"#).unwrap();
    let mut session = world.start("py", &["--tools", tools.to_str().unwrap()]);
    let old = session.pid();
    fs::write(&tools, r#"[{"name":"new","inputSchema":{}},{"name":"same","description":"x","inputSchema":{}}]"#)
        .unwrap();

    let (code, stdout, stderr) = said(&world.outlast(&["restart", "--reason", "new tools"]));
    let new = session.pid();
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    let (first, rest) = stdout.split_once('\n').unwrap();
    assert!(first.starts_with("Restarted py-") && first.ends_with(&format!(" ms: pid {old} → {new}")), "{first}");
    assert_eq!(rest, "  tools added:   new\n  tools removed: old\n  tools changed: same\n");
    session.logged("Restart requested by control (reason: new tools)");

    let (code, stdout, _) = said(&world.outlast(&["restart", "py", "--json"]));
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &report["old_pid"], &report["new_pid"]), (Some(0), &json!(new), &json!(session.pid())));
    let (_, stdout, _) = said(&world.outlast(&["pid"]));
    assert_eq!(stdout, format!("{}\n", session.pid()));
}

#[test]
fn a_failed_reload_says_why_and_changes_nothing() {
    let world = World::new();
    let broken = world.project.path().join("broken");
    let mut session = world.start("py", &["--fail-if", broken.to_str().unwrap()]);
    let pid = session.pid();
    fs::write(&broken, "Traceback (most recent call last):\n  File \"server.py\", line 3\nSyntaxError: no").unwrap();
    let id = text_of(&world.ps()[0]["id"]);

    let (code, stdout, stderr) = said(&world.outlast(&["restart"]));
    assert_eq!((code, stdout.as_str()), (Some(1), ""));
    insta::assert_snapshot!(stderr.replace(&id, "py-1abcd").replace(&pid.to_string(), "4242"), @r#"
    error: the restart of `py-1abcd` failed
      because: the new server ended before it was ready (exit code 3). The old server (pid 4242) keeps serving.
               its stderr:
                 Traceback (most recent call last):
                   File "server.py", line 3
                 SyntaxError: no
    "#);
    let (code, stdout, stderr) = said(&world.outlast(&["restart", "--json"]));
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, stderr.as_str(), &report["error"]["code"]), (Some(1), "", &json!("restart_failed")));
    assert!(text_of(&report["error"]["stderr_tail"]).contains("SyntaxError: no"), "{report}");
    assert_eq!(session.pid(), pid);
}

#[test]
fn a_server_that_was_given_up_is_resumed() {
    let world = World::new();
    let broken = world.project.path().join("broken");
    let flags = ["--fail-if", broken.to_str().unwrap()];
    let mut session = world.start_in(world.project.path(), &["--name", "py", "--max-restarts", "1"], &flags);
    let (_, stdout, _) = said(&world.outlast(&["resume"]));
    assert!(stdout.starts_with("Nothing to resume: py-") && stdout.ends_with(" is ready\n"), "{stdout}");

    fs::write(&broken, "no").unwrap();
    session.call("crash", json!({}));
    session.logged("gave up");
    let row = &world.ps()[0];
    assert_eq!((&row["state"], &row["child_pid"], &row["last_exit"]), (&json!("given_up"), &json!(null), &json!(3)));
    assert_eq!(row["last_exit_text"], "exit code 3");
    let (code, _, stderr) = said(&world.outlast(&["resume"]));
    assert_eq!(code, Some(1), "{stderr}");
    let (code, _, _) = said(&world.outlast(&["pid"]));
    assert_eq!(code, Some(1));

    fs::remove_file(&broken).unwrap();
    let (code, stdout, stderr) = said(&world.outlast(&["resume"]));
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(stdout.contains(&format!("pid {}", session.pid())), "{stdout}");
}

#[test]
fn an_instance_is_stopped_and_leaves_nothing() {
    let world = World::new();
    for (flags, options) in
        [(&[][..], &["stop", "py"][..]), (&["--ignore-eof", "--ignore-term"], &["stop", "py", "--force"])]
    {
        let options_of_mcp = ["--name", "py", "--stdin-grace", "60", "--term-grace", "60"];
        let mut session = world.start_in(world.project.path(), &options_of_mcp, flags);
        let pid = session.pid();
        let since = Instant::now();
        let (code, stdout, stderr) = said(&world.outlast(options));
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{stdout}");
        assert!(stdout.starts_with("Stopped py-"), "{stdout}");
        assert_eq!(session.ended(), Some(0));
        // A stop of the second server with a grace period would have taken two minutes.
        assert!(since.elapsed() < PATIENCE, "{:?}", since.elapsed());
        assert!(kill(Pid::from_raw(i32::try_from(pid).unwrap()), None).is_err(), "the server is gone");
        assert_eq!(fs::read_dir(world.run_dir()).unwrap().count(), 0);
    }
    let (_, stdout, _) = said(&world.outlast(&["ps"]));
    assert_eq!(stdout, "Nothing runs under outlast.\n");
}

#[test]
fn only_the_owner_can_connect() {
    let world = World::new();
    let _session = world.start("py", &[]);
    let mode = |path: &Path| fs::symlink_metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&world.run_dir()), 0o700);
    let mut kinds = Vec::new();
    for file in fs::read_dir(world.run_dir()).unwrap() {
        let file = file.unwrap();
        assert_eq!(mode(&file.path()), 0o600, "{file:?}");
        kinds.push(file.file_type().unwrap().is_socket());
    }
    kinds.sort();
    assert_eq!(kinds, [false, true]);
}

#[test]
fn ps_lists_running_instances_and_removes_stale_entries() {
    let world = World::new();
    let elsewhere = tempfile::tempdir().unwrap();
    let mut one = world.start("one", &[]);
    let mut two = world.start_in(elsewhere.path(), &["--name", "two"], &[]);
    let mut killed = world.start("killed", &[]);
    let hung = world.start("hung", &[]);

    killed.child.kill().unwrap();
    killed.child.wait().unwrap();
    // As if the process id of an ended instance had been given to another process: this one.
    let entry = fs::read_dir(world.run_dir()).unwrap().map(|file| file.unwrap().path());
    let entry =
        entry.filter(|path| path.extension().unwrap() == "json").find(|path| path.to_str().unwrap().contains("one-"));
    let mut reused: Value = serde_json::from_str(&fs::read_to_string(entry.unwrap()).unwrap()).unwrap();
    let socket = world.run_dir().join("reused.sock");
    drop(UnixListener::bind(&socket).unwrap());
    reused["id"] = json!("reused");
    reused["pid"] = json!(std::process::id());
    reused["socket"] = json!(socket);
    fs::write(world.run_dir().join("reused.json"), reused.to_string()).unwrap();
    fs::write(world.run_dir().join("torn.json"), "{\"id\":").unwrap();

    let pid = Pid::from_raw(i32::try_from(hung.child.id()).unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    let rows = world.ps();
    kill(pid, Signal::SIGCONT).unwrap();

    let names: Vec<&Value> = rows.iter().map(|row| &row["name"]).collect();
    assert_eq!(names, ["one", "two", "hung"]);
    let states: Vec<&Value> = rows.iter().map(|row| &row["state"]).collect();
    assert_eq!(states, ["ready", "ready", "unresponsive"]);
    assert_eq!((&rows[0]["child_pid"], &rows[1]["child_pid"]), (&json!(one.pid()), &json!(two.pid())));
    assert_eq!((&rows[1]["pid"], &rows[1]["cwd"]), (&json!(two.child.id()), &json!(elsewhere.path())));
    for member in ["uptime_s", "restarts", "next_try_s", "last_exit", "socket", "kind"] {
        assert!(rows.iter().all(|row| row.get(member).is_some()), "{member}");
    }
    let mut left: Vec<String> =
        fs::read_dir(world.run_dir()).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left.len(), 7, "three entries, three sockets, and what is not ours to judge: {left:?}");
    assert!(!left.iter().any(|name| name.starts_with("killed") || name.starts_with("reused")), "{left:?}");

    let (code, _, stderr) = said(&world.outlast(&["state"]));
    assert_eq!(code, Some(1));
    assert!(stderr.starts_with("error: 2 instances run in this directory: `one-"), "{stderr}");
    let (_, stdout, _) = said(&world.outlast_in(elsewhere.path(), &["state"]));
    assert!(stdout.starts_with("two-") && stdout.contains("\n  state      ready for "), "{stdout}");
}

#[test]
fn a_killed_instance_does_not_make_a_name_ambiguous() {
    let world = World::new();
    let mut lives = world.start("twin", &[]);
    let mut killed = world.start("twin", &[]);
    let (code, _, stderr) = said(&world.outlast(&["pid", "twin"]));
    assert_eq!((code, stderr.starts_with("error: `twin` means 2 instances\n")), (Some(1), true), "{stderr}");
    killed.child.kill().unwrap();
    killed.child.wait().unwrap();
    let (code, stdout, stderr) = said(&world.outlast(&["pid", "twin"]));
    assert_eq!((code, stdout.trim()), (Some(0), lives.pid().to_string().as_str()), "{stderr}");
}

#[test]
fn a_bad_client_disturbs_no_other_client() {
    let world = World::new();
    let mut session = world.start("py", &[]);
    let entry = &world.ps()[0];

    let mut half = Wire::connect(entry);
    let (first, second) = (br#"{"v":1,"id":3,"#, br#""method":"pid"}"#);
    half.0.write_all(&[&[0, 0, 0, u8::try_from(first.len() + second.len()).unwrap()], &first[..]].concat()).unwrap();
    let mut silent: Vec<Wire> = (0..40).map(|_| Wire::connect(entry)).collect();
    let mut greedy = Wire::connect(entry);
    greedy.0.write_all(&[0xff; 64]).unwrap();
    assert_eq!(greedy.hear()["error"]["code"], "too_long");
    assert!(greedy.is_ended());
    // A client that sends requests and never reads is disconnected in the end.
    let mut deaf = Wire::connect(entry);
    deaf.0.set_write_timeout(Some(PATIENCE)).unwrap();
    let request = json!({"v": 1, "id": 1, "method": "state"}).to_string();
    let frame = [&u32::try_from(request.len()).unwrap().to_be_bytes()[..], request.as_bytes()].concat();
    while deaf.0.write_all(&frame).is_ok() {}

    let mut clumsy = Wire::connect(entry);
    for (frame, code) in [
        (&b"\xff\xfe"[..], "bad_frame"),
        (b"{", "bad_frame"),
        (b"{}", "bad_request"),
        (br#"{"v":2,"id":1,"method":"state"}"#, "bad_version"),
        (br#"{"v":1,"id":1}"#, "bad_request"),
    ] {
        clumsy.send(frame);
        assert_eq!(clumsy.hear()["error"]["code"], code);
    }
    clumsy.ask(5, "pid", json!({}));
    assert_eq!(clumsy.hear()["ok"]["pid"], session.pid());

    let before = session.pid();
    assert_eq!(world.outlast(&["restart"]).status.code(), Some(0));
    assert_ne!(session.pid(), before);
    // The other half arrives, and the request is answered.
    half.0.write_all(second).unwrap();
    assert_eq!(half.hear()["ok"]["pid"], session.pid());
    // At the limit, a new client takes the place of the client that was silent for longest, which gets an error.
    silent.extend((0..150).map(|_| Wire::connect(entry)));
    let mut late = Wire::connect(entry);
    late.ask(1, "pid", json!({}));
    assert_eq!(late.hear()["ok"]["pid"], session.pid());
    assert_eq!(silent[0].hear()["error"]["code"], "too_many_clients");
    drop(silent);
    assert_eq!(world.ps()[0]["state"], "ready");
}

#[test]
fn a_subscriber_receives_every_event() {
    let world = World::new();
    let mut session = world.start("py", &[]);
    let mut wire = Wire::connect(&world.ps()[0]);
    wire.ask(1, "subscribe", json!({}));
    assert_eq!(wire.hear(), json!({"id": 1, "ok": {"subscribed": true}}));
    session.call("crash", json!({}));
    let mut heard = Vec::new();
    while heard.last().is_none_or(|event| event != "server_started") {
        let event = wire.hear();
        assert_eq!((event.get("id"), &event["event"]), (None, &json!("record")));
        heard.push(text_of(&event["record"]["props"]["event_type"]));
    }
    assert_eq!(heard, ["server_crashed", "server_started"]);
    session.stdin = None;
    let last = std::iter::repeat_with(|| text_of(&wire.hear()["record"]["props"]["event_type"]));
    assert_eq!(last.take(2).last().unwrap(), "instance_ended");
    assert!(wire.is_ended());
}

#[test]
fn a_deep_project_and_a_deep_home_work() {
    let world = World::new();
    let deep = |root: &Path| {
        let path = (0..10).fold(root.to_owned(), |path, n| path.join(format!("a-directory-deep-down-{n}")));
        fs::create_dir_all(&path).unwrap();
        assert!(path.as_os_str().len() > 200);
        path
    };
    let cwd = deep(world.project.path());
    let session = world.start_in(&cwd, &["--name", "deep"], &[]);
    let output = world.outlast_in(&cwd, &["restart"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    drop(session);

    let home = deep(world.home.path());
    let temp = tempfile::tempdir().unwrap();
    let outlast = |args: &[&str]| {
        let mut command = world.command(&cwd);
        command.env("HOME", &home).env("TMPDIR", temp.path()).args(args);
        command
    };
    let mut child = outlast(&["mcp", "--", PUPPET])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let stderr = lines(child.stderr.take().unwrap());
    while !stderr.recv_timeout(PATIENCE).unwrap().contains("running") {}
    let output = outlast(&["ps", "--json"]).output().unwrap();
    let rows: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    let socket = PathBuf::from(text_of(&rows[0]["socket"]));
    assert_eq!(socket.parent().unwrap().parent().unwrap(), temp.path());
    assert_eq!(fs::metadata(socket.parent().unwrap()).unwrap().mode() & 0o777, 0o700);
    assert_eq!(rows[0]["state"], "started");
    assert_eq!(outlast(&["stop"]).output().unwrap().status.code(), Some(0));
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn an_inheriting_server_is_listed_and_can_be_restarted() {
    let world = World::new();
    let options = ["--inherit", "--name", "py", "--stdin-grace", "0"];
    let mut session = world.start_in(world.project.path(), &options, &[]);
    let old = session.pid();
    let row = &world.ps()[0];
    assert_eq!((&row["state"], &row["child_pid"], &row["restarts"]), (&json!("ready"), &json!(old), &json!(0)));
    let (code, stdout, stderr) = said(&world.outlast(&["restart", "--reason", "a test"]));
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    session.open();
    let new = session.pid();
    assert!(stdout.ends_with(&format!(": pid {old} → {new}\n")), "{stdout}");
    let (_, stdout, _) = said(&world.outlast(&["resume"]));
    assert!(stdout.starts_with("Nothing to resume"), "{stdout}");
    let row = &world.ps()[0];
    assert_eq!((&row["child_pid"], &row["restarts"], &row["crashes"]), (&json!(new), &json!(1), &json!(0)));
    assert_eq!(world.outlast(&["stop"]).status.code(), Some(0));
    assert_eq!(session.ended(), Some(0));
}

#[test]
fn without_a_home_outlast_serves_and_reports_it_once() {
    let world = World::new();
    fs::write(world.home.path().join(".local"), "in the way").unwrap();
    let mut session = world.start("py", &[]);
    session.logged("this instance has no control socket");
    session.pid();
    assert_eq!(said(&world.outlast(&["ps"])).1, "Nothing runs under outlast.\n");
}

/// The puppet logs its input beside its source, so each reload causes the next.
#[test]
fn files_that_a_server_writes_do_not_reload_it_for_ever() {
    let world = World::new();
    let session = world.start_in(world.project.path(), &["--name", "py", "--watch", "."], &["--log", "heard.txt"]);
    let muted = session.logged("causes no reload for now");
    assert!(muted.contains("`heard.txt`"), "{muted}");
    // Changes of other files still cause reloads, and only this file is reported.
    std::fs::write(world.project.path().join("server.py"), "1").unwrap();
    session.logged("(reason: changed: server.py");
}

#[test]
fn a_reload_with_several_requests_is_logged_once() {
    let world = World::new();
    let session = world.start("py", &["--slow-start", "300"]);
    let mut wire = Wire::connect(&world.ps()[0]);
    // The first request begins a reload; the others share the next one.
    for id in 1..=4 {
        wire.ask(id, "restart", json!({"reason": "all at once"}));
    }
    let generations: Vec<Value> = (1..=4).map(|_| wire.hear()["ok"]["generation"].clone()).collect();
    assert_eq!(generations, [2, 3, 3, 3]);
    drop(session);
    let (_, log, _) = said(&world.outlast(&["logs", "-n", "1000"]));
    assert_eq!(log.matches("Reloaded in").count(), 2, "{log}");
}

#[test]
fn logs_and_audit_show_output_and_events() {
    let world = World::new();
    let mut session = world.start("py", &[]);
    session.call("stderr", json!({"text": "hello from the server"}));
    session.call("crash", json!({}));
    session.logged("restart #1");
    let (code, stdout, _) = said(&world.outlast(&["logs", "-n", "1000"]));
    assert_eq!(code, Some(0));
    assert!(stdout.contains("[py] hello from the server\n"), "{stdout}");
    assert_eq!(said(&world.outlast(&["logs", "py", "-n", "1"])).1.lines().count(), 1);

    let mut follow =
        world.command(world.project.path()).args(["logs", "-f", "-n", "0"]).stdout(Stdio::piped()).spawn().unwrap();
    let followed = lines(follow.stdout.take().unwrap());
    // Output before the start of `logs -f` is not shown, so it is written until it is shown.
    let deadline = Instant::now() + PATIENCE;
    while followed.recv_timeout(Duration::from_millis(50)).is_err() {
        session.call("stderr", json!({"text": "and more"}));
        assert!(Instant::now() < deadline);
    }
    let id = text_of(&world.ps()[0]["id"]);
    drop(session);
    assert!(follow.wait().unwrap().success(), "it ends with the instance");
    assert!(followed.iter().last().unwrap().contains("Ended (code: 0)"));

    let (_, stdout, _) = said(&world.outlast(&["audit", "--event", "server_crashed", "--since", "10m"]));
    assert_eq!(stdout.lines().count(), 2, "a title and a record: {stdout}");
    assert!(stdout.contains(&id) && stdout.contains("exit code 1"), "{stdout}");
    let (_, stdout, _) = said(&world.outlast(&["audit", "--json", &id]));
    let events: Vec<String> = stdout
        .lines()
        .map(|line| text_of(&serde_json::from_str::<Value>(line).unwrap()["props"]["event_type"]))
        .collect();
    assert_eq!((&events[0][..], &events[events.len() - 1][..]), ("instance_started", "instance_ended"));
    assert_eq!(said(&world.outlast(&["audit", "--since", "2099-01-01"])).1, "");
    let (code, _, stderr) = said(&world.outlast(&["audit", "wether"]));
    assert_eq!(code, Some(1));
    assert!(stderr.starts_with("error: this audit log has no records of `wether`\n"), "{stderr}");
    let (code, stdout, _) = said(&world.outlast(&["logs", "-n", "1"]));
    assert_eq!(code, Some(0));
    assert!(stdout.contains("Ended (code: 0)"), "the log of one that ended: {stdout}");
    let (code, _, stderr) = said(&world.outlast(&["audit", "--event", "server_crash"]));
    assert_eq!(code, Some(2));
    assert!(stderr.contains("did you mean `server_crashed`?"), "{stderr}");
}

/// The registry and the sockets of many instances, without as many processes: each of these answers as an instance
/// would.
#[test]
fn two_hundred_instances_are_listed_quickly() {
    let world = World::new();
    let session = world.start("real", &[]);
    let row = &world.ps()[0];
    let mut entry: Value = serde_json::from_str(
        &fs::read_to_string(world.run_dir().join(format!("{}.json", text_of(&row["id"])))).unwrap(),
    )
    .unwrap();
    for n in 0..200 {
        let id = format!("many-{n:03}");
        let socket = world.run_dir().join(format!("{id}.sock"));
        let listener = UnixListener::bind(&socket).unwrap();
        entry["id"] = json!(id);
        entry["socket"] = json!(socket);
        fs::write(world.run_dir().join(format!("{id}.json")), entry.to_string()).unwrap();
        thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let mut wire = Wire(stream);
                let request = wire.hear();
                wire.send(json!({"id": request["id"], "ok": {"state": "ready", "pid": 1}}).to_string().as_bytes());
            }
        });
    }
    let rows = world.ps();
    assert_eq!(rows.len(), 201);
    assert!(rows.iter().all(|row| row["state"] == "ready"));
    drop(session);
}

#[test]
fn a_name_prefers_the_instance_of_this_directory() {
    let world = World::new();
    let dirs: Vec<TempDir> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let _one = world.start_in(dirs[0].path(), &["--name", "weather"], &[]);
    let _two = world.start_in(dirs[1].path(), &["--name", "weather"], &[]);
    for dir in &dirs[..2] {
        let output = world.outlast_in(dir.path(), &["state", "weather", "--json"]);
        let state: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(state["cwd"], dir.path().canonicalize().unwrap().to_str().unwrap(), "{state}");
    }
    // From another directory the name is ambiguous: neither is stopped, and both are listed with their directories.
    let output = world.outlast_in(dirs[2].path(), &["stop", "weather"]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.starts_with("error: `weather` means 2 instances, none of them in this directory\n"), "{said}");
    for dir in &dirs[..2] {
        assert!(said.contains(dir.path().canonicalize().unwrap().to_str().unwrap()), "{said}");
    }
    assert_eq!(world.ps().len(), 2, "both still run");
    // The same for a command that reads a file of this directory.
    let output = world.outlast_in(dirs[2].path(), &["audit", "weather"]);
    let said = text(&output.stderr);
    assert!(said.starts_with("error: `weather` means 2 instances, none of them in this directory\n"), "{said}");
}
