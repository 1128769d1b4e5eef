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
use outlast_control::answer::Collision;
use outlast_core::{
    gateway::{Children, Kind},
    secret::Resolved,
};
use outlast_os as os;
use serde::Serialize;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::{Config, Surroundings, Trust, Want, flags, gateway::Gateway, keys::Root, schema, show};
use crate::{
    cli::{
        self,
        report::{self, Report},
        table::{Column, NOTHING, Yield, lines, room},
    },
    cluster::NatsSettings,
    gateway::{begin, catalogue_cache::CatalogueCache, schemas::Schemas},
    operator::instances::{self, print, print_json},
    state::home,
};

/// Show the configuration and where each value comes from, or print its schema.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Show(Show),
    /// Print the JSON schema of `outlast.toml`, for editors
    Schema,
}

/// Show every value and where it comes from: a default, a file and its line, an option, the environment.
///
/// A value from the environment is shown as its reference, such as `${TOKEN}`.
#[derive(Debug, Args)]
pub struct Show {
    /// A configuration file; can be given several times [default: the nearest outlast.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Vec<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// A command line whose options are included, for example `mcp --drain 5 -- CMD`
    #[arg(last = true, value_name = "COMMAND")]
    pub line: Vec<String>,
}

/// Check a configuration: print its errors, or its backends, names and profiles. Nothing is started.
#[derive(Debug, Args)]
pub struct Check {
    /// A configuration file: `outlast.toml`, `.mcp.json`, `.vscode/mcp.json` or `claude_desktop_config.json`; can be
    /// given several times [default: the nearest outlast.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Vec<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Create an API key for a client, and print the lines for the configuration.
///
/// A new key is printed once and not stored. If stdin is not a terminal, the key is read from stdin instead.
#[derive(Debug, Args)]
pub struct HashKey {
    /// The name of the client
    #[arg(value_name = "NAME")]
    pub name: String,

    /// The role of the client
    #[arg(long, value_name = "ROLE")]
    pub role: Option<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Report> {
    match &arguments.command {
        Command::Show(arguments) => show(arguments),
        Command::Schema => print_json(&format!("{:#}\n", schema::schema())),
    }
}

fn show(arguments: &Show) -> Result<ExitCode, Report> {
    let cwd = report::cwd()?;
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
                return Err(Report::new(report::USAGE, format!("`outlast {name}` reads no configuration"))
                    .hint("use `mcp`, `run` or `gateway`"));
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
            let Root { mcp, run, gateway, .. } = &mut config.root;
            match name {
                "mcp" => flags::lay_over(&mut **mcp, given),
                "run" => flags::lay_over(&mut **run, given),
                _ => flags::lay_over(&mut **gateway, given),
            }
        }
        // For the gateway's own command, all other tables are in force too.
        let all = show::all(&config, table.filter(|table| *table != "gateway"));
        config.warnings().iter().for_each(|warning| os::say(&format!("[outlast] {warning}")));
        match arguments.json {
            true => print_json(&format!("{:#}\n", show::json(&all, &config))),
            false => print(&show::table(&all)),
        }
    })
}

pub(crate) fn check(arguments: &Check) -> Result<ExitCode, Report> {
    let cwd = report::cwd()?;
    Surroundings::with(&cwd, |around| {
        // Nothing is started, so everything is checked; whether the gateway would start is a note.
        let everything = Surroundings { trust: Trust::All, ..*around };
        let (mut gateway, config) = Gateway::load(&arguments.config, &everything)?;
        let trusted = Config::look_at(&arguments.config, Want::Everything, around);
        gateway.notes.extend(trusted.warnings());
        // A file that is not trusted cannot make outlast connect to an address.
        let nats = match &gateway.cluster {
            Some(settings) if trusted.root.cluster.is_set => Some(nats(settings)?),
            _ => None,
        };
        let collisions = collisions(&gateway, &arguments.config, &cwd);
        match arguments.json {
            true => print_json(&format!("{:#}\n", summary(&gateway, &collisions, nats.as_ref()))),
            false => print(&words(&gateway, &config, &collisions, nats.as_ref())),
        }
    })
}

/// What a connection to NATS shows.
#[derive(Default, Serialize)]
struct NatsFound {
    server: String,
    version: String,
    /// Buckets and streams that the first replica will create.
    missing: Vec<String>,
}

#[cfg(feature = "cluster")]
fn nats(settings: &NatsSettings) -> Result<NatsFound, Report> {
    let check = crate::cluster::nats::check(settings, home::random(), false);
    let checked = crate::cli::commands::runtime()?.block_on(check).map_err(|error| error.report())?;
    Ok(NatsFound { server: checked.server.url, version: checked.server.version, missing: checked.missing })
}

/// A configuration with `[cluster]` is an error in this build.
#[cfg(not(feature = "cluster"))]
fn nats(_: &NatsSettings) -> Result<NatsFound, Report> {
    Ok(NatsFound::default())
}

/// Names that several backends offered when a gateway with these files last ran here, as `outlast state` lists them.
fn collisions(gateway: &Gateway, files: &[PathBuf], cwd: &Path) -> serde_json::Value {
    let dir = home::dir_of_user(cwd, env::home_dir().as_deref());
    let settings = gateway.settings.clone();
    let cached = CatalogueCache::peek(dir.as_deref(), &begin::identity(files), &settings.backends);
    let machine = outlast_core::gateway::Gateway::new(settings, 0, cached, Box::new(Schemas::new()));
    json!(machine.status(Instant::now()).collisions)
}

/// The result for programs, without secrets.
fn summary(gateway: &Gateway, collisions: &serde_json::Value, nats: Option<&NatsFound>) -> serde_json::Value {
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
    let cluster = gateway.cluster.as_ref().map(|cluster| {
        json!({
            "name": cluster.cluster, "replica": cluster.replica, "servers": cluster.servers,
            "replicas": cluster.replicas, "required": cluster.required, "nats": nats,
        })
    });
    let profiles: Vec<&String> = gateway.settings.profiles.keys().collect();
    let roles: Vec<&String> = gateway.settings.roles.keys().collect();
    json!({
        "backends": backends, "profiles": profiles, "roles": roles, "auth": gateway.auth.is_some(),
        "listen": gateway.front.listen.map(|address| address.to_string()), "notes": gateway.notes,
        "collisions": collisions, "cluster": cluster,
    })
}

fn target(kind: &Kind) -> (&'static str, String) {
    match kind {
        // Arguments may contain a secret; the program is enough to identify it.
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

fn words(gateway: &Gateway, config: &Config, collisions: &serde_json::Value, nats: Option<&NatsFound>) -> String {
    let mut out = String::new();
    let files: Vec<String> = config.files.iter().map(|file| file.shown.clone()).collect();
    if files.is_empty() {
        return "no outlast.toml in this directory or above; --config names another file\n".to_owned();
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
        None => "none: clients need no credentials".to_owned(),
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
    if let Some(cluster) = &gateway.cluster {
        say("cluster", format!("{}, as {}", cluster.cluster, cluster.replica));
        say(
            "nats",
            match nats {
                None => "not checked, because the file is not trusted".to_owned(),
                Some(nats) => {
                    let new = if nats.missing.is_empty() { "" } else { "; its buckets will be created" };
                    format!("{}, version {}{new}", nats.server, nats.version)
                }
            },
        );
    }
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
    for collision in instances::collisions_in_words(&Collision::read_all(collisions)) {
        say("collision", collision);
    }
    for note in &gateway.notes {
        say("note", note.clone());
    }
    out
}

/// A shorter key can be found by trying, if its hash is known.
const KEY_MIN: usize = 20;

pub(crate) fn hash_key(arguments: &HashKey) -> Result<ExitCode, Report> {
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
        return Err(Report::new(report::USAGE, format!("a key has at least {KEY_MIN} characters and no spaces"))
            .hint("give no key, and a random one is created"));
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
            "# The key, for the client: {key}\n# It is not stored. Put these lines into outlast.toml:\n{lines}"
        )),
        false => print(&lines),
    }
}

/// 256 bits from the operating system.
fn new_key() -> Result<String, Report> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)
        .map_err(|error| Report::new(report::FAILURE, "the system provides no random numbers").because(error))?;
    Ok(format!("outlast_{}", bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>()))
}
