//! An account with usage limits, an agent that reaches them, a user, and a computer that is suspended.

use std::time::{Duration, Instant};

use outlast_core::limit::{
    ATTEMPT_MAX, Action, Event, LOOK_AT_CLOCK, Limit, MARGIN_ITSELF, MARGIN_MINUTE, OnLimit, RETRY_MAX, ShownNotice,
    UNKNOWN_WAIT, reset::End,
};

use super::{Dice, Upgrades, birth, seeds};

const T0: i64 = 1_800_000_000;

struct World {
    dice: Dice,
    limit: Limit,
    born: Instant,
    /// Seconds that the computer was awake, and seconds on the wall.
    awake: u64,
    wall: i64,
    /// The account is limited up to this time.
    limited_until: Option<i64>,
    /// What the screen shows.
    notice: Option<ShownNotice>,
    is_running: bool,
    /// A text is being sent.
    is_sending: bool,
    /// What the world was told.
    is_limited: bool,
    upgrades: Upgrades,
    /// What was decided.
    story: Vec<String>,
}

impl World {
    fn new(seed: u64) -> World {
        let limit = Limit::new(OnLimit::Wait);
        let mut world = World {
            dice: Dice::new(seed),
            limit,
            born: birth(),
            awake: 0,
            wall: T0,
            limited_until: None,
            notice: None,
            is_running: false,
            is_sending: false,
            is_limited: false,
            upgrades: Upgrades::default(),
            story: Vec::new(),
        };
        world.start();
        world
    }

    fn run(mut self) -> World {
        for _ in 0..200 {
            self.step();
        }
        self.settle();
        self
    }

    fn now(&self) -> Instant {
        self.born + Duration::from_secs(self.awake)
    }

    fn start(&mut self) {
        self.is_running = true;
        self.tell(Event::AgentStarted);
    }

    fn upgrade(&mut self) {
        let now = self.now();
        let saved = self.upgrades.take_over(|| Some(self.limit.save(now)));
        let Some(saved) = saved else { return };
        let limit = Limit::restore(OnLimit::Wait, saved.clone(), now);
        assert_eq!((limit.save(now), limit.deadline()), (saved, self.limit.deadline()));
        self.limit = limit;
    }

    fn tell(&mut self, event: Event) {
        let (now, wall) = (self.now(), self.wall);
        let mut is_given_up = false;
        self.upgrade();
        let actions = self.limit.handle(event, now, wall);
        self.story.push(format!("{actions:?}"));
        for action in actions {
            match action {
                Action::Limited => self.is_limited = true,
                Action::Over => {
                    assert!(self.is_limited, "it was not limited");
                    self.is_limited = false;
                    // A text that was not typed yet is given up.
                    is_given_up = self.is_sending && self.dice.one_in(2);
                }
                Action::Continue => {
                    assert!(self.is_running && !self.is_sending, "one text at a time, to an agent that runs");
                    assert!(self.is_limited);
                    if let Some(end) = self.limit.seen().and_then(|seen| seen.end) {
                        assert!(wall >= end.at, "not before the announced end");
                    }
                    self.is_sending = true;
                }
                Action::GaveUp => assert!(self.is_limited),
                Action::Stop => panic!("this session waits"),
            }
        }
        assert_eq!(self.is_limited, self.limit.seen().is_some());
        if is_given_up {
            self.is_sending = false;
            return self.tell(Event::Continued { is_submitted: false });
        }
        if let Some(at) = self.limit.deadline() {
            assert!(at > self.now(), "the deadline moves on");
            assert!(at <= self.now() + ATTEMPT_MAX, "the wall clock is looked at often enough");
        }
    }

    /// The agent works on a turn, and reaches the limit if there is one.
    fn turn(&mut self) {
        if !self.is_running {
            return;
        }
        self.notice = None;
        self.tell(Event::Worked);
        assert!(!self.is_limited);
        if self.dice.one_in(3) && self.limited_until.is_none_or(|until| until <= self.wall) {
            self.limited_until = Some(self.wall + 60 + self.dice.below(20_000) as i64);
        }
        if let Some(until) = self.limited_until.filter(|until| *until > self.wall) {
            let is_exact = self.dice.one_in(2);
            // The clock of a notice leaves the seconds out.
            let at = if is_exact { until } else { until - until.rem_euclid(60) };
            let end = (!self.dice.one_in(6)).then_some(End { at, is_exact });
            let continues_itself = end.is_some() && self.dice.one_in(4);
            self.notice = Some(ShownNotice { text: format!("until {until}"), end, continues_itself });
        }
        self.look();
        assert_eq!(self.is_limited, self.notice.is_some(), "a notice after work counts at once");
    }

    fn look(&mut self) {
        if self.is_running {
            self.tell(Event::Looked(self.notice.clone()));
        }
    }

    fn step(&mut self) {
        match self.dice.below(10) {
            0 | 1 => {
                self.tell(Event::Entered);
                self.turn();
            }
            2 => self.look(),
            3 if self.is_running => {
                self.is_running = false;
                if self.is_sending {
                    self.is_sending = false;
                    // The text was lost with the agent; the driver reports it before the end.
                    self.tell(Event::Continued { is_submitted: false });
                }
                self.notice = None;
                self.tell(Event::AgentEnded);
            }
            3 => self.start(),
            4 => {
                // The computer is suspended.
                self.wall += self.dice.below(30_000) as i64;
                self.tell(Event::TimePassed);
            }
            _ => {
                let seconds = self.dice.below(4000);
                self.pass(seconds);
            }
        }
        if self.is_sending && self.dice.one_in(2) {
            self.is_sending = false;
            let is_submitted = !self.dice.one_in(4);
            self.tell(Event::Continued { is_submitted });
            if is_submitted {
                self.turn();
            }
        }
    }

    /// Time passes on both clocks, with a stop at each deadline.
    fn pass(&mut self, seconds: u64) {
        let end = self.awake + seconds;
        while let Some(at) = self.limit.deadline() {
            let at = (at - self.born).as_secs().max(self.awake + 1);
            if at > end || self.is_sending {
                break;
            }
            self.wall += (at - self.awake) as i64;
            self.awake = at;
            self.tell(Event::TimePassed);
        }
        self.wall += (end - self.awake) as i64;
        self.awake = end;
        self.tell(Event::TimePassed);
    }

    /// In the end every limited agent that runs was told to continue.
    fn settle(&mut self) {
        if !self.is_running {
            self.start();
        }
        let mut patience = 3 * (UNKNOWN_WAIT + RETRY_MAX) + 20_000 + MARGIN_ITSELF + MARGIN_MINUTE;
        while self.is_limited && patience > 0 {
            self.pass(LOOK_AT_CLOCK.as_secs());
            patience -= LOOK_AT_CLOCK.as_secs() as i64;
            if std::mem::take(&mut self.is_sending) {
                self.limited_until = None;
                self.notice = None;
                self.tell(Event::Continued { is_submitted: true });
                self.tell(Event::Worked);
            }
        }
        // After too many failures a person must act.
        if self.is_limited {
            assert_eq!(self.limit.deadline(), None, "it waits for nothing that time could bring");
            self.tell(Event::Worked);
        }
        assert!(!self.is_limited && self.limit.deadline().is_none());
    }
}

/// A program reads what the last one wrote. If this fails, the format of the state has changed: it needs a new version
/// (`outlast::upgrade`), a migration from this one, and lines of its own.
#[test]
fn the_format_of_a_saved_limit_is_that_of_its_version() {
    let now = birth();
    for line in include_str!("saved/limit-1.jsonl").lines() {
        let saved = serde_json::from_str(line).unwrap();
        let again = Limit::restore(OnLimit::Wait, saved, now).save(now);
        assert_eq!(serde_json::to_string(&again).unwrap(), line);
    }
}

/// Before any event another program may continue with the limit. No difference can be seen from outside.
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

#[test]
fn a_limited_agent_continues_once_and_never_too_early() {
    let (from, count) = seeds(400);
    for seed in from..from + count {
        World::new(seed).run();
    }
}
