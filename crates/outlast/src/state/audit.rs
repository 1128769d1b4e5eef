//! The audit log: finished JSON lines. Each is written to the kernel before the action that it announces, and synced
//! to disk soon after.

use std::{
    borrow::Cow,
    fmt,
    fs::{self, File, Metadata, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use outlast_os as os;

use crate::state::audit_retention::{HELD_MAX, Unpublished};

/// A log that would grow beyond this is rotated first.
const AUDIT_MAX: u64 = 8 * 1024 * 1024;
/// How many rotated logs are kept: `audit.1.jsonl` is the newest. The next rotation removes the oldest, unless it has
/// records that a replica has not published; see [`HELD_MAX`].
const AUDIT_KEPT: u32 = 3;
/// The queue of sync requests. A request that finds it full is dropped: those in the queue have not started and will
/// cover it.
const SYNCS_MAX: usize = 8;
/// Lines that announce nothing are synced at most this often: an append to a file may block while the file is synced.
const SYNC_GAP: Duration = Duration::from_secs(1);
/// The sync thread does nothing else.
const SYNCER_STACK: usize = 64 * 1024;

/// One instance's access to the log that it shares with other instances.
///
/// Writing takes no lock: each record is one append, which the kernel keeps whole. Another instance may rotate the
/// log at any time; the next record finds another file under the name and opens it. A record that is written during
/// the rotation ends up in the rotated log, which is kept.
#[derive(Debug)]
pub(crate) struct Audit {
    path: Option<PathBuf>,
    bytes_max: u64,
    log: Option<Log>,
    syncer: Option<Syncer>,
    /// One complaint for each period of failure, however many records are lost in it.
    in_trouble: bool,
    lost: u64,
    /// Logs that were removed although they had records that are not published, and were not complained about yet.
    unpublished_removed: u32,
}

/// A failure of the log, as text for people. The caller continues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Complaint(String);

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Audit {
    /// With `None` there is no file: records are only counted. The first record opens the file.
    pub(crate) fn new(path: Option<PathBuf>) -> Audit {
        Audit {
            path,
            bytes_max: AUDIT_MAX,
            log: None,
            syncer: None,
            in_trouble: false,
            lost: 0,
            unpublished_removed: 0,
        }
    }

    #[cfg(test)]
    pub(crate) fn small(path: &Path, bytes_max: u64) -> Audit {
        Audit { bytes_max, ..Audit::new(Some(path.to_owned())) }
    }

    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Records that did not reach the file, since the start.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }

    /// Whether the last record reached the file.
    pub(crate) fn is_writable(&self) -> bool {
        self.path.is_some() && !self.in_trouble
    }

    /// Appends one finished line, or several joined by line breaks, in one write. When it returns, the kernel has the
    /// data, or it is counted as lost; the first loss after a success returns the reason.
    pub(crate) fn write(&mut self, line: &str) -> Option<Complaint> {
        self.put(line, FlushUrgency::AtOnce)
    }

    /// The same for lines that announce nothing: the kernel has them when it returns, and they are synced at most
    /// [`SYNC_GAP`] later.
    pub(crate) fn write_many(&mut self, lines: &str) -> Option<Complaint> {
        self.put(lines, FlushUrgency::Soon)
    }

    fn put(&mut self, line: &str, haste: FlushUrgency) -> Option<Complaint> {
        let Some(path) = self.path.clone() else {
            self.lost += lines_in(line);
            return None;
        };
        match self.append(&path, line, haste) {
            Ok(()) => {
                self.in_trouble = false;
                let unsynced = self.syncer.as_ref().is_some_and(Syncer::take_failure);
                let unpublished = std::mem::take(&mut self.unpublished_removed) > 0;
                let path = path.display();
                if unpublished {
                    let what = "so the oldest one was removed, and its records will not be published";
                    return Some(Complaint(format!("the audit log {path} already has {HELD_MAX} older files, {what}")));
                }
                unsynced.then(|| Complaint(format!("the audit log {path} cannot be flushed to disk")))
            }
            Err(Unwritten { lines, error }) => {
                self.lost += lines;
                let first = !std::mem::replace(&mut self.in_trouble, true);
                first.then(|| {
                    let path = path.display();
                    Complaint(format!("the audit log {path} cannot be written, so its records are lost ({error})"))
                })
            }
        }
    }

    /// Waits until everything is synced to disk, without a time limit. For the exit of the program.
    pub(crate) fn finish(mut self) {
        if let Some(syncer) = self.syncer.take() {
            syncer.finish();
        }
    }

    fn append(&mut self, path: &Path, line: &str, haste: FlushUrgency) -> Result<(), Unwritten> {
        let all = |error: io::Error| Unwritten { lines: lines_in(line), error };
        let mut log = match self.log.take() {
            Some(log) => log.follow(path).map_err(all)?,
            None => Log::open(path).map_err(all)?,
        };
        if log.length > 0 && log.length + line.len() as u64 >= self.bytes_max {
            log = log.put_aside(path, &mut self.unpublished_removed).map_err(all)?;
        }
        log.append(path, line)?;
        // Without the thread nothing is synced, but the kernel has the record, which survives a crash of outlast.
        if self.syncer.is_none() {
            self.syncer = Syncer::start().ok();
        }
        if let Some(syncer) = &mut self.syncer {
            syncer.ask(&log.file, haste);
        }
        // After an error `log` stays empty, so the next record opens the file again: the cause may be gone by then.
        self.log = Some(log);
        Ok(())
    }
}

/// Lines that did not reach the file.
#[derive(Debug)]
struct Unwritten {
    lines: u64,
    error: io::Error,
}

fn lines_in(text: &str) -> u64 {
    text.lines().filter(|line| !line.is_empty()).count() as u64
}

/// An open log, and its last known state.
#[derive(Debug)]
struct Log {
    file: Arc<File>,
    identity: Identity,
    /// Other instances append too, so this may be out of date.
    length: u64,
    /// The last line is incomplete because its writer was interrupted; the next record starts with a line break.
    is_torn: bool,
}

impl Log {
    fn open(path: &Path) -> io::Result<Log> {
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true);
        let mut file = os::open_own(&options, path)?;
        let found = file.metadata()?;
        let mut last = [b'\n'];
        if found.len() > 0 {
            file.seek(SeekFrom::End(-1))?;
            // A rotation by another instance does not shorten the open file, so the byte is there. If another
            // instance is writing just now, its line looks torn, and the result is an empty line.
            file.read_exact(&mut last)?;
        }
        Ok(Log { identity: Identity::of(&found), length: found.len(), is_torn: last != [b'\n'], file: Arc::new(file) })
    }

    /// The log that has this name now.
    fn follow(mut self, path: &Path) -> io::Result<Log> {
        match fs::symlink_metadata(path) {
            Ok(found) if self.is_still(&found)? => {
                self.length = found.len();
                Ok(self)
            }
            _ => Log::open(path),
        }
    }

    #[cfg(unix)]
    fn is_still(&self, found: &Metadata) -> io::Result<bool> {
        Ok(self.identity == Identity::of(found))
    }

    /// Without a file identity the lengths are compared: a new log is shorter. If another instance appends between
    /// the two checks, the same file is opened again, which is harmless.
    #[cfg(not(unix))]
    fn is_still(&self, found: &Metadata) -> io::Result<bool> {
        Ok(self.identity == Identity::of(found) && self.file.metadata()?.len() == found.len())
    }

    fn append(&mut self, path: &Path, line: &str) -> Result<(), Unwritten> {
        let end = line.trim_end_matches('\n').len();
        let record: Cow<'_, [u8]> = match line.as_bytes().get(..=end) {
            // Several records already have their line breaks.
            Some(whole) if !self.is_torn => whole.into(),
            _ => [if self.is_torn { "\n" } else { "" }, &line[..end], "\n"].concat().into_bytes().into(),
        };

        let mut file = &*self.file;
        let written = loop {
            match file.write(&record) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(written) => break written,
                Err(error) => return Err(Unwritten { lines: lines_in(line), error }),
            }
        };
        if written < record.len() {
            // A short write means that the disk is full. The complete lines in it are kept.
            let whole = memchr::memrchr(b'\n', &record[..written]).map_or(0, |at| at + 1);
            let lines = lines_in(&String::from_utf8_lossy(&record[whole..]));
            // If this fails, the next record starts with a line break.
            let _ = self.remove_torn(path, (written - whole) as u64);
            let error = io::Error::new(io::ErrorKind::StorageFull, "the disk is full");
            return Err(Unwritten { lines, error });
        }
        self.is_torn = false;
        Ok(())
    }

    /// Removes the last bytes that this instance wrote, which are an incomplete line. If another instance has
    /// appended after them, they cannot be truncated; they are overwritten with a blank line, which needs no disk
    /// space. That instance could still append between the check and the truncation, but only if the full disk had
    /// space again at that moment.
    fn remove_torn(&self, path: &Path, length: u64) -> io::Result<()> {
        let mut file = &*self.file;
        let end = file.stream_position()?;
        let Some(start) = end.checked_sub(length).filter(|_| length > 0) else { return Ok(()) };
        if file.metadata()?.len() == end {
            return file.set_len(start);
        }
        let mut other = os::open_own(OpenOptions::new().write(true), path)?;
        if Identity::of(&other.metadata()?) != self.identity {
            return Ok(());
        }
        other.seek(SeekFrom::Start(start))?;
        let blank: Vec<u8> = (1..=length).map(|at| if at == length { b'\n' } else { b' ' }).collect();
        other.write_all(&blank)
    }

    /// Renames each log to the next number and opens a new one. Only one process may do so at a time; others continue
    /// to write to the old log, which may exceed its limit by a few records.
    fn put_aside(self, path: &Path, unpublished_removed: &mut u32) -> io::Result<Log> {
        let Some(_turn) = RotationLock::take(&self.file, path) else { return Ok(self) };
        // Checked again under the lock: another instance may have rotated the log since the first check.
        let found = fs::metadata(path)?;
        if !self.is_still(&found)? {
            return Log::open(path);
        }
        remove_old(path, unpublished_removed)?;
        // An interrupted rotation left a gap; files after the gap need not be renamed.
        let gap = (1..=HELD_MAX).find(|number| !aside(path, *number).exists()).unwrap_or(HELD_MAX);
        for number in (1..gap).rev() {
            fs::rename(aside(path, number), aside(path, number + 1))?;
        }
        // This rename comes last because it gives up the lock: from here on other instances open the new log.
        fs::rename(path, aside(path, 1))?;
        Log::open(path)
    }
}

/// Removes the rotated logs that the next rotation makes too old. The oldest is removed first, so no gap is left.
fn remove_old(path: &Path, unpublished_removed: &mut u32) -> io::Result<()> {
    let gap = (1..=HELD_MAX).find(|number| !aside(path, *number).exists()).unwrap_or(HELD_MAX + 1);
    let mut unpublished = None;
    for number in (AUDIT_KEPT..=HELD_MAX).rev() {
        let log = aside(path, number);
        let next = if number < gap { number + 1 } else { number };
        if next <= AUDIT_KEPT {
            break;
        }
        if !log.exists() {
            continue;
        }
        if unpublished.get_or_insert_with(|| Unpublished::read(path)).are_in(&log) {
            if next <= HELD_MAX {
                break;
            }
            *unpublished_removed += 1;
        }
        fs::remove_file(&log)?;
    }
    Ok(())
}

/// The logs that exist, the oldest first.
pub(crate) fn files(path: &Path) -> Vec<PathBuf> {
    let older = (1..=HELD_MAX).rev().map(|number| aside(path, number));
    older.chain([path.to_owned()]).filter(|path| path.exists()).collect()
}

/// `audit.jsonl` → `audit.1.jsonl`
pub(super) fn aside(path: &Path, number: u32) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{stem}.{number}.{extension}"))
}

/// The lock for a rotation, released on drop or when its process exits.
#[cfg(unix)]
struct RotationLock(#[expect(dead_code, reason = "held for its drop")] nix::fcntl::Flock<File>);

#[cfg(unix)]
impl RotationLock {
    /// The lock is on the log itself: it is renamed with the file, and the new log has its own lock.
    fn take(log: &File, _path: &Path) -> Option<RotationLock> {
        let log = log.try_clone().ok()?;
        nix::fcntl::Flock::lock(log, nix::fcntl::FlockArg::LockExclusiveNonblock).ok().map(RotationLock)
    }
}

#[cfg(windows)]
struct RotationLock(#[expect(dead_code, reason = "held for its drop")] File);

#[cfg(windows)]
impl RotationLock {
    /// A file beside the log, opened without sharing.
    fn take(_log: &File, path: &Path) -> Option<RotationLock> {
        use std::os::windows::fs::OpenOptionsExt;
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .share_mode(0)
            .open(path.with_extension("turn"))
            .ok()
            .map(RotationLock)
    }
}

/// Tells a file from another one with the same name.
#[derive(Debug, PartialEq, Eq)]
struct Identity(u64, u64);

impl Identity {
    #[cfg(unix)]
    fn of(found: &Metadata) -> Identity {
        use std::os::unix::fs::MetadataExt;
        Identity(found.dev(), found.ino())
    }

    #[cfg(not(unix))]
    fn of(_found: &Metadata) -> Identity {
        Identity(0, 0)
    }
}

/// A thread that syncs files, because a sync may block for long.
#[derive(Debug)]
struct Syncer {
    requests: mpsc::SyncSender<(Arc<File>, FlushUrgency)>,
    /// The file of the last request.
    last: Option<Arc<File>>,
    shared: Arc<SyncerShared>,
    thread: thread::JoinHandle<()>,
}

#[derive(Debug, Default)]
struct SyncerShared {
    failed: AtomicBool,
    /// A request was made since the last sync started.
    is_asked: AtomicBool,
    /// An urgent request found the queue full: the requests in it must not wait for the gap.
    is_urgent: AtomicBool,
}

/// How soon a line must be on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FlushUrgency {
    AtOnce,
    Soon,
}

impl Syncer {
    fn start() -> io::Result<Syncer> {
        let (requests, asked) = mpsc::sync_channel(SYNCS_MAX);
        let shared = Arc::new(SyncerShared::default());
        let theirs = Arc::clone(&shared);
        let work = move || theirs.force_all(&asked, SYNC_GAP, File::sync_data);
        let thread = thread::Builder::new().name("audit-sync".to_owned()).stack_size(SYNCER_STACK).spawn(work)?;
        Ok(Syncer { requests, last: None, shared, thread })
    }

    fn ask(&mut self, file: &Arc<File>, haste: FlushUrgency) {
        // The same request is still pending, so the thread need not be woken again.
        let is_asked = self.shared.is_asked.swap(true, Ordering::SeqCst);
        let is_last = self.last.as_ref().is_some_and(|last| Arc::ptr_eq(last, file));
        if is_asked && is_last && haste == FlushUrgency::Soon {
            return;
        }
        self.last = Some(Arc::clone(file));
        // A full queue already covers this request; see SYNCS_MAX.
        if self.requests.try_send((Arc::clone(file), haste)).is_err() && haste == FlushUrgency::AtOnce {
            self.shared.is_urgent.store(true, Ordering::Release);
        }
    }

    /// Whether a sync has failed since the last call of this function.
    fn take_failure(&self) -> bool {
        self.shared.failed.swap(false, Ordering::Relaxed)
    }

    fn finish(self) {
        drop(self.requests);
        // A panic of the thread was already printed, and there is nothing left to sync.
        let _ = self.thread.join();
    }
}

impl SyncerShared {
    /// Runs until the queue is closed; requests that are pending then are carried out without delay.
    fn force_all(
        &self,
        asked: &mpsc::Receiver<(Arc<File>, FlushUrgency)>,
        gap: Duration,
        force: impl Fn(&File) -> io::Result<()>,
    ) {
        let force = |file: &File| self.failed.fetch_or(force(file).is_err(), Ordering::Relaxed);
        let mut forced: Option<Instant> = None;
        while let Ok((mut latest, mut haste)) = asked.recv() {
            // One sync covers all pending requests, unless the log was rotated in between.
            loop {
                if self.is_urgent.swap(false, Ordering::Acquire) {
                    haste = FlushUrgency::AtOnce;
                }
                let due = forced.map(|forced| forced + gap).filter(|_| haste == FlushUrgency::Soon);
                let wait = due.map_or(Duration::ZERO, |due| due.saturating_duration_since(Instant::now()));
                let Ok((file, next)) = asked.recv_timeout(wait) else { break };
                if !Arc::ptr_eq(&file, &latest) {
                    force(&latest);
                    latest = file;
                }
                if next == FlushUrgency::AtOnce {
                    haste = next;
                }
            }
            self.is_asked.swap(false, Ordering::SeqCst);
            force(&latest);
            forced = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::audit_retention::{self, Mark};
    use std::collections::BTreeSet;
    use tempfile::TempDir;

    fn room() -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        (dir, path)
    }

    #[test]
    fn each_record_is_a_line_and_stays_after_its_writer_exits() {
        let (_dir, path) = room();
        let mut audit = Audit::new(Some(path.clone()));
        assert_eq!(audit.write(r#"{"a":1}"#), None);
        assert_eq!(audit.write("{\"b\":2}\n{\"b\":3}\n"), None);
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"a\":1}\n{\"b\":2}\n{\"b\":3}\n");
        audit.finish();
        let mut again = Audit::new(Some(path.clone()));
        assert_eq!(again.write("{}"), None);
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"a\":1}\n{\"b\":2}\n{\"b\":3}\n{}\n");
        assert_eq!(again.lost(), 0);
    }

    #[test]
    fn without_a_path_records_are_counted() {
        let mut audit = Audit::new(None);
        assert_eq!((audit.write("{}"), audit.write("{}"), audit.lost()), (None, None, 2));
        audit.finish();
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_link_in_place_of_the_log_is_refused_and_reported_once() {
        let (_dir, path) = room();
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let mut audit = Audit::new(Some(path.clone()));
        let complaint = audit.write("{}").unwrap().to_string();
        insta::assert_snapshot!(
            complaint.replace(&*path.to_string_lossy(), "PATH"),
            @"the audit log PATH cannot be written, so its records are lost (it is a symbolic link)"
        );
        assert_eq!((audit.write("{}"), audit.write("{}"), audit.lost()), (None, None, 3));

        fs::remove_file(&path).unwrap();
        assert_eq!(audit.write("{}"), None, "the link is gone");
        assert_eq!(fs::read_to_string(&path).unwrap(), "{}\n");
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        assert!(audit.write("{}").is_some(), "new trouble, new complaint");
        assert_eq!(audit.lost(), 4);
    }

    /// A short write, as on a full disk, leaves no torn line and loses no complete one.
    #[cfg(unix)]
    #[test]
    fn a_line_cut_by_a_full_disk_is_removed() {
        let (_dir, path) = room();
        let mut log = Log::open(&path).unwrap();
        Write::write_all(&mut &*log.file, b"{\"a\":1}\n{\"b\":2}\n{\"torn").unwrap();
        log.remove_torn(&path, 6).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"a\":1}\n{\"b\":2}\n");

        // A line of another instance follows it.
        Write::write_all(&mut &*log.file, b"{\"torn").unwrap();
        let mut theirs = OpenOptions::new().append(true).open(&path).unwrap();
        theirs.write_all(b"{\"c\":3}\n").unwrap();
        log.remove_torn(&path, 6).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"a\":1}\n{\"b\":2}\n     \n{\"c\":3}\n");
        log.append(&path, "{\"d\":4}").unwrap();
        assert!(fs::read_to_string(&path).unwrap().ends_with("{\"c\":3}\n{\"d\":4}\n"));
    }

    #[test]
    fn a_directory_in_place_of_the_log_is_an_error_until_it_is_removed() {
        let (_dir, path) = room();
        fs::create_dir(&path).unwrap();
        let mut audit = Audit::new(Some(path.clone()));
        assert!(audit.write("{}").is_some());
        assert_eq!(audit.write("{}"), None);
        fs::remove_dir(&path).unwrap();
        assert_eq!(audit.write("{\"back\":true}"), None);
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"back\":true}\n");
        assert_eq!(audit.lost(), 2);
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_in_place_of_the_log_does_not_block() {
        let (_dir, path) = room();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let complaint = Audit::new(Some(path)).write("{}").unwrap().to_string();
        assert!(complaint.ends_with("(it is a FIFO, not a file)"), "{complaint}");
    }

    #[test]
    fn an_incomplete_line_is_ended_before_the_next() {
        let (_dir, path) = room();
        fs::write(&path, "{\"whole\":1}\n{\"torn\":").unwrap();
        let mut audit = Audit::new(Some(path.clone()));
        audit.write("{\"next\":1}");
        audit.write("{\"next\":2}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"whole\":1}\n{\"torn\":\n{\"next\":1}\n{\"next\":2}\n");
    }

    #[test]
    fn a_removed_log_is_created_again() {
        let (_dir, path) = room();
        let mut audit = Audit::new(Some(path.clone()));
        audit.write("{\"n\":1}");
        fs::rename(&path, path.with_file_name("kept")).unwrap();
        assert_eq!(audit.write("{\"n\":2}"), None);
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"n\":2}\n");
        assert_eq!(fs::read_to_string(path.with_file_name("kept")).unwrap(), "{\"n\":1}\n");
    }

    #[test]
    fn old_logs_are_renumbered_and_the_oldest_is_removed() {
        let (_dir, path) = room();
        let mut audit = Audit::small(&path, 25);
        for number in 10..20 {
            assert_eq!(audit.write(&format!("{{\"n\":{number}}}")), None); // Two of these fit into one log.
        }
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        assert_eq!(read(&path), "{\"n\":18}\n{\"n\":19}\n");
        assert_eq!(read(&aside(&path, 1)), "{\"n\":16}\n{\"n\":17}\n");
        assert_eq!(read(&aside(&path, 2)), "{\"n\":14}\n{\"n\":15}\n");
        assert_eq!(read(&aside(&path, 3)), "{\"n\":12}\n{\"n\":13}\n");
        assert!(!aside(&path, 4).exists());
        assert_eq!(aside(&path, 1).file_name().unwrap(), "audit.1.jsonl");
    }

    fn mark(published: u64) -> Mark {
        Mark { published, base: 0 }
    }

    /// What is in the rotated logs, the newest first.
    fn rotated(path: &Path) -> Vec<String> {
        let logs = (1..=HELD_MAX + 2).map(|number| fs::read_to_string(aside(path, number)));
        logs.map_while(Result::ok).map(|text| text.trim_end().replace('\n', " ")).collect()
    }

    #[test]
    fn logs_with_unpublished_records_are_kept_until_they_are_published() {
        let (_dir, path) = room();
        let ours = |number: u64| format!("{{\"id\":\"east-{number}\"}}");
        let foreign = "{\"timestamp\":\"\"}";
        audit_retention::store(&path, "east", mark(0)).unwrap();
        // Each log has one record.
        let mut audit = Audit::small(&path, 20);
        let mut write = |line: &str| assert_eq!(audit.write(line), None);
        write(foreign);
        (1..=5).for_each(|number| write(&ours(number)));
        assert_eq!(rotated(&path), [4, 3, 2, 1].map(ours), "the foreign one is not needed");
        write(foreign);
        write(foreign);
        assert_eq!(rotated(&path).len(), 6);

        // The next rotation removes what is published, whichever instance does it.
        audit_retention::store(&path, "east", mark(2)).unwrap();
        assert_eq!(Audit::small(&path, 20).write(foreign), None);
        let kept = [foreign.to_owned(), foreign.to_owned(), ours(5), ours(4), ours(3)];
        assert_eq!(rotated(&path), kept);
        audit_retention::store(&path, "east", mark(5)).unwrap();
        write(foreign);
        assert_eq!(rotated(&path), [foreign, foreign, foreign]);
        assert_eq!(files(&path).len(), 4);
        assert_eq!(files(&path).first(), Some(&aside(&path, 3)));
        assert_eq!(files(&path).last(), Some(&path));
    }

    #[test]
    fn unpublished_records_are_kept_up_to_a_limit() {
        let (_dir, path) = room();
        audit_retention::store(&path, "east", mark(0)).unwrap();
        let mut audit = Audit::small(&path, 20);
        let mut complaints = Vec::new();
        let ours = |number: u32| format!("{{\"id\":\"east-{number}\"}}");
        for number in 1..=HELD_MAX + 3 {
            complaints.extend(audit.write(&ours(number)));
        }
        let kept: Vec<String> = (3..=HELD_MAX + 2).rev().map(ours).collect();
        assert_eq!(rotated(&path), kept);
        assert_eq!(complaints.len(), 2, "one for each log that was removed");
        insta::assert_snapshot!(
            complaints[0].to_string().replace(&*path.to_string_lossy(), "PATH"),
            @"the audit log PATH already has 64 older files, so the oldest one was removed, and its records will not be published"
        );
        assert_eq!(audit.lost(), 0);
        // Once they are published, one rotation removes all of them.
        audit_retention::store(&path, "east", mark(1_000)).unwrap();
        assert_eq!(audit.write(&ours(1_001)), None);
        assert_eq!(rotated(&path).len(), 3);
    }

    #[test]
    fn an_interrupted_rotation_loses_no_record() {
        let (_dir, path) = room();
        fs::write(&path, "{\"n\":\"full\"}\n").unwrap();
        fs::write(aside(&path, 2), "second\n").unwrap();
        fs::write(aside(&path, 3), "third\n").unwrap();
        Audit::small(&path, 10).write("{}");
        assert_eq!(fs::read_to_string(aside(&path, 1)).unwrap(), "{\"n\":\"full\"}\n");
        assert_eq!(fs::read_to_string(aside(&path, 2)).unwrap(), "second\n");
        assert_eq!(fs::read_to_string(aside(&path, 3)).unwrap(), "third\n");
    }

    #[test]
    fn a_rotation_by_another_process_is_not_waited_for() {
        let (_dir, path) = room();
        let mut audit = Audit::small(&path, 10);
        audit.write("{\"n\":1}");
        let theirs = OpenOptions::new().append(true).open(&path).unwrap();
        let turn = RotationLock::take(&theirs, &path).unwrap();
        assert_eq!(audit.write("{\"n\":2}"), None);
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"n\":1}\n{\"n\":2}\n");
        drop((turn, theirs));
        assert_eq!(audit.write("{\"n\":3}"), None);
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"n\":3}\n");
    }

    #[test]
    fn many_writers_and_rotations_lose_no_line_and_tear_none() {
        const WRITERS: u32 = 4;
        const RECORDS: u32 = 400;
        let (_dir, path) = room();
        // Each writer opens the file itself, as separate processes do. All lines fit into the logs that are kept.
        let line = |writer: u32, record: u32| {
            format!("{{\"writer\":{writer},\"record\":{record},\"pad\":\"{}\"}}", "x".repeat(100))
        };
        let bytes: u64 = (0..WRITERS).flat_map(|w| (0..RECORDS).map(move |r| line(w, r).len() as u64 + 1)).sum();
        thread::scope(|scope| {
            for writer in 0..WRITERS {
                let mut audit = Audit::small(&path, bytes / 3);
                scope.spawn(move || {
                    for record in 0..RECORDS {
                        assert_eq!(audit.write(&line(writer, record)), None);
                    }
                    audit.finish();
                });
            }
        });
        let kept = (1..=AUDIT_KEPT).map(|number| aside(&path, number)).chain([path.clone()]);
        let texts: Vec<String> = kept.filter_map(|path| fs::read_to_string(path).ok()).collect();
        // The instance that rotates may be delayed while the others write, so the number of rotations varies.
        assert!(texts.len() > 1, "the log was rotated");
        let lines = texts.iter().flat_map(|text| text.lines());
        let found: Vec<String> = lines.filter(|line| !line.is_empty()).map(str::to_owned).collect();
        let distinct: BTreeSet<&String> = found.iter().collect();
        assert_eq!((found.len(), distinct.len()), ((WRITERS * RECORDS) as usize, (WRITERS * RECORDS) as usize));
        for line in found {
            serde_json::from_str::<serde_json::Value>(&line).expect("no line is torn");
        }
    }

    #[test]
    fn a_waiter_is_woken_only_when_its_sync_is_done() {
        let (_dir, path) = room();
        let file = |name: &str| Arc::new(File::create(path.with_file_name(name)).unwrap());
        let (old, new) = (file("old"), file("new"));
        let (requests, asked) = mpsc::sync_channel(SYNCS_MAX);
        let mut syncer = Syncer {
            requests,
            last: None,
            shared: Arc::default(),
            thread: thread::Builder::new().spawn(|| {}).unwrap(),
        };
        let mut heard = |file: &Arc<File>, haste| {
            syncer.ask(file, haste);
            asked.try_recv().is_ok()
        };
        assert!(heard(&old, FlushUrgency::Soon));
        assert!(!heard(&old, FlushUrgency::Soon), "it was asked");
        assert!(heard(&old, FlushUrgency::AtOnce), "it is in haste now");
        assert!(heard(&new, FlushUrgency::Soon), "of this one nothing was heard");
        assert!(!heard(&new, FlushUrgency::Soon));
        syncer.shared.is_asked.store(false, Ordering::Release);
        syncer.ask(&new, FlushUrgency::Soon);
        assert!(asked.try_recv().is_ok(), "the last time it was forced may have been too early");
    }

    #[test]
    fn records_that_announce_nothing_are_synced_together_and_delay_no_other() {
        let (_dir, path) = room();
        // The lengths identify the files.
        let file = |name: &str, length: u64| {
            let file = File::create(path.with_file_name(name)).unwrap();
            file.set_len(length).unwrap();
            Arc::new(file)
        };
        let (old, new) = (file("old", 1), file("new", 2));
        let (requests, asked) = mpsc::sync_channel(SYNCS_MAX);
        let (forced, seen) = mpsc::channel();
        let never = Duration::from_secs(3600);
        let worker = thread::Builder::new().spawn(move || {
            let force = |file: &File| forced.send(file.metadata()?.len()).map_err(io::Error::other);
            SyncerShared::default().force_all(&asked, never, force);
        });
        let ask = |file: &Arc<File>, haste| requests.send((Arc::clone(file), haste)).unwrap();

        // The first request is carried out at once.
        ask(&old, FlushUrgency::Soon);
        assert_eq!(seen.recv(), Ok(1));
        // The next would wait for an hour, but an urgent request follows; the rotated log is synced, too.
        ask(&old, FlushUrgency::Soon);
        ask(&old, FlushUrgency::Soon);
        ask(&new, FlushUrgency::AtOnce);
        assert_eq!((seen.recv(), seen.recv()), (Ok(1), Ok(2)));
        // Closing the queue ends the wait, too.
        ask(&new, FlushUrgency::Soon);
        ask(&new, FlushUrgency::Soon);
        drop(requests);
        worker.unwrap().join().unwrap();
        assert_eq!(seen.iter().collect::<Vec<_>>(), [2]);
    }
}
