//! The status of the server, as a type, for agents, people and programs. Its JSON is the wire format of `server_status` and of
//! the control socket's `state`.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Relay, messages::last_lines, requests::Waits, servers::Current};
use crate::{pace::Figures, record::millis, restarts::Past, slot::Until};

/// How much of the server's stderr the status shows.
const STDERR_LINES_MAX: usize = 40;
const STDERR_BYTES_MAX: usize = 8 << 10;
/// The same for a restart that failed.
const RELOAD_LINES_MAX: usize = 20;
const RELOAD_BYTES_MAX: usize = 4 << 10;

/// What the server does at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Starting,
    /// It runs, and the client has not opened the conversation.
    Started,
    Ready,
    Reloading,
    /// The next start is planned.
    Backoff,
    /// It left on purpose; the next request starts it.
    Stopped,
    GivenUp,
    /// Outlast is leaving.
    Stopping,
}

impl State {
    /// Its name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Started => "started",
            State::Ready => "ready",
            State::Reloading => "reloading",
            State::Backoff => "backoff",
            State::Stopped => "stopped",
            State::GivenUp => "given_up",
            State::Stopping => "stopping",
        }
    }
}

#[derive(Debug, Clone)]
pub struct Status {
    pub id: String,
    pub name: String,
    pub state: State,
    pub pid: Option<u32>,
    pub generation: Option<u32>,
    pub uptime: Option<Duration>,
    /// How many children have taken the place of another.
    pub restarts: u32,
    pub crashes: u32,
    pub traffic: Traffic,
    pub draining: usize,
    /// How long until the next start.
    pub next_try: Option<Duration>,
    /// The last ends, oldest first, each with its JSON as of now.
    pub last_exits: Vec<Past>,
    pub last_exit: Option<String>,
    /// Changed files that cause no reload for now.
    pub muted: Vec<String>,
    pub stderr_tail: String,
    pub last_reload: Option<LastReloadStatus>,
    pub restart: Option<RestartStatus>,
    pub noted: Vec<String>,
    /// The moment that the ages are counted to.
    pub now: Instant,
}

/// Requests and lines on their way.
#[derive(Debug, Clone)]
pub struct Traffic {
    pub in_flight: usize,
    pub held: usize,
    pub figures: Figures,
    pub is_stalled: bool,
    /// The age of the oldest request that a child holds.
    pub oldest_request: Option<Duration>,
    /// The bytes that wait for the serving child, once they are at the bound.
    pub queued_bytes: Option<usize>,
    /// Lines on its stdout that were no messages.
    pub stdout_not_json: u64,
}

/// How the last restart that was asked for went.
#[derive(Debug, Clone)]
pub struct LastReloadStatus {
    pub reason: String,
    pub ago: Duration,
    pub marker_error: Option<String>,
    /// Why it failed, with the stderr of the new server or the output of the build.
    pub failure: Option<(String, Vec<String>)>,
}

/// A restart that runs.
#[derive(Debug, Clone)]
pub struct RestartStatus {
    pub reason: String,
    pub running: Duration,
    pub step: &'static str,
}

impl Relay {
    /// How the server does, for agents and people alike.
    pub fn status(&self, now: Instant) -> Status {
        let current = self.servers.slot.child();
        let started = current.and_then(|generation| Some(self.servers.get(generation)?.started));
        let next_try = match *self.servers.slot.current() {
            Current::Down { at } => Some(at.saturating_duration_since(now)),
            _ => None,
        };
        let mut stderr = current.map(|generation| self.servers.stderr(generation)).unwrap_or_default();
        let last_end = self.servers.last_end();
        if let Some(end) = last_end.filter(|_| stderr.is_empty()) {
            stderr.clone_from(&end.stderr);
        }
        Status {
            id: self.settings.id.clone(),
            name: self.settings.name.clone(),
            state: self.state(),
            pid: current.and_then(|generation| self.servers.pid(generation)),
            generation: self.servers.slot.last_child(),
            uptime: started.map(|started| now.saturating_duration_since(started)),
            restarts: self.servers.slot.restarts().restarts(),
            crashes: self.servers.slot.restarts().crashes(now),
            traffic: self.traffic(now),
            draining: self.servers.draining().len(),
            next_try,
            last_exits: self.servers.slot.restarts().recent().cloned().collect(),
            last_exit: last_end.map(|end| end.how.to_string()),
            muted: self.muted_files(),
            stderr_tail: last_lines(&stderr, STDERR_LINES_MAX, STDERR_BYTES_MAX).join("\n"),
            last_reload: self.reloads.last_status(now),
            restart: self.reloads.status(now),
            noted: self.notes.to_vec(),
            now,
        }
    }

    fn traffic(&self, now: Instant) -> Traffic {
        Traffic {
            in_flight: self.requests.iter().filter(|open| matches!(open.waits, Waits::OnServer(_))).count(),
            held: self.requests.held_len(),
            figures: self.pace.figures(now),
            is_stalled: self.is_stalling(now),
            oldest_request: self.oldest_request(now),
            queued_bytes: self.queued_bytes(),
            stdout_not_json: self.dropped.not_json,
        }
    }

    fn state(&self) -> State {
        match self.servers.slot.current() {
            Current::None => State::Starting,
            _ if self.is_leaving() => State::Stopping,
            Current::Serving(_) if self.reloads.is_running() => State::Reloading,
            Current::Serving(_) => State::Ready,
            Current::Fresh(_) => State::Started,
            Current::Replaying(_) => State::Starting,
            Current::Down { .. } if self.servers.is_starting() => State::Starting,
            Current::Down { .. } => State::Backoff,
            Current::GivenUp { until: Until::Called, .. } => State::Stopped,
            Current::GivenUp { .. } => State::GivenUp,
        }
    }
}

impl Status {
    pub fn to_json(&self) -> Value {
        let Traffic { figures, .. } = &self.traffic;
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        let in_ms = |took: Option<Duration>| took.map(|took| took.as_secs_f64() * 1e3);
        let mut status = json!({
            "id": self.id,
            "name": self.name,
            "state": self.state.name(),
            "pid": self.pid,
            "generation": self.generation,
            "uptime_s": seconds(self.uptime),
            "restarts": self.restarts,
            "crashes": self.crashes,
            "in_flight": self.traffic.in_flight,
            "calls": figures.answered,
            "calls_per_s": figures.per_second,
            "p50_ms": in_ms(figures.p50),
            "p99_ms": in_ms(figures.p99),
            "stalled": self.traffic.is_stalled,
            "oldest_request_s": seconds(self.traffic.oldest_request),
            "held": self.traffic.held,
            "draining": self.draining,
            "next_try_s": seconds(self.next_try),
            "last_exits": self.last_exits.iter().map(|past| past.to_json(self.now)).collect::<Vec<Value>>(),
            "muted": self.muted,
            "stderr_tail": self.stderr_tail,
        });
        let mut add = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                status[name] = value;
            }
        };
        add("last_exit", self.last_exit.as_ref().map(|how| json!(how)));
        add("queued_bytes", self.traffic.queued_bytes.map(|bytes| json!(bytes)));
        add("stdout_not_json", Some(self.traffic.stdout_not_json).filter(|lines| *lines > 0).map(|lines| json!(lines)));
        add("last_reload", self.last_reload.as_ref().map(LastReloadStatus::to_json));
        add("restart", self.restart.as_ref().map(RestartStatus::to_json));
        add("noted", (!self.noted.is_empty()).then(|| json!(self.noted)));
        status
    }
}

impl LastReloadStatus {
    fn to_json(&self) -> Value {
        let mut status = json!({
            "ok": self.failure.is_none(),
            "reason": self.reason,
            "seconds_ago": self.ago.as_secs_f64(),
        });
        if let Some(why) = &self.marker_error {
            status["marker_error"] = json!(why);
        }
        if let Some((why, stderr)) = &self.failure {
            status["error"] = json!(why);
            status["stderr_tail"] = json!(last_lines(stderr, RELOAD_LINES_MAX, RELOAD_BYTES_MAX).join("\n"));
        }
        status
    }
}

impl RestartStatus {
    fn to_json(&self) -> Value {
        let running = millis(self.running);
        json!({"reason": self.reason, "running_ms": running, "step": self.step})
    }
}
