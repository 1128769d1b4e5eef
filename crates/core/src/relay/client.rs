//! What the client says: requests, notifications, answers and batches. Where a request goes is decided in `placement`.

use std::time::Instant;

use bytes::Bytes;

use super::{
    Relay,
    failures::FailureKind,
    listens::Listen,
    requests::{Class, NewRequest, OpenRequest, Waits},
};
use crate::{
    mcp::{List, meta, method, notification, revision},
    message,
    message::{Id, Message, Params, Raw, RawId, line, pick, text},
};

impl Relay {
    pub(super) fn client_said_too_much(&mut self, start: &[u8]) {
        let id = message::id_at_start(start).map_or_else(|| "null".into(), |id| id.to_string());
        self.tell_client(message::error_line(
            &id,
            -32600,
            "the line is longer than 64 MiB and was not forwarded",
            None,
        ));
    }

    /// Outlast is leaving, and asks a server nothing any more.
    pub(super) fn client_said_too_late(&mut self, line: &Bytes, batch: Option<u64>, now: Instant) {
        match message::parse(line) {
            Ok(Message::Request { id, method, params }) => {
                if let Some(id) = id.parse() {
                    let open = self.open(id, &method, &params, batch);
                    let failure = self.failure(FailureKind::Stopping, &open, now);
                    self.fail(&open, &failure);
                }
            }
            Ok(Message::Batch(members)) if batch.is_none() => self.client_batched(&members, line, now),
            Ok(Message::Notification { method, params }) if method == notification::CANCELLED => {
                self.client_cancelled(&params, line, now);
            }
            Ok(Message::Response { id, .. }) => self.client_answered(id, line),
            _ => self.dropped.from_client += 1,
        }
    }

    pub(super) fn client_said(&mut self, line: Bytes, batch: Option<u64>, now: Instant) {
        if self.is_leaving() {
            return self.client_said_too_late(&line, batch, now);
        }
        let parsed = match message::parse(&line) {
            Ok(parsed) => parsed,
            Err(unreadable) => {
                self.dropped.from_client += 1;
                return self.tell_client(unreadable.refusal());
            }
        };
        match parsed {
            Message::Request { id, method, params } => {
                let id = id.parse();
                self.client_asked(id, &method, &params, &line, batch, now);
            }
            Message::Notification { method, params } => self.client_noted(&method, &params, &line, None, now),
            Message::Response { id, .. } => self.client_answered(id, &line),
            // A batch within a batch is none.
            Message::Batch(_) if batch.is_some() => self.dropped.from_client += 1,
            Message::Batch(members) => self.client_batched(&members, &line, now),
            Message::Other => match self.servers.slot.live() {
                Some(generation) => self.tell_server(generation, line, None),
                None => self.dropped.from_client += 1,
            },
        }
    }

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
            // An answer to it could not be recognised: it is forwarded, and no answer is guaranteed.
            return self.pass_or_hold(line, None, now);
        };
        let ended_probe = self.conversation.hear(method, params);
        let mut open = self.open(id, method, params, batch);
        open.arrival.at = Some(now);
        if open.class == Class::Initialize {
            // Every later child hears it again.
            open.keep(line);
        }
        if let Some(probe) = ended_probe {
            return self.initialize_after_probe(open, line, probe, now);
        }
        if let Class::Call { .. } = open.class
            && let Some(tool) = self.our_tool(&open.what)
        {
            let seq = open.seq();
            self.call_ours(open, tool, params.arguments(), now);
            return self.heartbeat_begins(seq, now);
        }
        let seq = open.seq();
        self.place(open, line.clone(), now);
        self.heartbeat_begins(seq, now);
    }

    pub(super) fn open(&mut self, id: Id, method: &str, params: &Params<'_>, batch: Option<u64>) -> Box<OpenRequest> {
        let modern = self.is_modern();
        let once = params.request_state().is_some() || params.input_responses().is_some();
        let uri = || params.uri().and_then(text).unwrap_or_default();
        let mut listen = None;
        let class = match method {
            method::INITIALIZE if !modern => Class::Initialize,
            method::DISCOVER if modern => Class::Discover,
            method::RESOURCES_READ
            | method::PROMPTS_GET
            | method::TASKS_GET
            | method::TASKS_LIST
            | method::TASKS_RESULT => Class::Read { once },
            method::COMPLETE => Class::Complete { once },
            method::TOOLS_CALL => {
                let task = params.task().is_some();
                Class::Call { repeatable: !once && !task, task }
            }
            method::LISTEN if modern => {
                listen = Some(Listen::asked(params.notifications()));
                Class::Listen
            }
            method::PING if !modern => Class::Ping,
            method::SET_LEVEL if !modern => Class::SetLevel,
            method::SUBSCRIBE if !modern => Class::Subscribe(uri()),
            method::UNSUBSCRIBE if !modern => Class::Unsubscribe(uri()),
            _ => match (List::of(method), params.cursor()) {
                (Some(list), None) => Class::List(list),
                (Some(list), Some(cursor)) => Class::Page(list, text(cursor)),
                (None, _) => Class::Other,
            },
        };
        let name = matches!(class, Class::Call { .. }).then(|| params.name().and_then(text)).flatten();
        let token = params.meta().and_then(|meta| pick(meta, [meta::PROGRESS_TOKEN])).and_then(|[token]| token);
        let token = token.and_then(|token| Id::parse(token.get()));
        let what = name.unwrap_or_else(|| method.to_owned());
        self.requests.number(NewRequest { id, token, what, class, batch, listen })
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
            notification::INITIALIZED if !self.is_modern() => {
                let seq = seq.unwrap_or_else(|| self.requests.next_seq());
                self.conversation.initialized_heard(seq, line);
                match self.servers.slot.live() {
                    Some(generation) => {
                        if let Some(child) = self.servers.get_mut(generation) {
                            child.initialized = true;
                        }
                        self.tell_server(generation, line.clone(), None);
                    }
                    // Said before the answer to `initialize`, it goes out after that and not in a replay.
                    None if self.conversation.opening().is_none() => self.pass_or_hold(line, Some(seq), now),
                    None => {}
                }
            }
            notification::CANCELLED => self.client_cancelled(params, line, now),
            notification::PROGRESS => {
                let token = params.progress_token().and_then(|token| Id::parse(token.get()));
                let asker = token.and_then(|token| self.server_requests.newest_with(&token));
                match asker.or(self.servers.slot.live()) {
                    Some(generation) => self.tell_server(generation, line.clone(), None),
                    None => self.dropped.from_client += 1,
                }
            }
            notification::ROOTS_CHANGED => match self.servers.slot.live() {
                Some(generation) => self.tell_server(generation, line.clone(), None),
                None => self.dropped.from_client += 1,
            },
            _ => self.pass_or_hold(line, seq, now),
        }
    }

    pub(super) fn client_cancelled(&mut self, params: &Params<'_>, line: &Bytes, now: Instant) {
        let id = params.request_id().and_then(|id| Id::parse(id.get()));
        let seq =
            id.and_then(|id| self.requests.oldest(&id, |open| !open.cancelled && open.class != Class::Initialize));
        let Some(seq) = seq else {
            return match self.servers.slot.live() {
                Some(generation) => self.tell_server(generation, line.clone(), None),
                None => self.dropped.from_client += 1,
            };
        };
        let open = self.requests.get_mut(seq).expect("found above");
        match open.waits {
            Waits::OnServer(generation) => {
                let mut suspect = None;
                if open.class == Class::Listen {
                    let open = self.close(seq);
                    self.forget(&open);
                } else {
                    open.cancelled = true;
                    let (id, what) = (open.id().clone(), open.what.clone());
                    self.heartbeats.cancelled(seq);
                    self.call_timeout_ends(seq);
                    let is_probe = self.requests[seq].class == Class::Discover;
                    suspect = Some((id, what));
                    // The rest of its batch waits no longer for it.
                    if let Some(batch) = self.requests.leave_batch(seq) {
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
            }
            Waits::Held | Waits::Replacement | Waits::Restarting | Waits::Verifying { .. } | Waits::Detached => {
                let open = self.close(seq);
                self.forget_ticket(seq);
                self.forget(&open);
            }
        }
    }

    pub(super) fn client_answered(&mut self, id: RawId<'_>, line: &Bytes) {
        let asked = id.parse().and_then(|id| self.server_requests.answered(&id));
        let Some(asked) = asked else {
            self.dropped.from_client += 1;
            return;
        };
        if self.servers.is_stopping(asked.generation) {
            self.dropped.from_client += 1;
            return;
        }
        let place = id.place(line).expect("an id that was parsed stands in the line");
        let line = if line[place.clone()] == *asked.written.as_bytes() {
            line.clone()
        } else {
            message::splice(line, vec![message::Edit { at: place, with: asked.written }])
        };
        self.tell_server(asked.generation, line, None);
    }

    // ---- batches ------------------------------------------------------------------------------------

    pub(super) fn client_batched(&mut self, members: &[Raw<'_>], line: &Bytes, now: Instant) {
        let refuse = |words: &str| message::error_line("null", -32600, words, None);
        if self.conversation.opening().is_none_or(|opening| opening.version != revision::WITH_BATCHES) {
            return match self.servers.slot.live() {
                Some(generation) => self.tell_server(generation, line.clone(), None),
                None => self.dropped.from_client += 1,
            };
        }
        if members.is_empty() {
            return self.tell_client(refuse("a batch holds at least one message"));
        }
        if members.len() > self.settings.limits.messages.batch_max {
            let words = format!("a batch holds at most {} messages", self.settings.limits.messages.batch_max);
            return self.tell_client(refuse(&words));
        }
        let requests = members
            .iter()
            .filter(|member| match message::parse(member.get().as_bytes()) {
                Ok(Message::Request { id, .. }) => id.parse().is_some(),
                _ => false,
            })
            .count();
        let key = self.requests.next_seq();
        if requests > 0 {
            // One more than there are, so that it leaves only when all have been taken.
            self.requests.begin_batch(key, requests + 1);
        }
        for member in members {
            if let Ok(Message::Request { id, method, .. }) = message::parse(member.get().as_bytes())
                && method == method::INITIALIZE
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
