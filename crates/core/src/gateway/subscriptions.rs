//! What clients want to hear of unasked: changed resources, logs, and in the stateless era all of it by subscription.
//!
//! A backend is asked to watch a resource while anybody wants it watched; the old era asks for each, the new one for all
//! at once. Levels of logs are the client's own: a backend is told the lowest of them, and each client hears no more than
//! it wanted. A log message of a shared backend goes only to clients that may have caused it.

use super::*;
use crate::{
    json::Raw,
    message::{self, Params, patch, pick},
};

use dispatch::Asked;
use opening::Private;
use words::Failure;

const SUBSCRIPTION_ID: &str = "io.modelcontextprotocol/subscriptionId";
const FLAGS: [&str; 3] = ["toolsListChanged", "promptsListChanged", "resourcesListChanged"];
/// How long after a backend ended our subscription it is opened again.
const LISTEN_GAP: Duration = Duration::from_secs(30);
/// How many subscriptions one client may have open; one more is refused.
const LISTENS_MAX: usize = 64;

/// Of a log message, by severity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Level(u8);

const LEVELS: [&str; 8] = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"];

impl Level {
    pub fn parse(word: &str) -> Option<Level> {
        LEVELS.iter().position(|level| *level == word).map(|index| Level(index as u8))
    }

    pub fn word(self) -> &'static str {
        LEVELS[usize::from(self.0)]
    }
}

/// An open `subscriptions/listen`.
#[derive(Debug)]
pub(super) struct Listen {
    whom: Whom,
    wants: [bool; 3],
    pub uris: BTreeSet<String>,
}

impl Gateway {
    pub(super) fn level_asked(&mut self, asked: &Asked<'_>, now: Instant) {
        let level = asked.params.level().and_then(Raw::text);
        let Some(level) = level.as_deref().and_then(Level::parse) else {
            let words = format!("`level` must be one of {}", LEVELS.join(", "));
            return self.answer_error(&asked.whom, -32602, &words, None);
        };
        if let Some(guest) = self.guests.get_mut(&asked.whom.client) {
            guest.level = Some(level);
        }
        self.answer_result(&asked.whom, "{}");
        self.relevel(now);
    }

    /// Every backend hears the lowest level that anybody wants from it.
    pub(super) fn relevel(&mut self, now: Instant) {
        let mut serials: Vec<u64> = self.links.keys().copied().collect();
        serials.sort_unstable();
        for serial in serials {
            self.relevel_link(serial, now);
        }
    }

    pub(super) fn relevel_link(&mut self, serial: u64, now: Instant) {
        let connection = &self.links[&serial];
        if !connection.is_ready() || !connection.has.logging || connection.era == Era::Stateless {
            return;
        }
        let wanted = match connection.place.seat {
            Seat::Session(client) => self.guests.get(&client).and_then(|guest| guest.level),
            seat => {
                let is_theirs = !matches!(seat, Seat::Lent(_));
                let asked = self.guests.values().filter(|_| is_theirs).filter_map(|guest| guest.level);
                let called =
                    self.calls.values().filter(|call| call.link == Some(serial)).filter_map(|call| call.says.level);
                asked.chain(called).min()
            }
        };
        if let Some(level) = wanted.filter(|level| connection.level != Some(*level)) {
            self.links.get_mut(&serial).expect("seen above").level = Some(level);
            let params = words::member("level", level.word());
            self.ask_link(serial, Private::Told, "logging/setLevel", &params, Era::Handshake, now);
        }
    }

    /// A log message of a backend.
    ///
    /// On a link of its own a client hears everything. On a shared one the message goes to clients with an open call
    /// there, and of those only to the ones that may see every tool the backend may be working on: which of its calls
    /// the message is about is unknown. Where no call is open, it is dropped.
    pub(super) fn logged(&mut self, serial: u64, said: &[u8], params: &Params<'_>, now: Instant) {
        let connection = &self.links[&serial];
        let level = params.level().and_then(Raw::text).as_deref().and_then(Level::parse).unwrap_or(Level(7));
        let message = patch(said, &mut []);
        if let Seat::Session(client) = connection.place.seat {
            return self.tell_log(client, level, message, None);
        }
        let works_on: Vec<&Call> = self
            .calls
            .values()
            .map(|call| &**call)
            .filter(|call| call.link == Some(serial) && call.whom.is_some() && !call.is_parked())
            .collect();
        let works_on = match self.said_for.and_then(|key| self.calls.get(&key)).filter(|call| !call.is_parked()) {
            Some(call) => vec![&**call],
            None => works_on,
        };
        // In the stateless era a log belongs to the request it is written for, which can be seen if there is only one.
        if let [call] = works_on[..]
            && let Some(whom) = call.whom.as_ref().filter(|whom| whom.era == Era::Stateless)
        {
            if call.says.level.is_some_and(|wanted| wanted <= level) {
                let (client, about) = (whom.client, Some(whom.id.clone()));
                self.out.push(Action::TellClient { client, message, about, said: Said::Other });
            }
            return;
        }
        let owner = connection.link.backend;
        let callers: BTreeSet<Client> = works_on.iter().filter_map(|call| Some(call.whom.as_ref()?.client)).collect();
        if connection.era == Era::Stateless && callers.len() > 1 {
            return;
        }
        let about = match works_on[..] {
            [call] => call.whom.as_ref().map(|whom| whom.id.clone()),
            _ => None,
        };
        let is_attributed = self.said_for.is_some();
        let ghosts = || connection.ghost_tools(now).filter(|_| !is_attributed);
        let is_own = |client: &Client| connection.era == Era::Handshake && self.only_client() == Some(*client);
        let may_see_all = |view: &View| {
            let open = works_on.iter().map(|call| (call.what, call.shown.as_deref()));
            open.chain(ghosts()).all(|(what, shown)| self.sees_work(view, owner, what, shown))
        };
        let is_for = |client: &Client, guest: &Guest| {
            let view = &self.views[guest.view];
            guest.hears_changes()
                && view.is_open(owner)
                && (is_own(client) || callers.contains(client) && may_see_all(view))
        };
        let mut clients: Vec<Client> =
            self.guests.iter().filter(|(client, guest)| is_for(client, guest)).map(|(client, _)| *client).collect();
        clients.sort_unstable();
        for client in clients {
            self.tell_log(client, level, message.clone(), about.clone());
        }
    }

    /// Whether a client with this view may know that a backend works on this.
    fn sees_work(&self, view: &View, owner: u32, what: calls::What, shown: Option<&str>) -> bool {
        let kind = match what {
            calls::What::Tool => List::Tools,
            calls::What::Prompt => List::Prompts,
            _ => return view.is_open(owner),
        };
        // A name that left the catalogue meanwhile is nobody's to see.
        shown.and_then(|shown| self.catalogue.find(kind, shown)).is_some_and(|(index, _)| view.sees(kind, index))
    }

    fn tell_log(&mut self, client: Client, level: Level, message: Bytes, about: Option<Id>) {
        if self.guests.get(&client).is_some_and(|guest| guest.level.is_none_or(|wanted| wanted <= level)) {
            self.out.push(Action::TellClient { client, message, about, said: Said::Other });
        }
    }

    /// A notification that belongs to a call goes to the client it can only be for, if there is one.
    pub(super) fn pass_note(&mut self, serial: u64, said: &[u8], now: Instant) {
        let client = match self.links[&serial].place.seat {
            Seat::Session(client) => Some(client),
            _ => {
                let on_link = self.calls.values().filter(|call| call.link == Some(serial));
                let clients: BTreeSet<Client> = on_link.filter_map(|call| Some(call.whom.as_ref()?.client)).collect();
                let only = clients.first().copied().filter(|_| clients.len() == 1);
                // It may be about a call of another client that was just taken back.
                only.filter(|client| !self.links[&serial].is_haunted_by_others(*client, now))
            }
        };
        let known = self.said_for.and_then(|key| self.calls.get(&key)).and_then(|call| call.whom.as_ref());
        let client = known.map(|whom| whom.client).or(client);
        if let Some(client) = client.filter(|client| self.guests.contains_key(client)) {
            let newest = self
                .calls
                .iter()
                .filter(|(_, call)| call.link == Some(serial) && call.is_of(client))
                .max_by_key(|(key, _)| **key);
            let whom = known.or(newest.and_then(|(_, call)| call.whom.as_ref()));
            let about = whom.map(|whom| whom.id.clone());
            self.out.push(Action::TellClient { client, message: patch(said, &mut []), about, said: Said::Other });
        }
    }

    /// A client of the handshake era subscribes to a resource, or no longer.
    pub(super) fn watch_asked(&mut self, asked: &Asked<'_>, wanted: bool, now: Instant) {
        let Some(uri) = asked.params.uri().and_then(Raw::text) else {
            return self.unknown(asked, "`params` lacks `uri`".into(), None);
        };
        let owner = match self.resource_owner(asked.whom.client, &uri) {
            Ok(owner) => owner,
            Err(failure) => return self.refuse(&asked.whom, false, &failure),
        };
        if wanted && !self.can_watch(owner) {
            let name = self.owner_name(owner);
            let failure = Failure::method_unknown(format!("the backend `{name}` has no subscriptions"));
            return self.refuse(&asked.whom, false, &failure);
        }
        let guest = self.guests.get_mut(&asked.whom.client).expect("it just spoke");
        if wanted && guest.watches.len() >= SUBSCRIPTIONS_MAX {
            let failure = Failure::unknown(format!("{SUBSCRIPTIONS_MAX} resources are already subscribed to"));
            return self.refuse(&asked.whom, false, &failure);
        }
        match wanted {
            true => guest.watches.insert(uri),
            false => guest.watches.remove(&uri),
        };
        self.answer_result(&asked.whom, "{}");
        if wanted {
            self.wake_watcher(owner, &asked.whom, asked.says, now);
        }
        self.rewatch(now);
    }

    /// What is to be watched needs a process that watches it.
    fn wake_watcher(&mut self, owner: u32, whom: &Whom, says: Says, now: Instant) {
        let is_pool = matches!(self.owners[&owner].settings.children, Children::Pool(_));
        let place = match is_pool {
            true => Some(self.first_place(owner)),
            false => self.place_for(owner, whom, says, now).ok(),
        };
        place.into_iter().for_each(|place| self.wake_place(place, now));
    }

    fn can_watch(&self, owner: u32) -> bool {
        let capabilities = std::str::from_utf8(&self.owners[&owner].offer.capabilities).ok().and_then(Raw::parse);
        let resources = capabilities.and_then(|raw| pick(raw, ["resources"])).and_then(|[resources]| resources);
        let flag = resources.and_then(|raw| pick(raw, ["subscribe"])).and_then(|[flag]| flag);
        flag.is_some_and(|flag| flag.get() == "true")
    }

    /// Every link watches what its clients want watched, and nothing else.
    pub(super) fn rewatch(&mut self, now: Instant) {
        let mut serials: Vec<u64> = self.links.keys().copied().collect();
        serials.sort_unstable();
        for serial in serials {
            self.rewatch_link(serial, now);
        }
    }

    fn rewatch_link(&mut self, serial: u64, now: Instant) {
        let connection = &self.links[&serial];
        let (key, era) = (connection.place, connection.era);
        if !connection.is_ready() {
            return;
        }
        let is_first = key == self.first_place(key.backend);
        let per_session =
            self.owners.get(&key.backend).is_some_and(|owner| owner.settings.children == Children::PerSession);
        let mut wanted = BTreeSet::new();
        for (client, guest) in &self.guests {
            // Where clients have links of their own, what they watch is watched there.
            let is_theirs = match key.seat {
                Seat::Session(own) => own == *client,
                _ => is_first && !per_session,
            };
            let listened = guest.listens.iter().filter(|_| is_first).flat_map(|listen| &listen.uris);
            let watched = guest.watches.iter().filter(|_| is_theirs);
            for uri in watched.chain(listened) {
                if self.resource_owner(*client, uri).is_ok_and(|owner| owner == key.backend) {
                    wanted.insert(uri.clone());
                }
            }
        }
        let connection = self.links.get_mut(&serial).expect("seen above");
        let before = mem::replace(&mut connection.watched, wanted.clone());
        match era {
            Era::Handshake if connection.has.subscribe => {
                for (method, uris) in [
                    ("resources/subscribe", wanted.difference(&before)),
                    ("resources/unsubscribe", before.difference(&wanted)),
                ] {
                    for uri in uris {
                        self.ask_link(serial, Private::Told, method, &words::member("uri", uri), era, now);
                    }
                }
            }
            Era::Handshake => {}
            Era::Stateless => {
                let is_unheard = connection.listen.is_none() && connection.listen_again.is_none();
                if (before != wanted || is_unheard) && !connection.is_deaf && key.seat != Seat::Second {
                    self.listen_to(serial, &wanted, now);
                }
            }
        }
    }

    /// One subscription of ours for all that a stateless backend may say.
    fn listen_to(&mut self, serial: u64, uris: &BTreeSet<String>, now: Instant) {
        let uris = match uris.is_empty() {
            true => String::new(),
            false => format!(r#","resourceSubscriptions":{}"#, serde_json::json!(uris)),
        };
        let flags = FLAGS.map(|flag| format!(r#""{flag}":true"#)).join(",");
        let params = format!(r#""notifications":{{{flags}{uris}}}"#);
        let new = self.ask_link(serial, Private::Listen, "subscriptions/listen", &params, Era::Stateless, now);
        let connection = self.links.get_mut(&serial).expect("asked by the caller");
        connection.listen_again = None;
        // The old one goes when the new one is there, so that nothing falls between them.
        if let Some(old) = mem::replace(&mut connection.listen, new) {
            self.calls.remove(&old);
            self.cancel_on(serial, old, "replaced by another one");
        }
    }

    /// Our subscription is over, and worth another try or not.
    pub(super) fn listen_ended(&mut self, serial: u64, key: u64, again: bool, now: Instant) {
        let Some(connection) = self.links.get_mut(&serial).filter(|connection| connection.listen == Some(key)) else {
            return;
        };
        connection.listen = None;
        connection.is_deaf = !again;
        if again && connection.is_ready() {
            connection.listen_again = Some(now + LISTEN_GAP);
            self.wake_by(now + LISTEN_GAP);
        }
    }

    /// What changed while nobody listened has to be asked for.
    pub(super) fn listen_anew(&mut self, serial: u64, now: Instant) {
        let watched = self.links[&serial].watched.clone();
        self.listen_to(serial, &watched, now);
        for family in Family::ALL {
            self.refetch(serial, family, now);
        }
    }

    /// A new link is told what the last one knew.
    pub(super) fn restore(&mut self, serial: u64, now: Instant) {
        if self.links.contains_key(&serial) {
            self.relevel_link(serial, now);
            self.rewatch_link(serial, now);
        }
    }

    /// A resource changed: those who watch it, or what it is a part of, hear so.
    pub(super) fn resource_updated(&mut self, serial: u64, said: &[u8], params: &Params<'_>) {
        let Some(uri) = params.uri().and_then(Raw::text) else { return };
        let connection = &self.links[&serial];
        let seat = connection.place.seat;
        let concerns = |uris: &BTreeSet<String>| {
            uris.contains(&uri)
                || uris.iter().any(|watched| {
                    connection.watched.contains(watched)
                        && uri
                            .strip_prefix(watched.as_str())
                            .is_some_and(|rest| rest.starts_with('/') || watched.ends_with('/'))
                })
        };
        let mut clients: Vec<Client> = Vec::new();
        let mut listens: Vec<Whom> = Vec::new();
        for (client, guest) in &self.guests {
            let is_theirs = !matches!(seat, Seat::Session(own) if own != *client);
            if is_theirs && concerns(&guest.watches) {
                clients.push(*client);
            }
            listens
                .extend(guest.listens.iter().filter(|listen| concerns(&listen.uris)).map(|listen| listen.whom.clone()));
        }
        clients.sort_unstable();
        listens.sort_unstable_by_key(|whom| (whom.client, whom.raw.clone()));
        if !clients.is_empty() {
            // A backend of the stateless era speaks to our subscription; the client has none.
            let message = match params.meta().and_then(|meta| pick(meta, [SUBSCRIPTION_ID])) {
                Some([Some(_)]) => updated_line(&uri, None),
                _ => patch(said, &mut []),
            };
            for client in clients {
                self.out.push(Action::TellClient { client, message: message.clone(), about: None, said: Said::Other });
            }
        }
        for whom in listens {
            let message = updated_line(&uri, Some(&whom.raw));
            self.out.push(Action::TellClient { client: whom.client, message, about: Some(whom.id), said: Said::Other });
        }
    }

    /// A client of the stateless era subscribes. It stays open; the first word is what it will hear of.
    pub(super) fn listen_asked(&mut self, asked: &Asked<'_>, now: Instant) {
        let Some(filter) = asked.params.notifications() else {
            return self.unknown(asked, "`params` lacks `notifications`".into(), None);
        };
        let flags = pick(filter, FLAGS).unwrap_or_default();
        let wants = flags.map(|flag| flag.is_some_and(|flag| flag.get() == "true"));
        // One more than is allowed is enough to refuse it.
        let uris =
            pick(filter, ["resourceSubscriptions"]).and_then(|[uris]| uris?.first_elements(SUBSCRIPTIONS_MAX + 1));
        let (uris, _) = uris.unwrap_or_default();
        let uris: BTreeSet<String> = uris.into_iter().filter_map(Raw::text).take(SUBSCRIPTIONS_MAX).collect();
        let granted: BTreeSet<String> = uris
            .into_iter()
            .filter(|uri| self.resource_owner(asked.whom.client, uri).is_ok_and(|owner| self.can_watch(owner)))
            .collect();
        let whom = asked.whom.clone();
        let guest = self.guests.get_mut(&whom.client).expect("it just spoke");
        if guest.listens.len() >= LISTENS_MAX {
            let failure = Failure::unknown(format!("{LISTENS_MAX} subscriptions are already open"));
            return self.refuse(&whom, false, &failure);
        }
        let mut words: Vec<String> =
            FLAGS.iter().zip(wants).filter(|(_, wants)| *wants).map(|(flag, _)| format!(r#""{flag}":true"#)).collect();
        if !granted.is_empty() {
            words.push(format!(r#""resourceSubscriptions":{}"#, serde_json::json!(granted)));
        }
        let message = message::line(format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{{"_meta":{{"{SUBSCRIPTION_ID}":{}}},"notifications":{{{}}}}}}}"#,
            whom.raw,
            words.join(",")
        ));
        let has_uris = !granted.is_empty();
        guest.listens.push(Listen { whom: whom.clone(), wants, uris: granted });
        self.out.push(Action::TellClient { client: whom.client, message, about: Some(whom.id), said: Said::Other });
        if has_uris {
            self.rewatch(now);
        }
    }

    /// A client takes a subscription back.
    pub(super) fn unlisten(&mut self, client: Client, id: &Id, now: Instant) {
        let Some(guest) = self.guests.get_mut(&client) else { return };
        let Some(index) = guest.listens.iter().position(|listen| listen.whom.id == *id) else { return };
        let listen = guest.listens.remove(index);
        self.forget(&listen.whom);
        if !listen.uris.is_empty() {
            self.rewatch(now);
        }
    }

    /// The gateway ends, and with it every subscription, in order.
    pub(super) fn end_listens(&mut self) {
        let mut ended: Vec<Listen> = self.guests.values_mut().flat_map(|guest| mem::take(&mut guest.listens)).collect();
        ended.sort_unstable_by_key(|listen| (listen.whom.client, listen.whom.raw.clone()));
        for listen in ended {
            let result = format!(r#"{{"resultType":"complete","_meta":{{"{SUBSCRIPTION_ID}":{}}}}}"#, listen.whom.raw);
            self.answer_result(&listen.whom, &result);
        }
    }

    pub(super) fn announce_to_listens(&mut self, client: Client, family: Family) {
        let listens = self.guests.get(&client).map(|guest| guest.listens.iter()).into_iter().flatten();
        let whoms: Vec<Whom> =
            listens.filter(|listen| listen.wants[family as usize]).map(|listen| listen.whom.clone()).collect();
        for whom in whoms {
            let message = message::line(format!(
                r#"{{"jsonrpc":"2.0","method":"{}","params":{{"_meta":{{"{SUBSCRIPTION_ID}":{}}}}}}}"#,
                family.method(),
                whom.raw
            ));
            self.out.push(Action::TellClient { client: whom.client, message, about: Some(whom.id), said: Said::Other });
        }
    }
}

fn updated_line(uri: &str, subscription: Option<&str>) -> Bytes {
    let meta = subscription.map_or_else(String::new, |id| format!(r#","_meta":{{"{SUBSCRIPTION_ID}":{id}}}"#));
    let uri = message::quote(uri);
    message::line(format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/resources/updated","params":{{"uri":{uri}{meta}}}}}"#
    ))
}

/// Whether an address may come of a template: what stands outside of its braces is there, in this order.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_fits_a_template_by_what_stands_outside_of_the_braces() {
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
    fn levels_rise() {
        let levels: Vec<Level> = LEVELS.iter().filter_map(|word| Level::parse(word)).collect();
        assert_eq!(levels.len(), LEVELS.len());
        assert!(levels.is_sorted());
        assert_eq!(Level::parse("loud"), None);
    }
}
