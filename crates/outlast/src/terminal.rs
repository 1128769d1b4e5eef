//! Drives a session: `outlast run`. One loop carries bytes between the person's terminal and the agent's, and carries
//! out what the machine decides. Nothing in it waits, and no byte is looked at on its way but for what must be known.

mod guard;
mod paint;
mod screen;
mod sending;

pub use self::{paint::Extent, screen::Screen};

use std::{
    collections::BTreeMap,
    ffi::OsString,
    future::Future,
    io::IoSlice,
    path::{Path, PathBuf},
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant, SystemTime},
};

use bytes::{Buf, BytesMut};
use outlast_core::{
    agent::{Agent, Prompt, TAIL_MAX},
    exit::{self, How},
    life::{self, Grace, Life},
    record::{self, Record},
    restarts::State as Health,
    send::Sends,
    session::{Action, Answer, Choice, Class, Event, LastInput, Mode, Note, Refused, Session},
    typing::Typing,
};
use serde_json::{Value, json};
use tokio::time::{Sleep, sleep_until};

use crate::{
    base64,
    control::{self, Control, server::Asked, wire::Refusal},
    cwd::{self, Cwd},
    environment, frontmatter, home,
    journal::Journal,
    os::{self, Household, News, Order, Outer, OuterEvent, Sink, Size, Source, Stdio, Window},
    report::{self, Report},
    rollout, transcript,
};

/// Room made for one read of the agent's terminal, which hands over no more than this.
const READ_ROOM: usize = 64 << 10;
/// Room made for one read of what is typed; a terminal hands over no more than this.
const KEYS_ROOM: usize = 4 << 10;
/// So much is read before it is shown, if it is there; above this the agent is not listened to.
const SHOWN_HIGH: usize = 16 << 10;
/// Above this the person is not listened to: the agent does not read.
const TYPED_HIGH: usize = 64 << 10;
/// What is injected beyond this is refused.
const TYPED_MAX: usize = 1 << 20;
/// So often bytes are carried before anything else is looked at.
const ROUNDS_MAX: usize = 16;
/// How long the last words and the sweeping may take once all is over.
const FAREWELL_MAX: Duration = Duration::from_secs(1);

const ALTERNATE: &[u8] = b"\x1b[?1049";
const CTRL_C: u8 = 0x03;
const CTRL_D: u8 = 0x04;

/// What every session understands.
const METHODS: [&str; 9] = ["state", "pid", "restart", "inject", "send", "screen", "resume", "stop", "subscribe"];

/// What is fixed before the loop begins.
pub struct Plan {
    pub id: String,
    pub program: String,
    pub args: Vec<String>,
    pub document: Option<PathBuf>,
    pub cwd: Option<PathBuf>,
    pub env_pass: Vec<String>,
    /// Where outlast was started.
    pub here: PathBuf,
    pub grace: Grace,
}

/// What is looked up anew at each start.
pub struct Place {
    pub cwd: Cwd,
    pub env: Vec<(OsString, OsString)>,
}

impl Plan {
    pub fn place(&self) -> Result<Place, Report> {
        let wrong = |error: &dyn std::error::Error, hint| Report::of(error, hint, report::USAGE);
        let said = match &self.document {
            Some(document) => {
                frontmatter::read(&self.here.join(document)).map_err(|error| wrong(&error, error.hint()))?
            }
            None => frontmatter::Frontmatter::default(),
        };
        let wish = cwd::Wish {
            flag: self.cwd.as_deref(),
            frontmatter: said.cwd.as_deref(),
            document: self.document.as_deref(),
            here: &self.here,
        };
        let cwd = cwd::resolve(wish).map_err(|error| wrong(&error, error.hint()))?;
        let document = self.document.as_deref().and_then(|document| self.here.join(document).canonicalize().ok());
        let about = environment::About { session: &self.id, document: document.as_deref(), cwd: &cwd.path };
        let env = environment::build(environment::ours(), &self.env_pass, &said.env, about)
            .map_err(|error| wrong(&error, None))?;
        Ok(Place { cwd, env })
    }
}

/// Everything around one session.
pub struct Terminal {
    plan: Plan,
    place: Place,
    session: Session,
    agent: Agent,
    typing: Typing,
    sends: Sends,
    household: Household,
    stops: os::Stops,
    stopped_once: bool,

    outer: Option<Outer>,
    /// Where the next keys are read to; empty in between.
    keys: BytesMut,
    /// Where the agent's output goes when there is no terminal.
    stdout: Option<Sink>,
    shown: BytesMut,
    /// What is on its way to the person, and not yet in the model.
    unseen: Vec<u8>,
    screen: Screen,
    alternate: Alternate,
    size: Size,

    child: Option<Child>,
    lives: BTreeMap<u64, Life>,
    generation: u64,
    /// Since when, and with which reason, somebody waits for the next agent.
    asked_at: BTreeMap<u64, Instant>,

    journal: Journal,
    control: Control,
    announce: Option<os::Announce>,
    /// Why the command could not be started, for when we are the one to say it.
    complaint: Option<Report>,

    now: Instant,
    timer: Option<(Instant, Pin<Box<Sleep>>)>,
    ending: Option<(u8, Instant)>,
}

/// The agent there is, and its terminal.
struct Child {
    key: u64,
    pid: u32,
    mode: Mode,
    since: SystemTime,
    stdin: Option<Sink>,
    typed: BytesMut,
    stdout: Option<Source>,
    window: Option<Window>,
    /// Until it was seen.
    prompt: Option<Prompt>,
    tail: Vec<u8>,
    /// The exit was seen: what it wrote is read however slow the person's terminal is.
    is_ending: bool,
}

/// What the parts are made of, before they meet.
pub struct Parts {
    pub plan: Plan,
    pub place: Place,
    pub session: Session,
    pub agent: Agent,
    pub household: Household,
    pub stops: os::Stops,
    pub outer: Option<Outer>,
    pub stdout: Option<Sink>,
    pub journal: Journal,
    pub control: Control,
    pub announce: Option<os::Announce>,
}

impl Terminal {
    pub fn new(parts: Parts) -> Terminal {
        let size = parts.outer.as_ref().map(Outer::size).unwrap_or_default();
        Terminal {
            typing: Typing::new(parts.agent.farewells()),
            sends: Sends::new(parts.agent.kind()),
            plan: parts.plan,
            place: parts.place,
            session: parts.session,
            agent: parts.agent,
            household: parts.household,
            stops: parts.stops,
            stopped_once: false,
            outer: parts.outer,
            keys: BytesMut::new(),
            stdout: parts.stdout,
            shown: BytesMut::new(),
            unseen: Vec::new(),
            screen: Screen::new(size),
            alternate: Alternate::default(),
            size,
            child: None,
            lives: BTreeMap::new(),
            generation: 0,
            asked_at: BTreeMap::new(),
            journal: parts.journal,
            control: parts.control,
            announce: parts.announce,
            complaint: None,
            now: Instant::now(),
            timer: None,
            ending: None,
        }
    }

    /// Runs until the session is over; the agent's exit code, or why there never was an agent.
    pub async fn run(mut self) -> Result<u8, Report> {
        let actions = self.session.begin();
        self.act_all(actions);
        let code = std::future::poll_fn(|cx| self.poll(cx)).await;
        self.journal.event("session_end", &[("code", &code)]);
        let Terminal { journal, mut control, outer, complaint, household, .. } = self;
        let line = journal.end(code);
        control.record(&line);
        control.end();
        drop(outer);
        household.close().await;
        complaint.map_or(Ok(code), Err)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<u8> {
        loop {
            self.now = Instant::now();
            let mut moved = self.poll_stops(cx);
            moved |= self.poll_news(cx);
            moved |= self.poll_outer(cx);
            moved |= self.poll_control(cx);
            moved |= self.carry(cx);
            moved |= self.tend_sends();
            if let Some((code, until)) = self.ending {
                let is_quiet = self.shown.is_empty() && self.lives.is_empty();
                if is_quiet || until <= Instant::now() {
                    return Poll::Ready(code);
                }
            }
            moved |= self.poll_time(cx);
            if !moved {
                return Poll::Pending;
            }
        }
    }

    fn tell(&mut self, event: Event) {
        let actions = self.session.handle(event, self.now);
        self.act_all(actions);
    }

    fn act_all(&mut self, actions: Vec<Action>) {
        for action in actions {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Start(mode) => self.start(mode),
            Action::Stop => self.live(self.generation, life::Event::StopAsked(How::Stopped)),
            Action::Kill => self.live(self.generation, life::Event::KillAsked),
            Action::Ask => self.say(&format!(
                "{} left ({}). Enter: go on with the conversation, f: a fresh one, q: quit",
                self.plan.program,
                self.session.last_exit().map(ToString::to_string).unwrap_or_default(),
            )),
            Action::Note(note) => self.note(note),
            Action::Answer { ticket, result } => self.answer(ticket, result),
            Action::End(code) => {
                self.end_sends(true);
                if let Some(announce) = self.announce.take() {
                    let words =
                        self.complaint.take().map_or_else(|| "it ended at once".to_owned(), |it| it.to_string());
                    announce.say(&json!({"error": words, "code": code}).to_string());
                }
                self.ending = Some((code, Instant::now() + FAREWELL_MAX));
            }
        }
    }

    // ---- the agent ----------------------------------------------------------------------------------------

    fn start(&mut self, mode: Mode) {
        // The first place was looked up before there was anything to log it in.
        if self.generation > 0 {
            match self.plan.place() {
                Ok(place) => self.place = place,
                Err(report) => return self.start_failed(&report),
            }
        }
        self.generation += 1;
        let key = self.generation;
        if mode == Mode::Continue
            && let (Some(id), Some(home)) = (self.agent.kept_as(), self.agents_home("CLAUDE_CONFIG_DIR", ".claude"))
        {
            let kept = transcript::look(&home, id);
            self.agent.has_kept(kept);
        }
        let start = self.agent.start(mode, &home::new_uuid());
        self.journal.event(
            "cwd_resolved",
            &[("source", &self.place.cwd.source.tag()), ("path", &self.place.cwd.path.display())],
        );
        let order = Order {
            program: self.plan.program.clone().into(),
            args: start.args.into_iter().map(OsString::from).collect(),
            cwd: self.place.cwd.path.clone(),
            env: self.place.env.clone(),
            tag: format!("{}.{key}", self.plan.id),
            stdio: Stdio::Terminal(self.size),
        };
        match self.household.spawn(key, &order) {
            Ok(pipes) => {
                let Size { columns, rows, .. } = self.size;
                self.journal.event("pty_allocated", &[("columns", &columns), ("rows", &rows)]);
                self.typing.interrupted();
                self.lives.insert(key, Life::new(self.plan.grace));
                self.child = Some(Child {
                    key,
                    pid: 0,
                    mode: start.mode,
                    since: SystemTime::now(),
                    stdin: pipes.stdin,
                    typed: BytesMut::new(),
                    stdout: pipes.stdout,
                    window: pipes.window,
                    prompt: Some(self.agent.prompt()),
                    tail: Vec::new(),
                    is_ending: false,
                });
            }
            Err(error) => self.start_failed(&report::cannot_start(&self.plan.program, &error)),
        }
    }

    fn start_failed(&mut self, report: &Report) {
        let why = [Some(&report.sentence), report.because.as_ref()].into_iter().flatten();
        let why = why.map(String::as_str).collect::<Vec<_>>().join(": ");
        self.journal.event("agent_start_failed", &[("why", &why)]);
        if self.session.restarts().recent().next().is_none() && self.session.restarts().restarts() == 0 {
            self.complaint = Some(report.clone());
        }
        self.tell(Event::StartFailed { why, code: report.code });
    }

    fn poll_news(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(news) = self.household.poll_news(cx) else { return false };
        match news {
            News::Started { key, pid } => {
                if let Some(child) = self.child.as_mut().filter(|child| child.key == key) {
                    child.pid = pid;
                }
                self.live(key, life::Event::Started { pid });
            }
            News::StartFailed { key, error } => {
                self.lives.remove(&key);
                self.child = None;
                self.start_failed(&report::cannot_start(&self.plan.program, &error));
            }
            News::Exited { key, exit } => {
                if let Some(child) = self.child.as_mut().filter(|child| child.key == key) {
                    child.is_ending = true;
                }
                let exit = match exit {
                    os::Exit::Code(code) => exit::Exit::Code(code),
                    os::Exit::Signal(signal) => exit::Exit::Signal(signal),
                };
                self.live(key, life::Event::Exited(exit));
            }
            News::Swept { key } => self.live(key, life::Event::Swept),
            News::Stopped { key } => self.stopped(key),
            News::KeeperLost => {
                self.journal.note("the process that keeps the children is gone; no agent can be started any more");
                self.lives.clear();
                self.ending.get_or_insert((report::FAILURE, Instant::now() + FAREWELL_MAX));
            }
        }
        true
    }

    /// Tells a life what happened, and carries out what it decides.
    fn live(&mut self, key: u64, event: life::Event) {
        let Some(life) = self.lives.get_mut(&key) else { return };
        for action in life.handle(event, self.now) {
            match action {
                // A terminal that is closed hangs up; this says so while it can still be listened to.
                life::Action::CloseStdin => self.household.signal(key, os::Signal::HangUp),
                life::Action::Terminate => self.household.signal(key, os::Signal::Terminate),
                life::Action::Kill => self.household.signal(key, os::Signal::Kill),
                life::Action::Sweep => self.household.sweep(key),
                life::Action::DropStdout => {
                    if let Some(child) = self.child.as_mut().filter(|child| child.key == key) {
                        child.stdout = None;
                    }
                }
                life::Action::ReportStarted => self.started(key),
                life::Action::Report(gone) => self.ended(key, gone),
            }
        }
        if self.lives.get(&key).is_some_and(Life::is_over) {
            self.lives.remove(&key);
        }
    }

    fn started(&mut self, key: u64) {
        let Some(child) = self.child.as_ref().filter(|child| child.key == key) else { return };
        let (pid, mode) = (child.pid, child.mode);
        self.journal.event("agent_spawn", &[("pid", &pid), ("mode", &mode), ("generation", &key)]);
        if let Some(announce) = self.announce.take() {
            announce.say(&json!({"id": self.plan.id, "pid": std::process::id()}).to_string());
        }
        self.tell(Event::Started { pid, mode });
        self.record(Record {
            pid: Some(pid),
            generation: Some(key),
            restarts: Some(self.session.restarts().restarts()),
            reason: Some(mode.to_string()),
            ..Record::new(record::Event::ServerStarted)
        });
    }

    fn ended(&mut self, key: u64, gone: life::Gone) {
        let Some(child) = self.child.take_if(|child| child.key == key) else { return };
        self.end_sends(false);
        self.agent.said_last(&child.tail);
        if self.agent.is_without_conversation()
            && let Some(home) = self.agents_home("CODEX_HOME", ".codex")
            && let Some(id) = rollout::find(&home, &self.place.cwd.path, child.since)
        {
            self.agent.learned(id);
        }
        let last_input = self.typing.last(self.now);
        if let Some(outer) = &self.outer {
            outer.note_alternate(self.alternate.is_on);
            self.alternate = Alternate::default();
            self.shown.extend_from_slice(&outer.calm());
        }
        if last_input == LastInput::Farewell {
            self.journal.event("user_action", &[("action", &"farewell")]);
        }
        let how = match gone.how {
            // What counts is what ended it, not who told of it.
            How::Exited(exit) => How::Exited(exit.folded()),
            how => how,
        };
        self.tell(Event::Ended { how, last_input });
    }

    /// Where the agent keeps its conversations, as it sees it itself.
    fn agents_home(&self, variable: &str, by_default: &str) -> Option<PathBuf> {
        let value =
            |name: &str| self.place.env.iter().find(|(known, _)| known == name).map(|(_, value)| PathBuf::from(value));
        value(variable).or_else(|| value("HOME").map(|home| home.join(by_default)))
    }

    fn note(&mut self, note: Note) {
        match note {
            Note::Ended { how, class, mode, pid, uptime, crashes, delay } => {
                let pid_in_words = pid.map_or_else(|| "none".to_owned(), |pid| pid.to_string());
                let delay_s = delay.map_or_else(|| "none".to_owned(), |delay| delay.as_secs().to_string());
                self.journal.event(
                    "agent_exit",
                    &[
                        ("pid", &pid_in_words),
                        ("exit", &how),
                        ("class", &class),
                        ("mode", &mode),
                        ("uptime_s", &format!("{:.1}", uptime.as_secs_f64())),
                        ("crashes", &crashes),
                        ("delay_s", &delay_s),
                    ],
                );
                let event = match class {
                    Class::Asked | Class::Clean | Class::User => record::Event::ServerStopped,
                    Class::Transient | Class::Flapping | Class::Halted => record::Event::ServerCrashed,
                };
                let obituary = Record::new(event).ended(&how);
                let generation = Some(self.generation);
                self.record(Record {
                    pid,
                    generation,
                    crashes: Some(crashes),
                    delay,
                    uptime: Some(uptime),
                    ..obituary
                });
                let program = &self.plan.program;
                match class {
                    Class::Transient | Class::Flapping => {
                        let delay = delay.unwrap_or_default().as_secs();
                        self.say(&format!(
                            "{program} ended ({how}), failure {crashes}; again in {delay} s (Ctrl-C ends)"
                        ));
                    }
                    Class::Halted => {
                        let words = format!("{program} failed {crashes} times and is halted");
                        self.record(Record { detail: Some(words.clone()), ..Record::new(record::Event::GaveUp) });
                        self.say(&format!(
                            "{words} ({how}). `outlast resume {}` tries again, Ctrl-C ends",
                            self.plan.id
                        ));
                    }
                    Class::Asked | Class::Clean | Class::User => {}
                }
            }
            Note::Health { from, to } => {
                self.journal.event("state_change", &[("from", &health_word(from)), ("to", &health_word(to))]);
            }
        }
    }

    // ---- the person ---------------------------------------------------------------------------------------

    fn poll_stops(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(stop) = self.stops.poll_next(cx) else { return false };
        self.journal.event("user_action", &[("action", &"signal"), ("signal", &stop.name)]);
        let force = std::mem::replace(&mut self.stopped_once, true);
        self.tell(Event::StopAsked { force });
        true
    }

    fn poll_outer(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(outer) = &mut self.outer else { return false };
        if let Poll::Ready(event) = outer.poll_event(cx) {
            self.heard_outer(event);
            return true;
        }
        if self.child.as_ref().is_some_and(|child| child.typed.len() >= TYPED_HIGH) {
            return false; // Freed room wakes us.
        }
        self.keys.reserve(KEYS_ROOM);
        let Poll::Ready(read) = outer.source.poll_read(cx, &mut self.keys) else { return false };
        let keys = self.keys.split();
        if !read.is_ok_and(|count| count > 0) {
            self.journal.event("user_action", &[("action", &"hangup")]);
            self.outer = None;
            self.shown.clear();
            self.tell(Event::TerminalLost);
            self.tell(Event::StopAsked { force: false });
            return true;
        }
        match &mut self.child {
            Some(child) if child.stdin.is_some() => {
                self.typing.typed(&keys, self.now);
                // The first bytes are the usual case, and become the buffer.
                child.typed.unsplit(keys);
            }
            _ => self.pressed(&keys),
        }
        true
    }

    /// The agent stopped itself, as at Ctrl-Z. Then so do we, and both go on together; where there is no shell to call
    /// us back, it goes on at once.
    fn stopped(&mut self, key: u64) {
        if let Some(outer) = self.outer.as_ref().filter(|outer| outer.is_job()) {
            self.journal.event("user_action", &[("action", &"suspend")]);
            outer.note_alternate(self.alternate.is_on);
            outer.suspend();
        } else {
            self.redraw();
        }
        self.household.signal(key, os::Signal::Continue);
    }

    /// What is on the screen is somebody else's: a change of size, and back, has the agent draw anew.
    fn redraw(&self) {
        if let Some(window) = self.child.as_ref().and_then(|child| child.window.as_ref()) {
            let other = Size { rows: self.size.rows.saturating_sub(1).max(1), ..self.size };
            // One that has just ended needs no size.
            let _ = window.resize(other).and_then(|()| window.resize(self.size));
        }
    }

    fn heard_outer(&mut self, event: OuterEvent) {
        let Some(outer) = &self.outer else { return };
        match event {
            OuterEvent::Resized => self.resize(),
            OuterEvent::SuspendAsked => {
                outer.note_alternate(self.alternate.is_on);
                outer.suspend();
            }
            OuterEvent::Continued => {
                if let Err(error) = outer.make_raw() {
                    self.journal.note(&format!("the terminal cannot be made raw again ({error})"));
                }
                if self.alternate.is_on {
                    self.shown.extend_from_slice(ALTERNATE);
                    self.shown.extend_from_slice(b"h");
                }
                self.redraw();
                self.resize();
            }
        }
    }

    fn resize(&mut self) {
        let Some(size) = self.outer.as_ref().map(Outer::size).filter(|size| *size != self.size) else { return };
        self.size = size;
        self.screen.resize(size);
        self.journal.event("resize", &[("columns", &size.columns), ("rows", &size.rows)]);
        // Without an agent the next one gets it.
        if let Some(window) = self.child.as_ref().and_then(|child| child.window.as_ref())
            && let Err(error) = window.resize(size)
        {
            self.journal.note(&format!("the agent's terminal cannot be resized ({error})"));
        }
    }

    /// Keys while there is no agent to have them.
    fn pressed(&mut self, keys: &[u8]) {
        if !self.session.is_asking() {
            if keys.contains(&CTRL_C) {
                self.journal.event("user_action", &[("action", &"quit")]);
                self.tell(Event::StopAsked { force: false });
            }
            return;
        }
        let choice = keys.iter().find_map(|key| match key {
            b'\r' | b'\n' => Some((Choice::Start(Mode::Continue), "restart")),
            b'f' | b'F' => Some((Choice::Start(Mode::Fresh), "fresh")),
            b'q' | b'Q' | &CTRL_C | &CTRL_D => Some((Choice::Quit, "quit")),
            _ => None,
        });
        if let Some((choice, action)) = choice {
            self.journal.event("user_action", &[("action", &action)]);
            self.tell(Event::Chosen(choice));
        }
    }

    /// A line of our own on the person's terminal.
    fn say(&mut self, words: &str) {
        if self.outer.is_some() {
            self.shown.extend_from_slice(format!("\r\n[outlast] {words}\r\n").as_bytes());
        }
    }

    // ---- bytes --------------------------------------------------------------------------------------------

    fn carry(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        for _ in 0..ROUNDS_MAX {
            let mut carried = self.type_to_agent(cx);
            // A terminal hands over little at a time; several reads make one write.
            while self.listen_to_agent(cx) {
                carried = true;
            }
            carried |= self.show(cx);
            // Last, so that nobody waits for it.
            self.take_in();
            if !carried {
                break;
            }
            moved = true;
        }
        moved
    }

    fn listen_to_agent(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(child) = &mut self.child else { return false };
        // What it says before we heard that it started waits until then. What one that ended has written is taken in
        // whole: its terminal goes with it.
        if child.pid == 0 || (self.shown.len() >= SHOWN_HIGH && !child.is_ending) {
            return false; // Freed room wakes us.
        }
        let Some(stdout) = &mut child.stdout else { return false };
        if self.shown.capacity() - self.shown.len() < READ_ROOM {
            self.shown.reserve(READ_ROOM);
        }
        let before = self.shown.len();
        let Poll::Ready(read) = stdout.poll_read(cx, &mut self.shown) else { return false };
        let key = child.key;
        // The end of a terminal is an error on some systems.
        if !read.is_ok_and(|count| count > 0) {
            child.stdout = None;
            self.live(key, life::Event::StdoutClosed);
            return true;
        }
        let new = &self.shown[before..];
        self.alternate.pass(new);
        self.unseen.extend_from_slice(new);
        if self.agent.tells_its_conversation() {
            keep_tail(&mut child.tail, new);
        }
        let is_ready = child.prompt.as_mut().is_some_and(|prompt| prompt.is_in(new));
        if self.outer.is_none() && self.stdout.is_none() {
            self.shown.clear();
        }
        if is_ready {
            child.prompt = None;
            self.tell(Event::PromptShown);
        }
        true
    }

    /// Brings the model up to date.
    fn take_in(&mut self) {
        if self.unseen.is_empty() {
            return;
        }
        let is_alone = self.outer.is_none();
        let answers = self.screen.feed(&self.unseen, is_alone);
        self.unseen.clear();
        if let Some(child) = self.child.as_mut().filter(|child| !answers.is_empty() && child.stdin.is_some()) {
            child.typed.extend_from_slice(&answers);
        }
    }

    fn type_to_agent(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(child) = &mut self.child else { return false };
        if child.typed.is_empty() {
            return false;
        }
        let Some(stdin) = &mut child.stdin else {
            child.typed.clear();
            return false;
        };
        match stdin.poll_write(cx, &[IoSlice::new(&child.typed)]) {
            Poll::Pending => return false,
            Poll::Ready(Ok(count)) => child.typed.advance(count),
            Poll::Ready(Err(_)) => {
                // It hung up; its end is about to show.
                child.stdin = None;
                child.typed.clear();
            }
        }
        true
    }

    fn show(&mut self, cx: &mut Context<'_>) -> bool {
        if self.shown.is_empty() {
            return false;
        }
        let sink = match &mut self.outer {
            Some(outer) => Some(&mut outer.sink),
            None => self.stdout.as_mut(),
        };
        let Some(sink) = sink else {
            self.shown.clear();
            return false;
        };
        match sink.poll_write(cx, &[IoSlice::new(&self.shown)]) {
            Poll::Pending => return false,
            Poll::Ready(Ok(count)) => self.shown.advance(count),
            Poll::Ready(Err(_)) => {
                // Nobody looks any more; the agent goes on.
                self.stdout = None;
                self.shown.clear();
            }
        }
        true
    }

    // ---- time and control ---------------------------------------------------------------------------------

    fn poll_time(&mut self, cx: &mut Context<'_>) -> bool {
        let lives = self.lives.values().filter_map(Life::deadline);
        let own = [self.session.deadline(), self.sends.deadline(), self.ending.map(|(_, until)| until)];
        let Some(at) = lives.chain(own.into_iter().flatten()).min() else {
            self.timer = None;
            return false;
        };
        if at <= Instant::now() {
            self.now = Instant::now();
            let keys: Vec<u64> = self.lives.keys().copied().collect();
            for key in keys {
                self.live(key, life::Event::TimePassed);
            }
            self.tell(Event::TimePassed);
            self.tend_sends();
            return true;
        }
        if self.timer.as_ref().is_none_or(|(set, _)| *set != at) {
            self.timer = Some((at, Box::pin(sleep_until(at.into()))));
        }
        self.timer.as_mut().is_some_and(|(_, timer)| timer.as_mut().poll(cx).is_ready())
    }

    fn poll_control(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(Asked { ticket, method, params }) = self.control.poll(cx) else { return false };
        let answer = match method.as_str() {
            "state" => Ok(self.state()),
            "pid" => Ok(json!({"pid": self.session.pid()})),
            "restart" => match params["mode"].as_str() {
                None | Some("continue") => return self.restart(ticket, Mode::Continue, &params),
                Some("fresh") => return self.restart(ticket, Mode::Fresh, &params),
                Some(mode) => {
                    Err(Refusal::new("bad_request", format!("there is no mode `{mode}`; there are fresh and continue")))
                }
            },
            "resume" => {
                self.journal.event("user_action", &[("action", &"resume"), ("by", &"control")]);
                self.asked_at.insert(ticket, self.now);
                self.tell(Event::ResumeAsked { ticket });
                return true;
            }
            "inject" => self.inject(&params),
            "send" => {
                self.send(ticket, &params);
                return true;
            }
            "screen" => Ok(self.look(&params)),
            "stop" => {
                let graceful = params["graceful"].as_bool().unwrap_or(true);
                self.journal.event("user_action", &[("action", &"stop"), ("by", &"control"), ("graceful", &graceful)]);
                self.tell(Event::StopAsked { force: !graceful });
                Ok(json!({"stopping": true}))
            }
            "subscribe" => {
                self.control.subscribe(ticket);
                return true;
            }
            method => Err(control::unknown_method(method, &METHODS)),
        };
        self.control.answer(ticket, &answer);
        true
    }

    fn restart(&mut self, ticket: u64, mode: Mode, params: &Value) -> bool {
        let reason = params["reason"].as_str().unwrap_or("asked for from outside");
        self.journal
            .event("user_action", &[("action", &"restart"), ("by", &"control"), ("mode", &mode), ("reason", &reason)]);
        let record = Record::new(record::Event::ServerRestartRequested);
        let (reason, pid) = (Some(reason.to_owned()), self.session.pid());
        self.record(Record { pid, reason, detail: Some("control".into()), ..record });
        self.asked_at.insert(ticket, self.now);
        self.tell(Event::RestartAsked { ticket, mode });
        true
    }

    fn answer(&mut self, ticket: u64, result: Result<Answer, Refused>) {
        let took = self.asked_at.remove(&ticket).map(|at| self.now.saturating_duration_since(at)).unwrap_or_default();
        let result = match result {
            Ok(Answer::Started { old_pid, pid, mode }) => Ok(json!({
                "pid": pid,
                "old_pid": old_pid,
                "new_pid": pid,
                "mode": mode.to_string(),
                "generation": self.generation,
                "took_ms": u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            })),
            Ok(Answer::NothingToResume) => Ok(json!({"resumed": false, "state": self.session.state()})),
            Err(refused) => {
                let code = match refused {
                    Refused::Halted => "halted",
                    Refused::Stopping => "stopping",
                    Refused::Failed(_) => "restart_failed",
                };
                Err(Refusal::new(code, refused.to_string()))
            }
        };
        self.control.answer(ticket, &result);
    }

    fn inject(&mut self, params: &Value) -> Result<Value, Refusal> {
        let Some(bytes) = params["bytes"].as_str().and_then(base64::decode) else {
            return Err(Refusal::new("bad_request", "`inject` wants `bytes`, as base64"));
        };
        let child = self.child.as_mut().filter(|child| child.pid > 0 && child.stdin.is_some() && !child.is_ending);
        let Some(child) = child else {
            let state = self.session.state();
            let code = if state == "halted" { "halted" } else { "not_running" };
            return Err(Refusal::new(code, format!("there is no agent to type to; the session is {state}")));
        };
        if child.typed.len() + bytes.len() > TYPED_MAX {
            return Err(Refusal::new("not_reading", "the agent does not read what it was sent before"));
        }
        child.typed.extend_from_slice(&bytes);
        self.typing.interrupted();
        self.journal.event("inject", &[("bytes", &bytes.len())]);
        Ok(json!({"n": bytes.len()}))
    }

    fn look(&self, params: &Value) -> Value {
        let look = self.screen.look();
        let modes = self.screen.modes();
        let history = usize::try_from(params["history"].as_u64().unwrap_or(0)).unwrap_or(usize::MAX);
        json!({
            "text": self.screen.text(),
            "lines": look.lines,
            "history": self.screen.history(history),
            "cursor": {"row": look.cursor.0, "column": look.cursor.1, "visible": look.is_cursor_visible},
            "columns": self.size.columns,
            "rows": self.size.rows,
            "title": self.screen.title(),
            "modes": {
                "alternate": modes.alternate,
                "bracketed_paste": modes.bracketed_paste,
                "mouse": modes.mouse,
                "focus": modes.focus,
                "application_cursor": modes.application_cursor,
                "keyboard": modes.keyboard,
            },
        })
    }

    fn state(&self) -> Value {
        let now = Instant::now();
        let restarts = self.session.restarts();
        let last_code = self.session.last_exit().and_then(How::exit);
        let mut state = json!({
            "state": self.session.state(),
            "health": health_word(self.session.health()),
            "running": self.session.pid().is_some(),
            "pid": self.session.pid(),
            "generation": self.generation,
            "uptime_s": self.session.uptime(now).map(|uptime| uptime.as_secs_f64()),
            "restarts": restarts.restarts(),
            "restart_count": restarts.restarts(),
            "crashes": restarts.crashes(now),
            "next_try_s": self.session.next_try(now).map(|left| left.as_secs_f64()),
            "last_exit": self.session.last_exit().map(ToString::to_string),
            "last_exit_code": last_code.map(|exit| match exit {
                exit::Exit::Code(code) => *code,
                exit::Exit::Signal(signal) => 128 + signal,
            }),
            "session": self.plan.id,
            "mode": self.child.as_ref().map(|child| child.mode.to_string()),
            "conversation": self.agent.conversation(),
            "cwd": self.place.cwd.path.to_string_lossy(),
            "cwd_source": self.place.cwd.source.tag(),
            "document": self.plan.document.as_deref().map(Path::to_string_lossy),
            "attached": u8::from(self.outer.is_some()),
            "columns": self.size.columns,
            "rows": self.size.rows,
        });
        self.control.complete(&mut state);
        state
    }

    fn record(&mut self, record: Record) {
        let line = self.journal.record(record);
        self.control.record(&line);
    }
}

/// Whether what passes has gone to the alternate screen. It is left when an agent dies there.
#[derive(Debug, Default)]
struct Alternate {
    is_on: bool,
    /// The end of what passed: the sequence may be cut in two.
    tail: Vec<u8>,
}

impl Alternate {
    fn pass(&mut self, bytes: &[u8]) {
        let across = ALTERNATE.len();
        if !self.tail.is_empty() {
            let joint = [&self.tail, &bytes[..bytes.len().min(across)]].concat();
            self.look(&joint);
        }
        self.look(bytes);
        if bytes.len() >= across {
            self.tail.clear();
        }
        keep_last(&mut self.tail, bytes, across);
    }

    fn look(&mut self, bytes: &[u8]) {
        for at in memchr::memmem::find_iter(bytes, ALTERNATE) {
            match bytes.get(at + ALTERNATE.len()) {
                Some(b'h') => self.is_on = true,
                Some(b'l') => self.is_on = false,
                _ => {}
            }
        }
    }
}

fn keep_tail(tail: &mut Vec<u8>, bytes: &[u8]) {
    keep_last(tail, bytes, TAIL_MAX);
}

/// Appends, and forgets all but the last `max`.
fn keep_last(kept: &mut Vec<u8>, bytes: &[u8], max: usize) {
    let bytes = &bytes[bytes.len().saturating_sub(max)..];
    let excess = (kept.len() + bytes.len()).saturating_sub(max);
    kept.drain(..excess.min(kept.len()));
    kept.extend_from_slice(bytes);
}

fn health_word(health: Health) -> &'static str {
    match health {
        Health::Healthy => "healthy",
        Health::Degraded => "degraded",
        Health::Halted => "halted",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alternate_screen_is_noticed_however_it_is_cut() {
        let on = b"text\x1b[?1049h more \x1b[?25l and more of it";
        let off = [&on[..], b"\x1b[?1049l\x1b[?25h"].concat();
        for size in 1..on.len() {
            for (bytes, expected) in [(&on[..], true), (&off[..], false)] {
                let mut alternate = Alternate::default();
                for piece in bytes.chunks(size) {
                    alternate.pass(piece);
                }
                assert_eq!(alternate.is_on, expected, "cut by {size}");
            }
        }
    }

    #[test]
    fn the_last_bytes_are_kept() {
        let mut kept = Vec::new();
        for piece in [&b"abc"[..], b"", b"defgh", b"i"] {
            keep_last(&mut kept, piece, 4);
        }
        assert_eq!(kept, b"fghi");
    }
}
