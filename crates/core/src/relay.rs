//! One client's MCP conversation, across many server lives and both eras.
//!
//! The client side is decided by what the client says, never by asking a child. The server side has three parts:
//! the *current* child that serves or is meant to, at most one *candidate* that a reload brings up beside it, and a
//! few *draining* ones that only finish what they were asked. Every child is known by its generation; what a
//! generation says reaches the client only from the moment it serves until it is retired.

use std::{
    collections::hash_map::Entry,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    mem,
    time::{Duration, Instant},
};

use bytes::Bytes;
use rustc_hash::FxHashMap;
use serde_json::Value;

use crate::{
    debounce::{Changed, Habits, Print},
    exit::How,
    message::{self, Id, Message},
    pace::Pace,
    record::{self, Record},
    restarts::{Policy, Restarts},
};

mod answer_early;
mod backlog;
mod cache;
mod client;
mod compare;
mod ends;
mod hang;
mod heartbeat;
mod listens;
pub(crate) mod lists;
mod memory;
mod own_restart;
mod restart;
mod server;
mod tools;
mod watched;
mod words;

pub use lists::Family;
use lists::{Items, Kind, Shown};
use restart::{LastReload, Queued, Restart, Ticket, UnwrittenMarker};
use words::{Failure, Next, Outcome, Tool};

/// What is fixed at birth.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The instance, as in the marker and the audit log.
    pub id: String,
    /// The server, as people call it.
    pub name: String,
    /// Whether our tools are added to the server's.
    pub tools: bool,
    pub retry: Retry,
    pub reload: Reload,
    /// Whether a build runs before each restart that is asked for.
    pub build: bool,
    pub on_clean_exit: OnCleanExit,
    /// How long the first server may take for an opening before it is answered without it; `None` is the limits'
    /// default, which depends on the cache.
    pub answer_after: Option<Duration>,
    /// Whether the driver keeps a cache of what a run told its client.
    pub cache: bool,
    /// How often a call without progress of its server's is reported to be alive.
    pub heartbeat: Option<Duration>,
    /// The server's own tool that makes it exit with 42: only a call of this one is answered as a success then.
    pub restart_tool: String,
    /// How long a tool call may take without progress; then it is cancelled and fails.
    pub call_timeout: Option<Duration>,
    /// The same for single tools, by name; zero is no limit.
    pub call_timeouts: BTreeMap<String, Duration>,
    /// How many bytes of memory the server may use; then it is replaced.
    pub memory_max: Option<u64>,
    pub policy: Policy,
    /// For the jitter of the policy.
    pub seed: u64,
    /// Makes our ids unlike anybody's: the random part of `outlast-<random>-<k>`.
    pub random: String,
    pub limits: Limits,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    Never,
    /// Tool calls that the server's annotations call read-only or idempotent may be asked twice.
    Annotated,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reload {
    /// The new child starts beside the old one and takes over when it is ready.
    BlueGreen,
    /// The old child is stopped first.
    Replace,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnCleanExit {
    /// A server that leaves on purpose ends outlast too.
    End,
    /// It is started again by the next request.
    Restart,
}

/// Every bound of the conversation.
#[derive(Debug, Clone)]
pub struct Limits {
    /// How long a request waits for a server; then it is answered from memory or with an error.
    pub hold_max: Duration,
    /// How many messages wait; the newest is refused.
    pub held_max: usize,
    /// How many bytes wait, and how many are kept of requests in flight that may be asked again.
    pub held_bytes_max: usize,
    /// How far ahead the next start may lie before an opening is answered without a server.
    pub opening_wait: Duration,
    /// How long the first child may take for its handshake; then it is stopped.
    pub first_handshake_max: Duration,
    /// How long a later child may take; then it is stopped.
    pub handshake_max: Duration,
    /// How long a replaced child may finish its calls; then they fail.
    pub drain_max: Duration,
    /// How many replaced children may do so; a reload that makes it one more waits, then ends the oldest.
    pub draining_max: usize,
    /// How long such a reload waits for calls to finish.
    pub room_wait: Duration,
    /// How often a request is asked again after the server's end; then it fails.
    pub resend_max: u32,
    /// How long fetching a list for comparison may take; then it counts as changed.
    pub list_max: Duration,
    /// How many pages are fetched; beyond, the list counts as changed.
    pub list_pages_max: usize,
    /// How large a list is kept; a larger one is compared by hash and not served from memory.
    pub list_bytes_max: usize,
    /// How long `restart_server` waits; then it says that the restart is still running.
    pub restart_wait: Duration,
    /// How long the end of a subscription is kept back, as the child may be leaving.
    pub teardown_wait: Duration,
    /// The longest that a client may cache what a restart can change.
    pub ttl_max: Duration,
    /// How many requests a child may send before it serves; one more fails its handshake.
    pub early_max: usize,
    /// How many messages one batch may hold; a longer one is refused.
    pub batch_max: usize,
    /// How much is kept of each child's stderr.
    pub stderr_max: usize,
    /// How long an opening waits for a slow first server if its lists are cached; then the cache answers.
    pub answer_after_cached: Duration,
    /// The same without a cache: some clients list tools only once.
    pub answer_after_uncached: Duration,
    /// How long an opening waits after the first end of a server that was never ready; then it is answered without one.
    pub broken_after: Duration,
    /// How long an opening waits before the cache is read.
    pub cache_read_after: Duration,
    /// How long reading the cache may take; then the opening is answered as if there were none.
    pub cache_read_max: Duration,
    /// How long the cache is not written after a change, so that one write holds several.
    pub cache_write_after: Duration,
    /// How large an entry of the cache may be; a larger one is not kept.
    pub cache_bytes_max: usize,
    /// How many bytes may wait for a child's pipe before the client is read only as fast as the child reads.
    pub queued_bytes_max: usize,
    /// How long a child may take nothing of such a queue; then the client is read again, and requests are refused.
    pub unread_max: Duration,
    /// How many bytes may wait for a child that takes nothing; then the client is not read any more.
    pub queued_bytes_stop: usize,
    /// How long the server may take to exit after it answered a call of its own restart tool; then it gets a ping.
    pub restart_answered_wait: Duration,
    /// The same after the call, without an answer.
    pub restart_called_wait: Duration,
    /// How long it may take to exit or to answer that ping; then its stdin is closed and it is replaced.
    pub restart_ping_max: Duration,
    /// How long a suspected server may leave a ping unanswered; then it counts as hung and is replaced.
    pub ping_max: Duration,
    /// How long a request that needs no work may be unanswered while no other is open; then the server gets a ping.
    pub quiet_max: Duration,
    /// A server that uses too much memory is not replaced again within this time.
    pub memory_gap: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            hold_max: Duration::from_secs(30),
            held_max: 256,
            held_bytes_max: 8 << 20,
            opening_wait: Duration::from_secs(8),
            first_handshake_max: Duration::from_secs(120),
            handshake_max: Duration::from_secs(30),
            drain_max: Duration::from_secs(60),
            draining_max: 2,
            room_wait: Duration::from_secs(5),
            resend_max: 1,
            list_max: Duration::from_secs(5),
            list_pages_max: 100,
            list_bytes_max: 4 << 20,
            restart_wait: Duration::from_secs(55),
            teardown_wait: Duration::from_millis(500),
            ttl_max: Duration::from_secs(5),
            early_max: 64,
            batch_max: 256,
            stderr_max: 64 << 10,
            answer_after_cached: Duration::from_secs(3),
            answer_after_uncached: Duration::from_secs(20),
            broken_after: Duration::from_secs(1),
            cache_read_after: Duration::from_millis(250),
            cache_read_max: Duration::from_secs(1),
            cache_write_after: Duration::from_secs(2),
            cache_bytes_max: 1 << 20,
            queued_bytes_max: 8 << 20,
            unread_max: Duration::from_secs(1),
            queued_bytes_stop: 32 << 20,
            restart_answered_wait: Duration::from_millis(700),
            restart_called_wait: Duration::from_secs(1),
            restart_ping_max: Duration::from_secs(1),
            ping_max: Duration::from_secs(5),
            quiet_max: Duration::from_secs(30),
            memory_gap: Duration::from_secs(60),
        }
    }
}

/// What happened. Lines end with their newline.
#[derive(Debug)]
pub enum Event {
    ClientSaid(Bytes),
    /// A line over the limit was skipped; this is how it began.
    ClientSaidTooMuch(Bytes),
    ClientEnded(Farewell),
    ServerStarted {
        generation: u32,
        pid: u32,
        /// Wall clock, in seconds.
        unix: f64,
    },
    StartFailed(String),
    ServerSaid(u32, Bytes),
    /// A line of its stderr.
    ServerLogged(u32, String),
    /// It is gone. All that it said came before; `unsent` is what its pipe did not take, by mark.
    ServerWentDown {
        generation: u32,
        how: How,
        unsent: Vec<(u64, Bytes)>,
    },
    /// How many bytes wait for a child's pipe. Told on every change from `queued_bytes_max` on, and once below it.
    ServerQueue {
        generation: u32,
        bytes: usize,
    },
    /// The answer to `Action::TakeBack`: the marked lines that the pipe had not begun to take.
    TakenBack {
        generation: u32,
        unsent: Vec<(u64, Bytes)>,
    },
    /// The answer to `Action::ReadCache`: the text that was saved, if there is one.
    CacheRead {
        revision: String,
        entry: Option<String>,
    },
    RestartAsked {
        ticket: u64,
        origin: Origin,
        reason: String,
        /// The calls of the old server are not waited for.
        at_once: bool,
    },
    /// How many bytes of memory a child uses, with all processes below it.
    ServerMeasured {
        generation: u32,
        bytes: u64,
    },
    /// Watched files changed since the newest server was started, or may have. `prints` belong to the named paths, in
    /// their order.
    FilesChanged {
        changed: Changed,
        prints: Vec<Option<Print>>,
    },
    /// Somebody forgives the crashes so far.
    Forgiven,
    BuildEnded(Result<(), String>),
    /// The path of the marker, or why there is none.
    MarkerWritten(Result<String, NotWritten>),
    MarkerRead {
        key: u64,
        reading: Reading,
        /// Wall clock, in seconds.
        unix: f64,
    },
    TimePassed,
}

/// How the client's side came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Farewell {
    /// End of file, or a signal to us: answers still due are worth sending.
    Heard,
    /// Nobody reads any more.
    Broken,
}

/// Who wants a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    Tool,
    Control,
    Watch,
    /// The server's own restart tool was called, and the server could not exit.
    Server,
    /// The server hung.
    Hang,
    /// The server used too much memory.
    Memory,
}

impl Origin {
    fn as_str(self) -> &'static str {
        match self {
            Origin::Tool => "tool",
            Origin::Control => "control",
            Origin::Watch => "watch",
            Origin::Server => "server",
            Origin::Hang => "hang",
            Origin::Memory => "memory",
        }
    }

    /// A person, an agent or a program asked for it.
    fn is_request(self) -> bool {
        matches!(self, Origin::Tool | Origin::Control)
    }
}

/// A restart marker that could not be written: what it would have said besides the process id and the reason.
#[derive(Debug, Clone, PartialEq)]
pub struct NotWritten {
    pub why: String,
    /// Wall clock, in seconds.
    pub timestamp: f64,
    pub iso_time: String,
}

/// What stands in the marker file.
#[derive(Debug, Clone)]
pub enum Reading {
    Missing { path: String },
    Corrupt { path: String, error: String },
    Valid { timestamp: f64, pid: u32, reason: String, iso_time: String },
}

/// What is to be done.
#[derive(Debug)]
pub enum Action {
    TellClient(Bytes),
    /// The mark comes back with the line if the pipe does not take it.
    TellServer {
        generation: u32,
        line: Bytes,
        mark: Option<u64>,
    },
    /// Take the lines out of a replaced child's queue that its pipe has not begun to take. Answered at once, before
    /// anything else is told.
    TakeBack(u32),
    /// Close a child's stdin at once, whatever waits for it: a server that is blocked in reading it goes on.
    CloseStdin(u32),
    /// Read what this command's last run saved for this protocol revision.
    ReadCache(String),
    /// Save this for the next run, or remove what was saved.
    SaveCache {
        revision: String,
        entry: Option<String>,
    },
    Build,
    StopBuild,
    /// Start a child; it gets the next generation.
    Start,
    /// Stop a child politely. `how` is what its end will be called.
    Stop {
        generation: u32,
        how: How,
    },
    /// It finished its handshake.
    MarkReady(u32),
    WriteMarker {
        pid: u32,
        reason: String,
    },
    ReadMarker(u64),
    Record(Record),
    /// A line on a child's stdout that is not JSON-RPC: it goes to stderr with a tag, never to the client.
    Divert {
        generation: u32,
        line: Bytes,
        /// It is JSON, though no message.
        is_json: bool,
    },
    /// The end of a restart that was asked for from outside.
    Answer {
        ticket: u64,
        result: Result<Value, Value>,
    },
    End(u8),
}

/// Where the client stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Client {
    Unopened,
    /// `initialize` was heard; `initialized` was not.
    Opening,
    Ready,
    Modern,
    Gone,
}

/// The child that serves, or what there is instead.
#[derive(Debug, Clone, PartialEq)]
enum Current {
    /// Before the first child.
    None,
    /// The client's own opening is this child's handshake.
    Fresh(u32),
    /// Our private handshake runs.
    Replaying(u32),
    Serving(u32),
    /// The next one starts then, unless a restart does it first.
    Down {
        at: Instant,
    },
    /// No start is planned.
    GivenUp {
        crashes: Option<String>,
        callable: bool,
    },
}

/// Who a start is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Current,
    Candidate,
}

/// What a server offers, or what a client was told that it does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Capabilities {
    tools: bool,
    prompts: bool,
    resources: bool,
    subscribe: bool,
    logging: bool,
    completions: bool,
}

impl Capabilities {
    const ALL: Capabilities =
        Capabilities { tools: true, prompts: true, resources: true, subscribe: true, logging: true, completions: true };

    fn has(&self, family: Family) -> bool {
        match family {
            Family::Tools => self.tools,
            Family::Prompts => self.prompts,
            Family::Resources => self.resources,
        }
    }
}

/// The client's handshake, as each new child hears it.
#[derive(Debug)]
struct Opening {
    /// `initialize`, the client's bytes.
    line: Bytes,
    /// As the client was told.
    version: String,
    /// As the last child said; another one only after an opening of our own.
    spoken: String,
    told: Capabilities,
    /// Answered by us, as no server could.
    local: bool,
    /// Answered from the cache of the last run.
    cached: bool,
}

/// One child process.
#[derive(Debug)]
struct Child {
    pid: u32,
    started: Instant,
    started_unix: f64,
    ready: Option<Instant>,
    capabilities: Option<Capabilities>,
    /// Our own requests to it.
    private: HashMap<Id, Private>,
    /// Requests it made before it served.
    early: Vec<Bytes>,
    stderr: Tail,
    /// When its handshake is late.
    handshake_by: Option<Instant>,
    /// How long it may take.
    handshake_max: Duration,
    /// It was told `initialized`.
    initialized: bool,
    fetches: BTreeMap<Kind, Fetch>,
    /// We stopped it; whatever it still says is not for the client.
    stopping: bool,
    backlog: Option<backlog::Backlog>,
    /// We closed its stdin, and it has to exit.
    is_stdin_closed: bool,
    /// Why it counts as hung.
    hung: Option<String>,
    /// When it last said anything.
    heard: Option<Instant>,
    /// When it last answered anything.
    answered: Option<Instant>,
}

/// A request of ours to a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Private {
    Handshake,
    Restore(&'static str),
    Fetch(Kind),
    /// A list that was not fetched in time.
    LateFetch,
    /// A request of the client's that was answered without this child.
    Answered,
    /// Whether it can still answer after a call of its own restart tool.
    RestartPing,
    /// Whether it hangs.
    HangPing,
}

/// A list on its way from a new child, to be compared.
#[derive(Debug)]
struct Fetch {
    id: Id,
    items: Items,
    pages: usize,
    /// The child said that it changed meanwhile.
    again: bool,
    by: Instant,
}

/// The end of a stream of lines.
#[derive(Debug, Default)]
struct Tail {
    lines: VecDeque<String>,
    bytes: usize,
}

impl Tail {
    fn push(&mut self, mut line: String, bytes_max: usize) {
        if line.len() > bytes_max {
            let mut end = bytes_max;
            while !line.is_char_boundary(end) {
                end -= 1;
            }
            line.truncate(end);
        }
        self.bytes += line.len();
        self.lines.push_back(line);
        while self.bytes > bytes_max {
            self.bytes -= self.lines.pop_front().map_or(0, |line| line.len());
        }
    }

    fn to_vec(&self) -> Vec<String> {
        self.lines.iter().cloned().collect()
    }
}

/// What kind of request it is: which row of the tables holds for it.
#[derive(Debug, Clone, PartialEq)]
enum Class {
    Initialize,
    Discover,
    /// Asked without a cursor.
    List(Kind),
    /// Asked with one.
    Page(Kind, Option<String>),
    /// Reading only; `once` if it carries something good for one use.
    Read {
        once: bool,
    },
    Complete {
        once: bool,
    },
    Ping,
    Call {
        repeatable: bool,
        task: bool,
    },
    Listen,
    SetLevel,
    Subscribe(String),
    Unsubscribe(String),
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    On(u32),
    Held,
    /// We answer it, later.
    Ours,
    /// It made the server exit 42, and is answered when the next one is ready.
    Due,
    /// A subscription that waits for a child.
    Nowhere,
}

/// A request of the client's that is not answered yet.
#[derive(Debug)]
struct Open {
    seq: u64,
    id: Id,
    /// The tool, or else the method.
    what: String,
    class: Class,
    place: Place,
    /// Its bytes, if it may be asked again.
    kept: Option<Bytes>,
    /// Some pipe took it.
    taken: bool,
    resent: u32,
    cancelled: bool,
    /// When it began to wait for a server; later ends do not renew it.
    waiting_since: Option<Instant>,
    token: Option<Id>,
    /// The last progress forwarded.
    progress: f64,
    batch: Option<u64>,
    listen: Option<listens::Listen>,
    deadline: Option<Instant>,
    /// When a child was first asked.
    asked: Option<Instant>,
    waited: answer_early::Waited,
}

/// The open requests of one id, oldest first: one, unless the client is careless.
#[derive(Debug)]
struct Seqs {
    oldest: u64,
    later: Vec<u64>,
}

impl Seqs {
    fn iter(&self) -> impl Iterator<Item = u64> {
        std::iter::once(self.oldest).chain(self.later.iter().copied())
    }

    /// False if that was the last one.
    fn remove(&mut self, seq: u64) -> bool {
        if self.oldest != seq {
            self.later.retain(|later| *later != seq);
        } else if self.later.is_empty() {
            return false;
        } else {
            self.oldest = self.later.remove(0);
        }
        true
    }
}

/// A message that waits for a server, in client order.
#[derive(Debug)]
struct Held {
    line: Bytes,
    is_request: bool,
}

/// A server's request to the client, under the id the client knows.
#[derive(Debug)]
struct Asked {
    generation: u32,
    /// As the server wrote it.
    id: String,
    own: Id,
    token: Option<Id>,
}

/// The answers to a batch, until each is there.
#[derive(Debug, Default)]
struct Batch {
    left: usize,
    answers: Vec<Bytes>,
    /// Lists among the answers, and those that are known by now to be others.
    lists: BTreeSet<Family>,
    outdated: BTreeSet<Family>,
}

#[derive(Debug)]
struct Draining {
    generation: u32,
    until: Instant,
    /// Of the restart that replaced it.
    reason: String,
    /// That restart does not wait for calls: it is over as soon as the lines are taken back that it has not read.
    at_once: bool,
}

/// The last end of a serving child.
#[derive(Debug, Clone)]
struct LastEnd {
    how: How,
    /// Nothing if no process came to be.
    generation: u32,
    pid: u32,
    stderr: Vec<String>,
    /// Why it counted as hung, if it did.
    hung: Option<String>,
}

/// What a modern child did with the client's probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Probe {
    Unanswered,
    /// It heard none, or does not speak the stateless era: it can still be initialised.
    Harmless,
    /// It may be locked to the stateless era.
    Locked,
}

/// What passed by that should not have.
#[derive(Debug, Clone, Copy, Default)]
pub struct Dropped {
    pub from_server: u64,
    pub from_client: u64,
    /// Of those from a server, the lines that went to stderr instead.
    pub not_json: u64,
}

#[derive(Debug)]
pub struct Relay {
    settings: Settings,
    restarts: Restarts,
    out: Vec<Action>,
    next_private: u64,
    next_seq: u64,

    client: Client,
    /// Nobody reads what the client is told.
    unheard: bool,
    opening: Option<Opening>,
    /// `initialized`, the client's bytes, and its place among what the client said.
    initialized: Option<(u64, Bytes)>,
    /// The last `logging/setLevel` that a server accepted.
    level: Option<Bytes>,
    subscriptions: BTreeMap<String, Bytes>,
    /// `_meta` of the latest modern request.
    meta: String,
    probe_only: bool,
    probe: Probe,
    /// A modern request was answered by a child.
    modern_served: bool,
    /// The last discover result that reached the client, as JSON.
    discovered: Option<String>,
    /// What it promised.
    discovered_told: Option<Capabilities>,
    /// No server came up at first, and the client was told so.
    broken: bool,
    early: answer_early::AnswerEarly,
    memory: cache::Memory,
    heartbeats: heartbeat::Heartbeats,
    own_restart: Option<own_restart::OwnRestart>,
    hang: hang::Hang,
    /// When a server was last replaced because of its memory.
    memory_replaced: Option<Instant>,
    ever_ready: bool,
    ends_before_ready: u32,

    current: Current,
    candidate: Option<u32>,
    draining: Vec<Draining>,
    children: BTreeMap<u32, Child>,
    starting: Option<Role>,
    /// The next start waits for this one's end.
    start_after: Option<u32>,
    building: bool,
    last_end: Option<LastEnd>,
    /// The generation that was current last, for reports while there is none.
    last_generation: Option<u32>,
    replaced: u32,

    opens: BTreeMap<u64, Box<Open>>,
    /// Open requests by id.
    ids: FxHashMap<Id, Seqs>,
    tokens: FxHashMap<Id, u64>,
    /// Open requests that are not held and yet end with time.
    bounded: BTreeSet<u64>,
    kept_bytes: usize,
    held: BTreeMap<u64, Held>,
    held_bytes: usize,
    asked: HashMap<Id, Asked>,
    batches: HashMap<u64, Batch>,

    shown: BTreeMap<Kind, Shown>,
    announced: BTreeSet<Family>,
    /// The names that the child's own tools take.
    child_tools: HashSet<String>,

    restart: Option<Restart>,
    last_reload: Option<LastReload>,
    queued: Option<Queued>,
    /// Which changed files cause a reload.
    habits: Habits,
    /// The newest restart marker, if it could not be written: what it would say is reported from here.
    unwritten_marker: Option<UnwrittenMarker>,
    pace: Pace,
    dropped: Dropped,
    oddities: VecDeque<String>,
    ended: bool,
}

impl Relay {
    pub fn new(settings: Settings) -> Relay {
        let restarts = Restarts::new(settings.policy.clone(), settings.seed);
        Relay {
            settings,
            restarts,
            out: Vec::new(),
            next_private: 1,
            next_seq: 1,
            client: Client::Unopened,
            unheard: false,
            opening: None,
            initialized: None,
            level: None,
            subscriptions: BTreeMap::new(),
            meta: String::new(),
            probe_only: false,
            probe: Probe::Harmless,
            modern_served: false,
            discovered: None,
            discovered_told: None,
            broken: false,
            early: answer_early::AnswerEarly::default(),
            memory: cache::Memory::default(),
            heartbeats: heartbeat::Heartbeats::default(),
            own_restart: None,
            hang: hang::Hang::default(),
            memory_replaced: None,
            ever_ready: false,
            ends_before_ready: 0,
            current: Current::None,
            candidate: None,
            draining: Vec::new(),
            children: BTreeMap::new(),
            starting: Some(Role::Current),
            start_after: None,
            building: false,
            last_end: None,
            last_generation: None,
            replaced: 0,
            opens: BTreeMap::new(),
            ids: FxHashMap::default(),
            tokens: FxHashMap::default(),
            bounded: BTreeSet::new(),
            kept_bytes: 0,
            held: BTreeMap::new(),
            held_bytes: 0,
            asked: HashMap::new(),
            batches: HashMap::new(),
            shown: BTreeMap::new(),
            announced: BTreeSet::new(),
            child_tools: HashSet::new(),
            restart: None,
            last_reload: None,
            queued: None,
            habits: Habits::default(),
            unwritten_marker: None,
            pace: Pace::default(),
            dropped: Dropped::default(),
            oddities: VecDeque::new(),
            ended: false,
        }
    }

    /// Takes what happened, adds what is to be done. The driver has asked for the first child already.
    pub fn handle(&mut self, event: Event, now: Instant, actions: &mut Vec<Action>) {
        mem::swap(&mut self.out, actions);
        match event {
            Event::ClientSaid(line) => self.client_said(line, None, now),
            Event::ClientSaidTooMuch(start) => self.client_said_too_much(&start),
            Event::ClientEnded(farewell) => self.client_ended(farewell, now),
            Event::ServerStarted { generation, pid, unix } => self.server_started(generation, pid, unix, now),
            Event::StartFailed(why) => self.start_failed(why, now),
            Event::ServerSaid(generation, line) => self.server_said(generation, line, now),
            Event::ServerLogged(generation, line) => {
                if let Some(child) = self.children.get_mut(&generation) {
                    child.stderr.push(line, self.settings.limits.stderr_max);
                }
            }
            Event::ServerWentDown { generation, how, unsent } => self.server_went_down(generation, how, unsent, now),
            Event::ServerQueue { generation, bytes } => self.queue_changed(generation, bytes, now),
            Event::TakenBack { generation, unsent } => self.taken_back(generation, unsent, now),
            Event::CacheRead { revision, entry } => self.cache_read(&revision, entry.as_deref()),
            Event::RestartAsked { ticket, origin, reason, at_once } => {
                self.restart_asked(Ticket::Outside(ticket), origin, reason, at_once, now);
            }
            Event::ServerMeasured { generation, bytes } => self.server_measured(generation, bytes, now),
            Event::FilesChanged { changed, prints } => self.files_changed(changed, &prints, now),
            Event::Forgiven => self.restarts.resumed(),
            Event::BuildEnded(result) => self.build_ended(result, now),
            Event::MarkerWritten(result) => self.marker_written(result, now),
            Event::MarkerRead { key, reading, unix } => self.marker_read(key, reading, unix, now),
            Event::TimePassed => self.time_passed(now),
        }
        self.last_generation = self.current_generation().or(self.last_generation);
        self.memory_settles(now);
        mem::swap(&mut self.out, actions);
    }

    /// When the machine next wants to hear that time passed.
    pub fn deadline(&self) -> Option<Instant> {
        let mut soonest: Option<Instant> = None;
        let mut consider = |at: Option<Instant>| {
            if let Some(at) = at {
                soonest = Some(soonest.map_or(at, |soonest| soonest.min(at)));
            }
        };
        if self.wants_start()
            && let Current::Down { at } = self.current
        {
            consider(Some(at));
        }
        if !self.is_leaving() {
            consider(self.waits_for_room());
            consider(self.habits.deadline());
        }
        consider(self.backlog_deadline());
        consider(self.early_deadline());
        consider(self.memory_deadline());
        consider(self.heartbeat_deadline());
        if !self.is_leaving() {
            consider(self.own_restart_deadline());
            consider(self.hang_deadline());
        }
        for open in self.timed() {
            consider(open.deadline);
            consider(self.hold_ends(open));
        }
        for child in self.children.values() {
            if !child.stopping {
                consider(child.handshake_by);
                child.fetches.values().for_each(|fetch| consider(Some(fetch.by)));
            }
        }
        self.draining.iter().for_each(|draining| {
            if !self.is_stopping(draining.generation) {
                consider(Some(draining.until));
            }
        });
        soonest
    }

    fn time_passed(&mut self, now: Instant) {
        if self.wants_start()
            && let Current::Down { at } = self.current
            && at <= now
        {
            self.start(Role::Current);
        }
        let late: Vec<u32> = self
            .children
            .iter()
            .filter(|(_, child)| !child.stopping && child.handshake_by.is_some_and(|by| by <= now))
            .map(|(generation, _)| *generation)
            .collect();
        for generation in late {
            self.handshake_late(generation, now);
        }
        let over: Vec<u32> = self
            .draining
            .iter()
            .filter(|draining| draining.until <= now && !self.is_stopping(draining.generation))
            .map(|draining| draining.generation)
            .collect();
        for generation in over {
            self.drain_over(generation, ends::DRAIN_OVER, now);
            self.begin_queued(now);
        }
        let seqs: Vec<u64> = self
            .timed()
            .filter(|open| {
                open.deadline.is_some_and(|by| by <= now) || self.hold_ends(open).is_some_and(|by| by <= now)
            })
            .map(|open| open.seq)
            .collect();
        for seq in seqs {
            self.waited_out(seq, now);
        }
        self.fetches_late(now);
        if !self.is_leaving() {
            self.muted_files_due(now);
        }
        self.backlogs_time_passed(now);
        self.early_time_passed(now);
        self.memory_time_passed(now);
        self.heartbeats_time_passed(now);
        if !self.is_leaving() {
            self.own_restart_time_passed(now);
            self.hang_time_passed(now);
        }
        self.begin_queued(now);
    }

    /// A start at `Down { at }` is ours to make: nothing else is about to put a child in place.
    fn wants_start(&self) -> bool {
        self.starting.is_none()
            && self.start_after.is_none()
            && self.candidate.is_none()
            && !self.is_leaving()
            && !self.restart_will_start()
    }

    fn restart_will_start(&self) -> bool {
        self.restart.as_ref().is_some_and(Restart::will_start)
    }

    /// The open requests that time can end: those that wait, and those with a deadline of their own.
    fn timed(&self) -> impl Iterator<Item = &Open> {
        let waiting = self.held.iter().filter(|(_, held)| held.is_request).map(|(seq, _)| seq);
        waiting.chain(&self.bounded).filter_map(|seq| self.opens.get(seq).map(|open| &**open))
    }

    /// When a waiting request has waited long enough.
    fn hold_ends(&self, open: &Open) -> Option<Instant> {
        match open.place {
            // An opening is waited for while a child is alive but slow, as without us; `Down` decides at once.
            Place::Held if self.is_first_opening(open) => None,
            Place::Held | Place::Due => Some(open.waiting_since? + self.settings.limits.hold_max),
            _ => None,
        }
    }

    pub fn is_over(&self) -> bool {
        self.ended
    }

    /// No child is started any more.
    fn is_leaving(&self) -> bool {
        self.client == Client::Gone
    }

    fn is_modern(&self) -> bool {
        self.client == Client::Modern || (self.client == Client::Gone && !self.meta.is_empty())
    }

    fn is_stopping(&self, generation: u32) -> bool {
        self.children.get(&generation).is_none_or(|child| child.stopping)
    }

    /// The generation that takes the client's messages now.
    fn live(&self) -> Option<u32> {
        match self.current {
            Current::Fresh(n) | Current::Serving(n) => Some(n),
            _ => None,
        }
    }

    fn current_generation(&self) -> Option<u32> {
        match self.current {
            Current::Fresh(n) | Current::Serving(n) | Current::Replaying(n) => Some(n),
            _ => None,
        }
    }

    fn act(&mut self, action: Action) {
        self.out.push(action);
    }

    fn tell_client(&mut self, line: Bytes) {
        if !self.unheard {
            self.out.push(Action::TellClient(line));
        }
    }

    fn tell_server(&mut self, generation: u32, line: Bytes, mark: Option<u64>) {
        self.out.push(Action::TellServer { generation, line, mark });
    }

    fn record(&mut self, record: Record) {
        self.out.push(Action::Record(record));
    }

    /// The server did what the protocol does not allow: worth a line in the log and in `server_status`.
    fn odd(&mut self, text: String) {
        self.note_as(record::Event::ProtocolNoted, text);
    }

    /// Something that the user may want to act on, and nobody's fault.
    fn note(&mut self, text: String) {
        self.note_as(record::Event::ConversationNoted, text);
    }

    fn note_as(&mut self, event: record::Event, text: String) {
        if self.remember(&text) {
            self.record(Record { detail: Some(text), ..Record::new(event) });
        }
    }

    /// For `noted` in `server_status`. False if it is what was noted last.
    fn remember(&mut self, text: &str) -> bool {
        const ODDITIES_MAX: usize = 10;
        if self.oddities.back().is_some_and(|last| last == text) {
            return false;
        }
        self.oddities.push_back(text.to_owned());
        if self.oddities.len() > ODDITIES_MAX {
            self.oddities.pop_front();
        }
        true
    }

    /// A child that is on its way already is the one.
    fn start(&mut self, role: Role) {
        if self.starting.replace(role).is_none() {
            self.act(Action::Start);
        }
    }

    fn stop(&mut self, generation: u32, how: How) {
        if let Some(child) = self.children.get_mut(&generation)
            && !mem::replace(&mut child.stopping, true)
        {
            if !self.is_leaving() {
                self.lose_listens(generation);
                self.cancel_asked(generation);
            }
            self.act(Action::Stop { generation, how });
        }
    }

    /// An id that nobody else can use.
    fn private_id(&mut self) -> Id {
        let id = Id::text(&format!("outlast-{}-{}", self.settings.random, self.next_private));
        self.next_private += 1;
        id
    }

    fn seq(&mut self) -> u64 {
        self.next_seq += 1;
        self.next_seq - 1
    }

    // ---- the table of open requests -----------------------------------------------------------

    fn insert(&mut self, open: Box<Open>) {
        match self.ids.entry(open.id.clone()) {
            Entry::Vacant(entry) => drop(entry.insert(Seqs { oldest: open.seq, later: Vec::new() })),
            Entry::Occupied(mut entry) => entry.get_mut().later.push(open.seq),
        }
        if let Some(token) = &open.token {
            self.tokens.insert(token.clone(), open.seq);
        }
        self.kept_bytes += open.kept.as_ref().map_or(0, Bytes::len);
        self.opens.insert(open.seq, open);
    }

    /// Takes a request out of every table; whoever calls this answers it, or knows why not.
    fn close(&mut self, seq: u64) -> Box<Open> {
        let open = self.opens.remove(&seq).expect("only open requests are closed");
        if let Entry::Occupied(mut entry) = self.ids.entry(open.id.clone())
            && !entry.get_mut().remove(seq)
        {
            entry.remove();
        }
        if let Some(token) = &open.token
            && self.tokens.get(token) == Some(&seq)
        {
            self.tokens.remove(token);
        }
        self.kept_bytes -= open.kept.as_ref().map_or(0, Bytes::len);
        self.bounded.remove(&seq);
        self.call_timeout_ends(seq);
        if let Some(held) = self.held.remove(&seq) {
            self.held_bytes -= held.line.len();
        }
        open
    }

    /// The oldest open request of that id for which something holds.
    fn oldest(&self, id: &Id, holds: impl Fn(&Open) -> bool) -> Option<u64> {
        self.ids.get(id)?.iter().find(|seq| holds(&self.opens[seq]))
    }

    /// Open requests on a generation, in client order.
    fn open_on(&self, generation: u32) -> Vec<u64> {
        self.opens.values().filter(|open| open.place == Place::On(generation)).map(|open| open.seq).collect()
    }

    fn has_open_calls_on(&self, generation: u32) -> bool {
        self.opens.values().any(|open| open.place == Place::On(generation) && open.class != Class::Listen)
    }

    /// The one answer of a closed request.
    fn answer(&mut self, open: &Open, line: Bytes) {
        self.heartbeat_ends(open.seq);
        match open.batch {
            None => self.tell_client(line),
            Some(batch) => {
                if let (Class::List(kind), Some(batch)) = (&open.class, self.batches.get_mut(&batch)) {
                    batch.lists.insert(kind.family());
                }
                self.batch_answered(batch, Some(line));
            }
        }
    }

    fn answer_result(&mut self, open: &Open, result: &str) {
        self.answer(open, message::result_line(&open.id, result));
    }

    /// A closed request that is owed nothing.
    fn forget(&mut self, open: &Open) {
        self.heartbeat_ends(open.seq);
        if let Some(batch) = open.batch {
            self.batch_answered(batch, None);
        }
    }

    fn batch_answered(&mut self, key: u64, line: Option<Bytes>) {
        let Some(batch) = self.batches.get_mut(&key) else { return };
        batch.answers.extend(line);
        batch.left -= 1;
        if batch.left == 0 {
            let batch = self.batches.remove(&key).expect("found above");
            if !batch.answers.is_empty() {
                let parts: Vec<&[u8]> = batch.answers.iter().map(|line| line.trim_ascii_end()).collect();
                let array = [b"[" as &[u8], &parts.join(&b","[..]), b"]\n"].concat();
                self.tell_client(array.into());
            }
            for family in batch.outdated {
                self.announced.remove(&family);
                if matches!(self.current, Current::Serving(_)) {
                    self.announce(family);
                }
                // The next child's list is compared with none that could be vouched for.
                let shown = self.shown.iter_mut().filter(|(kind, _)| kind.family() == family);
                shown.for_each(|(_, shown)| shown.doubtful = true);
            }
        }
    }

    fn fail(&mut self, open: &Open, failure: &Failure) {
        if open.class == Class::Initialize {
            self.opening_failed();
        }
        let modern = self.is_modern();
        let line = match open.class {
            Class::Call { task, .. } if !task || modern => {
                message::result_line(&open.id, &failure.as_tool_result(modern))
            }
            _ => {
                let data = failure.data().to_string();
                message::error_line(&open.id.to_string(), failure.code, &failure.as_one_line(), Some(&data))
            }
        };
        self.answer(open, line);
    }

    /// Whether a request may be asked twice.
    fn may_repeat(&self, open: &Open) -> bool {
        match &open.class {
            Class::Initialize | Class::Discover | Class::List(_) | Class::Page(..) => true,
            Class::Read { once } | Class::Complete { once } => !once,
            Class::SetLevel | Class::Subscribe(_) | Class::Unsubscribe(_) | Class::Listen => true,
            Class::Call { repeatable, .. } => {
                *repeatable && self.settings.retry == Retry::Annotated && self.is_annotated(&open.what)
            }
            Class::Ping | Class::Other => false,
        }
    }

    fn is_annotated(&self, tool: &str) -> bool {
        let definition = self.shown.get(&Kind::Tools).and_then(|shown| shown.items.get(tool));
        definition.and_then(|raw| serde_json::from_str::<Value>(raw).ok()).is_some_and(|tool| {
            let annotations = &tool["annotations"];
            annotations["readOnlyHint"] == true || annotations["idempotentHint"] == true
        })
    }

    /// Sends a request to a child that listens, and notes it in the table.
    fn forward(&mut self, mut open: Box<Open>, line: Bytes, generation: u32, now: Instant) {
        let room = self.settings.limits.held_bytes_max.saturating_sub(self.kept_bytes);
        // A listen stays open for as long as the client wants it, so it is always kept.
        let fits = line.len() <= room || open.class == Class::Listen;
        if open.kept.is_none() && fits && self.may_repeat(&open) {
            // A copy: a slice would keep the whole read buffer alive.
            open.kept = Some(Bytes::copy_from_slice(&line));
        }
        open.place = Place::On(generation);
        open.asked.get_or_insert(now);
        if matches!(open.class, Class::Initialize | Class::Discover)
            && self.current == Current::Fresh(generation)
            && let Some(child) = self.children.get_mut(&generation)
        {
            child.handshake_max = self.settings.limits.first_handshake_max;
            child.handshake_by = Some(now + child.handshake_max);
        }
        if open.class == Class::Discover {
            self.probe = Probe::Unanswered;
        }
        let seq = open.seq;
        match open.class {
            Class::Call { .. } => {
                if self.calls_own_restart(&open) {
                    self.own_restart_called(generation, &line, now);
                }
                let is_timed = self.settings.call_timeout.is_some() || !self.settings.call_timeouts.is_empty();
                self.insert(open);
                if is_timed {
                    self.call_timeout_begins(seq, now);
                }
            }
            _ => {
                if hang::needs_no_work(&open.class) {
                    self.quiet_begins(generation, now);
                }
                self.insert(open);
            }
        }
        self.tell_server(generation, line, Some(seq));
    }

    fn client_said_too_much(&mut self, start: &[u8]) {
        let id = message::id_at_start(start).map_or_else(|| "null".into(), |id| id.to_string());
        self.tell_client(message::error_line(&id, -32600, "the line is longer than 64 MiB and was not sent on", None));
    }

    /// Outlast is leaving, and asks a server nothing any more.
    fn client_said_too_late(&mut self, line: &Bytes, batch: Option<u64>, now: Instant) {
        match message::parse(line) {
            Ok(Message::Request { id, method, params }) => {
                if let Some(id) = id.parse() {
                    let open = self.open(id, &method, &params, batch);
                    let failure = self.failure(7006, "stopping", &open, now);
                    self.fail(&open, &failure);
                }
            }
            Ok(Message::Batch(members)) if batch.is_none() => self.client_batched(&members, line, now),
            Ok(Message::Notification { method, params }) if method == "notifications/cancelled" => {
                self.client_cancelled(&params, line, now);
            }
            Ok(Message::Response { id, .. }) => self.client_answered(id, line),
            _ => self.dropped.from_client += 1,
        }
    }

    fn client_said(&mut self, line: Bytes, batch: Option<u64>, now: Instant) {
        if self.is_leaving() {
            return self.client_said_too_late(&line, batch, now);
        }
        let parsed = match message::parse(&line) {
            Ok(parsed) => parsed,
            Err(unreadable) => {
                self.dropped.from_client += 1;
                return self.tell_client(unreadable.refusal());
            }
        };
        match parsed {
            Message::Request { id, method, params } => {
                let id = id.parse();
                self.client_asked(id, &method, &params, &line, batch, now);
            }
            Message::Notification { method, params } => self.client_noted(&method, &params, &line, None, now),
            Message::Response { id, .. } => self.client_answered(id, &line),
            // A batch within a batch is none.
            Message::Batch(_) if batch.is_some() => self.dropped.from_client += 1,
            Message::Batch(members) => self.client_batched(&members, &line, now),
            Message::Other => match self.live() {
                Some(generation) => self.tell_server(generation, line, None),
                None => self.dropped.from_client += 1,
            },
        }
    }
}
