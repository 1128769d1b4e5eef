//! The numbers of a replica's records. In a cluster each line begins with `"id":"<replica>-<number>"`; the number counts
//! up and continues in the next process, so that the records can be published in order, each once.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use memchr::memmem;
use outlast_core::message::quote;
use outlast_os as os;

use crate::state::{
    audit,
    audit_retention::{self, Mark},
};

/// How much of the logs is read, from their end, to find the last number. If it is further back, the numbers continue at
/// the current time, which is higher.
const SEARCH_MAX: u64 = 32 << 20;
/// How much is read at once.
const WINDOW: u64 = 256 << 10;
/// The digits of the longest number.
const DIGITS_MAX: usize = 20;

/// How the lines of one replica begin: `{"id":"<replica>-`. Other lines do not: without a cluster a line begins with
/// its timestamp, and in the line of another replica no digits follow, or no quote follows them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Opening(String);

impl Opening {
    pub(crate) fn of(replica: &str) -> Opening {
        let name = quote(replica);
        Opening(format!(r#"{{"id":{}-"#, &name[..name.len() - 1]))
    }

    /// The number of a line, if the line belongs to this replica. The line may be incomplete after its number.
    pub(crate) fn number(&self, line: &[u8]) -> Option<u64> {
        let rest = line.strip_prefix(self.0.as_bytes())?;
        let length = rest.iter().take(DIGITS_MAX + 1).take_while(|byte| byte.is_ascii_digit()).count();
        let is_ended = rest.get(length) == Some(&b'"');
        let digits = str::from_utf8(&rest[..length]).ok()?;
        digits.parse().ok().filter(|_| is_ended)
    }

    /// The number of the last line of this replica in a file, read from its end. At most `left` bytes are read, which
    /// are subtracted.
    pub(crate) fn last_number(&self, file: &mut File, left: &mut u64) -> io::Result<Option<u64>> {
        let needle = memmem::FinderRev::new(self.0.as_bytes());
        let id_max = self.0.len() + DIGITS_MAX + 1;
        let mut end = file.metadata()?.len();
        // The bytes from `end` on that complete an id that begins before it.
        let mut after: Vec<u8> = Vec::new();
        while end > 0 && *left > 0 {
            let start = end.saturating_sub(WINDOW.min(*left));
            *left -= end - start;
            let mut window = Vec::with_capacity(WINDOW as usize + id_max);
            file.seek(SeekFrom::Start(start))?;
            file.by_ref().take(end - start).read_to_end(&mut window)?;
            window.extend_from_slice(&after);
            let mut searched = window.len();
            while let Some(at) = needle.rfind(&window[..searched]) {
                // A match at the start of the window is found again in the one before.
                let is_start = if at == 0 { start == 0 } else { window[at - 1] == b'\n' };
                if let Some(number) = self.number(&window[at..]).filter(|_| is_start) {
                    return Ok(Some(number));
                }
                searched = at + self.0.len() - 1;
            }
            window.truncate(id_max);
            (after, end) = (window, start);
        }
        Ok(None)
    }
}

/// Gives each record of this replica its number.
#[derive(Debug)]
pub(crate) struct Numbers {
    opening: Opening,
    next: u64,
    /// Records up to this number were written, or were counted as lost.
    written: u64,
}

impl Numbers {
    /// Continues after the last record of this replica in the logs. If there is none, the first number is the time in
    /// microseconds since 1970: a replica whose files were lost gets no number a second time, because it writes less
    /// than a million records a second.
    ///
    /// From here on no log is removed that has unpublished records of this replica. If that cannot be stored, the reason is
    /// returned, too.
    pub(crate) fn begin(path: Option<&Path>, replica: &str) -> (Numbers, io::Result<()>) {
        let opening = Opening::of(replica);
        // If the logs cannot be read, the time is a safe choice, too.
        let found = path.and_then(|path| last_number(path, &opening).ok()).unwrap_or(Found::Unknown);
        let stored = path.and_then(|path| audit_retention::stored(path, replica));
        let next = if let Found::Last(last) = found { last + 1 } else { micros_now() };
        let next = next.max(stored.map_or(1, |stored| stored.published + 1));
        let mark = match found {
            Found::Nothing => Mark { published: next - 1, base: next - 1 },
            // Without a mark, all records in the files may be unpublished.
            Found::Last(_) | Found::Unknown => stored.unwrap_or_default(),
        };
        let stored = path.map_or(Ok(()), |path| audit_retention::store(path, replica, mark));
        (Numbers { opening, next, written: next - 1 }, stored)
    }

    /// Begins a line with the next number; the first brace of the record is part of it.
    pub(crate) fn open_line(&mut self, lines: &mut String) {
        lines.push_str(&self.opening.0);
        push_number(self.next, lines);
        lines.push_str("\",");
        self.next += 1;
    }

    /// All numbered lines were written.
    pub(crate) fn all_written(&mut self) {
        self.written = self.next - 1;
    }

    /// The number of the last record that was written.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Whether each numbered line was written.
    pub(crate) fn are_all_written(&self) -> bool {
        self.written + 1 == self.next
    }

    /// The next number is above this one.
    pub(crate) fn go_on_after(&mut self, number: u64) {
        if self.next <= number {
            self.next = number + 1;
            self.written = number;
        }
    }
}

/// What the logs say of the last number.
enum Found {
    Last(u64),
    /// They have no record of this replica.
    Nothing,
    /// It is further back than the limit, or a log cannot be read.
    Unknown,
}

fn last_number(path: &Path, opening: &Opening) -> io::Result<Found> {
    let mut left = SEARCH_MAX;
    for path in audit::files(path).iter().rev() {
        let mut file = os::open_own(OpenOptions::new().read(true), path)?;
        if let Some(number) = opening.last_number(&mut file, &mut left)? {
            return Ok(Found::Last(number));
        }
        if left == 0 {
            return Ok(Found::Unknown);
        }
    }
    Ok(Found::Nothing)
}

/// Without an allocation: each call that ends in a cluster gets a number.
fn push_number(mut number: u64, text: &mut String) {
    let mut digits = [0; DIGITS_MAX];
    let mut start = DIGITS_MAX;
    loop {
        start -= 1;
        digits[start] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    text.push_str(str::from_utf8(&digits[start..]).expect("digits are ASCII"));
}

fn micros_now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX / 2).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_line_belongs_to_one_replica() {
        #[rustfmt::skip]
        let table = [
            // replica   line                                                    number
            ("east",     r#"{"id":"east-17","timestamp":"x"}"#,                  Some(17)),
            ("east",     r#"{"id":"east-17","#,                                  Some(17)),
            ("east",     r#"{"id":"east-17""#,                                   Some(17)),
            ("east",     r#"{"id":"east-17"#,                                    None),
            ("east",     r#"{"id":"east-"#,                                      None),
            ("east",     r#"{"id":"east-","#,                                    None),
            ("east",     r#"{"id":"west-17","#,                                  None),
            ("east",     r#"{"id":"east-1-17","#,                                None),
            ("east-1",   r#"{"id":"east-1-17","#,                                Some(17)),
            ("east",     r#"{"id":"east-18446744073709551615","#,                Some(u64::MAX)),
            ("east",     r#"{"id":"east-18446744073709551616","#,                None),
            ("east",     r#"{"id":"east-999999999999999999999999","#,            None),
            ("east",     r#"{"timestamp":"x","props":{"id":"east-17"}}"#,        None),
            ("east",     r#" {"id":"east-17","#,                                 None),
            (r#"a"b"#,   r#"{"id":"a\"b-17","#,                                  Some(17)),
        ];
        for (replica, line, number) in table {
            assert_eq!(Opening::of(replica).number(line.as_bytes()), number, "{replica}: {line}");
        }
    }

    #[test]
    fn numbers_are_written_as_they_are_read() {
        for number in [0, 1, 9, 10, 1_768_314_765_123_456, u64::MAX] {
            let mut text = String::new();
            push_number(number, &mut text);
            assert_eq!(text, number.to_string());
        }
    }

    #[test]
    fn the_last_number_is_found_wherever_it_stands() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let opening = Opening::of("east");
        let ours = |number: u64| format!("{{\"id\":\"east-{number}\",\"a\":1}}\n");
        let foreign = "{\"timestamp\":\"x\",\"detail\":\"{\\\"id\\\":\\\"east-99\\\",\"}\n";
        let window = WINDOW as usize;
        let mut cases = vec![
            (String::new(), None),
            (foreign.repeat(3), None),
            (ours(7), Some(7)),
            (ours(7) + &ours(8), Some(8)),
            (ours(7) + foreign, Some(7)),
            // Incomplete lines: with the whole number it is used, and not otherwise.
            (ours(7) + "{\"id\":\"east-8\",\"a", Some(8)),
            (ours(7) + "{\"id\":\"east-8", Some(7)),
            (ours(7) + "{\"id\":\"ea", Some(7)),
            (ours(7) + "{\"id\":\"east-8\",\"a\n" + foreign, Some(8)),
        ];
        // The line begins at each position around the border of two windows.
        for shift in 0..40 {
            let after = "x".repeat(window - shift) + "\n";
            cases.push((foreign.to_owned() + &ours(123_456) + &after, Some(123_456)));
        }
        for (text, number) in cases {
            fs::write(&path, &text).unwrap();
            let mut file = File::open(&path).unwrap();
            let end = &text[text.len().saturating_sub(60)..];
            assert_eq!(opening.last_number(&mut file, &mut u64::MAX.clone()).unwrap(), number, "{end}");
        }
        // The search is bounded.
        fs::write(&path, ours(7) + &"x".repeat(window * 2)).unwrap();
        let mut left = WINDOW;
        assert_eq!(opening.last_number(&mut File::open(&path).unwrap(), &mut left).unwrap(), None);
        assert_eq!(left, 0);
    }

    #[test]
    fn numbers_go_on_after_the_last_in_any_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let next = || {
            let mut line = String::new();
            let (mut numbers, stored) = Numbers::begin(Some(&path), "east");
            stored.unwrap();
            numbers.open_line(&mut line);
            Opening::of("east").number(line.as_bytes()).unwrap()
        };
        let before = micros_now();
        let first = next();
        assert!(before <= first && first <= micros_now(), "{first}");
        let stored = || audit_retention::stored(&path, "east").unwrap();
        assert_eq!(stored(), Mark { published: first - 1, base: first - 1 }, "no record was there before");
        let second = next();
        assert_eq!(stored(), Mark { published: second - 1, base: second - 1 }, "nothing was written since");

        fs::remove_dir_all(dir.path().join("audit-published")).unwrap();
        fs::write(path.with_file_name("audit.2.jsonl"), "{\"id\":\"east-41\"}\n").unwrap();
        fs::write(path.with_file_name("audit.1.jsonl"), "{\"timestamp\":\"x\"}\n").unwrap();
        fs::write(&path, "{\"id\":\"west-7\"}\n").unwrap();
        assert_eq!(next(), 42);
        assert_eq!(stored(), Mark::default(), "perhaps none of them is published");
        fs::write(&path, "{\"id\":\"east-43\"}\n{\"id\":\"west-7\"}\n").unwrap();
        assert_eq!(next(), 44);
        // The stream has more than the files: the files were replaced by older ones.
        audit_retention::store(&path, "east", Mark { published: 60, base: 0 }).unwrap();
        assert_eq!(next(), 61);
        audit_retention::store(&path, "east", Mark { published: 5, base: 0 }).unwrap();
        assert_eq!(next(), 44);
        // The last number is further back than the limit.
        fs::write(&path, "{\"id\":\"east-45\"}\n".to_owned() + &"x".repeat(SEARCH_MAX as usize)).unwrap();
        assert!(next() > second);
        assert_eq!(stored(), Mark { published: 5, base: 0 }, "what is published is not known any better");
    }
}
