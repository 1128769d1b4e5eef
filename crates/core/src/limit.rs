//! The usage limit of an agent's account: whether the agent is limited, until when, and what follows.
//!
//! The driver shows what is on the screen and in the agent's files ([`notice`]), and what time it says ([`reset`]). This
//! machine decides from when to when the agent counts as limited, and when a text makes it continue. The end of a limit is
//! a time of day, so it is compared with the wall clock, which may jump: a computer that was suspended continues later.

pub mod notice;
pub mod reset;
mod saved;

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use self::reset::End;
pub use self::saved::Saved;

/// While an end is awaited, the wall clock is looked at this often.
pub const LOOK_AT_CLOCK: Duration = Duration::from_secs(30);
/// After an end that is known to the second,
pub const MARGIN_EXACT: i64 = 5;
/// after one that is known to the minute,
pub const MARGIN_MINUTE: i64 = 65;
/// and where the agent says that it continues by itself: so much later outlast continues.
pub const MARGIN_ITSELF: i64 = 180;
/// How long the wait is where the end is not known.
pub const UNKNOWN_WAIT: i64 = 30 * 60;
/// The wait after a first attempt to continue that failed; it doubles with each further one,
pub const RETRY_FIRST: i64 = 60;
/// up to this,
pub const RETRY_MAX: i64 = 30 * 60;
/// and after so many failures no other attempt is made.
pub const TRIES_MAX: u32 = 6;
/// How long an attempt may take until its result is known.
pub const ATTEMPT_MAX: Duration = Duration::from_secs(600);

/// What happens when an agent reaches its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLimit {
    /// It is shown and notified; a person decides.
    #[default]
    Tell,
    /// When the limit is over, a text makes the agent continue.
    Wait,
    /// The session ends.
    Stop,
}

/// A notice that the agent shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownNotice {
    pub text: String,
    /// None if the notice says no time that can be read.
    pub end: Option<End>,
    /// The agent says that it continues when the limit is over.
    pub continues_itself: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    AgentStarted,
    AgentEnded,
    /// Enter was typed, by a person or a program.
    Entered,
    /// The agent is at work.
    Worked,
    /// The notice that the screen shows now, if there is one.
    Looked(Option<ShownNotice>),
    /// The result of `Action::Continue`: whether the agent has recorded the text as a turn.
    Continued {
        is_submitted: bool,
    },
    TimePassed,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// The agent is limited now; it was not before, or until another time.
    Limited,
    /// The agent is not limited any more. A text that was not typed yet is not needed any more.
    Over,
    /// Send the text that makes the agent continue, and report `Continued`.
    Continue,
    /// All attempts to continue failed.
    GaveUp,
    /// End the session.
    Stop,
}

#[derive(Clone, Debug)]
pub struct Limit {
    on_limit: OnLimit,
    state: State,
    is_running: bool,
    /// The agent did something since it started, or since the last limit was over. A notice that was there before is of
    /// an earlier limit.
    is_armed: bool,
    /// `Action::Continue` was asked for, and its result is not known yet.
    is_sending: bool,
    /// When the wall clock is compared next.
    look_at: Option<Instant>,
}

#[derive(Clone, Debug)]
enum State {
    Free,
    Limited {
        seen: ShownNotice,
        /// On the wall clock: when the limit is over, or the next attempt to continue. None: only a person ends it.
        due: Option<i64>,
        tries: u32,
    },
    /// The text is being sent, or was sent and has had no visible effect yet.
    Continuing {
        seen: ShownNotice,
        tries: u32,
        until: Instant,
        is_submitted: bool,
    },
}

impl Limit {
    pub fn new(on_limit: OnLimit) -> Limit {
        Limit { on_limit, state: State::Free, is_running: false, is_armed: false, is_sending: false, look_at: None }
    }

    /// `wall`: seconds since 1970.
    pub fn handle(&mut self, event: Event, now: Instant, wall: i64) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::AgentStarted => {
                self.is_running = true;
                self.is_armed = false;
            }
            Event::AgentEnded => self.agent_ended(wall),
            Event::Entered => self.is_armed = true,
            Event::Worked => {
                self.is_armed = true;
                self.over(&mut actions);
            }
            Event::Looked(seen) => self.looked(seen, wall, &mut actions),
            Event::Continued { is_submitted } => self.continued(is_submitted, now, wall, &mut actions),
            Event::TimePassed => {}
        }
        self.pass_time(now, wall, &mut actions);
        self.look_at = self.next_look(now, wall);
        actions
    }

    /// When the driver must report `TimePassed`.
    pub fn deadline(&self) -> Option<Instant> {
        self.look_at
    }

    /// The notice, while the agent is limited.
    pub fn seen(&self) -> Option<&ShownNotice> {
        match &self.state {
            State::Free => None,
            State::Limited { seen, .. } | State::Continuing { seen, .. } => Some(seen),
        }
    }

    /// Whether a notice would count, so that it is worth looking for.
    pub fn is_looking(&self) -> bool {
        self.is_running && self.is_armed
    }

    fn looked(&mut self, seen: Option<ShownNotice>, wall: i64, actions: &mut Vec<Action>) {
        let is_past = |seen: &ShownNotice| seen.end.is_some_and(|end| end.at + MARGIN_MINUTE < wall);
        let seen = seen.filter(|seen| self.is_armed && !is_past(seen));
        let Some(new) = seen else {
            // Enter was typed since, and what follows it shows no limit.
            if self.is_armed && !matches!(self.state, State::Continuing { is_submitted: false, .. }) {
                self.over(actions);
            }
            return;
        };
        let tries = match &self.state {
            State::Limited { seen, .. } if *seen == new => return,
            State::Continuing { is_submitted: false, .. } => return,
            State::Limited { tries, .. } | State::Continuing { tries, .. } => *tries,
            State::Free => 0,
        };
        let due = self.due_after(&new, wall, tries);
        self.state = State::Limited { seen: new, due, tries };
        // After this the same notice is not reported again; a new turn is.
        self.is_armed = false;
        actions.push(Action::Limited);
        if self.on_limit == OnLimit::Stop {
            actions.push(Action::Stop);
        }
    }

    fn due_after(&self, seen: &ShownNotice, wall: i64, tries: u32) -> Option<i64> {
        let margin = match seen.end {
            Some(_) if seen.continues_itself => MARGIN_ITSELF,
            Some(end) if end.is_exact => MARGIN_EXACT,
            _ => MARGIN_MINUTE,
        };
        let end = seen.end.map(|end| end.at);
        match (self.on_limit, end) {
            (OnLimit::Wait, Some(end)) => Some((end + margin).max(wall + retry_after(tries))),
            (OnLimit::Wait, None) => Some(wall + UNKNOWN_WAIT),
            (OnLimit::Tell | OnLimit::Stop, end) => end,
        }
    }

    fn agent_ended(&mut self, wall: i64) {
        self.is_running = false;
        self.is_armed = false;
        // The next agent has the same account.
        if let State::Continuing { seen, tries, .. } = &self.state {
            self.state = State::Limited { seen: seen.clone(), due: Some(wall + retry_after(*tries)), tries: *tries };
        }
    }

    fn continued(&mut self, submitted: bool, now: Instant, wall: i64, actions: &mut Vec<Action>) {
        self.is_sending = false;
        // The result of a text for an earlier limit, or a late one.
        if let State::Limited { due: Some(due), .. } = &mut self.state {
            *due = (*due).max(wall + RETRY_FIRST);
        }
        let State::Continuing { seen, tries, is_submitted, until } = &mut self.state else { return };
        if submitted {
            *is_submitted = true;
            *until = now + ATTEMPT_MAX;
            // What the screen shows from now on is about the new turn.
            self.is_armed = true;
            return;
        }
        let (seen, tries) = (seen.clone(), *tries);
        self.failed(seen, tries, wall, actions);
    }

    fn failed(&mut self, seen: ShownNotice, tries: u32, wall: i64, actions: &mut Vec<Action>) {
        let is_last = tries >= TRIES_MAX;
        if is_last {
            actions.push(Action::GaveUp);
        }
        let due = (!is_last).then(|| wall + retry_after(tries));
        self.state = State::Limited { seen, due, tries };
    }

    fn over(&mut self, actions: &mut Vec<Action>) {
        if !matches!(self.state, State::Free) {
            self.state = State::Free;
            actions.push(Action::Over);
        }
    }

    fn pass_time(&mut self, now: Instant, wall: i64, actions: &mut Vec<Action>) {
        match &self.state {
            State::Limited { seen, due: Some(due), tries } if *due <= wall => {
                if self.on_limit != OnLimit::Wait {
                    return self.over(actions);
                }
                // A text for an earlier limit may still be on its way.
                if self.is_running && !self.is_sending {
                    self.is_sending = true;
                    let (seen, tries) = (seen.clone(), tries + 1);
                    self.state = State::Continuing { seen, tries, until: now + ATTEMPT_MAX, is_submitted: false };
                    actions.push(Action::Continue);
                }
            }
            State::Continuing { seen, tries, until, is_submitted } if *until <= now => {
                // A turn was recorded, and the screen shows neither work nor a limit.
                if *is_submitted {
                    return self.over(actions);
                }
                let (seen, tries) = (seen.clone(), *tries);
                self.failed(seen, tries, wall, actions);
            }
            _ => {}
        }
    }

    fn next_look(&self, now: Instant, wall: i64) -> Option<Instant> {
        match &self.state {
            State::Free => None,
            State::Limited { due: None, .. } => None,
            // Nothing can be done before the next agent starts.
            State::Limited { due: Some(due), .. } if *due <= wall && !self.is_running => None,
            State::Limited { due: Some(due), .. } => {
                let left = u64::try_from(due - wall).ok().filter(|left| *left > 0).map(Duration::from_secs);
                Some(now + left.unwrap_or(LOOK_AT_CLOCK).min(LOOK_AT_CLOCK))
            }
            State::Continuing { until, .. } => Some(*until),
        }
    }
}

fn retry_after(tries: u32) -> i64 {
    match tries {
        0 => 0,
        tries => RETRY_FIRST.saturating_mul(1 << (tries - 1).min(10)).min(RETRY_MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T0: i64 = 1_800_000_000;

    #[expect(clippy::disallowed_methods, reason = "a test needs some instant to count from")]
    fn birth() -> Instant {
        Instant::now()
    }

    /// A limit, and a clock on which both times pass alike.
    struct Story {
        limit: Limit,
        born: Instant,
        second: i64,
    }

    impl Story {
        fn new(on_limit: OnLimit) -> Story {
            let mut story = Story { limit: Limit::new(on_limit), born: birth(), second: 0 };
            story.tell(Event::AgentStarted);
            story
        }

        fn tell(&mut self, event: Event) -> Vec<Action> {
            let now = self.born + Duration::from_secs(self.second.unsigned_abs());
            self.limit.handle(event, now, T0 + self.second)
        }

        /// Time passes, with a stop at each deadline.
        fn wait(&mut self, seconds: i64) -> Vec<Action> {
            let end = self.second + seconds;
            let mut done = Vec::new();
            while let Some(at) = self.limit.deadline() {
                let at = i64::try_from((at - self.born).as_secs()).unwrap();
                if at > end {
                    break;
                }
                assert!(at > self.second, "the deadline moves on");
                self.second = at;
                done.extend(self.tell(Event::TimePassed));
            }
            self.second = end;
            done
        }

        fn sees(&mut self, end: Option<i64>) -> Vec<Action> {
            self.tell(Event::Looked(Some(seen(end))))
        }
    }

    fn seen(end: Option<i64>) -> ShownNotice {
        let end = end.map(|second| End { at: T0 + second, is_exact: true });
        ShownNotice { text: "limit".to_owned(), end, continues_itself: false }
    }

    #[test]
    fn a_notice_counts_once_and_only_after_work() {
        let mut story = Story::new(OnLimit::Tell);
        assert_eq!(story.sees(Some(100)), [], "it was there when the agent started");
        story.tell(Event::Worked);
        assert_eq!(story.sees(Some(100)), [Action::Limited]);
        assert_eq!(story.sees(Some(100)), []);
        assert_eq!(story.limit.seen(), Some(&seen(Some(100))));
        assert_eq!(story.wait(99), []);
        assert_eq!(story.wait(2), [Action::Over]);
        assert_eq!(story.sees(Some(100)), [], "it is still shown");
        assert_eq!((story.limit.seen(), story.limit.deadline()), (None, None));
        // A person continues before the end.
        story.tell(Event::Entered);
        assert_eq!(story.sees(Some(300)), [Action::Limited]);
        story.tell(Event::Entered);
        assert_eq!(story.tell(Event::Worked), [Action::Over]);
        assert_eq!(story.sees(Some(400)), [Action::Limited], "and reaches the next one");
        // An agent whose work cannot be seen.
        story.tell(Event::Entered);
        assert_eq!(story.tell(Event::Looked(None)), [Action::Over]);
        // A notice of the past.
        story.tell(Event::Worked);
        assert_eq!(story.sees(Some(-100)), []);
    }

    #[test]
    fn without_an_end_it_stays_until_a_person_acts() {
        let mut story = Story::new(OnLimit::Tell);
        story.tell(Event::Worked);
        assert_eq!(story.sees(None), [Action::Limited]);
        assert_eq!(story.wait(1_000_000), []);
        assert_eq!(story.tell(Event::Worked), [Action::Over]);
    }

    #[test]
    fn a_session_can_end_with_the_limit() {
        let mut story = Story::new(OnLimit::Stop);
        story.tell(Event::Worked);
        assert_eq!(story.sees(None), [Action::Limited, Action::Stop]);
        assert_eq!(story.sees(None), []);
    }

    #[test]
    fn a_waiting_agent_continues_after_the_end() {
        let mut story = Story::new(OnLimit::Wait);
        story.tell(Event::Worked);
        assert_eq!(story.sees(Some(1000)), [Action::Limited]);
        assert_eq!(story.wait(1000 + MARGIN_EXACT - 1), []);
        assert_eq!(story.wait(1), [Action::Continue]);
        // The old notice is still shown while the text is typed.
        assert_eq!(story.sees(Some(1000)), []);
        assert_eq!(story.tell(Event::Looked(None)), []);
        assert_eq!(story.tell(Event::Continued { is_submitted: true }), []);
        assert_eq!(story.tell(Event::Worked), [Action::Over]);
        assert_eq!(story.wait(10_000), []);
    }

    #[test]
    fn an_agent_that_continues_itself_gets_no_text() {
        let mut story = Story::new(OnLimit::Wait);
        story.tell(Event::Worked);
        let itself = ShownNotice { continues_itself: true, ..seen(Some(1000)) };
        assert_eq!(story.tell(Event::Looked(Some(itself))), [Action::Limited]);
        assert_eq!(story.wait(1000 + MARGIN_ITSELF - 1), []);
        assert_eq!(story.tell(Event::Worked), [Action::Over]);
        assert_eq!(story.wait(10_000), []);
    }

    #[test]
    fn a_limit_that_is_not_over_is_awaited_again() {
        let mut story = Story::new(OnLimit::Wait);
        story.tell(Event::Worked);
        story.sees(Some(100));
        assert_eq!(story.wait(200), [Action::Continue]);
        story.tell(Event::Continued { is_submitted: true });
        assert_eq!(story.sees(Some(5000)), [Action::Limited]);
        assert_eq!(story.wait(4000), []);
        assert_eq!(story.wait(1000), [Action::Continue]);
        // The same end again: later each time.
        story.tell(Event::Continued { is_submitted: true });
        assert_eq!(story.sees(Some(5190)), [Action::Limited]);
        assert_eq!(story.wait(2 * RETRY_FIRST - 1), []);
        assert_eq!(story.wait(2), [Action::Continue]);
    }

    #[test]
    fn attempts_that_fail_are_repeated_and_end() {
        let mut story = Story::new(OnLimit::Wait);
        story.tell(Event::Worked);
        story.sees(None);
        assert_eq!(story.wait(UNKNOWN_WAIT), [Action::Continue]);
        let mut waits = Vec::new();
        loop {
            let actions = story.tell(Event::Continued { is_submitted: false });
            if actions == [Action::GaveUp] {
                break;
            }
            assert_eq!(actions, []);
            let since = story.second;
            while story.wait(1).is_empty() {}
            waits.push(story.second - since);
        }
        assert_eq!(waits, [60, 120, 240, 480, 960]);
        assert_eq!(story.wait(1_000_000), []);
        assert!(story.limit.seen().is_some(), "it is still limited");
        // An attempt without a result fails, too; but there is never a second text beside the first.
        let mut story = Story::new(OnLimit::Wait);
        story.tell(Event::Worked);
        story.sees(Some(10));
        assert_eq!(story.wait(60), [Action::Continue]);
        let again = i64::try_from(ATTEMPT_MAX.as_secs()).unwrap() + RETRY_FIRST;
        assert_eq!(story.wait(2 * again), []);
        assert_eq!(story.tell(Event::Continued { is_submitted: false }), []);
        assert_eq!(story.wait(RETRY_FIRST), [Action::Continue]);
    }

    #[test]
    fn the_limit_outlives_the_agent() {
        let mut story = Story::new(OnLimit::Wait);
        story.tell(Event::Worked);
        story.sees(Some(100));
        story.tell(Event::AgentEnded);
        assert_eq!(story.wait(500), [], "no agent could continue");
        assert_eq!(story.limit.deadline(), None);
        assert_eq!(story.tell(Event::AgentStarted), [Action::Continue]);
    }

    #[test]
    fn a_computer_that_slept_continues_when_it_wakes_up() {
        let mut story = Story::new(OnLimit::Wait);
        story.tell(Event::Worked);
        story.sees(Some(10_000));
        assert_eq!(story.wait(60), []);
        let (now, wall) = (story.born + Duration::from_secs(60) + LOOK_AT_CLOCK, T0 + 20_000);
        assert!(story.limit.deadline().is_some_and(|at| at <= now), "the clock is looked at often enough");
        assert_eq!(story.limit.handle(Event::TimePassed, now, wall), [Action::Continue]);
    }
}
