//! `outlast doctor`: what is wrong, and how to mend it.

use std::{
    collections::BTreeMap,
    env, fs,
    io::Read,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

mod attempt;
mod trials;
mod variables;
mod words;

use self::{
    trials::{Outcome, Stage, Trial},
    variables::Variables,
    words::{Area, Finding, Level},
};
use crate::{
    cli,
    commands::{settle_in, without_secrets},
    control::{client, registry::Registry},
    home,
    instances::{from_home, print},
    os,
    paint::Paint,
    report::{self, Report, shell_quote},
    wrap::{
        self, Config,
        backup::Backups,
        clients::{Client, Places},
        edit,
        servers::{How, Server},
    },
};

/// How long the instances that run may take to say how they are, all together.
const SURVEY_MAX: Duration = Duration::from_secs(1);
/// How long another outlast may take to say its version, and how much it may say.
const VERSION_MAX: Duration = Duration::from_secs(2);
const VERSION_BYTES_MAX: u64 = 4096;

pub fn doctor(arguments: &cli::Doctor) -> Result<ExitCode, Report> {
    let home = env::home_dir().filter(|home| home.is_absolute()).ok_or_else(|| {
        Report::new(report::FAILURE, "there is no home directory, so nothing can be looked for").hint("set HOME")
    })?;
    let cwd = env::current_dir()
        .map_err(|error| Report::new(report::FAILURE, "the working directory is gone").because(error))?;
    let visit = Visit { home, cwd };
    // First of all, as a fork comes before any thread.
    let hands = (!arguments.no_start).then(settle_in).transpose()?;

    let mut findings = visit.program();
    let (clients, configs) = visit.clients();
    findings.extend(clients);
    let (mut servers, trials) = visit.servers(&configs);
    if let Some((keeper, runtime)) = hands {
        let outcomes = runtime
            .block_on(async {
                let mut household = keeper.attach()?;
                let outcomes = trials::run(&mut household, &trials.all, arguments.timeout).await;
                household.close().await;
                Ok::<_, std::io::Error>(outcomes)
            })
            .map_err(|error| Report::new(report::FAILURE, "cannot start servers").because(error))?;
        for (at, finding) in servers.iter_mut().enumerate() {
            if let Some(trial) = trials.of.get(&at) {
                judge(finding, &trials.all[*trial], &outcomes[*trial]);
            }
        }
        runtime.shutdown_timeout(Duration::from_millis(100));
    }
    findings.extend(servers);
    findings.extend(visit.instances());
    findings.extend(visit.state());
    findings.extend(visit.orphans());

    if arguments.json {
        let told = serde_json::to_string_pretty(&words::in_json(&findings)).expect("a value is always JSON");
        print(&format!("{told}\n"))?;
    } else {
        print(&words::in_words(&findings, Paint::stdout()))?;
    }
    let is_well = words::count(&findings, Level::Problem) == 0;
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::from(report::FAILURE) })
}

struct Visit {
    home: PathBuf,
    cwd: PathBuf,
}

/// What is to be tried, each thing once, however many clients name it; and which finding is about which.
#[derive(Default)]
struct Trials {
    all: Vec<Trial>,
    of: BTreeMap<usize, usize>,
}

impl Visit {
    fn shown(&self, path: &Path) -> String {
        match path.strip_prefix(&self.cwd) {
            Ok(inside) if inside.components().next().is_some() => inside.display().to_string(),
            _ => from_home(path, Some(&self.home)),
        }
    }

    // ---- this program ------------------------------------------------------------------------------------------

    fn program(&self) -> Vec<Finding> {
        let version = env!("CARGO_PKG_VERSION");
        let Ok(exe) = env::current_exe() else {
            return vec![Finding::new(Level::Remark, Area::Program, version, "where it lies is not known")];
        };
        let mut findings = vec![Finding::new(Level::Fine, Area::Program, version, self.shown(&exe))];
        let is_build = exe.parent().is_some_and(|dir| dir.ends_with("target/debug") || dir.ends_with("target/release"));
        if is_build {
            findings.push(
                Finding::new(
                    Level::Remark,
                    Area::Program,
                    "place",
                    "it lies in a build directory, which a clean empties",
                )
                .mend("cargo install --path crates/outlast"),
            );
        }
        match wrap::on_path("outlast") {
            Some(found) if wrap::is_same_file(&found, &exe) => {
                findings.push(Finding::new(Level::Fine, Area::Program, "PATH", "finds this one"));
            }
            Some(found) => {
                let other = version_of(&found);
                let level = if other.as_deref() == Some(version) { Level::Remark } else { Level::Problem };
                let which = other.map_or_else(|| "that does not say its version".to_owned(), |other| other.to_owned());
                let says = format!("finds another one first, {which}: {}", self.shown(&found));
                findings.push(Finding::new(level, Area::Program, "PATH", says).mend(format!(
                    "remove {}, or put {} before it",
                    found.display(),
                    dir_of(&exe)
                )));
            }
            None => findings.push(
                Finding::new(
                    Level::Remark,
                    Area::Program,
                    "PATH",
                    "does not find it: files that a project shares cannot name it",
                )
                .mend(format!("put {} on PATH", dir_of(&exe))),
            ),
        }
        findings
    }

    // ---- clients and servers -----------------------------------------------------------------------------------

    fn clients(&self) -> (Vec<Finding>, Vec<Config>) {
        let places = Places::here(&self.home, &self.cwd);
        let (mut findings, mut configs) = (Vec::new(), Vec::<Config>::new());
        for client in Client::ALL {
            let files: Vec<_> = places.of(client).into_iter().filter(|place| place.path.exists()).collect();
            let is_installed = places.traces(client).iter().any(|path| path.exists());
            let says = match (files.as_slice(), is_installed) {
                ([], false) => "not found".to_owned(),
                ([], true) => "installed; it names no servers of its own".to_owned(),
                (files, _) => files.iter().map(|place| self.shown(&place.path)).collect::<Vec<_>>().join(", "),
            };
            let level = if files.is_empty() && !is_installed { Level::Absent } else { Level::Fine };
            findings.push(Finding::new(level, Area::Client, client.title(), says));
            for place in files {
                let path = self.shown(&place.path);
                match Config::read(place) {
                    Ok(config) if configs.iter().any(|known| known.file == config.file) => {}
                    Ok(config) => configs.push(config),
                    Err(report) => {
                        let why = report.because.unwrap_or(report.sentence);
                        findings.push(
                            Finding::new(
                                Level::Problem,
                                Area::Client,
                                client.title(),
                                format!("{path} cannot be read: {why}"),
                            )
                            .mend(format!("repair {path} by hand")),
                        );
                    }
                }
            }
        }
        (findings, configs)
    }

    fn servers(&self, configs: &[Config]) -> (Vec<Finding>, Trials) {
        let (mut findings, mut trials) = (Vec::new(), Trials::default());
        for config in configs {
            let client = config.place.client;
            let title = client.map_or("", Client::title);
            let place = format!("{title}  {}", self.shown(&config.place.path));
            // Those of other projects are started in other directories, by somebody else's leave.
            let ours = |server: &&Server| server.project.as_ref().is_none_or(|project| self.cwd.starts_with(project));
            for server in config.servers.iter().filter(ours) {
                let mut finding = self.server(server, client);
                if finding.level != Level::Problem && edit::command_of(server).is_some() {
                    match self.trial(config, server) {
                        Ok(trial) => {
                            let at = trials.all.iter().position(|known| *known == trial).unwrap_or_else(|| {
                                trials.all.push(trial);
                                trials.all.len() - 1
                            });
                            trials.of.insert(findings.len(), at);
                        }
                        Err(why) => finding.says.push_str(&format!("; not tried: {why}")),
                    }
                }
                findings.push(Finding { place: place.clone(), ..finding });
            }
        }
        (findings, trials)
    }

    /// How a server stands in its file.
    fn server(&self, server: &Server, client: Option<Client>) -> Finding {
        let finding = |level, says: &str| Finding::new(level, Area::Server, server.name.clone(), says);
        let again = match client {
            Some(client) => format!("outlast wrap --client {}", client.word()),
            None => "outlast wrap".to_owned(),
        };
        let program = match &server.how {
            How::Starts(program) => program,
            How::Calls => return finding(Level::Fine, "reached over the network"),
            How::Unclear(why) => return finding(Level::Problem, why).mend("mend its entry, or remove it"),
        };
        if !edit::is_wrapped(server) {
            return finding(Level::Remark, "not wrapped").mend(again);
        }
        let command = &program.command.text;
        let is_there =
            if command.contains(['/', '\\']) { Path::new(command).is_file() } else { wrap::on_path(command).is_some() };
        if is_there {
            finding(Level::Fine, "wrapped")
        } else {
            finding(Level::Problem, &format!("wrapped, but there is no `{command}`")).mend(again)
        }
    }

    fn trial(&self, config: &Config, server: &Server) -> Result<Trial, String> {
        let base = self.directory_of(config, server);
        let variables = Variables { folder: &base, home: &self.home };
        let command = edit::command_of(server).unwrap_or_default();
        let command = command.iter().map(|word| variables.fill(word)).collect::<Result<Vec<String>, String>>()?;
        let env = server.env.iter().map(|(name, value)| Ok((name.clone(), variables.fill(value)?)));
        let env = env.collect::<Result<Vec<(String, String)>, String>>()?;
        let cwd = match &server.cwd {
            Some(cwd) => base.join(variables.fill(cwd)?),
            None => base.clone(),
        };
        Ok(Trial { command, cwd, env })
    }

    /// Where its client would start it: in the project that the file is of, or else where the client happens to be.
    fn directory_of(&self, config: &Config, server: &Server) -> PathBuf {
        if let Some(project) = &server.project {
            return PathBuf::from(project);
        }
        if !config.place.is_shared {
            return self.cwd.clone();
        }
        let dir = config.place.path.parent().unwrap_or(Path::new("/"));
        let is_hidden = dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        if is_hidden { dir.parent().unwrap_or(dir).to_owned() } else { dir.to_owned() }
    }

    // ---- what runs ---------------------------------------------------------------------------------------------

    fn instances(&self) -> Vec<Finding> {
        let found = client::survey(&Registry::of(&self.home), SURVEY_MAX);
        let count = found.len();
        let mut findings = Vec::new();
        for found in &found {
            let id = &found.entry.id;
            let Some(state) = &found.state else {
                let says = format!("does not answer (pid {})", found.entry.pid);
                findings.push(
                    Finding::new(Level::Problem, Area::Instance, id, says)
                        .mend(format!("kill {}; its server goes with it, and its client sees an end", found.entry.pid)),
                );
                continue;
            };
            // A gateway's backends are looked at as well as the gateway.
            let backends = state["backends"].as_array().into_iter().flatten();
            let below = backends.map(|one| (format!("{id}/{}", one["name"].as_str().unwrap_or_default()), one));
            for (id, state) in [(id.clone(), state)].into_iter().chain(below) {
                let word = state["state"].as_str().unwrap_or_default();
                if !matches!(word, "given_up" | "halted") {
                    continue;
                }
                let exit = state["last_exit"].as_str().unwrap_or("nobody knows what");
                let stderr: Vec<&str> = state["stderr_tail"].as_str().unwrap_or_default().lines().collect();
                let details = stderr[stderr.len().saturating_sub(3)..].iter().map(|line| (*line).to_owned()).collect();
                let says = format!("{}; it last ended with {exit}", word.replace('_', " "));
                let finding = Finding::new(Level::Problem, Area::Instance, id.clone(), says);
                findings.push(Finding { details, ..finding.mend(format!("outlast resume {id}")) });
            }
        }
        if findings.is_empty() {
            let says = match count {
                0 => "nothing runs under outlast".to_owned(),
                1 => "1 instance, and it is well".to_owned(),
                count => format!("{count} instances, and all are well"),
            };
            findings.push(Finding::new(Level::Fine, Area::Instance, "instances", says));
        }
        findings
    }

    // ---- the state directory -----------------------------------------------------------------------------------

    fn state(&self) -> Vec<Finding> {
        let state = home::state_dir(&self.home);
        let registry = Registry::of(&self.home);
        let finding = |level, subject: &str, says: String| Finding::new(level, Area::State, subject, says);
        if !state.exists() {
            return vec![finding(Level::Fine, "directory", format!("{}: not made yet", self.shown(&state)))];
        }
        let mut findings = Vec::new();
        let probe = state.join(home::new_id("probe"));
        match fs::write(&probe, "").and_then(|()| fs::remove_file(&probe)) {
            Ok(()) => findings.push(finding(Level::Fine, "directory", self.shown(&state))),
            Err(error) => findings.push(
                finding(
                    Level::Problem,
                    "directory",
                    format!("{} cannot be written: {}", self.shown(&state), report::plain(&error.to_string())),
                )
                .mend(format!("make it yours: chown -R \"$USER\" {0} && chmod u+rwx {0}", quoted(&state))),
            ),
        }
        let run = self.shown(registry.dir());
        if !os::is_ours(registry.dir()) {
            findings.push(
                finding(Level::Problem, "owner", format!("{run} is somebody else's, so no instance can be reached"))
                    .mend(format!("rm -r {}: the next start makes it anew", quoted(registry.dir()))),
            );
        } else if let Some(mode) = open_to_others(registry.dir()) {
            let says = format!("{run} is open to others (mode {mode:o}); the next start closes it");
            findings.push(
                finding(Level::Remark, "permissions", says).mend(format!("chmod 700 {}", quoted(registry.dir()))),
            );
        }
        let mut leftovers = Vec::new();
        for file in fs::read_dir(registry.dir()).into_iter().flatten().flatten() {
            let path = file.path();
            let id = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            match path.extension().and_then(|extension| extension.to_str()) {
                // The dead among the registered were swept when the living were asked.
                Some("sock") if !registry.has(&id) => leftovers.push(path),
                Some("json") if !registry.read().iter().any(|entry| entry.id == id) => leftovers.push(path),
                _ => {}
            }
        }
        leftovers.sort();
        for path in leftovers {
            findings.push(
                finding(Level::Remark, "leftover", format!("{} belongs to nobody", self.shown(&path)))
                    .mend(format!("rm {}", quoted(&path))),
            );
        }
        for dir in Backups::of(&self.home).without_a_file() {
            findings.push(
                finding(Level::Remark, "backup", format!("{} is of a file that is gone", self.shown(&dir)))
                    .mend(format!("rm -r {}", quoted(&dir))),
            );
        }
        findings
    }

    fn orphans(&self) -> Vec<Finding> {
        let Some(strays) = os::strays() else {
            return vec![Finding::new(Level::Fine, Area::Orphan, "processes", "cannot be looked for on this system")];
        };
        if strays.is_empty() {
            return vec![Finding::new(Level::Fine, Area::Orphan, "processes", "none")];
        }
        let finding = |stray: os::Stray| {
            let id = stray.tag.rsplit_once('.').map_or(stray.tag.as_str(), |(id, _)| id);
            let words = without_secrets(&stray.command);
            let command = shell_quote(words.iter().map(String::as_str));
            let says = format!("of `{id}`, whose outlast is gone: {command}");
            Finding::new(Level::Problem, Area::Orphan, stray.pid.to_string(), says).mend(format!("kill {}", stray.pid))
        };
        strays.into_iter().map(finding).collect()
    }
}

/// What a try says of a server, beside how it stands in its file.
fn judge(finding: &mut Finding, trial: &Trial, outcome: &Outcome) {
    match outcome {
        Outcome::Answers { answer, took } => {
            let tools = match answer.tools {
                Some(1) => ", 1 tool".to_owned(),
                Some(tools) => format!(", {tools} tools"),
                None => String::new(),
            };
            let about = format!("{}, {}{tools}", answer.server, answer.protocol);
            let about = about.trim_start_matches([',', ' ']);
            finding.says.push_str(&format!("; answers in {} ms ({about})", took.as_millis()));
            if answer.noise > 0 {
                finding.level = finding.level.max(Level::Remark);
                let lines = if answer.noise == 1 { "1 line".to_owned() } else { format!("{} lines", answer.noise) };
                finding
                    .details
                    .push(format!("writes {lines} of something else than messages to stdout: a log belongs on stderr"));
            }
        }
        Outcome::Broken { stage, why, stderr } => {
            finding.level = Level::Problem;
            finding.says.push_str(&format!("; {why}"));
            finding.details.extend(stderr.iter().cloned());
            let words = without_secrets(&trial.command);
            let command = shell_quote(words.iter().map(String::as_str));
            finding.mend = Some(match stage {
                Stage::Start => "install it, or name it by its whole path".to_owned(),
                Stage::Late => {
                    format!("`--timeout 120` waits longer; or see what it says in {}: {command}", trial.cwd.display())
                }
                Stage::Talk => format!("see what it says in {}: {command}", trial.cwd.display()),
            });
        }
    }
}

#[cfg(unix)]
fn open_to_others(dir: &Path) -> Option<u32> {
    use std::os::unix::fs::PermissionsExt;
    let mode = fs::metadata(dir).ok()?.permissions().mode() & 0o777;
    (mode & 0o077 != 0).then_some(mode)
}

#[cfg(not(unix))]
fn open_to_others(_dir: &Path) -> Option<u32> {
    None
}

/// What another outlast says of itself, if it says so soon.
fn version_of(program: &Path) -> Option<String> {
    let mut child = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut stdout = child.stdout.take()?.take(VERSION_BYTES_MAX);
    let (tell, hear) = mpsc::channel();
    thread::spawn(move || {
        let mut said = String::new();
        let _ = stdout.read_to_string(&mut said);
        let _ = tell.send(said);
    });
    let said = hear.recv_timeout(VERSION_MAX).ok();
    // It has said all, or never will.
    let _ = child.kill();
    let _ = child.wait();
    Some(said?.trim().strip_prefix("outlast ")?.to_owned())
}

fn dir_of(path: &Path) -> String {
    path.parent().unwrap_or(path).display().to_string()
}

fn quoted(path: &Path) -> String {
    shell_quote([path.to_string_lossy().as_ref()])
}
