//! One child process, from the wish to start it until it is reaped and nothing of it is left.
//!
//! The end is *reported* once, when nothing more will be heard of the child: its stdout was read dry, or dropped. The
//! life may go on after that: a child that hung up without dying is reported gone and then stopped.

use std::time::{Duration, Instant};

use crate::exit::{Exit, How};

/// How long SIGKILL may take to show. A process that the kernel holds on to beyond this is reported gone all the
/// same, so that nobody waits for it; it is still reaped when it lets go.
pub const KILL_SHOWS: Duration = Duration::from_millis(500);

/// How long a process may take to end that has begun to. On a busy machine its pipes may close long before its exit shows.
pub const EXIT_SHOWS: Duration = Duration::from_secs(1);

/// How long each step of an ending may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grace {
    /// From closing stdin to SIGTERM.
    pub after_stdin: Duration,
    /// From SIGTERM to SIGKILL.
    pub after_term: Duration,
    /// From an end of a pipe to the exit that should go with it, and the other way round.
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
    /// Everything the child wrote was read.
    StdoutClosed,
    /// A write to the child's stdin failed for good.
    StdinRefused,
    /// Nothing of the child's group is left.
    Swept,
    /// `How::Stopped` if somebody asked for it; otherwise what the child did to deserve it.
    StopAsked(How),
    /// No more patience.
    KillAsked,
    /// The system says that it is about to exit.
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
    /// Kill what is left of the group and of those who left it, then say `Swept`.
    Sweep,
    /// Read no more of what the child writes.
    DropStdout,
    ReportStarted,
    Report(Gone),
}

/// The end of a child, for those who depend on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gone {
    pub how: How,
    pub asked: bool,
    /// None if no process came to be.
    pub pid: Option<u32>,
}

#[derive(Clone, Debug)]
pub struct Life {
    grace: Grace,
    pid: Option<u32>,
    /// Pipes end in their own time, in whatever state the process is.
    stdout: Stdout,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stdout {
    Open,
    /// Read dry or dropped.
    Done,
}

#[derive(Clone, Debug)]
enum State {
    /// `stop` is what to do as soon as there is a process to do it to.
    Starting {
        stop: Option<Stop>,
    },
    Up,
    /// A pipe ended; if the process ended with it, the exit is about to show.
    Parting {
        how: How,
        until: Instant,
        /// It is: the time is longer, and given once.
        is_exiting: bool,
    },
    Stopping {
        stage: Stage,
        report: Report,
    },
    /// The exit is known; what was written before it is still to be read.
    Ending {
        how: How,
        asked: bool,
        until: Instant,
    },
    /// Reported and reaped; what it left behind is being killed.
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
    /// Due when the exit shows; the reason for the stop.
    Due(How),
    Made,
}

impl Life {
    /// The wish to start: whoever makes a life then starts the process and says `Started` or `StartFailed`.
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
            Event::Exiting => self.exiting(now),
            Event::TimePassed => self.time_passed(now, &mut actions),
        }
        actions
    }

    /// What to say when the deadline has come. What hung up is looked at first: if it is about to exit, how it did is worth
    /// waiting for.
    pub fn due(&self, is_exiting: impl FnOnce(u32) -> bool) -> Event {
        match (&self.state, self.pid) {
            (State::Parting { is_exiting: false, .. }, Some(pid)) if is_exiting(pid) => Event::Exiting,
            _ => Event::TimePassed,
        }
    }

    /// When to say what is `due`.
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
                // It died of what we did about this; the exit would tell of us, not of the child.
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

    /// A pipe ended while the child had every reason to keep it.
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

    /// If the exit is known: nothing more is read, the end is told.
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
            // One that broke its word is not waited for as long as one that only has to go.
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

    fn time_passed(&mut self, now: Instant, actions: &mut Vec<Action>) {
        // A step may leave no time for the next one.
        while self.deadline().is_some_and(|deadline| deadline <= now) {
            self.step(now, actions);
        }
    }

    /// The present deadline has come.
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

    /// One line per event: when (ms), what happened, what is done about it, and the next deadline (ms).
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
    use Event::{Exiting, KillAsked, StartFailed, StdinRefused, StdoutClosed, StopAsked, Swept, TimePassed};

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
    fn x5_a_child_that_hangs_up_is_reported_and_then_stopped() {
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
    fn x5_how_a_child_exits_is_waited_for_once_it_has_begun_to() {
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
    fn x5_a_hang_up_that_overtakes_the_word_of_the_start_is_not_forgotten() {
        #[rustfmt::skip]
        tell(vec![
            (0,   StdoutClosed, vec![],                                                        None),
            (100, started(),    vec![ReportStarted],                                           Some(150)),
            (150, TimePassed,   vec![CloseStdin, Terminate, report(How::ClosedStdout, false)], Some(2150)),
        ]);
    }

    #[test]
    fn x5_a_child_that_no_longer_listens_is_reported_and_then_stopped() {
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
        // Even if the exit came late in the wait for it.
        #[rustfmt::skip]
        tell(vec![
            (0,    started(),    vec![ReportStarted],                             None),
            (1000, StdinRefused, vec![],                                          Some(1050)),
            (1049, exited(0),    vec![],                                          Some(1099)),
            (1099, TimePassed,   vec![Sweep, DropStdout, report(code(0), false)], None),
        ]);
    }

    #[test]
    fn a_stop_goes_from_a_word_to_a_signal_to_force() {
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
    fn a_second_signal_has_no_patience() {
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
    fn a_stop_while_starting_waits_for_something_to_stop() {
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
    fn a_child_stopped_for_what_it_did_ends_by_that_and_not_by_our_signal() {
        let late = || How::HandshakeLate(Duration::from_secs(30));
        #[rustfmt::skip]
        tell(vec![
            (0,      started(),         vec![ReportStarted],                                None),
            (30_000, StopAsked(late()), vec![CloseStdin, Terminate],                        Some(32_000)),
            (30_010, stop(),            vec![],                                             Some(32_000)),
            (30_020, exited(143),       vec![],                                             Some(30_070)),
            (30_070, TimePassed,        vec![Sweep, DropStdout, report(late(), false)],     None),
        ]);
        // It was gone before anybody stopped it.
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
    fn a_process_that_force_does_not_end_is_reported_and_still_reaped() {
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
    fn no_grace_is_no_wait() {
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
