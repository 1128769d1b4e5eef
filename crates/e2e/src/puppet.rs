//! A scriptable MCP stdio server of both eras: flags and tools make it crash, hang or write garbage.
//!
//! Flags come from the command line, then from the environment variable `OUTLAST_PUPPET` (split at white space), then
//! from the file of `--more FILE` (one flag or value a line; may be absent). The file is read anew at each start, so a
//! test can change the behaviour of the next process.
//!
//! | flag | what it does |
//! |---|---|
//! | `--era legacy\|modern\|both` | the protocol eras spoken; `both` by default, the first request decides |
//! | `--version-only V` | the only protocol version it answers with |
//! | `--fail-if FILE` | if FILE exists: its content goes to stderr and the exit code is 3, before anything is read |
//! | `--slow-start MS` | waits before it reads |
//! | `--tools FILE` | a JSON array of further tools; each acts as the built-in tool in `_meta` `puppet/as`, or `echo` |
//! | `--page N` | N tools on each page of `tools/list` |
//! | `--no-list-changed` | `listChanged: false` in every capability |
//! | `--prompts`, `--resources`, `--logging` | offers these too |
//! | `--own-restart` | has a tool `restart_server {answer, code}`: exit 42, unanswered unless told otherwise |
//! | `--ignore-eof`, `--ignore-term` | survives the end of stdin; SIGTERM |
//! | `--log FILE` | appends `PID LINE` for each line it receives |
//! | `--ledger FILE` | appends `CALL PID`, in one write before it acts, for each tool call with a number as `call` |

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::{self, Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{SigSet, Signal, kill, raise},
    unistd::Pid,
};
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};

/// From the oldest to the newest; an unknown version is answered with the newest.
const LEGACY_VERSIONS: [&str; 4] = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"];
const MODERN_VERSION: &str = "2026-07-28";
const LEVELS: [&str; 8] = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"];

const META_VERSION: &str = "io.modelcontextprotocol/protocolVersion";
const META_CAPABILITIES: &str = "io.modelcontextprotocol/clientCapabilities";
const META_LOG_LEVEL: &str = "io.modelcontextprotocol/logLevel";
const META_SERVER: &str = "io.modelcontextprotocol/serverInfo";
const META_SUBSCRIPTION: &str = "io.modelcontextprotocol/subscriptionId";

/// The argument that makes this program a grandchild instead of a server.
const GRANDCHILD: &str = "--be-a-grandchild";
/// A grandchild that outlast has not killed exits by itself after this time, so that a failed test leaves no process
/// for long.
const GRANDCHILD_LIFE_MAX: Duration = Duration::from_secs(600);
const READ_SIZE: usize = 256 * 1024;

/// Name and description of each built-in tool; the arguments are named in braces.
const TOOLS: &[(&str, &str)] = &[
    ("echo", "{text} or anything: the text, or the arguments as they came"),
    ("sleep", "{ms}: answers `slept` after that time"),
    ("crash", "{code = 1, once}: exits without an answer; with a file `once` only if it does not exist yet"),
    (
        "exit",
        "{code = 0, answer = true, bytes}: exits, with or without an answer; with `bytes` it is so many letters x",
    ),
    ("kill_self", "{signal}: a number or a name such as SIGKILL"),
    (
        "signal_above",
        "{signal, keeper = false}: signals the keeper, if told to, and then its own monitor, without an answer",
    ),
    ("pid", "its process id"),
    ("generation", "the value of OUTLAST_CHILD"),
    ("env", "{name}: the value of an environment variable"),
    (
        "use",
        "{how, path, port, pid}: `ok` or the error of read, stat, list, write, truncate, run, connect, bind, udp, unix or signal",
    ),
    ("stderr", "{text}: a line on stderr"),
    ("garbage", "{text}: a line on stdout, as it is"),
    ("big", "{bytes}: so many letters x"),
    ("answer_twice", "the answer `once`, and then the same again"),
    ("log", "{level = info, text}: notifications/message, where the level asked for admits it"),
    ("progress", "{steps, ms}: notifications/progress at that distance, then an answer"),
    ("ask", "{method, params, wait = true}: asks the client; the whole response as text"),
    ("grandchild", "{setsid, ignore_term, hold_stdout, clear_env}: starts one that sleeps; its process id"),
    ("hang", "{answer = false}: stops reading"),
    ("deaf", "answers no call from here on, and everything else"),
    ("close_stdout", "closes stdout, without an answer, and continues"),
    ("received", "all lines received since the start, as a JSON array of strings"),
    ("state", "phase, log level, subscribed resources and open listens, as JSON"),
    ("set_tools", "{file}: replaces the tools of `--tools`; announces nothing"),
    ("announce", "{what}: list_changed for tools, prompts or resources"),
    ("touch", "{uri}: resources/updated to subscribers"),
    ("use_up_processes", "starts processes until the system refuses one; how many"),
    ("free_processes", "ends those"),
];

pub(crate) fn main() -> ExitCode {
    let mut args = env::args().skip(1);
    if env::args().nth(1).as_deref() == Some(GRANDCHILD) {
        return be_a_grandchild(args.by_ref().skip(1));
    }
    let flags = match Flags::gather(args) {
        Ok(flags) => flags,
        Err(problem) => {
            eprintln!("outlast-puppet: {problem}");
            return ExitCode::from(2);
        }
    };
    if let Some(words) = flags.fail_if.as_ref().and_then(|file| fs::read_to_string(file).ok()) {
        eprintln!("{words}");
        return ExitCode::from(3);
    }
    if flags.ignore_term {
        block_term();
    }
    thread::sleep(flags.slow_start);
    match Puppet::new(flags).and_then(Puppet::serve) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("outlast-puppet: {problem}");
            ExitCode::FAILURE
        }
    }
}

/// A blocked SIGTERM stays pending for ever, which for the sender is the same as an ignored one.
fn block_term() {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.thread_block().expect("blocking a signal cannot fail");
}

fn be_a_grandchild(args: impl Iterator<Item = String>) -> ExitCode {
    for arg in args {
        match arg.as_str() {
            "setsid" => drop(nix::unistd::setsid().expect("a child of the puppet leads no group")),
            "ignore_term" => block_term(),
            other => panic!("no grandchild does `{other}`"),
        }
    }
    // The puppet waits for this line, so that a pid is reported only when the process has the requested state.
    eprintln!("ready");
    thread::sleep(GRANDCHILD_LIFE_MAX);
    ExitCode::SUCCESS
}

#[derive(Clone, Copy, PartialEq)]
enum Era {
    Legacy,
    Modern,
    Both,
}

#[derive(Default)]
struct Flags {
    era: Option<Era>,
    version_only: Option<String>,
    fail_if: Option<PathBuf>,
    slow_start: Duration,
    tools: Option<PathBuf>,
    page: Option<usize>,
    no_list_changed: bool,
    prompts: bool,
    resources: bool,
    logging: bool,
    own_restart: bool,
    ignore_eof: bool,
    ignore_term: bool,
    log: Option<PathBuf>,
    ledger: Option<PathBuf>,
    more: Option<PathBuf>,
}

impl Flags {
    fn gather(args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut flags = Self::default();
        flags.take(args)?;
        if let Ok(line) = env::var("OUTLAST_PUPPET") {
            flags.take(line.split_whitespace().map(String::from))?;
        }
        if let Some(text) = flags.more.take().and_then(|file| fs::read_to_string(file).ok()) {
            flags.take(text.lines().map(String::from))?;
        }
        Ok(flags)
    }

    fn take(&mut self, mut args: impl Iterator<Item = String>) -> Result<(), String> {
        while let Some(flag) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("`{flag}` needs a value"));
            let number = |text: String| text.parse::<u64>().map_err(|_| format!("`{text}` is not a number"));
            match flag.as_str() {
                "--era" => {
                    self.era = Some(match value()?.as_str() {
                        "legacy" => Era::Legacy,
                        "modern" => Era::Modern,
                        "both" => Era::Both,
                        other => return Err(format!("no era `{other}`")),
                    });
                }
                "--version-only" => self.version_only = Some(value()?),
                "--fail-if" => self.fail_if = Some(value()?.into()),
                "--slow-start" => self.slow_start = Duration::from_millis(number(value()?)?),
                "--tools" => self.tools = Some(value()?.into()),
                "--page" => self.page = Some(number(value()?)?.max(1) as usize),
                "--no-list-changed" => self.no_list_changed = true,
                "--prompts" => self.prompts = true,
                "--resources" => self.resources = true,
                "--logging" => self.logging = true,
                "--own-restart" => self.own_restart = true,
                "--ignore-eof" => self.ignore_eof = true,
                "--ignore-term" => self.ignore_term = true,
                "--log" => self.log = Some(value()?.into()),
                "--ledger" => self.ledger = Some(value()?.into()),
                "--more" => self.more = Some(value()?.into()),
                other => return Err(format!("no flag `{other}`")),
            }
        }
        Ok(())
    }
}

/// A message on the wire, parsed no deeper than needed; ids keep their text.
#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    method: Option<String>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct CallParams<'a> {
    name: String,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Unopened,
    /// `initialize` is answered, `notifications/initialized` has not come.
    Initializing,
    Ready,
    Modern,
}

/// A request that needs an answer.
#[derive(Clone)]
struct Request {
    id: String,
    params: Value,
}

impl Request {
    fn meta(&self, key: &str) -> Option<&Value> {
        self.params.get("_meta")?.get(key)
    }
}

/// A protocol error: code, message, data.
struct Refusal(i32, String, Option<Value>);

/// The outcome of a tool call.
enum Outcome {
    Says(String),
    Fails(String),
    /// Answered later, or never.
    Later,
}

struct Timer {
    at: Instant,
    request: Request,
    then: Then,
}

enum Then {
    Say(&'static str),
    Progress { step: u64, steps: u64, every: Duration },
}

#[derive(PartialEq)]
enum Input {
    Reading,
    /// The puppet hangs: input stays in the pipe.
    Ignored,
    Ended,
}

struct Puppet {
    flags: Flags,
    /// `None` after `close_stdout`.
    stdout: Option<File>,
    log: Option<File>,
    /// The calls that were executed.
    ledger: Option<File>,
    input: Input,
    phase: Phase,
    received: Vec<String>,
    tools: Vec<Value>,
    timers: Vec<Timer>,
    /// The puppet's requests to the client, by its id, each with the call that waits for the response.
    asked: BTreeMap<u64, Request>,
    next_ask: u64,
    log_level: Option<String>,
    subscribed: BTreeSet<String>,
    /// Open `subscriptions/listen` requests, each with the filter that was granted.
    listens: BTreeMap<String, Value>,
    /// It answers no calls.
    is_deaf: bool,
    /// The processes of `use_up_processes`.
    sleeping: Vec<process::Child>,
}

impl Puppet {
    fn new(flags: Flags) -> io::Result<Self> {
        let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        let append = |path: &PathBuf| OpenOptions::new().create(true).append(true).open(path);
        let log = flags.log.as_ref().map(append).transpose()?;
        let ledger = flags.ledger.as_ref().map(append).transpose()?;
        let tools = match &flags.tools {
            Some(path) => read_tools(path)?,
            None => Vec::new(),
        };
        Ok(Self {
            flags,
            stdout: Some(stdout),
            log,
            ledger,
            input: Input::Reading,
            phase: Phase::Unopened,
            received: Vec::new(),
            tools,
            timers: Vec::new(),
            asked: BTreeMap::new(),
            next_ask: 0,
            log_level: None,
            subscribed: BTreeSet::new(),
            listens: BTreeMap::new(),
            is_deaf: false,
            sleeping: Vec::new(),
        })
    }

    fn serve(mut self) -> io::Result<()> {
        let stdin = io::stdin();
        let mut pipe = File::from(stdin.as_fd().try_clone_to_owned()?);
        let mut pending = Vec::new();
        let mut chunk = vec![0; READ_SIZE];
        loop {
            self.fire_timers();
            // As in a server on an event loop, calls that still run at the end of stdin are finished first.
            if self.input == Input::Ended && self.timers.is_empty() && !self.flags.ignore_eof {
                return Ok(());
            }
            let timeout = match self.timers.iter().map(|timer| timer.at).min() {
                // A millisecond more, because poll rounds down and would spin.
                Some(at) => {
                    let wait = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
                    PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX)
                }
                None => PollTimeout::NONE,
            };
            let mut sources = [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)];
            let count = usize::from(self.input == Input::Reading);
            if poll(&mut sources[..count], timeout)? == 0 {
                continue;
            }
            let read = pipe.read(&mut chunk)?;
            if read == 0 {
                self.input = Input::Ended;
                continue;
            }
            pending.extend_from_slice(&chunk[..read]);
            let mut start = 0;
            while let Some(length) = memchr::memchr(b'\n', &pending[start..]) {
                let line = pending[start..start + length].to_vec();
                start += length + 1;
                self.hear(&line);
                if self.input != Input::Reading {
                    break;
                }
            }
            pending.drain(..start);
        }
    }

    fn fire_timers(&mut self) {
        let now = Instant::now();
        let (mut due, rest): (Vec<_>, Vec<_>) = self.timers.drain(..).partition(|timer| timer.at <= now);
        self.timers = rest;
        due.sort_by_key(|timer| timer.at);
        for timer in due {
            match timer.then {
                Then::Say(text) => self.answer_call(&timer.request, text, false),
                Then::Progress { step, steps, every } => self.progress(timer.request, step, steps, every),
            }
        }
    }

    fn progress(&mut self, request: Request, step: u64, steps: u64, every: Duration) {
        if steps < step {
            return self.answer_call(&request, &format!("{steps} steps"), false);
        }
        if let Some(token) = request.meta("progressToken") {
            let params = json!({"progressToken": token, "progress": step, "total": steps});
            self.notify("notifications/progress", params);
        }
        let then = Then::Progress { step: step + 1, steps, every };
        self.timers.push(Timer { at: Instant::now() + every, request, then });
    }

    fn hear(&mut self, line: &[u8]) {
        let line = String::from_utf8_lossy(line).into_owned();
        if let Some(log) = &mut self.log {
            let record = format!("{} {line}\n", process::id());
            log.write_all(record.as_bytes()).expect("the log of a test can be written");
        }
        self.received.push(line.clone());
        // A line that is not a message, a batch included, is dropped silently, as common servers do.
        let Ok(message) = serde_json::from_str::<Message>(&line) else { return };
        let params = message.params.map_or("null", RawValue::get);
        match (message.id, message.method) {
            (Some(id), Some(method)) => {
                let params_value = serde_json::from_str(params).expect("a raw value is JSON");
                self.hear_request(Request { id: id.get().into(), params: params_value }, &method, params);
            }
            (None, Some(method)) => self.hear_notification(&method, params),
            (Some(id), None) => self.hear_response(id.get(), &line),
            (None, None) => {}
        }
    }

    fn hear_notification(&mut self, method: &str, params: &str) {
        match method {
            "notifications/initialized" if self.phase == Phase::Initializing => self.phase = Phase::Ready,
            "notifications/cancelled" => {
                #[derive(Deserialize)]
                #[serde(rename_all = "camelCase")]
                struct Cancelled<'a> {
                    #[serde(borrow)]
                    request_id: &'a RawValue,
                }
                let Ok(cancelled) = serde_json::from_str::<Cancelled>(params) else { return };
                let id = cancelled.request_id.get();
                self.timers.retain(|timer| timer.request.id != id);
                self.asked.retain(|_, request| request.id != id);
                self.listens.remove(id);
            }
            _ => {}
        }
    }

    fn hear_response(&mut self, id: &str, line: &str) {
        let Some(request) = id.parse().ok().and_then(|id: u64| self.asked.remove(&id)) else { return };
        self.answer_call(&request, line, false);
    }

    fn hear_request(&mut self, request: Request, method: &str, params: &str) {
        let admitted = self.admit(&request, method);
        let answer = admitted.and_then(|()| match method {
            "tools/call" => self.call(&request, params).map(|()| None),
            "subscriptions/listen" if self.phase == Phase::Modern => {
                self.listen(&request);
                Ok(None)
            }
            _ => self.result(&request, method).map(Some),
        });
        match answer {
            Ok(Some(result)) => self.answer(&request, result),
            Ok(None) => {}
            Err(Refusal(code, message, data)) => {
                let mut error = json!({"code": code, "message": message});
                if let Some(data) = data {
                    error["data"] = data;
                }
                self.write_line(&format!(r#"{{"jsonrpc":"2.0","id":{},"error":{error}}}"#, request.id));
            }
        }
    }

    /// The first request decides the era; requests that do not fit it are refused.
    fn admit(&mut self, request: &Request, method: &str) -> Result<(), Refusal> {
        let era = self.flags.era.unwrap_or(Era::Both);
        let version = request.meta(META_VERSION);
        let has_envelope = version.is_some() && method != "initialize";
        if self.phase == Phase::Unopened && (era == Era::Modern || era == Era::Both && has_envelope) {
            self.phase = Phase::Modern;
        }
        match self.phase {
            Phase::Modern if method == "initialize" => {
                let message = format!("this server speaks {MODERN_VERSION}, which has no initialize");
                Err(self.unsupported(message, &request.params["protocolVersion"]))
            }
            Phase::Modern => {
                let (Some(version), Some(_)) = (version, request.meta(META_CAPABILITIES)) else {
                    let message = format!("params._meta must carry {META_VERSION} and {META_CAPABILITIES}");
                    return Err(Refusal(-32602, message, None));
                };
                if version != self.modern_version() {
                    return Err(self.unsupported("Unsupported protocol version".into(), version));
                }
                Ok(())
            }
            _ if method == "initialize" || method == "ping" => Ok(()),
            Phase::Ready if has_envelope && era == Era::Both => {
                Err(Refusal(-32600, "this connection was opened by a handshake".into(), None))
            }
            Phase::Ready => Ok(()),
            Phase::Unopened | Phase::Initializing => {
                Err(Refusal(-32602, "Received request before initialization was complete".into(), None))
            }
        }
    }

    fn modern_version(&self) -> &str {
        self.flags.version_only.as_deref().filter(|version| MODERN_VERSION <= *version).unwrap_or(MODERN_VERSION)
    }

    fn unsupported(&self, message: String, requested: &Value) -> Refusal {
        let data = json!({"supported": [self.modern_version()], "requested": requested});
        Refusal(-32022, message, Some(data))
    }

    /// The result of every method but the two that may be answered late.
    fn result(&mut self, request: &Request, method: &str) -> Result<Value, Refusal> {
        let params = &request.params;
        let is_legacy = self.phase != Phase::Modern;
        let (prompts, resources) = (self.flags.prompts, self.flags.resources);
        Ok(match method {
            "initialize" => {
                self.phase = Phase::Initializing;
                let asked = params["protocolVersion"].as_str().unwrap_or_default();
                let known = LEGACY_VERSIONS.contains(&asked);
                let version = match &self.flags.version_only {
                    Some(only) => only.as_str(),
                    None if known => asked,
                    None => LEGACY_VERSIONS[3],
                };
                json!({"protocolVersion": version, "capabilities": self.capabilities(), "serverInfo": server_info()})
            }
            "ping" if is_legacy => json!({}),
            "server/discover" if !is_legacy => {
                json!({"supportedVersions": [self.modern_version()], "capabilities": self.capabilities()})
            }
            "tools/list" => self.list_tools(params)?,
            "prompts/list" if prompts => json!({"prompts": [{"name": "greet", "description": "A greeting"}]}),
            "prompts/get" if prompts => {
                let text = format!("prompt {} of {}", params["name"], process::id());
                json!({"messages": [{"role": "user", "content": {"type": "text", "text": text}}]})
            }
            "completion/complete" if prompts => json!({"completion": {"values": ["one", "two"]}}),
            "resources/list" if resources => json!({"resources": [
                {"uri": "puppet://a", "name": "a"},
                {"uri": "puppet://b", "name": "b"},
            ]}),
            "resources/templates/list" if resources => {
                json!({"resourceTemplates": [{"uriTemplate": "puppet://{name}", "name": "any"}]})
            }
            "resources/read" if resources => {
                let text = process::id().to_string();
                json!({"contents": [{"uri": params["uri"], "mimeType": "text/plain", "text": text}]})
            }
            "resources/subscribe" if resources && is_legacy => {
                self.subscribed.insert(params["uri"].as_str().unwrap_or_default().into());
                json!({})
            }
            "resources/unsubscribe" if resources && is_legacy => {
                self.subscribed.remove(params["uri"].as_str().unwrap_or_default());
                json!({})
            }
            "logging/setLevel" if self.flags.logging && is_legacy => {
                self.log_level = params["level"].as_str().map(String::from);
                json!({})
            }
            _ => return Err(Refusal(-32601, "Method not found".into(), Some(method.into()))),
        })
        .map(|mut result| {
            let is_cacheable = method.ends_with("/list") || ["server/discover", "resources/read"].contains(&method);
            if !is_legacy && is_cacheable {
                result["ttlMs"] = 60_000.into();
                result["cacheScope"] = "private".into();
            }
            result
        })
    }

    fn capabilities(&self) -> Value {
        let list_changed = !self.flags.no_list_changed;
        let mut capabilities = json!({"tools": {"listChanged": list_changed}});
        if self.flags.prompts {
            capabilities["prompts"] = json!({"listChanged": list_changed});
            capabilities["completions"] = json!({});
        }
        if self.flags.resources {
            capabilities["resources"] = json!({"listChanged": list_changed, "subscribe": true});
        }
        if self.flags.logging {
            capabilities["logging"] = json!({});
        }
        capabilities
    }

    fn list_tools(&self, params: &Value) -> Result<Value, Refusal> {
        let own = self.flags.own_restart.then_some(("restart_server", "{answer = false, code = 42}: exits"));
        let builtin = TOOLS.iter().copied().chain(own).map(
            |(name, description)| json!({"name": name, "description": description, "inputSchema": {"type": "object"}}),
        );
        let tools: Vec<Value> = builtin.chain(self.tools.iter().cloned()).collect();
        let size = self.flags.page.unwrap_or(tools.len());
        let start = match params.get("cursor") {
            None | Some(Value::Null) => 0,
            Some(cursor) => cursor
                .as_str()
                .and_then(|cursor| cursor.strip_prefix("from-")?.parse::<usize>().ok())
                .filter(|start| *start < tools.len())
                .ok_or_else(|| Refusal(-32602, "Invalid cursor".into(), None))?,
        };
        let end = tools.len().min(start + size);
        let mut result = json!({"tools": tools[start..end]});
        if end < tools.len() {
            result["nextCursor"] = format!("from-{end}").into();
        }
        Ok(result)
    }

    fn listen(&mut self, request: &Request) {
        let mut granted = serde_json::Map::new();
        let offered = [
            ("toolsListChanged", true),
            ("promptsListChanged", self.flags.prompts),
            ("resourcesListChanged", self.flags.resources),
            ("resourceSubscriptions", self.flags.resources),
        ];
        for (key, _) in offered.into_iter().filter(|(_, is_offered)| *is_offered) {
            match &request.params["notifications"][key] {
                Value::Null | Value::Bool(false) => {}
                asked => drop(granted.insert(key.into(), asked.clone())),
            }
        }
        let granted = Value::Object(granted);
        self.listens.insert(request.id.clone(), granted.clone());
        let params = json!({"notifications": granted});
        self.notify_listener(&request.id, "notifications/subscriptions/acknowledged", params);
    }

    fn call(&mut self, request: &Request, params: &str) -> Result<(), Refusal> {
        let params: CallParams =
            serde_json::from_str(params).map_err(|problem| Refusal(-32602, problem.to_string(), None))?;
        let raw = params.arguments.map_or("{}", RawValue::get);
        let extra = self.tools.iter().find(|tool| tool["name"] == params.name.as_str());
        let acts_as = match extra {
            Some(tool) => tool["_meta"]["puppet/as"].as_str().unwrap_or("echo").to_owned(),
            None => params.name,
        };
        if self.is_deaf {
            return Ok(());
        }
        let arguments: Value = serde_json::from_str(raw).expect("a raw value is JSON");
        if let (Some(ledger), Some(call)) = (&mut self.ledger, arguments["call"].as_u64()) {
            let line = format!("{call} {}\n", process::id());
            ledger.write_all(line.as_bytes()).expect("the ledger of a test can be written");
        }
        match self.act(request, &acts_as, &arguments, raw) {
            Outcome::Says(text) => self.answer_call(request, &text, false),
            Outcome::Fails(text) => self.answer_call(request, &text, true),
            Outcome::Later => {}
        }
        Ok(())
    }

    fn act(&mut self, request: &Request, tool: &str, arguments: &Value, raw: &str) -> Outcome {
        let text = |key: &str| arguments[key].as_str().unwrap_or_default().to_owned();
        let number = |key: &str, default: u64| arguments[key].as_u64().unwrap_or(default);
        let flag = |key: &str, default: bool| arguments[key].as_bool().unwrap_or(default);
        match tool {
            "echo" => match arguments.as_object() {
                Some(members) if members.len() == 1 && arguments["text"].is_string() => Outcome::Says(text("text")),
                _ => Outcome::Says(raw.into()),
            },
            "sleep" => {
                let at = Instant::now() + Duration::from_millis(number("ms", 0));
                self.timers.push(Timer { at, request: request.clone(), then: Then::Say("slept") });
                Outcome::Later
            }
            "crash" => {
                if let Some(once) = arguments["once"].as_str()
                    && File::create_new(once).is_err()
                {
                    return Outcome::Says("survived".into());
                }
                process::exit(number("code", 1) as i32)
            }
            "exit" => {
                let answer = match number("bytes", 0) {
                    0 => "exits".to_owned(),
                    bytes => "x".repeat(bytes as usize),
                };
                self.exit(request, flag("answer", true).then_some(&answer), number("code", 0))
            }
            "restart_server" if self.flags.own_restart => {
                self.exit(request, flag("answer", false).then_some("exits"), number("code", 42))
            }
            "signal_above" => {
                let Some(signal) = signal_of(&arguments["signal"]) else {
                    return Outcome::Fails("no such signal".into());
                };
                let monitor = nix::unistd::getppid();
                if flag("keeper", false)
                    && let Some(keeper) = parent_of(monitor)
                {
                    kill(keeper, signal).expect("the keeper is of the same user");
                }
                kill(monitor, signal).expect("the monitor is of the same user");
                Outcome::Later
            }
            "kill_self" => {
                let Some(signal) = signal_of(&arguments["signal"]) else {
                    return Outcome::Fails("no such signal".into());
                };
                raise(signal).expect("a process may signal itself");
                Outcome::Says(format!("survived {signal}"))
            }
            "pid" => Outcome::Says(process::id().to_string()),
            "generation" => Outcome::Says(env::var("OUTLAST_CHILD").unwrap_or_default()),
            "env" => match env::var(text("name")) {
                Ok(value) => Outcome::Says(value),
                Err(problem) => Outcome::Fails(problem.to_string()),
            },
            "use" => Outcome::Says(use_something(&text("how"), &text("path"), &number)),
            "stderr" => {
                eprintln!("{}", text("text"));
                Outcome::Says("said".into())
            }
            "garbage" => {
                self.write_line(&text("text"));
                Outcome::Says("said".into())
            }
            "answer_twice" => {
                self.answer_call(request, "once", false);
                Outcome::Says("once".into())
            }
            "big" => Outcome::Says("x".repeat(number("bytes", 0) as usize)),
            "log" => self.log_message(request, arguments["level"].as_str().unwrap_or("info"), &text("text")),
            "progress" => {
                self.progress(request.clone(), 1, number("steps", 1), Duration::from_millis(number("ms", 0)));
                Outcome::Later
            }
            "ask" => self.ask(request.clone(), &text("method"), &arguments["params"], flag("wait", true)),
            "grandchild" => {
                let traits = ["setsid", "ignore_term"].into_iter().filter(|name| flag(name, false));
                match start_grandchild(traits, flag("hold_stdout", false), flag("clear_env", false)) {
                    Ok(pid) => Outcome::Says(pid.to_string()),
                    Err(problem) => Outcome::Fails(problem.to_string()),
                }
            }
            "hang" => {
                self.input = Input::Ignored;
                if flag("answer", false) { Outcome::Says("hangs".into()) } else { Outcome::Later }
            }
            "deaf" => {
                self.is_deaf = true;
                Outcome::Says("deaf".into())
            }
            "close_stdout" => {
                self.stdout = None;
                nix::unistd::close(1).expect("stdout was open");
                Outcome::Later
            }
            "received" => Outcome::Says(json!(self.received).to_string()),
            "state" => {
                let listens: Vec<_> = self.listens.keys().collect();
                let phase = format!("{:?}", self.phase);
                let (level, subscribed) = (&self.log_level, &self.subscribed);
                let state = json!({"phase": phase, "level": level, "subscribed": subscribed, "listens": listens});
                Outcome::Says(state.to_string())
            }
            "set_tools" => match read_tools(Path::new(&text("file"))) {
                Ok(tools) => {
                    self.tools = tools;
                    Outcome::Says(format!("{} more tools", self.tools.len()))
                }
                Err(problem) => Outcome::Fails(problem.to_string()),
            },
            "announce" => self.announce(&text("what")),
            "touch" => self.touch(&text("uri")),
            "use_up_processes" => {
                let mut sleeping = Command::new("sleep");
                sleeping.arg(GRANDCHILD_LIFE_MAX.as_secs().to_string());
                sleeping.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
                while let Ok(child) = sleeping.spawn() {
                    self.sleeping.push(child);
                }
                Outcome::Says(self.sleeping.len().to_string())
            }
            "free_processes" => {
                for mut child in self.sleeping.drain(..) {
                    let _ = child.kill().and_then(|()| child.wait());
                }
                Outcome::Says("freed".into())
            }
            unknown => Outcome::Fails(format!("Unknown tool: {unknown}")),
        }
    }

    fn exit(&mut self, request: &Request, answer: Option<&str>, code: u64) -> ! {
        if let Some(text) = answer {
            self.answer_call(request, text, false);
        }
        process::exit(code as i32)
    }

    fn log_message(&mut self, request: &Request, level: &str, text: &str) -> Outcome {
        let rank = |level: &str| LEVELS.iter().position(|known| *known == level);
        let Some(rank_said) = rank(level) else { return Outcome::Fails(format!("no level `{level}`")) };
        let wanted = match self.phase {
            // The level is in each request; without one nothing is logged.
            Phase::Modern => request.meta(META_LOG_LEVEL).and_then(Value::as_str).and_then(rank),
            _ => self.log_level.as_deref().map_or(Some(0), rank),
        };
        if wanted.is_none_or(|wanted| rank_said < wanted) {
            return Outcome::Says("below the level".into());
        }
        self.notify("notifications/message", json!({"level": level, "logger": "puppet", "data": text}));
        Outcome::Says("logged".into())
    }

    /// The puppet's ids start at 0 in each process, as those of common servers do, so that generations collide.
    fn ask(&mut self, request: Request, method: &str, params: &Value, waits: bool) -> Outcome {
        let id = self.next_ask;
        self.next_ask += 1;
        let mut question = json!({"jsonrpc": "2.0", "id": id, "method": method});
        if !params.is_null() {
            question["params"] = params.clone();
        }
        self.write_line(&question.to_string());
        if !waits {
            return Outcome::Says(format!("asked {id}"));
        }
        self.asked.insert(id, request);
        Outcome::Later
    }

    fn announce(&mut self, what: &str) -> Outcome {
        if !["tools", "prompts", "resources"].contains(&what) {
            return Outcome::Fails(format!("no list of {what}"));
        }
        let method = format!("notifications/{what}/list_changed");
        if self.phase != Phase::Modern {
            self.write_line(&json!({"jsonrpc": "2.0", "method": method}).to_string());
            return Outcome::Says("announced".into());
        }
        let key = format!("{what}ListChanged");
        let listeners: Vec<String> =
            self.listens.iter().filter(|(_, granted)| granted[&key] == true).map(|(id, _)| id.clone()).collect();
        for id in &listeners {
            self.notify_listener(id, &method, json!({}));
        }
        Outcome::Says(format!("announced to {}", listeners.len()))
    }

    fn touch(&mut self, uri: &str) -> Outcome {
        let method = "notifications/resources/updated";
        if self.phase != Phase::Modern {
            let is_subscribed = self.subscribed.contains(uri);
            if is_subscribed {
                self.notify(method, json!({"uri": uri}));
            }
            return Outcome::Says(format!("announced to {}", usize::from(is_subscribed)));
        }
        let names = |granted: &Value| {
            granted["resourceSubscriptions"].as_array().is_some_and(|uris| uris.iter().any(|known| known == uri))
        };
        let listeners: Vec<String> =
            self.listens.iter().filter(|(_, granted)| names(granted)).map(|(id, _)| id.clone()).collect();
        for id in &listeners {
            self.notify_listener(id, method, json!({"uri": uri}));
        }
        Outcome::Says(format!("announced to {}", listeners.len()))
    }

    fn answer_call(&mut self, request: &Request, text: &str, is_error: bool) {
        self.answer(request, json!({"content": [{"type": "text", "text": text}], "isError": is_error}));
    }

    fn answer(&mut self, request: &Request, mut result: Value) {
        if self.phase == Phase::Modern {
            result["resultType"] = "complete".into();
            result["_meta"] = json!({META_SERVER: server_info()});
        }
        self.write_line(&format!(r#"{{"jsonrpc":"2.0","id":{},"result":{result}}}"#, request.id));
    }

    fn notify(&mut self, method: &str, params: Value) {
        self.write_line(&json!({"jsonrpc": "2.0", "method": method, "params": params}).to_string());
    }

    fn notify_listener(&mut self, id: &str, method: &str, mut params: Value) {
        let id: Value = serde_json::from_str(id).expect("an id is JSON");
        params["_meta"] = json!({META_SUBSCRIPTION: id});
        self.notify(method, params);
    }

    /// One line, one write. The end of stdin shows that the client has gone, so errors are ignored.
    fn write_line(&mut self, line: &str) {
        if let Some(stdout) = &mut self.stdout {
            let _ = stdout.write_all(format!("{line}\n").as_bytes());
        }
    }
}

fn signal_of(argument: &Value) -> Option<Signal> {
    match argument {
        Value::String(name) => name.parse().ok(),
        number => number.as_i64().and_then(|number| Signal::try_from(number as i32).ok()),
    }
}

fn parent_of(pid: Pid) -> Option<Pid> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    line.trim().parse().ok().map(Pid::from_raw)
}

fn server_info() -> Value {
    json!({"name": "puppet", "version": env!("CARGO_PKG_VERSION")})
}

fn read_tools(path: &Path) -> io::Result<Vec<Value>> {
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

fn start_grandchild(
    traits: impl Iterator<Item = &'static str>,
    holds_stdout: bool,
    clears_env: bool,
) -> io::Result<u32> {
    let mut command = Command::new(env::current_exe()?);
    if clears_env {
        command.env_clear();
    }
    let mut child = command
        .arg(GRANDCHILD)
        .args(traits)
        .stdin(Stdio::null())
        .stdout(if holds_stdout { Stdio::inherit() } else { Stdio::null() })
        .stderr(Stdio::piped())
        .spawn()?;
    let mut word = [0; 6];
    child.stderr.take().expect("stderr is piped").read_exact(&mut word)?;
    Ok(child.id())
}

/// Uses a file, a TCP port or a process, which a sandbox may forbid.
fn use_something(how: &str, path: &str, number: &dyn Fn(&str, u64) -> u64) -> String {
    let port = || u16::try_from(number("port", 0)).expect("a port");
    let used = match how {
        "read" => File::open(path).and_then(|mut file| file.read(&mut [0])).map(drop),
        "stat" => fs::metadata(path).map(drop),
        "list" => fs::read_dir(path).map(drop),
        "write" => fs::write(path, "written"),
        "truncate" => nix::unistd::truncate(path, 0).map_err(io::Error::from),
        "run" => match Command::new("cat").arg(path).stdin(Stdio::null()).output() {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
            Err(error) => Err(error),
        },
        "connect" => std::net::TcpStream::connect(("127.0.0.1", port())).map(drop),
        "bind" => std::net::TcpListener::bind(("127.0.0.1", port())).map(drop),
        "udp" => std::net::UdpSocket::bind(("127.0.0.1", 0))
            .and_then(|socket| socket.send_to(b"text", ("127.0.0.1", port())))
            .map(drop),
        "unix" => std::os::unix::net::UnixStream::connect(path).map(drop),
        "signal" => {
            let pid = i32::try_from(number("pid", 0)).expect("a process id");
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), None).map_err(io::Error::from)
        }
        other => Err(io::Error::other(format!("{other} is not known"))),
    };
    match used {
        Ok(()) => "ok".to_owned(),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => "denied".to_owned(),
        Err(error) => error.to_string(),
    }
}
