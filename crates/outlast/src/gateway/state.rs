//! The state of a running gateway and of its backends, as `outlast state` and the status page report it. Its source is the
//! machine's status; here members get the names that all kinds of instances share. Members are added and never renamed.

use outlast_control::cluster::Membership;
use outlast_core::{
    gateway::{
        BackendStatus, CircuitStatus, CollisionStatus, ExitStatus, FigureStatus, Kind, OfferCounts, ReloadStatus,
        RestartStatus, SlotStatus, SwitchedOff, UncheckedTool, UnderWay,
    },
    restarts::PastStatus,
    secret::Resolved,
};
use serde::Serialize;
use serde_json::{Value, json};

use super::{Driver, Stopping, links::WireKind, listen::Listen};
use crate::cli::{commands::without_secrets, report::shell_quote};

#[derive(Debug, Serialize)]
pub(super) struct GatewayState {
    pub(super) state: &'static str,
    uptime_s: f64,
    restarts: u64,
    in_flight: usize,
    tools: usize,
    prompts: usize,
    resources: usize,
    templates: usize,
    collisions: Vec<CollisionStatus>,
    collision_count: usize,
    switched_off: Vec<SwitchedOff>,
    under_way: UnderWay,
    stopping: bool,
    #[serde(flatten)]
    figures: FigureStatus,
    #[serde(flatten)]
    clients: ClientCounts,
    listen: Option<String>,
    status_page: Option<String>,
    /// The same with the token.
    page: Option<String>,
    stdio: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster: Option<ReplicaState>,
    last_reload: Option<FailedReload>,
    pub(super) backends: Vec<BackendState>,
}

/// The clients of both eras. A client of the stateless era has no connection; it counts for some time after its last
/// request.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct ClientCounts {
    pub(super) clients: usize,
    pub(super) clients_by_kind: ClientsByKind,
    /// With an HTTP front.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) sessions: Option<SessionCounts>,
}

#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct ClientsByKind {
    stdio: usize,
    sessions: usize,
    stateless: usize,
}

#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct SessionCounts {
    pub(super) open: usize,
    pub(super) stored: usize,
    pub(super) unrecorded: usize,
}

/// This gateway as a replica of its cluster.
#[derive(Debug, Serialize)]
struct ReplicaState {
    #[serde(flatten)]
    membership: Membership,
    instance: String,
    connected: bool,
    why: Option<String>,
    watches_down: Vec<&'static str>,
    replicas: Vec<String>,
    owned: usize,
    sessions_local: usize,
    share_parts: u32,
    audit_backlog: Option<u64>,
}

/// The last reload of the configuration, which failed.
#[derive(Debug, Serialize)]
struct FailedReload {
    ok: bool,
    error: String,
    seconds_ago: f64,
}

#[derive(Debug, Serialize)]
pub(super) struct BackendState {
    pub(super) name: String,
    /// `off`, `ready`, `starting`, `backoff`, `idle`, `given_up` or `stopping`.
    pub(super) state: Option<&'static str>,
    /// `stdio` or `http`.
    transport: &'static str,
    command: Option<String>,
    era: Option<&'static str>,
    pub(super) pid: Option<u32>,
    generation: Option<u64>,
    pub(super) restarts: u64,
    crashes: Option<u32>,
    pub(super) uptime_s: Option<f64>,
    pub(super) next_try_s: Option<f64>,
    reason: Option<String>,
    /// How the last process ended, as a text, and as an object.
    last_exit: Option<String>,
    exit: Option<ExitStatus>,
    last_exits: Vec<PastStatus>,
    stderr_tail: Option<String>,
    /// The last line of the newest child's stderr.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_stderr: Option<Option<String>>,
    /// Lines of its stdout that were not messages.
    diverted: u64,
    env_left_out: Vec<String>,
    catalogue: &'static str,
    stale: bool,
    tools: usize,
    tool_names: Vec<String>,
    offers: OfferCounts,
    unchecked: Vec<UncheckedTool>,
    in_flight: usize,
    stalled: bool,
    oldest_request_s: Option<f64>,
    held: usize,
    circuit: CircuitStatus,
    links: Vec<SlotStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_reload: Option<ReloadStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    restart: Option<RestartStatus>,
    #[serde(flatten)]
    figures: FigureStatus,
    #[serde(flatten)]
    pub(super) placed: Option<Placed>,
}

/// Where a backend of a cluster runs.
#[derive(Debug, Serialize)]
#[serde(tag = "placement", rename_all = "snake_case")]
pub(super) enum Placed {
    Every,
    One { owner: Option<String>, lease_s: Option<f64> },
}

impl BackendState {
    /// It can be resumed.
    pub(super) fn is_away(&self) -> bool {
        matches!(self.state, Some("given_up" | "backoff" | "idle"))
    }

    pub(super) fn is_off(&self) -> bool {
        self.state == Some("off")
    }

    fn set_last_exit(&mut self, exit: Option<ExitStatus>) {
        self.last_exit = exit.as_ref().map(|exit| exit.words.clone());
        self.exit = exit;
    }
}

impl Driver {
    /// The state of the whole gateway, or of one backend, as operators see it.
    pub(super) fn state(&self, backend: Option<&str>) -> Value {
        let mut state = match backend {
            Some(name) => {
                let mut state = self.backend_state(name).map_or_else(|| json!({}), |state| json!(state));
                state["id"] = format!("{}/{name}", self.plan.id).into();
                state["kind"] = "backend".into();
                state
            }
            None => json!(self.gateway_state()),
        };
        self.control.complete(&mut state);
        self.journal.mask().hide_in(&mut state);
        state
    }

    pub(super) fn gateway_state(&self) -> GatewayState {
        let status = self.gateway.status(self.now);
        let backends: Vec<BackendState> =
            status.backends.into_iter().map(|backend| self.state_of_backend(backend)).collect();
        let listen = self.listen.as_ref();
        GatewayState {
            state: if self.stopping == Stopping::No { "running" } else { "stopping" },
            uptime_s: self.now.saturating_duration_since(self.began).as_secs_f64(),
            restarts: backends.iter().map(|backend| backend.restarts).sum(),
            in_flight: status.in_flight,
            tools: status.tools,
            prompts: status.prompts,
            resources: status.resources,
            templates: status.templates,
            collisions: status.collisions,
            collision_count: status.collision_count,
            switched_off: status.switched_off,
            under_way: status.under_way,
            stopping: status.stopping,
            figures: status.figures,
            clients: self.client_counts(),
            listen: listen.map(|listen| format!("{}/mcp", listen.url())),
            status_page: listen.map(Listen::status_page),
            page: listen.map(Listen::page_with_token),
            stdio: self.stdio.is_some(),
            cluster: self.replica_state(),
            last_reload: self.reload.failed.as_ref().map(|(at, why)| FailedReload {
                ok: false,
                error: why.clone(),
                seconds_ago: self.now.saturating_duration_since(*at).as_secs_f64(),
            }),
            backends,
        }
    }

    pub(super) fn client_counts(&self) -> ClientCounts {
        let stdio = usize::from(self.stdio.is_some());
        let counts = self.listen.as_ref().map(Listen::counts);
        let (sessions, stateless) = counts.map_or((0, 0), |counts| (counts.sessions, counts.stateless));
        ClientCounts {
            clients: stdio + sessions + stateless,
            clients_by_kind: ClientsByKind { stdio, sessions, stateless },
            sessions: counts.map(|counts| SessionCounts {
                open: counts.sessions,
                stored: counts.sessions_stored,
                unrecorded: counts.sessions_unrecorded,
            }),
        }
    }

    fn replica_state(&self) -> Option<ReplicaState> {
        let replica = self.cluster.as_ref()?.borrow();
        let connection = replica.connection();
        Some(ReplicaState {
            membership: Membership { name: replica.cluster().to_owned(), replica: replica.name().to_owned() },
            instance: format!("{:016x}", replica.instance()),
            connected: connection.is_up,
            why: connection.why.clone(),
            watches_down: replica.watches_down().map(|(bucket, _)| bucket.name()).collect(),
            replicas: replica.presences().map(|presence| presence.name.clone()).collect(),
            owned: replica.owned(),
            sessions_local: replica.home_counts().local,
            share_parts: replica.parts(),
            audit_backlog: replica.audit_backlog(),
        })
    }

    /// The state of one backend, if it is configured.
    pub(super) fn backend_state(&self, name: &str) -> Option<BackendState> {
        let status = self.gateway.status(self.now).backends.into_iter().find(|backend| backend.name == name)?;
        Some(self.state_of_backend(status))
    }

    pub(super) fn state_of_backend(&self, status: BackendStatus) -> BackendState {
        let (name, life) = (status.name, status.life);
        let settings = self.gateway.backends().find(|backend| backend.name == name);
        let left_out = self.left_out.get(&name).filter(|_| settings.is_some_and(|backend| !backend.inherit_env));
        let command = settings.map(|backend| match &backend.kind {
            Kind::Stdio { command, args, .. } => {
                let words: Vec<String> = [command].into_iter().chain(args).map(Resolved::to_string).collect();
                shell_quote(without_secrets(&words).iter().map(String::as_str))
            }
            Kind::Http { url, .. } => without_secrets(&[url.to_string()]).concat(),
        });
        let (mut diverted, mut last_stderr) = (0, None);
        for (serial, wire) in &self.links {
            if let WireKind::Child { backend, diverted: lines } = &wire.kind
                && *backend == name
            {
                diverted += lines;
                let last = self.children.get(*serial).and_then(|child| child.tail().last());
                last_stderr = Some(last.map(|line| self.journal.mask().hide(line).into_owned()));
            }
        }
        let mut state = BackendState {
            state: status.state.map(shared_state),
            transport: status.kind,
            command,
            era: life.era,
            pid: life.pid,
            generation: life.generation,
            restarts: life.restarts,
            crashes: life.crashes,
            uptime_s: life.uptime_ms.map(seconds),
            next_try_s: life.next_try_ms.map(seconds),
            reason: life.reason,
            last_exit: None,
            exit: None,
            last_exits: status.last_exits,
            stderr_tail: life.stderr_tail,
            last_stderr,
            diverted,
            env_left_out: left_out.cloned().unwrap_or_default(),
            catalogue: status.catalogue,
            stale: status.catalogue == "stale",
            tools: status.tools.len(),
            tool_names: status.tools,
            offers: status.offers,
            unchecked: status.unchecked,
            in_flight: status.in_flight,
            stalled: status.stalled,
            oldest_request_s: status.oldest_request_s,
            held: status.held,
            circuit: status.circuit,
            links: status.links,
            last_reload: status.last_reload,
            restart: status.restart,
            figures: status.figures,
            placed: None,
            name,
        };
        state.set_last_exit(life.last_exit);
        self.put_placement(&mut state);
        state
    }

    /// Where a backend of a cluster runs, and how it is there if that is here.
    fn put_placement(&self, state: &mut BackendState) {
        let Some(replica) = &self.cluster else { return };
        if !self.is_placed(&state.name) {
            state.placed = Some(Placed::Every);
            return;
        }
        let replica = replica.borrow();
        state.placed = Some(Placed::One {
            owner: replica.owner(&state.name).map(|(owner, _)| owner.clone()),
            lease_s: replica.lease_left(&state.name).map(|left| left.as_secs_f64()),
        });
        if let Some(BackendStatus { state: hosted, life, .. }) = self.hosted_status(&state.name) {
            state.state = hosted.map(shared_state);
            state.pid = life.pid;
            state.generation = life.generation;
            state.restarts = life.restarts;
            state.uptime_s = life.uptime_ms.map(seconds);
            state.next_try_s = life.next_try_ms.map(seconds);
            state.set_last_exit(life.last_exit);
        }
    }

    /// The process id of each backend, or of one, where it runs.
    pub(super) fn pids(&self, backend: Option<&str>) -> Vec<(String, Option<u32>)> {
        let named = self.gateway.status(self.now).backends.into_iter();
        let named = named.filter(|status| backend.is_none_or(|backend| backend == status.name));
        let pid_of = |status: BackendStatus| {
            let pid = self.hosted_status(&status.name).map_or(status.life.pid, |hosted| hosted.life.pid);
            (status.name, pid)
        };
        named.map(pid_of).collect()
    }
}

/// The state of a backend, with the word that all kinds of instances share.
fn shared_state(state: &'static str) -> &'static str {
    match state {
        "connecting" => "starting",
        "waiting" => "backoff",
        state => state,
    }
}

fn seconds(millis: u64) -> f64 {
    millis as f64 / 1000.0
}
