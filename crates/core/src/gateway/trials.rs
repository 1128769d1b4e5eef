//! Trials: a changed backend is started beside the process that serves, and takes over when its handshake is done and its
//! lists are read. If that fails, the old process goes on under its old settings, and the failure is reported.

use serde_json::{Value, json};

use super::{
    Action, Backend, Children, Connection, Eras, Gateway, How, Instant, Link, List, Place, PlaceKey, Record, Seat,
    Start, Ticket, mem, record, words,
};
use crate::restarts::Restarts;

use super::links::Phase;
use super::places::State;

/// A change that is being tried.
#[derive(Debug)]
pub(super) struct Trial {
    pub settings: Backend,
    pub serial: u64,
    /// Where it takes over. With another kind of `children` this is a place of its own until then.
    place: PlaceKey,
    /// What its handshake showed.
    pub eras: Option<Eras>,
    /// Reloads that wait for the outcome.
    tickets: Vec<Ticket>,
    /// Why it fails, where the end of its link does not say so.
    why: Option<String>,
}

/// A change that did not work. The backend goes on under the settings it had.
#[derive(Debug)]
pub(super) struct Refused {
    why: String,
    stderr: String,
    at: Instant,
}

impl Refused {
    /// In the words that all kinds of instances share. `pending` is true while the configuration still asks for it.
    pub fn to_json(&self, now: Instant) -> Value {
        json!({
            "ok": false,
            "reason": CHANGED,
            "error": self.why,
            "stderr_tail": self.stderr,
            "seconds_ago": now.saturating_duration_since(self.at).as_secs_f64(),
            "pending": true,
        })
    }
}

/// Why a backend is restarted that was not asked to be.
pub(super) const CHANGED: &str = "its configuration changed";

impl Gateway {
    /// What the driver connects to for [`Action::Connect`]: a link that is on trial has settings of its own.
    pub fn settings_of(&self, link: Link) -> Option<&Backend> {
        let owner = self.owners.get(&link.backend)?;
        let trial = owner.trial.as_ref().filter(|trial| trial.serial == link.serial);
        Some(trial.map_or(&owner.settings, |trial| &trial.settings))
    }

    pub(super) fn trial_of(&mut self, serial: u64) -> Option<&mut Trial> {
        let backend = self.links.get(&serial)?.link.backend;
        self.owners.get_mut(&backend)?.trial.as_deref_mut().filter(|trial| trial.serial == serial)
    }

    /// Whether a change has to be tried first: something works that it could break.
    pub(super) fn needs_trial(&self, number: u32, new: &Backend) -> bool {
        let Some(owner) = self.owners.get(&number) else { return false };
        needs_process(&owner.settings, new)
            && owner.is_proven
            && !self.switches.is_backend_off(&owner.settings.name)
            && !self.is_given_up(number)
    }

    pub(super) fn begin_trial(&mut self, number: u32, settings: Backend, now: Instant) {
        let seat = match settings.children {
            Children::Pool(_) => Seat::Pool(0),
            Children::Shared | Children::PerSession => Seat::Shared,
        };
        let key = PlaceKey { backend: number, seat };
        self.make_place(key, State::Idle);
        let place = self.places.get_mut(&key).expect("made above");
        let is_running = place.current().is_some();
        // A restart that is under way would only start the old one again; who asked for it hears of this one.
        if let Some(old) = place.candidate.take() {
            self.part(old, How::Stopped, true, now);
        }
        let by = now + settings.start_timeout;
        let serial = self.connect(key, now);
        let connection = self.links.get_mut(&serial).expect("just made");
        connection.phase = Phase::Connecting { by };
        connection.is_probe = settings.start == Start::Lazy && !is_running;
        self.wake_by(by);
        self.places.get_mut(&key).expect("made above").candidate = Some(serial);
        let trial = Trial { settings, serial, place: key, eras: None, tickets: Vec::new(), why: None };
        let owner = self.owners.get_mut(&number).expect("it is configured");
        owner.trial = Some(trial.into());
        owner.refused = None;
    }

    /// The trial of a backend is over before anything came of it; what it was about.
    pub(super) fn abandon_trial(&mut self, number: u32, why: &str, now: Instant) -> Option<Backend> {
        let trial = self.owners.get_mut(&number)?.trial.take()?;
        if let Some(place) = self.places.get_mut(&trial.place) {
            place.candidate = place.candidate.filter(|serial| *serial != trial.serial);
        }
        self.part(trial.serial, How::Stopped, true, now);
        self.leave_trial_place(trial.place);
        for ticket in trial.tickets {
            let words = format!("{}: {why}", self.owner_name(number));
            self.ticket_done(ticket, Err(words));
        }
        Some(trial.settings)
    }

    /// A place that was there only for a trial is there no longer.
    fn leave_trial_place(&mut self, key: PlaceKey) {
        let is_unused = |place: &Place| place.state == State::Idle && place.held.is_empty() && place.tickets.is_empty();
        if key != self.first_place(key.backend) && self.places.get(&key).is_some_and(is_unused) {
            self.take_place(key);
        }
    }

    /// Answers a reload when every change that is on trial has taken over or failed.
    pub(super) fn outcome_asked(&mut self, ticket: Ticket) {
        if self.stopping.is_some() {
            return self.out.push(Action::Answer { ticket, result: Err("the gateway is stopping".into()) });
        }
        let trials: Vec<&mut Box<Trial>> = self.owners.values_mut().filter_map(|owner| owner.trial.as_mut()).collect();
        let count = trials.len();
        trials.into_iter().for_each(|trial| trial.tickets.push(ticket));
        self.errand_begun(ticket, count);
    }

    /// Its lists cannot be read, which only the words of the failure say.
    pub(super) fn trial_misses_list(&mut self, serial: u64, kind: List, why: &str, now: Instant) -> bool {
        let Some(trial) = self.trial_of(serial).filter(|_| kind == List::Tools) else { return false };
        trial.why = Some(format!("{} failed: {}", kind.method(), words::cut(why, 300)));
        self.part(serial, How::Stopped, false, now);
        true
    }

    /// Its handshake is done and its lists are read: it takes over, and what else runs of this backend is replaced.
    pub(super) fn trial_passed(&mut self, serial: u64, now: Instant) {
        let number = self.links[&serial].link.backend;
        if self.stopping.is_some() {
            return;
        }
        let Some(trial) = self.owners.get_mut(&number).and_then(|owner| owner.trial.take()) else { return };
        let Trial { settings, place, eras, tickets, .. } = *trial;
        self.catalogue.remember(&mut self.owned);
        self.catalogue.forget_seen();
        let old = self.owners[&number].settings.clone();
        self.release_names(number, &old, &settings);
        let owner = self.owners.get_mut(&number).expect("seen above");
        owner.breaker.configure(settings.breaker_failures, settings.breaker_open);
        owner.breaker.reset();
        owner.eras = eras;
        owner.settings = settings.clone();
        // Its catalogue is cached for what it is now, even if it is the same.
        owner.is_kept = false;
        if old.policy != settings.policy {
            self.repolicy(number, now);
        }
        self.place_filled(serial, now);
        self.restore(serial, now);
        self.offered(serial, now);
        // With another prefix or other rules the same offer is another catalogue.
        self.merge_catalogue();
        let keys: Vec<PlaceKey> =
            self.places.keys().filter(|key| key.backend == number && **key != place).copied().collect();
        for key in keys {
            self.renew_place(key, &tickets, now);
        }
        for ticket in tickets {
            self.ticket_done(ticket, Ok(json!({"backend": self.owner_name(number), "state": "ready"})));
        }
        self.rewatch(now);
        self.relevel(now);
    }

    /// Another process for this place, by the settings that hold now, beside the one that serves there.
    fn renew_place(&mut self, key: PlaceKey, tickets: &[Ticket], now: Instant) {
        let place = self.places.get_mut(&key).expect("listed by the caller");
        if let Some(old) = place.candidate.take() {
            self.part(old, How::Stopped, true, now);
        }
        if !self.fits(key) {
            return self.empty_place(key, now);
        }
        if self.replace(key, now) {
            self.places.get_mut(&key).expect("seen above").tickets.extend(tickets);
            tickets.iter().for_each(|ticket| self.errand_grows(*ticket));
            return;
        }
        let place = self.places.get_mut(&key).expect("seen above");
        place.restarts.resumed();
        let current = place.current();
        if place.state != State::Idle {
            place.state = State::Waiting { at: now };
            self.starts_due = true;
        }
        current.into_iter().for_each(|serial| self.drain(serial, now));
    }

    /// Whether the settings have a use for this place.
    pub(super) fn fits(&self, key: PlaceKey) -> bool {
        let Some(owner) = self.owners.get(&key.backend) else { return false };
        let is_pool = matches!(owner.settings.children, Children::Pool(_));
        match key.seat {
            Seat::Shared => !is_pool,
            Seat::Second => !is_pool && owner.eras == Some(Eras { handshake: true, stateless: true }),
            Seat::Pool(index) => matches!(owner.settings.children, Children::Pool(size) if index < size.max(1)),
            Seat::Session(_) | Seat::Lent(_) => owner.settings.children == Children::PerSession,
        }
    }

    /// The link is gone that was to take over. False if it was not on trial.
    pub(super) fn trial_failed(&mut self, connection: &Connection, how: &How, stderr: &str, now: Instant) -> bool {
        let serial = connection.link.serial;
        let Some(owner) = self.owners.get_mut(&connection.link.backend) else { return false };
        let Some(trial) = owner.trial.take_if(|trial| trial.serial == serial) else { return false };
        let name = owner.settings.name.clone();
        let why = match trial.why {
            Some(why) => why,
            None => format!("the new one {how}"),
        };
        owner.refused = Some(Refused { why: why.clone(), stderr: stderr.to_owned(), at: now });
        let last = stderr.lines().rev().find(|line| !line.trim().is_empty());
        let detail = match last {
            Some(last) => format!("{why}; its last words: {}", words::cut(last.trim(), 300)),
            None => why,
        };
        let record = Record {
            id: Some(name.clone()),
            kind: Some("backend"),
            pid: connection.pid,
            reason: Some("the changed configuration was not applied, and the old process goes on".to_owned()),
            detail: Some(detail.clone()),
            took: Some(now.saturating_duration_since(connection.began)),
            ..Record::new(record::Event::ReloadFailed)
        };
        self.out.push(Action::Record(record));
        let mut tickets = trial.tickets;
        if let Some(place) = self.places.get_mut(&trial.place) {
            place.candidate = None;
            tickets.append(&mut place.tickets);
        }
        self.leave_trial_place(trial.place);
        for ticket in tickets {
            let words =
                format!("{name}: its changed configuration was not applied: {detail}; the old one keeps serving");
            self.ticket_done(ticket, Err(words));
        }
        true
    }

    /// Another policy counts from here.
    pub(super) fn repolicy(&mut self, number: u32, now: Instant) {
        let policy = self.owners[&number].settings.policy.clone();
        let keys: Vec<PlaceKey> = self.places.keys().filter(|key| key.backend == number).copied().collect();
        for key in keys {
            let new = Restarts::new(policy.clone(), self.chance());
            let place = self.places.get_mut(&key).expect("listed above");
            let old = mem::replace(&mut place.restarts, new);
            if let Some(serial) = place.current() {
                place.restarts.child_started(now);
                if self.links.get(&serial).is_some_and(Connection::is_ready) {
                    place.restarts.child_ready(now);
                }
            }
            self.keep_restarts(number, &old);
        }
    }
}

/// Whether a change can only be made with another process or connection. All else is applied to what runs.
pub(super) fn needs_process(old: &Backend, new: &Backend) -> bool {
    let is_pool = |backend: &Backend| matches!(backend.children, Children::Pool(_));
    old.kind != new.kind || old.era != new.era || old.inherit_env != new.inherit_env || is_pool(old) != is_pool(new)
}
