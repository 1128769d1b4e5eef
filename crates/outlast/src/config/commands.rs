//! `outlast config show`, `outlast config schema`, `outlast gateway check` and `outlast gateway hash-key`.

use std::{
    env,
    ffi::OsString,
    io::{self, IsTerminal, Read},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use clap::{Args, CommandFactory, Subcommand};
use outlast_core::{
    gateway::{Children, Kind},
    secret::Resolved,
};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::{Config, Surroundings, Trust, Want, flags, gateway::Gateway, schema, show};
use crate::{
    cli,
    gateway::{begin, schemas::Schemas, shelf::Shelf},
    home,
    instances::{self, print, print_json},
    os,
    report::{self, Report},
    table::{Column, NOTHING, Yield, lines, room},
};

/// Show what is configured and where it came from, or describe the file to an editor.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Show(Show),
    /// Print the JSON schema of `outlast.toml`, for editors.
    Schema,
}

/// Show every effective value and where it came from: a default, a file and its line, an option, the environment.
///
/// What came from the environment is shown as it was referred to.
#[derive(Debug, Args)]
pub struct Show {
    /// A configuration file; several are taken together [default: the nearest outlast.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Vec<PathBuf>,

    /// JSON, for programs.
    #[arg(long)]
    pub json: bool,

    /// As this command line would have it, such as `mcp --drain 5 -- CMD`.
    #[arg(last = true, value_name = "COMMAND")]
    pub line: Vec<String>,
}

/// Read the configuration and say what is wrong with it, or what there would be. Nothing is started.
#[derive(Debug, Args)]
pub struct Check {
    /// A configuration: `outlast.toml`, `.mcp.json`, `.vscode/mcp.json` or `claude_desktop_config.json`; several are
    /// taken together [default: the nearest outlast.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Vec<PathBuf>,

    /// JSON, for programs.
    #[arg(long)]
    pub json: bool,
}

/// Make an API key for a client, and the lines for the configuration that let it in.
///
/// A new key is printed once and kept nowhere. A key that you have is read from stdin, if that is not a terminal.
#[derive(Debug, Args)]
pub struct HashKey {
    /// Whose it is.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// What it may call.
    #[arg(long, value_name = "ROLE")]
    pub role: Option<String>,

    /// JSON, for programs.
    #[arg(long)]
    pub json: bool,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Report> {
    match &arguments.command {
        Command::Show(arguments) => show(arguments),
        Command::Schema => print_json(&format!("{:#}\n", schema::schema())),
    }
}

fn here() -> Result<PathBuf, Report> {
    env::current_dir().map_err(|error| Report::new(report::FAILURE, "the working directory is gone").because(error))
}

fn show(arguments: &Show) -> Result<ExitCode, Report> {
    let cwd = here()?;
    Surroundings::with(&cwd, |around| {
        let line = arguments.line.iter().map(String::as_str);
        let words: Vec<OsString> = ["outlast"].into_iter().chain(line).map(OsString::from).collect();
        let given = match arguments.line.is_empty() {
            true => None,
            false => Some(
                cli::Cli::command()
                    .try_get_matches_from(&words)
                    .map_err(|error| Report::of_arguments(error, &cli::Cli::command(), &words))?,
            ),
        };
        let given = given.as_ref().and_then(clap::ArgMatches::subcommand);
        let table = match given {
            None => None,
            Some((name @ ("mcp" | "run" | "gateway"), _)) => Some(name),
            Some((name, _)) => {
                return Err(Report::new(report::USAGE, format!("`outlast {name}` has no configuration"))
                    .hint("it may be `mcp`, `run` or `gateway`"));
            }
        };
        let mut named = arguments.config.clone();
        if let Some((_, given)) = given
            && let Ok(Some(files)) = given.try_get_many::<PathBuf>("config")
        {
            named.extend(files.cloned());
        }
        let mut config = Config::load(&named, Want::Everything, around)?;
        if let (Some(name), Some((_, given))) = (table, given) {
            let key = super::key(name).expect("the tables of commands are in the list").name;
            let mut section = config.table(name);
            flags::lay_over(&mut section, given);
            let at = section.at.clone().unwrap_or_else(|| super::tree::Place::option(name));
            config.root.put(key, at, super::read::Got::Section(section));
        }
        // Of the gateway's own command everything else is in force too.
        let all = show::all(&config, table.filter(|table| *table != "gateway"));
        config.warnings().iter().for_each(|warning| os::say(&format!("[outlast] {warning}")));
        match arguments.json {
            true => print_json(&format!("{:#}\n", show::json(&all, &config))),
            false => print(&show::table(&all)),
        }
    })
}

pub fn check(arguments: &Check) -> Result<ExitCode, Report> {
    let cwd = here()?;
    Surroundings::with(&cwd, |around| {
        // Nothing is started, so everything is looked at; whether the gateway would start is a note.
        let everything = Surroundings { trust: Trust::All, ..*around };
        let (mut gateway, config) = Gateway::load(&arguments.config, &everything)?;
        gateway.notes.extend(Config::look_at(&arguments.config, Want::Everything, around)?.warnings());
        let collisions = collisions(&gateway, &arguments.config, &cwd);
        match arguments.json {
            true => print_json(&format!("{:#}\n", summary(&gateway, &collisions))),
            false => print(&words(&gateway, &config, &collisions)),
        }
    })
}

/// Names that several backends offered when a gateway with these files last ran here, as `outlast state` lists them.
fn collisions(gateway: &Gateway, files: &[PathBuf], cwd: &Path) -> serde_json::Value {
    let dirs = home::candidates(cwd, env::home_dir().as_deref());
    let settings = gateway.settings.clone();
    let cached = Shelf::peek(&dirs, &begin::identity(files), &settings.backends);
    let machine = outlast_core::gateway::Gateway::new(settings, 0, cached, Box::new(Schemas::new()));
    machine.status(Instant::now())["collisions"].take()
}

/// What there would be, for programs. Nothing that may be secret is in it.
fn summary(gateway: &Gateway, collisions: &serde_json::Value) -> serde_json::Value {
    let backends: Vec<serde_json::Value> = gateway
        .settings
        .backends
        .iter()
        .map(|backend| {
            let (kind, target) = target(&backend.kind);
            let found = match &backend.kind {
                Kind::Stdio { command, cwd, .. } => Some(is_found(command, cwd.as_ref())),
                Kind::Http { .. } => None,
            };
            json!({
                "name": backend.name, "type": kind, "target": target, "prefix": backend.prefix,
                "children": children(backend.children), "command_found": found,
            })
        })
        .collect();
    let profiles: Vec<&String> = gateway.settings.profiles.keys().collect();
    let roles: Vec<&String> = gateway.settings.roles.keys().collect();
    json!({
        "backends": backends, "profiles": profiles, "roles": roles, "auth": gateway.auth.is_some(),
        "listen": gateway.front.listen.map(|address| address.to_string()), "notes": gateway.notes,
        "collisions": collisions,
    })
}

fn target(kind: &Kind) -> (&'static str, String) {
    match kind {
        // Arguments may hold a secret; the program tells which one it is.
        Kind::Stdio { command, .. } => ("stdio", command.to_string()),
        Kind::Http { url, is_sse: true, .. } => ("sse", without_query(&url.to_string())),
        Kind::Http { url, .. } => ("http", without_query(&url.to_string())),
    }
}

fn is_found(command: &Resolved, cwd: Option<&Resolved>) -> bool {
    super::gateway::on_path(command.expose(), cwd.map(Resolved::expose))
}

fn without_query(url: &str) -> String {
    match url.split_once('?') {
        Some((address, _)) => format!("{address}?…"),
        None => url.to_owned(),
    }
}

fn children(children: Children) -> String {
    match children {
        Children::Shared => "shared".to_owned(),
        Children::PerSession => "per session".to_owned(),
        Children::Pool(count) => format!("pool of {count}"),
    }
}

fn words(gateway: &Gateway, config: &Config, collisions: &serde_json::Value) -> String {
    let mut out = String::new();
    let files: Vec<String> = config.files.iter().map(|file| file.shown.clone()).collect();
    if files.is_empty() {
        return "there is no outlast.toml here or above; --config names another file\n".to_owned();
    }
    let column = |title, yields| Column { title, is_number: false, yields };
    let columns = [
        column("BACKEND", Yield::Last(10)),
        column("TYPE", Yield::Last(5)),
        column("TARGET", Yield::Cut(40, 16)),
        column("TOOLS", Yield::Last(10)),
        column("CHILDREN", Yield::Soon(1)),
        column("NOTE", Yield::End(30, 12)),
    ];
    let settings = &gateway.settings;
    let rows: Vec<Vec<String>> = settings
        .backends
        .iter()
        .map(|backend| {
            let (kind, target) = target(&backend.kind);
            let (children, note) = match &backend.kind {
                Kind::Stdio { command, cwd, .. } => {
                    let found = is_found(command, cwd.as_ref());
                    (children(backend.children), if found { NOTHING.to_owned() } else { "no such command".to_owned() })
                }
                Kind::Http { .. } => (NOTHING.to_owned(), NOTHING.to_owned()),
            };
            vec![backend.name.clone(), kind.to_owned(), target, format!("{}*", backend.prefix), children, note]
        })
        .collect();
    for line in lines(&columns, &rows, room()) {
        out.push_str(&format!("{line}\n"));
    }
    out.push('\n');
    let mut say = |name: &str, value: String| out.push_str(&format!("{name:<10} {value}\n"));
    say("files", files.join(", "));
    if let Some(address) = gateway.front.listen {
        say("listen", address.to_string());
    }
    let auth = match &gateway.auth {
        None => "nobody is asked".to_owned(),
        Some(auth) => {
            let tokens = auth.jwt.as_ref().map(|jwt| format!("tokens by {}", jwt.algorithms.join(", ")));
            let keys = (!auth.keys.is_empty()).then(|| match auth.keys.len() {
                1 => "1 key".to_owned(),
                count => format!("{count} keys"),
            });
            tokens.into_iter().chain(keys).collect::<Vec<_>>().join(", ")
        }
    };
    say("auth", auth);
    for (name, profile) in &settings.profiles {
        let backends: Vec<&str> = settings.backends.iter().map(|backend| backend.name.as_str()).collect();
        let shown: Vec<&str> = backends.into_iter().filter(|backend| profile.has_backend(backend)).collect();
        let search = if profile.search { ", by search" } else { "" };
        say("profile", format!("{name}: {}{search}", shown.join(", ")));
    }
    for (name, role) in &settings.roles {
        let patterns = |patterns: &[outlast_core::gateway::Pattern]| {
            patterns.iter().map(|pattern| pattern.0.as_str()).collect::<Vec<_>>().join(", ")
        };
        let allowed = if role.allow.is_empty() { "nothing".to_owned() } else { patterns(&role.allow) };
        let but = if role.deny.is_empty() { String::new() } else { format!(" but {}", patterns(&role.deny)) };
        say("role", format!("{name}: {allowed}{but}"));
    }
    for collision in instances::collisions_in_words(collisions) {
        say("collision", collision);
    }
    for note in &gateway.notes {
        say("note", note.clone());
    }
    out
}

/// A key that is shorter can be found by trying, if its hash is known.
const KEY_MIN: usize = 20;

pub fn hash_key(arguments: &HashKey) -> Result<ExitCode, Report> {
    let (key, is_new) = if io::stdin().is_terminal() {
        (new_key()?, true)
    } else {
        let mut text = String::new();
        let read = io::stdin().take(4_096).read_to_string(&mut text);
        read.map_err(|error| Report::new(report::FAILURE, "cannot read the key from stdin").because(error))?;
        match text.trim() {
            "" => (new_key()?, true),
            key => (key.to_owned(), false),
        }
    };
    if key.len() < KEY_MIN || key.contains(|letter: char| !letter.is_ascii_graphic()) {
        return Err(Report::new(report::USAGE, format!("a key has at least {KEY_MIN} letters, and no blanks"))
            .hint("give none, and one is made"));
    }
    let hash = Sha256::digest(key.as_bytes());
    let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    if arguments.json {
        let new = is_new.then_some(key.as_str());
        let made = json!({"name": arguments.name, "role": arguments.role, "sha256": hash, "key": new});
        return print_json(&format!("{made:#}\n"));
    }
    let text = |text: &str| toml_edit::Value::from(text).to_string().trim().to_owned();
    let role = arguments.role.as_ref().map(|role| format!("role = {}\n", text(role))).unwrap_or_default();
    let lines = format!("[[auth.key]]\nname = {}\nsha256 = \"{hash}\"\n{role}", text(&arguments.name));
    match is_new {
        true => print(&format!(
            "# the key, for the client alone: {key}\n# it is kept nowhere; these lines go into outlast.toml\n{lines}"
        )),
        false => print(&lines),
    }
}

/// 256 bits from the operating system.
fn new_key() -> Result<String, Report> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)
        .map_err(|error| Report::new(report::FAILURE, "the system has no random numbers").because(error))?;
    Ok(format!("outlast_{}", bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>()))
}
