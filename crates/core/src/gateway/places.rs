//! Places: each is filled by one link after another, by the one policy engine.

use super::*;
use crate::{
    exit::{self, Cause},
    restarts::{Restarts, Verdict},
};

use links::Phase;
use words::{Failure, Next};

/// Which of a backend's places it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Seat {
    /// Everybody's.
    Shared,
    /// Everybody's of the handshake era, where the shared one is of the stateless era.
    Second,
    Pool(u32),
    /// One client's own.
    Session(Client),
    /// Lent to a call of the stateless era, by a number of its own.
    Lent(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct PlaceKey {
    pub backend: u32,
    pub seat: Seat,
}

#[derive(Debug)]
pub(super) struct Place {
    pub restarts: Restarts,
    pub state: State,
    /// Comes up beside the one that serves, to take over from it.
    pub candidate: Option<u64>,
    /// Calls that wait for a link, in the order they came.
    pub held: VecDeque<u64>,
    pub last_end: Option<LastEnd>,
    /// The end of the last link that was to replace the one in place, and did not become ready.
    pub failed_reload: Option<LastEnd>,
    /// Who asked for the restart that is under way.
    pub tickets: Vec<Ticket>,
    /// Counts the links it had.
    pub generation: u64,
    /// When its link was last found too large.
    pub replaced_at: Option<Instant>,
    /// The candidate is there because the one that serves answers no calls.
    pub is_doubted: bool,
    /// The name of those it is lent to.
    pub tenant: Option<Box<str>>,
}

#[derive(Debug, PartialEq)]
pub(super) enum State {
    /// Nobody needs it; the next call fills it.
    Idle,
    Waiting {
        at: Instant,
    },
    /// What the link is up to, the link knows.
    Linked(u64),
    GivenUp {
        retry: Instant,
        why: String,
    },
}

#[derive(Debug)]
pub(super) struct LastEnd {
    pub how: How,
    pub stderr: String,
    pub at: Instant,
}

impl Place {
    fn new(settings: &Backend, seed: u64, state: State) -> Place {
        Place {
            restarts: Restarts::new(settings.policy.clone(), seed),
            state,
            candidate: None,
            held: VecDeque::new(),
            last_end: None,
            failed_reload: None,
            tickets: Vec::new(),
            generation: 0,
            replaced_at: None,
            is_doubted: false,
            tenant: None,
        }
    }

    /// The link in place, whatever it is up to.
    pub fn current(&self) -> Option<u64> {
        match self.state {
            State::Linked(serial) => Some(serial),
            _ => None,
        }
    }

    /// It waits for another try after its backend did not accept our credentials: there is no use in waiting for that.
    pub fn is_unauthorized(&self, now: Instant) -> bool {
        matches!(self.state, State::Waiting { at } if at > now) && self.denied().is_some()
    }

    /// Why its backend did not let us in the last time.
    pub fn denied(&self) -> Option<&exit::Denied> {
        match self.last_end.as_ref().map(|end| &end.how) {
            Some(How::Unauthorized(denied)) => Some(denied),
            _ => None,
        }
    }

    pub fn due(&self) -> Option<Instant> {
        match self.state {
            State::Waiting { at } => Some(at),
            State::GivenUp { retry, .. } => Some(retry),
            State::Idle | State::Linked(_) => None,
        }
    }
}

impl Gateway {
    /// The place that a call goes to. It is made if need be.
    pub(super) fn place_for(
        &mut self,
        backend: u32,
        whom: &Whom,
        says: Says,
        now: Instant,
    ) -> Result<PlaceKey, Box<Failure>> {
        let Whom { client, era, .. } = *whom;
        let Some(owner) = self.owners.get(&backend) else { return Ok(PlaceKey { backend, seat: Seat::Shared }) };
        // A backend without sessions has nothing that could be one client's own.
        let is_stateless = owner.settings.era == EraChoice::Stateless || owner.eras.is_some_and(|eras| eras.stateless);
        let seat = match owner.settings.children {
            Children::PerSession if era == Era::Handshake => {
                self.make_room(backend, client, now)?;
                Seat::Session(client)
            }
            Children::PerSession if !is_stateless => {
                let name = self.guests.get(&client).map_or_else(String::new, |guest| guest.who.name.clone());
                return self.lend(backend, &name, says, now);
            }
            Children::Pool(size) => self.pool_seat(backend, size.max(1)),
            Children::Shared | Children::PerSession => match owner.eras {
                Some(Eras { handshake: true, stateless: true }) if era == Era::Handshake => Seat::Second,
                _ => Seat::Shared,
            },
        };
        let key = PlaceKey { backend, seat };
        self.make_place(key, State::Idle);
        Ok(key)
    }

    /// Room for the process of one session, within `children_max`.
    fn make_room(&mut self, backend: u32, client: Client, now: Instant) -> Result<(), Box<Failure>> {
        let is_there = |place: &Place| place.state != State::Idle;
        if self.places.get(&PlaceKey { backend, seat: Seat::Session(client) }).is_some_and(is_there) {
            return Ok(());
        }
        let max = self.owners[&backend].settings.children_max;
        if self.own_processes(backend) < max || self.drop_free_loan(backend, now) {
            return Ok(());
        }
        Err(Failure::children_max(self.owner_name(backend), max).into())
    }

    /// How many processes of a backend are for one session or one call each.
    pub(super) fn own_processes(&self, backend: u32) -> usize {
        let is_own = |key: &PlaceKey| matches!(key.seat, Seat::Session(_) | Seat::Lent(_)) && key.backend == backend;
        self.places.iter().filter(|(key, place)| is_own(key) && place.state != State::Idle).count()
    }

    pub(super) fn make_place(&mut self, key: PlaceKey, state: State) {
        let Some(owner) = self.owners.get(&key.backend) else { return };
        if !self.places.contains_key(&key) {
            let seed = self.seed ^ self.next.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            self.next += 1;
            let generation = self.generations.remove(&key).unwrap_or(0);
            self.places.insert(key, Place { generation, ..Place::new(&owner.settings, seed, state) });
        }
    }

    /// The least busy one that serves; a new one while all are busy and there is room for it.
    fn pool_seat(&mut self, backend: u32, size: u32) -> Seat {
        let key = |index| PlaceKey { backend, seat: Seat::Pool(index) };
        let load = |index: u32| {
            let serial = self.serving(key(index))?;
            Some((self.links[&serial].in_flight, index))
        };
        let best = (0..size).filter_map(load).min();
        let free = (0..size).find(|index| self.places.get(&key(*index)).is_none_or(|place| place.state == State::Idle));
        let index = match (best, free) {
            (Some((0, index)), _) => index,
            (_, Some(index)) => index,
            (Some((_, index)), None) => index,
            (None, None) => {
                // None serves: the waiting is spread over those that may come.
                let turn = &mut self.owners.get_mut(&backend).expect("asked for its seat").turn;
                *turn = (*turn + 1) % size;
                let turn = *turn;
                let is_hopeless = |index: &u32| {
                    self.places.get(&key(*index)).is_some_and(|place| matches!(place.state, State::GivenUp { .. }))
                };
                let mut in_turn = (0..size).map(|step| (turn + step) % size);
                in_turn.find(|index| !is_hopeless(index)).unwrap_or(turn)
            }
        };
        Seat::Pool(index)
    }

    /// The place whose link asks a backend what it offers.
    pub(super) fn first_place(&self, backend: u32) -> PlaceKey {
        let seat = match self.owners.get(&backend).map(|owner| owner.settings.children) {
            Some(Children::Pool(_)) => Seat::Pool(0),
            _ => Seat::Shared,
        };
        PlaceKey { backend, seat }
    }

    pub(super) fn start_what_waits(&mut self, now: Instant) {
        if self.stopping.is_some() {
            return;
        }
        let is_due = |place: &Place| place.due().is_some_and(|at| at <= now);
        let due: Vec<PlaceKey> = self.places.iter().filter(|(_, place)| is_due(place)).map(|(key, _)| *key).collect();
        for key in due {
            self.fill(key, now);
        }
    }

    /// Connects anew.
    fn fill(&mut self, key: PlaceKey, now: Instant) {
        let serial = self.connect(key, now);
        let is_probe = self.is_probe(key);
        self.links.get_mut(&serial).expect("just made").is_probe = is_probe;
        let place = self.places.get_mut(&key).expect("only places are filled");
        place.restarts.child_started(now);
        place.state = State::Linked(serial);
    }

    /// Whether a lazy backend is started although no request needs it, to read what it offers.
    fn is_probe(&self, key: PlaceKey) -> bool {
        let is_lazy = self.owners.get(&key.backend).is_some_and(|owner| owner.settings.start == Start::Lazy);
        let is_needed = |place: &Place| !place.held.is_empty() || !place.tickets.is_empty();
        is_lazy
            && !self.places.get(&key).is_some_and(is_needed)
            && !self.gathering.iter().any(|waiting| waiting.is_for(key.backend))
    }

    /// What a lazy backend offers was read; no request has needed its process.
    pub(super) fn end_probe(&mut self, serial: u64, now: Instant) {
        let Some(connection) = self.links.get(&serial).filter(|connection| connection.is_probe) else { return };
        if connection.is_ready() && connection.is_idle() {
            self.part(serial, How::Stopped, false, now);
        }
    }

    /// Something needs this place: one that is idle is filled.
    pub(super) fn wake_place(&mut self, key: PlaceKey, now: Instant) {
        if let Some(place) = self.places.get_mut(&key).filter(|place| place.state == State::Idle) {
            place.state = State::Waiting { at: now };
            self.starts_due = true;
        }
    }

    pub(super) fn connect(&mut self, key: PlaceKey, now: Instant) -> u64 {
        let serial = self.number();
        let link = Link { backend: key.backend, serial };
        let by = now + self.owners[&key.backend].settings.start_timeout;
        let place = self.places.get_mut(&key).expect("only places are filled");
        place.generation += 1;
        let generation = place.generation;
        self.links.insert(serial, Connection::new(link, key, generation, by, now));
        self.out.push(Action::Connect { link });
        self.wake_by(by);
        serial
    }

    /// A link finished its handshake.
    pub(super) fn place_filled(&mut self, serial: u64, now: Instant) {
        let Some(connection) = self.links.get_mut(&serial) else { return };
        connection.phase = Phase::Ready;
        connection.ready = Some(now);
        connection.last_used = now;
        let (key, pid, began) = (connection.place, connection.pid, connection.began);
        let Some(place) = self.places.get_mut(&key) else { return };
        let mut replaced = None;
        if place.candidate == Some(serial) {
            place.candidate = None;
            place.restarts.replaced(now);
            replaced = place.current();
            place.state = State::Linked(serial);
        }
        place.restarts.child_ready(now);
        let tickets = mem::take(&mut place.tickets);
        let (generation, restarts) = (place.generation, place.restarts.restarts());
        // Whether another one answers where the last did not is still to be seen.
        let is_doubted = mem::take(&mut place.is_doubted);
        if let Some(owner) = self.owners.get_mut(&key.backend) {
            if !is_doubted {
                owner.breaker.reset();
            }
            owner.is_proven = true;
            let record = Record {
                id: Some(owner.settings.name.clone()),
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
            let words =
                serde_json::json!({"backend": self.owner_name(key.backend), "generation": generation, "pid": pid});
            self.ticket_done(ticket, Ok(words));
        }
        if let Some(old) = replaced {
            self.drain(old, now);
        }
        self.release(key, now);
        self.watch_idle(serial);
    }

    /// Finishes what it was asked, and is stopped then.
    pub(super) fn drain(&mut self, serial: u64, now: Instant) {
        let Some(connection) = self.links.get_mut(&serial) else { return };
        connection.phase = Phase::Draining { until: now + DRAIN_MAX };
        if connection.in_flight == 0 {
            self.part(serial, How::Stopped, false, now);
        } else {
            self.wake_by(now + DRAIN_MAX);
        }
    }

    /// Ends a link for a reason of ours. What it still had to answer is answered now.
    pub(super) fn part(&mut self, serial: u64, how: How, at_once: bool, now: Instant) {
        let Some(connection) = self.links.get_mut(&serial) else { return };
        if let Phase::Stopping { .. } = connection.phase {
            return;
        }
        connection.phase = Phase::Stopping { how: how.clone() };
        let link = connection.link;
        let unsent = losses::Unsent { era: connection.era, lines: Vec::new() };
        self.calls_lost(serial, &how, "", &unsent, now);
        self.drop_asks_on(serial);
        self.out.push(Action::Disconnect { link, at_once });
    }

    /// The link in a place, or the one that was to take its place, is gone.
    pub(super) fn place_emptied(&mut self, connection: &Connection, how: How, stderr: String, now: Instant) {
        let key = connection.place;
        let serial = connection.link.serial;
        let limits = self.settings.limits.clone();
        let name = self.owner_name(key.backend).to_owned();
        let is_spare = |place: &Place| place.candidate != Some(serial) && place.current() != Some(serial);
        if self.places.get(&key).is_none_or(is_spare) {
            return self.record_parted(connection, &how, now);
        }
        let place = self.places.get_mut(&key).expect("found above");
        if place.candidate == Some(serial) {
            place.candidate = None;
            if self.trial_failed(connection, &how, &stderr, now) {
                return;
            }
            let place = self.places.get_mut(&key).expect("found above");
            let tickets = mem::take(&mut place.tickets);
            place.failed_reload = Some(LastEnd { how: how.clone(), stderr, at: now });
            if self.stopping.is_none() {
                self.out.push(Action::Record(Record {
                    id: Some(name.clone()),
                    kind: Some("backend"),
                    pid: connection.pid,
                    generation: Some(connection.generation),
                    detail: Some(format!("the new server did not start ({how}); the old one keeps serving")),
                    ..Record::new(record::Event::ReloadFailed)
                }));
            }
            for ticket in tickets {
                self.ticket_done(
                    ticket,
                    Err(format!(
                        "{name} was not restarted: the new server did not start ({how}); the old one keeps serving"
                    )),
                );
            }
            return;
        }
        let was_ready = connection.ready.is_some();
        let cause = exit::classify(&how, false, was_ready);
        let verdict = place.restarts.child_ended(cause, how.clone(), now);
        let record = Record {
            id: Some(name.clone()),
            kind: Some("backend"),
            pid: connection.pid,
            generation: Some(connection.generation),
            crashes: Some(place.restarts.crashes(now)),
            restarts: Some(place.restarts.restarts()),
            uptime: connection.ready.map(|ready| now.saturating_duration_since(ready)),
            ..Record::new(match cause {
                Cause::Asked => record::Event::ServerStopped,
                Cause::Forgot => record::Event::ServerExiting,
                _ => record::Event::ServerCrashed,
            })
        };
        let mut record = record.ended(&how);
        if cause == Cause::Asked {
            // What stopped for want of calls is started by the next one: that is no restart.
            place.restarts.rested();
        }
        place.last_end = Some(LastEnd { how: how.clone(), stderr, at: now });
        let words = match verdict {
            Verdict::StartAt { at, delay, .. } => {
                place.state = State::Waiting { at };
                record.delay = Some(delay);
                match delay.is_zero() {
                    true => "it is started again at once".to_owned(),
                    false => format!("it is started again in {:.1} s", delay.as_secs_f64()),
                }
            }
            Verdict::GiveUp { crashes, within } => {
                let within = within.map_or_else(String::new, |within| format!(" within {:.0} s", within.as_secs_f64()));
                let crashes = format!("{crashes} {}{within}", if crashes == 1 { "crash" } else { "crashes" });
                let why = format!("{crashes}, the last one: {how}");
                let retry = now + limits.retry_given_up;
                let words = format!("given up after {why}; tried again in {} s", limits.retry_given_up.as_secs());
                place.state = State::GivenUp { retry, why };
                words
            }
            Verdict::Left => {
                place.state = match place.held.is_empty() && place.tickets.is_empty() {
                    true => State::Idle,
                    false => State::Waiting { at: now },
                };
                "it was stopped".to_owned()
            }
        };
        let (due, given_up) = (place.due(), matches!(place.state, State::GivenUp { .. }));
        let is_hopeless = given_up || place.is_unauthorized(now);
        let held = if is_hopeless { mem::take(&mut place.held) } else { VecDeque::new() };
        // Calls wait for the next try, but whoever asked for this one hears at once that it failed.
        let is_failed_try = !was_ready && cause != Cause::Asked && place.candidate.is_none();
        let tickets = if given_up || is_failed_try { mem::take(&mut place.tickets) } else { Vec::new() };
        self.out.push(Action::Record(record));
        if given_up {
            let record = Record {
                id: Some(name.clone()),
                kind: Some("backend"),
                detail: Some(words.clone()),
                ..Record::new(record::Event::GaveUp)
            };
            self.out.push(Action::Record(record));
        }
        if let Some(due) = due {
            self.wake_by(due);
            self.starts_due |= due <= now;
        }
        for ticket in tickets {
            let cause = if given_up { String::new() } else { format!("{how}; ") };
            self.ticket_done(ticket, Err(format!("{name} did not come up: {cause}{words}")));
        }
        for call in held {
            let Some(call) = self.calls.remove(&call) else { continue };
            let failure = self.failure_of_place(key, now);
            self.fail(*call, failure, now);
        }
        self.failed_once(key.backend, now);
        // What nobody needs any more need not be kept for its name.
        if matches!(key.seat, Seat::Lent(_)) && self.places.get(&key).is_some_and(|place| place.state == State::Idle) {
            self.drop_place(key, &Failure::stopping(""), now);
        }
    }

    /// The end of a link that had served, and whose place was another's already or is no more.
    fn record_parted(&mut self, connection: &Connection, how: &How, now: Instant) {
        let Some(ready) = connection.ready.filter(|_| !connection.is_recorded) else { return };
        let event = match exit::classify(how, false, true) {
            Cause::Asked => record::Event::ServerStopped,
            Cause::Forgot => record::Event::ServerExiting,
            _ => record::Event::ServerCrashed,
        };
        // A backend that was taken out of the configuration has no owner any more, but had a name.
        let named = self.numbers.iter().find(|(_, number)| **number == connection.place.backend);
        let record = Record {
            id: named.map(|(name, _)| name.clone()),
            kind: Some("backend"),
            pid: connection.pid,
            generation: Some(connection.generation),
            uptime: Some(now.saturating_duration_since(ready)),
            ..Record::new(event)
        };
        self.out.push(Action::Record(record.ended(how)));
    }

    pub(super) fn is_given_up(&self, backend: u32) -> bool {
        let place = self.places.get(&self.first_place(backend));
        place.is_some_and(|place| matches!(place.state, State::GivenUp { .. }))
    }

    /// Nobody waits any longer for what a backend offers that could not even be reached.
    fn failed_once(&mut self, backend: u32, now: Instant) {
        if let Some(owner) = self.owners.get_mut(&backend)
            && owner.standing == Standing::Unknown
        {
            owner.standing = Standing::Failed;
        }
        self.gather(now);
    }

    pub(super) fn next_try(&self, key: PlaceKey, now: Instant) -> Next {
        match self.places.get(&key).map(|place| &place.state) {
            Some(State::Waiting { at }) if *at > now => Next::In(*at - now),
            Some(State::GivenUp { retry, .. }) => Next::In(retry.saturating_duration_since(now)),
            Some(State::Waiting { .. } | State::Linked(_)) => Next::Now,
            Some(State::Idle) | None => Next::Nothing,
        }
    }

    /// Why a call cannot be made, in the words that its place's state asks for.
    pub(super) fn failure_of_place(&self, key: PlaceKey, now: Instant) -> Failure {
        let name = self.owner_name(key.backend);
        let Some(place) = self.places.get(&key) else { return Failure::removed(name) };
        let (how, stderr) = match &place.last_end {
            Some(end) => (Some(&end.how), end.stderr.as_str()),
            None => (None, ""),
        };
        let next = self.next_try(key, now);
        if let Some(denied) = place.denied().filter(|_| self.serving(key).is_none()) {
            return Failure::denied_by(name, denied, None, next);
        }
        match &place.state {
            State::GivenUp { why, .. } => Failure::gave_up(name, why, how, stderr, next),
            _ if self.serving(key).is_some() => Failure::all_lent(name, loans::LOANS_MAX),
            _ => Failure::down(name, how, stderr, next),
        }
    }

    /// Takes a place away. One that is made in its stead counts on.
    pub(super) fn take_place(&mut self, key: PlaceKey) -> Option<Place> {
        let place = self.places.remove(&key)?;
        if !matches!(key.seat, Seat::Session(_) | Seat::Lent(_)) {
            self.generations.insert(key, place.generation);
        }
        Some(place)
    }

    /// The count of restarts never falls, whatever becomes of the place where they were.
    pub(super) fn keep_restarts(&mut self, backend: u32, restarts: &Restarts) {
        if let Some(owner) = self.owners.get_mut(&backend) {
            owner.restarts_gone += u64::from(restarts.restarts());
            owner.past_gone.extend(restarts.recent().cloned());
            owner.past_gone.sort_by_key(|past| past.at);
            owner.past_gone.drain(..owner.past_gone.len().saturating_sub(RECENT_MAX));
        }
    }

    /// Removes a place for good: what waits there fails.
    pub(super) fn drop_place(&mut self, key: PlaceKey, failure: &Failure, now: Instant) {
        let Some(place) = self.take_place(key) else { return };
        self.keep_restarts(key.backend, &place.restarts);
        for ticket in place.tickets {
            let words = format!("{} is no longer there", self.owner_name(key.backend));
            self.ticket_done(ticket, Err(words));
        }
        for call in place.held {
            if let Some(call) = self.calls.remove(&call) {
                self.fail(*call, failure.clone(), now);
            }
        }
        let current = match place.state {
            State::Linked(serial) => Some(serial),
            _ => None,
        };
        for serial in current.into_iter().chain(place.candidate) {
            self.drain(serial, now);
        }
    }
}
