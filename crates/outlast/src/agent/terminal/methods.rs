//! The methods of a session's control socket.

use std::{
    path::Path,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use outlast_control::{
    method::{self, Attach, Kind, Method, Restart, Screen, WaitFor},
    server::Asked,
    wire::Refusal,
};
use outlast_core::{
    exit::{self, How},
    reason::one_line,
    record::{self, Record},
    session::{Answer, Event, Mode, Refused},
    terminal::Role,
    waiting::{self, Condition, Outcome},
};
use outlast_os::Size;
use serde_json::{Value, json};

use super::{Terminal, health_word, plan::SIDE_MAX, viewers::VIEWERS_MAX};
#[cfg(windows)]
use crate::upgrade;
use crate::{child::Child, state::home};

/// Injected bytes above this are refused.
const TYPED_MAX: usize = 1 << 20;
/// A viewer whose terminal has a longer name counts as a new one each time.
const TERMINAL_NAME_MAX: usize = 256;
/// Further `wait_for` requests are refused.
const WAITERS_MAX: usize = 64;

impl Terminal {
    pub(super) fn poll_control(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(Asked { ticket, method, params }) = self.control.poll(cx) else { return false };
        let answer = match Method::read(Kind::Session, &method, &params) {
            Ok(Method::State) => Ok(self.state()),
            Ok(Method::Pid) => Ok(json!({"pid": self.session.pid()})),
            Ok(Method::Restart(restart)) => return self.restart(ticket, &restart),
            Ok(Method::Resume) => {
                self.journal.event("user_action", &[("action", &"resume"), ("by", &"control")]);
                self.asked_at.insert(ticket, self.now);
                self.tell(Event::ResumeAsked { ticket });
                return true;
            }
            Ok(Method::Inject(inject)) => self.inject(&inject.bytes),
            Ok(Method::Send(send)) => {
                self.send(ticket, send);
                return true;
            }
            Ok(Method::Screen(screen)) => self.look(&screen),
            Ok(Method::WaitFor(wanted)) => return self.wait_for(ticket, wanted),
            Ok(Method::Attach(viewer)) => return self.attach_asked(ticket, viewer),
            Ok(Method::Stop(stop)) => {
                let graceful = stop.is_graceful();
                self.journal.event("user_action", &[("action", &"stop"), ("by", &"control"), ("graceful", &graceful)]);
                self.tell(Event::StopAsked { force: !graceful });
                Ok(json!({"stopping": true}))
            }
            Ok(Method::AgentEvent(event)) => self.agent_event(&event),
            Ok(Method::Subscribe) => {
                self.control.subscribe(ticket);
                return true;
            }
            #[cfg(unix)]
            Ok(Method::Upgrade(upgrade)) => {
                self.journal.event("user_action", &[("action", &"upgrade"), ("by", &"control")]);
                self.ask_upgrade(Some(ticket), upgrade.program);
                return true;
            }
            #[cfg(windows)]
            Ok(Method::Upgrade(_)) => Err(upgrade::unsupported(upgrade::NOT_ON_WINDOWS)),
            Ok(method) => Err(Kind::Session.unknown(method.name())),
            Err(refusal) => Err(refusal),
        };
        self.control.answer(ticket, &answer);
        true
    }

    fn restart(&mut self, ticket: u64, restart: &Restart) -> bool {
        let mode = restart.mode.unwrap_or(Mode::Continue);
        // A document or directory that is wrong now must not cost the running agent.
        if let Err(report) = self.plan.place() {
            let why = report.because.map(|because| format!(": {because}")).unwrap_or_default();
            let message =
                format!("the agent was not stopped, because it could not be started again: {}", report.sentence);
            self.control.answer(ticket, &Err(Refusal::new("restart_failed", message + &why)));
            return true;
        }
        let reason = one_line(restart.reason());
        self.journal
            .event("user_action", &[("action", &"restart"), ("by", &"control"), ("mode", &mode), ("reason", &reason)]);
        let record = Record::new(record::Event::ServerRestartRequested);
        let (reason, pid) = (Some(reason), self.session.pid());
        self.record(Record { pid, reason, detail: Some("control".into()), ..record });
        self.asked_at.insert(ticket, self.now);
        self.tell(Event::RestartAsked { ticket, mode });
        true
    }

    pub(super) fn answer(&mut self, ticket: u64, result: Result<Answer, Refused>) {
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

    fn inject(&mut self, bytes: &[u8]) -> Result<Value, Refusal> {
        let is_up = |process: &&mut Child| process.pid().is_some() && !process.has_exited();
        let Some(process) = self.reading_process().filter(is_up) else {
            let state = self.session.state();
            let code = if state == "halted" { "halted" } else { "not_running" };
            return Err(Refusal::new(code, format!("no agent is running; the session is {state}")));
        };
        if process.queued() + bytes.len() > TYPED_MAX {
            return Err(Refusal::new("not_reading", "the agent has not read the previous input"));
        }
        process.put(Bytes::copy_from_slice(bytes), None);
        self.typing.interrupted();
        let enter = bytes.contains(&b'\r') || bytes.contains(&b'\n');
        self.watch(waiting::Event::Input { enter });
        self.journal.event("inject", &[("bytes", &bytes.len())]);
        Ok(json!({"n": bytes.len()}))
    }

    fn look(&mut self, wanted: &Screen) -> Result<Value, Refusal> {
        let screen = self.screen().ok_or_else(no_screen)?;
        let (look, modes, size) = (screen.look(), screen.modes(), screen.size());
        let history = usize::try_from(wanted.history).unwrap_or(usize::MAX);
        Ok(json!({
            "text": screen.text(),
            "lines": look.lines,
            "history": screen.history(history),
            "cursor": {"row": look.cursor.0, "column": look.cursor.1, "visible": look.is_cursor_visible},
            "columns": size.columns,
            "rows": size.rows,
            "title": screen.title(),
            "modes": {
                "alternate": modes.alternate,
                "bracketed_paste": modes.bracketed_paste,
                "mouse": modes.mouse,
                "focus": modes.focus,
                "application_cursor": modes.application_cursor,
                "keyboard": modes.keyboard,
            },
            "waiting_for_input": self.waiting.is_waiting(),
            "stance": self.waiting.stance().word(),
        }))
    }

    fn wait_for(&mut self, ticket: u64, wanted: WaitFor) -> bool {
        let control = &self.control;
        self.waiting.keep_only(|ticket| control.is_waited_for(ticket));
        let timeout = wanted.timeout;
        let condition =
            self.condition(wanted).and_then(|condition| match timeout.map(Duration::try_from_secs_f64).transpose() {
                Ok(timeout) => Ok((condition, timeout)),
                Err(_) => Err(Refusal::new("bad_request", "`timeout` is a number of seconds")),
            });
        let (condition, timeout) = match condition {
            Ok(condition) => condition,
            Err(refusal) => {
                self.control.answer(ticket, &Err(refusal));
                return true;
            }
        };
        self.asked_at.insert(ticket, self.now);
        let control = &self.control;
        self.turn_waiters.retain(|ticket| control.is_waited_for(*ticket));
        if condition == Condition::Turn {
            self.turn_waiters.insert(ticket);
        }
        self.watch(waiting::Event::Asked { ticket, condition, timeout });
        if self.waiting.wants_text()
            && let Some(text) = self.screen().map(|screen| screen.text())
        {
            let found = self.waiting.seen(&text);
            self.act_on_watch(found);
        }
        true
    }

    fn condition(&mut self, wanted: WaitFor) -> Result<Condition, Refusal> {
        let bad = |message: &str| Refusal::new("bad_request", message);
        if self.session.state() == "halted" {
            return Err(Refusal::new(
                "halted",
                "the session failed too often and is halted; there is nothing to wait for",
            ));
        }
        if self.waiting.count() >= WAITERS_MAX {
            return Err(Refusal::new(
                "too_many_waiters",
                format!("{WAITERS_MAX} are already waiting, which is the limit"),
            ));
        }
        let condition = match (wanted.text, wanted.quiet, wanted.prompt, wanted.turn) {
            (Some(text), None, None, None) if !text.is_empty() => Condition::Text(text),
            (None, Some(quiet), None, None) => {
                let quiet = Duration::try_from_secs_f64(quiet);
                Condition::Quiet(quiet.map_err(|_| bad("`quiet` is a number of seconds"))?)
            }
            (None, None, Some(true), None) => Condition::Prompt,
            (None, None, None, Some(true)) => Condition::Turn,
            _ => return Err(bad(method::WAIT_FOR)),
        };
        if self.screen().is_none() && !matches!(condition, Condition::Quiet(_)) {
            return Err(no_screen());
        }
        Ok(condition)
    }

    pub(super) fn answer_waiter(&mut self, ticket: u64, outcome: Outcome) {
        let took = self.asked_at.remove(&ticket).map(|at| self.now.saturating_duration_since(at)).unwrap_or_default();
        let is_for_turn = self.turn_waiters.remove(&ticket);
        let result = match outcome {
            Outcome::Met => {
                let mut met = json!({"met": true, "took_ms": u64::try_from(took.as_millis()).unwrap_or(u64::MAX)});
                if is_for_turn {
                    self.answers.add_to(&mut met);
                }
                Ok(met)
            }
            Outcome::TimedOut => Err(Refusal::new("timed_out", "it did not happen in time")),
            Outcome::GaveUp => Err(Refusal::new("halted", "the agent failed too often and is halted")),
        };
        self.control.answer(ticket, &result);
    }

    fn attach_asked(&mut self, ticket: u64, viewer: Attach) -> bool {
        let size = viewer_size(&viewer);
        let role = if viewer.watch { Role::Watcher } else { Role::Attached };
        let refusal = match size {
            None => Refusal::new("bad_request", format!("`attach` needs `columns` and `rows`, from 1 to {SIDE_MAX}")),
            Some(_) if self.screen().is_none() => no_screen(),
            Some(_) if self.viewers.count() >= VIEWERS_MAX => Refusal::new(
                "too_many_viewers",
                format!("{VIEWERS_MAX} terminals are already attached, which is the limit"),
            ),
            Some(size) => {
                let answer = Ok(json!({"session": self.plan.id, "pid": self.session.pid()}));
                let terminal = viewer.terminal.filter(|name| name.len() <= TERMINAL_NAME_MAX);
                if let Some(taken) = self.control.take(ticket, &answer) {
                    self.attach(taken, role, size, terminal);
                }
                return true;
            }
        };
        self.control.answer(ticket, &Err(refusal));
        true
    }

    /// The state in one word: that of the session, or that its agent has reached its usage limit.
    fn word(&self) -> &'static str {
        match self.session.state() {
            "ready" if self.limit.seen().is_some() => "limited",
            state => state,
        }
    }

    fn state(&mut self) -> Value {
        let now = Instant::now();
        let title = self.screen().and_then(|screen| screen.title()).map(str::to_owned);
        let limit = self.limit.seen().cloned();
        let limit_end = limit.as_ref().and_then(|seen| seen.end).map(|end| end.at);
        let limit_left = limit_end.map(|at| (at as f64 - home::epoch()).max(0.0));
        let restarts = self.session.restarts();
        let code = self.session.last_exit().and_then(How::exit).map(|exit| match exit {
            exit::Exit::Code(code) => *code,
            exit::Exit::Signal(signal) => 128 + signal,
        });
        let mut state = json!({
            "state": self.word(),
            "health": health_word(self.session.health()),
            "running": self.session.pid().is_some(),
            "pid": self.session.pid(),
            "generation": self.generation,
            "uptime_s": self.session.uptime(now).map(|uptime| uptime.as_secs_f64()),
            "restarts": restarts.restarts(),
            "restart_count": restarts.restarts(),
            "crashes": restarts.crashes(now),
            "next_try_s": self.session.next_try(now).map(|left| left.as_secs_f64()).or(limit_left),
            "limit": limit.as_ref().map(|seen| seen.text.as_str()),
            "limited_until": limit_end,
            "limited_until_text": limit_end.and_then(|_| self.limit_end_in_words()),
            "last_exit": code,
            "last_exit_text": self.session.last_exit().map(ToString::to_string),
            "last_exits": restarts.recent().map(|past| past.to_json(now)).collect::<Vec<Value>>(),
            "last_exit_code": code,
            "session": self.plan.id,
            "mode": self.running.as_ref().map(|running| running.mode.to_string()),
            "conversation": self.agent.conversation(),
            "cwd": self.place.cwd.path.to_string_lossy(),
            "cwd_source": self.place.cwd.source.tag(),
            "env_left_out": self.place.left_out,
            "document": self.plan.document.as_deref().map(Path::to_string_lossy),
            "attached": self.viewers.count(),
            "columns": self.viewers.size().columns,
            "rows": self.viewers.size().rows,
            "waiting_for_input": self.waiting.is_waiting(),
            "stance": self.waiting.stance().word(),
            "waiters": self.waiting.count(),
            "title": title,
        });
        self.control.complete(&mut state);
        state
    }
}

pub(super) fn no_screen() -> Refusal {
    Refusal::new("no_screen", "this session has no screen model, because it was started with `--no-screen`")
}

fn viewer_size(viewer: &Attach) -> Option<Size> {
    let side = |side: u64| u16::try_from(side).ok().filter(|side| (1..=SIDE_MAX).contains(side));
    let pixels = |pixels: u64| u16::try_from(pixels).unwrap_or(0);
    Some(Size {
        columns: side(viewer.columns)?,
        rows: side(viewer.rows)?,
        width: pixels(viewer.width),
        height: pixels(viewer.height),
    })
}
