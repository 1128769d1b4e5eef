//! Calls: requests of clients to backends, from the moment that the guards let one pass until it is answered once.
//! Which backend gets a request is decided in [`super::dispatch`]; calls that end without an answer are in
//! [`super::failed_calls`].

use std::{
    borrow::Cow,
    ops::Index,
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use super::{
    Action, Backend, Called, Client, Era, Gateway, Kind, Outcome, Said,
    clients::{ClientState, Declared},
    guard::{Health, Pass},
    http_refusals::Resends,
    messages,
    messages::Failure,
    opening::OwnRequest,
    server_requests::{Inputs, Parked},
    slots::{SlotKey, SlotState},
    tasks,
    timers::Timer,
};
use crate::{
    json::Raw,
    mcp::meta,
    message,
    message::{Edits, Id, Params, RawId, patch, pick},
};

/// Bytes of held requests of one client, all its sessions together; one more request fails at once.
pub(super) const HELD_BYTES_MAX: usize = 64 << 20;
/// So many bytes of calls that waited are sent at once; a larger call is sent alone.
const RELEASED_BYTES_MAX: usize = 8 << 20;
/// A larger request is not kept for a second try while it is in flight; it fails at a crash.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// The client and the request that an answer goes to.
#[derive(Debug, Clone)]
pub(super) struct ReplyTo {
    pub client: Client,
    pub id: Id,
    /// The id as the client wrote it.
    pub raw: Box<str>,
    pub era: Era,
    pub batch: Option<u64>,
}

/// What a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum CallKind {
    Tool,
    Prompt,
    Read,
    Complete,
    /// About a task, or with a method that MCP does not have.
    Other,
    /// A request of the gateway itself.
    Own(OwnRequest),
}

/// Requests in flight or held, by the id that a backend knows them by: those of clients and those of the gateway.
#[derive(Debug, Default)]
pub(super) struct Calls {
    by_key: FxHashMap<u64, Box<Call>>,
    /// Requests that busy HTTP backends asked to get later.
    resends: Resends,
}

impl Index<&u64> for Calls {
    type Output = Call;

    fn index(&self, key: &u64) -> &Call {
        &self.by_key[key]
    }
}

impl Calls {
    pub(super) fn get(&self, key: &u64) -> Option<&Call> {
        self.by_key.get(key).map(|call| &**call)
    }

    pub(super) fn get_mut(&mut self, key: &u64) -> Option<&mut Call> {
        self.by_key.get_mut(key).map(|call| &mut **call)
    }

    pub(super) fn insert(&mut self, key: u64, call: Box<Call>) {
        self.by_key.insert(key, call);
    }

    pub(super) fn remove(&mut self, key: &u64) -> Option<Box<Call>> {
        self.by_key.remove(key)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &Call)> {
        self.by_key.iter().map(|(key, call)| (*key, &**call))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut Call)> {
        self.by_key.iter_mut().map(|(key, call)| (*key, &mut **call))
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Call> {
        self.by_key.values().map(|call| &**call)
    }

    /// In the order in which they came.
    pub(super) fn keys_where(&self, is_it: impl Fn(&Call) -> bool) -> Vec<u64> {
        let mut keys: Vec<u64> = self.iter().filter(|(_, call)| is_it(call)).map(|(key, _)| key).collect();
        keys.sort_unstable();
        keys
    }

    /// What is in flight on a link.
    pub(super) fn on_link(&self, serial: u64) -> impl Iterator<Item = (u64, &Call)> {
        self.iter().filter(move |(_, call)| call.link == Some(serial))
    }

    /// How many are of clients.
    pub(super) fn of_clients(&self) -> usize {
        self.values().filter(|call| call.reply_to.is_some()).count()
    }

    /// How many are of the gateway itself.
    pub(super) fn own(&self) -> usize {
        self.by_key.len() - self.of_clients()
    }

    pub(super) fn deadlines(&self) -> impl Iterator<Item = Instant> {
        self.values().filter_map(Call::due)
    }

    pub(super) fn resends(&self) -> &Resends {
        &self.resends
    }

    pub(super) fn resends_mut(&mut self) -> &mut Resends {
        &mut self.resends
    }
}

#[derive(Debug)]
pub(super) struct Call {
    /// Nothing if it is a request of the gateway.
    pub reply_to: Option<ReplyTo>,
    pub kind: CallKind,
    pub method: Cow<'static, str>,
    pub slot: SlotKey,
    /// Where it was sent; nothing while it is held.
    pub link: Option<u64>,
    /// The name of a tool or prompt as clients see it.
    pub shown: Option<Rc<str>>,
    /// The same as its backend calls it, as JSON; also the backend's own id of a task.
    pub own: Option<Rc<str>>,
    /// Its bytes, if it is held or may be sent again.
    pub message: Option<Bytes>,
    /// The progress token as the client wrote it.
    pub token: Option<Box<str>>,
    pub began: Instant,
    pub due: Option<Instant>,
    /// No progress and no question moves `due` beyond this.
    pub due_max: Instant,
    /// How often its backend has asked for input.
    pub rounds: u32,
    /// It may be sent again although its backend may have run it.
    pub repeatable: bool,
    pub resent: bool,
    /// How often it was sent again because it had not reached its backend, or because the backend asked for that.
    pub unsent_tries: u32,
    /// `message` is not the client's, but what was written to a link of that era and never left.
    pub unsent_era: Option<Era>,
    pub pass: Option<Pass>,
    /// It makes a task.
    pub task: bool,
    /// What a client of the stateless era declared with it.
    pub declared: Declared,
    /// A backend of the handshake era asked for input; the client's next request brings the answers.
    pub parked: Option<Box<Parked>>,
    /// A stateless backend asked for input; the client's answers are collected for the next request to it.
    pub inputs: Option<Box<Inputs>>,
    /// Guards refused it after it was sent to a host, or its client's replica withdrew it here: it is not sent again.
    pub withdrawn: Option<Box<Failure>>,
}

impl Call {
    pub(super) fn new(
        kind: CallKind,
        method: Cow<'static, str>,
        slot: SlotKey,
        declared: Declared,
        now: Instant,
    ) -> Call {
        Call {
            reply_to: None,
            kind,
            method,
            slot,
            link: None,
            shown: None,
            own: None,
            message: None,
            token: None,
            began: now,
            due: None,
            due_max: now,
            rounds: 0,
            repeatable: false,
            resent: false,
            unsent_tries: 0,
            unsent_era: None,
            pass: None,
            task: false,
            declared,
            parked: None,
            inputs: None,
            withdrawn: None,
        }
    }

    /// It is sent. Returns when it is late. All its rounds of input share one `call_max`.
    pub(super) fn sent(&mut self, settings: &Backend, now: Instant) -> Instant {
        if self.rounds == 0 {
            self.due_max = now + settings.call_max;
        }
        self.withdrawn = None;
        let due = (now + settings.call_timeout).min(self.due_max);
        self.due = Some(due);
        due
    }

    pub(super) fn due(&self) -> Option<Instant> {
        let input_due = self.parked.as_ref().and_then(|parked| parked.input_due);
        self.due.into_iter().chain(input_due).min()
    }

    /// Its client got `input_required` and will send another request; until then it gets no answer.
    pub(super) fn is_parked(&self) -> bool {
        self.parked.as_ref().is_some_and(|parked| parked.is_waiting())
    }

    pub(super) fn is_of(&self, client: Client) -> bool {
        self.reply_to.as_ref().is_some_and(|reply_to| reply_to.client == client)
    }
}

impl Gateway {
    /// Sends a call to the link of its slot, or holds it.
    pub(super) fn dispatch(
        &mut self,
        call: Box<Call>,
        message: &[u8],
        id: RawId<'_>,
        params: &Params<'_>,
        now: Instant,
    ) {
        let key = self.ids.number();
        let must_wait = self.must_wait(call.slot, call.declared, now) || self.is_releasing(call.slot);
        match self.serving(call.slot).filter(|_| !must_wait) {
            Some(serial) => {
                let wants_logs = call.declared.level.is_some();
                self.calls.insert(key, call);
                if wants_logs {
                    self.calls.get_mut(&key).expect("just put there").link = Some(serial);
                    self.update_log_level(serial, now);
                }
                self.forward(key, serial, message, id, params, now);
            }
            None => self.hold_call(key, call, message, now),
        }
    }

    /// The link that accepts calls for a slot.
    pub(super) fn serving(&self, slot: SlotKey) -> Option<u64> {
        let serial = self.slots.get(&slot)?.links.child()?;
        self.links.get(&serial)?.is_ready().then_some(serial)
    }

    /// Holds a call until its slot is filled, within limits of time, number and bytes.
    pub(super) fn hold_call(&mut self, key: u64, mut call: Box<Call>, message: &[u8], now: Instant) {
        if self.stage.is_stopping() {
            let failure = Failure::stopping(self.backends.name(call.slot.backend));
            return self.fail(*call, failure, now);
        }
        let (hold, held_max) = (self.settings.limits.hold, self.settings.limits.held_max);
        let Some(slot) = self.slots.get_mut(&call.slot) else {
            let failure = Failure::removed(self.backends.name(call.slot.backend));
            return self.fail(*call, failure, now);
        };
        let is_full = slot.held() >= held_max;
        if slot.links.is_given_up() || slot.is_unauthorized(now) {
            let failure = self.slot_failure(call.slot, now);
            return self.fail(*call, failure, now);
        }
        if is_full {
            let failure = Failure::hold_full(self.backends.name(call.slot.backend), held_max);
            return self.fail(*call, failure, now);
        }
        let bytes = call.message.as_ref().map_or(message.len(), Bytes::len);
        if call.reply_to.as_ref().is_some_and(|reply_to| self.holds_too_much(reply_to.client, bytes)) {
            let failure = Failure::held_bytes(self.backends.name(call.slot.backend), HELD_BYTES_MAX);
            return self.fail(*call, failure, now);
        }
        let Some(slot) = self.slots.get_mut(&call.slot) else { return };
        let due = *call.due.get_or_insert(now + hold);
        if call.message.is_none() {
            call.message = Some(Bytes::copy_from_slice(message));
        }
        call.link = None;
        self.starts_due |= slot.hold(key, now);
        self.calls.insert(key, call);
        self.timers.arm(Timer::Calls, due);
    }

    /// Whether a client would hold too many bytes with these. All sessions with the same name count together.
    pub(super) fn holds_too_much(&self, client: Client, more: usize) -> bool {
        let Some(name) = self.clients.get(&client).map(|client_state| &client_state.who().name) else { return false };
        let is_its = |reply_to: &ReplyTo| {
            self.clients.get(&reply_to.client).is_some_and(|client_state| client_state.who().name == *name)
        };
        let held = self.calls.values().filter(|call| call.link.is_none());
        let held = held.filter_map(|call| Some((call.reply_to.as_ref()?, call.message.as_ref()?)));
        let kept = held.chain(self.offer_waits.messages()).filter(|(reply_to, _)| is_its(reply_to));
        kept.map(|(_, message)| message.len()).sum::<usize>().saturating_add(more) > HELD_BYTES_MAX
    }

    /// Earlier calls of this slot are being sent, in portions.
    fn is_releasing(&self, slot: SlotKey) -> bool {
        self.slots.get(&slot).is_some_and(|slot| slot.release_at().is_some())
    }

    /// Sends the next portions of the calls that slots hold.
    pub(super) fn release_due(&mut self, now: Instant) {
        let is_due = |slot: &SlotState| slot.release_at().is_some_and(|at| at <= now);
        let due: Vec<SlotKey> = self.slots.iter().filter(|(_, slot)| is_due(slot)).map(|(key, _)| *key).collect();
        due.into_iter().for_each(|slot| self.release_held(slot, now));
    }

    /// Sends the calls that a slot holds on the link that fills it, in order. Many bytes are sent in portions.
    pub(super) fn release_held(&mut self, slot: SlotKey, now: Instant) {
        let Some(slot_state) = self.slots.get_mut(&slot) else { return };
        slot_state.set_release_at(None);
        let Some(serial) = self.serving(slot) else { return };
        let mut held = self.slots.get_mut(&slot).map(SlotState::take_held).unwrap_or_default();
        let mut bytes = 0;
        while let Some(key) = held.pop_front() {
            let Some(call) = self.calls.get(&key) else { continue };
            let length = call.message.as_ref().map_or(0, Bytes::len);
            if bytes > 0 && bytes + length > RELEASED_BYTES_MAX {
                held.push_front(key);
                self.slots.get_mut(&slot).expect("seen above").set_release_at(Some(now));
                self.timers.arm(Timer::Releases, now);
                break;
            }
            bytes += length;
            if self.must_wait(slot, call.declared, now) {
                held.push_front(key);
                break;
            }
            if let Some(failure) = self.refused_since(call, now) {
                let call = self.calls.remove(&key).expect("found above");
                self.fail(*call, failure, now);
                continue;
            }
            let Some(call) = self.calls.get_mut(&key) else { continue };
            let Some(message) = call.message.clone() else { continue };
            if !call.repeatable {
                call.message = None;
            }
            if let Some(era) = call.unsent_era.take() {
                self.resend_unsent(key, serial, era, message, now);
                continue;
            }
            match message::parse_again(&message) {
                Ok(message::Message::Request { id, params, .. }) => {
                    self.forward(key, serial, &message, id, &params, now);
                }
                _ => unreachable!("only requests are held"),
            }
        }
        if let Some(slot) = self.slots.get_mut(&slot) {
            slot.set_held(held);
        }
    }

    /// The only way of a client's request to a backend: its id and progress token are replaced by the gateway's, its
    /// name by the backend's.
    pub(super) fn forward(
        &mut self,
        key: u64,
        serial: u64,
        message: &[u8],
        id: RawId<'_>,
        params: &Params<'_>,
        now: Instant,
    ) {
        let with_own = match self.calls.get(&key).and_then(|call| call.reply_to.as_ref()) {
            Some(reply_to) => self.with_own_id(reply_to.client, reply_to.era, serial, message, params.meta()),
            None => Ok(None),
        };
        let restored = match &with_own {
            Ok(None) => None,
            Ok(Some(restored)) => Some((&restored[..], message::parse_again(restored))),
            Err(handle) => {
                let Some(call) = self.calls.remove(&key) else { return };
                return self.fail(*call, Failure::unknown(tasks::no_task(handle)), now);
            }
        };
        let (message, id, params) = match &restored {
            Some((restored, Ok(message::Message::Request { id, params, .. }))) => (*restored, *id, params),
            _ => (message, id, params),
        };
        let (Some(link_state), Some(call)) = (self.links.get_mut(&serial), self.calls.get_mut(&key)) else { return };
        let settings = &self.backends[&call.slot.backend].settings();
        link_state.begin_call(now);
        call.link = Some(serial);
        let due = call.sent(settings, now);
        let is_translated = link_state.era() == Era::Stateless
            && call.reply_to.as_ref().is_some_and(|reply_to| reply_to.era == Era::Handshake)
            && matches!(call.kind, CallKind::Tool | CallKind::Prompt | CallKind::Read);
        // An HTTP request may turn out never to have been sent.
        let may_stay = matches!(settings.kind, Kind::Http { .. });
        if (call.repeatable || is_translated || may_stay) && call.message.is_none() && message.len() <= KEPT_BYTES_MAX {
            // A copy: a slice would keep the whole read buffer alive.
            call.message = Some(Bytes::copy_from_slice(message));
        }

        let number = key.to_string();
        let mut edits = Edits::default();
        if let Some(at) = id.place(message) {
            edits.push(at, &number);
        }
        let named = match call.kind {
            CallKind::Complete => {
                params.reference().and_then(|reference| pick(reference, ["name"])).and_then(|[name]| name)
            }
            CallKind::Other => params.task_id(),
            _ => params.name(),
        };
        if let (Some(own), Some(name)) = (&call.own, named) {
            edits.push(message::place(message, name), own);
        }
        let token = params.meta().and_then(|meta| pick(meta, [meta::PROGRESS_TOKEN])).and_then(|[token]| token);
        call.token = token.map(|token| token.get().into());
        // A server of the handshake era may refuse members of the stateless era.
        let is_from_stateless = call.reply_to.as_ref().is_some_and(|reply_to| reply_to.era == Era::Stateless);
        let plain = match params.meta() {
            Some(meta) if is_from_stateless && link_state.era() == Era::Handshake => {
                messages::meta_of_handshake(meta, &number).map(|plain| (message::place(message, meta), plain))
            }
            _ => None,
        };
        match (&plain, token) {
            (Some((at, plain)), _) => edits.push(at.clone(), plain),
            (None, Some(token)) => edits.push(message::place(message, token), &number),
            (None, None) => {}
        }
        let meta = match (call.reply_to.as_ref().map(|reply_to| (reply_to.era, reply_to.client)), link_state.era()) {
            (Some((Era::Handshake, client)), Era::Stateless) => messages::meta_members(self.clients.get(&client)),
            _ => String::new(),
        };
        let added;
        if !meta.is_empty() {
            added = messages::add_meta(message, params, &meta);
            edits.push(added.0.clone(), &added.1);
        }
        let told = edits.apply(message);
        let link = link_state.id();
        self.out.push(Action::TellLink { link, message: told });
        self.watch_credentials(key);
        self.timers.arm(Timer::Calls, due);
    }

    /// The answer of a backend to a request that was sent on this link.
    pub(super) fn answered(
        &mut self,
        serial: u64,
        message: &[u8],
        id: RawId<'_>,
        result: Option<Raw<'_>>,
        error: Option<Raw<'_>>,
        now: Instant,
    ) {
        let key = match id.parse() {
            Some(Id::Integer(number)) => u64::try_from(number).ok(),
            _ => None,
        };
        // The answer to a call that was cancelled or late, or to no call, goes to no client.
        let is_its_own = |key: &u64| self.calls.get(key).is_some_and(|call| call.link == Some(serial));
        let Some(key) = key.filter(is_its_own) else {
            if let (Some(link_state), Some(key)) = (self.links.get_mut(&serial), key) {
                link_state.abandoned.forget(key);
            }
            return;
        };
        // `"error": null` beside a result is no error.
        let is_regular = error.is_none() || result.is_none() && error.is_some_and(messages::is_error_object);
        let (result, error) = match (result, error) {
            (Some(result), Some(error)) if error.get() == "null" => (Some(result), None),
            (None, Some(error)) if !is_regular => {
                let what = messages::cut(error.get(), 100);
                return self.fail_request(serial, key, true, &format!("its error is not one of JSON-RPC: {what}"), now);
            }
            parts => parts,
        };
        let call = &self.calls[&key];
        if let CallKind::Own(own_request) = call.kind {
            self.calls.remove(&key);
            return self.own_request_answered(serial, own_request, key, result, error, now);
        }
        self.note_answered(serial);
        if let Some(failure) = self.withdrawn_failure(key, error) {
            let call = self.calls.remove(&key).expect("found above");
            self.drop_requests_of_call(key, &call, "the call that this was for was refused");
            self.call_finished(serial, now);
            return self.fail(*call, failure, now);
        }
        let with_handles = match result.map(|result| self.with_handles(serial, key, message, result)).transpose() {
            Ok(told) => told.flatten(),
            Err(failure) => {
                let call = self.calls.remove(&key).expect("found above");
                self.drop_requests_of_call(key, &call, "the call that this was for is over");
                self.call_finished(serial, now);
                let Some(reply_to) = &call.reply_to else { return };
                self.refuse(reply_to, false, &failure);
                return self.report_call(&call, failure.outcome, now);
            }
        };
        let (message, id, result) = match with_handles.as_deref().map(|told| (told, message::parse_again(told))) {
            Some((told, Ok(message::Message::Response { id, result, .. }))) => (told, id, result),
            _ => (message, id, result),
        };
        let call = &self.calls[&key];
        if let Some(reply_to) = &call.reply_to
            && reply_to.era == Era::Handshake
            && self.links[&serial].era() == Era::Stateless
            && let Some(result) = result
            && self.input_required(key, result, now)
        {
            return;
        }
        if self.calls[&key].parked.is_some() && self.keep_answer(key, message, now) {
            return;
        }
        let call = self.calls.remove(&key).expect("found above");
        self.drop_requests_of_call(key, &call, "the call that this was for is over");
        self.call_finished(serial, now);
        let Some(reply_to) = &call.reply_to else { return };

        let failed = error.is_some() || call.kind == CallKind::Tool && result.is_some_and(is_error);
        // A server of the handshake era cannot know what this request declared, so this failure gets the error of the
        // stateless era.
        if failed
            && reply_to.era == Era::Stateless
            && let Some(capability) = result.or(error).and_then(messages::undeclared_in)
        {
            let name = self.backends.name(call.slot.backend);
            let words = format!("The backend `{name}` needs the client capability `{capability}` for this.");
            let data = format!(r#"{{"requiredCapabilities":{{"{capability}":{{}}}}}}"#);
            self.answer_error(reply_to, -32021, &words, Some(&data));
            return self.report_call(&call, Outcome::Failed, now);
        }
        if !is_regular {
            // A result and an error: the client gets the error.
            match (error, result) {
                (Some(error), _) => {
                    let line = format!(r#"{{"jsonrpc":"2.0","id":{},"error":{}}}"#, reply_to.raw, error.get());
                    self.answer(reply_to, message::line(line), Said::Error);
                }
                (None, result) => self.answer_result(reply_to, result.map_or("{}", Raw::get)),
            }
            let outcome = if failed { Outcome::Failed } else { Outcome::Answered };
            return self.report_call(&call, outcome, now);
        }
        let mut edits = Edits::default();
        if let Some(at) = id.place(message) {
            edits.push(at, &reply_to.raw);
        }
        let added;
        if reply_to.era == Era::Stateless
            && self.links.get(&serial).is_none_or(|link_state| link_state.era() == Era::Handshake)
        {
            added = result.and_then(|result| messages::complete(message, result, call.kind));
            if let Some((at, with)) = &added {
                edits.push(at.clone(), with);
            }
            if let Some((at, with)) = error.and_then(|error| messages::error_for_stateless(message, error)) {
                edits.push(at, with);
            }
        }
        let told = edits.apply(message);
        self.answer(reply_to, told, if error.is_some() { Said::Error } else { Said::Result });
        let outcome = if failed { Outcome::Failed } else { Outcome::Answered };
        self.report_call(&call, outcome, now);
    }

    /// A link answered a call or reported progress.
    fn note_answered(&mut self, serial: u64) {
        if let Some(link_state) = self.links.get_mut(&serial) {
            link_state.liveness.answered(self.ids.next());
        }
    }

    /// A call on a link ended.
    pub(super) fn call_finished(&mut self, serial: u64, now: Instant) {
        if self.links.get_mut(&serial).is_some_and(|link_state| link_state.end_call(now)) {
            self.link_became_idle(serial, now);
        }
    }

    /// The one answer to a request.
    pub(super) fn answer(&mut self, reply_to: &ReplyTo, message: Bytes, said: Said) {
        if !self.clients.end_request(reply_to.client) {
            return;
        }
        match reply_to.batch {
            None => self.out.push(Action::TellClient {
                client: reply_to.client,
                message,
                about: Some(reply_to.id.clone()),
                said,
            }),
            Some(batch) => self.batch_answered(batch, Some(message)),
        }
    }

    pub(super) fn answer_result(&mut self, reply_to: &ReplyTo, result: &str) {
        let line = message::result_line(&reply_to.raw, result);
        self.answer(reply_to, line, Said::Result);
    }

    pub(super) fn answer_error(&mut self, reply_to: &ReplyTo, code: i32, words: &str, data: Option<&str>) {
        let line = message::error_line(&reply_to.raw, code, words, data);
        self.answer(reply_to, line, Said::Error);
    }

    /// Fails a call that was removed from the table.
    pub(super) fn fail(&mut self, call: Call, failure: Failure, now: Instant) {
        let Some(reply_to) = &call.reply_to else { return };
        let failure = if call.resent || call.rounds > 0 { failure.of_begun_call() } else { failure };
        if !call.is_parked() {
            self.refuse(reply_to, call.kind == CallKind::Tool && !call.task, &failure);
        }
        self.report_call(&call, failure.outcome, now);
    }

    /// The failure of a tool call is a result, which the model sees. A refusal by a guard is an error.
    pub(super) fn refuse(&mut self, reply_to: &ReplyTo, is_tool: bool, failure: &Failure) {
        if is_tool && failure.is_told_to_model {
            let result = failure.as_tool_result(reply_to.era);
            self.answer_result(reply_to, &result);
        } else {
            let data = failure.data().to_string();
            self.answer_error(reply_to, failure.code, &failure.message, Some(&data));
        }
    }

    /// Reports the end of a call to audit log and metrics, and its effect on the health of the backend.
    pub(super) fn report_call(&mut self, call: &Call, outcome: Outcome, now: Instant) {
        // A backend that exited counts as restarting and not as failing: calls wait for it.
        let is_there = |serial: u64| self.links.get(&serial).is_some_and(|link_state| !link_state.is_recorded());
        let is_gone = call.link.is_some_and(|serial| !is_there(serial));
        let is_same_failure = outcome == Outcome::Lost
            && self.backends.get_mut(&call.slot.backend).is_some_and(|backend| backend.note_lost(call.began, now));
        let health = match outcome {
            Outcome::Lost if is_same_failure => Health::Unknown,
            Outcome::Answered | Outcome::Failed => Health::Well,
            Outcome::Lost if is_gone => Health::Unknown,
            Outcome::Lost | Outcome::TimedOut => Health::Ill,
            _ => Health::Unknown,
        };
        let mut backend = None;
        let mut opened = false;
        if let Some(state) = self.backends.get_mut(&call.slot.backend) {
            backend = Some(state.name().clone());
            opened = state.note_health(call.pass, health, now);
            if call.reply_to.is_some() && health == Health::Well {
                state.note_answered(call.began, now);
                self.pace.note(call.began, now);
            }
        }
        if opened {
            let name = backend.as_deref().unwrap_or_default();
            self.note(format!("{name}: too many failures in a row; its circuit breaker is open"));
        }
        let Some(reply_to) = &call.reply_to else { return };
        let client_state = self.clients.get(&reply_to.client).map(ClientState::who);
        // A parked call outlives the client that made it.
        let Some(who) = client_state.or_else(|| call.parked.as_ref().map(|parked| &parked.who)) else { return };
        self.out.push(Action::Called(Called {
            client: reply_to.client,
            who: Rc::clone(who),
            method: call.method.clone(),
            tool: call.shown.clone(),
            backend,
            outcome,
            took: now.saturating_duration_since(call.began),
            is_known: true,
        }));
    }

    /// The same for a request that did not become a call.
    pub(super) fn report_refused(
        &mut self,
        client: Client,
        method: &str,
        tool: Option<String>,
        backend: Option<String>,
        outcome: Outcome,
    ) {
        let Some(client_state) = self.clients.get(&client) else { return };
        let (who, method) = (Rc::clone(client_state.who()), messages::cut(method, 100).into());
        let is_known = tool.as_ref().is_some_and(|tool| self.catalogue.has_name(tool));
        let (tool, backend, took) = (tool.map(Rc::from), backend.map(Rc::from), Duration::ZERO);
        self.out.push(Action::Called(Called { client, who, method, tool, backend, outcome, took, is_known }));
    }

    /// Progress extends the deadline of a call that is not parked, and is forwarded with the client's own token.
    pub(super) fn progressed(&mut self, serial: u64, message: &[u8], params: &Params<'_>, now: Instant) {
        let Some(token) = params.progress_token() else { return };
        let Some(key) = token.get().parse::<u64>().ok() else { return };
        let Some(call) = self.calls.get_mut(&key).filter(|call| call.link == Some(serial)) else { return };
        // A parked call waits for its client, however busy its backend is.
        if let Some(owner) = self.backends.get(&call.slot.backend).filter(|_| !call.is_parked()) {
            call.due = Some((now + owner.settings().call_timeout).min(call.due_max));
        }
        if let (Some(reply_to), Some(theirs), false) = (&call.reply_to, &call.token, call.is_parked()) {
            let told = patch(message, &mut [(message::place(message, token), &**theirs)]);
            self.out.push(Action::TellClient {
                client: reply_to.client,
                message: told,
                about: Some(reply_to.id.clone()),
                said: Said::Other,
            });
        }
        self.note_answered(serial);
    }
}

/// Whether a tool's result has `isError: true`. The result is parsed only if it contains that text somewhere.
fn is_error(result: Raw<'_>) -> bool {
    const NAME: &[u8] = b"\"isError\"";
    static FINDER: std::sync::LazyLock<memchr::memmem::Finder<'static>> =
        std::sync::LazyLock::new(|| memchr::memmem::Finder::new(NAME));
    let text = result.get().as_bytes();
    let is_yes = |at: usize| {
        let rest = text[at + NAME.len()..].trim_ascii_start().strip_prefix(b":");
        rest.is_some_and(|rest| rest.trim_ascii_start().starts_with(b"true"))
    };
    FINDER.find_iter(text).any(is_yes)
        && pick(result, ["isError"]).is_some_and(|[flag]| flag.is_some_and(|flag| flag.get() == "true"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_failed_if_its_own_result_says_so() {
        let table = [
            (r#"{"content":[]}"#, false),
            (r#"{"content":[],"isError":false}"#, false),
            (r#"{"content":[],"isError":true}"#, true),
            ("{\"isError\" \t: \n true ,\"content\":[]}", true),
            (r#"{"isError":"true"}"#, false),
            (r#"{"structuredContent":{"isError":true}}"#, false),
            (r#"{"structuredContent":{"isError":true},"isError":false}"#, false),
            (r#"{"structuredContent":{"isError":false},"isError":true}"#, true),
            (r#"{"content":[{"text":"\"isError\":true"}]}"#, false),
            ("[]", false),
        ];
        for (result, failed) in table {
            assert_eq!(is_error(Raw::parse(result).unwrap()), failed, "{result}");
        }
    }
}
