//! Many backends seen as one server, by many clients at once.
//!
//! The gateway is a machine: fronts and backends tell it what was said, it answers with what is to be said and done. It
//! knows both eras on both sides and translates between them. Payloads pass through unread; ids, progress tokens, cursors
//! and names are swapped on the way in and restored on the way out, types included.

pub mod guard;

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;

use crate::{exit::How, message::Id, record::Record, restarts::Policy};

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
    ClientLeft {
        client: Client,
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
    /// Of an HTTP backend: this request, as we numbered it, will never be answered. The link lives on.
    RequestLost {
        link: Link,
        id: Id,
        /// Whether any of it may have reached the backend.
        was_sent: bool,
        why: String,
    },
    /// All that it said has been told, and nothing is left of it.
    LinkDown {
        link: Link,
        how: How,
        stderr_tail: String,
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
    /// Only what differs is started, stopped or restarted; no client's session ends.
    Configured(Box<Settings>),
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
    /// For the log and for people.
    Note(String),
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

/// For audit and metrics. Arguments are not in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Called {
    pub client: Client,
    pub who: String,
    pub role: Option<String>,
    pub method: String,
    /// As the client sees it.
    pub tool: Option<String>,
    pub backend: Option<String>,
    pub outcome: Outcome,
    pub took: Duration,
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

/// All that was configured, checked: nobody downstream sees raw text.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// In the order of the file. Names are unique.
    pub backends: Vec<Backend>,
    /// Views of the catalogue, by name.
    pub profiles: BTreeMap<String, Profile>,
    /// What clients get that name no profile.
    pub default_profile: Option<String>,
    /// By role; empty: everything is allowed to everyone.
    pub roles: BTreeMap<String, Role>,
    pub rates: Rates,
    pub switched_off: Vec<Switch>,
    pub limits: Limits,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Backend {
    pub name: String,
    pub kind: Kind,
    /// Before the name of every tool and prompt; `name__` unless it was configured.
    pub prefix: String,
    pub allow: Vec<Pattern>,
    pub deny: Vec<Pattern>,
    pub children: Children,
    pub era: EraChoice,
    pub policy: Policy,
    /// A call that takes longer is cancelled and fails; progress begins it anew, up to `call_max` in all.
    pub call_timeout: Duration,
    pub call_max: Duration,
    pub start_timeout: Duration,
    /// A child nobody has called for so long is stopped, and started again by the next call.
    pub idle_stop: Option<Duration>,
    /// In bytes; a child above it is replaced.
    pub memory_max: Option<u64>,
    /// Failures in a row that open the circuit, and how long it then stays open before one probe.
    pub breaker_failures: u32,
    pub breaker_open: Duration,
    /// Whether a call in flight at a crash is asked again if its tool is annotated as safe.
    pub retry_annotated: bool,
}

/// What the driver connects to. The machine only compares it: a change replaces the link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    Stdio {
        command: String,
        args: Vec<String>,
        env: BTreeMap<String, String>,
        cwd: Option<String>,
    },
    Http {
        url: String,
        headers: BTreeMap<String, String>,
        /// The old transport with two endpoints.
        is_sse: bool,
    },
}

/// How many processes a stdio backend has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Children {
    Shared,
    PerSession,
    Pool(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EraChoice {
    /// A child is asked for a handshake, and a stateless one that refuses gets a `server/discover` instead. An HTTP backend
    /// is asked once which it knows; then each client's own era is spoken to it where it can be.
    Auto,
    Handshake,
    Stateless,
}

/// A name, where `*` stands for anything.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pattern(pub String);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Profile {
    /// Backends by name; empty: all.
    pub backends: Vec<Pattern>,
    /// Tools as clients see them; empty: all.
    pub allow: Vec<Pattern>,
    pub deny: Vec<Pattern>,
    /// Three tools to search, describe and call instead of the whole list.
    pub search: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Role {
    /// Tools as clients see them; empty: none.
    pub allow: Vec<Pattern>,
    pub deny: Vec<Pattern>,
}

/// Token buckets, for each client and tool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rates {
    pub default: Option<Rate>,
    /// By tool as clients see it; the first pattern that fits counts.
    pub tools: Vec<(Pattern, Rate)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    pub per_minute: u32,
    pub burst: u32,
}

/// Bounds of the whole gateway; what happens at each is said where it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// How long a call waits for a backend that is down before it fails with the time of the next try.
    pub hold: Duration,
    /// Calls held for one backend; more fail at once.
    pub held_max: usize,
    /// Calls in flight for one client; more fail at once.
    pub in_flight_max: usize,
    /// Elements on one page of a merged list.
    pub page: usize,
    /// A backend that gave up is tried again this often.
    pub retry_given_up: Duration,
}

/// Whether arguments fit a tool's schema; pure, given at birth.
pub trait Schemas {
    /// Both as JSON. An error is one sentence that names the place.
    fn check(&mut self, schema: &[u8], arguments: &[u8]) -> Result<(), String>;
}
