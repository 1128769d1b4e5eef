//! What a child says, by the role it has, and the handshake that each new one gets.

use std::{mem, time::Instant};

use bytes::Bytes;

use super::{
    Relay,
    conversation::{Probe, error_code},
    events::Action,
    lists::Items,
    requests::{Class, OpenRequest, Waits},
    server_requests::ServerRequest,
    servers::{Current, Role},
};
use crate::{
    exit::How,
    mcp::{Family, List, Page, meta, method, notification, revision},
    message,
    message::{BYTE_ORDER_MARK, Edit, Id, Message, Params, Raw, RawId, pick, splice},
};

impl Relay {
    pub(super) fn server_said(&mut self, generation: u32, line: Bytes, now: Instant) {
        if self.servers.is_stopping(generation) && !(self.is_leaving() && self.servers.role(generation).is_heard()) {
            // Past its time. While outlast is leaving, a child that is being stopped may still finish its answers.
            self.dropped.from_server += 1;
            return;
        }
        let line = if line.starts_with(BYTE_ORDER_MARK) { line.slice(BYTE_ORDER_MARK.len()..) } else { line };
        if let Some(child) = self.servers.get_mut(generation) {
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
                if self.conversation.opening().is_some_and(|opening| opening.spoken == revision::WITH_BATCHES) {
                    for member in members {
                        if member.get().starts_with('[') {
                            // A batch within a batch is none.
                            self.dropped.from_server += 1;
                            continue;
                        }
                        self.server_said(generation, message::line(member.get().to_owned()), now);
                    }
                } else {
                    self.pass_if(self.servers.role(generation) == Role::Serving, line.clone());
                }
            }
            Message::Other => self.divert(generation, line.clone(), true),
        }
    }

    /// A line that is no message: for people, and counted (C3). An empty line is only dropped.
    pub(super) fn divert(&mut self, generation: u32, line: Bytes, is_json: bool) {
        self.dropped.from_server += 1;
        self.dropped.not_json += u64::from(!line.trim_ascii().is_empty());
        self.act(Action::Divert { generation, line, is_json });
    }

    /// What a child says reaches the client, or is counted as dropped.
    fn pass_if(&mut self, passes: bool, line: Bytes) {
        match passes {
            true => self.tell_client(line),
            false => self.dropped.from_server += 1,
        }
    }

    // ---- answers ------------------------------------------------------------------------------------

    pub(super) fn server_answered(
        &mut self,
        generation: u32,
        id: RawId<'_>,
        result: Option<Raw<'_>>,
        error: Option<Raw<'_>>,
        line: &Bytes,
        now: Instant,
    ) {
        let role = self.servers.role(generation);
        let Some(id) = id.parse() else {
            // `null`, or an id that cannot be matched.
            return match message::has_version(line) {
                true => self.pass_if(role == Role::Serving, line.clone()),
                false => self.divert(generation, line.clone(), true),
            };
        };
        if let Some(child) = self.servers.get_mut(generation) {
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
            Role::Retired => None,
            // One whose handshake was answered early may have been asked more before that.
            _ => self.requests.oldest(&id, |open| open.is_on(generation) || self.is_due_of(generation, open)),
        };
        let Some(seq) = seq else {
            match message::has_version(line) {
                true => self.dropped.from_server += 1,
                false => self.divert(generation, line.clone(), true),
            }
            return;
        };
        if self.requests[seq].class == Class::Listen {
            return self.listen_answered(seq, error.is_some(), line.clone(), now);
        }
        self.request_answered(generation, seq, (result, error), line, now);
        if role == Role::Draining {
            self.drained(generation);
        }
    }

    /// The answer to a request that this child holds.
    fn request_answered(
        &mut self,
        generation: u32,
        seq: u64,
        (result, error): (Option<Raw<'_>>, Option<Raw<'_>>),
        line: &Bytes,
        now: Instant,
    ) {
        let open = self.close(seq);
        self.pace.note(open.asked.unwrap_or(now), now);
        if self.calls_own_restart(&open) {
            self.own_restart_answered(generation, now);
        }
        let ours_before = matches!(open.class, Class::Page(List::Tools, _)).then(|| self.our_names());
        let line = self.edited(generation, &open, result, error, line);
        self.answer(&open, line);
        if ours_before.is_some_and(|before| before != self.our_names()) {
            // A later page took one of our names: the client holds ours under the old one.
            self.announce(Family::Tools);
        }
        if let Class::List(list) | Class::Page(list, _) = open.class {
            self.compare_late(generation, list, now);
        }
        if *self.servers.slot.current() == Current::Fresh(generation) {
            self.fresh_answered(generation, &open.class, result.is_some(), now);
        } else if let (Class::Initialize, Some(serving)) = (&open.class, self.servers.slot.serving()) {
            // A second opening may tell of lists that the first one did not.
            self.compare(serving, now);
        }
    }

    /// A fresh child serves once it has answered the client's own opening.
    fn fresh_answered(&mut self, generation: u32, class: &Class, has_result: bool, now: Instant) {
        let serves = match class {
            Class::Initialize => has_result,
            Class::Discover => self.is_modern() && has_result,
            _ => self.conversation.is_past_probe(),
        };
        if !serves {
            return self.opening_may_be_over(generation, now);
        }
        self.conversation.served(true);
        self.servers.serve(generation, now);
        self.ready(generation, now);
        self.served(generation);
        self.compare(generation, now);
        self.restart_is_ready(generation, now);
    }

    /// What the relay learns from an answer, and the few edits it makes.
    pub(super) fn edited(
        &mut self,
        generation: u32,
        open: &OpenRequest,
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
                self.conversation.probe_answered(Probe::Locked);
                self.handshake_is_over(generation);
                self.discover_answered(generation, result, line)
            }
            (Class::Discover, None) => {
                let modern = matches!(error.and_then(error_code), Some(-32022..=-32020));
                self.conversation.probe_answered(if modern { Probe::Locked } else { Probe::Harmless });
                self.handshake_is_over(generation);
                line.clone()
            }
            (Class::List(list), Some(result)) => self.list_answered(generation, *list, None, result, line),
            (Class::Page(list, cursor), Some(result)) => {
                self.list_answered(generation, *list, cursor.as_deref().or(Some("")), result, line)
            }
            (Class::List(List::Tools), None) if self.settings.tools && error.and_then(error_code) == Some(-32601) => {
                self.note_shown_locally(List::Tools, Items::default());
                message::result_line(open.id(), &self.tools_list("", self.is_modern()))
            }
            (Class::SetLevel | Class::Subscribe(_) | Class::Unsubscribe(_), Some(_)) => {
                if open.kept().is_some() || matches!(open.class, Class::Unsubscribe(_)) {
                    let kept = open.kept().map(|kept| &**kept).unwrap_or_default();
                    self.conversation.note_granted(&open.class, kept);
                }
                line.clone()
            }
            _ => line.clone(),
        }
    }

    /// A page of a list on its way to the client: noted as shown, ours added to the first page of tools.
    pub(super) fn list_answered(
        &mut self,
        generation: u32,
        list: List,
        cursor: Option<&str>,
        result: Raw<'_>,
        line: &Bytes,
    ) -> Bytes {
        let Some(page) = Page::parse(list, result) else { return line.clone() };
        self.note_shown(generation, list, cursor, &page);
        let mut edits = Vec::new();
        if list == List::Tools && cursor.is_none() {
            let ours = self.our_definitions();
            if !ours.is_empty() {
                edits.push(Edit::append(line, page.array, &ours));
            }
            edits.extend(self.shorter_ttl(result, line));
        }
        if edits.is_empty() { line.clone() } else { splice(line, edits) }
    }

    // ---- requests -------------------------------------------------------------------------------------

    pub(super) fn server_asked(
        &mut self,
        generation: u32,
        id: RawId<'_>,
        method: &str,
        params: &Params<'_>,
        line: &Bytes,
        now: Instant,
    ) {
        let role = self.servers.role(generation);
        if self.is_modern() || role == Role::Retired {
            self.dropped.from_server += 1;
            return;
        }
        let (Some(own), Some(place)) = (id.parse(), id.place(line)) else {
            return self.pass_if(role == Role::Serving, line.clone());
        };
        if method == method::PING && role != Role::Serving {
            return self.tell_server(generation, message::result_line(&own, "{}"), None);
        }
        if role == Role::Waiting {
            let early_max = self.settings.limits.handshake.early_max;
            let child = self.servers.get_mut(generation).expect("a child with a role");
            if child.early.len() < early_max {
                child.early.push(Bytes::copy_from_slice(line));
            } else {
                let why = format!("sent more than {early_max} requests before it was ready");
                self.handshake_failed(generation, How::HandshakeRefused(why), now);
            }
            return;
        }
        let known = if generation == 1 { own.clone() } else { self.private_id() };
        let token = params.meta().and_then(|meta| pick(meta, [meta::PROGRESS_TOKEN])).and_then(|[token]| token);
        let asked = ServerRequest {
            generation,
            written: id_text(line, &place),
            id: own,
            token: token.and_then(|token| Id::parse(token.get())),
        };
        let line = if generation == 1 {
            line.clone()
        } else {
            splice(line, vec![Edit { at: place, with: known.to_string() }])
        };
        self.server_requests.insert(known, asked);
        self.tell_client(line);
    }

    /// Requests the child made before it served.
    pub(super) fn early_requests(&mut self, generation: u32, now: Instant) {
        let early = self.servers.get_mut(generation).map(|child| mem::take(&mut child.early));
        for line in early.unwrap_or_default() {
            self.server_said(generation, line, now);
        }
    }

    /// Requests of a generation that will not hear their answers.
    pub(super) fn cancel_asked(&mut self, generation: u32) {
        for id in self.server_requests.take_of(generation) {
            self.tell_client(message::cancelled_line(id, Some(r#""the server ended""#)));
        }
    }

    // ---- notifications ----------------------------------------------------------------------------------

    pub(super) fn server_noted(
        &mut self,
        generation: u32,
        method: &str,
        params: &Params<'_>,
        line: Bytes,
        now: Instant,
    ) {
        let role = self.servers.role(generation);
        let passes = match (method, role) {
            (_, Role::Retired) => false,
            (notification::CANCELLED, _) => return self.server_cancelled(generation, role, params, line, now),
            (notification::ACKNOWLEDGED, _) => {
                return self.acknowledged(generation, role == Role::Serving, params, line);
            }
            (notification::PROGRESS, _) => self.progress_passes(generation, role, params, now),
            (_, Role::Waiting) => false,
            (notification::RESOURCE_UPDATED, Role::Draining) => false,
            _ => match (Family::of(method), role) {
                (Some(_), Role::Draining) => false,
                (Some(family), _) => self.list_changed_passes(generation, family),
                (None, _) => true,
            },
        };
        self.pass_if(passes, line);
    }

    pub(super) fn progress_passes(&mut self, generation: u32, role: Role, params: &Params<'_>, now: Instant) -> bool {
        let token = params.progress_token().and_then(|token| Id::parse(token.get()));
        let seq = token.as_ref().and_then(|token| self.requests.with_token(token));
        let told = seq.and_then(|seq| self.heartbeat_value(seq));
        let Some((seq, open)) = seq.and_then(|seq| Some((seq, self.requests.get(seq)?))) else {
            // The client has had the answer to a call that timed out, and no progress may follow it.
            let is_late = token.is_some_and(|token| self.timed_out_with_token(generation, &token));
            return role == Role::Serving && !is_late;
        };
        if open.waits != Waits::OnServer(generation) && !self.is_due_of(generation, open) {
            return false;
        }
        self.call_progresses(seq, now);
        let Some(open) = self.requests.get_mut(seq) else { return false };
        let value = params.progress().and_then(|value| value.get().parse::<f64>().ok());
        match value {
            // Progress must rise, and the first child may have come further.
            Some(value) if (open.resent > 0 || open.class == Class::Listen) && value <= open.progress => false,
            // The same for values below those that outlast itself has sent.
            Some(value) if told.is_some_and(|told| value <= told) => false,
            Some(value) => {
                open.progress = open.progress.max(value);
                let seq = open.seq();
                self.heartbeat_ends(seq);
                true
            }
            None => true,
        }
    }

    pub(super) fn server_cancelled(
        &mut self,
        generation: u32,
        role: Role,
        params: &Params<'_>,
        line: Bytes,
        now: Instant,
    ) {
        let Some(raw) = params.request_id() else {
            self.dropped.from_server += 1;
            return;
        };
        let id = Id::parse(raw.get());
        if self.is_modern() {
            let seq = id.and_then(|id| self.requests.oldest(&id, |open| open.class == Class::Listen));
            return match seq {
                Some(seq) if self.requests[seq].is_on(generation) => {
                    self.listen_torn_down(seq, line, now);
                }
                _ => self.pass_if(role == Role::Serving, line),
            };
        }
        if role == Role::Waiting {
            let child = self.servers.get_mut(generation).expect("a child with a role");
            child.early.retain(|early| match message::parse(early) {
                Ok(Message::Request { id: early, .. }) => early.parse() != id,
                _ => true,
            });
            return;
        }
        match id.as_ref().and_then(|id| self.server_requests.cancelled(generation, id)) {
            Some(known) => {
                let line = if Some(&known) == id.as_ref() {
                    line
                } else {
                    splice(&line, vec![Edit::replace(&line, raw, known.to_string())])
                };
                self.tell_client(line);
            }
            None => self.pass_if(role == Role::Serving && generation == 1, line),
        }
    }
}

fn id_text(line: &Bytes, place: &std::ops::Range<usize>) -> String {
    String::from_utf8_lossy(&line[place.clone()]).into_owned()
}
