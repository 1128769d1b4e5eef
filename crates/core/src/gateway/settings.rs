//! All that a gateway is told of its backends, its clients' rights and its bounds.

use std::{collections::BTreeMap, time::Duration};

use crate::{restarts::Policy, sandbox::Sandbox, secret::Resolved};

use super::Switch;

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
    /// Requests with a method that MCP does not have are forwarded whatever the client's role; otherwise only for clients
    /// that may call every tool.
    pub forward_unknown: bool,
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
    /// How many processes `per_session` may have at a time.
    pub children_max: usize,
    pub start: Start,
    /// Its process gets all of the gateway's environment.
    pub inherit_env: bool,
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
        command: Resolved,
        args: Vec<Resolved>,
        env: BTreeMap<String, Resolved>,
        cwd: Option<Resolved>,
        /// Its processes may do anything if there is none.
        sandbox: Option<Sandbox>,
    },
    Http {
        url: Resolved,
        headers: BTreeMap<String, Resolved>,
        /// The old transport with two endpoints.
        is_sse: bool,
    },
}

impl Kind {
    /// Every text that may hold something out of a reference.
    pub fn texts(&self) -> impl Iterator<Item = &Resolved> {
        let (first, list, map, last) = match self {
            Kind::Stdio { command, args, env, cwd, .. } => (command, &args[..], env, cwd.as_ref()),
            Kind::Http { url, headers, .. } => (url, &[][..], headers, None),
        };
        std::iter::once(first).chain(list).chain(map.values()).chain(last)
    }
}

/// How many processes a stdio backend has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Children {
    Shared,
    PerSession,
    Pool(u32),
}

/// When a stdio backend's process starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// With the gateway.
    Eager,
    /// With the first request that needs it. One without a cached catalogue is started once to read it, and stopped again.
    Lazy,
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
