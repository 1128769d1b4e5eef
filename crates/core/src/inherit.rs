//! The policy of `outlast mcp --inherit`: one server after the other on the same streams, restarted as the policy says.
//! Nothing that the server or its client says is known here; processes and streams belong to the driver.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::{
    exit::{Cause, How, classify},
    reason::one_line,
    record::{Event as RecordEvent, Record, millis},
    restarts::{Past, Policy, Verdict},
    slot::{self, Slot, Until},
};

/// The exit code of outlast when it gives the server up.
const FAILURE: u8 = 1;

/// What happened.
#[derive(Debug)]
pub enum Event {
    Started {
        pid: u32,
    },
    /// The process could not be asked for.
    NotSpawned(String),
    /// No process came to be. `code` is what outlast exits with if it was the first one.
    StartFailed {
        why: String,
        sentence: String,
        code: u8,
    },
    /// The server is gone.
    Ended {
        how: How,
    },
    /// Everything that belonged to the server is reaped: the next one can have the streams.
    Cleared,
    RestartAsked {
        ticket: u64,
        reason: String,
    },
    /// An operator resets the crash count.
    Forgiven,
    /// Outlast is to end.
    StopAsked,
    TimePassed,
}

/// What is to be done.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// Start the next server; it gets the next generation.
    Start,
    Stop,
    Record(Record),
    Answer {
        ticket: u64,
        result: Result<Value, String>,
    },
    End(u8),
}

/// A restart that was asked for and is not over.
#[derive(Debug)]
struct Restart {
    tickets: Vec<u64>,
    /// The generation that was there when it was asked for. A later one answers it.
    replaces: u32,
    old_pid: Option<u32>,
    since: Instant,
}

/// What outlast does about the end of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plan {
    Stay,
    /// It ends with this code as soon as no process is left.
    End(u8),
}

#[derive(Debug)]
pub struct Inherit {
    /// Its server is known by its process id.
    slot: Slot<u32>,
    /// Of the last start, whether or not it came to a process.
    generation: u32,
    /// Something of the last server is left.
    is_occupied: bool,
    last_exit: Option<How>,
    restart: Option<Restart>,
    plan: Plan,
    is_over: bool,
}

/// How the server does.
#[derive(Debug, Clone)]
pub struct Status {
    pub state: &'static str,
    pub pid: Option<u32>,
    pub generation: u32,
    pub uptime: Option<Duration>,
    pub crashes: u32,
    pub next_try: Option<Duration>,
    pub last_exit: Option<String>,
    pub last_exits: Vec<Past>,
    /// The moment that the ages are counted to.
    pub now: Instant,
}

impl Inherit {
    /// The driver has asked for the first server already: it is generation 1.
    pub fn new(policy: Policy, seed: u64) -> Inherit {
        Inherit {
            slot: Slot::new(policy, seed),
            generation: 1,
            is_occupied: true,
            last_exit: None,
            restart: None,
            plan: Plan::Stay,
            is_over: false,
        }
    }

    pub fn handle(&mut self, event: Event, now: Instant, actions: &mut Vec<Action>) {
        match event {
            Event::Started { pid } => self.started(pid, now, actions),
            Event::NotSpawned(why) => {
                self.is_occupied = false;
                self.start_failed(How::CouldNotStart(why), now, actions);
            }
            Event::StartFailed { why, sentence, code } => {
                self.is_occupied = false;
                self.refuse(&sentence, actions);
                if self.generation == 1 {
                    // The client's handshake is with the server alone: outlast cannot answer it instead.
                    self.plan = Plan::End(code);
                } else {
                    self.start_failed(How::CouldNotStart(why), now, actions);
                }
            }
            Event::Ended { how } => self.ended(how, now, actions),
            Event::Cleared => self.is_occupied = false,
            Event::RestartAsked { ticket, reason } => self.restart_asked(ticket, &reason, now, actions),
            Event::Forgiven => self.slot.forgive(),
            Event::StopAsked => {
                self.plan = Plan::End(0);
                self.stop(actions);
            }
            Event::TimePassed => {}
        }
        self.settle(now, actions);
    }

    /// When `TimePassed` is due: the first timer.
    pub fn deadline(&self) -> Option<Instant> {
        self.slot.due().filter(|_| !self.is_occupied && self.plan == Plan::Stay)
    }

    /// Of the last start.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Outlast was asked to end, or has to.
    pub fn is_stopping(&self) -> bool {
        self.plan != Plan::Stay
    }

    /// A server runs, or something of it is left.
    pub fn is_occupied(&self) -> bool {
        self.is_occupied
    }

    /// The next server starts when it is due and the streams are free; outlast ends when it has to and they are.
    fn settle(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.is_occupied || self.is_over {
            return;
        }
        match self.plan {
            Plan::End(code) => {
                self.is_over = true;
                self.refuse("outlast is stopping", actions);
                actions.push(Action::End(code));
            }
            Plan::Stay => {
                if self.deadline().is_some_and(|at| at <= now) {
                    self.generation += 1;
                    self.is_occupied = true;
                    actions.push(Action::Start);
                }
            }
        }
    }

    fn started(&mut self, pid: u32, now: Instant, actions: &mut Vec<Action>) {
        // Nothing is read, so a server that runs counts as ready.
        self.slot.fill(pid, now);
        self.slot.serve(pid, now);
        let generation = self.generation;
        actions.push(Action::Record(Record {
            pid: Some(pid),
            generation: Some(generation.into()),
            restarts: Some(generation - 1),
            ..Record::new(RecordEvent::ServerStarted)
        }));
        let Some(restart) = self.restart.take_if(|restart| restart.replaces < generation) else { return };
        let report = json!({
            "old_pid": restart.old_pid,
            "new_pid": pid,
            "generation": generation,
            "took_ms": millis(now.duration_since(restart.since)),
            "tools": {"compared": false},
        });
        actions.extend(restart.tickets.into_iter().map(|ticket| Action::Answer { ticket, result: Ok(report.clone()) }));
    }

    fn start_failed(&mut self, how: How, now: Instant, actions: &mut Vec<Action>) {
        if !self.is_stopping() {
            self.end(Cause::NeverReady, how, Record::new(RecordEvent::ServerCrashed), now, actions);
        }
    }

    fn ended(&mut self, how: How, now: Instant, actions: &mut Vec<Action>) {
        let Some(pid) = self.slot.child() else { return };
        let record = Record {
            pid: Some(pid),
            restarts: Some(self.slot.restarts().restarts()),
            uptime: self.uptime(now),
            crashes: Some(self.slot.restarts().crashes(now)),
            ..Record::new(RecordEvent::ServerStopped)
        };
        if self.is_stopping() {
            self.slot.rest();
            actions.push(Action::Record(Record { generation: Some(self.generation.into()), ..record.ended(&how) }));
            self.last_exit = Some(how);
            return;
        }
        let cause = classify(&how, self.restart.is_some(), true);
        self.end(cause, how, Record { event: slot::event_of(cause), ..record }, now, actions);
    }

    /// Carries out the policy's verdict on an end. A restart that was asked for needs none.
    fn end(&mut self, cause: Cause, how: How, record: Record, now: Instant, actions: &mut Vec<Action>) {
        let record = Record { generation: Some(self.generation.into()), ..record };
        let (verdict, record) = self.slot.end(cause, &how, record, now);
        self.last_exit = Some(how);
        // The record of the end says it all here: outlast itself ends when it gives up.
        actions.push(Action::Record(record));
        self.slot.follow(&verdict, Until::Asked);
        match verdict {
            _ if self.restart.is_some() => self.slot.go_down(now),
            Verdict::StartAt { .. } => {}
            Verdict::Left => self.plan = Plan::End(0),
            Verdict::GiveUp { .. } => self.plan = Plan::End(FAILURE),
        }
    }

    /// One after the other: the streams are the same, so two servers cannot have them.
    fn restart_asked(&mut self, ticket: u64, reason: &str, now: Instant, actions: &mut Vec<Action>) {
        if self.is_stopping() {
            let result = Err("outlast is stopping".to_owned());
            return actions.push(Action::Answer { ticket, result });
        }
        let pid = self.slot.child();
        actions.push(Action::Record(Record {
            pid,
            reason: Some(one_line(reason)),
            detail: Some("control".into()),
            ..Record::new(RecordEvent::ServerRestartRequested)
        }));
        let restart = Restart { tickets: Vec::new(), replaces: self.generation, old_pid: pid, since: now };
        self.restart.get_or_insert(restart).tickets.push(ticket);
        self.stop(actions);
        if self.slot.due().is_some() {
            self.slot.go_down(now);
        }
    }

    fn stop(&self, actions: &mut Vec<Action>) {
        if self.is_occupied {
            actions.push(Action::Stop);
        }
    }

    fn refuse(&mut self, why: &str, actions: &mut Vec<Action>) {
        for ticket in self.restart.take().map(|restart| restart.tickets).unwrap_or_default() {
            actions.push(Action::Answer { ticket, result: Err(why.to_owned()) });
        }
    }

    fn uptime(&self, now: Instant) -> Option<Duration> {
        self.slot.since().map(|since| now.saturating_duration_since(since))
    }

    pub fn status(&self, now: Instant) -> Status {
        let pid = self.slot.child();
        Status {
            state: match pid {
                _ if !self.is_occupied => "backoff",
                _ if self.is_stopping() => "stopping",
                Some(_) if self.restart.is_some() => "reloading",
                Some(_) => "ready",
                None => "starting",
            },
            pid,
            generation: self.generation,
            uptime: self.uptime(now),
            crashes: self.slot.restarts().crashes(now),
            next_try: self.slot.due().map(|at| at.saturating_duration_since(now)),
            last_exit: self.last_exit.as_ref().map(How::to_string),
            last_exits: self.slot.restarts().recent().cloned().collect(),
            now,
        }
    }
}

impl Status {
    pub fn to_json(&self) -> Value {
        json!({
            "state": self.state,
            "pid": self.pid,
            "generation": self.generation,
            "uptime_s": self.uptime.map(|uptime| uptime.as_secs_f64()),
            "restarts": self.generation.saturating_sub(1),
            "crashes": self.crashes,
            "next_try_s": self.next_try.map(|delay| delay.as_secs_f64()),
            "last_exit": self.last_exit,
            "last_exits": self.last_exits.iter().map(|past| past.to_json(self.now)).collect::<Vec<Value>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Exit;

    struct Story {
        inherit: Inherit,
        now: Instant,
    }

    impl Story {
        #[expect(clippy::disallowed_methods, reason = "a test needs some instant to count from")]
        fn begin() -> Story {
            Story { inherit: Inherit::new(Policy::watchdog(), 1), now: Instant::now() }
        }

        /// What is done about an event, in short.
        fn tell(&mut self, event: Event) -> Vec<String> {
            let mut actions = Vec::new();
            self.inherit.handle(event, self.now, &mut actions);
            let short = |action| match action {
                Action::Start => "start".to_owned(),
                Action::Stop => "stop".to_owned(),
                Action::Record(record) => record.event.name().to_owned(),
                Action::Answer { ticket, result: Ok(report) } => format!("{ticket}: {}", report["new_pid"]),
                Action::Answer { ticket, result: Err(why) } => format!("{ticket}: {why}"),
                Action::End(code) => format!("end {code}"),
            };
            actions.into_iter().map(short).collect()
        }

        fn passes(&mut self, ms: u64) -> Vec<String> {
            self.now += Duration::from_millis(ms);
            self.tell(Event::TimePassed)
        }

        fn exits(&mut self, code: i32) -> Vec<String> {
            self.tell(Event::Ended { how: How::Exited(Exit::Code(code)) })
        }
    }

    #[test]
    fn a_server_that_crashes_is_started_again_when_its_streams_are_free() {
        let mut story = Story::begin();
        assert_eq!(story.tell(Event::Started { pid: 7 }), ["server_started"]);
        assert_eq!(story.exits(1), ["server_crashed"]);
        assert!(story.passes(5_000).is_empty(), "something of the old server is left");
        assert_eq!(story.tell(Event::Cleared), ["start"]);
        assert_eq!((story.inherit.generation(), story.inherit.deadline()), (2, None));
    }

    #[test]
    fn a_restart_waits_for_its_delay() {
        let mut story = Story::begin();
        story.tell(Event::Started { pid: 7 });
        story.exits(1);
        assert!(story.tell(Event::Cleared).is_empty());
        assert_eq!(story.inherit.deadline(), Some(story.now + Duration::from_secs(1)));
        assert_eq!(story.inherit.status(story.now).state, "backoff");
        assert!(story.passes(999).is_empty());
        assert_eq!(story.passes(1), ["start"]);
    }

    #[test]
    fn a_clean_exit_ends_outlast() {
        let mut story = Story::begin();
        story.tell(Event::Started { pid: 7 });
        assert_eq!(story.exits(0), ["server_stopped"]);
        assert_eq!(story.tell(Event::Cleared), ["end 0"]);
    }

    #[test]
    fn a_restart_stops_the_server_and_is_answered_by_the_next_one() {
        let mut story = Story::begin();
        story.tell(Event::Started { pid: 7 });
        let asked = |ticket| Event::RestartAsked { ticket, reason: "new code".into() };
        assert_eq!(story.tell(asked(1)), ["server_restart_requested", "stop"]);
        assert_eq!(story.tell(asked(2)), ["server_restart_requested", "stop"]);
        assert_eq!(story.inherit.status(story.now).state, "reloading");
        assert_eq!(story.exits(143), ["server_stopped"]);
        assert_eq!(story.tell(Event::Cleared), ["start"]);
        assert_eq!(story.tell(Event::Started { pid: 8 }), ["server_started", "1: 8", "2: 8"]);
        assert_eq!(story.inherit.status(story.now).crashes, 0, "a restart that was asked for is no crash");
    }

    #[test]
    fn a_restart_that_is_requested_during_a_start_is_answered_by_the_next_server() {
        let mut story = Story::begin();
        let asked = Event::RestartAsked { ticket: 1, reason: "new code".into() };
        assert_eq!(story.tell(asked), ["server_restart_requested", "stop"]);
        assert_eq!(story.tell(Event::Started { pid: 7 }), ["server_started"]);
        assert_eq!(story.exits(0), ["server_stopped"], "it was stopped, and did not leave on purpose");
        assert_eq!(story.tell(Event::Cleared), ["start"]);
        assert_eq!(story.tell(Event::Started { pid: 8 }), ["server_started", "1: 8"]);
    }

    #[test]
    fn a_restart_does_not_wait_for_the_delay() {
        let mut story = Story::begin();
        story.tell(Event::Started { pid: 7 });
        story.exits(1);
        story.tell(Event::Cleared);
        let asked = Event::RestartAsked { ticket: 1, reason: "now".into() };
        assert_eq!(story.tell(asked), ["server_restart_requested", "start"]);
    }

    #[test]
    fn the_first_start_that_fails_ends_outlast_and_a_later_one_is_tried_again() {
        let failed = |code| Event::StartFailed { why: "not found".into(), sentence: "cannot start".into(), code };
        let mut story = Story::begin();
        assert_eq!(story.tell(failed(127)), ["end 127"]);

        let mut story = Story::begin();
        story.tell(Event::Started { pid: 7 });
        story.tell(Event::RestartAsked { ticket: 1, reason: "new code".into() });
        story.exits(0);
        assert_eq!(story.tell(Event::Cleared), ["start"]);
        assert_eq!(story.tell(failed(127)), ["1: cannot start", "server_crashed"]);
        assert_eq!(story.passes(60_000), ["start"]);
    }

    #[test]
    fn a_stop_ends_outlast_when_nothing_is_left() {
        let mut story = Story::begin();
        story.tell(Event::Started { pid: 7 });
        assert_eq!(story.tell(Event::StopAsked), ["stop"]);
        let asked = Event::RestartAsked { ticket: 1, reason: "too late".into() };
        assert_eq!(story.tell(asked), ["1: outlast is stopping"]);
        assert_eq!(story.exits(0), ["server_stopped"]);
        assert_eq!(story.tell(Event::Cleared), ["end 0"]);
        assert!(story.passes(60_000).is_empty());
    }
}
