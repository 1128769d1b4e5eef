//! The interface of streams to the driver: what happened, what is to be done, limits and counts. It decides nothing.

use std::time::{Duration, Instant};

use bytes::Bytes;

use super::{Instance, Stream};

/// Bounds, and what happens at each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a packet, at least [`PACKET_MIN`](super::PACKET_MIN). A longer message is split.
    pub packet_max: usize,
    /// Bytes of a message or of a hello. A stream on which a longer one is sent ends.
    pub message_max: usize,
    /// Bytes of a stream that the driver of the peer has not consumed. A message that was begun below it may exceed it;
    /// further messages wait. As many bytes may wait here before [`Streams::is_full`](super::Streams::is_full). Each
    /// message costs some bytes more than its length, so that the number of messages is bounded too.
    pub window: usize,
    /// Bytes of packets to one peer that it has not acknowledged, but always one packet. Beyond it messages wait in the
    /// queues of their streams.
    pub unacked_max: usize,
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// The connection to the message server is up. At the start it is not.
    Connected,
    Disconnected,
    /// Opens a stream with a handle from [`Streams::next_stream`](super::Streams::next_stream). To our own instance it
    /// works the same, without packets.
    Opened {
        stream: Stream,
        to: Instance,
        hello: Bytes,
    },
    Sent {
        stream: Stream,
        message: Bytes,
    },
    /// The driver has dealt with delivered messages of so many bytes. To be told of every message, also of an empty one,
    /// but not of the hello.
    Consumed {
        stream: Stream,
        bytes: usize,
    },
    /// The driver has finished with the stream, in both directions. What was sent before is still delivered to the peer. No
    /// later action names the stream.
    Closed {
        stream: Stream,
    },
    /// The same, but what waits is dropped.
    Aborted {
        stream: Stream,
        why: String,
    },
    /// A packet was published to us.
    Received {
        from: Instance,
        packet: Bytes,
    },
    ProbeAnswered {
        of: Instance,
        packet: Bytes,
    },
    /// `is_dead`: no process receives what is published to this instance. Otherwise no answer came in time.
    ProbeFailed {
        of: Instance,
        is_dead: bool,
    },
    /// It deregistered, or its replica has another instance now.
    Left {
        instance: Instance,
    },
    TimePassed,
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    Publish {
        to: Instance,
        packet: Bytes,
    },
    /// Ask and wait so long: [`Event::ProbeAnswered`] or [`Event::ProbeFailed`] follows.
    Probe {
        to: Instance,
        packet: Bytes,
        within: Duration,
    },
    /// A peer opened a stream.
    Accept {
        stream: Stream,
        from: Instance,
        hello: Bytes,
    },
    Deliver {
        stream: Stream,
        message: Bytes,
    },
    /// [`Streams::is_full`](super::Streams::is_full) is false again.
    Room {
        stream: Stream,
    },
    /// The last action of a stream that the driver itself did not end.
    End {
        stream: Stream,
        how: End,
        /// False: nothing of the stream was published, not even the hello, so the peer does not know it.
        is_opened: bool,
        /// Messages of which no byte was published, in their order. The hello is not among them.
        unsent: Vec<Bytes>,
    },
}

/// How a stream ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The peer closed it, after all that it sent.
    Closed,
    /// The peer aborted it.
    Aborted(String),
    /// The peer has ended or cannot be reached, or a limit was exceeded.
    Lost(String),
}

/// What happened since the start, and what is open.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets of channels that were given up; dropped.
    pub late_packets: u64,
    /// Messages on streams that had ended; dropped.
    pub late_messages: u64,
    /// Packets that were received before; dropped.
    pub duplicates: u64,
    /// Packets after a missing one; dropped, as the peer sends them again.
    pub out_of_order: u64,
    /// Packets that were sent again.
    pub resent: u64,
    /// Packets that are not in the format; dropped.
    pub unreadable: u64,
    pub peers: Vec<PeerCounts>,
}

/// One peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerCounts {
    pub instance: Instance,
    /// Both sides know the number of the other.
    pub is_established: bool,
    pub streams: usize,
    /// Bytes that the peer has not acknowledged.
    pub unacked: usize,
    /// Bytes that wait in queues of streams.
    pub queued: usize,
    /// None: nothing was received yet.
    pub heard: Option<Instant>,
}
