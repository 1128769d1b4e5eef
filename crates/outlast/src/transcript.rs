//! What claude has written of a conversation: it is in a file that is named after the conversation, in a folder that is
//! named after the directory. The file begins at the first turn, and a moment later the turn is in it.

use std::{
    fs::{self, File},
    io::{ErrorKind, Read},
    path::Path,
};

use outlast_core::agent::Kept;

/// So many folders are looked into; in one of them all conversations of a directory are.
const FOLDERS_MAX: usize = 10_000;
/// Where the first turn is, if there is one: what comes before it is short.
const BEGINNING_MAX: u64 = 1 << 20;
/// In the line of a turn.
const TURN: &[u8] = b"\"type\":\"user\"";

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
}
