//! An agent in a terminal: a script under the real program, in a terminal of this test.

mod upgrade;

use std::{
    fs::{self, File},
    io::{Read, Write},
    os::{fd::OwnedFd, unix::fs::PermissionsExt, unix::net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    pty::{OpenptyResult, Winsize, openpty},
    sys::{
        signal::{Signal, kill},
        termios::{Termios, tcgetattr},
    },
    unistd::Pid,
};
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) const OUTLAST: &str = env!("CARGO_BIN_EXE_outlast-under-test");
/// Nothing here takes long; a longer wait would never end.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// It prints how it was started, then obeys one line at a time.
const AGENT: &str = r#"#!/bin/sh
echo "$*" >> args.log
[ -f silent ] && exit 0
printf 'size=%s\n' "$(stty size)"
printf 'agent %s ready> ' "$$"
while read -r word rest; do
    case "$word" in
        exit) exit "$rest" ;;
        die) kill -"$rest" $$ ;;
        size) printf 'size=%s\n' "$(stty size)" ;;
        env) eval "printf 'env=[%s]\n' \"\$$rest\"" ;;
        where) printf 'where=%s\n' "$(pwd)" ;;
        modes) printf '\033[?1049h\033[?2004h\033[?1000h\033[?25lmodes' ;;
        stop) kill -STOP $$ ;;
        above) kill -"$rest" $PPID ;;
        suspend) printf 'going down\n'; kill -TSTP 0; printf 'up again\n' ;;
        all-modes) printf '\033[?9h\033[?1000h\033[?1001h\033[?1002h\033[?1003h\033[?1005h\033[?1006h\033[?1015h\033[?1016h\033[?1004h\033[?2004h\033[?2026h\033[?2031h\033[?2048h\033[>31u\033[=31;1u\033[>4;2m\033[?1h\033=\033[?67h\033[?25l\033[4 q\033[4h\033[20h\033[?7l\033[?5h\033[?69h\033[?1047h'; printf 'set all\n' ;;
        linger) printf 'leaving\n'; sleep 1; exit 0 ;;
        much) head -c 28000 /dev/zero | tr '\0' '#'; printf 'END'; exit 0 ;;
        ask) stty -icanon -echo; printf '\033[6n'; dd bs=1 count=6 2>/dev/null | od -c | grep -q R && printf 'asked and heard\n'; stty icanon echo ;;
        stray) setsid sleep 300 & printf 'stray=%s\n' "$!" ;;
        deaf) trap '' HUP TERM; stty -icanon -echo; printf 'deaf\n'; sleep 300 ;;
        *) printf 'heard %s\n' "$word" ;;
    esac
    printf 'ready> '
done
exit 9
"#;

/// A user with a home directory and a project that has an agent.
pub(crate) struct World {
    pub home: TempDir,
    pub project: TempDir,
    /// Additional environment variables.
    pub variables: Vec<(&'static str, &'static str)>,
}

impl World {
    pub(crate) fn new() -> World {
        let (home, project) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let world = World { home, project, variables: Vec::new() };
        let agent = world.path().join("agent");
        fs::write(&agent, AGENT).unwrap();
        fs::set_permissions(&agent, fs::Permissions::from_mode(0o755)).unwrap();
        world
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.project.path().canonicalize().unwrap()
    }

    pub(crate) fn environment<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        // The environment of the tests is not inherited: outlast reports the variables that it drops.
        let path = std::env::var_os("PATH").unwrap_or_default();
        command.current_dir(self.path()).env_clear().env("PATH", path).env("HOME", self.home.path());
        command.env("TERM", "xterm").envs(self.variables.iter().copied())
    }

    pub(crate) fn outlast(&self, args: &[&str]) -> Output {
        self.environment(&mut Command::new(OUTLAST)).args(args).stdin(Stdio::null()).output().unwrap()
    }

    pub(crate) fn run(&self, args: &[&str]) -> Session {
        Session::start(self, Winsize { ws_row: 33, ws_col: 101, ws_xpixel: 0, ws_ypixel: 0 }, args)
    }

    /// The usual session, named `s`.
    pub(crate) fn session(&self) -> Session {
        let mut session = self.run(&["--session", "s", "--", "./agent"]);
        session.shows("ready> ");
        session
    }

    pub(crate) fn state(&self) -> Value {
        let output = self.outlast(&["state", "s", "--json"]);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output.stderr)))
    }

    /// Waits until the session is ready.
    pub(crate) fn until_there(&self) {
        let deadline = Instant::now() + PATIENCE;
        while !self.outlast(&["state", "s", "--json"]).status.success() {
            assert!(Instant::now() < deadline, "it does not come up");
            thread::sleep(Duration::from_millis(20));
        }
        self.until("state", json!("ready"));
    }

    /// Waits until the state has this value.
    pub(crate) fn until(&self, member: &str, value: Value) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let state = self.state();
            if state[member] == value {
                return state;
            }
            assert!(Instant::now() < deadline, "{member} never is {value}: {state}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends the session with the test, even if the test fails.
    fn end(&self) -> End<'_> {
        End(self)
    }

    pub(crate) fn log(&self, session: &str) -> String {
        fs::read_to_string(self.path().join(format!(".outlast/logs/{session}.log"))).unwrap()
    }

    pub(crate) fn starts(&self) -> Vec<String> {
        let log = fs::read_to_string(self.path().join("args.log")).unwrap();
        // Without the file that holds the hooks.
        let without_settings = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            let at = words.iter().position(|word| *word == "--settings");
            let kept =
                words.iter().enumerate().filter(|(index, _)| at.is_none_or(|at| *index != at && *index != at + 1));
            kept.map(|(_, word)| *word).collect::<Vec<_>>().join(" ")
        };
        log.lines().map(without_settings).collect()
    }
}

/// An `outlast run` and the terminal around it.
pub(crate) struct Session {
    pub child: Child,
    pub master: File,
    /// Kept open, so that its settings can be read and the terminal does not hang up before outlast exits.
    pub slave: OwnedFd,
    pub before: Termios,
    pub shown: Receiver<Vec<u8>>,
    pub unread: Vec<u8>,
}

impl Session {
    pub(crate) fn start(world: &World, size: Winsize, args: &[&str]) -> Session {
        Session::start_command(world, size, &[&[OUTLAST, "run"], args].concat())
    }

    pub(crate) fn start_command(world: &World, size: Winsize, words: &[&str]) -> Session {
        let pair = openpty(Some(&size), None).unwrap();
        keep_from_children(&pair);
        let before = tcgetattr(&pair.slave).unwrap();
        // `setsid -c` makes this the controlling terminal of the new session and executes the command.
        let mut command = Command::new("setsid");
        let stdio = || Stdio::from(pair.slave.try_clone().unwrap());
        world.environment(&mut command).arg("-c").args(words);
        let child = command.stdin(stdio()).stdout(stdio()).stderr(stdio()).spawn().unwrap();
        let master = File::from(pair.master);
        let mut from = master.try_clone().unwrap();
        let (tell, shown) = mpsc::channel();
        thread::spawn(move || {
            let mut space = vec![0; 64 << 10];
            while let Ok(count) = from.read(&mut space) {
                if count == 0 || tell.send(space[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        Session { child, master, slave: pair.slave, before, shown, unread: Vec::new() }
    }

    pub(crate) fn type_keys(&mut self, keys: &[u8]) {
        self.master.write_all(keys).unwrap();
    }

    pub(crate) fn more(&mut self, deadline: Instant) -> bool {
        match self.shown.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(bytes) => self.unread.extend(bytes),
            Err(RecvTimeoutError::Timeout) => panic!("only this was shown: {}", text(&self.unread)),
            Err(RecvTimeoutError::Disconnected) => return false,
        }
        true
    }

    /// Waits for these words; returns the output up to them.
    pub(crate) fn shows(&mut self, words: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = self.unread.windows(words.len()).position(|window| window == words.as_bytes());
            if let Some(at) = found {
                let before: Vec<u8> = self.unread.drain(..at + words.len()).collect();
                return text(&before);
            }
            assert!(self.more(deadline), "it ended before it showed {words:?}");
        }
    }

    /// The text after these words in their line.
    pub(crate) fn after(&mut self, words: &str) -> String {
        self.shows(words);
        self.shows("\r\n").trim_end().to_owned()
    }

    /// Types a command at the prompt, and waits for the next prompt; returns the text after these words.
    pub(crate) fn ask(&mut self, order: &str, words: &str) -> String {
        self.type_keys(format!("{order}\r").as_bytes());
        let answer = self.after(&format!("\n{words}"));
        self.shows("ready> ");
        answer
    }

    pub(crate) fn is_raw(&self) -> bool {
        tcgetattr(&self.slave).unwrap().local_flags != self.before.local_flags
    }

    /// Waits for the exit: its code, and all output.
    pub(crate) fn ended(mut self) -> (Option<i32>, String) {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "it does not end: {}", text(&self.unread));
            if let Ok(bytes) = self.shown.recv_timeout(Duration::from_millis(10)) {
                self.unread.extend(bytes);
            }
        };
        while let Ok(bytes) = self.shown.recv_timeout(Duration::from_millis(100)) {
            self.unread.extend(bytes);
        }
        let now = tcgetattr(&self.slave).unwrap();
        assert_eq!(now, self.before, "the terminal is as it was");
        (status.code(), text(&self.unread))
    }
}

/// A child that inherited the other end of its own terminal would never see it close.
pub(crate) fn keep_from_children(pair: &OpenptyResult) {
    for end in [&pair.master, &pair.slave] {
        fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).unwrap();
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(crate) fn is_alive(pid: u64) -> bool {
    Path::new(&format!("/proc/{pid}/stat")).exists()
}

pub(crate) fn until_gone(pid: u64) {
    let deadline = Instant::now() + PATIENCE;
    while is_alive(pid) {
        assert!(Instant::now() < deadline, "{pid} is left");
        thread::sleep(Duration::from_millis(10));
    }
}

// ---- the terminal ------------------------------------------------------------------------------------------------

#[test]
fn the_size_is_right_from_the_first_byte_and_follows() {
    let world = World::new();
    let mut session = world.run(&["--session", "s", "--", "./agent"]);
    assert_eq!(session.shows("\r\n"), "size=33 101\r\n");
    session.shows("ready> ");
    assert!(session.is_raw());
    // Only a process with the slave side as a standard stream can change its size; `stty` does it.
    let mut stty = Command::new("stty");
    stty.args(["rows", "40", "cols", "120"]).stdin(session.slave.try_clone().unwrap());
    assert!(stty.status().unwrap().success());
    world.until("columns", json!(120));
    assert_eq!(session.ask("size", "size="), "40 120");
    let log = world.log("s");
    assert!(log.contains(" pty_allocated columns=101 rows=33"), "{log}");
    assert!(log.contains(" resize columns=120 rows=40"), "{log}");
    session.type_keys(b"exit 0\r");
    session.shows("q: quit");
    session.type_keys(b"q");
    assert_eq!(session.ended().0, Some(0));
}

#[test]
fn bytes_pass_unchanged_both_ways() {
    let world = World::new();
    // Typed input is echoed, and nothing else.
    let cat = "stty raw -echo; printf R; exec cat";
    let mut session = world.run(&["--session", "s", "--detach-key", "none", "--", "sh", "-c", cat]);
    session.shows("R");
    let mut seed = 1u32;
    let bytes: Vec<u8> = std::iter::repeat_with(|| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 24) as u8
    })
    .take(1 << 20)
    .collect();
    let mut typist = session.master.try_clone().unwrap();
    let typed = bytes.clone();
    let typing = thread::spawn(move || typist.write_all(&typed).unwrap());
    let deadline = Instant::now() + PATIENCE;
    while session.unread.len() < bytes.len() {
        assert!(session.more(deadline));
    }
    typing.join().unwrap();
    assert!(session.unread == bytes, "what came back is not what was typed");
    session.unread.clear();
    assert!(world.outlast(&["stop", "s"]).status.success());
    session.ended();
}

#[test]
fn the_terminal_is_restored_at_every_kind_of_exit() {
    // The agent is killed with all modes turned on, and the user quits.
    let world = World::new();
    let mut session = world.session();
    session.type_keys(b"modes\r");
    session.shows("modes\r\n");
    session.shows("ready> ");
    let pid = world.state()["pid"].as_u64().unwrap();
    kill(Pid::from_raw(pid as i32), Signal::SIGKILL).unwrap();
    let shown = session.shows("starting again in 2 s");
    for reset in ["\x1b[?2004l", "\x1b[?1000l", "\x1b[?25h", "\x1b[?1049l", "\x1b[<9u"] {
        assert!(shown.contains(reset), "{reset:?} in {shown:?}");
    }
    session.type_keys(b"\x03");
    assert_eq!(session.ended().0, Some(137));

    // outlast itself gets each signal; the agent gets a hangup.
    for signal in [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGINT] {
        let session = world.session();
        kill(Pid::from_raw(session.child.id() as i32), signal).unwrap();
        let (code, shown) = session.ended();
        assert_eq!(code, Some(129), "{signal}: {shown}");
        assert!(!shown.contains("\x1b[?1049l"), "the cursor stays where it is");
    }
}

#[test]
fn ctrl_z_on_the_outer_terminal_restores_it_until_fg() {
    let world = World::new();
    let mut session = world.session();
    let outlast = Pid::from_raw(session.child.id() as i32);
    kill(outlast, Signal::SIGTSTP).unwrap();
    let deadline = Instant::now() + PATIENCE;
    let is_stopped = || {
        let stat = fs::read_to_string(format!("/proc/{outlast}/stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with('T')
    };
    while !is_stopped() {
        assert!(Instant::now() < deadline, "it does not stop");
        thread::sleep(Duration::from_millis(5));
    }
    assert!(!session.is_raw());
    kill(outlast, Signal::SIGCONT).unwrap();
    while !session.is_raw() {
        assert!(Instant::now() < deadline, "it does not go on");
        thread::sleep(Duration::from_millis(5));
    }
    session.type_keys(b"hello\r");
    session.shows("heard hello");
    world.outlast(&["stop", "s", "--force"]);
    assert_eq!(session.ended().0, Some(137));
}

#[test]
fn an_agent_that_stops_itself_is_continued() {
    // No shell could continue outlast with `fg`, so the agent is continued at once.
    let world = World::new();
    let mut session = world.session();
    session.type_keys(b"stop\r");
    session.shows("ready> ");
    session.type_keys(b"hello\r");
    session.shows("heard hello");
    world.outlast(&["stop", "s"]);
    session.ended();

    // Under a shell both stop, and the shell has its terminal back until `fg`.
    let script = format!(
        "set -m; {OUTLAST} run --session s -- ./agent; stty -a | grep -o -- '-\\?icanon'; echo BACK; \
         read -r line; fg >/dev/null; echo DONE"
    );
    let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
    let mut session = Session::start_command(&world, size, &["bash", "-c", &script]);
    session.shows("ready> ");
    session.type_keys(b"stop\r");
    let shown = session.shows("BACK");
    assert!(shown.contains("\nicanon"), "{shown}");
    session.type_keys(b"\r");
    session.shows("ready> ");
    session.type_keys(b"hello\r");
    session.shows("heard hello");
    world.outlast(&["stop", "s"]);
    session.shows("DONE");
    session.ended();
}

/// The first process of a terminal has no job control: no shell could continue it, so the kernel ignores SIGTSTP there,
/// under outlast as in a tmux window of its own.
#[test]
fn an_agent_that_stops_its_job_is_continued_at_once() {
    let world = World::new();
    let mut session = world.run(&["--", "sh", "-c", "kill -TSTP 0; echo went on; read line"]);
    session.shows("went on");
    session.type_keys(b"\x1aq\r");
    session.shows("exited");
    session.type_keys(b"q");
    assert_eq!(session.ended().0, Some(0));
}

#[test]
fn the_last_output_reaches_a_slow_reader() {
    let world = World::new();
    let (mut child, mut master) = unread(&world);
    master.write_all(b"much\r").unwrap();
    // It has written everything and has exited before the test reads a byte.
    world.until("state", json!("exited"));
    let mut shown = Vec::new();
    let mut space = [0; 4096];
    while !text(&shown).contains("q: quit") {
        let count = master.read(&mut space).unwrap();
        shown.extend_from_slice(&space[..count]);
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(shown.iter().filter(|byte| **byte == b'#').count(), 28_000);
    assert!(text(&shown).contains("#END"));
    master.write_all(b"q").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn inside_tmux_the_behaviour_is_the_same() {
    let world = World::new();
    let socket = world.path().join("tmux.sock");
    let tmux = |args: &[&str]| {
        let mut command = Command::new("tmux");
        world.environment(&mut command).env_remove("TMUX").arg("-S").arg(&socket).args(args).output()
    };
    let run = format!("{OUTLAST} run --session s -- ./agent; echo left with $?; sleep 60");
    let Ok(started) = tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "90", "-y", "20", &run]) else {
        panic!("tmux is not here, and without it this cannot be shown");
    };
    assert!(started.status.success(), "{}", text(&started.stderr));
    let pane = || text(&tmux(&["capture-pane", "-p"]).unwrap().stdout);
    let until = |words: &str| {
        let deadline = Instant::now() + PATIENCE;
        while !pane().contains(words) {
            assert!(Instant::now() < deadline, "{words} is not in {}", pane());
            thread::sleep(Duration::from_millis(20));
        }
    };
    until("size=20 90");
    tmux(&["send-keys", "hello", "Enter"]).unwrap();
    until("heard hello");
    tmux(&["resize-window", "-x", "100", "-y", "30"]).unwrap();
    world.until("columns", json!(100));
    tmux(&["send-keys", "exit 0", "Enter"]).unwrap();
    until("q: quit");
    tmux(&["send-keys", "q"]).unwrap();
    until("left with 0");
    tmux(&["kill-server"]).unwrap();
}

/// Every mode that an agent turned on is off again after it has exited and after the user has detached.
#[test]
fn every_mode_is_turned_off_when_the_terminal_is_given_back() {
    const OFF: [&str; 27] = [
        "[?9l", "[?1000l", "[?1001l", "[?1002l", "[?1003l", "[?1005l", "[?1006l", "[?1015l", "[?1016l", "[?1004l",
        "[?2004l", "[?2026l", "[?2031l", "[?2048l", "[<9u", "[=0;1u", "[>4m", "[?1l", ">", "[?67l", "[?25h", "[0 q",
        "[4l", "[20l", "[?7h", "[?5l", "[?69l",
    ];
    let world = World::new();
    for keys in [&b"\x1c"[..], b"exit 0\r"] {
        let mut session = world.session();
        session.type_keys(b"all-modes\r");
        session.shows("set all");
        session.type_keys(keys);
        let shown = session.shows("[outlast]");
        for sequence in OFF {
            assert!(shown.contains(&format!("\x1b{sequence}")), "{sequence} after {keys:?}: {shown:?}");
        }
        assert!(shown.contains("\x1b[?1049l"), "the alternate screen: {shown:?}");
        world.outlast(&["stop", "s"]);
        session.ended();
    }
}

/// Text that a user was still typing when the agent exited does not answer the question that follows.
#[test]
fn keys_typed_while_the_agent_exits_do_not_answer_the_question() {
    let world = World::new();
    let mut session = world.session();
    session.type_keys(b"linger\r");
    session.shows("leaving");
    // Without a pause, until after it has exited.
    while world.state()["state"] != "exited" {
        session.type_keys(b"q\r");
        thread::sleep(Duration::from_millis(50));
    }
    session.type_keys(b"q\r");
    session.shows("q: quit");
    assert_eq!((&world.state()["state"], &world.state()["restarts"]), (&json!("exited"), &json!(0)));
    session.type_keys(b"\r");
    session.shows("ready> ");
    world.outlast(&["stop", "s"]);
    session.ended();
}

/// `kill(0, SIGTSTP)`, as claude does at Ctrl-Z: the shell gets its prompt back, and `fg` continues. Without a shell
/// that could do so, the agent continues at once.
#[cfg(target_os = "linux")]
#[test]
fn an_agent_that_stops_its_group_leaves_the_terminal_to_the_shell() {
    let world = World::new();
    let socket = world.path().join("tmux.sock");
    let tmux = |args: &[&str]| {
        let mut command = Command::new("tmux");
        world.environment(&mut command).env("PS1", "shell$ ").arg("-S").arg(&socket).args(args).output().unwrap()
    };
    let new = ["-f", "/dev/null", "new-session", "-d", "-x", "90", "-y", "30"];
    let started = tmux(&[&new[..], &["bash", "--norc", "-i"]].concat());
    assert!(started.status.success(), "{}", text(&started.stderr));
    let pane = || text(&tmux(&["capture-pane", "-p"]).stdout);
    let until = |what: &str, test: &dyn Fn(&str) -> bool| {
        let deadline = Instant::now() + PATIENCE;
        while !test(&pane()) {
            assert!(Instant::now() < deadline, "never {what}: {}", pane());
            thread::sleep(Duration::from_millis(50));
        }
    };
    until("a shell", &|pane| pane.contains("shell$"));
    tmux(&["send-keys", &format!("{OUTLAST} run --session s -- ./agent"), "Enter"]);
    until("ready", &|pane| pane.contains("ready>"));
    for round in 1..=2 {
        tmux(&["send-keys", "suspend", "Enter"]);
        until("stopped", &|pane| pane.trim_end().ends_with("shell$"));
        tmux(&["send-keys", &format!("clear; echo again {round}; fg"), "Enter"]);
        until("continued", &|pane| pane.contains("up again"));
        tmux(&["send-keys", &format!("hello{round}"), "Enter"]);
        until("at work", &|pane| pane.contains(&format!("heard hello{round}")));
    }
    // No process is left when it ends.
    tmux(&["send-keys", "exit 0", "Enter"]);
    until("asked", &|pane| pane.contains("q: quit"));
    tmux(&["send-keys", "q"]);
    until("the shell's", &|pane| pane.trim_end().ends_with("shell$"));
    tmux(&["kill-server"]);

    let mut alone = world.session();
    let pid = world.state()["pid"].clone();
    alone.type_keys(b"suspend\r");
    alone.shows("up again");
    assert_eq!(world.state()["pid"], pid);
    world.outlast(&["stop", "s"]);
    alone.ended();
}

// ---- crashes -----------------------------------------------------------------------------------------------------

#[test]
fn a_session_goes_through_every_state() {
    let world = World::new();
    let mut session = world.session();
    world.until("state", json!("ready"));

    // A clean exit: the user is asked, and continues.
    session.type_keys(b"exit 0\r");
    session.shows("q: quit");
    assert_eq!(world.state()["state"], "exited");
    session.type_keys(b"\r");
    session.shows("ready> ");
    // A clean exit again, and a fresh start.
    session.type_keys(b"exit 0\r");
    session.shows("q: quit");
    session.type_keys(b"f");
    session.shows("ready> ");
    assert_eq!(world.starts(), ["", "--continue", ""]);
    assert_eq!(world.state()["crashes"], 0);

    // Two transient failures: two seconds each. Then it flaps.
    for failure in 1..=2 {
        let since = Instant::now();
        session.type_keys(b"exit 1\r");
        session.shows("starting again in 2 s");
        let state = world.state();
        assert_eq!((&state["health"], &state["crashes"]), (&json!("healthy"), &json!(failure)));
        // A busy machine may have taken the two seconds to report it.
        assert!(state["state"] == "backoff" || since.elapsed() >= Duration::from_secs(2), "{state}");
        session.shows("ready> ");
        assert!(since.elapsed() >= Duration::from_secs(2));
    }
    // A resumption that failed at once was followed by a fresh start.
    assert_eq!(world.starts()[3..], ["--continue", ""]);
    session.type_keys(b"die 9\r");
    session.shows("failure 3; starting again in 30 s");
    let state = world.state();
    assert_eq!((&state["health"], &state["last_exit"]), (&json!("degraded"), &json!(137)));
    assert_eq!(state["last_exit_text"], "signal 9 (SIGKILL)");
    let row: Value = serde_json::from_slice(&world.outlast(&["ps", "--json"]).stdout).unwrap();
    assert_eq!((&row[0]["last_exit"], &row[0]["last_exit_text"]), (&json!(137), &json!("signal 9 (SIGKILL)")));
    let ends = state["last_exits"].as_array().expect("a list");
    assert_eq!(ends.last().map(|end| (&end["crashed"], &end["exit"])), Some((&json!(true), &json!({"signal": 9}))));
    assert!(state["next_try_s"].as_f64().unwrap() > 20.0);

    // `restart` skips the delay and keeps the count.
    for (number, words) in [(4, "failure 4; starting again in 30 s"), (5, "failed 5 times and is halted")] {
        let restarted = world.outlast(&["restart", "s", "--fresh", "--json"]);
        assert!(restarted.status.success(), "{}", text(&restarted.stderr));
        session.shows("ready> ");
        session.type_keys(b"exit 3\r");
        session.shows(words);
        assert_eq!(world.state()["crashes"], number);
    }
    assert_eq!((&world.state()["state"], &world.state()["health"]), (&json!("halted"), &json!("halted")));

    // A halted session accepts only resume and stop.
    let refused = world.outlast(&["restart", "s"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        text(&refused.stderr).contains("halted; use `outlast resume` or `outlast stop`"),
        "{}",
        text(&refused.stderr)
    );
    let refused = world.outlast(&["inject", "s", "hello"]);
    assert!(text(&refused.stderr).contains("the session is halted"), "{}", text(&refused.stderr));
    let requests: [&[&str]; 4] =
        [&["restart", "s"], &["inject", "s", "hello"], &["send", "s", "hello"], &["wait-for", "s", "--prompt"]];
    for request in requests {
        let refused = text(&world.outlast(request).stderr);
        assert!(refused.ends_with("\n  hint: `outlast resume s` tries again\n"), "{request:?}: {refused}");
    }
    let words = text(&world.outlast(&["state", "s"]).stdout);
    assert!(words.contains("  state      halted\n"), "{words}");
    session.type_keys(b"\r");
    let resumed = world.outlast(&["resume", "s"]);
    assert!(text(&resumed.stdout).starts_with("Restarted s in "), "{}", text(&resumed.stdout));
    session.shows("ready> ");
    assert_eq!((&world.state()["health"], &world.state()["crashes"]), (&json!("healthy"), &json!(0)));
    let nothing = world.outlast(&["resume", "s"]);
    assert_eq!(text(&nothing.stdout), "Nothing to resume: s is ready\n");

    // outlast exits with the agent's code.
    assert!(world.outlast(&["stop", "s"]).status.success());
    assert_eq!(session.ended().0, Some(129));
    let log = world.log("s");
    for line in [
        " session_start session=s ",
        " cwd_resolved source=current_dir ",
        " agent_spawn pid=",
        " agent_exit pid=",
        "exit=\"exit code 0\" class=clean",
        "exit=\"exit code 1\" class=transient",
        "exit=\"signal 9 (SIGKILL)\" class=flapping",
        "class=halted",
        " state_change from=healthy to=degraded",
        " state_change from=degraded to=halted",
        " state_change from=halted to=healthy",
        " user_action action=fresh",
        " user_action action=resume by=control",
        " session_end code=129",
    ] {
        assert!(log.contains(line), "{line} in {log}");
    }
    for line in log.lines() {
        let rest = line.strip_prefix('[').and_then(|line| line.split_once("] [supervisor] ")).expect(line);
        assert!(rest.0.parse::<u64>().is_ok(), "{line}");
    }
}

#[test]
fn an_exit_that_the_user_asked_for_is_no_crash() {
    let world = World::new();
    // Ctrl-C, by the user at the terminal.
    let mut session = world.session();
    session.type_keys(b"\x03");
    assert!(session.shows("q: quit").contains("(signal 2 (SIGINT))"));
    session.type_keys(b"q");
    assert_eq!(session.ended().0, Some(130));
    assert!(world.log("s").contains("class=user"));

    // The same key sent by a program counts as a crash.
    let mut session = world.session();
    assert!(world.outlast(&["inject", "s", "\x03"]).status.success());
    session.shows("failure 1; starting again in 2 s");
    world.outlast(&["stop", "s"]);
    assert_eq!(session.ended().0, Some(130));

    // So does an exit with 0 before there was a prompt.
    fs::write(world.path().join("silent"), "").unwrap();
    let mut session = world.run(&["--session", "s", "--", "./agent"]);
    session.shows("ended (exit code 0), failure 1; starting again in 2 s");
    world.outlast(&["stop", "s"]);
    assert_eq!(session.ended().0, Some(0));
}

#[test]
fn a_known_agent_keeps_its_conversation() {
    let world = World::new();
    // A claude that records its turns, shows its prompt, and fails to resume once.
    let script = "#!/bin/sh\necho \"$*\" >> args.log\n\
        mkdir -p $HOME/.claude/projects/p; echo '{\"type\":\"user\"}' > $HOME/.claude/projects/p/$2.jsonl\n\
        case \"$*\" in *--resume*) [ -f broken ] && { echo 'No conversation found'; exit 1; } ;; esac\n\
        printf '\\033[?2004h\\n ❯ '\nread -r line\nexit 1\n";
    let claude = world.path().join("claude");
    fs::write(&claude, script).unwrap();
    fs::set_permissions(&claude, fs::Permissions::from_mode(0o755)).unwrap();
    let mut session = world.run(&["--session", "s", "--", "./claude", "--model", "x"]);
    session.shows("❯ ");
    let first = world.until("state", json!("ready"))["conversation"].as_str().unwrap().to_owned();
    assert_eq!(world.starts(), [format!("--session-id {first} --model x")]);
    session.type_keys(b"x\r");
    session.shows("starting again in 2 s");
    fs::write(world.path().join("broken"), "").unwrap();
    session.shows("No conversation found");
    session.shows("❯ ");
    let second = world.until("state", json!("ready"))["conversation"].as_str().unwrap().to_owned();
    assert_ne!(first, second);
    let expected = [format!("--resume {first} --model x"), format!("--session-id {second} --model x")];
    assert_eq!(world.starts()[1..], expected);
    fs::remove_file(world.path().join("broken")).unwrap();
    let restarted = world.outlast(&["restart", "s", "--continue", "--json"]);
    let restarted: Value = serde_json::from_slice(&restarted.stdout).unwrap();
    assert_eq!(restarted["mode"], "continue");
    session.shows("❯ ");
    assert_eq!(world.starts()[3], format!("--resume {second} --model x"));
    world.outlast(&["stop", "s"]);
    session.ended();
}

#[test]
fn a_killed_codex_is_resumed_by_the_id_in_its_file() {
    let world = World::new();
    let id = "0199a213-81c0-7800-8aa1-bbab2a035a53";
    let script = format!(
        "#!/bin/sh\necho \"$*\" >> args.log\ndir=$HOME/.codex/sessions/2026/11/15\nmkdir -p $dir\n\
         echo '{{\"type\":\"session_meta\",\"payload\":{{\"id\":\"{id}\",\"cwd\":\"'$(pwd)'\"}}}}' > $dir/rollout-2026-11-15T10-00-00-{id}.jsonl\n\
         printf '\\033[?2004h\\n › Ask '\nread -r line\nexit 1\n"
    );
    let codex = world.path().join("codex");
    fs::write(&codex, script).unwrap();
    fs::set_permissions(&codex, fs::Permissions::from_mode(0o755)).unwrap();
    let mut session = world.run(&["--session", "s", "--", "./codex", "--model", "x"]);
    session.shows("› Ask ");
    let state = world.until("state", json!("ready"));
    assert_eq!(state["conversation"], Value::Null);
    kill(Pid::from_raw(state["pid"].as_u64().unwrap() as i32), Signal::SIGKILL).unwrap();
    session.shows("starting again in 2 s");
    session.shows("› Ask ");
    assert_eq!(world.starts(), ["--model x".to_owned(), format!("resume {id} --model x")]);
    assert_eq!(world.until("state", json!("ready"))["mode"], "continue");
    world.outlast(&["stop", "s"]);
    session.ended();
}

// ---- what is left ------------------------------------------------------------------------------------------------

#[test]
fn an_agent_that_kills_or_stops_its_monitor_is_started_again_and_leaves_nothing_behind() {
    for signal in ["KILL", "STOP"] {
        let world = World::new();
        let mut session = world.session();
        let stray: u64 = session.ask("stray", "stray=").parse().unwrap();
        let agent = world.state()["pid"].as_u64().unwrap();
        session.type_keys(format!("above {signal}\r").as_bytes());
        session.shows("starting again in 2 s");
        until_gone(agent);
        until_gone(stray);
        session.shows("ready> ");
        assert_ne!(world.state()["pid"].as_u64(), Some(agent));
        world.outlast(&["stop", "s"]);
        assert_eq!(session.ended().0, Some(129));
    }
}

#[test]
fn a_killed_outlast_leaves_nothing_behind() {
    let world = World::new();
    let mut session = world.session();
    let stray: u64 = session.ask("stray", "stray=").parse().unwrap();
    let agent = world.state()["pid"].as_u64().unwrap();
    assert!(is_alive(stray) && is_alive(agent));
    let outlast = world.state()["outlast_pid"].as_i64().unwrap();
    kill(Pid::from_raw(outlast as i32), Signal::SIGKILL).unwrap();
    until_gone(agent);
    until_gone(stray);
    assert_eq!(session.ended().0, Some(137));
    // Its name is free again.
    let session = world.session();
    world.outlast(&["stop", "s"]);
    assert_eq!(session.ended().0, Some(129));
}

#[test]
fn an_agent_that_reads_nothing_and_ignores_signals_is_stopped() {
    let world = World::new();
    let mut session = world.session();
    session.type_keys(b"deaf\r");
    session.shows("deaf\r\n");
    let much = "x".repeat(300 << 10);
    let mut sent = 0;
    let refused = loop {
        let output = inject(&world, much.as_bytes());
        match output["error"].is_null() {
            true => sent += 1,
            false => break output,
        }
        assert!(sent < 10, "what it does not read is not kept without bound");
    };
    assert_eq!(refused["error"]["code"], "not_reading");
    let since = Instant::now();
    assert!(world.outlast(&["stop", "s"]).status.success());
    assert!(since.elapsed() < PATIENCE, "a hangup, SIGTERM after a second, SIGKILL after two more");
    assert_eq!(session.ended().0, Some(137));
}

#[test]
fn a_closed_terminal_ends_the_agent_too() {
    let world = World::new();
    let (mut child, mut master) = unread(&world);
    master.write_all(b"stray\r").unwrap();
    let mut shown = Vec::new();
    let mut space = [0; 4096];
    let stray: u64 = loop {
        let count = master.read(&mut space).unwrap();
        shown.extend_from_slice(&space[..count]);
        let shown = text(&shown);
        if let Some((number, _)) = shown.split_once("\nstray=").and_then(|(_, rest)| rest.split_once('\r')) {
            break number.parse().unwrap();
        }
    };
    let agent = world.state()["pid"].as_u64().unwrap();
    drop(master);
    assert_eq!(child.wait().unwrap().code(), Some(129));
    until_gone(agent);
    until_gone(stray);
    let log = world.log("s");
    assert!(log.contains("signal=SIGHUP") || log.contains("action=hangup"), "{log}");
}

/// A session that is ready, with a terminal that only the caller reads and holds.
pub(crate) fn unread(world: &World) -> (Child, File) {
    let pair = openpty(None, None).unwrap();
    keep_from_children(&pair);
    let stdio = || Stdio::from(pair.slave.try_clone().unwrap());
    let mut command = Command::new("setsid");
    world.environment(&mut command).args(["-c", OUTLAST, "run", "--session", "s", "--", "./agent"]);
    let child = command.stdin(stdio()).stdout(stdio()).stderr(stdio()).spawn().unwrap();
    world.until_there();
    (child, File::from(pair.master))
}

#[test]
fn a_bad_control_request_disturbs_no_other_client() {
    let world = World::new();
    let mut session = world.session();
    let socket = world.home.path().join(".local/state/outlast/run/s.sock");
    let frame = |json: &str| [&(json.len() as u32).to_be_bytes()[..], json.as_bytes()].concat();
    let table: [(&[u8], &str); 6] = [
        (b"\xff\xff\xff\xff{", "too_long"),
        (&frame(r#"{"v":9,"id":1,"method":"state"}"#), "bad_version"),
        (&frame(r#"{"v":1,"id":1,"method":"dance"}"#), "unknown_method"),
        (&frame(r#"{"v":1,"id":1,"method":"inject","params":{"bytes":"no base64!"}}"#), "bad_request"),
        (&frame(r#"{"v":1,"id":1,"method":"restart","params":{"mode":"sideways"}}"#), "bad_request"),
        (&frame("nonsense"), "bad_frame"),
    ];
    // Half a frame, and then nothing for the rest of the test.
    let mut silent = UnixStream::connect(&socket).unwrap();
    silent.write_all(b"\0\0\0\x40{\"v\":1").unwrap();
    for (bytes, code) in table {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.write_all(bytes).unwrap();
        assert_eq!(answer(&mut stream)["error"]["code"], code);
    }
    session.type_keys(b"hello\r");
    session.shows("heard hello");
    assert_eq!(world.state()["restarts"], 0);
    drop(silent);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&socket), mode(socket.parent().unwrap())), (0o600, 0o700));
    world.outlast(&["stop", "s"]);
    session.ended();
    assert!(!socket.exists());
}

pub(crate) fn answer(stream: &mut UnixStream) -> Value {
    let mut head = [0; 4];
    stream.read_exact(&mut head).unwrap();
    let mut answer = vec![0; u32::from_be_bytes(head) as usize];
    stream.read_exact(&mut answer).unwrap();
    serde_json::from_slice(&answer).unwrap()
}

/// Over the socket, as another program would.
fn inject(world: &World, bytes: &[u8]) -> Value {
    let socket = world.home.path().join(".local/state/outlast/run/s.sock");
    let mut stream = UnixStream::connect(socket).unwrap();
    let mut encoder = Command::new("base64").arg("-w0").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = encoder.stdin.take().unwrap();
    let bytes = bytes.to_vec();
    let feeding = thread::spawn(move || stdin.write_all(&bytes).unwrap());
    let encoded = encoder.wait_with_output().unwrap();
    feeding.join().unwrap();
    let request = json!({"v": 1, "id": 1, "method": "inject", "params": {"bytes": text(&encoded.stdout)}}).to_string();
    stream.write_all(&(request.len() as u32).to_be_bytes()).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    answer(&mut stream)
}

#[test]
fn a_session_runs_in_one_process_at_a_time() {
    let world = World::new();
    let mut first = world.session();
    let second = world.outlast(&["run", "--session", "s", "--", "./agent"]);
    assert_eq!(second.status.code(), Some(1));
    let words = text(&second.stderr);
    assert!(
        words.contains(&format!("the session `s` is already running (pid {})", world.state()["outlast_pid"])),
        "{words}"
    );
    // The first session was not affected.
    first.type_keys(b"hello\r");
    first.shows("heard hello");
    let row: Value = serde_json::from_slice(&world.outlast(&["ps", "--json"]).stdout).unwrap();
    assert_eq!((&row[0]["id"], &row[0]["kind"], &row[0]["state"]), (&json!("s"), &json!("session"), &json!("ready")));
    world.outlast(&["stop", "s"]);
    first.ended();
}

// ---- where and with what -----------------------------------------------------------------------------------------

#[test]
fn a_document_sets_directory_and_environment() {
    let world = World { variables: vec![("SECRET", "hidden")], ..World::new() };
    let docs = world.path().join("docs");
    fs::create_dir_all(docs.join("inner")).unwrap();
    let document = docs.join("plan.md");
    fs::write(&document, "---\noutlast_cwd: inner\noutlast_session: s\nenv:\n  TOKEN: ${SECRET}!\n---\n# Plan\n")
        .unwrap();
    let agent = world.path().join("agent").display().to_string();
    let mut session = world.run(&["docs/plan.md", "--", &agent]);
    session.shows("ready> ");
    let document = document.display().to_string();
    let inner = docs.join("inner").display().to_string();
    for (variable, value) in [
        ("TOKEN", "hidden!"),
        ("SECRET", ""),
        ("OUTLAST_SESSION", "s"),
        ("AGENT_DOC_SESSION", "s"),
        ("OUTLAST_DOCUMENT", &document),
        ("AGENT_DOC_DOCUMENT", &document),
        ("PWD", &inner),
        ("TERM", "xterm"),
    ] {
        assert_eq!(session.ask(&format!("env {variable}"), "env="), format!("[{value}]"), "{variable}");
    }
    let state = world.state();
    assert_eq!((&state["cwd"], &state["cwd_source"]), (&json!(inner), &json!("frontmatter")));

    // The next start reads it again.
    fs::write(&document, "---\noutlast_session: s\noutlast_cwd: .\n---\n").unwrap();
    assert!(world.outlast(&["restart", "s"]).status.success());
    session.shows("ready> ");
    assert_eq!(session.ask("where", "where="), docs.display().to_string());
    world.outlast(&["stop", "s"]);
    session.ended();

    let mut session = world.run(&["--session", "s", "--cwd", "docs", "--env-pass", "SECRET", "--", &agent]);
    session.shows("ready> ");
    assert_eq!(session.ask("env SECRET", "env="), "[hidden]");
    assert_eq!(world.state()["cwd_source"], "cli_flag");
    world.outlast(&["stop", "s"]);
    session.ended();
}

/// Without a document the agent works where the user is, inside a project or not.
#[test]
fn without_a_document_the_agent_works_in_the_current_directory() {
    let world = World::new();
    fs::create_dir_all(world.path().join(".git")).unwrap();
    fs::create_dir_all(world.path().join("pkg")).unwrap();
    let script = format!("cd pkg && exec {OUTLAST} run --session s -- ../agent");
    let size = Winsize { ws_row: 33, ws_col: 101, ws_xpixel: 0, ws_ypixel: 0 };
    let mut session = Session::start_command(&world, size, &["sh", "-c", &script]);
    session.shows("ready> ");
    assert_eq!(session.ask("where", "where="), world.path().join("pkg").display().to_string());
    assert_eq!(world.state()["cwd_source"], "current_dir");
    world.outlast(&["stop", "s"]);
    session.ended();
}

/// A variable that the agent does not get is named on the terminal, in the log and in `state`.
#[test]
fn variables_that_are_not_passed_are_named() {
    let variables = vec![("SECRET", "hidden"), ("IS_SANDBOX", "1"), ("MY_TOKEN", "t")];
    let mut world = World { variables, ..World::new() };
    let session = world.session();
    assert_eq!(world.state()["env_left_out"], json!(["IS_SANDBOX", "MY_TOKEN", "SECRET"]));
    assert!(world.log("s").contains("env_left_out names=IS_SANDBOX,MY_TOKEN,SECRET"), "{}", world.log("s"));
    assert!(text(&world.outlast(&["state", "s"]).stdout).contains("IS_SANDBOX, MY_TOKEN, SECRET; `--env-pass NAME`"));
    world.outlast(&["stop", "s"]);
    session.ended();

    let said = "[outlast] variables not passed to ./agent: IS_SANDBOX, MY_TOKEN, SECRET; `--env-pass NAME` passes one";
    for before in [&["run"][..], &["run", "-d"]] {
        let words = [before, &["--session", "s", "--", "./agent", "x"]].concat();
        let mut session = Session::start_command(
            &world,
            Winsize { ws_row: 33, ws_col: 201, ws_xpixel: 0, ws_ypixel: 0 },
            &[&[OUTLAST], &words[..]].concat(),
        );
        session.shows(said);
        world.until_there();
        world.outlast(&["stop", "s"]);
        session.ended();
    }

    // Everything but PWD, by the option and by the file.
    for (option, file) in [(&["--env-pass", "*"][..], ""), (&[], "[run]\nenv = \"all\"\n")] {
        fs::write(world.path().join("outlast.toml"), file).unwrap();
        assert!(world.outlast(&["trust"]).status.success());
        let mut session = world.run(&[option, &["--session", "s", "--", "./agent"]].concat());
        let before = session.shows("ready> ");
        assert!(!before.contains("not passed"), "{before}");
        assert_eq!(session.ask("env MY_TOKEN", "env="), "[t]");
        assert_eq!(session.ask("env PWD", "env="), format!("[{}]", world.path().display()));
        assert_eq!(world.state()["env_left_out"], json!([]));
        world.outlast(&["stop", "s"]);
        session.ended();
    }
    fs::remove_file(world.path().join("outlast.toml")).unwrap();

    // An agent with a profile gets the variables that it needs, and those that its configuration names.
    fs::copy(world.path().join("agent"), world.path().join("claude")).unwrap();
    fs::write(world.path().join(".mcp.json"), r#"{"mcpServers":{"a":{"env":{"T":"${MY_TOKEN}"}}}}"#).unwrap();
    world.variables.retain(|(name, _)| *name != "TERM");
    let mut session = world.run(&["--session", "s", "--", "./claude"]);
    session.shows("ready> ");
    assert_eq!(world.state()["env_left_out"], json!(["SECRET"]));
    world.outlast(&["stop", "s"]);
    session.ended();
}

/// `--env-pass` takes one value, so the document after it is the document.
#[test]
fn env_pass_does_not_take_the_document() {
    let world = World { variables: vec![("SECRET", "hidden"), ("OTHER", "too")], ..World::new() };
    fs::write(world.path().join("plan.md"), "---\noutlast_session: s\n---\n").unwrap();
    let mut session = world.run(&["--env-pass", "SECRET,OTHER", "plan.md", "--", "./agent"]);
    session.shows("ready> ");
    assert_eq!(session.ask("env SECRET", "env="), "[hidden]");
    assert_eq!(session.ask("env OTHER", "env="), "[too]");
    assert_eq!(world.state()["document"], "plan.md");
    world.outlast(&["stop", "s"]);
    session.ended();
}

#[test]
fn an_agent_has_a_terminal_type_where_outlast_has_none() {
    let world = World::new();
    let mut command = Command::new(OUTLAST);
    world.environment(&mut command).env_remove("TERM").args(["run", "--", "sh", "-c", "echo $TERM"]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert_eq!(text(&output.stdout), "xterm-256color\r\n");
}

/// A document or a directory that became invalid is reported before the agent is stopped.
#[test]
fn a_restart_that_cannot_succeed_does_not_stop_the_agent() {
    let world = World::new();
    let document = world.path().join("plan.md");
    fs::create_dir(world.path().join("inner")).unwrap();
    fs::write(&document, "---\noutlast_cwd: inner\n---\n").unwrap();
    let agent = world.path().join("agent").display().to_string();
    let mut session = world.run(&["--session", "s", "plan.md", "--", &agent]);
    session.shows("ready> ");
    let pid = world.state()["pid"].clone();
    let wrong: [(&dyn Fn(), &str); 3] = [
        (&|| fs::write(&document, "---\noutlast_cwd: none\n---\n").unwrap(), "`none`, which does not exist"),
        (
            &|| fs::write(&document, "---\nenv:\n  A: ${NOWHERE}\n---\n").unwrap(),
            "the environment variable `NOWHERE` is not set",
        ),
        (&|| fs::remove_file(&document).unwrap(), "cannot read the document"),
    ];
    for (break_it, words) in wrong {
        break_it();
        let output = world.outlast(&["restart", "s"]);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(words), "{said}");
        let state = world.state();
        assert_eq!((&state["pid"], &state["state"], &state["restarts"]), (&pid, &json!("ready"), &json!(0)), "{state}");
    }
    fs::write(&document, "").unwrap();
    assert!(world.outlast(&["restart", "s"]).status.success());
    session.shows("ready> ");
    assert_ne!(world.state()["pid"], pid);
    world.outlast(&["stop", "s"]);
    session.ended();
}

#[test]
fn an_error_is_reported_in_a_sentence() {
    let world = World::new();
    fs::write(world.path().join("bad.md"), "---\nenv:\n  1: x\n---\n").unwrap();
    fs::write(world.path().join("unset.md"), "---\nenv:\n  A: ${NOWHERE}\n---\n").unwrap();
    let table: [(&[&str], i32, &str); 8] = [
        (&["none.md", "--", "./agent"], 2, "cannot read the document"),
        (&["bad.md", "--", "./agent"], 2, "has an error in line 3: `1` is not a valid name of a variable"),
        (&["unset.md", "--", "./agent"], 2, "in line 3: the environment variable `NOWHERE` is not set"),
        (
            &["--cwd", "agent", "--", "./agent"],
            2,
            "`--cwd` names the working directory `agent`, which is not a directory",
        ),
        (&["--cwd", "none", "--", "./agent"], 2, "`--cwd` names the working directory `none`, which does not exist"),
        (&["--session", "No Good", "--", "./agent"], 2, "`No Good` is not a valid session id"),
        (&["--", "no-such-agent"], 127, "no program named `no-such-agent`"),
        (&["-d", "--", "no-such-agent"], 127, "no program named `no-such-agent`"),
    ];
    for (args, code, words) in table {
        let output = world.outlast(&[&["run"], args].concat());
        let said = text(&output.stderr);
        assert!(said.starts_with("error: ") && said.contains(words), "{args:?}: {said}");
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
    }
    let mut session = world.run(&["--", "no-such-agent"]);
    session.shows("cannot start `no-such-agent`");
    assert_eq!(session.ended().0, Some(127));
}

struct End<'a>(&'a World);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.outlast(&["stop", "s", "--force"]);
    }
}

// ---- without a terminal ------------------------------------------------------------------------------------------

#[test]
fn without_a_terminal_a_clean_exit_ends_the_session() {
    let world = World::new();
    let output = world.outlast(&["run", "--", "sh", "-c", "echo hello; exit 0"]);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(0), "hello\r\n"));
}

/// Detached from the start: stdin is not read, `outlast attach` shows it, and one line on stderr says so.
#[test]
fn without_a_terminal_a_session_is_detached_from_the_start() {
    let world = World::new();
    let mut command = Command::new(OUTLAST);
    world.environment(&mut command).args(["run", "--session", "s", "--", "./agent"]);
    command.env("COLUMNS", "101").env("LINES", "33");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let _end = world.end();
    // Input on stdin does not reach the agent: it would exit with 9.
    child.stdin.take().unwrap().write_all(b"exit 9\n").unwrap();
    world.until_there();
    let state = world.until("state", json!("ready"));
    assert_eq!((&state["columns"], &state["rows"], &state["attached"]), (&json!(101), &json!(33), &json!(0)));
    // outlast answers terminal queries, as for every session without a viewer.
    assert!(world.outlast(&["inject", "s", "ask", "--enter"]).status.success());
    assert!(world.outlast(&["wait-for", "s", "--text", "asked and heard", "--timeout", "60"]).status.success());
    assert!(world.outlast(&["inject", "s", "exit 0", "--enter"]).status.success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "the agent's own: {}", text(&output.stderr));
    assert_eq!(
        text(&output.stderr),
        "[outlast] no terminal here: session s is detached (101 × 33); `outlast attach s` shows it, `outlast stop s` stops it\n"
    );
    assert!(!text(&output.stdout).contains("[outlast]"), "stdout is the agent's");
}

/// As in the background: the session stays, and can be resumed.
#[test]
fn halted_without_a_terminal_a_session_waits_to_be_resumed() {
    let world = World::new();
    let mut command = Command::new(OUTLAST);
    // It fails until a file exists. `restart` skips the delays, and its failures count.
    let script = "[ -e good ] || exit 7; echo better; read line; exit 0";
    world.environment(&mut command).args(["run", "--session", "s", "--", "sh", "-c", script]);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let _end = world.end();
    let deadline = Instant::now() + PATIENCE;
    while world.state()["state"] != "halted" {
        assert!(Instant::now() < deadline, "{}", world.state());
        world.outlast(&["restart", "s"]);
    }
    let state = world.state();
    assert_eq!(state["last_exit_code"], 7);
    fs::write(world.path().join("good"), "").unwrap();
    let resumed = world.outlast(&["resume", "s"]);
    assert!(resumed.status.success(), "{}", text(&resumed.stderr));
    world.until("state", json!("ready"));
    assert!(world.outlast(&["inject", "s", "", "--enter"]).status.success());
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(0), "better\r\n\r\n"), "{said}");
    let halted = "[outlast] sh failed 5 times and is halted (exit code 7). `outlast resume s` tries again, \
        `outlast stop s` stops it\n";
    assert!(said.contains(halted) && !said.contains("Ctrl-C"), "{said}");
}

#[test]
fn a_session_in_the_background_is_reached_by_its_id() {
    let world = World::new();
    let output = world.outlast(&["run", "-d", "--session", "s", "--", "./agent"]);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(0), "s\n"), "{}", text(&output.stderr));
    let state = world.until("state", json!("ready"));
    assert_eq!((&state["attached"], &state["columns"]), (&json!(0), &json!(80)));
    assert!(world.outlast(&["inject", "s", "exit 0", "--enter"]).status.success());
    let pid = state["outlast_pid"].as_u64().unwrap();
    until_gone(pid);
    assert!(world.log("s").contains("class=clean"));
    assert_eq!(text(&world.outlast(&["ps"]).stdout), "Nothing runs under outlast.\n");
}
