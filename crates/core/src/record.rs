//! One line of the audit log, as a type.
//!
//! The shape is a promise to those who query the log: fields are added, never renamed. Nothing a child wrote is in it,
//! as that may hold secrets.

use std::{borrow::Cow, time::Duration};

use serde::Serialize;

use crate::exit::{Exit, How, RESTART_CODE};

/// The longest free text in a record, in bytes; what is longer is cut there and ends in `…`. It keeps a line short enough
/// for one write to hand it over whole.
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
    /// The marker of a restart could not be written; the restart goes on.
    RestartMarkerFailed,
    /// A server did what the protocol does not allow, or refused what it should grant; the conversation goes on.
    ProtocolNoted,
    /// Something about the conversation that the user may want to act on; no fault of the server or the client.
    ConversationNoted,
    /// A watched file no longer causes reloads, because it changed right after each of the last starts.
    WatchMuted,
    /// It causes reloads again.
    WatchUnmuted,
    /// One call through the gateway left it, one way or another.
    CallEnded,
    /// The schema of a tool cannot be used, so its arguments are not checked.
    SchemaUnchecked,
    /// A tool or a backend was turned off by hand, or on again.
    Switched,
    /// Another configuration is in force. One that was refused is a reload that failed.
    Configured,
    /// A request over HTTP was refused before it reached a backend, or calls were refused too often to write each.
    RequestRefused,
    /// An operator asked for something: over the control socket, by the status page, or by a signal.
    OperatorRequested,
    /// A server hung and is replaced.
    ServerHung,
    /// A server uses more memory than it may and is replaced.
    ServerTooLarge,
}

impl Event {
    pub const ALL: [Event; 26] = [
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
        }
    }
}

/// What happened, and what is known of it; what is not known is left out of the line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub event: Event,
    /// The instance: the name that `ps` shows.
    pub id: Option<String>,
    pub kind: Option<&'static str>,
    pub reason: Option<String>,
    /// The child's, or for events of the instance outlast's own.
    pub pid: Option<u32>,
    pub previous_pid: Option<u32>,
    pub generation: Option<u64>,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    /// The ending in words, or anything else that is to be read rather than queried.
    pub detail: Option<String>,
    pub crashes: Option<u32>,
    pub restarts: Option<u32>,
    pub delay: Option<Duration>,
    pub uptime: Option<Duration>,
    pub took: Option<Duration>,
    /// Records that never reached the log.
    pub lost: Option<u64>,
    /// What is known only of a gateway's backends and calls.
    pub gateway: Option<Box<OfGateway>>,
}

/// What records of a gateway have besides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfGateway {
    /// By name.
    pub backend: Option<String>,
    /// Who called, as authentication found out, and by which right.
    pub who: Option<String>,
    pub role: Option<String>,
    pub method: Option<String>,
    /// As clients see it. Arguments are in no record.
    pub tool: Option<String>,
    pub outcome: Option<&'static str>,
    /// The address that the request came from.
    pub peer: Option<String>,
    /// The first digits of the HTTP session's id, or `stdio`.
    pub session: Option<String>,
    /// Refusals of the same kind before this one that were counted and not written.
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

    /// The backend it is about.
    pub fn backend(&self) -> Option<&str> {
        self.gateway.as_ref()?.backend.as_deref()
    }

    /// Says which backend it is about.
    pub fn of_backend(mut self, name: &str) -> Record {
        self.gateway.get_or_insert_default().backend = Some(name.to_owned());
        self
    }

    /// How the child of this record ended: as numbers where there are any, and in words. An exit for a restart has its
    /// reason, too.
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

    /// The whole line, its line feed included, for one write. `timestamp` is what `iso` makes.
    pub fn to_line(&self, timestamp: &str, logger: &str) -> String {
        let of_gateway = self.gateway.as_deref();
        let text = |of: fn(&OfGateway) -> &Option<String>| of(of_gateway?).as_deref().map(cut);
        let line = Line {
            timestamp,
            level: self.event.level(),
            logger,
            message: self.event.message(),
            props: Props {
                event_type: self.event.name(),
                timestamp,
                id: self.id.as_deref().map(cut),
                kind: self.kind,
                reason: self.reason.as_deref().map(cut),
                pid: self.pid,
                previous_pid: self.previous_pid,
                generation: self.generation,
                exit_code: self.exit_code,
                signal: self.signal,
                detail: self.detail.as_deref().map(cut),
                crashes: self.crashes,
                restarts: self.restarts,
                delay_ms: self.delay.map(millis),
                uptime_ms: self.uptime.map(millis),
                took_ms: self.took.map(millis),
                lost: self.lost,
                backend: text(|of| &of.backend),
                who: text(|of| &of.who),
                role: text(|of| &of.role),
                method: text(|of| &of.method),
                tool: text(|of| &of.tool),
                outcome: of_gateway.and_then(|of| of.outcome),
                suppressed: of_gateway.and_then(|of| of.suppressed),
                peer: text(|of| &of.peer),
                session: text(|of| &of.session),
            },
        };
        let mut text = serde_json::to_string(&line).expect("text and numbers are always JSON");
        text.push('\n');
        text
    }
}

#[derive(Serialize)]
struct Line<'a> {
    timestamp: &'a str,
    level: &'static str,
    logger: &'a str,
    message: &'static str,
    props: Props<'a>,
}

/// The timestamp stands here too, as queries that look at `props` alone expect it there.
#[derive(Serialize)]
struct Props<'a> {
    event_type: &'static str,
    timestamp: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    previous_pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    generation: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    signal: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    crashes: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    restarts: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delay_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uptime_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    took_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backend: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    who: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    method: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    suppressed: Option<u64>,
    // These two stand last: they are put behind lines that many calls share.
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<Cow<'a, str>>,
}

fn cut(text: &str) -> Cow<'_, str> {
    if text.len() <= TEXT_MAX {
        return text.into();
    }
    const MARK: &str = "…";
    let end = (0..=TEXT_MAX - MARK.len()).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    format!("{}{MARK}", &text[..end]).into()
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Milliseconds since 1970 as `2026-01-13T14:32:45.123Z`.
pub fn iso(unix_millis: u64) -> String {
    let (seconds, millis) = (unix_millis / 1000, unix_millis % 1000);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil_from_days(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// Days since 1970 as year, month and day of the Gregorian calendar. Years are taken to begin in March, so that the
/// leap day is the last of its year; an era is 400 years, after which the calendar repeats (Hinnant's algorithm).
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    const DAYS_TO_1970: u64 = 719_468; // From 1 March of the year 0.
    const DAYS_OF_ERA: u64 = 146_097;
    let days = days + DAYS_TO_1970;
    let (era, day_of_era) = (days / DAYS_OF_ERA, days % DAYS_OF_ERA);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day)
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
