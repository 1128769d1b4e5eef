//! The answers of instances as types, with the members that readers use. A missing or invalid member counts as
//! absent, and unknown members are ignored.

use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::cluster::Membership;

/// The state of an instance of any kind. Most members are absent for some kinds.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct State {
    #[serde(deserialize_with = "lenient")]
    pub id: String,
    /// `mcp`, `gateway`, `session` or `backend`.
    #[serde(deserialize_with = "lenient")]
    pub kind: String,
    #[serde(deserialize_with = "lenient")]
    pub name: String,
    #[serde(deserialize_with = "lenient")]
    pub state: Option<String>,
    #[serde(deserialize_with = "lenient")]
    pub health: Option<String>,
    /// The process id of the child.
    #[serde(deserialize_with = "lenient")]
    pub pid: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub outlast_pid: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub uptime_s: Option<f64>,
    #[serde(deserialize_with = "lenient")]
    pub generation: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub restarts: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub crashes: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub next_try_s: Option<f64>,
    /// The notice of the agent's usage limit, while it is limited.
    #[serde(deserialize_with = "lenient")]
    pub limit: Option<String>,
    /// The end of the limit, for people.
    #[serde(deserialize_with = "lenient")]
    pub limited_until_text: Option<String>,
    /// A text for a server, an exit code for a session.
    #[serde(deserialize_with = "lenient")]
    pub last_exit: Option<LastExit>,
    /// For a session.
    #[serde(deserialize_with = "lenient")]
    pub last_exit_text: Option<String>,
    /// Oldest first.
    #[serde(deserialize_with = "lenient")]
    pub last_exits: Vec<PastExit>,
    #[serde(deserialize_with = "lenient")]
    pub last_reload: Option<LastReload>,
    /// The restart that is under way.
    #[serde(deserialize_with = "lenient")]
    pub restart: Option<Restarting>,

    #[serde(deserialize_with = "lenient")]
    pub in_flight: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub held: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub draining: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub oldest_request_s: Option<f64>,
    #[serde(deserialize_with = "lenient")]
    pub stalled: bool,
    #[serde(deserialize_with = "lenient")]
    pub calls_per_s: Option<f64>,
    #[serde(deserialize_with = "lenient")]
    pub p50_ms: Option<f64>,
    #[serde(deserialize_with = "lenient")]
    pub muted: Vec<String>,
    #[serde(deserialize_with = "lenient")]
    pub stderr_tail: String,
    /// For a backend.
    #[serde(deserialize_with = "lenient")]
    pub last_stderr: Option<String>,

    #[serde(deserialize_with = "lenient")]
    pub columns: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub rows: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub attached: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub waiting_for_input: bool,
    #[serde(deserialize_with = "lenient")]
    pub stance: Option<String>,
    #[serde(deserialize_with = "lenient")]
    pub conversation: String,
    #[serde(deserialize_with = "lenient")]
    pub document: String,

    #[serde(deserialize_with = "lenient")]
    pub command: String,
    #[serde(deserialize_with = "lenient")]
    pub cwd: String,
    #[serde(deserialize_with = "lenient")]
    pub cwd_source: Option<String>,
    #[serde(deserialize_with = "lenient")]
    pub env_left_out: Vec<String>,
    #[serde(deserialize_with = "lenient")]
    pub log: String,
    #[serde(deserialize_with = "lenient")]
    pub socket: String,

    #[serde(deserialize_with = "lenient")]
    pub listen: String,
    #[serde(deserialize_with = "lenient")]
    pub status_page: String,
    /// For a gateway.
    #[serde(deserialize_with = "lenient")]
    pub backends: Option<Vec<State>>,
    /// For a gateway in a cluster.
    #[serde(deserialize_with = "lenient")]
    pub cluster: Option<Membership>,
    #[serde(deserialize_with = "lenient")]
    pub collisions: Vec<Collision>,
    #[serde(deserialize_with = "lenient")]
    pub collision_count: Option<u64>,
    /// For a server that clients share, or were to share.
    #[serde(deserialize_with = "lenient")]
    pub share: Option<Share>,
    /// For a backend: how many tools it offers, and whether they come from an earlier run.
    #[serde(deserialize_with = "lenient")]
    pub tools: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub stale: bool,
}

impl State {
    pub fn read(state: &Value) -> State {
        State::deserialize(state).unwrap_or_default()
    }

    /// How the last child exited, as a text.
    pub fn last_exit_text(&self) -> Option<&str> {
        match (&self.last_exit_text, &self.last_exit) {
            (Some(words), _) | (None, Some(LastExit::Words(words))) => Some(words),
            _ => None,
        }
    }

    /// The exit status of the last child, as a shell reports it.
    pub fn last_exit_code(&self) -> Option<i64> {
        let last = self.last_exits.last().and_then(|last| last.exit.as_ref());
        match (&self.last_exit, last) {
            (Some(LastExit::Code(code)), _) => Some(*code),
            (_, Some(Exit { code: Some(code), .. })) => Some(*code),
            (_, Some(Exit { signal: Some(signal), .. })) => Some(128 + signal),
            _ => None,
        }
    }

    /// The last reload, if it failed and the server still runs the old code. A server that was started later has
    /// tried the new code.
    pub fn failed_reload(&self) -> Option<&LastReload> {
        let last = self.last_reload.as_ref().filter(|last| last.ok == Some(false))?;
        let is_newer = self.uptime_s.zip(last.seconds_ago).is_some_and(|(uptime, ago)| uptime < ago);
        // A restart of a gateway's backend does not apply its pending configuration.
        (!is_newer || last.pending).then_some(last)
    }
}

/// A client of a shared server.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Client {
    #[serde(deserialize_with = "lenient")]
    pub name: Option<String>,
    #[serde(deserialize_with = "lenient")]
    pub version: Option<String>,
    /// Of its outlast, and of the program that started that.
    #[serde(deserialize_with = "lenient")]
    pub pid: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub parent_pid: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub cwd: String,
    /// Seconds since 1970.
    #[serde(deserialize_with = "lenient")]
    pub since: Option<f64>,
}

/// Which clients share a server.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Share {
    /// `directory`, `user`, `equals` or `own`.
    #[serde(deserialize_with = "lenient")]
    pub scope: String,
    #[serde(deserialize_with = "lenient")]
    pub why_not_all: Option<String>,
    #[serde(deserialize_with = "lenient")]
    pub clients: Vec<Client>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum LastExit {
    Code(i64),
    Words(String),
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PastExit {
    #[serde(deserialize_with = "lenient")]
    pub seconds_ago: Option<f64>,
    #[serde(deserialize_with = "lenient")]
    pub crashed: bool,
    #[serde(deserialize_with = "lenient")]
    pub exit: Option<Exit>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Exit {
    #[serde(deserialize_with = "lenient")]
    pub code: Option<i64>,
    #[serde(deserialize_with = "lenient")]
    pub signal: Option<i64>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct LastReload {
    #[serde(deserialize_with = "lenient")]
    pub ok: Option<bool>,
    #[serde(deserialize_with = "lenient")]
    pub error: String,
    #[serde(deserialize_with = "lenient")]
    pub seconds_ago: Option<f64>,
    #[serde(deserialize_with = "lenient")]
    pub pending: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Restarting {
    #[serde(deserialize_with = "lenient")]
    pub step: Option<String>,
    #[serde(deserialize_with = "lenient")]
    pub reason: String,
}

/// A name that several backends of a gateway offer.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Collision {
    #[serde(deserialize_with = "lenient")]
    pub list: String,
    #[serde(deserialize_with = "lenient")]
    pub name: String,
    #[serde(deserialize_with = "lenient")]
    pub offered_by: String,
    #[serde(deserialize_with = "lenient")]
    pub left_out: String,
}

/// The result of a restart or of a resume, of one server or of several backends.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Restarted {
    /// For a backend, in a list of several.
    #[serde(deserialize_with = "lenient")]
    pub name: String,
    /// False if there was nothing to resume; then `state` is the current state.
    #[serde(deserialize_with = "lenient")]
    pub resumed: Option<bool>,
    #[serde(deserialize_with = "lenient")]
    pub state: Option<String>,
    #[serde(deserialize_with = "lenient")]
    pub error: Option<String>,
    #[serde(deserialize_with = "lenient")]
    pub old_pid: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub new_pid: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub took_ms: u64,
    #[serde(deserialize_with = "lenient")]
    pub tools: Option<ToolChanges>,
    #[serde(deserialize_with = "lenient")]
    pub draining: Option<String>,
    #[serde(deserialize_with = "lenient")]
    pub backends: Option<Vec<Restarted>>,
}

impl Restarted {
    pub fn read(answer: &Value) -> Restarted {
        Restarted::deserialize(answer).unwrap_or_default()
    }

    /// The current state, if there was nothing to resume.
    pub fn nothing_to_resume(&self) -> Option<&str> {
        (self.resumed == Some(false)).then(|| self.state.as_deref().unwrap_or("running"))
    }
}

/// The result of an upgrade in place, or why it is postponed.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct Upgraded {
    #[serde(deserialize_with = "lenient")]
    pub upgraded: bool,
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub previous_version: Option<String>,
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<f64>,
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub postponed: Option<String>,
}

impl Upgraded {
    pub fn read(answer: &Value) -> Upgraded {
        Upgraded::deserialize(answer).unwrap_or_default()
    }
}

/// The tools of a new server, compared with those of its predecessor.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ToolChanges {
    #[serde(deserialize_with = "lenient")]
    pub compared: Option<bool>,
    #[serde(deserialize_with = "lenient")]
    pub added: Vec<String>,
    #[serde(deserialize_with = "lenient")]
    pub removed: Vec<String>,
    #[serde(deserialize_with = "lenient")]
    pub changed: Vec<String>,
}

impl Collision {
    pub fn read_all(collisions: &Value) -> Vec<Collision> {
        Vec::deserialize(collisions).unwrap_or_default()
    }
}

/// The screen of an agent.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ScreenText {
    #[serde(deserialize_with = "lenient")]
    pub history: Vec<String>,
    #[serde(deserialize_with = "lenient")]
    pub text: String,
}

impl ScreenText {
    pub fn read(answer: &Value) -> ScreenText {
        ScreenText::deserialize(answer).unwrap_or_default()
    }
}

/// The result of a text that was sent to an agent.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Sent {
    /// `typed`, `submitted` or `unproven`.
    #[serde(deserialize_with = "lenient")]
    pub result: String,
    /// The text had been sent before, with the same key.
    #[serde(deserialize_with = "lenient")]
    pub repeated: bool,
    #[serde(deserialize_with = "lenient")]
    pub took_ms: u64,
}

impl Sent {
    pub fn read(answer: &Value) -> Sent {
        Sent::deserialize(answer).unwrap_or_default()
    }
}

/// The result of `wait_for`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Waited {
    /// The agent's last answer, if the request waited for the end of a turn.
    #[serde(deserialize_with = "lenient")]
    pub answer: Option<String>,
}

impl Waited {
    pub fn read(answer: &Value) -> Waited {
        Waited::deserialize(answer).unwrap_or_default()
    }
}

/// The end of a session, as an attached terminal is told it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct SessionEnd {
    /// The exit code of the agent.
    #[serde(deserialize_with = "lenient")]
    pub code: Option<u8>,
}

impl SessionEnd {
    pub fn read(frame: &[u8]) -> SessionEnd {
        serde_json::from_slice(frame).unwrap_or_default()
    }
}

/// The result of `switch`, `reload` and `inject`: each answer has some of these members.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Done {
    /// Whether a switch was changed; it may have had this position before.
    pub changed: Value,
    /// What a reload did, as a sentence.
    #[serde(deserialize_with = "lenient")]
    pub detail: Option<String>,
    /// How many bytes were typed.
    #[serde(deserialize_with = "lenient")]
    pub n: u64,
}

impl Done {
    pub fn read(answer: &Value) -> Done {
        Done::deserialize(answer).unwrap_or_default()
    }
}

/// The data of a refused request that commands show.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct RefusalData {
    #[serde(deserialize_with = "lenient")]
    pub hint: Option<String>,
    /// The backends of a gateway that was asked for an unknown one.
    #[serde(deserialize_with = "lenient")]
    pub backends: Vec<String>,
    /// The end of the stderr of a server that did not start.
    #[serde(deserialize_with = "lenient")]
    pub stderr_tail: String,
    /// What an agent showed when a text did not arrive, and whether the text was removed.
    #[serde(deserialize_with = "lenient")]
    pub screen: Option<String>,
    #[serde(deserialize_with = "lenient")]
    pub removed: Option<bool>,
}

impl RefusalData {
    pub fn read(data: &Value) -> RefusalData {
        RefusalData::deserialize(data).unwrap_or_default()
    }
}

/// Reads a member of a record or an answer: a value of another type becomes the default.
pub fn lenient<'de, D: Deserializer<'de>, T: DeserializeOwned + Default>(deserializer: D) -> Result<T, D::Error> {
    Ok(T::deserialize(Value::deserialize(deserializer)?).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_unexpected_member_does_not_affect_the_others() {
        let state = State::read(&json!({
            "state": "ready", "pid": "x", "uptime_s": 3, "restarts": -1, "muted": null, "last_exits": [{"exit": 1}],
            "backends": [{"name": "a", "tools": 2}, {"name": "b", "state": 7}], "later": {"x": []},
        }));
        assert_eq!(state.state.as_deref(), Some("ready"));
        assert_eq!((state.pid, state.uptime_s, state.restarts), (None, Some(3.0), None));
        assert_eq!(state.last_exits, [PastExit::default()]);
        let names: Vec<String> = state.backends.unwrap().into_iter().map(|backend| backend.name).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(State::read(&json!([1])), State::default());
    }

    #[test]
    fn the_last_exit_is_a_code_or_a_text() {
        #[rustfmt::skip]
        let table = [
            (json!({"last_exit": 3, "last_exit_text": "exit code 3"}),                     Some(3),   Some("exit code 3")),
            (json!({"last_exit": "signal 9", "last_exits": [{"exit": {"signal": 9}}]}),   Some(137), Some("signal 9")),
            (json!({"last_exit": "exit code 1", "last_exits": [{"exit": {"code": 1}}]}), Some(1),   Some("exit code 1")),
            (json!({"last_exit": "could not be started"}),                                None,      Some("could not be started")),
            (json!({"last_exit": null}),                                                  None,      None),
        ];
        for (state, code, words) in table {
            let read = State::read(&state);
            assert_eq!((read.last_exit_code(), read.last_exit_text()), (code, words), "{state}");
        }
    }
}
