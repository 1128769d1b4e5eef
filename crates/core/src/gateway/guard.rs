//! Guards: the checks that each call passes before it reaches a backend. Name patterns, roles, rates, circuit breakers
//! and the kill switch.
//! The order in which they are asked is in [`super::dispatch`]. They do not allocate for a client and tool that were
//! seen before.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::{Duration, Instant},
};

use crate::{json::Raw, saved::Moment};

use super::{
    Fit, Pattern, Profile, Rate, Rates, Role, Schemas, Settings, Switch,
    saved::{SavedCircuit, SavedGuards},
};

impl Pattern {
    /// Whether a name matches. `*` is any number of characters; every other character is itself.
    pub fn fits(&self, name: &str) -> bool {
        let (pattern, name) = (self.0.as_bytes(), name.as_bytes());
        let (mut p, mut n) = (0, 0);
        // Where matching continues after a mismatch: behind the last star, one character later.
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

/// Whether a name passes two lists. An empty `allow` allows everything; `deny` wins.
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

    /// Whether it shows a tool of a backend that it shows.
    pub fn has_tool(&self, tool: &str) -> bool {
        passes(&self.allow, &self.deny, tool)
    }
}

impl Role {
    /// Unlike elsewhere, an empty `allow` allows nothing.
    pub fn allows(&self, tool: &str) -> bool {
        any_fits(&self.allow, tool) && !any_fits(&self.deny, tool)
    }

    /// Whether it allows every tool, also future ones.
    fn is_unbounded(&self) -> bool {
        self.allow.iter().any(|pattern| pattern.0 == "*") && self.deny.is_empty()
    }
}

/// Which role may call which tools.
#[derive(Debug, Clone, Default)]
pub struct Roles(BTreeMap<String, Role>);

impl Roles {
    pub fn new(roles: BTreeMap<String, Role>) -> Roles {
        Roles(roles)
    }

    /// Everything is allowed if no roles are configured, or if the client has none because there is no authentication.
    /// A role that is not configured has no rights.
    pub fn allow(&self, role: Option<&str>, tool: &str) -> bool {
        match role {
            Some(role) if !self.0.is_empty() => self.0.get(role).is_some_and(|role| role.allows(tool)),
            _ => true,
        }
    }

    /// Whether a role may see and control the whole gateway: only if it may call every tool.
    pub fn has_all(&self, role: Option<&str>) -> bool {
        match role {
            Some(role) if !self.0.is_empty() => self.0.get(role).is_some_and(Role::is_unbounded),
            _ => true,
        }
    }
}

/// The guards that the calls of all backends share. Each backend has its own circuit breaker.
pub(super) struct Guards {
    switches: Switches,
    buckets: Buckets,
    roles: Roles,
    schemas: Box<dyn Schemas>,
}

impl std::fmt::Debug for Guards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Guards { switches, buckets, roles, schemas: _ } = self;
        f.debug_struct("Guards").field("switches", switches).field("buckets", buckets).field("roles", roles).finish()
    }
}

impl Guards {
    pub(super) fn new(settings: &Settings, schemas: Box<dyn Schemas>) -> Guards {
        Guards {
            switches: Switches::new(&settings.switched_off),
            buckets: Buckets::new(settings.rates.clone()),
            roles: Roles::new(settings.roles.clone()),
            schemas,
        }
    }

    pub(super) fn configure(&mut self, settings: &Settings) {
        self.switches.configure(&settings.switched_off);
        self.buckets.configure(settings.rates.clone());
        self.roles = Roles::new(settings.roles.clone());
    }

    /// What operators have switched, and the buckets that are not full. Settings are not part of it.
    pub(super) fn save(&self, now: Instant) -> SavedGuards {
        let Switches { tools, backends, .. } = &self.switches;
        SavedGuards { tools_off: tools.clone(), backends_off: backends.clone(), buckets: self.buckets.save(now) }
    }

    /// The settings are there already.
    pub(super) fn restore(&mut self, saved: SavedGuards, now: Instant) {
        (self.switches.tools, self.switches.backends) = (saved.tools_off, saved.backends_off);
        self.buckets.restore(saved.buckets, now);
    }

    pub(super) fn take_token(&mut self, who: &str, tool: &str, now: Instant) -> Result<(), Wait> {
        self.buckets.take(who, tool, now)
    }

    pub(super) fn set_share(&mut self, parts: u32) {
        self.buckets.set_share(parts);
    }

    pub(super) fn allow(&self, role: Option<&str>, tool: &str) -> bool {
        self.roles.allow(role, tool)
    }

    pub(super) fn has_all_rights(&self, role: Option<&str>) -> bool {
        self.roles.has_all(role)
    }

    pub(super) fn switch(&mut self, what: &Switch, off: bool) -> bool {
        self.switches.turn(what, off)
    }

    pub(super) fn is_backend_off(&self, backend: &str) -> bool {
        self.switches.is_backend_off(backend)
    }

    pub(super) fn is_tool_off(&self, tool: &str) -> bool {
        self.switches.is_tool_off(tool)
    }

    pub(super) fn all_off(&self) -> impl Iterator<Item = Switch> {
        self.switches.all_off()
    }

    /// Nothing if that has to be found out beside the loop.
    pub(super) fn check_arguments(&mut self, schema: &[u8], arguments: Raw<'_>) -> Option<Fit> {
        self.schemas.check(schema, arguments)
    }
}

/// Token buckets, one for each client and tool that was called lately.
///
/// A full bucket equals no bucket, so it is forgotten when room is needed. At [`Buckets::MAX`] buckets, none of them
/// full, a new pair of client and tool is refused until the first bucket is full: no pair gets more than its rate.
#[derive(Debug)]
pub struct Buckets {
    rates: Rates,
    max: usize,
    /// When each bucket will be full. Nothing else needs to be known of it.
    /// With keyed hashes, because clients and backends choose their names.
    full_at: HashMap<String, HashMap<String, Instant>>,
    count: usize,
    /// No bucket is full before this time.
    none_full_before: Option<Instant>,
    /// The part of each rate that may be used here.
    share: u32,
}

/// A gateway that is in no cluster uses the whole of each rate.
pub const SHARE_WHOLE: u32 = 1_000_000;
/// When a call is tried again that came while this replica had no share.
const SHARE_WAIT: Duration = Duration::from_secs(1);

/// A call is refused for this time.
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
        Buckets { rates, max, full_at: HashMap::new(), count: 0, none_full_before: None, share: SHARE_WHOLE }
    }

    /// Sets other rates. Tokens that were taken stay taken, at most one bucket of them.
    pub fn configure(&mut self, rates: Rates) {
        if self.rates != rates {
            self.rates = rates;
            // With a higher rate a bucket may be full earlier.
            self.none_full_before = None;
        }
    }

    /// Sets the part of each rate that may be used here, of [`SHARE_WHOLE`]. With another share a token takes longer or
    /// shorter to come, and a bucket holds that part of the burst, but at least one token.
    pub fn set_share(&mut self, parts: u32) {
        self.share = parts.min(SHARE_WHOLE);
        self.none_full_before = None;
    }

    /// Takes one token. A refused call costs none.
    pub fn take(&mut self, who: &str, tool: &str, now: Instant) -> Result<(), Wait> {
        let Some(rate) = self.rates.of(tool) else { return Ok(()) };
        if self.share == 0 {
            return Err(Wait { retry_after: SHARE_WAIT });
        }
        let token = rate.token_of(self.share);
        let bucket = rate.bucket().max(token);
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

    fn save(&self, now: Instant) -> Vec<(String, String, Moment)> {
        let all = self.full_at.iter().flat_map(|(who, tools)| tools.iter().map(move |(tool, at)| (who, tool, *at)));
        let used = all.filter(|(_, _, at)| *at > now);
        let mut saved: Vec<(String, String, Moment)> =
            used.map(|(who, tool, at)| (who.clone(), tool.clone(), Moment::of(at, now))).collect();
        saved.sort_unstable_by(|one, other| (&one.0, &one.1).cmp(&(&other.0, &other.1)));
        saved
    }

    fn restore(&mut self, saved: Vec<(String, String, Moment)>, now: Instant) {
        self.count = saved.len();
        for (who, tool, at) in saved {
            self.full_at.entry(who).or_default().insert(tool, at.at(now));
        }
        // The first look for room finds out when a bucket is full.
        self.none_full_before = None;
    }

    /// How many buckets are kept.
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
            // After a lower rate was set, at most one bucket of tokens is missing.
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
    /// The rate of a tool, by the name that clients see.
    pub fn of(&self, tool: &str) -> Option<Rate> {
        let own = self.tools.iter().find(|(pattern, _)| pattern.fits(tool));
        own.map(|(_, rate)| *rate).or(self.default)
    }
}

impl Rate {
    /// The time in which one token comes, rounded up so that the rate is never exceeded. A rate below one a minute
    /// counts as one a minute; the configuration refuses it.
    fn token(self) -> Duration {
        Duration::from_nanos(60_000_000_000_u64.div_ceil(u64::from(self.per_minute.max(1))))
    }

    /// The same with this part of the rate.
    fn token_of(self, share: u32) -> Duration {
        let whole = self.token();
        match share {
            SHARE_WHOLE => whole,
            share => {
                let nanos = (whole.as_nanos() * u128::from(SHARE_WHOLE)).div_ceil(u128::from(share.max(1)));
                Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
            }
        }
    }

    /// The time in which an empty bucket fills.
    fn bucket(self) -> Duration {
        self.token().saturating_mul(self.burst.max(1))
    }
}

/// A circuit breaker: after a number of failures in a row no call passes for a while, and then one call as a probe.
#[derive(Debug, Clone)]
pub struct Breaker {
    /// With 0 it never opens.
    failures_max: u32,
    open_for: Duration,
    state: Circuit,
    /// Counts the changes of state, so that the outcome of a call from an earlier state is ignored.
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

/// A call that passed. Its outcome must be reported: a probe without one would leave the circuit half open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Pass {
    epoch: u64,
}

/// What the end of a call says of the backend's health.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// It answered, also if the tool failed.
    Well,
    /// It was lost, timed out, or the backend could not be reached.
    Ill,
    /// Nothing is known: the client cancelled.
    Unknown,
}

impl Breaker {
    /// The wait for calls that come during the probe, whose duration is unknown.
    pub const PROBE_WAIT: Duration = Duration::from_secs(1);

    pub fn new(failures_max: u32, open_for: Duration) -> Breaker {
        Breaker { failures_max, open_for, state: Circuit::Closed { failures: 0 }, epoch: 0 }
    }

    pub fn state(&self) -> Circuit {
        self.state
    }

    /// The limits are not part of it.
    pub(super) fn save(&self, now: Instant) -> SavedCircuit {
        match self.state {
            Circuit::Closed { failures } => SavedCircuit::Closed { failures },
            Circuit::Open { until } => SavedCircuit::Open { until: Moment::of(until, now) },
            // No call is open, so the probe is over, and the next call is one.
            Circuit::HalfOpen => SavedCircuit::Open { until: Moment::of(now, now) },
        }
    }

    pub(super) fn restore(&mut self, saved: SavedCircuit, now: Instant) {
        self.turn_to(match saved {
            SavedCircuit::Closed { failures } => Circuit::Closed { failures },
            SavedCircuit::Open { until } => Circuit::Open { until: until.at(now) },
        });
    }

    /// Sets other limits. An open circuit stays open until its time.
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

    /// A new process or an operator: earlier failures count no longer.
    pub fn reset(&mut self) {
        self.turn_to(Circuit::Closed { failures: 0 });
    }

    fn turn_to(&mut self, state: Circuit) {
        self.state = state;
        self.epoch += 1;
    }
}

/// The kill switch: tools and backends that are off for all clients.
///
/// A switch by an operator holds until the configuration changes for the same name.
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

    /// Whether this tool itself is off. Its backend may be off as well.
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
