//! Reads the files of MCP clients, whose servers become backends: `.mcp.json`, `.vscode/mcp.json`,
//! `claude_desktop_config.json` and those of the same shape.
//!
//! Other settings of the client are skipped and not checked.

use std::{
    path::{Path, PathBuf},
    rc::Rc,
};

use super::{
    Surroundings,
    keys::Root,
    mistake::{Mistake, Mistakes, Spot},
    reference::References,
    table::{Reader, Set, join},
    tree::{Entry, File, Node, Position, Value},
};

/// Keys of a server that mean the same for outlast.
const KNOWN: &[&str] = &["command", "args", "env", "cwd", "url", "headers", "type", "disabled"];

pub(crate) fn read(
    node: &Node,
    file: &Rc<File>,
    around: &Surroundings<'_>,
    mistakes: &mut Mistakes,
    notes: &mut Vec<String>,
) -> Root {
    let mut root = Root::default();
    let Some(servers) = servers(node) else {
        let what = "it contains no servers";
        let hint =
            "expected an object with `mcpServers` or `servers`, as MCP clients use it; outlast's own file is TOML";
        mistakes.add(Mistake::new(node.at.clone(), "", what).hint(hint));
        return root;
    };
    let Value::Table(entries) = &servers.node.value else {
        let what = format!("expected an object, not {}", servers.node.value.what());
        mistakes.add(Mistake::new(servers.node.at.clone(), &servers.name, what));
        return root;
    };
    let base = base_of(&file.path, around.cwd);
    let references = References { environment: around.environment, places: places(&base, around.home) };
    let mut reader = Reader { references: Some(&references), mistakes, variables: vec![] };
    root.backend.is_set = true;
    for entry in entries {
        let path = format!("{}.{}", servers.name, entry.name);
        if entries.iter().any(|other| other.name == entry.name && before(other, entry)) {
            reader.mistakes.add(Mistake::new(entry.at.clone(), path, "two servers have this name"));
            continue;
        }
        if is_ourselves(&entry.node) {
            notes.push(format!("{}: `{}` is an outlast gateway itself and is left out", entry.at, entry.name));
            continue;
        }
        if let Some(node) = translate(entry, &path, &base, reader.mistakes) {
            let spot = Spot { key: path, at: Some(entry.at.clone()) };
            root.backend.0.extend(Set::read(&mut reader, spot, &node).map(|backend| (entry.name.clone(), backend)));
        }
    }
    root
}

fn before(one: &Entry, other: &Entry) -> bool {
    (one.at.line, one.at.column) < (other.at.line, other.at.column)
}

/// In any of the places where clients keep them.
fn servers(node: &Node) -> Option<&Entry> {
    node.get("mcpServers").or_else(|| node.get("servers")).or_else(|| node.get("mcp")?.node.get("servers"))
}

/// The directory of relative paths: the project of the file, or else the working directory.
fn base_of(file: &Path, cwd: &Path) -> PathBuf {
    let dir = file.parent().unwrap_or(cwd);
    let is = |path: Option<&Path>, name: &str| path.and_then(Path::file_name).is_some_and(|found| found == name);
    if [".vscode", ".cursor", ".gemini", ".claude"].iter().any(|name| is(Some(dir), name)) {
        return dir.parent().unwrap_or(dir).to_owned();
    }
    if is(Some(file), ".mcp.json") || is(Some(file), "mcp.json") { dir.to_owned() } else { cwd.to_owned() }
}

fn places(base: &Path, home: Option<&Path>) -> Vec<(&'static str, String)> {
    let folder = base.display().to_string();
    let name = base.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let mut places = vec![
        ("workspaceFolder", folder),
        ("workspaceFolderBasename", name),
        ("pathSeparator", std::path::MAIN_SEPARATOR.to_string()),
        ("/", std::path::MAIN_SEPARATOR.to_string()),
    ];
    if let Some(home) = home {
        places.push(("userHome", home.display().to_string()));
    }
    places
}

/// A gateway among its own backends would call itself for ever.
fn is_ourselves(server: &Node) -> bool {
    let command = server.get("command").and_then(|entry| entry.node.text());
    let is_outlast = command.and_then(|command| Path::new(command).file_stem()).is_some_and(|stem| stem == "outlast");
    let first = server.get("args").and_then(|entry| match &entry.node.value {
        Value::List(words) => words.first()?.text(),
        _ => None,
    });
    is_outlast && first == Some("gateway")
}

/// A server as it would be written in `outlast.toml`.
fn translate(entry: &Entry, path: &str, base: &Path, mistakes: &mut Mistakes) -> Option<Node> {
    let Value::Table(said) = &entry.node.value else {
        let what = format!("expected an object, not {}", entry.node.value.what());
        mistakes.add(Mistake::new(entry.node.at.clone(), path, what));
        return None;
    };
    let spot = |key: &Entry, at: &Position| Spot { key: join(path, &key.name), at: Some(at.clone()) };
    let text = |at: &Entry, name: &str, value: &str| Entry {
        name: name.to_owned(),
        at: at.at.clone(),
        node: Node { at: at.node.at.clone(), value: Value::Text(value.to_owned()) },
    };
    let mut entries = vec![text(entry, "name", &entry.name)];
    let plain = plain_name(&entry.name);
    if plain != entry.name {
        entries.push(text(entry, "prefix", &format!("{plain}__")));
    }
    let mut has_cwd = false;
    for key in said {
        let name = key.name.as_str();
        match (name, &key.node.value) {
            (_, Value::Other("null")) => {}
            ("type" | "transport", Value::Text(kind)) => match kind.to_ascii_lowercase().as_str() {
                "stdio" | "local" => entries.push(text(key, "type", "stdio")),
                "http" | "streamable-http" | "streamablehttp" | "streamable_http" => {
                    entries.push(text(key, "type", "http"));
                }
                "sse" => entries.push(text(key, "type", "sse")),
                _ => {
                    let what = format!("outlast does not support the transport `{kind}`");
                    mistakes.wrong(&spot(key, &key.node.at), what, "use `stdio`, `http` or `sse`");
                }
            },
            ("httpUrl" | "serverUrl", _) => entries.push(Entry { name: "url".to_owned(), ..key.clone() }),
            ("envFile", _) => {
                let hint = "put the variables into `env`, or into the environment of outlast";
                mistakes.wrong(&spot(key, &key.at), "outlast does not read a file of variables", hint);
            }
            ("enabled", Value::Truth(enabled)) => {
                let node = Node { at: key.node.at.clone(), value: Value::Truth(!enabled) };
                entries.push(Entry { name: "disabled".to_owned(), at: key.at.clone(), node });
            }
            ("cwd", Value::Text(cwd)) => {
                has_cwd = true;
                // A path that begins with a reference is complete.
                let dir = if cwd.starts_with("${") { cwd.clone() } else { base.join(cwd).display().to_string() };
                entries.push(text(key, "cwd", &dir));
            }
            _ if KNOWN.contains(&name) => entries.push(key.clone()),
            _ => {}
        }
    }
    let is_command = said.iter().any(|key| key.name == "command");
    if is_command && !has_cwd {
        entries.push(text(entry, "cwd", &base.display().to_string()));
    }
    Some(Node { at: entry.at.clone(), value: Value::Table(entries) })
}

/// A name in the form that is allowed before a tool's name.
fn plain_name(name: &str) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() || letter == '-' { letter } else { '_' };
    name.chars().map(plain).take(super::gateway::NAME_MAX).collect()
}
