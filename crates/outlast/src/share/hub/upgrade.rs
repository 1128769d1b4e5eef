//! A hub becomes another program: what is saved of its clients, and how the next program continues with them. The relay of
//! the server decides when, and is saved with it (`relay/mcp/upgrade.rs`).

use std::{io, rc::Rc, task::Context, time::Instant};

use outlast_core::{
    gateway::{self, Client, Gateway},
    saved::{Moment, Octets},
};
use outlast_os::{
    self as os, Claim, Listener,
    handover::{Handover, Received},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    super::{
        connection::{Connection, SavedConnection},
        place::Files,
        wire::{FromHub, Hello},
    },
    Handing, Hub, HubReport, Phase, Plan, Seat,
};
use crate::{relay::mcp::upgrade::InnerClient, upgrade::own_program};

/// A hub as saved state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub gateway: gateway::Saved,
    listener: Option<i32>,
    claim: Option<i32>,
    clients: Vec<SavedSeat>,
    next_client: Client,
    relay: SavedConnection,
    idle_until: Option<Moment>,
}

/// One client.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SavedSeat {
    client: Client,
    connection: SavedConnection,
    /// Its greeting.
    hello: Octets,
    since: f64,
}

impl Handing {
    pub(super) fn began(&mut self, cx: &Context<'_>) {
        if !self.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            self.waker = Some(cx.waker().clone());
        }
    }

    pub(super) fn ended(&mut self) {
        self.waiting.take().into_iter().for_each(|waker| waker.wake());
    }
}

impl Hub {
    /// A request that needs an answer of its client can only end if clients are heard.
    pub(super) fn is_held(&self) -> bool {
        self.handover.is_held && !self.gateway.as_ref().is_some_and(Gateway::awaits_client)
    }

    fn busy(&self) -> Option<String> {
        let Some(gateway) = &self.gateway else { return Some("no client has joined the hub yet".to_owned()) };
        if let Some(busy) = gateway.busy() {
            Some(busy.to_string())
        } else if self.ending.is_some() || self.is_killed || self.link.is_none() || self.relay.is_closed() {
            Some("the hub is ending".to_owned())
        } else if !self.clients.values().all(|seat| matches!(seat.phase, Phase::Serving)) {
            Some("a client is joining or leaving the hub".to_owned())
        } else {
            None
        }
    }

    /// The hub of the last program of this process. Its clients are told to become the same program. Must be called within
    /// the runtime.
    pub(crate) fn restore(
        plan: Plan,
        saved: Saved,
        files: Option<&Files>,
        stops: os::Stops,
        report: HubReport,
        received: &mut Received,
    ) -> io::Result<Hub> {
        let wrong = |why: &str| io::Error::other(why.to_owned());
        let now = Instant::now();
        let gateway = Gateway::restore_shared_server(&plan.name, saved.gateway, now);
        let gateway = gateway.ok_or_else(|| wrong("the state is not that of a hub"))?;
        let (mut listener, mut claim) = (None, None);
        if let Some(files) = files {
            let restored = |number| Listener::restore(received, number, &files.socket);
            listener = saved.listener.map(restored).transpose()?;
            let restored = |number| Claim::restore(received, number, &files.claim);
            claim = saved.claim.map(restored).transpose()?.map(Rc::new);
        }
        let relay = Connection::restore(saved.relay, received)?;
        let mut hub = Hub::over(plan, listener, claim, relay, stops, report);
        hub.link = gateway.links().first().copied();
        hub.gateway = Some(gateway);
        hub.next_client = saved.next_client;
        hub.idle_until = saved.idle_until.map(|moment| moment.at(now));
        let program = own_program().map(|program| program.path);
        for seat in saved.clients {
            let hello =
                Hello::read(seat.hello.bytes().trim_ascii_end()).ok_or_else(|| wrong("a greeting is missing"))?;
            let mut connection = Connection::restore(seat.connection, received)?;
            if let Some(program) = program.as_deref().and_then(|program| program.to_str()) {
                connection.put(FromHub::Upgrade { program: program.to_owned() }.to_line(), None);
            }
            let restored = Seat { connection, phase: Phase::Serving, hello: Some(hello), since: seat.since };
            hub.clients.insert(seat.client, restored);
        }
        hub.publish();
        Ok(hub)
    }
}

impl InnerClient for Hub {
    fn poll_busy(&mut self, cx: &mut Context<'_>) -> Option<String> {
        self.handover.waiting = Some(cx.waker().clone());
        self.busy()
    }

    fn hold(&mut self, is_held: bool) {
        let was_held = std::mem::replace(&mut self.handover.is_held, is_held);
        if was_held && !is_held {
            self.handover.waker.iter().for_each(|waker| waker.wake_by_ref());
        }
    }

    fn is_young(&self, since: Instant) -> bool {
        let open_since = self.gateway.as_ref().and_then(Gateway::open_since);
        open_since.is_some_and(|open| since < open)
    }

    fn has_begun(&self) -> bool {
        self.gateway.is_some()
    }

    fn save(&self, handover: &mut Handover, now: Instant) -> Option<Value> {
        let gateway = self.gateway.as_ref()?.sketch(now);
        let clients = self.clients.iter().filter_map(|(client, seat)| {
            Some(SavedSeat {
                client: *client,
                connection: seat.connection.save(handover),
                hello: Octets::of(&seat.hello.as_ref()?.to_line()),
                since: seat.since,
            })
        });
        let clients = clients.collect();
        let saved = Saved {
            gateway,
            clients,
            listener: self.listener.as_ref().map(|listener| listener.keep(handover)),
            claim: self.claim.as_ref().map(|claim| claim.keep(handover)),
            next_client: self.next_client,
            relay: self.relay.save(handover),
            idle_until: self.idle_until.map(|until| Moment::of(until, now)),
        };
        Some(serde_json::to_value(saved).expect("a state is always JSON"))
    }
}
