//! The processes of the run: how each outlast is started, found and controlled, and its measurements.

use std::{
    collections::BTreeMap,
    env, fs, io,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::Value;

use super::{
    ledger::{HUNG_AFTER, Ledger},
    machine::{Clock, Disk},
    plan::Part,
    processes::{self, Process},
    stdio::Connection,
};

/// The state of three kinds of outlast and their logs fit into it.
const DISK_MEGABYTES: u32 = 24;
/// The variable that all processes of a run have, except those that a server started without it.
pub(super) const MARKER: &str = "OUTLAST_CHAOS";
pub(super) const BACKENDS: [&str; 3] = ["a", "b", "c"];
/// How often a thread checks a state that it waits for.
const LOOK: Duration = Duration::from_millis(50);

pub(super) struct Programs {
    pub outlast: PathBuf,
    pub puppet: PathBuf,
    composer: PathBuf,
}

impl Programs {
    /// The programs beside this one; another outlast may be named.
    pub(super) fn find(outlast: Option<PathBuf>) -> Result<Programs, String> {
        let beside = |name: &str| {
            let path = env::current_exe().ok()?.parent()?.join(name);
            path.canonicalize().ok()
        };
        let find = |name: &str| beside(name).ok_or_else(|| format!("no `{name}` beside this program: build it first"));
        let outlast = match outlast {
            Some(path) => path.canonicalize().map_err(|error| format!("{}: {error}", path.display()))?,
            None => find("outlast-under-test")?,
        };
        Ok(Programs { outlast, puppet: find("outlast-puppet")?, composer: find("outlast-composer")? })
    }
}

/// `outlast gateway --listen`.
struct Gateway {
    child: Child,
    process: Process,
    address: String,
}

pub(super) struct World {
    programs: Programs,
    /// Scratch files; they are kept if a promise was broken.
    pub scratch: PathBuf,
    project: PathBuf,
    home: PathBuf,
    marker: String,
    pub ledger: Arc<Ledger>,
    pub disk: Disk,
    pub clock: Option<Clock>,
    /// A part that is killed and started again is absent for a moment.
    connections: Mutex<Vec<(Part, Arc<Connection>)>>,
    gateway: Mutex<Option<Gateway>>,
    /// No further faults.
    is_over: AtomicBool,
}

impl World {
    pub(super) fn new(programs: Programs, scratch: PathBuf, ledger: Arc<Ledger>) -> World {
        let (project, home) = (scratch.join("project"), scratch.join("home"));
        for path in [&project, &home] {
            fs::create_dir_all(path).expect("the scratch directory can be written");
        }
        let disk = Disk::new(&project.join(".outlast"), DISK_MEGABYTES);
        let clock = Clock::new(&scratch);
        let marker = scratch.file_name().expect("a directory has a name").to_string_lossy().into_owned();
        let world = World {
            programs,
            project,
            home,
            marker,
            ledger,
            disk,
            clock,
            connections: Mutex::new(Vec::new()),
            gateway: Mutex::new(None),
            is_over: AtomicBool::new(false),
            scratch,
        };
        world.write_source(0);
        world.write_config(0, true);
        world
    }

    pub(super) fn end_faults(&self) {
        self.is_over.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst) || self.ledger.has_breach()
    }

    /// The file of executed calls.
    pub(super) fn executions(&self) -> PathBuf {
        self.scratch.join("executions")
    }

    /// `outlast` with these arguments, and with its stderr in a file.
    fn outlast(&self, args: &[&str], stderr: &str) -> Command {
        let file = fs::OpenOptions::new().create(true).append(true).open(self.scratch.join(stderr));
        let mut command = match self.disk {
            Disk::Small { .. } => Command::new(&self.programs.outlast),
            // A write beyond the limit must be an error, and not a signal.
            Disk::FileLimit => {
                let mut shell = Command::new("sh");
                shell.args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"]).arg(&self.programs.outlast);
                shell
            }
        };
        command.args(args).current_dir(&self.project).stderr(file.expect("the scratch directory can be written"));
        let path = env::var_os("PATH").unwrap_or_default();
        command.env_clear().env("PATH", path).env("HOME", &self.home).env("TERM", "xterm").env(MARKER, &self.marker);
        if let Some(clock) = &self.clock {
            command.envs(clock.environment());
        }
        command
    }

    /// The command line of the server behind `outlast mcp`.
    fn server(&self) -> Vec<String> {
        let text = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
        let broken = self.project.join("broken");
        [&text(&self.programs.puppet), "--ledger", &text(&self.executions()), "--fail-if", &text(&broken)]
            .map(str::to_owned)
            .to_vec()
    }

    // ---- stdio: `mcp`, and `gateway --stdio`

    /// Starts a part that has one client on its stdin and stdout.
    pub(super) fn connect(&self, part: Part) {
        let grace = ["--stdin-grace", "0.3", "--term-grace", "0.3"];
        let name = ["--name", part.name()];
        let mcp = ["mcp", "--call-timeout", "4", "--drain", "5", "--on-clean-exit", "restart"];
        let server = self.server();
        let server: Vec<&str> = server.iter().map(String::as_str).collect();
        let args = match part {
            Part::Relay => [&mcp[..], &name, &grace, &["--hold", "20", "--watch", "source", "--"], &server].concat(),
            // Its calls do not wait for the next server: they are answered as not sent.
            Part::ShortRelay => [&mcp[..], &name, &grace, &["--hold", "0.2", "--"], &server].concat(),
            _ => [&["gateway", "--config", "short.toml", "--stdio"][..], &name, &grace].concat(),
        };
        let command = self.outlast(&args, &format!("{}.stderr", part.name()));
        match Connection::open(part.name(), command, &self.ledger) {
            Ok(connection) => {
                let mut connections = lock(&self.connections);
                connections.retain(|(known, _)| *known != part);
                connections.push((part, connection));
            }
            Err(error) => self.ledger.breach(format!("{}: cannot be started: {error}", part.name())),
        }
    }

    pub(super) fn connection(&self, part: Part) -> Option<Arc<Connection>> {
        let connections = lock(&self.connections);
        connections.iter().find(|(known, _)| *known == part).map(|(_, connection)| Arc::clone(connection))
    }

    // ---- gateway

    pub(super) fn start_gateway(&self) -> Result<(), String> {
        let args = ["gateway", "--config", "outlast.toml", "--listen", "127.0.0.1:0", "--name", "gateway"];
        let grace = ["--stdin-grace", "0.3", "--term-grace", "0.3"];
        let mut command = self.outlast(&[&args[..], &grace].concat(), "gateway.stderr");
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().map_err(|error| error.to_string())?;
        let process = Process::of(child.id()).ok_or("the gateway ended at once")?;
        let address = self.until("the address of the gateway", || {
            let said = fs::read_to_string(self.scratch.join("gateway.stderr")).ok()?;
            Some(said.split_once("listening on http://")?.1.split('/').next()?.to_owned())
        });
        let address = address.ok_or("no address")?;
        *lock(&self.gateway) = Some(Gateway { child, process, address });
        Ok(())
    }

    /// Ends it as an operator does.
    pub(super) fn end_gateway(&self) -> Option<ExitStatus> {
        let mut gateway = lock(&self.gateway).take()?;
        gateway.process.signal(Signal::SIGTERM);
        self.until("the end of the gateway", || gateway.child.try_wait().ok().flatten())
    }

    pub(super) fn address(&self) -> String {
        lock(&self.gateway).as_ref().expect("the gateway was started").address.clone()
    }

    /// Versions differ in a setting that restarts a backend, and in a backend that only some of them have.
    pub(super) fn write_config(&self, version: u64, in_place: bool) {
        let ledger = self.executions();
        let backend = |name: &str, children: &str| {
            format!(
                "[[backend]]\nname = {name:?}\ncommand = {:?}\nargs = [\"--ledger\", {ledger:?}]\nchildren = {children}\n\
                 env = {{ {MARKER} = {:?}, VERSION = \"{version}\" }}\n\
                 delay_first = \"50ms\"\ndelay_max = \"500ms\"\nmax_restarts = 0\ncall_timeout = \"4s\"\n\
                 breaker = {{ failures = 0 }}\n\n",
                self.programs.puppet, self.marker
            )
        };
        let limits = |hold: &str| format!("[limits]\nhold = {hold:?}\n\n");
        let mut text =
            [limits("20s"), backend("a", "\"shared\""), backend("b", "{ pool = 2 }"), backend("c", "\"per_session\"")]
                .concat();
        if version % 2 == 1 {
            text.push_str(&backend("d", "\"shared\""));
        }
        self.write("outlast.toml", &text, in_place);
        self.write("short.toml", &[limits("50ms"), backend("a", "\"shared\"")].concat(), in_place);
    }

    pub(super) fn write_broken_config(&self, version: u64, in_place: bool) {
        let texts =
            ["[[backend]\nname =", "[[backend]]\nname = \"a\"\n", "\u{0}\u{1}\u{fffd}", "[gateway]\nlisten = 17\n"];
        self.write("outlast.toml", texts[version as usize % texts.len()], in_place);
    }

    /// The file that the relay watches. While it is broken, no new server becomes ready.
    pub(super) fn write_source(&self, version: u64) {
        let _ = fs::remove_file(self.project.join("broken"));
        self.write("source", &format!("version {version}\n"), version.is_multiple_of(2));
    }

    pub(super) fn write_broken_source(&self, version: u64) {
        self.write("broken", "SyntaxError: this version does not work", true);
        self.write("source", &format!("broken version {version}\n"), version.is_multiple_of(2));
    }

    fn write(&self, name: &str, text: &str, in_place: bool) {
        let path = self.project.join(name);
        let target = if in_place { path.clone() } else { self.project.join(format!(".{name}.new")) };
        fs::write(&target, text).and_then(|()| fs::rename(&target, &path)).expect("the project can be written");
    }

    // ---- session

    /// Starts `outlast run` in the background.
    pub(super) fn start_session(&self) {
        let composer = self.programs.composer.to_str().expect("a path in UTF-8").to_owned();
        let args = ["run", "-d", "--session", "session", "--env-pass", MARKER, "--", &composer];
        if let Err(problem) = self.ask(&args) {
            self.ledger.breach(format!("session: {problem}"));
        }
        self.until_ready();
    }

    /// The session's own status.
    pub(super) fn session_state(&self) -> Option<Value> {
        let output = self.ask(&["state", "session", "--json"]).ok()?;
        serde_json::from_slice(&output.stdout).ok()
    }

    /// Brings the session back, as a user would: a halted session is resumed, a waiting one is restarted.
    pub(super) fn until_ready(&self) {
        let ready = self.until("the session to be ready", || {
            let state = self.session_state()?;
            match state["state"].as_str() {
                Some("ready") => return Some(()),
                Some("halted") => drop(self.ask(&["resume", "session"])),
                Some("backoff" | "waiting" | "exited") => drop(self.ask(&["restart", "session"])),
                _ => {}
            }
            None
        });
        if ready.is_none() {
            let state = self.session_state().map(|state| state.to_string());
            self.ledger.breach(format!("session: it does not come back: {}", state.unwrap_or_default()));
        }
    }

    /// A terminal with `outlast attach` in it, which `script` provides.
    pub(super) fn viewer(&self) -> io::Result<Child> {
        let outlast = self.programs.outlast.to_str().expect("a path in UTF-8");
        let command = self.outlast(&[], "viewers.stderr");
        let mut viewer = Command::new("script");
        for (name, value) in command.get_envs() {
            viewer.env(name, value.unwrap_or_default());
        }
        viewer.args(["-q", "-c", &format!("exec {outlast} attach session"), "/dev/null"]).current_dir(&self.project);
        viewer.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
    }

    // ---- all kinds

    /// The outlast of a part.
    pub(super) fn process(&self, part: Part) -> Option<Process> {
        match part {
            Part::Gateway => lock(&self.gateway).as_ref().map(|gateway| gateway.process),
            Part::Session => {
                let pid = self.session_state()?["outlast_pid"].as_u64()?;
                Process::of(u32::try_from(pid).ok()?)
            }
            Part::Machine => None,
            part => Some(self.connection(part)?.outlast),
        }
    }

    /// All outlasts that serve.
    pub(super) fn outlasts(&self) -> Vec<Process> {
        Part::ALL.into_iter().filter_map(|part| self.process(part)).collect()
    }

    /// The servers of an outlast, or its agent, without their children.
    pub(super) fn servers(&self, outlast: Process) -> Vec<Process> {
        let is_server = |process: &Process| {
            (process.runs(&self.programs.puppet) || process.runs(&self.programs.composer))
                && processes::parent(*process).is_some_and(|parent| parent.runs(&self.programs.outlast))
        };
        processes::below(outlast.pid).into_iter().filter(is_server).collect()
    }

    /// The monitor of a server.
    pub(super) fn monitor(&self, server: Process) -> Option<Process> {
        processes::parent(server).filter(|parent| parent.runs(&self.programs.outlast))
    }

    pub(super) fn keeper(&self, outlast: Process) -> Option<Process> {
        let monitors: Vec<Process> =
            self.servers(outlast).into_iter().filter_map(|server| self.monitor(server)).collect();
        let children = processes::children(outlast.pid);
        children.into_iter().find(|child| child.runs(&self.programs.outlast) && !monitors.contains(child))
    }

    /// Runs a command of outlast and waits for its exit.
    pub(super) fn ask(&self, args: &[&str]) -> Result<Output, String> {
        let mut command = self.outlast(args, "commands.stderr");
        let words = format!("outlast {}", args.join(" "));
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(|error| format!("`{words}`: {error}"))?;
        let deadline = Instant::now() + HUNG_AFTER;
        // The output of these commands fits into a pipe.
        while child.try_wait().map_err(|error| error.to_string())?.is_none() {
            if deadline < Instant::now() {
                let _ = child.kill();
                let problem = format!("`{words}` did not end within {} s", HUNG_AFTER.as_secs());
                self.ledger.breach(problem.clone());
                return Err(problem);
            }
            thread::sleep(Duration::from_millis(5));
        }
        child.wait_with_output().map_err(|error| error.to_string())
    }

    /// The control socket of a part must answer.
    pub(super) fn check_socket(&self, part: Part) {
        let answers = |output: Output| output.status.success();
        if !self.ask(&["state", part.name(), "--json"]).is_ok_and(answers) {
            self.ledger.breach(format!("{}: `outlast state` failed", part.name()));
        }
    }

    /// Waits for a required condition; None if it does not come.
    pub(super) fn until<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + HUNG_AFTER;
        loop {
            if let Some(found) = look() {
                return Some(found);
            }
            if deadline < Instant::now() {
                eprintln!("chaos: waited in vain for {what}");
                return None;
            }
            thread::sleep(LOOK);
        }
    }

    /// The variable that all processes of the run have.
    pub(super) fn marker(&self) -> String {
        format!("{MARKER}={}", self.marker)
    }

    /// All processes of the run that still exist.
    pub(super) fn left(&self) -> Vec<Process> {
        let mut left = processes::below(std::process::id());
        left.extend(processes::marked(&self.marker()));
        left.sort();
        left.dedup();
        left
    }

    /// What outlast recorded about the faults: audit events by type, and errors about missing descriptors.
    pub(super) fn records(&self) -> BTreeMap<String, usize> {
        let mut records = BTreeMap::new();
        let files = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
        for path in files(&self.project.join(".outlast")).chain(files(&self.scratch)) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let text = || String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned();
            if name.starts_with("audit") {
                let events = text();
                let types = events.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
                for event in types.filter_map(|record| record["props"]["event_type"].as_str().map(str::to_owned)) {
                    *records.entry(event).or_default() += 1;
                }
            } else if name.ends_with(".stderr") {
                *records.entry("too many open files".to_owned()).or_default() +=
                    text().to_lowercase().matches("too many open files").count();
            }
        }
        records
    }

    pub(super) fn holdings(&self, part: Part) -> Option<Holdings> {
        let outlast = self.process(part)?;
        let all = processes::below(outlast.pid);
        let own = all.iter().filter(|process| process.runs(&self.programs.outlast));
        let memory = outlast.memory() + own.map(|process| process.memory()).sum::<u64>();
        Some(Holdings { processes: all.len(), descriptors: outlast.descriptors(), memory })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread panics while it holds this")
}

/// The resources of an outlast at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holdings {
    /// Processes below it.
    pub processes: usize,
    /// Its own descriptors.
    pub descriptors: usize,
    /// Memory of itself, its keeper and its monitors.
    pub memory: u64,
}
