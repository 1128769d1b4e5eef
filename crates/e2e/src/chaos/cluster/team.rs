//! The processes of a cluster: three NATS servers and three replicas, each in a network namespace of its own or with a proxy
//! between each replica and each server, and the small disks of all of them.

use std::{
    collections::BTreeMap,
    env, fs,
    io::{Read, Seek, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::Value;

use super::{
    super::{
        http::KEY_SHA256,
        ledger::{HUNG_AFTER, Ledger},
        machine::Disk,
        processes::{self, Process},
        world::{MARKER, Programs},
    },
    nats::{self, Server},
    network::{Network, SERVERS, Sides},
    proxy::{Mode, Proxy},
};

pub(super) const REPLICAS: [&str; 3] = ["a", "b", "c"];
/// How often a thread checks a state that it waits for.
const LOOK: Duration = Duration::from_millis(50);
/// The state and the logs of a replica fit into it.
const DISK_MEGABYTES: u32 = 48;
/// The exit code of a process of `one` that meets another one.
pub(super) const TWO_AT_ONCE: u32 = 99;

/// One process of a replica, for its clients.
#[derive(Clone)]
pub(super) struct Life {
    pub address: String,
    /// The driver has ended it, or is about to: its connections may break.
    pub is_ended: Arc<AtomicBool>,
}

struct Running {
    child: Child,
    process: Process,
    life: Life,
}

struct Replica {
    /// None with network namespaces.
    proxies: Vec<Proxy>,
    running: Option<Running>,
    /// How often it was started.
    starts: u64,
}

pub(super) struct Team {
    programs: Programs,
    /// Kept if a promise was broken.
    pub scratch: PathBuf,
    marker: String,
    pub ledger: Arc<Ledger>,
    pub network: Arc<Network>,
    pub nats: Mutex<Vec<Server>>,
    /// Of the state directories.
    pub disks: [Disk; 3],
    replicas: [Mutex<Replica>; 3],
    /// No further faults.
    is_over: AtomicBool,
    /// Everything works again.
    is_restored: AtomicBool,
    /// Clients that every backend has answered.
    warm: AtomicUsize,
    /// Answers with HTTP 503, counted by their text.
    unavailable: Mutex<BTreeMap<String, u64>>,
    begun: Instant,
}

impl Team {
    pub(super) fn new(programs: Programs, nats: &Path, scratch: PathBuf, ledger: Arc<Ledger>) -> Result<Team, String> {
        let marker = name_of(&scratch);
        let network = Arc::new(Network::new());
        println!("network: {}", network.name());
        let servers = nats::start(nats, &scratch, (MARKER, &marker), &network)?;
        let disks = REPLICAS.map(|name| Disk::new(&scratch.join(name).join(".outlast"), DISK_MEGABYTES));
        println!("disks: {}", disks[0].name());
        let mut replicas = Vec::new();
        for _ in REPLICAS {
            let proxied = servers.iter().filter(|_| !network.has_namespaces());
            let proxies: Result<Vec<Proxy>, _> = proxied.map(|server| Proxy::start(server.port)).collect();
            let proxies = proxies.map_err(|error| error.to_string())?;
            replicas.push(Mutex::new(Replica { proxies, running: None, starts: 0 }));
        }
        let replicas = replicas.try_into().map_err(|_| "three replicas")?;
        let team = Team {
            programs,
            scratch,
            marker,
            ledger,
            network,
            nats: Mutex::new(servers),
            disks,
            replicas,
            is_over: AtomicBool::new(false),
            is_restored: AtomicBool::new(false),
            warm: AtomicUsize::new(0),
            unavailable: Mutex::new(BTreeMap::new()),
            begun: Instant::now(),
        };
        for replica in 0..REPLICAS.len() {
            let text = team.config(replica);
            fs::write(team.dir(replica).join("outlast.toml"), text).map_err(|error| error.to_string())?;
        }
        Ok(team)
    }

    pub(super) fn end_faults(&self) {
        self.is_over.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst) || self.ledger.has_breach()
    }

    pub(super) fn restored(&self) {
        self.is_restored.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_restored(&self) -> bool {
        self.is_restored.load(Ordering::SeqCst)
    }

    pub(super) fn warmed(&self) {
        self.warm.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn warm_clients(&self) -> usize {
        self.warm.load(Ordering::SeqCst)
    }

    pub(super) fn unavailable(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        lock_of(&self.unavailable)
    }

    /// Adds a line to the story of the run, which is kept with the other files if a promise was broken.
    pub(super) fn note(&self, text: &str) {
        let file = fs::OpenOptions::new().create(true).append(true).open(self.scratch.join("story"));
        let line = format!("{:9.3} {text}\n", self.begun.elapsed().as_secs_f64());
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the scratch directory can be written");
    }

    /// Waits for so long, or until there are no further faults.
    pub(super) fn pause(&self, length: Duration) {
        let end = Instant::now() + length;
        while Instant::now() < end && !self.is_over() {
            thread::sleep(LOOK.min(end.saturating_duration_since(Instant::now())));
        }
    }

    /// The file of executed calls.
    pub(super) fn executions(&self) -> PathBuf {
        self.scratch.join("executions")
    }

    pub(super) fn dir(&self, replica: usize) -> PathBuf {
        self.scratch.join(REPLICAS[replica])
    }

    fn config(&self, replica: usize) -> String {
        let executions = self.executions();
        let common = format!(
            "env = {{ {MARKER} = {:?} }}\ndelay_first = \"50ms\"\ndelay_max = \"500ms\"\nmax_restarts = 0\n\
             call_timeout = \"4s\"\nbreaker = {{ failures = 0 }}\n\n",
            self.marker
        );
        let puppet = self.programs.puppet.to_str().expect("a path in UTF-8");
        let lock = self.scratch.join("lock");
        let urls: Vec<String> = match self.network.has_namespaces() {
            true => lock_of(&self.nats).iter().map(Server::url).collect(),
            false => {
                let proxies = &lock_of(&self.replicas[replica]).proxies;
                proxies.iter().map(|proxy| format!("nats://127.0.0.1:{}", proxy.port)).collect()
            }
        };
        let mut text = format!(
            "[limits]\nhold = \"20s\"\n\n[cluster]\nnats = {urls:?}\nname = \"chaos\"\nreplica = {:?}\nreplicas = 3\n\n",
            REPLICAS[replica]
        );
        if self.network.has_namespaces() {
            // Beyond loopback clients need a key, and all of them have the same one.
            text += &format!(
                "[gateway]\nsessions_per_client = 1024\n\n[[auth.key]]\nname = \"client\"\nsha256 = {KEY_SHA256:?}\n\n"
            );
        }
        for (name, children) in [("each", "shared"), ("own", "per_session")] {
            text += &format!(
                "[[backend]]\nname = {name:?}\ncommand = {puppet:?}\nargs = [\"--ledger\", {executions:?}]\n\
                 children = {children:?}\n{common}"
            );
        }
        // A second process at the same time does not get the lock, and exits.
        text += &format!(
            "[[backend]]\nname = \"one\"\ncommand = \"flock\"\n\
             args = [\"-n\", \"-E\", \"{TWO_AT_ONCE}\", {lock:?}, {puppet:?}, \"--ledger\", {executions:?}]\n\
             placement = \"one\"\n{common}"
        );
        text
    }

    fn outlast(&self, replica: usize, args: &[&str], stderr: &Path) -> Command {
        let mut command = match self.disks[replica] {
            Disk::Small { .. } => self.network.command(SERVERS + replica, &self.programs.outlast),
            // A write beyond the limit must be an error, and not a signal.
            Disk::FileLimit => {
                let mut shell = self.network.command(SERVERS + replica, Path::new("sh"));
                shell.args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"]).arg(&self.programs.outlast);
                shell
            }
        };
        let dir = self.dir(replica);
        let file = fs::OpenOptions::new().create(true).append(true).open(stderr);
        command.args(args).current_dir(&dir).stderr(file.expect("the scratch directory can be written"));
        let path = env::var_os("PATH").unwrap_or_default();
        command.env_clear().env("PATH", path).env("HOME", &dir).env("TERM", "xterm").env(MARKER, &self.marker);
        command
    }

    // ---- replicas

    /// Starts a replica. Its address is another one each time.
    pub(super) fn start(&self, replica: usize) -> Result<(), String> {
        let name = REPLICAS[replica];
        let mut slot = lock_of(&self.replicas[replica]);
        slot.starts += 1;
        let stderr = self.scratch.join(format!("{name}-{}.stderr", slot.starts));
        let listen = format!("{}:0", self.network.outer(SERVERS + replica));
        let args = ["gateway", "--config", "outlast.toml", "--listen", &listen, "--name", name];
        let grace = ["--stdin-grace", "0.3", "--term-grace", "0.3"];
        let mut command = self.outlast(replica, &[&args[..], &grace].concat(), &stderr);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let mut child = child.map_err(|error| error.to_string())?;
        let deadline = Instant::now() + HUNG_AFTER;
        let address = loop {
            let said = fs::read_to_string(&stderr).unwrap_or_default();
            let line = said.lines().find_map(|line| line.split_once("listening on http://"));
            if let Some(address) = line.and_then(|(_, rest)| rest.split('/').next()) {
                break address.to_owned();
            }
            let ended = child.try_wait().map_err(|error| error.to_string())?;
            if let Some(status) = ended {
                return Err(format!("replica {name} did not start ({status}): {}", said.trim()));
            }
            if deadline < Instant::now() {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("replica {name} does not listen: {}", said.trim()));
            }
            thread::sleep(LOOK);
        };
        let process = Process::of(child.id()).ok_or("it ended at once")?;
        let life = Life { address, is_ended: Arc::new(AtomicBool::new(false)) };
        slot.running = Some(Running { child, process, life });
        Ok(())
    }

    pub(super) fn life(&self, replica: usize) -> Option<Life> {
        // While it is started again, the lock is held.
        let slot = self.replicas[replica].try_lock().ok()?;
        slot.running.as_ref().map(|running| running.life.clone())
    }

    pub(super) fn process(&self, replica: usize) -> Option<Process> {
        lock_of(&self.replicas[replica]).running.as_ref().map(|running| running.process)
    }

    /// Ends a replica with this signal; all its processes must end too. Its exit code, if it exited.
    pub(super) fn end(&self, replica: usize, signal: Signal) -> Option<i32> {
        let running = lock_of(&self.replicas[replica]).running.take();
        let mut running = running?;
        let name = REPLICAS[replica];
        let below = processes::below(running.process.pid);
        running.life.is_ended.store(true, Ordering::SeqCst);
        running.process.signal(signal);
        let deadline = Instant::now() + HUNG_AFTER;
        let status = loop {
            match running.child.try_wait() {
                Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
                Ok(Some(status)) => break Some(status),
                _ => break None,
            }
        };
        if status.is_none() {
            self.ledger.breach(format!("replica {name} does not end after {signal}"));
            running.process.signal(Signal::SIGKILL);
            let _ = running.child.wait();
        }
        for left in processes::wait_gone(&below, HUNG_AFTER) {
            self.ledger.breach(format!("replica {name}: process {} was left behind: {}", left.pid, left.command()));
        }
        status.and_then(|status| status.code())
    }

    /// Cuts the connections of a replica to all NATS servers, or opens them.
    pub(super) fn connect(&self, replica: usize, mode: Mode) {
        for proxy in &lock_of(&self.replicas[replica]).proxies {
            proxy.set(mode);
        }
        let node = SERVERS + replica;
        let alone = Sides::from([(node, 1)]);
        let changed = match mode {
            Mode::Open => self.network.link(node, true).and_then(|()| self.network.separate(&Sides::new())),
            Mode::Cut => self.network.link(node, false),
            Mode::Silent => self.network.separate(&alone),
        };
        if let Err(problem) = changed {
            self.ledger.breach(problem);
        }
    }

    /// Separates NATS servers and replicas. Without namespaces only replicas are separated from servers.
    pub(super) fn separate(&self, sides: &Sides) {
        let side = |node: usize| sides.get(&node).copied().unwrap_or(0);
        for replica in 0..REPLICAS.len() {
            for (server, proxy) in lock_of(&self.replicas[replica]).proxies.iter().enumerate() {
                proxy.set(if side(server) == side(SERVERS + replica) { Mode::Open } else { Mode::Silent });
            }
        }
        if let Err(problem) = self.network.separate(sides) {
            self.ledger.breach(problem);
        }
    }

    fn is_puppet(&self, process: &Process) -> bool {
        process.runs(&self.programs.puppet)
    }

    /// The replica that runs the process of `one`, the process, and the one that holds its lock.
    pub(super) fn one(&self) -> Option<(usize, Process, Process)> {
        (0..REPLICAS.len()).find_map(|replica| {
            let below = processes::below(self.process(replica)?.pid);
            below.into_iter().filter(|process| self.is_puppet(process)).find_map(|process| {
                let parent = processes::parent(process)?;
                parent.command().starts_with("flock ").then_some((replica, process, parent))
            })
        })
    }

    /// The processes of the backends that every replica has.
    pub(super) fn locals(&self, replica: usize) -> Vec<Process> {
        let below = self.process(replica).map(|process| processes::below(process.pid)).unwrap_or_default();
        let is_local = |process: &Process| {
            self.is_puppet(process)
                && processes::parent(*process).is_some_and(|parent| parent.runs(&self.programs.outlast))
        };
        below.into_iter().filter(is_local).collect()
    }

    // ---- commands

    /// Runs a command in the directory of a replica, and waits for its exit. Its output goes through a file, since it may be long.
    pub(super) fn ask(&self, replica: usize, args: &[&str]) -> Result<Output, String> {
        let mut file = tempfile::tempfile_in(&self.scratch).map_err(|error| error.to_string())?;
        let mut command = self.outlast(replica, args, &self.scratch.join("commands.stderr"));
        let stdout = file.try_clone().map_err(|error| error.to_string())?;
        let mut child = command.stdin(Stdio::null()).stdout(stdout).spawn().map_err(|error| error.to_string())?;
        let deadline = Instant::now() + HUNG_AFTER;
        let status = loop {
            if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
                break status;
            }
            if deadline < Instant::now() {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("`outlast {}` did not end within {} s", args.join(" "), HUNG_AFTER.as_secs()));
            }
            thread::sleep(Duration::from_millis(5));
        };
        let mut stdout = Vec::new();
        file.rewind().and_then(|()| file.read_to_end(&mut stdout)).map_err(|error| error.to_string())?;
        Ok(Output { status, stdout, stderr: Vec::new() })
    }

    pub(super) fn state(&self, replica: usize) -> Option<Value> {
        let output = self.ask(replica, &["state", REPLICAS[replica], "--json"]).ok()?;
        serde_json::from_slice(&output.stdout).ok()
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

    /// The lines of the local audit log of a replica, oldest first.
    pub(super) fn audit(&self, replica: usize) -> Vec<String> {
        let dir = self.dir(replica).join(".outlast");
        let mut files: Vec<(u32, PathBuf)> = fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                let age = name.strip_prefix("audit")?.strip_suffix(".jsonl")?;
                // `audit.jsonl` is the newest, `audit.1.jsonl` the one before.
                let age = if age.is_empty() { 0 } else { age.strip_prefix('.')?.parse().ok()? };
                Some((age, entry.path()))
            })
            .collect();
        files.sort_by(|left, right| right.cmp(left));
        let texts = files.into_iter().map(|(_, path)| fs::read(path).unwrap_or_default());
        texts.flat_map(|text| String::from_utf8_lossy(&text).lines().map(str::to_owned).collect::<Vec<_>>()).collect()
    }

    /// The variable that all processes of the run have.
    pub(super) fn marker(&self) -> String {
        format!("{MARKER}={}", self.marker)
    }

    pub(super) fn marker_of(scratch: &Path) -> String {
        format!("{MARKER}={}", name_of(scratch))
    }

    /// All processes of the run that still exist.
    pub(super) fn left(&self) -> Vec<Process> {
        let mut left = processes::below(std::process::id());
        left.extend(processes::marked(&self.marker()));
        left.sort();
        left.dedup();
        left
    }
}

fn name_of(scratch: &Path) -> String {
    scratch.file_name().expect("a directory has a name").to_string_lossy().into_owned()
}

pub(super) fn lock_of<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread panics while it holds this")
}
