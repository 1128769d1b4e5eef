//! Calls that end without an answer: timed out, cancelled, or lost with their link.
//! When a link counts as hung is decided in [`super::hang`].

use std::time::Instant;

use bytes::Bytes;
use rustc_hash::FxHashMap;

use super::{Era, Gateway, Link, Outcome, calls::CallKind, messages::Failure, opening::OwnRequest, timers::Timer};
use crate::{exit::How, json::Raw, message, message::Id};

/// How often a request that did not reach its backend is sent again, each time on another link; then it fails as not
/// run.
const UNSENT_TRIES_MAX: u32 = 3;

/// Lines that were written to a link and never left, in the form of its era.
#[derive(Debug)]
pub(super) struct Unsent {
    pub era: Era,
    pub lines: Vec<Bytes>,
}

impl Gateway {
    /// Calls that were held or in flight for too long.
    pub(super) fn fail_late_calls(&mut self, now: Instant) {
        let late = self.calls.keys_where(|call| call.due().is_some_and(|due| due <= now));
        for key in late {
            match self.calls.get(&key).and_then(|call| call.due).is_some_and(|due| due <= now) {
                true => self.fail_late_call(key, now),
                false => self.return_input_required(key, now),
            }
        }
    }

    fn fail_late_call(&mut self, key: u64, now: Instant) {
        let Some(call) = self.calls.remove(&key) else { return };
        let Some(serial) = call.link else {
            if let Some(slot) = self.slots.get_mut(&call.slot) {
                slot.unhold(key);
            }
            let failure = self.slot_failure(call.slot, now);
            return self.fail(*call, failure, now);
        };
        if let CallKind::Own(own_request) = call.kind {
            return self.own_request_late(serial, own_request, key, now);
        }
        self.cancel_on(serial, key, "it took too long");
        self.drop_requests_of_call(key, &call, "the call that this was for took too long");
        let name = self.backends.name(call.slot.backend);
        let failure = Failure::timed_out(name, now.saturating_duration_since(call.began));
        self.note_abandoned(serial, key, &call, now);
        self.fail(*call, failure, now);
        self.note_unresponsive(serial, key);
        self.suspect(serial, false, now);
        self.call_finished(serial, now);
    }

    /// Cancels a request at its backend.
    pub(super) fn cancel_on(&mut self, serial: u64, key: u64, reason: &str) {
        let note = message::cancelled_line(key, Some(&message::quote(reason)));
        self.tell_link(serial, note);
    }

    /// The client cancels a request: it gets no answer, and the backend may stop its work.
    pub(super) fn cancel(&mut self, key: u64, reason: Option<Raw<'_>>, now: Instant) {
        let Some(call) = self.calls.remove(&key) else { return };
        match call.link {
            Some(serial) => {
                let note = message::cancelled_line(key, reason.map(Raw::get));
                self.tell_link(serial, note);
                self.drop_requests_of_call(key, &call, "the call that this was for was cancelled");
                self.note_abandoned(serial, key, &call, now);
                self.suspect(serial, true, now);
                self.call_finished(serial, now);
            }
            None => {
                if let Some(slot) = self.slots.get_mut(&call.slot) {
                    slot.unhold(key);
                }
            }
        }
        self.report_call(&call, Outcome::Cancelled, now);
        if let Some(reply_to) = &call.reply_to {
            self.forget(reply_to);
        }
    }

    /// An HTTP backend will not answer this request.
    pub(super) fn request_lost(&mut self, link: Link, id: &Id, was_sent: bool, why: &str, now: Instant) {
        if let Some(key) = self.key_on(link.serial, id) {
            self.fail_request(link.serial, key, was_sent, why, now);
        }
    }

    /// The call that was sent on a link under this id, if it is in flight there.
    pub(super) fn key_on(&self, serial: u64, id: &Id) -> Option<u64> {
        let Id::Integer(number) = *id else { return None };
        let key = u64::try_from(number).ok()?;
        self.calls.get(&key).is_some_and(|call| call.link == Some(serial)).then_some(key)
    }

    pub(super) fn fail_request(&mut self, serial: u64, key: u64, was_sent: bool, why: &str, now: Instant) {
        let Some(mut call) = self.calls.remove(&key) else { return };
        if let CallKind::Own(own_request) = call.kind {
            return self.own_request_failed(serial, own_request, key, why, now);
        }
        self.drop_requests_of_call(key, &call, "the call that this was for was lost");
        self.call_finished(serial, now);
        // A request that did not arrive on a failing link is sent on the next one, up to a limit.
        let is_failing = self.links.get(&serial).is_none_or(|link_state| link_state.is_recorded());
        let may_repeat = match was_sent {
            true => call.repeatable && !call.resent,
            // What did not arrive is the client's input, and not the whole call.
            false if call.rounds > 0 => false,
            false => call.unsent_tries < if is_failing { UNSENT_TRIES_MAX } else { 1 },
        };
        if may_repeat && !call.is_parked() && !self.stage.is_stopping() && call.message.is_some() {
            call.resent |= was_sent;
            call.unsent_tries += u32::from(!was_sent);
            call.due = None;
            call.parked = None;
            if let Some(failure) = self.refused_since(&call, now) {
                return self.fail(*call, failure, now);
            }
            let message = call.message.clone().expect("seen above");
            if let Ok(message::Message::Request { id, params, .. }) = message::parse_again(&message) {
                return self.dispatch(call, &message, id, &params, now);
            }
        }
        let has_begun = was_sent || call.rounds > 0;
        let failure = Failure::lost_request(self.backends.name(call.slot.backend), why, has_begun);
        self.fail(*call, failure, now);
    }

    /// A link is gone: its calls fail, or are held for the next link if they never left or may be repeated.
    pub(super) fn fail_calls_of_link(&mut self, serial: u64, how: &How, stderr: &str, unsent: &Unsent, now: Instant) {
        let Unsent { era, lines } = unsent;
        let lines: FxHashMap<u64, &Bytes> = lines.iter().filter_map(|line| Some((told_key(line)?, line))).collect();
        let keys = self.calls.keys_where(|call| call.link == Some(serial));
        for key in keys {
            let mut call = self.calls.remove(&key).expect("listed above");
            if let Some(link_state) = self.links.get_mut(&serial) {
                link_state.forget_call();
            }
            if call.reply_to.is_none() {
                if let CallKind::Own(OwnRequest::Task(list)) = call.kind {
                    self.task_listed(list, key, None, now);
                }
                continue;
            }
            // A line with the client's input is not the whole call: the ended process had begun it.
            if let Some(line) = lines.get(&key)
                && !self.stage.is_stopping()
                && call.rounds == 0
            {
                call.due = None;
                // What the ended process asked was not for this call, and its client has not been told of it.
                call.parked = None;
                if call.message.is_none() {
                    call.unsent_era = Some(*era);
                    call.message = Some((*line).clone());
                }
                self.hold_call(key, call, line, now);
                continue;
            }
            self.drop_requests_of_call(key, &call, "the backend that sent this request ended");
            if call.repeatable
                && !call.resent
                && !call.is_parked()
                && !self.stage.is_stopping()
                && let Some(message) = call.message.clone()
            {
                call.resent = true;
                call.due = None;
                call.parked = None;
                let key = self.ids.number();
                self.hold_call(key, call, &message, now);
                continue;
            }
            let next = self.next_try(call.slot, now);
            let failure = Failure::lost(self.backends.name(call.slot.backend), how, stderr, next);
            self.fail(*call, failure, now);
        }
    }

    /// Sends a line that never left on another link, unchanged.
    pub(super) fn resend_unsent(&mut self, key: u64, serial: u64, era: Era, message: Bytes, now: Instant) {
        if self.links.get(&serial).is_none_or(|link_state| link_state.era() != era) {
            // The line has the form of another era.
            let Some(call) = self.calls.remove(&key) else { return };
            let failure = Failure::lost_request(self.backends.name(call.slot.backend), "it ended before", false);
            return self.fail(*call, failure, now);
        }
        let (Some(link_state), Some(call)) = (self.links.get_mut(&serial), self.calls.get_mut(&key)) else { return };
        let settings = self.backends[&call.slot.backend].settings();
        link_state.begin_call(now);
        call.link = Some(serial);
        call.message = None;
        let due = call.sent(settings, now);
        self.timers.arm(Timer::Calls, due);
        self.tell_link(serial, message);
        self.watch_credentials(key);
    }
}

/// The id under which a line was sent.
fn told_key(line: &[u8]) -> Option<u64> {
    match message::parse_again(line) {
        Ok(message::Message::Request { id, .. }) => match id.parse()? {
            Id::Integer(number) => u64::try_from(number).ok(),
            Id::Big(_) | Id::Text(_) => None,
        },
        _ => None,
    }
}
