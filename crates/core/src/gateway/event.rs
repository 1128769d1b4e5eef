//! The interface of the gateway machine: the events that the driver reports, and the actions that it carries out.

use std::{
    borrow::Cow,
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::Bytes;

use crate::{
    checker::Job,
    exit::How,
    front::record::SessionState,
    json::Raw,
    message::{Id, Outline, Walk},
    record::Record,
};

use super::{Refused, Settings};

/// Larger arguments are not read by guards; the backend has to check them.
pub const ARGUMENTS_READ_MAX: usize = 1 << 20;

/// A request of a client with a longer id is refused. Ids are compared with those of all requests in flight, so longer
/// ones would make that slow.
pub const REQUEST_ID_MAX: usize = 1 << 10;

/// A client, by a number that the front gives it. No number is used twice.
pub type Client = u64;
/// Identifies a request of an operator, which gets one [`Action::Answer`].
pub type Ticket = u64;

/// One connection to one backend: a child process or an HTTP connection. No link is used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Link {
    /// The backend's number, which stays the same when the configuration changes.
    pub backend: u32,
    /// Counts the links of the whole gateway.
    pub serial: u64,
}

/// How a client is connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Front {
    /// Lines over stdin and stdout: one client, of either era.
    Lines,
    /// An HTTP session of the handshake era. The front creates its session id when `initialize` is answered with a
    /// result.
    Session,
    /// One POST of the stateless era: the client sends one request and leaves when it has the answer. A client with a
    /// `subscriptions/listen` stays. A client that leaves early cancels its request.
    Request,
}

/// The result of authentication.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Who {
    /// Used in rate limits, audit log and metrics; `local` without authentication.
    pub name: String,
    /// None without authorisation: everything is allowed then.
    pub role: Option<String>,
    /// The name of the client's view of the catalogue.
    pub profile: Option<String>,
}

#[derive(Debug)]
pub enum Event {
    ClientCame {
        client: Client,
        front: Front,
        who: Who,
    },
    /// An HTTP session that an earlier gateway opened, with what its client has told there. Nothing is answered.
    ClientRestored {
        client: Client,
        who: Who,
        state: Box<SessionState>,
    },
    /// One JSON-RPC message, or a batch in the revision that has them. The front has checked that it is JSON and that
    /// headers and body agree.
    ClientSaid {
        client: Client,
        message: Bytes,
    },
    /// The same for one request that the front has parsed.
    ClientRequested {
        client: Client,
        message: Bytes,
        outline: Outline,
    },
    /// The same for any message, parsed before, because it is long.
    ClientSaidLong {
        client: Client,
        message: Bytes,
        walk: Box<Walk>,
    },
    ClientLeft {
        client: Client,
    },
    /// Until when the credentials of a client are valid, if that is limited; now, if they were revoked. Held requests
    /// of the client are not sent after that.
    ClientAllowed {
        client: Client,
        until: Option<Instant>,
    },
    /// The link is open: the child runs, or the HTTP side accepts requests.
    LinkUp {
        link: Link,
        /// The process id of a child.
        pid: Option<u32>,
    },
    LinkSaid {
        link: Link,
        message: Bytes,
    },
    /// The same, parsed before, because it is long.
    LinkSaidLong {
        link: Link,
        message: Bytes,
        walk: Box<Walk>,
    },
    /// Of an HTTP backend: a message on the stream of this request, by the gateway's id, that is not its answer.
    LinkSaidFor {
        link: Link,
        id: Id,
        message: Bytes,
        /// Of a long message, which was parsed before.
        walk: Option<Box<Walk>>,
    },
    /// Of an HTTP backend: this request, by the gateway's id, will not be answered. The link stays open.
    RequestLost {
        link: Link,
        id: Id,
        /// Part of it may have reached the backend.
        was_sent: bool,
        why: String,
    },
    /// Of an HTTP backend: this request, by the gateway's id, was refused with a status. The link stays open.
    RequestRefused {
        link: Link,
        id: Id,
        refused: Box<Refused>,
    },
    /// The same for a notification or for the stream of a session, which was refused with 401 or 403.
    LinkDenied {
        link: Link,
        refused: Box<Refused>,
    },
    /// Of an HTTP backend: the link accepts no more requests. Each request in flight is still reported as answered or
    /// lost, and then [`Event::LinkDown`] follows.
    LinkFailing {
        link: Link,
        how: How,
    },
    /// The link is closed, and all that was received on it was reported before.
    LinkDown {
        link: Link,
        how: How,
        stderr_tail: String,
        /// Lines that were sent to it and that it cannot have read, in order.
        unsent: Vec<Bytes>,
    },
    /// The memory of a child and of all its descendants, for backends with a limit.
    Measured {
        link: Link,
        rss: u64,
    },
    /// Requests of operators. Without a name they are about all backends.
    RestartAsked {
        ticket: Ticket,
        backend: Option<String>,
        reason: String,
    },
    ResumeAsked {
        ticket: Ticket,
        backend: Option<String>,
    },
    /// Turns one tool, by the name that clients see, or one backend off or on.
    SwitchAsked {
        ticket: Ticket,
        what: Switch,
        off: bool,
    },
    /// Only what differs is started, stopped or restarted, and no session ends. A backend that needs another process
    /// keeps the one that it has until the other one works.
    Configured(Box<Settings>),
    /// The part of all rates that this replica of a cluster may use, of [`super::guard::SHARE_WHOLE`].
    ShareChanged {
        parts: u32,
    },
    /// The result of [`Action::Check`].
    Checked {
        ticket: u64,
        fit: Fit,
    },
    /// Answered when every change on trial has taken over or failed.
    OutcomeAsked {
        ticket: Ticket,
    },
    /// This program took over an HTTP link, whose streams were closed for a moment.
    LinkResumed {
        link: Link,
    },
    /// Another program takes over. The subscriptions of single requests end, as their connections do not last that long.
    HandoverBegan,
    /// No child is started any more, calls in flight are answered, and every link is stopped.
    StopAsked,
    TimePassed,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Switch {
    Tool(String),
    Backend(String),
}

/// Every message is one line with its line feed. Messages of events may contain any white space.
#[derive(Debug)]
pub enum Action {
    TellClient {
        client: Client,
        message: Bytes,
        /// The client's request that this message belongs to: its answer, or a notification or request on its behalf.
        /// Without it the message goes to the general stream of a session. The answers to a batch are one array, about
        /// its first request.
        about: Option<Id>,
        said: Said,
    },
    /// The front ends the session or closes the connection.
    DropClient {
        client: Client,
    },
    /// A client of a shared server is to use a server of its own from now on. Its open requests are still answered here.
    Separate {
        client: Client,
        why: &'static str,
    },
    /// Open this link, by the settings of its backend.
    Connect {
        link: Link,
    },
    TellLink {
        link: Link,
        message: Bytes,
    },
    /// With the grace of the backend, or at once. [`Event::LinkDown`] follows.
    Disconnect {
        link: Link,
        at_once: bool,
    },
    Record(Record),
    /// A line of a backend that is not JSON-RPC.
    Divert {
        link: Link,
        message: Bytes,
        is_json: bool,
    },
    /// A line for the log.
    Note(String),
    /// A notification was not forwarded.
    NotificationRefused(Box<RefusedNotification>),
    /// The end of one call, however it ended.
    Called(Called),
    /// The offer of a backend, to be written to the cache.
    Keep {
        backend: String,
        catalogue: Offer,
    },
    Answer {
        ticket: Ticket,
        result: Result<serde_json::Value, String>,
    },
    /// Whether arguments fit has to be found out beside the loop. [`Event::Checked`] follows.
    Check(Job),
    /// The result of that is not needed any more.
    DropCheck {
        ticket: u64,
    },
    /// All links are down after a stop.
    Over,
}

/// A notification that MCP does not have for its sender, or that two readers may parse differently. A backend might
/// take it for a request that no guard has checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedNotification {
    pub from: Sender,
    /// At most 100 characters.
    pub method: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sender {
    Client { client: Client, who: Rc<Who> },
    Backend(Rc<str>),
}

/// Whether a message ends the request that it is about. An array of answers is `Other`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    Result,
    Error,
    Other,
}

/// For audit log and metrics, without the arguments. There is one for each call, so its texts are shared and not
/// copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Called {
    pub client: Client,
    pub who: Rc<Who>,
    pub method: Cow<'static, str>,
    /// The name that the client sees.
    pub tool: Option<Rc<str>>,
    pub backend: Option<Rc<str>>,
    pub outcome: Outcome,
    pub took: Duration,
    /// A backend offers this tool, or did when its offer was last read. Otherwise the client may have invented the
    /// name.
    pub is_known: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Outcome {
    Answered,
    /// A result with `isError`, or a JSON-RPC error of the backend.
    Failed,
    /// The backend ended, or the request was lost on its way.
    Lost,
    TimedOut,
    Cancelled,
    SwitchedOff,
    RateLimited,
    Denied,
    BadArguments,
    CircuitOpen,
    /// The backend is down.
    Unavailable,
    /// There is no such tool, resource or method.
    Unknown,
}

impl Outcome {
    /// As it is written in queries and metrics. These names do not change.
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

/// The lists of one backend, each element as JSON, in the backend's order and under its own names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Offer {
    pub tools: Vec<Bytes>,
    pub prompts: Vec<Bytes>,
    pub resources: Vec<Bytes>,
    pub templates: Vec<Bytes>,
    /// As `initialize` or `server/discover` returned them.
    pub capabilities: Bytes,
    pub instructions: Option<String>,
}

/// Checks arguments against schemas. Given to the gateway when it is made; it has no side effects.
pub trait Schemas {
    /// Both are JSON. It takes no longer than reading them. Nothing means that the check may take longer, and has to be done
    /// beside the loop ([`Action::Check`]).
    fn check(&mut self, schema: &[u8], arguments: Raw<'_>) -> Option<Fit>;
}

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fit {
    Fits,
    /// One sentence that names the position.
    Misfit(String),
    /// The check would take too long.
    TooCostly,
    /// The schema cannot be used, for this reason. The backend has to check the arguments.
    Unchecked(String),
}
