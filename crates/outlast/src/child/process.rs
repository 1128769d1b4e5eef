//! One child process: its life, and its pipes or its terminal. It is polled through `Children`, which owns it.

use std::{
    collections::VecDeque,
    io,
    task::{Context, Poll, Waker, ready},
    time::Instant,
};

use bytes::{Bytes, BytesMut};
use outlast_core::{
    exit::{Exit, How},
    life::{self, Grace, Life},
    redact,
};
#[cfg(unix)]
use outlast_os::handover::{Handover, Received};
use outlast_os::{self as os, ChildProcesses, Pipes, Signal, Sink, Source, Window};
#[cfg(unix)]
use serde::{Deserialize, Serialize};

#[cfg(unix)]
use super::{lines::SavedLines, outbox::SavedOutbox};

use super::{
    ChildEvent, LINES_BYTES_MAX, LINES_MAX, READS_MAX,
    lines::{Line, Lines},
    outbox::Outbox,
    tail::Tail,
};

/// A longer line of stderr is split.
const STDERR_LINE_MAX: usize = 16 << 10;
/// More than an exited child can have left in its stderr pipe. A descendant that still writes there is not read to the
/// end.
const STDERR_LEFT_MAX: usize = 256 << 10;
/// The most that is still read of a stdout that another process holds open: the capacity of a widened pipe.
const STDOUT_LEFT_MAX: usize = 1 << 20;
#[derive(Debug)]
pub(crate) struct Child {
    key: u64,
    life: Life,
    /// Its output is read even if it cannot be passed on yet.
    has_exited: bool,
    stdin: Option<Sink>,
    outbox: Outbox,
    /// Stdin is closed as soon as the outbox is empty.
    close_stdin: bool,
    /// The number that [`Child::changed_queue`] returned last, once the limit was reached.
    queued: Option<usize>,
    stdout: Option<Source>,
    from_stdout: Lines,
    stderr: Option<Source>,
    from_stderr: Lines,
    /// Removes secrets from the lines of stderr.
    secrets: redact::Lines,
    tail: Tail,
    /// Only with a terminal.
    window: Option<Window>,
    /// It is not stopped because it has closed a pipe.
    may_close_pipes: bool,
    is_wide: bool,
}

/// What a child acts on.
pub(super) struct Around<'a> {
    pub(super) processes: &'a mut ChildProcesses,
    pub(super) waker: Option<&'a Waker>,
    pub(super) events: &'a mut VecDeque<ChildEvent>,
    pub(super) now: Instant,
}

impl Around<'_> {
    /// `ChildProcesses`, for a request. A request that it does not accept at once is sent when its reports are polled.
    fn processes(&mut self) -> &mut ChildProcesses {
        self.waker.into_iter().for_each(Waker::wake_by_ref);
        self.processes
    }
}

/// A running child as saved state. Its pipes are kept by a `Handover`.
#[cfg(unix)]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedChild {
    key: u64,
    pid: u32,
    stdin: Option<i32>,
    outbox: SavedOutbox,
    queued: Option<usize>,
    stdout: Option<i32>,
    from_stdout: SavedLines,
    stderr: Option<i32>,
    from_stderr: SavedLines,
    tail: Vec<String>,
    is_wide: bool,
    /// Its terminal, if it has one.
    window: Option<i32>,
}

#[cfg(unix)]
impl SavedChild {
    pub(super) fn key(&self) -> u64 {
        self.key
    }
}

/// What may still be passed on in this turn of the loop.
struct Room {
    lines: usize,
    bytes: usize,
}

impl Default for Room {
    fn default() -> Room {
        Room { lines: LINES_MAX, bytes: LINES_BYTES_MAX }
    }
}

impl Room {
    /// For a pipe that has ended.
    fn unlimited() -> Room {
        Room { lines: usize::MAX, bytes: usize::MAX }
    }

    fn is_full(&self) -> bool {
        self.lines == 0 || self.bytes == 0
    }

    fn take(&mut self, length: usize) {
        self.lines = self.lines.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(length);
    }
}

#[cfg(unix)]
impl Child {
    /// It is being started or stopped, or has exited: it cannot be saved.
    pub(super) fn is_moving(&self) -> bool {
        self.has_exited || !self.life.is_running()
    }

    /// `None` while [`Child::is_moving`].
    pub(super) fn save(&self, handover: &mut Handover) -> Option<SavedChild> {
        let pid = self.life.pid().filter(|_| !self.is_moving())?;
        Some(SavedChild {
            key: self.key,
            pid,
            stdin: self.stdin.as_ref().and_then(|stdin| stdin.keep(handover)),
            outbox: self.outbox.save(),
            queued: self.queued,
            stdout: self.stdout.as_ref().and_then(|stdout| stdout.keep(handover)),
            from_stdout: self.from_stdout.save(),
            stderr: self.stderr.as_ref().and_then(|stderr| stderr.keep(handover)),
            from_stderr: self.from_stderr.save(),
            tail: self.tail.to_vec(),
            is_wide: self.is_wide,
            window: self.window.as_ref().map(|window| window.keep(handover)),
        })
    }

    pub(super) fn restore(saved: SavedChild, received: &mut Received, grace: Grace) -> io::Result<Child> {
        let mut source = |number: Option<i32>| number.map(|number| Source::restore(received, number)).transpose();
        let (stdout, stderr) = (source(saved.stdout)?, source(saved.stderr)?);
        let stdin = saved.stdin.map(|number| Sink::restore(received, number)).transpose()?;
        let window = saved.window.map(|number| Window::restore(received, number)).transpose()?;
        let mut tail = Tail::default();
        saved.tail.iter().for_each(|line| tail.push(line));
        let new = Child::new(saved.key, Pipes { stdin, stdout, stderr, window }, grace);
        Ok(Child {
            life: Life::running(grace, saved.pid),
            outbox: Outbox::restore(saved.outbox),
            queued: saved.queued,
            from_stdout: new.from_stdout.go_on(saved.from_stdout),
            from_stderr: new.from_stderr.go_on(saved.from_stderr),
            tail,
            is_wide: saved.is_wide,
            ..new
        })
    }
}

impl Child {
    pub(super) fn new(key: u64, pipes: Pipes, grace: Grace) -> Child {
        Child {
            key,
            life: Life::new(grace),
            has_exited: false,
            stdin: pipes.stdin,
            outbox: Outbox::default(),
            close_stdin: false,
            queued: None,
            stdout: pipes.stdout,
            from_stdout: Lines::default(),
            stderr: pipes.stderr,
            from_stderr: Lines::in_pieces(STDERR_LINE_MAX),
            secrets: redact::Lines::default(),
            tail: Tail::default(),
            // A terminal hangs up when the child exits.
            may_close_pipes: pipes.window.is_some(),
            window: pipes.window,
            is_wide: false,
        }
    }

    pub(crate) fn key(&self) -> u64 {
        self.key
    }

    /// `None` until it has started.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.life.pid()
    }

    pub(crate) fn has_exited(&self) -> bool {
        self.has_exited
    }

    pub(crate) fn window(&self) -> Option<&Window> {
        self.window.as_ref()
    }

    /// The child may close its pipes and continue.
    pub(crate) fn let_close_pipes(&mut self) {
        self.may_close_pipes = true;
    }

    /// The end of its stderr, without secrets.
    pub(crate) fn tail(&self) -> &Tail {
        &self.tail
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.life.deadline()
    }

    // ---- its life -------------------------------------------------------------------------------------------------

    /// Tells the machine of its life what happened, and carries out the actions.
    pub(super) fn live(&mut self, event: life::Event, around: &mut Around<'_>) {
        let key = self.key;
        for action in self.life.handle(event, around.now) {
            match action {
                // Closing a terminal hangs up; the signal does the same while its output can still be read.
                life::Action::CloseStdin if self.window.is_some() => around.processes().signal(key, Signal::HangUp),
                life::Action::CloseStdin => self.finish_stdin(),
                life::Action::Terminate => around.processes().signal(key, Signal::Terminate),
                life::Action::Kill => around.processes().signal(key, Signal::Kill),
                life::Action::Sweep => around.processes().sweep(key),
                life::Action::DropStdout => {
                    self.read_stdout_left(around.events);
                    self.end_stdout(around.events);
                }
                life::Action::ReportStarted => {
                    let pid = self.life.pid().unwrap_or_default();
                    around.events.push_back(ChildEvent::Started { key, pid });
                }
                life::Action::Report(gone) => {
                    self.drain_stderr(around.events);
                    around.events.push_back(ChildEvent::Gone { key, how: gone.how, unsent: Vec::new() });
                }
            }
        }
    }

    pub(super) fn exited(&mut self, exit: Exit, around: &mut Around<'_>) {
        self.has_exited = true;
        self.read_stdout_left(around.events);
        self.live(life::Event::Exited(exit), around);
        // There is no more output to wait for.
        if self.stdout.is_none() {
            self.live(life::Event::StdoutClosed, around);
        }
    }

    fn pipe_closed(&mut self, event: life::Event, around: &mut Around<'_>) {
        if self.has_exited || !self.may_close_pipes {
            self.live(event, around);
        }
    }

    pub(super) fn swept(&mut self, around: &mut Around<'_>) {
        self.live(life::Event::Swept, around);
        if self.life.is_over() {
            around.events.push_back(ChildEvent::Cleared { key: self.key });
        }
    }

    pub(super) fn time_passed(&mut self, around: &mut Around<'_>) {
        if self.life.deadline().is_some_and(|at| at <= around.now) {
            self.live(self.life.due(os::is_exiting), around);
        }
    }

    // ---- its stdin ------------------------------------------------------------------------------------------------

    /// Queues a line. After stdin was closed it counts as unsent.
    pub(crate) fn put(&mut self, line: Bytes, mark: Option<u64>) {
        self.outbox.put(line, mark);
    }

    /// How many bytes its stdin has not accepted yet.
    pub(crate) fn queued(&self) -> usize {
        self.outbox.bytes()
    }

    /// The number of queued bytes, if it has changed and is or was at least `high`.
    pub(crate) fn changed_queue(&mut self, high: usize) -> Option<usize> {
        let queued = Some(self.outbox.bytes()).filter(|bytes| *bytes >= high);
        (std::mem::replace(&mut self.queued, queued) != queued).then(|| self.outbox.bytes())
    }

    /// Takes back the marked lines of which no byte was written.
    pub(crate) fn take_back(&mut self) -> Vec<(u64, Bytes)> {
        self.outbox.take_back()
    }

    /// Closes stdin without what is queued.
    pub(crate) fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Closes stdin as soon as what is queued has been written.
    pub(crate) fn finish_stdin(&mut self) {
        self.close_stdin = true;
        self.close_flushed_stdin();
    }

    pub(crate) fn has_stdin(&self) -> bool {
        self.stdin.is_some()
    }

    fn close_flushed_stdin(&mut self) {
        if self.close_stdin && self.outbox.is_empty() {
            self.stdin = None;
        }
    }

    pub(super) fn flush(&mut self, cx: &mut Context<'_>, around: &mut Around<'_>) {
        let Some(stdin) = &mut self.stdin else { return };
        if !self.outbox.is_empty()
            && let Poll::Ready(Err(_)) = self.outbox.poll_flush(stdin, cx)
        {
            self.stdin = None;
            if self.may_close_pipes {
                self.outbox.clear();
            }
            return self.pipe_closed(life::Event::StdinRefused, around);
        }
        self.close_flushed_stdin();
    }

    /// Closes stdin and stdout, and returns the marked lines that the child cannot have read, in order.
    pub(super) fn close(&mut self) -> Vec<(u64, Bytes)> {
        self.stdin = None;
        self.stdout = None;
        self.outbox.unsent()
    }

    // ---- its output -----------------------------------------------------------------------------------------------

    pub(super) fn poll_output(&mut self, reads_stdout: bool, cx: &mut Context<'_>, around: &mut Around<'_>) -> bool {
        // Output that arrives before the report of the start stays in the pipes: the driver does not know the child yet.
        if self.life.pid().is_none() || self.window.is_some() {
            return false;
        }
        let has_more = (reads_stdout || self.has_exited) && self.poll_stdout(cx, around);
        self.poll_stderr(cx, around.events) || has_more
    }

    pub(super) fn poll_terminal(
        &mut self,
        into: &mut BytesMut,
        cx: &mut Context<'_>,
        around: &mut Around<'_>,
    ) -> Poll<Option<usize>> {
        let Some(stdout) = self.stdout.as_mut().filter(|_| self.life.pid().is_some()) else { return Poll::Pending };
        if let Ok(count @ 1..) = ready!(stdout.poll_read(cx, into)) {
            return Poll::Ready(Some(count));
        }
        // The end of a terminal is an error on some systems.
        self.stdout = None;
        self.live(life::Event::StdoutClosed, around);
        Poll::Ready(None)
    }

    fn poll_stdout(&mut self, cx: &mut Context<'_>, around: &mut Around<'_>) -> bool {
        let mut room = Room::default();
        for _ in 0..READS_MAX {
            // First the lines of the last read that were too many for that turn.
            if !self.cut_stdout(&mut room, around.events) {
                // The line may have contained an answer.
                self.live(life::Event::StopAsked(How::LineTooLong), around);
            }
            if room.is_full() {
                return true;
            }
            let Some(stdout) = &mut self.stdout else { return false };
            let Poll::Ready(read) = stdout.poll_read(cx, self.from_stdout.room()) else { return false };
            if !matches!(read, Ok(1..)) {
                self.end_stdout(around.events);
                self.pipe_closed(life::Event::StdoutClosed, around);
                return false;
            }
            if self.from_stdout.is_long() {
                self.widen();
            }
        }
        if !self.cut_stdout(&mut room, around.events) {
            self.live(life::Event::StopAsked(How::LineTooLong), around);
        }
        true
    }

    /// Passes lines on until there is no room. False if a line was over the limit.
    fn cut_stdout(&mut self, room: &mut Room, events: &mut VecDeque<ChildEvent>) -> bool {
        let mut all_fit = true;
        while !room.is_full()
            && let Some(line) = self.from_stdout.next_line()
        {
            match line {
                Line::Whole(line) => {
                    room.take(line.len());
                    events.push_back(ChildEvent::Said { key: self.key, line });
                }
                Line::TooLong(_) => all_fit = false,
            }
        }
        all_fit
    }

    fn end_stdout(&mut self, events: &mut VecDeque<ChildEvent>) {
        self.cut_stdout(&mut Room::unlimited(), events);
        self.stdout = None;
        if let Some(Line::Whole(line)) = self.from_stdout.rest() {
            events.push_back(ChildEvent::Said { key: self.key, line });
        }
    }

    /// Reads what is in the pipe when the process has exited or the time to read is over: it was written in time, and
    /// the loop may have been late. The output of a terminal is read by the driver alone.
    fn read_stdout_left(&mut self, events: &mut VecDeque<ChildEvent>) {
        self.cut_stdout(&mut Room::unlimited(), events);
        let mut left = STDOUT_LEFT_MAX;
        while let Some(stdout) = self.stdout.as_mut().filter(|_| left > 0 && self.window.is_none())
            && let Some(read) = stdout.read_now(self.from_stdout.room())
        {
            let Ok(length @ 1..) = read else { return self.end_stdout(events) };
            left = left.saturating_sub(length);
            self.cut_stdout(&mut Room::unlimited(), events);
        }
    }

    fn poll_stderr(&mut self, cx: &mut Context<'_>, events: &mut VecDeque<ChildEvent>) -> bool {
        let Some(stderr) = &mut self.stderr else { return false };
        let Poll::Ready(read) = stderr.poll_read(cx, self.from_stderr.room()) else { return false };
        self.cut_stderr(&read, events);
        true
    }

    /// Reads the rest of stderr: all that an exited child wrote is in the pipe, even if the reactor has not reported
    /// it.
    fn drain_stderr(&mut self, events: &mut VecDeque<ChildEvent>) {
        let mut read = 0;
        while read < STDERR_LEFT_MAX
            && let Some(stderr) = &mut self.stderr
        {
            let Some(result) = stderr.read_now(self.from_stderr.room()) else {
                // A daemon of the child may hold the pipe open, so a last line without a line feed is taken now.
                let rest = self.from_stderr.rest();
                return self.log(rest, events);
            };
            read += *result.as_ref().unwrap_or(&0);
            self.cut_stderr(&result, events);
        }
    }

    fn cut_stderr(&mut self, read: &io::Result<usize>, events: &mut VecDeque<ChildEvent>) {
        while let Some(line) = self.from_stderr.next_line() {
            self.log(Some(line), events);
        }
        if !matches!(read, Ok(1..)) {
            self.stderr = None;
            let rest = self.from_stderr.rest();
            self.log(rest, events);
        }
    }

    fn log(&mut self, line: Option<Line>, events: &mut VecDeque<ChildEvent>) {
        let Some(Line::Whole(line) | Line::TooLong(line)) = line else { return };
        let text = String::from_utf8_lossy(line.trim_ascii_end()).into_owned();
        let redacted = self.secrets.line(&text).into_owned();
        self.tail.push(&redacted);
        events.push_back(ChildEvent::Logged { key: self.key, text, redacted });
    }

    /// Whether a line did not fit into a pipe of default capacity.
    pub(crate) fn is_wide(&self) -> bool {
        self.is_wide
    }

    /// Wide pipes count against the user's limit, so only children with long lines get them.
    pub(crate) fn widen(&mut self) {
        if !std::mem::replace(&mut self.is_wide, true) {
            self.stdin.iter().for_each(Sink::widen);
            self.stdout.iter().for_each(Source::widen);
        }
    }
}
