//! The counters of a gateway, in the format of Prometheus.
//!
//! Labels are names from the configuration or from a backend, never from a client: a client could create any number of
//! them.

use std::{
    collections::{BTreeSet, HashMap},
    rc::Rc,
    sync::atomic::{AtomicU64, Ordering},
};

use outlast_control::cluster::ClusterState;
use outlast_core::{
    gateway::{BackendStatus, Called, Outcome},
    mcp::method,
};
use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use super::{state::ClientCounts, turns::Longest};

/// Tools with a label of their own; later ones are counted together as `other`.
const TOOLS_MAX: usize = 1_000;
/// Kinds of answered calls whose counters are cached; the counters of later kinds are looked up each time.
const AT_HAND_MAX: usize = 2_000;
/// In seconds: from a call that is answered at once to the default time limit of a call.
const BUCKETS: [f64; 13] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 300.0];
/// The content type of the text.
pub(crate) const KIND: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

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

/// The figures of this replica in its cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ClusterFigures {
    /// Registered replicas, this one included.
    pub(crate) replicas: u64,
    pub(crate) is_connected: bool,
    /// Backends with `placement = "one"` whose lease it holds.
    pub(crate) owned: u64,
    pub(crate) audit_backlog: u64,
    pub(crate) streams: u64,
    pub(crate) sessions_local: u64,
    pub(crate) late_messages: u64,
    pub(crate) resent: u64,
    pub(crate) watches_down: u64,
    pub(crate) watches_lost: u64,
    pub(crate) share_parts: u32,
}

impl ClusterFigures {
    pub(crate) fn of(state: &ClusterState) -> ClusterFigures {
        let own = state.own().cloned().unwrap_or_default();
        let is_ours = |owner: &Option<String>| owner.as_deref() == Some(&state.replica);
        ClusterFigures {
            replicas: state.replicas.iter().filter(|replica| replica.is_alive).count() as u64,
            is_connected: state.nats.connected,
            owned: state.backends.iter().filter(|backend| is_ours(&backend.owner)).count() as u64,
            audit_backlog: own.audit_backlog.unwrap_or_default(),
            streams: own.streams.unwrap_or_default(),
            sessions_local: own.sessions_local_only.unwrap_or_default(),
            late_messages: state.counters.late_messages,
            resent: state.counters.resent,
            watches_down: state.nats.watches_down.len() as u64,
            watches_lost: state.counters.watches_lost,
            share_parts: own.share_parts.unwrap_or_default(),
        }
    }
}

/// The series of a gateway in a cluster. Others do not print them.
struct ClusterMetrics {
    registry: Registry,
    replicas: Gauge,
    connected: Gauge,
    owned: Gauge,
    audit_backlog: Gauge,
    streams: Gauge,
    sessions_local: Gauge,
    late_messages: Counter<u64, AtomicU64>,
    resent: Counter<u64, AtomicU64>,
    watches_down: Gauge,
    watches_lost: Counter<u64, AtomicU64>,
    share_parts: Gauge,
}

impl ClusterMetrics {
    fn new() -> ClusterMetrics {
        let mut registry = Registry::with_prefix("outlast_cluster");
        let mut gauge = |name: &str, help: &str| {
            let gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        };
        let replicas = gauge("replicas", "Replicas that are registered, this one included");
        let connected = gauge("connected", "1 if this replica is connected to NATS");
        let owned = gauge("owned", "Backends whose lease this replica holds");
        let audit_backlog = gauge("audit_backlog", "Audit records that are not published yet");
        let streams = gauge("streams", "Open streams between this replica and others");
        let sessions_local = gauge("sessions_local", "Sessions that only this replica knows");
        let share_parts = gauge("share_parts", "The share of all rate budgets, in millionths");
        let watches_down = gauge("watches_down", "Buckets of NATS whose changes are not reported at the moment");
        let mut counter = |name: &str, help: &str| {
            let counter = Counter::<u64, AtomicU64>::default();
            registry.register(name, help, counter.clone());
            counter
        };
        let late_messages = counter("late_messages", "Messages for calls and streams that had ended");
        let resent = counter("resent", "Packets that were sent to another replica again");
        let watches_lost = counter("watches_lost", "Watches of buckets that failed and were opened again");
        ClusterMetrics {
            registry,
            replicas,
            connected,
            owned,
            audit_backlog,
            streams,
            sessions_local,
            late_messages,
            resent,
            watches_down,
            watches_lost,
            share_parts,
        }
    }

    fn set(&self, figures: &ClusterFigures) {
        let gauge = |gauge: &Gauge, value: u64| {
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        gauge(&self.replicas, figures.replicas);
        gauge(&self.connected, figures.is_connected.into());
        gauge(&self.owned, figures.owned);
        gauge(&self.audit_backlog, figures.audit_backlog);
        gauge(&self.streams, figures.streams);
        gauge(&self.sessions_local, figures.sessions_local);
        gauge(&self.share_parts, figures.share_parts.into());
        gauge(&self.watches_down, figures.watches_down);
        self.late_messages.inner().store(figures.late_messages, Ordering::Relaxed);
        self.resent.inner().store(figures.resent, Ordering::Relaxed);
        self.watches_lost.inner().store(figures.watches_lost, Ordering::Relaxed);
    }
}

/// The counters of one kind of call, cached because the lookup costs more than the count.
struct AtHand {
    calls: Counter,
    took: Histogram,
}

/// Backend, tool, method and outcome.
type Kind = (Rc<str>, Rc<str>, &'static str, Outcome);

pub(crate) struct Metrics {
    registry: Registry,
    tools: BTreeSet<(String, String)>,
    /// With a keyed hash, because backends choose the names of tools.
    at_hand: HashMap<Kind, AtHand>,
    calls: Family<OfCall, Counter>,
    took: Family<OfBackend, Histogram, fn() -> Histogram>,
    rate_limited: Family<OfTool, Counter>,
    refused: Family<OfRefusal, Counter>,
    up: Family<OfBackend, Gauge>,
    restarts: Family<OfBackend, Counter<u64, AtomicU64>>,
    in_flight: Family<OfBackend, Gauge>,
    clients: Gauge,
    sessions_stored: Gauge,
    sessions_unrecorded: Gauge,
    turn: Gauge<f64, AtomicU64>,
    turn_cpu: Gauge<f64, AtomicU64>,
    /// `None` outside of a cluster.
    cluster: Option<ClusterMetrics>,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new()
    }
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        let mut registry = Registry::with_prefix("outlast");
        let calls = Family::default();
        let took: Family<OfBackend, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(BUCKETS));
        let (rate_limited, up, restarts, in_flight, clients) =
            (Family::default(), Family::default(), Family::default(), Family::default(), Gauge::default());
        registry.register("calls", "Finished requests of clients, by outcome", calls.clone());
        registry.register("call_duration_seconds", "Duration of calls that reached a backend", took.clone());
        registry.register("rate_limited", "Calls that were refused by the rate limit", rate_limited.clone());
        registry.register("backend_up", "1 if the backend is ready", up.clone());
        registry.register("backend_restarts", "Restarts of the backend", restarts.clone());
        registry.register("calls_in_flight", "Calls that the backend has not answered yet", in_flight.clone());
        registry.register("clients", "Clients that are connected", clients.clone());
        let (sessions_stored, sessions_unrecorded) = (Gauge::default(), Gauge::default());
        registry.register(
            "sessions_stored",
            "Sessions of an earlier gateway whose clients have not come back",
            sessions_stored.clone(),
        );
        registry.register(
            "sessions_unrecorded",
            "Sessions that a restart of the gateway would end, as their records could not be written",
            sessions_unrecorded.clone(),
        );
        let (turn, turn_cpu) = (Gauge::default(), Gauge::default());
        registry.register(
            "loop_turn_seconds_max",
            "The longest turn of the event loop since the last request for the metrics",
            turn.clone(),
        );
        registry.register(
            "loop_turn_cpu_seconds_max",
            "The most CPU time of one turn since then, measured for 1 s after a turn of more than 5 ms",
            turn_cpu.clone(),
        );
        let refused = Family::default();
        registry.register(
            "requests_refused",
            "Requests and notifications that were refused before any guard of calls",
            refused.clone(),
        );
        let (tools, at_hand) = (BTreeSet::new(), HashMap::new());
        Metrics {
            registry,
            tools,
            at_hand,
            calls,
            took,
            rate_limited,
            refused,
            up,
            restarts,
            in_flight,
            clients,
            sessions_stored,
            sessions_unrecorded,
            turn,
            turn_cpu,
            cluster: None,
        }
    }

    /// The figures of the cluster for the next text. `None` if the gateway is in none.
    pub(crate) fn set_cluster(&mut self, figures: Option<&ClusterFigures>) {
        match figures {
            Some(figures) => self.cluster.get_or_insert_with(ClusterMetrics::new).set(figures),
            None => self.cluster = None,
        }
    }

    /// The longest turn of the event loop, for the next text.
    pub(super) fn set_turn(&mut self, longest: Longest) {
        self.turn.set(longest.elapsed.as_secs_f64());
        self.turn_cpu.set(longest.cpu.as_secs_f64());
    }

    pub(crate) fn called(&mut self, called: &Called) {
        let (Outcome::Answered | Outcome::Failed, Some(backend), Some(tool)) =
            (called.outcome, &called.backend, &called.tool)
        else {
            return self.count(called);
        };
        let kind = (Rc::clone(backend), Rc::clone(tool), method_label(&called.method), called.outcome);
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

    /// A request that the HTTP front refused; the reason is one of a few fixed names.
    pub(crate) fn refused(&mut self, reason: &'static str) {
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
        self.calls.get_or_create(&OfCall { backend, tool, method: method_label(&called.method), outcome }).inc();
    }

    /// A name that no known backend offers gets no label: the client may have invented it.
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

    /// All counters as text, with the current state of backends and clients.
    pub(super) fn text(&mut self, backends: &[BackendGauges], clients: &ClientCounts) -> String {
        // A backend that was removed from the configuration has no series.
        self.up.clear();
        self.restarts.clear();
        self.in_flight.clear();
        for backend in backends {
            let label = OfBackend { backend: backend.name.clone() };
            self.up.get_or_create(&label).set(i64::from(backend.is_up));
            self.restarts.get_or_create(&label).inner().store(backend.restarts, Ordering::Relaxed);
            self.in_flight.get_or_create(&label).set(as_gauge(backend.in_flight));
        }
        let sessions = clients.sessions.unwrap_or_default();
        self.clients.set(as_gauge(clients.clients));
        self.sessions_stored.set(as_gauge(sessions.stored));
        self.sessions_unrecorded.set(as_gauge(sessions.unrecorded));
        let mut text = String::new();
        // Writing to a `String` does not fail.
        let registries = [Some(&self.registry), self.cluster.as_ref().map(|cluster| &cluster.registry)];
        for registry in registries.into_iter().flatten() {
            let _ = text::encode_registry(&mut text, registry);
        }
        let _ = text::encode_eof(&mut text);
        text
    }
}

/// What a backend does at the moment.
pub(super) struct BackendGauges {
    name: String,
    is_up: bool,
    restarts: u64,
    in_flight: usize,
}

impl From<BackendStatus> for BackendGauges {
    fn from(status: BackendStatus) -> BackendGauges {
        let is_up = matches!(status.state, Some("ready" | "idle"));
        BackendGauges { name: status.name, is_up, restarts: status.life.restarts, in_flight: status.in_flight }
    }
}

fn as_gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// The methods of MCP; all other methods share one label.
fn method_label(method: &str) -> &'static str {
    method::ALL.iter().find(|known| **known == method).copied().unwrap_or("other")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use outlast_core::gateway::Who;

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

    fn printed(metrics: &mut Metrics) -> String {
        let backends = [
            BackendGauges { name: "files".to_owned(), is_up: true, restarts: 2, in_flight: 1 },
            BackendGauges { name: "docs".to_owned(), is_up: false, restarts: 5, in_flight: 0 },
        ];
        metrics.text(&backends, &ClientCounts { clients: 3, ..ClientCounts::default() })
    }

    #[test]
    fn every_counter_is_printed_in_the_format_of_prometheus() {
        let mut metrics = Metrics::new();
        metrics.called(&called(Some("files"), "files__read", Outcome::Answered));
        metrics.called(&called(Some("files"), "files__read", Outcome::RateLimited));
        metrics.called(&called(None, "files__rm -rf", Outcome::Unknown));
        metrics.called(&Called { method: "x\"\n/y".into(), ..called(None, "", Outcome::Unknown) });
        metrics.refused("unauthenticated");
        let mut lines: Vec<String> = printed(&mut metrics).lines().map(str::to_owned).collect();
        assert_eq!(lines.pop().as_deref(), Some("# EOF"));
        // Families have no fixed order.
        lines.sort();
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn the_number_of_labels_is_bounded() {
        let mut metrics = Metrics::new();
        for n in 0..5_000 {
            metrics.called(&called(None, &format!("made-up-{n}"), Outcome::Unknown));
            metrics.called(&called(Some("files"), &format!("files__{n}"), Outcome::Answered));
            metrics.called(&Called { method: format!("m{n}").into(), ..called(None, "", Outcome::Unknown) });
        }
        let text = printed(&mut metrics);
        let series = text.lines().filter(|line| line.starts_with("outlast_calls_total")).count();
        assert!((TOOLS_MAX..TOOLS_MAX + 4).contains(&series), "{series}");
        assert!(text.contains(r#"tool="other""#) && !text.contains("made-up"));
    }

    #[test]
    fn a_switched_off_tool_has_labels_and_an_unknown_tool_has_none() {
        let mut metrics = Metrics::new();
        metrics.called(&called(Some("files"), "files__read", Outcome::SwitchedOff));
        metrics.called(&Called { is_known: false, ..called(Some("files"), "files__made_up", Outcome::SwitchedOff) });
        metrics.called(&Called { is_known: false, ..called(Some("files"), "files__made_up", Outcome::Unavailable) });
        let text = printed(&mut metrics);
        let series = |tool: &str, outcome: &str| {
            let labels = format!(r#"backend="files",tool="{tool}",method="tools/call",outcome="{outcome}""#);
            text.contains(&format!("outlast_calls_total{{{labels}}} 1"))
        };
        assert!(series("files__read", "switched_off"), "{text}");
        assert!(series("", "switched_off") && series("", "unavailable"), "{text}");
        assert!(!text.contains("made_up"), "{text}");
    }

    #[test]
    fn calls_of_one_kind_share_counters_with_or_without_the_cache() {
        let mut metrics = Metrics::new();
        for n in 0..AT_HAND_MAX + 500 {
            for outcome in [Outcome::Answered, Outcome::Failed, Outcome::Answered, Outcome::TimedOut] {
                metrics.called(&called(Some("files"), &format!("files__{}", n % 1_500), outcome));
            }
        }
        let text = printed(&mut metrics);
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
    fn only_a_gateway_in_a_cluster_has_its_series() {
        use outlast_control::cluster::{Counters, Nats, PlacedBackend, Replica};
        let replica = |name: &str, is_self: bool, is_alive: bool| Replica {
            name: name.into(),
            is_self,
            is_alive,
            streams: Some(4),
            sessions_local_only: Some(2),
            audit_backlog: Some(9),
            share_parts: Some(500_000),
            ..Replica::default()
        };
        let owned = |owner: Option<&str>| PlacedBackend { owner: owner.map(Into::into), ..PlacedBackend::default() };
        let state = ClusterState {
            replica: "a".into(),
            nats: Nats { connected: true, watches_down: vec!["leases".into()], ..Nats::default() },
            replicas: vec![replica("a", true, true), replica("b", false, true), replica("c", false, false)],
            backends: vec![owned(Some("a")), owned(Some("b")), owned(None)],
            counters: Counters { late_messages: 3, resent: 7, watches_lost: 2, ..Counters::default() },
            ..ClusterState::default()
        };
        let mut metrics = Metrics::new();
        assert!(!printed(&mut metrics).contains("cluster"));
        metrics.set_cluster(Some(&ClusterFigures::of(&state)));
        let text = printed(&mut metrics);
        assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1, "{text}");
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("outlast_cluster")).collect();
        insta::assert_snapshot!(lines.join("\n"), @"
        outlast_cluster_replicas 2
        outlast_cluster_connected 1
        outlast_cluster_owned 1
        outlast_cluster_audit_backlog 9
        outlast_cluster_streams 4
        outlast_cluster_sessions_local 2
        outlast_cluster_share_parts 500000
        outlast_cluster_watches_down 1
        outlast_cluster_late_messages_total 3
        outlast_cluster_resent_total 7
        outlast_cluster_watches_lost_total 2
        ");
        metrics.set_cluster(None);
        assert!(!printed(&mut metrics).contains("cluster"));
    }

    #[test]
    fn every_metric_is_in_the_book() {
        let page = include_str!("../../../../docs/guards.md");
        let row = |name: &str| page.lines().any(|line| line.starts_with(&format!("| `{name}`")));
        // A counter without an event is not printed.
        let mut metrics = Metrics::new();
        metrics.called(&called(Some("files"), "files__read", Outcome::Answered));
        metrics.called(&called(Some("files"), "files__read", Outcome::RateLimited));
        let text = printed(&mut metrics);
        let names: Vec<&str> =
            text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        assert_eq!(names.len(), 11);
        for name in names {
            assert!(row(name) || row(&format!("{name}_total")), "{name} is not in the book");
        }
    }

    #[test]
    fn a_removed_backend_has_no_series() {
        let mut metrics = Metrics::new();
        assert!(printed(&mut metrics).contains(r#"outlast_backend_up{backend="docs"} 0"#));
        let text = metrics.text(&[], &ClientCounts::default());
        assert!(!text.contains("docs"), "{text}");
    }
}
