//! What claude has stored of a conversation: a file named after the conversation, in a folder named after the
//! directory. Claude creates it at the first turn, and writes the turn a moment later.

use std::{
    fs,
    io::{ErrorKind, Read},
    path::{Path, PathBuf},
};

use outlast_core::agent::Kept;
use outlast_os as os;
use serde_json::Value;

/// How many folders are searched; one folder holds all conversations of a directory.
const FOLDERS_MAX: usize = 10_000;
/// How much of a file is searched for the first turn: what precedes it is short.
const BEGINNING_MAX: u64 = 1 << 20;
/// The longest file that describes a running claude.
const SESSION_MAX: u64 = 256 << 10;
/// Part of the line of each turn.
const TURN: &[u8] = b"\"type\":\"user\"";

/// The file of a conversation, if there is one.
pub(crate) fn file(claude_home: &Path, id: &str) -> Option<PathBuf> {
    let name = format!("{id}.jsonl");
    let folders = fs::read_dir(claude_home.join("projects")).ok()?;
    folders.flatten().take(FOLDERS_MAX).map(|folder| folder.path().join(&name)).find(|file| file.is_file())
}

/// Searches all folders, because the way in which claude names them may change. If the folders cannot be read, the
/// result is that there may be turns.
pub(crate) fn look(claude_home: &Path, id: &str) -> Kept {
    let name = format!("{id}.jsonl");
    let folders = match fs::read_dir(claude_home.join("projects")) {
        Ok(folders) => folders,
        Err(error) if error.kind() == ErrorKind::NotFound => return Kept::Nothing,
        Err(_) => return Kept::Turns,
    };
    for folder in folders.flatten().take(FOLDERS_MAX) {
        let file = match os::open_named(&folder.path().join(&name)) {
            Ok(file) => file,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => continue,
            Err(_) => return Kept::Turns,
        };
        let mut beginning = Vec::new();
        let read = file.take(BEGINNING_MAX).read_to_end(&mut beginning);
        let is_turn = read.is_err() || memchr::memmem::find(&beginning, TURN).is_some();
        return if is_turn { Kept::Turns } else { Kept::NoTurn };
    }
    Kept::Nothing
}

/// The current conversation of a claude, from the file that it keeps while it runs. The first process that has such a
/// file counts: processes below it may be other agents that it started.
pub(crate) fn session_of(claude_home: &Path, family: &[u32]) -> Option<String> {
    family.iter().find_map(|pid| {
        let mut text = String::new();
        let file = os::open_named(&claude_home.join("sessions").join(format!("{pid}.json"))).ok()?;
        file.take(SESSION_MAX).read_to_string(&mut text).ok()?;
        let about: Value = serde_json::from_str(&text).ok()?;
        let is_its_own = about["pid"].as_u64() == Some(u64::from(*pid));
        about["sessionId"].as_str().filter(|_| is_its_own).map(str::to_owned)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transcript_is_found_in_a_folder_of_any_name() {
        let home = tempfile::tempdir().unwrap();
        assert_eq!(look(home.path(), "one"), Kept::Nothing, "claude never wrote anything here");
        let folder = home.path().join("projects/-srv-project");
        fs::create_dir_all(&folder).unwrap();
        fs::write(home.path().join("projects/file"), "").unwrap();
        fs::write(folder.join("one.jsonl"), "{\"type\":\"mode\"}\n").unwrap();
        assert_eq!((look(home.path(), "one"), look(home.path(), "two")), (Kept::NoTurn, Kept::Nothing));
        fs::write(folder.join("one.jsonl"), "{\"type\":\"mode\"}\n{\"id\":1,\"type\":\"user\"}\n").unwrap();
        assert_eq!(look(home.path(), "one"), Kept::Turns);
        let file = home.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(look(&file, "one"), Kept::Turns, "not known, so it may be");
    }

    #[test]
    fn a_running_claude_reports_its_conversation() {
        let home = tempfile::tempdir().unwrap();
        assert_eq!(session_of(home.path(), &[7]), None);
        fs::create_dir_all(home.path().join("sessions")).unwrap();
        let write = |pid: u32, text: &str| fs::write(home.path().join(format!("sessions/{pid}.json")), text).unwrap();
        write(7, r#"{"pid":7,"sessionId":"one","status":"idle"}"#);
        write(8, r#"{"pid":8,"sessionId":"two"}"#);
        write(9, r#"{"pid":1,"sessionId":"of another process"}"#);
        write(10, "{");
        assert_eq!(session_of(home.path(), &[6, 7, 8]).as_deref(), Some("one"));
        assert_eq!(session_of(home.path(), &[9, 10, 8]).as_deref(), Some("two"));
        assert_eq!(session_of(home.path(), &[9, 10]), None);
    }
}
