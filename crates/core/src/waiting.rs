//! Whether an agent waits for a person, whether it hangs, and those who wait for it.
//!
//! What it is doing is read off its window, and believed only when two looks agree: between two frames of an animation a
//! busy agent may look idle. While its hooks say that a turn runs, or where its window could not show that it works, it must
//! have been quiet as well. An agent whose screen is not known waits when it has been quiet for a while.

use std::time::{Duration, Instant};

use crate::stance::{Sight, Stance};

/// From the first news to the first look.
pub const LOOK_AFTER: Duration = Duration::from_millis(300);
/// From the first look to the second.
pub const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// An agent whose screen is not known has its turn at an end when it has been quiet for so long.
pub const QUIET: Duration = Duration::from_secs(2);
/// What an agent writes so soon after a key that was not Enter is its echo.
pub const ECHO: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    AgentStarted,
    AgentEnded,
    /// The agent wrote something.
    Output,
    /// Something was typed or injected. `enter`: it ends a line.
    Input {
        enter: bool,
    },
    /// What `Action::Look` asked for.
    Looked {
        sight: Sight,
        is_cursor_visible: bool,
    },
    /// The agent's hooks report that a turn was submitted.
    TurnBegan,
    /// They report that it is over.
    TurnEnded,
    Asked {
        ticket: u64,
        wish: Wish,
        timeout: Option<Duration>,
    },
    /// No agent will come any more unless somebody resumes it.
    GaveUp,
    TimePassed,
}

/// What somebody waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wish {
    /// These words are on the screen. Found by whoever sees it: `Waiting::seen`.
    Text(String),
    /// Nothing was written, typed or injected for so long.
    Quiet(Duration),
    /// The agent waits for input.
    Prompt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Met,
    TimedOut,
    /// There is no agent any more.
    GaveUp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Look at the screen, and say `Looked`.
    Look,
    Answer {
        ticket: u64,
        outcome: Outcome,
    },
    /// It began or ceased to wait for a person; the stance tells what for.
    Changed {
        is_waiting: bool,
        stance: Stance,
    },
    /// It is busy by its own account, and has been silent for so long.
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
    /// What the first of two looks saw.
    candidate: Option<(Stance, Instant)>,
    /// What is believed.
    stance: Stance,
    is_waiting: bool,
    /// Two looks agreed since something last went in.
    is_settled: bool,
    /// The agent's hooks said that a turn began, and not that it ended. A turn that a person breaks off ends without a
    /// word, so this alone is no proof.
    is_in_turn: bool,
    /// The hooks of the agent that is there have reported a turn.
    has_reports: bool,
    /// Enter was typed, and the agent was not seen to wait since.
    has_entered: bool,
    has_hung: bool,
    waiters: Vec<Waiter>,
}

#[derive(Clone, Debug)]
struct Waiter {
    ticket: u64,
    wish: Wish,
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
                self.doubt(None);
                self.believe(Stance::Unclear, false, &mut actions);
            }
            Event::Output => self.output(now, &mut actions),
            Event::Input { enter } => {
                self.last_input = Some((now, enter));
                self.has_entered |= enter;
                let after = if self.reads_screen { LOOK_AFTER } else { QUIET };
                self.doubt(self.is_running.then_some(now + after));
            }
            Event::Looked { sight, is_cursor_visible } => self.looked(sight, is_cursor_visible, now, &mut actions),
            Event::TurnBegan => {
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
                if self.is_running && self.reads_screen {
                    self.look_at.get_or_insert(now + LOOK_AFTER);
                }
            }
            Event::Asked { ticket, wish, timeout } => {
                let until = timeout.and_then(|timeout| now.checked_add(timeout));
                self.waiters.push(Waiter { ticket, wish, until });
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

    /// When to say `TimePassed`.
    pub fn deadline(&self) -> Option<Instant> {
        let waiters = self.waiters.iter().flat_map(|waiter| {
            let quiet = match waiter.wish {
                Wish::Quiet(quiet) => self.last_news().checked_add(quiet),
                Wish::Text(_) | Wish::Prompt => None,
            };
            [quiet, waiter.until].into_iter().flatten()
        });
        [self.look_at, self.hangs_at()].into_iter().flatten().chain(waiters).min()
    }

    pub fn is_waiting(&self) -> bool {
        self.is_waiting
    }

    pub fn stance(&self) -> Stance {
        self.stance
    }

    pub fn count(&self) -> usize {
        self.waiters.len()
    }

    /// Those who went away need no answer.
    pub fn keep_only(&mut self, is_there: impl Fn(u64) -> bool) {
        self.waiters.retain(|waiter| is_there(waiter.ticket));
    }

    /// Whether the screen must be looked at closely, lest words pass unseen.
    pub fn wants_text(&self) -> bool {
        self.waiters.iter().any(|waiter| matches!(waiter.wish, Wish::Text(_)))
    }

    /// The screen shows this.
    pub fn seen(&mut self, text: &str) -> Vec<Action> {
        self.answer_if(|waiter| match &waiter.wish {
            Wish::Text(wanted) if text.contains(wanted.as_str()) => Some(Outcome::Met),
            _ => None,
        })
    }

    fn output(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.has_written = true;
        self.last_output = now;
        if self.reads_screen {
            // Not put off by the next output: an animation must not keep us from looking.
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
            return self.believe(Stance::Unclear, is_waiting, actions);
        }
        if !stance.wants_input() {
            self.candidate = None;
            self.is_settled = false;
            return self.believe(stance, false, actions);
        }
        let is_doubtful = stance == Stance::Prompt && (self.is_in_turn || !(is_sure || self.has_reports));
        let quiet_at = self.last_output + QUIET;
        match self.candidate {
            Some((first, at)) if first == stance && is_doubtful && at + LOOK_AGAIN <= now && now < quiet_at => {
                self.look_at = Some(quiet_at);
                // It goes on writing after something was submitted: it may well be at work.
                if self.has_entered && !self.is_in_turn {
                    self.believe(Stance::Unclear, false, actions);
                }
            }
            Some((first, at)) if first == stance && at + LOOK_AGAIN <= now => {
                self.is_settled = true;
                self.has_entered = false;
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
        actions.extend(self.answer_if(|waiter| match waiter.wish {
            Wish::Quiet(quiet) if last_news.checked_add(quiet).is_some_and(|at| at <= now) => Some(Outcome::Met),
            Wish::Prompt if is_there => Some(Outcome::Met),
            _ => waiter.until.filter(|until| *until <= now).map(|_| Outcome::TimedOut),
        }));
    }

    fn hangs_at(&self) -> Option<Instant> {
        // What was seen last counts, and it must have been seen since it last changed.
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

    /// A known agent that has started, and what its screen says.
    struct Scene {
        now: Instant,
        waiting: Waiting,
        screen: Stance,
        is_sure: bool,
        cursor: bool,
    }

    impl Scene {
        fn new(reads_screen: bool, hang_after: Option<Duration>) -> Scene {
            let now = birth();
            let waiting = Waiting::new(reads_screen, hang_after, now);
            let mut scene = Scene { now, waiting, screen: Stance::Unclear, is_sure: true, cursor: true };
            scene.tell(Event::AgentStarted);
            scene
        }

        /// What came of it, but for the looks, which are taken.
        fn tell(&mut self, event: Event) -> Vec<Action> {
            let mut open = self.waiting.handle(event, self.now);
            let mut done = Vec::new();
            while !open.is_empty() {
                let action = open.remove(0);
                if action == Action::Look {
                    let sight = Sight { stance: self.screen, is_sure: self.is_sure };
                    let looked = Event::Looked { sight, is_cursor_visible: self.cursor };
                    open.extend(self.waiting.handle(looked, self.now));
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

        fn asks(&mut self, ticket: u64, wish: Wish, timeout: Option<u64>) -> Vec<Action> {
            self.tell(Event::Asked { ticket, wish, timeout: timeout.map(Duration::from_secs) })
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
    fn two_looks_must_agree() {
        let mut scene = Scene::new(true, None);
        assert_eq!(scene.shows(Stance::Prompt), []);
        assert_eq!(scene.wait(LOOK_AFTER), []);
        // Busy in between: it was a gap between two frames.
        assert_eq!(scene.shows(Stance::Busy), []);
        assert_eq!(scene.wait(SECOND), []);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(LOOK_AFTER + LOOK_AGAIN), [changed(true, Stance::Prompt)]);
        // A dialog is another thing to wait for.
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
        // It looks idle and goes on writing: the turn is not over.
        for _ in 0..10 {
            scene.shows(Stance::Prompt);
            assert_eq!(scene.wait(SECOND), []);
        }
        scene.tell(Event::TurnEnded);
        assert_eq!(scene.wait(SECOND), [changed(true, Stance::Prompt)]);
        // A turn that was broken off ends without a word.
        scene.tell(Event::TurnBegan);
        scene.shows(Stance::Busy);
        scene.wait(SECOND);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(QUIET - Duration::from_millis(1)), []);
        assert_eq!(scene.wait(SECOND), [changed(true, Stance::Prompt)]);
        // A dialog stands in the middle of a turn.
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
        // Nor while it is not yet believed to be idle.
        scene.shows(Stance::Busy);
        assert_eq!(scene.wait(SECOND / 2), [changed(false, Stance::Busy)]);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(100 * SECOND), [changed(true, Stance::Prompt)]);
        // What was submitted is answered without a sign of work.
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
    fn an_animation_does_not_keep_us_from_looking() {
        let mut scene = Scene::new(true, None);
        let mut done = Vec::new();
        for _ in 0..20 {
            scene.shows(Stance::Prompt);
            done.extend(scene.wait(Duration::from_millis(80)));
        }
        assert_eq!(done, [changed(true, Stance::Prompt)]);
    }

    #[test]
    fn typing_is_no_change_but_who_waits_for_the_prompt_waits_for_the_next() {
        let mut scene = Scene::new(true, None);
        scene.shows(Stance::Prompt);
        scene.wait(SECOND);
        assert_eq!(scene.asks(1, Wish::Prompt, None), [met(1)]);
        // What was just sent has not been seen yet.
        assert_eq!(scene.tell(Event::Input { enter: true }), []);
        assert_eq!(scene.asks(2, Wish::Prompt, None), []);
        assert_eq!(scene.wait(Duration::from_millis(100)), []);
        scene.shows(Stance::Busy);
        assert_eq!(scene.wait(10 * SECOND), [changed(false, Stance::Busy)]);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(SECOND), [changed(true, Stance::Prompt), met(2)]);
        // A key that changes nothing is no news.
        assert_eq!(scene.tell(Event::Input { enter: false }), []);
        scene.shows(Stance::Prompt);
        assert_eq!(scene.wait(SECOND), []);
        assert_eq!(scene.asks(3, Wish::Prompt, None), [met(3)]);
    }

    #[test]
    fn an_unknown_agent_waits_when_it_has_been_quiet() {
        let mut scene = Scene::new(false, None);
        assert_eq!(scene.wait(10 * SECOND), [], "it has shown nothing yet");
        scene.tell(Event::Output);
        assert_eq!(scene.wait(QUIET - Duration::from_millis(1)), []);
        scene.tell(Event::Output);
        assert_eq!(scene.wait(QUIET), [changed(true, Stance::Unclear)]);
        // Its echo of a key is no work.
        scene.tell(Event::Input { enter: false });
        assert_eq!(scene.tell(Event::Output), []);
        assert_eq!(scene.wait(10 * SECOND), []);
        scene.tell(Event::Input { enter: true });
        assert_eq!(scene.tell(Event::Output), [changed(false, Stance::Unclear)]);
        scene.cursor = false;
        assert_eq!(scene.wait(10 * SECOND), [], "nobody hides the cursor to be typed to");
        scene.cursor = true;
        scene.tell(Event::Output);
        assert_eq!(scene.wait(QUIET), [changed(true, Stance::Unclear)]);
    }

    #[test]
    fn who_waits_is_answered_once() {
        let mut scene = Scene::new(true, None);
        scene.wait(SECOND);
        scene.tell(Event::Output);
        scene.asks(1, Wish::Text("done".into()), None);
        scene.asks(2, Wish::Quiet(2 * SECOND), None);
        scene.asks(3, Wish::Prompt, Some(3));
        scene.asks(4, Wish::Text("never".into()), Some(1));
        assert!(scene.waiting.wants_text());
        assert_eq!(scene.waiting.seen("all is done here"), [met(1)]);
        assert_eq!(scene.waiting.seen("all is done here"), []);
        let late = |ticket| Action::Answer { ticket, outcome: Outcome::TimedOut };
        assert_eq!(scene.wait(10 * SECOND), [late(4), met(2), late(3)]);
        assert_eq!((scene.waiting.count(), scene.waiting.wants_text()), (0, false));
        scene.asks(5, Wish::Prompt, None);
        scene.asks(6, Wish::Prompt, None);
        scene.waiting.keep_only(|ticket| ticket == 6);
        let over = Action::Answer { ticket: 6, outcome: Outcome::GaveUp };
        assert_eq!(scene.tell(Event::GaveUp), [over]);
    }

    #[test]
    fn quiet_counts_from_the_last_thing_that_went_in_or_out() {
        let mut scene = Scene::new(true, None);
        scene.wait(60 * SECOND);
        assert_eq!(scene.asks(1, Wish::Quiet(SECOND), None), [met(1)]);
        scene.tell(Event::Input { enter: true });
        assert_eq!(scene.asks(2, Wish::Quiet(SECOND), None), []);
        assert_eq!(scene.wait(SECOND / 2), []);
        scene.tell(Event::Output);
        assert_eq!(scene.wait(SECOND - Duration::from_millis(1)), []);
        assert_eq!(scene.wait(Duration::from_millis(1)), [met(2)]);
    }

    #[test]
    fn it_hangs_if_it_is_busy_and_silent() {
        let limit = 10 * SECOND;
        let mut scene = Scene::new(true, Some(limit));
        // At its prompt it may be silent for as long as it likes.
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
