//! The end of the conversation: the client is gone, or the server left on purpose and outlast leaves with it. Children are
//! stopped here; how long that takes is decided in `life`.

use std::time::Instant;

use super::{
    Relay,
    events::{Action, ClientEnd},
    failures::FailureKind,
    requests::{Class, Waits},
};
use crate::exit::How;

impl Relay {
    pub(super) fn client_ended(&mut self, end: ClientEnd, now: Instant) {
        self.is_unheard |= end == ClientEnd::Broken;
        self.leave(now);
    }

    /// The client is gone, or the server left on purpose and outlast goes with it.
    pub(super) fn leave(&mut self, now: Instant) {
        if self.is_leaving() {
            return;
        }
        self.save_memory();
        self.conversation.end();
        let waiting: Vec<u64> = self
            .requests
            .iter()
            .filter(|open| !matches!(open.waits, Waits::OnServer(_)))
            .map(|open| open.seq())
            .collect();
        waiting.into_iter().for_each(|seq| self.end_request(seq, now));
        self.requests.take_all_held();
        self.abandon_restart();
        if self.reloads.is_building() {
            self.act(Action::StopBuild);
        }
        for generation in self.servers.generations() {
            self.stop(generation, How::Stopped);
        }
    }

    /// No server will answer this request any more.
    fn end_request(&mut self, seq: u64, now: Instant) {
        let open = self.close(seq);
        if open.class == Class::Listen {
            self.end_listen(&open);
        } else if !open.cancelled {
            let failure = self.failure(FailureKind::Stopping, &open, now);
            self.fail(&open, &failure);
        }
    }

    pub(super) fn end_if_alone(&mut self, now: Instant) {
        let alone = self.servers.is_empty() && !self.reloads.is_building();
        if self.is_leaving() && alone && !self.ended {
            self.ended = true;
            self.requests.seqs(|_| true).into_iter().for_each(|seq| self.end_request(seq, now));
            self.act(Action::End(0));
        }
    }
}
