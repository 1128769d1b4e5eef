//! What backends ask of clients: sampling, elicitation, roots.
//!
//! Over HTTP the stream of a call says by itself whose question it carries. A link of its own belongs to one client, as do all links where one client on lines is alone; on a shared one a request can only be for the client whose calls it works on,
//! and if there are several, nobody can say which; calls that may be asked something are alone on a lent one. Toward a client of the stateless era, which cannot be asked anything, the
//! question is the answer to its call, and its next try brings the answers; the backend's call stays open meanwhile. The
//! other way round a stateless backend's question becomes requests to the client, and then our own next try.

use super::*;
use crate::{
    json::Raw,
    message::{self, Message, Params, RawId, patch, pick},
};

use calls::What;
use dispatch::Asked;
use words::Failure;

/// How long a backend's call waits for the next try of a client of the stateless era; then it is cancelled.
const PARK_MAX: Duration = Duration::from_secs(300);
/// How long after a backend's question it is waited for more of them, to put them all in one answer.
const ASK_TOGETHER: Duration = Duration::from_millis(20);
/// How long a call that was taken back or late is reckoned with: a backend that goes on with it may ask for it.
const GHOST_MAX: Duration = Duration::from_secs(30);
/// How often one call may ask its client for input; then it fails.
const ROUNDS_MAX: u32 = 16;
/// How many of them are kept of one link; then the oldest is forgotten.
const GHOSTS_MAX: usize = 64;
/// What our own `requestState` begins with.
const STATE_MARK: &str = "outlast.";

/// A request of a backend that waits for a client's answer.
#[derive(Debug)]
pub(super) struct Ask {
    pub client: Client,
    serial: u64,
    cause: Cause,
    token: Option<Box<str>>,
    back: Back,
}

/// What a question belongs to, and so when it is withdrawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// This call: the question ends with it.
    Call(u64),
    /// A call of this client on this link, and it is unknown which: the question ends when none of them is open.
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
    /// Into the next try of a call to a stateless backend, under this name, as JSON.
    Input { name: Box<str>, is_elicitation: bool },
}

/// A call that is over for us, and may not be for its backend.
#[derive(Debug)]
pub(super) struct Ghost {
    key: u64,
    client: Client,
    what: What,
    /// As clients see it: a tool's or prompt's name.
    shown: Option<Rc<str>>,
    until: Instant,
}

impl Connection {
    /// It may ask for a call that is over.
    pub fn is_haunted(&self, now: Instant) -> bool {
        self.ghosts.iter().any(|ghost| ghost.until > now)
    }

    /// What calls that are over were for, and the backend may still do.
    pub fn ghost_tools(&self, now: Instant) -> impl Iterator<Item = (What, Option<&str>)> {
        let alive = self.ghosts.iter().filter(move |ghost| ghost.until > now);
        alive.map(|ghost| (ghost.what, ghost.shown.as_deref()))
    }

    pub fn is_haunted_by_others(&self, client: Client, now: Instant) -> bool {
        self.ghosts.iter().any(|ghost| ghost.until > now && ghost.client != client)
    }
}

/// A call whose backend waits for its client's next try.
#[derive(Debug)]
pub(super) struct Parked {
    /// Nothing while the client is here and waits for the answer.
    state: Option<String>,
    pub who: Rc<Who>,
    /// What the client was asked: our names, and the backend's ids.
    given: Vec<(String, Box<str>)>,
    /// What came after.
    queued: Vec<(Box<str>, String)>,
    /// When that is put to the client.
    pub ask_at: Option<Instant>,
    /// The answer came while the client was away.
    answer: Option<Bytes>,
}

impl Parked {
    pub fn is_waiting(&self) -> bool {
        self.state.is_some()
    }
}

/// The answers to a stateless backend's question, until all are there.
#[derive(Debug)]
pub(super) struct Inputs {
    left: usize,
    /// As members of an object.
    responses: Vec<String>,
    state: Option<Box<str>>,
}

impl Gateway {
    /// A backend asks something.
    pub(super) fn link_asked(
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
        if method == "ping" {
            return self.tell_link(serial, message::line(format!(r#"{{"jsonrpc":"2.0","id":{raw},"result":{{}}}}"#)));
        }
        if self.links[&serial].era == Era::Stateless {
            let words = "a server of this revision asks nothing; answer with `input_required` instead";
            return self.tell_link(serial, message::error_line(&raw, -32601, words, None));
        }
        if let (Some(capability), Seat::Lent(_)) = (guests::capability_for(method), self.links[&serial].place.seat) {
            // There may be several that cannot be asked anything, and whose it is makes no difference then.
            let on_link = self.calls.values().filter(|call| call.link == Some(serial) && call.whom.is_some());
            let mut says = on_link.map(|call| call.says).peekable();
            if says.peek().is_some() && !says.any(|says| says.can(method)) {
                return self.tell_link(serial, message::error_line(&raw, -32601, &words::undeclared(capability), None));
            }
        }
        let Addressee { client, cause, stream } = match self.asked_client(serial, method, params, now) {
            Ok(found) => found,
            Err(words) => {
                let name = self.owner_name(self.links[&serial].link.backend);
                let note = format!("{name}: its `{}` was refused: {words}", words::cut(method, 60));
                self.note(note);
                return self.tell_link(serial, message::error_line(&raw, 7020, &words, None));
            }
        };
        if let Some(key) = stream
            && self.calls[&key].whom.as_ref().is_some_and(|whom| whom.era == Era::Stateless)
        {
            return self.park(key, serial, raw, method, params, now);
        }
        if !methods::is_asked_of_clients(method) && !self.forwards_unknown(client) {
            let words = format!("`{}` is not part of MCP and is not forwarded to this client", words::cut(method, 60));
            return self.tell_link(serial, message::error_line(&raw, -32601, &words, None));
        }
        let Some(guest) = self.guests.get_mut(&client) else { return };
        let words = match guests::capability_for(method).filter(|capability| !guest.can(capability)) {
            Some(capability) => Some(format!("the client that this is for does not support {capability}")),
            None if guest.asked >= ASKS_MAX => Some(format!("{ASKS_MAX} requests already wait for this client")),
            None => None,
        };
        if let Some(words) = words {
            return self.tell_link(serial, message::error_line(&raw, -32601, &words, None));
        }
        guest.asked += 1;
        let key = self.number();
        let number = key.to_string();
        let mut edits = vec![(id.place(said).expect("seen above"), number.as_str())];
        let mut token = None;
        if let Some([Some(theirs)]) = params.meta().and_then(|meta| pick(meta, ["progressToken"])) {
            edits.push((message::place(said, theirs), &number));
            token = Some(theirs.get().into());
        }
        let message = patch(said, &mut edits);
        let about = stream.and_then(|key| self.calls[&key].whom.as_ref()).map(|whom| whom.id.clone());
        self.asks.insert(key, Ask { client, serial, cause, token, back: Back::Link { id: parsed, raw } });
        self.delay_calls(serial, client, cause, Some(PARK_MAX), now);
        self.out.push(Action::TellClient { client, message, about, said: Said::Other });
    }

    /// A person may have to think about a question: the calls that it may belong to wait for that, within the hard bound.
    /// Without a time they have the usual one again, as after progress.
    fn delay_calls(&mut self, serial: u64, client: Client, cause: Cause, time: Option<Duration>, now: Instant) {
        for (key, call) in &mut self.calls {
            let may_be_it = match cause {
                Cause::Call(known) => known == *key,
                Cause::SomeCall => call.link == Some(serial) && call.is_of(client),
                Cause::NoCall => false,
            };
            if may_be_it && call.due.is_some() {
                let usual = self.owners.get(&call.place.backend).map(|owner| owner.settings.call_timeout);
                let due = now + time.or(usual).unwrap_or(PARK_MAX);
                call.due =
                    Some(if time.is_some() { call.due.max(Some(due)).unwrap_or(due) } else { due }.min(call.due_max));
            }
        }
        if let Some(due) = self.calls.values().filter_map(|call| call.due()).min() {
            self.wake_by(due);
        }
    }

    /// Whom a backend's request is for, and on behalf of which call.
    fn asked_client(&self, serial: u64, method: &str, params: &Params<'_>, now: Instant) -> Result<Addressee, String> {
        let connection = &self.links[&serial];
        let on_link = || self.calls.iter().filter(|(_, call)| call.link == Some(serial));
        let several = || {
            Err("calls of several clients are under way here or were just taken back, so nobody can tell whom this asks; \
                 set `children = \"per_session\"` for this backend"
                .to_owned())
        };
        if let Some(key) = self.said_for
            && let Some(whom) = &self.calls[&key].whom
        {
            return Ok(Addressee { client: whom.client, cause: Cause::Call(key), stream: Some(key) });
        }
        if let Seat::Session(client) = connection.place.seat {
            return Ok(self.addressed(serial, client, method, now));
        }
        // One that is about a task says itself whose it is.
        if let Some(client) = self.task_named_in(serial, params) {
            return Ok(Addressee { cause: Cause::NoCall, ..self.addressed(serial, client, method, now) });
        }
        let clients: BTreeSet<Client> = on_link().filter_map(|(_, call)| Some(call.whom.as_ref()?.client)).collect();
        match self.only_client().or(clients.first().copied()) {
            Some(client) => {
                let is_alone = clients.iter().all(|other| *other == client);
                if !is_alone || connection.is_haunted_by_others(client, now) {
                    return several();
                }
                // In the stateless era the question is the answer to one call, and must be to the right one.
                let is_one = |call: &Call| call.whom.as_ref().is_some_and(|whom| whom.era == Era::Stateless);
                let mut own = on_link().filter(|(_, call)| call.is_of(client));
                if own.next().is_some_and(|(_, call)| is_one(call))
                    && (own.next().is_some() || connection.is_haunted(now))
                {
                    return several();
                }
                Ok(self.addressed(serial, client, method, now))
            }
            None => {
                let hint = "set `children = \"per_session\"` for this backend if it asks outside of calls";
                Err(format!("no call is under way here, so there is nobody to ask; {hint}"))
            }
        }
    }

    /// A question for this client, which no stream attributes to a call. If exactly one call may have caused it, that one
    /// did; a call that was taken back may still be worked on, so it counts as one that may. Roots are the session's.
    fn addressed(&self, serial: u64, client: Client, method: &str, now: Instant) -> Addressee {
        let own = self.calls.iter().filter(|(_, call)| call.link == Some(serial) && call.is_of(client));
        let mut keys: Vec<u64> = own.map(|(key, _)| *key).collect();
        keys.sort_unstable();
        let is_own_link =
            matches!(self.links[&serial].place.seat, Seat::Session(_)) || self.only_client() == Some(client);
        let cause = match keys[..] {
            [] => Cause::NoCall,
            _ if is_own_link && method == "roots/list" => Cause::NoCall,
            [key] if !self.links[&serial].is_haunted(now) => Cause::Call(key),
            _ => Cause::SomeCall,
        };
        Addressee { client, cause, stream: keys.last().copied() }
    }

    /// A call was taken back or late. Its backend may still be at it, and its questions must not reach another's client.
    pub(super) fn haunt(&mut self, serial: u64, key: u64, call: &Call, now: Instant) {
        let (Some(connection), Some(whom)) = (self.links.get_mut(&serial), &call.whom) else { return };
        connection.ghosts.retain(|ghost| ghost.until > now);
        if connection.ghosts.len() >= GHOSTS_MAX {
            connection.ghosts.remove(0);
        }
        let (what, shown) = (call.what, call.shown.clone());
        connection.ghosts.push(Ghost { key, client: whom.client, what, shown, until: now + GHOST_MAX });
    }

    /// It was answered after all.
    pub(super) fn lay(&mut self, serial: u64, key: Option<u64>) {
        if let (Some(connection), Some(key)) = (self.links.get_mut(&serial), key) {
            connection.ghosts.retain(|ghost| ghost.key != key);
        }
    }

    /// A client answers a backend's request, or says something nobody asked for.
    pub(super) fn client_answered(&mut self, client: Client, said: &[u8], id: RawId<'_>, now: Instant) {
        let Some(Id::Integer(number)) = id.parse() else { return };
        let Ok(key) = u64::try_from(number) else { return };
        if self.asks.get(&key).is_none_or(|ask| ask.client != client) {
            return;
        }
        let ask = self.asks.remove(&key).expect("found above");
        self.ask_over(&ask);
        match ask.back {
            Back::Link { raw, .. } => {
                self.delay_calls(ask.serial, client, ask.cause, None, now);
                // Only these members: others might make it a request to a lenient backend.
                let Ok(Message::Response { result, error, .. }) = message::parse(said) else { return };
                let members = [("result", result), ("error", error)];
                let members: String =
                    members.iter().filter_map(|(name, raw)| Some(format!(r#","{name}":{}"#, (*raw)?.get()))).collect();
                let line = format!(r#"{{"jsonrpc":"2.0","id":{raw}{members}}}"#);
                self.tell_link(ask.serial, patch(line.as_bytes(), &mut []));
            }
            Back::Input { name, is_elicitation } => {
                let Ok(Message::Response { result, error, .. }) = message::parse(said) else { return };
                let result = match (result, error) {
                    (Some(result), None) => Ok(result.get().to_owned()),
                    // The only one of them that has a word for it.
                    (_, _) if is_elicitation => Ok(r#"{"action":"cancel"}"#.to_owned()),
                    (_, error) => Err(error.map_or_else(String::new, words::error_words)),
                };
                let Cause::Call(call) = ask.cause else { return };
                match result {
                    Ok(result) => self.input_given(call, format!("{name}:{result}"), now),
                    Err(words) => self.input_failed(call, &words, now),
                }
            }
        }
    }

    fn ask_over(&mut self, ask: &Ask) {
        if let Some(guest) = self.guests.get_mut(&ask.client) {
            guest.asked = guest.asked.saturating_sub(1);
        }
    }

    /// A client's progress on what a backend asked of it.
    pub(super) fn ask_progressed(&mut self, client: Client, said: &[u8], params: &Params<'_>) {
        let Some(token) = params.progress_token() else { return };
        let Some(ask) = token.get().parse().ok().and_then(|key: u64| self.asks.get(&key)) else { return };
        if let (true, Some(theirs)) = (ask.client == client, &ask.token) {
            let told = patch(said, &mut [(message::place(said, token), &**theirs)]);
            self.tell_link(ask.serial, told);
        }
    }

    /// A backend takes back what it asked, or ends what we asked of it.
    pub(super) fn link_cancelled(&mut self, serial: u64, params: &Params<'_>, now: Instant) {
        let Some(id) = params.request_id().and_then(|raw| Id::parse(raw.get())) else { return };
        let asked = self.asks.iter().find(|(_, ask)| {
            ask.serial == serial && matches!(&ask.back, Back::Link { id: theirs, .. } if *theirs == id)
        });
        if let Some((key, _)) = asked {
            let key = *key;
            return self.take_back(key, "the backend took it back");
        }
        let listen = self.links.get(&serial).and_then(|connection| connection.listen);
        if let (Some(listen), Id::Integer(number)) = (listen, id)
            && i128::from(listen) == number
        {
            self.calls.remove(&listen);
            self.listen_ended(serial, listen, true, now);
        }
    }

    /// The client need not answer this any more. It hears so on the stream of the call that the question came with, while
    /// that one is open.
    fn take_back(&mut self, key: u64, reason: &str) {
        let Some(ask) = self.asks.get(&key) else { return };
        let about = match ask.cause {
            Cause::Call(call) => self.calls.get(&call).and_then(|call| call.whom.as_ref()),
            Cause::SomeCall | Cause::NoCall => None,
        };
        let about = about.map(|whom| whom.id.clone());
        self.withdraw(key, reason, about);
    }

    fn withdraw(&mut self, key: u64, reason: &str, about: Option<Id>) {
        let Some(ask) = self.asks.remove(&key) else { return };
        self.ask_over(&ask);
        let message = message::line(format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{key},"reason":{}}}}}"#,
            message::quote(reason)
        ));
        if self.guests.contains_key(&ask.client) {
            self.out.push(Action::TellClient { client: ask.client, message, about, said: Said::Other });
        }
    }

    fn asks_where(&self, holds: impl Fn(&Ask) -> bool) -> Vec<u64> {
        let mut keys: Vec<u64> = self.asks.iter().filter(|(_, ask)| holds(ask)).map(|(key, _)| *key).collect();
        keys.sort_unstable();
        keys
    }

    /// A call is over and no longer in the table: what was asked on its behalf is withdrawn, and so is what may have been,
    /// if it was the client's last call on that link. The backend hears that. Questions of other calls stay open.
    pub(super) fn drop_asks_of(&mut self, key: u64, call: &Call, reason: &str) {
        let (Some(whom), false) = (&call.whom, self.asks.is_empty()) else { return };
        let may_be_its =
            |ask: &Ask| ask.cause == Cause::SomeCall && ask.client == whom.client && Some(ask.serial) == call.link;
        let is_last = self.asks.values().any(may_be_its)
            && !self
                .calls
                .iter()
                .any(|(other, open)| *other != key && open.link == call.link && open.is_of(whom.client));
        for ask in self.asks_where(|ask| ask.cause == Cause::Call(key) || is_last && may_be_its(ask)) {
            if let Back::Link { raw, .. } = &self.asks[&ask].back {
                let (serial, answer) = (self.asks[&ask].serial, message::error_line(raw, -32800, reason, None));
                self.tell_link(serial, answer);
            }
            self.withdraw(ask, reason, Some(whom.id.clone()));
        }
    }

    /// A link is gone, and with it whoever would hear the answer.
    pub(super) fn drop_asks_on(&mut self, serial: u64) {
        for key in self.asks_where(|ask| ask.serial == serial) {
            self.take_back(key, "the backend that asked went away");
        }
    }

    /// A client is gone: backends that wait for it hear so.
    pub(super) fn drop_asks_to(&mut self, client: Client) {
        for key in self.asks_where(|ask| ask.client == client) {
            let ask = self.asks.remove(&key).expect("listed above");
            if let Back::Link { raw, .. } = &ask.back {
                self.tell_link(ask.serial, message::error_line(raw, -32800, "the client that was asked left", None));
            }
        }
    }

    // ---- a backend of the handshake era, a client of the stateless era -------------------------

    /// What a backend asks becomes the answer to the client's call; the call stays open.
    fn park(&mut self, key: u64, serial: u64, raw: Box<str>, method: &str, params: &Params<'_>, now: Instant) {
        let call = self.calls.get_mut(&key).expect("found by the caller");
        let words = match guests::capability_for(method) {
            Some(capability) if !call.says.can(method) => Some(words::undeclared(capability)),
            Some(_) if matches!(call.what, What::Tool | What::Prompt | What::Read) => None,
            _ => Some("the client that this is for cannot be asked that".to_owned()),
        };
        if let Some(words) = words {
            return self.tell_link(serial, message::error_line(&raw, -32601, &words, None));
        }
        let asked = match params.whole() {
            Some(params) => format!(r#"{{"method":"{method}","params":{}}}"#, params.get()),
            None => format!(r#"{{"method":"{method}"}}"#),
        };
        let who = call.whom.as_ref().and_then(|whom| self.guests.get(&whom.client)).map(|guest| guest.who.clone());
        let parked = call.parked.get_or_insert_with(|| {
            let who = who.unwrap_or_else(|| Rc::new(Who { name: String::new(), role: None, profile: None }));
            Box::new(Parked { state: None, who, given: Vec::new(), queued: Vec::new(), ask_at: None, answer: None })
        });
        parked.queued.push((raw, asked));
        if parked.state.is_none() && parked.ask_at.is_none() {
            parked.ask_at = Some(now + ASK_TOGETHER);
            self.wake_by(now + ASK_TOGETHER);
        }
    }

    /// Answers the client with all that its backend asks by now.
    pub(super) fn ask_by_result(&mut self, key: u64, now: Instant) {
        let state = format!("{STATE_MARK}{:016x}{:016x}", self.chance(), self.chance());
        let Some(call) = self.calls.get_mut(&key) else { return };
        call.rounds += 1;
        if call.rounds > ROUNDS_MAX {
            return self.asked_too_often(key, now);
        }
        let Some(parked) = &mut call.parked else { return };
        let mut requests = Vec::new();
        parked.ask_at = None;
        parked.given.clear();
        for (index, (raw, asked)) in parked.queued.drain(..).enumerate() {
            let name = format!("ask{index}");
            requests.push(format!(r#""{name}":{asked}"#));
            parked.given.push((name, raw));
        }
        let result = format!(
            r#"{{"resultType":"input_required","inputRequests":{{{}}},"requestState":"{state}"}}"#,
            requests.join(",")
        );
        parked.state = Some(state);
        let due = (now + PARK_MAX).min(call.due_max);
        call.due = Some(due);
        let whom = call.whom.clone().expect("only clients' calls are parked");
        let result = if result.contains('\n') { result.replace(['\n', '\r'], " ") } else { result };
        self.answer_result(&whom, &result);
        self.wake_by(due);
    }

    pub(super) fn chance(&mut self) -> u64 {
        // Steele, Lea and Flood's splitmix64; whoever guesses a state still needs the same name.
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.seed ^ (self.seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Whether this is the next try of a call that waits for it.
    pub(super) fn resume_parked(&mut self, asked: &Asked<'_>, state: Raw<'_>, now: Instant) -> bool {
        let Some(state) = state.text().filter(|state| state.starts_with(STATE_MARK)) else { return false };
        let who = &self.guests[&asked.whom.client].who.name;
        let is_it = |call: &Call| {
            call.method == asked.method
                && call
                    .parked
                    .as_ref()
                    .is_some_and(|parked| parked.state.as_deref() == Some(state.as_str()) && parked.who.name == *who)
        };
        let Some(key) = self.calls.iter().find(|(_, call)| is_it(call)).map(|(key, _)| *key) else {
            let words = "nothing waits for this `requestState` any more: call again without it";
            self.unknown(asked, words.into(), None);
            return true;
        };
        let responses = asked.params.input_responses();
        let call = self.calls.get_mut(&key).expect("found above");
        call.whom = Some(asked.whom.clone());
        if let Some([Some(token)]) = asked.params.meta().and_then(|meta| pick(meta, ["progressToken"])) {
            call.token = Some(token.get().into());
        }
        let timeout = self.owners.get(&call.place.backend).map_or(PARK_MAX, |owner| owner.settings.call_timeout);
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
        self.wake_by(due);
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
            self.ask_by_result(key, now);
        }
        true
    }

    /// The answer to a call came while its client was away; its next try gets it.
    pub(super) fn keep_answer(&mut self, key: u64, message: &[u8], now: Instant) -> bool {
        let Some(call) = self.calls.get_mut(&key) else { return false };
        let Some(parked) = call.parked.as_mut().filter(|parked| parked.is_waiting()) else { return false };
        parked.answer = Some(Bytes::copy_from_slice(message));
        let serial = call.link.take();
        if let Some(serial) = serial {
            self.call_over(serial, now);
        }
        true
    }

    fn answer_parked(&mut self, call: &Call, message: &[u8], now: Instant) {
        let (Some(whom), Ok(Message::Response { id, result, error })) = (&call.whom, message::parse(message)) else {
            return;
        };
        let mut edits = Vec::new();
        edits.extend(id.place(message).map(|at| (at, &*whom.raw)));
        let added = result.and_then(|result| words::complete(message, result, call.what));
        edits.extend(added.as_ref().map(|(at, with)| (at.clone(), with.as_str())));
        let told = patch(message, &mut edits);
        let (said, outcome) = match error {
            Some(_) => (Said::Error, Outcome::Failed),
            None => (Said::Result, Outcome::Answered),
        };
        self.answer(whom, told, said);
        self.called(call, outcome, now);
    }

    // ---- a stateless backend, a client of the handshake era -------------------------------------

    /// If the answer is a question, the client is asked, and the call goes on.
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
                let [method, params] = pick(request, ["method", "params"]).unwrap_or_default();
                let method = method.and_then(Raw::text).unwrap_or_default();
                wanted.push((name.get().into(), method, params.map(|params| params.get().to_owned())));
            });
        }
        let Some(call) = self.calls.get_mut(&key) else { return false };
        let (serial, whom) = (call.link.expect("it was answered"), call.whom.clone().expect("a client's call"));
        call.rounds += 1;
        if call.rounds > ROUNDS_MAX {
            self.asked_too_often(key, now);
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
        let guest = &self.guests[&whom.client];
        let missing = wanted.iter().find(|(_, method, _)| {
            let capability = method.split('/').next().unwrap_or_default();
            !guest.can(capability)
        });
        if let Some((_, method, _)) = missing {
            let words =
                format!("the backend needs an answer to `{}`, which this client cannot give", words::cut(method, 60));
            self.input_failed(key, &words, now);
            return true;
        }
        for (name, method, params) in wanted {
            let ask = self.number();
            let params = params.map_or_else(String::new, |params| format!(r#","params":{params}"#));
            let line = format!(r#"{{"jsonrpc":"2.0","id":{ask},"method":{}{params}}}"#, message::quote(&method));
            let back = Back::Input { name, is_elicitation: method == "elicitation/create" };
            self.asks.insert(ask, Ask { client: whom.client, serial, cause: Cause::Call(key), token: None, back });
            if let Some(guest) = self.guests.get_mut(&whom.client) {
                guest.asked += 1;
            }
            let message = patch(line.as_bytes(), &mut []);
            self.out.push(Action::TellClient {
                client: whom.client,
                message,
                about: Some(whom.id.clone()),
                said: Said::Other,
            });
        }
        // A person may have to think; the hard bound holds.
        let call = self.calls.get_mut(&key).expect("found above");
        let due = (now + PARK_MAX).min(call.due_max);
        call.due = Some(due);
        self.wake_by(due);
        true
    }

    /// A backend that asks again and again would keep its call open for ever.
    fn asked_too_often(&mut self, key: u64, now: Instant) {
        if let Some(call) = self.calls.get_mut(&key)
            && let (Some(serial), Some(parked)) = (call.link, &mut call.parked)
        {
            // Of the handshake era: its call and its questions are still open there.
            for (raw, _) in mem::take(&mut parked.queued) {
                self.tell_link(serial, message::error_line(&raw, -32800, "it asked too often", None));
            }
            self.cancel_on(serial, key, "it asked too often");
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

    /// The client's answers are there: the backend is asked again, with them.
    fn try_again(&mut self, key: u64, now: Instant) {
        let Some(mut call) = self.calls.remove(&key) else { return };
        let Some(serial) = call.link else { return };
        self.call_over(serial, now);
        let inputs = call.inputs.take().expect("it waits for them");
        if let Some(failure) = self.refused_by_now(&call, now) {
            return self.fail(*call, failure, now);
        }
        let Some(message) = call.message.clone() else {
            let failure =
                Failure::unknown("the request was too large to be asked again with the client's answers".into());
            return self.fail(*call, failure, now);
        };
        let Ok(Message::Request { params, .. }) = message::parse(&message) else { return };
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
        let Ok(Message::Request { id, params, .. }) = message::parse(&again) else { return };
        match self.serving(call.place) {
            Some(serial) => {
                let key = self.number();
                self.calls.insert(key, call);
                self.forward(key, serial, &again, id, &params, now);
            }
            None => {
                call.message = None;
                call.due = None;
                let key = self.number();
                self.hold(key, call, &again, now);
            }
        }
    }

    fn input_failed(&mut self, key: u64, words: &str, now: Instant) {
        let Some(call) = self.calls.remove(&key) else { return };
        self.drop_asks_of(key, &call, "another answer that was needed cannot be given");
        if let Some(serial) = call.link {
            self.call_over(serial, now);
        }
        let failure = Failure::no_input(self.owner_name(call.place.backend), words);
        self.fail(*call, failure, now);
    }
}
