//! Where a request of the client's goes, by the state of the server: to a child, into the hold, or to an answer without a
//! server. What the answers say is in `messages`.

use std::time::Instant;

use bytes::Bytes;
use serde_json::json;

use super::{
    Relay,
    conversation::AnsweredBy,
    failures::FailureKind,
    lists::Items,
    messages,
    requests::{Class, OpenRequest, Waits},
    servers::{Current, Purpose},
};
use crate::{mcp::List, message, slot::Until};

impl Relay {
    /// Finds the place of a request by the state of the server.
    pub(super) fn place(&mut self, open: Box<OpenRequest>, line: Bytes, now: Instant) {
        match *self.servers.slot.current() {
            Current::Fresh(n) | Current::Serving(n) => match self.local_while_up(&open, n) {
                Some(result) => {
                    self.conversation.note_granted(&open.class, &line);
                    self.answer_for_child(&open, &result);
                }
                None if self.is_stalled(n) => self.refuse_full(&open, now),
                None => self.forward(open, line, n, now),
            },
            Current::None => self.hold(open, line, now),
            Current::Replaying(_) | Current::Down { .. } => self.place_while_down(open, line, now),
            Current::GivenUp { until, .. } => self.place_while_given_up(open, line, until, now),
        }
    }

    /// Answers for what a live child cannot, though the client was told that it can.
    pub(super) fn local_while_up(&self, open: &OpenRequest, generation: u32) -> Option<String> {
        let modern = self.is_modern();
        let has = self.servers.get(generation)?.capabilities?;
        let told = self.conversation.told();
        match &open.class {
            Class::List(List::Tools) if !has.tools && self.settings.tools => Some(self.tools_list("", modern)),
            Class::List(list) if !has.has(list.family()) && told.has(list.family()) => {
                Some(messages::list_result(list.member(), "", modern))
            }
            Class::Complete { .. } if !has.completions && told.completions => {
                Some(messages::dress(json!({"completion": {"values": []}}), modern))
            }
            Class::SetLevel if !has.logging && told.logging => Some("{}".into()),
            Class::Subscribe(_) | Class::Unsubscribe(_) if !has.subscribe && told.subscribe => Some("{}".into()),
            _ => None,
        }
    }

    pub(super) fn place_while_down(&mut self, open: Box<OpenRequest>, line: Bytes, now: Instant) {
        match &open.class {
            Class::Ping => self.answer_result(&open, "{}"),
            Class::Listen => self.listen_without_server(open, line),
            Class::Initialize if self.conversation.is_broken() && !self.servers.was_ever_ready() => {
                self.answer_without_server(open, now)
            }
            _ => match self.remembered(&open) {
                Some(answer) => self.answer_remembered(&open, answer),
                None => self.hold(open, line, now),
            },
        }
    }

    pub(super) fn place_while_given_up(&mut self, open: Box<OpenRequest>, line: Bytes, until: Until, now: Instant) {
        match &open.class {
            Class::Ping => self.answer_result(&open, "{}"),
            Class::Listen => self.listen_without_server(open, line),
            _ => match self.remembered(&open) {
                Some(answer) => self.answer_remembered(&open, answer),
                None if until == Until::Called => {
                    // It left on purpose: this request starts it again.
                    self.servers.slot.go_down(now);
                    self.hold(open, line, now);
                    if self.wants_start() {
                        self.start(Purpose::Current);
                    }
                }
                // A restart that was asked for is about to start it.
                None if self.restart_will_start() => self.hold(open, line, now),
                None => self.answer_without_server(open, now),
            },
        }
    }

    /// The last good answer to this, if there is one: `None` means that it is worth waiting for a server.
    pub(super) fn remembered(&self, open: &OpenRequest) -> Option<Bytes> {
        let modern = self.is_modern();
        let result = match &open.class {
            Class::Discover => match self.conversation.discovered() {
                Some(discovered) => messages::from_memory(discovered),
                None if self.conversation.is_broken() => return Some(self.discover_locally(open)),
                None => return None,
            },
            Class::List(list) => {
                let inside = match self.lists.get(*list) {
                    Some(shown) => shown.last_good()?.joined()?,
                    None if self.cached_list(*list).is_some() => self.cached_list(*list)?.joined()?,
                    // A broken start told the client of lists that hold nothing yet.
                    None if self.conversation.is_broken() => String::new(),
                    None => return None,
                };
                match list {
                    List::Tools => self.tools_list(&inside, modern),
                    _ => messages::list_result(list.member(), &inside, modern),
                }
            }
            _ => return None,
        };
        Some(message::result_line(open.id(), &result))
    }

    /// From here on the client holds the list that it is given.
    pub(super) fn answer_remembered(&mut self, open: &OpenRequest, answer: Bytes) {
        if let Class::List(list) = open.class {
            let items = match self.lists.get(list) {
                Some(shown) => shown.last_good(),
                None => self.cached_list(list),
            };
            let items = items.cloned().unwrap_or_default();
            self.note_shown_locally(list, items);
        }
        self.answer(open, answer);
    }

    /// A live child cannot answer this, so we do.
    pub(super) fn answer_for_child(&mut self, open: &OpenRequest, result: &str) {
        if let Class::List(list) = open.class {
            self.note_shown_locally(list, Items::default());
        }
        self.answer_result(open, result);
    }

    /// The child's tools, as the inside of a JSON array, and ours.
    pub(super) fn tools_list(&self, inside: &str, modern: bool) -> String {
        let ours = self.our_definitions();
        let comma = if inside.is_empty() || ours.is_empty() { "" } else { "," };
        messages::list_result(List::Tools.member(), &format!("{inside}{comma}{ours}"), modern)
    }

    /// An answer for a request that no server will take in time.
    pub(super) fn answer_without_server(&mut self, open: Box<OpenRequest>, now: Instant) {
        if let Some(answer) = self.remembered(&open) {
            return self.answer_remembered(&open, answer);
        }
        if open.class == Class::Initialize
            && let Some((answer, version, told)) = self.initialize_from_cache(&open)
        {
            self.opened_by_us(&open, version, told, AnsweredBy::Cache);
            return self.answer(&open, answer);
        }
        let answer = match &open.class {
            Class::Initialize => Some(self.initialize_locally(&open)),
            Class::Discover => Some(self.discover_locally(&open)),
            Class::List(List::Tools) => {
                let result = self.tools_list("", self.is_modern());
                return self.answer_for_child(&open, &result);
            }
            Class::Ping => Some(message::result_line(open.id(), "{}")),
            Class::Page(..) => {
                let words = "this cursor belongs to a previous server; start again without a cursor";
                Some(message::error_line(&open.id().to_string(), -32602, words, None))
            }
            _ => None,
        };
        if open.class == Class::Initialize {
            self.opened_locally(&open);
        }
        match answer {
            Some(answer) => self.answer(&open, answer),
            None => {
                let failure = match *self.servers.slot.current() {
                    Current::GivenUp { .. } => self.failure(FailureKind::GaveUp, &open, now),
                    _ => self.failure(FailureKind::ServerDown, &open, now),
                };
                self.fail(&open, &failure);
            }
        }
    }

    // ---- holding --------------------------------------------------------------------------------

    /// Keeps a request until a server serves.
    pub(super) fn hold(&mut self, mut open: Box<OpenRequest>, line: Bytes, now: Instant) {
        let limits = &self.settings.limits;
        open.waits = Waits::Held;
        let since = *open.waiting_since.get_or_insert(now);
        let is_opening = self.is_first_opening(&open);
        if matches!(self.servers.slot.current(), Current::Down { .. }) && self.servers.ends_before_ready() > 0 {
            open.arrival.met_end.get_or_insert(now);
        }
        if let Current::Down { at } = *self.servers.slot.current()
            && self.wants_start()
        {
            let wait = if is_opening { limits.holding.opening_wait } else { limits.holding.hold_max };
            if at > since + wait {
                if is_opening {
                    self.conversation.mark_broken();
                }
                return self.answer_without_server(open, now);
            }
        }
        if !self.requests.has_room(&line, &self.settings.limits.holding) {
            if open.class == Class::Ping {
                return self.answer_result(&open, "{}");
            }
            return self.refuse_full(&open, now);
        }
        let seq = open.seq();
        self.requests.insert(open);
        self.requests.hold(seq, &line, true);
    }

    /// A message that is no request we keep track of.
    pub(super) fn pass_or_hold(&mut self, line: &Bytes, seq: Option<u64>, _now: Instant) {
        let seq = seq.unwrap_or_else(|| self.requests.next_seq());
        match *self.servers.slot.current() {
            Current::Fresh(n) | Current::Serving(n) => self.tell_server(n, line.clone(), Some(seq)),
            Current::GivenUp { .. } => self.dropped.from_client += 1,
            _ if !self.requests.has_room(line, &self.settings.limits.holding) => self.dropped.from_client += 1,
            _ => self.requests.hold(seq, line, false),
        }
    }

    /// Lets everything go that waited, in client order.
    pub(super) fn release(&mut self, generation: u32, now: Instant) {
        for (seq, held) in self.requests.take_all_held() {
            if held.is_request {
                let open = self.close(seq);
                match self.local_while_up(&open, generation) {
                    Some(result) => {
                        self.conversation.note_granted(&open.class, &held.line);
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
        let Some(open) = self.requests.get(seq) else { return };
        match open.waits {
            Waits::Held => {
                let open = self.close(seq);
                self.answer_without_server(open, now);
            }
            Waits::Replacement => self.due_waited_out(seq),
            Waits::Restarting => self.restart_call_waited_out(seq),
            // Reading a file takes no time that would have to be bounded here.
            Waits::Verifying { .. } => {}
            Waits::OnServer(_) | Waits::Detached => self.listen_ended(seq),
        }
    }

    /// When each held request has waited long enough, and each one with a deadline of its own.
    pub(super) fn request_deadlines(&self) -> impl Iterator<Item = (u64, Instant)> {
        let hold_max = self.settings.limits.holding.hold_max;
        // An opening waits as long as a slow child runs, as it would without outlast; `Down` decides at once.
        let held = self.requests.held_requests().filter(|open| !self.is_first_opening(open));
        let held = held.filter_map(move |open| Some((open.seq(), open.waiting_since? + hold_max)));
        held.chain(self.requests.deadlines())
    }
}
