//! One stdio child of a backend: its life, its pipes, and the end of what it had to say.

use std::{
    collections::VecDeque,
    ffi::OsString,
    io,
    path::Path,
    task::{Context, Poll},
};

use bytes::Bytes;
use outlast_core::life::{Grace, Life};

use super::bells::Rope;
use crate::{
    lines::{Line, Lines},
    os::{Order, Pipes, Sandbox, Sink, Source, Stdio},
    outbox::Outbox,
};

/// A child that lets more than this wait in its outbox has stopped reading, and is replaced: whoever waits for it is
/// told so. The longest message passes.
pub const OUTBOX_MAX: usize = 64 << 20;
/// A longer line of stderr is cut into pieces.
const STDERR_LINE_MAX: usize = 16 << 10;
/// How much of the end of stderr is kept, to be quoted when the child dies.
const TAIL_MAX: usize = 64 << 10;
/// What an ended child can have left in its stderr, and more: whoever still writes there is not read to the end.
const STDERR_LEFT_MAX: usize = 256 << 10;
/// The most that is still read of a stdout that somebody else holds open: what a widened pipe has room for.
const STDOUT_LEFT_MAX: usize = 1 << 20;
/// Reads of one pipe in one turn of the loop, so that a child that babbles does not keep the others waiting.
const READS_MAX: usize = 4;

/// How to start one.
#[derive(Debug)]
pub struct Command<'a> {
    pub program: &'a str,
    pub args: &'a [String],
    pub env: Vec<(OsString, OsString)>,
    /// It gets nothing of our own environment besides.
    pub env_is_all: bool,
    pub cwd: &'a Path,
    /// Carried by all its descendants; no two children share one.
    pub tag: String,
    pub sandbox: Option<Sandbox>,
}

impl Command<'_> {
    pub fn order(self) -> Order {
        Order {
            program: self.program.into(),
            args: self.args.iter().map(OsString::from).collect(),
            cwd: self.cwd.to_owned(),
            env: self.env,
            env_is_all: self.env_is_all,
            tag: self.tag,
            stdio: Stdio::Piped,
            sandbox: self.sandbox,
        }
    }
}

#[derive(Debug)]
pub struct Child {
    pub life: Life,
    pub backend: String,
    /// 0 until it is known to have started.
    pub pid: u32,
    pub rope: Rope,
    pub tail: Tail,
    /// Lines on its stdout that were no JSON.
    pub diverted: u64,
    stdin: Option<Sink>,
    outbox: Outbox,
    close_stdin: bool,
    stdout: Option<Source>,
    from_stdout: Lines,
    stderr: Option<Source>,
    from_stderr: Lines,
    is_wide: bool,
}

/// What a look at a child's pipes came to.
#[derive(Debug)]
pub enum Heard {
    Said(Bytes),
    Logged(String),
    /// A line over the limit, in which an answer may be lost.
    TooLong,
    StdoutClosed,
}

impl Child {
    pub fn new(backend: &str, pipes: Pipes, grace: Grace, rope: Rope) -> Child {
        Child {
            life: Life::new(grace),
            backend: backend.to_owned(),
            pid: 0,
            rope,
            tail: Tail::default(),
            diverted: 0,
            stdin: pipes.stdin,
            outbox: Outbox::default(),
            close_stdin: false,
            stdout: pipes.stdout,
            from_stdout: Lines::default(),
            stderr: pipes.stderr,
            from_stderr: Lines::in_pieces(STDERR_LINE_MAX),
            is_wide: false,
        }
    }

    /// False if it has let too much wait already.
    pub fn put(&mut self, line: Bytes) -> bool {
        if !self.outbox.is_below(OUTBOX_MAX) {
            return false;
        }
        // Also where nobody reads any more: what never left is told to the next child.
        self.outbox.put(line, Some(0));
        true
    }

    /// Its stdin is closed as soon as it has taken what was meant for it.
    pub fn close_stdin(&mut self) {
        self.close_stdin = true;
        if self.outbox.is_empty() {
            self.stdin = None;
        }
    }

    /// Nothing passes any more. What it cannot have read comes back, in order.
    pub fn close(&mut self) -> Vec<Bytes> {
        self.stdin = None;
        self.stdout = None;
        self.outbox.unsent().into_iter().map(|(_, line)| line).collect()
    }

    /// Hands over what the pipe takes. False if it refuses for good.
    pub fn flush(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(stdin) = &mut self.stdin else { return true };
        if !self.outbox.is_empty()
            && let Poll::Ready(Err(_)) = self.outbox.poll_flush(stdin, cx)
        {
            self.stdin = None;
            return false;
        }
        if self.close_stdin && self.outbox.is_empty() {
            self.stdin = None;
        }
        true
    }

    /// What it said. True: there may be more at once.
    pub fn hear_stdout(&mut self, cx: &mut Context<'_>, heard: &mut Vec<Heard>) -> bool {
        for _ in 0..READS_MAX {
            let Some(stdout) = &mut self.stdout else { return false };
            let Poll::Ready(read) = stdout.poll_read(cx, self.from_stdout.room()) else { return false };
            if !matches!(read, Ok(length) if length > 0) {
                self.end_stdout(heard);
                heard.push(Heard::StdoutClosed);
                return false;
            }
            if !self.is_wide && self.from_stdout.is_long() {
                // Wide pipes cost the user's share of them, so only those who need them have them.
                self.is_wide = true;
                stdout.widen();
                self.stdin.iter().for_each(Sink::widen);
            }
            self.cut_stdout(heard);
        }
        true
    }

    fn cut_stdout(&mut self, heard: &mut Vec<Heard>) {
        while let Some(line) = self.from_stdout.next_line() {
            heard.push(match line {
                Line::Whole(line) => Heard::Said(line),
                Line::TooLong(_) => Heard::TooLong,
            });
        }
    }

    fn end_stdout(&mut self, heard: &mut Vec<Heard>) {
        self.stdout = None;
        if let Some(Line::Whole(line)) = self.from_stdout.rest() {
            heard.push(Heard::Said(line));
        }
    }

    /// The time to read is over, but we may have been kept from using it: what stands in the pipe was said in time.
    pub fn drain_stdout(&mut self, heard: &mut Vec<Heard>) {
        let mut read = 0;
        while read < STDOUT_LEFT_MAX
            && let Some(stdout) = &mut self.stdout
            && let Some(Ok(length @ 1..)) = stdout.read_now(self.from_stdout.room())
        {
            read += length;
            self.cut_stdout(heard);
        }
        self.end_stdout(heard);
    }

    /// What it said for people. True: there may be more at once.
    pub fn hear_stderr(&mut self, cx: &mut Context<'_>, heard: &mut Vec<Heard>) -> bool {
        for _ in 0..READS_MAX {
            let Some(stderr) = &mut self.stderr else { return false };
            let Poll::Ready(read) = stderr.poll_read(cx, self.from_stderr.room()) else { return false };
            if !self.cut_stderr(&read, heard) {
                return false;
            }
        }
        true
    }

    /// Whatever an ended child wrote to its stderr is there already, whether or not the reactor has heard of it.
    pub fn drain_stderr(&mut self, heard: &mut Vec<Heard>) {
        let mut left = STDERR_LEFT_MAX;
        while let Some(stderr) = &mut self.stderr {
            let Some(read) = stderr.read_now(self.from_stderr.room()) else {
                // A daemon of its may hold the pipe open, so last words without a line feed would wait for ever.
                let rest = self.from_stderr.rest();
                return self.log(rest, heard);
            };
            left = left.saturating_sub(*read.as_ref().unwrap_or(&0));
            if !self.cut_stderr(&read, heard) || left == 0 {
                return;
            }
        }
    }

    fn cut_stderr(&mut self, read: &io::Result<usize>, heard: &mut Vec<Heard>) -> bool {
        let goes_on = matches!(read, Ok(length) if *length > 0);
        while let Some(line) = self.from_stderr.next_line() {
            self.log(Some(line), heard);
        }
        if !goes_on {
            self.stderr = None;
            let rest = self.from_stderr.rest();
            self.log(rest, heard);
        }
        goes_on
    }

    fn log(&mut self, line: Option<Line>, heard: &mut Vec<Heard>) {
        let Some(Line::Whole(line) | Line::TooLong(line)) = line else { return };
        let text = String::from_utf8_lossy(line.trim_ascii_end()).into_owned();
        self.tail.push(&text);
        heard.push(Heard::Logged(text));
    }
}

/// The last lines of a child's stderr.
#[derive(Debug, Default)]
pub struct Tail {
    lines: VecDeque<Box<str>>,
    bytes: usize,
}

impl Tail {
    pub fn push(&mut self, line: &str) {
        self.bytes += line.len() + 1;
        self.lines.push_back(line.into());
        while self.bytes > TAIL_MAX
            && let Some(oldest) = self.lines.pop_front()
        {
            self.bytes -= oldest.len() + 1;
        }
    }

    pub fn text(&self) -> String {
        let mut text = String::with_capacity(self.bytes);
        for line in &self.lines {
            text.push_str(line);
            text.push('\n');
        }
        text.truncate(text.trim_end().len());
        text
    }

    pub fn last(&self) -> Option<&str> {
        self.lines.back().map(|line| &**line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_stderr_is_kept() {
        let mut tail = Tail::default();
        assert_eq!((tail.text().as_str(), tail.last()), ("", None));
        for number in 0..10_000 {
            tail.push(&format!("line {number} {}", "x".repeat(20)));
        }
        let text = tail.text();
        assert!(text.len() <= TAIL_MAX && text.len() > TAIL_MAX - 100, "{}", text.len());
        assert!(text.ends_with(&format!("line 9999 {}", "x".repeat(20))));
        assert!(text.starts_with("line "), "whole lines: {}", &text[..20]);
    }
}
