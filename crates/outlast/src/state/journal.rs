//! The journal of one instance: it writes to the audit log, to the instance's log file, and to stderr.

use std::{
    borrow::Cow,
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
use outlast_os as os;
use serde_json::Value;

use crate::{
    cli::report::Report,
    state::{audit::Audit, audit_numbers::Numbers, home::Home, logs},
};

/// A log file that would grow beyond this is renamed to `<id>.log.1`, which replaces the previous one.
const LOG_MAX: u64 = 4 << 20;
/// A longer line of a server that is not forwarded to the client is cut.
const DIVERTED_MAX: usize = 4 << 10;

pub(crate) struct Journal {
    id: String,
    name: String,
    audit: Audit,
    log: Option<Log>,
    /// The thread that removes old logs.
    pruning: Option<JoinHandle<()>>,
    tone: Tone,
    /// The secrets that must not be printed.
    mask: Mask,
    /// Removes secrets from lines that a server wrote to its stdout.
    diverted: redact::Lines,
    last_call: Option<LastCall>,
    /// In a cluster each record has a number.
    numbers: Option<Numbers>,
    /// How many lost records the audit log already mentions.
    lost_told: u64,
}

/// The kind of the instance, which decides the form of its lines.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tone {
    /// Sentences, in the log and on stderr.
    Mcp,
    /// The same, with the names of the servers.
    Gateway,
    /// Events with their values, only in the log: the terminal belongs to the agent.
    Session,
}

impl Tone {
    /// The kind of the instance, and the logger name in its records.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Tone::Mcp => ("mcp", "outlast.mcp"),
            Tone::Gateway => ("gateway", "outlast.gateway"),
            Tone::Session => ("session", "outlast.run"),
        }
    }
}

/// The line of the last call that ended. Many calls end within a second, and their lines mostly differ only in the
/// milliseconds.
struct LastCall {
    millis: u64,
    called: Called,
    line: String,
    /// The positions of the milliseconds in its two timestamps.
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
    /// An address, which needs no escaping.
    pub peer: Option<Rc<str>>,
    pub session: Option<SessionLabel>,
}

/// What is recorded of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionLabel {
    Stdio,
    /// For HTTP: the first eight digits of its id. The other 24 stay secret, so the session cannot be taken over.
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
    /// Inserts the origin into the `props` of the last line.
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
            // Writing to a `String` cannot fail.
            let _ = fmt::Write::write_fmt(lines, format_args!(r#","session":"{session}""#));
        }
        lines.push_str(END);
    }
}

struct Log {
    path: PathBuf,
    /// `None` only during a rotation: Windows cannot rename an open file.
    open: Option<(File, logs::Hold)>,
    length: u64,
}

impl Journal {
    pub(crate) fn new(home: &Home, id: &str, name: &str) -> Journal {
        Journal::open(home, id, name, Tone::Mcp)
    }

    pub(crate) fn of_gateway(home: &Home, id: &str, name: &str) -> Journal {
        Journal::open(home, id, name, Tone::Gateway)
    }

    pub(crate) fn of_session(home: &Home, id: &str, name: &str) -> Journal {
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
            diverted: redact::Lines::default(),
            last_call: None,
            numbers: None,
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

    /// From here on each record has an id: the name of this replica and a number that continues where the last process of
    /// this replica stopped. For a gateway in a cluster, before its first record.
    pub(crate) fn number_records(&mut self, replica: &str) {
        let (numbers, stored) = Numbers::begin(self.audit.path(), replica);
        self.numbers = Some(numbers);
        if let Err(error) = stored {
            self.note(&format!("audit logs may be removed before their records are published ({error})"));
        }
    }

    /// The number of the last record that was written, if records have numbers.
    pub(crate) fn last_number(&self) -> Option<u64> {
        self.numbers.as_ref().map(Numbers::written)
    }

    /// The next record has a number above this one.
    pub(crate) fn number_records_after(&mut self, number: u64) {
        self.numbers.iter_mut().for_each(|numbers| numbers.go_on_after(number));
    }

    /// From here on the values of references in these texts are masked.
    pub(crate) fn learn<'a>(&mut self, texts: impl Iterator<Item = &'a Resolved>) {
        texts.for_each(|text| self.mask.learn(text));
    }

    pub(crate) fn mask(&self) -> &Mask {
        &self.mask
    }

    /// Writes to the audit log first, before the action that the record announces; then the line for people. Returns
    /// the line of the audit log, for subscribers.
    pub(crate) fn record(&mut self, mut record: Record) -> String {
        let is_in_order = self.numbers.as_ref().is_none_or(Numbers::are_all_written);
        debug_assert!(is_in_order, "the records of calls are written before a record that follows them");
        let line = self.line(&mut record);
        self.write(&line);
        match record.backend() {
            _ if self.tone == Tone::Session => {}
            Some(backend) => self.note(&format!("{backend}: {}", sentence(&record))),
            None => self.note(&sentence(&record)),
        }
        line
    }

    /// Adds the record of a finished call to a batch. It gets no line for people.
    pub(crate) fn call_ended(&mut self, called: &Called, origin: &Origin, lines: &mut String) {
        self.call_ended_anywhere(called, lines);
        origin.put_into(lines);
    }

    /// The same without the origin.
    fn call_ended_anywhere(&mut self, called: &Called, lines: &mut String) {
        let millis = millis_now();
        if let Some(last) = self.last_call.as_mut().filter(|last| last.is_like(called, millis)) {
            if std::mem::replace(&mut last.millis, millis) != millis {
                let digits = format!("{:03}", millis % 1000);
                last.stamps.into_iter().for_each(|at| last.line.replace_range(at..at + 3, &digits));
            }
            let first = begin_line(&mut self.numbers, lines);
            let (start, end) = (&last.line[first..last.took.start], &last.line[last.took.end..]);
            for part in [start, &called.took.as_millis().to_string(), end] {
                lines.push_str(part);
            }
            return;
        }
        let line = self.call_line(called, millis);
        let first = begin_line(&mut self.numbers, lines);
        lines.push_str(&line[first..]);
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

    fn line(&mut self, record: &mut Record) -> String {
        let (kind, logger) = self.tone.names();
        record.id = Some(match record.backend() {
            Some(backend) => format!("{}/{backend}", self.id),
            None => self.id.clone(),
        });
        record.kind = Some(if record.backend().is_some() { "backend" } else { kind });
        for text in [&mut record.reason, &mut record.detail].into_iter().flatten() {
            *text = redact::text(&self.mask.hide(text)).into_owned();
        }
        let line = record.to_line(&now(), logger);
        let mut numbered = String::new();
        match begin_line(&mut self.numbers, &mut numbered) {
            0 => line,
            first => numbered + &line[first..],
        }
    }

    fn write(&mut self, line: &str) {
        self.numbers.iter_mut().for_each(Numbers::all_written);
        if let Some(complaint) = self.audit.write(line) {
            self.note(&complaint.to_string());
        }
        self.tell_of_lost();
    }

    /// Once the audit log is writable again, records before this line how many records were lost.
    fn tell_of_lost(&mut self) {
        let lost = self.audit.lost();
        if lost > self.lost_told && self.audit.is_writable() {
            let count = lost - self.lost_told;
            self.lost_told = lost;
            let detail = format!("{} could not be written before this one", count_of(count, "record", "records"));
            let mut record =
                Record { lost: Some(count), detail: Some(detail.clone()), ..Record::new(Event::AuditDegraded) };
            let line = self.line(&mut record);
            // If this fails, it is lost and counted like any other record.
            let _ = self.audit.write(&line);
            self.numbers.iter_mut().for_each(Numbers::all_written);
            self.note(&detail);
        }
    }

    /// Writes finished lines of the audit log that announce nothing.
    pub(crate) fn write_many(&mut self, lines: &str) {
        self.numbers.iter_mut().for_each(Numbers::all_written);
        if let Some(complaint) = self.audit.write_many(lines) {
            self.note(&complaint.to_string());
        }
        self.tell_of_lost();
    }

    pub(crate) fn begin(&mut self, command: &str, cwd: &Path) {
        let pid = std::process::id();
        let version = env!("CARGO_PKG_VERSION");
        self.record(Record {
            pid: Some(pid),
            detail: Some(format!("outlast {version}, PID {pid}, in {}: {command}", cwd.display())),
            ..Record::new(Event::InstanceStarted)
        });
    }

    pub(crate) fn end(mut self, code: u8) -> String {
        let record = Record::new(Event::InstanceEnded);
        let line = self.record(Record { pid: Some(std::process::id()), exit_code: Some(code.into()), ..record });
        self.audit.finish();
        if let Some(pruning) = self.pruning.take() {
            // A panic of the thread was already printed.
            let _ = pruning.join();
        }
        os::finish_saying();
        line
    }

    pub(crate) fn ready(&mut self, generation: u32) {
        self.note(&format!("MCP server ready (generation {generation})"));
    }

    /// A line of a child's stderr, and the same without secrets.
    pub(crate) fn stderr(&mut self, text: &str, redacted: &str) {
        let name = self.name.clone();
        self.stderr_of(&name, text, redacted);
    }

    /// A line of a child's stdout that is not forwarded to the client.
    pub(crate) fn diverted(&mut self, line: &[u8], is_json: bool) {
        let name = self.name.clone();
        self.diverted_of(&name, line, is_json);
    }

    /// A line of a backend's stderr, and the same without secrets.
    pub(crate) fn stderr_of(&mut self, backend: &str, text: &str, redacted: &str) {
        // The mask names the reference of a value that it knows, so it sees the line first.
        let text = match self.mask.hide(text) {
            Cow::Owned(masked) => Cow::Owned(masked),
            Cow::Borrowed(_) => Cow::Borrowed(redacted),
        };
        self.say(&format!("[{backend}] {text}"));
    }

    /// A line of a backend's stdout that is no message.
    pub(crate) fn diverted_of(&mut self, backend: &str, line: &[u8], is_json: bool) {
        let end = if line.len() > DIVERTED_MAX { redact::piece_end(line, DIVERTED_MAX) } else { line.len() };
        let text = String::from_utf8_lossy(&line[..end]);
        let tag = if is_json { "not JSON-RPC" } else { "not JSON" };
        let masked = self.mask.hide(text.trim_end());
        let line = format!("[{backend} stdout, {tag}] {}", self.diverted.line(&masked));
        self.say(&line);
    }

    /// The result of a restart that was requested from outside the conversation.
    pub(crate) fn answered(&mut self, result: &Result<Value, Value>) {
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

    /// A line of a session's log: the event and its values.
    pub(crate) fn event(&mut self, event: &str, about: &[(&str, &dyn fmt::Display)]) {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut line = format!("[{epoch}] [supervisor] {event}");
        for (key, value) in about {
            line.push_str(&format!(" {key}={}", word(&value.to_string())));
        }
        self.say(&line);
    }

    /// A line of outlast itself.
    pub(crate) fn note(&mut self, text: &str) {
        if self.tone == Tone::Session {
            return self.event("note", &[("text", &text)]);
        }
        let line = format!("[{}] [SUPERVISOR] {text}", now());
        self.say(&line);
    }

    /// A report, line by line; it indents continuation lines itself.
    pub(crate) fn report(&mut self, report: &Report) {
        report.to_string().trim_end().lines().for_each(|line| self.say(line));
    }

    /// Writes a line without a prefix.
    pub(crate) fn say(&mut self, line: &str) {
        let line = self.mask.hide(line);
        let line = redact::text(&line);
        let line = &*visible::line(&line);
        if self.tone != Tone::Session {
            os::say(line);
        }
        if let Some(log) = &mut self.log
            && log.write(line).is_err()
        {
            // On a full disk only the log is given up.
            self.log = None;
        }
    }
}

/// Writes the number of the next record, if records have numbers. Returns where the rest of the line begins: its brace is
/// written with the number.
fn begin_line(numbers: &mut Option<Numbers>, lines: &mut String) -> usize {
    match numbers {
        None => 0,
        Some(numbers) => {
            numbers.open_line(lines);
            1
        }
    }
}

/// The positions of the end time, to the millisecond, and of the duration in the line of a call.
fn places(line: &str) -> Option<([usize; 2], Range<usize>)> {
    const STAMP: &str = "\"timestamp\":\"";
    const MILLIS: usize = "2026-01-13T14:32:45.".len();
    const TOOK: &str = "\"took_ms\":";
    // Inside a string these quotes would be escaped.
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

/// A value that can be parsed again: in quotes if it is more than one word.
fn word(value: &str) -> String {
    let is_plain = |letter: char| !letter.is_whitespace() && !letter.is_control() && !"\"=\\".contains(letter);
    if !value.is_empty() && value.chars().all(is_plain) { value.to_owned() } else { Value::from(value).to_string() }
}

/// A record as text for people.
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
        // A failed restart used up its number, so numbers can be missing.
        Event::ServerStarted => {
            // A backend that was stopped because it was idle has a new generation, but was not restarted.
            let restart = match record.restarts.filter(|_| record.kind == Some("backend")) {
                Some(restarts) => u64::from(restarts),
                None => generation.saturating_sub(1),
            };
            format!("MCP server running{pid} (restart #{restart}, generation {generation})")
        }
        // The meaning of an exit code is shown only if no stop was requested, so that the restart policy applied.
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
        Event::Upgraded => format!("Upgraded {detail}"),
        Event::UpgradeFailed => format!("ERROR: the upgrade failed: {detail}; the running program continues"),
        Event::CallEnded => {
            let outcome = record.gateway.as_ref().and_then(|of| of.outcome);
            format!("Call ended: {}", outcome.unwrap_or_default())
        }
        Event::SchemaUnchecked => {
            let tool = record.gateway.as_ref().and_then(|of| of.tool.as_deref()).unwrap_or_default();
            format!("WARNING: the arguments of `{tool}` are not checked, because its schema cannot be used{reason}")
        }
        Event::Switched => format!("{detail}{reason}"),
        Event::Configured => format!("Configuration in force: {detail}"),
        Event::RequestRefused => {
            let of = record.gateway.as_deref().cloned().unwrap_or_default();
            let kind = of.outcome.unwrap_or_default();
            let from = of.peer.map(|peer| format!(" from {peer}")).unwrap_or_default();
            let more = of.suppressed.filter(|count| *count > 0);
            let more =
                more.map(|count| format!(" ({count} more of this kind were counted, not logged)")).unwrap_or_default();
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

    /// A line that is made from the previous one equals a line that is made from scratch.
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
    fn in_a_cluster_each_record_has_the_next_number_also_in_the_next_process() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::open(dir.path(), None);
        let path = home.audit().unwrap();
        let called = Called {
            client: 1,
            who: Rc::new(Who { name: "ann".into(), role: None, profile: None }),
            method: "tools/call".into(),
            tool: Some("files__read".into()),
            backend: Some("files".into()),
            outcome: Outcome::Answered,
            took: Duration::from_millis(7),
            is_known: true,
        };
        let origin = Origin { peer: Some("127.0.0.1:1".into()), session: None };
        let mut written = Vec::new();
        for process in 0..3 {
            let mut journal = Journal::of_gateway(&home, "gate-k3v9q", "gate");
            assert_eq!(journal.last_number(), None);
            journal.number_records("east");
            let before = journal.last_number().unwrap();
            written.push(journal.record(Record::new(Event::InstanceStarted)));
            let mut lines = String::new();
            for _ in 0..20 {
                journal.call_ended(&called, &origin, &mut lines);
            }
            assert_eq!(journal.last_number(), Some(before + 1), "the calls are not written yet");
            journal.write_many(&lines);
            assert_eq!(journal.last_number(), Some(before + 21));
            written.extend(lines.split_inclusive('\n').map(str::to_owned));
            written.push(journal.record(Record::new(Event::Configured).of_backend("files")));
            if process == 1 {
                // As after `kill -9` in the middle of a write: the number was used.
                let mut log = fs::OpenOptions::new().append(true).open(&path).unwrap();
                let torn = format!("{{\"id\":\"east-{}\",\"times", before + 23);
                log.write_all(torn.as_bytes()).unwrap();
                written.push(torn + "\n");
            }
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), written.concat());
        let numbers: Vec<u64> = written
            .iter()
            .map(|line| {
                let id = line.strip_prefix("{\"id\":\"east-").unwrap().split('"').next().unwrap();
                id.parse().unwrap()
            })
            .collect();
        let expected: Vec<u64> = (numbers[0]..).take(numbers.len()).collect();
        assert_eq!(numbers, expected);
        for line in written.iter().filter(|line| line.ends_with("}\n")) {
            let line: Value = serde_json::from_str(line).unwrap();
            let is_call = line["props"]["event_type"] == "call_ended";
            assert_eq!(line["props"]["peer"] == "127.0.0.1:1", is_call, "{line}");
            assert_eq!(line["logger"], "outlast.gateway");
        }
    }

    #[test]
    fn numbers_go_on_above_those_of_the_stream() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::of_gateway(&Home::open(dir.path(), None), "gate-k3v9q", "gate");
        journal.number_records("east");
        let first = journal.last_number().unwrap() + 1;
        journal.number_records_after(first + 100);
        let line = journal.record(Record::new(Event::InstanceStarted));
        assert!(line.starts_with(&format!("{{\"id\":\"east-{}\",\"timestamp\":", first + 101)), "{line}");
        journal.number_records_after(first);
        assert_eq!(journal.last_number(), Some(first + 101), "never back");
    }

    #[test]
    fn the_time_is_at_the_position_that_is_patched() {
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
