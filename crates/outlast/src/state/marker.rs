//! Restart markers: small files that say that a restart was requested, written atomically.

use outlast_os as os;

use crate::state::home::Home;
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    time::SystemTime,
};

/// A longer marker is read as corrupt.
const MARKER_BYTES_MAX: u64 = 64 * 1024;
/// How many markers of single instances are kept in a directory; the next write removes the oldest beyond that.
const OWN_MARKERS_MAX: usize = 64;

/// Which server was restarted, when and why.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Marker {
    /// Seconds since 1970.
    pub timestamp: f64,
    /// The server that was to be replaced.
    pub pid: u32,
    pub reason: String,
    pub iso_time: String,
    /// The instance that wrote it; other writers, such as a server's own restart tool, may omit it.
    pub id: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Reading {
    Missing { path: PathBuf },
    Corrupt { path: PathBuf, error: String },
    Valid(Marker),
}

/// The marker files of one instance. All functions may wait for a disk, so they belong on a thread that may block.
#[derive(Debug, Clone)]
pub(crate) struct Markers {
    id: String,
    /// Shared by all instances of the directory, and read by other programs.
    common: Option<PathBuf>,
    /// Only of this instance: another instance may overwrite the common one at any time.
    own: Option<PathBuf>,
}

impl Markers {
    pub(crate) fn new(home: &Home, id: &str, elsewhere: Option<PathBuf>) -> Markers {
        let common = elsewhere.or_else(|| home.restart_marker());
        Markers { id: id.to_owned(), common, own: home.restart_marker_of(id) }
    }

    /// The path of the common marker, if there is a state directory.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.common.as_deref()
    }

    /// When it returns without an error, the marker survives a power failure. Both files are tried even if one fails.
    pub(crate) fn write(&self, marker: &Marker) -> io::Result<()> {
        if self.common.is_none() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "there is no directory to write the marker to"));
        }
        let text = Wire::from(marker).text();
        let own = self.own.as_deref().map_or(Ok(()), |path| write_whole(path, &self.id, &text));
        let common = self.common.as_deref().map_or(Ok(()), |path| write_whole(path, &self.id, &text));
        if let Some(own) = &self.own {
            forget_oldest(own);
        }
        own.and(common)
    }

    /// The marker of this instance: the common one, unless that is valid and another instance wrote it.
    pub(crate) fn read(&self) -> Reading {
        let Some(common) = &self.common else {
            return Reading::Missing { path: PathBuf::from("restart_marker") };
        };
        match (read_one(common), &self.own) {
            (Reading::Valid(marker), Some(own)) if marker.id.as_ref().is_some_and(|id| *id != self.id) => read_one(own),
            (reading, _) => reading,
        }
    }
}

fn read_one(path: &Path) -> Reading {
    let corrupt = |error: String| Reading::Corrupt { path: path.to_owned(), error };
    let mut text = String::new();
    let file = os::open_regular(OpenOptions::new().read(true), path);
    let read = file.and_then(|file| file.take(MARKER_BYTES_MAX + 1).read_to_string(&mut text));
    match read {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Reading::Missing { path: path.to_owned() },
        Err(error) => return corrupt(error.to_string()),
        Ok(length) if length as u64 > MARKER_BYTES_MAX => {
            return corrupt(format!("longer than {MARKER_BYTES_MAX} bytes"));
        }
        Ok(_) => {}
    }
    match serde_json::from_str::<Wire>(&text) {
        Ok(wire) => Reading::Valid(wire.into()),
        Err(error) => corrupt(error.to_string()),
    }
}

/// Writes and syncs a temporary file and renames it: readers see the old content or the new one.
fn write_whole(path: &Path, id: &str, text: &str) -> io::Result<()> {
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    fs::create_dir_all(dir)?;
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path of the marker is not a file name"))?;
    // Ids are unique, so no other instance writes to this file.
    let fresh = dir.join(format!(".{}.{id}.tmp", name.to_string_lossy()));
    let written = fill(&fresh, text).and_then(|()| fs::rename(&fresh, path));
    if written.is_err() {
        let _ = fs::remove_file(&fresh);
    }
    written?;
    force_names(dir)
}

fn fill(path: &Path, text: &str) -> io::Result<()> {
    let mut file = os::open_own(OpenOptions::new().write(true).create(true).truncate(true), path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// A rename is on disk only when the directory is synced.
#[cfg(unix)]
fn force_names(dir: &Path) -> io::Result<()> {
    match fs::File::open(dir)?.sync_all() {
        // Some file systems cannot sync a directory and return this error.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        other => other,
    }
}

/// Windows cannot open a directory to sync it; the journal of the file system orders the rename.
#[cfg(not(unix))]
fn force_names(_dir: &Path) -> io::Result<()> {
    Ok(())
}

/// Each start has a new id, so old markers are removed to limit their number.
fn forget_oldest(own: &Path) {
    let Some(entries) = own.parent().and_then(|dir| fs::read_dir(dir).ok()) else { return };
    let mut found: Vec<(SystemTime, PathBuf)> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("restart_marker."))
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    if found.len() <= OWN_MARKERS_MAX {
        return;
    }
    found.sort();
    let surplus = found.len() - OWN_MARKERS_MAX;
    for (_, path) in found.into_iter().filter(|(_, path)| path != own).take(surplus) {
        // Another instance may have removed it already.
        let _ = fs::remove_file(path);
    }
}

/// The file format. Fields may be added; none of these is ever renamed.
#[derive(Serialize, Deserialize)]
#[serde(expecting = "a marker")]
struct Wire {
    timestamp: f64,
    pid: u32,
    reason: String,
    iso_time: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<String>,
}

impl Wire {
    fn text(&self) -> String {
        let mut text = serde_json::to_string(self).expect("a marker has only strings and numbers");
        text.push('\n');
        text
    }
}

impl From<&Marker> for Wire {
    fn from(marker: &Marker) -> Wire {
        let Marker { timestamp, pid, reason, iso_time, id } = marker.clone();
        Wire { timestamp, pid, reason, iso_time, id }
    }
}

impl From<Wire> for Marker {
    fn from(wire: Wire) -> Marker {
        let Wire { timestamp, pid, reason, iso_time, id } = wire;
        // Other programs write markers too, and their texts are shown in logs and on terminals.
        Marker { timestamp, pid, reason: outlast_core::reason::one_line(&reason), iso_time, id }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    fn marker(id: &str, timestamp: f64) -> Marker {
        let (reason, iso_time) = ("code changes".to_owned(), "2026-01-13T14:32:45.123Z".to_owned());
        Marker { timestamp, pid: 4242, reason, iso_time, id: Some(id.to_owned()) }
    }

    fn at_home() -> (TempDir, Home) {
        let project = tempfile::tempdir().unwrap();
        let home = Home::open(project.path(), None);
        (project, home)
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_marker_is_read_as_written_and_no_other_file_remains() {
        let (_project, home) = at_home();
        let markers = Markers::new(&home, "py-00001", None);
        let written = marker("py-00001", 1_768_314_765.123);
        markers.write(&written).unwrap();
        assert_eq!(markers.read(), Reading::Valid(written));
        assert_eq!(names(home.dir().unwrap()), [".gitignore", "restart_marker", "restart_marker.py-00001"]);
        insta::assert_snapshot!(
            fs::read_to_string(markers.path().unwrap()).unwrap(),
            @r#"{"timestamp":1768314765.123,"pid":4242,"reason":"code changes","iso_time":"2026-01-13T14:32:45.123Z","id":"py-00001"}"#
        );
    }

    #[test]
    fn a_marker_of_another_instance_does_not_hide_ours() {
        let (_project, home) = at_home();
        let (ours, theirs) = (Markers::new(&home, "a", None), Markers::new(&home, "b", None));
        ours.write(&marker("a", 1.0)).unwrap();
        theirs.write(&marker("b", 2.0)).unwrap();
        assert_eq!(ours.read(), Reading::Valid(marker("a", 1.0)));
        assert_eq!(theirs.read(), Reading::Valid(marker("b", 2.0)));

        let third = Markers::new(&home, "c", None);
        assert_eq!(third.read(), Reading::Missing { path: home.restart_marker_of("c").unwrap() });
    }

    #[test]
    fn a_marker_without_an_id_is_read_by_every_instance() {
        let (_project, home) = at_home();
        let markers = Markers::new(&home, "a", None);
        fs::write(
            markers.path().unwrap(),
            r#"{"timestamp": 1705158765, "pid": 7, "reason": "r", "iso_time": "t", "exit_code": 42}"#,
        )
        .unwrap();
        let Reading::Valid(read) = markers.read() else { panic!("{:?}", markers.read()) };
        assert_eq!((read.timestamp, read.pid, read.id), (1_705_158_765.0, 7, None));
    }

    #[test]
    fn missing_and_corrupt_markers_are_distinguished() {
        let (_project, home) = at_home();
        let markers = Markers::new(&home, "a", None);
        let path = home.restart_marker().unwrap();
        assert_eq!(markers.read(), Reading::Missing { path: path.clone() });

        let long = format!("\"{}", "x".repeat(MARKER_BYTES_MAX as usize));
        let table = [
            ("", "EOF while parsing a value at line 1 column 0"),
            ("{\"timestamp\": 1.5", "EOF while parsing an object at line 1 column 17"),
            ("{\"timestamp\": 1.5, \"reason\": \"\", \"iso_time\": \"\"}", "missing field `pid` at line 1 column 48"),
            ("[]", "invalid length 0, expected a marker at line 1 column 2"),
            (&long, "longer than 65536 bytes"),
        ];
        for (text, error) in table {
            fs::write(&path, text).unwrap();
            assert_eq!(markers.read(), Reading::Corrupt { path: path.clone(), error: error.to_owned() });
        }
        fs::write(&path, b"\xff").unwrap();
        assert!(matches!(markers.read(), Reading::Corrupt { .. }));
    }

    #[test]
    fn the_reason_of_a_foreign_marker_is_one_clean_line() {
        let (_project, home) = at_home();
        let text = r#"{"timestamp": 1.5, "pid": 7, "reason": "a\u001b[2J\nb", "iso_time": "then"}"#;
        fs::write(home.restart_marker().unwrap(), text).unwrap();
        let Reading::Valid(read) = Markers::new(&home, "a", None).read() else { panic!("it is valid") };
        assert_eq!(read.reason, "a [2J b");
    }

    #[test]
    fn the_path_of_the_common_marker_can_be_set() {
        let (project, home) = at_home();
        let elsewhere = project.path().join(".st3/deep/.restart_marker");
        let markers = Markers::new(&home, "a", Some(elsewhere.clone()));
        markers.write(&marker("a", 3.0)).unwrap();
        assert_eq!(names(elsewhere.parent().unwrap()), [".restart_marker"]);
        assert!(!home.restart_marker().unwrap().exists());
        assert!(home.restart_marker_of("a").unwrap().exists());

        let homeless = Markers::new(&Home::nowhere("a test"), "a", Some(elsewhere));
        assert_eq!(homeless.read(), Reading::Valid(marker("a", 3.0)));
        homeless.write(&marker("a", 4.0)).unwrap();
        assert_eq!(homeless.read(), Reading::Valid(marker("a", 4.0)));
    }

    #[test]
    fn without_a_path_writing_is_an_error_and_reading_finds_nothing() {
        let markers = Markers::new(&Home::nowhere("a test"), "a", None);
        assert!(markers.write(&marker("a", 1.0)).is_err());
        assert!(matches!(markers.read(), Reading::Missing { .. }));
    }

    #[test]
    fn a_failed_write_leaves_the_old_marker_and_no_temporary_file() {
        let (_project, home) = at_home();
        let markers = Markers::new(&home, "a", None);
        // A directory that is not empty cannot be replaced by a file.
        fs::create_dir_all(home.restart_marker().unwrap().join("in the way")).unwrap();
        assert!(markers.write(&marker("a", 1.0)).is_err());
        assert_eq!(names(home.dir().unwrap()), [".gitignore", "restart_marker", "restart_marker.a"]);
    }

    #[test]
    fn markers_of_old_instances_are_removed() {
        let (_project, home) = at_home();
        for number in 0..OWN_MARKERS_MAX + 10 {
            let id = format!("i{number}");
            Markers::new(&home, &id, None).write(&marker(&id, 1.0)).unwrap();
        }
        let left = names(home.dir().unwrap()).iter().filter(|name| name.starts_with("restart_marker.")).count();
        assert_eq!(left, OWN_MARKERS_MAX);
        let last = format!("i{}", OWN_MARKERS_MAX + 9);
        assert_eq!(Markers::new(&home, &last, None).read(), Reading::Valid(marker(&last, 1.0)));
    }

    #[test]
    fn markers_can_be_sent_to_another_thread() {
        fn may_move<T: Send + 'static>() {}
        may_move::<Markers>();
        may_move::<Reading>();
    }
}
