//! The real agents claude and codex under `outlast run` in tmux. Only the service they use is a stand-in.

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

use super::{
    run::is_alive,
    support::{
        OUTLAST,
        peers::Peers,
        processes,
        service::{ANSWER, SLOWLY, Service},
    },
};

/// They are large programs, and the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(180);
/// A key without effect for this long was pressed too early or too late, and is pressed once more.
const PRESS_AGAIN: Duration = Duration::from_secs(20);

/// The watchdog's timeout, where it is on. Both agents animate their windows several times a second while they work.
const HANG_TIMEOUT: Duration = Duration::from_secs(4);

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

    /// The sign before the input.
    fn sign(self) -> &'static str {
        match self {
            Agent::Claude => "❯",
            Agent::Codex => "›",
        }
    }
}

/// One agent, a configured home directory for it, a project, and its own tmux server.
struct World {
    agent: Agent,
    service: Service,
    home: TempDir,
    project: TempDir,
    path: String,
    /// claude is signed in to an account, which has usage limits; otherwise it has a key.
    is_subscriber: bool,
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
            is_subscriber: false,
        };
        if agent == Agent::Claude {
            // The state after the questions of a first start, with an invalid API key.
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

    /// Signs claude in to an account that does not exist.
    fn sign_in(&mut self) {
        self.is_subscriber = true;
        let known = self.home.path().join(".claude.json");
        let mut about: Value = serde_json::from_slice(&fs::read(&known).unwrap()).unwrap();
        about["oauthAccount"] = json!({
            "accountUuid": "11111111-2222-3333-4444-555555555555",
            "organizationUuid": "21111111-2222-3333-4444-555555555555",
            "emailAddress": "none@example.com",
            "hasExtraUsageEnabled": false,
        });
        fs::write(known, about.to_string()).unwrap();
        let token = json!({
            "accessToken": "sk-ant-oat01-none-at-all-0123456789abcdef",
            "refreshToken": "sk-ant-ort01-none",
            "expiresAt": 4_000_000_000_000_u64,
            "scopes": ["user:inference", "user:profile"],
            "subscriptionType": "max",
        });
        fs::create_dir_all(self.home.path().join(".claude")).unwrap();
        let file = self.home.path().join(".claude/.credentials.json");
        fs::write(file, json!({"claudeAiOauth": token}).to_string()).unwrap();
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
        if self.is_subscriber {
            command.env_remove("ANTHROPIC_API_KEY");
        }
        command
    }

    /// The agent's own arguments.
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
        self.launch_as("110", &[], &[self.agent.name()], &[]);
    }

    /// Starts it in a window of this width, with these options of outlast, this command, and these arguments after
    /// the agent's own.
    fn launch_as(&self, columns: &str, options: &[&str], command: &[&str], last: &[&str]) {
        let arguments = self.arguments();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let begin = ["new-session", "-d", "-x", columns, "-y", "40", OUTLAST, "run", "--session", "s"];
        // A tmux that was told to exit may not have exited yet.
        let words = [&begin, options, &["--"], command, &arguments, last].concat();
        self.until("in tmux", || self.tmux(&words).status.success());
        self.until("there", || self.outlast(&["state", "s"]).status.success());
    }

    /// A turn with a slow answer: from the start of its work until the answer, the agent never counts as waiting,
    /// although the answer contains all the signs that the agent shows itself; and when it waits, it does not count
    /// as hung.
    fn works_and_waits(&self) {
        self.until("waiting", || self.state()["waiting_for_input"] == true);
        let generation = self.state()["generation"].clone();
        let paste = format!("\x1b[200~tell me {SLOWLY}\x1b[201~");
        assert!(self.outlast(&["inject", "s", &paste, "--enter"]).status.success());
        self.until("busy", || self.state()["stance"] == "busy");
        let mut looks = 0;
        while !self.screen().contains(ANSWER) {
            let state = self.state();
            // The answer may have come in between.
            if self.screen().contains(ANSWER) {
                break;
            }
            assert_eq!(
                (&state["waiting_for_input"], &state["stance"]),
                (&json!(false), &json!("busy")),
                "{}",
                self.screen()
            );
            looks += 1;
        }
        assert!(looks > 3, "it was seen at work {looks} times");
        self.until("waiting again", || self.state()["waiting_for_input"] == true);
        assert!(self.screen().contains("esc to interrupt"), "{}", self.screen());
        // For longer than the watchdog's timeout.
        let until = Instant::now() + 3 * HANG_TIMEOUT;
        while Instant::now() < until {
            let state = self.state();
            assert_eq!(
                (&state["generation"], &state["waiting_for_input"]),
                (&generation, &json!(true)),
                "{}",
                self.logs()
            );
            thread::sleep(Duration::from_millis(200));
        }
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
                self.logs()
            );
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Repeats an action, with a pause, until the test holds.
    fn insist(&self, what: &str, mut act: impl FnMut(), mut test: impl FnMut() -> bool) {
        let mut again = Instant::now();
        self.until(what, || {
            let holds = test();
            if !holds && again <= Instant::now() {
                act();
                again = Instant::now() + PRESS_AGAIN;
            }
            holds
        });
    }

    /// Waits until this many agents were started and the last one is ready: by the state that outlast reports, and by
    /// the screen.
    fn until_ready(&self, generation: u64) -> Value {
        let state = self.until_ready_after(generation - 1);
        assert_eq!(state["generation"], generation, "{}", self.log());
        state
    }

    /// The same for any agent after that one.
    fn until_ready_after(&self, generation: u64) -> Value {
        self.until("ready", || {
            let state = self.state();
            state["state"] == "ready" && state["generation"].as_u64() > Some(generation)
        });
        self.until("seen", || self.screen().lines().any(|line| line.starts_with(self.agent.sign())));
        self.state()
    }

    /// The arguments it was started with.
    fn words_of(&self, state: &Value) -> String {
        let line = fs::read(format!("/proc/{}/cmdline", state["pid"])).unwrap();
        text(&line).replace('\0', " ")
    }

    fn outlast_pid(&self) -> Option<u64> {
        let listed: Value = serde_json::from_slice(&self.outlast(&["ps", "--json"]).stdout).ok()?;
        listed.as_array()?.iter().find(|one| one["id"] == "s")?["pid"].as_u64()
    }

    fn kill(&self, state: &Value, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(state["pid"].as_i64().unwrap()).unwrap()), signal).unwrap();
    }

    /// A turn, as a paste and Enter.
    fn say(&self, words: &str) {
        let paste = format!("\x1b[200~{words}\x1b[201~");
        assert!(self.outlast(&["inject", "s", &paste, "--enter"]).status.success());
        self.until("answered", || self.service.turns_with(words) == 1 && self.screen().contains(ANSWER));
    }

    /// A turn, by `send`. An agent that has just started may drop Enter; the text is then removed, and sent again.
    fn submit(&self, words: &str) {
        let send = ["send", "s", words, "--submit", "--timeout", "170"];
        self.until("submitted", || self.outlast(&send).status.success());
    }

    /// A line, typed as a person would, until it had an effect: input in one piece is taken for a paste, and on a
    /// busy machine two pieces may be read as one.
    fn type_line(&self, line: &str, had_effect: impl Fn() -> bool) {
        let is_there = |shown: &str| shown.starts_with(self.agent.sign()) && shown.trim_end().ends_with(line);
        let is_typed = || self.screen().lines().any(is_there);
        self.insist("typed", || self.press(&["C-u", line]), is_typed);
        thread::sleep(PASTE_OVER);
        // After the agent has exited, Enter would answer the question that follows.
        let enter = || {
            if is_typed() && !had_effect() {
                self.press(&["Enter"]);
            }
        };
        self.insist("entered", enter, &had_effect);
    }

    /// The log line of the end of this agent, after it has ended.
    fn end_of(&self, pid: u64) -> Option<String> {
        self.log().lines().find(|line| line.contains(&format!(" agent_exit pid={pid} "))).map(str::to_owned)
    }

    /// Presses keys that make the agent exit. It requires most of them twice, the second soon after its notice; a
    /// late second key counts as a first one. Keys after its exit go to the question that follows.
    fn press_away(&self, key: &str, pid: u64, is_over: impl Fn() -> bool) {
        let (mut presses, mut again) = (0, Instant::now());
        self.until("sent away", || {
            let asks = self.screen().contains("again to");
            if is_over() {
                return true;
            }
            // It has exited, and outlast is about to notice.
            if !is_alive(pid) {
                return false;
            }
            if presses == 1 && asks || again <= Instant::now() {
                self.press(&[key]);
                presses = if asks { 2 } else { 1 };
                again = Instant::now() + PRESS_AGAIN;
            }
            false
        });
    }

    /// The logs of all sessions.
    fn logs(&self) -> String {
        let files = fs::read_dir(self.place().join(".outlast/logs")).into_iter().flatten().flatten();
        files.map(|file| fs::read_to_string(file.path()).unwrap_or_default()).collect::<Vec<_>>().join("\n")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.place().join(".outlast/logs/s.log")).unwrap_or_default()
    }

    /// Waits until the turn is on the disk: claude writes it a moment after the answer.
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

/// How many agents are started at most to see eleven of them end.
const FAILURES_MAX: u64 = 20;
/// codex treats keys that are closer together than this as a paste, and Enter is then part of it.
const PASTE_OVER: Duration = Duration::from_millis(500);
/// Long enough for claude to accept it as a key; it is not a real key.
const KEY: &str = "sk-ant-api03-none-at-all-0123456789abcdef";

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn claude_is_restarted_with_its_conversation() {
    let Some(world) = World::new(Agent::Claude, "claude_is_restarted_with_its_conversation") else { return };
    world.start();
    let first = world.state();
    let id = first["conversation"].as_str().unwrap().to_owned();
    assert!(world.words_of(&first).contains(&format!("--session-id {id}")));

    // There was no turn, so no transcript exists and nothing can be resumed: it starts again under the same id.
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
fn codex_is_restarted_with_its_conversation() {
    let Some(world) = World::new(Agent::Codex, "codex_is_restarted_with_its_conversation") else { return };
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

    // It reports its conversation at its exit, too.
    let pid = third["pid"].as_u64().unwrap();
    world.type_line("/exit", || world.end_of(pid).is_some());
    world.until("asked", || world.screen().contains("q: quit"));
    assert!(world.screen().contains(&id), "{}", world.screen());
    world.press(&["Enter"]);
    let fourth = world.until_ready(4);
    assert_eq!((&fourth["conversation"], &fourth["mode"]), (&json!(id), &json!("continue")));
    assert!(world.outlast(&["stop", "s"]).status.success());
    assert!(!PathBuf::from(format!("/proc/{}", fourth["pid"])).exists());
}

/// After a crash that follows `/clear` or `/new`, the agent resumes its current conversation, and the initial prompt
/// is sent once.
fn prove_new_conversation(agent: Agent, test: &str, line: &str) {
    let Some(world) = World::new(agent, test) else { return };
    world.launch_as("110", &[], &[agent.name()], &["deploy the parser"]);
    world.until("heard", || world.service.turns_with("deploy the parser") == 1);
    world.until_kept("deploy the parser");
    world.until("learned", || world.state()["conversation"].is_string());
    let first = world.until_ready(1);
    let old = first["conversation"].as_str().unwrap().to_owned();
    world.kill(&first, Signal::SIGKILL);
    let second = world.until_ready(2);
    assert_eq!((&second["conversation"], &second["mode"]), (&json!(old), &json!("continue")));
    assert!(!world.words_of(&second).contains("deploy"), "{}", world.words_of(&second));
    world.say("what is a lexer");
    assert_eq!(world.service.turns_with("deploy the parser"), 1, "sent once: {:?}", world.service.longest());

    // The new conversation is known before its first turn.
    world.type_line(line, || world.state()["conversation"].as_str().is_some_and(|id| id != old));
    let new = world.state()["conversation"].as_str().unwrap().to_owned();
    world.say("what is a linker");
    world.until_kept("what is a linker");
    assert_eq!(world.state()["conversation"], json!(new));
    // If an agent crashes within 5 s of its resumption, the resumption counts as failed.
    world.until("proven", || world.state()["uptime_s"].as_f64().is_some_and(|uptime| uptime > 8.0));
    world.kill(&second, Signal::SIGKILL);
    let third = world.until_ready(3);
    assert_eq!((&third["conversation"], &third["mode"]), (&json!(new), &json!("continue")));
    assert!(world.words_of(&third).contains(&format!("resume {new}")), "{}", world.words_of(&third));
    world.until("shown again", || world.screen().contains("what is a linker"));
    assert!(!world.screen().contains("what is a lexer"), "{}", world.screen());

    // After outlast itself was killed, the same session resumes the conversation, too.
    let outlast = world.outlast_pid().unwrap();
    kill(Pid::from_raw(i32::try_from(outlast).unwrap()), Signal::SIGKILL).unwrap();
    world.until("gone", || !world.outlast(&["state", "s"]).status.success());
    world.tmux(&["kill-server"]);
    world.launch_as("110", &[], &[agent.name()], &["deploy the parser"]);
    let fourth = world.until_ready(1);
    assert_eq!((&fourth["conversation"], &fourth["mode"]), (&json!(new), &json!("continue")));
    assert!(!world.words_of(&fourth).contains("deploy"), "{}", world.words_of(&fourth));
    world.until("shown again", || world.screen().contains("what is a linker"));

    // A session that the user ended starts a new conversation.
    assert!(world.outlast(&["stop", "s"]).status.success());
    world.tmux(&["kill-server"]);
    world.launch_as("110", &[], &[agent.name()], &[]);
    let fifth = world.until_ready(1);
    assert_eq!(fifth["mode"], "fresh");
    assert_ne!(fifth["conversation"], json!(new));
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn claude_is_restarted_with_the_conversation_it_is_in() {
    prove_new_conversation(Agent::Claude, "claude_is_restarted_with_the_conversation_it_is_in", "/clear");
}

#[test]
fn codex_is_restarted_with_the_conversation_it_is_in() {
    prove_new_conversation(Agent::Codex, "codex_is_restarted_with_the_conversation_it_is_in", "/new");
}

/// A reboot: all processes of the session are killed, and its sockets are gone. Restored are the conversation, the
/// directory, the options and the names of the variables.
fn prove_restore(agent: Agent, test: &str) {
    let Some(world) = World::new(agent, test) else { return };
    fs::create_dir(world.place().join("sub")).unwrap();
    if agent == Agent::Claude {
        let known = world.home.path().join(".claude.json");
        let trusted = fs::read_to_string(&known).unwrap();
        let place = world.place().to_str().unwrap().to_owned();
        fs::write(&known, trusted.replace(&place, &format!("{place}/sub"))).unwrap();
    }
    let own = world.arguments();
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    let options = ["--cwd", "sub", "--env-pass", "TEST_*", "--hang-timeout", "10m"];
    let words = [&["run", "-d", "--session", "s"], &options[..], &["--", agent.name()], &own].concat();
    let output = world.command(OUTLAST).args(words).env("TEST_MARK", "1").output().unwrap();
    let _background = Background { world: &world, session: "s" };
    assert!(output.status.success(), "{}", text(&output.stderr));
    world.until("waiting", || world.state()["waiting_for_input"] == true);
    world.submit("what is a parser");
    world.until("heard", || world.service.turns_with("what is a parser") == 1);
    world.until_kept(ANSWER);
    world.until("learned", || world.state()["conversation"].is_string());
    let before = world.state();

    let outlast = world.outlast_pid().unwrap();
    let all = [vec![outlast], processes::below(outlast)].concat();
    assert!(all.contains(&before["pid"].as_u64().unwrap()), "{all:?}");
    processes::kill_at_once(&all);
    world.until("gone", || !all.iter().any(|pid| is_alive(*pid)));
    fs::remove_dir_all(world.home.path().join(".local/state/outlast/run")).unwrap();

    let restored = world.outlast(&["restore", "--all", "--json"]);
    let said: Value = serde_json::from_slice(&restored.stdout).unwrap_or_default();
    assert_eq!((&said[0]["result"], &said[0]["waiting_for_input"]), (&json!("restored"), &json!(true)), "{said}");
    assert_eq!(said[0]["env_missing"], json!(["TEST_MARK"]), "{said}");
    let after = world.state();
    for member in ["conversation", "cwd", "cwd_source"] {
        assert_eq!(after[member], before[member], "{member}");
    }
    let id = before["conversation"].as_str().unwrap();
    assert_eq!(after["mode"], "continue");
    assert!(world.words_of(&after).contains(&format!("resume {id}")), "{}", world.words_of(&after));
    let screen = || text(&world.outlast(&["screen", "s"]).stdout);
    world.until("shown again", || screen().contains("what is a parser") && screen().contains(ANSWER));
    let record = world.home.path().join(".local/state/outlast/sessions/s.json");
    let record: Value = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
    assert_eq!(record["options"], json!(options));
    // The next turn is of the same conversation.
    world.submit("and what is a lexer");
    let is_one = || world.service.longest().iter().any(|turn| turn.contains("what is a parser"));
    world.until("heard", || world.service.turns_with("and what is a lexer") == 1 && is_one());
    assert!(world.outlast(&["stop", "s"]).status.success());
    let nothing = world.outlast(&["restore", "--all", "--json"]);
    assert_eq!(text(&nothing.stdout).trim(), "[]");
}

#[test]
fn claude_is_restored_after_a_reboot() {
    prove_restore(Agent::Claude, "claude_is_restored_after_a_reboot");
}

#[test]
fn codex_is_restored_after_a_reboot() {
    prove_restore(Agent::Codex, "codex_is_restored_after_a_reboot");
}

/// The agents' own screens of a usage limit, which the service brings about as the providers do. With `--on-limit wait`
/// the agent continues when the limit is over: claude by itself, codex because outlast tells it.
fn prove_limit(agent: Agent, test: &str) {
    let Some(mut world) = World::new(agent, test) else { return };
    if agent == Agent::Claude {
        world.sign_in();
    }
    world.launch_as("60", &["--on-limit", "wait"], &[agent.name()], &[]);
    world.until_ready(1);
    world.say("what is a parser");
    // The words alone are no limit.
    world.say("why do you say: You've hit your usage limit · resets 3pm");
    assert_eq!(world.state()["state"], "ready");
    let until = world.service.limit_for(40);
    world.submit("and what is a lexer");
    world.until("limited", || world.state()["state"] == "limited");
    let state = world.state();
    let end = state["limited_until"].as_u64().unwrap();
    match agent {
        Agent::Claude => assert_eq!(end, until, "{state}"),
        // It shows the minute only.
        Agent::Codex => assert_eq!(end / 60, until / 60, "{state}"),
    }
    assert!(state["limit"].as_str().unwrap().contains("limit"), "{state}");
    let started = Instant::now();
    while world.state()["state"] != "ready" {
        assert!(started.elapsed() < 2 * PATIENCE, "{}\n{}", world.screen(), world.log());
        thread::sleep(Duration::from_millis(200));
    }
    world.until("answered", || world.service.longest().iter().any(|turn| turn.contains("and what is a lexer")));
    let is_told = world.service.has_heard("Continue.");
    assert!(world.log().contains(" limit_over"), "{}", world.log());
    assert!(is_told || agent == Agent::Claude, "{:?}\n{}", world.service.longest(), world.log());
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn claude_at_its_limit_is_recognized_and_continues() {
    prove_limit(Agent::Claude, "claude_at_its_limit_is_recognized_and_continues");
}

#[test]
fn codex_at_its_limit_is_recognized_and_continues() {
    prove_limit(Agent::Codex, "codex_at_its_limit_is_recognized_and_continues");
}

/// The end of a turn carries the answer of the agent, by its hooks or its files.
fn prove_answer(agent: Agent, test: &str) {
    let Some(world) = World::new(agent, test) else { return };
    world.launch();
    world.until_ready(1);
    world.submit("what is a parser");
    let answer = world.outlast(&["wait-for", "s", "--turn", "--timeout", "170"]);
    assert_eq!(text(&answer.stdout).trim(), ANSWER, "{}{}", text(&answer.stderr), world.log());
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn the_answer_of_claude_is_known() {
    prove_answer(Agent::Claude, "the_answer_of_claude_is_known");
}

#[test]
fn the_answer_of_codex_is_known() {
    prove_answer(Agent::Codex, "the_answer_of_codex_is_known");
}

/// A crash during a turn: `--on-resume` makes the agent continue, once.
fn prove_on_resume(agent: Agent, test: &str) {
    let Some(world) = World::new(agent, test) else { return };
    world.launch_as("110", &["--on-resume", "Go on please."], &[agent.name()], &[]);
    world.until_ready(1);
    world.say("what is a parser");
    world.until_kept("what is a parser");
    world.submit(&format!("tell me {SLOWLY}"));
    world.until("busy", || world.state()["stance"] == "busy");
    world.kill(&world.state(), Signal::SIGKILL);
    world.until("told", || world.service.has_heard("Go on please."));
    world.until("answered", || world.state()["waiting_for_input"] == true);
    assert_eq!(world.service.turns_with("Go on please."), 1, "{:?}", world.service.longest());
    assert_eq!((&world.state()["generation"], &world.state()["mode"]), (&json!(2), &json!("continue")));
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn claude_continues_an_interrupted_turn() {
    prove_on_resume(Agent::Claude, "claude_continues_an_interrupted_turn");
}

#[test]
fn codex_continues_an_interrupted_turn() {
    prove_on_resume(Agent::Codex, "codex_continues_an_interrupted_turn");
}

/// Behind a wrapper, in a narrow window, with a status line and settings of the user.
#[test]
fn claude_behind_a_wrapper_keeps_its_conversation() {
    let Some(world) = World::new(Agent::Claude, "claude_behind_a_wrapper_keeps_its_conversation") else { return };
    let write = |name: &str, text: &str| fs::write(world.place().join(name), text).unwrap();
    write("wrap.sh", "#!/bin/sh\necho \"$@\" >> args.log\nclaude \"$@\"\n");
    let hook = |word: &str| {
        let command = format!("echo {word} >> {}/hooks.log", world.place().display());
        json!({"SessionStart": [{"hooks": [{"type": "command", "command": command}]}]})
    };
    let status = json!({"type": "command", "command": "echo a status line of esc to interrupt"});
    write("own.json", &json!({"hooks": hook("flag"), "statusLine": status}).to_string());
    let user = world.home.path().join(".claude");
    fs::create_dir_all(&user).unwrap();
    fs::write(user.join("settings.json"), json!({"hooks": hook("user")}).to_string()).unwrap();
    let command = ["sh", "./wrap.sh", "--settings", "own.json"];
    world.launch_as("44", &["--agent", "claude"], &command, &[]);
    let first = world.until_ready(1);
    let old = first["conversation"].as_str().unwrap().to_owned();
    world.until("a status line", || world.screen().contains("a status line"));
    let hooks = || fs::read_to_string(world.place().join("hooks.log")).unwrap_or_default();
    world.until("hooked", || hooks().contains("flag") && hooks().contains("user"));
    world.type_line("/clear", || world.state()["conversation"].as_str().is_some_and(|id| id != old));
    let new = world.state()["conversation"].as_str().unwrap().to_owned();
    world.say("what is a linker");
    world.until_kept("what is a linker");
    assert!(world.log().contains(" agent_event what=prompt "), "{}", world.log());
    // The wrapper is killed; claude exits with its terminal.
    world.kill(&first, Signal::SIGKILL);
    let second = world.until_ready(2);
    assert_eq!((&second["conversation"], &second["mode"]), (&json!(new), &json!("continue")));
    let args = fs::read_to_string(world.place().join("args.log")).unwrap();
    assert!(args.lines().nth(1).unwrap().contains(&format!("--resume {new}")), "{args}");
    world.until("shown again", || world.screen().contains("what is a linker"));
    assert!(world.outlast(&["stop", "s"]).status.success());
    let left = world.home.path().join(".local/state/outlast/sessions/s.settings.json");
    // The remaining processes of the agent are killed before the last file is removed.
    world.until("the settings to go with the session", || !left.exists());
}

/// A wrapper that drops its arguments: no hook reports, and the conversation is found in claude's own file.
#[test]
fn claude_without_hooks_is_known_by_its_files() {
    let Some(world) = World::new(Agent::Claude, "claude_without_hooks_is_known_by_its_files") else { return };
    fs::write(world.place().join("wrap.sh"), "#!/bin/sh\nclaude\n").unwrap();
    world.launch_as("110", &["--agent", "claude"], &["sh", "./wrap.sh"], &[]);
    world.until_ready(1);
    world.say("what is a parser");
    let is_kept_as = |id: &str, words: &str| {
        let mut grep = world.command("grep");
        grep.args(["-rlF", "--include=*.jsonl", words, ".claude/projects"]).current_dir(world.home.path());
        text(&grep.output().unwrap().stdout).contains(id)
    };
    let is_in = |words: &str| world.state()["conversation"].as_str().is_some_and(|id| is_kept_as(id, words));
    world.until("learned", || is_in("what is a parser"));
    let old = world.state()["conversation"].as_str().unwrap().to_owned();
    world.type_line("/clear", || world.state()["conversation"].as_str().is_some_and(|id| id != old));
    world.say("what is a linker");
    world.until("learned again", || is_in("what is a linker"));
    assert!(!world.log().contains("agent_event"), "{}", world.log());
    assert!(world.outlast(&["stop", "s"]).status.success());
}

/// A conversation chosen by `-c` is kept by its id, even if a newer one was begun in the same directory.
#[test]
fn claude_continued_by_its_user_keeps_that_conversation() {
    let Some(world) = World::new(Agent::Claude, "claude_continued_by_its_user_keeps_that_conversation") else { return };
    world.start();
    let id = world.state()["conversation"].as_str().unwrap().to_owned();
    world.say("what is a parser");
    world.until_kept("what is a parser");
    assert!(world.outlast(&["stop", "s"]).status.success());
    world.tmux(&["kill-server"]);
    world.launch_as("110", &[], &["env", "X=1", "claude", "-c"], &[]);
    let first = world.until_ready(1);
    world.until("learned", || world.state()["conversation"] == json!(id));
    let mut other = world.command("claude");
    let output = other.args(["-p", "something else"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    world.kill(&first, Signal::SIGKILL);
    let second = world.until_ready(2);
    assert_eq!((&second["conversation"], &second["mode"]), (&json!(id), &json!("continue")));
    assert!(world.words_of(&second).contains(&format!("--resume {id}")), "{}", world.words_of(&second));
    world.until("shown again", || world.screen().contains("what is a parser"));
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn two_codex_in_one_directory_keep_their_own_conversations() {
    let test = "two_codex_in_one_directory_keep_their_own_conversations";
    let Some(world) = World::new(Agent::Codex, test) else { return };
    let arguments = world.arguments();
    let state = |session: &str| -> Value {
        serde_json::from_slice(&world.outlast(&["state", session, "--json"]).stdout).unwrap_or_default()
    };
    let _both = ["one", "two"].map(|session| {
        let mut command = world.command(OUTLAST);
        command.args(["run", "-d", "--session", session, "--", "codex"]).args(&arguments);
        let output = command.output().unwrap();
        let background = Background { world: &world, session };
        assert!(output.status.success(), "{}", text(&output.stderr));
        // One after the other: two agents that create their files at the same time disturb each other.
        world.until("ready", || state(session)["state"] == "ready");
        background
    });
    let sent = [("one", "what is a parser"), ("two", "what is a lexer")];
    for (session, words) in sent {
        let send = || world.outlast(&["send", session, words, "--submit", "--timeout", "170"]);
        let mut output = send();
        // On a busy machine a codex may exit while another one creates its files. outlast starts it again.
        if text(&output.stderr).contains("because: the agent ended") {
            world.until("ready again", || state(session)["state"] == "ready");
            output = send();
        }
        assert!(output.status.success(), "{}", text(&output.stderr));
        world.until("heard", || world.service.turns_with(words) == 1);
        world.until_kept(words);
    }
    // While the agent works, its conversation is known by the file that it has open.
    let ids = sent.map(|(session, words)| {
        world.until("learned", || state(session)["conversation"].is_string());
        let before = state(session);
        let id = before["conversation"].as_str().unwrap().to_owned();
        let mut grep = world.command("grep");
        grep.args(["-rlF", words, ".codex/sessions"]).current_dir(world.home.path());
        let kept = text(&grep.output().unwrap().stdout);
        assert!(kept.contains(&id) && kept.lines().count() == 1, "{session}: {id} is not in {kept}");
        world.kill(&before, Signal::SIGKILL);
        id
    });
    assert_ne!(ids[0], ids[1]);
    for ((session, _), id) in sent.iter().zip(&ids) {
        world.until("back", || state(session)["mode"] == "continue" && state(session)["state"] == "ready");
        let after = state(session);
        assert_eq!(after["conversation"], json!(id), "{after}");
        assert!(world.words_of(&after).contains(&format!("resume {id}")), "{}", world.words_of(&after));
    }
}

/// Ends a background session with the test, even if the test fails.
struct Background<'a> {
    world: &'a World,
    session: &'static str,
}

impl Drop for Background<'_> {
    fn drop(&mut self) {
        self.world.outlast(&["stop", self.session, "--force"]);
    }
}

/// The cause of the end, and outlast's classification of it.
enum Ending {
    Line(&'static str),
    Keys(&'static str),
    Sent(Signal),
}

#[test]
fn the_exit_of_a_real_agent_is_classified() {
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
        let Some(world) = World::new(agent, "the_exit_of_a_real_agent_is_classified") else { return };
        world.start();
        let mut last = 0;
        for (_, ending, exit, class) in table.iter().filter(|(who, ..)| *who == agent) {
            let is_crash = *class == "transient";
            // On a busy machine a real agent may also fail for a reason of its own; then the test continues with the
            // next process.
            let end = loop {
                let state = world.until_ready_after(last);
                last = state["generation"].as_u64().unwrap();
                let Some(pid) = state["pid"].as_u64() else { continue };
                let is_over = || world.end_of(pid).is_some();
                match ending {
                    Line(line) => world.type_line(line, is_over),
                    Keys(key) => world.press_away(key, pid, is_over),
                    Sent(signal) => world.kill(&state, *signal),
                }
                world.until("ended", is_over);
                let end = world.end_of(pid).unwrap();
                if !end.contains("exit=\"exit code 1\"") || last > FAILURES_MAX {
                    break end;
                }
            };
            assert!(end.contains(&format!("exit=\"{exit}\"")), "{agent:?}: {end}\n{}", world.log());
            // The number of earlier crashes decides between the two classes.
            let is_class = |class: &str| end.contains(&format!(" class={class} "));
            assert!(is_class(class) || is_crash && is_class("flapping"), "{agent:?}: {end}\n{}", world.log());
            if is_crash {
                world.until("started again", || world.outlast(&["restart", "s"]).status.success());
            } else {
                world.insist("answered", || world.press(&["Enter"]), || world.state()["state"] != "exited");
            }
        }
        assert!(world.outlast(&["stop", "s"]).status.success());
    }
}

/// Short, with two lines, and long: eight times each, and the service receives each exactly once and unchanged.
fn prove_sending(agent: Agent, test: &str) {
    let Some(world) = World::new(agent, test) else { return };
    // The first text is sent before the composer exists.
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
            assert!(world.service.has_heard(words.trim_end()), "{agent:?} {mark}: not as it was sent");
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

/// Texts in which Enter, a menu or a Unicode form has a special meaning. Each is submitted unchanged, or reported as
/// not submitted; and none blocks the next.
fn prove_odd_texts(agent: Agent, test: &str) {
    let Some(world) = World::new(agent, test) else { return };
    fs::write(world.place().join("xfile.txt"), "").unwrap();
    world.start();
    let send = |words: &str| -> Value {
        let output = world.outlast(&["send", "s", words, "--submit", "--json", "--timeout", "60"]);
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    };
    #[rustfmt::skip]
    let turns = [
        // sent                         as it may be heard
        ("ends in a backslash \\",      "ends in a backslash \\"),
        ("what is $x",                  "what is $x"),
        ("what is @x",                  "what is @x"),
        ("a family 👨‍👩‍👧 of one",         "a family 👨‍👩‍👧 of one"),
        ("👍🏽",                         "👍🏽"),
        ("zero\u{200b}width",           "zerowidth"),
        ("cafe\u{301} decomposed",      "caf\u{e9} decomposed"),
        ("!echo a shell command",       ""),
        ("and at last words",           "and at last words"),
    ];
    for (sent, heard) in turns {
        let answer = send(sent);
        assert_eq!(answer["result"], "submitted", "{agent:?} {sent}: {answer}\n{}", world.screen());
        assert!(answer["proof"]["recorded_by"].is_string(), "{answer}");
        // codex sends a shell command to the service with the next turn.
        if !sent.starts_with('!') {
            world.until("heard", || world.service.has_heard(heard) || world.service.has_heard(sent));
        }
    }
    // Commands of the agent itself, complete and incomplete: they are not turns.
    let other = if agent == Agent::Claude { "/clear" } else { "/new" };
    for sent in ["/zzz", "/stat", "/hel", other] {
        let answer = send(sent);
        // claude may record a command in its transcript.
        let is_own = answer["proof"]["recorded_by"] == "transcript" && sent == "/clear";
        assert!(answer["submitted"] != true || is_own, "{agent:?} {sent}: {answer}");
        assert!(!world.service.has_heard(sent) || is_own);
        // Closes a menu that may be open.
        world.press(&["Escape"]);
        world.until("waiting", || world.state()["stance"] == "prompt");
        let words = format!("after {sent} this");
        assert_eq!(send(&words)["result"], "submitted", "{agent:?} after {sent}: {}", world.screen());
    }
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn odd_texts_reach_claude() {
    prove_odd_texts(Agent::Claude, "odd_texts_reach_claude");
}

#[test]
fn odd_texts_reach_codex() {
    prove_odd_texts(Agent::Codex, "odd_texts_reach_codex");
}

/// claude reports a turn before a hook of the user refuses it and restores the text.
#[test]
fn a_text_that_a_hook_refuses_is_not_submitted() {
    let Some(world) = World::new(Agent::Claude, "a_text_that_a_hook_refuses_is_not_submitted") else { return };
    fs::create_dir_all(world.home.path().join(".claude")).unwrap();
    let hook = json!({"type": "command", "command": "if grep -q forbidden; then echo no >&2; exit 2; fi"});
    let settings = json!({"hooks": {"UserPromptSubmit": [{"hooks": [hook]}]}});
    fs::write(world.home.path().join(".claude/settings.json"), settings.to_string()).unwrap();
    world.start();
    let send = |words: &str| -> Value {
        let output = world.outlast(&["send", "s", words, "--submit", "--json", "--timeout", "60"]);
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    };
    assert_eq!(send("allowed words")["result"], "submitted");
    let refused = send("forbidden words");
    assert_eq!((&refused["error"]["code"], &refused["error"]["removed"]), (&json!("not_submitted"), &json!(true)));
    assert_eq!(send("other words")["result"], "submitted", "{}", world.screen());
    assert!(!world.service.has_heard("forbidden words"));
    assert!(world.outlast(&["stop", "s"]).status.success());
}

/// With a status line, which replaces claude's own hints, and in a narrow window.
#[test]
fn claude_is_seen_to_work_and_to_wait() {
    let Some(world) = World::new(Agent::Claude, "claude_is_seen_to_work_and_to_wait") else { return };
    fs::create_dir_all(world.home.path().join(".claude")).unwrap();
    let settings = json!({"statusLine": {"type": "command", "command": "echo esc to interrupt"}});
    fs::write(world.home.path().join(".claude/settings.json"), settings.to_string()).unwrap();
    world.launch_as("40", &["--hang-timeout", "4"], &[world.agent.name()], &[]);
    world.until_ready(1);
    world.works_and_waits();
}

/// While it writes an answer codex shows the same screen as when it waits.
#[test]
fn codex_is_seen_to_work_and_to_wait() {
    let Some(world) = World::new(Agent::Codex, "codex_is_seen_to_work_and_to_wait") else { return };
    world.launch_as("40", &["--hang-timeout", "4"], &[world.agent.name()], &[]);
    world.until_ready(1);
    world.works_and_waits();
}

/// Ctrl-Z under a shell: the shell gets its prompt back, and `fg` continues claude.
#[test]
fn claude_can_be_suspended_under_a_shell() {
    let Some(world) = World::new(Agent::Claude, "claude_can_be_suspended_under_a_shell") else { return };
    let shell = ["new-session", "-d", "-x", "110", "-y", "40", "env", "PS1=shell$ ", "bash", "--norc", "-i"];
    assert!(world.tmux(&shell).status.success());
    world.until("a shell", || world.screen().contains("shell$"));
    world.press(&[&format!("{OUTLAST} run --session s -- claude"), "Enter"]);
    world.until("there", || world.outlast(&["state", "s"]).status.success());
    let first = world.until_ready(1);
    world.until("waiting", || world.state()["waiting_for_input"] == true);
    let is_shell = || world.screen().trim_end().lines().last().is_some_and(|line| line.trim() == "shell$");
    world.insist("suspended", || world.press(&["C-z"]), is_shell);
    world.press(&["clear; echo $((6 * 7)); fg", "Enter"]);
    world.until("continued", || world.screen().lines().any(|line| line.starts_with(Agent::Claude.sign())));
    world.say("are you back");
    assert_eq!((&world.state()["pid"], &world.state()["restarts"]), (&first["pid"], &json!(0)));
}
