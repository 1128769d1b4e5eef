//! Slots: a slot is filled by one link after another, as the restart policy decides. A shared backend has one, a pool one for
//! each process, a session one of its own.
//! What a link does while it fills a slot is in [`super::links`].

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
    time::Instant,
};

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    exit::{self, Cause, How},
    record::{self, Record},
    restarts::{Policy, Verdict},
    saved::Moment,
    slot::{Current, Slot, Until},
};

use super::{
    Action, Backend, Children, Client, Era, EraChoice, Gateway, Link, Start, Ticket, Timer,
    backends::Eras,
    borrowed_links,
    calls::ReplyTo,
    clients::Declared,
    links::{DRAIN_MAX, LinkState, REPLACE_GAP},
    messages::{Failure, Next},
    saved::{SavedLastEnd, SavedSlot},
};

/// Which clients use a slot of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Sharing {
    /// All clients.
    Shared,
    /// All clients of the handshake era, where the shared slot is of the stateless era.
    Handshake,
    Pool(u32),
    /// One session.
    Session(Client),
    /// Calls of one client of the stateless era. The number tells the slots of a backend apart.
    Borrowed(u64),
}

impl Sharing {
    /// It is for one session or one client, and never made again under the same key.
    fn is_own(self) -> bool {
        matches!(self, Sharing::Session(_) | Sharing::Borrowed(_))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct SlotKey {
    pub(super) backend: u32,
    pub(super) sharing: Sharing,
}

pub(super) type Slots = BTreeMap<SlotKey, SlotState>;

/// A slot and what waits for it. Its links are known by their serials.
#[derive(Debug)]
pub(super) struct SlotState {
    /// Its links: the one that fills it, the candidate, when the next one is opened.
    pub(super) links: Slot<u64>,
    /// Calls that wait for a link, in the order in which they came.
    held: VecDeque<u64>,
    /// When the rest of the calls is sent, if they were too large to be sent at once. New calls wait behind them.
    release_at: Option<Instant>,
    last_end: Option<LastEnd>,
    /// The end of the last candidate that did not become ready.
    failed_reload: Option<LastEnd>,
    /// Operators that wait for the restart that is under way.
    tickets: Vec<Ticket>,
    /// Counts the links it had.
    generation: u64,
    /// When its link was last replaced because it was too large or answered nothing.
    replaced_at: Option<Instant>,
    /// The candidate is there because the link that serves answers no calls.
    is_unresponsive: bool,
    /// The name of the client that borrows it.
    borrower: Option<Box<str>>,
}

#[derive(Debug)]
pub(super) struct LastEnd {
    pub(super) how: How,
    pub(super) stderr: String,
    pub(super) at: Instant,
}

impl LastEnd {
    fn save(&self, now: Instant) -> SavedLastEnd {
        SavedLastEnd { how: self.how.clone(), stderr: self.stderr.clone(), at: Moment::of(self.at, now) }
    }

    fn restore(saved: SavedLastEnd, now: Instant) -> LastEnd {
        LastEnd { how: saved.how, stderr: saved.stderr, at: saved.at.at(now) }
    }
}

impl SlotState {
    fn new(settings: &Backend, seed: u64, generation: u64) -> SlotState {
        SlotState {
            links: Slot::new(settings.policy.clone(), seed),
            held: VecDeque::new(),
            release_at: None,
            last_end: None,
            failed_reload: None,
            tickets: Vec::new(),
            generation,
            replaced_at: None,
            is_unresponsive: false,
            borrower: None,
        }
    }

    /// None while it has a candidate. Calls and operators that wait are not saved.
    pub(super) fn save(&self, key: SlotKey, now: Instant) -> Option<SavedSlot> {
        Some(SavedSlot {
            key,
            links: self.links.save(now)?,
            last_end: self.last_end.as_ref().map(|end| end.save(now)),
            failed_reload: self.failed_reload.as_ref().map(|end| end.save(now)),
            generation: self.generation,
            replaced_at: self.replaced_at.map(|at| Moment::of(at, now)),
            borrower: self.borrower.as_deref().map(str::to_owned),
        })
    }

    pub(super) fn restore(policy: Policy, saved: SavedSlot, now: Instant) -> SlotState {
        SlotState {
            links: Slot::restore(policy, saved.links, now),
            held: VecDeque::new(),
            release_at: None,
            last_end: saved.last_end.map(|end| LastEnd::restore(end, now)),
            failed_reload: saved.failed_reload.map(|end| LastEnd::restore(end, now)),
            tickets: Vec::new(),
            generation: saved.generation,
            replaced_at: saved.replaced_at.map(|at| at.at(now)),
            is_unresponsive: false,
            borrower: saved.borrower.map(Into::into),
        }
    }

    /// Its link was not handed over. Another one is opened at once, which is no restart.
    pub(super) fn open_again(&mut self, now: Instant) {
        self.links.go_down(now);
        self.links.rested();
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) fn last_end(&self) -> Option<&LastEnd> {
        self.last_end.as_ref()
    }

    pub(super) fn failed_reload(&self) -> Option<&LastEnd> {
        self.failed_reload.as_ref()
    }

    /// Why it was given up, if it was.
    pub(super) fn given_up(&self) -> Option<String> {
        let Current::GivenUp { crashes: Some(crashes), .. } = self.links.current() else { return None };
        let last = self.last_end.as_ref().map(|end| format!(", the last one: {}", end.how)).unwrap_or_default();
        Some(format!("{}{last}", crashes.words("within")))
    }

    /// It waits for another try after its backend did not accept our credentials. A call does not wait for that.
    pub(super) fn is_unauthorized(&self, now: Instant) -> bool {
        matches!(self.links.current(), Current::Down { at } if *at > now) && self.denied().is_some()
    }

    /// Why its backend refused our credentials the last time.
    pub(super) fn denied(&self) -> Option<&exit::Denied> {
        match self.last_end.as_ref().map(|end| &end.how) {
            Some(How::Unauthorized(denied)) => Some(denied),
            _ => None,
        }
    }

    /// Calls or operators wait for a link.
    pub(super) fn is_needed(&self) -> bool {
        !self.held.is_empty() || !self.tickets.is_empty()
    }

    /// It is started at once unless a link fills it. True if it was not filled.
    pub(super) fn start_now(&mut self, now: Instant) -> bool {
        let is_empty = self.links.child().is_none();
        if is_empty {
            self.links.go_down(now);
        }
        is_empty
    }

    /// It is started if it is idle. True if it was.
    pub(super) fn wake(&mut self, now: Instant) -> bool {
        self.links.is_idle() && self.start_now(now)
    }

    /// It is not started any more.
    pub(super) fn cancel_start(&mut self) {
        if self.links.due().is_some() {
            self.links.rest();
        }
    }

    /// Its link is to be drained and another one started, if it had one or was waiting.
    pub(super) fn start_anew(&mut self, now: Instant) -> Option<u64> {
        let current = self.links.child();
        self.links.forgive();
        if !self.links.is_idle() {
            self.links.go_down(now);
        }
        current
    }

    /// No link fills it any more. Another one is opened if something waits for it.
    pub(super) fn detach(&mut self, now: Instant) {
        match self.is_needed() {
            true => self.links.go_down(now),
            false => self.links.rest(),
        }
    }

    /// The link that serves answers no calls, and is replaced for that reason.
    pub(super) fn mark_unresponsive(&mut self) {
        self.is_unresponsive = true;
    }

    /// Whether its link may be replaced because of what was observed. A link that fails at every look is not replaced at
    /// every look.
    pub(super) fn may_replace(&mut self, now: Instant) -> bool {
        let is_soon = self.replaced_at.is_some_and(|last| now.saturating_duration_since(last) < REPLACE_GAP);
        if !is_soon {
            self.replaced_at = Some(now);
        }
        !is_soon
    }

    // ---- what waits for it ---------------------------------------------------------------------

    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    pub(super) fn first_held(&self) -> Option<u64> {
        self.held.front().copied()
    }

    /// A call waits for a link. True if the slot was idle and is to be started.
    pub(super) fn hold(&mut self, call: u64, now: Instant) -> bool {
        self.held.push_back(call);
        self.wake(now)
    }

    /// A call waits no longer.
    pub(super) fn unhold(&mut self, call: u64) {
        self.held.retain(|held| *held != call);
    }

    pub(super) fn take_held(&mut self) -> VecDeque<u64> {
        mem::take(&mut self.held)
    }

    pub(super) fn release_at(&self) -> Option<Instant> {
        self.release_at
    }

    pub(super) fn set_release_at(&mut self, at: Option<Instant>) {
        self.release_at = at;
    }

    /// These calls wait on, in this order.
    pub(super) fn set_held(&mut self, held: VecDeque<u64>) {
        self.held = held;
    }

    pub(super) fn add_tickets(&mut self, tickets: &[Ticket]) {
        self.tickets.extend(tickets);
    }

    pub(super) fn take_tickets(&mut self) -> Vec<Ticket> {
        mem::take(&mut self.tickets)
    }

    // ---- its borrower --------------------------------------------------------------------------

    pub(super) fn borrower(&self) -> Option<&str> {
        self.borrower.as_deref()
    }

    pub(super) fn set_borrower(&mut self, name: &str) {
        self.borrower = Some(name.into());
    }
}

impl Gateway {
    pub(super) fn slots_where(&self, is_it: impl Fn(&SlotKey) -> bool) -> Vec<SlotKey> {
        self.slots.keys().filter(|key| is_it(key)).copied().collect()
    }

    pub(super) fn slots_of(&self, backend: u32) -> impl Iterator<Item = (&SlotKey, &SlotState)> {
        self.slots.iter().filter(move |(key, _)| key.backend == backend)
    }

    /// How many processes of a backend are for one session or one client each.
    pub(super) fn own_processes(&self, backend: u32) -> usize {
        self.slots_of(backend).filter(|(key, slot)| key.sharing.is_own() && !slot.links.is_idle()).count()
    }

    /// The slot that a call goes to. It is made if there is none.
    pub(super) fn slot_for(
        &mut self,
        backend: u32,
        reply_to: &ReplyTo,
        declared: Declared,
        now: Instant,
    ) -> Result<SlotKey, Box<Failure>> {
        let ReplyTo { client, era, .. } = *reply_to;
        let Some(state) = self.backends.get(&backend) else { return Ok(SlotKey { backend, sharing: Sharing::Shared }) };
        // A backend without sessions keeps nothing for one client.
        let is_stateless =
            state.settings().era == EraChoice::Stateless || state.eras().is_some_and(|eras| eras.stateless);
        let sharing = match state.settings().children {
            Children::PerSession if era == Era::Handshake => {
                self.make_room(backend, client, now)?;
                Sharing::Session(client)
            }
            Children::PerSession if !is_stateless => {
                let name = self.clients.name(client).to_owned();
                return self.borrow_slot(backend, &name, declared, now);
            }
            Children::Pool(size) => self.pool_slot(backend, size.max(1)),
            Children::Shared | Children::PerSession => match state.eras() {
                Some(Eras::BOTH) if era == Era::Handshake => Sharing::Handshake,
                _ => Sharing::Shared,
            },
        };
        let key = SlotKey { backend, sharing };
        self.make_slot(key, None);
        Ok(key)
    }

    /// Room for the process of one session, within `children_max`.
    fn make_room(&mut self, backend: u32, client: Client, now: Instant) -> Result<(), Box<Failure>> {
        let is_started = |slot: &SlotState| !slot.links.is_idle();
        if self.slots.get(&SlotKey { backend, sharing: Sharing::Session(client) }).is_some_and(is_started) {
            return Ok(());
        }
        let max = self.backends[&backend].settings().children_max;
        if self.own_processes(backend) < max || self.drop_free_borrowed(backend, now) {
            return Ok(());
        }
        Err(Failure::children_max(self.backends.name(backend), max).into())
    }

    /// Makes a slot if there is none. It is started then, or by the first call.
    pub(super) fn make_slot(&mut self, key: SlotKey, start_at: Option<Instant>) {
        let Some(backend) = self.backends.get(&key.backend) else { return };
        if self.slots.contains_key(&key) {
            return;
        }
        let seed = self.ids.slot_seed();
        let mut slot = SlotState::new(backend.settings(), seed, self.ids.generation(key));
        start_at.into_iter().for_each(|at| slot.links.go_down(at));
        self.slots.insert(key, slot);
    }

    /// The least busy one that serves; a new one while all are busy and there is room for it.
    fn pool_slot(&mut self, backend: u32, size: u32) -> Sharing {
        let key = |index| SlotKey { backend, sharing: Sharing::Pool(index) };
        let load = |index: u32| {
            let serial = self.serving(key(index))?;
            Some((self.links[&serial].in_flight(), index))
        };
        let best = (0..size).filter_map(load).min();
        let free = (0..size).find(|index| self.slots.get(&key(*index)).is_none_or(|slot| slot.links.is_idle()));
        let index = match (best, free) {
            (Some((0, index)), _) => index,
            (_, Some(index)) => index,
            (Some((_, index)), None) => index,
            (None, None) => {
                // None serves: calls wait for each in turn, except for those that were given up.
                let turn = self.backends.get_mut(&backend).expect("asked for its slot").next_turn(size);
                let is_given_up =
                    |index: &u32| self.slots.get(&key(*index)).is_some_and(|slot| slot.links.is_given_up());
                let mut in_turn = (0..size).map(|step| (turn + step) % size);
                in_turn.find(|index| !is_given_up(index)).unwrap_or(turn)
            }
        };
        Sharing::Pool(index)
    }

    /// The slot whose link is asked what a backend offers.
    pub(super) fn first_slot(&self, backend: u32) -> SlotKey {
        let sharing = match self.backends.get(&backend).map(|backend| backend.settings().children) {
            Some(Children::Pool(_)) => Sharing::Pool(0),
            _ => Sharing::Shared,
        };
        SlotKey { backend, sharing }
    }

    pub(super) fn start_due_slots(&mut self, now: Instant) {
        let is_due = |slot: &SlotState| slot.links.due().is_some_and(|at| at <= now);
        for key in self.slots_where(|key| is_due(&self.slots[key])) {
            let by = now + self.backends[&key.backend].settings().start_timeout;
            let is_probe = self.is_probe(key);
            let serial = self.connect(key, by, is_probe, now);
            let slot = self.slots.get_mut(&key).expect("listed above");
            slot.links.fill(serial, now);
        }
    }

    /// Whether a lazy backend is started only to read what it offers: no request needs it.
    fn is_probe(&self, key: SlotKey) -> bool {
        let is_lazy = self.backends.get(&key.backend).is_some_and(|backend| backend.settings().start == Start::Lazy);
        is_lazy && !self.slots.get(&key).is_some_and(SlotState::is_needed) && !self.offer_waits.is_for(key.backend)
    }

    /// The offer of a lazy backend was read; if no request has needed its process, it is stopped.
    pub(super) fn end_probe(&mut self, serial: u64, now: Instant) {
        if self.links.get(&serial).is_some_and(|link_state| link_state.is_probe() && link_state.is_unused()) {
            self.stop_link(serial, How::Stopped, false, now);
        }
    }

    /// Something needs this slot: it is started if it is idle.
    pub(super) fn wake_slot(&mut self, key: SlotKey, now: Instant) {
        self.starts_due |= self.slots.get_mut(&key).is_some_and(|slot| slot.wake(now));
    }

    /// Opens a link for a slot. It is stopped if it is not ready in time.
    pub(super) fn connect(&mut self, key: SlotKey, by: Instant, is_probe: bool, now: Instant) -> u64 {
        let serial = self.ids.number();
        let link = Link { backend: key.backend, serial };
        let slot = self.slots.get_mut(&key).expect("links are opened for slots");
        slot.generation += 1;
        self.links.insert(serial, LinkState::new(link, key, slot.generation, by, is_probe, now));
        self.out.push(Action::Connect { link });
        self.timers.arm(Timer::Links, by);
        serial
    }

    /// A new link beside the one that serves. False if there is a candidate already, or if none serves.
    pub(super) fn replace(&mut self, key: SlotKey, now: Instant) -> bool {
        if self.slots.get(&key).is_none_or(|slot| slot.links.candidate().is_some()) || self.serving(key).is_none() {
            return false;
        }
        let by = now + self.backends[&key.backend].settings().start_timeout;
        let serial = self.connect(key, by, false, now);
        self.slots.get_mut(&key).expect("found above").links.set_candidate(serial);
        true
    }

    /// A link finished its handshake.
    pub(super) fn slot_filled(&mut self, serial: u64, now: Instant) {
        let Some(link_state) = self.links.get_mut(&serial) else { return };
        link_state.became_ready(now);
        let (key, pid, began) = (link_state.slot(), link_state.pid(), link_state.began());
        let Some(slot) = self.slots.get_mut(&key) else { return };
        let replaced = slot.links.child().filter(|_| slot.links.candidate() == Some(serial));
        slot.links.serve(serial, now);
        let tickets = slot.take_tickets();
        let (generation, restarts) = (slot.generation, slot.links.restarts().restarts());
        let replaces_unresponsive = mem::take(&mut slot.is_unresponsive);
        if let Some(backend) = self.backends.get_mut(&key.backend) {
            backend.link_ready(replaces_unresponsive);
            let record = Record {
                id: Some(backend.settings().name.clone()),
                kind: Some("backend"),
                pid,
                generation: Some(generation),
                restarts: Some(restarts),
                took: Some(now.saturating_duration_since(began)),
                ..Record::new(record::Event::ServerStarted)
            };
            self.out.push(Action::Record(record));
        }
        for ticket in tickets {
            let done = json!({"backend": self.backends.name(key.backend), "generation": generation, "pid": pid});
            self.ticket_done(ticket, Ok(done));
        }
        if let Some(old) = replaced {
            self.drain(old, now);
        }
        self.release_held(key, now);
        self.arm_link(serial);
    }

    /// A link finishes its calls, and is stopped then.
    pub(super) fn drain(&mut self, serial: u64, now: Instant) {
        let Some(link_state) = self.links.get_mut(&serial) else { return };
        link_state.drain(now + DRAIN_MAX);
        if link_state.in_flight() == 0 {
            self.stop_link(serial, How::Stopped, false, now);
        } else {
            self.timers.arm(Timer::Links, now + DRAIN_MAX);
        }
    }

    /// A link is gone: the one that filled a slot, the candidate, or one that was replaced before.
    pub(super) fn slot_emptied(&mut self, link_state: &LinkState, how: &How, stderr: String, now: Instant) {
        let key = link_state.slot();
        let serial = Some(link_state.id().serial);
        let Some(slot) = self.slots.get_mut(&key) else { return self.record_replaced_end(link_state, how, now) };
        if slot.links.candidate() == serial {
            slot.links.take_candidate();
            if !self.trial_failed(link_state, how, &stderr, now) {
                self.candidate_failed(link_state, how, stderr, now);
            }
        } else if slot.links.child() == serial {
            self.serving_link_ended(link_state, how, stderr, now);
        } else {
            self.record_replaced_end(link_state, how, now);
        }
    }

    /// A restart that an operator asked for, or that a process needed, failed; the link before it serves on.
    fn candidate_failed(&mut self, link_state: &LinkState, how: &How, stderr: String, now: Instant) {
        let key = link_state.slot();
        let name = self.backends.name(key.backend).to_owned();
        let slot = self.slots.get_mut(&key).expect("it has a candidate");
        let tickets = slot.take_tickets();
        slot.failed_reload = Some(LastEnd { how: how.clone(), stderr, at: now });
        if !self.stage.is_stopping() {
            let detail = Some(format!("the new server did not start ({how}); the old one keeps serving"));
            let record = link_state.record(&name, record::Event::ReloadFailed);
            self.out.push(Action::Record(Record { detail, ..record }));
        }
        for ticket in tickets {
            self.ticket_done(
                ticket,
                Err(format!(
                    "{name} was not restarted: the new server did not start ({how}); the old one keeps serving"
                )),
            );
        }
    }

    /// The policy decides when the slot is started again. Calls wait for that, or fail if it is hopeless.
    fn serving_link_ended(&mut self, link_state: &LinkState, how: &How, stderr: String, now: Instant) {
        let key = link_state.slot();
        let retry_given_up = self.settings.limits.retry_given_up;
        let name = self.backends.name(key.backend).to_owned();
        let slot = self.slots.get_mut(&key).expect("the link filled it");
        let was_ready = link_state.ready_at().is_some();
        let cause = exit::classify(how, false, was_ready);
        let record = Record {
            restarts: Some(slot.links.restarts().restarts()),
            uptime: link_state.ready_at().map(|ready| now.saturating_duration_since(ready)),
            ..link_state.record(&name, end_event(cause))
        };
        let (verdict, record) = slot.links.end(cause, how, record, now);
        if cause == Cause::Asked {
            // The next call starts what was stopped because it was idle: that is no restart.
            slot.links.rested();
        }
        slot.last_end = Some(LastEnd { how: how.clone(), stderr, at: now });
        slot.links.follow(&verdict, Until::At(now + retry_given_up));
        let next = match (slot.given_up(), verdict) {
            (Some(why), _) => format!("given up after {why}; tried again in {} s", retry_given_up.as_secs()),
            (None, Verdict::StartAt { delay, .. }) if delay.is_zero() => "it is started again at once".to_owned(),
            (None, Verdict::StartAt { delay, .. }) => format!("it is started again in {:.1} s", delay.as_secs_f64()),
            (None, _) => {
                slot.detach(now);
                "it was stopped".to_owned()
            }
        };
        let (due, given_up) = (slot.links.due(), slot.links.is_given_up());
        let is_hopeless = given_up || slot.is_unauthorized(now);
        let held = if is_hopeless { slot.take_held() } else { VecDeque::new() };
        // Calls wait for the next try, but an operator that asked for this one is told at once that it failed.
        let is_failed_try = !was_ready && cause != Cause::Asked && slot.links.candidate().is_none();
        let tickets = if given_up || is_failed_try { slot.take_tickets() } else { Vec::new() };
        self.out.push(Action::Record(record));
        if given_up {
            let record = Record {
                id: Some(name.clone()),
                kind: Some("backend"),
                detail: Some(next.clone()),
                ..Record::new(record::Event::GaveUp)
            };
            self.out.push(Action::Record(record));
        }
        if let Some(due) = due {
            self.timers.arm(Timer::Slots, due);
            self.starts_due |= due <= now;
        }
        for ticket in tickets {
            let cause = if given_up { String::new() } else { format!("{how}; ") };
            self.ticket_done(ticket, Err(format!("{name} did not start: {cause}{next}")));
        }
        for call in held {
            let Some(call) = self.calls.remove(&call) else { continue };
            let failure = self.slot_failure(key, now);
            self.fail(*call, failure, now);
        }
        if let Some(backend) = self.backends.get_mut(&key.backend) {
            backend.start_failed();
        }
        self.end_offer_waits(now);
        if matches!(key.sharing, Sharing::Borrowed(_)) && self.slots.get(&key).is_some_and(|slot| slot.links.is_idle())
        {
            self.drop_slot(key, &Failure::stopping(""), now);
        }
    }

    /// The end of a link that had served, and whose slot is filled by another one or removed.
    fn record_replaced_end(&mut self, link_state: &LinkState, how: &How, now: Instant) {
        let Some(ready) = link_state.ready_at().filter(|_| !link_state.is_recorded()) else { return };
        let name = self.backends.last_name(link_state.slot().backend).unwrap_or_default();
        let record = link_state.record(name, end_event(exit::classify(how, false, true)));
        let uptime = Some(now.saturating_duration_since(ready));
        self.out.push(Action::Record(Record { uptime, ..record.ended(how) }));
    }

    pub(super) fn is_given_up(&self, backend: u32) -> bool {
        self.slots.get(&self.first_slot(backend)).is_some_and(|slot| slot.links.is_given_up())
    }

    pub(super) fn next_try(&self, key: SlotKey, now: Instant) -> Next {
        let Some(slot) = self.slots.get(&key).map(|slot| &slot.links) else { return Next::Nothing };
        match slot.due() {
            Some(at) if at > now || slot.is_given_up() => Next::In(at.saturating_duration_since(now)),
            None if slot.is_idle() => Next::Nothing,
            _ => Next::Now,
        }
    }

    /// Why a call cannot be sent, by the state of its slot.
    pub(super) fn slot_failure(&self, key: SlotKey, now: Instant) -> Failure {
        let name = self.backends.name(key.backend);
        let Some(slot) = self.slots.get(&key) else { return Failure::removed(name) };
        let (how, stderr) = match &slot.last_end {
            Some(end) => (Some(&end.how), end.stderr.as_str()),
            None => (None, ""),
        };
        let next = self.next_try(key, now);
        if let Some(denied) = slot.denied().filter(|_| self.serving(key).is_none()) {
            return Failure::denied_by(name, denied, None, next);
        }
        match slot.given_up() {
            Some(why) => Failure::gave_up(name, &why, how, stderr, next),
            None if self.serving(key).is_some() => Failure::all_borrowed(name, borrowed_links::BORROWED_MAX),
            None => Failure::down(name, how, stderr, next),
        }
    }

    /// Removes a slot, and keeps what was counted there. One that is made with the same key counts on.
    pub(super) fn take_slot(&mut self, key: SlotKey) -> Option<SlotState> {
        let slot = self.slots.remove(&key)?;
        if !key.sharing.is_own() {
            self.ids.keep_generation(key, slot.generation);
        }
        if let Some(backend) = self.backends.get_mut(&key.backend) {
            backend.keep_restarts(slot.links.restarts());
        }
        Some(slot)
    }

    /// Removes a slot. What waits there fails, and its links are drained.
    pub(super) fn drop_slot(&mut self, key: SlotKey, failure: &Failure, now: Instant) {
        let Some(mut slot) = self.take_slot(key) else { return };
        for ticket in slot.take_tickets() {
            let text = format!("{} does not exist any more", self.backends.name(key.backend));
            self.ticket_done(ticket, Err(text));
        }
        for call in slot.take_held() {
            if let Some(call) = self.calls.remove(&call) {
                self.fail(*call, failure.clone(), now);
            }
        }
        for serial in slot.links.child().into_iter().chain(slot.links.candidate()) {
            self.drain(serial, now);
        }
    }
}

fn end_event(cause: Cause) -> record::Event {
    match cause {
        Cause::Asked => record::Event::ServerStopped,
        Cause::Forgot => record::Event::ServerExiting,
        _ => record::Event::ServerCrashed,
    }
}
