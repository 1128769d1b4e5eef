//! A NATS server and three replicas, and a gateway with the same backends that is not in a cluster.

use std::{
    collections::BTreeMap,
    env, fs, io,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use tempfile::TempDir;

use crate::bench::gateway::{client::Session, subject::Running};

pub(super) const REPLICAS: [&str; 3] = ["a", "b", "c"];
/// On a busy machine programs start slowly.
const START_MAX: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);

/// The programs.
pub(super) struct Stage {
    outlast: PathBuf,
    echo: PathBuf,
    puppet: PathBuf,
    nats: PathBuf,
}

impl Stage {
    pub(super) fn set(outlast: Option<PathBuf>) -> io::Result<Stage> {
        let beside = env::current_exe()?.parent().expect("a program lies in a directory").canonicalize()?;
        let peers = env::var_os("OUTLAST_PEERS").map(PathBuf::from);
        let peers = peers.ok_or_else(|| io::Error::other("OUTLAST_PEERS is not set; `cargo xtask bench` sets it"))?;
        let stage = Stage {
            outlast: outlast.unwrap_or_else(|| beside.join("outlast")),
            echo: beside.join("outlast-echo"),
            puppet: beside.join("outlast-puppet"),
            nats: peers.join("nats/bin/nats-server"),
        };
        for program in [&stage.outlast, &stage.echo, &stage.puppet, &stage.nats] {
            if !program.is_file() {
                return Err(io::Error::other(format!("there is no {}", program.display())));
            }
        }
        Ok(stage)
    }
}

/// A `nats-server` that this benchmark started, and ends.
struct Nats {
    child: Child,
    url: String,
}

impl Nats {
    fn start(program: &Path, dir: &Path) -> io::Result<Nats> {
        let store = dir.join("store");
        let text = format!("listen: \"127.0.0.1:-1\"\nports_file_dir: {dir:?}\njetstream {{ store_dir: {store:?} }}\n");
        let config = dir.join("nats.conf");
        fs::write(&config, text)?;
        let log = fs::File::create(dir.join("nats.log"))?;
        let mut command = Command::new(program);
        let child = command.arg("-c").arg(config).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn()?;
        let mut nats = Nats { child, url: String::new() };
        let file = dir.join(format!("nats-server_{}.ports", nats.child.id()));
        // The file is written when it listens.
        nats.url = until("nats-server", || {
            let ports: Value = serde_json::from_slice(&fs::read(&file).ok()?).ok()?;
            ports["nats"][0].as_str().map(str::to_owned)
        })?;
        Ok(nats)
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(super) struct Gateway {
    running: Running,
    directory: PathBuf,
    outlast: PathBuf,
}

impl Gateway {
    pub(super) fn address(&self) -> &str {
        &self.running.address
    }

    /// With SIGKILL, as in a crash.
    pub(super) fn kill(&self) {
        self.running.kill();
    }

    /// A session that calls this tool.
    pub(super) fn open(&self, tool: &str) -> io::Result<Session> {
        let mut session = Session::open(self.address())?;
        session.choose_tool(tool);
        Ok(session)
    }

    pub(super) fn open_many(&self, tool: &str, count: usize) -> io::Result<Vec<Session>> {
        (0..count).map(|_| self.open(tool)).collect()
    }

    /// A command about it, as in another terminal.
    pub(super) fn outlast(&self, args: &[&str]) -> io::Result<Vec<u8>> {
        let mut command = Command::new(&self.outlast);
        let output = command.args(args).current_dir(&self.directory).env("HOME", &self.directory).output()?;
        match output.status.success() {
            true => Ok(output.stdout),
            false => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned())),
        }
    }

    fn state(&self) -> io::Result<Value> {
        Ok(serde_json::from_slice(&self.outlast(&["state", "--json"])?)?)
    }

    /// Every backend is ready and known, and NATS answers.
    fn is_ready(&self, is_replica: bool) -> bool {
        let Ok(state) = self.state() else { return false };
        let is_ready = |backend: &Value| backend["state"] == "ready" && backend["catalogue"] == "confirmed";
        let backends = state["backends"].as_array().map_or(&[][..], Vec::as_slice);
        !backends.is_empty() && backends.iter().all(is_ready) && (!is_replica || state["cluster"]["connected"] == true)
    }

    fn owner(&self, backend: &str) -> Option<String> {
        let state = self.state().ok()?;
        let known = state["backends"].as_array()?.iter().find(|known| known["name"] == backend)?.clone();
        known["owner"].as_str().map(str::to_owned)
    }
}

/// Its backends: `each` echoes on each replica, `one` on one of them; `book` and `ledger`, too, and they record each call in
/// one file.
pub(super) struct Team {
    /// Before NATS, because they are dropped in this order.
    replicas: Vec<Gateway>,
    nats: Nats,
    directory: TempDir,
    calls: AtomicU64,
}

impl Team {
    pub(super) fn start(stage: &Stage) -> io::Result<Team> {
        let directory = tempfile::tempdir()?;
        let nats = Nats::start(&stage.nats, directory.path())?;
        let mut team = Team { replicas: Vec::new(), nats, directory, calls: AtomicU64::new(0) };
        for name in REPLICAS {
            let gateway = team.launch(stage, Some(name))?;
            team.replicas.push(gateway);
        }
        for replica in &team.replicas {
            until("a replica", || replica.is_ready(true).then_some(()))?;
        }
        Ok(team)
    }

    /// The same backends, without `[cluster]`.
    pub(super) fn start_alone(&self, stage: &Stage) -> io::Result<Gateway> {
        let gateway = self.launch(stage, None)?;
        until("the gateway", || gateway.is_ready(false).then_some(()))?;
        Ok(gateway)
    }

    fn launch(&self, stage: &Stage, replica: Option<&str>) -> io::Result<Gateway> {
        let directory = self.directory.path().join(replica.unwrap_or("alone"));
        fs::create_dir(&directory)?;
        let (cluster, placement) = match replica {
            Some(name) => {
                let url = &self.nats.url;
                let cluster = format!("[cluster]\nnats = [{url:?}]\nname = \"bench\"\nreplica = {name:?}\n\n");
                (cluster, "placement = \"one\"\n")
            }
            None => (String::new(), ""),
        };
        let (echo, puppet) = (stage.echo.display().to_string(), stage.puppet.display().to_string());
        let ledger = self.ledger().display().to_string();
        let echo = |name: &str, more: &str| format!("[[backend]]\nname = {name:?}\ncommand = {echo:?}\n{more}\n");
        let book = |name: &str, more: &str| {
            let args = format!("args = [\"--era\", \"legacy\", \"--ledger\", {ledger:?}]\n");
            format!("[[backend]]\nname = {name:?}\ncommand = {puppet:?}\n{args}{more}\n")
        };
        let text =
            cluster + &echo("each", "") + &echo("one", placement) + &book("book", "") + &book("ledger", placement);
        fs::write(directory.join("outlast.toml"), text)?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
        let mut command = Command::new(&stage.outlast);
        command.args(["gateway", "--config", "outlast.toml", "--listen", &format!("127.0.0.1:{port}")]);
        let running = Running::launch(command, &directory, &port).map_err(|problem| {
            let said = fs::read_to_string(directory.join("stderr")).unwrap_or_default();
            io::Error::other(format!("a gateway {problem}: {said}"))
        })?;
        Ok(Gateway { running, directory, outlast: stage.outlast.clone() })
    }

    pub(super) fn replicas(&self) -> &[Gateway] {
        &self.replicas
    }

    /// The replica that owns a backend, and the others.
    pub(super) fn owner(&self, backend: &str) -> io::Result<(&Gateway, [&Gateway; 2])> {
        let name = until("an owner", || self.replicas[0].owner(backend))?;
        let at = REPLICAS.iter().position(|replica| *replica == name);
        let at = at.ok_or_else(|| io::Error::other(format!("the owner is {name:?}")))?;
        let other = |step: usize| &self.replicas[(at + step) % REPLICAS.len()];
        Ok((&self.replicas[at], [other(1), other(2)]))
    }

    fn ledger(&self) -> PathBuf {
        self.directory.path().join("ledger")
    }

    /// A number for a call that the ledger records.
    pub(super) fn next_call(&self) -> u64 {
        self.calls.fetch_add(1, Ordering::Relaxed)
    }

    /// How often each call was executed.
    pub(super) fn executed(&self) -> BTreeMap<u64, usize> {
        let mut executed = BTreeMap::new();
        for line in fs::read_to_string(self.ledger()).unwrap_or_default().lines() {
            if let Some(call) = line.split(' ').next().and_then(|call| call.parse().ok()) {
                *executed.entry(call).or_insert(0) += 1;
            }
        }
        executed
    }
}

/// Asks again until there is a value.
pub(super) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> io::Result<T> {
    let deadline = Instant::now() + START_MAX;
    loop {
        match look() {
            Some(value) => return Ok(value),
            None if deadline < Instant::now() => return Err(io::Error::other(format!("{what} did not come"))),
            None => thread::sleep(LOOK),
        }
    }
}
