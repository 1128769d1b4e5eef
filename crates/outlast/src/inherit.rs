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
    record::{self, Record},
    restarts::{Policy, Restarts, Verdict},
};
use tokio::time::{Sleep, sleep_until};

use crate::{
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
    generation: u32,
    child: Option<(Life, Instant)>,
    next: Option<Instant>,
    /// We were asked to leave, or the child left on purpose.
    code: Option<u8>,
    timer: Option<(Instant, Pin<Box<Sleep>>)>,
}

/// Runs until the server leaves on purpose or somebody stops us; the exit code.
pub async fn run(plan: Plan, policy: Policy, household: Household, stops: os::Stops, journal: Journal) -> u8 {
    let mut inherit = Inherit {
        plan,
        restarts: Restarts::new(policy, home::random()),
        household,
        stops,
        journal,
        generation: 0,
        child: None,
        next: None,
        code: None,
        timer: None,
    };
    inherit.start();
    let code = std::future::poll_fn(|cx| inherit.poll(cx)).await;
    inherit.journal.end(code);
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
            stdio: Stdio::Inherit,
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
                self.restarts.child_started(Instant::now());
                // Nothing is read, so there is no better sign of readiness than to be running.
                self.restarts.child_ready(Instant::now());
                self.journal.record(Record {
                    pid: Some(pid),
                    generation: Some(self.generation.into()),
                    restarts: Some(self.generation - 1),
                    ..Record::new(record::Event::ServerStarted)
                });
                self.live(life::Event::Started { pid });
            }
            News::StartFailed { error, .. } => {
                let report = report::cannot_start(&self.plan.program.to_string_lossy(), &error);
                self.journal.say(report.to_string().trim_end());
                self.child = None;
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
        let cause = classify(&how, self.code.is_some(), true);
        let event = match cause {
            Cause::Asked | Cause::Clean => record::Event::ServerStopped,
            Cause::RestartRequested => record::Event::ServerExiting,
            Cause::Crashed | Cause::NeverReady => record::Event::ServerCrashed,
        };
        let mut obituary =
            Record { pid: Some(pid), generation: Some(self.generation.into()), ..Record::new(event).ended(&how) };
        if self.code.is_none() {
            match self.restarts.child_ended(cause, how, now) {
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
        self.journal.record(obituary);
    }
}
