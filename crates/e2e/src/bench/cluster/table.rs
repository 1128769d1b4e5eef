//! Samples → medians, ratios and the verdict on each limit.

use std::{collections::BTreeMap, fmt::Write};

use serde_json::{Value, json};

use crate::bench::table::{median, show};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Metric {
    Local,
    Remote,
    AtOwner,
    Forwarded,
    LoadLocal,
    LoadRemote,
    LoadForwarded,
    OwnerAnswered,
    OwnerReplaced,
    EntryKilled,
    HomeKilled,
    Switched,
    Counted,
    Twice,
}

/// The limits of SPEC N8.
#[derive(Clone, Copy)]
enum Bar {
    /// The median ratio of the rounds.
    MostTimes(f64),
    LeastTimes(f64),
    /// The largest value of all rounds.
    Most(f64),
}

impl Metric {
    const ALL: [Metric; 14] = [
        Metric::Local,
        Metric::Remote,
        Metric::AtOwner,
        Metric::Forwarded,
        Metric::LoadLocal,
        Metric::LoadRemote,
        Metric::LoadForwarded,
        Metric::OwnerAnswered,
        Metric::OwnerReplaced,
        Metric::EntryKilled,
        Metric::HomeKilled,
        Metric::Switched,
        Metric::Counted,
        Metric::Twice,
    ];

    /// A stable name for programs, a description for people, the unit, and the limit.
    fn describe(self) -> (&'static str, &'static str, &'static str, Option<Bar>) {
        let (name, words, unit, bar) = match self {
            Metric::Local => ("local", "local call, p50; without `[cluster]`", "µs", Some(Bar::MostTimes(1.05))),
            Metric::Remote => {
                ("remote", "call of a `one` backend on another replica, p50; local", "µs", Some(Bar::MostTimes(2.5)))
            }
            Metric::AtOwner => ("at_owner", "call of a `one` backend at its owner, p50; local", "µs", None),
            Metric::Forwarded => {
                ("forwarded", "call of a session with its home on another replica, p50; local", "µs", None)
            }
            Metric::LoadLocal => ("load_local", "32 sessions, local; without `[cluster]`", "calls/s", None),
            Metric::LoadRemote => (
                "load_remote",
                "32 sessions, `one` backend on another replica; local",
                "calls/s",
                Some(Bar::LeastTimes(0.35)),
            ),
            Metric::LoadForwarded => {
                ("load_forwarded", "32 sessions with their home on another replica; local", "calls/s", None)
            }
            Metric::OwnerAnswered => {
                ("owner_answered", "kill -9 of an owner to the answers of its callers", "ms", Some(Bar::Most(500.0)))
            }
            Metric::OwnerReplaced => ("owner_replaced", "kill -9 of an owner to a call by the next one", "ms", None),
            Metric::EntryKilled => (
                "entry_killed",
                "kill -9 of the replica that clients use to their next results",
                "ms",
                Some(Bar::Most(1000.0)),
            ),
            Metric::HomeKilled => {
                ("home_killed", "kill -9 of the home of sessions to their next results", "ms", Some(Bar::Most(3000.0)))
            }
            Metric::Switched => ("switched", "`outlast switch`, on all replicas", "ms", Some(Bar::Most(1000.0))),
            Metric::Counted => ("counted", "calls in the ledger", "", None),
            Metric::Twice => ("twice", "calls that were executed twice", "", Some(Bar::Most(0.0))),
        };
        (name, words, unit, bar)
    }
}

#[derive(Default)]
pub(crate) struct Report {
    samples: BTreeMap<Metric, Vec<f64>>,
    /// What each sample of a ratio is divided by.
    bases: BTreeMap<Metric, Vec<f64>>,
    notes: Vec<String>,
}

impl Report {
    pub(super) fn sample(&mut self, metric: Metric, value: f64) {
        self.samples.entry(metric).or_default().push(value);
    }

    /// Adds to a number that the whole run counts.
    pub(super) fn count(&mut self, metric: Metric, more: usize) {
        let samples = self.samples.entry(metric).or_insert_with(|| vec![0.0]);
        samples[0] += more as f64;
    }

    pub(super) fn pair(&mut self, metric: Metric, value: f64, base: f64) {
        self.sample(metric, value);
        self.bases.entry(metric).or_default().push(base);
    }

    pub(super) fn note(&mut self, note: String) {
        eprintln!("{note}");
        self.notes.push(note);
    }

    fn of(&self, metric: Metric) -> &[f64] {
        self.samples.get(&metric).map_or(&[], Vec::as_slice)
    }

    fn median(&self, metric: Metric) -> Option<f64> {
        median(self.of(metric).to_vec())
    }

    fn most(&self, metric: Metric) -> Option<f64> {
        self.of(metric).iter().copied().max_by(f64::total_cmp)
    }

    fn base(&self, metric: Metric) -> Option<f64> {
        median(self.bases.get(&metric)?.clone())
    }

    /// The median of the ratios of each round, so that a disturbance of a round affects both values.
    fn times(&self, metric: Metric) -> Option<f64> {
        let pairs = self.of(metric).iter().zip(self.bases.get(&metric)?);
        median(pairs.map(|(value, base)| value / base).collect())
    }

    /// The limit in words, and whether it is met; `None` if nothing was measured.
    fn judge(&self, metric: Metric, bar: Bar) -> (String, Option<bool>) {
        match bar {
            Bar::MostTimes(most) => (format!("≤ {most} ×"), self.times(metric).map(|times| times <= most)),
            Bar::LeastTimes(least) => (format!("≥ {least} ×"), self.times(metric).map(|times| least <= times)),
            Bar::Most(most) => (format!("≤ {most}"), self.most(metric).map(|value| value <= most)),
        }
    }

    fn metrics(&self) -> impl Iterator<Item = Metric> {
        Metric::ALL.into_iter().filter(|metric| self.samples.contains_key(metric))
    }

    pub(crate) fn to_markdown(&self) -> String {
        let mut text = String::from("| what; compared with | median | maximum | compared | ratio | bar | verdict |\n");
        text.push_str("|---|---:|---:|---:|---:|---|---|\n");
        for metric in self.metrics() {
            let (_, words, unit, bar) = metric.describe();
            let cell = |value: Option<f64>| value.map(show).unwrap_or_default();
            let ratio = self.times(metric).map(|times| format!("{times:.2} ×")).unwrap_or_default();
            let (bar, verdict) = match bar.map(|bar| self.judge(metric, bar)) {
                None => (String::new(), ""),
                Some((bar, Some(true))) => (bar, "met"),
                Some((bar, Some(false))) => (bar, "**missed**"),
                Some((bar, None)) => (bar, "not measured"),
            };
            let (comma, most) = (if unit.is_empty() { "" } else { ", " }, cell(self.most(metric)));
            let (value, base) = (cell(self.median(metric)), cell(self.base(metric)));
            let _ =
                writeln!(text, "| {words}{comma}{unit} | {value} | {most} | {base} | {ratio} | {bar} | {verdict} |");
        }
        text.push_str("\nRatios are medians of the ratios of each round. A limit in ms holds for the maximum.\n");
        for note in &self.notes {
            let _ = writeln!(text, "- {note}");
        }
        text
    }

    pub(crate) fn to_json(&self) -> Value {
        let rows = self.metrics().map(|metric| {
            let (name, words, unit, bar) = metric.describe();
            let mut row = json!({
                "name": name, "what": words, "unit": unit, "median": self.median(metric), "max": self.most(metric),
                "base": self.base(metric), "ratio": self.times(metric), "samples": self.of(metric),
            });
            if let Some((bar, Some(is_met))) = bar.map(|bar| self.judge(metric, bar)) {
                row["bar"] = json!(bar);
                row["met"] = json!(is_met);
            }
            row
        });
        json!({"rows": rows.collect::<Vec<_>>(), "notes": self.notes})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_for_the_median_ratio_and_for_the_largest_time() {
        let mut report = Report::default();
        for (value, base) in [(100.0, 50.0), (300.0, 100.0), (20.0, 10.0)] {
            report.pair(Metric::Remote, value, base);
            report.pair(Metric::Local, value, base);
        }
        report.sample(Metric::OwnerAnswered, 100.0);
        report.sample(Metric::OwnerAnswered, 501.0);
        report.sample(Metric::HomeKilled, f64::INFINITY);
        report.count(Metric::Counted, 2);
        report.count(Metric::Counted, 3);
        report.count(Metric::Twice, 0);
        let rows = report.to_json()["rows"].clone();
        let met = |name: &str| {
            rows.as_array().expect("rows").iter().find(|row| row["name"] == name).expect("a row")["met"].clone()
        };
        let names = ["remote", "local", "owner_answered", "home_killed", "twice"];
        assert_eq!(names.map(met), [true, false, false, false, true]);
        assert_eq!(report.of(Metric::Counted), [5.0]);
        assert!(
            report.to_markdown().contains("| 100 | 300 | 50 | 2.00 × | ≤ 2.5 × | met |"),
            "{}",
            report.to_markdown()
        );
    }
}
