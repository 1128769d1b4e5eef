//! `outlast doctor`: looks for problems and says how to fix them. It fixes nothing itself.

use std::{
    collections::BTreeMap,
    env, fs,
    io::{self, IsTerminal, Read, Write},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use outlast_control::{answer::State, client, registry::Registry};
use outlast_os as os;

mod attempt;
mod findings;
mod trials;
mod variables;

use self::{
    findings::{Area, Finding, Level},
    trials::{Outcome, Progress, Stage, Trial},
    variables::Variables,
};
use outlast_core::sandbox::{Sandbox, Support};

use crate::{
    adopt::{
        self, Config,
        backup::Backups,
        clients::{Client, ConfigFiles},
        edit,
        servers::{self, How, Server},
    },
    cli::{
        self,
        commands::{settle_in, without_secrets},
        paint::Paint,
        report::{self, Report, shell_quote},
        table,
    },
    config::{
        trust::{Store, Verdict},
        trust_command,
    },
    operator::instances::{from_home, print, print_json},
    state::home,
};

/// How long all running instances together may take to report their state.
const SURVEY_MAX: Duration = Duration::from_secs(1);
/// How long another outlast may take to print its version, and how many bytes are read of it.
const VERSION_MAX: Duration = Duration::from_secs(2);
const VERSION_BYTES_MAX: u64 = 4096;
/// How many lines of a broken server's stderr are quoted below the line that names the error.
const DETAILS_MAX: usize = 8;
/// How many files of the registry are examined for leftovers.
const LEFTOVERS_MAX: usize = 10_000;

pub(crate) fn doctor(arguments: &cli::Doctor) -> Result<ExitCode, Report> {
    let home = env::home_dir()
        .filter(|home| home.is_absolute())
        .ok_or_else(|| Report::new(report::FAILURE, "there is no home directory to search").hint("set HOME"))?;
    let cwd = report::cwd()?;
    let visit = Visit { home, cwd };
    let mut line = ProgressLine::begin(arguments.json);
    // This forks, so it comes before any thread is started.
    let hands = (!arguments.no_start).then(settle_in).transpose()?;
    let may_ask = hands.is_some() && !arguments.json && io::stdin().is_terminal() && io::stderr().is_terminal();

    let mut findings = visit.program();
    let (clients, configs) = visit.clients();
    findings.extend(clients);
    let (mut servers, trials) = visit.servers(&configs, &mut |question| {
        line.erase();
        may_ask && adopt::is_agreed(question)
    });
    if let Some((keeper, runtime)) = hands {
        let outcomes = runtime
            .block_on(async {
                let processes = keeper.attach()?;
                let mut tell = |progress: &Progress| line.tell(&trials, progress);
                let outcomes = trials::run(processes, &trials.all, arguments.timeout, &mut tell).await;
                Ok::<_, std::io::Error>(outcomes)
            })
            .map_err(|error| Report::new(report::FAILURE, "cannot start servers").because(error))?;
        for (at, finding) in servers.iter_mut().enumerate() {
            if let Some(trial) = trials.of.get(&at) {
                judge(finding, &trials.all[*trial], &outcomes[*trial]);
            }
        }
        drop(runtime);
    } else {
        for at in trials.of.keys() {
            not_tested(&mut servers[*at], "");
        }
    }
    findings.extend(servers);
    findings.extend(visit.instances());
    findings.extend(visit.state());
    findings.extend(visit.orphans());

    line.erase();
    if arguments.json {
        let told = serde_json::to_string_pretty(&findings::in_json(&findings)).expect("a value is always JSON");
        print_json(&format!("{told}\n"))?;
    } else {
        print(&findings::in_words(&findings, Paint::stdout(), table::room()))?;
    }
    let is_well = findings::count(&findings, Level::Problem) == 0;
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::from(report::FAILURE) })
}

struct Visit {
    home: PathBuf,
    cwd: PathBuf,
}

/// What a sandbox could restrict here. It is used only if a configuration asks for it, so missing support is not a
/// problem yet.
fn sandbox(support: Support) -> Finding {
    let finding = |level, says: &str| Finding::new(level, Area::Program, "sandbox", says);
    let can = |abi, what: &str| format!("Landlock ABI {abi}: {what} can be restricted");
    match (Sandbox::default().refusal(support), support) {
        (None, Support::Landlock(abi)) => finding(Level::Fine, &can(abi, "files and TCP ports")),
        (_, Support::NotLinux) => finding(Level::Absent, "only Linux has one"),
        (Some(refusal), Support::Landlock(abi)) if refusal.why.contains("TCP") => {
            finding(Level::Remark, &can(abi, "files, but not TCP ports,"))
        }
        (refusal, _) => {
            let says = refusal.map_or_else(String::new, |refusal| refusal.why);
            finding(Level::Remark, &says)
        }
    }
}

/// The servers to start, each command once, however many clients name it; and which finding belongs to which trial.
#[derive(Default)]
struct Trials {
    all: Vec<Trial>,
    /// The name of each in the first file that has it.
    names: Vec<String>,
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
            return vec![Finding::new(Level::Remark, Area::Program, version, "its path is unknown")];
        };
        let mut findings = vec![Finding::new(Level::Fine, Area::Program, version, self.shown(&exe))];
        let is_build = exe.parent().is_some_and(|dir| dir.ends_with("target/debug") || dir.ends_with("target/release"));
        if is_build {
            findings.push(
                Finding::new(
                    Level::Remark,
                    Area::Program,
                    "place",
                    "it is in a build directory, which `cargo clean` empties",
                )
                .mend("cargo install --path crates/outlast"),
            );
        }
        match adopt::on_path("outlast") {
            Some(found) if adopt::is_same_file(&found, &exe) => {
                findings.push(Finding::new(Level::Fine, Area::Program, "PATH", "finds this outlast"));
            }
            Some(found) => {
                let other = version_of(&found);
                let level = if other.as_deref() == Some(version) { Level::Remark } else { Level::Problem };
                let which = other.map_or_else(|| "version unknown".to_owned(), |other| other.to_owned());
                let says = format!("finds another outlast first, {which}: {}", self.shown(&found));
                findings.push(Finding::new(level, Area::Program, "PATH", says).mend(format!(
                    "remove {}, or put {} before it on PATH",
                    found.display(),
                    dir_of(&exe)
                )));
            }
            None => findings.push(
                Finding::new(
                    Level::Remark,
                    Area::Program,
                    "PATH",
                    "does not find outlast, so shared files of a project cannot name it",
                )
                .mend(format!("put {} on PATH", dir_of(&exe))),
            ),
        }
        findings.push(sandbox(os::sandbox_support()));
        findings
    }

    // ---- clients and servers -----------------------------------------------------------------------------------

    fn clients(&self) -> (Vec<Finding>, Vec<Config>) {
        let places = ConfigFiles::here(&self.home, &self.cwd);
        let (mut findings, mut configs) = (Vec::new(), Vec::<Config>::new());
        for client in Client::ALL {
            let files: Vec<_> = places.of(client).into_iter().filter(|place| place.path.exists()).collect();
            let is_installed = places.traces(client).iter().any(|path| path.exists());
            let says = match (files.as_slice(), is_installed) {
                ([], false) => "not found".to_owned(),
                ([], true) => "installed; no MCP servers configured".to_owned(),
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

    /// `agrees` asks the user whether servers may be started that the user has neither wrapped nor trusted.
    fn servers(&self, configs: &[Config], agrees: &mut dyn FnMut(&str) -> bool) -> (Vec<Finding>, Trials) {
        let (mut findings, mut trials) = (Vec::new(), Trials::default());
        for config in configs {
            let mut consent = Consent::of(config, self);
            let client = config.place.client;
            let title = client.map_or("", Client::title);
            let place = format!("{title}  {}", self.shown(&config.place.path));
            // Servers of other projects are started in other directories, and their project may not be trusted.
            let ours = |server: &&Server| server.project.as_ref().is_none_or(|project| self.cwd.starts_with(project));
            for server in config.servers.iter().filter(ours) {
                let mut finding = self.server(server, client);
                if finding.level != Level::Problem && edit::command_of(server).is_some() {
                    match self.trial(config, server) {
                        Ok(_) if !consent.covers(server, &self.shown(&config.place.path), agrees) => {
                            not_tested(&mut finding, "you have neither wrapped nor trusted this file");
                            let file = config.place.path.strip_prefix(&self.cwd).unwrap_or(&config.place.path);
                            finding.mend.get_or_insert(format!("outlast trust {}", quoted(file)));
                        }
                        Ok(trial) => {
                            let at = trials.all.iter().position(|known| *known == trial).unwrap_or_else(|| {
                                trials.all.push(trial);
                                trials.names.push(server.name.clone());
                                trials.all.len() - 1
                            });
                            trials.of.insert(findings.len(), at);
                        }
                        Err(why) => not_tested(&mut finding, &why),
                    }
                }
                findings.push(Finding { place: place.clone(), ..finding });
            }
        }
        (findings, trials)
    }

    /// Checks a server by its entry in the file, without starting it.
    fn server(&self, server: &Server, client: Option<Client>) -> Finding {
        let finding = |level, says: &str| Finding::new(level, Area::Server, server.name.clone(), says);
        let again = match client {
            Some(client) => format!("outlast wrap --client {}", client.word()),
            None => "outlast wrap".to_owned(),
        };
        let program = match &server.how {
            How::Starts(program) => program,
            How::Calls => {
                let mut finding = finding(Level::Fine, "reached over the network");
                not_tested(&mut finding, "");
                return finding;
            }
            How::Unclear(why) => return finding(Level::Problem, why).mend("fix its entry, or remove it"),
        };
        if !edit::is_wrapped(server) {
            return finding(Level::Remark, "not wrapped").mend(again);
        }
        let command = &program.command.text;
        let is_there = if command.contains(['/', '\\']) {
            Path::new(command).is_file()
        } else {
            adopt::on_path(command).is_some()
        };
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

    /// The directory in which its client would start it: the project of the file, or else the current directory of
    /// the client.
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

    // ---- running instances -------------------------------------------------------------------------------------

    fn instances(&self) -> Vec<Finding> {
        let found = client::survey(&Registry::of(&self.home), SURVEY_MAX);
        let count = found.len();
        let mut findings = Vec::new();
        for found in &found {
            let id = &found.entry.id;
            let Some(state) = &found.state else {
                let says = format!("does not answer (pid {})", found.entry.pid);
                findings.push(
                    Finding::new(Level::Problem, Area::Instance, id, says).mend(format!(
                        "kill {}; this also ends its server and the client's connection",
                        found.entry.pid
                    )),
                );
                continue;
            };
            // The backends of a gateway are checked, too.
            let state = State::read(state);
            let backends = state.backends.iter().flatten();
            let below = backends.map(|one| (format!("{id}/{}", one.name), one));
            for (id, state) in [(id.clone(), &state)].into_iter().chain(below) {
                let word = state.state.as_deref().unwrap_or_default();
                if !matches!(word, "given_up" | "halted") {
                    continue;
                }
                let exit = state.last_exit_text().unwrap_or("an unknown exit");
                let stderr: Vec<&str> = state.stderr_tail.lines().collect();
                let details = stderr[stderr.len().saturating_sub(3)..].iter().map(|line| (*line).to_owned()).collect();
                let says = format!("{}; it last exited with {exit}", word.replace('_', " "));
                let finding = Finding::new(Level::Problem, Area::Instance, id.clone(), says);
                findings.push(Finding { details, ..finding.mend(format!("outlast resume {id}")) });
            }
        }
        if findings.is_empty() {
            let says = match count {
                0 => "nothing runs under outlast".to_owned(),
                1 => "1 instance, without problems".to_owned(),
                count => format!("{count} instances, without problems"),
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
            return vec![finding(Level::Fine, "directory", format!("{}: does not exist yet", self.shown(&state)))];
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
                .mend(format!("change its owner and mode: chown -R \"$USER\" {0} && chmod u+rwx {0}", quoted(&state))),
            ),
        }
        let run = self.shown(registry.dir());
        if !os::is_ours(registry.dir()) {
            findings.push(
                finding(
                    Level::Problem,
                    "owner",
                    format!("{run} belongs to another user, so no instance can be reached"),
                )
                .mend(format!("rm -r {}: the next start creates it again", quoted(registry.dir()))),
            );
        } else if let Some(mode) = open_to_others(registry.dir()) {
            let says = format!("{run} is accessible to others (mode {mode:o}); the next start corrects this");
            findings.push(
                finding(Level::Remark, "permissions", says).mend(format!("chmod 700 {}", quoted(registry.dir()))),
            );
        }
        let mut leftovers = Vec::new();
        for file in fs::read_dir(registry.dir()).into_iter().flatten().flatten().take(LEFTOVERS_MAX) {
            let path = file.path();
            let id = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            match path.extension().and_then(|extension| extension.to_str()) {
                // The survey has removed the entries of killed instances, so a socket without an entry is a leftover.
                Some("sock") if !registry.has(&id) => leftovers.push(path),
                _ => {}
            }
        }
        leftovers.sort();
        for path in leftovers {
            findings.push(
                finding(Level::Remark, "leftover", format!("{} belongs to no running instance", self.shown(&path)))
                    .mend(format!("rm {}", quoted(&path))),
            );
        }
        for (path, why) in registry.unusable() {
            let says = format!("{} cannot be used: {}", self.shown(&path), report::plain(&why));
            findings.push(finding(Level::Remark, "leftover", says).mend(format!("rm {}", quoted(&path))));
        }
        for dir in Backups::of(&self.home).without_a_file() {
            findings.push(
                finding(
                    Level::Remark,
                    "backup",
                    format!("{} is the backup of a file that no longer exists", self.shown(&dir)),
                )
                .mend(format!("rm -r {}", quoted(&dir))),
            );
        }
        findings
    }

    fn orphans(&self) -> Vec<Finding> {
        let Some(strays) = os::strays() else {
            return vec![Finding::new(Level::Fine, Area::Orphan, "processes", "not supported on this system")];
        };
        if strays.is_empty() {
            return vec![Finding::new(Level::Fine, Area::Orphan, "processes", "none")];
        }
        let finding = |stray: os::Stray| {
            let id = stray.tag.rsplit_once('.').map_or(stray.tag.as_str(), |(id, _)| id);
            let words = without_secrets(&stray.command);
            let command = shell_quote(words.iter().map(String::as_str));
            let says = format!("left by `{id}`, whose outlast has ended: {command}");
            Finding::new(Level::Problem, Area::Orphan, stray.pid.to_string(), says).mend(format!("kill {}", stray.pid))
        };
        strays.into_iter().map(finding).collect()
    }
}

/// Whether servers of a file may be started (SPEC X1). The user's own files name servers that the user chose. A file
/// of a project came with the project, so its servers are started only if the user wrapped or trusts them, or agrees
/// now.
enum Consent<'a> {
    All,
    /// Servers that the user wrapped, as they were at that time.
    Wrapped(Vec<Server>, &'a Config),
    /// The user was asked and refused.
    Refused(Vec<Server>),
}

impl Consent<'_> {
    fn of<'a>(config: &'a Config, visit: &Visit) -> Consent<'a> {
        if !config.place.is_shared {
            return Consent::All;
        }
        let is_trusted = trust_command::guarded(&config.file, &visit.cwd)
            .is_ok_and(|guarded| Store::of(&visit.home).verdict(&config.file, &guarded) == Verdict::Trusted);
        if is_trusted {
            return Consent::All;
        }
        let backup = Backups::of(&visit.home).find(&config.file);
        let original = backup.and_then(|backup| String::from_utf8(backup.original).ok());
        let wrapped = original.and_then(|text| servers::read(&text, config.place.format).ok());
        Consent::Wrapped(wrapped.unwrap_or_default(), config)
    }

    fn covers(&mut self, server: &Server, file: &str, agrees: &mut dyn FnMut(&str) -> bool) -> bool {
        let is_same = |known: &Server| {
            (&known.name, &known.project, &known.env, &known.cwd, edit::command_of(known))
                == (&server.name, &server.project, &server.env, &server.cwd, edit::command_of(server))
        };
        match self {
            Consent::All => true,
            Consent::Refused(known) => known.iter().any(is_same),
            Consent::Wrapped(known, _) if known.iter().any(is_same) => true,
            Consent::Wrapped(known, config) => {
                let new = config.servers.iter().filter_map(|server| {
                    let words = edit::command_of(server)?;
                    Some(format!(
                        "  {}: {}\n",
                        server.name,
                        shell_quote(without_secrets(&words).iter().map(String::as_str))
                    ))
                });
                let question = format!(
                    "{file} has servers that you have neither wrapped nor trusted:\n{}Start them for a test? [y/N] ",
                    new.collect::<String>()
                );
                let is_agreed = agrees(&question);
                *self = if is_agreed { Consent::All } else { Consent::Refused(std::mem::take(known)) };
                is_agreed
            }
        }
    }
}

/// A server that was not started is reported as untested.
fn not_tested(finding: &mut Finding, why: &str) {
    finding.is_untested = true;
    finding.says.push_str("; not tested");
    if !why.is_empty() {
        finding.says.push_str(&format!(": {why}"));
    }
    if finding.level == Level::Fine {
        finding.level = Level::Untested;
    }
}

/// One line on stderr that says what `doctor` waits for: rewritten in place on a terminal, written once elsewhere.
struct ProgressLine {
    is_terminal: bool,
    is_quiet: bool,
    began: Instant,
}

impl ProgressLine {
    fn begin(is_quiet: bool) -> ProgressLine {
        let line = ProgressLine { is_terminal: io::stderr().is_terminal(), is_quiet, began: Instant::now() };
        line.write("Checking outlast, your clients and their servers…");
        line
    }

    fn tell(&mut self, trials: &Trials, progress: &Progress) {
        if !self.is_terminal {
            return;
        }
        let waiting = progress.waiting.iter().take(3).map(|at| trials.names[*at].as_str());
        let waiting = waiting.collect::<Vec<_>>().join(", ");
        let more = if progress.waiting.len() > 3 { ", …" } else { "" };
        let seconds = self.began.elapsed().as_secs();
        self.write(&format!(
            "Testing servers: {} of {} done, waiting for {waiting}{more} ({seconds} s)",
            progress.done,
            trials.all.len()
        ));
    }

    fn write(&self, text: &str) {
        let text = &*outlast_core::visible::text(text);
        let (text, end) = match (self.is_quiet, self.is_terminal) {
            (true, _) => return,
            (false, true) => (text.chars().take(table::room().unwrap_or(80).saturating_sub(1)).collect(), ""),
            (false, false) => (text.to_owned(), "\n"),
        };
        let begin = if self.is_terminal { "\r\x1b[2K" } else { "" };
        // An error of stderr is ignored: progress is optional.
        let _ = write!(io::stderr().lock(), "{begin}{text}{end}");
    }

    fn erase(&self) {
        if self.is_terminal {
            self.write("");
        }
    }
}

/// The line of a server's stderr that says what went wrong: the last line that names an error, because a traceback
/// ends with it and Node.js prints a stack and its version after it; or else the last line.
fn telling_line(stderr: &[String]) -> Option<&String> {
    let lines = || stderr.iter().rev().filter(|line| !line.trim().is_empty());
    let is_frame = |line: &str| line.trim_start().starts_with("at ") || line.trim_start().starts_with("File \"");
    let names_error = |line: &&String| {
        let (name, _) = line.trim_start().split_once(':').unwrap_or(("", ""));
        let name = name.rsplit('.').next().unwrap_or_default();
        (name.ends_with("Error") || name.ends_with("Exception")) && name.chars().all(char::is_alphanumeric)
    };
    let speaks_of_one = |line: &&String| {
        let small = line.to_lowercase();
        !is_frame(line)
            && ["error", "panicked", "fatal", "not found", "cannot", "denied"].iter().any(|word| small.contains(word))
    };
    let is_noise = |line: &&String| line.starts_with("Node.js v") || line.trim().len() < 3;
    lines()
        .find(names_error)
        .or_else(|| lines().find(speaks_of_one))
        .or_else(|| lines().find(|line| !is_noise(line)))
        .or_else(|| lines().next())
}

/// Adds the outcome of a trial to the finding about the entry in the file.
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
                let lines = outlast_core::count::count(answer.noise, "line", "lines");
                finding.details.push(format!("its stdout has {lines} that are not MCP messages: write logs to stderr"));
            }
        }
        Outcome::Broken { stage, why, stderr } => {
            finding.level = Level::Problem;
            finding.says.push_str(&format!("; {why}"));
            let telling = telling_line(stderr);
            if let Some(line) = telling {
                finding.says.push_str(&format!(": {}", line.trim()));
            }
            let last = &stderr[stderr.len().saturating_sub(DETAILS_MAX)..];
            finding.details.extend(last.iter().filter(|line| Some(*line) != telling).cloned());
            let words = without_secrets(&trial.command);
            let command = shell_quote(words.iter().map(String::as_str));
            finding.mend = Some(match stage {
                Stage::Start => "install it, or use its full path".to_owned(),
                Stage::Late => {
                    format!("`--timeout 120s` waits longer; or run it in {}: {command}", trial.cwd.display())
                }
                Stage::Talk => format!("run it in {}: {command}", trial.cwd.display()),
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

/// The version that another outlast prints, if it does so in time.
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
    // If no thread can be started, the channel closes at once, and the version is unknown.
    let _ = thread::Builder::new().spawn(move || {
        let mut said = String::new();
        let _ = stdout.read_to_string(&mut said);
        let _ = tell.send(said);
    });
    let said = hear.recv_timeout(VERSION_MAX).ok();
    // It has printed everything, or the time is over.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_with_the_error_is_found() {
        let node = "node:internal/modules/cjs/loader:1228\n  throw err;\n  ^\n\nError: Cannot find module '/srv/x.js'\n    at \
            Module._resolveFilename (node:internal/loader:1225:15)\n    at error (a.js:1:1) {\n  code: 'MODULE_NOT_FOUND',\n}\n\nNode.js v22.1.0";
        let table = [
            (node, "Error: Cannot find module '/srv/x.js'"),
            (
                "Traceback (most recent call last):\n  File \"a.py\", line 1\nModuleNotFoundError: No module named 'mcp'",
                "ModuleNotFoundError: No module named 'mcp'",
            ),
            (
                "mcp.shared.exceptions.McpError: Connection closed\nbye",
                "mcp.shared.exceptions.McpError: Connection closed",
            ),
            ("sh: 1: npx: not found", "sh: 1: npx: not found"),
            ("starting\nready", "ready"),
            ("hello\nNode.js v22.1.0\n}", "hello"),
        ];
        for (stderr, wanted) in table {
            let lines: Vec<String> = stderr.lines().map(str::to_owned).collect();
            assert_eq!(telling_line(&lines).unwrap(), wanted);
        }
        assert_eq!(telling_line(&[]), None);
    }
}
