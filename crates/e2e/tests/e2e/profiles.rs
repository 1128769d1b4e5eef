//! Profiles of agents: how each is restarted, by its name, by `--agent`, and by `[agent.NAME]`. The agents here are
//! scripts that record their arguments.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::{
        signal::{Signal, kill},
        stat::Mode,
    },
    unistd::{Pid, mkfifo},
};
use serde_json::Value;
use tempfile::TempDir;

use super::support::OUTLAST;

const PATIENCE: Duration = Duration::from_secs(60);
/// Records its arguments, one start per line, shows a prompt, and stays.
const SCRIPT: &str = "#!/bin/sh
printf '%s|' \"$@\" >> args.log; echo >> args.log
printf '\\033[?2004hready\\n❯ › '
while read -r line; do :; done
";

struct World {
    home: TempDir,
    project: TempDir,
}

impl World {
    fn new() -> World {
        World { home: tempfile::tempdir().unwrap(), project: tempfile::tempdir().unwrap() }
    }

    fn script(&self, name: &str) {
        let path = self.project.path().join(name);
        fs::write(&path, SCRIPT).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn outlast(&self, args: &[&str]) -> Output {
        let mut command = Command::new(OUTLAST);
        command.current_dir(self.project.path()).env("HOME", self.home.path()).args(args).stdin(Stdio::null());
        command.output().unwrap()
    }

    fn run(&self, words: &[&str]) {
        let output = self.outlast(&[&["run", "-d", "--session", "s"], words].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
    }

    fn restart(&self) {
        let output = self.outlast(&["restart", "s"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }

    fn state(&self) -> Value {
        serde_json::from_slice(&self.outlast(&["state", "s", "--json"]).stdout).unwrap_or_default()
    }

    fn until(&self, what: &str, test: impl Fn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !test() {
            let log = fs::read_to_string(self.project.path().join(".outlast/logs/s.log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "never {what}\n{}\n{log}", self.state());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// The arguments of each start so far.
    fn starts(&self) -> Vec<Vec<String>> {
        let log = fs::read_to_string(self.project.path().join("args.log")).unwrap_or_default();
        let words = |line: &str| line.split_terminator('|').map(str::to_owned).collect();
        log.lines().map(words).collect()
    }

    fn nth(&self, start: usize) -> Vec<String> {
        self.until("started and ready", || self.starts().len() >= start && self.state()["state"] == "ready");
        self.starts()[start - 1].clone()
    }

    /// The command line of the current process.
    fn line(&self) -> String {
        let line = fs::read(format!("/proc/{}/cmdline", self.state()["pid"])).unwrap_or_default();
        text(&line).trim_end_matches('\0').replace('\0', " ")
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.outlast(&["stop", "s", "--force"]);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The value after an option.
fn value<'a>(args: &'a [String], option: &str) -> Option<&'a str> {
    let at = args.iter().position(|arg| arg == option)?;
    args.get(at + 1).map(String::as_str)
}

#[test]
fn an_initial_prompt_is_sent_once() {
    let table: [(&str, &[&str], &[&str]); 4] = [
        ("claude", &[], &["./claude", "--model", "m", "deploy now"]),
        ("codex", &[], &["./codex", "deploy now", "--model", "m"]),
        ("claude", &[], &["env", "X=1", "./claude", "deploy now", "--model", "m"]),
        ("wrap.sh", &["--agent", "claude"], &["./wrap.sh", "--model", "m", "deploy now"]),
    ];
    for (name, options, command) in table {
        let world = World::new();
        world.script(name);
        world.run(&[options, &["--"], command].concat());
        assert!(world.nth(1).contains(&"deploy now".to_owned()), "{:?}", world.starts());
        for start in 2..4 {
            world.restart();
            let args = world.nth(start);
            assert!(!args.iter().any(|arg| arg.contains("deploy")), "{args:?}");
            assert_eq!(value(&args, "--model"), Some("m"), "{args:?}");
        }
    }
}

#[test]
fn a_shell_is_restarted_as_it_was() {
    for command in [&["bash", "--norc"][..], &["env", "X=1", "sh", "-i"]] {
        let world = World::new();
        world.run(&[&["--"], command].concat());
        world.until("ready", || world.state()["state"] == "ready" && !world.line().is_empty());
        let before = world.line();
        let pid = world.state()["pid"].clone();
        world.restart();
        world.until("another", || world.state()["pid"] != pid && world.state()["state"] == "ready");
        assert_eq!(world.line(), before);
        assert_eq!(world.state()["mode"], "fresh");
    }
}

#[test]
fn an_agent_is_described_in_the_file() {
    let world = World::new();
    world.script("mine");
    let config = "[agent.other]\nresume = ['--load', '{id}']\nfresh = ['--save', '{id}']\nprompt = '❯'\n\n\
                  [agent.mine]\nresume = ['--again']\n";
    fs::write(world.project.path().join("outlast.toml"), config).unwrap();
    assert!(world.outlast(&["trust"]).status.success());
    world.run(&["--agent", "other", "--", "./mine", "-x"]);
    let first = world.nth(1);
    let id = value(&first, "--save").unwrap().to_owned();
    assert_eq!(world.state()["conversation"], id);
    world.restart();
    assert_eq!(world.nth(2), ["-x", "--load", &id]);
    assert!(world.outlast(&["stop", "s"]).status.success());

    // By the name of its program.
    world.run(&["--", "./mine", "-x"]);
    assert_eq!(world.nth(3), ["-x"]);
    world.restart();
    assert_eq!(world.nth(4), ["-x", "--again"]);
}

#[test]
fn an_invalid_profile_is_refused() {
    let world = World::new();
    let said = |config: &str, words: &[&str]| {
        fs::write(world.project.path().join("outlast.toml"), config).unwrap();
        let named = ["run", "-d", "--session", "s", "--config", "outlast.toml"];
        let output = world.outlast(&[&named[..], words, &["--", "./x"]].concat());
        assert_eq!(output.status.code(), Some(2));
        text(&output.stderr)
    };
    let all = [
        said("", &["--agent", "nope"]),
        said("[run]\nagent = 'nope'\n", &[]),
        said("[agent.mine]\ncolour = 'x'\n", &["--agent", "mine"]),
        said("[agent.mine]\nresume = ['{id}']\n", &["--agent", "mine"]),
        said("[agent.claude]\nresume = []\n", &[]),
    ];
    insta::assert_snapshot!(all.join("\n"));
}

#[test]
fn a_session_continues_after_outlast_was_killed() {
    let world = World::new();
    world.script("claude");
    world.run(&["--", "./claude", "deploy now"]);
    let first = world.nth(1);
    let id = value(&first, "--session-id").unwrap().to_owned();
    let record = world.home.path().join(".local/state/outlast/sessions/s.json");
    let read = || -> Value { serde_json::from_slice(&fs::read(&record).unwrap_or_default()).unwrap_or_default() };
    assert_eq!(fs::metadata(&record).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!((read()["state"].as_str(), read()["conversation"].as_str()), (Some("running"), Some(id.as_str())));
    assert_eq!((read()["agent"].as_str(), read()["v"].as_u64()), (Some("claude"), Some(1)));

    let listed: Value = serde_json::from_slice(&world.outlast(&["ps", "--json"]).stdout).unwrap();
    let pid = listed[0]["pid"].as_i64().unwrap();
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGKILL).unwrap();
    world.until("gone", || !world.outlast(&["state", "s"]).status.success());
    world.run(&["--", "./claude", "deploy now"]);
    let second = world.nth(2);
    // This claude wrote no transcript, so it starts again under the same id.
    assert_eq!(value(&second, "--session-id"), Some(id.as_str()), "{second:?}");
    assert!(!second.contains(&"deploy now".to_owned()), "{second:?}");

    assert!(world.outlast(&["stop", "s"]).status.success());
    assert_eq!(read()["state"], "ended");
    world.run(&["--", "./claude", "deploy now"]);
    let third = world.nth(3);
    assert_ne!(value(&third, "--session-id"), Some(id.as_str()), "its user ended the old one: {third:?}");
    assert!(third.contains(&"deploy now".to_owned()), "{third:?}");

    // A signal is not the user's wish: the machine may be shutting down.
    let listed: Value = serde_json::from_slice(&world.outlast(&["ps", "--json"]).stdout).unwrap();
    let pid = listed[0]["pid"].as_i64().unwrap();
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGTERM).unwrap();
    world.until("gone", || !world.outlast(&["state", "s"]).status.success());
    assert_eq!(read()["state"], "running");
}

#[test]
fn a_session_record_that_cannot_be_used_is_reported_and_replaced() {
    let target = "{\"not\": \"ours\"}";
    for (case, why) in [
        ("torn", "it is not JSON"),
        ("empty", "it is not a session record of this version"),
        ("link", "it is a symbolic link"),
        ("FIFO", "it is a FIFO, not a file"),
    ] {
        let world = World::new();
        world.script("claude");
        let dir = world.home.path().join(".local/state/outlast/sessions");
        fs::create_dir_all(&dir).unwrap();
        let (record, elsewhere) = (dir.join("s.json"), world.home.path().join("target"));
        fs::write(&elsewhere, target).unwrap();
        match case {
            "torn" => fs::write(&record, "{\"v\":1,\"id\":\"s").unwrap(),
            "empty" => fs::write(&record, "{}").unwrap(),
            "link" => symlink(&elsewhere, &record).unwrap(),
            _ => mkfifo(&record, Mode::S_IRWXU).unwrap(),
        }
        world.run(&["--", "./claude", "deploy now"]);
        let first = world.nth(1);
        assert!(first.contains(&"deploy now".to_owned()), "{case}: {first:?}");
        let log = fs::read_to_string(world.project.path().join(".outlast/logs/s.log")).unwrap();
        assert!(log.contains(&format!("s.json cannot be used ({why}): a new conversation begins")), "{case}: {log}");
        assert!(fs::symlink_metadata(&record).unwrap().is_file(), "{case}: it is written again");
        let read: Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
        assert_eq!(read["conversation"].as_str(), value(&first, "--session-id"), "{case}");
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), target, "{case}");
    }
}
