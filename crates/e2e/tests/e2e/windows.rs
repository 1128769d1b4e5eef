//! What only Windows has: pseudo consoles, named pipes, and a second start of the same program instead of a fork.

use std::{
    cell::OnceCell,
    path::Path,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tempfile::TempDir;

/// The timeout of every step.
const PATIENCE: Duration = Duration::from_secs(120);

/// Found beside the tests: cargo's environment variable is not passed on by every test runner.
fn program(name: &str) -> String {
    let tests = std::env::current_exe().unwrap();
    let built = tests.parent().and_then(Path::parent).unwrap();
    built.join(name).with_extension("exe").into_os_string().into_string().unwrap()
}

fn talker() -> String {
    program("outlast-talker")
}

/// A home directory, and a project to work in.
struct World {
    home: TempDir,
    project: TempDir,
    /// The session, once it was started.
    begun: OnceCell<String>,
}

impl Drop for World {
    fn drop(&mut self) {
        // A failed test leaves no process either. If the test stopped the session itself, this stop finds none.
        if let Some(id) = self.begun.get() {
            let _ = self.ask(&["stop", id]);
        }
    }
}

impl World {
    fn new() -> World {
        let dir = || tempfile::tempdir().unwrap();
        World { home: dir(), project: dir(), begun: OnceCell::new() }
    }

    fn outlast(&self, args: &[&str]) -> Command {
        let mut command = Command::new(program("outlast-under-test"));
        command.args(args).current_dir(self.project.path()).env("USERPROFILE", self.home.path());
        command
    }

    fn ask(&self, args: &[&str]) -> Output {
        self.outlast(args).stdin(Stdio::null()).output().unwrap()
    }

    /// Its output, if it succeeds.
    fn told(&self, args: &[&str]) -> String {
        let output = self.ask(args);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.told(args)).unwrap()
    }

    fn begin(&self, id: &str) {
        assert_eq!(self.told(&["run", "-d", "--session", id, "--", &talker()]).trim(), id);
        self.begun.set(id.to_owned()).unwrap();
        self.told(&["wait-for", id, "--text", "ready in", "--timeout", "60s"]);
    }

    fn until(&self, what: &str, mut is_so: impl FnMut(&World) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_so(self) {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn a_background_session_is_listed_typed_to_shown_and_stopped() {
    let world = World::new();
    world.begin("night");
    let listed = world.told(&["ps"]);
    assert!(listed.contains("night") && listed.contains("session"), "{listed}");
    let state = world.json(&["state", "night", "--json"]);
    assert_eq!((&state["state"], &state["running"]), (&"ready".into(), &true.into()), "{state}");
    let socket = state["socket"].as_str().unwrap();
    assert!(socket.starts_with(r"\\.\pipe\outlast-night-"), "{socket}");
    assert!(!Path::new(state["cwd"].as_str().unwrap()).starts_with(r"\\?\"), "{state}");

    world.told(&["inject", "night", "over here\r"]);
    world.told(&["wait-for", "night", "--text", "heard <over here>", "--timeout", "60s"]);
    let screen = world.told(&["screen", "night"]);
    assert!(screen.contains("ready in") && screen.contains("heard <over here>"), "{screen}");

    let again = world.ask(&["run", "-d", "--session", "night", "--", &talker()]);
    let words = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(!again.status.success() && words.contains("runs already"), "{words}");

    let stopped = world.told(&["stop", "night"]);
    assert!(stopped.starts_with("Stopped night"), "{stopped}");
    assert!(!world.told(&["ps"]).contains("night"));
    let run = world.home.path().join(".local/state/outlast/run");
    assert_eq!(std::fs::read_dir(run).unwrap().count(), 0, "no entry and no claim is left");
}

#[test]
fn an_agent_that_fails_or_is_restarted_runs_again() {
    let world = World::new();
    world.begin("day");
    let generation = |world: &World| world.json(&["state", "day", "--json"])["generation"].as_u64();
    assert_eq!(generation(&world), Some(1));
    world.told(&["inject", "day", "exit 3\r"]);
    world.until("it comes back", |world| generation(world) == Some(2));
    let state = world.json(&["state", "day", "--json"]);
    assert_eq!((&state["last_exit"], &state["last_exit_text"]), (&json!(3), &json!("exit code 3")), "{state}");
    world.told(&["restart", "day"]);
    world.until("it is another", |world| generation(world) == Some(3));
    assert!(world.told(&["logs", "day"]).contains("agent_spawn"));
    world.told(&["stop", "day"]);
}

#[test]
fn without_a_console_output_and_exit_code_of_the_agent_are_those_of_outlast() {
    let world = World::new();
    let agent = world
        .outlast(&["run", "--session", "plain", "--", &talker()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    world.until("it is there", |world| world.told(&["ps"]).contains("plain"));
    world.told(&["wait-for", "plain", "--text", "ready in", "--timeout", "60s"]);
    world.told(&["inject", "plain", "exit 0\r"]);
    let output = agent.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("ready in") && text.contains("bye"), "{text}");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn the_control_pipe_answers_and_a_killed_outlast_leaves_no_entry() {
    let world = World::new();
    let mut outlast = world
        .outlast(&["mcp", "--", &talker()])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    world.until("it is there", |world| world.told(&["ps"]).contains("outlast-talker"));
    let state = world.json(&["state", "--json"]);
    assert_eq!(state["outlast_pid"].as_u64(), Some(outlast.id().into()), "{state}");
    outlast.kill().unwrap();
    outlast.wait().unwrap();
    assert!(!world.told(&["ps"]).contains("outlast-talker"), "its entry is swept");
}
