//! The conversation of a codex that has not said which it is: codex keeps each in a file of its own, which names its id
//! and its directory in the first line, and which it has open for as long as it works on it.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use serde_json::Value;

/// The first line of a file; what is longer is not read.
const FIRST_LINE_MAX: u64 = 256 << 10;
/// So many of the newest days are looked through: a session may go on past midnight.
const DAYS_MAX: usize = 2;
/// So many files are looked into.
const FILES_MAX: usize = 64;
/// A file may be dated by a clock that is read less finely than ours.
const SLACK: Duration = Duration::from_secs(1);

/// The conversation that a codex works on, by the files it has open. With two it is at neither for certain.
pub fn among(open: &[PathBuf]) -> Option<String> {
    let mut found: Vec<String> =
        open.iter().filter(|file| is_rollout(file)).filter_map(|file| conversation_of(file, None)).collect();
    found.dedup();
    (found.len() == 1).then(|| found.remove(0))
}

/// The only conversation that was begun in this directory since then. If there are two, it cannot be known which one is
/// ours, and somebody else's is worse than none.
pub fn find(codex_home: &Path, cwd: &Path, since: SystemTime) -> Option<String> {
    let since = since.checked_sub(SLACK)?;
    let mut days = vec![codex_home.join("sessions")];
    // Year, month, day.
    for _ in 0..3 {
        days = days.iter().flat_map(|dir| newest_first(dir)).collect();
        days.truncate(DAYS_MAX);
    }
    let files = days.iter().flat_map(|day| newest_first(day)).filter(|file| is_rollout(file)).take(FILES_MAX);
    let mut found = files.filter(|file| is_newer(file, since)).filter_map(|file| conversation_of(&file, Some(cwd)));
    let first = found.next()?;
    found.next().is_none().then_some(first)
}

/// Their names begin with their dates.
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
    // Where a system does not tell when a file was made, its conversation is not ours for certain.
    fs::metadata(file).and_then(|metadata| metadata.created()).is_ok_and(|created| created >= since)
}

/// Only if it was begun in this directory, if that matters.
fn conversation_of(file: &Path, cwd: Option<&Path>) -> Option<String> {
    let mut line = Vec::new();
    BufReader::new(File::open(file).ok()?.take(FIRST_LINE_MAX)).read_until(b'\n', &mut line).ok()?;
    let first: Value = serde_json::from_slice(&line).ok()?;
    let about = if first["payload"].is_object() { &first["payload"] } else { &first };
    let id = about["id"].as_str()?;
    let is_named = file.file_name()?.to_string_lossy().contains(id);
    let is_here = cwd.is_none_or(|cwd| about["cwd"].as_str().is_some_and(|its| Path::new(its) == cwd));
    (is_named && is_here).then(|| id.to_owned())
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
    fn only_what_is_certain_is_found() {
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
        // One that is older than the agent is not its own.
        assert_eq!(super::find(home, Path::new("/a"), SystemTime::now() + Duration::from_secs(60)), None);
        // Two may be anybody's.
        write(home, "2026/11/15", "three", "/a");
        assert_eq!(find("/a"), None);
    }

    #[test]
    fn what_a_codex_has_open_is_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path();
        write(home, "2026/11/15", "one", "/a");
        write(home, "2026/11/15", "two", "/a");
        let file = |name: &str| home.join("sessions/2026/11/15").join(name);
        let (one, two) = (file("rollout-2026-11-15T10-00-00-one.jsonl"), file("rollout-2026-11-15T10-00-00-two.jsonl"));
        fs::write(file("rollout-bad.jsonl"), "nonsense").unwrap();
        let other = home.join("log.jsonl");
        assert_eq!(among(&[other.clone(), one.clone(), file("rollout-bad.jsonl")]).as_deref(), Some("one"));
        assert_eq!(among(&[one, two]), None, "it may be at either");
        assert_eq!(among(&[other, file("rollout-2026-11-15T10-00-00-gone.jsonl")]), None);
    }
}
