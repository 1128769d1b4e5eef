//! outlast's own stdin and stdout, as the streams of one client. What its lines mean is decided by the driver.

use std::{
    collections::VecDeque,
    io,
    task::{Context, Poll},
};

use bytes::Bytes;
#[cfg(unix)]
use outlast_os::handover::{Handover, Received};
use outlast_os::{self as os, Hangups, Sink, Source};
#[cfg(unix)]
use serde::{Deserialize, Serialize};

#[cfg(unix)]
use super::{lines::SavedLines, outbox::SavedOutbox};

use super::{
    READS_MAX,
    lines::{Line, Lines},
    outbox::{BYTES_HIGH, Outbox},
};

#[derive(Debug)]
pub(crate) struct OwnStreams {
    stdin: Option<Source>,
    from_client: Lines,
    stdout: Option<Sink>,
    to_client: Outbox,
    hangups: Hangups,
    /// Bounded by one poll: the driver takes them before it polls again.
    events: VecDeque<ClientEvent>,
    is_wide: bool,
}

#[derive(Debug)]
pub(crate) enum ClientEvent {
    /// A line that is not blank, with its line feed.
    Said(Bytes),
    /// A line over the limit; this is its beginning.
    SaidTooMuch(Bytes),
    /// Stdin has ended; the client may still read.
    Ended,
    /// Stdout is closed.
    Broken,
}

/// The streams of a client as saved state; descriptors 0 and 1 are the same in the next program.
#[cfg(unix)]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedStreams {
    from_client: SavedLines,
    to_client: SavedOutbox,
    is_wide: bool,
    /// Other streams in place of stdin and stdout, kept by a [`Handover`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    other: Option<(i32, i32)>,
}

#[cfg(unix)]
impl OwnStreams {
    /// After the events have been taken.
    pub(crate) fn save(&self) -> SavedStreams {
        SavedStreams {
            from_client: self.from_client.save(),
            to_client: self.to_client.save(),
            is_wide: self.is_wide,
            other: None,
        }
    }

    /// The same for [`OwnStreams::over`].
    pub(crate) fn save_other(&self, handover: &mut Handover) -> SavedStreams {
        let source = self.stdin.as_ref().and_then(|stdin| stdin.keep(handover));
        let sink = self.stdout.as_ref().and_then(|stdout| stdout.keep(handover));
        SavedStreams { other: source.zip(sink), ..self.save() }
    }

    pub(crate) fn restore_other(saved: SavedStreams, received: &mut Received) -> io::Result<OwnStreams> {
        let (source, sink) = saved.other.ok_or_else(|| io::Error::other("the state has no streams"))?;
        let streams = (Source::restore(received, source)?, Sink::restore_half(received, sink)?);
        let empty = OwnStreams::over(streams)?;
        Ok(empty.go_on(saved))
    }

    fn go_on(self, saved: SavedStreams) -> OwnStreams {
        OwnStreams {
            from_client: Lines::default().go_on(saved.from_client),
            to_client: Outbox::restore(saved.to_client),
            is_wide: saved.is_wide,
            ..self
        }
    }

    pub(crate) fn restore(saved: SavedStreams) -> io::Result<OwnStreams> {
        Ok(OwnStreams::begin()?.go_on(saved))
    }
}

impl OwnStreams {
    pub(crate) fn begin() -> io::Result<OwnStreams> {
        Ok(OwnStreams {
            stdin: Some(os::stdin()?),
            from_client: Lines::default(),
            stdout: Some(os::stdout()?),
            to_client: Outbox::default(),
            hangups: Hangups::begin()?,
            events: VecDeque::new(),
            is_wide: false,
        })
    }

    /// Other streams in place of stdin and stdout, for a client in this process. Its end is seen when they are read.
    #[cfg(unix)]
    pub(crate) fn over((stdin, stdout): (Source, Sink)) -> io::Result<OwnStreams> {
        Ok(OwnStreams { stdin: Some(stdin), stdout: Some(stdout), ..OwnStreams::begin()? })
    }

    pub(crate) fn next_event(&mut self) -> Option<ClientEvent> {
        self.events.pop_front()
    }

    /// Queues a line, unless stdout is closed.
    pub(crate) fn put(&mut self, line: Bytes) {
        if self.stdout.is_some() {
            self.to_client.put(line, None);
        }
    }

    /// How many bytes stdout has not accepted yet.
    pub(crate) fn queued(&self) -> usize {
        self.to_client.bytes()
    }

    /// There is room in the queue. Otherwise the sources that fill it are not read.
    pub(crate) fn is_low(&self) -> bool {
        self.to_client.is_below(BYTES_HIGH)
    }

    pub(crate) fn stop_reading(&mut self) {
        self.stdin = None;
    }

    pub(crate) fn close(&mut self) {
        self.stdin = None;
        self.stdout = None;
        self.to_client.clear();
    }

    /// Reads stdin while there is room for the answers, and for what the driver does with the lines. True if there may
    /// be more at once.
    pub(crate) fn poll_input(&mut self, has_room: bool, cx: &mut Context<'_>) -> bool {
        // After the client has exited, stdin holds at most one pipe buffer, followed by its end.
        if !(has_room && self.is_low()) && self.hangups.poll_stdin(cx).is_pending() {
            return false;
        }
        for _ in 0..READS_MAX {
            let Some(stdin) = &mut self.stdin else { return false };
            let Poll::Ready(read) = stdin.poll_read(cx, self.from_client.room()) else { return false };
            if !matches!(read, Ok(1..)) {
                self.stdin = None;
                let rest = self.from_client.rest();
                self.hear(rest);
                self.events.push_back(ClientEvent::Ended);
                return false;
            }
            if self.from_client.is_long() {
                self.widen();
            }
            while let Some(line) = self.from_client.next_line() {
                self.hear(Some(line));
            }
        }
        true
    }

    fn hear(&mut self, line: Option<Line>) {
        match line {
            Some(Line::Whole(line)) if !line.trim_ascii().is_empty() => self.events.push_back(ClientEvent::Said(line)),
            Some(Line::TooLong(start)) => self.events.push_back(ClientEvent::SaidTooMuch(start)),
            _ => {}
        }
    }

    /// Writes what stdout accepts. True if there is room in the queue again.
    pub(crate) fn flush(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(stdout) = &mut self.stdout else { return false };
        let was_low = self.to_client.is_below(BYTES_HIGH);
        let is_refused =
            !self.to_client.is_empty() && matches!(self.to_client.poll_flush(stdout, cx), Poll::Ready(Err(_)));
        if is_refused || self.hangups.poll_stdout(cx).is_ready() {
            self.close();
            self.events.push_back(ClientEvent::Broken);
        }
        !was_low && self.is_low()
    }

    /// A thread reads or writes: what it has read or not written would be lost in an upgrade.
    #[cfg(unix)]
    pub(crate) fn is_threaded(&self) -> bool {
        self.stdin.as_ref().is_some_and(Source::is_threaded) || self.stdout.as_ref().is_some_and(Sink::is_threaded)
    }

    /// Lets go of stdin and stdout, which gives them the flags back that they had before outlast.
    #[cfg(unix)]
    pub(crate) fn let_go(&mut self) {
        (self.stdin, self.stdout) = (None, None);
    }

    /// Uses stdin and stdout again.
    #[cfg(unix)]
    pub(crate) fn take_back(&mut self) {
        (self.stdin, self.stdout) = (os::stdin().ok(), os::stdout().ok());
        if self.stdin.is_none() || self.stdout.is_none() {
            self.close();
            self.events.push_back(ClientEvent::Broken);
        }
    }

    /// Whether a line did not fit into a pipe of default capacity.
    pub(crate) fn is_wide(&self) -> bool {
        self.is_wide
    }

    /// Wide pipes count against the user's limit, so only clients with long lines get them.
    pub(crate) fn widen(&mut self) {
        if !std::mem::replace(&mut self.is_wide, true) {
            self.stdin.iter().for_each(Source::widen);
            self.stdout.iter().for_each(Sink::widen);
        }
    }
}
