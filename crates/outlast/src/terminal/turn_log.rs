//! Reads what the agent writes down of its turns while `send` waits for the record of one: claude's transcript, codex's
//! rollout file. What a line says is decided in core (`turn_record`).

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use outlast_core::{agent::Kind, send::Source, turn_record};

use super::Terminal;
use crate::{os, rollout, transcript};

/// How often the files are looked at while a record is awaited.
const LOOK_EVERY: Duration = Duration::from_millis(150);
/// So much is read at once. A line that is longer is skipped.
const READ_MAX: u64 = 4 << 20;
/// A file may be dated by a clock that is read less finely than ours.
const SLACK: Duration = Duration::from_secs(1);

/// Since Enter was pressed.
#[derive(Debug)]
pub(super) struct TurnLog {
    begun: SystemTime,
    /// How much of each file is known.
    read: BTreeMap<PathBuf, u64>,
    pub(super) look_at: Instant,
}

impl TurnLog {
    fn new(files: &[PathBuf], now: Instant) -> TurnLog {
        let length = |file: &PathBuf| Some((file.clone(), fs::metadata(file).ok()?.len()));
        TurnLog { begun: SystemTime::now(), read: files.iter().filter_map(length).collect(), look_at: now + LOOK_EVERY }
    }

    /// The lines that were added to a file. One that is new to us counts from its beginning only if it was made since:
    /// what stands in an older one may be an earlier turn with the same text.
    fn added(&mut self, file: &Path) -> Vec<Vec<u8>> {
        let Ok(about) = fs::metadata(file) else { return Vec::new() };
        let is_new = || about.created().is_ok_and(|created| created + SLACK >= self.begun);
        let from = match self.read.get(file) {
            Some(read) => *read,
            None if is_new() => 0,
            None => about.len(),
        };
        let mut text = Vec::new();
        let read = File::open(file).and_then(|mut file| {
            file.seek(SeekFrom::Start(from))?;
            file.take(READ_MAX).read_to_end(&mut text)
        });
        if read.is_err() {
            return Vec::new();
        }
        let whole = match memchr::memrchr(b'\n', &text) {
            Some(end) => end + 1,
            None if text.len() as u64 == READ_MAX => text.len(),
            None => 0,
        };
        self.read.insert(file.to_owned(), from + whole as u64);
        text[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).map(<[u8]>::to_vec).collect()
    }
}

impl Terminal {
    /// Enter is about to be pressed: what is written down from now on counts.
    pub(super) fn await_record(&mut self) {
        let files = self.turn_files();
        self.turn_log = Some(TurnLog::new(&files, Instant::now()));
    }

    /// When the files are to be looked at next.
    pub(super) fn reads_turns_at(&self) -> Option<Instant> {
        self.turn_log.as_ref().map(|log| log.look_at)
    }

    /// Looks whether a turn was written down.
    pub(super) fn read_turns(&mut self) {
        if !self.sends.awaits_record() {
            self.turn_log = None;
            return;
        }
        let (kind, files) = (self.agent.kind(), self.turn_files());
        let Some(log) = &mut self.turn_log else { return };
        log.look_at = Instant::now() + LOOK_EVERY;
        let lines: Vec<Vec<u8>> = files.iter().flat_map(|file| log.added(file)).collect();
        let source = if kind == Kind::Codex { Source::Rollout } else { Source::Transcript };
        for text in lines.iter().flat_map(|line| turn_record::submitted(kind, line)) {
            let actions = self.sends.recorded(&text, source, Instant::now());
            self.act_on_sends(actions);
        }
    }

    fn turn_files(&self) -> Vec<PathBuf> {
        let Some(child) = self.child.as_ref().filter(|child| child.pid > 0) else { return Vec::new() };
        let Some(home) = self.agents_home() else { return Vec::new() };
        match self.agent.kind() {
            Kind::Codex => rollout::files(&home, &self.place.cwd.path, &os::open_files(child.pid), child.since),
            Kind::Claude => self.agent.conversation().and_then(|id| transcript::file(&home, id)).into_iter().collect(),
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_that_were_added_count() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("t.jsonl");
        fs::write(&file, "old\n").unwrap();
        let mut log = TurnLog::new(std::slice::from_ref(&file), Instant::now());
        assert!(log.added(&file).is_empty());
        fs::write(&file, "old\nnew\nhal").unwrap();
        assert_eq!(log.added(&file), [b"new"]);
        fs::write(&file, "old\nnew\nhalf\n").unwrap();
        assert_eq!(log.added(&file), [b"half"]);
        // A conversation that begins with this turn.
        let begun = dir.path().join("begun.jsonl");
        fs::write(&begun, "first\n").unwrap();
        assert_eq!(log.added(&begun), [b"first"]);
        log.begun = SystemTime::now() + Duration::from_secs(60);
        let older = dir.path().join("older.jsonl");
        fs::write(&older, "first\n").unwrap();
        assert!(log.added(&older).is_empty(), "it was there before");
        fs::write(&older, "first\nsecond\n").unwrap();
        assert_eq!(log.added(&older), [b"second"]);
        assert!(log.added(&dir.path().join("missing")).is_empty());
    }
}
