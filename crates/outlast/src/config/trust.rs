//! Trust in configuration files that outlast found by itself (SPEC X1): which of their values need the user's consent, and
//! the records of that consent. What becomes of values without consent is decided by the caller.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use outlast_core::redact;
use outlast_os as os;
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};

use super::{
    keys::Root,
    table::{Guard, Key, Shape, join},
    tree::{Node, Position, Value},
};
use crate::state::home;

/// A longer record was not written by outlast.
const RECORD_MAX: u64 = 64 << 10;
const VERSION: u64 = 1;
/// A prefix of everything that is hashed: another list of guarded keys or another layout gives other names.
const LAYOUT: &str = "outlast trust 1";

/// A value that a file may set only if the user trusts it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Guarded {
    /// The full path of the key, such as `mcp.build` or `backend.github.command`.
    pub key: String,
    pub at: Position,
    /// As it is in the file: references are not resolved.
    pub value: Json,
}

impl Guarded {
    /// The table of the file that it is in.
    pub(crate) fn table(&self) -> &str {
        self.key.split('.').next().unwrap_or_default()
    }

    /// For people: parts that look like a secret are hidden.
    pub(crate) fn shown(&self) -> Json {
        fn hide(name: &str, value: &Json) -> Json {
            match value {
                Json::String(text) if redact::tells(name) && !text.contains("${") => json!(redact::HIDDEN),
                Json::String(text) => json!(redact::text(text)),
                Json::Array(values) if name == "args" || name == "command" => {
                    let words = values.iter().map(|value| value.as_str().unwrap_or_default().to_owned());
                    json!(redact::command(&words.collect::<Vec<String>>()))
                }
                Json::Array(values) => values.iter().map(|value| hide("", value)).collect(),
                Json::Object(members) => {
                    Json::Object(members.iter().map(|(name, value)| (name.clone(), hide(name, value))).collect())
                }
                other => other.clone(),
            }
        }
        // `auth.key` and `secret_env` name no secret themselves.
        hide(self.key.rsplit('.').next().filter(|name| *name == "args").unwrap_or_default(), &self.value)
    }
}

/// Removes the guarded values from the tree of an `outlast.toml`. Paths are relative to `dir`.
pub(crate) fn split(mut node: Node, dir: &Path) -> (Node, Vec<Guarded>) {
    let mut found = Vec::new();
    strip(Root::KEYS, "", &mut node, dir, &mut found);
    (node, found)
}

fn strip(keys: &'static [Key], path: &str, node: &mut Node, dir: &Path, found: &mut Vec<Guarded>) {
    let Value::Table(entries) = &mut node.value else { return };
    entries.retain_mut(|entry| {
        let path = join(path, &entry.name);
        // The reader reports an unknown key, and resolves nothing in it.
        let Some(key) = keys.iter().find(|key| key.name == entry.name) else { return true };
        let is_guarded = match key.guard {
            Guard::Always => true,
            Guard::Outside => refers(&entry.node) || !is_inside(&entry.node, dir),
            Guard::Never => key.shape.is_leaf() && refers(&entry.node),
        };
        if is_guarded {
            found.push(Guarded { key: path, at: entry.at.clone(), value: entry.node.json() });
            return false;
        }
        match (key.shape, &mut entry.node.value) {
            (Shape::Table(keys), _) => strip(keys, &path, &mut entry.node, dir, found),
            (Shape::Named(keys), Value::Table(tables)) => {
                tables.iter_mut().for_each(|table| strip(keys, &join(&path, &table.name), &mut table.node, dir, found));
            }
            (Shape::Many(keys), Value::List(tables)) => {
                for (n, table) in tables.iter_mut().enumerate() {
                    strip(keys, &join(&path, &table.name(n)), table, dir, found);
                }
            }
            _ => {}
        }
        true
    });
}

/// Whether a text in it refers to the environment. `$${` stands for `${`.
fn refers(node: &Node) -> bool {
    match &node.value {
        Value::Text(text) => text.match_indices("${").any(|(at, _)| !text[..at].ends_with('$')),
        Value::List(nodes) => nodes.iter().any(refers),
        Value::Table(entries) => entries.iter().any(|entry| refers(&entry.node)),
        _ => false,
    }
}

/// Whether all paths in it stay in a directory, after resolving symbolic links.
fn is_inside(node: &Node, dir: &Path) -> bool {
    match &node.value {
        Value::Text(text) => leads_inside(dir, &dir.join(text)),
        Value::List(nodes) => nodes.iter().all(|node| is_inside(node, dir)),
        // It is not a path, and the reader reports it.
        _ => true,
    }
}

fn leads_inside(dir: &Path, path: &Path) -> bool {
    let Ok(real_dir) = fs::canonicalize(dir) else { return false };
    // A path that does not exist yet is resolved from its nearest existing directory.
    for at in path.ancestors() {
        match fs::canonicalize(at) {
            Ok(real) => return real.starts_with(&real_dir),
            // A symbolic link without a target may point anywhere once the target exists.
            Err(_) if fs::symlink_metadata(at).is_ok() => return false,
            Err(_) if at.ends_with("..") => return false,
            Err(_) => {}
        }
    }
    false
}

/// The record of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The user has agreed to these guarded values, or there are none.
    Trusted,
    Unknown,
    /// It was trusted with other values.
    Changed,
    /// The record cannot be used, for this reason; the file counts as not trusted.
    Unusable(String),
}

/// The user's records of trust, one file for each trusted file, in the user's state directory.
#[derive(Debug, Clone)]
pub(crate) struct Store(PathBuf);

impl Store {
    pub(crate) fn of(home: &Path) -> Store {
        Store(home::state_dir(home).join("trusted"))
    }

    pub(crate) fn verdict(&self, file: &Path, guarded: &[Guarded]) -> Verdict {
        if guarded.is_empty() {
            return Verdict::Trusted;
        }
        let Ok(file) = identity(file) else { return Verdict::Unknown };
        let path = self.path(&file);
        let unusable = |path: &Path, error: &io::Error| {
            Verdict::Unusable(format!("the trust record {} cannot be used: {error}", path.display()))
        };
        match os::check_own_dir(&self.0) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Verdict::Unknown,
            Err(error) => return unusable(&self.0, &error),
        }
        let bytes = match os::read_own(&path, RECORD_MAX) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Verdict::Unknown,
            Err(error) => return unusable(&path, &error),
        };
        let Ok(record) = serde_json::from_slice::<Json>(&bytes) else {
            return unusable(&path, &io::Error::other("it is damaged"));
        };
        match record["v"] == VERSION && record["sha256"] == digest(&file, guarded) {
            true => Verdict::Trusted,
            false => Verdict::Changed,
        }
    }

    /// Records that the user trusts these values of a file.
    pub(crate) fn grant(&self, file: &Path, guarded: &[Guarded]) -> io::Result<()> {
        let file = identity(file)?;
        home::make_private(&self.0)?;
        os::close_own_dir(&self.0)?;
        let record = json!({ "v": VERSION, "file": file.to_string_lossy(), "sha256": digest(&file, guarded) });
        home::write_private(&self.path(&file), format!("{record}\n").as_bytes())
    }

    /// True if there was a record.
    pub(crate) fn revoke(&self, file: &Path) -> io::Result<bool> {
        // The record of a removed file is found by its former path.
        let file = identity(file).unwrap_or_else(|_| file.to_owned());
        match os::check_own_dir(&self.0).and_then(|()| fs::remove_file(self.path(&file))) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn path(&self, file: &Path) -> PathBuf {
        self.0.join(format!("{}.json", home::project_name(file)))
    }
}

/// The file by the path where it was found: a symbolic link in another directory is another file, as its paths and
/// commands are relative to that directory.
fn identity(file: &Path) -> io::Result<PathBuf> {
    let name = file.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    Ok(os::real_path(file.parent().unwrap_or(Path::new("/")))?.join(name))
}

/// A hash of the file's path and of all guarded values, sorted: other edits of the file change nothing.
fn digest(file: &Path, guarded: &[Guarded]) -> String {
    let mut hash = Sha256::new();
    let mut add = |part: &[u8]| {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    };
    add(LAYOUT.as_bytes());
    add(file.as_os_str().as_encoded_bytes());
    // The members of an object are sorted by name.
    let mut values: Vec<(&str, String)> =
        guarded.iter().map(|value| (value.key.as_str(), value.value.to_string())).collect();
    values.sort();
    for (key, value) in values {
        add(key.as_bytes());
        add(value.as_bytes());
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::{super::tree, *};

    fn parse(dir: &Path, text: &str) -> (Node, Vec<Guarded>) {
        let file = Rc::new(tree::File { path: dir.join("outlast.toml"), shown: "outlast.toml".to_owned() });
        split(tree::toml(&file, text).expect("TOML"), dir)
    }

    fn guarded(dir: &Path, text: &str) -> Vec<Guarded> {
        parse(dir, text).1
    }

    #[test]
    fn values_that_run_pass_connect_or_listen_are_guarded() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("src")).unwrap();
        #[cfg(unix)]
        std::os::unix::fs::symlink("/", dir.path().join("link")).unwrap();
        #[cfg(unix)]
        std::os::unix::fs::symlink("/nothing/there", dir.path().join("dangling")).unwrap();
        #[rustfmt::skip]
        let table: &[(&str, &[&str])] = &[
            ("[mcp]\nname = \"weather\"\nhold = 5\nno_tools = true",              &[]),
            ("[mcp]\nbuild = \"make\"",                                         &["mcp.build"]),
            ("[mcp]\nname = \"${GITHUB_TOKEN}\"",                               &["mcp.name"]),
            ("[mcp]\nname = \"$${GITHUB_TOKEN}\"",                              &[]),
            ("[mcp]\nwatch = [\"src\", \".\", \"new/file\"]\nmarker = \"m\"",   &[]),
            ("[mcp]\nwatch = [\"src\", \"..\"]",                               &["mcp.watch"]),
            ("[mcp]\nwatch = \"src/../../x\"",                                 &["mcp.watch"]),
            ("[mcp]\nwatch = \"missing/../../x\"",                             &["mcp.watch"]),
            ("[mcp]\nmarker = \"/tmp/marker\"",                                &["mcp.marker"]),
            ("[mcp]\nsandbox = { read = \"src\", tcp_connect = \"any\" }",      &[]),
            ("[mcp]\nsandbox = { read = [\"src\", \"/etc\"], write = \"..\" }", &["mcp.sandbox.read", "mcp.sandbox.write"]),
            ("[run]\nenv_pass = [\"AWS*\"]\nenv = \"all\"\nnotify = \"x\"",    &["run.env_pass", "run.env", "run.notify"]),
            ("[run]\non_resume = \"x\"\non_limit = \"wait\"",                   &["run.on_resume"]),
            ("[run]\ndetach = true\nhang_timeout = 5",                         &[]),
            ("[agent.python]\nfresh = [\"-c\", \"x\"]\nprompt = \">\"",        &["agent.python.fresh"]),
            ("[agent.python]\nbusy = \"${X}\"\nsubmit = \"y\"",                &["agent.python.busy", "agent.python.submit"]),
            ("[gateway]\nlisten = 7332\nname = \"x\"",                         &["gateway.listen"]),
            ("[gateway.tls]\ncert = \"/etc/x\"\nkey = \"key.pem\"",            &["gateway.tls.cert"]),
            ("[[backend]]\nname = \"a\"\ncommand = \"x\"\nretry = \"never\"",  &["backend.a.command"]),
            ("[[backend]]\nurl = \"http://x\"\nheaders = { A = \"b\" }",       &["backend.1.url", "backend.1.headers"]),
            ("[auth]\ndefault_role = \"admin\"",                               &["auth"]),
            ("[limits]\nhold = \"5s\"\n[role.x]\nallow = \"*\"",               &[]),
            ("[mcp]\nunknown = \"${X}\"",                                      &[]),
        ];
        for (text, keys) in table {
            let (left, found) = parse(dir.path(), text);
            let found: Vec<String> = found.into_iter().map(|value| value.key).collect();
            assert_eq!(found, *keys, "{text}");
            assert!(found.is_empty() || parse(dir.path(), "").1.is_empty() && split(left, dir.path()).1.is_empty());
        }
        #[cfg(unix)]
        for text in ["watch = \"link\"", "watch = \"link/etc\"", "marker = \"dangling\"", "marker = \"link/../x\""] {
            assert_eq!(guarded(dir.path(), &format!("[mcp]\n{text}")).len(), 1, "{text}");
        }
    }

    /// A new key that holds a path or an address is guarded, or is named here.
    #[test]
    fn every_path_and_address_is_guarded() {
        fn check(keys: &'static [Key], path: &str, is_guarded: bool) {
            for key in keys {
                let is_guarded = is_guarded || key.guard != Guard::Never;
                if ["path", "paths", "address", "table of texts"].contains(&(key.kind)().0.as_str()) {
                    assert!(is_guarded, "{path}.{}", key.name);
                }
                check(key.shape.keys(), &format!("{path}.{}", key.name), is_guarded);
            }
        }
        check(Root::KEYS, "", false);
    }

    #[test]
    fn trust_covers_the_values_and_the_file() {
        let (home, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let store = Store::of(home.path());
        let file = dir.path().join("outlast.toml");
        fs::write(&file, "").unwrap();
        let of = |text: &str| guarded(dir.path(), text);
        let make = of("[mcp]\nbuild = \"make\"\nhold = 5");
        assert_eq!(store.verdict(&file, &make), Verdict::Unknown);
        assert_eq!(store.verdict(&file, &[]), Verdict::Trusted, "there is nothing to trust");
        store.grant(&file, &make).unwrap();
        assert_eq!(store.verdict(&file, &make), Verdict::Trusted);
        assert_eq!(store.verdict(&file, &of("# more\n[mcp]\nhold = 9\nbuild = 'make'")), Verdict::Trusted);
        assert_eq!(store.verdict(&file, &of("[mcp]\nbuild = \"make x\"")), Verdict::Changed);
        assert_eq!(store.verdict(&file, &of("[mcp]\nbuild = \"make\"\nwatch = \"/\"")), Verdict::Changed);
        assert_eq!(store.verdict(&file, &of("[run]\nnotify = \"make\"")), Verdict::Changed);
        let copy = dir.path().join("copy.toml");
        fs::copy(&file, &copy).unwrap();
        assert_eq!(store.verdict(&copy, &make), Verdict::Unknown);
        #[cfg(unix)]
        {
            let other = tempfile::tempdir().unwrap();
            // A link to a trusted file would run its command in another directory.
            let link = other.path().join("outlast.toml");
            std::os::unix::fs::symlink(&file, &link).unwrap();
            assert_eq!(store.verdict(&link, &make), Verdict::Unknown);
            // A link to its directory is the same file.
            std::os::unix::fs::symlink(dir.path(), other.path().join("dir")).unwrap();
            assert_eq!(store.verdict(&other.path().join("dir/outlast.toml"), &make), Verdict::Trusted);
        }
        assert!(store.revoke(&file).unwrap());
        assert!(!store.revoke(&file).unwrap());
        assert_eq!(store.verdict(&file, &make), Verdict::Unknown);
    }

    #[cfg(unix)]
    #[test]
    fn a_record_that_others_can_write_is_not_used() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let (home, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let store = Store::of(home.path());
        let file = dir.path().join("outlast.toml");
        fs::write(&file, "").unwrap();
        let make = guarded(dir.path(), "[mcp]\nbuild = \"make\"");
        store.grant(&file, &make).unwrap();
        let record = store.path(&identity(&file).unwrap());
        let why = |expected: &str| match store.verdict(&file, &make) {
            Verdict::Unusable(why) => assert!(why.ends_with(expected), "{why}"),
            other => panic!("{other:?}"),
        };
        let chmod = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(fs::metadata(&record).unwrap().permissions().mode() & 0o777, 0o600);
        chmod(&record, 0o620);
        why("other users can write to it");
        chmod(&record, 0o600);
        let moved = dir.path().join("record");
        fs::rename(&record, &moved).unwrap();
        symlink(&moved, &record).unwrap();
        why("it is a symbolic link");
        fs::remove_file(&record).unwrap();
        nix::unistd::mkfifo(&record, nix::sys::stat::Mode::S_IRWXU).unwrap();
        why("it is a FIFO, not a file");
        fs::remove_file(&record).unwrap();
        fs::write(&record, "{").unwrap();
        why("it is damaged");
        chmod(&store.0, 0o777);
        why("other users can write to it");
    }
}
