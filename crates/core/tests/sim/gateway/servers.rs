//! Backends: each link is one server process, of one era or both, that answers late, sends requests and garbage,
//! hangs and crashes.

use super::*;
use crate::mcp_server::{McpServer, Turn, Work};
use serde_json::json;

pub(super) struct Server {
    pub link: Link,
    /// It was told to exit; its end will be reported.
    pub leaving: bool,
    pub up: bool,
    is_http: bool,
    /// As configured when it was started.
    is_per_session: bool,
    /// Takes no more requests; open ones may still be answered.
    is_failing: bool,
    /// Answers nothing at all.
    hangs: bool,
    mcp: McpServer,
}

impl World {
    pub(crate) fn some_server(&mut self) -> Option<u64> {
        let serials: Vec<u64> = self.servers.keys().copied().collect();
        (!serials.is_empty()).then(|| self.dice.pick(&serials))
    }

    pub(crate) fn server_starts(&mut self, link: Link) {
        check!(self, self.serials.insert(link.serial), "{link:?} was used before");
        check!(self, !self.stopping, "{link:?} was started while stopping");
        let Some(backend) = self.gateway.settings_of(link) else { self.fail("a link of no backend") };
        let is_http = matches!(backend.kind, Kind::Http { .. });
        let is_per_session = backend.children == Children::PerSession;
        // The era belongs to the program, so all processes of one configuration share it.
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
            is_failing: false,
            hangs: !self.resting && self.dice.one_in(12) && self.shared.is_none(),
            mcp: McpServer::new(handshake, stateless, &mut self.dice),
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

    pub(crate) fn server_hears(&mut self, link: Link, message: &[u8]) {
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
            return server.mcp.hear_answer(&said);
        }
        let Some(id) = said.get("id") else {
            let known = ["initialized", "cancelled", "progress", "roots/list_changed"];
            let is_known = known.iter().any(|known| said["method"] == format!("notifications/{known}"));
            check!(self, is_known || self.shared.is_some(), "{link:?} was told {said} without an id");
            if said["method"] == "notifications/cancelled" {
                server.mcp.hear_cancelled(&said["params"]["requestId"], self.resting, self.now);
            }
            return;
        };
        let work = Work::of(&said);
        check!(self, !server.mcp.open.iter().any(|work| work.id == *id), "{id} is used twice on {link:?}");
        if work.number.is_some() && server.is_http && server.mcp.stateless && !server.mcp.handshake {
            check!(self, server.mcp.is_stateless(&work.params), "a stateless server was told {said}");
        }
        if work.method == "tools/call" {
            let name = work.params["name"].as_str().unwrap_or_default();
            check!(self, name.starts_with('t'), "{name} is not the backend's own name");
        }
        if let Some(number) = work.number {
            self.heard_on.insert(number, link.serial);
        }
        if self.servers[&link.serial].is_failing {
            let id = Id::parse(&id.to_string()).expect("our ids are numbers");
            self.owed.push_back(Event::RequestLost { link, id, was_sent: false, why: "gone".into() });
            return;
        }
        // An unsafe request is sent once, and a safe one twice, unless it was not written.
        if let Some(number) = work.number.filter(|_| !work.is_retry()) {
            let heard = self.heard.entry(number).or_insert(0);
            *heard += 1;
            let heard = *heard;
            check!(self, heard <= 1 + u32::from(work.is_safe()), "{number} was asked {heard} times: {said}");
        }
        let server = self.servers.get_mut(&link.serial).expect("seen above");
        server.mcp.open.push(work);
    }

    /// One server does one thing.
    pub(crate) fn server_acts(&mut self) {
        let Some(serial) = self.some_server() else { return };
        let roll = self.dice.below(12);
        let server = &self.servers[&serial];
        if !server.up || server.leaving && roll < 6 {
            return;
        }
        match roll {
            0 => {
                if let Some(progress) = server.mcp.progress() {
                    self.server_says(serial, progress);
                }
            }
            1 if server.mcp.handshake
                && !server.hangs
                && server.mcp.open.iter().all(|work| work.method != "initialize") =>
            {
                let number = self.number();
                let server = self.servers.get_mut(&serial).expect("seen above");
                let (is_http, link) = (server.is_http, server.link);
                let Some((message, work)) = server.mcp.ask(number, serial, &mut self.dice, self.now) else { return };
                // Over HTTP it may name the call, by the stream that it uses.
                match work.filter(|_| is_http && self.dice.one_in(2)) {
                    Some(work) => {
                        let id = Id::parse(&work.id.to_string()).expect("our ids are numbers");
                        self.owed.push_back(Event::LinkSaidFor { link, id, message: message.to_string().into(), walk: None });
                    }
                    None => self.server_says(serial, message),
                }
            }
            2 => {
                let tools = self.dice.below(3);
                self.servers.get_mut(&serial).expect("seen above").mcp.tools = tools;
                self.server_says(serial, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}));
            }
            3 => self.server_says(serial, json!({"jsonrpc": "2.0", "id": 999_999_999, "result": {"n": 0}})),
            4 => self.owed.push_back(Event::LinkSaid { link: self.servers[&serial].link, message: "oops".into() }),
            5 => self.server_says(serial, json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "error", "data": serial}})),
            6 if server.is_http => {
                let count = server.mcp.open.len() as u64;
                if count > 0 {
                    let index = self.dice.below(count) as usize;
                    let was_sent = self.dice.one_in(2);
                    let server = self.servers.get_mut(&serial).expect("seen above");
                    let work = server.mcp.open.remove(index);
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
                // Its session is gone, or the server is: some open requests were refused for that.
                let server = self.servers.get_mut(&serial).expect("seen above");
                let link = server.link;
                if !std::mem::replace(&mut server.is_failing, true) {
                    let why = "it is gone".to_owned();
                    let how = if self.dice.one_in(2) { How::Forgot(why) } else { How::Lost(why) };
                    self.owed.push_back(Event::LinkFailing { link, how });
                }
                while self.dice.one_in(2) {
                    let server = self.servers.get_mut(&serial).expect("seen above");
                    let Some(work) = server.mcp.open.pop() else { return };
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
                // A notification about one of its requests.
                let server = self.servers.get_mut(&serial).expect("seen above");
                if let Some(note) = server.mcp.withdraw() {
                    self.server_says(serial, note);
                }
            }
            _ if server.hangs => {}
            _ => {
                let count = server.mcp.open.len() as u64;
                if count > 0 {
                    let index = self.dice.below(count) as usize;
                    self.server_answers(serial, index);
                }
            }
        }
    }

    /// The request did not reach it, or was refused before it ran.
    fn unhear(&mut self, work: &Work) {
        if let Some(number) = work.number.filter(|_| !work.is_retry()) {
            *self.heard.entry(number).or_insert(1) -= 1;
        }
    }

    /// Refuses with an HTTP status.
    fn server_refuses(&mut self, link: Link, id: Id, work: &Work) {
        let status = self.dice.pick(&[401, 403, 404, 413, 429, 500, 503]);
        let retry_after = self.dice.one_in(2).then(|| Duration::from_secs(self.dice.below(90)));
        if status < 500 || status == 503 && retry_after.is_some() {
            self.unhear(work);
        }
        let refused = refused(status, retry_after, Bytes::from(format!("{}\n", work.line())));
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
        let turn = Turn { by: serial, backend: server.link.backend.into(), asks: asks.then_some(number), fails };
        if let Some(answer) = server.mcp.answer(index, &turn) {
            self.server_says(serial, answer);
        }
    }

    /// A server exits, requested or not.
    pub(crate) fn server_ends(&mut self) {
        let Some(serial) = self.some_server() else { return };
        self.server_exits(serial);
    }

    fn server_exits(&mut self, serial: u64) {
        // Its earlier messages are delivered first.
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
        let lost = &server.mcp.open[server.mcp.open.len() - lost.min(server.mcp.open.len())..];
        let lost: Vec<Work> = lost.iter().filter(|work| work.number.is_some()).cloned().collect();
        let is_unsent = |work: &Work| lost.iter().any(|lost| lost.id == work.id);
        // These were not written.
        lost.iter().for_each(|work| self.unhear(work));
        let unsent = lost.iter().map(|work| Bytes::from(format!("{}\n", work.line()))).collect();
        // Calls that must not be repeated fail with it.
        for work in server.mcp.open.iter().filter(|work| !is_unsent(work)) {
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

    /// Reports one event; a link that becomes ready is registered before it is sent anything.
    fn pay_event(&mut self, event: Event) {
        self.handle(event);
    }

    /// At rest: sends the next message that is due. False if there is none.
    pub(crate) fn server_finishes(&mut self) -> bool {
        let serials: Vec<u64> = self.servers.keys().copied().collect();
        for serial in serials {
            let server = &self.servers[&serial];
            if server.leaving {
                self.server_exits(serial);
                return true;
            }
            if server.up && !server.hangs {
                let due = server.mcp.open.iter().position(|work| work.method != "subscriptions/listen");
                if let Some(index) = due {
                    self.server_answers(serial, index);
                    return true;
                }
            }
        }
        false
    }

    /// Registers an event in the world before it reaches the gateway.
    pub(crate) fn server_news(&mut self, event: &Event) {
        if let Event::LinkUp { link, .. } = event
            && let Some(server) = self.servers.get_mut(&link.serial)
        {
            server.up = true;
        }
        if let Event::LinkDown { link, .. } = event {
            self.servers.remove(&link.serial);
        }
    }

    /// Whether any server that was not told to exit still works on a request.
    pub(crate) fn is_worked_on(&self, number: u64) -> bool {
        let servers = self.servers.values().filter(|server| !server.leaving);
        servers.flat_map(|server| &server.mcp.open).any(|work| work.number == Some(number))
    }

    /// Whether a server still works on the call of this server request, did not cancel the request, runs, and was not
    /// told to exit.
    pub(crate) fn is_wanted(&self, client: u64, question: &Value) -> bool {
        let Some(server) = question["by"].as_u64().and_then(|serial| self.servers.get(&serial)) else { return false };
        let number = question["for"].as_u64();
        let is_withdrawn = question["q"].as_u64().is_some_and(|asked| server.mcp.withdrawn.contains(&asked));
        let is_open = self.clients[&client].open.values().any(|request| Some(request.number) == number);
        number.is_some()
            && !server.leaving
            && !is_withdrawn
            && is_open
            && server.mcp.open.iter().any(|work| work.number == number)
    }

    pub(crate) fn is_per_session(&self, serial: u64) -> bool {
        self.servers.get(&serial).is_some_and(|server| server.is_per_session)
    }

    /// The requests of clients that a link works on.
    pub(crate) fn works_on(&self, serial: u64) -> BTreeSet<u64> {
        let server = self.servers.get(&serial);
        server.into_iter().flat_map(|server| &server.mcp.open).filter_map(|work| work.number).collect()
    }

    /// The clients whose calls a link works on.
    pub(crate) fn works_for(&self, serial: u64) -> BTreeSet<u64> {
        let numbers = self.works_on(serial);
        self.clients
            .iter()
            .filter(|(_, client)| client.open.values().any(|request| numbers.contains(&request.number)))
            .map(|(client, _)| *client)
            .collect()
    }
}

fn refused(status: u16, retry_after: Option<Duration>, line: Bytes) -> Box<Refused> {
    let words = format!("http://a answered {status}");
    Box::new(Refused { status, words, challenge: Some("Bearer".into()), body: None, retry_after, line })
}
