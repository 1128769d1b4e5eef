//! When changed files cause a reload: after a quiet time, or when changes have continued for too long. Finding the
//! changes and reading files is the driver's work.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::PathBuf,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::saved::Moment;

/// How long no file may change before the changes are reported.
pub const QUIET: Duration = Duration::from_millis(100);
/// How long continuous changes can delay the report.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// How many paths are named; the others are counted.
pub const PATHS_SHOWN: usize = 5;
/// How many different paths are counted. At the bound no further path is counted, and `more` is a lower bound.
pub const PATHS_COUNTED: usize = 1_000;

/// One change of a watched file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The content of this file changed, or the file was created or removed.
    To(PathBuf),
    /// This file was moved together with its directory, so that its own times may be older than the move.
    Moved(PathBuf),
    /// Something changed, and the path was lost on the way.
    Somewhere,
}

/// All changes since the last report.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Changed {
    /// The first few, in the order of the changes; empty if none is known.
    pub paths: Vec<PathBuf>,
    /// How many other paths changed.
    pub more: usize,
    /// Some files were moved with their directory: their own times do not show when.
    pub is_moved: bool,
}

/// Gathers changes into one report. A save is many changes, a checkout is thousands, and a build changes files for a
/// long time: each causes one reload.
#[derive(Debug)]
pub struct Debounce {
    quiet: Duration,
    patience: Duration,
    state: State,
}

#[derive(Debug)]
enum State {
    Quiet,
    Restless { since: Instant, latest: Instant, paths: Vec<PathBuf>, others: HashSet<PathBuf>, is_moved: bool },
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

    /// `None` means that only time passed; an early or repeated call changes nothing. A change alone never causes a
    /// report: it is returned when the deadline is reached.
    pub fn handle(&mut self, change: Option<Change>, now: Instant) -> Option<Changed> {
        match change {
            Some(change) => {
                self.note(change, now);
                None
            }
            None => self.time_passed(now),
        }
    }

    /// When the machine next needs a call because time passed.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Quiet => None,
            State::Restless { since, latest, .. } => Some((*latest + self.quiet).min(*since + self.patience)),
        }
    }

    fn note(&mut self, change: Change, now: Instant) {
        if let State::Quiet = self.state {
            let (paths, others) = (Vec::new(), HashSet::new());
            self.state = State::Restless { since: now, latest: now, paths, others, is_moved: false };
        }
        let State::Restless { latest, paths, others, is_moved, .. } = &mut self.state else { return };
        *latest = now;
        *is_moved |= matches!(change, Change::Moved(_));
        match change {
            Change::To(path) | Change::Moved(path) if paths.contains(&path) => {}
            Change::To(path) | Change::Moved(path) if paths.len() < PATHS_SHOWN => paths.push(path),
            Change::To(path) | Change::Moved(path) if others.len() < PATHS_COUNTED => drop(others.insert(path)),
            Change::To(_) | Change::Moved(_) | Change::Somewhere => {}
        }
    }

    fn time_passed(&mut self, now: Instant) -> Option<Changed> {
        if self.deadline()? > now {
            return None;
        }
        match std::mem::replace(&mut self.state, State::Quiet) {
            State::Quiet => None,
            State::Restless { paths, others, is_moved, .. } => Some(Changed { paths, more: others.len(), is_moved }),
        }
    }
}

/// Which changed files cause a reload. A file that the server itself changes at each start would reload it for ever,
/// so a file that changes right after several starts in a row is *muted*: it causes no reload for now.
///
/// Frequent saves of a person look the same at first, so no change may be lost. If the content of a muted file
/// differs from the loaded content, the file is loaded once more after a quiet time. Only if it changes right after
/// that start as well does the server itself write it. A change at any other time unmutes it at once, and so do a
/// quiet minute and a requested restart.
#[derive(Debug, Default)]
pub struct Habits {
    /// When a start, a build or a handshake was last reported: it may have caused a change soon after it.
    disturbed: Option<Instant>,
    files: HashMap<PathBuf, Habit>,
}

/// A hash of a file's content, or of its metadata if it is too large to be read.
pub type Print = u64;

/// One file that changed right after a start.
#[derive(Debug, Clone)]
struct Habit {
    /// How many times in a row.
    count: u32,
    muted: Option<Muted>,
    /// It changed right after the start that loaded it once more: the server writes it.
    is_own: bool,
    changed: Instant,
    /// Its content at the latest change; none if it is gone or could not be read.
    print: Option<Print>,
    /// Its content as the newest server loaded it.
    loaded: Option<Print>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Muted {
    /// Loaded once more at this time, if its content differs from the loaded content.
    Until(Instant),
    /// That load was requested; a change right after the start comes from the server.
    Tried,
    Settled,
}

/// The server may have caused a change this soon after a start.
pub const RIGHT_AFTER: Duration = Duration::from_millis(1500);
/// How many such changes in a row mute a file.
pub const HABIT: u32 = 5;
/// A muted file that has not changed for this long is unmuted.
pub const QUIET_MINUTE: Duration = Duration::from_secs(60);
/// How many files are counted. At the bound no further file is added, and such a file is never muted.
pub const HABITS_MAX: usize = 100;

/// What is left of a report after the muted files.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Judged {
    /// The changes that cause a reload.
    pub changed: Option<Changed>,
    /// Files that were muted just now.
    pub muted: Vec<PathBuf>,
    /// Files that were unmuted just now.
    pub unmuted: Vec<PathBuf>,
}

impl Habits {
    /// `prints` belong to the paths, in their order.
    pub fn judge(&mut self, mut changed: Changed, prints: &[Option<Print>], now: Instant) -> Judged {
        let right_after = self.disturbed.is_some_and(|at| now.saturating_duration_since(at) < RIGHT_AFTER);
        let mut judged = Judged::default();
        let paths = std::mem::take(&mut changed.paths);
        let mut news = changed;
        let unknown = paths.is_empty();
        for (index, path) in paths.into_iter().enumerate() {
            let print = prints.get(index).copied().flatten();
            if self.is_news(&path, print, right_after, now, &mut judged) {
                news.paths.push(path);
            }
        }
        if unknown || !news.paths.is_empty() || news.more > 0 {
            self.disturbed(now);
            judged.changed = Some(news);
        }
        judged
    }

    fn is_news(
        &mut self,
        path: &PathBuf,
        print: Option<Print>,
        right_after: bool,
        now: Instant,
        judged: &mut Judged,
    ) -> bool {
        let has_room = self.files.len() < HABITS_MAX;
        let Some(habit) = self.files.get_mut(path) else {
            if right_after && has_room {
                let habit = Habit { count: 1, muted: None, is_own: false, changed: now, print, loaded: None };
                self.files.insert(path.clone(), habit);
            }
            return true;
        };
        habit.changed = now;
        habit.print = print;
        let is_loaded = print.is_some() && print == habit.loaded;
        match habit.muted {
            Some(_) if is_loaded => false,
            Some(muted) if right_after => {
                if muted == Muted::Tried {
                    habit.is_own = true;
                }
                habit.muted = Some(if habit.is_own { Muted::Settled } else { Muted::Until(now + RIGHT_AFTER) });
                false
            }
            // Other content, and no start caused it. One more change right after a start mutes it again.
            Some(_) => {
                *habit = Habit { count: HABIT - 1, muted: None, is_own: false, ..habit.clone() };
                judged.unmuted.push(path.clone());
                true
            }
            None if right_after => {
                habit.count += 1;
                if habit.count < HABIT {
                    return true;
                }
                habit.muted = Some(if habit.is_own { Muted::Settled } else { Muted::Until(now + RIGHT_AFTER) });
                judged.muted.push(path.clone());
                false
            }
            // A change at any other time comes from a person.
            None => {
                self.files.remove(path);
                true
            }
        }
    }

    /// outlast began or ended something that may change files: a start, a build, a handshake.
    pub fn disturbed(&mut self, now: Instant) {
        self.disturbed = Some(now);
    }

    /// A server was started, or the build before it: it loads the files as they are.
    pub fn loaded(&mut self, now: Instant) {
        self.disturbed(now);
        self.files.values_mut().for_each(|habit| habit.loaded = habit.print);
    }

    /// A person or an agent requested a restart. Returns the files that it unmutes; one more change right after a
    /// start mutes each of them again.
    pub fn restart_requested(&mut self) -> Vec<PathBuf> {
        self.unmute(|_| true)
    }

    /// When the machine next needs a call because time passed.
    pub fn deadline(&self) -> Option<Instant> {
        self.files.values().filter_map(Habit::deadline).min()
    }

    /// An early or repeated call changes nothing.
    pub fn time_passed(&mut self, now: Instant) -> Judged {
        let unmuted = self.unmute(|habit| habit.changed + QUIET_MINUTE <= now);
        let mut due = Vec::new();
        for (path, habit) in &mut self.files {
            if matches!(habit.muted, Some(Muted::Until(at)) if at <= now) {
                let is_loaded = habit.print.is_some() && habit.print == habit.loaded;
                habit.muted = Some(if is_loaded { Muted::Settled } else { Muted::Tried });
                due.extend((!is_loaded).then(|| path.clone()));
            }
        }
        if due.is_empty() {
            return Judged { unmuted, ..Judged::default() };
        }
        due.sort();
        let more = due.len().saturating_sub(PATHS_SHOWN);
        due.truncate(PATHS_SHOWN);
        self.disturbed(now);
        let changed = Changed { paths: due, more, ..Changed::default() };
        Judged { changed: Some(changed), muted: Vec::new(), unmuted }
    }

    /// The files that cause no reload now, in order.
    pub fn muted(&self) -> Vec<&PathBuf> {
        let mut paths: Vec<&PathBuf> =
            self.files.iter().filter(|(_, habit)| habit.muted.is_some()).map(|(path, _)| path).collect();
        paths.sort();
        paths
    }

    fn unmute(&mut self, wanted: impl Fn(&Habit) -> bool) -> Vec<PathBuf> {
        let mut unmuted = Vec::new();
        for (path, habit) in &mut self.files {
            if habit.muted.is_some() && wanted(habit) {
                habit.muted = None;
                habit.count = HABIT - 1;
                unmuted.push(path.clone());
            }
        }
        unmuted.sort();
        unmuted
    }
}

impl Habit {
    fn deadline(&self) -> Option<Instant> {
        let quiet = self.changed + QUIET_MINUTE;
        self.muted.map(|muted| match muted {
            Muted::Until(at) => at.min(quiet),
            Muted::Tried | Muted::Settled => quiet,
        })
    }
}

/// [`Habits`] as saved state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    disturbed: Option<Moment>,
    /// Files whose paths are not UTF-8 are left out: they count anew.
    files: BTreeMap<String, SavedHabit>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SavedHabit {
    count: u32,
    muted: Option<SavedMuted>,
    is_own: bool,
    changed: Moment,
    print: Option<Print>,
    loaded: Option<Print>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SavedMuted {
    Until(Moment),
    Tried,
    Settled,
}

impl Habits {
    pub fn save(&self, now: Instant) -> Saved {
        let moment = |at: Instant| Moment::of(at, now);
        let save = |habit: &Habit| SavedHabit {
            count: habit.count,
            muted: habit.muted.map(|muted| match muted {
                Muted::Until(at) => SavedMuted::Until(moment(at)),
                Muted::Tried => SavedMuted::Tried,
                Muted::Settled => SavedMuted::Settled,
            }),
            is_own: habit.is_own,
            changed: moment(habit.changed),
            print: habit.print,
            loaded: habit.loaded,
        };
        let files = self.files.iter().filter_map(|(path, habit)| Some((path.to_str()?.to_owned(), save(habit))));
        Saved { disturbed: self.disturbed.map(moment), files: files.collect() }
    }

    pub fn restore(saved: Saved, now: Instant) -> Habits {
        let restore = |habit: SavedHabit| Habit {
            count: habit.count,
            muted: habit.muted.map(|muted| match muted {
                SavedMuted::Until(at) => Muted::Until(at.at(now)),
                SavedMuted::Tried => Muted::Tried,
                SavedMuted::Settled => Muted::Settled,
            }),
            is_own: habit.is_own,
            changed: habit.changed.at(now),
            print: habit.print,
            loaded: habit.loaded,
        };
        let files = saved.files.into_iter().map(|(path, habit)| (path.into(), restore(habit)));
        Habits { disturbed: saved.disturbed.map(|at| at.at(now)), files: files.collect() }
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
        Some(Changed { paths: paths.iter().map(PathBuf::from).collect(), more, is_moved: false })
    }

    #[test]
    fn a_change_is_reported_after_a_quiet_period() {
        let table = [
            // at ms  what happened             reported                next deadline
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
    fn constant_changes_are_reported_after_a_time_limit() {
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

    /// Time in milliseconds, change, report, and the next deadline.
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

    /// A watched project with a server that may write a file at each start.
    struct Project {
        habits: Habits,
        begin: Instant,
        now: Instant,
        /// The content of the file that the server writes; it differs at each start.
        own: Option<Print>,
        content: Print,
        loaded: Print,
        reloads: u32,
    }

    const FILE: &str = "server.py";

    impl Project {
        fn new(writes_at_start: bool) -> Project {
            let begin = Instant::now();
            let own = writes_at_start.then_some(1_000);
            let mut project =
                Project { habits: Habits::default(), begin, now: begin, own, content: 1, loaded: 0, reloads: 0 };
            project.starts();
            project
        }

        fn at(&mut self, ms: u64) {
            let to = self.begin + Duration::from_millis(ms);
            for _ in 0..1_000 {
                match self.habits.deadline().filter(|due| *due <= to) {
                    Some(due) => {
                        self.now = due.max(self.now);
                        let judged = self.habits.time_passed(self.now);
                        assert!(self.habits.deadline().is_none_or(|due| due > self.now));
                        self.follow(judged);
                    }
                    None => {
                        self.now = to;
                        return;
                    }
                }
            }
            panic!("it wants to be woken without end");
        }

        fn saves(&mut self, content: Print) {
            self.content = content;
            self.changes(FILE, content);
        }

        fn changes(&mut self, path: &str, print: Print) {
            let changed = Changed { paths: vec![path.into()], ..Changed::default() };
            let judged = self.habits.judge(changed, &[Some(print)], self.now);
            self.follow(judged);
        }

        fn follow(&mut self, judged: Judged) {
            if judged.changed.is_some() {
                self.reloads += 1;
                assert!(self.reloads < 100, "it reloads without end");
                self.starts();
            }
        }

        fn starts(&mut self) {
            self.habits.loaded(self.now);
            self.loaded = self.content;
            if let Some(own) = &mut self.own {
                *own += 1;
                let print = *own;
                self.now += Duration::from_millis(200);
                self.changes("run.txt", print);
            }
        }

        fn muted(&self) -> Vec<&str> {
            self.habits.muted().iter().filter_map(|path| path.to_str()).collect()
        }
    }

    #[test]
    fn after_quick_saves_the_last_content_is_served() {
        for gap in [100, 300, 700, 1_000, 1_400, 1_499, 1_500, 2_000] {
            for saves in 1..30 {
                let mut project = Project::new(false);
                for number in 0..saves {
                    project.at(10_000 + gap * number);
                    project.saves(100 + number);
                }
                project.at(10_000 + gap * saves + 3_000);
                assert_eq!(project.loaded, project.content, "{saves} saves, {gap} ms apart");
                // And the next save counts at once.
                project.at(10_000 + gap * saves + 5_000);
                project.saves(7);
                assert_eq!(project.loaded, 7, "{saves} saves, {gap} ms apart");
                assert_eq!(project.muted(), [""; 0]);
            }
        }
    }

    #[test]
    fn a_file_that_the_server_writes_at_each_start_is_muted_soon() {
        let mut project = Project::new(true);
        project.at(10_000);
        assert!(project.reloads <= HABIT + 1, "{}", project.reloads);
        assert_eq!(project.muted(), ["run.txt"]);
        let reloads = project.reloads;
        project.at(50_000);
        assert_eq!(project.reloads, reloads, "it stays muted");

        // Another file still counts; the file that the server writes at the start caused by it does not.
        project.saves(5);
        assert_eq!((project.loaded, project.reloads), (5, reloads + 1));
        project.at(60_000);
        assert_eq!((project.muted(), project.reloads), (vec!["run.txt"], reloads + 1));

        // A minute later it is unmuted. The next start writes it again, which mutes it at once.
        project.at(200_000);
        assert_eq!(project.muted(), [""; 0]);
        project.saves(6);
        project.at(210_000);
        assert_eq!((project.muted(), project.reloads), (vec!["run.txt"], reloads + 2));

        // The same for a requested restart.
        assert_eq!(project.habits.restart_requested(), [PathBuf::from("run.txt")]);
        assert_eq!(project.muted(), [""; 0]);
        project.starts();
        project.at(220_000);
        assert_eq!((project.muted(), project.reloads), (vec!["run.txt"], reloads + 2));

        // A change at another time comes from a person, and the count starts again.
        project.changes("run.txt", 7);
        project.at(240_000);
        assert!((reloads + 3..=reloads + 3 + HABIT + 1).contains(&project.reloads), "{}", project.reloads);
        assert_eq!(project.muted(), ["run.txt"]);
    }

    #[test]
    fn a_muted_file_that_is_rewritten_as_it_was_stays_muted() {
        let mut project = Project::new(false);
        for second in 0..10 {
            project.at(10_000 + 1_000 * second);
            project.changes("same.txt", 1);
        }
        let reloads = project.reloads;
        assert_eq!(project.muted(), ["same.txt"]);
        for second in 20..60 {
            project.at(1_000 * second);
            project.changes("same.txt", 1);
        }
        assert_eq!((project.muted(), project.reloads), (vec!["same.txt"], reloads));
        project.changes("same.txt", 2);
        assert_eq!((project.muted(), project.reloads), (vec![], reloads + 1), "other content counts at once");
    }

    #[test]
    fn the_counted_paths_are_bounded() {
        let mut project = Project::new(false);
        for number in 0..3 * HABITS_MAX {
            let changed = Changed { paths: vec![format!("{number}").into()], ..Changed::default() };
            project.habits.judge(changed, &[None], project.now);
        }
        assert_eq!(project.habits.files.len(), HABITS_MAX);
    }
}
