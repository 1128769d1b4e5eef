//! `outlast mcp --inherit`: the child gets our own stdin and stdout, and nothing is read, replayed or answered.
//!
//! For servers that need no handshake. One on an SDK refuses every call after a restart, as the client's handshake
//! was with the server before it.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Instant,
};

use outlast_core::{
    exit::{self, Cause, How, classify},
    life::{self, Life},
    reason::one_line,
    record::{self, Record},
    restarts::{Policy, Restarts, Verdict},
};
use serde_json::{Value, json};
use tokio::time::{Sleep, sleep_until};

use crate::{
    control::{self, Control, server::Asked, wire::Refusal},
    home,
    journal::Journal,
    mcp::Plan,
    os::{self, Household, News, Order, Stdio},
    report,
};

struct Inherit {
    plan: Plan,
    restarts: Restarts,
    household: Household,
    stops: os::Stops,
    journal: Journal,
    control: Control,
    generation: u32,
    child: Option<(Life, Instant)>,
    /// The child that runs, for words only.
    pid: Option<u32>,
    last_exit: Option<String>,
    /// Those who asked for a restart and wait for the next child.
    waiting: Vec<u64>,
    /// Whom the restart they asked for replaces, and since when.
    replaced: Option<(u32, Instant)>,
    next: Option<Instant>,
    /// We were asked to leave, or the child left on purpose.
    code: Option<u8>,
    timer: Option<(Instant, Pin<Box<Sleep>>)>,
}

/// Runs until the server leaves on purpose or somebody stops us; the exit code.
pub async fn run(
    plan: Plan,
    policy: Policy,
    household: Household,
    stops: os::Stops,
    journal: Journal,
    control: Control,
) -> u8 {
    let mut inherit = Inherit {
        plan,
        restarts: Restarts::new(policy, home::random()),
        household,
        stops,
        journal,
        control,
        generation: 0,
        child: None,
        pid: None,
        last_exit: None,
        waiting: Vec::new(),
        replaced: None,
        next: None,
        code: None,
        timer: None,
    };
    inherit.start();
    let code = std::future::poll_fn(|cx| inherit.poll(cx)).await;
    inherit.refuse_waiting("outlast is stopping");
    let line = inherit.journal.end(code);
    inherit.control.record(&line);
    inherit.control.end();
    code
}

impl Inherit {
    fn start(&mut self) {
        self.generation += 1;
        self.next = None;
        let order = Order {
            program: self.plan.program.clone(),
            args: self.plan.args.clone(),
            cwd: self.plan.cwd.clone(),
            env: Vec::new(),
            tag: format!("{}.{}", self.plan.id, self.generation),
            env_is_all: false,
            stdio: Stdio::Inherit,
            sandbox: self.plan.sandbox.clone(),
        };
        match self.household.spawn(self.generation.into(), &order) {
            Ok(_) => self.child = Some((Life::new(self.plan.grace), Instant::now())),
            Err(error) => self.ended(How::CouldNotStart(report::plain(&error.to_string())), 0),
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<u8> {
        loop {
            let mut moved = false;
            if let Poll::Ready(stop) = self.stops.poll_next(cx) {
                self.journal.note(&format!("{} received, stopping", stop.name));
                let again = self.code.replace(0).is_some();
                self.live(if again { life::Event::KillAsked } else { life::Event::StopAsked(How::Stopped) });
                moved = true;
            }
            if let Poll::Ready(news) = self.household.poll_news(cx) {
                self.heard(news);
                moved = true;
            }
            if let Poll::Ready(asked) = self.control.poll(cx) {
                self.asked(asked);
                moved = true;
            }
            if self.child.is_none() {
                match (self.code, self.next) {
                    (Some(code), _) => return Poll::Ready(code),
                    (None, Some(at)) if at <= Instant::now() => {
                        self.start();
                        moved = true;
                    }
                    _ => {}
                }
            }
            moved |= self.poll_time(cx);
            if !moved {
                return Poll::Pending;
            }
        }
    }

    fn asked(&mut self, Asked { ticket, method, params }: Asked) {
        let answer = match method.as_str() {
            "state" => Ok(self.state()),
            "pid" => Ok(json!({"pid": self.pid})),
            "restart" if control::restart_mode(&params).is_err() => control::restart_mode(&params).map(|_| Value::Null),
            "restart" | "resume" => {
                if self.code.is_some() {
                    Err(Refusal::new("restart_failed", "outlast is stopping"))
                } else if method == "resume" && self.child.is_some() {
                    Ok(json!({"resumed": false, "state": self.state()["state"]}))
                } else {
                    if method == "resume" {
                        self.restarts.resumed();
                    }
                    let reason = one_line(params["reason"].as_str().unwrap_or("asked for from outside"));
                    self.restart(ticket, reason);
                    return;
                }
            }
            "stop" => {
                let graceful = params["graceful"].as_bool().unwrap_or(true);
                self.journal.note(if graceful { "Stop requested" } else { "Stop at once requested" });
                self.code = Some(0);
                self.live(life::Event::StopAsked(How::Stopped));
                if !graceful {
                    self.live(life::Event::KillAsked);
                }
                Ok(json!({"stopping": true}))
            }
            "subscribe" => return self.control.subscribe(ticket),
            method => Err(control::unknown_method(method, &control::METHODS)),
        };
        self.control.answer(ticket, &answer);
    }

    /// One after the other: the streams are the same, so two cannot have them.
    fn restart(&mut self, ticket: u64, reason: String) {
        self.waiting.push(ticket);
        let record = Record::new(record::Event::ServerRestartRequested);
        self.record(Record { pid: self.pid, reason: Some(reason), detail: Some("control".into()), ..record });
        if self.replaced.is_none() {
            self.replaced = Some((self.pid.unwrap_or_default(), Instant::now()));
        }
        match self.child {
            Some(_) => self.live(life::Event::StopAsked(How::Stopped)),
            None => self.next = Some(Instant::now()),
        }
    }

    fn answer_waiting(&mut self, pid: u32) {
        let Some((old, since)) = self.replaced.take() else { return };
        let report = json!({
            "old_pid": (old > 0).then_some(old),
            "new_pid": pid,
            "generation": self.generation,
            "took_ms": u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX),
            "tools": {"compared": false},
        });
        for ticket in std::mem::take(&mut self.waiting) {
            self.control.answer(ticket, &Ok(report.clone()));
        }
    }

    fn refuse_waiting(&mut self, why: &str) {
        self.replaced = None;
        for ticket in std::mem::take(&mut self.waiting) {
            self.control.answer(ticket, &Err(Refusal::new("restart_failed", why)));
        }
    }

    fn state(&self) -> Value {
        let now = Instant::now();
        let state = match (&self.child, self.pid) {
            (Some(_), _) if self.code.is_some() => "stopping",
            (Some(_), Some(_)) if self.replaced.is_some() => "reloading",
            // Nothing is read, so there is no better sign of readiness than to be running.
            (Some(_), Some(_)) => "ready",
            (Some(_), None) => "starting",
            (None, _) => "backoff",
        };
        let uptime = self.child.as_ref().filter(|_| self.pid.is_some()).map(|(_, since)| now.duration_since(*since));
        let mut state = json!({
            "state": state,
            "pid": self.pid,
            "generation": self.generation,
            "uptime_s": uptime.map(|uptime| uptime.as_secs_f64()),
            "restarts": self.generation.saturating_sub(1),
            "crashes": self.restarts.crashes(now),
            "next_try_s": self.next.map(|at| at.saturating_duration_since(now).as_secs_f64()),
            "last_exit": self.last_exit,
            "last_exits": self.restarts.recent().map(|past| past.to_json(now)).collect::<Vec<Value>>(),
        });
        self.control.complete(&mut state);
        state
    }

    fn record(&mut self, record: Record) {
        let line = self.journal.record(record);
        self.control.record(&line);
    }

    fn poll_time(&mut self, cx: &mut Context<'_>) -> bool {
        let deadline = match &self.child {
            Some((life, _)) => life.deadline(),
            None => self.next,
        };
        let Some(at) = deadline else {
            self.timer = None;
            return false;
        };
        if at <= Instant::now() {
            self.live(life::Event::TimePassed);
            return true;
        }
        if self.timer.as_ref().is_none_or(|(set, _)| *set != at) {
            self.timer = Some((at, Box::pin(sleep_until(at.into()))));
        }
        self.timer.as_mut().is_some_and(|(_, timer)| timer.as_mut().poll(cx).is_ready())
    }

    fn heard(&mut self, news: News) {
        match news {
            News::Started { pid, .. } => {
                match self.replaced {
                    Some(_) => self.restarts.replaced(Instant::now()),
                    None => self.restarts.child_started(Instant::now()),
                }
                // Nothing is read, so there is no better sign of readiness than to be running.
                self.restarts.child_ready(Instant::now());
                self.pid = Some(pid);
                self.record(Record {
                    pid: Some(pid),
                    generation: Some(self.generation.into()),
                    restarts: Some(self.generation - 1),
                    ..Record::new(record::Event::ServerStarted)
                });
                self.live(life::Event::Started { pid });
                self.answer_waiting(pid);
            }
            News::StartFailed { error, .. } => {
                let report = report::cannot_start(&self.plan.program.to_string_lossy(), &error);
                self.journal.report(&report);
                self.child = None;
                self.refuse_waiting(&report.sentence);
                if self.generation == 1 {
                    // There is nobody to tell: the client's handshake is the server's affair here.
                    self.code = Some(report.code);
                } else {
                    self.ended(How::CouldNotStart(report::plain(&error.to_string())), 0);
                }
            }
            News::Exited { exit, .. } => {
                let exit = match exit {
                    os::Exit::Code(code) => exit::Exit::Code(code),
                    os::Exit::Signal(signal) => exit::Exit::Signal(signal),
                };
                self.live(life::Event::Exited(exit));
                // There is no pipe of ours that could hold last words back.
                self.live(life::Event::StdoutClosed);
            }
            News::Swept { .. } => self.live(life::Event::Swept),
            // Only of children with a terminal.
            News::Stopped { .. } => {}
            News::Noticed(sentence) => self.journal.note(&format!("WARNING: {sentence}")),
            News::KeeperLost => self.code = Some(report::FAILURE),
        }
    }

    fn live(&mut self, event: life::Event) {
        let Some((life, _)) = &mut self.child else { return };
        let key = u64::from(self.generation);
        for action in life.handle(event, Instant::now()) {
            match action {
                life::Action::Terminate => self.household.signal(key, os::Signal::Terminate),
                life::Action::Kill => self.household.signal(key, os::Signal::Kill),
                life::Action::Sweep => self.household.sweep(key),
                life::Action::Report(gone) => self.ended(gone.how, gone.pid.unwrap_or_default()),
                // The pipes are not ours.
                life::Action::CloseStdin | life::Action::DropStdout | life::Action::ReportStarted => {}
            }
        }
        if self.child.as_ref().is_some_and(|(life, _)| life.is_over()) {
            self.child = None;
        }
    }

    fn ended(&mut self, how: How, pid: u32) {
        let now = Instant::now();
        let cause = classify(&how, self.code.is_some() || self.replaced.is_some(), true);
        self.pid = None;
        self.last_exit = Some(how.to_string());
        let event = match cause {
            Cause::Asked | Cause::Clean => record::Event::ServerStopped,
            Cause::RestartRequested | Cause::Forgot => record::Event::ServerExiting,
            Cause::Crashed | Cause::NeverReady => record::Event::ServerCrashed,
        };
        let mut obituary =
            Record { pid: Some(pid), generation: Some(self.generation.into()), ..Record::new(event).ended(&how) };
        if self.code.is_none() {
            match self.restarts.child_ended(cause, how, now) {
                _ if self.replaced.is_some() => self.next = Some(now),
                Verdict::StartAt { at, delay, .. } => {
                    self.next = Some(at);
                    obituary.delay = Some(delay);
                }
                Verdict::Left => self.code = Some(0),
                Verdict::GiveUp { crashes, .. } => {
                    obituary.crashes = Some(crashes);
                    self.code = Some(report::FAILURE);
                }
            }
        }
        obituary.crashes = obituary.crashes.or_else(|| Some(self.restarts.crashes(now)));
        self.record(obituary);
    }
}
