//! One agent's terminal and its viewers: which viewer sets its size, which get its bytes unchanged, and which get a
//! picture of its screen.
//!
//! The agent writes for a terminal of its size. A viewer of that size gets the bytes unchanged; for viewers of
//! another size, and for those that are too slow, the screen is painted from the model. The terminal has the size of
//! the viewer that typed last.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

mod saved;

pub use saved::Saved;

/// The shortest time between two pictures.
pub const PAINT_EVERY: Duration = Duration::from_millis(33);

/// Of a terminal: in cells, and in pixels where that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    pub columns: u16,
    pub rows: u16,
    pub width: u16,
    pub height: u16,
}

impl Default for Size {
    fn default() -> Size {
        Size { columns: 80, rows: 24, width: 0, height: 0 }
    }
}

impl Size {
    /// Compares cells, not pixels.
    pub fn holds_as_much_as(self, other: Size) -> bool {
        (self.columns, self.rows) == (other.columns, other.rows)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// `on_alternate`: the agent is on the alternate screen, and the screen below it cannot be shown.
    Attached {
        key: u64,
        role: Role,
        size: Size,
        on_alternate: bool,
    },
    Left {
        key: u64,
    },
    Resized {
        key: u64,
        size: Size,
    },
    /// A key press, not a reply of the terminal.
    Typed {
        key: u64,
    },
    /// The viewer's queue is full.
    FellBehind {
        key: u64,
    },
    /// The viewer's queue is empty again.
    Drained {
        key: u64,
    },
    /// Another program used its window for a while.
    PaintAsked {
        key: u64,
    },
    /// The agent wrote output.
    Shown,
    /// The agent is back on the main screen.
    LeftAlternate,
    TimePassed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The terminal that outlast itself was started from. If it is the only viewer, the agent waits for it
    /// (backpressure), as with any terminal.
    Owner,
    /// A terminal of `outlast attach`, which may type.
    #[serde(rename = "guest")]
    Attached,
    /// Reads only.
    Watcher,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Give the agent's terminal this size.
    Resize(Size),
    Paint {
        key: u64,
        /// Including the lines that have left the screen.
        with_history: bool,
    },
}

/// What a viewer gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Delivery {
    /// Every byte unchanged.
    Exact,
    /// Pictures of the screen.
    Painted,
    /// Nothing until its queue is empty; then a picture.
    Behind,
}

#[derive(Clone, Debug)]
struct Viewer {
    role: Role,
    size: Size,
    way: Delivery,
    /// The viewer that was active last has the largest number.
    active: u64,
    /// The screen has changed since its last picture. Only for viewers that get pictures.
    is_dirty: bool,
    /// A picture is still in its queue.
    is_busy: bool,
    painted: Option<Instant>,
    /// It has never been shown the screen below the alternate one.
    misses_below: bool,
}

#[derive(Clone, Debug)]
pub struct Terminal {
    size: Size,
    viewers: BTreeMap<u64, Viewer>,
    activity: u64,
}

impl Terminal {
    pub fn new(size: Size) -> Terminal {
        Terminal { size, viewers: BTreeMap::new(), activity: 0 }
    }

    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Attached { key, role, size, on_alternate } => {
                self.attached(key, role, size, on_alternate, now, &mut actions);
            }
            Event::Left { key } => {
                self.viewers.remove(&key);
                self.fit(None, now, &mut actions);
            }
            Event::Resized { key, size } => self.resized(key, size, now, &mut actions),
            Event::Typed { key } => self.typed(key, now, &mut actions),
            Event::FellBehind { key } => {
                if let Some(viewer) = self.viewers.get_mut(&key) {
                    viewer.way = Delivery::Behind;
                }
            }
            Event::PaintAsked { key } => self.paint(key, false, now, &mut actions),
            Event::Drained { key } => self.drained(key, now, &mut actions),
            Event::Shown => {
                for viewer in self.viewers.values_mut().filter(|viewer| viewer.way == Delivery::Painted) {
                    viewer.is_dirty = true;
                }
                self.paint_due(now, &mut actions);
            }
            Event::LeftAlternate => {
                for (key, viewer) in &mut self.viewers {
                    if std::mem::take(&mut viewer.misses_below) && viewer.way == Delivery::Exact {
                        actions.push(Action::Paint { key: *key, with_history: false });
                    }
                }
            }
            Event::TimePassed => self.paint_due(now, &mut actions),
        }
        actions
    }

    /// When the driver must report `TimePassed`.
    pub fn deadline(&self) -> Option<Instant> {
        let waiting = self.viewers.values().filter(|viewer| viewer.is_dirty && !viewer.is_busy);
        waiting.filter_map(|viewer| viewer.painted).map(|painted| painted + PAINT_EVERY).min()
    }

    pub fn size(&self) -> Size {
        self.size
    }

    pub fn count(&self) -> usize {
        self.viewers.len()
    }

    pub fn way(&self, key: u64) -> Option<Delivery> {
        self.viewers.get(&key).map(|viewer| viewer.way)
    }

    /// There is a person to ask.
    pub fn has_person(&self) -> bool {
        self.leader().is_some()
    }

    /// Whether replies of this viewer's terminal go to the agent. Only one viewer answers: several would answer one
    /// query several times.
    pub fn answers(&self, key: u64) -> bool {
        self.leader() == Some(key)
    }

    /// Whether the agent waits while this viewer is slow: it is the owner, and the only viewer.
    pub fn sets_the_pace(&self, key: u64) -> bool {
        self.viewers.len() == 1 && self.viewers.get(&key).is_some_and(|viewer| viewer.role == Role::Owner)
    }

    pub fn may_type(&self, key: u64) -> bool {
        self.viewers.get(&key).is_some_and(|viewer| viewer.role != Role::Watcher)
    }

    /// The viewer that was active last, without watchers.
    fn leader(&self) -> Option<u64> {
        let able = self.viewers.iter().filter(|(_, viewer)| viewer.role != Role::Watcher);
        able.max_by_key(|(_, viewer)| viewer.active).map(|(key, _)| *key)
    }

    fn attached(
        &mut self,
        key: u64,
        role: Role,
        size: Size,
        on_alternate: bool,
        now: Instant,
        actions: &mut Vec<Action>,
    ) {
        self.activity += 1;
        let viewer = Viewer {
            role,
            size,
            // Its first picture decides.
            way: Delivery::Exact,
            active: self.activity,
            is_dirty: false,
            is_busy: false,
            painted: None,
            misses_below: on_alternate,
        };
        self.viewers.insert(key, viewer);
        self.fit(Some(key), now, actions);
        // The owner was attached before the first output.
        if role != Role::Owner {
            actions.retain(|action| !matches!(action, Action::Paint { key: painted, .. } if *painted == key));
            self.paint(key, true, now, actions);
        }
    }

    fn resized(&mut self, key: u64, size: Size, now: Instant, actions: &mut Vec<Action>) {
        let Some(viewer) = self.viewers.get_mut(&key) else { return };
        viewer.size = size;
        self.fit(Some(key), now, actions);
    }

    fn typed(&mut self, key: u64, now: Instant, actions: &mut Vec<Action>) {
        self.activity += 1;
        let Some(viewer) = self.viewers.get_mut(&key).filter(|viewer| viewer.role != Role::Watcher) else { return };
        viewer.active = self.activity;
        self.fit(None, now, actions);
    }

    /// Gives the terminal the size of the leader, and each viewer what follows from it. `moved`: the window of this
    /// viewer changed, so the agent draws anew for it.
    fn fit(&mut self, moved: Option<u64>, now: Instant, actions: &mut Vec<Action>) {
        let wanted = self.leader().and_then(|leader| self.viewers.get(&leader)).map(|viewer| viewer.size);
        if let Some(size) = wanted.filter(|size| *size != self.size) {
            self.size = size;
            actions.push(Action::Resize(size));
        }
        let keys: Vec<u64> = self.viewers.keys().copied().collect();
        for key in keys {
            let Some(viewer) = self.viewers.get_mut(&key) else { continue };
            let fits = viewer.size.holds_as_much_as(self.size);
            match (viewer.way, fits) {
                // `Drained` ends this state.
                (Delivery::Behind, _) | (Delivery::Exact, true) => {}
                (Delivery::Painted, true) => {
                    viewer.way = Delivery::Exact;
                    viewer.is_dirty = false;
                    self.paint(key, false, now, actions);
                }
                (Delivery::Exact, false) => {
                    viewer.way = Delivery::Painted;
                    self.paint(key, false, now, actions);
                }
                (Delivery::Painted, false) if moved == Some(key) => self.paint(key, false, now, actions),
                (Delivery::Painted, false) => {
                    viewer.is_dirty = true;
                    self.paint_due(now, actions);
                }
            }
        }
    }

    fn drained(&mut self, key: u64, now: Instant, actions: &mut Vec<Action>) {
        let size = self.size;
        let Some(viewer) = self.viewers.get_mut(&key) else { return };
        viewer.is_busy = false;
        if viewer.way == Delivery::Behind {
            viewer.way = if viewer.size.holds_as_much_as(size) { Delivery::Exact } else { Delivery::Painted };
            return self.paint(key, false, now, actions);
        }
        self.paint_due(now, actions);
    }

    fn paint_due(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let due = |viewer: &Viewer| {
            let has_rested = viewer.painted.is_none_or(|painted| painted + PAINT_EVERY <= now);
            viewer.is_dirty && !viewer.is_busy && has_rested
        };
        let keys: Vec<u64> = self.viewers.iter().filter(|(_, viewer)| due(viewer)).map(|(key, _)| *key).collect();
        for key in keys {
            self.paint(key, false, now, actions);
        }
    }

    fn paint(&mut self, key: u64, with_history: bool, now: Instant, actions: &mut Vec<Action>) {
        if let Some(viewer) = self.viewers.get_mut(&key) {
            viewer.is_dirty = false;
            viewer.is_busy = viewer.way == Delivery::Painted;
            viewer.painted = Some(now);
            actions.push(Action::Paint { key, with_history });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "a test needs some instant to count from")]
    fn birth() -> Instant {
        Instant::now()
    }

    fn size(columns: u16, rows: u16) -> Size {
        Size { columns, rows, width: 0, height: 0 }
    }

    fn came(key: u64, role: Role, size: Size) -> Event {
        Event::Attached { key, role, size, on_alternate: false }
    }

    const LARGE: (u16, u16) = (100, 40);
    const SMALL: (u16, u16) = (60, 20);

    fn large() -> Size {
        size(LARGE.0, LARGE.1)
    }

    fn small() -> Size {
        size(SMALL.0, SMALL.1)
    }

    fn painted(key: u64) -> Action {
        Action::Paint { key, with_history: false }
    }

    #[test]
    fn the_terminal_has_the_size_of_the_viewer_that_was_active_last() {
        let now = birth();
        let mut terminal = Terminal::new(large());
        assert_eq!(terminal.handle(came(1, Role::Owner, large()), now), []);
        let first = Action::Paint { key: 2, with_history: true };
        // The picture of the new viewer follows the resize, and the owner gets pictures from now on.
        let actions = terminal.handle(came(2, Role::Attached, small()), now);
        assert_eq!(actions, [Action::Resize(small()), painted(1), first]);
        assert_eq!((terminal.way(1), terminal.way(2)), (Some(Delivery::Painted), Some(Delivery::Exact)));
        assert_eq!(terminal.handle(Event::Typed { key: 2 }, now), []);
        let actions = terminal.handle(Event::Typed { key: 1 }, now);
        assert_eq!(actions, [Action::Resize(large()), painted(1), painted(2)]);
        assert_eq!((terminal.way(1), terminal.way(2)), (Some(Delivery::Exact), Some(Delivery::Painted)));
        // The size of a viewer that was not active last changes nothing.
        assert_eq!(terminal.handle(Event::Resized { key: 2, size: size(61, 20) }, now), [painted(2)]);
        assert_eq!(terminal.size(), large());
        let actions = terminal.handle(Event::Left { key: 1 }, now);
        assert_eq!(actions[0], Action::Resize(size(61, 20)));
        // Without viewers the size stays.
        assert_eq!(terminal.handle(Event::Left { key: 2 }, now), []);
        assert_eq!(terminal.size(), size(61, 20));
    }

    #[test]
    fn a_watcher_changes_no_size() {
        let now = birth();
        let mut terminal = Terminal::new(large());
        terminal.handle(came(1, Role::Watcher, small()), now);
        assert_eq!((terminal.size(), terminal.way(1)), (large(), Some(Delivery::Painted)));
        terminal.handle(Event::Typed { key: 1 }, now);
        assert!(!terminal.has_person() && !terminal.answers(1) && !terminal.may_type(1));
        terminal.handle(came(2, Role::Attached, large()), now);
        assert!(terminal.has_person() && terminal.answers(2) && terminal.may_type(2));
    }

    #[test]
    fn the_agent_waits_only_for_an_owner_without_other_viewers() {
        let now = birth();
        let mut terminal = Terminal::new(large());
        terminal.handle(came(1, Role::Owner, large()), now);
        assert!(terminal.sets_the_pace(1));
        terminal.handle(came(2, Role::Watcher, large()), now);
        assert!(!terminal.sets_the_pace(1));
        terminal.handle(Event::Left { key: 1 }, now);
        assert!(!terminal.sets_the_pace(2));
    }

    #[test]
    fn a_slow_viewer_gets_a_picture_when_its_queue_is_empty() {
        let now = birth();
        let mut terminal = Terminal::new(large());
        terminal.handle(came(1, Role::Attached, large()), now);
        terminal.handle(Event::FellBehind { key: 1 }, now);
        assert_eq!(terminal.way(1), Some(Delivery::Behind));
        assert_eq!(terminal.handle(Event::Shown, now), []);
        assert_eq!(terminal.handle(Event::Drained { key: 1 }, now), [painted(1)]);
        assert_eq!(terminal.way(1), Some(Delivery::Exact));
    }

    #[test]
    fn pictures_are_rate_limited_and_the_last_one_is_sent() {
        let now = birth();
        let mut terminal = Terminal::new(large());
        terminal.handle(came(1, Role::Attached, large()), now);
        terminal.handle(came(2, Role::Watcher, small()), now);
        assert_eq!(terminal.deadline(), None);
        assert_eq!(terminal.handle(Event::Shown, now), []);
        assert_eq!(terminal.handle(Event::Drained { key: 2 }, now), []);
        assert_eq!(terminal.deadline(), Some(now + PAINT_EVERY));
        assert_eq!(terminal.handle(Event::TimePassed, now), []);
        let later = now + PAINT_EVERY;
        assert_eq!(terminal.handle(Event::TimePassed, later), [painted(2)]);
        // The last picture is still in the queue.
        assert_eq!(terminal.handle(Event::Shown, later + PAINT_EVERY), []);
        assert_eq!(terminal.handle(Event::Drained { key: 2 }, later + PAINT_EVERY), [painted(2)]);
        assert_eq!(terminal.deadline(), None);
    }

    #[test]
    fn the_main_screen_is_painted_after_the_alternate_screen() {
        let now = birth();
        let mut terminal = Terminal::new(large());
        terminal.handle(came(1, Role::Owner, large()), now);
        terminal.handle(Event::Attached { key: 2, role: Role::Attached, size: large(), on_alternate: true }, now);
        assert_eq!(terminal.handle(Event::LeftAlternate, now), [painted(2)]);
        assert_eq!(terminal.handle(Event::LeftAlternate, now), []);
    }
}
