//! The demo as a person runs it, as a separate process.

use std::{
    collections::BTreeMap,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

fn demo(temp: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outlast"));
    command.args(["demo", "--plain"]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // A directory for its files, which also marks its processes.
    for variable in ["TMPDIR", "TMP", "TEMP"] {
        command.env(variable, temp);
    }
    command
}

#[test]
fn every_scene_is_shown_and_nothing_is_lost() {
    let temp = tempfile::tempdir().expect("a directory");
    let output = demo(temp.path()).output().expect("the demo runs");
    let text = String::from_utf8(output.stdout).expect("it writes UTF-8");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    assert!(!text.contains('\x1b'), "plain lines have no escapes:\n{text}");
    assert_eq!(errors, "");

    for words in [
        "`restart_server`: pid ",
        "discount added, price changed",
        "the client got list_changed and listed the tools: price, discount, report",
        "the long call from before was answered by the old server",
        "The restart failed: the new server ended before it was ready (exit code 1).",
        "keeps serving.",
        "error: expected `,` or `}` (server.json:4:22)",
        "was killed with SIGKILL",
        "the long call in flight got the answer “The server ended (signal 9 (SIGKILL)) while `report` was running",
        "the next call was answered by pid ",
        "2 restarts, one connection, ",
    ] {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }

    let rows = table(&text);
    let titles = ["calls flow", "reload, a tool changed", "reload, broken code", "kill -9"];
    let mut sums = [0; 5];
    for title in titles {
        let row = rows[title];
        let [made, answered, failed, lost, _] = row;
        assert!(made > 20, "{title}: calls flow all the time\n{text}");
        assert_eq!(made, answered + failed, "{title}\n{text}");
        assert_eq!(lost, 0, "{title}\n{text}");
        for (sum, number) in sums.iter_mut().zip(row) {
            *sum += number;
        }
        if title != "kill -9" {
            assert_eq!(failed, 0, "{title}: a reload costs no call\n{text}");
        }
    }
    assert_eq!(rows["all"], sums, "{text}");
    let [.., restarts] = sums;
    assert_eq!(restarts, 2, "{text}");

    assert_nothing_is_left(temp.path());
}

/// The numbers of each row: calls, answered, failed, lost, restarts.
fn table(text: &str) -> BTreeMap<&str, [u64; 5]> {
    let lines = text.lines().skip_while(|line| !line.contains("longest pause")).skip(1);
    let rows = lines.take_while(|line| !line.is_empty()).filter(|line| line.ends_with(" ms")).map(|line| {
        let (title, numbers) = line.split_at_checked(24).expect("a title and its numbers");
        let numbers: Vec<u64> = numbers.split_whitespace().take(5).map(|n| n.parse().expect("a number")).collect();
        (title.trim(), numbers.try_into().expect("five numbers"))
    });
    rows.collect()
}

/// Interrupted as by Ctrl-C in a terminal, where outlast gets the signal as well.
#[cfg(unix)]
#[test]
fn an_interrupted_demo_leaves_nothing_behind() {
    use std::{
        io::{BufRead, BufReader},
        os::unix::process::CommandExt,
    };

    use nix::{
        sys::signal::{Signal, killpg},
        unistd::Pid,
    };

    let temp = tempfile::tempdir().expect("a directory");
    let mut demo = demo(temp.path()).process_group(0).spawn().expect("the demo runs");
    let stdout = demo.stdout.take().expect("stdout is a pipe");
    let mut lines = BufReader::new(stdout).lines().map(|line| line.expect("it writes UTF-8"));
    assert!(lines.any(|line| line.contains("calls flow")), "it begins");
    killpg(Pid::from_raw(demo.id().try_into().expect("a process id")), Signal::SIGINT).expect("it is there");
    assert!(lines.any(|line| line == "stopped by SIGINT"));
    assert_eq!(demo.wait().expect("it ends").code(), Some(130));
    assert_nothing_is_left(temp.path());
}

fn assert_nothing_is_left(temp: &Path) {
    let files: Vec<_> = std::fs::read_dir(temp).expect("it is still there").collect();
    assert!(files.is_empty(), "{files:?}");
    // The keeper exits when it notices that outlast has exited.
    let variable = format!("TMPDIR={}", temp.display());
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut processes = processes_with(&variable);
    while !processes.is_empty() && Instant::now() < deadline {
        std::thread::yield_now();
        processes = processes_with(&variable);
    }
    assert!(processes.is_empty(), "{processes:?}");
}

/// All processes of the demo have the variable: outlast, its keeper, and each server with its `OUTLAST_CHILD`.
#[cfg(target_os = "linux")]
fn processes_with(variable: &str) -> Vec<String> {
    use std::fs;

    let processes = fs::read_dir("/proc").expect("Linux has it").flatten();
    let has = |path: &Path| {
        let environ = fs::read(path.join("environ")).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes())
    };
    let left = processes.map(|entry| entry.path()).filter(|path| has(path));
    left.map(|path| {
        let command = fs::read(path.join("cmdline")).unwrap_or_default();
        format!("{}: {}", path.display(), String::from_utf8_lossy(&command).replace('\0', " "))
    })
    .collect()
}

#[cfg(not(target_os = "linux"))]
fn processes_with(_: &str) -> Vec<String> {
    Vec::new()
}
