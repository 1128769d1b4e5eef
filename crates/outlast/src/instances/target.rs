//! Which instance is meant, and asking it.

use std::{
    env,
    path::Path,
    time::{Duration, Instant},
};

use outlast_core::count::count;
use serde_json::Value;

use super::{name_below, restarted_in_words};
use crate::{
    control::{
        client::{self, AskError, Client, Found},
        registry::{Entry, Registry},
        wire::Refusal,
    },
    report::{self, Report, one_of, slips},
};

/// How long `ps` waits for all answers together; who has not answered by then is called unresponsive.
pub(super) const SURVEY_MAX: Duration = Duration::from_secs(1);
/// How long one instance may take for an answer that it has at hand.
pub const ANSWER_MAX: Duration = Duration::from_secs(5);
/// How much of a server's stderr stands in an error; the rest is in the log.
pub(super) const STDERR_LINES_MAX: usize = 20;
/// How many instances an ambiguous name lists; the rest is counted.
const CANDIDATES_MAX: usize = 10;

pub fn registry() -> Result<Registry, Report> {
    match env::home_dir().filter(|home| home.is_absolute()) {
        Some(home) => Ok(Registry::of(&home)),
        None => Err(Report::new(report::FAILURE, "there is no home directory, so nothing is known of what runs")
            .hint("set HOME")),
    }
}

/// What a command is about: an instance, or one backend of a gateway.
pub struct Target {
    pub entry: Entry,
    pub backend: Option<String>,
}

impl Target {
    /// By what an instance is called; by `GATEWAY/BACKEND`; or by a backend's name, if only one gateway has it.
    pub fn find(wanted: Option<&str>) -> Result<Target, Report> {
        if let Some((gateway, backend)) = wanted.and_then(|wanted| wanted.split_once('/')) {
            let target = Target { entry: find(Some(gateway))?, backend: Some(backend.to_owned()) };
            target.is_gateway("asked for a backend")?;
            return Ok(target);
        }
        let Missing { report, found } = match seek(wanted) {
            Ok(entry) => return Ok(Target { entry, backend: None }),
            Err(missing) => missing,
        };
        let has_it = |found: &Found| wanted.is_some_and(|wanted| backends_of(found).any(|name| name == wanted));
        let owners = found.into_iter().filter(has_it);
        let mut owners: Vec<Target> =
            owners.map(|found| Target { entry: found.entry, backend: wanted.map(str::to_owned) }).collect();
        if owners.len() > 1 {
            let cwd = env::current_dir().unwrap_or_default();
            let is_here = |target: &Target| target.entry.cwd == cwd;
            if owners.iter().filter(|target| is_here(target)).count() == 1 {
                owners.retain(is_here);
                return owners.pop().ok_or(report);
            }
            let ids: Vec<String> = owners.iter().map(Target::id).collect();
            let sentence = format!("`{}` may be {}", wanted.unwrap_or_default(), one_of(&ids, "or"));
            return Err(Report::new(report::FAILURE, sentence).hint("name the gateway, too"));
        }
        owners.pop().ok_or(report)
    }

    pub(super) fn ask_plainly(
        &self,
        method: &str,
        mut params: Value,
        patience: Option<Duration>,
    ) -> Result<Value, AskError> {
        if let Some(backend) = &self.backend {
            params["backend"] = backend.as_str().into();
        }
        connect(&self.entry)?.ask(method, params, patience.map(|patience| Instant::now() + patience))
    }

    pub(super) fn ask(&self, method: &str, params: Value, patience: Option<Duration>) -> Result<Value, Report> {
        self.ask_plainly(method, params, patience).map_err(|error| target_failed(self, method, &error))
    }

    /// As people write it.
    pub fn id(&self) -> String {
        match &self.backend {
            Some(backend) => format!("{}/{backend}", self.entry.id),
            None => self.entry.id.clone(),
        }
    }

    pub(super) fn is_gateway(&self, what: &str) -> Result<(), Report> {
        if self.entry.kind == "gateway" {
            return Ok(());
        }
        let Entry { id, kind, .. } = &self.entry;
        Err(Report::new(report::USAGE, format!("`{id}` is no gateway ({kind}) and cannot be {what}"))
            .hint("`outlast ps` shows which are"))
    }
}

impl From<&Entry> for Target {
    fn from(entry: &Entry) -> Target {
        Target { entry: entry.clone(), backend: None }
    }
}

/// Nothing is called so; and what there is instead.
struct Missing {
    report: Report,
    found: Vec<Found>,
}

impl From<Report> for Missing {
    fn from(report: Report) -> Missing {
        Missing { report, found: Vec::new() }
    }
}

/// The one instance that is meant, among those that live.
pub fn find(wanted: Option<&str>) -> Result<Entry, Report> {
    seek(wanted).map_err(|missing| missing.report)
}

fn seek(wanted: Option<&str>) -> Result<Entry, Missing> {
    let registry = registry()?;
    let mut entries = registry.read();
    let cwd = env::current_dir().unwrap_or_default();
    // Only who is meant is looked at closely, so that one that hangs does not delay the others.
    while let Ok(entry) = choose(wanted, &entries, &[], &cwd) {
        if Client::connect(&entry.socket, ANSWER_MAX).is_ok() || !client::is_gone(&registry, entry) {
            return Ok(entry.clone());
        }
        let id = entry.id.clone();
        entries.retain(|entry| entry.id != id);
    }
    // Whoever was killed is neither counted nor named where several could be meant, or none; backends are.
    let found = client::survey(&registry, SURVEY_MAX);
    let entries: Vec<Entry> = found.iter().map(|found| found.entry.clone()).collect();
    let below = found.iter().flat_map(|found| backends_of(found).map(|name| format!("{}/{name}", found.entry.id)));
    let below: Vec<String> = below.collect();
    match choose(wanted, &entries, &below, &cwd) {
        Ok(entry) => Ok(entry.clone()),
        Err(report) => Err(Missing { report, found }),
    }
}

/// The names of a gateway's backends.
fn backends_of(found: &Found) -> impl Iterator<Item = &str> {
    let all = found.state.as_ref().and_then(|state| state["backends"].as_array());
    all.into_iter().flatten().filter_map(|backend| backend["name"].as_str())
}

/// By id, by name, by the beginning of an id; without any, the only one in this directory. A name or a beginning that
/// several share means the one in this directory; if they all run elsewhere, none is chosen. What is `below` them cannot
/// be chosen here, but may have been meant.
pub fn choose<'a>(
    wanted: Option<&str>,
    entries: &'a [Entry],
    below: &[String],
    cwd: &Path,
) -> Result<&'a Entry, Report> {
    let Some(wanted) = wanted else {
        let here: Vec<&Entry> = entries.iter().filter(|entry| entry.cwd == cwd).collect();
        return match here[..] {
            [only] => Ok(only),
            [] => Err(Report::new(report::FAILURE, "nothing runs under outlast in this directory")
                .hint(what_there_is(entries, below))),
            _ => Err(Report::new(
                report::FAILURE,
                format!("{} instances run in this directory: {}", here.len(), names_of(&here, "and")),
            )
            .hint("say which")),
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
        None => Err(Report::new(report::FAILURE, format!("nothing called `{wanted}` runs under outlast"))
            .hint(closest(wanted, entries, below).unwrap_or_else(|| what_there_is(entries, below)))),
    }
}

/// Lists the instances that a name could mean, with their directories: ids alone do not tell a person which is which.
fn ambiguous(wanted: &str, several: &[&Entry], cwd: &Path) -> Report {
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
    Report::new(report::FAILURE, format!("`{wanted}` means {} instances{place}", several.len()))
        .because(candidates.join("\n"))
        .hint(hint)
}

/// What was probably meant: near to what was typed, as a whole or in its first words, or holding it.
fn closest(wanted: &str, entries: &[Entry], below: &[String]) -> Option<String> {
    // By which each is known, and what is offered for it.
    let known = entries.iter().flat_map(|entry| [entry.name.as_str(), entry.id.as_str()]).map(|name| (name, name));
    let backends = below.iter().filter_map(|id| Some((id.split_once('/')?.1, id.as_str())));
    let near = known.chain(backends).filter_map(|(name, offered)| {
        let beginnings = name.match_indices('-').map(|(at, _)| &name[..at]).chain([name]);
        let slips = beginnings.map(|part| (slips(wanted, part), part.len() / 3)).filter(|(slips, most)| slips <= most);
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
        (entries, 0) => format!("`outlast ps` shows the {} that run", entries.len()),
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

// ---- asking --------------------------------------------------------------------------------------------------

pub fn connect(entry: &Entry) -> Result<Client, AskError> {
    Ok(Client::connect(&entry.socket, ANSWER_MAX)?)
}

pub fn ask_plainly(entry: &Entry, method: &str, params: Value, patience: Option<Duration>) -> Result<Value, AskError> {
    Target::from(entry).ask_plainly(method, params, patience)
}

pub fn ask(entry: &Entry, method: &str, params: Value, patience: Option<Duration>) -> Result<Value, Report> {
    Target::from(entry).ask(method, params, patience)
}

pub fn failed(entry: &Entry, method: &str, error: &AskError) -> Report {
    target_failed(&Target::from(entry), method, error)
}

pub(super) fn target_failed(target: &Target, method: &str, error: &AskError) -> Report {
    let Target { entry, .. } = target;
    let id = target.id();
    let report = match method {
        "state" | "pid" => Report::new(report::FAILURE, format!("`{id}` does not say how it is")),
        method => Report::new(report::FAILURE, format!("the {method} of `{id}` failed")),
    };
    match error {
        AskError::TooLate => {
            let child = match entry.kind.as_str() {
                "session" => "agent",
                "gateway" => "backends",
                _ => "server",
            };
            let pid = entry.pid;
            report
                .because(error)
                .hint(format!("outlast itself hangs; its process is {pid}, and ending that ends its {child} too"))
        }
        AskError::Refused(refusal @ Refusal { message, data, .. }) => {
            let report = report.because(with_stderr(message, data));
            let meant = || closest(target.backend.as_deref()?, &[], &backends_below(&entry.id, data));
            match (data["hint"].as_str(), refusal.code.as_str()) {
                (Some(hint), _) => report.hint(hint),
                _ if is_halted(refusal) => report.hint(resume_hint(&id)),
                (None, "unknown_backend") => meant().map_or(report.clone(), |hint| report.hint(hint)),
                _ => report,
            }
        }
        error => report.because(error),
    }
}

/// Those that a gateway names when it is asked for one that it does not have.
fn backends_below(id: &str, data: &Value) -> Vec<String> {
    data["backends"].as_array().into_iter().flatten().map(|name| name_below(id, name)).collect()
}

pub fn is_halted(refusal: &Refusal) -> bool {
    refusal.code == "halted"
}

pub fn resume_hint(id: &str) -> String {
    format!("`outlast resume {id}` tries again")
}

/// What a restart said when it failed, and the end of what the server had to say.
fn with_stderr(message: &str, data: &Value) -> String {
    let message = message.strip_prefix("The restart failed: ").unwrap_or(message);
    let lines: Vec<&str> = data["stderr_tail"].as_str().unwrap_or_default().lines().collect();
    if lines.is_empty() {
        return message.to_owned();
    }
    let skipped = lines.len().saturating_sub(STDERR_LINES_MAX);
    let more = if skipped > 0 {
        format!("\n  … {} before, in the log …", count(skipped, "line", "lines"))
    } else {
        String::new()
    };
    format!("{message}\nits stderr:{more}\n  {}", lines[skipped..].join("\n  "))
}

/// Does one thing to one instance, and says in a line how it went: for those who watch many at once.
pub fn do_to(entry: &Entry, method: &str, params: Value) -> Result<String, String> {
    let id = &entry.id;
    let patience = (method == "stop").then_some(ANSWER_MAX);
    match ask_plainly(entry, method, params, patience) {
        Ok(report) if report["resumed"] == false => {
            Ok(format!("nothing to resume: {id} is {}", report["state"].as_str().unwrap_or("running")))
        }
        Ok(_) if method == "stop" => Ok(format!("stopping {id}")),
        Ok(report) => {
            let words = restarted_in_words(id, &report);
            Ok(words.lines().next().unwrap_or_default().to_owned())
        }
        Err(AskError::Refused(refusal)) => Err(format!("{id}: {}", refusal.message)),
        Err(error) => Err(format!("the {method} of {id} failed: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::instances::tests::entry;

    #[test]
    fn a_failure_is_told_with_what_the_server_said() {
        let one = entry("weather-1abcd", "weather", "/srv");
        let message = "The restart failed: the new server ended before it was ready (exit code 1). \
            The old server (pid 4242) keeps serving.";
        let refusal = |stderr: String| Refusal { data: json!({"stderr_tail": stderr}), ..Refusal::new("x", message) };
        let long: Vec<String> = (1..=22).map(|n| format!("line {n}")).collect();
        let mut words = String::new();
        for (method, error) in [
            ("restart", AskError::Refused(refusal("  File \"a.py\", line 3\nSyntaxError: no".into()))),
            ("restart", AskError::Refused(refusal(long.join("\n")))),
            ("resume", AskError::Refused(refusal(String::new()))),
            ("stop", AskError::Ended),
            ("state", AskError::TooLate),
        ] {
            words.push_str(&failed(&one, method, &error).to_string());
        }
        insta::assert_snapshot!(words, @r#"
        error: the restart of `weather-1abcd` failed
          because: the new server ended before it was ready (exit code 1). The old server (pid 4242) keeps serving.
                   its stderr:
                       File "a.py", line 3
                     SyntaxError: no
        error: the restart of `weather-1abcd` failed
          because: the new server ended before it was ready (exit code 1). The old server (pid 4242) keeps serving.
                   its stderr:
                     … 2 lines before, in the log …
                     line 3
                     line 4
                     line 5
                     line 6
                     line 7
                     line 8
                     line 9
                     line 10
                     line 11
                     line 12
                     line 13
                     line 14
                     line 15
                     line 16
                     line 17
                     line 18
                     line 19
                     line 20
                     line 21
                     line 22
        error: the resume of `weather-1abcd` failed
          because: the new server ended before it was ready (exit code 1). The old server (pid 4242) keeps serving.
        error: the stop of `weather-1abcd` failed
          because: it ended before it answered
        error: `weather-1abcd` does not say how it is
          because: it did not answer in time
          hint: outlast itself hangs; its process is 4240, and ending that ends its server too
        "#);
    }

    #[test]
    fn one_is_found_by_id_name_beginning_or_place() {
        let entries = [
            entry("weather-1abcd", "weather", "/srv/weather"),
            entry("weather-2bcde", "weather", "/srv/other"),
            entry("github-7k2mq", "hub", "/srv/other"),
        ];
        let twice = [entry("weather-1abcd", "weather", "/srv/twice"), entry("weather-2bcde", "weather", "/srv/twice")];
        let id = |wanted, cwd| choose(wanted, &entries, &[], Path::new(cwd)).map(|entry| entry.id.as_str());
        assert_eq!(id(Some("weather-2bcde"), "/"), Ok("weather-2bcde"));
        assert_eq!(id(Some("weather-2"), "/"), Ok("weather-2bcde"));
        assert_eq!(id(Some("hub"), "/"), Ok("github-7k2mq"));
        assert_eq!(id(None, "/srv/weather"), Ok("weather-1abcd"));
        // A name that several have means the one in this directory, and so does the beginning of an id.
        assert_eq!(id(Some("weather"), "/srv/weather"), Ok("weather-1abcd"));
        assert_eq!(id(Some("weather"), "/srv/other"), Ok("weather-2bcde"));
        assert_eq!(id(Some("w"), "/srv/other"), Ok("weather-2bcde"));
        // A whole id means that instance, wherever it runs.
        assert_eq!(id(Some("weather-1abcd"), "/srv/other"), Ok("weather-1abcd"));
        let mut words = String::new();
        for (wanted, cwd) in [
            (Some("weather"), "/"),
            (Some("w"), "/"),
            (Some("wether"), "/"),
            (Some("gihub"), "/"),
            (Some("7k2mq"), "/"),
            (Some("nonsense"), "/"),
            (None, "/srv/other"),
            (None, "/"),
        ] {
            words.push_str(&id(wanted, cwd).unwrap_err().to_string());
        }
        words.push_str(&choose(Some("weather"), &twice, &[], Path::new("/srv/twice")).unwrap_err().to_string());
        words.push_str(&choose(Some("x"), &entries[..1], &[], Path::new("/")).unwrap_err().to_string());
        words.push_str(&choose(None, &[], &[], Path::new("/")).unwrap_err().to_string());
        insta::assert_snapshot!(words, @"
        error: `weather` means 2 instances, none of them in this directory
          because: weather-1abcd  /srv/weather
                   weather-2bcde  /srv/other
          hint: name one of these ids, or run the command in its directory
        error: `w` means 2 instances, none of them in this directory
          because: weather-1abcd  /srv/weather
                   weather-2bcde  /srv/other
          hint: name one of these ids, or run the command in its directory
        error: nothing called `wether` runs under outlast
          hint: did you mean `weather`?
        error: nothing called `gihub` runs under outlast
          hint: did you mean `github-7k2mq`?
        error: nothing called `7k2mq` runs under outlast
          hint: did you mean `github-7k2mq`?
        error: nothing called `nonsense` runs under outlast
          hint: `outlast ps` shows the 3 that run
        error: 2 instances run in this directory: `weather-2bcde` and `github-7k2mq`
          hint: say which
        error: nothing runs under outlast in this directory
          hint: `outlast ps` shows the 3 that run
        error: `weather` means 2 instances
          because: weather-1abcd  /srv/twice
                   weather-2bcde  /srv/twice
          hint: name one of these ids
        error: nothing called `x` runs under outlast
          hint: `weather-1abcd` runs in /srv/weather
        error: nothing runs under outlast in this directory
          hint: nothing else runs either; `outlast run -- AGENT` starts an agent, `outlast mcp -- SERVER` a server
        ");
    }

    #[test]
    fn backends_are_counted_and_offered_too() {
        let entries = [entry("weather-1abcd", "weather", "/srv/weather"), entry("hub-7k2mq", "hub", "/srv/hub")];
        let below = ["hub-7k2mq/files", "hub-7k2mq/github"].map(str::to_owned);
        let mut words = String::new();
        for (wanted, entries, below) in [
            (Some("fiels"), &entries[..], &below[..]),
            (Some("mq/git"), &entries, &below),
            (Some("nonsense"), &entries, &below),
            (Some("nonsense"), &entries[1..], &below),
            (Some("nonsense"), &entries[1..], &below[..1]),
            (None, &entries, &below[..1]),
        ] {
            words.push_str(&choose(wanted, entries, below, Path::new("/")).unwrap_err().to_string());
        }
        insta::assert_snapshot!(words, @"
        error: nothing called `fiels` runs under outlast
          hint: did you mean `hub-7k2mq/files`?
        error: nothing called `mq/git` runs under outlast
          hint: did you mean `hub-7k2mq/github`?
        error: nothing called `nonsense` runs under outlast
          hint: `outlast ps` shows the 2 that run, and 2 backends of theirs
        error: nothing called `nonsense` runs under outlast
          hint: `outlast ps` shows `hub-7k2mq` and its 2 backends
        error: nothing called `nonsense` runs under outlast
          hint: `hub-7k2mq` runs in /srv/hub, with the backend `hub-7k2mq/files`
        error: nothing runs under outlast in this directory
          hint: `outlast ps` shows the 2 that run, and 1 backend of theirs
        ");
    }
}
