//! One line of the audit log, as a type.
//!
//! The format is stable for programs that query the log: fields are added, never renamed. It contains no output of a
//! child, because that may hold secrets.

use std::{borrow::Cow, time::Duration};

use serde::Serialize;
use time::OffsetDateTime;

use crate::{
    cut::head,
    exit::{Exit, How, RESTART_CODE},
    message::quote,
};

/// The longest free text in a record, in bytes; longer text is cut there and ends in `…`. A line is short enough to
/// be written in one write.
pub const TEXT_MAX: usize = 2048;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    InstanceStarted,
    InstanceEnded,
    ServerRestartRequested,
    RestartMarkerWritten,
    ServerExiting,
    ServerStarted,
    ServerStopped,
    ServerCrashed,
    RestartThrottled,
    ReloadFailed,
    GaveUp,
    ServerRestartVerified,
    /// Records were lost before this one: the log could not keep up or could not be written.
    AuditDegraded,
    /// The marker of a restart could not be written; the restart continues.
    RestartMarkerFailed,
    /// A server did something that the protocol does not allow, or refused a request that it should accept; the
    /// conversation continues.
    ProtocolNoted,
    /// A fact about the conversation that the user may want to act on; neither the server nor the client is at fault.
    ConversationNoted,
    /// A watched file no longer causes reloads, because it changed right after each of the last starts.
    WatchMuted,
    /// The file causes reloads again.
    WatchUnmuted,
    /// A call through the gateway ended, with any outcome.
    CallEnded,
    /// The schema of a tool cannot be used, so its arguments are not checked.
    SchemaUnchecked,
    /// An operator turned a tool or a backend off, or on again.
    Switched,
    /// A new configuration is in force. A refused configuration is recorded as a failed reload.
    Configured,
    /// A request over HTTP was refused before it reached a backend, or calls were refused too often for a record
    /// each.
    RequestRefused,
    /// An operator made a request: over the control socket, on the status page, or by a signal.
    OperatorRequested,
    /// A server hung and is replaced.
    ServerHung,
    /// A server exceeds its memory limit and is replaced.
    ServerTooLarge,
    /// The instance continues as another program.
    Upgraded,
    /// An upgrade came to nothing; the program that ran before continues.
    UpgradeFailed,
}

impl Event {
    pub const ALL: [Event; 28] = [
        Event::InstanceStarted,
        Event::InstanceEnded,
        Event::ServerRestartRequested,
        Event::RestartMarkerWritten,
        Event::ServerExiting,
        Event::ServerStarted,
        Event::ServerStopped,
        Event::ServerCrashed,
        Event::RestartThrottled,
        Event::ReloadFailed,
        Event::GaveUp,
        Event::ServerRestartVerified,
        Event::AuditDegraded,
        Event::RestartMarkerFailed,
        Event::ProtocolNoted,
        Event::ConversationNoted,
        Event::WatchMuted,
        Event::WatchUnmuted,
        Event::CallEnded,
        Event::SchemaUnchecked,
        Event::Switched,
        Event::Configured,
        Event::RequestRefused,
        Event::OperatorRequested,
        Event::ServerHung,
        Event::ServerTooLarge,
        Event::Upgraded,
        Event::UpgradeFailed,
    ];

    /// The `event_type` that queries look for.
    pub fn name(self) -> &'static str {
        self.words().0
    }

    pub fn level(self) -> &'static str {
        self.words().1
    }

    pub fn message(self) -> &'static str {
        self.words().2
    }

    #[rustfmt::skip]
    fn words(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Event::InstanceStarted        => ("instance_started",         "INFO",    "Instance started"),
            Event::InstanceEnded          => ("instance_ended",           "INFO",    "Instance ended"),
            Event::ServerRestartRequested => ("server_restart_requested", "INFO",    "Server restart requested"),
            Event::RestartMarkerWritten   => ("restart_marker_written",   "INFO",    "Restart marker written"),
            Event::ServerExiting          => ("server_exiting",           "INFO",    "Server exiting for restart"),
            Event::ServerStarted          => ("server_started",           "INFO",    "Server started"),
            Event::ServerStopped          => ("server_stopped",           "INFO",    "Server stopped"),
            Event::ServerCrashed          => ("server_crashed",           "ERROR",   "Server crashed"),
            Event::RestartThrottled       => ("restart_throttled",        "WARNING", "Restart throttled"),
            Event::ReloadFailed           => ("reload_failed",            "ERROR",   "Reload failed"),
            Event::GaveUp                 => ("gave_up",                  "ERROR",   "Gave up on the server"),
            Event::ServerRestartVerified  => ("server_restart_verified",  "INFO",    "Server restart verified"),
            Event::AuditDegraded          => ("audit_degraded",           "WARNING", "Audit records were lost"),
            Event::RestartMarkerFailed    => ("restart_marker_failed",    "WARNING", "Restart marker not written"),
            Event::ConversationNoted      => ("conversation_noted",       "INFO",    "Note about the conversation"),
            Event::WatchMuted             => ("watch_muted",              "WARNING", "Watched file muted"),
            Event::WatchUnmuted           => ("watch_unmuted",            "INFO",    "Watched file unmuted"),
            Event::ProtocolNoted          => ("protocol_noted",           "WARNING", "Unexpected behaviour of the server"),
            Event::CallEnded              => ("call_ended",               "INFO",    "Call ended"),
            Event::SchemaUnchecked        => ("schema_unchecked",         "WARNING", "Arguments of a tool are not checked"),
            Event::Switched               => ("switched",                 "WARNING", "Switched off or on"),
            Event::Configured             => ("configured",               "INFO",    "Configuration in force"),
            Event::RequestRefused         => ("request_refused",          "WARNING", "Request refused"),
            Event::OperatorRequested      => ("operator_requested",       "INFO",    "Operator request"),
            Event::ServerHung             => ("server_hung",              "ERROR",   "Server hung"),
            Event::ServerTooLarge         => ("server_too_large",         "WARNING", "Server uses too much memory"),
            Event::Upgraded               => ("upgraded",                 "INFO",    "Instance upgraded"),
            Event::UpgradeFailed          => ("upgrade_failed",           "ERROR",   "Upgrade failed"),
        }
    }
}

/// An event and its known details; unknown details are left out of the line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub event: Event,
    /// The instance: the name that `ps` shows.
    pub id: Option<String>,
    pub kind: Option<&'static str>,
    pub reason: Option<String>,
    /// The pid of the child, or of outlast for events of the instance.
    pub pid: Option<u32>,
    pub previous_pid: Option<u32>,
    pub generation: Option<u64>,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    /// The end in words, or other text for people.
    pub detail: Option<String>,
    pub crashes: Option<u32>,
    pub restarts: Option<u32>,
    pub delay: Option<Duration>,
    pub uptime: Option<Duration>,
    pub took: Option<Duration>,
    /// How many records were lost before this one.
    pub lost: Option<u64>,
    /// The details that only backends and calls of a gateway have.
    pub gateway: Option<Box<OfGateway>>,
}

/// Further fields of records of a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfGateway {
    /// By name.
    pub backend: Option<String>,
    /// The client that called, as authentication identified it, and by which right.
    pub who: Option<String>,
    pub role: Option<String>,
    pub method: Option<String>,
    /// The name that clients see. Arguments are in no record.
    pub tool: Option<String>,
    pub outcome: Option<&'static str>,
    /// The address that the request came from.
    pub peer: Option<String>,
    /// The first digits of the HTTP session id, or `stdio`.
    pub session: Option<String>,
    /// Earlier refusals of the same kind that were counted and not written.
    pub suppressed: Option<u64>,
}

impl Record {
    pub fn new(event: Event) -> Record {
        Record {
            event,
            id: None,
            kind: None,
            reason: None,
            pid: None,
            previous_pid: None,
            generation: None,
            exit_code: None,
            signal: None,
            detail: None,
            crashes: None,
            restarts: None,
            delay: None,
            uptime: None,
            took: None,
            lost: None,
            gateway: None,
        }
    }

    /// The backend of this record.
    pub fn backend(&self) -> Option<&str> {
        self.gateway.as_ref()?.backend.as_deref()
    }

    /// Sets the backend of this record.
    pub fn of_backend(mut self, name: &str) -> Record {
        self.gateway.get_or_insert_default().backend = Some(name.to_owned());
        self
    }

    /// Sets how the child of this record ended: as numbers where there are any, and in words. An exit for a restart
    /// has its reason, too.
    pub fn ended(mut self, how: &How) -> Record {
        match how.exit() {
            Some(Exit::Code(code)) => self.exit_code = Some(*code),
            Some(Exit::Signal(signal)) => self.signal = Some(*signal),
            None => {}
        }
        self.detail = Some(how.to_string());
        if self.event == Event::ServerExiting && self.reason.is_none() {
            self.reason = Some(match how {
                How::Exited(Exit::Code(RESTART_CODE)) => {
                    "the server exited with code 42, which asks for a restart".into()
                }
                how => format!("the server {how}"),
            });
        }
        self
    }

    /// The whole line with its line feed, for one write. `timestamp` has the format of `iso`, and is repeated in `props`, for
    /// queries that read these alone.
    pub fn to_line(&self, timestamp: &str, logger: &str) -> String {
        let mut props = Members::default();
        props.add("event_type", Some(self.event.name()));
        props.add("timestamp", Some(timestamp));
        props.add_text("id", &self.id);
        props.add("kind", self.kind);
        props.add_text("reason", &self.reason);
        props.add("pid", self.pid);
        props.add("previous_pid", self.previous_pid);
        props.add("generation", self.generation);
        props.add("exit_code", self.exit_code);
        props.add("signal", self.signal);
        props.add_text("detail", &self.detail);
        props.add("crashes", self.crashes);
        props.add("restarts", self.restarts);
        props.add("delay_ms", self.delay.map(millis));
        props.add("uptime_ms", self.uptime.map(millis));
        props.add("took_ms", self.took.map(millis));
        props.add("lost", self.lost);
        if let Some(of) = &self.gateway {
            props.add_text("backend", &of.backend);
            props.add_text("who", &of.who);
            props.add_text("role", &of.role);
            props.add_text("method", &of.method);
            props.add_text("tool", &of.tool);
            props.add("outcome", of.outcome);
            props.add("suppressed", of.suppressed);
            // Last: these are appended to lines that many calls share.
            props.add_text("peer", &of.peer);
            props.add_text("session", &of.session);
        }
        let (level, message) = (self.event.level(), self.event.message());
        let (logger, props) = (quote(logger), props.0);
        format!(
            r#"{{"timestamp":"{timestamp}","level":"{level}","logger":{logger},"message":"{message}","props":{{{props}}}}}"#
        ) + "\n"
    }
}

/// The members of a JSON object, in order. What is unknown is left out.
#[derive(Default)]
struct Members(String);

impl Members {
    fn add(&mut self, name: &str, value: Option<impl Serialize>) {
        let Some(value) = value else { return };
        let comma = if self.0.is_empty() { "" } else { "," };
        let value = serde_json::to_string(&value).expect("text and numbers are always JSON");
        self.0 += &format!(r#"{comma}"{name}":{value}"#);
    }

    fn add_text(&mut self, name: &str, text: &Option<String>) {
        self.add(name, text.as_deref().map(cut));
    }
}

fn cut(text: &str) -> Cow<'_, str> {
    if text.len() <= TEXT_MAX {
        return text.into();
    }
    const MARK: &str = "…";
    format!("{}{MARK}", head(text, TEXT_MAX - MARK.len())).into()
}

/// Whole milliseconds.
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Milliseconds since 1970 as `2026-01-13T14:32:45.123Z`; at most the end of the year 9999.
pub fn iso(unix_millis: u64) -> String {
    const LAST: u64 = 253_402_300_799_999;
    let nanos = i128::from(unix_millis.min(LAST)) * 1_000_000;
    let at = OffsetDateTime::from_unix_timestamp_nanos(nanos).expect("every year to 9999 is in range");
    let (year, month, day) = at.to_calendar_date();
    let (hour, minute, second, millis) = at.to_hms_milli();
    let month = u8::from(month);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// Seconds since 1970 of such a text.
pub fn unix_seconds(iso: &str) -> Option<i64> {
    let number = |from: usize, to: usize| iso.get(from..to)?.parse::<u16>().ok();
    let small = |from: usize| u8::try_from(number(from, from + 2)?).ok();
    let month = time::Month::try_from(small(5)?).ok()?;
    let date = time::Date::from_calendar_date(number(0, 4)?.into(), month, small(8)?).ok()?;
    let at = date.with_hms(small(11)?, small(14)?, small(17)?).ok()?;
    Some(at.assume_utc().unix_timestamp())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    const NOW: &str = "2026-01-13T14:32:45.123Z";

    #[test]
    fn a_record_is_one_line_of_a_known_shape() {
        let requested = Record {
            reason: Some("Load new GitConfig implementation".into()),
            pid: Some(12345),
            ..Record::new(Event::ServerRestartRequested)
        };
        let crashed = Record {
            id: Some("github".into()),
            kind: Some("mcp"),
            pid: Some(7),
            generation: Some(3),
            crashes: Some(2),
            delay: Some(Duration::from_millis(1500)),
            uptime: Some(Duration::from_secs(61)),
            ..Record::new(Event::ServerCrashed).ended(&How::Exited(Exit::Signal(9)))
        };
        let gave_up = Record::new(Event::GaveUp).ended(&How::Exited(Exit::Code(1)));
        let noted = Record { detail: Some("a \"quoted\"\nword".into()), ..Record::new(Event::ProtocolNoted) };
        #[rustfmt::skip]
        let table = [
            (requested, r#"{"timestamp":"2026-01-13T14:32:45.123Z","level":"INFO","logger":"outlast.mcp","message":"Server restart requested","props":{"event_type":"server_restart_requested","timestamp":"2026-01-13T14:32:45.123Z","reason":"Load new GitConfig implementation","pid":12345}}"#),
            (crashed,   r#"{"timestamp":"2026-01-13T14:32:45.123Z","level":"ERROR","logger":"outlast.mcp","message":"Server crashed","props":{"event_type":"server_crashed","timestamp":"2026-01-13T14:32:45.123Z","id":"github","kind":"mcp","pid":7,"generation":3,"signal":9,"detail":"signal 9 (SIGKILL)","crashes":2,"delay_ms":1500,"uptime_ms":61000}}"#),
            (gave_up,   r#"{"timestamp":"2026-01-13T14:32:45.123Z","level":"ERROR","logger":"outlast.mcp","message":"Gave up on the server","props":{"event_type":"gave_up","timestamp":"2026-01-13T14:32:45.123Z","exit_code":1,"detail":"exit code 1"}}"#),
            (noted,     r#"{"timestamp":"2026-01-13T14:32:45.123Z","level":"WARNING","logger":"outlast.mcp","message":"Unexpected behaviour of the server","props":{"event_type":"protocol_noted","timestamp":"2026-01-13T14:32:45.123Z","detail":"a \"quoted\"\nword"}}"#),
        ];
        for (record, line) in table {
            assert_eq!(record.to_line(NOW, "outlast.mcp"), format!("{line}\n"));
        }
    }

    #[test]
    fn every_event_has_a_name_of_its_own() {
        let names: std::collections::HashSet<_> = Event::ALL.iter().map(|event| event.name()).collect();
        assert_eq!(names.len(), Event::ALL.len());
        for event in Event::ALL {
            let line: Value = serde_json::from_str(&Record::new(event).to_line(NOW, "outlast.mcp")).unwrap();
            assert_eq!(line["props"]["event_type"], event.name());
        }
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        #[rustfmt::skip]
        let table = [
            // text                                  kept bytes
            ("x".repeat(TEXT_MAX),                   TEXT_MAX),
            ("x".repeat(TEXT_MAX + 1),               TEXT_MAX),
            ("é".repeat(TEXT_MAX),                   TEXT_MAX - 1),
            ("🦀".repeat(TEXT_MAX),                  TEXT_MAX - 1),
        ];
        for (reason, kept) in table {
            let whole = reason.len() == kept;
            let record = Record { reason: Some(reason), ..Record::new(Event::ReloadFailed) };
            let line: Value = serde_json::from_str(&record.to_line(NOW, "outlast.mcp")).unwrap();
            let text = line["props"]["reason"].as_str().unwrap();
            assert_eq!((text.len(), !text.ends_with('…')), (kept, whole));
        }
    }

    #[test]
    fn a_written_time_is_read_back() {
        for millis in [0, 1_768_314_765_123, 253_402_300_799_999] {
            assert_eq!(unix_seconds(&iso(millis)), i64::try_from(millis / 1000).ok());
        }
        for text in ["", "2026", "2026-13-01T00:00:00.000Z", "2026-01-01T25:00:00.000Z", "text that is long enough"] {
            assert_eq!(unix_seconds(text), None, "{text}");
        }
    }

    #[test]
    fn time_is_written_as_iso() {
        #[rustfmt::skip]
        let table = [
            (0,                  "1970-01-01T00:00:00.000Z"),
            (999,                "1970-01-01T00:00:00.999Z"),
            (86_399_999,         "1970-01-01T23:59:59.999Z"),
            (86_400_000,         "1970-01-02T00:00:00.000Z"),
            (951_782_399_000,    "2000-02-28T23:59:59.000Z"),
            (951_782_400_000,    "2000-02-29T00:00:00.000Z"),
            (951_868_800_000,    "2000-03-01T00:00:00.000Z"),
            (1_705_158_765_123,  "2024-01-13T15:12:45.123Z"),
            (1_709_164_800_000,  "2024-02-29T00:00:00.000Z"),
            (1_735_689_599_999,  "2024-12-31T23:59:59.999Z"),
            (1_768_314_765_123,  "2026-01-13T14:32:45.123Z"),
            (4_107_542_400_000,  "2100-03-01T00:00:00.000Z"),
            (4_107_456_000_000,  "2100-02-28T00:00:00.000Z"),
            (253_402_300_799_999, "9999-12-31T23:59:59.999Z"),
        ];
        for (millis, text) in table {
            assert_eq!(iso(millis), text);
        }
    }
}
