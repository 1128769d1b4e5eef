//! The stdio front: one client, over outlast's own stdin and stdout. Only JSON passes.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use outlast_core::{
    gateway::Event,
    message::{self, Id, Message, PARSED_AT_ONCE_MAX, Walk},
};
use outlast_os::offload::{Task, compute_for_client};

use super::{Driver, STDIO_CLIENT, Stopping};
use crate::child::{lines::LINE_MAX, own_streams::ClientEvent};

/// Above this, a client beside others is disconnected, so that no other client waits for it.
const OUTBOX_MAX: usize = 64 << 20;

/// How many bytes of held lines there may be; then stdin is not read.
const HELD_MAX: usize = 1 << 20;

/// Lines of the client that wait until another program continues, or does not.
#[derive(Debug, Default)]
pub(super) struct HeldLines {
    is_holding: bool,
    pub(super) lines: Vec<Bytes>,
}

/// A line of the client that is parsed beside the loop. Later events of the client wait.
pub(super) struct LongLine {
    line: Bytes,
    parsing: Task<Walk>,
}

impl HeldLines {
    /// Returns a line that does not wait: answers to backends, without which requests stay open.
    fn pass(&mut self, line: Bytes, is_response: bool) -> Option<Bytes> {
        if self.is_holding && !is_response {
            self.lines.push(line);
            return None;
        }
        Some(line)
    }

    fn has_room(&self) -> bool {
        self.lines.iter().map(Bytes::len).sum::<usize>() < HELD_MAX
    }
}

impl Driver {
    /// While requests are held, those of all clients wait. Held lines are heard when that ends.
    pub(super) fn hold_requests(&mut self, wanted: bool) {
        self.held_lines.is_holding = wanted;
        self.listen.as_mut().into_iter().for_each(|listen| listen.hold_requests(wanted));
        if !wanted {
            std::mem::take(&mut self.held_lines.lines).into_iter().for_each(|line| self.heard_line(line));
        }
    }

    pub(super) fn poll_stdio(&mut self, cx: &mut Context<'_>) -> bool {
        let has_parsed = self.poll_long_line(cx);
        let has_room = self.held_lines.has_room() && self.long_line.is_none();
        let Some(stdio) = &mut self.stdio else { return has_parsed };
        stdio.poll_input(has_room, cx) | self.hear_stdio() | has_parsed
    }

    /// True if the long line of the client was parsed.
    fn poll_long_line(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(LongLine { parsing, .. }) = &mut self.long_line else { return false };
        let Poll::Ready(parsed) = Pin::new(parsing).poll(cx) else { return false };
        let LongLine { line, .. } = self.long_line.take().expect("found above");
        // Without a thread it is parsed here.
        let walk = parsed.unwrap_or_else(|_| Walk::of(&line));
        let is_response = matches!(walk.read(&line), Ok(Message::Response { .. }));
        if let Some(line) = self.held_lines.pass(line, is_response) {
            self.heard_long_line(line, walk);
        }
        true
    }

    fn hear_stdio(&mut self) -> bool {
        let mut moved = false;
        while self.long_line.is_none()
            && let Some(event) = self.stdio.as_mut().and_then(|stdio| stdio.next_event())
        {
            self.heard_stdio(event);
            moved = true;
        }
        moved
    }

    fn heard_stdio(&mut self, event: ClientEvent) {
        match event {
            ClientEvent::Said(line) if line.len() > PARSED_AT_ONCE_MAX => {
                let text = line.clone();
                let parsing = compute_for_client(move || Walk::of(&text));
                self.long_line = Some(LongLine { line, parsing });
            }
            ClientEvent::Said(line) => {
                let is_response =
                    self.held_lines.is_holding && matches!(message::parse(&line), Ok(Message::Response { .. }));
                if let Some(line) = self.held_lines.pass(line, is_response) {
                    self.heard_line(line);
                }
            }
            ClientEvent::SaidTooMuch(start) => {
                let id = message::id_at_start(&start).map_or("null".to_owned(), |id: Id| id.to_string());
                let why = format!("Request too long: the limit is {} MiB", LINE_MAX >> 20);
                self.tell_stdio(message::error_line(&id, -32600, &why, None));
            }
            ClientEvent::Ended => {
                self.hold_requests(false);
                // A client that sends everything at once and closes stdin still gets its answers.
                if self.stopping == Stopping::No {
                    let grace = self.plan.grace;
                    self.stopping = Stopping::Draining { until: self.now + grace.after_stdin + grace.after_term };
                }
            }
            ClientEvent::Broken => {
                self.tell(Event::ClientLeft { client: STDIO_CLIENT });
                if !matches!(self.stopping, Stopping::Asked { .. } | Stopping::Over { .. }) {
                    self.stop(true);
                }
            }
        }
    }

    fn heard_long_line(&mut self, message: Bytes, walk: Walk) {
        match walk.read(&message).map(drop) {
            Ok(()) => self.tell(Event::ClientSaidLong { client: STDIO_CLIENT, message, walk: Box::new(walk) }),
            Err(unreadable) => self.tell_stdio(unreadable.refusal()),
        }
    }

    /// A line that was held is parsed here, whatever its length.
    pub(super) fn heard_line(&mut self, message: Bytes) {
        if message.len() > PARSED_AT_ONCE_MAX {
            let walk = Walk::of(&message);
            return self.heard_long_line(message, walk);
        }
        match message::parse(&message) {
            Ok(_) => self.tell(Event::ClientSaid { client: STDIO_CLIENT, message }),
            Err(unreadable) => self.tell_stdio(unreadable.refusal()),
        }
    }

    pub(super) fn tell_stdio(&mut self, message: Bytes) {
        let Some(stdio) = &mut self.stdio else { return };
        let is_line = message.ends_with(b"\n");
        stdio.put(message);
        if !is_line {
            stdio.put(Bytes::from_static(b"\n"));
        }
        if stdio.queued() >= OUTBOX_MAX && self.listen.is_some() {
            self.journal.note("the client does not read stdout and is disconnected");
            stdio.close();
            self.tell(Event::ClientLeft { client: STDIO_CLIENT });
        }
    }

    pub(super) fn flush_stdio(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(stdio) = &mut self.stdio else { return false };
        let has_room = stdio.flush(cx);
        if has_room {
            // Links that were not read because the client's queue was full.
            self.links.values().for_each(|wire| wire.waker.wake());
        }
        self.hear_stdio() | has_room
    }
}
