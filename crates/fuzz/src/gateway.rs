//! Target `gateway`: clients and links of both eras that send anything, and the promises of the gateway.
//!
//! The first line of a script chooses settings by letters, each further line is one event (see [`World::play`]). At
//! the end of the script the gateway is stopped, and each connected client must have its answers.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    time::{Duration, Instant},
};

use bytes::Bytes;
use outlast_core::{
    exit::{Exit, How},
    gateway::{
        Action, Backend, Children, EraChoice, Event, Fit, Front, Gateway, Kind, Limits, Link, Pattern, Placement,
        Profile, Rates, Refused, Role, Said, Schemas, Settings, Start, Switch, Who,
    },
    json::Raw,
    message::{self, Id, Outline},
    restarts::Policy,
};

use crate::{
    birth,
    json::{self, Top},
    relay::{Envelope, checked, halves, member},
    script,
};

/// A tag before the number of the client in each request of `q` and in its answer: messages of one client must not
/// reach another.
const TAG: &str = "Zq9#";
/// The tool that role `r` may not call, as clients see it; all of backend `b` is denied, too.
const DENIED: &str = "a__secret";
/// Switched off for all clients.
const SWITCHED_OFF: &str = "a__off";
const REST_MAX: u32 = 20_000;
/// How many bytes the gateway may send per event, and per received byte: a list can be requested in every event.
const SAID_PER_EVENT: usize = 64 << 10;
const SAID_PER_BYTE: usize = 8;

pub fn run(input: &[u8]) {
    let mut lines = script::lines(input);
    let mut world = World::new(lines.next().unwrap_or_default());
    world.happen(Event::TimePassed);
    for line in lines {
        if world.is_over {
            break;
        }
        world.play(line);
    }
    if world.leaves_first {
        world.check_nothing_is_kept();
    }
    world.stop();
}

struct AllFit;

impl Schemas for AllFit {
    fn check(&mut self, _schema: &[u8], _arguments: Raw<'_>) -> Option<Fit> {
        Some(Fit::Fits)
    }
}

fn backend(name: &str, letters: &[u8]) -> Backend {
    let has = |letter: u8| letters.contains(&letter);
    let kind = match name {
        "b" => Kind::Http { url: "http://b/".into(), headers: BTreeMap::new(), is_sse: false },
        _ => Kind::Stdio { command: name.into(), args: vec![], env: BTreeMap::new(), cwd: None, sandbox: None },
    };
    let is_stdio = matches!(kind, Kind::Stdio { .. });
    Backend {
        name: name.into(),
        kind,
        prefix: format!("{name}__"),
        allow: vec![],
        deny: vec![Pattern("hidden*".into())],
        children: match has(b'p') && is_stdio {
            true => Children::PerSession,
            false if has(b'o') && is_stdio => Children::Pool(2),
            false => Children::Shared,
        },
        children_max: 3,
        start: if has(b'l') { Start::Lazy } else { Start::Eager },
        placement: Placement::Every,
        inherit_env: false,
        era: match (has(b'h'), has(b's')) {
            (true, _) => EraChoice::Handshake,
            (_, true) => EraChoice::Stateless,
            _ => EraChoice::Auto,
        },
        policy: Policy { restarts_max: Some(3), ..Policy::exponential() },
        call_timeout: Duration::from_secs(5),
        call_max: Duration::from_secs(40),
        start_timeout: Duration::from_secs(5),
        idle_stop: has(b'i').then_some(Duration::from_secs(9)),
        memory_max: Some(1 << 20),
        breaker_failures: if has(b'k') { 2 } else { 0 },
        breaker_open: Duration::from_secs(10),
        retry_annotated: has(b'y'),
    }
}

fn settings(letters: &[u8]) -> Settings {
    let has = |letter: u8| letters.contains(&letter);
    let reader =
        Role { allow: vec![Pattern("a__*".into()), Pattern("call_tool".into())], deny: vec![Pattern(DENIED.into())] };
    let admin = Role { allow: vec![Pattern("*".into())], deny: vec![] };
    Settings {
        backends: vec![backend("a", letters), backend("b", letters)],
        profiles: [("search".to_owned(), Profile { search: true, ..Profile::default() })].into(),
        default_profile: has(b'f').then(|| "search".to_owned()),
        roles: [("r".to_owned(), reader), ("admin".to_owned(), admin)].into(),
        rates: Rates::default(),
        switched_off: vec![Switch::Tool(SWITCHED_OFF.into())],
        forward_unknown: has(b'u'),
        is_host: false,
        limits: Limits {
            hold: Duration::from_secs(3),
            held_max: 4,
            in_flight_max: 12,
            page: 3,
            retry_given_up: Duration::from_secs(60),
        },
    }
}

struct Client {
    number: u64,
    front: Front,
    role: &'static str,
    owed: HashMap<Id, Owed>,
    /// Its own requests, by their id as JSON, for cancelling.
    open: VecDeque<String>,
    next_id: u64,
    cancelled: HashSet<Id>,
    /// Requests of backends, by their id as JSON.
    questions: VecDeque<String>,
    has_batched: bool,
}

#[derive(Default)]
struct Owed {
    asked: usize,
    due: usize,
    answered: usize,
    /// The id as the client wrote it, each time.
    raw: HashSet<String>,
}

struct Connection {
    link: Link,
    is_up: bool,
    is_leaving: bool,
    inbox: VecDeque<Bytes>,
    /// Requests that it has read and not answered: the id as JSON, the method, the params, the tag.
    open: VecDeque<Work>,
    asked: HashMap<Id, usize>,
}

struct Work {
    id: String,
    method: String,
    params: String,
    tag: Option<String>,
    line: Bytes,
}

struct World {
    now: Instant,
    gateway: Gateway,
    letters: Vec<u8>,
    /// All clients have role `r`, so that raw lines can be checked as well.
    is_strict: bool,
    leaves_first: bool,
    clients: BTreeMap<u8, Client>,
    next_client: u64,
    connections: BTreeMap<u64, Connection>,
    tickets: HashSet<u64>,
    next_ticket: u64,
    is_stopping: bool,
    is_over: bool,
    /// Clients of a single request that have their answer.
    served: Vec<u64>,
    heard_bytes: usize,
    said_bytes: usize,
}

impl World {
    fn new(letters: &[u8]) -> World {
        World {
            now: birth(),
            gateway: Gateway::new(settings(letters), 7, BTreeMap::new(), Box::new(AllFit)),
            letters: letters.to_vec(),
            is_strict: letters.contains(&b'R'),
            leaves_first: letters.contains(&b'Q'),
            clients: BTreeMap::new(),
            next_client: 1,
            connections: BTreeMap::new(),
            tickets: HashSet::new(),
            next_ticket: 1,
            is_stopping: false,
            is_over: false,
            served: Vec::new(),
            heard_bytes: 0,
            said_bytes: 0,
        }
    }

    /// One line of the script: a kind, the digit of a client or of a link, and the rest.
    fn play(&mut self, line: &[u8]) {
        let (kind, rest) = script::split(line);
        let digit = rest.first().copied().unwrap_or(b'0');
        let text = rest.get(1..).unwrap_or_default();
        match kind {
            // A client connects by `S`ession, `L`ines or a `R`equest, as `a`dmin or not; it disconnects.
            b'+' => self.client_comes(digit, text),
            b'-' => self.client_leaves(digit),
            // The client sends a raw line, a request or notification (`method params`), its handshake, a
            // cancellation, an answer.
            b'c' => self.client_says(digit, text.to_vec()),
            b'q' => self.client_asks(digit, text),
            b'n' => {
                let (method, params) = halves(text);
                let start: &[u8] = b"{\"jsonrpc\":\"2.0\",\"method\":\"";
                self.client_says(digit, [start, method, b"\",\"params\":", params, b"}"].concat());
            }
            b'i' => {
                let params = r#"initialize {"protocolVersion":"2025-11-25","capabilities":{"elicitation":{},"sampling":{},"roots":{}},"clientInfo":{"name":"c","version":"1"}}"#;
                self.client_asks(digit, params.as_bytes());
                self.client_says(digit, br#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#.to_vec());
            }
            b'k' => {
                if let Some(id) = self.clients.get_mut(&digit).and_then(|client| client.open.pop_back()) {
                    let params = format!(r#"{{"requestId":{id}}}"#);
                    let line = format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{params}}}"#);
                    self.client_says(digit, line.into());
                }
            }
            b'y' => {
                if let Some(id) = self.clients.get_mut(&digit).and_then(|client| client.questions.pop_front()) {
                    let start: &[u8] = b"{\"jsonrpc\":\"2.0\",\"id\":";
                    self.client_says(digit, [start, id.as_bytes(), b",\"result\":", text, b"}"].concat());
                }
            }
            b'v' => {
                let until = (!text.is_empty()).then(|| self.now + Duration::from_millis(script::number(text)));
                if let Some(client) = self.clients.get(&digit).map(|client| client.number) {
                    self.happen(Event::ClientAllowed { client, until });
                }
            }
            // Links: connected or not, a raw line, answers, the answer of a correct server, the end.
            b'u' => self.connect(digit, true),
            b'U' => self.connect(digit, false),
            b's' => {
                if let Some(serial) = self.link(digit) {
                    self.link_says(serial, text.to_vec());
                }
            }
            b'a' | b'e' | b'.' => {
                let Some(serial) = self.link(digit) else { return };
                self.take(serial);
                if let Some(work) = self.connections.get_mut(&serial).and_then(|link| link.open.pop_front()) {
                    self.answer(serial, kind, &work, text);
                }
            }
            b'S' => {
                let Some(serial) = self.link(digit) else { return };
                self.take(serial);
                let link = &self.connections[&serial];
                if let Some(id) = link.open.back().and_then(|work| Id::parse(&work.id)) {
                    let link = link.link;
                    let message = self.note_link_line(serial, text.to_vec());
                    self.happen(Event::LinkSaidFor { link, id, message, walk: None });
                }
            }
            b'o' | b'O' => self.lose_request(digit, kind == b'O', text),
            b'x' => {
                if let Some(serial) = self.link(digit) {
                    let how = match text.first() {
                        Some(b'0') => How::Exited(Exit::Code(0)),
                        Some(b'9') => How::Exited(Exit::Signal(9)),
                        Some(b'l') => How::Lost("reset".into()),
                        Some(b'f') => How::Forgot("404".into()),
                        _ => How::Exited(Exit::Code(1)),
                    };
                    self.end(serial, how);
                }
            }
            b'm' => {
                if let Some(serial) = self.link(digit) {
                    let link = self.connections[&serial].link;
                    self.happen(Event::Measured { link, rss: script::number(text) });
                }
            }
            // Requests of the operator.
            b'r' => self.operate(|ticket| Event::RestartAsked { ticket, backend: named(&rest), reason: "why".into() }),
            b'R' => self.operate(|ticket| Event::ResumeAsked { ticket, backend: named(&rest) }),
            b'w' => {
                let name = String::from_utf8_lossy(text).into_owned();
                let what = if digit == b'B' { Switch::Backend(name) } else { Switch::Tool(name) };
                // The tool that the checks rely on stays off.
                let off = what == Switch::Tool(SWITCHED_OFF.into()) || text.len() % 2 == 0;
                self.operate(|ticket| Event::SwitchAsked { ticket, what, off });
            }
            b'C' => {
                let letters = [self.letters.as_slice(), &rest].concat();
                let mut settings = settings(&letters);
                if rest.contains(&b'1') {
                    settings.backends.truncate(1);
                }
                if rest.contains(&b'2') {
                    settings.backends[0].children_max = 7;
                    settings.backends[0].inherit_env = true;
                }
                self.happen(Event::Configured(Box::new(settings)));
                self.operate(|ticket| Event::OutcomeAsked { ticket });
            }
            b't' => self.pass(Duration::from_millis(script::number(&rest).min(100_000))),
            b'T' => {
                if let Some(due) = self.gateway.deadline() {
                    self.now = self.now.max(due);
                    self.happen(Event::TimePassed);
                }
            }
            _ => {}
        }
    }

    fn operate(&mut self, event: impl FnOnce(u64) -> Event) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.tickets.insert(ticket);
        self.happen(event(ticket));
    }

    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        for turn in 0.. {
            assert!(turn < REST_MAX, "time does not pass: {:?}", self.gateway.deadline());
            match self.gateway.deadline().filter(|due| *due <= end) {
                Some(due) => {
                    self.now = self.now.max(due);
                    self.happen(Event::TimePassed);
                }
                None => break,
            }
        }
        self.now = end;
    }

    // ---- clients --------------------------------------------------------------------------------

    fn client_comes(&mut self, digit: u8, text: &[u8]) {
        if self.clients.contains_key(&digit) || self.clients.len() >= 8 {
            return;
        }
        let front = match text.first() {
            Some(b'L') => Front::Lines,
            Some(b'R') => Front::Request,
            _ => Front::Session,
        };
        let role = if text.contains(&b'a') && !self.is_strict { "admin" } else { "r" };
        let number = self.next_client;
        self.next_client += 1;
        let client = Client {
            number,
            front,
            role,
            owed: HashMap::new(),
            open: VecDeque::new(),
            next_id: 1,
            cancelled: HashSet::new(),
            questions: VecDeque::new(),
            has_batched: false,
        };
        self.clients.insert(digit, client);
        let profile = text.contains(&b's').then(|| "search".to_owned());
        let who = Who { name: format!("who{}", digit % 3), role: Some(role.into()), profile };
        self.happen(Event::ClientCame { client: number, front, who });
    }

    fn client_leaves(&mut self, digit: u8) {
        if let Some(client) = self.clients.remove(&digit) {
            self.happen(Event::ClientLeft { client: client.number });
        }
    }

    fn client_asks(&mut self, digit: u8, text: &[u8]) {
        let Some(client) = self.clients.get_mut(&digit) else { return };
        let (method, params) = halves(text);
        let id = match client.next_id % 3 {
            0 => client.next_id.to_string(),
            1 => format!("\"{}\"", client.next_id),
            _ => format!("\"\\u00e9{}\"", client.next_id),
        };
        client.next_id += 1;
        client.open.push_back(id.clone());
        // The tag is for tools, prompts and resources, where it is forwarded.
        let tag = format!("\"tag\":\"{TAG}{}#\"", client.number);
        let params = match params.strip_prefix(b"{") {
            Some(b"}") => format!("{{{tag}}}").into_bytes(),
            Some(rest) => [b"{", tag.as_bytes(), b",", rest].concat(),
            None => params.to_vec(),
        };
        let start: &[u8] = b"{\"jsonrpc\":\"2.0\",\"id\":";
        let line = [start, id.as_bytes(), b",\"method\":\"", method, b"\",\"params\":", &params, b"}"].concat();
        self.client_says(digit, line);
    }

    fn client_says(&mut self, digit: u8, line: Vec<u8>) {
        let Some(client) = self.clients.get_mut(&digit) else { return };
        let (number, front) = (client.number, client.front);
        let message: Bytes = line.into();
        // The HTTP fronts have parsed it themselves, and on stdio a message is one line.
        let parsed = message::parse(&message).ok();
        let outline = parsed.as_ref().and_then(|request| Outline::of(&message, request));
        match front {
            Front::Lines if message.contains(&b'\n') => return,
            Front::Session if parsed.is_none() => return,
            Front::Request if outline.is_none() || !client.owed.is_empty() => return,
            _ => {}
        }
        self.heard_bytes += message.len();
        client.note(&message);
        self.happen(match outline.filter(|_| front != Front::Lines) {
            Some(outline) => Event::ClientRequested { client: number, message, outline },
            None => Event::ClientSaid { client: number, message },
        });
    }

    fn client_hears(&mut self, number: u64, line: &Bytes, about: Option<&Id>, said: Said) {
        self.said_bytes += line.len();
        let top = checked(line, "a client");
        let client = self.clients.values_mut().find(|client| client.number == number);
        let client = client.unwrap_or_else(|| panic!("client {number} is not there: {line:?}"));
        let text = std::str::from_utf8(line).unwrap_or_default();
        for (at, _) in text.match_indices(TAG) {
            let owner = script::number(&text.as_bytes()[at + TAG.len()..]);
            assert!(owner == number, "client {number} was told what is of client {owner}: {text}");
        }
        let texts = match top {
            Top::Object(_) => vec![text],
            Top::Array(elements) => elements,
            Top::Scalar => panic!("a client was told {text}"),
        };
        let count = texts.len();
        for text in texts {
            let Some(Top::Object(members)) = json::read(text.as_bytes()) else { panic!("a client was told {text}") };
            let message = Envelope::of(&members);
            if !message.is_answer() {
                if let (Some(id), Some(_)) = (message.ids.last(), message.method()) {
                    client.questions.push_back((*id).to_owned());
                }
                continue;
            }
            let Some(raw) = message.ids.last() else { panic!("an answer without an id: {text}") };
            let Some(id) = Id::parse(raw) else { continue };
            let owed = client.owed.get_mut(&id);
            let Some(owed) = owed else { panic!("client {number} never asked {id}: {text}") };
            owed.answered += 1;
            assert!(owed.answered <= owed.asked, "client {number} has had its answer to {id}: {text}");
            assert!(owed.raw.contains(*raw), "client {number} asked {:?} and was answered {raw}", owed.raw);
            if count == 1 {
                // On stdio there is one stream for everything.
                let is_about = about == Some(&id) || client.front == Front::Lines && about.is_none();
                assert!(is_about, "the answer to {id} is said to be about {about:?}");
                assert!(said != Said::Other, "an answer is said to be none: {text}");
                if client.front == Front::Request {
                    self.served.push(number);
                }
            }
        }
    }

    // ---- links ----------------------------------------------------------------------------------

    fn link(&self, digit: u8) -> Option<u64> {
        let up: Vec<u64> = self.connections.iter().filter(|(_, link)| link.is_up).map(|(serial, _)| *serial).collect();
        (!up.is_empty()).then(|| up[usize::from(digit) % up.len()])
    }

    /// A requested connection is made, or fails.
    fn connect(&mut self, digit: u8, goes_well: bool) {
        let down: Vec<u64> =
            self.connections.iter().filter(|(_, link)| !link.is_up).map(|(serial, _)| *serial).collect();
        if down.is_empty() {
            return;
        }
        let serial = down[usize::from(digit) % down.len()];
        match self.connections.get_mut(&serial) {
            Some(connection) if goes_well => {
                connection.is_up = true;
                let link = connection.link;
                self.happen(Event::LinkUp { link, pid: Some(serial as u32) });
            }
            _ => self.end(serial, How::CouldNotStart("no".into())),
        }
    }

    fn note_link_line(&mut self, serial: u64, line: Vec<u8>) -> Bytes {
        let mut line = line;
        line.retain(|byte| *byte != b'\n');
        self.heard_bytes += line.len();
        let connection = self.connections.get_mut(&serial).expect("chosen among those that are there");
        let bare = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&line);
        let texts = match json::read(bare) {
            Some(Top::Array(elements)) => elements,
            _ => vec![std::str::from_utf8(bare).unwrap_or_default()],
        };
        for text in texts {
            let Some(Top::Object(members)) = json::read(text.as_bytes()) else { continue };
            let message = Envelope::of(&members);
            if !message.is_answer() {
                let ids = message.ids.iter().filter_map(|id| Id::parse(id));
                ids.for_each(|id| *connection.asked.entry(id).or_default() += 1);
            }
        }
        line.into()
    }

    fn link_says(&mut self, serial: u64, line: Vec<u8>) {
        let message = self.note_link_line(serial, line);
        let link = self.connections[&serial].link;
        self.happen(Event::LinkSaid { link, message });
    }

    fn answer(&mut self, serial: u64, kind: u8, work: &Work, text: &[u8]) {
        let name: &[u8] = if kind == b'e' { b"error" } else { b"result" };
        let good = if kind == b'.' { good_answer(work).into_bytes() } else { text.to_vec() };
        // The answer has the tag of its request, if the result is an object.
        let payload = match (good.strip_prefix(b"{"), &work.tag) {
            (Some(b"}"), Some(tag)) => format!("{{\"tag\":\"{tag}\"}}").into_bytes(),
            (Some(rest), Some(tag)) => [format!("{{\"tag\":\"{tag}\",").as_bytes(), rest].concat(),
            _ => good,
        };
        let start: &[u8] = b"{\"jsonrpc\":\"2.0\",\"id\":";
        let line = [start, work.id.as_bytes(), b",\"", name, b"\":", &payload, b"}"].concat();
        self.link_says(serial, line);
    }

    fn lose_request(&mut self, digit: u8, is_refused: bool, text: &[u8]) {
        let Some(serial) = self.link(digit) else { return };
        self.take(serial);
        let Some(connection) = self.connections.get_mut(&serial) else { return };
        let link = connection.link;
        let Some(work) = connection.open.pop_front() else { return };
        let Some(id) = Id::parse(&work.id) else { return };
        if !is_refused {
            let was_sent = text.is_empty();
            return self.happen(Event::RequestLost { link, id, was_sent, why: "reset".into() });
        }
        let refused = Box::new(Refused {
            status: u16::try_from(script::number(text).clamp(400, 599)).unwrap_or(500),
            words: "it said no".into(),
            challenge: Some("Bearer".into()),
            body: Some(String::from_utf8_lossy(text).into_owned()),
            retry_after: text.contains(&b'+').then_some(Duration::from_secs(1)),
            line: work.line,
        });
        self.happen(Event::RequestRefused { link, id, refused });
    }

    fn link_is_told(&mut self, link: Link, line: Bytes) {
        self.said_bytes += line.len();
        let top = checked(&line, "a link");
        let connection = self.connections.get_mut(&link.serial);
        let connection = connection.unwrap_or_else(|| panic!("{link:?} is not there: {line:?}"));
        assert!(connection.is_up, "{link:?} is not connected: {line:?}");
        let Top::Object(members) = top else { panic!("a link was told {line:?}") };
        let message = Envelope::of(&members);
        if message.is_answer()
            && let Some(id) = message.ids.last().and_then(|id| Id::parse(id))
        {
            let asked = connection.asked.get_mut(&id).unwrap_or_else(|| panic!("{link:?} never asked {id}: {line:?}"));
            assert!(*asked > 0, "{id} of {link:?} was answered twice: {line:?}");
            *asked -= 1;
        }
        if let Some(method) = message.method() {
            self.check_guards(link, &method, &message, &line);
        }
        if let Some(connection) = self.connections.get_mut(&link.serial) {
            connection.inbox.push_back(line);
        }
    }

    /// No request that a guard refuses reaches a link, in any form.
    fn check_guards(&self, link: Link, method: &str, message: &Envelope<'_>, line: &Bytes) {
        let is_request = !message.ids.is_empty();
        assert!(is_request || method.starts_with("notifications/"), "a request without an id reached a link: {line:?}");
        if method != "tools/call" {
            return;
        }
        let backend = self.gateway.backend(link.backend).map_or("", |backend| &backend.name);
        let names = message.params.iter().flat_map(|params| members(params, "name"));
        for name in names {
            let shown = format!("{backend}__{}", json::decoded(name));
            assert!(shown != SWITCHED_OFF, "a tool that is switched off was called: {line:?}");
            let tag = tag_of(line).map(|tag| script::number(&tag.as_bytes()[TAG.len()..]));
            let is_reader = |number| self.clients.values().any(|client| client.number == number && client.role == "r");
            if self.is_strict || tag.is_some_and(is_reader) {
                assert!(shown != DENIED && backend == "a", "role `r` called {shown}: {line:?}");
            }
        }
    }

    fn take(&mut self, serial: u64) {
        let connection = self.connections.get_mut(&serial).expect("chosen among those that are there");
        for line in connection.inbox.drain(..) {
            let Some(Top::Object(members)) = json::read(&line) else { continue };
            let message = Envelope::of(&members);
            if let (Some(method), Some(id)) = (message.method(), message.ids.last()) {
                let params = message.params.last().copied().unwrap_or("{}").to_owned();
                let (id, tag) = ((*id).to_owned(), tag_of(&line));
                connection.open.push_back(Work { id, method, params, tag, line: line.clone() });
            }
        }
    }

    fn end(&mut self, serial: u64, how: How) {
        let connection = self.connections.remove(&serial).expect("chosen among those that are there");
        let unsent = connection.inbox.into_iter().collect();
        let stderr_tail = "Traceback: \u{1b}[31mno".to_owned();
        self.happen(Event::LinkDown { link: connection.link, how, stderr_tail, unsent });
    }

    // ---- the end --------------------------------------------------------------------------------

    /// Without clients and after a long time no state of requests is left.
    fn check_nothing_is_kept(&mut self) {
        let digits: Vec<u8> = self.clients.keys().copied().collect();
        digits.into_iter().for_each(|digit| self.client_leaves(digit));
        self.pass(Duration::from_secs(3_000));
        let status = self.gateway.status(self.now).to_json();
        let under_way = &status["under_way"];
        for table in ["calls", "asked_of_clients", "batches", "waiting_for_offers"] {
            assert!(under_way[table] == 0, "something is left of {table}: {status}");
        }
        assert!(status["clients"] == 0, "clients that are not there: {status}");
    }

    fn stop(&mut self) {
        self.is_stopping = true;
        self.happen(Event::StopAsked);
        for _ in 0..REST_MAX {
            if self.is_over {
                break;
            }
            let leaving = self.connections.iter().find(|(_, link)| link.is_leaving || !link.is_up);
            match leaving.map(|(serial, _)| *serial) {
                Some(serial) => self.end(serial, How::Stopped),
                None => self.pass(Duration::from_secs(1)),
            }
        }
        assert!(self.is_over, "it does not end: {}", self.gateway.status(self.now).to_json());
        assert!(self.tickets.is_empty(), "operators wait: {:?}", self.tickets);
        for client in self.clients.values() {
            for (id, owed) in &client.owed {
                let is_owed = !client.cancelled.contains(id);
                let (answered, due) = (owed.answered, owed.due);
                assert!(!is_owed || answered >= due, "client {}: {id}: {answered} of {due} answered", client.number);
            }
        }
    }

    fn happen(&mut self, event: Event) {
        if self.is_over {
            return;
        }
        let is_time = matches!(event, Event::TimePassed);
        let before = self.said_bytes;
        let actions = self.gateway.handle(event, self.now);
        for action in actions {
            self.act(action);
        }
        let said = self.said_bytes - before;
        let allowed = SAID_PER_EVENT + SAID_PER_BYTE * self.heard_bytes;
        assert!(said <= allowed, "{said} bytes said in one event, {} heard", self.heard_bytes);
        if let Some(due) = self.gateway.deadline().filter(|_| is_time) {
            assert!(due > self.now, "what was due was not done");
        }
        for number in std::mem::take(&mut self.served) {
            let digit = self.clients.iter().find(|(_, client)| client.number == number).map(|(digit, _)| *digit);
            if let Some(digit) = digit {
                self.client_leaves(digit);
            }
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::TellClient { client, message, about, said } => {
                self.client_hears(client, &message, about.as_ref(), said);
            }
            Action::Separate { client, .. } => panic!("client {client} shares no server"),
            Action::DropClient { client } => self.clients.retain(|_, known| known.number != client),
            Action::Connect { link } => {
                assert!(!self.is_stopping, "{link:?} was started while stopping");
                let connection = Connection {
                    link,
                    is_up: false,
                    is_leaving: false,
                    inbox: VecDeque::new(),
                    open: VecDeque::new(),
                    asked: HashMap::new(),
                };
                assert!(self.connections.insert(link.serial, connection).is_none(), "{link:?} was used before");
            }
            Action::TellLink { link, message } => self.link_is_told(link, message),
            Action::Disconnect { link, .. } => {
                let connection = self.connections.get_mut(&link.serial);
                connection.unwrap_or_else(|| panic!("{link:?} was stopped and is not there")).is_leaving = true;
            }
            Action::Answer { ticket, .. } => assert!(self.tickets.remove(&ticket), "ticket {ticket} answered twice"),
            Action::Over => {
                assert!(self.is_stopping && self.connections.is_empty(), "over too soon");
                self.is_over = true;
            }
            Action::Record(_) | Action::Divert { .. } | Action::Note(_) | Action::NotificationRefused(_) => {}
            Action::Called(_) | Action::Keep { .. } | Action::DropCheck { .. } => {}
            Action::Check(job) => panic!("{job:?}: all arguments are checked at once"),
        }
    }
}

impl Client {
    /// Records which answers are due for this message.
    fn note(&mut self, message: &Bytes) {
        let texts = match json::read(message) {
            Some(Top::Object(_)) => vec![std::str::from_utf8(message).unwrap_or_default()],
            Some(Top::Array(elements)) => {
                self.has_batched = true;
                elements
            }
            _ => return,
        };
        for text in texts {
            let Some(Top::Object(members)) = json::read(text.as_bytes()) else { continue };
            let message = Envelope::of(&members);
            if message.is_answer() {
                continue;
            }
            let is_plain = !self.has_batched && message.ids.len() == 1 && message.methods.len() == 1;
            let is_listen = message.method().is_none_or(|method| method == "subscriptions/listen");
            for raw in &message.ids {
                let Some(id) = Id::parse(raw) else { continue };
                let owed = self.owed.entry(id).or_default();
                owed.asked += 1;
                owed.due += usize::from(is_plain && !is_listen);
                owed.raw.insert((*raw).to_owned());
            }
            if message.method().as_deref() == Some("notifications/cancelled") && message.ids.is_empty() {
                let requests = message.params.iter().filter_map(|params| member(params, "requestId"));
                self.cancelled.extend(requests.filter_map(Id::parse));
            }
        }
    }
}

/// The answer of a correct server of both eras.
fn good_answer(work: &Work) -> String {
    let version = member(&work.params, "protocolVersion").unwrap_or("\"2025-11-25\"");
    let capabilities = r#"{"tools":{"listChanged":true},"prompts":{},"resources":{"subscribe":true},"logging":{}}"#;
    match work.method.as_str() {
        "initialize" => format!(
            r#"{{"protocolVersion":{version},"capabilities":{capabilities},"serverInfo":{{"name":"s","version":"1"}}}}"#
        ),
        "server/discover" => {
            format!(r#"{{"supportedVersions":["2026-07-28","2025-11-25"],"capabilities":{capabilities}}}"#)
        }
        "tools/list" => {
            let tools = ["x", "secret", "off", "hidden1", "y"];
            let tools = tools.map(|name| format!(r#"{{"name":"{name}","inputSchema":{{"type":"object"}}}}"#));
            format!(r#"{{"tools":[{}]}}"#, tools.join(","))
        }
        "prompts/list" => r#"{"prompts":[{"name":"p"}]}"#.to_owned(),
        "resources/list" => r#"{"resources":[{"uri":"r:1","name":"one"}]}"#.to_owned(),
        "resources/templates/list" => r#"{"resourceTemplates":[{"uriTemplate":"t:{x}","name":"t"}]}"#.to_owned(),
        "tools/call" => r#"{"content":[]}"#.to_owned(),
        _ => "{}".to_owned(),
    }
}

fn named(text: &[u8]) -> Option<String> {
    (!text.is_empty()).then(|| String::from_utf8_lossy(text).into_owned())
}

/// Every member of that name in an object.
fn members<'a>(object: &'a str, name: &str) -> Vec<&'a str> {
    match json::read(object.as_bytes()) {
        Some(Top::Object(members)) => {
            members.into_iter().filter(|(known, _)| known == name).map(|(_, value)| value).collect()
        }
        _ => vec![],
    }
}

/// The tag in a line, if it has exactly one owner.
fn tag_of(line: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(line).ok()?;
    let at = text.find(TAG)?;
    let end = at + TAG.len() + text[at + TAG.len()..].find('#')? + 1;
    Some(text[at..end].to_owned())
}
