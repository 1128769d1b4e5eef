//! One agent that a person works with, across its processes: when it is started again, how, and when outlast gives
//! up.
//!
//! The driver starts, stops and reads the agent; this machine decides. The end of a process is reported once, when
//! its terminal was read to the end and the process reaped.

use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::exit::{Cause, Exit, How, signal_name};
use crate::restarts::{Policy, Restarts, State as Health, Verdict};
use crate::slot::{Slot, Until};

mod saved;

pub use saved::{Busy, Saved};

/// A resumed conversation counts as resumed once the agent has been ready for this long. If the agent exits earlier,
/// the resume is what failed, and the next start begins a new conversation.
pub const RESUME_PROVEN: Duration = Duration::from_secs(5);

/// The question after a clean exit is shown when no key was typed for this long: keys that a person typed to the
/// agent while it exited are no answer.
pub const ASK_AFTER: Duration = Duration::from_millis(400);

/// With a new conversation, or with the previous one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    Fresh,
    Continue,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Fresh => "fresh",
            Mode::Continue => "continue",
        })
    }
}

/// The last input of the agent before it exited, as far as it tells whether a person ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastInput {
    /// Ctrl-C, Ctrl-D or the agent's quit word, typed by a person at the terminal.
    Quit,
    /// Anything else: other keys, injected input, or no input.
    Other,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The mode is the one that was used: there may have been no conversation to continue.
    Started {
        pid: u32,
        mode: Mode,
    },
    /// No process was started; the code is the one that a shell would return.
    StartFailed {
        why: String,
        code: u8,
    },
    /// The agent is ready for input.
    PromptShown,
    /// Its terminal was read to the end, and it was reaped.
    Ended {
        how: How,
        last_input: LastInput,
    },
    RestartAsked {
        ticket: u64,
        mode: Mode,
    },
    ResumeAsked {
        ticket: u64,
    },
    StopAsked {
        force: bool,
    },
    /// The person at the terminal answered the question of `Action::Ask`.
    Chosen(Choice),
    /// A key was typed while no agent runs.
    KeyTyped,
    /// The terminal is gone: there is no person to ask.
    TerminalLost,
    /// A person is at a terminal.
    TerminalFound,
    /// The agent reports that it is busy, and has written nothing for this long.
    Hung {
        silent_for: Duration,
    },
    TimePassed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Start(Mode),
    Quit,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Start(Mode),
    /// With the usual grace; `Event::Ended` follows.
    Stop,
    /// With SIGKILL; `Event::Ended` follows.
    Kill,
    /// With the usual grace, because it hangs; `Event::Ended` follows, and says so.
    StopHung(Duration),
    /// Ask the person at the terminal whether to start the agent again.
    Ask,
    Note(Note),
    Answer {
        ticket: u64,
        result: Result<Answer, Refused>,
    },
    /// The session ends with this exit code.
    End(u8),
}

/// Events for the logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    Ended {
        how: How,
        class: Class,
        mode: Mode,
        pid: Option<u32>,
        uptime: Duration,
        crashes: u32,
        delay: Option<Duration>,
    },
    Health {
        from: Health,
        to: Health,
    },
}

/// What an exit means for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// An operator or a program asked for it.
    Asked,
    /// Exit code 0.
    Clean,
    /// The person at the terminal ended it.
    User,
    Transient,
    Flapping,
    /// The last failure that the policy allows.
    Halted,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Class::Asked => "asked",
            Class::Clean => "clean",
            Class::User => "user",
            Class::Transient => "transient",
            Class::Flapping => "flapping",
            Class::Halted => "halted",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Started { old_pid: Option<u32>, pid: u32, mode: Mode },
    NothingToResume,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    Halted,
    Stopping,
    /// The new agent could not be started.
    Failed(String),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Halted => {
                f.write_str("the session failed too often and is halted; use `outlast resume` or `outlast stop`")
            }
            Refused::Stopping => f.write_str("outlast is stopping"),
            Refused::Failed(why) => write!(f, "the agent could not be started: {why}"),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Session {
    /// Its agent is known by its process id.
    slot: Slot<u32>,
    /// There is a person to ask.
    has_terminal: bool,
    phase: Phase,
    /// Requests that are answered at the next start.
    tickets: Vec<u64>,
    /// The process that this start replaces.
    old_pid: Option<u32>,
    next_mode: Mode,
    last_code: u8,
    last_exit: Option<How>,
    has_run: bool,
    /// A resume that fails is tried again with the same conversation, until one was proven.
    keeps_conversation: bool,
    health: Health,
}

#[derive(Clone, Debug)]
enum Phase {
    Starting {
        mode: Mode,
        asked: bool,
        wish: Option<AfterStop>,
    },
    Running {
        mode: Mode,
        wish: Option<AfterStop>,
    },
    /// `ask_at`: the question is not shown yet, and this is when it will be.
    Asking {
        ask_at: Option<Instant>,
    },
    /// No agent runs: the slot says when the next one starts, or that it was given up.
    Away,
    Over,
}

/// What follows after the requested stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AfterStop {
    Restart(Mode),
    End,
}

impl Session {
    /// `has_terminal`: there is a person to ask after a clean exit. Otherwise a clean exit ends the session.
    pub fn new(policy: Policy, seed: u64, has_terminal: bool) -> Session {
        Session {
            slot: Slot::new(policy, seed),
            has_terminal,
            phase: Phase::Starting { mode: Mode::Fresh, asked: false, wish: None },
            tickets: Vec::new(),
            old_pid: None,
            next_mode: Mode::Fresh,
            last_code: 0,
            last_exit: None,
            has_run: false,
            keeps_conversation: false,
            health: Health::Healthy,
        }
    }

    /// The first start: fresh, or with the conversation of an earlier session. Called once, before any event.
    pub fn begin(&mut self, mode: Mode) -> Vec<Action> {
        self.phase = Phase::Starting { mode, asked: false, wish: None };
        vec![Action::Start(mode)]
    }

    /// For a restored session: a first resume that fails, for example because the network is not there yet, is tried
    /// again with the same conversation, and halts in the end; it never begins a new one.
    pub fn keep_conversation(&mut self) {
        self.keeps_conversation = true;
    }

    /// An agent was started at least once.
    pub fn has_run(&self) -> bool {
        self.has_run
    }

    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Started { pid, mode } => self.started(pid, mode, now, &mut actions),
            Event::StartFailed { why, code } => self.start_failed(why, code, now, &mut actions),
            Event::PromptShown => self.prompt_shown(now),
            Event::Ended { how, last_input } => self.ended(how, last_input, now, &mut actions),
            Event::RestartAsked { ticket, mode } => self.restart_asked(ticket, mode, &mut actions),
            Event::ResumeAsked { ticket } => self.resume_asked(ticket, &mut actions),
            Event::StopAsked { force } => self.stop_asked(force, &mut actions),
            Event::Chosen(choice) => self.chosen(choice, &mut actions),
            Event::KeyTyped => {
                if let Phase::Asking { ask_at: Some(ask_at) } = &mut self.phase {
                    *ask_at = now + ASK_AFTER;
                }
            }
            Event::TerminalLost => self.terminal_lost(&mut actions),
            Event::TerminalFound => self.has_terminal = true,
            Event::Hung { silent_for } => {
                if let Phase::Running { wish: None, .. } = self.phase {
                    actions.push(Action::StopHung(silent_for));
                }
            }
            Event::TimePassed => self.time_passed(now, &mut actions),
        }
        self.note_health(now, &mut actions);
        actions
    }

    /// When the driver must report `TimePassed`.
    pub fn deadline(&self) -> Option<Instant> {
        match self.phase {
            Phase::Away => self.slot.due(),
            Phase::Asking { ask_at } => ask_at,
            // A flapping agent becomes healthy at this time, not at the next event.
            Phase::Running { .. } if self.health != Health::Healthy => {
                self.slot.ready_since().map(|ready| ready + self.restarts().policy().healthy)
            }
            Phase::Starting { .. } | Phase::Running { .. } | Phase::Over => None,
        }
    }

    /// The state in one word, for people and programs.
    pub fn state(&self) -> &'static str {
        match self.phase {
            Phase::Starting { wish, .. } | Phase::Running { wish, .. } => match wish {
                None if self.slot.serving().is_some() => "ready",
                None => "starting",
                Some(AfterStop::Restart(_)) => "restarting",
                Some(AfterStop::End) => "stopping",
            },
            Phase::Asking { .. } => "exited",
            Phase::Away if self.slot.is_given_up() => "halted",
            Phase::Away => "backoff",
            Phase::Over => "stopping",
        }
    }

    pub fn health(&self) -> Health {
        self.health
    }

    pub fn pid(&self) -> Option<u32> {
        self.slot.child()
    }

    /// The question is shown, and a key answers it.
    pub fn is_asking(&self) -> bool {
        matches!(self.phase, Phase::Asking { ask_at: None })
    }

    /// The question is about to be shown; a key typed now was meant for the agent.
    pub fn is_about_to_ask(&self) -> bool {
        matches!(self.phase, Phase::Asking { ask_at: Some(_) })
    }

    pub fn uptime(&self, now: Instant) -> Option<Duration> {
        self.slot.since().map(|since| now.saturating_duration_since(since))
    }

    pub fn next_try(&self, now: Instant) -> Option<Duration> {
        self.slot.due().map(|at| at.saturating_duration_since(now))
    }

    pub fn last_exit(&self) -> Option<&How> {
        self.last_exit.as_ref()
    }

    /// The memory of the policy: restarts, crashes, the last exits.
    pub fn restarts(&self) -> &Restarts {
        self.slot.restarts()
    }

    fn started(&mut self, pid: u32, mode: Mode, now: Instant, actions: &mut Vec<Action>) {
        let Phase::Starting { asked, wish, .. } = self.phase else { return };
        self.has_run = true;
        match asked {
            true => self.slot.refill(pid, now),
            false => self.slot.fill(pid, now),
        }
        self.phase = Phase::Running { mode, wish };
        // A restart request for an agent that is to be replaced again is answered by the next start.
        if wish.is_none() {
            let old_pid = self.old_pid.take();
            for ticket in std::mem::take(&mut self.tickets) {
                actions.push(Action::Answer { ticket, result: Ok(Answer::Started { old_pid, pid, mode }) });
            }
        }
    }

    fn start_failed(&mut self, why: String, code: u8, now: Instant, actions: &mut Vec<Action>) {
        let Phase::Starting { wish, .. } = self.phase else { return };
        self.refuse_waiting(&Refused::Failed(why.clone()), actions);
        if !self.has_run || wish == Some(AfterStop::End) {
            // A command that never ran was mistyped, and another attempt would fail as well.
            return self.end(code, actions);
        }
        self.last_code = code;
        self.exited(How::CouldNotStart(why), LastInput::Other, now, actions);
    }

    fn prompt_shown(&mut self, now: Instant) {
        if let Some(pid) = self.slot.child() {
            self.slot.serve(pid, now);
        }
    }

    fn ended(&mut self, how: How, last_input: LastInput, now: Instant, actions: &mut Vec<Action>) {
        if self.slot.child().is_some() {
            self.last_code = code_of(&how);
            self.exited(how, last_input, now, actions);
        }
    }

    /// Decides what an exit means, and what follows.
    fn exited(&mut self, how: How, last: LastInput, now: Instant, actions: &mut Vec<Action>) {
        let (Phase::Starting { mode, wish, .. } | Phase::Running { mode, wish }) = self.phase else { return };
        let (pid, uptime) = (self.slot.child(), self.uptime(now).unwrap_or_default());
        let ready_for = self.slot.ready_since().map(|ready| now.saturating_duration_since(ready));
        self.last_exit = Some(how.clone());
        let (cause, whose) = classify(&how, wish.is_some(), ready_for.is_some(), last);
        let verdict = self.slot.judge(cause, &how, now);
        self.slot.follow(&verdict, Until::Asked);
        self.keeps_conversation &= mode == Mode::Continue && ready_for.is_none_or(|time| time < RESUME_PROVEN);
        self.next_mode = match self.keeps_conversation {
            true => Mode::Continue,
            false => mode_after(mode, ready_for, cause),
        };
        let (class, delay) = match &verdict {
            Verdict::Left => (whose, None),
            Verdict::GiveUp { .. } => (Class::Halted, None),
            Verdict::StartAt { delay, .. } => match self.restarts().state(now) {
                Health::Degraded => (Class::Flapping, Some(*delay)),
                _ => (Class::Transient, Some(*delay)),
            },
        };
        let crashes = self.restarts().crashes(now);
        actions.push(Action::Note(Note::Ended { how, class, mode, pid, uptime, crashes, delay }));
        match (wish, verdict) {
            (Some(AfterStop::End), _) => self.end(self.last_code, actions),
            (Some(AfterStop::Restart(mode)), _) => {
                self.old_pid = self.old_pid.or(pid);
                self.start(mode, true, actions);
            }
            (None, Verdict::StartAt { .. } | Verdict::GiveUp { .. }) => self.phase = Phase::Away,
            (None, Verdict::Left) if self.has_terminal => {
                self.phase = Phase::Asking { ask_at: Some(now + ASK_AFTER) };
            }
            (None, Verdict::Left) => self.end(self.last_code, actions),
        }
    }

    fn restart_asked(&mut self, ticket: u64, mode: Mode, actions: &mut Vec<Action>) {
        match &mut self.phase {
            Phase::Over
            | Phase::Starting { wish: Some(AfterStop::End), .. }
            | Phase::Running { wish: Some(AfterStop::End), .. } => {
                actions.push(Action::Answer { ticket, result: Err(Refused::Stopping) });
            }
            Phase::Away if self.slot.is_given_up() => {
                actions.push(Action::Answer { ticket, result: Err(Refused::Halted) });
            }
            Phase::Starting { wish, .. } | Phase::Running { wish, .. } => {
                self.tickets.push(ticket);
                // One stop serves all requests; the mode of the last request counts.
                if wish.replace(AfterStop::Restart(mode)).is_none() {
                    actions.push(Action::Stop);
                }
            }
            Phase::Asking { .. } | Phase::Away => {
                self.tickets.push(ticket);
                self.start(mode, true, actions);
            }
        }
    }

    fn resume_asked(&mut self, ticket: u64, actions: &mut Vec<Action>) {
        match self.phase {
            Phase::Away => {
                self.slot.forgive();
                self.tickets.push(ticket);
                self.start(self.next_mode, true, actions);
            }
            _ => actions.push(Action::Answer { ticket, result: Ok(Answer::NothingToResume) }),
        }
    }

    fn stop_asked(&mut self, force: bool, actions: &mut Vec<Action>) {
        match &mut self.phase {
            Phase::Over => {}
            Phase::Starting { wish, .. } | Phase::Running { wish, .. } => {
                let before = wish.replace(AfterStop::End);
                self.refuse_waiting(&Refused::Stopping, actions);
                match (force, before) {
                    (true, _) => actions.push(Action::Kill),
                    (false, None) => actions.push(Action::Stop),
                    (false, Some(_)) => {}
                }
            }
            Phase::Asking { .. } | Phase::Away => self.end(self.last_code, actions),
        }
    }

    fn chosen(&mut self, choice: Choice, actions: &mut Vec<Action>) {
        if !self.is_asking() {
            return;
        }
        match choice {
            // There may be no conversation to continue.
            Choice::Start(Mode::Continue) => self.start(self.next_mode, true, actions),
            Choice::Start(Mode::Fresh) => self.start(Mode::Fresh, true, actions),
            Choice::Quit => self.end(self.last_code, actions),
        }
    }

    fn terminal_lost(&mut self, actions: &mut Vec<Action>) {
        self.has_terminal = false;
        if matches!(self.phase, Phase::Asking { .. }) {
            self.end(self.last_code, actions);
        }
    }

    fn time_passed(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.deadline().is_none_or(|at| at > now) {
            return;
        }
        match self.phase {
            Phase::Away => self.start(self.next_mode, false, actions),
            Phase::Asking { .. } => {
                self.phase = Phase::Asking { ask_at: None };
                actions.push(Action::Ask);
            }
            // The health is noted after each event.
            Phase::Starting { .. } | Phase::Running { .. } | Phase::Over => {}
        }
    }

    fn start(&mut self, mode: Mode, asked: bool, actions: &mut Vec<Action>) {
        self.slot.rest();
        self.phase = Phase::Starting { mode, asked, wish: None };
        actions.push(Action::Start(mode));
    }

    fn end(&mut self, code: u8, actions: &mut Vec<Action>) {
        self.refuse_waiting(&Refused::Stopping, actions);
        self.slot.rest();
        self.phase = Phase::Over;
        actions.push(Action::End(code));
    }

    fn refuse_waiting(&mut self, why: &Refused, actions: &mut Vec<Action>) {
        self.old_pid = None;
        for ticket in std::mem::take(&mut self.tickets) {
            actions.push(Action::Answer { ticket, result: Err(why.clone()) });
        }
    }

    fn note_health(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let health = self.restarts().state(now);
        let from = std::mem::replace(&mut self.health, health);
        if from != health {
            // A note stands in the log before the action that it announces.
            let at = actions.iter().position(|action| !matches!(action, Action::Note(_))).unwrap_or(actions.len());
            actions.insert(at, Action::Note(Note::Health { from, to: health }));
        }
    }
}

/// What an exit means for the policy, and for the session.
fn classify(how: &How, asked: bool, was_ready: bool, last: LastInput) -> (Cause, Class) {
    match how {
        _ if asked => (Cause::Asked, Class::Asked),
        How::CouldNotStart(_) => (Cause::NeverReady, Class::Transient),
        How::Hung(_) => (Cause::Crashed, Class::Transient),
        _ if last == LastInput::Quit && !is_violent(how) => (Cause::Clean, Class::User),
        // An agent that exits with 0 before it showed a prompt did not start at all.
        _ if !was_ready => (Cause::NeverReady, Class::Transient),
        How::Exited(Exit::Code(0)) => (Cause::Clean, Class::Clean),
        _ => (Cause::Crashed, Class::Transient),
    }
}

/// No key ends a program in this way, whatever was typed before.
fn is_violent(how: &How) -> bool {
    const VIOLENT: [&str; 6] = ["SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"];
    let signal = match how.exit() {
        Some(Exit::Signal(signal)) => signal_name(*signal),
        _ => None,
    };
    signal.is_some_and(|signal| VIOLENT.contains(&signal))
}

/// The conversation that the next agent begins with, unless a request names another.
fn mode_after(mode: Mode, ready_for: Option<Duration>, cause: Cause) -> Mode {
    let is_failure = matches!(cause, Cause::Crashed | Cause::NeverReady);
    match (mode, ready_for) {
        // It exited before it had a conversation.
        (Mode::Fresh, None) => Mode::Fresh,
        (Mode::Fresh, Some(_)) => Mode::Continue,
        // The resume is what failed, and would fail again.
        (Mode::Continue, None) if is_failure => Mode::Fresh,
        (Mode::Continue, Some(ready_for)) if is_failure && ready_for < RESUME_PROVEN => Mode::Fresh,
        (Mode::Continue, _) => Mode::Continue,
    }
}

/// The exit code as a shell reports it.
fn code_of(how: &How) -> u8 {
    match how.exit() {
        Some(Exit::Code(code)) => u8::try_from(*code).unwrap_or(1),
        Some(Exit::Signal(signal)) => u8::try_from(128 + signal).unwrap_or(1),
        None if *how == How::Stopped => 0,
        None => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "a test needs some instant to count from")]
    fn birth() -> Instant {
        Instant::now()
    }

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    fn code(code: i32) -> How {
        How::Exited(Exit::Code(code))
    }

    fn signal(signal: i32) -> How {
        How::Exited(Exit::Signal(signal))
    }

    /// A session, its clock, and agents that exit as the test says.
    struct Story {
        session: Session,
        now: Instant,
        pid: u32,
    }

    impl Story {
        fn new(has_terminal: bool) -> Story {
            let mut session = Session::new(Policy::session(), 7, has_terminal);
            assert_eq!(session.begin(Mode::Fresh), [Action::Start(Mode::Fresh)]);
            let mut story = Story { session, now: birth(), pid: 0 };
            story.start();
            story
        }

        fn say(&mut self, event: Event) -> Vec<Action> {
            self.session.handle(event, self.now)
        }

        fn start(&mut self) -> Vec<Action> {
            self.pid += 1;
            let pid = self.pid;
            let Phase::Starting { mode, .. } = self.session.phase else { panic!("nothing is being started") };
            self.say(Event::Started { pid, mode })
        }

        /// The agent shows its prompt, runs for this long, and exits.
        fn ready_and_end(&mut self, lives: u64, how: How) -> Vec<Action> {
            self.say(Event::PromptShown);
            self.end(lives, how)
        }

        /// Time passes until the question is shown.
        fn be_asked(&mut self) {
            self.now = self.session.deadline().expect("a question is about to be shown");
            assert_eq!(self.say(Event::TimePassed), [Action::Ask]);
        }

        fn end(&mut self, lives: u64, how: How) -> Vec<Action> {
            self.now += secs(lives);
            self.say(Event::Ended { how, last_input: LastInput::Other })
        }

        /// Waits out the backoff; the mode of the start.
        fn wait(&mut self) -> Mode {
            self.now = self.session.deadline().expect("a start is planned");
            let actions = self.say(Event::TimePassed);
            let [Action::Start(mode)] = actions[..] else { panic!("{actions:?}") };
            self.start();
            mode
        }
    }

    fn class_of(actions: &[Action]) -> (Class, Option<u64>) {
        let note = actions.iter().find_map(|action| match action {
            Action::Note(Note::Ended { class, delay, .. }) => Some((*class, delay.map(|delay| delay.as_secs()))),
            _ => None,
        });
        note.expect("an end is noted")
    }

    #[test]
    fn a_restored_session_keeps_its_conversation_until_a_resume_was_proven() {
        #[rustfmt::skip]
        let table = [
            // restored  each agent's end after the resume              the modes of the starts
            (false, vec![None, None],                                   vec![Mode::Fresh, Mode::Fresh]),
            (true,  vec![None, None],                                   vec![Mode::Continue, Mode::Continue]),
            (true,  vec![None, Some(1)],                                vec![Mode::Continue, Mode::Continue]),
            // Once proven, it is a session like any other.
            (true,  vec![Some(10), None],                               vec![Mode::Continue, Mode::Fresh]),
        ];
        for (is_restored, ends, expected) in table {
            let mut session = Session::new(Policy::session(), 7, false);
            if is_restored {
                session.keep_conversation();
            }
            assert_eq!(session.begin(Mode::Continue), [Action::Start(Mode::Continue)]);
            assert!(!session.has_run());
            let mut story = Story { session, now: birth(), pid: 0 };
            story.start();
            let mut modes = Vec::new();
            for ready_for in &ends {
                match ready_for {
                    Some(time) => story.ready_and_end(*time, code(1)),
                    None => story.end(1, code(1)),
                };
                modes.push(story.wait());
            }
            assert_eq!(modes, expected, "{is_restored} {ends:?}");
            assert!(story.session.has_run());
        }
    }

    #[test]
    fn the_meaning_of_an_exit() {
        use LastInput::*;
        #[rustfmt::skip]
        let table = [
            // how                               asked  ready  last       means
            (code(0),                            false, true,  Other,    Cause::Clean,      Class::Clean),
            (code(0),                            false, false, Other,    Cause::NeverReady, Class::Transient),
            (code(1),                            false, true,  Other,    Cause::Crashed,    Class::Transient),
            (code(42),                           false, true,  Other,    Cause::Crashed,    Class::Transient),
            (code(143),                          false, true,  Other,    Cause::Crashed,    Class::Transient),
            (signal(9),                          false, true,  Other,    Cause::Crashed,    Class::Transient),
            (signal(2),                          false, true,  Other,    Cause::Crashed,    Class::Transient),
            (signal(2),                          false, true,  Quit,     Cause::Clean,      Class::User),
            (code(130),                          false, true,  Quit,     Cause::Clean,      Class::User),
            (code(0),                            false, true,  Quit,     Cause::Clean,      Class::User),
            (code(0),                            false, false, Quit,     Cause::Clean,      Class::User),
            (signal(9),                          false, true,  Quit,     Cause::Crashed,    Class::Transient),
            (signal(11),                         false, false, Quit,     Cause::NeverReady, Class::Transient),
            (code(1),                            true,  true,  Other,    Cause::Asked,      Class::Asked),
            (signal(9),                          true,  false, Quit,     Cause::Asked,      Class::Asked),
            (How::CouldNotStart("no".into()),    false, false, Quit,     Cause::NeverReady, Class::Transient),
        ];
        for (how, asked, ready, last, cause, class) in table {
            assert_eq!(classify(&how, asked, ready, last), (cause, class), "{how}, asked {asked}, ready {ready}");
        }
    }

    #[test]
    fn the_conversation_of_the_next_agent() {
        use Mode::*;
        #[rustfmt::skip]
        let table = [
            // mode    ready for         cause              next
            (Fresh,    None,             Cause::NeverReady, Fresh),
            (Fresh,    Some(secs(0)),    Cause::Crashed,    Continue),
            (Fresh,    Some(secs(100)),  Cause::Clean,      Continue),
            (Continue, None,             Cause::NeverReady, Fresh),
            (Continue, Some(secs(4)),    Cause::Crashed,    Fresh),
            (Continue, Some(secs(4)),    Cause::Clean,      Continue),
            (Continue, Some(secs(5)),    Cause::Crashed,    Continue),
            (Continue, Some(secs(100)),  Cause::Crashed,    Continue),
        ];
        for (mode, ready_for, cause, next) in table {
            assert_eq!(mode_after(mode, ready_for, cause), next, "{mode}, {ready_for:?}, {cause:?}");
        }
    }

    #[test]
    fn failures_are_delayed_longer_and_the_fifth_halts_the_session() {
        let mut story = Story::new(true);
        let delays = [(Class::Transient, Some(2)), (Class::Transient, Some(2)), (Class::Flapping, Some(30))];
        for (number, expected) in delays.into_iter().enumerate() {
            let actions = story.ready_and_end(6, code(1));
            assert_eq!(class_of(&actions), expected, "failure {}", number + 1);
            assert_eq!(story.session.state(), "backoff");
            assert_eq!(story.wait(), Mode::Continue);
        }
        assert_eq!(story.session.health(), Health::Degraded);
        let actions = story.ready_and_end(6, signal(9));
        assert_eq!(class_of(&actions), (Class::Flapping, Some(30)));
        story.wait();
        let actions = story.ready_and_end(6, signal(9));
        assert_eq!(class_of(&actions), (Class::Halted, None));
        assert_eq!((story.session.state(), story.session.health()), ("halted", Health::Halted));
        assert_eq!(story.session.deadline(), None);
    }

    #[test]
    fn a_halted_session_accepts_only_resume_and_stop() {
        let mut story = Story::new(true);
        for _ in 0..4 {
            story.end(0, code(1));
            assert_eq!(story.wait(), Mode::Fresh, "there is no conversation to take up");
        }
        story.end(0, code(7));
        let mut halted = story.session.clone();
        let refused = vec![Action::Answer { ticket: 1, result: Err(Refused::Halted) }];
        assert_eq!(story.say(Event::RestartAsked { ticket: 1, mode: Mode::Fresh }), refused);
        assert_eq!(story.say(Event::Chosen(Choice::Start(Mode::Fresh))), []);
        assert_eq!(story.say(Event::TimePassed), []);
        let actions = story.say(Event::ResumeAsked { ticket: 2 });
        let forgiven = Action::Note(Note::Health { from: Health::Halted, to: Health::Healthy });
        assert_eq!(actions, [forgiven, Action::Start(Mode::Fresh)]);
        let started = Answer::Started { old_pid: None, pid: 6, mode: Mode::Fresh };
        assert_eq!(story.start(), [Action::Answer { ticket: 2, result: Ok(started) }]);
        assert_eq!(class_of(&story.end(0, code(1))), (Class::Transient, Some(2)), "the count is cleared");

        assert_eq!(halted.handle(Event::StopAsked { force: false }, story.now), [Action::End(7)]);
    }

    #[test]
    fn a_clean_exit_asks_a_person_and_without_one_ends_the_session() {
        let mut story = Story::new(true);
        let actions = story.ready_and_end(10, code(0));
        assert_eq!(class_of(&actions).0, Class::Clean);
        assert_eq!(story.session.state(), "exited");
        story.be_asked();
        let mut quitting = story.session.clone();
        assert_eq!(quitting.handle(Event::Chosen(Choice::Quit), story.now), [Action::End(0)]);
        let mut lost = story.session.clone();
        assert_eq!(lost.handle(Event::TerminalLost, story.now), [Action::End(0)]);
        assert_eq!(story.say(Event::Chosen(Choice::Start(Mode::Continue))), [Action::Start(Mode::Continue)]);
        story.start();
        assert_eq!(story.session.restarts().restarts(), 1);
        story.ready_and_end(0, code(0));
        story.be_asked();
        assert_eq!(story.say(Event::Chosen(Choice::Start(Mode::Fresh))), [Action::Start(Mode::Fresh)]);

        let mut alone = Story::new(false);
        assert_eq!(alone.ready_and_end(10, code(0)).last(), Some(&Action::End(0)));
    }

    #[test]
    fn an_agent_that_a_person_ended_did_not_crash() {
        let mut story = Story::new(true);
        story.say(Event::PromptShown);
        let actions = story.say(Event::Ended { how: signal(2), last_input: LastInput::Quit });
        assert_eq!(class_of(&actions).0, Class::User);
        story.be_asked();
        assert_eq!(story.say(Event::Chosen(Choice::Quit)), [Action::End(130)]);
    }

    #[test]
    fn keys_typed_while_the_agent_ends_do_not_answer_the_question() {
        let mut story = Story::new(true);
        story.ready_and_end(10, code(0));
        // The rest of what a person was typing is no answer, and each key postpones the question.
        for _ in 0..5 {
            story.now += ASK_AFTER / 2;
            assert_eq!(story.say(Event::KeyTyped), []);
            assert_eq!(story.say(Event::Chosen(Choice::Quit)), []);
            assert!(story.session.is_about_to_ask() && !story.session.is_asking());
            assert_eq!(story.say(Event::TimePassed), []);
        }
        story.be_asked();
        assert_eq!(story.session.deadline(), None);
        assert_eq!(story.say(Event::KeyTyped), []);
        assert_eq!(story.say(Event::Chosen(Choice::Start(Mode::Continue))), [Action::Start(Mode::Continue)]);
        // Requests over the socket do not wait for the question.
        story.start();
        story.ready_and_end(10, code(0));
        let mut stopped = story.session.clone();
        assert_eq!(stopped.handle(Event::StopAsked { force: false }, story.now), [Action::End(0)]);
        assert_eq!(story.say(Event::TerminalLost), [Action::End(0)]);
    }

    #[test]
    fn a_failed_resume_begins_a_new_conversation() {
        let mut story = Story::new(true);
        story.ready_and_end(10, code(1));
        assert_eq!(story.wait(), Mode::Continue);
        story.end(0, code(1));
        assert_eq!(story.wait(), Mode::Fresh);
        story.ready_and_end(10, code(1));
        assert_eq!(story.wait(), Mode::Continue);
    }

    #[test]
    fn a_conversation_that_began_anew_does_not_count_as_resumed() {
        let mut story = Story::new(true);
        story.ready_and_end(10, code(1));
        story.now = story.session.deadline().unwrap();
        assert_eq!(story.say(Event::TimePassed), [Action::Start(Mode::Continue)]);
        story.say(Event::Started { pid: 2, mode: Mode::Fresh });
        story.ready_and_end(1, signal(9));
        assert_eq!(story.wait(), Mode::Continue, "no attempt to take it up has failed");
    }

    #[test]
    fn a_restart_stops_the_agent_once_and_answers_every_request() {
        let mut story = Story::new(true);
        story.say(Event::PromptShown);
        assert_eq!(story.say(Event::RestartAsked { ticket: 1, mode: Mode::Continue }), [Action::Stop]);
        assert_eq!(story.say(Event::RestartAsked { ticket: 2, mode: Mode::Fresh }), []);
        assert_eq!(story.session.state(), "restarting");
        let actions = story.end(1, signal(1));
        assert_eq!(class_of(&actions), (Class::Asked, None));
        assert_eq!(actions.last(), Some(&Action::Start(Mode::Fresh)));
        let answer = |ticket| Action::Answer {
            ticket,
            result: Ok(Answer::Started { old_pid: Some(1), pid: 2, mode: Mode::Fresh }),
        };
        assert_eq!(story.start(), [answer(1), answer(2)]);
        assert_eq!(
            story.say(Event::ResumeAsked { ticket: 3 }),
            [Action::Answer { ticket: 3, result: Ok(Answer::NothingToResume) }]
        );

        // During a backoff it starts at once, and the count is kept.
        story.end(0, code(1));
        let actions = story.say(Event::RestartAsked { ticket: 4, mode: Mode::Fresh });
        assert_eq!(actions, [Action::Start(Mode::Fresh)]);
        story.start();
        assert_eq!(story.session.restarts().crashes(story.now), 1);
    }

    #[test]
    fn a_stop_returns_the_exit_code_of_the_agent() {
        let mut story = Story::new(true);
        assert_eq!(story.say(Event::StopAsked { force: false }), [Action::Stop]);
        assert_eq!(story.say(Event::StopAsked { force: false }), []);
        assert_eq!(story.session.state(), "stopping");
        let refused = vec![Action::Answer { ticket: 1, result: Err(Refused::Stopping) }];
        assert_eq!(story.say(Event::RestartAsked { ticket: 1, mode: Mode::Fresh }), refused);
        assert_eq!(story.say(Event::StopAsked { force: true }), [Action::Kill]);
        assert_eq!(story.end(0, signal(9)).last(), Some(&Action::End(137)));

        let mut waiting = Story::new(true);
        waiting.say(Event::PromptShown);
        waiting.say(Event::RestartAsked { ticket: 1, mode: Mode::Fresh });
        let refused = Action::Answer { ticket: 1, result: Err(Refused::Stopping) };
        assert_eq!(waiting.say(Event::StopAsked { force: false }), [refused], "it is being stopped already");
        assert_eq!(waiting.end(0, code(0)).last(), Some(&Action::End(0)));
    }

    #[test]
    fn a_command_that_never_ran_is_not_started_again() {
        let mut session = Session::new(Policy::session(), 7, true);
        session.begin(Mode::Fresh);
        let failed = Event::StartFailed { why: "no program".into(), code: 127 };
        assert_eq!(session.handle(failed.clone(), birth()), [Action::End(127)]);

        let mut story = Story::new(true);
        story.ready_and_end(10, code(1));
        story.now = story.session.deadline().unwrap();
        story.say(Event::TimePassed);
        assert_eq!(class_of(&story.say(failed)), (Class::Transient, Some(2)), "it ran before");
    }

    #[test]
    fn a_flapping_agent_becomes_healthy_in_time() {
        let mut story = Story::new(true);
        for _ in 0..3 {
            story.ready_and_end(0, code(1));
            story.wait();
        }
        story.say(Event::PromptShown);
        assert_eq!(story.session.health(), Health::Degraded);
        story.now = story.session.deadline().unwrap();
        let healthy = Note::Health { from: Health::Degraded, to: Health::Healthy };
        assert_eq!(story.say(Event::TimePassed), [Action::Note(healthy)]);
        assert_eq!(story.session.deadline(), None);
    }
}
