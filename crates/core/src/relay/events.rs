//! What the driver tells the relay, and what the relay asks the driver to do.

use bytes::Bytes;
use serde_json::Value;

use crate::{
    debounce::{Changed, Print},
    exit::How,
    record::Record,
};

/// What happened. Lines end with their newline.
#[derive(Debug)]
pub enum Event {
    ClientSaid(Bytes),
    /// A line over the limit was skipped; this is how it began.
    ClientSaidTooMuch(Bytes),
    ClientEnded(ClientEnd),
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
    /// An operator resets the crash count.
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
pub enum ClientEnd {
    /// End of file, or a signal to us: answers still due are worth sending.
    Closed,
    /// The client's side does not read any more.
    Broken,
}

/// The origin of a restart request.
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
    pub(super) fn as_str(self) -> &'static str {
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
    pub(super) fn is_request(self) -> bool {
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
    /// Close a child's stdin at once, whatever waits for it: a server that is blocked in reading it continues.
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
    /// Stop a child: close its stdin, then SIGTERM, then SIGKILL. `how` is the recorded cause of its end.
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
    /// The end of a restart that was requested through the control socket.
    Answer {
        ticket: u64,
        result: Result<Value, Value>,
    },
    End(u8),
}
