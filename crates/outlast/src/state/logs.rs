//! The log files of a state directory: how many are kept, and which belong to a running instance. It does not write
//! to them; the journal does.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, SystemTime},
};

use outlast_os as os;

/// Instances whose logs are kept; those that were written to least recently are removed first.
pub(crate) const LOGS_MAX: usize = 100;
/// The size of all logs together. Logs of running instances count, but are always kept.
pub(crate) const LOGS_BYTES_MAX: u64 = 64 << 20;
/// A log that was not written to for this long is removed.
pub(crate) const LOGS_AGE_MAX: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// Files that are examined in one run; the next start examines the rest.
const LOOKED_AT_MAX: usize = 10_000;
/// How often a log is opened again because it was removed in between.
const OPENED_MAX: usize = 10;
/// The thread that removes logs does nothing else.
const STACK: usize = 64 << 10;

/// Opens a log for appending. Other instances do not remove it while the returned hold exists.
pub(crate) fn open(path: &Path) -> io::Result<(File, Hold)> {
    let mut opened = open_once(path)?;
    for _ in 1..OPENED_MAX {
        if opened.1.is_of(path) {
            break;
        }
        opened = open_once(path)?;
    }
    Ok(opened)
}

fn open_once(path: &Path) -> io::Result<(File, Hold)> {
    let mut options = OpenOptions::new();
    options.create(true).append(true);
    // On Windows the file cannot be removed while it is open with this share mode.
    #[cfg(windows)]
    std::os::windows::fs::OpenOptionsExt::share_mode(&mut options, 0x1 | 0x2);
    let file = os::open_own(&options, path)?;
    let hold = Hold::take(&file);
    Ok((file, hold))
}

/// A kernel lock that marks the log of a running instance. It is released when the process exits, in any way.
#[cfg(unix)]
#[derive(Debug)]
pub(crate) struct Hold(Option<nix::fcntl::Flock<File>>);

#[cfg(unix)]
impl Hold {
    /// On a file system without locks there is no hold, and logs are never removed.
    fn take(file: &File) -> Hold {
        let shared = |file| nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockShared).ok();
        Hold(file.try_clone().ok().and_then(shared))
    }

    /// Whether the file still has this name.
    fn is_of(&self, path: &Path) -> bool {
        use std::os::unix::fs::MetadataExt;
        let Some(held) = self.0.as_ref().and_then(|file| file.metadata().ok()) else { return true };
        fs::symlink_metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (held.dev(), held.ino()))
    }
}

#[cfg(not(unix))]
#[derive(Debug)]
pub struct Hold;

#[cfg(not(unix))]
impl Hold {
    fn take(_file: &File) -> Hold {
        Hold
    }

    fn is_of(&self, _path: &Path) -> bool {
        true
    }
}

/// Removes logs beyond the limits, on its own thread. `None` if the thread cannot be started.
pub(crate) fn prune_aside(dir: &Path) -> Option<thread::JoinHandle<()>> {
    let dir = dir.to_owned();
    let prune = move || prune(&dir, SystemTime::now());
    thread::Builder::new().name("logs".to_owned()).stack_size(STACK).spawn(prune).ok()
}

/// The files of one instance: `<id>.log` and `<id>.log.1`.
#[derive(Debug)]
struct Logs {
    files: Vec<PathBuf>,
    bytes: u64,
    written: SystemTime,
}

fn prune(dir: &Path, now: SystemTime) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    let mut found: BTreeMap<String, Logs> = BTreeMap::new();
    for entry in entries.flatten().take(LOOKED_AT_MAX) {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(id) = name.strip_suffix(".log").or_else(|| name.strip_suffix(".log.1")) else { continue };
        let Ok(about) = entry.metadata() else { continue };
        if !about.is_file() {
            continue;
        }
        let written = about.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        let logs = found.entry(id.to_owned()).or_insert_with(|| Logs { files: Vec::new(), bytes: 0, written });
        logs.files.push(entry.path());
        logs.bytes += about.len();
        logs.written = logs.written.max(written);
    }
    for id in beyond(&found, now) {
        remove(&dir.join(format!("{id}.log")), &found[id].files);
    }
}

/// The logs beyond the limits of number, size or age; the newest are kept.
fn beyond(found: &BTreeMap<String, Logs>, now: SystemTime) -> Vec<&str> {
    let mut latest: Vec<(&String, &Logs)> = found.iter().collect();
    latest.sort_by_key(|(_, logs)| std::cmp::Reverse(logs.written));
    let mut bytes = 0u64;
    let is_beyond = |(index, (_, logs)): &(usize, (&String, &Logs))| {
        bytes = bytes.saturating_add(logs.bytes);
        let age = now.duration_since(logs.written).unwrap_or_default();
        *index >= LOGS_MAX || bytes > LOGS_BYTES_MAX || age > LOGS_AGE_MAX
    };
    latest.into_iter().enumerate().filter(is_beyond).map(|(_, (id, _))| id.as_str()).collect()
}

/// Removes the files unless their instance runs.
#[cfg(unix)]
fn remove(log: &Path, files: &[PathBuf]) {
    use nix::fcntl::{Flock, FlockArg};
    let alone = match os::open_own(OpenOptions::new().append(true), log) {
        Ok(file) => match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(alone) => Some(alone),
            Err(_) => return,
        },
        // Only `<id>.log.1` exists: a running instance would have `<id>.log` open.
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(_) => return,
    };
    files.iter().for_each(|file| drop(fs::remove_file(file)));
    drop(alone);
}

#[cfg(not(unix))]
fn remove(log: &Path, files: &[PathBuf]) {
    // Windows does not remove an open log, and then `<id>.log.1` is kept, too.
    let is_free = fs::remove_file(log).is_ok() || !log.exists();
    if is_free {
        files.iter().for_each(|file| drop(fs::remove_file(file)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Creates a log of this size and age.
    fn log(dir: &Path, name: &str, bytes: u64, age: Duration) {
        let file = File::create(dir.join(name)).unwrap();
        file.set_len(bytes).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
    }

    const fn hours(hours: u64) -> Duration {
        Duration::from_secs(hours * 3600)
    }

    #[test]
    fn the_oldest_logs_beyond_the_count_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..LOGS_MAX as u64 + 20 {
            log(dir.path(), &format!("i{number:03}.log"), 10, hours(number));
            log(dir.path(), &format!("i{number:03}.log.1"), 10, hours(number + 1));
        }
        log(dir.path(), "notes.txt", 10, hours(24 * 365));
        prune(dir.path(), SystemTime::now());
        let left = names(dir.path());
        assert_eq!(left.len(), 2 * LOGS_MAX + 1);
        assert!(left.contains(&"i000.log".to_owned()) && left.contains(&"notes.txt".to_owned()));
        assert!(!left.contains(&format!("i{LOGS_MAX:03}.log")));
    }

    #[test]
    fn logs_beyond_the_size_or_the_age_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        log(dir.path(), "new.log", 1 << 20, hours(0));
        log(dir.path(), "large.log", LOGS_BYTES_MAX, hours(1));
        log(dir.path(), "small.log", 10, hours(2));
        prune(dir.path(), SystemTime::now());
        assert_eq!(names(dir.path()), ["new.log"]);
        log(dir.path(), "old.log", 10, LOGS_AGE_MAX + hours(1));
        log(dir.path(), "month.log", 10, LOGS_AGE_MAX - hours(1));
        prune(dir.path(), SystemTime::now());
        assert_eq!(names(dir.path()), ["month.log", "new.log"]);
    }

    #[cfg(unix)]
    #[test]
    fn the_log_of_an_instance_that_runs_is_never_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("running.log");
        let (file, hold) = open(&path).unwrap();
        file.set_modified(SystemTime::now() - LOGS_AGE_MAX * 2).unwrap();
        log(dir.path(), "running.log.1", 10, LOGS_AGE_MAX * 2);
        prune(dir.path(), SystemTime::now());
        assert_eq!(names(dir.path()), ["running.log", "running.log.1"]);
        drop((file, hold));
        prune(dir.path(), SystemTime::now());
        assert!(names(dir.path()).is_empty());
    }

    #[cfg(unix)]
    #[test]
    fn a_log_that_was_removed_meanwhile_is_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.log");
        let (_file, hold) = open(&path).unwrap();
        assert!(hold.is_of(&path));
        fs::remove_file(&path).unwrap();
        assert!(!hold.is_of(&path));
    }
}
