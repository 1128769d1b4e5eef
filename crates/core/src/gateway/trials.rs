//! Trials: a changed backend is started beside the process that serves, and takes over when its handshake is done and
//! its lists are read.
//! If that fails, the old process serves on under its old settings, and the failure is reported.

use std::time::Instant;

use serde_json::json;

use super::{
    Action, Backend, Children, Gateway, Link, Start, Ticket,
    backends::{BackendState, Eras},
    links::LinkState,
    messages,
    saved::SavedFailedChange,
    slots::{Sharing, SlotKey, SlotState},
    status::ReloadStatus,
};
use crate::{exit::How, mcp::List, record, record::Record, saved::Moment};

/// A change on trial.
#[derive(Debug)]
pub(super) struct Trial {
    pub settings: Backend,
    pub serial: u64,
    /// The slot in which it takes over. If `children` changes, it is a slot of its own until then.
    slot: SlotKey,
    /// What its handshake showed of its eras.
    pub eras: Option<Eras>,
    /// Reloads that wait for the outcome.
    tickets: Vec<Ticket>,
    /// Why it fails, if the end of its link does not tell.
    why: Option<String>,
}

/// A change of the configuration of one backend.
#[derive(Debug)]
pub(super) enum ConfigChange {
    /// It runs under the settings that the configuration has.
    None,
    OnTrial(Box<Trial>),
    Failed(FailedTrial),
}

/// A change that did not work. The backend runs on under the settings that it had.
#[derive(Debug)]
pub(super) struct FailedTrial {
    why: String,
    stderr: String,
    at: Instant,
}

impl ConfigChange {
    /// Only a failed one: a trial is waited for.
    pub(super) fn save(&self, now: Instant) -> Option<SavedFailedChange> {
        let ConfigChange::Failed(FailedTrial { why, stderr, at }) = self else { return None };
        Some(SavedFailedChange { why: why.clone(), stderr: stderr.clone(), at: Moment::of(*at, now) })
    }

    pub(super) fn restore(saved: Option<SavedFailedChange>, now: Instant) -> ConfigChange {
        match saved {
            Some(SavedFailedChange { why, stderr, at }) => {
                ConfigChange::Failed(FailedTrial { why, stderr, at: at.at(now) })
            }
            None => ConfigChange::None,
        }
    }
}

impl FailedTrial {
    pub(super) fn status(&self, now: Instant) -> ReloadStatus {
        ReloadStatus {
            ok: false,
            reason: Some(CHANGED),
            error: self.why.clone(),
            stderr_tail: self.stderr.clone(),
            seconds_ago: now.saturating_duration_since(self.at).as_secs_f64(),
            pending: Some(true),
        }
    }
}

/// The reason of a restart that no operator asked for.
pub(super) const CHANGED: &str = "its configuration changed";

impl Gateway {
    /// The settings that the driver opens a link with. A link on trial has its own.
    pub fn settings_of(&self, link: Link) -> Option<&Backend> {
        let backend = self.backends.get(&link.backend)?;
        let trial = backend.trial().filter(|trial| trial.serial == link.serial);
        Some(trial.map_or(backend.settings(), |trial| &trial.settings))
    }

    pub(super) fn trial_of(&mut self, serial: u64) -> Option<&mut Trial> {
        let backend = self.links.get(&serial)?.id().backend;
        self.backends.get_mut(&backend)?.trial_mut().filter(|trial| trial.serial == serial)
    }

    /// Whether a change needs a trial: a backend works that it could break.
    pub(super) fn needs_trial(&self, number: u32, new: &Backend) -> bool {
        let Some(owner) = self.backends.get(&number) else { return false };
        needs_process(owner.settings(), new)
            && owner.is_proven()
            && !self.guards.is_backend_off(&owner.settings().name)
            && !self.is_given_up(number)
    }

    pub(super) fn begin_trial(&mut self, number: u32, settings: Backend, now: Instant) {
        let sharing = match settings.children {
            Children::Pool(_) => Sharing::Pool(0),
            Children::Shared | Children::PerSession => Sharing::Shared,
        };
        let key = SlotKey { backend: number, sharing };
        self.make_slot(key, None);
        let slot = self.slots.get_mut(&key).expect("made above");
        let is_running = slot.links.child().is_some();
        // A restart that is under way would start the old settings again. Operators that wait for it get the outcome of
        // the trial.
        if let Some(old) = slot.links.take_candidate() {
            self.stop_link(old, How::Stopped, true, now);
        }
        let by = now + settings.start_timeout;
        let is_probe = settings.start == Start::Lazy && !is_running;
        let serial = self.connect(key, by, is_probe, now);
        self.slots.get_mut(&key).expect("made above").links.set_candidate(serial);
        let trial = Trial { settings, serial, slot: key, eras: None, tickets: Vec::new(), why: None };
        let backend = self.backends.get_mut(&number).expect("it is configured");
        backend.set_change(ConfigChange::OnTrial(trial.into()));
    }

    /// Ends the trial of a backend without an outcome. Returns its settings.
    pub(super) fn abandon_trial(&mut self, number: u32, why: &str, now: Instant) -> Option<Backend> {
        let trial = self.backends.get_mut(&number)?.take_trial()?;
        let serves = self.serving(trial.slot).is_some();
        let mut tickets = trial.tickets;
        if let Some(slot) = self.slots.get_mut(&trial.slot).filter(|slot| slot.links.candidate() == Some(trial.serial))
        {
            slot.links.take_candidate();
            // Operators that asked for a restart wait for the trial if nothing else is started here.
            if serves {
                tickets.extend(slot.take_tickets());
            }
        }
        self.stop_link(trial.serial, How::Stopped, true, now);
        self.leave_trial_slot(trial.slot);
        for ticket in tickets {
            let words = format!("{}: {why}", self.backends.name(number));
            self.ticket_done(ticket, Err(words));
        }
        Some(trial.settings)
    }

    /// Removes a slot that was made only for a trial.
    fn leave_trial_slot(&mut self, key: SlotKey) {
        let is_unused = |slot: &SlotState| slot.links.is_idle() && !slot.is_needed();
        if key != self.first_slot(key.backend) && self.slots.get(&key).is_some_and(is_unused) {
            self.take_slot(key);
        }
    }

    /// Answers a reload when every change that is on trial has taken over or failed.
    pub(super) fn outcome_asked(&mut self, ticket: Ticket) {
        if self.stage.is_stopping() {
            return self.out.push(Action::Answer { ticket, result: Err("the gateway is stopping".into()) });
        }
        let trials: Vec<&mut Trial> = self.backends.values_mut().filter_map(BackendState::trial_mut).collect();
        let count = trials.len();
        trials.into_iter().for_each(|trial| trial.tickets.push(ticket));
        self.begin_operator_request(ticket, count);
    }

    /// A link on trial cannot be used without its tools. The end of the link does not tell that, so it is noted here.
    pub(super) fn trial_misses_list(&mut self, serial: u64, kind: List, why: &str, now: Instant) -> bool {
        let Some(trial) = self.trial_of(serial).filter(|_| kind == List::Tools) else { return false };
        trial.why = Some(format!("{} failed: {}", kind.method(), messages::cut(why, 300)));
        self.stop_link(serial, How::Stopped, false, now);
        true
    }

    /// The handshake is done and the lists are read: the link takes over, and the other links of this backend are
    /// replaced.
    pub(super) fn trial_passed(&mut self, serial: u64, now: Instant) {
        let number = self.links[&serial].id().backend;
        if self.stage.is_stopping() {
            return;
        }
        let Some(trial) = self.backends.get_mut(&number).and_then(BackendState::take_trial) else { return };
        let Trial { settings, slot, eras, tickets, .. } = trial;
        self.catalogue.begin_change();
        let old = self.backends[&number].settings().clone();
        self.release_names(number, &old, &settings);
        self.backends.get_mut(&number).expect("seen above").apply_tried(&settings, eras);
        if old.policy != settings.policy {
            self.repolicy(number, now);
        }
        self.slot_filled(serial, now);
        self.restore_subscriptions(serial, now);
        self.offered(serial, now);
        // With another prefix or other patterns the same offer is a different catalogue.
        self.merge_catalogue();
        for key in self.slots_where(|key| key.backend == number && *key != slot) {
            self.renew_slot(key, &tickets, now);
        }
        for ticket in tickets {
            self.ticket_done(ticket, Ok(json!({"backend": self.backends.name(number), "state": "ready"})));
        }
        self.update_watches(now);
        self.update_log_levels(now);
    }

    /// Opens another link for this slot by the new settings, beside the one that serves.
    fn renew_slot(&mut self, key: SlotKey, tickets: &[Ticket], now: Instant) {
        let slot = self.slots.get_mut(&key).expect("listed by the caller");
        if let Some(old) = slot.links.take_candidate() {
            self.stop_link(old, How::Stopped, true, now);
        }
        if !self.fits(key) {
            return self.empty_slot(key, now);
        }
        if self.replace(key, now) {
            self.slots.get_mut(&key).expect("seen above").add_tickets(tickets);
            tickets.iter().for_each(|ticket| self.operator_requests.grow(*ticket));
            return;
        }
        let slot = self.slots.get_mut(&key).expect("seen above");
        let current = slot.start_anew(now);
        self.starts_due |= slot.links.due().is_some();
        current.into_iter().for_each(|serial| self.drain(serial, now));
    }

    /// Whether the settings have this slot.
    pub(super) fn fits(&self, key: SlotKey) -> bool {
        let Some(owner) = self.backends.get(&key.backend) else { return false };
        let is_pool = matches!(owner.settings().children, Children::Pool(_));
        match key.sharing {
            Sharing::Shared => !is_pool,
            Sharing::Handshake => !is_pool && owner.eras() == Some(Eras::BOTH),
            Sharing::Pool(index) => matches!(owner.settings().children, Children::Pool(size) if index < size.max(1)),
            Sharing::Session(_) | Sharing::Borrowed(_) => owner.settings().children == Children::PerSession,
        }
    }

    /// A link on trial is gone. False if it was not on trial.
    pub(super) fn trial_failed(&mut self, link_state: &LinkState, how: &How, stderr: &str, now: Instant) -> bool {
        let link = link_state.id();
        let Some(owner) = self.backends.get_mut(&link.backend) else { return false };
        if owner.trial().is_none_or(|trial| trial.serial != link.serial) {
            return false;
        }
        let Some(trial) = owner.take_trial() else { return false };
        let name = owner.settings().name.clone();
        let why = match trial.why {
            Some(why) => why,
            None => format!("the new one {how}"),
        };
        owner.set_change(ConfigChange::Failed(FailedTrial { why: why.clone(), stderr: stderr.to_owned(), at: now }));
        let last = stderr.lines().rev().find(|line| !line.trim().is_empty());
        let detail = match last {
            Some(last) => format!("{why}; the end of its stderr: {}", messages::cut(last.trim(), 300)),
            None => why,
        };
        let record = Record {
            id: Some(name.clone()),
            kind: Some("backend"),
            pid: link_state.pid(),
            reason: Some("the changed configuration was not applied, and the old process keeps serving".to_owned()),
            detail: Some(detail.clone()),
            took: Some(now.saturating_duration_since(link_state.began())),
            ..Record::new(record::Event::ReloadFailed)
        };
        self.out.push(Action::Record(record));
        let mut tickets = trial.tickets;
        if let Some(slot) = self.slots.get_mut(&trial.slot) {
            tickets.extend(slot.take_tickets());
        }
        self.leave_trial_slot(trial.slot);
        for ticket in tickets {
            let words =
                format!("{name}: its changed configuration was not applied: {detail}; the old one keeps serving");
            self.ticket_done(ticket, Err(words));
        }
        true
    }

    /// Restarts are counted by another policy from now on.
    pub(super) fn repolicy(&mut self, number: u32, now: Instant) {
        let policy = self.backends[&number].settings().policy.clone();
        for key in self.slots_where(|key| key.backend == number) {
            let (seed, is_ready) = (self.ids.random(), self.serving(key).is_some());
            let slot = self.slots.get_mut(&key).expect("listed above");
            let old = slot.links.set_policy(policy.clone(), seed, is_ready, now);
            if let Some(backend) = self.backends.get_mut(&number) {
                backend.keep_restarts(&old);
            }
        }
    }
}

/// Whether a change needs another process or connection. Other changes are applied to those that run.
pub(super) fn needs_process(old: &Backend, new: &Backend) -> bool {
    let is_pool = |backend: &Backend| matches!(backend.children, Children::Pool(_));
    old.kind != new.kind || old.era != new.era || old.inherit_env != new.inherit_env || is_pool(old) != is_pool(new)
}
