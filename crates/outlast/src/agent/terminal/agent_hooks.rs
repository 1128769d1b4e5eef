//! Makes claude report what it does: writes a settings file with hooks for each start, and receives their events over the
//! control socket. What a report means is decided in core (`agent_event`, and the machines that get it).

#[cfg(unix)]
use std::{
    ffi::OsString,
    os::unix::ffi::{OsStrExt, OsStringExt},
};
use std::{
    fs,
    path::{Path, PathBuf},
};

use outlast_control::{method::AgentEvent, wire::Refusal};
#[cfg(unix)]
use outlast_core::saved::Octets;
use outlast_core::{
    agent_event::{self, Report, ReportKind},
    waiting,
};
use outlast_os as os;
use serde_json::{Value, json};

use super::Terminal;
use crate::{agent::session_record::SETTINGS, state::home};

/// A settings file of the user that is longer is not merged with ours.
const SETTINGS_MAX: u64 = 4 << 20;

/// The settings file of one session. It is removed with the session.
#[derive(Debug, Default)]
pub(super) struct AgentHooks {
    file: Option<PathBuf>,
}

impl AgentHooks {
    /// Writes the settings for one start: the user's own (`--settings`, a file or JSON) and our hooks. None if that is not
    /// possible; the agent is then started without hooks, with the arguments that the user wrote.
    fn write(&mut self, own: Option<&str>, cwd: &Path, session: &str, command: &str) -> Option<PathBuf> {
        let own = match own {
            None => json!({}),
            Some(own) => user_settings(own, cwd)?,
        };
        let settings = agent_event::with_hooks(own, command)?;
        let user_home = std::env::home_dir().filter(|home| home.is_absolute())?;
        let dir = home::state_dir(&user_home).join("sessions");
        home::make_private(&dir).ok()?;
        let file = dir.join(format!("{session}{SETTINGS}"));
        home::write_private(&file, settings.to_string().as_bytes()).ok()?;
        self.file = Some(file.clone());
        Some(file)
    }
}

#[cfg(unix)]
impl AgentHooks {
    /// The file, for the next program.
    pub(super) fn save(&self) -> Option<Octets> {
        self.file.as_ref().map(|file| Octets::of(file.as_os_str().as_bytes()))
    }

    pub(super) fn restore(file: Option<Octets>) -> AgentHooks {
        AgentHooks { file: file.map(|file| OsString::from_vec(file.bytes().to_vec()).into()) }
    }
}

impl Drop for AgentHooks {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            let _ = fs::remove_file(file);
        }
    }
}

impl Terminal {
    /// The file to pass as `--settings`, if this agent reports through hooks.
    pub(super) fn hook_settings(&mut self, generation: u64) -> Option<String> {
        if !self.agent.takes_hooks() {
            return None;
        }
        let socket = self.control.socket()?;
        let program = std::env::current_exe().ok()?;
        let command = hook_command(&program, socket, generation)?;
        let file = self.agent_hooks.write(self.agent.own_settings(), &self.place.cwd.path, &self.plan.id, &command);
        match file {
            Some(file) => file.to_str().map(str::to_owned),
            None => {
                self.journal.note("the agent is started without hooks, because its settings cannot be written");
                None
            }
        }
    }

    /// The method `agent_event`: an event of the agent's hooks.
    pub(super) fn agent_event(&mut self, event: &AgentEvent) -> Result<Value, Refusal> {
        let is_current = self.running.as_ref().is_some_and(|running| Some(running.key) == event.generation);
        if !is_current {
            return Err(Refusal::new("not_running", "the event is from an agent that has ended"));
        }
        let Some(report) = Report::read(&event.event) else {
            return Err(Refusal::new("bad_request", "`agent_event` needs a known `event`"));
        };
        self.journal.event("agent_event", &[("what", &report.word()), ("conversation", &report.conversation)]);
        self.reported(report);
        Ok(json!({}))
    }

    /// Gives a report to each machine that needs it.
    fn reported(&mut self, report: Report) {
        if let Some(running) = &mut self.running {
            running.has_reported = true;
        }
        if let ReportKind::Prompt { text, bytes } = &report.what {
            self.agent.took_turn(text);
            self.sends.announced(text, *bytes);
        }
        match &report.what {
            ReportKind::Prompt { .. } => self.watch(waiting::Event::TurnBegan),
            ReportKind::TurnEnded { answer, bytes } => {
                self.answers.reported(answer.clone(), *bytes);
                self.read_turns();
                let actions = self.sends.turn_ended(self.now);
                self.act_on_sends(actions);
                self.watch(waiting::Event::TurnEnded);
            }
            ReportKind::Began { .. } | ReportKind::Left { .. } | ReportKind::Notified { .. } => {}
        }
        if !matches!(report.what, ReportKind::Left { .. }) {
            self.is_in(report.conversation);
        }
    }
}

/// For the shell that runs the hook. What the command prints would become part of the conversation, and its failure an
/// error message in the agent's window; both are kept away.
fn hook_command(program: &Path, socket: &Path, generation: u64) -> Option<String> {
    let quoted = |path: &Path| path.to_str().map(|path| format!("'{}'", path.replace('\'', r"'\''")));
    let (program, socket) = (quoted(program)?, quoted(socket)?);
    Some(format!("{program} agent-event --socket {socket} --generation {generation} >/dev/null 2>&1 || true"))
}

/// What the user passes to `--settings`: JSON, or the path of a file, relative to the agent's directory.
fn user_settings(own: &str, cwd: &Path) -> Option<Value> {
    if own.trim_start().starts_with('{') {
        return serde_json::from_str(own).ok();
    }
    let file = cwd.join(own);
    os::read_named(&file, SETTINGS_MAX).ok().and_then(|text| serde_json::from_slice(&text).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hook_is_one_quiet_command() {
        let command = hook_command(Path::new("/o'u/outlast"), Path::new("/s ock"), 3).unwrap();
        let expected = r"'/o'\''u/outlast' agent-event --socket '/s ock' --generation 3 >/dev/null 2>&1 || true";
        assert_eq!(command, expected);
    }

    #[test]
    fn the_settings_of_the_user_are_read_as_claude_reads_them() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("own.json"), r#"{"model":"m"}"#).unwrap();
        fs::write(dir.path().join("broken.json"), "{").unwrap();
        let read = |own: &str| user_settings(own, dir.path());
        assert_eq!(read("own.json"), Some(json!({"model": "m"})));
        assert_eq!(read(dir.path().join("own.json").to_str().unwrap()), Some(json!({"model": "m"})));
        assert_eq!(read(r#" {"a": 1}"#), Some(json!({"a": 1})));
        assert_eq!((read("{"), read("broken.json"), read("missing.json")), (None, None, None));
    }
}
