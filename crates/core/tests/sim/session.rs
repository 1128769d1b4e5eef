//! Agents with lifetimes of any length, and people who interfere, around one `Session`.

use std::time::{Duration, Instant};

use outlast_core::exit::{Exit, How};
use outlast_core::restarts::{Policy, State as Health};
use outlast_core::session::{Action, Choice, Event, LastInput, Mode, Note, Session};

use crate::{Dice, Upgrades, birth, ms};

/// Five lifetimes and four backoffs: the longest time until a session that keeps crashing is halted.
fn halts_within(life: Duration) -> Duration {
    5 * life + 4 * Duration::from_secs(30)
}

#[test]
fn for_every_lifetime_a_session_stays_healthy_or_halts_in_bounded_time() {
    for half_seconds in 0..=600u64 {
        let life = ms(half_seconds * 500);
        let mut now = birth();
        let begun = now;
        let mut session = Session::new(Policy::session(), half_seconds, true);
        session.begin(Mode::Fresh);
        let halted = (1..=200).find_map(|pid| {
            session.handle(Event::Started { pid, mode: Mode::Fresh }, now);
            session.handle(Event::PromptShown, now);
            now += life;
            session.handle(Event::TimePassed, now);
            session.handle(Event::Ended { how: How::Exited(Exit::Code(1)), last_input: LastInput::Other }, now);
            if session.state() == "halted" {
                return Some(now - begun);
            }
            now = session.deadline().expect("a start is planned");
            session.handle(Event::TimePassed, now);
            None
        });
        match halted {
            Some(after) => assert!(after <= halts_within(life), "{life:?} halted only after {after:?}"),
            None => {
                assert!(life >= Duration::from_secs(60), "{life:?} never halts");
                assert_eq!(session.health(), Health::Healthy, "{life:?}");
            }
        }
    }
}

#[test]
fn a_session_never_runs_two_agents_and_answers_every_request() {
    for seed in 0..2_000 {
        World::new(seed).run();
    }
}

/// A program reads what the last one wrote. If this fails, the format of the state has changed: it needs a new version
/// (`outlast::upgrade`), a migration from this one, and lines of its own.
#[test]
fn the_format_of_a_saved_session_is_that_of_its_version() {
    let now = birth();
    for line in include_str!("saved/session-1.jsonl").lines() {
        let saved = serde_json::from_str(line).unwrap();
        let again = Session::restore(Policy::session(), saved, now).save(now).unwrap();
        assert_eq!(serde_json::to_string(&again).unwrap(), line);
    }
}

/// Before any event another program may continue with the session. No difference can be seen from outside.
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
    assert!(upgrades > 1_000, "{upgrades} upgrades");
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Agent {
    None,
    Starting,
    Running,
}

struct World {
    seed: u64,
    dice: Dice,
    now: Instant,
    session: Session,
    agent: Agent,
    pid: u32,
    asked: Vec<u64>,
    tickets: u64,
    is_asking: bool,
    over: bool,
    upgrades: Upgrades,
    /// What the session did.
    story: Vec<String>,
}

impl World {
    fn new(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        let has_terminal = dice.one_in(2);
        let session = Session::new(Policy::session(), seed, has_terminal);
        World {
            seed,
            dice,
            now: birth(),
            session,
            agent: Agent::None,
            pid: 0,
            asked: Vec::new(),
            tickets: 0,
            is_asking: false,
            over: false,
            upgrades: Upgrades::default(),
            story: Vec::new(),
        }
    }

    fn run(mut self) -> World {
        let actions = self.session.begin(Mode::Fresh);
        self.act(actions);
        for _ in 0..120 {
            if self.over {
                break;
            }
            let event = self.dream();
            self.say(event);
        }
        // A forced stop, and the events that follow from it, answer every request and end the session.
        for _ in 0..4 {
            if !self.over {
                self.say(Event::StopAsked { force: true });
            }
            match self.agent {
                Agent::Starting => {
                    self.agent = Agent::Running;
                    self.pid += 1;
                    self.say(Event::Started { pid: self.pid, mode: Mode::Fresh });
                }
                Agent::Running => self.end(),
                Agent::None => {}
            }
        }
        assert!(self.over, "seed {}: a stop ends it", self.seed);
        assert!(self.asked.is_empty(), "seed {}: {:?} were never answered", self.seed, self.asked);
        self
    }

    fn dream(&mut self) -> Event {
        self.now += ms(self.dice.below(40_000));
        self.tickets += 1;
        let ticket = self.tickets;
        let mode = self.dice.pick(&[Mode::Fresh, Mode::Continue]);
        match self.dice.below(12) {
            0 => {
                self.asked.push(ticket);
                Event::RestartAsked { ticket, mode }
            }
            1 => {
                self.asked.push(ticket);
                Event::ResumeAsked { ticket }
            }
            2 => Event::Chosen(self.dice.pick(&[Choice::Start(mode), Choice::Quit])),
            3 if self.dice.one_in(10) => Event::StopAsked { force: self.dice.one_in(2) },
            4 if self.dice.one_in(10) => Event::TerminalLost,
            5 => Event::TimePassed,
            6 if self.dice.one_in(4) => Event::Hung { silent_for: ms(60_000) },
            7 if self.dice.one_in(10) => Event::TerminalFound,
            8 if self.dice.one_in(2) => Event::KeyTyped,
            _ => match self.agent {
                Agent::Starting if self.dice.one_in(8) => {
                    self.agent = Agent::None;
                    Event::StartFailed { why: "no".into(), code: 127 }
                }
                Agent::Starting => {
                    self.agent = Agent::Running;
                    self.pid += 1;
                    Event::Started { pid: self.pid, mode }
                }
                Agent::Running if self.dice.one_in(2) => Event::PromptShown,
                Agent::Running => {
                    self.agent = Agent::None;
                    self.ending()
                }
                Agent::None => {
                    self.now = self.session.deadline().unwrap_or(self.now).max(self.now);
                    Event::TimePassed
                }
            },
        }
    }

    fn ending(&mut self) -> Event {
        let how = self.dice.pick(&[Exit::Code(0), Exit::Code(1), Exit::Signal(9), Exit::Code(143)]);
        let last_input = self.dice.pick(&[LastInput::Other, LastInput::Other, LastInput::Quit]);
        Event::Ended { how: How::Exited(how), last_input }
    }

    fn end(&mut self) {
        self.agent = Agent::None;
        let event = self.ending();
        self.say(event);
    }

    fn upgrade(&mut self) {
        let saved = self.upgrades.take_over(|| self.session.save(self.now).ok());
        let Some(saved) = saved else { return };
        let session = Session::restore(Policy::session(), saved.clone(), self.now);
        assert_eq!(session.save(self.now), Ok(saved), "seed {}", self.seed);
        assert_eq!(session.deadline(), self.session.deadline(), "seed {}: another deadline", self.seed);
        self.session = session;
    }

    fn say(&mut self, event: Event) {
        self.upgrade();
        let was_halted = self.session.state() == "halted";
        let may_wake = matches!(event, Event::ResumeAsked { .. });
        let actions = self.session.handle(event, self.now);
        self.story.push(format!("{actions:?}, then {}", self.session.state()));
        if was_halted && !may_wake {
            let wakes = actions.iter().any(|action| matches!(action, Action::Start(_)));
            assert!(!wakes, "seed {}: halted is halted", self.seed);
        }
        self.act(actions);
        assert_eq!(self.session.is_asking(), self.is_asking, "seed {}", self.seed);
    }

    fn act(&mut self, actions: Vec<Action>) {
        for action in actions {
            assert!(!self.over, "seed {}: nothing happens after the end", self.seed);
            match action {
                Action::Start(_) => {
                    assert_eq!(self.agent, Agent::None, "seed {}: two agents", self.seed);
                    self.agent = Agent::Starting;
                    self.is_asking = false;
                }
                Action::Stop | Action::Kill | Action::StopHung(_) => {
                    assert_ne!(self.agent, Agent::None, "seed {}", self.seed)
                }
                Action::Ask => self.is_asking = true,
                Action::Note(Note::Ended { crashes, .. }) => assert!(crashes <= 5, "seed {}", self.seed),
                Action::Note(_) => {}
                Action::Answer { ticket, .. } => {
                    let at = self.asked.iter().position(|asked| *asked == ticket);
                    self.asked.remove(at.unwrap_or_else(|| panic!("seed {}: answered twice", self.seed)));
                }
                Action::End(_) => {
                    assert_eq!(self.agent, Agent::None, "seed {}: an agent is left", self.seed);
                    self.over = true;
                    self.is_asking = false;
                }
            }
        }
    }
}
