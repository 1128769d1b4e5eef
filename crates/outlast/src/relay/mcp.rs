//! Drives the relay: `outlast mcp`. One loop turns pipes, processes, files and time into events, and carries out
//! what the machine decides. Nothing in it waits.

#[cfg(unix)]
use std::{cell::RefCell, rc::Rc, time::SystemTime};
use std::{
    ffi::OsString,
    io,
    path::PathBuf,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use outlast_control::{
    Control,
    method::{Kind, Method},
    server::Asked,
    wire::Refusal,
};
use outlast_core::{
    exit::{Exit, How},
    life::Grace,
    relay::{Action, ClientEnd, Event, Origin, Relay, State},
};
use outlast_os::{self as os, Order, Sandbox, Stdio};
use serde_json::{Value, json};
use tokio::sync::mpsc::Receiver;

use super::files::{Files, Found, unix_now};
#[cfg(windows)]
use crate::upgrade;
#[cfg(unix)]
use crate::upgrade::requests::Upgrades;
use crate::{
    child::{
        Child, ChildEvent, Children,
        memory_watch::MemoryWatch,
        own_streams::{ClientEvent, OwnStreams},
        timer::Timer,
        wake_flag::WakeFlag,
    },
    cli::report,
    state::journal::Journal,
};

#[cfg(unix)]
pub(crate) mod upgrade;

/// How long the last messages to the client and the sweep of children may take at the end.
const LAST_MESSAGES_MAX: Duration = Duration::from_secs(1);
/// Turns of a busy loop after which it looks at the time; an idle loop looks each time before it waits.
const TURNS_MAX: u32 = 16;
/// The keys of builds among the children start here; generations are smaller.
const BUILDS: u64 = 1 << 62;

/// What is fixed before the loop starts.
pub(crate) struct Plan {
    pub program: OsString,
    pub args: Vec<OsString>,
    pub cwd: PathBuf,
    pub build: Option<String>,
    pub grace: Grace,
    pub id: String,
    /// Of the server; a build is not sandboxed.
    pub sandbox: Option<Sandbox>,
    /// The server has a memory limit.
    pub watches_memory: bool,
    /// Adds to the state that operators see.
    pub more_state: Option<MoreState>,
    /// Lines for the log from beside the loop.
    pub notes: Option<Receiver<String>>,
    /// The client, where it is a part of this process.
    #[cfg(unix)]
    pub inner: Option<Rc<RefCell<dyn upgrade::InnerClient>>>,
}

/// Members of the state that another part of the program knows.
pub(crate) type MoreState = Box<dyn Fn() -> Value>;

/// Everything around one conversation.
pub(crate) struct Driver {
    plan: Plan,
    relay: Relay,
    actions: Vec<Action>,
    /// From this number on, the relay is told how many bytes are queued for a server.
    queued_bytes_max: usize,
    /// Generations whose queued lines the relay takes back.
    take_back: Vec<u32>,
    stops: os::Stops,
    stopped_once: bool,

    client: OwnStreams,
    /// Servers by their generation, and builds.
    children: Children,
    next_generation: u32,
    /// The first child is being started. Messages of the client, and the end of its stdin, stay in the pipe until then,
    /// so that a client that sends everything at once and closes stdin still gets its answers.
    awaits_first: bool,
    /// How many builds were started.
    builds: u64,

    journal: Journal,
    files: Files,
    control: Control,
    memory: MemoryWatch,
    #[cfg(unix)]
    upgrades: Upgrades,
    /// The inner client is held since then.
    #[cfg(unix)]
    held: Option<SystemTime>,

    /// When this turn of the loop began; a turn is short.
    now: Instant,
    timer: Timer,
    /// Set if signals, news of children, files, the control socket, memory, notes or an upgrade may have something to report.
    rare: WakeFlag,
    /// A server has started, so the memory of the start-up code can be returned.
    has_started: bool,
    /// A long line was read, and the pipes were widened.
    is_wide: bool,
    ending: Option<(u8, Instant)>,
    /// The exit code of a command that could not be started, as in a shell.
    never_started: Option<u8>,
    /// The result of a restart that several callers may have requested: it is logged once.
    answered: Option<Result<Value, Value>>,
}

impl Driver {
    #[expect(clippy::too_many_arguments, reason = "the parts are made by different rooms and meet only here")]
    pub(crate) fn new(
        plan: Plan,
        relay: Relay,
        children: Children,
        stops: os::Stops,
        client: OwnStreams,
        journal: Journal,
        files: Files,
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
            stops,
            stopped_once: false,
            client,
            children,
            next_generation: 1,
            awaits_first: true,
            builds: 0,
            journal,
            files,
            control,
            memory,
            #[cfg(unix)]
            upgrades: Upgrades::default(),
            #[cfg(unix)]
            held: None,
            now: Instant::now(),
            timer: Timer::default(),
            rare: WakeFlag::default(),
            has_started: false,
            is_wide: false,
            ending: None,
            never_started: None,
            answered: None,
        }
    }

    /// Runs until the conversation is over, and returns the exit code.
    pub(crate) async fn run(mut self) -> u8 {
        self.start();
        self.run_loop().await
    }

    async fn run_loop(mut self) -> u8 {
        let code = std::future::poll_fn(|cx| self.poll(cx)).await;
        let code = if code == 0 { self.never_started.unwrap_or(0) } else { code };
        let line = self.journal.end(code);
        self.control.record(&line);
        self.control.end();
        code
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<u8> {
        self.rare.register(cx);
        let mut turns = 0_u32;
        loop {
            self.now = Instant::now();
            let mut moved = self.poll_rare();
            // A child is read while there is room in the queue of the client; freed room wakes the loop.
            moved |= self.children.poll_outputs(self.client.is_low(), cx, self.now);
            moved |= self.hear_children();
            moved |= !self.awaits_first && self.client.poll_input(self.relay.reads_client(), cx);
            moved |= self.hear_client();
            moved |= self.flush(cx);
            if let Some((code, until)) = self.ending {
                let quiet = self.client.queued() == 0 && self.children.is_empty() && !self.files.is_saving();
                if quiet || until <= Instant::now() {
                    return Poll::Ready(code);
                }
            }
            turns += 1;
            if !moved || turns.is_multiple_of(TURNS_MAX) {
                moved |= self.poll_time(cx);
            }
            if !moved {
                if std::mem::take(&mut self.has_started) {
                    os::give_back_code();
                }
                return Poll::Pending;
            }
        }
    }

    /// Everything that does not happen with each message: it is polled only if its waker fired, or if something was started
    /// that it reports.
    fn poll_rare(&mut self) -> bool {
        #[cfg(unix)]
        let is_upgrading = self.upgrades.machine.is_wanted();
        #[cfg(windows)]
        let is_upgrading = false;
        if !self.rare.take() && !is_upgrading {
            return false;
        }
        let waker = self.rare.waker();
        let cx = &mut Context::from_waker(&waker);
        let mut moved = self.poll_stops(cx);
        moved |= self.children.poll_news(cx, self.now);
        moved |= self.poll_files(cx);
        moved |= self.poll_control(cx);
        moved |= self.poll_memory(cx);
        moved |= self.poll_notes(cx);
        #[cfg(unix)]
        {
            moved |= self.poll_upgrade(cx);
        }
        if moved {
            self.rare.set();
        }
        moved
    }

    fn tell(&mut self, event: Event) {
        let mut actions = std::mem::take(&mut self.actions);
        self.relay.handle(event, self.now, &mut actions);
        for action in actions.drain(..) {
            self.act(action);
        }
        // Reset, so that an identical later result is logged again.
        self.answered = None;
        self.actions = actions;
        while let Some(generation) = self.take_back.pop() {
            let unsent = self.children.get_mut(generation.into()).map(Child::take_back).unwrap_or_default();
            self.tell(Event::TakenBack { generation, unsent });
        }
    }

    fn act(&mut self, action: Action) {
        if !matches!(action, Action::TellClient(_) | Action::TellServer { .. }) {
            self.rare.set();
        }
        match action {
            Action::TellClient(line) => self.client.put(line),
            Action::TellServer { generation, line, mark } => {
                if let Some(child) = self.children.get_mut(generation.into()) {
                    child.put(line, mark);
                }
            }
            Action::ReadCache(revision) => self.files.read_cache(revision),
            Action::SaveCache { revision, entry } => self.files.save_cache(revision, entry),
            Action::TakeBack(generation) => self.take_back.push(generation),
            Action::CloseStdin(generation) => {
                if let Some(child) = self.children.get_mut(generation.into()) {
                    child.close_stdin();
                }
            }
            Action::Start => self.start(),
            Action::Stop { generation, how } => self.children.stop(generation.into(), how, self.now),
            Action::Build => self.start_build(),
            Action::StopBuild => self.children.kill(BUILDS + self.builds, self.now),
            Action::MarkReady(generation) => {
                self.has_started = true;
                self.journal.ready(generation);
            }
            Action::WriteMarker { pid, reason } => self.files.write_marker(pid, reason, &self.plan.id),
            Action::ReadMarker(key) => self.files.read_marker(key),
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
            Action::End(code) => self.ending = Some((code, Instant::now() + LAST_MESSAGES_MAX)),
        }
    }

    // ---- children -----------------------------------------------------------------------------------------

    fn start(&mut self) {
        let generation = self.next_generation;
        if self.plan.build.is_none() {
            self.files.are_loaded();
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
            live_until: None,
        };
        match self.children.start(generation.into(), &order, self.plan.grace) {
            Ok(()) if self.is_wide => self.widen(),
            Ok(()) => {}
            Err(error) => {
                self.awaits_first = false;
                self.tell(Event::StartFailed(report::plain(&error.to_string())));
            }
        }
    }

    fn hear_children(&mut self) -> bool {
        let mut moved = false;
        while let Some(event) = self.children.next_event() {
            self.heard(event);
            moved = true;
        }
        if moved && !self.is_wide && self.children.iter().any(Child::is_wide) {
            self.widen();
        }
        moved
    }

    fn heard(&mut self, event: ChildEvent) {
        if !matches!(event, ChildEvent::Said { .. }) {
            self.rare.set();
        }
        match event {
            ChildEvent::Said { key, line } => self.tell(Event::ServerSaid(generation_of(key), line)),
            ChildEvent::Logged { key: BUILDS.., .. } | ChildEvent::Started { key: BUILDS.., .. } => {}
            ChildEvent::Logged { key, text, redacted } => {
                self.journal.stderr(&text, &redacted);
                self.tell(Event::ServerLogged(generation_of(key), redacted));
            }
            ChildEvent::Started { key, pid } => {
                let generation = generation_of(key);
                self.awaits_first = false;
                self.never_started = None;
                self.next_generation = generation + 1;
                self.tell(Event::ServerStarted { generation, pid, unix: unix_now() });
            }
            ChildEvent::StartFailed { key: BUILDS.., error } => {
                self.tell(Event::BuildEnded(Err(format!("cannot be started\n{error}"))));
            }
            ChildEvent::StartFailed { error, .. } => {
                self.awaits_first = false;
                self.say_why_not_started(&error);
                self.tell(Event::StartFailed(report::plain(&error.to_string())));
            }
            ChildEvent::Gone { key: key @ BUILDS.., how, .. } => self.build_ended(key, &how),
            ChildEvent::Gone { key, how, unsent } => {
                self.tell(Event::ServerWentDown { generation: generation_of(key), how, unsent });
            }
            // Only a child with a terminal is suspended.
            ChildEvent::Cleared { .. } | ChildEvent::Suspended { .. } => {}
            ChildEvent::Noticed(sentence) => self.journal.note(&format!("WARNING: {sentence}")),
        }
    }

    /// The first failed start of a command that never ran is reported like any other error of the command line.
    fn say_why_not_started(&mut self, error: &io::Error) {
        let program = self.plan.program.to_string_lossy();
        let report = report::cannot_start(&program, error);
        if self.next_generation == 1 {
            self.never_started = Some(report.code);
        }
        self.journal.report(&report);
    }

    /// Wide pipes count against the user's limit, so only conversations with long lines get them.
    fn widen(&mut self) {
        self.is_wide = true;
        self.client.widen();
        self.children.iter_mut().for_each(Child::widen);
    }

    // ---- the build ------------------------------------------------------------------------------------------

    fn start_build(&mut self) {
        let Some(command) = &self.plan.build else { return };
        self.files.are_loaded();
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
            live_until: None,
        };
        self.builds += 1;
        if let Err(error) = self.children.start(BUILDS + self.builds, &order, self.plan.grace) {
            self.tell(Event::BuildEnded(Err(format!("cannot be started\n{error}"))));
        }
    }

    fn build_ended(&mut self, key: u64, how: &How) {
        let output = self.children.get(key).map(|build| build.tail().text()).unwrap_or_default();
        self.tell(Event::BuildEnded(match how {
            How::Exited(Exit::Code(0)) => Ok(()),
            How::Exited(Exit::Code(code)) => Err(format!("exit code {code}\n{output}")),
            How::Exited(Exit::Signal(signal)) => Err(format!("signal {signal}\n{output}")),
            how => Err(format!("{how}\n{output}")),
        }));
    }

    // ---- the client ------------------------------------------------------------------------------------------

    fn hear_client(&mut self) -> bool {
        let mut moved = false;
        while let Some(event) = self.client.next_event() {
            self.tell(match event {
                ClientEvent::Said(line) => Event::ClientSaid(line),
                ClientEvent::SaidTooMuch(start) => Event::ClientSaidTooMuch(start),
                ClientEvent::Ended => Event::ClientEnded(ClientEnd::Closed),
                ClientEvent::Broken => Event::ClientEnded(ClientEnd::Broken),
            });
            moved = true;
        }
        if moved && !self.is_wide && self.client.is_wide() {
            self.widen();
        }
        moved
    }

    fn flush(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = self.client.flush(cx) | self.hear_client();
        self.children.flush_all(cx, self.now);
        moved |= self.hear_children();
        // Also for a child whose stdin is closed: its queued lines go to the next one.
        let high = self.queued_bytes_max;
        let queues = self.children.iter_mut().filter_map(|child| Some((child.key(), child.changed_queue(high)?)));
        for (key, bytes) in queues.collect::<Vec<_>>() {
            self.tell(Event::ServerQueue { generation: generation_of(key), bytes });
            moved = true;
        }
        moved
    }

    fn poll_stops(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(stop) = self.stops.poll_next(cx) else { return false };
        self.journal.note(&format!("{} received, stopping", stop.name));
        self.client.stop_reading();
        if std::mem::replace(&mut self.stopped_once, true) {
            self.children.kill_all(self.now);
        } else {
            self.tell(Event::ClientEnded(ClientEnd::Closed));
        }
        true
    }

    // ---- others ------------------------------------------------------------------------------------------------

    fn poll_control(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(Asked { ticket, method, params }) = self.control.poll(cx) else { return false };
        let answer = match Method::read(Kind::Mcp, &method, &params) {
            Ok(Method::State) => {
                let mut state = self.relay.status(Instant::now()).to_json();
                let more = self.plan.more_state.as_ref().map(|more| more());
                if let (Some(state), Some(Value::Object(more))) = (state.as_object_mut(), more) {
                    state.extend(more);
                }
                self.control.complete(&mut state);
                Ok(state)
            }
            Ok(Method::Pid) => Ok(json!({"pid": self.relay.status(Instant::now()).pid})),
            Ok(Method::Restart(restart)) => {
                let (reason, at_once) = (restart.reason().to_owned(), restart.now);
                // Answered when the restart is done.
                self.tell(Event::RestartAsked { ticket, origin: Origin::Control, reason, at_once });
                return true;
            }
            Ok(Method::Resume) => {
                let state = self.relay.status(Instant::now()).state;
                if matches!(state, State::GivenUp | State::Stopped | State::Backoff) {
                    let reason = "resumed".to_owned();
                    self.tell(Event::Forgiven);
                    let origin = Origin::Control;
                    self.tell(Event::RestartAsked { ticket, origin, reason, at_once: false });
                    return true;
                }
                Ok(json!({"resumed": false, "state": state.name()}))
            }
            Ok(Method::Stop(stop)) => {
                let graceful = stop.is_graceful();
                self.journal.note(if graceful { "Stop requested" } else { "Stop at once requested" });
                self.stop(graceful);
                Ok(json!({"stopping": true}))
            }
            #[cfg(unix)]
            Ok(Method::Upgrade(upgrade)) => {
                // Answered when it is done, by the next program.
                self.ask_upgrade(Some(ticket), upgrade.program);
                return true;
            }
            #[cfg(windows)]
            Ok(Method::Upgrade(_)) => Err(upgrade::unsupported(upgrade::NOT_ON_WINDOWS)),
            Ok(Method::Subscribe) => {
                self.control.subscribe(ticket);
                return true;
            }
            Ok(method) => Err(Kind::Mcp.unknown(method.name())),
            Err(refusal) => Err(refusal),
        };
        self.control.answer(ticket, &answer);
        true
    }

    /// Gracefully, as when the client leaves; or at once.
    fn stop(&mut self, graceful: bool) {
        self.client.stop_reading();
        if graceful {
            return self.tell(Event::ClientEnded(ClientEnd::Closed));
        }
        self.stopped_once = true;
        self.tell(Event::ClientEnded(ClientEnd::Broken));
        self.children.kill_all(self.now);
    }

    // ---- files and time ----------------------------------------------------------------------------------------

    fn poll_files(&mut self, cx: &mut Context<'_>) -> bool {
        self.files.poll(cx);
        let mut moved = false;
        while let Some(found) = self.files.next_found() {
            match found {
                Found::Event(event) => self.tell(event),
                Found::Note(sentence) => self.journal.note(&sentence),
            }
            moved = true;
        }
        moved
    }

    fn poll_memory(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(found) = self.memory.poll(cx) else { return false };
        for (key, bytes) in found {
            self.tell(Event::ServerMeasured { generation: generation_of(key), bytes });
        }
        true
    }

    fn poll_notes(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(notes) = &mut self.plan.notes else { return false };
        let Poll::Ready(note) = notes.poll_recv(cx) else { return false };
        match note {
            Some(note) => self.journal.note(&note),
            None => self.plan.notes = None,
        }
        true
    }

    fn poll_time(&mut self, cx: &mut Context<'_>) -> bool {
        #[cfg(unix)]
        let upgrade = self.upgrades.machine.deadline();
        #[cfg(windows)]
        let upgrade = None;
        let own = [self.ending.map(|(_, at)| at), self.memory.deadline(), upgrade];
        let machines = [self.relay.deadline(), self.children.deadline()];
        self.now = Instant::now();
        if !self.timer.poll(own.into_iter().chain(machines).flatten().min(), self.now, cx) {
            return false;
        }
        self.now = Instant::now();
        self.rare.set();
        if self.memory.deadline().is_some_and(|due| due <= self.now) {
            let servers = self.children.running().filter(|(key, _)| *key < BUILDS).collect();
            self.memory.measure(servers, self.now);
        }
        self.tell(Event::TimePassed);
        self.children.time_passed(self.now);
        true
    }
}

/// A failed restart, as an answer on the control socket.
fn refused_restart(mut report: Value) -> Refusal {
    let message = report["error"].as_str().unwrap_or("the restart failed").to_owned();
    if let Some(report) = report.as_object_mut() {
        report.remove("error");
    }
    Refusal { data: report, ..Refusal::new("restart_failed", message) }
}

fn generation_of(key: u64) -> u32 {
    u32::try_from(key).expect("the keys of servers are generations")
}
