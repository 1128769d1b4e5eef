//! A `ChildProcesses` that is driven by lines on stdin and prints its reports on stdout; `tests/os.rs` kills it in many ways.
//!
//! ```text
//! spawn KEY piped|inherit|build SHELL WORDS…   start `sh -c` under a key
//! exec KEY PROGRAM CWD                         start a program without a shell
//! lease KEY MS SHELL WORDS…                    the same with pipes, and with a lease that ends MS ms from now
//! extend KEY MS                                let the lease end MS ms from now
//! big KEY COUNT                                start `sh` with COUNT arguments and variables of 100 kB each
//! say KEY WORDS…                               a line to the child's stdin
//! hush KEY                                     close the child's stdin
//! deafen KEY                                   drop the child's outputs
//! term KEY | kill KEY | sweep KEY
//! note WORDS…                                  on stderr, by way of `os::say`
//! become [VERSION]                             execute this program again, which takes over the children; with VERSION
//!                                              it is told that the keeper has this version of the protocol
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
    time::Duration,
};

use bytes::{Buf, BytesMut};
use outlast_os::{
    self as os, BootTime, ChildProcesses, Exit, Keeper, News, Order, Pipes, Signal, Sink, Source, Stdio, Stops,
};

#[cfg(unix)]
use os::handover::{self, Handover, Received};

fn main() -> ExitCode {
    #[cfg(unix)]
    Keeper::become_one_if_asked(&env::args_os().collect::<Vec<_>>());
    #[cfg(unix)]
    let last = Received::begin().expect("the state of the last program");
    #[cfg(not(unix))]
    let last: Option<()> = None;
    let keeper = last.is_none().then(|| Keeper::begin().expect("the keeper starts"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut words = BytesMut::new();
        let mut children = BTreeMap::new();
        let processes = match keeper {
            Some(keeper) => keeper.attach().expect("they join the runtime"),
            #[cfg(unix)]
            None => match take_over(last.expect("there is one without a keeper"), &mut children) {
                Ok(processes) => {
                    words.extend_from_slice(b"became\n");
                    processes
                }
                Err(error) => {
                    println!("refused {error}");
                    return ExitCode::FAILURE;
                }
            },
            #[cfg(not(unix))]
            None => unreachable!("there is a keeper"),
        };
        let mut keep = Keep {
            processes,
            stops: Stops::begin().expect("signals"),
            commands: Some(Lines::new(os::stdin().expect("stdin"))),
            stdout: os::stdout().expect("stdout"),
            words,
            children,
        };
        let code = keep.run().await;
        keep.processes.close().await;
        code
    })
}

/// The state for the next program: the version, the processes and the keys of the children.
#[cfg(unix)]
type State = (serde_json::Value, os::SavedChildProcesses, Vec<u64>);

#[cfg(unix)]
fn take_over(mut last: Received, children: &mut BTreeMap<u64, Child>) -> io::Result<ChildProcesses> {
    let (protocol, processes, keys): State = serde_json::from_slice(&last.state()?)?;
    let processes = Keeper::restore(processes, serde_json::from_value(protocol)?, &mut last)?;
    last.unblock_signals()?;
    children.extend(keys.into_iter().map(|key| (key, Child::new(Pipes::default()))));
    Ok(processes)
}

struct Keep {
    processes: ChildProcesses,
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

impl Child {
    fn new(pipes: Pipes) -> Child {
        let Pipes { stdin, stdout, stderr, .. } = pipes;
        let (stdout, stderr) = (stdout.map(Lines::new), stderr.map(Lines::new));
        Child { stdin, to_stdin: BytesMut::new(), stdout, stderr, has_exited: false }
    }
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
                    #[cfg(unix)]
                    if let Some(version) = line.strip_prefix("become") {
                        let error = self.become_next(version.trim()).await;
                        self.tell(&format!("error {line}: {error}"));
                        continue;
                    }
                    self.obey(&line).unwrap_or_else(|error| self.tell(&format!("error {line}: {error}")));
                }
                Event::Command(None) => {
                    self.commands = None;
                    let exited = self.children.iter().filter(|(_, child)| child.has_exited);
                    exited.for_each(|(&key, _)| self.processes.sweep(key));
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
                        self.processes.sweep(key);
                    } else if let Some(child) = self.children.get_mut(&key) {
                        child.has_exited = true;
                    }
                }
                Event::News(News::LeaseEnded { key }) => self.tell(&format!("lease-ended {key}")),
                Event::News(News::Stopped { key }) => self.tell(&format!("stopped {key}")),
                Event::News(News::Swept { key }) => {
                    self.children.remove(&key);
                    self.tell(&format!("swept {key}"));
                }
                Event::News(News::Noticed(sentence)) => self.tell(&format!("noticed {sentence}")),
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
        // Output is printed before reports, so that the output of a child precedes its exit.
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
        if let Poll::Ready(news) = self.processes.poll_news(cx) {
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
                self.spawn(key, "sh", args, Vec::new(), env::current_dir()?.into(), stdio, None)
            }
            "lease" => {
                let (end, words) = rest.split_once(' ').unwrap_or((rest, ""));
                let args = vec!["-c".into(), words.into()];
                self.spawn(key, "sh", args, Vec::new(), ".".into(), Stdio::Piped, Some(in_ms(end)?))
            }
            "extend" => {
                self.processes.extend(key, in_ms(rest)?);
                Ok(())
            }
            "exec" => {
                let (program, cwd) = rest.split_once(' ').unwrap_or((rest, "."));
                self.spawn(key, program, Vec::new(), Vec::new(), cwd.into(), Stdio::Piped, None)
            }
            "big" => {
                let count: usize = rest.parse().map_err(io::Error::other)?;
                let text = "x".repeat(100_000);
                let mut args: Vec<OsString> = vec!["-c".into(), "echo $# ${#BIG0}".into(), "sh".into()];
                args.extend((0..count).map(|_| OsString::from(&text)));
                let env = (0..count).map(|at| (format!("BIG{at}").into(), text.clone().into())).collect();
                self.spawn(key, "sh", args, env, ".".into(), Stdio::Piped, None)
            }
            "term" | "kill" | "sweep" => {
                match verb {
                    "term" => self.processes.signal(key, Signal::Terminate),
                    "kill" => self.processes.signal(key, Signal::Kill),
                    _ => self.processes.sweep(key),
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

    #[expect(clippy::too_many_arguments, reason = "the words of a command, one by one")]
    fn spawn(
        &mut self,
        key: u64,
        program: &str,
        args: Vec<OsString>,
        env: Vec<(OsString, OsString)>,
        cwd: OsString,
        stdio: Stdio,
        live_until: Option<BootTime>,
    ) -> io::Result<()> {
        let tag = format!("{}.{key}", env::var("KEEP").unwrap_or_else(|_| "keep".into()));
        let (program, cwd) = (program.into(), cwd.into());
        let order = Order { program, args, cwd, env, env_is_all: false, tag, stdio, sandbox: None, live_until };
        let pipes = self.processes.spawn(key, &order)?;
        self.children.insert(key, Child::new(pipes));
        Ok(())
    }

    /// Returns only on failure. The pipes of the children are not handed over.
    #[cfg(unix)]
    async fn become_next(&mut self, version: &str) -> io::Error {
        poll_fn(|cx| self.processes.poll_pause(cx)).await;
        let mut handover = Handover::default();
        let state = (|| {
            let processes = self.processes.save(&mut handover).ok_or(io::ErrorKind::ResourceBusy)?;
            let protocol = match version {
                "" => serde_json::to_value(self.processes.protocol())?,
                version => version.parse::<u32>().map_err(io::Error::other)?.into(),
            };
            let state: State = (protocol, processes, self.children.keys().copied().collect());
            handover::MemoryFile::new(&serde_json::to_vec(&state)?)
        })();
        let error = match state {
            Ok(state) => match env::current_exe() {
                Ok(program) => handover::become_next(&program, &env::args_os().collect::<Vec<_>>(), &state, &handover),
                Err(error) => error,
            },
            Err(error) => error,
        };
        self.processes.resume();
        error
    }

    fn tell(&mut self, line: &str) {
        self.words.extend_from_slice(format!("{line}\n").as_bytes());
    }
}

fn in_ms(text: &str) -> io::Result<BootTime> {
    let ms: u64 = text.parse().map_err(io::Error::other)?;
    Ok(BootTime(os::boot_time() + Duration::from_millis(ms)))
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
