//! An MCP server without a transport: it notes what it is asked, and answers when the world says so. It is of one era
//! or both, and continues cancelled requests if it is stubborn.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::Dice;

/// How long after a cancellation even a stubborn server still sends requests for the call.
const STUBBORN_MAX: Duration = Duration::from_secs(30);

pub(crate) struct McpServer {
    pub handshake: bool,
    pub stateless: bool,
    /// Continues cancelled requests for a while.
    pub is_stubborn: bool,
    pub tools: u64,
    pub open: Vec<Work>,
    /// Cancelled requests that it still works on.
    ghosts: Vec<Work>,
    /// Open requests to clients: its id, the number of the request.
    pub questions: Vec<(Value, u64)>,
    /// Ids of requests that it cancelled: an answer may be in transit, so they are not used again.
    taken_back: Vec<Value>,
    /// The same by the numbers of the requests.
    pub withdrawn: BTreeSet<u64>,
    /// Resources that it was asked to report, in the handshake era.
    watched: BTreeSet<String>,
}

/// A request that it works on.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub id: Value,
    pub method: String,
    pub params: Value,
    /// The number of the client's request; none of outlast's own.
    pub number: Option<u64>,
    pub token: Option<Value>,
    /// When it was cancelled. A stubborn server may still send requests for it.
    taken_back: Option<Instant>,
}

/// How an answer comes out.
pub(crate) struct Turn {
    /// The server names itself by this in what it says.
    pub by: u64,
    /// The first part of the URIs of its resources.
    pub backend: u64,
    /// It asks the client instead of answering, under this number, if its era allows that.
    pub asks: Option<u64>,
    pub fails: bool,
}

impl Work {
    pub(crate) fn of(said: &Value) -> Work {
        let params = said["params"].clone();
        let method = said["method"].as_str().unwrap_or_default().to_owned();
        let number = number_of(&params).filter(|_| ["tools/call", "resources/read"].contains(&method.as_str()));
        let token = params["_meta"].get("progressToken").cloned();
        Work { id: said["id"].clone(), method, params, number, token, taken_back: None }
    }

    /// It may be carried out twice.
    pub(crate) fn is_safe(&self) -> bool {
        self.method == "resources/read" || self.params["name"] == "t0"
    }

    /// It answers a question that came instead of the result: the number was seen before.
    pub(crate) fn is_retry(&self) -> bool {
        self.params.get("inputResponses").is_some()
    }

    pub(crate) fn line(&self) -> Value {
        json!({"jsonrpc": "2.0", "id": self.id, "method": self.method, "params": self.params})
    }
}

/// The number that a request carries.
pub(crate) fn number_of(params: &Value) -> Option<u64> {
    params["arguments"]["n"].as_u64().or_else(|| params["uri"].as_str()?.rsplit('/').next()?.parse().ok())
}

impl McpServer {
    pub(crate) fn new(handshake: bool, stateless: bool, dice: &mut Dice) -> McpServer {
        McpServer {
            handshake,
            stateless,
            is_stubborn: dice.one_in(3),
            tools: dice.below(3),
            open: Vec::new(),
            ghosts: Vec::new(),
            questions: Vec::new(),
            taken_back: Vec::new(),
            withdrawn: BTreeSet::new(),
            watched: BTreeSet::new(),
        }
    }

    pub(crate) fn is_stateless(&self, params: &Value) -> bool {
        self.stateless && params["_meta"]["io.modelcontextprotocol/protocolVersion"] == "2026-07-28"
    }

    /// Resources that it reports or is about to, in either era.
    pub(crate) fn watched(&self) -> BTreeSet<String> {
        let asked = self.open.iter().filter(|work| work.method == "resources/subscribe");
        let asked = asked.filter_map(|work| work.params["uri"].as_str()).map(str::to_owned);
        let listens = self.open.iter().filter(|work| work.method == "subscriptions/listen");
        let uris = listens.filter_map(|work| work.params["notifications"]["resourceSubscriptions"].as_array());
        let uris = uris.flatten().filter_map(Value::as_str).map(str::to_owned);
        self.watched.iter().cloned().chain(asked).chain(uris).collect()
    }

    /// An answer to one of its requests came. It must be the answer to this one.
    pub(crate) fn hear_answer(&mut self, said: &Value) {
        let Some(index) = self.questions.iter().position(|(id, _)| *id == said["id"]) else { return };
        let (_, number) = self.questions.remove(index);
        if let Some(answer) = said["result"].get("q") {
            assert!(*answer == number, "question {number} was answered with {said}");
        }
    }

    /// The client cancelled a request. `is_calm`: no server is stubborn any more.
    pub(crate) fn hear_cancelled(&mut self, id: &Value, is_calm: bool, now: Instant) {
        let (cancelled, open) = std::mem::take(&mut self.open).into_iter().partition(|work: &Work| work.id == *id);
        self.open = open;
        if self.is_stubborn && !is_calm {
            let cancelled: Vec<Work> = cancelled;
            self.ghosts.extend(cancelled.into_iter().map(|work| Work { taken_back: Some(now), ..work }));
        }
    }

    /// Sends a request under this number to the client: the request, and the call that it is for.
    pub(crate) fn ask(&mut self, number: u64, by: u64, dice: &mut Dice, now: Instant) -> Option<(Value, Option<Work>)> {
        let id = if dice.one_in(2) { json!(number % 7) } else { json!(format!("q{number}")) };
        if self.questions.iter().any(|(known, _)| *known == id) || self.taken_back.contains(&id) {
            return None;
        }
        self.questions.push((id.clone(), number));
        let method = dice.pick(&["elicitation/create", "sampling/createMessage", "roots/list"]);
        // The request belongs to one of its calls, which only the world knows.
        let is_fresh = |work: &&Work| work.taken_back.is_none_or(|at| now.duration_since(at) < STUBBORN_MAX);
        let works = self.open.iter().chain(&self.ghosts).filter(|work| work.number.is_some()).filter(is_fresh);
        let works: Vec<Work> = works.cloned().collect();
        let work = if works.is_empty() { None } else { Some(dice.pick(&works)) };
        let mut params = json!({"q": number, "by": by});
        if let Some(work) = &work {
            params["for"] = json!(work.number);
        }
        Some((json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}), work))
    }

    /// Cancels its newest request to a client.
    pub(crate) fn withdraw(&mut self) -> Option<Value> {
        let (id, number) = self.questions.pop()?;
        self.taken_back.push(id.clone());
        self.withdrawn.insert(number);
        Some(json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}}))
    }

    /// Progress of a call that wants it.
    pub(crate) fn progress(&self) -> Option<Value> {
        let work = self.open.iter().find(|work| work.token.is_some())?;
        let params = json!({"progressToken": work.token, "progress": 1, "n": work.number});
        Some(json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params}))
    }

    /// Answers the request at this place; none if it stays open.
    pub(crate) fn answer(&mut self, index: usize, turn: &Turn) -> Option<Value> {
        if self.open[index].method == "subscriptions/listen" {
            return None;
        }
        let work = self.open.remove(index);
        let is_stateless = self.is_stateless(&work.params);
        let error = |code: i32| json!({"jsonrpc": "2.0", "id": work.id, "error": {"code": code, "message": "no"}});
        let mut result = match work.method.as_str() {
            "initialize" if !self.handshake => return Some(error(-32022)),
            "server/discover" if !self.stateless => return Some(error(-32601)),
            "initialize" | "server/discover" if turn.fails => return Some(error(-32603)),
            "initialize" => {
                json!({"protocolVersion": "2025-11-25", "capabilities": capabilities(), "serverInfo": {"name": "s", "version": "1"}})
            }
            "server/discover" => {
                let versions = if self.handshake { json!(["2026-07-28", "2025-11-25"]) } else { json!(["2026-07-28"]) };
                json!({"supportedVersions": versions, "capabilities": capabilities()})
            }
            "tools/list" => {
                let mut tools: Vec<Value> =
                    (0..=self.tools).map(|index| json!({"name": format!("t{index}"), "inputSchema": {}})).collect();
                tools[0]["annotations"] = json!({"readOnlyHint": true});
                json!({"tools": tools})
            }
            "resources/list" => json!({"resources": []}),
            "resources/templates/list" => {
                json!({"resourceTemplates": [{"name": "r", "uriTemplate": format!("r://{}/{{n}}", turn.backend)}]})
            }
            "prompts/list" => json!({"prompts": []}),
            "resources/subscribe" | "resources/unsubscribe" => {
                let uri = work.params["uri"].as_str().unwrap_or_default().to_owned();
                match work.method == "resources/subscribe" {
                    true => drop(self.watched.insert(uri)),
                    false => drop(self.watched.remove(&uri)),
                }
                json!({})
            }
            "tools/call" if is_stateless && turn.asks.is_some() => {
                let number = turn.asks;
                let asked = json!({"a": {"method": "elicitation/create", "params": {"q": number, "by": turn.by, "for": work.number}}});
                let result = json!({"resultType": "input_required", "inputRequests": asked, "requestState": "theirs", "n": work.number});
                return Some(json!({"jsonrpc": "2.0", "id": work.id, "result": result}));
            }
            _ if turn.fails && work.number.is_some() => {
                let mut answer = error(-1);
                answer["error"]["data"] = json!({"n": work.number});
                return Some(answer);
            }
            _ => json!({"n": work.number, "by": turn.by, "content": []}),
        };
        if is_stateless {
            result["resultType"] = json!("complete");
        }
        Some(json!({"jsonrpc": "2.0", "id": work.id, "result": result}))
    }
}

fn capabilities() -> Value {
    json!({"tools": {"listChanged": true}, "resources": {"subscribe": true}, "logging": {}})
}
