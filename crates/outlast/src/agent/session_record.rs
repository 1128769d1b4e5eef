//! The record of each session on disk, from its start: enough to continue the same conversation later. One file per
//! session, `sessions/<id>.json` in the user's state directory, readable by the user only.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use outlast_os as os;
use serde_json::{Value, json};

use crate::{cli::report::plain, state::home};

/// The version of the format. A file of another version is not read.
const VERSION: u64 = 1;
/// A longer file is not read, and a record that would be longer is not written.
const RECORD_MAX: u64 = 1 << 20;
/// Records of ended sessions that are kept; with one more, the oldest is removed.
const ENDED_MAX: usize = 256;
/// Files that are examined to find them.
const FILES_MAX: usize = 10_000;

/// Files beside the records: the settings that an agent gets.
pub(crate) const SETTINGS: &str = ".settings.json";
const OTHER_SESSION: &str = "it is of another session";

/// One session.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SessionRecord {
    pub id: String,
    /// The profile, such as `claude`.
    pub agent: String,
    /// The agent's command, as the user wrote it.
    pub command: Vec<String>,
    /// Where the agent works.
    pub cwd: PathBuf,
    pub document: Option<PathBuf>,
    /// Where outlast was started: relative paths in the options are relative to this directory.
    pub here: PathBuf,
    /// The options of `outlast run`, as the user wrote them, without the id of the session.
    pub options: Vec<String>,
    /// Names of the variables that the agent got from outlast's environment; values are not stored.
    pub env: Vec<String>,
    /// The conversation that the agent is in, once it is known.
    pub conversation: Option<String>,
    /// A turn was running, and `--on-resume` is set.
    pub in_turn: bool,
    pub state: State,
    /// Seconds since 1970.
    pub updated: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It runs, or it was interrupted: outlast was killed, lost its terminal, or the machine was shut down.
    Running,
    /// Its user ended it.
    Ended,
}

/// The directory of all records.
#[derive(Clone, Debug)]
pub(crate) struct Records(PathBuf);

impl Records {
    pub(crate) fn of(user_home: &Path) -> Records {
        Records(home::state_dir(user_home).join("sessions"))
    }

    /// Nothing if there is no record. The error is a sentence for the log.
    pub(crate) fn read(&self, id: &str) -> Result<Option<SessionRecord>, String> {
        let path = self.path(id);
        let record = match read(&path) {
            Ok(record) if record.id != id => Err(io::Error::new(io::ErrorKind::InvalidData, OTHER_SESSION)),
            other => other,
        };
        match record {
            Ok(record) => Ok(Some(record)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(format!(
                "the session record {} cannot be used ({}): a new conversation begins, and the record is written again; \
                 to continue the old one, start the agent with its own option for that",
                path.display(),
                plain(&error.to_string())
            )),
        }
    }

    /// All records, and the files that are none, each with the reason.
    pub(crate) fn all(&self) -> (Vec<SessionRecord>, Vec<(PathBuf, io::Error)>) {
        let (mut records, mut unusable) = (Vec::new(), Vec::new());
        for path in self.files() {
            match read(&path) {
                Ok(record) if path == self.path(&record.id) => records.push(record),
                Ok(_) => unusable.push((path, io::Error::new(io::ErrorKind::InvalidData, OTHER_SESSION))),
                // A session that ends may remove its file meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => unusable.push((path, error)),
            }
        }
        (records, unusable)
    }

    fn files(&self) -> impl Iterator<Item = PathBuf> {
        let files = fs::read_dir(&self.0).into_iter().flatten().flatten().take(FILES_MAX).map(|file| file.path());
        files.filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.ends_with(".json") && !name.ends_with(SETTINGS)
        })
    }

    /// Atomically: the whole record, or the old one stays.
    pub(crate) fn write(&self, record: &SessionRecord) -> io::Result<()> {
        home::make_private(&self.0)?;
        os::close_own_dir(&self.0)?;
        let text = format!("{}\n", record.to_json());
        if text.len() as u64 > RECORD_MAX {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "its command is too long"));
        }
        home::write_private(&self.path(&record.id), text.as_bytes())
    }

    /// Removes the oldest records of sessions that ended, beyond the limit.
    pub(crate) fn prune(&self) {
        let mut ended: Vec<(f64, PathBuf)> = self
            .files()
            .filter_map(|path| Some((read(&path).ok().filter(|record| record.state == State::Ended)?.updated, path)))
            .collect();
        ended.sort_by(|one, other| other.0.total_cmp(&one.0));
        for (_, path) in ended.into_iter().skip(ENDED_MAX) {
            let _ = fs::remove_file(path);
        }
    }

    fn path(&self, id: &str) -> PathBuf {
        self.0.join(format!("{id}.json"))
    }
}

fn read(path: &Path) -> io::Result<SessionRecord> {
    let wrong = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why);
    let value = serde_json::from_slice(&os::read_own(path, RECORD_MAX)?).map_err(|_| wrong("it is not JSON"))?;
    SessionRecord::from_json(&value).ok_or_else(|| wrong("it is not a session record of this version"))
}

impl SessionRecord {
    fn to_json(&self) -> Value {
        json!({
            "v": VERSION,
            "id": self.id,
            "agent": self.agent,
            "command": self.command,
            "cwd": self.cwd.to_string_lossy(),
            "document": self.document.as_deref().map(Path::to_string_lossy),
            "here": self.here.to_string_lossy(),
            "options": self.options,
            "env": self.env,
            "conversation": self.conversation,
            "in_turn": self.in_turn,
            "state": match self.state { State::Running => "running", State::Ended => "ended" },
            "updated": self.updated,
        })
    }

    fn from_json(value: &Value) -> Option<SessionRecord> {
        if value["v"].as_u64() != Some(VERSION) {
            return None;
        }
        let text = |member: &str| value[member].as_str().map(str::to_owned);
        let texts = |member: &Value| -> Option<Vec<String>> {
            member.as_array()?.iter().map(|word| word.as_str().map(str::to_owned)).collect()
        };
        // Earlier versions wrote neither options nor names of variables.
        let cwd: PathBuf = text("cwd")?.into();
        Some(SessionRecord {
            id: text("id")?,
            agent: text("agent")?,
            command: texts(&value["command"]).filter(|command| !command.is_empty())?,
            here: text("here").map_or_else(|| cwd.clone(), PathBuf::from),
            options: texts(&value["options"]).unwrap_or_default(),
            env: texts(&value["env"]).unwrap_or_default(),
            cwd,
            document: text("document").map(PathBuf::from),
            conversation: text("conversation"),
            in_turn: value["in_turn"] == true,
            state: match value["state"].as_str()? {
                "running" => State::Running,
                "ended" => State::Ended,
                _ => return None,
            },
            updated: value["updated"].as_f64()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: &str, state: State, updated: f64) -> SessionRecord {
        SessionRecord {
            id: id.to_owned(),
            agent: "claude".to_owned(),
            command: vec!["claude".to_owned(), "deploy now".to_owned()],
            cwd: "/srv/project".into(),
            document: None,
            here: "/srv".into(),
            options: vec!["--cwd".to_owned(), "project".to_owned()],
            env: vec!["ANTHROPIC_API_KEY".to_owned()],
            conversation: Some("c".to_owned()),
            in_turn: true,
            state,
            updated,
        }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let user = tempfile::tempdir().unwrap();
        let records = Records::of(user.path());
        assert_eq!(records.read("s"), Ok(None));
        let first = record("s", State::Running, 1.0);
        records.write(&first).unwrap();
        assert_eq!(records.read("s"), Ok(Some(first)));
        let path = user.path().join(".local/state/outlast/sessions/s.json");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        // Unknown members are ignored, unknown versions and broken files are not read.
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace("\"v\":1", "\"new\":true,\"v\":1")).unwrap();
        assert!(records.read("s").is_ok_and(|record| record.is_some()));
        fs::write(&path, text.replace("\"v\":1", "\"v\":2")).unwrap();
        assert!(records.read("s").is_err_and(|why| why.contains("of this version")));
        fs::write(&path, "{").unwrap();
        assert!(records.read("s").is_err_and(|why| why.contains("it is not JSON")));
        fs::write(&path, text.replace("\"id\":\"s\"", "\"id\":\"t\"")).unwrap();
        assert!(records.read("s").is_err_and(|why| why.contains("of another session")));
        // A record of an earlier version.
        let before = text.replace("\"here\":\"/srv\",", "").replace("\"options\":[\"--cwd\",\"project\"],", "");
        fs::write(&path, before).unwrap();
        let old = records.read("s").unwrap().unwrap();
        assert_eq!((old.here, old.options), (PathBuf::from("/srv/project"), Vec::new()));
        let long = SessionRecord { command: vec!["x".repeat(1 << 20)], ..record("long", State::Running, 1.0) };
        assert!(records.write(&long).is_err());
        assert_eq!(records.read("long"), Ok(None));
    }

    #[test]
    fn files_that_are_no_records_are_named_with_the_reason() {
        let user = tempfile::tempdir().unwrap();
        let records = Records::of(user.path());
        assert_eq!(records.all().0, []);
        let good = record("good", State::Running, 1.0);
        records.write(&good).unwrap();
        let dir = user.path().join(".local/state/outlast/sessions");
        let whole = fs::read(dir.join("good.json")).unwrap();
        fs::write(dir.join("cut.json"), &whole[..whole.len() / 2]).unwrap();
        fs::write(dir.join("long.json"), vec![b' '; (1 << 20) + 1]).unwrap();
        fs::write(dir.join("other.json"), &whole).unwrap();
        fs::write(dir.join("good.settings.json"), "{}").unwrap();
        let (found, mut unusable) = records.all();
        assert_eq!(found, [good]);
        unusable.sort_by(|one, other| one.0.cmp(&other.0));
        let named: Vec<_> = unusable.iter().map(|(path, _)| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(named, ["cut.json", "long.json", "other.json"]);
        assert_eq!(unusable[0].1.to_string(), "it is not JSON");
        assert_eq!(unusable[2].1.to_string(), OTHER_SESSION);
    }

    #[test]
    fn only_the_oldest_ended_records_are_removed() {
        let user = tempfile::tempdir().unwrap();
        let records = Records::of(user.path());
        records.write(&record("runs", State::Running, 0.0)).unwrap();
        for number in 0..=ENDED_MAX {
            records.write(&record(&format!("e{number}"), State::Ended, 1.0 + number as f64)).unwrap();
        }
        records.prune();
        let is_there = |id: &str| records.read(id).unwrap().is_some();
        assert_eq!((is_there("runs"), is_there("e0"), is_there("e1")), (true, false, true));
    }
}
