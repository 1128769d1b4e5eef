//! Changes by operators while the gateway runs: configuration, switches, restarts, the stop.
//! What operators see is in [`super::status`].

use std::{collections::BTreeMap, mem, time::Instant};

use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::{
    Action, Backend, Client, Gateway, Offer, STOP_MAX, Settings, Stage, Start, Switch, Ticket,
    backends::BackendState,
    clients::ClientState,
    guard,
    links::Phase,
    messages::Failure,
    names,
    slots::{Sharing, SlotKey, SlotState},
    timers::Timer,
    trials,
};
use crate::{
    exit::How,
    mcp::{Family, List},
    reason, record,
    record::Record,
};

/// What operators asked for and is not done yet.
#[derive(Debug, Default)]
pub(super) struct OperatorRequests(FxHashMap<Ticket, OperatorRequest>);

#[derive(Debug)]
struct OperatorRequest {
    /// Parts that are not done.
    left: usize,
    done: Vec<Value>,
    failed: Vec<String>,
}

impl OperatorRequests {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// A request of so many parts. It has one more, which is done when all have begun.
    fn begin(&mut self, ticket: Ticket, parts: usize) {
        self.0.insert(ticket, OperatorRequest { left: parts + 1, done: Vec::new(), failed: Vec::new() });
    }

    /// It has one more part.
    pub(super) fn grow(&mut self, ticket: Ticket) {
        if let Some(request) = self.0.get_mut(&ticket) {
            request.left += 1;
        }
    }

    /// A part is done. Returns the answer when all are.
    fn end_part(&mut self, ticket: Ticket, result: Option<Result<Value, String>>) -> Option<Action> {
        let request = self.0.get_mut(&ticket)?;
        match result {
            Some(Ok(done)) => request.done.push(done),
            Some(Err(text)) => request.failed.push(text),
            None => {}
        }
        request.left -= 1;
        if request.left > 0 {
            return None;
        }
        let OperatorRequest { done, failed, .. } = self.0.remove(&ticket)?;
        let result = if failed.is_empty() { Ok(json!({"links": done})) } else { Err(failed.join("; ")) };
        Some(Action::Answer { ticket, result })
    }
}

impl Gateway {
    /// Takes the settings of all backends, except for those with a change on trial.
    pub(super) fn update_backends(&mut self, cached: &mut BTreeMap<String, Offer>) {
        self.backends.configure(&self.settings.backends, cached);
        self.merge_catalogue();
    }

    /// A backend that is off finishes its calls, and is not started again.
    fn stop_disabled_backends(&mut self, now: Instant) {
        let off: Vec<u32> = self.backends.order().iter().copied().filter(|number| self.is_off(*number)).collect();
        for number in off {
            let name = self.backends.name(number);
            let failure = Failure::switched_off(name, &format!("The backend `{name}`"));
            // The change cannot break anything, because nothing serves.
            if let Some(new) = self.abandon_trial(number, "it was turned off meanwhile", now) {
                self.catalogue.begin_change();
                self.change_at_once(number, &new, now);
                self.merge_catalogue();
            }
            for key in self.slots_where(|key| key.backend == number) {
                self.drop_slot(key, &failure, now);
            }
        }
    }

    pub(super) fn is_off(&self, number: u32) -> bool {
        self.guards.is_backend_off(self.backends.name(number))
    }

    /// Makes the first slot of every backend that has none and is not off. It is started at once unless the backend is
    /// lazy and its offer is cached.
    pub(super) fn make_first_slots(&mut self, now: Instant) {
        for number in self.backends.order().to_vec() {
            if self.is_off(number) {
                continue;
            }
            let key = self.first_slot(number);
            let is_needed = self
                .backends
                .get(&number)
                .is_some_and(|backend| backend.settings().start == Start::Eager || !backend.is_kept());
            self.make_slot(key, is_needed.then_some(now));
        }
        self.starts_due = true;
    }

    /// Only what differs is started, stopped or replaced. No session ends.
    pub(super) fn configured(&mut self, settings: Settings, now: Instant) {
        if self.stage.is_stopping() {
            return;
        }
        self.settings = settings;
        let mut wanted: BTreeMap<String, Backend> =
            self.settings.backends.iter().map(|backend| (backend.name.clone(), backend.clone())).collect();
        // Names that clients have seen keep their owners before any of them become free.
        self.catalogue.begin_change();
        for number in self.backends.order().to_vec() {
            match wanted.remove(self.backends.name(number)) {
                None => {
                    self.drop_slots(number, now);
                    self.backends.remove(number);
                    self.catalogue.release_names(number, |_, _| false);
                }
                Some(new) => self.reconfigure(number, new, now),
            }
        }
        self.guards.configure(&self.settings);

        // The view of a client, and what it shows, may change. Only clients that see a change are notified.
        let hashes = |gateway: &Gateway, client_state: &ClientState| {
            Family::ALL.map(|family| gateway.catalogue.view(client_state.view()).family_hash(family))
        };
        let saw: FxHashMap<Client, [u64; 3]> =
            self.clients.iter().map(|(client, client_state)| (*client, hashes(self, client_state))).collect();
        self.catalogue.clear_views();
        self.update_backends(&mut BTreeMap::new());
        let clients = self.clients.numbers();
        for client in &clients {
            let who = self.clients[client].who().clone();
            let view = self.view_of(&who);
            self.clients.get_mut(client).expect("listed above").set_view(view);
        }
        for client in clients {
            let sees = hashes(self, &self.clients[&client]);
            for family in Family::ALL {
                if sees[family as usize] != saw[&client][family as usize] {
                    self.announce_to(client, family);
                }
            }
        }
        self.stop_disabled_backends(now);
        self.make_first_slots(now);
        self.end_offer_waits(now);
        self.update_watches(now);
        self.update_log_levels(now);
        self.withdraw_refused_calls(now);
    }

    /// Applies the new settings of one backend.
    fn reconfigure(&mut self, number: u32, new: Backend, now: Instant) {
        let backend = self.backends.get_mut(&number).expect("it was configured");
        if backend.trial().is_some_and(|trial| trial.settings == new) {
            return;
        }
        backend.forget_failed_change();
        let is_same = *backend.settings() == new;
        self.abandon_trial(number, "its configuration changed again meanwhile", now);
        if is_same {
            return;
        }
        match self.needs_trial(number, &new) {
            true => self.begin_trial(number, new, now),
            false => self.change_at_once(number, &new, now),
        }
    }

    /// Applies a change that needs no trial.
    fn change_at_once(&mut self, number: u32, new: &Backend, now: Instant) {
        let old = self.backends[&number].settings().clone();
        self.release_names(number, &old, new);
        self.backend_changed(number, &old, new, now);
    }

    /// Names that a backend cannot offer under its new settings become free.
    pub(super) fn release_names(&mut self, number: u32, old: &Backend, new: &Backend) {
        let is_same = old.prefix == new.prefix;
        self.catalogue.release_names(number, |kind, raw| match (kind, raw.strip_prefix(new.prefix.as_str())) {
            (List::Tools, Some(own)) => is_same && guard::passes(&new.allow, &new.deny, own),
            (List::Tools | List::Prompts, _) => is_same,
            (List::Resources | List::Templates, _) => true,
        });
    }

    fn drop_slots(&mut self, number: u32, now: Instant) {
        self.abandon_trial(number, "it was removed from the configuration meanwhile", now);
        let failure = Failure::removed(self.backends.name(number));
        for key in self.slots_where(|key| key.backend == number) {
            self.drop_slot(key, &failure, now);
        }
    }

    fn backend_changed(&mut self, number: u32, old: &Backend, new: &Backend, now: Instant) {
        let backend = self.backends.get_mut(&number).expect("it was configured");
        if trials::needs_process(old, new) {
            // The process that runs finishes its calls; the next one has the new settings.
            backend.apply_anew(new);
            for key in self.slots_where(|key| key.backend == number) {
                self.empty_slot(key, now);
            }
            return;
        }
        backend.apply(new);
        if old.policy != new.policy {
            self.repolicy(number, now);
        }
        for key in self.slots_where(|key| key.backend == number) {
            if !self.fits(key) && key.sharing != Sharing::Handshake {
                self.empty_slot(key, now);
                continue;
            }
            let slot = self.slots.get_mut(&key).expect("listed above");
            // The change may have repaired it, so it is tried at once.
            if slot.links.due().is_some() {
                slot.links.forgive();
                slot.start_now(now);
            }
        }
    }

    /// Removes a slot that the new settings do not have. Its link is drained, and calls that wait there go to another slot.
    pub(super) fn empty_slot(&mut self, key: SlotKey, now: Instant) {
        let Some(slot) = self.slots.get_mut(&key) else { return };
        let links: Vec<u64> = slot.links.child().into_iter().chain(slot.links.take_candidate()).collect();
        slot.links.forgive();
        slot.detach(now);
        for serial in links {
            self.drain(serial, now);
        }
        let Some(mut slot) = self.take_slot(key) else { return };
        for ticket in slot.take_tickets() {
            let text = format!("{}: its configuration changed meanwhile", self.backends.name(key.backend));
            self.ticket_done(ticket, Err(text));
        }
        for held in slot.take_held() {
            let Some(mut call) = self.calls.remove(&held) else { continue };
            let (Some(reply_to), Some(message)) = (&call.reply_to, call.message.clone()) else { continue };
            match self.slot_for(key.backend, reply_to, call.declared, now) {
                Ok(slot) => {
                    call.slot = slot;
                    self.hold_call(held, call, &message, now);
                }
                Err(failure) => self.fail(*call, *failure, now),
            }
        }
    }

    /// Opens links beside those that serve; they take over when they are ready.
    pub(super) fn restart_asked(&mut self, ticket: Ticket, backend: Option<String>, reason: &str, now: Instant) {
        let Some(numbers) = self.select_backends(ticket, backend) else { return };
        for number in &numbers {
            let record = Record {
                id: Some(self.backends.name(*number).to_owned()),
                kind: Some("backend"),
                reason: Some(reason::one_line(reason)),
                ..Record::new(record::Event::ServerRestartRequested)
            };
            self.out.push(Action::Record(record));
        }
        self.for_each_slot(ticket, &numbers, |gateway, key| {
            let slot = gateway.slots.get_mut(&key).expect("listed by the caller");
            if slot.start_now(now) {
                gateway.starts_due = true;
            } else {
                gateway.replace(key, now);
            }
        });
    }

    /// Earlier crashes count no longer, and backends that wait or were given up are tried at once.
    pub(super) fn resume_asked(&mut self, ticket: Ticket, backend: Option<String>, now: Instant) {
        let Some(numbers) = self.select_backends(ticket, backend) else { return };
        for number in &numbers {
            if let Some(owner) = self.backends.get_mut(number) {
                owner.reset_breaker();
            }
        }
        self.for_each_slot(ticket, &numbers, |gateway, key| {
            let slot = gateway.slots.get_mut(&key).expect("listed by the caller");
            slot.links.forgive();
            gateway.starts_due |= slot.start_now(now);
        });
    }

    fn select_backends(&mut self, ticket: Ticket, backend: Option<String>) -> Option<Vec<u32>> {
        let found: Result<Vec<u32>, String> = match &backend {
            _ if self.stage.is_stopping() => Err("the gateway is stopping".into()),
            None => Ok(self.backends.order().to_vec()),
            Some(name) => match self.backends.find(name) {
                Some(number) => Ok(vec![number]),
                None => Err(format!("no backend is named `{name}`")),
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

    /// Does something to every slot of some backends, and answers when each of them serves or has failed.
    fn for_each_slot(&mut self, ticket: Ticket, numbers: &[u32], act: impl Fn(&mut Gateway, SlotKey)) {
        let keys = self.slots_where(|key| numbers.contains(&key.backend));
        self.operator_requests.begin(ticket, keys.len());
        for key in keys {
            act(self, key);
            let serves = self.slots[&key].links.candidate().is_none() && self.serving(key).is_some();
            if serves {
                let done = json!({"backend": self.backends.name(key.backend), "state": "ready"});
                self.ticket_done(ticket, Ok(done));
            } else {
                self.slots.get_mut(&key).expect("listed above").add_tickets(&[ticket]);
            }
        }
        self.operator_request_begun(ticket);
    }

    /// An operator's request of so many parts, which may be none.
    pub(super) fn begin_operator_request(&mut self, ticket: Ticket, parts: usize) {
        self.operator_requests.begin(ticket, parts);
        self.operator_request_begun(ticket);
    }

    /// All parts have begun.
    fn operator_request_begun(&mut self, ticket: Ticket) {
        let action = self.operator_requests.end_part(ticket, None);
        self.out.extend(action);
    }

    /// One part of an operator's request is done.
    pub(super) fn ticket_done(&mut self, ticket: Ticket, result: Result<Value, String>) {
        let action = self.operator_requests.end_part(ticket, Some(result));
        self.out.extend(action);
    }

    /// Turns a tool or a backend off or on. A backend that is off finishes its calls and is stopped; one that is on
    /// again is started.
    pub(super) fn switch_asked(&mut self, ticket: Ticket, what: &Switch, off: bool, now: Instant) {
        let (kind, name) = match what {
            Switch::Tool(name) => ("tool", name),
            Switch::Backend(name) => ("backend", name),
        };
        if !self.can_switch(what) {
            return self.out.push(Action::Answer { ticket, result: Err(format!("no {kind} is named `{name}`")) });
        }
        let changed = self.guards.switch(what, off);
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
            // A changed offer may have waited to be merged.
            self.merge_new_offer(now);
            self.stop_disabled_backends(now);
            self.make_first_slots(now);
            self.withdraw_refused_calls(now);
        }
        self.out.push(Action::Answer { ticket, result: Ok(json!({"changed": changed, "off": off})) });
    }

    /// Whether this can be turned off or on: a backend, a known tool, or a tool that a backend with an unknown offer
    /// may have.
    pub fn can_switch(&self, what: &Switch) -> bool {
        let name = match what {
            Switch::Backend(name) => return self.backends.find(name).is_some(),
            Switch::Tool(name) => name,
        };
        let may_be_of = |owner: &BackendState| {
            let is_unknown = owner.offer().tools.is_empty() && !owner.is_offer_confirmed();
            let prefix = &owner.settings().prefix;
            is_unknown && (prefix.is_empty() || name.starts_with(&names::plain(prefix, "")))
        };
        self.guards.is_tool_off(name)
            || self.backends.values().any(may_be_of)
            || self.names_to_switch().any(|known| known == *name)
    }

    /// All names of backends and tools, also of those that are off.
    pub fn names_to_switch(&self) -> impl Iterator<Item = String> {
        let backends = self.settings.backends.iter().map(|backend| backend.name.clone());
        backends.chain(self.catalogue.all_tools().map(|(shown, _)| shown.to_string()))
    }

    /// No link is opened any more, and calls in flight get a moment to be answered. A second stop does not wait.
    pub(super) fn stop_asked(&mut self, now: Instant) {
        if self.stage.is_stopping() {
            for serial in self.links_where(|_| true) {
                let link = self.links[&serial].id();
                self.stop_link(serial, How::Stopped, true, now);
                self.out.push(Action::Disconnect { link, at_once: true });
            }
            return;
        }
        self.stage = Stage::Stopping { until: now + STOP_MAX };
        self.timers.arm(Timer::Stop, now + STOP_MAX);
        self.backends.values_mut().for_each(|backend| drop(backend.take_trial()));
        let held: Vec<u64> = self.slots.values_mut().flat_map(SlotState::take_held).collect();
        for key in held {
            if let Some(call) = self.calls.remove(&key) {
                let failure = Failure::stopping(self.backends.name(call.slot.backend));
                self.fail(*call, failure, now);
            }
        }
        self.end_offer_waits(now);
        self.end_listens();
        for (ticket, _) in mem::take(&mut self.operator_requests.0) {
            self.out.push(Action::Answer { ticket, result: Err("the gateway is stopping".into()) });
        }
        for slot in self.slots.values_mut() {
            slot.take_tickets();
            slot.cancel_start();
        }
        for serial in self.links_where(|_| true) {
            let link_state = &self.links[&serial];
            if link_state.in_flight() == 0 || !matches!(link_state.phase(), Phase::Ready | Phase::Draining { .. }) {
                self.stop_link(serial, How::Stopped, false, now);
            }
        }
        self.end_if_stopped();
    }

    /// Calls that are not answered by now fail.
    pub(super) fn stop_remaining_links(&mut self, now: Instant) {
        for serial in self.links_where(|_| true) {
            self.stop_link(serial, How::Stopped, false, now);
        }
    }
}
