//! What is fixed before an agent is started, and what is resolved anew at each start.

#[cfg(unix)]
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::{env, ffi::OsString, path::PathBuf, time::Duration};

#[cfg(unix)]
use outlast_core::saved::Octets;
use outlast_core::{
    agent::{Agent, Kind, Profile},
    keys::DetachKey,
    life::Grace,
    limit::OnLimit,
};
use outlast_os::{self as os, Size};
#[cfg(unix)]
use serde::{Deserialize, Serialize};

use crate::{
    agent::{
        cwd::{self, Cwd},
        frontmatter,
    },
    child::environment,
    cli::report::{self, Report},
};

/// What is fixed before the loop begins.
pub(crate) struct Plan {
    pub id: String,
    pub program: String,
    pub args: Vec<String>,
    pub profile: Profile,
    pub document: Option<PathBuf>,
    pub cwd: Option<PathBuf>,
    pub env_pass: Vec<String>,
    /// Where outlast was started.
    pub here: PathBuf,
    /// The options as the user wrote them, for a restore.
    pub options: Vec<String>,
    pub grace: Grace,
    /// Detaches the terminal that outlast was started from.
    pub detach_key: DetachKey,
    /// A lost terminal does not end the session.
    pub outlives_terminal: bool,
    /// Where events that need a person go.
    pub notify: Vec<Receiver>,
    pub hang_timeout: Option<Duration>,
    pub on_limit: OnLimit,
    /// A text that makes the agent continue with a turn that a crash interrupted.
    pub on_resume: Option<String>,
    /// `outlast restore` starts it.
    pub is_restored: bool,
}

/// What gets the events that need a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Receiver {
    /// A shell command, with the event on its stdin.
    Command(String),
    /// An address that gets the event as a POST.
    Post { url: String, form: Form },
}

/// The form of a POST.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// The event as JSON.
    Json,
    /// A line of text, with its title, priority and tags in headers.
    Ntfy,
}

impl Receiver {
    /// As the user writes it: a command, `http://…`, `https://…`, or one of these after `ntfy:`.
    pub(crate) fn read(text: &str) -> Receiver {
        let is_url = |text: &str| text.starts_with("http://") || text.starts_with("https://");
        match text.strip_prefix("ntfy:") {
            Some(url) if is_url(url) => Receiver::Post { url: url.to_owned(), form: Form::Ntfy },
            None if is_url(text) => Receiver::Post { url: text.to_owned(), form: Form::Json },
            _ => Receiver::Command(text.to_owned()),
        }
    }
}

/// What is resolved anew at each start.
pub(crate) struct StartContext {
    pub cwd: Cwd,
    pub env: Vec<(OsString, OsString)>,
    /// Names of outlast's own variables that the agent does not get.
    pub left_out: Vec<String>,
    /// Names of those that it gets, as far as they do not belong to one terminal.
    pub passed: Vec<String>,
}

/// The same as saved state: the running agent was started with it, and its document may have changed since.
#[cfg(unix)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedStartContext {
    cwd: Octets,
    source: cwd::Source,
    env: Vec<(Octets, Octets)>,
    left_out: Vec<String>,
    passed: Vec<String>,
}

#[cfg(unix)]
impl StartContext {
    pub(super) fn save(&self) -> SavedStartContext {
        let octets = |text: &OsString| Octets::of(text.as_bytes());
        SavedStartContext {
            cwd: Octets::of(self.cwd.path.as_os_str().as_bytes()),
            source: self.cwd.source,
            env: self.env.iter().map(|(name, value)| (octets(name), octets(value))).collect(),
            left_out: self.left_out.clone(),
            passed: self.passed.clone(),
        }
    }

    pub(crate) fn restore(saved: SavedStartContext) -> StartContext {
        let text = |octets: Octets| OsString::from_vec(octets.bytes().to_vec());
        StartContext {
            cwd: Cwd { path: text(saved.cwd).into(), source: saved.source },
            env: saved.env.into_iter().map(|(name, value)| (text(name), text(value))).collect(),
            left_out: saved.left_out,
            passed: saved.passed,
        }
    }
}

impl Plan {
    pub(crate) fn place(&self) -> Result<StartContext, Report> {
        let wrong = |error: &dyn std::error::Error, hint| Report::of(error, hint, report::USAGE);
        let said = match &self.document {
            Some(document) => {
                frontmatter::read(&self.here.join(document)).map_err(|error| wrong(&error, error.hint()))?
            }
            None => frontmatter::Frontmatter::default(),
        };
        let home = env::home_dir();
        let inputs = cwd::CwdInputs {
            flag: self.cwd.as_deref(),
            frontmatter: said.cwd.as_deref(),
            document: self.document.as_deref(),
            here: &self.here,
            home: home.as_deref(),
        };
        let cwd = cwd::resolve(inputs).map_err(|error| wrong(&error, error.hint()))?;
        let document = self.document.as_deref().and_then(|document| os::real_path(&self.here.join(document)).ok());
        let about = environment::SessionVariables { session: &self.id, document: document.as_deref(), cwd: &cwd.path };
        let agent = environment::For { profile: self.environment_profile(), args: &self.args, passed: &self.env_pass };
        let built = environment::build(environment::ours(), agent, &said.env, about)
            .map_err(|error| wrong(&error, Some("set it before, or give a default: `${NAME:-value}`".into())))?;
        let passed = environment::worth_restoring(&built.all);
        Ok(StartContext { cwd, env: built.all, left_out: built.left_out, passed })
    }
}

impl Plan {
    /// By the agent's profile, also behind a wrapper; a program of a known name that does something else has the same
    /// needs.
    fn environment_profile(&self) -> environment::Profile {
        match Agent::new(&self.program, &self.args, self.profile.clone()).kind() {
            Kind::Claude => environment::Profile::Claude,
            Kind::Codex => environment::Profile::Codex,
            Kind::Described | Kind::Shell | Kind::Other | Kind::NotInteractive => {
                environment::Profile::of(&self.program)
            }
        }
    }
}

/// The largest number of columns or rows.
pub(super) const SIDE_MAX: u16 = 1000;

/// The size of an agent's terminal before the first viewer: from `COLUMNS` and `LINES`, as for any program without a
/// terminal.
pub(super) fn usual_size() -> Size {
    size_of(env::var("COLUMNS").ok().as_deref(), env::var("LINES").ok().as_deref())
}

fn size_of(columns: Option<&str>, rows: Option<&str>) -> Size {
    let side = |text: Option<&str>| text?.trim().parse().ok().filter(|side| (1..=SIDE_MAX).contains(side));
    let usual = Size::default();
    Size { columns: side(columns).unwrap_or(usual.columns), rows: side(rows).unwrap_or(usual.rows), ..usual }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receiver_is_a_command_or_an_address() {
        let post = |url: &str, form| Receiver::Post { url: url.to_owned(), form };
        #[rustfmt::skip]
        let table = [
            ("notify-send x",          Receiver::Command("notify-send x".to_owned())),
            ("https://h/x",            post("https://h/x", Form::Json)),
            ("http://127.0.0.1:1/x",   post("http://127.0.0.1:1/x", Form::Json)),
            ("ntfy:https://ntfy.sh/t", post("https://ntfy.sh/t", Form::Ntfy)),
            ("ntfy: send",             Receiver::Command("ntfy: send".to_owned())),
            ("curl https://h/x",       Receiver::Command("curl https://h/x".to_owned())),
        ];
        for (text, expected) in table {
            assert_eq!(Receiver::read(text), expected, "{text}");
        }
    }

    #[test]
    fn the_default_size_comes_from_the_environment() {
        let table = [
            ((None, None), (80, 24)),
            ((Some("132"), Some("43")), (132, 43)),
            ((Some("132"), None), (132, 24)),
            ((Some(""), Some("many")), (80, 24)),
            ((Some("0"), Some("1001")), (80, 24)),
            ((Some("-1"), Some("99999999")), (80, 24)),
        ];
        for ((columns, rows), expected) in table {
            let size = size_of(columns, rows);
            assert_eq!((size.columns, size.rows), expected, "{columns:?} {rows:?}");
        }
    }
}
