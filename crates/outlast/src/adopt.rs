//! `outlast wrap` and `outlast unwrap`: put outlast in front of every stdio server of a client's configuration, or
//! remove it.

use std::{
    env, fs,
    io::{self, BufRead, IsTerminal, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use outlast_core::{redact, visible};
use outlast_os as os;
use serde_json::{Value, json};

pub(crate) mod backup;
pub(crate) mod clients;
pub(crate) mod diff;
pub(crate) mod edit;
pub mod servers;

use self::{
    backup::{Backup, Backups},
    clients::{Client, ConfigFile, ConfigFiles},
    edit::{Caller, Edit, Verdict},
    servers::Server,
};
use crate::{
    cli::{
        self,
        commands::without_secrets,
        paint::Paint,
        report::{self, Report, shell_quote},
    },
    operator::instances::{from_home, print, print_json},
};

/// A longer file is not a configuration.
const FILE_MAX: u64 = 64 << 20;

pub fn wrap(arguments: &cli::Wrap) -> Result<ExitCode, Report> {
    let ours = Ours { shares: arguments.share, ..Ours::find(arguments.command.as_deref())? };
    run(&arguments.which, &Direction::In(ours))
}

pub fn unwrap(arguments: &cli::Unwrap) -> Result<ExitCode, Report> {
    run(&arguments.which, &Direction::Out)
}

enum Direction {
    In(Ours),
    Out,
}

/// The command that starts this outlast.
struct Ours {
    absolute: String,
    /// A shell finds this same program by its bare name.
    is_on_path: bool,
    /// The command that the user gave.
    said: Option<String>,
    /// Servers are wrapped so that all clients share them.
    shares: bool,
}

impl Ours {
    fn find(said: Option<&str>) -> Result<Ours, Report> {
        let exe = env::current_exe()
            .map_err(|error| Report::new(report::FAILURE, "the path of outlast itself is unknown").because(error))?;
        // A link on PATH stays valid after an upgrade; its target may not.
        let on_path = on_path("outlast").filter(|found| is_same_file(found, &exe));
        let is_on_path = on_path.is_some();
        let absolute = on_path.unwrap_or(exe);
        let absolute = absolute.to_str().map(str::to_owned).ok_or_else(|| {
            Report::new(report::FAILURE, format!("the path of outlast is not UTF-8: {}", absolute.display()))
                .hint("`--command` sets the command to write")
        })?;
        Ok(Ours { absolute, is_on_path, said: said.map(str::to_owned), shares: false })
    }

    /// A file that is shared with others contains no path of this machine, if possible. A graphical client is rarely
    /// started with a shell's PATH, so its own file contains the absolute path.
    fn called_in(&self, place: &ConfigFile) -> &str {
        match &self.said {
            Some(said) => said,
            None if place.is_shared && self.is_on_path => "outlast",
            None => &self.absolute,
        }
    }

    fn is_same(&self, command: &str) -> bool {
        let exe = Path::new(&self.absolute);
        let is_path = command.contains(['/', '\\']);
        self.said.is_none()
            && if is_path { is_same_file(Path::new(command), exe) } else { self.is_on_path && command == "outlast" }
    }
}

/// Where a shell finds a program of this name.
pub fn on_path(name: &str) -> Option<PathBuf> {
    let name = format!("{name}{}", env::consts::EXE_SUFFIX);
    let dirs = env::var_os("PATH")?;
    env::split_paths(&dirs).filter(|dir| dir.is_absolute()).map(|dir| dir.join(&name)).find(|path| is_program(path))
}

#[cfg(unix)]
fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

#[cfg(not(unix))]
fn is_program(path: &Path) -> bool {
    path.is_file()
}

pub fn is_same_file(one: &Path, other: &Path) -> bool {
    matches!((fs::canonicalize(one), fs::canonicalize(other)), (Ok(one), Ok(other)) if one == other)
}

// ---- planning ------------------------------------------------------------------------------------------------

/// A configuration that was read.
#[derive(Debug, Clone)]
pub struct Config {
    pub place: ConfigFile,
    /// The file itself, with links resolved.
    pub file: PathBuf,
    pub text: String,
    pub servers: Vec<Server>,
}

impl Config {
    pub fn read(place: ConfigFile) -> Result<Config, Report> {
        let path = &place.path;
        let cannot = || Report::new(report::FAILURE, format!("cannot read `{}`", path.display()));
        let file = fs::canonicalize(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Report::new(report::USAGE, format!("there is no file `{}`", path.display()))
                .hint("a relative path counts from the working directory"),
            _ => cannot().because(error),
        })?;
        let bytes = os::read_named(&file, FILE_MAX).map_err(|error| cannot().because(error))?;
        let text = String::from_utf8(bytes).map_err(|_| {
            cannot().because("it is not UTF-8").hint("save it as UTF-8, with or without a byte order mark")
        })?;
        let servers = servers::read(&text, place.format).map_err(|error| match foreign_format(path, &text) {
            Some(format) => Report::new(report::FAILURE, format!("`{}` is {format}", path.display()))
                .because("outlast edits JSON (also with comments) and TOML; nothing in the file was changed")
                .hint("put `outlast mcp --` in front of the server's command by hand: `outlast help clients`"),
            None => cannot().because(error).hint("fix it first; nothing in the file was changed"),
        })?;
        Ok(Config { place, file, text, servers })
    }
}

/// The name of a format that no supported client uses, so that a valid file is not reported as broken.
fn foreign_format(path: &Path, text: &str) -> Option<&'static str> {
    let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
    let mut lines = text.trim_start_matches('\u{feff}').lines().map(str::trim);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with('#')).unwrap_or_default();
    let is_key =
        |key: &str| !key.is_empty() && key.chars().all(|letter| letter.is_alphanumeric() || "_-.".contains(letter));
    let is_yaml = first == "---" || first.split_once(':').is_some_and(|(key, _)| is_key(key));
    match extension.to_str().unwrap_or_default() {
        "yaml" | "yml" => Some("YAML"),
        "xml" | "plist" => Some("XML"),
        "js" | "mjs" | "cjs" | "ts" | "mts" => Some("a program (JavaScript or TypeScript)"),
        "lua" => Some("a program (Lua)"),
        "ini" => Some("INI"),
        _ if first.starts_with('<') => Some("XML"),
        _ if is_yaml => Some("YAML"),
        _ => None,
    }
}

/// The planned change of one file.
struct Plan {
    config: Config,
    after: String,
    /// The content without outlast, for the backup.
    original: Vec<u8>,
    changes: Vec<ServerChange>,
}

impl Plan {
    fn is_change(&self) -> bool {
        self.after != self.config.text
    }
}

/// The planned change of one server.
struct ServerChange {
    outcome: Outcome,
    name: String,
    /// Its project, in a file that has several.
    project: Option<String>,
    /// For people: its command, or why it is not changed.
    words: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Wrapped,
    /// It was wrapped by an outlast at another path.
    Moved,
    Unwrapped,
    /// There is nothing to change.
    Settled,
    /// Outlast cannot wrap it.
    Left,
    /// The user did not choose it.
    Skipped,
}

impl Outcome {
    fn mark(self) -> &'static str {
        match self {
            Outcome::Wrapped => "+",
            Outcome::Moved => "~",
            Outcome::Unwrapped => "-",
            Outcome::Settled => "=",
            Outcome::Left | Outcome::Skipped => "·",
        }
    }

    /// The name of the outcome in JSON.
    fn word(self) -> &'static str {
        match self {
            Outcome::Wrapped => "wrapped",
            Outcome::Moved => "moved",
            Outcome::Unwrapped => "unwrapped",
            Outcome::Settled => "settled",
            Outcome::Left => "left",
            Outcome::Skipped => "skipped",
        }
    }

    fn is_change(self) -> bool {
        matches!(self, Outcome::Wrapped | Outcome::Moved | Outcome::Unwrapped)
    }
}

/// Selects servers.
type Choice<'a> = &'a dyn Fn(&Config, &Server) -> bool;

fn plan(config: Config, direction: &Direction, backups: Option<&Backups>, choice: Choice<'_>) -> Plan {
    let backup = backups.and_then(|backups| backups.find(&config.file));
    let same = backup.as_ref().filter(|backup| backup.is_of(config.text.as_bytes()));
    let without = match same {
        Some(backup) => backup.original.clone(),
        None => without_outlast(&config, backup.as_ref()).into_bytes(),
    };
    let (mut edits, mut changes) = (Vec::new(), Vec::new());
    for server in &config.servers {
        let (verdict, words) = match direction {
            Direction::In(ours) => {
                let is_same = |command: &str| ours.is_same(command);
                let command = ours.called_in(&config.place);
                let caller = Caller { command, shares: ours.shares, is_same: &is_same };
                let words = in_words(server, ours.shares);
                (edit::wrap(&config.text, config.place.format, server, &caller), words)
            }
            Direction::Out => (edit::unwrap(&config.text, server, None), out_words(server)),
        };
        let (outcome, words) = match (verdict, direction) {
            (Verdict::Change(_), _) if !choice(&config, server) => (Outcome::Skipped, "not chosen".to_owned()),
            (Verdict::Change(change), direction) => {
                edits.extend(change);
                let outcome = match direction {
                    Direction::In(_) if edit::is_wrapped(server) => Outcome::Moved,
                    Direction::In(_) => Outcome::Wrapped,
                    Direction::Out => Outcome::Unwrapped,
                };
                (outcome, words)
            }
            (Verdict::Settled, Direction::In(_)) => (Outcome::Settled, "wrapped already".to_owned()),
            (Verdict::Settled, Direction::Out) => (Outcome::Settled, "not wrapped".to_owned()),
            (Verdict::Leave(why), _) => (Outcome::Left, format!("left as it is: {why}")),
        };
        changes.push(ServerChange { outcome, name: server.name.clone(), project: server.project.clone(), words });
    }
    let after = match direction {
        Direction::In(_) => edit::apply(&config.text, &edits),
        // The original was text, so the conversion from bytes below is exact.
        Direction::Out if edits.is_empty() => config.text.clone(),
        Direction::Out if changes.iter().any(|server| server.outcome == Outcome::Skipped) => {
            edit::apply(&config.text, &edits)
        }
        Direction::Out => String::from_utf8_lossy(&without).into_owned(),
    };
    Plan { config, after, original: without, changes }
}

/// The file as if outlast had never been in it, as far as its text shows.
fn without_outlast(config: &Config, backup: Option<&Backup>) -> String {
    let format = config.place.format;
    let original = backup.and_then(|backup| std::str::from_utf8(&backup.original).ok());
    let before = original.and_then(|text| servers::read(text, format).ok()).unwrap_or_default();
    let had_args = |server: &Server| {
        let before = before.iter().find(|before| before.name == server.name && before.project == server.project)?;
        match &before.how {
            servers::How::Starts(program) => Some(program.args.is_some()),
            _ => None,
        }
    };
    let edits = config.servers.iter().filter_map(|server| match edit::unwrap(&config.text, server, had_args(server)) {
        Verdict::Change(edits) => Some(edits),
        _ => None,
    });
    edit::apply(&config.text, &edits.flatten().collect::<Vec<Edit>>())
}

/// A configuration as the diff shows it: without values of variables and headers, except references, and without text that
/// looks like a secret. The file itself is not changed.
fn without_values(text: &str, plan: &Plan) -> String {
    let mut text = text.to_owned();
    for server in &plan.config.servers {
        let command = edit::command_of(server).unwrap_or_default();
        let shown = without_secrets(&command);
        let arguments = command.into_iter().zip(shown).filter(|(word, shown)| word != shown);
        let is_value = |value: &&String| !value.is_empty() && !value.contains("${");
        let values = server.env.iter().map(|(_, value)| value).chain(&server.header_values).filter(is_value);
        let values = values.map(|value| (value.clone(), redact::HIDDEN.to_owned()));
        for (value, shown) in arguments.chain(values) {
            // As it is written in either format, with its quotes.
            let quoted = |text: &str| serde_json::to_string(text).unwrap_or_default();
            text = text.replace(&quoted(&value), &quoted(&shown)).replace(&format!("'{value}'"), &format!("'{shown}'"));
        }
    }
    redact::text(&text).into_owned()
}

fn in_words(server: &Server, shares: bool) -> String {
    if shares && edit::is_wrapped(server) && !edit::is_sharing(server) {
        return "all clients are to share one server process".to_owned();
    }
    if edit::is_wrapped(server) {
        return "the path of outlast changed, and is updated".to_owned();
    }
    shown(server)
}

fn out_words(server: &Server) -> String {
    let options = edit::options(server);
    let lost = if options.is_empty() { String::new() } else { format!("   (without {})", options.join(" ")) };
    format!("{}{lost}", shown(server))
}

fn shown(server: &Server) -> String {
    let words = without_secrets(&edit::command_of(server).unwrap_or_default());
    shell_quote(words.iter().map(String::as_str))
}

// ---- doing ---------------------------------------------------------------------------------------------------

fn run(which: &cli::WhichFiles, direction: &Direction) -> Result<ExitCode, Report> {
    let home = env::home_dir().filter(|home| home.is_absolute()).ok_or_else(|| {
        Report::new(report::FAILURE, "there is no home directory to store a backup in").hint("set HOME")
    })?;
    let cwd = report::cwd()?;
    let backups = Backups::of(&home);
    let paint = Paint::stdout();

    if which.json && !which.yes && !which.dry_run {
        return Err(Report::new(report::USAGE, "`--json` cannot ask")
            .hint("add `--yes` to write, or `--dry-run` to show what would be written"));
    }
    let (configs, mut troubles) = gather(which, direction, &ConfigFiles::here(&home, &cwd), &backups)?;
    if let Some(missing) = which.server.iter().find(|name| !names(&configs).contains(name)) {
        return Err(no_such_server(missing, &names(&configs)));
    }
    let is_named = |_: &Config, server: &Server| which.server.is_empty() || which.server.contains(&server.name);
    let plans: Vec<Plan> =
        configs.into_iter().map(|config| plan(config, direction, Some(&backups), &is_named)).collect();
    let changed: Vec<&Plan> = plans.iter().filter(|plan| plan.is_change()).collect();

    if which.json {
        if plans.is_empty() && troubles.is_empty() {
            return Err(nothing_found(which));
        }
        return told_in_json(&plans, direction, &backups, which.dry_run, troubles);
    }
    let mut words = String::new();
    for plan in &changed {
        let name = shown_path(plan, &home, &cwd);
        let (before, after) = (without_values(&plan.config.text, plan), without_values(&plan.after, plan));
        words.push_str(&diff::unified(&name, &before, &after, paint));
        words.push('\n');
    }
    // Printed last, because a long diff scrolls off the screen.
    for plan in &plans {
        words.push_str(&listing(plan, &shown_path(plan, &home, &cwd), paint));
    }
    if let Direction::In(ours) = direction
        && !ours.is_on_path
        && ours.said.is_none()
        && let Some(plan) = changed.iter().find(|plan| plan.config.place.is_shared)
    {
        let path = shown_path(plan, &home, &cwd);
        words.push_str(&paint.yellow(&format!(
            "\nThis outlast is not the first on PATH, so {path} gets its full path, which may not exist on other machines.\n"
        )));
    }
    print(&words)?;

    let failed = |troubles: Vec<Report>| {
        let is_failed = !troubles.is_empty();
        for report in troubles {
            report.print();
        }
        if is_failed { ExitCode::from(report::FAILURE) } else { ExitCode::SUCCESS }
    };
    let (servers, what) = sums(changed.iter().copied());
    let verb = if matches!(direction, Direction::In(_)) { "Wrap" } else { "Unwrap" };
    if changed.is_empty() {
        let (done, known) = (if verb == "Wrap" { "wrap" } else { "unwrap" }, plans.len());
        if known == 0 && troubles.is_empty() {
            return Err(nothing_found(which));
        }
        print(&format!("\nNothing to {done}.\n"))?;
        return Ok(failed(troubles));
    }
    if which.dry_run {
        print(&format!("\nNothing was written: {} would change.\n", what))?;
        return Ok(failed(troubles));
    }
    if matches!(direction, Direction::In(_)) {
        print(&paint.yellow(&shared_warning(&changed, &home, &cwd)))?;
    }
    let choices = if servers > 1 { "y/N, s to choose each server" } else { "y/N" };
    let answer = if which.yes { Answer::Yes } else { ask(&format!("\n{verb} {what}? [{choices}] "))? };
    let chosen: Vec<Plan>;
    let (changed, what) = match answer {
        Answer::Yes => (changed, what),
        Answer::Choose if servers > 1 => {
            let changes = choose(&changed, verb, &home, &cwd)?;
            let is_chosen = |config: &Config, server: &Server| {
                changes.contains(&(config.file.clone(), server.project.clone(), server.name.clone()))
            };
            chosen = changed
                .iter()
                .map(|changed| plan(changed.config.clone(), direction, Some(&backups), &is_chosen))
                .filter(Plan::is_change)
                .collect();
            (chosen.iter().collect(), sums(chosen.iter()).1)
        }
        Answer::Choose | Answer::No => (Vec::new(), String::new()),
    };
    if changed.is_empty() {
        print("Nothing was written.\n")?;
        return Ok(ExitCode::from(report::FAILURE));
    }
    let mut written = 0;
    for plan in &changed {
        match carry_out(plan, direction, &backups) {
            Ok(()) => written += 1,
            Err(error) => troubles.push(stays(plan, &error)),
        }
    }
    if written > 0 {
        let back = match direction {
            Direction::In(_) => "; `outlast unwrap` restores the file byte for byte, unless you change it",
            Direction::Out => "",
        };
        print(&format!(
            "\n{verb}ped {what}{back}.\nClients read their configuration when they start: restart those that are running.\n"
        ))?;
    }
    Ok(failed(troubles))
}

/// The result as JSON: each file that was read, each server in it, and the outcome.
fn told_in_json(
    plans: &[Plan],
    direction: &Direction,
    backups: &Backups,
    is_dry: bool,
    mut troubles: Vec<Report>,
) -> Result<ExitCode, Report> {
    let mut files = Vec::new();
    for plan in plans {
        let is_changed = plan.is_change();
        let mut is_written = false;
        if is_changed && !is_dry {
            match carry_out(plan, direction, backups) {
                Ok(()) => is_written = true,
                Err(error) => troubles.push(stays(plan, &error)),
            }
        }
        let servers = plan.changes.iter().map(|server| {
            json!({"name": server.name, "project": server.project, "outcome": server.outcome.word(), "words": server.words})
        });
        files.push(json!({
            "path": plan.config.file.to_string_lossy(),
            "client": plan.config.place.client.map(Client::word),
            "shared": plan.config.place.is_shared,
            "changed": is_changed,
            "written": is_written,
            "servers": servers.collect::<Vec<Value>>(),
        }));
    }
    let errors: Vec<Value> = troubles.iter().map(Report::to_json).collect();
    print_json(&format!("{:#}\n", json!({"dry_run": is_dry, "files": files, "errors": errors})))?;
    Ok(if troubles.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(report::FAILURE) })
}

fn stays(plan: &Plan, error: &io::Error) -> Report {
    Report::new(report::FAILURE, format!("`{}` stays as it was", plan.config.place.path.display())).because(error)
}

fn carry_out(plan: &Plan, direction: &Direction, backups: &Backups) -> io::Result<()> {
    let (file, before, after) = (&plan.config.file, plan.config.text.as_bytes(), plan.after.as_bytes());
    match direction {
        Direction::In(_) => {
            backups.keep(file, &plan.original, after)?;
            backup::replace(file, before, after)
        }
        Direction::Out => {
            backup::replace(file, before, after)?;
            if plan.changes.iter().any(|server| server.outcome == Outcome::Skipped) {
                // Servers in it are still wrapped, so the original is still needed.
                return backups.keep(file, &plan.original, after);
            }
            backups.forget(file);
            Ok(())
        }
    }
}

/// The files to work on. A file that the user did not name and that cannot be read is reported, and the others are
/// processed.
fn gather(
    which: &cli::WhichFiles,
    direction: &Direction,
    places: &ConfigFiles,
    backups: &Backups,
) -> Result<(Vec<Config>, Vec<Report>), Report> {
    let clients: Vec<Client> =
        Client::ALL.into_iter().filter(|client| which.client.is_empty() || which.client.contains(client)).collect();
    let known: Vec<ConfigFile> = clients.iter().flat_map(|client| places.of(*client)).collect();
    if !which.files.is_empty() {
        let configs: Vec<Config> = which
            .files
            .iter()
            .map(|file| {
                let known = known.iter().find(|place| is_same_file(&place.path, file)).cloned();
                Config::read(
                    known.map_or_else(|| named(file, places), |place| ConfigFile { path: file.clone(), ..place }),
                )
            })
            .collect::<Result<_, _>>()?;
        if let Some(config) = configs.iter().find(|config| config.servers.is_empty()) {
            return Err(Report::new(report::USAGE, format!("`{}` names no MCP servers", config.place.path.display()))
                .hint(format!("outlast looks for them in {}", servers::LOOKED_IN)));
        }
        return Ok((configs, Vec::new()));
    }
    let mut found: Vec<ConfigFile> = known.into_iter().filter(|place| place.path.exists()).collect();
    if matches!(direction, Direction::Out) && which.client.is_empty() {
        // Also files that an earlier call named, in any directory.
        for file in backups.files() {
            if !found.iter().any(|place| is_same_file(&place.path, &file)) {
                found.push(named(&file, places));
            }
        }
    }
    let (mut configs, mut troubles) = (Vec::<Config>::new(), Vec::new());
    for place in found {
        match Config::read(place) {
            Ok(config) if config.servers.is_empty() => {}
            // Two paths to the same file count once.
            Ok(config) if configs.iter().any(|known| known.file == config.file) => {}
            Ok(config) => configs.push(config),
            Err(report) => troubles.push(report),
        }
    }
    Ok((configs, troubles))
}

/// A file in a repository is shared with others; any other file is not.
fn named(file: &Path, places: &ConfigFiles) -> ConfigFile {
    let whole = fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    let is_shared = whole.ancestors().skip(1).any(|dir| dir != places.home && dir.join(".git").exists());
    ConfigFile { is_shared, ..ConfigFile::named(file) }
}

fn nothing_found(which: &cli::WhichFiles) -> Report {
    let whose: Vec<&str> = match which.client.as_slice() {
        [] => Client::ALL.iter().map(|client| client.title()).collect(),
        clients => clients.iter().map(|client| client.title()).collect(),
    };
    Report::new(report::FAILURE, "no configuration with MCP servers was found")
        .because(format!("searched this directory and your home directory for {}", whose.join(", ")))
        .hint("name the file: `outlast wrap FILE`; `outlast help clients` lists the files of each client")
}

/// The shortest unambiguous form.
fn shown_path(plan: &Plan, home: &Path, cwd: &Path) -> String {
    let path = &plan.config.place.path;
    match path.strip_prefix(cwd) {
        Ok(inside) => inside.display().to_string(),
        Err(_) => from_home(path, Some(home)),
    }
}

fn listing(plan: &Plan, path: &str, paint: Paint) -> String {
    let title = plan.config.place.client.map_or("", Client::title);
    let mut words = format!("{}\n", format!("{}  {}", paint.bold(title), path).trim_start());
    let name = |server: &ServerChange| match &server.project {
        Some(project) => visible::cell(&format!("{} (in {project})", server.name)),
        None => visible::cell(&server.name),
    };
    let width = plan.changes.iter().map(|server| name(server).chars().count()).max().unwrap_or_default();
    for server in &plan.changes {
        let line = format!("  {} {:width$}  {}", server.outcome.mark(), name(server), visible::cell(&server.words));
        let line = match server.outcome {
            Outcome::Wrapped => paint.green(&line),
            Outcome::Moved | Outcome::Unwrapped => paint.yellow(&line),
            Outcome::Settled | Outcome::Left | Outcome::Skipped => paint.dim(&line),
        };
        words.push_str(&format!("{line}\n"));
    }
    words
}

fn names(configs: &[Config]) -> Vec<&String> {
    configs.iter().flat_map(|config| &config.servers).map(|server| &server.name).collect()
}

fn no_such_server(name: &str, known: &[&String]) -> Report {
    let near = known.iter().map(|known| (strsim::osa_distance(name, known), known));
    let near = near.filter(|(slips, known)| *slips <= known.len() / 3).min();
    let report = Report::new(report::USAGE, format!("no server is named `{name}` in the files that were found"));
    match near {
        Some((_, known)) => report.hint(format!("did you mean `{}`?", visible::cell(known))),
        None => report.hint("`outlast wrap --dry-run` lists them"),
    }
}

/// How many servers change, and the same as text.
fn sums<'a>(plans: impl Iterator<Item = &'a Plan> + Clone) -> (usize, String) {
    let servers = plans.clone().flat_map(|plan| &plan.changes).filter(|server| server.outcome.is_change()).count();
    (servers, format!("{} in {}", counted(servers, "server"), counted(plans.count(), "file")))
}

/// Empty if no project file changes.
fn shared_warning(changed: &[&Plan], home: &Path, cwd: &Path) -> String {
    let shared = changed.iter().filter(|plan| plan.config.place.is_shared);
    let paths: Vec<String> = shared.map(|plan| shown_path(plan, home, cwd)).collect();
    match paths.as_slice() {
        [] => String::new(),
        [path] => format!(
            "\n{path} is a file of the project and is shared with all its users.\n\
             Without outlast on their PATH, their clients can no longer start these servers.\n"
        ),
        paths => format!(
            "\n{} are files of the project and are shared with all its users.\n\
             Without outlast on their PATH, their clients can no longer start these servers.\n",
            paths.join(", ")
        ),
    }
}

enum Answer {
    Yes,
    No,
    /// Ask about each server.
    Choose,
}

/// Asks about each server that would change. Returns file, project and name of the chosen ones.
fn choose(
    changed: &[&Plan],
    verb: &str,
    home: &Path,
    cwd: &Path,
) -> Result<Vec<(PathBuf, Option<String>, String)>, Report> {
    let mut chosen = Vec::new();
    for plan in changed {
        let path = shown_path(plan, home, cwd);
        for server in plan.changes.iter().filter(|server| server.outcome.is_change()) {
            let project = server.project.as_deref().map(|project| format!(" in {project}")).unwrap_or_default();
            if let Answer::Yes = ask(&format!("  {verb} `{}`{project} ({path})? [y/N] ", server.name))? {
                chosen.push((plan.config.file.clone(), server.project.clone(), server.name.clone()));
            }
        }
    }
    Ok(chosen)
}

/// Whether the user answers yes on the terminal.
pub fn is_agreed(question: &str) -> bool {
    matches!(ask(question), Ok(Answer::Yes))
}

/// Whether the user answers yes; an error if there is no terminal to ask on.
pub(crate) fn is_confirmed(question: &str) -> Result<bool, Report> {
    ask(question).map(|answer| matches!(answer, Answer::Yes))
}

fn ask(question: &str) -> Result<Answer, Report> {
    if !io::stdin().is_terminal() {
        return Err(Report::new(report::USAGE, "stdin is not a terminal, so outlast cannot ask")
            .hint("add `--yes` to write, or `--dry-run` to show what would be written"));
    }
    // If the question cannot be shown, the answer is read all the same: stdin is a terminal.
    let _ = io::stderr().write_all(visible::text(question).as_bytes());
    let mut answer = String::new();
    io::stdin()
        .lock()
        .read_line(&mut answer)
        .map_err(|error| Report::new(report::FAILURE, "cannot read the answer").because(error))?;
    Ok(match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Answer::Yes,
        "s" | "select" => Answer::Choose,
        _ => Answer::No,
    })
}

fn counted(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}
