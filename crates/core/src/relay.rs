//! One client's MCP conversation, across many server processes and both eras.
//!
//! The client side is decided by what the client says, never by asking a child. The server side has three parts:
//! the *current* child that serves or is meant to, at most one *candidate* that a reload brings up beside it, and a
//! few *draining* ones that only finish what they were asked. Every child is known by its generation; what a
//! generation says reaches the client only from the moment it serves until it is retired.

use std::{mem, time::Instant};

use bytes::Bytes;

use crate::{
    debounce::Habits,
    exit::How,
    message::Id,
    pace::Pace,
    record::{self, Record},
};

mod answer_early;
mod answers;
mod backlog;
mod cache;
mod client;
mod compare;
mod conversation;
mod draining;
mod endpoint;
mod ends;
mod events;
mod failures;
mod handshake;
mod hang;
mod heartbeat;
mod leaving;
mod listens;
mod lists;
mod memory;
mod messages;
mod notes;
mod opening;
mod own_restart;
mod placement;
mod requests;
mod restart;
mod saved;
mod server;
mod server_requests;
mod servers;
mod settings;
mod status;
mod tail;
mod timers;
mod tools;
mod watched;

use conversation::Conversation;
pub use events::{Action, ClientEnd, Event, NotWritten, Origin, Reading};
use lists::Lists;
pub use notes::Dropped;
use notes::Notes;
use requests::Requests;
use restart::{Reloads, Ticket};
pub use saved::{Busy, Saved};
use server_requests::ServerRequests;
use servers::{Purpose, Servers};
pub use settings::{Limits, OnCleanExit, Reload, Retry, Settings};
pub use status::{State, Status};

#[derive(Debug)]
pub struct Relay {
    settings: Settings,
    out: Vec<Action>,
    next_private: u64,

    conversation: Conversation,
    /// The client's side does not read any more: nothing is written to it.
    is_unheard: bool,
    early: answer_early::AnswerEarly,
    memory: cache::Memory,
    heartbeats: heartbeat::Heartbeats,
    own_restart: Option<own_restart::OwnRestart>,
    hang: hang::Hang,
    memory_limit: memory::MemoryLimit,
    servers: Servers,
    requests: Requests,
    server_requests: ServerRequests,
    lists: Lists,
    reloads: Reloads,
    /// Which changed files cause a reload.
    habits: Habits,
    pace: Pace,
    dropped: Dropped,
    notes: Notes,
    ended: bool,
}

impl Relay {
    pub fn new(settings: Settings) -> Relay {
        let servers = Servers::new(settings.policy.clone(), settings.seed);
        Relay {
            settings,
            out: Vec::new(),
            next_private: 1,
            conversation: Conversation::default(),
            is_unheard: false,
            early: answer_early::AnswerEarly::default(),
            memory: cache::Memory::default(),
            heartbeats: heartbeat::Heartbeats::default(),
            own_restart: None,
            hang: hang::Hang::default(),
            memory_limit: memory::MemoryLimit::default(),
            servers,
            requests: Requests::default(),
            server_requests: ServerRequests::default(),
            lists: Lists::default(),
            reloads: Reloads::default(),
            habits: Habits::default(),
            pace: Pace::default(),
            dropped: Dropped::default(),
            notes: Notes::default(),
            ended: false,
        }
    }

    /// Takes what happened, adds what is to be done. The driver has asked for the first child already.
    pub fn handle(&mut self, event: Event, now: Instant, actions: &mut Vec<Action>) {
        mem::swap(&mut self.out, actions);
        match event {
            Event::ClientSaid(line) => self.client_said(line, None, now),
            Event::ClientSaidTooMuch(start) => self.client_said_too_much(&start),
            Event::ClientEnded(end) => self.client_ended(end, now),
            Event::ServerStarted { generation, pid, unix } => self.server_started(generation, pid, unix, now),
            Event::StartFailed(why) => self.start_failed(why, now),
            Event::ServerSaid(generation, line) => self.server_said(generation, line, now),
            Event::ServerLogged(generation, line) => {
                if let Some(child) = self.servers.get_mut(generation) {
                    child.stderr.push(line, self.settings.limits.messages.stderr_max);
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
            Event::Forgiven => self.servers.slot.forgive(),
            Event::BuildEnded(result) => self.build_ended(result, now),
            Event::MarkerWritten(result) => self.marker_written(result, now),
            Event::MarkerRead { key, reading, unix } => self.marker_read(key, reading, unix, now),
            Event::TimePassed => self.time_passed(now),
        }
        self.settle(now);
        mem::swap(&mut self.out, actions);
    }

    /// What follows from any event, once: a restart that waited may begin, outlast may end, the cache may have changed.
    fn settle(&mut self, now: Instant) {
        self.begin_queued(now);
        self.end_if_alone(now);
        self.memory_settles(now);
    }

    /// A start at `Down { at }` is ours to make: nothing else is about to put a child in place.
    fn wants_start(&self) -> bool {
        self.servers.may_start() && !self.is_leaving() && !self.restart_will_start()
    }

    fn restart_will_start(&self) -> bool {
        self.reloads.will_start()
    }

    pub fn is_over(&self) -> bool {
        self.ended
    }

    /// No child is started any more.
    fn is_leaving(&self) -> bool {
        self.conversation.is_over()
    }

    fn is_modern(&self) -> bool {
        self.conversation.is_stateless()
    }

    fn act(&mut self, action: Action) {
        self.out.push(action);
    }

    fn tell_client(&mut self, line: Bytes) {
        if !self.is_unheard {
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

    /// Something that the user may want to act on, and no fault of the server.
    fn note(&mut self, text: String) {
        self.note_as(record::Event::ConversationNoted, text);
    }

    fn note_as(&mut self, event: record::Event, text: String) {
        if self.notes.push(&text) {
            self.record(Record { detail: Some(text), ..Record::new(event) });
        }
    }

    fn start(&mut self, purpose: Purpose) {
        if self.servers.start(purpose) {
            self.act(Action::Start);
        }
    }

    fn stop(&mut self, generation: u32, how: How) {
        if self.servers.stop(generation) {
            if !self.is_leaving() {
                self.lose_listens(generation);
                self.cancel_asked(generation);
            }
            self.act(Action::Stop { generation, how });
        }
    }

    /// An id that neither the client nor a server uses.
    fn private_id(&mut self) -> Id {
        let id = Id::text(&format!("outlast-{}-{}", self.settings.random, self.next_private));
        self.next_private += 1;
        id
    }
}
