//! Tests of `ChildProcesses` with real processes. The program under test is `examples/keep.rs`: the keeper must be
//! forked before any thread starts, and a test harness has threads.
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

/// Far more than any step needs, so that a slow machine does not fail.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn the_exit_of_a_child_is_reported() {
    let mut keep = Keep::begin();
    let table = [
        ("exit 0", "code 0"),
        ("exit 42", "code 42"),
        ("exit 255", "code 255"),
        ("kill -9 $$", "signal 9"),
        ("kill -15 $$", "signal 15"),
        // The default action of SIGPIPE, which outlast itself ignores.
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

/// As in a background command of a shell script.
#[test]
fn a_child_gets_sigint_even_if_outlast_was_started_without() {
    let mut keep = Keep::start(|command| {
        let mut shell = Command::new("sh");
        shell.args(["-c", "trap '' INT QUIT; exec \"$0\""]).arg(command.get_program());
        shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        *command = shell;
    });
    for (key, (words, ending)) in
        [("kill -2 $$; exit 1", "signal 2"), ("kill -3 $$; exit 1", "signal 3")].iter().enumerate()
    {
        keep.tell(&format!("spawn {key} piped {words}"));
        assert_eq!(keep.hear(&format!("exited {key}")), *ending, "{words}");
    }
}

#[test]
fn stdin_and_stdout_of_a_child_are_connected() {
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
fn a_build_writes_to_one_pipe_and_has_no_input() {
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
fn a_failed_start_names_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("plain"), "#!/bin/sh\n").unwrap();
    script(&path("lost"), "#!/no/such/interpreter -x\n");
    fs::create_dir(path("folder")).unwrap();
    let mut keep = Keep::begin();
    let table = [
        ("no-such-program-anywhere".into(), "/".into(), "NotFound: no program named `no-such-program-anywhere`".into()),
        (path("absent"), "/".into(), format!("NotFound: no program named `{}`", path("absent"))),
        (path("plain"), "/".into(), format!("PermissionDenied: `{}` exists, but is not executable", path("plain"))),
        (path("folder"), "/".into(), format!("PermissionDenied: `{}` is a directory", path("folder"))),
        (
            path("lost"),
            "/".into(),
            format!("NotFound: `{}` exists, but its interpreter `/no/such/interpreter` does not", path("lost")),
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
fn large_requests_arrive_complete() {
    let mut keep = Keep::begin();
    // A megabyte of arguments and environment, more than the socket buffer holds.
    keep.tell("big 1 5");
    assert_eq!(keep.hear("out 1"), "5 100000");
    assert_eq!(keep.hear("exited 1"), "code 0");
    // More than the kernel allows for one process.
    keep.tell("big 2 100");
    assert!(keep.hear("failed 2").starts_with("ArgumentListTooLong"));
}

#[test]
fn a_child_has_three_descriptors() {
    // A descriptor that the parent of outlast forgot to close.
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
fn an_exit_is_reported_while_a_grandchild_holds_the_pipe() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 piped sleep 1000 & exit 7");
    assert_eq!(keep.hear("exited 1"), "code 7");
    keep.tell("sweep 1");
    // Only the sweep closes the pipe.
    keep.hear("out-end 1");
    keep.hear("swept 1");
    assert_eq!(keep.tagged(1), []);
}

#[test]
fn a_sweep_finds_processes_that_left_the_group() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 piped (setsid setsid sh -c 'echo in; exec sleep 1000' &) ; setsid sleep 1000 & read line");
    keep.tell("spawn 2 piped setsid sleep 1000 & echo in; wait");
    keep.hear("out 1");
    keep.hear("out 2");
    keep.tell("hush 1");
    keep.hear("exited 1");
    // A process that is just leaving its group counts twice for a moment.
    keep.wait_for("two of each to be there", |keep| keep.tagged(1).len() == 2 && keep.tagged(2).len() == 2);
    keep.tell("sweep 1");
    keep.hear("swept 1");
    assert_eq!(keep.tagged(1), []);
    assert_eq!(keep.tagged(2).len(), 2, "the other family is left alone");
    // Without its tag the process is still found by its ancestors.
    keep.tell("spawn 3 piped env -i setsid env -i sh -c 'echo $$; exec sleep 1000' & wait");
    let stray: i32 = keep.hear("out 3").parse().unwrap();
    keep.tell("kill 3");
    assert_eq!(keep.hear("exited 3"), "signal 9");
    keep.wait_for("the stray to go", |_| !is_alive(stray));
    keep.tell("sweep 3");
    keep.hear("swept 3");
    // An orphan without a tag is found too, if no other child is left that could have started it.
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
fn a_signal_reaches_the_child_and_its_descendants() {
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
fn a_suspended_child_receives_the_stop_signal() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 piped kill -STOP $$");
    let pid = keep.hear_started(1);
    keep.wait_for("it to stop", |_| state_of(pid) == Some('T'));
    keep.tell("term 1");
    assert_eq!(keep.hear("exited 1"), "signal 15");
}

#[test]
fn a_child_that_ignores_sigterm_is_killed_and_a_signal_after_its_exit_is_no_error() {
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
fn no_process_remains_when_outlast_is_killed() {
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
fn processes_that_exit_on_sigterm_cause_no_delay() {
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

/// Asserts that `act` takes less than the grace period of processes that ignore SIGTERM (a second). A busy machine
/// has several attempts.
fn is_done_at_once(act: impl Fn() -> Duration) {
    assert!((0..20).any(|_| act() < Duration::from_millis(900)), "it takes as long as for the deaf, always");
}

#[test]
fn a_keeper_without_children_exits_at_once() {
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
fn the_keeper_ignores_signals_and_holds_no_descriptor_of_the_client() {
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

/// Starts a child with a descendant in its own session, which has cleared its environment. Returns both process ids.
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
fn a_killed_or_stopped_monitor_ends_only_its_own_child() {
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
fn a_killed_or_stopped_keeper_is_replaced_and_no_child_ends() {
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
        // A monitor whose keeper is gone is still supervised, whether it is killed or stopped.
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
fn a_child_that_kills_monitor_and_keeper_leaves_no_process_and_ends_no_other_child() {
    for signal in ["KILL", "STOP"] {
        let mut keep = Keep::begin();
        keep.tell("spawn 2 piped exec cat");
        let other = keep.hear_started(2);
        let keeper = keeper_of(other);
        // The child waits for a line and then signals its monitor and the keeper, but not outlast.
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
fn keepers_killed_in_turn_are_replaced_when_a_child_is_started() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 piped exec cat");
    let first = keep.hear_started(1);
    send(keeper_of(first), Signal::SIGKILL);
    keep.hear("noticed the keeper process was killed or stopped; a new one was started");
    let monitor = parent_of(first);
    let keepers = |keep: &Keep| children_of(keep.pid()).into_iter().filter(|pid| *pid != monitor).collect::<Vec<_>>();
    keep.wait_for("the first to be reaped", |keep| keepers(keep).len() == 1);
    send(keepers(&keep)[0], Signal::SIGKILL);
    // The text depends on the timing of this test.
    keep.hear("noticed the keeper process was killed or stopped");
    keep.tell("spawn 2 piped echo new");
    keep.hear("out 2 new");
    keep.tell("say 1 still here");
    keep.hear("out 1 still here");
    keep.tell("close");
    assert_eq!(keep.wait().code(), Some(0));
}

#[test]
fn no_process_remains_when_outlast_is_killed_after_its_keeper() {
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

/// The times in milliseconds that a lease gets in the attempts of a test: a busy machine may need a longer one.
const LEASES: [u32; 4] = [300, 2_000, 10_000, 30_000];

/// A lease that does not end during a test.
const LONG: u32 = 3_600_000;

/// Starts a child with a lease. `None` if the lease ended before that.
fn start_leased(keep: &mut Keep, key: u32, lease: u32, words: &str) -> Option<i32> {
    keep.tell(&format!("lease {key} {lease} {words}"));
    match keep.hear_one_of(&[&format!("started {key} "), &format!("failed {key} ")]) {
        (0, pid) => Some(pid.parse().unwrap()),
        (_, why) => {
            assert!(why.contains("its lease ended"), "{why}");
            None
        }
    }
}

/// The same with two descendants in their own sessions, which have cleared their environment; one of them is an orphan.
/// Returns the process ids, the child's first.
fn start_leased_family(keep: &mut Keep, key: u32, lease: u32) -> Option<[i32; 3]> {
    let stray = "setsid env -i sh -c 'echo $$ >&3; exec sleep 1000' 3>&1 &";
    let words = format!("{stray} ({stray}) ; trap '' TERM; while :; do sleep 0.01; done");
    let child = start_leased(keep, key, lease, &words)?;
    let mut stray = || match keep.hear_one_of(&[&format!("out {key} "), &format!("out-end {key}")]) {
        (0, pid) => Some(pid.parse().unwrap()),
        _ => None,
    };
    Some([child, stray()?, stray()?])
}

#[test]
fn all_processes_of_a_child_are_killed_at_the_end_of_its_lease() {
    let mut keep = Keep::begin();
    keep.tell("spawn 2 piped exec cat");
    let other = keep.hear_started(2);
    let family = LEASES.into_iter().zip(10..).find_map(|(lease, key)| {
        let family = start_leased_family(&mut keep, key, lease)?;
        Some((key, family))
    });
    let (key, family) = family.expect("a lease that ends after the processes have started");
    keep.hear(&format!("lease-ended {key}"));
    assert_eq!(keep.hear(&format!("exited {key}")), "signal 9");
    for pid in family {
        keep.wait_for("all to be killed, without a sweep", |_| !is_alive(pid));
    }
    keep.tell(&format!("extend {key} {LONG}"));
    keep.tell(&format!("sweep {key}"));
    keep.hear(&format!("swept {key}"));
    keep.tell("say 2 still here");
    keep.hear("out 2 still here");
    assert!(is_alive(other), "a child without a lease");
}

#[test]
fn a_lease_ends_while_outlast_and_the_keeper_are_stopped() {
    for lease in LEASES {
        let mut keep = Keep::begin();
        let Some(family) = start_leased_family(&mut keep, 1, lease) else { continue };
        let keeper = keeper_of(family[0]);
        for pid in [keep.pid(), keeper] {
            send(pid, Signal::SIGSTOP);
            keep.wait_for("it to stop", |_| state_of(pid) == Some('T'));
        }
        // Outlast reads this too late.
        keep.tell(&format!("extend 1 {LONG}"));
        if !is_alive(family[0]) {
            continue;
        }
        for pid in family {
            keep.wait_for("all to be killed", |_| !is_alive(pid));
        }
        assert_eq!([keep.pid(), keeper].map(state_of), [Some('T'); 2], "they did not take part");
        send(keep.pid(), Signal::SIGCONT);
        keep.hear("lease-ended 1");
        assert_eq!(keep.hear("exited 1"), "signal 9");
        keep.tell("sweep 1");
        keep.hear("swept 1");
        return;
    }
    panic!("the lease always ended before outlast was stopped");
}

#[test]
fn an_extended_lease_ends_later_and_never_earlier() {
    for lease in LEASES {
        let mut keep = Keep::begin();
        let Some(child) = start_leased(&mut keep, 1, lease, "exec cat") else { continue };
        keep.tell(&format!("extend 1 {LONG}"));
        // Its end is later than the first one of the other child.
        let Some(_) = start_leased(&mut keep, 2, lease, "exec cat") else { continue };
        keep.hear("exited 2 signal 9");
        if keep.passed.iter().any(|line| line == "lease-ended 1") {
            continue;
        }
        assert!(is_alive(child));
        keep.tell("extend 1 1");
        let Some(_) = start_leased(&mut keep, 3, lease, "exec cat") else { continue };
        keep.hear("exited 3 signal 9");
        keep.tell("say 1 still here");
        keep.hear("out 1 still here");
        // A child without a lease does not get one.
        keep.tell("spawn 4 piped exec cat");
        keep.tell("extend 4 1");
        let Some(_) = start_leased(&mut keep, 5, lease, "exec cat") else { continue };
        keep.hear("exited 5 signal 9");
        keep.tell("say 4 still here");
        keep.hear("out 4 still here");
        return;
    }
    panic!("the lease always ended before it was extended");
}

#[test]
fn a_lease_that_has_ended_starts_no_child() {
    let mut keep = Keep::begin();
    keep.tell("lease 1 0 echo started");
    assert_eq!(keep.hear("failed 1"), "Other: its lease ended before it was started");
}

#[test]
fn the_end_of_a_lease_kills_the_descendants_of_an_exited_child_too() {
    for lease in LEASES {
        let mut keep = Keep::begin();
        let words = "setsid env -i sh -c 'echo $$ >&3; exec sleep 1000' 3>&1 & read go; exit 7";
        let Some(_) = start_leased(&mut keep, 1, lease, words) else { continue };
        let (0, stray) = keep.hear_one_of(&["out 1", "out-end 1"]) else { continue };
        let stray: i32 = stray.parse().unwrap();
        keep.tell("say 1 go");
        if keep.hear("exited 1") != "code 7" {
            continue;
        }
        keep.wait_for("the stray to be killed, without a sweep", |_| !is_alive(stray));
        keep.tell("sweep 1");
        keep.hear("swept 1");
        let is_reported = keep.passed.iter().any(|line| line.starts_with("lease-ended"));
        assert!(!is_reported, "its own exit is the one that counts");
        return;
    }
    panic!("the lease always ended before the child");
}

#[test]
fn a_lease_is_kept_and_extended_by_the_next_program() {
    for lease in LEASES {
        let mut keep = Keep::begin();
        let Some(first) = start_leased(&mut keep, 1, lease, "exec sleep 1000") else { continue };
        let Some(second) = start_leased(&mut keep, 2, lease, "exec sleep 1000") else { continue };
        keep.tell("become");
        // It cannot be done while an exit is being reported.
        let (0, _) = keep.hear_one_of(&["became", "error become"]) else { continue };
        keep.tell(&format!("extend 1 {LONG}"));
        let Some(_) = start_leased(&mut keep, 3, lease, "exec sleep 1000") else { continue };
        keep.hear("lease-ended 2");
        assert_eq!(keep.hear("exited 2"), "signal 9");
        keep.hear("exited 3 signal 9");
        if keep.passed.iter().any(|line| line == "lease-ended 1") {
            continue;
        }
        assert!(is_alive(first) && !is_alive(second));
        return;
    }
    panic!("the lease always ended before it was extended");
}

#[test]
fn a_keeper_without_leases_is_replaced_when_one_is_needed() {
    let mut keep = Keep::begin();
    keep.tell("spawn 1 piped exec sleep 1000");
    let first = keep.hear_started(1);
    let keeper = keeper_of(first);
    keep.tell("become 1");
    keep.hear("became");
    keep.tell("spawn 2 piped cat; exec sleep 1000");
    let second = keep.hear_started(2);
    assert_eq!(keeper_of(second), keeper, "it serves children without a lease");
    keep.tell("extend 1 1");
    keep.tell(&format!("lease 3 {LONG} cat; exec sleep 1000"));
    let third = keep.hear_started(3);
    assert_ne!(keeper_of(third), keeper);
    keep.wait_for("the old keeper to be reaped", |_| state_of(keeper).is_none());
    for key in [2, 3] {
        keep.tell(&format!("say {key} still here"));
        keep.hear(&format!("out {key} still here"));
    }
    assert!(is_alive(second));
    keep.tell("kill 1");
    keep.hear("exited 1 signal 9");
    keep.tell("sweep 1");
    keep.hear("swept 1");
    // The next program takes over monitors of both versions.
    keep.tell("become");
    keep.hear("became");
    keep.tell("kill 2");
    keep.hear("exited 2 signal 9");
    assert!(is_alive(third));
    keep.tell("close");
    assert_eq!(keep.wait().code(), Some(0));
    assert!(!is_alive(third));
}

#[test]
fn a_keeper_of_an_unknown_version_is_refused() {
    for version in [0, 3] {
        let mut keep = Keep::begin();
        keep.tell("spawn 1 piped exec cat");
        let child = keep.hear_started(1);
        keep.tell(&format!("become {version}"));
        let words = format!("the running keeper uses version {version} of its protocol, and this program version 2");
        assert_eq!(keep.hear("refused"), words);
        assert_eq!(keep.wait().code(), Some(1));
        keep.wait_for("the child to go", |_| !is_alive(child));
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
fn output_goes_to_any_kind_of_stdout() {
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
        // A megabyte, more than a pipe or socket accepts at once.
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
fn a_socket_may_be_all_three_streams_and_keeps_its_flags() {
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
fn a_borrowed_pipe_keeps_its_flags() {
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
fn an_unread_stderr_does_not_block_outlast() {
    let (read, write) = pipe();
    let mut keep = Keep::start(|command| _ = command.stderr(write));
    // Far more than a pipe holds, and each line is longer than one write.
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

/// The program under test, its output lines, and its exit.
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
        self.hear_one_of(&[start]).1
    }

    /// Waits for a line with one of these starts. Returns the index of the start, and the rest of the line.
    fn hear_one_of(&mut self, starts: &[&str]) -> (usize, String) {
        let rest = |line: &String| {
            let matching = |(at, start): (usize, &&str)| Some((at, line.strip_prefix(*start)?.trim_start().to_owned()));
            starts.iter().enumerate().find_map(matching)
        };
        if let Some(at) = self.passed.iter().position(|line| rest(line).is_some()) {
            return rest(&self.passed.remove(at)).unwrap();
        }
        loop {
            match self.lines.as_ref().unwrap().recv_timeout(PATIENCE) {
                Ok(line) => match rest(&line) {
                    Some(rest) => return rest,
                    None => self.passed.push(line),
                },
                Err(error) => panic!("no `{}` ({error}), but: {:?}", starts.join("` or `"), self.passed),
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
            // Reaps the program if this test has killed it.
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

/// The state and the parent of a process.
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

/// The keeper of a child: the parent of its monitor.
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
