//! The cache of the answers of a command's last run (SPEC H2), one file for each command, arguments, directory and
//! protocol revision, in the user's state directory. It does not interpret the text, which belongs to the relay.

use std::{
    ffi::OsStr,
    fs::{self, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    time::SystemTime,
};

use outlast_os as os;
use sha2::{Digest, Sha256};

use crate::state::home;

/// How many files are kept; the oldest are removed.
const FILES_MAX: usize = 64;
/// The largest file that is read. The relay writes none of this size.
const FILE_BYTES_MAX: u64 = 2 << 20;
/// A prefix of everything that is hashed, so that another layout of the key gives other names.
const KEY_LAYOUT: &str = "outlast mcp start cache 1";

/// The files of one command.
#[derive(Debug, Clone)]
pub(crate) struct StartCache {
    dir: PathBuf,
    /// Command, arguments and directory.
    command: Sha256,
}

impl StartCache {
    pub(crate) fn of<'a>(home: &Path, words: impl IntoIterator<Item = &'a OsStr>, cwd: &Path) -> StartCache {
        let mut command = Sha256::new();
        update(&mut command, KEY_LAYOUT.as_bytes());
        update(&mut command, cwd.as_os_str().as_encoded_bytes());
        words.into_iter().for_each(|word| update(&mut command, word.as_encoded_bytes()));
        StartCache { dir: home::state_dir(home).join("starts"), command }
    }

    /// The text that was saved. The error is that a file or directory is not as outlast creates it.
    pub(crate) fn read(&self, revision: &str) -> Result<Option<String>, String> {
        let key = self.key(revision);
        let path = self.dir.join(&key);
        let unfit = |why: &str| Err(format!("{}: {why}", path.display()));
        match is_private(&fs::symlink_metadata(&self.dir), true) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(why) => return Err(format!("{}: {why}", self.dir.display())),
        }
        let file = match os::open_regular(OpenOptions::new().read(true), &path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return unfit(&error.to_string()),
        };
        if let Err(why) = is_private(&file.metadata(), false) {
            return unfit(why);
        }
        let mut text = String::new();
        match file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text) {
            Ok(_) if text.len() as u64 > FILE_BYTES_MAX => return unfit("it is too large"),
            Ok(_) => {}
            Err(error) => return unfit(&error.to_string()),
        }
        match text.split_once('\n') {
            Some((of, entry)) if of == key => Ok(Some(entry.to_owned())),
            _ => unfit("it belongs to another command"),
        }
    }

    /// Replaces what was saved as a whole, or removes it.
    pub(crate) fn save(&self, revision: &str, entry: Option<&str>) -> io::Result<()> {
        let key = self.key(revision);
        let path = self.dir.join(&key);
        let Some(entry) = entry else {
            return match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            };
        };
        home::make_private(&self.dir)?;
        is_private(&fs::symlink_metadata(&self.dir), true).map_err(io::Error::other)?;
        let draft = self.dir.join(format!("{key}.{}", home::new_id("draft")));
        let written = os::open_own(OpenOptions::new().write(true).create_new(true), &draft)
            .and_then(|mut file| file.write_all(format!("{key}\n{entry}").as_bytes()))
            .and_then(|()| fs::rename(&draft, &path));
        if written.is_err() {
            let _ = fs::remove_file(&draft);
        }
        self.prune();
        written
    }

    fn key(&self, revision: &str) -> String {
        let mut key = self.command.clone();
        update(&mut key, revision.as_bytes());
        key.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Removes the oldest files above the limit. Temporary files of killed instances count too.
    fn prune(&self) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        let mut files: Vec<(SystemTime, PathBuf)> = entries
            .flatten()
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect();
        files.sort();
        for (_, path) in files.iter().take(files.len().saturating_sub(FILES_MAX)) {
            let _ = fs::remove_file(path);
        }
    }
}

/// Each part with its length, so that two lists of words never have the same hash.
fn update(hash: &mut Sha256, part: &[u8]) {
    hash.update((part.len() as u64).to_le_bytes());
    hash.update(part);
}

/// Whether it exists; an error if it is not a regular file or directory that only this user can write and read.
fn is_private(found: &io::Result<fs::Metadata>, directory: bool) -> Result<bool, &'static str> {
    let found = match found {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(_) => return Err("it cannot be read"),
    };
    if directory != found.is_dir() || directory == found.is_file() {
        return Err(if directory { "it is not a directory" } else { "it is not a regular file" });
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        if found.uid() != nix::unistd::geteuid().as_raw() {
            return Err("it belongs to another user");
        }
        if found.mode() & 0o077 != 0 {
            return Err("other users can access it");
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(home: &Path, words: &[&str], cwd: &str) -> StartCache {
        StartCache::of(home, words.iter().map(OsStr::new), Path::new(cwd))
    }

    #[test]
    fn an_entry_is_read_by_the_same_command_only() {
        let home = tempfile::tempdir().unwrap();
        let own = cache(home.path(), &["npx", "server", "--key=secret"], "/p");
        assert_eq!(own.read("2025-06-18"), Ok(None));
        own.save("2025-06-18", Some("{}")).unwrap();
        own.save("2025-06-18", Some(r#"{"a":1}"#)).unwrap();
        assert_eq!(own.read("2025-06-18"), Ok(Some(r#"{"a":1}"#.into())));
        let others = [
            (own.clone(), "2025-11-25"),
            (cache(home.path(), &["npx", "server", "--key=other"], "/p"), "2025-06-18"),
            (cache(home.path(), &["npx", "server--key=secret"], "/p"), "2025-06-18"),
            (cache(home.path(), &["npx", "server", "--key=secret"], "/q"), "2025-06-18"),
        ];
        for (other, revision) in others {
            assert_eq!(other.read(revision), Ok(None));
        }
        let files: Vec<_> = fs::read_dir(&own.dir).unwrap().flatten().collect();
        assert_eq!(files.len(), 1, "no draft is left");
        let text = fs::read_to_string(files[0].path()).unwrap();
        assert!(!text.contains("secret"), "arguments are not written down: {text}");
        own.save("2025-06-18", None).unwrap();
        own.save("2025-06-18", None).unwrap();
        assert_eq!(own.read("2025-06-18"), Ok(None));
    }

    #[test]
    fn the_number_of_files_is_bounded() {
        let home = tempfile::tempdir().unwrap();
        for n in 0..FILES_MAX + 5 {
            cache(home.path(), &["server", &n.to_string()], "/p").save("2025-06-18", Some("{}")).unwrap();
        }
        let last = cache(home.path(), &["server", &(FILES_MAX + 4).to_string()], "/p");
        assert_eq!(fs::read_dir(&last.dir).unwrap().count(), FILES_MAX);
        assert_eq!(last.read("2025-06-18"), Ok(Some("{}".into())), "the newest is kept");
    }

    #[cfg(unix)]
    #[test]
    fn links_and_damaged_or_public_files_are_refused() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let home = tempfile::tempdir().unwrap();
        let own = cache(home.path(), &["server"], "/p");
        own.save("r", Some("{}")).unwrap();
        let path = own.dir.join(own.key("r"));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&own.dir), mode(&path)), (0o700, 0o600));

        let good = fs::read_to_string(&path).unwrap();
        let elsewhere = home.path().join("planted");
        fs::write(&elsewhere, &good).unwrap();
        fs::set_permissions(&elsewhere, fs::Permissions::from_mode(0o600)).unwrap();
        fs::remove_file(&path).unwrap();
        symlink(&elsewhere, &path).unwrap();
        assert!(own.read("r").is_err(), "a link");
        own.save("r", Some("{}")).unwrap();
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), good, "the link is replaced, not followed");
        assert_eq!(own.read("r"), Ok(Some("{}".into())));

        let table: [(&str, &dyn Fn()); 4] = [
            ("belongs to another command", &|| fs::write(&path, "key\n{}").unwrap()),
            ("too large", &|| fs::write(&path, "x".repeat(FILE_BYTES_MAX as usize + 1)).unwrap()),
            ("UTF-8", &|| fs::write(&path, [0xff, 0xfe]).unwrap()),
            ("other users", &|| fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap()),
        ];
        for (words, spoil) in table {
            own.save("r", Some("{}")).unwrap();
            spoil();
            let why = own.read("r").unwrap_err();
            assert!(why.contains(words), "{words}: {why}");
        }
        fs::set_permissions(&own.dir, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(own.read("r").is_err() && own.save("r", Some("{}")).is_err(), "an open directory");
    }
}
