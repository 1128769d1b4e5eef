//! When a link counts as hung, as unresponsive or as too large, and is replaced.
//! Late calls themselves fail in [`super::failed_calls`].

use std::time::{Duration, Instant};

use crate::{
    exit::How,
    mcp::method,
    patience::Patience,
    record::{self, Record},
};

use super::{Action, Era, Gateway, Link, Timer, opening::OwnRequest, slots::SlotKey};

/// How long a process may send nothing at all after a call was late; then it counts as hung and is replaced.
pub(super) const HANG_MAX: Duration = Duration::from_secs(5);

/// Whether a link answers.
#[derive(Debug, Default)]
pub(super) struct Liveness {
    suspicion: Option<Suspicion>,
    /// The number that was to be given next when it last answered a client's request, or reported progress.
    answered: u64,
    /// A call was late, and nothing was answered since it was sent.
    is_unresponsive: bool,
}

/// A call was late or cancelled, and the link has sent nothing since.
#[derive(Debug)]
struct Suspicion {
    patience: Patience,
    /// If it hangs, another link is opened beside it, and its other calls may finish.
    drains: bool,
}

impl Liveness {
    /// It sent something.
    pub(super) fn heard(&mut self) {
        self.suspicion = None;
    }

    /// It answered a client's request or reported progress, when `next` was the next number.
    pub(super) fn answered(&mut self, next: u64) {
        self.answered = next;
        self.is_unresponsive = false;
    }

    /// The number that it last answered at. A suspicion is not saved: a link that hangs is suspected again by its next call.
    pub(super) fn save(&self) -> u64 {
        self.answered
    }

    pub(super) fn restore(answered: u64) -> Liveness {
        Liveness { answered, ..Liveness::default() }
    }

    pub(super) fn is_suspected(&self) -> bool {
        self.suspicion.is_some()
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.suspicion.as_ref().map(|suspicion| suspicion.patience.deadline())
    }

    /// It sent nothing in time. A deadline that outlast itself missed begins anew, once.
    pub(super) fn is_hung(&mut self, now: Instant) -> bool {
        self.suspicion.as_mut().is_some_and(|suspicion| suspicion.patience.is_over(now))
    }
}

impl Gateway {
    /// A call was late or cancelled. A process that sends nothing at all for a while after that hangs; it may still work on
    /// other calls if the call was cancelled. An HTTP backend lost one request, and a shared server has a relay that decides this.
    pub(super) fn suspect(&mut self, serial: u64, is_cancelled: bool, now: Instant) {
        let Some(link_state) = self.links.get_mut(&serial) else { return };
        let is_process = self
            .backends
            .get(&link_state.id().backend)
            .is_some_and(|backend| !backend.is_http() && !backend.is_shared());
        if !is_process || !link_state.is_ready() || link_state.liveness.is_suspected() {
            return;
        }
        let patience = Patience::new(HANG_MAX, now);
        link_state.liveness.suspicion = Some(Suspicion { patience, drains: is_cancelled });
        self.timers.arm(Timer::Links, now + HANG_MAX);
        // A ping makes a process that works send something. The stateless era has no ping.
        let (method, era) = match self.links[&serial].era() {
            Era::Handshake => (method::PING, Era::Handshake),
            Era::Stateless => (method::DISCOVER, Era::Stateless),
        };
        self.send_own_request(serial, OwnRequest::Ping, method, "", era, now);
    }

    /// A call was late. If every other call since then was too, the link is unresponsive even if it answers a ping. A link
    /// that is slow at one call and answers others is left alone.
    pub(super) fn note_unresponsive(&mut self, serial: u64, key: u64) {
        if let Some(link_state) = self.links.get_mut(&serial) {
            let liveness = &mut link_state.liveness;
            liveness.is_unresponsive = liveness.answered <= key;
        }
    }

    /// The ping was answered, or was late while the link sent something else.
    pub(super) fn ping_answered(&mut self, serial: u64, now: Instant) {
        let Some(link_state) = self.links.get_mut(&serial) else { return };
        let slot = link_state.slot();
        let is_unresponsive = std::mem::take(&mut link_state.liveness.is_unresponsive);
        if !is_unresponsive || !link_state.is_ready() || self.stage.is_stopping() {
            return;
        }
        if self.replace_once(slot, now) {
            self.slots.get_mut(&slot).expect("it was just replaced").mark_unresponsive();
            let name = self.backends.name(slot.backend);
            self.note(format!("{name}: answers pings but has answered no call since a late one; it is replaced"));
        }
    }

    /// Opens another link beside a link that counts as hung or too large, unless that was done a short while ago.
    fn replace_once(&mut self, slot: SlotKey, now: Instant) -> bool {
        self.slots.get_mut(&slot).is_some_and(|slot| slot.may_replace(now)) && self.replace(slot, now)
    }

    pub(super) fn hung(&mut self, serial: u64, now: Instant) {
        let link_state = &self.links[&serial];
        let slot = link_state.slot();
        let drains = link_state.liveness.suspicion.as_ref().is_some_and(|suspicion| suspicion.drains);
        let name = self.backends.name(slot.backend).to_owned();
        let detail = format!("it has sent nothing for {} s since a call was late or cancelled", HANG_MAX.as_secs());
        let record = link_state.record(&name, record::Event::ServerHung);
        self.out.push(Action::Record(Record { detail: Some(detail), ..record }));
        self.note(format!("{name}: sends nothing any more; it is replaced"));
        if drains && self.replace_once(slot, now) {
            if let Some(link_state) = self.links.get_mut(&serial) {
                link_state.liveness.heard();
            }
            return;
        }
        self.stop_link(serial, How::Hung(HANG_MAX), true, now);
    }

    /// A process above its limit of memory is replaced: another one is started beside it.
    pub(super) fn measured(&mut self, link: Link, rss: u64, now: Instant) {
        let Some(backend) = self.backends.get(&link.backend) else { return };
        let Some(max) = backend.settings().memory_max.filter(|max| rss > *max) else { return };
        let name = backend.settings().name.clone();
        let Some(link_state) = self.links.get(&link.serial) else { return };
        let (slot, record) = (link_state.slot(), link_state.record(&name, record::Event::ServerTooLarge));
        if self.stage.is_stopping() || !link_state.is_ready() {
            return;
        }
        if self.replace_once(slot, now) {
            let mib = |bytes: u64| bytes.div_ceil(1 << 20);
            let detail = format!("it uses {} MiB, more than {} MiB", mib(rss), mib(max));
            self.note(format!("{name}: {detail}; it is replaced"));
            self.out.push(Action::Record(Record { detail: Some(detail), ..record }));
        }
    }
}
