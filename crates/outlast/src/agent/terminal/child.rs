//! The agent's process: how it is started, and what its reports mean for the session.

use std::{ffi::OsString, path::PathBuf, time::SystemTime};

use outlast_core::{
    agent::{Kind, Prompt},
    exit::How,
    record::{self, Record},
    session::{Class, Event, LastInput, Mode, Note},
    waiting,
};
use outlast_os::{self as os, Order, Size, Stdio};
use serde_json::json;

use super::{Terminal, health_word, hooks};
use crate::{
    agent::{
        rollout,
        session_record::{SessionRecord, State},
        transcript,
    },
    child::{Child, ChildEvent, environment},
    cli::report::{self, Report},
    state::home,
};

/// What is known of the agent's process while it runs; the process itself is among the children.
pub(super) struct Running {
    pub(super) key: u64,
    pub(super) mode: Mode,
    pub(super) since: SystemTime,
    /// Until the prompt was seen.
    pub(super) prompt: Option<Prompt>,
    pub(super) tail: Vec<u8>,
    /// Its hooks work: what they report is not looked up in its files.
    pub(super) has_reported: bool,
}

impl Terminal {
    pub(super) fn start(&mut self, mode: Mode) {
        // The first place was resolved before there was a log.
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
            live_until: None,
        };
        match self.children.start(key, &order, self.plan.grace) {
            Ok(()) => {
                let Size { columns, rows, .. } = self.viewers.size();
                self.journal.event("pty_allocated", &[("columns", &columns), ("rows", &rows)]);
                self.typing.interrupted();
                let (mode, prompt) = (start.mode, Some(self.agent.prompt()));
                let (since, tail) = (SystemTime::now(), Vec::new());
                self.running = Some(Running { key, mode, since, prompt, tail, has_reported: false });
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

    /// The agent's process, while it runs.
    pub(super) fn process(&self) -> Option<&Child> {
        self.children.get(self.running.as_ref()?.key)
    }

    /// The agent's process, if it reads what is typed.
    pub(super) fn reading_process(&mut self) -> Option<&mut Child> {
        self.children.get_mut(self.running.as_ref()?.key).filter(|process| process.has_stdin())
    }

    pub(super) fn hear_children(&mut self) -> bool {
        let mut moved = false;
        while let Some(event) = self.children.next_event() {
            self.heard(event);
            moved = true;
        }
        moved
    }

    fn heard(&mut self, event: ChildEvent) {
        match event {
            ChildEvent::Started { key, pid } => self.started(key, pid),
            ChildEvent::StartFailed { key, error } if hooks::is_hook(key) => {
                let words = self.hooks.start_failed(key, &error);
                self.journal.note(&words);
            }
            ChildEvent::StartFailed { error, .. } => {
                self.running = None;
                self.agent.never_ran();
                self.start_failed(&report::cannot_start(&self.plan.program, &error));
            }
            ChildEvent::Gone { key, how, .. } if hooks::is_hook(key) => {
                if let Some(words) = self.hooks.ended(key, &how) {
                    self.journal.note(&words);
                }
            }
            ChildEvent::Gone { key, how, .. } => self.ended(key, how),
            ChildEvent::Cleared { key } => self.hooks.cleared(key),
            ChildEvent::Suspended { key } => self.suspended(key),
            ChildEvent::Noticed(sentence) => self.journal.note(&format!("WARNING: {sentence}")),
            ChildEvent::Logged { key, redacted, .. } => self.hooks.said(key, &redacted),
            // The output of an agent is no lines.
            ChildEvent::Said { .. } => {}
        }
    }

    fn started(&mut self, key: u64, pid: u32) {
        let Some(mode) = self.running.as_ref().filter(|running| running.key == key).map(|running| running.mode) else {
            return;
        };
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

    fn ended(&mut self, key: u64, how: How) {
        let pid = self.process().and_then(Child::pid);
        let Some(running) = self.running.take_if(|running| running.key == key) else { return };
        self.learns_at = None;
        self.end_sends(false);
        self.agent.said_last(&running.tail);
        if let Some(home) = self.agents_home() {
            let found = match self.agent.kind() {
                Kind::Codex if self.agent.is_without_conversation() => {
                    rollout::find(&home, &self.place.cwd.path, running.since)
                }
                // A claude that was killed leaves its file behind.
                Kind::Claude if !running.has_reported => transcript::session_of(&home, pid.as_slice()),
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
        if last_input == LastInput::Quit {
            self.journal.event("user_action", &[("action", &"farewell")]);
        }
        let how = match how {
            // The cause counts, not the process that reported it.
            How::Exited(exit) => How::Exited(exit.folded()),
            how => how,
        };
        self.tell(Event::Ended { how, last_input });
    }

    /// Looks up the conversation that the agent has open, which may differ from the one it was started with.
    pub(super) fn learn(&mut self) {
        self.learns_at = None;
        if self.running.as_ref().is_none_or(|running| running.has_reported) {
            return;
        }
        let Some(pid) = self.process().filter(|process| !process.has_exited()).and_then(Child::pid) else { return };
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

    /// Writes the record that a later session needs to continue.
    pub(super) fn keep_record(&mut self, state: State) {
        let Some(records) = &self.records else { return };
        let command = [&self.plan.program].into_iter().chain(&self.plan.args).cloned().collect();
        let record = SessionRecord {
            id: self.plan.id.clone(),
            agent: self.agent.kind().word().to_owned(),
            command,
            cwd: self.place.cwd.path.clone(),
            document: self.plan.document.clone(),
            here: self.plan.here.clone(),
            options: self.plan.options.clone(),
            env: self.place.passed.clone(),
            conversation: self.agent.conversation().map(str::to_owned),
            in_turn: self.has_open_turn(),
            state,
            updated: home::epoch(),
        };
        // A full disk may have room again: the next change is written again, and only the first failure is reported.
        match records.write(&record) {
            Ok(()) => self.is_record_lost = false,
            Err(error) if !std::mem::replace(&mut self.is_record_lost, true) => {
                let why = report::plain(&error.to_string());
                self.journal.note(&format!(
                    "the record of this session cannot be written ({why}): `outlast restore` will find its last state; \
                     free some space, and the next change is recorded"
                ));
            }
            Err(_) => {}
        }
    }

    /// Where the agent keeps its conversations, by its own environment.
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
                        let words = format!("{program} ended ({how}), failure {crashes}; starting again in {delay} s");
                        self.say(&words, " (Ctrl-C ends)");
                        self.notify("crashed", json!({"exit": how.to_string(), "crashes": crashes}), true);
                    }
                    Class::Halted => {
                        let words = format!("{program} failed {crashes} times and is halted");
                        self.record(Record { detail: Some(words.clone()), ..Record::new(record::Event::GaveUp) });
                        let id = &self.plan.id;
                        let words =
                            format!("{words} ({how}). `outlast resume {id}` tries again, `outlast stop {id}` stops it");
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
