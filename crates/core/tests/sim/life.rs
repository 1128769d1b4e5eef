//! A process that obeys, ignores signals, closes pipes, forks and exits, around one `Life`.

use std::time::{Duration, Instant};

use outlast_core::exit::{Exit, How};
use outlast_core::life::{Action, EXIT_SHOWS, Event, Grace, KILL_SHOWS, Life};

use crate::{Dice, birth, ms};

#[test]
fn every_child_is_reported_once_and_none_is_left() {
    for seed in 0..3_000 {
        World::new(seed).run();
    }
}

/// Events in an impossible order do not break the machine: it reports once and signals no process that has exited.
#[test]
fn no_order_of_events_breaks_a_life() {
    for seed in 0..3_000 {
        let mut dice = Dice::new(seed);
        let mut life = Life::new(Grace::default());
        let mut now = birth();
        let (mut reports, mut exited) = (0, false);
        for step in 0..40 {
            now += ms(dice.pick(&[0, 0, 1, 20, 50, 500, 2_000]));
            let event = match step {
                36 => Event::Started { pid: 1 },
                37 => Event::Exited(Exit::Code(0)),
                38 => Event::StdoutClosed,
                39 => Event::Swept,
                _ => any_event(&mut dice),
            };
            let alive = !exited;
            exited |= matches!(event, Event::Exited(_));
            for action in life.handle(event.clone(), now) {
                match action {
                    Action::Report(_) => reports += 1,
                    Action::CloseStdin | Action::Terminate | Action::Kill => {
                        assert!(alive, "seed {seed}: {action:?} to the dead on {event:?}");
                    }
                    Action::Sweep => assert!(exited, "seed {seed}: swept the living on {event:?}"),
                    Action::DropStdout | Action::ReportStarted => {}
                }
            }
            assert!(reports <= 1, "seed {seed}: reported twice");
        }
        assert!(reports == 1 && life.is_over(), "seed {seed}: {reports} reports, {life:?}");
    }
}

fn any_event(dice: &mut Dice) -> Event {
    match dice.below(11) {
        10 => Event::Exiting,
        0 => Event::Started { pid: 1 },
        1 if dice.one_in(4) => Event::StartFailed("no".into()),
        2 if dice.one_in(4) => Event::Exited(Exit::Code(1)),
        3 => Event::StdoutClosed,
        4 => Event::StdinRefused,
        5 => Event::Swept,
        6 => Event::StopAsked(How::Stopped),
        7 => Event::StopAsked(How::LineTooLong),
        8 if dice.one_in(3) => Event::KillAsked,
        _ => Event::TimePassed,
    }
}

/// When the child is killed, if nothing else happened before.
const LAST_STOP: Duration = ms(10_000);
/// From a stop to the report, at most.
const STOP_MAX: Duration = ms(1_000 + 2_000 + KILL_SHOWS.as_millis() as u64 + 50);
/// From an exit or a hang-up to the report, at most.
const REPORT_MAX: Duration = ms(100);

struct World {
    seed: u64,
    dice: Dice,
    now: Instant,
    life: Life,
    /// Planned events, unless they have become impossible.
    plans: Vec<(Instant, Event)>,
    process: Process,
    /// Some process holds the writing end of stdout.
    stdout_held: bool,
    /// What the machine was told, and since when.
    hung_up: Option<Instant>,
    exited: Option<Instant>,
    stop_asked: Option<Instant>,
    stdout_done: bool,
    reported: Option<Instant>,
    swept: u32,
    closed_stdin: u32,
    is_exiting: bool,
}

#[derive(PartialEq)]
enum Process {
    NotYet,
    NeverWas,
    Runs,
    Gone,
}

impl World {
    fn new(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        let now = birth();
        let mut plans = vec![(now + LAST_STOP, Event::StopAsked(How::Stopped))];
        let up = now + ms(dice.below(300));
        let start = if dice.one_in(12) { Event::StartFailed("no".into()) } else { Event::Started { pid: 1 } };
        plans.push((up, start));
        for _ in 0..dice.below(4) {
            // Many of these fall on the same moments, where errors are likely.
            let at = up + ms(dice.pick(&[0, 1, 1_000, 1_001, 1_040, 1_050, 1_060, 2_000, 4_000, 4_040]));
            let event = match dice.below(6) {
                0 => Event::Exited(Exit::Code(dice.pick(&[0, 1, 42]))),
                1 => Event::StdoutClosed,
                2 => Event::StdinRefused,
                3 => Event::StopAsked(How::HandshakeLate(ms(30))),
                4 => Event::KillAsked,
                _ => Event::StopAsked(How::Stopped),
            };
            plans.push((at, event));
        }
        if dice.one_in(4) {
            plans.push((now, Event::StopAsked(How::Stopped)));
        }
        World {
            seed,
            dice,
            now,
            life: Life::new(Grace::default()),
            plans,
            process: Process::NotYet,
            stdout_held: true,
            hung_up: None,
            exited: None,
            stop_asked: None,
            stdout_done: false,
            reported: None,
            swept: 0,
            closed_stdin: 0,
            is_exiting: false,
        }
    }

    fn run(mut self) {
        while let Some(event) = self.next() {
            self.happen(event);
            self.check_time();
        }
        let seed = self.seed;
        assert!(self.life.is_over(), "seed {seed}: not over: {:?}", self.life);
        assert!(self.reported.is_some(), "seed {seed}: never reported");
        assert!(matches!(self.process, Process::Gone | Process::NeverWas), "seed {seed}: left running");
        assert_eq!(self.swept, u32::from(self.process == Process::Gone), "seed {seed}: swept once if it ever was");
        assert!(self.closed_stdin <= 1, "seed {seed}: stdin closed twice");
    }

    /// The next possible event, with time moved on to it.
    fn next(&mut self) -> Option<Event> {
        loop {
            let index = (0..self.plans.len()).min_by_key(|&index| self.plans[index].0);
            let planned = index.map(|index| self.plans[index].0);
            let deadline = self.life.deadline();
            if deadline.is_some_and(|deadline| planned.is_none_or(|planned| deadline < planned)) {
                self.now = self.now.max(deadline?);
                let is_exiting = self.process == Process::Runs && self.dice.one_in(2);
                return Some(self.life.due(|_| is_exiting));
            }
            let (at, event) = self.plans.swap_remove(index?);
            self.now = self.now.max(at);
            let runs = self.process == Process::Runs;
            let possible = match event {
                Event::Exited(_) | Event::StdinRefused => runs,
                Event::StdoutClosed => self.stdout_held && self.process != Process::NotYet && !self.stdout_done,
                _ => true,
            };
            if possible {
                return Some(event);
            }
        }
    }

    fn happen(&mut self, event: Event) {
        let seed = self.seed;
        match &event {
            Event::Started { .. } => self.process = Process::Runs,
            Event::StartFailed(_) => self.process = Process::NeverWas,
            Event::Exited(_) => {
                self.process = Process::Gone;
                self.exited = Some(self.now);
                // Otherwise a grandchild holds the pipe until it is swept.
                if self.dice.one_in(2) {
                    let lag = self.dice.below(80);
                    self.plan(lag, Event::StdoutClosed);
                }
            }
            Event::StdoutClosed => {
                self.stdout_held = false;
                self.stdout_done = true;
                self.hung_up.get_or_insert(self.now);
            }
            Event::StdinRefused => {
                self.hung_up.get_or_insert(self.now);
            }
            Event::StopAsked(_) | Event::KillAsked | Event::LeaseEnded => {
                self.stop_asked.get_or_insert(self.now);
            }
            Event::Exiting => {
                self.is_exiting = true;
                // Sometimes the kernel takes longer than the driver waits.
                let lag = self.dice.below(1_100);
                self.plan(lag, Event::Exited(Exit::Code(42)));
            }
            Event::Swept | Event::TimePassed => {}
        }
        let early = event == Event::TimePassed && self.life.deadline().is_none_or(|deadline| self.now < deadline);
        let actions = self.life.handle(event.clone(), self.now);
        assert!(!early || actions.is_empty(), "seed {seed}: acted before its time: {actions:?}");
        for action in actions {
            self.act(action);
        }
        if matches!(event, Event::TimePassed | Event::Exiting) {
            let deadline = self.life.deadline();
            assert!(deadline.is_none_or(|deadline| deadline > self.now), "seed {seed}: a deadline that does not move");
        } else if self.dice.one_in(3) {
            // The driver may be early or late: an extra call changes nothing.
            if self.life.deadline().is_none_or(|deadline| self.now < deadline) {
                assert_eq!(self.life.handle(Event::TimePassed, self.now), [], "seed {seed}");
            }
        }
    }

    fn act(&mut self, action: Action) {
        let seed = self.seed;
        match action {
            Action::CloseStdin | Action::Terminate | Action::Kill => {
                assert!(self.process == Process::Runs, "seed {seed}: {action:?} without a process");
                self.closed_stdin += u32::from(action == Action::CloseStdin);
                if action == Action::Kill {
                    // Sometimes the kernel is slow.
                    let lag = if self.dice.one_in(20) { 5_000 } else { self.dice.below(20) };
                    self.plan(lag, Event::Exited(Exit::Signal(9)));
                } else if self.dice.one_in(3) {
                    let lag = self.dice.pick(&[0, 1, 30, 900, 1_000, 1_500, 2_000]);
                    self.plan(lag, Event::Exited(Exit::Code(0)));
                }
            }
            Action::Sweep => {
                assert!(self.process == Process::Gone, "seed {seed}: swept under a running process");
                self.swept += 1;
                let lag = self.dice.below(200);
                self.plan(lag, Event::Swept);
            }
            Action::DropStdout => {
                assert!(!self.stdout_done, "seed {seed}: dropped what was done");
                self.stdout_done = true;
            }
            Action::ReportStarted => assert!(self.process == Process::Runs, "seed {seed}"),
            Action::Report(gone) => {
                assert!(self.reported.is_none(), "seed {seed}: reported twice");
                assert_eq!(gone.pid.is_some(), self.process != Process::NeverWas, "seed {seed}");
                assert!(self.stdout_done || gone.pid.is_none(), "seed {seed}: reported with output unread");
                assert!(!gone.asked || self.stop_asked.is_some(), "seed {seed}: no stop was asked for");
                self.reported = Some(self.now);
            }
        }
    }

    fn plan(&mut self, lag: u64, event: Event) {
        self.plans.push((self.now + ms(lag), event));
    }

    /// The report is never later than promised.
    fn check_time(&self) {
        if self.reported.is_some() || matches!(self.process, Process::NotYet | Process::NeverWas) {
            return;
        }
        let seed = self.seed;
        let since = |then: Option<Instant>| then.map_or(Duration::ZERO, |then| self.now - then);
        assert!(since(self.exited) <= REPORT_MAX, "seed {seed}: late after the exit");
        // The wait for a start is not limited by the machine: it may add up to 300 ms here.
        assert!(since(self.stop_asked) <= STOP_MAX + ms(300), "seed {seed}: late after the stop");
        if self.stop_asked.is_none() {
            let most = REPORT_MAX + if self.is_exiting { EXIT_SHOWS } else { Duration::ZERO };
            assert!(since(self.hung_up) <= most, "seed {seed}: late after the hang-up");
        }
    }
}
