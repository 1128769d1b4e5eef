//! Who runs: one file for each instance of this user, in every project.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use serde_json::{Value, json};

use crate::{home, os};

/// The version of the files we write.
const VERSION: u64 = 1;
/// A longer file is not one of ours.
const ENTRY_MAX: u64 = 256 << 10;
/// Entries that are read at once, and their size together. Those beyond are not listed.
pub const ENTRIES_MAX: usize = 4096;
pub const ENTRIES_BYTES_MAX: usize = 16 << 20;
/// Files of the directory that are looked at.
const FILES_MAX: usize = 100_000;
/// A file that was being written so long ago never will be whole.
const UNFINISHED_MAX: Duration = Duration::from_secs(60);

/// One instance, as others find it.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub id: String,
    /// `mcp`, `gateway` or `session`.
    pub kind: String,
    /// What people call it; several may share a name.
    pub name: String,
    /// Outlast's own process.
    pub pid: u32,
    /// Tells that process from a later one of the same number.
    pub born: String,
    /// Seconds since 1970.
    pub started: f64,
    pub cwd: PathBuf,
    pub socket: PathBuf,
    pub command: String,
    pub log: Option<PathBuf>,
    pub audit: Option<PathBuf>,
}

impl Entry {
    /// Nobody answers at its socket: is it that there is nobody?
    pub fn is_dead(&self) -> bool {
        os::born(self.pid).is_none_or(|born| born != self.born)
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
        })
    }
}

/// The directory of entries, and by default of sockets. It depends on nothing but the home directory: clients start
/// servers with hardly any environment.
#[derive(Debug, Clone)]
pub struct Registry(PathBuf);

impl Registry {
    pub fn of(home: &Path) -> Registry {
        Registry(home::state_dir(home).join("run"))
    }

    pub fn dir(&self) -> &Path {
        &self.0
    }

    /// Writes the entry whole or not at all. What is returned removes it again.
    pub fn register(&self, entry: &Entry) -> io::Result<Registration> {
        os::claim_dir(&self.0)?;
        let path = self.0.join(format!("{}.json", entry.id));
        let unfinished = self.0.join(format!(".{}.tmp", entry.id));
        let mut value = entry.to_json();
        value["v"] = json!(VERSION);
        let written = create_private(&unfinished)
            .and_then(|mut file| file.write_all(format!("{value}\n").as_bytes()))
            .and_then(|()| fs::rename(&unfinished, &path));
        if let Err(error) = written {
            let _ = fs::remove_file(&unfinished);
            return Err(error);
        }
        Ok(Registration(path))
    }

    /// All entries, those of the dead too. What is not one is passed over.
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
                    let Some((entry, length)) = read_entry(&path) else { continue };
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

    pub fn has(&self, id: &str) -> bool {
        self.0.join(format!("{id}.json")).exists()
    }

    /// Removes what is left of an instance that was killed.
    pub fn sweep(&self, entry: &Entry) {
        // Another reader may have been quicker.
        let _ = fs::remove_file(self.0.join(format!("{}.json", entry.id)));
        os::remove_socket(&entry.socket);
    }
}

/// An entry that is removed when this is dropped.
#[derive(Debug)]
pub struct Registration(PathBuf);

impl Drop for Registration {
    fn drop(&mut self) {
        // A reader may have swept it, or somebody emptied the directory.
        let _ = fs::remove_file(&self.0);
    }
}

fn create_private(path: &Path) -> io::Result<File> {
    os::open_own(OpenOptions::new().write(true).create(true).truncate(true), path)
}

/// An entry, and the length of its file.
fn read_entry(path: &Path) -> Option<(Entry, usize)> {
    let bytes = os::read_own(path, ENTRY_MAX).ok()?;
    let entry = Entry::from_json(&serde_json::from_slice(&bytes).ok()?)?;
    // A file under another name could not be swept.
    (path.file_stem()?.to_str()? == entry.id).then_some((entry, bytes.len()))
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
            born: os::born(std::process::id()).unwrap_or_default(),
            started,
            cwd: "/srv/project".into(),
            socket: "/srv/x.sock".into(),
            command: "python -m py".into(),
            log: Some("/srv/project/.outlast/logs/x.log".into()),
            audit: None,
        }
    }

    #[test]
    fn an_entry_is_there_until_it_is_dropped() {
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

    #[test]
    fn a_number_given_out_again_does_not_bring_the_dead_back() {
        assert!(!entry("py-1", 1.0).is_dead());
        assert!(Entry { born: "long ago".into(), ..entry("py-1", 1.0) }.is_dead());
        assert!(Entry { pid: u32::MAX, ..entry("py-1", 1.0) }.is_dead());
    }
}
