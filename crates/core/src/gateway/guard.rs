//! What stands between a call and its backend: patterns of names, roles, rates, circuit breakers and the kill switch.
//!
//! Each is a small unit of its own that is told the time; the gateway asks them in their order. None of them allocates for a
//! call it has seen the like of before.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use rustc_hash::FxHashMap;

use super::{Pattern, Profile, Rate, Rates, Role, Switch};

impl Pattern {
    /// Whether it stands for this name. `*` is any number of any letters; everything else is itself.
    pub fn fits(&self, name: &str) -> bool {
        let (pattern, name) = (self.0.as_bytes(), name.as_bytes());
        let (mut p, mut n) = (0, 0);
        // Where to go back to: after the last star, and the first letter it has not swallowed yet.
        let mut back: Option<(usize, usize)> = None;
        while n < name.len() {
            match pattern.get(p) {
                Some(b'*') => {
                    p += 1;
                    back = Some((p, n));
                }
                Some(letter) if *letter == name[n] => {
                    p += 1;
                    n += 1;
                }
                _ => match &mut back {
                    Some((after_star, swallowed)) => {
                        *swallowed += 1;
                        (p, n) = (*after_star, *swallowed);
                    }
                    None => return false,
                },
            }
        }
        pattern[p..].iter().all(|letter| *letter == b'*')
    }
}

/// Whether a name passes two lists. An empty `allow` lets everything in; `deny` has the last word.
pub fn passes(allow: &[Pattern], deny: &[Pattern], name: &str) -> bool {
    (allow.is_empty() || any_fits(allow, name)) && !any_fits(deny, name)
}

fn any_fits(patterns: &[Pattern], name: &str) -> bool {
    patterns.iter().any(|pattern| pattern.fits(name))
}

impl Profile {
    pub fn has_backend(&self, backend: &str) -> bool {
        passes(&self.backends, &[], backend)
    }

    /// Of a backend that is in it.
    pub fn has_tool(&self, tool: &str) -> bool {
        passes(&self.allow, &self.deny, tool)
    }
}

impl Role {
    /// Unlike elsewhere an empty `allow` lets nothing in: a right that nobody gave is none.
    pub fn allows(&self, tool: &str) -> bool {
        any_fits(&self.allow, tool) && !any_fits(&self.deny, tool)
    }

    /// Whether it allows every tool, also those that are not there yet.
    fn is_unbounded(&self) -> bool {
        self.allow.iter().any(|pattern| pattern.0 == "*") && self.deny.is_empty()
    }
}

/// Who may call what.
#[derive(Debug, Clone, Default)]
pub struct Roles(BTreeMap<String, Role>);

impl Roles {
    pub fn new(roles: BTreeMap<String, Role>) -> Roles {
        Roles(roles)
    }

    /// Where no role is known, or a client has none because nobody asked who it is, everything is allowed. A role that
    /// is not among the known ones has no rights.
    pub fn allow(&self, role: Option<&str>, tool: &str) -> bool {
        match role {
            Some(role) if !self.0.is_empty() => self.0.get(role).is_some_and(|role| role.allows(tool)),
            _ => true,
        }
    }

    /// Whether somebody may see and steer the whole gateway: only those whose rights have no end.
    pub fn has_all(&self, role: Option<&str>) -> bool {
        match role {
            Some(role) if !self.0.is_empty() => self.0.get(role).is_some_and(Role::is_unbounded),
            _ => true,
        }
    }
}

/// Token buckets, one for each client and tool that was called lately.
///
/// A full bucket is the same as none, so it is forgotten when room is needed. At [`Buckets::MAX`], with not one of them full, a
/// pair that has none yet is refused until the first of the others is full: no pair ever gets more than its rate.
#[derive(Debug)]
pub struct Buckets {
    rates: Rates,
    max: usize,
    /// When each will be full again. All that is to be known of a bucket follows from it.
    full_at: FxHashMap<String, FxHashMap<String, Instant>>,
    count: usize,
    /// Before this none can be forgotten: a bucket never gets full sooner than it was going to.
    none_full_before: Option<Instant>,
}

/// Why a call is refused for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    pub retry_after: Duration,
}

impl Buckets {
    pub const MAX: usize = 10_000;

    pub fn new(rates: Rates) -> Buckets {
        Buckets::with_max(rates, Buckets::MAX)
    }

    pub fn with_max(rates: Rates, max: usize) -> Buckets {
        Buckets { rates, max, full_at: FxHashMap::default(), count: 0, none_full_before: None }
    }

    /// Other rates from here on. What was taken stays taken, at most a whole bucket of it.
    pub fn configure(&mut self, rates: Rates) {
        if self.rates != rates {
            self.rates = rates;
            // Under a quicker rate a bucket may be full sooner than thought.
            self.none_full_before = None;
        }
    }

    /// One call of a tool, as its client sees it. A refused one costs nothing.
    pub fn take(&mut self, who: &str, tool: &str, now: Instant) -> Result<(), Wait> {
        let Some(rate) = self.rates.of(tool) else { return Ok(()) };
        let (token, bucket) = (rate.token(), rate.bucket());
        let known = self.full_at.get_mut(who).and_then(|tools| tools.get_mut(tool));
        if let Some(full_at) = known {
            let taken = full_at.saturating_duration_since(now).min(bucket);
            let room = bucket - taken;
            if room < token {
                return Err(Wait { retry_after: token - room });
            }
            *full_at = now + taken + token;
            return Ok(());
        }
        self.make_room(now)?;
        self.count += 1;
        self.full_at.entry(who.to_owned()).or_default().insert(tool.to_owned(), now + token);
        let earliest = self.none_full_before.map_or(now + token, |before| before.min(now + token));
        self.none_full_before = Some(earliest);
        Ok(())
    }

    /// How many are kept.
    pub fn len(&self) -> usize {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    fn make_room(&mut self, now: Instant) -> Result<(), Wait> {
        if self.count < self.max {
            return Ok(());
        }
        if self.none_full_before.is_none_or(|before| before <= now) {
            self.forget_full(now);
        }
        match self.none_full_before {
            Some(before) if self.count >= self.max => {
                Err(Wait { retry_after: before.saturating_duration_since(now).max(Duration::from_millis(1)) })
            }
            _ => Ok(()),
        }
    }

    fn forget_full(&mut self, now: Instant) {
        let (mut count, mut earliest) = (0, None::<Instant>);
        for tools in self.full_at.values_mut() {
            // A slower rate may have been set since; what is still owed by it is at most a whole bucket.
            tools.retain(|_, full_at| *full_at > now);
            count += tools.len();
            earliest = tools.values().copied().chain(earliest).min();
        }
        self.full_at.retain(|_, tools| !tools.is_empty());
        self.count = count;
        self.none_full_before = earliest;
    }
}

impl Rates {
    /// What holds for a tool, as clients see it.
    pub fn of(&self, tool: &str) -> Option<Rate> {
        let own = self.tools.iter().find(|(pattern, _)| pattern.fits(tool));
        own.map(|(_, rate)| *rate).or(self.default)
    }
}

impl Rate {
    /// The time in which one token comes, rounded up so that no rounding adds one. A rate below one a minute counts as
    /// one a minute; the configuration refuses it.
    fn token(self) -> Duration {
        Duration::from_nanos(60_000_000_000_u64.div_ceil(u64::from(self.per_minute.max(1))))
    }

    /// The time in which an empty bucket fills.
    fn bucket(self) -> Duration {
        self.token().saturating_mul(self.burst.max(1))
    }
}

/// Lets a backend rest that only fails: after so many failures in a row nothing passes for a while, and then one call that
/// shows whether it is worth going on.
#[derive(Debug, Clone)]
pub struct Breaker {
    /// 0: it never opens.
    failures_max: u32,
    open_for: Duration,
    state: Circuit,
    /// Counts the changes of state, so that the outcome of a call that passed in an earlier one is known to be old news.
    epoch: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Circuit {
    Closed {
        failures: u32,
    },
    /// Nothing passes until then; the next call after it is the probe.
    Open {
        until: Instant,
    },
    /// The probe is under way, and nothing else passes.
    HalfOpen,
}

/// A call that was let through. Whoever has it owes the breaker its outcome: a probe that nobody speaks of again would
/// leave the circuit half open for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Pass {
    epoch: u64,
}

/// How a call that was let through ended, as far as the backend's health goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// It answered, be it that the tool failed: whoever says no is there.
    Well,
    /// It was lost, timed out, or the backend could not be reached.
    Ill,
    /// Nothing was learned: the client took it back.
    Unknown,
}

impl Breaker {
    /// What is said to those who come while the probe is under way: nobody knows how long it will be.
    pub const PROBE_WAIT: Duration = Duration::from_secs(1);

    pub fn new(failures_max: u32, open_for: Duration) -> Breaker {
        Breaker { failures_max, open_for, state: Circuit::Closed { failures: 0 }, epoch: 0 }
    }

    pub fn state(&self) -> Circuit {
        self.state
    }

    /// Other numbers from here on. A circuit that is open stays so until the time it was given.
    pub fn configure(&mut self, failures_max: u32, open_for: Duration) {
        (self.failures_max, self.open_for) = (failures_max, open_for);
        if failures_max == 0 {
            self.reset();
        }
    }

    /// Whether one call may pass.
    pub fn ask(&mut self, now: Instant) -> Result<Pass, Wait> {
        match self.state {
            Circuit::Closed { .. } => {}
            Circuit::Open { until } if now < until => {
                return Err(Wait { retry_after: until.saturating_duration_since(now) });
            }
            Circuit::Open { .. } => self.turn_to(Circuit::HalfOpen),
            Circuit::HalfOpen => return Err(Wait { retry_after: Breaker::PROBE_WAIT }),
        }
        Ok(Pass { epoch: self.epoch })
    }

    /// The outcome of a call that passed. True if it opened the circuit.
    pub fn heard(&mut self, pass: Pass, health: Health, now: Instant) -> bool {
        if pass.epoch != self.epoch {
            return false;
        }
        match (self.state, health) {
            (Circuit::Closed { .. }, Health::Well) => self.state = Circuit::Closed { failures: 0 },
            (Circuit::Closed { failures }, Health::Ill) => {
                let failures = failures.saturating_add(1);
                if self.failures_max > 0 && failures >= self.failures_max {
                    self.turn_to(Circuit::Open { until: now + self.open_for });
                    return true;
                }
                self.state = Circuit::Closed { failures };
            }
            (Circuit::HalfOpen, Health::Well) => self.turn_to(Circuit::Closed { failures: 0 }),
            (Circuit::HalfOpen, Health::Ill) => {
                self.turn_to(Circuit::Open { until: now + self.open_for });
                return true;
            }
            // The next one is the probe.
            (Circuit::HalfOpen, Health::Unknown) => self.turn_to(Circuit::Open { until: now }),
            (Circuit::Closed { .. }, Health::Unknown) => {}
            (Circuit::Open { .. }, _) => unreachable!("no call passes an open circuit"),
        }
        false
    }

    /// Another child, or an operator's wish: what was heard before is forgotten.
    pub fn reset(&mut self) {
        self.turn_to(Circuit::Closed { failures: 0 });
    }

    fn turn_to(&mut self, state: Circuit) {
        self.state = state;
        self.epoch += 1;
    }
}

/// The kill switch: tools and backends that are off, whoever asks.
///
/// What an operator says holds until the configuration says something new about the same thing.
#[derive(Debug, Clone, Default)]
pub struct Switches {
    configured: BTreeSet<Switch>,
    tools: BTreeSet<String>,
    backends: BTreeSet<String>,
}

impl Switches {
    pub fn new(switched_off: &[Switch]) -> Switches {
        let mut switches = Switches::default();
        switches.configure(switched_off);
        switches
    }

    pub fn configure(&mut self, switched_off: &[Switch]) {
        let configured: BTreeSet<Switch> = switched_off.iter().cloned().collect();
        for gone in self.configured.clone().difference(&configured) {
            self.turn(gone, false);
        }
        for new in configured.difference(&self.configured.clone()) {
            self.turn(new, true);
        }
        self.configured = configured;
    }

    /// True if that changed anything.
    pub fn turn(&mut self, what: &Switch, off: bool) -> bool {
        let (set, name) = match what {
            Switch::Tool(name) => (&mut self.tools, name),
            Switch::Backend(name) => (&mut self.backends, name),
        };
        if off { set.insert(name.clone()) } else { set.remove(name) }
    }

    pub fn is_backend_off(&self, backend: &str) -> bool {
        self.backends.contains(backend)
    }

    /// By its own name, as clients see it; its backend may be off besides.
    pub fn is_tool_off(&self, tool: &str) -> bool {
        self.tools.contains(tool)
    }

    pub fn all_off(&self) -> impl Iterator<Item = Switch> {
        let backends = self.backends.iter().cloned().map(Switch::Backend);
        backends.chain(self.tools.iter().cloned().map(Switch::Tool))
    }
}

#[cfg(test)]
mod tests;
