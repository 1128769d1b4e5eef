//! What claude has written of a conversation: it is in a file that is named after the conversation, in a folder that is
//! named after the directory. The file begins at the first turn, and a moment later the turn is in it.

use std::{
    fs::{self, File},
    io::{ErrorKind, Read},
    path::{Path, PathBuf},
};

use outlast_core::agent::Kept;
use serde_json::Value;

/// So many folders are looked into; in one of them all conversations of a directory are.
const FOLDERS_MAX: usize = 10_000;
/// Where the first turn is, if there is one: what comes before it is short.
const BEGINNING_MAX: u64 = 1 << 20;
/// What claude keeps of a running process; a longer file is not one.
const SESSION_MAX: u64 = 256 << 10;
/// In the line of a turn.
const TURN: &[u8] = b"\"type\":\"user\"";

/// The file of a conversation, if there is one.
pub fn file(claude_home: &Path, id: &str) -> Option<PathBuf> {
    let name = format!("{id}.jsonl");
    let folders = fs::read_dir(claude_home.join("projects")).ok()?;
    folders.flatten().take(FOLDERS_MAX).map(|folder| folder.path().join(&name)).find(|file| file.is_file())
}

/// In any folder: how a directory becomes its name is claude's own affair. Where nothing can be looked up, there may be
/// turns.
pub fn look(claude_home: &Path, id: &str) -> Kept {
    let name = format!("{id}.jsonl");
    let folders = match fs::read_dir(claude_home.join("projects")) {
        Ok(folders) => folders,
        Err(error) if error.kind() == ErrorKind::NotFound => return Kept::Nothing,
        Err(_) => return Kept::Turns,
    };
    for folder in folders.flatten().take(FOLDERS_MAX) {
        let file = match File::open(folder.path().join(&name)) {
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

/// The conversation that a claude is in, by the file it keeps of itself while it runs. The first process that has one
/// counts: those below it may be further agents that it started.
pub fn session_of(claude_home: &Path, family: &[u32]) -> Option<String> {
    family.iter().find_map(|pid| {
        let mut text = String::new();
        let file = File::open(claude_home.join("sessions").join(format!("{pid}.json"))).ok()?;
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
    fn a_transcript_is_found_whatever_its_folder_is_called() {
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
    fn a_running_claude_says_which_conversation_it_is_in() {
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
