//! Links that are lent to clients of the stateless era, which have no session that could have one of its own.
//!
//! With `children = "per_session"` a call of such a client runs on a link that nobody of another name has used, and if the
//! client can be asked anything, one that works on nothing else meanwhile: so whatever is asked there can only be for this
//! call. Between calls a link waits for the next one of the same name.

use std::cmp::Reverse;

use super::*;

use words::Failure;

/// How many links of one backend may be lent at a time; a call beyond that waits for one to be free, and fails if all are
/// at work for other names.
pub(super) const LOANS_MAX: usize = 16;
/// How long one that nobody needs is kept, unless `idle_stop` is shorter.
pub(super) const LOAN_IDLE: Duration = Duration::from_secs(60);

impl Gateway {
    /// A place for one more call of somebody of the stateless era.
    pub(super) fn lend(
        &mut self,
        backend: u32,
        name: &str,
        says: Says,
        now: Instant,
    ) -> Result<PlaceKey, Box<Failure>> {
        let is_lent = |key: &&PlaceKey| key.backend == backend && matches!(key.seat, Seat::Lent(_));
        let all: Vec<PlaceKey> = self.places.keys().filter(is_lent).copied().collect();
        let own = all.iter().filter(|key| self.places[key].tenant.as_deref() == Some(name));
        let last_own = own.clone().next_back().copied();
        let fitting = own.filter(|key| self.may_join(**key, says, now));
        if let Some(key) = fitting.max_by_key(|key| (self.serving(**key).is_some(), Reverse(**key))) {
            return Ok(*key);
        }
        let max = self.owners[&backend].settings.children_max;
        let is_at_max = self.own_processes(backend) >= max;
        // Another's that does nothing makes room.
        if (all.len() >= LOANS_MAX || is_at_max) && !self.drop_free_loan(backend, now) {
            let busy = || match is_at_max {
                true => Failure::children_max(self.owner_name(backend), max).into(),
                false => Failure::all_lent(self.owner_name(backend), LOANS_MAX).into(),
            };
            return last_own.ok_or_else(busy);
        }
        let name = name.into();
        let key = PlaceKey { backend, seat: Seat::Lent(self.number()) };
        self.make_place(key, places::State::Idle);
        if let Some(place) = self.places.get_mut(&key) {
            place.tenant = Some(name);
        }
        Ok(key)
    }

    /// Ends a lent link that does nothing, so that another process can be started. False if there is none.
    pub(super) fn drop_free_loan(&mut self, backend: u32, now: Instant) -> bool {
        let is_lent = |key: &&PlaceKey| key.backend == backend && matches!(key.seat, Seat::Lent(_));
        let free = self.places.keys().filter(is_lent).find(|key| self.is_free(**key)).copied();
        free.into_iter().for_each(|key| self.drop_place(key, &Failure::stopping(""), now));
        free.is_some()
    }

    /// Nobody's call is there, under way or waiting.
    fn is_free(&self, key: PlaceKey) -> bool {
        let place = &self.places[&key];
        place.held.is_empty() && self.lent_link(key).is_none_or(|connection| connection.in_flight == 0)
    }

    fn lent_link(&self, key: PlaceKey) -> Option<&Connection> {
        self.links.get(&self.places.get(&key)?.current()?)
    }

    /// Whether a call need not wait for those that are there. One that can be asked something must be alone; those that
    /// cannot need not be told apart.
    fn may_join(&self, key: PlaceKey, says: Says, now: Instant) -> bool {
        if self.lent_link(key).is_some_and(|connection| matches!(connection.phase, links::Phase::Stopping { .. })) {
            return false;
        }
        match says.can_be_asked() {
            true => self.is_free(key) && self.lent_link(key).is_none_or(|connection| !connection.is_haunted(now)),
            false => !self.is_lent_out(key) && self.places[&key].held.is_empty(),
        }
    }

    /// A call that can be asked something is there.
    pub(super) fn is_lent_out(&self, key: PlaceKey) -> bool {
        let Some(connection) = self.lent_link(key).filter(|connection| connection.in_flight > 0) else { return false };
        let serial = Some(connection.link.serial);
        self.calls.values().any(|call| call.link == serial && call.says.can_be_asked())
    }

    /// Whether a call has to wait until those that are there are over.
    pub(super) fn must_wait(&self, key: PlaceKey, says: Says, now: Instant) -> bool {
        matches!(key.seat, Seat::Lent(_))
            && self.lent_link(key).is_some_and(|connection| match says.can_be_asked() {
                true => connection.in_flight > 0 || connection.is_haunted(now),
                false => self.is_lent_out(key),
            })
    }

    /// All that was there is over: whoever waits is next.
    pub(super) fn loan_over(&mut self, serial: u64, now: Instant) {
        let connection = &self.links[&serial];
        let (key, is_haunted) = (connection.place, connection.is_haunted(now));
        let first = self.places.get(&key).and_then(|place| place.held.front());
        let is_waited_for = first.is_some_and(|key| self.calls.get(key).is_some_and(|call| call.says.can_be_asked()));
        match is_haunted && is_waited_for {
            true => self.part(serial, How::Stopped, false, now),
            false => self.release(key, now),
        }
    }
}
