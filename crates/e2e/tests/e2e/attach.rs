//! Detaching from an agent, attaching again, and several viewers at once.

use std::{
    fs,
    io::{Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use nix::{
    pty::Winsize,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::run::{OUTLAST, PATIENCE, Session, World, answer, keep_from_children, text, until_gone};

const LEAVE: &[u8] = b"\x1c";

fn size(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

fn attach(world: &World, size: Winsize, options: &[&str]) -> Session {
    Session::start_command(world, size, &[&[OUTLAST, "attach", "s"], options].concat())
}

fn screen(world: &World) -> Value {
    serde_json::from_slice(&world.outlast(&["screen", "s", "--json"]).stdout).unwrap()
}

/// A session in the background, ready to be attached.
fn detached(world: &World, options: &[&str]) {
    let output = world.outlast(&[&["run", "-d", "--session", "s"], options, &["--", "./agent"]].concat());
    assert_eq!((text(&output.stdout).as_str(), text(&output.stderr).as_str()), ("s\n", ""));
    world.until_there();
}

fn worker(world: &World) -> Pid {
    Pid::from_raw(world.state()["outlast_pid"].as_i64().unwrap() as i32)
}

/// A viewer that speaks the attach protocol itself, and reads when the test says so.
struct Viewer(UnixStream);

impl Viewer {
    fn new(world: &World, watch: bool) -> Viewer {
        let socket = world.home.path().join(".local/state/outlast/run/s.sock");
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let params = json!({"columns": 80, "rows": 24, "watch": watch});
        let request = json!({"v": 1, "id": 1, "method": "attach", "params": params}).to_string();
        stream.write_all(&(request.len() as u32).to_be_bytes()).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        assert_eq!(answer(&mut stream)["ok"]["session"], "s");
        Viewer(stream)
    }

    fn say(&mut self, kind: u8, bytes: &[u8]) {
        self.0.write_all(&(bytes.len() as u32 + 1).to_be_bytes()).unwrap();
        self.0.write_all(&[&[kind], bytes].concat()).unwrap();
    }

    fn hear(&mut self) -> (u8, Vec<u8>) {
        let mut head = [0; 4];
        self.0.read_exact(&mut head).unwrap();
        let mut frame = vec![0; u32::from_be_bytes(head) as usize];
        self.0.read_exact(&mut frame).unwrap();
        (frame[0], frame[1..].to_vec())
    }

    /// The output up to these words.
    fn shows(&mut self, words: &str) -> Vec<u8> {
        let mut shown = Vec::new();
        while !text(&shown).contains(words) {
            let (kind, bytes) = self.hear();
            assert_eq!(kind, b'o', "{}", text(&bytes));
            shown.extend(bytes);
        }
        shown
    }
}

// ---- leaving and coming back -------------------------------------------------------------------------------------

#[test]
fn inside_tmux_the_screen_is_the_same_before_and_after() {
    let world = World::new();
    let paint = "#!/bin/sh\nprintf '\\033]2;a title\\007\\033[1;31mred\\033[0m plain \\033[48;5;24mblue\\033[0m\\r\\n'\n\
        seq 100 130\nprintf '日本 \\033[4munder\\033[0m\\r\\n\\033[?2004h\\033[32mready> '\n\
        while read -r line; do printf 'heard %s\\033[0m\\n\\033[32mready> ' \"$line\"; done\n";
    fs::write(world.path().join("agent"), paint).unwrap();
    let socket = world.path().join("tmux.sock");
    let tmux = |args: &[&str]| {
        let mut command = Command::new("tmux");
        let output = world.environment(&mut command).env_remove("TMUX").arg("-S").arg(&socket).args(args).output();
        text(&output.expect("tmux is not here, and without it this cannot be shown").stdout)
    };
    tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "15", "env PS1='shell$ ' sh"]);
    let pane = || tmux(&["capture-pane", "-p", "-e", "-N"]);
    let cursor = || tmux(&["display-message", "-p", "#{cursor_x} #{cursor_y} #{pane_title}"]);
    let until = |words: &str| {
        let deadline = Instant::now() + PATIENCE;
        while !pane().contains(words) {
            assert!(Instant::now() < deadline, "{words} is not in {}", pane());
            thread::sleep(Duration::from_millis(20));
        }
    };
    until("shell$");
    tmux(&["send-keys", &format!("clear; {OUTLAST} run --session s -- ./agent"), "Enter"]);
    until("ready>");
    tmux(&["send-keys", "hello", "Enter"]);
    until("heard hello");
    let (before, cursor_before) = (pane(), cursor());
    tmux(&["send-keys", "C-\\"]);
    until("[outlast] detached; `outlast attach s` attaches again, `outlast stop s` stops it");
    until("shell$");
    assert_eq!(world.state()["attached"], 0);
    // The shell's terminal settings are restored: it echoes, and paste markers are off.
    tmux(&["send-keys", "echo $((6 * 7))", "Enter"]);
    until("\n42");
    // `clear` would clear the scrollback, too, which is not printed twice.
    tmux(&["send-keys", &format!("printf '\\033[H\\033[2J'; {OUTLAST} attach s"), "Enter"]);
    world.until("attached", json!(1));
    until("ready>");
    let deadline = Instant::now() + PATIENCE;
    while (pane(), cursor()) != (before.clone(), cursor_before.clone()) {
        assert!(Instant::now() < deadline, "before:\n{before}{cursor_before}after:\n{}{}", pane(), cursor());
        thread::sleep(Duration::from_millis(20));
    }
    // The session continues, and lines above the screen are in the scrollback.
    tmux(&["send-keys", "again", "Enter"]);
    until("heard again");
    let history = tmux(&["capture-pane", "-p", "-S", "-100"]);
    assert!(history.contains("plain blue") && history.contains("\n105\n"), "{history}");
    tmux(&["send-keys", "C-\\"]);
    until("[outlast] detached from s");
    assert!(world.outlast(&["stop", "s"]).status.success());
    tmux(&["kill-server"]);
}

#[test]
fn detaching_restores_the_terminal_and_the_agent_continues() {
    let world = World::new();
    let mut session = world.session();
    session.type_keys(b"modes\r");
    session.shows("ready> ");
    session.type_keys(LEAVE);
    let shown = session.shows("[outlast] detached");
    for reset in ["\x1b[?2004l", "\x1b[?1000l", "\x1b[?25h", "\x1b[?1049l"] {
        assert!(shown.contains(reset), "{reset:?} in {shown:?}");
    }
    assert_eq!(session.ended().0, Some(0));
    let state = world.state();
    assert_eq!((&state["attached"], &state["state"], &state["restarts"]), (&json!(0), &json!("ready"), &json!(0)));
    // A new viewer gets the alternate screen, paste markers and mouse modes turned on again.
    let mut guest = attach(&world, size(101, 33), &[]);
    let shown = guest.shows("ready>");
    for mode in ["\x1b[?1049h", "modes"] {
        assert!(shown.contains(mode), "{mode:?} in {shown:?}");
    }
    let shown = guest.shows("\x1b[?2026l");
    for mode in ["\x1b[?2004h", "\x1b[?1000h"] {
        assert!(shown.contains(mode), "{mode:?} in {shown:?}");
    }
    assert!(!shown.contains("\x1b[?25h"), "the cursor stays hidden");
    guest.type_keys(b"hello\r");
    guest.shows("heard hello");
    guest.type_keys(LEAVE);
    let (code, shown) = guest.ended();
    assert_eq!(code, Some(0), "{shown}");
    assert!(shown.contains("\x1b[?1049l") && shown.contains("[outlast] detached from s"), "{shown}");
    assert!(world.outlast(&["stop", "s"]).status.success());
    let log = world.log("s");
    for event in [" user_action action=detach", " attach viewer=1 columns=101 rows=33", " detach viewer=1"] {
        assert!(log.contains(event), "{event} in {log}");
    }
}

#[test]
fn the_detach_key_can_be_configured() {
    let world = World::new();
    let mut session = world.run(&["--session", "s", "--detach-key", "ctrl-a d", "--", "./agent"]);
    session.shows("ready> ");
    // Neither the default key nor half of this one detaches; both are forwarded.
    session.type_keys(b"one\x01two\r");
    session.shows("heard one\x01two");
    session.type_keys(b"\x01d");
    session.shows("[outlast] detached");
    assert_eq!(session.ended().0, Some(0));
    // In the encoding of a terminal that distinguishes such keys.
    let mut guest = attach(&world, size(80, 24), &["--detach-key", "ctrl-]"]);
    guest.shows("ready>");
    guest.type_keys(b"\x1b[93;5u");
    assert_eq!(guest.ended().0, Some(0));
    assert!(world.outlast(&["stop", "s"]).status.success());
    let wrong = world.outlast(&["attach", "s", "--detach-key", "d"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("expected one key with Ctrl"), "{}", text(&wrong.stderr));
}

#[test]
fn a_clean_exit_shows_a_question_on_every_terminal() {
    let world = World::new();
    detached(&world, &[]);
    let mut guest = attach(&world, size(80, 24), &[]);
    guest.shows("ready>");
    guest.type_keys(b"exit 0\r");
    guest.shows("q: quit");
    guest.type_keys(b"\r");
    guest.shows("ready>");
    guest.type_keys(b"exit 3\r");
    guest.shows("starting again in 2 s");
    guest.type_keys(b"\x03");
    let (code, shown) = guest.ended();
    assert_eq!(code, Some(3), "{shown}");
    assert!(shown.contains("[outlast] s ended with exit code 3"), "{shown}");
}

#[test]
fn a_session_survives_a_lost_terminal_with_on_hangup_detach() {
    let world = World::new();
    let (mut child, master) = {
        let pair = nix::pty::openpty(None, None).unwrap();
        keep_from_children(&pair);
        let stdio = || std::process::Stdio::from(pair.slave.try_clone().unwrap());
        let mut command = Command::new("setsid");
        let words = ["-c", OUTLAST, "run", "--session", "s", "--on-hangup", "detach", "--", "./agent"];
        world.environment(&mut command).args(words);
        let child = command.stdin(stdio()).stdout(stdio()).stderr(stdio()).spawn().unwrap();
        world.until_there();
        (child, pair.master)
    };
    let agent = world.state()["pid"].clone();
    drop(master);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let state = world.until("attached", json!(0));
    assert_eq!((&state["pid"], &state["state"]), (&agent, &json!("ready")));
    // A second hangup has no effect.
    kill(worker(&world), Signal::SIGHUP).unwrap();
    let mut guest = attach(&world, size(80, 24), &[]);
    guest.shows("ready>");
    guest.type_keys(b"hello\r");
    guest.shows("heard hello");
    assert!(world.outlast(&["stop", "s"]).status.success());
    guest.ended();
}

/// A terminal that attaches again already has the history in its scrollback: only new lines are printed there.
#[test]
fn attaching_again_does_not_print_the_history_twice() {
    let world = World::new();
    let agent = "#!/bin/sh\nseq -f 'line %.0f.' 1 60\nprintf 'ready> '\n\
        while read -r line; do seq -f \"$line %.0f.\" 1 40; printf 'ready> '; done\n";
    fs::write(world.path().join("agent"), agent).unwrap();
    let socket = world.path().join("tmux.sock");
    let tmux = |args: &[&str]| {
        let mut command = Command::new("tmux");
        text(&world.environment(&mut command).arg("-S").arg(&socket).args(args).output().unwrap().stdout)
    };
    tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "15", "env PS1='shell$ ' sh"]);
    let all = || tmux(&["capture-pane", "-p", "-S", "-"]);
    let until = |what: &str, test: &dyn Fn() -> bool| {
        let deadline = Instant::now() + PATIENCE;
        while !test() {
            assert!(Instant::now() < deadline, "never {what}: {}", all());
            thread::sleep(Duration::from_millis(20));
        }
    };
    until("a shell", &|| all().contains("shell$"));
    tmux(&["send-keys", &format!("{OUTLAST} run --session s -- ./agent"), "Enter"]);
    until("ready", &|| all().contains("ready>"));
    for round in ["more", "further"] {
        tmux(&["send-keys", "C-\\"]);
        world.until("attached", json!(0));
        // The agent writes while no viewer is attached.
        assert!(world.outlast(&["inject", "s", round, "--enter"]).status.success());
        let last = format!("{round} 40.");
        assert!(world.outlast(&["wait-for", "s", "--text", &last, "--timeout", "60"]).status.success());
        tmux(&["send-keys", &format!("{OUTLAST} attach s"), "Enter"]);
        world.until("attached", json!(1));
        until("back", &|| tmux(&["capture-pane", "-p"]).contains(&last));
    }
    let shown = all();
    let count = |line: &str| shown.lines().filter(|shown| shown.trim_end() == line).count();
    for line in ["line 1.", "line 40.", "more 1.", "more 20.", "further 1."] {
        assert_eq!(count(line), 1, "{line} in {shown}");
    }
    tmux(&["kill-server"]);
    world.outlast(&["stop", "s"]);
}

/// Attaching to a session from inside that session would display itself without end.
#[test]
fn a_session_cannot_be_attached_from_inside() {
    let world = World::new();
    let agent = format!(
        "#!/bin/sh\nprintf 'ready> '\nread -r line\n{OUTLAST} attach s $line\necho left with $?\nread -r line\n"
    );
    fs::write(world.path().join("agent"), agent).unwrap();
    for option in ["", "--watch"] {
        let mut session = world.session();
        session.type_keys(format!("{option}\r").as_bytes());
        let shown = session.shows("left with ");
        assert!(shown.contains("error: this terminal is inside the session `s`"), "{shown}");
        session.shows("2");
        assert_eq!(world.state()["attached"], 1);
        world.outlast(&["stop", "s"]);
        session.ended();
    }
}

/// Clients that connect and send nothing take no place from clients that send requests.
#[test]
fn silent_clients_do_not_block_others() {
    let world = World::new();
    let session = world.session();
    let socket = world.state()["socket"].as_str().unwrap().to_owned();
    let mut subscriber = connect(&socket);
    ask(&mut subscriber, "subscribe");
    let silent: Vec<UnixStream> = (0..200).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    for _ in 0..3 {
        assert_eq!(world.state()["state"], "ready");
    }
    // A client with half a request counts as silent, too; a client that waits for events stays.
    let mut halves = silent;
    for half in &mut halves {
        let _ = half.write_all(&[0, 0]);
    }
    assert_eq!(world.state()["state"], "ready");
    assert!(world.outlast(&["restart", "s"]).status.success());
    let mut head = [0; 4];
    subscriber.set_read_timeout(Some(PATIENCE)).unwrap();
    subscriber.read_exact(&mut head).expect("an event for the one that subscribed");
    world.outlast(&["stop", "s"]);
    session.ended();
}

fn connect(socket: &str) -> UnixStream {
    UnixStream::connect(socket).unwrap()
}

/// A request and its answer.
fn ask(client: &mut UnixStream, method: &str) -> String {
    let frame = format!(r#"{{"v":1,"id":1,"method":"{method}","params":{{}}}}"#);
    client.write_all(&u32::try_from(frame.len()).unwrap().to_be_bytes()).unwrap();
    client.write_all(frame.as_bytes()).unwrap();
    let mut head = [0; 4];
    client.read_exact(&mut head).unwrap();
    let mut answer = vec![0; u32::from_be_bytes(head) as usize];
    client.read_exact(&mut answer).unwrap();
    text(&answer)
}

// ---- several at once ---------------------------------------------------------------------------------------------

#[test]
fn the_size_is_that_of_the_viewer_that_typed_last() {
    let world = World::new();
    let mut owner = world.session();
    let mut guest = attach(&world, size(60, 20), &[]);
    guest.shows("ready>");
    world.until("columns", json!(60));
    assert_eq!(guest.ask("size", "size="), "20 60");
    // The owner's terminal is larger: it gets a picture.
    owner.shows("20 60");
    owner.type_keys(b"x\r");
    owner.shows("heard x");
    world.until("columns", json!(101));
    assert_eq!(owner.ask("size", "size="), "33 101");
    guest.shows("33 101");
    // A detached viewer no longer affects the size.
    guest.type_keys(b"y\r");
    guest.shows("heard y");
    world.until("rows", json!(20));
    guest.type_keys(LEAVE);
    guest.ended();
    world.until("rows", json!(33));
    assert_eq!(world.state()["attached"], 1);
    assert!(world.outlast(&["stop", "s"]).status.success());
    owner.ended();
}

#[test]
fn a_watching_viewer_sends_no_input_and_no_size() {
    let world = World::new();
    detached(&world, &[]);
    let before = world.state()["columns"].clone();
    let mut watcher = attach(&world, size(60, 20), &["--watch"]);
    watcher.shows("ready>");
    watcher.type_keys(b"exit 1\r");
    let mut by_hand = Viewer::new(&world, true);
    by_hand.shows("ready>");
    by_hand.say(b'i', b"exit 1\r");
    let refused = loop {
        let (kind, bytes) = by_hand.hear();
        if kind == b'r' {
            break bytes;
        }
    };
    let refused: Value = serde_json::from_slice(&refused).unwrap();
    assert_eq!(refused["code"], "read_only");
    world.outlast(&["inject", "s", "hello", "--enter"]);
    watcher.shows("heard hello");
    by_hand.shows("heard hello");
    let state = world.state();
    assert_eq!((&state["restarts"], &state["columns"]), (&json!(0), &before));
    watcher.type_keys(LEAVE);
    watcher.ended();
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn a_slow_viewer_is_skipped_and_painted() {
    let world = World::new();
    let flood = "#!/bin/sh\nprintf 'ready> '\nread -r line\nseq 1 400000\nprintf 'END ready> '\nread -r line\n";
    fs::write(world.path().join("agent"), flood).unwrap();
    let mut owner = world.session();
    let mut slow = Viewer::new(&world, true);
    let mut quick = Viewer::new(&world, false);
    owner.type_keys(b"go\r");
    // Neither the owner nor a fast viewer waits for it.
    quick.shows("END ready>");
    owner.shows("END ready>");
    let shown = slow.shows("END ready>");
    assert!(shown.len() < 1_500_000, "{} of 2.7 MB", shown.len());
    // Its last update is the whole screen.
    let last = text(&shown).rsplit("\x1b[?2026h").next().unwrap().to_owned();
    for number in 399_990..=400_000 {
        assert!(last.contains(&number.to_string()), "{number} in {last:?}");
    }
    assert!(world.outlast(&["stop", "s"]).status.success());
    let mut ended = slow.hear();
    while ended.0 == b'o' {
        ended = slow.hear();
    }
    assert_eq!(ended.0, b'e');
    owner.ended();
}

#[test]
fn the_number_of_viewers_is_limited() {
    let world = World::new();
    detached(&world, &[]);
    let viewers: Vec<Viewer> = (0..16).map(|_| Viewer::new(&world, true)).collect();
    let refused = attach(&world, size(80, 24), &[]).ended();
    assert_eq!(refused.0, Some(1));
    assert!(refused.1.contains("16 terminals are already attached"), "{}", refused.1);
    drop(viewers);
    world.until("attached", json!(0));
    assert!(world.outlast(&["stop", "s"]).status.success());
}

// ---- exits -------------------------------------------------------------------------------------------------------

/// The process that does the work is the child of the process that the shell started.
fn kill_worker(guest: &Session) {
    let parent = guest.child.id();
    let worker = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
    kill(Pid::from_raw(worker.trim().parse().unwrap()), Signal::SIGKILL).unwrap();
}

#[test]
fn a_killed_viewer_disturbs_no_session_and_its_terminal_is_restored() {
    let world = World::new();
    let mut owner = world.session();
    let mut guest = attach(&world, size(101, 33), &[]);
    guest.shows("ready>");
    world.until("attached", json!(2));
    kill_worker(&guest);
    let (code, shown) = guest.ended();
    assert_eq!(code, Some(137), "{shown}");
    assert!(shown.contains("\x1b[?2004l"), "{shown}");
    world.until("attached", json!(1));
    owner.type_keys(b"hello\r");
    owner.shows("heard hello");
    // The other of the two processes.
    let mut guest = attach(&world, size(101, 33), &[]);
    guest.shows("ready>");
    kill(Pid::from_raw(guest.child.id() as i32), Signal::SIGKILL).unwrap();
    guest.child.wait().unwrap();
    world.until("attached", json!(1));
    assert!(world.outlast(&["stop", "s"]).status.success());
    owner.ended();
}

#[test]
fn a_killed_viewer_that_found_the_alternate_screen_leaves_it() {
    let world = World::new();
    let mut owner = world.session();
    owner.type_keys(b"modes\r");
    owner.shows("ready> ");
    let mut guest = attach(&world, size(101, 33), &[]);
    guest.shows("\x1b[?1049h");
    guest.shows("ready>");
    kill_worker(&guest);
    let (code, shown) = guest.ended();
    assert_eq!(code, Some(137), "{shown}");
    let end = shown.rsplit("\x1b[?1049h").next().unwrap();
    assert!(end.contains("\x1b[?1049l"), "{shown:?}");
    assert!(end.contains("[outlast] this terminal was ended by SIGKILL"), "{shown:?}");
    assert!(world.outlast(&["stop", "s"]).status.success());
    owner.ended();
}

#[test]
fn killing_outlast_restores_every_terminal() {
    let world = World::new();
    let mut owner = world.session();
    owner.type_keys(b"modes\r");
    owner.shows("ready> ");
    let mut guest = attach(&world, size(101, 33), &[]);
    guest.shows("ready>");
    let agent = world.state()["pid"].as_u64().unwrap();
    kill(worker(&world), Signal::SIGKILL).unwrap();
    let (code, shown) = owner.ended();
    assert_eq!(code, Some(137));
    let (guest_code, guest_shown) = guest.ended();
    assert_eq!(guest_code, Some(1));
    assert!(guest_shown.contains("error: `s` has ended"), "{guest_shown}");
    for shown in [shown, guest_shown] {
        for reset in ["\x1b[?2004l", "\x1b[?1000l", "\x1b[?25h", "\x1b[?1049l"] {
            assert!(shown.contains(reset), "{reset:?} in {shown:?}");
        }
    }
    until_gone(agent);
}

#[test]
fn killing_the_stand_in_restores_the_terminal() {
    let world = World::new();
    let mut session = world.session();
    let agent = world.state()["pid"].as_u64().unwrap();
    kill(Pid::from_raw(session.child.id() as i32), Signal::SIGKILL).unwrap();
    session.child.wait().unwrap();
    until_gone(agent);
    assert!(!session.is_raw());
}

// ---- queries without a viewer ------------------------------------------------------------------------------

#[test]
fn terminal_queries_are_answered_without_a_viewer() {
    let world = World::new();
    let ask = "#!/bin/bash\nstty raw -echo\n\
        for ask in '\\033[c' '\\033[6n' '\\033]11;?\\007' '\\033[>0q' '\\033[?u' '\\033[?2004$p'; do\n\
        printf \"$ask\"; answer=; while IFS= read -r -n1 -t 0.5 letter; do answer=\"$answer$letter\"; done\n\
        printf '<%s>\\r\\n' \"$(printf %s \"$answer\" | tr '\\033\\007' 'EB')\"; done\nprintf 'ready> '\nstty sane\nread -r line\n";
    let agent = world.path().join("agent");
    fs::write(&agent, ask).unwrap();
    fs::set_permissions(&agent, fs::Permissions::from_mode(0o755)).unwrap();
    detached(&world, &[]);
    assert!(world.outlast(&["wait-for", "s", "--text", "ready>", "--timeout", "60s"]).status.success());
    let lines = screen(&world)["text"].as_str().unwrap().to_owned();
    let version = env!("CARGO_PKG_VERSION");
    let expected = format!(
        "<E[?62;22c>\n<E[2;1R>\n<E]11;rgb:1010/1010/1010B>\n<EP>|outlast {version}E\\>\n<E[?0u>\n<E[?2004;2$y>\nready>"
    );
    assert_eq!(lines, expected);
    assert!(world.outlast(&["stop", "s"]).status.success());

    // A viewer is attached whose terminal does not answer; outlast does not answer either.
    let mut session = world.run(&["--session", "s", "--", "./agent"]);
    let shown = session.shows("ready> ");
    assert!(shown.contains("\x1b[c<>") && !shown.contains("62;22"), "{shown}");
    assert!(world.outlast(&["stop", "s"]).status.success());
    session.ended();
}

// ---- words -------------------------------------------------------------------------------------------------------

#[test]
fn an_impossible_request_is_refused_with_a_sentence() {
    let world = World::new();
    detached(&world, &["--no-screen"]);
    let table: [(&[&str], i32, &str); 6] = [
        (&["attach", "s"], 2, "`outlast attach` needs a terminal"),
        (&["screen", "s"], 1, "has no screen model"),
        (&["wait-for", "s", "--text", "x"], 1, "has no screen model"),
        (&["wait-for", "s"], 2, "--text"),
        (&["wait-for", "unknown", "--prompt"], 1, "no instance named `unknown` is running"),
        (&["run", "--hang-timeout", "5", "--", "./agent"], 2, "outlast cannot detect that `./agent` hangs"),
    ];
    for (words, code, expected) in table {
        let output = world.outlast(words);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.contains(expected)), (Some(code), true), "{words:?}: {said}");
    }
    assert!(world.outlast(&["wait-for", "s", "--quiet", "10ms"]).status.success());
    assert!(world.outlast(&["stop", "s"]).status.success());
}
