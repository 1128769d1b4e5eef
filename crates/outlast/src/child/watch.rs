//! Watches files and directories for changes of content, for `--watch`, and reports when a reload is due. It does not
//! reload.

use ignore::{
    Match,
    gitignore::{Gitignore, GitignoreBuilder},
};
use notify::{
    EventKind, RecommendedWatcher, RecursiveMode, Watcher,
    event::{MetadataKind, ModifyKind, RemoveKind, RenameMode},
};
use outlast_core::debounce::{Change, Debounce, Print};
use outlast_os as os;
use std::{
    collections::{HashMap, HashSet},
    ffi::OsStr,
    fs,
    future::Future,
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, Read},
    path::{Path, PathBuf},
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    task::{Context, Poll},
    thread,
    time::{Duration, Instant, SystemTime},
};
use tokio::{sync::mpsc, time::Sleep};

pub(crate) use outlast_core::debounce::Changed;

/// Directories under watch. More than this is taken for an error in the paths, and is refused.
pub(crate) const DIRECTORIES_MAX: usize = 10_000;
/// Events of the system in the queue. An event that finds no room counts as a change of an unknown file.
const EVENTS_MAX: usize = 4_096;
/// Changes in the queue to the loop. A change that finds no room counts as a change of an unknown file.
const CHANGES_MAX: usize = 256;
/// How long after the first change to a `.gitignore` it is read again: an editor may have truncated it first, and
/// without its rules there is far too much to watch.
const RULES_DELAY: Duration = Duration::from_millis(50);
/// Files whose modification time is remembered, to tell `touch` from `chmod`. A file beyond that counts as touched if
/// its modification time is recent.
const TIMES_MAX: usize = 50_000;
/// What counts as recent for such a file.
const TOUCHED_LATELY: Duration = Duration::from_secs(5);
/// A larger file is not read: its size, times and inode number stand for its content.
const PRINT_BYTES_MAX: u64 = 4 << 20;
/// Memory for compiling the patterns of a `.gitignore`.
const SCOUT_STACK: usize = 512 * 1024;

/// One system call for each tree is enough where the system watches trees. inotify does not, so trees that git ignores
/// get no watch.
const TREES_ARE_WATCHED_WHOLE: bool = !cfg!(any(target_os = "linux", target_os = "android"));

/// An active watch. Dropping it ends it.
pub(crate) struct Watch {
    changes: mpsc::Receiver<Change>,
    changes_lost: Arc<AtomicBool>,
    debounce: Debounce,
    timer: Option<Pin<Box<Sleep>>>,
    trouble: Arc<Mutex<Option<String>>>,
    to_scout: SyncSender<ScanEvent>,
}

#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    #[error("cannot watch `{path}`: there is no such file or directory", path = path.display())]
    NotFound { path: PathBuf },
    #[error("cannot watch `{path}`", path = path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("cannot watch more than {DIRECTORIES_MAX} directories")]
    TooMany,
    #[error("the system's limit of watched directories is reached")]
    SystemLimit,
    #[error("cannot watch files")]
    System { source: notify::Error },
}

impl WatchError {
    pub fn hint(&self) -> Option<String> {
        match self {
            WatchError::NotFound { path } if path.to_string_lossy().contains(['*', '?']) => {
                Some("patterns are not expanded here: name the directory".to_owned())
            }
            WatchError::NotFound { .. } => Some("a relative path counts from the working directory".to_owned()),
            WatchError::Unreadable { .. } => Some("it must be readable by the user outlast runs as".to_owned()),
            WatchError::TooMany => {
                Some("name only the source directories, or list the others in .gitignore".to_owned())
            }
            WatchError::SystemLimit => {
                Some("name fewer directories, or raise the limit: sysctl fs.inotify.max_user_watches=524288".to_owned())
            }
            WatchError::System { .. } if cfg!(target_os = "linux") => {
                Some("if there are too many open files, raise it: sysctl fs.inotify.max_user_instances=512".to_owned())
            }
            WatchError::System { .. } => None,
        }
    }
}

impl Watch {
    /// After this returns, every later change is noticed. It walks the directories, which takes some time in a large
    /// tree, so call it on a thread that may block.
    pub(crate) fn begin(paths: &[PathBuf], cwd: &Path) -> Result<Watch, WatchError> {
        Watch::begin_since(paths, cwd, None)
    }

    /// The same, and files that changed since then count as changed.
    pub(crate) fn begin_since(paths: &[PathBuf], cwd: &Path, since: Option<SystemTime>) -> Result<Watch, WatchError> {
        let roots = paths.iter().map(|path| Root::find(path, cwd)).collect::<Result<Vec<Root>, WatchError>>()?;
        let roots: Arc<[Root]> = roots.into();

        let (to_scout, news) = sync_channel(EVENTS_MAX);
        let events_lost = Arc::new(AtomicBool::new(false));
        let watcher = listen(Arc::clone(&roots), to_scout.clone(), Arc::clone(&events_lost))?;
        let cwd = fs::canonicalize(cwd).unwrap_or_else(|_| cwd.to_owned());
        let mut scout = Scout::new(roots, &cwd, watcher);
        scout.since = since;
        scout.watch_all()?;
        scout.since = None;
        let missed = std::mem::take(&mut scout.missed);

        let (to_loop, changes) = mpsc::channel(CHANGES_MAX);
        let changes_lost = Arc::new(AtomicBool::new(false));
        let trouble = Arc::new(Mutex::new(None));
        let report = Reporter { cwd, to_loop, changes_lost: Arc::clone(&changes_lost), trouble: Arc::clone(&trouble) };
        missed.into_iter().for_each(|path| report.change(Change::To(path)));
        thread::Builder::new()
            .name("watch".to_owned())
            .stack_size(SCOUT_STACK)
            .spawn(move || scout.run(&news, &events_lost, &report))
            .map_err(|error| WatchError::System { source: notify::Error::io(error) })?;
        Ok(Watch { changes, changes_lost, debounce: Debounce::default(), timer: None, trouble, to_scout })
    }

    /// Changes are being gathered, and not reported yet.
    pub(crate) fn is_restless(&self) -> bool {
        self.debounce.deadline().is_some() || !self.changes.is_empty()
    }

    /// Ready with the changes, after a short time without further changes.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Changed> {
        while let Poll::Ready(Some(change)) = self.changes.poll_recv(cx) {
            self.debounce.handle(Some(change), Instant::now());
        }
        // The flag is set only when the channel is full, so its setter also woke this task.
        if self.changes_lost.swap(false, Ordering::Relaxed) {
            self.debounce.handle(Some(Change::Somewhere), Instant::now());
        }
        loop {
            let Some(deadline) = self.debounce.deadline() else { return Poll::Pending };
            let deadline = deadline.into();
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
            if timer.deadline() != deadline {
                timer.as_mut().reset(deadline);
            }
            std::task::ready!(timer.as_mut().poll(cx));
            if let Some(changed) = self.debounce.handle(None, Instant::now()) {
                self.timer = None;
                return Poll::Ready(changed);
            }
            // A timer that fired early is set again.
            self.timer = None;
        }
    }

    /// The same as a future. It is cancel-safe.
    #[cfg(test)]
    async fn next(&mut self) -> Changed {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// An error text, once, when a directory that was created later cannot be watched.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // If its queue is full it is awake, and finds the channel closed.
        self.changes.close();
        let _ = self.to_scout.try_send(ScanEvent::Enough);
    }
}

/// The state of a changed file. Reading it may wait for a disk, so call it on a thread that may block.
#[derive(Debug, Default)]
pub(crate) struct FileState {
    /// When its content, its name or its attributes last changed, by the clock of its file system. Unlike the
    /// modification time this cannot be set, so it also shows a file that was moved, unpacked or copied with its old
    /// time. `None` if the file is gone, or where the system does not report it.
    pub changed: Option<SystemTime>,
    /// A hash of its content; `None` if it is gone or not a file.
    pub print: Option<Print>,
}

impl FileState {
    pub(crate) fn at(path: &Path) -> FileState {
        let Ok(found) = fs::metadata(path) else { return FileState::default() };
        // A link may now point to another file that is older.
        let link = fs::symlink_metadata(path).ok().and_then(|link| changed_at(&link));
        let changed = changed_at(&found).and_then(|changed| Some(changed.max(link?)));
        FileState { changed, print: found.is_file().then(|| print_of(path, &found)).flatten() }
    }
}

fn print_of(path: &Path, found: &fs::Metadata) -> Option<Print> {
    let mut hasher = DefaultHasher::new();
    found.len().hash(&mut hasher);
    if found.len() > PRINT_BYTES_MAX {
        (found.modified().ok(), changed_at(found)).hash(&mut hasher);
        return Some(hasher.finish());
    }
    let mut file = os::open_named(path).ok()?.take(PRINT_BYTES_MAX);
    let mut buffer = vec![0; 64 << 10];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Some(hasher.finish()),
            Ok(length) => hasher.write(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
}

#[cfg(unix)]
fn changed_at(found: &fs::Metadata) -> Option<SystemTime> {
    use std::os::unix::fs::MetadataExt;
    let seconds = u64::try_from(found.ctime()).ok()?;
    let nanoseconds = u32::try_from(found.ctime_nsec()).ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, nanoseconds))
}

#[cfg(not(unix))]
fn changed_at(_found: &fs::Metadata) -> Option<SystemTime> {
    None
}

/// A path that the user asked to watch.
#[derive(Debug, Clone)]
struct Root {
    /// The parent's real path and the name: the target of a link may change, and the link too.
    path: PathBuf,
    /// The target when the watch began; some systems report that instead.
    real: PathBuf,
    is_directory: bool,
}

impl Root {
    fn find(path: &Path, cwd: &Path) -> Result<Root, WatchError> {
        let fail = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => WatchError::NotFound { path: path.to_owned() },
            _ => WatchError::Unreadable { path: path.to_owned(), source },
        };
        let given = cwd.join(path);
        let real = fs::canonicalize(&given).map_err(fail)?;
        let is_directory = fs::metadata(&real).map_err(fail)?.is_dir();
        let path = match (given.parent(), given.file_name()) {
            (Some(parent), Some(name)) => fs::canonicalize(parent).map_err(fail)?.join(name),
            _ => real.clone(),
        };
        let readable = if is_directory { fs::read_dir(&real).map(drop) } else { os::open_named(&real).map(drop) };
        readable.map_err(fail)?;
        Ok(Root { path, real, is_directory })
    }

    fn holds(&self, path: &Path) -> bool {
        self.is_directory && path != self.path && path.starts_with(&self.path)
    }

    /// The root itself or a directory above it: if that is created or removed, so is the root.
    fn is_reached_by(&self, path: &Path) -> bool {
        self.path.starts_with(path)
    }

    /// The path under the name that the user gave.
    fn rename(&self, path: &Path) -> Option<PathBuf> {
        path.strip_prefix(&self.real)
            .ok()
            .map(|rest| if rest.as_os_str().is_empty() { self.path.clone() } else { self.path.join(rest) })
    }
}

/// What the scanning thread receives.
#[derive(Debug)]
enum ScanEvent {
    Happened(PathBuf, FileChange),
    /// The system's event queue overflowed.
    Overflow,
    RulesDue,
    Enough,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileChange {
    Came,
    Written,
    /// Its times, its mode or its owner changed.
    Attributes,
    Gone,
    /// An empty directory was removed; its content has been reported.
    DirectoryGone,
    /// It was renamed, from or to this name.
    CameOrGone,
}

/// What an event says about a file; `None` if the file was only read.
fn meaning(kind: EventKind) -> Option<FileChange> {
    match kind {
        EventKind::Create(_) => Some(FileChange::Came),
        EventKind::Remove(RemoveKind::Folder) => Some(FileChange::DirectoryGone),
        EventKind::Remove(_) => Some(FileChange::Gone),
        EventKind::Modify(ModifyKind::Data(_) | ModifyKind::Any) => Some(FileChange::Written),
        EventKind::Modify(ModifyKind::Name(RenameMode::From)) => Some(FileChange::Gone),
        EventKind::Modify(ModifyKind::Name(RenameMode::To)) => Some(FileChange::Came),
        EventKind::Modify(ModifyKind::Name(_)) => Some(FileChange::CameOrGone),
        EventKind::Modify(ModifyKind::Metadata(MetadataKind::AccessTime)) => None,
        EventKind::Modify(ModifyKind::Metadata(_)) => Some(FileChange::Attributes),
        EventKind::Modify(ModifyKind::Other) => None,
        EventKind::Access(_) | EventKind::Any | EventKind::Other => None,
    }
}

/// Starts the system's watcher. Its thread drops irrelevant events and never waits.
fn listen(
    roots: Arc<[Root]>,
    to_scout: SyncSender<ScanEvent>,
    events_lost: Arc<AtomicBool>,
) -> Result<RecommendedWatcher, WatchError> {
    let tell = move |news: ScanEvent| {
        if to_scout.try_send(news).is_err() {
            events_lost.store(true, Ordering::Relaxed);
        }
    };
    let hear = move |event: notify::Result<notify::Event>| {
        // An error is no change; if a directory was lost by it, its removal is an event of its own.
        let Ok(event) = event else { return };
        if event.need_rescan() {
            tell(ScanEvent::Overflow);
            return;
        }
        let Some(what) = meaning(event.kind) else { return };
        for path in event.paths {
            let matters = |root: &Root| {
                root.holds(&path)
                    || root.is_reached_by(&path)
                    || path.starts_with(&root.real)
                    || (is_gitignore(&path) && path.parent().is_some_and(|dir| root.is_reached_by(dir)))
            };
            if roots.iter().any(matters) {
                tell(ScanEvent::Happened(path, what));
            }
        }
    };
    start_watcher(hear).map_err(WatchError::from)
}

/// The system's watcher, with its thread. If that thread cannot be started, notify does not report it, and panics when
/// the watcher is used or dropped. Here it is an error.
#[expect(clippy::disallowed_methods, reason = "the one place that finds out whether its thread was started")]
pub(crate) fn start_watcher(
    mut hear: impl FnMut(notify::Result<notify::Event>) + Send + 'static,
) -> notify::Result<RecommendedWatcher> {
    let here = Arc::new(());
    let there = Arc::clone(&here);
    let watcher = notify::recommended_watcher(move |event| {
        let _held_by_the_thread = &there;
        hear(event);
    })?;
    if Arc::strong_count(&here) == 1 {
        // It holds one end of a channel, and dropping it would panic.
        std::mem::forget(watcher);
        return Err(notify::Error::io(io::Error::new(io::ErrorKind::WouldBlock, "no thread can be started for it")));
    }
    Ok(watcher)
}

impl From<notify::Error> for WatchError {
    fn from(error: notify::Error) -> WatchError {
        match error.kind {
            notify::ErrorKind::MaxFilesWatch => WatchError::SystemLimit,
            _ => WatchError::System { source: error },
        }
    }
}

/// Tracks which directories are under watch, scans new ones, and decides what is a change.
struct Scout {
    cwd: PathBuf,
    /// When the rules are to be read again.
    rules_due: Option<Instant>,
    roots: Arc<[Root]>,
    rules: Rules,
    watcher: RecommendedWatcher,
    watched: HashSet<PathBuf>,
    /// Links to directories outside, and their targets: none is entered twice, so that cycles end.
    followed: HashMap<PathBuf, PathBuf>,
    /// The modification times of files, by a hash of their paths.
    times: HashMap<u64, SystemTime>,
    /// While the watch begins: from when on a change counts as missed, and the files that changed since.
    since: Option<SystemTime>,
    missed: Vec<PathBuf>,
}

impl Scout {
    fn new(roots: Arc<[Root]>, cwd: &Path, watcher: RecommendedWatcher) -> Scout {
        let (rules, watched, followed) = (Rules::new(&roots), HashSet::new(), HashMap::new());
        let times = HashMap::new();
        let (since, missed) = (None, Vec::new());
        Scout { cwd: cwd.to_owned(), rules_due: None, roots, rules, watcher, watched, followed, times, since, missed }
    }

    fn run(mut self, news: &Receiver<ScanEvent>, events_lost: &AtomicBool, report: &Reporter) {
        while let Ok(news) = self.hear(news) {
            let mut changes = Vec::new();
            let mut outcome = Ok(());
            if events_lost.swap(false, Ordering::Relaxed) {
                changes.push(Change::Somewhere);
                outcome = self.watch_all();
            }
            let heard = match news {
                ScanEvent::Enough => return,
                ScanEvent::Overflow => {
                    changes.push(Change::Somewhere);
                    self.watch_all()
                }
                ScanEvent::RulesDue => {
                    self.rules_due = None;
                    self.rules = Rules::new(&self.roots);
                    self.watch_all() // Directories may have become ours, or no longer be.
                }
                ScanEvent::Happened(path, what) => self.happened(&path, what, &mut changes),
            };
            for change in changes {
                report.change(change);
            }
            if let Err(error) = outcome.and(heard) {
                report.trouble(&error);
            }
            if report.to_loop.is_closed() {
                return;
            }
        }
    }

    /// The next event, or that it is time to read the rules.
    fn hear(&self, news: &Receiver<ScanEvent>) -> Result<ScanEvent, RecvTimeoutError> {
        let Some(due) = self.rules_due else { return news.recv().map_err(|_| RecvTimeoutError::Disconnected) };
        match due.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Ok(ScanEvent::RulesDue),
            left => match news.recv_timeout(left) {
                Err(RecvTimeoutError::Timeout) => Ok(ScanEvent::RulesDue),
                other => other,
            },
        }
    }

    fn happened(&mut self, path: &Path, what: FileChange, changes: &mut Vec<Change>) -> Result<(), WatchError> {
        let roots = Arc::clone(&self.roots);
        let path = match roots.iter().find(|root| root.holds(path) || root.is_reached_by(path)) {
            Some(_) => path.to_owned(),
            None => roots.iter().find_map(|root| root.rename(path)).unwrap_or_else(|| path.to_owned()),
        };
        let what = match what {
            FileChange::CameOrGone if path.symlink_metadata().is_ok() => FileChange::Came,
            FileChange::CameOrGone => FileChange::Gone,
            other => other,
        };

        if is_gitignore(&path) && !roots.iter().any(|root| root.path == path) {
            self.rules_due.get_or_insert_with(|| Instant::now() + RULES_DELAY);
            return Ok(());
        }
        // The object at this path is not the one that was watched there. This comes before any root watches it again.
        let may_be_another = !matches!(what, FileChange::Written | FileChange::Attributes);
        if may_be_another && (self.knows(&path) || roots.iter().any(|root| root.is_reached_by(&path))) {
            self.forget(&path);
        }
        for (number, root) in roots.iter().enumerate() {
            if root.is_reached_by(&path) {
                self.root_happened(root, number, &path, what, changes)?;
            } else if root.holds(&path) {
                self.file_happened(root, number, &path, what, changes)?;
            }
        }
        Ok(())
    }

    /// An event at a root, or at a directory above it.
    fn root_happened(
        &mut self,
        root: &Root,
        number: usize,
        path: &Path,
        what: FileChange,
        changes: &mut Vec<Change>,
    ) -> Result<(), WatchError> {
        match what {
            FileChange::Written | FileChange::Attributes if root.is_directory || path != root.path => return Ok(()),
            FileChange::Attributes if !self.is_touched(path) => return Ok(()),
            FileChange::Attributes => {}
            FileChange::Written => drop(self.is_touched(path)),
            FileChange::Came | FileChange::Gone | FileChange::DirectoryGone | FileChange::CameOrGone => {
                self.watch_root(root, number)?
            }
        }
        if what != FileChange::Came || root.path.exists() {
            changes.push(Change::To(root.path.clone()));
        }
        Ok(())
    }

    /// An event inside a directory that is a root.
    fn file_happened(
        &mut self,
        root: &Root,
        number: usize,
        path: &Path,
        what: FileChange,
        changes: &mut Vec<Change>,
    ) -> Result<(), WatchError> {
        match what {
            FileChange::Gone | FileChange::DirectoryGone | FileChange::CameOrGone => {
                // Its former kind is unknown, so a rule for either kind applies.
                let ignored = [false, true].into_iter().any(|is_dir| self.rules.ignore(root, number, path, is_dir));
                if what != FileChange::DirectoryGone && !ignored {
                    changes.push(Change::To(path.to_owned()));
                }
            }
            FileChange::Attributes => {
                let is_file = fs::metadata(path).is_ok_and(|found| found.is_file());
                if is_file && !self.rules.ignore(root, number, path, false) && self.is_touched(path) {
                    changes.push(Change::To(path.to_owned()));
                }
            }
            FileChange::Came | FileChange::Written => {
                // If it is gone by now, its removal is another event.
                let Ok(found) = fs::metadata(path).or_else(|_| fs::symlink_metadata(path)) else { return Ok(()) };
                if self.rules.ignore(root, number, path, found.is_dir()) {
                    return Ok(());
                }
                if !found.is_dir() {
                    self.note_time(path, &found);
                    let is_content = found.is_file() || found.is_symlink();
                    changes.extend(is_content.then(|| Change::To(path.to_owned())));
                } else if what == FileChange::Came {
                    // Files may have been created in it before the watch was set.
                    let mut files = Vec::new();
                    let outcome = self.watch_tree(root, number, path, &mut files);
                    changes.extend(files.into_iter().map(Change::Moved));
                    outcome?;
                }
            }
        }
        Ok(())
    }

    fn watch_all(&mut self) -> Result<(), WatchError> {
        let roots = Arc::clone(&self.roots);
        let old = std::mem::take(&mut self.watched);
        self.followed.clear();
        for (number, root) in roots.iter().enumerate() {
            self.watch_root(root, number)?;
        }
        for path in old.difference(&self.watched) {
            // The system may have removed it already.
            let _ = self.watcher.unwatch(path);
        }
        Ok(())
    }

    /// Watches the root and the directories above it: a name that is created or removed is reported by its parent
    /// directory.
    fn watch_root(&mut self, root: &Root, number: usize) -> Result<(), WatchError> {
        let with_rules: Vec<PathBuf> = self.rules.above(number).map(Path::to_owned).collect();
        for dir in &with_rules {
            self.watch_one(dir, RecursiveMode::NonRecursive)?;
        }
        // From the top down, so that a later change is reported by the directory above. Outside the working directory
        // only the parent is watched: directories above it are not part of the project.
        let way: Vec<&Path> = root.path.ancestors().skip(1).collect();
        let nearest = way.iter().position(|dir| dir.is_dir()).unwrap_or(0);
        for (distance, dir) in way.iter().enumerate().rev() {
            if distance <= nearest || dir.starts_with(&self.cwd) {
                self.watch_one(dir, RecursiveMode::NonRecursive)?;
            }
        }
        // The target of a link is created and removed in a directory of its own.
        if let Some(dir) = root.real.parent().filter(|_| root.real != root.path) {
            self.watch_one(dir, RecursiveMode::NonRecursive)?;
        }
        if root.is_directory {
            self.watch_tree(root, number, &root.path, &mut Vec::new())?;
        } else if let Ok(found) = fs::metadata(&root.path) {
            self.note_time(&root.path, &found);
        }
        Ok(())
    }

    /// A directory and everything below it that is not ignored. Each directory is watched before it is read, so that a
    /// new file is either read or reported.
    fn watch_tree(
        &mut self,
        root: &Root,
        number: usize,
        top: &Path,
        files: &mut Vec<PathBuf>,
    ) -> Result<(), WatchError> {
        if TREES_ARE_WATCHED_WHOLE && top == root.path {
            self.watch_one(top, RecursiveMode::Recursive)?;
        }
        let mut left = vec![top.to_owned()];
        while let Some(dir) = left.pop() {
            let is_link = dir.symlink_metadata().is_ok_and(|found| found.is_symlink());
            if is_link && dir != root.path && !self.may_follow(&dir) {
                continue;
            }
            if !TREES_ARE_WATCHED_WHOLE {
                self.watch_one(&dir, RecursiveMode::NonRecursive)?;
            } else if is_link && dir != root.path {
                self.watch_one(&dir, RecursiveMode::Recursive)?;
            }
            // Gone or unreadable by now: if it is created again, that is an event.
            let Ok(entries) = fs::read_dir(&dir) else { continue };
            for entry in entries.flatten() {
                let path = entry.path();
                let Ok(found) = fs::metadata(&path) else { continue };
                if self.rules.ignore(root, number, &path, found.is_dir()) {
                    continue;
                }
                if found.is_dir() {
                    left.push(path);
                } else if found.is_file() {
                    self.note_time(&path, &found);
                    files.push(path);
                }
            }
        }
        Ok(())
    }

    fn watch_one(&mut self, dir: &Path, mode: RecursiveMode) -> Result<(), WatchError> {
        if self.watched.contains(dir) {
            return Ok(());
        }
        if self.watched.len() >= DIRECTORIES_MAX {
            return Err(WatchError::TooMany);
        }
        match self.watcher.watch(dir, mode) {
            Ok(()) => {
                self.watched.insert(dir.to_owned());
                Ok(())
            }
            Err(error) if is_gone(&error, dir) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether a link points to a place that is not under watch yet.
    fn may_follow(&mut self, link: &Path) -> bool {
        let Ok(target) = fs::canonicalize(link) else { return false };
        let known = |place: &PathBuf| target.starts_with(place);
        let in_a_root =
            self.roots.iter().any(|root| root.is_directory && (known(&root.real) || root.real.starts_with(&target)));
        if in_a_root || self.followed.iter().any(|(by, place)| by != link && known(place)) {
            return false;
        }
        self.followed.insert(link.to_owned(), target);
        true
    }

    /// Whether the modification time of a file has changed; the new one is remembered.
    fn is_touched(&mut self, path: &Path) -> bool {
        let Ok(found) = fs::metadata(path) else { return false };
        let Ok(modified) = found.modified() else { return false };
        let before = self.times.get(&key_of(path)).copied();
        self.note_time(path, &found);
        match before {
            Some(before) => before != modified,
            None => modified.elapsed().is_ok_and(|age| age < TOUCHED_LATELY),
        }
    }

    fn note_time(&mut self, path: &Path, found: &fs::Metadata) {
        if let (Some(since), Some(changed)) = (self.since, changed_at(found))
            && since <= changed
        {
            self.missed.push(path.to_owned());
        }
        let key = key_of(path);
        if let Ok(modified) = found.modified()
            && (self.times.len() < TIMES_MAX || self.times.contains_key(&key))
        {
            self.times.insert(key, modified);
        }
    }

    fn knows(&self, path: &Path) -> bool {
        self.watched.contains(path) || self.rules.below.contains_key(path)
    }

    fn forget(&mut self, path: &Path) {
        self.rules.forget(path);
        self.followed.retain(|link, _| !link.starts_with(path));
        let gone: Vec<PathBuf> = self.watched.iter().filter(|dir| dir.starts_with(path)).cloned().collect();
        for dir in gone {
            // The system has often removed it before.
            let _ = self.watcher.unwatch(&dir);
            self.watched.remove(&dir);
        }
    }
}

fn key_of(path: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    path.hash(&mut hasher);
    hasher.finish()
}

/// Skips a directory that was removed meanwhile or may not be read.
fn is_gone(error: &notify::Error, dir: &Path) -> bool {
    match &error.kind {
        notify::ErrorKind::PathNotFound => true,
        notify::ErrorKind::Io(error) => {
            matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied | io::ErrorKind::NotADirectory
            )
        }
        _ => !dir.exists(),
    }
}

/// The queue of changes to the loop. The scanning thread never waits for the loop.
struct Reporter {
    cwd: PathBuf,
    to_loop: mpsc::Sender<Change>,
    changes_lost: Arc<AtomicBool>,
    trouble: Arc<Mutex<Option<String>>>,
}

impl Reporter {
    fn change(&self, change: Change) {
        let named = |path: PathBuf| path.strip_prefix(&self.cwd).map(Path::to_owned).unwrap_or(path);
        let change = match change {
            Change::To(path) => Change::To(named(path)),
            Change::Moved(path) => Change::Moved(named(path)),
            Change::Somewhere => Change::Somewhere,
        };
        if self.to_loop.try_send(change).is_err() {
            self.changes_lost.store(true, Ordering::Relaxed);
        }
    }

    fn trouble(&self, error: &WatchError) {
        let sentence = match error.hint() {
            Some(hint) => format!("{error}, so some changes are not noticed ({hint})"),
            None => format!("{error}, so some changes are not noticed"),
        };
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(sentence);
    }
}

/// What git ignores, and files that never need a reload. Paths that the user named are never ignored.
struct Rules {
    /// For each root, the rules from the directories above it, nearest first.
    above: Vec<Vec<Gitignore>>,
    /// The rules in directories below a root, read on first use.
    below: HashMap<PathBuf, Option<Gitignore>>,
}

impl Rules {
    fn new(roots: &[Root]) -> Rules {
        Rules { above: roots.iter().map(|root| rules_above(&root.path)).collect(), below: HashMap::new() }
    }

    /// The directories above a root whose rules apply.
    fn above(&self, number: usize) -> impl Iterator<Item = &Path> {
        self.above[number].iter().map(Gitignore::path)
    }

    fn forget(&mut self, path: &Path) {
        self.below.retain(|dir, _| !dir.starts_with(path));
    }

    /// As in git, an ignored directory includes everything below it.
    fn ignore(&mut self, root: &Root, number: usize, path: &Path, is_dir: bool) -> bool {
        let steps: Vec<&Path> = path.ancestors().take_while(|step| *step != root.path).collect();
        steps.into_iter().rev().any(|step| {
            let is_dir = is_dir || step != path;
            step.file_name().is_some_and(is_never_wanted) || self.git_ignores(root, number, step, is_dir)
        })
    }

    fn git_ignores(&mut self, root: &Root, number: usize, path: &Path, is_dir: bool) -> bool {
        for dir in path.ancestors().skip(1).take_while(|dir| dir.starts_with(&root.path)) {
            if !self.below.contains_key(dir) {
                self.below.insert(dir.to_owned(), rules_in(dir));
            }
            match self.below.get(dir).and_then(Option::as_ref).map_or(Match::None, |rules| rules.matched(path, is_dir))
            {
                Match::None => {}
                found => return found.is_ignore(),
            }
        }
        ignored_by(&self.above[number], path, is_dir)
    }
}

/// The nearest matching rule decides.
fn ignored_by(rules: &[Gitignore], path: &Path, is_dir: bool) -> bool {
    rules
        .iter()
        .map(|rules| rules.matched(path, is_dir))
        .find(|found| !found.is_none())
        .is_some_and(|found| found.is_ignore())
}

/// The rules from the parent of a root up to the top of its repository; none outside a repository, and none if they
/// would exclude a path that the user named.
fn rules_above(root: &Path) -> Vec<Gitignore> {
    let Some(top) = root.ancestors().find(|dir| dir.join(".git").exists()) else { return vec![] };
    let mut rules: Vec<Gitignore> =
        root.ancestors().skip(1).take_while(|dir| dir.starts_with(top)).filter_map(rules_in).collect();
    let mut exclude = GitignoreBuilder::new(top);
    if exclude.add(top.join(".git").join("info").join("exclude")).is_none() {
        rules.extend(exclude.build().ok().filter(|rules| !rules.is_empty()));
    }
    let within = root.join("any-file");
    let on_the_way = within.ancestors().take_while(|path| path.starts_with(top) && *path != top);
    let mut ignored = on_the_way.map(|path| ignored_by(&rules, path, path != within));
    if ignored.any(|ignored| ignored) { vec![] } else { rules }
}

fn rules_in(dir: &Path) -> Option<Gitignore> {
    let file = dir.join(".gitignore");
    // An invalid line is skipped, as git does.
    file.is_file().then(|| Gitignore::new(file).0).filter(|rules| !rules.is_empty())
}

fn is_gitignore(path: &Path) -> bool {
    path.file_name() == Some(OsStr::new(".gitignore"))
}

/// Files that tools create beside the source while it is edited and run.
fn is_never_wanted(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else { return false };
    let is_a_tools_own = matches!(name, ".git" | ".hg" | ".jj" | ".svn" | ".outlast" | "__pycache__" | ".DS_Store");
    let is_compiled = [".pyc", ".pyo"].iter().any(|ending| name.ends_with(ending));
    // Logs are not edited, and a server that writes its own log would be reloaded for ever.
    let is_a_log = name.ends_with(".log");
    // Vim tests whether it can write by creating a file called 4913; Emacs locks with `.#` and saves in between `#`.
    let is_an_editors = name == "4913"
        || name.ends_with('~')
        || name.starts_with(".#")
        || (name.len() > 1 && name.starts_with('#') && name.ends_with('#'))
        || (name.starts_with('.') && [".swp", ".swo", ".swx"].iter().any(|ending| name.ends_with(ending)))
        || name.ends_with("___jb_tmp___")
        || name.ends_with("___jb_old___");
    is_a_tools_own || is_compiled || is_a_log || is_an_editors
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    /// A project with `src/`, under watch.
    struct Bench {
        project: TempDir,
        watch: Watch,
    }

    impl Bench {
        fn new(files: &[(&str, &str)], paths: &[&str]) -> Bench {
            let project = tempfile::tempdir().unwrap();
            for (name, text) in files {
                put(&project.path().join(name), text);
            }
            Bench::on(project, paths)
        }

        fn on(project: TempDir, paths: &[&str]) -> Bench {
            let paths: Vec<PathBuf> = paths.iter().map(PathBuf::from).collect();
            let watch = Watch::begin(&paths, project.path()).unwrap();
            Bench { project, watch }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.project.path().join(name)
        }

        fn put(&self, name: &str, text: &str) {
            put(&self.at(name), text);
        }

        /// The next report, sorted; it must arrive.
        async fn news(&mut self) -> Vec<String> {
            let wait = tokio::time::timeout(Duration::from_secs(60), self.watch.next());
            let changed = wait.await.expect("a change is noticed");
            let mut paths: Vec<String> =
                changed.paths.iter().map(|path| path.to_string_lossy().replace('\\', "/")).collect();
            paths.sort();
            paths
        }

        /// Earlier actions caused no report of their own: the next report names only the file written now.
        async fn nothing_but(&mut self, name: &str) {
            self.put(name, "now");
            assert_eq!(self.news().await, [name]);
        }
    }

    fn put(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[tokio::test]
    async fn a_save_is_one_report() {
        let mut bench = Bench::new(&[("src/a.py", "1"), ("src/b.py", "1")], &["src"]);
        bench.put("src/a.py", "2");
        bench.put("src/a.py", "3");
        bench.put("src/b.py", "2");
        assert_eq!(bench.news().await, ["src/a.py", "src/b.py"]);
        bench.nothing_but("src/new.py").await;
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_watch_that_begins_again_reports_what_changed_meanwhile() {
        let project = tempfile::tempdir().unwrap();
        put(&project.path().join("src/a.py"), "1");
        let changed = FileState::at(&project.path().join("src/a.py")).changed.unwrap();
        let begin = |since| Watch::begin_since(&["src".into()], project.path(), Some(since)).unwrap();
        let later = begin(changed + Duration::from_secs(1));
        assert!(!later.is_restless(), "it changed before");
        let watch = begin(changed);
        assert!(watch.is_restless());
        let mut bench = Bench { project, watch };
        assert_eq!(bench.news().await, ["src/a.py"]);
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn reading_and_chmod_are_no_changes_and_touch_is_a_change() {
        use std::os::unix::fs::PermissionsExt;
        let mut bench = Bench::new(&[("src/a.py", "1"), ("src/s", "")], &["src"]);
        let path = bench.at("src/a.py");
        fs::read(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        bench.nothing_but("src/s").await;
        // Both times, as `touch` does: Linux reports the modification time, set alone, like a write.
        for then in [SystemTime::now(), SystemTime::UNIX_EPOCH] {
            let file = fs::File::options().append(true).open(&path).unwrap();
            file.set_times(fs::FileTimes::new().set_accessed(then).set_modified(then)).unwrap();
            drop(file);
            assert_eq!(bench.news().await, ["src/a.py"]);
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        bench.nothing_but("src/s").await;
    }

    #[cfg(unix)]
    #[test]
    fn a_file_moved_or_copied_with_its_old_time_has_changed_now() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["old.py", "server.py"] {
            put(&at(name), name);
            let file = fs::File::options().append(true).open(at(name)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000)).unwrap();
        }
        std::os::unix::fs::symlink("server.py", at("link.py")).unwrap();
        let before = FileState::at(&at("server.py"));
        let link_before = FileState::at(&at("link.py"));
        // The clock of a file system may not advance for a few milliseconds.
        thread::sleep(Duration::from_millis(50));
        fs::rename(at("old.py"), at("server.py")).unwrap();
        let after = FileState::at(&at("server.py"));
        assert_eq!(
            fs::metadata(at("server.py")).unwrap().modified().unwrap(),
            SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000)
        );
        assert!(after.changed.unwrap() > before.changed.unwrap());
        assert_ne!(after.print, before.print);
        put(&at("elsewhere.py"), "e");
        thread::sleep(Duration::from_millis(50));
        std::os::unix::fs::symlink("elsewhere.py", at("next")).unwrap();
        fs::rename(at("next"), at("link.py")).unwrap();
        let link_after = FileState::at(&at("link.py"));
        assert!(link_after.changed.unwrap() > link_before.changed.unwrap(), "a link that leads elsewhere");
        assert!(FileState::at(&at("gone.py")).print.is_none());
    }

    #[test]
    fn a_fingerprint_is_bounded_and_differs_with_the_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let print = |text: &[u8]| {
            fs::write(&path, text).unwrap();
            FileState::at(&path).print.unwrap()
        };
        assert_eq!(print(b"one"), print(b"one"));
        assert_ne!(print(b"one"), print(b"two"));
        let file = fs::File::create(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        let begun = Instant::now();
        assert!(FileState::at(&path).print.is_some(), "a file of a terabyte is not read");
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    #[tokio::test]
    async fn an_editor_may_save_by_renaming() {
        let mut bench = Bench::new(&[("src/a.py", "1"), ("one.py", "1")], &["src", "one.py"]);
        for _ in 0..3 {
            bench.put("src/a.py~", "backup");
            bench.put("src/.a.py.swp", "swap");
            bench.put("src/4913", "");
            bench.put("elsewhere/a.py", "2");
            fs::rename(bench.at("elsewhere/a.py"), bench.at("src/a.py")).unwrap();
            assert_eq!(bench.news().await, ["src/a.py"]);

            bench.put("one.py.tmp", "2");
            fs::rename(bench.at("one.py.tmp"), bench.at("one.py")).unwrap();
            assert_eq!(bench.news().await, ["one.py"]);
        }
    }

    #[tokio::test]
    async fn a_watched_file_may_go_and_come_back() {
        let mut bench = Bench::new(&[("deep/one.py", "1"), ("deep/other.py", "1")], &["deep/one.py"]);
        for _ in 0..3 {
            bench.put("deep/other.py", "not watched");
            fs::remove_file(bench.at("deep/one.py")).unwrap();
            assert_eq!(bench.news().await, ["deep/one.py"]);
            bench.put("deep/one.py", "2");
            assert_eq!(bench.news().await, ["deep/one.py"]);
        }
    }

    #[tokio::test]
    async fn a_watched_root_may_go_and_come_back_with_the_directories_above_it() {
        let mut bench = Bench::new(&[("up/src/a.py", "1"), ("up/one.py", "1")], &["up/src", "up/one.py"]);
        for round in 0..3 {
            fs::remove_dir_all(bench.at("up")).unwrap();
            bench.news().await;
            bench.put("up/src/deep/a.py", "2");
            bench.put("up/one.py", "2");
            // All of it exists before the last event, but there may be two reports.
            while !bench.at("up/one.py").exists() || !bench.news().await.contains(&"up/one.py".to_owned()) {}
            bench.put("up/src/deep/a.py", &format!("{round}"));
            while !bench.news().await.contains(&"up/src/deep/a.py".to_owned()) {}
        }
    }

    #[tokio::test]
    async fn new_directories_are_watched_with_their_contents() {
        let mut bench = Bench::new(&[("src/a.py", "1"), ("ready/x/y/z.py", "1")], &["src"]);
        bench.put("src/new/deep/b.py", "1");
        assert_eq!(bench.news().await, ["src/new/deep/b.py"]);
        bench.put("src/new/deep/b.py", "2");
        assert_eq!(bench.news().await, ["src/new/deep/b.py"]);

        fs::rename(bench.at("ready"), bench.at("src/ready")).unwrap();
        assert_eq!(bench.news().await, ["src/ready/x/y/z.py"]);
        bench.put("src/ready/x/y/z.py", "2");
        assert_eq!(bench.news().await, ["src/ready/x/y/z.py"]);

        fs::rename(bench.at("src/ready"), bench.at("gone")).unwrap();
        assert_eq!(bench.news().await, ["src/ready"]);
        bench.put("gone/x/y/z.py", "3");
        fs::create_dir(bench.at("src/empty")).unwrap();
        bench.nothing_but("src/a.py").await;
    }

    #[tokio::test]
    async fn files_ignored_by_git_are_not_watched() {
        let files = [
            (".git/HEAD", ""),
            (".git/info/exclude", "secret.txt\n"),
            (".gitignore", "*.out\n/src/build/\nnode_modules/\n"),
            ("src/.gitignore", "!kept.out\ngenerated.py\n"),
            ("src/a.py", "1"),
            ("src/build/out.py", "1"),
            ("src/node_modules/x/index.js", "1"),
        ];
        let mut bench = Bench::new(&files, &["src"]);
        for name in [
            "src/x.out",
            "src/deep/y.out",
            "src/build/out.py",
            "src/build/new/out.py",
            "src/node_modules/x/index.js",
            "src/node_modules/y/index.js",
            "src/generated.py",
            "src/deep/generated.py",
            "src/secret.txt",
            "src/__pycache__/a.pyc",
            "src/.outlast/audit.jsonl",
            "src/.git/index",
        ] {
            bench.put(name, "2");
        }
        fs::remove_dir_all(bench.at("src/node_modules")).unwrap();
        bench.nothing_but("src/kept.out").await;
    }

    #[tokio::test]
    async fn changed_rules_apply_at_once() {
        let files = [(".git/HEAD", ""), (".gitignore", "build/\n"), ("src/build/a.py", "1"), ("src/a.out", "")];
        let mut bench = Bench::new(&files, &["src"]);
        bench.put("src/build/a.py", "2");
        bench.put(".gitignore", "*.out\n");
        // Rules cause no report, so the moment they apply shows only in later reports.
        let until_heard = async {
            loop {
                bench.put("src/build/a.py", "again");
                if let Ok(changed) = tokio::time::timeout(Duration::from_millis(300), bench.watch.next()).await {
                    break changed.paths;
                }
            }
        };
        let heard = tokio::time::timeout(Duration::from_secs(60), until_heard).await.expect("the rules count");
        assert_eq!(heard, [Path::new("src").join("build").join("a.py")]);
        bench.put("src/a.out", "2");
        bench.nothing_but("src/build/a.py").await;
    }

    #[tokio::test]
    async fn a_named_path_is_never_ignored() {
        let files = [
            (".git/HEAD", ""),
            (".gitignore", "dist/\nout/*\n.env\n"),
            ("dist/main.js", "1"),
            ("out/main.js", "1"),
            (".env", "1"),
        ];
        let mut bench = Bench::new(&files, &["dist", "out", ".env"]);
        for name in ["dist/main.js", "out/main.js", ".env"] {
            bench.nothing_but(name).await;
        }
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn links_to_directories_are_followed_and_cycles_end() {
        use std::os::unix::fs::symlink;
        let project = tempfile::tempdir().unwrap();
        for name in ["real-1/a.py", "real-2/a.py", "shared/lib.py", "src/b.py"] {
            put(&project.path().join(name), "1");
        }
        symlink("real-1", project.path().join("current")).unwrap();
        symlink("../shared", project.path().join("src/shared")).unwrap();
        symlink("..", project.path().join("src/up")).unwrap();
        symlink(".", project.path().join("shared/self")).unwrap();
        let mut bench = Bench::on(project, &["current", "src"]);
        bench.put("real-1/a.py", "2");
        assert_eq!(bench.news().await, ["current/a.py"]);
        bench.put("shared/lib.py", "2");
        assert_eq!(bench.news().await, ["src/shared/lib.py"]);

        symlink("real-2", bench.at("next")).unwrap();
        fs::rename(bench.at("next"), bench.at("current")).unwrap();
        assert_eq!(bench.news().await, ["current"]);
        bench.put("real-1/a.py", "no longer");
        bench.put("real-2/a.py", "2");
        assert_eq!(bench.news().await, ["current/a.py"]);
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_link_to_a_file_is_watched_at_both_ends() {
        let project = tempfile::tempdir().unwrap();
        for name in ["real/settings.py", "real/other.py", "local.py"] {
            put(&project.path().join(name), "1");
        }
        std::os::unix::fs::symlink("real/settings.py", project.path().join("settings.py")).unwrap();
        let mut bench = Bench::on(project, &["settings.py"]);
        bench.put("real/other.py", "2");
        bench.put("real/settings.py", "2");
        assert_eq!(bench.news().await, ["settings.py"]);
        fs::rename(bench.at("local.py"), bench.at("settings.py")).unwrap();
        assert_eq!(bench.news().await, ["settings.py"]);
    }

    #[tokio::test]
    async fn a_full_queue_is_still_one_report() {
        let mut bench = Bench::new(&[("src/a.py", "1")], &["src"]);
        for number in 0..2 * CHANGES_MAX {
            bench.put(&format!("src/{number}"), "");
        }
        let changed = bench.watch.next().await;
        assert_eq!(changed.paths.len(), outlast_core::debounce::PATHS_SHOWN);
        assert!(changed.more > 0);
    }

    #[test]
    fn a_watch_that_is_dropped_leaves_no_thread() {
        let project = tempfile::tempdir().unwrap();
        let watch = Watch::begin(&[".".into()], project.path()).unwrap();
        let held_by_thread = Arc::downgrade(&watch.trouble);
        drop(watch);
        let patience = Instant::now() + Duration::from_secs(60);
        while held_by_thread.strong_count() > 0 {
            assert!(Instant::now() < patience, "the thread ends");
            thread::yield_now();
        }
    }

    #[test]
    fn an_overflow_is_a_change() {
        let project = tempfile::tempdir().unwrap();
        let roots: Arc<[Root]> = vec![Root::find(Path::new("."), project.path()).unwrap()].into();
        let (to_loop, mut changes) = mpsc::channel(CHANGES_MAX);
        let (to_scout, news) = sync_channel(EVENTS_MAX);
        let events_lost = Arc::new(AtomicBool::new(false));
        let watcher = listen(Arc::clone(&roots), to_scout.clone(), Arc::clone(&events_lost)).unwrap();
        let scout = Scout::new(roots, project.path(), watcher);
        let (changes_lost, trouble) = (Arc::default(), Arc::default());
        let report = Reporter { cwd: project.path().to_owned(), to_loop, changes_lost, trouble };
        to_scout.send(ScanEvent::Overflow).unwrap();
        to_scout.send(ScanEvent::Enough).unwrap();
        scout.run(&news, &events_lost, &report);
        assert_eq!(changes.try_recv().unwrap(), Change::Somewhere);
    }

    #[test]
    fn a_path_that_cannot_be_watched_is_reported_with_a_hint() {
        let project = tempfile::tempdir().unwrap();
        let Err(error) = Watch::begin(&["nowhere".into()], project.path()) else { panic!("it is not there") };
        insta::assert_snapshot!(error, @"cannot watch `nowhere`: there is no such file or directory");
        insta::assert_snapshot!(error.hint().unwrap(), @"a relative path counts from the working directory");
        let Err(error) = Watch::begin(&["src/*.py".into()], project.path()) else { panic!("it is not there") };
        insta::assert_snapshot!(error.hint().unwrap(), @"patterns are not expanded here: name the directory");
        let limit = WatchError::from(notify::Error::new(notify::ErrorKind::MaxFilesWatch));
        insta::assert_snapshot!(limit, @"the system's limit of watched directories is reached");
        insta::assert_snapshot!(
            WatchError::TooMany,
            @"cannot watch more than 10000 directories"
        );
    }

    #[test]
    fn files_of_tools_are_ignored() {
        let table = [
            (".git", true),
            ("__pycache__", true),
            ("server.log", true),
            ("log.py", false),
            (".outlast", true),
            ("a.pyc", true),
            ("a.py~", true),
            (".a.py.swp", true),
            (".#a.py", true),
            ("#a.py#", true),
            ("4913", true),
            ("a.py", false),
            (".env", false),
            (".gitlab-ci.yml", false),
            ("#", false),
            ("swap.swp", false),
            ("node_modules", false),
        ];
        for (name, unwanted) in table {
            assert_eq!(is_never_wanted(OsStr::new(name)), unwanted, "{name}");
        }
    }
}
