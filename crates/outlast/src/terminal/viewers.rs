//! Those who look at an agent's terminal: the terminal outlast was started from, and whoever attached since.
//!
//! What goes to one who attached is a frame: a length as everywhere on the socket, a letter, and what it is about.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::IoSlice,
    task::{Context, Poll},
    time::Instant,
};

use bytes::{Buf, Bytes, BytesMut};
use outlast_core::{
    keys::{DetachKey, Leaving, Replies},
    terminal::{Action, Event, Role, Terminal, Way},
};
use serde_json::{Value, json};

use crate::{
    control::{
        server::Taken,
        wire::{self, Frames},
    },
    os::{self, Outer, OuterEvent, Peer, Size},
};

/// The terminal outlast was started from.
pub(super) const OWNER: u64 = 0;
/// Who comes when so many are there is told so.
pub(super) const VIEWERS_MAX: usize = 16;
/// One for whom more than this waits is shown no more until it has caught up.
const QUEUE_MAX: usize = 256 << 10;
/// Room made for one read of what is typed; a terminal hands over no more than this.
const KEYS_ROOM: usize = 4 << 10;

#[derive(Debug)]
pub(super) struct Viewers {
    machine: Terminal,
    all: BTreeMap<u64, Viewer>,
    next: u64,
    drained: BTreeSet<u64>,
    is_alternate: bool,
}

#[derive(Debug)]
struct Viewer {
    end: End,
    queue: BytesMut,
    replies: Replies,
    size: Size,
    /// Which terminal it is, where that is known: one that comes back has its scrollback still.
    terminal: Option<String>,
    /// It is gone; told when it is next asked for news.
    is_lost: bool,
}

#[derive(Debug)]
enum End {
    Own {
        outer: Outer,
        leaving: Leaving,
        /// Where the next keys are read to; empty in between.
        keys: BytesMut,
    },
    Far {
        peer: Peer,
        frames: Frames,
    },
}

/// What came from one of them.
#[derive(Debug)]
pub(super) enum Heard {
    Typed(BytesMut),
    Resized(Size),
    /// It wants a picture.
    Blank,
    /// The key that leaves was pressed.
    Leaves,
    Lost,
    /// It typed, and may only watch.
    Refused,
    Outer(OuterEvent),
}

impl Viewers {
    pub(super) fn new(size: Size) -> Viewers {
        Viewers {
            machine: Terminal::new(size),
            all: BTreeMap::new(),
            next: OWNER + 1,
            drained: BTreeSet::new(),
            is_alternate: false,
        }
    }

    /// The terminal outlast was started from is there from the start.
    pub(super) fn begin(&mut self, outer: Outer, detach_key: &DetachKey, now: Instant) {
        let size = outer.size();
        let leaving = Leaving::new(detach_key.clone());
        let end = End::Own { outer, leaving, keys: BytesMut::new() };
        self.add(OWNER, end, BytesMut::new(), size, os::terminal_identity());
        // It has the size already, and nothing was shown before.
        self.machine.handle(Event::Attached { key: OWNER, role: Role::Owner, size, on_alternate: false }, now);
    }

    /// One who asked for it over the socket.
    pub(super) fn attach(&mut self, taken: Taken, size: Size, terminal: Option<String>) -> u64 {
        let key = self.next;
        self.next += 1;
        self.add(key, End::Far { peer: taken.peer, frames: taken.frames }, taken.outbox, size, terminal);
        key
    }

    fn add(&mut self, key: u64, end: End, queue: BytesMut, size: Size, terminal: Option<String>) {
        self.all.insert(key, Viewer { end, queue, replies: Replies::default(), size, terminal, is_lost: false });
    }

    pub(super) fn terminal_of(&self, key: u64) -> Option<&str> {
        self.all.get(&key)?.terminal.as_deref()
    }

    /// It gets every byte as it is.
    pub(super) fn is_exact(&self, key: u64) -> bool {
        self.machine.way(key) == Some(Way::Exact)
    }

    pub(super) fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        if let Event::Resized { key, size } = &event
            && let Some(viewer) = self.all.get_mut(key)
        {
            viewer.size = *size;
        }
        self.machine.handle(event, now)
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.machine.deadline()
    }

    pub(super) fn size(&self) -> Size {
        self.machine.size()
    }

    pub(super) fn size_of(&self, key: u64) -> Size {
        self.all.get(&key).map_or(self.size(), |viewer| viewer.size)
    }

    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    pub(super) fn is_owner_alone(&self) -> bool {
        self.machine.sets_the_pace(OWNER)
    }

    pub(super) fn has_person(&self) -> bool {
        self.machine.has_person()
    }

    pub(super) fn outer(&self) -> Option<&Outer> {
        match &self.all.get(&OWNER)?.end {
            End::Own { outer, .. } => Some(outer),
            End::Far { .. } => None,
        }
    }

    pub(super) fn remove(&mut self, key: u64) -> Option<Outer> {
        match self.all.remove(&key)?.end {
            End::Own { outer, .. } => Some(outer),
            End::Far { .. } => None,
        }
    }

    /// To all who get bytes as they are. Those for whom too much waits by now.
    pub(super) fn spread(&mut self, bytes: &[u8]) -> Vec<u64> {
        let mut late = Vec::new();
        if bytes.is_empty() {
            return late;
        }
        for (key, viewer) in &mut self.all {
            if self.machine.way(*key) != Some(Way::Exact) {
                continue;
            }
            viewer.put(b'o', bytes);
            if viewer.queue.len() > QUEUE_MAX && !self.machine.sets_the_pace(*key) {
                late.push(*key);
            }
        }
        late
    }

    /// A picture of the screen.
    pub(super) fn show(&mut self, key: u64, picture: &[u8]) {
        if let Some(viewer) = self.all.get_mut(&key) {
            for piece in picture.chunks(wire::FRAME_MAX / 2) {
                viewer.put(b'o', piece);
            }
        }
    }

    /// It was refused something.
    pub(super) fn refuse(&mut self, key: u64, code: &str, message: &str) {
        self.tell(key, b'r', &json!({"code": code, "message": message}));
    }

    /// It is over for all of them.
    pub(super) fn end(&mut self, code: u8) {
        let keys: Vec<u64> = self.all.keys().copied().collect();
        for key in keys {
            self.tell(key, b'e', &json!({"code": code}));
        }
    }

    fn tell(&mut self, key: u64, kind: u8, about: &Value) {
        if let Some(viewer) = self.all.get_mut(&key)
            && matches!(viewer.end, End::Far { .. })
        {
            viewer.put(kind, about.to_string().as_bytes());
        }
    }

    /// Whether the agent is to wait for somebody.
    pub(super) fn is_held_up(&self, high: usize) -> bool {
        self.all.iter().any(|(key, viewer)| viewer.queue.len() >= high && self.machine.sets_the_pace(*key))
    }

    pub(super) fn are_drained(&self) -> bool {
        self.all.values().all(|viewer| viewer.queue.is_empty() || viewer.is_lost)
    }

    /// Those who have been sent all that waited for them, since this was last asked.
    pub(super) fn take_drained(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.drained)
    }

    /// What must be undone if we cannot do it any more.
    pub(super) fn note_alternate(&mut self, is_alternate: bool) {
        if std::mem::replace(&mut self.is_alternate, is_alternate) != is_alternate
            && let Some(outer) = self.outer()
        {
            outer.note_alternate(is_alternate);
        }
    }

    pub(super) fn flush(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        for (key, viewer) in &mut self.all {
            if viewer.queue.is_empty() || viewer.is_lost {
                continue;
            }
            loop {
                let written = match &mut viewer.end {
                    End::Own { outer, .. } => outer.sink.poll_write(cx, &[IoSlice::new(&viewer.queue)]),
                    End::Far { peer, .. } => peer.poll_write(cx, &viewer.queue),
                };
                match written {
                    Poll::Pending => break,
                    Poll::Ready(Ok(count)) => {
                        viewer.queue.advance(count);
                        moved = true;
                    }
                    Poll::Ready(Err(_)) => {
                        viewer.queue.clear();
                        // Its own terminal tells by itself that it is gone.
                        viewer.is_lost = matches!(viewer.end, End::Far { .. });
                        moved = true;
                    }
                }
                let is_far = matches!(viewer.end, End::Far { .. });
                // One write is enough for a terminal: the agent is listened to in between.
                if viewer.queue.is_empty() || !is_far {
                    break;
                }
            }
            if viewer.queue.is_empty() {
                self.drained.insert(*key);
            }
        }
        moved
    }

    /// What comes next from one of them. `listens`: also to what is typed.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, listens: bool) -> Poll<(u64, Heard)> {
        for (key, viewer) in &mut self.all {
            let heard = viewer.poll(cx, listens, self.machine.may_type(*key));
            let Poll::Ready(mut heard) = heard else { continue };
            if let Heard::Typed(bytes) = &mut heard
                && !self.machine.answers(*key)
            {
                // Its terminal was not asked.
                *bytes = BytesMut::from(&viewer.replies.strip(bytes)[..]);
            }
            return Poll::Ready((*key, heard));
        }
        Poll::Pending
    }
}

impl Viewer {
    fn put(&mut self, kind: u8, bytes: &[u8]) {
        if self.is_lost {
            return;
        }
        if let End::Far { .. } = self.end {
            self.queue.extend_from_slice(&wire::viewer_head(kind, bytes.len()));
        }
        self.queue.extend_from_slice(bytes);
    }

    fn poll(&mut self, cx: &mut Context<'_>, listens: bool, may_type: bool) -> Poll<Heard> {
        if self.is_lost {
            return Poll::Ready(Heard::Lost);
        }
        match &mut self.end {
            End::Own { outer, leaving, keys } => {
                if let Poll::Ready(event) = outer.poll_event(cx) {
                    return Poll::Ready(Heard::Outer(event));
                }
                if !listens {
                    return Poll::Pending;
                }
                keys.reserve(KEYS_ROOM);
                let Poll::Ready(read) = outer.source.poll_read(cx, keys) else { return Poll::Pending };
                let keys = keys.split();
                if !read.is_ok_and(|count| count > 0) {
                    return Poll::Ready(Heard::Lost);
                }
                if leaving.is_plain(&keys) {
                    return Poll::Ready(Heard::Typed(keys));
                }
                let passed = leaving.pass(&keys);
                if passed.leaves {
                    return Poll::Ready(Heard::Leaves);
                }
                Poll::Ready(Heard::Typed(BytesMut::from(&passed.bytes[..])))
            }
            End::Far { peer, frames } => loop {
                match frames.next_frame() {
                    Ok(Some(frame)) => match said(&frame) {
                        Some(Heard::Typed(_)) if !may_type => return Poll::Ready(Heard::Refused),
                        Some(heard) => return Poll::Ready(heard),
                        // Something of a later version.
                        None => continue,
                    },
                    Ok(None) => {}
                    Err(_) => return Poll::Ready(Heard::Lost),
                }
                if !listens {
                    return Poll::Pending;
                }
                let Poll::Ready(read) = peer.poll_read(cx, frames.room()) else { return Poll::Pending };
                if !read.is_ok_and(|count| count > 0) {
                    return Poll::Ready(Heard::Lost);
                }
            },
        }
    }
}

fn said(frame: &Bytes) -> Option<Heard> {
    match frame.split_first()? {
        (b'i', keys) => Some(Heard::Typed(BytesMut::from(keys))),
        (b'p', _) => Some(Heard::Blank),
        (b's', size) => wire::viewer_size(size).map(Heard::Resized),
        _ => None,
    }
}
