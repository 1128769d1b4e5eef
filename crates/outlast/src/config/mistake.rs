//! An error in a configuration: the file, the line, the key, the cause and the fix.

use std::fmt;

use super::tree::{Node, Position};
use crate::cli::report::{self, Report};

/// How many errors are reported for each file; the rest is counted.
pub(crate) const MISTAKES_MAX: usize = 20;

/// A key and its position, for errors about its value.
#[derive(Debug, Clone, Default)]
pub(crate) struct Spot {
    /// Its full path, such as `backend.github.url`.
    pub key: String,
    /// `None` if it is in no file.
    pub at: Option<Position>,
}

impl Spot {
    /// The same with the position of the value.
    pub(crate) fn of(&self, node: &Node) -> Spot {
        Spot { key: self.key.clone(), at: Some(node.at.clone()) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    pub at: Option<Position>,
    /// The full path of the key, such as `backend.github.url`; empty if the error is about the file.
    pub key: String,
    pub what: String,
    pub hint: Option<String>,
}

impl Mistake {
    pub fn new(at: Position, key: impl Into<String>, what: impl Into<String>) -> Mistake {
        Mistake { at: Some(at), key: key.into(), what: what.into(), hint: None }
    }

    /// About a value that is in no file.
    pub fn nowhere(what: impl Into<String>) -> Mistake {
        Mistake { at: None, key: String::new(), what: what.into(), hint: None }
    }

    pub fn hint(self, hint: impl Into<String>) -> Mistake {
        Mistake { hint: Some(hint.into()), ..self }
    }

    /// The position, the key and the cause, in one sentence.
    pub fn sentence(&self) -> String {
        let place = match &self.at {
            None => String::new(),
            Some(at) if at.is_option() => format!("{at}: "),
            Some(at) => format!("{at}:{}: ", at.column),
        };
        let key = if self.key.is_empty() { String::new() } else { format!("`{}`: ", self.key) };
        place + &key + &self.what
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence())?;
        match &self.hint {
            Some(hint) => write!(f, "\n  {hint}"),
            None => Ok(()),
        }
    }
}

/// All errors that were found, at least one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mistakes {
    found: Vec<Mistake>,
    /// Errors above the limit.
    untold: usize,
}

impl Mistakes {
    pub fn add(&mut self, mistake: Mistake) {
        // A second error of the same key is dropped.
        let is_known = |known: &Mistake| known.at == mistake.at && known.key == mistake.key && !known.key.is_empty();
        if self.found.iter().any(is_known) {
            return;
        }
        let file = |mistake: &Mistake| mistake.at.as_ref().map(|at| at.file.clone());
        let of_this_file = self.found.iter().filter(|known| file(known) == file(&mistake)).count();
        if of_this_file < MISTAKES_MAX {
            self.found.push(mistake);
        } else {
            self.untold += 1;
        }
    }

    /// Without a hint if it is empty.
    pub(crate) fn wrong(&mut self, spot: &Spot, what: impl Into<String>, hint: impl Into<String>) {
        let hint = Some(hint.into()).filter(|hint| !hint.is_empty());
        self.add(Mistake { at: spot.at.clone(), key: spot.key.clone(), what: what.into(), hint });
    }

    /// Including those above the limit.
    pub fn count(&self) -> usize {
        self.found.len() + self.untold
    }

    pub fn found(&self) -> &[Mistake] {
        &self.found
    }

    /// `Ok` if there are none; otherwise all of them, in the order of the file.
    pub fn check(mut self) -> Result<(), Mistakes> {
        if self.found.is_empty() {
            return Ok(());
        }
        self.found.sort_by_key(|mistake| mistake.at.as_ref().map(|at| (at.file.clone(), at.line, at.column)));
        Err(self)
    }
}

impl From<Mistake> for Mistakes {
    fn from(mistake: Mistake) -> Mistakes {
        Mistakes { found: vec![mistake], untold: 0 }
    }
}

impl From<Mistakes> for Report {
    fn from(mistakes: Mistakes) -> Report {
        if let ([only], 0) = (mistakes.found.as_slice(), mistakes.untold) {
            let report = Report::new(report::USAGE, only.sentence());
            return Report { hint: only.hint.clone(), ..report };
        }
        let count = mistakes.count();
        let mut lines: Vec<String> = mistakes.found.iter().map(Mistake::to_string).collect();
        if mistakes.untold > 0 {
            lines.push(format!("and {} more", mistakes.untold));
        }
        let mut report = Report::new(report::USAGE, format!("the configuration has {count} mistakes"));
        report.because = Some(lines.join("\n"));
        report.hint("nothing was started; `outlast gateway check` reads it again")
    }
}

/// The word among `known` that was probably meant.
pub(crate) fn closest<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let near = known.into_iter().map(|word| (strsim::osa_distance(given, word), word));
    near.filter(|(slips, word)| *slips <= (word.len() / 3).max(1) && *slips < word.len()).min().map(|(_, word)| word)
}

/// `did you mean …?`, or all valid words.
pub(crate) fn did_you_mean<'a>(given: &str, known: impl IntoIterator<Item = &'a str> + Clone) -> String {
    if let Some(word) = closest(given, known.clone()) {
        return format!("did you mean `{word}`?");
    }
    let known: Vec<String> = known.into_iter().map(str::to_owned).collect();
    match known.len() {
        0 => "none is configured".to_owned(),
        _ => format!("use {}", outlast_core::count::one_of(&known, "or")),
    }
}
