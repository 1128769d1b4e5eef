//! One client's MCP conversation, over any transport: what it asks, and whether what it hears is its own.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::ledger::{Asker, Ledger};
use crate::{Dice, mcp_server::number_of};

/// Requests that a client has open at most.
const OPEN_MAX: usize = 4;

pub(crate) struct Conversation {
    pub asker: Asker,
    is_handshake: bool,
    /// Tools have the prefixes of a gateway.
    has_prefixes: bool,
    next_id: i64,
    open: BTreeMap<String, Asked>,
    /// Cancelled requests: an answer may be in transit.
    cancelled: BTreeMap<String, Asked>,
    /// Unanswered server requests: the id, the parameters.
    questions: Vec<(Value, Value)>,
    /// Resources that it is subscribed to.
    pub watches: BTreeSet<String>,
    ever_watched: BTreeSet<String>,
    is_ready: bool,
}

#[derive(Clone)]
struct Asked {
    number: u64,
    method: String,
    params: Value,
}

impl Conversation {
    pub(crate) fn new(is_handshake: bool, has_prefixes: bool, ledger: &mut Ledger) -> Conversation {
        Conversation {
            asker: ledger.new_asker(),
            is_handshake,
            has_prefixes,
            next_id: 0,
            open: BTreeMap::new(),
            cancelled: BTreeMap::new(),
            questions: Vec::new(),
            watches: BTreeSet::new(),
            ever_watched: BTreeSet::new(),
            is_ready: !is_handshake,
        }
    }

    /// The first message of the handshake era.
    pub(crate) fn initialize(&mut self, ledger: &mut Ledger, dice: &mut Dice) -> Value {
        let capabilities =
            if dice.one_in(3) { json!({}) } else { json!({"elicitation": {}, "sampling": {}, "roots": {}}) };
        let info = json!({"name": "c", "version": "1"});
        let params = json!({"protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": info});
        self.ask("initialize", params, ledger)
    }

    /// The numbers of its open requests.
    pub(crate) fn waits_for(&self) -> impl Iterator<Item = u64> {
        self.open.values().filter(|asked| asked.method != "subscriptions/listen").map(|asked| asked.number)
    }

    /// A server waits for its answer.
    pub(crate) fn is_questioned(&self) -> bool {
        !self.questions.is_empty()
    }

    fn ask(&mut self, method: &str, mut params: Value, ledger: &mut Ledger) -> Value {
        let is_safe = method != "tools/call" || params["name"].as_str().is_some_and(|name| name.ends_with("t0"));
        let number = number_of(&params).unwrap_or_else(|| ledger.ask(self.asker, is_safe));
        if !self.is_handshake {
            params["_meta"]["io.modelcontextprotocol/protocolVersion"] = json!("2026-07-28");
            params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = json!({"elicitation": {}});
        }
        let id = self.next_id;
        self.next_id += 1;
        self.open.insert(id.to_string(), Asked { number, method: method.to_owned(), params: params.clone() });
        json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
    }

    /// Says something, if it may.
    pub(crate) fn act(&mut self, ledger: &mut Ledger, dice: &mut Dice) -> Option<Value> {
        if !self.is_ready {
            return None;
        }
        if dice.one_in(3) {
            return self.answer_question(dice);
        }
        if self.open.len() >= OPEN_MAX {
            return dice.one_in(4).then(|| self.cancel(dice)).flatten();
        }
        Some(self.request(ledger, dice))
    }

    /// Any request but an opening.
    pub(crate) fn request(&mut self, ledger: &mut Ledger, dice: &mut Dice) -> Value {
        let backend = dice.below(3);
        match dice.below(16) {
            0 => self.ask("tools/list", json!({}), ledger),
            1 if self.is_handshake => self.ask("ping", json!({}), ledger),
            1 => self.ask("server/discover", json!({}), ledger),
            2 if self.is_handshake => {
                let level = dice.pick(&["debug", "error"]);
                self.ask("logging/setLevel", json!({"level": level}), ledger)
            }
            2..=4 if self.is_handshake => {
                // Each client watches resources of its own, so that each knows what is meant for it.
                let uri = format!("r://{backend}/of-{}", self.asker);
                let method = if self.watches.contains(&uri) && dice.one_in(3) { "unsubscribe" } else { "subscribe" };
                // Whether an `unsubscribe` that is not answered was carried out is not known.
                self.watches.remove(&uri);
                self.ever_watched.insert(uri.clone());
                self.ask(&format!("resources/{method}"), json!({"uri": uri}), ledger)
            }
            5..=6 => {
                let number = ledger.ask(self.asker, true);
                self.ask("resources/read", json!({"uri": format!("r://{backend}/{number}")}), ledger)
            }
            _ => {
                let tool = dice.below(3);
                let number = ledger.ask(self.asker, tool == 0);
                let name = if self.has_prefixes { format!("b{backend}__t{tool}") } else { format!("t{tool}") };
                let mut params = json!({"name": name, "arguments": {"n": number}});
                if dice.one_in(3) {
                    params["_meta"]["progressToken"] = json!(format!("tok{number}"));
                }
                self.ask("tools/call", params, ledger)
            }
        }
    }

    fn cancel(&mut self, dice: &mut Dice) -> Option<Value> {
        let may =
            |asked: &Asked| !["initialize", "resources/subscribe", "resources/unsubscribe"].contains(&&*asked.method);
        let open: Vec<String> = self.open.iter().filter(|(_, asked)| may(asked)).map(|(id, _)| id.clone()).collect();
        if open.is_empty() {
            return None;
        }
        let id = dice.pick(&open);
        let asked = self.open.remove(&id).expect("listed above");
        self.cancelled.insert(id.clone(), asked);
        let id: i64 = id.parse().expect("its ids are numbers");
        Some(json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}}))
    }

    /// Answers a server request, if there is one.
    pub(crate) fn answer_question(&mut self, dice: &mut Dice) -> Option<Value> {
        let (id, params) = self.questions.pop()?;
        Some(match dice.one_in(5) {
            true => json!({"jsonrpc": "2.0", "id": id, "error": {"code": -1, "message": "no"}}),
            false => json!({"jsonrpc": "2.0", "id": id, "result": {"q": params["q"]}}),
        })
    }

    /// Checks a message, and returns what the client says to it at once.
    pub(crate) fn hear(&mut self, said: &Value, ledger: &mut Ledger, dice: &mut Dice) -> Option<Value> {
        match (said.get("method").and_then(Value::as_str), said.get("id")) {
            (None, Some(id)) => self.is_answered(&id.to_string(), said, ledger, dice),
            (Some(_), Some(id)) => {
                self.is_asked(id, said, ledger);
                None
            }
            (Some(method), None) => {
                self.is_notified(method, said);
                None
            }
            (None, None) => panic!("client {} heard {said}", self.asker),
        }
    }

    fn is_answered(&mut self, id: &str, said: &Value, ledger: &mut Ledger, dice: &mut Dice) -> Option<Value> {
        if let Some(asked) = self.cancelled.remove(id) {
            ledger.answer(asked.number, self.asker, said);
            return None;
        }
        let Some(asked) = self.open.remove(id) else {
            panic!("client {} was answered {said}, and did not ask or was answered before", self.asker)
        };
        ledger.answer(asked.number, self.asker, said);
        let is_result = said.get("result").is_some();
        let uri = || asked.params["uri"].as_str().unwrap_or_default().to_owned();
        match asked.method.as_str() {
            "initialize" if is_result => {
                self.is_ready = true;
                return Some(json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
            }
            "resources/subscribe" if is_result => drop(self.watches.insert(uri())),
            _ if said["result"]["resultType"] == "input_required" && !dice.one_in(3) => {
                return Some(self.try_again(&asked, said, ledger));
            }
            _ => {}
        }
        None
    }

    fn try_again(&mut self, asked: &Asked, said: &Value, ledger: &mut Ledger) -> Value {
        let questions = said["result"]["inputRequests"].as_object().into_iter().flatten();
        let responses = questions.map(|(name, question)| {
            let number = question["params"]["for"].as_u64();
            assert!(number.is_none_or(|number| number == asked.number), "{said} is not about {}", asked.number);
            (name.clone(), json!({"q": question["params"]["q"]}))
        });
        let mut params = asked.params.clone();
        params["inputResponses"] = Value::Object(responses.collect());
        params["requestState"] = said["result"]["requestState"].clone();
        self.ask(&asked.method, params, ledger)
    }

    fn is_asked(&mut self, id: &Value, said: &Value, ledger: &Ledger) {
        assert!(self.is_handshake, "a stateless client was asked {said}");
        if let Some(number) = said["params"]["for"].as_u64() {
            let is_its_own = ledger.asker_of(number) == Some(self.asker);
            assert!(is_its_own, "client {} was asked {said}, and did not ask {number}", self.asker);
        }
        assert!(!self.questions.iter().any(|(known, _)| known == id), "{id} was asked twice");
        self.questions.push((id.clone(), said["params"].clone()));
    }

    fn is_notified(&mut self, method: &str, said: &Value) {
        match method {
            "notifications/progress" => {
                let (token, number) = (&said["params"]["progressToken"], said["params"]["n"].as_u64());
                let mut known = self.open.values().chain(self.cancelled.values());
                let fits = known.any(|asked| {
                    // The heartbeat of a relay has no number.
                    let is_it = number.is_none_or(|number| number == asked.number);
                    is_it && asked.params["_meta"]["progressToken"] == *token
                });
                assert!(fits, "client {} heard of progress that is not its own: {said}", self.asker);
            }
            "notifications/cancelled" => {
                let id = &said["params"]["requestId"];
                let asked = self.questions.iter().position(|(asked, _)| asked == id);
                // The answer may be on its way.
                asked.into_iter().for_each(|index| drop(self.questions.remove(index)));
            }
            "notifications/resources/updated" => {
                let uri = said["params"]["uri"].as_str().unwrap_or_default();
                assert!(self.ever_watched.contains(uri), "client {} does not watch {uri}: {said}", self.asker);
            }
            _ => {}
        }
    }
}
