//! The state directory of an instance: `.outlast/` in the project, or a directory of the user, or none.

use std::{
    fs::{self, OpenOptions},
    hash::{BuildHasher, RandomState},
    io,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

pub(crate) use outlast_control::registry::state_dir;
use outlast_os as os;

/// The longest part of an id that comes from a name; a longer name is cut.
const NAME_MAX: usize = 40;
/// The longest id in a file name; a longer one is cut.
const ID_MAX: usize = 100;
/// Length of the random suffix of an id: 32^5, about 33 million values, enough for the few instances that run at
/// once.
const TAIL_LENGTH: usize = 5;

/// A state directory that was writable when it was opened, or the reason why there is none.
///
/// There are no locks: instances that share a directory share files by appending and renaming, and keep their own
/// files under their id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Home(Location);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Location {
    At {
        dir: PathBuf,
        /// Why it is not in the project, if the user should know.
        note: Option<String>,
    },
    Nowhere {
        complaint: String,
    },
}

impl Home {
    /// Finds or creates the state directory of a project. It never fails, because a server can run without state;
    /// [`Home::complaint`] returns the reason.
    pub(crate) fn open(cwd: &Path, home: Option<&Path>) -> Home {
        let beside = if cwd.parent().is_none() {
            Err((format!("`{}` is not a project directory", cwd.display()), false))
        } else {
            let dir = cwd.join(".outlast");
            // A directory that is not writable is common. One that was refused for its owner, its type or its content is
            // reported.
            let is_refused = || {
                let found = os::check_own_dir(&dir).and_then(|()| check_entries(&dir));
                found
                    .is_err_and(|error| !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory))
            };
            settle(&dir).map(|()| dir.clone()).map_err(|error| (format!("{}: {error}", dir.display()), is_refused()))
        };
        let (why_not_beside, is_refused) = match beside {
            Ok(dir) => return Home(Location::At { dir, note: None }),
            Err(why) => why,
        };

        match settle_of_user(cwd, home) {
            Ok(dir) => {
                let note = format!("{why_not_beside}; state is kept in {}", dir.display());
                Home(Location::At { dir, note: is_refused.then_some(note) })
            }
            Err(why) => Home::nowhere(&format!("{why_not_beside}; and {why}")),
        }
    }

    /// The user's own directory for a project. A copy of the project, for example a clone, contains no files of it.
    pub(crate) fn of_user(cwd: &Path, home: Option<&Path>) -> Home {
        match settle_of_user(cwd, home) {
            Ok(dir) => Home(Location::At { dir, note: None }),
            Err(why) => Home::nowhere(&why),
        }
    }

    /// A sentence for people, if the project's own directory was refused.
    pub(crate) fn note(&self) -> Option<&str> {
        match &self.0 {
            Location::At { note, .. } => note.as_deref(),
            Location::Nowhere { .. } => None,
        }
    }

    /// No directory: no state is written, and everything else works.
    pub(crate) fn nowhere(reason: &str) -> Home {
        let complaint =
            format!("no state directory can be written, so no audit log, markers or logs are kept ({reason})");
        Home(Location::Nowhere { complaint })
    }

    pub(crate) fn dir(&self) -> Option<&Path> {
        match &self.0 {
            Location::At { dir, .. } => Some(dir),
            Location::Nowhere { .. } => None,
        }
    }

    /// A sentence for people, if there is no directory.
    pub(crate) fn complaint(&self) -> Option<&str> {
        match &self.0 {
            Location::At { .. } => None,
            Location::Nowhere { complaint } => Some(complaint),
        }
    }

    pub(crate) fn audit(&self) -> Option<PathBuf> {
        self.dir().map(|dir| dir.join("audit.jsonl"))
    }

    /// The marker that all instances of this directory write.
    pub(crate) fn restart_marker(&self) -> Option<PathBuf> {
        self.dir().map(|dir| dir.join("restart_marker"))
    }

    /// The marker that only this instance writes.
    pub(crate) fn restart_marker_of(&self, id: &str) -> Option<PathBuf> {
        self.dir().map(|dir| dir.join(format!("restart_marker.{}", tame(id, ID_MAX))))
    }

    /// The log file of an instance. [`Home::make_logs`] creates its directory when it is first needed.
    pub(crate) fn log(&self, id: &str) -> Option<PathBuf> {
        self.dir().map(|dir| dir.join("logs").join(format!("{}.log", tame(id, ID_MAX))))
    }

    /// Creates the directory of [`Home::log`].
    pub(crate) fn make_logs(&self) -> io::Result<()> {
        let Some(logs) = self.dir().map(|dir| dir.join("logs")) else { return Ok(()) };
        make_private(&logs)?;
        os::close_own_dir(&logs)
    }
}

/// The directories that may hold a project's state, for readers: none is created, and those that [`Home::open`] refuses
/// are left out.
pub(crate) fn candidates(cwd: &Path, home: Option<&Path>) -> Vec<PathBuf> {
    let beside = cwd.parent().map(|_| cwd.join(".outlast"));
    let is_usable = |dir: &PathBuf| os::check_own_dir(dir).and_then(|()| check_entries(dir)).is_ok();
    beside.into_iter().chain(dir_of_user(cwd, home)).filter(is_usable).collect()
}

/// The user's own directory for a project, which may not exist. The meaning of a relative home would depend on the current
/// directory.
pub(crate) fn dir_of_user(cwd: &Path, home: Option<&Path>) -> Option<PathBuf> {
    let home = home.filter(|home| home.is_absolute())?;
    Some(state_dir(home).join("projects").join(project_name(cwd)))
}

/// An id for one start of one instance: a readable name and a random suffix.
pub(crate) fn new_id(name: &str) -> String {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // The hasher's keys are random in each process; pid and time separate ids even if the random numbers are weak.
    let tail = RandomState::new().hash_one((std::process::id(), since_epoch.as_nanos()));
    format!("{}-{}", tame(name, NAME_MAX), base32(tail, TAIL_LENGTH))
}

/// Whether a chosen name can be used unchanged as an id, and so in file names.
pub(crate) fn is_id(name: &str) -> bool {
    name.len() <= NAME_MAX && tame(name, NAME_MAX) == name && !(cfg!(windows) && is_device(name))
}

/// Whether Windows treats a file of this name as a device, with any extension.
fn is_device(name: &str) -> bool {
    let is_port = |rest: &str| matches!(rest.as_bytes(), [b'0'..=b'9']);
    ["con", "prn", "aux", "nul"].contains(&name)
        || ["com", "lpt"].iter().any(|port| name.strip_prefix(port).is_some_and(is_port))
}

/// A random UUID, the form of id that agents use for a conversation.
pub(crate) fn new_uuid() -> String {
    let (high, low) = (random(), random());
    let (high, low) = (high & !0xf000 | 0x4000, low & !(0b11 << 62) | 0b10 << 62);
    let digits = format!("{high:016x}{low:016x}");
    [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
}

/// Seconds since 1970.
pub(crate) fn epoch() -> f64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// A number that other processes cannot predict: the hasher's keys are random.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos())
}

/// Any text as part of a file name: `[a-z0-9_-]`, never empty; a text that is one already stays unchanged.
fn tame(text: &str, max: usize) -> String {
    let mut tamed = String::new();
    for letter in text.chars().map(|letter| letter.to_ascii_lowercase()) {
        let plain = matches!(letter, 'a'..='z' | '0'..='9' | '_' | '-');
        if plain {
            tamed.push(letter);
        } else if !tamed.ends_with('-') {
            tamed.push('-');
        }
    }
    let tamed: String = tamed.trim_matches('-').chars().take(max).collect();
    let tamed = tamed.trim_matches('-');
    if tamed.is_empty() { String::from("outlast") } else { tamed.to_owned() }
}

/// A readable name and a hash of the whole path: two projects called `server` get different names.
pub(crate) fn project_name(cwd: &Path) -> String {
    let name = cwd.file_name().map_or_else(|| String::from("root"), |name| name.to_string_lossy().into_owned());
    format!("{}-{}", tame(&name, NAME_MAX), base32(fnv1a(cwd.as_os_str().as_encoded_bytes()), 13))
}

/// FNV-1a, because the name of a project's directory must not depend on the compiler.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The low bits of a number, in an alphabet without similar characters.
fn base32(mut number: u64, length: usize) -> String {
    const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
    let mut text = String::with_capacity(length);
    for _ in 0..length {
        text.push(char::from(ALPHABET[(number & 31) as usize]));
        number >>= 5;
    }
    text
}

/// An error if a repository or another user has put something else in the place of the files that outlast appends to.
fn check_entries(dir: &Path) -> io::Result<()> {
    let audit = os::open_own(OpenOptions::new().read(true), &dir.join("audit.jsonl")).map(drop);
    for (name, found) in [("audit.jsonl", audit), ("logs", os::check_own_dir(&dir.join("logs")))] {
        match found {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("{name}: {error}")));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Creates the user's own directory for a project.
fn settle_of_user(cwd: &Path, home: Option<&Path>) -> Result<PathBuf, String> {
    let dir = dir_of_user(cwd, home).ok_or("there is no home directory")?;
    settle(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    Ok(dir)
}

/// Prepares a directory: creates it, checks that it is writable, and adds a `.gitignore`.
fn settle(dir: &Path) -> io::Result<()> {
    make_private(dir)?;
    os::close_own_dir(dir)?;
    // If write permission of others cannot be removed, the next check fails.
    let _ = os::close_own_dir(&dir.join("logs"));
    check_entries(dir)?;
    let probe = dir.join(new_id(".probe"));
    let written = os::open_own(OpenOptions::new().write(true).create_new(true), &probe).and_then(|file| {
        drop(file);
        fs::remove_file(&probe)
    });
    match written {
        // A full disk may have space later: the directory is used, and its writers report what they lose.
        Err(error) if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {}
        other => other?,
    }
    // An empty file counts as missing: its writer was interrupted.
    let gitignore = dir.join(".gitignore");
    if fs::symlink_metadata(&gitignore).map_or(true, |found| found.len() == 0) {
        // Without it git only shows the directory, so a failure is no reason to use another directory.
        let file = os::open_own(OpenOptions::new().write(true).create(true).truncate(true), &gitignore);
        let _ = file.and_then(|mut file| io::Write::write_all(&mut file, b"*\n"));
    }
    Ok(())
}

/// Private, because logs contain output of servers, which may be confidential.
pub(crate) fn make_private(dir: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir)
}

/// Writes a file atomically that only the user can read.
pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let unfinished = path.with_extension(format!("{}.tmp", new_id("draft")));
    let written = os::open_own(OpenOptions::new().write(true).create_new(true), &unfinished)
        .and_then(|mut file| io::Write::write_all(&mut file, bytes));
    let written = written.and_then(|()| fs::rename(&unfinished, path));
    if written.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_project_holds_its_own_state_and_hides_it_from_git() {
        let project = tempfile::tempdir().unwrap();
        let home = Home::open(project.path(), None);
        assert_eq!(home.dir(), Some(project.path().join(".outlast").as_path()));
        assert_eq!(home.complaint(), None);
        assert_eq!(fs::read_to_string(project.path().join(".outlast/.gitignore")).unwrap(), "*\n");
        assert_eq!(fs::read_dir(home.dir().unwrap()).unwrap().count(), 1, "the probe is gone");

        fs::write(project.path().join(".outlast/.gitignore"), "mine\n").unwrap();
        assert_eq!(Home::open(project.path(), None), home);
        assert_eq!(fs::read_to_string(project.path().join(".outlast/.gitignore")).unwrap(), "mine\n");
    }

    #[test]
    fn the_root_of_the_file_system_is_no_project() {
        let user = tempfile::tempdir().unwrap();
        let root = user.path().ancestors().last().unwrap();
        let home = Home::open(root, Some(user.path()));
        assert!(home.dir().unwrap().starts_with(user.path().join(".local/state/outlast/projects")));
        assert!(!root.join(".outlast").exists());
    }

    #[test]
    fn the_state_of_a_read_only_project_is_in_the_users_directory() {
        let project = tempfile::tempdir().unwrap();
        let user = tempfile::tempdir().unwrap();
        fs::write(project.path().join(".outlast"), "a file in the way").unwrap();
        let home = Home::open(project.path(), Some(user.path()));
        let dir = home.dir().unwrap();
        assert_eq!(dir.parent(), Some(user.path().join(".local/state/outlast/projects").as_path()));
        assert_eq!(dir.file_name().unwrap().to_str().unwrap(), project_name(project.path()));
        assert_eq!(Home::open(project.path(), Some(user.path())), home, "the same project, the same place");
    }

    #[test]
    fn without_any_directory_there_is_an_error_in_a_sentence() {
        let project = tempfile::tempdir().unwrap();
        let user = tempfile::tempdir().unwrap();
        fs::write(project.path().join(".outlast"), "").unwrap();
        fs::write(user.path().join(".local"), "").unwrap();
        for home in [Some(user.path()), Some(Path::new("relative")), None] {
            let home = Home::open(project.path(), home);
            assert_eq!((home.dir(), home.audit(), home.log("x")), (None, None, None));
            let complaint = home.complaint().unwrap();
            assert!(complaint.contains(".outlast"), "{complaint}");
            home.make_logs().unwrap();
        }
        insta::assert_snapshot!(
            Home::nowhere("`/` is no project; and there is no home directory").complaint().unwrap(),
            @"no state directory can be written, so no audit log, markers or logs are kept (`/` is no project; and there is no home directory)"
        );
    }

    #[cfg(unix)]
    #[test]
    fn the_state_directory_is_private() {
        use std::os::unix::fs::PermissionsExt;
        let project = tempfile::tempdir().unwrap();
        let home = Home::open(project.path(), None);
        let mode = fs::metadata(home.dir().unwrap()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn every_path_lies_in_the_directory() {
        let project = tempfile::tempdir().unwrap();
        let home = Home::open(project.path(), None);
        let dir = home.dir().unwrap();
        home.make_logs().unwrap();
        assert_eq!(home.audit().unwrap(), dir.join("audit.jsonl"));
        assert_eq!(home.restart_marker().unwrap(), dir.join("restart_marker"));
        assert_eq!(home.restart_marker_of("py-1abcd").unwrap(), dir.join("restart_marker.py-1abcd"));
        assert_eq!(home.log("py-1abcd").unwrap(), dir.join("logs/py-1abcd.log"));
        assert_eq!(home.log("../../etc/passwd").unwrap(), dir.join("logs/etc-passwd.log"));
        assert!(dir.join("logs").is_dir());
    }

    #[test]
    fn ids_are_readable_and_differ() {
        // A few, as many as run at once: among a thousand ids, two are equal in one of seventy runs.
        let ids: HashSet<String> = (0..10).map(|_| new_id("GitHub MCP")).collect();
        assert_eq!(ids.len(), 10);
        for id in ids {
            assert!(id.starts_with("github-mcp-") && id.len() == "github-mcp-".len() + TAIL_LENGTH, "{id}");
            assert_eq!(tame(&id, ID_MAX), id);
        }
    }

    #[test]
    fn names_become_pieces_of_file_names() {
        let long = "x".repeat(300);
        let table = [
            ("python", "python"),
            ("server_1.py", "server_1-py"),
            ("My Server!!", "my-server"),
            ("../..", "outlast"),
            ("", "outlast"),
            ("--a", "a"),
            ("Żółw", "w"),
            (long.as_str(), &long[..NAME_MAX]),
        ];
        for (name, tamed) in table {
            assert_eq!(tame(name, NAME_MAX), tamed, "{name}");
        }
    }

    #[test]
    fn names_of_devices_are_known() {
        for (name, expected) in [("con", true), ("lpt1", true), ("com", false), ("com10", false), ("nul-x", false)] {
            assert_eq!(is_device(name), expected, "{name}");
            assert_eq!(is_id(name), !(expected && cfg!(windows)), "{name}");
        }
    }

    #[test]
    fn projects_of_the_same_name_have_different_directories() {
        assert_ne!(project_name(Path::new("/a/server")), project_name(Path::new("/b/server")));
        insta::assert_snapshot!(project_name(Path::new("/srv/My Server")), @"my-server-dhrhhavnjzyn8");
    }
}
