//! Subscriptions of clients: changed resources, log levels, and in the stateless era `subscriptions/listen`.
//! It does not read lists that changed; [`super::lists`] does.
//! A backend is asked to report a resource while a client is subscribed to it. It gets the lowest log level that a
//! client wants, and each client gets only logs of its own level. A log message of a shared backend goes only to
//! clients that may have caused it.

use std::{
    collections::BTreeSet,
    mem,
    time::{Duration, Instant},
};

use bytes::Bytes;

use super::{
    Action, Children, Client, Era, Gateway, Said,
    calls::{Call, CallKind, ReplyTo},
    catalogue::View,
    clients::{ClientState, Declared},
    dispatch::ClientRequest,
    links::LinkState,
    messages,
    messages::Failure,
    opening::OwnRequest,
    saved::{SavedClientSubscriptions, SavedLinkSubscriptions, SavedListen, SavedListening},
    slots::Sharing,
    timers::Timer,
};
use crate::{
    front::record::SessionState,
    json::Raw,
    mcp::{Family, List, meta, method, notification},
    message,
    message::{Id, Params, patch, pick},
    saved::Moment,
};

/// How many resources one client may be subscribed to; one more is refused.
const SUBSCRIPTIONS_MAX: usize = 1024;
/// The longest address of a resource that a client can be subscribed to.
const WATCHED_URI_MAX: usize = 8 << 10;

const FLAGS: [&str; 3] = ["toolsListChanged", "promptsListChanged", "resourcesListChanged"];
/// How long after a backend ended the gateway's subscription it is opened again.
const LISTEN_GAP: Duration = Duration::from_secs(30);
/// How many subscriptions one client may have open; one more is refused.
const LISTENS_MAX: usize = 64;

/// The severity of a log message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Level(u8);

const LEVELS: [&str; 8] = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"];

impl Level {
    pub(super) fn parse(word: &str) -> Option<Level> {
        LEVELS.iter().position(|level| *level == word).map(|index| Level(index as u8))
    }

    pub(super) fn word(self) -> &'static str {
        LEVELS[usize::from(self.0)]
    }
}

/// What one client is subscribed to.
#[derive(Debug, Default)]
pub(super) struct ClientSubscriptions {
    /// It gets no logs below this level.
    level: Option<Level>,
    /// Resources, in the handshake era.
    watches: BTreeSet<String>,
    /// Open subscriptions of the stateless era.
    listens: Vec<Listen>,
}

/// An open `subscriptions/listen`.
#[derive(Debug)]
struct Listen {
    reply_to: ReplyTo,
    /// Which lists, in the order of [`FLAGS`].
    wants: [bool; 3],
    uris: BTreeSet<String>,
}

impl ClientSubscriptions {
    pub(super) fn level(&self) -> Option<Level> {
        self.level
    }

    pub(super) fn save(&self) -> SavedClientSubscriptions {
        let save = |listen: &Listen| SavedListen {
            id: listen.reply_to.id.clone(),
            raw: listen.reply_to.raw.to_string(),
            wants: listen.wants,
            uris: listen.uris.clone(),
        };
        SavedClientSubscriptions {
            level: self.level.map(|level| level.word().to_owned()),
            watches: self.watches.clone(),
            listens: self.listens.iter().map(save).collect(),
        }
    }

    pub(super) fn restore(saved: SavedClientSubscriptions, client: Client) -> ClientSubscriptions {
        let restore = |saved: SavedListen| {
            let SavedListen { id, raw, wants, uris } = saved;
            let reply_to = ReplyTo { client, id, raw: raw.into(), era: Era::Stateless, batch: None };
            Listen { reply_to, wants, uris }
        };
        ClientSubscriptions {
            level: saved.level.as_deref().and_then(Level::parse),
            watches: saved.watches,
            listens: saved.listens.into_iter().map(restore).collect(),
        }
    }

    /// How many subscriptions of the stateless era are open.
    pub(super) fn listens(&self) -> usize {
        self.listens.len()
    }

    /// It is subscribed to resources or lists.
    pub(super) fn is_watching(&self) -> bool {
        !self.watches.is_empty() || !self.listens.is_empty()
    }
}

/// What one link was asked to report.
#[derive(Debug, Default)]
pub(super) struct LinkSubscriptions {
    watched: BTreeSet<String>,
    listening: Listening,
    /// The log level that it was last given.
    level: Option<Level>,
}

/// The subscription of the gateway to all that a stateless backend reports.
#[derive(Debug, Default, PartialEq, Eq)]
enum Listening {
    #[default]
    Closed,
    Open(u64),
    /// The backend ended it.
    RetryAt(Instant),
    Unsupported,
}

impl LinkSubscriptions {
    pub(super) fn save(&self, now: Instant) -> SavedLinkSubscriptions {
        SavedLinkSubscriptions {
            watched: self.watched.clone(),
            listening: match self.listening {
                Listening::Closed => SavedListening::Closed,
                Listening::Open(key) => SavedListening::Open(key),
                Listening::RetryAt(at) => SavedListening::RetryAt(Moment::of(at, now)),
                Listening::Unsupported => SavedListening::Unsupported,
            },
            level: self.level.map(|level| level.word().to_owned()),
        }
    }

    pub(super) fn restore(saved: SavedLinkSubscriptions, now: Instant) -> LinkSubscriptions {
        LinkSubscriptions {
            watched: saved.watched,
            listening: match saved.listening {
                SavedListening::Closed => Listening::Closed,
                SavedListening::Open(key) => Listening::Open(key),
                SavedListening::RetryAt(at) => Listening::RetryAt(at.at(now)),
                SavedListening::Unsupported => Listening::Unsupported,
            },
            level: saved.level.as_deref().and_then(Level::parse),
        }
    }

    /// The stream of the subscription was not handed over: it is opened again at once.
    pub(super) fn open_again(&mut self, now: Instant) {
        if let Listening::Open(_) = self.listening {
            self.listening = Listening::RetryAt(now);
        }
    }

    pub(super) fn is_watching(&self) -> bool {
        !self.watched.is_empty()
    }

    /// The request that is the subscription.
    pub(super) fn listen(&self) -> Option<u64> {
        match self.listening {
            Listening::Open(key) => Some(key),
            Listening::Closed | Listening::RetryAt(_) | Listening::Unsupported => None,
        }
    }

    /// When the subscription is opened again.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        match self.listening {
            Listening::RetryAt(at) => Some(at),
            Listening::Closed | Listening::Open(_) | Listening::Unsupported => None,
        }
    }
}

impl Gateway {
    pub(super) fn log_level_requested(&mut self, request: &ClientRequest<'_>, now: Instant) {
        let level = request.params.level().and_then(Raw::text);
        let Some(level) = level.as_deref().and_then(Level::parse) else {
            let words = format!("`level` must be one of {}", LEVELS.join(", "));
            return self.answer_error(&request.reply_to, -32602, &words, None);
        };
        if let Some(client_state) = self.clients.get_mut(&request.reply_to.client) {
            client_state.subscriptions.level = Some(level);
        }
        self.answer_result(&request.reply_to, "{}");
        self.update_log_levels(now);
    }

    /// Gives every backend the lowest level that a client wants from it.
    pub(super) fn update_log_levels(&mut self, now: Instant) {
        for serial in self.links_where(|_| true) {
            self.update_log_level(serial, now);
        }
    }

    pub(super) fn update_log_level(&mut self, serial: u64, now: Instant) {
        let link_state = &self.links[&serial];
        if !link_state.is_ready() || !link_state.has().logging || link_state.era() == Era::Stateless {
            return;
        }
        let wanted = match link_state.sharing() {
            Sharing::Session(client) => {
                self.clients.get(&client).and_then(|client_state| client_state.subscriptions.level)
            }
            sharing => {
                let is_theirs = !matches!(sharing, Sharing::Borrowed(_));
                let asked = self
                    .clients
                    .values()
                    .filter(|_| is_theirs)
                    .filter_map(|client_state| client_state.subscriptions.level);
                let called = self.calls.on_link(serial).filter_map(|(_, call)| call.declared.level);
                asked.chain(called).min()
            }
        };
        if let Some(level) = wanted.filter(|level| link_state.subscriptions.level != Some(*level)) {
            self.links.get_mut(&serial).expect("seen above").subscriptions.level = Some(level);
            let params = messages::member("level", level.word());
            self.send_own_request(serial, OwnRequest::Told, method::SET_LEVEL, &params, Era::Handshake, now);
        }
    }

    /// A log message of a backend.
    ///
    /// On a link of its own a client gets every message. On a shared link the message goes to clients with a call in
    /// flight there, and only to those that may see every tool that the backend may be working on, because the call
    /// that it belongs to is unknown. Without a call in flight it is dropped.
    pub(super) fn logged(&mut self, serial: u64, said: &[u8], params: &Params<'_>, now: Instant) {
        let link_state = &self.links[&serial];
        let level = params.level().and_then(Raw::text).as_deref().and_then(Level::parse).unwrap_or(Level(7));
        let message = patch(said, &mut []);
        if let Sharing::Session(client) = link_state.sharing() {
            return self.tell_log(client, level, message, None);
        }
        let works_on: Vec<&Call> =
            match self.stream_call.and_then(|key| self.calls.get(&key)).filter(|call| !call.is_parked()) {
                Some(call) => vec![call],
                None => {
                    let on_link = self.calls.on_link(serial).map(|(_, call)| call);
                    on_link.filter(|call| call.reply_to.is_some() && !call.is_parked()).collect()
                }
            };
        // In the stateless era a log belongs to one request, which is known if only one is in flight.
        if let [call] = works_on[..]
            && let Some(reply_to) = call.reply_to.as_ref().filter(|reply_to| reply_to.era == Era::Stateless)
        {
            if call.declared.level.is_some_and(|wanted| wanted <= level) {
                let (client, about) = (reply_to.client, Some(reply_to.id.clone()));
                self.out.push(Action::TellClient { client, message, about, said: Said::Other });
            }
            return;
        }
        let owner = link_state.id().backend;
        let callers: BTreeSet<Client> =
            works_on.iter().filter_map(|call| Some(call.reply_to.as_ref()?.client)).collect();
        if link_state.era() == Era::Stateless && callers.len() > 1 {
            return;
        }
        let about = match works_on[..] {
            [call] => call.reply_to.as_ref().map(|reply_to| reply_to.id.clone()),
            _ => None,
        };
        let is_attributed = self.stream_call.is_some();
        let abandoned = || link_state.abandoned.work(now).filter(|_| !is_attributed);
        let is_own = |client: Client| link_state.era() == Era::Handshake && self.clients.only() == Some(client);
        let may_see_all = |view: &View| {
            let open = works_on.iter().map(|call| (call.kind, call.shown.as_deref()));
            open.chain(abandoned()).all(|(kind, shown)| self.sees_work(view, owner, kind, shown))
        };
        let clients = self.clients.numbers_where(|client, client_state| {
            let view = self.catalogue.view(client_state.view());
            client_state.hears_changes()
                && view.is_open(owner)
                && (is_own(client) || callers.contains(&client) && may_see_all(view))
        });
        for client in clients {
            self.tell_log(client, level, message.clone(), about.clone());
        }
    }

    /// Whether a client with this view may know of this work.
    fn sees_work(&self, view: &View, owner: u32, kind: CallKind, shown: Option<&str>) -> bool {
        let kind = match kind {
            CallKind::Tool => List::Tools,
            CallKind::Prompt => List::Prompts,
            _ => return view.is_open(owner),
        };
        // A name that the catalogue no longer has is hidden.
        shown.and_then(|shown| self.catalogue.find(kind, shown)).is_some_and(|(index, _)| view.sees(kind, index))
    }

    fn tell_log(&mut self, client: Client, level: Level, message: Bytes, about: Option<Id>) {
        let Some(client_state) = self.clients.get(&client) else { return };
        if client_state.subscriptions.level.is_none_or(|wanted| wanted <= level) {
            self.out.push(Action::TellClient { client, message, about, said: Said::Other });
        }
    }

    /// Forwards a notification that belongs to a call, if only one client can have made that call.
    pub(super) fn forward_notification(&mut self, serial: u64, said: &[u8], now: Instant) {
        let client = match self.links[&serial].sharing() {
            Sharing::Session(client) => Some(client),
            _ => {
                let on_link = self.calls.on_link(serial);
                let clients: BTreeSet<Client> =
                    on_link.filter_map(|(_, call)| Some(call.reply_to.as_ref()?.client)).collect();
                let only = clients.first().copied().filter(|_| clients.len() == 1);
                // It may be about a call of another client that was cancelled a moment ago.
                only.filter(|client| !self.links[&serial].abandoned.has_of_others(*client, now))
            }
        };
        let known = self.stream_call.and_then(|key| self.calls.get(&key)).and_then(|call| call.reply_to.as_ref());
        let client = known.map(|reply_to| reply_to.client).or(client);
        if let Some(client) = client.filter(|client| self.clients.get(client).is_some()) {
            let newest = self.calls.on_link(serial).filter(|(_, call)| call.is_of(client)).max_by_key(|(key, _)| *key);
            let reply_to = known.or(newest.and_then(|(_, call)| call.reply_to.as_ref()));
            let about = reply_to.map(|reply_to| reply_to.id.clone());
            self.out.push(Action::TellClient { client, message: patch(said, &mut []), about, said: Said::Other });
        }
    }

    /// A client of the handshake era subscribes to a resource or ends a subscription.
    pub(super) fn watch_requested(&mut self, request: &ClientRequest<'_>, wanted: bool, now: Instant) {
        let Some(uri) = request.params.uri().and_then(Raw::text) else {
            return self.unknown(request, "`params` lacks `uri`".into(), None);
        };
        if uri.len() > WATCHED_URI_MAX {
            return self.unknown(request, format!("the `uri` is longer than {WATCHED_URI_MAX} bytes"), None);
        }
        let owner = match self.resource_owner(request.reply_to.client, &uri) {
            Ok(owner) => owner,
            Err(failure) => return self.refuse(&request.reply_to, false, &failure),
        };
        if wanted && !self.can_watch(owner) {
            let name = self.backends.name(owner);
            let failure = Failure::method_unknown(format!("the backend `{name}` has no subscriptions"));
            return self.refuse(&request.reply_to, false, &failure);
        }
        let client_state = self.clients.get_mut(&request.reply_to.client).expect("it just spoke");
        let watches = &mut client_state.subscriptions.watches;
        if wanted && watches.len() >= SUBSCRIPTIONS_MAX {
            let failure = Failure::unknown(format!("{SUBSCRIPTIONS_MAX} resources are already subscribed to"));
            return self.refuse(&request.reply_to, false, &failure);
        }
        match wanted {
            true => watches.insert(uri.clone()),
            false => watches.remove(&uri),
        };
        self.answer_result(&request.reply_to, "{}");
        if wanted {
            self.wake_watcher(owner, &request.reply_to, request.declared, now);
        }
        self.update_watch(&uri, now);
    }

    /// Starts the process that is to report a resource.
    fn wake_watcher(&mut self, owner: u32, reply_to: &ReplyTo, declared: Declared, now: Instant) {
        let is_pool = matches!(self.backends[&owner].settings().children, Children::Pool(_));
        let slot = match is_pool {
            true => Some(self.first_slot(owner)),
            false => self.slot_for(owner, reply_to, declared, now).ok(),
        };
        slot.into_iter().for_each(|slot| self.wake_slot(slot, now));
    }

    /// The log level and the resources of a client that continues after a restart of the gateway.
    pub(super) fn restore_client_subscriptions(&mut self, client: Client, state: &SessionState, now: Instant) {
        let Some(client_state) = self.clients.get_mut(&client) else { return };
        let subscriptions = &mut client_state.subscriptions;
        subscriptions.level = state.level.as_deref().and_then(Level::parse);
        subscriptions.watches = state.watches.iter().take(SUBSCRIPTIONS_MAX).map(|uri| uri.to_string()).collect();
        if state.level.is_some() {
            self.update_log_levels(now);
        }
        if state.watches.is_empty() {
            return;
        }
        let reply_to = ReplyTo { client, id: Id::Integer(0), raw: "0".into(), era: Era::Handshake, batch: None };
        let owners: BTreeSet<u32> =
            state.watches.iter().filter_map(|uri| self.resource_owner(client, uri).ok()).collect();
        for owner in owners {
            self.wake_watcher(owner, &reply_to, Declared::default(), now);
        }
        self.update_watches(now);
    }

    fn can_watch(&self, owner: u32) -> bool {
        let resources = self.backends[&owner].capability("resources");
        let flag = resources.and_then(|raw| pick(raw, ["subscribe"])).and_then(|[flag]| flag);
        flag.is_some_and(|flag| flag.get() == "true")
    }

    /// Makes every link report the resources that its clients are subscribed to, and no others.
    pub(super) fn update_watches(&mut self, now: Instant) {
        for serial in self.links_where(|_| true) {
            self.update_link_watches(serial, now);
        }
    }

    /// The same for one resource, in a time that does not depend on how many others are subscribed to.
    fn update_watch(&mut self, uri: &str, now: Instant) {
        for serial in self.links_where(LinkState::is_ready) {
            let is_wanted = self.is_watched_on(serial, uri);
            let link_state = self.links.get_mut(&serial).expect("listed above");
            let (era, has_subscribe) = (link_state.era(), link_state.has().subscribe);
            let is_for_handshake = link_state.slot().sharing == Sharing::Handshake;
            let subscriptions = &mut link_state.subscriptions;
            let is_changed = match is_wanted {
                true => subscriptions.watched.insert(uri.to_owned()),
                false => subscriptions.watched.remove(uri),
            };
            let is_due = match (era, &subscriptions.listening) {
                (Era::Handshake, _) => is_changed && has_subscribe,
                (Era::Stateless, Listening::Closed) => !is_for_handshake,
                (Era::Stateless, Listening::Open(_) | Listening::RetryAt(_)) => is_changed && !is_for_handshake,
                (Era::Stateless, Listening::Unsupported) => false,
            };
            match era {
                _ if !is_due => {}
                Era::Handshake => {
                    let method = if is_wanted { method::SUBSCRIBE } else { method::UNSUBSCRIBE };
                    self.send_own_request(serial, OwnRequest::Told, method, &messages::member("uri", uri), era, now);
                }
                Era::Stateless => {
                    let watched = subscriptions.watched.clone();
                    self.listen_to(serial, &watched, now);
                }
            }
        }
    }

    /// Whether a client that this link reports to is subscribed to a resource of its backend.
    fn is_watched_on(&self, serial: u64, uri: &str) -> bool {
        let key = self.links[&serial].slot();
        let is_first = key == self.first_slot(key.backend);
        let per_session =
            self.backends.get(&key.backend).is_some_and(|backend| backend.settings().children == Children::PerSession);
        // Clients with the same view have the same owner for it.
        let mut views: Vec<(usize, bool)> = Vec::new();
        self.clients.iter().any(|(client, client_state)| {
            let ClientSubscriptions { watches, listens, .. } = &client_state.subscriptions;
            let is_theirs = match key.sharing {
                Sharing::Session(own) => own == *client,
                _ => is_first && !per_session,
            };
            let is_subscribed = is_theirs && watches.contains(uri)
                || is_first && listens.iter().any(|listen| listen.uris.contains(uri));
            if !is_subscribed {
                return false;
            }
            let view = client_state.view();
            if let Some((_, is_owner)) = views.iter().find(|(known, _)| *known == view) {
                return *is_owner;
            }
            let is_owner = self.resource_owner(*client, uri).is_ok_and(|owner| owner == key.backend);
            views.push((view, is_owner));
            is_owner
        })
    }

    fn update_link_watches(&mut self, serial: u64, now: Instant) {
        let link_state = &self.links[&serial];
        let (key, era) = (link_state.slot(), link_state.era());
        if !link_state.is_ready() {
            return;
        }
        let is_first = key == self.first_slot(key.backend);
        let per_session =
            self.backends.get(&key.backend).is_some_and(|backend| backend.settings().children == Children::PerSession);
        let mut wanted = BTreeSet::new();
        for (client, client_state) in self.clients.iter() {
            let ClientSubscriptions { watches, listens, .. } = &client_state.subscriptions;
            // Clients with links of their own watch resources there.
            let is_theirs = match key.sharing {
                Sharing::Session(own) => own == *client,
                _ => is_first && !per_session,
            };
            let listened = listens.iter().filter(|_| is_first).flat_map(|listen| &listen.uris);
            for uri in watches.iter().filter(|_| is_theirs).chain(listened) {
                if self.resource_owner(*client, uri).is_ok_and(|owner| owner == key.backend) {
                    wanted.insert(uri.clone());
                }
            }
        }
        let link_state = self.links.get_mut(&serial).expect("seen above");
        let has_subscribe = link_state.has().subscribe;
        let subscriptions = &mut link_state.subscriptions;
        let before = mem::replace(&mut subscriptions.watched, wanted.clone());
        match era {
            Era::Handshake if has_subscribe => {
                for (method, uris) in
                    [(method::SUBSCRIBE, wanted.difference(&before)), (method::UNSUBSCRIBE, before.difference(&wanted))]
                {
                    for uri in uris {
                        self.send_own_request(
                            serial,
                            OwnRequest::Told,
                            method,
                            &messages::member("uri", uri),
                            era,
                            now,
                        );
                    }
                }
            }
            Era::Handshake => {}
            Era::Stateless => {
                let is_due = match subscriptions.listening {
                    Listening::Closed => true,
                    Listening::Open(_) | Listening::RetryAt(_) => before != wanted,
                    Listening::Unsupported => false,
                };
                if is_due && key.sharing != Sharing::Handshake {
                    self.listen_to(serial, &wanted, now);
                }
            }
        }
    }

    /// Opens one subscription for all that a stateless backend reports.
    fn listen_to(&mut self, serial: u64, uris: &BTreeSet<String>, now: Instant) {
        let uris = match uris.is_empty() {
            true => String::new(),
            false => format!(r#","resourceSubscriptions":{}"#, serde_json::json!(uris)),
        };
        let flags = FLAGS.map(|flag| format!(r#""{flag}":true"#)).join(",");
        let params = format!(r#""notifications":{{{flags}{uris}}}"#);
        let new = self.send_own_request(serial, OwnRequest::Listen, method::LISTEN, &params, Era::Stateless, now);
        let subscriptions = &mut self.links.get_mut(&serial).expect("asked by the caller").subscriptions;
        let old = subscriptions.listen();
        subscriptions.listening = new.map_or(Listening::Closed, Listening::Open);
        // The old one is cancelled after the new one was opened, so that no notification is lost between them.
        if let Some(old) = old {
            self.calls.remove(&old);
            self.cancel_on(serial, old, "replaced by another one");
        }
    }

    /// The subscription of the gateway ended. It is opened again later, unless the backend has no subscriptions.
    pub(super) fn listen_ended(&mut self, serial: u64, key: u64, again: bool, now: Instant) {
        let is_it = |link_state: &&mut LinkState| link_state.subscriptions.listen() == Some(key);
        let Some(link_state) = self.links.get_mut(&serial).filter(is_it) else { return };
        let is_ready = link_state.is_ready();
        link_state.subscriptions.listening = match again {
            true if is_ready => Listening::RetryAt(now + LISTEN_GAP),
            true => Listening::Closed,
            false => Listening::Unsupported,
        };
        if again && is_ready {
            self.timers.arm(Timer::Links, now + LISTEN_GAP);
        }
    }

    /// Subscribes again, and reads the lists, which may have changed while there was no subscription.
    pub(super) fn reopen_listen(&mut self, serial: u64, now: Instant) {
        let watched = self.links[&serial].subscriptions.watched.clone();
        self.listen_to(serial, &watched, now);
        for family in Family::ALL {
            self.refetch(serial, family, now);
        }
    }

    /// A new link gets the log level and the subscriptions.
    pub(super) fn restore_subscriptions(&mut self, serial: u64, now: Instant) {
        if self.links.contains_key(&serial) {
            self.update_log_level(serial, now);
            self.update_link_watches(serial, now);
        }
    }

    /// Reports a changed resource to clients that are subscribed to it or to a resource above it.
    pub(super) fn resource_updated(&mut self, serial: u64, said: &[u8], params: &Params<'_>) {
        let Some(uri) = params.uri().and_then(Raw::text) else { return };
        let link_state = &self.links[&serial];
        let sharing = link_state.sharing();
        let watched = &link_state.subscriptions.watched;
        // The resource itself, and those above it that are watched.
        let above = paths_above(&uri).filter(|above| watched.contains(*above));
        let concerned: Vec<&str> = [&*uri].into_iter().chain(above).collect();
        if concerned.len() == 1 && !watched.contains(&uri) {
            return;
        }
        let concerns = |uris: &BTreeSet<String>| concerned.iter().any(|known| uris.contains(*known));
        let mut clients: Vec<Client> = Vec::new();
        let mut listens: Vec<ReplyTo> = Vec::new();
        for (client, client_state) in self.clients.iter() {
            let subscriptions = &client_state.subscriptions;
            let is_theirs = !matches!(sharing, Sharing::Session(own) if own != *client);
            if is_theirs && concerns(&subscriptions.watches) {
                clients.push(*client);
            }
            let concerned = subscriptions.listens.iter().filter(|listen| concerns(&listen.uris));
            listens.extend(concerned.map(|listen| listen.reply_to.clone()));
        }
        clients.sort_unstable();
        listens.sort_unstable_by_key(|reply_to| (reply_to.client, reply_to.raw.clone()));
        if !clients.is_empty() {
            // The notification of a stateless backend names the gateway's subscription, which a client of the handshake
            // era does not have.
            let message = match params.meta().and_then(|meta| pick(meta, [meta::SUBSCRIPTION_ID])) {
                Some([Some(_)]) => updated_line(&uri, None),
                _ => patch(said, &mut []),
            };
            for client in clients {
                self.out.push(Action::TellClient { client, message: message.clone(), about: None, said: Said::Other });
            }
        }
        for reply_to in listens {
            let message = updated_line(&uri, Some(&reply_to.raw));
            self.out.push(Action::TellClient {
                client: reply_to.client,
                message,
                about: Some(reply_to.id),
                said: Said::Other,
            });
        }
    }

    /// A client of the stateless era subscribes. The request stays open; the first message says what was granted.
    pub(super) fn listen_requested(&mut self, request: &ClientRequest<'_>, now: Instant) {
        let Some(filter) = request.params.notifications() else {
            return self.unknown(request, "`params` lacks `notifications`".into(), None);
        };
        let flags = pick(filter, FLAGS).unwrap_or_default();
        let wants = flags.map(|flag| flag.is_some_and(|flag| flag.get() == "true"));
        // One more than is allowed, so that a longer list is noticed.
        let uris =
            pick(filter, ["resourceSubscriptions"]).and_then(|[uris]| uris?.first_elements(SUBSCRIPTIONS_MAX + 1));
        let (uris, _) = uris.unwrap_or_default();
        let uris = uris.into_iter().filter_map(Raw::text).take(SUBSCRIPTIONS_MAX);
        let uris: BTreeSet<String> = uris.filter(|uri| uri.len() <= WATCHED_URI_MAX).collect();
        let granted: BTreeSet<String> = uris
            .into_iter()
            .filter(|uri| self.resource_owner(request.reply_to.client, uri).is_ok_and(|owner| self.can_watch(owner)))
            .collect();
        let reply_to = request.reply_to.clone();
        let client_state = self.clients.get_mut(&reply_to.client).expect("it just spoke");
        let listens = &mut client_state.subscriptions.listens;
        if listens.len() >= LISTENS_MAX {
            let failure = Failure::unknown(format!("{LISTENS_MAX} subscriptions are already open"));
            return self.refuse(&reply_to, false, &failure);
        }
        let mut words: Vec<String> =
            FLAGS.iter().zip(wants).filter(|(_, wants)| *wants).map(|(flag, _)| format!(r#""{flag}":true"#)).collect();
        if !granted.is_empty() {
            words.push(format!(r#""resourceSubscriptions":{}"#, serde_json::json!(granted)));
        }
        let params = format!(r#"{},"notifications":{{{}}}"#, subscription_meta(&reply_to.raw), words.join(","));
        let message = message::notification_line(notification::ACKNOWLEDGED, &params);
        let has_uris = !granted.is_empty();
        listens.push(Listen { reply_to: reply_to.clone(), wants, uris: granted });
        self.out.push(Action::TellClient {
            client: reply_to.client,
            message,
            about: Some(reply_to.id),
            said: Said::Other,
        });
        if has_uris {
            self.update_watches(now);
        }
    }

    /// A client ends a subscription.
    pub(super) fn unlisten(&mut self, client: Client, id: &Id, now: Instant) {
        let Some(client_state) = self.clients.get_mut(&client) else { return };
        let listens = &mut client_state.subscriptions.listens;
        let Some(index) = listens.iter().position(|listen| listen.reply_to.id == *id) else { return };
        let listen = listens.remove(index);
        self.forget(&listen.reply_to);
        if !listen.uris.is_empty() {
            self.update_watches(now);
        }
    }

    /// The gateway stops: every subscription gets its result.
    pub(super) fn end_listens(&mut self) {
        self.end_listens_of(|_| true);
    }

    /// The same for those on connections of their own.
    pub(super) fn end_request_listens(&mut self) {
        self.end_listens_of(|client_state| !client_state.is_session());
    }

    fn end_listens_of(&mut self, is_it: impl Fn(&ClientState) -> bool) {
        let clients = self.clients.values_mut().filter(|client| is_it(client));
        let taken = clients.flat_map(|client| mem::take(&mut client.subscriptions.listens));
        let mut ended: Vec<Listen> = taken.collect();
        ended.sort_unstable_by_key(|listen| (listen.reply_to.client, listen.reply_to.raw.clone()));
        for listen in ended {
            let result = format!(r#"{{"resultType":"complete",{}}}"#, subscription_meta(&listen.reply_to.raw));
            self.answer_result(&listen.reply_to, &result);
        }
    }

    pub(super) fn announce_to_listens(&mut self, client: Client, family: Family) {
        let Some(client_state) = self.clients.get(&client) else { return };
        let listens = client_state.subscriptions.listens.iter().filter(|listen| listen.wants[family as usize]);
        for ReplyTo { client, id, raw, .. } in listens.map(|listen| &listen.reply_to) {
            let message = message::notification_line(family.method(), &subscription_meta(raw));
            let (client, about) = (*client, Some(id.clone()));
            self.out.push(Action::TellClient { client, message, about, said: Said::Other });
        }
    }
}

/// The member that names the subscription which a message belongs to, by the id of its request.
fn subscription_meta(id: &str) -> String {
    format!(r#""_meta":{{"{}":{id}}}"#, meta::SUBSCRIPTION_ID)
}

fn updated_line(uri: &str, subscription: Option<&str>) -> Bytes {
    let meta = subscription.map_or_else(String::new, |id| format!(",{}", subscription_meta(id)));
    message::notification_line(notification::RESOURCE_UPDATED, &format!(r#""uri":{}{meta}"#, message::quote(uri)))
}

/// Whether an address can be made from a template: the texts outside of its braces occur in it, in this order.
pub(super) fn fits_template(template: &str, uri: &str) -> bool {
    let mut parts = template.split('{').enumerate().map(|(index, part)| match index {
        0 => part,
        _ => part.split_once('}').map_or("", |(_, after)| after),
    });
    let Some(mut rest) = uri.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// How many levels above a changed resource are looked for among the subscriptions.
const LEVELS_MAX: usize = 64;

/// The addresses that a changed resource is below: each beginning that is followed by a slash, without and with it.
fn paths_above(uri: &str) -> impl Iterator<Item = &str> {
    let slashes = uri.bytes().enumerate().filter(|(_, byte)| *byte == b'/').map(|(at, _)| at);
    let levels = slashes.take_while(|at| *at < WATCHED_URI_MAX).take(LEVELS_MAX);
    levels.flat_map(|at| [&uri[..at], &uri[..=at]]).filter(move |above| above.len() < uri.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_above_a_resource_are_found_up_to_the_limit() {
        assert_eq!(paths_above("a://b/c").collect::<Vec<_>>(), ["a:", "a:/", "a:/", "a://", "a://b", "a://b/"]);
        assert_eq!(paths_above("a/").collect::<Vec<_>>(), ["a"]);
        let deep = "x/".repeat(LEVELS_MAX + 9);
        assert_eq!(paths_above(&deep).count(), 2 * LEVELS_MAX);
        assert_eq!(paths_above(&format!("{}/x", "x".repeat(WATCHED_URI_MAX))).count(), 0);
    }

    #[test]
    fn an_address_fits_a_template_by_the_text_outside_of_its_braces() {
        let table = [
            ("file:///{path}", "file:///a/b", true),
            ("file:///{path}", "http:///a", false),
            ("log://{day}/x", "log://monday/x", true),
            ("log://{day}/x", "log://monday/y", false),
            ("r://{a}/{b}.txt", "r://1/2.txt", true),
            ("r://{a}/{b}.txt", "r://12.txt", false),
            ("r://fixed", "r://fixed", true),
            ("r://fixed", "r://fixed/more", false),
            ("{any}", "what:ever", true),
            ("r://{broken", "r://x", true),
        ];
        for (template, uri, fits) in table {
            assert_eq!(fits_template(template, uri), fits, "{template} {uri}");
        }
    }

    #[test]
    fn log_levels_are_ordered() {
        let levels: Vec<Level> = LEVELS.iter().filter_map(|word| Level::parse(word)).collect();
        assert_eq!(levels.len(), LEVELS.len());
        assert!(levels.is_sorted());
        assert_eq!(Level::parse("loud"), None);
    }
}
