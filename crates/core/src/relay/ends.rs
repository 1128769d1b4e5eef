//! The end of a child, and what becomes of each request that it held. Whether the next one starts is decided in [`super::servers`].

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use bytes::Bytes;

use super::{
    Relay,
    failures::{FailureKind, Loss},
    requests::{Class, OpenRequest},
    servers::{Current, Ended, EndedRole, LastEnd, Purpose},
    settings::OnCleanExit,
};
use crate::{exit::How, message, message::Message, record::Record, restarts::Verdict, slot::Until};

/// What is done for a request that its child will not answer.
pub(super) enum Rescue {
    /// It was cancelled.
    Forget,
    /// It needs no server.
    Answer,
    /// It may be asked again, with these bytes.
    Repeat(Bytes),
}

impl Relay {
    pub(super) fn server_went_down(&mut self, generation: u32, how: How, unsent: Vec<(u64, Bytes)>, now: Instant) {
        let Some(ended) = self.servers.child_ended(generation, &how, self.is_leaving(), now) else { return };
        let Ended { end, hung, record, was } = ended;
        self.cancel_asked(generation);
        self.forget_hang(generation);
        self.record(record.clone());
        let mut left = false;
        match was {
            EndedRole::Current(Some(verdict)) => {
                // A restart that was to bring this child up has failed.
                if self.reloads.waits_for(generation) {
                    self.restart_failed_with(&how, &end.stderr, now);
                }
                left = self.follow(&verdict, record, now);
            }
            EndedRole::Candidate => self.restart_failed_with(&how, &end.stderr, now),
            EndedRole::Current(None) | EndedRole::Other => {}
        }
        self.reloads.child_ended(generation, &how);
        self.place_after_end(&end, hung.as_deref(), unsent, now);
        if left {
            self.leave(now);
        }
        if self.servers.start_is_due_after(generation) && !self.is_leaving() {
            self.start(Purpose::Current);
        }
        self.note_end_before_ready(now);
        self.check_holds(now);
    }

    /// Carries out the policy's verdict on an end. True if the child left on purpose and outlast leaves with it.
    pub(super) fn follow(&mut self, verdict: &Verdict, end: Record, now: Instant) -> bool {
        // A restart that was asked for wants a server.
        let callable = self.settings.on_clean_exit == OnCleanExit::Restart || self.restart_will_start();
        let record = self.servers.follow(verdict, end, callable);
        record.into_iter().for_each(|record| self.record(record));
        if matches!(self.servers.slot.current(), Current::Down { at } if *at <= now) && self.wants_start() {
            self.start(Purpose::Current);
        }
        *verdict == Verdict::Left && !callable
    }

    pub(super) fn start_failed(&mut self, why: String, now: Instant) {
        let how = How::CouldNotStart(why);
        if self.is_leaving() {
            self.servers.forget_start();
            return;
        }
        let Some((verdict, record)) = self.servers.start_failed(&how, now) else {
            return self.restart_failed_with(&how, &[], now);
        };
        self.record(record.clone());
        if self.reloads.waits_for_start() {
            self.restart_failed_with(&how, &[], now);
        }
        self.follow(&verdict, record, now);
        if !self.servers.was_ever_ready() {
            self.broken_at_start(now);
        }
        self.place_what_need_not_wait(now);
        self.recheck_holds(now);
    }

    /// Before the first child everything waits. Its start failed, so pings and subscriptions are answered now.
    pub(super) fn place_what_need_not_wait(&mut self, now: Instant) {
        let need_not_wait =
            self.requests.held_requests().filter(|open| matches!(open.class, Class::Ping | Class::Listen));
        for seq in need_not_wait.map(OpenRequest::seq).collect::<Vec<_>>() {
            let Some(line) = self.requests.held_line(seq).cloned() else { continue };
            let open = self.close(seq);
            self.place(open, line, now);
        }
    }

    /// Openings do not wait for a server that fails to start; no request waits for a server that will be ready too late.
    pub(super) fn check_holds(&mut self, now: Instant) {
        if self.is_leaving() {
            return;
        }
        let late = matches!(self.servers.last_end(), Some(LastEnd { how: How::HandshakeLate(_), .. }));
        let gave_up = matches!(self.servers.slot.current(), Current::GivenUp { .. });
        if self.servers.ends_before_ready() >= 2 || late || gave_up {
            self.broken_at_start(now);
        }
        self.recheck_holds(now);
    }

    /// A held request that cannot wait until the next start is answered now.
    pub(super) fn recheck_holds(&mut self, now: Instant) {
        if matches!(self.servers.slot.current(), Current::GivenUp { .. }) {
            self.dropped.from_client += self.requests.drop_held_notifications();
        }
        for seq in self.requests.held_seqs() {
            let open = &self.requests[seq];
            let limits = &self.settings.limits;
            let is_opening = self.is_first_opening(open);
            let over = match self.servers.slot.current() {
                Current::GivenUp { until, .. } => *until != Until::Called && !self.restart_will_start(),
                Current::Down { at } if self.wants_start() => {
                    let wait = if is_opening { limits.holding.opening_wait } else { limits.holding.hold_max };
                    *at > open.waiting_since.unwrap_or(now) + wait
                }
                _ => false,
            };
            if over {
                if is_opening {
                    self.conversation.mark_broken();
                }
                let open = self.close(seq);
                self.answer_without_server(open, now);
            }
        }
    }

    /// Every request that was on the ended child finds its next place, in client order.
    pub(super) fn place_after_end(
        &mut self,
        end: &LastEnd,
        hung: Option<&str>,
        unsent: Vec<(u64, Bytes)>,
        now: Instant,
    ) {
        let generation = end.generation;
        let mut unsent: BTreeMap<u64, Bytes> = unsent.into_iter().collect();
        let seqs = self.requests.on(generation);
        let due = self.cause_of_restart(&seqs, &end.how, &unsent);
        if let Some((seq, line)) = self.conversation.early_initialized()
            && self.servers.slot.live().is_none()
        {
            // The opening is not answered: both halves of it go to the next child.
            unsent.insert(*seq, line.clone());
        }
        let places: BTreeSet<u64> = seqs.into_iter().chain(unsent.keys().copied()).collect();
        for seq in places {
            let line = unsent.remove(&seq);
            if !self.is_lost_with(generation, seq, line.as_ref(), now) {
                continue;
            }
            self.requests.get_mut(seq).expect("listed above").taken |= line.is_none();
            if self.requests[seq].class == Class::Listen {
                self.listen_lost_child(seq);
                if self.servers.slot.live().is_none() && !self.is_leaving() {
                    self.acknowledge(seq);
                }
                continue;
            }
            if due == Some(seq) {
                self.make_due(seq, now);
                continue;
            }
            let open = self.close(seq);
            if self.is_leaving() && !open.cancelled {
                let failure = self.failure(FailureKind::Stopping, &open, now);
                self.fail(&open, &failure);
                continue;
            }
            if let Some(line) = line
                && !open.cancelled
                && open.class != Class::Ping
            {
                self.again(open, line, now);
                continue;
            }
            let Some(open) = self.salvage(open, false, now) else { continue };
            if open.is_opening() {
                self.opening_was_lost();
                self.answer_without_server(open, now);
            } else {
                let kind = match hung {
                    Some(_) => FailureKind::ServerHung,
                    None if open.resent > 0 => FailureKind::EndedAgain,
                    None => FailureKind::ServerEnded,
                };
                let failure = self.failure_of(&Loss { kind, open: &open, end, hung }, now);
                self.fail(&open, &failure);
            }
        }
    }

    /// Whether the ended child held this request. A line that it has not read, and that needs no answer, counts as new.
    fn is_lost_with(&mut self, generation: u32, seq: u64, unsent: Option<&Bytes>, now: Instant) -> bool {
        match (self.requests.get_mut(seq), unsent) {
            (Some(open), _) if open.is_on(generation) => return true,
            (Some(open), Some(_)) => {
                // It was sent again when this child was told to stop, which shows now not to have read it.
                open.resent = open.resent.saturating_sub(1);
                open.taken = open.resent > 0;
            }
            (None, Some(line)) => self.untracked_again(seq, line, now),
            (_, None) => {}
        }
        false
    }

    /// A request that its child will not answer: it is forgotten if it was cancelled, answered if it is a ping, and asked
    /// again if it may be. Returned if none of this applies: it is lost. `must_fit`: one that is to be held needs room.
    pub(super) fn salvage(
        &mut self,
        mut open: Box<OpenRequest>,
        must_fit: bool,
        now: Instant,
    ) -> Option<Box<OpenRequest>> {
        match self.rescue(&open, must_fit) {
            None => return Some(open),
            Some(Rescue::Forget) => self.forget(&open),
            Some(Rescue::Answer) => self.answer_result(&open, "{}"),
            Some(Rescue::Repeat(line)) => {
                open.resent += 1;
                self.again(open, line, now);
            }
        }
        None
    }

    /// What can be done for a request that its child will not answer.
    pub(super) fn rescue(&self, open: &OpenRequest, must_fit: bool) -> Option<Rescue> {
        match open.class {
            _ if open.cancelled => Some(Rescue::Forget),
            Class::Ping => Some(Rescue::Answer),
            _ => self.line_to_repeat(open, must_fit).map(Rescue::Repeat),
        }
    }

    /// The bytes of a request, if it may be asked again.
    fn line_to_repeat(&self, open: &OpenRequest, must_fit: bool) -> Option<Bytes> {
        let limits = &self.settings.limits.holding;
        let kept = open.kept().filter(|_| self.may_repeat(open) && open.resent < limits.resend_max)?;
        let fits = !must_fit || self.servers.slot.live().is_some() || self.requests.has_room(kept, limits);
        fits.then(|| kept.clone())
    }

    /// A message that never reached the child and needs no answer counts as new.
    pub(super) fn untracked_again(&mut self, seq: u64, line: &Bytes, now: Instant) {
        match message::parse(line) {
            Ok(Message::Notification { method, params }) => {
                self.client_noted(&method, &params, line, Some(seq), now);
            }
            // One that could be kept track of is answered by now.
            Ok(Message::Request { id, .. }) if id.parse().is_none() => self.pass_or_hold(line, Some(seq), now),
            _ => {}
        }
    }

    /// An opening has no server left to go to. If none was ever ready, the client is told so.
    pub(super) fn opening_was_lost(&mut self) {
        if !self.servers.was_ever_ready() {
            self.conversation.mark_broken();
        }
    }

    /// An opening that no server has answered yet never fails: it waits, or is answered without a server.
    pub(super) fn is_first_opening(&self, open: &OpenRequest) -> bool {
        !self.servers.was_ever_ready() && open.is_opening()
    }

    /// Sends a request to the child that serves, or holds it for the next one.
    pub(super) fn again(&mut self, mut open: Box<OpenRequest>, line: Bytes, now: Instant) {
        open.waiting_since.get_or_insert(now);
        match *self.servers.slot.current() {
            Current::Fresh(_) | Current::Serving(_) => self.place(open, line, now),
            Current::GivenUp { until, .. } => self.place_while_given_up(open, line, until, now),
            _ => self.hold(open, line, now),
        }
    }
}
