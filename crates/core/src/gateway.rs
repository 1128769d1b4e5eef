//! Many backends seen as one server, by many clients at once.
//!
//! The gateway is a machine: fronts and backends tell it what was said, it answers with what is to be said and done. It
//! knows both eras on both sides and translates between them. Payloads pass through unread; ids, progress tokens, cursors
//! and names are swapped on the way in and restored on the way out, types included.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashSet, VecDeque},
    mem,
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use rustc_hash::FxHashMap;

use crate::{
    exit::How,
    json::Raw,
    message::{Id, Outline},
    pace::Pace,
    record::{self, Record},
    relay::lists::{Family, Kind as List},
    restarts::{Past, RECENT_MAX},
};

mod asks;
mod calls;
mod catalogue;
mod change;
mod dispatch;
pub mod guard;
mod guests;
mod http_refusals;
mod links;
mod lists;
mod loans;
mod losses;
mod methods;
mod names;
mod opening;
mod places;
mod search;
mod settings;
mod status;
mod subscriptions;
mod tasks;
mod trials;
mod words;

use asks::Ask;
use calls::{Call, Whom};
use catalogue::{Catalogue, View};
use guard::{Breaker, Buckets, Roles, Switches};
use guests::{Guest, Says};
pub use http_refusals::Refused;
use links::Connection;
use lists::Gathering;
use places::{Place, PlaceKey, Seat};
pub use settings::*;

/// A client, numbered by the front. Never used again.
pub type Client = u64;
/// Whom to tell the outcome of something that an operator asked for.
pub type Ticket = u64;

/// One connection to one backend: a child process, or an HTTP server spoken to. Never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Link {
    /// Which backend, by its number; a backend keeps its number through every change of the configuration.
    pub backend: u32,
    /// Counts every connection of the whole gateway.
    pub serial: u64,
}

/// How a client is connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Front {
    /// Lines over stdin and stdout: one client, which may be of either era.
    Lines,
    /// An HTTP session of the handshake era. The front mints its session id when `initialize` is answered with a result.
    Session,
    /// One POST of the stateless era: one request is said, and the client leaves when it has its answer. A
    /// `subscriptions/listen` stays. Leaving early cancels.
    Request,
}

/// Who a client is, as authentication found out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Who {
    /// For rate limits, audit and metrics; `local` where nobody was asked.
    pub name: String,
    /// Nothing: there is no authorisation, everything is allowed.
    pub role: Option<String>,
    /// A view of the catalogue, by name.
    pub profile: Option<String>,
}

#[derive(Debug)]
pub enum Event {
    ClientCame {
        client: Client,
        front: Front,
        who: Who,
    },
    /// One JSON-RPC message, or a batch where the revision has them. It is JSON: the front has seen to that, and to the
    /// agreement of headers and body.
    ClientSaid {
        client: Client,
        message: Bytes,
    },
    /// The same for one request that the front has read.
    ClientAsked {
        client: Client,
        message: Bytes,
        outline: Outline,
    },
    ClientLeft {
        client: Client,
    },
    /// How long the credentials of a client are valid, if that is limited: until they expire, or until now if they were
    /// revoked. Requests of it that are held are not sent after that.
    ClientAllowed {
        client: Client,
        until: Option<Instant>,
    },
    /// There is a connection: the child runs, or the HTTP side is ready to be spoken to.
    LinkUp {
        link: Link,
        /// Of a child.
        pid: Option<u32>,
    },
    LinkSaid {
        link: Link,
        message: Bytes,
    },
    /// Of an HTTP backend: no answer, but said on behalf of this request, as we numbered it.
    LinkSaidFor {
        link: Link,
        id: Id,
        message: Bytes,
    },
    /// Of an HTTP backend: this request, as we numbered it, will never be answered. The link lives on.
    RequestLost {
        link: Link,
        id: Id,
        /// Whether any of it may have reached the backend.
        was_sent: bool,
        why: String,
    },
    /// Of an HTTP backend: this request, as we numbered it, was answered with a status that says no. The link lives on.
    RequestRefused {
        link: Link,
        id: Id,
        refused: Box<Refused>,
    },
    /// The same for what is no request: a notification, or the stream of a session, was answered with 401 or 403.
    LinkDenied {
        link: Link,
        refused: Box<Refused>,
    },
    /// Of an HTTP backend: it takes no more requests. Each request that is open there is still reported, as answered or as
    /// lost; [`Event::LinkDown`] follows.
    LinkFailing {
        link: Link,
        how: How,
    },
    /// All that it said has been told, and nothing is left of it.
    LinkDown {
        link: Link,
        how: How,
        stderr_tail: String,
        /// Lines that it was told and cannot have read, in order.
        unsent: Vec<Bytes>,
    },
    /// What a child holds in memory, itself and all below it, for backends with a limit.
    Measured {
        link: Link,
        rss: u64,
    },
    /// An operator's wishes. No backend means all of them.
    RestartAsked {
        ticket: Ticket,
        backend: Option<String>,
        reason: String,
    },
    ResumeAsked {
        ticket: Ticket,
        backend: Option<String>,
    },
    /// Turns one tool, as clients see it, or one backend off or on again.
    SwitchAsked {
        ticket: Ticket,
        what: Switch,
        off: bool,
    },
    /// Only what differs is started, stopped or restarted; no client's session ends. A backend that needs another process
    /// keeps the one it has until the other works.
    Configured(Box<Settings>),
    /// Answered when every change that is being tried has taken over or failed.
    OutcomeAsked {
        ticket: Ticket,
    },
    /// No new child from here on; what is in flight is answered; every link is stopped.
    StopAsked,
    TimePassed,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Switch {
    Tool(String),
    Backend(String),
}

/// Every message in it is one line, its line feed included and no other in it. What comes in may have any white space.
#[derive(Debug)]
pub enum Action {
    TellClient {
        client: Client,
        message: Bytes,
        /// The client's own request that this is about: its answer, or a notification or request on its behalf. Without
        /// it the message goes to the general stream of a session. The answers to a batch come together, as one array
        /// about the first request in it.
        about: Option<Id>,
        said: Said,
    },
    /// The front ends the conversation: a session is forgotten, a connection closed.
    DropClient {
        client: Client,
    },
    /// Connect, by the settings of the backend with that number.
    Connect {
        link: Link,
    },
    TellLink {
        link: Link,
        message: Bytes,
    },
    /// Politely, with its grace, or at once. [`Event::LinkDown`] follows.
    Disconnect {
        link: Link,
        at_once: bool,
    },
    Record(Record),
    /// What a link said is no message of JSON-RPC: it is for people.
    Divert {
        link: Link,
        message: Bytes,
    },
    /// For the log and for people.
    Note(String),
    /// A notification was not forwarded.
    NotificationRefused(Box<RefusedNotification>),
    /// One call left the house, one way or another.
    Called(Called),
    /// What a backend offers is now this; to be kept on disk.
    Keep {
        backend: String,
        catalogue: Offer,
    },
    Answer {
        ticket: Ticket,
        result: Result<serde_json::Value, String>,
    },
    /// All links are down after a stop.
    Over,
}

/// A notification that MCP does not have for its sender, or that two readers may understand differently. A backend might
/// take it for a request that no guard has checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedNotification {
    pub from: Sender,
    /// At most [`METHOD_SHOWN_MAX`] characters.
    pub method: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sender {
    Client { client: Client, who: Rc<Who> },
    Backend(Rc<str>),
}

/// Whether a message ends the request that it is about. An array of answers is none of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    Result,
    Error,
    Other,
}

/// For audit and metrics. Arguments are not in it. There is one for each call, so nothing in it is copied for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Called {
    pub client: Client,
    pub who: Rc<Who>,
    pub method: Cow<'static, str>,
    /// As the client sees it.
    pub tool: Option<Rc<str>>,
    pub backend: Option<Rc<str>>,
    pub outcome: Outcome,
    pub took: Duration,
    /// A backend offers such a tool, or did when it was last seen. Otherwise the client may have made the name up.
    pub is_known: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Outcome {
    Answered,
    /// By a result with `isError`, or a JSON-RPC error of the backend's own.
    Failed,
    /// The backend went away with it.
    Lost,
    TimedOut,
    Cancelled,
    SwitchedOff,
    RateLimited,
    Denied,
    BadArguments,
    CircuitOpen,
    /// Its backend is not there.
    Unavailable,
    /// There is no such tool, resource or method.
    Unknown,
}

impl Outcome {
    /// For queries and metrics; these do not change.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Answered => "answered",
            Outcome::Failed => "failed",
            Outcome::Lost => "lost",
            Outcome::TimedOut => "timed_out",
            Outcome::Cancelled => "cancelled",
            Outcome::SwitchedOff => "switched_off",
            Outcome::RateLimited => "rate_limited",
            Outcome::Denied => "denied",
            Outcome::BadArguments => "bad_arguments",
            Outcome::CircuitOpen => "circuit_open",
            Outcome::Unavailable => "unavailable",
            Outcome::Unknown => "unknown",
        }
    }
}

/// What one backend offers, each list as its elements' own JSON, in the backend's order and under its own names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Offer {
    pub tools: Vec<Bytes>,
    pub prompts: Vec<Bytes>,
    pub resources: Vec<Bytes>,
    pub templates: Vec<Bytes>,
    /// Of `initialize` or `server/discover`, as they stood.
    pub capabilities: Bytes,
    pub instructions: Option<String>,
}

/// Whether arguments fit a tool's schema; pure, given at birth.
pub trait Schemas {
    /// Both as JSON. It ends within a bounded time, whatever they are.
    fn check(&mut self, schema: &[u8], arguments: Raw<'_>) -> Fit;
}

/// What came of holding arguments against a schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fit {
    Fits,
    /// One sentence that names the place.
    Misfit(String),
    /// Finding out would take too long.
    TooCostly,
    /// The schema cannot be used, for this reason; the arguments are the backend's to check.
    Unchecked(String),
}

/// The two kinds of MCP: sessions that begin with a handshake, and requests that stand for themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Era {
    Handshake,
    Stateless,
}

/// The revisions of the handshake era, newest first. A client that asks for another one is offered the first.
const HANDSHAKE_VERSIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];
const STATELESS_VERSION: &str = "2026-07-28";

/// How long the first list waits for a backend without a cached catalogue. Then lists are served without it, and
/// `list_changed` follows.
const GATHER_MAX: Duration = Duration::from_millis(100);
/// How long a replaced link may finish its calls; then they fail.
const DRAIN_MAX: Duration = Duration::from_secs(60);
/// How long calls in flight may still be answered when the gateway stops; then they fail.
const STOP_MAX: Duration = Duration::from_secs(1);
/// How long a backend has for any word at all after a call was late; then it is taken for hung and replaced.
const HANG_MAX: Duration = Duration::from_secs(5);
/// How long after a child was found too large, or to answer nothing, it is looked at again.
const REPLACE_GAP: Duration = Duration::from_secs(60);
/// How many pages of a backend's list are fetched; what comes after is left out, and that is noted.
const LIST_PAGES_MAX: usize = 100;
/// How large one backend's four lists may be together; what comes after is left out, and that is noted.
const OFFER_BYTES_MAX: usize = 16 << 20;
/// How many elements one list of a backend may have; what comes after is left out, and that is noted.
const LIST_ITEMS_MAX: usize = 20_000;
/// How long the address of a resource may be to be held against templates; a longer one fits none.
const URI_MATCHED_MAX: usize = 8 << 10;
/// How long the name of a tool or prompt may be; one with a longer name is left out.
const OWN_NAME_MAX: usize = 1 << 10;
/// How large arguments may be to be read by guards; larger ones are the backend's to check.
pub const ARGUMENTS_READ_MAX: usize = 1 << 20;
/// How many tools of one backend are reported whose arguments cannot be checked.
const UNCHECKED_MAX: usize = 100;
/// How many messages one batch may hold; a longer one is refused.
const BATCH_MAX: usize = 256;
/// How many requests of backends may wait for one client's answer; one more is refused.
const ASKS_MAX: usize = 64;
/// How many bytes of requests of one client may wait for backends, with all its sessions; one more fails at once.
const HELD_BYTES_MAX: usize = 64 << 20;
/// How large a request may be to be kept for a second try while it is in flight; a larger one fails at a crash.
const KEPT_BYTES_MAX: usize = 1 << 20;
/// How many resources one client may be subscribed to; one more is refused.
const SUBSCRIPTIONS_MAX: usize = 1024;
/// How much of a method's name is recorded where the sender chose it.
const METHOD_SHOWN_MAX: usize = 100;
/// How much of a dead backend's stderr is kept.
const STDERR_BYTES_MAX: usize = 64 << 10;

/// One backend, through all its connections.
#[derive(Debug)]
struct Owner {
    settings: Backend,
    /// That of the settings, for what is told of every call.
    name: Rc<str>,
    offer: Offer,
    standing: Standing,
    breaker: Breaker,
    /// Tools whose schemas cannot be used, as clients see them, and why. Noticed when they are called.
    unchecked: BTreeMap<Rc<str>, String>,
    /// Which eras it knows, once it was asked.
    eras: Option<Eras>,
    /// When lists stop waiting for it; set by the first list that does.
    gather_until: Option<Instant>,
    /// A link was ready under these settings.
    is_proven: bool,
    /// What it offers was read under these settings, now or in an earlier run.
    is_kept: bool,
    /// Other settings that are being tried.
    trial: Option<Box<trials::Trial>>,
    /// Other settings that were tried and did not work.
    refused: Option<trials::Refused>,
    /// The next pool place to be used, where several are equally busy.
    turn: u32,
    pace: Pace,
    /// When a request was last lost on a link that lives on.
    lost_at: Option<Instant>,
    /// Of places that are no more: how often they were filled again, and the last endings there.
    restarts_gone: u64,
    past_gone: Vec<Past>,
}

/// What is known of a backend's offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// Nothing yet.
    Unknown,
    /// It was there in an earlier run.
    Stale,
    Confirmed,
    /// Nothing, and its first try to connect failed.
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Eras {
    handshake: bool,
    stateless: bool,
}

/// Many backends, many clients.
#[derive(Debug)]
pub struct Gateway {
    settings: Settings,
    schemas: Checker,
    seed: u64,
    /// By number; [`Gateway::order`] is the order of the file.
    owners: BTreeMap<u32, Owner>,
    order: Vec<u32>,
    /// Every name that ever had a number.
    numbers: BTreeMap<String, u32>,
    places: BTreeMap<PlaceKey, Place>,
    /// How many links there were at places that are no more and may be again.
    generations: BTreeMap<PlaceKey, u64>,
    links: FxHashMap<u64, Connection>,
    guests: FxHashMap<Client, Guest>,
    /// Requests under way, ours and the clients', by the id that a backend knows them by.
    calls: FxHashMap<u64, Box<Call>>,
    /// Requests of backends that wait for a client's answer, by the id that the client knows them by.
    asks: FxHashMap<u64, Ask>,
    batches: FxHashMap<u64, calls::Batch>,
    gathering: Vec<Gathering>,
    /// Requests that busy HTTP backends asked to get later, by the number of the call.
    resends: http_refusals::Resends,
    tasks: tasks::Tasks,
    /// Lists of tasks that are being put together, by a number of their own.
    task_lists: FxHashMap<u64, tasks::Listing>,
    /// What operators asked for and wait to hear the end of.
    errands: FxHashMap<Ticket, change::Errand>,
    catalogue: Catalogue,
    /// For each list, which backend owns a name that clients have seen.
    owned: [names::Owned; 4],
    views: Vec<View>,
    switches: Switches,
    buckets: Buckets,
    roles: Roles,
    /// For calls, asks, links and all else that needs a number of its own. Ids of one kind never come twice.
    next: u64,
    /// Nothing is due before; something may be due then.
    wake: Option<Instant>,
    /// The first event was heard, and so what time it is.
    begun: bool,
    /// The call that what a backend is saying is said for, where that is known.
    said_for: Option<u64>,
    /// Some place may be due to be filled.
    starts_due: bool,
    stopping: Option<Instant>,
    over: bool,
    /// Of all backends together.
    pace: Pace,
    out: Vec<Action>,
}

struct Checker(Box<dyn Schemas>);

impl std::fmt::Debug for Checker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Checker")
    }
}

impl Gateway {
    /// Nothing happens before the first event; [`Event::TimePassed`] will do. `kept` is what each backend offered when it was
    /// last here, by name.
    pub fn new(settings: Settings, seed: u64, mut kept: BTreeMap<String, Offer>, schemas: Box<dyn Schemas>) -> Gateway {
        let mut gateway = Gateway {
            schemas: Checker(schemas),
            seed,
            owners: BTreeMap::new(),
            order: Vec::new(),
            numbers: BTreeMap::new(),
            places: BTreeMap::new(),
            generations: BTreeMap::new(),
            links: FxHashMap::default(),
            guests: FxHashMap::default(),
            calls: FxHashMap::default(),
            asks: FxHashMap::default(),
            batches: FxHashMap::default(),
            gathering: Vec::new(),
            resends: http_refusals::Resends::default(),
            tasks: tasks::Tasks::default(),
            task_lists: FxHashMap::default(),
            errands: FxHashMap::default(),
            catalogue: Catalogue::default(),
            owned: Default::default(),
            views: Vec::new(),
            switches: Switches::new(&settings.switched_off),
            buckets: Buckets::new(settings.rates.clone()),
            roles: Roles::new(settings.roles.clone()),
            next: 1,
            wake: None,
            begun: false,
            said_for: None,
            starts_due: false,
            stopping: None,
            over: false,
            pace: Pace::default(),
            out: Vec::new(),
            settings,
        };
        gateway.settle_owners(&mut kept);
        gateway
    }

    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        self.handle_into(event, now, &mut actions);
        actions
    }

    /// The same into a list that can be used again: there are two events for each call.
    pub fn handle_into(&mut self, event: Event, now: Instant, actions: &mut Vec<Action>) {
        mem::swap(&mut self.out, actions);
        if !mem::replace(&mut self.begun, true) {
            // What there was to note about the cached catalogues.
            self.out.append(actions);
            self.place_all(now);
        }
        match event {
            Event::ClientCame { client, front, who } => self.client_came(client, front, who),
            Event::ClientSaid { client, message } => self.client_said(client, &message, now),
            Event::ClientAsked { client, message, outline } => self.client_asked_by(client, &message, &outline, now),
            Event::ClientLeft { client } => self.client_left(client, now),
            Event::ClientAllowed { client, until } => self.client_allowed(client, until),
            Event::LinkUp { link, pid } => self.link_up(link, pid, now),
            Event::LinkSaid { link, message } => {
                let is_marked = message.starts_with(crate::message::BYTE_ORDER_MARK);
                let message = if is_marked { message.slice(crate::message::BYTE_ORDER_MARK.len()..) } else { message };
                if !self.link_said(link, &message, now) {
                    self.out.push(Action::Divert { link, message });
                }
            }
            Event::LinkSaidFor { link, id, message } => self.link_said_for(link, &id, &message, now),
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
            Event::OutcomeAsked { ticket } => self.outcome_asked(ticket),
            Event::StopAsked => self.stop_asked(now),
            // Early or twice changes nothing.
            Event::TimePassed => self.time_passed(now),
        }
        if mem::take(&mut self.starts_due) {
            self.start_what_waits(now);
        }
        mem::swap(&mut self.out, actions);
    }

    /// When it wants to hear that time passed, at the latest. It may turn out that nothing was due.
    pub fn deadline(&self) -> Option<Instant> {
        self.wake
    }

    /// All links are down after a stop.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// The settings that a backend runs under.
    pub fn backend(&self, number: u32) -> Option<&Backend> {
        self.owners.get(&number).map(|owner| &owner.settings)
    }

    /// All that are configured, in the order of the file, each with the settings that it runs under.
    pub fn backends(&self) -> impl Iterator<Item = &Backend> {
        self.order.iter().filter_map(|number| Some(&self.owners.get(number)?.settings))
    }

    /// Counts the changes of the catalogue.
    pub fn catalogue_version(&self) -> u64 {
        self.catalogue.version
    }

    /// All tools that are offered: the name that clients see, the backend, and the backend's own name.
    pub fn tools(&self) -> impl Iterator<Item = (&str, &str, &str)> {
        let entries = self.catalogue.all(List::Tools).iter();
        entries.map(|entry| (&*entry.shown, self.owner_name(entry.owner), &*entry.own))
    }

    /// Whether somebody may see and steer all of it: where there are roles, only one that may call every tool.
    pub fn is_operator(&self, who: &Who) -> bool {
        self.roles.has_all(who.role.as_deref())
    }

    /// What a client still waits for, subscriptions aside.
    pub fn in_flight(&self, client: Client) -> usize {
        let calls = self.calls.values().filter_map(|call| call.whom.as_ref());
        let gathering = self.gathering.iter().map(|waiting| &waiting.whom);
        let lists = self.task_lists.values().map(|list| &list.whom);
        calls.chain(gathering).chain(lists).filter(|whom| whom.client == client).count()
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    fn wake_by(&mut self, at: Instant) {
        self.wake = Some(self.wake.map_or(at, |wake| wake.min(at)));
    }

    fn tell_link(&mut self, serial: u64, message: Bytes) {
        if let Some(connection) = self.links.get(&serial) {
            self.out.push(Action::TellLink { link: connection.link, message });
        }
    }

    fn note(&mut self, words: String) {
        self.out.push(Action::Note(words));
    }

    fn owner_name(&self, number: u32) -> &str {
        self.owners.get(&number).map_or("", |owner| &owner.settings.name)
    }

    /// Everything that time alone can bring about, and when the next of it is due.
    fn time_passed(&mut self, now: Instant) {
        self.wake = None;
        self.starts_due = true;
        self.calls_late(now);
        self.resend_due(now);
        self.links_late(now);
        self.gather(now);
        if self.stopping.is_some_and(|by| by <= now) {
            self.stop_at_last(now);
        }
        self.rewake(now);
    }

    /// The next time anything is due.
    fn rewake(&mut self, now: Instant) {
        let calls = self.calls.values().filter_map(|call| call.due());
        let links = self.links.values().filter_map(|connection| connection.due(&self.owners));
        let places = self.places.values().filter_map(Place::due);
        let gathering = self.gathering.iter().map(|waiting| waiting.until);
        let resends = self.resends.due();
        let dues = calls.chain(resends).chain(links).chain(places).chain(gathering).chain(self.stopping);
        // What is due already was done just now, or waits for something other than time.
        self.wake = dues.filter(|at| *at > now).min();
    }
}
