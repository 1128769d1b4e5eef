//! The agents people use, real ones, in the terminal people use: claude and codex under `outlast run` in tmux. Only the
//! service they speak to is a stand-in.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::support::{
    OUTLAST,
    peers::Peers,
    service::{ANSWER, Service},
};

/// They are large programs, and the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Agent {
    Claude,
    Codex,
}

impl Agent {
    fn name(self) -> &'static str {
        match self {
            Agent::Claude => "claude",
            Agent::Codex => "codex",
        }
    }

    /// What stands before what one types.
    fn sign(self) -> &'static str {
        match self {
            Agent::Claude => "❯",
            Agent::Codex => "›",
        }
    }
}

/// One agent, a home for it that knows it already, a project, and a tmux of its own.
struct World {
    agent: Agent,
    service: Service,
    home: TempDir,
    project: TempDir,
    path: String,
}

impl World {
    fn new(agent: Agent, test: &str) -> Option<World> {
        let peers = Peers::find(test)?;
        let world = World {
            agent,
            service: Service::start(),
            home: tempfile::tempdir().unwrap(),
            project: tempfile::tempdir().unwrap(),
            path: peers.agents_path(),
        };
        if agent == Agent::Claude {
            // As after the questions of a first start, and with a key that is none.
            let trusted = json!({"hasTrustDialogAccepted": true, "hasCompletedProjectOnboarding": true});
            let known = json!({
                "hasCompletedOnboarding": true,
                "theme": "dark",
                "customApiKeyResponses": {"approved": [&KEY[KEY.len() - 20..]], "rejected": []},
                "projects": {world.place().to_str().unwrap(): trusted},
            });
            fs::write(world.home.path().join(".claude.json"), known.to_string()).unwrap();
        }
        Some(world)
    }

    fn place(&self) -> PathBuf {
        self.project.path().canonicalize().unwrap()
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.place()).env_clear().stdin(Stdio::null());
        command.envs([
            ("PATH", self.path.as_str()),
            ("LANG", "C.UTF-8"),
            ("TERM", "xterm-256color"),
            ("SHELL", "/bin/sh"),
        ]);
        command.env("HOME", self.home.path());
        match self.agent {
            Agent::Claude => command.envs([
                ("ANTHROPIC_API_KEY", KEY),
                ("ANTHROPIC_BASE_URL", &self.service.url()),
                ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
                ("DISABLE_AUTOUPDATER", "1"),
            ]),
            Agent::Codex => command.env("OPENAI_STAND_IN_KEY", "none"),
        };
        command
    }

    /// The agent's own words after its name.
    fn arguments(&self) -> Vec<String> {
        match self.agent {
            Agent::Claude => Vec::new(),
            Agent::Codex => {
                let provider =
                    format!("{{name=\"x\",base_url=\"{}\",env_key=\"OPENAI_STAND_IN_KEY\"}}", self.service.url());
                let settings = ["model_provider=\"x\"".to_owned(), format!("model_providers.x={provider}")];
                settings.into_iter().flat_map(|setting| ["-c".to_owned(), setting]).collect()
            }
        }
    }

    fn start(&self) {
        self.launch();
        self.until_ready(1);
    }

    fn launch(&self) {
        let arguments = self.arguments();
        let mut words = vec!["new-session", "-d", "-x", "110", "-y", "40", OUTLAST, "run", "--session", "s", "--"];
        words.push(self.agent.name());
        words.extend(arguments.iter().map(String::as_str));
        let output = self.tmux(&words);
        assert!(output.status.success(), "{}", text(&output.stderr));
        self.until("there", || !self.state().is_null());
    }

    fn tmux(&self, words: &[&str]) -> Output {
        let socket = self.home.path().join("tmux");
        self.command("tmux").arg("-S").arg(socket).args(["-f", "/dev/null"]).args(words).output().unwrap()
    }

    fn screen(&self) -> String {
        text(&self.tmux(&["capture-pane", "-p"]).stdout)
    }

    fn press(&self, keys: &[&str]) {
        assert!(self.tmux(&[&["send-keys"], keys].concat()).status.success());
    }

    fn outlast(&self, args: &[&str]) -> Output {
        self.command(OUTLAST).args(args).output().unwrap()
    }

    fn state(&self) -> Value {
        serde_json::from_slice(&self.outlast(&["state", "s", "--json"]).stdout).unwrap_or_default()
    }

    fn until(&self, what: &str, mut test: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !test() {
            assert!(
                Instant::now() < deadline,
                "{:?}: never {what}\n{}\n{}\n{}",
                self.agent,
                self.screen(),
                self.state(),
                self.log()
            );
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until this many agents were started and the last one can be worked with: by what outlast says, and by what
    /// is to be seen.
    fn until_ready(&self, generation: u64) -> Value {
        self.until("ready", || {
            let state = self.state();
            state["state"] == "ready" && state["generation"] == generation
        });
        self.until("seen", || self.screen().lines().any(|line| line.starts_with(self.agent.sign())));
        self.state()
    }

    /// The words it was started with.
    fn words_of(&self, state: &Value) -> String {
        let line = fs::read(format!("/proc/{}/cmdline", state["pid"])).unwrap();
        text(&line).replace('\0', " ")
    }

    fn kill(&self, state: &Value, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(state["pid"].as_i64().unwrap()).unwrap()), signal).unwrap();
    }

    /// A turn, put in as a paste and Enter.
    fn say(&self, words: &str) {
        let paste = format!("\x1b[200~{words}\x1b[201~");
        assert!(self.outlast(&["inject", "s", &paste, "--enter"]).status.success());
        self.until("answered", || self.service.turns_with(words) == 1 && self.screen().contains(ANSWER));
    }

    /// A line, typed as a person would: what comes in one piece is taken for a paste.
    fn type_line(&self, line: &str) {
        self.press(&[line]);
        let is_there = |shown: &str| shown.starts_with(self.agent.sign()) && shown.trim_end().ends_with(line);
        self.until("typed", || self.screen().lines().any(is_there));
        thread::sleep(PASTE_OVER);
        self.press(&["Enter"]);
    }

    fn log(&self) -> String {
        fs::read_to_string(self.place().join(".outlast/logs/s.log")).unwrap_or_default()
    }

    /// Waits until the turn is on the disk: claude writes it a moment after it was answered.
    fn until_kept(&self, words: &str) {
        let find = |dir: &str| {
            let mut grep = self.command("grep");
            grep.args(["-rlF", "--include=*.jsonl", words, dir]).current_dir(self.home.path());
            !grep.output().unwrap().stdout.is_empty()
        };
        self.until("kept", || find(".claude/projects") || find(".codex/sessions"));
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

/// Keys closer together than this are a paste, says codex, and Enter is then part of it.
const PASTE_OVER: Duration = Duration::from_millis(500);
/// Long enough for claude to take it for a key, and none of anybody's.
const KEY: &str = "sk-ant-api03-none-at-all-0123456789abcdef";

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn claude_comes_back_with_its_conversation() {
    let Some(world) = World::new(Agent::Claude, "claude_comes_back_with_its_conversation") else { return };
    world.start();
    let first = world.state();
    let id = first["conversation"].as_str().unwrap().to_owned();
    assert!(world.words_of(&first).contains(&format!("--session-id {id}")));

    // Nothing was said, so nothing was written, and there is nothing to resume: it begins again under the same id.
    world.kill(&first, Signal::SIGKILL);
    let second = world.until_ready(2);
    assert_eq!((&second["conversation"], &second["mode"]), (&json!(id), &json!("fresh")));
    world.say("what is a parser");
    world.until_kept("what is a parser");

    world.kill(&second, Signal::SIGKILL);
    let third = world.until_ready(3);
    assert!(world.words_of(&third).contains(&format!("--resume {id}")), "{}", world.words_of(&third));
    assert_eq!((&third["conversation"], &third["mode"]), (&json!(id), &json!("continue")));
    world.until("shown again", || world.screen().contains("what is a parser") && world.screen().contains(ANSWER));
    world.say("and what is a lexer");
    assert_eq!(world.service.turns_with("what is a parser"), 1, "the same conversation: {:?}", world.service.longest());

    let pid = third["pid"].clone();
    assert!(world.outlast(&["stop", "s"]).status.success());
    assert!(!PathBuf::from(format!("/proc/{pid}")).exists());
}

#[test]
fn codex_comes_back_with_its_conversation() {
    let Some(world) = World::new(Agent::Codex, "codex_comes_back_with_its_conversation") else { return };
    world.start();
    let first = world.state();
    assert_eq!(first["conversation"], Value::Null, "it has not said which yet");
    world.kill(&first, Signal::SIGKILL);
    let second = world.until_ready(2);
    assert_eq!((&second["conversation"], &second["mode"]), (&Value::Null, &json!("fresh")), "nothing was written");
    world.say("what is a parser");
    world.until_kept("what is a parser");

    world.kill(&second, Signal::SIGKILL);
    let third = world.until_ready(3);
    let id = third["conversation"].as_str().unwrap().to_owned();
    assert!(world.words_of(&third).contains(&format!("resume {id}")), "{}", world.words_of(&third));
    assert_eq!(third["mode"], "continue");
    world.until("shown again", || world.screen().contains("what is a parser") && world.screen().contains(ANSWER));
    world.say("and what is a lexer");
    assert_eq!(world.service.turns_with("what is a parser"), 1, "the same conversation: {:?}", world.service.longest());

    // It says which conversation it was when it leaves, too.
    world.type_line("/exit");
    world.until("asked", || world.screen().contains("q: quit"));
    assert!(world.screen().contains(&id), "{}", world.screen());
    world.press(&["Enter"]);
    let fourth = world.until_ready(4);
    assert_eq!((&fourth["conversation"], &fourth["mode"]), (&json!(id), &json!("continue")));
    assert!(world.outlast(&["stop", "s"]).status.success());
    assert!(!PathBuf::from(format!("/proc/{}", fourth["pid"])).exists());
}

/// What ends it, and what outlast makes of it.
enum Ending {
    Line(&'static str),
    Keys(&'static str),
    Sent(Signal),
}

#[test]
fn an_end_of_a_real_agent_means_what_it_should() {
    use Ending::*;
    #[rustfmt::skip]
    let table = [
        // agent         what ends it               exit                    class
        (Agent::Claude, Line("/exit"),             "exit code 0",          "user"),
        (Agent::Claude, Keys("C-c"),               "exit code 0",          "user"),
        (Agent::Claude, Keys("C-d"),               "exit code 0",          "user"),
        (Agent::Claude, Sent(Signal::SIGINT),    "exit code 0",          "clean"),
        (Agent::Claude, Sent(Signal::SIGTERM),   "signal 15 (SIGTERM)",  "transient"),
        (Agent::Claude, Sent(Signal::SIGHUP),    "signal 1 (SIGHUP)",    "transient"),
        (Agent::Codex,  Line("/exit"),             "exit code 0",          "user"),
        (Agent::Codex,  Keys("C-c"),               "exit code 0",          "user"),
        (Agent::Codex,  Keys("C-d"),               "exit code 0",          "user"),
        (Agent::Codex,  Sent(Signal::SIGINT),    "signal 2 (SIGINT)",    "transient"),
        (Agent::Codex,  Sent(Signal::SIGTERM),   "signal 15 (SIGTERM)",  "transient"),
    ];
    for agent in [Agent::Claude, Agent::Codex] {
        let Some(world) = World::new(agent, "an_end_of_a_real_agent_means_what_it_should") else { return };
        world.start();
        for (generation, (_, ending, exit, class)) in (1..).zip(table.iter().filter(|(who, ..)| *who == agent)) {
            let state = world.until_ready(generation);
            let ends = || world.log().matches(" agent_exit ").count() as u64;
            match ending {
                Line(line) => world.type_line(line),
                // It wants most of them twice, the second soon after it has said so: whatever it gets when it is gone is
                // for the question that follows.
                Keys(key) => {
                    world.press(&[key]);
                    let is_over = || ends() == generation;
                    world.until("asked for the key again", || is_over() || world.screen().contains("again to"));
                    if world.screen().contains("again to") && !is_over() {
                        world.press(&[key]);
                    }
                }
                Sent(signal) => world.kill(&state, *signal),
            }
            world.until("ended", || ends() == generation);
            let log = world.log();
            let end = log.lines().rfind(|line| line.contains(" agent_exit ")).unwrap();
            let exit = if exit.contains(' ') { format!("exit=\"{exit}\"") } else { format!("exit={exit}") };
            assert!(end.contains(&exit) && end.contains(&format!(" class={class} ")), "{agent:?}: {end}");
            if *class == "transient" {
                world.until("started again", || world.outlast(&["restart", "s"]).status.success());
            } else {
                world.until("asked", || world.screen().contains("q: quit"));
                world.press(&["Enter"]);
            }
        }
        assert!(world.outlast(&["stop", "s"]).status.success());
    }
}

/// Short, of two lines, and long: eight times each, every one seen by the service exactly once and as it was sent.
fn prove_sending(agent: Agent, test: &str) {
    let Some(world) = World::new(agent, test) else { return };
    // The first is sent before there is anything to type into.
    world.launch();
    let long = "a dozen kilobytes of words that mean little\n".repeat(270);
    for round in 0..8 {
        for (name, body) in [("short", ""), ("lines", "\nand a second line"), ("long", &long)] {
            let mark = format!("{name}-{round}-mark");
            let words = format!("{mark}{body}");
            let output = world.outlast(&["send", "s", words.trim_end(), "--submit", "--json", "--timeout", "60"]);
            let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            assert_eq!(answer["submitted"], true, "{agent:?} {mark}: {answer}\n{}", world.screen());
            world.until("heard", || world.service.turns_with(&mark) == 1);
            let heard = world.service.longest();
            let turn = heard.iter().find(|turn| turn.contains(&mark)).expect("it was heard");
            assert!(turn.contains(words.trim_end()), "{agent:?} {mark}: not as it was sent");
        }
    }
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn a_text_reaches_claude() {
    prove_sending(Agent::Claude, "a_text_reaches_claude");
}

#[test]
fn a_text_reaches_codex() {
    prove_sending(Agent::Codex, "a_text_reaches_codex");
}
