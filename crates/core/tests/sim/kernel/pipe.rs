//! Pipes that take and give any number of bytes, and the two ends that a driver has of them: a queue of lines to write,
//! and a buffer that is cut into lines.

use std::collections::VecDeque;

use bytes::Bytes;

use super::{Kernel, Pid};

pub(super) type PipeId = u32;

/// The most that one write or read moves.
const PIECE_MAX: usize = 400;

pub(super) struct Pipe {
    bytes: VecDeque<u8>,
    capacity: usize,
    is_read: bool,
    writers: u32,
}

impl Pipe {
    /// Another process has the writing end, too.
    pub(crate) fn share(&mut self) {
        self.writers += 1;
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Read {
    Bytes(Vec<u8>),
    Nothing,
    End,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// How many bytes; none if the pipe is full.
    Taken(usize),
    Refused,
}

/// The ends of a process's pipes.
impl Kernel {
    pub(super) fn pipe(&mut self) -> PipeId {
        let id = self.next_pipe;
        self.next_pipe += 1;
        let capacity = self.dice.pick(&[64, 300, 4_096, 65_536]);
        self.pipes.insert(id, Pipe { bytes: VecDeque::new(), capacity, is_read: true, writers: 1 });
        id
    }

    pub(super) fn close_reader(&mut self, id: PipeId) {
        if let Some(pipe) = self.pipes.get_mut(&id) {
            pipe.is_read = false;
            pipe.bytes.clear();
        }
    }

    pub(super) fn close_writer(&mut self, id: PipeId) {
        if let Some(pipe) = self.pipes.get_mut(&id) {
            pipe.writers = pipe.writers.saturating_sub(1);
        }
    }

    fn write(&mut self, id: PipeId, bytes: &[u8]) -> Written {
        let pipe = &self.pipes[&id];
        if !pipe.is_read {
            return Written::Refused;
        }
        let room = (pipe.capacity - pipe.bytes.len()).min(bytes.len()).min(PIECE_MAX);
        let count = match room {
            0 => 0,
            room if self.dice.one_in(4) => 1 + self.dice.below(room as u64) as usize,
            room => room,
        };
        self.pipes.get_mut(&id).expect("seen above").bytes.extend(&bytes[..count]);
        Written::Taken(count)
    }

    fn read(&mut self, id: PipeId) -> Read {
        let pipe = &self.pipes[&id];
        if pipe.bytes.is_empty() {
            return if pipe.writers == 0 { Read::End } else { Read::Nothing };
        }
        let most = pipe.bytes.len().min(PIECE_MAX);
        let count = if self.dice.one_in(4) { 1 + self.dice.below(most as u64) as usize } else { most };
        Read::Bytes(self.pipes.get_mut(&id).expect("seen above").bytes.drain(..count).collect())
    }

    fn is_readable(&self, id: PipeId) -> bool {
        self.pipes.get(&id).is_some_and(|pipe| !pipe.bytes.is_empty() || pipe.writers == 0)
    }

    fn is_writable(&self, id: PipeId) -> bool {
        self.pipes.get(&id).is_some_and(|pipe| !pipe.is_read || pipe.bytes.len() < pipe.capacity)
    }

    // The process's own side.

    pub(crate) fn read_stdin(&mut self, pid: Pid) -> Read {
        let Some(stdin) = self.get(pid).map(|process| process.stdin) else { return Read::Nothing };
        self.read(stdin)
    }

    pub(crate) fn can_read_stdin(&self, pid: Pid) -> bool {
        self.get(pid).is_some_and(|process| self.is_readable(process.stdin))
    }

    /// Its client has closed its side of stdin: what is left in the pipe is all of it.
    pub(crate) fn stdin_hung_up(&self, pid: Pid) -> bool {
        self.get(pid).is_some_and(|process| self.pipes[&process.stdin].writers == 0)
    }

    /// Its client does not read its stdout any more.
    pub(crate) fn stdout_hung_up(&self, pid: Pid) -> bool {
        self.get(pid).is_some_and(|process| !self.pipes[&process.stdout].is_read)
    }

    pub(crate) fn write_stdout(&mut self, pid: Pid, bytes: &[u8]) -> Written {
        let Some(stdout) = self.get(pid).map(|process| process.stdout) else { return Written::Refused };
        self.write(stdout, bytes)
    }

    pub(crate) fn can_write_stdout(&self, pid: Pid) -> bool {
        self.get(pid).is_some_and(|process| self.is_writable(process.stdout))
    }

    // The side of the process that started it.

    pub(super) fn ends(&self, pid: Pid) -> (PipeId, PipeId) {
        let process = &self.processes[&pid];
        (process.stdin, process.stdout)
    }
}

/// The writing end of a process's stdin, as the process has it that started it.
#[derive(Debug)]
pub(crate) struct ToChild(PipeId);

/// The reading end of its stdout.
#[derive(Debug)]
pub(crate) struct FromChild(PipeId);

impl Kernel {
    pub(crate) fn ends_of(&self, pid: Pid) -> (ToChild, FromChild) {
        let (stdin, stdout) = self.ends(pid);
        (ToChild(stdin), FromChild(stdout))
    }
}

impl ToChild {
    pub(crate) fn write(&self, kernel: &mut Kernel, bytes: &[u8]) -> Written {
        kernel.write(self.0, bytes)
    }

    pub(crate) fn is_writable(&self, kernel: &Kernel) -> bool {
        kernel.is_writable(self.0)
    }

    pub(crate) fn close(self, kernel: &mut Kernel) {
        kernel.close_writer(self.0);
    }
}

impl FromChild {
    pub(crate) fn read(&self, kernel: &mut Kernel) -> Read {
        kernel.read(self.0)
    }

    pub(crate) fn is_readable(&self, kernel: &Kernel) -> bool {
        kernel.is_readable(self.0)
    }

    pub(crate) fn close(self, kernel: &mut Kernel) {
        kernel.close_reader(self.0);
    }
}

/// Lines for a pipe, in order, with their marks.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    lines: VecDeque<(Bytes, Option<u64>)>,
    /// How many bytes of the first line the pipe has taken.
    taken: usize,
}

impl Outbox {
    pub(crate) fn put(&mut self, line: Bytes, mark: Option<u64>) {
        self.lines.push_back((line, mark));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.lines.iter().map(|(line, _)| line.len()).sum::<usize>() - self.taken
    }

    pub(crate) fn clear(&mut self) {
        *self = Outbox::default();
    }

    /// One write of one line or a part of it. False if the pipe is closed.
    pub(crate) fn flush(&mut self, write: impl FnOnce(&[u8]) -> Written) -> bool {
        let Some((line, _)) = self.lines.front() else { return true };
        match write(&line[self.taken..]) {
            Written::Refused => return false,
            Written::Taken(count) => self.taken += count,
        }
        if self.taken == line.len() {
            self.taken = 0;
            self.lines.pop_front();
        }
        true
    }

    /// Takes back the marked lines of which no byte was written.
    pub(crate) fn take_back(&mut self) -> Vec<(u64, Bytes)> {
        let begun = usize::from(self.taken > 0);
        let mut taken_back = Vec::new();
        let mut kept = VecDeque::new();
        for (index, (line, mark)) in std::mem::take(&mut self.lines).into_iter().enumerate() {
            match mark {
                Some(mark) if index >= begun => taken_back.push((mark, line)),
                _ => kept.push_back((line, mark)),
            }
        }
        self.lines = kept;
        taken_back
    }

    /// The marked lines that no reader can have parsed.
    pub(crate) fn unsent(&mut self) -> Vec<(u64, Bytes)> {
        let Outbox { lines, taken } = std::mem::take(self);
        let is_unsent = |(index, (line, _)): &(usize, (Bytes, _))| *index > 0 || taken + 1 < line.len();
        lines.into_iter().enumerate().filter(is_unsent).filter_map(|(_, (line, mark))| Some((mark?, line))).collect()
    }
}

/// Bytes that were read, cut into lines.
#[derive(Debug, Default)]
pub(crate) struct Lines(Vec<u8>);

impl Lines {
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The next whole line with its line feed.
    pub(crate) fn next_line(&mut self) -> Option<Bytes> {
        let end = self.0.iter().position(|byte| *byte == b'\n')?;
        let rest = self.0.split_off(end + 1);
        Some(std::mem::replace(&mut self.0, rest).into())
    }

    /// What is left without a line feed; a line feed is added.
    pub(crate) fn rest(&mut self) -> Option<Bytes> {
        let rest = std::mem::take(&mut self.0);
        (!rest.is_empty()).then(|| [&rest[..], b"\n"].concat().into())
    }
}
