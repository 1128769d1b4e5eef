//! The server's own restart tool (x4, x4b). A Python SDK server that called `sys.exit` in such a tool is blocked in the
//! thread that reads its stdin and exits only at the next line: outlast sends it one, and replaces it if that does not help.

use super::{
    Action, Class, Current, How, Instant, Message, Open, Origin, Place, Private, Relay, Ticket, client, message,
};
use crate::{
    message::{pick, text},
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Called,
    Answered,
    /// It has not exited, and got a ping.
    Pinged,
    /// It answered the ping: nothing is expected of it until it answers the call.
    Alive,
}

impl Relay {
    /// Whether a request is a call of the server's own restart tool. One that outlast answers is never asked here.
    pub(super) fn calls_own_restart(&self, open: &Open) -> bool {
        matches!(open.class, Class::Call { .. }) && open.what == self.settings.restart_tool
    }

    /// It was sent to the server.
    pub(super) fn own_restart_called(&mut self, generation: u32, line: &[u8], now: Instant) {
        if self.current != Current::Serving(generation) {
            return;
        }
        let reason = match message::parse(line) {
            Ok(Message::Request { params, .. }) => {
                params.arguments().and_then(|arguments| pick(arguments, ["reason"])?[0]).and_then(text)
            }
            _ => None,
        };
        let reason = reason.unwrap_or_else(|| format!("`{}` was called", self.settings.restart_tool));
        let wait = Patience::new(self.settings.limits.restart_called_wait, now);
        self.own_restart = Some(OwnRestart { generation, reason, step: Step::Called, wait });
    }

    /// The server answered it, and is expected to exit.
    pub(super) fn own_restart_answered(&mut self, generation: u32, now: Instant) {
        let length = self.settings.limits.restart_answered_wait;
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

    pub(super) fn own_restart_time_passed(&mut self, now: Instant) {
        let Some(own) = &mut self.own_restart else { return };
        if own.step == Step::Alive || !own.wait.is_over(now) {
            return;
        }
        let Some(own) = self.own_restart.take() else { return };
        // It has ended, or is being replaced anyway.
        let generation = own.generation;
        let is_over = self.is_stopping(generation) || self.is_being_replaced(generation);
        if self.current != Current::Serving(generation) || is_over {
            return;
        }
        match own.step {
            Step::Called | Step::Answered => {
                self.ping(generation, Private::RestartPing);
                let wait = Patience::new(self.settings.limits.restart_ping_max, now);
                self.own_restart = Some(OwnRestart { step: Step::Pinged, wait, ..own });
            }
            Step::Pinged => self.unblock(generation, own.reason, now),
            Step::Alive => {}
        }
    }

    /// The server neither exits nor answers: the end of its stdin makes it exit, and a new one takes over in any case.
    fn unblock(&mut self, generation: u32, reason: String, now: Instant) {
        if let Some(child) = self.children.get_mut(&generation) {
            child.is_stdin_closed = true;
        }
        let calls: Vec<u64> = self.open_on(generation);
        if let Some(seq) = self.restart_call_among(&calls) {
            self.make_due(seq, now);
        }
        self.act(Action::CloseStdin(generation));
        self.restart_asked(Ticket::Outside(0), Origin::Server, reason, false, now);
    }

    /// The one call among these that may be answered as a success when the server exits with 42 (x4).
    pub(super) fn restart_call_among(&self, seqs: &[u64]) -> Option<u64> {
        let calls = seqs.iter().map(|seq| &*self.opens[seq]);
        let mut calls = calls.filter(|open| self.calls_own_restart(open) && !open.cancelled);
        let (Some(cause), None) = (calls.next(), calls.next()) else { return None };
        // A legacy task is answered with another type of result, which is the server's to make.
        let is_task = matches!(cause.class, Class::Call { task: true, .. }) && !self.is_modern();
        (!is_task).then_some(cause.seq)
    }

    /// Its answer is ours to give, when the next server is ready.
    pub(super) fn make_due(&mut self, seq: u64, now: Instant) {
        let open = self.opens.get_mut(&seq).expect("only open requests become due");
        open.place = Place::Due;
        open.taken = true;
        open.waiting_since = Some(now);
        self.bounded.insert(seq);
        if let Current::Serving(serving) = self.current
            && !self.children.get(&serving).is_some_and(|child| child.is_stdin_closed)
        {
            self.due_is_back(seq, serving);
        }
    }

    /// A call that this child was expected to leave unanswered. Its own answer, if it comes in time, is better than ours.
    pub(super) fn is_due_of(&self, generation: u32, open: &Open) -> bool {
        open.place == Place::Due
            && self.current == Current::Serving(generation)
            && self.children.get(&generation).is_some_and(|child| child.is_stdin_closed)
    }

    /// The restart of a server whose stdin was closed for it has failed: that server is of no use any more.
    pub(super) fn stop_closed(&mut self) {
        if let Current::Serving(generation) = self.current
            && self.children.get(&generation).is_some_and(|child| child.is_stdin_closed)
        {
            self.stop(generation, How::Hung(self.settings.limits.restart_ping_max));
            // What comes now would be lost on it.
            self.current = Current::Replaying(generation);
        }
    }

    /// A request of our own that every server answers without work.
    pub(super) fn ping(&mut self, generation: u32, private: Private) {
        let id = self.private_id();
        let line = if self.is_modern() {
            let meta = client::own_meta(&self.meta);
            message::line(format!(
                r#"{{"jsonrpc":"2.0","id":{id},"method":"server/discover","params":{{"_meta":{meta}}}}}"#
            ))
        } else {
            message::line(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"ping"}}"#))
        };
        if let Some(child) = self.children.get_mut(&generation) {
            child.private.insert(id, private);
            self.tell_server(generation, line, None);
        }
    }
}
