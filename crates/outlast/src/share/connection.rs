//! One connection between a thin client and its hub: lines in both directions. What they mean is not known here.

use std::{
    io,
    task::{Context, Poll},
};

use bytes::Bytes;
use outlast_os::{
    Sink, Source,
    handover::{Handover, Received},
};
use serde::{Deserialize, Serialize};

use crate::child::{
    lines::{Line, Lines, SavedLines},
    outbox::{Outbox, SavedOutbox},
};

#[derive(Debug)]
pub(super) struct Connection {
    source: Option<Source>,
    lines: Lines,
    sink: Option<Sink>,
    pub outbox: Outbox,
    /// The sink is closed as soon as the outbox is empty.
    is_closing: bool,
}

/// A connection as saved state. Its socket is kept by a [`Handover`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedConnection {
    source: Option<i32>,
    lines: SavedLines,
    sink: Option<i32>,
    outbox: SavedOutbox,
    is_closing: bool,
}

/// What was read.
#[derive(Debug)]
pub(super) enum Inbound {
    Line(Bytes),
    /// A line was too long, so messages are missing.
    TooLong,
    /// The other side sends nothing more.
    Ended,
}

impl Connection {
    /// `early` was read already.
    pub(super) fn new((source, sink): (Source, Sink), early: &[u8]) -> Connection {
        let mut lines = Lines::default();
        lines.room().extend_from_slice(early);
        Connection { source: Some(source), lines, sink: Some(sink), outbox: Outbox::default(), is_closing: false }
    }

    pub(super) fn save(&self, handover: &mut Handover) -> SavedConnection {
        SavedConnection {
            source: self.source.as_ref().and_then(|source| source.keep(handover)),
            lines: self.lines.save(),
            sink: self.sink.as_ref().and_then(|sink| sink.keep(handover)),
            outbox: self.outbox.save(),
            is_closing: self.is_closing,
        }
    }

    /// The connection that the last program kept. Must be called within the runtime.
    pub(super) fn restore(saved: SavedConnection, received: &mut Received) -> io::Result<Connection> {
        Ok(Connection {
            source: saved.source.map(|number| Source::restore(received, number)).transpose()?,
            lines: Lines::default().go_on(saved.lines),
            sink: saved.sink.map(|number| Sink::restore_half(received, number)).transpose()?,
            outbox: Outbox::restore(saved.outbox),
            is_closing: saved.is_closing,
        })
    }

    /// The next line. Ready with [`Inbound::Ended`] once.
    pub(super) fn poll_line(&mut self, cx: &mut Context<'_>) -> Poll<Inbound> {
        loop {
            match self.lines.next_line() {
                Some(Line::Whole(line)) if line.trim_ascii().is_empty() => continue,
                Some(Line::Whole(line)) => return Poll::Ready(Inbound::Line(line)),
                Some(Line::TooLong(_)) => return Poll::Ready(Inbound::TooLong),
                None => {}
            }
            let Some(source) = &mut self.source else { return Poll::Pending };
            match std::task::ready!(source.poll_read(cx, self.lines.room())) {
                Ok(length) if length > 0 => {}
                // An unfinished line was not meant to be read.
                Ok(_) | Err(_) => {
                    self.source = None;
                    return Poll::Ready(Inbound::Ended);
                }
            }
        }
    }

    /// A line that is not written any more can be taken out of the outbox.
    pub(super) fn put(&mut self, line: Bytes, mark: Option<u64>) {
        self.outbox.put(line, mark);
    }

    /// Writes what the other side accepts. An error means that it reads nothing any more.
    pub(super) fn flush(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let Some(sink) = &mut self.sink else { return Ok(()) };
        if !self.outbox.is_empty()
            && let Poll::Ready(Err(error)) = self.outbox.poll_flush(sink, cx)
        {
            self.sink = None;
            return Err(error);
        }
        if self.is_closing && self.outbox.is_empty() {
            self.sink = None;
        }
        Ok(())
    }

    /// Ends the input of the other side when everything is written.
    pub(super) fn close(&mut self) {
        self.is_closing = true;
    }

    /// Ends the input of the other side now.
    pub(super) fn close_now(&mut self) {
        self.sink = None;
    }

    /// Everything is written, and the other side knows that nothing follows.
    pub(super) fn is_closed(&self) -> bool {
        self.sink.is_none()
    }
}
