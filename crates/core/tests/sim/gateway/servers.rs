//! Backends: each link is one server life, of one era or both, that answers late, asks, babbles, hangs and dies.

use super::*;
use serde_json::json;

pub struct Server {
    pub link: Link,
    /// It was told to go; its end is owed.
    pub leaving: bool,
    pub up: bool,
    is_http: bool,
    /// As the configuration said when it was started.
    is_per_session: bool,
    handshake: bool,
    stateless: bool,
    /// Takes no more requests; what is open may still be answered.
    is_failing: bool,
    /// Answers nothing at all.
    hangs: bool,
    /// Goes on with what was taken back, for a while.
    is_stubborn: bool,
    tools: u64,
    open: Vec<Work>,
    /// What was taken back and is still worked on.
    ghosts: Vec<Work>,
    /// Questions to clients that are not answered: our id, the question's number.
    questions: Vec<(Value, u64)>,
    /// Ids of questions it took back: an answer may be on its way, so they are not used again.
    taken_back: Vec<Value>,
    /// The same by the questions' own numbers.
    withdrawn: BTreeSet<u64>,
}

/// A request it works on.
#[derive(Clone)]
struct Work {
    id: Value,
    method: String,
    params: Value,
    /// The number of the client's request; none of the gateway's own.
    number: Option<u64>,
    token: Option<Value>,
    /// When it was taken back. A stubborn server may still ask for it.
    taken_back: Option<Instant>,
}

impl Server {
    fn is_stateless(&self, params: &Value) -> bool {
        self.stateless && params["_meta"]["io.modelcontextprotocol/protocolVersion"] == "2026-07-28"
    }
}

impl World {
    pub fn some_server(&mut self) -> Option<u64> {
        let serials: Vec<u64> = self.servers.keys().copied().collect();
        (!serials.is_empty()).then(|| self.dice.pick(&serials))
    }

    pub fn server_starts(&mut self, link: Link) {
        check!(self, self.serials.insert(link.serial), "{link:?} was used before");
        check!(self, !self.stopping, "{link:?} was started while stopping");
        let Some(backend) = self.gateway.settings_of(link) else { self.fail("a link of no backend") };
        let is_http = matches!(backend.kind, Kind::Http { .. });
        let is_per_session = backend.children == Children::PerSession;
        // The era is the program's, so all lives of one configuration share it.
        let key = format!("{:?}", backend.kind)
            .bytes()
            .fold(self.seed, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let (handshake, stateless) = match key % 4 {
            0 => (false, true),
            1 => (true, true),
            _ => (true, false),
        };
        let fails = !self.resting && self.dice.one_in(8);
        let server = Server {
            link,
            leaving: false,
            up: false,
            is_http,
            is_per_session,
            handshake,
            stateless,
            is_failing: false,
            hangs: !self.resting && self.dice.one_in(12),
            is_stubborn: self.dice.one_in(3),
            tools: self.dice.below(3),
            open: Vec::new(),
            ghosts: Vec::new(),
            questions: Vec::new(),
            taken_back: Vec::new(),
            withdrawn: BTreeSet::new(),
        };
        self.servers.insert(link.serial, server);
        match fails {
            true => self.owed.push_back(Event::LinkDown {
                link,
                how: How::CouldNotStart("no".into()),
                stderr_tail: String::new(),
                unsent: Vec::new(),
            }),
            false => self.owed.push_back(Event::LinkUp { link, pid: Some(link.serial as u32) }),
        }
        if fails {
            self.servers.get_mut(&link.serial).expect("made above").leaving = true;
        }
    }

    pub fn server_hears(&mut self, link: Link, message: &[u8]) {
        check!(
            self,
            message.ends_with(b"\n") && message.iter().filter(|byte| **byte == b'\n').count() == 1,
            "not one line"
        );
        let said = parsed(message);
        let Some(server) = self.servers.get_mut(&link.serial) else {
            self.fail(&format!("{link:?} is gone and was told {said}"))
        };
        check!(self, server.up, "{link:?} is not up and was told {said}");
        if said.get("method").is_none() {
            // An answer to a question: it must be the answer to this question.
            let found = server.questions.iter().position(|(id, _)| *id == said["id"]);
            let Some(index) = found else { return };
            let (_, number) = server.questions.remove(index);
            if let Some(answer) = said["result"].get("q") {
                check!(self, *answer == number, "question {number} was answered with {said}");
            }
            return;
        }
        let Some(id) = said.get("id") else {
            let known = ["initialized", "cancelled", "progress", "roots/list_changed"];
            let is_known = known.iter().any(|known| said["method"] == format!("notifications/{known}"));
            check!(self, is_known, "{link:?} was told {said} without an id");
            if said["method"] == "notifications/cancelled" {
                let (now, is_stubborn) = (self.now, server.is_stubborn && !self.resting);
                let is_it = |work: &Work| work.id == said["params"]["requestId"];
                server.ghosts.extend(
                    server
                        .open
                        .iter()
                        .filter(|work| is_stubborn && is_it(work))
                        .cloned()
                        .map(|work| Work { taken_back: Some(now), ..work }),
                );
                server.open.retain(|work| !is_it(work));
            }
            return;
        };
        let params = said["params"].clone();
        let number =
            params["arguments"]["n"].as_u64().or_else(|| params["uri"].as_str()?.rsplit('/').next()?.parse().ok());
        let method = said["method"].as_str().unwrap_or_default().to_owned();
        let number = number.filter(|_| ["tools/call", "resources/read"].contains(&method.as_str()));
        check!(self, !server.open.iter().any(|work| work.id == *id), "{id} is used twice on {link:?}");
        if number.is_some() && server.is_http && server.stateless && !server.handshake {
            check!(self, server.is_stateless(&params), "a stateless server was told {said}");
        }
        if method == "tools/call" {
            let name = params["name"].as_str().unwrap_or_default();
            check!(self, name.starts_with('t'), "{name} is not the backend's own name");
        }
        if let Some(number) = number {
            self.heard_on.insert(number, link.serial);
        }
        if self.servers[&link.serial].is_failing {
            let id = Id::parse(&id.to_string()).expect("our ids are numbers");
            self.owed.push_back(Event::RequestLost { link, id, was_sent: false, why: "gone".into() });
            return;
        }
        // What is not known to be safe is asked once, and what is safe twice, unless it never left.
        if let Some(number) = number.filter(|_| params.get("inputResponses").is_none()) {
            let is_safe = method == "resources/read" || params["name"] == "t0";
            let heard = self.heard.entry(number).or_insert(0);
            *heard += 1;
            let heard = *heard;
            check!(self, heard <= 1 + u32::from(is_safe), "{number} was asked {heard} times: {said}");
        }
        let token = params["_meta"].get("progressToken").cloned();
        let server = self.servers.get_mut(&link.serial).expect("seen above");
        server.open.push(Work { id: id.clone(), method, params, number, token, taken_back: None });
    }

    /// One server does one thing.
    pub fn server_acts(&mut self) {
        let Some(serial) = self.some_server() else { return };
        let roll = self.dice.below(12);
        let server = &self.servers[&serial];
        if !server.up || server.leaving && roll < 6 {
            return;
        }
        match roll {
            0 => {
                if let Some(work) = server.open.iter().find(|work| work.token.is_some()) {
                    let params = json!({"progressToken": work.token, "progress": 1, "n": work.number});
                    self.server_says(serial, json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params}));
                }
            }
            1 if server.handshake && !server.hangs && server.open.iter().all(|work| work.method != "initialize") => {
                let number = self.number();
                let id = if self.dice.one_in(2) { json!(number % 7) } else { json!(format!("q{number}")) };
                let server = self.servers.get_mut(&serial).expect("seen above");
                if server.questions.iter().any(|(known, _)| *known == id) || server.taken_back.contains(&id) {
                    return;
                }
                server.questions.push((id.clone(), number));
                let method = self.dice.pick(&["elicitation/create", "sampling/createMessage", "roots/list"]);
                let server = &self.servers[&serial];
                // It asks for one of its calls, which only the world knows: half a minute after a call was taken back even a
                // stubborn one has noticed.
                let is_fresh = |work: &&Work| work.taken_back.is_none_or(|at| self.now.duration_since(at) < Duration::from_secs(30));
                let works: Vec<Work> = server.open.iter().chain(&server.ghosts).filter(|work| work.number.is_some()).filter(is_fresh).cloned().collect();
                let (is_http, link) = (server.is_http, server.link);
                let mut params = json!({"q": number, "by": serial});
                let work = if works.is_empty() { None } else { Some(self.dice.pick(&works)) };
                if let Some(work) = &work {
                    params["for"] = json!(work.number);
                }
                let message = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
                // Over HTTP it may say so, by the stream that it asks in.
                match work.filter(|_| is_http && self.dice.one_in(2)) {
                    Some(work) => {
                        let id = Id::parse(&work.id.to_string()).expect("our ids are numbers");
                        self.owed.push_back(Event::LinkSaidFor { link, id, message: message.to_string().into() });
                    }
                    None => self.server_says(serial, message),
                }
            }
            2 => {
                let tools = self.dice.below(3);
                self.servers.get_mut(&serial).expect("seen above").tools = tools;
                self.server_says(serial, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}));
            }
            3 => self.server_says(serial, json!({"jsonrpc": "2.0", "id": 999_999_999, "result": {"n": 0}})),
            4 => self.owed.push_back(Event::LinkSaid { link: self.servers[&serial].link, message: "oops".into() }),
            5 => self.server_says(serial, json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "error", "data": serial}})),
            6 if server.is_http => {
                let count = server.open.len() as u64;
                if count > 0 {
                    let index = self.dice.below(count) as usize;
                    let was_sent = self.dice.one_in(2);
                    let server = self.servers.get_mut(&serial).expect("seen above");
                    let work = server.open.remove(index);
                    let link = server.link;
                    let id = Id::parse(&work.id.to_string()).expect("our ids are numbers");
                    if self.dice.one_in(2) {
                        return self.server_refuses(link, id, &work);
                    }
                    if !was_sent {
                        self.unhear(&work);
                    }
                    self.owed.push_back(Event::RequestLost { link, id, was_sent, why: "reset".into() });
                }
            }
            8 if server.is_http && !server.leaving && self.dice.one_in(4) => {
                // Its session is gone, or it is: some of what is open was refused for that.
                let server = self.servers.get_mut(&serial).expect("seen above");
                let link = server.link;
                if !std::mem::replace(&mut server.is_failing, true) {
                    let why = "it is gone".to_owned();
                    let how = if self.dice.one_in(2) { How::Forgot(why) } else { How::Lost(why) };
                    self.owed.push_back(Event::LinkFailing { link, how });
                }
                while self.dice.one_in(2) {
                    let server = self.servers.get_mut(&serial).expect("seen above");
                    let Some(work) = server.open.pop() else { return };
                    self.unhear(&work);
                    let id = Id::parse(&work.id.to_string()).expect("our ids are numbers");
                    self.owed.push_back(Event::RequestLost { link, id, was_sent: false, why: "refused".into() });
                }
            }
            9 if server.is_http && self.dice.one_in(8) => {
                let refused = refused(self.dice.pick(&[401, 403]), None, Bytes::new());
                self.owed.push_back(Event::LinkDenied { link: server.link, refused });
            }
            7 => {
                // A question about one of its questions.
                let server = self.servers.get_mut(&serial).expect("seen above");
                if let Some((id, number)) = server.questions.pop() {
                    server.taken_back.push(id.clone());
                    server.withdrawn.insert(number);
                    self.server_says(serial, json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}}));
                }
            }
            _ if server.hangs => {}
            _ => {
                let count = server.open.len() as u64;
                if count > 0 {
                    let index = self.dice.below(count) as usize;
                    self.server_answers(serial, index);
                }
            }
        }
    }

    /// The request did not reach it after all, or was refused before it acted on it.
    fn unhear(&mut self, work: &Work) {
        if let Some(number) = work.number.filter(|_| work.params.get("inputResponses").is_none()) {
            *self.heard.entry(number).or_insert(1) -= 1;
        }
    }

    /// Says no in words of HTTP.
    fn server_refuses(&mut self, link: Link, id: Id, work: &Work) {
        let status = self.dice.pick(&[401, 403, 404, 413, 429, 500, 503]);
        let retry_after = self.dice.one_in(2).then(|| Duration::from_secs(self.dice.below(90)));
        if status < 500 || status == 503 && retry_after.is_some() {
            self.unhear(work);
        }
        let line = json!({"jsonrpc": "2.0", "id": work.id, "method": work.method, "params": work.params});
        let refused = refused(status, retry_after, Bytes::from(format!("{line}\n")));
        self.owed.push_back(Event::RequestRefused { link, id, refused });
    }

    fn server_says(&mut self, serial: u64, message: Value) {
        let link = self.servers[&serial].link;
        self.owed.push_back(Event::LinkSaid { link, message: Bytes::from(message.to_string()) });
    }

    fn server_answers(&mut self, serial: u64, index: usize) {
        let asks = !self.resting && self.dice.one_in(6);
        let fails = !self.resting && self.dice.one_in(10);
        let number = self.number();
        let server = self.servers.get_mut(&serial).expect("asked by the caller");
        if server.open[index].method == "subscriptions/listen" {
            return;
        }
        let work = server.open.remove(index);
        let is_stateless = server.is_stateless(&work.params);
        let error = |code: i32| json!({"jsonrpc": "2.0", "id": work.id, "error": {"code": code, "message": "no"}});
        let mut result = match work.method.as_str() {
            "initialize" if !server.handshake => return self.server_says(serial, error(-32022)),
            "server/discover" if !server.stateless => return self.server_says(serial, error(-32601)),
            "initialize" | "server/discover" if fails => return self.server_says(serial, error(-32603)),
            "initialize" => {
                json!({"protocolVersion": "2025-11-25", "capabilities": capabilities(), "serverInfo": {"name": "s", "version": "1"}})
            }
            "server/discover" => {
                let versions =
                    if server.handshake { json!(["2026-07-28", "2025-11-25"]) } else { json!(["2026-07-28"]) };
                json!({"supportedVersions": versions, "capabilities": capabilities()})
            }
            "tools/list" => {
                let mut tools: Vec<Value> =
                    (0..=server.tools).map(|index| json!({"name": format!("t{index}"), "inputSchema": {}})).collect();
                tools[0]["annotations"] = json!({"readOnlyHint": true});
                json!({"tools": tools})
            }
            "resources/list" => json!({"resources": []}),
            "resources/templates/list" => {
                let backend = server.link.backend;
                json!({"resourceTemplates": [{"name": "r", "uriTemplate": format!("r://{backend}/{{n}}")}]})
            }
            "prompts/list" => json!({"prompts": []}),
            "tools/call" if is_stateless && asks => {
                let asked = json!({"a": {"method": "elicitation/create", "params": {"q": number, "by": serial, "for": work.number}}});
                let result = json!({"resultType": "input_required", "inputRequests": asked, "requestState": "theirs", "n": work.number});
                return self.server_says(serial, json!({"jsonrpc": "2.0", "id": work.id, "result": result}));
            }
            _ if fails && work.number.is_some() => {
                let mut answer = error(-1);
                answer["error"]["data"] = json!({"n": work.number});
                return self.server_says(serial, answer);
            }
            _ => json!({"n": work.number, "by": serial, "content": []}),
        };
        if is_stateless {
            result["resultType"] = json!("complete");
        }
        self.server_says(serial, json!({"jsonrpc": "2.0", "id": work.id, "result": result}));
    }

    /// A server dies, asked to or not.
    pub fn server_ends(&mut self) {
        let Some(serial) = self.some_server() else { return };
        self.server_dies(serial);
    }

    fn server_dies(&mut self, serial: u64) {
        // What it said before came before.
        let (mine, rest): (Vec<Event>, Vec<Event>) = std::mem::take(&mut self.owed).into_iter().partition(|event| {
            matches!(event, Event::LinkSaid { link, .. } | Event::LinkSaidFor { link, .. } | Event::LinkUp { link, .. } | Event::RequestLost { link, .. } | Event::RequestRefused { link, .. } | Event::LinkDenied { link, .. } | Event::LinkFailing { link, .. } | Event::LinkDown { link, .. } if link.serial == serial)
        });
        self.owed.extend(rest);
        for event in mine {
            match event {
                Event::LinkDown { .. } => {}
                event => self.pay_event(event),
            }
        }
        let Some(server) = self.servers.remove(&serial) else { return };
        let how = if server.up { How::Exited(Exit::Signal(9)) } else { How::CouldNotStart("no".into()) };
        // The last lines may not have reached it; only whole requests of clients count here.
        let lost = if server.is_http || !server.up { 0 } else { self.dice.below(3) as usize };
        let lost = &server.open[server.open.len() - lost.min(server.open.len())..];
        let lost: Vec<Work> = lost.iter().filter(|work| work.number.is_some()).cloned().collect();
        let is_unsent = |work: &Work| lost.iter().any(|lost| lost.id == work.id);
        for number in lost.iter().filter_map(|work| work.number) {
            // It was never heard of.
            *self.heard.entry(number).or_insert(1) -= 1;
        }
        let unsent = lost
            .iter()
            .map(|work| json!({"jsonrpc": "2.0", "id": work.id, "method": work.method, "params": work.params}))
            .map(|line| Bytes::from(format!("{line}\n")))
            .collect();
        // Calls that nobody may ask twice end with it.
        for work in server.open.iter().filter(|work| !is_unsent(work)) {
            let Some(number) = work.number.filter(|_| work.method == "tools/call" && work.params["name"] != "t0")
            else {
                continue;
            };
            for (client, known) in &self.clients {
                let ids = known.open.iter().filter(|(_, request)| request.number == number && !request.is_parked);
                self.due_now.extend(ids.map(|(id, _)| (*client, id.clone())));
            }
        }
        self.handle(Event::LinkDown { link: server.link, how, stderr_tail: "ouch".into(), unsent });
    }

    /// Hands over one event; a link that comes up knows it before it is told anything.
    fn pay_event(&mut self, event: Event) {
        self.handle(event);
    }

    /// At rest: the next thing that somebody owes. False if nobody owes anything.
    pub fn server_finishes(&mut self) -> bool {
        let serials: Vec<u64> = self.servers.keys().copied().collect();
        for serial in serials {
            let server = &self.servers[&serial];
            if server.leaving {
                self.server_dies(serial);
                return true;
            }
            if server.up && !server.hangs {
                let due = server.open.iter().position(|work| work.method != "subscriptions/listen");
                if let Some(index) = due {
                    self.server_answers(serial, index);
                    return true;
                }
            }
        }
        false
    }

    /// Before an event reaches the gateway the world knows of it.
    pub fn server_news(&mut self, event: &Event) {
        if let Event::LinkUp { link, .. } = event
            && let Some(server) = self.servers.get_mut(&link.serial)
        {
            server.up = true;
        }
        if let Event::LinkDown { link, .. } = event {
            self.servers.remove(&link.serial);
        }
    }

    /// Whether any server that is not on its way out still works on a request.
    pub fn is_worked_on(&self, number: u64) -> bool {
        let servers = self.servers.values().filter(|server| !server.leaving);
        servers.flat_map(|server| &server.open).any(|work| work.number == Some(number))
    }

    /// Whether a server still works on the call that it asked this for, and neither took the question back nor is it dead
    /// or told to go.
    pub fn is_wanted(&self, client: u64, question: &Value) -> bool {
        let Some(server) = question["by"].as_u64().and_then(|serial| self.servers.get(&serial)) else { return false };
        let number = question["for"].as_u64();
        let is_withdrawn = question["q"].as_u64().is_some_and(|asked| server.withdrawn.contains(&asked));
        let is_open = self.clients[&client].open.values().any(|request| Some(request.number) == number);
        number.is_some()
            && !server.leaving
            && !is_withdrawn
            && is_open
            && server.open.iter().any(|work| work.number == number)
    }

    pub fn is_per_session(&self, serial: u64) -> bool {
        self.servers.get(&serial).is_some_and(|server| server.is_per_session)
    }

    /// The requests of clients that a link works on.
    pub fn works_on(&self, serial: u64) -> BTreeSet<u64> {
        let server = self.servers.get(&serial);
        server.into_iter().flat_map(|server| &server.open).filter_map(|work| work.number).collect()
    }

    /// The clients whose calls a link works on.
    pub fn works_for(&self, serial: u64) -> BTreeSet<u64> {
        let numbers = self.works_on(serial);
        self.clients
            .iter()
            .filter(|(_, client)| client.open.values().any(|request| numbers.contains(&request.number)))
            .map(|(client, _)| *client)
            .collect()
    }
}

fn capabilities() -> Value {
    json!({"tools": {"listChanged": true}, "resources": {}, "logging": {}})
}

fn refused(status: u16, retry_after: Option<Duration>, line: Bytes) -> Box<Refused> {
    let words = format!("http://a answered {status}");
    Box::new(Refused { status, words, challenge: Some("Bearer".into()), body: None, retry_after, line })
}
