//! `outlast top` in a real terminal: its output, its keys, and its exit.

use std::{
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;
use tempfile::TempDir;

use crate::{control::World, support::OUTLAST};

/// Nothing here takes long; a longer wait would never end.
const PATIENCE: Duration = Duration::from_secs(60);

/// `outlast top` in its own tmux server, under a shell.
pub(crate) struct Pane<'a> {
    world: &'a World,
    /// A separate socket directory: a tmux server that has just exited is not found again by its name.
    socket: TempDir,
}

impl Pane<'_> {
    fn open(world: &World) -> Pane<'_> {
        Pane::open_with(world, "top")
    }

    pub(crate) fn open_with<'a>(world: &'a World, arguments: &str) -> Pane<'a> {
        let pane = Pane { world, socket: tempfile::tempdir().unwrap() };
        let command = format!("sh -c '{OUTLAST} {arguments}; echo left with $?; stty -a; exec sleep 60'");
        let size = ["new-session", "-d", "-x", "120", "-y", "30"];
        pane.tmux(&[&["-f", "/dev/null"], &size[..], &[&command]].concat());
        pane
    }

    fn tmux(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn run(&self, args: &[&str]) -> Output {
        Command::new("tmux")
            .current_dir(self.world.project.path())
            .env("HOME", self.world.home.path())
            .env("LC_ALL", "C.UTF-8")
            .env_remove("TMUX")
            .arg("-S")
            .arg(self.socket.path().join("sock"))
            .args(args)
            .output()
            .expect("tmux is not here, and without it this cannot be shown")
    }

    pub(crate) fn press(&self, key: &str) {
        self.tmux(&["send-keys", key]);
    }

    pub(crate) fn until(&self, what: &str, holds: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let screen = self.tmux(&["capture-pane", "-p"]);
            if holds(&screen) {
                return screen;
            }
            assert!(Instant::now() < deadline, "{what} is not in\n{screen}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn shows(&self, words: &str) -> String {
        self.until(words, |screen| screen.contains(words))
    }

    /// The shell is back, and its terminal is restored.
    fn left(&self) {
        let screen = self.shows("left with 0");
        let modes = self.until("stty", |screen| screen.contains("iexten"));
        for mode in ["-icanon", "-echo ", "-isig", "-opost"] {
            assert!(!modes.contains(mode), "{mode} in\n{modes}");
        }
        assert!(!screen.contains("INSTANCE"), "the other screen is back:\n{screen}");
        let cursor = self.tmux(&["display-message", "-p", "#{alternate_on}#{cursor_flag}"]);
        assert_eq!(cursor.trim(), "01", "the usual screen, with a cursor");
    }
}

impl Drop for Pane<'_> {
    fn drop(&mut self) {
        self.run(&["kill-server"]);
    }
}

#[test]
fn top_lists_instances_and_carries_out_commands() {
    let world = World::new();
    let mut weather = world.start("weather", &[]);
    let _other = world.start("other", &[]);
    let before = weather.pid();
    let pane = Pane::open(&world);
    let screen = pane.shows("weather-");
    assert!(screen.contains("2 instances") && screen.contains("● 2 ready") && screen.contains("CALLS/S"), "{screen}");

    pane.press("r");
    pane.shows("Restarted weather-");
    assert_ne!(weather.pid(), before);
    weather.call("stderr", json!({"text": "the cache is cold"}));
    pane.shows("the cache is cold");

    pane.tmux(&["resize-window", "-x", "60", "-y", "20"]);
    pane.until("less of it", |screen| screen.contains("other-") && !screen.contains("LAST WORDS"));
    pane.press("l");
    pane.shows("log of weather-");
    pane.press("q");
    pane.press("/");
    pane.tmux(&["send-keys", "-l", "oth"]);
    pane.until("only the other", |screen| screen.contains("other-") && !screen.contains("weather-"));
    pane.press("Enter");
    pane.press("s");
    pane.shows("Stop other-");
    pane.press("y");
    pane.until("one is left", |screen| screen.contains("1 instance "));
    pane.press("Escape");
    pane.shows("weather-");
    pane.press("q");
    pane.left();
}

#[test]
fn top_restores_the_terminal_at_every_kind_of_exit() {
    let world = World::new();
    let _weather = world.start("weather", &[]);
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let pane = Pane::open(&world);
        pane.shows("weather-");
        let shell: i32 = pane.tmux(&["display-message", "-p", "#{pane_pid}"]).trim().parse().unwrap();
        let top = child_of(shell).expect("outlast top runs below the shell");
        kill(Pid::from_raw(top), signal).unwrap();
        pane.left();
    }
}

/// Ends a background session with the test, even if the test fails.
struct Night<'a>(&'a World);

impl Drop for Night<'_> {
    fn drop(&mut self) {
        self.0.outlast(&["stop", "night", "--force"]);
    }
}

#[test]
fn top_attaches_to_an_agent() {
    let world = World::new();
    let _night = Night(&world);
    let started =
        world.outlast(&["run", "-d", "--session", "night", "--", "sh", "-c", "echo the agent is $((40 + 2)); cat"]);
    assert!(started.status.success(), "{started:?}");
    let pane = Pane::open(&world);
    pane.shows("night");
    pane.press("a");
    let screen = pane.shows("the agent is 42");
    assert!(!screen.contains("INSTANCE"), "{screen}");
    pane.press("C-\\");
    pane.shows("left with 0");
    assert!(world.outlast(&["stop", "night"]).status.success(), "it went on all the while");
}

#[test]
fn without_a_terminal_top_is_one_table() {
    let world = World::new();
    let nothing = world.outlast(&["top"]);
    assert_eq!(String::from_utf8(nothing.stdout).unwrap(), "Nothing runs under outlast.\n");
    let mut weather = world.start("weather", &[]);
    weather.call("echo", json!({"text": "x"}));
    for args in [&["top"][..], &["top", "--once"]] {
        let output = world.command(world.project.path()).args(args).stdin(Stdio::null()).output().unwrap();
        let table = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[0].starts_with("ID ") && lines[0].contains("CALLS/S"), "{table}");
        assert!(lines[1].starts_with("weather-") && lines[1].contains(" ready "), "{table}");
        assert!(!table.contains('\x1b'), "{table}");
    }
    let row = &world.ps()[0];
    assert!(row["calls"].as_u64().unwrap() >= 2 && row["p50_ms"].is_f64(), "{row}");
}

/// The first child of this process.
fn child_of(parent: i32) -> Option<i32> {
    let output = Command::new("ps").args(["-o", "pid=", "--ppid", &parent.to_string()]).output().ok()?;
    String::from_utf8(output.stdout).ok()?.lines().next()?.trim().parse().ok()
}
