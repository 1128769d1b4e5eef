//! The audit log: finished JSON lines, in the kernel's hands before the act they announce, on disk soon after.

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

use crate::os;

/// A log that would grow past this is put aside first.
pub const AUDIT_MAX: u64 = 8 * 1024 * 1024;
/// How many logs put aside are kept: `audit.1.jsonl` is the newest. The oldest is forgotten at the next turn.
pub const AUDIT_KEPT: u32 = 3;
/// Requests to force a file to disk. One that finds no room is dropped: those before it have not begun, and will
/// cover it.
const SYNCS_MAX: usize = 8;
/// Lines that announce nothing are forced to disk this often at most: while a file is forced, whoever appends to it may
/// have to wait.
const SYNC_GAP: Duration = Duration::from_secs(1);
/// The thread that forces files to disk does nothing else.
const SYNCER_STACK: usize = 64 * 1024;

/// One instance's way into the log it shares with its neighbours.
///
/// Nothing is locked while writing: each record is one append, which the kernel keeps whole. A neighbour may put
/// the log aside at any moment; the next record notices that the name leads elsewhere, and follows it. A record
/// that was just then on its way ends up in the log put aside, which is kept.
#[derive(Debug)]
pub struct Audit {
    path: Option<PathBuf>,
    bytes_max: u64,
    log: Option<Log>,
    syncer: Option<Syncer>,
    /// One complaint for each spell of trouble, however many records it costs.
    in_trouble: bool,
    lost: u64,
}

/// Trouble with the log, for people. It never stops the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Complaint(String);

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Audit {
    /// `None` when there is no place to write: records are then only counted. The file is opened by the first record.
    pub fn new(path: Option<PathBuf>) -> Audit {
        Audit { path, bytes_max: AUDIT_MAX, log: None, syncer: None, in_trouble: false, lost: 0 }
    }

    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Records that never reached the file, since the start.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Whether the last record reached the file.
    pub fn is_writable(&self) -> bool {
        self.path.is_some() && !self.in_trouble
    }

    /// Appends one finished line, or several joined by line breaks, in one write. When it returns, the kernel has
    /// it, or it is counted as lost; the first loss after a success says why.
    pub fn write(&mut self, line: &str) -> Option<Complaint> {
        self.put(line, Haste::AtOnce)
    }

    /// The same for lines that announce nothing: the kernel has them when it returns, the disk [`SYNC_GAP`] later at most.
    pub fn write_many(&mut self, lines: &str) -> Option<Complaint> {
        self.put(lines, Haste::Soon)
    }

    fn put(&mut self, line: &str, haste: Haste) -> Option<Complaint> {
        let Some(path) = self.path.clone() else {
            self.lost += lines_in(line);
            return None;
        };
        match self.append(&path, line, haste) {
            Ok(()) => {
                self.in_trouble = false;
                let unsynced = self.syncer.as_ref().is_some_and(Syncer::take_failure);
                unsynced.then(|| {
                    Complaint(format!("the audit log {} is written, but not safe on its disk", path.display()))
                })
            }
            Err(Unwritten { lines, error }) => {
                self.lost += lines;
                let first = !std::mem::replace(&mut self.in_trouble, true);
                first.then(|| {
                    let path = path.display();
                    Complaint(format!("the audit log {path} cannot be written, and its records are lost ({error})"))
                })
            }
        }
    }

    /// Waits until all that was written is on disk. This is for the end of the program, and may take as long as
    /// the disk does.
    pub fn finish(mut self) {
        if let Some(syncer) = self.syncer.take() {
            syncer.finish();
        }
    }

    fn append(&mut self, path: &Path, line: &str, haste: Haste) -> Result<(), Unwritten> {
        let all = |error: io::Error| Unwritten { lines: lines_in(line), error };
        let mut log = match self.log.take() {
            Some(log) => log.follow(path).map_err(all)?,
            None => Log::open(path).map_err(all)?,
        };
        if log.length > 0 && log.length + line.len() as u64 >= self.bytes_max {
            log = log.put_aside(path).map_err(all)?;
        }
        log.append(path, line)?;
        // Without a thread there is no forcing, but the record is where a crash of ours cannot reach it.
        if self.syncer.is_none() {
            self.syncer = Syncer::start().ok();
        }
        if let Some(syncer) = &mut self.syncer {
            syncer.ask(&log.file, haste);
        }
        // After an error the log is opened anew: the disk may have been cleared, or the obstacle removed.
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

/// An open log, and what was last known of it.
#[derive(Debug)]
struct Log {
    file: Arc<File>,
    identity: Identity,
    /// Neighbours append too, so this is only as new as the last look.
    length: u64,
    /// Someone was cut off within a line: the next record begins by ending it.
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
            // A neighbour's rotation cannot shorten what we hold, so the byte is there. If a neighbour is within a
            // write of its own just now, we see a torn line where there is none, and leave an empty one.
            file.read_exact(&mut last)?;
        }
        Ok(Log { identity: Identity::of(&found), length: found.len(), is_torn: last != [b'\n'], file: Arc::new(file) })
    }

    /// The log that the name leads to now.
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

    /// Without a file's identity its length tells: the fresh log is the shorter one. A neighbour that appends
    /// between the two looks merely makes us open the same file again.
    #[cfg(not(unix))]
    fn is_still(&self, found: &Metadata) -> io::Result<bool> {
        Ok(self.identity == Identity::of(found) && self.file.metadata()?.len() == found.len())
    }

    fn append(&mut self, path: &Path, line: &str) -> Result<(), Unwritten> {
        let end = line.trim_end_matches('\n').len();
        let record: Cow<'_, [u8]> = match line.as_bytes().get(..=end) {
            // Many records at once come as they are to stand there.
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
            // A file takes less than all of a write only when its disk has run full. The lines that it took whole stay.
            let whole = memchr::memrchr(b'\n', &record[..written]).map_or(0, |at| at + 1);
            let lines = lines_in(&String::from_utf8_lossy(&record[whole..]));
            // If this fails, the next record begins by ending the torn line.
            let _ = self.remove_torn(path, (written - whole) as u64);
            let error = io::Error::new(io::ErrorKind::StorageFull, "the disk is full");
            return Err(Unwritten { lines, error });
        }
        self.is_torn = false;
        Ok(())
    }

    /// Takes back the last bytes that we wrote, which are the beginning of a line. If another instance has appended in
    /// between, ours cannot be cut off: then they become a blank line, in place, which needs no room on the disk. Between
    /// the look and the cut that instance could still append, but only if the full disk had room again just then.
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

    /// Renames the logs one step down and opens a fresh one. Only one process may do so at a time; whoever finds
    /// it being done writes on into the old log, which may thus pass its limit by a few records.
    fn put_aside(self, path: &Path) -> io::Result<Log> {
        let Some(_turn) = Turn::take(&self.file, path) else { return Ok(self) };
        // The look before may be out of date: it counts what is true now that nobody else can change it.
        let found = fs::metadata(path)?;
        if !self.is_still(&found)? {
            return Log::open(path);
        }
        // A rotation cut short left a gap, and nothing beyond the gap needs to move.
        let gap = (1..=AUDIT_KEPT).find(|number| !aside(path, *number).exists()).unwrap_or(AUDIT_KEPT);
        for number in (1..gap).rev() {
            fs::rename(aside(path, number), aside(path, number + 1))?;
        }
        // This comes last because it gives the turn away: from here on neighbours open the fresh log.
        fs::rename(path, aside(path, 1))?;
        Log::open(path)
    }
}

/// `audit.jsonl` → `audit.1.jsonl`
fn aside(path: &Path, number: u32) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{stem}.{number}.{extension}"))
}

/// The right to put the log aside, given back when dropped or when its holder dies.
#[cfg(unix)]
struct Turn(#[expect(dead_code, reason = "held for its drop")] nix::fcntl::Flock<File>);

#[cfg(unix)]
impl Turn {
    /// The lock is on the log itself: it moves away with it, and the fresh log comes with a fresh lock.
    fn take(log: &File, _path: &Path) -> Option<Turn> {
        let log = log.try_clone().ok()?;
        nix::fcntl::Flock::lock(log, nix::fcntl::FlockArg::LockExclusiveNonblock).ok().map(Turn)
    }
}

#[cfg(windows)]
struct Turn(#[expect(dead_code, reason = "held for its drop")] File);

#[cfg(windows)]
impl Turn {
    /// A file beside the log, opened so that nobody else can open it.
    fn take(_log: &File, path: &Path) -> Option<Turn> {
        use std::os::windows::fs::OpenOptionsExt;
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .share_mode(0)
            .open(path.with_extension("turn"))
            .ok()
            .map(Turn)
    }
}

/// What tells a file from another one of the same name.
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

/// A thread that forces files to disk, because that takes as long as the disk likes.
#[derive(Debug)]
struct Syncer {
    requests: mpsc::SyncSender<(Arc<File>, Haste)>,
    /// What was asked for last.
    last: Option<Arc<File>>,
    shared: Arc<SyncerShared>,
    thread: thread::JoinHandle<()>,
}

#[derive(Debug, Default)]
struct SyncerShared {
    failed: AtomicBool,
    /// Something was asked since a file was last begun to be forced.
    is_asked: AtomicBool,
    /// One that was in haste found no room: those before it are no longer to wait.
    is_urgent: AtomicBool,
}

/// How soon a line has to be on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Haste {
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

    fn ask(&mut self, file: &Arc<File>, haste: Haste) {
        // The same is still to be done: nobody need be woken to hear it again.
        let is_asked = self.shared.is_asked.swap(true, Ordering::SeqCst);
        let is_last = self.last.as_ref().is_some_and(|last| Arc::ptr_eq(last, file));
        if is_asked && is_last && haste == Haste::Soon {
            return;
        }
        self.last = Some(Arc::clone(file));
        // No room means the same was already asked; see SYNCS_MAX.
        if self.requests.try_send((Arc::clone(file), haste)).is_err() && haste == Haste::AtOnce {
            self.shared.is_urgent.store(true, Ordering::Release);
        }
    }

    /// Whether forcing has failed since the last time this was asked.
    fn take_failure(&self) -> bool {
        self.shared.failed.swap(false, Ordering::Relaxed)
    }

    fn finish(self) {
        drop(self.requests);
        // A panic in it has already been printed, and there is nothing left to save.
        let _ = self.thread.join();
    }
}

impl SyncerShared {
    /// Until nobody can ask any more; what was asked until then is forced without delay.
    fn force_all(
        &self,
        asked: &mpsc::Receiver<(Arc<File>, Haste)>,
        gap: Duration,
        force: impl Fn(&File) -> io::Result<()>,
    ) {
        let force = |file: &File| self.failed.fetch_or(force(file).is_err(), Ordering::Relaxed);
        let mut forced: Option<Instant> = None;
        while let Ok((mut latest, mut haste)) = asked.recv() {
            // What was asked meanwhile is covered by one go, unless the log was put aside in between.
            loop {
                if self.is_urgent.swap(false, Ordering::Acquire) {
                    haste = Haste::AtOnce;
                }
                let due = forced.map(|forced| forced + gap).filter(|_| haste == Haste::Soon);
                let wait = due.map_or(Duration::ZERO, |due| due.saturating_duration_since(Instant::now()));
                let Ok((file, next)) = asked.recv_timeout(wait) else { break };
                if !Arc::ptr_eq(&file, &latest) {
                    force(&latest);
                    latest = file;
                }
                if next == Haste::AtOnce {
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
    use std::collections::BTreeSet;
    use tempfile::TempDir;

    fn room() -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        (dir, path)
    }

    fn small(path: &Path, bytes_max: u64) -> Audit {
        Audit { bytes_max, ..Audit::new(Some(path.to_owned())) }
    }

    #[test]
    fn each_record_is_a_line_and_outlives_its_writer() {
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
    fn with_no_place_to_write_records_are_counted() {
        let mut audit = Audit::new(None);
        assert_eq!((audit.write("{}"), audit.write("{}"), audit.lost()), (None, None, 2));
        audit.finish();
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_link_in_its_place_costs_records_and_one_complaint() {
        let (_dir, path) = room();
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let mut audit = Audit::new(Some(path.clone()));
        let complaint = audit.write("{}").unwrap().to_string();
        insta::assert_snapshot!(
            complaint.replace(&*path.to_string_lossy(), "PATH"),
            @"the audit log PATH cannot be written, and its records are lost (it is a symbolic link)"
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

    /// A short write as on a full disk leaves neither a torn line nor a lost whole one.
    #[cfg(unix)]
    #[test]
    fn what_a_full_disk_took_of_a_line_is_taken_back() {
        let (_dir, path) = room();
        let mut log = Log::open(&path).unwrap();
        Write::write_all(&mut &*log.file, b"{\"a\":1}\n{\"b\":2}\n{\"torn").unwrap();
        log.remove_torn(&path, 6).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"a\":1}\n{\"b\":2}\n");

        // A neighbour's line stands behind it.
        Write::write_all(&mut &*log.file, b"{\"torn").unwrap();
        let mut theirs = OpenOptions::new().append(true).open(&path).unwrap();
        theirs.write_all(b"{\"c\":3}\n").unwrap();
        log.remove_torn(&path, 6).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"a\":1}\n{\"b\":2}\n     \n{\"c\":3}\n");
        log.append(&path, "{\"d\":4}").unwrap();
        assert!(fs::read_to_string(&path).unwrap().ends_with("{\"c\":3}\n{\"d\":4}\n"));
    }

    #[test]
    fn a_directory_in_its_place_is_trouble_until_it_is_gone() {
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
    fn a_pipe_in_its_place_does_not_stop_us() {
        let (_dir, path) = room();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let complaint = Audit::new(Some(path)).write("{}").unwrap().to_string();
        assert!(complaint.ends_with("(it is a FIFO, not a file)"), "{complaint}");
    }

    #[test]
    fn a_line_cut_short_is_ended_before_the_next() {
        let (_dir, path) = room();
        fs::write(&path, "{\"whole\":1}\n{\"torn\":").unwrap();
        let mut audit = Audit::new(Some(path.clone()));
        audit.write("{\"next\":1}");
        audit.write("{\"next\":2}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"whole\":1}\n{\"torn\":\n{\"next\":1}\n{\"next\":2}\n");
    }

    #[test]
    fn a_log_taken_away_is_begun_anew() {
        let (_dir, path) = room();
        let mut audit = Audit::new(Some(path.clone()));
        audit.write("{\"n\":1}");
        fs::rename(&path, path.with_file_name("kept")).unwrap();
        assert_eq!(audit.write("{\"n\":2}"), None);
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"n\":2}\n");
        assert_eq!(fs::read_to_string(path.with_file_name("kept")).unwrap(), "{\"n\":1}\n");
    }

    #[test]
    fn old_logs_step_down_and_the_oldest_goes() {
        let (_dir, path) = room();
        let mut audit = small(&path, 25);
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

    #[test]
    fn a_rotation_cut_short_costs_nothing() {
        let (_dir, path) = room();
        fs::write(&path, "{\"n\":\"full\"}\n").unwrap();
        fs::write(aside(&path, 2), "second\n").unwrap();
        fs::write(aside(&path, 3), "third\n").unwrap();
        small(&path, 10).write("{}");
        assert_eq!(fs::read_to_string(aside(&path, 1)).unwrap(), "{\"n\":\"full\"}\n");
        assert_eq!(fs::read_to_string(aside(&path, 2)).unwrap(), "second\n");
        assert_eq!(fs::read_to_string(aside(&path, 3)).unwrap(), "third\n");
    }

    #[test]
    fn a_neighbour_who_is_rotating_is_not_waited_for() {
        let (_dir, path) = room();
        let mut audit = small(&path, 10);
        audit.write("{\"n\":1}");
        let theirs = OpenOptions::new().append(true).open(&path).unwrap();
        let turn = Turn::take(&theirs, &path).unwrap();
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
        // The writers open the file each for themselves, as processes do. All they write fits into what is kept.
        let line = |writer: u32, record: u32| {
            format!("{{\"writer\":{writer},\"record\":{record},\"pad\":\"{}\"}}", "x".repeat(100))
        };
        let bytes: u64 = (0..WRITERS).flat_map(|w| (0..RECORDS).map(move |r| line(w, r).len() as u64 + 1)).sum();
        thread::scope(|scope| {
            for writer in 0..WRITERS {
                let mut audit = small(&path, bytes / 3);
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
        // Whoever rotates may be kept waiting while the others write on, so how often it happens is not certain.
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
    fn nobody_is_woken_for_what_is_still_to_be_done() {
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
        assert!(heard(&old, Haste::Soon));
        assert!(!heard(&old, Haste::Soon), "it was asked");
        assert!(heard(&old, Haste::AtOnce), "it is in haste now");
        assert!(heard(&new, Haste::Soon), "of this one nothing was heard");
        assert!(!heard(&new, Haste::Soon));
        syncer.shared.is_asked.store(false, Ordering::Release);
        syncer.ask(&new, Haste::Soon);
        assert!(asked.try_recv().is_ok(), "the last time it was forced may have been too early");
    }

    #[test]
    fn what_announces_nothing_is_forced_together_and_nothing_else_waits_for_it() {
        let (_dir, path) = room();
        // Told apart by their lengths.
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

        // The first has waited for nothing yet.
        ask(&old, Haste::Soon);
        assert_eq!(seen.recv(), Ok(1));
        // The next would wait for an hour, but for one that is in haste; the log put aside is not forgotten.
        ask(&old, Haste::Soon);
        ask(&old, Haste::Soon);
        ask(&new, Haste::AtOnce);
        assert_eq!((seen.recv(), seen.recv()), (Ok(1), Ok(2)));
        // Nor does the end wait.
        ask(&new, Haste::Soon);
        ask(&new, Haste::Soon);
        drop(requests);
        worker.unwrap().join().unwrap();
        assert_eq!(seen.iter().collect::<Vec<_>>(), [2]);
    }
}
