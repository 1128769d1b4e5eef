//! An agent that works, asks and hangs, and many who wait for it, around one `Waiting`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use outlast_core::stance::{Sight, Stance};
use outlast_core::waiting::{Action, Event, Outcome, Waiting, Wish};

use crate::{Dice, birth, ms};

const HANG_AFTER: Duration = ms(20_000);

#[test]
fn who_waits_is_answered_once_and_truly() {
    for seed in 0..2_000 {
        World::new(seed).run();
    }
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
    /// What was seen since something last went in.
    looks: Vec<(Stance, Instant)>,
    is_waiting: bool,
    asked: BTreeMap<u64, (Wish, Option<Instant>)>,
    tickets: u64,
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
            asked: BTreeMap::new(),
            tickets: 0,
        }
    }

    fn run(mut self) {
        for _ in 0..120 {
            let time = ms(self.dice.below(1_500));
            self.pass(time);
            let event = self.dream();
            self.say(event);
        }
        self.say(Event::GaveUp);
        assert!(self.asked.is_empty(), "seed {}: {:?} were never answered", self.seed, self.asked);
        // Nobody waits any more, and an agent that does nothing costs nothing.
        self.pass(ms(60_000));
        assert_eq!(self.waiting.deadline(), None, "seed {}", self.seed);
    }

    /// Time passes, with a stop wherever one was asked for.
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
                let wish = self.dice.pick(&[Wish::Prompt, Wish::Quiet(quiet), Wish::Text("words".into())]);
                let timeout = if self.dice.one_in(2) { Some(ms(self.dice.below(5_000))) } else { None };
                self.asked.insert(self.tickets, (wish.clone(), timeout.map(|timeout| self.now + timeout)));
                Event::Asked { ticket: self.tickets, wish, timeout }
            }
            5 => {
                let found = self.waiting.seen("other words");
                for action in &found {
                    let Action::Answer { ticket, outcome: Outcome::Met } = action else { panic!("{action:?}") };
                    let (wish, _) = self.asked.remove(ticket).expect("it waits");
                    assert!(matches!(wish, Wish::Text(_)), "seed {}", self.seed);
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

    fn say(&mut self, event: Event) {
        let mut open = self.waiting.handle(event, self.now);
        while !open.is_empty() {
            match open.remove(0) {
                Action::Look => {
                    let stance = if self.reads_screen { self.screen } else { Stance::Unclear };
                    self.looks.push((stance, self.now));
                    let sight = Sight { stance, is_sure: self.is_sure };
                    open.extend(self.waiting.handle(Event::Looked { sight, is_cursor_visible: true }, self.now));
                }
                Action::Answer { ticket, outcome } => self.answered(ticket, outcome),
                Action::Changed { is_waiting, .. } => {
                    assert!(is_waiting || self.is_waiting, "seed {}: it did not wait before", self.seed);
                    self.is_waiting = is_waiting;
                }
                Action::Hung { silent_for } => {
                    let silent = self.now - self.last_output;
                    assert!(self.is_running && silent_for == silent && silent >= HANG_AFTER, "seed {}", self.seed);
                    assert_eq!(self.screen, Stance::Busy, "seed {}: one who waits does not hang", self.seed);
                }
            }
        }
        assert_eq!(self.waiting.is_waiting(), self.is_waiting, "seed {}: every change is told", self.seed);
        assert!(self.is_running || !self.is_waiting, "seed {}: who is gone waits for nothing", self.seed);
    }

    fn answered(&mut self, ticket: u64, outcome: Outcome) {
        let (wish, until) = self.asked.remove(&ticket).unwrap_or_else(|| panic!("seed {}: twice", self.seed));
        match (outcome, wish) {
            (Outcome::TimedOut, _) => assert!(until.is_some_and(|until| until <= self.now), "seed {}", self.seed),
            (Outcome::Met, Wish::Quiet(quiet)) => {
                assert!(self.now - self.last_news >= quiet, "seed {}: it was not quiet", self.seed);
            }
            (Outcome::Met, Wish::Prompt) if self.reads_screen => {
                let [.., (one, _), (other, _)] = self.looks[..] else { panic!("seed {}: one look", self.seed) };
                assert!(one == other && other.wants_input(), "seed {}: {one:?} and {other:?}", self.seed);
            }
            (Outcome::Met, Wish::Prompt) => assert!(!self.looks.is_empty(), "seed {}", self.seed),
            (Outcome::Met, Wish::Text(_)) => panic!("seed {}: nobody showed it", self.seed),
            (Outcome::GaveUp, _) => {}
        }
    }
}
