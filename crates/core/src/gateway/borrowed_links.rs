//! Links that calls of the stateless era borrow, because a client of that era has no session that could own one.
//!
//! With `children = "per_session"` such a call runs on a link that no client with another name has used. If the
//! client can be asked for input, no other call runs there meanwhile, so that a question can only belong to this call.
//! Between calls a link waits for the next call of the same client.

use std::{
    cmp::Reverse,
    time::{Duration, Instant},
};

use super::{
    Gateway,
    clients::Declared,
    links::LinkState,
    messages::Failure,
    slots::{Sharing, SlotKey, SlotState},
};
use crate::exit::How;

/// How many slots of one backend may be borrowed at a time. One more call waits for a free one, and fails if all are
/// used by other clients.
pub(super) const BORROWED_MAX: usize = 16;
/// How long an unused one is kept, unless `idle_stop` is shorter.
pub(super) const BORROWED_IDLE: Duration = Duration::from_secs(60);

impl Gateway {
    /// A slot for one more call of a client of the stateless era.
    pub(super) fn borrow_slot(
        &mut self,
        backend: u32,
        name: &str,
        declared: Declared,
        now: Instant,
    ) -> Result<SlotKey, Box<Failure>> {
        let is_borrowed = |key: &SlotKey| key.backend == backend && matches!(key.sharing, Sharing::Borrowed(_));
        let all = self.slots_where(is_borrowed);
        let own = all.iter().filter(|key| self.slots[key].borrower() == Some(name));
        let last_own = own.clone().next_back().copied();
        let fitting = own.filter(|key| self.may_join(**key, declared, now));
        if let Some(key) = fitting.max_by_key(|key| (self.serving(**key).is_some(), Reverse(**key))) {
            return Ok(*key);
        }
        let max = self.backends[&backend].settings().children_max;
        let is_at_max = self.own_processes(backend) >= max;
        // A slot of another client without calls makes room.
        if (all.len() >= BORROWED_MAX || is_at_max) && !self.drop_free_borrowed(backend, now) {
            let busy = || match is_at_max {
                true => Failure::children_max(self.backends.name(backend), max).into(),
                false => Failure::all_borrowed(self.backends.name(backend), BORROWED_MAX).into(),
            };
            return last_own.ok_or_else(busy);
        }
        let key = SlotKey { backend, sharing: Sharing::Borrowed(self.ids.number()) };
        self.make_slot(key, None);
        if let Some(slot) = self.slots.get_mut(&key) {
            slot.set_borrower(name);
        }
        Ok(key)
    }

    /// Removes a borrowed slot without calls, so that another process can be started. False if there is none.
    pub(super) fn drop_free_borrowed(&mut self, backend: u32, now: Instant) -> bool {
        let is_borrowed = |key: &&SlotKey| key.backend == backend && matches!(key.sharing, Sharing::Borrowed(_));
        let free = self.slots.keys().filter(is_borrowed).find(|key| self.is_free(**key)).copied();
        free.into_iter().for_each(|key| self.drop_slot(key, &Failure::stopping(""), now));
        free.is_some()
    }

    /// No call is in flight or held there.
    fn is_free(&self, key: SlotKey) -> bool {
        let slot = &self.slots[&key];
        slot.held() == 0 && self.borrowed_link(key).is_none_or(|link_state| link_state.in_flight() == 0)
    }

    fn borrowed_link(&self, key: SlotKey) -> Option<&LinkState> {
        self.links.get(&self.slots.get(&key)?.links.child()?)
    }

    /// Whether a call can be sent at once. A call that can be asked for input must be alone; calls that cannot be asked
    /// share a link.
    fn may_join(&self, key: SlotKey, declared: Declared, now: Instant) -> bool {
        if self.borrowed_link(key).is_some_and(|link_state| link_state.is_stopping()) {
            return false;
        }
        match declared.can_be_asked() {
            true => {
                self.is_free(key) && self.borrowed_link(key).is_none_or(|link_state| !link_state.abandoned.has_any(now))
            }
            false => !self.is_exclusive(key) && self.slots[&key].held() == 0,
        }
    }

    /// A call that can be asked for input is in flight there.
    pub(super) fn is_exclusive(&self, key: SlotKey) -> bool {
        let Some(link_state) = self.borrowed_link(key).filter(|link_state| link_state.in_flight() > 0) else {
            return false;
        };
        let serial = Some(link_state.id().serial);
        self.calls.values().any(|call| call.link == serial && call.declared.can_be_asked())
    }

    /// Whether a call has to wait for the calls in flight there.
    pub(super) fn must_wait(&self, key: SlotKey, declared: Declared, now: Instant) -> bool {
        matches!(key.sharing, Sharing::Borrowed(_))
            && self.borrowed_link(key).is_some_and(|link_state| match declared.can_be_asked() {
                true => link_state.in_flight() > 0 || link_state.abandoned.has_any(now),
                false => self.is_exclusive(key),
            })
    }

    /// No call is in flight there any more: the calls that it holds are sent.
    pub(super) fn borrowed_link_free(&mut self, serial: u64, now: Instant) {
        let link_state = &self.links[&serial];
        let (key, has_abandoned) = (link_state.slot(), link_state.abandoned.has_any(now));
        let first = self.slots.get(&key).and_then(SlotState::first_held);
        let is_waited_for =
            first.is_some_and(|key| self.calls.get(&key).is_some_and(|call| call.declared.can_be_asked()));
        match has_abandoned && is_waited_for {
            true => self.stop_link(serial, How::Stopped, false, now),
            false => self.release_held(key, now),
        }
    }
}
