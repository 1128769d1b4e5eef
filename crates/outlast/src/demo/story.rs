//! What happens in the demo, and what the client saw of it. It decides; it has no clock, pipe or process.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

/// The time between two calls.
const RHYTHM: Duration = Duration::from_millis(40);
/// How long each scene is shown.
const CALM: Duration = Duration::from_millis(2000);
const SCENE: Duration = Duration::from_millis(2400);
/// The time between a long call's start and the event that meets it.
const LEAD: Duration = Duration::from_millis(300);
/// A server that was ready this long comes back at once (5 s is the rule; the rest is for what we cannot see of it).
const PROVEN: Duration = Duration::from_millis(5200);
/// The first call after the kill: late enough for outlast to know of the death, so that it runs into the pause.
const PROBE: Duration = Duration::from_millis(3);
/// How long answers may take at the end; a call without one then is lost.
const SETTLE_MAX: Duration = Duration::from_secs(5);
/// The whole story. Whatever is not reached by then has failed.
const STORY_MAX: Duration = Duration::from_secs(40);

/// The tools that outlast adds to a server's.
const OURS: [&str; 3] = ["restart_server", "verify_server_restarted", "server_status"];

/// The server's code at first.
pub const FIRST: &str = r#"{
  "version": 1,
  "tools": [
    {"name": "price", "description": "A price"},
    {"name": "report", "description": "A long report", "takes_ms": 900}
  ]
}
"#;

/// With a tool more, and one that says more about itself.
pub const CHANGED: &str = r#"{
  "version": 2,
  "tools": [
    {"name": "price", "description": "A price in euros"},
    {"name": "discount", "description": "A lower price"},
    {"name": "report", "description": "A long report", "takes_ms": 900}
  ]
}
"#;

/// As one saves it in the middle of a thought.
pub const BROKEN: &str = r#"{
  "version": 3,
  "tools": [
    {"name": "price" "description": "A price in euros"}
  ]
}
"#;

#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A line from outlast, and when it was read.
    Heard { line: String, at: Instant },
    /// Outlast's stdout ended.
    Ended,
    /// The server could not be killed, or its file not be written.
    CouldNot(String),
    TimePassed,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// To outlast, as one line.
    Say(String),
    /// Make this the server's code.
    Load(&'static str),
    /// End this process without a warning.
    Kill(u32),
}

/// One client's story, from its handshake to its last call.
#[derive(Debug)]
pub struct Story {
    began: Instant,
    step: Step,
    actions: Vec<Action>,
    next_id: u64,
    next_call: Option<Instant>,
    /// Requests that are no calls of the server's tools, until they are answered.
    asked: BTreeMap<u64, Ask>,
    /// The calls without an answer: in which scene, and the how manieth there.
    open: BTreeMap<u64, (usize, usize)>,
    relist_heard: bool,
    ready_at: Instant,
    long_call: Option<u64>,
    killed: Option<(u32, Instant)>,

    pub scenes: Vec<Scene>,
    /// Every server the client knows of, in the order of their lives.
    pub servers: Vec<Server>,
    /// As outlast counts them, at the end.
    pub restarts: Option<u64>,
    /// What went otherwise than promised.
    pub complaints: Vec<String>,
}

/// An event and the calls that were begun from its start to the next one's.
#[derive(Debug)]
pub struct Scene {
    pub title: &'static str,
    pub at: Duration,
    pub calls: Vec<Call>,
    pub notes: Vec<Note>,
}

#[derive(Debug, Clone)]
pub struct Call {
    pub asked: Instant,
    /// It takes its time by design, so its wait is no pause.
    pub is_long: bool,
    pub outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    Waiting,
    Answered { wait: Duration, pid: u32 },
    /// An answer that says what went wrong.
    Failed { wait: Duration, words: String },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    pub mood: Mood,
    pub text: String,
    pub at: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mood {
    Plain,
    Good,
    /// Words the client was given about something that failed, as it should.
    Quote,
    Bad,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Outlast names it only once it is ready.
    pub generation: Option<u64>,
    pub pid: Option<u32>,
    pub fate: Fate,
    pub since: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Serving,
    Replaced,
    NeverCameUp,
    Killed,
}

/// A scene, or the whole story, in numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sum {
    pub made: usize,
    pub answered: usize,
    pub failed: usize,
    pub waiting: usize,
    /// The longest that a call had to wait, long calls aside.
    pub pause: Duration,
}

/// A request that is no call of the server's tools.
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
    Calm { until: Instant },
    BeforeReload { until: Instant },
    Reloading,
    Reloaded { until: Instant },
    Breaking,
    Broken { until: Instant },
    /// The pid is known, and the next moment without a short call in flight is the server's last.
    BeforeKill { until: Instant, pid: Option<u32> },
    Killed { until: Instant },
    Settling { until: Instant },
    LastLook,
    Over,
}

impl Story {
    pub fn new(now: Instant) -> Story {
        let mut story = Story {
            began: now,
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
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "outlast demo", "version": env!("CARGO_PKG_VERSION")},
        });
        story.ask(Ask::Handshake, "initialize", &hello);
        story
    }

    /// What is to be done before anything happened.
    pub fn begin(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
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

    /// When it next wants to hear that time passed.
    pub fn deadline(&self) -> Option<Instant> {
        let step = match self.step {
            Step::Over => return None,
            Step::Calm { until }
            | Step::BeforeReload { until }
            | Step::Reloaded { until }
            | Step::Broken { until }
            | Step::Killed { until }
            | Step::Settling { until } => Some(until),
            // Later than that it waits for an answer.
            Step::BeforeKill { until, pid: Some(_) } if !self.has_short_call_open() => Some(until),
            Step::Greeting | Step::Reloading | Step::Breaking | Step::BeforeKill { .. } | Step::LastLook => None,
        };
        [step, self.next_call].into_iter().flatten().chain([self.began + STORY_MAX]).min()
    }

    pub fn is_over(&self) -> bool {
        self.step == Step::Over
    }

    pub fn elapsed(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.began)
    }

    pub fn sum(&self) -> Sum {
        self.scenes.iter().map(Scene::sum).fold(Sum::default(), |all, one| Sum {
            made: all.made + one.made,
            answered: all.answered + one.answered,
            failed: all.failed + one.failed,
            waiting: all.waiting + one.waiting,
            pause: all.pause.max(one.pause),
        })
    }

    /// The server that serves, as far as the client knows.
    pub fn serving(&self) -> Option<&Server> {
        self.servers.iter().rev().find(|server| server.fate == Fate::Serving)
    }

    /// The place of a server in the order of their lives.
    pub fn place(&self, pid: u32) -> usize {
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
                self.scene("reload with a changed tool", now);
                self.long_call(now);
                self.step = Step::BeforeReload { until: now + LEAD };
            }
            Step::BeforeReload { until } if until <= now => {
                self.actions.push(Action::Load(CHANGED));
                self.ask_tool(Ask::Restart, "restart_server", &json!({"reason": "a tool was added"}));
                self.step = Step::Reloading;
            }
            Step::Reloaded { until } if until <= now => {
                self.check_reload(now);
                self.scene("reload of broken code", now);
                self.actions.push(Action::Load(BROKEN));
                self.ask_tool(Ask::Restart, "restart_server", &json!({"reason": "a thought half written"}));
                self.step = Step::Breaking;
            }
            Step::Broken { until } if until <= now => {
                self.scene("kill -9", now);
                self.long_call(now);
                self.ask_tool(Ask::Status, "server_status", &json!({}));
                self.step = Step::BeforeKill { until: now + LEAD, pid: None };
            }
            Step::BeforeKill { until, pid: Some(pid) } if until <= now && !self.has_short_call_open() => {
                self.actions.push(Action::Kill(pid));
                self.killed = Some((pid, now));
                self.end_life(pid, Fate::Killed);
                self.note(Mood::Plain, format!("pid {pid} was killed without a warning"), now);
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
            return self.fail(format!("outlast said what is no JSON: {line}"), at);
        };
        if message["method"] == "notifications/tools/list_changed" {
            // Also told when the first list is known to differ from what was served before; only ours is of interest.
            if matches!(self.step, Step::Reloading | Step::Reloaded { .. }) && !self.relist_heard {
                self.relist_heard = true;
                self.ask(Ask::Tools, "tools/list", &json!({}));
            }
            return;
        }
        let Some(id) = message["id"].as_u64() else { return };
        if let Some((scene, call)) = self.open.remove(&id) {
            return self.call_answered(id, scene, call, &message, at);
        }
        let Some(ask) = self.asked.remove(&id) else {
            return self.fail(format!("an answer came twice, or to a question nobody asked: {line}"), at);
        };
        let result = &message["result"];
        match ask {
            _ if message.get("error").is_some() => {
                self.fail(format!("`{}` was refused: {}", ask.name(), words_of(&message)), at);
            }
            Ask::Handshake => {
                self.actions.push(Action::Say(json!({"jsonrpc": "2.0", "method": "notifications/initialized"}).to_string()));
                self.ask(Ask::Tools, "tools/list", &json!({}));
            }
            Ask::Tools if self.step == Step::Greeting => {
                self.ask_tool(Ask::Status, "server_status", &json!({}));
            }
            Ask::Tools => {
                let names: Vec<&str> = result["tools"].as_array().into_iter().flatten().filter_map(|t| t["name"].as_str()).collect();
                let own = names.iter().filter(|name| !OURS.contains(name)).copied();
                let own = own.collect::<Vec<_>>().join(", ");
                self.note(Mood::Good, format!("the client was told that the list changed, and asked for it: {own}"), at);
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
                self.note(Mood::Plain, format!("a call every {rhythm} ms, through outlast, to a server with pid {pid}"), at);
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
                let words = format!("`restart_server` answered: pid {old} → {new} in {took} ms{}", tools.concat());
                self.note(Mood::Good, words, at);
                self.ready_at = at;
                self.step = Step::Reloaded { until: at + SCENE };
            }
            Step::Breaking if is_error => {
                self.servers.push(Server { generation: None, pid: None, fate: Fate::NeverCameUp, since: at });
                let words = report["error"].as_str().map_or_else(|| words_of(message), str::to_owned);
                self.note(Mood::Quote, format!("“{words}”"), at);
                let stderr = report["stderr_tail"].as_str().unwrap_or_default();
                if let Some(first) = stderr.lines().next() {
                    let place = stderr.lines().nth(1).unwrap_or_default().trim().trim_start_matches("--> ");
                    self.note(Mood::Quote, format!("its stderr came with it: {first} ({place})"), at);
                }
                let serving = pid_in(&report["serving_pid"]);
                if serving.is_none() || serving != self.serving().and_then(|server| server.pid) {
                    self.complain(format!("the old server should keep serving, but outlast names {serving:?}"), at);
                }
                // Else the next crash would find it.
                self.actions.push(Action::Load(CHANGED));
                self.note(Mood::Plain, "calls went on as before; then the code was mended".into(), at);
                // Long enough to read, and for the server that serves to have proven itself.
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
                    let pause = millis(at.saturating_duration_since(when));
                    let words = format!("{pause} after the death of {killed} the next call was answered, by pid {pid}");
                    self.note(Mood::Good, words, at);
                    // The generation of the new server.
                    self.ask_tool(Ask::Status, "server_status", &json!({}));
                }
                if is_long && self.long_call == Some(id) {
                    let was_replaced = self.servers.iter().any(|s| s.pid == Some(pid) && s.fate == Fate::Replaced);
                    let who = if was_replaced { "the old server, which had waited for it" } else { "the server" };
                    self.note(Mood::Good, format!("a long call from before was finished by {who} (pid {pid})"), at);
                }
            }
            Outcome::Failed { words, .. } => {
                let is_honest = result["_meta"]["outlast/failure"]["outcome"] == "unknown" && self.killed.is_some();
                let first = words.lines().next().unwrap_or_default().to_owned();
                if is_honest {
                    let which = if is_long { "the long call in flight" } else { "a call in flight" };
                    self.note(Mood::Quote, format!("{which} was told: “{first}”"), at);
                } else {
                    self.complain(format!("a call failed: {first}"), at);
                }
            }
            Outcome::Waiting => {}
        }
    }

    fn check_reload(&mut self, now: Instant) {
        if !self.relist_heard {
            self.complain("the tools changed and the client was not told".into(), now);
        }
        if self.long_call.is_some_and(|id| self.open.contains_key(&id)) {
            self.complain("the long call from before the reload is not answered yet".into(), now);
        }
    }

    fn check_end(&mut self, now: Instant) {
        let sum = self.sum();
        if sum.waiting > 0 {
            self.complain(format!("{} calls were never answered", sum.waiting), now);
        }
        if self.restarts != Some(2) {
            self.complain(format!("a reload and a kill are 2 restarts; outlast counted {:?}", self.restarts), now);
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
        self.scenes.push(Scene { title, at: self.elapsed(now), calls: Vec::new(), notes: Vec::new() });
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

    /// There is no sense in going on.
    fn fail(&mut self, what: String, now: Instant) {
        self.complain(what, now);
        let waiting = self.sum().waiting;
        if waiting > 0 {
            self.complain(format!("{waiting} calls were never answered"), now);
        }
        self.next_call = None;
        self.step = Step::Over;
    }

    fn meet(&mut self, pid: u32, generation: Option<u64>, now: Instant) {
        match self.servers.iter_mut().find(|server| server.pid == Some(pid)) {
            Some(server) => server.generation = server.generation.or(generation),
            None => self.servers.push(Server { generation, pid: Some(pid), fate: Fate::Serving, since: now }),
        }
    }

    fn end_life(&mut self, pid: u32, fate: Fate) {
        if let Some(server) = self.servers.iter_mut().find(|server| server.pid == Some(pid)) {
            server.fate = fate;
        }
    }

    fn has_short_call_open(&self) -> bool {
        self.open.values().any(|&(scene, call)| !self.scenes[scene].calls[call].is_long)
    }

    fn long_call(&mut self, now: Instant) {
        self.long_call = Some(self.call("report", now));
    }

    fn call(&mut self, tool: &str, now: Instant) -> u64 {
        let id = self.say("tools/call", &|id| json!({"name": tool, "arguments": {"n": id}}));
        let at = self.scenes.len() - 1;
        let calls = &mut self.scenes[at].calls;
        calls.push(Call { asked: now, is_long: tool == "report", outcome: Outcome::Waiting });
        self.open.insert(id, (at, calls.len() - 1));
        id
    }

    fn ask_tool(&mut self, ask: Ask, tool: &str, arguments: &Value) {
        self.ask(ask, "tools/call", &json!({"name": tool, "arguments": arguments}));
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
    pub fn sum(&self) -> Sum {
        let mut sum = Sum { made: self.calls.len(), ..Sum::default() };
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
            Ask::Handshake => "initialize",
            Ask::Tools => "tools/list",
            Ask::Status => "server_status",
            Ask::Restart => "restart_server",
        }
    }
}

/// A time as people compare it: with a decimal only where that says something.
pub fn millis(time: Duration) -> String {
    let millis = time.as_secs_f64() * 1000.0;
    if millis < 10.0 { format!("{millis:.1} ms") } else { format!("{millis:.0} ms") }
}

/// The words of an answer that is not what was asked for.
fn words_of(message: &Value) -> String {
    let text = &message["result"]["content"][0]["text"];
    let words = text.as_str().or_else(|| message["error"]["message"].as_str());
    words.map_or_else(|| message.to_string(), str::to_owned)
}

fn pid_in(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|pid| u32::try_from(pid).ok())
}
