//! The viewers of an agent's terminal: the terminal that outlast was started from, and those that attached since.
//!
//! Data for a viewer that attached is sent in frames: a length as everywhere on the socket, a letter, and the
//! payload.

#[cfg(unix)]
use std::io;
use std::{
    collections::{BTreeMap, BTreeSet},
    io::IoSlice,
    task::{Context, Poll},
    time::Instant,
};

use bytes::{Buf, Bytes, BytesMut};
use outlast_control::{
    server::Taken,
    wire::{self, Frames},
};
#[cfg(unix)]
use outlast_core::{keys::SavedDetachFilter, saved::Octets, terminal};
use outlast_core::{
    keys::{DetachFilter, DetachKey, ReplyFilter},
    terminal::{Action, Delivery, Event, Role, Terminal},
};
use outlast_os::{self as os, Outer, OuterEvent, Peer, Size};
#[cfg(unix)]
use outlast_os::{
    SavedOuter,
    handover::{Handover, Received},
};
#[cfg(unix)]
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The terminal that outlast was started from.
pub(super) const OWNER: u64 = 0;
/// Further viewers are refused with this reason.
pub(super) const VIEWERS_MAX: usize = 16;
/// A viewer with a longer queue gets nothing more until the queue is empty.
const QUEUE_MAX: usize = 256 << 10;
/// Buffer for one read of typed keys; a terminal returns no more than this.
const KEYS_ROOM: usize = 4 << 10;

#[derive(Debug)]
pub(crate) struct Viewers {
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
    replies: ReplyFilter,
    size: Size,
    /// Which terminal it is, where that is known: a terminal that attaches again still has its scrollback.
    terminal: Option<String>,
    /// It is gone; reported at the next poll.
    is_lost: bool,
}

#[derive(Debug)]
enum End {
    Own {
        outer: Outer,
        detach_filter: DetachFilter,
        /// Buffer for the next keys; empty in between.
        keys: BytesMut,
    },
    Far {
        peer: Peer,
        frames: Frames,
    },
}

/// The viewers as saved state. Their connections are kept by a `Handover`.
#[cfg(unix)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedViewers {
    machine: terminal::Saved,
    all: Vec<SavedViewer>,
    next: u64,
    drained: BTreeSet<u64>,
    is_alternate: bool,
}

#[cfg(unix)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SavedViewer {
    key: u64,
    end: SavedEnd,
    queue: Octets,
    replies: Octets,
    size: Size,
    terminal: Option<String>,
    is_lost: bool,
}

#[cfg(unix)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SavedEnd {
    Own { outer: SavedOuter, detach_filter: SavedDetachFilter },
    Far { peer: i32, frames: Octets },
}

#[cfg(unix)]
impl Viewers {
    /// `None` if a thread reads the terminal that outlast was started from.
    pub(super) fn save(&self, handover: &mut Handover, now: Instant) -> Option<SavedViewers> {
        let mut all = Vec::new();
        for (key, viewer) in &self.all {
            let end = match &viewer.end {
                End::Own { outer, detach_filter, .. } => {
                    SavedEnd::Own { outer: outer.save(handover)?, detach_filter: detach_filter.save() }
                }
                End::Far { peer, frames } => {
                    SavedEnd::Far { peer: peer.keep(handover), frames: Octets::of(frames.rest()) }
                }
            };
            all.push(SavedViewer {
                key: *key,
                end,
                queue: Octets::of(&viewer.queue),
                replies: viewer.replies.save(),
                size: viewer.size,
                terminal: viewer.terminal.clone(),
                is_lost: viewer.is_lost,
            });
        }
        Some(SavedViewers {
            machine: self.machine.save(now),
            all,
            next: self.next,
            drained: self.drained.clone(),
            is_alternate: self.is_alternate,
        })
    }

    /// Must be called within the runtime.
    pub(crate) fn restore(
        saved: SavedViewers,
        detach_key: &DetachKey,
        received: &mut Received,
        now: Instant,
    ) -> io::Result<Viewers> {
        let mut all = BTreeMap::new();
        for viewer in saved.all {
            let end = match viewer.end {
                SavedEnd::Own { outer, detach_filter } => End::Own {
                    outer: Outer::restore(outer, received)?,
                    detach_filter: DetachFilter::restore(detach_key.clone(), detach_filter),
                    keys: BytesMut::new(),
                },
                SavedEnd::Far { peer, frames } => {
                    End::Far { peer: Peer::restore(received, peer)?, frames: Frames::after(&frames.bytes()) }
                }
            };
            let restored = Viewer {
                end,
                queue: viewer.queue.bytes().into(),
                replies: ReplyFilter::restore(viewer.replies),
                size: viewer.size,
                terminal: viewer.terminal,
                is_lost: viewer.is_lost,
            };
            all.insert(viewer.key, restored);
        }
        Ok(Viewers {
            machine: Terminal::restore(saved.machine, now),
            all,
            next: saved.next,
            drained: saved.drained,
            is_alternate: saved.is_alternate,
        })
    }

    /// Whether [`Viewers::save`] is possible.
    pub(super) fn can_be_saved(&self) -> bool {
        self.outer().is_none_or(Outer::can_be_saved)
    }
}

/// What a viewer sent.
#[derive(Debug)]
pub(super) enum ViewerEvent {
    Typed(BytesMut),
    Resized(Size),
    /// It needs a picture.
    Blank,
    /// The detach key was pressed.
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

    /// Adds the terminal that outlast was started from, before any output.
    pub(super) fn begin(&mut self, outer: Outer, detach_key: &DetachKey, now: Instant) {
        let size = outer.size();
        let detach_filter = DetachFilter::new(detach_key.clone());
        let end = End::Own { outer, detach_filter, keys: BytesMut::new() };
        self.add(OWNER, end, BytesMut::new(), size, os::terminal_identity());
        // It has the size already, and nothing was shown before.
        self.machine.handle(Event::Attached { key: OWNER, role: Role::Owner, size, on_alternate: false }, now);
    }

    /// Adds a viewer that asked for it over the socket.
    pub(super) fn attach(&mut self, taken: Taken, size: Size, terminal: Option<String>) -> u64 {
        let key = self.next;
        self.next += 1;
        self.add(key, End::Far { peer: taken.peer, frames: taken.frames }, taken.outbox, size, terminal);
        key
    }

    fn add(&mut self, key: u64, end: End, queue: BytesMut, size: Size, terminal: Option<String>) {
        self.all.insert(key, Viewer { end, queue, replies: ReplyFilter::default(), size, terminal, is_lost: false });
    }

    pub(super) fn terminal_of(&self, key: u64) -> Option<&str> {
        self.all.get(&key)?.terminal.as_deref()
    }

    /// Whether it gets every byte unchanged.
    pub(super) fn is_exact(&self, key: u64) -> bool {
        self.machine.way(key) == Some(Delivery::Exact)
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

    /// Sends bytes to all viewers that get them unchanged. Returns those whose queues are now full.
    pub(super) fn spread(&mut self, bytes: &[u8]) -> Vec<u64> {
        let mut late = Vec::new();
        if bytes.is_empty() {
            return late;
        }
        for (key, viewer) in &mut self.all {
            if self.machine.way(*key) != Some(Delivery::Exact) {
                continue;
            }
            viewer.put(b'o', bytes);
            if viewer.queue.len() > QUEUE_MAX && !self.machine.sets_the_pace(*key) {
                late.push(*key);
            }
        }
        late
    }

    /// Sends a picture of the screen.
    pub(super) fn show(&mut self, key: u64, picture: &[u8]) {
        if let Some(viewer) = self.all.get_mut(&key) {
            for piece in picture.chunks(wire::FRAME_MAX / 2) {
                viewer.put(b'o', piece);
            }
        }
    }

    /// Tells a viewer why a request was refused.
    pub(super) fn refuse(&mut self, key: u64, code: &str, message: &str) {
        self.tell(key, b'r', &json!({"code": code, "message": message}));
    }

    /// Tells all viewers that the session ended.
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

    /// Whether the agent must wait for a viewer.
    pub(super) fn is_held_up(&self, high: usize) -> bool {
        self.all.iter().any(|(key, viewer)| viewer.queue.len() >= high && self.machine.sets_the_pace(*key))
    }

    pub(super) fn are_drained(&self) -> bool {
        self.all.values().all(|viewer| viewer.queue.is_empty() || viewer.is_lost)
    }

    /// The viewers whose queues became empty since the last call.
    pub(super) fn take_drained(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.drained)
    }

    /// Notes what must be undone on the owner's terminal if outlast is killed.
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
                        // The owner's terminal reports by itself that it is gone.
                        viewer.is_lost = matches!(viewer.end, End::Far { .. });
                        moved = true;
                    }
                }
                let is_far = matches!(viewer.end, End::Far { .. });
                // One write is enough for a terminal: the agent is read in between.
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

    /// The next input of any viewer. `listens`: keys are read, too.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, listens: bool) -> Poll<(u64, ViewerEvent)> {
        for (key, viewer) in &mut self.all {
            let heard = viewer.poll(cx, listens, self.machine.may_type(*key));
            let Poll::Ready(mut heard) = heard else { continue };
            if let ViewerEvent::Typed(bytes) = &mut heard
                && !self.machine.answers(*key)
            {
                // The agent's query was not sent to this terminal.
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

    fn poll(&mut self, cx: &mut Context<'_>, listens: bool, may_type: bool) -> Poll<ViewerEvent> {
        if self.is_lost {
            return Poll::Ready(ViewerEvent::Lost);
        }
        match &mut self.end {
            End::Own { outer, detach_filter, keys } => {
                if let Poll::Ready(event) = outer.poll_event(cx) {
                    return Poll::Ready(ViewerEvent::Outer(event));
                }
                if !listens {
                    return Poll::Pending;
                }
                keys.reserve(KEYS_ROOM);
                let Poll::Ready(read) = outer.source.poll_read(cx, keys) else { return Poll::Pending };
                let keys = keys.split();
                if !read.is_ok_and(|count| count > 0) {
                    return Poll::Ready(ViewerEvent::Lost);
                }
                if detach_filter.is_plain(&keys) {
                    return Poll::Ready(ViewerEvent::Typed(keys));
                }
                let passed = detach_filter.pass(&keys);
                if passed.detaches {
                    return Poll::Ready(ViewerEvent::Leaves);
                }
                Poll::Ready(ViewerEvent::Typed(BytesMut::from(&passed.bytes[..])))
            }
            End::Far { peer, frames } => loop {
                match frames.next_frame() {
                    Ok(Some(frame)) => match said(&frame) {
                        Some(ViewerEvent::Typed(_)) if !may_type => return Poll::Ready(ViewerEvent::Refused),
                        Some(heard) => return Poll::Ready(heard),
                        // A frame of a later version.
                        None => continue,
                    },
                    Ok(None) => {}
                    Err(_) => return Poll::Ready(ViewerEvent::Lost),
                }
                if !listens {
                    return Poll::Pending;
                }
                let Poll::Ready(read) = peer.poll_read(cx, frames.room()) else { return Poll::Pending };
                if !read.is_ok_and(|count| count > 0) {
                    return Poll::Ready(ViewerEvent::Lost);
                }
            },
        }
    }
}

fn said(frame: &Bytes) -> Option<ViewerEvent> {
    match frame.split_first()? {
        (b'i', keys) => Some(ViewerEvent::Typed(BytesMut::from(keys))),
        (b'p', _) => Some(ViewerEvent::Blank),
        (b's', size) => wire::viewer_size(size).map(ViewerEvent::Resized),
        _ => None,
    }
}
