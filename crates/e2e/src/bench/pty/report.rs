//! Samples → medians, ratios and the verdict on each limit.

use std::fmt::Write;

use serde_json::{Value, json};

use super::rig::Subject;
use crate::bench::{samples::Samples, table::show};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Metric {
    Copy,
    Cpu,
    Echo,
    Rss,
    Idle,
}

impl Metric {
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
    samples: Samples<Metric, Subject>,
    failures: Vec<String>,
}

impl Report {
    pub(super) fn new(rounds: usize) -> Self {
        Self { rounds, samples: Samples::new(), failures: Vec::new() }
    }

    pub(super) fn sample(&mut self, metric: Metric, subject: Subject, value: f64) {
        self.samples.add(metric, subject, value);
    }

    pub(super) fn note(&mut self, note: String) {
        self.samples.note(note);
    }

    pub(super) fn fail(&mut self, failure: String) {
        eprintln!("FAILED: {failure}");
        self.failures.push(failure);
    }

    /// True if every planned measurement was made. A missed limit is a result, too.
    pub(super) fn is_sound(&self) -> bool {
        self.failures.is_empty()
    }

    /// The limit in words, the value that is compared with it, and whether it is met.
    fn judge(&self, metric: Metric, subject: Subject, bar: Bar) -> (String, Option<(String, bool)>) {
        match bar {
            Bar::LeastTimes(base, least) => {
                let times = self.samples.times(metric, subject, base);
                let verdict = times.map(|times| (format!("{times:.2} ×"), least <= times));
                (format!("≥ {least} × {}", base.name()), verdict)
            }
            Bar::MostTimes(base, most) => {
                let times = self.samples.times(metric, subject, base);
                let verdict = times.map(|times| (format!("{times:.2} ×"), times <= most));
                (format!("≤ {most} × {}", base.name()), verdict)
            }
            Bar::MostOver(base, most) => {
                let over = self.samples.over(metric, subject, base);
                (format!("≤ {} + {most}", base.name()), over.map(|over| (format!("+ {}", show(over)), over <= most)))
            }
            Bar::Most(most) => {
                let value = self.samples.median(metric, subject);
                (format!("≤ {most}"), value.map(|value| (show(value), value <= most)))
            }
        }
    }

    fn bars(&self) -> impl Iterator<Item = (Metric, Subject, Bar)> {
        BARS.into_iter().filter(|(metric, ..)| self.samples.metrics().contains(metric))
    }

    pub(super) fn to_markdown(&self) -> String {
        let mut text = String::from("| what |");
        for subject in Subject::ALL {
            let _ = write!(text, " {} |", subject.name());
        }
        let _ = writeln!(text, "\n|---|{}", "---:|".repeat(Subject::ALL.len()));
        for metric in self.samples.metrics() {
            let _ = write!(text, "| {} |", metric.describe().1);
            for subject in Subject::ALL {
                let cell = self.samples.median(metric, subject).map_or_else(|| "–".into(), show);
                let times = self.samples.times(metric, subject, Subject::Raw).filter(|_| subject != Subject::Raw);
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
        for note in &self.samples.notes {
            let _ = writeln!(text, "- {note}");
        }
        text
    }

    pub(super) fn to_json(&self) -> Value {
        let rows: Vec<Value> = self
            .samples
            .metrics()
            .into_iter()
            .map(|metric| {
                let values = self.samples.to_json(metric, Subject::name, &[("times_raw", Subject::Raw)]);
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
        json!({"rounds": self.rounds, "rows": rows, "bars": bars, "failures": self.failures, "notes": self.samples.notes})
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
