//! What operators change while the gateway runs: the configuration, what is switched off, restarts, and the end.

use serde_json::{Value, json};

use super::*;
use crate::reason::one_line;

use links::Phase;
use places::State;
use words::Failure;

/// Something that an operator asked of one backend or of several, until each is done.
#[derive(Debug, Default)]
pub(super) struct Errand {
    left: usize,
    done: Vec<Value>,
    failed: Vec<String>,
}

impl Gateway {
    /// Makes the owners what the settings say, but for those with a change that is being tried.
    pub(super) fn settle_owners(&mut self, kept: &mut BTreeMap<String, Offer>) {
        self.order.clear();
        for settings in self.settings.backends.clone() {
            let next = self.numbers.len() as u32;
            let number = *self.numbers.entry(settings.name.clone()).or_insert(next);
            self.order.push(number);
            match self.owners.get_mut(&number) {
                // What is being tried is not taken before it works.
                Some(owner) if owner.trial.is_some() => {}
                Some(owner) => owner.settings = settings,
                None => {
                    let kept = kept.remove(&settings.name);
                    let is_kept = kept.is_some();
                    let standing = if is_kept { Standing::Stale } else { Standing::Unknown };
                    self.owners.insert(
                        number,
                        Owner {
                            breaker: Breaker::new(settings.breaker_failures, settings.breaker_open),
                            offer: kept.unwrap_or_default(),
                            standing,
                            unchecked: BTreeMap::new(),
                            eras: None,
                            gather_until: None,
                            is_proven: false,
                            is_kept,
                            trial: None,
                            refused: None,
                            turn: 0,
                            pace: Pace::default(),
                            lost_at: None,
                            restarts_gone: 0,
                            past_gone: Vec::new(),
                            name: settings.name.as_str().into(),
                            settings,
                        },
                    );
                }
            }
        }
        self.merge_catalogue();
    }

    /// What runs of a backend that is off finishes, and nothing takes its place.
    fn rest_what_is_off(&mut self, now: Instant) {
        for number in self.order.clone().into_iter().filter(|number| self.is_off(*number)).collect::<Vec<_>>() {
            let name = self.owner_name(number);
            let failure = Failure::switched_off(name, &format!("The backend `{name}`"));
            // Nothing serves that a change could break.
            if let Some(new) = self.abandon_trial(number, "it was turned off meanwhile", now) {
                self.change_at_once(number, &new, now);
            }
            let keys: Vec<PlaceKey> = self.places.keys().filter(|key| key.backend == number).copied().collect();
            for key in keys {
                self.drop_place(key, &failure, now);
            }
        }
    }

    pub(super) fn is_off(&self, number: u32) -> bool {
        self.switches.is_backend_off(self.owner_name(number))
    }

    /// Every backend that has no place yet gets its first one, filled at once, unless it is off, or lazy and known.
    pub(super) fn place_all(&mut self, now: Instant) {
        for number in self.order.clone() {
            if self.is_off(number) {
                continue;
            }
            let key = self.first_place(number);
            let is_needed =
                self.owners.get(&number).is_some_and(|owner| owner.settings.start == Start::Eager || !owner.is_kept);
            self.make_place(key, if is_needed { State::Waiting { at: now } } else { State::Idle });
        }
        self.starts_due = true;
    }

    /// Only what differs is started, stopped or replaced. No client's session ends, whatever it is shown from here on.
    pub(super) fn configured(&mut self, settings: Settings, now: Instant) {
        if self.stopping.is_some() {
            return;
        }
        self.settings = settings;
        let mut wanted: BTreeMap<String, Backend> =
            self.settings.backends.iter().map(|backend| (backend.name.clone(), backend.clone())).collect();
        // What clients have seen until now is owned by those who offered it, before any of it becomes free.
        self.catalogue.remember(&mut self.owned);
        self.catalogue.forget_seen();
        for number in self.order.clone() {
            match wanted.remove(self.owner_name(number)) {
                None => {
                    self.drop_places(number, now);
                    self.owners.remove(&number);
                    self.owned.iter_mut().for_each(|owned| owned.release(number, |_| false));
                }
                Some(new) => self.reconfigure(number, new, now),
            }
        }
        self.switches.configure(&self.settings.switched_off);
        self.buckets.configure(self.settings.rates.clone());
        self.roles = Roles::new(self.settings.roles.clone());

        // Which view a client has, and what it shows, may both be another; only those who see a change hear of one.
        let hashes =
            |gateway: &Gateway, guest: &Guest| Family::ALL.map(|family| gateway.views[guest.view].family_hash(family));
        let saw: FxHashMap<Client, [u64; 3]> =
            self.guests.iter().map(|(client, guest)| (*client, hashes(self, guest))).collect();
        self.views.clear();
        self.settle_owners(&mut BTreeMap::new());
        let mut clients: Vec<Client> = self.guests.keys().copied().collect();
        clients.sort_unstable();
        for client in &clients {
            let who = self.guests[client].who.clone();
            let view = self.view_of(&who);
            self.guests.get_mut(client).expect("listed above").view = view;
        }
        for client in clients {
            let sees = hashes(self, &self.guests[&client]);
            for family in Family::ALL {
                if sees[family as usize] != saw[&client][family as usize] {
                    self.announce_to(client, family);
                }
            }
        }
        self.rest_what_is_off(now);
        self.place_all(now);
        self.gather(now);
        self.rewatch(now);
        self.relevel(now);
    }

    /// One backend is to be as the file says now.
    fn reconfigure(&mut self, number: u32, new: Backend, now: Instant) {
        let owner = self.owners.get_mut(&number).expect("it was configured");
        if owner.trial.as_ref().is_some_and(|trial| trial.settings == new) {
            return;
        }
        owner.refused = None;
        let is_same = owner.settings == new;
        self.abandon_trial(number, "its configuration changed again meanwhile", now);
        if is_same {
            return;
        }
        match self.needs_trial(number, &new) {
            true => self.begin_trial(number, new, now),
            false => self.change_at_once(number, &new, now),
        }
    }

    /// Nothing runs that the change could break, or it is one that what runs can take.
    fn change_at_once(&mut self, number: u32, new: &Backend, now: Instant) {
        let old = self.owners[&number].settings.clone();
        self.release_names(number, &old, new);
        self.backend_changed(number, &old, new, now);
    }

    /// What a backend cannot offer any more by its new configuration, another one may.
    pub(super) fn release_names(&mut self, number: u32, old: &Backend, new: &Backend) {
        let is_same = old.prefix == new.prefix;
        for kind in List::ALL {
            self.owned[kind as usize].release(number, |raw| match (kind, raw.strip_prefix(new.prefix.as_str())) {
                (List::Tools, Some(own)) => is_same && guard::passes(&new.allow, &new.deny, own),
                (List::Tools | List::Prompts, _) => is_same,
                (List::Resources | List::Templates, _) => true,
            });
        }
    }

    fn drop_places(&mut self, number: u32, now: Instant) {
        self.abandon_trial(number, "it was removed from the configuration meanwhile", now);
        let failure = Failure::removed(self.owner_name(number));
        let keys: Vec<PlaceKey> = self.places.keys().filter(|key| key.backend == number).copied().collect();
        for key in keys {
            self.drop_place(key, &failure, now);
        }
    }

    fn backend_changed(&mut self, number: u32, old: &Backend, new: &Backend, now: Instant) {
        let owner = self.owners.get_mut(&number).expect("it was configured");
        owner.breaker.configure(new.breaker_failures, new.breaker_open);
        owner.settings = new.clone();
        if trials::needs_process(old, new) {
            // What runs finishes what it was asked; what comes next is another one.
            owner.eras = None;
            owner.is_proven = false;
            owner.is_kept = false;
            if owner.standing == Standing::Confirmed {
                owner.standing = Standing::Stale;
            }
            owner.breaker.reset();
            let keys: Vec<PlaceKey> = self.places.keys().filter(|key| key.backend == number).copied().collect();
            for key in keys {
                self.empty_place(key, now);
            }
            return;
        }
        if old.policy != new.policy {
            self.repolicy(number, now);
        }
        let keys: Vec<PlaceKey> = self.places.keys().filter(|key| key.backend == number).copied().collect();
        for key in keys {
            if !self.fits(key) && key.seat != Seat::Second {
                self.empty_place(key, now);
                continue;
            }
            let place = self.places.get_mut(&key).expect("listed above");
            // Somebody mended something: it is worth a try at once.
            if let State::Waiting { .. } | State::GivenUp { .. } = place.state {
                place.restarts.resumed();
                place.state = State::Waiting { at: now };
            }
        }
    }

    /// The link in a place goes when it has finished; calls that wait there wait for the next one.
    pub(super) fn empty_place(&mut self, key: PlaceKey, now: Instant) {
        let Some(place) = self.places.get_mut(&key) else { return };
        let links: Vec<u64> = place.current().into_iter().chain(place.candidate.take()).collect();
        let is_needed = !place.held.is_empty() || !place.tickets.is_empty();
        place.restarts.resumed();
        // Places that the new settings have no use for are gone; those who waited there are sent on.
        place.state = if is_needed { State::Waiting { at: now } } else { State::Idle };
        for serial in links {
            self.drain(serial, now);
        }
        if let Some(place) = self.take_place(key) {
            self.keep_restarts(key.backend, &place.restarts);
            for ticket in place.tickets {
                let words = format!("{}: its configuration changed meanwhile", self.owner_name(key.backend));
                self.ticket_done(ticket, Err(words));
            }
            for held in place.held {
                let Some(mut call) = self.calls.remove(&held) else { continue };
                let (Some(whom), Some(message)) = (&call.whom, call.message.clone()) else { continue };
                match self.place_for(key.backend, whom, call.says, now) {
                    Ok(place) => {
                        call.place = place;
                        self.hold(held, call, &message, now);
                    }
                    Err(failure) => self.fail(*call, *failure, now),
                }
            }
        }
    }

    /// New links beside those that serve; they take over when they are ready.
    pub(super) fn restart_asked(&mut self, ticket: Ticket, backend: Option<String>, reason: &str, now: Instant) {
        let Some(numbers) = self.meant(ticket, backend) else { return };
        for number in &numbers {
            let record = Record {
                id: Some(self.owner_name(*number).to_owned()),
                kind: Some("backend"),
                reason: Some(one_line(reason)),
                ..Record::new(record::Event::ServerRestartRequested)
            };
            self.out.push(Action::Record(record));
        }
        self.run_errand(ticket, &numbers, now, |gateway, key| {
            let place = gateway.places.get_mut(&key).expect("listed by the caller");
            if !matches!(place.state, State::Linked(_)) {
                place.state = State::Waiting { at: now };
                gateway.starts_due = true;
            } else {
                gateway.replace(key, now);
            }
        });
    }

    /// Crashes are forgiven; what was given up or waits is tried at once.
    pub(super) fn resume_asked(&mut self, ticket: Ticket, backend: Option<String>, now: Instant) {
        let Some(numbers) = self.meant(ticket, backend) else { return };
        for number in &numbers {
            if let Some(owner) = self.owners.get_mut(number) {
                owner.breaker.reset();
            }
        }
        self.run_errand(ticket, &numbers, now, |gateway, key| {
            let place = gateway.places.get_mut(&key).expect("listed by the caller");
            place.restarts.resumed();
            if !matches!(place.state, State::Linked(_)) {
                place.state = State::Waiting { at: now };
                gateway.starts_due = true;
            }
        });
    }

    fn meant(&mut self, ticket: Ticket, backend: Option<String>) -> Option<Vec<u32>> {
        let found: Result<Vec<u32>, String> = match &backend {
            _ if self.stopping.is_some() => Err("the gateway is stopping".into()),
            None => Ok(self.order.clone()),
            Some(name) => match self.order.iter().find(|number| self.owner_name(**number) == name) {
                Some(number) => Ok(vec![*number]),
                None => Err(format!("there is no backend `{name}`")),
            },
        };
        match found {
            Ok(numbers) => Some(numbers),
            Err(words) => {
                self.out.push(Action::Answer { ticket, result: Err(words) });
                None
            }
        }
    }

    /// Does something to every place of some backends, and answers when each of them serves or has failed.
    fn run_errand(&mut self, ticket: Ticket, numbers: &[u32], now: Instant, act: impl Fn(&mut Gateway, PlaceKey)) {
        let keys: Vec<PlaceKey> = self.places.keys().filter(|key| numbers.contains(&key.backend)).copied().collect();
        // One more than there are, so that it is not over before all have begun.
        self.errands.insert(ticket, Errand { left: keys.len() + 1, ..Errand::default() });
        for key in keys {
            act(self, key);
            let place = self.places.get_mut(&key).expect("listed above");
            let serves = place.candidate.is_none()
                && place.current().is_some_and(|serial| self.links.get(&serial).is_some_and(Connection::is_ready));
            place.tickets.push(ticket);
            if serves {
                place.tickets.pop();
                let words = json!({"backend": self.owner_name(key.backend), "state": "ready"});
                self.ticket_done(ticket, Ok(words));
            }
        }
        let _ = now;
        self.errand_done(ticket);
    }

    /// An errand of so many parts, which may be none.
    pub(super) fn errand_begun(&mut self, ticket: Ticket, parts: usize) {
        self.errands.insert(ticket, Errand { left: parts + 1, ..Errand::default() });
        self.errand_done(ticket);
    }

    /// One more part of an errand that is not over.
    pub(super) fn errand_grows(&mut self, ticket: Ticket) {
        if let Some(errand) = self.errands.get_mut(&ticket) {
            errand.left += 1;
        }
    }

    pub(super) fn ticket_done(&mut self, ticket: Ticket, result: Result<Value, String>) {
        if let Some(errand) = self.errands.get_mut(&ticket) {
            match result {
                Ok(done) => errand.done.push(done),
                Err(words) => errand.failed.push(words),
            }
            self.errand_done(ticket);
        }
    }

    fn errand_done(&mut self, ticket: Ticket) {
        let Some(errand) = self.errands.get_mut(&ticket) else { return };
        errand.left -= 1;
        if errand.left == 0 {
            let errand = self.errands.remove(&ticket).expect("found above");
            let result = match errand.failed.is_empty() {
                true => Ok(json!({"links": errand.done})),
                false => Err(errand.failed.join("; ")),
            };
            self.out.push(Action::Answer { ticket, result });
        }
    }

    /// A new link beside the one that serves. False if one is on its way already, or none serves.
    pub(super) fn replace(&mut self, key: PlaceKey, now: Instant) -> bool {
        let Some(place) = self.places.get(&key) else { return false };
        if place.candidate.is_some() || self.serving(key).is_none() {
            return false;
        }
        let serial = self.connect(key, now);
        self.places.get_mut(&key).expect("found above").candidate = Some(serial);
        true
    }

    /// Turns a tool or a backend off or on. A backend that is off finishes what it was asked and is stopped; one that is on
    /// again is started.
    pub(super) fn switch_asked(&mut self, ticket: Ticket, what: &Switch, off: bool, now: Instant) {
        let (kind, name) = match what {
            Switch::Tool(name) => ("tool", name),
            Switch::Backend(name) => ("backend", name),
        };
        if !self.can_switch(what) {
            return self.out.push(Action::Answer { ticket, result: Err(format!("there is no {kind} `{name}`")) });
        }
        let changed = self.switches.turn(what, off);
        if changed {
            let detail = format!("the {kind} {name} was switched {}", if off { "off" } else { "on" });
            let record = Record { detail: Some(detail), ..Record::new(record::Event::Switched) };
            self.out.push(Action::Record(match what {
                Switch::Tool(name) => {
                    let of_gateway = record::OfGateway { tool: Some(name.clone()), ..Default::default() };
                    Record { gateway: Some(Box::new(of_gateway)), ..record }
                }
                Switch::Backend(name) => Record { id: Some(name.clone()), kind: Some("backend"), ..record },
            }));
            self.merge_catalogue();
            self.rest_what_is_off(now);
            self.place_all(now);
        }
        self.out.push(Action::Answer { ticket, result: Ok(json!({"changed": changed, "off": off})) });
    }

    /// Whether there is such a thing to turn off or on: a backend, a tool that one has or had when it was last seen, or one
    /// that a backend may have of which nothing is known yet.
    pub fn can_switch(&self, what: &Switch) -> bool {
        let name = match what {
            Switch::Backend(name) => return self.order.iter().any(|number| self.owner_name(*number) == name),
            Switch::Tool(name) => name,
        };
        let may_be_of = |owner: &Owner| {
            let is_unknown = owner.offer.tools.is_empty() && owner.standing != Standing::Confirmed;
            let prefix = &owner.settings.prefix;
            is_unknown && (prefix.is_empty() || name.starts_with(&names::plain(prefix, "")))
        };
        self.switches.is_tool_off(name)
            || self.owners.values().any(may_be_of)
            || self.names_to_switch().any(|known| known == *name)
    }

    /// All backends and all tools as clients see them, those that are off included.
    pub fn names_to_switch(&self) -> impl Iterator<Item = String> {
        let backends = self.settings.backends.iter().map(|backend| backend.name.clone());
        backends.chain(self.catalogue.all_tools().map(|(shown, _)| shown.to_string()))
    }

    /// No new link; what is in flight has a moment to be answered. A second wish does not wait.
    pub(super) fn stop_asked(&mut self, now: Instant) {
        if self.stopping.is_some() {
            let mut links: Vec<Link> = self.links.values().map(|connection| connection.link).collect();
            links.sort_unstable();
            for link in links {
                self.part(link.serial, How::Stopped, true, now);
                self.out.push(Action::Disconnect { link, at_once: true });
            }
            return;
        }
        self.stopping = Some(now + STOP_MAX);
        self.wake_by(now + STOP_MAX);
        self.owners.values_mut().for_each(|owner| owner.trial = None);
        let held: Vec<u64> = self.places.values_mut().flat_map(|place| mem::take(&mut place.held)).collect();
        for key in held {
            if let Some(call) = self.calls.remove(&key) {
                let failure = Failure::stopping(self.owner_name(call.place.backend));
                self.fail(*call, failure, now);
            }
        }
        self.gather(now);
        self.end_listens();
        for (ticket, _) in mem::take(&mut self.errands) {
            self.out.push(Action::Answer { ticket, result: Err("the gateway is stopping".into()) });
        }
        for place in self.places.values_mut() {
            place.tickets.clear();
            if place.due().is_some() {
                place.state = State::Idle;
            }
        }
        let mut serials: Vec<u64> = self.links.keys().copied().collect();
        serials.sort_unstable();
        for serial in serials {
            let connection = &self.links[&serial];
            if connection.in_flight == 0 || !matches!(connection.phase, Phase::Ready | Phase::Draining { .. }) {
                self.part(serial, How::Stopped, false, now);
            }
        }
        if self.links.is_empty() {
            self.over = true;
            self.out.push(Action::Over);
        }
    }

    /// Whatever has not been answered by now fails.
    pub(super) fn stop_at_last(&mut self, now: Instant) {
        let mut serials: Vec<u64> = self.links.keys().copied().collect();
        serials.sort_unstable();
        for serial in serials {
            self.part(serial, How::Stopped, false, now);
        }
    }
}
