//! A time zone: its offset from UTC at a moment, from a file of the system's time zone database (TZif) or from a rule of
//! POSIX. It reads no file and no clock.

use time::{Date, Month, OffsetDateTime, util};

/// Transitions in a file; one with more is not read.
const TRANSITIONS_MAX: usize = 4096;
const DAY: i64 = 86_400;

/// A moment as a calendar and a clock show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Civil {
    pub year: i64,
    /// From 1.
    pub month: u32,
    pub day: u32,
    pub hour: u32,
    pub minute: u32,
}

impl Civil {
    /// Seconds since 1970 if the clock shows UTC. None for a date or a time that does not exist.
    fn seconds(self) -> Option<i64> {
        let is_valid = self.hour < 24 && self.minute < 60 && (1970..=9999).contains(&self.year);
        let days = days_since_1970(self.year, self.month, self.day).filter(|_| is_valid)?;
        Some(days * DAY + i64::from(self.hour) * 3600 + i64::from(self.minute) * 60)
    }

    /// The calendar ends with the year 9999; a later moment counts as the beginning of 1970.
    fn of(seconds: i64) -> Civil {
        let shown = OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH);
        Civil {
            year: shown.year().into(),
            month: u8::from(shown.month()).into(),
            day: shown.day().into(),
            hour: shown.hour().into(),
            minute: shown.minute().into(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone {
    /// Seconds since 1970, and the offset from then on, in order.
    transitions: Vec<(i64, i64)>,
    /// The offset before the first transition.
    first: i64,
    /// What applies after the last transition.
    rule: Option<Rule>,
}

impl Zone {
    pub fn utc() -> Zone {
        Zone { transitions: Vec::new(), first: 0, rule: None }
    }

    /// Reads a file of the database, in any of its versions.
    pub fn read(file: &[u8]) -> Option<Zone> {
        let (first, rest) = Block::read(file, 4)?;
        if first.version < b'2' {
            return Some(first.zone);
        }
        let (second, rest) = Block::read(rest, 8)?;
        let footer = rest.strip_prefix(b"\n")?;
        let end = footer.iter().position(|byte| *byte == b'\n')?;
        let footer = std::str::from_utf8(&footer[..end]).ok()?;
        Some(Zone { rule: Rule::read(footer), ..second.zone })
    }

    /// Reads a rule of POSIX, such as `CET-1CEST,M3.5.0,M10.5.0/3`.
    pub fn posix(text: &str) -> Option<Zone> {
        let rule = Rule::read(text)?;
        Some(Zone { transitions: Vec::new(), first: rule.standard, rule: Some(rule) })
    }

    /// Seconds to add to UTC.
    pub fn offset_at(&self, epoch: i64) -> i64 {
        let after = self.transitions.partition_point(|(at, _)| *at <= epoch);
        match (&self.rule, after == self.transitions.len()) {
            (Some(rule), true) => rule.offset_at(epoch),
            _ => after.checked_sub(1).map_or(self.first, |at| self.transitions[at].1),
        }
    }

    pub fn civil(&self, epoch: i64) -> Civil {
        Civil::of(epoch + self.offset_at(epoch))
    }

    /// The moment when clocks of this zone show this. Of two such moments, the first; if clocks skip it, as long after the
    /// change as it is after the skipped hour's beginning. None if it does not exist in the calendar.
    pub fn epoch_of(&self, civil: Civil) -> Option<i64> {
        let seconds = civil.seconds()?;
        let before = seconds - self.offset_at(seconds - DAY);
        let after = seconds - self.offset_at(seconds + DAY);
        let shows = |epoch: &i64| epoch + self.offset_at(*epoch) == seconds;
        Some([before.min(after), before.max(after)].into_iter().find(shows).unwrap_or(before))
    }
}

/// One header of a file and the data that follow it.
struct Block {
    version: u8,
    zone: Zone,
}

impl Block {
    /// `width`: bytes of a moment. Also the rest of the file.
    fn read(file: &[u8], width: usize) -> Option<(Block, &[u8])> {
        const HEADER: usize = 44;
        let header = file.get(..HEADER).filter(|header| header.starts_with(b"TZif"))?;
        let count = |index: usize| {
            let at = 20 + index * 4;
            usize::try_from(u32::from_be_bytes(header.get(at..at + 4)?.try_into().ok()?)).ok()
        };
        let [utc, std, leaps, times, types, letters] =
            [count(0)?, count(1)?, count(2)?, count(3)?, count(4)?, count(5)?];
        if times > TRANSITIONS_MAX || types == 0 || types > 256 || leaps > 256 || letters > 4096 {
            return None;
        }
        let mut rest = &file[HEADER..];
        let mut take = |length: usize| {
            let (taken, left) = rest.split_at_checked(length)?;
            rest = left;
            Some(taken)
        };
        let moments = take(times * width)?;
        let indices = take(times)?;
        let offsets = take(types * 6)?;
        take(letters + leaps * (width + 4) + std + utc)?;
        let offset = |index: usize| {
            let bytes = offsets.get(index * 6..index * 6 + 4)?;
            Some(i64::from(i32::from_be_bytes(bytes.try_into().ok()?)))
        };
        let moment = |bytes: &[u8]| match width {
            8 => bytes.try_into().ok().map(i64::from_be_bytes),
            _ => bytes.try_into().ok().map(|bytes| i64::from(i32::from_be_bytes(bytes))),
        };
        let transitions = moments.chunks(width).zip(indices);
        let transitions = transitions.map(|(at, index)| Some((moment(at)?, offset(usize::from(*index))?)));
        let transitions = transitions.collect::<Option<Vec<_>>>()?;
        let is_sorted = transitions.is_sorted_by(|one, other| one.0 < other.0);
        let zone = Zone { transitions, first: offset(0)?, rule: None };
        is_sorted.then_some((Block { version: header[4], zone }, rest))
    }
}

/// A rule of POSIX: standard time, and daylight saving time between two days of each year.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    standard: i64,
    daylight: Option<Daylight>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Daylight {
    offset: i64,
    begin: Change,
    end: Change,
}

/// A day of a year, and seconds after its midnight.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Change {
    day: Day,
    second: i64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Day {
    /// From 1 to 365; February 29 is not counted.
    Julian(i64),
    /// From 0 to 365.
    OfYear(i64),
    /// The weekday (0 is Sunday) of a week (5 is the last) of a month.
    Weekday { month: u32, week: i64, weekday: i64 },
}

impl Rule {
    fn read(text: &str) -> Option<Rule> {
        let (standard, rest) = offset(name(text)?)?;
        // West of Greenwich is positive here.
        let standard = -standard;
        if rest.is_empty() {
            return Some(Rule { standard, daylight: None });
        }
        let rest = name(rest)?;
        let (saved, rest) = match rest.starts_with(',') {
            true => (standard + 3600, rest),
            false => offset(rest).map(|(offset, rest)| (-offset, rest))?,
        };
        let (begin, rest) = Change::read(rest.strip_prefix(',')?)?;
        let (end, rest) = Change::read(rest.strip_prefix(',')?)?;
        rest.is_empty().then_some(Rule { standard, daylight: Some(Daylight { offset: saved, begin, end }) })
    }

    fn offset_at(&self, epoch: i64) -> i64 {
        let Some(daylight) = &self.daylight else { return self.standard };
        let year = Civil::of(epoch + self.standard).year;
        let changes = daylight.begin.seconds_in(year).zip(daylight.end.seconds_in(year));
        let Some((begin, end)) = changes else { return self.standard };
        let (begin, end) = (begin - self.standard, end - daylight.offset);
        let is_daylight = match begin < end {
            true => (begin..end).contains(&epoch),
            // South of the equator.
            false => !(end..begin).contains(&epoch),
        };
        if is_daylight { daylight.offset } else { self.standard }
    }
}

impl Change {
    fn read(text: &str) -> Option<(Change, &str)> {
        let (day, rest) = match text.as_bytes().first()? {
            b'M' => {
                let (month, rest) = number(&text[1..])?;
                let (week, rest) = number(rest.strip_prefix('.')?)?;
                let (weekday, rest) = number(rest.strip_prefix('.')?)?;
                let is_valid = (1..=12).contains(&month) && (1..=5).contains(&week) && (0..=6).contains(&weekday);
                let month = u32::try_from(month).ok().filter(|_| is_valid)?;
                (Day::Weekday { month, week, weekday }, rest)
            }
            b'J' => number(&text[1..]).map(|(day, rest)| (Day::Julian(day), rest))?,
            _ => number(text).map(|(day, rest)| (Day::OfYear(day), rest))?,
        };
        let (second, rest) = match rest.strip_prefix('/') {
            Some(rest) => offset(rest)?,
            None => (2 * 3600, rest),
        };
        Some((Change { day, second }, rest))
    }

    /// As if its clock showed UTC. None in a year that the calendar does not have.
    fn seconds_in(&self, year: i64) -> Option<i64> {
        let first = days_since_1970(year, 1, 1)?;
        let is_leap = util::is_leap_year(i32::try_from(year).ok()?);
        let day = match self.day {
            Day::OfYear(day) => first + day,
            Day::Julian(day) => first + day - 1 + i64::from(is_leap && day >= 60),
            Day::Weekday { month, week, weekday } => {
                let first = days_since_1970(year, month, 1)?;
                // January 1, 1970 was a Thursday.
                let day = first + (weekday - (first + 4)).rem_euclid(7) + (week - 1) * 7;
                // The last of its month, if the month has no fifth.
                if Civil::of(day * DAY).month == month { day } else { day - 7 }
            }
        };
        Some(day * DAY + self.second)
    }
}

/// What follows the name of a zone: letters, or anything between `<` and `>`.
fn name(text: &str) -> Option<&str> {
    if let Some(rest) = text.strip_prefix('<') {
        return rest.split_once('>').map(|(_, rest)| rest);
    }
    let rest = text.trim_start_matches(|letter: char| letter.is_ascii_alphabetic());
    (text.len() - rest.len() >= 3).then_some(rest)
}

/// `[+-]hh[:mm[:ss]]` in seconds, and the rest.
fn offset(text: &str) -> Option<(i64, &str)> {
    let (sign, text) = match text.strip_prefix('-') {
        Some(text) => (-1, text),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let (hours, mut rest) = number(text)?;
    let mut seconds = hours * 3600;
    for unit in [60, 1] {
        let Some(more) = rest.strip_prefix(':') else { break };
        let (count, after) = number(more)?;
        seconds += count * unit;
        rest = after;
    }
    // POSIX allows a week.
    (seconds <= 7 * DAY).then_some((sign * seconds, rest))
}

fn number(text: &str) -> Option<(i64, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let number = text[..digits].parse().ok().filter(|_| digits <= 3)?;
    Some((number, &text[digits..]))
}

/// None of a date that does not exist.
fn days_since_1970(year: i64, month: u32, day: u32) -> Option<i64> {
    let month = Month::try_from(u8::try_from(month).ok()?).ok()?;
    let date = Date::from_calendar_date(i32::try_from(year).ok()?, month, u8::try_from(day).ok()?).ok()?;
    Some((date - OffsetDateTime::UNIX_EPOCH.date()).whole_days())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BERLIN: &str = "CET-1CEST,M3.5.0,M10.5.0/3";
    const SYDNEY: &str = "AEST-10AEDT,M10.1.0,M4.1.0/3";
    const NEW_YORK: &str = "EST5EDT,M3.2.0,M11.1.0";

    fn at(year: i64, month: u32, day: u32, hour: u32, minute: u32) -> Civil {
        Civil { year, month, day, hour, minute }
    }

    #[test]
    fn a_date_is_a_number_of_days_and_back() {
        assert_eq!(days_since_1970(1970, 1, 1), Some(0));
        assert_eq!(days_since_1970(2026, 11, 18), Some(20_775));
        for days in (-1000..200_000).step_by(17) {
            let Civil { year, month, day, .. } = Civil::of(days * DAY);
            assert_eq!(days_since_1970(year, month, day), Some(days));
        }
        for wrong in [at(2026, 2, 29, 0, 0), at(2026, 13, 1, 0, 0), at(2026, 1, 0, 0, 0), at(2026, 1, 1, 24, 0)] {
            assert_eq!(Zone::utc().epoch_of(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn clocks_change_twice_a_year() {
        #[rustfmt::skip]
        let table = [
            // zone        the clock shows            UTC
            (BERLIN,   at(2026, 11, 18, 15, 37),  at(2026, 11, 18, 14, 37)),
            (BERLIN,   at(2026, 7, 1, 15, 0),     at(2026, 7, 1, 13, 0)),
            // Skipped: 02:00 becomes 03:00.
            (BERLIN,   at(2026, 3, 29, 2, 30),    at(2026, 3, 29, 1, 30)),
            (BERLIN,   at(2026, 3, 29, 1, 59),    at(2026, 3, 29, 0, 59)),
            (BERLIN,   at(2026, 3, 29, 3, 0),     at(2026, 3, 29, 1, 0)),
            // Twice: 03:00 becomes 02:00. The first of the two.
            (BERLIN,   at(2026, 10, 25, 2, 30),   at(2026, 10, 25, 0, 30)),
            (BERLIN,   at(2026, 10, 25, 3, 0),    at(2026, 10, 25, 2, 0)),
            (SYDNEY,   at(2026, 1, 1, 9, 0),      at(2025, 12, 31, 22, 0)),
            (SYDNEY,   at(2026, 7, 1, 9, 0),      at(2026, 6, 30, 23, 0)),
            (NEW_YORK, at(2026, 11, 1, 0, 30),    at(2026, 11, 1, 4, 30)),
            (NEW_YORK, at(2026, 11, 2, 0, 30),    at(2026, 11, 2, 5, 30)),
            ("UTC0",   at(2026, 11, 2, 0, 30),    at(2026, 11, 2, 0, 30)),
            ("<+0530>-5:30", at(2026, 1, 1, 5, 30), at(2026, 1, 1, 0, 0)),
            ("EST5EDT,J60,J300", at(2024, 3, 1, 3, 0), at(2024, 3, 1, 7, 0)),
            ("EST5EDT4,59/1,299", at(2026, 3, 1, 2, 0), at(2026, 3, 1, 6, 0)),
        ];
        for (zone, shown, utc) in table {
            let zone = Zone::posix(zone).unwrap();
            let epoch = zone.epoch_of(shown).unwrap();
            assert_eq!(Zone::utc().civil(epoch), utc, "{shown:?}");
        }
        for wrong in ["", "C", "CET", "CET-1CEST", "CET-1CEST,M3.5.0", "CET-1CEST,M13.5.0,M1.1.1", "CET-999"] {
            assert_eq!(Zone::posix(wrong), None, "{wrong}");
        }
    }

    /// A file with two transitions and the rule of Berlin, as zic writes it.
    fn file(version: u8) -> Vec<u8> {
        let block = |width: usize| {
            let mut block = b"TZif".to_vec();
            block.push(version);
            block.extend([0; 15]);
            for count in [0u32, 0, 0, 2, 2, 8] {
                block.extend(count.to_be_bytes());
            }
            for moment in [1_774_746_000i64, 1_792_890_000] {
                block.extend(&moment.to_be_bytes()[8 - width..]);
            }
            block.extend([1, 0]);
            block.extend([3600i32.to_be_bytes().as_slice(), &[0, 0], &7200i32.to_be_bytes(), &[1, 4]].concat());
            block.extend(b"CET\0CEST");
            block
        };
        let mut file = block(4);
        if version >= b'2' {
            file.extend(block(8));
            file.extend(format!("\n{BERLIN}\n").as_bytes());
        }
        file
    }

    #[test]
    fn a_file_of_the_database_is_read() {
        let summer = Zone::utc().epoch_of(at(2026, 7, 1, 0, 0)).unwrap();
        let winter = Zone::utc().epoch_of(at(2026, 12, 1, 0, 0)).unwrap();
        let later = Zone::utc().epoch_of(at(2030, 7, 1, 0, 0)).unwrap();
        let offsets = |zone: &Zone| [0, summer, winter, later].map(|epoch| zone.offset_at(epoch));
        assert_eq!(offsets(&Zone::read(&file(b'2')).unwrap()), [3600, 7200, 3600, 7200]);
        // The first version has no rule for what follows.
        assert_eq!(offsets(&Zone::read(&file(0)).unwrap()), [3600, 7200, 3600, 3600]);
        let whole = file(b'2');
        for length in 0..whole.len() {
            assert_eq!(Zone::read(&whole[..length]), None, "cut at {length}");
        }
        let mut many = whole.clone();
        many[32..36].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(Zone::read(&many), None);
    }
}
