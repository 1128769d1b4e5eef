//! Requests that an HTTP backend answered with a status that says no: reported, or sent again when the backend asks for that.
//! Which answers of HTTP these are, and what counts as a lost session, the driver of the link decides.

use super::{BTreeMap, Bytes, Call, Connection, Duration, Gateway, How, Id, Instant, Kind, Link, links, words};
use crate::exit::Denied;

use super::calls::What;
use super::opening::Private;
use super::words::Failure;

/// The pause before a request is sent again to a backend that does not say when, doubled each time.
const BUSY_PAUSE: Duration = Duration::from_millis(100);
/// How often that is done. Then the refusal is final.
const BUSY_TRIES_MAX: u32 = 3;
/// How often a request is sent again to a backend that says when. Then the refusal is final.
const RETRY_AFTER_TRIES_MAX: u32 = 10;
/// How long our own requests without a deadline wait for a backend that says when.
const OWN_WAIT_MAX: Duration = Duration::from_secs(60);
/// How much of a backend's `WWW-Authenticate` is kept.
const CHALLENGE_MAX: usize = 500;

/// The answer to a request in words of HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub status: u16,
    /// Who answered what, as one sentence without its full stop.
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
    /// It is to be asked later.
    pub fn is_busy(&self) -> bool {
        matches!(self.status, 429 | 503)
    }

    /// A backend that fails may have acted on the request. One that says when to come back has not.
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
    pub fn due(&self) -> Option<Instant> {
        self.0.values().map(|resend| resend.at).min()
    }
}

impl Gateway {
    pub(super) fn request_refused(&mut self, link: Link, id: &Id, refused: Refused, now: Instant) {
        let serial = link.serial;
        let Some(key) = self.key_on(serial, id) else { return };
        if let Some(at) = self.resend_at(serial, key, &refused, now) {
            self.calls.get_mut(&key).expect("found above").unsent_tries += 1;
            self.resends.0.insert(key, Resend { at, link: serial, line: refused.line });
            return self.wake_by(at);
        }
        let denied = self.denied(link, &refused);
        match (self.calls[&key].what, denied) {
            (What::Private(Private::Initialize | Private::Discover), Some(denied)) => {
                self.calls.remove(&key);
                self.part(serial, How::Unauthorized(denied), true, now);
            }
            (What::Private(private), denied) => {
                self.calls.remove(&key);
                self.private_failed(serial, private, key, &refused.words, now);
                // Subscriptions, levels and tasks may be forbidden where tools are not.
                let is_about_all = matches!(private, Private::List(_) | Private::Ping) || refused.status == 401;
                if let Some(denied) = denied.filter(|_| is_about_all) {
                    self.link_failing(link, How::Unauthorized(denied), now);
                }
            }
            (_, Some(denied)) => {
                let call = self.refuse_call(serial, key, now);
                let name = self.owner_name(link.backend).to_owned();
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
                // The body may hold secrets, and the reason of a loss is in logs and in the audit log.
                self.lose_request(serial, key, true, &refused.words, now);
            }
            (_, None) => {
                if let Some(call) = self.refuse_call(serial, key, now) {
                    let failure = Failure::refused_by(self.owner_name(link.backend), &refused);
                    self.fail(*call, failure, now);
                }
            }
        }
    }

    /// A stream or a notification wants credentials. What only the stream is denied, requests may still be allowed.
    pub(super) fn link_denied(&mut self, link: Link, refused: &Refused, now: Instant) {
        let Some(denied) = self.denied(link, refused) else { return };
        let is_ready = self.links.get(&link.serial).is_some_and(Connection::is_ready);
        if denied.status == 401 || !is_ready {
            self.link_failing(link, How::Unauthorized(denied), now);
        } else {
            let name = self.owner_name(link.backend);
            self.note(format!("{name}: {denied}"));
        }
    }

    /// Takes a call that its backend will not run off its link.
    fn refuse_call(&mut self, serial: u64, key: u64, now: Instant) -> Option<Box<Call>> {
        let call = self.calls.remove(&key)?;
        self.drop_asks_of(key, &call, "the call that this was for was refused");
        self.call_over(serial, now);
        Some(call)
    }

    /// When the place of a link that failed is filled again.
    fn next_try_after(&self, link: Link, now: Instant) -> words::Next {
        match self.links.get(&link.serial) {
            Some(connection) if connection.is_recorded => self.next_try(connection.place, now),
            _ => words::Next::Nothing,
        }
    }

    /// Whether the backend wants credentials, or others than those it got.
    fn denied(&self, link: Link, refused: &Refused) -> Option<Denied> {
        let Kind::Http { headers, .. } = &self.owners.get(&link.backend)?.settings.kind else { return None };
        matches!(refused.status, 401 | 403).then(|| Denied {
            status: refused.status,
            words: refused.words.clone(),
            challenge: refused.challenge.as_deref().map(|challenge| words::cut(challenge, CHALLENGE_MAX)),
            has_credentials: headers.keys().any(|name| name.eq_ignore_ascii_case("authorization")),
        })
    }

    /// When a request that a busy backend refused is sent again: if that is safe, and within its deadline.
    fn resend_at(&mut self, serial: u64, key: u64, refused: &Refused, now: Instant) -> Option<Instant> {
        let call = &self.calls[&key];
        let is_ours = matches!(call.what, What::Private(_));
        if !refused.is_busy() || !(is_ours || call.repeatable) || call.is_parked() || self.stopping.is_some() {
            return None;
        }
        let tries_max = if refused.retry_after.is_some() { RETRY_AFTER_TRIES_MAX } else { BUSY_TRIES_MAX };
        if call.unsent_tries >= tries_max {
            return None;
        }
        let pause = BUSY_PAUSE * (1 << call.unsent_tries.min(8));
        let at = now + refused.retry_after.unwrap_or_default().max(pause);
        let opened_by = self.links.get(&serial).and_then(|connection| match connection.phase {
            links::Phase::Connecting { by } | links::Phase::Opening { by } => Some(by),
            _ => None,
        });
        let due = call.due.or(opened_by).unwrap_or(now + OWN_WAIT_MAX);
        (at < due).then_some(at)
    }

    /// Requests whose time has come, on the links that they were sent on.
    pub(super) fn resend_due(&mut self, now: Instant) {
        let due: Vec<u64> = self.resends.0.iter().filter(|(_, resend)| resend.at <= now).map(|(key, _)| *key).collect();
        for key in due {
            let Some(resend) = self.resends.0.remove(&key) else { continue };
            // It may have been cancelled, or gone with its link.
            if self.calls.get(&key).is_some_and(|call| call.link == Some(resend.link)) {
                self.tell_link(resend.link, resend.line);
            }
        }
    }
}
