//! The tools of outlast itself: their names beside those of the server, and their answers.

use std::time::Instant;

use serde_json::json;

use super::{
    Relay,
    events::{Action, Origin, Reading},
    messages,
    messages::Tool,
    requests::{OpenRequest, Waits},
    restart::Ticket,
};
use crate::{
    message::{Raw, pick, text},
    record,
    record::Record,
};

impl Relay {
    /// The name a tool of ours is listed by: a server that has a tool of that name keeps it.
    pub(super) fn listed_name(&self, tool: Tool) -> String {
        let mut name = tool.name().to_owned();
        for _ in 0..2 {
            if !self.lists.has_tool(&name) {
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

    pub(super) fn call_ours(
        &mut self,
        mut open: Box<OpenRequest>,
        tool: Tool,
        arguments: Option<Raw<'_>>,
        now: Instant,
    ) {
        let modern = self.is_modern();
        let refuse = |words: &str| messages::tool_result(words, None, true, None, modern);
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
                let seq = open.seq();
                open.waits = Waits::Restarting;
                self.requests.insert(open);
                self.requests.set_deadline(seq, Some(now + self.settings.limits.restart.restart_wait));
                self.restart_asked(Ticket::Call(seq), Origin::Tool, reason, force, now);
            }
            Tool::Verify => {
                let since =
                    arguments.and_then(|arguments| pick(arguments, ["since_timestamp"])).and_then(|[since]| since);
                let Some(since) = since.and_then(|since| since.get().parse::<f64>().ok()) else {
                    let words = "`since_timestamp` must be a number: Unix time in seconds.";
                    return self.answer_result(&open, &refuse(words));
                };
                let seq = open.seq();
                open.waits = Waits::Verifying { since };
                self.requests.insert(open);
                self.act(Action::ReadMarker(seq));
            }
            Tool::Status => {
                let status = self.status(now).to_json();
                let result = messages::tool_result(&status.to_string(), Some(&status), false, None, modern);
                self.answer_result(&open, &result);
            }
        }
    }

    pub(super) fn marker_read(&mut self, key: u64, reading: Reading, unix: f64, _now: Instant) {
        let Some(Waits::Verifying { since }) = self.requests.get(key).map(|open| open.waits) else {
            return; // Cancelled meanwhile.
        };
        let open = self.close(key);
        let live = self.servers.slot.live().and_then(|generation| Some((generation, self.servers.get(generation)?)));
        let ready = live.filter(|(_, child)| child.ready.is_some());
        let (current_pid, started) = (ready.map(|(_, child)| child.pid), ready.map(|(_, child)| child.started_unix));
        let generation = ready.map(|(generation, _)| u64::from(generation));
        // What could not be written down is known here all the same.
        let (reading, marker_error) = match (self.reloads.unwritten_marker(), &reading) {
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
                    Some("The last restart was before since_timestamp".to_owned())
                } else if ready.is_none() {
                    let how = self.servers.last_end().map(|end| format!(" ({})", end.how)).unwrap_or_default();
                    Some(format!("A restart was requested, but no server is ready{how}"))
                } else if started.is_some_and(|started| started < timestamp) {
                    Some("A restart was requested, but the current server was started before it".to_owned())
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
        self.record(Record { pid: current_pid, generation, reason, detail: Some(restarted.into()), ..record });
        let result = messages::tool_result(&verdict.to_string(), Some(&verdict), false, None, self.is_modern());
        self.answer_result(&open, &result);
    }
}
