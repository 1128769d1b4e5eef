//! The server's own restart tool (x4, x4b). A Python SDK server that called `sys.exit` in such a tool is blocked in the
//! thread that reads its stdin and exits only at the next line: outlast sends it one, and replaces it if that does not help.

use std::{collections::BTreeMap, time::Instant};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    Relay,
    endpoint::Private,
    events::{Action, Origin},
    messages,
    requests::{Class, OpenRequest, Waits},
    restart::Ticket,
    saved::SavedOwnRestart,
};
use crate::{
    exit::{Exit, How, RESTART_CODE},
    message,
    message::{Message, pick, text},
    patience::Patience,
};

/// The last call of the serving child's own restart tool.
#[derive(Debug)]
pub(super) struct OwnRestart {
    generation: u32,
    /// As the call gave it.
    reason: String,
    step: Step,
    wait: Patience,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Step {
    Called,
    Answered,
    /// It has not exited, and got a ping.
    Pinged,
    /// It answered the ping: nothing is expected of it until it answers the call.
    Alive,
}

impl OwnRestart {
    pub(super) fn save(&self, now: Instant) -> SavedOwnRestart {
        let (generation, reason, step) = (self.generation, self.reason.clone(), self.step);
        SavedOwnRestart { generation, reason, step, wait: self.wait.save(now) }
    }

    pub(super) fn restore(saved: SavedOwnRestart, now: Instant) -> OwnRestart {
        let SavedOwnRestart { generation, reason, step, wait } = saved;
        OwnRestart { generation, reason, step, wait: Patience::restore(wait, now) }
    }
}

impl Relay {
    /// Whether a request is a call of the server's own restart tool. One that outlast answers is never asked here.
    pub(super) fn calls_own_restart(&self, open: &OpenRequest) -> bool {
        matches!(open.class, Class::Call { .. }) && open.what == self.settings.restart_tool
    }

    /// It was sent to the server.
    pub(super) fn own_restart_called(&mut self, generation: u32, line: &[u8], now: Instant) {
        if self.servers.slot.serving() != Some(generation) {
            return;
        }
        let reason = match message::parse(line) {
            Ok(Message::Request { params, .. }) => {
                params.arguments().and_then(|arguments| pick(arguments, ["reason"])?[0]).and_then(text)
            }
            _ => None,
        };
        let reason = reason.unwrap_or_else(|| format!("`{}` was called", self.settings.restart_tool));
        let wait = Patience::new(self.settings.limits.restart.restart_called_wait, now);
        self.own_restart = Some(OwnRestart { generation, reason, step: Step::Called, wait });
    }

    /// The server answered it, and is expected to exit.
    pub(super) fn own_restart_answered(&mut self, generation: u32, now: Instant) {
        let length = self.settings.limits.restart.restart_answered_wait;
        if let Some(own) = self.own_restart.as_mut().filter(|own| own.generation == generation) {
            own.step = Step::Answered;
            own.wait = Patience::new(length, now);
        }
    }

    /// The server still reads and answers, so the tool restarts something else.
    pub(super) fn own_restart_pinged_back(&mut self, generation: u32) {
        if let Some(own) = self.own_restart.as_mut().filter(|own| own.generation == generation)
            && own.step == Step::Pinged
        {
            own.step = Step::Alive;
        }
    }

    pub(super) fn own_restart_deadline(&self) -> Option<Instant> {
        let own = self.own_restart.as_ref().filter(|own| own.step != Step::Alive)?;
        Some(own.wait.deadline())
    }

    pub(super) fn own_restart_due(&mut self, now: Instant) {
        let Some(own) = &mut self.own_restart else { return };
        if own.step == Step::Alive || !own.wait.is_over(now) {
            return;
        }
        let Some(own) = self.own_restart.take() else { return };
        // It has ended, or is being replaced anyway.
        let generation = own.generation;
        let is_over = self.servers.is_stopping(generation) || self.is_being_replaced(generation);
        if self.servers.slot.serving() != Some(generation) || is_over {
            return;
        }
        match own.step {
            Step::Called | Step::Answered => {
                self.ping(generation, Private::RestartPing);
                let wait = Patience::new(self.settings.limits.restart.restart_ping_max, now);
                self.own_restart = Some(OwnRestart { step: Step::Pinged, wait, ..own });
            }
            Step::Pinged => self.unblock(generation, own.reason, now),
            Step::Alive => {}
        }
    }

    /// The server neither exits nor answers: the end of its stdin makes it exit, and a new one takes over in any case.
    pub(super) fn unblock(&mut self, generation: u32, reason: String, now: Instant) {
        if let Some(child) = self.servers.get_mut(generation) {
            child.is_stdin_closed = true;
        }
        let calls: Vec<u64> = self.requests.on(generation);
        if let Some(seq) = self.restart_call_among(&calls) {
            self.make_due(seq, now);
        }
        self.act(Action::CloseStdin(generation));
        self.restart_asked(Ticket::Outside(0), Origin::Server, reason, false, now);
    }

    /// The one call among these that may be answered as a success when the server exits with 42 (x4).
    pub(super) fn restart_call_among(&self, seqs: &[u64]) -> Option<u64> {
        let calls = seqs.iter().map(|seq| &self.requests[*seq]);
        let mut calls = calls.filter(|open| self.calls_own_restart(open) && !open.cancelled);
        let (Some(cause), None) = (calls.next(), calls.next()) else { return None };
        // A legacy task is answered with another type of result, which is the server's to make.
        let is_task = matches!(cause.class, Class::Call { task: true, .. }) && !self.is_modern();
        (!is_task).then_some(cause.seq())
    }

    /// Its answer is ours to give, when the next server is ready.
    pub(super) fn make_due(&mut self, seq: u64, now: Instant) {
        let open = self.requests.get_mut(seq).expect("only open requests become due");
        open.waits = Waits::Replacement;
        open.taken = true;
        open.waiting_since = Some(now);
        self.requests.set_deadline(seq, Some(now + self.settings.limits.holding.hold_max));
        if let Some(serving) = self.servers.slot.serving()
            && !self.servers.get(serving).is_some_and(|child| child.is_stdin_closed)
        {
            self.due_is_back(seq, serving);
        }
    }

    /// A call that this child was expected to leave unanswered. Its own answer, if it comes before the next child is ready,
    /// is better than ours.
    pub(super) fn is_due_of(&self, generation: u32, open: &OpenRequest) -> bool {
        open.waits == Waits::Replacement
            && self.servers.slot.serving().is_none_or(|serving| serving == generation)
            && self.servers.get(generation).is_some_and(|child| child.is_stdin_closed)
    }

    /// The restart of a server whose stdin was closed for it has failed: that server is of no use any more.
    pub(super) fn stop_closed(&mut self) {
        if let Some(generation) = self.servers.slot.serving()
            && self.servers.get(generation).is_some_and(|child| child.is_stdin_closed)
        {
            self.stop(generation, How::Hung(self.settings.limits.restart.restart_ping_max));
            // What comes now would be lost on it.
            self.servers.slot.withhold(generation);
        }
    }

    /// A request of our own that every server answers without work.
    pub(super) fn ping(&mut self, generation: u32, private: Private) {
        let id = self.private_id();
        let line = self.conversation.ping(&id);
        if let Some(child) = self.servers.get_mut(generation) {
            child.private.insert(id, private);
            self.tell_server(generation, line, None);
        }
    }

    // ---- exit 42 --------------------------------------------------------------------------------------

    /// The one call that made the server exit to be restarted, if it can be told.
    pub(super) fn cause_of_restart(&self, seqs: &[u64], how: &How, unsent: &BTreeMap<u64, Bytes>) -> Option<u64> {
        if how.exit() != Some(&Exit::Code(RESTART_CODE)) || self.is_leaving() {
            return None;
        }
        let seqs: Vec<u64> = seqs.iter().copied().filter(|seq| !unsent.contains_key(seq)).collect();
        self.restart_call_among(&seqs)
    }

    pub(super) fn due_is_back(&mut self, seq: u64, generation: u32) {
        let open = self.close(seq);
        let pid = self.servers.pid(generation).unwrap_or_default();
        let words = format!("The server exited to restart, as requested, and is ready again (pid {pid}).");
        let schema =
            self.lists.tool(&open.what).map(|tool| tool["outputSchema"].clone()).filter(|schema| !schema.is_null());
        let modern = self.is_modern();
        let result = match schema {
            None => messages::tool_result(&words, None, false, None, modern),
            Some(schema) if is_one_string(&schema) => {
                messages::tool_result(&words, Some(&json!({"result": words})), false, None, modern)
            }
            // Only an error may lack what the schema promises.
            Some(_) => messages::tool_result(&format!("restarted: {words}"), None, true, None, modern),
        };
        self.answer_result(&open, &result);
    }

    pub(super) fn due_waited_out(&mut self, seq: u64) {
        let open = self.close(seq);
        let how = self.servers.last_end().map_or_else(String::new, |end| format!(": {}", end.how));
        let words = format!("The server exited to restart, as requested, and is not ready again{how}.");
        let result = messages::tool_result(&words, None, true, None, self.is_modern());
        self.answer_result(&open, &result);
    }
}

/// The schema of a tool that returns a string, as the Python SDKs write it.
fn is_one_string(schema: &Value) -> bool {
    let properties = schema["properties"].as_object();
    properties.is_some_and(|properties| {
        properties.len() == 1 && properties.get("result").is_some_and(|result| result["type"] == "string")
    })
}
