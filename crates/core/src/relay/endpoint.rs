//! What the relay knows of one server process: its capabilities, outlast's own requests to it, and when it last spoke.
//! Whether it serves is decided in [`super::servers`].

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use bytes::Bytes;

use serde::{Deserialize, Serialize};

use super::{backlog::Backlog, lists::Items, saved::SavedEndpoint, tail::Tail};
use crate::{capabilities::Capabilities, mcp::List, message::Id, saved::Moment};

#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) pid: u32,
    pub(super) started: Instant,
    /// Wall clock, in seconds.
    pub(super) started_unix: f64,
    /// When it finished its handshake.
    pub(super) ready: Option<Instant>,
    /// It was asked to stop: what it still says is not for the client.
    pub(super) is_stopping: bool,
    pub(super) stderr: Tail,
    pub(super) capabilities: Option<Capabilities>,
    /// Our own requests to it.
    pub(super) private: HashMap<Id, Private>,
    /// Requests it made before it served.
    pub(super) early: Vec<Bytes>,
    /// When its handshake is late.
    pub(super) handshake_by: Option<Instant>,
    /// How long its handshake may take.
    pub(super) handshake_max: Duration,
    /// It was told `initialized`.
    pub(super) initialized: bool,
    pub(super) fetches: BTreeMap<List, Fetch>,
    pub(super) backlog: Option<Backlog>,
    /// We closed its stdin, and it has to exit.
    pub(super) is_stdin_closed: bool,
    /// Why it counts as hung.
    pub(super) hung: Option<String>,
    /// When it last said anything.
    pub(super) heard: Option<Instant>,
    /// When it last answered anything.
    pub(super) answered: Option<Instant>,
}

impl Endpoint {
    pub(super) fn new(pid: u32, started_unix: f64, handshake_max: Duration, now: Instant) -> Endpoint {
        Endpoint {
            pid,
            started: now,
            started_unix,
            ready: None,
            is_stopping: false,
            stderr: Tail::default(),
            capabilities: None,
            private: HashMap::new(),
            early: Vec::new(),
            handshake_by: None,
            handshake_max,
            initialized: false,
            fetches: BTreeMap::new(),
            backlog: None,
            is_stdin_closed: false,
            hung: None,
            heard: None,
            answered: None,
        }
    }

    /// Without the lists that are being fetched and the requests it made before it served: neither is there while the
    /// relay can be saved.
    pub(super) fn save(&self, now: Instant) -> SavedEndpoint {
        let moment = |at: Instant| Moment::of(at, now);
        SavedEndpoint {
            pid: self.pid,
            started: moment(self.started),
            started_unix: self.started_unix,
            ready: self.ready.map(moment),
            is_stopping: self.is_stopping,
            stderr: self.stderr.to_vec(),
            capabilities: self.capabilities,
            private: self.private.iter().map(|(id, private)| (id.clone(), *private)).collect(),
            handshake_by: self.handshake_by.map(moment),
            handshake_max: self.handshake_max,
            initialized: self.initialized,
            backlog: self.backlog.as_ref().map(|backlog| backlog.save(now)),
            is_stdin_closed: self.is_stdin_closed,
            hung: self.hung.clone(),
            heard: self.heard.map(moment),
            answered: self.answered.map(moment),
        }
    }

    pub(super) fn restore(saved: SavedEndpoint, now: Instant) -> Endpoint {
        let at = |moment: Moment| moment.at(now);
        let mut stderr = Tail::default();
        saved.stderr.into_iter().for_each(|line| stderr.push(line, usize::MAX));
        Endpoint {
            pid: saved.pid,
            started: at(saved.started),
            started_unix: saved.started_unix,
            ready: saved.ready.map(at),
            is_stopping: saved.is_stopping,
            stderr,
            capabilities: saved.capabilities,
            private: saved.private.into_iter().collect(),
            early: Vec::new(),
            handshake_by: saved.handshake_by.map(at),
            handshake_max: saved.handshake_max,
            initialized: saved.initialized,
            fetches: BTreeMap::new(),
            backlog: saved.backlog.map(|backlog| Backlog::restore(backlog, now)),
            is_stdin_closed: saved.is_stdin_closed,
            hung: saved.hung,
            heard: saved.heard.map(at),
            answered: saved.answered.map(at),
        }
    }

    /// Its handshake begins, and may take this long.
    pub(super) fn begin_handshake(&mut self, max: Duration, now: Instant) {
        self.handshake_max = max;
        self.handshake_by = Some(now + max);
    }
}

/// A request of ours to a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Private {
    Handshake,
    Restore(Granted),
    Fetch(List),
    /// A list that was not fetched in time.
    LateFetch,
    /// A request of the client's that was answered without this child.
    Answered,
    /// Whether it can still answer after a call of its own restart tool.
    RestartPing,
    /// Whether it hangs.
    HangPing,
}

/// What a client has set, and every later child is to have set again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Granted {
    LogLevel,
    Subscription,
}

impl Granted {
    pub(super) fn in_words(self) -> &'static str {
        match self {
            Granted::LogLevel => "the log level",
            Granted::Subscription => "a subscription",
        }
    }
}

/// A list on its way from a new child, to be compared.
#[derive(Debug)]
pub(super) struct Fetch {
    pub(super) id: Id,
    pub(super) items: Items,
    pub(super) pages: usize,
    /// The child said that it changed meanwhile.
    pub(super) again: bool,
    pub(super) by: Instant,
}
