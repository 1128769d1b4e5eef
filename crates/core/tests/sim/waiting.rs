//! An agent that works, asks and hangs, and many requests that wait for it, around one `Waiting`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use outlast_core::stance::{Sight, Stance};
use outlast_core::waiting::{Action, Condition, Event, Outcome, Waiting};

use crate::{Dice, Upgrades, birth, ms};

const HANG_AFTER: Duration = ms(20_000);

#[test]
fn every_wait_is_answered_once_and_correctly() {
    for seed in 0..2_000 {
        World::new(seed).run();
    }
}

/// A program reads what the last one wrote. If this fails, the format of the state has changed: it needs a new version
/// (`outlast::upgrade`), a migration from this one, and lines of its own.
#[test]
fn the_format_of_what_waits_is_that_of_its_version() {
    let now = birth();
    for line in include_str!("saved/waiting-1.jsonl").lines() {
        let saved = serde_json::from_str(line).unwrap();
        let again = Waiting::restore(true, None, saved, now).save(now);
        assert_eq!(serde_json::to_string(&again).unwrap(), line);
    }
}

/// Before any event another program may continue with what is known of the agent. No difference can be seen from outside.
#[test]
fn another_program_goes_on_at_any_moment() {
    let mut upgrades = 0;
    for seed in 0..300 {
        let plain = World::new(seed).run();
        let upgraded = World { upgrades: Upgrades::at_any_moment(seed), ..World::new(seed) }.run();
        let differs = plain.story.iter().zip(&upgraded.story).find(|(one, other)| one != other);
        assert_eq!((differs, plain.story.len()), (None, upgraded.story.len()), "seed {seed}");
        upgrades += upgraded.upgrades.count;
    }
    assert!(upgrades > 3_000, "{upgrades} upgrades");
}

struct World {
    seed: u64,
    dice: Dice,
    now: Instant,
    waiting: Waiting,
    reads_screen: bool,
    is_sure: bool,
    screen: Stance,
    is_running: bool,
    last_output: Instant,
    last_news: Instant,
    /// The observations since the last input.
    looks: Vec<(Stance, Instant)>,
    is_waiting: bool,
    /// Turns that were told to be over.
    turns: u64,
    asked: BTreeMap<u64, (Condition, Option<Instant>)>,
    tickets: u64,
    upgrades: Upgrades,
    /// What was decided.
    story: Vec<String>,
}

impl World {
    fn new(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        let now = birth();
        let reads_screen = dice.one_in(2);
        let is_sure = dice.one_in(2);
        World {
            seed,
            dice,
            now,
            waiting: Waiting::new(reads_screen, reads_screen.then_some(HANG_AFTER), now),
            reads_screen,
            is_sure,
            screen: Stance::Unclear,
            is_running: false,
            last_output: now,
            last_news: now,
            looks: Vec::new(),
            is_waiting: false,
            turns: 0,
            asked: BTreeMap::new(),
            tickets: 0,
            upgrades: Upgrades::default(),
            story: Vec::new(),
        }
    }

    fn run(mut self) -> World {
        for _ in 0..120 {
            let time = ms(self.dice.below(1_500));
            self.pass(time);
            let event = self.dream();
            self.say(event);
        }
        self.say(Event::GaveUp);
        assert!(self.asked.is_empty(), "seed {}: {:?} were never answered", self.seed, self.asked);
        // No request waits any more, and an idle agent needs no timer.
        self.pass(ms(60_000));
        assert_eq!(self.waiting.deadline(), None, "seed {}", self.seed);
        self
    }

    /// Time passes, with an event at each deadline.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(at) = self.waiting.deadline().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.say(Event::TimePassed);
        }
        self.now = end;
    }

    fn dream(&mut self) -> Event {
        match self.dice.below(10) {
            0 if !self.is_running => {
                self.is_running = true;
                self.looks.clear();
                self.last_output = self.now;
                self.last_news = self.last_news.max(self.now);
                Event::AgentStarted
            }
            1 if self.is_running && self.dice.one_in(5) => {
                self.is_running = false;
                Event::AgentEnded
            }
            2 => {
                self.last_news = self.now;
                self.looks.clear();
                Event::Input { enter: self.dice.one_in(2) }
            }
            3 | 4 => {
                self.tickets += 1;
                let quiet = ms(self.dice.below(4_000));
                let condition = self.dice.pick(&[
                    Condition::Prompt,
                    Condition::Turn,
                    Condition::Quiet(quiet),
                    Condition::Text("words".into()),
                ]);
                let timeout = if self.dice.one_in(2) { Some(ms(self.dice.below(5_000))) } else { None };
                self.asked.insert(self.tickets, (condition.clone(), timeout.map(|timeout| self.now + timeout)));
                Event::Asked { ticket: self.tickets, condition, timeout }
            }
            5 => {
                let found = self.waiting.seen("other words");
                for action in &found {
                    let Action::Answer { ticket, outcome: Outcome::Met } = action else { panic!("{action:?}") };
                    let (condition, _) = self.asked.remove(ticket).expect("it waits");
                    assert!(matches!(condition, Condition::Text(_)), "seed {}", self.seed);
                }
                Event::TimePassed
            }
            6 if self.is_running && self.dice.one_in(2) => {
                if self.dice.one_in(2) {
                    return Event::TurnEnded;
                }
                self.looks.clear();
                Event::TurnBegan
            }
            _ if self.is_running => {
                self.screen = self.dice.pick(&[Stance::Busy, Stance::Prompt, Stance::Prompt, Stance::Dialog]);
                self.last_output = self.now;
                self.last_news = self.now;
                Event::Output
            }
            _ => Event::TimePassed,
        }
    }

    fn upgrade(&mut self) {
        let saved = self.upgrades.take_over(|| Some(self.waiting.save(self.now)));
        let Some(saved) = saved else { return };
        let hang_after = self.reads_screen.then_some(HANG_AFTER);
        let waiting = Waiting::restore(self.reads_screen, hang_after, saved.clone(), self.now);
        assert_eq!(waiting.save(self.now), saved, "seed {}", self.seed);
        assert_eq!(waiting.deadline(), self.waiting.deadline(), "seed {}: another deadline", self.seed);
        self.waiting = waiting;
    }

    fn say(&mut self, event: Event) {
        self.upgrade();
        let mut open = self.waiting.handle(event, self.now);
        while !open.is_empty() {
            self.story.push(format!("{:?}", open[0]));
            match open.remove(0) {
                Action::Look => {
                    let stance = if self.reads_screen { self.screen } else { Stance::Unclear };
                    self.looks.push((stance, self.now));
                    let sight = Sight { stance, is_sure: self.is_sure };
                    open.extend(self.waiting.handle(Event::Looked { sight, is_cursor_visible: true }, self.now));
                }
                Action::Answer { ticket, outcome } => self.answered(ticket, outcome),
                Action::TurnEnded { .. } => {
                    assert!(self.is_running, "seed {}: an agent that is gone ends no turn", self.seed);
                    self.turns += 1;
                    open.extend(self.waiting.handle(Event::AnswerKnown, self.now));
                }
                Action::Changed { is_waiting, .. } => {
                    assert!(is_waiting || self.is_waiting, "seed {}: it did not wait before", self.seed);
                    self.is_waiting = is_waiting;
                }
                Action::Hung { silent_for } => {
                    let silent = self.now - self.last_output;
                    assert!(self.is_running && silent_for == silent && silent >= HANG_AFTER, "seed {}", self.seed);
                    assert_eq!(self.screen, Stance::Busy, "seed {}: an agent that waits does not hang", self.seed);
                }
            }
        }
        assert_eq!(self.waiting.is_waiting(), self.is_waiting, "seed {}: every change is told", self.seed);
        assert!(self.is_running || !self.is_waiting, "seed {}: an agent that exited does not wait", self.seed);
    }

    fn answered(&mut self, ticket: u64, outcome: Outcome) {
        let (condition, until) = self.asked.remove(&ticket).unwrap_or_else(|| panic!("seed {}: twice", self.seed));
        match (outcome, condition) {
            (Outcome::TimedOut, _) => assert!(until.is_some_and(|until| until <= self.now), "seed {}", self.seed),
            (Outcome::Met, Condition::Quiet(quiet)) => {
                assert!(self.now - self.last_news >= quiet, "seed {}: it was not quiet", self.seed);
            }
            (Outcome::Met, Condition::Prompt) if self.reads_screen => {
                let [.., (one, _), (other, _)] = self.looks[..] else { panic!("seed {}: one look", self.seed) };
                assert!(one == other && other.wants_input(), "seed {}: {one:?} and {other:?}", self.seed);
            }
            (Outcome::Met, Condition::Prompt) => assert!(!self.looks.is_empty(), "seed {}", self.seed),
            (Outcome::Met, Condition::Turn) => assert!(self.turns > 0, "seed {}: no turn is over", self.seed),
            (Outcome::Met, Condition::Text(_)) => panic!("seed {}: the text was never shown", self.seed),
            (Outcome::GaveUp, _) => {}
        }
    }
}
