//! Whether a check that passes directly fails through the gateway, over several runs; and whether that was expected.

use std::collections::{BTreeMap, BTreeSet};

use super::stage::Checks;

/// The runs of one suite by one way.
#[derive(Default)]
pub(super) struct Tally {
    runs: u32,
    checks: BTreeMap<String, Count>,
    played: BTreeSet<String>,
}

#[derive(Default)]
struct Count {
    passed: u32,
    why: Option<String>,
}

impl Tally {
    pub(super) fn add(&mut self, checks: &Checks) {
        self.runs += 1;
        self.played.extend(checks.played.iter().cloned());
        for (key, said) in &checks.said {
            let count = self.checks.entry(key.clone()).or_default();
            match said {
                Ok(()) => count.passed += 1,
                Err(why) => count.why = Some(why.clone()),
            }
        }
    }

    /// The number of checks, and of those that passed every time.
    pub(super) fn count(&self) -> (usize, usize) {
        (self.checks.len(), self.checks.values().filter(|count| count.passed == self.runs).count())
    }

    /// How many checks are made directly and not here, although their scenario was run.
    pub(super) fn left_out(&self, direct: &Tally) -> usize {
        let is_left_out = |key: &&String| !self.checks.contains_key(*key) && self.played.contains(scenario(key));
        direct.checks.keys().filter(is_left_out).count()
    }

    /// The checks that pass directly and not here. For a check that passes only sometimes, one more failure than
    /// directly is chance: the suites are not fully reliable.
    pub(super) fn worse_than(&self, direct: &Tally) -> BTreeMap<String, String> {
        let mut worse = BTreeMap::new();
        for (key, theirs) in &direct.checks {
            let ours = self.checks.get(key);
            // The scenario took another path: by an optional behaviour of a server, or by a failure that has its own
            // line.
            if ours.is_none() && self.played.contains(scenario(key)) {
                continue;
            }
            let passed = ours.map_or(0, |count| count.passed);
            let never = passed == 0 && theirs.passed > 0;
            if never || passed + 1 < theirs.passed {
                let why = ours.and_then(|count| count.why.clone()).unwrap_or_else(|| "it was not reached".into());
                worse.insert(
                    key.clone(),
                    format!("passed {passed} of {} times, directly {}: {why}", self.runs, theirs.passed),
                );
            }
        }
        worse
    }
}

fn scenario(key: &str) -> &str {
    key.split_once('/').map_or(key, |(scenario, _)| scenario)
}

/// Known failures, as `suite way scenario/check`, one on a line.
pub(super) struct Expected(BTreeSet<(String, String, String)>);

impl Expected {
    pub(super) fn read(text: &str) -> Result<Expected, String> {
        let mut expected = BTreeSet::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            let [suite, way, key] = words[..] else {
                return Err(format!("expected.txt:{}: a suite, a way and a check, not `{line}`", number + 1));
            };
            expected.insert((suite.to_owned(), way.to_owned(), key.to_owned()));
        }
        Ok(Expected(expected))
    }

    /// Describes the results that are not as expected.
    pub(super) fn judge(&mut self, suite: &str, way: &str, worse: &BTreeMap<String, String>) -> Vec<String> {
        let listed: BTreeSet<&str> =
            self.0.iter().filter(|(s, w, _)| s == suite && w == way).map(|(_, _, key)| key.as_str()).collect();
        let mut problems = Vec::new();
        for (key, why) in worse.iter().filter(|(key, _)| !listed.contains(key.as_str())) {
            problems.push(format!("FAILED {suite} {way} {key}\n  {why}"));
        }
        for key in listed.into_iter().filter(|key| !worse.contains_key(*key)) {
            problems.push(format!("PASSES NOW {suite} {way} {key}\n  hint: take its line out of expected.txt"));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(runs: &[&[(&str, bool)]]) -> Tally {
        let mut tally = Tally::default();
        for run in runs {
            let said = |passed: bool| if passed { Ok(()) } else { Err("no".to_owned()) };
            tally.add(&Checks {
                said: run.iter().map(|(key, passed)| (key.to_string(), said(*passed))).collect(),
                played: run.iter().map(|(key, _)| scenario(key).to_owned()).collect(),
            });
        }
        tally
    }

    #[test]
    fn only_scenarios_that_pass_directly_are_required() {
        let sound: &[(&str, bool)] = &[("a", true), ("b", false), ("c", true), ("d", true), ("a/option", true)];
        let direct = tally(&[sound; 3]);
        let through = tally(&[
            &[("a", true), ("b", false), ("c", false)],
            &[("a", false), ("b", false), ("c", false)],
            &[("a", true), ("b", false), ("c", true)],
        ]);
        let worse = through.worse_than(&direct);
        assert_eq!(worse.keys().collect::<Vec<_>>(), ["c", "d"], "a once is chance, b fails anyway, d is missing");
        assert_eq!(worse["c"], "passed 1 of 3 times, directly 3: no");
        assert_eq!(worse["d"], "passed 0 of 3 times, directly 3: it was not reached");
        assert_eq!((through.count(), through.left_out(&direct)), ((3, 0), 1));

        let once = tally(&[&[("a", false)]]);
        assert_eq!(once.worse_than(&tally(&[&[("a", true)]])).len(), 1, "never is never chance");
    }

    #[test]
    fn the_list_of_known_failures_may_only_shrink() {
        let mut expected = Expected::read("# why\n0.1 stdio a/b # because\n\n0.1 http c/d\n").unwrap();
        let worse = BTreeMap::from([("a/b".to_owned(), "no".to_owned()), ("x/y".to_owned(), "never".to_owned())]);
        assert_eq!(expected.judge("0.1", "stdio", &worse), ["FAILED 0.1 stdio x/y\n  never"]);
        let passes = expected.judge("0.1", "http", &BTreeMap::new());
        assert!(passes[0].starts_with("PASSES NOW 0.1 http c/d"), "{passes:?}");
        assert!(Expected::read("0.1 stdio").is_err());
    }
}
