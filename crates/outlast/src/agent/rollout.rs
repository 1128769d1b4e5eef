//! Finds the conversation of a codex that has not reported its id. Codex keeps each conversation in its own file,
//! whose first line names the id and the directory, and which stays open while codex works on it.

use std::{
    fs,
    io::{BufRead, BufReader, ErrorKind, Read},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use outlast_core::agent::Kept;
use outlast_os as os;
use serde_json::Value;

/// The longest first line of a file that is read.
const FIRST_LINE_MAX: u64 = 256 << 10;
/// How many of the newest days are searched: a session may continue past midnight.
const DAYS_MAX: usize = 2;
/// How many days are searched for a file of a known name.
const ALL_DAYS_MAX: usize = 4000;
/// How many files are opened.
const FILES_MAX: usize = 64;
/// The clock of a file system may have a lower resolution than the system clock.
const SLACK: Duration = Duration::from_secs(1);

/// The current conversation of a codex, by the files it has open. It keeps the files of all conversations since its
/// start open; the newest lock belongs to the current one, even before anything is written. In versions without locks
/// it is the file that was written last.
pub(crate) fn current(open: &[PathBuf]) -> Option<String> {
    let dated = |file: &PathBuf| fs::metadata(file).and_then(|about| about.modified()).ok();
    let heads: Vec<(&PathBuf, Head)> =
        open.iter().filter(|file| is_rollout(file)).filter_map(|file| Some((file, head_of(file)?))).collect();
    let is_below = |id: &str| heads.iter().any(|(_, head)| head.id == id && head.is_below);
    let locks = open.iter().filter_map(|file| Some((dated(file)?, lock_id(file)?)));
    let locked = locks.filter(|(_, id)| !is_below(id)).max();
    let written = || {
        let own = heads.iter().filter(|(_, head)| !head.is_below);
        own.filter_map(|(file, head)| Some((dated(file)?, head.id.clone()))).max()
    };
    locked.or_else(written).map(|(_, id)| id)
}

/// The files to which a codex writes its turns: those it has open. Where open files cannot be listed, those of this
/// directory that were created since its start.
pub(crate) fn files(codex_home: &Path, cwd: &Path, open: &[PathBuf], since: SystemTime) -> Vec<PathBuf> {
    if cfg!(target_os = "linux") {
        return open.iter().filter(|file| is_rollout(file)).cloned().collect();
    }
    let Some(since) = since.checked_sub(SLACK) else { return Vec::new() };
    newest(codex_home).filter(|file| is_newer(file, since) && conversation_of(file, cwd).is_some()).collect()
}

/// What codex has stored of a conversation. It writes nothing before the first turn.
pub(crate) fn look(codex_home: &Path, id: &str) -> Kept {
    let sessions = codex_home.join("sessions");
    match fs::read_dir(&sessions) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Kept::Nothing,
        Err(_) => return Kept::Turns,
        Ok(_) => {}
    }
    let mut days = vec![sessions];
    for _ in 0..3 {
        days = days.iter().flat_map(|dir| newest_first(dir)).collect();
        days.truncate(ALL_DAYS_MAX);
    }
    let ending = format!("-{id}.jsonl");
    let is_its = |file: &PathBuf| file.file_name().is_some_and(|name| name.to_string_lossy().ends_with(&ending));
    if days.iter().any(|day| newest_first(day).iter().any(is_its)) { Kept::Turns } else { Kept::Nothing }
}

/// The only conversation that was started in this directory since then. If there are two, none is returned, because
/// one of them belongs to another codex.
pub(crate) fn find(codex_home: &Path, cwd: &Path, since: SystemTime) -> Option<String> {
    let since = since.checked_sub(SLACK)?;
    let mut found =
        newest(codex_home).filter(|file| is_newer(file, since)).filter_map(|file| conversation_of(&file, cwd));
    let first = found.next()?;
    found.next().is_none().then_some(first)
}

/// The newest files.
fn newest(codex_home: &Path) -> impl Iterator<Item = PathBuf> {
    let mut days = vec![codex_home.join("sessions")];
    // Year, month, day.
    for _ in 0..3 {
        days = days.iter().flat_map(|dir| newest_first(dir)).collect();
        days.truncate(DAYS_MAX);
    }
    days.into_iter().flat_map(|day| newest_first(&day)).filter(|file| is_rollout(file)).take(FILES_MAX)
}

/// By name, which begins with the date.
fn newest_first(dir: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    entries.sort_unstable_by(|one, other| other.cmp(one));
    entries
}

fn is_rollout(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with("rollout-") && name.ends_with(".jsonl")
}

fn is_newer(file: &Path, since: SystemTime) -> bool {
    // Without a creation time it is not certain that the conversation belongs to this codex.
    fs::metadata(file).and_then(|metadata| metadata.created()).is_ok_and(|created| created >= since)
}

/// Only if the conversation was started in this directory.
fn conversation_of(file: &Path, cwd: &Path) -> Option<String> {
    let head = head_of(file)?;
    (!head.is_below && head.cwd.as_deref() == Some(cwd)).then_some(head.id)
}

/// The first line of a file.
struct Head {
    id: String,
    cwd: Option<PathBuf>,
    /// It belongs to a subagent, not to the agent that the user talks to.
    is_below: bool,
}

fn head_of(file: &Path) -> Option<Head> {
    let mut line = Vec::new();
    BufReader::new(os::open_named(file).ok()?.take(FIRST_LINE_MAX)).read_until(b'\n', &mut line).ok()?;
    let first: Value = serde_json::from_slice(&line).ok()?;
    let about = if first["payload"].is_object() { &first["payload"] } else { &first };
    let id = about["id"].as_str()?;
    let is_named = file.file_name()?.to_string_lossy().contains(id);
    let is_below = about["source"].get("subagent").is_some()
        || about["thread_source"].as_str().is_some_and(|source| source == "subagent");
    let cwd = about["cwd"].as_str().map(PathBuf::from);
    is_named.then(|| Head { id: id.to_owned(), cwd, is_below })
}

fn lock_id(file: &Path) -> Option<String> {
    let is_lock = file.parent()?.file_name()? == "thread-writer-locks" && file.extension()? == "lock";
    let id = file.file_stem()?.to_str()?;
    (is_lock && !id.starts_with('.')).then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(home: &Path, day: &str, id: &str, cwd: &str) {
        let dir = home.join("sessions").join(day);
        fs::create_dir_all(&dir).unwrap();
        let line = serde_json::json!({"type": "session_meta", "payload": {"id": id, "cwd": cwd}});
        fs::write(dir.join(format!("rollout-2026-11-15T10-00-00-{id}.jsonl")), format!("{line}\nmore\n")).unwrap();
    }

    #[test]
    fn only_an_unambiguous_conversation_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path();
        let before = SystemTime::now();
        let find = |cwd: &str| super::find(home, Path::new(cwd), before);
        assert_eq!(find("/a"), None);
        write(home, "2026/11/14", "one", "/a");
        write(home, "2026/11/15", "two", "/b");
        fs::write(home.join("sessions/2026/11/15/rollout-bad.jsonl"), "nonsense").unwrap();
        fs::write(home.join("sessions/2026/11/15/other.jsonl"), "").unwrap();
        assert_eq!((find("/a").as_deref(), find("/b").as_deref(), find("/c")), (Some("one"), Some("two"), None));
        // A conversation that is older than the agent is not its own.
        assert_eq!(super::find(home, Path::new("/a"), SystemTime::now() + Duration::from_secs(60)), None);
        // With two, it is unknown which one belongs to this agent.
        write(home, "2026/11/15", "three", "/a");
        assert_eq!(find("/a"), None);
    }

    #[test]
    fn codex_is_in_the_conversation_it_opened_last() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path();
        write(home, "2026/11/15", "one", "/a");
        write(home, "2026/11/15", "two", "/a");
        let day = home.join("sessions/2026/11/15");
        let rollout = |id: &str| day.join(format!("rollout-2026-11-15T10-00-00-{id}.jsonl"));
        let below = serde_json::json!({"payload": {"id": "below", "source": {"subagent": "review"}}});
        fs::write(rollout("below"), format!("{below}\n")).unwrap();
        fs::write(rollout("bad"), "nonsense").unwrap();
        let locks = home.join("thread-writer-locks");
        fs::create_dir(&locks).unwrap();
        let lock = |id: &str| locks.join(format!("{id}.lock"));
        let touch = |path: &Path, second: u64| {
            let file = fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(second)).unwrap();
        };
        for (id, second) in [("one", 10), ("two", 20), ("new", 30), ("below", 40), (".coordination", 50)] {
            touch(&lock(id), second);
        }
        touch(&rollout("one"), 60);
        touch(&rollout("two"), 50);
        touch(&rollout("below"), 70);
        let other = home.join("log.jsonl");
        #[rustfmt::skip]
        let table = [
            (vec![lock("one"), rollout("one")],                                     Some("one")),
            (vec![lock("one"), rollout("one"), lock("two"), rollout("two")],        Some("two")),
            // After `/new`, before the first turn.
            (vec![lock("one"), rollout("one"), lock("new"), lock(".coordination")], Some("new")),
            (vec![lock("two"), rollout("two"), lock("below"), rollout("below")],    Some("two")),
            // Without locks.
            (vec![rollout("one"), rollout("two"), rollout("below"), rollout("bad")], Some("one")),
            (vec![other, rollout("gone")],                                          None),
        ];
        for (open, expected) in table {
            assert_eq!(current(&open).as_deref(), expected, "{open:?}");
        }
        assert_eq!((look(home, "one"), look(home, "new")), (Kept::Turns, Kept::Nothing));
        assert_eq!(look(&home.join("missing"), "one"), Kept::Nothing);
    }
}
