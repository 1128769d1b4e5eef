//! Which replica runs each backend with `placement = "one"`: one lease for each, a key in a bucket that is changed by
//! compare-and-swap. Two replicas never run a backend at the same time, because the monitor of its process at the owner ends it
//! before another replica can take the lease.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{BadValue, BootTime, Instance};

/// How long a lease is valid, from before the write that renewed it was sent.
pub const LEASE: Duration = Duration::from_secs(10);
/// How often it is renewed.
pub const RENEW: Duration = Duration::from_secs(2);
/// The monitor kills the host so long before the lease expires.
pub const KILL_BEFORE: Duration = Duration::from_millis(500);
/// The host is asked to stop so long before a lease that was not renewed expires.
pub const STOP_BEFORE: Duration = Duration::from_millis(3_500);
/// A lease of another replica is free after its revision did not change for so long.
pub const TAKE_AFTER: Duration = Duration::from_secs(11);

/// Backends spread over the replicas: for each lease that a replica has, it takes the next free one so much later.
const SPREAD: Duration = Duration::from_millis(100);
/// Up to so many; each further one is taken within a second more.
const SPREAD_STEPS: usize = 10;
/// A request that is not answered for so long is made again.
const REQUEST_MAX: Duration = Duration::from_secs(2);
/// How long it waits after a write whose outcome is not known.
const RETRY: Duration = Duration::from_millis(500);
/// How long it waits after a write that found another revision; the watch often says earlier which.
const CONFLICT_PAUSE: Duration = Duration::from_millis(50);
/// Requests of all backends at the same time; more wait.
const REQUESTS_MAX: usize = 128;
/// Writes of one backend within [`LEASE`]; the next one waits until the first of them is that old.
const ATTEMPTS_MAX: usize = 32;
/// Of the format of a lease. A lease of another version is not read.
const VERSION: u32 = 1;
/// A longer value is not read.
pub const LEASE_BYTES_MAX: usize = 4 << 10;

/// The value of a backend's key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The name of a replica.
    pub owner: String,
    pub instance: Instance,
    /// Counts the writes of that instance: tells which of them took effect.
    pub attempt: u64,
    /// The host has ended: the lease can be taken at once.
    pub released: bool,
}

/// What is stored of a lease.
#[derive(Serialize, Deserialize)]
struct Wire {
    owner: String,
    #[serde(with = "super::hex")]
    instance: Instance,
    attempt: u64,
    #[serde(default)]
    released: bool,
}

impl Lease {
    pub fn encode(&self) -> Vec<u8> {
        let Lease { owner, instance, attempt, released } = self.clone();
        super::write_value(VERSION, Wire { owner, instance, attempt, released })
    }

    pub fn decode(bytes: &[u8]) -> Result<Lease, BadValue> {
        let Wire { owner, instance, attempt, released } = super::read_value(VERSION, bytes, LEASE_BYTES_MAX)?;
        Ok(Lease { owner, instance, attempt, released })
    }

    /// Stands for a value that cannot be read: like a lease of an unknown replica, it is free when it does not change.
    pub fn unreadable() -> Lease {
        Lease { owner: String::new(), instance: 0, attempt: 0, released: false }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Connected,
    Disconnected,
    /// The backends with `placement = "one"`.
    Configured {
        backends: BTreeSet<String>,
    },
    /// The watch of the bucket, or the answer to [`Action::Read`]. Without a lease there is no key (revision of the delete, or 0).
    Changed {
        backend: String,
        revision: u64,
        lease: Option<Lease>,
    },
    /// The bucket was created anew: revisions count from 1 again. Told before [`Event::Connected`], so that nothing of the
    /// old bucket comes after it.
    Cleared,
    Written {
        backend: String,
        attempt: u64,
        result: Written,
    },
    /// No process of the host is left, and none will be started by an earlier [`Action::Start`].
    HostGone {
        backend: String,
    },
    /// The gateway stops: what is owned is released when its host is gone.
    StopAsked,
    TimePassed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    Done {
        revision: u64,
    },
    /// The key has another revision than was expected.
    Conflict,
    /// It may have taken effect, or may still do so.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// From the leader; reported as [`Event::Changed`]. A read that fails is not reported.
    Read {
        backend: String,
    },
    /// Compare-and-swap; 0 means that the key must not exist.
    Write {
        backend: String,
        expected: u64,
        lease: Lease,
    },
    /// The monitor must not start a process after `until`, and kills all processes of the host then.
    Start {
        backend: String,
        until: BootTime,
    },
    /// The monitor may let the host live until then.
    Extend {
        backend: String,
        until: BootTime,
    },
    Stop {
        backend: String,
        at_once: bool,
    },
    /// To which replica calls go. This replica itself is told while its host runs.
    Owner {
        backend: String,
        owner: Option<(String, Instance)>,
    },
}

/// One backend, for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View<'a> {
    pub backend: &'a str,
    /// By the last known lease, if it is not released.
    pub owner: Option<(&'a str, Instance)>,
    /// When the lease of this replica expires, if it has it.
    pub expires: Option<BootTime>,
}

#[derive(Debug)]
pub struct Leases {
    name: String,
    instance: Instance,
    is_connected: bool,
    is_stopping: bool,
    /// Writes that were sent, of all backends.
    attempts: u64,
    backends: BTreeMap<String, Backend>,
    /// Those whose lease is valid here or is being taken: the more there are, the later the next is taken.
    mine: BTreeSet<String>,
    /// Requests that are not answered; at most [`REQUESTS_MAX`].
    in_flight: usize,
    /// Backends that wait for such a request, those of valid leases first.
    waiting: BTreeSet<(bool, String)>,
    /// One entry for each backend that has to be looked at later.
    timers: BTreeSet<(BootTime, String)>,
}

#[derive(Debug, Default)]
struct Backend {
    is_configured: bool,
    /// What the bucket had when it was last heard of.
    known: Option<Known>,
    /// False: the bucket is read before it is written.
    is_current: bool,
    /// Writes of the last [`LEASE`], the oldest first: each of them may have taken effect. At most [`ATTEMPTS_MAX`].
    attempts: VecDeque<Attempt>,
    request: Option<Request>,
    /// No request before.
    not_before: BootTime,
    /// The bucket or the key was lost: hosts of others may run until then.
    guarded_until: BootTime,
    /// Until when the known lease is valid here.
    expiry: Option<BootTime>,
    renew_at: BootTime,
    host: Host,
    /// What [`Action::Owner`] said last.
    told: Option<(String, Instance)>,
    /// Its entry among the timers.
    due: Option<BootTime>,
}

#[derive(Debug)]
struct Known {
    revision: u64,
    lease: Option<Lease>,
    /// When this replica may take it.
    free_from: BootTime,
}

#[derive(Debug, Clone, Copy)]
struct Attempt {
    number: u64,
    sent: BootTime,
    released: bool,
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

/// The processes of a backend on this replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Host {
    #[default]
    Gone,
    Running {
        until: BootTime,
    },
    Stopping {
        until: BootTime,
        at_once: bool,
    },
}

/// What a backend needs of the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    Nothing,
    Read { at: BootTime },
    Write { at: BootTime, released: bool },
}

impl Leases {
    /// The name of this replica, and its instance.
    pub fn new(name: String, instance: Instance) -> Leases {
        Leases {
            name,
            instance,
            is_connected: false,
            is_stopping: false,
            attempts: 0,
            backends: BTreeMap::new(),
            mine: BTreeSet::new(),
            in_flight: 0,
            waiting: BTreeSet::new(),
            timers: BTreeSet::new(),
        }
    }

    pub fn handle(&mut self, event: Event, now: BootTime, actions: &mut Vec<Action>) {
        match event {
            Event::Connected => {
                self.is_connected = true;
                self.backends.values_mut().for_each(|backend| backend.is_current = false);
                self.look_at_all(now, actions);
            }
            Event::Disconnected => {
                self.is_connected = false;
                for backend in self.backends.values_mut() {
                    backend.request = None;
                    backend.is_current = false;
                }
                self.in_flight = 0;
                self.look_at_all(now, actions);
            }
            Event::Configured { backends } => self.configured(backends, now, actions),
            Event::Changed { backend, revision, lease } => self.changed(&backend, revision, lease, now, actions),
            Event::Cleared => {
                self.backends.values_mut().for_each(|backend| backend.clear(now));
                self.look_at_all(now, actions);
            }
            Event::Written { backend, attempt, result } => self.written(&backend, attempt, result, now, actions),
            Event::HostGone { backend } => {
                if let Some(known) = self.backends.get_mut(&backend) {
                    known.host = Host::Gone;
                    self.look_at(&backend, now, actions);
                }
            }
            Event::StopAsked => {
                self.is_stopping = true;
                self.look_at_all(now, actions);
            }
            Event::TimePassed => {
                while let Some((due, backend)) = self.timers.first().cloned()
                    && due <= now
                {
                    self.look_at(&backend, now, actions);
                }
            }
        }
        // Answered requests made room for others.
        while self.in_flight < REQUESTS_MAX
            && let Some((_, backend)) = self.waiting.pop_first()
        {
            self.look_at(&backend, now, actions);
        }
    }

    /// When it next has to be told that time passed.
    pub fn deadline(&self) -> Option<BootTime> {
        self.timers.first().map(|(due, _)| *due)
    }

    /// After [`Event::StopAsked`]: no host is left, and nothing that was owned can be released any more.
    pub fn is_over(&self) -> bool {
        self.is_stopping
            && self.backends.values().all(|backend| {
                backend.host == Host::Gone
                    && (!self.is_connected || backend.request.is_none() && !backend.is_of(self.instance))
            })
    }

    pub fn views(&self) -> impl Iterator<Item = View<'_>> {
        self.backends.iter().filter(|(_, backend)| backend.is_configured).map(|(name, backend)| {
            let lease = backend.known.as_ref().and_then(|known| known.lease.as_ref()).filter(|lease| !lease.released);
            let owner = lease.map(|lease| (lease.owner.as_str(), lease.instance));
            View { backend: name, owner, expires: backend.expiry }
        })
    }

    fn configured(&mut self, mut names: BTreeSet<String>, now: BootTime, actions: &mut Vec<Action>) {
        for (name, backend) in &mut self.backends {
            backend.is_configured = names.remove(name);
        }
        for name in names {
            self.backends.insert(name, Backend { is_configured: true, ..Backend::default() });
        }
        self.look_at_all(now, actions);
    }

    fn changed(&mut self, name: &str, revision: u64, lease: Option<Lease>, now: BootTime, actions: &mut Vec<Action>) {
        let Some(backend) = self.backends.get_mut(name) else { return };
        // The watch may be faster than the read: both say what the bucket has.
        if backend.request.is_some_and(|request| request.what == What::Read) {
            backend.request = None;
            self.in_flight -= 1;
        }
        // A write whose outcome is not known is looked for until it can no longer take effect as a valid lease.
        backend.is_current = true;
        backend.learn(self.instance, revision, lease, now);
        self.look_at(name, now, actions);
    }

    fn written(&mut self, name: &str, number: u64, result: Written, now: BootTime, actions: &mut Vec<Action>) {
        let Some(backend) = self.backends.get_mut(name) else { return };
        if backend.request.is_some_and(|request| request.what == What::Write { attempt: number }) {
            backend.request = None;
            self.in_flight -= 1;
        }
        let attempt = backend.attempts.iter().find(|attempt| attempt.number == number).copied();
        match (result, attempt) {
            (Written::Done { revision }, Some(Attempt { released, .. })) => {
                let lease = Lease { owner: self.name.clone(), instance: self.instance, attempt: number, released };
                backend.learn(self.instance, revision, Some(lease), now);
            }
            // Too late to be of use.
            (Written::Done { .. }, None) => backend.is_current = false,
            (Written::Conflict, _) => {
                backend.is_current = false;
                backend.not_before = now + CONFLICT_PAUSE;
            }
            (Written::Unknown, _) => {
                backend.is_current = false;
                backend.not_before = now + RETRY;
            }
        }
        self.look_at(name, now, actions);
    }

    fn look_at_all(&mut self, now: BootTime, actions: &mut Vec<Action>) {
        for name in self.backends.keys().cloned().collect::<Vec<_>>() {
            self.look_at(&name, now, actions);
        }
    }

    /// Does all that is due for a backend, and sets its timer. Again at the same moment, it does nothing.
    fn look_at(&mut self, name: &str, now: BootTime, actions: &mut Vec<Action>) {
        let Some(backend) = self.backends.get_mut(name) else { return };
        if let Some(due) = backend.due.take() {
            self.timers.remove(&(due, name.to_owned()));
        }
        for is_free in [false, true] {
            self.waiting.remove(&(is_free, name.to_owned()));
        }
        let is_wanted = backend.is_configured && !self.is_stopping;

        backend.expire(now);
        if let Some(request) = backend.request
            && request.until <= now
        {
            backend.request = None;
            backend.is_current = false;
            self.in_flight -= 1;
        }
        backend.place_host(name, is_wanted, now, actions);
        let owner = backend.owner(&self.name, self.instance, now);
        if backend.told != owner {
            backend.told = owner.clone();
            actions.push(Action::Owner { backend: name.to_owned(), owner });
        }

        let spread = spread(self.mine.len() - usize::from(self.mine.contains(name)), self.instance, name);
        let need = if self.is_connected { backend.need(self.instance, is_wanted, spread) } else { Need::Nothing };
        let mut wakes = backend.wakes(now);
        match need {
            Need::Nothing => {}
            Need::Read { at } | Need::Write { at, .. } if at > now => wakes.push(at),
            _ if self.in_flight >= REQUESTS_MAX => {
                self.waiting.insert((backend.expiry.is_none(), name.to_owned()));
            }
            Need::Read { .. } => {
                self.in_flight += 1;
                backend.request = Some(Request { what: What::Read, until: now + REQUEST_MAX });
                wakes.push(now + REQUEST_MAX);
                actions.push(Action::Read { backend: name.to_owned() });
            }
            Need::Write { released, .. } => {
                self.in_flight += 1;
                self.attempts += 1;
                let attempt = self.attempts;
                backend.request = Some(Request { what: What::Write { attempt }, until: now + REQUEST_MAX });
                backend.attempts.push_back(Attempt { number: attempt, sent: now, released });
                if released {
                    // It may take effect at any moment: no host may be started under the lease that it gives up.
                    backend.expiry = None;
                }
                wakes.push(now + REQUEST_MAX);
                let lease = Lease { owner: self.name.clone(), instance: self.instance, attempt, released };
                let expected = backend.known.as_ref().map_or(0, |known| known.revision);
                actions.push(Action::Write { backend: name.to_owned(), expected, lease });
            }
        }
        match backend.expiry.is_some() || backend.is_being_taken() {
            true => self.mine.insert(name.to_owned()),
            false => self.mine.remove(name),
        };
        if !backend.is_configured && backend.is_settled(self.instance) {
            self.backends.remove(name);
            self.mine.remove(name);
            return;
        }
        if let Some(due) = wakes.into_iter().filter(|at| *at > now).min() {
            backend.due = Some(due);
            self.timers.insert((due, name.to_owned()));
        }
    }
}

impl Backend {
    /// What is known of the bucket, if it is newer.
    fn learn(&mut self, own: Instance, revision: u64, lease: Option<Lease>, now: BootTime) {
        if self.known.as_ref().is_some_and(|known| revision <= known.revision) {
            return;
        }
        let of_other = |lease: &Lease| lease.instance != own && !lease.released;
        let was_held = self.known.as_ref().and_then(|known| known.lease.as_ref()).is_some_and(of_other);
        if lease.is_none() && was_held {
            // An operator deleted the key: the host of its owner may still run.
            self.guarded_until = self.guarded_until.max(now + TAKE_AFTER);
        }
        let free_from = match &lease {
            Some(lease) if of_other(lease) => now + TAKE_AFTER,
            _ => now.max(self.guarded_until),
        };
        self.expiry = None;
        if let Some(lease) = lease.as_ref().filter(|lease| lease.instance == own && !lease.released)
            && let Some(attempt) = self.attempts.iter().find(|attempt| attempt.number == lease.attempt)
        {
            self.expiry = Some(attempt.sent + LEASE).filter(|expiry| *expiry > now);
            self.renew_at = attempt.sent + RENEW;
        }
        self.known = Some(Known { revision, lease, free_from });
    }

    fn clear(&mut self, now: BootTime) {
        (self.known, self.is_current, self.expiry) = (None, false, None);
        self.attempts.clear();
        self.guarded_until = now + TAKE_AFTER;
    }

    fn expire(&mut self, now: BootTime) {
        self.expiry = self.expiry.filter(|expiry| *expiry > now);
        while self.attempts.front().is_some_and(|attempt| attempt.sent + LEASE <= now) {
            self.attempts.pop_front();
        }
    }

    /// Starts and stops the host as the lease allows.
    fn place_host(&mut self, name: &str, is_wanted: bool, now: BootTime, actions: &mut Vec<Action>) {
        let backend = || name.to_owned();
        let may_run = |expiry: BootTime| is_wanted && now < expiry.before(STOP_BEFORE);
        match (self.host, self.expiry) {
            (Host::Gone, Some(expiry)) if may_run(expiry) => {
                let until = expiry.before(KILL_BEFORE);
                self.host = Host::Running { until };
                actions.push(Action::Start { backend: backend(), until });
            }
            (Host::Running { until }, Some(expiry)) if !may_run(expiry) => {
                self.host = Host::Stopping { until, at_once: false };
                actions.push(Action::Stop { backend: backend(), at_once: false });
            }
            (Host::Running { until } | Host::Stopping { until, at_once: false }, None) => {
                self.host = Host::Stopping { until, at_once: true };
                actions.push(Action::Stop { backend: backend(), at_once: true });
            }
            _ => {}
        }
        if let (Host::Running { until } | Host::Stopping { until, .. }, Some(expiry)) = (&mut self.host, self.expiry)
            && *until < expiry.before(KILL_BEFORE)
        {
            *until = expiry.before(KILL_BEFORE);
            actions.push(Action::Extend { backend: backend(), until: *until });
        }
    }

    fn owner(&self, name: &str, own: Instance, now: BootTime) -> Option<(String, Instance)> {
        if matches!(self.host, Host::Running { .. }) {
            return Some((name.to_owned(), own));
        }
        let known = self.known.as_ref().filter(|known| now < known.free_from)?;
        let lease = known.lease.as_ref().filter(|lease| lease.instance != own && !lease.owner.is_empty())?;
        Some((lease.owner.clone(), lease.instance))
    }

    fn need(&self, own: Instance, is_wanted: bool, spread: Duration) -> Need {
        if self.request.is_some() {
            return Need::Nothing;
        }
        let Some(known) = self.known.as_ref().filter(|_| self.is_current) else {
            return Need::Read { at: self.not_before };
        };
        if self.attempts.len() >= ATTEMPTS_MAX {
            return Need::Nothing;
        }
        let write = |at: BootTime, released| Need::Write { at: at.max(self.not_before), released };
        let is_own = self.is_of(own);
        match self.host == Host::Gone {
            true if is_own && !is_wanted => write(known.free_from, true),
            _ if self.expiry.is_some() => write(self.renew_at, false),
            true if is_wanted && is_own => write(known.free_from, false),
            true if is_wanted => write(known.free_from + spread, false),
            _ => Need::Nothing,
        }
    }

    /// The known lease is of this replica, valid or not.
    fn is_of(&self, own: Instance) -> bool {
        let lease = self.known.as_ref().and_then(|known| known.lease.as_ref());
        lease.is_some_and(|lease| lease.instance == own && !lease.released)
    }

    fn is_being_taken(&self) -> bool {
        let Some(Request { what: What::Write { attempt }, .. }) = self.request else { return false };
        self.attempts.iter().any(|sent| sent.number == attempt && !sent.released)
    }

    /// There is nothing to stop or to release.
    fn is_settled(&self, own: Instance) -> bool {
        self.host == Host::Gone && self.request.is_none() && !self.is_of(own) && self.attempts.is_empty()
    }

    /// When something changes by time alone.
    fn wakes(&self, now: BootTime) -> Vec<BootTime> {
        let mut wakes = Vec::with_capacity(8);
        wakes.extend(self.expiry);
        wakes.extend(self.expiry.map(|expiry| expiry.before(STOP_BEFORE)));
        wakes.extend(self.request.map(|request| request.until));
        wakes.extend(self.attempts.front().map(|attempt| attempt.sent + LEASE));
        wakes.extend(self.known.as_ref().map(|known| known.free_from));
        wakes.retain(|at| *at > now);
        wakes
    }
}

/// How much later a free lease is taken, by the number of leases that this replica has: so that backends spread.
fn spread(mine: usize, own: Instance, name: &str) -> Duration {
    if mine < SPREAD_STEPS {
        return SPREAD * mine as u32;
    }
    // Every replica has many: each backend has its own order of replicas.
    let hash = name.bytes().fold(own ^ 0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3).rotate_left(23)
    });
    SPREAD * SPREAD_STEPS as u32 + Duration::from_millis(hash % 1_000)
}
