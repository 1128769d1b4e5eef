//! Clients: how each came, what it said first, and where its messages go from there.

use super::*;
use crate::{
    json::Raw,
    message::{self, Message, Params, RawId, pick},
};

use subscriptions::{Level, Listen};
use words::Failure;

/// Members of `_meta` that a request of the stateless era must or may have.
const VERSION_MEMBER: &str = "io.modelcontextprotocol/protocolVersion";
const CAPABILITIES_MEMBER: &str = "io.modelcontextprotocol/clientCapabilities";
const LEVEL_MEMBER: &str = "io.modelcontextprotocol/logLevel";

#[derive(Debug)]
pub(super) struct Guest {
    pub who: Rc<Who>,
    pub view: usize,
    front: Front,
    state: Opened,
    /// When its credentials expire or were revoked.
    allowed_until: Option<Instant>,
    /// As it wrote them in its handshake.
    pub capabilities: Option<Box<str>>,
    pub info: Option<Box<str>>,
    /// Requests of its that are not answered.
    pub in_flight: usize,
    /// Requests of backends that it has not answered.
    pub asked: usize,
    /// Logs below this are not for it.
    pub level: Option<Level>,
    pub watches: BTreeSet<String>,
    /// Open subscriptions of the stateless era.
    pub listens: Vec<Listen>,
}

/// How far a client's handshake has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Opened {
    Not,
    /// `initialize` was answered with that revision; `initialized` was not heard.
    Half(&'static str),
    Fully(&'static str),
}

impl Guest {
    /// The revision of its handshake.
    pub fn version(&self) -> Option<&'static str> {
        match self.state {
            Opened::Not => None,
            Opened::Half(version) | Opened::Fully(version) => Some(version),
        }
    }

    /// Whether its credentials are still valid.
    pub fn is_allowed(&self, now: Instant) -> bool {
        self.allowed_until.is_none_or(|until| now < until)
    }

    pub fn hears_changes(&self) -> bool {
        matches!(self.state, Opened::Fully(_))
    }

    /// Whether its handshake said that it can do this.
    pub fn can(&self, capability: &str) -> bool {
        let capabilities = self.capabilities.as_deref().and_then(Raw::parse);
        capabilities.and_then(|raw| pick(raw, [capability])).is_some_and(|[member]| member.is_some())
    }
}

impl Gateway {
    /// The client that has all of this to itself: the one on lines, while there is no other. What is shared is its own then.
    pub(super) fn only_client(&self) -> Option<Client> {
        let mut guests = self.guests.iter();
        match (guests.next(), guests.next()) {
            (Some((client, guest)), None) if guest.front == Front::Lines => Some(*client),
            _ => None,
        }
    }

    pub(super) fn client_came(&mut self, client: Client, front: Front, who: Who) {
        let view = self.view_of(&who);
        self.guests.insert(
            client,
            Guest {
                who: who.into(),
                view,
                front,
                state: Opened::Not,
                allowed_until: None,
                capabilities: None,
                info: None,
                in_flight: 0,
                asked: 0,
                level: None,
                watches: BTreeSet::new(),
                listens: Vec::new(),
            },
        );
    }

    pub(super) fn client_allowed(&mut self, client: Client, until: Option<Instant>) {
        if let Some(guest) = self.guests.get_mut(&client) {
            guest.allowed_until = until;
        }
    }

    pub(super) fn client_left(&mut self, client: Client, now: Instant) {
        let Some(guest) = self.guests.get(&client) else { return };
        let front = guest.front;
        if guest.asked > 0 {
            self.drop_asks_to(client);
        }
        if self.guests[&client].in_flight > 0 {
            self.drop_requests_of(client, now);
        }
        // A single request has none of what follows.
        if front != Front::Request {
            self.forget_tasks(client);
        }
        let guest = self.guests.remove(&client).expect("seen above");
        if !guest.watches.is_empty() || !guest.listens.is_empty() {
            self.rewatch(now);
        }
        if guest.level.is_some() {
            self.relevel(now);
        }
        if front != Front::Request {
            let own: Vec<PlaceKey> =
                self.places.keys().filter(|key| key.seat == Seat::Session(client)).copied().collect();
            for key in own {
                self.drop_place(key, &Failure::stopping(""), now);
            }
        }
    }

    /// Nobody waits for any of it any more.
    fn drop_requests_of(&mut self, client: Client, now: Instant) {
        let mut keys: Vec<u64> =
            self.calls.iter().filter(|(_, call)| call.is_of(client)).map(|(key, _)| *key).collect();
        keys.sort_unstable();
        for key in keys {
            // One that waits for the answers of a stateless client's next try has lost nothing yet.
            if !self.calls[&key].is_parked() {
                self.cancel(key, None, now);
            }
        }
        let (gone, waiting): (Vec<Gathering>, Vec<Gathering>) =
            mem::take(&mut self.gathering).into_iter().partition(|waiting| waiting.whom.client == client);
        self.gathering = waiting;
        for waiting in gone {
            self.waited_in_vain(waiting);
        }
        self.drop_task_lists(|whom| whom.client == client);
        self.batches.retain(|_, batch| batch.client != client);
    }

    pub(super) fn client_said(&mut self, client: Client, said: &[u8], now: Instant) {
        if !self.guests.contains_key(&client) {
            return;
        }
        match message::parse(said) {
            Ok(Message::Batch(members)) => self.client_batched(client, &members, now),
            Ok(message) => self.client_message(client, said, message, None, now),
            Err(unreadable) => {
                let message = unreadable.refusal();
                self.out.push(Action::TellClient { client, message, about: None, said: Said::Error });
            }
        }
    }

    pub(super) fn client_asked_by(&mut self, client: Client, said: &[u8], outline: &Outline, now: Instant) {
        if self.guests.contains_key(&client)
            && let Some(request) = outline.read(said)
        {
            self.client_message(client, said, request, None, now);
        }
    }

    fn client_message(&mut self, client: Client, said: &[u8], message: Message<'_>, batch: Option<u64>, now: Instant) {
        match message {
            Message::Request { id, method, params } => {
                self.client_asked(client, said, id, &method, &params, batch, now)
            }
            Message::Notification { method, params } => self.client_noted(client, said, &method, &params, now),
            Message::Response { id, .. } => self.client_answered(client, said, id, now),
            Message::Batch(_) | Message::Other => {
                let message = message::error_line("null", -32600, "this is no JSON-RPC message", None);
                match batch {
                    Some(batch) => self.batch_answered(batch, Some(message)),
                    None => self.out.push(Action::TellClient { client, message, about: None, said: Said::Error }),
                }
            }
        }
    }

    /// Batches are of one revision, and their answers come together. A client of another one gets an error.
    fn client_batched(&mut self, client: Client, members: &[Raw<'_>], now: Instant) {
        let guest = &self.guests[&client];
        let words = if guest.version().is_some_and(|version| version != "2025-03-26") || guest.front == Front::Request {
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
            .filter_map(|member| Some((member.get().as_bytes(), message::parse(member.get().as_bytes()).ok()?)))
            .collect();
        let owed =
            |message: &Message<'_>| matches!(message, Message::Request { .. } | Message::Other | Message::Batch(_));
        let left = parsed.iter().filter(|(_, message)| owed(message)).count();
        let about = parsed.iter().find_map(|(_, message)| match message {
            Message::Request { id, .. } => id.parse(),
            _ => None,
        });
        let key = self.number();
        if left > 0 {
            self.batches.insert(key, calls::Batch { client, about, left, answers: Vec::new() });
        }
        for (said, message) in parsed {
            self.client_message(client, said, message, Some(key), now);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "a request with all that is known of it")]
    fn client_asked(
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
        let raw = std::str::from_utf8(&said[at]).expect("parsed as text").into();
        let max = self.settings.limits.in_flight_max;
        let guest = self.guests.get_mut(&client).expect("seen by the caller");
        let mut whom = Whom { client, id: parsed, raw, era: Era::Handshake, batch };
        guest.in_flight += 1;
        if guest.in_flight > max {
            let failure = Failure::too_many(max);
            self.refuse(&whom, false, &failure);
            return self.count_refused(client, method, None, None, failure.outcome);
        }
        if method == "initialize" && guest.front != Front::Request {
            return self.initialize(&whom, params);
        }
        let mut says = Says::default();
        if guest.state == Opened::Not || guest.front == Front::Request {
            whom.era = Era::Stateless;
            if method == "ping" && guest.front != Front::Request {
                return self.answer_result(&whom, "{}");
            }
            match check_meta(params, guest.front) {
                Ok(said) => says = said,
                Err((code, words, data)) => return self.answer_error(&whom, code, &words, data.as_deref()),
            }
        }
        self.route(dispatch::Asked { whom, said, id, method, params, says }, now);
    }

    /// The handshake of a client; its backends had theirs.
    fn initialize(&mut self, whom: &Whom, params: &Params<'_>) {
        let wanted = params.protocol_version().and_then(Raw::text).unwrap_or_default();
        let version =
            HANDSHAKE_VERSIONS.into_iter().find(|version| *version == wanted).unwrap_or(HANDSHAKE_VERSIONS[0]);
        let capabilities = self.capabilities(Era::Handshake);
        let instructions = self.instructions(whom.client);
        let guest = self.guests.get_mut(&whom.client).expect("seen by the caller");
        guest.state = Opened::Half(version);
        guest.capabilities = params.capabilities().map(|raw| one_line(raw.get()));
        guest.info = params.client_info().map(|raw| one_line(raw.get()));
        let result = format!(
            r#"{{"protocolVersion":"{version}","capabilities":{capabilities},"serverInfo":{}{instructions}}}"#,
            words::info()
        );
        self.answer_result(whom, &result);
    }

    /// The same for the stateless era.
    pub(super) fn discover(&mut self, whom: &Whom) {
        let result = format!(
            r#"{{"supportedVersions":{},"capabilities":{}{}{}}}"#,
            versions(),
            self.capabilities(Era::Stateless),
            self.instructions(whom.client),
            self.freshness(),
        );
        self.answer_result(whom, &result);
    }

    /// All that any backend may ever have: a capability cannot be announced later.
    fn capabilities(&self, era: Era) -> String {
        let has_tasks = |owner: &Owner| {
            let text = std::str::from_utf8(&owner.offer.capabilities).ok().and_then(Raw::parse);
            text.and_then(|raw| pick(raw, ["tasks"])).is_some_and(|[tasks]| tasks.is_some())
        };
        let tasks = match era == Era::Handshake && self.owners.values().any(has_tasks) {
            true => r#","tasks":{"list":{},"cancel":{},"requests":{"tools":{"call":{}}}}"#,
            false => "",
        };
        format!(
            r#"{{"tools":{{"listChanged":true}},"prompts":{{"listChanged":true}},"resources":{{"listChanged":true,"subscribe":true}},"logging":{{}},"completions":{{}}{tasks}}}"#
        )
    }

    /// What the backends that a client sees tell about themselves.
    fn instructions(&self, client: Client) -> String {
        let view = &self.views[self.guests[&client].view];
        let mut words: Vec<String> = Vec::new();
        if view.search {
            words.push(search::INSTRUCTIONS.to_owned());
        }
        for number in &self.order {
            let Some(owner) = self.owners.get(number) else { continue };
            let sees =
                |kind: List| view.shows(kind).iter().any(|index| self.catalogue.entry(kind, *index).owner == *number);
            if let Some(own) = owner.offer.instructions.as_deref().filter(|own| !own.trim().is_empty())
                && List::ALL.into_iter().any(sees)
            {
                words.push(format!("# {}\n{}", owner.settings.name, own.trim()));
            }
        }
        match words.is_empty() {
            true => String::new(),
            false => format!(r#","instructions":{}"#, message::quote(&words.join("\n\n"))),
        }
    }

    fn client_noted(&mut self, client: Client, said: &[u8], method: &str, params: &Params<'_>, now: Instant) {
        // A backend that reads it otherwise may take it for a request that no guard has checked.
        if params.may_be_ambiguous() && message::ambiguous(said).is_some() {
            return self.refuse_note_of_client(client, method);
        }
        let guest = self.guests.get_mut(&client).expect("seen by the caller");
        match method {
            "notifications/initialized" => {
                if let Opened::Half(version) = guest.state {
                    guest.state = Opened::Fully(version);
                    // Backends came up before it did; those that want to know its roots ask when they hear this.
                    if guest.can("roots") && self.only_client() == Some(client) {
                        let note =
                            message::line(r#"{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}"#.into());
                        self.tell_own_links(client, &note);
                    }
                }
            }
            "notifications/cancelled" => {
                let Some(id) = params.request_id().and_then(|raw| Id::parse(raw.get())) else { return };
                let reason = params.whole().and_then(|params| pick(params, ["reason"])).and_then(|[reason]| reason);
                self.client_cancelled(client, &id, reason, now);
            }
            "notifications/progress" => self.ask_progressed(client, said, params),
            method if methods::is_for_own_backends(method) => {
                self.tell_own_links(client, &message::patch(said, &mut []));
            }
            method => self.refuse_note_of_client(client, method),
        }
    }

    /// What a client says to nobody in particular is for the links that are its own.
    fn tell_own_links(&mut self, client: Client, note: &Bytes) {
        let is_alone = self.only_client() == Some(client);
        let is_own = |link: &Connection| {
            let is_for_it = link.place.seat == Seat::Session(client) || is_alone;
            is_for_it && link.is_ready() && link.era == Era::Handshake
        };
        let mut own: Vec<u64> = self.links.iter().filter(|(_, link)| is_own(link)).map(|(serial, _)| *serial).collect();
        own.sort_unstable();
        for serial in own {
            self.tell_link(serial, note.clone());
        }
    }

    fn client_cancelled(&mut self, client: Client, id: &Id, reason: Option<Raw<'_>>, now: Instant) {
        let of = |call: &Call| {
            !call.is_parked() && call.whom.as_ref().is_some_and(|whom| whom.client == client && whom.id == *id)
        };
        if let Some(key) = self.calls.iter().filter(|(_, call)| of(call)).map(|(key, _)| *key).min() {
            return self.cancel(key, reason, now);
        }
        if let Some(index) =
            self.gathering.iter().position(|waiting| waiting.whom.client == client && waiting.whom.id == *id)
        {
            let waiting = self.gathering.remove(index);
            return self.waited_in_vain(waiting);
        }
        if self.drop_task_lists(|whom| whom.client == client && whom.id == *id) {
            return;
        }
        self.unlisten(client, id, now);
    }
}

/// What a request of the stateless era says of itself.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Says {
    /// The level down to which it wants logs.
    pub level: Option<Level>,
    sampling: bool,
    elicitation: bool,
    roots: bool,
}

/// What a client must be able to do to be asked this.
pub(super) fn capability_for(method: &str) -> Option<&'static str> {
    match method {
        "sampling/createMessage" => Some("sampling"),
        "elicitation/create" => Some("elicitation"),
        "roots/list" => Some("roots"),
        _ => None,
    }
}

impl Says {
    /// Whether its client can be asked anything.
    pub fn can_be_asked(self) -> bool {
        self.sampling || self.elicitation || self.roots
    }

    /// Whether its client can be asked this.
    pub fn can(self, method: &str) -> bool {
        match capability_for(method) {
            Some("sampling") => self.sampling,
            Some("elicitation") => self.elicitation,
            Some("roots") => self.roots,
            _ => false,
        }
    }
}

type Wrong = (i32, String, Option<String>);

/// It must say its revision and what its client can do.
fn check_meta(params: &Params<'_>, front: Front) -> Result<Says, Wrong> {
    let members = params.meta().and_then(|meta| pick(meta, [VERSION_MEMBER, CAPABILITIES_MEMBER, LEVEL_MEMBER]));
    let [version, capabilities, level] = members.unwrap_or_default();
    let Some(version) = version.and_then(Raw::text) else {
        let words = match front {
            Front::Request => format!("`_meta` lacks `{VERSION_MEMBER}`"),
            _ => format!("say `initialize` first, or send `{VERSION_MEMBER}` in `_meta`"),
        };
        return Err((-32602, words, None));
    };
    if version != STATELESS_VERSION {
        let words = format!("this revision of MCP is not supported: {}", words::cut(&version, 40));
        let data = serde_json::json!({"supported": versions(), "requested": version});
        return Err((-32022, words, Some(data.to_string())));
    }
    let names = ["sampling", "elicitation", "roots"];
    let Some([sampling, elicitation, roots]) = capabilities.and_then(|raw| pick(raw, names)) else {
        return Err((-32602, format!("`_meta` lacks `{CAPABILITIES_MEMBER}`"), None));
    };
    Ok(Says {
        level: level.and_then(Raw::text).and_then(|level| Level::parse(&level)),
        sampling: sampling.is_some(),
        elicitation: elicitation.is_some(),
        roots: roots.is_some(),
    })
}

/// Every revision that is spoken here, in whichever way it wants to be begun.
fn versions() -> serde_json::Value {
    std::iter::once(STATELESS_VERSION).chain(HANDSHAKE_VERSIONS).collect()
}

/// JSON that may have come over several lines.
fn one_line(text: &str) -> Box<str> {
    match text.contains(['\n', '\r']) {
        true => text.replace(['\n', '\r'], " ").into(),
        false => text.into(),
    }
}
