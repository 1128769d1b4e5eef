//! Samples → medians, ratios and the verdict on each limit.

use std::{collections::BTreeMap, fmt::Write};

use serde_json::{Value, json};

use super::rig::Subject;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Metric {
    Copy,
    Cpu,
    Echo,
    Rss,
    Idle,
}

impl Metric {
    const ALL: [Self; 5] = [Self::Copy, Self::Cpu, Self::Echo, Self::Rss, Self::Idle];

    fn describe(self) -> (&'static str, &'static str) {
        match self {
            Self::Copy => ("copy", "text copied, MB/s"),
            Self::Cpu => ("cpu", "CPU of what is in between, ms/MB"),
            Self::Echo => ("echo", "a key echoed, p50, µs"),
            Self::Rss => ("rss", "PSS after that, MB"),
            Self::Idle => ("idle", "CPU while nothing happens, ms/s"),
        }
    }
}

/// A limit: the subject, and the value it is compared with.
#[derive(Clone, Copy)]
enum Bar {
    LeastTimes(Subject, f64),
    MostTimes(Subject, f64),
    MostOver(Subject, f64),
    Most(f64),
}

const BARS: [(Metric, Subject, Bar); 8] = [
    (Metric::Copy, Subject::OutlastPlain, Bar::LeastTimes(Subject::Raw, 0.45)),
    (Metric::Copy, Subject::Outlast, Bar::LeastTimes(Subject::Raw, 0.40)),
    (Metric::Copy, Subject::Outlast, Bar::LeastTimes(Subject::Tmux, 1.3)),
    (Metric::Echo, Subject::Outlast, Bar::MostTimes(Subject::Tmux, 1.0)),
    (Metric::Echo, Subject::Outlast, Bar::MostOver(Subject::Raw, 150.0)),
    (Metric::Rss, Subject::Outlast, Bar::Most(15.0)),
    (Metric::Idle, Subject::Outlast, Bar::Most(0.0)),
    (Metric::Idle, Subject::OutlastPlain, Bar::Most(0.0)),
];

pub(super) struct Report {
    rounds: usize,
    samples: BTreeMap<(Metric, Subject), Vec<f64>>,
    notes: Vec<String>,
    failures: Vec<String>,
}

impl Report {
    pub(super) fn new(rounds: usize) -> Self {
        Self { rounds, samples: BTreeMap::new(), notes: Vec::new(), failures: Vec::new() }
    }

    pub(super) fn sample(&mut self, metric: Metric, subject: Subject, value: f64) {
        self.samples.entry((metric, subject)).or_default().push(value);
    }

    pub(super) fn note(&mut self, note: String) {
        eprintln!("{note}");
        self.notes.push(note);
    }

    pub(super) fn fail(&mut self, failure: String) {
        eprintln!("FAILED: {failure}");
        self.failures.push(failure);
    }

    /// True if every planned measurement was made. A missed limit is a result, too.
    pub(super) fn is_sound(&self) -> bool {
        self.failures.is_empty()
    }

    fn of(&self, metric: Metric, subject: Subject) -> &[f64] {
        self.samples.get(&(metric, subject)).map_or(&[], Vec::as_slice)
    }

    fn median(&self, metric: Metric, subject: Subject) -> Option<f64> {
        median(self.of(metric, subject).to_vec())
    }

    /// The median of the ratios of each round, so that a disturbance of a round affects both values.
    fn times(&self, metric: Metric, subject: Subject, base: Subject) -> Option<f64> {
        let pairs = self.of(metric, subject).iter().zip(self.of(metric, base));
        median(pairs.filter(|(_, base)| **base != 0.0).map(|(value, base)| value / base).collect())
    }

    fn over(&self, metric: Metric, subject: Subject, base: Subject) -> Option<f64> {
        let pairs = self.of(metric, subject).iter().zip(self.of(metric, base));
        median(pairs.map(|(value, base)| value - base).collect())
    }

    /// The limit in words, the value that is compared with it, and whether it is met.
    fn judge(&self, metric: Metric, subject: Subject, bar: Bar) -> (String, Option<(String, bool)>) {
        match bar {
            Bar::LeastTimes(base, least) => {
                let times = self.times(metric, subject, base);
                let verdict = times.map(|times| (format!("{times:.2} ×"), least <= times));
                (format!("≥ {least} × {}", base.name()), verdict)
            }
            Bar::MostTimes(base, most) => {
                let times = self.times(metric, subject, base);
                let verdict = times.map(|times| (format!("{times:.2} ×"), times <= most));
                (format!("≤ {most} × {}", base.name()), verdict)
            }
            Bar::MostOver(base, most) => {
                let over = self.over(metric, subject, base);
                (format!("≤ {} + {most}", base.name()), over.map(|over| (format!("+ {}", show(over)), over <= most)))
            }
            Bar::Most(most) => {
                let value = self.median(metric, subject);
                (format!("≤ {most}"), value.map(|value| (show(value), value <= most)))
            }
        }
    }

    fn metrics(&self) -> impl Iterator<Item = Metric> {
        Metric::ALL.into_iter().filter(|metric| self.samples.keys().any(|(known, _)| known == metric))
    }

    fn bars(&self) -> impl Iterator<Item = (Metric, Subject, Bar)> {
        BARS.into_iter().filter(|(metric, ..)| self.metrics().any(|known| known == *metric))
    }

    pub(super) fn to_markdown(&self) -> String {
        let mut text = String::from("| what |");
        for subject in Subject::ALL {
            let _ = write!(text, " {} |", subject.name());
        }
        let _ = writeln!(text, "\n|---|{}", "---:|".repeat(Subject::ALL.len()));
        for metric in self.metrics() {
            let _ = write!(text, "| {} |", metric.describe().1);
            for subject in Subject::ALL {
                let cell = self.median(metric, subject).map_or_else(|| "–".into(), show);
                let times = self.times(metric, subject, Subject::Raw).filter(|_| subject != Subject::Raw);
                match times.filter(|_| metric == Metric::Copy) {
                    Some(times) => _ = write!(text, " {cell} ({times:.2}×) |"),
                    None => _ = write!(text, " {cell} |"),
                }
            }
            text.push('\n');
        }
        text.push_str("\n| bar | | has | verdict |\n|---|---|---:|---|\n");
        for (metric, subject, bar) in self.bars() {
            let (words, verdict) = self.judge(metric, subject, bar);
            let (has, verdict) = match verdict {
                None => ("–".to_owned(), "not measured"),
                Some((has, true)) => (has, "met"),
                Some((has, false)) => (has, "**missed**"),
            };
            let _ = writeln!(text, "| {}: {} | {words} | {has} | {verdict} |", metric.describe().1, subject.name());
        }
        let _ = writeln!(text, "\nMedians of {} rounds; in brackets the median ratio to the raw pty.", self.rounds);
        for failure in &self.failures {
            let _ = writeln!(text, "- **failed**: {failure}");
        }
        for note in &self.notes {
            let _ = writeln!(text, "- {note}");
        }
        text
    }

    pub(super) fn to_json(&self) -> Value {
        let rows: Vec<Value> = self
            .metrics()
            .map(|metric| {
                let subjects = Subject::ALL.into_iter().filter(|subject| !self.of(metric, *subject).is_empty());
                let values: serde_json::Map<String, Value> = subjects
                    .map(|subject| {
                        let value = json!({
                            "median": self.median(metric, subject),
                            "times_raw": self.times(metric, subject, Subject::Raw),
                            "samples": self.of(metric, subject),
                        });
                        (subject.name().to_owned(), value)
                    })
                    .collect();
                json!({"name": metric.describe().0, "what": metric.describe().1, "subjects": values})
            })
            .collect();
        let bars: Vec<Value> = self
            .bars()
            .map(|(metric, subject, bar)| {
                let (words, verdict) = self.judge(metric, subject, bar);
                let (has, met) = verdict.unzip();
                json!({"name": metric.describe().0, "subject": subject.name(), "bar": words, "has": has, "met": met})
            })
            .collect();
        json!({"rounds": self.rounds, "rows": rows, "bars": bars, "failures": self.failures, "notes": self.notes})
    }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        count if count % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// Three significant digits.
fn show(value: f64) -> String {
    match value.abs() {
        size if 100.0 <= size || value.fract() == 0.0 => format!("{value:.0}"),
        size if 10.0 <= size => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_judged_round_by_round() {
        let mut report = Report::new(3);
        // A disturbance slowed all subjects in the third round.
        for (raw, tmux, outlast) in [(50.0, 20.0, 25.0), (60.0, 22.0, 30.0), (6.0, 2.0, 2.1)] {
            for (subject, value) in [(Subject::Raw, raw), (Subject::Tmux, tmux), (Subject::Outlast, outlast)] {
                report.sample(Metric::Copy, subject, value);
            }
        }
        report.sample(Metric::Idle, Subject::Outlast, 5.0);
        let bars = report.to_json()["bars"].clone();
        let met: Vec<Option<bool>> = bars.as_array().expect("bars").iter().map(|bar| bar["met"].as_bool()).collect();
        assert_eq!(met, [None, Some(true), Some(false), Some(false), None]);
        assert!(report.to_markdown().contains("| 25 (0.50×) |"), "{}", report.to_markdown());
    }
}
