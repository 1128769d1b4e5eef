//! How many clients of the stateless era there are. They have neither a connection nor a session of their own.

use std::{
    hash::BuildHasher,
    net::IpAddr,
    time::{Duration, Instant},
};

use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::gateway::Who;

/// A client counts for so long after its last request.
pub(super) const COUNTS_FOR: Duration = Duration::from_secs(300);
/// Clients that are told apart; beyond it the half that was silent longest is dropped.
const CLIENTS_MAX: usize = 4096;

/// Which client sent a request: a hash of its identity, its address and its name for itself.
#[derive(Debug, Clone, Copy)]
pub struct Caller(u64);

impl Caller {
    pub fn of(who: &Who, ip: Option<IpAddr>, info: Option<&str>) -> Caller {
        Caller(FxBuildHasher.hash_one((&who.name, &who.profile, ip, info)))
    }
}

/// When each was last heard.
#[derive(Debug, Default)]
pub(super) struct StatelessClients(FxHashMap<u64, Instant>);

impl StatelessClients {
    pub(super) fn heard(&mut self, caller: Caller, now: Instant) {
        if self.0.insert(caller.0, now).is_none() && self.0.len() > CLIENTS_MAX {
            let mut heard: Vec<Instant> = self.0.values().copied().collect();
            let (_, middle, _) = heard.select_nth_unstable(CLIENTS_MAX / 2);
            let middle = *middle;
            self.0.retain(|_, heard| *heard > middle);
        }
    }

    pub(super) fn count(&self, now: Instant) -> usize {
        self.0.values().filter(|heard| **heard + COUNTS_FOR > now).count()
    }
}
