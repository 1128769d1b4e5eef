//! Copies bytes between the agent's terminal and its viewers.

use std::{
    io::IoSlice,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::{Buf, BytesMut};
#[cfg(unix)]
use outlast_core::saved::Octets;
use outlast_core::{agent::TAIL_MAX, session::Event, terminal, waiting};
use outlast_os::Sink;

use super::{Terminal, screen::Screen};
use crate::child::Child;

/// Buffer for one read of the agent's terminal; a read returns no more than this.
const READ_ROOM: usize = 64 << 10;
/// Output that is read before it is sent on, if it is available. Above it the agent waits (backpressure).
pub(super) const SHOWN_HIGH: usize = 16 << 10;
/// The screen model may be this many bytes behind the output,
const UNSEEN_MAX: usize = 512 << 10;
/// and this long, while nothing needs it.
const UNSEEN_FOR: Duration = Duration::from_millis(25);
/// How long after its output the conversation of an agent without hooks is looked up.
const LEARN_AFTER: Duration = Duration::from_secs(1);
/// Rounds of copying before the loop handles other events.
const ROUNDS_MAX: usize = 16;

/// A stdout that is no terminal: it gets every byte, and the agent waits for it.
#[derive(Debug)]
pub(super) struct Pipe {
    sink: Sink,
    queue: BytesMut,
}

impl Pipe {
    pub(super) fn new(sink: Sink) -> Pipe {
        Pipe { sink, queue: BytesMut::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// A thread is writing: it is not known how much of the queue was written.
    #[cfg(unix)]
    pub(super) fn is_writing(&self) -> bool {
        self.sink.is_writing()
    }

    /// What was not written yet, for the next program.
    #[cfg(unix)]
    pub(super) fn save(&self) -> Octets {
        Octets::of(&self.queue)
    }

    #[cfg(unix)]
    pub(super) fn restore(sink: Sink, queue: Octets) -> Pipe {
        Pipe { sink, queue: queue.bytes().into() }
    }
}

impl Terminal {
    pub(super) fn carry(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        for _ in 0..ROUNDS_MAX {
            let mut carried = self.type_to_agent(cx);
            // A terminal returns little at a time; several reads make one write.
            while self.listen_to_agent(cx) {
                carried = true;
            }
            let late = self.viewers.spread(&self.fresh);
            carried |= self.show(cx);
            // Last, so that no viewer waits for it.
            self.take_in();
            for key in late {
                self.see(terminal::Event::FellBehind { key });
            }
            for key in self.viewers.take_drained() {
                self.see(terminal::Event::Drained { key });
            }
            // The result may include messages of outlast.
            carried |= !self.fresh.is_empty();
            if !carried {
                break;
            }
            moved = true;
        }
        moved
    }

    fn listen_to_agent(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(running) = &mut self.running else { return false };
        let is_full = self.fresh.len() >= SHOWN_HIGH
            || self.viewers.is_held_up(SHOWN_HIGH)
            || self.stdout.as_ref().is_some_and(|pipe| pipe.queue.len() >= SHOWN_HIGH);
        // Output of an agent that exited is read completely: its terminal is closed with it.
        if is_full && !self.children.get(running.key).is_some_and(Child::has_exited) {
            return false; // Freed room wakes us.
        }
        if self.fresh.capacity() - self.fresh.len() < READ_ROOM {
            self.fresh.reserve(READ_ROOM);
        }
        let before = self.fresh.len();
        match self.children.poll_terminal(running.key, &mut self.fresh, cx, self.now) {
            Poll::Pending => return false,
            Poll::Ready(None) => return true,
            Poll::Ready(Some(_)) => {}
        }
        let new = &self.fresh[before..];
        self.alternate.pass(new);
        // Without outlast's own messages.
        if let Some(pipe) = &mut self.stdout {
            pipe.queue.extend_from_slice(new);
        }
        if self.agent.tells_its_conversation() {
            keep_last(&mut running.tail, new, TAIL_MAX);
        }
        if self.agent.has_files() && !running.has_reported && self.learns_at.is_none() {
            self.learns_at = Some(self.now + LEARN_AFTER);
        }
        if running.prompt.as_mut().is_some_and(|prompt| prompt.is_in(new)) {
            running.prompt = None;
            self.tell(Event::PromptShown);
        }
        true
    }

    /// Gives new output to the screen model, which may be slow.
    fn take_in(&mut self) {
        if self.fresh.is_empty() {
            return;
        }
        self.viewers.note_alternate(self.alternate.is_on);
        if self.screen.is_some() {
            self.unseen.extend_from_slice(&self.fresh);
        }
        self.fresh.clear();
        // An owner without other viewers needs no model; parsing later is cheaper, because most output has scrolled
        // away.
        let may_wait = self.viewers.is_owner_alone() && !self.waiting.wants_text() && self.unseen.len() < UNSEEN_MAX;
        if may_wait {
            self.unseen_since.get_or_insert(self.now);
        } else {
            self.catch_up();
        }
        self.watch(waiting::Event::Output);
    }

    /// When the model must be up to date even if nothing needs it.
    pub(super) fn catches_up_at(&self) -> Option<Instant> {
        self.unseen_since.map(|since| since + UNSEEN_FOR)
    }

    /// Brings the model, and what depends on it, up to date.
    pub(super) fn catch_up(&mut self) {
        self.unseen_since = None;
        let Some(screen) = self.screen.as_mut().filter(|_| !self.unseen.is_empty()) else { return };
        let mut unseen = std::mem::take(&mut self.unseen);
        let was_alternate = screen.modes().alternate;
        let is_alone = !self.viewers.has_person();
        let mut answers = Vec::new();
        let mut found = Vec::new();
        if self.waiting.wants_text() {
            // In small pieces, so that no text leaves the screen unseen.
            let lines_max = usize::from(screen.size().rows / 2).max(1);
            for piece in pieces(&unseen, lines_max) {
                answers.extend(screen.feed(piece, is_alone));
                found.extend(self.waiting.seen(&screen.text()));
            }
        } else {
            let (styles, rest) = screen.lasting(&unseen);
            screen.feed(&styles, is_alone);
            answers = screen.feed(rest, is_alone);
        }
        let has_left_alternate = was_alternate && !screen.modes().alternate;
        // The buffer is used again.
        unseen.clear();
        self.unseen = unseen;
        if !answers.is_empty()
            && let Some(process) = self.reading_process()
        {
            process.put(answers.into(), None);
        }
        if has_left_alternate {
            self.see(terminal::Event::LeftAlternate);
        }
        self.see(terminal::Event::Shown);
        self.act_on_watch(found);
    }

    /// The current screen, if it is kept.
    pub(super) fn screen(&mut self) -> Option<&mut Screen> {
        self.catch_up();
        self.screen.as_mut()
    }

    fn type_to_agent(&mut self, cx: &mut Context<'_>) -> bool {
        let queued = |terminal: &Terminal| terminal.process().map_or(0, Child::queued);
        let before = queued(self);
        if let Some(running) = self.running.as_ref().filter(|_| before > 0) {
            self.children.flush(running.key, cx, self.now);
        }
        queued(self) < before
    }

    fn show(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = self.viewers.flush(cx);
        if let Some(pipe) = &mut self.stdout
            && !pipe.queue.is_empty()
        {
            match pipe.sink.poll_write(cx, &[IoSlice::new(&pipe.queue)]) {
                Poll::Pending => {}
                Poll::Ready(Ok(count)) => {
                    pipe.queue.advance(count);
                    moved = true;
                }
                // stdout has no reader any more; the agent continues.
                Poll::Ready(Err(_)) => self.stdout = None,
            }
        }
        moved
    }
}

/// Cuts after this many line ends.
fn pieces(bytes: &[u8], lines_max: usize) -> impl Iterator<Item = &[u8]> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let end = memchr::memchr_iter(b'\n', rest).nth(lines_max - 1).map_or(rest.len(), |at| at + 1);
        let (piece, later) = rest.split_at(end);
        rest = later;
        Some(piece)
    })
}

/// Appends, and forgets all but the last `max` bytes.
fn keep_last(kept: &mut Vec<u8>, bytes: &[u8], max: usize) {
    let bytes = &bytes[bytes.len().saturating_sub(max)..];
    let excess = (kept.len() + bytes.len()).saturating_sub(max);
    kept.drain(..excess.min(kept.len()));
    kept.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_add_up_to_the_whole() {
        let text = b"a\nb\nc\n\nd";
        for (lines_max, expected) in [(1, 5), (2, 3), (3, 2), (9, 1)] {
            let cut: Vec<&[u8]> = pieces(text, lines_max).collect();
            assert_eq!((cut.len(), cut.concat()), (expected, text.to_vec()), "{lines_max}");
        }
        assert_eq!(pieces(b"", 1).count(), 0);
    }

    #[test]
    fn the_last_bytes_are_kept() {
        let mut kept = Vec::new();
        for piece in [&b"abc"[..], b"", b"defgh", b"i"] {
            keep_last(&mut kept, piece, 4);
        }
        assert_eq!(kept, b"fghi");
    }
}
