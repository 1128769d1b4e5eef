//! Which rotated audit logs are kept beyond the usual number: those with records that a replica has not published to its
//! cluster. Each replica stores up to which number its records are published in `audit-published/` beside the log,
//! because any instance in the directory may rotate the log.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use outlast_os as os;
use serde::{Deserialize, Serialize};

use crate::state::{audit_numbers::Opening, home};

/// How many rotated logs are kept at most. The next rotation removes the oldest, published or not.
pub(crate) const HELD_MAX: u32 = 64;
/// A replica that has not stored its number for this long keeps no logs any more: it was removed from the cluster, or has
/// another name now.
const AGE_MAX: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// How many replicas can use one directory. The numbers of others are not read, so their logs are not kept.
const REPLICAS_MAX: usize = 64;
/// The largest file with a number.
const FILE_MAX: u64 = 4 << 10;
const VERSION: u32 = 1;

/// What is stored for each replica; the name of the file says of which.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    version: u32,
    published: u64,
    base: u64,
}

/// Which records of a replica need not be kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Mark {
    /// The number of the last published record.
    pub published: u64,
    /// The logs began anew after this number: they never had a record with it or a lower one.
    pub base: u64,
}

/// Stores the mark of this replica. A replica does so before its first record, and from then on more often than every
/// [`AGE_MAX`].
pub(crate) fn store(audit: &Path, replica: &str, mark: Mark) -> io::Result<()> {
    let path = path_of(audit, replica);
    let dir = folder(audit);
    home::make_private(&dir)?;
    os::close_own_dir(&dir)?;
    let text = serde_json::to_vec(&Stored { version: VERSION, published: mark.published, base: mark.base })
        .map_err(io::Error::other)?;
    // One process at a time stores the number of a replica. A draft that it left behind is overwritten.
    let draft = path.with_extension("new");
    os::open_own(OpenOptions::new().write(true).create(true).truncate(true), &draft)?.write_all(&text)?;
    fs::rename(&draft, &path)
}

/// The mark that was stored last.
pub(crate) fn stored(audit: &Path, replica: &str) -> Option<Mark> {
    read(&path_of(audit, replica))
}

/// The records that must not be removed.
#[derive(Debug, Default)]
pub(crate) struct Unpublished(Vec<(Opening, u64)>);

impl Unpublished {
    /// Reads the numbers of all replicas in this directory. Without a cluster there are none. Numbers that are too old
    /// are removed. A number that cannot be read counts as 0, so all records of its replica are kept.
    pub(crate) fn read(audit: &Path) -> Unpublished {
        let Ok(entries) = fs::read_dir(folder(audit)) else { return Unpublished::default() };
        let named = entries.flatten().filter_map(|entry| Some((replica_of(&entry.path())?, entry.path())));
        let mut found = Vec::new();
        for (replica, path) in named.take(REPLICAS_MAX) {
            let age = fs::symlink_metadata(&path).and_then(|found| found.modified()).map(|then| then.elapsed());
            // A time in the future means that the clock was set back since.
            if age.is_ok_and(|age| age.is_ok_and(|age| age > AGE_MAX)) {
                let _ = fs::remove_file(&path);
            } else {
                found.push((Opening::of(&replica), read(&path).unwrap_or_default().published));
            }
        }
        Unpublished(found)
    }

    /// Whether a log has such records. A log that cannot be read is kept.
    pub(crate) fn are_in(&self, log: &Path) -> bool {
        let is_in = |(opening, published): &(Opening, u64)| {
            let mut file = os::open_own(OpenOptions::new().read(true), log)?;
            let last = opening.last_number(&mut file, &mut u64::MAX.clone())?;
            Ok::<_, io::Error>(last.is_some_and(|last| last > *published))
        };
        self.0.iter().any(|replica| is_in(replica).unwrap_or(true))
    }
}

fn read(path: &Path) -> Option<Mark> {
    let text = os::read_own(path, FILE_MAX).ok()?;
    let Stored { version, published, base } = serde_json::from_slice(&text).ok()?;
    (version == VERSION).then_some(Mark { published, base })
}

fn folder(audit: &Path) -> PathBuf {
    audit.with_file_name("audit-published")
}

/// Letters and digits of the name stay; any other byte is written as a number.
fn path_of(audit: &Path, replica: &str) -> PathBuf {
    let letter = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => char::from(byte).to_string(),
        _ => format!("%{byte:02x}"),
    };
    folder(audit).join(replica.bytes().map(letter).collect::<String>() + ".json")
}

/// The name in a path of [`path_of`].
fn replica_of(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?.strip_suffix(".json")?;
    let mut parts = name.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs::File, time::SystemTime};

    #[test]
    fn each_replica_has_its_own_number() {
        let dir = tempfile::tempdir().unwrap();
        let audit = dir.path().join("audit.jsonl");
        let mark = |published| Mark { published, base: 2 };
        assert_eq!(stored(&audit, "east"), None);
        store(&audit, "east", mark(3)).unwrap();
        store(&audit, "../west", mark(5)).unwrap();
        store(&audit, "east", mark(4)).unwrap();
        assert_eq!(stored(&audit, "east"), Some(mark(4)));
        assert_eq!(stored(&audit, "../west"), Some(mark(5)));
        assert_eq!(stored(&audit, "west"), None);
        let names =
            fs::read_dir(folder(&audit)).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        assert_eq!(names, ["%2e%2e%2fwest.json", "east.json"]);
        for replica in ["east", "../west", "Zürich%", ""] {
            assert_eq!(replica_of(&path_of(&audit, replica)).as_deref(), Some(replica));
        }
        for name in ["east.new", "east", "%.json", "%2.json", "%zz.json", "%ff.json"] {
            assert_eq!(replica_of(&dir.path().join(name)), None, "{name}");
        }
    }

    #[test]
    fn a_log_is_needed_while_it_has_records_that_are_not_published() {
        let dir = tempfile::tempdir().unwrap();
        let audit = dir.path().join("audit.jsonl");
        let log = audit.with_file_name("audit.3.jsonl");
        let ours = "{\"id\":\"east-8\"}\n{\"id\":\"west-2\"}\n{\"id\":\"east-9\"}\n{\"timestamp\":\"x\"}\n";
        #[rustfmt::skip]
        let table = [
            // published of      log             is needed
            (&[][..],            ours,           false),
            (&[("east", 9)][..], ours,           false),
            (&[("east", 8)],     ours,           true),
            (&[("east", 0)],     ours,           true),
            (&[("west", 1)],     ours,           true),
            (&[("west", 2), ("east", 9)], ours,  false),
            (&[("west", 2), ("east", 8)], ours,  true),
            (&[("north", 0)],    ours,           false),
            (&[("east", 0)],     "",             false),
        ];
        for (numbers, text, is_needed) in table {
            let _ = fs::remove_dir_all(folder(&audit));
            fs::write(&log, text).unwrap();
            for (replica, published) in numbers {
                store(&audit, replica, Mark { published: *published, base: 0 }).unwrap();
            }
            assert_eq!(Unpublished::read(&audit).are_in(&log), is_needed, "{numbers:?}");
        }
    }

    #[test]
    fn an_old_number_keeps_nothing_and_an_unreadable_one_keeps_everything() {
        let dir = tempfile::tempdir().unwrap();
        let audit = dir.path().join("audit.jsonl");
        let log = audit.with_file_name("audit.3.jsonl");
        fs::write(&log, "{\"id\":\"east-8\"}\n").unwrap();
        store(&audit, "east", Mark::default()).unwrap();
        let path = path_of(&audit, "east");
        let set_age = |age: Duration| {
            let file = File::options().write(true).open(&path).unwrap();
            file.set_modified(SystemTime::now() - age).unwrap();
        };
        set_age(AGE_MAX - Duration::from_secs(600));
        assert!(Unpublished::read(&audit).are_in(&log));
        set_age(AGE_MAX + Duration::from_secs(600));
        assert!(!Unpublished::read(&audit).are_in(&log));
        assert!(!path.exists(), "it is removed");

        for text in ["", "{", r#"{"version":2,"published":9,"base":0}"#] {
            fs::write(&path, text).unwrap();
            assert!(Unpublished::read(&audit).are_in(&log), "{text}");
        }
    }
}
