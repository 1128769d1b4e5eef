//! The real peers: SDKs, servers and rivals at pinned versions, fetched once into a separate cache.
//!
//! ```text
//! <cache>/outlast-peers/<pins>/       named after the pins, so changed pins mean another folder
//!     python-1/  python-2/            virtual environments
//!     node/                           node_modules, with a Node of its own
//!     agents/                         claude and codex, run by that Node
//!     conformance/                    the conformance suites, run by that Node
//!     nats/  nats-oldest/             virtual environments with nats-server, at two versions
//!     mcpmon/  rivals/  rivals-py/    rivals, for the benchmarks alone
//! ```
//!
//! Each part is made under a temporary name and moved into place when it works, so that an existing part is complete.
//! The scripts of a virtual environment contain the path they were made in, which is replaced after the move.

use crate::report::Failure;
use crate::root;
use std::env;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The directory of the peers, for the tests and the benchmark. If the user sets it, the peers are put there.
pub(crate) const VARIABLE: &str = "OUTLAST_PEERS";

pub(crate) const FOR_TESTS: &[Part] = &[
    Part::Python("python-1"),
    Part::Python("python-2"),
    Part::Python("nats"),
    Part::Python("nats-oldest"),
    Part::Node,
    Part::Agents,
];
pub(crate) const FOR_CONFORMANCE: &[Part] = &[Part::Node, Part::Packages("conformance")];
pub(crate) const FOR_SHARE: &[Part] = &[Part::Python("python-1")];
pub(crate) const FOR_CLUSTER: &[Part] = &[Part::Python("nats")];
pub(crate) const FOR_BENCH: &[Part] = &[
    Part::Python("python-1"),
    Part::Python("python-2"),
    Part::Node,
    Part::Python("mcpmon"),
    Part::Python("rivals-py"),
    Part::Packages("rivals"),
];

/// The files in `crates/e2e/peers` that decide what is fetched.
const PINS: [&str; 14] = [
    "package.json",
    "package-lock.json",
    "python-1.txt",
    "python-2.txt",
    "nats.txt",
    "nats-oldest.txt",
    "mcpmon.txt",
    "agents/package.json",
    "agents/package-lock.json",
    "conformance/package.json",
    "conformance/package-lock.json",
    "rivals/package.json",
    "rivals/package-lock.json",
    "rivals-py.txt",
];

/// The stamp in a finished directory: the pins it was made from.
const STAMP: &str = "pins";

/// The prefix of the name of an unfinished part.
const UNFINISHED: &str = "unfinished-";

/// Returns the directory that holds `parts`, after making the missing ones.
pub(crate) fn provide(parts: &[Part]) -> Result<PathBuf, Failure> {
    let pins = fingerprint()?;
    let folder = match env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        Some(named) => std::path::absolute(&named)
            .map_err(|error| Failure::new(format!("{VARIABLE} is no path: {}", named.display())).because(error))?,
        None => cache()?.join("outlast-peers").join(&pins),
    };
    prepare(&folder, &pins, parts)?;
    Ok(folder)
}

fn prepare(folder: &Path, pins: &str, parts: &[Part]) -> Result<(), Failure> {
    let cannot_write = |error| {
        Failure::new(format!("cannot keep the peers in {}", folder.display()))
            .because(error)
            .hint(format!("{VARIABLE} names another folder"))
    };
    fs::create_dir_all(folder).map_err(cannot_write)?;

    // Held until the file is closed or this process exits: two runs never make the same part.
    let lock = File::create(folder.join("lock")).map_err(cannot_write)?;
    if lock.try_lock().is_err() {
        eprintln!("peers: waiting for another run that is fetching them");
        lock.lock().map_err(cannot_write)?;
    }

    let stamp = folder.join(STAMP);
    match fs::read_to_string(&stamp) {
        Ok(text) if text.trim() == pins => {}
        Ok(_) => {
            return Err(Failure::new(format!("{} holds peers of other versions", folder.display()))
                .hint(format!("remove it, or let {VARIABLE} name another folder")));
        }
        Err(_) => fs::write(&stamp, pins).map_err(cannot_write)?,
    }

    for part in parts {
        let place = folder.join(part.name());
        if part.check(&place).is_ok() {
            // The part may have been moved before its scripts were changed.
            part.settle(&place).map_err(cannot_write)?;
            continue;
        }
        let unfinished = folder.join(format!("{UNFINISHED}{}", part.name()));
        eprintln!("peers: fetching {} into {}", part.name(), folder.display());
        remove(&unfinished).and_then(|()| fs::create_dir(&unfinished)).map_err(cannot_write)?;
        part.make(&unfinished)?;
        remove(&place).and_then(|()| fs::rename(&unfinished, &place)).map_err(cannot_write)?;
        part.settle(&place).map_err(cannot_write)?;
        part.check(&place)
            .map_err(|cause| Failure::new(format!("the peers in {} do not work", place.display())).because(cause))?;
    }
    Ok(())
}

#[derive(Clone, Copy)]
pub(crate) enum Part {
    /// A virtual environment, named after its requirements file.
    Python(&'static str),
    Node,
    /// The agents that people run under `outlast run`, and the terminal for them.
    Agents,
    /// Programs for that Node, named after the directory that lists them.
    Packages(&'static str),
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Part::Python(name) | Part::Packages(name) => name,
            Part::Node => "node",
            Part::Agents => "agents",
        }
    }

    /// Checks whether it runs at all: a cache may be older than the Python of the system.
    fn check(self, place: &Path) -> Result<(), String> {
        let program = match self {
            Part::Python(_) => venv_python(place),
            Part::Node => node(place),
            Part::Agents => return check_agents(place),
            // Moved into place when it was complete, and nothing in it is built for this machine.
            Part::Packages(_) => {
                let is_there = place.join("node_modules").is_dir();
                return if is_there { Ok(()) } else { Err(format!("nothing in {}", place.display())) };
            }
        };
        let version = version_of(&mut Command::new(&program))?;
        match self {
            Part::Node if !version.starts_with(NODE) => Err(format!("{} is Node {version}", program.display())),
            _ => Ok(()),
        }
    }

    /// After the move: replaces the path it was made in by this one.
    fn settle(self, place: &Path) -> io::Result<()> {
        match self {
            Part::Python(name) => rename_in_scripts(&place.join("bin"), &format!("{UNFINISHED}{name}"), name),
            _ => Ok(()),
        }
    }

    fn make(self, place: &Path) -> Result<(), Failure> {
        let failed = || Failure::new(format!("cannot fetch {}", self.name()));
        match self {
            Part::Python(name) => {
                let python = python()?;
                run(Command::new(python).args(["-m", "venv"]).arg(place)).map_err(|cause| failed().because(cause))?;
                let list = pins_folder().join(format!("{name}.txt"));
                run(Command::new(venv_python(place))
                    .args(["-m", "pip", "install", "--quiet", "--requirement"])
                    .arg(list))
                .map_err(|cause| failed().because(cause).hint("pip's own words are above; is its index in reach?"))
            }
            Part::Node => {
                fetch(self.name(), &pins_folder(), place, &[])?;
                self.check(place).map_err(|cause| {
                    failed().because(cause).hint(
                        "the package `node` puts the program there from its install script: let npm run install scripts",
                    )
                })
            }
            Part::Packages(name) => fetch(name, &pins_folder().join(name), place, &["--ignore-scripts"]),
            Part::Agents => {
                tmux()?;
                // npm asks before it runs install scripts; the needed one is run here, by name.
                fetch(self.name(), &pins_folder().join("agents"), place, &["--ignore-scripts"])?;
                let script = place.join("node_modules/@anthropic-ai/claude-code/install.cjs");
                run(Command::new(node(&beside(place))).arg(script)).map_err(|cause| failed().because(cause))?;
                self.check(place).map_err(|cause| failed().because(cause))
            }
        }
    }
}

/// Replaces a directory name in the paths that the scripts of a directory contain. Each file is replaced as a whole,
/// so that a script that is started meanwhile is the old one or the new one.
fn rename_in_scripts(folder: &Path, old: &str, new: &str) -> io::Result<()> {
    let Ok(entries) = fs::read_dir(folder) else { return Ok(()) };
    for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file())) {
        let Ok(text) = fs::read_to_string(entry.path()) else { continue };
        let mut moved = text.clone();
        for end in ['/', '"', '\''] {
            moved = moved.replace(&format!("/{old}{end}"), &format!("/{new}{end}"));
        }
        if moved == text {
            continue;
        }
        let whole = folder.join(format!(".{}.new", entry.file_name().display()));
        fs::write(&whole, moved)?;
        fs::set_permissions(&whole, entry.metadata()?.permissions())?;
        fs::rename(whole, entry.path())?;
    }
    Ok(())
}

/// Installs the packages of a lock file into a directory.
fn fetch(what: &str, pins: &Path, place: &Path, options: &[&str]) -> Result<(), Failure> {
    let failed = || Failure::new(format!("cannot fetch {what}"));
    let npm = npm()?;
    for file in ["package.json", "package-lock.json"] {
        fs::copy(pins.join(file), place.join(file)).map_err(|error| failed().because(error))?;
    }
    let mut command = Command::new(npm);
    command.args(["ci", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]).args(options);
    run(command.current_dir(place))
        .map_err(|cause| failed().because(cause).hint("npm's own words are above; is its registry in reach?"))
}

fn version_of(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().display().to_string();
    let output = command.arg("--version").stdin(Stdio::null()).output().map_err(|error| format!("{name}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{name}: {}", output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Checks that both agents start, and have the versions that the tests were written for.
fn check_agents(place: &Path) -> Result<(), String> {
    let program = |name| place.join("node_modules/.bin").join(name);
    let mut codex = Command::new(node(&beside(place)));
    codex.arg(program("codex"));
    let agents = [(Command::new(program("claude")), "2.1.325 (Claude Code)"), (codex, "codex-cli 0.166.0")];
    for (mut agent, expected) in agents {
        // A separate home directory: files of their first start must not be in the user's home.
        let version = version_of(agent.env("HOME", place.join("home")).env("DISABLE_AUTOUPDATER", "1"))?;
        if version != expected {
            return Err(format!("{} is {version}, not {expected}", agent.get_program().display()));
        }
    }
    Ok(())
}

/// The Node of the part `node`.
fn beside(place: &Path) -> PathBuf {
    place.parent().unwrap_or(place).join(Part::Node.name())
}

fn tmux() -> Result<(), Failure> {
    install_unless(|| quietly(Command::new("tmux").arg("-V")), &["tmux"], "tmux, the terminal around the agents")
}

/// The rivals of `outlast run`, installed if possible. They have no directory of their own.
pub(crate) fn terminals() -> PathBuf {
    install(&[("tmux", "-V", "tmux"), ("dtach", "--version", "dtach"), ("script", "--version", "bsdutils")]);
    PathBuf::new()
}

/// The shells whose completions are tested, and the terminal for these tests. Tests of missing shells report that.
pub(crate) fn shells() {
    install(&[("tmux", "-V", "tmux"), ("zsh", "--version", "zsh"), ("fish", "--version", "fish")]);
}

/// The tool that makes network namespaces, for partitions of a cluster. Only root can make them; without them the tests use
/// proxies, and say so.
pub(crate) fn namespaces() {
    if is_root() {
        install(&[("ip", "-V", "iproute2")]);
    }
}

/// Programs that cannot be installed are reported as missing.
fn install(programs: &[(&str, &str, &str)]) {
    for &(program, option, package) in programs {
        // The exit code does not matter: dtach rejects the option, and that it starts is enough.
        let is_here = || Command::new(program).arg(option).stdin(Stdio::null()).output().is_ok();
        if let Err(failure) = install_unless(is_here, &[package], program) {
            failure.report();
        }
    }
}

/// Tells the tests that a browser is required.
pub(crate) const BROWSER: &str = "OUTLAST_BROWSER";

/// For the gateway's status page: a Chromium or Chrome, and its driver.
pub(crate) fn browser() -> Result<(), Failure> {
    let works = || {
        let browsers = ["chromium", "google-chrome", "chromium-browser"];
        let is_mac_app = Path::new("/Applications/Google Chrome.app").exists();
        quietly(Command::new("chromedriver").arg("--version"))
            && (is_mac_app || browsers.iter().any(|browser| quietly(Command::new(browser).arg("--version"))))
    };
    install_unless(works, &["chromium", "chromium-driver"], "a browser with its driver, for the status page")
}

/// The major version that the Inspector needs; the system's Node may be older.
const NODE: &str = "v22.";

fn node(place: &Path) -> PathBuf {
    place.join("node_modules/node/bin").join(format!("node{}", env::consts::EXE_SUFFIX))
}

fn venv_python(place: &Path) -> PathBuf {
    if cfg!(windows) { place.join("Scripts").join("python.exe") } else { place.join("bin").join("python") }
}

/// A Python that can make virtual environments, installed if this machine permits it.
fn python() -> Result<&'static str, Failure> {
    let python = if cfg!(windows) { "python" } else { "python3" };
    // The SDKs need 3.10; a Debian without python3-venv has `venv` but not `ensurepip`.
    let probe = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))";
    install_unless(
        || quietly(Command::new(python).args(["-c", probe])),
        &["python3-venv"],
        "Python 3.10 or newer with venv",
    )?;
    Ok(python)
}

fn npm() -> Result<&'static str, Failure> {
    let npm = if cfg!(windows) { "npm.cmd" } else { "npm" };
    install_unless(|| quietly(Command::new(npm).arg("--version")), &["nodejs", "npm"], "Node with npm")?;
    Ok(npm)
}

fn install_unless(works: impl Fn() -> bool, packages: &[&str], what: &str) -> Result<(), Failure> {
    if works() {
        return Ok(());
    }
    let missing =
        || Failure::new(format!("the peers need {what}")).hint(format!("install it: {}", packages.join(", ")));
    if !(Path::new("/etc/debian_version").exists() && is_root()) {
        return Err(missing().because("it is not on this machine, and only root on Debian can be helped"));
    }
    eprintln!("peers: installing {}", packages.join(", "));
    let install = || {
        let mut command = Command::new("apt-get");
        command.args(["install", "--yes", "--no-install-recommends"]).args(packages);
        run(command.env("DEBIAN_FRONTEND", "noninteractive"))
    };
    // The package lists of a fresh container are empty; those of an old one may be stale.
    install()
        .or_else(|_| run(Command::new("apt-get").arg("update")).and_then(|()| install()))
        .map_err(|cause| missing().because(cause))?;
    if works() { Ok(()) } else { Err(missing().because("it was installed and still does not work")) }
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

fn quietly(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Runs with all output on stderr: stdout is reserved for the result of `cargo xtask peers`.
fn run(command: &mut Command) -> Result<(), String> {
    let status = command.stdin(Stdio::null()).stdout(io::stderr()).status();
    let name = command.get_program().display();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{name}`: {status}")),
        Err(error) => Err(format!("`{name}`: {error}")),
    }
}

fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

pub(crate) fn cache() -> Result<PathBuf, Failure> {
    let given = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    given("XDG_CACHE_HOME")
        .or_else(|| env::home_dir().filter(|home| home.is_absolute()).map(|home| home.join(".cache")))
        .ok_or_else(|| Failure::new("there is no place for the peers").hint(format!("set HOME or {VARIABLE}")))
}

fn pins_folder() -> PathBuf {
    root().join("crates/e2e/peers")
}

/// A name for these pins on this platform.
fn fingerprint() -> Result<String, Failure> {
    let mut text = format!("{} {}\n", env::consts::OS, env::consts::ARCH);
    for name in PINS {
        let path = pins_folder().join(name);
        let pins = fs::read_to_string(&path)
            .map_err(|error| Failure::new(format!("cannot read {}", path.display())).because(error))?;
        // A checkout on Windows may have changed the line ends, which does not change the meaning.
        text.push_str(&pins.replace('\r', ""));
    }
    Ok(format!("{:016x}", fnv1a(text.as_bytes())))
}

/// FNV-1a: std's hashers have no stable result across releases of Rust.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_get_the_new_path_and_stay_executable() {
        let folder = env::temp_dir().join(format!("outlast-xtask-scripts-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let script = folder.join("mcp-server");
        fs::write(&script, "#!/a/unfinished-python-2/bin/python3\nprint('unfinished-python-2')\n").unwrap();
        fs::write(folder.join("activate"), "VIRTUAL_ENV=\"/a/unfinished-python-2\"\n").unwrap();
        fs::write(folder.join("blob"), b"\xff/unfinished-python-2/").unwrap();
        let before = fs::metadata(&script).unwrap().permissions();
        rename_in_scripts(&folder, "unfinished-python-2", "python-2").unwrap();
        let read = |name: &str| fs::read(folder.join(name)).unwrap();
        assert_eq!(read("mcp-server"), b"#!/a/python-2/bin/python3\nprint('unfinished-python-2')\n");
        assert_eq!(read("activate"), b"VIRTUAL_ENV=\"/a/python-2\"\n");
        assert_eq!(read("blob"), b"\xff/unfinished-python-2/");
        assert_eq!(fs::metadata(&script).unwrap().permissions(), before);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 3, "nothing else is left");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_hash_is_fnv_1a() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn a_folder_of_other_pins_is_refused_rather_than_mixed() {
        let folder = env::temp_dir().join(format!("outlast-xtask-{}", std::process::id()));
        prepare(&folder, "one", &[]).expect("an empty folder is stamped");
        prepare(&folder, "one", &[]).expect("the same pins are welcome again");
        let refused = prepare(&folder, "two", &[]);
        fs::remove_dir_all(&folder).expect("the folder is ours");
        assert!(refused.is_err());
    }
}
