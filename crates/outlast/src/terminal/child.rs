//! The agent's process: started, heard of and buried.

use std::{
    ffi::OsString,
    path::PathBuf,
    task::{Context, Poll},
    time::{Instant, SystemTime},
};

use bytes::BytesMut;
use outlast_core::{
    agent::{Kind, Prompt},
    exit::{self, How},
    life::{self, Life},
    record::{self, Record},
    session::{Class, Event, LastInput, Mode, Note},
    waiting,
};
use serde_json::json;

use super::{FAREWELL_MAX, Terminal, health_word};
use crate::{
    environment, home,
    os::{self, News, Order, Sink, Size, Source, Stdio, Window},
    report::{self, Report},
    rollout,
    session_record::{SessionRecord, State},
    transcript,
};

/// The agent there is, and its terminal.
pub(super) struct Child {
    pub(super) key: u64,
    pub(super) pid: u32,
    pub(super) mode: Mode,
    pub(super) since: SystemTime,
    pub(super) stdin: Option<Sink>,
    pub(super) typed: BytesMut,
    pub(super) stdout: Option<Source>,
    pub(super) window: Option<Window>,
    /// Until it was seen.
    pub(super) prompt: Option<Prompt>,
    pub(super) tail: Vec<u8>,
    /// The exit was seen: what it wrote is read however slow the person's terminal is.
    pub(super) is_ending: bool,
    /// Its hooks work: what they say is not looked up in its files.
    pub(super) has_reported: bool,
}

impl Terminal {
    pub(super) fn start(&mut self, mode: Mode) {
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
            && let (Some(id), Some(home)) = (self.agent.kept_as(), self.agents_home())
        {
            let kept = match self.agent.kind() {
                Kind::Codex => rollout::look(&home, id),
                _ => transcript::look(&home, id),
            };
            self.agent.has_kept(kept);
        }
        let settings = self.hook_settings(key);
        let start = self.agent.start(mode, &home::new_uuid(), settings.as_deref());
        self.journal.event(
            "cwd_resolved",
            &[("source", &self.place.cwd.source.tag()), ("path", &self.place.cwd.path.display())],
        );
        if !self.place.left_out.is_empty() {
            let names = self.place.left_out.join(",");
            self.journal.event("env_left_out", &[("names", &names), ("hint", &environment::HOW_TO_PASS)]);
        }
        let order = Order {
            program: self.plan.program.clone().into(),
            args: start.args.into_iter().map(OsString::from).collect(),
            cwd: self.place.cwd.path.clone(),
            env: self.place.env.clone(),
            tag: format!("{}.{key}", self.plan.id),
            env_is_all: true,
            stdio: Stdio::Terminal(self.viewers.size()),
            sandbox: None,
        };
        match self.household.spawn(key, &order) {
            Ok(pipes) => {
                let Size { columns, rows, .. } = self.viewers.size();
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
                    has_reported: false,
                });
                self.keep_record(State::Running);
            }
            Err(error) => {
                self.agent.never_ran();
                self.start_failed(&report::cannot_start(&self.plan.program, &error));
            }
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

    pub(super) fn poll_news(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(news) = self.household.poll_news(cx) else { return false };
        if let Some(words) = self.hooks.hear(&news, &mut self.household) {
            if let Some(words) = words {
                self.journal.note(&words);
            }
            return true;
        }
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
                self.agent.never_ran();
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
            News::Noticed(sentence) => self.journal.note(&format!("WARNING: {sentence}")),
            News::KeeperLost => {
                self.journal.note("the process that keeps the children is gone; no agent can be started any more");
                self.lives.clear();
                self.ending.get_or_insert((report::FAILURE, Instant::now() + FAREWELL_MAX));
            }
        }
        true
    }

    /// Tells a life what happened, and carries out what it decides.
    pub(super) fn live(&mut self, key: u64, event: life::Event) {
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
        if key == 1 {
            self.say_without_terminal();
        }
        if let Some(announce) = self.announce.take() {
            announce.say(&json!({"id": self.plan.id, "pid": std::process::id()}).to_string());
        }
        self.tell(Event::Started { pid, mode });
        if let Some(screen) = self.screen() {
            screen.begin_anew();
        }
        self.watch(waiting::Event::AgentStarted);
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
        self.learns_at = None;
        self.end_sends(false);
        self.agent.said_last(&child.tail);
        if let Some(home) = self.agents_home() {
            let found = match self.agent.kind() {
                Kind::Codex if self.agent.is_without_conversation() => {
                    rollout::find(&home, &self.place.cwd.path, child.since)
                }
                // A claude that was killed leaves its file behind.
                Kind::Claude if !child.has_reported => transcript::session_of(&home, &[child.pid]),
                _ => None,
            };
            if let Some(id) = found {
                self.is_in(id);
            }
        }
        self.keep_record(State::Running);
        let last_input = self.typing.last(self.now);
        self.calm();
        self.watch(waiting::Event::AgentEnded);
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

    /// Looks which conversation the agent has open. What it is at counts, not what it was started with.
    pub(super) fn learn(&mut self) {
        self.learns_at = None;
        let child = self.child.as_ref().filter(|child| !child.is_ending && !child.has_reported && child.pid > 0);
        let Some(pid) = child.map(|child| child.pid) else { return };
        let found = match self.agent.kind() {
            Kind::Codex => rollout::current(&os::open_files(pid)),
            Kind::Claude => self.agents_home().and_then(|home| transcript::session_of(&home, &os::family(pid))),
            _ => None,
        };
        if let Some(id) = found {
            self.is_in(id);
        }
    }

    /// The agent is in this conversation.
    pub(super) fn is_in(&mut self, id: String) {
        if self.agent.conversation() != Some(id.as_str()) {
            self.journal.event("conversation", &[("id", &id)]);
            self.agent.learned(id);
            self.keep_record(State::Running);
        }
    }

    /// Writes down what a later outlast needs to go on.
    pub(super) fn keep_record(&mut self, state: State) {
        let Some(records) = &self.records else { return };
        let command = [&self.plan.program].into_iter().chain(&self.plan.args).cloned().collect();
        let record = SessionRecord {
            id: self.plan.id.clone(),
            agent: self.agent.kind().word().to_owned(),
            command,
            cwd: self.place.cwd.path.clone(),
            document: self.plan.document.clone(),
            conversation: self.agent.conversation().map(str::to_owned),
            state,
            updated: home::epoch(),
        };
        if let Err(error) = records.write(&record) {
            self.journal.note(&format!("the record of this session cannot be written ({error})"));
            self.records = None;
        }
    }

    /// Where the agent keeps its conversations, as it sees it itself.
    pub(super) fn agents_home(&self) -> Option<PathBuf> {
        let (variable, by_default) = match self.agent.kind() {
            Kind::Claude => ("CLAUDE_CONFIG_DIR", ".claude"),
            Kind::Codex => ("CODEX_HOME", ".codex"),
            _ => return None,
        };
        let value = |name: &str| {
            let set = self.place.env.iter().find(|(known, _)| known == name).map(|(_, value)| PathBuf::from(value));
            self.agent.assigned(name).map(PathBuf::from).or(set)
        };
        value(variable).or_else(|| value(os::HOME).map(|home| home.join(by_default)))
    }

    pub(super) fn note(&mut self, note: Note) {
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
                        let words = format!("{program} ended ({how}), failure {crashes}; again in {delay} s");
                        self.say(&words, " (Ctrl-C ends)");
                        self.notify("crashed", json!({"exit": how.to_string(), "crashes": crashes}), true);
                    }
                    Class::Halted => {
                        let words = format!("{program} failed {crashes} times and is halted");
                        self.record(Record { detail: Some(words.clone()), ..Record::new(record::Event::GaveUp) });
                        let id = &self.plan.id;
                        let words =
                            format!("{words} ({how}). `outlast resume {id}` tries again, `outlast stop {id}` ends it");
                        self.say(&words, ", and so does Ctrl-C");
                        self.notify("halted", json!({"exit": how.to_string(), "crashes": crashes}), true);
                        self.watch(waiting::Event::GaveUp);
                    }
                    Class::Asked | Class::Clean | Class::User => {}
                }
            }
            Note::Health { from, to } => {
                self.journal.event("state_change", &[("from", &health_word(from)), ("to", &health_word(to))]);
            }
        }
    }
}
