//! The suites, the fixture servers, and the gateway in front of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    fs::File,
    io::{Read, Write},
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
use serde_json::Value;
use tempfile::TempDir;

/// How long a server or gateway may take to be ready, on a busy machine.
const READY_MAX: Duration = Duration::from_secs(60);
/// The pause between two checks whether it is.
const LOOK: Duration = Duration::from_millis(50);
/// The time limit of one suite; it has timeouts of its own for everything in it.
const SUITE_MAX: Duration = Duration::from_secs(600);
const STOP_MAX: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Suite {
    /// The released suite, which knows revisions up to 2025-11-25.
    Released,
    /// The newer suite, on the same revision.
    Handshake,
    Stateless,
}

impl Suite {
    pub(super) const ALL: [Suite; 3] = [Suite::Released, Suite::Handshake, Suite::Stateless];

    pub(super) fn named(name: &str) -> Result<Suite, String> {
        let found = Suite::ALL.into_iter().find(|suite| suite.name() == name);
        found.ok_or_else(|| format!("no suite `{name}`: there are {}", Suite::ALL.map(Suite::name).join(", ")))
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Suite::Released => "0.1.16",
            Suite::Handshake => "0.2.0-2025-11-25",
            Suite::Stateless => "0.2.0-2026-07-28",
        }
    }

    fn package(self) -> &'static str {
        match self {
            Suite::Released => "conformance-1",
            Suite::Handshake | Suite::Stateless => "conformance-2",
        }
    }

    fn arguments(self) -> [&'static str; 2] {
        match self {
            Suite::Released => ["--suite", "all"],
            Suite::Handshake => ["--requirements", "2025-11-25"],
            Suite::Stateless => ["--requirements", "2026-07-28"],
        }
    }

    fn fixture(self) -> &'static str {
        match self {
            Suite::Released | Suite::Handshake => "handshake.mjs",
            Suite::Stateless => "stateless.mjs",
        }
    }
}

/// How the gateway reaches the fixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Stdio,
    Http,
    /// Over stdio, in the other era: the gateway translates.
    Translated,
}

impl Way {
    pub(super) const ALL: [Way; 3] = [Way::Stdio, Way::Http, Way::Translated];

    pub(super) fn named(name: &str) -> Result<Way, String> {
        let found = Way::ALL.into_iter().find(|way| way.name() == name);
        found.ok_or_else(|| format!("no way `{name}`: there are {}", Way::ALL.map(Way::name).join(", ")))
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Way::Stdio => "stdio",
            Way::Http => "http",
            Way::Translated => "translated",
        }
    }
}

/// One run of a suite.
#[derive(Default)]
pub(super) struct Checks {
    /// The result of each check, and why it failed; by scenario and check.
    pub said: BTreeMap<String, Result<(), String>>,
    /// The scenarios that were run, whatever was checked in them.
    pub played: BTreeSet<String>,
}

pub(super) struct Stage {
    directory: TempDir,
    results: PathBuf,
    node: PathBuf,
    packages: PathBuf,
    outlast: PathBuf,
}

impl Stage {
    pub(super) fn set(outlast: Option<PathBuf>) -> Result<Stage, String> {
        let beside = env::current_exe().map_err(|error| error.to_string())?;
        let beside = beside.parent().expect("a program lies in a directory").to_owned();
        let outlast = outlast.unwrap_or_else(|| beside.join("outlast"));
        if !outlast.is_file() {
            return Err(format!("there is no {}", outlast.display()));
        }
        let peers =
            env::var_os("OUTLAST_PEERS").ok_or("OUTLAST_PEERS is not set; `cargo xtask conformance` sets it")?;
        let peers = PathBuf::from(peers);
        let packages = peers.join("conformance/node_modules");
        if !packages.is_dir() {
            return Err(format!("there is no {}; `cargo xtask conformance` fetches it", packages.display()));
        }
        let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
        // Node looks for packages beside a script.
        let modules = peers.join("node/node_modules");
        std::os::unix::fs::symlink(&modules, directory.path().join("node_modules"))
            .map_err(|error| error.to_string())?;
        for name in ["offer.mjs", "handshake.mjs", "stateless.mjs"] {
            fs::copy(Stage::scripts().join(name), directory.path().join(name)).map_err(|error| error.to_string())?;
        }
        let results = beside.join("conformance");
        let _ = fs::remove_dir_all(&results);
        let node = modules.join("node/bin/node");
        Ok(Stage { directory, results, node, packages, outlast })
    }

    pub(super) fn scripts() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/conformance")
    }

    pub(super) fn results(&self) -> &Path {
        &self.results
    }

    /// The fixture alone, over HTTP.
    pub(super) fn serve(&self, suite: Suite) -> Result<Running, String> {
        let port = free_port()?;
        let mut command = Command::new(&self.node);
        command.arg(self.directory.path().join(suite.fixture())).args(["http", &port.to_string()]);
        let mut running = self.start(command, suite.fixture(), port)?;
        running.wait_until("the fixture listens", || TcpStream::connect(("127.0.0.1", port)).is_ok())?;
        Ok(running)
    }

    /// The gateway in front of it.
    pub(super) fn front(&self, suite: Suite, way: Way, fixture: &Running) -> Result<Running, String> {
        let port = free_port()?;
        let backend = match way {
            Way::Http => format!("url = {:?}\n", fixture.url),
            Way::Stdio | Way::Translated => {
                let is_stateless = (suite == Suite::Stateless) == (way == Way::Stdio);
                let (era, script) =
                    if is_stateless { ("stateless", "stateless.mjs") } else { ("handshake", "handshake.mjs") };
                let script = self.directory.path().join(script);
                // A child that many clients share cannot say which of them its request is for.
                let own = if way == Way::Translated && !is_stateless { "children = \"per_session\"\n" } else { "" };
                format!("command = {:?}\nargs = [{script:?}, \"stdio\"]\nera = {era:?}\n{own}", self.node)
            }
        };
        let name = format!("{}-{}", suite.name(), way.name());
        let folder = self.directory.path().join(&name);
        fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
        let config = folder.join("outlast.toml");
        // The suites call tools by their names without a prefix.
        let text = format!("[[backend]]\nname = \"fixture\"\nprefix = \"\"\n{backend}");
        fs::write(&config, text).map_err(|error| error.to_string())?;
        let mut command = Command::new(&self.outlast);
        command.args(["gateway", "--config"]).arg(&config).args(["--listen", &format!("127.0.0.1:{port}")]);
        command.current_dir(&folder).env("HOME", &folder);
        let mut running = self.start(command, &name, port)?;
        running.wait_until("the gateway is ready", || is_ready(port))?;
        Ok(running)
    }

    fn start(&self, mut command: Command, name: &str, port: u16) -> Result<Running, String> {
        fs::create_dir_all(&self.results).map_err(|error| error.to_string())?;
        let log = self.results.join(format!("{name}.log"));
        let file = File::create(&log).map_err(|error| error.to_string())?;
        let program = command.get_program().display().to_string();
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .map_err(|error| format!("cannot start {program}: {error}"))?;
        Ok(Running { child, url: format!("http://127.0.0.1:{port}/mcp"), log })
    }

    /// One run of a suite. A failed check is not an error.
    pub(super) fn check(&self, suite: Suite, way: &str, round: u32, url: &str) -> Result<Checks, String> {
        let folder = self.results.join(suite.name()).join(format!("{way}-{}", round + 1));
        fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
        let log = File::create(folder.join("log")).map_err(|error| error.to_string())?;
        let errors = log.try_clone().map_err(|error| error.to_string())?;
        let mut child = Command::new(&self.node)
            .arg(self.packages.join(suite.package()).join("dist/index.js"))
            .args(["server", "--url", url])
            .args(suite.arguments())
            .arg("-o")
            .arg(&folder)
            .current_dir(self.directory.path())
            .env("HOME", self.directory.path())
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", self.node.display()))?;
        let deadline = Instant::now() + SUITE_MAX;
        while child.try_wait().map_err(|error| error.to_string())?.is_none() {
            if deadline < Instant::now() {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("the suite does not end: {}", folder.join("log").display()));
            }
            thread::sleep(LOOK);
        }
        let checks = read_checks(&folder)?;
        if checks.said.is_empty() {
            return Err(format!("the suite checked nothing: {}", folder.join("log").display()));
        }
        Ok(checks)
    }
}

/// A process that this program started, and ends.
pub(super) struct Running {
    child: Child,
    pub url: String,
    log: PathBuf,
}

impl Running {
    fn wait_until(&mut self, what: &str, is_so: impl Fn() -> bool) -> Result<(), String> {
        let deadline = Instant::now() + READY_MAX;
        while !is_so() {
            if let Ok(Some(status)) = self.child.try_wait() {
                let words = fs::read_to_string(&self.log).unwrap_or_default();
                return Err(format!("it ended before {what}: {status}\n{words}"));
            }
            if deadline < Instant::now() {
                return Err(format!("after {} s still not: {what}; see {}", READY_MAX.as_secs(), self.log.display()));
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM);
        let deadline = Instant::now() + STOP_MAX;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(LOOK);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> Result<u16, String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
    Ok(listener.local_addr().map_err(|error| error.to_string())?.port())
}

/// The gateway's own readiness check.
fn is_ready(port: u16) -> bool {
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(STOP_MAX))?;
        write!(stream, "GET /ready HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    ask().is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
}

/// Each scenario has a directory, named after it and the time.
fn read_checks(folder: &Path) -> Result<Checks, String> {
    let mut checks = Checks::default();
    for entry in fs::read_dir(folder).map_err(|error| error.to_string())?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(scenario) = scenario(&name) else { continue };
        checks.played.insert(scenario.to_owned());
        let text = fs::read_to_string(entry.path().join("checks.json")).map_err(|error| format!("{name}: {error}"))?;
        let listed: Vec<Value> = serde_json::from_str(&text).map_err(|error| format!("{name}: {error}"))?;
        for check in listed {
            let status = check["status"].as_str().unwrap_or_default();
            // Optional behaviour that the server does not have, or an observation.
            if matches!(status, "INFO" | "SKIPPED") {
                continue;
            }
            let key = format!("{scenario}/{}", check["id"].as_str().unwrap_or("?"));
            let said = match status {
                "SUCCESS" => Ok(()),
                _ => Err(format!("{status}: {}", check["errorMessage"].as_str().unwrap_or("without output"))),
            };
            // One id may stand for several observations; all of them must pass.
            let both = match checks.said.remove(&key) {
                Some(Err(why)) => Err(why),
                Some(Ok(())) | None => said,
            };
            checks.said.insert(key, both);
        }
    }
    Ok(checks)
}

/// `server-ping-2026-11-15T22-55-28-523Z`
fn scenario(folder: &str) -> Option<&str> {
    let rest = folder.strip_prefix("server-")?;
    let (name, _) = rest.split_at_checked(rest.len().checked_sub("-2026-11-15T22-55-28-523Z".len())?)?;
    Some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scenario_is_named_by_its_folder() {
        assert_eq!(scenario("server-sse-polling-2026-11-15T22-55-28-523Z"), Some("sse-polling"));
        assert_eq!(scenario("log"), None);
        assert_eq!(scenario("server-x"), None);
    }
}
