//! Samples → medians, ratios and the verdict on each limit.

use std::fmt::Write;

use serde_json::{Value, json};

use super::subject::Subject;
use crate::bench::{samples::Samples, table::show};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Metric {
    SmallP50,
    SmallP99,
    CpuSmall,
    Load,
    CpuLoad,
    Rss,
    Crash,
    CrashPause,
    CrashFailed,
    CrashHung,
    LongestTurn,
    LongestTurnList,
    LongestTurnLists,
    LongestTurnCollisions,
    LongestTurnLarge,
    LongestTurnDeep,
    LongestTurnNumbers,
    LongestTurnUpdates,
    LongestCpuOfWait,
    LongestWait,
    SessionsStart,
    SessionsMemory,
    SessionsStored,
    SessionsDisk,
}

/// The limit for `outlast`.
#[derive(Clone, Copy)]
enum Bar {
    Most(f64),
    LeastTimesHop(f64),
    MostOverDirect(f64),
}

impl Metric {
    /// A stable name for programs, a description for people, the unit, and the limit.
    fn describe(self) -> (&'static str, &'static str, &'static str, Option<Bar>) {
        match self {
            Metric::SmallP50 => ("small_p50", "one session, p50", "µs", None),
            Metric::SmallP99 => ("small_p99", "one session, p99", "µs", None),
            Metric::CpuSmall => ("cpu_small", "CPU of the gateway per call, one session", "µs", Some(Bar::Most(80.0))),
            Metric::Load => ("load", "32 sessions", "calls/s", Some(Bar::LeastTimesHop(0.7))),
            Metric::CpuLoad => ("cpu_load", "CPU of the gateway per call, 32 sessions", "µs", Some(Bar::Most(80.0))),
            Metric::Rss => ("rss", "PSS idle, 10 backends", "MB", Some(Bar::Most(15.0))),
            Metric::Crash => (
                "crash",
                "from kill -9 to the next answer in the same session (direct: a start)",
                "ms",
                Some(Bar::MostOverDirect(20.0)),
            ),
            Metric::CrashPause => ("crash_pause", "kill -9 under 32 sessions, longest wait", "ms", None),
            Metric::CrashFailed => ("crash_failed", "kill -9 under 32 sessions, failed calls", "", None),
            Metric::CrashHung => ("crash_hung", "kill -9 under 32 sessions, hung calls", "", Some(Bar::Most(0.0))),
            Metric::LongestTurn => (
                "longest_turn",
                "hostile schemas and arguments, CPU of the longest turn of the loop",
                "ms",
                Some(Bar::Most(50.0)),
            ),
            Metric::LongestTurnList => (
                "longest_turn_list",
                "one backend with 60,000 names in each list, the same",
                "ms",
                Some(Bar::Most(50.0)),
            ),
            Metric::LongestTurnLists => (
                "longest_turn_lists",
                "8 backends with 60,000 names in each list, which change all the time, the same",
                "ms",
                Some(Bar::Most(50.0)),
            ),
            Metric::LongestTurnCollisions => (
                "longest_turn_collisions",
                "8 backends with the same 60,000 names, which change all the time, the same",
                "ms",
                Some(Bar::Most(50.0)),
            ),
            Metric::LongestTurnLarge => (
                "longest_turn_large",
                "8 backends with 4 MiB in each list, which change all the time, the same",
                "ms",
                Some(Bar::Most(50.0)),
            ),
            Metric::LongestTurnDeep => (
                "longest_turn_deep",
                "8 backends with elements nested 9,900 levels deep, which change all the time, the same",
                "ms",
                Some(Bar::Most(50.0)),
            ),
            Metric::LongestTurnNumbers => (
                "longest_turn_numbers",
                "8 backends with 4 MiB of numbers and escape sequences in each list, which change all the time, the same",
                "ms",
                Some(Bar::Most(50.0)),
            ),
            Metric::LongestTurnUpdates => (
                "longest_turn_updates",
                "a backend reports 18,288 changes of a resource to 200 sessions, the same",
                "ms",
                Some(Bar::Most(50.0)),
            ),
            Metric::LongestCpuOfWait => (
                "longest_cpu_of_wait",
                "the most CPU of the loop in one wait of another client, in all of these",
                "ms",
                None,
            ),
            Metric::LongestWait => ("longest_wait", "the longest of all these waits", "ms", None),
            Metric::SessionsStart => (
                "sessions_start",
                "additional time to the first answer, at a start with 10,000 stored sessions",
                "ms",
                Some(Bar::Most(1000.0)),
            ),
            Metric::SessionsMemory => {
                ("sessions_memory", "memory of a used session, of 10,000", "kB", Some(Bar::Most(2.0)))
            }
            Metric::SessionsStored => {
                ("sessions_stored", "memory of a stored session after a restart", "kB", Some(Bar::Most(2.0)))
            }
            Metric::SessionsDisk => ("sessions_disk", "disk of 10,000 sessions", "MB", Some(Bar::Most(64.0))),
        }
    }
}

pub(crate) struct Report {
    rounds: usize,
    samples: Samples<Metric, Subject>,
}

impl Report {
    pub(crate) fn new(rounds: usize) -> Report {
        Report { rounds, samples: Samples::new() }
    }

    pub(crate) fn sample(&mut self, metric: Metric, subject: Subject, value: f64) {
        self.samples.add(metric, subject, value);
    }

    pub(crate) fn note(&mut self, note: String) {
        self.samples.note(note);
    }

    /// The limit in words, the value that is compared with it, and whether it is met.
    fn judge(&self, metric: Metric, bar: Bar) -> (String, Option<(f64, bool)>) {
        let value = self.samples.median(metric, Subject::Outlast);
        match bar {
            Bar::Most(most) => (format!("≤ {most}"), value.map(|value| (value, value <= most))),
            Bar::LeastTimesHop(least) => {
                let times = self.samples.times(metric, Subject::Outlast, Subject::Hop);
                (format!("≥ {least} × hop"), times.map(|times| (times, least <= times)))
            }
            Bar::MostOverDirect(most) => {
                let over =
                    value.zip(self.samples.median(metric, Subject::Direct)).map(|(value, direct)| value - direct);
                (format!("≤ direct + {most} ms"), over.map(|over| (over, over <= most)))
            }
        }
    }

    pub(crate) fn to_markdown(&self) -> String {
        let mut text = String::from("| what |");
        for subject in Subject::ALL {
            let _ = write!(text, " {} |", subject.name());
        }
        text.push_str(" bar | outlast has | verdict |\n|---|");
        text.push_str(&"---:|".repeat(Subject::ALL.len()));
        text.push_str("---|---:|---|\n");
        for metric in self.samples.metrics() {
            let (_, words, unit, bar) = metric.describe();
            let _ = write!(text, "| {words}{}{unit} |", if unit.is_empty() { "" } else { ", " });
            for subject in Subject::ALL {
                let cell = self.samples.median(metric, subject).map_or_else(|| "–".into(), show);
                match self.samples.times(metric, subject, Subject::Hop).filter(|_| subject != Subject::Hop) {
                    Some(times) => _ = write!(text, " {cell} ({times:.2}×) |"),
                    None => _ = write!(text, " {cell} |"),
                }
            }
            match bar.map(|bar| (bar, self.judge(metric, bar))) {
                None => text.push_str(" | | |\n"),
                Some((_, (bar, None))) => _ = writeln!(text, " {bar} | – | not measured |"),
                Some((kind, (bar, Some((value, is_met))))) => {
                    let value = match kind {
                        Bar::LeastTimesHop(_) => format!("{value:.2} ×"),
                        Bar::MostOverDirect(_) => format!("+ {} ms", show(value)),
                        Bar::Most(_) => show(value),
                    };
                    let _ = writeln!(text, " {bar} | {value} | {} |", if is_met { "met" } else { "**missed**" });
                }
            }
        }
        let _ = writeln!(text, "\nMedians of {} rounds; in brackets the median ratio to the bare hop.", self.rounds);
        for note in &self.samples.notes {
            let _ = writeln!(text, "- {note}");
        }
        text
    }

    pub(crate) fn to_json(&self) -> Value {
        let rows = self.samples.metrics().into_iter().map(|metric| {
            let (name, words, unit, bar) = metric.describe();
            let values = self.samples.to_json(metric, Subject::name, &[("times_hop", Subject::Hop)]);
            let mut row = json!({"name": name, "what": words, "unit": unit, "subjects": values});
            if let Some((bar, Some((value, is_met)))) = bar.map(|bar| self.judge(metric, bar)) {
                row["bar"] = json!(bar);
                row["value"] = json!(value);
                row["met"] = json!(is_met);
            }
            row
        });
        json!({"rounds": self.rounds, "rows": rows.collect::<Vec<_>>(), "notes": self.samples.notes})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_judged_against_the_hop_of_the_same_round() {
        let mut report = Report::new(3);
        for (hop, outlast) in [(1000.0, 800.0), (900.0, 720.0), (100.0, 80.0)] {
            report.sample(Metric::Load, Subject::Hop, hop);
            report.sample(Metric::Load, Subject::Outlast, outlast);
        }
        report.sample(Metric::CpuLoad, Subject::Outlast, 81.0);
        report.sample(Metric::Crash, Subject::Direct, 1.0);
        report.sample(Metric::Crash, Subject::Outlast, f64::INFINITY);
        report.sample(Metric::CrashHung, Subject::Outlast, 0.0);
        let rows = report.to_json()["rows"].clone();
        let met = |name: &str| {
            rows.as_array().expect("rows").iter().find(|row| row["name"] == name).expect("a row")["met"].clone()
        };
        assert_eq!([met("load"), met("cpu_load"), met("crash"), met("crash_hung")], [true, false, false, true]);
        assert!(report.to_markdown().contains("| 720 (0.80×) |"), "{}", report.to_markdown());
    }
}
