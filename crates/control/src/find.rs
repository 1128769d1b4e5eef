//! Finds the instance that a name or an id means. The only request it sends is the one for the state.

use std::{env, path::Path, time::Duration};

use outlast_core::count::one_of;

use crate::{
    answer::State,
    client::{self, Client, Found},
    registry::{Entry, Registry},
};

/// How long `ps` waits for all answers together; an instance that has not answered by then is called unresponsive.
pub const SURVEY_MAX: Duration = Duration::from_secs(1);
/// How long one instance may take for an answer that needs no work.
pub const ANSWER_MAX: Duration = Duration::from_secs(5);
/// How many instances an ambiguous name lists; the rest is counted.
const CANDIDATES_MAX: usize = 10;

/// Why no instance was found: a sentence, its cause and a hint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{sentence}")]
pub struct FindError {
    pub sentence: String,
    pub because: Option<String>,
    pub hint: Option<String>,
}

impl FindError {
    fn new(sentence: impl Into<String>) -> FindError {
        FindError { sentence: sentence.into(), because: None, hint: None }
    }

    fn because(self, cause: impl Into<String>) -> FindError {
        FindError { because: Some(cause.into()), ..self }
    }

    fn hint(self, hint: impl Into<String>) -> FindError {
        FindError { hint: Some(hint.into()), ..self }
    }
}

pub fn registry() -> Result<Registry, FindError> {
    match env::home_dir().filter(|home| home.is_absolute()) {
        Some(home) => Ok(Registry::of(&home)),
        None => {
            Err(FindError::new("there is no home directory, so running instances cannot be found").hint("set HOME"))
        }
    }
}

/// Why no instance was found, and the instances that run.
#[derive(Debug)]
pub struct Missing {
    pub error: FindError,
    pub found: Vec<Found>,
}

impl From<FindError> for Missing {
    fn from(error: FindError) -> Missing {
        Missing { error, found: Vec::new() }
    }
}

/// The one instance that is meant, among those that run.
pub fn find(wanted: Option<&str>) -> Result<Entry, FindError> {
    seek(wanted).map_err(|missing| missing.error)
}

/// Like [`find`]; the error holds the states of the instances that run.
pub fn seek(wanted: Option<&str>) -> Result<Entry, Missing> {
    let registry = registry()?;
    let mut entries = registry.read();
    let cwd = env::current_dir().unwrap_or_default();
    // Connects only to the chosen instance, so that a hung one does not delay the search for the others.
    while let Ok(entry) = choose(wanted, &entries, &[], &cwd) {
        if Client::connect(&entry.socket, ANSWER_MAX).is_ok() || !client::is_gone(&registry, entry) {
            return Ok(entry.clone());
        }
        let id = entry.id.clone();
        entries.retain(|entry| entry.id != id);
    }
    // Killed instances are neither counted nor named in the error. Backends of gateways are named.
    let found = client::survey(&registry, SURVEY_MAX);
    let entries: Vec<Entry> = found.iter().map(|found| found.entry.clone()).collect();
    let below = found.iter().flat_map(|found| backends_of(found).map(|name| format!("{}/{name}", found.entry.id)));
    let below: Vec<String> = below.collect();
    match choose(wanted, &entries, &below, &cwd) {
        Ok(entry) => Ok(entry.clone()),
        Err(error) => Err(Missing { error, found }),
    }
}

/// The names of a gateway's backends.
pub fn backends_of(found: &Found) -> impl Iterator<Item = String> {
    let state = found.state.as_ref().map(State::read).unwrap_or_default();
    state.backends.into_iter().flatten().map(|backend| backend.name)
}

/// Chooses by id, by name, or by the beginning of an id; without any of them, the only instance in this directory. A
/// name or a beginning that several instances share means the one in this directory; if all of them run elsewhere,
/// none is chosen. Backends (`below`) cannot be chosen here, but the error may suggest them.
pub fn choose<'a>(
    wanted: Option<&str>,
    entries: &'a [Entry],
    below: &[String],
    cwd: &Path,
) -> Result<&'a Entry, FindError> {
    let Some(wanted) = wanted else {
        let here: Vec<&Entry> = entries.iter().filter(|entry| entry.cwd == cwd).collect();
        return match here[..] {
            [only] => Ok(only),
            [] => {
                Err(FindError::new("nothing runs under outlast in this directory").hint(what_there_is(entries, below)))
            }
            _ => Err(FindError::new(format!(
                "{} instances run in this directory: {}",
                here.len(),
                names_of(&here, "and")
            ))
            .hint("name one of them")),
        };
    };
    let here = |entry: &&&Entry| entry.cwd == cwd;
    let by = |test: &dyn Fn(&Entry) -> bool| entries.iter().filter(|entry| test(entry)).collect::<Vec<_>>();
    let found =
        [by(&|entry| entry.id == wanted), by(&|entry| entry.name == wanted), by(&|entry| entry.id.starts_with(wanted))];
    match found.into_iter().find(|found| !found.is_empty()).as_deref() {
        Some([only]) => Ok(only),
        Some(several) => match several.iter().filter(here).collect::<Vec<_>>()[..] {
            [only] => Ok(only),
            _ => Err(ambiguous(wanted, several, cwd)),
        },
        None => Err(FindError::new(format!("no instance named `{wanted}` is running"))
            .hint(closest(wanted, entries, below).unwrap_or_else(|| what_there_is(entries, below)))),
    }
}

/// Lists the instances that a name could mean, with their directories: ids alone do not tell a person which is which.
fn ambiguous(wanted: &str, several: &[&Entry], cwd: &Path) -> FindError {
    let (place, hint) = if several.iter().any(|entry| entry.cwd == cwd) {
        ("", "name one of these ids")
    } else {
        (", none of them in this directory", "name one of these ids, or run the command in its directory")
    };
    let mut candidates: Vec<String> =
        several.iter().take(CANDIDATES_MAX).map(|entry| format!("{}  {}", entry.id, entry.cwd.display())).collect();
    if several.len() > CANDIDATES_MAX {
        candidates.push(format!("… and {} more: `outlast ps` lists them", several.len() - CANDIDATES_MAX));
    }
    FindError::new(format!("`{wanted}` means {} instances{place}", several.len()))
        .because(candidates.join("\n"))
        .hint(hint)
}

/// The name that was probably meant: similar to the typed text, in full or in its first words, or containing it.
pub fn closest(wanted: &str, entries: &[Entry], below: &[String]) -> Option<String> {
    // Each known name, and the suggestion for it.
    let known = entries.iter().flat_map(|entry| [entry.name.as_str(), entry.id.as_str()]).map(|name| (name, name));
    let backends = below.iter().filter_map(|id| Some((id.split_once('/')?.1, id.as_str())));
    let near = known.chain(backends).filter_map(|(name, offered)| {
        let beginnings = name.match_indices('-').map(|(at, _)| &name[..at]).chain([name]);
        let slips = beginnings
            .map(|part| (strsim::osa_distance(wanted, part), part.len() / 3))
            .filter(|(slips, most)| slips <= most);
        Some((slips.map(|(slips, _)| slips).min()?, offered))
    });
    let ids = || entries.iter().map(|entry| &entry.id).chain(below);
    let holds_it = || ids().map(String::as_str).filter(|id| id.contains(wanted)).min();
    near.min().map(|(_, name)| name).or_else(holds_it).map(|name| format!("did you mean `{name}`?"))
}

fn what_there_is(entries: &[Entry], below: &[String]) -> String {
    match (entries, below.len()) {
        ([], _) => NOTHING_RUNS.to_owned(),
        ([only], 0) => format!("`{}` runs in {}", only.id, only.cwd.display()),
        (entries, 0) => format!("`outlast ps` lists the {} running instances", entries.len()),
        ([only], 1) => format!("`{}` runs in {}, with the backend `{}`", only.id, only.cwd.display(), below[0]),
        (entries, count) => {
            let backends = if count == 1 { "backend" } else { "backends" };
            match entries.len() {
                1 => format!("`outlast ps` shows `{}` and its {count} {backends}", entries[0].id),
                instances => format!("`outlast ps` shows the {instances} that run, and {count} {backends} of theirs"),
            }
        }
    }
}

const NOTHING_RUNS: &str =
    "nothing else runs either; `outlast run -- AGENT` starts an agent, `outlast mcp -- SERVER` a server";

fn names_of(entries: &[&Entry], last: &str) -> String {
    let ids: Vec<String> = entries.iter().map(|entry| entry.id.clone()).collect();
    one_of(&ids, last)
}
