//! Reads the records of one replica from the audit log and its rotated files, in the order of their numbers. It follows
//! rotations by the identity of the open file, and decides nothing about what is published.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use outlast_core::cluster::audit_log::Line;
use outlast_os as os;
use serde::de::IgnoredAny;

use crate::state::{
    audit,
    audit_numbers::Opening,
    audit_retention::{self, HELD_MAX},
};

/// How much is read at once. A longer line is skipped; outlast writes none.
const CHUNK: usize = 256 << 10;
/// How often the names of the logs are read again if they were renamed in the meantime. After that the read fails, and
/// can be repeated.
const RENAMED_MAX: usize = 16;
/// How many rotated logs stay open after they were read, because a record may still be added to them. The oldest is
/// closed first.
const OPEN_MAX: usize = 8;

/// One place in the logs, and how to read on from there.
#[derive(Debug)]
pub(crate) struct AuditReader {
    path: PathBuf,
    replica: String,
    opening: Opening,
    place: Option<ReadPosition>,
}

/// Records in the order of their numbers.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Batch {
    pub records: Vec<Line>,
    /// There were no further records at the end of the read.
    pub is_end: bool,
    pub missing: Option<Missing>,
}

/// Records that no local file has any more. They were before the first record of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Missing {
    /// The record before them.
    pub after: u64,
    /// The first record after them.
    pub before: u64,
}

impl AuditReader {
    pub(crate) fn new(path: &Path, replica: &str) -> AuditReader {
        AuditReader { path: path.to_owned(), replica: replica.to_owned(), opening: Opening::of(replica), place: None }
    }

    /// Reads the records after this number, or from the first one on. It returns at most `bytes_max` bytes, counted with
    /// line breaks, but at least one record if there is one. All records that it returns are synced to disk.
    ///
    /// It blocks. To continue after the last batch is quick; any other number is looked for in all files.
    pub(crate) fn read(&mut self, after: Option<u64>, bytes_max: usize) -> io::Result<Batch> {
        // After an error the place is empty, so the next read begins anew.
        let mut place = match self.place.take().filter(|place| Some(place.number) == after) {
            Some(place) => place,
            None => match self.find(after)? {
                Some(place) => place,
                None => return Ok(Batch { is_end: true, ..Batch::default() }),
            },
        };
        let mut taken = Taken { batch: Batch::default(), bytes_left: bytes_max };
        taken.batch.is_end = place.read(self, &mut taken)?;
        place.sync();
        self.place = Some(place);
        Ok(taken.batch)
    }

    /// The place before the first record after this number: in the newest file that begins before it, or at the start
    /// of the oldest file.
    fn find(&self, after: Option<u64>) -> io::Result<Option<ReadPosition>> {
        for _ in 0..RENAMED_MAX {
            match self.find_among(after, &Names::read(&self.path)?) {
                Ok(Found::Place(place)) => return Ok(Some(place)),
                Ok(Found::NoFiles) => return Ok(None),
                Ok(Found::Renamed) => {}
                Err(error) => return Err(error),
            }
        }
        Err(renamed_too_often())
    }

    fn find_among(&self, after: Option<u64>, names: &Names) -> io::Result<Found> {
        let number = after.unwrap_or_default();
        let mark = audit_retention::stored(&self.path, &self.replica);
        // Records before this one are not missing, but if the stream is empty, it is not known which it had.
        let known = match after {
            Some(after) => Some(mark.map_or(after, |mark| mark.base.max(after))),
            None => mark.map(|mark| mark.published),
        };
        let mut oldest = None;
        for name in &names.newest_first {
            let Some(mut tail) = name.open()? else { return Ok(Found::Renamed) };
            let first = tail.find_own(&self.opening)?;
            if after.is_some() && first.is_some_and(|first| first <= number.saturating_add(1)) {
                return Ok(Found::Place(ReadPosition { number, current: tail, older: Vec::new(), unsure_since: None }));
            }
            tail.offset = 0;
            oldest = Some(tail);
        }
        let Some(current) = oldest else { return Ok(Found::NoFiles) };
        Ok(Found::Place(ReadPosition { number, current, older: Vec::new(), unsure_since: known }))
    }
}

enum Found {
    Place(ReadPosition),
    NoFiles,
    /// A file has another name by now.
    Renamed,
}

/// Where the next record is expected.
#[derive(Debug)]
struct ReadPosition {
    /// The last record before this place.
    number: u64,
    current: Tail,
    /// The files before `current`, as far as no record was found since. The writer may have opened one of them before
    /// a rotation, and may write one more record to it after the rotation. It has not done so if a later record exists.
    older: Vec<Tail>,
    /// The file with the record after this one is gone, or was not found. If the next record has not the next number,
    /// records are missing.
    unsure_since: Option<u64>,
}

/// A batch under construction.
struct Taken {
    batch: Batch,
    bytes_left: usize,
}

impl ReadPosition {
    /// Returns whether the end was reached.
    fn read(&mut self, reader: &AuditReader, taken: &mut Taken) -> io::Result<bool> {
        loop {
            if !self.read_older(reader, taken)? {
                return Ok(false);
            }
            let is_here = self.older.is_empty() || self.current.find_own(&reader.opening)?.is_some();
            if is_here {
                // Now each earlier record has been written.
                if !self.read_older(reader, taken)? {
                    return Ok(false);
                }
                self.sync();
                self.older.clear();
                if !self.current.read(reader, &mut self.number, &mut self.unsure_since, taken)? {
                    return Ok(false);
                }
            }
            let Some(next) = self.next(&reader.path)? else { return Ok(true) };
            if self.older.len() == OPEN_MAX {
                self.older.remove(0).sync();
            }
            self.older.push(std::mem::replace(&mut self.current, next));
        }
    }

    /// Returns whether all was read.
    fn read_older(&mut self, reader: &AuditReader, taken: &mut Taken) -> io::Result<bool> {
        for tail in &mut self.older {
            if !tail.read(reader, &mut self.number, &mut self.unsure_since, taken)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The file after the current one.
    fn next(&mut self, path: &Path) -> io::Result<Option<Tail>> {
        for _ in 0..RENAMED_MAX {
            let key = Key::of(&self.current.file)?;
            if Key::at(path)? == Some(key) {
                return Ok(None);
            }
            let names = Names::read(path)?;
            let found = names.newest_first.iter().position(|name| name.key == key);
            let next = match found {
                Some(0) => return Ok(None),
                Some(index) => &names.newest_first[index - 1],
                // The current file was removed. All others are newer, but some may have been removed with it.
                None => match names.newest_first.last() {
                    Some(name) => name,
                    None => return Ok(None),
                },
            };
            if let Some(tail) = next.open()? {
                if found.is_none() {
                    self.unsure_since.get_or_insert(self.number);
                }
                return Ok(Some(tail));
            }
        }
        Err(renamed_too_often())
    }

    fn sync(&mut self) {
        self.older.iter_mut().for_each(Tail::sync);
        self.current.sync();
    }
}

fn renamed_too_often() -> io::Error {
    io::Error::new(io::ErrorKind::WouldBlock, "the audit log is renamed again and again")
}

/// The part of a log that was not read yet.
#[derive(Debug)]
struct Tail {
    file: File,
    /// The start of a line, or within a line that is too long.
    offset: u64,
    is_in_long_line: bool,
    /// Records up to here were returned.
    returned: u64,
    /// Everything up to here is on disk.
    synced: u64,
}

impl Tail {
    fn new(file: File) -> Tail {
        Tail { file, offset: 0, is_in_long_line: false, returned: 0, synced: 0 }
    }

    /// Takes records until the end of the file or of the room. Returns whether it is the end of the file.
    fn read(
        &mut self,
        reader: &AuditReader,
        last: &mut u64,
        unsure_since: &mut Option<u64>,
        taken: &mut Taken,
    ) -> io::Result<bool> {
        loop {
            let chunk = match self.chunk()? {
                Chunk::Lines(chunk) => chunk,
                Chunk::Part(part) => {
                    // It is no record yet, but its number was used.
                    let number = reader.opening.number(&part).filter(|_| !self.is_in_long_line);
                    let is_next = |after: u64| number.is_some_and(|number| number <= after.saturating_add(1));
                    *unsure_since = unsure_since.filter(|after| !is_next(*after));
                    return Ok(true);
                }
            };
            let mut start = 0;
            for end in memchr::memchr_iter(b'\n', &chunk) {
                let line = &chunk[start..end];
                let is_rest = std::mem::take(&mut self.is_in_long_line);
                let number = reader.opening.number(line).filter(|number| !is_rest && *number > *last);
                let gap = number.and_then(|number| unsure_since.filter(|after| after.saturating_add(1) < number));
                if number.is_some() && gap.is_none() {
                    *unsure_since = None;
                }
                // A line that its writer could not finish is no record.
                if let Some(number) = number.filter(|_| serde_json::from_slice::<IgnoredAny>(line).is_ok()) {
                    let bytes = Bytes::copy_from_slice(&chunk[start..=end]);
                    // A batch has no gap between its records.
                    if (taken.bytes_left < bytes.len() || gap.is_some()) && !taken.batch.records.is_empty() {
                        self.offset += start as u64;
                        return Ok(false);
                    }
                    *unsure_since = None;
                    taken.batch.missing = taken.batch.missing.or(gap.map(|after| Missing { after, before: number }));
                    taken.bytes_left = taken.bytes_left.saturating_sub(bytes.len());
                    taken.batch.records.push(Line { number, bytes });
                    *last = number;
                    self.returned = self.offset + end as u64 + 1;
                }
                start = end + 1;
            }
            self.skip(start, chunk.len());
        }
    }

    /// The number of the next line of this replica, complete or not. Lines before it are skipped.
    fn find_own(&mut self, opening: &Opening) -> io::Result<Option<u64>> {
        loop {
            let Chunk::Lines(chunk) = self.chunk()? else { return Ok(None) };
            let mut start = 0;
            for end in memchr::memchr_iter(b'\n', &chunk) {
                let is_rest = std::mem::take(&mut self.is_in_long_line);
                if let Some(number) = opening.number(&chunk[start..end]).filter(|_| !is_rest) {
                    self.offset += start as u64;
                    return Ok(Some(number));
                }
                start = end + 1;
            }
            self.skip(start, chunk.len());
        }
    }

    /// The bytes from the offset on.
    fn chunk(&mut self) -> io::Result<Chunk> {
        if self.file.metadata()?.len() < self.offset {
            // It was truncated. Lines that were read already are told by their numbers.
            *self = Tail { is_in_long_line: false, offset: 0, returned: 0, synced: 0, file: self.file.try_clone()? };
        }
        let mut chunk = Vec::with_capacity(CHUNK);
        self.file.seek(SeekFrom::Start(self.offset))?;
        self.file.by_ref().take(CHUNK as u64).read_to_end(&mut chunk)?;
        let has_line = chunk.len() == CHUNK || memchr::memchr(b'\n', &chunk).is_some();
        Ok(if has_line { Chunk::Lines(chunk) } else { Chunk::Part(chunk) })
    }

    /// Skips the lines of a chunk; `lines` is where the last one ends.
    fn skip(&mut self, lines: usize, length: usize) {
        if lines > 0 {
            self.offset += lines as u64;
        } else {
            self.offset += length as u64;
            self.is_in_long_line = true;
        }
    }

    /// A record is published only if it survives a failure of the machine; otherwise its number could be used a second
    /// time. If this fails, the writer of the log reports it.
    fn sync(&mut self) {
        if self.synced < self.returned {
            let length = self.file.metadata().map_or(self.returned, |found| found.len());
            let _ = self.file.sync_data();
            self.synced = length.max(self.returned);
        }
    }
}

/// A part of a log.
enum Chunk {
    /// With at least one line break, or with a part of a line that is too long.
    Lines(Vec<u8>),
    /// The last line, which is not finished, or nothing.
    Part(Vec<u8>),
}

/// The logs at one moment.
#[derive(Debug, PartialEq, Eq)]
struct Names {
    newest_first: Vec<Name>,
}

#[derive(Debug, PartialEq, Eq)]
struct Name {
    path: PathBuf,
    key: Key,
}

impl Names {
    /// Logs are renamed only to higher numbers, and the names are read from the lowest on, so none is missed. If two
    /// passes find the same, all names were valid between them.
    fn read(path: &Path) -> io::Result<Names> {
        let mut before = Names::pass(path)?;
        for _ in 0..RENAMED_MAX {
            let names = Names::pass(path)?;
            if names == before {
                return Ok(names);
            }
            before = names;
        }
        Err(renamed_too_often())
    }

    fn pass(path: &Path) -> io::Result<Names> {
        let mut newest_first = Vec::new();
        for path in [path.to_owned()].into_iter().chain((1..=HELD_MAX).map(|number| audit::aside(path, number))) {
            if let Some(key) = Key::at(&path)? {
                newest_first.push(Name { path, key });
            }
        }
        Ok(Names { newest_first })
    }
}

impl Name {
    /// `None` if another file has this name now.
    fn open(&self) -> io::Result<Option<Tail>> {
        let file = match open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        Ok((Key::of(&file)? == self.key).then(|| Tail::new(file)))
    }
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    // Windows syncs only what is open for writing.
    #[cfg(windows)]
    options.append(true);
    os::open_own(&options, path)
}

/// Tells a file from all others while it is open.
#[cfg(unix)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key(u64, u64);

#[cfg(unix)]
impl Key {
    fn at(path: &Path) -> io::Result<Option<Key>> {
        match std::fs::symlink_metadata(path) {
            Ok(found) => Ok(Some(Key::from(&found))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn of(file: &File) -> io::Result<Key> {
        Ok(Key::from(&file.metadata()?))
    }

    fn from(found: &std::fs::Metadata) -> Key {
        use std::os::unix::fs::MetadataExt;
        Key(found.dev(), found.ino())
    }
}

/// The first line: it has a time and the id of an instance. A file without a line has no key yet.
#[cfg(windows)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key(Option<u64>);

#[cfg(windows)]
impl Key {
    fn at(path: &Path) -> io::Result<Option<Key>> {
        match open(path) {
            Ok(file) => Ok(Some(Key::of(&file)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn of(file: &File) -> io::Result<Key> {
        use std::hash::{DefaultHasher, Hash, Hasher};
        use std::os::windows::fs::FileExt;
        let mut start = [0; 1024];
        let length = file.seek_read(&mut start, 0)?;
        let line = memchr::memchr(b'\n', &start[..length]).map(|end| &start[..end]);
        Ok(Key(line.map(|line| {
            let mut hasher = DefaultHasher::new();
            line.hash(&mut hasher);
            hasher.finish()
        })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{audit::Audit, audit_numbers::Numbers, audit_retention::Mark};
    use std::{
        fs,
        io::Write,
        sync::atomic::{AtomicBool, AtomicU64, Ordering},
        thread,
    };
    use tempfile::TempDir;

    const FOREIGN: &str = "{\"timestamp\":\"x\",\"message\":\"of another instance\"}\n";

    fn room() -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        (dir, path)
    }

    fn ours(number: u64) -> String {
        format!("{{\"id\":\"east-{number}\",\"timestamp\":\"x\"}}\n")
    }

    fn lines(numbers: impl IntoIterator<Item = u64>) -> String {
        numbers.into_iter().map(ours).collect()
    }

    fn append(path: &Path, text: &str) {
        File::options().append(true).create(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
    }

    fn rotate(path: &Path) {
        for number in (1..=HELD_MAX).rev() {
            let _ = fs::rename(audit::aside(path, number), audit::aside(path, number + 1));
        }
        fs::rename(path, audit::aside(path, 1)).unwrap();
        append(path, "");
    }

    fn numbers(batch: &Batch) -> Vec<u64> {
        batch.records.iter().map(|line| line.number).collect()
    }

    #[test]
    fn lines_of_this_replica_are_returned_as_they_are() {
        #[rustfmt::skip]
        let table = [
            // log                                                      after     numbers
            (String::new(),                                             None,     vec![]),
            (FOREIGN.repeat(2),                                         None,     vec![]),
            (lines(1..=3),                                              None,     vec![1, 2, 3]),
            (lines(1..=3),                                              Some(2),  vec![3]),
            (lines(1..=3),                                              Some(3),  vec![]),
            (lines(1..=3),                                              Some(9),  vec![]),
            (FOREIGN.to_owned() + &ours(1) + FOREIGN + &ours(2),        None,     vec![1, 2]),
            // Numbers can be missing: their records could not be written.
            (lines([1, 4, 5]),                                          Some(1),  vec![4, 5]),
            // Another replica, and texts that look like an id.
            ("{\"id\":\"west-1\"}\n".to_owned() + &ours(2),             None,     vec![2]),
            ("{\"id\":\"east-1-1\"}\n".to_owned() + &ours(2),           None,     vec![2]),
            ("{\"a\":\"{\\\"id\\\":\\\"east-1\\\"}\"}\n".to_owned(),    None,     vec![]),
            // Incomplete lines: at the end, in the middle, and where the next writer ended them.
            (ours(1) + "{\"id\":\"east-2\",\"ti",                       None,     vec![1]),
            (ours(1) + "{\"id\":\"east-2\",\"ti\n" + &ours(3),          None,     vec![1, 3]),
            (ours(1) + "{\"id\":\"east-2\",\"a\":\"{}}\n" + &ours(3),   None,     vec![1, 3]),
            (ours(1) + "{\"id\":\"east-2\",\"ti" + &ours(3) + &ours(4), None,     vec![1, 4]),
            (ours(1) + "    \n\n" + &ours(2),                           None,     vec![1, 2]),
            ("\0\0\0\0".to_owned() + &ours(1) + &ours(2),               None,     vec![2]),
            // A line that is too long, with an id in it.
            ("x".repeat(CHUNK * 2) + &ours(1) + &ours(2),               None,     vec![2]),
            ("x".repeat(CHUNK) + "\n" + &ours(2),                       None,     vec![2]),
            // A number for the second time.
            (lines([1, 2, 2, 1, 3]),                                    None,     vec![1, 2, 3]),
        ];
        for (text, after, expected) in table {
            let (_dir, path) = room();
            fs::write(&path, &text).unwrap();
            let mut reader = AuditReader::new(&path, "east");
            let batch = reader.read(after, 1 << 20).unwrap();
            let end = &text[text.len().saturating_sub(100)..];
            assert_eq!((numbers(&batch), batch.is_end, batch.missing), (expected, true, None), "{end}");
            for line in &batch.records {
                assert_eq!(line.bytes, ours(line.number));
            }
            // From another number on the same place is found.
            for after in 1..=3 {
                let expected: Vec<u64> = numbers(&reader.read(None, 1 << 20).unwrap());
                let expected: Vec<u64> = expected.into_iter().filter(|number| *number > after).collect();
                assert_eq!(numbers(&reader.read(Some(after), 1 << 20).unwrap()), expected, "{end}");
            }
        }
    }

    #[test]
    fn without_a_log_there_is_nothing_until_there_is_one() {
        let (_dir, path) = room();
        let mut reader = AuditReader::new(&path, "east");
        assert_eq!(reader.read(None, 100).unwrap(), Batch { is_end: true, ..Batch::default() });
        append(&path, &ours(1));
        assert_eq!(numbers(&reader.read(None, 100).unwrap()), [1]);
    }

    #[test]
    fn a_batch_is_bounded_and_has_at_least_one_record() {
        let (_dir, path) = room();
        append(&path, &(FOREIGN.to_owned() + &lines(1..=2)));
        rotate(&path);
        append(&path, &lines(3..=7));
        let mut reader = AuditReader::new(&path, "east");
        let one = ours(1).len();
        #[rustfmt::skip]
        let table = [
            // after   bytes          numbers      is end
            (None,     2 * one,       vec![1, 2],  false),
            (Some(2),  3 * one - 1,   vec![3, 4],  false),
            (Some(4),  1,             vec![5],     false),
            (Some(5),  2 * one,       vec![6, 7],  true),
            (Some(7),  2 * one,       vec![],      true),
            // Back, as after a failure.
            (Some(1),  2 * one,       vec![2, 3],  false),
        ];
        for (after, bytes_max, expected, is_end) in table {
            let batch = reader.read(after, bytes_max).unwrap();
            assert_eq!((numbers(&batch), batch.is_end), (expected, is_end));
        }
    }

    #[test]
    fn a_line_is_read_once_it_is_complete() {
        let (_dir, path) = room();
        let mut reader = AuditReader::new(&path, "east");
        let text = ours(1);
        for part in [&text[..5], &text[5..20], &text[20..text.len() - 1]] {
            append(&path, part);
            assert_eq!(numbers(&reader.read(None, 100).unwrap()), [0; 0]);
        }
        append(&path, "\n");
        assert_eq!(numbers(&reader.read(None, 100).unwrap()), [1]);
        append(&path, &ours(2));
        assert_eq!(numbers(&reader.read(Some(1), 100).unwrap()), [2]);
    }

    #[test]
    fn rotated_logs_are_followed() {
        let (_dir, path) = room();
        let mut reader = AuditReader::new(&path, "east");
        append(&path, &lines(1..=2));
        assert_eq!(numbers(&reader.read(None, 1_000).unwrap()), [1, 2]);
        append(&path, &ours(3));
        rotate(&path);
        append(&path, FOREIGN);
        rotate(&path);
        rotate(&path);
        append(&path, &ours(4));
        rotate(&path);
        let batch = reader.read(Some(2), 1_000).unwrap();
        assert_eq!((numbers(&batch), batch.is_end, batch.missing), (vec![3, 4], true, None));
        append(&path, &ours(5));
        assert_eq!(numbers(&reader.read(Some(4), 1_000).unwrap()), [5]);
    }

    #[test]
    fn an_interrupted_rotation_changes_nothing() {
        let (_dir, path) = room();
        append(&audit::aside(&path, 4), &lines(1..=2));
        append(&audit::aside(&path, 2), &lines(3..=4));
        append(&audit::aside(&path, 1), &lines(5..=6));
        let mut reader = AuditReader::new(&path, "east");
        let batch = reader.read(None, 1_000).unwrap();
        assert_eq!((numbers(&batch), batch.is_end), (vec![1, 2, 3, 4, 5, 6], true));
        append(&path, &ours(7));
        assert_eq!(numbers(&reader.read(Some(6), 1_000).unwrap()), [7]);
    }

    /// The writer opened the log, another instance rotated it, and then the writer wrote.
    #[test]
    fn a_record_that_is_written_to_a_rotated_log_is_not_missed() {
        let (_dir, path) = room();
        append(&path, &ours(1));
        let mut late = File::options().append(true).open(&path).unwrap();
        let mut reader = AuditReader::new(&path, "east");
        assert_eq!(numbers(&reader.read(None, 1_000).unwrap()), [1]);
        rotate(&path);
        append(&path, FOREIGN);
        rotate(&path);
        append(&path, FOREIGN);
        let mut later = File::options().append(true).open(&path).unwrap();
        assert_eq!(numbers(&reader.read(Some(1), 1_000).unwrap()), [0; 0]);
        late.write_all(ours(2).as_bytes()).unwrap();
        assert_eq!(numbers(&reader.read(Some(1), 1_000).unwrap()), [2], "no later record is needed");
        rotate(&path);
        assert_eq!(numbers(&reader.read(Some(2), 1_000).unwrap()), [0; 0]);
        later.write_all(ours(3).as_bytes()).unwrap();
        append(&path, &ours(4));
        assert_eq!(numbers(&reader.read(Some(2), 1_000).unwrap()), [3, 4]);
        // A reader that begins anew finds all of them, too.
        assert_eq!(numbers(&AuditReader::new(&path, "east").read(None, 1_000).unwrap()), [1, 2, 3, 4]);
    }

    #[test]
    fn missing_records_are_reported_once() {
        let (_dir, path) = room();
        append(&path, &lines(1..=2));
        let mut reader = AuditReader::new(&path, "east");
        assert_eq!(numbers(&reader.read(None, 1_000).unwrap()), [1, 2]);
        append(&path, &ours(3));
        rotate(&path);
        append(&path, &lines(4..=5));
        rotate(&path);
        append(&path, &lines(6..=7));
        // The reader has the first one open, so only 4 and 5 are gone.
        fs::remove_file(audit::aside(&path, 2)).unwrap();
        fs::remove_file(audit::aside(&path, 1)).unwrap();
        let batch = reader.read(Some(2), 1_000).unwrap();
        assert_eq!((numbers(&batch), batch.is_end, batch.missing), (vec![3], false, None));
        let batch = reader.read(Some(3), 1_000).unwrap();
        assert_eq!((numbers(&batch), batch.is_end), (vec![6, 7], true));
        assert_eq!(batch.missing, Some(Missing { after: 3, before: 6 }));
        append(&path, &ours(8));
        assert_eq!(reader.read(Some(7), 1_000).unwrap().missing, None);

        // The same for a reader that begins anew.
        #[rustfmt::skip]
        let table = [
            // published and base  after     missing
            (None,                 None,     None),
            (None,                 Some(5),  None),
            (None,                 Some(4),  Some(Missing { after: 4, before: 6 })),
            (None,                 Some(6),  None),
            (Some((4, 0)),         Some(4),  Some(Missing { after: 4, before: 6 })),
            // The stream is empty: what was published before is not missing.
            (Some((5, 0)),         None,     None),
            (Some((9, 0)),         None,     None),
            (Some((2, 0)),         None,     Some(Missing { after: 2, before: 6 })),
            // The logs began anew.
            (Some((5, 5)),         None,     None),
            (Some((5, 5)),         Some(2),  None),
            (Some((4, 4)),         Some(2),  Some(Missing { after: 4, before: 6 })),
        ];
        for (mark, after, missing) in table {
            let _ = fs::remove_dir_all(path.with_file_name("audit-published"));
            if let Some((published, base)) = mark {
                audit_retention::store(&path, "east", Mark { published, base }).unwrap();
            }
            let mut reader = AuditReader::new(&path, "east");
            assert_eq!(reader.read(after, 1_000).unwrap().missing, missing, "{mark:?} {after:?}");
        }
    }

    #[test]
    fn a_record_that_could_not_be_finished_is_not_missing() {
        for torn in ["{\"id\":\"east-3\",\n", "{\"id\":\"east-3\",", "{\"id\":\"east-3\",\"a\":\"{}}{}\n"] {
            let (_dir, path) = room();
            append(&path, torn);
            rotate(&path);
            append(&path, &ours(4));
            let batch = AuditReader::new(&path, "east").read(Some(2), 1_000).unwrap();
            assert_eq!((numbers(&batch), batch.missing), (vec![4], None), "{torn}");
            let missing = AuditReader::new(&path, "east").read(Some(1), 1_000).unwrap().missing;
            assert_eq!(missing, Some(Missing { after: 1, before: 4 }), "{torn}");
        }
    }

    #[test]
    fn a_removed_or_truncated_log_does_not_stop_the_reader() {
        let (_dir, path) = room();
        append(&path, &lines(1..=3));
        let mut reader = AuditReader::new(&path, "east");
        assert_eq!(numbers(&reader.read(None, 1_000).unwrap()), [1, 2, 3]);
        fs::remove_file(&path).unwrap();
        assert_eq!(numbers(&reader.read(Some(3), 1_000).unwrap()), [0; 0]);
        append(&path, &ours(4));
        let batch = reader.read(Some(3), 1_000).unwrap();
        assert_eq!((numbers(&batch), batch.missing), (vec![4], None));
        fs::write(&path, "").unwrap();
        assert_eq!(numbers(&reader.read(Some(4), 1_000).unwrap()), [0; 0]);
        append(&path, &ours(5));
        assert_eq!(numbers(&reader.read(Some(4), 1_000).unwrap()), [5]);
    }

    struct Dice(u64);

    impl Dice {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % bound
        }
    }

    const SEEDS: u64 = 30;

    /// Writers that rotate, are killed and continue; a reader that falls behind, begins anew and forgets.
    #[test]
    fn each_record_is_read_once_in_order_whatever_happens_to_the_files() {
        for seed in 0..SEEDS {
            let (_dir, path) = room();
            let mut dice = Dice(seed);
            let bytes_max = 120 + dice.below(600);
            let begin = || (Audit::small(&path, bytes_max), Numbers::begin(Some(&path), "east").0);
            let (mut audit, mut numbers) = begin();
            let mut foreign = Audit::small(&path, bytes_max);
            let mut reader = AuditReader::new(&path, "east");
            let (mut written, mut read): (Vec<Bytes>, Vec<Bytes>) = Default::default();
            let number_of = |line: &Bytes| Opening::of("east").number(line).unwrap();
            // The reader never goes back beyond the records that count as published.
            let (mut last, mut published) = (None, 0);
            for step in 0..300 {
                let backlog = written.len() - read.len();
                // Near the limit of the held logs, only reading and publishing continue.
                let is_crowded = audit::files(&path).len() > HELD_MAX as usize - 16;
                match if is_crowded { 15 + step % 2 } else { dice.below(20) } {
                    0..=7 if backlog < 12 => {
                        let mut lines = String::new();
                        for _ in 0..=dice.below(3) {
                            let from = lines.len();
                            numbers.open_line(&mut lines);
                            lines.push_str(&format!(
                                "\"step\":{step},\"pad\":\"{}\"}}\n",
                                "x".repeat(dice.below(60) as usize)
                            ));
                            written.push(Bytes::copy_from_slice(&lines.as_bytes()[from..]));
                        }
                        assert_eq!(audit.write(&lines), None);
                    }
                    8..=11 => assert_eq!(foreign.write(FOREIGN), None),
                    12 => {
                        // Killed, perhaps in the middle of a line.
                        let mut torn = String::new();
                        numbers.open_line(&mut torn);
                        torn.push_str("\"pad\":\"}}");
                        append(&path, &torn[..dice.below(torn.len() as u64 + 1) as usize]);
                        (audit, numbers) = begin();
                    }
                    13 => reader = AuditReader::new(&path, "east"),
                    14 => {
                        // Not everything that was read was published.
                        let unpublished = read.len() - published;
                        read.truncate(read.len() - (dice.below(3) as usize).min(unpublished));
                        last = read.last().map(number_of);
                    }
                    15 if !read.is_empty() => {
                        published = published.max(read.len() - (dice.below(3) as usize).min(read.len() - 1));
                        let base = audit_retention::stored(&path, "east").unwrap().base;
                        let mark = Mark { published: number_of(&read[published - 1]), base };
                        audit_retention::store(&path, "east", mark).unwrap();
                    }
                    _ => {
                        let batch = reader.read(last, dice.below(500) as usize).unwrap();
                        assert_eq!(batch.missing, None, "seed {seed}");
                        last = batch.records.last().map(|line| line.number).or(last);
                        read.extend(batch.records.into_iter().map(|line| line.bytes));
                        assert_eq!(read, written[..read.len()], "seed {seed}, step {step}");
                        assert!(!batch.is_end || read.len() == written.len(), "seed {seed}, step {step}");
                    }
                }
            }
            let rest = reader.read(last, usize::MAX).unwrap();
            assert!(rest.is_end && rest.missing.is_none());
            read.extend(rest.records.into_iter().map(|line| line.bytes));
            assert_eq!(read, written, "seed {seed}");
            let all: Vec<u64> = written.iter().map(number_of).collect();
            assert!(all.is_sorted_by(|one, next| one < next), "no number is used twice: {all:?}");
        }
    }

    #[test]
    fn records_are_read_while_several_instances_write_and_rotate() {
        const RECORDS: u64 = 2_000;
        let (_dir, path) = room();
        // Nothing is published, so no log is removed; there are fewer than the limit.
        audit_retention::store(&path, "east", Mark::default()).unwrap();
        let bytes_max = (ours(1).len() as u64 + 2 * FOREIGN.len() as u64) * RECORDS / 40;
        let is_done = AtomicBool::new(false);
        let progress = AtomicU64::new(0);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut audit = Audit::small(&path, bytes_max);
                    for record in 0..RECORDS {
                        // The log is rotated less than OPEN_MAX times while the writer of the replica is in one write.
                        while record > progress.load(Ordering::SeqCst) + RECORDS / 20 {
                            thread::yield_now();
                        }
                        assert_eq!(audit.write_many(FOREIGN), None);
                    }
                    audit.finish();
                });
            }
            scope.spawn(|| {
                let mut audit = Audit::small(&path, bytes_max);
                for number in 1..=RECORDS {
                    assert_eq!(audit.write_many(&ours(number)), None);
                    progress.store(number, Ordering::SeqCst);
                }
                audit.finish();
                is_done.store(true, Ordering::SeqCst);
            });
            let mut reader = AuditReader::new(&path, "east");
            let mut last = None;
            loop {
                let was_done = is_done.load(Ordering::SeqCst);
                let batch = reader.read(last, 4_000).unwrap();
                assert_eq!(batch.missing, None);
                for line in &batch.records {
                    assert_eq!(line.number, last.unwrap_or_default() + 1);
                    assert_eq!(line.bytes, ours(line.number));
                    last = Some(line.number);
                }
                if was_done && batch.is_end {
                    break;
                }
                thread::yield_now();
            }
            assert_eq!(last, Some(RECORDS));
        });
        assert!(audit::files(&path).len() > 10, "the log was rotated");
    }
}
