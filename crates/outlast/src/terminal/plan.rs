//! What is fixed before an agent is started, and what is looked up anew at each start.

use std::{env, ffi::OsString, path::PathBuf, time::Duration};

use outlast_core::{
    agent::{Agent, Kind, Profile},
    keys::DetachKey,
    life::Grace,
};

use crate::{
    cwd::{self, Cwd},
    environment, frontmatter,
    os::{self, Size},
    report::{self, Report},
};

/// What is fixed before the loop begins.
pub struct Plan {
    pub id: String,
    pub program: String,
    pub args: Vec<String>,
    pub profile: Profile,
    pub document: Option<PathBuf>,
    pub cwd: Option<PathBuf>,
    pub env_pass: Vec<String>,
    /// Where outlast was started.
    pub here: PathBuf,
    pub grace: Grace,
    /// What leaves the terminal outlast was started from.
    pub detach_key: DetachKey,
    /// A lost terminal is no reason to end.
    pub outlives_terminal: bool,
    /// Run with each event on its stdin.
    pub notify: Option<String>,
    pub hang_timeout: Option<Duration>,
}

/// What is looked up anew at each start.
pub struct Place {
    pub cwd: Cwd,
    pub env: Vec<(OsString, OsString)>,
    /// Names of outlast's own variables that the agent does not get.
    pub left_out: Vec<String>,
}

impl Plan {
    pub fn place(&self) -> Result<Place, Report> {
        let wrong = |error: &dyn std::error::Error, hint| Report::of(error, hint, report::USAGE);
        let said = match &self.document {
            Some(document) => {
                frontmatter::read(&self.here.join(document)).map_err(|error| wrong(&error, error.hint()))?
            }
            None => frontmatter::Frontmatter::default(),
        };
        let home = env::home_dir();
        let wish = cwd::Wish {
            flag: self.cwd.as_deref(),
            frontmatter: said.cwd.as_deref(),
            document: self.document.as_deref(),
            here: &self.here,
            home: home.as_deref(),
        };
        let cwd = cwd::resolve(wish).map_err(|error| wrong(&error, error.hint()))?;
        let document = self.document.as_deref().and_then(|document| os::real_path(&self.here.join(document)).ok());
        let about = environment::About { session: &self.id, document: document.as_deref(), cwd: &cwd.path };
        let agent = environment::For { profile: self.environment_profile(), args: &self.args, passed: &self.env_pass };
        let built = environment::build(environment::ours(), agent, &said.env, about).map_err(|error| {
            wrong(&error, Some("set it before, or say what to take instead: `${NAME:-value}`".into()))
        })?;
        Ok(Place { cwd, env: built.all, left_out: built.left_out })
    }
}

impl Plan {
    /// By the agent that it is, also behind a wrapper; a program of a known name that does something else has the same needs.
    fn environment_profile(&self) -> environment::Profile {
        match Agent::new(&self.program, &self.args, self.profile.clone()).kind() {
            Kind::Claude => environment::Profile::Claude,
            Kind::Codex => environment::Profile::Codex,
            Kind::Described | Kind::Shell | Kind::Other | Kind::Errand => environment::Profile::of(&self.program),
        }
    }
}

/// The most letters or lines a terminal may have.
pub const SIDE_MAX: u16 = 1000;

/// Of an agent's terminal while nobody has looked at it: as `COLUMNS` and `LINES` say, as for any program without one.
pub fn usual_size() -> Size {
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
    fn the_usual_size_is_what_the_environment_says() {
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
