//! What a child says, by the role it has, and the handshake that each new one gets.

use super::{
    client::{LEGACY, modern_version, own_meta},
    lists::Page,
    *,
};
use crate::message::{
    BYTE_ORDER_MARK, Edit, Params, Raw, RawId, VERSIONS_MAX, line, pick, pick_text, quote, splice, text,
};

impl Relay {
    pub(super) fn server_said(&mut self, generation: u32, line: Bytes, now: Instant) {
        if self.is_stopping(generation) && !(self.is_leaving() && self.role(generation).speaks()) {
            // Past its time. While outlast is leaving, a child that is being stopped may still finish its answers.
            self.dropped.from_server += 1;
            return;
        }
        let line = if line.starts_with(BYTE_ORDER_MARK) { line.slice(BYTE_ORDER_MARK.len()..) } else { line };
        if let Some(child) = self.children.get_mut(&generation) {
            child.heard = Some(now);
        }
        let parsed = match message::parse(&line) {
            Ok(parsed) => parsed,
            Err(unreadable) => {
                if let Some(instead) = unreadable.instead_of_response() {
                    self.server_said(generation, instead, now);
                }
                return self.divert(generation, line, false);
            }
        };
        match parsed {
            Message::Request { params, .. } | Message::Notification { params, .. } if !params.has_version() => {
                self.divert(generation, line.clone(), true);
            }
            Message::Response { id, result, error } => self.server_answered(generation, id, result, error, &line, now),
            Message::Request { id, method, params } => self.server_asked(generation, id, &method, &params, &line, now),
            Message::Notification { method, params } => {
                self.server_noted(generation, &method, &params, line.clone(), now);
            }
            Message::Batch(members) if !members.iter().any(|member| message::is_json_rpc(member.get().as_bytes())) => {
                self.divert(generation, line.clone(), true);
            }
            Message::Batch(members) => {
                if self.opening.as_ref().is_some_and(|opening| opening.spoken == "2025-03-26") {
                    for member in members {
                        if member.get().starts_with('[') {
                            // A batch within a batch is none.
                            self.dropped.from_server += 1;
                            continue;
                        }
                        self.server_said(generation, message::line(member.get().to_owned()), now);
                    }
                } else if self.role(generation) == ServerRole::Serving {
                    self.tell_client(line.clone());
                } else {
                    self.dropped.from_server += 1;
                }
            }
            Message::Other => self.divert(generation, line.clone(), true),
        }
    }

    /// A line that is no message: for people, and counted (C3). An empty line is only dropped.
    fn divert(&mut self, generation: u32, line: Bytes, is_json: bool) {
        self.dropped.from_server += 1;
        self.dropped.not_json += u64::from(!line.trim_ascii().is_empty());
        self.act(Action::Divert { generation, line, is_json });
    }

    fn role(&self, generation: u32) -> ServerRole {
        if self.live() == Some(generation) {
            ServerRole::Serving
        } else if self.draining.iter().any(|draining| draining.generation == generation) {
            ServerRole::Draining
        } else if self.candidate == Some(generation) || self.current == Current::Replaying(generation) {
            ServerRole::Waiting
        } else {
            ServerRole::Retired
        }
    }

    // ---- answers ------------------------------------------------------------------------------------

    fn server_answered(
        &mut self,
        generation: u32,
        id: RawId<'_>,
        result: Option<Raw<'_>>,
        error: Option<Raw<'_>>,
        line: &Bytes,
        now: Instant,
    ) {
        let role = self.role(generation);
        let Some(id) = id.parse() else {
            // `null`, or an id nobody can keep track of.
            match role {
                _ if !message::has_version(line) => self.divert(generation, line.clone(), true),
                ServerRole::Serving => self.tell_client(line.clone()),
                _ => self.dropped.from_server += 1,
            }
            return;
        };
        if let Some(child) = self.children.get_mut(&generation) {
            child.answered = Some(now);
            child.hung = None;
            if !child.private.is_empty()
                && let Some(private) = child.private.remove(&id)
            {
                return self.private_answered(generation, private, result, error, now);
            }
        }
        if self.is_suspected() {
            self.suspect_answered(generation, &id, now);
        }
        let seq = match role {
            ServerRole::Retired => None,
            // One whose handshake was answered early may have been asked more before that.
            _ => self.oldest(&id, |open| open.place == Place::On(generation) || self.is_due_of(generation, open)),
        };
        let Some(seq) = seq else {
            match message::has_version(line) {
                true => self.dropped.from_server += 1,
                false => self.divert(generation, line.clone(), true),
            }
            return;
        };
        if self.opens[&seq].class == Class::Listen {
            return self.listen_answered(seq, error.is_some(), line.clone(), now);
        }
        let open = self.close(seq);
        self.pace.note(open.asked.unwrap_or(now), now);
        if self.calls_own_restart(&open) {
            self.own_restart_answered(generation, now);
        }
        let ours_before = matches!(open.class, Class::Page(Kind::Tools, _)).then(|| self.our_names());
        let line = self.edited(generation, &open, result, error, line);
        self.answer(&open, line);
        if ours_before.is_some_and(|before| before != self.our_names()) {
            // A later page took one of our names: the client holds ours under the old one.
            self.announce(Family::Tools);
        }
        if let Class::List(kind) | Class::Page(kind, _) = open.class {
            self.compare_late(generation, kind, now);
        }
        if self.current == Current::Fresh(generation) {
            let serves = match open.class {
                Class::Initialize => result.is_some(),
                Class::Discover => self.client == Client::Modern && result.is_some(),
                _ => self.client == Client::Modern && !self.probe_only,
            };
            if serves {
                self.modern_served = self.client == Client::Modern;
                self.current = Current::Serving(generation);
                // Whatever went wrong before, this client was told nothing of it.
                self.broken = false;
                self.ready(generation, now);
                self.served(generation, now);
                self.compare(generation, now);
                self.restart_is_ready(generation, now);
            } else {
                self.opening_may_be_over(generation, now);
            }
        } else if let (Class::Initialize, Current::Serving(serving)) = (&open.class, &self.current) {
            // A second opening may tell of lists that the first one did not.
            self.compare(*serving, now);
        }
        if role == ServerRole::Draining {
            self.drained(generation);
            self.begin_queued(now);
        }
    }

    /// What the relay learns from an answer, and the few edits it makes.
    fn edited(
        &mut self,
        generation: u32,
        open: &Open,
        result: Option<Raw<'_>>,
        error: Option<Raw<'_>>,
        line: &Bytes,
    ) -> Bytes {
        match (&open.class, result) {
            (Class::Initialize, Some(result)) => self.initialize_answered(generation, open, result, line),
            (Class::Initialize, None) => {
                self.opening_failed();
                self.handshake_is_over(generation);
                line.clone()
            }
            (Class::Discover, Some(result)) => {
                self.probe = Probe::Locked;
                self.handshake_is_over(generation);
                self.discover_answered(generation, result, line)
            }
            (Class::Discover, None) => {
                let modern = matches!(error.and_then(code), Some(-32022..=-32020));
                self.probe = if modern { Probe::Locked } else { Probe::Harmless };
                self.handshake_is_over(generation);
                line.clone()
            }
            (Class::List(kind), Some(result)) => self.list_answered(generation, *kind, None, result, line),
            (Class::Page(kind, cursor), Some(result)) => {
                self.list_answered(generation, *kind, cursor.as_deref().or(Some("")), result, line)
            }
            (Class::List(Kind::Tools), None) if self.settings.tools && error.and_then(code) == Some(-32601) => {
                self.note_shown_locally(Kind::Tools, Items::default());
                message::result_line(&open.id, &self.tools_list("", self.is_modern()))
            }
            (Class::SetLevel | Class::Subscribe(_) | Class::Unsubscribe(_), Some(_)) => {
                if open.kept.is_some() || matches!(open.class, Class::Unsubscribe(_)) {
                    self.note_granted(open, open.kept.as_deref().unwrap_or_default());
                }
                line.clone()
            }
            _ => line.clone(),
        }
    }

    /// An `initialize` came to nothing: the client stands where it stood before.
    pub(super) fn opening_failed(&mut self) {
        let another = self.opens.values().any(|open| open.class == Class::Initialize);
        if matches!(self.client, Client::Opening | Client::Ready) && !another {
            self.client = if self.opening.is_some() { Client::Ready } else { Client::Unopened };
        }
    }

    /// Whatever the client said after an earlier opening, it has not said after this one.
    pub(super) fn opened_anew(&mut self) {
        if self.client == Client::Opening {
            self.initialized = None;
        }
    }

    /// Whether the client's own words are a handshake that this child has yet to answer.
    pub(super) fn is_being_opened(&self, generation: u32) -> bool {
        self.opens.values().filter(|open| open.place == Place::On(generation) && !open.cancelled).any(|open| match open
            .class
        {
            Class::Initialize | Class::Discover => true,
            Class::Listen => false,
            _ => self.client == Client::Modern && !self.probe_only,
        })
    }

    /// Nobody opens this child any more: whoever waits for a restart waits for the client no longer.
    pub(super) fn opening_may_be_over(&mut self, generation: u32, now: Instant) {
        if self.current == Current::Fresh(generation) && !self.is_being_opened(generation) {
            self.restart_is_done_if(generation, now);
            self.begin_queued(now);
        }
    }

    /// Nobody waits for this child's handshake any more.
    pub(super) fn handshake_is_over(&mut self, generation: u32) {
        if let Some(child) = self.children.get_mut(&generation) {
            child.handshake_by = None;
        }
    }

    fn initialize_answered(&mut self, generation: u32, open: &Open, result: Raw<'_>, line: &Bytes) -> Bytes {
        let [version, capabilities] = pick(result, ["protocolVersion", "capabilities"]).unwrap_or_default();
        let has = Capabilities::parse(capabilities);
        let told = Capabilities { tools: has.tools || self.settings.tools, ..has };
        if let Some(child) = self.children.get_mut(&generation) {
            child.capabilities = Some(has);
            child.handshake_by = None;
        }
        self.opened_anew();
        let opening = open.kept.clone().expect("an initialize is always kept");
        let version = version.and_then(text).unwrap_or_default();
        let spoken = version.clone();
        self.opening = Some(Opening { line: opening, version, spoken, told, local: false, cached: false });
        self.remember_opening(result);
        self.promise(result, capabilities, line)
    }

    fn discover_answered(&mut self, generation: u32, result: Raw<'_>, line: &Bytes) -> Bytes {
        let [capabilities] = pick(result, ["capabilities"]).unwrap_or_default();
        let has = Capabilities::parse(capabilities);
        if let Some(child) = self.children.get_mut(&generation) {
            child.capabilities = Some(has);
        }
        self.discovered_told = Some(Capabilities { tools: has.tools || self.settings.tools, ..has });
        self.remember_opening(result);
        let edited = self.promise(result, capabilities, line);
        if let Ok(Message::Response { result: Some(result), .. }) = message::parse(&edited)
            && result.get().len() <= self.settings.limits.list_bytes_max
        {
            self.discovered = Some(result.get().to_owned());
        }
        edited
    }

    /// The result of an opening, promising what we see to: changed lists are announced, our tools are there.
    pub(super) fn promise(&self, result: Raw<'_>, capabilities: Option<Raw<'_>>, line: &Bytes) -> Bytes {
        let mut edits = Vec::new();
        match capabilities.and_then(|raw| Some((raw, pick(raw, Family::ALL.map(Family::name))?))) {
            Some((raw, families)) => {
                edits.extend(
                    families.into_iter().flatten().filter_map(|family| Edit::set(line, family, "listChanged", "true")),
                );
                if families[0].is_none() && self.settings.tools {
                    edits.push(Edit::append(line, raw, r#""tools":{"listChanged":true}"#));
                }
            }
            None if self.settings.tools => {
                edits.extend(Edit::set(line, result, "capabilities", r#"{"tools":{"listChanged":true}}"#));
            }
            None => {}
        }
        edits.extend(self.shorter_ttl(result, line));
        splice(line, edits)
    }

    /// A client cannot know of a restart, so it must not cache for long what a restart can change.
    fn shorter_ttl(&self, result: Raw<'_>, line: &Bytes) -> Option<Edit> {
        if !self.is_modern() {
            return None;
        }
        let ttl = pick(result, ["ttlMs"])?[0]?;
        let ttl_max = u64::try_from(self.settings.limits.ttl_max.as_millis()).unwrap_or(u64::MAX);
        let is_longer = ttl.get().parse::<f64>().is_ok_and(|ttl| ttl > ttl_max as f64);
        is_longer.then(|| Edit::replace(line, ttl, ttl_max.to_string()))
    }

    /// A page of a list on its way to the client: noted as shown, ours added to the first page of tools.
    fn list_answered(
        &mut self,
        generation: u32,
        kind: Kind,
        cursor: Option<&str>,
        result: Raw<'_>,
        line: &Bytes,
    ) -> Bytes {
        let Some(page) = Page::parse(kind, result) else { return line.clone() };
        self.note_shown(generation, kind, cursor, &page);
        let mut edits = Vec::new();
        if kind == Kind::Tools && cursor.is_none() {
            let ours = self.our_definitions();
            if !ours.is_empty() {
                edits.push(Edit::append(line, page.array, &ours));
            }
            edits.extend(self.shorter_ttl(result, line));
        }
        if edits.is_empty() { line.clone() } else { splice(line, edits) }
    }

    // ---- requests -------------------------------------------------------------------------------------

    fn server_asked(
        &mut self,
        generation: u32,
        id: RawId<'_>,
        method: &str,
        params: &Params<'_>,
        line: &Bytes,
        now: Instant,
    ) {
        let role = self.role(generation);
        if self.is_modern() || role == ServerRole::Retired {
            self.dropped.from_server += 1;
            return;
        }
        let (Some(own), Some(place)) = (id.parse(), id.place(line)) else {
            match role {
                ServerRole::Serving => self.tell_client(line.clone()),
                _ => self.dropped.from_server += 1,
            }
            return;
        };
        if method == "ping" && role != ServerRole::Serving {
            return self.tell_server(generation, message::result_line(&own, "{}"), None);
        }
        if role == ServerRole::Waiting {
            let early_max = self.settings.limits.early_max;
            let child = self.children.get_mut(&generation).expect("a child with a role");
            if child.early.len() < early_max {
                child.early.push(Bytes::copy_from_slice(line));
            } else {
                let why = format!("sent more than {early_max} requests before it was ready");
                self.handshake_failed(generation, How::HandshakeRefused(why), now);
            }
            return;
        }
        let known = if generation == 1 { own.clone() } else { self.private_id() };
        let token = params.meta().and_then(|meta| pick(meta, ["progressToken"])).and_then(|[token]| token);
        let asked =
            Asked { generation, id: id_text(line, &place), own, token: token.and_then(|token| Id::parse(token.get())) };
        let line = if generation == 1 {
            line.clone()
        } else {
            splice(line, vec![Edit { at: place, with: known.to_string() }])
        };
        self.asked.insert(known, asked);
        self.tell_client(line);
    }

    /// Requests the child made before it served.
    fn early_requests(&mut self, generation: u32, now: Instant) {
        let early = self.children.get_mut(&generation).map(|child| mem::take(&mut child.early));
        for line in early.unwrap_or_default() {
            self.server_said(generation, line, now);
        }
    }

    /// Requests of a generation that will not hear their answers.
    pub(super) fn cancel_asked(&mut self, generation: u32) {
        let mut ids: Vec<Id> =
            self.asked.iter().filter(|(_, asked)| asked.generation == generation).map(|(id, _)| id.clone()).collect();
        ids.sort();
        for id in ids {
            self.asked.remove(&id);
            self.tell_client(line(format!(
                r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id},"reason":"the server ended"}}}}"#
            )));
        }
    }

    // ---- notifications ----------------------------------------------------------------------------------

    fn server_noted(&mut self, generation: u32, method: &str, params: &Params<'_>, line: Bytes, now: Instant) {
        let role = self.role(generation);
        let passes = match (method, role) {
            (_, ServerRole::Retired) => false,
            ("notifications/cancelled", _) => return self.server_cancelled(generation, role, params, line, now),
            ("notifications/subscriptions/acknowledged", _) => {
                return self.acknowledged(generation, role == ServerRole::Serving, params, line);
            }
            ("notifications/progress", _) => self.progress_passes(generation, role, params, now),
            (_, ServerRole::Waiting) => false,
            ("notifications/resources/updated", ServerRole::Draining) => false,
            _ => match (Family::of(method), role) {
                (Some(_), ServerRole::Draining) => false,
                (Some(family), _) => self.list_changed_passes(generation, family),
                (None, _) => true,
            },
        };
        if passes {
            self.tell_client(line);
        } else {
            self.dropped.from_server += 1;
        }
    }

    fn progress_passes(&mut self, generation: u32, role: ServerRole, params: &Params<'_>, now: Instant) -> bool {
        let token = params.progress_token().and_then(|token| Id::parse(token.get()));
        let seq = token.and_then(|token| self.tokens.get(&token).copied());
        let told = seq.and_then(|seq| self.heartbeat_value(seq));
        let Some((seq, open)) = seq.and_then(|seq| Some((seq, self.opens.get(&seq)?))) else {
            return role == ServerRole::Serving;
        };
        if open.place != Place::On(generation) && !self.is_due_of(generation, open) {
            return false;
        }
        self.call_progresses(seq, now);
        let Some(open) = self.opens.get_mut(&seq) else { return false };
        let value = params.progress().and_then(|value| value.get().parse::<f64>().ok());
        match value {
            // Progress must rise, and the first child may have come further.
            Some(value) if (open.resent > 0 || open.class == Class::Listen) && value <= open.progress => false,
            // The same below what outlast has told in its own name.
            Some(value) if told.is_some_and(|told| value <= told) => false,
            Some(value) => {
                open.progress = open.progress.max(value);
                let seq = open.seq;
                self.heartbeat_ends(seq);
                true
            }
            None => true,
        }
    }

    fn server_cancelled(&mut self, generation: u32, role: ServerRole, params: &Params<'_>, line: Bytes, now: Instant) {
        let Some(raw) = params.request_id() else {
            self.dropped.from_server += 1;
            return;
        };
        let id = Id::parse(raw.get());
        if self.is_modern() {
            let seq = id.and_then(|id| self.oldest(&id, |open| open.class == Class::Listen));
            return match seq {
                Some(seq) if self.opens[&seq].place == Place::On(generation) => {
                    self.listen_torn_down(seq, line, now);
                }
                _ if role == ServerRole::Serving => self.tell_client(line),
                _ => self.dropped.from_server += 1,
            };
        }
        if role == ServerRole::Waiting {
            let child = self.children.get_mut(&generation).expect("a child with a role");
            child.early.retain(|early| match message::parse(early) {
                Ok(Message::Request { id: early, .. }) => early.parse() != id,
                _ => true,
            });
            return;
        }
        let known = self
            .asked
            .iter()
            .find(|(_, asked)| asked.generation == generation && Some(&asked.own) == id.as_ref())
            .map(|(known, _)| known.clone());
        match known {
            Some(known) => {
                self.asked.remove(&known);
                let line = if Some(&known) == id.as_ref() {
                    line
                } else {
                    splice(&line, vec![Edit::replace(&line, raw, known.to_string())])
                };
                self.tell_client(line);
            }
            None if role == ServerRole::Serving && generation == 1 => self.tell_client(line),
            None => self.dropped.from_server += 1,
        }
    }

    // ---- the handshake of a new child -------------------------------------------------------------------

    pub(super) fn server_started(&mut self, generation: u32, pid: u32, unix: f64, now: Instant) {
        let role = self.starting.take().unwrap_or(Role::Current);
        // With a build it is the build that loads the files.
        if self.settings.build {
            self.habits.disturbed(now);
        } else {
            self.habits.loaded(now);
        }
        self.children.insert(
            generation,
            Child {
                pid,
                started: now,
                started_unix: unix,
                ready: None,
                capabilities: None,
                private: HashMap::new(),
                early: Vec::new(),
                stderr: Tail::default(),
                handshake_by: None,
                handshake_max: self.settings.limits.handshake_max,
                initialized: false,
                fetches: BTreeMap::new(),
                stopping: false,
                backlog: None,
                is_stdin_closed: false,
                hung: None,
                heard: None,
                answered: None,
            },
        );
        self.record(Record {
            pid: Some(pid),
            generation: Some(generation.into()),
            restarts: Some(self.replaced + u32::from(generation > 1)),
            ..Record::new(record::Event::ServerStarted)
        });
        if self.is_leaving() {
            return self.stop(generation, How::Stopped);
        }
        if role == Role::Candidate && matches!(self.current, Current::Serving(_)) {
            self.candidate = Some(generation);
            self.restart_has_child(generation);
            return self.replay(generation, self.settings.limits.handshake_max, now);
        }
        self.restarts.child_started(now);
        if generation > 1 {
            self.replaced += 1;
        }
        let opened = self.opening.is_some() && self.client != Client::Modern;
        let modern = self.modern_served || (self.broken && !self.probe_only) || self.is_told_modern();
        if opened || (self.client == Client::Modern && modern) {
            self.current = Current::Replaying(generation);
            self.restart_has_child(generation);
            self.replay(generation, self.settings.limits.handshake_max, now);
        } else {
            self.current = Current::Fresh(generation);
            self.reopen_listens(generation);
            self.release(generation, now);
            self.restart_has_child(generation);
            if !self.is_being_opened(generation) {
                // It is as good as it gets until the client opens the conversation.
                self.restart_is_done_if(generation, now);
            }
        }
        self.begin_queued(now);
    }

    /// Our private handshake.
    pub(super) fn replay(&mut self, generation: u32, max: Duration, now: Instant) {
        let id = self.private_id();
        let line = if self.client == Client::Modern {
            let meta = own_meta(&self.meta);
            line(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"server/discover","params":{{"_meta":{meta}}}}}"#))
        } else {
            let opening = self.opening.as_ref().expect("only an opened client is replayed");
            let line = with_id(&opening.line, &id);
            // A server that has learned a newer revision since is asked for the one that the client was told.
            if opening.cached { with_version(&line, &opening.version) } else { line }
        };
        let child = self.children.get_mut(&generation).expect("just started");
        child.handshake_max = max;
        child.handshake_by = Some(now + max);
        child.private.insert(id, Private::Handshake);
        self.tell_server(generation, line, None);
    }

    fn private_answered(
        &mut self,
        generation: u32,
        private: Private,
        result: Option<Raw<'_>>,
        error: Option<Raw<'_>>,
        now: Instant,
    ) {
        match private {
            Private::Handshake => {
                let checked = match (result, self.client == Client::Modern) {
                    (Some(result), false) => self.check_initialize(result),
                    (Some(result), true) => self.check_discover(result),
                    (None, modern) => Err(refusal(error, modern)),
                };
                match checked {
                    Ok(capabilities) => {
                        result.into_iter().for_each(|result| self.remember_opening(result));
                        self.handshake_done(generation, capabilities, now);
                    }
                    Err(why) => self.handshake_refused(generation, How::HandshakeRefused(why), now),
                }
            }
            Private::Restore(what) => {
                if let Some(error) = error {
                    self.odd(format!("The new server refused to restore {what}: {}", said(error)));
                }
            }
            Private::Fetch(kind) => self.fetched(generation, kind, result, now),
            Private::Answered | Private::LateFetch => {}
            Private::RestartPing => self.own_restart_pinged_back(generation),
            Private::HangPing => self.suspicion_ends(generation, now),
        }
    }

    fn check_initialize(&mut self, result: Raw<'_>) -> Result<Capabilities, String> {
        let [version, capabilities] = pick(result, ["protocolVersion", "capabilities"]).unwrap_or_default();
        let speaks = version.and_then(text).unwrap_or_default();
        let opening = self.opening.as_mut().expect("replayed");
        if speaks != opening.version {
            // Revisions are dates, so the older one is the smaller text.
            if opening.local && speaks < opening.version && LEGACY.contains(&speaks.as_str()) {
                let told = &opening.version;
                let text = format!("The server speaks {speaks}; the client was told {told}: reconnect the client");
                opening.spoken = speaks;
                self.note(text);
            } else {
                return Err(format!("speaks {speaks}, the client was promised {}: {RECONNECT}", opening.version));
            }
        } else {
            opening.spoken = speaks;
        }
        Ok(Capabilities::parse(capabilities))
    }

    fn check_discover(&self, result: Raw<'_>) -> Result<Capabilities, String> {
        let [versions, capabilities] = pick(result, ["supportedVersions", "capabilities"]).unwrap_or_default();
        let versions: Vec<String> = versions
            .and_then(|list| list.first_elements(VERSIONS_MAX))
            .unwrap_or_default()
            .0
            .into_iter()
            .filter_map(text)
            .collect();
        let version = modern_version(&self.meta).unwrap_or_default();
        if versions.contains(&version) {
            Ok(Capabilities::parse(capabilities))
        } else {
            Err(format!("speaks {}, the client speaks {version}: {RECONNECT}", versions.join(", ")))
        }
    }

    fn handshake_done(&mut self, generation: u32, capabilities: Capabilities, now: Instant) {
        let child = self.children.get_mut(&generation).expect("it just spoke");
        child.capabilities = Some(capabilities);
        child.handshake_by = None;
        if self.client != Client::Modern {
            if let Some((_, initialized)) = self.initialized.clone()
                && let Some(child) = self.children.get_mut(&generation)
                && !mem::replace(&mut child.initialized, true)
            {
                self.tell_server(generation, initialized, None);
            }
            if capabilities.logging
                && let Some(level) = self.level.clone()
            {
                self.restore(generation, &level, "the log level");
            }
            if capabilities.subscribe {
                for subscription in self.subscriptions.values().cloned().collect::<Vec<_>>() {
                    self.restore(generation, &subscription, "a subscription");
                }
            }
            self.note_capabilities(capabilities);
        }
        if self.candidate == Some(generation) {
            self.take_over(generation, now);
        } else {
            self.current = Current::Serving(generation);
        }
        self.modern_served |= self.client == Client::Modern;
        self.ready(generation, now);
        self.early_requests(generation, now);
        self.reopen_listens(generation);
        self.served(generation, now);
        self.release(generation, now);
        self.compare(generation, now);
        if self.children.get(&generation).is_some_and(|child| !child.private.is_empty()) {
            self.quiet_begins(generation, now);
        }
        self.restart_is_ready(generation, now);
    }

    /// A client cannot be told of new capabilities once it is open; people and agents can.
    fn note_capabilities(&mut self, has: Capabilities) {
        let told = self.told();
        for family in [Family::Prompts, Family::Resources] {
            if has.has(family) && !told.has(family) {
                let name = family.name();
                self.note(format!(
                    "The new server has {name}, which the client was not told of: reconnect it to see them"
                ));
            }
        }
    }

    fn restore(&mut self, generation: u32, line: &Bytes, what: &'static str) {
        let id = self.private_id();
        let line = with_id(line, &id);
        self.children.get_mut(&generation).expect("ready").private.insert(id, Private::Restore(what));
        self.tell_server(generation, line, None);
    }

    fn ready(&mut self, generation: u32, now: Instant) {
        self.ever_ready = true;
        self.ends_before_ready = 0;
        self.restarts.child_ready(now);
        self.habits.disturbed(now);
        self.handshake_is_over(generation);
        self.children.get_mut(&generation).expect("it just spoke").ready = Some(now);
        self.act(Action::MarkReady(generation));
    }

    /// Somebody serves again: a call that made the last one exit for this has its answer.
    fn served(&mut self, generation: u32, now: Instant) {
        let due: Vec<u64> = self.bounded.iter().copied().filter(|seq| self.opens[seq].place == Place::Due).collect();
        for seq in due {
            self.due_is_back(seq, generation);
        }
        self.begin_queued(now);
    }

    pub(super) fn handshake_late(&mut self, generation: u32, now: Instant) {
        let Some(limit) = self.children.get(&generation).map(|child| child.handshake_max) else { return };
        self.handshake_failed(generation, How::HandshakeLate(limit), now);
    }

    fn handshake_refused(&mut self, generation: u32, how: How, now: Instant) {
        if !self.ever_ready {
            self.refused_after_cache();
        }
        self.handshake_failed(generation, how, now);
    }

    /// It is stopped, and its end decides what comes next; a candidate's failure is known at once.
    fn handshake_failed(&mut self, generation: u32, how: How, now: Instant) {
        self.stop(generation, how.clone());
        if self.current == Current::Fresh(generation) {
            // What comes now would be lost on it.
            self.current = Current::Replaying(generation);
        }
        if self.candidate == Some(generation) {
            self.candidate = None;
            self.restart_failed(&how, Some(generation), now);
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ServerRole {
    /// Fresh too: everything passes.
    Serving,
    Draining,
    /// A candidate, or a current child whose private handshake runs.
    Waiting,
    Retired,
}

impl ServerRole {
    fn speaks(self) -> bool {
        matches!(self, ServerRole::Serving | ServerRole::Draining)
    }
}

/// What helps when the new server and the client have no protocol version in common.
const RECONNECT: &str = "reconnect the client to use the new server";

fn id_text(line: &Bytes, place: &std::ops::Range<usize>) -> String {
    String::from_utf8_lossy(&line[place.clone()]).into_owned()
}

/// The client's bytes under another id.
pub(super) fn with_id(line: &Bytes, id: &Id) -> Bytes {
    match message::parse(line) {
        Ok(Message::Request { id: old, .. }) => {
            let at = old.place(line).expect("a request has an id");
            splice(line, vec![Edit { at, with: id.to_string() }])
        }
        _ => line.clone(),
    }
}

/// An `initialize` that asks for another protocol version.
fn with_version(line: &Bytes, version: &str) -> Bytes {
    match message::parse(line) {
        Ok(Message::Request { params, .. }) => match params.protocol_version() {
            Some(asked) => splice(line, vec![Edit::replace(line, asked, quote(version))]),
            None => line.clone(),
        },
        _ => line.clone(),
    }
}

fn code(error: Raw<'_>) -> Option<i64> {
    pick(error, ["code"])?[0]?.get().parse().ok()
}

fn said(error: Raw<'_>) -> String {
    pick_text(error, "message").unwrap_or_else(|| quote(error.get()))
}

fn refusal(error: Option<Raw<'_>>, modern: bool) -> String {
    let Some(error) = error else { return "answered neither result nor error".into() };
    let said = said(error);
    match (modern, code(error)) {
        (true, Some(-32022)) => format!("speaks another version ({said}): {RECONNECT}"),
        (true, _) => format!("refused `server/discover`, so it does not speak the client's era: {said}"),
        (false, _) => format!("refused the handshake: {said}"),
    }
}
