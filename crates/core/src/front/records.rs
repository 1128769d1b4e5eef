//! Stored sessions whose clients have not come back since the gateway was started.

use std::{
    collections::HashMap,
    rc::Rc,
    time::{Duration, Instant},
};

use rustc_hash::FxHashMap;

use super::{
    Loaded, SessionId,
    record::{RecordKey, SessionState},
    sooner,
};
use crate::gateway::Who;

#[derive(Debug)]
pub(super) struct Records {
    hash: fn(SessionId) -> RecordKey,
    dormant: FxHashMap<RecordKey, Dormant>,
}

#[derive(Debug)]
struct Dormant {
    who: Rc<Who>,
    state: Box<SessionState>,
    loaded: Instant,
    /// How long it had not been written then.
    age: Duration,
}

impl Records {
    pub(super) fn new(hash: fn(SessionId) -> RecordKey) -> Records {
        Records { hash, dormant: FxHashMap::default() }
    }

    pub(super) fn key(&self, id: SessionId) -> RecordKey {
        (self.hash)(id)
    }

    /// The newest `room` of those that have not expired are kept; the keys of the others.
    pub(super) fn load(
        &mut self,
        mut records: Vec<Loaded>,
        ttl: Duration,
        room: usize,
        now: Instant,
    ) -> Vec<RecordKey> {
        records.sort_unstable_by_key(|loaded| (loaded.age, loaded.key));
        let kept = records.partition_point(|loaded| loaded.age < ttl).min(room);
        let dropped = records.split_off(kept).into_iter().map(|loaded| loaded.key).collect();
        // Many sessions are of the same client.
        let mut known: HashMap<String, Rc<Who>> = HashMap::new();
        for Loaded { key, record, age } in records {
            let who = match known.get(&record.who.name) {
                Some(who) if **who == record.who => who.clone(),
                _ => {
                    let who = Rc::new(record.who);
                    known.insert(who.name.clone(), who.clone());
                    who
                }
            };
            self.dormant.insert(key, Dormant { who, state: Box::new(record.state), loaded: now, age });
        }
        dropped
    }

    pub(super) fn dormant(&self) -> usize {
        self.dormant.len()
    }

    pub(super) fn dormant_of(&self, who: &Who) -> usize {
        self.dormant.values().filter(|dormant| dormant.who.name == who.name).count()
    }

    pub(super) fn find(&self, id: SessionId, who: &Who) -> Option<RecordKey> {
        let key = self.key(id);
        self.dormant.get(&key).filter(|dormant| *dormant.who == *who).map(|_| key)
    }

    pub(super) fn take(&mut self, key: RecordKey) -> Option<(Rc<Who>, Box<SessionState>)> {
        self.dormant.remove(&key).map(|dormant| (dormant.who, dormant.state))
    }

    /// The one of a client that was used longest ago.
    pub(super) fn idlest(&self, who: &Who) -> Option<RecordKey> {
        let own = self.dormant.iter().filter(|(_, dormant)| dormant.who.name == who.name);
        own.max_by_key(|(key, dormant)| (dormant.age, **key)).map(|(key, _)| *key)
    }

    /// Takes out what was not used for so long.
    pub(super) fn expire(&mut self, ttl: Duration, now: Instant, next: &mut Option<Instant>) -> Vec<RecordKey> {
        let mut over = Vec::new();
        self.dormant.retain(|key, dormant| {
            let at = dormant.loaded + ttl.saturating_sub(dormant.age);
            match at <= now {
                true => over.push(*key),
                false => sooner(next, Some(at)),
            }
            now < at
        });
        over.sort_unstable();
        over
    }
}
