//! The client: of either era, well behaved or not.

use std::{collections::BTreeMap, time::Instant};

use bytes::Bytes;
use outlast_core::relay::Event;
use serde_json::Value;

use super::{Told, World, bytes, check, id_text};
use crate::Dice;

pub(super) const METHODS: [&str; 4] = ["tools/list", "prompts/list", "resources/list", "resources/templates/list"];
pub(super) const MEMBERS: [&str; 4] = ["tools", "prompts", "resources", "resourceTemplates"];
pub(super) const KEYS: [&str; 4] = ["name", "name", "uri", "uriTemplate"];
/// Templates belong to the resources.
pub(super) const FAMILY: [usize; 4] = [0, 1, 2, 2];
pub(super) const FLAGS: [&str; 3] = ["toolsListChanged", "promptsListChanged", "resourcesListChanged"];
pub(super) const OURS: [&str; 3] = ["restart_server", "verify_server_restarted", "server_status"];
pub(super) const VERSION: &str = "2026-07-28";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Era {
    Legacy,
    Modern,
    /// It tries the stateless era first, and falls back to the handshake.
    Probing,
}

pub(super) struct Client {
    pub era: Era,
    pub rude: bool,
    version: String,
    next_id: u64,
    /// It has sent a request, which shows its era.
    spoke: bool,
    pub probed: bool,
    pub asked: bool,
    /// The answer to its opening.
    pub told: Option<Offer>,
    /// outlast answered the opening, because no server became ready.
    pub ever_local: bool,
    pub initialized: bool,
    /// It has sent another opening since, which has its own `initialized`.
    pub opens_anew: bool,
    /// Its copy of each list.
    pub lists: [Option<Holding>; 4],
    pub our_names: [String; 3],
}

/// What a server offers in its opening.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Offer {
    pub version: String,
    pub families: [bool; 3],
    pub subscribe: bool,
    pub logging: bool,
    pub completions: bool,
}

pub(super) struct Holding {
    pub items: BTreeMap<String, Value>,
    /// The last list that was complete, which may be this one.
    pub last_good: Option<BTreeMap<String, Value>>,
    pub next: Option<String>,
    pub ours: Vec<String>,
    /// A later notification said that the list changed.
    pub changed: bool,
    /// The subscriptions that were open when it came.
    pub listens: Vec<u64>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Class {
    Initialize,
    Discover,
    List(usize),
    Page(usize, String),
    /// Any other request that may be repeated.
    Safe,
    Ping,
    /// `plain`: without a task, and without anything that can be used only once.
    Call {
        tool: String,
        plain: bool,
    },
    /// By its index in `OURS`.
    Ours(usize),
    Listen {
        wants: [bool; 3],
    },
    Other,
    /// The line was too long, and only its start was read.
    TooMuch,
}

impl Class {
    fn is_plain(&self) -> bool {
        matches!(self, Class::Other)
    }
}

/// A request of the client's.
pub(super) struct Ask {
    pub number: u64,
    pub id: String,
    pub method: String,
    pub class: Class,
    pub modern: bool,
    pub cancelled: bool,
    pub answers: u32,
    pub arrived: Instant,
    /// When the first server that held it ended.
    pub first_end: Option<Instant>,
    pub batch: Option<u64>,
    pub progress: f64,
    pub acknowledged: bool,
    /// A member of a batch that failed because of a time limit: the rest of the batch is waited for.
    pub timed_out: bool,
}

impl Ask {
    /// A call of the server's own restart tool that is answered with an ordinary result.
    pub(super) fn is_restart(&self) -> bool {
        matches!(&self.class, Class::Call { tool, .. } if tool == super::RESTART_TOOL)
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Fate {
    Unknown,
    Taken,
    Unsent,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Kind {
    Request,
    /// `notifications/initialized`: every child receives it.
    Initialized,
    Note,
    /// An answer to the server request that the client knows by this id.
    Answer(String),
    /// Not a message, or an array where no batches were agreed on.
    Raw,
}

/// A line of the client, as it should reach a server.
pub(super) struct Sent {
    pub line: Bytes,
    pub kind: Kind,
    pub writes: Vec<(u32, Fate)>,
    /// A server was ready when it was sent.
    pub while_serving: bool,
}

impl Sent {
    pub(super) fn note_fate(&mut self, generation: u32, taken: bool) {
        for (to, fate) in &mut self.writes {
            if *to == generation && *fate == Fate::Unknown {
                *fate = if taken { Fate::Taken } else { Fate::Unsent };
            }
        }
    }
}

/// A server's request, as the client knows it.
pub(super) struct Question {
    pub generation: u32,
    pub own: String,
    pub open: bool,
    /// The relay cancelled it, because its server ended.
    pub cancelled: u32,
}

impl Client {
    pub(super) fn new(dice: &mut Dice) -> Client {
        Client {
            era: dice.pick(&[Era::Legacy, Era::Legacy, Era::Legacy, Era::Modern, Era::Modern, Era::Probing]),
            rude: dice.one_in(3),
            version: dice
                .pick(&["2024-11-05", "2025-03-26", "2025-03-26", "2025-06-18", "2025-11-25", "2099-01-01"])
                .to_owned(),
            next_id: 1,
            spoke: false,
            probed: false,
            asked: false,
            told: None,
            ever_local: false,
            initialized: false,
            opens_anew: false,
            lists: [None, None, None, None],
            our_names: OURS.map(str::to_owned),
        }
    }

    pub(super) fn is_modern(&self) -> bool {
        match self.era {
            Era::Legacy => false,
            Era::Modern => self.spoke,
            Era::Probing => self.probed,
        }
    }
}

impl World {
    pub(super) fn client_speaks(&mut self) {
        if self.gone.is_some() || self.ended || !self.relay.reads_client() {
            return;
        }
        if self.dice.one_in(5) {
            return self.client_answers();
        }
        let rude = self.client.rude;
        match self.client.era {
            Era::Probing if !self.client.probed => return self.discovers(),
            Era::Modern if !self.client.probed && self.dice.one_in(2) => return self.discovers(),
            Era::Legacy | Era::Probing if !(self.client.asked || rude && self.dice.one_in(3)) => {
                // A well-behaved client waits for the answer to its probe.
                let waits = self.asks.values().any(|ask| ask.class == Class::Discover && ask.answers == 0);
                if waits && !(rude && self.dice.one_in(4)) {
                    return;
                }
                return self.initializes();
            }
            Era::Legacy | Era::Probing if self.client.told.is_none() && !rude => return,
            _ => {}
        }
        if !self.client.is_modern() && self.client.told.is_some() && !self.client.initialized {
            self.client.initialized = true;
            self.client.opens_anew = false;
            let number = self.number();
            let line =
                bytes(format!(r#"{{"jsonrpc":"2.0","method":"notifications/initialized","params":{{"n":{number}}}}}"#));
            return self.client_says(number, line, Kind::Initialized);
        }
        match self.dice.below(40) {
            0..=2 => self.cancels(),
            3..=4 => self.notes(),
            5 if rude => self.talks_nonsense(),
            6 if rude && !self.client.is_modern() && self.client.told.is_some() => self.initializes(),
            7..=9 if !self.client.is_modern() => self.batches(),
            10 => self.discovers(),
            _ => {
                let (number, text) = self.request(None);
                self.client_says(number, bytes(text), Kind::Request);
            }
        }
    }

    fn client_says(&mut self, number: u64, line: Bytes, kind: Kind) {
        let while_serving = self.serving().is_some();
        self.sent.insert(number, Sent { line: line.clone(), kind, writes: Vec::new(), while_serving });
        self.happen(Event::ClientSaid(line), Told::Said(number));
    }

    fn initializes(&mut self) {
        let version = self.client.version.clone();
        let extra = format!(
            r#""protocolVersion":"{version}","capabilities":{{"roots":{{ }}}},"clientInfo":{{"name":"sim","version":"1"}}"#
        );
        self.client.asked = true;
        self.client.opens_anew = self.client.told.is_some();
        self.client.era = Era::Legacy;
        let (number, text) = self.ask("initialize", &extra, Class::Initialize, None);
        self.client_says(number, bytes(text), Kind::Request);
    }

    fn discovers(&mut self) {
        if self.client.era == Era::Legacy {
            return;
        }
        self.client.probed = true;
        let (number, text) = self.ask("server/discover", "", Class::Discover, None);
        self.client_says(number, bytes(text), Kind::Request);
    }

    /// Any request but an opening.
    fn request(&mut self, batch: Option<u64>) -> (u64, String) {
        self.client.spoke = true;
        let modern = self.client.is_modern();
        if modern {
            // From here on it is more than a probe.
            self.client.era = Era::Modern;
        }
        match self.dice.below(30) {
            0..=8 => {
                let kind = self.dice.pick(&[0, 0, 0, 1, 2, 3]);
                let next = self.client.lists[kind].as_ref().and_then(|list| list.next.clone());
                match next {
                    Some(cursor) if !self.dice.one_in(4) => {
                        let extra = format!(r#""cursor":"{cursor}""#);
                        self.ask(METHODS[kind], &extra, Class::Page(kind, cursor), batch)
                    }
                    _ => self.ask(METHODS[kind], "", Class::List(kind), batch),
                }
            }
            9..=10 => self.ask("resources/read", r#""uri":"file:///a""#, Class::Safe, batch),
            11 => self.ask("completion/complete", r#""ref":{}"#, Class::Safe, batch),
            12 => self.ask("prompts/get", r#""name":"p","requestState":"s""#, Class::Other, batch),
            13 if modern => self.ask("ping", "", Class::Other, batch),
            13 | 14 => self.ask("ping", "", if modern { Class::Other } else { Class::Ping }, batch),
            15 => {
                let class = if modern { Class::Other } else { Class::Safe };
                self.ask("logging/setLevel", r#""level":"debug""#, class, batch)
            }
            16 => {
                let method = self.dice.pick(&["resources/subscribe", "resources/unsubscribe"]);
                let uri = format!(r#""uri":"file:///{}""#, self.dice.below(3));
                self.ask(method, &uri, if modern { Class::Other } else { Class::Safe }, batch)
            }
            17 => self.ask("x/unheard", r#""deep":{"id":7,"method":"no"}"#, Class::Other, batch),
            18..=19 if modern => self.listens(),
            18..=20 => {
                let which = self.dice.below(3) as usize;
                let name = self.client.our_names[which].clone();
                if which == 0 && self.peaceful {
                    return self.ask("x/quiet", "", Class::Other, batch);
                }
                let arguments = match which {
                    1 => r#"{"since_timestamp":4.5}"#,
                    _ => "{}",
                };
                let extra = format!(r#""name":"{name}","arguments":{arguments}"#);
                let ours = self.settings.tools && !self.clash;
                let class = if ours { Class::Ours(which) } else { Class::Call { tool: name, plain: true } };
                self.ask("tools/call", &extra, class, batch)
            }
            _ => {
                let tool = self.dice.pick(&["t1", "t2", "t3", "read", "restart_here"]).to_owned();
                let more = self.dice.pick(&["", "", "", r#","task":{}"#, r#","requestState":"x""#]);
                let extra = format!(r#""name":"{tool}","arguments":{{"a" : [1.0, 2e1]}}{more}"#);
                self.ask("tools/call", &extra, Class::Call { tool, plain: more.is_empty() }, batch)
            }
        }
    }

    fn listens(&mut self) -> (u64, String) {
        let wants = [self.dice.one_in(2), self.dice.one_in(2), self.dice.one_in(3)];
        let flags: Vec<String> = FLAGS
            .into_iter()
            .zip(wants)
            .filter(|(_, wants)| *wants)
            .map(|(flag, _)| format!(r#""{flag}":true"#))
            .collect();
        let extra = format!(r#""notifications":{{{}}}"#, flags.join(","));
        self.ask("subscriptions/listen", &extra, Class::Listen { wants }, None)
    }

    /// Writes a request and records it. The caller sends it.
    fn ask(&mut self, method: &str, extra: &str, class: Class, batch: Option<u64>) -> (u64, String) {
        let number = self.number();
        self.client.spoke = true;
        let modern = self.client.is_modern();
        let own = self.client.next_id;
        self.client.next_id += 1;
        // If two different requests have one id, the request of an answer is unknown.
        let is_plain = class.is_plain() && batch.is_none();
        let open: Vec<String> = self
            .asks
            .values()
            .filter(|ask| ask.answers == 0 && !ask.cancelled && ask.batch.is_none())
            .filter(|ask| ask.class.is_plain())
            .map(|ask| ask.id.clone())
            .collect();
        let id = match self.dice.below(10) {
            0 if is_plain && self.client.rude && !open.is_empty() => self.dice.pick(&open),
            0..=1 => format!(r#""c{own}""#),
            2 => format!(r#""\u0063\/{own}""#),
            3 => format!("-{own}"),
            _ => format!("{own}"),
        };
        let token = (!matches!(class, Class::Initialize | Class::Discover) && self.dice.one_in(3))
            .then(|| format!(r#""tok{number}""#));
        let mut meta = Vec::new();
        if modern {
            meta.push(format!(r#""io.modelcontextprotocol/protocolVersion":"{VERSION}""#));
            meta.push(r#""io.modelcontextprotocol/logLevel":"debug""#.into());
        }
        meta.extend(token.as_ref().map(|token| format!(r#""progressToken":{token}"#)));
        let comma = if extra.is_empty() { "" } else { "," };
        let mut params = format!(r#""n":{number}{comma}{extra}"#);
        if !meta.is_empty() {
            params = format!(r#"{params},"_meta":{{{}}}"#, meta.join(","));
        }
        let space = if self.dice.one_in(4) { " " } else { "" };
        let text = format!(
            r#"{{{space}"jsonrpc":{space}"2.0","id":{id}{space},"method":"{method}","params":{{{params}}},"extra":[ ]}}"#
        );
        let parsed: Value = serde_json::from_str(&id).expect("an id is JSON");
        let ask = Ask {
            number,
            id: id_text(&parsed),
            method: method.to_owned(),
            class,
            modern,
            cancelled: false,
            answers: 0,
            arrived: self.now,
            first_end: None,
            batch,
            progress: f64::NEG_INFINITY,
            acknowledged: false,
            timed_out: false,
        };
        self.asks.insert(number, ask);
        (number, text)
    }

    fn cancels(&mut self) {
        let open: Vec<u64> = self
            .asks
            .values()
            .filter(|ask| ask.answers == 0 && !ask.cancelled)
            .filter(|ask| !self.has_twin(ask))
            .map(|ask| ask.number)
            .collect();
        let number = self.number();
        let id = if open.is_empty() || self.dice.one_in(8) {
            r#""unknown""#.to_owned()
        } else {
            let ask = self.dice.pick(&open);
            let ask = self.asks.get_mut(&ask).expect("listed above");
            if ask.class != Class::Initialize {
                ask.cancelled = true;
            }
            ask.id.clone()
        };
        let line = bytes(format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id},"n":{number}}}}}"#
        ));
        self.client_says(number, line, Kind::Note);
    }

    /// Another request has the same id, so that the request of an answer is unknown.
    pub(super) fn has_twin(&self, ask: &Ask) -> bool {
        self.asks.values().any(|other| other.number != ask.number && other.id == ask.id)
    }

    fn notes(&mut self) {
        let number = self.number();
        let method = self.dice.pick(&[
            "notifications/roots/list_changed",
            "notifications/unheard",
            "notifications/unheard",
            "notifications/progress",
        ]);
        let line = bytes(format!(
            r#"{{"jsonrpc":"2.0","method":"{method}","params":{{"n":{number},"progressToken":"q","progress":1}}}}"#
        ));
        self.client_says(number, line, Kind::Note);
    }

    fn talks_nonsense(&mut self) {
        let number = self.number();
        match self.dice.below(6) {
            0 => {
                self.nulls_due += 1;
                self.happen(Event::ClientSaid(Bytes::from_static(b"{\"jsonrpc\": oh no\n")), Told::Something);
            }
            1 => self.client_says(number, bytes(format!(r#"{{"n":{number}}}"#)), Kind::Raw),
            2 => {
                let line = format!(r#"{{"jsonrpc":"2.0","id":null,"method":"x/null","params":{{"n":{number}}}}}"#);
                self.client_says(number, bytes(line), Kind::Note);
            }
            3 => {
                let line = format!(r#"{{"jsonrpc":"2.0","id":1.5,"method":"x/half","params":{{"n":{number}}}}}"#);
                self.client_says(number, bytes(line), Kind::Note);
            }
            4 => {
                // An answer to no request.
                let line = format!(r#"{{"jsonrpc":"2.0","id":"unknown","result":{{"n":{number}}}}}"#);
                self.client_says(number, bytes(line), Kind::Answer("unknown".into()));
            }
            _ => {
                let (number, text) = self.ask("x/long", "", Class::TooMuch, None);
                self.happen(Event::ClientSaidTooMuch(text.into_bytes().into()), Told::Something);
                let answers = self.asks[&number].answers;
                check!(self, answers == 1, "a line too long got {answers} answers");
            }
        }
    }

    fn batches(&mut self) {
        let agreed = self.client.told.as_ref().is_some_and(|told| told.version == "2025-03-26");
        let key = self.number();
        if !agreed {
            if self.client.told.is_some() && self.client.rude {
                let array = format!(r#"[{{"jsonrpc":"2.0","id":"raw{key}","method":"x/raw","params":{{"n":{key}}}}}]"#);
                self.client_says(key, bytes(array), Kind::Raw);
            }
            return;
        }
        let while_serving = self.serving().is_some();
        let mut members = Vec::new();
        let mut numbers = Vec::new();
        let size = self.dice.below(7);
        if !(1..=5).contains(&size) {
            let member = r#"{"jsonrpc":"2.0","method":"notifications/unheard"}"#;
            members = vec![member.to_owned(); size as usize];
            self.nulls_due += 1;
        }
        while members.len() < size as usize {
            match self.dice.below(6) {
                0 => {
                    let number = self.number();
                    let text =
                        format!(r#"{{"jsonrpc":"2.0","method":"notifications/unheard","params":{{"n":{number}}}}}"#);
                    let line = bytes(text.clone());
                    self.sent.insert(number, Sent { line, kind: Kind::Note, writes: Vec::new(), while_serving });
                    members.push(text);
                }
                1 if self.dice.one_in(3) => {
                    let (number, text) = self.ask("initialize", "", Class::TooMuch, Some(key));
                    numbers.push(number);
                    members.push(text);
                }
                _ => {
                    let (number, text) = self.request(Some(key));
                    let line = bytes(text.clone());
                    self.sent.insert(number, Sent { line, kind: Kind::Request, writes: Vec::new(), while_serving });
                    numbers.push(number);
                    members.push(text);
                }
            }
        }
        for number in &numbers {
            if let Class::List(kind) | Class::Page(kind, _) = self.asks[number].class {
                self.batched[FAMILY[kind]] = true;
            }
        }
        self.batches.insert(key, numbers);
        let line = bytes(format!("[{}]", members.join(", ")));
        self.happen(Event::ClientSaid(line), Told::Something);
    }

    /// The client answers a server request, perhaps one that has ended.
    fn client_answers(&mut self) {
        let rude = self.client.rude && self.dice.one_in(3);
        let mut known: Vec<String> =
            self.questions.iter().filter(|(_, question)| question.open || rude).map(|(id, _)| id.clone()).collect();
        // In an order that the seed repeats.
        known.sort();
        if known.is_empty() {
            return;
        }
        let id = self.dice.pick(&known);
        let number = self.number();
        let line = bytes(format!(r#"{{"jsonrpc":"2.0","id":{id}, "result":{{"n":{number}}}}}"#));
        self.client_says(number, line, Kind::Answer(id));
    }
}
