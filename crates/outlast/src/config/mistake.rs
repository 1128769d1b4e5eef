//! What is wrong with a configuration: the file, the line, the key, what is wrong with it, and the fix.

use std::fmt;

use super::tree::Place;
use crate::report::{self, Report, slips};

/// How many are told of each file; the rest is counted.
pub const MISTAKES_MAX: usize = 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    pub at: Option<Place>,
    /// With all that leads to it, such as `backend.github.url`; empty if it is about the file.
    pub key: String,
    pub what: String,
    pub hint: Option<String>,
}

impl Mistake {
    pub fn new(at: Place, key: impl Into<String>, what: impl Into<String>) -> Mistake {
        Mistake { at: Some(at), key: key.into(), what: what.into(), hint: None }
    }

    /// Of something that stands in no file.
    pub fn nowhere(what: impl Into<String>) -> Mistake {
        Mistake { at: None, key: String::new(), what: what.into(), hint: None }
    }

    pub fn hint(self, hint: impl Into<String>) -> Mistake {
        Mistake { hint: Some(hint.into()), ..self }
    }

    /// The place, the key and what is wrong, in one sentence.
    pub fn sentence(&self) -> String {
        let mut words = String::new();
        if let Some(at) = &self.at {
            match at.is_option() {
                true => words.push_str(&format!("{at}: ")),
                false => words.push_str(&format!("{at}:{}: ", at.column)),
            }
        }
        if !self.key.is_empty() {
            words.push_str(&format!("`{}`: ", self.key));
        }
        words + &self.what
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

/// All that was found, at least one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mistakes {
    found: Vec<Mistake>,
    /// More than could be told.
    untold: usize,
}

impl Mistakes {
    pub fn add(&mut self, mistake: Mistake) {
        // A second word about the same key says nothing new.
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

    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    pub fn found(&self) -> &[Mistake] {
        &self.found
    }

    pub fn add_all(&mut self, others: Mistakes) {
        self.untold += others.untold;
        others.found.into_iter().for_each(|mistake| self.add(mistake));
    }

    /// Nothing if there are none; otherwise all of them, in the order of the file.
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
        let count = mistakes.found.len() + mistakes.untold;
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
pub fn closest<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let near = known.into_iter().map(|word| (slips(given, word), word));
    near.filter(|(slips, word)| *slips <= (word.len() / 3).max(1) && *slips < word.len()).min().map(|(_, word)| word)
}

/// `did you mean …?`, or all there is to choose from.
pub fn did_you_mean<'a>(given: &str, known: impl IntoIterator<Item = &'a str> + Clone) -> String {
    if let Some(word) = closest(given, known.clone()) {
        return format!("did you mean `{word}`?");
    }
    let known: Vec<String> = known.into_iter().map(str::to_owned).collect();
    match known.len() {
        0 => "none is configured".to_owned(),
        _ => format!("it may be {}", report::one_of(&known, "or")),
    }
}
