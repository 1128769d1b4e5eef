//! Whether an agent waits for a person, whether it hangs, and the requests that wait for one of these.
//!
//! The state is read from the agent's window, and counts only when two looks agree: between two frames of an
//! animation a busy agent may look idle. While its hooks report a running turn, or where its window could not show
//! that it works, it must have been quiet as well. An agent whose screen is not known waits when it has been quiet
//! for a while.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::stance::{Sight, Stance};

mod saved;

pub use saved::Saved;

/// From the first output to the first look.
pub const LOOK_AFTER: Duration = Duration::from_millis(300);
/// From the first look to the second.
pub const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// An agent whose screen is not known has finished its turn when it has been quiet for this long.
pub const QUIET: Duration = Duration::from_secs(2);
/// Output that follows a key other than Enter within this time is its echo.
pub const ECHO: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    AgentStarted,
    AgentEnded,
    /// The agent wrote output.
    Output,
    /// Input was typed or injected. `enter`: it ends a line.
    Input {
        enter: bool,
    },
    /// The result of `Action::Look`.
    Looked {
        sight: Sight,
        is_cursor_visible: bool,
    },
    /// The agent's hooks report that a turn was submitted.
    TurnBegan,
    /// The agent's hooks report that the turn ended.
    TurnEnded,
    /// The answer to `Action::TurnEnded` is known.
    AnswerKnown,
    Asked {
        ticket: u64,
        condition: Condition,
        timeout: Option<Duration>,
    },
    /// No agent is started again before a `resume`.
    GaveUp,
    TimePassed,
}

/// What a request waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Condition {
    /// This text is on the screen. The driver reports the screen with `Waiting::seen`.
    Text(String),
    /// No output and no input for this long.
    Quiet(Duration),
    /// The agent waits for input.
    Prompt,
    /// The turn that was submitted last is over.
    Turn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Met,
    TimedOut,
    /// No agent runs any more.
    GaveUp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Look at the screen, and report `Looked`.
    Look,
    Answer {
        ticket: u64,
        outcome: Outcome,
    },
    /// The agent began or ceased to wait for a person; the stance tells for what.
    Changed {
        is_waiting: bool,
        stance: Stance,
    },
    /// A turn is over: look up the answer, and report `AnswerKnown`. `is_reported`: a hook reported its beginning or its
    /// end; otherwise only the window shows it.
    TurnEnded {
        is_reported: bool,
    },
    /// The agent reports that it is busy, and has been silent for this long.
    Hung {
        silent_for: Duration,
    },
}

#[derive(Clone, Debug)]
pub struct Waiting {
    /// The agent's screen is known.
    reads_screen: bool,
    hang_after: Option<Duration>,
    is_running: bool,
    has_written: bool,
    last_output: Instant,
    last_input: Option<(Instant, bool)>,
    look_at: Option<Instant>,
    /// The result of the first of two looks.
    candidate: Option<(Stance, Instant)>,
    /// The state that two looks confirmed.
    stance: Stance,
    is_waiting: bool,
    /// Two looks agreed since the last input.
    is_settled: bool,
    /// The agent's hooks reported the beginning of a turn, and not its end. A turn that a person interrupts has no
    /// end event, so this alone is no proof.
    is_in_turn: bool,
    /// The hooks of the running agent have reported a turn.
    has_reports: bool,
    /// Enter was typed, and the agent has not been seen to wait since.
    has_entered: bool,
    has_hung: bool,
    turn: Turn,
    waiters: Vec<Waiter>,
}

/// The turn that was submitted last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Turn {
    /// There was none yet, or the agent ended during it.
    None,
    /// Enter was typed, or a sign of work was seen. `is_sure`: a hook reported it. `was_over`: the turn before it was.
    Open {
        is_sure: bool,
        was_over: bool,
    },
    /// It is over, and its answer is not known yet.
    Ending,
    Over,
}

#[derive(Clone, Debug)]
struct Waiter {
    ticket: u64,
    condition: Condition,
    until: Option<Instant>,
}

impl Waiting {
    pub fn new(reads_screen: bool, hang_after: Option<Duration>, now: Instant) -> Waiting {
        Waiting {
            reads_screen,
            hang_after,
            is_running: false,
            has_written: false,
            last_output: now,
            last_input: None,
            look_at: None,
            candidate: None,
            stance: Stance::Unclear,
            is_waiting: false,
            is_settled: false,
            is_in_turn: false,
            has_reports: false,
            has_entered: false,
            has_hung: false,
            turn: Turn::None,
            waiters: Vec::new(),
        }
    }

    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::AgentStarted => {
                self.is_running = true;
                self.has_written = false;
                self.has_hung = false;
                self.is_in_turn = false;
                self.has_reports = false;
                self.last_output = now;
                self.doubt(None);
            }
            Event::AgentEnded => {
                self.is_running = false;
                self.is_in_turn = false;
                if self.turn != Turn::Over {
                    self.turn = Turn::None;
                }
                self.doubt(None);
                self.believe(Stance::Unclear, false, &mut actions);
            }
            Event::Output => self.output(now, &mut actions),
            Event::Input { enter } => {
                self.last_input = Some((now, enter));
                self.has_entered |= enter;
                if enter && self.is_running {
                    self.open_turn(false);
                }
                let after = if self.reads_screen { LOOK_AFTER } else { QUIET };
                self.doubt(self.is_running.then_some(now + after));
            }
            Event::Looked { sight, is_cursor_visible } => self.looked(sight, is_cursor_visible, now, &mut actions),
            Event::TurnBegan => {
                self.open_turn(true);
                self.is_in_turn = true;
                self.has_reports = true;
                if self.is_running {
                    let (after, stance) = match self.reads_screen {
                        true => (LOOK_AFTER, Stance::Busy),
                        false => (QUIET, Stance::Unclear),
                    };
                    self.doubt(Some(now + after));
                    self.believe(stance, false, &mut actions);
                }
            }
            Event::TurnEnded => {
                self.is_in_turn = false;
                self.has_reports = true;
                self.turn = Turn::Ending;
                actions.push(Action::TurnEnded { is_reported: true });
                if self.is_running && self.reads_screen {
                    self.look_at.get_or_insert(now + LOOK_AFTER);
                }
            }
            Event::AnswerKnown => {
                if self.turn == Turn::Ending {
                    self.turn = Turn::Over;
                }
            }
            Event::Asked { ticket, condition, timeout } => {
                let until = timeout.and_then(|timeout| now.checked_add(timeout));
                self.waiters.push(Waiter { ticket, condition, until });
            }
            Event::GaveUp => {
                let all = std::mem::take(&mut self.waiters).into_iter();
                actions.extend(all.map(|waiter| Action::Answer { ticket: waiter.ticket, outcome: Outcome::GaveUp }));
            }
            Event::TimePassed => {}
        }
        self.pass_time(now, &mut actions);
        actions
    }

    /// When the driver must report `TimePassed`.
    pub fn deadline(&self) -> Option<Instant> {
        let waiters = self.waiters.iter().flat_map(|waiter| {
            let quiet = match waiter.condition {
                Condition::Quiet(quiet) => self.last_news().checked_add(quiet),
                Condition::Text(_) | Condition::Prompt | Condition::Turn => None,
            };
            [quiet, waiter.until].into_iter().flatten()
        });
        [self.look_at, self.hangs_at()].into_iter().flatten().chain(waiters).min()
    }

    pub fn is_waiting(&self) -> bool {
        self.is_waiting
    }

    /// A turn runs, as far as its hooks, its window or its input tell.
    pub fn is_at_work(&self) -> bool {
        let has_begun = self.is_in_turn || self.stance == Stance::Busy || self.has_entered;
        self.is_running && !self.is_waiting && has_begun
    }

    pub fn stance(&self) -> Stance {
        self.stance
    }

    pub fn count(&self) -> usize {
        self.waiters.len()
    }

    /// Removes the requests of clients that are gone.
    pub fn keep_only(&mut self, is_there: impl Fn(u64) -> bool) {
        self.waiters.retain(|waiter| is_there(waiter.ticket));
    }

    /// Whether the screen must be reported after each output, so that no text is missed.
    pub fn wants_text(&self) -> bool {
        self.waiters.iter().any(|waiter| matches!(waiter.condition, Condition::Text(_)))
    }

    /// The screen shows this text.
    pub fn seen(&mut self, text: &str) -> Vec<Action> {
        self.answer_if(|waiter| match &waiter.condition {
            Condition::Text(wanted) if text.contains(wanted.as_str()) => Some(Outcome::Met),
            _ => None,
        })
    }

    fn output(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.has_written = true;
        self.last_output = now;
        if self.reads_screen {
            // Later output does not postpone it: an animation must not prevent the look.
            self.look_at.get_or_insert(now + LOOK_AFTER);
            return;
        }
        self.look_at = Some(now + QUIET);
        let is_echo = self.last_input.is_some_and(|(at, enter)| !enter && now.saturating_duration_since(at) <= ECHO);
        if !is_echo {
            self.is_settled = false;
            self.believe(Stance::Unclear, false, actions);
        }
    }

    fn looked(&mut self, sight: Sight, is_cursor_visible: bool, now: Instant, actions: &mut Vec<Action>) {
        let Sight { stance, is_sure } = sight;
        if !self.is_running {
            return;
        }
        if !self.reads_screen {
            let is_quiet = self.last_output + QUIET <= now;
            let is_waiting = self.has_written && is_quiet && is_cursor_visible;
            self.is_settled = is_waiting;
            if is_waiting {
                self.turn_is_over(actions);
            }
            return self.believe(Stance::Unclear, is_waiting, actions);
        }
        if !stance.wants_input() {
            self.candidate = None;
            self.is_settled = false;
            // Where hooks report turns, a window that still shows work opens none.
            if stance == Stance::Busy && !self.has_reports {
                self.open_turn(false);
            }
            return self.believe(stance, false, actions);
        }
        let is_doubtful = stance == Stance::Prompt && (self.is_in_turn || !(is_sure || self.has_reports));
        let quiet_at = self.last_output + QUIET;
        match self.candidate {
            Some((first, at)) if first == stance && is_doubtful && at + LOOK_AGAIN <= now && now < quiet_at => {
                self.look_at = Some(quiet_at);
                // Output continues after a submitted text: the agent may be at work.
                if self.has_entered && !self.is_in_turn {
                    self.believe(Stance::Unclear, false, actions);
                }
            }
            Some((first, at)) if first == stance && at + LOOK_AGAIN <= now => {
                self.is_settled = true;
                self.has_entered = false;
                if stance == Stance::Prompt {
                    self.turn_is_over(actions);
                }
                self.believe(stance, true, actions);
            }
            Some((first, at)) if first == stance => self.look_at = Some(at + LOOK_AGAIN),
            _ => {
                self.is_settled = false;
                self.candidate = Some((stance, now));
                self.look_at = Some(now + LOOK_AGAIN);
            }
        }
    }

    fn doubt(&mut self, look_at: Option<Instant>) {
        self.candidate = None;
        self.is_settled = false;
        self.look_at = look_at;
    }

    /// The window shows that the agent waits again.
    fn turn_is_over(&mut self, actions: &mut Vec<Action>) {
        match self.turn {
            // Enter was typed, and the hooks reported no turn: it did something else.
            Turn::Open { is_sure: false, was_over } if self.has_reports => {
                self.turn = if was_over { Turn::Over } else { Turn::None };
            }
            Turn::Open { is_sure, .. } => {
                self.turn = Turn::Ending;
                actions.push(Action::TurnEnded { is_reported: is_sure });
            }
            Turn::None | Turn::Ending | Turn::Over => {}
        }
    }

    fn open_turn(&mut self, is_sure: bool) {
        self.turn = match self.turn {
            Turn::Open { is_sure: before, was_over } => Turn::Open { is_sure: before || is_sure, was_over },
            Turn::None => Turn::Open { is_sure, was_over: false },
            Turn::Ending | Turn::Over => Turn::Open { is_sure, was_over: true },
        };
    }

    fn believe(&mut self, stance: Stance, is_waiting: bool, actions: &mut Vec<Action>) {
        let is_news = self.is_waiting != is_waiting || (is_waiting && self.stance != stance);
        self.stance = stance;
        self.is_waiting = is_waiting;
        if is_news {
            actions.push(Action::Changed { is_waiting, stance });
        }
    }

    fn pass_time(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.look_at.is_some_and(|at| at <= now) {
            self.look_at = None;
            actions.push(Action::Look);
        }
        if self.hangs_at().is_some_and(|at| at <= now) {
            self.has_hung = true;
            actions.push(Action::Hung { silent_for: now.saturating_duration_since(self.last_output) });
        }
        let (last_news, is_there) = (self.last_news(), self.is_waiting && self.is_settled);
        let is_turn_over = self.turn == Turn::Over;
        actions.extend(self.answer_if(|waiter| match waiter.condition {
            Condition::Quiet(quiet) if last_news.checked_add(quiet).is_some_and(|at| at <= now) => Some(Outcome::Met),
            Condition::Prompt if is_there => Some(Outcome::Met),
            Condition::Turn if is_turn_over => Some(Outcome::Met),
            _ => waiter.until.filter(|until| *until <= now).map(|_| Outcome::TimedOut),
        }));
    }

    fn hangs_at(&self) -> Option<Instant> {
        // The last look counts, and it must be newer than the last change.
        let is_seen = self.candidate.is_none() && self.look_at.is_none();
        let is_busy = self.is_running && self.stance == Stance::Busy && is_seen && !self.has_hung;
        self.hang_after.filter(|_| is_busy).and_then(|after| self.last_output.checked_add(after))
    }

    fn last_news(&self) -> Instant {
        self.last_input.map_or(self.last_output, |(at, _)| at.max(self.last_output))
    }

    fn answer_if(&mut self, outcome: impl Fn(&Waiter) -> Option<Outcome>) -> Vec<Action> {
        let mut actions = Vec::new();
        self.waiters.retain(|waiter| match outcome(waiter) {
            Some(outcome) => {
                actions.push(Action::Answer { ticket: waiter.ticket, outcome });
                false
            }
            None => true,
        });
        actions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "a test needs some instant to count from")]
    fn birth() -> Instant {
        Instant::now()
    }

    /// A known agent that has started, and what its screen shows.
    struct Scene {
        now: Instant,
        waiting: Waiting,
        screen: Stance,
        is_sure: bool,
        cursor: bool,
        /// The turns that ended, and whether hooks reported them.
        ends: Vec<bool>,
    }

    impl Scene {
        fn new(reads_screen: bool, hang_after: Option<Duration>) -> Scene {
            let now = birth();
            let waiting = Waiting::new(reads_screen, hang_after, now);
            let mut scene =
                Scene { now, waiting, screen: Stance::Unclear, is_sure: true, cursor: true, ends: Vec::new() };
            scene.tell(Event::AgentStarted);
            scene
        }

        /// The resulting actions without the looks, which are carried out here, and the ends of turns, which are kept.
        fn tell(&mut self, event: Event) -> Vec<Action> {
            let mut open = self.waiting.handle(event, self.now);
            let mut done = Vec::new();
            while !open.is_empty() {
                let action = open.remove(0);
                if action == Action::Look {
                    let sight = Sight { stance: self.screen, is_sure: self.is_sure };
                    let looked = Event::Looked { sight, is_cursor_visible: self.cursor };
                    open.extend(self.waiting.handle(looked, self.now));
                } else if let Action::TurnEnded { is_reported } = action {
                    self.ends.push(is_reported);
                } else {
                    done.push(action);
                }
            }
            done
        }

        fn shows(&mut self, stance: Stance) -> Vec<Action> {
            self.screen = stance;
            self.tell(Event::Output)
        }

        /// Time passes, with a stop at each deadline.
        fn wait(&mut self, time: Duration) -> Vec<Action> {
            let end = self.now + time;
            let mut done = Vec::new();
            while let Some(at) = self.waiting.deadline().filter(|at| *at <= end) {
                self.now = self.now.max(at);
                done.extend(self.tell(Event::TimePassed));
            }
            self.now = end;
            done
        }

        fn asks(&mut self, ticket: u64, condition: Condition, timeout: Option<u64>) -> Vec<Action> {
            self.tell(Event::Asked { ticket, condition, timeout: timeout.map(Duration::from_secs) })
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    fn changed(is_waiting: bool, stance: Stance) -> Action {
        Action::Changed { is_waiting, stance }
    }

    fn met(ticket: u64) -> Action {
        Action::Answer { ticket, outcome: Outcome::Met }
    }

    #[test]
    fn two_observations_must_agree() {
        let mut scene = Scene::new(true, None);
        assert_eq!(scene.shows(Stance::Prompt), []);
        assert_eq!(scene.wait(LOOK_AFTER), []);
        // Busy in between: the first look fell between two frames.
        assert_eq!(scene.shows(Stance::Busy), []);
        assert_eq!(scene.wait(SECOND), []);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(LOOK_AFTER + LOOK_AGAIN), [changed(true, Stance::Prompt)]);
        // A dialog waits for another kind of input.
        scene.shows(Stance::Dialog);
        assert_eq!(scene.wait(SECOND), [changed(true, Stance::Dialog)]);
        scene.shows(Stance::Busy);
        assert_eq!(scene.wait(SECOND), [changed(false, Stance::Busy)]);
        scene.shows(Stance::Prompt);
        scene.wait(SECOND);
        assert_eq!(scene.tell(Event::AgentEnded), [changed(false, Stance::Unclear)]);
        assert_eq!(scene.waiting.deadline(), None);
    }

    #[test]
    fn while_a_turn_runs_a_prompt_counts_only_after_quiet() {
        let mut scene = Scene::new(true, None);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(SECOND), [changed(true, Stance::Prompt)]);
        assert_eq!(scene.tell(Event::TurnBegan), [changed(false, Stance::Busy)]);
        scene.shows(Stance::Busy);
        assert_eq!(scene.wait(SECOND), []);
        // It looks idle and continues writing: the turn is not over.
        for _ in 0..10 {
            scene.shows(Stance::Prompt);
            assert_eq!(scene.wait(SECOND), []);
        }
        scene.tell(Event::TurnEnded);
        assert_eq!(scene.wait(SECOND), [changed(true, Stance::Prompt)]);
        // An interrupted turn has no end event.
        scene.tell(Event::TurnBegan);
        scene.shows(Stance::Busy);
        scene.wait(SECOND);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(QUIET - Duration::from_millis(1)), []);
        assert_eq!(scene.wait(SECOND), [changed(true, Stance::Prompt)]);
        // A dialog appears during a turn.
        scene.shows(Stance::Dialog);
        assert_eq!(scene.wait(SECOND), [changed(true, Stance::Dialog)]);
    }

    #[test]
    fn a_window_that_cannot_show_work_is_believed_after_quiet() {
        let mut scene = Scene::new(true, Some(SECOND));
        scene.is_sure = false;
        for _ in 0..10 {
            scene.shows(Stance::Prompt);
            assert_eq!(scene.wait(SECOND), []);
        }
        assert_eq!(scene.wait(QUIET), [changed(true, Stance::Prompt)]);
        assert_eq!(scene.wait(100 * SECOND), [], "one that looks idle never hangs");
        // Nor before it counts as idle.
        scene.shows(Stance::Busy);
        assert_eq!(scene.wait(SECOND / 2), [changed(false, Stance::Busy)]);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(100 * SECOND), [changed(true, Stance::Prompt)]);
        // The submitted text is answered without a sign of work.
        scene.tell(Event::Input { enter: true });
        let mut seen = Vec::new();
        for _ in 0..10 {
            scene.shows(Stance::Prompt);
            seen.extend(scene.wait(SECOND));
        }
        assert_eq!(seen, [changed(false, Stance::Unclear)]);
        assert_eq!(scene.wait(100 * SECOND), [changed(true, Stance::Prompt)]);
    }

    #[test]
    fn an_animation_does_not_prevent_an_observation() {
        let mut scene = Scene::new(true, None);
        let mut done = Vec::new();
        for _ in 0..20 {
            scene.shows(Stance::Prompt);
            done.extend(scene.wait(Duration::from_millis(80)));
        }
        assert_eq!(done, [changed(true, Stance::Prompt)]);
    }

    #[test]
    fn typing_does_not_change_the_state_and_a_wait_for_the_prompt_waits_for_the_next_prompt() {
        let mut scene = Scene::new(true, None);
        scene.shows(Stance::Prompt);
        scene.wait(SECOND);
        assert_eq!(scene.asks(1, Condition::Prompt, None), [met(1)]);
        // What was just sent has not been seen yet.
        assert_eq!(scene.tell(Event::Input { enter: true }), []);
        assert_eq!(scene.asks(2, Condition::Prompt, None), []);
        assert_eq!(scene.wait(Duration::from_millis(100)), []);
        scene.shows(Stance::Busy);
        assert_eq!(scene.wait(10 * SECOND), [changed(false, Stance::Busy)]);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(SECOND), [changed(true, Stance::Prompt), met(2)]);
        // A key that changes nothing causes no event.
        assert_eq!(scene.tell(Event::Input { enter: false }), []);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(SECOND), []);
        assert_eq!(scene.asks(3, Condition::Prompt, None), [met(3)]);
    }

    #[test]
    fn an_unknown_agent_waits_when_it_has_been_quiet() {
        let mut scene = Scene::new(false, None);
        assert_eq!(scene.wait(10 * SECOND), [], "it has shown nothing yet");
        scene.tell(Event::Output);
        assert_eq!(scene.wait(QUIET - Duration::from_millis(1)), []);
        scene.tell(Event::Output);
        assert_eq!(scene.wait(QUIET), [changed(true, Stance::Unclear)]);
        // The echo of a key is no work.
        scene.tell(Event::Input { enter: false });
        assert_eq!(scene.tell(Event::Output), []);
        assert_eq!(scene.wait(10 * SECOND), []);
        scene.tell(Event::Input { enter: true });
        assert_eq!(scene.tell(Event::Output), [changed(false, Stance::Unclear)]);
        scene.cursor = false;
        assert_eq!(scene.wait(10 * SECOND), [], "a hidden cursor is no prompt");
        scene.cursor = true;
        scene.tell(Event::Output);
        assert_eq!(scene.wait(QUIET), [changed(true, Stance::Unclear)]);
    }

    #[test]
    fn a_turn_is_over_when_hooks_or_the_window_say_so() {
        let mut scene = Scene::new(true, None);
        assert_eq!(scene.asks(1, Condition::Turn, None), []);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(10 * SECOND), [changed(true, Stance::Prompt)], "no turn was submitted");
        // By the window: busy, then the prompt.
        scene.tell(Event::Input { enter: true });
        scene.shows(Stance::Busy);
        scene.wait(SECOND);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(10 * SECOND), [changed(true, Stance::Prompt)], "the answer is not known yet");
        assert_eq!(std::mem::take(&mut scene.ends), [false]);
        assert_eq!(scene.tell(Event::AnswerKnown), [met(1)]);
        assert_eq!(scene.asks(2, Condition::Turn, None), [met(2)], "the last turn is over");
        // By a hook, and the window shows work for a moment longer.
        scene.tell(Event::Input { enter: true });
        assert_eq!(scene.asks(3, Condition::Turn, None), []);
        scene.tell(Event::TurnBegan);
        scene.tell(Event::TurnEnded);
        assert_eq!(scene.tell(Event::AnswerKnown), [met(3)]);
        scene.shows(Stance::Busy);
        scene.wait(SECOND);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(10 * SECOND), [changed(true, Stance::Prompt)]);
        assert_eq!(std::mem::take(&mut scene.ends), [true], "reported once");
        // A command of the agent is no turn where hooks report turns.
        scene.tell(Event::Input { enter: true });
        assert_eq!(scene.asks(5, Condition::Turn, None), []);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(10 * SECOND), [met(5)]);
        // An interrupted turn has a beginning and no end.
        scene.tell(Event::TurnBegan);
        scene.shows(Stance::Busy);
        scene.wait(SECOND);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(10 * SECOND), [changed(true, Stance::Prompt)]);
        scene.tell(Event::AnswerKnown);
        assert_eq!(std::mem::take(&mut scene.ends), [true], "and the command was none");
        // An agent that ends has no answer; the next turn has.
        scene.tell(Event::TurnBegan);
        assert_eq!(scene.asks(4, Condition::Turn, Some(1000)), []);
        scene.tell(Event::AgentEnded);
        scene.tell(Event::AgentStarted);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(10 * SECOND), [changed(true, Stance::Prompt)]);
        assert!(!scene.waiting.is_at_work());
        scene.tell(Event::TurnBegan);
        assert!(scene.waiting.is_at_work());
        scene.tell(Event::TurnEnded);
        assert_eq!(scene.tell(Event::AnswerKnown), [met(4)]);
    }

    #[test]
    fn each_wait_is_answered_once() {
        let mut scene = Scene::new(true, None);
        scene.wait(SECOND);
        scene.tell(Event::Output);
        scene.asks(1, Condition::Text("done".into()), None);
        scene.asks(2, Condition::Quiet(2 * SECOND), None);
        scene.asks(3, Condition::Prompt, Some(3));
        scene.asks(4, Condition::Text("never".into()), Some(1));
        assert!(scene.waiting.wants_text());
        assert_eq!(scene.waiting.seen("all is done here"), [met(1)]);
        assert_eq!(scene.waiting.seen("all is done here"), []);
        let late = |ticket| Action::Answer { ticket, outcome: Outcome::TimedOut };
        assert_eq!(scene.wait(10 * SECOND), [late(4), met(2), late(3)]);
        assert_eq!((scene.waiting.count(), scene.waiting.wants_text()), (0, false));
        scene.asks(5, Condition::Prompt, None);
        scene.asks(6, Condition::Prompt, None);
        scene.waiting.keep_only(|ticket| ticket == 6);
        let over = Action::Answer { ticket: 6, outcome: Outcome::GaveUp };
        assert_eq!(scene.tell(Event::GaveUp), [over]);
    }

    #[test]
    fn quiet_counts_from_the_last_input_or_output() {
        let mut scene = Scene::new(true, None);
        scene.wait(60 * SECOND);
        assert_eq!(scene.asks(1, Condition::Quiet(SECOND), None), [met(1)]);
        scene.tell(Event::Input { enter: true });
        assert_eq!(scene.asks(2, Condition::Quiet(SECOND), None), []);
        assert_eq!(scene.wait(SECOND / 2), []);
        scene.tell(Event::Output);
        assert_eq!(scene.wait(SECOND - Duration::from_millis(1)), []);
        assert_eq!(scene.wait(Duration::from_millis(1)), [met(2)]);
    }

    #[test]
    fn an_agent_that_is_busy_and_silent_hangs() {
        let limit = 10 * SECOND;
        let mut scene = Scene::new(true, Some(limit));
        // At its prompt it may be silent for any time.
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(100 * SECOND), [changed(true, Stance::Prompt)]);
        scene.shows(Stance::Busy);
        scene.wait(limit - SECOND);
        scene.shows(Stance::Busy);
        assert_eq!(scene.wait(limit - Duration::from_millis(1)), []);
        assert_eq!(scene.wait(SECOND), [Action::Hung { silent_for: limit }]);
        assert_eq!(scene.wait(100 * SECOND), [], "said once");
        scene.tell(Event::AgentEnded);
        scene.tell(Event::AgentStarted);
        scene.shows(Stance::Busy);
        assert_eq!(scene.wait(limit), [Action::Hung { silent_for: limit }]);
    }
}
