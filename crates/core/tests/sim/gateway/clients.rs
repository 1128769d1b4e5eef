//! Clients of both eras that ask, cancel, answer late or never, and leave.

use super::*;
use serde_json::json;

pub(super) struct Client {
    front: Front,
    /// Of the handshake era, and its handshake is done.
    handshake: bool,
    /// Its open requests, by the id as JSON.
    pub open: BTreeMap<String, Request>,
    /// Cancelled ids: no answer may follow.
    cancelled: BTreeSet<String>,
    /// Unanswered server requests: the gateway's id, the request.
    asked: Vec<(Value, Value)>,
    /// The tools that it was shown, until it is told of a change.
    known: Option<Vec<String>>,
    listing: Vec<String>,
    /// Its profile hides a tool.
    is_restricted: bool,
    pub called: u64,
    /// Requests that must be counted once each when they end.
    pub countable: u64,
    may_be_counted_more: bool,
    next_id: u64,
    /// The server that all clients share has not answered its handshake.
    is_opening: bool,
    /// It finishes its requests here and goes to a server of its own.
    is_separated: bool,
}

#[derive(Clone)]
pub(super) struct Request {
    pub number: u64,
    asked_at: Instant,
    method: String,
    params: Value,
    token: Option<Value>,
    pub listens: bool,
    pub is_parked: bool,
}

impl Client {
    pub(super) fn is_asked_by(&self, serial: u64) -> bool {
        self.asked.iter().any(|(_, question)| question["by"] == serial)
    }

    pub(super) fn is_counted(&self) -> bool {
        self.called == self.countable || self.may_be_counted_more
    }
}

impl World {
    pub(crate) fn client_comes(&mut self) {
        if let Some(capabilities) = self.shared.clone() {
            return self.sharing_client_comes(&capabilities);
        }
        // In some worlds a single client with many calls has all backends to itself, so that server requests can
        // reach it.
        let is_single = self.seed.is_multiple_of(4);
        if is_single && !self.clients.is_empty() {
            return;
        }
        let client = self.next_client;
        self.next_client += 1;
        let front = match is_single {
            true => Front::Session,
            false => self.dice.pick(&[Front::Session, Front::Lines, Front::Request, Front::Request]),
        };
        let handshake = match front {
            Front::Session => true,
            Front::Lines => self.dice.one_in(2),
            Front::Request => false,
        };
        let profile = (self.settings.profiles.contains_key("p") && self.dice.one_in(2)).then(|| "p".to_owned());
        let is_restricted = profile.is_some();
        let who = Who { name: format!("who{}", client % 3), role: None, profile };
        self.add_client(client, front, is_restricted);
        self.handle(Event::ClientCame { client, front, who });
        if handshake {
            let capabilities =
                if self.dice.one_in(3) { json!({}) } else { json!({"elicitation": {}, "sampling": {}, "roots": {}}) };
            self.client_asks(client, "initialize", json!({"protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": {"name": "c", "version": "1"}}));
            self.clients.get_mut(&client).expect("made above").handshake = true;
            self.client_says(client, &json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        } else if front == Front::Request {
            self.client_acts_as(client);
        }
    }

    /// A client of the server that all share. It is turned away once the server is for one client.
    fn sharing_client_comes(&mut self, capabilities: &Value) {
        let admitted = self.gateway.admit(&capabilities.to_string());
        check!(self, admitted.is_ok() != self.is_exclusive(), "{admitted:?} with {} clients", self.clients.len());
        if admitted.is_err() {
            return;
        }
        let other = self.gateway.admit(r#"{"experimental":{}}"#);
        check!(self, other.is_err_and(|apart| apart.with_equals), "clients with other capabilities share the server");
        let client = self.next_client;
        self.next_client += 1;
        self.add_client(client, Front::Lines, false);
        let who = Who { name: client.to_string(), role: None, profile: None };
        self.handle(Event::ClientCame { client, front: Front::Lines, who });
        if self.dice.one_in(3) {
            return; // Of the stateless era.
        }
        self.clients.get_mut(&client).expect("made above").is_opening = true;
        let version = self.dice.pick(&["2025-11-25", "2025-06-18"]);
        self.client_asks(client, "initialize", json!({"protocolVersion": version, "capabilities": capabilities, "clientInfo": {"name": "c", "version": "1"}}));
    }

    fn is_exclusive(&self) -> bool {
        self.gateway.exclusive().is_some()
    }

    /// The shared server is for one client: this one goes to a server of its own when its requests are answered.
    pub(super) fn client_is_separated(&mut self, client: u64) {
        check!(self, self.shared.is_some() && self.is_exclusive(), "client {client} may share the server");
        check!(self, self.clients.contains_key(&client), "client {client} is gone and was separated");
        let state = self.clients.get_mut(&client).expect("seen above");
        let is_first = !std::mem::replace(&mut state.is_separated, true);
        check!(self, is_first, "client {client} was separated twice");
    }

    /// At most one client stays with a server that asks what only one client can answer.
    pub(super) fn check_separation(&self) {
        let staying = self.clients.values().filter(|client| !client.is_separated).count();
        check!(self, !self.is_exclusive() || staying <= 1, "{staying} clients stay with a server for one");
    }

    fn add_client(&mut self, client: u64, front: Front, is_restricted: bool) {
        self.clients.insert(
            client,
            Client {
                front,
                handshake: false,
                open: BTreeMap::new(),
                cancelled: BTreeSet::new(),
                asked: Vec::new(),
                known: None,
                listing: Vec::new(),
                is_restricted,
                called: 0,
                countable: 0,
                may_be_counted_more: false,
                next_id: 0,
                is_opening: false,
                is_separated: false,
            },
        );
    }

    fn client_says(&mut self, client: u64, message: &Value) {
        let mut text = message.to_string();
        if self.dice.one_in(5) {
            text = text.replacen(':', ": \n ", 1);
        }
        let message = Bytes::from(text);
        // A line arrives after the client's earlier lines.
        let is_line = self.clients.get(&client).is_some_and(|state| state.front == Front::Lines);
        let is_earlier = |event: &Event| matches!(event, Event::ClientSaid { client: of, .. } if *of == client);
        while let Some(at) = self.owed.iter().position(is_earlier).filter(|_| is_line) {
            let earlier = self.owed.remove(at).expect("found above");
            self.handle(earlier);
        }
        // The HTTP fronts have parsed it themselves.
        let outline = message::parse(&message).ok().and_then(|request| Outline::of(&message, &request));
        self.handle(
            match outline.filter(|_| self.clients.get(&client).is_some_and(|state| state.front != Front::Lines)) {
                Some(outline) => Event::ClientRequested { client, message, outline },
                None => Event::ClientSaid { client, message },
            },
        );
    }

    fn client_asks(&mut self, client: u64, method: &str, mut params: Value) {
        let number = params["arguments"]["n"].as_u64().unwrap_or(0);
        let roll = self.dice.below(3);
        let state = self.clients.get_mut(&client).expect("asked by the caller");
        state.next_id += 1;
        let id = match roll {
            0 => json!(state.next_id),
            1 => json!(state.next_id.to_string()),
            _ => json!(format!("é-{}", state.next_id)),
        };
        if !state.handshake && method != "initialize" {
            params["_meta"]["io.modelcontextprotocol/protocolVersion"] = json!("2026-07-28");
            params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = json!({"elicitation": {}});
        }
        let token = params["_meta"].get("progressToken").cloned();
        let number = match params["uri"].as_str() {
            Some(uri) => uri.rsplit('/').next().and_then(|number| number.parse().ok()).unwrap_or(0),
            None => number,
        };
        if ["tools/call", "resources/read"].contains(&method) {
            state.countable += 1;
        }
        let request = Request {
            number,
            asked_at: self.now,
            method: method.to_owned(),
            params: params.clone(),
            token,
            listens: method == "subscriptions/listen",
            is_parked: false,
        };
        state.open.insert(id.to_string(), request);
        if number > 0 {
            self.asked_by.insert(number, client);
        }
        self.client_says(client, &json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
    }

    pub(crate) fn client_acts(&mut self) {
        let known: Vec<u64> = self.clients.keys().copied().collect();
        if known.is_empty() {
            return self.client_comes();
        }
        let client = self.dice.pick(&known);
        self.client_acts_as(client);
    }

    fn client_acts_as(&mut self, client: u64) {
        let state = &self.clients[&client];
        let (front, handshake, busy) = (state.front, state.handshake, !state.open.is_empty());
        if state.is_opening || state.is_separated {
            if self.dice.one_in(if busy { 8 } else { 2 }) {
                self.client_leaves(client);
            }
            return;
        }
        if front == Front::Request && busy {
            // A stateless POST only waits, or disconnects.
            if self.dice.one_in(4) {
                self.client_leaves(client);
            }
            return;
        }
        match self.dice.below(14) {
            0 if handshake => {
                // Parallel calls are the normal case.
                let prefix = if self.shared.is_some() { String::new() } else { format!("b{}__", self.dice.below(3)) };
                let tool = format!("{prefix}t0");
                for _ in 0..2 + self.dice.below(3) {
                    let number = self.number();
                    self.client_asks(client, "tools/call", json!({"name": tool, "arguments": {"n": number}}));
                }
            }
            0..=4 => {
                let number = self.number();
                let tool = format!("b{}__t{}", self.dice.below(5), self.dice.below(4));
                let is_short = self.dice.one_in(6) || self.shared.is_some();
                let tool = if is_short { tool[4..].to_owned() } else { tool };
                let mut params = json!({"name": tool, "arguments": {"n": number}});
                if self.dice.one_in(2) {
                    params["_meta"]["progressToken"] =
                        if self.dice.one_in(2) { json!(number % 3) } else { json!(format!("t{}", number % 3)) };
                }
                if self.dice.one_in(8) && self.shared.is_none() {
                    params = json!({"name": "call_tool", "arguments": {"n": number, "name": tool, "arguments": {"n": number}}});
                }
                self.client_asks(client, "tools/call", params);
            }
            5 => {
                let number = self.number();
                let backend = self.dice.below(5);
                self.client_asks(client, "resources/read", json!({"uri": format!("r://{backend}/{number}")}));
            }
            6 => self.client_asks(client, "tools/list", json!({})),
            7 if handshake => {
                let level = self.dice.pick(&["debug", "error"]);
                self.client_asks(client, "logging/setLevel", json!({"level": level}));
            }
            7 => self.client_asks(client, "subscriptions/listen", json!({"notifications": {"toolsListChanged": true}})),
            8 if handshake => self.client_asks(client, "ping", json!({})),
            8 => self.client_asks(client, "server/discover", json!({})),
            9 => {
                let open: Vec<String> = self.clients[&client].open.keys().cloned().collect();
                if !open.is_empty() {
                    let id = self.dice.pick(&open);
                    let state = self.clients.get_mut(&client).expect("picked above");
                    // A retry is in transit, and cannot be cancelled before it arrives.
                    if state.open[&id].method != "initialize" && !state.open[&id].is_parked {
                        state.open.remove(&id);
                        state.cancelled.insert(id.clone());
                        let id: Value = serde_json::from_str(&id).expect("we wrote it");
                        self.client_says(client, &json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}}));
                    }
                }
            }
            10..=11 => drop(self.client_answers(client)),
            12 => {
                // A client may not answer for another client.
                let others = self.clients.iter().filter(|(other, _)| **other != client);
                let asked: Vec<Value> = others.flat_map(|(_, other)| &other.asked).map(|(id, _)| id.clone()).collect();
                if !asked.is_empty() {
                    let theirs = self.dice.pick(&asked);
                    self.client_says(client, &json!({"jsonrpc": "2.0", "id": theirs, "result": {"q": "theft"}}));
                }
            }
            _ if self.dice.one_in(3) => self.client_leaves(client),
            // Without an id only notifications of MCP reach a backend.
            _ if handshake => {
                let method = self.dice.pick(&["tools/call", "notifications/strange", "resources/read"]);
                self.client_says(
                    client,
                    &json!({"jsonrpc": "2.0", "method": method, "params": {"name": "t0", "uri": "r://0/0"}}),
                );
            }
            _ => {}
        }
    }

    /// Answers one of the open server requests of a client.
    fn client_answers(&mut self, client: u64) -> bool {
        let Some(state) = self.clients.get_mut(&client) else { return false };
        let Some((id, question)) = state.asked.pop() else { return false };
        let answer = match !self.resting && self.dice.one_in(5) {
            true => json!({"jsonrpc": "2.0", "id": id, "error": {"code": -1, "message": "no"}}),
            false => json!({"jsonrpc": "2.0", "id": id, "result": {"q": question["q"]}}),
        };
        self.client_says(client, &answer);
        true
    }

    pub(crate) fn client_finishes(&mut self) -> bool {
        let known: Vec<u64> = self.clients.keys().copied().collect();
        known.into_iter().any(|client| self.client_answers(client))
    }

    pub(crate) fn client_leaves(&mut self, client: u64) {
        let Some(state) = self.clients.remove(&client) else { return };
        self.handle(Event::ClientLeft { client });
        for request in state.open.values().filter(|request| request.number > 0 && !request.is_parked) {
            check!(self, !self.is_worked_on(request.number), "{} goes on, though client {client} left", request.number);
        }
    }

    pub(crate) fn client_hears(&mut self, client: u64, message: &[u8], about: Option<Id>, kind: Said) {
        check!(
            self,
            message.ends_with(b"\n") && message.iter().filter(|byte| **byte == b'\n').count() == 1,
            "not one line"
        );
        let said = parsed(message);
        let is_kind = match kind {
            Said::Result => said.get("result").is_some(),
            Said::Error => said.get("error").is_some(),
            Said::Other => said.get("result").or(said.get("error")).is_none(),
        };
        check!(self, is_kind, "{said} is told as {kind:?}");
        check!(self, self.clients.contains_key(&client), "client {client} is gone and was told {said}");
        match (said.get("method").and_then(Value::as_str), said.get("id")) {
            (None, Some(id)) => self.client_is_answered(client, &id.to_string(), &said, about),
            (Some(method), None) => self.client_is_noted(client, method, &said, about),
            (Some(_), Some(id)) => self.client_is_asked(client, id.clone(), &said),
            (None, None) => self.fail(&format!("client {client} was told {said}")),
        }
    }

    fn client_is_answered(&mut self, client: u64, id: &str, said: &Value, about: Option<Id>) {
        let state = &self.clients[&client];
        check!(self, !state.cancelled.contains(id), "client {client} took {id} back and heard {said}");
        let Some(request) = state.open.get(id).cloned() else {
            self.fail(&format!("client {client} was answered {said}, and did not ask or was answered before"))
        };
        check!(self, about == Id::parse(id), "an answer to {id} is said to be about {about:?}");
        let numbers = [&said["result"]["n"], &said["error"]["data"]["n"]];
        for number in numbers.into_iter().filter_map(Value::as_u64) {
            check!(self, number == request.number, "client {client} asked {} and heard {said}", request.number);
        }
        // Only a crash fails a call at once: a replaced server has a minute to finish.
        let failures = [&said["result"]["_meta"]["outlast/failure"], &said["error"]["data"]];
        if failures
            .into_iter()
            .any(|failure| failure["exit"]["why"] == "was stopped" && failure["reason"] == "backend_ended")
        {
            let age = self.now.duration_since(request.asked_at);
            check!(self, self.stopping || age >= Duration::from_secs(60), "{id} failed by a replacement after {age:?}");
        }
        if !state.handshake && said.get("result").is_some() && request.method != "initialize" {
            check!(self, said["result"]["resultType"].is_string(), "a stateless client heard {said}");
        }
        let handshake = state.handshake;
        let front = state.front;
        let state = self.clients.get_mut(&client).expect("seen above");
        state.open.remove(id);
        if request.method == "initialize" && state.is_opening {
            state.is_opening = false;
            state.handshake = true;
            check!(self, self.stopping || said.get("result").is_some(), "the handshake failed: {said}");
            let message = json!({"jsonrpc": "2.0", "method": "notifications/initialized"}).to_string();
            self.owed.push_front(Event::ClientSaid { client, message: message.into() });
        } else if request.method == "tools/list" && said.get("result").is_some() {
            self.client_is_shown(client, &request, said);
        } else if said["result"]["resultType"] == "input_required" {
            check!(self, !handshake, "a handshake client was told {said}");
            self.client_tries_again(client, &request, said);
        }
        if front == Front::Request && self.clients.get(&client).is_some_and(|client| client.open.is_empty()) {
            let state = self.clients.remove(&client).expect("seen above");
            check!(
                self,
                state.is_counted() || state.called < state.countable,
                "client {client}: {} calls were counted, {} made",
                state.called,
                state.countable
            );
            self.owed.push_back(Event::ClientLeft { client });
        }
    }

    /// A page of the list: a list that a client was shown stays correct until it is told otherwise.
    fn client_is_shown(&mut self, client: u64, request: &Request, said: &Value) {
        let tools = said["result"]["tools"].as_array().cloned().unwrap_or_default();
        let names = tools.iter().filter_map(|tool| tool["name"].as_str()).map(str::to_owned);
        let state = self.clients.get_mut(&client).expect("seen by the caller");
        if request.params.get("cursor").is_none() {
            state.listing.clear();
        }
        state.listing.extend(names);
        let unique: BTreeSet<&String> = state.listing.iter().collect();
        let is_unique = unique.len() == state.listing.len();
        match said["result"].get("nextCursor") {
            // Pages of different lists do not form a list.
            Some(_) => state.known = None,
            None if request.params.get("cursor").is_none() && state.handshake => {
                let listing = state.listing.clone();
                if let Some(known) = state.known.clone() {
                    check!(
                        self,
                        known == listing,
                        "client {client} knew {known:?}, heard of no change, and sees {listing:?}"
                    );
                }
                check!(self, is_unique, "a name twice: {listing:?}");
                self.clients.get_mut(&client).expect("seen by the caller").known = Some(listing);
            }
            None => {}
        }
    }

    fn client_tries_again(&mut self, client: u64, request: &Request, said: &Value) {
        // A server asks for a call that it works on: on a borrowed link only for this call.
        for question in said["result"]["inputRequests"].as_object().into_iter().flatten().map(|(_, asked)| asked) {
            let serial = question["params"]["by"].as_u64().unwrap_or(0);
            let numbers = self.works_on(serial);
            let is_lent = self.is_per_session(serial) && question["params"].get("for").is_none();
            let asked_for = question["params"]["for"].as_u64();
            let named = asked_for.is_none_or(|number| number == request.number);
            check!(self, named, "client {client} was asked {said} for {}", request.number);
            let fits = !is_lent || numbers.is_empty() || numbers == BTreeSet::from([request.number]);
            check!(
                self,
                fits,
                "client {client} was asked {said} for {}, link {serial} works on {numbers:?}",
                request.number
            );
        }
        let responses: serde_json::Map<String, Value> = said["result"]["inputRequests"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(name, question)| (name.clone(), json!({"q": question["params"]["q"]})))
            .collect();
        let mut params = request.params.clone();
        params["inputResponses"] = Value::Object(responses);
        params["requestState"] = said["result"]["requestState"].clone();
        // Two attempts of one call may be counted as one or as two.
        let state = self.clients.get_mut(&client).expect("seen by the caller");
        state.may_be_counted_more = true;
        if !self.dice.one_in(3) {
            let who = client;
            self.owed.push_back(Event::TimePassed);
            self.client_retries(who, params);
        }
    }

    /// The retry may come as another POST of the same user.
    fn client_retries(&mut self, client: u64, params: Value) {
        let state = self.clients.get_mut(&client).expect("seen by the caller");
        state.next_id += 1;
        let id = json!(state.next_id);
        let number = params["arguments"]["n"].as_u64().unwrap_or(0);
        let method = if params.get("uri").is_some() { "resources/read" } else { "tools/call" };
        let number = match params["uri"].as_str() {
            Some(uri) => uri.rsplit('/').next().and_then(|number| number.parse().ok()).unwrap_or(0),
            None => number,
        };
        let request = Request {
            number,
            asked_at: self.now,
            method: method.into(),
            params: params.clone(),
            token: params["_meta"].get("progressToken").cloned(),
            listens: false,
            is_parked: true,
        };
        state.open.insert(id.to_string(), request);
        let message = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string();
        self.owed.push_front(Event::ClientSaid { client, message: message.into() });
    }

    fn client_is_noted(&mut self, client: u64, method: &str, said: &Value, about: Option<Id>) {
        let state = self.clients.get_mut(&client).expect("seen by the caller");
        match method {
            "notifications/tools/list_changed" => state.known = None,
            "notifications/progress" => {
                let number = said["params"]["n"].as_u64();
                let request = state.open.iter().find(|(_, request)| Some(request.number) == number);
                let fits = request.is_some_and(|(id, request)| {
                    request.token.as_ref() == Some(&said["params"]["progressToken"]) && about == Id::parse(id)
                });
                check!(self, fits, "client {client} heard of progress that is not its own: {said}");
            }
            "notifications/cancelled" => {
                let id = said["params"]["requestId"].clone();
                let Some(index) = state.asked.iter().position(|(asked, _)| *asked == id) else {
                    self.fail(&format!("client {client} need not answer {id}, which it was not asked"))
                };
                let (_, question) = state.asked.remove(index);
                if self.is_wanted(client, &question) {
                    self.taken_back.push((client, question));
                }
            }
            "notifications/message" => self.client_hears_log(client, said),
            "notifications/subscriptions/acknowledged"
            | "notifications/resources/list_changed"
            | "notifications/prompts/list_changed" => {}
            other => self.fail(&format!("client {client} heard {other}")),
        }
    }

    /// A log message may reach a client only while the link works for it, and not while a tool runs there that it may
    /// not see.
    fn client_hears_log(&mut self, client: u64, said: &Value) {
        let serial = said["params"]["data"].as_u64().unwrap_or(0);
        let is_alone = self.clients.len() == 1 && self.clients[&client].front == Front::Lines;
        let on_link = |request: &&Request| self.heard_on.get(&request.number) == Some(&serial);
        let has_call = self.clients[&client].open.values().any(|request| on_link(&request));
        check!(
            self,
            has_call || is_alone || self.is_per_session(serial),
            "client {client} has no call on link {serial} and heard {said}"
        );
        let is_denied = |request: &&Request| request.params["name"] == "b0__t1";
        let others = self.clients.values().flat_map(|other| other.open.values());
        let mut hidden = others.filter(on_link).filter(is_denied);
        let may_hear = !self.clients[&client].is_restricted || hidden.next().is_none();
        check!(self, may_hear, "client {client} heard {said} while a tool runs there that it may not see");
    }

    fn client_is_asked(&mut self, client: u64, id: Value, said: &Value) {
        check!(self, self.clients[&client].handshake, "a stateless client was asked {said}");
        let serial = said["params"]["by"].as_u64().unwrap_or(0);
        let works_for = self.works_for(serial);
        // On a link of its own it may be asked at any time; on a shared link only about its own calls.
        let own = self.is_per_session(serial);
        if let Some(number) = said["params"]["for"].as_u64() {
            let is_its_own = self.asked_by.get(&number) == Some(&client);
            check!(self, is_its_own, "client {client} was asked {said}, and did not ask {number}");
        } else {
            let is_its_own = own || works_for.iter().all(|other| *other == client);
            check!(self, is_its_own, "client {client} was asked {said}, which is for {works_for:?}");
        }
        let state = self.clients.get_mut(&client).expect("seen by the caller");
        check!(self, !state.asked.iter().any(|(known, _)| *known == id), "{id} was asked twice");
        self.clients.get_mut(&client).expect("seen above").asked.push((id, said["params"].clone()));
    }
}
