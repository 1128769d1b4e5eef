//! The gateway as operators see it.

use serde_json::{Value, json};

use super::*;
use crate::pace::Figures;

use guard::Circuit;
use links::Phase;
use places::State;

/// Collisions that are listed; `collision_count` counts all of them.
const COLLISIONS_MAX: usize = 100;

impl Gateway {
    /// Everything at a glance. `state` of a backend is `ready`, `connecting`, `waiting`, `idle`, `given_up`, `stopping`
    /// or `off`; `catalogue` is `confirmed`, `stale` or `unknown`. Fields are added, never renamed.
    pub fn status(&self, now: Instant) -> Value {
        let mut tools: FxHashMap<u32, Vec<&str>> = FxHashMap::default();
        for entry in self.catalogue.all(List::Tools) {
            tools.entry(entry.owner).or_default().push(&entry.shown);
        }
        let of = |number: &u32| self.backend_status(*number, tools.remove(number).unwrap_or_default(), now);
        let backends: Vec<Value> = self.order.iter().map(of).collect();
        let collisions: Vec<Value> = self
            .catalogue
            .collisions
            .iter()
            .take(COLLISIONS_MAX)
            .map(|collision| {
                json!({
                    "list": collision.kind.member(),
                    "name": &*collision.shown,
                    "offered_by": self.owner_name(collision.winner),
                    "left_out": self.owner_name(collision.loser),
                })
            })
            .collect();
        let off: Vec<Value> = self
            .switches
            .all_off()
            .map(|switch| match switch {
                Switch::Tool(name) => json!({"tool": name}),
                Switch::Backend(name) => json!({"backend": name}),
            })
            .collect();
        let mut status = json!({
            "backends": backends,
            "clients": self.guests.len(),
            "in_flight": self.calls.values().filter(|call| call.whom.is_some()).count(),
            "tools": self.catalogue.all(List::Tools).len(),
            "prompts": self.catalogue.all(List::Prompts).len(),
            "resources": self.catalogue.all(List::Resources).len(),
            "templates": self.catalogue.all(List::Templates).len(),
            "collisions": collisions,
            "collision_count": self.catalogue.collisions.len(),
            "switched_off": off,
            "under_way": {
                "calls": self.calls.values().filter(|call| call.whom.is_some()).count(),
                "own_requests": self.calls.values().filter(|call| call.whom.is_none()).count(),
                "asked_of_clients": self.asks.len(),
                "batches": self.batches.len(),
                "waiting_for_offers": self.gathering.len(),
                "lists_of_tasks": self.task_lists.len(),
                "errands": self.errands.len(),
                "links": self.links.len(),
            },
            "stopping": self.stopping.is_some(),
        });
        put_figures(&mut status, &self.pace.figures(now));
        status
    }

    fn backend_status(&self, number: u32, tools: Vec<&str>, now: Instant) -> Value {
        let owner = &self.owners[&number];
        let links: Vec<Value> = self
            .places
            .iter()
            .filter(|(key, _)| key.backend == number)
            .map(|(key, place)| self.place_status(*key, place, now))
            .collect();
        let first = self.first_place(number);
        let main = self.places.get(&first).map_or(Value::Null, |place| self.place_status(first, place, now));
        let in_flight = || {
            let calls = self.calls.values().filter(|call| call.place.backend == number);
            calls.filter(|call| call.whom.is_some() && call.link.is_some())
        };
        let oldest = in_flight().map(|call| now.saturating_duration_since(call.began)).max();
        let of_backend = |connection: &&links::Connection| connection.link.backend == number;
        let is_stalled = self.links.values().filter(of_backend).any(|connection| connection.suspected.is_some());
        let held: usize =
            self.places.iter().filter(|(key, _)| key.backend == number).map(|(_, place)| place.held.len()).sum();
        let is_off = self.switches.is_backend_off(&owner.settings.name);
        let circuit = match owner.breaker.state() {
            Circuit::Closed { failures } => json!({"state": "closed", "failures": failures}),
            Circuit::Open { until } => json!({"state": "open", "for_ms": millis(until.saturating_duration_since(now))}),
            Circuit::HalfOpen => json!({"state": "half_open"}),
        };
        let mut past: Vec<&Past> = self
            .places
            .iter()
            .filter(|(key, _)| key.backend == number)
            .flat_map(|(_, place)| place.restarts.recent())
            .chain(&owner.past_gone)
            .collect();
        past.sort_by_key(|past| past.at);
        let past = &past[past.len().saturating_sub(RECENT_MAX)..];
        let mut status = json!({
            "name": owner.settings.name,
            "kind": match owner.settings.kind { Kind::Stdio { .. } => "stdio", Kind::Http { .. } => "http" },
            "state": if is_off { json!("off") } else { main["state"].clone() },
            "era": main["era"],
            "pid": main["pid"],
            "generation": main["generation"],
            "restarts": owner.restarts_gone + links.iter().filter_map(|link| link["restarts"].as_u64()).sum::<u64>(),
            "crashes": main["crashes"],
            "uptime_ms": main["uptime_ms"],
            "next_try_ms": main["next_try_ms"],
            "reason": main["reason"],
            "last_exit": main["last_exit"],
            "last_exits": past.iter().map(|past| past.to_json(now)).collect::<Vec<Value>>(),
            "stderr_tail": main["stderr_tail"],
            "catalogue": match owner.standing {
                Standing::Confirmed => "confirmed",
                Standing::Stale => "stale",
                Standing::Unknown | Standing::Failed => "unknown",
            },
            "tools": tools,
            "offers": {
                "tools": owner.offer.tools.len(),
                "prompts": owner.offer.prompts.len(),
                "resources": owner.offer.resources.len(),
                "templates": owner.offer.templates.len(),
            },
            "unchecked": owner.unchecked.iter().map(|(tool, why)| json!({"tool": &**tool, "reason": why})).collect::<Vec<Value>>(),
            "in_flight": in_flight().count(),
            "stalled": is_stalled,
            "oldest_request_s": oldest.map(|age| age.as_secs_f64()),
            "held": held,
            "circuit": circuit,
            "links": links,
        });
        let failed = self.places.iter().filter(|(key, _)| key.backend == number);
        let failed = failed.filter_map(|(_, place)| place.failed_reload.as_ref()).max_by_key(|end| end.at);
        if let Some(refused) = &owner.refused {
            status["last_reload"] = refused.to_json(now);
        } else if let Some(end) = failed {
            status["last_reload"] = json!({
                "ok": false,
                "error": format!("the new server did not start ({})", end.how),
                "seconds_ago": now.saturating_duration_since(end.at).as_secs_f64(),
                "stderr_tail": end.stderr,
            });
        }
        if owner.trial.is_some() {
            status["restart"] = json!({"step": "starting the new process", "reason": trials::CHANGED});
        }
        put_figures(&mut status, &owner.pace.figures(now));
        status
    }

    fn place_status(&self, key: PlaceKey, place: &Place, now: Instant) -> Value {
        let connection = place.current().and_then(|serial| self.links.get(&serial));
        let state = match (&place.state, connection.map(|connection| &connection.phase)) {
            (State::Idle, _) => "idle",
            (State::Waiting { .. }, _) => "waiting",
            (State::GivenUp { .. }, _) => "given_up",
            (State::Linked(_), Some(Phase::Ready | Phase::Draining { .. })) => "ready",
            (State::Linked(_), Some(Phase::Connecting { .. } | Phase::Opening { .. })) => "connecting",
            (State::Linked(_), Some(Phase::Stopping { .. }) | None) => "stopping",
        };
        let next_try = match (&place.state, place.due()) {
            (State::Waiting { .. } | State::GivenUp { .. }, Some(due)) => {
                json!(millis(due.saturating_duration_since(now)))
            }
            _ => Value::Null,
        };
        let reason = match &place.state {
            State::GivenUp { why, .. } => json!(why),
            _ => Value::Null,
        };
        let ready = connection.filter(|connection| connection.ready.is_some());
        json!({
            "seat": match key.seat {
                Seat::Shared => json!("shared"),
                Seat::Second => json!("handshake"),
                Seat::Pool(index) => json!(format!("pool {index}")),
                Seat::Session(client) => json!(format!("client {client}")),
                Seat::Lent(_) => json!("lent"),
            },
            "state": state,
            "serial": connection.map(|connection| connection.link.serial),
            "pid": connection.and_then(|connection| connection.pid),
            "era": ready.map(|connection| match connection.era {
                Era::Handshake => "handshake",
                Era::Stateless => "stateless",
            }),
            "version": ready.map(|connection| connection.version.clone()),
            "generation": place.generation,
            "restarts": place.restarts.restarts(),
            "crashes": place.restarts.crashes(now),
            "uptime_ms": ready.and_then(|connection| connection.ready).map(|ready| millis(now.saturating_duration_since(ready))),
            "next_try_ms": next_try,
            "reason": reason,
            "in_flight": connection.map_or(0, |connection| connection.in_flight),
            "held": place.held.len(),
            "garbage": connection.map_or(0, |connection| connection.garbage),
            "last_exit": place.last_end.as_ref().map(|end| {
                let mut exit = end.how.to_json();
                exit["words"] = json!(end.how.to_string());
                exit["ago_ms"] = json!(millis(now.saturating_duration_since(end.at)));
                exit
            }),
            "stderr_tail": place.last_end.as_ref().map(|end| end.stderr.clone()),
        })
    }
}

/// In the words that all kinds of instances share.
fn put_figures(status: &mut Value, figures: &Figures) {
    let in_ms = |took: Option<Duration>| took.map(|took| took.as_secs_f64() * 1e3);
    status["calls"] = figures.answered.into();
    status["calls_per_s"] = figures.per_second.into();
    status["p50_ms"] = in_ms(figures.p50).into();
    status["p99_ms"] = in_ms(figures.p99).into();
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
