//! Harmful files, names and texts: outlast does not follow them, wait for them, print them or load them into memory.

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

    /// With at most this many KiB of memory.
    fn outlast_within(&self, kib: u64, args: &[&str]) -> Output {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -v {kib}; exec \"$@\""), "sh", OUTLAST]).args(args);
        command.current_dir(self.project.path()).env("HOME", self.home.path());
        command.stdin(Stdio::null()).output().expect("the program starts")
    }

    /// The state directory if the project's own is refused.
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
        // The dangling link fails when the directory is made, with the error text of the system.
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
    let cases = [
        // what is in the directory   what is said; nothing if the directory is used
        ("a FIFO", Some("audit.jsonl: it is a FIFO, not a file; state is kept in ")),
        ("a linked log", Some("audit.jsonl: it is a symbolic link; state is kept in ")),
        ("linked logs", Some("logs: it is a symbolic link; state is kept in ")),
        ("links", None),
    ];
    for (case, said) in cases {
        let world = World::new();
        let state = world.project.path().join(".outlast");
        fs::create_dir(&state).expect("a directory");
        let (target, dir) = (world.home.path().join("target"), world.home.path().join("dir"));
        fs::write(&target, "mine").expect("a file");
        fs::create_dir(&dir).expect("a directory");
        symlink(&target, state.join(".gitignore")).expect("a link");
        symlink(&target, state.join("restart_marker")).expect("a link");
        match case {
            "a FIFO" => mkfifo(&state.join("audit.jsonl"), Mode::S_IRWXU).expect("a FIFO"),
            "a linked log" => symlink(&target, state.join("audit.jsonl")).expect("a link"),
            "linked logs" => symlink(&dir, state.join("logs")).expect("a link"),
            _ => {}
        }
        // Everything is served, and nothing waits for the other end of the FIFO.
        let mut client = world.setup().ready();
        client.restart();
        let marker = match said {
            Some(said) => {
                client.says(said);
                world.elsewhere().join("restart_marker")
            }
            None => state.join("restart_marker"),
        };
        client.end();
        assert_eq!(fs::read_to_string(&target).expect("it is there"), "mine", "{case}");
        assert_eq!(fs::read_dir(&dir).expect("it is there").count(), 0, "{case}");
        assert!(fs::symlink_metadata(marker).expect("a marker").is_file(), "{case}");
        // Commands that read them do not wait either, and find what was written.
        for args in [&["audit"][..], &["logs"]] {
            let output = world.outlast(args);
            assert!(output.status.success() && words(&output).contains("estart"), "{case}: {output:?}");
        }
    }
}

/// What appears while outlast runs is refused, too: its records are lost, and that is said.
#[test]
fn a_fifo_that_takes_the_place_of_the_audit_log_is_refused() {
    let world = World::new();
    let mut client = world.setup().ready();
    let audit = world.project.path().join(".outlast/audit.jsonl");
    until("the audit log", || audit.exists().then_some(()));
    fs::remove_file(&audit).expect("ours");
    mkfifo(&audit, Mode::S_IRWXU).expect("a FIFO");
    client.restart();
    client.says("cannot be written, so its records are lost (it is a FIFO, not a file)");
    client.end();
}

/// A program that opened a FIFO would wait for its writer.
#[test]
fn a_fifo_in_place_of_a_file_blocks_no_command() {
    let world = World::new();
    mkfifo(world.project.join("fifo").as_str(), Mode::S_IRWXU).expect("a FIFO");
    let table: [(&[&str], i32); 5] = [
        (&["run", "fifo", "--detach", "--", "true"], 2),
        (&["mcp", "--watch", "fifo", "--", "cat"], 2),
        (&["mcp", "--config", "fifo", "--", "cat"], 2),
        (&["wrap", "fifo"], 1),
        (&["gateway", "--config", "fifo", "--stdio"], 2),
    ];
    for (args, code) in table {
        let output = world.outlast(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", words(&output));
        assert!(words(&output).contains("it is a FIFO, not a file"), "{args:?}: {}", words(&output));
    }
}

#[test]
fn a_damaged_registry_entry_is_reported_and_the_others_are_listed() {
    let world = World::new();
    let client = world.setup().options(["--name", "weather"]).ready();
    let run = world.home.path().join(".local/state/outlast/run");
    let target = world.home.path().join("target");
    fs::write(&target, "{}").expect("a file");
    fs::write(run.join("torn.json"), "{\"id\": \"to").expect("a file");
    fs::write(run.join("empty.json"), "{}").expect("a file");
    symlink(&target, run.join("link.json")).expect("a link");
    mkfifo(&run.join("fifo.json"), Mode::S_IRWXU).expect("a FIFO");
    let output = world.outlast(&["ps"]);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("weather"), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let doctor = words(&world.outlast(&["doctor"]));
    for (file, why) in [
        ("torn.json", "it is not JSON"),
        ("empty.json", "it does not describe an instance"),
        ("link.json", "it is a symbolic link"),
        ("fifo.json", "it is a FIFO, not a file"),
    ] {
        let sentence = format!("{file} cannot be used: {why}\n");
        assert!(said.contains(&sentence), "{sentence}{said}");
        assert!(doctor.contains(file) && doctor.contains(why), "{file}: {doctor}");
    }
    assert_eq!(said.matches("hint: `outlast doctor` shows how to correct it").count(), 4, "{said}");
    client.end();
    assert_eq!(fs::read_to_string(&target).expect("it is there"), "{}");
}

/// A title, a colour, C1, an overwritten line, a bidirectional control character.
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

    let name = format!("{name}\nforged: all is well");
    let command = format!("x{ESCAPES}\nforged: all is well");
    let servers = json!({"mcpServers": {name: {"command": command, "args": [ESCAPES]}}});
    world.project.write(".mcp.json", &serde_json::to_string_pretty(&servers).expect("JSON"));
    for args in [
        &["wrap", "--dry-run", ".mcp.json"][..],
        &["wrap", "--server", "evil", ".mcp.json"],
        &["doctor"],
        &["trust", "--show", ".mcp.json"],
    ] {
        let output = world.outlast(args);
        is_clean(&args.join(" "), &output);
        assert!(!words(&output).contains("\nforged"), "{args:?}: {}", words(&output));
    }
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
    client.call("stderr", json!({"text": format!("again {token} and Password=hunter2, --pat pat-S3cret")}));
    client.says("again …");
    let status = client.status().to_string();
    assert!(status.contains("again …"), "the last lines are there, without the secrets: {status}");
    let reason = format!("{token} --pat pat-S3cret Password=hunter2");
    assert!(world.outlast(&["restart", "--reason", &reason]).status.success());
    let outputs = ["ps --json", "ps", "state", "state --json", "logs", "audit --json"];
    let mut seen: String =
        outputs.iter().map(|args| words(&world.outlast(&args.split(' ').collect::<Vec<_>>()))).collect();
    seen += &status;
    client.end();
    for file in ["audit.jsonl", "restart_marker"] {
        seen += &fs::read_to_string(world.project.path().join(".outlast").join(file)).expect("a file");
    }
    for secret in [token, "pat-s3cret", "pat-S3cret", "query-s3cret", "hunter2"] {
        assert!(!seen.contains(secret), "{secret}: {seen}");
    }
    let servers = json!({"mcpServers": {
        "a": {"command": "npx", "args": ["x", "--api-key", "arg-s3cret"], "env": {"WHATEVER": "env-s3cret", "REF": "${REF}"}},
        "b": {"url": "https://h/mcp", "headers": {"Authorization": "Bearer head-S3cret", "X-Own": "own-s3cret"}},
    }});
    world.project.write(".mcp.json", &serde_json::to_string_pretty(&servers).expect("JSON"));
    let diff = words(&world.outlast(&["wrap", "--dry-run", ".mcp.json"]));
    assert!(diff.contains("+ ") && diff.contains("\"--api-key\""), "{diff}");
    for secret in ["arg-s3cret", "env-s3cret", "head-S3cret", "own-s3cret"] {
        assert!(!diff.contains(secret), "{secret}: {diff}");
    }
    // The file itself keeps the characters.
    assert!(world.outlast(&["wrap", "--yes", ".mcp.json"]).status.success());
    let file = fs::read_to_string(world.project.join(".mcp.json")).expect("a file");
    assert!(file.contains("arg-s3cret") && file.contains("env-s3cret"), "{file}");
}

/// Forms of secrets that have several words or lines, or colours in them.
#[test]
fn no_form_of_a_secret_on_stderr_is_shown() {
    let world = World::new();
    let lines = [
        "Proxy-Authorization: Basic dXNlcjpwYXNz-1",
        "use \u{1b}[33mghp_0123456789abcdefABCDEF0123456789abcd\u{1b}[0m",
        r#"{\"token\":\"nested-s3cret\"}"#,
        "Password: hunter2",
        "-----BEGIN RSA PRIVATE KEY-----",
        "MIIEowIBAAKCAQEA1c7+9z5Pad7OejecsQ0bu3aozN3tihPmUlnudGPYo",
        "LastLine=",
        "-----END RSA PRIVATE KEY-----",
        "the last line",
    ];
    let secrets = ["dXNlcjpwYXNz", "ghp_", "nested-s3cret", "hunter2", "MIIE", "LastLine"];
    let mut client = world.setup().options(["--name", "x"]).ready();
    for line in lines {
        client.call("stderr", json!({"text": line}));
    }
    client.says("the last line");
    let mut seen = client.status().to_string();
    for args in ["state", "state --json", "logs", "audit --json"] {
        seen += &words(&world.outlast(&args.split(' ').collect::<Vec<_>>()));
    }
    client.end();
    // `doctor` quotes what a server wrote that did not answer.
    let script: String = lines.iter().map(|line| format!("echo '{line}' >&2\n")).collect();
    world.project.write("server.sh", &format!("{script}exit 1\n"));
    let server = world.project.join("server.sh");
    let servers = json!({"mcpServers": {"a": {"command": "sh", "args": [server]}}});
    world.project.write(".mcp.json", &servers.to_string());
    assert!(world.outlast(&["trust", ".mcp.json"]).status.success());
    let doctor = words(&world.outlast(&["doctor", "--json"]));
    assert!(doctor.contains("exit code 1"), "{doctor}");
    assert!(seen.contains("Password: …"), "{seen}");
    seen += &doctor;
    for secret in secrets {
        assert!(!seen.contains(secret), "{secret}: {seen}");
    }
}

#[test]
fn files_of_any_size_are_read_within_bounds() {
    let world = World::new();
    let state = world.project.path().join(".outlast");
    fs::create_dir_all(state.join("logs")).expect("a directory");
    let huge = |path: &Path, last: &str| {
        let file = fs::File::create(path).expect("a file");
        // A line of zeros that takes no space on the disk.
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

    // A registry with foreign files, one of them a FIFO.
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
