//! Configuration files → checked values. Nobody downstream sees raw text.
//!
//! One `outlast.toml` serves `gateway`, `mcp` and `run`; for the gateway the files of MCP clients will do as well. Every file
//! becomes a tree that knows its places ([`tree`]), which is held against the list of keys ([`keys`]) by [`read`].

pub mod clients;
pub mod commands;
pub mod flags;
pub mod gateway;
pub mod keys;
pub mod mistake;
pub mod pages;
pub mod read;
pub mod reference;
pub mod schema;
pub mod show;
pub mod tree;

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    rc::Rc,
};

use keys::{Key, ROOT};
use mistake::{Mistake, Mistakes};
use read::{Reader, Section};
use reference::References;
use tree::{File, Node, Value};

use crate::{os, report};

/// What is looked for, from the working directory upward.
pub const NAME: &str = "outlast.toml";
/// A larger file is no configuration.
const FILE_MAX: u64 = 16 << 20;

/// What a command wants to know. The rest of the file is not looked at: a server behind `outlast mcp` must not fail because
/// somebody is in the middle of writing a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    Everything,
    Only(&'static str),
}

/// Every file that was asked for, read and joined; not yet checked for what only makes sense together.
#[derive(Debug)]
pub struct Config {
    pub root: Section,
    /// In the order in which they were read.
    pub files: Vec<Rc<File>>,
    /// For people: what was left out, and why.
    pub notes: Vec<String>,
    /// What was wrong with each value by itself.
    mistakes: Mistakes,
}

/// The world that a configuration is read in.
pub struct Surroundings<'a> {
    /// The working directory.
    pub cwd: &'a Path,
    pub home: Option<&'a Path>,
    pub environment: &'a dyn Fn(&str) -> Option<String>,
}

impl Surroundings<'_> {
    /// The real one.
    pub fn with<T>(cwd: &Path, then: impl FnOnce(&Surroundings<'_>) -> T) -> T {
        let home = env::home_dir();
        let environment = |name: &str| env::var(name).ok();
        then(&Surroundings { cwd, home: home.as_deref(), environment: &environment })
    }
}

impl Config {
    /// The files that were named, or else the nearest `outlast.toml`; none is as good as an empty one.
    pub fn load(named: &[PathBuf], want: Want, around: &Surroundings<'_>) -> Result<Config, Mistakes> {
        let mut config = Config::look_at(named, want, around)?;
        std::mem::take(&mut config.mistakes).check().map(|()| config)
    }

    /// The same, with its mistakes in it, for those who find more of them.
    fn look_at(named: &[PathBuf], want: Want, around: &Surroundings<'_>) -> Result<Config, Mistakes> {
        let found;
        let paths = match named {
            [] => {
                found = find(around.cwd)?;
                found.as_slice()
            }
            named => named,
        };
        let root = Section::empty(ROOT);
        let mut config = Config { root, files: vec![], notes: vec![], mistakes: Mistakes::default() };
        let mut mistakes = Mistakes::default();
        for path in paths {
            config.add(path, want, around, &mut mistakes);
        }
        config.mistakes = mistakes;
        Ok(config)
    }

    fn add(&mut self, path: &Path, want: Want, around: &Surroundings<'_>, mistakes: &mut Mistakes) {
        let path = around.cwd.join(path);
        let shown = path.strip_prefix(around.cwd).unwrap_or(&path).display().to_string();
        if self.files.iter().any(|file| file.path == path) {
            return;
        }
        let file = Rc::new(File { path, shown });
        self.files.push(file.clone());
        let text = match text_of(&file) {
            Ok(text) => text,
            Err(mistake) => return mistakes.add(mistake),
        };
        let is_toml = file.path.extension().is_some_and(|extension| extension == "toml");
        let parsed = if is_toml { tree::toml(&file, &text) } else { tree::json(&file, &text) };
        let node = match parsed {
            Ok(node) => node,
            Err(mistake) => return mistakes.add(mistake),
        };
        if !is_toml {
            let servers = clients::read(&node, &file, around, mistakes, &mut self.notes);
            return self.root.merge(servers);
        }
        let references = References { environment: around.environment, places: vec![] };
        let mut reader = Reader { references: &references, mistakes };
        let node = match want {
            Want::Everything => node,
            Want::Only(table) => only(node, table),
        };
        let section = reader.section(ROOT, "", &node);
        self.root.merge(section);
    }

    /// One of the tables that a command's options stand in.
    pub fn table(&self, name: &str) -> Section {
        self.root.section(name)
    }
}

fn only(node: Node, table: &str) -> Node {
    // An agent is described in a table of its own.
    let is_of = |name: &str| name == table || table == "run" && name == "agent";
    let Node { at, value } = node;
    let value = match value {
        Value::Table(entries) => Value::Table(entries.into_iter().filter(|entry| is_of(&entry.name)).collect()),
        value => value,
    };
    Node { at, value }
}

fn text_of(file: &File) -> Result<String, Mistake> {
    let cannot = |error: io::Error| {
        let what = format!("cannot read `{}`: {}", file.shown, report::plain(&error.to_string()));
        Mistake::nowhere(what).hint("name it by `--config`, from the directory you are in")
    };
    let about = fs::metadata(&file.path).map_err(cannot)?;
    if about.is_dir() {
        return Err(Mistake::nowhere(format!("`{}` is a directory", file.shown)).hint("name the file in it"));
    }
    if about.len() > FILE_MAX {
        let what = format!("`{}` is larger than {} MiB", file.shown, FILE_MAX >> 20);
        return Err(Mistake::nowhere(what).hint("name a configuration by `--config`"));
    }
    let bytes = fs::read(&file.path).map_err(cannot)?;
    String::from_utf8(bytes).map_err(|error| {
        let line =
            error.as_bytes()[..error.utf8_error().valid_up_to()].iter().filter(|byte| **byte == b'\n').count() + 1;
        Mistake::nowhere(format!("line {line} of `{}` is not UTF-8", file.shown)).hint("save it as UTF-8")
    })
}

/// The nearest file of our name, upward. One that another user put there is not obeyed: it says what to run.
fn find(cwd: &Path) -> Result<Vec<PathBuf>, Mistakes> {
    for dir in cwd.ancestors() {
        let path = dir.join(NAME);
        let Ok(about) = fs::metadata(&path) else { continue };
        if !about.is_file() {
            continue;
        }
        if !os::is_trusted(&about) {
            let what = format!("`{}` belongs to another user, and it would say what runs here", path.display());
            return Err(Mistake::nowhere(what).hint("if you trust it, name it by `--config`").into());
        }
        return Ok(vec![path]);
    }
    Ok(vec![])
}

/// A key by its path, such as `backend.command` or `auth.jwt.issuer`.
pub fn key(path: &str) -> Option<&'static Key> {
    let mut keys = ROOT;
    let mut found = None;
    for name in path.split('.') {
        let key = keys.iter().find(|key| key.name == name)?;
        keys = key.shape.inner().unwrap_or(&[]);
        found = Some(key);
    }
    found
}

#[cfg(test)]
mod tests;
