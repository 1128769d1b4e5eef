//! One child process as a driver has it: its life, the queue for its stdin, and the lines of its stdout.

use std::time::Instant;

use bytes::Bytes;
use outlast_core::{
    exit::How,
    life::{Action, Event, Gone, Grace, Life},
};

use super::{
    Kernel, Lines, News, Outbox, Pid, Read,
    pipe::{FromChild, ToChild},
};

pub(crate) struct Child {
    parent: Pid,
    key: u64,
    pub pid: Pid,
    life: Life,
    /// Its start was reported. Output before that stays in the pipe, as the machine does not know the child yet.
    is_known: bool,
    stdin: Option<ToChild>,
    pub outbox: Outbox,
    closes_stdin: bool,
    stdout: Option<FromChild>,
    lines: Lines,
    /// Its exit is known.
    is_ending: bool,
    /// It was told to end.
    pub is_stopping: bool,
    /// Its end was reported; processes that it left may remain for a moment.
    pub is_gone: bool,
}

/// What a driver hears of a child.
#[derive(Debug)]
pub(crate) enum Heard {
    Started,
    Said(Bytes),
    /// Its queue has what it cannot have read.
    Gone(Gone),
}

impl Child {
    /// `pid` was just spawned.
    pub(crate) fn new(kernel: &Kernel, pid: Pid) -> Child {
        let process = kernel.get(pid).expect("just spawned");
        let (stdin, stdout) = kernel.ends_of(pid);
        Child {
            parent: process.parent.expect("it has a parent"),
            key: process.key,
            pid,
            life: Life::new(Grace::default()),
            is_known: false,
            stdin: Some(stdin),
            outbox: Outbox::default(),
            closes_stdin: false,
            stdout: Some(stdout),
            lines: Lines::default(),
            is_ending: false,
            is_stopping: false,
            is_gone: false,
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.life.is_over()
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.life.deadline()
    }

    pub(crate) fn news(&mut self, news: News, kernel: &mut Kernel, heard: &mut Vec<Heard>) {
        let event = match news {
            News::Started { pid } => {
                self.is_known = true;
                Event::Started { pid }
            }
            News::StartFailed => Event::StartFailed("no such program".into()),
            News::Exited(exit) => {
                self.is_ending = true;
                Event::Exited(exit)
            }
            News::Swept => Event::Swept,
        };
        self.live(event, kernel, heard);
    }

    pub(crate) fn stop(&mut self, how: How, kernel: &mut Kernel, heard: &mut Vec<Heard>) {
        self.is_stopping = true;
        self.live(Event::StopAsked(how), kernel, heard);
    }

    pub(crate) fn kill(&mut self, kernel: &mut Kernel, heard: &mut Vec<Heard>) {
        self.is_stopping = true;
        self.live(Event::KillAsked, kernel, heard);
    }

    /// Closes stdin at once, whatever waits for it.
    pub(crate) fn close_stdin(&mut self, kernel: &mut Kernel) {
        self.stdin.take().into_iter().for_each(|stdin| stdin.close(kernel));
    }

    /// Handles a deadline that has come.
    pub(crate) fn time_passed(&mut self, kernel: &mut Kernel, heard: &mut Vec<Heard>) {
        if self.life.deadline().is_some_and(|due| due <= kernel.now) {
            let due = self.life.due(|pid| kernel.is_exiting(pid));
            self.live(due, kernel, heard);
            let next = self.life.deadline();
            assert!(next.is_none_or(|next| next > kernel.now), "the life of {} has a deadline that stays", self.pid);
        }
    }

    /// Writes a piece of its queue.
    pub(crate) fn flush(&mut self, kernel: &mut Kernel, heard: &mut Vec<Heard>) {
        let Some(stdin) = &self.stdin else { return };
        if !self.outbox.flush(|bytes| stdin.write(kernel, bytes)) {
            self.close_stdin(kernel);
            return self.live(Event::StdinRefused, kernel, heard);
        }
        if self.closes_stdin && self.outbox.is_empty() {
            self.close_stdin(kernel);
        }
    }

    pub(crate) fn can_flush(&self, kernel: &Kernel) -> bool {
        let Some(stdin) = &self.stdin else { return false };
        if self.outbox.is_empty() { self.closes_stdin } else { stdin.is_writable(kernel) }
    }

    /// Reads a piece of its output.
    pub(crate) fn read(&mut self, kernel: &mut Kernel, heard: &mut Vec<Heard>) {
        let Some(stdout) = &self.stdout else { return };
        match stdout.read(kernel) {
            Read::Nothing => {}
            Read::Bytes(bytes) => self.cut(&bytes, heard),
            Read::End => {
                self.end_stdout(kernel, heard);
                self.live(Event::StdoutClosed, kernel, heard);
            }
        }
    }

    /// `is_low`: there is room for what it says.
    pub(crate) fn can_read(&self, kernel: &Kernel, is_low: bool) -> bool {
        let is_heard = self.is_known && (is_low || self.is_ending);
        is_heard && self.stdout.as_ref().is_some_and(|stdout| stdout.is_readable(kernel))
    }

    fn cut(&mut self, bytes: &[u8], heard: &mut Vec<Heard>) {
        self.lines.add(bytes);
        while let Some(line) = self.lines.next_line() {
            heard.push(Heard::Said(line));
        }
    }

    fn end_stdout(&mut self, kernel: &mut Kernel, heard: &mut Vec<Heard>) {
        self.stdout.take().into_iter().for_each(|stdout| stdout.close(kernel));
        heard.extend(self.lines.rest().map(Heard::Said));
    }

    fn live(&mut self, event: Event, kernel: &mut Kernel, heard: &mut Vec<Heard>) {
        for action in self.life.handle(event, kernel.now) {
            match action {
                Action::CloseStdin => self.closes_stdin = true,
                Action::Terminate => kernel.terminate(self.pid),
                Action::Kill => kernel.kill(self.pid),
                Action::Sweep => kernel.sweep(self.parent, self.key),
                Action::DropStdout => {
                    while let Some(stdout) = &self.stdout
                        && let Read::Bytes(bytes) = stdout.read(kernel)
                    {
                        self.cut(&bytes, heard);
                    }
                    self.end_stdout(kernel, heard);
                }
                Action::ReportStarted => heard.push(Heard::Started),
                Action::Report(gone) => {
                    self.is_gone = true;
                    self.close_stdin(kernel);
                    self.end_stdout(kernel, heard);
                    heard.push(Heard::Gone(gone));
                }
            }
        }
    }
}
