//! Finds the instance or backend that a command means, and sends it requests.

use std::{
    env,
    time::{Duration, Instant},
};

use outlast_control::{
    answer::{RefusalData, Restarted},
    client::{AskError, Client, Found},
    find::{self, ANSWER_MAX, FindError, Missing},
    method::Method,
    registry::Entry,
    wire::Refusal,
};
use outlast_core::count::{count, one_of};
use serde_json::Value;

use super::{name_below, restarted_in_words};
use crate::cli::report::{self, Report};

/// How many lines of a server's stderr an error contains; the rest is in the log.
pub(super) const STDERR_LINES_MAX: usize = 20;

impl From<FindError> for Report {
    fn from(error: FindError) -> Report {
        Report { sentence: error.sentence, because: error.because, hint: error.hint, code: report::FAILURE }
    }
}

/// What a command is about: an instance, or one backend of a gateway.
pub(crate) struct Target {
    pub entry: Entry,
    pub backend: Option<String>,
}

impl Target {
    /// By name or id of an instance; by `GATEWAY/BACKEND`; or by a backend's name, if only one gateway has it.
    pub(crate) fn find(wanted: Option<&str>) -> Result<Target, Report> {
        if let Some((gateway, backend)) = wanted.and_then(|wanted| wanted.split_once('/')) {
            let target = Target { entry: find::find(Some(gateway))?, backend: Some(backend.to_owned()) };
            target.is_gateway("asked for a backend")?;
            return Ok(target);
        }
        let Missing { error, found } = match find::seek(wanted) {
            Ok(entry) => return Ok(Target { entry, backend: None }),
            Err(missing) => missing,
        };
        let has_it = |found: &Found| wanted.is_some_and(|wanted| find::backends_of(found).any(|name| name == wanted));
        let owners = found.into_iter().filter(has_it);
        let mut owners: Vec<Target> =
            owners.map(|found| Target { entry: found.entry, backend: wanted.map(str::to_owned) }).collect();
        if owners.len() > 1 {
            let cwd = env::current_dir().unwrap_or_default();
            let is_here = |target: &Target| target.entry.cwd == cwd;
            if owners.iter().filter(|target| is_here(target)).count() == 1 {
                owners.retain(is_here);
                return owners.pop().ok_or_else(|| error.into());
            }
            let ids: Vec<String> = owners.iter().map(Target::id).collect();
            let sentence = format!("`{}` may be {}", wanted.unwrap_or_default(), one_of(&ids, "or"));
            return Err(Report::new(report::FAILURE, sentence).hint("name the gateway too"));
        }
        owners.pop().ok_or_else(|| error.into())
    }

    pub(crate) fn ask_plainly(&self, method: &Method, patience: Option<Duration>) -> Result<Value, AskError> {
        let mut client = connect(&self.entry)?;
        let id = client.send(method, self.backend.as_deref())?;
        client.answer_to(id, patience.map(|patience| Instant::now() + patience))
    }

    pub(crate) fn ask(&self, method: &Method, patience: Option<Duration>) -> Result<Value, Report> {
        self.ask_plainly(method, patience).map_err(|error| target_failed(self, method.name(), &error))
    }

    /// As users write it.
    pub(crate) fn id(&self) -> String {
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
        Err(Report::new(report::USAGE, format!("`{id}` is not a gateway ({kind}) and cannot be {what}"))
            .hint("`outlast ps` shows which are"))
    }
}

impl From<&Entry> for Target {
    fn from(entry: &Entry) -> Target {
        Target { entry: entry.clone(), backend: None }
    }
}

// ---- requests ------------------------------------------------------------------------------------------------

pub(crate) fn connect(entry: &Entry) -> Result<Client, AskError> {
    Ok(Client::connect(&entry.socket, ANSWER_MAX)?)
}

pub(crate) fn ask_plainly(entry: &Entry, method: &Method, patience: Option<Duration>) -> Result<Value, AskError> {
    Target::from(entry).ask_plainly(method, patience)
}

pub(crate) fn ask(entry: &Entry, method: &Method, patience: Option<Duration>) -> Result<Value, Report> {
    Target::from(entry).ask(method, patience)
}

pub(crate) fn failed(entry: &Entry, method: &str, error: &AskError) -> Report {
    target_failed(&Target::from(entry), method, error)
}

pub(super) fn target_failed(target: &Target, method: &str, error: &AskError) -> Report {
    let Target { entry, .. } = target;
    let id = target.id();
    let report = match method {
        "state" | "pid" => Report::new(report::FAILURE, format!("`{id}` does not report its state")),
        "cluster_state" => Report::new(report::FAILURE, format!("`{id}` does not report the state of its cluster")),
        "cluster_audit" => {
            Report::new(report::FAILURE, format!("`{id}` does not report the audit records of its cluster"))
        }
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
                .hint(format!("outlast itself hangs; its process is {pid}, and ending it ends its {child} too"))
        }
        AskError::Refused(refusal @ Refusal { message, data, .. }) => {
            let RefusalData { hint, backends, stderr_tail, .. } = RefusalData::read(data);
            let report = report.because(with_stderr(message, &stderr_tail));
            let backends: Vec<String> = backends.iter().map(|name| name_below(&entry.id, name)).collect();
            let meant = || find::closest(target.backend.as_deref()?, &[], &backends);
            match (hint, refusal.code.as_str()) {
                (Some(hint), _) => report.hint(hint),
                _ if is_halted(refusal) => report.hint(resume_hint(&id)),
                (None, "unknown_backend") => meant().map_or(report.clone(), |hint| report.hint(hint)),
                _ => report,
            }
        }
        error => report.because(error),
    }
}

pub(crate) fn is_halted(refusal: &Refusal) -> bool {
    refusal.code == "halted"
}

pub(crate) fn resume_hint(id: &str) -> String {
    format!("`outlast resume {id}` tries again")
}

/// The error of a failed restart, and the end of the server's stderr.
fn with_stderr(message: &str, stderr_tail: &str) -> String {
    let message = message.strip_prefix("The restart failed: ").unwrap_or(message);
    let lines: Vec<&str> = stderr_tail.lines().collect();
    if lines.is_empty() {
        return message.to_owned();
    }
    let skipped = lines.len().saturating_sub(STDERR_LINES_MAX);
    let more = if skipped > 0 {
        format!("\n  … {} earlier, in the log …", count(skipped, "line", "lines"))
    } else {
        String::new()
    };
    format!("{message}\nits stderr:{more}\n  {}", lines[skipped..].join("\n  "))
}

/// Sends one request to one instance and returns the result as one line, for `outlast top`.
pub(crate) fn do_to(target: &Target, method: &Method) -> Result<String, String> {
    let id = &target.entry.id;
    let is_stop = matches!(method, Method::Stop(_));
    match target.ask_plainly(method, is_stop.then_some(ANSWER_MAX)) {
        Ok(_) if is_stop => Ok(format!("stopping {id}")),
        Ok(answer) => {
            let restarted = Restarted::read(&answer);
            match restarted.nothing_to_resume() {
                Some(state) => Ok(format!("nothing to resume: {id} is {state}")),
                None => Ok(restarted_in_words(id, &restarted).lines().next().unwrap_or_default().to_owned()),
            }
        }
        Err(AskError::Refused(refusal)) => Err(format!("{id}: {}", refusal.message)),
        Err(error) => Err(format!("the {} of {id} failed: {error}", method.name())),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use outlast_control::find::choose;
    use serde_json::json;

    use super::*;
    use crate::operator::instances::tests::entry;

    #[test]
    fn a_failure_quotes_the_server() {
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
                     … 2 lines earlier, in the log …
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
        error: `weather-1abcd` does not report its state
          because: it did not answer in time
          hint: outlast itself hangs; its process is 4240, and ending it ends its server too
        "#);
    }

    #[test]
    fn an_instance_is_found_by_id_name_prefix_or_directory() {
        let entries = [
            entry("weather-1abcd", "weather", "/srv/weather"),
            entry("weather-2bcde", "weather", "/srv/other"),
            entry("github-7k2mq", "hub", "/srv/other"),
        ];
        let twice = [entry("weather-1abcd", "weather", "/srv/twice"), entry("weather-2bcde", "weather", "/srv/twice")];
        let id = |wanted, cwd| {
            choose(wanted, &entries, &[], Path::new(cwd)).map(|entry| entry.id.as_str()).map_err(Report::from)
        };
        assert_eq!(id(Some("weather-2bcde"), "/"), Ok("weather-2bcde"));
        assert_eq!(id(Some("weather-2"), "/"), Ok("weather-2bcde"));
        assert_eq!(id(Some("hub"), "/"), Ok("github-7k2mq"));
        assert_eq!(id(None, "/srv/weather"), Ok("weather-1abcd"));
        // A name or the beginning of an id that several instances share means the one in this directory.
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
        words.push_str(
            &Report::from(choose(Some("weather"), &twice, &[], Path::new("/srv/twice")).unwrap_err()).to_string(),
        );
        words.push_str(&Report::from(choose(Some("x"), &entries[..1], &[], Path::new("/")).unwrap_err()).to_string());
        words.push_str(&Report::from(choose(None, &[], &[], Path::new("/")).unwrap_err()).to_string());
        insta::assert_snapshot!(words, @"
        error: `weather` means 2 instances, none of them in this directory
          because: weather-1abcd  /srv/weather
                   weather-2bcde  /srv/other
          hint: name one of these ids, or run the command in its directory
        error: `w` means 2 instances, none of them in this directory
          because: weather-1abcd  /srv/weather
                   weather-2bcde  /srv/other
          hint: name one of these ids, or run the command in its directory
        error: no instance named `wether` is running
          hint: did you mean `weather`?
        error: no instance named `gihub` is running
          hint: did you mean `github-7k2mq`?
        error: no instance named `7k2mq` is running
          hint: did you mean `github-7k2mq`?
        error: no instance named `nonsense` is running
          hint: `outlast ps` lists the 3 running instances
        error: 2 instances run in this directory: `weather-2bcde` and `github-7k2mq`
          hint: name one of them
        error: nothing runs under outlast in this directory
          hint: `outlast ps` lists the 3 running instances
        error: `weather` means 2 instances
          because: weather-1abcd  /srv/twice
                   weather-2bcde  /srv/twice
          hint: name one of these ids
        error: no instance named `x` is running
          hint: `weather-1abcd` runs in /srv/weather
        error: nothing runs under outlast in this directory
          hint: nothing else runs either; `outlast run -- AGENT` starts an agent, `outlast mcp -- SERVER` a server
        ");
    }

    #[test]
    fn backends_are_matched_and_suggested_too() {
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
            words.push_str(&Report::from(choose(wanted, entries, below, Path::new("/")).unwrap_err()).to_string());
        }
        insta::assert_snapshot!(words, @"
        error: no instance named `fiels` is running
          hint: did you mean `hub-7k2mq/files`?
        error: no instance named `mq/git` is running
          hint: did you mean `hub-7k2mq/github`?
        error: no instance named `nonsense` is running
          hint: `outlast ps` shows the 2 that run, and 2 backends of theirs
        error: no instance named `nonsense` is running
          hint: `outlast ps` shows `hub-7k2mq` and its 2 backends
        error: no instance named `nonsense` is running
          hint: `hub-7k2mq` runs in /srv/hub, with the backend `hub-7k2mq/files`
        error: nothing runs under outlast in this directory
          hint: `outlast ps` shows the 2 that run, and 1 backend of theirs
        ");
    }
}
