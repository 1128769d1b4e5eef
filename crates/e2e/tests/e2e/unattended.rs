//! Work without a person: usage limits, turns that a crash interrupted, answers of turns, and notifications over HTTP.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    os::unix::net::UnixStream,
    process::{Command, Output, Stdio},
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

use super::{
    run::{answer as frame, text},
    support::{COMPOSER, OUTLAST},
};

const PATIENCE: Duration = Duration::from_secs(60);

/// A session `s` in the background, with an agent that looks like claude.
struct World {
    home: TempDir,
    project: TempDir,
}

impl World {
    fn start(options: &[&str], words: &[&str]) -> World {
        let world = World { home: tempfile::tempdir().unwrap(), project: tempfile::tempdir().unwrap() };
        std::os::unix::fs::symlink(COMPOSER, world.project.path().join("claude")).unwrap();
        world.launch(options, words);
        world
    }

    fn launch(&self, options: &[&str], words: &[&str]) {
        let words: Vec<String> = words.iter().map(|word| format!("--{word}")).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let started =
            self.outlast(&[&["run", "-d", "--session", "s"], options, &["--", "./claude"], &words[..]].concat());
        assert!(started.status.success(), "{}", text(&started.stderr));
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(OUTLAST);
        command.current_dir(self.project.path()).env("HOME", self.home.path()).args(args).stdin(Stdio::null());
        command
    }

    fn outlast(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn send(&self, words: &str) {
        let sent = self.outlast(&["send", "s", words, "--submit"]);
        assert!(sent.status.success(), "{}", text(&sent.stderr));
    }

    fn state(&self) -> Value {
        serde_json::from_slice(&self.outlast(&["state", "s", "--json"]).stdout).unwrap_or_default()
    }

    fn until(&self, what: &str, mut test: impl FnMut(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let state = self.state();
            if test(&state) {
                return state;
            }
            let screen = text(&self.outlast(&["screen", "s"]).stdout);
            assert!(Instant::now() < deadline, "never {what}: {state}\n{screen}\n{}", self.log());
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.project.path().join(".outlast/logs/s.log")).unwrap_or_default()
    }

    /// The texts that the agent received.
    fn sent(&self) -> Vec<String> {
        let log = fs::read_to_string(self.project.path().join("sent.log")).unwrap_or_default();
        log.split_terminator('\0').map(str::to_owned).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.outlast(&["stop", "s", "--force"]);
    }
}

/// A server on loopback that notes each request and answers with a status.
struct Web {
    port: u16,
    requests: Receiver<(String, String)>,
}

impl Web {
    fn start(status: &'static str) -> Web {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (tell, requests) = mpsc::channel();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let mut reader = BufReader::new(&stream);
                let (mut head, mut length) = (String::new(), 0);
                loop {
                    let mut line = String::new();
                    if reader.read_line(&mut line).unwrap_or(0) == 0 || line == "\r\n" {
                        break;
                    }
                    if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length: ") {
                        length = value.trim().parse().unwrap();
                    }
                    head.push_str(&line);
                }
                let mut body = vec![0; length];
                reader.read_exact(&mut body).unwrap();
                let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                (&stream).write_all(answer.as_bytes()).unwrap();
                let _ = tell.send((head, text(&body)));
            }
        });
        Web { port, requests }
    }

    fn next(&self) -> (String, String) {
        self.requests.recv_timeout(PATIENCE).expect("a request")
    }
}

#[test]
fn a_limited_agent_is_shown_and_continues_when_the_limit_is_over() {
    let notes = tempfile::NamedTempFile::new().unwrap();
    let notify = format!("cat >> '{}'", notes.path().display());
    let world = World::start(&["--on-limit", "wait", "--notify", &notify], &["limit=12"]);
    world.send("build it");
    let state = world.until("limited", |state| state["state"] == "limited");
    let left = state["next_try_s"].as_f64().unwrap();
    assert!(left > 0.0 && left <= 12.0, "{state}");
    assert!(state["limited_until"].is_i64() && state["limited_until_text"].is_string(), "{state}");
    assert!(state["limit"].as_str().unwrap().starts_with("You've hit your session limit"), "{state}");
    let listed: Value = serde_json::from_slice(&world.outlast(&["ps", "--json"]).stdout).unwrap();
    assert_eq!((&listed[0]["state"], &listed[0]["limited_until"]), (&json!("limited"), &state["limited_until"]));
    assert!(text(&world.outlast(&["ps"]).stdout).contains(" limited "));
    assert!(text(&world.outlast(&["top", "--once"]).stdout).contains("limited"));
    assert!(text(&world.outlast(&["state", "s"]).stdout).contains("  limited    until 20"));
    assert_eq!(world.sent(), ["build it"], "nothing is typed before the end");

    let state = world.until("over", |state| state["state"] == "ready");
    assert_eq!((&state["limited_until"], &state["limit"]), (&Value::Null, &Value::Null));
    assert_eq!(world.sent(), ["build it", "Continue."]);
    let log = world.log();
    for event in [" limited until=\"20", " limit_continue", " limit_over"] {
        assert!(log.contains(event), "{event}: {log}");
    }
    let noted = fs::read_to_string(notes.path()).unwrap();
    let events: Vec<Value> = noted.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let limited: Vec<&Value> = events.iter().filter(|event| event["event"] == "limited").collect();
    assert_eq!(limited.len(), 1, "{noted}");
    assert_eq!((&limited[0]["on_limit"], limited[0]["until"].is_i64()), (&json!("wait"), true));
}

#[test]
fn a_session_that_waits_for_its_limit_can_be_stopped() {
    let world = World::start(&["--on-limit", "wait"], &["limit=3600"]);
    world.send("build it");
    world.until("limited", |state| state["state"] == "limited");
    let began = Instant::now();
    assert!(world.outlast(&["stop", "s"]).status.success());
    assert!(began.elapsed() < Duration::from_secs(20));
    assert_eq!(world.sent(), ["build it"]);
}

#[test]
fn a_user_continues_after_the_limit() {
    let world = World::start(&[], &["limit=4"]);
    world.send("build it");
    world.until("limited", |state| state["state"] == "limited");
    world.until("the end of the limit", |state| state["next_try_s"].as_f64().is_none_or(|left| left <= 0.0));
    world.send("go on");
    world.until("free", |state| state["state"] == "ready");
    assert_eq!(world.sent(), ["build it", "go on"], "without --on-limit nothing is sent");
}

#[test]
fn a_session_can_end_at_the_limit() {
    let world = World { home: tempfile::tempdir().unwrap(), project: tempfile::tempdir().unwrap() };
    std::os::unix::fs::symlink(COMPOSER, world.project.path().join("claude")).unwrap();
    let run = ["run", "--session", "s", "--on-limit", "stop", "--", "./claude", "--limit=3600"];
    let mut outlast = world.command(&run).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    world.until("ready", |state| state["state"] == "ready");
    world.send("build it");
    assert_eq!(outlast.wait().unwrap().code(), Some(75));
    // Its conversation can be continued.
    let listed = text(&world.outlast(&["restore", "--list", "--json"]).stdout);
    assert!(listed.contains("\"id\": \"s\""), "{listed}");
}

/// The same words as the output of a tool, or in an answer.
#[test]
fn text_about_a_limit_is_no_limit() {
    let world = World::start(&[], &["limit=3600", "unrecorded"]);
    world.send("print it");
    // Long enough for all looks at the screen.
    let wait = world.outlast(&["wait-for", "s", "--quiet", "4s", "--timeout", "60s"]);
    assert!(wait.status.success());
    let screen = text(&world.outlast(&["screen", "s"]).stdout);
    assert!(screen.contains("You've hit your session limit"), "{screen}");
    assert_eq!(world.state()["state"], "ready");
    assert!(!world.log().contains(" limited "), "{}", world.log());
}

#[test]
fn an_option_that_cannot_work_is_refused() {
    let world = World { home: tempfile::tempdir().unwrap(), project: tempfile::tempdir().unwrap() };
    let table: [(&[&str], &str); 4] = [
        (&["--on-limit", "wait", "--", "sh"], "outlast cannot detect the usage limit of `sh`"),
        (&["--on-limit", "stop", "--no-screen", "--", "claude"], "outlast cannot detect the usage limit of `claude`"),
        (&["--on-resume", "go", "--no-screen", "--", "claude"], "the text of `--on-resume` cannot be sent"),
        (&["--on-resume", "", "--", "claude"], "the text of `--on-resume` cannot be sent"),
    ];
    for (options, sentence) in table {
        let output = world.outlast(&[&["run", "-d"], options].concat());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.starts_with(&format!("error: {sentence}\n  because: ")) && said.contains("\n  hint: "), "{said}");
    }
}

fn kill_agent(state: &Value) {
    kill(Pid::from_raw(i32::try_from(state["pid"].as_i64().unwrap()).unwrap()), Signal::SIGKILL).unwrap();
}

#[test]
fn a_turn_that_a_crash_interrupted_is_resumed_once() {
    let world = World::start(&["--on-resume", "Go on."], &["busy=2500"]);
    // A crash between turns is followed by nothing.
    world.until("waiting", |state| state["waiting_for_input"] == true);
    kill_agent(&world.state());
    world.until("waiting again", |state| state["generation"] == 2 && state["waiting_for_input"] == true);
    assert!(world.sent().is_empty());

    world.send("build it");
    let busy = world.until("busy", |state| state["stance"] == "busy");
    kill_agent(&busy);
    world.until("answered", |state| {
        state["generation"] == 3 && state["waiting_for_input"] == true && world.sent().len() == 2
    });
    assert_eq!(world.sent(), ["build it", "Go on."]);
    // A restart on request interrupts a turn, too, and is followed by nothing.
    world.send("test it");
    world.until("busy", |state| state["stance"] == "busy");
    assert!(world.outlast(&["restart", "s"]).status.success());
    world.until("waiting", |state| state["generation"] == 4 && state["waiting_for_input"] == true);
    assert!(world.outlast(&["wait-for", "s", "--quiet", "3s", "--timeout", "60s"]).status.success());
    assert_eq!(world.sent(), ["build it", "Go on.", "test it"]);
}

/// outlast itself is killed during a turn.
#[test]
fn an_interrupted_turn_is_resumed_after_a_restore() {
    let world = World::start(&["--on-resume", "Go on."], &["busy=3000"]);
    world.send("build it");
    let busy = world.until("busy", |state| state["stance"] == "busy");
    let record = world.home.path().join(".local/state/outlast/sessions/s.json");
    let deadline = Instant::now() + PATIENCE;
    while !fs::read_to_string(&record).unwrap().contains("\"in_turn\":true") {
        assert!(Instant::now() < deadline);
        thread::sleep(Duration::from_millis(20));
    }
    let outlast = Pid::from_raw(i32::try_from(busy["outlast_pid"].as_i64().unwrap()).unwrap());
    kill(outlast, Signal::SIGKILL).unwrap();
    world.until("gone", |state| state["error"].is_object());
    let restored = world.outlast(&["restore", "s"]);
    assert!(restored.status.success(), "{}", text(&restored.stderr));
    world.until("resumed", |state| state["waiting_for_input"] == true && world.sent().len() == 2);
    assert_eq!(world.sent(), ["build it", "Go on."]);
}

#[test]
fn the_end_of_a_turn_carries_the_answer() {
    let notes = tempfile::NamedTempFile::new().unwrap();
    let notify = format!("cat >> '{}'", notes.path().display());
    let world = World::start(&["--notify", &notify], &["busy=1500"]);
    world.until("waiting", |state| state["waiting_for_input"] == true);
    let early = world.outlast(&["wait-for", "s", "--turn", "--timeout", "1s"]);
    assert_eq!(early.status.code(), Some(124), "no turn was submitted");
    assert!(
        text(&early.stderr).starts_with("error: `s` did not finish its turn within 1 s\n"),
        "{}",
        text(&early.stderr)
    );
    let mut events = UnixStream::connect(world.home.path().join(".local/state/outlast/run/s.sock")).unwrap();
    events.set_read_timeout(Some(PATIENCE)).unwrap();
    let subscribe = json!({"v": 1, "id": 1, "method": "subscribe", "params": {}}).to_string();
    events.write_all(&[&(subscribe.len() as u32).to_be_bytes()[..], subscribe.as_bytes()].concat()).unwrap();
    let mut next_end = || loop {
        let event = frame(&mut events);
        if event["event"] == "turn_ended" {
            return event;
        }
    };
    for words in ["build it", "test it", "test it"] {
        world.send(words);
        let answer = world.outlast(&["wait-for", "s", "--turn", "--timeout", "60s"]);
        assert_eq!(text(&answer.stdout), format!("re: {words}\n"));
        let event = next_end();
        assert_eq!(event["answer"], format!("re: {words}"), "{event}");
    }
    let answer = world.outlast(&["wait-for", "s", "--turn", "--json"]);
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
    assert_eq!((&answer["answer"], &answer["answer_bytes"]), (&json!("re: test it"), &json!(11)));
    world.until("waiting", |state| state["waiting_for_input"] == true);
    assert_eq!(world.log().matches(" turn_ended").count(), 3, "{}", world.log());
    let noted = || fs::read_to_string(notes.path()).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while noted().matches("re: test it").count() < 2 {
        assert!(Instant::now() < deadline, "{}", noted());
        thread::sleep(Duration::from_millis(50));
    }
    let waits: Vec<Value> = noted().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(waits.iter().all(|event| event["event"] == "waiting_for_input"), "{waits:?}");
}

#[test]
fn events_are_posted_as_json_and_as_ntfy_expects_them() {
    let (hook, ntfy) = (Web::start("204 No Content"), Web::start("200 OK"));
    let url = format!("http://127.0.0.1:{}/hook?key=SECRET", hook.port);
    let topic = format!("ntfy:http://127.0.0.1:{}/topic", ntfy.port);
    let world = World::start(&["--notify", &url, "--notify", &topic], &["busy=800"]);
    world.send("build it");
    let answered = |web: &Web| loop {
        let (head, body) = web.next();
        if body.contains("re: build it") {
            return (head, body);
        }
    };
    let (head, body) = answered(&hook);
    assert!(head.starts_with("POST /hook?key=SECRET HTTP/1.1\r\n"), "{head}");
    assert!(head.to_ascii_lowercase().contains("content-type: application/json\r\n"), "{head}");
    let event: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (&event["event"], &event["session"], &event["answer"]),
        (&json!("waiting_for_input"), &json!("s"), &json!("re: build it"))
    );
    let (head, body) = answered(&ntfy);
    let head = head.to_ascii_lowercase();
    assert!(head.starts_with("post /topic http/1.1\r\n"), "{head}");
    for header in ["title: outlast: s\r\n", "priority: default\r\n", "tags: hourglass\r\n"] {
        assert!(head.contains(header), "{header}: {head}");
    }
    assert_eq!(body, "./claude waits for input\n\nre: build it");
    assert!(!world.log().contains("SECRET"), "{}", world.log());
}

#[test]
fn a_notification_that_fails_is_in_the_log_and_disturbs_nothing() {
    let refuses = Web::start("403 Forbidden");
    let away = Web::start("302 Found\r\nlocation: file:///etc/passwd");
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let urls = [
        format!("http://127.0.0.1:{}/x", refuses.port),
        format!("http://127.0.0.1:{}/x", away.port),
        format!("http://127.0.0.1:{closed}/x"),
    ];
    let options: Vec<&str> = urls.iter().flat_map(|url| ["--notify", url]).collect();
    let world = World::start(&options, &["busy=100"]);
    world.until("waiting", |state| state["waiting_for_input"] == true);
    let deadline = Instant::now() + PATIENCE;
    let expected = ["status 403", "status 302", "cannot connect to http://127.0.0.1:"];
    while !expected.iter().all(|words| world.log().contains(words)) {
        assert!(Instant::now() < deadline, "{}", world.log());
        thread::sleep(Duration::from_millis(50));
    }
    world.send("build it");
    assert_eq!(world.state()["restarts"], 0);
}
