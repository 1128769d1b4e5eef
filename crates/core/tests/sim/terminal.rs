//! Viewers that attach, type, resize, read slowly and detach, around one `Terminal`.

use std::collections::BTreeMap;
use std::time::Instant;

use outlast_core::terminal::{Action, Delivery, Event, PAINT_EVERY, Role, Size, Terminal};

use crate::{Dice, Upgrades, birth, ms};

#[test]
fn every_viewer_ends_with_the_current_picture() {
    for seed in 0..2_000 {
        World::new(seed).run();
    }
}

/// A program reads what the last one wrote. If this fails, the format of the state has changed: it needs a new version
/// (`outlast::upgrade`), a migration from this one, and lines of its own.
#[test]
fn the_format_of_saved_viewers_is_that_of_its_version() {
    let now = birth();
    for line in include_str!("saved/terminal-1.jsonl").lines() {
        let saved = serde_json::from_str(line).unwrap();
        let again = Terminal::restore(saved, now).save(now);
        assert_eq!(serde_json::to_string(&again).unwrap(), line);
    }
}

/// Before any event another program may continue with the viewers. No difference can be seen from outside.
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

struct Viewer {
    role: Role,
    size: Size,
    active: u64,
    /// How much of the agent's output it has seen.
    seen: u64,
    /// Output waits for it.
    is_loaded: bool,
}

struct World {
    seed: u64,
    dice: Dice,
    now: Instant,
    terminal: Terminal,
    viewers: BTreeMap<u64, Viewer>,
    next: u64,
    activity: u64,
    written: u64,
    size: Size,
    upgrades: Upgrades,
    /// What the terminal did.
    story: Vec<String>,
}

impl World {
    fn new(seed: u64) -> World {
        let size = Size::default();
        World {
            seed,
            dice: Dice::new(seed),
            now: birth(),
            terminal: Terminal::new(size),
            viewers: BTreeMap::new(),
            next: 1,
            activity: 0,
            written: 0,
            size,
            upgrades: Upgrades::default(),
            story: Vec::new(),
        }
    }

    fn run(mut self) -> World {
        for _ in 0..80 {
            let event = self.dream();
            self.say(event);
        }
        // Pending output arrives, and time passes.
        for _ in 0..4 {
            for key in self.viewers.keys().copied().collect::<Vec<_>>() {
                self.drain(key);
            }
            self.now += PAINT_EVERY;
            self.say(Event::TimePassed);
        }
        for (key, viewer) in &self.viewers {
            assert_eq!(viewer.seen, self.written, "seed {}: {key} has not seen all", self.seed);
        }
        assert_eq!(self.terminal.deadline(), None, "seed {}: there is nothing more to do", self.seed);
        self
    }

    fn dream(&mut self) -> Event {
        self.now += ms(self.dice.below(40));
        let sizes = [(80, 24), (100, 40), (60, 20)].map(|(columns, rows)| Size { columns, rows, width: 0, height: 0 });
        let size = self.dice.pick(&sizes);
        let keys: Vec<u64> = self.viewers.keys().copied().collect();
        let picked = if keys.is_empty() { None } else { Some(self.dice.pick(&keys)) };
        match (self.dice.below(9), picked) {
            (0, _) | (_, None) => {
                let role = self.dice.pick(&[Role::Attached, Role::Attached, Role::Watcher]);
                let key = self.next;
                self.next += 1;
                self.activity += 1;
                let viewer = Viewer { role, size, active: self.activity, seen: 0, is_loaded: false };
                self.viewers.insert(key, viewer);
                Event::Attached { key, role, size, on_alternate: self.dice.one_in(3) }
            }
            (1, Some(key)) if self.dice.one_in(2) => {
                self.viewers.remove(&key);
                Event::Left { key }
            }
            (2, Some(key)) => {
                self.viewers.get_mut(&key).unwrap().size = size;
                Event::Resized { key, size }
            }
            (3, Some(key)) => {
                self.activity += 1;
                self.viewers.get_mut(&key).unwrap().active = self.activity;
                Event::Typed { key }
            }
            (4, Some(key)) if self.terminal.way(key) == Some(Delivery::Exact) => {
                self.viewers.get_mut(&key).unwrap().is_loaded = true;
                Event::FellBehind { key }
            }
            (5, Some(key)) => {
                self.viewers.get_mut(&key).unwrap().is_loaded = false;
                Event::Drained { key }
            }
            (6, _) => Event::LeftAlternate,
            (7, _) => Event::TimePassed,
            _ => {
                self.written += 1;
                for (key, viewer) in &mut self.viewers {
                    if self.terminal.way(*key) == Some(Delivery::Exact) {
                        viewer.seen = self.written;
                    }
                }
                Event::Shown
            }
        }
    }

    fn drain(&mut self, key: u64) {
        if let Some(viewer) = self.viewers.get_mut(&key) {
            viewer.is_loaded = false;
        }
        self.say(Event::Drained { key });
    }

    fn upgrade(&mut self) {
        let saved = self.upgrades.take_over(|| Some(self.terminal.save(self.now)));
        let Some(saved) = saved else { return };
        let terminal = Terminal::restore(saved.clone(), self.now);
        assert_eq!(terminal.save(self.now), saved, "seed {}", self.seed);
        assert_eq!(terminal.deadline(), self.terminal.deadline(), "seed {}: another deadline", self.seed);
        self.terminal = terminal;
    }

    fn say(&mut self, event: Event) {
        self.upgrade();
        let actions = self.terminal.handle(event, self.now);
        self.story.push(format!("{actions:?}"));
        for action in actions {
            match action {
                Action::Resize(size) => {
                    assert_ne!(size, self.size, "seed {}: it has this size", self.seed);
                    self.size = size;
                }
                Action::Paint { key, .. } => {
                    self.viewers.get_mut(&key).expect("a picture is for an attached viewer").seen = self.written;
                }
            }
        }
        self.check();
    }

    fn check(&self) {
        let seed = self.seed;
        assert_eq!(self.terminal.size(), self.size, "seed {seed}");
        let able = self.viewers.iter().filter(|(_, viewer)| viewer.role != Role::Watcher);
        let leader = able.max_by_key(|(_, viewer)| viewer.active);
        assert_eq!(self.terminal.has_person(), leader.is_some(), "seed {seed}");
        if let Some((key, viewer)) = leader {
            assert_eq!(viewer.size, self.size, "seed {seed}: the size is that of {key}, who typed last");
        }
        assert_eq!(self.terminal.count(), self.viewers.len(), "seed {seed}");
        let answering = self.viewers.keys().filter(|key| self.terminal.answers(**key)).count();
        assert_eq!(answering, usize::from(leader.is_some()), "seed {seed}: one answers, not several");
        for (key, viewer) in &self.viewers {
            match self.terminal.way(*key).expect("it is there") {
                Delivery::Exact => {
                    assert_eq!(viewer.size, self.size, "seed {seed}: bytes are for a terminal of the same size");
                    assert_eq!(viewer.seen, self.written, "seed {seed}: {key} gets every byte");
                }
                Delivery::Painted => assert_ne!(viewer.size, self.size, "seed {seed}: {key} could have the bytes"),
                Delivery::Behind => {}
            }
        }
    }
}
