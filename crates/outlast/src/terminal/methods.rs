//! What a session answers on its socket.

use std::{
    path::Path,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use outlast_core::{
    exit::{self, How},
    reason::one_line,
    record::{self, Record},
    session::{Answer, Event, Mode, Refused},
    terminal::Role,
    waiting::{self, Outcome, Wish},
};
use serde_json::{Value, json};

use super::{Terminal, health_word, plan::SIDE_MAX, viewers::VIEWERS_MAX};
use crate::{
    base64,
    control::{self, server::Asked, wire::Refusal},
    os::Size,
};

/// What every session understands.
const METHODS: [&str; 11] =
    ["state", "pid", "restart", "inject", "send", "screen", "wait_for", "attach", "resume", "stop", "subscribe"];
/// What is injected beyond this is refused.
const TYPED_MAX: usize = 1 << 20;
/// A viewer whose terminal has a longer name is taken for a new one each time.
const TERMINAL_NAME_MAX: usize = 256;
/// Who wants to wait when so many do is refused.
const WAITERS_MAX: usize = 64;

impl Terminal {
    pub(super) fn poll_control(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(Asked { ticket, method, params }) = self.control.poll(cx) else { return false };
        let answer = match method.as_str() {
            "state" => Ok(self.state()),
            "pid" => Ok(json!({"pid": self.session.pid()})),
            "restart" => match control::refuse_restart_now(&params).and_then(|()| control::restart_mode(&params)) {
                Ok(mode) => return self.restart(ticket, mode, &params),
                Err(refusal) => Err(refusal),
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
            "screen" => self.look(&params),
            "wait_for" => return self.wait_for(ticket, &params),
            "attach" => return self.attach_asked(ticket, &params),
            "stop" => {
                let graceful = params["graceful"].as_bool().unwrap_or(true);
                self.journal.event("user_action", &[("action", &"stop"), ("by", &"control"), ("graceful", &graceful)]);
                self.tell(Event::StopAsked { force: !graceful });
                Ok(json!({"stopping": true}))
            }
            "agent_event" => self.agent_event(&params),
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
        // A document or directory that is wrong now must not cost the agent that works.
        if let Err(report) = self.plan.place() {
            let why = report.because.map(|because| format!(": {because}")).unwrap_or_default();
            let message =
                format!("the agent was not touched, because it could not be started again: {}", report.sentence);
            self.control.answer(ticket, &Err(Refusal::new("restart_failed", message + &why)));
            return true;
        }
        let reason = one_line(params["reason"].as_str().unwrap_or("asked for from outside"));
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
        let enter = bytes.contains(&b'\r') || bytes.contains(&b'\n');
        self.watch(waiting::Event::Input { enter });
        self.journal.event("inject", &[("bytes", &bytes.len())]);
        Ok(json!({"n": bytes.len()}))
    }

    fn look(&mut self, params: &Value) -> Result<Value, Refusal> {
        let screen = self.screen().ok_or_else(no_screen)?;
        let (look, modes, size) = (screen.look(), screen.modes(), screen.size());
        let history = usize::try_from(params["history"].as_u64().unwrap_or(0)).unwrap_or(usize::MAX);
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

    fn wait_for(&mut self, ticket: u64, params: &Value) -> bool {
        let control = &self.control;
        self.waiting.keep_only(|ticket| control.is_waited_for(ticket));
        let wish = match self.wish(params) {
            Ok(wish) => wish,
            Err(refusal) => {
                self.control.answer(ticket, &Err(refusal));
                return true;
            }
        };
        let seconds = |value: &Value| value.as_f64().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let timeout = match &params["timeout"] {
            Value::Null => None,
            value => match seconds(value) {
                Some(timeout) => Some(timeout),
                None => {
                    let refusal = Refusal::new("bad_request", "`timeout` is a number of seconds");
                    self.control.answer(ticket, &Err(refusal));
                    return true;
                }
            },
        };
        self.asked_at.insert(ticket, self.now);
        self.watch(waiting::Event::Asked { ticket, wish, timeout });
        if self.waiting.wants_text()
            && let Some(text) = self.screen().map(|screen| screen.text())
        {
            let found = self.waiting.seen(&text);
            self.act_on_watch(found);
        }
        true
    }

    fn wish(&mut self, params: &Value) -> Result<Wish, Refusal> {
        let bad = |message: &str| Refusal::new("bad_request", message);
        if self.session.state() == "halted" {
            return Err(Refusal::new("halted", "it failed too often and is halted; there is nothing to wait for"));
        }
        if self.waiting.count() >= WAITERS_MAX {
            return Err(Refusal::new("too_many_waiters", format!("{WAITERS_MAX} wait already, which is the limit")));
        }
        let wish = match (&params["text"], &params["quiet"], &params["prompt"]) {
            (Value::String(text), Value::Null, Value::Null) if !text.is_empty() => Wish::Text(text.clone()),
            (Value::Null, quiet, Value::Null) if quiet.is_number() => {
                let seconds = quiet.as_f64().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                Wish::Quiet(seconds.ok_or_else(|| bad("`quiet` is a number of seconds"))?)
            }
            (Value::Null, Value::Null, Value::Bool(true)) => Wish::Prompt,
            _ => return Err(bad("`wait_for` wants one of `text`, `quiet` (in seconds) and `prompt` (true)")),
        };
        if self.screen().is_none() && !matches!(wish, Wish::Quiet(_)) {
            return Err(no_screen());
        }
        Ok(wish)
    }

    pub(super) fn answer_waiter(&mut self, ticket: u64, outcome: Outcome) {
        let took = self.asked_at.remove(&ticket).map(|at| self.now.saturating_duration_since(at)).unwrap_or_default();
        let result = match outcome {
            Outcome::Met => Ok(json!({"met": true, "took_ms": u64::try_from(took.as_millis()).unwrap_or(u64::MAX)})),
            Outcome::TimedOut => Err(Refusal::new("timed_out", "it did not come in time")),
            Outcome::GaveUp => Err(Refusal::new("halted", "the agent failed too often and is halted")),
        };
        self.control.answer(ticket, &result);
    }

    fn attach_asked(&mut self, ticket: u64, params: &Value) -> bool {
        let size = viewer_size(params);
        let role = if params["watch"].as_bool().unwrap_or(false) { Role::Watcher } else { Role::Guest };
        let refusal = match size {
            None => Refusal::new("bad_request", format!("`attach` wants `columns` and `rows`, from 1 to {SIDE_MAX}")),
            Some(_) if self.screen().is_none() => no_screen(),
            Some(_) if self.viewers.count() >= VIEWERS_MAX => {
                Refusal::new("too_many_viewers", format!("{VIEWERS_MAX} look at it already, which is the limit"))
            }
            Some(size) => {
                let answer = Ok(json!({"session": self.plan.id, "pid": self.session.pid()}));
                let terminal = params["terminal"].as_str().filter(|name| name.len() <= TERMINAL_NAME_MAX);
                let terminal = terminal.map(str::to_owned);
                if let Some(taken) = self.control.take(ticket, &answer) {
                    self.attach(taken, role, size, terminal);
                }
                return true;
            }
        };
        self.control.answer(ticket, &Err(refusal));
        true
    }

    fn state(&mut self) -> Value {
        let now = Instant::now();
        let title = self.screen().and_then(|screen| screen.title()).map(str::to_owned);
        let restarts = self.session.restarts();
        let code = self.session.last_exit().and_then(How::exit).map(|exit| match exit {
            exit::Exit::Code(code) => *code,
            exit::Exit::Signal(signal) => 128 + signal,
        });
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
            "last_exit": code,
            "last_exit_text": self.session.last_exit().map(ToString::to_string),
            "last_exits": restarts.recent().map(|past| past.to_json(now)).collect::<Vec<Value>>(),
            "last_exit_code": code,
            "session": self.plan.id,
            "mode": self.child.as_ref().map(|child| child.mode.to_string()),
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
    Refusal::new("no_screen", "this session does not keep its screen, because it was started with `--no-screen`")
}

fn viewer_size(params: &Value) -> Option<Size> {
    let side = |member: &str| params[member].as_u64().filter(|side| (1..=u64::from(SIDE_MAX)).contains(side));
    let pixels = |member: &str| params[member].as_u64().and_then(|pixels| u16::try_from(pixels).ok()).unwrap_or(0);
    Some(Size {
        columns: u16::try_from(side("columns")?).ok()?,
        rows: u16::try_from(side("rows")?).ok()?,
        width: pixels("width"),
        height: pixels("height"),
    })
}
