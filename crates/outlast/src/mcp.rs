//! Drives the relay: `outlast mcp`. One loop turns pipes, processes, files and time into events, and carries out
//! what the machine decides. Nothing in it waits.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    future::Future,
    io,
    path::PathBuf,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use outlast_core::{
    debounce::Changed,
    exit::{self, How},
    life::{self, Grace, Life},
    record,
    relay::{Action, Event, Farewell, NotWritten, Origin, Reading, Relay},
};
use serde_json::{Value, json};
use tokio::time::{Sleep, sleep_until};

use crate::{
    control::{self, Control, server::Asked, wire::Refusal},
    journal::Journal,
    lines::{Line, Lines},
    marker::{self, Marker, Markers},
    memory_watch::MemoryWatch,
    offload::{Task, offload},
    os::{self, Household, News, Order, Sandbox, Sink, Source, Stdio},
    outbox::{BYTES_HIGH, Outbox},
    report,
    start_cache::StartCache,
    watch::{Look, Watch},
};

/// A longer line of stderr is cut into pieces.
const STDERR_LINE_MAX: usize = 16 << 10;
/// What an ended child can have left in its stderr, and more: whoever still writes there is not read to the end.
const STDERR_LEFT_MAX: usize = 256 << 10;
/// The most that is still read of a stdout that somebody else holds open: what a widened pipe has room for.
const STDOUT_LEFT_MAX: usize = 1 << 20;
/// How much of a build's output is kept: its end.
const BUILD_OUTPUT_MAX: usize = 64 << 10;
/// How long the last words to the client and the sweeping of children may take once all is over.
const FAREWELL_MAX: Duration = Duration::from_secs(1);
/// How far the clock of a file system may lag behind ours.
const FILE_CLOCK: Duration = Duration::from_millis(20);
/// The key of a build among the children; generations are smaller.
const BUILD: u64 = u64::MAX;

/// What is fixed before the loop begins.
pub struct Plan {
    pub program: OsString,
    pub args: Vec<OsString>,
    pub cwd: PathBuf,
    pub build: Option<String>,
    pub grace: Grace,
    pub id: String,
    /// Where the last run of this command left what it told its client; none without a home directory.
    pub cache: Option<StartCache>,
    /// Of the server; a build is not sandboxed.
    pub sandbox: Option<Sandbox>,
    /// The server has a limit of memory.
    pub watches_memory: bool,
}

/// The entry of the cache if there is one, or why it cannot be read.
type CacheRead = Result<Option<String>, String>;

/// Everything around one conversation.
pub struct Driver {
    plan: Plan,
    relay: Relay,
    actions: Vec<Action>,
    /// From here on the relay hears how many bytes wait for a server.
    queued_bytes_max: usize,
    /// Generations whose queues the relay asked for.
    take_back: Vec<u32>,
    household: Household,
    stops: os::Stops,
    stopped_once: bool,

    stdin: Option<Source>,
    from_client: Lines,
    stdout: Option<Sink>,
    to_client: Outbox,
    hangups: os::Hangups,

    kids: BTreeMap<u32, Kid>,
    next_generation: u32,
    /// The first child is on its way. What the client says stays in its pipe until then, and so does its end: one who
    /// says it all at once and leaves is answered as well.
    awaits_first: bool,
    build: Option<Build>,

    journal: Journal,
    markers: Markers,
    writing: Option<Task<Result<String, NotWritten>>>,
    readings: Vec<(u64, Task<marker::Reading>)>,
    /// The protocol revision whose entry is being read.
    cache_reading: Option<(String, Task<CacheRead>)>,
    cache_saving: Option<Task<io::Result<()>>>,
    /// What is saved after the save that runs: revision and entry.
    cache_next: Option<(String, Option<String>)>,
    watch: Option<Watch>,
    /// Changed files that are being looked at, off the loop. Until that is done no further changes are taken.
    looking: Option<(Changed, Task<Vec<Look>>)>,
    /// When the newest server was started, or the build before it: what was changed earlier, it has seen.
    loaded_at: Option<SystemTime>,
    control: Control,
    memory: MemoryWatch,

    /// When this turn of the loop began; a turn is short.
    now: Instant,
    timer: Option<(Instant, Pin<Box<Sleep>>)>,
    /// A server has come up, and the code for that may be given back.
    has_started: bool,
    /// Long lines have been seen, and the pipes were made wider.
    is_wide: bool,
    ending: Option<(u8, Instant)>,
    /// The code for a command that never could be started, as a shell has it.
    never_started: Option<u8>,
    /// How a restart went that several may have asked for: it is logged once.
    answered: Option<Result<Value, Value>>,
}

/// One child and its pipes.
struct Kid {
    life: Life,
    /// 0 until it is known to have started.
    pid: u32,
    stdin: Option<Sink>,
    outbox: Outbox,
    /// As the relay was last told, once it was at the bound.
    queued: Option<usize>,
    /// Its stdin is closed as soon as the outbox is empty.
    close_stdin: bool,
    stdout: Option<Source>,
    from_stdout: Lines,
    stderr: Option<Source>,
    from_stderr: Lines,
    /// The exit was seen: what it wrote is read whatever the client does.
    is_ending: bool,
}

struct Build {
    output: Option<Source>,
    lines: Lines,
    tail: Vec<String>,
    bytes: usize,
    exit: Option<os::Exit>,
}

impl Driver {
    #[expect(clippy::too_many_arguments, reason = "the parts are made by different rooms and meet only here")]
    pub fn new(
        plan: Plan,
        relay: Relay,
        household: Household,
        stops: os::Stops,
        stdin: Source,
        stdout: Sink,
        hangups: os::Hangups,
        journal: Journal,
        markers: Markers,
        watch: Option<Watch>,
        control: Control,
    ) -> Driver {
        let mut memory = MemoryWatch::default();
        memory.set(plan.watches_memory, Instant::now());
        Driver {
            queued_bytes_max: relay.queued_bytes_max(),
            take_back: Vec::new(),
            plan,
            relay,
            actions: Vec::new(),
            household,
            stops,
            stopped_once: false,
            stdin: Some(stdin),
            from_client: Lines::default(),
            stdout: Some(stdout),
            to_client: Outbox::default(),
            hangups,
            kids: BTreeMap::new(),
            next_generation: 1,
            awaits_first: true,
            build: None,
            journal,
            markers,
            writing: None,
            readings: Vec::new(),
            cache_reading: None,
            cache_saving: None,
            cache_next: None,
            watch,
            looking: None,
            loaded_at: None,
            control,
            memory,
            now: Instant::now(),
            timer: None,
            has_started: false,
            is_wide: false,
            ending: None,
            never_started: None,
            answered: None,
        }
    }

    /// Runs until the conversation is over; the exit code.
    pub async fn run(mut self) -> u8 {
        self.start();
        let code = std::future::poll_fn(|cx| self.poll(cx)).await;
        let code = if code == 0 { self.never_started.unwrap_or(0) } else { code };
        let line = self.journal.end(code);
        self.control.record(&line);
        self.control.end();
        code
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<u8> {
        loop {
            self.now = Instant::now();
            let mut moved = self.poll_stops(cx);
            moved |= self.poll_news(cx);
            moved |= self.poll_kids(cx);
            moved |= self.poll_client(cx);
            moved |= self.poll_files(cx);
            moved |= self.poll_control(cx);
            moved |= self.poll_memory(cx);
            moved |= self.flush(cx);
            if let Some((code, until)) = self.ending {
                let quiet = self.to_client.is_empty() && self.kids.is_empty() && self.cache_saving.is_none();
                if quiet || until <= Instant::now() {
                    return Poll::Ready(code);
                }
            }
            moved |= self.poll_time(cx);
            if !moved {
                if std::mem::take(&mut self.has_started) {
                    os::give_back_code();
                }
                return Poll::Pending;
            }
        }
    }

    fn tell(&mut self, event: Event) {
        let mut actions = std::mem::take(&mut self.actions);
        self.relay.handle(event, self.now, &mut actions);
        for action in actions.drain(..) {
            self.act(action);
        }
        // The next time it is another one, though it be the same to a letter.
        self.answered = None;
        self.actions = actions;
        while let Some(generation) = self.take_back.pop() {
            let unsent = self.kids.get_mut(&generation).map(|kid| kid.outbox.take_back()).unwrap_or_default();
            self.tell(Event::TakenBack { generation, unsent });
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::TellClient(line) => {
                if self.stdout.is_some() {
                    self.to_client.put(line, None);
                }
            }
            Action::TellServer { generation, line, mark } => {
                if let Some(kid) = self.kids.get_mut(&generation) {
                    kid.outbox.put(line, mark);
                }
            }
            Action::ReadCache(revision) => {
                if let Some(cache) = self.plan.cache.clone() {
                    let of = revision.clone();
                    self.cache_reading = Some((revision, offload(move || cache.read(&of))));
                }
            }
            Action::SaveCache { revision, entry } => {
                self.cache_next = Some((revision, entry));
                self.save_cache();
            }
            Action::TakeBack(generation) => self.take_back.push(generation),
            Action::CloseStdin(generation) => {
                if let Some(kid) = self.kids.get_mut(&generation) {
                    kid.stdin = None;
                }
            }
            Action::Start => self.start(),
            Action::Stop { generation, how } => self.live(generation, life::Event::StopAsked(how)),
            Action::Build => self.start_build(),
            Action::StopBuild => self.household.signal(BUILD, os::Signal::Kill),
            Action::MarkReady(generation) => {
                self.has_started = true;
                self.journal.ready(generation);
            }
            Action::WriteMarker { pid, reason } => self.write_marker(pid, reason),
            Action::ReadMarker(key) => {
                let markers = self.markers.clone();
                self.readings.push((key, offload(move || markers.read())));
            }
            Action::Record(record) => {
                let line = self.journal.record(record);
                self.control.record(&line);
            }
            Action::Divert { line, is_json, .. } => {
                if !line.trim_ascii().is_empty() {
                    self.journal.diverted(&line, is_json);
                }
            }
            Action::Answer { ticket, result } => {
                if self.answered.as_ref() != Some(&result) {
                    self.journal.answered(&result);
                    self.answered = Some(result.clone());
                }
                self.control.answer(ticket, &result.map_err(refused_restart));
            }
            Action::End(code) => self.ending = Some((code, Instant::now() + FAREWELL_MAX)),
        }
    }

    // ---- children -----------------------------------------------------------------------------------------

    fn start(&mut self) {
        let generation = self.next_generation;
        if self.plan.build.is_none() {
            self.loaded_at = Some(SystemTime::now());
        }
        let order = Order {
            program: self.plan.program.clone(),
            args: self.plan.args.clone(),
            cwd: self.plan.cwd.clone(),
            env: Vec::new(),
            tag: format!("{}.{generation}", self.plan.id),
            env_is_all: false,
            stdio: Stdio::Piped,
            sandbox: self.plan.sandbox.clone(),
        };
        match self.household.spawn(generation.into(), &order) {
            Ok(pipes) => {
                let kid = Kid {
                    life: Life::new(self.plan.grace),
                    pid: 0,
                    stdin: pipes.stdin,
                    outbox: Outbox::default(),
                    queued: None,
                    close_stdin: false,
                    stdout: pipes.stdout,
                    from_stdout: Lines::default(),
                    stderr: pipes.stderr,
                    from_stderr: Lines::in_pieces(STDERR_LINE_MAX),
                    is_ending: false,
                };
                self.kids.insert(generation, kid);
                if self.is_wide {
                    self.widen();
                }
            }
            Err(error) => {
                self.awaits_first = false;
                self.tell(Event::StartFailed(report::plain(&error.to_string())));
            }
        }
    }

    fn poll_news(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(news) = self.household.poll_news(cx) else { return false };
        match news {
            News::Started { key: BUILD, .. } | News::Swept { key: BUILD } => {}
            News::StartFailed { key: BUILD, error } => {
                self.build = None;
                self.tell(Event::BuildEnded(Err(format!("cannot be started\n{error}"))));
            }
            News::Exited { key: BUILD, exit } => {
                self.household.sweep(BUILD);
                if let Some(build) = &mut self.build {
                    build.exit = Some(exit);
                }
            }
            News::Started { key, pid } => {
                let generation = generation_of(key);
                self.awaits_first = false;
                self.never_started = None;
                if let Some(kid) = self.kids.get_mut(&generation) {
                    kid.pid = pid;
                    self.next_generation = generation + 1;
                    self.live(generation, life::Event::Started { pid });
                }
            }
            News::StartFailed { key, error } => {
                let generation = generation_of(key);
                self.awaits_first = false;
                self.kids.remove(&generation);
                self.say_why_not_started(&error);
                self.tell(Event::StartFailed(report::plain(&error.to_string())));
            }
            News::Exited { key, exit } => {
                let generation = generation_of(key);
                if let Some(kid) = self.kids.get_mut(&generation) {
                    kid.is_ending = true;
                }
                let exit = match exit {
                    os::Exit::Code(code) => exit::Exit::Code(code),
                    os::Exit::Signal(signal) => exit::Exit::Signal(signal),
                };
                self.live(generation, life::Event::Exited(exit));
            }
            News::Swept { key } => self.live(generation_of(key), life::Event::Swept),
            // Only of children with a terminal.
            News::Stopped { .. } => {}
            News::Noticed(sentence) => self.journal.note(&format!("WARNING: {sentence}")),
            News::KeeperLost => {
                // Nothing can be started or stopped any more. What runs goes on until its pipes close.
                self.journal.note("the process that keeps the children is gone; no server can be started any more");
                self.tell(Event::ClientEnded(Farewell::Heard));
                self.ending.get_or_insert((1, Instant::now() + FAREWELL_MAX));
            }
        }
        true
    }

    /// The first failure of a command that never ran is said as for any other mistake on the command line.
    fn say_why_not_started(&mut self, error: &io::Error) {
        let program = self.plan.program.to_string_lossy();
        let report = report::cannot_start(&program, error);
        if self.next_generation == 1 {
            self.never_started = Some(report.code);
        }
        self.journal.report(&report);
    }

    /// Tells a life what happened, and carries out what it decides.
    fn live(&mut self, generation: u32, event: life::Event) {
        let Some(kid) = self.kids.get_mut(&generation) else { return };
        for action in kid.life.handle(event, self.now) {
            let Some(kid) = self.kids.get_mut(&generation) else { return };
            match action {
                life::Action::CloseStdin => kid.close_stdin = true,
                life::Action::Terminate => self.household.signal(generation.into(), os::Signal::Terminate),
                life::Action::Kill => self.household.signal(generation.into(), os::Signal::Kill),
                life::Action::Sweep => self.household.sweep(generation.into()),
                life::Action::DropStdout => self.drain_stdout(generation),
                life::Action::ReportStarted => {
                    let pid = kid.pid;
                    self.tell(Event::ServerStarted { generation, pid, unix: unix_now() });
                }
                life::Action::Report(gone) => self.report_gone(generation, gone),
            }
        }
        if self.kids.get(&generation).is_some_and(|kid| kid.life.is_over()) {
            self.kids.remove(&generation);
        }
    }

    fn report_gone(&mut self, generation: u32, gone: life::Gone) {
        self.drain_stderr(generation);
        let Some(kid) = self.kids.get_mut(&generation) else { return };
        kid.stdin = None;
        kid.stdout = None;
        let unsent = kid.outbox.unsent();
        self.tell(Event::ServerWentDown { generation, how: gone.how, unsent });
    }

    /// Whatever an ended child wrote to its stderr is there already, whether or not the reactor has heard of it.
    fn drain_stderr(&mut self, generation: u32) {
        let mut left = STDERR_LEFT_MAX;
        while let Some(kid) = self.kids.get_mut(&generation)
            && let Some(stderr) = &mut kid.stderr
        {
            let Some(read) = stderr.read_now(kid.from_stderr.room()) else {
                // A daemon of its may hold the pipe open, so last words without a line feed would wait for ever.
                let rest = kid.from_stderr.rest();
                return self.log(generation, rest);
            };
            left = left.saturating_sub(*read.as_ref().unwrap_or(&0));
            self.heard_stderr(generation, read);
            if left == 0 {
                return;
            }
        }
    }

    fn poll_kids(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        let (first, last) = match (self.kids.first_key_value(), self.kids.last_key_value()) {
            (Some((first, _)), Some((last, _))) => (*first, *last),
            _ => (1, 0),
        };
        for generation in first..=last {
            // What it says before we heard that it started waits until then: the relay does not know it yet.
            if self.kids.get(&generation).is_none_or(|kid| kid.pid == 0) {
                continue;
            }
            moved |= self.poll_stdout(generation, cx);
            moved |= self.poll_stderr(generation, cx);
        }
        moved | self.poll_build(cx)
    }

    fn poll_stdout(&mut self, generation: u32, cx: &mut Context<'_>) -> bool {
        let Some(kid) = self.kids.get_mut(&generation) else { return false };
        if !self.to_client.is_below(BYTES_HIGH) && !kid.is_ending {
            return false; // Freed room wakes us.
        }
        let Some(stdout) = &mut kid.stdout else { return false };
        let Poll::Ready(read) = stdout.poll_read(cx, kid.from_stdout.room()) else { return false };
        if !self.is_wide && kid.from_stdout.is_long() {
            self.widen();
        }
        if matches!(read, Ok(length) if length > 0) {
            self.heard_stdout(generation);
        } else {
            self.close_stdout(generation);
            self.live(generation, life::Event::StdoutClosed);
        }
        true
    }

    fn heard_stdout(&mut self, generation: u32) {
        while let Some(line) = self.kids.get_mut(&generation).and_then(|kid| kid.from_stdout.next_line()) {
            match line {
                Line::Whole(line) => self.tell(Event::ServerSaid(generation, line)),
                // An answer may be lost in it.
                Line::TooLong(_) => self.live(generation, life::Event::StopAsked(How::LineTooLong)),
            }
        }
    }

    fn close_stdout(&mut self, generation: u32) {
        let Some(kid) = self.kids.get_mut(&generation) else { return };
        kid.stdout = None;
        if let Some(Line::Whole(line)) = kid.from_stdout.rest() {
            self.tell(Event::ServerSaid(generation, line));
        }
    }

    /// The time to read is over, but we may have been kept from using it: what stands in the pipe was said in time.
    fn drain_stdout(&mut self, generation: u32) {
        let mut heard = 0;
        while heard < STDOUT_LEFT_MAX
            && let Some(kid) = self.kids.get_mut(&generation)
            && let Some(stdout) = &mut kid.stdout
            && let Some(Ok(length @ 1..)) = stdout.read_now(kid.from_stdout.room())
        {
            heard += length;
            self.heard_stdout(generation);
        }
        self.close_stdout(generation);
    }

    /// Wide pipes cost the user's share of them, so only those who need them have them.
    fn widen(&mut self) {
        self.is_wide = true;
        self.stdin.iter().for_each(Source::widen);
        self.stdout.iter().for_each(Sink::widen);
        for kid in self.kids.values() {
            kid.stdin.iter().for_each(Sink::widen);
            kid.stdout.iter().for_each(Source::widen);
        }
    }

    fn poll_stderr(&mut self, generation: u32, cx: &mut Context<'_>) -> bool {
        let Some(kid) = self.kids.get_mut(&generation) else { return false };
        let Some(stderr) = &mut kid.stderr else { return false };
        let Poll::Ready(read) = stderr.poll_read(cx, kid.from_stderr.room()) else { return false };
        self.heard_stderr(generation, read);
        true
    }

    fn heard_stderr(&mut self, generation: u32, read: io::Result<usize>) {
        let Some(kid) = self.kids.get_mut(&generation) else { return };
        match read {
            Ok(length) if length > 0 => {
                let lines: Vec<Line> = std::iter::from_fn(|| kid.from_stderr.next_line()).collect();
                self.log(generation, lines);
            }
            Ok(_) | Err(_) => {
                kid.stderr = None;
                let rest = kid.from_stderr.rest();
                self.log(generation, rest);
            }
        }
    }

    fn log(&mut self, generation: u32, lines: impl IntoIterator<Item = Line>) {
        for line in lines {
            let (Line::Whole(line) | Line::TooLong(line)) = line;
            let text = String::from_utf8_lossy(line.trim_ascii_end()).into_owned();
            self.journal.stderr(generation, &text);
            self.tell(Event::ServerLogged(generation, text));
        }
    }

    // ---- the build ------------------------------------------------------------------------------------------

    fn start_build(&mut self) {
        let Some(command) = &self.plan.build else { return };
        self.loaded_at = Some(SystemTime::now());
        let (program, flag) = os::SHELL;
        let order = Order {
            program: program.into(),
            args: vec![flag.into(), command.into()],
            cwd: self.plan.cwd.clone(),
            env: Vec::new(),
            tag: format!("{}.build", self.plan.id),
            env_is_all: false,
            stdio: Stdio::Build,
            sandbox: None,
        };
        match self.household.spawn(BUILD, &order) {
            Ok(pipes) => {
                let lines = Lines::in_pieces(STDERR_LINE_MAX);
                self.build = Some(Build { output: pipes.stderr, lines, tail: Vec::new(), bytes: 0, exit: None });
            }
            Err(error) => self.tell(Event::BuildEnded(Err(format!("cannot be started\n{error}")))),
        }
    }

    fn poll_build(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(build) = &mut self.build else { return false };
        let mut moved = false;
        if let Some(output) = &mut build.output
            && let Poll::Ready(read) = output.poll_read(cx, build.lines.room())
        {
            moved = true;
            let is_over = !matches!(read, Ok(length) if length > 0);
            let rest = if is_over { build.lines.rest() } else { None };
            while let Some(Line::Whole(line) | Line::TooLong(line)) = build.lines.next_line() {
                build.keep(&line);
            }
            if let Some(Line::Whole(line)) = rest {
                build.keep(&line);
            }
            if is_over {
                build.output = None;
            }
        }
        if build.output.is_none()
            && let Some(exit) = build.exit
        {
            let tail = std::mem::take(&mut build.tail).join("\n");
            self.build = None;
            self.tell(Event::BuildEnded(match exit {
                os::Exit::Code(0) => Ok(()),
                os::Exit::Code(code) => Err(format!("exit code {code}\n{tail}")),
                os::Exit::Signal(signal) => Err(format!("signal {signal}\n{tail}")),
            }));
            moved = true;
        }
        moved
    }

    // ---- the client ------------------------------------------------------------------------------------------

    fn poll_client(&mut self, cx: &mut Context<'_>) -> bool {
        let is_low = self.to_client.is_below(BYTES_HIGH) && self.relay.reads_client();
        // Of a client that has gone no more comes than a pipe holds, and behind it stands the end.
        let is_heard = is_low || self.hangups.poll_stdin(cx).is_ready();
        let Some(stdin) = self.stdin.as_mut().filter(|_| is_heard && !self.awaits_first) else { return false };
        let Poll::Ready(read) = stdin.poll_read(cx, self.from_client.room()) else { return false };
        if !self.is_wide && self.from_client.is_long() {
            self.widen();
        }
        match read {
            Ok(length) if length > 0 => {
                while let Some(line) = self.from_client.next_line() {
                    match line {
                        Line::Whole(line) if line.trim_ascii().is_empty() => {}
                        Line::Whole(line) => self.tell(Event::ClientSaid(line)),
                        Line::TooLong(start) => self.tell(Event::ClientSaidTooMuch(start)),
                    }
                }
            }
            Ok(_) | Err(_) => {
                self.stdin = None;
                if let Some(Line::Whole(line)) = self.from_client.rest() {
                    self.tell(Event::ClientSaid(line));
                }
                self.tell(Event::ClientEnded(Farewell::Heard));
            }
        }
        true
    }

    fn flush(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        if let Some(stdout) = &mut self.stdout
            && !self.to_client.is_empty()
        {
            let was_low = self.to_client.is_below(BYTES_HIGH);
            let flushed = self.to_client.poll_flush(stdout, cx);
            moved |= !was_low && self.to_client.is_below(BYTES_HIGH);
            if let Poll::Ready(Err(_)) = flushed {
                self.break_stdout();
                moved = true;
            }
        }
        if self.stdout.is_some() && self.hangups.poll_stdout(cx).is_ready() {
            self.break_stdout();
            moved = true;
        }
        let mut refused = Vec::new();
        let mut queues = Vec::new();
        for (generation, kid) in &mut self.kids {
            if let Some(stdin) = &mut kid.stdin {
                if !kid.outbox.is_empty()
                    && let Poll::Ready(Err(_)) = kid.outbox.poll_flush(stdin, cx)
                {
                    kid.stdin = None;
                    refused.push(*generation);
                    continue;
                }
                if kid.close_stdin && kid.outbox.is_empty() {
                    kid.stdin = None;
                }
            }
            // Of a child whose stdin is closed, too: what waits for it goes to the next one.
            let queued = Some(kid.outbox.bytes()).filter(|bytes| *bytes >= self.queued_bytes_max);
            if queued != kid.queued {
                kid.queued = queued;
                queues.push((*generation, kid.outbox.bytes()));
            }
        }
        for (generation, bytes) in queues {
            self.tell(Event::ServerQueue { generation, bytes });
            moved = true;
        }
        for generation in refused {
            self.live(generation, life::Event::StdinRefused);
            moved = true;
        }
        moved
    }

    /// Nobody listens any more.
    fn break_stdout(&mut self) {
        self.stdout = None;
        self.to_client.clear();
        self.tell(Event::ClientEnded(Farewell::Broken));
    }

    fn poll_stops(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(stop) = self.stops.poll_next(cx) else { return false };
        self.journal.note(&format!("{} received, stopping", stop.name));
        self.stdin = None;
        if std::mem::replace(&mut self.stopped_once, true) {
            for generation in self.kids.keys().copied().collect::<Vec<_>>() {
                self.live(generation, life::Event::KillAsked);
            }
        } else {
            self.tell(Event::ClientEnded(Farewell::Heard));
        }
        true
    }

    // ---- others ------------------------------------------------------------------------------------------------

    fn poll_control(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(Asked { ticket, method, params }) = self.control.poll(cx) else { return false };
        let answer = match method.as_str() {
            "state" => {
                let mut state = self.relay.status(Instant::now());
                self.control.complete(&mut state);
                Ok(state)
            }
            "pid" => Ok(json!({"pid": self.relay.status(Instant::now())["pid"]})),
            "restart" => match control::restart_mode(&params).and_then(|_| control::restart_now(&params)) {
                Ok(at_once) => {
                    let reason = params["reason"].as_str().unwrap_or("asked for from outside").to_owned();
                    // Answered when it is done.
                    self.tell(Event::RestartAsked { ticket, origin: Origin::Control, reason, at_once });
                    return true;
                }
                Err(refusal) => Err(refusal),
            },
            "resume" => {
                let state = self.relay.status(Instant::now())["state"].take();
                if matches!(state.as_str(), Some("given_up" | "stopped" | "backoff")) {
                    let reason = "resumed".to_owned();
                    self.tell(Event::Forgiven);
                    let origin = Origin::Control;
                    self.tell(Event::RestartAsked { ticket, origin, reason, at_once: false });
                    return true;
                }
                Ok(json!({"resumed": false, "state": state}))
            }
            "stop" => {
                let graceful = params["graceful"].as_bool().unwrap_or(true);
                self.journal.note(if graceful { "Stop requested" } else { "Stop at once requested" });
                self.stop(graceful);
                Ok(json!({"stopping": true}))
            }
            "subscribe" => {
                self.control.subscribe(ticket);
                return true;
            }
            method => Err(control::unknown_method(method, &control::METHODS)),
        };
        self.control.answer(ticket, &answer);
        true
    }

    /// As when the client leaves; or at once.
    fn stop(&mut self, graceful: bool) {
        self.stdin = None;
        if graceful {
            return self.tell(Event::ClientEnded(Farewell::Heard));
        }
        self.stopped_once = true;
        self.tell(Event::ClientEnded(Farewell::Broken));
        for generation in self.kids.keys().copied().collect::<Vec<_>>() {
            self.live(generation, life::Event::KillAsked);
        }
    }

    // ---- files and time ----------------------------------------------------------------------------------------

    fn write_marker(&mut self, pid: u32, reason: String) {
        let markers = self.markers.clone();
        let now = unix_now();
        let iso_time = record::iso((now * 1000.0) as u64);
        let marker = Marker { timestamp: now, pid, reason, iso_time, id: Some(self.plan.id.clone()) };
        self.writing = Some(offload(move || match markers.write(&marker) {
            Ok(()) => Ok(markers.path().map(|path| path.display().to_string()).unwrap_or_default()),
            Err(error) => {
                Err(NotWritten { why: error.to_string(), timestamp: marker.timestamp, iso_time: marker.iso_time })
            }
        }));
    }

    /// Begins the next save, unless one runs.
    fn save_cache(&mut self) {
        if self.cache_saving.is_none()
            && let Some(cache) = self.plan.cache.clone()
            && let Some((revision, entry)) = self.cache_next.take()
        {
            self.cache_saving = Some(offload(move || cache.save(&revision, entry.as_deref())));
        }
    }

    fn poll_cache(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        if let Some((_, reading)) = &mut self.cache_reading
            && let Poll::Ready(read) = Pin::new(reading).poll(cx)
        {
            let (revision, _) = self.cache_reading.take().expect("looked at above");
            let entry = match read {
                Ok(Ok(entry)) => entry,
                Ok(Err(why)) => {
                    self.journal.note(&format!("the cache of this command's last run is ignored: {why}"));
                    None
                }
                Err(error) => {
                    self.journal.note(&format!("the cache of this command's last run is not read: {error}"));
                    None
                }
            };
            self.tell(Event::CacheRead { revision, entry });
            moved = true;
        }
        if let Some(saving) = &mut self.cache_saving
            && let Poll::Ready(saved) = Pin::new(saving).poll(cx)
        {
            self.cache_saving = None;
            if let Err(error) = saved.unwrap_or_else(Err) {
                self.journal.note(&format!("what the server offers could not be cached for the next start: {error}"));
            }
            self.save_cache();
            moved = true;
        }
        moved
    }

    fn poll_files(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = self.poll_cache(cx);
        if let Some(writing) = &mut self.writing
            && let Poll::Ready(result) = Pin::new(writing).poll(cx)
        {
            self.writing = None;
            let result = result.unwrap_or_else(|error| {
                let timestamp = unix_now();
                let iso_time = record::iso((timestamp * 1000.0) as u64);
                Err(NotWritten { why: error.to_string(), timestamp, iso_time })
            });
            self.tell(Event::MarkerWritten(result));
            moved = true;
        }
        let mut index = 0;
        while index < self.readings.len() {
            let (key, reading) = &mut self.readings[index];
            let key = *key;
            let Poll::Ready(reading) = Pin::new(reading).poll(cx) else {
                index += 1;
                continue;
            };
            self.readings.swap_remove(index);
            let reading = match reading {
                Ok(marker::Reading::Missing { path }) => Reading::Missing { path: path.display().to_string() },
                Ok(marker::Reading::Corrupt { path, error }) => {
                    Reading::Corrupt { path: path.display().to_string(), error }
                }
                Ok(marker::Reading::Valid(marker)) => Reading::Valid {
                    timestamp: marker.timestamp,
                    pid: marker.pid,
                    reason: marker.reason,
                    iso_time: marker.iso_time,
                },
                Err(error) => Reading::Corrupt { path: String::new(), error: error.to_string() },
            };
            self.tell(Event::MarkerRead { key, reading, unix: unix_now() });
            moved = true;
        }
        moved | self.poll_watch(cx)
    }

    fn poll_watch(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(watch) = &mut self.watch else { return false };
        if let Some(sentence) = watch.trouble() {
            self.journal.note(&format!("WARNING: {sentence}"));
        }
        if let Some((_, looking)) = &mut self.looking {
            let Poll::Ready(looks) = Pin::new(looking).poll(cx) else { return false };
            if let Some((changed, _)) = self.looking.take() {
                self.files_changed(changed, &looks.unwrap_or_default());
            }
            return true;
        }
        let Poll::Ready(changed) = watch.poll_next(cx) else { return false };
        let paths: Vec<PathBuf> = changed.paths.iter().map(|path| self.plan.cwd.join(path)).collect();
        let looking = offload(move || paths.iter().map(|path| Look::at(path)).collect());
        self.looking = Some((changed, looking));
        true
    }

    fn files_changed(&mut self, changed: Changed, looks: &[Look]) {
        // A restart that was asked for may be quicker than the watch: then the newest server has loaded it already.
        let is_loaded = |look: &Look| {
            let changed = look.changed.zip(self.loaded_at);
            changed.is_some_and(|(changed, loaded)| changed + FILE_CLOCK < loaded)
        };
        let is_complete = changed.more == 0 && !changed.is_moved && looks.len() == changed.paths.len();
        if is_complete && !looks.is_empty() && looks.iter().all(is_loaded) {
            return;
        }
        let prints = looks.iter().map(|look| look.print).collect();
        self.tell(Event::FilesChanged { changed, prints });
    }

    fn poll_memory(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(found) = self.memory.poll(cx) else { return false };
        for (key, bytes) in found {
            self.tell(Event::ServerMeasured { generation: generation_of(key), bytes });
        }
        true
    }

    fn poll_time(&mut self, cx: &mut Context<'_>) -> bool {
        let mut soonest = self.relay.deadline();
        let others = [self.ending.map(|(_, at)| at), self.memory.deadline()].into_iter().flatten();
        for at in self.kids.values().filter_map(|kid| kid.life.deadline()).chain(others) {
            soonest = Some(soonest.map_or(at, |soonest| soonest.min(at)));
        }
        let Some(at) = soonest else {
            self.timer = None;
            return false;
        };
        self.now = Instant::now();
        if at <= self.now {
            if self.memory.deadline().is_some_and(|due| due <= self.now) {
                let children = self.kids.iter().filter(|(_, kid)| kid.pid != 0 && !kid.is_ending);
                let children = children.map(|(generation, kid)| (u64::from(*generation), kid.pid)).collect();
                self.memory.measure(children, self.now);
            }
            self.tell(Event::TimePassed);
            for generation in self.kids.keys().copied().collect::<Vec<_>>() {
                let Some(due) = self.kids.get(&generation).map(|kid| kid.life.due(os::is_exiting)) else { continue };
                self.live(generation, due);
            }
            return true;
        }
        match &mut self.timer {
            Some((set, timer)) => {
                if *set != at {
                    timer.as_mut().reset(at.into());
                    *set = at;
                }
            }
            None => self.timer = Some((at, Box::pin(sleep_until(at.into())))),
        }
        let (_, timer) = self.timer.as_mut().expect("set above");
        timer.as_mut().poll(cx).is_ready()
    }
}

impl Build {
    fn keep(&mut self, line: &Bytes) {
        let text = String::from_utf8_lossy(line.trim_ascii_end()).into_owned();
        self.bytes += text.len();
        self.tail.push(text);
        while self.bytes > BUILD_OUTPUT_MAX {
            self.bytes -= self.tail.remove(0).len();
        }
    }
}

/// A restart that failed, as those outside are told.
fn refused_restart(mut report: Value) -> Refusal {
    let message = report["error"].as_str().unwrap_or("the restart failed").to_owned();
    if let Some(report) = report.as_object_mut() {
        report.remove("error");
    }
    Refusal { data: report, ..Refusal::new("restart_failed", message) }
}

fn generation_of(key: u64) -> u32 {
    u32::try_from(key).expect("keys other than the build's are generations")
}

fn unix_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
