//! Reads the agent's own record of turns while `send` waits for one: claude's transcript, codex's rollout file. What
//! a line means is decided in core (`turn_record`).

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use outlast_core::{agent::Kind, send::Source, turn_record};
use outlast_os as os;

use super::Terminal;
use crate::{
    agent::{rollout, transcript},
    child::Child,
};

/// How often the files are read while a record is awaited.
const LOOK_EVERY: Duration = Duration::from_millis(150);
/// Bytes per read. A longer line is skipped.
const READ_MAX: u64 = 4 << 20;
/// File times may have a coarser clock.
const SLACK: Duration = Duration::from_secs(1);

/// Since Enter was pressed.
#[derive(Debug)]
pub(super) struct TurnLog {
    begun: SystemTime,
    /// How much of each file was read.
    read: BTreeMap<PathBuf, u64>,
    pub(super) look_at: Instant,
}

impl TurnLog {
    fn new(files: &[PathBuf], now: Instant) -> TurnLog {
        let length = |file: &PathBuf| Some((file.clone(), fs::metadata(file).ok()?.len()));
        TurnLog { begun: SystemTime::now(), read: files.iter().filter_map(length).collect(), look_at: now + LOOK_EVERY }
    }

    /// The lines that were added to a file. A file that is new to us counts from its beginning only if it was created
    /// since: an older one may contain an earlier turn with the same text.
    fn added(&mut self, file: &Path) -> Vec<Vec<u8>> {
        let Ok(about) = fs::metadata(file) else { return Vec::new() };
        let is_new = || about.created().is_ok_and(|created| created + SLACK >= self.begun);
        let from = match self.read.get(file) {
            Some(read) => *read,
            None if is_new() => 0,
            None => about.len(),
        };
        let mut text = Vec::new();
        let read = os::open_named(file).and_then(|mut file| {
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
    /// Enter is about to be pressed: records from now on count.
    pub(super) fn await_record(&mut self) {
        let files = self.turn_files();
        self.turn_log = Some(TurnLog::new(&files, Instant::now()));
    }

    /// When the files are read next.
    pub(super) fn reads_turns_at(&self) -> Option<Instant> {
        self.turn_log.as_ref().map(|log| log.look_at)
    }

    /// Reads new records of turns.
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

    pub(super) fn turn_files(&self) -> Vec<PathBuf> {
        let (Some(running), Some(pid)) = (&self.running, self.process().and_then(Child::pid)) else {
            return Vec::new();
        };
        let Some(home) = self.agents_home() else { return Vec::new() };
        match self.agent.kind() {
            Kind::Codex => rollout::files(&home, &self.place.cwd.path, &os::open_files(pid), running.since),
            Kind::Claude => self.agent.conversation().and_then(|id| transcript::file(&home, id)).into_iter().collect(),
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_added_lines_count() {
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
