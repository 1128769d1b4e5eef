//! What the client says, and what becomes of it in each state of the server.

use super::*;
use crate::message::{Params, Raw, RawId, line, pick, pick_text, text};
use listens::Listen;
use serde_json::json;

const PROTOCOL_VERSION: &str = "io.modelcontextprotocol/protocolVersion";
pub(super) const LEGACY: [&str; 4] = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"];

impl Relay {
    pub(super) fn client_asked(
        &mut self,
        id: Option<Id>,
        method: &str,
        params: &Params<'_>,
        line: &Bytes,
        batch: Option<u64>,
        now: Instant,
    ) {
        let Some(id) = id else {
            // No answer to it could be told apart: it passes, and nothing is promised.
            return self.pass_or_hold(line, None, now);
        };
        let was_probe = self.probe_only && self.client == Client::Modern;
        self.note_era(method, params);
        let mut open = self.open(id, method, params, batch);
        open.waited.arrived = Some(now);
        if open.class == Class::Initialize {
            // Every later child hears it again.
            open.kept = Some(Bytes::copy_from_slice(line));
        }
        if open.class == Class::Initialize && was_probe {
            return self.initialize_after_probe(open, line, now);
        }
        if let Class::Call { .. } = open.class
            && let Some(tool) = self.our_tool(&open.what)
        {
            let seq = open.seq;
            self.call_ours(open, tool, params.arguments(), now);
            return self.heartbeat_begins(seq, now);
        }
        let seq = open.seq;
        self.place(open, line.clone(), now);
        self.heartbeat_begins(seq, now);
    }

    /// The client's first words decide the era.
    fn note_era(&mut self, method: &str, params: &Params<'_>) {
        let meta = params.meta();
        let is_modern = |meta: Raw<'_>| pick(meta, [PROTOCOL_VERSION]).is_some_and(|[version]| version.is_some());
        match self.client {
            Client::Unopened => match method {
                "initialize" => self.client = Client::Opening,
                "server/discover" => {
                    self.client = Client::Modern;
                    self.probe_only = true;
                }
                _ if meta.is_some_and(is_modern) => self.client = Client::Modern,
                _ => {}
            },
            Client::Ready if method == "initialize" => self.client = Client::Opening,
            Client::Modern if method == "initialize" && self.probe_only => self.client = Client::Opening,
            Client::Modern if method != "server/discover" && meta.is_some_and(is_modern) => self.probe_only = false,
            _ => {}
        }
        if self.client == Client::Modern
            && let Some(meta) = meta
        {
            self.meta.clear();
            self.meta.push_str(meta.get());
        }
    }

    pub(super) fn open(&mut self, id: Id, method: &str, params: &Params<'_>, batch: Option<u64>) -> Box<Open> {
        let modern = self.client == Client::Modern;
        let once = params.request_state().is_some() || params.input_responses().is_some();
        let uri = || params.uri().and_then(text).unwrap_or_default();
        let mut listen = None;
        let class = match method {
            "initialize" if !modern => Class::Initialize,
            "server/discover" if modern => Class::Discover,
            "resources/read" | "prompts/get" | "tasks/get" | "tasks/list" | "tasks/result" => Class::Read { once },
            "completion/complete" => Class::Complete { once },
            "tools/call" => {
                let task = params.task().is_some();
                Class::Call { repeatable: !once && !task, task }
            }
            "subscriptions/listen" if modern => {
                listen = Some(Listen::asked(params.notifications()));
                Class::Listen
            }
            "ping" if !modern => Class::Ping,
            "logging/setLevel" if !modern => Class::SetLevel,
            "resources/subscribe" if !modern => Class::Subscribe(uri()),
            "resources/unsubscribe" if !modern => Class::Unsubscribe(uri()),
            _ => match (Kind::of(method), params.cursor()) {
                (Some(kind), None) => Class::List(kind),
                (Some(kind), Some(cursor)) => Class::Page(kind, text(cursor)),
                (None, _) => Class::Other,
            },
        };
        let name = matches!(class, Class::Call { .. }).then(|| params.name().and_then(text)).flatten();
        let token = params.meta().and_then(|meta| pick(meta, ["progressToken"])).and_then(|[token]| token);
        Box::new(Open {
            seq: self.seq(),
            id,
            what: name.unwrap_or_else(|| method.to_owned()),
            class,
            place: Place::Held,
            kept: None,
            taken: false,
            resent: 0,
            cancelled: false,
            waiting_since: None,
            token: token.and_then(|token| Id::parse(token.get())),
            progress: f64::NEG_INFINITY,
            batch,
            listen,
            deadline: None,
            asked: None,
            waited: answer_early::Waited::default(),
        })
    }

    /// Finds the place of a request by the state of the server.
    pub(super) fn place(&mut self, open: Box<Open>, line: Bytes, now: Instant) {
        match self.current {
            Current::Fresh(n) | Current::Serving(n) => match self.local_while_up(&open, n) {
                Some(result) => {
                    self.note_granted(&open, &line);
                    self.answer_for_child(&open, &result);
                }
                None if self.is_stalled(n) => self.refuse_full(&open, now),
                None => self.forward(open, line, n, now),
            },
            Current::None => self.hold(open, line, now),
            Current::Replaying(_) | Current::Down { .. } => self.place_while_down(open, line, now),
            Current::GivenUp { callable, .. } => self.place_while_given_up(open, line, callable, now),
        }
    }

    /// Answers for what a live child cannot, though the client was told that it can.
    fn local_while_up(&self, open: &Open, generation: u32) -> Option<String> {
        let modern = self.is_modern();
        let has = self.children.get(&generation)?.capabilities?;
        let told = self.told();
        match &open.class {
            Class::List(Kind::Tools) if !has.tools && self.settings.tools => Some(self.tools_list("", modern)),
            Class::List(kind) if !has.has(kind.family()) && told.has(kind.family()) => {
                Some(words::list_result(kind.member(), "", modern))
            }
            Class::Complete { .. } if !has.completions && told.completions => {
                Some(words::dress(json!({"completion": {"values": []}}), modern))
            }
            Class::SetLevel if !has.logging && told.logging => Some("{}".into()),
            Class::Subscribe(_) | Class::Unsubscribe(_) if !has.subscribe && told.subscribe => Some("{}".into()),
            _ => None,
        }
    }

    /// What the client was promised in its opening. In the stateless era each subscription says for itself.
    pub(super) fn told(&self) -> Capabilities {
        match &self.opening {
            Some(opening) => opening.told,
            None if self.is_modern() => match self.discovered_told {
                Some(told) => told,
                None if self.broken => Capabilities::ALL,
                None => Capabilities::default(),
            },
            None => Capabilities::default(),
        }
    }

    fn place_while_down(&mut self, open: Box<Open>, line: Bytes, now: Instant) {
        match &open.class {
            Class::Ping => self.answer_result(&open, "{}"),
            Class::Listen => self.listen_without_server(open, line),
            Class::Initialize if self.broken && !self.ever_ready => self.answer_without_server(open, now),
            _ => match self.remembered(&open) {
                Some(answer) => self.answer_remembered(&open, answer),
                None => self.hold(open, line, now),
            },
        }
    }

    pub(super) fn place_while_given_up(&mut self, open: Box<Open>, line: Bytes, callable: bool, now: Instant) {
        match &open.class {
            Class::Ping => self.answer_result(&open, "{}"),
            Class::Listen => self.listen_without_server(open, line),
            _ => match self.remembered(&open) {
                Some(answer) => self.answer_remembered(&open, answer),
                None if callable => {
                    // It left on purpose; whoever needs it calls it back.
                    self.current = Current::Down { at: now };
                    self.hold(open, line, now);
                    if self.wants_start() {
                        self.start(Role::Current);
                    }
                }
                // A restart that somebody asked for is about to start it.
                None if self.restart_will_start() => self.hold(open, line, now),
                None => self.answer_without_server(open, now),
            },
        }
    }

    /// The last good answer to this, if there is one: `None` means that it is worth waiting for a server.
    pub(super) fn remembered(&self, open: &Open) -> Option<Bytes> {
        let modern = self.is_modern();
        let result = match &open.class {
            Class::Discover => match &self.discovered {
                Some(discovered) => words::from_memory(discovered),
                None if self.broken => return Some(self.discover_locally(open)),
                None => return None,
            },
            Class::List(kind) => {
                let inside = match self.shown.get(kind) {
                    Some(shown) => shown.last_good()?.joined()?,
                    None if self.cached_list(*kind).is_some() => self.cached_list(*kind)?.joined()?,
                    // A broken start told the client of lists that hold nothing yet.
                    None if self.broken => String::new(),
                    None => return None,
                };
                match kind {
                    Kind::Tools => self.tools_list(&inside, modern),
                    _ => words::list_result(kind.member(), &inside, modern),
                }
            }
            _ => return None,
        };
        Some(message::result_line(&open.id, &result))
    }

    /// From here on the client holds the list that it is given.
    fn answer_remembered(&mut self, open: &Open, answer: Bytes) {
        if let Class::List(kind) = open.class {
            let items = match self.shown.get(&kind) {
                Some(shown) => shown.last_good(),
                None => self.cached_list(kind),
            };
            let items = items.cloned().unwrap_or_default();
            self.note_shown_locally(kind, items);
        }
        self.answer(open, answer);
    }

    /// What the client has set and every later child is to have set again.
    pub(super) fn note_granted(&mut self, open: &Open, line: &[u8]) {
        match &open.class {
            Class::SetLevel => self.level = Some(Bytes::copy_from_slice(line)),
            Class::Subscribe(uri) => drop(self.subscriptions.insert(uri.clone(), Bytes::copy_from_slice(line))),
            Class::Unsubscribe(uri) => drop(self.subscriptions.remove(uri)),
            _ => {}
        }
    }

    /// A live child cannot answer this, so we do.
    fn answer_for_child(&mut self, open: &Open, result: &str) {
        if let Class::List(kind) = open.class {
            self.note_shown_locally(kind, Items::default());
        }
        self.answer_result(open, result);
    }

    /// The child's tools, as the inside of a JSON array, and ours.
    pub(super) fn tools_list(&self, inside: &str, modern: bool) -> String {
        let ours = self.our_definitions();
        let comma = if inside.is_empty() || ours.is_empty() { "" } else { "," };
        words::list_result(Kind::Tools.member(), &format!("{inside}{comma}{ours}"), modern)
    }

    /// An answer for a request that no server will take in time.
    pub(super) fn answer_without_server(&mut self, open: Box<Open>, now: Instant) {
        if let Some(answer) = self.remembered(&open) {
            return self.answer_remembered(&open, answer);
        }
        if open.class == Class::Initialize
            && let Some((answer, version, told)) = self.initialize_from_cache(&open)
        {
            self.opened_by_us(&open, version, told, true);
            return self.answer(&open, answer);
        }
        let answer = match &open.class {
            Class::Initialize => Some(self.initialize_locally(&open)),
            Class::Discover => Some(self.discover_locally(&open)),
            Class::List(Kind::Tools) => {
                let result = self.tools_list("", self.is_modern());
                return self.answer_for_child(&open, &result);
            }
            Class::Ping => Some(message::result_line(&open.id, "{}")),
            Class::Page(..) => {
                let words = "this cursor was another server's; start again without a cursor";
                Some(message::error_line(&open.id.to_string(), -32602, words, None))
            }
            _ => None,
        };
        if open.class == Class::Initialize {
            self.opened_locally(&open);
        }
        match answer {
            Some(answer) => self.answer(&open, answer),
            None => {
                let failure = match self.current {
                    Current::GivenUp { .. } => self.failure(7003, "gave_up", &open, now),
                    _ => self.failure(7002, "server_down", &open, now),
                };
                self.fail(&open, &failure);
            }
        }
    }

    // ---- holding --------------------------------------------------------------------------------

    /// Keeps a request until a server serves.
    pub(super) fn hold(&mut self, mut open: Box<Open>, line: Bytes, now: Instant) {
        let limits = &self.settings.limits;
        open.place = Place::Held;
        let since = *open.waiting_since.get_or_insert(now);
        let is_opening = self.is_first_opening(&open);
        if matches!(self.current, Current::Down { .. }) && self.ends_before_ready > 0 {
            open.waited.met_end.get_or_insert(now);
        }
        if let Current::Down { at } = self.current
            && self.wants_start()
        {
            let wait = if is_opening { limits.opening_wait } else { limits.hold_max };
            if at > since + wait {
                if is_opening {
                    self.broken = true;
                }
                return self.answer_without_server(open, now);
            }
        }
        if !self.has_room(&line) {
            if open.class == Class::Ping {
                return self.answer_result(&open, "{}");
            }
            return self.refuse_full(&open, now);
        }
        let seq = open.seq;
        self.insert(open);
        self.hold_line(seq, &line, true);
    }

    /// Whether one more message can wait.
    pub(super) fn has_room(&self, line: &[u8]) -> bool {
        let limits = &self.settings.limits;
        self.held.len() < limits.held_max && self.held_bytes + line.len() <= limits.held_bytes_max
    }

    fn hold_line(&mut self, seq: u64, line: &[u8], is_request: bool) {
        self.held_bytes += line.len();
        self.held.insert(seq, Held { line: Bytes::copy_from_slice(line), is_request });
    }

    /// A message that is no request we keep track of.
    pub(super) fn pass_or_hold(&mut self, line: &Bytes, seq: Option<u64>, _now: Instant) {
        let seq = seq.unwrap_or_else(|| self.seq());
        match self.current {
            Current::Fresh(n) | Current::Serving(n) => self.tell_server(n, line.clone(), Some(seq)),
            Current::GivenUp { .. } => self.dropped.from_client += 1,
            _ if !self.has_room(line) => self.dropped.from_client += 1,
            _ => self.hold_line(seq, line, false),
        }
    }

    /// Lets everything go that waited, in client order.
    pub(super) fn release(&mut self, generation: u32, now: Instant) {
        for (seq, held) in mem::take(&mut self.held) {
            self.held_bytes -= held.line.len();
            if held.is_request {
                let open = self.close(seq);
                match self.local_while_up(&open, generation) {
                    Some(result) => {
                        self.note_granted(&open, &held.line);
                        self.answer_for_child(&open, &result);
                    }
                    None => self.forward(open, held.line, generation, now),
                }
            } else {
                self.tell_server(generation, held.line, Some(seq));
            }
        }
    }

    /// A request whose time is up.
    pub(super) fn waited_out(&mut self, seq: u64, now: Instant) {
        let Some(open) = self.opens.get(&seq) else { return };
        match open.place {
            Place::Held => {
                let open = self.close(seq);
                self.answer_without_server(open, now);
            }
            Place::Due => self.due_waited_out(seq),
            Place::Ours => self.restart_call_waited_out(seq),
            Place::On(_) | Place::Nowhere => self.listen_ended(seq),
        }
    }

    // ---- openings -------------------------------------------------------------------------------

    /// `initialize` after `server/discover`: the same child if it can still be initialised, else a fresh one.
    fn initialize_after_probe(&mut self, open: Box<Open>, line: &Bytes, now: Instant) {
        self.probe_only = false;
        self.meta.clear();
        self.forget_early();
        let locked = match (&self.current, self.probe) {
            (Current::Fresh(n), Probe::Unanswered | Probe::Locked) => Some(*n),
            // It has answered in the stateless era, or is being probed by us.
            (Current::Serving(n) | Current::Replaying(n), _) => Some(*n),
            _ => None,
        };
        // A probe that nobody answered: as a legacy server says.
        let probes: Vec<u64> =
            self.opens.values().filter(|open| open.class == Class::Discover).map(|open| open.seq).collect();
        for seq in probes {
            let probe = self.close(seq);
            if probe.cancelled {
                self.forget(&probe);
                continue;
            }
            let refusal = self.discover_locally(&probe);
            self.answer(&probe, refusal);
        }
        if let Some(candidate) = self.candidate.take() {
            self.stop(candidate, How::Stopped);
            self.restart_starts_over(candidate);
        }
        if let Some(generation) = locked {
            self.restart_starts_over(generation);
            self.start_over(generation, now);
        }
        self.place(open, line.clone(), now);
    }

    /// A child that does not serve yet is stopped, and the next one starts at once, or after its end where two cannot
    /// run. The client's opening waits for that one.
    pub(super) fn start_over(&mut self, generation: u32, now: Instant) {
        self.stop(generation, How::Stopped);
        self.current = Current::Down { at: now };
        for seq in self.open_on(generation) {
            let open = &self.opens[&seq];
            if matches!(open.class, Class::Initialize | Class::Discover)
                && !open.cancelled
                && let Some(kept) = open.kept.clone()
            {
                let mut open = self.close(seq);
                open.taken = true;
                if open.resent < self.settings.limits.resend_max {
                    open.resent += 1;
                    self.hold(open, kept, now);
                } else {
                    self.broken |= !self.ever_ready;
                    self.answer_without_server(open, now);
                }
            }
        }
        if let Some((seq, line)) = self.initialized.clone()
            && self.opening.is_none()
            && self.client == Client::Ready
        {
            self.pass_or_hold(&line, Some(seq), now);
        }
        if self.settings.reload == Reload::Replace {
            self.start_after = Some(generation);
        } else {
            self.start(Role::Current);
        }
    }

    /// Without a server, an `initialize` is answered so that our tools are there to mend it.
    fn initialize_locally(&self, open: &Open) -> Bytes {
        let version = self.version_asked(open);
        let restart = self.listed_name(Tool::Restart);
        let status = self.listed_name(Tool::Status);
        let name = &self.settings.name;
        let state = match &self.last_end {
            Some(end) => format!("is not running ({}).", end.how),
            None => "has not finished its start yet. What it offers is listed when it has.".into(),
        };
        let help = match (self.settings.tools, &self.last_end) {
            (true, Some(_)) => format!("`{status}` shows its stderr; mend it, then call `{restart}`."),
            (true, None) => format!("`{status}` shows its stderr."),
            (false, Some(_)) => "See its stderr in the log of outlast; mend it, then run `outlast restart`.".into(),
            (false, None) => "See its stderr in the log of outlast.".into(),
        };
        let result = json!({
            "protocolVersion": version,
            "capabilities": {
                "tools": {"listChanged": true},
                "prompts": {"listChanged": true},
                "resources": {"listChanged": true, "subscribe": true},
                "logging": {},
                "completions": {},
            },
            "serverInfo": words::server_info(),
            "instructions": format!("The server `{name}` {state} {help}"),
        });
        message::result_line(&open.id, &result.to_string())
    }

    fn version_asked(&self, open: &Open) -> String {
        let asked = open.kept.as_ref().and_then(|line| version_of(line));
        asked.filter(|version| LEGACY.contains(&version.as_str())).unwrap_or_else(|| "2025-11-25".into())
    }

    fn opened_locally(&mut self, open: &Open) {
        let version = self.version_asked(open);
        self.broken = true;
        self.opened_by_us(open, version, Capabilities::ALL, false);
        self.note("The handshake was answered without a server, so that it can be mended".into());
    }

    /// The client's handshake was answered by us; each child gets it as a replay.
    fn opened_by_us(&mut self, open: &Open, version: String, told: Capabilities, cached: bool) {
        let Some(line) = open.kept.clone() else { return };
        self.opened_anew();
        let spoken = version.clone();
        self.opening = Some(Opening { line, version, spoken, told, local: true, cached });
        // From now on it goes out in the replay.
        if let Some((seq, _)) = &self.initialized
            && let Some(held) = self.held.remove(seq)
        {
            self.held_bytes -= held.line.len();
        }
    }

    fn discover_locally(&self, open: &Open) -> Bytes {
        message::error_line(&open.id.to_string(), -32601, "Method not found", None)
    }

    /// The server did not come up: whoever waits with an opening is told what there is.
    pub(super) fn broken_at_start(&mut self, now: Instant) {
        if self.ever_ready {
            return;
        }
        self.broken = true;
        let seqs: Vec<u64> = self.held.iter().filter(|(_, held)| held.is_request).map(|(seq, _)| *seq).collect();
        for seq in seqs {
            let open = &self.opens[&seq];
            let is_opening = matches!(open.class, Class::Initialize | Class::Discover);
            let is_list = self.client != Client::Unopened && matches!(open.class, Class::List(_));
            if is_opening || is_list {
                let open = self.close(seq);
                self.answer_without_server(open, now);
            }
        }
    }

    // ---- notifications and answers ----------------------------------------------------------------

    pub(super) fn client_noted(
        &mut self,
        method: &str,
        params: &Params<'_>,
        line: &Bytes,
        seq: Option<u64>,
        now: Instant,
    ) {
        match method {
            "notifications/initialized" if self.client != Client::Modern => {
                let seq = seq.unwrap_or_else(|| self.seq());
                self.initialized = Some((seq, Bytes::copy_from_slice(line)));
                if self.client == Client::Opening {
                    self.client = Client::Ready;
                }
                match self.live() {
                    Some(generation) => {
                        if let Some(child) = self.children.get_mut(&generation) {
                            child.initialized = true;
                        }
                        self.tell_server(generation, line.clone(), None);
                    }
                    // Said before the answer to `initialize`, it goes out after that and not in a replay.
                    None if self.opening.is_none() => self.pass_or_hold(line, Some(seq), now),
                    None => {}
                }
            }
            "notifications/cancelled" => self.client_cancelled(params, line, now),
            "notifications/progress" => {
                let token = params.progress_token().and_then(|token| Id::parse(token.get()));
                let asked = self.asked.values().filter(|asked| token.is_some() && asked.token == token);
                match asked.map(|asked| asked.generation).max().or(self.live()) {
                    Some(generation) => self.tell_server(generation, line.clone(), None),
                    None => self.dropped.from_client += 1,
                }
            }
            "notifications/roots/list_changed" => match self.live() {
                Some(generation) => self.tell_server(generation, line.clone(), None),
                None => self.dropped.from_client += 1,
            },
            _ => self.pass_or_hold(line, seq, now),
        }
    }

    pub(super) fn client_cancelled(&mut self, params: &Params<'_>, line: &Bytes, now: Instant) {
        let id = params.request_id().and_then(|id| Id::parse(id.get()));
        let seq = id.and_then(|id| self.oldest(&id, |open| !open.cancelled && open.class != Class::Initialize));
        let Some(seq) = seq else {
            return match self.live() {
                Some(generation) => self.tell_server(generation, line.clone(), None),
                None => self.dropped.from_client += 1,
            };
        };
        let open = self.opens.get_mut(&seq).expect("found above");
        match open.place {
            Place::On(generation) => {
                let mut suspect = None;
                if open.class == Class::Listen {
                    let open = self.close(seq);
                    self.forget(&open);
                } else {
                    open.cancelled = true;
                    let (id, what) = (open.id.clone(), open.what.clone());
                    self.heartbeats.cancelled(seq);
                    self.call_timeout_ends(seq);
                    let open = self.opens.get_mut(&seq).expect("found above");
                    let (batch, is_probe) = (open.batch.take(), open.class == Class::Discover);
                    suspect = Some((id, what));
                    // The rest of its batch waits no longer for it.
                    if let Some(batch) = batch {
                        self.batch_answered(batch, None);
                    }
                    if is_probe {
                        self.handshake_is_over(generation);
                    }
                }
                self.tell_server(generation, line.clone(), None);
                if let Some((id, what)) = suspect {
                    self.suspect_after_cancel(generation, id, &what, now);
                }
                self.opening_may_be_over(generation, now);
                self.begin_queued(now);
            }
            Place::Held | Place::Due | Place::Ours | Place::Nowhere => {
                let open = self.close(seq);
                self.forget_ticket(seq);
                self.forget(&open);
            }
        }
    }

    pub(super) fn client_answered(&mut self, id: RawId<'_>, line: &Bytes) {
        let asked = id.parse().and_then(|id| self.asked.remove(&id));
        let Some(asked) = asked else {
            self.dropped.from_client += 1;
            return;
        };
        if self.children.get(&asked.generation).is_none_or(|child| child.stopping) {
            self.dropped.from_client += 1;
            return;
        }
        let place = id.place(line).expect("an id that was parsed stands in the line");
        let line = if line[place.clone()] == *asked.id.as_bytes() {
            line.clone()
        } else {
            message::splice(line, vec![message::Edit { at: place, with: asked.id }])
        };
        self.tell_server(asked.generation, line, None);
    }

    // ---- batches ------------------------------------------------------------------------------------

    pub(super) fn client_batched(&mut self, members: &[Raw<'_>], line: &Bytes, now: Instant) {
        let refuse = |words: &str| message::error_line("null", -32600, words, None);
        if self.opening.as_ref().is_none_or(|opening| opening.version != "2025-03-26") {
            return match self.live() {
                Some(generation) => self.tell_server(generation, line.clone(), None),
                None => self.dropped.from_client += 1,
            };
        }
        if members.is_empty() {
            return self.tell_client(refuse("a batch holds at least one message"));
        }
        if members.len() > self.settings.limits.batch_max {
            let words = format!("a batch holds at most {} messages", self.settings.limits.batch_max);
            return self.tell_client(refuse(&words));
        }
        let requests = members
            .iter()
            .filter(|member| match message::parse(member.get().as_bytes()) {
                Ok(Message::Request { id, .. }) => id.parse().is_some(),
                _ => false,
            })
            .count();
        let key = self.seq();
        if requests > 0 {
            // One more than there are, so that it leaves only when all have been taken.
            self.batches.insert(key, Batch { left: requests + 1, ..Batch::default() });
        }
        for member in members {
            if let Ok(Message::Request { id, method, .. }) = message::parse(member.get().as_bytes())
                && method == "initialize"
                && let Some(id) = id.parse()
            {
                let words = "`initialize` must not be part of a batch";
                self.batch_answered(key, Some(message::error_line(&id.to_string(), -32600, words, None)));
                continue;
            }
            self.client_said(line_of(*member), Some(key), now);
        }
        if requests > 0 {
            self.batch_answered(key, None);
        }
    }
}

fn line_of(member: Raw<'_>) -> Bytes {
    line(member.get().to_owned())
}

/// The protocol version that an `initialize` asks for.
pub(super) fn version_of(line: &[u8]) -> Option<String> {
    match message::parse(line).ok()? {
        Message::Request { params, .. } => params.protocol_version().and_then(text),
        _ => None,
    }
}

impl Capabilities {
    /// From the `capabilities` of a handshake or a discover result.
    pub(super) fn parse(raw: Option<Raw<'_>>) -> Capabilities {
        let names = ["tools", "prompts", "resources", "logging", "completions"];
        let Some(found) = raw.and_then(|raw| pick(raw, names)) else { return Capabilities::default() };
        let subscribe = found[2].and_then(|resources| pick(resources, ["subscribe"])).and_then(|[flag]| flag);
        let [tools, prompts, resources, logging, completions] = found.map(|found| found.is_some());
        Capabilities {
            tools,
            prompts,
            resources,
            subscribe: subscribe.is_some_and(|flag| flag.get() == "true"),
            logging,
            completions,
        }
    }
}

/// `_meta` of a modern request, for a request of our own: nobody waits for its progress or its log.
pub(super) fn own_meta(meta: &str) -> String {
    let mut kept = Vec::new();
    Raw::parse(meta).and_then(|meta| {
        meta.for_each_member(|name, value| {
            if !matches!(name.text().as_deref(), Some("progressToken" | "io.modelcontextprotocol/logLevel")) {
                kept.push(format!("{}:{}", name.get(), value.get()));
            }
        })
    });
    format!("{{{}}}", kept.join(","))
}

/// The protocol version that a modern `_meta` speaks.
pub(super) fn modern_version(meta: &str) -> Option<String> {
    pick_text(Raw::parse(meta)?, PROTOCOL_VERSION)
}
