//! The household against real processes. The program under test is `examples/keep.rs`: the keeper must be
//! forked before any thread, and a test harness has threads.
#![cfg(target_os = "linux")]

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream, unix::process::CommandExt, unix::process::ExitStatusExt},
    path::PathBuf,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::{
        atomic::{AtomicU32, Ordering},
        mpsc::{Receiver, channel},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill, killpg},
    unistd::Pid,
};

/// Far more than anything here takes, so that a slow machine is no failure.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn how_a_child_ends_is_reported() {
    let mut keep = Keep::begin();
    let table = [
        ("exit 0", "code 0"),
        ("exit 42", "code 42"),
        ("exit 255", "code 255"),
        ("kill -9 $$", "signal 9"),
        ("kill -15 $$", "signal 15"),
        // The default action of SIGPIPE, which we ourselves ignore.
        ("kill -13 $$; exit 1", "signal 13"),
        ("kill -2 $$; exit 1", "signal 2"),
        ("kill -1 $$; exit 1", "signal 1"),
    ];
    for (key, (words, ending)) in table.iter().enumerate() {
        keep.tell(&format!("spawn {key} piped {words}"));
        keep.hear(&format!("started {key}"));
        assert_eq!(keep.hear(&format!("exited {key}")), *ending, "{words}");
        keep.tell(&format!("sweep {key}"));
        keep.hear(&format!("swept {key}"));
    }
}

#[test]
fn a_child_hears_and_is_heard() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 piped while read line; do echo got $line; done; echo over >&2");
    keep.tell("say 1 one two");
    assert_eq!(keep.hear("out 1"), "got one two");
    keep.tell("hush 1");
    assert_eq!(keep.hear("err 1"), "over");
    keep.hear("out-end 1");
    keep.hear("err-end 1");
    assert_eq!(keep.hear("exited 1"), "code 0");
}

#[test]
fn a_build_speaks_through_one_pipe_and_hears_nothing() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 build cat; echo one; echo two >&2; echo three");
    let said = [keep.hear("err 1"), keep.hear("err 1"), keep.hear("err 1")];
    assert_eq!(said, ["one", "two", "three"]);
    assert_eq!(keep.hear("exited 1"), "code 0");
}

#[test]
fn an_inheriting_child_has_our_own_streams() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 inherit echo straight through");
    keep.hear("straight through");
    assert_eq!(keep.hear("exited 1"), "code 0");
}

#[test]
fn what_cannot_be_started_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("plain"), "#!/bin/sh\n").unwrap();
    script(&path("lost"), "#!/no/such/interpreter -x\n");
    fs::create_dir(path("folder")).unwrap();
    let mut keep = Keep::begin();
    let table = [
        ("no-such-program-anywhere".into(), "/".into(), "NotFound: no program named `no-such-program-anywhere`".into()),
        (path("absent"), "/".into(), format!("NotFound: no program named `{}`", path("absent"))),
        (path("plain"), "/".into(), format!("PermissionDenied: `{}` is there, but not executable", path("plain"))),
        (path("folder"), "/".into(), format!("PermissionDenied: `{}` is a directory", path("folder"))),
        (
            path("lost"),
            "/".into(),
            format!("NotFound: `{}` is there, but its interpreter `/no/such/interpreter` is not", path("lost")),
        ),
        ("sh".into(), path("gone"), format!("NotADirectory: the working directory `{}` does not exist", path("gone"))),
        ("sh".into(), path("plain"), format!("NotADirectory: the working directory `{}` is a file", path("plain"))),
    ];
    for (key, (program, cwd, words)) in table.iter().enumerate() {
        keep.tell(&format!("exec {key} {program} {cwd}"));
        assert_eq!(keep.hear(&format!("failed {key}")), *words);
    }
}

#[test]
fn a_relative_program_is_looked_for_in_its_working_directory() {
    let folder = tempfile::tempdir().unwrap();
    script(&folder.path().join("server").display().to_string(), "#!/bin/sh\npwd\n");
    let mut keep = Keep::begin();
    keep.tell(&format!("exec 1 ./server {}", folder.path().display()));
    assert_eq!(keep.hear("out 1"), folder.path().canonicalize().unwrap().display().to_string());
}

#[test]
fn big_orders_arrive_whole() {
    let mut keep = Keep::begin();
    // A megabyte of arguments and environment, which is more than the socket holds.
    keep.tell("big 1 5");
    assert_eq!(keep.hear("out 1"), "5 100000");
    assert_eq!(keep.hear("exited 1"), "code 0");
    // More than the kernel allows for one process.
    keep.tell("big 2 100");
    assert!(keep.hear("failed 2").starts_with("ArgumentListTooLong"));
}

#[test]
fn a_child_has_three_descriptors() {
    // Ours is one that whoever started us forgot to close.
    let leak = File::open("/dev/null").unwrap();
    nix::fcntl::fcntl(&leak, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    let mut keep = Keep::begin();
    drop(leak);
    keep.tell("spawn 1 piped sleep 1000");
    keep.hear("started 1");
    let look = "for fd in $(seq 0 99); do test -e /proc/$$/fd/$fd && printf '%s ' $fd; done; echo";
    keep.tell(&format!("spawn 2 piped {look}"));
    assert_eq!(keep.hear("out 2"), "0 1 2 ");
}

#[test]
fn many_children_leave_no_descriptors() {
    let mut keep = Keep::begin();
    let one = |keep: &mut Keep, key: u32| {
        keep.tell(&format!("spawn {key} piped :"));
        let pid = keep.hear_started(key);
        keep.hear(&format!("exited {key}"));
        keep.tell(&format!("sweep {key}"));
        keep.hear(&format!("swept {key}"));
        pid
    };
    keep.tell("spawn 0 piped sleep 1000");
    let keeper = keeper_of(keep.hear_started(0));
    one(&mut keep, 1);
    let open = |pid: i32| fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let is_settled = move |_: &Keep| children_of(keeper).len() == 1;
    keep.wait_for("one monitor alone, zombies reaped", is_settled);
    let before = (open(keep.pid()), open(keeper));
    for key in 2..=200 {
        one(&mut keep, key);
    }
    keep.wait_for("one monitor alone, zombies reaped", is_settled);
    assert_eq!((open(keep.pid()), open(keeper)), before);
}

#[test]
fn an_exit_is_heard_while_a_grandchild_holds_the_pipe() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 piped sleep 1000 & exit 7");
    assert_eq!(keep.hear("exited 1"), "code 7");
    keep.tell("sweep 1");
    // The sweep, and nothing else, closes the pipe.
    keep.hear("out-end 1");
    keep.hear("swept 1");
    assert_eq!(keep.tagged(1), []);
}

#[test]
fn a_sweep_finds_those_who_left_the_group() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 piped (setsid setsid sh -c 'echo in; exec sleep 1000' &) ; setsid sleep 1000 & read line");
    keep.tell("spawn 2 piped setsid sleep 1000 & echo in; wait");
    keep.hear("out 1");
    keep.hear("out 2");
    keep.tell("hush 1");
    keep.hear("exited 1");
    // One that is on its way out of its group counts twice for a moment.
    keep.wait_for("two of each to be there", |keep| keep.tagged(1).len() == 2 && keep.tagged(2).len() == 2);
    keep.tell("sweep 1");
    keep.hear("swept 1");
    assert_eq!(keep.tagged(1), []);
    assert_eq!(keep.tagged(2).len(), 2, "the other family is left alone");
    // Without its tag it is still known by its descent.
    keep.tell("spawn 3 piped env -i setsid env -i sh -c 'echo $$; exec sleep 1000' & wait");
    let stray: i32 = keep.hear("out 3").parse().unwrap();
    keep.tell("kill 3");
    assert_eq!(keep.hear("exited 3"), "signal 9");
    keep.wait_for("the stray to go", |_| !is_alive(stray));
    keep.tell("sweep 3");
    keep.hear("swept 3");
    // And as an orphan too, when there is nobody else whose it could be.
    keep.tell("kill 2");
    keep.hear("exited 2");
    keep.tell("sweep 2");
    keep.hear("swept 2");
    keep.tell("spawn 4 piped env -i setsid env -i sh -c 'echo $$; exec sleep 1000' & exit");
    let stray: i32 = keep.hear("out 4").parse().unwrap();
    keep.hear("exited 4");
    assert!(is_alive(stray));
    keep.tell("sweep 4");
    keep.hear("swept 4");
    assert!(!is_alive(stray));
}

#[test]
fn a_signal_reaches_the_whole_family() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 piped trap 'echo leader; exit 3' TERM; setsid sh -c 'trap \"echo stray; exit\" TERM; echo in; while :; do sleep 0.01; done' & while :; do sleep 0.01; done");
    keep.hear("out 1 in");
    keep.tell("term 1");
    let mut said = [keep.hear("out 1"), keep.hear("out 1")];
    said.sort();
    assert_eq!(said, ["leader", "stray"]);
    assert_eq!(keep.hear("exited 1"), "code 3");
}

#[test]
fn a_stopped_child_hears_that_it_should_end() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 piped kill -STOP $$");
    let pid = keep.hear_started(1);
    keep.wait_for("it to stop", |_| state_of(pid) == Some('T'));
    keep.tell("term 1");
    assert_eq!(keep.hear("exited 1"), "signal 15");
}

#[test]
fn a_deaf_child_can_be_killed_and_a_gone_one_signalled() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 piped trap '' TERM; echo in; while :; do sleep 0.01; done");
    keep.hear("out 1 in");
    keep.tell("term 1");
    keep.tell("kill 1");
    assert_eq!(keep.hear("exited 1"), "signal 9");
    keep.tell("term 1");
    keep.tell("sweep 1");
    keep.hear("swept 1");
    keep.tell("kill 1");
    keep.tell("sweep 1");
    keep.hear("swept 1");
}

#[test]
fn nothing_stays_when_we_are_killed() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 piped trap '' TERM HUP; setsid sh -c 'trap \"\" TERM; echo in; while :; do sleep 0.1; done' & while :; do sleep 0.1; done");
    keep.tell("spawn 2 piped env -i setsid sleep 1000 & echo in; exec sleep 1000");
    keep.tell("spawn 3 piped sleep 1000 & exit 0");
    keep.hear("out 1");
    keep.hear("out 2");
    keep.hear("exited 3");
    let keeper = keeper_of(keep.hear_started(1));
    let all = descendants_of(keeper);
    assert!(6 < all.len(), "{all:?}");
    let began = Instant::now();
    kill(Pid::from_raw(keep.pid()), Signal::SIGKILL).unwrap();
    keep.wait_for("the keeper to go", |_| !is_alive(keeper));
    assert!(Duration::from_millis(900) < began.elapsed(), "the deaf one has its second");
    assert_eq!(all.into_iter().filter(|&pid| is_alive(pid)).collect::<Vec<_>>(), []);
    assert_eq!([keep.tagged(1), keep.tagged(2), keep.tagged(3)], [[], [], []]);
}

#[test]
fn a_polite_family_is_not_waited_for() {
    is_done_at_once(|| {
        let mut keep = Keep::begin();
        keep.tell("spawn 1 piped setsid sleep 1000 & exec sleep 1000");
        let keeper = keeper_of(keep.hear_started(1));
        keep.wait_for("the stray", |keep| keep.tagged(1).len() == 2);
        let began = Instant::now();
        keep.tell("close");
        assert_eq!(keep.wait().code(), Some(0));
        let took = began.elapsed();
        assert!(!is_alive(keeper), "closing waits for the keeper");
        assert_eq!(keep.tagged(1), []);
        took
    });
}

/// In less than the second that the deaf ones have. A busy machine is given several tries.
fn is_done_at_once(act: impl Fn() -> Duration) {
    assert!((0..20).any(|_| act() < Duration::from_millis(900)), "it takes as long as for the deaf, always");
}

#[test]
fn a_keeper_of_nobody_goes_at_once() {
    is_done_at_once(|| {
        let mut keep = Keep::begin();
        keep.tell("spawn 1 piped :");
        let keeper = keeper_of(keep.hear_started(1));
        keep.hear("exited 1");
        keep.tell("sweep 1");
        keep.hear("swept 1");
        let began = Instant::now();
        kill(Pid::from_raw(keep.pid()), Signal::SIGKILL).unwrap();
        keep.wait_for("the keeper to go", |_| !is_alive(keeper));
        began.elapsed()
    });
}

#[test]
fn a_clients_killpg_misses_the_keeper() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 piped setsid sleep 1000 & exec sleep 1000");
    let keeper = keeper_of(keep.hear_started(1));
    keep.wait_for("the stray", |keep| keep.tagged(1).len() == 2);
    killpg(Pid::from_raw(keep.pid()), Signal::SIGKILL).unwrap();
    assert_eq!(keep.wait().signal(), Some(9));
    keep.wait_for("the keeper to sweep and go", |keep| !is_alive(keeper) && keep.tagged(1).is_empty());
}

#[test]
fn the_keeper_shrugs_at_signals_and_holds_nothing_of_the_client() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 piped cat");
    let keeper = keeper_of(keep.hear_started(1));
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGPIPE] {
        kill(Pid::from_raw(keeper), signal).unwrap();
    }
    keep.tell("say 1 still here");
    assert_eq!(keep.hear("out 1"), "still here");
    assert_eq!(fs::read_to_string(format!("/proc/{keeper}/comm")).unwrap().trim(), "outlast-keeper");
    assert_eq!(fs::read_link(format!("/proc/{keeper}/cwd")).unwrap(), PathBuf::from("/"));
    for stream in 0..3 {
        assert_eq!(fs::read_link(format!("/proc/{keeper}/fd/{stream}")).unwrap(), PathBuf::from("/dev/null"));
    }
}

/// A child with a descendant in a session of its own, which has cleared its environment. Both process ids.
fn start_with_stray(keep: &mut Keep, key: u32) -> (i32, i32) {
    keep.tell(&format!("spawn {key} piped setsid env -i sh -c 'echo $$ >&3; exec sleep 1000' 3>&1 & exec sleep 1000"));
    let child = keep.hear_started(key);
    let stray = keep.hear(&format!("out {key} ")).parse().unwrap();
    (child, stray)
}

fn send(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap();
}

#[test]
fn a_monitor_that_is_killed_or_stopped_costs_its_own_child_and_no_other() {
    for signal in [Signal::SIGKILL, Signal::SIGSTOP] {
        let mut keep = Keep::begin();
        keep.tell("spawn 2 piped exec cat");
        let other = keep.hear_started(2);
        let (child, stray) = start_with_stray(&mut keep, 1);
        send(parent_of(child), signal);
        keep.hear(&format!("noticed the monitor of process {child} was killed or stopped"));
        keep.hear("exited 1 signal 9");
        keep.tell("sweep 1");
        keep.hear("swept 1");
        assert!(!is_alive(child) && !is_alive(stray), "{signal}: swept is swept");
        keep.tell("say 2 still here");
        keep.hear("out 2 still here");
        assert!(is_alive(other));
        keep.tell("spawn 1 piped echo again");
        keep.hear("out 1 again");
        keep.tell("close");
        assert_eq!(keep.wait().code(), Some(0));
    }
}

#[test]
fn a_keeper_that_is_killed_or_stopped_is_replaced_and_costs_no_child() {
    for signal in [Signal::SIGKILL, Signal::SIGSTOP] {
        let mut keep = Keep::begin();
        keep.tell("spawn 1 piped exec cat");
        let first = keep.hear_started(1);
        let keeper = keeper_of(first);
        send(keeper, signal);
        keep.hear("noticed the keeper process was killed or stopped; a new one was started");
        keep.wait_for("the keeper to be reaped", |_| state_of(keeper).is_none());
        keep.tell("say 1 still here");
        keep.hear("out 1 still here");
        keep.tell("spawn 2 piped exec cat");
        let second = keep.hear_started(2);
        let new = keeper_of(second);
        assert_ne!(new, keeper);
        assert_eq!(fs::read_to_string(format!("/proc/{new}/comm")).unwrap().trim(), "outlast-keeper");
        assert_eq!(parent_of(parent_of(first)), keep.pid(), "orphaned monitors come to us");
        // A monitor whose keeper is gone is still watched, and both ends of it are still noticed.
        send(parent_of(first), signal);
        keep.hear("exited 1 signal 9");
        keep.tell("sweep 1");
        keep.hear("swept 1");
        keep.tell("kill 2");
        keep.hear("exited 2 signal 9");
        keep.tell("close");
        assert_eq!(keep.wait().code(), Some(0));
        assert!(!is_alive(new), "closing waits for the keeper");
    }
}

#[test]
fn a_child_that_kills_monitor_and_keeper_leaves_nothing_and_costs_no_other() {
    for signal in ["KILL", "STOP"] {
        let mut keep = Keep::begin();
        keep.tell("spawn 2 piped exec cat");
        let other = keep.hear_started(2);
        let keeper = keeper_of(other);
        // The child waits for a line and then signals all its ancestors but the last.
        keep.tell(&format!(
            "spawn 1 piped setsid env -i sh -c 'echo $$ >&3; exec sleep 1000' 3>&1 & read go; kill -{signal} {keeper} $PPID; exec sleep 1000"
        ));
        let child = keep.hear_started(1);
        let stray: i32 = keep.hear("out 1 ").parse().unwrap();
        keep.tell("say 1 go");
        keep.hear("exited 1 signal 9");
        keep.tell("sweep 1");
        keep.hear("swept 1");
        assert!(!is_alive(child) && !is_alive(stray), "{signal}: swept is swept");
        keep.tell("say 2 still here");
        keep.hear("out 2 still here");
        keep.tell("spawn 3 piped echo new");
        keep.hear("out 3 new");
        let noticed = keep.passed.iter().filter(|line| line.starts_with("noticed the keeper")).count();
        assert_eq!(noticed, 1, "it is replaced once, and not swept: {:?}", keep.passed);
        keep.tell("close");
        assert_eq!(keep.wait().code(), Some(0));
        assert!(!is_alive(other));
    }
}

#[test]
fn keepers_that_are_killed_one_after_the_other_are_replaced_when_one_is_needed() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 piped exec cat");
    let first = keep.hear_started(1);
    send(keeper_of(first), Signal::SIGKILL);
    keep.hear("noticed the keeper process was killed or stopped; a new one was started");
    let monitor = parent_of(first);
    let keepers = |keep: &Keep| children_of(keep.pid()).into_iter().filter(|pid| *pid != monitor).collect::<Vec<_>>();
    keep.wait_for("the first to be reaped", |keep| keepers(keep).len() == 1);
    send(keepers(&keep)[0], Signal::SIGKILL);
    // Which of the two is said depends on how quick we were.
    keep.hear("noticed the keeper process was killed or stopped");
    keep.tell("spawn 2 piped echo new");
    keep.hear("out 2 new");
    keep.tell("say 1 still here");
    keep.hear("out 1 still here");
    keep.tell("close");
    assert_eq!(keep.wait().code(), Some(0));
}

#[test]
fn nothing_stays_when_we_are_killed_after_our_keeper() {
    let mut keep = Keep::begin();
    let (child, stray) = start_with_stray(&mut keep, 1);
    send(keeper_of(child), Signal::SIGKILL);
    keep.hear("noticed the keeper process was killed or stopped; a new one was started");
    let (second, second_stray) = start_with_stray(&mut keep, 2);
    send(keep.pid(), Signal::SIGKILL);
    for pid in [child, stray, second, second_stray] {
        keep.wait_for("all to go", |_| !is_alive(pid));
    }
}

#[test]
fn stop_signals_are_named() {
    for (signal, name) in [(Signal::SIGTERM, "SIGTERM"), (Signal::SIGINT, "SIGINT"), (Signal::SIGHUP, "SIGHUP")] {
        let mut keep = Keep::start(|command| _ = command.stderr(Stdio::piped()));
        keep.tell("spawn 1 piped :");
        keep.hear("started 1");
        kill(Pid::from_raw(keep.pid()), signal).unwrap();
        assert_eq!(keep.wait().code(), Some(signal as i32));
        let mut words = String::new();
        keep.process.stderr.take().unwrap().read_to_string(&mut words).unwrap();
        assert_eq!(words, format!("stopped by {name}\n"));
    }
}

#[test]
fn commands_come_from_any_kind_of_stdin() {
    let commands = "spawn 1 piped echo hello\n";
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(commands.as_bytes()).unwrap();
    io::Seek::rewind(&mut file).unwrap();
    let (read, mut write) = pipe();
    write.write_all(commands.as_bytes()).unwrap();
    drop(write);
    let (socket, mut other) = UnixStream::pair().unwrap();
    other.write_all(commands.as_bytes()).unwrap();
    other.shutdown(std::net::Shutdown::Write).unwrap();
    let table: [(&str, Stdio); 3] =
        [("file", file.into()), ("pipe", read.into()), ("socket", OwnedFd::from(socket).into())];
    for (kind, stdin) in table {
        let mut keep = Keep::start(|command| _ = command.stdin(stdin));
        assert_eq!(keep.hear("out 1"), "hello", "{kind}");
        assert_eq!(keep.wait().code(), Some(0), "{kind}");
    }
    let mut keep = Keep::start(|command| _ = command.stdin(Stdio::null()));
    assert_eq!(keep.wait().code(), Some(0), "no commands from /dev/null");
}

#[test]
fn news_goes_to_any_kind_of_stdout() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("news");
    let (socket, mut other) = UnixStream::pair().unwrap();
    let table: [(&str, Stdio); 3] = [
        ("file", File::create(&path).unwrap().into()),
        ("null", OpenOptions::new().write(true).open("/dev/null").unwrap().into()),
        ("socket", OwnedFd::from(socket).into()),
    ];
    for (kind, stdout) in table {
        let mut keep = Keep::start(|command| _ = command.stdout(stdout));
        // A megabyte, which no pipe or socket takes at once.
        keep.tell("spawn 1 piped head -c 1000000 /dev/zero | tr '\\0' x");
        drop(keep.stdin.take());
        let mut words = String::new();
        if kind == "socket" {
            other.set_read_timeout(Some(PATIENCE)).unwrap();
            other.read_to_string(&mut words).unwrap();
        }
        assert_eq!(keep.wait().code(), Some(0), "{kind}");
        if kind == "file" {
            words = fs::read_to_string(&path).unwrap();
        }
        if kind != "null" {
            assert!(words.contains(&format!("out 1 {}\n", "x".repeat(1_000_000))), "{kind}");
            assert!(words.contains("exited 1 code 0\n"), "{kind}: it is all there");
        }
    }
}

#[test]
fn one_socket_may_be_all_three_streams_and_stays_as_it_was() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let all = OwnedFd::from(theirs);
    let kept = all.try_clone().unwrap();
    let mut keep = Keep::start(|command| {
        command.stdin(all.try_clone().unwrap()).stdout(all.try_clone().unwrap()).stderr(all);
    });
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    (&ours).write_all(b"note to whom it may concern\nspawn 1 piped echo hello\n").unwrap();
    let mut lines = BufReader::new(&ours).lines().map(Result::unwrap);
    assert_eq!(lines.next().unwrap(), "to whom it may concern");
    assert!(lines.any(|line| line == "out 1 hello"));
    ours.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(lines.any(|line| line == "swept 1"));
    assert_eq!(keep.wait().code(), Some(0));
    assert!(!is_nonblocking(&kept));
}

#[test]
fn a_borrowed_pipe_is_given_back_as_it_was() {
    let (read, write) = pipe();
    let (kept_read, stdout) = (read.try_clone().unwrap(), write.try_clone().unwrap());
    let (commands, mut tell) = pipe();
    let kept_commands = commands.try_clone().unwrap();
    let mut keep = Keep::start(|command| _ = command.stdin(commands).stdout(stdout));
    tell.write_all(b"spawn 1 piped echo hello\n").unwrap();
    let mut line = String::new();
    let mut news = BufReader::new(kept_read);
    while !line.contains("hello") {
        line.clear();
        news.read_line(&mut line).unwrap();
    }
    assert!(is_nonblocking(&write) && is_nonblocking(&kept_commands));
    drop(tell);
    assert_eq!(keep.wait().code(), Some(0));
    assert!(!is_nonblocking(&write) && !is_nonblocking(&kept_commands));
}

#[test]
fn a_broken_stdout_is_an_error_and_no_signal() {
    let (read, write) = pipe();
    let mut keep = Keep::start(|command| _ = command.stdout(write));
    drop(read);
    keep.tell("spawn 1 piped exec sleep 1000");
    assert_eq!(keep.wait().code(), Some(99));
}

#[test]
fn a_stderr_nobody_reads_does_not_stop_us() {
    let (read, write) = pipe();
    let mut keep = Keep::start(|command| _ = command.stderr(write));
    // Far more than a pipe holds, and each line longer than is written at once.
    let line = format!("note {}", "x".repeat(10_000));
    for _ in 0..50 {
        keep.tell(&line);
    }
    keep.tell("spawn 1 piped :");
    keep.hear("started 1");
    drop(read);
    keep.tell("note into the void");
    keep.tell("spawn 2 piped :");
    keep.hear("started 2");
}

/// The program under test, its lines, and its end.
struct Keep {
    process: Child,
    stdin: Option<ChildStdin>,
    lines: Option<Receiver<String>>,
    /// Lines read while waiting for another one.
    passed: Vec<String>,
    name: String,
}

impl Keep {
    fn begin() -> Keep {
        Keep::start(|_| {})
    }

    fn start(change: impl FnOnce(&mut Command)) -> Keep {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("os-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let program = std::env::current_exe().unwrap().parent().unwrap().join("../examples/keep");
        let mut command = Command::new(program);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0).env("KEEP", &name);
        change(&mut command);
        let mut process = command.spawn().expect("`cargo build --examples` makes the program under test");
        let stdin = process.stdin.take();
        let lines = process.stdout.take().map(|stdout| {
            let (tell, lines) = channel();
            let reading = thread::Builder::new().spawn(move || {
                BufReader::new(stdout).lines().map_while(Result::ok).try_for_each(|line| tell.send(line))
            });
            reading.unwrap();
            lines
        });
        Keep { process, stdin, lines, passed: Vec::new(), name }
    }

    fn pid(&self) -> i32 {
        self.process.id() as i32
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Waits for a line with this start, and returns the rest of it.
    fn hear(&mut self, start: &str) -> String {
        let rest = |line: &String| line.strip_prefix(start).map(|rest| rest.trim_start().to_owned());
        if let Some(at) = self.passed.iter().position(|line| rest(line).is_some()) {
            return rest(&self.passed.remove(at)).unwrap();
        }
        loop {
            match self.lines.as_ref().unwrap().recv_timeout(PATIENCE) {
                Ok(line) => match rest(&line) {
                    Some(rest) => return rest,
                    None => self.passed.push(line),
                },
                Err(error) => panic!("no `{start}` ({error}), but: {:?}", self.passed),
            }
        }
    }

    fn hear_started(&mut self, key: u32) -> i32 {
        self.hear(&format!("started {key} ")).parse().unwrap()
    }

    fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end; passed: {:?}", self.passed);
            thread::yield_now();
        }
    }

    fn wait_for(&mut self, what: &str, is_so: impl Fn(&Keep) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_so(self) {
            // Whatever we killed is a zombie until we look.
            let _ = self.process.try_wait();
            assert!(Instant::now() < deadline, "waited in vain for {what}");
            thread::yield_now();
        }
    }

    /// Living processes with the tag of this child.
    fn tagged(&self, key: u32) -> Vec<i32> {
        let entry = format!("OUTLAST_CHILD={}.{key}", self.name);
        let is_tagged = |pid: &i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            is_alive(*pid) && environment.split(|&byte| byte == 0).any(|found| found == entry.as_bytes())
        };
        all_pids().into_iter().filter(is_tagged).collect()
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn script(path: &str, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn pipe() -> (File, File) {
    let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
    (read.into(), write.into())
}

fn is_nonblocking(fd: &impl std::os::fd::AsFd) -> bool {
    let flags = nix::fcntl::fcntl(fd.as_fd(), nix::fcntl::FcntlArg::F_GETFL).unwrap();
    nix::fcntl::OFlag::from_bits_retain(flags).contains(nix::fcntl::OFlag::O_NONBLOCK)
}

fn all_pids() -> Vec<i32> {
    fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// State and parent.
fn stat_of(pid: i32) -> Option<(char, i32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

fn state_of(pid: i32) -> Option<char> {
    stat_of(pid).map(|(state, _)| state)
}

fn is_alive(pid: i32) -> bool {
    state_of(pid).is_some_and(|state| state != 'Z' && state != 'X')
}

/// Of a child: its parent is its monitor.
fn keeper_of(child: i32) -> i32 {
    parent_of(parent_of(child))
}

fn parent_of(pid: i32) -> i32 {
    stat_of(pid).expect("it has not been reaped").1
}

fn children_of(pid: i32) -> Vec<i32> {
    all_pids().into_iter().filter(|&child| stat_of(child).is_some_and(|(_, parent)| parent == pid)).collect()
}

fn descendants_of(pid: i32) -> Vec<i32> {
    let children = children_of(pid);
    children.iter().flat_map(|&child| descendants_of(child)).chain(children.clone()).collect()
}
