//! What a gateway counts, for Prometheus.
//!
//! Labels are names that the configuration or a backend gave, never a client: a client could make as many as it likes.

use std::{
    collections::BTreeSet,
    rc::Rc,
    sync::atomic::{AtomicU64, Ordering},
};

use outlast_core::gateway::{Called, Outcome};
use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use rustc_hash::FxHashMap;
use serde_json::Value;

/// Tools that are told apart; those that come later are counted together as `other`.
const TOOLS_MAX: usize = 1_000;
/// Kinds of answered calls whose counters are at hand; those that come later are looked up each time.
const AT_HAND_MAX: usize = 2_000;
/// In seconds: from a call that is answered at once to one that takes as long as any may by default.
const BUCKETS: [f64; 13] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 300.0];
/// What the text is, for the answer's header.
pub const KIND: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfCall {
    backend: String,
    tool: String,
    method: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfTool {
    backend: String,
    tool: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfRefusal {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfBackend {
    backend: String,
}

/// What calls of one kind are counted by: finding it among the families costs more than counting.
struct AtHand {
    calls: Counter,
    took: Histogram,
}

/// A backend, a tool, a method and how it ended.
type Kind = (Rc<str>, Rc<str>, &'static str, Outcome);

pub struct Metrics {
    registry: Registry,
    tools: BTreeSet<(String, String)>,
    at_hand: FxHashMap<Kind, AtHand>,
    calls: Family<OfCall, Counter>,
    took: Family<OfBackend, Histogram, fn() -> Histogram>,
    rate_limited: Family<OfTool, Counter>,
    refused: Family<OfRefusal, Counter>,
    up: Family<OfBackend, Gauge>,
    restarts: Family<OfBackend, Counter<u64, AtomicU64>>,
    in_flight: Family<OfBackend, Gauge>,
    clients: Gauge,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new()
    }
}

impl Metrics {
    pub fn new() -> Metrics {
        let mut registry = Registry::with_prefix("outlast");
        let calls = Family::default();
        let took: Family<OfBackend, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(BUCKETS));
        let (rate_limited, up, restarts, in_flight, clients) =
            (Family::default(), Family::default(), Family::default(), Family::default(), Gauge::default());
        registry.register("calls", "Requests of clients that ended, by how they did", calls.clone());
        registry.register("call_duration_seconds", "How long calls took that reached a backend", took.clone());
        registry.register("rate_limited", "Calls that were refused for coming too often", rate_limited.clone());
        registry.register("backend_up", "1 if the backend is ready to be called", up.clone());
        registry.register("backend_restarts", "How often the backend was started again", restarts.clone());
        registry.register("calls_in_flight", "Calls that wait for the backend's answer", in_flight.clone());
        registry.register("clients", "Clients that are connected", clients.clone());
        let refused = Family::default();
        registry.register(
            "requests_refused",
            "Requests and notifications that were refused before any guard of calls",
            refused.clone(),
        );
        let (tools, at_hand) = (BTreeSet::new(), FxHashMap::default());
        Metrics { registry, tools, at_hand, calls, took, rate_limited, refused, up, restarts, in_flight, clients }
    }

    pub fn called(&mut self, called: &Called) {
        let (Outcome::Answered | Outcome::Failed, Some(backend), Some(tool)) =
            (called.outcome, &called.backend, &called.tool)
        else {
            return self.count(called);
        };
        let kind = (Rc::clone(backend), Rc::clone(tool), method(&called.method), called.outcome);
        if let Some(at_hand) = self.at_hand.get(&kind) {
            at_hand.took.observe(called.took.as_secs_f64());
            at_hand.calls.inc();
            return;
        }
        self.count(called);
        if self.at_hand.len() < AT_HAND_MAX {
            let (backend, tool) = (backend.to_string(), self.tool(called));
            let took = self.took.get_or_create(&OfBackend { backend: backend.clone() }).clone();
            let outcome = called.outcome.name();
            let calls = self.calls.get_or_create(&OfCall { backend, tool, method: kind.2, outcome }).clone();
            self.at_hand.insert(kind, AtHand { calls, took });
        }
    }

    /// A request that the HTTP front refused; the reason is one of a few names in the program.
    pub fn refused(&mut self, reason: &'static str) {
        self.refused.get_or_create(&OfRefusal { reason }).inc();
    }

    fn count(&mut self, called: &Called) {
        let backend = called.backend.as_deref().unwrap_or_default().to_owned();
        let tool = self.tool(called);
        let outcome = called.outcome.name();
        if called.outcome == Outcome::RateLimited {
            self.rate_limited.get_or_create(&OfTool { backend: backend.clone(), tool: tool.clone() }).inc();
        }
        if matches!(called.outcome, Outcome::Answered | Outcome::Failed | Outcome::Lost | Outcome::TimedOut) {
            let took = called.took.as_secs_f64();
            self.took.get_or_create(&OfBackend { backend: backend.clone() }).observe(took);
        }
        self.calls.get_or_create(&OfCall { backend, tool, method: method(&called.method), outcome }).inc();
    }

    /// A name that no backend is known to offer has no label: a client may have made it up.
    fn tool(&mut self, called: &Called) -> String {
        let (Some(tool), Some(backend)) = (&called.tool, &called.backend) else { return String::new() };
        if !called.is_known || called.outcome == Outcome::Unknown {
            return String::new();
        }
        let pair = (backend.to_string(), tool.to_string());
        if self.tools.contains(&pair) {
            return pair.1;
        }
        if self.tools.len() >= TOOLS_MAX {
            return "other".to_owned();
        }
        self.tools.insert(pair.clone());
        pair.1
    }

    /// All of it as text, with how the gateway is just now, as [`outlast_core::gateway::Gateway::status`] says it.
    pub fn text(&mut self, status: &Value) -> String {
        // A backend that is no longer configured is no longer told of.
        self.up.clear();
        self.restarts.clear();
        self.in_flight.clear();
        for backend in status["backends"].as_array().into_iter().flatten() {
            let label = OfBackend { backend: backend["name"].as_str().unwrap_or_default().to_owned() };
            let is_up = matches!(backend["state"].as_str(), Some("ready" | "idle"));
            self.up.get_or_create(&label).set(i64::from(is_up));
            let restarts = backend["restarts"].as_u64().unwrap_or_default();
            self.restarts.get_or_create(&label).inner().store(restarts, Ordering::Relaxed);
            self.in_flight.get_or_create(&label).set(backend["in_flight"].as_i64().unwrap_or_default());
        }
        self.clients.set(status["clients"].as_i64().unwrap_or_default());
        let mut text = String::new();
        // A `String` takes everything.
        let _ = text::encode(&mut text, &self.registry);
        text
    }
}

/// Methods that MCP has; what a client made up is not told apart from another.
fn method(method: &str) -> &'static str {
    const KNOWN: [&str; 17] = [
        "tools/call",
        "tools/list",
        "resources/read",
        "resources/list",
        "resources/templates/list",
        "resources/subscribe",
        "resources/unsubscribe",
        "prompts/get",
        "prompts/list",
        "completion/complete",
        "logging/setLevel",
        "initialize",
        "ping",
        "server/discover",
        "subscriptions/listen",
        "tasks/get",
        "tasks/cancel",
    ];
    KNOWN.iter().find(|known| **known == method).copied().unwrap_or("other")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use outlast_core::gateway::Who;
    use serde_json::json;

    use super::*;

    fn called(backend: Option<&str>, tool: &str, outcome: Outcome) -> Called {
        Called {
            client: 1,
            who: Rc::new(Who { name: "ann".to_owned(), role: None, profile: None }),
            method: "tools/call".into(),
            tool: Some(tool.into()),
            backend: backend.map(Rc::from),
            outcome,
            took: Duration::from_millis(3),
            is_known: true,
        }
    }

    fn status() -> Value {
        json!({
            "clients": 3,
            "backends": [
                { "name": "files", "state": "ready", "restarts": 2, "in_flight": 1 },
                { "name": "docs", "state": "given_up", "restarts": 5, "in_flight": 0 },
            ],
        })
    }

    #[test]
    fn all_of_it_is_told_in_the_format_of_prometheus() {
        let mut metrics = Metrics::new();
        metrics.called(&called(Some("files"), "files__read", Outcome::Answered));
        metrics.called(&called(Some("files"), "files__read", Outcome::RateLimited));
        metrics.called(&called(None, "files__rm -rf", Outcome::Unknown));
        metrics.called(&Called { method: "x\"\n/y".into(), ..called(None, "", Outcome::Unknown) });
        metrics.refused("unauthenticated");
        let mut lines: Vec<String> = metrics.text(&status()).lines().map(str::to_owned).collect();
        assert_eq!(lines.pop().as_deref(), Some("# EOF"));
        // Families have no order of their own.
        lines.sort();
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn clients_cannot_make_it_grow() {
        let mut metrics = Metrics::new();
        for n in 0..5_000 {
            metrics.called(&called(None, &format!("made-up-{n}"), Outcome::Unknown));
            metrics.called(&called(Some("files"), &format!("files__{n}"), Outcome::Answered));
            metrics.called(&Called { method: format!("m{n}").into(), ..called(None, "", Outcome::Unknown) });
        }
        let text = metrics.text(&status());
        let series = text.lines().filter(|line| line.starts_with("outlast_calls_total")).count();
        assert!((TOOLS_MAX..TOOLS_MAX + 4).contains(&series), "{series}");
        assert!(text.contains(r#"tool="other""#) && !text.contains("made-up"));
    }

    #[test]
    fn a_tool_that_is_switched_off_has_its_labels_and_a_made_up_one_has_none() {
        let mut metrics = Metrics::new();
        metrics.called(&called(Some("files"), "files__read", Outcome::SwitchedOff));
        metrics.called(&Called { is_known: false, ..called(Some("files"), "files__made_up", Outcome::SwitchedOff) });
        metrics.called(&Called { is_known: false, ..called(Some("files"), "files__made_up", Outcome::Unavailable) });
        let text = metrics.text(&status());
        let series = |tool: &str, outcome: &str| {
            let labels = format!(r#"backend="files",tool="{tool}",method="tools/call",outcome="{outcome}""#);
            text.contains(&format!("outlast_calls_total{{{labels}}} 1"))
        };
        assert!(series("files__read", "switched_off"), "{text}");
        assert!(series("", "switched_off") && series("", "unavailable"), "{text}");
        assert!(!text.contains("made_up"), "{text}");
    }

    #[test]
    fn calls_of_one_kind_are_counted_together_whether_their_counters_are_at_hand_or_not() {
        let mut metrics = Metrics::new();
        for n in 0..AT_HAND_MAX + 500 {
            for outcome in [Outcome::Answered, Outcome::Failed, Outcome::Answered, Outcome::TimedOut] {
                metrics.called(&called(Some("files"), &format!("files__{}", n % 1_500), outcome));
            }
        }
        let text = metrics.text(&status());
        let count =
            |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(|rest| rest.trim().to_owned());
        let of = |tool: &str, outcome: &str| {
            let labels = format!(r#"backend="files",tool="{tool}",method="tools/call",outcome="{outcome}""#);
            count(&format!("outlast_calls_total{{{labels}}}")).unwrap_or_default()
        };
        assert_eq!((of("files__7", "answered"), of("files__7", "failed")), ("4".to_owned(), "2".to_owned()));
        assert_eq!((of("files__999", "answered"), of("files__999", "timed_out")), ("4".to_owned(), "2".to_owned()));
        assert_eq!(of("other", "answered"), "1000", "500 tools beyond those that are told apart, and 2 calls of each");
        assert_eq!(count(r#"outlast_call_duration_seconds_count{backend="files"}"#).as_deref(), Some("10000"));
    }

    #[test]
    fn a_backend_that_is_gone_is_no_longer_told_of() {
        let mut metrics = Metrics::new();
        assert!(metrics.text(&status()).contains(r#"outlast_backend_up{backend="docs"} 0"#));
        let text = metrics.text(&json!({ "backends": [], "clients": 0 }));
        assert!(!text.contains("docs"), "{text}");
    }
}
