//! Many backends seen as one server, by many clients at once.
//!
//! The gateway is a machine: fronts and links report events, and it answers with actions. It speaks both eras on both sides
//! and translates between them. Payloads pass through unread; ids, progress tokens, cursors and names are replaced on the
//! way in and restored on the way out, types included. It does no I/O: the driver does.

use std::{
    collections::BTreeMap,
    mem,
    time::{Duration, Instant},
};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{mcp::List, message, pace::Pace};

mod backends;
mod borrowed_links;
mod calls;
mod catalogue;
mod change;
mod clients;
mod dispatch;
mod elements;
mod event;
mod failed_calls;
pub mod guard;
mod hang;
mod http_refusals;
mod ids;
mod links;
mod lists;
mod messages;
mod methods;
mod names;
mod opening;
mod saved;
mod search;
mod server_requests;
mod settings;
mod shared_server;
mod slots;
mod status;
mod subscriptions;
mod tasks;
mod timers;
mod trials;
mod withdrawals;

pub use event::{
    ARGUMENTS_READ_MAX, Action, Called, Client, Event, Fit, Front, Link, Offer, Outcome, REQUEST_ID_MAX,
    RefusedNotification, Said, Schemas, Sender, Switch, Ticket, Who,
};
pub use http_refusals::Refused;
pub(crate) use saved::SavedWho;
pub use saved::{Busy, Saved};
pub use settings::{
    Backend, Children, EraChoice, Kind, Limits, Pattern, Placement, Profile, Rate, Rates, Role, Settings, Start,
};
pub use shared_server::{Apart, SharedClients};
pub use status::{
    BackendStatus, CircuitStatus, CollisionStatus, ExitStatus, FigureStatus, LifeStatus, OfferCounts, ReloadStatus,
    RestartStatus, SlotStatus, Status, SwitchedOff, UncheckedTool, UnderWay,
};

use backends::Backends;
use calls::Calls;
use catalogue::Catalogue;
use change::OperatorRequests;
use clients::Clients;
use guard::Guards;
use ids::Ids;
use links::Links;
use lists::OfferWaits;
use server_requests::ServerRequests;
use shared_server::SharedServer;
use slots::Slots;
use tasks::Tasks;
use timers::{Timer, TimerTable};

/// The two kinds of MCP: sessions that begin with a handshake, and requests that stand for themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Era {
    Handshake,
    Stateless,
}

/// How long calls in flight may still be answered when the gateway stops; then they fail.
const STOP_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No event was handled, so the time is not known.
    New,
    Running,
    /// No link is opened. Calls in flight fail at this time.
    Stopping {
        until: Instant,
    },
    /// All links are down after a stop.
    Over,
}

impl Stage {
    fn deadline(self) -> Option<Instant> {
        match self {
            Stage::Stopping { until } => Some(until),
            Stage::New | Stage::Running | Stage::Over => None,
        }
    }

    fn is_stopping(self) -> bool {
        matches!(self, Stage::Stopping { .. } | Stage::Over)
    }
}

/// Many backends, many clients.
#[derive(Debug)]
pub struct Gateway {
    settings: Settings,
    stage: Stage,
    ids: Ids,
    timers: TimerTable,
    clients: Clients,
    backends: Backends,
    slots: Slots,
    links: Links,
    calls: Calls,
    server_requests: ServerRequests,
    offer_waits: OfferWaits,
    catalogue: Catalogue,
    guards: Guards,
    tasks: Tasks,
    operator_requests: OperatorRequests,
    /// The only backend is one server that all clients share.
    shared: Option<SharedServer>,
    /// The call whose HTTP stream carries the message that is being handled.
    stream_call: Option<u64>,
    /// A slot may be due to be started.
    starts_due: bool,
    /// Of all backends together.
    pace: Pace,
    out: Vec<Action>,
}

impl Gateway {
    /// Nothing happens before the first event; [`Event::TimePassed`] will do. `cached` is what each backend offered in an
    /// earlier run, by name.
    pub fn new(
        settings: Settings,
        seed: u64,
        mut cached: BTreeMap<String, Offer>,
        schemas: Box<dyn Schemas>,
    ) -> Gateway {
        let mut ids = Ids::new(seed);
        let mut gateway = Gateway {
            stage: Stage::New,
            timers: TimerTable::default(),
            clients: Clients::default(),
            backends: Backends::default(),
            slots: Slots::default(),
            links: Links::default(),
            calls: Calls::default(),
            server_requests: ServerRequests::default(),
            offer_waits: OfferWaits::default(),
            catalogue: Catalogue::default(),
            guards: Guards::new(&settings, schemas),
            tasks: Tasks::new(ids.random()),
            operator_requests: OperatorRequests::default(),
            shared: None,
            stream_call: None,
            starts_due: false,
            pace: Pace::default(),
            out: Vec::new(),
            ids,
            settings,
        };
        gateway.update_backends(&mut cached);
        gateway
    }

    /// A gateway for one backend, whose clients are the replicas of a cluster. They have checked each call, and know its
    /// tools by the names that the backend gave them. Its links are numbered from `first` on. `cached` is what the backend
    /// offered before, so that a replica does not get an empty list while the process starts.
    pub fn hosting(settings: Settings, first: u64, seed: u64, cached: BTreeMap<String, Offer>) -> Gateway {
        let mut gateway = Gateway::new(settings, seed, cached, Box::new(shared_server::Unchecked));
        gateway.ids.begin_at(first);
        gateway
    }

    /// The settings of such a gateway.
    pub fn hosting_settings(mut backend: Backend, limits: Limits) -> Settings {
        backend.prefix = String::new();
        backend.allow = Vec::new();
        backend.deny = Vec::new();
        Settings {
            backends: vec![backend],
            profiles: BTreeMap::new(),
            default_profile: None,
            roles: BTreeMap::new(),
            rates: Rates::default(),
            switched_off: Vec::new(),
            forward_unknown: true,
            is_host: true,
            limits,
        }
    }

    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        self.handle_into(event, now, &mut actions);
        actions
    }

    /// The same into a list that can be used again: there are two events for each call.
    pub fn handle_into(&mut self, event: Event, now: Instant, actions: &mut Vec<Action>) {
        mem::swap(&mut self.out, actions);
        if self.stage == Stage::New {
            self.stage = Stage::Running;
            // Notes about the cached catalogues.
            self.out.append(actions);
            self.make_first_slots(now);
        }
        match event {
            Event::ClientCame { client, front, who } => self.client_came(client, front, who),
            Event::ClientRestored { client, who, state } => self.client_restored(client, who, &state, now),
            Event::ClientSaid { client, message } => self.client_said(client, &message, now),
            Event::ClientRequested { client, message, outline } => {
                self.client_requested_outlined(client, &message, &outline, now);
            }
            Event::ClientSaidLong { client, message, walk } => {
                self.client_said_parsed(client, &message, walk.read(&message), now);
            }
            Event::ClientLeft { client } => self.client_left(client, now),
            Event::ClientAllowed { client, until } => {
                self.clients.allow_until(client, until);
                // It comes with each request that has a token; a later time has a timer.
                if until.is_some_and(|until| until <= now) {
                    self.withdraw_refused_calls(now);
                }
            }
            Event::LinkUp { link, pid } => self.link_up(link, pid, now),
            Event::LinkSaid { link, message } => {
                let is_marked = message.starts_with(message::BYTE_ORDER_MARK);
                let message = if is_marked { message.slice(message::BYTE_ORDER_MARK.len()..) } else { message };
                if !self.link_said(link, &message, now) {
                    let is_json = message::parse(&message).is_ok();
                    self.out.push(Action::Divert { link, message, is_json });
                }
            }
            Event::LinkSaidLong { link, message, walk } => {
                let parsed = walk.read(&message);
                let is_json = parsed.is_ok();
                if !self.link_said_parsed(link, &message, parsed, now) {
                    self.out.push(Action::Divert { link, message, is_json });
                }
            }
            Event::LinkSaidFor { link, id, message, walk } => {
                let parsed = walk.map_or_else(|| message::parse(&message), |walk| walk.read(&message));
                self.link_said_for(link, &id, &message, parsed, now);
            }
            Event::RequestLost { link, id, was_sent, why } => self.request_lost(link, &id, was_sent, &why, now),
            Event::RequestRefused { link, id, refused } => self.request_refused(link, &id, *refused, now),
            Event::LinkDenied { link, refused } => self.link_denied(link, &refused, now),
            Event::LinkFailing { link, how } => self.link_failing(link, how, now),
            Event::LinkDown { link, how, stderr_tail, unsent } => self.link_down(link, how, stderr_tail, unsent, now),
            Event::Measured { link, rss } => self.measured(link, rss, now),
            Event::RestartAsked { ticket, backend, reason } => self.restart_asked(ticket, backend, &reason, now),
            Event::ResumeAsked { ticket, backend } => self.resume_asked(ticket, backend, now),
            Event::SwitchAsked { ticket, what, off } => self.switch_asked(ticket, &what, off, now),
            Event::Configured(settings) => self.configured(*settings, now),
            Event::ShareChanged { parts } => self.guards.set_share(parts),
            Event::Checked { ticket, fit } => self.checked(ticket, fit, now),
            Event::OutcomeAsked { ticket } => self.outcome_asked(ticket),
            Event::LinkResumed { link } => self.link_resumed(link, now),
            Event::HandoverBegan => self.end_request_listens(),
            Event::StopAsked => self.stop_asked(now),
            // Early or twice changes nothing.
            Event::TimePassed => self.time_passed(now),
        }
        self.settle(now);
        mem::swap(&mut self.out, actions);
    }

    /// When `TimePassed` is due, at the latest. It may turn out that no timer has fired.
    pub fn deadline(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// All links are down after a stop.
    pub fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    pub fn limits(&self) -> &Limits {
        &self.settings.limits
    }

    /// All that operators turned off.
    pub fn switched_off(&self) -> impl Iterator<Item = Switch> {
        self.guards.all_off()
    }

    /// Whether an operator turned this off.
    pub fn is_switched_off(&self, what: &Switch) -> bool {
        match what {
            Switch::Tool(name) => self.guards.is_tool_off(name),
            Switch::Backend(name) => self.guards.is_backend_off(name),
        }
    }

    /// The settings that a backend runs under.
    pub fn backend(&self, number: u32) -> Option<&Backend> {
        self.backends.get(&number).map(|backend| backend.settings())
    }

    /// All that are configured, in the order of the file, each with the settings that it runs under.
    pub fn backends(&self) -> impl Iterator<Item = &Backend> {
        self.backends.in_order().map(|(_, backend)| backend.settings())
    }

    /// What each backend offers, by name.
    pub fn offers(&self) -> impl Iterator<Item = (&str, &Offer)> {
        self.backends.in_order().map(|(_, backend)| (backend.settings().name.as_str(), backend.offer()))
    }

    /// Counts the changes of the catalogue.
    pub fn catalogue_version(&self) -> u64 {
        self.catalogue.version()
    }

    /// All tools that are offered: the name that clients see, the backend, and the backend's own name.
    pub fn tools(&self) -> impl Iterator<Item = (&str, &str, &str)> {
        let entries = self.catalogue.all(List::Tools).iter();
        entries.map(|entry| (&*entry.shown, self.backends.name(entry.owner), entry.own()))
    }

    /// Whether a client may see and control the whole gateway: with roles, only one whose role may call every tool.
    pub fn is_operator(&self, who: &Who) -> bool {
        self.guards.has_all_rights(who.role.as_deref())
    }

    /// How many requests of a client are not answered, subscriptions aside.
    pub fn in_flight(&self, client: Client) -> usize {
        let calls = self.calls.values().filter_map(|call| call.reply_to.as_ref());
        let replies = calls.chain(self.offer_waits.replies()).chain(self.tasks.replies());
        replies.filter(|reply_to| reply_to.client == client).count()
    }

    fn tell_link(&mut self, serial: u64, message: Bytes) {
        if let Some(link_state) = self.links.get(&serial) {
            self.out.push(Action::TellLink { link: link_state.id(), message });
        }
    }

    fn note(&mut self, text: String) {
        self.out.push(Action::Note(text));
    }

    /// What follows from an event, whatever it was: slots that became due are started.
    fn settle(&mut self, now: Instant) {
        if mem::take(&mut self.starts_due) && !self.stage.is_stopping() {
            self.start_due_slots(now);
        }
    }

    /// Fires the timers that are due, and sets each to its next time.
    fn time_passed(&mut self, now: Instant) {
        for timer in Timer::ALL {
            if self.deadlines(timer).any(|at| at <= now) {
                self.fire(timer, now);
            }
        }
        for timer in Timer::ALL {
            let deadlines = self.deadlines(timer);
            let next = match timer {
                // The next portion is due immediately. Each one sends a call or is the last one.
                Timer::Releases => deadlines.min(),
                // A deadline that has passed was dealt with just now, or waits for something other than time.
                _ => deadlines.filter(|at| *at > now).min(),
            };
            self.timers.set(timer, next);
        }
    }

    /// All deadlines of a kind.
    fn deadlines(&self, timer: Timer) -> Box<dyn Iterator<Item = Instant> + '_> {
        match timer {
            Timer::Calls => Box::new(self.calls.deadlines().chain(self.withdrawal_deadlines())),
            Timer::Resends => Box::new(self.calls.resends().deadlines()),
            Timer::Links => Box::new(self.links.values().filter_map(|link_state| self.link_due(link_state))),
            Timer::OfferWaits => Box::new(self.offer_waits.deadlines()),
            Timer::Releases => Box::new(self.slots.values().filter_map(|slot| slot.release_at())),
            Timer::Lists => Box::new(self.links.values().flat_map(|link_state| link_state.fetch.deadlines())),
            Timer::Catalogue => Box::new(self.catalogue.merge_due().into_iter()),
            Timer::Stop => Box::new(self.stage.deadline().into_iter()),
            Timer::Slots => Box::new(self.slots.values().filter_map(|slot| slot.links.due())),
        }
    }

    fn fire(&mut self, timer: Timer, now: Instant) {
        match timer {
            Timer::Calls => {
                self.fail_late_calls(now);
                self.withdraw_refused_calls(now);
            }
            Timer::Resends => self.send_due_resends(now),
            Timer::Links => self.fail_late_links(now),
            Timer::OfferWaits => self.end_offer_waits(now),
            Timer::Releases => self.release_due(now),
            Timer::Lists => self.fetch_due(now),
            Timer::Catalogue => self.merge_changed_offer(now),
            Timer::Stop => self.stop_remaining_links(now),
            Timer::Slots => self.starts_due = true,
        }
    }
}
