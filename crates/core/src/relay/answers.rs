//! The one answer that each request of the client gets, and the way of a request to a child.

use std::time::Instant;

use bytes::Bytes;

use super::{
    Relay,
    messages::Failure,
    requests::{Class, OpenRequest, Waits},
    servers::Current,
    settings::Retry,
};
use crate::message;

impl Relay {
    /// Takes a request out of every table. The caller answers it, or knows why it gets no answer.
    pub(super) fn close(&mut self, seq: u64) -> Box<OpenRequest> {
        self.call_timeout_ends(seq);
        self.requests.close(seq)
    }

    /// The one answer of a closed request.
    pub(super) fn answer(&mut self, open: &OpenRequest, line: Bytes) {
        self.heartbeat_ends(open.seq());
        match open.batch() {
            None => self.tell_client(line),
            Some(batch) => {
                if let Class::List(list) = &open.class {
                    self.requests.batch_lists(batch, list.family());
                }
                self.batch_answered(batch, Some(line));
            }
        }
    }

    pub(super) fn answer_result(&mut self, open: &OpenRequest, result: &str) {
        self.answer(open, message::result_line(open.id(), result));
    }

    /// A closed request that gets no answer.
    pub(super) fn forget(&mut self, open: &OpenRequest) {
        self.heartbeat_ends(open.seq());
        if let Some(batch) = open.batch() {
            self.batch_answered(batch, None);
        }
    }

    pub(super) fn batch_answered(&mut self, key: u64, line: Option<Bytes>) {
        let Some(batch) = self.requests.batch_answered(key, line) else { return };
        batch.line.into_iter().for_each(|line| self.tell_client(line));
        for family in batch.outdated {
            self.lists.listed(family);
            if self.servers.slot.serving().is_some() {
                self.announce(family);
            }
            self.lists.doubt(family);
        }
    }

    pub(super) fn fail(&mut self, open: &OpenRequest, failure: &Failure) {
        if open.class == Class::Initialize {
            self.opening_failed();
        }
        let modern = self.is_modern();
        let line = match open.class {
            Class::Call { task, .. } if !task || modern => {
                message::result_line(open.id(), &failure.as_tool_result(modern))
            }
            _ => {
                let data = failure.data().to_string();
                message::error_line(&open.id().to_string(), failure.code, &failure.as_one_line(), Some(&data))
            }
        };
        self.answer(open, line);
    }

    /// Whether a request may be asked twice.
    pub(super) fn may_repeat(&self, open: &OpenRequest) -> bool {
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

    pub(super) fn is_annotated(&self, tool: &str) -> bool {
        self.lists.tool(tool).is_some_and(|tool| {
            let annotations = &tool["annotations"];
            annotations["readOnlyHint"] == true || annotations["idempotentHint"] == true
        })
    }

    /// Sends a request to a child that listens, and notes it in the table.
    pub(super) fn forward(&mut self, mut open: Box<OpenRequest>, line: Bytes, generation: u32, now: Instant) {
        let room = self.requests.room_to_keep(&self.settings.limits.holding);
        // A listen stays open for as long as the client wants it, so it is always kept.
        let fits = line.len() <= room || open.class == Class::Listen;
        if open.kept().is_none() && fits && self.may_repeat(&open) {
            open.keep(&line);
        }
        open.waits = Waits::OnServer(generation);
        open.asked.get_or_insert(now);
        if open.is_opening()
            && *self.servers.slot.current() == Current::Fresh(generation)
            && let Some(child) = self.servers.get_mut(generation)
        {
            child.begin_handshake(self.settings.limits.handshake.first_handshake_max, now);
        }
        if open.class == Class::Discover {
            self.conversation.probe_sent();
        }
        let seq = open.seq();
        match open.class {
            Class::Call { .. } => {
                if self.calls_own_restart(&open) {
                    self.own_restart_called(generation, &line, now);
                }
                let is_timed = self.settings.call_timeout.is_some() || !self.settings.call_timeouts.is_empty();
                self.requests.insert(open);
                if is_timed {
                    self.call_timeout_begins(seq, now);
                }
            }
            _ => {
                if open.class.needs_no_work() {
                    self.quiet_begins(generation, now);
                }
                self.requests.insert(open);
            }
        }
        self.tell_server(generation, line, Some(seq));
    }
}
