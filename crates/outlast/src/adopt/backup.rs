//! Backups of configurations, so that `unwrap` can restore them, and atomic replacement of files.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use outlast_os as os;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::state::home;

const VERSION: u64 = 1;
/// A longer record is not valid.
const RECORD_MAX: u64 = 64 << 10;

/// One directory for each wrapped file, below the user's state directory. A configuration may hold secrets, and a
/// file beside it in a project could be committed to a repository.
#[derive(Debug, Clone)]
pub(crate) struct Backups(PathBuf);

/// The original of a file. It is valid as long as the file is what `wrap` wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Backup {
    /// The content without outlast.
    pub original: Vec<u8>,
    /// A digest that shows whether the file was changed since.
    wrapped: String,
}

impl Backup {
    pub(crate) fn is_of(&self, now: &[u8]) -> bool {
        self.wrapped == digest(now)
    }
}

impl Backups {
    pub(crate) fn of(home: &Path) -> Backups {
        Backups(home::state_dir(home).join("wrapped"))
    }

    pub(crate) fn find(&self, file: &Path) -> Option<Backup> {
        let dir = self.dir_of(file);
        let record = read_record(&dir)?;
        let original = os::read_own(&dir.join("original"), super::FILE_MAX).ok()?;
        let text = |member: &str| record[member].as_str();
        // The record does not match the original, for example after a power cut between the two writes. It is
        // ignored.
        let is_whole = text("file") == file.to_str() && text("original_sha256") == Some(digest(&original).as_str());
        let wrapped = text("wrapped_sha256")?.to_owned();
        is_whole.then_some(Backup { original, wrapped })
    }

    /// The files that are wrapped.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let dirs = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let files = dirs.filter_map(|dir| Some(PathBuf::from(read_record(&dir.path())?["file"].as_str()?)));
        let mut files: Vec<PathBuf> = files.filter(|file| file.is_file()).collect();
        files.sort();
        files
    }

    /// The directories whose file no longer exists.
    pub(crate) fn without_a_file(&self) -> Vec<PathBuf> {
        let dirs = fs::read_dir(&self.0).into_iter().flatten().flatten().map(|dir| dir.path());
        let is_stale = |dir: &PathBuf| {
            read_record(dir).is_none_or(|record| record["file"].as_str().is_none_or(|file| !Path::new(file).is_file()))
        };
        dirs.filter(is_stale).collect()
    }

    /// To be called before the file itself is changed.
    pub(crate) fn keep(&self, file: &Path, original: &[u8], wrapped: &[u8]) -> io::Result<()> {
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

    /// Removes the backup of a file that is no longer wrapped.
    pub(crate) fn forget(&self, file: &Path) {
        // A backup that cannot be removed is recognised as old by its digest.
        let _ = fs::remove_dir_all(self.dir_of(file));
    }

    fn dir_of(&self, file: &Path) -> PathBuf {
        self.0.join(home::project_name(file))
    }
}

/// Replaces the content of a file atomically, if it is still the expected one. Its permissions are kept, and its
/// owner where the system allows it.
pub(crate) fn replace(file: &Path, expected: &[u8], bytes: &[u8]) -> io::Result<()> {
    let fresh = temporary_beside(file)?;
    let done = fill(&fresh, bytes).and_then(|()| take_after(&fresh, file)).and_then(|()| {
        if os::read_named(file, super::FILE_MAX)? != expected {
            return Err(io::Error::other("another program has changed it meanwhile"));
        }
        fs::rename(&fresh, file)
    });
    if done.is_err() {
        let _ = fs::remove_file(&fresh);
    }
    done
}

fn write_private(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let fresh = temporary_beside(&dir.join(name))?;
    let done = fill(&fresh, bytes).and_then(|()| fs::rename(&fresh, dir.join(name)));
    if done.is_err() {
        let _ = fs::remove_file(&fresh);
    }
    done
}

fn temporary_beside(file: &Path) -> io::Result<PathBuf> {
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
    fn a_backup_is_valid_only_for_its_own_file() {
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
        assert_eq!(error.to_string(), "another program has changed it meanwhile");
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "no litter");
    }
}
