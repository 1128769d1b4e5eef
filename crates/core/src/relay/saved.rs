//! The relay as saved state, so that another program can continue with the conversation. Settings are not part of it, except
//! for the names that were given out already; a restart that is running is not saved, but waited for.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{
    Dropped, Relay, Settings,
    answer_early::AnswerEarly,
    cache,
    conversation::{self, AnsweredBy, Probe},
    endpoint, hang, heartbeat, lists, memory,
    notes::Notes,
    own_restart,
    requests::{self, Class, Waits},
    restart::Reloads,
    server_requests::{ServerRequest, ServerRequests},
    servers::{Current, Servers},
};
use crate::{
    capabilities::Capabilities,
    debounce::{self, Habits},
    exit::How,
    mcp::{Family, List},
    message::Id,
    pace::{self, Pace},
    patience,
    saved::{Moment, Octets},
    slot,
};

/// Everything that a conversation depends on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// The instance.
    pub id: String,
    /// The random part of the ids of outlast's own requests.
    pub random: String,
    next_private: u64,
    conversation: SavedConversation,
    is_unheard: bool,
    early: SavedEarly,
    memory: SavedMemory,
    heartbeats: BTreeMap<u64, SavedBeat>,
    own_restart: Option<SavedOwnRestart>,
    hang: SavedHang,
    memory_replaced: Option<Moment>,
    servers: SavedServers,
    requests: SavedRequests,
    server_requests: Vec<SavedServerRequest>,
    lists: SavedLists,
    reloads: SavedReloads,
    habits: debounce::Saved,
    pace: pace::Saved,
    dropped: Dropped,
    notes: VecDeque<String>,
}

/// Why the relay cannot be saved now. `Display` completes the sentence "... because".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Busy {
    Ending,
    Restarting,
    Starting,
    Handshake,
    Comparing,
    ReadingCache,
}

impl fmt::Display for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Busy::Ending => "the conversation is ending",
            Busy::Restarting => "a restart of the server is running",
            Busy::Starting => "a server is being started",
            Busy::Handshake => "the handshake with a new server is not finished",
            Busy::Comparing => "the lists of a new server are being compared",
            Busy::ReadingCache => "the cache of this command's last run is being read",
        })
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedConversation {
    pub(super) era: SavedEra,
    pub(super) is_broken: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SavedEra {
    Handshake {
        phase: conversation::Phase,
        opening: Option<SavedOpening>,
        initialized: Option<(u64, Octets)>,
        level: Option<Octets>,
        subscriptions: BTreeMap<String, Octets>,
    },
    Stateless {
        meta: Option<String>,
        is_probe: bool,
        probe: Probe,
        is_served: bool,
        discovered: Option<String>,
        told: Option<Capabilities>,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedOpening {
    pub(super) line: Octets,
    pub(super) version: String,
    pub(super) spoken: String,
    pub(super) told: Capabilities,
    pub(super) answered_by: AnsweredBy,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedEarly {
    pub(super) from_cache: bool,
    pub(super) is_cache_read: bool,
    /// What was in it.
    pub(super) cached: Option<SavedCached>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedCached {
    pub(super) revision: String,
    pub(super) opening: Option<String>,
    pub(super) lists: BTreeMap<List, SavedItems>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedMemory {
    pub(super) revision: Option<String>,
    pub(super) opening: Option<String>,
    pub(super) lists: BTreeMap<List, String>,
    /// It is not written yet, and changed then.
    pub(super) changed: Option<Moment>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedBeat {
    pub(super) since: Moment,
    pub(super) next: Moment,
    pub(super) count: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedOwnRestart {
    pub(super) generation: u32,
    pub(super) reason: String,
    pub(super) step: own_restart::Step,
    pub(super) wait: patience::Saved,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedHang {
    pub(super) suspicion: Option<SavedSuspicion>,
    pub(super) quiet: Option<(u32, patience::Saved)>,
    pub(super) timeouts: BTreeMap<u64, patience::Saved>,
    pub(super) next_timeout: Option<Moment>,
    #[serde(default, skip_serializing_if = "VecDeque::is_empty")]
    pub(super) late_tokens: VecDeque<(u32, Id)>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedSuspicion {
    pub(super) generation: u32,
    pub(super) about: hang::PingCause,
    pub(super) ping: patience::Saved,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedServers {
    pub(super) slot: slot::Saved<u32>,
    pub(super) children: BTreeMap<u32, SavedEndpoint>,
    pub(super) draining: Vec<SavedDraining>,
    pub(super) last_end: Option<SavedEnd>,
    pub(super) ever_ready: bool,
    pub(super) ends_before_ready: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedDraining {
    pub(super) generation: u32,
    pub(super) until: Moment,
    pub(super) reason: String,
    pub(super) at_once: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedEnd {
    pub(super) how: How,
    pub(super) generation: u32,
    pub(super) pid: u32,
    pub(super) stderr: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedEndpoint {
    pub(super) pid: u32,
    pub(super) started: Moment,
    pub(super) started_unix: f64,
    pub(super) ready: Option<Moment>,
    pub(super) is_stopping: bool,
    pub(super) stderr: Vec<String>,
    pub(super) capabilities: Option<Capabilities>,
    pub(super) private: BTreeMap<Id, endpoint::Private>,
    pub(super) handshake_by: Option<Moment>,
    pub(super) handshake_max: Duration,
    pub(super) initialized: bool,
    pub(super) backlog: Option<SavedBacklog>,
    pub(super) is_stdin_closed: bool,
    pub(super) hung: Option<String>,
    pub(super) heard: Option<Moment>,
    pub(super) answered: Option<Moment>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedBacklog {
    pub(super) bytes: usize,
    pub(super) since: Moment,
    pub(super) stalled: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedRequests {
    pub(super) next_seq: u64,
    pub(super) open: Vec<SavedRequest>,
    pub(super) held: Vec<SavedHeld>,
    pub(super) batches: BTreeMap<u64, SavedBatch>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedRequest {
    pub(super) seq: u64,
    pub(super) id: Id,
    pub(super) token: Option<Id>,
    pub(super) what: String,
    pub(super) class: Class,
    pub(super) waits: Waits,
    pub(super) kept: Option<Octets>,
    pub(super) taken: bool,
    pub(super) resent: u32,
    pub(super) cancelled: bool,
    pub(super) waiting_since: Option<Moment>,
    /// None if no progress was forwarded.
    pub(super) progress: Option<f64>,
    pub(super) batch: Option<u64>,
    pub(super) listen: Option<SavedListen>,
    pub(super) deadline: Option<Moment>,
    pub(super) asked: Option<Moment>,
    pub(super) arrived: Option<Moment>,
    pub(super) met_end: Option<Moment>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedListen {
    pub(super) filter: String,
    pub(super) wants: [bool; 3],
    pub(super) acknowledged: bool,
    pub(super) torn: Option<Octets>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedHeld {
    pub(super) seq: u64,
    pub(super) line: Octets,
    pub(super) is_request: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedBatch {
    pub(super) left: usize,
    pub(super) answers: Vec<Octets>,
    pub(super) lists: BTreeSet<Family>,
    pub(super) outdated: BTreeSet<Family>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SavedServerRequest {
    /// The id that the client knows.
    known: Id,
    generation: u32,
    written: String,
    id: Id,
    token: Option<Id>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedLists {
    pub(super) shown: BTreeMap<List, SavedShown>,
    pub(super) announced: BTreeSet<Family>,
    pub(super) tools: BTreeSet<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedShown {
    pub(super) items: SavedItems,
    pub(super) next: Option<String>,
    pub(super) from: u32,
    pub(super) before: Option<SavedItems>,
    pub(super) doubtful: bool,
}

/// In the order in which they came.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SavedItems {
    Whole {
        items: Vec<(String, String)>,
        bytes: usize,
    },
    /// Too large to be kept: keys and hashes. Another program may compute other hashes; then the list counts as changed.
    Hashes {
        items: Vec<(String, u64)>,
        bytes: usize,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedReloads {
    pub(super) last: Option<SavedLastReload>,
    pub(super) unwritten_marker: Option<SavedMarker>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedLastReload {
    pub(super) reason: String,
    pub(super) at: Moment,
    pub(super) failure: Option<(String, Vec<String>)>,
    pub(super) marker_error: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedMarker {
    pub(super) timestamp: f64,
    pub(super) pid: u32,
    pub(super) reason: String,
    pub(super) iso_time: String,
    pub(super) why: String,
}

impl Relay {
    /// Why the state cannot be saved now. Each such reason ends within a bounded time by itself.
    pub fn busy(&self) -> Option<Busy> {
        if self.ended || self.is_leaving() {
            Some(Busy::Ending)
        } else if self.reloads.is_busy() {
            Some(Busy::Restarting)
        } else if matches!(self.servers.slot.current(), Current::Replaying(_)) {
            Some(Busy::Handshake)
        } else if self.servers.is_moving() {
            Some(Busy::Starting)
        } else if self.servers.running().any(|(_, child)| !child.fetches.is_empty()) {
            Some(Busy::Comparing)
        } else if self.early.is_reading() {
            Some(Busy::ReadingCache)
        } else {
            None
        }
    }

    /// The whole state, or why it cannot be saved now.
    pub fn save(&self, now: Instant) -> Result<Saved, Busy> {
        if let Some(busy) = self.busy() {
            return Err(busy);
        }
        let early = self.early.save().ok_or(Busy::ReadingCache)?;
        let servers = self.servers.save(now).ok_or(Busy::Starting)?;
        Ok(Saved {
            id: self.settings.id.clone(),
            random: self.settings.random.clone(),
            next_private: self.next_private,
            conversation: self.conversation.save(),
            is_unheard: self.is_unheard,
            early,
            memory: self.memory.save(now),
            heartbeats: self.heartbeats.save(now),
            own_restart: self.own_restart.as_ref().map(|own| own.save(now)),
            hang: self.hang.save(now),
            memory_replaced: self.memory_limit.save(now),
            servers,
            requests: self.requests.save(now),
            server_requests: save_server_requests(&self.server_requests),
            lists: self.lists.save(),
            reloads: self.reloads.save(now),
            habits: self.habits.save(now),
            pace: self.pace.save(now),
            dropped: self.dropped,
            notes: self.notes.to_vec().into(),
        })
    }

    /// Continues where [`Relay::save`] was called. The instance and the random part of ids are those of the state, whatever
    /// the settings say.
    pub fn restore(settings: Settings, saved: Saved, now: Instant) -> Relay {
        let settings = Settings { id: saved.id, random: saved.random, ..settings };
        Relay {
            servers: Servers::restore(settings.policy.clone(), saved.servers, now),
            settings,
            out: Vec::new(),
            next_private: saved.next_private,
            conversation: conversation::Conversation::restore(saved.conversation),
            is_unheard: saved.is_unheard,
            early: AnswerEarly::restore(saved.early),
            memory: cache::Memory::restore(saved.memory, now),
            heartbeats: heartbeat::Heartbeats::restore(saved.heartbeats, now),
            own_restart: saved.own_restart.map(|own| own_restart::OwnRestart::restore(own, now)),
            hang: hang::Hang::restore(saved.hang, now),
            memory_limit: memory::MemoryLimit::restore(saved.memory_replaced, now),
            requests: requests::Requests::restore(saved.requests, now),
            server_requests: restore_server_requests(saved.server_requests),
            lists: lists::Lists::restore(saved.lists),
            reloads: Reloads::restore(saved.reloads, now),
            habits: Habits::restore(saved.habits, now),
            pace: Pace::restore(saved.pace, now),
            dropped: saved.dropped,
            notes: Notes::restore(saved.notes),
            ended: false,
        }
    }
}

fn save_server_requests(requests: &ServerRequests) -> Vec<SavedServerRequest> {
    let mut saved: Vec<SavedServerRequest> = requests
        .iter()
        .map(|(known, request)| SavedServerRequest {
            known: known.clone(),
            generation: request.generation,
            written: request.written.clone(),
            id: request.id.clone(),
            token: request.token.clone(),
        })
        .collect();
    saved.sort_by(|one, other| one.known.cmp(&other.known));
    saved
}

fn restore_server_requests(saved: Vec<SavedServerRequest>) -> ServerRequests {
    let mut requests = ServerRequests::default();
    for SavedServerRequest { known, generation, written, id, token } in saved {
        requests.insert(known, ServerRequest { generation, written, id, token });
    }
    requests
}
