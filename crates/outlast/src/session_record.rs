//! What is known of each session on disk, from its start: enough for a later outlast to go on with the same conversation.
//! One file for each session, `sessions/<id>.json` in the user's state directory, readable by the user only.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::{home, os};

/// Of the format. A file of another version is not read.
const VERSION: u64 = 1;
/// A longer file is not read, and a record that would be longer is not written.
const RECORD_MAX: u64 = 1 << 20;
/// So many records of sessions that ended are kept; with one more, the oldest is removed.
const ENDED_MAX: usize = 256;
/// Files that are looked at to find them.
const FILES_MAX: usize = 10_000;

/// One session.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionRecord {
    pub id: String,
    /// The profile, such as `claude`.
    pub agent: String,
    /// The agent's command, as the user wrote it.
    pub command: Vec<String>,
    /// Where the agent works.
    pub cwd: PathBuf,
    pub document: Option<PathBuf>,
    /// The conversation that the agent is in, once it is known.
    pub conversation: Option<String>,
    pub state: State,
    /// Seconds since 1970.
    pub updated: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It runs, or it was interrupted: outlast was killed, lost its terminal, or the machine went down.
    Running,
    /// Its user ended it.
    Ended,
}

/// The directory of all records.
#[derive(Clone, Debug)]
pub struct Records(PathBuf);

impl Records {
    pub fn of(user_home: &Path) -> Records {
        Records(home::state_dir(user_home).join("sessions"))
    }

    pub fn read(&self, id: &str) -> Option<SessionRecord> {
        read(&self.path(id)).filter(|record| record.id == id)
    }

    /// Whole or not at all.
    pub fn write(&self, record: &SessionRecord) -> io::Result<()> {
        home::make_private(&self.0)?;
        os::close_own_dir(&self.0)?;
        let text = format!("{}\n", record.to_json());
        if text.len() as u64 > RECORD_MAX {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "its command is too long"));
        }
        home::write_private(&self.path(&record.id), text.as_bytes())
    }

    /// Removes the oldest records of sessions that ended, beyond the limit.
    pub fn prune(&self) {
        let files = fs::read_dir(&self.0).into_iter().flatten().flatten().take(FILES_MAX).map(|file| file.path());
        let mut ended: Vec<(f64, PathBuf)> = files
            .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
            .filter_map(|path| Some((read(&path).filter(|record| record.state == State::Ended)?.updated, path)))
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

fn read(path: &Path) -> Option<SessionRecord> {
    SessionRecord::from_json(&serde_json::from_slice(&os::read_own(path, RECORD_MAX).ok()?).ok()?)
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
            "conversation": self.conversation,
            "state": match self.state { State::Running => "running", State::Ended => "ended" },
            "updated": self.updated,
        })
    }

    fn from_json(value: &Value) -> Option<SessionRecord> {
        if value["v"].as_u64() != Some(VERSION) {
            return None;
        }
        let text = |member: &str| value[member].as_str().map(str::to_owned);
        let command = value["command"].as_array()?.iter().map(|word| word.as_str().map(str::to_owned));
        Some(SessionRecord {
            id: text("id")?,
            agent: text("agent")?,
            command: command.collect::<Option<Vec<_>>>()?,
            cwd: text("cwd")?.into(),
            document: text("document").map(PathBuf::from),
            conversation: text("conversation"),
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
            conversation: Some("c".to_owned()),
            state,
            updated,
        }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let user = tempfile::tempdir().unwrap();
        let records = Records::of(user.path());
        assert_eq!(records.read("s"), None);
        let first = record("s", State::Running, 1.0);
        records.write(&first).unwrap();
        assert_eq!(records.read("s"), Some(first));
        let path = user.path().join(".local/state/outlast/sessions/s.json");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        // Unknown members are ignored, unknown versions and broken files are not read.
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace("\"v\":1", "\"new\":true,\"v\":1")).unwrap();
        assert!(records.read("s").is_some());
        fs::write(&path, text.replace("\"v\":1", "\"v\":2")).unwrap();
        assert_eq!(records.read("s"), None);
        fs::write(&path, "{").unwrap();
        assert_eq!(records.read("s"), None);
        let long = SessionRecord { command: vec!["x".repeat(1 << 20)], ..record("long", State::Running, 1.0) };
        assert!(records.write(&long).is_err());
        assert_eq!(records.read("long"), None);
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
        assert!(records.read("runs").is_some());
        assert_eq!((records.read("e0"), records.read("e1").is_some()), (None, true));
    }
}
