//! The configured backends: settings, offer, circuit breaker and figures of each, across all its links.
//! Processes and connections are in [`super::slots`] and [`super::links`].

use std::{
    collections::BTreeMap,
    ops::Index,
    rc::Rc,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::{
    json::Raw,
    message::pick,
    pace::{Figures, Pace},
    restarts::{Past, RECENT_MAX, Restarts},
};

use super::{
    Backend, Kind, Offer,
    elements::{Elements, Text},
    guard::{Breaker, Circuit, Health, Pass, Wait},
    saved::{SavedBackend, SavedOffer},
    trials::{ConfigChange, Trial},
};

/// How long the first list waits for a backend without a cached catalogue. Then lists are served without it, and
/// `list_changed` follows.
const OFFER_WAIT_MAX: Duration = Duration::from_millis(100);
/// How many tools of one backend are reported whose arguments cannot be checked.
const UNCHECKED_MAX: usize = 100;

/// Every backend by its number. A name keeps its number for as long as the gateway runs.
#[derive(Debug, Default)]
pub(super) struct Backends {
    by_number: BTreeMap<u32, BackendState>,
    /// In the order of the configuration.
    order: Vec<u32>,
    /// Also of backends that are no longer configured.
    numbers: BTreeMap<String, u32>,
}

impl Index<&u32> for Backends {
    type Output = BackendState;

    fn index(&self, number: &u32) -> &BackendState {
        &self.by_number[number]
    }
}

impl Backends {
    pub(super) fn get(&self, number: &u32) -> Option<&BackendState> {
        self.by_number.get(number)
    }

    pub(super) fn get_mut(&mut self, number: &u32) -> Option<&mut BackendState> {
        self.by_number.get_mut(number)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &BackendState> {
        self.by_number.values()
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut BackendState> {
        self.by_number.values_mut()
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &u32> {
        self.by_number.keys()
    }

    /// The numbers in the order of the configuration.
    pub(super) fn order(&self) -> &[u32] {
        &self.order
    }

    pub(super) fn in_order(&self) -> impl Iterator<Item = (u32, &BackendState)> + Clone {
        self.order.iter().filter_map(|number| Some((*number, self.by_number.get(number)?)))
    }

    /// Empty if it is no longer configured.
    pub(super) fn name(&self, number: u32) -> &str {
        self.by_number.get(&number).map_or("", |backend| &backend.settings.name)
    }

    /// Also of a backend that is no longer configured.
    pub(super) fn last_name(&self, number: u32) -> Option<&str> {
        self.numbers.iter().find(|(_, known)| **known == number).map(|(name, _)| name.as_str())
    }

    pub(super) fn find(&self, name: &str) -> Option<u32> {
        self.order.iter().find(|number| self.name(**number) == name).copied()
    }

    pub(super) fn save_numbers(&self) -> BTreeMap<String, u32> {
        self.numbers.clone()
    }

    /// Names keep their numbers.
    pub(super) fn restore_numbers(numbers: BTreeMap<String, u32>) -> Backends {
        Backends { numbers, ..Backends::default() }
    }

    pub(super) fn remove(&mut self, number: u32) {
        self.by_number.remove(&number);
    }

    /// Takes the settings of each backend, except where a change is on trial. `cached` is what each offered in an earlier run.
    pub(super) fn configure(&mut self, settings: &[Backend], cached: &mut BTreeMap<String, Offer>) {
        self.order.clear();
        for settings in settings.iter().cloned() {
            let next = self.numbers.len() as u32;
            let number = *self.numbers.entry(settings.name.clone()).or_insert(next);
            self.order.push(number);
            match self.by_number.get_mut(&number) {
                Some(backend) if backend.trial().is_some() => {}
                Some(backend) => backend.settings = settings,
                None => {
                    let cached = cached.remove(&settings.name);
                    self.by_number.insert(number, BackendState::new(settings, cached));
                }
            }
        }
    }
}

/// One backend, across all its links.
#[derive(Debug)]
pub(super) struct BackendState {
    settings: Backend,
    /// The name in the settings, shared by what is reported of every call.
    name: Rc<str>,
    offer: Offer,
    /// Read from the offer.
    elements: Elements,
    offer_state: OfferState,
    breaker: Breaker,
    /// Tools whose schemas cannot be used, as clients see them, and why. Noticed when they are called.
    unchecked: BTreeMap<Rc<str>, String>,
    /// Which eras it speaks, once it was asked.
    eras: Option<Eras>,
    /// When lists stop waiting for its offer; set by the first list that waits.
    offer_wait_until: Option<Instant>,
    /// A link was ready under these settings.
    is_proven: bool,
    /// Its offer was read under these settings, now or in an earlier run.
    is_kept: bool,
    change: ConfigChange,
    /// The pool slot that was used last while none served.
    turn: u32,
    pace: Pace,
    /// When a request was last lost.
    lost_at: Option<Instant>,
    /// It is the server of a relay, and clients use it as if each had it alone.
    is_shared: bool,
    /// Restarts in slots that were removed, and the last exits there.
    restarts_removed: u64,
    exits_removed: Vec<Past>,
}

/// What is known of a backend's offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum OfferState {
    Unknown,
    /// It is from an earlier run, or from before a change of the configuration.
    Stale,
    Confirmed,
    /// Unknown, and the first start failed.
    Failed,
}

/// What a new offer changes.
pub(super) struct OfferChange {
    pub was_confirmed: bool,
    pub is_same: bool,
    /// It is to be written to the cache.
    pub is_to_be_kept: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Eras {
    pub handshake: bool,
    pub stateless: bool,
}

impl Eras {
    pub(super) const BOTH: Eras = Eras { handshake: true, stateless: true };
}

impl BackendState {
    fn new(settings: Backend, cached: Option<Offer>) -> BackendState {
        let is_kept = cached.is_some();
        let offer = cached.unwrap_or_default();
        BackendState {
            breaker: Breaker::new(settings.breaker_failures, settings.breaker_open),
            elements: Elements::default().read(&offer, Text::Unchecked),
            offer,
            offer_state: if is_kept { OfferState::Stale } else { OfferState::Unknown },
            unchecked: BTreeMap::new(),
            eras: None,
            offer_wait_until: None,
            is_proven: false,
            is_kept,
            change: ConfigChange::None,
            turn: 0,
            pace: Pace::default(),
            lost_at: None,
            is_shared: false,
            restarts_removed: 0,
            exits_removed: Vec::new(),
            name: settings.name.as_str().into(),
            settings,
        }
    }

    /// Everything but its settings.
    pub(super) fn save(&self, number: u32, now: Instant) -> SavedBackend {
        SavedBackend {
            number,
            offer: SavedOffer::of(&self.offer),
            offer_state: self.offer_state,
            circuit: self.breaker.save(now),
            unchecked: self.unchecked.iter().map(|(tool, why)| (tool.to_string(), why.clone())).collect(),
            eras: self.eras,
            is_proven: self.is_proven,
            is_kept: self.is_kept,
            failed_change: self.change.save(now),
            turn: self.turn,
            pace: self.pace.save(now),
            restarts_removed: self.restarts_removed,
            exits_removed: self.exits_removed.iter().map(|past| past.save(now)).collect(),
        }
    }

    /// The settings are there already. A list that waits for the offer begins to wait anew.
    pub(super) fn restore(&mut self, saved: SavedBackend, now: Instant) {
        self.offer = saved.offer.offer();
        self.elements = Elements::default().read(&self.offer, Text::Unchecked);
        self.offer_state = saved.offer_state;
        self.breaker.restore(saved.circuit, now);
        self.unchecked = saved.unchecked.into_iter().map(|(tool, why)| (tool.into(), why)).collect();
        self.eras = saved.eras;
        self.is_proven = saved.is_proven;
        self.is_kept = saved.is_kept;
        self.change = ConfigChange::restore(saved.failed_change, now);
        self.turn = saved.turn;
        self.pace = Pace::restore(saved.pace, now);
        self.restarts_removed = saved.restarts_removed;
        self.exits_removed = saved.exits_removed.into_iter().map(|past| past.restore(now)).collect();
    }

    pub(super) fn settings(&self) -> &Backend {
        &self.settings
    }

    pub(super) fn name(&self) -> &Rc<str> {
        &self.name
    }

    pub(super) fn mark_shared(&mut self) {
        self.is_shared = true;
    }

    pub(super) fn is_shared(&self) -> bool {
        self.is_shared
    }

    pub(super) fn is_http(&self) -> bool {
        matches!(self.settings.kind, Kind::Http { .. })
    }

    // ---- the offer -----------------------------------------------------------------------------

    pub(super) fn offer(&self) -> &Offer {
        &self.offer
    }

    pub(super) fn elements(&self) -> &Elements {
        &self.elements
    }

    pub(super) fn offer_state(&self) -> OfferState {
        self.offer_state
    }

    pub(super) fn is_offer_unknown(&self) -> bool {
        self.offer_state == OfferState::Unknown
    }

    pub(super) fn is_offer_confirmed(&self) -> bool {
        self.offer_state == OfferState::Confirmed
    }

    /// A member of the capabilities that it declared.
    pub(super) fn capability(&self, name: &str) -> Option<Raw<'_>> {
        let capabilities = std::str::from_utf8(&self.offer.capabilities).ok().and_then(Raw::parse)?;
        let [member] = pick(capabilities, [name])?;
        member
    }

    /// This is what it offers now.
    pub(super) fn set_offer(&mut self, offer: &Offer) -> OfferChange {
        let is_same = self.offer == *offer;
        let change =
            OfferChange { was_confirmed: self.is_offer_confirmed(), is_same, is_to_be_kept: !is_same || !self.is_kept };
        self.offer_state = OfferState::Confirmed;
        self.is_kept = true;
        if change.is_to_be_kept {
            self.offer = offer.clone();
            self.elements = self.elements.read(offer, Text::Checked);
            self.unchecked.clear();
        }
        change
    }

    /// A start failed: requests wait no longer for an offer that was never known.
    pub(super) fn start_failed(&mut self) {
        if self.is_offer_unknown() {
            self.offer_state = OfferState::Failed;
        }
    }

    /// Lists wait for its offer if it is unknown, for a short time and once.
    pub(super) fn begin_offer_wait(&mut self, now: Instant) {
        if self.is_offer_unknown() {
            self.offer_wait_until.get_or_insert(now + OFFER_WAIT_MAX);
        }
    }

    /// How long lists still wait for it.
    pub(super) fn offer_wait_until(&self, now: Instant) -> Option<Instant> {
        self.offer_wait_until.filter(|until| self.is_offer_unknown() && *until > now)
    }

    /// A tool's schema cannot be used. True if that was not known, and is to be reported.
    pub(super) fn note_unchecked(&mut self, tool: &Rc<str>, why: &str) -> bool {
        if self.unchecked.len() >= UNCHECKED_MAX || self.unchecked.get(tool).is_some_and(|known| known == why) {
            return false;
        }
        self.unchecked.insert(tool.clone(), why.to_owned());
        true
    }

    /// Its arguments were checked: it may have been for want of a process that could do so.
    pub(super) fn note_checked(&mut self, tool: &Rc<str>) {
        self.unchecked.remove(tool);
    }

    pub(super) fn unchecked(&self) -> impl Iterator<Item = (&str, &str)> {
        self.unchecked.iter().map(|(tool, why)| (&**tool, why.as_str()))
    }

    // ---- the settings --------------------------------------------------------------------------

    pub(super) fn eras(&self) -> Option<Eras> {
        self.eras
    }

    /// What a handshake under these settings showed. A process is used in only one era; HTTP has a link for each, if
    /// the configuration does not choose one.
    pub(super) fn learn_eras(&mut self, eras: Eras) {
        self.eras = Some(eras);
    }

    pub(super) fn is_proven(&self) -> bool {
        self.is_proven
    }

    pub(super) fn is_kept(&self) -> bool {
        self.is_kept
    }

    /// Takes other settings that need no other process.
    pub(super) fn apply(&mut self, settings: &Backend) {
        self.breaker.configure(settings.breaker_failures, settings.breaker_open);
        self.settings = settings.clone();
    }

    /// Takes settings that need another process: what is known of the one before is no longer certain.
    pub(super) fn apply_anew(&mut self, settings: &Backend) {
        self.apply(settings);
        self.eras = None;
        self.is_proven = false;
        self.is_kept = false;
        if self.is_offer_confirmed() {
            self.offer_state = OfferState::Stale;
        }
        self.breaker.reset();
    }

    /// Takes settings whose trial passed. The offer is written to the cache again, even if it is the same.
    pub(super) fn apply_tried(&mut self, settings: &Backend, eras: Option<Eras>) {
        self.apply(settings);
        self.breaker.reset();
        self.eras = eras;
        self.is_kept = false;
    }

    pub(super) fn change(&self) -> &ConfigChange {
        &self.change
    }

    pub(super) fn set_change(&mut self, change: ConfigChange) {
        self.change = change;
    }

    pub(super) fn forget_failed_change(&mut self) {
        if let ConfigChange::Failed(_) = self.change {
            self.change = ConfigChange::None;
        }
    }

    pub(super) fn trial(&self) -> Option<&Trial> {
        match &self.change {
            ConfigChange::OnTrial(trial) => Some(trial),
            ConfigChange::None | ConfigChange::Failed(_) => None,
        }
    }

    pub(super) fn trial_mut(&mut self) -> Option<&mut Trial> {
        match &mut self.change {
            ConfigChange::OnTrial(trial) => Some(trial),
            ConfigChange::None | ConfigChange::Failed(_) => None,
        }
    }

    pub(super) fn take_trial(&mut self) -> Option<Trial> {
        match std::mem::replace(&mut self.change, ConfigChange::None) {
            ConfigChange::OnTrial(trial) => Some(*trial),
            other => {
                self.change = other;
                None
            }
        }
    }

    // ---- calls and links -----------------------------------------------------------------------

    /// Whether the circuit breaker lets one call pass.
    pub(super) fn ask_breaker(&mut self, now: Instant) -> Result<Pass, Wait> {
        self.breaker.ask(now)
    }

    pub(super) fn reset_breaker(&mut self) {
        self.breaker.reset();
    }

    pub(super) fn circuit(&self) -> Circuit {
        self.breaker.state()
    }

    /// A link is ready. One that replaces a link which answered no calls has still to show that it does.
    pub(super) fn link_ready(&mut self, replaces_unresponsive: bool) {
        if !replaces_unresponsive {
            self.breaker.reset();
        }
        self.is_proven = true;
    }

    /// A call was lost. True if another one was lost after this one began: calls that break off together, as when the server
    /// behind HTTP is restarted, are one failure and not many in a row.
    pub(super) fn note_lost(&mut self, began: Instant, now: Instant) -> bool {
        let is_same = self.lost_at.is_some_and(|last| began <= last);
        self.lost_at = Some(now);
        is_same
    }

    /// True if that opened the circuit.
    pub(super) fn note_health(&mut self, pass: Option<Pass>, health: Health, now: Instant) -> bool {
        pass.is_some_and(|pass| self.breaker.heard(pass, health, now))
    }

    pub(super) fn note_answered(&mut self, began: Instant, now: Instant) {
        self.pace.note(began, now);
    }

    pub(super) fn figures(&self, now: Instant) -> Figures {
        self.pace.figures(now)
    }

    /// The pool slot whose turn it is to be waited for.
    pub(super) fn next_turn(&mut self, size: u32) -> u32 {
        self.turn = (self.turn + 1) % size;
        self.turn
    }

    /// The count of restarts never falls, also if the slot is removed in which they were.
    pub(super) fn keep_restarts(&mut self, restarts: &Restarts) {
        self.restarts_removed += u64::from(restarts.restarts());
        self.exits_removed.extend(restarts.recent().cloned());
        self.exits_removed.sort_by_key(|past| past.at);
        self.exits_removed.drain(..self.exits_removed.len().saturating_sub(RECENT_MAX));
    }

    pub(super) fn restarts_removed(&self) -> u64 {
        self.restarts_removed
    }

    pub(super) fn exits_removed(&self) -> &[Past] {
        &self.exits_removed
    }
}
