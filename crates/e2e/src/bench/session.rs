//! A blocking MCP client on two pipes, with as few system calls of its own as possible.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsFd, OwnedFd},
    process::Child,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use memchr::{memchr, memmem};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use super::{
    subject::{Stage, Subject},
    tree::{self, Process},
};

/// Ids have one width, so that a request is sent again by overwriting its id in place.
const FIRST_ID: u64 = 100_000_000;
const ID_WIDTH: usize = 9;
/// The id and the outcome of an answer are within this many bytes of its start.
const HEAD: usize = 256;
const READ_SIZE: usize = 256 * 1024;
/// The timeout of an opening; a Python proxy on a busy machine takes seconds.
const OPEN_MAX: Duration = Duration::from_secs(30);
const CLOSE_STEP: Duration = Duration::from_secs(2);

pub(super) const INITIALIZE: &str =
    r#"{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"outlast-bench","version":"1"}}"#;

/// A request whose id can be changed.
pub(super) struct Request {
    bytes: Vec<u8>,
    id_at: usize,
}

impl Request {
    pub(super) fn new(method: &str, params: &str) -> Self {
        let start = r#"{"jsonrpc":"2.0","id":"#;
        let bytes = format!("{start}{FIRST_ID},\"method\":\"{method}\",\"params\":{params}}}\n").into_bytes();
        Self { bytes, id_at: start.len() }
    }

    pub(super) fn call(tool: &str, arguments: &str) -> Self {
        Self::new("tools/call", &format!(r#"{{"name":"{tool}","arguments":{arguments}}}"#))
    }

    fn with_id(&mut self, id: u64) -> &[u8] {
        let text = format_id(id);
        self.bytes[self.id_at..self.id_at + ID_WIDTH].copy_from_slice(&text);
        &self.bytes
    }
}

fn format_id(mut id: u64) -> [u8; ID_WIDTH] {
    let mut text = [b'0'; ID_WIDTH];
    for digit in text.iter_mut().rev() {
        *digit = b'0' + (id % 10) as u8;
        id /= 10;
    }
    text
}

pub(super) struct Answer<'a> {
    pub id: u64,
    pub is_failed: bool,
    pub line: &'a [u8],
}

pub(super) struct Session {
    children: Vec<Child>,
    input: Option<File>,
    output: File,
    buffer: Vec<u8>,
    /// The unread part of the buffer.
    start: usize,
    end: usize,
    next_id: u64,
    /// The subject's names of the echo tool, and of the restart tool if it has one.
    pub echo_tool: String,
    pub restart_tool: Option<String>,
}

impl Session {
    pub(super) fn start(stage: &Stage, subject: Subject) -> io::Result<Self> {
        Ok(Self::of(stage.start(subject)?))
    }

    /// The first process reads the client's messages, the last one writes the answers.
    fn of(mut children: Vec<Child>) -> Self {
        let input = children.first_mut().and_then(|child| child.stdin.take()).expect("stdin is piped");
        let output = children.last_mut().and_then(|child| child.stdout.take()).expect("stdout is piped");
        Self {
            children,
            input: Some(File::from(OwnedFd::from(input))),
            output: File::from(OwnedFd::from(output)),
            buffer: vec![0; READ_SIZE],
            start: 0,
            end: 0,
            next_id: FIRST_ID,
            echo_tool: "echo".into(),
            restart_tool: None,
        }
    }

    /// A session that is started and initialised, and has answered one echo call.
    pub(super) fn open(stage: &Stage, subject: Subject) -> io::Result<Self> {
        Self::opened(stage.start(subject)?)
    }

    /// The same for processes that run already.
    pub(super) fn opened(children: Vec<Child>) -> io::Result<Self> {
        let mut session = Self::of(children);
        session.initialize()?;
        session.find_tools()?;
        let mut call = Request::call(&session.echo_tool, r#"{"text":"is it you"}"#);
        let answer = session.ask(&mut call, Some(Instant::now() + OPEN_MAX))?;
        if answer.is_failed || memmem::find(answer.line, b"is it you").is_none() {
            let line = String::from_utf8_lossy(answer.line);
            return Err(io::Error::other(format!("echoed {line}")));
        }
        Ok(session)
    }

    pub(super) fn initialize(&mut self) -> io::Result<()> {
        let answer = self.ask(&mut Request::new("initialize", INITIALIZE), Some(Instant::now() + OPEN_MAX))?;
        if answer.is_failed {
            let line = String::from_utf8_lossy(answer.line);
            return Err(io::Error::other(format!("answered initialize with {line}")));
        }
        self.write(b"{\"jsonrpc\":\"2.0\",\"method\":\"notifications/initialized\"}\n")
    }

    fn find_tools(&mut self) -> io::Result<()> {
        let answer = self.ask(&mut Request::new("tools/list", "{}"), Some(Instant::now() + OPEN_MAX))?;
        let answer: Value = serde_json::from_slice(answer.line)?;
        let tools = answer["result"]["tools"].as_array().cloned().unwrap_or_default();
        // Proxies of many servers put the name of the server before the name of the tool.
        let named = |end: &str| {
            let mut names = tools.iter().filter_map(|tool| tool["name"].as_str());
            names.find(|name| name.ends_with(end)).map(String::from)
        };
        self.echo_tool = named("echo").ok_or_else(|| io::Error::other("it lists no tool `echo`"))?;
        self.restart_tool = named("restart_server");
        Ok(())
    }

    pub(super) fn send(&mut self, request: &mut Request) -> io::Result<u64> {
        let id = self.next_id;
        self.next_id += 1;
        self.write(request.with_id(id))?;
        Ok(id)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.input.as_mut().expect("the session is open").write_all(bytes)
    }

    /// The next answer to any request. Without a deadline it costs one read, and the caller must hold a `Guard`.
    pub(super) fn hear(&mut self, deadline: Option<Instant>) -> io::Result<Answer<'_>> {
        loop {
            let (from, to) = self.read_line(deadline)?;
            let line = &self.buffer[from..to];
            let head = &line[..line.len().min(HEAD)];
            let tail = &line[line.len().saturating_sub(HEAD)..];
            let id = memmem::find(head, b"\"id\":").and_then(|at| read_id(&head[at + 5..]));
            let Some(id) = id.filter(|_| memmem::find(head, b"\"method\":").is_none()) else {
                // A notification or a server request: not an answer.
                continue;
            };
            let says = |words: &[u8]| memmem::find(head, words).is_some() || memmem::find(tail, words).is_some();
            let is_failed = memmem::find(head, b"\"error\":{").is_some() || says(b"\"isError\":true");
            return Ok(Answer { id, is_failed, line: &self.buffer[from..to] });
        }
    }

    pub(super) fn ask(&mut self, request: &mut Request, deadline: Option<Instant>) -> io::Result<Answer<'_>> {
        let id = self.send(request)?;
        let answer = self.hear(deadline)?;
        if answer.id != id {
            return Err(io::Error::other(format!("answered {} instead of {id}", answer.id)));
        }
        Ok(answer)
    }

    fn read_line(&mut self, deadline: Option<Instant>) -> io::Result<(usize, usize)> {
        let mut searched = self.start;
        loop {
            if let Some(length) = memchr(b'\n', &self.buffer[searched..self.end]) {
                let (from, to) = (self.start, searched + length);
                self.start = to + 1;
                return Ok((from, to));
            }
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            searched = self.end;
            if self.buffer.len() - self.end < READ_SIZE / 2 {
                self.buffer.resize(self.buffer.len() * 2, 0);
            }
            if let Some(deadline) = deadline {
                self.wait(deadline)?;
            }
            let read = self.output.read(&mut self.buffer[self.end..])?;
            if read == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed its stdout"));
            }
            self.end += read;
        }
    }

    fn wait(&self, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let mut sources = [PollFd::new(self.output.as_fd(), PollFlags::POLLIN)];
        match poll(&mut sources, timeout)? {
            0 => Err(io::Error::new(io::ErrorKind::TimedOut, "gave no answer in time")),
            _ => Ok(()),
        }
    }

    pub(crate) fn pids(&self) -> Vec<u32> {
        self.children.iter().map(Child::id).collect()
    }

    pub(super) fn server(&self, stage: &Stage) -> Option<Process> {
        tree::descent(&self.pids()).into_iter().find(|process| process.runs(&stage.echo))
    }

    /// All processes between this client and the server.
    pub(super) fn relays(&self, stage: &Stage) -> Vec<Process> {
        tree::descent(&self.pids()).into_iter().filter(|process| !process.runs(&stage.echo)).collect()
    }

    /// A time limit for the subject while the guard exists; then the subject is killed, and a read finds the end of
    /// its stdout.
    pub(super) fn guard(&self, limit: Duration) -> Guard {
        let pids = self.pids();
        let (finished, news) = mpsc::channel();
        let thread = thread::spawn(move || {
            if news.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                for pid in pids {
                    // None of them is reaped before the guard is dropped, so the process ids are still theirs.
                    let _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
                }
            }
        });
        Guard { finished: Some(finished), thread: Some(thread) }
    }
}

fn read_id(text: &[u8]) -> Option<u64> {
    let text = text.trim_ascii_start();
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&text[..digits]).ok()?.parse().ok()
}

impl Drop for Session {
    /// Ends the session as a client does, by closing stdin; processes that stay get SIGTERM, then SIGKILL.
    fn drop(&mut self) {
        let processes = tree::descent(&self.pids());
        self.input = None;
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            let deadline = Instant::now() + CLOSE_STEP;
            while self.children.iter_mut().any(|child| matches!(child.try_wait(), Ok(None))) {
                if deadline < Instant::now() {
                    for child in &mut self.children {
                        if matches!(child.try_wait(), Ok(None)) {
                            let _ = kill(Pid::from_raw(child.id() as i32), signal);
                        }
                    }
                    break;
                }
                thread::sleep(Duration::from_millis(1));
            }
        }
        for child in &mut self.children {
            let _ = child.wait();
        }
        for process in processes {
            process.kill();
        }
    }
}

pub(super) struct Guard {
    finished: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.finished = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
