//! The gateway as saved state, so that another program can continue with its clients and its links. Calls are not part of it:
//! they are waited for. Settings are not either: the next program reads the configuration that is in force.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Instant,
};

use serde::{Deserialize, Serialize};

use super::{
    Client, Era, Gateway, Kind, Link, Offer, Schemas, Settings, Stage, Who,
    backends::{Backends, Eras, OfferState},
    calls::{Call, CallKind},
    catalogue::Catalogue,
    clients::{ClientState, Declared},
    ids::Ids,
    links::LinkState,
    opening::OwnRequest,
    shared_server::{SavedSharedServer, SharedServer},
    slots::{SlotKey, SlotState},
    tasks::{TaskOwner, Tasks},
    timers::Timer,
    trials::ConfigChange,
};
use crate::{
    capabilities::Capabilities,
    count::count,
    exit::How,
    mcp::{Family, method},
    message::Id,
    pace::{self, Pace},
    restarts,
    saved::{Moment, Octets},
    slot,
};

/// Everything that clients and operators would miss.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    ids: SavedIds,
    /// The number of each name, also of backends that are no longer configured.
    numbers: BTreeMap<String, u32>,
    backends: Vec<SavedBackend>,
    slots: Vec<SavedSlot>,
    links: Vec<SavedLink>,
    clients: Vec<SavedClient>,
    catalogue: SavedCatalogue,
    guards: SavedGuards,
    tasks: SavedTasks,
    pace: pace::Saved,
    /// Of the hub of a shared server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shared: Option<SavedSharedServer>,
}

/// Why the gateway cannot be saved now. `Display` completes the sentence "... because".
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Busy {
    Starting,
    Stopping,
    /// So many requests of clients are open.
    Requests(usize),
    /// Backends wait for answers of clients.
    Questions(usize),
    Operator,
    /// A link of this backend is being opened or closed.
    Moving(String),
    /// This backend has not answered a request of the gateway itself.
    Reading(String),
    /// Clients have not been told of changed lists yet.
    Merging,
}

impl fmt::Display for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Busy::Starting => f.write_str("the gateway is starting"),
            Busy::Stopping => f.write_str("the gateway is stopping"),
            Busy::Requests(1) => f.write_str("1 request is open"),
            Busy::Requests(open) => write!(f, "{open} requests are open"),
            Busy::Questions(open) => {
                write!(f, "a client has not answered {}", count(*open, "request of a backend", "requests of backends"))
            }
            Busy::Operator => f.write_str("a request of an operator is being carried out"),
            Busy::Moving(name) => write!(f, "the backend `{name}` is being started, replaced or stopped"),
            Busy::Reading(name) => write!(f, "the lists of the backend `{name}` are being read"),
            Busy::Merging => f.write_str("changed lists are being merged"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedIds {
    pub(super) next: u64,
    pub(super) seed: u64,
    pub(super) generations: Vec<(SlotKey, u64)>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedBackend {
    pub(super) number: u32,
    pub(super) offer: SavedOffer,
    pub(super) offer_state: OfferState,
    pub(super) circuit: SavedCircuit,
    pub(super) unchecked: BTreeMap<String, String>,
    pub(super) eras: Option<Eras>,
    pub(super) is_proven: bool,
    pub(super) is_kept: bool,
    pub(super) failed_change: Option<SavedFailedChange>,
    pub(super) turn: u32,
    pub(super) pace: pace::Saved,
    pub(super) restarts_removed: u64,
    pub(super) exits_removed: Vec<restarts::SavedPast>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedOffer {
    tools: Vec<Octets>,
    prompts: Vec<Octets>,
    resources: Vec<Octets>,
    templates: Vec<Octets>,
    capabilities: Octets,
    instructions: Option<String>,
}

impl SavedOffer {
    pub(super) fn of(offer: &Offer) -> SavedOffer {
        let save = |items: &Vec<bytes::Bytes>| items.iter().map(|item| Octets::of(item)).collect();
        SavedOffer {
            tools: save(&offer.tools),
            prompts: save(&offer.prompts),
            resources: save(&offer.resources),
            templates: save(&offer.templates),
            capabilities: Octets::of(&offer.capabilities),
            instructions: offer.instructions.clone(),
        }
    }

    pub(super) fn offer(self) -> Offer {
        let restore = |items: Vec<Octets>| items.into_iter().map(Octets::bytes).collect();
        Offer {
            tools: restore(self.tools),
            prompts: restore(self.prompts),
            resources: restore(self.resources),
            templates: restore(self.templates),
            capabilities: self.capabilities.bytes(),
            instructions: self.instructions,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SavedCircuit {
    Closed { failures: u32 },
    Open { until: Moment },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedFailedChange {
    pub(super) why: String,
    pub(super) stderr: String,
    pub(super) at: Moment,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedSlot {
    pub(super) key: SlotKey,
    pub(super) links: slot::Saved<u64>,
    pub(super) last_end: Option<SavedLastEnd>,
    pub(super) failed_reload: Option<SavedLastEnd>,
    pub(super) generation: u64,
    pub(super) replaced_at: Option<Moment>,
    pub(super) borrower: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedLastEnd {
    pub(super) how: How,
    pub(super) stderr: String,
    pub(super) at: Moment,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedLink {
    /// Backend and serial.
    pub(super) id: (u32, u64),
    pub(super) slot: SlotKey,
    pub(super) era: Era,
    pub(super) version: String,
    pub(super) has: Capabilities,
    pub(super) pid: Option<u32>,
    pub(super) generation: u64,
    pub(super) began: Moment,
    pub(super) ready_at: Option<Moment>,
    pub(super) last_used: Moment,
    pub(super) is_probe: bool,
    /// None if it is that of its backend.
    pub(super) offer: Option<SavedOffer>,
    /// Which of its lists changed and are to be read again.
    #[serde(default, skip_serializing_if = "are_unchanged")]
    pub(super) changed_lists: [bool; 4],
    pub(super) answered: u64,
    pub(super) is_recorded: bool,
    pub(super) garbage: u64,
    pub(super) subscriptions: SavedLinkSubscriptions,
    pub(super) abandoned: Vec<SavedAbandoned>,
}

fn are_unchanged(lists: &[bool; 4]) -> bool {
    lists == &[false; 4]
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedLinkSubscriptions {
    pub(super) watched: BTreeSet<String>,
    pub(super) listening: SavedListening,
    pub(super) level: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SavedListening {
    Closed,
    Open(u64),
    RetryAt(Moment),
    Unsupported,
}

/// A call that was cancelled or late. Its backend may still ask for input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedAbandoned {
    pub(super) key: u64,
    pub(super) client: Client,
    pub(super) kind: CallKind,
    pub(super) shown: Option<String>,
    pub(super) until: Moment,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedClient {
    pub(super) client: Client,
    pub(super) who: SavedWho,
    pub(super) front: SavedFront,
    /// The revision, and whether the client has confirmed it.
    pub(super) handshake: Option<(String, bool)>,
    pub(super) capabilities: Option<String>,
    pub(super) info: Option<String>,
    pub(super) subscriptions: SavedClientSubscriptions,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SavedFront {
    Lines,
    Session,
}

/// The result of authentication.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedWho {
    name: String,
    role: Option<String>,
    profile: Option<String>,
}

impl SavedWho {
    pub(crate) fn of(who: &Who) -> SavedWho {
        SavedWho { name: who.name.clone(), role: who.role.clone(), profile: who.profile.clone() }
    }

    pub(crate) fn who(self) -> Who {
        Who { name: self.name, role: self.role, profile: self.profile }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedClientSubscriptions {
    pub(super) level: Option<String>,
    pub(super) watches: BTreeSet<String>,
    pub(super) listens: Vec<SavedListen>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedListen {
    pub(super) id: Id,
    pub(super) raw: String,
    pub(super) wants: [bool; 3],
    pub(super) uris: BTreeSet<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedCatalogue {
    pub(super) version: u64,
    /// Whether clients may have seen each list.
    pub(super) seen: [bool; 4],
    /// Owner, raw name and shown name, for each list.
    pub(super) owned: [Vec<(u32, String, String)>; 4],
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedGuards {
    pub(super) tools_off: BTreeSet<String>,
    pub(super) backends_off: BTreeSet<String>,
    /// Client, tool, and when the bucket is full.
    pub(super) buckets: Vec<(String, String, Moment)>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedTasks {
    pub(super) run: u32,
    pub(super) tasks: Vec<SavedTask>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedTask {
    pub(super) handle: String,
    pub(super) owner: TaskOwner,
    pub(super) own: String,
    #[serde(default)]
    pub(super) shown: Option<String>,
    pub(super) slot: SlotKey,
    pub(super) serial: u64,
    pub(super) number: u64,
}

impl Gateway {
    /// Why the state cannot be saved now. Only the gateway's own subscriptions, and those of clients, stay open.
    pub fn busy(&self) -> Option<Busy> {
        let open = self.calls.of_clients() + self.offer_waits.len() + self.tasks.lists();
        // One that has not sent its request yet, or has not left with the answer.
        let is_single = |client: &&ClientState| !client.is_session() && client.subscriptions.listens() == 0;
        let open = open.max(self.clients.values().filter(is_single).count());
        let is_moving = |link: &&LinkState| !link.is_ready();
        let name_of = |backend: u32| self.backends.last_name(backend).unwrap_or_default().to_owned();
        if self.stage == Stage::New {
            Some(Busy::Starting)
        } else if self.stage.is_stopping() {
            Some(Busy::Stopping)
        } else if open > 0 || self.clients.batches() > 0 {
            Some(Busy::Requests(open.max(1)))
        } else if self.server_requests.len() > 0 {
            Some(Busy::Questions(self.server_requests.len()))
        } else if self.operator_requests.len() > 0 {
            Some(Busy::Operator)
        } else if let Some(link) = self.links.values().filter(is_moving).min_by_key(|link| link.id()) {
            Some(Busy::Moving(name_of(link.id().backend)))
        } else if let Some((key, _)) = self.slots.iter().find(|(_, slot)| slot.links.candidate().is_some()) {
            Some(Busy::Moving(name_of(key.backend)))
        } else {
            let is_waited_for = |call: &&Call| call.kind != CallKind::Own(OwnRequest::Listen);
            let call = self.calls.values().find(is_waited_for);
            let reading = call.map(|call| Busy::Reading(name_of(call.slot.backend)));
            reading.or_else(|| self.catalogue.merge_due().map(|_| Busy::Merging))
        }
    }

    /// A backend that runs under other settings than the configuration has, because the change failed.
    pub fn failed_change(&self) -> Option<&str> {
        let mut backends = self.backends.in_order().map(|(_, backend)| backend);
        let failed = backends.find(|backend| matches!(backend.change(), ConfigChange::Failed(_)))?;
        Some(&failed.settings().name)
    }

    /// When the oldest open request of a client began.
    pub fn open_since(&self) -> Option<Instant> {
        self.calls.values().filter(|call| call.reply_to.is_some()).map(|call| call.began).min()
    }

    /// An open request needs another message of its client before it can be answered.
    pub fn awaits_client(&self) -> bool {
        self.server_requests.len() > 0 || self.calls.values().any(Call::is_parked)
    }

    /// The whole state, or why it cannot be saved now.
    pub fn save(&self, now: Instant) -> Result<Saved, Busy> {
        match self.busy() {
            Some(busy) => Err(busy),
            None => Ok(self.sketch(now)),
        }
    }

    /// The state without all that is under way: to be checked, not to continue with.
    pub fn sketch(&self, now: Instant) -> Saved {
        let offer_of = |backend: u32| self.backends.get(&backend).map(|backend| backend.offer());
        let mut links: Vec<SavedLink> =
            self.links.values().filter_map(|link| link.save(offer_of(link.id().backend), now)).collect();
        links.sort_unstable_by_key(|link| link.id);
        let clients = self.clients.numbers();
        Saved {
            ids: self.ids.save(),
            numbers: self.backends.save_numbers(),
            backends: self.backends.in_order().map(|(number, backend)| backend.save(number, now)).collect(),
            slots: self.slots.iter().filter_map(|(key, slot)| slot.save(*key, now)).collect(),
            links,
            clients: clients.iter().filter_map(|client| self.clients[client].save(*client)).collect(),
            catalogue: self.catalogue.save(),
            guards: self.guards.save(now),
            tasks: self.tasks.save(),
            pace: self.pace.save(now),
            shared: self.shared.as_ref().map(SharedServer::save),
        }
    }

    /// Continues where [`Gateway::save`] was called, with the settings that were in force there. `is_kept` says which links
    /// were handed over; another one is opened for each of the others. Timers and starts follow with the first event.
    pub fn restore(
        settings: Settings,
        saved: Saved,
        schemas: Box<dyn Schemas>,
        is_kept: impl Fn(Link) -> bool,
        now: Instant,
    ) -> Gateway {
        let mut gateway = Gateway::new(settings, 0, BTreeMap::new(), schemas);
        gateway.out.clear();
        gateway.stage = Stage::Running;
        gateway.ids = Ids::restore(saved.ids);
        gateway.guards.restore(saved.guards, now);
        gateway.backends = Backends::restore_numbers(saved.numbers);
        gateway.backends.configure(&gateway.settings.backends, &mut BTreeMap::new());
        gateway.shared = saved.shared.map(SharedServer::restore);
        if gateway.is_shared_server() {
            gateway.backends.values_mut().for_each(|backend| backend.mark_shared());
        }
        for backend in saved.backends {
            if let Some(state) = gateway.backends.get_mut(&backend.number) {
                state.restore(backend, now);
            }
        }
        let seen = saved.catalogue.seen;
        gateway.catalogue = Catalogue::restore(saved.catalogue);
        gateway.merge_catalogue();
        gateway.out.clear();
        gateway.catalogue.set_seen(seen);
        gateway.tasks = Tasks::restore(saved.tasks);
        gateway.pace = Pace::restore(saved.pace, now);
        for slot in saved.slots {
            if let Some(backend) = gateway.backends.get(&slot.key.backend) {
                let policy = backend.settings().policy.clone();
                gateway.slots.insert(slot.key, SlotState::restore(policy, slot, now));
            }
        }
        for client in saved.clients {
            let (number, view) = (client.client, gateway.view_of(&client.who.clone().who()));
            gateway.clients.insert(number, ClientState::restore(client, view));
        }
        for link in saved.links {
            gateway.restore_link(link, &is_kept, now);
        }
        let links = &gateway.links;
        let is_lost = |slot: &&mut SlotState| slot.links.child().is_some_and(|serial| !links.contains_key(&serial));
        gateway.slots.values_mut().filter(is_lost).for_each(|slot| slot.open_again(now));
        gateway.make_first_slots(now);
        for timer in Timer::ALL {
            let first = gateway.deadlines(timer).min();
            gateway.timers.set(timer, first);
        }
        gateway
    }

    fn restore_link(&mut self, saved: SavedLink, is_kept: &impl Fn(Link) -> bool, now: Instant) {
        let (backend, serial) = saved.id;
        let Some(owner) = self.backends.get(&backend) else { return };
        let is_http = matches!(owner.settings().kind, Kind::Http { .. });
        let mut link = LinkState::restore(saved, Some(owner.offer()), now);
        let fills_slot = self.slots.get(&link.slot()).is_some_and(|slot| slot.links.child() == Some(serial));
        if !is_kept(link.id()) || !fills_slot {
            return self.tasks.forget_link(serial);
        }
        if is_http {
            link.subscriptions.open_again(now);
        }
        if let Some(key) = link.subscriptions.listen() {
            let call = Call {
                link: Some(serial),
                ..Call::new(
                    CallKind::Own(OwnRequest::Listen),
                    method::LISTEN.into(),
                    link.slot(),
                    Declared::default(),
                    now,
                )
            };
            self.calls.insert(key, Box::new(call));
        }
        self.links.insert(serial, link);
    }

    /// What an HTTP backend reported while its streams were closed is not known: its lists are read again.
    pub(super) fn link_resumed(&mut self, link: Link, now: Instant) {
        for family in Family::ALL {
            self.refetch(link.serial, family, now);
        }
    }

    /// The links that are open, in the order in which they were opened.
    pub fn links(&self) -> Vec<Link> {
        self.links_where(|_| true).into_iter().map(|serial| self.links[&serial].id()).collect()
    }

    /// The tools that a link lists, as JSON.
    pub fn tools_of(&self, link: Link) -> &[bytes::Bytes] {
        self.links.get(&link.serial).map_or(&[], |link| &link.fetch.offer().tools)
    }
}
