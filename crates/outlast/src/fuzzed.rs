//! What the fuzz targets call: the readers of files that people and other programs write, with plain results. Nothing in the
//! program uses this.

use std::path::Path;

use crate::{
    adopt::{
        edit::{self, Caller, Edit, Verdict},
        servers::{self, Format, How},
    },
    agent::frontmatter::{self, FrontmatterError},
    config::{Config, Surroundings, Trust, Want, gateway::Gateway, mistake::Mistakes, show},
};

/// What is wrong with a configuration, and where it stands, from 1; no place if it stands in no file.
pub struct Wrong {
    pub place: Option<(usize, usize)>,
    pub sentence: String,
}

/// Reads a file as `gateway`, `mcp` and `run` do, and shows what it says.
pub fn configuration(path: &Path) -> Vec<Wrong> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let environment = |name: &str| (name == "SET").then(|| "value of SET".to_owned());
    let around = Surroundings {
        cwd: dir,
        home: Some(dir),
        environment: &environment,
        trust: Trust::Recorded(None),
        texts: None,
    };
    let named = [path.to_owned()];
    let mut wrong = Vec::new();
    let mut add = |mistakes: Mistakes| {
        wrong.extend(mistakes.found().iter().map(|mistake| {
            let at = mistake.at.as_ref().filter(|at| !at.is_option());
            Wrong { place: at.map(|at| (at.line, at.column)), sentence: mistake.to_string() }
        }));
    };
    match Gateway::load(&named, &around) {
        Ok((_, config)) => drop(show::table(&show::all(&config, None))),
        Err(mistakes) => add(mistakes),
    }
    // Once as a file that was named, once as one that was found and is not trusted.
    for (table, named) in [("run", &named[..]), ("mcp", &[])] {
        match Config::load(named, Want::Only(table), &around) {
            Ok(config) => drop((config.warnings(), show::json(&show::all(&config, Some(table)), &config))),
            Err(mistakes) => add(mistakes),
        }
    }
    wrong
}

/// The text with outlast before each server. An error is the line that cannot be read.
pub fn wrap(text: &str, format: Format) -> Result<String, usize> {
    let caller = Caller { command: "/opt/some where/outlast", shares: false, is_same: &|_| false };
    let servers = servers::read(text, format).map_err(|error| error.line)?;
    Ok(apply(text, servers.iter().map(|server| edit::wrap(text, format, server, &caller))))
}

/// The text without outlast. `before` is the text as it was, which says which servers had arguments.
pub fn unwrap(text: &str, before: &str, format: Format) -> Result<String, usize> {
    let servers = servers::read(text, format).map_err(|error| error.line)?;
    let before = servers::read(before, format).map_err(|error| error.line)?;
    let had_args = |at: usize| match &before.get(at)?.how {
        How::Starts(program) => Some(program.args.is_some()),
        _ => None,
    };
    Ok(apply(text, servers.iter().enumerate().map(|(at, server)| edit::unwrap(text, server, had_args(at)))))
}

fn apply(text: &str, verdicts: impl Iterator<Item = Verdict>) -> String {
    let edits = verdicts.filter_map(|verdict| match verdict {
        Verdict::Change(edits) => Some(edits),
        Verdict::Settled | Verdict::Leave(_) => None,
    });
    edit::apply(text, &edits.flatten().collect::<Vec<Edit>>())
}

/// The name of a server and its own command.
pub type ServerCommand = (String, Option<Vec<String>>);

/// Each server of a text with its own command, whether or not outlast stands before it. The error is a line number.
pub fn commands(text: &str, format: Format) -> Result<Vec<ServerCommand>, usize> {
    let servers = servers::read(text, format).map_err(|error| error.line)?;
    Ok(servers.iter().map(|server| (server.name.clone(), edit::command_of(server))).collect())
}

/// The lines that the block at the top of a document names: of its variables, or of what makes no sense in it.
pub fn document(path: &Path) -> Vec<usize> {
    match frontmatter::read(path) {
        Ok(found) => found.env.iter().map(|(_, _, line)| *line).collect(),
        Err(FrontmatterError::Nonsense { line, .. }) => vec![line],
        Err(FrontmatterError::Unreadable { .. }) => vec![],
    }
}
