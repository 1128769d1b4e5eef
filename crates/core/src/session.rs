//! One agent that a person works with, across its lives: when it is started again, how, and when nobody tries any more.
//!
//! Whoever drives a session starts, stops and listens to the agent; this decides. An end is told once, when the agent's
//! terminal was read dry and the process reaped.

use std::fmt;
use std::time::{Duration, Instant};

use crate::exit::{Cause, Exit, How, signal_name};
use crate::restarts::{Policy, Restarts, State as Health, Verdict};

/// A conversation that was taken up again counts as such once the agent has been ready for so long. Before that the
/// attempt is what broke it, and the next start begins a new conversation.
pub const RESUME_PROVEN: Duration = Duration::from_secs(5);

/// The question after a clean end is shown when no key was typed for so long: what a person was typing to the agent while
/// it ended is no answer.
pub const ASK_AFTER: Duration = Duration::from_millis(400);

/// With a conversation of its own, or with the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// The last thing that went to the agent before it ended, as far as it tells whose wish the end was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastInput {
    /// Ctrl-C, Ctrl-D or the agent's word for leaving, by a person at the terminal.
    Farewell,
    /// Anything else: other keys, what a program injected, or nothing at all.
    Other,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The mode is what came of the wish: there may have been no conversation to go on with.
    Started {
        pid: u32,
        mode: Mode,
    },
    /// No process came to be; the code is what a shell would say of it.
    StartFailed {
        why: String,
        code: u8,
    },
    /// It can be worked with.
    PromptShown,
    /// Read dry and reaped.
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
    /// The person at the terminal answered what `Action::Ask` asked.
    Chosen(Choice),
    /// A key was typed while there is no agent.
    KeyTyped,
    /// The terminal is gone: nobody is there to be asked.
    TerminalLost,
    /// Somebody is there.
    TerminalFound,
    /// It is busy by its own account, and has shown nothing for so long.
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
    /// Politely; `Event::Ended` follows.
    Stop,
    /// At once; `Event::Ended` follows.
    Kill,
    /// Politely, because it hangs; `Event::Ended` follows, and says so.
    StopHung(Duration),
    /// Ask the person at the terminal: once more, or not?
    Ask,
    Note(Note),
    Answer {
        ticket: u64,
        result: Result<Answer, Refused>,
    },
    /// It is over, with this exit code.
    End(u8),
}

/// What the logs should know.
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

/// What an end means for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Somebody had it stopped.
    Asked,
    /// It left in peace.
    Clean,
    /// The person at the terminal sent it away.
    User,
    Transient,
    Flapping,
    /// One failure too many.
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
    /// The new agent did not come to be.
    Failed(String),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Halted => f.write_str("it failed too often and is halted; only `resume` and `stop` reach it"),
            Refused::Stopping => f.write_str("outlast is stopping"),
            Refused::Failed(why) => write!(f, "the agent could not be started: {why}"),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Session {
    restarts: Restarts,
    /// Somebody is there who can be asked.
    has_terminal: bool,
    state: State,
    /// Those who wait for the next start.
    tickets: Vec<u64>,
    /// Whom that start replaces.
    old_pid: Option<u32>,
    next_mode: Mode,
    last_code: u8,
    last_exit: Option<How>,
    has_run: bool,
    health: Health,
}

#[derive(Clone, Debug)]
enum State {
    Starting {
        mode: Mode,
        asked: bool,
        wish: Option<Wish>,
    },
    Running {
        pid: u32,
        mode: Mode,
        since: Instant,
        ready: Option<Instant>,
        wish: Option<Wish>,
    },
    /// `ask_at`: the question is not shown yet, and this is when it will be.
    Asking {
        ask_at: Option<Instant>,
    },
    Waiting {
        at: Instant,
    },
    Halted,
    Over,
}

/// What is to come after the end that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Restart(Mode),
    End,
}

impl Session {
    /// `has_terminal`: there is somebody to ask after a clean end. Without one a clean end is the end.
    pub fn new(policy: Policy, seed: u64, has_terminal: bool) -> Session {
        Session {
            restarts: Restarts::new(policy, seed),
            has_terminal,
            state: State::Starting { mode: Mode::Fresh, asked: false, wish: None },
            tickets: Vec::new(),
            old_pid: None,
            next_mode: Mode::Fresh,
            last_code: 0,
            last_exit: None,
            has_run: false,
            health: Health::Healthy,
        }
    }

    /// The first start: fresh, or with the conversation of an earlier outlast. Said once, before any event.
    pub fn begin(&mut self, mode: Mode) -> Vec<Action> {
        self.state = State::Starting { mode, asked: false, wish: None };
        vec![Action::Start(mode)]
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
                if let State::Asking { ask_at: Some(ask_at) } = &mut self.state {
                    *ask_at = now + ASK_AFTER;
                }
            }
            Event::TerminalLost => self.terminal_lost(&mut actions),
            Event::TerminalFound => self.has_terminal = true,
            Event::Hung { silent_for } => {
                if let State::Running { wish: None, .. } = self.state {
                    actions.push(Action::StopHung(silent_for));
                }
            }
            Event::TimePassed => self.time_passed(now, &mut actions),
        }
        self.note_health(now, &mut actions);
        actions
    }

    /// When to say `TimePassed`.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Waiting { at } => Some(*at),
            State::Asking { ask_at } => *ask_at,
            // A flapping agent is called healthy again when it is, not when somebody next asks.
            State::Running { ready: Some(ready), .. } if self.health != Health::Healthy => {
                Some(*ready + self.restarts.policy().healthy)
            }
            _ => None,
        }
    }

    /// One word for people and programs.
    pub fn state(&self) -> &'static str {
        match &self.state {
            State::Starting { wish: None, .. } => "starting",
            State::Running { wish: None, ready: None, .. } => "starting",
            State::Running { wish: None, .. } => "ready",
            State::Starting { wish: Some(Wish::Restart(_)), .. }
            | State::Running { wish: Some(Wish::Restart(_)), .. } => "restarting",
            State::Starting { .. } | State::Running { .. } | State::Over => "stopping",
            State::Asking { .. } => "exited",
            State::Waiting { .. } => "backoff",
            State::Halted => "halted",
        }
    }

    pub fn health(&self) -> Health {
        self.health
    }

    pub fn pid(&self) -> Option<u32> {
        match self.state {
            State::Running { pid, .. } => Some(pid),
            _ => None,
        }
    }

    /// The question is shown, and a key may answer it.
    pub fn is_asking(&self) -> bool {
        matches!(self.state, State::Asking { ask_at: None })
    }

    /// The question is about to be shown; a key that is typed now was meant for the agent.
    pub fn is_about_to_ask(&self) -> bool {
        matches!(self.state, State::Asking { ask_at: Some(_) })
    }

    pub fn uptime(&self, now: Instant) -> Option<Duration> {
        match self.state {
            State::Running { since, .. } => Some(now.saturating_duration_since(since)),
            _ => None,
        }
    }

    pub fn next_try(&self, now: Instant) -> Option<Duration> {
        match self.state {
            State::Waiting { at } => Some(at.saturating_duration_since(now)),
            _ => None,
        }
    }

    pub fn last_exit(&self) -> Option<&How> {
        self.last_exit.as_ref()
    }

    /// What the policy remembers: restarts, crashes, the last endings.
    pub fn restarts(&self) -> &Restarts {
        &self.restarts
    }

    fn started(&mut self, pid: u32, mode: Mode, now: Instant, actions: &mut Vec<Action>) {
        let State::Starting { asked, wish, .. } = self.state else { return };
        self.has_run = true;
        if asked {
            self.restarts.replaced(now);
        } else {
            self.restarts.child_started(now);
        }
        self.state = State::Running { pid, mode, since: now, ready: None, wish };
        // Who asked for a restart of one that is to be replaced again waits for that one.
        if wish.is_none() {
            let old_pid = self.old_pid.take();
            for ticket in std::mem::take(&mut self.tickets) {
                actions.push(Action::Answer { ticket, result: Ok(Answer::Started { old_pid, pid, mode }) });
            }
        }
    }

    fn start_failed(&mut self, why: String, code: u8, now: Instant, actions: &mut Vec<Action>) {
        let State::Starting { wish, .. } = self.state else { return };
        self.refuse_waiting(&Refused::Failed(why.clone()), actions);
        if !self.has_run || wish == Some(Wish::End) {
            // A command that never ran is a mistake of whoever typed it, and waiting does not mend that.
            return self.end(code, actions);
        }
        self.last_code = code;
        self.buried(How::CouldNotStart(why), None, LastInput::Other, now, actions);
    }

    fn prompt_shown(&mut self, now: Instant) {
        if let State::Running { ready: ready @ None, .. } = &mut self.state {
            *ready = Some(now);
            self.restarts.child_ready(now);
        }
    }

    fn ended(&mut self, how: How, last_input: LastInput, now: Instant, actions: &mut Vec<Action>) {
        let State::Running { pid, .. } = self.state else { return };
        self.last_code = code_of(&how);
        self.buried(how, Some(pid), last_input, now, actions);
    }

    /// What an end means, and what comes after it.
    fn buried(&mut self, how: How, pid: Option<u32>, last: LastInput, now: Instant, actions: &mut Vec<Action>) {
        let (mode, since, ready, wish) = match self.state {
            State::Starting { mode, wish, .. } => (mode, now, None, wish),
            State::Running { mode, since, ready, wish, .. } => (mode, since, ready, wish),
            _ => return,
        };
        self.last_exit = Some(how.clone());
        let (cause, whose) = classify(&how, wish.is_some(), ready.is_some(), last);
        let verdict = self.restarts.child_ended(cause, how.clone(), now);
        self.next_mode = mode_after(mode, ready.map(|ready| now.saturating_duration_since(ready)), cause);
        let (class, delay) = match &verdict {
            Verdict::Left => (whose, None),
            Verdict::GiveUp { .. } => (Class::Halted, None),
            Verdict::StartAt { delay, .. } => match self.restarts.state(now) {
                Health::Degraded => (Class::Flapping, Some(*delay)),
                _ => (Class::Transient, Some(*delay)),
            },
        };
        let uptime = now.saturating_duration_since(since);
        let crashes = self.restarts.crashes(now);
        actions.push(Action::Note(Note::Ended { how, class, mode, pid, uptime, crashes, delay }));
        match (wish, verdict) {
            (Some(Wish::End), _) => self.end(self.last_code, actions),
            (Some(Wish::Restart(mode)), _) => {
                self.old_pid = self.old_pid.or(pid);
                self.start(mode, true, actions);
            }
            (None, Verdict::StartAt { at, .. }) => self.state = State::Waiting { at },
            (None, Verdict::GiveUp { .. }) => self.state = State::Halted,
            (None, Verdict::Left) if self.has_terminal => {
                self.state = State::Asking { ask_at: Some(now + ASK_AFTER) };
            }
            (None, Verdict::Left) => self.end(self.last_code, actions),
        }
    }

    fn restart_asked(&mut self, ticket: u64, mode: Mode, actions: &mut Vec<Action>) {
        match &mut self.state {
            State::Over
            | State::Starting { wish: Some(Wish::End), .. }
            | State::Running { wish: Some(Wish::End), .. } => {
                actions.push(Action::Answer { ticket, result: Err(Refused::Stopping) });
            }
            State::Halted => actions.push(Action::Answer { ticket, result: Err(Refused::Halted) }),
            State::Starting { wish, .. } | State::Running { wish, .. } => {
                self.tickets.push(ticket);
                // One stop is enough for all who ask; the last one's mode holds.
                if wish.replace(Wish::Restart(mode)).is_none() {
                    actions.push(Action::Stop);
                }
            }
            State::Asking { .. } | State::Waiting { .. } => {
                self.tickets.push(ticket);
                self.start(mode, true, actions);
            }
        }
    }

    fn resume_asked(&mut self, ticket: u64, actions: &mut Vec<Action>) {
        match self.state {
            State::Halted | State::Waiting { .. } => {
                self.restarts.resumed();
                self.tickets.push(ticket);
                self.start(self.next_mode, true, actions);
            }
            _ => actions.push(Action::Answer { ticket, result: Ok(Answer::NothingToResume) }),
        }
    }

    fn stop_asked(&mut self, force: bool, actions: &mut Vec<Action>) {
        match &mut self.state {
            State::Over => {}
            State::Starting { wish, .. } | State::Running { wish, .. } => {
                let before = wish.replace(Wish::End);
                self.refuse_waiting(&Refused::Stopping, actions);
                match (force, before) {
                    (true, _) => actions.push(Action::Kill),
                    (false, None) => actions.push(Action::Stop),
                    (false, Some(_)) => {}
                }
            }
            State::Asking { .. } | State::Waiting { .. } | State::Halted => self.end(self.last_code, actions),
        }
    }

    fn chosen(&mut self, choice: Choice, actions: &mut Vec<Action>) {
        if !self.is_asking() {
            return;
        }
        match choice {
            // There may be nothing to take up again.
            Choice::Start(Mode::Continue) => self.start(self.next_mode, true, actions),
            Choice::Start(Mode::Fresh) => self.start(Mode::Fresh, true, actions),
            Choice::Quit => self.end(self.last_code, actions),
        }
    }

    fn terminal_lost(&mut self, actions: &mut Vec<Action>) {
        self.has_terminal = false;
        if matches!(self.state, State::Asking { .. }) {
            self.end(self.last_code, actions);
        }
    }

    fn time_passed(&mut self, now: Instant, actions: &mut Vec<Action>) {
        match self.state {
            State::Waiting { at } if at <= now => self.start(self.next_mode, false, actions),
            State::Asking { ask_at: Some(at) } if at <= now => {
                self.state = State::Asking { ask_at: None };
                actions.push(Action::Ask);
            }
            _ => {}
        }
    }

    fn start(&mut self, mode: Mode, asked: bool, actions: &mut Vec<Action>) {
        self.state = State::Starting { mode, asked, wish: None };
        actions.push(Action::Start(mode));
    }

    fn end(&mut self, code: u8, actions: &mut Vec<Action>) {
        self.refuse_waiting(&Refused::Stopping, actions);
        self.state = State::Over;
        actions.push(Action::End(code));
    }

    fn refuse_waiting(&mut self, why: &Refused, actions: &mut Vec<Action>) {
        self.old_pid = None;
        for ticket in std::mem::take(&mut self.tickets) {
            actions.push(Action::Answer { ticket, result: Err(why.clone()) });
        }
    }

    fn note_health(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let health = self.restarts.state(now);
        let from = std::mem::replace(&mut self.health, health);
        if from != health {
            // What an act announces stands before it in the log.
            let at = actions.iter().position(|action| !matches!(action, Action::Note(_))).unwrap_or(actions.len());
            actions.insert(at, Action::Note(Note::Health { from, to: health }));
        }
    }
}

/// What an end means to the policy, and whose wish it was if it was one.
fn classify(how: &How, asked: bool, was_ready: bool, last: LastInput) -> (Cause, Class) {
    match how {
        _ if asked => (Cause::Asked, Class::Asked),
        How::CouldNotStart(_) => (Cause::NeverReady, Class::Transient),
        How::Hung(_) => (Cause::Crashed, Class::Transient),
        _ if last == LastInput::Farewell && !is_violent(how) => (Cause::Clean, Class::User),
        // An agent that leaves in peace before it showed a prompt did not start at all.
        _ if !was_ready => (Cause::NeverReady, Class::Transient),
        How::Exited(Exit::Code(0)) => (Cause::Clean, Class::Clean),
        _ => (Cause::Crashed, Class::Transient),
    }
}

/// No key does this to a program, whatever was pressed before.
fn is_violent(how: &How) -> bool {
    const VIOLENT: [&str; 6] = ["SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"];
    let signal = match how.exit() {
        Some(Exit::Signal(signal)) => signal_name(*signal),
        _ => None,
    };
    signal.is_some_and(|signal| VIOLENT.contains(&signal))
}

/// With which conversation the next agent begins, if nobody says otherwise.
fn mode_after(mode: Mode, ready_for: Option<Duration>, cause: Cause) -> Mode {
    let is_failure = matches!(cause, Cause::Crashed | Cause::NeverReady);
    match (mode, ready_for) {
        // It never got as far as to have one.
        (Mode::Fresh, None) => Mode::Fresh,
        (Mode::Fresh, Some(_)) => Mode::Continue,
        // To take it up again is what failed, and would fail again.
        (Mode::Continue, None) if is_failure => Mode::Fresh,
        (Mode::Continue, Some(ready_for)) if is_failure && ready_for < RESUME_PROVEN => Mode::Fresh,
        (Mode::Continue, _) => Mode::Continue,
    }
}

/// As a shell has it.
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

    /// A session, its clock, and agents that end as told.
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
            let State::Starting { mode, .. } = self.session.state else { panic!("nothing is being started") };
            self.say(Event::Started { pid, mode })
        }

        /// The agent shows its prompt, lives on for so long, and ends.
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
    fn an_end_means() {
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
            (signal(2),                          false, true,  Farewell, Cause::Clean,      Class::User),
            (code(130),                          false, true,  Farewell, Cause::Clean,      Class::User),
            (code(0),                            false, true,  Farewell, Cause::Clean,      Class::User),
            (code(0),                            false, false, Farewell, Cause::Clean,      Class::User),
            (signal(9),                          false, true,  Farewell, Cause::Crashed,    Class::Transient),
            (signal(11),                         false, false, Farewell, Cause::NeverReady, Class::Transient),
            (code(1),                            true,  true,  Other,    Cause::Asked,      Class::Asked),
            (signal(9),                          true,  false, Farewell, Cause::Asked,      Class::Asked),
            (How::CouldNotStart("no".into()),    false, false, Farewell, Cause::NeverReady, Class::Transient),
        ];
        for (how, asked, ready, last, cause, class) in table {
            assert_eq!(classify(&how, asked, ready, last), (cause, class), "{how}, asked {asked}, ready {ready}");
        }
    }

    #[test]
    fn the_next_conversation_is() {
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
    fn failures_are_answered_by_patience_and_the_fifth_by_a_halt() {
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
    fn halted_hears_only_resume_and_stop() {
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
    fn a_clean_end_asks_who_is_there_and_is_the_end_where_nobody_is() {
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
    fn who_sends_the_agent_away_did_not_see_a_crash() {
        let mut story = Story::new(true);
        story.say(Event::PromptShown);
        let actions = story.say(Event::Ended { how: signal(2), last_input: LastInput::Farewell });
        assert_eq!(class_of(&actions).0, Class::User);
        story.be_asked();
        assert_eq!(story.say(Event::Chosen(Choice::Quit)), [Action::End(130)]);
    }

    #[test]
    fn keys_typed_while_the_agent_ends_do_not_answer_the_question() {
        let mut story = Story::new(true);
        story.ready_and_end(10, code(0));
        // The rest of what a person was typing: none of it counts, and each key puts the question off.
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
        // What others ask for does not wait for the question.
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
    fn a_conversation_that_had_to_begin_anew_was_not_taken_up() {
        let mut story = Story::new(true);
        story.ready_and_end(10, code(1));
        story.now = story.session.deadline().unwrap();
        assert_eq!(story.say(Event::TimePassed), [Action::Start(Mode::Continue)]);
        story.say(Event::Started { pid: 2, mode: Mode::Fresh });
        story.ready_and_end(1, signal(9));
        assert_eq!(story.wait(), Mode::Continue, "no attempt to take it up has failed");
    }

    #[test]
    fn a_restart_stops_the_agent_once_and_answers_all_who_asked() {
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

        // In a backoff it is at once, and the count is kept.
        story.end(0, code(1));
        let actions = story.say(Event::RestartAsked { ticket: 4, mode: Mode::Fresh });
        assert_eq!(actions, [Action::Start(Mode::Fresh)]);
        story.start();
        assert_eq!(story.session.restarts().crashes(story.now), 1);
    }

    #[test]
    fn a_stop_ends_with_the_agents_code() {
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
    fn a_command_that_never_ran_is_not_tried_again() {
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
    fn a_flapping_agent_is_called_healthy_when_it_is() {
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
