//! Our own tools: their names beside the server's, and what they answer.

use super::*;
use crate::message::{Raw, pick, text};
use serde_json::json;

impl Relay {
    /// The name a tool of ours is listed by: a server that has a tool of that name keeps it.
    pub(super) fn listed_name(&self, tool: Tool) -> String {
        let mut name = tool.name().to_owned();
        for _ in 0..2 {
            if !self.child_tools.contains(&name) {
                break;
            }
            name = format!("outlast_{name}");
        }
        name
    }

    pub(super) fn our_names(&self) -> [String; 3] {
        Tool::ALL.map(|tool| self.listed_name(tool))
    }

    pub(super) fn our_tool(&self, name: &str) -> Option<Tool> {
        if !self.settings.tools {
            return None;
        }
        // Names of ours are few and end alike, which spares most calls the rest.
        let tool = Tool::ALL.into_iter().find(|tool| name.ends_with(tool.name()))?;
        (self.listed_name(tool) == name).then_some(tool)
    }

    /// Our definitions, as the inside of a JSON array.
    pub(super) fn our_definitions(&self) -> String {
        if !self.settings.tools {
            return String::new();
        }
        let definitions: Vec<String> =
            Tool::ALL.into_iter().map(|tool| tool.definition(&self.listed_name(tool), &self.settings.name)).collect();
        definitions.join(",")
    }

    pub(super) fn call_ours(&mut self, mut open: Box<Open>, tool: Tool, arguments: Option<Raw<'_>>, now: Instant) {
        let modern = self.is_modern();
        let refuse = |words: &str| words::tool_result(words, None, true, None, modern);
        if arguments.is_some_and(|arguments| !matches!(arguments.get().as_bytes(), b"null" | [b'{', ..])) {
            return self.answer_result(&open, &refuse("The arguments must be an object."));
        }
        match tool {
            Tool::Restart => {
                let [reason, force] =
                    arguments.and_then(|arguments| pick(arguments, ["reason", "force"])).unwrap_or_default();
                let reason = match reason {
                    None => "code changes".to_owned(),
                    Some(reason) => match text(reason) {
                        Some(reason) => reason,
                        None => return self.answer_result(&open, &refuse("`reason` must be a string.")),
                    },
                };
                let force = match force.map(|force| force.get()) {
                    None | Some("false") => false,
                    Some("true") => true,
                    Some(_) => return self.answer_result(&open, &refuse("`force` must be true or false.")),
                };
                let seq = open.seq;
                open.place = Place::Ours;
                open.deadline = Some(now + self.settings.limits.restart_wait);
                self.insert(open);
                self.bounded.insert(seq);
                self.restart_asked(Ticket::Call(seq), Origin::Tool, reason, force, now);
            }
            Tool::Verify => {
                let since =
                    arguments.and_then(|arguments| pick(arguments, ["since_timestamp"])).and_then(|[since]| since);
                let Some(since) = since.and_then(|since| since.get().parse::<f64>().ok()) else {
                    let words = "`since_timestamp` must be a number: Unix time in seconds.";
                    return self.answer_result(&open, &refuse(words));
                };
                let seq = open.seq;
                open.place = Place::Ours;
                // What it waits for is a file; the number is kept where progress would be.
                open.progress = since;
                self.insert(open);
                self.act(Action::ReadMarker(seq));
            }
            Tool::Status => {
                let status = self.status(now);
                let result = words::tool_result(&status.to_string(), Some(&status), false, None, modern);
                self.answer_result(&open, &result);
            }
        }
    }

    pub(super) fn marker_read(&mut self, key: u64, reading: Reading, unix: f64, _now: Instant) {
        if self.opens.get(&key).is_none_or(|open| open.place != Place::Ours) {
            return; // Cancelled meanwhile.
        }
        let open = self.close(key);
        let since = open.progress;
        let child = self.live().and_then(|n| self.children.get(&n)).filter(|child| child.ready.is_some());
        let current_pid = child.map(|child| child.pid);
        // What could not be written down is known here all the same.
        let (reading, marker_error) = match (&self.unwritten_marker, &reading) {
            (Some(known), Reading::Valid { timestamp, .. }) if known.timestamp <= *timestamp => (reading, None),
            (Some(known), _) => (known.reading(), Some(known.why.clone())),
            (None, _) => (reading, None),
        };
        let mut verdict = match reading {
            Reading::Missing { path } => {
                json!({"restarted": false, "error": "Restart marker not found", "marker_path": path,
                    "current_pid": current_pid})
            }
            Reading::Corrupt { path, error } => {
                json!({"restarted": false, "error": format!("Failed to parse restart marker: {error}"),
                    "marker_path": path, "current_pid": current_pid})
            }
            Reading::Valid { timestamp, pid, reason, iso_time } => {
                let error = if timestamp <= since {
                    Some("The last restart was before that moment".to_owned())
                } else if child.is_none() {
                    let how = self.last_end.as_ref().map(|end| format!(" ({})", end.how)).unwrap_or_default();
                    Some(format!("A restart was asked for, but no server is ready{how}"))
                } else if child.is_some_and(|child| child.started_unix < timestamp) {
                    Some("A restart was asked for, but the server that serves was started before it".to_owned())
                } else {
                    None
                };
                let mut verdict = json!({
                    "restarted": error.is_none(),
                    "restart_timestamp": timestamp,
                    "current_pid": current_pid,
                    "previous_pid": pid,
                    "reason": reason,
                    "time_since_restart": unix - timestamp,
                    "iso_time": iso_time,
                });
                if let Some(error) = error {
                    verdict["error"] = json!(error);
                }
                verdict
            }
        };
        if let Some(why) = marker_error {
            verdict["marker_error"] = json!(why);
        }
        let record = Record::new(record::Event::ServerRestartVerified);
        let restarted = if verdict["restarted"] == true { "restarted" } else { "not restarted" };
        let reason = verdict["reason"].as_str().map(str::to_owned);
        let generation = self.live().filter(|_| current_pid.is_some()).map(u64::from);
        self.record(Record { pid: current_pid, generation, reason, detail: Some(restarted.into()), ..record });
        let result = words::tool_result(&verdict.to_string(), Some(&verdict), false, None, self.is_modern());
        self.answer_result(&open, &result);
    }

    /// How the server does, for agents and people alike.
    pub fn status(&self, now: Instant) -> Value {
        let generation = self.current_generation();
        let child = generation.and_then(|n| self.children.get(&n));
        let next_try = match self.current {
            Current::Down { at } => json!(at.saturating_duration_since(now).as_secs_f64()),
            _ => Value::Null,
        };
        let past: Vec<Value> = self.restarts.recent().map(|past| past.to_json(now)).collect();
        let pace = self.pace.figures(now);
        let in_ms = |took: Option<Duration>| took.map(|took| took.as_secs_f64() * 1e3);
        let stderr = match (child, &self.last_end) {
            (Some(child), _) if !child.stderr.lines.is_empty() => child.stderr.to_vec(),
            (_, Some(end)) => end.stderr.clone(),
            _ => Vec::new(),
        };
        let stderr = words::last_lines(&stderr, STATUS_LINES_MAX, STATUS_BYTES_MAX).join("\n");
        let mut status = json!({
            "id": self.settings.id,
            "name": self.settings.name,
            "state": self.state_name(),
            "pid": child.map(|child| child.pid),
            "generation": generation.or(self.last_generation),
            "uptime_s": child.map(|child| now.saturating_duration_since(child.started).as_secs_f64()),
            "restarts": self.replaced,
            "crashes": self.restarts.crashes(now),
            "in_flight": self.opens.values().filter(|open| matches!(open.place, Place::On(_))).count(),
            "calls": pace.answered,
            "calls_per_s": pace.per_second,
            "p50_ms": in_ms(pace.p50),
            "p99_ms": in_ms(pace.p99),
            "stalled": self.is_stalling(now),
            "oldest_request_s": self.oldest_request(now).map(|age| age.as_secs_f64()),
            "held": self.held.len(),
            "draining": self.draining.len(),
            "next_try_s": next_try,
            "last_exits": past,
            "muted": self.muted_files(),
            "stderr_tail": stderr,
        });
        if let Some(end) = &self.last_end {
            status["last_exit"] = json!(end.how.to_string());
        }
        if let Some(bytes) = self.queued_bytes() {
            status["queued_bytes"] = json!(bytes);
        }
        if self.dropped.not_json > 0 {
            status["stdout_not_json"] = json!(self.dropped.not_json);
        }
        if let Some(reload) = self.last_reload_status(now) {
            status["last_reload"] = reload;
        }
        if let Some(restart) = self.restart_status(now) {
            status["restart"] = restart;
        }
        if !self.oddities.is_empty() {
            status["noted"] = json!(self.oddities);
        }
        status
    }

    fn state_name(&self) -> &'static str {
        match &self.current {
            Current::None => "starting",
            _ if self.is_leaving() => "stopping",
            Current::Serving(_) if self.restart.is_some() => "reloading",
            Current::Serving(_) => "ready",
            Current::Fresh(_) => "started",
            Current::Replaying(_) => "starting",
            Current::Down { .. } if self.starting.is_some() => "starting",
            Current::Down { .. } => "backoff",
            Current::GivenUp { callable: true, .. } => "stopped",
            Current::GivenUp { .. } => "given_up",
        }
    }
}

const STATUS_LINES_MAX: usize = 40;
const STATUS_BYTES_MAX: usize = 8 << 10;
