//! Requests that an HTTP backend refused with a status code: they fail, or are sent again when the backend asks for
//! that.
//! Which HTTP answers are refusals is decided by the driver of the link.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use bytes::Bytes;

use super::{
    Gateway, Kind, Link,
    calls::{Call, CallKind},
    links::LinkState,
    messages,
    messages::Failure,
    opening::OwnRequest,
    timers::Timer,
};
use crate::{
    exit::{Denied, How},
    message::Id,
};

/// The pause before a request is sent again if the backend gives no time. It doubles with each try.
const BUSY_PAUSE: Duration = Duration::from_millis(100);
/// How often that is done; then the refusal is final.
const BUSY_TRIES_MAX: u32 = 3;
/// How often a request is sent again if the backend gives a time; then the refusal is final.
const RETRY_AFTER_TRIES_MAX: u32 = 10;
/// How long requests of the gateway without a deadline wait for a backend that gives a time.
const OWN_WAIT_MAX: Duration = Duration::from_secs(60);
/// How much of a backend's `WWW-Authenticate` is kept.
const CHALLENGE_MAX: usize = 500;

/// A refusal by HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub status: u16,
    /// One sentence, without its full stop, that names the status and the answer.
    pub words: String,
    /// The value of `WWW-Authenticate`.
    pub challenge: Option<String>,
    /// The beginning of the body.
    pub body: Option<String>,
    /// `Retry-After`.
    pub retry_after: Option<Duration>,
    /// The line that was refused.
    pub line: Bytes,
}

impl Refused {
    /// The backend asks for a later try.
    pub fn is_busy(&self) -> bool {
        matches!(self.status, 429 | 503)
    }

    /// A backend that fails may have run the request. One with `Retry-After` has not.
    fn may_have_run(&self) -> bool {
        self.status >= 500 && !(self.status == 503 && self.retry_after.is_some())
    }
}

/// Requests that are sent again later.
#[derive(Debug, Default)]
pub(super) struct Resends(BTreeMap<u64, Resend>);

#[derive(Debug)]
struct Resend {
    at: Instant,
    link: u64,
    line: Bytes,
}

impl Resends {
    pub(super) fn deadlines(&self) -> impl Iterator<Item = Instant> {
        self.0.values().map(|resend| resend.at)
    }

    fn take_due(&mut self, now: Instant) -> Vec<(u64, Resend)> {
        let due: Vec<u64> = self.0.iter().filter(|(_, resend)| resend.at <= now).map(|(key, _)| *key).collect();
        due.into_iter().filter_map(|key| Some((key, self.0.remove(&key)?))).collect()
    }
}

impl Gateway {
    pub(super) fn request_refused(&mut self, link: Link, id: &Id, refused: Refused, now: Instant) {
        let serial = link.serial;
        let Some(key) = self.key_on(serial, id) else { return };
        if let Some(at) = self.resend_at(serial, key, &refused, now) {
            let call = self.calls.get_mut(&key).expect("found above");
            call.unsent_tries += 1;
            call.resent |= refused.may_have_run();
            self.calls.resends_mut().0.insert(key, Resend { at, link: serial, line: refused.line });
            return self.timers.arm(Timer::Resends, at);
        }
        let denied = self.denied(link, &refused);
        match (self.calls[&key].kind, denied) {
            (CallKind::Own(OwnRequest::Initialize | OwnRequest::Discover), Some(denied)) => {
                self.calls.remove(&key);
                self.stop_link(serial, How::Unauthorized(denied), true, now);
            }
            (CallKind::Own(own_request), denied) => {
                self.calls.remove(&key);
                self.own_request_failed(serial, own_request, key, &refused.words, now);
                // Subscriptions, levels and tasks may be forbidden where tools are not.
                let is_about_all =
                    matches!(own_request, OwnRequest::List(_) | OwnRequest::Ping) || refused.status == 401;
                if let Some(denied) = denied.filter(|_| is_about_all) {
                    self.link_failing(link, How::Unauthorized(denied), now);
                }
            }
            (_, Some(denied)) => {
                let call = self.refuse_call(serial, key, now);
                let name = self.backends.name(link.backend).to_owned();
                if denied.status == 401 {
                    self.link_failing(link, How::Unauthorized(denied.clone()), now);
                } else {
                    self.note(format!("{name}: {denied}"));
                }
                let next = self.next_try_after(link, now);
                if let Some(call) = call {
                    self.fail(*call, Failure::denied_by(&name, &denied, refused.body.as_deref(), next), now);
                }
            }
            (_, None) if refused.may_have_run() => {
                // The body may contain secrets, and this text is written to the log and the audit log.
                self.fail_request(serial, key, true, &refused.words, now);
            }
            (_, None) => {
                if let Some(call) = self.refuse_call(serial, key, now) {
                    let failure = Failure::refused_by(self.backends.name(link.backend), &refused);
                    self.fail(*call, failure, now);
                }
            }
        }
    }

    /// A stream or a notification was denied. If only the stream is, requests may still be allowed.
    pub(super) fn link_denied(&mut self, link: Link, refused: &Refused, now: Instant) {
        let Some(denied) = self.denied(link, refused) else { return };
        let is_ready = self.links.get(&link.serial).is_some_and(LinkState::is_ready);
        if denied.status == 401 || !is_ready {
            self.link_failing(link, How::Unauthorized(denied), now);
        } else {
            let name = self.backends.name(link.backend);
            self.note(format!("{name}: {denied}"));
        }
    }

    /// Removes a call that its backend will not run from its link.
    fn refuse_call(&mut self, serial: u64, key: u64, now: Instant) -> Option<Box<Call>> {
        let call = self.calls.remove(&key)?;
        self.drop_requests_of_call(key, &call, "the call that this was for was refused");
        self.call_finished(serial, now);
        Some(call)
    }

    /// When the slot of a failing link is started again.
    fn next_try_after(&self, link: Link, now: Instant) -> messages::Next {
        match self.links.get(&link.serial) {
            Some(link_state) if link_state.is_recorded() => self.next_try(link_state.slot(), now),
            _ => messages::Next::Nothing,
        }
    }

    /// Whether the backend wants credentials, or other ones.
    fn denied(&self, link: Link, refused: &Refused) -> Option<Denied> {
        let Kind::Http { headers, .. } = &self.backends.get(&link.backend)?.settings().kind else { return None };
        matches!(refused.status, 401 | 403).then(|| Denied {
            status: refused.status,
            words: refused.words.clone(),
            challenge: refused.challenge.as_deref().map(|challenge| messages::cut(challenge, CHALLENGE_MAX)),
            has_credentials: headers.keys().any(|name| name.eq_ignore_ascii_case("authorization")),
        })
    }

    /// When a request that a busy backend refused is sent again: only if that is safe and before its deadline.
    fn resend_at(&mut self, serial: u64, key: u64, refused: &Refused, now: Instant) -> Option<Instant> {
        let call = &self.calls[&key];
        let is_ours = matches!(call.kind, CallKind::Own(_));
        if !refused.is_busy() || !(is_ours || call.repeatable) || call.is_parked() || self.stage.is_stopping() {
            return None;
        }
        // The backend may run a client's request twice, and no more often.
        if !is_ours && call.resent && refused.may_have_run() {
            return None;
        }
        let tries_max = if refused.retry_after.is_some() { RETRY_AFTER_TRIES_MAX } else { BUSY_TRIES_MAX };
        if call.unsent_tries >= tries_max {
            return None;
        }
        let pause = BUSY_PAUSE * (1 << call.unsent_tries.min(8));
        let at = now + refused.retry_after.unwrap_or_default().max(pause);
        let opened_by = self.links.get(&serial).and_then(LinkState::open_by);
        let due = call.due.or(opened_by).unwrap_or(now + OWN_WAIT_MAX);
        (at < due).then_some(at)
    }

    /// Sends the requests that are due on the links that refused them.
    pub(super) fn send_due_resends(&mut self, now: Instant) {
        let due = self.calls.resends_mut().take_due(now);
        for (key, resend) in due {
            // It may have been cancelled, or lost with its link.
            if self.calls.get(&key).is_some_and(|call| call.link == Some(resend.link)) {
                self.tell_link(resend.link, resend.line);
            }
        }
    }
}
