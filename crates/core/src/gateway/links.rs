//! Links: connections to backends, from the first event to the last; what is received on each.
//! Which link fills which slot is decided in [`super::slots`], and when one counts as hung in [`super::hang`].

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use bytes::Bytes;
use rustc_hash::FxHashMap;

use crate::{
    capabilities::Capabilities,
    cut::tail,
    exit::How,
    mcp::{Family, method, notification},
    message::{self, Id, Message, Params, Unreadable},
    record::{self, Record},
    saved::Moment,
};

use super::{
    Action, Era, Gateway, Link, Offer, Stage, Timer,
    borrowed_links::BORROWED_IDLE,
    calls::{Call, CallKind},
    clients::Declared,
    failed_calls::Unsent,
    hang::Liveness,
    lists::Fetch,
    messages, methods,
    opening::OwnRequest,
    saved::{SavedLink, SavedOffer},
    server_requests::AbandonedCalls,
    slots::{Sharing, SlotKey},
    subscriptions::LinkSubscriptions,
};

/// How long a replaced link may finish its calls; then they fail.
pub(super) const DRAIN_MAX: Duration = Duration::from_secs(60);
/// How long after a process was found too large, or to answer nothing, it may be replaced again.
pub(super) const REPLACE_GAP: Duration = Duration::from_secs(60);
/// How much of a process's stderr is kept after its end.
const STDERR_BYTES_MAX: usize = 64 << 10;

/// By serial.
pub(super) type Links = FxHashMap<u64, LinkState>;

#[derive(Debug)]
pub(super) struct LinkState {
    id: Link,
    slot: SlotKey,
    phase: Phase,
    era: Era,
    version: String,
    /// What it declared that it can do.
    has: Capabilities,
    pid: Option<u32>,
    generation: u64,
    began: Instant,
    /// When its handshake was done.
    ready_at: Option<Instant>,
    /// When it last sent or received anything for a client.
    last_used: Instant,
    /// Requests of clients that it has not answered.
    in_flight: usize,
    /// It was started only to read what it offers; no request has needed it yet.
    is_probe: bool,
    pub(super) fetch: Fetch,
    pub(super) liveness: Liveness,
    /// Its end is in the audit log already.
    is_recorded: bool,
    /// Lines that were not JSON-RPC.
    garbage: u64,
    pub(super) subscriptions: LinkSubscriptions,
    pub(super) abandoned: AbandonedCalls,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Phase {
    /// It is stopped if it is not ready by then.
    Connecting {
        by: Instant,
    },
    Opening {
        by: Instant,
        /// What it answered when it was first asked, in the era that it does not speak.
        first_refusal: Option<String>,
    },
    Ready,
    Draining {
        until: Instant,
    },
    Stopping {
        how: How,
    },
}

impl LinkState {
    pub(super) fn new(
        id: Link,
        slot: SlotKey,
        generation: u64,
        by: Instant,
        is_probe: bool,
        now: Instant,
    ) -> LinkState {
        LinkState {
            id,
            slot,
            phase: Phase::Connecting { by },
            era: Era::Handshake,
            version: String::new(),
            has: Capabilities::default(),
            pid: None,
            generation,
            began: now,
            ready_at: None,
            last_used: now,
            in_flight: 0,
            is_probe,
            fetch: Fetch::default(),
            liveness: Liveness::default(),
            is_recorded: false,
            garbage: 0,
            subscriptions: LinkSubscriptions::default(),
            abandoned: AbandonedCalls::default(),
        }
    }

    /// None unless it is ready. Its calls are not saved; `backends_own` is the offer of its backend.
    pub(super) fn save(&self, backends_own: Option<&Offer>, now: Instant) -> Option<SavedLink> {
        let offer = self.fetch.offer();
        self.is_ready().then(|| SavedLink {
            id: (self.id.backend, self.id.serial),
            slot: self.slot,
            era: self.era,
            version: self.version.clone(),
            has: self.has,
            pid: self.pid,
            generation: self.generation,
            began: Moment::of(self.began, now),
            ready_at: self.ready_at.map(|at| Moment::of(at, now)),
            last_used: Moment::of(self.last_used, now),
            is_probe: self.is_probe,
            offer: (backends_own != Some(offer)).then(|| SavedOffer::of(offer)),
            changed_lists: self.fetch.changed(),
            answered: self.liveness.save(),
            is_recorded: self.is_recorded,
            garbage: self.garbage,
            subscriptions: self.subscriptions.save(now),
            abandoned: self.abandoned.save(now),
        })
    }

    pub(super) fn restore(saved: SavedLink, backends_own: Option<&Offer>, now: Instant) -> LinkState {
        let (backend, serial) = saved.id;
        let offer = saved.offer.map_or_else(|| backends_own.cloned().unwrap_or_default(), SavedOffer::offer);
        LinkState {
            id: Link { backend, serial },
            slot: saved.slot,
            phase: Phase::Ready,
            era: saved.era,
            version: saved.version,
            has: saved.has,
            pid: saved.pid,
            generation: saved.generation,
            began: saved.began.at(now),
            ready_at: saved.ready_at.map(|at| at.at(now)),
            last_used: saved.last_used.at(now),
            in_flight: 0,
            is_probe: saved.is_probe,
            fetch: Fetch::restore(offer, saved.changed_lists, now),
            liveness: Liveness::restore(saved.answered),
            is_recorded: saved.is_recorded,
            garbage: saved.garbage,
            subscriptions: LinkSubscriptions::restore(saved.subscriptions, now),
            abandoned: AbandonedCalls::restore(saved.abandoned, now),
        }
    }

    pub(super) fn id(&self) -> Link {
        self.id
    }

    pub(super) fn slot(&self) -> SlotKey {
        self.slot
    }

    pub(super) fn sharing(&self) -> Sharing {
        self.slot.sharing
    }

    pub(super) fn phase(&self) -> &Phase {
        &self.phase
    }

    pub(super) fn era(&self) -> Era {
        self.era
    }

    pub(super) fn version(&self) -> &str {
        &self.version
    }

    pub(super) fn has(&self) -> Capabilities {
        self.has
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.pid
    }

    pub(super) fn began(&self) -> Instant {
        self.began
    }

    pub(super) fn ready_at(&self) -> Option<Instant> {
        self.ready_at
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(super) fn is_probe(&self) -> bool {
        self.is_probe
    }

    pub(super) fn is_recorded(&self) -> bool {
        self.is_recorded
    }

    pub(super) fn garbage(&self) -> u64 {
        self.garbage
    }

    pub(super) fn is_ready(&self) -> bool {
        self.phase == Phase::Ready
    }

    pub(super) fn is_stopping(&self) -> bool {
        matches!(self.phase, Phase::Stopping { .. })
    }

    /// By when its handshake must be done, while it is not.
    pub(super) fn open_by(&self) -> Option<Instant> {
        match self.phase {
            Phase::Connecting { by } | Phase::Opening { by, .. } => Some(by),
            Phase::Ready | Phase::Draining { .. } | Phase::Stopping { .. } => None,
        }
    }

    /// No call is in flight, no resource is watched and no list is read.
    fn is_idle(&self) -> bool {
        self.in_flight == 0 && !self.subscriptions.is_watching() && self.fetch.is_over()
    }

    pub(super) fn is_unused(&self) -> bool {
        self.is_ready() && self.is_idle()
    }

    /// When it is late, hangs, has been idle for too long, or is to be subscribed to again.
    fn due(&self, idle_stop: Option<Duration>) -> Option<Instant> {
        match self.phase {
            Phase::Connecting { by } | Phase::Opening { by, .. } => Some(by),
            Phase::Draining { until } => Some(until),
            Phase::Ready => {
                let idle_stop = match self.sharing() {
                    Sharing::Borrowed(_) => Some(idle_stop.unwrap_or(BORROWED_IDLE).min(BORROWED_IDLE)),
                    _ => idle_stop,
                };
                let idle = idle_stop.filter(|_| self.is_idle()).map(|idle| self.last_used + idle);
                self.liveness.due().into_iter().chain(idle).chain(self.subscriptions.retry_at()).min()
            }
            Phase::Stopping { .. } => None,
        }
    }

    /// A request of a client is sent on it.
    pub(super) fn begin_call(&mut self, now: Instant) {
        self.in_flight += 1;
        self.is_probe = false;
        self.last_used = now;
    }

    /// A request of a client ended. True if it was the last one.
    pub(super) fn end_call(&mut self, now: Instant) -> bool {
        self.last_used = now;
        self.forget_call();
        self.in_flight == 0
    }

    /// A request of a client was lost with it.
    pub(super) fn forget_call(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Its lists were read.
    pub(super) fn note_used(&mut self, now: Instant) {
        self.last_used = self.last_used.max(now);
    }

    /// The era that is used on this link.
    pub(super) fn set_era(&mut self, era: Era) {
        self.era = era;
    }

    /// What its answer to the handshake says.
    pub(super) fn set_server(&mut self, version: String, has: Capabilities) {
        self.version = version;
        self.has = has;
    }

    /// It refused a handshake. Returns what it answered to the first one, or nothing if this is the first, which is kept then.
    pub(super) fn refused(&mut self, text: &str) -> Option<String> {
        let Phase::Opening { first_refusal, .. } = &mut self.phase else { return None };
        let before = first_refusal.take();
        if before.is_none() {
            *first_refusal = Some(text.to_owned());
        }
        before
    }

    pub(super) fn became_ready(&mut self, now: Instant) {
        self.phase = Phase::Ready;
        self.ready_at = Some(now);
        self.last_used = now;
    }

    /// A record about it. `backend` is the name of its backend.
    pub(super) fn record(&self, backend: &str, event: record::Event) -> Record {
        let (pid, generation) = (self.pid, Some(self.generation));
        Record { id: Some(backend.to_owned()), kind: Some("backend"), pid, generation, ..Record::new(event) }
    }

    pub(super) fn drain(&mut self, until: Instant) {
        self.phase = Phase::Draining { until };
    }
}

impl Gateway {
    /// The serials of some links, in the order in which they were opened.
    pub(super) fn links_where(&self, is_it: impl Fn(&LinkState) -> bool) -> Vec<u64> {
        let found = self.links.iter().filter(|(_, link_state)| is_it(link_state));
        let mut serials: Vec<u64> = found.map(|(serial, _)| *serial).collect();
        serials.sort_unstable();
        serials
    }

    pub(super) fn link_up(&mut self, link: Link, pid: Option<u32>, now: Instant) {
        let Some(link_state) = self.links.get_mut(&link.serial) else { return };
        link_state.pid = pid;
        let Phase::Connecting { by } = link_state.phase else { return };
        link_state.phase = Phase::Opening { by, first_refusal: None };
        self.open_link(link.serial, now);
    }

    /// False if it is not JSON-RPC.
    pub(super) fn link_said(&mut self, link: Link, said: &[u8], now: Instant) -> bool {
        if !self.links.contains_key(&link.serial) {
            return true;
        }
        self.link_said_parsed(link, said, message::parse(said), now)
    }

    /// The same for a message that was parsed before.
    pub(super) fn link_said_parsed(
        &mut self,
        link: Link,
        said: &[u8],
        message: Result<Message<'_>, Unreadable>,
        now: Instant,
    ) -> bool {
        let Some(link_state) = self.links.get_mut(&link.serial) else { return true };
        link_state.liveness.heard();
        let with_handles = message.as_ref().ok().and_then(|message| self.said_with_handles(link.serial, said, message));
        let (said, message) = match &with_handles {
            Some(told) => (&told[..], message::parse_again(told)),
            None => (said, message),
        };
        match message {
            Ok(Message::Response { id, result, error }) => {
                self.answered(link.serial, said, id, result, error, now);
            }
            Ok(Message::Request { params, .. } | Message::Notification { params, .. }) if !params.has_version() => {
                return self.note_garbage(link);
            }
            Ok(Message::Request { id, method, params }) => {
                self.backend_requested(link.serial, said, id, &method, &params, now);
            }
            Ok(Message::Notification { method, params }) => {
                self.link_notified(link.serial, said, &method, &params, now);
            }
            Ok(Message::Batch(members)) => {
                // A client needs to know only once that a resource has changed.
                let mut updated = HashSet::new();
                for member in members {
                    let said = member.get().as_bytes();
                    let message = message::parse_again(said);
                    let is_news = match &message {
                        // A batch in a batch is ignored.
                        Ok(Message::Batch(_)) => false,
                        Ok(Message::Notification { method, params }) if *method == notification::RESOURCE_UPDATED => {
                            params.uri().is_none_or(|uri| updated.insert(uri.get()))
                        }
                        _ => true,
                    };
                    if is_news {
                        self.link_said_parsed(link, said, message, now);
                    }
                }
            }
            Ok(Message::Other) => return self.note_garbage(link),
            Err(unreadable) => {
                if let Some(instead) = unreadable.instead_of_response() {
                    self.link_said(link, &instead, now);
                }
                return self.note_garbage(link);
            }
        }
        true
    }

    fn note_garbage(&mut self, link: Link) -> bool {
        if let Some(link_state) = self.links.get_mut(&link.serial) {
            link_state.garbage += 1;
        }
        false
    }

    /// A message on the HTTP stream of a request.
    pub(super) fn link_said_for(
        &mut self,
        link: Link,
        id: &Id,
        said: &[u8],
        message: Result<Message<'_>, Unreadable>,
        now: Instant,
    ) {
        let is_open = |key: &u64| self.calls.get(key).is_some_and(|call| call.reply_to.is_some());
        self.stream_call = self.key_on(link.serial, id).filter(is_open);
        if self.stream_call.is_some() || !self.is_said_too_late(link.serial, said, &message) {
            // The HTTP side passes on nothing but JSON.
            let _ = self.link_said_parsed(link, said, message, now);
        }
        self.stream_call = None;
    }

    /// Whether a message can only be for a call that is over. It must not reach the client of another call.
    fn is_said_too_late(&mut self, serial: u64, said: &[u8], message: &Result<Message<'_>, Unreadable>) -> bool {
        match message {
            Ok(Message::Request { id, method, .. }) if method != method::PING => {
                if let Some(at) = id.place(said) {
                    let raw = String::from_utf8_lossy(&said[at]);
                    let answer = message::error_line(&raw, -32800, "the call that this was for is over", None);
                    self.tell_link(serial, answer);
                }
                true
            }
            Ok(Message::Notification { method, .. }) => match &**method {
                notification::CANCELLED | notification::RESOURCE_UPDATED => false,
                notification::TASK_STATUS | notification::TASKS => false,
                method => Family::of(method).is_none(),
            },
            _ => false,
        }
    }

    fn link_notified(&mut self, serial: u64, said: &[u8], method: &str, params: &Params<'_>, now: Instant) {
        match method {
            notification::PROGRESS => self.progressed(serial, said, params, now),
            notification::MESSAGE => self.logged(serial, said, params, now),
            notification::CANCELLED => self.link_cancelled(serial, params, now),
            notification::RESOURCE_UPDATED => self.resource_updated(serial, said, params),
            notification::TASK_STATUS | notification::TASKS => self.task_noted(serial, said, params),
            notification::ACKNOWLEDGED => {}
            _ => match Family::of(method) {
                Some(family) => self.refetch(serial, family, now),
                None if methods::is_for_caller(method) => self.forward_notification(serial, said, now),
                None if self.is_shared_server() => self.forward_unknown_notification(serial, said, now),
                None => self.refuse_backend_notification(serial, method),
            },
        }
    }

    pub(super) fn link_down(&mut self, link: Link, how: How, stderr: String, unsent: Vec<Bytes>, now: Instant) {
        let Some(mut link_state) = self.links.remove(&link.serial) else { return };
        // If outlast stopped it, that is the reason, whatever its exit status says.
        let how = match &link_state.phase {
            Phase::Stopping { how } => how.clone(),
            Phase::Draining { .. } if link_state.in_flight == 0 => How::Stopped,
            _ => how,
        };
        let stderr = tail(&stderr, STDERR_BYTES_MAX).to_owned();
        link_state.phase = Phase::Stopping { how: how.clone() };
        // The slot first: the failures of its calls say when the next try is.
        self.slot_emptied(&link_state, &how, stderr.clone(), now);
        let unsent = Unsent { era: link_state.era, lines: unsent };
        self.fail_calls_of_link(link.serial, &how, &stderr, &unsent, now);
        self.drop_requests_of_link(link.serial);
        self.tasks.forget_link(link.serial);
        self.end_if_stopped();
    }

    /// After a stop, the last link is down.
    pub(super) fn end_if_stopped(&mut self) {
        if let Stage::Stopping { .. } = self.stage
            && self.links.is_empty()
        {
            self.stage = Stage::Over;
            self.out.push(Action::Over);
        }
    }

    /// An HTTP link accepts no more requests: its slot is started again, and requests in flight may still be answered.
    pub(super) fn link_failing(&mut self, link: Link, how: How, now: Instant) {
        let Some(mut link_state) = self.links.remove(&link.serial) else { return };
        if !matches!(link_state.phase, Phase::Draining { .. } | Phase::Stopping { .. }) {
            link_state.drain(now + DRAIN_MAX);
            self.slot_emptied(&link_state, &how, String::new(), now);
            link_state.is_recorded = true;
            self.timers.arm(Timer::Links, now + DRAIN_MAX);
        }
        let is_idle = link_state.in_flight == 0;
        self.links.insert(link.serial, link_state);
        if is_idle {
            self.stop_link(link.serial, How::Stopped, false, now);
        }
    }

    /// Ends a link for a reason of the gateway. Its calls in flight fail now.
    pub(super) fn stop_link(&mut self, serial: u64, how: How, at_once: bool, now: Instant) {
        let Some(link_state) = self.links.get_mut(&serial).filter(|link_state| !link_state.is_stopping()) else {
            return;
        };
        link_state.phase = Phase::Stopping { how: how.clone() };
        let (link, unsent) = (link_state.id, Unsent { era: link_state.era, lines: Vec::new() });
        self.fail_calls_of_link(serial, &how, "", &unsent, now);
        self.drop_requests_of_link(serial);
        self.out.push(Action::Disconnect { link, at_once });
    }

    pub(super) fn link_due(&self, link_state: &LinkState) -> Option<Instant> {
        let backend = self.backends.get(&link_state.id.backend);
        link_state.due(backend.and_then(|backend| backend.settings().idle_stop))
    }

    /// The deadline of a link may have changed.
    pub(super) fn arm_link(&mut self, serial: u64) {
        if let Some(due) = self.links.get(&serial).and_then(|link_state| self.link_due(link_state)) {
            self.timers.arm(Timer::Links, due);
        }
    }

    /// Links that are late with their handshake, have drained long enough, hang, or are idle.
    pub(super) fn fail_late_links(&mut self, now: Instant) {
        let is_due = |link_state: &LinkState| self.link_due(link_state).is_some_and(|due| due <= now);
        for serial in self.links_where(is_due) {
            let link_state = self.links.get_mut(&serial).expect("listed above");
            let is_suspicion_due = link_state.liveness.due().is_some_and(|due| due <= now);
            let is_hung = link_state.liveness.is_hung(now);
            let link_state = &self.links[&serial];
            let settings = self.settings_of(link_state.id);
            let start_timeout = settings.map_or(Duration::ZERO, |settings| settings.start_timeout);
            match link_state.phase {
                Phase::Connecting { .. } | Phase::Opening { .. } => {
                    self.stop_link(serial, How::HandshakeLate(start_timeout), true, now);
                }
                Phase::Draining { .. } => self.stop_link(serial, How::Stopped, false, now),
                Phase::Ready if is_hung => self.hung(serial, now),
                // The deadline was noticed late, so it begins anew.
                Phase::Ready if is_suspicion_due => self.arm_link(serial),
                Phase::Ready if link_state.subscriptions.retry_at().is_some_and(|at| at <= now) => {
                    self.reopen_listen(serial, now);
                }
                Phase::Ready => self.stop_link(serial, How::Stopped, false, now),
                Phase::Stopping { .. } => {}
            }
        }
    }

    /// The last call on a link ended.
    pub(super) fn link_became_idle(&mut self, serial: u64, now: Instant) {
        match self.links[&serial].phase {
            Phase::Draining { .. } => self.stop_link(serial, How::Stopped, false, now),
            Phase::Ready if self.stage.is_stopping() => self.stop_link(serial, How::Stopped, false, now),
            Phase::Ready => {
                if matches!(self.links[&serial].sharing(), Sharing::Borrowed(_)) {
                    self.borrowed_link_free(serial, now);
                }
                self.arm_link(serial);
            }
            Phase::Connecting { .. } | Phase::Opening { .. } | Phase::Stopping { .. } => {}
        }
    }

    /// Sends a request of the gateway itself. Returns its number.
    pub(super) fn send_own_request(
        &mut self,
        serial: u64,
        own_request: OwnRequest,
        method: &'static str,
        params: &str,
        era: Era,
        now: Instant,
    ) -> Option<u64> {
        let slot = self.links.get(&serial)?.slot;
        let key = self.ids.number();
        let meta = match era {
            Era::Handshake => String::new(),
            Era::Stateless => format!(r#""_meta":{{{}}}"#, messages::meta_members(None)),
        };
        let comma = if meta.is_empty() || params.is_empty() { "" } else { "," };
        let line = message::request_line(key, method, &format!("{params}{comma}{meta}"));
        // A relay answers every request, so no timeout is needed.
        let timeout = own_request.timeout().filter(|_| !self.is_shared_server());
        let due = timeout.map(|timeout| now + timeout);
        self.calls.insert(
            key,
            Box::new(Call {
                link: Some(serial),
                due,
                ..Call::new(CallKind::Own(own_request), method.into(), slot, Declared::default(), now)
            }),
        );
        if let Some(due) = due {
            self.timers.arm(Timer::Calls, due);
        }
        self.tell_link(serial, line);
        Some(key)
    }
}
