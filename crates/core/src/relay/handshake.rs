//! The handshake that each new child gets: the client's own opening, or a private one that repeats it. When a handshake
//! is accepted is decided in `conversation`.

use std::{
    mem,
    time::{Duration, Instant},
};

use bytes::Bytes;

use super::{
    Relay,
    conversation::{Accepted, error_message, with_id},
    endpoint::{Endpoint, Granted, Private},
    events::Action,
    requests::Waits,
    servers::{Current, Purpose},
};
use crate::{capabilities::Capabilities, exit::How, mcp::Family, message::Raw};

impl Relay {
    pub(super) fn server_started(&mut self, generation: u32, pid: u32, unix: f64, now: Instant) {
        // With a build it is the build that loads the files.
        if self.settings.build {
            self.habits.disturbed(now);
        } else {
            self.habits.loaded(now);
        }
        let child = Endpoint::new(pid, unix, self.settings.limits.handshake.handshake_max, now);
        let (record, purpose) = self.servers.child_started(generation, child, self.is_leaving(), now);
        self.record(record);
        match purpose {
            None => return self.stop(generation, How::Stopped),
            Some(Purpose::Candidate) => {
                self.restart_has_child(generation);
                return self.replay(generation, self.settings.limits.handshake.handshake_max, now);
            }
            Some(Purpose::Current) => {}
        }
        if self.conversation.is_replayed(self.is_from_cache()) {
            self.servers.slot.withhold(generation);
            self.restart_has_child(generation);
            self.replay(generation, self.settings.limits.handshake.handshake_max, now);
        } else {
            self.servers.slot.open(generation);
            self.reopen_listens(generation);
            self.release(generation, now);
            self.restart_has_child(generation);
            if !self.is_being_opened(generation) {
                // It is as good as it gets until the client opens the conversation.
                self.restart_is_done_if(generation, now);
            }
        }
    }

    /// Our private handshake.
    pub(super) fn replay(&mut self, generation: u32, max: Duration, now: Instant) {
        let id = self.private_id();
        let line = self.conversation.replay(&id);
        let child = self.servers.get_mut(generation).expect("just started");
        child.begin_handshake(max, now);
        child.private.insert(id, Private::Handshake);
        self.tell_server(generation, line, None);
    }

    pub(super) fn private_answered(
        &mut self,
        generation: u32,
        private: Private,
        result: Option<Raw<'_>>,
        error: Option<Raw<'_>>,
        now: Instant,
    ) {
        match private {
            Private::Handshake => {
                let checked = self.conversation.check_replay(result, error);
                match checked {
                    Ok(Accepted { capabilities, note }) => {
                        note.into_iter().for_each(|note| self.note(note));
                        result.into_iter().for_each(|result| self.remember_opening(result));
                        self.handshake_done(generation, capabilities, now);
                    }
                    Err(why) => self.handshake_refused(generation, How::HandshakeRefused(why), now),
                }
            }
            Private::Restore(what) => {
                if let Some(error) = error {
                    self.odd(format!(
                        "The new server refused to restore {}: {}",
                        what.in_words(),
                        error_message(error)
                    ));
                }
            }
            Private::Fetch(list) => self.fetched(generation, list, result, now),
            Private::Answered | Private::LateFetch => {}
            Private::RestartPing => self.own_restart_pinged_back(generation),
            Private::HangPing => self.suspicion_ends(generation, now),
        }
    }

    pub(super) fn handshake_done(&mut self, generation: u32, capabilities: Capabilities, now: Instant) {
        let child = self.servers.get_mut(generation).expect("it just spoke");
        child.capabilities = Some(capabilities);
        child.handshake_by = None;
        if !self.is_modern() {
            if let Some((_, initialized)) = self.conversation.initialized().cloned()
                && let Some(child) = self.servers.get_mut(generation)
                && !mem::replace(&mut child.initialized, true)
            {
                self.tell_server(generation, initialized, None);
            }
            for (line, what) in self.conversation.granted(capabilities) {
                self.set_again(generation, &line, what);
            }
            self.note_capabilities(capabilities);
        }
        if let Some(old) = self.servers.serve(generation, now) {
            self.leave_listens(old);
            self.drain(old, now);
        }
        self.conversation.served(false);
        self.ready(generation, now);
        self.early_requests(generation, now);
        self.reopen_listens(generation);
        self.served(generation);
        self.release(generation, now);
        self.compare(generation, now);
        if self.servers.get(generation).is_some_and(|child| !child.private.is_empty()) {
            self.quiet_begins(generation, now);
        }
        self.restart_is_ready(generation, now);
    }

    /// A client cannot be told of new capabilities once it is open; people and agents can.
    pub(super) fn note_capabilities(&mut self, has: Capabilities) {
        let told = self.conversation.told();
        for family in [Family::Prompts, Family::Resources] {
            if has.has(family) && !told.has(family) {
                let name = family.name();
                self.note(format!(
                    "The new server has {name}, which the client does not know of: reconnect the client to see them"
                ));
            }
        }
    }

    pub(super) fn set_again(&mut self, generation: u32, line: &Bytes, what: Granted) {
        let id = self.private_id();
        let line = with_id(line, &id);
        self.servers.get_mut(generation).expect("ready").private.insert(id, Private::Restore(what));
        self.tell_server(generation, line, None);
    }

    pub(super) fn ready(&mut self, generation: u32, now: Instant) {
        self.habits.disturbed(now);
        self.handshake_is_over(generation);
        self.act(Action::MarkReady(generation));
    }

    /// A child serves again: a call that made the last one exit for this is answered.
    pub(super) fn served(&mut self, generation: u32) {
        let is_due = |seq: &u64| self.requests[*seq].waits == Waits::Replacement;
        let due: Vec<u64> = self.requests.deadlines().map(|(seq, _)| seq).filter(is_due).collect();
        for seq in due {
            self.due_is_back(seq, generation);
        }
    }

    pub(super) fn handshake_late(&mut self, generation: u32, now: Instant) {
        let Some(limit) = self.servers.get(generation).map(|child| child.handshake_max) else { return };
        self.handshake_failed(generation, How::HandshakeLate(limit), now);
    }

    pub(super) fn handshake_refused(&mut self, generation: u32, how: How, now: Instant) {
        if !self.servers.was_ever_ready() {
            self.refused_after_cache();
        }
        self.handshake_failed(generation, how, now);
    }

    /// It is stopped, and its end decides what comes next; a candidate's failure is known at once.
    pub(super) fn handshake_failed(&mut self, generation: u32, how: How, now: Instant) {
        self.stop(generation, how.clone());
        if *self.servers.slot.current() == Current::Fresh(generation) {
            // What comes now would be lost on it.
            self.servers.slot.withhold(generation);
        }
        if self.servers.slot.candidate() == Some(generation) {
            self.servers.slot.take_candidate();
            self.restart_failed(&how, Some(generation), now);
        }
    }
}
