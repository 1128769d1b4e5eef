//! The client's opening (`initialize`, `server/discover`): its answer on the way to the client, and what happens when no
//! server answers it. Answers from the cache are in `answer_early`.

use std::time::Instant;

use bytes::Bytes;
use serde_json::json;

use super::{
    Relay,
    conversation::{AnsweredBy, Opening, Probe, version_of},
    messages,
    messages::Tool,
    requests::{Class, OpenRequest},
    servers::{Current, Purpose},
    settings::Reload,
};
use crate::{
    capabilities::Capabilities,
    exit::How,
    mcp::{Family, revision},
    message,
    message::{Edit, Message, Raw, pick, splice, text},
    record::millis,
};

impl Relay {
    /// `initialize` after `server/discover`: the same child if it can still be initialised, else a fresh one.
    pub(super) fn initialize_after_probe(&mut self, open: Box<OpenRequest>, line: &Bytes, probe: Probe, now: Instant) {
        self.forget_early();
        let locked = match (self.servers.slot.current(), probe) {
            (Current::Fresh(n), Probe::Unanswered | Probe::Locked) => Some(*n),
            // It has answered in the stateless era, or is being probed by us.
            (Current::Serving(n) | Current::Replaying(n), _) => Some(*n),
            _ => None,
        };
        // An unanswered probe gets the answer of a server with a handshake.
        let probes: Vec<u64> =
            self.requests.iter().filter(|open| open.class == Class::Discover).map(|open| open.seq()).collect();
        for seq in probes {
            let probe = self.close(seq);
            if probe.cancelled {
                self.forget(&probe);
                continue;
            }
            let refusal = self.discover_locally(&probe);
            self.answer(&probe, refusal);
        }
        if let Some(candidate) = self.servers.slot.take_candidate() {
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
        self.servers.slot.go_down(now);
        for seq in self.requests.on(generation) {
            let open = &self.requests[seq];
            if open.is_opening()
                && !open.cancelled
                && let Some(kept) = open.kept().cloned()
            {
                let mut open = self.close(seq);
                open.taken = true;
                if open.resent < self.settings.limits.holding.resend_max {
                    open.resent += 1;
                    self.hold(open, kept, now);
                } else {
                    self.opening_was_lost();
                    self.answer_without_server(open, now);
                }
            }
        }
        if let Some((seq, line)) = self.conversation.early_initialized().cloned() {
            self.pass_or_hold(&line, Some(seq), now);
        }
        if self.settings.reload == Reload::Replace {
            self.servers.start_after(generation);
        } else {
            self.start(Purpose::Current);
        }
    }

    /// Without a server, an `initialize` is answered so that the client can repair it with outlast's tools.
    pub(super) fn initialize_locally(&self, open: &OpenRequest) -> Bytes {
        let version = self.version_asked(open);
        let restart = self.listed_name(Tool::Restart);
        let status = self.listed_name(Tool::Status);
        let name = &self.settings.name;
        let state = match self.servers.last_end() {
            Some(end) => format!("is not running ({}).", end.how),
            None => "is still starting. Its tools, prompts and resources are listed when it is ready.".into(),
        };
        let help = match (self.settings.tools, self.servers.last_end()) {
            (true, Some(_)) => format!("`{status}` shows its stderr; fix it, then call `{restart}`."),
            (true, None) => format!("`{status}` shows its stderr."),
            (false, Some(_)) => "See its stderr in the log of outlast; fix it, then run `outlast restart`.".into(),
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
            "serverInfo": messages::server_info(),
            "instructions": format!("The server `{name}` {state} {help}"),
        });
        message::result_line(open.id(), &result.to_string())
    }

    pub(super) fn version_asked(&self, open: &OpenRequest) -> String {
        let asked = open.kept().and_then(|line| version_of(line));
        asked
            .filter(|version| revision::HANDSHAKE.contains(&version.as_str()))
            .unwrap_or_else(|| revision::NEWEST_HANDSHAKE.into())
    }

    pub(super) fn opened_locally(&mut self, open: &OpenRequest) {
        let version = self.version_asked(open);
        self.conversation.mark_broken();
        self.opened_by_us(open, version, Capabilities::ALL, AnsweredBy::Outlast);
        self.note("The handshake was answered without a server, so that the server can be fixed and restarted".into());
    }

    /// The client's handshake was answered by us; each child gets it as a replay.
    pub(super) fn opened_by_us(
        &mut self,
        open: &OpenRequest,
        version: String,
        told: Capabilities,
        answered_by: AnsweredBy,
    ) {
        let Some(line) = open.kept().cloned() else { return };
        let spoken = version.clone();
        self.conversation.opened(Opening { line, version, spoken, told, answered_by });
        // From now on it goes out in the replay.
        if let Some((seq, _)) = self.conversation.initialized().cloned() {
            self.requests.take_held(seq);
        }
    }

    pub(super) fn discover_locally(&self, open: &OpenRequest) -> Bytes {
        message::error_line(&open.id().to_string(), -32601, "Method not found", None)
    }

    /// The server did not come up: openings, and lists that wait with them, are answered without it.
    pub(super) fn broken_at_start(&mut self, now: Instant) {
        if self.servers.was_ever_ready() {
            return;
        }
        self.conversation.mark_broken();
        for seq in self.requests.held_seqs() {
            let open = &self.requests[seq];
            let is_opening = open.is_opening();
            let is_list = !self.conversation.is_unopened() && matches!(open.class, Class::List(_));
            if is_opening || is_list {
                let open = self.close(seq);
                self.answer_without_server(open, now);
            }
        }
    }

    /// An `initialize` came to nothing: the client stands where it stood before.
    pub(super) fn opening_failed(&mut self) {
        let another = self.requests.iter().any(|open| open.class == Class::Initialize);
        if !another {
            self.conversation.opening_failed();
        }
    }

    /// Whether the client's own opening is a handshake that this child has not answered yet.
    pub(super) fn is_being_opened(&self, generation: u32) -> bool {
        self.requests.iter().filter(|open| open.is_on(generation) && !open.cancelled).any(|open| match open.class {
            Class::Initialize | Class::Discover => true,
            Class::Listen => false,
            _ => self.conversation.is_past_probe(),
        })
    }

    /// The client does not open this child any more: a restart does not wait for it any longer.
    pub(super) fn opening_may_be_over(&mut self, generation: u32, now: Instant) {
        if *self.servers.slot.current() == Current::Fresh(generation) && !self.is_being_opened(generation) {
            self.restart_is_done_if(generation, now);
        }
    }

    /// The handshake of this child has no deadline any more.
    pub(super) fn handshake_is_over(&mut self, generation: u32) {
        if let Some(child) = self.servers.get_mut(generation) {
            child.handshake_by = None;
        }
    }

    pub(super) fn initialize_answered(
        &mut self,
        generation: u32,
        open: &OpenRequest,
        result: Raw<'_>,
        line: &Bytes,
    ) -> Bytes {
        let [version, capabilities] = pick(result, ["protocolVersion", "capabilities"]).unwrap_or_default();
        let has = Capabilities::parse(capabilities, |_| true);
        let told = has.with_tools(self.settings.tools);
        if let Some(child) = self.servers.get_mut(generation) {
            child.capabilities = Some(has);
            child.handshake_by = None;
        }
        let line_kept = open.kept().cloned().expect("an initialize is always kept");
        let version = version.and_then(text).unwrap_or_default();
        let spoken = version.clone();
        let answered_by = AnsweredBy::Server;
        self.conversation.opened(Opening { line: line_kept, version, spoken, told, answered_by });
        self.remember_opening(result);
        self.promise(result, capabilities, line)
    }

    pub(super) fn discover_answered(&mut self, generation: u32, result: Raw<'_>, line: &Bytes) -> Bytes {
        let [capabilities] = pick(result, ["capabilities"]).unwrap_or_default();
        let has = Capabilities::parse(capabilities, |_| true);
        if let Some(child) = self.servers.get_mut(generation) {
            child.capabilities = Some(has);
        }
        let told = has.with_tools(self.settings.tools);
        self.remember_opening(result);
        let edited = self.promise(result, capabilities, line);
        let kept = match message::parse(&edited) {
            Ok(Message::Response { result, .. }) => result.map(|result| result.get()),
            _ => None,
        };
        let kept = kept.filter(|result| result.len() <= self.settings.limits.lists.list_bytes_max);
        self.conversation.note_discovered(told, kept);
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
    pub(super) fn shorter_ttl(&self, result: Raw<'_>, line: &Bytes) -> Option<Edit> {
        if !self.is_modern() {
            return None;
        }
        let ttl = pick(result, ["ttlMs"])?[0]?;
        let ttl_max = millis(self.settings.limits.lists.ttl_max);
        let is_longer = ttl.get().parse::<f64>().is_ok_and(|ttl| ttl > ttl_max as f64);
        is_longer.then(|| Edit::replace(line, ttl, ttl_max.to_string()))
    }
}
