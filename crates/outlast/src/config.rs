//! Reads configuration files into checked values; no other module sees their text.
//!
//! One `outlast.toml` serves `gateway`, `mcp` and `run`; the gateway also reads the files of MCP clients. Every file
//! becomes a tree with positions ([`tree`]), and the tree becomes tables whose values know their positions ([`keys`]).

pub(crate) mod clients;
mod cluster;
pub(crate) mod commands;
pub(crate) mod flags;
pub(crate) mod gateway;
pub(crate) mod keys;
pub(crate) mod mistake;
pub(crate) mod nesting;
#[cfg(test)]
mod pages;
pub(crate) mod reference;
pub(crate) mod sandbox;
pub(crate) mod schema;
pub(crate) mod show;
pub(crate) mod table;
pub(crate) mod tree;
pub(crate) mod trust;
pub(crate) mod trust_command;
pub(crate) mod values;

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    rc::Rc,
};

use keys::Root;
use mistake::{Mistake, Mistakes};
use outlast_core::count::one_of;
use outlast_os as os;
use reference::References;
use table::{Reader, Value as _};
use tree::{File, Node, Value};
use trust::{Guarded, Store, Verdict};

use crate::cli::report;

/// The file name that is searched for, from the working directory upward.
pub(crate) const NAME: &str = "outlast.toml";
/// A larger file is refused.
const FILE_MAX: u64 = 16 << 20;

/// The part of the file that a command needs. The rest is not checked: a server behind `outlast mcp` must not fail
/// because of an unfinished backend in the same file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Want {
    Everything,
    Only(&'static str),
}

/// Every named file, read and joined, before the checks that concern several values.
#[derive(Debug, Default)]
pub(crate) struct Config {
    pub(crate) root: Root,
    /// In the order in which they were read.
    pub files: Vec<Rc<File>>,
    /// Notes for people: what was left out, and why.
    pub notes: Vec<String>,
    /// Files without a character that is not white space: a program that saves a file may have emptied it first.
    pub blank: Vec<PathBuf>,
    /// The text of each file that could be read.
    pub texts: Texts,
    /// Values that were left out because the user does not trust the file.
    pub ignored: Vec<Guarded>,
    /// The files that were found and are not used, or only in part, each with the reason.
    pub untrusted: Vec<Untrusted>,
    /// The errors of single values.
    mistakes: Mistakes,
    /// A file that was found mentions a sandbox.
    names_sandbox: bool,
}

/// The text of each file of a configuration, by its path.
pub(crate) type Texts = BTreeMap<PathBuf, String>;

/// A file that was found and not named, so that some of its keys need the user's trust.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Untrusted {
    pub path: PathBuf,
    /// A whole sentence.
    pub why: String,
    pub hint: String,
}

/// What a file that was found may set. A file that is named by an option may set everything.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Trust<'a> {
    /// The user's records of trust; without a home directory there are none.
    Recorded(Option<&'a Store>),
    /// Everything, for commands that only show.
    All,
}

/// The environment in which a configuration is read.
#[derive(Clone, Copy)]
pub(crate) struct Surroundings<'a> {
    /// The working directory.
    pub cwd: &'a Path,
    pub home: Option<&'a Path>,
    pub environment: &'a dyn Fn(&str) -> Option<String>,
    pub trust: Trust<'a>,
    /// The texts of an earlier read, in place of those on disk: the configuration that is in force.
    pub texts: Option<&'a Texts>,
}

impl Surroundings<'_> {
    /// The environment of this process.
    pub(crate) fn with<T>(cwd: &Path, then: impl FnOnce(&Surroundings<'_>) -> T) -> T {
        let home = env::home_dir();
        let environment = |name: &str| env::var(name).ok();
        let store = home.as_deref().filter(|home| home.is_absolute()).map(Store::of);
        let trust = Trust::Recorded(store.as_ref());
        then(&Surroundings { cwd, home: home.as_deref(), environment: &environment, trust, texts: None })
    }
}

impl Config {
    /// The files that were named, or else the nearest `outlast.toml`. A missing file is like an empty one.
    pub(crate) fn load(named: &[PathBuf], want: Want, around: &Surroundings<'_>) -> Result<Config, Mistakes> {
        let mut config = Config::look_at(named, want, around);
        let mut mistakes = std::mem::take(&mut config.mistakes);
        let Want::Only(table @ ("mcp" | "run")) = want else { return mistakes.check().map(|()| config) };
        flags::check(&config.root, table, named.is_empty(), &mut mistakes);
        match mistakes.check() {
            // A server starts in spite of an error in a file that it does not need. A server that the file may restrict
            // is not started without its sandbox.
            Err(mistakes) if named.is_empty() && !config.names_sandbox => Ok(config.without_found(&mistakes)),
            checked => checked.map(|()| config),
        }
    }

    /// The same without the file that was found, and with one sentence about its errors.
    fn without_found(mut self, mistakes: &Mistakes) -> Config {
        let path = self.files.first().map(|file| file.path.clone()).unwrap_or_default();
        self.root = Root::default();
        self.ignored.clear();
        self.untrusted.retain(|file| file.path != path);
        let more = match mistakes.count() {
            0 | 1 => String::new(),
            count => format!(" (and {})", outlast_core::count::count(count - 1, "more mistake", "more mistakes")),
        };
        let first = mistakes.found().first();
        let why = format!("{}{more}; nothing in this file is used", first.map(Mistake::sentence).unwrap_or_default());
        let hint = first.and_then(|mistake| mistake.hint.clone());
        let hint = hint.unwrap_or_else(|| "correct the file and start again".to_owned());
        self.untrusted.push(Untrusted { path, why, hint });
        self
    }

    /// The same with its errors, for callers that add more.
    fn look_at(named: &[PathBuf], want: Want, around: &Surroundings<'_>) -> Config {
        let mut config = Config::default();
        if named.is_empty() {
            let found = match around.texts {
                Some(texts) => texts.keys().next().cloned(),
                None => find(around.cwd, &mut config.untrusted),
            };
            found.iter().for_each(|path| config.add(path, Some(around.trust), want, around));
        }
        named.iter().for_each(|path| config.add(path, None, want, around));
        config
    }

    /// Without `trust` the file was named, and may set everything.
    fn add(&mut self, path: &Path, trust: Option<Trust<'_>>, want: Want, around: &Surroundings<'_>) {
        let path = around.cwd.join(path);
        if self.files.iter().any(|file| file.path == path) {
            return;
        }
        let shown = path.strip_prefix(around.cwd).unwrap_or(&path).display().to_string();
        let file = Rc::new(File { path, shown });
        self.files.push(file.clone());
        let is_toml = file.path.extension().is_some_and(|extension| extension == "toml");
        let known = around.texts.and_then(|texts| texts.get(&file.path));
        let text = known.map_or_else(|| text_of(&file), |text| Ok(text.clone()));
        if let Ok(text) = &text {
            self.texts.insert(file.path.clone(), text.clone());
        }
        if text.as_ref().is_ok_and(|text| text.trim().is_empty()) {
            self.blank.push(file.path.clone());
        }
        self.names_sandbox |= trust.is_some() && text.as_ref().is_ok_and(|text| text.contains("sandbox"));
        let parsed = text.and_then(|text| if is_toml { tree::toml(&file, &text) } else { tree::json(&file, &text) });
        let mut node = match parsed {
            Ok(node) => node,
            Err(mistake) => return self.mistakes.add(mistake),
        };
        if !is_toml {
            let servers = clients::read(&node, &file, around, &mut self.mistakes, &mut self.notes);
            return self.root.merge(servers);
        }
        if let Some(Trust::Recorded(store)) = trust {
            node = self.without_untrusted(node, &file, store, want);
        }
        if let (Want::Only(table), Value::Table(entries)) = (want, &mut node.value) {
            entries.retain(|entry| is_of(&entry.name, table));
        }
        let references = References { environment: around.environment, places: vec![] };
        let mut reader = Reader { references: Some(&references), mistakes: &mut self.mistakes, variables: vec![] };
        let root = reader.table("", &node);
        self.root.merge(root);
    }

    /// The tree of a file that was found, without the values that it may not set.
    fn without_untrusted(&mut self, node: Node, file: &File, store: Option<&Store>, want: Want) -> Node {
        let dir = file.path.parent().unwrap_or(Path::new("/"));
        let (rest, guarded) = trust::split(node.clone(), dir);
        let verdict = store.map_or(Verdict::Unknown, |store| store.verdict(&file.path, &guarded));
        if verdict == Verdict::Trusted || guarded.is_empty() {
            return node;
        }
        let is_wanted = |value: &Guarded| match want {
            Want::Everything => true,
            Want::Only(wanted) => is_of(value.table(), wanted),
        };
        let ignored: Vec<Guarded> = guarded.into_iter().filter(is_wanted).collect();
        if !ignored.is_empty() {
            self.untrusted.push(untrusted(file, &verdict, &ignored));
            self.ignored.extend(ignored);
        }
        rest
    }

    /// One sentence for each file that was found and not used as a whole, with what to do.
    pub(crate) fn warnings(&self) -> Vec<String> {
        self.untrusted.iter().map(|file| format!("warning: {}; {}", file.why, file.hint)).collect()
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
    let keys = match more.is_empty() {
        true => one_of(&keys, "and"),
        false => format!("{}{more}", keys.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ")),
    };
    let is = if ignored.len() == 1 { "is" } else { "are" };
    let why = match verdict {
        Verdict::Changed => format!("`{}` was changed since you trusted it", file.shown),
        Verdict::Unusable(why) => format!("`{}` is not trusted ({why})", file.shown),
        Verdict::Unknown | Verdict::Trusted => format!("`{}` is not trusted", file.shown),
    };
    let quoted = report::shell_quote([file.path.to_string_lossy().as_ref()]);
    let hint = format!("`outlast trust --show {quoted}` lists the values, `outlast trust {quoted}` trusts them");
    Untrusted { path: file.path.clone(), why: format!("{why}, so {keys} in it {is} ignored"), hint }
}

/// An agent is described in a table of its own.
fn is_of(name: &str, table: &str) -> bool {
    name == table || table == "run" && name == "agent"
}

pub(crate) fn text_of(file: &File) -> Result<String, Mistake> {
    let about = fs::metadata(&file.path);
    if about.as_ref().is_ok_and(fs::Metadata::is_dir) {
        return Err(Mistake::nowhere(format!("`{}` is a directory", file.shown)).hint("name the file in it"));
    }
    // A symbolic link is followed, because many people link their configuration. Its target must be a regular file.
    let path = os::real_path(&file.path);
    let bytes = path.and_then(|path| os::read_regular(&path, FILE_MAX)).map_err(|error| {
        if error.kind() == std::io::ErrorKind::FileTooLarge {
            let what = format!("`{}` is larger than {} MiB", file.shown, FILE_MAX >> 20);
            return Mistake::nowhere(what).hint("name a configuration file with `--config`");
        }
        let what = format!("cannot read `{}`: {}", file.shown, report::plain(&error.to_string()));
        Mistake::nowhere(what).hint("name the file with `--config`; a relative path counts from the current directory")
    })?;
    String::from_utf8(bytes).map_err(|error| {
        let line =
            error.as_bytes()[..error.utf8_error().valid_up_to()].iter().filter(|byte| **byte == b'\n').count() + 1;
        Mistake::nowhere(format!("line {line} of `{}` is not UTF-8", file.shown)).hint("save it as UTF-8")
    })
}

/// The nearest `outlast.toml`, upward. A file of another user is skipped with a note: that user could run commands
/// here.
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
        untrusted.push(Untrusted { path, why, hint: "if you trust it, name it with `--config`".to_owned() });
    }
    None
}

#[cfg(test)]
mod tests;
