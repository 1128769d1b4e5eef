//! What happens in the demo, and what the client saw of it. It decides; it has no clock, pipe or process.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use outlast_core::mcp::{method, notification, revision};
use serde_json::{Value, json};

/// The time between two calls.
const RHYTHM: Duration = Duration::from_millis(40);
/// How long each scene is shown.
const CALM: Duration = Duration::from_millis(2000);
const SCENE: Duration = Duration::from_millis(2400);
/// The time between the start of a long call and the event during it.
const LEAD: Duration = Duration::from_millis(300);
/// A server that was ready this long is restarted at once (the rule is 5 s; the rest is a margin).
const PROVEN: Duration = Duration::from_millis(5200);
/// The first call after the kill: late enough for outlast to know of the exit, so that the call waits for the restart.
const PROBE: Duration = Duration::from_millis(3);
/// How long the kill waits for a moment between two calls.
const CLEAR_MAX: Duration = Duration::from_millis(200);
/// How long answers may take at the end; then a call without one is lost.
const SETTLE_MAX: Duration = Duration::from_secs(5);
/// The whole story. Scenes that were not reached by then have failed.
const STORY_MAX: Duration = Duration::from_secs(40);

/// The tools that outlast adds to those of the server.
const OURS: [&str; 3] = ["restart_server", "verify_server_restarted", "server_status"];

/// The server's code at first.
pub(super) const FIRST: &str = r#"{
  "version": 1,
  "tools": [
    {"name": "price", "description": "A price"},
    {"name": "report", "description": "A long report", "takes_ms": 900}
  ]
}
"#;

/// With one more tool, and a longer description.
pub(super) const CHANGED: &str = r#"{
  "version": 2,
  "tools": [
    {"name": "price", "description": "A price in euros"},
    {"name": "discount", "description": "A lower price"},
    {"name": "report", "description": "A long report", "takes_ms": 900}
  ]
}
"#;

/// With a syntax error, as saved in the middle of an edit.
pub(super) const BROKEN: &str = r#"{
  "version": 3,
  "tools": [
    {"name": "price" "description": "A price in euros"}
  ]
}
"#;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Event {
    /// A line from outlast, and when it was read.
    Heard {
        line: String,
        at: Instant,
    },
    /// Outlast's stdout ended.
    Ended,
    /// The server could not be killed, or its file could not be written.
    CouldNot(String),
    TimePassed,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Action {
    /// To outlast, as one line.
    Say(String),
    /// Replace the server's code.
    Load(&'static str),
    /// Kill this process.
    Kill(u32),
}

/// One client's story, from its handshake to its last call.
#[derive(Debug)]
pub(super) struct Story {
    began: Instant,
    /// The process id of outlast.
    pub pid: u32,
    step: Step,
    actions: Vec<Action>,
    next_id: u64,
    next_call: Option<Instant>,
    /// Open requests that are not calls of the server's tools.
    asked: BTreeMap<u64, Ask>,
    /// Open calls: the index of the scene, and the index of the call in it.
    open: BTreeMap<u64, (usize, usize)>,
    relist_heard: bool,
    ready_at: Instant,
    long_call: Option<u64>,
    killed: Option<(u32, Instant)>,

    pub scenes: Vec<Scene>,
    /// Every server that the client knows of, in order.
    pub servers: Vec<Server>,
    /// From outlast's status, at the end.
    pub restarts: Option<u64>,
    /// Promises that were broken.
    pub complaints: Vec<String>,
}

/// An event, and the calls from its start to the start of the next one.
#[derive(Debug)]
pub(super) struct Scene {
    pub title: &'static str,
    pub at: Duration,
    pub calls: Vec<Call>,
    /// How many of its calls were started before the event.
    pub mark: Option<usize>,
    /// From the server's exit to the next answer.
    pub outage: Option<Duration>,
    /// New servers that took over.
    pub restarts: u64,
    pub notes: Vec<Note>,
}

#[derive(Debug, Clone)]
pub(super) struct Call {
    pub asked: Instant,
    /// It is slow by design, so its wait is not a pause.
    pub is_long: bool,
    pub outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Outcome {
    Waiting,
    Answered {
        wait: Duration,
        pid: u32,
    },
    /// An answer with an error.
    Failed {
        wait: Duration,
        words: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Note {
    pub mood: Mood,
    pub text: String,
    pub at: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mood {
    Plain,
    Good,
    /// The text of an expected failure.
    Quote,
    Bad,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Server {
    /// Outlast names it only once it is ready.
    pub generation: Option<u64>,
    pub pid: Option<u32>,
    pub fate: Fate,
    pub since: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Serving,
    Replaced,
    NeverCameUp,
    Killed,
}

/// A scene, or the whole story, in numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub made: usize,
    pub answered: usize,
    pub failed: usize,
    pub waiting: usize,
    /// New servers that took over.
    pub restarts: u64,
    /// The longest wait of a call, without long calls, or the longest time in which no call could be answered.
    pub pause: Duration,
}

/// A request that is not a call of the server's tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ask {
    Handshake,
    Tools,
    Status,
    Restart,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Greeting,
    Calm {
        until: Instant,
    },
    BeforeReload {
        until: Instant,
    },
    Reloading,
    Reloaded {
        until: Instant,
    },
    Breaking,
    Broken {
        until: Instant,
    },
    /// Once the pid is known, the server is killed at the next moment without a short call in flight.
    BeforeKill {
        until: Instant,
        pid: Option<u32>,
    },
    Killed {
        until: Instant,
    },
    Settling {
        until: Instant,
    },
    LastLook,
    Over,
}

impl Story {
    /// With the process id of outlast, for the texts.
    pub(super) fn new(pid: u32, now: Instant) -> Story {
        let mut story = Story {
            began: now,
            pid,
            step: Step::Greeting,
            actions: Vec::new(),
            next_id: 0,
            next_call: None,
            asked: BTreeMap::new(),
            open: BTreeMap::new(),
            relist_heard: false,
            ready_at: now,
            long_call: None,
            killed: None,
            scenes: Vec::new(),
            servers: Vec::new(),
            restarts: None,
            complaints: Vec::new(),
        };
        let hello = json!({
            "protocolVersion": revision::NEWEST_HANDSHAKE,
            "capabilities": {},
            "clientInfo": {"name": "outlast demo", "version": env!("CARGO_PKG_VERSION")},
        });
        story.ask(Ask::Handshake, method::INITIALIZE, &hello);
        story
    }

    /// The actions at the start.
    pub(super) fn begin(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    pub(super) fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            _ if self.is_over() => {}
            Event::Heard { line, at } => self.heard(&line, at),
            Event::Ended => self.fail("outlast ended the connection".into(), now),
            Event::CouldNot(what) => self.fail(what, now),
            Event::TimePassed => {}
        }
        self.go_on(now);
        std::mem::take(&mut self.actions)
    }

    /// When to call with the time next.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let step = match self.step {
            Step::Over => return None,
            Step::Calm { until }
            | Step::BeforeReload { until }
            | Step::Reloaded { until }
            | Step::Broken { until }
            | Step::Killed { until }
            | Step::Settling { until } => Some(until),
            Step::BeforeKill { until, pid: Some(_) } => Some(self.kill_at(until)),
            Step::Greeting | Step::Reloading | Step::Breaking | Step::BeforeKill { .. } | Step::LastLook => None,
        };
        [step, self.next_call].into_iter().flatten().chain([self.began + STORY_MAX]).min()
    }

    pub(super) fn is_over(&self) -> bool {
        self.step == Step::Over
    }

    pub(super) fn elapsed(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.began)
    }

    pub(super) fn sum(&self) -> Sum {
        self.scenes.iter().map(Scene::sum).fold(Sum::default(), |all, one| Sum {
            made: all.made + one.made,
            answered: all.answered + one.answered,
            failed: all.failed + one.failed,
            waiting: all.waiting + one.waiting,
            restarts: all.restarts + one.restarts,
            pause: all.pause.max(one.pause),
        })
    }

    /// The current server, as far as the client knows.
    pub(super) fn serving(&self) -> Option<&Server> {
        self.servers.iter().rev().find(|server| server.fate == Fate::Serving)
    }

    /// The index of a server.
    pub(super) fn place(&self, pid: u32) -> usize {
        self.servers.iter().position(|server| server.pid == Some(pid)).unwrap_or_default()
    }

    fn go_on(&mut self, now: Instant) {
        if self.is_over() {
            return;
        }
        if self.began + STORY_MAX <= now {
            let waits: Vec<String> = self.asked.values().map(|ask| ask.name().to_owned()).collect();
            let waits = if waits.is_empty() { "nothing".to_owned() } else { waits.join(", ") };
            return self.fail(format!("the demo took longer than {} s; unanswered: {waits}", STORY_MAX.as_secs()), now);
        }
        match self.step {
            Step::Calm { until } if until <= now => {
                self.scene("reload, a tool changed", now);
                self.long_call(now);
                self.step = Step::BeforeReload { until: now + LEAD };
            }
            Step::BeforeReload { until } if until <= now => {
                self.mark();
                self.actions.push(Action::Load(CHANGED));
                self.ask_tool(Ask::Restart, "restart_server", &json!({"reason": "a tool was added"}));
                self.step = Step::Reloading;
            }
            Step::Reloaded { until } if until <= now => {
                self.check_reload(now);
                self.scene("reload, broken code", now);
                self.mark();
                self.actions.push(Action::Load(BROKEN));
                self.ask_tool(Ask::Restart, "restart_server", &json!({"reason": "unfinished code"}));
                self.step = Step::Breaking;
            }
            Step::Broken { until } if until <= now => {
                self.scene("kill -9", now);
                self.long_call(now);
                self.ask_tool(Ask::Status, "server_status", &json!({}));
                self.step = Step::BeforeKill { until: now + LEAD, pid: None };
            }
            Step::BeforeKill { until, pid: Some(pid) } if self.kill_at(until) <= now => {
                self.mark();
                self.actions.push(Action::Kill(pid));
                self.killed = Some((pid, now));
                self.end_life(pid, Fate::Killed);
                self.note(Mood::Plain, format!("pid {pid} was killed with SIGKILL"), now);
                self.next_call = Some(now + PROBE);
                self.step = Step::Killed { until: now + SCENE };
            }
            Step::Killed { until } if until <= now => {
                self.next_call = None;
                self.step = Step::Settling { until: now + SETTLE_MAX };
            }
            _ => {}
        }
        if let Step::Settling { until } = self.step
            && (self.open.is_empty() || until <= now)
        {
            self.ask_tool(Ask::Status, "server_status", &json!({}));
            self.step = Step::LastLook;
        }
        if self.next_call.is_some_and(|at| at <= now) {
            self.call("price", now);
            self.next_call = Some(now + RHYTHM);
        }
    }

    fn heard(&mut self, line: &str, at: Instant) {
        let Ok(message) = serde_json::from_str::<Value>(line) else {
            return self.fail(format!("outlast sent a line that is not JSON: {line}"), at);
        };
        if message["method"] == notification::TOOLS_CHANGED {
            // Outlast also announces this when the first list differs from the one it served before; only the demo's
            // change matters.
            if matches!(self.step, Step::Reloading | Step::Reloaded { .. }) && !self.relist_heard {
                self.relist_heard = true;
                self.ask(Ask::Tools, method::TOOLS_LIST, &json!({}));
            }
            return;
        }
        let Some(id) = message["id"].as_u64() else { return };
        if let Some((scene, call)) = self.open.remove(&id) {
            return self.call_answered(id, scene, call, &message, at);
        }
        let Some(ask) = self.asked.remove(&id) else {
            return self.fail(format!("an answer came twice, or without a request: {line}"), at);
        };
        let result = &message["result"];
        match ask {
            _ if message.get("error").is_some() => {
                self.fail(format!("`{}` was refused: {}", ask.name(), words_of(&message)), at);
            }
            Ask::Handshake => {
                self.actions
                    .push(Action::Say(json!({"jsonrpc": "2.0", "method": notification::INITIALIZED}).to_string()));
                self.ask(Ask::Tools, method::TOOLS_LIST, &json!({}));
            }
            Ask::Tools if self.step == Step::Greeting => {
                self.ask_tool(Ask::Status, "server_status", &json!({}));
            }
            Ask::Tools => {
                let names: Vec<&str> =
                    result["tools"].as_array().into_iter().flatten().filter_map(|t| t["name"].as_str()).collect();
                let own = names.iter().filter(|name| !OURS.contains(name)).copied();
                let own = own.collect::<Vec<_>>().join(", ");
                self.note(Mood::Good, format!("the client got list_changed and listed the tools: {own}"), at);
            }
            Ask::Status => self.status_known(&result["structuredContent"], at),
            Ask::Restart => self.restart_answered(&message, at),
        }
    }

    fn status_known(&mut self, status: &Value, at: Instant) {
        let pid = pid_in(&status["pid"]);
        if let Some(pid) = pid {
            self.meet(pid, status["generation"].as_u64(), at);
        }
        match (self.step, pid) {
            (Step::Greeting, Some(pid)) => {
                self.scene("calls flow", at);
                let rhythm = RHYTHM.as_millis();
                self.note(
                    Mood::Plain,
                    format!("a call every {rhythm} ms, through outlast, to a server with pid {pid}"),
                    at,
                );
                self.next_call = Some(at);
                self.step = Step::Calm { until: at + CALM };
            }
            (Step::BeforeKill { until, .. }, Some(_)) => self.step = Step::BeforeKill { until, pid },
            (Step::LastLook, _) => {
                self.restarts = status["restarts"].as_u64();
                self.check_end(at);
                self.step = Step::Over;
            }
            (Step::Killed { .. } | Step::Settling { .. }, _) => {}
            (_, None) => self.fail(format!("no server is up: {status}"), at),
            _ => {}
        }
    }

    fn restart_answered(&mut self, message: &Value, at: Instant) {
        let result = &message["result"];
        let report = &result["structuredContent"];
        let is_error = result["isError"] == true;
        match self.step {
            Step::Reloading if is_error => self.fail(format!("the reload failed: {}", words_of(message)), at),
            Step::Reloading => {
                let (old, new) = (pid_in(&report["old_pid"]), pid_in(&report["new_pid"]));
                let (Some(old), Some(new)) = (old, new) else {
                    return self.fail(format!("the reload named no process: {report}"), at);
                };
                self.end_life(old, Fate::Replaced);
                self.meet(new, report["generation"].as_u64(), at);
                let took = report["took_ms"].as_u64().unwrap_or_default();
                let tools = ["added", "changed", "removed"].map(|kind| {
                    let names = report["tools"][kind].as_array().into_iter().flatten().filter_map(Value::as_str);
                    let names = names.collect::<Vec<_>>().join(", ");
                    if names.is_empty() { String::new() } else { format!(", {names} {kind}") }
                });
                let words = format!("`restart_server`: pid {old} → {new} in {took} ms{}", tools.concat());
                self.note(Mood::Good, words, at);
                self.ready_at = at;
                self.step = Step::Reloaded { until: at + SCENE };
            }
            Step::Breaking if is_error => {
                self.servers.push(Server { generation: None, pid: None, fate: Fate::NeverCameUp, since: at });
                let words = report["error"].as_str().map_or_else(|| words_of(message), str::to_owned);
                self.note(Mood::Quote, format!("“{words}”"), at);
                let stderr = report["stderr_tail"].as_str().unwrap_or_default();
                let words = match stderr.lines().next() {
                    Some(first) => {
                        let place = stderr.lines().nth(1).unwrap_or_default().trim().trim_start_matches("--> ");
                        format!("the error quotes its stderr: {first} ({place})")
                    }
                    None => "the error does not quote its stderr".to_owned(),
                };
                self.note(Mood::Quote, words, at);
                let serving = pid_in(&report["serving_pid"]);
                if serving.is_none() || serving != self.serving().and_then(|server| server.pid) {
                    self.complain("the old server does not keep serving".into(), at);
                }
                // Otherwise the next crash would load it.
                self.actions.push(Action::Load(CHANGED));
                self.note(Mood::Plain, "the code is fixed before the next start".into(), at);
                // Long enough to read, and for the current server to count as stable.
                self.step = Step::Broken { until: (at + SCENE).max(self.ready_at + PROVEN - LEAD) };
            }
            Step::Breaking => self.fail(format!("broken code was reloaded: {report}"), at),
            _ => {}
        }
    }

    fn call_answered(&mut self, id: u64, scene: usize, call: usize, message: &Value, at: Instant) {
        let result = &message["result"];
        let asked = self.scenes[scene].calls[call].asked;
        let wait = at.saturating_duration_since(asked);
        let is_long = self.scenes[scene].calls[call].is_long;
        let done = &result["structuredContent"];
        let pid = pid_in(&done["pid"]).filter(|_| result["isError"] != true && done["n"].as_u64() == Some(id));
        let outcome = match pid {
            Some(pid) => Outcome::Answered { wait, pid },
            None => Outcome::Failed { wait, words: words_of(message) },
        };
        self.scenes[scene].calls[call].outcome = outcome.clone();

        match outcome {
            Outcome::Answered { pid, .. } => {
                let is_new = !self.servers.iter().any(|server| server.pid == Some(pid));
                if is_new && let Some((killed, when)) = self.killed {
                    self.meet(pid, None, at);
                    let outage = at.saturating_duration_since(when);
                    self.scenes[scene].outage = Some(outage);
                    let pause = millis(outage);
                    let words = format!("{pause} after the kill of {killed}, the next call was answered by pid {pid}");
                    self.note(Mood::Good, words, at);
                    // The generation of the new server.
                    self.ask_tool(Ask::Status, "server_status", &json!({}));
                }
                if is_long && self.long_call == Some(id) {
                    let was_replaced = self.servers.iter().any(|s| s.pid == Some(pid) && s.fate == Fate::Replaced);
                    let who = if was_replaced { "the old server" } else { "the server" };
                    self.note(Mood::Good, format!("the long call from before was answered by {who}, pid {pid}"), at);
                }
            }
            Outcome::Failed { words, .. } => {
                let is_honest = result["_meta"]["outlast/failure"]["outcome"] == "unknown" && self.killed.is_some();
                let first = words.lines().next().unwrap_or_default().to_owned();
                if is_honest {
                    let which = if is_long { "the long call in flight" } else { "a call in flight" };
                    self.note(Mood::Quote, format!("{which} got the answer “{first}”"), at);
                } else {
                    self.complain(format!("a call failed: {first}"), at);
                }
            }
            Outcome::Waiting => {}
        }
    }

    fn check_reload(&mut self, now: Instant) {
        if !self.relist_heard {
            self.complain("the tools changed and the client got no list_changed".into(), now);
        }
        if self.long_call.is_some_and(|id| self.open.contains_key(&id)) {
            self.complain("the long call from before the reload is not answered yet".into(), now);
        }
    }

    fn check_end(&mut self, now: Instant) {
        let sum = self.sum();
        if sum.waiting > 0 {
            self.complain(never_answered(sum.waiting), now);
        }
        if self.restarts != Some(2) {
            let counted = self.restarts.map_or("none".to_owned(), |restarts| restarts.to_string());
            self.complain(format!("a reload and a kill are 2 restarts; outlast counted {counted}"), now);
        }
        let after = self.killed.map(|(_, when)| when);
        let last = self.scenes.last().into_iter().flat_map(|scene| &scene.calls);
        let came_back = last
            .filter(|call| after.is_some_and(|when| when < call.asked))
            .any(|call| matches!(call.outcome, Outcome::Answered { .. }));
        if !came_back {
            self.complain("no call was answered after the kill".into(), now);
        }
    }

    fn scene(&mut self, title: &'static str, now: Instant) {
        self.scenes.push(Scene {
            title,
            at: self.elapsed(now),
            calls: Vec::new(),
            mark: None,
            outage: None,
            restarts: 0,
            notes: Vec::new(),
        });
    }

    /// The event of this scene happens now.
    fn mark(&mut self) {
        if let Some(scene) = self.scenes.last_mut() {
            scene.mark = Some(scene.calls.len());
        }
    }

    fn note(&mut self, mood: Mood, text: String, now: Instant) {
        let at = self.elapsed(now);
        if let Some(scene) = self.scenes.last_mut() {
            scene.notes.push(Note { mood, text, at });
        }
    }

    fn complain(&mut self, what: String, now: Instant) {
        self.note(Mood::Bad, what.clone(), now);
        self.complaints.push(what);
    }

    /// The story cannot continue.
    fn fail(&mut self, what: String, now: Instant) {
        self.complain(what, now);
        let waiting = self.sum().waiting;
        if waiting > 0 {
            self.complain(never_answered(waiting), now);
        }
        self.next_call = None;
        self.step = Step::Over;
    }

    fn meet(&mut self, pid: u32, generation: Option<u64>, now: Instant) {
        match self.servers.iter_mut().find(|server| server.pid == Some(pid)) {
            Some(server) => server.generation = server.generation.or(generation),
            None => {
                self.servers.push(Server { generation, pid: Some(pid), fate: Fate::Serving, since: now });
                if let Some(scene) = self.scenes.last_mut() {
                    scene.restarts += 1;
                }
            }
        }
    }

    fn end_life(&mut self, pid: u32, fate: Fate) {
        if let Some(server) = self.servers.iter_mut().find(|server| server.pid == Some(pid)) {
            server.fate = fate;
        }
    }

    /// The server is killed between two short calls, so that only the long one is in flight; a call without an answer
    /// delays this only up to a limit.
    fn kill_at(&self, earliest: Instant) -> Instant {
        let is_short = |&(scene, call): &(usize, usize)| !self.scenes[scene].calls[call].is_long;
        if self.open.values().any(is_short) { earliest + CLEAR_MAX } else { earliest }
    }

    fn long_call(&mut self, now: Instant) {
        self.long_call = Some(self.call("report", now));
    }

    fn call(&mut self, tool: &str, now: Instant) -> u64 {
        let id = self.say(method::TOOLS_CALL, &|id| json!({"name": tool, "arguments": {"n": id}}));
        let at = self.scenes.len() - 1;
        let calls = &mut self.scenes[at].calls;
        calls.push(Call { asked: now, is_long: tool == "report", outcome: Outcome::Waiting });
        self.open.insert(id, (at, calls.len() - 1));
        id
    }

    fn ask_tool(&mut self, ask: Ask, tool: &str, arguments: &Value) {
        self.ask(ask, method::TOOLS_CALL, &json!({"name": tool, "arguments": arguments}));
    }

    fn ask(&mut self, ask: Ask, method: &str, params: &Value) {
        let id = self.say(method, &|_| params.clone());
        self.asked.insert(id, ask);
    }

    fn say(&mut self, method: &str, params: &dyn Fn(u64) -> Value) -> u64 {
        self.next_id += 1;
        let id = self.next_id;
        let message = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params(id)});
        self.actions.push(Action::Say(message.to_string()));
        id
    }
}

impl Scene {
    pub(super) fn sum(&self) -> Sum {
        let pause = self.outage.unwrap_or_default();
        let mut sum = Sum { made: self.calls.len(), restarts: self.restarts, pause, ..Sum::default() };
        for call in &self.calls {
            let wait = match call.outcome {
                Outcome::Waiting => {
                    sum.waiting += 1;
                    continue;
                }
                Outcome::Answered { wait, .. } => {
                    sum.answered += 1;
                    wait
                }
                Outcome::Failed { wait, .. } => {
                    sum.failed += 1;
                    wait
                }
            };
            if !call.is_long {
                sum.pause = sum.pause.max(wait);
            }
        }
        sum
    }
}

impl Ask {
    fn name(self) -> &'static str {
        match self {
            Ask::Handshake => method::INITIALIZE,
            Ask::Tools => method::TOOLS_LIST,
            Ask::Status => "server_status",
            Ask::Restart => "restart_server",
        }
    }
}

/// A time for comparison, with a decimal only for small values.
pub(super) fn millis(time: Duration) -> String {
    let millis = time.as_secs_f64() * 1000.0;
    if millis < 10.0 { format!("{millis:.1} ms") } else { format!("{millis:.0} ms") }
}

fn never_answered(calls: usize) -> String {
    if calls == 1 { "1 call was never answered".to_owned() } else { format!("{calls} calls were never answered") }
}

/// The text of an unexpected answer.
fn words_of(message: &Value) -> String {
    let text = &message["result"]["content"][0]["text"];
    let words = text.as_str().or_else(|| message["error"]["message"].as_str());
    words.map_or_else(|| message.to_string(), str::to_owned)
}

fn pid_in(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|pid| u32::try_from(pid).ok())
}

#[cfg(test)]
pub(super) mod rehearsal {
    //! The story with a stand-in for outlast, and with simulated time.

    use super::*;

    /// How the stand-in differs from outlast.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Flaw {
        None,
        /// The tenth call is never answered.
        LosesACall,
        /// A reload is not announced.
        KeepsTheListToItself,
        /// It exits when broken code is loaded.
        Ends,
        /// After the kill no server is started.
        StaysDown,
    }

    /// The finished story, and the time of its end.
    pub(crate) fn play(flaw: Flaw) -> (Story, Instant) {
        let mut now = Instant::now();
        let mut story = Story::new(100, now);
        let mut actions = story.begin();
        let mut outlast = StandIn { flaw, code: FIRST, pid: 101, up_at: now, calls: 0, restarts: 0, due: Vec::new() };
        loop {
            for action in actions {
                outlast.act(action, now);
            }
            if story.is_over() {
                return (story, now);
            }
            let heard = outlast.due.iter().map(|(at, ..)| *at).min();
            now = [heard, story.deadline()].into_iter().flatten().min().expect("a story goes on until it is over");
            let event = match outlast.due.iter().position(|(at, ..)| *at <= now) {
                Some(first) => outlast.due.remove(first).1,
                None => Event::TimePassed,
            };
            let event = match event {
                Event::Heard { line, .. } => Event::Heard { line, at: now },
                event => event,
            };
            actions = story.handle(event, now);
        }
    }

    struct StandIn {
        flaw: Flaw,
        code: &'static str,
        pid: u32,
        up_at: Instant,
        calls: u32,
        restarts: u32,
        due: Vec<Due>,
    }

    /// Lines and their times; a call also has its id and its process.
    type Due = (Instant, Event, Option<(u64, u32)>);

    impl StandIn {
        fn act(&mut self, action: Action, now: Instant) {
            match action {
                Action::Load(code) => self.code = code,
                Action::Kill(pid) => self.kill(pid, now),
                Action::Say(line) => {
                    let message: Value = serde_json::from_str(&line).expect("the story speaks JSON");
                    if let Some(id) = message["id"].as_u64() {
                        self.asked(id, &message, now);
                    }
                }
            }
        }

        fn kill(&mut self, pid: u32, now: Instant) {
            assert_eq!(pid, self.pid, "the one that serves is killed");
            let running: Vec<_> = self.due.extract_if(.., |(_, _, on)| on.is_some_and(|(_, on)| on == pid)).collect();
            for (_, _, on) in running {
                let text = "The server ended (signal 9 (SIGKILL)) while `report` was running; it may or may not have \
                            taken effect.";
                let result = json!({"isError": true, "content": [{"type": "text", "text": text}],
                    "_meta": {"outlast/failure": {"outcome": "unknown"}}});
                let (id, _) = on.expect("only calls that run were taken");
                self.answer(id, result, now + Duration::from_millis(1));
            }
            self.pid += 2;
            self.restarts += 1;
            let down = if self.flaw == Flaw::StaysDown { STORY_MAX } else { Duration::from_millis(7) };
            self.up_at = now + down;
        }

        fn asked(&mut self, id: u64, message: &Value, now: Instant) {
            let soon = now + Duration::from_micros(400);
            let report = |done: Value, is_error: bool| json!({"structuredContent": done, "isError": is_error});
            match (message["method"].as_str(), message["params"]["name"].as_str()) {
                (Some(method::INITIALIZE), _) => self.answer(id, json!({}), soon),
                (Some(method::TOOLS_LIST), _) => {
                    let code: Value = serde_json::from_str(self.code).expect("only code that was taken is listed");
                    self.answer(id, json!({"tools": code["tools"]}), soon);
                }
                (_, Some("server_status")) => {
                    let status = json!({"pid": self.pid, "generation": self.pid - 100, "restarts": self.restarts});
                    self.answer(id, report(status, false), soon);
                }
                (_, Some("restart_server")) if self.code == BROKEN && self.flaw == Flaw::Ends => {
                    self.due.push((soon, Event::Ended, None));
                }
                (_, Some("restart_server")) if self.code == BROKEN => {
                    let stderr = "error: expected `,` or `}`\n  --> server.json:4:22\n   | …";
                    let error = "The restart failed: the new server ended before it was ready (exit code 1). The old \
                                 server (pid 102) keeps serving.";
                    let done = json!({"error": error, "serving_pid": self.pid, "stderr_tail": stderr});
                    self.answer(id, report(done, true), now + Duration::from_millis(5));
                }
                (_, Some("restart_server")) => {
                    self.pid += 1;
                    self.restarts += 1;
                    let tools = json!({"added": ["discount"], "changed": ["price"], "removed": []});
                    let done = json!({"old_pid": 101, "new_pid": 102, "generation": 2, "took_ms": 5, "tools": tools});
                    self.answer(id, report(done, false), now + Duration::from_millis(5));
                    if self.flaw != Flaw::KeepsTheListToItself {
                        let line = json!({"jsonrpc": "2.0", "method": notification::TOOLS_CHANGED}).to_string();
                        self.due.push((now + Duration::from_millis(5), Event::Heard { line, at: now }, None));
                    }
                }
                (_, Some(tool)) => {
                    self.calls += 1;
                    if self.calls == 10 && self.flaw == Flaw::LosesACall {
                        return;
                    }
                    let takes = Duration::from_millis(if tool == "report" { 900 } else { 0 });
                    let done = report(json!({"n": id, "pid": self.pid}), false);
                    self.answer(id, done, soon.max(self.up_at) + takes);
                    if let Some((_, _, on)) = self.due.last_mut() {
                        *on = Some((id, self.pid));
                    }
                }
                other => panic!("the story asked for {other:?}"),
            }
        }

        fn answer(&mut self, id: u64, result: Value, at: Instant) {
            let line = json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string();
            self.due.push((at, Event::Heard { line, at }, None));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        rehearsal::{Flaw, play},
        *,
    };

    #[test]
    fn a_run_without_faults() {
        let (story, end) = play(Flaw::None);
        assert_eq!(story.complaints, Vec::<String>::new());
        let sum = story.sum();
        assert_eq!((sum.failed, sum.waiting, sum.restarts, story.restarts), (1, 0, 2, Some(2)));
        assert_eq!(sum.made, sum.answered + sum.failed);
        assert_eq!(sum.pause, Duration::from_millis(7), "the kill cost its outage");
        assert!(story.elapsed(end) < Duration::from_secs(11), "{:?}", story.elapsed(end));
        let fates: Vec<Fate> = story.servers.iter().map(|server| server.fate).collect();
        assert_eq!(fates, [Fate::Replaced, Fate::Killed, Fate::NeverCameUp, Fate::Serving]);
    }

    #[test]
    fn the_server_is_killed_only_when_it_counts_as_stable() {
        let (story, _) = play(Flaw::None);
        let (_, killed) = story.killed.expect("there is a kill");
        assert!(PROVEN <= killed.duration_since(story.ready_at));
    }

    #[test]
    fn broken_promises_are_reported() {
        let table = [
            (Flaw::LosesACall, vec!["1 call was never answered"]),
            (Flaw::KeepsTheListToItself, vec!["the tools changed and the client got no list_changed"]),
            (Flaw::Ends, vec!["outlast ended the connection"]),
            (Flaw::StaysDown, vec!["60 calls were never answered", "no call was answered after the kill"]),
        ];
        for (flaw, complaints) in table {
            assert_eq!(play(flaw).0.complaints, complaints, "{flaw:?}");
        }
    }
}
