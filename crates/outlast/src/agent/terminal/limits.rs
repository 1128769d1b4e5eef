//! Drives the machine of usage limits: shows it the agent's notices, looks up time zones, and carries out what it decides.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use outlast_core::{
    limit::{
        Action, Event, OnLimit, ShownNotice,
        notice::{self, Notice, Recorded},
        reset::{End, Reset},
    },
    session,
    stance::{Stance, View},
    waiting,
    zone::Zone,
};
use outlast_os as os;
use serde_json::json;

use super::{Terminal, sending::Own};
use crate::state::home;

/// What makes an agent continue, unless `--on-resume` names another text.
const CONTINUE: &str = "Continue.";
/// The end of the agent's file that is searched for the last turn.
const TAIL_MAX: u64 = 512 << 10;
/// A longer file is no time zone.
const ZONE_MAX: u64 = 64 << 10;
/// Where systems keep the time zone database.
const ZONES: [&str; 3] = ["/usr/share/zoneinfo", "/usr/lib/zoneinfo", "/etc/zoneinfo"];
const LOCAL_ZONE: &str = "/etc/localtime";

impl Terminal {
    /// What the machine of limits learns from an event of the other one.
    pub(super) fn limit_hears(&mut self, event: &waiting::Event) {
        let event = match event {
            waiting::Event::AgentStarted => Event::AgentStarted,
            waiting::Event::AgentEnded => Event::AgentEnded,
            waiting::Event::Input { enter: true } => Event::Entered,
            waiting::Event::TurnBegan => Event::Worked,
            waiting::Event::Looked { sight, .. } if sight.stance == Stance::Busy => Event::Worked,
            _ => return,
        };
        self.tell_limit(event);
    }

    pub(super) fn tell_limit(&mut self, event: Event) {
        let actions = self.limit.handle(event, self.now, wall());
        for action in actions {
            match action {
                Action::Limited => self.became_limited(),
                Action::Over => {
                    self.withdraw_own(Own::AfterLimit);
                    self.journal.event("limit_over", &[]);
                    self.notify("limit_over", json!({}), false);
                }
                Action::Continue => {
                    self.journal.event("limit_continue", &[]);
                    let text = self.plan.on_resume.clone().unwrap_or_else(|| CONTINUE.to_owned());
                    // This text is for an interrupted turn, too.
                    self.on_resume.turn_began();
                    self.send_own(Own::AfterLimit, text);
                }
                Action::GaveUp => {
                    self.journal.note("the agent could not be told to continue after its usage limit");
                    self.notify("limit_continue_failed", json!({}), true);
                }
                Action::Stop => {
                    self.journal.event("user_action", &[("action", &"stop"), ("by", &"on_limit")]);
                    // The conversation can be continued later.
                    self.is_interrupted = true;
                    self.is_stopped_by_limit = true;
                    self.tell(session::Event::StopAsked { force: false });
                }
            }
        }
    }

    fn became_limited(&mut self) {
        let Some(seen) = self.limit.seen().cloned() else { return };
        let until = self.limit_end_in_words();
        self.journal.event("limited", &[("until", &until.as_deref().unwrap_or("unknown"))]);
        let about = json!({
            "until": seen.end.map(|end| end.at),
            "until_text": until,
            "text": seen.text,
            "on_limit": match self.plan.on_limit {
                OnLimit::Tell => "tell",
                OnLimit::Wait => "wait",
                OnLimit::Stop => "stop",
            },
        });
        self.notify("limited", about, true);
    }

    /// The end of the limit on clocks of the agent's zone.
    pub(super) fn limit_end_in_words(&self) -> Option<String> {
        let end = self.limit.seen()?.end?;
        let zone = self.zone(None);
        let shown = zone.as_ref().unwrap_or(&Zone::utc()).civil(end.at);
        let suffix = if zone.is_some() { "" } else { " UTC" };
        let (year, month, day) = (shown.year, shown.month, shown.day);
        Some(format!("{year}-{month:02}-{day:02} {:02}:{:02}{suffix}", shown.hour, shown.minute))
    }

    /// Searches the screen for a notice.
    pub(super) fn look_for_limit(&mut self, view: &View) {
        if !self.limit.is_looking() {
            return;
        }
        let notice = notice::on_screen(self.agent.kind(), &view.lines, self.agent.limit());
        let seen = notice.and_then(|notice| self.limit_seen(notice));
        self.tell_limit(Event::Looked(seen));
    }

    fn limit_seen(&mut self, notice: Notice) -> Option<ShownNotice> {
        let recorded = self.recorded_limit();
        if notice.needs_record && recorded.is_none() {
            return None;
        }
        let Recorded { text, resets_at } =
            recorded.unwrap_or_else(|| Recorded { text: notice.text.clone(), resets_at: None });
        let exact = resets_at.map(|at| End { at, is_exact: true });
        let read = || {
            // A record is not wrapped, the screen may be.
            let reset = Reset::read(&text).or_else(|| Reset::read(&notice.text))?;
            let zone = self.zone(reset.zone());
            reset.end(wall(), zone.as_ref())
        };
        let end = exact.or_else(read);
        Some(ShownNotice { text: notice.text, end, continues_itself: notice.continues_itself })
    }

    /// What the agent recorded, if its last turn ended at the limit.
    fn recorded_limit(&self) -> Option<Recorded> {
        let files = self.turn_files();
        files.iter().find_map(|file| {
            let tail = tail_of(file, TAIL_MAX)?;
            notice::recorded(self.agent.kind(), tail.split(|byte| *byte == b'\n'))
        })
    }

    /// A zone by its name; without a name, the one of the agent.
    fn zone(&self, name: Option<&str>) -> Option<Zone> {
        if let Some(name) = name {
            return named_zone(name);
        }
        let set = self.place.env.iter().find(|(known, _)| known == "TZ");
        match set.map(|(_, value)| value.to_string_lossy().into_owned()) {
            None => zone_in(Path::new(LOCAL_ZONE)),
            Some(value) => {
                let value = value.trim_start_matches(':');
                match value {
                    "" => Some(Zone::utc()),
                    path if path.starts_with('/') => zone_in(Path::new(path)),
                    name => named_zone(name).or_else(|| Zone::posix(name)),
                }
            }
        }
    }
}

/// Seconds since 1970.
fn wall() -> i64 {
    // As exact as limits are.
    home::epoch() as i64
}

/// A name of the database has letters, digits and a few signs, and stays below its directory.
fn named_zone(name: &str) -> Option<Zone> {
    let is_name = name.split('/').all(|part| {
        let is_sign = |byte: u8| matches!(byte, b'_' | b'-' | b'+');
        !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || is_sign(byte))
    });
    if !is_name {
        return None;
    }
    ZONES.iter().find_map(|dir| zone_in(&Path::new(dir).join(name)))
}

fn zone_in(file: &Path) -> Option<Zone> {
    Zone::read(&os::read_named(file, ZONE_MAX).ok()?)
}

/// The end of a file, from the beginning of a line.
pub(super) fn tail_of(file: &PathBuf, max: u64) -> Option<Vec<u8>> {
    let mut opened = File::open(file).ok()?;
    let length = opened.metadata().ok()?.len();
    let from = length.saturating_sub(max);
    opened.seek(SeekFrom::Start(from)).ok()?;
    let mut tail = Vec::new();
    opened.take(max).read_to_end(&mut tail).ok()?;
    if from > 0 {
        let line = tail.iter().position(|byte| *byte == b'\n')?;
        tail.drain(..=line);
    }
    Some(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_the_database_are_looked_up() {
        for name in ["", "../../etc/localtime", "/etc/localtime", "Europe//Berlin", "Europe/Ber lin", "a\0b"] {
            assert_eq!(named_zone(name), None, "{name:?}");
        }
        if Path::new("/usr/share/zoneinfo/Europe/Berlin").exists() {
            let berlin = named_zone("Europe/Berlin").unwrap();
            // Summer and winter, also after the last transition that a file may list.
            for (epoch, offset) in [(1_782_864_000, 7200), (1_796_083_200, 3600), (4_086_288_000, 7200)] {
                assert_eq!(berlin.offset_at(epoch), offset, "{epoch}");
            }
        }
    }

    #[test]
    fn the_end_of_a_file_begins_with_a_line() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("t");
        std::fs::write(&file, "one\ntwo\nthree\n").unwrap();
        let tail = |max| tail_of(&file, max).map(|tail| String::from_utf8(tail).unwrap());
        assert_eq!(tail(100).as_deref(), Some("one\ntwo\nthree\n"));
        assert_eq!(tail(8).as_deref(), Some("three\n"));
        assert_eq!(tail(3), Some(String::new()), "no line begins in it");
        assert_eq!(tail_of(&dir.path().join("missing"), 8), None);
    }
}
