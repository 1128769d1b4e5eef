//! Files, names and texts that were made to do harm: what outlast refuses to follow, to wait for, to print and to hold in
//! memory.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown, symlink},
    path::Path,
    process::{Command, Output, Stdio},
};

use nix::{sys::stat::Mode, unistd::geteuid, unistd::mkfifo};
use serde_json::{Value, json};

use crate::mcp::client::{OUTLAST, PUPPET, Place, Setup, until};

struct World {
    home: Place,
    project: Place,
}

impl World {
    fn new() -> World {
        World { home: Place::new(), project: Place::new() }
    }

    fn setup(&self) -> Setup {
        Setup::new(&self.project).home(self.home.path())
    }

    fn outlast(&self, args: &[&str]) -> Output {
        let mut command = Command::new(OUTLAST);
        command.args(args).current_dir(self.project.path()).env("HOME", self.home.path()).env_remove("OUTLAST_CHILD");
        command.stdin(Stdio::null()).output().expect("the program starts")
    }

    /// With at most so many KiB of memory.
    fn outlast_within(&self, kib: u64, args: &[&str]) -> Output {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -v {kib}; exec \"$@\""), "sh", OUTLAST]).args(args);
        command.current_dir(self.project.path()).env("HOME", self.home.path());
        command.stdin(Stdio::null()).output().expect("the program starts")
    }

    /// Where the state goes if the project's own directory is refused.
    fn elsewhere(&self) -> std::path::PathBuf {
        let dir = self.home.path().join(".local/state/outlast/projects");
        fs::read_dir(dir).expect("a directory").next().expect("of the project").expect("one").path()
    }
}

fn words(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn a_state_directory_that_is_not_ours_is_not_used() {
    let mut table = vec!["link", "file of a link"];
    match geteuid().is_root() {
        true => table.push("other user"),
        false => eprintln!("the directory of another user: skipped, as only root can make one"),
    }
    for case in table {
        let world = World::new();
        let (target, state) = (world.home.path().join("target"), world.project.path().join(".outlast"));
        fs::create_dir(&target).expect("a directory");
        let why = match case {
            "link" => {
                symlink(&target, &state).expect("a link");
                "it is a symbolic link"
            }
            "file of a link" => {
                symlink(world.home.path().join("missing"), &state).expect("a link");
                "it is a symbolic link"
            }
            _ => {
                fs::create_dir(&state).expect("a directory");
                chown(&state, Some(65534), Some(65534)).expect("we are root");
                fs::set_permissions(&state, fs::Permissions::from_mode(0o777)).expect("we are root");
                "it belongs to another user"
            }
        };
        let client = world.setup().ready();
        let line = client.says("state is kept in");
        // The dangling link is met when the directory is made, where the system words it.
        assert!(line.contains(why) || case == "file of a link", "{case}: {line}");
        client.end();
        assert_eq!(fs::read_dir(&target).expect("it is there").count(), 0, "{case}");
        assert!(!world.home.path().join("missing").exists(), "{case}");
        assert!(world.elsewhere().join("audit.jsonl").is_file(), "{case}");
        assert!(words(&world.outlast(&["audit"])).contains("instance_started"), "{case}");
        assert!(words(&world.outlast(&["logs"])).contains("Ended"), "{case}");
    }
}

#[test]
fn links_and_fifos_in_the_state_directory_are_refused() {
    let world = World::new();
    let state = world.project.path().join(".outlast");
    fs::create_dir(&state).expect("a directory");
    let (target, dir) = (world.home.path().join("target"), world.home.path().join("dir"));
    fs::write(&target, "mine").expect("a file");
    fs::create_dir(&dir).expect("a directory");
    symlink(&target, state.join(".gitignore")).expect("a link");
    symlink(&dir, state.join("logs")).expect("a link");
    symlink(&target, state.join("restart_marker")).expect("a link");
    mkfifo(&state.join("audit.jsonl"), Mode::S_IRWXU).expect("a FIFO");
    // Everything is served, and nothing waits for the other end of the FIFO.
    let mut client = world.setup().ready();
    client.says("cannot be written, and its records are lost (it is a FIFO, not a file)");
    client.says("no log file is written (it is a symbolic link)");
    client.restart();
    client.end();
    assert_eq!(fs::read_to_string(&target).expect("it is there"), "mine");
    assert_eq!(fs::read_dir(&dir).expect("it is there").count(), 0);
    assert!(fs::symlink_metadata(state.join("restart_marker")).expect("a marker").is_file(), "the link was replaced");
    // Those who look do not wait either.
    let output = world.outlast(&["audit"]);
    assert!(output.status.success(), "{output:?}");
    assert!(!words(&world.outlast(&["logs"])).is_empty());
}

/// A title, a colour, C1, an overwritten line, a bidirectional control.
const ESCAPES: &str = "\x1b]0;owned\x07\x1b[31m\u{9b}2J\rover\u{202e}\x08";

fn is_clean(what: &str, output: &Output) {
    for text in [&output.stdout, &output.stderr] {
        let text = String::from_utf8_lossy(text);
        let bad = text.chars().find(|letter| {
            letter.is_control() && !"\n\t".contains(*letter) || matches!(letter, '\u{202a}'..='\u{202e}')
        });
        assert_eq!(bad, None, "{what}: {text:?}");
    }
}

#[test]
fn no_escape_sequence_reaches_a_terminal() {
    let world = World::new();
    let name = format!("evil{ESCAPES}");
    let server = format!("printf '%s\\n' \"$1\" >&2; exec {PUPPET}");
    let said = format!("said{ESCAPES}");
    let client = world.setup().options(["--name", &name]).command(["sh", "-c", &server, "sh", &said]).ready();
    client.says("said");
    let ps: Value = serde_json::from_slice(&world.outlast(&["ps", "--json"]).stdout).expect("JSON");
    assert_eq!(ps[0]["name"], name, "programs get the name as it is");
    let id = ps[0]["id"].as_str().expect("an id").to_owned();
    let reason = format!("because{ESCAPES}\n[2026-01-01T00:00:00.000Z] [SUPERVISOR] forged");
    for args in [
        &["restart", "--reason", &reason][..],
        &["ps"],
        &["ps", "--json"],
        &["state"],
        &["state", "--json"],
        &["logs"],
        &["logs", "--json"],
        &["audit"],
        &["audit", "--json"],
        &["top", "--once"],
        &["doctor"],
        &["state", &format!("no{ESCAPES}")],
        &["logs", &format!("no{ESCAPES}")],
        &["trust", &format!("no{ESCAPES}")],
    ] {
        is_clean(&args.join(" "), &world.outlast(args));
    }
    let log = fs::read_to_string(world.project.join(&format!(".outlast/logs/{id}.log"))).expect("a log");
    assert!(log.contains("said") && log.contains("because"), "{log}");
    assert!(!log.contains('\x1b') && !log.contains('\u{202e}'), "{log:?}");
    assert!(!log.lines().any(|line| line.ends_with("] forged") || line.starts_with("[2026-01-01T")), "{log}");
    assert!(!client.stderr_text().contains('\x1b'), "{}", client.stderr_text());
    client.end();

    let servers = json!({"mcpServers": {name: {"command": format!("x{ESCAPES}"), "args": [ESCAPES]}}});
    world.project.write(".mcp.json", &serde_json::to_string_pretty(&servers).expect("JSON"));
    is_clean("wrap", &world.outlast(&["wrap", "--dry-run", ".mcp.json"]));
    is_clean("doctor", &world.outlast(&["doctor"]));
    is_clean("trust", &world.outlast(&["trust", "--show", ".mcp.json"]));
}

#[test]
fn secrets_are_in_no_log_and_in_no_diff() {
    let world = World::new();
    let token = "ghp_0123456789abcdefABCDEF0123456789abcd";
    let server = format!("echo \"using $3 and Password=hunter2\" >&2; exec {PUPPET}");
    let words_of = ["sh", "-c", &server, "sh", "--pat", "pat-s3cret", token, "https://h/?key=query-s3cret"];
    let mut client = world.setup().options(["--name", "x"]).command(words_of).ready();
    client.says("using …");
    client.restart();
    let outputs = ["ps --json", "ps", "state", "logs", "audit --json"];
    let mut seen: String =
        outputs.iter().map(|args| words(&world.outlast(&args.split(' ').collect::<Vec<_>>()))).collect();
    client.end();
    seen += &fs::read_to_string(world.project.join(".outlast/audit.jsonl")).expect("a log");
    for secret in [token, "pat-s3cret", "query-s3cret", "hunter2"] {
        assert!(!seen.contains(secret), "{secret}: {seen}");
    }
    let servers = json!({"mcpServers": {
        "a": {"command": "npx", "args": ["x", "--api-key", "arg-s3cret"], "env": {"WHATEVER": "env-s3cret", "REF": "${REF}"}},
        "b": {"url": "https://h/mcp", "headers": {"Authorization": "Bearer head-S3cret"}},
    }});
    world.project.write(".mcp.json", &serde_json::to_string_pretty(&servers).expect("JSON"));
    let diff = words(&world.outlast(&["wrap", "--dry-run", ".mcp.json"]));
    assert!(diff.contains("+ ") && diff.contains("\"--api-key\""), "{diff}");
    for secret in ["arg-s3cret", "env-s3cret", "head-S3cret"] {
        assert!(!diff.contains(secret), "{secret}: {diff}");
    }
    // The file itself keeps them.
    assert!(world.outlast(&["wrap", "--yes", ".mcp.json"]).status.success());
    let file = fs::read_to_string(world.project.join(".mcp.json")).expect("a file");
    assert!(file.contains("arg-s3cret") && file.contains("env-s3cret"), "{file}");
}

#[test]
fn files_of_any_size_are_read_within_bounds() {
    let world = World::new();
    let state = world.project.path().join(".outlast");
    fs::create_dir_all(state.join("logs")).expect("a directory");
    let huge = |path: &Path, last: &str| {
        let file = fs::File::create(path).expect("a file");
        // A line of zeros that takes no room on the disk.
        file.set_len(3 << 30).expect("a sparse file");
        let mut file = fs::OpenOptions::new().append(true).open(path).expect("the file");
        std::io::Write::write_all(&mut file, format!("\n{last}\n").as_bytes()).expect("room");
    };
    let record = json!({"timestamp": "2026-01-13T14:32:45.123Z", "props": {"event_type": "gave_up", "id": "x-1"}});
    huge(&state.join("audit.jsonl"), &record.to_string());
    huge(&state.join("logs/x-1.log"), "the last line");
    let enough = 1 << 20;
    let output = world.outlast_within(enough, &["audit"]);
    assert!(output.status.success() && words(&output).contains("gave_up"), "{}", words(&output));
    for lines in ["1", "1000000"] {
        let output = world.outlast_within(enough, &["logs", "--lines", lines]);
        assert!(output.status.success() && words(&output).contains("the last line"), "{lines}");
    }

    // A registry full of litter, with a FIFO in it.
    let run = world.home.path().join(".local/state/outlast/run");
    fs::create_dir_all(&run).expect("a directory");
    for number in 0..6000 {
        let entry =
            json!({"id": format!("dead-{number}"), "kind": "mcp", "pid": 999_999_999u32, "cwd": "/", "socket": "/x"});
        fs::write(run.join(format!("dead-{number}.json")), entry.to_string()).expect("room");
    }
    mkfifo(&run.join("fifo.json"), Mode::S_IRWXU).expect("a FIFO");
    let output = world.outlast_within(enough, &["ps"]);
    assert!(output.status.success(), "{}", words(&output));
    until("the dead to be swept", || {
        world.outlast(&["ps"]);
        (fs::read_dir(&run).expect("it is there").count() < 10).then_some(())
    });
}
