//! What one instance tells the world: the audit log, its own log file, and the lines on stderr.

use std::{
    fmt,
    fs::{self, File},
    io::{self, Write},
    ops::Range,
    path::{Path, PathBuf},
    rc::Rc,
    thread::JoinHandle,
    time::{SystemTime, UNIX_EPOCH},
};

use outlast_core::{
    count::count as count_of,
    exit::{self, Exit},
    gateway::Called,
    record::{self, Event, OfGateway, Record},
    redact,
    secret::{Mask, Resolved},
    visible,
};
use serde_json::Value;

use crate::{audit::Audit, home::Home, logs, os, report::Report};

/// A log file that would grow past this is put aside as `<id>.log.1`; the one before is forgotten.
const LOG_MAX: u64 = 4 << 20;
/// A longer line of a server that is not for the client is cut for people.
const DIVERTED_MAX: usize = 4 << 10;

pub struct Journal {
    id: String,
    name: String,
    audit: Audit,
    log: Option<Log>,
    /// Removes logs of old, as long as that takes.
    pruning: Option<JoinHandle<()>>,
    tone: Tone,
    /// What must not be printed.
    mask: Mask,
    last_call: Option<LastCall>,
    /// How many lost records the audit log has been told of.
    lost_told: u64,
}

/// Whose journal it is, and so how it speaks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tone {
    /// Sentences, in the log and on stderr.
    Mcp,
    /// The same, of many servers by their names.
    Gateway,
    /// Events with their values, in the log alone: the terminal belongs to the agent.
    Session,
}

impl Tone {
    /// The kind of the instance, and who speaks in its records.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Tone::Mcp => ("mcp", "outlast.mcp"),
            Tone::Gateway => ("gateway", "outlast.gateway"),
            Tone::Session => ("session", "outlast.run"),
        }
    }
}

/// The line of the last call that ended. Many end within a second, and mostly differ only in their milliseconds.
struct LastCall {
    millis: u64,
    called: Called,
    line: String,
    /// Where the milliseconds of its two timestamps stand.
    stamps: [usize; 2],
    took: Range<usize>,
}

impl LastCall {
    fn is_like(&self, called: &Called, millis: u64) -> bool {
        let last = &self.called;
        self.millis / 1000 == millis / 1000
            && (last.outcome, &last.tool, &last.backend) == (called.outcome, &called.tool, &called.backend)
            && (&last.who, &last.method) == (&called.who, &called.method)
    }
}

/// Where a request came from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origin {
    /// An address, which needs no quoting.
    pub peer: Option<Rc<str>>,
    pub session: Option<SessionLabel>,
}

/// What is written of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionLabel {
    Stdio,
    /// Of HTTP: the first eight digits of its id. With the other 24 nobody can take it over.
    Http(u32),
}

impl fmt::Display for SessionLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SessionLabel::Stdio => f.write_str("stdio"),
            SessionLabel::Http(digits) => write!(f, "{digits:08x}"),
        }
    }
}

impl Origin {
    /// Behind the members of the last line's `props`.
    fn put_into(&self, lines: &mut String) {
        const END: &str = "}}\n";
        if *self == Origin::default() || !lines.ends_with(END) {
            return;
        }
        lines.truncate(lines.len() - END.len());
        if let Some(peer) = &self.peer {
            for part in [r#","peer":""#, peer, "\""] {
                lines.push_str(part);
            }
        }
        if let Some(session) = self.session {
            // A `String` takes everything.
            let _ = fmt::Write::write_fmt(lines, format_args!(r#","session":"{session}""#));
        }
        lines.push_str(END);
    }
}

struct Log {
    path: PathBuf,
    /// Nothing only while it is put aside: Windows does not rename an open file.
    open: Option<(File, logs::Hold)>,
    length: u64,
}

impl Journal {
    pub fn new(home: &Home, id: &str, name: &str) -> Journal {
        Journal::open(home, id, name, Tone::Mcp)
    }

    pub fn of_gateway(home: &Home, id: &str, name: &str) -> Journal {
        Journal::open(home, id, name, Tone::Gateway)
    }

    pub fn of_session(home: &Home, id: &str, name: &str) -> Journal {
        Journal::open(home, id, name, Tone::Session)
    }

    fn open(home: &Home, id: &str, name: &str, tone: Tone) -> Journal {
        let mut journal = Journal {
            id: id.to_owned(),
            name: name.to_owned(),
            audit: Audit::new(home.audit()),
            log: None,
            pruning: None,
            tone,
            mask: Mask::default(),
            last_call: None,
            lost_told: 0,
        };
        let opened = home.log(id).map(|path| home.make_logs().and_then(|()| Log::open(&path)));
        match opened {
            Some(Ok(log)) => {
                journal.pruning = log.path.parent().and_then(logs::prune_aside);
                journal.log = Some(log);
            }
            Some(Err(error)) => journal.note(&format!("no log file is written ({error})")),
            None => {}
        }
        if let Some(complaint) = home.complaint().or(home.note()) {
            journal.note(complaint);
        }
        journal
    }

    /// What came from references in these texts is masked from here on.
    pub fn learn<'a>(&mut self, texts: impl Iterator<Item = &'a Resolved>) {
        texts.for_each(|text| self.mask.learn(text));
    }

    pub fn mask(&self) -> &Mask {
        &self.mask
    }

    /// Into the audit log first, so that the act it announces cannot outrun it; then the line for people. The line of
    /// the log is returned, for those who listen.
    pub fn record(&mut self, mut record: Record) -> String {
        let line = self.line(&mut record);
        self.write(&line);
        match record.backend() {
            _ if self.tone == Tone::Session => {}
            Some(backend) => self.note(&format!("{backend}: {}", sentence(&record))),
            None => self.note(&sentence(&record)),
        }
        line
    }

    /// The end of a call, to be written together with others: people are not told of it.
    pub fn call_ended(&mut self, called: &Called, origin: &Origin, lines: &mut String) {
        self.call_ended_anywhere(called, lines);
        origin.put_into(lines);
    }

    /// The same without where it came from.
    fn call_ended_anywhere(&mut self, called: &Called, lines: &mut String) {
        let millis = millis_now();
        if let Some(last) = self.last_call.as_mut().filter(|last| last.is_like(called, millis)) {
            if std::mem::replace(&mut last.millis, millis) != millis {
                let digits = format!("{:03}", millis % 1000);
                last.stamps.into_iter().for_each(|at| last.line.replace_range(at..at + 3, &digits));
            }
            let (start, end) = (&last.line[..last.took.start], &last.line[last.took.end..]);
            for part in [start, &called.took.as_millis().to_string(), end] {
                lines.push_str(part);
            }
            return;
        }
        let line = self.call_line(called, millis);
        lines.push_str(&line);
        let (called, places) = (called.clone(), places(&line));
        self.last_call = places.map(|(stamps, took)| LastCall { millis, called, line, stamps, took });
    }

    fn call_line(&self, called: &Called, millis: u64) -> String {
        let (kind, logger) = self.tone.names();
        let own = |text: &Option<Rc<str>>| text.as_deref().map(str::to_owned);
        let record = Record {
            id: Some(self.id.clone()),
            kind: Some(kind),
            took: Some(called.took),
            gateway: Some(Box::new(OfGateway {
                backend: own(&called.backend),
                who: Some(called.who.name.clone()),
                role: called.who.role.clone(),
                method: Some(called.method.clone().into_owned()),
                tool: own(&called.tool),
                outcome: Some(called.outcome.name()),
                ..OfGateway::default()
            })),
            ..Record::new(Event::CallEnded)
        };
        record.to_line(&record::iso(millis), logger)
    }

    fn line(&self, record: &mut Record) -> String {
        let (kind, logger) = self.tone.names();
        record.id = Some(match record.backend() {
            Some(backend) => format!("{}/{backend}", self.id),
            None => self.id.clone(),
        });
        record.kind = Some(if record.backend().is_some() { "backend" } else { kind });
        for text in [&mut record.reason, &mut record.detail].into_iter().flatten() {
            *text = redact::text(&self.mask.hide(text)).into_owned();
        }
        record.to_line(&now(), logger)
    }

    fn write(&mut self, line: &str) {
        if let Some(complaint) = self.audit.write(line) {
            self.note(&complaint.to_string());
        }
        self.tell_of_lost();
    }

    /// Once the audit log can be written again, it says how many records are missing before this one.
    fn tell_of_lost(&mut self) {
        let lost = self.audit.lost();
        if lost > self.lost_told && self.audit.is_writable() {
            let count = lost - self.lost_told;
            self.lost_told = lost;
            let detail = format!("{} could not be written before this one", count_of(count, "record", "records"));
            let mut record =
                Record { lost: Some(count), detail: Some(detail.clone()), ..Record::new(Event::AuditDegraded) };
            let line = self.line(&mut record);
            // If this fails, it is lost and counted like any other.
            let _ = self.audit.write(&line);
            self.note(&detail);
        }
    }

    /// Finished lines of the audit log that announce nothing.
    pub fn write_many(&mut self, lines: &str) {
        if let Some(complaint) = self.audit.write_many(lines) {
            self.note(&complaint.to_string());
        }
        self.tell_of_lost();
    }

    pub fn begin(&mut self, command: &str, cwd: &Path) {
        let pid = std::process::id();
        let version = env!("CARGO_PKG_VERSION");
        self.record(Record {
            pid: Some(pid),
            detail: Some(format!("outlast {version}, PID {pid}, in {}: {command}", cwd.display())),
            ..Record::new(Event::InstanceStarted)
        });
    }

    pub fn end(mut self, code: u8) -> String {
        let record = Record::new(Event::InstanceEnded);
        let line = self.record(Record { pid: Some(std::process::id()), exit_code: Some(code.into()), ..record });
        self.audit.finish();
        if let Some(pruning) = self.pruning.take() {
            // A panic in it has been printed, and there is nothing to save.
            let _ = pruning.join();
        }
        os::finish_saying();
        line
    }

    pub fn ready(&mut self, generation: u32) {
        self.note(&format!("MCP server ready (generation {generation})"));
    }

    /// A line of a child's stderr.
    pub fn stderr(&mut self, _generation: u32, text: &str) {
        let line = format!("[{}] {text}", self.name);
        self.say(&line);
    }

    /// A line of a child's stdout that is not for the client.
    pub fn diverted(&mut self, line: &[u8], is_json: bool) {
        let name = self.name.clone();
        self.diverted_of(&name, line, is_json);
    }

    /// A line of a backend's stderr.
    pub fn stderr_of(&mut self, backend: &str, text: &str) {
        self.say(&format!("[{backend}] {text}"));
    }

    /// A line of a backend's stdout that is no message.
    pub fn diverted_of(&mut self, backend: &str, line: &[u8], is_json: bool) {
        let text = String::from_utf8_lossy(&line[..line.len().min(DIVERTED_MAX)]);
        let tag = if is_json { "not JSON-RPC" } else { "not JSON" };
        self.say(&format!("[{backend} stdout, {tag}] {}", text.trim_end()));
    }

    /// Somebody outside of the conversation asked for a restart.
    pub fn answered(&mut self, result: &Result<Value, Value>) {
        match result {
            Ok(report) => {
                let (tools, took) = (&report["tools"], &report["took_ms"]);
                let count = |what: &str| tools[what].as_array().map_or(0, Vec::len);
                let changes =
                    format!("{} added, {} removed, {} changed", count("added"), count("removed"), count("changed"));
                self.note(&format!("Reloaded in {took} ms (tools: {changes})"));
            }
            Err(report) => self.note(report["error"].as_str().unwrap_or("the restart failed")),
        }
    }

    /// A line of a session's log: what happened, and what is known of it.
    pub fn event(&mut self, event: &str, about: &[(&str, &dyn fmt::Display)]) {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut line = format!("[{epoch}] [supervisor] {event}");
        for (key, value) in about {
            line.push_str(&format!(" {key}={}", word(&value.to_string())));
        }
        self.say(&line);
    }

    /// A line of our own.
    pub fn note(&mut self, text: &str) {
        if self.tone == Tone::Session {
            return self.event("note", &[("text", &text)]);
        }
        let line = format!("[{}] [SUPERVISOR] {text}", now());
        self.say(&line);
    }

    /// A report, each of its lines by itself: it indents what its parts continue with.
    pub fn report(&mut self, report: &Report) {
        report.to_string().trim_end().lines().for_each(|line| self.say(line));
    }

    /// A line as it stands.
    pub fn say(&mut self, line: &str) {
        let line = self.mask.hide(line);
        let line = redact::text(&line);
        let line = &*visible::line(&line);
        if self.tone != Tone::Session {
            os::say(line);
        }
        if let Some(log) = &mut self.log
            && log.write(line).is_err()
        {
            // A full disk must not cost more than the log.
            self.log = None;
        }
    }
}

/// Where the line of a call says when it ended, to the millisecond, and how long it took.
fn places(line: &str) -> Option<([usize; 2], Range<usize>)> {
    const STAMP: &str = "\"timestamp\":\"";
    const MILLIS: usize = "2026-01-13T14:32:45.".len();
    const TOOK: &str = "\"took_ms\":";
    // Within a text their quotes would be escaped.
    let mut stamps = line.match_indices(STAMP).map(|(at, _)| at + STAMP.len() + MILLIS);
    let start = line.find(TOOK)? + TOOK.len();
    let length = line[start..].bytes().take_while(u8::is_ascii_digit).count();
    Some(([stamps.next()?, stamps.next()?], start..start + length))
}

impl Log {
    fn open(path: &Path) -> io::Result<Log> {
        let (file, hold) = logs::open(path)?;
        let length = file.metadata()?.len();
        Ok(Log { path: path.to_owned(), open: Some((file, hold)), length })
    }

    fn write(&mut self, line: &str) -> io::Result<()> {
        if self.length > LOG_MAX {
            let mut aside = self.path.clone().into_os_string();
            aside.push(".1");
            self.open = None;
            fs::rename(&self.path, aside)?;
            *self = Log::open(&self.path)?;
        }
        let line = format!("{line}\n");
        self.length += line.len() as u64;
        match &mut self.open {
            Some((file, _)) => file.write_all(line.as_bytes()),
            None => Err(io::Error::from(io::ErrorKind::NotFound)),
        }
    }
}

fn now() -> String {
    record::iso(millis_now())
}

fn millis_now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// A value that is read back as one: in quotes if it is more than a word.
fn word(value: &str) -> String {
    let is_plain = |letter: char| !letter.is_whitespace() && !letter.is_control() && !"\"=\\".contains(letter);
    if !value.is_empty() && value.chars().all(is_plain) { value.to_owned() } else { Value::from(value).to_string() }
}

/// A record as a person reads it on stderr.
fn sentence(record: &Record) -> String {
    let detail = record.detail.as_deref().unwrap_or_default();
    let reason = record.reason.as_deref().map(|reason| format!(" (reason: {reason})")).unwrap_or_default();
    let pid = record.pid.map(|pid| format!(" (PID: {pid})")).unwrap_or_default();
    let delay = record.delay.map(|delay| delay.as_secs_f64());
    let generation = record.generation.unwrap_or_default();
    let exit = match (record.exit_code, record.signal) {
        (Some(code), _) => Some(Exit::Code(code)),
        (_, Some(signal)) => Some(Exit::Signal(signal)),
        _ => None,
    };
    let meaning = exit.and_then(|exit| exit::meaning(&exit)).map(|words| format!(": {words}")).unwrap_or_default();
    let again = match delay {
        Some(0.0) => "; restarting at once".to_owned(),
        Some(delay) => format!("; restarting in {delay:.1} s"),
        None => String::new(),
    };
    match record.event {
        Event::InstanceStarted => format!("Starting: {detail}"),
        Event::InstanceEnded => format!("Ended (code: {})", record.exit_code.unwrap_or_default()),
        // A restart that failed had a number, too, and no other one has it again.
        Event::ServerStarted => {
            // A backend that was stopped for want of calls has another generation, and was not restarted.
            let restart = match record.restarts.filter(|_| record.kind == Some("backend")) {
                Some(restarts) => u64::from(restarts),
                None => generation.saturating_sub(1),
            };
            format!("MCP server running{pid} (restart #{restart}, generation {generation})")
        }
        // What its code means is of interest only where nobody asked it to go, and the policy had to judge.
        Event::ServerStopped if record.crashes.is_none() => format!("MCP server ended{pid}: {detail}"),
        Event::ServerStopped => format!("MCP server ended{pid}: {detail}{meaning}"),
        Event::ServerExiting if detail.is_empty() => format!("Stopping the old MCP server{pid}{reason}"),
        Event::ServerExiting => format!("MCP server ended{pid}: {detail}{meaning}{again}"),
        Event::ServerCrashed => {
            let crashes = record.crashes.unwrap_or_default();
            format!("ERROR: MCP server crashed{pid}: {detail}{meaning} (crash #{crashes}{again})")
        }
        Event::RestartThrottled => format!("WARNING: restart throttled to one a second{again}"),
        Event::ServerRestartRequested if detail.is_empty() => format!("Restart requested{reason}"),
        Event::ServerRestartRequested => format!("Restart requested by {detail}{reason}"),
        Event::RestartMarkerWritten => format!("Restart marker written to {detail}"),
        Event::ReloadFailed => format!("ERROR: reload failed{reason}: {detail}"),
        Event::GaveUp => format!("ERROR: gave up on the MCP server: {detail}"),
        Event::ServerRestartVerified => format!("Restart verification: {detail}"),
        Event::RestartMarkerFailed => format!("WARNING: the restart marker could not be written{reason}: {detail}"),
        Event::AuditDegraded | Event::ProtocolNoted | Event::ConversationNoted => detail.to_owned(),
        Event::WatchMuted => format!(
            "WARNING: `{detail}` changed right after each of the last starts and causes no reload for now; \
             list it in .gitignore if the server writes it"
        ),
        Event::WatchUnmuted => format!("`{detail}` causes reloads again"),
        Event::ServerHung => format!("ERROR: MCP server hung{pid}: {detail}; it is replaced"),
        Event::ServerTooLarge => format!("WARNING: MCP server uses too much memory{pid}: {detail}; it is replaced"),
        Event::CallEnded => {
            let outcome = record.gateway.as_ref().and_then(|of| of.outcome);
            format!("Call ended: {}", outcome.unwrap_or_default())
        }
        Event::SchemaUnchecked => {
            let tool = record.gateway.as_ref().and_then(|of| of.tool.as_deref()).unwrap_or_default();
            format!("WARNING: the arguments of `{tool}` are not checked, as its schema cannot be used{reason}")
        }
        Event::Switched => format!("{detail}{reason}"),
        Event::Configured => format!("Configuration in force: {detail}"),
        Event::RequestRefused => {
            let of = record.gateway.as_deref().cloned().unwrap_or_default();
            let kind = of.outcome.unwrap_or_default();
            let from = of.peer.map(|peer| format!(" from {peer}")).unwrap_or_default();
            let more = of.suppressed.filter(|count| *count > 0);
            let more = more.map(|count| format!(" ({count} more of this kind were only counted)")).unwrap_or_default();
            format!("Refused a request{from}: {kind}{reason}{more}")
        }
        Event::OperatorRequested => {
            let who = record.gateway.as_ref().and_then(|of| of.who.as_deref()).unwrap_or_default();
            format!("Requested by {who}: {detail}{reason}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use outlast_core::gateway::{Outcome, Who};
    use std::time::Duration;

    /// Whether a line was made for this call or for one like it before, it says the same.
    #[test]
    fn each_call_has_its_own_line() {
        let mut journal = Journal::of_gateway(&Home::nowhere("there is none"), "gate-k3v9q", "gate");
        let who = |name: &str, role: Option<&str>| {
            Rc::new(Who { name: name.into(), role: role.map(str::to_owned), profile: None })
        };
        let called = |outcome, tool: Option<&str>, who: &Rc<Who>, took| Called {
            client: took,
            who: Rc::clone(who),
            method: "tools/call".into(),
            tool: tool.map(Rc::from),
            backend: Some("files".into()),
            outcome,
            took: Duration::from_millis(took),
            is_known: true,
        };
        let (ann, bob) = (who("ann", None), who("bob \"took_ms\":7,", Some("reader")));
        let mut calls = Vec::new();
        for took in [0, 7, 12_345] {
            for who in [&ann, &bob, &Rc::new((*ann).clone())] {
                calls.push(called(Outcome::Answered, Some("files__read"), who, took));
                calls.push(called(Outcome::Answered, Some("files__read"), who, took + 1));
                calls.push(called(Outcome::Failed, Some("files__read"), who, took));
                calls.push(called(Outcome::Failed, None, who, took));
            }
        }
        let (mut lines, nowhere) = (String::new(), Origin::default());
        for call in calls.iter().cycle().take(1_000) {
            let origin = Origin { peer: Some("127.0.0.1:1".into()), session: Some(SessionLabel::Http(0xab)) };
            journal.call_ended(call, if call.client == 7 { &origin } else { &nowhere }, &mut lines);
        }
        assert_eq!(lines.lines().count(), 1_000);
        for (line, call) in lines.lines().zip(calls.iter().cycle()) {
            let line: Value = serde_json::from_str(line).expect("each line is JSON");
            let mut expected: Value = serde_json::from_str(&journal.call_line(call, 0)).unwrap();
            expected["timestamp"] = line["timestamp"].clone();
            expected["props"]["timestamp"] = line["timestamp"].clone();
            if call.client == 7 {
                expected["props"]["peer"] = "127.0.0.1:1".into();
                expected["props"]["session"] = "000000ab".into();
            }
            assert_eq!(line, expected);
        }
    }

    #[test]
    fn the_time_stands_where_it_is_changed() {
        let stamp = record::iso(1_768_314_765_123);
        let of_gateway = OfGateway { who: Some("\"timestamp\":\"x".into()), ..OfGateway::default() };
        let record = Record {
            took: Some(Duration::from_millis(42)),
            gateway: Some(Box::new(of_gateway)),
            ..Record::new(Event::CallEnded)
        };
        let line = record.to_line(&stamp, "outlast.gateway");
        let (stamps, took) = places(&line).unwrap();
        assert_eq!(stamps.map(|at| &line[at..at + 4]), ["123Z", "123Z"]);
        assert_eq!(&line[took], "42");
        let other = line.replace(&stamp, &record::iso(1_768_314_765_007));
        assert_eq!(stamps.map(|at| &other[at..at + 4]), ["007Z", "007Z"]);
    }
}
