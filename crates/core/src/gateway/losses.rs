//! Requests that end without their backend's answer: late, taken back, or lost with what was to answer them.

use super::*;
use crate::message::{self, Raw};

use calls::What;
use opening::Private;
use words::Failure;

/// How often a request that did not reach its backend is sent again, each time on another link; then it fails as not run.
const UNSENT_TRIES_MAX: u32 = 3;

/// What a link was told and never got, in the terms of its era.
#[derive(Debug)]
pub(super) struct Unsent {
    pub era: Era,
    pub lines: Vec<Bytes>,
}

impl Gateway {
    /// Calls that waited too long, for a place or for an answer.
    pub(super) fn calls_late(&mut self, now: Instant) {
        let mut late: Vec<u64> = self
            .calls
            .iter()
            .filter(|(_, call)| call.due().is_some_and(|due| due <= now))
            .map(|(key, _)| *key)
            .collect();
        late.sort_unstable();
        for key in late {
            match self.calls.get(&key).and_then(|call| call.due).is_some_and(|due| due <= now) {
                true => self.call_late(key, now),
                false => self.ask_by_result(key, now),
            }
        }
    }

    fn call_late(&mut self, key: u64, now: Instant) {
        let Some(call) = self.calls.remove(&key) else { return };
        let Some(serial) = call.link else {
            if let Some(place) = self.places.get_mut(&call.place) {
                place.held.retain(|held| *held != key);
            }
            let failure = self.failure_of_place(call.place, now);
            return self.fail(*call, failure, now);
        };
        if let What::Private(private) = call.what {
            return self.private_late(serial, private, key, now);
        }
        self.cancel_on(serial, key, "it took too long");
        self.drop_asks_of(key, &call, "the call that this was for took too long");
        let name = self.owner_name(call.place.backend);
        let failure = Failure::timed_out(name, now.saturating_duration_since(call.began));
        self.haunt(serial, key, &call, now);
        self.fail(*call, failure, now);
        self.doubt(serial, key);
        self.suspect(serial, now);
        self.call_over(serial, now);
    }

    /// Tells a backend that nobody waits for this any more.
    pub(super) fn cancel_on(&mut self, serial: u64, key: u64, reason: &str) {
        let reason = message::quote(reason);
        let note = message::line(format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{key},"reason":{reason}}}}}"#
        ));
        self.tell_link(serial, note);
    }

    /// The client takes a request back: it is owed nothing, and its backend may stop.
    pub(super) fn cancel(&mut self, key: u64, reason: Option<Raw<'_>>, now: Instant) {
        let Some(call) = self.calls.remove(&key) else { return };
        match call.link {
            Some(serial) => {
                let reason = reason.map_or_else(String::new, |reason| format!(r#","reason":{}"#, reason.get()));
                let note = message::line(format!(
                    r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{key}{reason}}}}}"#
                ));
                self.tell_link(serial, note);
                self.drop_asks_of(key, &call, "the call that this was for was cancelled");
                self.haunt(serial, key, &call, now);
                self.suspect_after_cancel(serial, now);
                self.call_over(serial, now);
            }
            None => {
                if let Some(place) = self.places.get_mut(&call.place) {
                    place.held.retain(|held| *held != key);
                }
            }
        }
        self.called(&call, Outcome::Cancelled, now);
        if let Some(whom) = &call.whom {
            self.forget(whom);
        }
    }

    /// A request that is owed nothing any more.
    pub(super) fn forget(&mut self, whom: &Whom) {
        if let Some(guest) = self.guests.get_mut(&whom.client) {
            guest.in_flight = guest.in_flight.saturating_sub(1);
        }
        if let Some(batch) = whom.batch {
            self.batch_answered(batch, None);
        }
    }

    /// An HTTP backend will never answer this one.
    pub(super) fn request_lost(&mut self, link: Link, id: &Id, was_sent: bool, why: &str, now: Instant) {
        if let Some(key) = self.key_on(link.serial, id) {
            self.lose_request(link.serial, key, was_sent, why, now);
        }
    }

    /// The number of the call that a link was told under this id, if that is open there.
    pub(super) fn key_on(&self, serial: u64, id: &Id) -> Option<u64> {
        let Id::Integer(number) = *id else { return None };
        let key = u64::try_from(number).ok()?;
        self.calls.get(&key).is_some_and(|call| call.link == Some(serial)).then_some(key)
    }

    pub(super) fn lose_request(&mut self, serial: u64, key: u64, was_sent: bool, why: &str, now: Instant) {
        let Some(mut call) = self.calls.remove(&key) else { return };
        if let What::Private(private) = call.what {
            return self.private_failed(serial, private, key, why, now);
        }
        self.drop_asks_of(key, &call, "the call that this was for was lost");
        self.call_over(serial, now);
        // What never arrived on a link that failed goes to the next one, a few times if need be.
        let is_failing = self.links.get(&serial).is_none_or(|connection| connection.is_recorded);
        let may_repeat = match was_sent {
            true => call.repeatable && !call.resent,
            false => call.unsent_tries < if is_failing { UNSENT_TRIES_MAX } else { 1 },
        };
        if may_repeat && !call.is_parked() && self.stopping.is_none() && call.message.is_some() {
            call.resent |= was_sent;
            call.unsent_tries += u32::from(!was_sent);
            call.due = None;
            if let Some(failure) = self.refused_by_now(&call, now) {
                return self.fail(*call, failure, now);
            }
            let message = call.message.clone().expect("seen above");
            if let Ok(message::Message::Request { id, params, .. }) = message::parse(&message) {
                return self.dispatch(call, &message, id, &params, now);
            }
        }
        let failure = Failure::lost_request(self.owner_name(call.place.backend), why, was_sent);
        self.fail(*call, failure, now);
    }

    /// Its link is gone, and with it whatever it was working on.
    ///
    /// What of it never left, as it was told to the link, is told to the next one.
    pub(super) fn calls_lost(&mut self, serial: u64, how: &How, stderr: &str, unsent: &Unsent, now: Instant) {
        let Unsent { era, lines } = unsent;
        let lines: FxHashMap<u64, &Bytes> = lines.iter().filter_map(|line| Some((told_key(line)?, line))).collect();
        let mut keys: Vec<u64> =
            self.calls.iter().filter(|(_, call)| call.link == Some(serial)).map(|(key, _)| *key).collect();
        keys.sort_unstable();
        for key in keys {
            let mut call = self.calls.remove(&key).expect("listed above");
            if let Some(connection) = self.links.get_mut(&serial) {
                connection.in_flight = connection.in_flight.saturating_sub(1);
            }
            if call.whom.is_none() {
                if let What::Private(Private::Task(list)) = call.what {
                    self.task_listed(list, key, None, now);
                }
                continue;
            }
            if let Some(line) = lines.get(&key)
                && self.stopping.is_none()
            {
                call.due = None;
                if call.message.is_none() {
                    call.told_in = Some(*era);
                    call.message = Some((*line).clone());
                }
                self.hold(key, call, line, now);
                continue;
            }
            self.drop_asks_of(key, &call, "the backend that asked went away");
            if call.repeatable
                && !call.resent
                && !call.is_parked()
                && self.stopping.is_none()
                && let Some(message) = call.message.clone()
            {
                call.resent = true;
                call.due = None;
                call.parked = None;
                let key = self.number();
                self.hold(key, call, &message, now);
                continue;
            }
            let next = self.next_try(call.place, now);
            let failure = Failure::lost(self.owner_name(call.place.backend), how, stderr, next);
            self.fail(*call, failure, now);
        }
    }

    /// What never reached the link it was told to is told to the next one, word for word.
    pub(super) fn tell_again(&mut self, key: u64, serial: u64, era: Era, message: Bytes, now: Instant) {
        if self.links.get(&serial).is_none_or(|connection| connection.era != era) {
            // It was put in the terms of another era.
            let Some(call) = self.calls.remove(&key) else { return };
            let failure = Failure::lost_request(self.owner_name(call.place.backend), "it ended before", false);
            return self.fail(*call, failure, now);
        }
        let (Some(connection), Some(call)) = (self.links.get_mut(&serial), self.calls.get_mut(&key)) else { return };
        let settings = &self.owners[&call.place.backend].settings;
        connection.in_flight += 1;
        connection.is_probe = false;
        connection.last_used = now;
        call.link = Some(serial);
        call.message = None;
        let due = call.sent(settings, now);
        self.wake_by(due);
        self.tell_link(serial, message);
    }
}

/// Under which number a link was told something.
fn told_key(line: &[u8]) -> Option<u64> {
    match message::parse(line) {
        Ok(message::Message::Request { id, .. }) => match id.parse()? {
            Id::Integer(number) => u64::try_from(number).ok(),
            Id::Big(_) | Id::Text(_) => None,
        },
        _ => None,
    }
}
