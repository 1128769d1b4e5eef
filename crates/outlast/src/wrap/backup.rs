//! What a configuration was before outlast came, so that it can be so again; and files that change whole or not at all.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{home, os};

const VERSION: u64 = 1;
/// A longer record is not one of ours.
const RECORD_MAX: u64 = 64 << 10;

/// One directory for each file that outlast is in, below the user's own: a configuration may hold secrets, and what lies
/// beside it in a project is soon in a repository.
#[derive(Debug, Clone)]
pub struct Backups(PathBuf);

/// A file as it was, for as long as it is what we made of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backup {
    /// Without outlast.
    pub original: Vec<u8>,
    /// Tells whether somebody has changed the file since.
    wrapped: String,
}

impl Backup {
    pub fn is_of(&self, now: &[u8]) -> bool {
        self.wrapped == digest(now)
    }
}

impl Backups {
    pub fn of(home: &Path) -> Backups {
        Backups(home::state_dir(home).join("wrapped"))
    }

    pub fn find(&self, file: &Path) -> Option<Backup> {
        let dir = self.dir_of(file);
        let record = read_record(&dir)?;
        let original = os::read_own(&dir.join("original"), super::FILE_MAX).ok()?;
        let text = |member: &str| record[member].as_str();
        // A record of something else, as after a power cut between the two, is none.
        let is_whole = text("file") == file.to_str() && text("original_sha256") == Some(digest(&original).as_str());
        let wrapped = text("wrapped_sha256")?.to_owned();
        is_whole.then_some(Backup { original, wrapped })
    }

    /// The files that outlast was put into.
    pub fn files(&self) -> Vec<PathBuf> {
        let dirs = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let files = dirs.filter_map(|dir| Some(PathBuf::from(read_record(&dir.path())?["file"].as_str()?)));
        let mut files: Vec<PathBuf> = files.filter(|file| file.is_file()).collect();
        files.sort();
        files
    }

    /// The directories whose file is gone.
    pub fn without_a_file(&self) -> Vec<PathBuf> {
        let dirs = fs::read_dir(&self.0).into_iter().flatten().flatten().map(|dir| dir.path());
        let is_stale = |dir: &PathBuf| {
            read_record(dir).is_none_or(|record| record["file"].as_str().is_none_or(|file| !Path::new(file).is_file()))
        };
        dirs.filter(is_stale).collect()
    }

    /// Before the file itself is changed.
    pub fn keep(&self, file: &Path, original: &[u8], wrapped: &[u8]) -> io::Result<()> {
        let dir = self.dir_of(file);
        home::make_private(&self.0)?;
        home::make_private(&dir)?;
        os::close_own_dir(&self.0)?;
        os::close_own_dir(&dir)?;
        let record = json!({
            "v": VERSION,
            "file": file.to_str(),
            "original_sha256": digest(original),
            "wrapped_sha256": digest(wrapped),
        });
        write_private(&dir, "original", original)?;
        write_private(&dir, "record.json", format!("{record}\n").as_bytes())
    }

    /// The file is without outlast again, and nobody needs a copy of it any more.
    pub fn forget(&self, file: &Path) {
        // What cannot be removed is known by its digest to be old.
        let _ = fs::remove_dir_all(self.dir_of(file));
    }

    fn dir_of(&self, file: &Path) -> PathBuf {
        self.0.join(home::project_name(file))
    }
}

/// Replaces what a file holds, whole or not at all, if it still holds what it was read to hold. Its permissions, and its
/// owner where we may, stay.
pub fn replace(file: &Path, expected: &[u8], bytes: &[u8]) -> io::Result<()> {
    let fresh = neighbour(file)?;
    let done = fill(&fresh, bytes).and_then(|()| take_after(&fresh, file)).and_then(|()| {
        if fs::read(file)? != expected {
            return Err(io::Error::other("somebody else has changed it meanwhile"));
        }
        fs::rename(&fresh, file)
    });
    if done.is_err() {
        let _ = fs::remove_file(&fresh);
    }
    done
}

fn write_private(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let fresh = neighbour(&dir.join(name))?;
    let done = fill(&fresh, bytes).and_then(|()| fs::rename(&fresh, dir.join(name)));
    if done.is_err() {
        let _ = fs::remove_file(&fresh);
    }
    done
}

fn neighbour(file: &Path) -> io::Result<PathBuf> {
    let name = file.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    Ok(file.with_file_name(home::new_id(&format!("{name}-outlast")) + ".tmp"))
}

fn fill(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = os::open_own(OpenOptions::new().write(true).create_new(true), path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(unix)]
fn take_after(fresh: &Path, file: &Path) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, chown};
    let (old, new) = (fs::metadata(file)?, fs::metadata(fresh)?);
    if (old.uid(), old.gid()) != (new.uid(), new.gid()) {
        chown(fresh, Some(old.uid()), Some(old.gid()))?;
    }
    fs::set_permissions(fresh, old.permissions())
}

#[cfg(not(unix))]
fn take_after(fresh: &Path, file: &Path) -> io::Result<()> {
    fs::set_permissions(fresh, fs::metadata(file)?.permissions())
}

fn read_record(dir: &Path) -> Option<Value> {
    serde_json::from_slice(&os::read_own(&dir.join("record.json"), RECORD_MAX).ok()?).ok()
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_backup_is_good_for_what_it_was_made_of() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("a.json");
        fs::write(&file, "wrapped").unwrap();
        let backups = Backups::of(home.path());
        assert_eq!(backups.find(&file), None);
        backups.keep(&file, b"original", b"wrapped").unwrap();
        let backup = backups.find(&file).unwrap();
        assert_eq!(backup.original, b"original");
        assert!(backup.is_of(b"wrapped") && !backup.is_of(b"changed"));
        assert_eq!(backups.files(), std::slice::from_ref(&file));
        assert_eq!(backups.find(&home.path().join("b.json")), None);

        let original = backups.dir_of(&file).join("original");
        assert_eq!(fs::metadata(&original).unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(&original, "half").unwrap();
        assert_eq!(backups.find(&file), None, "torn");
        backups.forget(&file);
        assert!(backups.files().is_empty() && !original.exists());
    }

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.json");
        fs::write(&file, "old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        let link = dir.path().join("link.json");
        symlink(&file, &link).unwrap();

        replace(&fs::canonicalize(&link).unwrap(), b"old", b"new").unwrap();
        assert_eq!(fs::read(&link).unwrap(), b"new");
        assert!(link.is_symlink());
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);

        let error = replace(&file, b"old", b"newer").unwrap_err();
        assert_eq!(error.to_string(), "somebody else has changed it meanwhile");
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "no litter");
    }
}
