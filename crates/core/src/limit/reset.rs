//! The time at which a limit ends, as a notice says it: after a while, at a time of day, with or without a date and a time
//! zone. A text that cannot be read is no time.

use serde::{Deserialize, Serialize};

use crate::zone::{Civil, Zone};

/// A time of day that has passed by less than this is today's: notices leave the seconds out.
const JUST_PASSED: i64 = 120;
/// A date without a year that has passed by less than this is of this year.
const PASSED_MAX: i64 = 7 * DAY;
/// An end that is farther away was misread.
const AHEAD_MAX: i64 = 400 * DAY;
const DAY: i64 = 86_400;
/// Words after which the time stands.
const BEFORE: [&str; 5] = ["resets", "reset", "try again", "available again", "until"];
const MONTHS: [&str; 12] = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
];

/// The end of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// Seconds since 1970.
    pub at: i64,
    /// To the second; otherwise to the minute.
    pub is_exact: bool,
}

/// What a text says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reset {
    /// After so many seconds.
    In(i64),
    At {
        date: Option<Date>,
        /// Hour and minute; midnight if only a date is given.
        time: Option<(u32, u32)>,
        /// The name of a time zone; without it, the agent's own.
        zone: Option<String>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Date {
    pub year: Option<i64>,
    pub month: u32,
    pub day: u32,
}

impl Reset {
    /// The first time that the text says.
    pub fn read(text: &str) -> Option<Reset> {
        let lower = text.to_ascii_lowercase();
        let mut starts: Vec<usize> = BEFORE
            .iter()
            .flat_map(|word| lower.match_indices(word).map(|(at, _)| (at, at + word.len())))
            .filter(|(from, to)| {
                let is_letter = |letter: char| letter.is_alphanumeric();
                !lower[..*from].ends_with(is_letter) && !lower[*to..].starts_with(is_letter)
            })
            .map(|(_, to)| to)
            .collect();
        starts.sort_unstable();
        starts.into_iter().find_map(|at| after(&text[at..]))
    }

    /// The time zone that the driver must look up.
    pub fn zone(&self) -> Option<&str> {
        match self {
            Reset::At { zone, .. } => zone.as_deref(),
            Reset::In(_) => None,
        }
    }

    /// `zone`: the one that is named, or the agent's own; None if it is not known.
    pub fn end(&self, now: i64, zone: Option<&Zone>) -> Option<End> {
        let end = match self {
            Reset::In(seconds) => End { at: now.checked_add(*seconds)?, is_exact: true },
            Reset::At { date, time, zone: name } => {
                let utc = Zone::utc();
                let is_utc = name.as_deref().is_some_and(|name| matches!(name, "UTC" | "GMT" | "Z" | "Etc/UTC"));
                let zone = if is_utc { &utc } else { zone? };
                End { at: at(*date, *time, zone, now)?, is_exact: false }
            }
        };
        (end.at <= now + AHEAD_MAX).then_some(end)
    }
}

fn at(date: Option<Date>, time: Option<(u32, u32)>, zone: &Zone, now: i64) -> Option<i64> {
    let today = zone.civil(now);
    let (hour, minute) = time.unwrap_or((0, 0));
    let of = |date: Civil| zone.epoch_of(Civil { hour, minute, ..date });
    match date {
        None => {
            let first = of(today)?;
            if first + JUST_PASSED >= now {
                return Some(first);
            }
            // The calendar's next day, however long this one is.
            let noon = Zone::utc().epoch_of(Civil { hour: 12, minute: 0, ..today })?;
            of(Zone::utc().civil(noon + DAY))
        }
        Some(Date { year: Some(year), month, day }) => of(Civil { year, month, day, ..today }),
        Some(Date { year: None, month, day }) => {
            let this_year = of(Civil { month, day, ..today });
            match this_year.filter(|at| at + PASSED_MAX >= now) {
                Some(at) => Some(at),
                None => of(Civil { year: today.year + 1, month, day, ..today }),
            }
        }
    }
}

/// What follows one of the words.
fn after(text: &str) -> Option<Reset> {
    // The next part of the notice is about something else.
    let part = text.split(['·', '∙', '\n']).next().unwrap_or_default();
    let (words, zone) = match part.split_once('(') {
        Some((words, rest)) => (words, rest.split_once(')').map(|(zone, _)| zone.trim().to_owned())),
        None => (part, None),
    };
    let words = words.to_ascii_lowercase();
    let is_end = |letter: char| matches!(letter, '.' | ';' | ':' | '!' | ')');
    let words = words.split(|letter: char| letter.is_whitespace() || letter == ',');
    let words: Vec<&str> = words.map(|word| word.trim_end_matches(is_end)).filter(|word| !word.is_empty()).collect();
    let skipped = words.iter().take_while(|word| matches!(**word, "at" | "on" | "by")).count();
    match words[skipped..].split_first() {
        Some((&"in", rest)) => duration(rest).map(Reset::In),
        Some(_) => moment(&words[skipped..], zone),
        None => None,
    }
}

/// `3h 20m`, `2 days and 3 hours`, `45 minutes`.
fn duration(words: &[&str]) -> Option<i64> {
    let (mut seconds, mut pending) = (None, None);
    for word in words {
        let mut rest = *word;
        if rest == "and" {
            continue;
        }
        while !rest.is_empty() {
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            let letters = rest[digits..].bytes().take_while(u8::is_ascii_alphabetic).count();
            let unit = match (letters > 0).then(|| unit(&rest[digits..digits + letters])) {
                Some(None) => return seconds,
                Some(unit) => unit,
                None => None,
            };
            if digits > 0 {
                pending = rest[..digits].parse::<i64>().ok().filter(|_| digits <= 6);
            }
            match (pending, unit) {
                (Some(count), Some(unit)) => {
                    seconds = Some(seconds.unwrap_or(0) + count * unit);
                    pending = None;
                }
                (Some(_), None) if digits > 0 => {}
                _ => return seconds,
            }
            rest = &rest[digits + letters..];
            if digits + letters == 0 {
                return seconds;
            }
        }
    }
    seconds
}

fn unit(word: &str) -> Option<i64> {
    match word {
        "s" | "sec" | "secs" | "second" | "seconds" => Some(1),
        "m" | "min" | "mins" | "minute" | "minutes" => Some(60),
        "h" | "hr" | "hrs" | "hour" | "hours" => Some(3600),
        "d" | "day" | "days" => Some(DAY),
        _ => None,
    }
}

/// `3pm`, `3:37 AM`, `15:37`, `Nov 20, 3pm`, `Nov 20th, 2026 3:15 PM`, `2026-11-20 15:37`.
fn moment(words: &[&str], zone: Option<String>) -> Option<Reset> {
    let (mut year, mut month, mut day, mut time, mut zone) = (None, None, None, None, zone);
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        let half = words.peek().map(|next| **next).filter(|next| matches!(*next, "am" | "pm" | "a.m" | "p.m"));
        if let Some((date, rest)) = iso_date(word) {
            (year, month, day) = (Some(date.0), Some(date.1), Some(date.2));
            if let Some(clock) = rest.strip_prefix('t') {
                let (clock, is_utc) = clock.strip_suffix('z').map_or((clock, false), |clock| (clock, true));
                time = Some(clock_time(clock, None)?);
                zone = zone.or_else(|| is_utc.then(|| "UTC".to_owned()));
            }
        } else if let Some(found) = month_of(word) {
            month = Some(found);
        } else if month.is_some() && day.is_none() && half.is_none() && ordinal(word).is_some() {
            day = ordinal(word);
        } else if let Some(found) = word.parse().ok().filter(|found| (1970..=9999).contains(found)) {
            year = Some(found);
        } else if let Some(found) = clock_time(word, half).filter(|_| time.is_none()) {
            time = Some(found);
            if half.is_some() {
                words.next();
            }
        } else if *word == "at" || *word == "on" {
        } else if *word == "utc" || *word == "gmt" {
            zone = zone.or_else(|| Some("UTC".to_owned()));
        } else {
            break;
        }
    }
    let date = match (month, day) {
        (Some(month), Some(day)) => Some(Date { year, month, day }),
        (None, None) => None,
        _ => return None,
    };
    (date.is_some() || time.is_some()).then_some(Reset::At { date, time, zone })
}

fn iso_date(word: &str) -> Option<((i64, u32, u32), &str)> {
    let (date, rest) = word.split_at_checked(10)?;
    let mut parts = date.split('-');
    let (year, month, day) = (parts.next()?, parts.next()?, parts.next()?);
    let is_date = year.len() == 4 && month.len() == 2 && parts.next().is_none();
    is_date.then_some(((year.parse().ok()?, month.parse().ok()?, day.parse().ok()?), rest))
}

/// By its name, or the first three letters of it.
fn month_of(word: &str) -> Option<u32> {
    let is_it = |month: &&str| *month == word || month[..3] == *word || (word == "sept" && month.starts_with(word));
    MONTHS.iter().position(is_it).and_then(|at| u32::try_from(at + 1).ok())
}

/// `20`, `20th`, `1st`.
fn ordinal(word: &str) -> Option<u32> {
    let digits = word.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let is_ordinal = matches!(&word[digits.len()..], "" | "st" | "nd" | "rd" | "th");
    digits.parse().ok().filter(|day| is_ordinal && (1..=31).contains(day))
}

/// `3pm`, `3:37am`, `3:37` with `pm` behind it, `15:37`, `15:37:05`. A number alone is no time.
fn clock_time(word: &str, half: Option<&str>) -> Option<(u32, u32)> {
    let digits = word.trim_end_matches(|letter: char| letter.is_ascii_alphabetic() || letter == '.');
    let half = match &word[digits.len()..] {
        "" => half,
        attached => Some(attached),
    };
    let is_afternoon = match half.map(|half| half.trim_end_matches('.')) {
        None => None,
        Some("am" | "a.m") => Some(false),
        Some("pm" | "p.m") => Some(true),
        Some(_) => return None,
    };
    let mut parts = digits.split(':');
    let hour: u32 = parts.next()?.parse().ok()?;
    let minute: u32 = match parts.next() {
        Some(minute) => minute.parse().ok().filter(|_| minute.len() == 2)?,
        None if is_afternoon.is_some() => 0,
        None => return None,
    };
    let hour = match is_afternoon {
        None => hour,
        Some(_) if !(1..=12).contains(&hour) => return None,
        Some(is_afternoon) => hour % 12 + if is_afternoon { 12 } else { 0 },
    };
    (hour < 24 && minute < 60).then_some((hour, minute))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn civil(year: i64, month: u32, day: u32, hour: u32, minute: u32) -> Civil {
        Civil { year, month, day, hour, minute }
    }

    fn berlin() -> Zone {
        Zone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap()
    }

    /// 2026-11-18 00:38:20 UTC, which is 01:38 in Berlin.
    fn now() -> i64 {
        Zone::utc().epoch_of(civil(2026, 11, 18, 0, 38)).unwrap() + 20
    }

    #[test]
    fn a_notice_says_when_the_limit_ends() {
        #[rustfmt::skip]
        let table = [
            // the notice, as agents show it                                           in Berlin
            ("You've hit your 5-hour limit · resets 3:37am (Europe/Berlin)",           Some((18, 3, 37))),
            ("You've hit your session limit · resets 3pm (Europe/Berlin) · progress saved", Some((18, 15, 0))),
            ("You've hit your session limit · resets 1am (Europe/Berlin)",             Some((19, 1, 0))),
            // The minute that is running, or has just passed.
            ("resets 1:38am",                                                          Some((18, 1, 38))),
            ("resets 1:37am",                                                          Some((18, 1, 37))),
            ("resets 1:35am",                                                          Some((19, 1, 35))),
            ("You've hit your weekly limit · resets Nov 20, 3pm (Europe/Berlin)",      Some((20, 15, 0))),
            ("resets Nov 20, 2026, 3:15pm (Europe/Berlin)",                            Some((20, 15, 15))),
            ("Usage limit reached · limit resets 3:37am",                              Some((18, 3, 37))),
            ("5-hour limit reached ∙ resets 12am",                                     Some((19, 0, 0))),
            ("5-hour limit reached ∙ resets 12pm",                                     Some((18, 12, 0))),
            ("You’ve hit your usage limit. Upgrade to Pro (https://chatgpt.com/explore/pro) or try again at 3:37 AM.", Some((18, 3, 37))),
            ("You’ve hit your usage limit. Try again at Nov 20th, 2026 3:15 PM.",      Some((20, 15, 15))),
            ("quota exceeded, resets in 3h 20m",                                       Some((18, 4, 58))),
            ("resets in 3h20m",                                                        Some((18, 4, 58))),
            ("try again in 2 days and 3 hours.",                                       Some((20, 4, 38))),
            ("try again in 45 minutes",                                                Some((18, 2, 23))),
            ("Your limit resets on 2026-11-20 15:37",                                  Some((20, 15, 37))),
            ("limit reached until 2026-11-20T14:37:00Z",                               Some((20, 15, 37))),
            ("resets 3pm (UTC)",                                                       Some((18, 16, 0))),
            ("resets at 15:37 UTC",                                                    Some((18, 16, 37))),
            ("You're out of usage credits · resets Dec 1 (UTC)",                       None),
            // What is no time.
            ("Your usage limit has reset",                                             None),
            ("resets soon",                                                            None),
            ("resets 25:00",                                                           None),
            ("resets 13pm",                                                            None),
            ("resets at 3",                                                            None),
            ("resets Nov",                                                             None),
            ("resets Feb 30, 3pm",                                                     None),
            ("resets in a while",                                                      None),
            ("resets in 99999999999999999999h",                                        None),
            ("preset 3pm",                                                             None),
            ("",                                                                       None),
        ];
        let (utc, zone) = (Zone::utc(), berlin());
        for (text, expected) in table {
            let end = Reset::read(text).and_then(|reset| reset.end(now(), Some(&zone)));
            let shown = end.map(|end| zone.civil(end.at)).filter(|shown| shown.month == 11);
            assert_eq!(shown.map(|shown| (shown.day, shown.hour, shown.minute)), expected, "{text}");
        }
        let december = Reset::read("resets Dec 1 (UTC)").and_then(|reset| reset.end(now(), None)).unwrap();
        assert_eq!(utc.civil(december.at), civil(2026, 12, 1, 0, 0));
    }

    #[test]
    fn a_zone_that_is_not_known_gives_no_end() {
        let reset = Reset::read("resets 3pm (Mars/Olympus)").unwrap();
        assert_eq!(reset.zone(), Some("Mars/Olympus"));
        assert_eq!(reset.end(now(), None), None);
        assert!(Reset::read("resets in 5m").unwrap().end(now(), None).is_some(), "this needs no zone");
    }

    #[test]
    fn an_end_across_a_change_of_clocks_and_of_the_year() {
        let zone = berlin();
        let at = |now: Civil, text: &str| {
            let now = zone.epoch_of(now).unwrap();
            let end = Reset::read(text).unwrap().end(now, Some(&zone)).unwrap();
            (Zone::utc().civil(end.at), end.at - now)
        };
        let hours = |hours: i64| hours * 3600;
        #[rustfmt::skip]
        let table = [
            // now                          the notice          UTC                          seconds from now
            (civil(2026, 3, 28, 22, 0),  "resets 3am",       civil(2026, 3, 29, 1, 0),    hours(4)),
            (civil(2026, 3, 28, 22, 0),  "resets 2:30am",    civil(2026, 3, 29, 1, 30),   hours(4) + 1800),
            (civil(2026, 10, 24, 22, 0), "resets 3am",       civil(2026, 10, 25, 2, 0),   hours(6)),
            // The hour that comes twice: the first of the two.
            (civil(2026, 10, 24, 22, 0), "resets 2:30am",    civil(2026, 10, 25, 0, 30),  hours(4) + 1800),
            (civil(2026, 10, 24, 12, 0), "resets 11am",      civil(2026, 10, 25, 10, 0),  hours(24)),
            (civil(2026, 12, 31, 23, 0), "resets 1am",       civil(2027, 1, 1, 0, 0),     hours(2)),
            (civil(2026, 12, 30, 23, 0), "resets Jan 2, 1am", civil(2027, 1, 2, 0, 0),    hours(50)),
            (civil(2028, 2, 28, 23, 0),  "resets 1am",       civil(2028, 2, 29, 0, 0),    hours(2)),
        ];
        for (now, text, utc, seconds) in table {
            assert_eq!(at(now, text), (utc, seconds), "{now:?} {text}");
        }
    }
}
