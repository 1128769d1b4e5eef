//! A household driven by lines on stdin, telling its news on stdout: `tests/os.rs` kills it in all ways.
//!
//! ```text
//! spawn KEY piped|inherit|build SHELL WORDS…   start `sh -c` under a key
//! exec KEY PROGRAM CWD                         start a program without a shell
//! big KEY COUNT                                start `sh` with COUNT arguments and variables of 100 kB each
//! say KEY WORDS…                               a line to the child's stdin
//! hush KEY                                     close the child's stdin
//! deafen KEY                                   drop the child's outputs
//! term KEY | kill KEY | sweep KEY
//! note WORDS…                                  on stderr, by way of `os::say`
//! close                                        end everything and wait for it
//! ```
//!
//! At the end of stdin it sweeps what exits, and ends with the last child.

use std::{
    collections::BTreeMap,
    env,
    ffi::OsString,
    future::poll_fn,
    io::{self, IoSlice},
    process::ExitCode,
    task::{Context, Poll},
};

use bytes::{Buf, BytesMut};
use outlast::os::{self, Exit, Household, Keeper, News, Order, Pipes, Signal, Sink, Source, Stdio, Stops};

fn main() -> ExitCode {
    #[cfg(unix)]
    Keeper::become_one_if_asked(&env::args_os().collect::<Vec<_>>());
    let keeper = Keeper::begin().expect("the keeper starts");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut keep = Keep {
            household: keeper.attach().expect("the household joins the runtime"),
            stops: Stops::begin().expect("signals"),
            commands: Some(Lines::new(os::stdin().expect("stdin"))),
            stdout: os::stdout().expect("stdout"),
            words: BytesMut::new(),
            children: BTreeMap::new(),
        };
        let code = keep.run().await;
        keep.household.close().await;
        code
    })
}

struct Keep {
    household: Household,
    stops: Stops,
    commands: Option<Lines>,
    stdout: Sink,
    /// Still to be written to stdout.
    words: BytesMut,
    children: BTreeMap<u64, Child>,
}

struct Child {
    stdin: Option<Sink>,
    to_stdin: BytesMut,
    stdout: Option<Lines>,
    stderr: Option<Lines>,
    has_exited: bool,
}

enum Event {
    Command(Option<String>),
    News(News),
    Stop(os::Stop),
    Output(u64, &'static str, Option<String>),
    Written,
    StdoutBroke,
}

impl Keep {
    async fn run(&mut self) -> ExitCode {
        loop {
            if self.commands.is_none() && self.children.is_empty() && self.words.is_empty() {
                return ExitCode::SUCCESS;
            }
            match poll_fn(|cx| self.poll_event(cx)).await {
                Event::Command(Some(line)) => {
                    if line == "close" {
                        return ExitCode::SUCCESS;
                    }
                    self.obey(&line).unwrap_or_else(|error| self.tell(&format!("error {line}: {error}")));
                }
                Event::Command(None) => {
                    self.commands = None;
                    let exited = self.children.iter().filter(|(_, child)| child.has_exited);
                    exited.for_each(|(&key, _)| self.household.sweep(key));
                }
                Event::News(News::Started { key, pid }) => self.tell(&format!("started {key} {pid}")),
                Event::News(News::StartFailed { key, error }) => {
                    self.children.remove(&key);
                    self.tell(&format!("failed {key} {:?}: {error}", error.kind()));
                }
                Event::News(News::Exited { key, exit }) => {
                    match exit {
                        Exit::Code(code) => self.tell(&format!("exited {key} code {code}")),
                        Exit::Signal(number) => self.tell(&format!("exited {key} signal {number}")),
                    }
                    if self.commands.is_none() {
                        self.household.sweep(key);
                    } else if let Some(child) = self.children.get_mut(&key) {
                        child.has_exited = true;
                    }
                }
                Event::News(News::Stopped { key }) => self.tell(&format!("stopped {key}")),
                Event::News(News::Swept { key }) => {
                    self.children.remove(&key);
                    self.tell(&format!("swept {key}"));
                }
                Event::News(News::Noticed(sentence)) => self.tell(&format!("noticed {sentence}")),
                Event::News(News::KeeperLost) => {
                    self.children.clear();
                    self.tell("lost");
                }
                Event::Stop(stop) => {
                    os::say(&format!("stopped by {}", stop.name));
                    return ExitCode::from(stop.number as u8);
                }
                Event::Output(key, which, Some(line)) => self.tell(&format!("{which} {key} {line}")),
                Event::Output(key, which, None) => self.tell(&format!("{which}-end {key}")),
                Event::Written => {}
                Event::StdoutBroke => return ExitCode::from(99),
            }
        }
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        if !self.words.is_empty() {
            match self.stdout.poll_write(cx, &[IoSlice::new(&self.words)]) {
                Poll::Ready(Ok(count)) => {
                    self.words.advance(count);
                    return Poll::Ready(Event::Written);
                }
                Poll::Ready(Err(_)) => return Poll::Ready(Event::StdoutBroke),
                Poll::Pending => {}
            }
        }
        if let Poll::Ready(stop) = self.stops.poll_next(cx) {
            return Poll::Ready(Event::Stop(stop));
        }
        // Outputs come before news, so that what a child said stands before its exit.
        for (&key, child) in &mut self.children {
            while let (Some(stdin), false) = (&mut child.stdin, child.to_stdin.is_empty()) {
                match stdin.poll_write(cx, &[IoSlice::new(&child.to_stdin)]) {
                    Poll::Ready(Ok(count)) => child.to_stdin.advance(count),
                    Poll::Ready(Err(_)) => child.stdin = None,
                    Poll::Pending => break,
                }
            }
            for (which, lines) in [("out", &mut child.stdout), ("err", &mut child.stderr)] {
                if let Some(Poll::Ready(line)) = lines.as_mut().map(|lines| lines.poll_next(cx)) {
                    if line.is_none() {
                        *lines = None;
                    }
                    return Poll::Ready(Event::Output(key, which, line));
                }
            }
        }
        if let Poll::Ready(news) = self.household.poll_news(cx) {
            return Poll::Ready(Event::News(news));
        }
        if let Some(Poll::Ready(line)) = self.commands.as_mut().map(|lines| lines.poll_next(cx)) {
            return Poll::Ready(Event::Command(line));
        }
        Poll::Pending
    }

    fn obey(&mut self, line: &str) -> io::Result<()> {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        let (key, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        if verb == "note" {
            os::say(&line[5..]);
            return Ok(());
        }
        let key: u64 = key.parse().map_err(io::Error::other)?;
        match verb {
            "spawn" => {
                let (stdio, words) = rest.split_once(' ').unwrap_or((rest, ""));
                let stdio = match stdio {
                    "inherit" => Stdio::Inherit,
                    "build" => Stdio::Build,
                    _ => Stdio::Piped,
                };
                let args = vec!["-c".into(), words.into()];
                self.spawn(key, "sh", args, Vec::new(), env::current_dir()?.into(), stdio)
            }
            "exec" => {
                let (program, cwd) = rest.split_once(' ').unwrap_or((rest, "."));
                self.spawn(key, program, Vec::new(), Vec::new(), cwd.into(), Stdio::Piped)
            }
            "big" => {
                let count: usize = rest.parse().map_err(io::Error::other)?;
                let text = "x".repeat(100_000);
                let mut args: Vec<OsString> = vec!["-c".into(), "echo $# ${#BIG0}".into(), "sh".into()];
                args.extend((0..count).map(|_| OsString::from(&text)));
                let env = (0..count).map(|at| (format!("BIG{at}").into(), text.clone().into())).collect();
                self.spawn(key, "sh", args, env, ".".into(), Stdio::Piped)
            }
            "term" | "kill" | "sweep" => {
                match verb {
                    "term" => self.household.signal(key, Signal::Terminate),
                    "kill" => self.household.signal(key, Signal::Kill),
                    _ => self.household.sweep(key),
                }
                Ok(())
            }
            "say" | "hush" | "deafen" => {
                let child = self.children.get_mut(&key).ok_or(io::ErrorKind::NotFound)?;
                match verb {
                    "say" => child.to_stdin.extend_from_slice(format!("{rest}\n").as_bytes()),
                    "hush" => child.stdin = None,
                    _ => (child.stdout, child.stderr) = (None, None),
                }
                Ok(())
            }
            _ => Err(io::Error::other("no such command")),
        }
    }

    fn spawn(
        &mut self,
        key: u64,
        program: &str,
        args: Vec<OsString>,
        env: Vec<(OsString, OsString)>,
        cwd: OsString,
        stdio: Stdio,
    ) -> io::Result<()> {
        let tag = format!("{}.{key}", env::var("KEEP").unwrap_or_else(|_| "keep".into()));
        let order =
            Order { program: program.into(), args, cwd: cwd.into(), env, env_is_all: false, tag, stdio, sandbox: None };
        let Pipes { stdin, stdout, stderr, .. } = self.household.spawn(key, &order)?;
        let child = Child {
            stdin,
            to_stdin: BytesMut::new(),
            stdout: stdout.map(Lines::new),
            stderr: stderr.map(Lines::new),
            has_exited: false,
        };
        self.children.insert(key, child);
        Ok(())
    }

    fn tell(&mut self, line: &str) {
        self.words.extend_from_slice(format!("{line}\n").as_bytes());
    }
}

struct Lines {
    source: Source,
    buffer: BytesMut,
}

impl Lines {
    fn new(source: Source) -> Lines {
        Lines { source, buffer: BytesMut::new() }
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<String>> {
        loop {
            if let Some(at) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let line = self.buffer.split_to(at + 1);
                return Poll::Ready(Some(String::from_utf8_lossy(&line[..at]).into_owned()));
            }
            self.buffer.reserve(64 * 1024);
            match self.source.poll_read(cx, &mut self.buffer) {
                Poll::Ready(Ok(0) | Err(_)) if self.buffer.is_empty() => return Poll::Ready(None),
                Poll::Ready(Ok(0) | Err(_)) => self.buffer.extend_from_slice(b"\n"),
                Poll::Ready(Ok(_)) => {}
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}
