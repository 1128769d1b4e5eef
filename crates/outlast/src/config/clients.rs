//! The files of MCP clients, whose servers become backends as they are: `.mcp.json`, `.vscode/mcp.json`,
//! `claude_desktop_config.json` and those of the same shape.
//!
//! What these files hold for their client alone is passed over: they are not ours to judge.

use std::{
    path::{Path, PathBuf},
    rc::Rc,
};

use super::{
    Surroundings,
    keys::{BACKEND, ROOT},
    mistake::{Mistake, Mistakes},
    read::{Got, Reader, Section},
    reference::References,
    tree::{Entry, File, Node, Value},
};

/// Keys of a server that mean the same to us.
const KNOWN: &[&str] = &["command", "args", "env", "cwd", "url", "headers", "type", "disabled"];

pub fn read(
    node: &Node,
    file: &Rc<File>,
    around: &Surroundings<'_>,
    mistakes: &mut Mistakes,
    notes: &mut Vec<String>,
) -> Section {
    let mut root = Section::empty(ROOT);
    let Some(servers) = servers(node) else {
        let what = "there are no servers in it";
        let hint = "an object with `mcpServers` or `servers` is wanted, as MCP clients have it; our own file is TOML";
        mistakes.add(Mistake::new(node.at.clone(), "", what).hint(hint));
        return root;
    };
    let Value::Table(entries) = &servers.node.value else {
        let what = format!("an object is wanted, not {}", servers.node.value.what());
        mistakes.add(Mistake::new(servers.node.at.clone(), &servers.name, what));
        return root;
    };
    let base = base_of(&file.path, around.cwd);
    let references = References { environment: around.environment, places: places(&base, around.home) };
    let mut reader = Reader { references: &references, mistakes };
    let mut backends = Vec::new();
    for entry in entries {
        let path = format!("{}.{}", servers.name, entry.name);
        if entries.iter().any(|other| other.name == entry.name && before(other, entry)) {
            reader.mistakes.add(Mistake::new(entry.at.clone(), path, "there are two servers of this name"));
            continue;
        }
        if is_ourselves(&entry.node) {
            notes.push(format!("{}: `{}` is an outlast gateway itself, and left out", entry.at, entry.name));
            continue;
        }
        if let Some(node) = translate(entry, &path, &base, reader.mistakes) {
            backends.push(reader.section(BACKEND, &path, &node));
        }
    }
    root.put("backend", servers.at.clone(), Got::Many(backends));
    root
}

fn before(one: &Entry, other: &Entry) -> bool {
    (one.at.line, one.at.column) < (other.at.line, other.at.column)
}

/// Wherever the client has them.
fn servers(node: &Node) -> Option<&Entry> {
    node.get("mcpServers").or_else(|| node.get("servers")).or_else(|| node.get("mcp")?.node.get("servers"))
}

/// The directory that relative paths count from: the project a file lies in, or else where we are.
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
    let text = |node: &Node| match &node.value {
        Value::Text(text) => Some(text.clone()),
        _ => None,
    };
    let command = server.get("command").and_then(|entry| text(&entry.node));
    let is_outlast =
        command.is_some_and(|command| Path::new(&command).file_stem().is_some_and(|stem| stem == "outlast"));
    let first = server.get("args").and_then(|entry| match &entry.node.value {
        Value::List(words) => words.first().and_then(text),
        _ => None,
    });
    is_outlast && first.is_some_and(|word| word == "gateway")
}

/// A server as it would stand in our own file.
fn translate(entry: &Entry, path: &str, base: &Path, mistakes: &mut Mistakes) -> Option<Node> {
    let Value::Table(said) = &entry.node.value else {
        let what = format!("an object is wanted, not {}", entry.node.value.what());
        mistakes.add(Mistake::new(entry.node.at.clone(), path, what));
        return None;
    };
    let text = |at: &Entry, name: &str, value: String| Entry {
        name: name.to_owned(),
        at: at.at.clone(),
        node: Node { at: at.node.at.clone(), value: Value::Text(value) },
    };
    let mut entries = vec![text(entry, "name", entry.name.clone())];
    let plain = plain_name(&entry.name);
    if plain != entry.name {
        entries.push(text(entry, "prefix", format!("{plain}__")));
    }
    let mut has_cwd = false;
    for key in said {
        let name = key.name.as_str();
        match (name, &key.node.value) {
            (_, Value::Other("null")) => {}
            ("type" | "transport", Value::Text(kind)) => match kind.to_ascii_lowercase().as_str() {
                "stdio" | "local" => entries.push(text(key, "type", "stdio".to_owned())),
                "http" | "streamable-http" | "streamablehttp" | "streamable_http" => {
                    entries.push(text(key, "type", "http".to_owned()));
                }
                "sse" => entries.push(text(key, "type", "sse".to_owned())),
                _ => {
                    let what = format!("`{kind}` is no transport that outlast speaks");
                    let hint = "it may be `stdio`, `http` or `sse`";
                    mistakes.add(Mistake::new(key.node.at.clone(), format!("{path}.{name}"), what).hint(hint));
                }
            },
            ("httpUrl" | "serverUrl", _) => entries.push(Entry { name: "url".to_owned(), ..key.clone() }),
            ("envFile", _) => {
                let what = "a file of variables is not read";
                let hint = "put them into `env`, or into the environment that outlast is started in";
                mistakes.add(Mistake::new(key.at.clone(), format!("{path}.{name}"), what).hint(hint));
            }
            ("enabled", Value::Truth(enabled)) => {
                let node = Node { at: key.node.at.clone(), value: Value::Truth(!enabled) };
                entries.push(Entry { name: "disabled".to_owned(), at: key.at.clone(), node });
            }
            ("cwd", Value::Text(cwd)) => {
                has_cwd = true;
                // What begins with a reference is a place of its own.
                let dir = if cwd.starts_with("${") { cwd.clone() } else { base.join(cwd).display().to_string() };
                entries.push(text(key, "cwd", dir));
            }
            _ if KNOWN.contains(&name) => entries.push(key.clone()),
            _ => {}
        }
    }
    let is_command = said.iter().any(|key| key.name == "command");
    if is_command && !has_cwd {
        entries.push(text(entry, "cwd", base.display().to_string()));
    }
    Some(Node { at: entry.at.clone(), value: Value::Table(entries) })
}

/// A name as it can stand before a tool's.
fn plain_name(name: &str) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() || letter == '-' { letter } else { '_' };
    name.chars().map(plain).take(super::gateway::NAME_MAX).collect()
}
