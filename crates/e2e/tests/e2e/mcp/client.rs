//! A client that tracks its requests, the messages it received, and the processes that are left at the end.

use std::{
    collections::{BTreeMap, VecDeque},
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Far more than anything here takes, so that a busy machine causes no failure.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// The pause between two checks of a file or of `/proc`, which have no notification.
const LOOK_AGAIN: Duration = Duration::from_millis(3);
/// The time that a busy machine may add to a promised time.
pub(crate) const BUSY: Duration = Duration::from_secs(15);

pub(crate) const OUTLAST: &str = env!("CARGO_BIN_EXE_outlast-under-test");
pub(crate) const PUPPET: &str = env!("CARGO_BIN_EXE_outlast-puppet");
pub(crate) const VERSION: &str = "2025-06-18";
/// The `_meta` of every request of the stateless era.
pub(crate) const META: &str = r#""_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{}}"#;
pub(crate) const INITIALIZED: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;

/// Waits until `look` returns something, by polling.
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} in vain: {what}");
        thread::sleep(LOOK_AGAIN);
    }
}

/// A temporary project directory, which is also the home directory.
pub(crate) struct Place(TempDir);

impl Place {
    pub(crate) fn new() -> Place {
        Place(tempfile::tempdir().expect("a temporary folder"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn join(&self, name: &str) -> String {
        self.0.path().join(name).to_str().expect("paths of tests are plain").to_owned()
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> String {
        fs::write(self.0.path().join(name), text).expect("the project is ours");
        self.join(name)
    }

    /// An executable script.
    pub(crate) fn script(&self, name: &str, text: &str) -> String {
        use std::os::unix::fs::PermissionsExt;
        let path = self.write(name, text);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("the file is ours");
        path
    }

    /// The lines of a puppet's `--log`, each with the process that received it.
    pub(crate) fn log(&self, name: &str) -> Vec<(u32, String)> {
        let text = fs::read_to_string(self.0.path().join(name)).unwrap_or_default();
        // The last line may be incomplete.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole
            .lines()
            .map(|line| {
                let (pid, line) = line.split_once(' ').expect("a pid and a line");
                (pid.parse().expect("a pid"), line.to_owned())
            })
            .collect()
    }

    /// Every record of the audit log.
    pub(crate) fn audit(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.0.path().join(".outlast/audit.jsonl")).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("no JSON: {line}"))).collect()
    }

    pub(crate) fn audit_of(&self, event: &str) -> Vec<Value> {
        self.audit().into_iter().filter(|record| record["props"]["event_type"] == event).collect()
    }

    /// Waits for the record number `count` of an event, as an operator would; returns its `props`.
    pub(crate) fn recorded(&self, event: &str, count: usize) -> Value {
        until(&format!("{event} #{count} in the audit log"), || {
            self.audit_of(event).into_iter().nth(count - 1).map(|mut record| record["props"].take())
        })
    }

    /// Every process that any instance in this place started, found by its environment.
    pub(crate) fn family(&self) -> Vec<u32> {
        let started = self.audit_of("instance_started");
        let ids: Vec<&str> = started.iter().filter_map(|record| record["props"]["id"].as_str()).collect();
        ids.into_iter().flat_map(tagged).collect()
    }

    /// Waits until no process is left.
    pub(crate) fn is_swept(&self) {
        until(&format!("{:?} to be swept", self.family()), || self.family().is_empty().then_some(()));
    }
}

/// The processes whose environment names this instance.
fn tagged(id: &str) -> Vec<u32> {
    let tag = format!("OUTLAST_CHILD={id}.");
    pids()
        .filter(|pid| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable.starts_with(tag.as_bytes()))
        })
        .collect()
}

pub(crate) fn pids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").expect("a process table");
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// A line such as `VmRSS:` or `PPid:` of a process.
pub(crate) fn proc_number(pid: u32, key: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

pub(crate) fn is_alive(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    !status.is_empty() && !status.contains("\nState:\tZ")
}

pub(crate) fn descriptors(pid: u32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).expect("the process runs");
    let targets = entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.map(|target| target.display().to_string()).collect()
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(pid).expect("a pid")), signal).expect("the process is there");
}

/// How to start the program; each test sets only its own options.
#[derive(Clone)]
pub(crate) struct Setup {
    program: String,
    cwd: PathBuf,
    home: PathBuf,
    verb: &'static str,
    options: Vec<String>,
    /// The command after `--`; empty for a gateway, whose commands are in its configuration.
    command: Vec<String>,
    env: Vec<(String, String)>,
    group: bool,
    deaf: bool,
    /// Shell commands before the shell becomes outlast.
    before: Option<String>,
    /// A gateway looks for its configuration instead of being given its path, so that it must be trusted.
    found: bool,
}

impl Setup {
    pub(crate) fn new(place: &Place) -> Setup {
        let cwd = place.path().to_owned();
        Setup {
            program: OUTLAST.to_owned(),
            home: cwd.clone(),
            cwd,
            verb: "mcp",
            options: Vec::new(),
            command: vec![PUPPET.into()],
            env: Vec::new(),
            group: false,
            deaf: false,
            before: None,
            found: false,
        }
    }

    /// `outlast gateway`, with the `outlast.toml` of the place.
    pub(crate) fn gateway(place: &Place) -> Setup {
        Setup { verb: "gateway", command: Vec::new(), ..Setup::new(place) }
    }

    /// Another file than the program under test.
    pub(crate) fn program(mut self, path: &str) -> Setup {
        self.program = path.to_owned();
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Setup {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Options of the command.
    pub(crate) fn options<'a>(mut self, options: impl IntoIterator<Item = &'a str>) -> Setup {
        self.options.extend(options.into_iter().map(str::to_owned));
        self
    }

    /// Flags of the puppet.
    pub(crate) fn puppet<'a>(mut self, flags: impl IntoIterator<Item = &'a str>) -> Setup {
        self.command.extend(flags.into_iter().map(str::to_owned));
        self
    }

    /// Another server instead of the puppet.
    pub(crate) fn command<'a>(mut self, words: impl IntoIterator<Item = &'a str>) -> Setup {
        self.command = words.into_iter().map(str::to_owned).collect();
        self
    }

    /// Short graces, so that a test does not wait.
    pub(crate) fn hasty(self) -> Setup {
        self.options(["--stdin-grace", "0.2", "--term-grace", "0.3"])
    }

    pub(crate) fn cwd(mut self, cwd: &Path) -> Setup {
        self.cwd = cwd.to_owned();
        self
    }

    pub(crate) fn home(mut self, home: &Path) -> Setup {
        self.home = home.to_owned();
        self
    }

    pub(crate) fn own_group(mut self) -> Setup {
        self.group = true;
        self
    }

    /// Does not read its stderr.
    pub(crate) fn deaf(mut self) -> Setup {
        self.deaf = true;
        self
    }

    /// The gateway looks for its configuration itself.
    pub(crate) fn found(mut self) -> Setup {
        self.found = true;
        self
    }

    /// Commands of a shell that then becomes outlast, such as `ulimit`.
    pub(crate) fn before(mut self, words: &str) -> Setup {
        self.before = Some(words.to_owned());
        self
    }

    /// Starts it; nothing is sent yet.
    pub(crate) fn start(self) -> Client {
        let mut command = match &self.before {
            None => Command::new(&self.program),
            Some(words) => {
                let mut shell = Command::new("sh");
                shell.args(["-c", &format!("{words}\nexec \"$@\""), "sh", &self.program]);
                shell
            }
        };
        let is_named = self.found || self.options.iter().any(|option| option == "--config");
        let config = self.verb == "gateway" && !is_named && self.cwd.join("outlast.toml").exists();
        command
            .arg(self.verb)
            .args(config.then_some(["--config", "outlast.toml"]).into_iter().flatten())
            .args(&self.options)
            .args((!self.command.is_empty()).then_some("--"))
            .args(&self.command)
            .current_dir(&self.cwd)
            .env("HOME", &self.home)
            .env_remove("OUTLAST_PUPPET")
            .env_remove("OUTLAST_CHILD")
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if self.group {
            command.process_group(0);
        }
        Client::new(command.spawn().expect("the program starts"), self.deaf)
    }

    /// Starts it and makes the handshake.
    pub(crate) fn ready(self) -> Client {
        let mut client = self.start();
        client.open();
        client
    }
}

pub(crate) struct Client {
    child: Child,
    stdin: Option<ChildStdin>,
    /// Dropping it makes the reader close the program's stdout.
    hearing: Option<OwnedFd>,
    reader: Option<JoinHandle<()>>,
    lines: Receiver<Vec<u8>>,
    stderr: Arc<Mutex<Vec<String>>>,
    stderr_reader: Option<JoinHandle<()>>,
    next_id: u64,
    /// Ids of unanswered requests.
    open: BTreeMap<String, usize>,
    answers: BTreeMap<String, VecDeque<Value>>,
    /// Every received message that is not an answer, in order.
    pub heard: VecDeque<Value>,
    /// Every received line, unchanged.
    pub raw: Vec<Vec<u8>>,
    keeps_raw: bool,
}

impl Client {
    fn new(mut child: Child, deaf: bool) -> Client {
        let stdout = child.stdout.take().expect("stdout is piped");
        let (hearing, told) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).expect("a pipe");
        let (heard, lines) = channel();
        let reader = thread::spawn(move || read_lines(stdout, &hearing, |line| heard.send(line).is_ok()));
        let stderr = Arc::new(Mutex::new(Vec::new()));
        let said = BufReader::new(child.stderr.take().expect("stderr is piped"));
        let kept = Arc::clone(&stderr);
        let stderr_reader = thread::spawn(move || {
            if deaf {
                // Kept open, so that a write to it does not fail, and never read.
                thread::park();
            }
            for line in said.split(b'\n').map_while(Result::ok) {
                kept.lock()
                    .expect("no thread panics while it holds this")
                    .push(String::from_utf8_lossy(&line).into_owned());
            }
        });
        Client {
            stdin: child.stdin.take(),
            child,
            hearing: Some(told),
            reader: Some(reader),
            lines,
            stderr,
            stderr_reader: Some(stderr_reader),
            next_id: 1,
            open: BTreeMap::new(),
            answers: BTreeMap::new(),
            heard: VecDeque::new(),
            raw: Vec::new(),
            keeps_raw: false,
        }
    }

    pub(crate) fn open(&mut self) {
        let answer = self.ask("initialize", initialize_params(VERSION));
        assert_eq!(answer["result"]["protocolVersion"], VERSION, "{answer}");
        self.line(INITIALIZED);
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The keeper process.
    pub(crate) fn keeper(&self) -> u32 {
        let ours = u64::from(self.pid());
        until("the keeper", || pids().find(|pid| proc_number(*pid, "PPid:") == Some(ours)))
    }

    pub(crate) fn keep_raw(&mut self) {
        self.keeps_raw = true;
    }

    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        let stdin = self.stdin.as_mut().expect("stdin is open");
        stdin.write_all(bytes).expect("the program listens");
    }

    pub(crate) fn line(&mut self, line: &str) {
        self.raw(format!("{line}\n").as_bytes());
    }

    pub(crate) fn notify(&mut self, method: &str, params: Value) {
        self.line(&json!({"jsonrpc": "2.0", "method": method, "params": params}).to_string());
    }

    /// Sends a request, and does not wait.
    pub(crate) fn request(&mut self, method: &str, params: Value) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.owed(&id.to_string());
        self.line(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string());
        id
    }

    /// Registers a request that was sent by [`Client::raw`] under this id (as `serde_json` writes it).
    pub(crate) fn owed(&mut self, id: &str) {
        *self.open.entry(id.to_owned()).or_default() += 1;
    }

    /// Cancels a request, which then needs no answer.
    pub(crate) fn cancel(&mut self, id: u64) {
        self.open.remove(&id.to_string());
        self.notify("notifications/cancelled", json!({"requestId": id}));
    }

    pub(crate) fn send_call(&mut self, tool: &str, arguments: Value) -> u64 {
        self.request("tools/call", json!({"name": tool, "arguments": arguments}))
    }

    pub(crate) fn ask(&mut self, method: &str, params: Value) -> Value {
        let id = self.request(method, params);
        self.answer(id)
    }

    /// The result of a call, error or not.
    pub(crate) fn result(&mut self, tool: &str, arguments: Value) -> Value {
        let mut answer = self.ask("tools/call", json!({"name": tool, "arguments": arguments}));
        assert!(answer["result"].is_object(), "{tool}: {answer}");
        answer["result"].take()
    }

    /// The text of a call that must succeed.
    pub(crate) fn call(&mut self, tool: &str, arguments: Value) -> String {
        let result = self.result(tool, arguments);
        assert_ne!(result["isError"], true, "{tool}: {result}");
        text(&result)
    }

    pub(crate) fn restart(&mut self) -> Value {
        let mut result = self.result("restart_server", json!({"reason": "a test"}));
        assert_ne!(result["isError"], true, "{result}");
        result["structuredContent"].take()
    }

    pub(crate) fn status(&mut self) -> Value {
        self.result("server_status", json!({}))["structuredContent"].take()
    }

    /// The pid of the current puppet, as it reports it.
    pub(crate) fn server_pid(&mut self) -> u32 {
        self.call("pid", json!({})).parse().expect("a pid")
    }

    pub(crate) fn kill_server(&mut self) -> u32 {
        let pid = self.server_pid();
        signal(pid, Signal::SIGKILL);
        pid
    }

    pub(crate) fn tool_names(&mut self) -> Vec<String> {
        let answer = self.ask("tools/list", json!({}));
        let tools = answer["result"]["tools"].as_array().unwrap_or_else(|| panic!("no list: {answer}"));
        tools.iter().map(|tool| tool["name"].as_str().expect("a name").to_owned()).collect()
    }

    pub(crate) fn answer(&mut self, id: u64) -> Value {
        self.answer_to(&id.to_string())
    }

    /// Waits for the answer under an id, as `serde_json` writes it.
    pub(crate) fn answer_to(&mut self, id: &str) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(answer) = self.answers.get_mut(id).and_then(VecDeque::pop_front) {
                return answer;
            }
            assert!(self.hear(deadline), "no answer to {id}; stderr:\n{}", self.stderr_text());
        }
    }

    /// The next answer to any request, with its id.
    pub(crate) fn any_answer(&mut self) -> (String, Value) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some((id, answers)) = self.answers.iter_mut().find(|(_, answers)| !answers.is_empty()) {
                return (id.clone(), answers.pop_front().expect("it is not empty"));
            }
            self.answers.clear();
            assert!(self.hear(deadline), "no answer at all; stderr:\n{}", self.stderr_text());
        }
    }

    /// Whether an answer has come by now.
    pub(crate) fn has_answer(&mut self, id: u64) -> bool {
        while self.hear(Instant::now()) {}
        self.answers.get(&id.to_string()).is_some_and(|answers| !answers.is_empty())
    }

    /// The next notification or request of this method; earlier messages are kept.
    pub(crate) fn next(&mut self, method: &str) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.heard.iter().position(|message| message["method"] == method) {
                return self.heard.remove(at).expect("it was found");
            }
            assert!(self.hear(deadline), "no {method}; stderr:\n{}", self.stderr_text());
        }
    }

    /// How many messages of a method have come so far.
    pub(crate) fn count(&mut self, method: &str) -> usize {
        while self.hear(Instant::now()) {}
        self.heard.iter().filter(|message| message["method"] == method).count()
    }

    /// Reads one line, if it comes in time.
    fn hear(&mut self, deadline: Instant) -> bool {
        let Ok(line) = self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) else {
            return false;
        };
        let message: Value = serde_json::from_slice(&line)
            .unwrap_or_else(|_| panic!("not a message: {:?}", String::from_utf8_lossy(&line)));
        if self.keeps_raw {
            self.raw.push(line);
        }
        match message {
            Value::Array(members) => members.into_iter().for_each(|member| self.enter(member)),
            message => self.enter(message),
        }
        true
    }

    fn enter(&mut self, message: Value) {
        if message.get("method").is_some() {
            self.heard.push_back(message);
            return;
        }
        let id = message["id"].to_string();
        match self.open.get_mut(&id) {
            Some(owed) if *owed > 1 => *owed -= 1,
            Some(_) => drop(self.open.remove(&id)),
            None => assert_eq!(id, "null", "an answer to nothing: {message}"),
        }
        self.answers.entry(id).or_default().push_back(message);
    }

    pub(crate) fn stderr_lines(&self) -> Vec<String> {
        self.stderr.lock().expect("no thread panics while it holds this").clone()
    }

    pub(crate) fn stderr_text(&self) -> String {
        self.stderr_lines().join("\n")
    }

    /// Waits for a line on stderr that contains these words.
    pub(crate) fn says(&self, words: &str) -> String {
        until(&format!("{words:?} on stderr"), || self.stderr_lines().into_iter().find(|line| line.contains(words)))
    }

    pub(crate) fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Stops reading, as a client that crashed.
    pub(crate) fn break_stdout(&mut self) {
        self.hearing = None;
        self.reader.take().expect("it is broken once").join().expect("the reader does not panic");
    }

    /// Waits until the program exits, for any reason.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let mut child_ended = None;
        until("the end of the program", || {
            child_ended = self.child.try_wait().expect("our child");
            child_ended
        })
    }

    /// Closes stdin and waits: the program exits with 0, and every request was answered.
    pub(crate) fn end(mut self) {
        self.close_stdin();
        let status = self.wait();
        let deadline = Instant::now() + PATIENCE;
        while self.hear(deadline) {}
        assert_eq!(status.code(), Some(0), "stderr:\n{}", self.stderr_text());
        assert!(self.open.is_empty(), "never answered: {:?}; stderr:\n{}", self.open, self.stderr_text());
    }

    /// All of stderr, after the program has exited.
    pub(crate) fn last_words(&mut self) -> String {
        self.stderr_reader.take().expect("asked for once").join().expect("the reader does not panic");
        self.stderr_text()
    }

    pub(crate) fn owes(&self) -> usize {
        self.open.values().sum()
    }
}

/// A failed test leaves no process: the keeper kills the remaining ones when the program has exited.
impl Drop for Client {
    fn drop(&mut self) {
        if let Some(reader) = &self.stderr_reader {
            reader.thread().unpark();
        }
        self.stdin = None;
        if thread::panicking() {
            eprintln!("stderr of the program:\n{}", self.stderr_text());
        }
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// Forwards whole lines until stdout ends, or the other end of `hearing` is dropped.
fn read_lines(mut stdout: ChildStdout, hearing: &OwnedFd, mut hand_on: impl FnMut(Vec<u8>) -> bool) {
    let (mut pending, mut chunk) = (Vec::new(), vec![0; 1 << 18]);
    loop {
        let mut sources =
            [PollFd::new(stdout.as_fd(), PollFlags::POLLIN), PollFd::new(hearing.as_fd(), PollFlags::POLLIN)];
        poll(&mut sources, PollTimeout::NONE).expect("both are open");
        if sources[1].revents().is_some_and(|events| !events.is_empty()) {
            return;
        }
        let read = stdout.read(&mut chunk).unwrap_or(0);
        if read == 0 {
            return;
        }
        let mut rest = &chunk[..read];
        while let Some(at) = rest.iter().position(|byte| *byte == b'\n') {
            pending.extend_from_slice(&rest[..at]);
            rest = &rest[at + 1..];
            if !hand_on(std::mem::take(&mut pending)) {
                return;
            }
        }
        pending.extend_from_slice(rest);
    }
}

pub(crate) fn initialize_params(version: &str) -> Value {
    json!({"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "proof", "version": "1"}})
}

pub(crate) fn text(result: &Value) -> String {
    result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text in {result}")).to_owned()
}

/// The failure that outlast reports for a call.
pub(crate) fn failure(result: &Value) -> &Value {
    assert_eq!(result["isError"], true, "{result}");
    let failure = &result["_meta"]["outlast/failure"];
    assert!(failure.is_object(), "{result}");
    failure
}
