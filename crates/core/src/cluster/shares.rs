//! Which part of all rate budgets each replica uses: one table in a bucket, changed by compare-and-swap. The parts in use never
//! exceed the whole, whatever is lost; how a part is applied to a budget is the driver's work.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use super::{BadValue, BootTime, Instance};

/// All budgets together.
pub const WHOLE: u32 = 1_000_000;
/// How often a member renews its entry.
pub const RENEW: Duration = Duration::from_secs(60);
/// A replica that could not renew its entry for so long uses nothing.
pub const VALID: Duration = Duration::from_secs(60 * 60);
/// An entry that did not change for so long is removed. Clocks may differ by 3 % in between.
pub const REMOVE_AFTER: Duration = Duration::from_secs(65 * 60);

/// How long a replica that stops waits until its entry is removed.
pub const STOP_MAX: Duration = Duration::from_secs(2);
/// A request that is not answered for so long is made again.
const REQUEST_MAX: Duration = Duration::from_secs(2);
/// How long it waits after a request that failed, or whose outcome is not known.
const RETRY: Duration = Duration::from_millis(500);
/// Members write at different times: each waits for a random part of this, times their number.
const SPREAD: Duration = Duration::from_millis(10);
/// After a conflict, it waits longer with each further one, up to so many.
const CONFLICTS_COUNTED: u32 = 20;
/// Replicas in the table. A further one uses nothing.
const MEMBERS_MAX: usize = 1_000;
/// Of the format of the table. A table of another version is not read.
const VERSION: u32 = 1;
/// A longer table is not read.
pub const TABLE_BYTES_MAX: usize = 512 << 10;

/// The value of the key `shares`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Table {
    /// By the names of the replicas.
    pub members: BTreeMap<String, Member>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    pub instance: Instance,
    /// Of [`WHOLE`].
    pub parts: u32,
    /// Counts the writes of that instance.
    pub renewed: u64,
}

/// What is stored of the table.
#[derive(Serialize, Deserialize)]
struct Wire {
    members: BTreeMap<String, WireMember>,
}

#[derive(Serialize, Deserialize)]
struct WireMember {
    #[serde(with = "super::hex")]
    instance: Instance,
    parts: u32,
    renewed: u64,
}

impl Table {
    pub fn encode(&self) -> Vec<u8> {
        let members = self.members.iter().map(|(name, Member { instance, parts, renewed })| {
            (name.clone(), WireMember { instance: *instance, parts: *parts, renewed: *renewed })
        });
        super::write_value(VERSION, Wire { members: members.collect() })
    }

    pub fn decode(bytes: &[u8]) -> Result<Table, BadValue> {
        let Wire { members } = super::read_value(VERSION, bytes, TABLE_BYTES_MAX)?;
        let members = members
            .into_iter()
            .map(|(name, WireMember { instance, parts, renewed })| (name, Member { instance, parts, renewed }));
        let table = Table { members: members.collect() };
        let is_whole = table.members.len() <= MEMBERS_MAX && table.sum() <= u64::from(WHOLE);
        if is_whole { Ok(table) } else { Err(BadValue::Damaged) }
    }

    fn sum(&self) -> u64 {
        self.members.values().map(|member| u64::from(member.parts)).sum()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Connected,
    Disconnected,
    /// At the start: what an earlier process of this replica stored, and how old that is: the age that it stored, and the
    /// time since.
    Remembered {
        parts: u32,
        age: Duration,
    },
    /// The answer to [`Action::Read`].
    Read {
        found: Found,
    },
    /// The watch of the key; without a table the key was deleted.
    Changed {
        revision: u64,
        table: Option<Table>,
    },
    /// The bucket was created anew: revisions count from 1 again. Told before [`Event::Connected`].
    Cleared,
    Written {
        attempt: u64,
        result: Written,
    },
    /// The gateway stops: the entry is removed, so that the others can use its part.
    StopAsked,
    TimePassed,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    Some {
        revision: u64,
        table: Table,
    },
    /// There is no key.
    None,
    /// Not read, or not readable.
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    Done {
        revision: u64,
    },
    Conflict,
    /// It may have taken effect, or may still do so.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// From the leader.
    Read,
    /// Compare-and-swap; 0 means that the key must not exist.
    Write { attempt: u64, expected: u64, table: Table },
    /// The part that this replica uses from now on.
    Share { parts: u32 },
    /// To be on disk, with the time of day, before a later action is carried out: so long ago the entry was renewed.
    Remember { parts: u32, age: Duration },
}

#[derive(Debug)]
pub struct Shares {
    name: String,
    instance: Instance,
    dice: u64,
    is_connected: bool,
    stop: Stop,
    /// Of the key, as last known.
    revision: Option<u64>,
    /// As last known. If the key is deleted, the entries of the others stay, as their parts may be in use.
    table: Table,
    /// Since when the entries of the others have not changed.
    unchanged: BTreeMap<String, (Member, BootTime)>,
    /// False: the table is read before it is written.
    is_current: bool,
    request: Option<Request>,
    /// No request before.
    not_before: BootTime,
    /// When the next request is due.
    wake: Option<BootTime>,
    /// Writes that found another revision, one after the other.
    conflicts: u32,
    /// Writes that were sent.
    attempts: u64,
    /// The latest write. Only it can let the parts in use grow.
    last: Option<Sent>,
    /// A write of this process took effect.
    is_member: bool,
    parts: u32,
    /// Until when the entry is valid. Nothing is in use without it.
    valid_until: Option<BootTime>,
    /// What [`Action::Share`] said last.
    told: u32,
    /// What [`Action::Remember`] said last, and until when that is valid.
    remembered: (u32, Option<BootTime>),
}

#[derive(Debug)]
struct Sent {
    attempt: u64,
    at: BootTime,
    table: Table,
}

#[derive(Debug, Clone, Copy)]
struct Request {
    what: What,
    /// It is given up then.
    until: BootTime,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Read,
    Write { attempt: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    No,
    /// The entry is to be removed by then.
    Removing {
        until: BootTime,
    },
    Over,
    /// Another process has the name of this replica and has taken the entry.
    Replaced,
}

impl Shares {
    /// The seed is for the delays between attempts.
    pub fn new(name: String, instance: Instance, seed: u64) -> Shares {
        Shares {
            name,
            instance,
            dice: seed | 1,
            is_connected: false,
            stop: Stop::No,
            revision: None,
            table: Table::default(),
            unchanged: BTreeMap::new(),
            is_current: false,
            request: None,
            not_before: BootTime::default(),
            wake: None,
            conflicts: 0,
            attempts: 0,
            last: None,
            is_member: false,
            parts: 0,
            valid_until: None,
            told: 0,
            remembered: (0, None),
        }
    }

    pub fn handle(&mut self, event: Event, now: BootTime, actions: &mut Vec<Action>) {
        match event {
            Event::Connected => (self.is_connected, self.is_current) = (true, false),
            Event::Disconnected => (self.is_connected, self.is_current, self.request) = (false, false, None),
            Event::Remembered { parts, age } => {
                if !self.is_member && age < VALID {
                    (self.parts, self.valid_until) = (parts.min(WHOLE), Some(now + (VALID - age)));
                    self.remembered = (self.parts, self.valid_until);
                }
            }
            Event::Read { found } => {
                if self.request.is_some_and(|request| request.what == What::Read) {
                    self.request = None;
                }
                match found {
                    Found::Some { revision, table } => self.learn(revision, Some(table), now),
                    Found::None => self.learn(0, None, now),
                    Found::Failed => self.not_before = now + RETRY,
                }
            }
            Event::Changed { revision, table } => self.learn(revision, table, now),
            Event::Cleared => (self.revision, self.is_current) = (None, false),
            Event::Written { attempt, result } => self.written(attempt, result, now),
            Event::StopAsked => {
                if self.stop == Stop::No {
                    (self.stop, self.parts) = (Stop::Removing { until: now + STOP_MAX }, 0);
                }
            }
            Event::TimePassed => {}
        }
        self.look(now, actions);
    }

    pub fn deadline(&self) -> Option<BootTime> {
        let removing = match self.stop {
            Stop::Removing { until } => Some(until),
            _ => None,
        };
        let request = self.request.map(|request| request.until);
        [self.valid_until, request, removing, self.wake].into_iter().flatten().min()
    }

    /// What this replica uses now, of [`WHOLE`].
    pub fn parts(&self) -> u32 {
        self.parts
    }

    /// After [`Event::StopAsked`]: the entry is removed, or that was given up.
    pub fn is_over(&self) -> bool {
        matches!(self.stop, Stop::Over | Stop::Replaced)
    }

    /// As last known, for operators.
    pub fn table(&self) -> Option<&Table> {
        self.revision.map(|_| &self.table)
    }

    /// What is known of the bucket, if it is newer.
    fn learn(&mut self, revision: u64, table: Option<Table>, now: BootTime) {
        self.is_current = true;
        if self.revision.is_some_and(|known| revision <= known) {
            return;
        }
        self.revision = Some(revision);
        let Some(table) = table else {
            self.table.members.remove(&self.name);
            return;
        };
        self.table = table;
        let others = self.table.members.iter().filter(|(name, _)| **name != self.name);
        let unchanged = others.map(|(name, member)| {
            let known = self.unchanged.get(name).filter(|(known, _)| known == member);
            (name.clone(), (*member, known.map_or(now, |(_, since)| *since)))
        });
        self.unchanged = unchanged.collect();
        match self.table.members.get(&self.name).copied() {
            Some(own) if own.instance == self.instance => {
                match self.last.as_ref().filter(|last| last.attempt == own.renewed).map(|last| last.at) {
                    Some(sent) => self.took_effect(own.parts, sent),
                    // An earlier write: a later one may still take effect, and leave less.
                    None => self.parts = self.parts.min(own.parts),
                }
            }
            Some(_) if self.is_member => (self.stop, self.parts) = (Stop::Replaced, 0),
            Some(earlier) => self.parts = self.parts.min(earlier.parts),
            // The others have removed it.
            None => self.parts = 0,
        }
        // All members learn this at the same time; they do not write at the same time.
        let members = self.table.members.len() as u64;
        let delay = self.random_part(SPREAD * members as u32);
        self.not_before = self.not_before.max(now + delay);
    }

    fn took_effect(&mut self, parts: u32, sent: BootTime) {
        self.is_member = true;
        self.valid_until = Some(sent + VALID);
        if self.stop == Stop::No {
            self.parts = parts;
        }
    }

    fn written(&mut self, attempt: u64, result: Written, now: BootTime) {
        if self.request.is_some_and(|request| request.what == What::Write { attempt }) {
            self.request = None;
        }
        let table = self.last.as_ref().filter(|last| last.attempt == attempt).map(|last| last.table.clone());
        match (result, table) {
            (Written::Done { revision }, Some(table)) => {
                self.conflicts = 0;
                self.learn(revision, Some(table), now);
            }
            (Written::Conflict, _) => {
                self.is_current = false;
                self.conflicts = (self.conflicts + 1).min(CONFLICTS_COUNTED);
                self.not_before = now + self.random_part(SPREAD * self.conflicts);
            }
            (Written::Unknown | Written::Done { .. }, _) => {
                self.is_current = false;
                self.not_before = now + RETRY;
            }
        }
    }

    /// Does all that is due. Again at the same moment, it does nothing.
    fn look(&mut self, now: BootTime, actions: &mut Vec<Action>) {
        self.valid_until = self.valid_until.filter(|until| *until > now);
        if self.valid_until.is_none() {
            self.parts = 0;
        }
        if self.request.is_some_and(|request| request.until <= now) {
            (self.request, self.is_current) = (None, false);
        }
        if let Stop::Removing { until } = self.stop
            && (until <= now || !self.is_connected)
        {
            self.stop = Stop::Over;
        }
        self.wake = None;
        let mut next = None;
        if self.is_connected && self.request.is_none() && !self.is_over() {
            next = self.next_request(now);
        }
        if let Some(Action::Write { table, .. }) = &next {
            // It shrinks before the others can know it.
            self.parts = self.parts.min(table.members.get(&self.name).map_or(0, |own| own.parts));
        }
        if self.told != self.parts {
            self.told = self.parts;
            actions.push(Action::Share { parts: self.parts });
        }
        if self.remembered != (self.parts, self.valid_until) {
            self.remembered = (self.parts, self.valid_until);
            let left = self.valid_until.map_or(VALID, |until| until.since(now));
            actions.push(Action::Remember { parts: self.parts, age: VALID.saturating_sub(left) });
        }
        actions.extend(next);
    }

    fn next_request(&mut self, now: BootTime) -> Option<Action> {
        let at = match self.is_current {
            false => self.not_before,
            true => match self.write_at(now) {
                Some(at) => at.max(self.not_before),
                None => {
                    self.stop = Stop::Over;
                    return None;
                }
            },
        };
        if at > now {
            self.wake = Some(at);
            return None;
        }
        let until = now + REQUEST_MAX;
        if !self.is_current {
            self.request = Some(Request { what: What::Read, until });
            return Some(Action::Read);
        }
        self.attempts += 1;
        let (attempt, table) = (self.attempts, self.table_to_write(self.attempts, now));
        self.request = Some(Request { what: What::Write { attempt }, until });
        self.last = Some(Sent { attempt, at: now, table: table.clone() });
        Some(Action::Write { attempt, expected: self.revision.unwrap_or(0), table })
    }

    /// When the table is to be written; never if this replica stops and is not in it.
    fn write_at(&self, now: BootTime) -> Option<BootTime> {
        let own = self.table.members.get(&self.name);
        if matches!(self.stop, Stop::Removing { .. }) {
            return own.map(|_| now);
        }
        // An earlier write took effect after this replica had given it up. Only a new write can let its parts grow.
        if own.is_some_and(|own| own.instance == self.instance && self.parts < own.parts) {
            return Some(now);
        }
        let wanted = self.table_to_write(0, now);
        let parts = |table: &Table| table.members.get(&self.name).map(|own| (own.instance, own.parts));
        if parts(&wanted) != parts(&self.table) || wanted.members.len() != self.table.members.len() {
            return Some(now);
        }
        let removal = self.unchanged.values().map(|(_, since)| *since + REMOVE_AFTER).min();
        let renewal = self.valid_until.map_or(now, |until| until.before(VALID) + RENEW);
        Some(removal.map_or(renewal, |removal| removal.min(renewal)))
    }

    /// The table without those that are gone, and with equal parts for this replica as far as they are free.
    fn table_to_write(&self, renewed: u64, now: BootTime) -> Table {
        let mut table = self.table.clone();
        table.members.remove(&self.name);
        table.members.retain(|name, _| {
            let since = self.unchanged.get(name).map(|(_, since)| *since);
            since.is_none_or(|since| now < since + REMOVE_AFTER)
        });
        if matches!(self.stop, Stop::Removing { .. }) || table.members.len() >= MEMBERS_MAX {
            return table;
        }
        let equal = WHOLE / (table.members.len() as u32 + 1);
        let free = u64::from(WHOLE).saturating_sub(table.sum());
        let parts = equal.min(u32::try_from(free).unwrap_or(WHOLE));
        table.members.insert(self.name.clone(), Member { instance: self.instance, parts, renewed });
        table
    }

    /// Between nothing and `most`, by xorshift.
    fn random_part(&mut self, most: Duration) -> Duration {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        most * (self.dice >> 16) as u16 as u32 / u32::from(u16::MAX)
    }
}
