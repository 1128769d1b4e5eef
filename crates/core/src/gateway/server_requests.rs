//! Requests of backends to clients: sampling, elicitation, roots.
//! They reach only a client that they can belong to; everything else is refused.
//! On HTTP the stream of a call names the call that a request belongs to. A link that only one client uses belongs to
//! that client. On a shared link a request can only be for the client whose calls are in flight; with calls of several
//! clients it is refused.
//! A client of the stateless era cannot be sent requests: the question is the result of its call (`input_required`),
//! and its next request brings the answers, while the call stays open at the backend. A question of a stateless backend
//! becomes requests to a client of the handshake era, and then another request to the backend.

use std::{
    collections::BTreeSet,
    mem,
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use rustc_hash::FxHashMap;

use super::{
    Action, Client, Era, Gateway, Outcome, Said, Who,
    calls::{Call, CallKind},
    clients,
    dispatch::ClientRequest,
    messages,
    messages::Failure,
    methods,
    saved::SavedAbandoned,
    slots::Sharing,
    timers::Timer,
};
use crate::{
    json::Raw,
    mcp::{meta, method},
    message,
    message::{Id, Message, Params, RawId, patch, pick},
    saved::Moment,
};

/// How many requests of backends may wait for one client's answer; one more is refused.
const SERVER_REQUESTS_MAX: usize = 64;

/// How long a call stays open at its backend for the next request of a client of the stateless era; then it is
/// cancelled.
const PARK_MAX: Duration = Duration::from_secs(300);
/// How long further questions of a backend are waited for, so that one answer carries them all.
const ASK_TOGETHER: Duration = Duration::from_millis(20);
/// How long a cancelled or late call is remembered: a backend that still works on it may ask for input.
const ABANDONED_KEPT_FOR: Duration = Duration::from_secs(30);
/// How often one call may ask for input; then it fails.
const ROUNDS_MAX: u32 = 16;
/// How many cancelled or late calls of one link are remembered; then the oldest is forgotten.
const ABANDONED_MAX: usize = 64;
/// The beginning of every `requestState` of the gateway.
const STATE_MARK: &str = "outlast.";

/// Requests of backends that wait for a client's answer, by the id that the client knows them by.
#[derive(Debug, Default)]
pub(super) struct ServerRequests {
    by_key: FxHashMap<u64, ServerRequest>,
}

#[derive(Debug)]
struct ServerRequest {
    client: Client,
    serial: u64,
    cause: Cause,
    token: Option<Box<str>>,
    back: Back,
}

impl ServerRequests {
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    /// In the order in which they came.
    fn keys_where(&self, is_it: impl Fn(&ServerRequest) -> bool) -> Vec<u64> {
        let found = self.by_key.iter().filter(|(_, server_request)| is_it(server_request));
        let mut keys: Vec<u64> = found.map(|(key, _)| *key).collect();
        keys.sort_unstable();
        keys
    }
}

/// What a question belongs to, which decides when it is withdrawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// This call: the question ends with it.
    Call(u64),
    /// One of this client's calls on this link; which one is unknown. The question ends when none of them is open.
    SomeCall,
    /// No call: a task, or the backend's own work on a link that belongs to the client.
    NoCall,
}

/// The client that a backend's question is for.
struct Addressee {
    client: Client,
    cause: Cause,
    /// The call whose stream carries the question: the cause, or else the newest call that may be the cause.
    stream: Option<u64>,
}

#[derive(Debug)]
enum Back {
    /// To a backend of the handshake era, under the id it wrote.
    Link { id: Id, raw: Box<str> },
    /// Into the next request to a stateless backend, under this name, as JSON.
    Input { name: Box<str>, is_elicitation: bool },
}

/// Calls on one link that were cancelled or late. The backend may still work on them and ask for input.
#[derive(Debug, Default)]
pub(super) struct AbandonedCalls(Vec<AbandonedCall>);

#[derive(Debug)]
struct AbandonedCall {
    key: u64,
    client: Client,
    kind: CallKind,
    /// The name of a tool or prompt as clients see it.
    shown: Option<Rc<str>>,
    until: Instant,
}

impl AbandonedCalls {
    fn alive(&self, now: Instant) -> impl Iterator<Item = &AbandonedCall> {
        self.0.iter().filter(move |abandoned| abandoned.until > now)
    }

    pub(super) fn has_any(&self, now: Instant) -> bool {
        self.alive(now).next().is_some()
    }

    pub(super) fn has_of_others(&self, client: Client, now: Instant) -> bool {
        self.alive(now).any(|abandoned| abandoned.client != client)
    }

    /// What the backend may still work on.
    pub(super) fn work(&self, now: Instant) -> impl Iterator<Item = (CallKind, Option<&str>)> {
        self.alive(now).map(|abandoned| (abandoned.kind, abandoned.shown.as_deref()))
    }

    fn add(&mut self, key: u64, call: &Call, client: Client, now: Instant) {
        self.0.retain(|abandoned| abandoned.until > now);
        if self.0.len() >= ABANDONED_MAX {
            self.0.remove(0);
        }
        let (kind, shown) = (call.kind, call.shown.clone());
        self.0.push(AbandonedCall { key, client, kind, shown, until: now + ABANDONED_KEPT_FOR });
    }

    pub(super) fn save(&self, now: Instant) -> Vec<SavedAbandoned> {
        let save = |call: &AbandonedCall| SavedAbandoned {
            key: call.key,
            client: call.client,
            kind: call.kind,
            shown: call.shown.as_deref().map(str::to_owned),
            until: Moment::of(call.until, now),
        };
        self.alive(now).map(save).collect()
    }

    pub(super) fn restore(saved: Vec<SavedAbandoned>, now: Instant) -> AbandonedCalls {
        let restore = |saved: SavedAbandoned| AbandonedCall {
            key: saved.key,
            client: saved.client,
            kind: saved.kind,
            shown: saved.shown.map(Into::into),
            until: saved.until.at(now),
        };
        AbandonedCalls(saved.into_iter().map(restore).collect())
    }

    /// It was answered after all.
    pub(super) fn forget(&mut self, key: u64) {
        self.0.retain(|abandoned| abandoned.key != key);
    }
}

/// A call whose backend waits for the next request of its client.
#[derive(Debug)]
pub(super) struct Parked {
    /// The `requestState` that the client has; nothing while the client waits for an answer.
    state: Option<String>,
    pub who: Rc<Who>,
    /// The questions that the client has: the gateway's names, and the backend's ids.
    given: Vec<(String, Box<str>)>,
    /// Questions that came later.
    queued: Vec<(Box<str>, String)>,
    /// When those are sent to the client.
    pub input_due: Option<Instant>,
    /// The answer that came before the client's next request.
    answer: Option<Bytes>,
}

impl Parked {
    pub(super) fn is_waiting(&self) -> bool {
        self.state.is_some()
    }
}

/// The answers to the questions of a stateless backend, until all are there.
#[derive(Debug)]
pub(super) struct Inputs {
    left: usize,
    /// As members of an object.
    responses: Vec<String>,
    state: Option<Box<str>>,
}

impl Gateway {
    /// A backend sends a request.
    pub(super) fn backend_requested(
        &mut self,
        serial: u64,
        said: &[u8],
        id: RawId<'_>,
        method: &str,
        params: &Params<'_>,
        now: Instant,
    ) {
        let (Some(parsed), Some(at)) = (id.parse(), id.place(said)) else { return };
        let raw: Box<str> = std::str::from_utf8(&said[at]).expect("parsed as text").into();
        if method == method::PING {
            return self.tell_link(serial, message::result_line(raw, "{}"));
        }
        if self.keep_early_request(serial, said, &raw, now) {
            return;
        }
        if self.links[&serial].era() == Era::Stateless {
            let words = "a server of this revision cannot send requests; answer with `input_required` instead";
            return self.tell_link(serial, message::error_line(&raw, -32601, words, None));
        }
        if let (Some(capability), Sharing::Borrowed(_)) =
            (clients::capability_for(method), self.links[&serial].sharing())
        {
            // Calls that cannot be asked for input share a link, and it does not matter which of them this belongs to.
            let on_link = || self.calls.on_link(serial).filter(|(_, call)| call.reply_to.is_some());
            if on_link().next().is_some() && !on_link().any(|(_, call)| call.declared.can(method)) {
                return self
                    .tell_link(serial, message::error_line(&raw, -32601, &messages::undeclared(capability), None));
            }
        }
        let requested = self.requested_client(serial, method, params, now);
        if method == method::ROOTS_LIST || requested.is_err() {
            self.make_exclusive(method, requested.as_ref().ok().map(|found| found.client));
        }
        let Addressee { client, cause, stream } = match requested {
            Ok(found) => found,
            Err(words) => {
                let name = self.backends.name(self.links[&serial].id().backend);
                let note = format!("{name}: its `{}` was refused: {words}", messages::cut(method, 60));
                self.note(note);
                return self.tell_link(serial, message::error_line(&raw, 7020, &words, None));
            }
        };
        if let Some(key) = stream
            && self.calls[&key].reply_to.as_ref().is_some_and(|reply_to| reply_to.era == Era::Stateless)
        {
            return self.park_call(key, serial, raw, method, params, now);
        }
        if !methods::is_asked_of_clients(method) && !self.forwards_unknown(client) {
            let words =
                format!("`{}` is not part of MCP and is not forwarded to this client", messages::cut(method, 60));
            return self.tell_link(serial, message::error_line(&raw, -32601, &words, None));
        }
        let Some(client_state) = self.clients.get_mut(&client) else { return };
        let words = match clients::capability_for(method).filter(|capability| !client_state.can(capability)) {
            Some(capability) => Some(format!("the client that this is for does not support {capability}")),
            None if client_state.server_requests() >= SERVER_REQUESTS_MAX => {
                Some(format!("{SERVER_REQUESTS_MAX} requests already wait for this client"))
            }
            None => None,
        };
        if let Some(words) = words {
            return self.tell_link(serial, message::error_line(&raw, -32601, &words, None));
        }
        client_state.begin_server_request();
        let key = self.ids.number();
        let number = key.to_string();
        let mut edits = vec![(id.place(said).expect("seen above"), number.as_str())];
        let mut token = None;
        if let Some([Some(theirs)]) = params.meta().and_then(|meta| pick(meta, [meta::PROGRESS_TOKEN])) {
            edits.push((message::place(said, theirs), &number));
            token = Some(theirs.get().into());
        }
        let message = patch(said, &mut edits);
        let about = stream.and_then(|key| self.calls[&key].reply_to.as_ref()).map(|reply_to| reply_to.id.clone());
        self.server_requests
            .by_key
            .insert(key, ServerRequest { client, serial, cause, token, back: Back::Link { id: parsed, raw } });
        self.delay_calls(serial, client, cause, Some(PARK_MAX), now);
        self.out.push(Action::TellClient { client, message, about, said: Said::Other });
    }

    /// A person may have to answer, so the calls that a question may belong to get more time, within `call_max`.
    /// Without a time they get their usual timeout again, as after progress.
    fn delay_calls(&mut self, serial: u64, client: Client, cause: Cause, time: Option<Duration>, now: Instant) {
        for (key, call) in self.calls.iter_mut() {
            let may_be_it = match cause {
                Cause::Call(known) => known == key,
                Cause::SomeCall => call.link == Some(serial) && call.is_of(client),
                Cause::NoCall => false,
            };
            if may_be_it && call.due.is_some() {
                let usual = self.backends.get(&call.slot.backend).map(|backend| backend.settings().call_timeout);
                let due = now + time.or(usual).unwrap_or(PARK_MAX);
                call.due =
                    Some(if time.is_some() { call.due.max(Some(due)).unwrap_or(due) } else { due }.min(call.due_max));
            }
        }
        if let Some(due) = self.calls.deadlines().min() {
            self.timers.arm(Timer::Calls, due);
        }
    }

    /// The client that a backend's request is for, and the call that it belongs to.
    fn requested_client(
        &self,
        serial: u64,
        method: &str,
        params: &Params<'_>,
        now: Instant,
    ) -> Result<Addressee, String> {
        let link_state = &self.links[&serial];
        let on_link = || self.calls.on_link(serial);
        let hint = match self.is_shared_server() {
            true => "the clients get servers of their own",
            false => "set `children = \"per_session\"` for this backend",
        };
        let several = || {
            Err(format!(
                "calls of several clients are in flight here or were just cancelled, so the client of this request is \
                 unknown; {hint}"
            ))
        };
        if let Some(key) = self.stream_call
            && let Some(reply_to) = &self.calls[&key].reply_to
        {
            return Ok(Addressee { client: reply_to.client, cause: Cause::Call(key), stream: Some(key) });
        }
        if let Sharing::Session(client) = link_state.sharing() {
            return Ok(self.addressed(serial, client, method, now));
        }
        // A request about a task names the task, and so its client.
        if let Some(client) = self.task_named_in(serial, params) {
            return Ok(Addressee { cause: Cause::NoCall, ..self.addressed(serial, client, method, now) });
        }
        let clients: BTreeSet<Client> =
            on_link().filter_map(|(_, call)| Some(call.reply_to.as_ref()?.client)).collect();
        match self.clients.only().or(clients.first().copied()) {
            Some(client) => {
                let is_alone = clients.iter().all(|other| *other == client);
                if !is_alone || link_state.abandoned.has_of_others(client, now) {
                    return several();
                }
                // In the stateless era the question is the result of one call, which must be the right one.
                let is_one =
                    |call: &Call| call.reply_to.as_ref().is_some_and(|reply_to| reply_to.era == Era::Stateless);
                let mut own = on_link().filter(|(_, call)| call.is_of(client));
                if own.next().is_some_and(|(_, call)| is_one(call))
                    && (own.next().is_some() || link_state.abandoned.has_any(now))
                {
                    return several();
                }
                Ok(self.addressed(serial, client, method, now))
            }
            None => {
                let when = if self.is_shared_server() { "" } else { " if it sends requests outside of calls" };
                Err(format!("no call is in flight here, so the client is unknown; {hint}{when}"))
            }
        }
    }

    /// A question for this client that no stream attributes to a call. If exactly one call may have caused it, that one
    /// did; a cancelled call that the backend may still work on counts. Roots belong to the session.
    fn addressed(&self, serial: u64, client: Client, method: &str, now: Instant) -> Addressee {
        let own = self.calls.on_link(serial).filter(|(_, call)| call.is_of(client));
        let mut keys: Vec<u64> = own.map(|(key, _)| key).collect();
        keys.sort_unstable();
        let is_own_link =
            matches!(self.links[&serial].sharing(), Sharing::Session(_)) || self.clients.only() == Some(client);
        let cause = match keys[..] {
            [] => Cause::NoCall,
            _ if is_own_link && method == method::ROOTS_LIST => Cause::NoCall,
            [key] if !self.links[&serial].abandoned.has_any(now) => Cause::Call(key),
            _ => Cause::SomeCall,
        };
        Addressee { client, cause, stream: keys.last().copied() }
    }

    /// A call was cancelled or late. Its backend may still work on it, and its questions must not reach another client.
    pub(super) fn note_abandoned(&mut self, serial: u64, key: u64, call: &Call, now: Instant) {
        if let (Some(link_state), Some(reply_to)) = (self.links.get_mut(&serial), &call.reply_to) {
            link_state.abandoned.add(key, call, reply_to.client, now);
        }
    }

    /// A client answers a request of a backend. Other answers are ignored.
    pub(super) fn client_answered(
        &mut self,
        client: Client,
        said: &[u8],
        id: RawId<'_>,
        result: Option<Raw<'_>>,
        error: Option<Raw<'_>>,
        now: Instant,
    ) {
        let Some(Id::Integer(number)) = id.parse() else { return };
        let Ok(key) = u64::try_from(number) else { return };
        if self.server_requests.by_key.get(&key).is_none_or(|server_request| server_request.client != client) {
            return;
        }
        let server_request = self.server_requests.by_key.remove(&key).expect("found above");
        self.server_request_over(server_request.client);
        match server_request.back {
            Back::Link { raw, .. } => {
                self.delay_calls(server_request.serial, client, server_request.cause, None, now);
                let meta = result.and_then(|result| pick(result, ["_meta"])).and_then(|[meta]| meta);
                // A task that is not one of this client's was made by the client itself.
                let with_own =
                    self.with_own_id(client, Era::Handshake, server_request.serial, said, meta).unwrap_or_default();
                let (result, error) = match with_own.as_deref().map(message::parse_again) {
                    Some(Ok(Message::Response { result, error, .. })) => (result, error),
                    _ => (result, error),
                };
                // Only these members: with others a lenient backend might take it for a request.
                let members = [("result", result), ("error", error)];
                let members: String =
                    members.iter().filter_map(|(name, raw)| Some(format!(r#","{name}":{}"#, (*raw)?.get()))).collect();
                let line = format!(r#"{{"jsonrpc":"2.0","id":{raw}{members}}}"#);
                self.tell_link(server_request.serial, patch(line.as_bytes(), &mut []));
            }
            Back::Input { name, is_elicitation } => {
                let result = match (result, error) {
                    (Some(result), None) => Ok(result.get().to_owned()),
                    // Only elicitation has a result for this.
                    (_, _) if is_elicitation => Ok(r#"{"action":"cancel"}"#.to_owned()),
                    (_, error) => Err(error.map_or_else(String::new, messages::error_words)),
                };
                let Cause::Call(call) = server_request.cause else { return };
                match result {
                    Ok(result) => self.input_given(call, format!("{name}:{result}"), now),
                    Err(words) => self.input_failed(call, &words, now),
                }
            }
        }
    }

    fn server_request_over(&mut self, client: Client) {
        if let Some(client_state) = self.clients.get_mut(&client) {
            client_state.end_server_request();
        }
    }

    /// A client reports progress on a request of a backend.
    pub(super) fn server_request_progressed(&mut self, client: Client, said: &[u8], params: &Params<'_>) {
        let Some(token) = params.progress_token() else { return };
        let Some(server_request) = token.get().parse().ok().and_then(|key: u64| self.server_requests.by_key.get(&key))
        else {
            return;
        };
        if let (true, Some(theirs)) = (server_request.client == client, &server_request.token) {
            let told = patch(said, &mut [(message::place(said, token), &**theirs)]);
            self.tell_link(server_request.serial, told);
        }
    }

    /// A backend cancels its own request, or ends the gateway's subscription.
    pub(super) fn link_cancelled(&mut self, serial: u64, params: &Params<'_>, now: Instant) {
        let Some(id) = params.request_id().and_then(|raw| Id::parse(raw.get())) else { return };
        let request = self.server_requests.by_key.iter().find(|(_, server_request)| {
            server_request.serial == serial
                && matches!(&server_request.back, Back::Link { id: theirs, .. } if *theirs == id)
        });
        if let Some((key, _)) = request {
            let key = *key;
            return self.take_back(key, "the backend cancelled it");
        }
        let listen = self.links.get(&serial).and_then(|link_state| link_state.subscriptions.listen());
        if let (Some(listen), Id::Integer(number)) = (listen, id)
            && i128::from(listen) == number
        {
            self.calls.remove(&listen);
            self.listen_ended(serial, listen, true, now);
        }
    }

    /// The client need not answer any more. The cancellation is sent on the stream of the call that the question came
    /// with, while that call is open.
    fn take_back(&mut self, key: u64, reason: &str) {
        let Some(server_request) = self.server_requests.by_key.get(&key) else { return };
        let about = match server_request.cause {
            Cause::Call(call) => self.calls.get(&call).and_then(|call| call.reply_to.as_ref()),
            Cause::SomeCall | Cause::NoCall => None,
        };
        let about = about.map(|reply_to| reply_to.id.clone());
        self.withdraw(key, reason, about);
    }

    fn withdraw(&mut self, key: u64, reason: &str, about: Option<Id>) {
        let Some(server_request) = self.server_requests.by_key.remove(&key) else { return };
        self.server_request_over(server_request.client);
        let message = message::cancelled_line(key, Some(&message::quote(reason)));
        if self.clients.get(&server_request.client).is_some() {
            self.out.push(Action::TellClient { client: server_request.client, message, about, said: Said::Other });
        }
    }

    /// A call ended and was removed from the table: its questions are withdrawn, and so are questions that may be its
    /// own if it was the client's last call on that link. The backend gets an error for each. Questions of other calls
    /// stay open.
    pub(super) fn drop_requests_of_call(&mut self, key: u64, call: &Call, reason: &str) {
        let (Some(reply_to), false) = (&call.reply_to, self.server_requests.by_key.is_empty()) else { return };
        let may_be_its = |server_request: &ServerRequest| {
            server_request.cause == Cause::SomeCall
                && server_request.client == reply_to.client
                && Some(server_request.serial) == call.link
        };
        let is_last = self.server_requests.by_key.values().any(may_be_its)
            && !self
                .calls
                .iter()
                .any(|(other, open)| other != key && open.link == call.link && open.is_of(reply_to.client));
        for server_request in self.server_requests.keys_where(|server_request| {
            server_request.cause == Cause::Call(key) || is_last && may_be_its(server_request)
        }) {
            if let Back::Link { raw, .. } = &self.server_requests.by_key[&server_request].back {
                let (serial, answer) = (
                    self.server_requests.by_key[&server_request].serial,
                    message::error_line(raw, -32800, reason, None),
                );
                self.tell_link(serial, answer);
            }
            self.withdraw(server_request, reason, Some(reply_to.id.clone()));
        }
    }

    /// A link is gone: the requests that came on it are withdrawn.
    pub(super) fn drop_requests_of_link(&mut self, serial: u64) {
        for key in self.server_requests.keys_where(|server_request| server_request.serial == serial) {
            self.take_back(key, "the backend that sent this request ended");
        }
    }

    /// A client is gone: backends that wait for its answers get errors.
    pub(super) fn drop_requests_to(&mut self, client: Client) {
        for key in self.server_requests.keys_where(|server_request| server_request.client == client) {
            let server_request = self.server_requests.by_key.remove(&key).expect("listed above");
            if let Back::Link { raw, .. } = &server_request.back {
                self.tell_link(
                    server_request.serial,
                    message::error_line(raw, -32800, "the client disconnected", None),
                );
            }
        }
    }

    // ---- a backend of the handshake era, a client of the stateless era -------------------------

    /// A question of the backend becomes the result of the client's call; the call stays open at the backend.
    fn park_call(&mut self, key: u64, serial: u64, raw: Box<str>, method: &str, params: &Params<'_>, now: Instant) {
        let call = self.calls.get_mut(&key).expect("found by the caller");
        let words = match clients::capability_for(method) {
            Some(capability) if !call.declared.can(method) => Some(messages::undeclared(capability)),
            Some(_) if matches!(call.kind, CallKind::Tool | CallKind::Prompt | CallKind::Read) => None,
            _ => Some("the client does not support this request".to_owned()),
        };
        if let Some(words) = words {
            return self.tell_link(serial, message::error_line(&raw, -32601, &words, None));
        }
        // Those that the client was told of and those that wait for its next request.
        let open = call.parked.as_ref().map_or(0, |parked| parked.given.len() + parked.queued.len());
        if open >= SERVER_REQUESTS_MAX {
            let words = format!("{SERVER_REQUESTS_MAX} requests already wait for this client");
            return self.tell_link(serial, message::error_line(&raw, -32601, &words, None));
        }
        let request = match params.whole() {
            Some(params) => format!(r#"{{"method":"{method}","params":{}}}"#, params.get()),
            None => format!(r#"{{"method":"{method}"}}"#),
        };
        let who = call
            .reply_to
            .as_ref()
            .and_then(|reply_to| self.clients.get(&reply_to.client))
            .map(|client_state| client_state.who().clone());
        let parked = call.parked.get_or_insert_with(|| {
            let who = who.unwrap_or_else(|| Rc::new(Who { name: String::new(), role: None, profile: None }));
            Box::new(Parked { state: None, who, given: Vec::new(), queued: Vec::new(), input_due: None, answer: None })
        });
        parked.queued.push((raw, request));
        if parked.state.is_none() && parked.input_due.is_none() {
            parked.input_due = Some(now + ASK_TOGETHER);
            self.timers.arm(Timer::Calls, now + ASK_TOGETHER);
        }
    }

    /// Sends the client all questions that its backend has asked until now.
    pub(super) fn return_input_required(&mut self, key: u64, now: Instant) {
        let state = format!("{STATE_MARK}{:016x}{:016x}", self.ids.random(), self.ids.random());
        let Some(call) = self.calls.get_mut(&key) else { return };
        call.rounds += 1;
        if call.rounds > ROUNDS_MAX {
            return self.too_many_input_rounds(key, now);
        }
        let Some(parked) = &mut call.parked else { return };
        let mut requests = Vec::new();
        parked.input_due = None;
        parked.given.clear();
        for (index, (raw, request)) in parked.queued.drain(..).enumerate() {
            let name = format!("ask{index}");
            requests.push(format!(r#""{name}":{request}"#));
            parked.given.push((name, raw));
        }
        let result = format!(
            r#"{{"resultType":"input_required","inputRequests":{{{}}},"requestState":"{state}"}}"#,
            requests.join(",")
        );
        parked.state = Some(state);
        let due = (now + PARK_MAX).min(call.due_max);
        call.due = Some(due);
        let reply_to = call.reply_to.clone().expect("only clients' calls are parked");
        let result = if result.contains('\n') { result.replace(['\n', '\r'], " ") } else { result };
        self.answer_result(&reply_to, &result);
        self.timers.arm(Timer::Calls, due);
    }

    /// Whether this request continues a parked call.
    pub(super) fn resume_parked(&mut self, request: &ClientRequest<'_>, state: Raw<'_>, now: Instant) -> bool {
        let Some(state) = state.text().filter(|state| state.starts_with(STATE_MARK)) else { return false };
        let who = &self.clients[&request.reply_to.client].who().name;
        let is_it = |call: &Call| {
            call.method == request.method
                && call
                    .parked
                    .as_ref()
                    .is_some_and(|parked| parked.state.as_deref() == Some(state.as_str()) && parked.who.name == *who)
        };
        let Some(key) = self.calls.iter().find(|(_, call)| is_it(call)).map(|(key, _)| key) else {
            let words = "this `requestState` is not valid any more: call again without it";
            self.unknown(request, words.into(), None);
            return true;
        };
        let responses = request.params.input_responses();
        let call = self.calls.get_mut(&key).expect("found above");
        call.reply_to = Some(request.reply_to.clone());
        if let Some([Some(token)]) = request.params.meta().and_then(|meta| pick(meta, [meta::PROGRESS_TOKEN])) {
            call.token = Some(token.get().into());
        }
        // The guards have checked this request, which may name something else than the parked call.
        if let Some(failure) = self.refused_since(&self.calls[&key], now) {
            self.refuse_parked(key, failure, now);
            return true;
        }
        let call = self.calls.get_mut(&key).expect("found above");
        let timeout = self.backends.get(&call.slot.backend).map_or(PARK_MAX, |backend| backend.settings().call_timeout);
        let due = (now + timeout).min(call.due_max);
        call.due = Some(due);
        let (serial, parked) = (call.link, call.parked.as_mut().expect("found by it"));
        parked.state = None;
        let (given, answer) = (mem::take(&mut parked.given), parked.answer.take());
        let is_more = !parked.queued.is_empty();
        if let Some(answer) = answer {
            let call = self.calls.remove(&key).expect("found above");
            self.answer_parked(&call, &answer, now);
            return true;
        }
        self.timers.arm(Timer::Calls, due);
        let Some(serial) = serial else { return true };
        for (name, raw) in given {
            let response = responses.and_then(|raw| pick(raw, [name.as_str()])).and_then(|[response]| response);
            let line = match response {
                Some(response) => {
                    patch(format!(r#"{{"jsonrpc":"2.0","id":{raw},"result":{}}}"#, response.get()).as_bytes(), &mut [])
                }
                None => message::error_line(&raw, -32603, "the client gave no answer", None),
            };
            self.tell_link(serial, line);
        }
        if is_more {
            self.return_input_required(key, now);
        }
        true
    }

    /// Ends a parked call that its client may not continue any more.
    fn refuse_parked(&mut self, key: u64, failure: Failure, now: Instant) {
        let Some(mut call) = self.calls.remove(&key) else { return };
        if let (Some(serial), Some(parked)) = (call.link, call.parked.as_mut()) {
            let given = mem::take(&mut parked.given).into_iter().map(|(_, raw)| raw);
            let waiting: Vec<Box<str>> =
                given.chain(mem::take(&mut parked.queued).into_iter().map(|(raw, _)| raw)).collect();
            for raw in waiting {
                self.tell_link(serial, message::error_line(&raw, -32800, "the client may not continue the call", None));
            }
            self.cancel_on(serial, key, "the client may not continue it");
            self.note_abandoned(serial, key, &call, now);
            self.call_finished(serial, now);
        }
        // Its client waits for an answer again.
        call.parked = None;
        self.fail(*call, failure, now);
    }

    /// Keeps the answer to a parked call for the client's next request.
    pub(super) fn keep_answer(&mut self, key: u64, message: &[u8], now: Instant) -> bool {
        let Some(call) = self.calls.get_mut(&key) else { return false };
        let Some(parked) = call.parked.as_mut().filter(|parked| parked.is_waiting()) else { return false };
        parked.answer = Some(Bytes::copy_from_slice(message));
        let serial = call.link.take();
        if let Some(serial) = serial {
            self.call_finished(serial, now);
        }
        true
    }

    fn answer_parked(&mut self, call: &Call, message: &[u8], now: Instant) {
        let (Some(reply_to), Ok(Message::Response { id, result, error })) =
            (&call.reply_to, message::parse_again(message))
        else {
            return;
        };
        let mut edits = Vec::new();
        edits.extend(id.place(message).map(|at| (at, &*reply_to.raw)));
        let added = result.and_then(|result| messages::complete(message, result, call.kind));
        edits.extend(added.as_ref().map(|(at, with)| (at.clone(), with.as_str())));
        let told = patch(message, &mut edits);
        let (said, outcome) = match error {
            Some(_) => (Said::Error, Outcome::Failed),
            None => (Said::Result, Outcome::Answered),
        };
        self.answer(reply_to, told, said);
        self.report_call(call, outcome, now);
    }

    // ---- a stateless backend, a client of the handshake era -------------------------------------

    /// If the result asks for input, the client is asked, and the call stays open.
    pub(super) fn input_required(&mut self, key: u64, result: Raw<'_>, now: Instant) -> bool {
        if memchr::memmem::find(result.get().as_bytes(), b"input_required").is_none() {
            return false;
        }
        let Some([Some(kind), requests, state]) = pick(result, ["resultType", "inputRequests", "requestState"]) else {
            return false;
        };
        if kind.get() != "\"input_required\"" {
            return false;
        }
        let mut wanted: Vec<(Box<str>, String, Option<String>)> = Vec::new();
        if let Some(requests) = requests {
            let _ = requests.for_each_member(|name, request| {
                // One more than are allowed is enough to know.
                if wanted.len() > SERVER_REQUESTS_MAX {
                    return;
                }
                let [method, params] = pick(request, ["method", "params"]).unwrap_or_default();
                let method = method.and_then(Raw::text).unwrap_or_default();
                wanted.push((name.get().into(), method, params.map(|params| params.get().to_owned())));
            });
        }
        let Some(call) = self.calls.get_mut(&key) else { return false };
        let (serial, reply_to) = (call.link.expect("it was answered"), call.reply_to.clone().expect("a client's call"));
        call.rounds += 1;
        if call.rounds > ROUNDS_MAX {
            self.too_many_input_rounds(key, now);
            return true;
        }
        call.inputs = Some(Box::new(Inputs {
            left: wanted.len(),
            responses: Vec::new(),
            state: state.map(|state| state.get().into()),
        }));
        if wanted.is_empty() {
            self.try_again(key, now);
            return true;
        }
        let client_state = &self.clients[&reply_to.client];
        if client_state.server_requests() + wanted.len() > SERVER_REQUESTS_MAX {
            let words = format!("more than {SERVER_REQUESTS_MAX} requests would wait for this client");
            self.input_failed(key, &words, now);
            return true;
        }
        let missing = wanted.iter().find(|(_, method, _)| {
            let capability = method.split('/').next().unwrap_or_default();
            !client_state.can(capability)
        });
        if let Some((_, method, _)) = missing {
            let words = format!(
                "the backend needs an answer to `{}`, which this client cannot give",
                messages::cut(method, 60)
            );
            self.input_failed(key, &words, now);
            return true;
        }
        for (name, method, params) in wanted {
            let server_request = self.ids.number();
            let params = params.map_or_else(String::new, |params| format!(r#","params":{params}"#));
            let line =
                format!(r#"{{"jsonrpc":"2.0","id":{server_request},"method":{}{params}}}"#, message::quote(&method));
            let back = Back::Input { name, is_elicitation: method == method::ELICIT };
            self.server_requests.by_key.insert(
                server_request,
                ServerRequest { client: reply_to.client, serial, cause: Cause::Call(key), token: None, back },
            );
            if let Some(client_state) = self.clients.get_mut(&reply_to.client) {
                client_state.begin_server_request();
            }
            let message = patch(line.as_bytes(), &mut []);
            self.out.push(Action::TellClient {
                client: reply_to.client,
                message,
                about: Some(reply_to.id.clone()),
                said: Said::Other,
            });
        }
        // A person may have to answer; `call_max` still holds.
        let call = self.calls.get_mut(&key).expect("found above");
        let due = (now + PARK_MAX).min(call.due_max);
        call.due = Some(due);
        self.timers.arm(Timer::Calls, due);
        true
    }

    /// Ends a call whose backend asks again and again.
    fn too_many_input_rounds(&mut self, key: u64, now: Instant) {
        if let Some(call) = self.calls.get_mut(&key)
            && let (Some(serial), Some(parked)) = (call.link, &mut call.parked)
        {
            // In the handshake era the call and its questions are still open at the backend.
            for (raw, _) in mem::take(&mut parked.queued) {
                self.tell_link(serial, message::error_line(&raw, -32800, "it asked for input too often", None));
            }
            self.cancel_on(serial, key, "it asked for input too often");
        }
        self.input_failed(key, &format!("it asked for input more than {ROUNDS_MAX} times"), now);
    }

    fn input_given(&mut self, key: u64, member: String, now: Instant) {
        let Some(inputs) = self.calls.get_mut(&key).and_then(|call| call.inputs.as_mut()) else { return };
        inputs.responses.push(member);
        inputs.left -= 1;
        if inputs.left == 0 {
            self.try_again(key, now);
        }
    }

    /// The client's answers are complete: they are sent to the backend with another request.
    fn try_again(&mut self, key: u64, now: Instant) {
        let Some(mut call) = self.calls.remove(&key) else { return };
        let Some(serial) = call.link else { return };
        self.call_finished(serial, now);
        let inputs = call.inputs.take().expect("it waits for them");
        if let Some(failure) = self.refused_since(&call, now) {
            return self.fail(*call, failure, now);
        }
        let Some(message) = call.message.clone() else {
            let failure =
                Failure::unknown("the request was too large to be asked again with the client's answers".into());
            return self.fail(*call, failure, now);
        };
        let Ok(Message::Request { params, .. }) = message::parse_again(&message) else { return };
        let state = inputs.state.map_or_else(String::new, |state| format!(r#","requestState":{state}"#));
        let members = format!(r#""inputResponses":{{{}}}{state}"#, inputs.responses.join(","));
        let edit = match params.whole() {
            Some(whole) => message::Edit::append(&message, whole, &members),
            None => {
                let end = message.trim_ascii_end().len() - 1;
                message::Edit { at: end..end, with: format!(r#","params":{{{members}}}"#) }
            }
        };
        let again = patch(&message, &mut [(edit.at, &edit.with)]);
        let Ok(Message::Request { id, params, .. }) = message::parse_again(&again) else { return };
        match self.serving(call.slot) {
            Some(serial) => {
                let key = self.ids.number();
                self.calls.insert(key, call);
                self.forward(key, serial, &again, id, &params, now);
            }
            None => {
                call.message = None;
                call.due = None;
                let key = self.ids.number();
                self.hold_call(key, call, &again, now);
            }
        }
    }

    fn input_failed(&mut self, key: u64, words: &str, now: Instant) {
        let Some(call) = self.calls.remove(&key) else { return };
        self.drop_requests_of_call(key, &call, "another answer that was needed cannot be given");
        if let Some(serial) = call.link {
            self.call_finished(serial, now);
        }
        let failure = Failure::no_input(self.backends.name(call.slot.backend), words);
        self.fail(*call, failure, now);
    }
}
