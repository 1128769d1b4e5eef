//! U1: `outlast run` becomes another program. The agent, the terminals and the clients of its socket see nothing of it, and
//! a program that cannot take over leaves everything as it was.

use std::{
    fs,
    io::{Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant, SystemTime},
};

use nix::{
    pty::Winsize,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{mcp::upgrade::upgrades, support::copy_program};

use super::{OUTLAST, PATIENCE, Session, World, answer, text, until_gone};

/// The program under test with another format of the state, and a migration to it.
const NEXT: &str = env!("CARGO_BIN_EXE_outlast-next");

/// It reports each signal that an upgrade could cause, and obeys one line at a time.
const AGENT: &str = r#"#!/bin/bash
echo "$*" >> args.log
trap 'echo WINCH >> signals' WINCH
trap 'echo CONT >> signals' CONT
printf 'agent %s ready> ' "$$"
while true; do
    # A trap runs when the line is read.
    read -r word rest || { [ $? -gt 128 ] && continue; exit 9; }
    case "$word" in
        exit) exit "$rest" ;;
        die) kill -"$rest" $$ ;;
        size) printf 'size=%s\n' "$(stty size)" ;;
        count) for n in $(seq 1 "$rest"); do printf 'line %06d of the output, with \033[3%dmcolour\033[0m and 日本\n' "$n" $((n % 8)); done; printf 'counted\n' ;;
        paint) printf '\033]2;a title\007main\033[?1049h\033[2J\033[3;5H\033[1;44mabove\033[?2004h\033[>5u' ;;
        back) printf '\033[?1049l\nback\n' ;;
        half) printf 'half \033[1;3'; sleep 0.1; read -r _; printf '1mred\033[0m\n' ;;
        long) printf '\033]52;c;'; head -c 200000 /dev/zero | tr '\0' x; read -r _; printf '\007done\n' ;;
        *) printf 'heard %s\n' "$word" ;;
    esac
    printf 'ready> '
done
"#;

fn world() -> World {
    let world = World::new();
    fs::write(world.path().join("agent"), AGENT).unwrap();
    world
}

fn detached(world: &World, options: &[&str]) {
    let output = world.outlast(&[&["run", "-d", "--session", "s"], options, &["--", "./agent"]].concat());
    assert_eq!((text(&output.stdout).as_str(), text(&output.stderr).as_str()), ("s\n", ""));
    world.until_there();
}

fn attach(world: &World, columns: u16, rows: u16) -> Session {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    Session::start_command(world, size, &[OUTLAST, "attach", "s"])
}

fn ask_upgrade(world: &World, program: &str) -> Result<Value, String> {
    let output = world.outlast(&["upgrade", "s", "--program", program, "--json"]);
    match output.status.success() {
        true => Ok(serde_json::from_slice(&output.stdout).expect("JSON")),
        false => Err(text(&output.stdout) + &text(&output.stderr)),
    }
}

fn upgraded(world: &World, program: &str) -> Value {
    let answer = ask_upgrade(world, program).unwrap_or_else(|said| panic!("{said}\n{}", world.log("s")));
    assert_eq!(answer["upgraded"], true, "{answer}");
    answer
}

fn screen(world: &World) -> Value {
    let output = world.outlast(&["screen", "s", "--history", "1000", "--json"]);
    let mut seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    // What the agent does changes with time.
    for member in ["waiting_for_input", "stance"] {
        seen[member].take();
    }
    seen
}

/// What no upgrade may change.
fn lasting(world: &World) -> [Value; 7] {
    let state = world.state();
    ["outlast_pid", "pid", "generation", "restarts", "columns", "rows", "attached"].map(|member| state[member].clone())
}

fn audit(world: &World, event: &str) -> Vec<Value> {
    let text = fs::read_to_string(world.path().join(".outlast/audit.jsonl")).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    records.filter(|record| record["props"]["event_type"] == event).collect()
}

/// Waits until the audit log has so many of these.
fn recorded(world: &World, event: &str, count: usize) -> Value {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let records = audit(world, event);
        if records.len() >= count {
            return records[count - 1]["props"].clone();
        }
        assert!(Instant::now() < deadline, "{event} was not recorded: {}", world.log("s"));
        thread::sleep(Duration::from_millis(20));
    }
}

/// The agent got no signal.
fn is_undisturbed(world: &World) {
    let signals = fs::read_to_string(world.path().join("signals")).unwrap_or_default();
    assert_eq!(signals, "", "the agent got signals");
}

fn script(world: &World, name: &str, text: &str, mode: u32) -> String {
    let path = world.path().join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    path.display().to_string()
}

fn without_zombies(pid: u64) -> usize {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children.split_ascii_whitespace().count()
}

fn descriptors(pid: u64) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

// ---- the terminal that outlast was started from -------------------------------------------------------------------

#[test]
fn an_upgrade_in_the_middle_of_output_loses_and_repeats_no_byte() {
    let upgrades = upgrades();
    let world = World::new();
    let _end = world.end();
    // It writes numbered lines until its input ends them, and echoes its input to a file.
    let agent = "stty raw -echo; printf 'R\\n'; ( n=0; while [ ! -e stop ]; do n=$((n+1)); \
                 printf 'line %09d, some more text, and the end\\n' $n; done; printf 'LAST %d\\n' $n ) & exec cat > typed";
    let mut session = world.run(&["--session", "s", "--detach-key", "none", "--", "bash", "-c", agent]);
    session.shows("R\n");
    world.until_there();
    let before = lasting(&world);
    let is_over = AtomicBool::new(false);
    let mut typed = Vec::new();
    let pauses = thread::scope(|scope| {
        let work = scope.spawn(|| {
            let pause = |number: usize| {
                // The second half reads the state of the first by a migration.
                let program = if number < upgrades / 2 { OUTLAST } else { NEXT };
                upgraded(&world, program)["pause_ms"].as_f64().expect("a number")
            };
            let pauses: Vec<f64> = (0..upgrades).map(pause).collect();
            is_over.store(true, Ordering::Relaxed);
            pauses
        });
        let mut number = 0u64;
        while !is_over.load(Ordering::Relaxed) && !work.is_finished() {
            number += 1;
            let keys = format!("typed {number} ");
            session.type_keys(keys.as_bytes());
            typed.extend_from_slice(keys.as_bytes());
            // The terminal is read all the time, so that the agent is never held up.
            let _ = session.shown.recv_timeout(Duration::from_millis(5)).map(|bytes| session.unread.extend(bytes));
        }
        work.join().expect("every upgrade succeeds")
    });
    assert_eq!(pauses.len(), upgrades);
    assert!(pauses.iter().all(|pause| *pause > 0.0), "{pauses:?}");
    if let Ok(path) = std::env::var("OUTLAST_PAUSES") {
        fs::write(path, format!("{pauses:?}\n")).unwrap();
    }
    assert_eq!(lasting(&world), before);
    assert!(session.is_raw(), "the terminal is still that of the agent");
    fs::write(world.path().join("stop"), "").unwrap();
    let shown = session.shows("LAST ");
    let count: u64 = session.shows("\n").trim().parse().unwrap();
    let lines: Vec<&str> = shown.lines().collect();
    let (last, lines) = lines.split_last().unwrap();
    assert_eq!(*last, "LAST ");
    assert_eq!(lines.len() as u64, count);
    for (line, number) in lines.iter().zip(1u64..) {
        assert_eq!(*line, format!("line {number:09}, some more text, and the end"));
    }
    let deadline = Instant::now() + PATIENCE;
    while fs::read(world.path().join("typed")).unwrap().len() < typed.len() {
        assert!(Instant::now() < deadline, "not all keys arrived");
        thread::sleep(Duration::from_millis(10));
    }
    assert!(fs::read(world.path().join("typed")).unwrap() == typed, "the agent got what was typed, once and in order");
    assert_eq!(audit(&world, "upgraded").len(), upgrades);
    let pid = before[0].as_u64().unwrap();
    // Descriptors and processes of earlier programs are gone.
    assert!(descriptors(pid) < 40, "{} descriptors", descriptors(pid));
    assert!(without_zombies(pid) <= 2, "{} children", without_zombies(pid));
    assert!(world.outlast(&["stop", "s"]).status.success());
    session.ended();
    until_gone(pid);
}

#[test]
fn the_terminal_is_given_back_at_the_end_and_the_stand_in_stays() {
    for ending in ["quit", "killed", "detach", "suspend"] {
        let world = world();
        let _end = world.end();
        let mut session = world.run(&["--session", "s", "--", "./agent"]);
        session.shows("ready> ");
        world.until_there();
        let before = lasting(&world);
        let mut other = world.run(&["--session", "s", "--", "./agent"]);
        other.shows("already running");
        assert_eq!(other.ended().0, Some(1));
        upgraded(&world, NEXT);
        assert_eq!(lasting(&world), before);
        let mut other = world.run(&["--session", "s", "--", "./agent"]);
        other.shows("already running");
        assert_eq!(other.ended().0, Some(1), "the name is still claimed");
        assert!(session.is_raw());
        session.type_keys(b"hello\r");
        session.shows("heard hello");
        is_undisturbed(&world);
        // The size still follows.
        let mut stty = Command::new("stty");
        stty.args(["rows", "40", "cols", "120"]).stdin(session.slave.try_clone().unwrap());
        assert!(stty.status().unwrap().success());
        world.until("columns", json!(120));
        session.type_keys(b"size\r");
        session.shows("size=40 120");
        match ending {
            "quit" => {
                session.type_keys(b"exit 0\r");
                session.shows("q: quit");
                session.type_keys(b"q");
                assert_eq!(session.ended().0, Some(0));
            }
            "killed" => {
                // The stand-in, which is a process of the old program, gives the terminal back.
                kill(Pid::from_raw(before[0].as_i64().unwrap() as i32), Signal::SIGKILL).unwrap();
                let (code, shown) = session.ended();
                assert_eq!(code, Some(137), "{shown}");
                assert!(shown.contains("outlast itself was ended by SIGKILL"), "{shown}");
                until_gone(before[1].as_u64().unwrap());
            }
            "detach" => {
                session.type_keys(b"\x1c");
                session.shows("[outlast] detached");
                assert_eq!(session.ended().0, Some(0));
                upgraded(&world, NEXT);
                let mut viewer = attach(&world, 100, 30);
                viewer.type_keys(b"still\r");
                viewer.shows("heard still");
                assert!(world.outlast(&["stop", "s"]).status.success());
                viewer.ended();
            }
            _ => {
                // Signals to the stand-in are passed on.
                kill(Pid::from_raw(session.child.id() as i32), Signal::SIGTERM).unwrap();
                assert_eq!(session.ended().0, Some(129));
            }
        }
    }
}

#[test]
fn sigusr2_and_the_program_on_disk() {
    let world = world();
    let _end = world.end();
    let program = world.path().join("outlast-on-disk");
    copy_program(OUTLAST, &program);
    let words = [program.to_str().unwrap(), "run", "--session", "s", "--", "./agent"];
    let size = Winsize { ws_row: 30, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
    let mut session = Session::start_command(&world, size, &words);
    session.shows("ready> ");
    world.until_there();
    let ps = || text(&world.outlast(&["ps"]).stdout);
    assert!(!ps().contains("older program"), "{}", ps());
    // As a package manager does: another file takes the name.
    let new = world.path().join("new");
    copy_program(NEXT, &new);
    let later = SystemTime::now() + Duration::from_secs(60);
    fs::File::options().write(true).open(&new).and_then(|file| file.set_modified(later)).unwrap();
    fs::rename(&new, &program).unwrap();
    assert!(ps().contains("1 instance runs an older program than the one on disk"), "{}", ps());
    let before = lasting(&world);
    kill(Pid::from_raw(before[0].as_i64().unwrap() as i32), Signal::SIGUSR2).unwrap();
    let record = recorded(&world, "upgraded", 1);
    assert!(record["detail"].as_str().is_some_and(|detail| detail.contains("writes version 2")), "{record}");
    assert_eq!(lasting(&world), before);
    assert!(!ps().contains("older program"), "{}", ps());
    assert!(world.log("s").contains("[supervisor] upgraded from="), "{}", world.log("s"));
    session.type_keys(b"hello\r");
    session.shows("heard hello");
    is_undisturbed(&world);
    assert!(world.outlast(&["stop", "s"]).status.success());
    session.ended();
}

#[test]
fn output_to_a_pipe_and_to_a_file_goes_on() {
    for to_file in [false, true] {
        let world = World::new();
        let _end = world.end();
        let count = "printf 'begin\\n'; for n in $(seq 1 20000); do echo line $n; done; while [ ! -e go ]; do sleep 0.05; \
                     done; printf 'end\\n'; while [ ! -e over ]; do sleep 0.05; done";
        let mut command = Command::new(OUTLAST);
        world.environment(&mut command).args(["run", "--session", "s", "--", "sh", "-c", count]).stdin(Stdio::null());
        let path = world.path().join("out");
        match to_file {
            true => command.stdout(fs::File::create(&path).unwrap()),
            false => command.stdout(Stdio::piped()),
        };
        let mut child = command.stderr(Stdio::null()).spawn().unwrap();
        world.until_there();
        let reader = child.stdout.take().map(|mut stdout| {
            thread::spawn(move || {
                let mut all = Vec::new();
                stdout.read_to_end(&mut all).map(|_| all)
            })
        });
        for program in [OUTLAST, OUTLAST, NEXT] {
            upgraded(&world, program);
        }
        fs::write(world.path().join("go"), "").unwrap();
        assert!(world.outlast(&["wait-for", "s", "--text", "end", "--timeout", "60s"]).status.success());
        fs::write(world.path().join("over"), "").unwrap();
        child.wait().unwrap();
        let all = match reader {
            Some(reader) => reader.join().unwrap().unwrap(),
            None => fs::read(&path).unwrap(),
        };
        let expected: String = (1..=20_000).map(|n| format!("line {n}\r\n")).collect();
        assert!(text(&all) == format!("begin\r\n{expected}end\r\n"), "to a file: {to_file}");
    }
}

// ---- viewers ------------------------------------------------------------------------------------------------------

#[test]
fn viewers_and_the_screen_stay() {
    let world = world();
    let _end = world.end();
    detached(&world, &[]);
    let mut viewer = attach(&world, 80, 24);
    viewer.shows("ready>");
    // It has another size, and gets pictures.
    let mut small = attach(&world, 40, 10);
    small.shows("ready>");
    viewer.type_keys(b"count 300\r");
    viewer.shows("counted");
    viewer.shows("ready>");
    small.shows("counted");
    for program in [OUTLAST, NEXT] {
        let (before, seen) = (lasting(&world), screen(&world));
        assert_eq!(before[6], 2, "two are attached");
        assert!(seen["history"].as_array().unwrap().len() > 250, "{seen}");
        upgraded(&world, program);
        assert_eq!((lasting(&world), screen(&world)), (before, seen), "nothing has changed");
        for who in [&mut viewer, &mut small] {
            who.type_keys(b"again\r");
            who.shows("heard again");
        }
        world.outlast(&["wait-for", "s", "--quiet", "0.3s"]);
        viewer.type_keys(b"x\r");
        viewer.shows("heard x");
        is_undisturbed_but_for_size(&world);
    }
    // The alternate screen, with the main one below it.
    viewer.type_keys(b"paint\r");
    viewer.shows("above");
    assert!(world.outlast(&["wait-for", "s", "--text", "above", "--timeout", "60s"]).status.success());
    let seen = screen(&world);
    assert_eq!(
        (&seen["title"], &seen["modes"]["alternate"], &seen["modes"]["keyboard"]),
        (&json!("a title"), &json!(true), &json!(5))
    );
    upgraded(&world, NEXT);
    assert_eq!(screen(&world), seen);
    // A viewer that comes now sees the same screen.
    let mut late = attach(&world, 80, 24);
    late.shows("above");
    viewer.type_keys(b"back\r");
    viewer.shows("back");
    late.shows("back");
    assert!(world.outlast(&["wait-for", "s", "--text", "back", "--timeout", "60s"]).status.success());
    let lines = screen(&world);
    let is_there =
        |words: &str| lines["lines"].as_array().unwrap().iter().any(|line| line.as_str().unwrap().contains(words));
    assert!(is_there("main") && !is_there("above"), "{lines}");
    assert!(world.outlast(&["stop", "s"]).status.success());
    for viewer in [viewer, small, late] {
        viewer.ended();
    }
}

/// Viewers of another size that type change the size; an upgrade does not.
fn is_undisturbed_but_for_size(world: &World) {
    let signals = fs::read_to_string(world.path().join("signals")).unwrap_or_default();
    assert!(signals.lines().all(|line| line == "WINCH"), "{signals}");
}

#[test]
fn an_upgrade_during_an_attach() {
    let world = world();
    let _end = world.end();
    detached(&world, &[]);
    let path = world.home.path().join(".local/state/outlast/run/s.sock");
    // Half of the request arrives before the upgrade, half after it.
    let request = json!({"v": 1, "id": 7, "method": "attach", "params": {"columns": 80, "rows": 24}}).to_string();
    let frame = [&(request.len() as u32).to_be_bytes()[..], request.as_bytes()].concat();
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&frame[..20]).unwrap();
    world.state();
    upgraded(&world, OUTLAST);
    stream.write_all(&frame[20..]).unwrap();
    assert_eq!(answer(&mut stream)["ok"]["session"], "s");
    // Many attach while the program changes again and again.
    thread::scope(|scope| {
        let viewers: Vec<_> = (0..8)
            .map(|_| {
                let world = &world;
                scope.spawn(move || {
                    let mut viewer = attach(world, 80, 24);
                    viewer.shows("ready>");
                    viewer.type_keys(b"\x1c");
                    viewer.shows("detached");
                    viewer.ended();
                })
            })
            .collect();
        for _ in 0..4 {
            upgraded(&world, NEXT);
        }
        viewers.into_iter().for_each(|viewer| viewer.join().expect("every viewer sees the agent"));
    });
    assert_eq!(world.state()["attached"], 1);
    is_undisturbed(&world);
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn requests_that_wait_are_answered_by_the_next_program() {
    let world = world();
    let _end = world.end();
    detached(&world, &[]);
    let wait = |args: &[&str]| {
        let mut command = Command::new(OUTLAST);
        world.environment(&mut command).args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let text_wanted = wait(&["wait-for", "s", "--text", "heard later", "--timeout", "60s"]);
    let too_late = wait(&["wait-for", "s", "--text", "never", "--timeout", "2s"]);
    world.until("waiters", json!(2));
    upgraded(&world, NEXT);
    assert_eq!(world.state()["waiters"], 2);
    assert!(world.outlast(&["inject", "s", "later\r"]).status.success());
    assert!(text_wanted.wait_with_output().unwrap().status.success());
    let said = too_late.wait_with_output().unwrap();
    assert!(!said.status.success() && text(&said.stderr).contains("did not show `never` within 2 s"), "{said:?}");
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn a_sequence_that_is_half_written_is_completed() {
    let world = world();
    let _end = world.end();
    detached(&world, &[]);
    let mut viewer = attach(&world, 80, 24);
    viewer.shows("ready>");
    viewer.type_keys(b"half\r");
    viewer.shows("half ");
    world.outlast(&["wait-for", "s", "--quiet", "0.5s"]);
    upgraded(&world, NEXT);
    viewer.type_keys(b"\r");
    viewer.shows("red");
    assert!(world.outlast(&["wait-for", "s", "--text", "red", "--timeout", "60s"]).status.success());
    // The line feed is the echo of Enter, within the sequence.
    let seen = screen(&world);
    assert_eq!((&seen["lines"][1], &seen["lines"][2]), (&json!("half"), &json!("red")), "{seen}");
    assert!(world.outlast(&["stop", "s"]).status.success());
    viewer.ended();
}

#[test]
fn an_upgrade_that_waits_for_long_is_postponed_and_done_later() {
    let world = world();
    let _end = world.end();
    detached(&world, &[]);
    let mut viewer = attach(&world, 80, 24);
    viewer.shows("ready>");
    // A control string that is longer than what is kept of it.
    viewer.type_keys(b"long\r");
    viewer.shows("52;c;");
    world.outlast(&["wait-for", "s", "--quiet", "0.5s"]);
    let answer = ask_upgrade(&world, NEXT).unwrap();
    assert_eq!(answer["upgraded"], false, "{answer}");
    assert_eq!(answer["postponed"], "the agent is writing a long escape sequence", "{answer}");
    assert_eq!(audit(&world, "upgraded").len(), 0);
    viewer.type_keys(b"\r");
    recorded(&world, "upgraded", 1);
    viewer.shows("done");
    assert!(world.outlast(&["stop", "s"]).status.success());
    viewer.ended();
}

#[test]
fn an_upgrade_waits_for_a_restart() {
    let world = world();
    let _end = world.end();
    // An agent that is slow to end.
    let slow = AGENT.replace("trap 'echo WINCH", "trap '' HUP\ntrap 'echo WINCH");
    fs::write(world.path().join("agent"), slow).unwrap();
    detached(&world, &[]);
    let old = world.state()["pid"].clone();
    thread::scope(|scope| {
        let restart = scope.spawn(|| world.outlast(&["restart", "s"]));
        world.until("state", json!("restarting"));
        upgraded(&world, NEXT);
        assert!(restart.join().unwrap().status.success());
    });
    let state = world.state();
    assert_eq!(state["generation"], 2, "{state}");
    assert_ne!(state["pid"], old);
    let order: Vec<String> = {
        let text = fs::read_to_string(world.path().join(".outlast/audit.jsonl")).unwrap();
        text.lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap()["props"]["event_type"].to_string())
            .collect()
    };
    let at = |event: &str| order.iter().rposition(|found| found.contains(event)).expect("it is recorded");
    assert!(at("server_started") < at("upgraded"), "{order:?}");
    assert!(world.outlast(&["stop", "s", "--force"]).status.success());
}

#[test]
fn an_upgrade_waits_for_a_text_that_is_being_sent() {
    let world = World::new();
    let _end = world.end();
    // It never shows anything, so the text waits for it.
    let output = world.outlast(&["run", "-d", "--session", "s", "--", "sleep", "600"]);
    assert!(output.status.success(), "{output:?}");
    thread::scope(|scope| {
        let send = scope.spawn(|| world.outlast(&["send", "s", "hello", "--timeout", "3s"]));
        let deadline = Instant::now() + PATIENCE;
        while !world.log("s").contains("[supervisor] send ") {
            assert!(Instant::now() < deadline, "{}", world.log("s"));
            thread::sleep(Duration::from_millis(20));
        }
        upgraded(&world, NEXT);
        let said = send.join().unwrap();
        assert!(!said.status.success() && text(&said.stderr).contains("no empty input field"), "{said:?}");
    });
    let log = world.log("s");
    let at = |words: &str| log.find(words).unwrap_or_else(|| panic!("{words} is not in {log}"));
    assert!(at("[supervisor] send_ended") < at("[supervisor] upgraded"), "{log}");
}

// ---- crashes ------------------------------------------------------------------------------------------------------

#[test]
fn an_upgrade_during_a_backoff_and_while_halted() {
    let world = World::new();
    let _end = world.end();
    fs::write(
        world.path().join("agent"),
        "#!/bin/sh\necho started >> starts\n[ -e good ] || exit 3\nprintf 'ready> '\nexec cat\n",
    )
    .unwrap();
    let output = world.outlast(&["run", "-d", "--session", "s", "--", "./agent"]);
    assert!(output.status.success(), "{output:?}");
    for (number, program) in [OUTLAST, OUTLAST, NEXT, NEXT].into_iter().enumerate() {
        let state = world.until("crashes", json!(number + 1));
        assert_eq!(state["state"], "backoff", "{state}");
        upgraded(&world, program);
        let after = world.state();
        assert_eq!((&after["state"], &after["crashes"]), (&json!("backoff"), &json!(number + 1)), "{after}");
        let left = |state: &Value| state["next_try_s"].as_f64().unwrap();
        assert!(left(&after) <= left(&state), "the backoff does not begin anew: {state} {after}");
        if left(&after) > 5.0 {
            // It would take half a minute.
            assert!(world.outlast(&["restart", "s"]).status.success());
        }
    }
    world.until("state", json!("halted"));
    upgraded(&world, NEXT);
    let halted = world.state();
    assert_eq!((&halted["state"], &halted["health"]), (&json!("halted"), &json!("halted")), "{halted}");
    let refused = world.outlast(&["restart", "s"]);
    assert!(text(&refused.stderr).contains("halted"), "{refused:?}");
    fs::write(world.path().join("good"), "").unwrap();
    assert!(world.outlast(&["resume", "s"]).status.success());
    world.until("state", json!("ready"));
    assert_eq!(fs::read_to_string(world.path().join("starts")).unwrap().lines().count(), 6);
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn the_question_after_an_exit_is_answered_in_the_next_program() {
    let world = world();
    let _end = world.end();
    let mut session = world.run(&["--session", "s", "--", "./agent"]);
    session.shows("ready> ");
    session.type_keys(b"exit 0\r");
    session.shows("q: quit");
    upgraded(&world, NEXT);
    session.type_keys(b"\r");
    session.shows("ready> ");
    world.until_there();
    assert_eq!(world.starts(), ["", "--continue"]);
    // A crash after the upgrade is noticed as always.
    let pid = world.state()["pid"].as_u64().unwrap();
    kill(Pid::from_raw(pid as i32), Signal::SIGKILL).unwrap();
    session.shows("starting again in 2 s");
    session.shows("ready> ");
    assert!(world.outlast(&["stop", "s"]).status.success());
    session.ended();
}

// ---- programs that cannot take over -------------------------------------------------------------------------------

#[test]
fn a_program_that_cannot_take_over_changes_nothing() {
    let world = world();
    let _end = world.end();
    let mut session = world.run(&["--session", "s", "--", "./agent"]);
    session.shows("ready> ");
    world.until_there();
    let before = (lasting(&world), screen(&world));
    let other_machine = {
        let mut bytes = fs::read(OUTLAST).unwrap();
        // The machine in the header of an ELF file.
        bytes[18] ^= 0x55;
        let (draft, path) = (world.path().join("draft"), world.path().join("other-machine"));
        fs::write(&draft, bytes).unwrap();
        fs::set_permissions(&draft, fs::Permissions::from_mode(0o755)).unwrap();
        copy_program(&draft, &path);
        path.display().to_string()
    };
    let older = "#!/bin/sh\necho \"error: unrecognized subcommand 'check-state'\" >&2\nexit 2\n";
    let refuses = "#!/bin/sh\necho 'error: the state cannot be read: it is of no use here' >&2\nexit 1\n";
    // It passes the check, and is not there any more when the process is to become it.
    let vanishes = format!("#!/bin/sh\nrm -f \"$0\"\nexec {OUTLAST} \"$@\"\n");
    let table = [
        (script(&world, "vanishes", &vanishes, 0o755), "o such file"),
        (other_machine, "it is not a program for this machine"),
        (script(&world, "silent", "#!/bin/sh\nexit 0\n", 0o755), "it is not outlast"),
        (script(&world, "older", older, 0o755), "an older version of outlast"),
        (script(&world, "refuses", refuses, 0o755), "it is of no use here"),
        (script(&world, "locked", "#!/bin/sh\n", 0o644), "it is not executable"),
        (script(&world, "open", "#!/bin/sh\n", 0o777), "every user can write to it"),
        (world.path().display().to_string(), "it is not a file"),
    ];
    for (number, (program, words)) in table.iter().enumerate() {
        let said = ask_upgrade(&world, program).unwrap_err();
        assert!(said.contains(words), "{program}: {said}");
        let record = recorded(&world, "upgrade_failed", number + 1);
        assert!(record["detail"].as_str().is_some_and(|detail| detail.contains(words)), "{record}");
        assert_eq!((lasting(&world), screen(&world)), before, "{program}");
    }
    // A program with an older format of the state.
    upgraded(&world, NEXT);
    let said = ask_upgrade(&world, OUTLAST).unwrap_err();
    assert!(said.contains("the state has version 2, and this program reads versions up to 1"), "{said}");
    assert_eq!((lasting(&world), screen(&world)), before);
    assert!(session.is_raw());
    session.type_keys(b"hello\r");
    session.shows("heard hello");
    is_undisturbed(&world);
    assert!(world.outlast(&["stop", "s"]).status.success());
    session.ended();
}
