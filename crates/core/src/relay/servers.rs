//! The server processes of a relay: what each is to the client, which of them finish their calls, and the record of each
//! start and end. Which one serves, and when the next one starts, is decided in [`crate::slot`].

use std::{collections::BTreeMap, time::Instant};

use super::{
    endpoint::Endpoint,
    saved::{SavedDraining, SavedEnd, SavedServers},
};
use crate::{
    exit::{Cause, How, classify},
    record::{Event, Record},
    restarts::{Policy, Verdict, Why},
    saved::Moment,
    slot::{self, Slot, Until},
};

pub(super) type Current = slot::Current<u32>;

/// What a start is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The child becomes the current one.
    Current,
    /// The child comes up beside the serving one, to replace it.
    Candidate,
}

/// What a child is to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// It serves; `Fresh` too: everything passes.
    Serving,
    Draining,
    /// A candidate, or a current child whose private handshake runs.
    Waiting,
    Retired,
}

impl Role {
    /// What it says reaches the client.
    pub(super) fn is_heard(self) -> bool {
        matches!(self, Role::Serving | Role::Draining)
    }
}

/// A child that was replaced and finishes its calls.
#[derive(Debug)]
pub(super) struct Draining {
    pub(super) generation: u32,
    pub(super) until: Instant,
    /// Of the restart that replaced it.
    pub(super) reason: String,
    /// That restart does not wait for calls: it is over as soon as the lines are taken back that it has not read.
    pub(super) at_once: bool,
}

/// The last end of the current child.
#[derive(Debug, Clone)]
pub(super) struct LastEnd {
    pub(super) how: How,
    /// Zero if no process came to be.
    pub(super) generation: u32,
    pub(super) pid: u32,
    pub(super) stderr: Vec<String>,
}

/// A child that ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) end: LastEnd,
    /// Why it counted as hung.
    pub(super) hung: Option<String>,
    /// For the audit log.
    pub(super) record: Record,
    pub(super) was: EndedRole,
}

/// What an ended child was.
#[derive(Debug)]
pub(super) enum EndedRole {
    /// The current one. No verdict if a candidate takes its place, or if outlast is leaving.
    Current(Option<Verdict>),
    Candidate,
    Other,
}

#[derive(Debug)]
pub(super) struct Servers {
    /// Which child serves, which one replaces it, and when the next one starts.
    pub(super) slot: Slot<u32>,
    children: BTreeMap<u32, Endpoint>,
    draining: Vec<Draining>,
    starting: Option<Purpose>,
    /// The next start waits for the end of this child.
    start_after: Option<u32>,
    last_end: Option<LastEnd>,
    ever_ready: bool,
    ends_before_ready: u32,
}

impl Servers {
    /// The owner has asked for the first child already.
    pub(super) fn new(policy: Policy, seed: u64) -> Servers {
        Servers {
            slot: Slot::new(policy, seed),
            children: BTreeMap::new(),
            draining: Vec::new(),
            starting: Some(Purpose::Current),
            start_after: None,
            last_end: None,
            ever_ready: false,
            ends_before_ready: 0,
        }
    }

    // ---- saved state ----------------------------------------------------------------------------

    /// A child is on its way, to serve first or to replace another: they cannot be saved.
    pub(super) fn is_moving(&self) -> bool {
        !self.may_start()
    }

    /// None while [`Servers::is_moving`].
    pub(super) fn save(&self, now: Instant) -> Option<SavedServers> {
        let slot = self.slot.save(now).filter(|_| !self.is_moving())?;
        let draining = self.draining.iter().map(|draining| SavedDraining {
            generation: draining.generation,
            until: Moment::of(draining.until, now),
            reason: draining.reason.clone(),
            at_once: draining.at_once,
        });
        Some(SavedServers {
            slot,
            children: self.children.iter().map(|(generation, child)| (*generation, child.save(now))).collect(),
            draining: draining.collect(),
            last_end: self.last_end.as_ref().map(|end| SavedEnd {
                how: end.how.clone(),
                generation: end.generation,
                pid: end.pid,
                stderr: end.stderr.clone(),
            }),
            ever_ready: self.ever_ready,
            ends_before_ready: self.ends_before_ready,
        })
    }

    pub(super) fn restore(policy: Policy, saved: SavedServers, now: Instant) -> Servers {
        let children = saved.children.into_iter();
        let draining = saved.draining.into_iter().map(|draining| Draining {
            generation: draining.generation,
            until: draining.until.at(now),
            reason: draining.reason,
            at_once: draining.at_once,
        });
        Servers {
            slot: Slot::restore(policy, saved.slot, now),
            children: children.map(|(generation, child)| (generation, Endpoint::restore(child, now))).collect(),
            draining: draining.collect(),
            starting: None,
            start_after: None,
            last_end: saved.last_end.map(|end| LastEnd {
                how: end.how,
                generation: end.generation,
                pid: end.pid,
                stderr: end.stderr,
            }),
            ever_ready: saved.ever_ready,
            ends_before_ready: saved.ends_before_ready,
        }
    }

    // ---- what there is --------------------------------------------------------------------------

    pub(super) fn role(&self, generation: u32) -> Role {
        if self.slot.live() == Some(generation) {
            Role::Serving
        } else if self.drains(generation) {
            Role::Draining
        } else if self.slot.candidate() == Some(generation) || self.slot.child() == Some(generation) {
            Role::Waiting
        } else {
            Role::Retired
        }
    }

    pub(super) fn get(&self, generation: u32) -> Option<&Endpoint> {
        self.children.get(&generation)
    }

    pub(super) fn get_mut(&mut self, generation: u32) -> Option<&mut Endpoint> {
        self.children.get_mut(&generation)
    }

    /// Children that were not asked to stop.
    pub(super) fn running(&self) -> impl Iterator<Item = (u32, &Endpoint)> {
        let running = self.children.iter().filter(|(_, child)| !child.is_stopping);
        running.map(|(generation, child)| (*generation, child))
    }

    pub(super) fn generations(&self) -> Vec<u32> {
        self.children.keys().copied().collect()
    }

    /// No child is there or on its way.
    pub(super) fn is_empty(&self) -> bool {
        self.children.is_empty() && self.starting.is_none()
    }

    pub(super) fn pid(&self, generation: u32) -> Option<u32> {
        self.get(generation).map(|child| child.pid)
    }

    /// It was asked to stop, or has ended.
    pub(super) fn is_stopping(&self, generation: u32) -> bool {
        self.get(generation).is_none_or(|child| child.is_stopping)
    }

    /// The end of its stderr.
    pub(super) fn stderr(&self, generation: u32) -> Vec<String> {
        self.get(generation).map(|child| child.stderr.to_vec()).unwrap_or_default()
    }

    pub(super) fn last_end(&self) -> Option<&LastEnd> {
        self.last_end.as_ref()
    }

    pub(super) fn was_ever_ready(&self) -> bool {
        self.ever_ready
    }

    /// How many children ended in a row without being ready.
    pub(super) fn ends_before_ready(&self) -> u32 {
        self.ends_before_ready
    }

    // ---- starts ---------------------------------------------------------------------------------

    pub(super) fn is_starting(&self) -> bool {
        self.starting.is_some()
    }

    /// The next start waits for the end of a child.
    pub(super) fn waits_for_end(&self) -> bool {
        self.start_after.is_some()
    }

    /// Nothing else is about to put a child in place.
    pub(super) fn may_start(&self) -> bool {
        self.starting.is_none() && self.start_after.is_none() && self.slot.candidate().is_none()
    }

    /// Whether the driver is to start a child. If a start is already under way, that child is used.
    #[must_use]
    pub(super) fn start(&mut self, purpose: Purpose) -> bool {
        self.starting.replace(purpose).is_none()
    }

    /// The next child starts when this one has ended.
    pub(super) fn start_after(&mut self, generation: u32) {
        self.start_after = Some(generation);
    }

    /// A child ended: whether the start that waited for it is due.
    pub(super) fn start_is_due_after(&mut self, generation: u32) -> bool {
        self.start_after.take_if(|waits_for| *waits_for == generation).is_some()
    }

    /// A process came to be. Its record, and what it is for; nothing if outlast is leaving.
    pub(super) fn child_started(
        &mut self,
        generation: u32,
        child: Endpoint,
        is_leaving: bool,
        now: Instant,
    ) -> (Record, Option<Purpose>) {
        let purpose = self.starting.take().unwrap_or(Purpose::Current);
        let record = Record {
            pid: Some(child.pid),
            generation: Some(generation.into()),
            restarts: Some(self.slot.restarts().restarts() + u32::from(generation > 1)),
            ..Record::new(Event::ServerStarted)
        };
        self.children.insert(generation, child);
        if is_leaving {
            return (record, None);
        }
        if purpose == Purpose::Candidate && self.slot.serving().is_some() {
            self.slot.set_candidate(generation);
            return (record, Some(Purpose::Candidate));
        }
        self.slot.fill(generation, now);
        (record, Some(Purpose::Current))
    }

    /// No process came to be. The verdict and the record; none if it was to be a candidate, as the old server keeps serving.
    pub(super) fn start_failed(&mut self, how: &How, now: Instant) -> Option<(Verdict, Record)> {
        if self.starting.take() == Some(Purpose::Candidate) && self.slot.serving().is_some() {
            return None;
        }
        let (generation, pid) = self.last_end.as_ref().map_or((0, 0), |end| (end.generation, end.pid));
        self.last_end = Some(LastEnd { how: how.clone(), generation, pid, stderr: Vec::new() });
        self.ends_before_ready += 1;
        let cause = Cause::NeverReady;
        Some(self.slot.end(cause, how, Record::new(slot::event_of(cause)), now))
    }

    /// The start that was under way is not wanted any more.
    pub(super) fn forget_start(&mut self) {
        self.starting = None;
    }

    // ---- service --------------------------------------------------------------------------------

    /// A child finished its handshake and serves. The child that it replaces, if it was a candidate.
    pub(super) fn serve(&mut self, generation: u32, now: Instant) -> Option<u32> {
        let old = self.slot.serving().filter(|_| self.slot.candidate() == Some(generation));
        self.slot.serve(generation, now);
        self.ever_ready = true;
        self.ends_before_ready = 0;
        if let Some(child) = self.children.get_mut(&generation) {
            child.ready = Some(now);
        }
        old
    }

    // ---- ends -----------------------------------------------------------------------------------

    /// Marks a child as stopping. True if it was not marked before.
    #[must_use]
    pub(super) fn stop(&mut self, generation: u32) -> bool {
        self.children.get_mut(&generation).is_some_and(|child| !std::mem::replace(&mut child.is_stopping, true))
    }

    /// A replaced child begins to finish its calls.
    pub(super) fn drain(&mut self, draining: Draining) {
        self.draining.push(draining);
    }

    pub(super) fn draining(&self) -> &[Draining] {
        &self.draining
    }

    pub(super) fn draining_of(&self, generation: u32) -> Option<&Draining> {
        self.draining.iter().find(|draining| draining.generation == generation)
    }

    pub(super) fn drains(&self, generation: u32) -> bool {
        self.draining_of(generation).is_some()
    }

    /// Draining children that were not asked to stop, and until when they may continue.
    pub(super) fn finishing(&self) -> impl Iterator<Item = (u32, Instant)> {
        let finishing = self.draining.iter().filter(|draining| !self.is_stopping(draining.generation));
        finishing.map(|draining| (draining.generation, draining.until))
    }

    /// A child has nothing left to do. For the audit log.
    pub(super) fn retire(&mut self, generation: u32) -> Option<Record> {
        let reason = self.take_draining(generation);
        let pid = Some(self.pid(generation)?);
        Some(Record { pid, generation: Some(generation.into()), reason, ..Record::new(Event::ServerExiting) })
    }

    fn take_draining(&mut self, generation: u32) -> Option<String> {
        let at = self.draining.iter().position(|draining| draining.generation == generation)?;
        Some(self.draining.remove(at).reason)
    }

    /// A child is gone.
    pub(super) fn child_ended(&mut self, generation: u32, how: &How, is_leaving: bool, now: Instant) -> Option<Ended> {
        let child = self.children.remove(&generation)?;
        let reason = self.take_draining(generation);
        let end = LastEnd { how: how.clone(), generation, pid: child.pid, stderr: child.stderr.to_vec() };
        let event = if reason.is_some() { Event::ServerExiting } else { Event::ServerStopped };
        let record = Record {
            pid: Some(child.pid),
            generation: Some(generation.into()),
            uptime: Some(now.duration_since(child.started)),
            restarts: Some(self.slot.restarts().restarts()),
            reason,
            ..Record::new(event)
        };
        let mut ended = Ended { end, hung: child.hung, record, was: EndedRole::Other };
        if self.slot.child() != Some(generation) {
            if self.slot.candidate() == Some(generation) {
                self.slot.take_candidate();
                ended.was = EndedRole::Candidate;
            }
            ended.record = ended.record.ended(how);
            return Some(ended);
        }
        self.last_end = Some(ended.end.clone());
        let is_ready = child.ready.is_some();
        self.ends_before_ready += u32::from(!is_ready);
        if is_leaving {
            ended.record = ended.record.ended(how);
            self.slot.rest();
            ended.was = EndedRole::Current(None);
            return Some(ended);
        }
        let cause = classify(how, false, is_ready);
        let (verdict, record) = self.slot.end(cause, how, Record { event: slot::event_of(cause), ..ended.record }, now);
        // A candidate on its way takes the place; the crash counts all the same.
        let is_replaced = self.slot.promote(now);
        Some(Ended { record, was: EndedRole::Current((!is_replaced).then_some(verdict)), ..ended })
    }

    /// Carries out the policy's verdict on an end; one more record, if there is something to add to that of the end.
    /// `callable`: a child that left on purpose is started again by the next request.
    pub(super) fn follow(&mut self, verdict: &Verdict, end: Record, callable: bool) -> Option<Record> {
        self.slot.follow(verdict, Until::Asked);
        match (verdict, self.slot.current()) {
            (Verdict::StartAt { why: Why::Throttled, .. }, _) => Some(Record { event: Event::RestartThrottled, ..end }),
            (Verdict::GiveUp { crashes, .. }, Current::GivenUp { crashes: Some(words), .. }) => {
                let detail = Some(words.words("in"));
                Some(Record { event: Event::GaveUp, crashes: Some(*crashes), detail, ..end })
            }
            (Verdict::Left, _) => {
                self.slot.leave(if callable { Until::Called } else { Until::Asked });
                None
            }
            _ => None,
        }
    }
}
