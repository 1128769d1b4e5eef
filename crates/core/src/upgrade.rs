//! A requested upgrade of a running instance: when the new program is checked, when the instance becomes it, and what the
//! requests are answered. How a state is saved, and what `execve` does, is the driver's work.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

/// An upgrade that has to wait for longer is reported as postponed. It still takes place as soon as it can.
pub const POSTPONED_AFTER: Duration = Duration::from_secs(10);

/// How long after it was postponed an upgrade is awaited once more, at the earliest.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// At most one upgrade at a time.
#[derive(Debug, Default)]
pub struct Upgrade(Option<Pending>);

#[derive(Debug)]
struct Pending {
    program: PathBuf,
    /// Requests over the control socket that are not answered yet.
    tickets: Vec<u64>,
    since: Instant,
    step: Step,
    is_postponed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The new program is checked as soon as the state can be saved.
    ToCheck,
    Checking,
    /// The new program can read the state. Everything is paused as soon as the state can be saved again.
    ToPause,
    Pausing,
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Run the program once with the state, and report the result to [`Upgrade::checked`].
    Check(PathBuf),
    /// Stop everything that changes the state, and call [`Upgrade::paused`].
    Pause,
    /// Save the state and become the program. If that fails, call [`Upgrade::failed`].
    Become { program: PathBuf, tickets: Vec<u64> },
    /// Go on: something happened during the pause, and the state cannot be saved yet.
    Resume,
    /// Tell these requests that the upgrade is postponed.
    Postpone(Vec<u64>),
}

impl Upgrade {
    /// False if an upgrade to another program is under way.
    #[must_use]
    pub fn requested(&mut self, ticket: Option<u64>, program: PathBuf, now: Instant) -> bool {
        let new = || Pending {
            program: program.clone(),
            tickets: Vec::new(),
            since: now,
            step: Step::ToCheck,
            is_postponed: false,
        };
        let pending = self.0.get_or_insert_with(new);
        if pending.program != program {
            return false;
        }
        if pending.is_postponed {
            // The request is new: it is told again, if need be.
            (pending.since, pending.is_postponed) = (now, false);
        }
        pending.tickets.extend(ticket);
        true
    }

    pub fn is_wanted(&self) -> bool {
        self.0.is_some()
    }

    /// The state has to become one that can be saved, and the time for that is not over: what would prevent it is held
    /// back.
    pub fn is_awaited(&self) -> bool {
        self.0.as_ref().is_some_and(|pending| !pending.is_postponed)
    }

    /// What a postponed upgrade waited for is over, or will be soon: it is awaited once more. Only if it was postponed some
    /// time ago, so that requests are not held back again and again.
    pub fn retry(&mut self, now: Instant) {
        if let Some(pending) = self.0.as_mut().filter(|pending| pending.is_postponed)
            && pending.since + POSTPONED_AFTER + RETRY_AFTER <= now
        {
            (pending.since, pending.is_postponed) = (now, false);
        }
    }

    /// The driver looked whether the state can be saved now.
    pub fn look(&mut self, is_busy: bool, now: Instant) -> Option<Action> {
        let pending = self.0.as_mut()?;
        match pending.step {
            Step::ToCheck if !is_busy => {
                pending.step = Step::Checking;
                Some(Action::Check(pending.program.clone()))
            }
            Step::ToPause if !is_busy => {
                pending.step = Step::Pausing;
                Some(Action::Pause)
            }
            _ if pending.since + POSTPONED_AFTER <= now && !pending.is_postponed => {
                pending.is_postponed = true;
                Some(Action::Postpone(std::mem::take(&mut pending.tickets)))
            }
            _ => None,
        }
    }

    /// When the driver has to look at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        let pending = self.0.as_ref().filter(|pending| !pending.is_postponed)?;
        Some(pending.since + POSTPONED_AFTER)
    }

    /// The new program has read the state.
    pub fn checked(&mut self) {
        if let Some(pending) = &mut self.0 {
            pending.step = Step::ToPause;
        }
    }

    /// The new program can read the state, so only the state itself is waited for.
    pub fn is_checked(&self) -> bool {
        self.0.as_ref().is_some_and(|pending| matches!(pending.step, Step::ToPause | Step::Pausing))
    }

    pub fn is_pausing(&self) -> bool {
        self.0.as_ref().is_some_and(|pending| pending.step == Step::Pausing)
    }

    /// Everything is paused.
    pub fn paused(&mut self, is_busy: bool) -> Option<Action> {
        let pending = self.0.as_mut()?;
        if is_busy {
            pending.step = Step::ToPause;
            return Some(Action::Resume);
        }
        Some(Action::Become { program: pending.program.clone(), tickets: pending.tickets.clone() })
    }

    /// The upgrade came to nothing. The requests that are to be told why.
    pub fn failed(&mut self) -> Vec<u64> {
        self.0.take().map(|pending| pending.tickets).unwrap_or_default()
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a test needs one moment to count from")]
mod tests {
    use super::*;

    const BUSY: bool = true;
    const FREE: bool = false;

    fn program() -> PathBuf {
        "/usr/bin/outlast".into()
    }

    #[test]
    fn a_program_is_checked_before_the_process_becomes_it() {
        let now = Instant::now();
        let mut upgrade = Upgrade::default();
        assert!(upgrade.requested(Some(7), program(), now));
        assert_eq!(upgrade.look(BUSY, now), None);
        assert_eq!(upgrade.look(FREE, now), Some(Action::Check(program())));
        assert_eq!(upgrade.look(FREE, now), None, "the check runs");
        assert!(!upgrade.is_checked());
        upgrade.checked();
        assert!(upgrade.is_checked());
        assert_eq!(upgrade.look(BUSY, now), None);
        assert_eq!(upgrade.look(FREE, now), Some(Action::Pause));
        assert_eq!(upgrade.paused(BUSY), Some(Action::Resume));
        assert_eq!(upgrade.look(FREE, now), Some(Action::Pause));
        assert!(upgrade.requested(Some(8), program(), now), "one more may ask for the same");
        assert_eq!(upgrade.paused(FREE), Some(Action::Become { program: program(), tickets: vec![7, 8] }));
        assert_eq!(upgrade.failed(), [7, 8]);
        assert!(!upgrade.is_wanted() && upgrade.deadline().is_none());
    }

    #[test]
    fn a_failed_check_ends_the_upgrade() {
        let now = Instant::now();
        let mut upgrade = Upgrade::default();
        assert!(upgrade.requested(Some(1), program(), now));
        assert!(!upgrade.requested(Some(2), "/tmp/other".into(), now));
        assert_eq!(upgrade.look(FREE, now), Some(Action::Check(program())));
        assert_eq!(upgrade.failed(), [1]);
        assert!(upgrade.requested(Some(2), "/tmp/other".into(), now));
    }

    #[test]
    fn a_slow_upgrade_is_postponed_and_done_later() {
        let now = Instant::now();
        let later = now + POSTPONED_AFTER;
        let mut upgrade = Upgrade::default();
        assert!(upgrade.requested(Some(1), program(), now) && upgrade.is_awaited());
        assert_eq!(upgrade.deadline(), Some(later));
        assert_eq!(upgrade.look(BUSY, later), Some(Action::Postpone(vec![1])));
        assert_eq!((upgrade.look(BUSY, later), upgrade.deadline(), upgrade.is_awaited()), (None, None, false));
        // A new request waits as long as the first one did.
        assert!(upgrade.requested(Some(2), program(), later) && upgrade.is_awaited());
        let latest = later + POSTPONED_AFTER;
        assert_eq!(upgrade.look(BUSY, latest), Some(Action::Postpone(vec![2])));
        assert_eq!(upgrade.look(FREE, latest), Some(Action::Check(program())));
        // What it waited for is over. It is not awaited again at once.
        upgrade.retry(latest);
        assert!(!upgrade.is_awaited());
        upgrade.retry(latest + RETRY_AFTER);
        assert!(upgrade.is_awaited());
        assert_eq!(upgrade.deadline(), Some(latest + RETRY_AFTER + POSTPONED_AFTER));
    }
}
