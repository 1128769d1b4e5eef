//! A gateway with a clock, and backends that answer as the test configures them.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use bytes::Bytes;
use outlast_core::gateway::{Gateway, Schemas};
pub(crate) use outlast_core::{
    checker::Job,
    exit::{Exit, How},
    gateway::{
        ARGUMENTS_READ_MAX, Action, Backend, Called, Children, EraChoice, Event, Fit, Front, Kind, Limits, Link, Offer,
        Outcome, Pattern, Placement, Profile, REQUEST_ID_MAX, Rate, Rates, RefusedNotification, Role, Sender, Settings,
        SharedClients, Start, Switch, Who,
    },
    json::Raw,
    message::Id,
    record::{Event as RecordEvent, Record},
    restarts::Policy,
};
use serde_json::Value;
pub(crate) use serde_json::json;

pub(crate) fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

pub(crate) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(crate) fn stdio(name: &str) -> Backend {
    Backend {
        name: name.into(),
        kind: Kind::Stdio { command: name.into(), args: vec![], env: BTreeMap::new(), cwd: None, sandbox: None },
        prefix: format!("{name}__"),
        allow: vec![],
        deny: vec![],
        children: Children::Shared,
        children_max: 64,
        start: Start::Eager,
        placement: Placement::Every,
        inherit_env: false,
        era: EraChoice::Auto,
        policy: Policy { jitter_percent: 0, ..Policy::exponential() },
        call_timeout: secs(60),
        call_max: secs(600),
        start_timeout: secs(30),
        idle_stop: None,
        memory_max: None,
        breaker_failures: 0,
        breaker_open: secs(30),
        retry_annotated: false,
    }
}

pub(crate) fn http(name: &str) -> Backend {
    let kind = Kind::Http { url: format!("http://{name}/mcp").into(), headers: BTreeMap::new(), is_sse: false };
    Backend { kind, ..stdio(name) }
}

pub(crate) fn settings(backends: Vec<Backend>) -> Settings {
    Settings {
        backends,
        profiles: BTreeMap::new(),
        default_profile: None,
        roles: BTreeMap::new(),
        rates: Rates::default(),
        switched_off: vec![],
        forward_unknown: false,
        is_host: false,
        limits: Limits { hold: secs(30), held_max: 100, in_flight_max: 1000, page: 100, retry_given_up: secs(300) },
    }
}

pub(crate) fn local() -> Who {
    Who { name: "local".into(), role: None, profile: None }
}

/// A part of a message that stopped being JSON after it was parsed.
pub(crate) const NOT_JSON: &str = "[!!!!!]";

/// What a backend offers, and how it behaves.
#[derive(Clone)]
pub(crate) struct Maker {
    pub capabilities: Value,
    pub tools: Vec<Value>,
    pub prompts: Vec<Value>,
    pub resources: Vec<Value>,
    pub templates: Vec<Value>,
    /// How many elements a page has.
    pub page: usize,
    /// Eras that it supports: only the stateless one, or both, over HTTP.
    pub handshake: bool,
    pub stateless: bool,
    /// It does not answer by itself.
    pub mute: bool,
}

pub(crate) fn tool(name: &str) -> Value {
    json!({"name": name, "description": format!("does {name}"), "inputSchema": {"type": "object"}})
}

/// Names that have the same hash by `FxHasher`. Their third block begins with the hash of the first, so that the rest of the
/// third does not count.
pub(crate) fn names_of_one_hash(count: usize) -> Vec<String> {
    use std::hash::BuildHasher;
    let names: Vec<String> =
        (0..count).map(|n| format!("aaaaaaaa000d743a{:a<16}l8nih-2i{n:08}{:a<16}", "", "")).collect();
    let hashes: std::collections::BTreeSet<u64> =
        names.iter().map(|name| rustc_hash::FxBuildHasher.hash_one(name)).collect();
    assert_eq!((hashes.len(), names[0].len()), (1, 64));
    names
}

pub(crate) fn maker(tools: &[&str]) -> Maker {
    Maker {
        capabilities: json!({"tools": {"listChanged": true}, "prompts": {}, "resources": {"subscribe": true}, "logging": {}, "completions": {}}),
        tools: tools.iter().map(|name| tool(name)).collect(),
        prompts: vec![],
        resources: vec![],
        templates: vec![],
        page: 100,
        handshake: true,
        stateless: false,
        mute: false,
    }
}

/// All arguments fit every schema, unless they contain `bad`, `costly` or `unchecked`; for `later` the test gives the
/// result.
struct Words;

impl Schemas for Words {
    fn check(&mut self, _schema: &[u8], arguments: Raw<'_>) -> Option<Fit> {
        Some(match arguments.get() {
            text if text.contains("later") => return None,
            text if text.contains("bad") => Fit::Misfit("`/x` is bad".into()),
            text if text.contains("costly") => Fit::TooCostly,
            text if text.contains("unchecked") => Fit::Unchecked("it is too large".into()),
            _ => Fit::Fits,
        })
    }
}

/// A message that the gateway sent to a client.
#[derive(Debug, Clone)]
pub(crate) struct Heard {
    pub client: u64,
    pub text: String,
    pub about: Option<Id>,
}

impl Heard {
    pub(crate) fn json(&self) -> Value {
        parsed(&self.text)
    }
}

pub(crate) fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("not JSON ({error}): {text}"))
}

pub(crate) struct Story {
    pub gateway: Gateway,
    pub now: Instant,
    makers: BTreeMap<String, Maker>,
    pub clients: Vec<Heard>,
    /// Messages to links that they did not answer by themselves.
    pub links: Vec<(Link, String)>,
    pub up: BTreeMap<u64, Link>,
    pub disconnected: Vec<(Link, bool)>,
    pub connected: Vec<Link>,
    pub notes: Vec<String>,
    pub refused_notes: Vec<RefusedNotification>,
    /// Output of links that is not JSON.
    /// Also whether it is JSON.
    pub diverted: Vec<(Link, String, bool)>,
    pub records: Vec<Record>,
    pub called: Vec<Called>,
    pub kept: Vec<(String, Offer)>,
    pub answers: Vec<(u64, Result<Value, String>)>,
    /// Arguments that wait to be checked.
    pub checks: Vec<Job>,
    /// Clients that are to use servers of their own.
    pub separated: Vec<(u64, &'static str)>,
    pub over: bool,
    /// The opening that each link was sent.
    pub opened: Vec<String>,
    /// Links become ready by themselves.
    pub auto: bool,
}

#[expect(clippy::disallowed_methods, reason = "a story needs some instant to count from")]
fn birth() -> Instant {
    Instant::now()
}

impl Story {
    pub(crate) fn new(settings: Settings, makers: &[(&str, Maker)]) -> Story {
        Story::with_kept(settings, makers, BTreeMap::new())
    }

    pub(crate) fn with_kept(settings: Settings, makers: &[(&str, Maker)], kept: BTreeMap<String, Offer>) -> Story {
        Story::of(Gateway::new(settings, 7, kept, Box::new(Words)), makers)
    }

    /// One server that all clients share.
    pub(crate) fn shared(clients: SharedClients, maker: Maker) -> Story {
        let mut story = Story::of(Gateway::of_shared_server("s", clients, 7), &[("s", maker)]);
        story.event(Event::TimePassed);
        story
    }

    fn of(gateway: Gateway, makers: &[(&str, Maker)]) -> Story {
        Story {
            gateway,
            now: birth(),
            makers: makers.iter().map(|(name, maker)| ((*name).to_owned(), maker.clone())).collect(),
            clients: vec![],
            links: vec![],
            up: BTreeMap::new(),
            disconnected: vec![],
            connected: vec![],
            notes: vec![],
            refused_notes: vec![],
            diverted: vec![],
            records: vec![],
            called: vec![],
            kept: vec![],
            answers: vec![],
            checks: vec![],
            separated: vec![],
            over: false,
            opened: vec![],
            auto: true,
        }
    }

    /// These backends, all ready, and one client that has done its handshake.
    pub(crate) fn simple(makers: &[(&str, Maker)]) -> Story {
        let backends = makers.iter().map(|(name, _)| stdio(name)).collect();
        let mut story = Story::new(settings(backends), makers);
        story.event(Event::TimePassed);
        story.shake(1);
        story
    }

    /// Another program takes over all clients and links.
    pub(crate) fn upgrade(&mut self, settings: Settings) -> &mut Story {
        let saved = serde_json::to_string(&self.gateway.save(self.now).expect("not busy")).expect("JSON");
        let saved = serde_json::from_str(&saved).expect("the saved state");
        self.gateway = Gateway::restore(settings, saved, Box::new(Words), |_| true, self.now);
        self
    }

    pub(crate) fn set_maker(&mut self, name: &str, maker: Maker) {
        self.makers.insert(name.to_owned(), maker);
    }

    pub(crate) fn maker(&mut self, name: &str) -> &mut Maker {
        self.makers.get_mut(name).expect("a backend of that name")
    }

    pub(crate) fn event(&mut self, event: Event) -> &mut Story {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            for action in self.gateway.handle(event, self.now) {
                self.act(action, &mut events);
            }
        }
        self
    }

    fn act(&mut self, action: Action, events: &mut VecDeque<Event>) {
        match action {
            Action::TellClient { client, message, about, .. } => {
                let text = one_line(&message);
                self.clients.push(Heard { client, text, about });
            }
            Action::TellLink { link, message } => {
                let text = one_line(&message);
                if text.contains(r#""method":"initialize""#) {
                    self.opened.push(text.clone());
                }
                match self.up.contains_key(&link.serial).then(|| self.reply(link, &text)).flatten() {
                    Some(answer) => events.push_back(Event::LinkSaid { link, message: answer.into() }),
                    None => self.links.push((link, text)),
                }
            }
            Action::Connect { link } => {
                self.connected.push(link);
                if self.auto {
                    self.up.insert(link.serial, link);
                    events.push_back(Event::LinkUp { link, pid: Some(1000 + link.serial as u32) });
                }
            }
            Action::Disconnect { link, at_once } => self.disconnected.push((link, at_once)),
            Action::DropClient { .. } => {}
            Action::Separate { client, why } => self.separated.push((client, why)),
            Action::Record(record) => self.records.push(record),
            Action::Note(words) => self.notes.push(words),
            Action::NotificationRefused(refused) => self.refused_notes.push(*refused),
            Action::Divert { link, message, is_json } => {
                self.diverted.push((link, String::from_utf8_lossy(&message).into_owned(), is_json));
            }
            Action::Called(called) => self.called.push(called),
            Action::Keep { backend, catalogue } => self.kept.push((backend, catalogue)),
            Action::Answer { ticket, result } => self.answers.push((ticket, result)),
            Action::Check(job) => self.checks.push(job),
            Action::DropCheck { ticket } => self.checks.retain(|job| job.ticket != ticket),
            Action::Over => self.over = true,
        }
    }

    /// The answers that a backend gives by itself: handshakes and lists.
    fn reply(&mut self, link: Link, text: &str) -> Option<String> {
        let name = self.gateway.backend(link.backend)?.name.clone();
        let maker = self.makers.get(&name)?;
        if maker.mute || text.contains(NOT_JSON) {
            return None;
        }
        let message = parsed(text);
        let id = message.get("id")?;
        let is_stateless = message["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] == "2026-07-28";
        let mut result = match message["method"].as_str()? {
            "initialize" if maker.handshake => {
                json!({"protocolVersion": "2025-11-25", "capabilities": maker.capabilities, "serverInfo": {"name": name, "version": "1"}, "instructions": format!("use {name}")})
            }
            "initialize" => {
                return Some(
                    json!({"jsonrpc": "2.0", "id": id, "error": {"code": -32022, "message": "stateless only"}})
                        .to_string(),
                );
            }
            "server/discover" if maker.stateless => {
                let mut versions = vec!["2026-07-28"];
                if maker.handshake {
                    versions.push("2025-11-25");
                }
                json!({"supportedVersions": versions, "capabilities": maker.capabilities, "ttlMs": 0, "cacheScope": "public"})
            }
            "server/discover" => {
                return Some(
                    json!({"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "what?"}}).to_string(),
                );
            }
            "tools/list" => page(&message, "tools", &maker.tools, maker.page),
            "prompts/list" => page(&message, "prompts", &maker.prompts, maker.page),
            "resources/list" => page(&message, "resources", &maker.resources, maker.page),
            "resources/templates/list" => page(&message, "resourceTemplates", &maker.templates, maker.page),
            _ => return None,
        };
        if is_stateless {
            result["resultType"] = json!("complete");
        }
        Some(json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string())
    }

    pub(crate) fn pass(&mut self, time: Duration) -> &mut Story {
        let end = self.now + time;
        while let Some(due) = self.gateway.deadline().filter(|due| *due <= end) {
            self.now = self.now.max(due);
            self.event(Event::TimePassed);
        }
        self.now = end;
        self
    }

    pub(crate) fn came(&mut self, client: u64, front: Front, who: Who) -> &mut Story {
        self.event(Event::ClientCame { client, front, who })
    }

    /// A client of the handshake era connects and does its handshake.
    pub(crate) fn shake(&mut self, client: u64) -> &mut Story {
        self.shake_as(client, local(), json!({"sampling": {}, "elicitation": {}, "roots": {}}))
    }

    pub(crate) fn shake_as(&mut self, client: u64, who: Who, capabilities: Value) -> &mut Story {
        self.came(client, Front::Session, who);
        self.say(client, &json!({"jsonrpc": "2.0", "id": "hello", "method": "initialize", "params": {"protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": {"name": format!("client {client}"), "version": "1"}}}).to_string());
        self.say(client, r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
        let answer = self.heard(client);
        assert_eq!(answer.json()["result"]["protocolVersion"], "2025-11-25");
        self
    }

    pub(crate) fn say(&mut self, client: u64, message: &str) -> &mut Story {
        self.event(Event::ClientSaid { client, message: Bytes::copy_from_slice(message.as_bytes()) })
    }

    pub(crate) fn ask(&mut self, client: u64, id: Value, method: &str, params: Value) -> &mut Story {
        self.say(client, &json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string())
    }

    pub(crate) fn call(&mut self, client: u64, id: u64, tool: &str) -> &mut Story {
        self.ask(client, json!(id), "tools/call", json!({"name": tool, "arguments": {}}))
    }

    /// A request of the stateless era, from a new client.
    pub(crate) fn post(&mut self, client: u64, id: Value, method: &str, params: Value) -> &mut Story {
        self.came(client, Front::Request, local());
        self.ask_stateless(client, id, method, params)
    }

    pub(crate) fn ask_stateless(&mut self, client: u64, id: Value, method: &str, mut params: Value) -> &mut Story {
        params["_meta"]["io.modelcontextprotocol/protocolVersion"] = json!("2026-07-28");
        let capabilities = &mut params["_meta"]["io.modelcontextprotocol/clientCapabilities"];
        if capabilities.is_null() {
            *capabilities = json!({"elicitation": {}, "sampling": {}});
        }
        self.ask(client, id, method, params)
    }

    /// The oldest message to a client that the test has not taken.
    #[track_caller]
    pub(crate) fn heard(&mut self, client: u64) -> Heard {
        match self.clients.iter().position(|heard| heard.client == client) {
            Some(index) => self.clients.remove(index),
            None => panic!("client {client} heard nothing; notes: {:#?}", self.notes),
        }
    }

    #[track_caller]
    pub(crate) fn hears(&mut self, client: u64, message: Value) -> &mut Story {
        assert_eq!(self.heard(client).json(), message);
        self
    }

    #[track_caller]
    pub(crate) fn hears_nothing(&mut self, client: u64) -> &mut Story {
        let left: Vec<&Heard> = self.clients.iter().filter(|heard| heard.client == client).collect();
        assert!(left.is_empty(), "client {client} heard {left:#?}");
        self
    }

    /// The oldest message to a backend that it did not answer by itself.
    #[track_caller]
    pub(crate) fn told(&mut self, backend: &str) -> (Link, Value) {
        let number = self.number(backend);
        let told = self.links.iter().position(|(link, text)| {
            link.backend == number
                && !text.contains("notifications/initialized")
                && !text.contains("subscriptions/listen")
        });
        match told {
            Some(index) => {
                let (link, text) = self.links.remove(index);
                (link, parsed(&text))
            }
            None => panic!("{backend} was told nothing; notes: {:#?}", self.notes),
        }
    }

    #[track_caller]
    pub(crate) fn told_nothing(&mut self, backend: &str) -> &mut Story {
        let number = self.number(backend);
        let told: Vec<&String> = self
            .links
            .iter()
            .filter(|(link, text)| {
                link.backend == number
                    && !text.contains("notifications/initialized")
                    && !text.contains("subscriptions/listen")
            })
            .map(|(_, text)| text)
            .collect();
        assert!(told.is_empty(), "{backend} was told {told:#?}");
        self
    }

    pub(crate) fn number(&self, backend: &str) -> u32 {
        (0..100)
            .find(|number| self.gateway.backend(*number).is_some_and(|known| known.name == backend))
            .expect("a backend")
    }

    pub(crate) fn link_says(&mut self, link: Link, message: Value) -> &mut Story {
        self.event(Event::LinkSaid { link, message: message.to_string().into() })
    }

    pub(crate) fn answer(&mut self, link: Link, id: &Value, result: Value) -> &mut Story {
        self.link_says(link, json!({"jsonrpc": "2.0", "id": id, "result": result}))
    }

    /// The newest link of a backend.
    pub(crate) fn link(&self, backend: &str) -> Link {
        let number = self.number(backend);
        *self.connected.iter().rev().find(|link| link.backend == number).expect("a link")
    }

    pub(crate) fn dies(&mut self, link: Link) -> &mut Story {
        self.up.remove(&link.serial);
        self.event(Event::LinkDown {
            link,
            how: How::Exited(Exit::Signal(9)),
            stderr_tail: "boom\n".into(),
            unsent: vec![],
        })
    }

    /// The link ends, and these lines were not written to it.
    pub(crate) fn dies_without(&mut self, link: Link, unsent: Vec<Bytes>) -> &mut Story {
        self.up.remove(&link.serial);
        let how = How::Exited(Exit::Signal(9));
        self.event(Event::LinkDown { link, how, stderr_tail: String::new(), unsent })
    }

    /// How many records of an event there are.
    pub(crate) fn recorded(&self, event: &str) -> usize {
        self.records.iter().filter(|record| record.event.name() == event).count()
    }

    pub(crate) fn status(&self, backend: &str) -> Value {
        let status = self.gateway.status(self.now).to_json();
        let backends = status["backends"].as_array().expect("backends").clone();
        backends.into_iter().find(|known| known["name"] == backend).expect("a backend of that name")
    }
}

fn page(message: &Value, member: &str, items: &[Value], size: usize) -> Value {
    let from: usize = message["params"]["cursor"].as_str().map_or(0, |cursor| cursor[1..].parse().expect("our cursor"));
    let end = items.len().min(from + size);
    let mut result = json!({member: items[from..end]});
    if end < items.len() {
        result["nextCursor"] = json!(format!("c{end}"));
    }
    result
}

fn one_line(message: &[u8]) -> String {
    let text = std::str::from_utf8(message).expect("text").to_owned();
    assert!(text.ends_with('\n'), "a message must end its line: {text:?}");
    assert_eq!(text.matches('\n').count(), 1, "a message must be one line: {text:?}");
    text.trim_end().to_owned()
}
