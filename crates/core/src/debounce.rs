//! When changed files are worth a reload: once they have been quiet for a moment, or have been restless too long.

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    time::{Duration, Instant},
};

/// How long nothing may change before a change counts.
pub const QUIET: Duration = Duration::from_millis(100);
/// How long constant change can put the news off.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// How many paths are named; the others are counted.
pub const PATHS_SHOWN: usize = 5;
/// How many paths are told apart; beyond that nothing more is counted, and `more` is the least it could be.
pub const PATHS_COUNTED: usize = 1_000;

/// One thing that happened to the watched files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// This file's content was changed, or it came or went.
    To(PathBuf),
    /// Something changed, and what it was got lost on the way.
    Somewhere,
}

/// All that changed since the last time, as one piece of news.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Changed {
    /// The first few, in the order they came; empty if none is known.
    pub paths: Vec<PathBuf>,
    /// How many others there were.
    pub more: usize,
}

/// Gathers changes into news. A save is many changes, a checkout is thousands, and a build never seems to end:
/// each is one reload.
#[derive(Debug)]
pub struct Debounce {
    quiet: Duration,
    patience: Duration,
    state: State,
}

#[derive(Debug)]
enum State {
    Quiet,
    Restless { since: Instant, latest: Instant, paths: Vec<PathBuf>, others: HashSet<PathBuf> },
}

impl Default for Debounce {
    fn default() -> Debounce {
        Debounce::new(QUIET, PATIENCE)
    }
}

impl Debounce {
    pub fn new(quiet: Duration, patience: Duration) -> Debounce {
        Debounce { quiet, patience, state: State::Quiet }
    }

    /// `None` says that only time passed; early or twice, that changes nothing. A change never makes news by
    /// itself: the news is out when the deadline is reached.
    pub fn handle(&mut self, change: Option<Change>, now: Instant) -> Option<Changed> {
        match change {
            Some(change) => {
                self.note(change, now);
                None
            }
            None => self.time_passed(now),
        }
    }

    /// When it next wants to hear that time passed.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Quiet => None,
            State::Restless { since, latest, .. } => Some((*latest + self.quiet).min(*since + self.patience)),
        }
    }

    fn note(&mut self, change: Change, now: Instant) {
        if let State::Quiet = self.state {
            self.state = State::Restless { since: now, latest: now, paths: Vec::new(), others: HashSet::new() };
        }
        let State::Restless { latest, paths, others, .. } = &mut self.state else { return };
        *latest = now;
        match change {
            Change::To(path) if paths.contains(&path) => {}
            Change::To(path) if paths.len() < PATHS_SHOWN => paths.push(path),
            Change::To(path) if others.len() < PATHS_COUNTED => drop(others.insert(path)),
            Change::To(_) | Change::Somewhere => {}
        }
    }

    fn time_passed(&mut self, now: Instant) -> Option<Changed> {
        if self.deadline()? > now {
            return None;
        }
        match std::mem::replace(&mut self.state, State::Quiet) {
            State::Quiet => None,
            State::Restless { paths, others, .. } => Some(Changed { paths, more: others.len() }),
        }
    }
}

/// Files that a server itself changes at each start would reload it for ever. Whoever changes right after a reload, time
/// and again, is no longer news.
#[derive(Debug, Default)]
pub struct Habits {
    last_reload: Option<Instant>,
    /// How often in a row each file changed right after a reload.
    counts: HashMap<PathBuf, u32>,
}

/// A change so soon after a reload may be the server's own doing.
const RIGHT_AFTER: Duration = Duration::from_millis(1500);
/// So many in a row are a habit.
const HABIT: u32 = 5;
/// Files that are counted; beyond that none is added.
const HABITS_MAX: usize = 100;

/// What is left of the news.
#[derive(Debug, PartialEq, Eq)]
pub struct Judged {
    /// Worth a reload; `None` if every file in it is a habit.
    pub changed: Option<Changed>,
    /// Files that became a habit just now, to be said once.
    pub muted: Vec<PathBuf>,
}

impl Habits {
    pub fn judge(&mut self, changed: Changed, now: Instant) -> Judged {
        let right_after = self.last_reload.is_some_and(|at| now.duration_since(at) < RIGHT_AFTER);
        let mut muted = Vec::new();
        let mut news = Changed { paths: Vec::new(), more: changed.more };
        let unknown = changed.paths.is_empty();
        for path in changed.paths {
            let known = self.counts.contains_key(&path);
            if right_after && (known || self.counts.len() < HABITS_MAX) {
                let count = self.counts.entry(path.clone()).or_default();
                *count += 1;
                if *count == HABIT {
                    muted.push(path.clone());
                }
            } else if self.counts.get(&path).is_some_and(|count| *count < HABIT) {
                // Somebody took their time: that is work, not a habit.
                self.counts.remove(&path);
            }
            if self.counts.get(&path).is_none_or(|count| *count < HABIT) {
                news.paths.push(path);
            }
        }
        let is_news = unknown || !news.paths.is_empty() || news.more > 0;
        if is_news {
            self.last_reload = Some(now);
        }
        Judged { changed: is_news.then_some(news), muted }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a test needs one moment to count from")]
mod tests {
    use super::*;

    fn to(path: &str) -> Option<Change> {
        Some(Change::To(path.into()))
    }

    fn news(paths: &[&str], more: usize) -> Option<Changed> {
        Some(Changed { paths: paths.iter().map(PathBuf::from).collect(), more })
    }

    #[test]
    fn a_change_is_news_once_it_has_been_quiet() {
        let table = [
            // at ms  what happened             the news                next deadline
            (0, None, None, None),
            (0, to("a"), None, Some(100)),
            (50, None, None, Some(100)),
            (60, to("b"), None, Some(160)),
            (70, to("a"), None, Some(170)),
            (169, None, None, Some(170)),
            (170, None, news(&["a", "b"], 0), None),
            (171, None, None, None),
            (500, Some(Change::Somewhere), None, Some(600)),
            (650, None, news(&[], 0), None),
            (700, to("late"), None, Some(800)),
            (900, to("later"), None, Some(1000)),
            (1000, None, news(&["late", "later"], 0), None),
        ];
        play(&table);
    }

    #[test]
    fn constant_change_is_news_after_a_while() {
        let mut table = vec![];
        for at in (0..2000).step_by(50) {
            table.push((at, to("log"), None, Some((at + 100).min(2000))));
            table.push((at + 1, None, None, Some((at + 100).min(2000))));
        }
        table.push((2000, None, news(&["log"], 0), None));
        table.push((2001, to("log"), None, Some(2101)));
        play(&table);
    }

    #[test]
    fn a_few_paths_are_named_and_many_are_counted() {
        let start = Instant::now();
        let mut debounce = Debounce::default();
        for number in 0..PATHS_SHOWN + PATHS_COUNTED + 500 {
            for _ in 0..2 {
                assert_eq!(debounce.handle(to(&format!("{number}")), start), None);
            }
        }
        let changed = debounce.handle(None, start + PATIENCE);
        assert_eq!(changed, news(&["0", "1", "2", "3", "4"], PATHS_COUNTED));
    }

    /// At these milliseconds: what happened, the news, and the next deadline.
    type Step = (u64, Option<Change>, Option<Changed>, Option<u64>);

    fn play(table: &[Step]) {
        let start = Instant::now();
        let at = |milliseconds: u64| start + Duration::from_millis(milliseconds);
        let mut debounce = Debounce::default();
        for (now, change, news, deadline) in table {
            assert_eq!(debounce.handle(change.clone(), at(*now)), *news, "at {now}");
            assert_eq!(debounce.deadline(), deadline.map(at), "at {now}");
        }
    }

    #[test]
    fn a_file_that_changes_at_each_start_is_muted() {
        let begin = Instant::now();
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        let changed = |name: &str| Changed { paths: vec![PathBuf::from(name)], more: 0 };
        let mut habits = Habits::default();
        // The first reload is somebody's; then the server's own log goes on and on.
        assert!(habits.judge(changed("server.py"), at(0)).changed.is_some());
        for seconds in 1..=4 {
            assert!(habits.judge(changed("run.txt"), at(seconds)).changed.is_some());
        }
        let judged = habits.judge(changed("run.txt"), at(5));
        assert_eq!((judged.changed, judged.muted), (None, vec![PathBuf::from("run.txt")]));
        let judged = habits.judge(changed("run.txt"), at(60));
        assert_eq!((judged.changed, judged.muted), (None, vec![]), "it stays muted, and is said once");
        assert!(habits.judge(changed("server.py"), at(61)).changed.is_some(), "others are news");
        // Somebody who saves often, but not always at once, goes on being heard.
        for seconds in [70, 71, 72, 73, 80, 81, 82, 83, 90] {
            assert!(habits.judge(changed("server.py"), at(seconds)).changed.is_some(), "{seconds}");
        }
    }
}
