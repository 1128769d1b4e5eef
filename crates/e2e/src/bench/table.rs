//! Samples → medians, ratios and the verdict on each limit.

use std::fmt::Write;

use serde_json::{Value, json};

use super::{samples::Samples, subject::Subject};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Metric {
    SmallP50,
    SmallP99,
    Deep,
    Big,
    CpuSmall,
    CpuDeep,
    CpuBig,
    RssIdle,
    RssAfter,
    Start,
    Crash,
    ReloadFailed,
    ReloadTook,
    ReloadPause,
}

/// The limit for `outlast`.
#[derive(Clone, Copy)]
enum Bar {
    MostTimesFloor(f64),
    LeastTimesFloor(f64),
    MostOverDirect(f64),
    Most(f64),
}

impl Metric {
    /// A stable name for programs, a description for people, the unit, and the limit.
    fn describe(self, is_quick: bool) -> (&'static str, &'static str, &'static str, Option<Bar>) {
        match self {
            Self::SmallP50 => ("small_p50", "small call, p50", "µs", Some(Bar::MostTimesFloor(1.15))),
            Self::SmallP99 => ("small_p99", "small call, p99", "µs", None),
            Self::Deep => ("deep", "64 in flight", "calls/s", Some(Bar::LeastTimesFloor(0.9))),
            Self::Big => ("big", "1 MB echoes", "MB/s", Some(Bar::LeastTimesFloor(0.7))),
            Self::CpuSmall => ("cpu_small", "CPU of the relay per small call", "µs", None),
            Self::CpuDeep => ("cpu_deep", "CPU of the relay per call, 64 in flight", "µs", None),
            Self::CpuBig => ("cpu_big", "CPU of the relay per 1 MB echo", "µs", None),
            Self::RssIdle => ("rss_idle", "PSS idle", "MB", Some(Bar::Most(6.0))),
            Self::RssAfter if is_quick => ("rss_after", "PSS after 100 MB", "MB", Some(Bar::Most(9.0))),
            Self::RssAfter => ("rss_after", "PSS after 1 GB", "MB", Some(Bar::Most(9.0))),
            Self::Start => ("start", "start to `initialize` answer", "ms", Some(Bar::MostOverDirect(10.0))),
            Self::Crash => {
                ("crash", "from the crash to the first answer (direct: a start)", "ms", Some(Bar::MostOverDirect(10.0)))
            }
            Self::ReloadFailed => ("reload_failed", "reload under load, failed calls", "", Some(Bar::Most(0.0))),
            Self::ReloadTook => ("reload_took", "reload under load, time of the reload", "ms", None),
            Self::ReloadPause => ("reload_pause", "reload under load, longest pause", "ms", None),
        }
    }
}

pub(super) struct Report {
    rounds: usize,
    is_quick: bool,
    samples: Samples<Metric, Subject>,
}

impl Report {
    pub(super) fn new(rounds: usize, is_quick: bool) -> Self {
        Self { rounds, is_quick, samples: Samples::new() }
    }

    pub(super) fn sample(&mut self, metric: Metric, subject: Subject, value: f64) {
        self.samples.add(metric, subject, value);
    }

    pub(super) fn note(&mut self, note: String) {
        self.samples.note(note);
    }

    /// The value that is compared with the limit, in words and as a number; and whether the limit is met.
    fn judge(&self, metric: Metric, bar: Bar) -> (String, Option<(f64, bool)>) {
        let subject = Subject::Outlast;
        let times = self.samples.times(metric, subject, Subject::Floor);
        let value = self.samples.median(metric, subject);
        let over = value.zip(self.samples.median(metric, Subject::Direct)).map(|(value, direct)| value - direct);
        match bar {
            Bar::MostTimesFloor(most) => (format!("≤ {most} × floor"), times.map(|times| (times, times <= most))),
            Bar::LeastTimesFloor(least) => (format!("≥ {least} × floor"), times.map(|times| (times, least <= times))),
            Bar::MostOverDirect(most) => (format!("≤ direct + {most} ms"), over.map(|over| (over, over <= most))),
            Bar::Most(most) => (format!("≤ {most}"), value.map(|value| (value, value <= most))),
        }
    }

    pub(super) fn to_markdown(&self) -> String {
        let mut text = String::from("| what |");
        for subject in Subject::ALL {
            let _ = write!(text, " {} |", subject.name());
        }
        text.push_str(" bar | outlast has | verdict |\n|---|");
        text.push_str(&"---:|".repeat(Subject::ALL.len()));
        text.push_str("---|---:|---|\n");
        for metric in self.samples.metrics() {
            let (_, words, unit, bar) = metric.describe(self.is_quick);
            let _ = write!(text, "| {words}{}{unit} |", if unit.is_empty() { "" } else { ", " });
            for subject in Subject::ALL {
                let cell = match self.samples.median(metric, subject) {
                    Some(value) => show(value),
                    None => "–".into(),
                };
                let times = self.samples.times(metric, subject, Subject::Floor);
                let is_ratio = matches!(bar, Some(Bar::MostTimesFloor(_) | Bar::LeastTimesFloor(_)));
                let is_compared = is_ratio
                    || matches!(metric, Metric::SmallP99 | Metric::CpuSmall | Metric::CpuDeep | Metric::CpuBig);
                match times.filter(|_| is_compared && subject != Subject::Floor) {
                    Some(times) => _ = write!(text, " {cell} ({times:.2}×) |"),
                    None => _ = write!(text, " {cell} |"),
                }
            }
            match bar.map(|bar| (bar, self.judge(metric, bar))) {
                None => text.push_str(" | | |\n"),
                Some((_, (bar, None))) => _ = writeln!(text, " {bar} | – | not measured |"),
                Some((kind, (bar, Some((value, is_met))))) => {
                    let value = match kind {
                        Bar::MostTimesFloor(_) | Bar::LeastTimesFloor(_) => format!("{value:.2} ×"),
                        Bar::MostOverDirect(_) => format!("+ {} ms", show(value)),
                        Bar::Most(_) => show(value),
                    };
                    let verdict = if is_met { "met" } else { "**missed**" };
                    let _ = writeln!(text, " {bar} | {value} | {verdict} |");
                }
            }
        }
        let _ = writeln!(text, "\nMedians of {} rounds; in brackets the median ratio to the cat floor.", self.rounds);
        for note in &self.samples.notes {
            let _ = writeln!(text, "- {note}");
        }
        text
    }

    pub(super) fn to_json(&self) -> Value {
        let rows = self.samples.metrics().into_iter().map(|metric| {
            let (name, words, unit, bar) = metric.describe(self.is_quick);
            let bases = [("times_floor", Subject::Floor), ("times_direct", Subject::Direct)];
            let values = self.samples.to_json(metric, Subject::name, &bases);
            let mut row = json!({"name": name, "what": words, "unit": unit, "subjects": values});
            if let Some((bar, verdict)) = bar.map(|bar| self.judge(metric, bar)) {
                row["bar"] = bar.into();
                row["has"] = json!(verdict.map(|(value, _)| value));
                row["met"] = json!(verdict.map(|(_, is_met)| is_met));
            }
            row
        });
        let rows: Vec<Value> = rows.collect();
        json!({"rounds": self.rounds, "quick": self.is_quick, "rows": rows, "notes": self.samples.notes})
    }
}

pub(super) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        count if count % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// Three significant digits.
pub(super) fn show(value: f64) -> String {
    match value.abs() {
        size if size.is_infinite() => "never".into(),
        size if 100.0 <= size || value.fract() == 0.0 => format!("{value:.0}"),
        size if 10.0 <= size => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_judged_by_the_rounds_side_by_side() {
        let mut report = Report::new(3, false);
        // A disturbance slowed both subjects in the third round.
        for (floor, outlast) in [(20.0, 22.0), (21.0, 23.1), (90.0, 99.0)] {
            report.sample(Metric::SmallP50, Subject::Floor, floor);
            report.sample(Metric::SmallP50, Subject::Outlast, outlast);
        }
        for (metric, direct, outlast) in [(Metric::Start, 1.0, 12.0), (Metric::Crash, 1.0, f64::INFINITY)] {
            report.sample(metric, Subject::Direct, direct);
            report.sample(metric, Subject::Outlast, outlast);
        }
        report.sample(Metric::ReloadFailed, Subject::Outlast, 0.0);
        report.sample(Metric::Big, Subject::Floor, 800.0);
        let verdicts: Vec<_> = report.to_json()["rows"]
            .as_array()
            .expect("rows")
            .iter()
            .map(|row| (row["name"].as_str().expect("a name").to_owned(), row["met"].as_bool()))
            .collect();
        let expected = [
            ("small_p50", Some(true)),
            ("big", None),
            ("start", Some(false)),
            ("crash", Some(false)),
            ("reload_failed", Some(true)),
        ];
        assert_eq!(verdicts, expected.map(|(name, met)| (name.to_owned(), met)));
        let table = report.to_markdown();
        assert!(table.contains("| 23.1 (1.10×) |"), "{table}");
        assert!(table.contains("| never |"), "{table}");
    }
}
