//! Which replica serves a session: its home is part of the record of the session, and is changed by compare-and-swap. How a
//! request is forwarded, and how a session is restored from its record, is not decided here.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use rustc_hash::{FxHashMap, FxHashSet};
use serde::{Deserialize, Serialize};

use super::{BadValue, Instance};
use crate::{
    front::record::{BadRecord, RECORD_BYTES_MAX, Record, RecordKey},
    gateway::Who,
};

/// How long a request waits for one read or write of a record.
pub const STORE_MAX: Duration = Duration::from_secs(1);
/// How long a request waits until it is known whether another replica is alive.
pub const CHECK_MAX: Duration = Duration::from_secs(4);
/// After a pause of this process, and after a connection was lost, sessions that another replica may have taken over are not
/// served without a look at their records for so long: the connection may just be coming back.
pub const DOUBT: Duration = Duration::from_secs(2);

/// A record that another replica changes all the time is read so often for one request, at most.
const ROUNDS_MAX: u32 = 5;
/// Requests that wait for one session; more are answered as unavailable.
const TICKETS_MAX: usize = 1_000;
/// Sessions that requests wait for; more are answered as unavailable.
const LOOKUPS_MAX: usize = 10_000;
/// Homes that are cached, in two generations: the older half is dropped when the younger one is full.
const CACHE_MAX: usize = 100_000;
/// Sessions that ended here lately: a read that was faster than the delete does not bring them back. The oldest are dropped.
const CLOSED_MAX: usize = 10_000;
/// Refusals that are remembered until the record is read again; more are not.
const REFUSED_MAX: usize = 10_000;
/// Of the format of the first line of a value.
const VERSION: u32 = 1;
/// The longest first line of a value, in bytes.
const HOME_BYTES_MAX: usize = 1 << 10;
/// The longest value, in bytes.
pub const VALUE_BYTES_MAX: usize = RECORD_BYTES_MAX + HOME_BYTES_MAX + 1;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home {
    /// Of the replica.
    pub name: String,
    pub instance: Instance,
}

/// A record as the bucket has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    pub revision: u64,
    pub record: Record,
    pub home: Home,
}

/// The first line of a value.
#[derive(Serialize, Deserialize)]
struct Wire {
    home: String,
    #[serde(with = "super::hex")]
    instance: Instance,
}

/// The value of a session's key: a line with the home, then the record as [`Record::encode`] writes it.
pub fn encode(key: RecordKey, record: &Record, home: &Home) -> Result<Vec<u8>, BadRecord> {
    let mut value = super::write_value(VERSION, Wire { home: home.name.clone(), instance: home.instance });
    if value.len() > HOME_BYTES_MAX {
        return Err(BadRecord::TooLong);
    }
    value.push(b'\n');
    value.extend_from_slice(&record.encode(key)?);
    Ok(value)
}

pub fn decode(key: RecordKey, bytes: &[u8]) -> Result<(Record, Home), BadRecord> {
    let (home, record) = split(bytes)?;
    Ok((Record::decode(key, record)?, read_home(home)?))
}

/// Only the home of a value, for the watch of the bucket.
pub fn decode_home(bytes: &[u8]) -> Result<Home, BadRecord> {
    read_home(split(bytes)?.0)
}

fn split(bytes: &[u8]) -> Result<(&[u8], &[u8]), BadRecord> {
    let head = &bytes[..bytes.len().min(HOME_BYTES_MAX + 1)];
    let end = memchr::memchr(b'\n', head).ok_or(BadRecord::Damaged)?;
    Ok((&bytes[..end], &bytes[end + 1..]))
}

fn read_home(line: &[u8]) -> Result<Home, BadRecord> {
    let Wire { home, instance } = super::read_value(VERSION, line, HOME_BYTES_MAX).map_err(|bad| match bad {
        BadValue::Damaged => BadRecord::Damaged,
        BadValue::Version(version) => BadRecord::Version(version),
        BadValue::TooLong => BadRecord::TooLong,
    })?;
    Ok(Home { name: home, instance })
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Connected,
    Disconnected,
    /// This process did not run for 2 s or more. It is told before anything else that was received meanwhile.
    Paused,
    /// The watch of the records was interrupted, or begins: changes of them may not have been reported.
    Missed,
    /// A request names a session. It is answered by [`Action::Answer`], at once if it is known.
    Asked {
        ticket: u64,
        key: RecordKey,
        who: Who,
    },
    /// The answer to the read of this number.
    Read {
        key: RecordKey,
        number: u64,
        found: Found,
    },
    /// The answer to the take of this number.
    Written {
        key: RecordKey,
        number: u64,
        result: Written,
    },
    /// It is open here, and stored with this home at this revision; without one it is local to this replica.
    Opened {
        key: RecordKey,
        revision: Option<u64>,
    },
    /// This replica wrote the record of a session that is open here.
    Stored {
        key: RecordKey,
        revision: u64,
    },
    /// Such a write found another revision: another replica may be the home.
    Conflicted {
        key: RecordKey,
    },
    /// It ended here.
    Closed {
        key: RecordKey,
    },
    /// It counts as open here and is not: the request that was to open it was gone before.
    Unopened {
        key: RecordKey,
    },
    /// The watch of the bucket. Without a home the record was deleted. Keys that are not of interest are ignored
    /// ([`Homes::is_of_interest`]).
    Changed {
        key: RecordKey,
        revision: u64,
        home: Option<Home>,
    },
    /// It answers.
    Alive {
        instance: Instance,
    },
    /// It has ended, or does not answer, or another instance has its name.
    Lost {
        instance: Instance,
    },
    /// That replica says that it is not the home of the session.
    Refused {
        key: RecordKey,
        by: Instance,
    },
    TimePassed,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    Some(Box<Stored>),
    None,
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    Done {
        revision: u64,
    },
    Conflict,
    /// It may have taken effect, or may still do so.
    Failed,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// From the leader.
    Read {
        key: RecordKey,
        number: u64,
    },
    /// Compare-and-swap of the record with this replica as home.
    Take {
        key: RecordKey,
        number: u64,
        expected: u64,
        record: Box<Record>,
        home: Home,
    },
    /// Whether it is alive: [`Event::Alive`] or [`Event::Lost`].
    Check {
        instance: Instance,
    },
    Answer {
        ticket: u64,
        outcome: Outcome,
    },
    /// Another replica is its home now: the local session ends, the record stays.
    Drop {
        key: RecordKey,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Here,
    /// It is to be opened from this record first. Counts as open here from now on; [`Event::Closed`] if that fails,
    /// [`Event::Unopened`] if it was not tried.
    Restore {
        record: Box<Record>,
        revision: u64,
    },
    /// A request that was forwarded to this replica is refused with it.
    Forward {
        to: Home,
    },
    NotFound,
    /// To be asked again later (503).
    Unavailable,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    pub open: usize,
    /// Of these, the sessions without a record in the bucket.
    pub local: usize,
    pub cached: usize,
    /// Sessions that were taken over from a lost replica.
    pub taken: u64,
    /// Sessions that another replica has taken over.
    pub dropped: u64,
}

#[derive(Debug)]
pub struct Homes {
    own: Home,
    is_connected: bool,
    /// Counts the moments after which another replica may have taken over sessions that are open here.
    epoch: u64,
    /// Set by a pause of this process, and by the loss of the connection.
    doubt_until: Option<Instant>,
    open: FxHashMap<RecordKey, Open>,
    closed: Closed,
    cache: Cache,
    /// Homes that refused a request, with the revision of the record that named them.
    refused: FxHashMap<RecordKey, (Instance, u64)>,
    /// What requests wait for.
    lookups: BTreeMap<RecordKey, Lookup>,
    /// When the lookups are given up, one entry for each.
    timers: BTreeSet<(Instant, RecordKey)>,
    /// Replicas that are being checked, and the sessions whose requests wait for that.
    checks: BTreeMap<Instance, BTreeSet<RecordKey>>,
    /// Reads and takes that were sent.
    numbers: u64,
    taken: u64,
    dropped: u64,
}

/// A session that is open here.
#[derive(Debug, Clone, Copy)]
struct Open {
    /// Of its record; nothing for a local session.
    revision: Option<u64>,
    /// The epoch in which this replica was last known to be its home.
    verified: u64,
}

#[derive(Debug)]
struct Lookup {
    tickets: Vec<(u64, Who)>,
    rounds: u32,
    step: Step,
    /// The newest revision with another home that the watch told: what is older is read again.
    superseded: u64,
    /// Its requests are answered as unavailable then.
    until: Instant,
}

#[derive(Debug)]
enum Step {
    Reading { number: u64 },
    Checking { stored: Box<Stored> },
    Taking { number: u64, stored: Box<Stored> },
}

impl Homes {
    pub fn new(own: Home) -> Homes {
        Homes {
            own,
            is_connected: false,
            epoch: 0,
            doubt_until: None,
            open: FxHashMap::default(),
            closed: Closed::default(),
            cache: Cache::default(),
            refused: FxHashMap::default(),
            lookups: BTreeMap::new(),
            timers: BTreeSet::new(),
            checks: BTreeMap::new(),
            numbers: 0,
            taken: 0,
            dropped: 0,
        }
    }

    pub fn handle(&mut self, event: Event, now: Instant, actions: &mut Vec<Action>) {
        match event {
            Event::Connected => {
                self.is_connected = true;
                self.epoch += 1;
                self.look_up_again(now, actions);
            }
            Event::Disconnected => self.disconnected(now, actions),
            Event::Missed => {
                self.epoch += 1;
                self.look_up_again(now, actions);
            }
            Event::Paused => {
                self.epoch += 1;
                self.doubt_until = Some(now + DOUBT);
                self.look_up_again(now, actions);
            }
            Event::Asked { ticket, key, who } => self.asked(ticket, key, who, now, actions),
            Event::Read { key, number, found } => self.read(key, number, found, now, actions),
            Event::Written { key, number, result } => self.written(key, number, result, now, actions),
            Event::Opened { key, revision } => {
                let revision = self.open.get(&key).and_then(|open| open.revision).max(revision);
                self.open.insert(key, Open { revision, verified: self.epoch });
                self.cache.remove(key);
            }
            Event::Stored { key, revision } => {
                if let Some(open) = self.open.get_mut(&key) {
                    open.revision = open.revision.max(Some(revision));
                }
            }
            Event::Conflicted { key } => {
                if let Some(open) = self.open.get_mut(&key) {
                    open.verified = 0;
                }
            }
            Event::Closed { key } => {
                self.open.remove(&key);
                self.cache.remove(key);
                self.closed.insert(key);
                self.answer_all(key, &Outcome::NotFound, actions);
            }
            Event::Unopened { key } => drop(self.open.remove(&key)),
            Event::Changed { key, revision, home } => self.changed(key, revision, home, actions),
            Event::Alive { instance } => {
                for key in self.checks.remove(&instance).unwrap_or_default() {
                    self.forward(key, actions);
                }
            }
            Event::Lost { instance } => {
                self.cache.forget(instance);
                for key in self.checks.remove(&instance).unwrap_or_default() {
                    self.take(key, now, actions);
                }
            }
            Event::Refused { key, by } => {
                if let Some(cached) = self.cache.get(key).filter(|cached| cached.home.instance == by) {
                    if self.refused.len() < REFUSED_MAX {
                        self.refused.insert(key, (by, cached.revision));
                    }
                    self.cache.remove(key);
                }
            }
            Event::TimePassed => {
                while let Some((until, key)) = self.timers.first().copied()
                    && until <= now
                {
                    self.answer_all(key, &Outcome::Unavailable, actions);
                }
            }
        }
    }

    pub fn deadline(&self) -> Option<Instant> {
        self.timers.first().map(|(until, _)| *until)
    }

    /// The revision that the next write of the record of an open session must expect; nothing if it is local.
    pub fn revision(&self, key: RecordKey) -> Option<u64> {
        self.open.get(&key).and_then(|open| open.revision)
    }

    /// A request of this session is answered with [`Outcome::Here`] at once, for every client.
    pub fn is_here(&self, key: RecordKey) -> bool {
        self.open.get(&key).is_some_and(|open| self.is_verified(open))
    }

    /// The session is open here, a request waits for it, or its home is cached.
    pub fn is_of_interest(&self, key: RecordKey) -> bool {
        self.open.contains_key(&key) || self.lookups.contains_key(&key) || self.cache.get(key).is_some()
    }

    pub fn counts(&self) -> Counts {
        Counts {
            open: self.open.len(),
            local: self.open.values().filter(|open| open.revision.is_none()).count(),
            cached: self.cache.len(),
            taken: self.taken,
            dropped: self.dropped,
        }
    }

    /// Without a connection this replica continues with the sessions that it has.
    fn disconnected(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.is_connected = false;
        // The connection may be back soon: until then, what was not verified over the lost one stays in doubt.
        self.doubt_until = Some(now + DOUBT);
        self.checks.clear();
        for key in self.lookups.keys().copied().collect::<Vec<_>>() {
            let outcome = self.alone(key, now);
            self.answer_all(key, &outcome, actions);
        }
    }

    /// The answer while there is no connection.
    fn alone(&self, key: RecordKey, now: Instant) -> Outcome {
        match self.open.get(&key) {
            None => Outcome::Unavailable,
            Some(open) if self.is_verified(open) => Outcome::Here,
            Some(_) if self.doubt_until.is_some_and(|until| now < until) => Outcome::Unavailable,
            Some(_) => Outcome::Here,
        }
    }

    /// A local session is verified, too: it may have been stored without an answer.
    fn is_verified(&self, open: &Open) -> bool {
        open.verified == self.epoch
    }

    /// What was read before is too old.
    fn look_up_again(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.checks.clear();
        for key in self.lookups.keys().copied().collect::<Vec<_>>() {
            self.look_up(key, now, actions);
        }
    }

    fn asked(&mut self, ticket: u64, key: RecordKey, who: Who, now: Instant, actions: &mut Vec<Action>) {
        let mut answer = |outcome| actions.push(Action::Answer { ticket, outcome });
        if self.is_here(key) {
            return answer(Outcome::Here);
        }
        if self.closed.contains(key) {
            return answer(Outcome::NotFound);
        }
        if !self.is_connected {
            return answer(self.alone(key, now));
        }
        if let Some(cached) = self.cache.get(key).filter(|_| !self.open.contains_key(&key)) {
            return answer(match cached.who == who {
                true => Outcome::Forward { to: cached.home.clone() },
                false => Outcome::NotFound,
            });
        }
        let has_room = self.lookups.len() < LOOKUPS_MAX;
        match self.lookups.get_mut(&key) {
            Some(lookup) if lookup.tickets.len() < TICKETS_MAX => lookup.tickets.push((ticket, who)),
            None if has_room => {
                let (tickets, step) = (vec![(ticket, who)], Step::Reading { number: 0 });
                self.lookups.insert(key, Lookup { tickets, rounds: 0, step, superseded: 0, until: now });
                self.look_up(key, now, actions);
            }
            _ => answer(Outcome::Unavailable),
        }
    }

    /// Reads the record for a lookup, again or for the first time.
    fn look_up(&mut self, key: RecordKey, now: Instant, actions: &mut Vec<Action>) {
        let Some(lookup) = self.lookups.get_mut(&key) else { return };
        lookup.rounds += 1;
        if lookup.rounds > ROUNDS_MAX {
            return self.answer_all(key, &Outcome::Unavailable, actions);
        }
        self.numbers += 1;
        lookup.step = Step::Reading { number: self.numbers };
        actions.push(Action::Read { key, number: self.numbers });
        self.wait(key, now + STORE_MAX);
    }

    /// How long the lookup waits for its next step.
    fn wait(&mut self, key: RecordKey, until: Instant) {
        let Some(lookup) = self.lookups.get_mut(&key) else { return };
        self.timers.remove(&(lookup.until, key));
        lookup.until = until;
        self.timers.insert((until, key));
    }

    /// The requests that wait for a session are answered by the caller.
    fn end(&mut self, key: RecordKey) -> Option<Lookup> {
        let lookup = self.lookups.remove(&key)?;
        self.timers.remove(&(lookup.until, key));
        if let Step::Checking { stored } = &lookup.step
            && let Some(waiting) = self.checks.get_mut(&stored.home.instance)
        {
            waiting.remove(&key);
            if waiting.is_empty() {
                self.checks.remove(&stored.home.instance);
            }
        }
        Some(lookup)
    }

    fn read(&mut self, key: RecordKey, number: u64, found: Found, now: Instant, actions: &mut Vec<Action>) {
        let Some(lookup) = self.lookups.get(&key) else { return };
        if !matches!(lookup.step, Step::Reading { number: awaited } if awaited == number) {
            return;
        }
        match found {
            Found::Some(stored) => self.found(key, stored, now, actions),
            Found::None => match self.open.get_mut(&key) {
                // It was never stored.
                Some(open) if open.revision.is_none() => {
                    open.verified = self.epoch;
                    self.answer_all(key, &Outcome::Here, actions);
                }
                // If it is open here, its new home ended it while this replica was away.
                _ => {
                    self.drop_open(key, actions);
                    self.answer_all(key, &Outcome::NotFound, actions);
                }
            },
            Found::Failed => self.answer_all(key, &Outcome::Unavailable, actions),
        }
    }

    fn found(&mut self, key: RecordKey, stored: Box<Stored>, now: Instant, actions: &mut Vec<Action>) {
        let refused = self.refused.remove(&key);
        let Some(lookup) = self.lookups.get_mut(&key) else { return };
        lookup.tickets.retain(|(ticket, who)| {
            let is_same = *who == stored.record.who;
            if !is_same {
                actions.push(Action::Answer { ticket: *ticket, outcome: Outcome::NotFound });
            }
            is_same
        });
        if stored.revision < lookup.superseded {
            return self.look_up(key, now, actions);
        }
        if stored.home.instance == self.own.instance {
            return self.serve(key, *stored, actions);
        }
        self.drop_open(key, actions);
        let Some(lookup) = self.lookups.get_mut(&key) else { return };
        if lookup.tickets.is_empty() {
            self.end(key);
            return;
        }
        let instance = stored.home.instance;
        // An earlier process of this replica has ended. A home that knows nothing of the session cannot serve it.
        let is_lost = stored.home.name == self.own.name || refused == Some((instance, stored.revision));
        lookup.step = Step::Checking { stored };
        self.wait(key, now + CHECK_MAX);
        if is_lost {
            return self.take(key, now, actions);
        }
        let waiting = self.checks.entry(instance).or_default();
        if waiting.is_empty() {
            actions.push(Action::Check { instance });
        }
        waiting.insert(key);
    }

    /// This replica is the home: the session is open here, or is opened from its record.
    fn serve(&mut self, key: RecordKey, stored: Stored, actions: &mut Vec<Action>) {
        let Some(Lookup { tickets, .. }) = self.end(key) else { return };
        let verified = self.epoch;
        let mut is_open = match self.open.get_mut(&key) {
            Some(open) => {
                *open = Open { revision: open.revision.max(Some(stored.revision)), verified };
                true
            }
            None => false,
        };
        self.cache.remove(key);
        for (ticket, who) in tickets {
            let outcome = match who == stored.record.who {
                false => Outcome::NotFound,
                true if is_open => Outcome::Here,
                true => {
                    is_open = true;
                    self.open.insert(key, Open { revision: Some(stored.revision), verified });
                    Outcome::Restore { record: Box::new(stored.record.clone()), revision: stored.revision }
                }
            };
            actions.push(Action::Answer { ticket, outcome });
        }
    }

    /// The home is alive.
    fn forward(&mut self, key: RecordKey, actions: &mut Vec<Action>) {
        let Some(Lookup { tickets, step: Step::Checking { stored }, .. }) = self.end(key) else { return };
        let Stored { revision, record, home } = *stored;
        for (ticket, who) in tickets {
            let outcome = match who == record.who {
                true => Outcome::Forward { to: home.clone() },
                false => Outcome::NotFound,
            };
            actions.push(Action::Answer { ticket, outcome });
        }
        self.cache.insert(key, Cached { home, revision, who: record.who });
    }

    /// The home is lost: this replica becomes the home, if the record has not changed.
    fn take(&mut self, key: RecordKey, now: Instant, actions: &mut Vec<Action>) {
        let Some(lookup) = self.lookups.get_mut(&key) else { return };
        let reading = Step::Reading { number: 0 };
        let Step::Checking { stored } = std::mem::replace(&mut lookup.step, reading) else { return };
        self.numbers += 1;
        let number = self.numbers;
        let (expected, record) = (stored.revision, Box::new(stored.record.clone()));
        lookup.step = Step::Taking { number, stored };
        actions.push(Action::Take { key, number, expected, record, home: self.own.clone() });
        self.wait(key, now + STORE_MAX);
    }

    fn written(&mut self, key: RecordKey, number: u64, result: Written, now: Instant, actions: &mut Vec<Action>) {
        let Some(lookup) = self.lookups.get_mut(&key) else { return };
        match &mut lookup.step {
            Step::Taking { number: awaited, stored } if *awaited == number => match result {
                // Already taken from here by another replica.
                Written::Done { revision } if revision < lookup.superseded => self.look_up(key, now, actions),
                Written::Done { revision } => {
                    let taken = Stored { revision, record: stored.record.clone(), home: self.own.clone() };
                    self.taken += 1;
                    self.serve(key, taken, actions);
                }
                Written::Conflict => self.look_up(key, now, actions),
                Written::Failed => self.answer_all(key, &Outcome::Unavailable, actions),
            },
            _ => {}
        }
    }

    fn changed(&mut self, key: RecordKey, revision: u64, home: Option<Home>, actions: &mut Vec<Action>) {
        let is_own = home.as_ref().is_some_and(|home| home.instance == self.own.instance);
        if let Some(open) = self.open.get_mut(&key).filter(|open| open.revision < Some(revision)) {
            match is_own {
                true => open.revision = Some(revision),
                false => self.drop_open(key, actions),
            }
        }
        if let Some(lookup) = self.lookups.get_mut(&key).filter(|_| !is_own) {
            lookup.superseded = lookup.superseded.max(revision);
        }
        if let Some(cached) = self.cache.get_mut(key).filter(|cached| cached.revision < revision) {
            match home.is_some_and(|home| home == cached.home) {
                true => cached.revision = revision,
                false => self.cache.remove(key),
            }
        }
    }

    /// Another replica is its home.
    fn drop_open(&mut self, key: RecordKey, actions: &mut Vec<Action>) {
        if self.open.remove(&key).is_some() {
            self.dropped += 1;
            actions.push(Action::Drop { key });
        }
    }

    fn answer_all(&mut self, key: RecordKey, outcome: &Outcome, actions: &mut Vec<Action>) {
        let Some(lookup) = self.end(key) else { return };
        for (ticket, _) in lookup.tickets {
            actions.push(Action::Answer { ticket, outcome: outcome.clone() });
        }
    }
}

/// The homes of sessions of other replicas.
#[derive(Debug, Default)]
struct Cache {
    young: FxHashMap<RecordKey, Cached>,
    old: FxHashMap<RecordKey, Cached>,
}

#[derive(Debug)]
struct Cached {
    home: Home,
    revision: u64,
    who: Who,
}

impl Cache {
    fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    fn get(&self, key: RecordKey) -> Option<&Cached> {
        self.young.get(&key).or_else(|| self.old.get(&key))
    }

    fn get_mut(&mut self, key: RecordKey) -> Option<&mut Cached> {
        self.young.get_mut(&key).or_else(|| self.old.get_mut(&key))
    }

    fn insert(&mut self, key: RecordKey, cached: Cached) {
        if self.young.len() >= CACHE_MAX / 2 {
            self.old = std::mem::take(&mut self.young);
        }
        self.old.remove(&key);
        self.young.insert(key, cached);
    }

    fn remove(&mut self, key: RecordKey) {
        self.young.remove(&key);
        self.old.remove(&key);
    }

    fn forget(&mut self, instance: Instance) {
        self.young.retain(|_, cached| cached.home.instance != instance);
        self.old.retain(|_, cached| cached.home.instance != instance);
    }
}

/// Sessions that ended here, the oldest first.
#[derive(Debug, Default)]
struct Closed {
    order: VecDeque<RecordKey>,
    keys: FxHashSet<RecordKey>,
}

impl Closed {
    fn insert(&mut self, key: RecordKey) {
        if !self.keys.insert(key) {
            return;
        }
        self.order.push_back(key);
        if self.order.len() > CLOSED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.keys.remove(&oldest);
        }
    }

    fn contains(&self, key: RecordKey) -> bool {
        self.keys.contains(&key)
    }
}
