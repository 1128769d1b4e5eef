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
pub mod sandbox;
pub mod schema;
pub mod show;
pub mod tree;
pub mod trust;
pub mod trust_command;

use std::{
    env, fs,
    path::{Path, PathBuf},
    rc::Rc,
};

use keys::{Key, ROOT};
use mistake::{Mistake, Mistakes};
use read::{Reader, Section};
use reference::References;
use tree::{File, Node, Value};
use trust::{Guarded, Store, Verdict};

use crate::{
    os,
    report::{self, one_of},
};

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
    /// Values that were left out because the user does not trust the file that was found.
    pub ignored: Vec<Guarded>,
    /// The files that were found and are not used, or not as a whole, each with the reason.
    pub untrusted: Vec<Untrusted>,
    /// What was wrong with each value by itself.
    mistakes: Mistakes,
}

/// A file that was found and not named, and that may not say everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Untrusted {
    pub path: PathBuf,
    /// A whole sentence.
    pub why: String,
    pub hint: String,
}

/// What a file may say that was found by looking for it. A file that is named by an option may say everything.
#[derive(Debug, Clone, Copy)]
pub enum Trust<'a> {
    /// What the user has agreed to; without a home directory there is no record of that.
    Recorded(Option<&'a Store>),
    /// Everything, for those who only look.
    All,
}

/// The world that a configuration is read in.
#[derive(Clone, Copy)]
pub struct Surroundings<'a> {
    /// The working directory.
    pub cwd: &'a Path,
    pub home: Option<&'a Path>,
    pub environment: &'a dyn Fn(&str) -> Option<String>,
    pub trust: Trust<'a>,
}

impl Surroundings<'_> {
    /// The real one.
    pub fn with<T>(cwd: &Path, then: impl FnOnce(&Surroundings<'_>) -> T) -> T {
        let home = env::home_dir();
        let environment = |name: &str| env::var(name).ok();
        let store = home.as_deref().filter(|home| home.is_absolute()).map(Store::of);
        let trust = Trust::Recorded(store.as_ref());
        then(&Surroundings { cwd, home: home.as_deref(), environment: &environment, trust })
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
        let root = Section::empty(ROOT);
        let mut config = Config {
            root,
            files: vec![],
            notes: vec![],
            ignored: vec![],
            untrusted: vec![],
            mistakes: Mistakes::default(),
        };
        let mut mistakes = Mistakes::default();
        if named.is_empty() {
            let found = find(around.cwd, &mut config.untrusted);
            let trust = Some(around.trust);
            found.iter().for_each(|path| config.add(path, trust, want, around, &mut mistakes));
        }
        for path in named {
            config.add(path, None, want, around, &mut mistakes);
        }
        config.mistakes = mistakes;
        Ok(config)
    }

    /// Without `trust`, the file was named and may say everything.
    fn add(
        &mut self,
        path: &Path,
        trust: Option<Trust<'_>>,
        want: Want,
        around: &Surroundings<'_>,
        mistakes: &mut Mistakes,
    ) {
        let path = around.cwd.join(path);
        let shown = path.strip_prefix(around.cwd).unwrap_or(&path).display().to_string();
        if self.files.iter().any(|file| file.path == path) {
            return;
        }
        let file = Rc::new(File { path, shown });
        self.files.push(file.clone());
        let is_toml = file.path.extension().is_some_and(|extension| extension == "toml");
        let text = text_of(&file);
        let names_sandbox = text.as_ref().is_ok_and(|text| text.contains("sandbox"));
        let parsed = text.and_then(|text| if is_toml { tree::toml(&file, &text) } else { tree::json(&file, &text) });
        let node = match parsed {
            Ok(node) => node,
            // A server does not go down with a merge conflict in a file that it can do without. One that may be restricted
            // by the file is not started without its sandbox.
            Err(mistake) if !names_sandbox && trust.is_some() && matches!(want, Want::Only("mcp" | "run")) => {
                let why = format!("{}; nothing in this file is used", mistake.sentence());
                let hint = mistake.hint.unwrap_or_else(|| "mend the file and start again".to_owned());
                return self.untrusted.push(Untrusted { path: file.path.clone(), why, hint });
            }
            Err(mistake) => return mistakes.add(mistake),
        };
        if !is_toml {
            let servers = clients::read(&node, &file, around, mistakes, &mut self.notes);
            return self.root.merge(servers);
        }
        let node = match trust {
            Some(Trust::Recorded(store)) => self.without_untrusted(node, &file, store, want),
            Some(Trust::All) | None => node,
        };
        let references = References { environment: around.environment, places: vec![] };
        let mut reader = Reader { references: &references, mistakes };
        let node = match want {
            Want::Everything => node,
            Want::Only(table) => only(node, table),
        };
        let section = reader.section(ROOT, "", &node);
        self.root.merge(section);
    }

    /// The tree of a file that was found, without what it may not say.
    fn without_untrusted(&mut self, node: Node, file: &File, store: Option<&Store>, want: Want) -> Node {
        let dir = file.path.parent().unwrap_or(Path::new("/"));
        let (rest, guarded) = trust::split(node.clone(), dir);
        let verdict = store.map_or(Verdict::Unknown, |store| store.verdict(&file.path, &guarded));
        if verdict == Verdict::Trusted || guarded.is_empty() {
            return node;
        }
        let is_wanted = |value: &Guarded| {
            let table = value.key.split('.').next().unwrap_or_default();
            match want {
                Want::Everything => true,
                Want::Only(wanted) => is_of(table, wanted),
            }
        };
        let ignored: Vec<Guarded> = guarded.into_iter().filter(is_wanted).collect();
        if !ignored.is_empty() {
            self.untrusted.push(untrusted(file, &verdict, &ignored));
            self.ignored.extend(ignored);
        }
        rest
    }

    /// One sentence for each file that was found and may not say everything, with what to do.
    pub fn warnings(&self) -> Vec<String> {
        self.untrusted.iter().map(|file| format!("warning: {}; {}", file.why, file.hint)).collect()
    }

    /// One of the tables that a command's options stand in.
    pub fn table(&self, name: &str) -> Section {
        self.root.section(name)
    }
}

/// Keys that a warning names; the rest is counted.
const NAMED_MAX: usize = 8;

fn untrusted(file: &File, verdict: &Verdict, ignored: &[Guarded]) -> Untrusted {
    let mut keys: Vec<String> = ignored.iter().take(NAMED_MAX).map(|value| value.key.clone()).collect();
    let more = match ignored.len().saturating_sub(keys.len()) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    keys.dedup();
    let keys = format!("{}{more}", one_of(&keys, if more.is_empty() { "and" } else { "," }));
    let is = if ignored.len() == 1 { "is" } else { "are" };
    let why = match verdict {
        Verdict::Changed => format!("`{}` was changed since you trusted it", file.shown),
        Verdict::Unusable(why) => format!("`{}` is not trusted ({why})", file.shown),
        Verdict::Unknown | Verdict::Trusted => format!("`{}` is not trusted", file.shown),
    };
    let quoted = report::shell_quote([file.path.to_string_lossy().as_ref()]);
    let hint = format!("`outlast trust --show {quoted}` lists the values, `outlast trust {quoted}` allows them");
    Untrusted { path: file.path.clone(), why: format!("{why}, so {keys} in it {is} ignored"), hint }
}

/// An agent is described in a table of its own.
fn is_of(name: &str, table: &str) -> bool {
    name == table || table == "run" && name == "agent"
}

fn only(node: Node, table: &str) -> Node {
    let Node { at, value } = node;
    let value = match value {
        Value::Table(entries) => Value::Table(entries.into_iter().filter(|entry| is_of(&entry.name, table)).collect()),
        value => value,
    };
    Node { at, value }
}

pub(crate) fn text_of(file: &File) -> Result<String, Mistake> {
    let about = fs::metadata(&file.path);
    if about.as_ref().is_ok_and(fs::Metadata::is_dir) {
        return Err(Mistake::nowhere(format!("`{}` is a directory", file.shown)).hint("name the file in it"));
    }
    // A symbolic link is followed: many people link their configuration. Its target must be a file all the same.
    let path = os::real_path(&file.path);
    let bytes = path.and_then(|path| os::read_regular(&path, FILE_MAX)).map_err(|error| {
        if error.kind() == std::io::ErrorKind::FileTooLarge {
            let what = format!("`{}` is larger than {} MiB", file.shown, FILE_MAX >> 20);
            return Mistake::nowhere(what).hint("name a configuration by `--config`");
        }
        let what = format!("cannot read `{}`: {}", file.shown, report::plain(&error.to_string()));
        Mistake::nowhere(what).hint("name it by `--config`, from the directory you are in")
    })?;
    String::from_utf8(bytes).map_err(|error| {
        let line =
            error.as_bytes()[..error.utf8_error().valid_up_to()].iter().filter(|byte| **byte == b'\n').count() + 1;
        Mistake::nowhere(format!("line {line} of `{}` is not UTF-8", file.shown)).hint("save it as UTF-8")
    })
}

/// The nearest file of our name, upward. One that belongs to another user is passed over and told of: that user could
/// say what runs here.
pub(crate) fn find(cwd: &Path, untrusted: &mut Vec<Untrusted>) -> Option<PathBuf> {
    for dir in cwd.ancestors() {
        let path = dir.join(NAME);
        let Ok(about) = fs::metadata(&path) else { continue };
        if !about.is_file() {
            continue;
        }
        if os::is_trusted(&about) {
            return Some(path);
        }
        let why = format!("`{}` belongs to another user and is not used", path.display());
        untrusted.push(Untrusted { path, why, hint: "if you trust it, name it by `--config`".to_owned() });
    }
    None
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
