//! Drives `outlast mcp --inherit`: the child gets outlast's own stdin and stdout, and nothing is read, replayed or
//! answered. When the next server starts is decided in `outlast_core::inherit`.
//!
//! It is for servers that need no handshake. A server on an SDK refuses every call after a restart, because the
//! client's handshake was with the server before it.

use std::{
    task::{Context, Poll},
    time::Instant,
};

use outlast_control::{
    Control,
    method::{Kind, Method, Restart},
    server::Asked,
    wire::Refusal,
};
use outlast_core::{
    exit::How,
    inherit::{Action, Event, Inherit},
    restarts::Policy,
};
use outlast_os::{self as os, ChildProcesses, Order, Stdio};
use serde_json::{Value, json};

use crate::{
    child::{ChildEvent, Children, timer::Timer},
    cli::report,
    relay::mcp::Plan,
    state::{home, journal::Journal},
    upgrade,
};

struct Driver {
    plan: Plan,
    inherit: Inherit,
    stops: os::Stops,
    journal: Journal,
    control: Control,
    /// By generation.
    children: Children,
    /// The exit code, once outlast ends.
    code: Option<u8>,
    timer: Timer,
}

/// Why there is no upgrade in place.
const NOT_WITH_INHERIT: &str = "the server has the client's own pipes (`--inherit`)";

/// Runs until the server exits on purpose or outlast is stopped, and returns the exit code.
pub(crate) async fn run(
    plan: Plan,
    policy: Policy,
    processes: ChildProcesses,
    stops: os::Stops,
    journal: Journal,
    control: Control,
) -> u8 {
    let inherit = Inherit::new(policy, home::random());
    let (children, timer) = (Children::new(processes), Timer::default());
    let mut driver = Driver { plan, inherit, stops, journal, control, children, code: None, timer };
    driver.start();
    let code = std::future::poll_fn(|cx| driver.poll(cx)).await;
    let line = driver.journal.end(code);
    driver.control.record(&line);
    driver.control.end();
    code
}

impl Driver {
    fn tell(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.inherit.handle(event, Instant::now(), &mut actions);
        for action in actions {
            match action {
                Action::Start => self.start(),
                Action::Stop => self.children.stop(self.inherit.generation().into(), How::Stopped, Instant::now()),
                Action::Record(record) => {
                    let line = self.journal.record(record);
                    self.control.record(&line);
                }
                Action::Answer { ticket, result } => {
                    let answer = result.map_err(|why| Refusal::new("restart_failed", why));
                    self.control.answer(ticket, &answer);
                }
                Action::End(code) => self.code = Some(code),
            }
        }
    }

    fn start(&mut self) {
        let generation = self.inherit.generation();
        let order = Order {
            program: self.plan.program.clone(),
            args: self.plan.args.clone(),
            cwd: self.plan.cwd.clone(),
            env: Vec::new(),
            tag: format!("{}.{generation}", self.plan.id),
            env_is_all: false,
            stdio: Stdio::Inherit,
            sandbox: self.plan.sandbox.clone(),
            live_until: None,
        };
        if let Err(error) = self.children.start(generation.into(), &order, self.plan.grace) {
            self.tell(Event::NotSpawned(report::plain(&error.to_string())));
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<u8> {
        loop {
            let mut moved = false;
            if self.stops.poll_upgrade(cx).is_ready() {
                self.journal.note(&format!("SIGUSR2 received: {}", upgrade::unsupported(NOT_WITH_INHERIT).message));
            }
            if let Poll::Ready(stop) = self.stops.poll_next(cx) {
                self.journal.note(&format!("{} received, stopping", stop.name));
                let again = self.inherit.is_stopping();
                self.tell(Event::StopAsked);
                if again {
                    self.children.kill_all(Instant::now());
                }
                moved = true;
            }
            moved |= self.children.poll_news(cx, Instant::now());
            while let Some(event) = self.children.next_event() {
                self.heard(event);
                moved = true;
            }
            if let Poll::Ready(asked) = self.control.poll(cx) {
                self.asked(asked);
                moved = true;
            }
            moved |= self.poll_time(cx);
            if let Some(code) = self.code {
                return Poll::Ready(code);
            }
            if !moved {
                return Poll::Pending;
            }
        }
    }

    fn asked(&mut self, Asked { ticket, method, params }: Asked) {
        let answer = match Method::read(Kind::Inherit, &method, &params) {
            Ok(Method::State) => Ok(self.state()),
            Ok(Method::Pid) => Ok(json!({"pid": self.inherit.status(Instant::now()).pid})),
            Ok(Method::Resume) if self.inherit.is_occupied() && !self.inherit.is_stopping() => {
                Ok(json!({"resumed": false, "state": self.inherit.status(Instant::now()).state}))
            }
            // Both are answered when they are done.
            Ok(Method::Resume) => {
                self.tell(Event::Forgiven);
                return self.restart(ticket, &Restart::default());
            }
            Ok(Method::Restart(restart)) => return self.restart(ticket, &restart),
            Ok(Method::Stop(stop)) => {
                let graceful = stop.is_graceful();
                self.journal.note(if graceful { "Stop requested" } else { "Stop at once requested" });
                self.tell(Event::StopAsked);
                if !graceful {
                    self.children.kill_all(Instant::now());
                }
                Ok(json!({"stopping": true}))
            }
            Ok(Method::Subscribe) => return self.control.subscribe(ticket),
            Ok(Method::Upgrade(_)) => Err(upgrade::unsupported(NOT_WITH_INHERIT)),
            Ok(method) => Err(Kind::Inherit.unknown(method.name())),
            Err(refusal) => Err(refusal),
        };
        self.control.answer(ticket, &answer);
    }

    fn restart(&mut self, ticket: u64, restart: &Restart) {
        self.tell(Event::RestartAsked { ticket, reason: restart.reason().to_owned() });
    }

    fn state(&self) -> Value {
        let mut state = self.inherit.status(Instant::now()).to_json();
        self.control.complete(&mut state);
        state
    }

    fn poll_time(&mut self, cx: &mut Context<'_>) -> bool {
        let deadline = [self.children.deadline(), self.inherit.deadline()].into_iter().flatten().min();
        if !self.timer.poll(deadline, Instant::now(), cx) {
            return false;
        }
        self.children.time_passed(Instant::now());
        self.tell(Event::TimePassed);
        true
    }

    fn heard(&mut self, event: ChildEvent) {
        match event {
            ChildEvent::Started { pid, .. } => self.tell(Event::Started { pid }),
            ChildEvent::StartFailed { error, .. } => {
                let report = report::cannot_start(&self.plan.program.to_string_lossy(), &error);
                self.journal.report(&report);
                let why = report::plain(&error.to_string());
                self.tell(Event::StartFailed { why, sentence: report.sentence, code: report.code });
            }
            ChildEvent::Gone { how, .. } => self.tell(Event::Ended { how }),
            ChildEvent::Cleared { .. } => self.tell(Event::Cleared),
            ChildEvent::Noticed(sentence) => self.journal.note(&format!("WARNING: {sentence}")),
            // Only a child with a terminal is suspended.
            ChildEvent::Suspended { .. } => {}
            // The streams of the server are not read here.
            ChildEvent::Said { .. } | ChildEvent::Logged { .. } => {}
        }
    }
}
