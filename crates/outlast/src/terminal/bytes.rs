//! Bytes between the agent's terminal and everybody who looks at it.

use std::{
    io::IoSlice,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::{Buf, BytesMut};
use outlast_core::{agent::TAIL_MAX, life, session::Event, terminal, waiting};

use super::{Terminal, alternate::keep_last, screen::Screen};
use crate::os::Sink;

/// Room made for one read of the agent's terminal, which hands over no more than this.
const READ_ROOM: usize = 64 << 10;
/// So much is read before it is passed on, if it is there. Above this, what the agent is to wait for makes it wait.
pub(super) const SHOWN_HIGH: usize = 16 << 10;
/// The model may be so much behind what is shown,
const UNSEEN_MAX: usize = 512 << 10;
/// and for so long, while nobody needs it.
const UNSEEN_FOR: Duration = Duration::from_millis(25);
/// So long after it showed something an agent without hooks is looked at for the conversation it is in.
const LEARN_AFTER: Duration = Duration::from_secs(1);
/// So often bytes are carried before anything else is looked at.
const ROUNDS_MAX: usize = 16;

/// A stdout that is no terminal: it gets every byte, and sets the pace.
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
}

impl Terminal {
    pub(super) fn carry(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        for _ in 0..ROUNDS_MAX {
            let mut carried = self.type_to_agent(cx);
            // A terminal hands over little at a time; several reads make one write.
            while self.listen_to_agent(cx) {
                carried = true;
            }
            let late = self.viewers.spread(&self.fresh);
            carried |= self.show(cx);
            // Last, so that nobody waits for it.
            self.take_in();
            for key in late {
                self.see(terminal::Event::FellBehind { key });
            }
            for key in self.viewers.take_drained() {
                self.see(terminal::Event::Drained { key });
            }
            // What came of it may have words of ours.
            carried |= !self.fresh.is_empty();
            if !carried {
                break;
            }
            moved = true;
        }
        moved
    }

    fn listen_to_agent(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(child) = &mut self.child else { return false };
        let is_full = self.fresh.len() >= SHOWN_HIGH
            || self.viewers.is_held_up(SHOWN_HIGH)
            || self.stdout.as_ref().is_some_and(|pipe| pipe.queue.len() >= SHOWN_HIGH);
        // What it says before we heard that it started waits until then. What one that ended has written is taken in
        // whole: its terminal goes with it.
        if child.pid == 0 || (is_full && !child.is_ending) {
            return false; // Freed room wakes us.
        }
        let Some(stdout) = &mut child.stdout else { return false };
        if self.fresh.capacity() - self.fresh.len() < READ_ROOM {
            self.fresh.reserve(READ_ROOM);
        }
        let before = self.fresh.len();
        let Poll::Ready(read) = stdout.poll_read(cx, &mut self.fresh) else { return false };
        let key = child.key;
        // The end of a terminal is an error on some systems.
        if !read.is_ok_and(|count| count > 0) {
            child.stdout = None;
            self.live(key, life::Event::StdoutClosed);
            return true;
        }
        let new = &self.fresh[before..];
        self.alternate.pass(new);
        // Not what is ours among it.
        if let Some(pipe) = &mut self.stdout {
            pipe.queue.extend_from_slice(new);
        }
        if self.agent.tells_its_conversation() {
            keep_last(&mut child.tail, new, TAIL_MAX);
        }
        if self.agent.has_files() && !child.has_reported && self.learns_at.is_none() {
            self.learns_at = Some(self.now + LEARN_AFTER);
        }
        if child.prompt.as_mut().is_some_and(|prompt| prompt.is_in(new)) {
            child.prompt = None;
            self.tell(Event::PromptShown);
        }
        true
    }

    /// Hands what was shown to the model, which may take its time.
    fn take_in(&mut self) {
        if self.fresh.is_empty() {
            return;
        }
        self.viewers.note_alternate(self.alternate.is_on);
        if self.screen.is_some() {
            self.unseen.extend_from_slice(&self.fresh);
        }
        self.fresh.clear();
        // A person who is alone with the agent needs no model; later there may be less to do, because most has passed.
        let may_wait = self.viewers.is_owner_alone() && !self.waiting.wants_text() && self.unseen.len() < UNSEEN_MAX;
        if may_wait {
            self.unseen_since.get_or_insert(self.now);
        } else {
            self.catch_up();
        }
        self.watch(waiting::Event::Output);
    }

    /// When the model is to be up to date at the latest, though nobody asks.
    pub(super) fn catches_up_at(&self) -> Option<Instant> {
        self.unseen_since.map(|since| since + UNSEEN_FOR)
    }

    /// Brings the model, and whoever depends on it, up to date.
    pub(super) fn catch_up(&mut self) {
        self.unseen_since = None;
        let Some(screen) = self.screen.as_mut().filter(|_| !self.unseen.is_empty()) else { return };
        let mut unseen = std::mem::take(&mut self.unseen);
        let was_alternate = screen.modes().alternate;
        let is_alone = !self.viewers.has_person();
        let mut answers = Vec::new();
        let mut found = Vec::new();
        if self.waiting.wants_text() {
            // No words may leave the screen unseen.
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
        if let Some(child) = self.child.as_mut().filter(|child| !answers.is_empty() && child.stdin.is_some()) {
            child.typed.extend_from_slice(&answers);
        }
        if has_left_alternate {
            self.see(terminal::Event::LeftAlternate);
        }
        self.see(terminal::Event::Shown);
        self.act_on_watch(found);
    }

    /// The screen as it is now, if it is kept.
    pub(super) fn screen(&mut self) -> Option<&mut Screen> {
        self.catch_up();
        self.screen.as_mut()
    }

    fn type_to_agent(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(child) = &mut self.child else { return false };
        if child.typed.is_empty() {
            return false;
        }
        let Some(stdin) = &mut child.stdin else {
            child.typed.clear();
            return false;
        };
        match stdin.poll_write(cx, &[IoSlice::new(&child.typed)]) {
            Poll::Pending => return false,
            Poll::Ready(Ok(count)) => child.typed.advance(count),
            Poll::Ready(Err(_)) => {
                // It hung up; its end is about to show.
                child.stdin = None;
                child.typed.clear();
            }
        }
        true
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
                // Nobody looks any more; the agent goes on.
                Poll::Ready(Err(_)) => self.stdout = None,
            }
        }
        moved
    }
}

/// Cuts after so many ends of lines.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_all_there() {
        let text = b"a\nb\nc\n\nd";
        for (lines_max, expected) in [(1, 5), (2, 3), (3, 2), (9, 1)] {
            let cut: Vec<&[u8]> = pieces(text, lines_max).collect();
            assert_eq!((cut.len(), cut.concat()), (expected, text.to_vec()), "{lines_max}");
        }
        assert_eq!(pieces(b"", 1).count(), 0);
    }
}
