//! A conversation as a story: the client, a child or the driver does something, and the test checks the actions.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use bytes::Bytes;
pub(crate) use outlast_core::{
    exit::{Exit, How},
    relay::{Action, ClientEnd, Event, NotWritten, OnCleanExit, Origin, Reading, Reload, Retry, Settings},
    restarts::Policy,
};
use outlast_core::{
    record::Record,
    relay::{Limits, Relay},
};
use serde_json::Value;
pub(crate) use serde_json::json;

pub(crate) const INITIALIZE: &str = r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"c","version":"1"}}}"#;
pub(crate) const INITIALIZED: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
/// The capabilities of a server that offers everything.
pub(crate) const ALL: &str =
    r#"{"tools":{},"prompts":{},"resources":{"subscribe":true},"logging":{},"completions":{}}"#;
pub(crate) const META: &str = r#"{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}"#;

pub(crate) fn code(code: i32) -> How {
    How::Exited(Exit::Code(code))
}

pub(crate) fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

pub(crate) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(crate) fn parsed(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("not JSON ({error}): {line}"))
}

/// A request with only the required members.
pub(crate) fn ask(id: impl std::fmt::Display, method: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}"}}"#)
}

pub(crate) fn ask_with(id: impl std::fmt::Display, method: &str, params: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{params}}}"#)
}

pub(crate) fn call(id: impl std::fmt::Display, tool: &str) -> String {
    ask_with(id, "tools/call", &format!(r#"{{"name":"{tool}","arguments":{{}}}}"#))
}

/// A request of the stateless era.
pub(crate) fn modern(id: impl std::fmt::Display, method: &str, params: &str) -> String {
    let comma = if params.is_empty() { "" } else { "," };
    ask_with(id, method, &format!(r#"{{"_meta":{META}{comma}{params}}}"#))
}

pub(crate) fn result(id: impl std::fmt::Display, result: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#)
}

pub(crate) fn error(id: impl std::fmt::Display, code: i32, message: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":{code},"message":"{message}"}}}}"#)
}

pub(crate) fn note(method: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","method":"{method}"}}"#)
}

pub(crate) fn cancel(id: impl std::fmt::Display) -> String {
    format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#)
}

/// The next child starts before an opening is answered without one.
pub(crate) fn quick(settings: &mut Settings) {
    settings.policy.delays = outlast_core::restarts::Delays::Steps(vec![(1, ms(500))]);
}

/// The client's notification when the server of a server request ended.
pub(crate) fn cancelled(id: impl std::fmt::Display) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id},"reason":"the server ended"}}}}"#
    )
}

pub(crate) fn initialize_result(version: &str, capabilities: &str) -> String {
    format!(
        r#"{{"protocolVersion":"{version}","capabilities":{capabilities},"serverInfo":{{"name":"s","version":"1"}}}}"#
    )
}

pub(crate) fn discover_result(capabilities: &str) -> String {
    format!(
        r#"{{"resultType":"complete","supportedVersions":["2026-07-28"],"capabilities":{capabilities},"ttlMs":1000,"cacheScope":"public"}}"#
    )
}

/// A private id as the relay writes it.
pub(crate) fn private(k: u32) -> String {
    format!(r#""outlast-r-{k}""#)
}

pub(crate) struct Story {
    relay: Relay,
    birth: Instant,
    now: Instant,
    to_client: Vec<String>,
    to_server: BTreeMap<u32, Vec<String>>,
    /// All lines to a child that are returned if its pipe does not take them.
    marked: BTreeMap<u32, Vec<(u64, Bytes)>>,
    done: Vec<String>,
    /// Children whose queues the relay asked for.
    take_backs: Vec<u32>,
    /// The entries saved for the next run.
    saved: Vec<Option<String>>,
    records: Vec<Record>,
    client_left: bool,
    ends: u32,
}

impl Story {
    /// No child yet; the first one is being started.
    pub(crate) fn not_started() -> Story {
        Story::unborn_with(|_| {})
    }

    pub(crate) fn unborn_with(change: impl FnOnce(&mut Settings)) -> Story {
        let mut settings = Settings {
            id: "i".into(),
            name: "s".into(),
            tools: true,
            retry: Retry::Never,
            reload: Reload::BlueGreen,
            build: false,
            on_clean_exit: OnCleanExit::End,
            answer_after: None,
            cache: false,
            heartbeat: None,
            restart_tool: "restart_server".into(),
            call_timeout: None,
            call_timeouts: BTreeMap::new(),
            memory_max: None,
            policy: Policy::watchdog(),
            seed: 1,
            random: "r".into(),
            limits: Limits::default(),
        };
        change(&mut settings);
        let birth = birth();
        Story {
            relay: Relay::new(settings),
            birth,
            now: birth,
            to_client: Vec::new(),
            to_server: BTreeMap::new(),
            marked: BTreeMap::new(),
            done: Vec::new(),
            take_backs: Vec::new(),
            saved: Vec::new(),
            records: Vec::new(),
            client_left: false,
            ends: 0,
        }
    }

    /// Child 1 runs, and no message was sent yet.
    pub(crate) fn fresh() -> Story {
        Story::fresh_with(|_| {})
    }

    pub(crate) fn fresh_with(change: impl FnOnce(&mut Settings)) -> Story {
        let mut story = Story::unborn_with(change);
        story.started(1);
        story
    }

    /// A client of the handshake era is initialised on child 1, which offers everything.
    pub(crate) fn legacy() -> Story {
        Story::legacy_with(ALL, |_| {})
    }

    pub(crate) fn legacy_with(capabilities: &str, change: impl FnOnce(&mut Settings)) -> Story {
        let mut story = Story::fresh_with(change);
        story.client(INITIALIZE);
        story.child(1, &result(0, &initialize_result("2025-11-25", capabilities)));
        story.client(INITIALIZED);
        story.forget();
        story
    }

    /// A client of the stateless era, whose probe child 1 answered.
    pub(crate) fn modern() -> Story {
        Story::modern_with(|_| {})
    }

    pub(crate) fn modern_with(change: impl FnOnce(&mut Settings)) -> Story {
        let mut story = Story::fresh_with(change);
        story.client(&modern(0, "server/discover", ""));
        story.child(1, &result(0, &discover_result(ALL)));
        story.forget();
        story
    }

    // ---- what happens ------------------------------------------------------------------------------

    pub(crate) fn happens(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.relay.handle(event, self.now, &mut actions);
        for action in actions {
            let done = match action {
                Action::TellClient(line) => {
                    self.to_client.push(text(&line));
                    continue;
                }
                Action::TellServer { generation, line, mark } => {
                    self.to_server.entry(generation).or_default().push(text(&line));
                    if let Some(mark) = mark {
                        self.marked.entry(generation).or_default().push((mark, line));
                    }
                    continue;
                }
                Action::Record(record) => {
                    self.records.push(record);
                    continue;
                }
                Action::ReadCache(revision) => format!("read cache {revision}"),
                Action::SaveCache { entry, .. } => {
                    self.saved.push(entry);
                    continue;
                }
                Action::TakeBack(generation) => {
                    self.take_backs.push(generation);
                    continue;
                }
                Action::CloseStdin(generation) => format!("close stdin {generation}"),
                Action::Build => {
                    assert!(!self.client_left, "nothing is built for a client that is gone");
                    "build".to_owned()
                }
                Action::StopBuild => "stop build".to_owned(),
                Action::Start => {
                    assert!(!self.client_left, "nothing is started for a client that is gone");
                    "start".to_owned()
                }
                Action::Stop { generation, how } => format!("stop {generation}: {how}"),
                Action::MarkReady(generation) => format!("ready {generation}"),
                Action::WriteMarker { pid, reason } => format!("mark {pid}: {reason}"),
                Action::ReadMarker(key) => format!("read {key}"),
                Action::Divert { generation, line, is_json } => {
                    let tag = if is_json { " as JSON" } else { "" };
                    format!("divert {generation}{tag}: {}", String::from_utf8_lossy(&line).trim_end())
                }
                Action::Answer { ticket, result: Ok(report) } => format!("answer {ticket}: {report}"),
                Action::Answer { ticket, result: Err(report) } => format!("refuse {ticket}: {report}"),
                Action::End(code) => {
                    self.ends += 1;
                    assert_eq!(self.ends, 1, "there is one end");
                    format!("end {code}")
                }
            };
            self.done.push(done);
        }
    }

    pub(crate) fn client(&mut self, line: &str) -> &mut Self {
        self.happens(Event::ClientSaid(whole(line)));
        self
    }

    pub(crate) fn child(&mut self, generation: u32, line: &str) -> &mut Self {
        self.happens(Event::ServerSaid(generation, whole(line)));
        self
    }

    pub(crate) fn child_logs(&mut self, generation: u32, line: &str) {
        self.happens(Event::ServerLogged(generation, line.into()));
    }

    /// Its process id is 1000 plus its generation.
    pub(crate) fn started(&mut self, generation: u32) {
        let unix = 1_000_000.0 + (self.now - self.birth).as_secs_f64();
        self.happens(Event::ServerStarted { generation, pid: 1000 + generation, unix });
    }

    pub(crate) fn start_fails(&mut self, why: &str) {
        self.happens(Event::StartFailed(why.into()));
    }

    /// The child ends, and its pipe took all lines.
    pub(crate) fn exits(&mut self, generation: u32, how: How) {
        self.exits_unsent(generation, how, &[]);
    }

    /// The child ends, and its pipe did not take the lines that contain one of these words.
    pub(crate) fn exits_unsent(&mut self, generation: u32, how: How, words: &[&str]) {
        let marked = self.marked.remove(&generation).unwrap_or_default();
        let unsent =
            marked.into_iter().filter(|(_, line)| words.iter().any(|word| text(line).contains(word))).collect();
        self.happens(Event::ServerWentDown { generation, how, unsent });
    }

    /// This many bytes wait for its pipe.
    pub(crate) fn queue_is(&mut self, generation: u32, bytes: usize) {
        self.happens(Event::ServerQueue { generation, bytes });
    }

    /// The lines that contain one of these words were still in the queue of a replaced child.
    pub(crate) fn gives_back(&mut self, generation: u32, words: &[&str]) {
        assert_eq!(std::mem::take(&mut self.take_backs), [generation]);
        let marked = self.marked.entry(generation).or_default();
        let is_unsent = |(_, line): &(u64, Bytes)| words.iter().any(|word| text(line).contains(word));
        let (unsent, sent) = std::mem::take(marked).into_iter().partition(is_unsent);
        *marked = sent;
        self.happens(Event::TakenBack { generation, unsent });
    }

    /// Whether the relay asked for the queue of a child.
    pub(crate) fn is_asked_back(&self, generation: u32) -> bool {
        self.take_backs.contains(&generation)
    }

    pub(crate) fn cache_is_read(&mut self, revision: &str, entry: Option<&str>) {
        self.happens(Event::CacheRead { revision: revision.into(), entry: entry.map(str::to_owned) });
    }

    /// The last entry that was saved for the next run.
    pub(crate) fn saved(&mut self) -> Option<String> {
        std::mem::take(&mut self.saved).pop().flatten()
    }

    /// Whether an entry was removed since the last call.
    pub(crate) fn removed(&mut self) -> bool {
        std::mem::take(&mut self.saved).contains(&None)
    }

    pub(crate) fn reads_client(&self) -> bool {
        self.relay.reads_client()
    }

    /// The next child starts and answers the relay's handshake.
    pub(crate) fn comes_up(&mut self, generation: u32) {
        self.comes_up_with(generation, ALL);
    }

    pub(crate) fn comes_up_with(&mut self, generation: u32, capabilities: &str) {
        self.started(generation);
        self.shakes_hands(generation, capabilities);
    }

    pub(crate) fn shakes_hands(&mut self, generation: u32, capabilities: &str) {
        let (id, method) = self.private_request(generation);
        let answer = match method.as_str() {
            "initialize" => initialize_result("2025-11-25", capabilities),
            _ => discover_result(capabilities),
        };
        self.child(generation, &result(id, &answer));
    }

    /// The id (as JSON) and the method of the last request of the relay itself to a child.
    pub(crate) fn private_request(&self, generation: u32) -> (String, String) {
        let lines = &self.to_server[&generation];
        let found = lines.iter().rev().map(|line| parsed(line)).find(|line| {
            line["id"].as_str().is_some_and(|id| id.starts_with("outlast-r-")) && line["method"].is_string()
        });
        let found = found.expect("a private request");
        (found["id"].to_string(), found["method"].as_str().unwrap_or_default().into())
    }

    /// The child answers all requests of the relay itself with this method.
    pub(crate) fn answers_private(&mut self, generation: u32, method: &str, answer: &str) {
        let is_asked = |line: &String| {
            let line = parsed(line);
            line["method"] == method && line["id"].as_str().is_some_and(|id| id.starts_with("outlast-r-"))
        };
        let lines = self.to_server.entry(generation).or_default();
        let asked: Vec<String> = lines.iter().filter(|line| is_asked(line)).cloned().collect();
        lines.retain(|line| !is_asked(line));
        for line in asked {
            self.child(generation, &result(&parsed(&line)["id"], answer));
        }
    }

    pub(crate) fn client_leaves(&mut self, end: ClientEnd) {
        self.client_left = true;
        self.happens(Event::ClientEnded(end));
    }

    pub(crate) fn asks_restart(&mut self, ticket: u64, origin: Origin, reason: &str) {
        self.happens(Event::RestartAsked { ticket, origin, reason: reason.into(), at_once: false });
    }

    /// As by `outlast restart --now`.
    pub(crate) fn asks_restart_now(&mut self, ticket: u64) {
        let reason = "now".into();
        self.happens(Event::RestartAsked { ticket, origin: Origin::Control, reason, at_once: true });
    }

    pub(crate) fn measured(&mut self, generation: u32, bytes: u64) {
        self.happens(Event::ServerMeasured { generation, bytes });
    }

    /// Time passes without an event, as when outlast was stopped by a signal; then the relay is told.
    pub(crate) fn is_stopped_for(&mut self, time: Duration) {
        self.now += time;
        self.happens(Event::TimePassed);
    }

    pub(crate) fn marker_is_written(&mut self) {
        self.happens(Event::MarkerWritten(Ok("restart_marker".into())));
    }

    pub(crate) fn marker_is_not_written(&mut self, why: &str) {
        let timestamp = 1_000_000.0 + (self.now - self.birth).as_secs_f64();
        let iso_time = format!("at {timestamp}");
        self.happens(Event::MarkerWritten(Err(NotWritten { why: why.into(), timestamp, iso_time })));
    }

    /// An operator's restart, up to its start.
    pub(crate) fn reloads(&mut self) {
        self.asks_restart(7, Origin::Control, "new code");
        self.marker_is_written();
    }

    /// Lets time pass, with an event at each deadline of the relay.
    pub(crate) fn passes(&mut self, time: Duration) {
        let end = self.now + time;
        for _ in 0..10_000 {
            let due = self.relay.deadline().filter(|due| *due <= end);
            self.now = due.map_or(end, |due| due.max(self.now));
            self.happens(Event::TimePassed);
            assert!(self.relay.deadline().is_none_or(|due| due > self.now), "a deadline that has passed is met");
            if due.is_none() {
                return;
            }
        }
        panic!("the relay wants to be woken without end");
    }

    pub(crate) fn status(&self) -> Value {
        self.relay.status(self.now).to_json()
    }

    // ---- what came of it -----------------------------------------------------------------------------

    pub(crate) fn told_client(&mut self) -> Vec<String> {
        std::mem::take(&mut self.to_client)
    }

    /// The one line that the client received.
    pub(crate) fn answer(&mut self) -> String {
        let told = self.told_client();
        assert_eq!(told.len(), 1, "one line was expected: {told:#?}");
        told.into_iter().next().unwrap_or_default()
    }

    pub(crate) fn told_server(&mut self, generation: u32) -> Vec<String> {
        self.to_server.remove(&generation).unwrap_or_default()
    }

    /// All actions except notes and records.
    pub(crate) fn did(&mut self) -> Vec<String> {
        std::mem::take(&mut self.done)
    }

    /// The free text of the records of one event since the last call.
    pub(crate) fn recorded(&mut self, event: &str) -> Vec<String> {
        let records = std::mem::take(&mut self.records);
        let records = records.into_iter().filter(|record| record.event.name() == event);
        records.map(|record| record.detail.or(record.reason).unwrap_or_default()).collect()
    }

    /// The one record of an event since the last call.
    #[track_caller]
    pub(crate) fn record(&mut self, event: &str) -> Record {
        let mut records = std::mem::take(&mut self.records);
        records.retain(|record| record.event.name() == event);
        assert_eq!(records.len(), 1, "one `{event}` was expected: {records:#?}");
        records.remove(0)
    }

    /// Drops all actions so far.
    pub(crate) fn forget(&mut self) {
        self.to_client.clear();
        self.to_server.clear();
        self.done.clear();
        self.records.clear();
    }

    #[track_caller]
    pub(crate) fn client_hears(&mut self, lines: &[&str]) {
        assert_eq!(self.told_client(), lines);
    }

    #[track_caller]
    pub(crate) fn client_hears_nothing(&mut self) {
        self.client_hears(&[]);
    }

    #[track_caller]
    pub(crate) fn child_hears(&mut self, generation: u32, lines: &[&str]) {
        assert_eq!(self.told_server(generation), lines);
    }

    #[track_caller]
    pub(crate) fn child_hears_last(&mut self, generation: u32, line: &str) {
        assert_eq!(self.told_server(generation).last().map(String::as_str), Some(line));
    }

    #[track_caller]
    pub(crate) fn child_hears_nothing(&mut self, generation: u32) {
        self.child_hears(generation, &[]);
    }

    #[track_caller]
    pub(crate) fn was_done(&mut self, done: &[&str]) {
        assert_eq!(self.did(), done);
    }

    /// The client receives one error of outlast.
    #[track_caller]
    pub(crate) fn client_hears_error(&mut self, id: u32, code: i64, reason: &str, outcome: &str) -> Value {
        let answer = parsed(&self.answer());
        assert_eq!(answer["id"], id, "{answer}");
        assert_eq!(answer["error"]["code"], code, "{answer}");
        assert_eq!(answer["error"]["data"]["reason"], reason, "{answer}");
        assert_eq!(answer["error"]["data"]["outcome"], outcome, "{answer}");
        answer["error"].clone()
    }

    /// The client receives the failure of a tool call, as a result.
    #[track_caller]
    pub(crate) fn client_hears_failed_call(&mut self, id: u32, reason: &str, outcome: &str) -> String {
        let answer = parsed(&self.answer());
        failed_call(&answer, id, reason, outcome)
    }
}

/// The text of a failed tool call.
#[track_caller]
pub(crate) fn failed_call(answer: &Value, id: u32, reason: &str, outcome: &str) -> String {
    assert_eq!(answer["id"], id, "{answer}");
    assert_eq!(answer["result"]["isError"], true, "{answer}");
    assert!(answer["result"].get("structuredContent").is_none(), "{answer}");
    let data = &answer["result"]["_meta"]["outlast/failure"];
    assert_eq!(data["from"], "outlast", "{answer}");
    assert_eq!(data["reason"], reason, "{answer}");
    assert_eq!(data["outcome"], outcome, "{answer}");
    answer["result"]["content"][0]["text"].as_str().unwrap_or_default().to_owned()
}

/// The names in a list of tools.
pub(crate) fn tool_names(answer: &str) -> Vec<String> {
    let tools = parsed(answer)["result"]["tools"].as_array().cloned().unwrap_or_default();
    tools.iter().map(|tool| tool["name"].as_str().unwrap_or_default().to_owned()).collect()
}

pub(crate) const OURS: [&str; 3] = ["restart_server", "verify_server_restarted", "server_status"];

fn whole(line: &str) -> Bytes {
    format!("{line}\n").into()
}

fn text(line: &[u8]) -> String {
    let text = std::str::from_utf8(line).expect("the lines of these stories are text");
    text.strip_suffix('\n').expect("a line ends with its newline").to_owned()
}

#[expect(clippy::disallowed_methods, reason = "a story needs some instant to count from")]
fn birth() -> Instant {
    Instant::now()
}
