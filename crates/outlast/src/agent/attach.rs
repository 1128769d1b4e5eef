//! `outlast attach`: the user's terminal as one more viewer of a session.

use std::{
    collections::VecDeque,
    env,
    io::IoSlice,
    process::ExitCode,
    task::{Context, Poll},
    time::Instant,
};

use bytes::{Buf, BytesMut};
use outlast_control::{
    answer::SessionEnd,
    client::{AskError, Client},
    find::ANSWER_MAX,
    method::{Attach, Method},
    registry::Entry,
    wire::{self, Frames},
};
use outlast_core::{alternate_screen::AlternateScreen, keys::DetachFilter};
use outlast_os::{self as os, Outer, OuterEvent, Peer, StandIn, Standing};

use crate::{
    agent::sessions::find_session,
    cli::{
        self,
        report::{self, Report},
    },
    operator::instances::{connect, failed},
};

/// Above this the session is not read, which then sees that the viewer is slow.
const SHOWN_HIGH: usize = 256 << 10;
/// Above this the terminal is not read.
const TYPED_HIGH: usize = 64 << 10;
/// Buffer for one read of typed keys.
const KEYS_ROOM: usize = 4 << 10;
/// As in a shell: a larger exit code means a signal.
const SIGNALLED: u8 = 128;

pub(crate) fn run(arguments: &cli::Attach) -> Result<ExitCode, Report> {
    let entry = find_session(arguments.id.as_deref())?;
    if is_inside(env::var(os::CHILD_TAG).ok().as_deref(), &entry.id) {
        return Err(Report::new(report::USAGE, format!("this terminal is inside the session `{}`", entry.id))
            .because("a terminal that shows itself would repeat its own output without end")
            .hint("attach from another terminal; `outlast ps` lists the other sessions"));
    }
    let wrong = |error| Report::new(report::FAILURE, "cannot use the terminal").because(error);
    let stand_in = match os::stand_in("this terminal").map_err(wrong)? {
        Some(Standing::Over(code)) => return Ok(ExitCode::from(code)),
        Some(Standing::Worker(stand_in)) => stand_in,
        None => {
            return Err(Report::new(report::USAGE, "`outlast attach` needs a terminal")
                .because("stdin or stdout is not a terminal")
                .hint(format!("`outlast screen {}` prints its screen", entry.id)));
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .map_err(|error| Report::new(report::FAILURE, "cannot start").because(error))?;
    let end = runtime.block_on(look(&entry, arguments, stand_in))?;
    let id = &entry.id;
    Ok(match end {
        End::Detached => {
            os::say(&format!("[outlast] detached from {id}"));
            ExitCode::SUCCESS
        }
        End::Over(code) => {
            os::say(&format!("[outlast] {id} ended with exit code {code}"));
            ExitCode::from(code)
        }
        End::Lost => {
            return Err(Report::new(report::FAILURE, format!("`{id}` has ended"))
                .because("outlast and its agent ended without a message")
                .hint(format!("`outlast logs {id}` may show the reason")));
        }
        End::Stopped(code) => ExitCode::from(code),
    })
}

/// Whether a process with this tag was started by this session, or by what the session's agent started. The tag is
/// `<id>.<generation>`.
fn is_inside(tag: Option<&str>, id: &str) -> bool {
    tag.and_then(|tag| tag.rsplit_once('.')).is_some_and(|(session, _)| session == id)
}

enum End {
    Detached,
    /// The session ended, with this exit code.
    Over(u8),
    /// The connection ended without an exit code.
    Lost,
    /// A signal ended this command.
    Stopped(u8),
}

async fn look(entry: &Entry, arguments: &cli::Attach, stand_in: StandIn) -> Result<End, Report> {
    let wrong = |error| Report::new(report::FAILURE, "cannot use the terminal").because(error);
    let stops = os::Stops::begin().map_err(wrong)?;
    let size = os::outer_size();
    let attach = Method::Attach(Attach {
        columns: size.columns.into(),
        rows: size.rows.into(),
        width: size.width.into(),
        height: size.height.into(),
        watch: arguments.watch,
        terminal: os::terminal_identity(),
    });
    let ask = |mut client: Client| {
        client.ask(&attach, Some(Instant::now() + ANSWER_MAX))?;
        Ok(client)
    };
    let client = connect(entry).and_then(ask).map_err(|error: AskError| failed(entry, "attach", &error))?;
    let (line, frames) = client.into_parts();
    let peer = Peer::of(line).map_err(|error| Report::new(report::FAILURE, "cannot attach").because(error))?;
    let outer = Outer::begin(stand_in).map_err(wrong)?;
    let mut window = Window {
        stops,
        outer,
        peer,
        frames,
        detach_filter: DetachFilter::new(arguments.detach_key.clone()),
        shown: BytesMut::new(),
        typed: BytesMut::new(),
        alternate: AlternateScreen::default(),
        last_words: VecDeque::new(),
    };
    let end = std::future::poll_fn(|cx| window.poll(cx)).await;
    window.close();
    Ok(end)
}

struct Window {
    stops: os::Stops,
    outer: Outer,
    peer: Peer,
    frames: Frames,
    detach_filter: DetachFilter,
    shown: BytesMut,
    typed: BytesMut,
    alternate: AlternateScreen,
    /// Why it ends, once all output is shown.
    last_words: VecDeque<End>,
}

impl Window {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        loop {
            if let Poll::Ready(stop) = self.stops.poll_next(cx) {
                return Poll::Ready(End::Stopped(SIGNALLED + u8::try_from(stop.number).unwrap_or_default()));
            }
            let mut moved = false;
            match self.outer.poll_event(cx) {
                Poll::Ready(OuterEvent::StopPassed) => return Poll::Ready(End::Stopped(SIGNALLED + 15)),
                Poll::Ready(OuterEvent::HangupPassed | OuterEvent::Abandoned) => {
                    return Poll::Ready(End::Stopped(SIGNALLED + 1));
                }
                Poll::Ready(event) => {
                    self.heard(event);
                    moved = true;
                }
                Poll::Pending => {}
            }
            if let Some(end) = self.poll_keys(cx, &mut moved) {
                return Poll::Ready(end);
            }
            moved |= self.poll_session(cx);
            moved |= self.show(cx);
            if self.shown.is_empty()
                && let Some(end) = self.last_words.pop_front()
            {
                return Poll::Ready(end);
            }
            if !moved {
                return Poll::Pending;
            }
        }
    }

    fn heard(&mut self, event: OuterEvent) {
        match event {
            OuterEvent::Resized => self.say(b's', &wire::viewer_size_in_bytes(self.outer.size())),
            OuterEvent::SuspendAsked | OuterEvent::SuspendPassed => {
                self.outer.note_alternate(self.alternate.is_on);
                self.outer.suspend();
            }
            OuterEvent::Continued => {
                // If it fails, the next key shows it.
                let _ = self.outer.make_raw();
                self.say(b's', &wire::viewer_size_in_bytes(self.outer.size()));
                self.say(b'p', b"");
            }
            OuterEvent::StopPassed | OuterEvent::HangupPassed | OuterEvent::Abandoned => {}
        }
    }

    fn poll_keys(&mut self, cx: &mut Context<'_>, moved: &mut bool) -> Option<End> {
        if self.typed.len() >= TYPED_HIGH {
            return None; // Freed room wakes us.
        }
        let mut keys = BytesMut::with_capacity(KEYS_ROOM);
        let Poll::Ready(read) = self.outer.source.poll_read(cx, &mut keys) else { return None };
        if !read.is_ok_and(|count| count > 0) {
            return Some(End::Stopped(SIGNALLED + 1));
        }
        *moved = true;
        let passed = self.detach_filter.pass(&keys);
        if passed.detaches {
            return Some(End::Detached);
        }
        if !passed.bytes.is_empty() {
            self.say(b'i', &passed.bytes);
        }
        None
    }

    fn say(&mut self, kind: u8, bytes: &[u8]) {
        self.typed.extend_from_slice(&wire::viewer_head(kind, bytes.len()));
        self.typed.extend_from_slice(bytes);
    }

    fn poll_session(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        while !self.typed.is_empty() {
            match self.peer.poll_write(cx, &self.typed) {
                Poll::Pending => break,
                Poll::Ready(Ok(count)) => self.typed.advance(count),
                // What the session sent before is still to be read.
                Poll::Ready(Err(_)) => self.typed.clear(),
            }
            moved = true;
        }
        while self.shown.len() < SHOWN_HIGH && self.last_words.is_empty() {
            match self.frames.next_frame() {
                Ok(Some(frame)) => self.said(&frame),
                Ok(None) => match self.peer.poll_read(cx, self.frames.room()) {
                    Poll::Pending => break,
                    Poll::Ready(Ok(count)) if count > 0 => {}
                    Poll::Ready(_) => self.last_words.push_back(End::Lost),
                },
                Err(_) => self.last_words.push_back(End::Lost),
            }
            moved = true;
        }
        moved
    }

    fn said(&mut self, frame: &[u8]) {
        match frame.split_first() {
            Some((b'o', bytes)) => {
                self.alternate.pass(bytes);
                self.outer.note_alternate(self.alternate.is_on);
                self.shown.extend_from_slice(bytes);
            }
            Some((b'e', about)) => {
                let code = SessionEnd::read(about).code.unwrap_or(report::FAILURE);
                self.last_words.push_back(End::Over(code));
            }
            // Refused, or a frame of a later version.
            _ => {}
        }
    }

    fn show(&mut self, cx: &mut Context<'_>) -> bool {
        if self.shown.is_empty() {
            return false;
        }
        match self.outer.sink.poll_write(cx, &[IoSlice::new(&self.shown)]) {
            Poll::Pending => return false,
            Poll::Ready(Ok(count)) => self.shown.advance(count),
            // The read of keys reports that the terminal is gone.
            Poll::Ready(Err(_)) => self.shown.clear(),
        }
        true
    }

    /// Restores the terminal. The agent's output stays above what follows.
    fn close(self) {
        let is_alternate = self.alternate.is_on;
        drop(self.outer);
        if !is_alternate {
            os::write_stdout("\x1b[999;1H\r\n");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_inside_a_session_is_recognized() {
        let table = [
            (None, false),
            (Some("night.1"), true),
            (Some("night.12"), true),
            (Some("nigh.1"), false),
            (Some("night.2.1"), false),
            (Some("night"), false),
        ];
        for (tag, expected) in table {
            assert_eq!(is_inside(tag, "night"), expected, "{tag:?}");
        }
    }
}
