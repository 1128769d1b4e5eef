//! The samples of a benchmark by metric and subject, and the notes on them. Limits and tables are in the reports.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::table::median;

pub(super) struct Samples<M, S> {
    values: BTreeMap<(M, S), Vec<f64>>,
    pub(super) notes: Vec<String>,
}

impl<M: Copy + Ord, S: Copy + Ord> Samples<M, S> {
    pub(super) fn new() -> Self {
        Self { values: BTreeMap::new(), notes: Vec::new() }
    }

    pub(super) fn add(&mut self, metric: M, subject: S, value: f64) {
        self.values.entry((metric, subject)).or_default().push(value);
    }

    pub(super) fn note(&mut self, note: String) {
        eprintln!("{note}");
        self.notes.push(note);
    }

    fn of(&self, metric: M, subject: S) -> &[f64] {
        self.values.get(&(metric, subject)).map_or(&[], Vec::as_slice)
    }

    pub(super) fn median(&self, metric: M, subject: S) -> Option<f64> {
        median(self.of(metric, subject).to_vec())
    }

    /// The median of the ratios of each round, so that a disturbance of a round affects both values.
    pub(super) fn times(&self, metric: M, subject: S, base: S) -> Option<f64> {
        let pairs = self.of(metric, subject).iter().zip(self.of(metric, base));
        median(pairs.filter(|(_, base)| **base != 0.0).map(|(value, base)| value / base).collect())
    }

    /// The same for the differences.
    pub(super) fn over(&self, metric: M, subject: S, base: S) -> Option<f64> {
        let pairs = self.of(metric, subject).iter().zip(self.of(metric, base));
        median(pairs.map(|(value, base)| value - base).collect())
    }

    /// The metrics that have samples, in the order of their declaration.
    pub(super) fn metrics(&self) -> Vec<M> {
        let mut metrics: Vec<M> = self.values.keys().map(|(metric, _)| *metric).collect();
        metrics.dedup();
        metrics
    }

    /// What is known of each subject: its median, its ratio to each of `bases` under the key given there, its samples.
    pub(super) fn to_json(&self, metric: M, name: fn(S) -> &'static str, bases: &[(&str, S)]) -> Map<String, Value> {
        let subjects = self.values.keys().filter(|(known, _)| *known == metric).map(|(_, subject)| *subject);
        let describe = |subject: S| {
            let mut value = json!({"median": self.median(metric, subject), "samples": self.of(metric, subject)});
            for (key, base) in bases {
                value[*key] = json!(self.times(metric, subject, *base));
            }
            (name(subject).to_owned(), value)
        };
        subjects.map(describe).collect()
    }
}
