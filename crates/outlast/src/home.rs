//! Where an outlast keeps its state: `.outlast/` beside the project, or a folder of the user's, or nowhere at all.

use std::{
    fs::{self, OpenOptions},
    hash::{BuildHasher, RandomState},
    io,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use crate::os;

/// The longest part of an id that comes from a name; what is longer is cut.
const NAME_MAX: usize = 40;
/// The longest id that becomes part of a file name; what is longer is cut.
const ID_MAX: usize = 100;
/// The random tail of an id: 32^5, some 33 million, told apart among the few that run at once.
const TAIL_LENGTH: usize = 5;

/// A state directory that was writable when it was opened, or the reason why there is none.
///
/// Nothing here is locked: instances that share a directory share its files by appending and renaming, and keep
/// what is theirs alone under their own id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home(Place);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    At {
        dir: PathBuf,
        /// Why it is not beside the project, if the user should know.
        note: Option<String>,
    },
    Nowhere {
        complaint: String,
    },
}

impl Home {
    /// Finds and makes the state directory of a project. It never fails: a server is worth keeping alive even
    /// where nothing can be written down, so the trouble is kept for [`Home::complaint`].
    pub fn open(cwd: &Path, home: Option<&Path>) -> Home {
        let beside = if cwd.parent().is_none() {
            Err(format!("`{}` is no project", cwd.display()))
        } else {
            let dir = cwd.join(".outlast");
            settle(&dir).map(|()| dir.clone()).map_err(|error| format!("{}: {error}", dir.display()))
        };
        let why_not_beside = match beside {
            Ok(dir) => return Home(Place::At { dir, note: None }),
            Err(why) => why,
        };

        // A relative home would change its meaning with the directory we happen to stand in.
        let Some(home) = home.filter(|home| home.is_absolute()) else {
            return Home::nowhere(&format!("{why_not_beside}; and there is no home directory"));
        };
        let dir = state_dir(home).join("projects").join(project_name(cwd));
        match settle(&dir) {
            Ok(()) => {
                // That a directory cannot be written, or is no project, is no news; one that is a trap is.
                let is_refused = os::check_own_dir(&cwd.join(".outlast")).is_err_and(|error| {
                    !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
                });
                let note = format!("{why_not_beside}; state is kept in {}", dir.display());
                Home(Place::At { dir, note: is_refused.then_some(note) })
            }
            Err(error) => Home::nowhere(&format!("{why_not_beside}; {}: {error}", dir.display())),
        }
    }

    /// A sentence for people, when the project's own directory was refused.
    pub fn note(&self) -> Option<&str> {
        match &self.0 {
            Place::At { note, .. } => note.as_deref(),
            Place::Nowhere { .. } => None,
        }
    }

    /// No directory: nothing is kept, and everything else goes on.
    pub fn nowhere(reason: &str) -> Home {
        let complaint =
            format!("no state directory can be written, so no audit log, markers or logs are kept ({reason})");
        Home(Place::Nowhere { complaint })
    }

    pub fn dir(&self) -> Option<&Path> {
        match &self.0 {
            Place::At { dir, .. } => Some(dir),
            Place::Nowhere { .. } => None,
        }
    }

    /// A sentence for people, when there is no directory.
    pub fn complaint(&self) -> Option<&str> {
        match &self.0 {
            Place::At { .. } => None,
            Place::Nowhere { complaint } => Some(complaint),
        }
    }

    pub fn audit(&self) -> Option<PathBuf> {
        self.dir().map(|dir| dir.join("audit.jsonl"))
    }

    /// The marker that every instance in this directory writes.
    pub fn restart_marker(&self) -> Option<PathBuf> {
        self.dir().map(|dir| dir.join("restart_marker"))
    }

    /// The marker that only this instance writes.
    pub fn restart_marker_of(&self, id: &str) -> Option<PathBuf> {
        self.dir().map(|dir| dir.join(format!("restart_marker.{}", tame(id, ID_MAX))))
    }

    /// The file for an instance's log. Its folder is made when the file is first wanted, by [`Home::make_logs`].
    pub fn log(&self, id: &str) -> Option<PathBuf> {
        self.dir().map(|dir| dir.join("logs").join(format!("{}.log", tame(id, ID_MAX))))
    }

    /// Makes the folder that [`Home::log`] points into.
    pub fn make_logs(&self) -> io::Result<()> {
        let Some(logs) = self.dir().map(|dir| dir.join("logs")) else { return Ok(()) };
        make_private(&logs)?;
        os::close_own_dir(&logs)
    }
}

/// What belongs to the user and to no project: the registry and the directories of projects that hold none of
/// their own. It asks no XDG variable, because a client and a shell would answer differently.
pub fn state_dir(home: &Path) -> PathBuf {
    home.join(".local").join("state").join("outlast")
}

/// Where a project's state may lie, for those who only look: what is not there is not made, and what is not this user's is
/// not looked into.
pub fn candidates(cwd: &Path, home: Option<&Path>) -> Vec<PathBuf> {
    let beside = cwd.parent().map(|_| cwd.join(".outlast"));
    let home = home.filter(|home| home.is_absolute());
    let elsewhere = home.map(|home| state_dir(home).join("projects").join(project_name(cwd)));
    beside.into_iter().chain(elsewhere).filter(|dir| os::check_own_dir(dir).is_ok()).collect()
}

/// A name for one start of one instance: what it runs, readable, and a tail no other start has.
pub fn new_id(name: &str) -> String {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // The hasher's keys are random in each process; pid and time keep starts apart even where randomness is poor.
    let tail = RandomState::new().hash_one((std::process::id(), since_epoch.as_nanos()));
    format!("{}-{}", tame(name, NAME_MAX), base32(tail, TAIL_LENGTH))
}

/// Whether a name that somebody chose can be an id, and so part of a file's name, as it stands.
pub fn is_id(name: &str) -> bool {
    name.len() <= NAME_MAX && tame(name, NAME_MAX) == name && !(cfg!(windows) && is_device(name))
}

/// Whether Windows takes a file of this name for a device, whatever its ending.
fn is_device(name: &str) -> bool {
    let is_port = |rest: &str| matches!(rest.as_bytes(), [b'0'..=b'9']);
    ["con", "prn", "aux", "nul"].contains(&name)
        || ["com", "lpt"].iter().any(|port| name.strip_prefix(port).is_some_and(is_port))
}

/// An id of the form that agents want for a conversation: a random UUID.
pub fn new_uuid() -> String {
    let (high, low) = (random(), random());
    let (high, low) = (high & !0xf000 | 0x4000, low & !(0b11 << 62) | 0b10 << 62);
    let digits = format!("{high:016x}{low:016x}");
    [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
}

/// A number nobody can guess who does not share our process.
/// Seconds since 1970.
pub fn epoch() -> f64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

pub fn random() -> u64 {
    RandomState::new().hash_one(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos())
}

/// Any text as a piece of a file name: `[a-z0-9_-]`, never empty, and unchanged if it is one already.
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

/// Readable first, and then a hash of the whole path: two projects called `server` are two projects.
pub fn project_name(cwd: &Path) -> String {
    let name = cwd.file_name().map_or_else(|| String::from("root"), |name| name.to_string_lossy().into_owned());
    format!("{}-{}", tame(&name, NAME_MAX), base32(fnv1a(cwd.as_os_str().as_encoded_bytes()), 13))
}

/// FNV-1a, because the name of a project's directory must be the same with every compiler.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The low bits of a number in an alphabet without look-alikes.
fn base32(mut number: u64, length: usize) -> String {
    const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
    let mut text = String::with_capacity(length);
    for _ in 0..length {
        text.push(char::from(ALPHABET[(number & 31) as usize]));
        number >>= 5;
    }
    text
}

/// Makes a directory ours: it exists, can be written to, and hides itself from git.
fn settle(dir: &Path) -> io::Result<()> {
    make_private(dir)?;
    os::close_own_dir(dir)?;
    let probe = dir.join(new_id(".probe"));
    let written = os::open_own(OpenOptions::new().write(true).create_new(true), &probe).and_then(|file| {
        drop(file);
        fs::remove_file(&probe)
    });
    match written {
        // Full today is not forbidden: the place stays the right one, and those who write to it say what they lose.
        Err(error) if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {}
        other => other?,
    }
    // Empty counts as missing: whoever made it was ended before the one byte was written.
    let gitignore = dir.join(".gitignore");
    if fs::symlink_metadata(&gitignore).map_or(true, |found| found.len() == 0) {
        // Without it git merely shows the directory, so this alone is no reason to go elsewhere.
        let file = os::open_own(OpenOptions::new().write(true).create(true).truncate(true), &gitignore);
        let _ = file.and_then(|mut file| io::Write::write_all(&mut file, b"*\n"));
    }
    Ok(())
}

/// Logs repeat what servers print, which may be nobody else's business.
pub fn make_private(dir: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir)
}

/// Writes a file that only the user can read, whole or not at all.
pub fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
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
    fn a_project_that_cannot_be_written_moves_to_the_user() {
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
    fn with_no_place_at_all_there_is_a_sentence_instead() {
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
    fn what_is_kept_is_for_its_owner() {
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
        // Few, as those that run at once: among a thousand two are the same every seventieth time.
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
    fn projects_of_one_name_are_kept_apart_for_ever() {
        assert_ne!(project_name(Path::new("/a/server")), project_name(Path::new("/b/server")));
        insta::assert_snapshot!(project_name(Path::new("/srv/My Server")), @"my-server-dhrhhavnjzyn8");
    }
}
