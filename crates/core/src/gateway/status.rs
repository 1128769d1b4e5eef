//! The state of a gateway as operators see it, as types that serialize to the JSON of `outlast state` and the status page.
//! Fields are added and never renamed.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    exit::HowStatus,
    mcp::List,
    pace::Figures,
    record::millis,
    restarts::{Past, PastStatus, RECENT_MAX},
    slot::Current,
};

use super::{
    Era, Gateway, Switch,
    backends::{BackendState, OfferState},
    guard::Circuit,
    links::{LinkState, Phase},
    slots::{LastEnd, Sharing, SlotKey, SlotState},
    trials::{self, ConfigChange},
};

/// Collisions that are listed; `collision_count` counts all of them.
const COLLISIONS_MAX: usize = 100;

#[derive(Debug, Clone, Serialize)]
pub struct Status {
    pub backends: Vec<BackendStatus>,
    pub clients: usize,
    pub in_flight: usize,
    pub tools: usize,
    pub prompts: usize,
    pub resources: usize,
    pub templates: usize,
    pub collisions: Vec<CollisionStatus>,
    pub collision_count: usize,
    pub switched_off: Vec<SwitchedOff>,
    pub under_way: UnderWay,
    pub stopping: bool,
    #[serde(flatten)]
    pub figures: FigureStatus,
}

impl Status {
    pub fn to_json(&self) -> Value {
        json!(self)
    }
}

/// Two backends offer the same name.
#[derive(Debug, Clone, Serialize)]
pub struct CollisionStatus {
    pub list: &'static str,
    pub name: String,
    pub offered_by: String,
    pub left_out: String,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SwitchedOff {
    Tool(String),
    Backend(String),
}

/// How many of each the gateway keeps at the moment.
#[derive(Debug, Clone, Serialize)]
pub struct UnderWay {
    pub calls: usize,
    pub own_requests: usize,
    pub asked_of_clients: usize,
    pub batches: usize,
    pub waiting_for_offers: usize,
    pub waiting_for_checks: usize,
    pub lists_of_tasks: usize,
    pub errands: usize,
    pub links: usize,
}

/// The figures that all kinds of instances have.
#[derive(Debug, Clone, Serialize)]
pub struct FigureStatus {
    pub calls: u64,
    pub calls_per_s: f64,
    pub p50_ms: Option<f64>,
    pub p99_ms: Option<f64>,
}

#[derive(Debug, Clone, Serialize)]
pub struct BackendStatus {
    pub name: String,
    /// `stdio` or `http`.
    pub kind: &'static str,
    /// `off`, or that of the first slot.
    pub state: Option<&'static str>,
    /// `restarts` of it are of all slots, also of those that were removed; the rest is of the first slot.
    #[serde(flatten)]
    pub life: LifeStatus,
    pub last_exits: Vec<PastStatus>,
    /// `confirmed`, `stale` or `unknown`.
    pub catalogue: &'static str,
    pub tools: Vec<String>,
    pub offers: OfferCounts,
    pub unchecked: Vec<UncheckedTool>,
    pub in_flight: usize,
    pub stalled: bool,
    pub oldest_request_s: Option<f64>,
    pub held: usize,
    pub circuit: CircuitStatus,
    pub links: Vec<SlotStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_reload: Option<ReloadStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart: Option<RestartStatus>,
    #[serde(flatten)]
    pub figures: FigureStatus,
}

/// What a slot and the process in it are doing.
#[derive(Debug, Clone, Default, Serialize)]
pub struct LifeStatus {
    pub era: Option<&'static str>,
    pub pid: Option<u32>,
    pub generation: Option<u64>,
    pub restarts: u64,
    pub crashes: Option<u32>,
    pub uptime_ms: Option<u64>,
    pub next_try_ms: Option<u64>,
    /// Why it was given up.
    pub reason: Option<String>,
    pub last_exit: Option<ExitStatus>,
    pub stderr_tail: Option<String>,
}

#[derive(Debug, Clone, Serialize)]
pub struct OfferCounts {
    pub tools: usize,
    pub prompts: usize,
    pub resources: usize,
    pub templates: usize,
}

#[derive(Debug, Clone, Serialize)]
pub struct UncheckedTool {
    pub tool: String,
    pub reason: String,
}

#[derive(Debug, Clone, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum CircuitStatus {
    Closed { failures: u32 },
    Open { for_ms: u64 },
    HalfOpen,
}

/// The last change or restart that failed.
#[derive(Debug, Clone, Serialize)]
pub struct ReloadStatus {
    pub ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
    pub error: String,
    pub stderr_tail: String,
    pub seconds_ago: f64,
    /// True while the configuration still asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pending: Option<bool>,
}

#[derive(Debug, Clone, Serialize)]
pub struct RestartStatus {
    pub step: &'static str,
    pub reason: &'static str,
}

#[derive(Debug, Clone, Serialize)]
pub struct SlotStatus {
    /// Which clients use it.
    pub seat: String,
    /// `ready`, `connecting`, `waiting`, `idle`, `given_up` or `stopping`.
    pub state: &'static str,
    pub serial: Option<u64>,
    pub version: Option<String>,
    pub in_flight: usize,
    pub held: usize,
    pub garbage: u64,
    #[serde(flatten)]
    pub life: LifeStatus,
}

/// How a process ended. Its members are those of the audit log, and these.
#[derive(Debug, Clone, Serialize)]
pub struct ExitStatus {
    #[serde(flatten)]
    pub how: HowStatus,
    pub words: String,
    pub ago_ms: u64,
}

impl Gateway {
    pub fn status(&self, now: Instant) -> Status {
        let mut tools: FxHashMap<u32, Vec<String>> = FxHashMap::default();
        for entry in self.catalogue.all(List::Tools) {
            tools.entry(entry.owner).or_default().push(entry.shown.to_string());
        }
        let of = |(number, backend): (u32, &BackendState)| {
            self.backend_status(number, backend, tools.remove(&number).unwrap_or_default(), now)
        };
        let backends = self.backends.in_order().map(of).collect();
        let collisions = self.catalogue.collisions().iter().take(COLLISIONS_MAX).map(|collision| CollisionStatus {
            list: collision.kind.member(),
            name: collision.shown.to_string(),
            offered_by: self.backends.name(collision.winner).to_owned(),
            left_out: self.backends.name(collision.loser).to_owned(),
        });
        let switched_off = self.guards.all_off().map(|switch| match switch {
            Switch::Tool(name) => SwitchedOff::Tool(name),
            Switch::Backend(name) => SwitchedOff::Backend(name),
        });
        Status {
            backends,
            clients: self.clients.len(),
            in_flight: self.calls.of_clients(),
            tools: self.catalogue.all(List::Tools).len(),
            prompts: self.catalogue.all(List::Prompts).len(),
            resources: self.catalogue.all(List::Resources).len(),
            templates: self.catalogue.all(List::Templates).len(),
            collisions: collisions.collect(),
            collision_count: self.catalogue.collisions().len(),
            switched_off: switched_off.collect(),
            under_way: UnderWay {
                calls: self.calls.of_clients(),
                own_requests: self.calls.own(),
                asked_of_clients: self.server_requests.len(),
                batches: self.clients.batches(),
                waiting_for_offers: self.offer_waits.len() - self.offer_waits.checks(),
                waiting_for_checks: self.offer_waits.checks(),
                lists_of_tasks: self.tasks.lists(),
                errands: self.operator_requests.len(),
                links: self.links.len(),
            },
            stopping: self.stage.is_stopping(),
            figures: FigureStatus::new(&self.pace.figures(now)),
        }
    }

    fn backend_status(&self, number: u32, backend: &BackendState, tools: Vec<String>, now: Instant) -> BackendStatus {
        let links: Vec<SlotStatus> =
            self.slots_of(number).map(|(key, slot)| self.slot_status(*key, slot, now)).collect();
        let first = self.first_slot(number);
        let main = self.slots.get(&first).map(|slot| self.slot_status(first, slot, now));
        let state = match self.guards.is_backend_off(backend.name()) {
            true => Some("off"),
            false => main.as_ref().map(|main| main.state),
        };
        let restarts = backend.restarts_removed() + links.iter().map(|link| link.life.restarts).sum::<u64>();
        let in_flight = || {
            let calls = self.calls.values().filter(|call| call.slot.backend == number);
            calls.filter(|call| call.reply_to.is_some() && call.link.is_some())
        };
        let oldest = in_flight().map(|call| now.saturating_duration_since(call.began)).max();
        let of_backend = self.links.values().filter(|link_state| link_state.id().backend == number);
        let mut past: Vec<&Past> = self
            .slots_of(number)
            .flat_map(|(_, slot)| slot.links.restarts().recent())
            .chain(backend.exits_removed())
            .collect();
        past.sort_by_key(|past| past.at);
        let past = &past[past.len().saturating_sub(RECENT_MAX)..];
        let offer = backend.offer();
        let failed = self.slots_of(number).filter_map(|(_, slot)| slot.failed_reload());
        let last_reload = match backend.change() {
            ConfigChange::Failed(failed) => Some(failed.status(now)),
            _ => failed.max_by_key(|end| end.at).map(|end| ReloadStatus {
                ok: false,
                reason: None,
                error: format!("the new server did not start ({})", end.how),
                stderr_tail: end.stderr.clone(),
                seconds_ago: now.saturating_duration_since(end.at).as_secs_f64(),
                pending: None,
            }),
        };
        let restart =
            backend.trial().map(|_| RestartStatus { step: "starting the new process", reason: trials::CHANGED });
        BackendStatus {
            name: backend.settings().name.clone(),
            kind: if backend.is_http() { "http" } else { "stdio" },
            state,
            life: LifeStatus { restarts, ..main.map(|main| main.life).unwrap_or_default() },
            last_exits: past.iter().map(|past| past.status(now)).collect(),
            catalogue: match backend.offer_state() {
                OfferState::Confirmed => "confirmed",
                OfferState::Stale => "stale",
                OfferState::Unknown | OfferState::Failed => "unknown",
            },
            tools,
            offers: OfferCounts {
                tools: offer.tools.len(),
                prompts: offer.prompts.len(),
                resources: offer.resources.len(),
                templates: offer.templates.len(),
            },
            unchecked: backend
                .unchecked()
                .map(|(tool, why)| UncheckedTool { tool: tool.to_owned(), reason: why.to_owned() })
                .collect(),
            in_flight: in_flight().count(),
            stalled: { of_backend }.any(|link_state| link_state.liveness.is_suspected()),
            oldest_request_s: oldest.map(|age| age.as_secs_f64()),
            held: links.iter().map(|link| link.held).sum(),
            circuit: match backend.circuit() {
                Circuit::Closed { failures } => CircuitStatus::Closed { failures },
                Circuit::Open { until } => CircuitStatus::Open { for_ms: millis(until.saturating_duration_since(now)) },
                Circuit::HalfOpen => CircuitStatus::HalfOpen,
            },
            links,
            last_reload,
            restart,
            figures: FigureStatus::new(&backend.figures(now)),
        }
    }

    fn slot_status(&self, key: SlotKey, slot: &SlotState, now: Instant) -> SlotStatus {
        let link_state = slot.links.child().and_then(|serial| self.links.get(&serial));
        let ready = link_state.and_then(|link_state| Some((link_state, link_state.ready_at()?)));
        SlotStatus {
            seat: match key.sharing {
                Sharing::Shared => "shared".to_owned(),
                Sharing::Handshake => "handshake".to_owned(),
                Sharing::Pool(index) => format!("pool {index}"),
                Sharing::Session(client) => format!("client {client}"),
                Sharing::Borrowed(_) => "lent".to_owned(),
            },
            state: match (slot.links.current(), link_state.map(LinkState::phase)) {
                (Current::None, _) => "idle",
                (Current::Down { .. }, _) => "waiting",
                (Current::GivenUp { .. }, _) => "given_up",
                (_, Some(Phase::Ready | Phase::Draining { .. })) => "ready",
                (_, Some(Phase::Connecting { .. } | Phase::Opening { .. })) => "connecting",
                (_, Some(Phase::Stopping { .. }) | None) => "stopping",
            },
            serial: link_state.map(|link_state| link_state.id().serial),
            version: ready.map(|(link_state, _)| link_state.version().to_owned()),
            in_flight: link_state.map_or(0, LinkState::in_flight),
            held: slot.held(),
            garbage: link_state.map_or(0, LinkState::garbage),
            life: LifeStatus {
                era: ready.map(|(link_state, _)| match link_state.era() {
                    Era::Handshake => "handshake",
                    Era::Stateless => "stateless",
                }),
                pid: link_state.and_then(LinkState::pid),
                generation: Some(slot.generation()),
                restarts: u64::from(slot.links.restarts().restarts()),
                crashes: Some(slot.links.restarts().crashes(now)),
                uptime_ms: ready.map(|(_, at)| millis(now.saturating_duration_since(at))),
                next_try_ms: slot.links.due().map(|due| millis(due.saturating_duration_since(now))),
                reason: slot.given_up(),
                last_exit: slot.last_end().map(|end| ExitStatus::new(end, now)),
                stderr_tail: slot.last_end().map(|end| end.stderr.clone()),
            },
        }
    }
}

impl ExitStatus {
    fn new(end: &LastEnd, now: Instant) -> ExitStatus {
        let LastEnd { how, at, .. } = end;
        ExitStatus { how: how.status(), words: how.to_string(), ago_ms: millis(now.saturating_duration_since(*at)) }
    }
}

impl FigureStatus {
    fn new(figures: &Figures) -> FigureStatus {
        let in_ms = |took: Option<Duration>| took.map(|took| took.as_secs_f64() * 1e3);
        FigureStatus {
            calls: figures.answered,
            calls_per_s: figures.per_second,
            p50_ms: in_ms(figures.p50),
            p99_ms: in_ms(figures.p99),
        }
    }
}
