//! The store for records of HTTP sessions, so that a restarted gateway continues to serve them: a directory.
//!
//! Threads for file access read and write the files; writes of one session keep their order. If the store fails,
//! sessions lose their records and nothing else.

use std::{
    collections::VecDeque,
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    thread,
    time::{Duration, Instant, SystemTime},
};

use outlast_core::front::{
    Loaded, SessionId,
    record::{BadRecord, RECORD_BYTES_MAX, Record, RecordKey},
};
use outlast_os::{
    self as os,
    offload::{Task, offload},
};
use rustc_hash::FxHashMap;
use sha2::{Digest, Sha256};

use crate::state::home;

/// The size of all records together. A session beyond it is served without a record.
const BYTES_MAX: usize = 64 << 20;
/// Files of the directory that are read; further ones are ignored.
const FILES_MAX: usize = 100_000;
/// Writes and removals that are carried out in one batch.
const BATCH_MAX: usize = 256;
/// How long a gateway that is being replaced may take to release the directory.
const LOCK_MAX: Duration = Duration::from_secs(3);
/// How often the lock is tried in that time.
const LOCK_EVERY: Duration = Duration::from_millis(20);
/// Files that are named in the note about unusable records.
const NAMED_MAX: usize = 3;

/// The storage for records, as the state machine of the front needs it. Writes and removals of one key keep their
/// order.
pub trait SessionStore {
    /// Answered by [`StoreEvent::Written`], unless the store breaks.
    fn put(&mut self, client: u64, key: RecordKey, write: u32, record: &Record);
    fn remove(&mut self, key: RecordKey);
    /// The first event is [`StoreEvent::Loaded`].
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<StoreEvent>;
    /// Something is not written or removed yet.
    fn is_busy(&self) -> bool;
    /// Writes what is pending and releases the store for the next gateway.
    fn close(&mut self);
}

#[derive(Debug)]
pub enum StoreEvent {
    /// All usable records.
    Loaded(Vec<Loaded>),
    Written {
        client: u64,
        write: u32,
        is_ok: bool,
    },
    /// One sentence for people, with its cause and a hint.
    Note(String),
}

/// The key of a session's record: a hash, because the session id is a secret and is not stored.
pub(crate) fn record_key(id: SessionId) -> RecordKey {
    let hash = Sha256::digest(id.to_be_bytes());
    RecordKey(hash.iter().take(16).fold(0, |key, byte| key << 8 | u128::from(*byte)))
}

/// The directory for the records of one gateway, which is identified by its configuration files, its name and its
/// address.
pub(super) fn directory(state: &Path, identity: &str, address: &str) -> PathBuf {
    let mut hash = Sha256::new();
    for part in [identity, address] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    let name: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    state.join("gateway-sessions").join(name)
}

/// Records as files of a directory that only one process uses at a time.
pub(super) struct SessionDirectory {
    dir: PathBuf,
    state: State,
    waiting: VecDeque<Op>,
    running: Option<Task<Vec<Done>>>,
    /// Runs batches one at a time, also when the last batch is started before another has ended.
    turn: Arc<Mutex<()>>,
    /// The size of each record, and of all.
    sizes: FxHashMap<RecordKey, usize>,
    bytes: usize,
    events: VecDeque<StoreEvent>,
    /// A failure is reported once, until a write succeeds.
    has_complained: bool,
}

enum State {
    Opening(Task<io::Result<Opened>>),
    Open(os::FileLock),
    /// There is no directory, or another gateway uses it.
    Unusable,
    Closed,
}

struct Opened {
    lock: Option<os::FileLock>,
    records: Vec<(Loaded, usize)>,
    notes: Vec<String>,
}

enum Op {
    Put { client: u64, key: RecordKey, write: u32, text: Vec<u8> },
    Remove { key: RecordKey },
}

struct Done {
    client: u64,
    write: u32,
    error: Option<io::Error>,
}

impl SessionDirectory {
    /// Starts to read the directory.
    pub(super) fn open(dir: PathBuf) -> SessionDirectory {
        let opening = offload({
            let dir = dir.clone();
            move || open(&dir)
        });
        SessionDirectory {
            dir,
            state: State::Opening(opening),
            waiting: VecDeque::new(),
            running: None,
            turn: Arc::default(),
            sizes: FxHashMap::default(),
            bytes: 0,
            events: VecDeque::new(),
            has_complained: false,
        }
    }

    fn opened(&mut self, opened: io::Result<Opened>) {
        let (records, lock) = match opened {
            Ok(Opened { lock, records, notes }) => {
                self.events.extend(notes.into_iter().map(StoreEvent::Note));
                if lock.is_none() {
                    self.complain(&format!(
                        "another gateway uses {}; give this one a --name, a directory or an address of its own",
                        self.dir.display()
                    ));
                }
                (records, lock)
            }
            Err(error) => {
                self.complain_of(&error);
                (Vec::new(), None)
            }
        };
        for (loaded, bytes) in &records {
            self.sizes.insert(loaded.key, *bytes);
            self.bytes += bytes;
        }
        self.events.push_back(StoreEvent::Loaded(records.into_iter().map(|(loaded, _)| loaded).collect()));
        self.state = lock.map_or(State::Unusable, State::Open);
        if !matches!(self.state, State::Open(_)) {
            for op in std::mem::take(&mut self.waiting) {
                self.refuse(&op);
            }
        }
    }

    fn refuse(&mut self, op: &Op) {
        if let Op::Put { client, write, .. } = op {
            self.events.push_back(StoreEvent::Written { client: *client, write: *write, is_ok: false });
        }
    }

    fn complain(&mut self, why: &str) {
        if !std::mem::replace(&mut self.has_complained, true) {
            let note = format!("sessions do not survive a restart of the gateway: {why}");
            self.events.push_back(StoreEvent::Note(note));
        }
    }

    fn complain_of(&mut self, error: &io::Error) {
        let hint = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                "make room there"
            }
            _ => "make it a directory that only this user can write to",
        };
        let why = format!("{}: {}; {hint}", self.dir.display(), os::cause::plain(&error.to_string()));
        self.complain(&why);
    }

    fn begin(&mut self) {
        if self.running.is_none() && !self.waiting.is_empty() && matches!(self.state, State::Open(_)) {
            let batch: Vec<Op> = self.waiting.drain(..self.waiting.len().min(BATCH_MAX)).collect();
            let (dir, turn) = (self.dir.clone(), self.turn.clone());
            self.running = Some(offload(move || carry_out(&dir, &turn, batch)));
        }
    }

    fn forget(&mut self, key: RecordKey) {
        self.bytes -= self.sizes.remove(&key).unwrap_or(0);
    }
}

impl SessionStore for SessionDirectory {
    fn put(&mut self, client: u64, key: RecordKey, write: u32, record: &Record) {
        let refused = StoreEvent::Written { client, write, is_ok: false };
        if matches!(self.state, State::Unusable | State::Closed) {
            return self.events.push_back(refused);
        }
        let text = match record.encode(key) {
            Ok(text) => text,
            Err(why) => {
                self.complain(&format!("a record cannot be written: {why}; its client has sent too much to keep"));
                return self.events.push_back(refused);
            }
        };
        // A record that is not replaced stays on the disk, and counts.
        let before = self.sizes.get(&key).copied().unwrap_or(0);
        if self.bytes - before + text.len() > BYTES_MAX {
            self.complain(&format!("all records together would be larger than {} MiB; end sessions", BYTES_MAX >> 20));
            return self.events.push_back(refused);
        }
        self.bytes = self.bytes - before + text.len();
        self.sizes.insert(key, text.len());
        self.waiting.push_back(Op::Put { client, key, write, text });
        self.begin();
    }

    fn remove(&mut self, key: RecordKey) {
        self.forget(key);
        if !matches!(self.state, State::Unusable | State::Closed) {
            self.waiting.push_back(Op::Remove { key });
            self.begin();
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<StoreEvent> {
        if let State::Opening(opening) = &mut self.state
            && let Poll::Ready(opened) = Pin::new(opening).poll(cx)
        {
            self.opened(opened.unwrap_or_else(Err));
        }
        loop {
            if let Some(event) = self.events.pop_front() {
                return Poll::Ready(event);
            }
            self.begin();
            let Some(running) = &mut self.running else { return Poll::Pending };
            let Poll::Ready(done) = Pin::new(running).poll(cx) else { return Poll::Pending };
            self.running = None;
            let done = done.unwrap_or_else(|error| {
                self.complain_of(&error);
                Vec::new()
            });
            for Done { client, write, error } in done {
                match &error {
                    Some(error) => self.complain_of(error),
                    None => self.has_complained = false,
                }
                self.events.push_back(StoreEvent::Written { client, write, is_ok: error.is_none() });
            }
        }
    }

    fn is_busy(&self) -> bool {
        !self.waiting.is_empty() || self.running.is_some() || !self.events.is_empty()
    }

    fn close(&mut self) {
        let State::Open(lock) = std::mem::replace(&mut self.state, State::Closed) else { return };
        let (dir, turn, waiting) = (self.dir.clone(), self.turn.clone(), std::mem::take(&mut self.waiting));
        // The program waits for these threads before it exits.
        drop(offload(move || {
            carry_out(&dir, &turn, waiting.into());
            drop(lock);
        }));
    }
}

fn path_of(dir: &Path, key: RecordKey) -> PathBuf {
    dir.join(format!("{key}.json"))
}

fn carry_out(dir: &Path, turn: &Mutex<()>, ops: Vec<Op>) -> Vec<Done> {
    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    let mut done = Vec::new();
    for op in ops {
        match op {
            Op::Put { client, key, write, text } => {
                let error = write_record(dir, key, &text).err();
                done.push(Done { client, write, error });
            }
            // A missing file was never written.
            Op::Remove { key } => drop(fs::remove_file(path_of(dir, key))),
        }
    }
    done
}

/// Writes a draft and renames it, so that a gateway that is killed leaves the old record or the new one.
fn write_record(dir: &Path, key: RecordKey, text: &[u8]) -> io::Result<()> {
    let draft = dir.join(format!("{key}.new"));
    let written = os::open_own(OpenOptions::new().write(true).create(true).truncate(true), &draft)
        .and_then(|mut file| file.write_all(text))
        .and_then(|()| fs::rename(&draft, path_of(dir, key)));
    if written.is_err() {
        let _ = fs::remove_file(&draft);
    }
    written
}

fn open(dir: &Path) -> io::Result<Opened> {
    home::make_private(dir)?;
    os::close_own_dir(dir)?;
    let Some(lock) = lock(&dir.join("lock"))? else {
        return Ok(Opened { lock: None, records: Vec::new(), notes: Vec::new() });
    };
    let now = SystemTime::now();
    let (mut records, mut bad, mut notes) = (Vec::new(), Vec::new(), Vec::new());
    let mut is_clock_back = false;
    for entry in fs::read_dir(dir)?.take(FILES_MAX) {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let Some((digits, ending)) = name.split_once('.').filter(|(digits, _)| digits.len() == 32) else { continue };
        let Ok(key) = u128::from_str_radix(digits, 16) else { continue };
        if ending == "new" {
            // The draft of a gateway that was killed while it wrote.
            let _ = fs::remove_file(&path);
            continue;
        }
        if ending != "json" {
            continue;
        }
        match read_record(&path, RecordKey(key)) {
            Ok((record, written, bytes)) => {
                let age = now.duration_since(written).unwrap_or_else(|_| {
                    is_clock_back = true;
                    Duration::ZERO
                });
                records.push((Loaded { key: RecordKey(key), record, age }, bytes));
            }
            Err(why) => bad.push((path, why)),
        }
    }
    if is_clock_back {
        notes.push(
            "session records have a time in the future: the clock was set back; the sessions are kept, and expire as if they \
             were used now"
                .to_owned(),
        );
    }
    notes.extend(note_bad(&bad));
    Ok(Opened { lock: Some(lock), records, notes })
}

enum Unusable {
    Bad(BadRecord),
    Os(io::Error),
}

impl std::fmt::Display for Unusable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Unusable::Bad(why) => why.fmt(f),
            Unusable::Os(error) => f.write_str(&os::cause::plain(&error.to_string())),
        }
    }
}

fn read_record(path: &Path, key: RecordKey) -> Result<(Record, SystemTime, usize), Unusable> {
    let text = os::read_own(path, RECORD_BYTES_MAX as u64).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => Unusable::Bad(BadRecord::TooLong),
        _ => Unusable::Os(error),
    })?;
    let written = fs::symlink_metadata(path).and_then(|about| about.modified()).map_err(Unusable::Os)?;
    let record = Record::decode(key, &text).map_err(Unusable::Bad)?;
    Ok((record, written, text.len()))
}

/// Removes records that are damaged. Those of another version are kept for the outlast that can read them.
fn note_bad(bad: &[(PathBuf, Unusable)]) -> Option<String> {
    if bad.is_empty() {
        return None;
    }
    for (path, why) in bad {
        if matches!(why, Unusable::Bad(BadRecord::Damaged | BadRecord::Foreign | BadRecord::TooLong)) {
            let _ = fs::remove_file(path);
        }
    }
    let named: Vec<String> =
        bad.iter().take(NAMED_MAX).map(|(path, why)| format!("{}: {why}", path.display())).collect();
    let more = match bad.len() - named.len() {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    let count = outlast_core::count::count(bad.len(), "session record", "session records");
    let named = named.join("; ");
    Some(format!(
        "warning: {count} cannot be used ({named}{more}); the clients of these sessions must initialize again"
    ))
}

/// `None` if another process holds the lock. A gateway that is stopping releases it soon.
fn lock(path: &Path) -> io::Result<Option<os::FileLock>> {
    let until = Instant::now() + LOCK_MAX;
    loop {
        match os::lock_own(path)? {
            Some(lock) => return Ok(Some(lock)),
            None if until <= Instant::now() => return Ok(None),
            // The system reports a released lock only to a caller that waits without a limit.
            None => thread::sleep(LOCK_EVERY),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, future::poll_fn};

    use outlast_core::{front::record::SessionState, gateway::Who};

    use super::*;

    fn record(watches: usize) -> Record {
        let who = Who { name: "anna".into(), role: None, profile: None };
        let watches: BTreeSet<Box<str>> = [format!("file:///{}", "x".repeat(watches)).into()].into();
        Record { who, state: SessionState { watches, ..SessionState::default() } }
    }

    fn on_disk(dir: &Path) -> u64 {
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
    }

    async fn written(store: &mut SessionDirectory) -> bool {
        loop {
            match poll_fn(|cx| store.poll(cx)).await {
                StoreEvent::Written { is_ok, .. } => return is_ok,
                StoreEvent::Loaded(_) | StoreEvent::Note(_) => {}
            }
        }
    }

    /// A record that cannot be replaced stays, so its bytes still count: records that do not fit make no room for others.
    #[test]
    fn all_records_together_stay_within_their_limit() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut store = SessionDirectory::open(dir.path().join("records"));
            let size = 60 << 10;
            let fitting = BYTES_MAX / (size + 200);
            for key in 0..fitting {
                store.put(1, RecordKey(key as u128), 1, &record(size));
                assert!(written(&mut store).await, "{key} of {fitting}");
            }
            // Each of these would be larger than the record that it replaces.
            for key in 0..fitting {
                store.put(1, RecordKey(key as u128), 2, &record(size + (2 << 10)));
                written(&mut store).await;
            }
            for key in fitting..2 * fitting {
                store.put(1, RecordKey(key as u128), 1, &record(size));
                written(&mut store).await;
            }
            let found = on_disk(&dir.path().join("records"));
            assert!(found <= BYTES_MAX as u64, "{found} bytes");
            assert_eq!(store.bytes as u64, found, "they are counted as they are");
        });
    }
}
