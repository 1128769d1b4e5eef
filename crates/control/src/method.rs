//! The requests that instances understand, as types: clients write them, and [`Method::read`] reads and checks them
//! for every kind of instance. It does not carry them out; the drivers do.

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
pub use outlast_core::session::Mode;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::DeserializeOwned, de::Error};
use serde_json::{Value, json};

use crate::{cluster::AUDIT_PAGE_MAX, wire::Refusal};

const SUBMIT: &str = "`submit` is true or false";
const CLUSTER_ELSEWHERE: &str = "`cluster` is only for gateways";
const NOW_ELSEWHERE: &str = "`now` is only for servers under `outlast mcp`";
/// The refusal of a `wait_for` request without a condition.
pub const WAIT_FOR: &str = "`wait_for` needs one of `text`, `quiet` (in seconds), `prompt` (true) and `turn` (true)";

/// The kinds of instances, by the requests that they understand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Mcp,
    /// `outlast mcp --inherit`: like `Mcp`, but a restart never waits for running calls.
    Inherit,
    Gateway,
    Session,
}

impl Kind {
    /// The names for the refusal of an unknown method. `agent_event` is left out: only the hooks of an agent send it.
    fn methods(self) -> &'static [&'static str] {
        match self {
            Kind::Mcp | Kind::Inherit => &["state", "pid", "restart", "resume", "stop", "upgrade", "subscribe"],
            Kind::Gateway => &[
                "state",
                "pid",
                "restart",
                "resume",
                "switch",
                "reload",
                "stop",
                "upgrade",
                "subscribe",
                "cluster_state",
                "cluster_audit",
            ],
            Kind::Session => &[
                "state",
                "pid",
                "restart",
                "inject",
                "send",
                "screen",
                "wait_for",
                "attach",
                "resume",
                "stop",
                "upgrade",
                "subscribe",
            ],
        }
    }

    /// The refusal of a method that this kind of instance does not have.
    pub fn unknown(self, name: &str) -> Refusal {
        let methods = self.methods().join(", ");
        Refusal::new("unknown_method", format!("unknown method `{name}`: known are {methods}"))
    }
}

/// A request with its parameters.
#[derive(Clone, Debug, PartialEq)]
pub enum Method {
    State,
    Pid,
    Restart(Restart),
    Resume,
    Stop(Stop),
    Upgrade(Upgrade),
    Subscribe,
    Switch(Switch),
    Reload,
    Inject(Inject),
    Send(Send),
    Screen(Screen),
    WaitFor(WaitFor),
    Attach(Attach),
    AgentEvent(AgentEvent),
    ClusterState,
    ClusterAudit(ClusterAudit),
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Restart {
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// An unknown mode is refused.
    #[serde(serialize_with = "write_mode", deserialize_with = "read_mode", skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// The restart does not wait for running calls.
    #[serde(deserialize_with = "read_now")]
    pub now: bool,
    /// Of a gateway: in its whole cluster. A backend with `placement = "one"` is restarted at its owner, others on every
    /// replica.
    #[serde(deserialize_with = "read_cluster", skip_serializing_if = "std::ops::Not::not")]
    pub cluster: bool,
}

impl Restart {
    pub fn reason(&self) -> &str {
        self.reason.as_deref().unwrap_or("requested through the control socket")
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stop {
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub graceful: Option<bool>,
}

impl Stop {
    pub fn is_graceful(&self) -> bool {
        self.graceful.unwrap_or(true)
    }
}

/// The instance continues as another program, without ending any connection.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Upgrade {
    /// The path of the program; absent for the one that the instance was started with.
    #[serde(deserialize_with = "read_program", skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

/// Turns a tool or a backend of a gateway off or on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Switch {
    /// Absent if the request is addressed to one backend.
    #[serde(default, deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub off: bool,
}

/// One page of the audit stream of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterAudit {
    /// The replica whose records are wanted; absent for the list of replicas alone.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub replica: Option<String>,
    /// Only records from this time on, in the format of the log, in which times sort as texts.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// Only records of this event.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub event: Option<String>,
    /// At most so many records.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// The `next` of the page before; absent for the first page.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

impl ClusterAudit {
    pub fn limit(&self) -> u64 {
        self.limit.unwrap_or(AUDIT_PAGE_MAX).clamp(1, AUDIT_PAGE_MAX)
    }

    /// Whether a line of the log is to be in a page.
    pub fn wants(&self, line: &str) -> bool {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Line {
            #[serde(deserialize_with = "lenient")]
            timestamp: String,
            #[serde(deserialize_with = "lenient")]
            props: Props,
        }
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Props {
            #[serde(deserialize_with = "lenient")]
            event_type: String,
        }
        if self.since.is_none() && self.event.is_none() {
            return true;
        }
        let Ok(line) = serde_json::from_str::<Line>(line) else { return false };
        self.since.as_ref().is_none_or(|since| *since <= line.timestamp)
            && self.event.as_ref().is_none_or(|event| *event == line.props.event_type)
    }
}

/// Bytes that are typed unchanged into an agent's terminal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Inject {
    #[serde(serialize_with = "write_base64", deserialize_with = "read_base64")]
    pub bytes: Vec<u8>,
}

/// A text for an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Send {
    #[serde(default, deserialize_with = "read_text")]
    pub text: String,
    /// True if absent.
    #[serde(default, deserialize_with = "read_submit", skip_serializing_if = "Option::is_none")]
    pub submit: Option<bool>,
    #[serde(default, deserialize_with = "read_timeout_ms", skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    #[serde(default, deserialize_with = "read_key", skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Screen {
    /// How many lines of the history to return.
    #[serde(deserialize_with = "lenient")]
    pub history: u64,
}

/// The condition to wait for: one of `text`, `quiet` and `prompt`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WaitFor {
    #[serde(deserialize_with = "read_wish", skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// In seconds.
    #[serde(deserialize_with = "read_wish", skip_serializing_if = "Option::is_none")]
    pub quiet: Option<f64>,
    #[serde(deserialize_with = "read_wish", skip_serializing_if = "Option::is_none")]
    pub prompt: Option<bool>,
    /// The turn that was submitted last is over.
    #[serde(deserialize_with = "read_wish", skip_serializing_if = "Option::is_none")]
    pub turn: Option<bool>,
    /// In seconds.
    #[serde(deserialize_with = "read_timeout", skip_serializing_if = "Option::is_none")]
    pub timeout: Option<f64>,
}

/// Attaches a terminal to the terminal of an agent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Attach {
    #[serde(deserialize_with = "lenient")]
    pub columns: u64,
    #[serde(deserialize_with = "lenient")]
    pub rows: u64,
    #[serde(deserialize_with = "lenient")]
    pub width: u64,
    #[serde(deserialize_with = "lenient")]
    pub height: u64,
    /// The terminal only shows; its input is not forwarded.
    #[serde(deserialize_with = "lenient")]
    pub watch: bool,
    /// Identifies a terminal that attaches again.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub terminal: Option<String>,
}

/// An event of an agent's hook.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentEvent {
    #[serde(deserialize_with = "lenient")]
    pub generation: Option<u64>,
    pub event: Value,
}

impl Method {
    /// Reads a request to an instance of this kind. A request that it does not understand is refused with a sentence.
    pub fn read(kind: Kind, name: &str, params: &Value) -> Result<Method, Refusal> {
        let is_of_hooks = kind == Kind::Session && name == "agent_event";
        if !is_of_hooks && !kind.methods().contains(&name) {
            return Err(kind.unknown(name));
        }
        Ok(match name {
            "state" => Method::State,
            "pid" => Method::Pid,
            "restart" => Method::Restart(read_restart(kind, params)?),
            "resume" => Method::Resume,
            "stop" => Method::Stop(read(params)?),
            "upgrade" => Method::Upgrade(read(params)?),
            "switch" => Method::Switch(read(params).map_err(|_| bad_request("`off` must be true or false"))?),
            "reload" => Method::Reload,
            "inject" => Method::Inject(read(params).map_err(|_| bad_request("`inject` needs `bytes` in base64"))?),
            "send" if params["text"].is_null() => return Err(bad_request("`send` needs a `text`")),
            "send" => Method::Send(read(params)?),
            "screen" => Method::Screen(read(params)?),
            "wait_for" => Method::WaitFor(read(params)?),
            "attach" => Method::Attach(read(params)?),
            "agent_event" => Method::AgentEvent(read(params)?),
            "cluster_state" => Method::ClusterState,
            "cluster_audit" => Method::ClusterAudit(read(params)?),
            _ => Method::Subscribe,
        })
    }

    pub fn name(&self) -> &'static str {
        match self {
            Method::State => "state",
            Method::Pid => "pid",
            Method::Restart(_) => "restart",
            Method::Resume => "resume",
            Method::Stop(_) => "stop",
            Method::Upgrade(_) => "upgrade",
            Method::Subscribe => "subscribe",
            Method::Switch(_) => "switch",
            Method::Reload => "reload",
            Method::Inject(_) => "inject",
            Method::Send(_) => "send",
            Method::Screen(_) => "screen",
            Method::WaitFor(_) => "wait_for",
            Method::Attach(_) => "attach",
            Method::AgentEvent(_) => "agent_event",
            Method::ClusterState => "cluster_state",
            Method::ClusterAudit(_) => "cluster_audit",
        }
    }

    pub fn params(&self) -> Value {
        let params = match self {
            Method::State
            | Method::Pid
            | Method::Resume
            | Method::Subscribe
            | Method::Reload
            | Method::ClusterState => Ok(json!({})),
            Method::Restart(params) => serde_json::to_value(params),
            Method::Stop(params) => serde_json::to_value(params),
            Method::Upgrade(params) => serde_json::to_value(params),
            Method::Switch(params) => serde_json::to_value(params),
            Method::Inject(params) => serde_json::to_value(params),
            Method::Send(params) => serde_json::to_value(params),
            Method::Screen(params) => serde_json::to_value(params),
            Method::WaitFor(params) => serde_json::to_value(params),
            Method::Attach(params) => serde_json::to_value(params),
            Method::AgentEvent(params) => serde_json::to_value(params),
            Method::ClusterAudit(params) => serde_json::to_value(params),
        };
        params.expect("parameters are always JSON")
    }
}

fn read_restart(kind: Kind, params: &Value) -> Result<Restart, Refusal> {
    let restart: Restart = read(params)?;
    match kind {
        Kind::Gateway | Kind::Session if restart.now => Err(bad_request(NOW_ELSEWHERE)),
        Kind::Mcp | Kind::Inherit | Kind::Session if restart.cluster => Err(bad_request(CLUSTER_ELSEWHERE)),
        _ => Ok(restart),
    }
}

fn read<T: DeserializeOwned>(params: &Value) -> Result<T, Refusal> {
    T::deserialize(params).map_err(|error| bad_request(&error.to_string()))
}

fn bad_request(message: &str) -> Refusal {
    Refusal::new("bad_request", message)
}

/// An invalid value counts as absent.
fn lenient<'de, D: Deserializer<'de>, T: DeserializeOwned + Default>(deserializer: D) -> Result<T, D::Error> {
    Ok(T::deserialize(Value::deserialize(deserializer)?).unwrap_or_default())
}

/// An invalid value is refused with this sentence.
fn strict<'de, D: Deserializer<'de>, T: DeserializeOwned>(deserializer: D, sentence: &str) -> Result<T, D::Error> {
    T::deserialize(Value::deserialize(deserializer)?).map_err(|_| D::Error::custom(sentence))
}

fn read_now<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    strict(deserializer, "`now` must be true or false").map(|now: Option<bool>| now.unwrap_or_default())
}

fn read_cluster<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    strict(deserializer, "`cluster` must be true or false").map(|cluster: Option<bool>| cluster.unwrap_or_default())
}

fn read_program<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    strict(deserializer, "`program` is an absolute path")
}

fn read_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    strict(deserializer, "`send` needs a `text`")
}

fn read_submit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<bool>, D::Error> {
    strict(deserializer, SUBMIT)
}

fn read_timeout_ms<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    strict(deserializer, "`timeout_ms` is a whole number")
}

fn read_key<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    strict(deserializer, "`key` is a text")
}

fn read_timeout<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    strict(deserializer, "`timeout` is a number of seconds")
}

fn read_wish<'de, D: Deserializer<'de>, T: DeserializeOwned>(deserializer: D) -> Result<Option<T>, D::Error> {
    strict(deserializer, WAIT_FOR)
}

fn read_mode<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Mode>, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Null => Ok(None),
        Value::String(mode) if mode == "continue" => Ok(Some(Mode::Continue)),
        Value::String(mode) if mode == "fresh" => Ok(Some(Mode::Fresh)),
        mode => Err(D::Error::custom(format!("unknown mode {mode}: use \"fresh\" or \"continue\""))),
    }
}

fn write_mode<S: Serializer>(mode: &Option<Mode>, serializer: S) -> Result<S::Ok, S::Error> {
    mode.map(|mode| mode.to_string()).serialize(serializer)
}

fn read_base64<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    BASE64.decode(String::deserialize(deserializer)?).map_err(D::Error::custom)
}

fn write_base64<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&BASE64.encode(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_is_read_as_it_was_written() {
        let reason = Some("why".to_owned());
        #[rustfmt::skip]
        let table = [
            (Kind::Mcp,     Method::State,                                                         json!({})),
            (Kind::Mcp,     Method::Restart(Restart { reason, now: true, ..Restart::default() }),            json!({"reason": "why", "now": true})),
            (Kind::Session, Method::Restart(Restart { mode: Some(Mode::Fresh), ..Restart::default() }), json!({"mode": "fresh", "now": false})),
            (Kind::Inherit, Method::Stop(Stop { graceful: Some(false) }),                          json!({"graceful": false})),
            (Kind::Gateway, Method::Switch(Switch { name: Some("a".into()), off: true }),          json!({"name": "a", "off": true})),
            (Kind::Gateway, Method::Reload,                                                        json!({})),
            (Kind::Gateway, Method::Restart(Restart { cluster: true, ..Restart::default() }),      json!({"now": false, "cluster": true})),
            (Kind::Gateway, Method::ClusterState,                                                  json!({})),
            (Kind::Gateway, Method::ClusterAudit(ClusterAudit { replica: Some("a".into()), limit: Some(5), ..ClusterAudit::default() }), json!({"replica": "a", "limit": 5})),
            (Kind::Session, Method::Inject(Inject { bytes: b"foob".to_vec() }),                    json!({"bytes": "Zm9vYg=="})),
            (Kind::Session, Method::Send(Send { text: "a".into(), submit: Some(false), timeout_ms: Some(5), key: None }), json!({"text": "a", "submit": false, "timeout_ms": 5})),
            (Kind::Session, Method::Screen(Screen { history: 7 }),                                 json!({"history": 7})),
            (Kind::Session, Method::WaitFor(WaitFor { quiet: Some(0.5), ..WaitFor::default() }),   json!({"quiet": 0.5})),
            (Kind::Session, Method::AgentEvent(AgentEvent { generation: Some(1), event: json!({}) }), json!({"generation": 1, "event": {}})),
        ];
        for (kind, method, params) in table {
            assert_eq!(method.params(), params);
            assert_eq!(Method::read(kind, method.name(), &params), Ok(method));
        }
    }

    #[test]
    fn an_unknown_request_is_refused_with_a_sentence() {
        let mut words = String::new();
        for (kind, name, params) in [
            (Kind::Mcp, "nonsense", json!({})),
            (Kind::Mcp, "switch", json!({})),
            (Kind::Mcp, "agent_event", json!({})),
            (Kind::Gateway, "send", json!({})),
            (Kind::Session, "reload", json!({})),
            (Kind::Mcp, "restart", json!({"mode": "new"})),
            (Kind::Mcp, "restart", json!({"mode": 1})),
            (Kind::Mcp, "restart", json!({"now": "yes"})),
            (Kind::Session, "restart", json!({"now": true})),
            (Kind::Gateway, "restart", json!({"now": true})),
            (Kind::Gateway, "restart", json!({"cluster": 1})),
            (Kind::Mcp, "restart", json!({"cluster": true})),
            (Kind::Mcp, "cluster_state", json!({})),
            (Kind::Gateway, "switch", json!({"name": "a"})),
            (Kind::Gateway, "switch", json!({"name": "a", "off": "yes"})),
            (Kind::Session, "inject", json!({})),
            (Kind::Session, "inject", json!({"bytes": "no base64!"})),
            (Kind::Session, "send", json!({})),
            (Kind::Session, "send", json!({"text": 1})),
            (Kind::Session, "send", json!({"text": "a", "submit": 1})),
            (Kind::Session, "send", json!({"text": "a", "timeout_ms": -1})),
            (Kind::Session, "send", json!({"text": "a", "key": 1})),
            (Kind::Session, "wait_for", json!({"text": 1})),
            (Kind::Session, "wait_for", json!({"prompt": true, "timeout": "long"})),
        ] {
            let refusal = Method::read(kind, name, &params).unwrap_err();
            words.push_str(&format!("{}: {}\n", refusal.code, refusal.message));
        }
        insta::assert_snapshot!(words, @r#"
        unknown_method: unknown method `nonsense`: known are state, pid, restart, resume, stop, upgrade, subscribe
        unknown_method: unknown method `switch`: known are state, pid, restart, resume, stop, upgrade, subscribe
        unknown_method: unknown method `agent_event`: known are state, pid, restart, resume, stop, upgrade, subscribe
        unknown_method: unknown method `send`: known are state, pid, restart, resume, switch, reload, stop, upgrade, subscribe, cluster_state, cluster_audit
        unknown_method: unknown method `reload`: known are state, pid, restart, inject, send, screen, wait_for, attach, resume, stop, upgrade, subscribe
        bad_request: unknown mode "new": use "fresh" or "continue"
        bad_request: unknown mode 1: use "fresh" or "continue"
        bad_request: `now` must be true or false
        bad_request: `now` is only for servers under `outlast mcp`
        bad_request: `now` is only for servers under `outlast mcp`
        bad_request: `cluster` must be true or false
        bad_request: `cluster` is only for gateways
        unknown_method: unknown method `cluster_state`: known are state, pid, restart, resume, stop, upgrade, subscribe
        bad_request: `off` must be true or false
        bad_request: `off` must be true or false
        bad_request: `inject` needs `bytes` in base64
        bad_request: `inject` needs `bytes` in base64
        bad_request: `send` needs a `text`
        bad_request: `send` needs a `text`
        bad_request: `submit` is true or false
        bad_request: `timeout_ms` is a whole number
        bad_request: `key` is a text
        bad_request: `wait_for` needs one of `text`, `quiet` (in seconds), `prompt` (true) and `turn` (true)
        bad_request: `timeout` is a number of seconds
        "#);
    }

    #[test]
    fn a_page_has_the_wanted_records() {
        let line = r#"{"timestamp": "2026-01-13T14:32:45.123Z", "props": {"event_type": "gave_up"}}"#;
        let wants = |since: Option<&str>, event: Option<&str>, line: &str| {
            let (since, event) = (since.map(str::to_owned), event.map(str::to_owned));
            ClusterAudit { since, event, ..ClusterAudit::default() }.wants(line)
        };
        assert!(wants(None, None, "torn"));
        assert!(!wants(None, Some("gave_up"), "torn"));
        assert!(wants(Some("2026-01-13T14:32:45.123Z"), Some("gave_up"), line));
        assert!(!wants(Some("2026-01-13T14:32:45.124Z"), None, line));
        assert!(!wants(None, Some("server_started"), line));
        let limits = [None, Some(0), Some(7), Some(u64::MAX)];
        let limits = limits.map(|limit| ClusterAudit { limit, ..ClusterAudit::default() }.limit());
        assert_eq!(limits, [AUDIT_PAGE_MAX, 1, 7, AUDIT_PAGE_MAX]);
    }

    #[test]
    fn optional_parameters_of_a_wrong_type_are_ignored() {
        let table = [
            ("stop", json!({"graceful": 1, "later": []}), Method::Stop(Stop::default())),
            ("restart", json!({"reason": 1, "mode": null}), Method::Restart(Restart::default())),
            ("restart", json!({"now": null}), Method::Restart(Restart::default())),
        ];
        for (name, params, method) in table {
            assert_eq!(Method::read(Kind::Mcp, name, &params), Ok(method));
        }
    }
}
