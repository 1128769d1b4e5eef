//! The registry: one file for each running instance of this user, in every project. It does not connect to instances.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Write},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use outlast_os as os;
use serde_json::{Value, json};

/// The version of the files that are written.
const VERSION: u64 = 1;
/// A longer file is not an entry.
const ENTRY_MAX: u64 = 256 << 10;
/// Entries that are read at once, and their size together. Those beyond are not listed.
pub const ENTRIES_MAX: usize = 4096;
pub const ENTRIES_BYTES_MAX: usize = 16 << 20;
/// Files of the directory that are examined.
const FILES_MAX: usize = 100_000;
/// Unusable files that are reported at once.
const UNUSABLE_MAX: usize = 10;
/// A draft file of this age was left by a process that was killed while it wrote.
const UNFINISHED_MAX: Duration = Duration::from_secs(60);
/// How often an entry is written if its draft is removed by another process each time.
const REGISTER_MAX: usize = 5;

/// One instance, as it is registered.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub id: String,
    /// `mcp`, `gateway` or `session`.
    pub kind: String,
    /// The name for people; several instances may share it.
    pub name: String,
    /// Outlast's own process.
    pub pid: u32,
    /// Start time of that process: tells it from a later one with the same process id.
    pub born: String,
    /// Seconds since 1970.
    pub started: f64,
    pub cwd: PathBuf,
    pub socket: PathBuf,
    pub command: String,
    pub log: Option<PathBuf>,
    pub audit: Option<PathBuf>,
    pub program: Option<Program>,
}

/// The file that an instance runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    pub path: PathBuf,
    /// As in its `--version`.
    pub version: String,
    /// When the file was last modified as the instance started to run it, in seconds since 1970.
    pub modified: f64,
}

impl Program {
    /// The program at this path, as it is on disk now.
    pub fn of(path: PathBuf, version: &str) -> Option<Program> {
        let modified = modified(&path)?;
        Some(Program { path, version: version.to_owned(), modified })
    }

    /// A newer file is at its path by now.
    pub fn is_outdated(&self) -> bool {
        modified(&self.path).is_some_and(|modified| modified > self.modified)
    }

    fn from_json(value: &Value) -> Option<Program> {
        Some(Program {
            path: value["path"].as_str()?.into(),
            version: value["version"].as_str()?.to_owned(),
            modified: value["modified"].as_f64()?,
        })
    }
}

fn modified(path: &Path) -> Option<f64> {
    let modified = fs::metadata(path).and_then(|found| found.modified()).ok()?;
    Some(modified.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs_f64())
}

impl Entry {
    /// True if the registered process is gone.
    pub fn is_stale(&self) -> bool {
        os::start_stamp(self.pid).is_none_or(|born| born != self.born)
    }

    /// The members that every answer about an instance has.
    pub fn to_json(&self) -> Value {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        json!({
            "id": self.id,
            "kind": self.kind,
            "name": self.name,
            "pid": self.pid,
            "born": self.born,
            "started": self.started,
            "cwd": text(&self.cwd),
            "socket": text(&self.socket),
            "command": self.command,
            "log": self.log.as_deref().map(text),
            "audit": self.audit.as_deref().map(text),
            "program": self.program.as_ref().map(|program| {
                json!({"path": text(&program.path), "version": program.version, "modified": program.modified})
            }),
        })
    }

    fn from_json(value: &Value) -> Option<Entry> {
        let text = |member: &str| value[member].as_str().map(str::to_owned);
        Some(Entry {
            id: text("id")?,
            kind: text("kind")?,
            name: text("name").unwrap_or_default(),
            pid: u32::try_from(value["pid"].as_u64()?).ok()?,
            born: text("born").unwrap_or_default(),
            started: value["started"].as_f64().unwrap_or_default(),
            cwd: text("cwd")?.into(),
            socket: text("socket")?.into(),
            command: text("command").unwrap_or_default(),
            log: text("log").map(PathBuf::from),
            audit: text("audit").map(PathBuf::from),
            program: Program::from_json(&value["program"]),
        })
    }
}

/// The directory for files of the user that belong to no project: the registry, and the state of projects that cannot
/// hold their own. It does not depend on XDG variables, because a client and a shell may set them differently.
pub fn state_dir(home: &Path) -> PathBuf {
    home.join(".local").join("state").join("outlast")
}

/// The directory of entries, and by default of sockets. It depends only on the home directory, because clients start
/// servers with a nearly empty environment.
#[derive(Debug, Clone)]
pub struct Registry(PathBuf);

impl Registry {
    pub fn of(home: &Path) -> Registry {
        Registry(state_dir(home).join("run"))
    }

    pub fn dir(&self) -> &Path {
        &self.0
    }

    /// Writes the entry atomically. Dropping the returned value removes it.
    pub fn register(&self, entry: &Entry) -> io::Result<Registration> {
        self.register_by(entry, |draft, path| fs::rename(draft, path))
    }

    /// A process whose clock is ahead takes a new draft for one that was left behind, and removes it. Then the entry is
    /// written again.
    fn register_by(
        &self,
        entry: &Entry,
        mut rename: impl FnMut(&Path, &Path) -> io::Result<()>,
    ) -> io::Result<Registration> {
        let path = self.0.join(format!("{}.json", entry.id));
        let unfinished = self.0.join(format!(".{}.tmp", entry.id));
        let mut value = entry.to_json();
        value["v"] = json!(VERSION);
        let mut attempts = 0..REGISTER_MAX;
        loop {
            attempts.next();
            os::claim_dir(&self.0)?;
            let written = create_private(&unfinished)
                .and_then(|mut file| file.write_all(format!("{value}\n").as_bytes()))
                .and_then(|()| rename(&unfinished, &path));
            match written {
                Ok(()) => return Ok(Registration(path)),
                Err(error) if error.kind() == ErrorKind::NotFound && !attempts.is_empty() => {}
                Err(error) => {
                    let _ = fs::remove_file(&unfinished);
                    return Err(error);
                }
            }
        }
    }

    /// All entries, including those of killed instances. Files that are no entries are skipped.
    pub fn read(&self) -> Vec<Entry> {
        if os::check_own_dir(&self.0).is_err() {
            return Vec::new();
        }
        let Ok(files) = fs::read_dir(&self.0) else { return Vec::new() };
        let (mut entries, mut bytes) = (Vec::new(), 0);
        for file in files.flatten().take(FILES_MAX) {
            let path = file.path();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("json") if entries.len() < ENTRIES_MAX && bytes < ENTRIES_BYTES_MAX => {
                    let Ok((entry, length)) = read_entry(&path) else { continue };
                    bytes += length;
                    entries.push(entry);
                }
                Some("tmp") => forget_unfinished(&path),
                _ => {}
            }
        }
        entries.sort_by(|one, other| one.started.total_cmp(&other.started).then_with(|| one.id.cmp(&other.id)));
        entries
    }

    /// Files among the entries that are skipped, each with the reason.
    pub fn unusable(&self) -> Vec<(PathBuf, String)> {
        if os::check_own_dir(&self.0).is_err() {
            return Vec::new();
        }
        let files = fs::read_dir(&self.0).into_iter().flatten().flatten().take(FILES_MAX).map(|file| file.path());
        let entries = files.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
        let mut found: Vec<_> = entries
            .take(ENTRIES_MAX)
            .filter_map(|path| match read_entry(&path) {
                // An instance that exits removes its entry.
                Err(error) if error.kind() != ErrorKind::NotFound => Some((path, error.to_string())),
                _ => None,
            })
            .take(UNUSABLE_MAX)
            .collect();
        found.sort();
        found
    }

    pub fn has(&self, id: &str) -> bool {
        self.0.join(format!("{id}.json")).exists()
    }

    /// The file by which a session claims its name, from before it has a socket and an entry until it has exited.
    pub fn claim_path(&self, id: &str) -> PathBuf {
        self.0.join(format!("{id}.lock"))
    }

    /// Removes the entry and the socket of an instance that was killed. The next instance of the same name has the same
    /// files, so nothing is removed while it has the name.
    pub fn sweep(&self, entry: &Entry) {
        let Ok(Some(_claim)) = os::claim_name(&self.claim_path(&entry.id)) else { return };
        // Only its own file is read, so that sweeping many entries takes time in proportion to their number.
        let path = self.0.join(format!("{}.json", entry.id));
        if read_entry(&path).is_ok_and(|(found, _)| found != *entry) {
            return;
        }
        // Another process may have removed it already.
        let _ = fs::remove_file(path);
        os::remove_socket(&entry.socket);
    }
}

impl Registry {
    /// The entry that the last program of this process registered. It is written again; if that fails, it stays as it is.
    pub fn register_again(&self, entry: &Entry) -> Registration {
        self.register(entry).unwrap_or_else(|_| Registration(self.0.join(format!("{}.json", entry.id))))
    }
}

/// An entry that is removed when this is dropped.
#[derive(Debug)]
pub struct Registration(PathBuf);

impl Drop for Registration {
    fn drop(&mut self) {
        // Another process may have removed it already.
        let _ = fs::remove_file(&self.0);
    }
}

fn create_private(path: &Path) -> io::Result<File> {
    os::open_own(OpenOptions::new().write(true).create(true).truncate(true), path)
}

/// An entry, and the length of its file.
fn read_entry(path: &Path) -> io::Result<(Entry, usize)> {
    let wrong = |why: &str| io::Error::new(ErrorKind::InvalidData, why);
    let bytes = os::read_own(path, ENTRY_MAX)?;
    let value = serde_json::from_slice(&bytes).map_err(|_| wrong("it is not JSON"))?;
    let entry = Entry::from_json(&value).ok_or_else(|| wrong("it does not describe an instance"))?;
    // An entry in a file of another name could not be swept.
    match path.file_stem().is_some_and(|name| name == entry.id.as_str()) {
        true => Ok((entry, bytes.len())),
        false => Err(wrong("its name is not the id of its instance")),
    }
}

fn forget_unfinished(path: &Path) {
    let written = fs::metadata(path).and_then(|found| found.modified());
    let is_old = written.is_ok_and(|at| SystemTime::now().duration_since(at).is_ok_and(|age| age > UNFINISHED_MAX));
    if is_old {
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: &str, started: f64) -> Entry {
        Entry {
            id: id.into(),
            kind: "mcp".into(),
            name: "py".into(),
            pid: std::process::id(),
            born: os::start_stamp(std::process::id()).unwrap_or_default(),
            started,
            cwd: "/srv/project".into(),
            socket: "/srv/x.sock".into(),
            command: "python -m py".into(),
            log: Some("/srv/project/.outlast/logs/x.log".into()),
            audit: None,
            program: None,
        }
    }

    #[test]
    fn a_draft_that_another_process_removes_is_written_again() {
        let home = tempfile::tempdir().unwrap();
        let registry = Registry::of(home.path());
        let removed_times = |times: usize| {
            let mut attempts = 0;
            let registered = registry.register_by(&entry("a", 1.0), |draft, path| {
                attempts += 1;
                if attempts <= times {
                    fs::remove_file(draft).unwrap();
                }
                fs::rename(draft, path)
            });
            (registered.map(|_| registry.read().len()), attempts)
        };
        assert_eq!(removed_times(1).0.unwrap(), 1);
        let (refused, attempts) = removed_times(usize::MAX);
        assert_eq!((refused.unwrap_err().kind(), attempts), (ErrorKind::NotFound, REGISTER_MAX));
    }

    #[test]
    fn an_entry_exists_until_it_is_dropped() {
        let home = tempfile::tempdir().unwrap();
        let registry = Registry::of(home.path());
        assert_eq!(registry.read(), []);
        let later = registry.register(&entry("py-2", 2.0)).unwrap();
        let sooner = registry.register(&entry("py-1", 1.0)).unwrap();
        fs::write(registry.dir().join("py-3.json"), "{").unwrap();
        fs::write(registry.dir().join("py-4.json"), "[]").unwrap();
        fs::copy(registry.dir().join("py-2.json"), registry.dir().join("other.json")).unwrap();
        assert_eq!(registry.read(), [entry("py-1", 1.0), entry("py-2", 2.0)]);
        drop(sooner);
        assert_eq!(registry.read(), [entry("py-2", 2.0)]);
        assert!(registry.has("py-2") && !registry.has("py-1"));
        drop(later);
        assert_eq!(registry.read(), []);
    }

    /// `ps` finds the entry of a killed session, and a new session of the same name starts before `ps` removes it.
    #[cfg(unix)]
    #[test]
    fn the_files_of_a_new_session_with_the_name_of_a_killed_one_stay() {
        let home = tempfile::tempdir().unwrap();
        let registry = Registry::of(home.path());
        let socket = registry.dir().join("work.sock");
        let killed = Entry { born: "long ago".into(), socket: socket.clone(), ..entry("work", 1.0) };
        let _left = registry.register(&killed).unwrap();
        // The new session has claimed the name and made its socket, and is not registered yet.
        let claim = os::claim_name(&registry.claim_path("work")).unwrap().expect("the name is free");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        registry.sweep(&killed);
        assert!(socket.exists(), "the socket of the new session was removed");
        // It is registered.
        let running = registry.register(&Entry { socket: socket.clone(), ..entry("work", 2.0) }).unwrap();
        registry.sweep(&killed);
        assert!(socket.exists() && registry.has("work"));
        // It has been killed, too: the next look removes its files, but not one that saw only the first session.
        drop((claim, listener));
        registry.sweep(&killed);
        assert!(socket.exists() && registry.has("work"));
        registry.sweep(&Entry { socket: socket.clone(), ..entry("work", 2.0) });
        assert!(!socket.exists() && !registry.has("work"));
        drop(running);
    }

    #[test]
    fn a_reused_process_id_does_not_make_an_old_entry_valid() {
        assert!(!entry("py-1", 1.0).is_stale());
        assert!(Entry { born: "long ago".into(), ..entry("py-1", 1.0) }.is_stale());
        assert!(Entry { pid: u32::MAX, ..entry("py-1", 1.0) }.is_stale());
    }
}
