//! Settings of a gateway, checked: backends, rights of clients, limits.
//! Reading and checking the configuration files is the driver's.

use std::{collections::BTreeMap, time::Duration};

use crate::{restarts::Policy, sandbox::Sandbox, secret::Resolved};

use super::Switch;

/// The whole configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// In the order of the file. Names are unique.
    pub backends: Vec<Backend>,
    /// Views of the catalogue, by name.
    pub profiles: BTreeMap<String, Profile>,
    /// The profile of clients that name none.
    pub default_profile: Option<String>,
    /// By name. Without any, everything is allowed.
    pub roles: BTreeMap<String, Role>,
    pub rates: Rates,
    pub switched_off: Vec<Switch>,
    /// Forward requests with a method that MCP does not have for every client; otherwise only for clients that may call
    /// every tool.
    pub forward_unknown: bool,
    /// It runs one backend for the replicas of a cluster: they are its clients, and have guards.
    pub is_host: bool,
    pub limits: Limits,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Backend {
    pub name: String,
    pub kind: Kind,
    /// The prefix of the names of tools and prompts; `name__` by default.
    pub prefix: String,
    pub allow: Vec<Pattern>,
    pub deny: Vec<Pattern>,
    pub children: Children,
    /// How many processes `per_session` may start at a time.
    pub children_max: usize,
    pub start: Start,
    pub placement: Placement,
    /// The process gets the whole environment of the gateway.
    pub inherit_env: bool,
    pub era: EraChoice,
    pub policy: Policy,
    /// A call that takes longer is cancelled and fails. Progress extends it, up to `call_max` in all.
    pub call_timeout: Duration,
    pub call_max: Duration,
    pub start_timeout: Duration,
    /// An idle process is stopped after this time, and started again by the next call.
    pub idle_stop: Option<Duration>,
    /// In bytes. A process above it is replaced.
    pub memory_max: Option<u64>,
    /// Failures in a row that open the circuit, and how long it stays open before a probe.
    pub breaker_failures: u32,
    pub breaker_open: Duration,
    /// Repeat a call that was in flight at a crash if its tool is annotated as safe.
    pub retry_annotated: bool,
}

/// What the driver connects to. The machine only compares it: a change needs another link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    Stdio {
        command: Resolved,
        args: Vec<Resolved>,
        env: BTreeMap<String, Resolved>,
        cwd: Option<Resolved>,
        /// Without one its processes may do anything.
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
    /// Every text that may contain the value of a reference.
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
    /// With the first request that needs it. Without a cached catalogue it is started once to read its lists, and
    /// stopped.
    Lazy,
}

/// Which replicas of a cluster run the processes of a stdio backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Each runs its own.
    Every,
    /// One, the owner; the others send their requests to it.
    One,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EraChoice {
    /// A child gets a handshake, and `server/discover` if it refuses. An HTTP backend is asked once which eras it
    /// speaks; then each client's era is used with it if possible.
    Auto,
    Handshake,
    Stateless,
}

/// A name in which `*` stands for any text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pattern(pub String);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Profile {
    /// Names of backends; all if empty.
    pub backends: Vec<Pattern>,
    /// Tools by the names that clients see; all if empty.
    pub allow: Vec<Pattern>,
    pub deny: Vec<Pattern>,
    /// Three tools to search, describe and call instead of the whole list.
    pub search: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Role {
    /// Tools by the names that clients see; none if empty.
    pub allow: Vec<Pattern>,
    pub deny: Vec<Pattern>,
}

/// Token buckets, for each client and tool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rates {
    pub default: Option<Rate>,
    /// By the names that clients see. The first pattern that matches counts.
    pub tools: Vec<(Pattern, Rate)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    pub per_minute: u32,
    pub burst: u32,
}

/// Limits of the whole gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// How long a call waits for a backend that is down; then it fails with the time of the next try.
    pub hold: Duration,
    /// Calls held for one backend; more fail at once.
    pub held_max: usize,
    /// Calls in flight for one client; more fail at once.
    pub in_flight_max: usize,
    /// Elements on one page of a list.
    pub page: usize,
    /// How often a backend that was given up is tried again.
    pub retry_given_up: Duration,
}
