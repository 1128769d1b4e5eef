//! Clients: their fronts, their handshakes and the messages that they send.
//! Where a request goes is decided in [`super::dispatch`].

use std::{ops::Index, rc::Rc, time::Instant};

use bytes::Bytes;
use rustc_hash::FxHashMap;

use super::{
    Action, Client, Era, Front, Gateway, Outcome, REQUEST_ID_MAX, Said, Who,
    backends::BackendState,
    calls::{Call, ReplyTo},
    dispatch,
    links::LinkState,
    messages,
    messages::{Failure, WITHDRAW},
    methods,
    saved::{SavedClient, SavedFront, SavedWho},
    search,
    slots::Sharing,
    subscriptions::{ClientSubscriptions, Level},
};
use crate::{
    front::record::SessionState,
    json::Raw,
    mcp::{List, meta, method, notification, revision},
    message,
    message::{Id, Message, Outline, Params, RawId, Unreadable, pick},
};

/// How many messages one batch may hold; a longer one is refused.
const BATCH_MAX: usize = 256;

/// Every client, by its number, and the batches that are not answered.
#[derive(Debug, Default)]
pub(super) struct Clients {
    by_number: FxHashMap<Client, ClientState>,
    batches: FxHashMap<u64, Batch>,
}

/// The answers to a batch, until each is there.
#[derive(Debug)]
struct Batch {
    client: Client,
    /// The first request in it.
    about: Option<Id>,
    left: usize,
    answers: Vec<Bytes>,
}

impl Index<&Client> for Clients {
    type Output = ClientState;

    fn index(&self, client: &Client) -> &ClientState {
        &self.by_number[client]
    }
}

impl Clients {
    pub(super) fn get(&self, client: &Client) -> Option<&ClientState> {
        self.by_number.get(client)
    }

    pub(super) fn get_mut(&mut self, client: &Client) -> Option<&mut ClientState> {
        self.by_number.get_mut(client)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Client, &ClientState)> {
        self.by_number.iter()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &ClientState> {
        self.by_number.values()
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut ClientState> {
        self.by_number.values_mut()
    }

    pub(super) fn insert(&mut self, client: Client, client_state: ClientState) {
        self.by_number.insert(client, client_state);
    }

    pub(super) fn len(&self) -> usize {
        self.by_number.len()
    }

    pub(super) fn batches(&self) -> usize {
        self.batches.len()
    }

    /// In the order in which they connected.
    pub(super) fn numbers(&self) -> Vec<Client> {
        self.numbers_where(|_, _| true)
    }

    pub(super) fn numbers_where(&self, is_it: impl Fn(Client, &ClientState) -> bool) -> Vec<Client> {
        let found = self.by_number.iter().filter(|(client, client_state)| is_it(**client, client_state));
        let mut numbers: Vec<Client> = found.map(|(client, _)| *client).collect();
        numbers.sort_unstable();
        numbers
    }

    /// The name that authentication gave to a client; empty if the client is gone.
    pub(super) fn name(&self, client: Client) -> &str {
        self.by_number.get(&client).map_or("", |client_state| &client_state.who.name)
    }

    /// The client on stdio, while there is no other. It owns what clients share otherwise.
    pub(super) fn only(&self) -> Option<Client> {
        let mut clients = self.by_number.iter();
        match (clients.next(), clients.next()) {
            (Some((client, client_state)), None) if client_state.front == Front::Lines => Some(*client),
            _ => None,
        }
    }

    pub(super) fn allow_until(&mut self, client: Client, until: Option<Instant>) {
        if let Some(client_state) = self.by_number.get_mut(&client) {
            client_state.allowed_until = until;
        }
    }

    /// A request of this client is answered or needs no answer any more. False if the client is gone.
    pub(super) fn end_request(&mut self, client: Client) -> bool {
        let Some(client_state) = self.by_number.get_mut(&client) else { return false };
        client_state.in_flight = client_state.in_flight.saturating_sub(1);
        true
    }

    /// One part of a batch has its answer, or needs none. Returns the answer to the whole batch when it is complete.
    fn end_part(&mut self, key: u64, answer: Option<Bytes>) -> Option<Action> {
        let batch = self.batches.get_mut(&key)?;
        batch.answers.extend(answer);
        batch.left -= 1;
        if batch.left > 0 {
            return None;
        }
        let Batch { client, about, answers, .. } = self.batches.remove(&key)?;
        if answers.is_empty() {
            return None;
        }
        let parts: Vec<&[u8]> = answers.iter().map(|line| line.trim_ascii_end()).collect();
        let message = [b"[" as &[u8], &parts.join(&b","[..]), b"]\n"].concat().into();
        Some(Action::TellClient { client, message, about, said: Said::Other })
    }
}

#[derive(Debug)]
pub(super) struct ClientState {
    who: Rc<Who>,
    /// Its view of the catalogue.
    view: usize,
    front: Front,
    handshake: Handshake,
    /// When its credentials expire or were revoked.
    allowed_until: Option<Instant>,
    /// As it wrote them in its handshake.
    capabilities: Option<Box<str>>,
    info: Option<Box<str>>,
    /// Its requests that are not answered.
    in_flight: usize,
    /// Requests of backends that it has not answered.
    server_requests: usize,
    pub(super) subscriptions: ClientSubscriptions,
}

/// How far a client's handshake is, and the revision that it was answered with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Handshake {
    None,
    /// `initialize` was answered, and `notifications/initialized` did not come yet.
    Answered(&'static str),
    Done(&'static str),
}

impl ClientState {
    /// None for a single request: it is over before the state is saved. When credentials expire is not part of it: the
    /// next request says so.
    pub(super) fn save(&self, client: Client) -> Option<SavedClient> {
        let front = match self.front {
            Front::Lines => SavedFront::Lines,
            Front::Session => SavedFront::Session,
            Front::Request => return None,
        };
        let handshake = match self.handshake {
            Handshake::None => None,
            Handshake::Answered(version) => Some((version.to_owned(), false)),
            Handshake::Done(version) => Some((version.to_owned(), true)),
        };
        Some(SavedClient {
            client,
            who: SavedWho::of(&self.who),
            front,
            handshake,
            capabilities: self.capabilities.as_deref().map(str::to_owned),
            info: self.info.as_deref().map(str::to_owned),
            subscriptions: self.subscriptions.save(),
        })
    }

    pub(super) fn restore(saved: SavedClient, view: usize) -> ClientState {
        let known = |version: &str| revision::HANDSHAKE.into_iter().find(|known| *known == version);
        let handshake = match saved.handshake {
            None => Handshake::None,
            Some((version, is_done)) => {
                let version = known(&version).unwrap_or(revision::NEWEST_HANDSHAKE);
                if is_done { Handshake::Done(version) } else { Handshake::Answered(version) }
            }
        };
        let subscriptions = ClientSubscriptions::restore(saved.subscriptions, saved.client);
        ClientState {
            who: saved.who.who().into(),
            view,
            front: match saved.front {
                SavedFront::Lines => Front::Lines,
                SavedFront::Session => Front::Session,
            },
            handshake,
            allowed_until: None,
            capabilities: saved.capabilities.map(Into::into),
            info: saved.info.map(Into::into),
            in_flight: subscriptions.listens(),
            server_requests: 0,
            subscriptions,
        }
    }

    pub(super) fn who(&self) -> &Rc<Who> {
        &self.who
    }

    pub(super) fn role(&self) -> Option<&str> {
        self.who.role.as_deref()
    }

    pub(super) fn view(&self) -> usize {
        self.view
    }

    pub(super) fn set_view(&mut self, view: usize) {
        self.view = view;
    }

    /// The revision of its handshake.
    pub(super) fn version(&self) -> Option<&'static str> {
        match self.handshake {
            Handshake::None => None,
            Handshake::Answered(version) | Handshake::Done(version) => Some(version),
        }
    }

    pub(super) fn capabilities(&self) -> Option<&str> {
        self.capabilities.as_deref()
    }

    pub(super) fn info(&self) -> Option<&str> {
        self.info.as_deref()
    }

    /// Whether its credentials are still valid.
    /// When its credentials expire.
    pub(super) fn allowed_until(&self) -> Option<Instant> {
        self.allowed_until
    }

    pub(super) fn is_allowed(&self, now: Instant) -> bool {
        self.allowed_until.is_none_or(|until| now < until)
    }

    /// It may send more than one request.
    pub(super) fn is_session(&self) -> bool {
        self.front != Front::Request
    }

    /// Its handshake is done, so it gets notifications.
    pub(super) fn hears_changes(&self) -> bool {
        matches!(self.handshake, Handshake::Done(_))
    }

    /// Whether its handshake declared this capability.
    pub(super) fn can(&self, capability: &str) -> bool {
        let capabilities = self.capabilities.as_deref().and_then(Raw::parse);
        capabilities.and_then(|raw| pick(raw, [capability])).is_some_and(|[member]| member.is_some())
    }

    pub(super) fn server_requests(&self) -> usize {
        self.server_requests
    }

    pub(super) fn begin_server_request(&mut self) {
        self.server_requests += 1;
    }

    pub(super) fn end_server_request(&mut self) {
        self.server_requests = self.server_requests.saturating_sub(1);
    }
}

impl Gateway {
    pub(super) fn client_came(&mut self, client: Client, front: Front, who: Who) {
        let view = self.view_of(&who);
        let client_state = ClientState {
            who: who.into(),
            view,
            front,
            handshake: Handshake::None,
            allowed_until: None,
            capabilities: None,
            info: None,
            in_flight: 0,
            server_requests: 0,
            subscriptions: ClientSubscriptions::default(),
        };
        self.clients.by_number.insert(client, client_state);
    }

    /// The client continues after a restart of the gateway: its backends get its handshake, its log level and its
    /// subscriptions as if it had just sent them.
    pub(super) fn client_restored(&mut self, client: Client, who: Who, state: &SessionState, now: Instant) {
        self.client_came(client, Front::Session, who);
        let version = revision::HANDSHAKE.into_iter().find(|version| *version == &*state.version);
        let client_state = self.clients.get_mut(&client).expect("it just came");
        // It has the answer to `initialize`. Whether it has confirmed that makes no difference here.
        client_state.handshake = Handshake::Done(version.unwrap_or(revision::NEWEST_HANDSHAKE));
        if let Ok(Message::Request { params, .. }) = message::parse(state.initialize.as_bytes()) {
            client_state.capabilities = params.capabilities().map(|raw| one_line(raw.get()));
            client_state.info = params.client_info().map(|raw| one_line(raw.get()));
        }
        self.restore_client_subscriptions(client, state, now);
    }

    pub(super) fn client_left(&mut self, client: Client, now: Instant) {
        let Some(client_state) = self.clients.get(&client) else { return };
        let front = client_state.front;
        if client_state.server_requests > 0 {
            self.drop_requests_to(client);
        }
        if self.clients[&client].in_flight > 0 {
            self.drop_requests_of(client, now);
        }
        // A client that is a single request has no tasks and no slots.
        if front != Front::Request {
            self.tasks.forget_client(client);
        }
        let client_state = self.clients.by_number.remove(&client).expect("seen above");
        if client_state.subscriptions.is_watching() {
            self.update_watches(now);
        }
        if client_state.subscriptions.level().is_some() {
            self.update_log_levels(now);
        }
        if front != Front::Request {
            for key in self.slots_where(|key| key.sharing == Sharing::Session(client)) {
                self.drop_slot(key, &Failure::stopping(""), now);
            }
        }
    }

    /// Cancels all that a client waits for.
    fn drop_requests_of(&mut self, client: Client, now: Instant) {
        // First, or a batch would be complete when its last call is cancelled, and be answered.
        self.clients.batches.retain(|_, batch| batch.client != client);
        // A parked call waits for the next request of its client, which may come on another connection.
        for key in self.calls.keys_where(|call| call.is_of(client) && !call.is_parked()) {
            self.cancel(key, None, now);
        }
        for wait in self.offer_waits.take_where(|reply_to| reply_to.client == client) {
            self.offer_wait_cancelled(wait);
        }
        self.drop_task_lists(|reply_to| reply_to.client == client);
    }

    /// A request needs no answer any more.
    pub(super) fn forget(&mut self, reply_to: &ReplyTo) {
        self.clients.end_request(reply_to.client);
        if let Some(batch) = reply_to.batch {
            self.batch_answered(batch, None);
        }
    }

    pub(super) fn batch_answered(&mut self, key: u64, answer: Option<Bytes>) {
        let action = self.clients.end_part(key, answer);
        self.out.extend(action);
    }

    pub(super) fn client_said(&mut self, client: Client, said: &[u8], now: Instant) {
        self.client_said_parsed(client, said, message::parse(said), now);
    }

    /// The same for a message that was parsed before.
    pub(super) fn client_said_parsed(
        &mut self,
        client: Client,
        said: &[u8],
        message: Result<Message<'_>, Unreadable>,
        now: Instant,
    ) {
        if self.clients.get(&client).is_none() {
            return;
        }
        match message {
            Ok(Message::Batch(members)) => self.client_batched(client, &members, now),
            Ok(message) => self.client_message(client, said, message, None, now),
            Err(unreadable) => {
                let message = unreadable.refusal();
                self.out.push(Action::TellClient { client, message, about: None, said: Said::Error });
            }
        }
    }

    /// A request that the front has parsed.
    pub(super) fn client_requested_outlined(&mut self, client: Client, said: &[u8], outline: &Outline, now: Instant) {
        if self.clients.get(&client).is_some()
            && let Some(Message::Request { id, method, params }) = outline.read(said)
        {
            self.client_requested(client, said, id, &method, &params, None, now);
        }
    }

    fn client_message(&mut self, client: Client, said: &[u8], message: Message<'_>, batch: Option<u64>, now: Instant) {
        match message {
            Message::Request { id, method, params } => {
                self.client_requested(client, said, id, &method, &params, batch, now)
            }
            Message::Notification { method, params } => self.client_notified(client, said, &method, &params, now),
            Message::Response { id, result, error } => self.client_answered(client, said, id, result, error, now),
            Message::Batch(_) | Message::Other => {
                let message = message::error_line("null", -32600, "this is not a JSON-RPC message", None);
                match batch {
                    Some(batch) => self.batch_answered(batch, Some(message)),
                    None => self.out.push(Action::TellClient { client, message, about: None, said: Said::Error }),
                }
            }
        }
    }

    /// Only one revision has batches, and their answers are one array. Clients of other revisions get an error.
    fn client_batched(&mut self, client: Client, members: &[Raw<'_>], now: Instant) {
        let client_state = &self.clients[&client];
        let words = if client_state.version().is_some_and(|version| version != revision::WITH_BATCHES)
            || client_state.front == Front::Request
        {
            Some("this revision of MCP has no batches".to_owned())
        } else if members.is_empty() {
            Some("an empty batch".into())
        } else if members.len() > BATCH_MAX {
            Some(format!("a batch may hold {BATCH_MAX} messages"))
        } else {
            None
        };
        if let Some(words) = words {
            let message = message::error_line("null", -32600, &words, None);
            return self.out.push(Action::TellClient { client, message, about: None, said: Said::Error });
        }
        let parsed: Vec<(&[u8], Message<'_>)> = members
            .iter()
            .filter_map(|member| Some((member.get().as_bytes(), message::parse_again(member.get().as_bytes()).ok()?)))
            .collect();
        let owed =
            |message: &Message<'_>| matches!(message, Message::Request { .. } | Message::Other | Message::Batch(_));
        let left = parsed.iter().filter(|(_, message)| owed(message)).count();
        let about = parsed.iter().find_map(|(_, message)| match message {
            Message::Request { id, .. } => id.parse(),
            _ => None,
        });
        let key = self.ids.number();
        if left > 0 {
            self.clients.batches.insert(key, Batch { client, about, left, answers: Vec::new() });
        }
        for (said, message) in parsed {
            self.client_message(client, said, message, Some(key), now);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "a request with all that is known of it")]
    fn client_requested(
        &mut self,
        client: Client,
        said: &[u8],
        id: RawId<'_>,
        method: &str,
        params: &Params<'_>,
        batch: Option<u64>,
        now: Instant,
    ) {
        let (Some(parsed), Some(at)) = (id.parse(), id.place(said)) else {
            let message = message::error_line("null", -32600, "an id must be a string or a whole number", None);
            match batch {
                Some(batch) => self.batch_answered(batch, Some(message)),
                None => self.out.push(Action::TellClient { client, message, about: None, said: Said::Error }),
            }
            return;
        };
        let raw = std::str::from_utf8(&said[at]).expect("parsed as text");
        if parsed.size() > REQUEST_ID_MAX && !self.is_shared_server() {
            let words = format!("an id may have at most {REQUEST_ID_MAX} bytes");
            let message = message::error_line(raw, -32600, &words, None);
            match batch {
                Some(batch) => self.batch_answered(batch, Some(message)),
                None => self.out.push(Action::TellClient { client, message, about: Some(parsed), said: Said::Error }),
            }
            return self.report_refused(client, method, None, None, Outcome::Unknown);
        }
        let max = self.settings.limits.in_flight_max;
        let client_state = self.clients.get_mut(&client).expect("seen by the caller");
        let mut reply_to = ReplyTo { client, id: parsed, raw: raw.into(), era: Era::Handshake, batch };
        client_state.in_flight += 1;
        if client_state.in_flight > max {
            let failure = Failure::too_many(max);
            self.refuse(&reply_to, false, &failure);
            return self.report_refused(client, method, None, None, failure.outcome);
        }
        if method == method::INITIALIZE && client_state.front != Front::Request {
            return match self.unopened_shared_server() {
                Some(owner) => {
                    let declared = Declared::default();
                    let request =
                        dispatch::ClientRequest { reply_to, said, id, method, params, declared, checked: None };
                    self.wait_for_offer(request, owner, now);
                }
                None => self.initialize(&reply_to, params),
            };
        }
        let mut declared = Declared::default();
        if client_state.handshake == Handshake::None || client_state.front == Front::Request {
            reply_to.era = Era::Stateless;
            if method == method::PING && client_state.front != Front::Request {
                return self.answer_result(&reply_to, "{}");
            }
            match check_meta(params, client_state.front) {
                Ok(said) => declared = said,
                Err((code, words, data)) => return self.answer_error(&reply_to, code, &words, data.as_deref()),
            }
        }
        self.route(dispatch::ClientRequest { reply_to, said, id, method, params, declared, checked: None }, now);
    }

    /// Answers the handshake of a client, from the settings and offers of the backends.
    pub(super) fn initialize(&mut self, reply_to: &ReplyTo, params: &Params<'_>) {
        let wanted = params.protocol_version().and_then(Raw::text).unwrap_or_default();
        let shared = self.shared_initialize_result(&wanted);
        let agreed = shared.as_ref().map_or(&wanted, |(version, _)| version);
        let version =
            revision::HANDSHAKE.into_iter().find(|version| version == agreed).unwrap_or(revision::NEWEST_HANDSHAKE);
        let capabilities = self.capabilities(Era::Handshake);
        let instructions = self.instructions(reply_to.client);
        let client_state = self.clients.get_mut(&reply_to.client).expect("seen by the caller");
        client_state.handshake = Handshake::Answered(version);
        client_state.capabilities = params.capabilities().map(|raw| one_line(raw.get()));
        client_state.info = params.client_info().map(|raw| one_line(raw.get()));
        let result = format!(
            r#"{{"protocolVersion":"{version}","capabilities":{capabilities},"serverInfo":{}{instructions}}}"#,
            messages::info()
        );
        self.answer_result(reply_to, shared.as_ref().map_or(&result, |(_, result)| result));
    }

    /// The same in the stateless era.
    pub(super) fn discover(&mut self, reply_to: &ReplyTo) {
        if let Some(result) = self.shared_discover_result(&versions()) {
            return self.answer_result(reply_to, &result);
        }
        let result = format!(
            r#"{{"supportedVersions":{},"capabilities":{}{}{}}}"#,
            versions(),
            self.capabilities(Era::Stateless),
            self.instructions(reply_to.client),
            self.freshness(),
        );
        self.answer_result(reply_to, &result);
    }

    /// All capabilities that any backend may have: a capability cannot be announced later.
    fn capabilities(&self, era: Era) -> String {
        let has_tasks = |backend: &BackendState| backend.capability("tasks").is_some();
        let tasks = match era == Era::Handshake && self.backends.values().any(has_tasks) {
            true => r#","tasks":{"list":{},"cancel":{},"requests":{"tools":{"call":{}}}}"#,
            false => "",
        };
        format!(
            r#"{{"tools":{{"listChanged":true}},"prompts":{{"listChanged":true}},"resources":{{"listChanged":true,"subscribe":true}},"logging":{{}},"completions":{{}}{tasks}}}"#
        )
    }

    /// The instructions of the backends that a client sees.
    fn instructions(&self, client: Client) -> String {
        let view = self.catalogue.view(self.clients[&client].view);
        let mut words: Vec<String> = Vec::new();
        if view.search {
            words.push(search::INSTRUCTIONS.to_owned());
        }
        for (number, owner) in self.backends.in_order() {
            let sees =
                |kind: List| view.shows(kind).iter().any(|index| self.catalogue.entry(kind, *index).owner == number);
            if let Some(own) = owner.offer().instructions.as_deref().filter(|own| !own.trim().is_empty())
                && List::ALL.into_iter().any(sees)
            {
                words.push(format!("# {}\n{}", owner.settings().name, own.trim()));
            }
        }
        match words.is_empty() {
            true => String::new(),
            false => format!(r#","instructions":{}"#, message::quote(&words.join("\n\n"))),
        }
    }

    fn client_notified(&mut self, client: Client, said: &[u8], method: &str, params: &Params<'_>, now: Instant) {
        // A backend that parses it differently may take it for a request that no guard has checked.
        if !self.is_shared_server() && params.may_be_ambiguous() && message::ambiguous(said).is_some() {
            return self.refuse_client_notification(client, method);
        }
        let client_state = self.clients.get_mut(&client).expect("seen by the caller");
        match method {
            notification::INITIALIZED => {
                if let Handshake::Answered(version) = client_state.handshake {
                    client_state.handshake = Handshake::Done(version);
                    // Backends that were ready before this client ask for its roots when they get this notification.
                    if self.shared.is_some() {
                        self.release_early_requests(now);
                    } else if client_state.can("roots") && self.clients.only() == Some(client) {
                        let note = message::notification_line(notification::ROOTS_CHANGED, "");
                        self.tell_own_links(client, &note);
                    }
                }
            }
            notification::CANCELLED => {
                let Some(id) = params.request_id().and_then(|raw| Id::parse(raw.get())) else { return };
                // No request in flight has a longer id.
                if id.size() > REQUEST_ID_MAX && self.shared.is_none() {
                    return;
                }
                let reason = params.whole().and_then(|params| pick(params, ["reason"])).and_then(|[reason]| reason);
                self.client_cancelled(client, &id, reason, now);
            }
            notification::PROGRESS => self.server_request_progressed(client, said, params),
            WITHDRAW if self.settings.is_host => {
                if let Some(id) = params.request_id().and_then(|raw| Id::parse(raw.get())) {
                    self.call_withdrawn(client, &id, now);
                }
            }
            method if methods::is_for_own_backends(method) => {
                self.tell_own_links(client, &message::patch(said, &mut []));
            }
            _ if self.is_shared_server() => self.tell_shared_links(&message::patch(said, &mut [])),
            method => self.refuse_client_notification(client, method),
        }
    }

    /// Forwards a notification to the links that only this client uses.
    fn tell_own_links(&mut self, client: Client, note: &Bytes) {
        let is_alone = self.clients.only() == Some(client);
        let is_own = |link: &LinkState| {
            let is_for_it = link.sharing() == Sharing::Session(client) || is_alone;
            is_for_it && link.is_ready() && link.era() == Era::Handshake
        };
        let own = self.links_where(is_own);
        for serial in own {
            self.tell_link(serial, note.clone());
        }
    }

    /// Forwards a notification that MCP does not have to the shared server.
    fn tell_shared_links(&mut self, note: &Bytes) {
        for serial in self.links_where(LinkState::is_ready) {
            self.tell_link(serial, note.clone());
        }
    }

    fn client_cancelled(&mut self, client: Client, id: &Id, reason: Option<Raw<'_>>, now: Instant) {
        let of = |call: &Call| {
            !call.is_parked()
                && call.reply_to.as_ref().is_some_and(|reply_to| reply_to.client == client && reply_to.id == *id)
        };
        if let Some(key) = self.calls.keys_where(of).first() {
            return self.cancel(*key, reason, now);
        }
        let is_it = |reply_to: &ReplyTo| reply_to.client == client && reply_to.id == *id;
        if let Some(wait) = self.offer_waits.take_first(is_it) {
            return self.offer_wait_cancelled(wait);
        }
        if self.drop_task_lists(|reply_to| reply_to.client == client && reply_to.id == *id) {
            return;
        }
        self.unlisten(client, id, now);
    }
}

/// What a request of the stateless era declares in its `_meta`.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Declared {
    /// It gets no logs below this level.
    pub(super) level: Option<Level>,
    sampling: bool,
    elicitation: bool,
    roots: bool,
}

/// The capability that a client needs to be asked this.
pub(super) fn capability_for(method: &str) -> Option<&'static str> {
    match method {
        method::CREATE_MESSAGE => Some("sampling"),
        method::ELICIT => Some("elicitation"),
        method::ROOTS_LIST => Some("roots"),
        _ => None,
    }
}

impl Declared {
    /// Whether the client can be asked for anything.
    pub(super) fn can_be_asked(self) -> bool {
        self.sampling || self.elicitation || self.roots
    }

    /// Whether the client can be asked for this.
    pub(super) fn can(self, method: &str) -> bool {
        match capability_for(method) {
            Some("sampling") => self.sampling,
            Some("elicitation") => self.elicitation,
            Some("roots") => self.roots,
            _ => false,
        }
    }
}

type Wrong = (i32, String, Option<String>);

/// A request of the stateless era must declare its revision and the capabilities of its client.
fn check_meta(params: &Params<'_>, front: Front) -> Result<Declared, Wrong> {
    let members =
        params.meta().and_then(|meta| pick(meta, [meta::PROTOCOL_VERSION, meta::CLIENT_CAPABILITIES, meta::LOG_LEVEL]));
    let [version, capabilities, level] = members.unwrap_or_default();
    let Some(version) = version.and_then(Raw::text) else {
        let words = match front {
            Front::Request => format!("`_meta` lacks `{}`", meta::PROTOCOL_VERSION),
            _ => format!("say `initialize` first, or send `{}` in `_meta`", meta::PROTOCOL_VERSION),
        };
        return Err((-32602, words, None));
    };
    if version != revision::STATELESS {
        let words = format!("this revision of MCP is not supported: {}", messages::cut(&version, 40));
        let data = serde_json::json!({"supported": versions(), "requested": version});
        return Err((-32022, words, Some(data.to_string())));
    }
    let names = ["sampling", "elicitation", "roots"];
    let Some([sampling, elicitation, roots]) = capabilities.and_then(|raw| pick(raw, names)) else {
        return Err((-32602, format!("`_meta` lacks `{}`", meta::CLIENT_CAPABILITIES), None));
    };
    Ok(Declared {
        level: level.and_then(Raw::text).and_then(|level| Level::parse(&level)),
        sampling: sampling.is_some(),
        elicitation: elicitation.is_some(),
        roots: roots.is_some(),
    })
}

/// All revisions that the gateway speaks.
fn versions() -> serde_json::Value {
    std::iter::once(revision::STATELESS).chain(revision::HANDSHAKE).collect()
}

/// Line breaks in JSON as blanks.
fn one_line(text: &str) -> Box<str> {
    match text.contains(['\n', '\r']) {
        true => text.replace(['\n', '\r'], " ").into(),
        false => text.into(),
    }
}
