//! The invariants, by their number in the relay's reference.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use outlast_core::{
    exit::{Exit, How},
    relay::{Action, ClientEnd, OnCleanExit, Reload, Retry, State},
};
use serde_json::{Value, json, value::RawValue};

use super::{
    Told, World, check,
    client::{Ask, Class, FAMILY, FLAGS, Fate, Holding, KEYS, Kind, MEMBERS, METHODS, OURS, Offer, Question, VERSION},
    id_text, is_private, number_of,
    servers::{Line, SUBSCRIPTION_ID, Server, Word, line_number},
};

/// Failure reasons of requests whose server is not waited for any longer.
const CUT_SHORT: [&str; 4] = ["drain_over", "at_once", "server_hung", "call_timeout"];

impl World {
    // ---- around an event ------------------------------------------------------------------------------

    /// Records the facts that the checks of the actions need.
    pub(super) fn before(&mut self, told: &Told, actions: &[Action]) {
        self.ending = match told {
            Told::Down(generation, _) => Some(*generation),
            _ => None,
        };
        self.becoming = actions.iter().find_map(|action| match action {
            Action::MarkReady(generation) => Some(*generation),
            _ => None,
        });
        if let Told::Started(generation) = told {
            let private = actions.iter().any(|action| match action {
                Action::TellServer { line, .. } => {
                    serde_json::from_slice::<Value>(line).is_ok_and(|message| is_private(&message["id"]))
                }
                _ => false,
            });
            let opened = self.client.told.is_some() && !self.client.is_modern();
            let server = self.servers.get_mut(generation).expect("it was just started");
            server.replayed = opened;
            // Without a handshake of the relay the client's own handshake opens it, and everything is forwarded.
            server.serves = !private && self.gone.is_none() && !self.left;
        }
    }

    pub(super) fn after(&mut self, told: &Told, any: bool) {
        if self.finished_now {
            check!(self, self.tickets_running.is_empty(), "12: a requested restart ended without an answer");
        }
        let retired = std::mem::take(&mut self.cancelled_for);
        for generation in retired {
            let server = &self.servers[&generation];
            check!(
                self,
                !server.alive || server.stop.is_some(),
                "1, 5: we spoke for generation {generation}, which goes on"
            );
        }
        let running = self.servers.values().filter(|server| server.alive && server.stop.is_none()).count();
        let most = 2 + self.settings.limits.draining.draining_max;
        check!(self, running <= most, "4: {running} servers at once");
        let draining = self.servers.values().filter(|s| s.alive && s.draining && s.stop.is_none()).count();
        check!(self, draining <= self.settings.limits.draining.draining_max, "4: {draining} servers drain at once");
        let silent = self.gone == Some(ClientEnd::Broken);
        let retired =
            self.questions.values().any(|question| question.open && self.servers[&question.generation].retired);
        check!(self, silent || !retired, "x11: a question of one that is retired is still open");
        match told {
            Told::Said(number) => self.after_client(*number),
            Told::Something => check!(self, self.nulls_due == 0, "a line that is no message got no answer"),
            Told::Heard(generation, number) => self.after_server(*generation, *number),
            Told::Down(generation, how) => self.after_end(*generation, how),
            Told::Time => self.after_time(),
            Told::Started(_) | Told::Other => {}
        }
        if any && self.dice.one_in(8) && !self.ended {
            let status = self.relay.status(self.now);
            let held = status.traffic.held;
            check!(self, held <= self.settings.limits.holding.held_max, "10: {held} are held");
        }
    }

    fn after_client(&mut self, number: u64) {
        let sent = &self.sent[&number];
        match &sent.kind {
            Kind::Answer(id) => {
                let told = !sent.writes.is_empty();
                let id = id.clone();
                if let Some(question) = self.questions.get_mut(&id) {
                    let open = std::mem::replace(&mut question.open, false);
                    let server = &self.servers[&question.generation];
                    let due = open && server.alive && server.stop.is_none() && !self.client.is_modern();
                    check!(self, told || !due, "5: the answer {number} did not reach generation {}", server.generation);
                    if told && let Some(server) = self.servers.get_mut(&self.questions[&id].generation) {
                        let own = &self.questions[&id].own;
                        server.questions.retain(|open| open != own);
                    }
                }
            }
            Kind::Request => {
                let ask = &self.asks[&number];
                let open = ask.modern || self.client.told.is_some();
                let is_down = self.serving().is_none() && self.next_generation > 1;
                let owed = match ask.class {
                    Class::Ours(2) => open,
                    Class::Ping => open && is_down,
                    _ => self.left,
                };
                let written = !sent.writes.is_empty();
                check!(self, !owed || written || ask.answers == 1, "9: {number} was not answered at once");
            }
            _ => {}
        }
    }

    fn after_server(&mut self, generation: u32, number: u64) {
        let server = &self.servers[&generation];
        // During its handshake with the relay, it sends nothing to the client.
        if server.stood_in && !server.ready {
            return;
        }
        if !server.serves || server.retired || server.stop.is_some() || self.gone.is_some() || self.left {
            return;
        }
        // If the old server is stopped first, the world cannot see when its drain begins.
        let drains = server.draining || (self.settings.reload == Reload::Replace && self.any_end);
        let modern = self.client.is_modern();
        let said = &self.said[&number];
        let due = match &said.word {
            Word::Answer(Some(to)) => {
                let ask = &self.asks[to];
                let holds = self.sent[to].writes.last().is_some_and(|(on, _)| *on == generation);
                // Requests that may be repeated were taken from a hung server, and cancelled ones are forgotten.
                let moved = self.hung.contains(&generation) && (self.is_safe(ask) || ask.cancelled);
                check!(
                    self,
                    !holds || ask.answers == 1 || ask.batch.is_some() || self.has_twin(ask) || moved,
                    "1: the answer {number} of generation {generation} was dropped"
                );
                false
            }
            Word::Question { ping, .. } => !(modern || *ping && drains),
            Word::Log => true,
            Word::Updated | Word::Null => !drains,
            Word::ListChanged(family) => {
                // If the relay fetches the list itself, the notification only makes it fetch again.
                let fetched = (0..4).any(|kind| FAMILY[kind] == *family && server.fetched_since[kind].is_some());
                !modern
                    && !self.any_end
                    && !fetched
                    && self.client.told.as_ref().is_some_and(|told| told.families[*family])
            }
            Word::Progress { to, .. } => {
                let ask = &self.asks[to];
                let moved = self.hung.contains(&generation) && (self.is_safe(ask) || ask.cancelled);
                let is_open = ask.answers == 0 && !ask.timed_out;
                is_open && !matches!(ask.class, Class::Listen { .. }) && !self.was_resent(*to) && !moved
            }
            _ => false,
        };
        check!(self, !due || said.delivered, "6: {number} of generation {generation} was dropped: {:?}", said.word);
    }

    fn was_resent(&self, number: u64) -> bool {
        self.sent[&number].writes.len() > 1
    }

    fn after_end(&mut self, generation: u32, how: &How) {
        if self.may_leave {
            self.may_leave = false;
            self.left |= self.ended || self.relay.status(self.now).state == State::Stopping;
        }
        let open: Vec<&String> = self
            .questions
            .iter()
            .filter(|(_, question)| question.generation == generation && question.open)
            .map(|(id, _)| id)
            .collect();
        let silent = self.gone == Some(ClientEnd::Broken);
        check!(self, silent || open.is_empty(), "5: questions of generation {generation} are still open: {open:?}");
        if self.gone == Some(ClientEnd::Broken) {
            return;
        }
        let mut lost = Vec::new();
        for ask in self.asks.values() {
            let last = self.sent.get(&ask.number).and_then(|sent| sent.writes.last());
            if let Some((on, fate)) = last
                && *on == generation
                && ask.answers == 0
            {
                let safe = self.is_safe(ask);
                let owed = !ask.cancelled && ask.batch.is_none() && !self.has_twin(ask);
                let over = *fate == Fate::Taken && !safe || ask.class == Class::Ping;
                lost.extend((owed && over).then_some(ask.number));
            }
        }
        // One call of its own restart tool may have caused the exit.
        let was_unblocked = self.servers[&generation].stdin_closed;
        let forgiven = usize::from(how == &How::Exited(Exit::Code(42)) || was_unblocked);
        let calls = lost.iter().filter(|number| self.asks[number].is_restart()).count();
        check!(
            self,
            lost.is_empty() || (lost.len() == calls && calls <= forgiven),
            "11: answers owed for the end of generation {generation} did not leave: {lost:?}"
        );
        let now = self.now;
        for (number, ask) in &mut self.asks {
            let last = self.sent.get(number).and_then(|sent| sent.writes.last());
            if last.is_some_and(|(on, _)| *on == generation) {
                ask.first_end.get_or_insert(now);
                if ask.answers == 0 && ask.is_restart() {
                    // It may have caused the exit, and waits for the next server from now on.
                    ask.first_end = Some(now);
                }
            }
        }
    }

    fn after_time(&mut self) {
        let deadline = self.relay.deadline();
        check!(self, deadline.is_none_or(|deadline| deadline > self.now), "11: a deadline that does not move");
        if self.gone.is_some() || self.left {
            return;
        }
        for ask in self.asks.values().filter(|ask| ask.answers == 0 && !ask.cancelled) {
            let limits = &self.settings.limits;
            let most = match ask.class {
                Class::Initialize | Class::Discover | Class::Listen { .. } | Class::Ours(1) => continue,
                Class::Ours(0) => limits.restart.restart_wait,
                // It may be a tool of outlast.
                Class::Call { ref tool, .. } if self.clash && OURS.iter().any(|ours| tool.ends_with(ours)) => continue,
                _ => limits.holding.hold_max,
            };
            let last = self.sent.get(&ask.number).and_then(|sent| sent.writes.last());
            // A request that a server holds may wait; so may a batch, for its slowest member.
            if ask.batch.is_some() || self.has_twin(ask) || last.is_some_and(|(on, _)| self.servers[on].alive) {
                continue;
            }
            let waited = self.now - ask.first_end.unwrap_or(ask.arrived);
            check!(self, waited < most, "10: {} has waited for {waited:?}", ask.number);
        }
    }

    // ---- messages to a server -------------------------------------------------------------------------

    pub(super) fn server_is_told(
        &mut self,
        generation: u32,
        line: Bytes,
        mark: Option<u64>,
        last: &mut HashMap<u32, u64>,
    ) {
        let message: Value = serde_json::from_slice(&line).unwrap_or(Value::Null);
        let alive = self.servers.get(&generation).is_some_and(|server| server.alive);
        check!(self, alive, "4: generation {generation} is not there to be told: {message}");
        check!(self, line.ends_with(b"\n"), "a line without an end");
        let method = message.get("method").and_then(Value::as_str);
        let number = line_number(&line, &message);
        let server = &self.servers[&generation];
        let is_own = message.get("id").is_some_and(is_private) && method.is_some();
        let is_ping = method.is_none() && number.is_none();
        let is_handshake = is_own && method == Some("initialize");
        if server.replayed && !is_ping {
            check!(self, is_handshake || server.told_initialize, "3: not `initialize` first: {message}");
            let initialized = method == Some("notifications/initialized");
            // A draining server gets no more of the opening; the world does not see every drain begin.
            let drains = server.draining || (self.settings.reload == Reload::Replace && self.any_end);
            let early = self.client.initialized && !server.told_initialized && !drains;
            check!(self, is_handshake || initialized || !early, "3: before `initialized`: {message}");
        }
        if is_own {
            self.told_by_us(generation, &line, &message, method.unwrap_or_default());
        } else if let Some(number) = number {
            self.told_by_client(generation, &line, number, last);
        } else {
            let reason = message["params"]["reason"].as_str().unwrap_or_default();
            let is_late = reason.starts_with("no answer within");
            let is_ours = reason == "moved to a new server" || is_late;
            if is_late {
                let id = id_text(&message["params"]["requestId"]);
                let open = self.asks.values_mut().filter(|ask| ask.id == id && ask.answers == 0);
                open.filter(|ask| ask.batch.is_some()).for_each(|ask| ask.timed_out = true);
            }
            let moved = method == Some("notifications/cancelled") && is_ours;
            check!(self, moved || is_ping && message["result"] == json!({}), "6: said to a server: {message}");
            if is_ping {
                let own = id_text(&message["id"]);
                let server = self.servers.get_mut(&generation).expect("it is alive");
                let asked = server.questions.iter().position(|open| *open == own);
                let was = asked.map(|index| server.questions.swap_remove(index)).is_some();
                check!(self, was, "5: an answer to a ping that generation {generation} did not send");
            }
        }
        let server = self.servers.get_mut(&generation).expect("it is alive");
        server.told_initialize |= is_handshake;
        server.inbox.push_back(Line { bytes: line, mark, number });
    }

    /// A request of the relay itself.
    fn told_by_us(&mut self, generation: u32, line: &Bytes, message: &Value, method: &str) {
        let now = self.now;
        let server = self.servers.get_mut(&generation).expect("it is alive");
        if let Some(kind) = METHODS.iter().position(|known| *known == method) {
            check!(self, self.servers[&generation].serves, "4: a list fetched from one that does not serve");
            let server = self.servers.get_mut(&generation).expect("it is alive");
            if message["params"].get("cursor").is_none() {
                server.fetched_since[kind] = Some(now);
            }
            return;
        }
        if method == "server/discover" {
            let meta = &message["params"]["_meta"];
            let fine =
                meta["io.modelcontextprotocol/protocolVersion"] == VERSION && meta.as_object().unwrap().len() == 1;
            check!(self, fine, "h4: {message}");
            return;
        }
        if method == "ping" {
            check!(self, self.servers[&generation].ready, "x4b, y1: a ping to one that does not serve");
            return;
        }
        let first = !server.told_initialize;
        let original = number_of(line).and_then(|number| self.sent.get(&number)).map(|sent| sent.line.clone());
        let Some(original) = original else { self.fail(&format!("6: a replay of nothing: {message}")) };
        // A server is asked for the version that the client was told from the cache.
        let same = without_id(line) == without_id(&original) || self.has_entry;
        check!(self, same, "6: replayed other bytes: {message}");
        match method {
            "initialize" => check!(self, first, "3: a second private `initialize`"),
            "logging/setLevel" | "resources/subscribe" => {}
            _ => self.fail(&format!("h3: replayed {message}")),
        }
    }

    fn told_by_client(&mut self, generation: u32, line: &Bytes, number: u64, last: &mut HashMap<u32, u64>) {
        let server = &self.servers[&generation];
        let (serves, speaks) =
            (server.serves, server.serves && server.stop.is_none() || self.becoming == Some(generation));
        let newest = server.newest_told;
        let Some(sent) = self.sent.get(&number) else { self.fail(&format!("6: message {number} was never sent")) };
        let kind = sent.kind.clone();
        if let Kind::Answer(id) = &kind {
            let Some(question) = self.questions.get(id) else { self.fail("5: an answer to no question was sent on") };
            check!(self, question.generation == generation, "5: an answer for another generation than {generation}");
            check!(self, question.open, "5: a late answer was sent on");
            let id = format!(r#""id":{id}"#);
            let expected = String::from_utf8_lossy(&sent.line).replacen(&id, &format!(r#""id":{}"#, question.own), 1);
            check!(self, line == expected.as_bytes(), "5, 6: {line:?} instead of {expected}");
        } else {
            check!(self, *line == sent.line, "6: other bytes than the client's: {line:?}");
        }
        let first_time = sent.writes.is_empty();
        // How many earlier pipes took it, or may have.
        let taken = sent.writes.iter().filter(|(_, fate)| *fate != Fate::Unsent).count();
        let ask = self.asks.get(&number);
        match &kind {
            Kind::Request => {
                let ask = ask.expect("every request is noted");
                check!(self, speaks, "4: request {number} to generation {generation}, which does not serve");
                check!(self, ask.answers == 0 || self.has_twin(ask), "1: {number} was answered and is sent");
                check!(self, !ask.cancelled, "n2: {number} was cancelled and is sent");
                check!(self, !matches!(ask.class, Class::Ours(_) | Class::TooMuch), "q8: {number} is ours to answer");
                if !matches!(ask.class, Class::Listen { .. }) {
                    let again = self.settings.limits.holding.resend_max as usize;
                    check!(self, taken == 0 || self.is_safe(ask), "2: {number} is not safe and is asked twice");
                    check!(self, taken <= again, "2: {number} is asked too often");
                }
            }
            Kind::Initialized => {
                let server = self.servers.get_mut(&generation).expect("it is alive");
                let twice = std::mem::replace(&mut server.told_initialized, true);
                check!(self, !twice, "3: `initialized` twice");
            }
            Kind::Note | Kind::Raw => {
                check!(self, serves, "4: {number} to generation {generation}, which does not serve");
                check!(self, taken == 0, "2: notification {number} is told twice");
            }
            Kind::Answer(_) => {}
        }
        let is_listen = ask.is_some_and(|ask| matches!(ask.class, Class::Listen { .. }));
        // A cancellation of an earlier request of such a server, or an answer to it, is sent before the lines held
        // for it.
        let server = &self.servers[&generation];
        let passes = matches!(kind, Kind::Note | Kind::Answer(_));
        let overtakes = passes && server.stood_in && !server.ready && self.becoming != Some(generation);
        if kind != Kind::Initialized
            && !overtakes
            && !(is_listen && ask.is_some_and(|ask| ask.acknowledged || !first_time))
        {
            let before = last.insert(generation, number).unwrap_or(0);
            check!(self, before < number, "3: {number} was said before {before}");
            check!(self, !first_time || newest < number, "3: {number} was said before {newest}");
            let server = self.servers.get_mut(&generation).expect("it is alive");
            if first_time {
                server.newest_told = number;
            }
        }
        self.sent.get_mut(&number).expect("found above").writes.push((generation, Fate::Unknown));
    }

    /// Whether it may be repeated, by the tables of the reference.
    fn is_safe(&self, ask: &Ask) -> bool {
        match &ask.class {
            Class::Initialize | Class::Discover | Class::List(_) | Class::Page(..) | Class::Safe => true,
            Class::Listen { .. } => true,
            Class::Call { tool, plain } => {
                let item = self.client.lists[0].as_ref().and_then(|list| list.items.get(tool));
                let hinted = item.is_some_and(|item| item["annotations"]["readOnlyHint"] == true);
                self.settings.retry == Retry::Annotated && *plain && hinted
            }
            Class::Ping | Class::Ours(_) | Class::Other | Class::TooMuch => false,
        }
    }

    // ---- messages to the client -----------------------------------------------------------------------

    pub(super) fn client_hears(&mut self, line: &Bytes) {
        if self.gone == Some(ClientEnd::Broken) {
            return;
        }
        check!(self, line.ends_with(b"\n"), "a line without an end");
        let text = std::str::from_utf8(line).expect("JSON is UTF-8").trim_end();
        let Ok(message) = serde_json::from_str::<Value>(text) else { self.fail("the client hears what is no JSON") };
        if let Ok(members) = serde_json::from_str::<Vec<&RawValue>>(text) {
            return self.hears_batch(&members);
        }
        match (message.get("method"), message.get("id")) {
            (Some(_), Some(_)) => self.hears_question(text, &message),
            (Some(_), None) => self.hears_note(text, &message),
            _ => {
                self.hears_answer(text, &message, false);
            }
        }
    }

    fn hears_batch(&mut self, members: &[&RawValue]) {
        let mut batch = None;
        for member in members {
            let message: Value = serde_json::from_str(member.get()).expect("a part of JSON is JSON");
            let ask = self.hears_answer(member.get(), &message, true).and_then(|number| self.asks[&number].batch);
            check!(self, ask.is_some() && (batch.is_none() || batch == ask), "x19: answers of several batches");
            batch = ask;
        }
        let Some(batch) = batch else { self.fail("x19: an empty batch") };
        let left = self.batches[&batch].iter().any(|number| {
            let ask = &self.asks[number];
            ask.answers == 0 && !ask.cancelled
        });
        check!(self, !left, "x19: a batch left before its last answer");
    }

    /// A message of a server that reached the client: checks whether it may, and returns it.
    fn word(&mut self, number: u64, keeps_order: bool) -> (u32, Word, String) {
        let Some(said) = self.said.get_mut(&number) else { self.fail(&format!("6: no server said {number}")) };
        let twice = std::mem::replace(&mut said.delivered, true);
        let (generation, word) = (said.generation, said.word.clone());
        let line = String::from_utf8_lossy(&said.line).trim_end().to_owned();
        let server = &self.servers[&generation];
        check!(self, !twice, "6: {number} of generation {generation} is heard twice");
        check!(self, server.serves, "4: {number} of generation {generation}, which does not serve");
        // An answer that came in time may have to wait for the rest of its batch.
        let speaks = !server.retired && server.alive || !keeps_order;
        check!(self, speaks, "4: {number} of generation {generation}, which is retired");
        if keeps_order && !matches!(word, Word::Torn(_)) {
            check!(self, server.newest_heard < number, "3: {number} came after {}", server.newest_heard);
            self.servers.get_mut(&generation).expect("found above").newest_heard = number;
        }
        (generation, word, line)
    }

    fn hears_question(&mut self, text: &str, message: &Value) {
        let Some(number) = number_of(text.as_bytes()) else { self.fail(&format!("6: a question of ours: {message}")) };
        // If the opening was answered without the server, its request is delivered after its handshake, after its
        // earlier answers.
        let stood_in = self.said.get(&number).is_some_and(|said| self.servers[&said.generation].stood_in);
        let (generation, word, line) = self.word(number, !stood_in);
        let Word::Question { own, ping } = word else { self.fail("6: no question was asked") };
        check!(self, !self.client.is_modern(), "s7: a question in the stateless era");
        let server = &self.servers[&generation];
        check!(self, !(ping && server.draining), "s5: a ping of one that drains");
        let id = id_text(&message["id"]);
        let expected = if generation == 1 {
            line
        } else {
            check!(self, is_private(&message["id"]), "d5: {id} of generation {generation}");
            line.replacen(&format!(r#""id":{own}"#), &format!(r#""id":{id}"#), 1)
        };
        check!(self, text == expected, "6: {text} instead of {expected}");
        let question = Question { generation, own, open: true, cancelled: 0 };
        let met = self.questions.insert(id, question);
        check!(self, met.is_none_or(|met| !met.open), "d5: ids of two questions met");
    }

    fn hears_note(&mut self, text: &str, message: &Value) {
        let method = message["method"].as_str().unwrap_or_default();
        let Some(number) = number_of(text.as_bytes()) else { return self.hears_our_note(method, message) };
        let (generation, word, line) = self.word(number, true);
        let server = &self.servers[&generation];
        let drains = server.draining;
        let exact = |expected: &str| check!(self, text == expected, "6: {text} instead of {expected}");
        match word {
            Word::Cancelled { own } => {
                let known = self
                    .questions
                    .iter()
                    .find(|(_, question)| question.generation == generation && question.own == own && question.open);
                match known.map(|(id, _)| id.clone()) {
                    Some(id) => {
                        exact(&line.replacen(&format!(r#""requestId":{own}"#), &format!(r#""requestId":{id}"#), 1));
                        self.questions.get_mut(&id).expect("found above").open = false;
                    }
                    // The client has already answered; the ids of the first generation are not rewritten.
                    None => {
                        exact(&line);
                        check!(self, generation == 1, "s12: {text}");
                    }
                }
            }
            Word::Torn(listen) => {
                exact(&line);
                self.listen_is_over(listen);
            }
            Word::Acknowledged(listen) => {
                let Class::Listen { wants } = self.asks[&listen].class else { self.fail("no listen") };
                let mut expected: Value = serde_json::from_str(&line).expect("servers speak JSON");
                for (flag, wants) in FLAGS.into_iter().zip(wants) {
                    if wants {
                        expected["params"]["notifications"][flag] = json!(true);
                    }
                }
                check!(self, *message == expected, "d4: {message} instead of {expected}");
                self.acknowledged(listen);
            }
            Word::Progress { to, value } => {
                exact(&line);
                let value = value as f64;
                let ask = self.asks.get_mut(&to).expect("known");
                let before = std::mem::replace(&mut ask.progress, value);
                // A subscription that the client cancelled is forgotten with its progress.
                let forgotten = ask.cancelled && matches!(ask.class, Class::Listen { .. });
                check!(self, forgotten || before < value, "7: progress of {to} falls from {before} to {value}");
            }
            Word::ListChanged(family) => {
                exact(&line);
                check!(self, !drains, "s10: a list of one that drains");
                self.list_changed(family, message);
            }
            Word::Updated => {
                exact(&line);
                check!(self, !drains, "s11: a resource of one that drains");
            }
            Word::Log => exact(&line),
            word => self.fail(&format!("6: {word:?} as a notification")),
        }
    }

    fn hears_our_note(&mut self, method: &str, message: &Value) {
        let params = &message["params"];
        match method {
            "notifications/cancelled" => {
                let id = id_text(&params["requestId"]);
                let Some(question) = self.questions.get_mut(&id) else { self.fail(&format!("x11: no question {id}")) };
                let open = std::mem::replace(&mut question.open, false);
                question.cancelled += 1;
                self.cancelled_for.push(question.generation);
                check!(self, open && params["reason"] == "the server ended", "x11: {message}");
            }
            "notifications/subscriptions/acknowledged" => {
                let id = id_text(&params["_meta"][SUBSCRIPTION_ID]);
                let Some(listen) = self.listen_by(&id) else { self.fail(&format!("7: no listen {id}")) };
                self.acknowledged(listen);
            }
            "notifications/progress" => self.hears_heartbeat(params),
            _ => {
                let families = ["tools", "prompts", "resources"];
                let family =
                    families.into_iter().position(|name| method == format!("notifications/{name}/list_changed"));
                let Some(family) = family else { self.fail(&format!("6: we said {message}")) };
                self.announced(family, message);
            }
        }
    }

    fn hears_heartbeat(&mut self, params: &Value) {
        let token = params["progressToken"].as_str().and_then(|token| token.strip_prefix("tok"));
        let number = token.and_then(|token| token.parse::<u64>().ok()).unwrap_or(0);
        let value = params["progress"].as_f64().unwrap_or(f64::NEG_INFINITY);
        check!(self, self.settings.heartbeat.is_some(), "p4: a heartbeat that was not asked for");
        let Some(ask) = self.asks.get_mut(&number) else { self.fail(&format!("p1: no request for {params}")) };
        let before = std::mem::replace(&mut ask.progress, value);
        let fine = ask.answers == 0 && !ask.cancelled && matches!(ask.class, Class::Call { .. } | Class::Ours(_));
        check!(self, fine, "p1: a heartbeat for {number}, which is over or no call");
        check!(self, before < value, "7: the heartbeat of {number} falls from {before} to {value}");
        check!(self, before < 1e-3, "p2: a heartbeat after the server's own progress, for {number}");
    }

    fn listen_by(&self, id: &str) -> Option<u64> {
        self.asks
            .values()
            .find(|ask| ask.id == id && ask.answers == 0 && matches!(ask.class, Class::Listen { .. }))
            .map(|ask| ask.number)
    }

    fn acknowledged(&mut self, listen: u64) {
        let ask = self.asks.get_mut(&listen).expect("known");
        let twice = std::mem::replace(&mut ask.acknowledged, true);
        let over = ask.answers > 0;
        check!(self, !twice, "7: listen {listen} was acknowledged twice");
        check!(self, !over, "7: listen {listen} was over");
    }

    fn listen_is_over(&mut self, listen: u64) {
        let ask = self.asks.get_mut(&listen).expect("known");
        ask.answers += 1;
        let answers = ask.answers;
        check!(self, answers == 1, "1: listen {listen} ended twice");
    }

    /// A change that the relay itself announces.
    fn announced(&mut self, family: usize, message: &Value) {
        if message["params"].is_null() {
            let again = std::mem::replace(&mut self.announced[family], true);
            check!(self, !again || self.batched[family], "l5: announced again before the client listed again");
        }
        // A list that waited in a batch may be announced once too often.
        if !self.clash && !self.batched[family] && self.gone.is_none() && !self.left {
            let Some(serving) = self.serving() else { self.fail("8: a list changed while no server ran") };
            let server = &self.servers[&serving];
            let differs = (0..4).filter(|kind| FAMILY[*kind] == family).any(|kind| {
                let late = server.fetched_since[kind]
                    .is_some_and(|since| self.now >= since + self.settings.limits.lists.list_max);
                late || server.fetch_refused[kind] || self.differs(kind, server)
            });
            check!(self, differs || server.changed[family], "8: nothing differs, and a change is announced");
        }
        self.list_changed(family, message);
    }

    fn list_changed(&mut self, family: usize, message: &Value) {
        if self.client.is_modern() {
            let id = &message["params"]["_meta"][SUBSCRIPTION_ID];
            if number_of(message.to_string().as_bytes()).is_none() {
                let listen = self.listen_by(&id_text(id));
                let hears =
                    listen.is_some_and(|listen| self.asks[&listen].acknowledged && !self.asks[&listen].cancelled);
                check!(self, hears, "7: a change for a listen that is not open");
            }
        } else {
            let told = self.client.told.as_ref().is_some_and(|told| told.families[family]);
            check!(self, told, "8: an untold change");
        }
        for (list, of) in self.client.lists.iter_mut().zip(FAMILY) {
            if let Some(list) = list.as_mut().filter(|_| of == family) {
                list.changed = true;
            }
        }
    }

    /// Whether the client's list differs from the server's.
    fn differs(&self, kind: usize, server: &Server) -> bool {
        let Some(list) = &self.client.lists[kind] else { return self.client.told.is_none() || self.client.ever_local };
        let items: BTreeMap<String, Value> = by_key(kind, server.items(kind));
        let same = if list.next.is_none() {
            list.items == items
        } else {
            list.items.iter().all(|(key, item)| items.get(key) == Some(item))
        };
        !same
    }

    // ---- answers ----------------------------------------------------------------------------------------

    /// Returns the request that was answered.
    fn hears_answer(&mut self, text: &str, message: &Value, in_batch: bool) -> Option<u64> {
        let id = message.get("id").cloned().unwrap_or(Value::Null);
        let number = number_of(text.as_bytes());
        if id.is_null() {
            match number {
                Some(number) => {
                    let (_, word, line) = self.word(number, true);
                    check!(self, word == Word::Null && text == line, "6: {text}");
                }
                None => {
                    let code = message["error"]["code"].as_i64();
                    check!(self, self.nulls_due > 0 && matches!(code, Some(-32700 | -32600)), "1: {message}");
                    self.nulls_due -= 1;
                }
            }
            return None;
        }
        let id = id_text(&id);
        // A discover result may be repeated from memory.
        let memory = self.discovered.as_ref().is_some_and(|last| dressed(last) == message["result"]);
        let ask = match number.filter(|_| !memory) {
            Some(number) => self.answered_by_server(number, &id, text, message, in_batch),
            None => self.answered_by_us(&id, message),
        };
        let asked = self.asks.get_mut(&ask).expect("found above");
        asked.answers += 1;
        // A cancelled request no longer belongs to its batch.
        let (answers, batched) = (asked.answers, asked.batch.is_some() && (in_batch || !asked.cancelled));
        check!(self, answers == 1, "1: {ask} has {answers} answers");
        check!(self, batched == in_batch, "x19: {ask} is answered in another shape than it was asked");
        self.learn(ask, message, number.is_none());
        Some(ask)
    }

    fn answered_by_server(&mut self, number: u64, id: &str, text: &str, message: &Value, in_batch: bool) -> u64 {
        let (generation, word, line) = self.word(number, !in_batch);
        let to = match word {
            Word::Answer(Some(to)) | Word::Torn(to) => to,
            word => self.fail(&format!("s3: {word:?} reached the client")),
        };
        let holds = |ask: &&Ask| {
            let last = self.sent.get(&ask.number).and_then(|sent| sent.writes.last());
            ask.id == id && ask.answers == 0 && last.is_some_and(|(on, _)| *on == generation)
        };
        // If an id is used twice, the oldest request gets the first answer.
        let ask = self.asks.values().find(holds);
        let Some(ask) = ask else {
            self.fail(&format!("1: generation {generation} answers {to}, which it does not hold"))
        };
        let mut expected: Value = serde_json::from_str(&line).expect("servers speak JSON");
        let ours = self.settings.tools;
        let edited = &self.asks[&to];
        match (&edited.class, expected.get("result").is_some()) {
            (Class::Initialize | Class::Discover, true) => {
                let result = &mut expected["result"];
                for name in ["tools", "prompts", "resources"] {
                    if result["capabilities"].get(name).is_some() || (ours && name == "tools") {
                        result["capabilities"][name]["listChanged"] = json!(true);
                    }
                }
                if edited.modern && edited.class == Class::Discover {
                    result["ttlMs"] = json!(5_000);
                }
                check!(self, *message == expected, "d1, d2: {message} instead of {expected}");
            }
            (Class::List(0), true) => {
                let heard = message["result"]["tools"].as_array().cloned().unwrap_or_default();
                let page = expected["result"]["tools"].as_array().cloned().unwrap_or_default();
                if edited.modern {
                    expected["result"]["ttlMs"] = json!(5_000);
                }
                let names: Vec<&str> = page.iter().filter_map(|item| item["name"].as_str()).collect();
                let own: Vec<String> = if ours { our_names(&names).to_vec() } else { Vec::new() };
                let (theirs, added) = heard.split_at(page.len().min(heard.len()));
                let added: Vec<&str> = added.iter().filter_map(|item| item["name"].as_str()).collect();
                check!(self, theirs == page && added == own, "d3: {added:?} after {names:?}");
                expected["result"]["tools"] = message["result"]["tools"].clone();
                check!(self, *message == expected, "d3: {message} instead of {expected}");
            }
            _ => check!(self, text == line, "6: {text} instead of {line}"),
        }
        ask.number
    }

    fn answered_by_us(&mut self, id: &str, message: &Value) -> u64 {
        let open: Vec<&Ask> = self.asks.values().filter(|ask| ask.id == id && ask.answers == 0).collect();
        let held = |ask: &Ask| {
            let last = self.sent.get(&ask.number).and_then(|sent| sent.writes.last());
            last.is_some_and(|(on, fate)| self.servers[on].alive && *fate != Fate::Unsent)
        };
        // Of two requests with one id, the hold was full for the one that came back just now, or else for the newer.
        let full = message.to_string().contains("hold_full");
        let came_back = |ask: &Ask| {
            let last = self.sent.get(&ask.number).and_then(|sent| sent.writes.last());
            last.is_some_and(|(on, _)| self.ending == Some(*on))
        };
        let age = |ask: &Ask| if full { (!came_back(ask), u64::MAX - ask.number) } else { (false, ask.number) };
        let words = message.to_string();
        // Only a request that a server holds can time out there.
        let drained = CUT_SHORT.iter().any(|reason| words.contains(reason));
        let named = |ask: &Ask| words.contains(&format!("`{}`", ask.method));
        let Some(ask) = open.iter().min_by_key(|ask| (ask.cancelled, !named(ask), held(ask) != drained, age(ask)))
        else {
            self.fail(&format!("1: no open request for {message}"))
        };
        let edited = ask.class == Class::List(0);
        check!(
            self,
            !ask.cancelled || edited || ask.batch.is_some(),
            "n2, n3: {} was cancelled, and we answer it",
            ask.number
        );
        let number = ask.number;
        let data = match message["error"].get("data") {
            Some(data) => data,
            None => &message["result"]["_meta"]["outlast/failure"],
        };
        if self.has_twin(ask) {
            if data["limit"] == "queued_bytes_max" {
                self.refused.push(number);
            }
            return number;
        }
        let code = message["error"]["code"].as_i64();
        let writes = self.sent.get(&number).map(|sent| sent.writes.as_slice()).unwrap_or_default();
        let reason = data["reason"].as_str();
        // A request that came back from a server's queue never reached that server.
        let last = writes.last().filter(|(_, fate)| *fate != Fate::Unsent);
        let holder = last.map(|(on, _)| &self.servers[on]).filter(|server| server.alive && server.stop.is_none());
        // The opening of a slow server is answered without it.
        let opens = matches!(ask.class, Class::Initialize | Class::Discover | Class::List(_));
        let stood_in = holder
            .filter(|server| opens && !self.ever_ready && !server.ready && code.is_none_or(|code| code == -32601))
            .map(|server| server.generation);
        let holder = if stood_in.is_some() { None } else { holder };
        // The relay answers for a running server only if a drain or a probe has timed out.
        let is_cut_short = reason.is_some_and(|reason| CUT_SHORT.contains(&reason));
        // A call of the server's own restart tool is answered when a new server is ready, whether the old one is gone
        // or not; no other call is answered as a success (x4).
        let is_success = matches!(ask.class, Class::Call { .. }) && message["result"]["isError"] == false;
        let is_ours = |tool: &str| self.clash && OURS.iter().any(|ours| tool.ends_with(ours));
        let is_ours = matches!(&ask.class, Class::Call { tool, .. } if is_ours(tool));
        check!(self, !is_success || ask.is_restart() || is_ours, "x4: {number} is answered as a success: {message}");
        let is_due = ask.is_restart() && (is_success || holder.is_some_and(|server| server.stdin_closed));
        let speaks_for = is_cut_short
            || is_due
            || matches!(ask.class, Class::Discover | Class::Listen { .. } | Class::Ping | Class::List(0));
        // A request that moves after a drain timeout may have to be answered by the relay; its server stops at once.
        let moves = holder.filter(|_| !speaks_for && self.is_safe(ask));
        check!(self, holder.is_none() || speaks_for || moves.is_some(), "1: we answer {number}, which a server holds");
        // A hung server has other calls to finish.
        let leaves = moves.filter(|server| !self.hung.contains(&server.generation)).map(|server| server.generation);
        if data["limit"] == "queued_bytes_max" {
            let bytes = self.serving().and_then(|serving| self.queues.get(&serving)).copied().unwrap_or(0);
            let max = self.settings.limits.queue.queued_bytes_max;
            // A refusal in a batch is sent with the rest of the batch.
            check!(
                self,
                bytes >= max || ask.batch.is_some(),
                "u2: {number} was refused with {bytes} bytes in the queue"
            );
            self.refused.push(number);
        }
        match data["outcome"].as_str() {
            Some("not_sent") => {
                let took = writes.iter().any(|(_, fate)| *fate != Fate::Unsent);
                check!(self, !took, "2: {number} was taken by a pipe, and we deny it");
            }
            Some("unknown") => {
                // A drain timeout is reported before the state of the pipe is known.
                let took = writes.iter().any(|(_, fate)| match reason {
                    Some(reason) if CUT_SHORT.contains(&reason) => true,
                    _ => *fate == Fate::Taken,
                });
                let again = writes.iter().any(|(on, fate)| *fate == Fate::Unknown && self.servers[on].alive);
                check!(self, took || again, "2: no pipe took {number}, and we say that one may have");
            }
            _ => {}
        }
        match &ask.class {
            Class::TooMuch => check!(self, code == Some(-32600), "line_max, x19: {message}"),
            Class::Call { .. } if data.is_object() => {
                check!(self, message.get("result").is_some() || code.is_some(), "t3: {message}");
            }
            Class::Ping => {
                let refused = reason == Some("stopping") || self.refused.contains(&number);
                check!(self, message["result"] == json!({}) || refused, "q7: {message}");
            }
            Class::Other => check!(self, reason.is_some(), "q13: {message}"),
            _ => {}
        }
        self.cancelled_for.extend(leaves);
        if let Some(server) = stood_in.and_then(|generation| self.servers.get_mut(&generation)) {
            server.stood_in = true;
        }
        self.any_end |= opens && !self.ever_ready;
        number
    }

    /// Updates what the client knows from an answer.
    fn learn(&mut self, ask: u64, message: &Value, local: bool) {
        let result = &message["result"];
        match self.asks[&ask].class.clone() {
            Class::Initialize => {
                if result.is_object() {
                    let has = &result["capabilities"];
                    let told = Offer {
                        version: result["protocolVersion"].as_str().unwrap_or_default().to_owned(),
                        families: ["tools", "prompts", "resources"].map(|name| has.get(name).is_some()),
                        subscribe: has["resources"]["subscribe"] == true,
                        logging: has.get("logging").is_some(),
                        completions: has.get("completions").is_some(),
                    };
                    self.client.ever_local |= local;
                    self.client.told = Some(told);
                    if self.client.opens_anew {
                        self.client.initialized = false;
                        self.servers.values_mut().for_each(|server| server.told_initialized = false);
                    }
                } else if self.client.told.is_none() {
                    self.client.asked = false;
                } else if !self.asks.values().any(|ask| ask.class == Class::Initialize && ask.answers == 0) {
                    self.client.opens_anew = false;
                }
            }
            Class::Discover if result.is_object() => self.discovered = Some(result.clone()),
            Class::List(kind) | Class::Page(kind, _) if result.is_object() => self.learn_list(ask, kind, result, local),
            _ => {}
        }
    }

    fn learn_list(&mut self, ask: u64, kind: usize, result: &Value, local: bool) {
        let all = result[MEMBERS[kind]].as_array().cloned().unwrap_or_default();
        // Every item of a server has a variant, and no item of outlast has one.
        let (theirs, ours): (Vec<Value>, Vec<Value>) = all.into_iter().partition(|item| item.get("v").is_some());
        let items = by_key(kind, theirs);
        let next = result["nextCursor"].as_str().map(str::to_owned);
        let listens: Vec<u64> = self
            .asks
            .values()
            .filter(|ask| ask.acknowledged && ask.answers == 0 && !ask.cancelled)
            .filter(|ask| matches!(ask.class, Class::Listen { wants } if wants[FAMILY[kind]]))
            .map(|ask| ask.number)
            .collect();
        if let Class::Page(_, cursor) = &self.asks[&ask].class {
            if let Some(list) = self.client.lists[kind].as_mut().filter(|list| list.next.as_ref() == Some(cursor)) {
                list.items.extend(items);
                list.next = next;
                if list.next.is_none() {
                    list.last_good = Some(list.items.clone());
                }
            }
            return;
        }
        let ours: Vec<String> = ours.iter().filter_map(|item| item["name"].as_str()).map(str::to_owned).collect();
        if kind == 0 && self.settings.tools {
            check!(self, ours.len() == 3, "d3: ours are {ours:?}");
            self.client.our_names = [ours[0].clone(), ours[1].clone(), ours[2].clone()];
        } else {
            check!(self, ours.is_empty(), "d3: ours among {}: {ours:?}", MEMBERS[kind]);
        }
        let last_good = self.client.lists[kind].take().and_then(|list| list.last_good);
        if local && !items.is_empty() {
            let same = last_good.as_ref() == Some(&items)
                || self.cached[kind].clone().is_some_and(|cached| by_key(kind, cached) == items);
            // A notification may still wait for the rest of its batch.
            check!(self, same || self.batched[FAMILY[kind]], "q3, q4: a list from memory that the client never had");
        }
        self.announced[FAMILY[kind]] = false;
        let last_good = if next.is_none() { Some(items.clone()) } else { last_good };
        self.client.lists[kind] = Some(Holding { items, last_good, next, ours, changed: false, listens });
    }

    // ---- at rest ----------------------------------------------------------------------------------------

    pub(super) fn check_rest(&mut self) {
        let over = self.gone.is_some() || self.left;
        check!(self, over == self.ended, "12: over {over}, ended {}", self.ended);
        check!(self, self.nulls_due == 0, "1: nonsense without an answer");
        let waiting = self.tickets_waiting.len() + self.tickets_running.len();
        check!(self, waiting == 0, "12: {waiting} requests for a restart were not answered");
        if self.gone != Some(ClientEnd::Broken) {
            for ask in self.asks.values() {
                let owed = !ask.cancelled && (over || !matches!(ask.class, Class::Listen { .. }));
                check!(self, ask.answers == 1 || !owed, "1: {} ({:?}) was never answered", ask.number, ask.class);
            }
        }
        let alive: Vec<u32> = self.servers.values().filter(|server| server.alive).map(|s| s.generation).collect();
        check!(self, alive.len() <= usize::from(!over), "4: at rest {alive:?} are there");
        if over {
            return;
        }
        let status = self.relay.status(self.now).to_json();
        check!(self, status["held"] == 0, "10: held at rest: {status}");
        let open = self.asks.values().filter(|ask| ask.answers == 0).count() as u64;
        check!(self, status["in_flight"].as_u64().unwrap_or(0) <= open, "10: in flight at rest: {status}");
        if let Some(generation) = alive.first() {
            let server = &self.servers[generation];
            let stuck = server.is_mute();
            check!(self, server.serves || stuck, "4: generation {generation} lives and does not serve");
            if server.ready {
                self.check_lists(server);
            }
        }
        if !self.any_end {
            self.check_peace();
        }
    }

    fn check_lists(&self, server: &Server) {
        for kind in 0..4 {
            let Some(list) = &self.client.lists[kind] else { continue };
            let hears = if self.client.is_modern() {
                list.listens.iter().any(|listen| self.asks[listen].answers == 0 && !self.asks[listen].cancelled)
            } else {
                self.client.told.as_ref().is_some_and(|told| told.families[FAMILY[kind]])
            };
            if !hears || list.changed {
                continue;
            }
            let same = !self.differs(kind, server);
            check!(self, same, "8: the client holds {} that generation {} has not", MEMBERS[kind], server.generation);
            if kind == 0 && self.settings.tools && list.next.is_none() {
                let items = server.items(0);
                let names: Vec<&str> = items.iter().filter_map(|item| item["name"].as_str()).collect();
                check!(self, list.ours == our_names(&names), "8: ours are {:?} beside {names:?}", list.ours);
            }
        }
    }

    /// Without ends and restarts both sides see what they would see without outlast.
    fn check_peace(&self) {
        for (number, sent) in &self.sent {
            let local = match self.asks.get(number).map(|ask| &ask.class) {
                Some(Class::Ours(_) | Class::TooMuch | Class::List(0) | Class::Page(0, _)) => true,
                Some(Class::Call { .. }) if self.clash => true,
                Some(_) => self.asks[number].cancelled,
                // The cancellation of a request that the relay answered itself is not forwarded.
                None => matches!(sent.kind, Kind::Answer(_)) || sent.line.windows(9).any(|part| part == b"cancelled"),
            };
            let local = local || self.refused.contains(number);
            let fine = local || !sent.while_serving || sent.writes.len() == 1;
            check!(self, fine, "6: {number} never reached the server");
        }
        for (number, said) in &self.said {
            let due = match said.word {
                Word::Log | Word::Updated | Word::Null => true,
                Word::Question { .. } | Word::Cancelled { .. } => !self.client.is_modern(),
                _ => false,
            };
            // Answers are checked elsewhere, and lists have their own rules.
            check!(self, !due || said.delivered, "6: {number} never reached the client");
        }
    }

    pub(super) fn may_leave_after(&self, server: &Server, how: &How) -> bool {
        let current = server.ready && !server.draining && server.stop.is_none();
        current
            && *how == How::Exited(Exit::Code(0))
            && self.settings.on_clean_exit == OnCleanExit::End
            && self.settings.policy.clean_leaves
    }
}

fn by_key(kind: usize, items: Vec<Value>) -> BTreeMap<String, Value> {
    items.into_iter().map(|item| (item[KEYS[kind]].as_str().unwrap_or_default().to_owned(), item)).collect()
}

/// The names of outlast's tools beside these.
fn our_names(names: &[&str]) -> [String; 3] {
    OURS.map(|tool| {
        let mut name = tool.to_owned();
        for _ in 0..2 {
            if names.contains(&name.as_str()) {
                name = format!("outlast_{name}");
            }
        }
        name
    })
}

/// The bytes of a request without its id.
fn without_id(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    let from = text.find(r#""id":"#).expect("a request has an id");
    let to = text.find(r#","method""#).expect("a request has a method");
    // White space after the id is removed with it.
    format!("{}{}", &text[..from], &text[to..])
}

/// A discover result of a server as the relay repeats it: not cacheable, and under outlast's name.
fn dressed(discovered: &Value) -> Value {
    let mut result = discovered.clone();
    result["ttlMs"] = json!(0);
    result["cacheScope"] = json!("private");
    result["resultType"] = json!("complete");
    result["_meta"]["io.modelcontextprotocol/serverInfo"] =
        json!({"name": "outlast", "version": env!("CARGO_PKG_VERSION")});
    result
}
