//! One supervised server across its processes: the child that serves, the one that is to replace it, when the next one
//! starts, and what the end of one means. What is said to a child is not known here; its owner keeps what it knows of it.

use std::time::{Duration, Instant};

use crate::{
    count::count,
    exit::{Cause, How},
    record::{self, Record},
    restarts::{Policy, Restarts, Verdict},
};

mod saved;

pub use saved::Saved;

/// The child that serves, or what there is instead. `K` is how its owner names it.
#[derive(Debug, Clone, PartialEq)]
pub enum Current<K> {
    /// No child, and no start is planned.
    None,
    /// The child runs, and the client's own opening is its handshake.
    Fresh(K),
    /// The child runs and does not serve: its handshake runs, or it is about to be stopped.
    Replaying(K),
    Serving(K),
    /// The next child starts then, unless a restart does it first.
    Down {
        at: Instant,
    },
    /// The policy gave up, or the child left on purpose.
    GivenUp {
        /// None if the child left on purpose.
        crashes: Option<Crashes>,
        until: Until,
    },
}

/// The crashes for which a child was given up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Crashes {
    number: u32,
    within: Option<Duration>,
}

impl Crashes {
    /// In words. `within`: the word before the time that they took.
    pub fn words(self, within: &str) -> String {
        let time = self.within.map(|time| format!(" {within} {:.0} s", time.as_secs_f64())).unwrap_or_default();
        format!("{}{time}", count(self.number, "crash", "crashes"))
    }
}

/// Until when a child stays given up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Until {
    /// An operator asks for a start.
    Asked,
    /// The next request needs it.
    Called,
    At(Instant),
}

#[derive(Debug, Clone)]
pub struct Slot<K> {
    restarts: Restarts,
    current: Current<K>,
    /// The child that comes up beside the current one, to replace it.
    candidate: Option<K>,
    /// The child that was current last.
    last: Option<K>,
}

impl<K: Copy + PartialEq> Slot<K> {
    pub fn new(policy: Policy, seed: u64) -> Slot<K> {
        Slot { restarts: Restarts::new(policy, seed), current: Current::None, candidate: None, last: None }
    }

    pub fn current(&self) -> &Current<K> {
        &self.current
    }

    /// The child that serves or is meant to.
    pub fn child(&self) -> Option<K> {
        match self.current {
            Current::Fresh(child) | Current::Replaying(child) | Current::Serving(child) => Some(child),
            Current::None | Current::Down { .. } | Current::GivenUp { .. } => None,
        }
    }

    /// The same, or else the last one that was.
    pub fn last_child(&self) -> Option<K> {
        self.last
    }

    /// The child that takes the client's messages now.
    pub fn live(&self) -> Option<K> {
        match self.current {
            Current::Fresh(child) | Current::Serving(child) => Some(child),
            _ => None,
        }
    }

    /// The child that has finished its handshake.
    pub fn serving(&self) -> Option<K> {
        match self.current {
            Current::Serving(child) => Some(child),
            _ => None,
        }
    }

    pub fn candidate(&self) -> Option<K> {
        self.candidate
    }

    /// When the current child was put in its place.
    pub fn since(&self) -> Option<Instant> {
        self.child().and(self.restarts.since())
    }

    /// When the current child finished its handshake.
    pub fn ready_since(&self) -> Option<Instant> {
        self.child().and(self.restarts.ready_since())
    }

    /// No child, and no start is planned.
    pub fn is_idle(&self) -> bool {
        self.current == Current::None
    }

    pub fn is_given_up(&self) -> bool {
        matches!(self.current, Current::GivenUp { .. })
    }

    /// When the next child starts.
    pub fn due(&self) -> Option<Instant> {
        match self.current {
            Current::Down { at } | Current::GivenUp { until: Until::At(at), .. } => Some(at),
            _ => None,
        }
    }

    /// The history of the policy: restarts, crashes, the last ends.
    pub fn restarts(&self) -> &Restarts {
        &self.restarts
    }

    // ---- starts ---------------------------------------------------------------------------------

    /// The next child is to start then.
    pub fn go_down(&mut self, at: Instant) {
        self.current = Current::Down { at };
    }

    /// No start is planned.
    pub fn rest(&mut self) {
        self.current = Current::None;
    }

    /// The planned child starts, and does not serve yet.
    pub fn fill(&mut self, child: K, now: Instant) {
        self.restarts.child_started(now);
        self.withhold(child);
    }

    /// The same for a child that was asked for: the count of crashes is kept.
    pub fn refill(&mut self, child: K, now: Instant) {
        self.restarts.replaced(now);
        self.withhold(child);
    }

    /// A child comes up beside the current one.
    pub fn set_candidate(&mut self, child: K) {
        self.candidate = Some(child);
    }

    /// The candidate is not wanted any more, or has ended.
    pub fn take_candidate(&mut self) -> Option<K> {
        self.candidate.take()
    }

    /// The current child gets the client's own messages as its handshake.
    pub fn open(&mut self, child: K) {
        self.put(Current::Fresh(child));
    }

    /// The current child gets no message of the client's: its own handshake runs, or it is about to be stopped.
    pub fn withhold(&mut self, child: K) {
        self.put(Current::Replaying(child));
    }

    /// A child finished its handshake and serves. A candidate takes the place of the current child.
    pub fn serve(&mut self, child: K, now: Instant) {
        if self.candidate.take_if(|candidate| *candidate == child).is_some() {
            self.restarts.replaced(now);
        }
        self.put(Current::Serving(child));
        self.restarts.child_ready(now);
    }

    fn put(&mut self, current: Current<K>) {
        self.current = current;
        self.last = self.child();
    }

    // ---- ends -----------------------------------------------------------------------------------

    /// The current child ended, or could not be started.
    pub fn judge(&mut self, cause: Cause, how: &How, now: Instant) -> Verdict {
        self.restarts.child_ended(cause, how.clone(), now)
    }

    /// The same, and completes the record of its end.
    pub fn end(&mut self, cause: Cause, how: &How, record: Record, now: Instant) -> (Verdict, Record) {
        let verdict = self.judge(cause, how, now);
        let delay = match verdict {
            Verdict::StartAt { delay, .. } => Some(delay),
            Verdict::GiveUp { .. } | Verdict::Left => None,
        };
        (verdict, Record { crashes: Some(self.restarts.crashes(now)), delay, ..record.ended(how) })
    }

    /// The candidate takes the place of a child that ended, before it has finished its handshake. False if there is none.
    pub fn promote(&mut self, now: Instant) -> bool {
        let candidate = self.candidate.take();
        candidate.into_iter().for_each(|candidate| self.refill(candidate, now));
        candidate.is_some()
    }

    /// Carries out the policy's verdict on an end. `until` is for a child that is given up; one that left on purpose leaves
    /// no plan behind.
    pub fn follow(&mut self, verdict: &Verdict, until: Until) {
        self.current = match *verdict {
            Verdict::StartAt { at, .. } => Current::Down { at },
            Verdict::GiveUp { crashes, within } => {
                Current::GivenUp { crashes: Some(Crashes { number: crashes, within }), until }
            }
            Verdict::Left => Current::None,
        };
    }

    /// The child left on purpose.
    pub fn leave(&mut self, until: Until) {
        self.current = Current::GivenUp { crashes: None, until };
    }

    /// An operator resets the crash count.
    pub fn forgive(&mut self) {
        self.restarts.resumed();
    }

    /// The child was stopped because it was not needed: the next start is no restart.
    pub fn rested(&mut self) {
        self.restarts.rested();
    }

    /// Another policy counts from here. Returns what was counted until now.
    pub fn set_policy(&mut self, policy: Policy, seed: u64, is_ready: bool, now: Instant) -> Restarts {
        let old = std::mem::replace(&mut self.restarts, Restarts::new(policy, seed));
        if self.child().is_some() {
            self.restarts.child_started(now);
        }
        if is_ready {
            self.restarts.child_ready(now);
        }
        old
    }
}

/// What the audit log calls the end of a child.
pub fn event_of(cause: Cause) -> record::Event {
    match cause {
        Cause::Asked | Cause::Clean => record::Event::ServerStopped,
        Cause::RestartRequested | Cause::Forgot => record::Event::ServerExiting,
        Cause::Crashed | Cause::NeverReady => record::Event::ServerCrashed,
    }
}
