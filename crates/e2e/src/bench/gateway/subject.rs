//! The subjects between client and server, and how each is started.

use std::{
    env, fs,
    fs::File,
    io,
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

use super::lists;
use crate::bench::tree::{self, Process};

/// A Python gateway on a busy machine starts slowly.
const START_MAX: Duration = Duration::from_secs(60);
const STOP_MAX: Duration = Duration::from_secs(3);
const LOOK: Duration = Duration::from_millis(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    /// The server itself, over its pipes.
    Direct,
    /// A minimal HTTP endpoint without any policy.
    Hop,
    Outlast,
    McpProxyPy,
    McpProxyJs,
    Supergateway,
    Fastmcp,
}

impl Subject {
    pub(crate) const ALL: [Subject; 7] = [
        Subject::Direct,
        Subject::Hop,
        Subject::Outlast,
        Subject::McpProxyPy,
        Subject::McpProxyJs,
        Subject::Supergateway,
        Subject::Fastmcp,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Subject::Direct => "direct, stdio",
            Subject::Hop => "bare hop",
            Subject::Outlast => "outlast",
            Subject::McpProxyPy => "mcp-proxy (PyPI)",
            Subject::McpProxyJs => "mcp-proxy (npm)",
            Subject::Supergateway => "supergateway",
            Subject::Fastmcp => "fastmcp",
        }
    }

    pub(crate) fn is_rival(self) -> bool {
        !matches!(self, Subject::Direct | Subject::Hop | Subject::Outlast)
    }

    /// Whether one process can have several servers.
    pub(crate) fn takes_many(self) -> bool {
        matches!(self, Subject::Outlast | Subject::McpProxyPy | Subject::Fastmcp)
    }
}

/// The programs, and a directory to run them in, which is removed with their state.
pub(super) struct Stage {
    directory: TempDir,
    pub echo: PathBuf,
    hop: PathBuf,
    outlast: PathBuf,
    peers: Option<PathBuf>,
}

impl Stage {
    pub(super) fn set(outlast: Option<PathBuf>) -> io::Result<Stage> {
        let beside = env::current_exe()?.parent().expect("a program lies in a directory").canonicalize()?;
        let peers = env::var_os("OUTLAST_PEERS").map(PathBuf::from).and_then(|path| path.canonicalize().ok());
        let stage = Stage {
            directory: tempfile::tempdir()?,
            echo: beside.join("outlast-echo"),
            hop: beside.join("outlast-hop"),
            outlast: outlast.unwrap_or_else(|| beside.join("outlast")),
            peers,
        };
        for program in [&stage.echo, &stage.hop] {
            if !program.is_file() {
                return Err(io::Error::other(format!("{} is not built", program.display())));
            }
        }
        Ok(stage)
    }

    fn peer(&self, file: &str) -> Option<PathBuf> {
        self.peers.as_ref().map(|peers| peers.join(file)).filter(|path| path.exists())
    }

    fn program(&self, subject: Subject) -> Option<PathBuf> {
        match subject {
            Subject::Direct => Some(self.echo.clone()),
            Subject::Hop => Some(self.hop.clone()),
            Subject::Outlast => Some(self.outlast.clone()).filter(|path| path.is_file()),
            Subject::McpProxyPy => self.peer("rivals-py/bin/mcp-proxy"),
            Subject::McpProxyJs => self.peer("rivals/node_modules/mcp-proxy/dist/bin/mcp-proxy.mjs"),
            Subject::Supergateway => self.peer("rivals/node_modules/supergateway/dist/index.js"),
            Subject::Fastmcp => self.peer("python-2/bin/fastmcp"),
        }
    }

    /// Why a subject cannot be measured here, or none.
    pub(super) fn absence(&self, subject: Subject) -> Option<&'static str> {
        match (self.program(subject), subject.is_rival()) {
            (Some(_), _) => None,
            (None, true) => Some("not provisioned in $OUTLAST_PEERS"),
            (None, false) => Some("not built"),
        }
    }

    /// Starts a gateway with this many servers behind it, and waits until it listens.
    pub(super) fn start(&self, subject: Subject, servers: usize) -> io::Result<Running> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
        let program = self.program(subject).expect("only subjects that are here are started");
        let echo = self.echo.display().to_string();
        let with = |interpreter: PathBuf| {
            let mut command = Command::new(interpreter);
            command.arg(&program);
            command
        };
        // Started with the Python of its environment: the script still names the directory that it was installed in.
        let python = || with(program.with_file_name("python"));
        let node = || with(self.peer("node/node_modules/node/bin/node").unwrap_or_else(|| "node".into()));
        let command = match subject {
            Subject::Direct => return Err(io::Error::other("has no endpoint")),
            Subject::Hop => {
                let mut command = Command::new(&program);
                command.args([&port, &echo]);
                command
            }
            Subject::Outlast => {
                let config = self.write("outlast.toml", &outlast_config(&echo, servers))?;
                let mut command = Command::new(&program);
                command.args(["gateway", "--config"]).arg(config).args(["--listen", &format!("127.0.0.1:{port}")]);
                command
            }
            Subject::McpProxyPy => {
                let mut command = python();
                command.args(["--port", &port, "--log-level", "ERROR"]);
                for number in 1..servers {
                    command.args(["--named-server", &format!("echo{number}"), &echo]);
                }
                command.args(["--", &echo]);
                command
            }
            Subject::McpProxyJs => {
                let mut command = node();
                command.args(["--port", &port, "--host", "127.0.0.1", "--server", "stream", &echo]);
                command
            }
            Subject::Supergateway => {
                let mut command = node();
                command.args(["--stdio", &echo, "--outputTransport", "streamableHttp", "--stateful"]);
                command.args(["--port", &port, "--logLevel", "none"]);
                command
            }
            Subject::Fastmcp => {
                let config = self.write("mcp.json", &fastmcp_config(&echo, servers))?;
                let mut command = python();
                command.arg("run").arg(config).args(["--transport", "http", "--host", "127.0.0.1", "--port", &port]);
                command.args(["--no-banner", "--log-level", "ERROR"]);
                command
            }
        };
        self.launch(command, &port)
    }

    /// outlast with an echo server, and with a puppet that lists these tools.
    pub(super) fn start_hostile(&self, tools: &str) -> io::Result<Running> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
        let puppet = self.echo.with_file_name("outlast-puppet").display().to_string();
        let tools = self.write("hostile-tools.json", tools)?.display().to_string();
        let hostile =
            format!("[[backend]]\nname = \"hostile\"\ncommand = {puppet:?}\nargs = [\"--tools\", {tools:?}]\n");
        let text = outlast_config(&self.echo.display().to_string(), 1) + &hostile;
        let config = self.write("outlast.toml", &text)?;
        let mut command = Command::new(&self.outlast);
        command.args(["gateway", "--config"]).arg(config).args(["--listen", &format!("127.0.0.1:{port}")]);
        self.launch(command, &port)
    }

    /// outlast with an echo server, and with this many servers of large lists.
    pub(super) fn start_lists(&self, kind: lists::Kind, servers: usize, is_changing: bool) -> io::Result<Running> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
        let program = std::env::current_exe()?.display().to_string();
        let changing = if is_changing { "changing" } else { "constant" };
        let mut text = outlast_config(&self.echo.display().to_string(), 1);
        for number in 0..servers {
            let args = format!("args = [\"lists\", {:?}, {changing:?}]", kind.name());
            // Without a prefix their names collide.
            text += &format!("[[backend]]\nname = \"lists{number}\"\ncommand = {program:?}\n{args}\n");
            text += if kind == lists::Kind::Colliding { "prefix = \"\"\n\n" } else { "\n" };
        }
        let config = self.write("outlast.toml", &text)?;
        let mut command = Command::new(&self.outlast);
        command.args(["gateway", "--config"]).arg(config).args(["--listen", &format!("127.0.0.1:{port}")]);
        self.launch(command, &port)
    }

    /// outlast with room for this many sessions, always at the same address; and the time until it answered about a
    /// session.
    pub(super) fn start_many(&self, sessions: usize) -> io::Result<(Running, Duration)> {
        let port = 40_000 + std::process::id() % 20_000;
        let text = format!("[gateway]\nsessions_max = {}\n\n", sessions * 2)
            + &outlast_config(&self.echo.display().to_string(), 1);
        let config = self.write("outlast.toml", &text)?;
        let mut command = Command::new(&self.outlast);
        command.args(["gateway", "--config"]).arg(config).args(["--listen", &format!("127.0.0.1:{port}")]);
        let start = Instant::now();
        let running = self.launch(command, &port.to_string())?;
        // For an unknown id the gateway reads all records.
        super::client::is_missing(&running.address)?;
        Ok((running, start.elapsed()))
    }

    /// The size of the session records.
    pub(super) fn session_bytes(&self) -> io::Result<u64> {
        let mut bytes = 0;
        for dir in fs::read_dir(self.directory.path().join(".outlast/gateway-sessions"))? {
            for file in fs::read_dir(dir?.path())? {
                bytes += file?.metadata()?.len();
            }
        }
        Ok(bytes)
    }

    fn launch(&self, command: Command, port: &str) -> io::Result<Running> {
        Running::launch(command, self.directory.path(), port)
    }

    fn write(&self, name: &str, text: &str) -> io::Result<PathBuf> {
        let path = self.directory.path().join(name);
        fs::write(&path, text)?;
        Ok(path)
    }
}

fn outlast_config(echo: &str, servers: usize) -> String {
    (0..servers).map(|number| format!("[[backend]]\nname = \"echo{number}\"\ncommand = {echo:?}\n\n")).collect()
}

fn fastmcp_config(echo: &str, servers: usize) -> String {
    let one = |number| format!(r#""echo{number}":{{"command":{echo:?},"args":[]}}"#);
    format!(r#"{{"mcpServers":{{{}}}}}"#, (0..servers).map(one).collect::<Vec<_>>().join(","))
}

/// A gateway that this benchmark started, and ends.
pub(in crate::bench) struct Running {
    child: Child,
    pub address: String,
}

impl Running {
    /// Starts a gateway in its directory, and waits until it listens.
    pub(in crate::bench) fn launch(mut command: Command, directory: &Path, port: &str) -> io::Result<Running> {
        let stderr = File::options().create(true).append(true).open(directory.join("stderr"))?;
        let child = command
            .current_dir(directory)
            .env("HOME", directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()?;
        let mut running = Running { child, address: format!("127.0.0.1:{port}") };
        let deadline = Instant::now() + START_MAX;
        while TcpStream::connect(&running.address).is_err() {
            if running.child.try_wait()?.is_some() || deadline < Instant::now() {
                return Err(io::Error::other("does not listen"));
            }
            thread::sleep(LOOK);
        }
        Ok(running)
    }

    fn processes(&self) -> Vec<Process> {
        tree::descent(&[self.child.id()])
    }

    /// All processes between this client and the servers.
    pub(super) fn gateway(&self, echo: &Path) -> Vec<Process> {
        self.processes().into_iter().filter(|process| !process.runs(echo)).collect()
    }

    /// The process that this benchmark started.
    pub(super) fn process(&self) -> Option<Process> {
        self.processes().into_iter().find(|process| process.pid == self.child.id())
    }

    /// With SIGKILL, as in a crash.
    pub(in crate::bench) fn kill(&self) {
        let _ = kill(Pid::from_raw(self.child.id() as i32), Signal::SIGKILL);
    }

    pub(super) fn servers(&self, echo: &Path) -> Vec<Process> {
        self.processes().into_iter().filter(|process| process.runs(echo)).collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let processes = self.processes();
        let _ = kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM);
        let deadline = Instant::now() + STOP_MAX;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(LOOK);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        for process in processes {
            process.kill();
        }
    }
}
