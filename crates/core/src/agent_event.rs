//! What an agent reports about itself through its hooks, and the settings that make claude report it. The driver starts
//! the agent with these settings and passes each report on; this module reads no file and runs no process.
//!
//! The path of a report: claude runs the hook's command, `outlast agent-event`, with the event as JSON on its stdin; the
//! command sends it to the session's control socket (method `agent_event`); the driver hands it to [`Report::read`] and
//! gives the result to each machine that needs it. An agent without hooks, or a wrapper that drops `--settings`, sends no
//! report: every user of a report needs another source for that case.

use serde_json::{Map, Value, json};

use crate::cut::head;

/// The events that claude is asked for. Each one costs a process start in claude's turn.
pub const CLAUDE_HOOKS: [&str; 5] = ["SessionStart", "SessionEnd", "UserPromptSubmit", "Stop", "Notification"];
/// Seconds after which claude gives a hook up. The command has a shorter limit of its own.
pub const HOOK_TIMEOUT_S: u64 = 10;

/// One report of one agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The conversation the agent is in.
    pub conversation: String,
    pub what: ReportKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReportKind {
    /// The agent is now in this conversation: at its start, or after `/clear`, `/resume` or a compaction.
    Began { source: String },
    /// The agent has left this conversation.
    Left { reason: String },
    /// A turn was submitted, with this text.
    Prompt { text: String, bytes: usize },
    /// The turn is over; the agent waits for the next. `answer`: what it said last, and `bytes` of the whole, of which
    /// this may be only the beginning.
    TurnEnded { answer: Option<String>, bytes: usize },
    /// The agent wants attention. `kind` is claude's own word, such as `permission_prompt` or `idle_prompt`.
    Notified { kind: Option<String>, message: String },
}

impl Report {
    /// None if it is no report that is known.
    pub fn read(event: &Value) -> Option<Report> {
        let text = |member: &str| event[member].as_str().map(str::to_owned);
        let what = match event["hook_event_name"].as_str()? {
            "SessionStart" => ReportKind::Began { source: text("source").unwrap_or_default() },
            "SessionEnd" => ReportKind::Left { reason: text("reason").unwrap_or_default() },
            "UserPromptSubmit" => {
                let text = text("prompt")?;
                let whole = event["prompt_bytes"].as_u64().and_then(|bytes| usize::try_from(bytes).ok());
                ReportKind::Prompt { bytes: whole.unwrap_or(text.len()), text }
            }
            "Stop" => {
                let answer = text("last_assistant_message");
                let whole =
                    event["last_assistant_message_bytes"].as_u64().and_then(|bytes| usize::try_from(bytes).ok());
                let bytes = whole.unwrap_or_else(|| answer.as_ref().map_or(0, String::len));
                ReportKind::TurnEnded { answer, bytes }
            }
            "Notification" => {
                ReportKind::Notified { kind: text("notification_type"), message: text("message").unwrap_or_default() }
            }
            _ => return None,
        };
        Some(Report { conversation: text("session_id")?, what })
    }

    /// For the log.
    pub fn word(&self) -> &'static str {
        match &self.what {
            ReportKind::Began { .. } => "began",
            ReportKind::Left { .. } => "left",
            ReportKind::Prompt { .. } => "prompt",
            ReportKind::TurnEnded { .. } => "turn_ended",
            ReportKind::Notified { .. } => "notified",
        }
    }
}

/// A claude event with only the members that [`Report::read`] looks at, as long as the limit allows: an event can hold
/// whole tool results. A prompt that is too long is cut, and `prompt_bytes` says how long it was.
pub fn trimmed(event: &Value, prompt_max: usize) -> Value {
    const MEMBERS: [&str; 6] =
        ["hook_event_name", "session_id", "source", "reason", "notification_type", "transcript_path"];
    let mut kept: Map<String, Value> =
        MEMBERS.iter().filter_map(|member| Some(((*member).to_owned(), event.get(member)?.clone()))).collect();
    for member in ["prompt", "message", "last_assistant_message"] {
        if let Some(text) = event[member].as_str() {
            kept.insert(member.to_owned(), json!(head(text, prompt_max)));
            kept.insert(format!("{member}_bytes"), json!(text.len()));
        }
    }
    Value::Object(kept)
}

/// The user's own settings (an empty object if there are none) with a hook of ours added to each event of
/// [`CLAUDE_HOOKS`]. What the user set stays as it is. None if the settings are not what claude would accept.
pub fn with_hooks(settings: Value, command: &str) -> Option<Value> {
    let Value::Object(mut settings) = settings else { return None };
    let hooks = settings.entry("hooks").or_insert_with(|| json!({})).as_object_mut()?;
    for event in CLAUDE_HOOKS {
        let matchers = hooks.entry(event).or_insert_with(|| json!([])).as_array_mut()?;
        matchers.push(json!({"hooks": [{"type": "command", "command": command, "timeout": HOOK_TIMEOUT_S}]}));
    }
    Some(Value::Object(settings))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claude_events_become_reports() {
        let about = |name: &str, member: &str, value: &str| json!({"session_id": "c", "hook_event_name": name, member: value, "tool_response": "x".repeat(9)});
        let read = |event: Value| Report::read(&trimmed(&event, 4)).map(|report| report.what);
        #[rustfmt::skip]
        let table = [
            (about("SessionStart", "source", "clear"),     Some(ReportKind::Began { source: "clear".into() })),
            (about("SessionEnd", "reason", "clear"),       Some(ReportKind::Left { reason: "clear".into() })),
            (about("UserPromptSubmit", "prompt", "abc"),   Some(ReportKind::Prompt { text: "abc".into(), bytes: 3 })),
            (about("UserPromptSubmit", "prompt", "abcéf"), Some(ReportKind::Prompt { text: "abc".into(), bytes: 6 })),
            (about("UserPromptSubmit", "x", ""),           None),
            (about("Stop", "x", ""),                       Some(ReportKind::TurnEnded { answer: None, bytes: 0 })),
            (about("Stop", "last_assistant_message", "abcde"), Some(ReportKind::TurnEnded { answer: Some("abcd".into()), bytes: 5 })),
            (about("Notification", "message", "hi"),       Some(ReportKind::Notified { kind: None, message: "hi".into() })),
            (about("Later", "x", ""),                      None),
            (json!({"hook_event_name": "Stop"}),           None),
            (json!(1),                                     None),
        ];
        for (event, expected) in table {
            assert_eq!(read(event.clone()), expected, "{event}");
        }
    }

    #[test]
    fn the_hooks_of_the_user_stay() {
        let own = json!({"model": "m", "hooks": {"Stop": [{"hooks": [{"type": "command", "command": "mine"}]}]}});
        let merged = with_hooks(own, "ours").unwrap();
        assert_eq!(merged["model"], "m");
        let commands = |event: &str| {
            let matchers = merged["hooks"][event].as_array().unwrap().iter();
            matchers.map(|matcher| matcher["hooks"][0]["command"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(commands("Stop"), ["mine", "ours"]);
        for event in CLAUDE_HOOKS {
            assert_eq!(commands(event).last().unwrap(), "ours");
        }
        for wrong in [json!([]), json!({"hooks": 1}), json!({"hooks": {"Stop": 1}})] {
            assert_eq!(with_hooks(wrong.clone(), "ours"), None, "{wrong}");
        }
    }
}
