//! What one stream sends: the messages that wait, how many the peer may get, and their frames. It does not know channels.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

use super::{
    Limits,
    packet::{FRAME_HEAD_MAX, Frame, Wire},
};

/// What each message costs in a window, beside its bytes: so that a window also bounds the number of messages.
pub(super) const MESSAGE_COST: usize = 64;
/// So many windows, and two of the longest messages, may wait in a queue. With more the stream is lost.
const QUEUE_WINDOWS: usize = 4;
/// A message is split only if at least so many bytes of it fit into the packet.
const PART_MIN: usize = 1024;

pub(super) fn cost(message_len: usize) -> usize {
    message_len + MESSAGE_COST
}

#[derive(Debug)]
pub(super) struct Outgoing {
    queue: VecDeque<Bytes>,
    /// The first of the queue is the hello.
    has_hello: bool,
    /// Bytes of the first of the queue that are published.
    begun: usize,
    /// The cost of what waits.
    queued: usize,
    /// The cost of what is published, or begun, and not consumed by the peer's driver.
    unconsumed: usize,
    is_full: bool,
    ending: Ending,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Ending {
    No,
    /// After all that waits.
    Close,
    Abort(String),
}

/// What became of an attempt to write frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wrote {
    /// Nothing more can be sent now.
    All,
    /// There is more.
    Some,
    /// The packet is full.
    NoRoom,
    /// The last frame of the stream.
    Last,
}

impl Outgoing {
    pub(super) fn opening(hello: Bytes, limits: &Limits) -> Outgoing {
        let queued = cost(hello.len());
        let is_full = queued >= limits.window;
        Outgoing { queue: VecDeque::from([hello]), has_hello: true, queued, is_full, ..Outgoing::accepted() }
    }

    pub(super) fn accepted() -> Outgoing {
        let (queue, ending) = (VecDeque::new(), Ending::No);
        Outgoing { queue, has_hello: false, begun: 0, queued: 0, unconsumed: 0, is_full: false, ending }
    }

    /// Whether a byte of the hello is published.
    pub(super) fn is_opened(&self) -> bool {
        !self.has_hello || self.begun > 0
    }

    /// Whether the hello waits, or a part of it.
    pub(super) fn is_opening(&self) -> bool {
        self.has_hello
    }

    /// Whether only the end of the stream, or what waits before it, is still to be sent.
    pub(super) fn is_ending(&self) -> bool {
        self.ending != Ending::No
    }

    pub(super) fn is_full(&self) -> bool {
        self.is_full
    }

    pub(super) fn queued(&self) -> usize {
        self.queued
    }

    /// The reason, if the stream cannot continue with this message in the queue.
    pub(super) fn push(&mut self, message: Bytes, limits: &Limits) -> Result<(), String> {
        let queued_max = QUEUE_WINDOWS * limits.window + 2 * limits.message_max;
        let verdict = match message.len() {
            len if len > limits.message_max => Err(too_long(len as u64, limits)),
            len if self.queued + cost(len) > queued_max => Err(format!("more than {queued_max} bytes wait to be sent")),
            _ => Ok(()),
        };
        self.queued += cost(message.len());
        self.queue.push_back(message);
        self.is_full |= self.queued >= limits.window;
        verdict
    }

    /// The stream is closed after all that waits.
    pub(super) fn close(&mut self) {
        self.ending = Ending::Close;
    }

    /// The stream ends with the next frame.
    pub(super) fn abort(&mut self, why: String) {
        self.unsent();
        self.ending = Ending::Abort(why);
    }

    /// Takes what waits: the messages of which nothing is published.
    pub(super) fn unsent(&mut self) -> Vec<Bytes> {
        let taken = usize::from(self.has_hello || self.begun > 0).min(self.queue.len());
        self.queue.drain(..taken);
        self.queued = 0;
        self.queue.drain(..).collect()
    }

    /// The peer's driver has consumed messages. False if it cannot have.
    pub(super) fn consumed(&mut self, cost: u64) -> bool {
        let cost = usize::try_from(cost).unwrap_or(usize::MAX);
        let is_possible = cost <= self.unconsumed;
        self.unconsumed = self.unconsumed.saturating_sub(cost);
        is_possible
    }

    /// Whether the last message was taken, and the stream closes.
    pub(super) fn is_drained(&self) -> bool {
        self.ending == Ending::Close && self.queue.is_empty()
    }

    /// Whether `is_full` has just become false.
    pub(super) fn takes_room(&mut self, limits: &Limits) -> bool {
        let has_room = self.is_full && self.queued <= limits.window / 2;
        self.is_full &= !has_room;
        has_room
    }

    /// Whether the first of the queue may be sent, or continue.
    fn may_send(&self, limits: &Limits) -> bool {
        self.has_hello || self.begun > 0 || self.unconsumed < limits.window
    }

    /// The next message, if the other end may get it: for a stream within this instance.
    pub(super) fn take(&mut self, limits: &Limits) -> Option<Bytes> {
        if self.unconsumed >= limits.window {
            return None;
        }
        let message = self.queue.pop_front()?;
        self.queued -= cost(message.len());
        self.unconsumed += cost(message.len());
        Some(message)
    }

    /// Writes one message or a part of it, or the end of the stream.
    pub(super) fn write(&mut self, wire: Wire, packet: &mut BytesMut, limits: &Limits) -> Wrote {
        let room = limits.packet_max.saturating_sub(packet.len());
        let Some(room) = room.checked_sub(FRAME_HEAD_MAX) else { return Wrote::NoRoom };
        match (&self.ending, self.queue.front()) {
            (Ending::Abort(why), _) => {
                if why.len() > room {
                    return Wrote::NoRoom;
                }
                Frame::Abort { wire, why }.write(packet);
                Wrote::Last
            }
            (_, Some(message)) if self.may_send(limits) => {
                let left = message.len() - self.begun;
                let len = left.min(room);
                if len < left && len < PART_MIN.min(limits.packet_max / 4) {
                    return Wrote::NoRoom;
                }
                let total = message.len() as u64;
                let part = &message[self.begun..self.begun + len];
                match (self.has_hello, self.begun) {
                    (true, 0) => Frame::Open { wire, total, part }.write(packet),
                    (false, 0) => Frame::Begin { wire, total, part }.write(packet),
                    _ => Frame::Part { wire, part }.write(packet),
                }
                let message_len = message.len();
                self.wrote(len, message_len);
                match self.queue.is_empty() {
                    true if self.ending == Ending::No => Wrote::All,
                    false if !self.may_send(limits) => Wrote::All,
                    _ => Wrote::Some,
                }
            }
            (Ending::Close, None) => {
                Frame::Close { wire }.write(packet);
                Wrote::Last
            }
            _ => Wrote::All,
        }
    }

    /// So many bytes of the first message are published.
    fn wrote(&mut self, len: usize, message_len: usize) {
        if self.begun == 0 && !self.has_hello {
            self.unconsumed += cost(message_len);
        }
        self.begun += len;
        if self.begun == message_len {
            self.queue.pop_front();
            self.queued -= cost(message_len);
            (self.begun, self.has_hello) = (0, false);
        }
    }
}

/// The reason why a stream with such a message ends.
pub(super) fn too_long(len: u64, limits: &Limits) -> String {
    format!("a message of {len} bytes is longer than the limit of {} bytes", limits.message_max)
}
