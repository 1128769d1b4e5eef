//! C2: whenever and however outlast ends, it exits in time and leaves no process.

use std::time::{Duration, Instant};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use serde_json::json;

use super::client::{BUSY, Client, Place, Setup, VERSION, initialize_params, is_alive, signal, until};

/// The sum of the graces of [`Setup::hasty`], and the second that is allowed in addition.
const ENDS_WITHIN: Duration = Duration::from_millis(500 + 1000);

#[derive(Clone, Copy, Debug)]
enum State {
    Serving,
    Spawning,
    BackingOff,
    Reloading,
}

#[derive(Clone, Copy, Debug)]
enum End {
    Eof,
    Signal(Signal),
    BrokenStdout,
}

/// A server that ignores the end of stdin and SIGTERM, with a grandchild in its own session.
const STUBBORN: [&str; 2] = ["--ignore-eof", "--ignore-term"];

fn grandchild(client: &mut Client) -> u32 {
    client.call("grandchild", json!({"setsid": true, "ignore_term": true})).parse().expect("a pid")
}

fn bring_to(state: State, place: &Place) -> Client {
    let more = place.join("more");
    let setup = Setup::new(place).hasty().puppet(STUBBORN).puppet(["--more", &more]);
    match state {
        State::Serving => {
            let mut client = setup.ready();
            grandchild(&mut client);
            client
        }
        State::Spawning => {
            place.write("more", "--slow-start\n600000\n");
            let mut client = setup.start();
            client.request("initialize", initialize_params(VERSION));
            place.recorded("server_started", 1);
            client
        }
        State::BackingOff => {
            // The fourth crash has a delay of five seconds; a requested restart skips the delay, not the count.
            let mut client = setup.ready();
            for crash in 1..=4 {
                client.kill_server();
                place.recorded("server_crashed", crash);
                if crash < 4 {
                    client.restart();
                }
            }
            assert_eq!(client.status()["state"], "backoff");
            client
        }
        State::Reloading => {
            let mut client = setup.ready();
            grandchild(&mut client);
            place.write("more", "--slow-start\n600000\n");
            client.send_call("restart_server", json!({}));
            place.recorded("server_started", 2);
            client
        }
    }
}

fn ends(how: End) {
    std::thread::scope(|scope| {
        let stories = [State::Serving, State::Spawning, State::BackingOff, State::Reloading].map(|state| {
            scope.spawn(move || {
                let place = Place::new();
                let mut client = bring_to(state, &place);
                let keeper = client.keeper();
                let begun = Instant::now();
                match how {
                    End::Eof => client.close_stdin(),
                    End::Signal(number) => signal(client.pid(), number),
                    End::BrokenStdout => client.break_stdout(),
                }
                let status = client.wait();
                let took = begun.elapsed();
                assert_eq!(status.code(), Some(0), "{how:?} while {state:?}: {status}");
                assert!(took < ENDS_WITHIN + BUSY, "{how:?} while {state:?} took {took:?}");
                assert_eq!(place.family(), [0; 0], "{how:?} while {state:?} left a process behind");
                until("the end of the keeper", || (!is_alive(keeper)).then_some(()));
                assert_eq!(place.recorded("instance_ended", 1)["exit_code"], 0);
            })
        });
        for story in stories {
            if let Err(panic) = story.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
}

#[test]
fn the_end_of_stdin_ends_it() {
    ends(End::Eof);
}

#[test]
fn sigterm_ends_it() {
    ends(End::Signal(Signal::SIGTERM));
}

#[test]
fn sigint_ends_it() {
    ends(End::Signal(Signal::SIGINT));
}

#[test]
fn sighup_ends_it() {
    ends(End::Signal(Signal::SIGHUP));
}

#[test]
fn a_broken_stdout_ends_it() {
    ends(End::BrokenStdout);
}

#[test]
fn open_requests_are_answered_after_the_end_of_stdin() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    let slow = client.send_call("sleep", json!({"ms": 300}));
    client.close_stdin();
    assert_eq!(super::client::text(&client.answer(slow)["result"]), "slept");
    client.end();
}

#[test]
fn a_call_that_exceeds_the_grace_gets_an_error() {
    let place = Place::new();
    let mut client = Setup::new(&place).hasty().ready();
    let stuck = client.send_call("sleep", json!({"ms": 600_000}));
    client.close_stdin();
    let answer = client.answer(stuck);
    assert_eq!(super::client::failure(&answer["result"])["reason"], "stopping", "{answer}");
    client.end();
}

#[test]
fn a_second_signal_ends_outlast_at_once() {
    let place = Place::new();
    let patient = ["--stdin-grace", "60", "--term-grace", "60"];
    let mut client = Setup::new(&place).options(patient).puppet(STUBBORN).ready();
    grandchild(&mut client);
    let begun = Instant::now();
    signal(client.pid(), Signal::SIGTERM);
    client.says("SIGTERM received");
    signal(client.pid(), Signal::SIGINT);
    assert_eq!(client.wait().code(), Some(0));
    assert!(begun.elapsed() < Duration::from_secs(1) + BUSY, "{:?}", begun.elapsed());
    assert_eq!(place.family(), [0; 0]);
}

#[test]
fn a_kill_of_outlast_leaves_no_process_behind() {
    let place = Place::new();
    let mut client = Setup::new(&place).puppet(STUBBORN).ready();
    let keeper = client.keeper();
    grandchild(&mut client);
    grandchild(&mut client);
    assert_eq!(place.family().len(), 3);
    let begun = Instant::now();
    signal(client.pid(), Signal::SIGKILL);
    place.is_swept();
    assert!(begun.elapsed() < Duration::from_secs(4) + BUSY, "{:?}", begun.elapsed());
    until("the end of the keeper", || (!is_alive(keeper)).then_some(()));
}

#[test]
fn a_kill_of_the_whole_group_misses_the_keeper() {
    let place = Place::new();
    let mut client = Setup::new(&place).own_group().puppet(STUBBORN).ready();
    let keeper = client.keeper();
    grandchild(&mut client);
    let begun = Instant::now();
    killpg(Pid::from_raw(i32::try_from(client.pid()).expect("a pid")), Signal::SIGKILL).expect("it runs");
    place.is_swept();
    assert!(begun.elapsed() < Duration::from_secs(4) + BUSY, "{:?}", begun.elapsed());
    until("the end of the keeper", || (!is_alive(keeper)).then_some(()));
}

#[test]
fn a_running_build_is_stopped_too() {
    let place = Place::new();
    let mut client = Setup::new(&place).hasty().options(["--build", "touch begun; sleep 600 & sleep 600"]).ready();
    client.send_call("restart_server", json!({}));
    until("the build", || place.path().join("begun").exists().then_some(()));
    let begun = Instant::now();
    client.end();
    assert!(begun.elapsed() < ENDS_WITHIN + BUSY, "{:?}", begun.elapsed());
    assert_eq!(place.family(), [0; 0]);
}

/// Some clients use sockets, one for each direction or one for both.
mod sockets {
    use std::{
        io::{BufRead, BufReader, Write},
        net::Shutdown,
        os::{fd::OwnedFd, unix::net::UnixStream},
        process::{Child, Command, Stdio},
    };

    use serde_json::Value;

    use super::super::client::{INITIALIZED, OUTLAST, PATIENCE, PUPPET, Place, VERSION, initialize_params, until};
    use super::*;

    fn start(place: &Place, stdin: OwnedFd, stdout: OwnedFd) -> Child {
        Command::new(OUTLAST)
            .args(["mcp", "--", PUPPET])
            .current_dir(place.path())
            .env("HOME", place.path())
            .stdin(Stdio::from(stdin))
            .stdout(Stdio::from(stdout))
            .stderr(Stdio::null())
            .spawn()
            .expect("the program starts")
    }

    fn say(socket: &mut UnixStream, message: &Value) {
        writeln!(socket, "{message}").expect("the program listens");
    }

    fn hear(socket: &mut BufReader<UnixStream>) -> Value {
        let mut line = String::new();
        socket.read_line(&mut line).expect("an answer comes in time");
        serde_json::from_str(&line).unwrap_or_else(|_| panic!("not a message: {line:?}"))
    }

    fn ask(id: u32, method: &str, params: Value) -> Value {
        json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
    }

    fn ends_with_0(place: &Place, mut child: Child) {
        let status = until("the end of the program", || child.try_wait().expect("our child"));
        assert_eq!(status.code(), Some(0));
        assert_eq!(place.family(), [0; 0]);
    }

    #[test]
    fn a_socket_for_each_direction_works() {
        let place = Place::new();
        let (mut to, stdin) = UnixStream::pair().expect("sockets");
        let (from, stdout) = UnixStream::pair().expect("sockets");
        from.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let mut from = BufReader::new(from);
        let child = start(&place, stdin.into(), stdout.into());
        say(&mut to, &ask(1, "initialize", initialize_params(VERSION)));
        assert_eq!(hear(&mut from)["result"]["protocolVersion"], VERSION);
        writeln!(to, "{INITIALIZED}").expect("the program listens");
        // No message is in transit that could fail.
        drop(from);
        ends_with_0(&place, child);
    }

    #[test]
    fn a_socket_for_both_directions_works_with_a_half_close() {
        let place = Place::new();
        let (mut socket, theirs) = UnixStream::pair().expect("sockets");
        socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let mut from = BufReader::new(socket.try_clone().expect("a socket"));
        let child = start(&place, theirs.try_clone().expect("a socket").into(), theirs.into());
        say(&mut socket, &ask(1, "initialize", initialize_params(VERSION)));
        assert_eq!(hear(&mut from)["id"], 1);
        writeln!(socket, "{INITIALIZED}").expect("the program listens");
        say(&mut socket, &ask(2, "tools/call", json!({"name": "sleep", "arguments": {"ms": 300}})));
        socket.shutdown(Shutdown::Write).expect("a socket");
        let answer = hear(&mut from);
        assert_eq!(answer["result"]["content"][0]["text"], "slept", "it is still listened to: {answer}");
        ends_with_0(&place, child);
    }
}
