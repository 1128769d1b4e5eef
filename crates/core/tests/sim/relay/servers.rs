//! The servers: one model for each generation, each with its own behaviour.

use std::{collections::VecDeque, time::Instant};

use bytes::Bytes;
use outlast_core::{exit::How, relay::Event};
use serde_json::{Value, json};

use super::{
    Told, World, bytes,
    client::{FAMILY, KEYS, MEMBERS, METHODS, OURS, Offer, VERSION},
    id_text, is_private, number_of,
};
use crate::Dice;

const PAGE: usize = 2;
pub(super) const SUBSCRIPTION_ID: &str = "io.modelcontextprotocol/subscriptionId";

/// Items by key and variant, for each of the four lists.
pub(super) type Lists = [Vec<(String, u64)>; 4];

pub(super) fn lists(dice: &mut Dice, clash: bool) -> Lists {
    let mut lists = [0, 1, 2, 3].map(|kind| {
        let some = dice.below(4);
        (1..=some).map(|index| (format!("{}{index}", &MEMBERS[kind][..1]), dice.below(2))).collect::<Vec<_>>()
    });
    if dice.one_in(2) {
        lists[0].push(("read".into(), 0));
    }
    if clash && dice.one_in(2) {
        lists[0].insert(0, (dice.pick(&OURS).to_owned(), 0));
        if dice.one_in(3) {
            lists[0].push((format!("outlast_{}", dice.pick(&OURS)), 0));
        }
    }
    lists
}

pub(super) fn item(kind: usize, key: &str, variant: u64) -> Value {
    let mut item = json!({KEYS[kind]: key, "v": variant});
    if key == "read" {
        item["annotations"] = json!({"readOnlyHint": variant == 0});
    }
    if key == "t2" {
        item["outputSchema"] = json!({"type": "object"});
    }
    item
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Handshake {
    Does,
    Refuses,
    Never,
    OtherVersion,
}

/// A line on its way to a server.
pub(super) struct Line {
    pub bytes: Bytes,
    pub mark: Option<u64>,
    pub number: Option<u64>,
}

/// A request that the server has read and not answered.
#[derive(Clone)]
pub(super) struct Todo {
    pub request: Value,
    pub number: Option<u64>,
    progress: u64,
}

impl Todo {
    fn has_token(&self) -> bool {
        self.number.is_some() && self.request["params"]["_meta"].get("progressToken").is_some()
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Word {
    /// To the client's request of that number, or to one of the relay.
    Answer(Option<u64>),
    Question {
        own: String,
        ping: bool,
    },
    /// Cancels its own request.
    Cancelled {
        own: String,
    },
    /// The end of a subscription, by its number.
    Torn(u64),
    Acknowledged(u64),
    Progress {
        to: u64,
        value: u64,
    },
    ListChanged(usize),
    Updated,
    Log,
    /// An answer to no request.
    Stray,
    /// An error without an id.
    Null,
}

/// A message of a server.
pub(super) struct Said {
    pub generation: u32,
    pub line: Bytes,
    pub word: Word,
    pub delivered: bool,
}

pub(super) struct Server {
    pub generation: u32,
    pub handshake: Handshake,
    /// Requests are answered, sooner or later.
    pub answers: bool,
    honours_cancels: bool,
    pub offer: Offer,
    pub lists: Lists,
    pub inbox: VecDeque<Line>,
    /// How many lines of the inbox the pipe has taken.
    pub taken: usize,
    pub todo: Vec<Todo>,
    next_question: u64,
    pub questions: Vec<String>,
    /// Open subscriptions: number and id.
    listens: Vec<(u64, Value)>,
    pub alive: bool,
    /// The stop that the relay requested.
    pub stop: Option<How>,
    pub serves: bool,
    pub ready: bool,
    pub draining: bool,
    /// Stopped while the client was connected: it can send nothing more.
    pub retired: bool,
    /// The relay repeats the client's handshake for it.
    pub replayed: bool,
    pub told_initialize: bool,
    pub told_initialized: bool,
    /// The newest message of the client that was first written to it, by number.
    pub newest_told: u64,
    /// The newest message of its own that reached the client, by number.
    pub newest_heard: u64,
    pub fetched_since: [Option<Instant>; 4],
    pub fetch_refused: [bool; 4],
    pub changed: [bool; 3],
    /// The version that it answered in a handshake of the relay.
    pub replied_version: Option<String>,
    pub early: usize,
    /// Its opening was answered without it; its handshake is with the relay.
    pub stood_in: bool,
    /// The relay closed its stdin: its pipe takes nothing more, and it exits.
    pub stdin_closed: bool,
}

impl Server {
    /// It will never answer an opening.
    pub(super) fn is_mute(&self) -> bool {
        self.handshake == Handshake::Never && !self.ready
    }

    pub(super) fn can_progress(&self) -> bool {
        self.alive && self.todo.iter().any(Todo::has_token)
    }

    pub(super) fn items(&self, kind: usize) -> Vec<Value> {
        if !self.offer.families[FAMILY[kind]] {
            return Vec::new();
        }
        self.lists[kind].iter().map(|(key, variant)| item(kind, key, *variant)).collect()
    }
}

impl World {
    pub(super) fn new_server(&mut self, generation: u32) -> Server {
        let calm = self.calm || self.peaceful;
        let dice = &mut self.dice;
        let handshake = match dice.below(14) {
            0 if !calm => Handshake::Refuses,
            1 if !calm => Handshake::Never,
            2 if !calm => Handshake::OtherVersion,
            _ => Handshake::Does,
        };
        let mut lists = self.base_lists.clone();
        if generation > 1 && dice.one_in(2) {
            let kind = dice.below(4) as usize;
            lists[kind] = self::lists(dice, self.clash)[kind].clone();
        }
        let all = dice.one_in(2);
        let mut has = |one_in| all || !dice.one_in(one_in);
        let offer = Offer {
            version: String::new(),
            families: [has(5), has(3), has(3)],
            subscribe: has(3),
            logging: has(3),
            completions: has(3),
        };
        Server {
            generation,
            handshake,
            answers: calm || !self.dice.one_in(5),
            honours_cancels: !self.dice.one_in(3),
            offer,
            lists,
            inbox: VecDeque::new(),
            taken: 0,
            todo: Vec::new(),
            next_question: 1,
            questions: Vec::new(),
            listens: Vec::new(),
            alive: true,
            stop: None,
            serves: false,
            ready: false,
            draining: false,
            retired: false,
            replayed: false,
            told_initialize: false,
            told_initialized: false,
            newest_told: 0,
            newest_heard: 0,
            fetched_since: [None; 4],
            fetch_refused: [false; 4],
            changed: [false; 3],
            replied_version: None,
            early: 0,
            stood_in: false,
            stdin_closed: false,
        }
    }

    // ---- hearing ------------------------------------------------------------------------------------

    pub(super) fn server_reads(&mut self) {
        let Some(generation) = self.any_server(|server| server.alive && !server.inbox.is_empty()) else { return };
        // The pipe may be slow, and the server slower.
        let (takes, reads) = (self.dice.below(4), self.dice.below(4));
        let server = self.servers.get_mut(&generation).expect("found above");
        if !server.stdin_closed {
            server.taken = server.inbox.len().min(server.taken + takes as usize);
        }
        for _ in 0..reads {
            self.server_reads_one(generation);
        }
    }

    fn server_reads_one(&mut self, generation: u32) {
        let server = self.servers.get_mut(&generation).expect("it is alive");
        if server.taken == 0 {
            return;
        }
        server.taken -= 1;
        let line = server.inbox.pop_front().expect("taken is no more than there is");
        if let Some(sent) = line.number.and_then(|number| self.sent.get_mut(&number)) {
            sent.note_fate(generation, true);
        }
        let Ok(message) = serde_json::from_slice::<Value>(&line.bytes) else { return };
        let Some(method) = message["method"].as_str() else { return };
        if method == "notifications/cancelled" {
            let id = &message["params"]["requestId"];
            server.listens.retain(|(_, listen)| listen != id);
            if server.honours_cancels {
                server.todo.retain(|todo| todo.request["id"] != *id || todo.request["method"] == "initialize");
            }
            return;
        }
        let Some(id) = message.get("id") else { return };
        if id.is_null() || id.is_f64() {
            return;
        }
        if method == "subscriptions/listen" {
            server.listens.push((line.number.unwrap_or(0), id.clone()));
        }
        let number = (!is_private(id)).then_some(line.number).flatten();
        server.todo.push(Todo { request: message, number, progress: 0 });
    }

    // ---- speaking -----------------------------------------------------------------------------------

    pub(super) fn server_speaks(&mut self) {
        let Some(generation) = self.any_server(|server| server.alive) else { return };
        let modern = self.client.is_modern();
        let server = &self.servers[&generation];
        let has_todo = !server.todo.is_empty() && server.answers;
        match self.dice.below(24) {
            0..=13 if has_todo => self.server_answers(generation),
            14..=15 if !modern || self.dice.one_in(10) => self.server_asks(generation),
            16 => self.server_progresses(generation),
            17 => self.list_changes(generation),
            18 => {
                let number = self.number();
                let text = format!(
                    r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"n":{number},"level":"info" }}}}"#
                );
                self.server_says(generation, number, text, Word::Log);
            }
            19 if self.server_is_open(generation) => {
                let number = self.number();
                let text = format!(
                    r#"{{"jsonrpc":"2.0","method":"notifications/resources/updated","params":{{"n":{number},"uri":"u"}}}}"#
                );
                self.server_says(generation, number, text, Word::Updated);
            }
            20 if !modern => self.server_cancels(generation),
            21 if modern => self.server_tears_down(generation),
            22 if self.dice.one_in(4) => {
                let number = self.number();
                let text = format!(r#"{{"jsonrpc":"2.0","id":"stray{number}","result":{{"n":{number}}}}}"#);
                self.server_says(generation, number, text, Word::Stray);
            }
            23 if self.dice.one_in(4) => {
                let number = self.number();
                let text = format!(
                    r#"{{"jsonrpc":"2.0","id":null,"error":{{"code":-32700,"message":"what","data":{{"n":{number}}}}}}}"#
                );
                self.server_says(generation, number, text, Word::Null);
            }
            _ => {}
        }
    }

    /// Continues something that a server has begun; false if there is nothing left.
    pub(super) fn server_moves(&mut self) -> bool {
        let reads = |server: &Server| server.alive && !server.inbox.is_empty() && !server.stdin_closed;
        if let Some(generation) = self.any_server(reads) {
            let server = self.servers.get_mut(&generation).expect("found above");
            server.taken = server.inbox.len();
            self.server_reads_one(generation);
            return true;
        }
        let busy = |server: &Server| {
            server.alive && server.todo.iter().any(|todo| !server.is_mute() || !is_opening(&todo.request))
        };
        match self.any_server(busy) {
            Some(generation) => {
                self.server_answers(generation);
                true
            }
            None => false,
        }
    }

    fn server_says(&mut self, generation: u32, number: u64, text: String, word: Word) {
        let line = bytes(text);
        self.said.insert(number, Said { generation, line: line.clone(), word, delivered: false });
        self.happen(Event::ServerSaid(generation, line), Told::Heard(generation, number));
    }

    /// It has received an opening, so that it may announce changes of its lists.
    fn server_is_open(&self, generation: u32) -> bool {
        let server = &self.servers[&generation];
        server.ready || (server.serves && self.client.is_modern())
    }

    fn server_answers(&mut self, generation: u32) {
        let server = &self.servers[&generation];
        let never = server.is_mute();
        let possible: Vec<usize> =
            (0..server.todo.len()).filter(|&index| !never || !is_opening(&server.todo[index].request)).collect();
        if possible.is_empty() {
            return;
        }
        let index = self.dice.pick(&possible);
        let listens = server.todo[index].request["method"] == "subscriptions/listen";
        let server = self.servers.get_mut(&generation).expect("it is alive");
        let todo = server.todo.remove(index);
        let number = self.number();
        if listens && !self.dice.one_in(8) {
            return self.server_acknowledges(generation, number, &todo);
        }
        self.servers.get_mut(&generation).expect("it is alive").listens.retain(|(_, id)| *id != todo.request["id"]);
        let id = id_text(&todo.request["id"]);
        let body = self.body(generation, number, &todo);
        let text = format!(r#"{{"jsonrpc":"2.0", "id":{id},{body},"tail":{{ }}}}"#);
        let word = match todo.number {
            Some(to) if listens => Word::Torn(to),
            to => Word::Answer(to),
        };
        self.server_says(generation, number, text, word);
    }

    fn body(&mut self, generation: u32, number: u64, todo: &Todo) -> String {
        let error = |code: i32| format!(r#""error":{{"code":{code},"message":"no","data":{{"n":{number}}}}}"#);
        let server = self.servers.get_mut(&generation).expect("it is alive");
        let method = todo.request["method"].as_str().unwrap_or_default();
        let params = &todo.request["params"];
        if is_opening(&todo.request) && server.handshake == Handshake::Refuses {
            return error(if self.dice.one_in(2) { -32601 } else { -32022 });
        }
        let other = server.handshake == Handshake::OtherVersion;
        match method {
            "initialize" => {
                let asked = params["protocolVersion"].as_str().unwrap_or_default();
                let known = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"];
                // The same program gives the same answers in every process.
                let told = self.client.told.as_ref().map(|told| told.version.clone());
                let asked = told.as_deref().unwrap_or(asked);
                let version = match known.contains(&asked) {
                    true if !other => asked,
                    false if !other => "2025-11-25",
                    _ => self.dice.pick(&known),
                };
                server.replied_version = Some(version.to_owned());
                let capabilities = capabilities(&server.offer, self.dice.one_in(2));
                let info = r#""serverInfo":{"name" : "model"}"#;
                format!(
                    r#""result":{{"protocolVersion":"{version}","capabilities":{capabilities},{info},"n":{number}}}"#
                )
            }
            "server/discover" => {
                let version = if other { "2031-01-01" } else { VERSION };
                let capabilities = capabilities(&server.offer, self.dice.one_in(2));
                format!(
                    r#""result":{{"supportedVersions":["{version}"],"capabilities":{capabilities},"ttlMs":60000,"n":{number}}}"#
                )
            }
            _ if METHODS.contains(&method) => {
                let kind = METHODS.iter().position(|known| *known == method).expect("it contains it");
                let private = todo.number.is_none();
                let refuses = !self.calm && self.dice.one_in(12);
                if refuses || !server.offer.families[FAMILY[kind]] {
                    server.fetch_refused[kind] |= private;
                    return error(if refuses { -32603 } else { -32601 });
                }
                let from = match params.get("cursor").and_then(Value::as_str) {
                    None => 0,
                    Some(cursor) => {
                        let own = cursor.strip_prefix(&format!("g{generation}-"));
                        match own.and_then(|from| from.parse::<usize>().ok()) {
                            Some(from) if from <= server.lists[kind].len() => from,
                            _ => return error(-32602),
                        }
                    }
                };
                let items = server.items(kind);
                let page: Vec<String> = items.iter().skip(from).take(PAGE).map(Value::to_string).collect();
                let next = if from + PAGE < items.len() {
                    format!(r#","nextCursor":"g{generation}-{}""#, from + PAGE)
                } else {
                    String::new()
                };
                let ttl = if self.client.is_modern() { r#","ttlMs":60000,"cacheScope":"public""# } else { "" };
                format!(r#""result":{{"{}":[{}]{next}{ttl},"n":{number}}}"#, MEMBERS[kind], page.join(", "))
            }
            _ if self.dice.one_in(8) => error(-32000),
            _ => format!(r#""result":{{ "n":{number},"echo":{}}}"#, todo.number.unwrap_or(0)),
        }
    }

    fn server_acknowledges(&mut self, generation: u32, number: u64, todo: &Todo) {
        let id = id_text(&todo.request["id"]);
        let granted = match self.dice.below(3) {
            0 => "{}".to_owned(),
            1 => r#"{"toolsListChanged":false}"#.to_owned(),
            _ => todo.request["params"]["notifications"].to_string(),
        };
        let text = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{{"n":{number},"_meta":{{"{SUBSCRIPTION_ID}":{id}}},"notifications":{granted}}}}}"#
        );
        self.server_says(generation, number, text, Word::Acknowledged(todo.number.unwrap_or(0)));
    }

    fn server_tears_down(&mut self, generation: u32) {
        let server = self.servers.get_mut(&generation).expect("it is alive");
        // An acknowledged subscription can be ended.
        let open: Vec<(u64, Value)> = server
            .listens
            .iter()
            .filter(|(_, id)| !server.todo.iter().any(|todo| todo.request["id"] == *id))
            .cloned()
            .collect();
        if open.is_empty() {
            return;
        }
        let (listen, id) = self.dice.pick(&open);
        server.listens.retain(|(number, _)| *number != listen);
        let number = self.number();
        let text = if self.dice.one_in(2) {
            format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"n":{number},"resultType":"complete"}}}}"#)
        } else {
            format!(
                r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id},"n":{number}}}}}"#
            )
        };
        self.server_says(generation, number, text, Word::Torn(listen));
    }

    fn server_asks(&mut self, generation: u32) {
        let number = self.number();
        let server = self.servers.get_mut(&generation).expect("it is alive");
        let own = match self.dice.below(3) {
            0 => format!("{}", server.next_question),
            1 => format!(r#""q{}""#, server.next_question),
            _ => format!("-{}", server.next_question),
        };
        server.next_question += 1;
        server.questions.push(own.clone());
        server.early += usize::from(!server.serves);
        let method = self.dice.pick(&["sampling/createMessage", "roots/list", "elicitation/create", "ping"]);
        let text = format!(r#"{{"jsonrpc":"2.0", "id":{own},"method":"{method}","params":{{"n":{number} }}}}"#);
        self.server_says(generation, number, text, Word::Question { own, ping: method == "ping" });
    }

    fn server_cancels(&mut self, generation: u32) {
        let server = self.servers.get_mut(&generation).expect("it is alive");
        if server.questions.is_empty() {
            return;
        }
        let index = self.dice.below(server.questions.len() as u64) as usize;
        let own = server.questions.swap_remove(index);
        let number = self.number();
        let text = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{own},"reason":"r","n":{number}}}}}"#
        );
        self.server_says(generation, number, text, Word::Cancelled { own });
    }

    /// It reads all its input, and answers some of it.
    pub(super) fn server_hurries(&mut self, generation: u32) {
        let server = self.servers.get_mut(&generation).expect("it is alive");
        if !server.stdin_closed {
            server.taken = server.inbox.len();
        }
        for _ in 0..server.taken {
            self.server_reads_one(generation);
        }
        self.server_answers(generation);
    }

    pub(super) fn server_progresses(&mut self, generation: u32) {
        let server = self.servers.get_mut(&generation).expect("it is alive");
        let able: Vec<usize> = (0..server.todo.len()).filter(|&index| server.todo[index].has_token()).collect();
        if able.is_empty() {
            return;
        }
        let todo = &mut server.todo[self.dice.pick(&able)];
        todo.progress += 1 + self.dice.below(3);
        let (to, value) = (todo.number.unwrap_or(0), todo.progress);
        let token = todo.request["params"]["_meta"]["progressToken"].clone();
        let number = self.number();
        let text = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"n":{number},"progressToken":{token},"progress":{value}}}}}"#
        );
        self.server_says(generation, number, text, Word::Progress { to, value });
    }

    /// A list changes, and the server announces it.
    fn list_changes(&mut self, generation: u32) {
        if !self.server_is_open(generation) {
            return;
        }
        let kind = self.dice.below(4) as usize;
        let family = FAMILY[kind];
        let new = lists(&mut self.dice, self.clash)[kind].clone();
        let server = self.servers.get_mut(&generation).expect("it is alive");
        if !server.offer.families[family] {
            return;
        }
        let listening: Vec<Value> = server
            .listens
            .iter()
            .filter(|(_, id)| !server.todo.iter().any(|todo| todo.request["id"] == *id))
            .map(|(_, id)| id.clone())
            .collect();
        // In the stateless era only open subscriptions are notified; without one nothing changes here.
        if self.client.is_modern() && listening.is_empty() {
            return;
        }
        server.lists[kind] = new;
        server.changed[family] = true;
        let name = ["tools", "prompts", "resources"][family];
        let targets = if self.client.is_modern() { listening } else { vec![Value::Null] };
        for id in targets {
            let number = self.number();
            let meta = match id {
                Value::Null => String::new(),
                id => format!(r#","_meta":{{"{SUBSCRIPTION_ID}":{id}}}"#),
            };
            let text = format!(
                r#"{{"jsonrpc":"2.0","method":"notifications/{name}/list_changed","params":{{"n":{number}{meta}}}}}"#
            );
            self.server_says(generation, number, text, Word::ListChanged(family));
        }
    }

    pub(super) fn server_is_ready(&mut self, generation: u32) {
        for server in self.servers.values_mut() {
            if server.generation != generation && server.serves {
                server.draining = true;
            }
        }
        let server = self.servers.get_mut(&generation).expect("it was started");
        let fine = server.alive && !server.retired && !server.ready;
        server.serves = true;
        server.ready = true;
        self.ever_ready = true;
        super::check!(self, fine, "4: generation {generation} is not one to become ready");
    }
}

fn is_opening(request: &Value) -> bool {
    matches!(request["method"].as_str(), Some("initialize" | "server/discover"))
}

fn capabilities(offer: &Offer, list_changed: bool) -> String {
    let mut parts = Vec::new();
    for (name, has) in ["tools", "prompts", "resources"].into_iter().zip(offer.families) {
        if has {
            let mut inner = Vec::new();
            if list_changed {
                inner.push(r#""listChanged":false"#);
            }
            if name == "resources" && offer.subscribe {
                inner.push(r#""subscribe":true"#);
            }
            parts.push(format!(r#""{name}":{{{}}}"#, inner.join(",")));
        }
    }
    if offer.logging {
        parts.push(r#""logging":{}"#.into());
    }
    if offer.completions {
        parts.push(r#""completions":{}"#.into());
    }
    format!("{{{}}}", parts.join(","))
}

/// The number of a line to a server, for the checks of the order.
pub(super) fn line_number(line: &[u8], message: &Value) -> Option<u64> {
    if message.get("id").is_some_and(is_private) && message.get("method").is_some() { None } else { number_of(line) }
}
