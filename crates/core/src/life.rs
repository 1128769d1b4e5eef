//! One child process, from the request to start it until it is reaped and no process of its group is left.
//!
//! The end is *reported* once, when no more output of the child can follow: its stdout was read to the end, or
//! dropped. The machine may continue after that: a child that closed a pipe and still runs is reported gone and then
//! stopped.

use std::time::{Duration, Instant};

use crate::exit::{Exit, How};

/// How long an exit after SIGKILL may take. If the kernel takes longer, the process is reported gone anyway, so that
/// no request waits for it; it is still reaped when it exits.
pub const KILL_SHOWS: Duration = Duration::from_millis(500);

/// How long the exit of a process that has begun to exit may take. On a busy machine its pipes may close long before
/// it.
pub const EXIT_SHOWS: Duration = Duration::from_secs(1);

/// How long each step of a stop may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grace {
    /// From closing stdin to SIGTERM.
    pub after_stdin: Duration,
    /// From SIGTERM to SIGKILL.
    pub after_term: Duration,
    /// From the end of a pipe to the exit of the process, and the other way round.
    pub settle: Duration,
}

impl Default for Grace {
    fn default() -> Grace {
        Grace {
            after_stdin: Duration::from_secs(1),
            after_term: Duration::from_secs(2),
            settle: Duration::from_millis(50),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Started {
        pid: u32,
    },
    StartFailed(String),
    /// Reaped.
    Exited(Exit),
    /// All output of the child was read.
    StdoutClosed,
    /// A write to the child's stdin failed for good.
    StdinRefused,
    /// No process of the child's group is left.
    Swept,
    /// `How::Stopped` for a requested stop; otherwise what the child did wrong.
    StopAsked(How),
    /// A stop without any further wait.
    KillAsked,
    /// Its lease ended: its monitor kills it, and the exit follows. A reason to stop it that was there before stays the
    /// reason.
    LeaseEnded,
    /// The system reports that the process is about to exit.
    Exiting,
    TimePassed,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    CloseStdin,
    /// SIGTERM to the group.
    Terminate,
    /// SIGKILL to the group.
    Kill,
    /// Kill the remaining processes of the group and those that left it, then report `Swept`.
    Sweep,
    /// Stop reading the child's output.
    DropStdout,
    ReportStarted,
    Report(Gone),
}

/// The end of a child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gone {
    pub how: How,
    pub asked: bool,
    /// None if no process was created.
    pub pid: Option<u32>,
}

#[derive(Clone, Debug)]
pub struct Life {
    grace: Grace,
    pid: Option<u32>,
    /// Pipes can end at any time, in any state of the process.
    stdout: Stdout,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stdout {
    Open,
    /// Read to the end, or dropped.
    Done,
}

#[derive(Clone, Debug)]
enum State {
    /// `stop` is carried out as soon as the process exists.
    Starting {
        stop: Option<Stop>,
    },
    Up,
    /// A pipe ended; if the process exits, its exit follows soon.
    Parting {
        how: How,
        until: Instant,
        /// The process is exiting: the deadline was extended, once.
        is_exiting: bool,
    },
    Stopping {
        stage: Stage,
        report: Report,
    },
    /// The exit is known; earlier output is still to be read.
    Ending {
        how: How,
        asked: bool,
        until: Instant,
    },
    /// Reported and reaped; the processes that it left are being killed.
    Sweeping,
    Ended,
}

#[derive(Clone, Debug)]
enum Stop {
    Politely(How),
    AtOnce(How),
}

#[derive(Clone, Debug)]
enum Stage {
    StdinClosed { until: Instant },
    Terminated { until: Instant },
    Killed { until: Option<Instant> },
}

#[derive(Clone, Debug)]
enum Report {
    /// Reported at the exit, with the reason for the stop.
    Due(How),
    Made,
}

impl Life {
    /// The driver starts the process, and reports `Started` or `StartFailed`.
    pub fn new(grace: Grace) -> Life {
        Life { grace, pid: None, stdout: Stdout::Open, state: State::Starting { stop: None } }
    }

    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Started { pid } => self.started(pid, now, &mut actions),
            Event::StartFailed(why) => self.start_failed(why, &mut actions),
            Event::Exited(exit) => self.exited(exit, now, &mut actions),
            Event::StdoutClosed => self.stdout_closed(now, &mut actions),
            Event::StdinRefused => self.part(How::ClosedStdin, now),
            Event::Swept => self.swept(),
            Event::StopAsked(why) => self.stop_asked(why, now, &mut actions),
            Event::KillAsked => self.kill_asked(now, &mut actions),
            Event::LeaseEnded => self.lease_ended(now, &mut actions),
            Event::Exiting => self.exiting(now),
            Event::TimePassed => self.time_passed(now, &mut actions),
        }
        actions
    }

    /// The event for a deadline that was reached. For a process that closed a pipe, `is_exiting` is asked first: if
    /// it is about to exit, the machine waits for the exit status.
    pub fn due(&self, is_exiting: impl FnOnce(u32) -> bool) -> Event {
        match (&self.state, self.pid) {
            (State::Parting { is_exiting: false, .. }, Some(pid)) if is_exiting(pid) => Event::Exiting,
            _ => Event::TimePassed,
        }
    }

    /// When to handle the event of `due`.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Parting { until, .. } | State::Ending { until, .. } => Some(*until),
            State::Stopping { stage, .. } => match stage {
                Stage::StdinClosed { until } | Stage::Terminated { until } => Some(*until),
                Stage::Killed { until } => *until,
            },
            State::Starting { .. } | State::Up | State::Sweeping | State::Ended => None,
        }
    }

    /// A child that runs and is not being stopped, as another program left it.
    pub fn running(grace: Grace, pid: u32) -> Life {
        Life { grace, pid: Some(pid), stdout: Stdout::Open, state: State::Up }
    }

    /// It runs, all its pipes are open, and it is not being stopped.
    pub fn is_running(&self) -> bool {
        matches!(self.state, State::Up) && self.stdout == Stdout::Open
    }

    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Reported, reaped and swept: there is nothing left to drive.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    fn started(&mut self, pid: u32, now: Instant, actions: &mut Vec<Action>) {
        let State::Starting { stop } = &mut self.state else { return };
        let stop = stop.take();
        self.pid = Some(pid);
        self.state = State::Up;
        actions.push(Action::ReportStarted);
        match stop {
            Some(Stop::Politely(why)) => self.stop_asked(why, now, actions),
            Some(Stop::AtOnce(why)) => self.kill(Report::Due(why), now, actions),
            None if self.stdout == Stdout::Done => self.part(How::ClosedStdout, now),
            None => {}
        }
    }

    fn start_failed(&mut self, why: String, actions: &mut Vec<Action>) {
        let State::Starting { stop } = &self.state else { return };
        let asked = matches!(stop, Some(Stop::Politely(How::Stopped) | Stop::AtOnce(How::Stopped)));
        self.state = State::Ended;
        actions.push(Action::Report(Gone { how: How::CouldNotStart(why), asked, pid: None }));
    }

    fn exited(&mut self, exit: Exit, now: Instant, actions: &mut Vec<Action>) {
        let exited = How::Exited(exit);
        let (how, asked) = match &self.state {
            State::Starting { stop: None } | State::Up | State::Parting { .. } => (exited, false),
            State::Starting { stop: Some(Stop::Politely(why) | Stop::AtOnce(why)) }
            | State::Stopping { report: Report::Due(why), .. } => match why {
                How::Stopped => (exited, true),
                // outlast ended it for this reason; the exit status would describe the kill and not the child.
                why => (why.clone(), false),
            },
            State::Stopping { report: Report::Made, .. } => {
                self.state = State::Sweeping;
                actions.push(Action::Sweep);
                return;
            }
            State::Ending { .. } | State::Sweeping | State::Ended => return,
        };
        self.state = State::Ending { how, asked, until: now + self.grace.settle };
        if self.stdout == Stdout::Done {
            self.end(actions);
        }
    }

    fn stdout_closed(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.stdout = Stdout::Done;
        self.part(How::ClosedStdout, now);
        self.end(actions);
    }

    /// A pipe ended although the child still needed it.
    fn part(&mut self, how: How, now: Instant) {
        if let State::Up = self.state {
            self.state = State::Parting { how, until: now + self.grace.settle, is_exiting: false };
        }
    }

    fn exiting(&mut self, now: Instant) {
        if let State::Parting { until, is_exiting: is_exiting @ false, .. } = &mut self.state {
            *until = now + EXIT_SHOWS;
            *is_exiting = true;
        }
    }

    /// If the exit is known: stops reading and reports the end.
    fn end(&mut self, actions: &mut Vec<Action>) {
        let State::Ending { how, asked, .. } = &self.state else { return };
        let gone = Gone { how: how.clone(), asked: *asked, pid: self.pid };
        self.state = State::Sweeping;
        actions.push(Action::Sweep);
        self.drop_stdout(actions);
        actions.push(Action::Report(gone));
    }

    fn swept(&mut self) {
        if let State::Sweeping = self.state {
            self.state = State::Ended;
        }
    }

    fn stop_asked(&mut self, why: How, now: Instant, actions: &mut Vec<Action>) {
        match &mut self.state {
            State::Starting { stop } => {
                stop.get_or_insert(Stop::Politely(why));
            }
            State::Up | State::Parting { .. } if why == How::Stopped => {
                let stage = Stage::StdinClosed { until: now + self.grace.after_stdin };
                self.state = State::Stopping { stage, report: Report::Due(why) };
                actions.push(Action::CloseStdin);
            }
            // A child that did something wrong gets less time than one that only has to stop.
            State::Up | State::Parting { .. } => {
                actions.push(Action::CloseStdin);
                self.terminate(Report::Due(why), now, actions);
            }
            State::Stopping { .. } | State::Ending { .. } | State::Sweeping | State::Ended => {}
        }
    }

    fn kill_asked(&mut self, now: Instant, actions: &mut Vec<Action>) {
        match &mut self.state {
            State::Starting { stop } => {
                let why = match stop.take() {
                    Some(Stop::Politely(why) | Stop::AtOnce(why)) => why,
                    None => How::Stopped,
                };
                *stop = Some(Stop::AtOnce(why));
            }
            State::Up | State::Parting { .. } => self.kill(Report::Due(How::Stopped), now, actions),
            State::Stopping { stage: Stage::Killed { .. }, .. } => {}
            State::Stopping { report, .. } => {
                let report = report.clone();
                self.kill(report, now, actions);
            }
            State::Ending { .. } => self.end(actions),
            State::Sweeping | State::Ended => {}
        }
    }

    fn lease_ended(&mut self, now: Instant, actions: &mut Vec<Action>) {
        match &self.state {
            State::Starting { stop: None } => {
                self.state = State::Starting { stop: Some(Stop::AtOnce(How::LeaseEnded)) };
            }
            State::Up | State::Parting { .. } => self.kill(Report::Due(How::LeaseEnded), now, actions),
            _ => self.kill_asked(now, actions),
        }
    }

    fn time_passed(&mut self, now: Instant, actions: &mut Vec<Action>) {
        // With a grace of zero the next step is due at once.
        while self.deadline().is_some_and(|deadline| deadline <= now) {
            self.step(now, actions);
        }
    }

    /// The current deadline was reached.
    fn step(&mut self, now: Instant, actions: &mut Vec<Action>) {
        match &self.state {
            State::Parting { how, .. } => {
                let gone = Gone { how: how.clone(), asked: false, pid: self.pid };
                actions.push(Action::CloseStdin);
                self.terminate(Report::Made, now, actions);
                self.drop_stdout(actions);
                actions.push(Action::Report(gone));
            }
            State::Stopping { stage, report } => {
                let report = report.clone();
                match stage {
                    Stage::StdinClosed { .. } => self.terminate(report, now, actions),
                    Stage::Terminated { .. } => self.kill(report, now, actions),
                    Stage::Killed { .. } => self.report_unkillable(report, actions),
                }
            }
            State::Ending { .. } => self.end(actions),
            State::Starting { .. } | State::Up | State::Sweeping | State::Ended => {}
        }
    }

    fn terminate(&mut self, report: Report, now: Instant, actions: &mut Vec<Action>) {
        let stage = Stage::Terminated { until: now + self.grace.after_term };
        self.state = State::Stopping { stage, report };
        actions.push(Action::Terminate);
    }

    fn kill(&mut self, report: Report, now: Instant, actions: &mut Vec<Action>) {
        let until = match report {
            Report::Due(_) => Some(now + KILL_SHOWS),
            Report::Made => None,
        };
        self.state = State::Stopping { stage: Stage::Killed { until }, report };
        actions.push(Action::Kill);
    }

    fn report_unkillable(&mut self, report: Report, actions: &mut Vec<Action>) {
        self.state = State::Stopping { stage: Stage::Killed { until: None }, report: Report::Made };
        if let Report::Due(how) = report {
            self.drop_stdout(actions);
            actions.push(Action::Report(Gone { asked: how == How::Stopped, how, pid: self.pid }));
        }
    }

    fn drop_stdout(&mut self, actions: &mut Vec<Action>) {
        if self.stdout == Stdout::Open {
            self.stdout = Stdout::Done;
            actions.push(Action::DropStdout);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "a test needs some instant to count from")]
    fn birth() -> Instant {
        Instant::now()
    }

    /// One line per event: time (ms), event, actions, and the next deadline (ms).
    type Line = (u64, Event, Vec<Action>, Option<u64>);

    fn tell(story: Vec<Line>) -> Life {
        let birth = birth();
        let mut life = Life::new(Grace::default());
        for (line, (at, event, actions, deadline)) in story.into_iter().enumerate() {
            assert_eq!(life.handle(event, birth + ms(at)), actions, "line {line}");
            assert_eq!(life.deadline().map(|at| at - birth), deadline.map(ms), "deadline of line {line}");
        }
        life
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn started() -> Event {
        Event::Started { pid: 7 }
    }

    fn exited(code: i32) -> Event {
        Event::Exited(Exit::Code(code))
    }

    fn killed() -> Event {
        Event::Exited(Exit::Signal(9))
    }

    fn stop() -> Event {
        Event::StopAsked(How::Stopped)
    }

    fn report(how: How, asked: bool) -> Action {
        Action::Report(Gone { how, asked, pid: Some(7) })
    }

    fn code(code: i32) -> How {
        How::Exited(Exit::Code(code))
    }

    use Action::*;
    use Event::{
        Exiting, KillAsked, LeaseEnded, StartFailed, StdinRefused, StdoutClosed, StopAsked, Swept, TimePassed,
    };

    #[test]
    fn a_crash_is_reported_as_soon_as_exit_and_end_of_output_are_both_known() {
        #[rustfmt::skip]
        let life = tell(vec![
            (0,    started(),    vec![ReportStarted],                 None),
            (1000, StdoutClosed, vec![],                              Some(1050)),
            (1001, exited(1),    vec![Sweep, report(code(1), false)], None),
            (1002, Swept,        vec![],                              None),
        ]);
        assert!(life.is_over());
        #[rustfmt::skip]
        let life = tell(vec![
            (0,    started(),    vec![ReportStarted],                 None),
            (1000, exited(1),    vec![],                              Some(1050)),
            (1001, StdoutClosed, vec![Sweep, report(code(1), false)], None),
            (1051, TimePassed,   vec![],                              None),
        ]);
        assert!(!life.is_over(), "until it is swept");
    }

    #[test]
    fn x5_a_child_that_closes_its_stdout_is_reported_and_then_stopped() {
        #[rustfmt::skip]
        let life = tell(vec![
            (0,    started(),    vec![ReportStarted],                                         None),
            (1000, StdoutClosed, vec![],                                                      Some(1050)),
            (1020, TimePassed,   vec![],                                                      Some(1050)),
            (1030, StdinRefused, vec![],                                                      Some(1050)),
            (1050, TimePassed,   vec![CloseStdin, Terminate, report(How::ClosedStdout, false)], Some(3050)),
            (1050, TimePassed,   vec![],                                                      Some(3050)),
            (3050, TimePassed,   vec![Kill],                                                  None),
            (3051, killed(),     vec![Sweep],                                                 None),
            (3052, Swept,        vec![],                                                      None),
        ]);
        assert!(life.is_over());
    }

    #[test]
    fn x5_the_exit_status_is_awaited_after_the_exit_has_begun() {
        #[rustfmt::skip]
        let table = [
            vec![
                (0,    started(),    vec![ReportStarted],                  None),
                (1000, Exiting,      vec![],                               None),
                (1000, StdoutClosed, vec![],                               Some(1050)),
                (1050, Exiting,      vec![],                               Some(2050)),
                (1400, exited(42),   vec![Sweep, report(code(42), false)], None),
                (1401, Swept,        vec![],                               None),
            ],
            vec![
                (0,    started(),    vec![ReportStarted],                                           None),
                (1000, StdoutClosed, vec![],                                                        Some(1050)),
                (1050, Exiting,      vec![],                                                        Some(2050)),
                (1500, Exiting,      vec![],                                                        Some(2050)),
                (2050, TimePassed,   vec![CloseStdin, Terminate, report(How::ClosedStdout, false)], Some(4050)),
                (2051, exited(42),   vec![Sweep],                                                   None),
                (2052, Swept,        vec![],                                                        None),
            ],
        ];
        for story in table {
            assert!(tell(story).is_over());
        }
        let mut life = Life::new(Grace::default());
        life.handle(started(), birth());
        assert_eq!(life.due(|_| true), TimePassed, "one that serves is not asked about");
        life.handle(StdoutClosed, birth());
        assert_eq!((life.due(|pid| pid == 7), life.due(|_| false)), (Exiting, TimePassed));
        life.handle(Exiting, birth());
        assert_eq!(life.due(|_| true), TimePassed, "and not twice");
    }

    #[test]
    fn x5_a_close_of_stdout_before_the_report_of_the_start_is_kept() {
        #[rustfmt::skip]
        tell(vec![
            (0,   StdoutClosed, vec![],                                                        None),
            (100, started(),    vec![ReportStarted],                                           Some(150)),
            (150, TimePassed,   vec![CloseStdin, Terminate, report(How::ClosedStdout, false)], Some(2150)),
        ]);
    }

    #[test]
    fn x5_a_child_that_closes_its_stdin_is_reported_and_then_stopped() {
        #[rustfmt::skip]
        tell(vec![
            (0,    started(),    vec![ReportStarted],                                                      None),
            (1000, StdinRefused, vec![],                                                                   Some(1050)),
            (1050, TimePassed,   vec![CloseStdin, Terminate, DropStdout, report(How::ClosedStdin, false)], Some(3050)),
            (1060, StdoutClosed, vec![],                                                                   Some(3050)),
            (1070, exited(1),    vec![Sweep],                                                              None),
        ]);
        #[rustfmt::skip]
        tell(vec![
            (0,    started(),    vec![ReportStarted],                 None),
            (1000, StdinRefused, vec![],                              Some(1050)),
            (1010, StdoutClosed, vec![],                              Some(1050)),
            (1020, exited(1),    vec![Sweep, report(code(1), false)], None),
        ]);
    }

    #[test]
    fn x6_a_grandchild_that_holds_the_pipe_does_not_hold_up_the_report() {
        #[rustfmt::skip]
        tell(vec![
            (0,    started(),    vec![ReportStarted],                             None),
            (1000, exited(0),    vec![],                                          Some(1050)),
            (1040, TimePassed,   vec![],                                          Some(1050)),
            (1050, TimePassed,   vec![Sweep, DropStdout, report(code(0), false)], None),
            (1051, StdoutClosed, vec![],                                          None),
            (1052, Swept,        vec![],                                          None),
        ]);
        // The same if the exit comes late in the wait for it.
        #[rustfmt::skip]
        tell(vec![
            (0,    started(),    vec![ReportStarted],                             None),
            (1000, StdinRefused, vec![],                                          Some(1050)),
            (1049, exited(0),    vec![],                                          Some(1099)),
            (1099, TimePassed,   vec![Sweep, DropStdout, report(code(0), false)], None),
        ]);
    }

    #[test]
    fn a_stop_closes_stdin_then_sends_sigterm_then_sigkill() {
        #[rustfmt::skip]
        tell(vec![
            (0,    started(),    vec![ReportStarted], None),
            (1000, stop(),       vec![CloseStdin],    Some(2000)),
            (1500, stop(),       vec![],              Some(2000)),
            (2000, TimePassed,   vec![Terminate],     Some(4000)),
            (4000, TimePassed,   vec![Kill],          Some(4500)),
            (4001, StdoutClosed, vec![],              Some(4500)),
            (4002, killed(),     vec![Sweep, report(How::Exited(Exit::Signal(9)), true)], None),
        ]);
        #[rustfmt::skip]
        tell(vec![
            (0,    started(),    vec![ReportStarted],                None),
            (1000, stop(),       vec![CloseStdin],                   Some(2000)),
            (1010, StdoutClosed, vec![],                             Some(2000)),
            (1020, exited(42),   vec![Sweep, report(code(42), true)], None),
        ]);
    }

    #[test]
    fn a_second_signal_kills_at_once() {
        #[rustfmt::skip]
        tell(vec![
            (0,    started(),    vec![ReportStarted],                                        None),
            (1000, stop(),       vec![CloseStdin],                                           Some(2000)),
            (1100, KillAsked,    vec![Kill],                                                 Some(1600)),
            (1100, KillAsked,    vec![],                                                     Some(1600)),
            (1101, killed(),     vec![],                                                     Some(1151)),
            (1102, KillAsked,    vec![Sweep, DropStdout, report(How::Exited(Exit::Signal(9)), true)], None),
        ]);
        #[rustfmt::skip]
        tell(vec![
            (0,    started(),    vec![ReportStarted],                                           None),
            (1000, StdoutClosed, vec![],                                                        Some(1050)),
            (1050, TimePassed,   vec![CloseStdin, Terminate, report(How::ClosedStdout, false)], Some(3050)),
            (1100, KillAsked,    vec![Kill],                                                    None),
        ]);
    }

    #[test]
    fn n3_the_end_of_a_lease_is_the_reason_unless_there_was_one_before() {
        let ended = || report(How::LeaseEnded, false);
        #[rustfmt::skip]
        let table = [
            vec![
                (0,    started(),    vec![ReportStarted],      None),
                (1000, LeaseEnded,   vec![Kill],               Some(1500)),
                (1001, LeaseEnded,   vec![],                   Some(1500)),
                (1002, StdoutClosed, vec![],                   Some(1500)),
                (1003, killed(),     vec![Sweep, ended()],     None),
                (1004, Swept,        vec![],                   None),
            ],
            // Its pipes closed first.
            vec![
                (0,    started(),    vec![ReportStarted],      None),
                (1000, StdoutClosed, vec![],                   Some(1050)),
                (1001, LeaseEnded,   vec![Kill],               Some(1501)),
                (1002, killed(),     vec![Sweep, ended()],     None),
                (1003, Swept,        vec![],                   None),
            ],
            // Reported before the start.
            vec![
                (0,    LeaseEnded,   vec![],                    None),
                (1,    started(),    vec![ReportStarted, Kill], Some(501)),
                (2,    StdoutClosed, vec![],                    Some(501)),
                (3,    killed(),     vec![Sweep, ended()],      None),
                (4,    Swept,        vec![],                    None),
            ],
            // It was being stopped, or had exited.
            vec![
                (0,    started(),    vec![ReportStarted],      None),
                (1000, stop(),       vec![CloseStdin],         Some(2000)),
                (1100, LeaseEnded,   vec![Kill],               Some(1600)),
                (1101, StdoutClosed, vec![],                   Some(1600)),
                (1102, killed(),     vec![Sweep, report(How::Exited(Exit::Signal(9)), true)], None),
                (1103, Swept,        vec![],                   None),
            ],
            vec![
                (0,    started(),    vec![ReportStarted],      None),
                (1000, exited(3),    vec![],                   Some(1050)),
                (1001, LeaseEnded,   vec![Sweep, DropStdout, report(code(3), false)], None),
                (1002, Swept,        vec![],                   None),
            ],
        ];
        for story in table {
            assert!(tell(story).is_over());
        }
    }

    #[test]
    fn a_stop_during_the_start_waits_for_the_process() {
        #[rustfmt::skip]
        tell(vec![
            (0,    stop(),       vec![],                          None),
            (100,  started(),    vec![ReportStarted, CloseStdin], Some(1100)),
        ]);
        #[rustfmt::skip]
        tell(vec![
            (0,    stop(),       vec![],                          None),
            (10,   KillAsked,    vec![],                          None),
            (100,  started(),    vec![ReportStarted, Kill],       Some(600)),
        ]);
        let failed = |asked| Report(Gone { how: How::CouldNotStart("no such file".into()), asked, pid: None });
        let fails = || StartFailed("no such file".into());
        assert!(tell(vec![(0, stop(), vec![], None), (100, fails(), vec![failed(true)], None)]).is_over());
        assert!(tell(vec![(0, fails(), vec![failed(false)], None), (1, stop(), vec![], None)]).is_over());
    }

    #[test]
    fn a_child_stopped_for_a_fault_is_reported_with_the_fault_and_not_with_our_signal() {
        let late = || How::HandshakeLate(Duration::from_secs(30));
        #[rustfmt::skip]
        tell(vec![
            (0,      started(),         vec![ReportStarted],                                None),
            (30_000, StopAsked(late()), vec![CloseStdin, Terminate],                        Some(32_000)),
            (30_010, stop(),            vec![],                                             Some(32_000)),
            (30_020, exited(143),       vec![],                                             Some(30_070)),
            (30_070, TimePassed,        vec![Sweep, DropStdout, report(late(), false)],     None),
        ]);
        // It exited before it was stopped.
        #[rustfmt::skip]
        tell(vec![
            (0,      started(),         vec![ReportStarted],                                None),
            (30_000, exited(1),         vec![],                                             Some(30_050)),
            (30_001, StopAsked(late()), vec![],                                             Some(30_050)),
            (30_002, stop(),            vec![],                                             Some(30_050)),
            (30_003, StdoutClosed,      vec![Sweep, report(code(1), false)],                None),
        ]);
    }

    #[test]
    fn a_process_that_survives_sigkill_is_reported_and_still_reaped() {
        #[rustfmt::skip]
        let life = tell(vec![
            (0,    started(),    vec![ReportStarted],                            None),
            (1000, KillAsked,    vec![Kill],                                     Some(1500)),
            (1500, TimePassed,   vec![DropStdout, report(How::Stopped, true)],   None),
            (9000, killed(),     vec![Sweep],                                    None),
            (9001, Swept,        vec![],                                         None),
        ]);
        assert!(life.is_over());
    }

    #[test]
    fn a_grace_of_zero_does_not_wait() {
        let now = birth();
        let zero = Duration::ZERO;
        let mut life = Life::new(Grace { after_stdin: zero, after_term: zero, settle: zero });
        life.handle(started(), now);
        assert_eq!(life.handle(stop(), now), [CloseStdin]);
        assert_eq!(life.deadline(), Some(now));
        assert_eq!(life.handle(TimePassed, now), [Terminate, Kill]);
        assert_eq!(life.deadline(), Some(now + KILL_SHOWS));
    }
}
