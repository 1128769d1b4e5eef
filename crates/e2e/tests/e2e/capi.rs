//! The C library: a C program, built with the compiler of this machine, controls a real session.

use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

use super::support::OUTLAST;

const PATIENCE: Duration = Duration::from_secs(60);
const AGENT: &str = "[ -f broken ] && exit 1; printf 'ready> '; \
                     while read -r word rest; do echo \"$word\" >> typed.log; printf 'ready> '; done; exit 9";

fn manifest(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The directory in which cargo put the library that was built with this test.
fn library_dir() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let dir = test.parent().unwrap().to_owned();
    assert!(dir.join("liboutlast_client.so").is_file(), "no library in {}", dir.display());
    dir
}

fn compile(source: &Path, program: &Path) {
    let dir = library_dir();
    let output = Command::new("cc")
        .args(["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-D_POSIX_C_SOURCE=200809L", "-pthread", "-I"])
        .arg(manifest("../capi/include"))
        .arg(source)
        .arg("-o")
        .arg(program)
        .arg(format!("-L{}", dir.display()))
        .arg(format!("-Wl,-rpath,{}", dir.display()))
        .arg("-loutlast_client")
        .output()
        .expect("the test of the library for C needs `cc`");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

struct World {
    home: TempDir,
    project: TempDir,
}

impl World {
    fn new() -> World {
        World { home: tempfile::tempdir().unwrap(), project: tempfile::tempdir().unwrap() }
    }

    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.project.path()).env("HOME", self.home.path());
        command
    }

    fn outlast(&self, args: &[&str]) -> Output {
        self.command(OUTLAST).args(args).stdin(Stdio::null()).output().unwrap()
    }

    fn until(&self, what: &str, test: impl Fn(&World) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !test(self) {
            assert!(Instant::now() < deadline, "never {what}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn state_is(&self, state: &str) -> bool {
        let output = self.outlast(&["state", "session-c", "--json"]);
        String::from_utf8_lossy(&output.stdout).contains(&format!("\"state\": \"{state}\""))
    }
}

#[test]
fn a_c_program_controls_a_session() {
    let world = World::new();
    let program = world.project.path().join("client");
    compile(&manifest("tests/c/client.c"), &program);
    let started = world.outlast(&["run", "-d", "--session", "session-c", "--", "sh", "-c", AGENT]);
    assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    world.until("ready", |world| world.state_is("ready"));

    let socket = world.home.path().join(".local/state/outlast/run/session-c.sock");
    let mut client = world.command(&program);
    client.arg("session-c").arg(&socket).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut client = client.spawn().unwrap();
    let (mut stdin, stdout) = (client.stdin.take().unwrap(), client.stdout.take().unwrap());
    let state: serde_json::Value =
        serde_json::from_slice(&world.outlast(&["state", "session-c", "--json"]).stdout).unwrap();
    let outlast = Pid::from_raw(i32::try_from(state["outlast_pid"].as_i64().unwrap()).unwrap());
    let mut said = Vec::new();
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        match line.as_str() {
            "frozen" => kill(outlast, Signal::SIGSTOP).unwrap(),
            "thawed" => kill(outlast, Signal::SIGCONT).unwrap(),
            "typed" => {
                let typed = || std::fs::read_to_string(world.project.path().join("typed.log")).unwrap_or_default();
                world.until("have a terminal", |_| !typed().is_empty());
                assert_eq!(typed(), "note\n");
            }
            // Every agent exits at once from now on; a requested restart has no delay, and resets no count.
            "halted" => {
                std::fs::write(world.project.path().join("broken"), "").unwrap();
                world.until("halted", |world| {
                    world.outlast(&["restart", "session-c"]);
                    world.state_is("halted")
                });
            }
            _ => {}
        }
        // After its last output the program does not read, so this write may fail.
        let _ = stdin.write_all(b"\n");
        said.push(line);
    }
    let output = client.wait_with_output().unwrap();
    assert!(output.status.success(), "{}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    assert_eq!(said, ["frozen", "thawed", "typed", "halted", "proved"]);
    assert!(!socket.exists());
}

#[test]
fn the_header_is_c_plus_plus_too() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("header.cc");
    std::fs::write(&source, "#include \"outlast.h\"\nint main() { return outlast_api_version() == 0; }\n").unwrap();
    let checked = Command::new("c++")
        .args(["-std=c++11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-I"])
        .arg(manifest("../capi/include"))
        .arg(&source)
        .output();
    let output = checked.expect("the test of the header needs `c++`");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
