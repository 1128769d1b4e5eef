//! `outlast restore` and `outlast startup`: sessions come back after everything was killed, and only those that their user
//! had not ended.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    run::{text, until_gone},
    support::{COMPOSER, OUTLAST, processes},
};

const PATIENCE: Duration = Duration::from_secs(60);

/// A home, and a project with an agent that looks like claude.
struct World {
    home: TempDir,
    project: TempDir,
    sessions: Vec<&'static str>,
}

impl World {
    fn new(sessions: &[&'static str]) -> World {
        let world = World {
            home: tempfile::tempdir().unwrap(),
            project: tempfile::tempdir().unwrap(),
            sessions: sessions.to_vec(),
        };
        symlink(COMPOSER, world.path().join("claude")).unwrap();
        fs::create_dir(world.path().join("sub")).unwrap();
        world
    }

    fn path(&self) -> PathBuf {
        self.project.path().canonicalize().unwrap()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(OUTLAST);
        command.current_dir(self.path()).env("HOME", self.home.path()).args(args).stdin(Stdio::null());
        command
    }

    fn outlast(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn run(&self, args: &[&str]) {
        let output = self.command(&[&["run", "-d"], args].concat()).env("TEST_MARK", "kept").output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    }

    fn state(&self, session: &str) -> Value {
        serde_json::from_slice(&self.outlast(&["state", session, "--json"]).stdout).unwrap_or_default()
    }

    fn restore(&self, args: &[&str]) -> (bool, Value) {
        let output = self.outlast(&[&["restore", "--json"], args].concat());
        let said = serde_json::from_slice(&output.stdout);
        (output.status.success(), said.unwrap_or_else(|_| panic!("{}", text(&output.stderr))))
    }

    fn record(&self, session: &str) -> PathBuf {
        self.home.path().join(format!(".local/state/outlast/sessions/{session}.json"))
    }

    /// What a power failure does: every process of every session is gone at once, and so are the sockets.
    fn lose_power(&self) {
        let listed: Value = serde_json::from_slice(&self.outlast(&["ps", "--json"]).stdout).unwrap();
        let outlasts = listed.as_array().unwrap().iter().map(|one| one["pid"].as_u64().unwrap());
        let all: Vec<u64> = outlasts.flat_map(|pid| [vec![pid], processes::below(pid)].concat()).collect();
        assert!(all.len() >= 3, "outlast, keeper and agent: {all:?}");
        processes::kill_at_once(&all);
        all.into_iter().for_each(until_gone);
        fs::remove_dir_all(self.home.path().join(".local/state/outlast/run")).unwrap();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for session in &self.sessions {
            self.outlast(&["stop", session, "--force"]);
        }
    }
}

#[test]
fn interrupted_sessions_are_restored_and_ended_ones_are_not() {
    let world = World::new(&["one", "two", "ended"]);
    world.run(&["--session", "one", "--cwd", "sub", "--env-pass", "TEST_MARK", "--", "../claude", "--late=1"]);
    world.run(&["--session", "two", "--", "./claude"]);
    world.run(&["--session", "ended", "--", "./claude"]);
    assert!(world.outlast(&["send", "one", "what is a parser", "--submit"]).status.success());
    let before = world.state("one");
    assert!(world.outlast(&["stop", "ended"]).status.success());
    let nothing = json!([{"id": "one", "result": "running"}, {"id": "two", "result": "running"}]);
    let (is_done, mut said) = world.restore(&[]);
    said.as_array_mut().unwrap().sort_by_key(|one| one["id"].to_string());
    assert_eq!((is_done, said), (true, nothing));

    world.lose_power();
    let listed = text(&world.outlast(&["restore", "--list"]).stdout);
    assert!(listed.contains("one") && listed.contains("two") && !listed.contains("ended"), "{listed}");
    // Without the variable that the first agent had.
    let output = world.outlast(&["restore", "--all"]);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    assert!(said.contains("one: restored (claude in ") && said.contains("two: restored (claude in "), "{said}");
    assert_eq!(said.lines().count(), 2);
    let warned = text(&output.stderr);
    assert!(
        warned.contains("one: variables that its agent had before and that are not set here: TEST_MARK"),
        "{warned}"
    );

    let after = world.state("one");
    assert_eq!((&after["conversation"], &after["mode"]), (&before["conversation"], &json!("continue")));
    assert_eq!((&after["cwd"], &after["cwd_source"]), (&before["cwd"], &json!("cli_flag")));
    let line = fs::read(format!("/proc/{}/cmdline", after["pid"])).unwrap();
    let id = after["conversation"].as_str().unwrap();
    let line = text(&line).replace('\0', " ");
    assert!(line.contains(&format!(" --resume {id} ")) && line.contains(" --late=1 "), "{line}");
    assert!(world.state("ended")["error"].is_object());

    // Again, with the variable: the options are those of the first start.
    world.lose_power();
    let output = world.command(&["restore", "one", "--json"]).env("TEST_MARK", "again").output().unwrap();
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said, json!([{"id": "one", "result": "restored", "waiting_for_input": true, "env_missing": []}]));
    let environment = fs::read(format!("/proc/{}/environ", world.state("one")["pid"])).unwrap();
    assert!(text(&environment).split('\0').any(|line| line == "TEST_MARK=again"));

    // A session that is ended after it was restored stays ended.
    assert!(world.outlast(&["stop", "one"]).status.success());
    assert_eq!(world.restore(&["--list"]).1.as_array().unwrap().len(), 1);
    let refused = text(&world.outlast(&["restore", "one"]).stderr);
    assert!(
        refused.starts_with("error: the session `one` cannot be restored\n  because: its user ended it\n"),
        "{refused}"
    );
    assert!(world.outlast(&["restore", "nine"]).status.code() == Some(1));
}

#[test]
fn a_session_that_cannot_be_restored_is_reported_and_stays_restorable() {
    let world = World::new(&["good", "bad", "moved"]);
    fs::create_dir(world.path().join("other")).unwrap();
    symlink(COMPOSER, world.path().join("other/claude")).unwrap();
    world.run(&["--session", "bad", "--", "./other/claude"]);
    world.run(&["--session", "moved", "--cwd", "sub", "--", "../claude"]);
    world.run(&["--session", "good", "--", "./claude"]);
    world.lose_power();
    fs::remove_file(world.path().join("other/claude")).unwrap();
    fs::rename(world.path().join("sub"), world.path().join("elsewhere")).unwrap();
    for _ in 0..2 {
        let (is_done, said) = world.restore(&["--all"]);
        assert!(!is_done);
        let of = |id: &str| said.as_array().unwrap().iter().find(|one| one["id"] == id).cloned().unwrap();
        let (bad, moved) = (of("bad"), of("moved"));
        assert_eq!((&bad["result"], &moved["result"]), (&json!("failed"), &json!("failed")), "{said}");
        let because = |one: &Value| one["error"]["because"].as_str().unwrap().to_owned();
        assert!(because(&bad).contains("no program named"), "{bad}");
        assert!(because(&moved).contains("--cwd"), "{moved}");
        assert!(of("good")["result"] == "restored" || of("good")["result"] == "running", "{said}");
    }
    symlink(COMPOSER, world.path().join("other/claude")).unwrap();
    fs::rename(world.path().join("elsewhere"), world.path().join("sub")).unwrap();
    let (is_done, said) = world.restore(&["--all"]);
    assert!(is_done, "{said}");
    assert_eq!(world.state("bad")["state"], "ready");
    assert_eq!(world.state("moved")["cwd_source"], "cli_flag");
}

#[test]
fn a_record_that_cannot_be_used_is_explained() {
    let world = World::new(&["good"]);
    world.run(&["--session", "good", "--", "./claude"]);
    world.lose_power();
    let whole = fs::read(world.record("good")).unwrap();
    let spoil = |session: &str, bytes: &[u8]| {
        fs::write(world.record(session), bytes).unwrap();
        fs::set_permissions(world.record(session), fs::Permissions::from_mode(0o600)).unwrap();
    };
    spoil("cut", &whole[..whole.len() - 9]);
    spoil("long", &vec![b' '; (1 << 20) + 1]);
    spoil("empty", b"");
    spoil("other", &whole);
    let mut expected = vec![
        ("cut", "it is not JSON"),
        ("long", "it is longer than"),
        ("empty", "it is not JSON"),
        ("other", "it is of another session"),
    ];
    if nix::unistd::geteuid().is_root() {
        spoil("foreign", &whole);
        std::os::unix::fs::chown(world.record("foreign"), Some(1), None).unwrap();
        expected.push(("foreign", "it belongs to another user"));
    }
    for (session, because) in &expected {
        let output = world.outlast(&["restore", session]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1));
        assert!(
            said.starts_with(&format!(
                "error: the session record {} cannot be used\n",
                world.record(session).display()
            )),
            "{said}"
        );
        assert!(said.contains(&format!("  because: {because}")) && said.contains("\n  hint: "), "{session}: {said}");
    }
    // The others are restored all the same.
    let (is_done, said) = world.restore(&[]);
    assert!(!is_done);
    let results: Vec<&Value> = said.as_array().unwrap().iter().map(|one| &one["result"]).collect();
    assert_eq!(results.iter().filter(|result| **result == "failed").count(), expected.len());
    assert_eq!(world.state("good")["mode"], "fresh", "there was no turn");
}

/// A `systemctl` that notes how it was called, and creates and removes the link as systemd does.
const SYSTEMCTL: &str = r#"#!/bin/sh
echo "$@" >> "$HOME/systemctl.log"
case "$2" in
  enable) mkdir -p "$HOME/.config/systemd/user/default.target.wants" && ln -s ../$3 "$HOME/.config/systemd/user/default.target.wants/$3" ;;
  disable) rm "$HOME/.config/systemd/user/default.target.wants/$3" ;;
esac
"#;

struct Login {
    home: TempDir,
    bin: TempDir,
}

impl Login {
    fn new(systemctl: Option<&str>) -> Login {
        let login = Login { home: tempfile::tempdir().unwrap(), bin: tempfile::tempdir().unwrap() };
        symlink("/bin/sh", login.bin.path().join("sh")).unwrap();
        for tool in ["mkdir", "ln", "rm"] {
            symlink(Path::new("/bin").join(tool), login.bin.path().join(tool)).unwrap();
        }
        if let Some(script) = systemctl {
            fs::write(login.bin.path().join("systemctl"), script).unwrap();
            fs::set_permissions(login.bin.path().join("systemctl"), fs::Permissions::from_mode(0o755)).unwrap();
        }
        login
    }

    fn startup(&self, args: &[&str]) -> (Option<i32>, String, String) {
        let mut command = Command::new(OUTLAST);
        command.env_clear().env("HOME", self.home.path()).env("PATH", self.bin.path()).arg("startup").args(args);
        let output = command.stdin(Stdio::null()).output().unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    }

    fn unit(&self) -> PathBuf {
        self.home.path().join(".config/systemd/user/outlast-restore.service")
    }

    /// All files of the home directory.
    fn files(&self) -> Vec<String> {
        let mut found = Command::new("find");
        let output = found.current_dir(self.home.path()).args([".", "-mindepth", "1"]).output().unwrap();
        let mut all: Vec<String> = text(&output.stdout).lines().map(str::to_owned).collect();
        all.sort();
        all
    }
}

#[test]
fn the_unit_is_shown_written_and_removed_completely() {
    let login = Login::new(Some(SYSTEMCTL));
    let (code, said, _) = login.startup(&["status"]);
    assert_eq!((code, said.starts_with("Not enabled: ")), (Some(0), true), "{said}");
    let (code, _, why) = login.startup(&["enable"]);
    assert_eq!(code, Some(2), "it cannot ask: {why}");
    let (code, shown, _) = login.startup(&["enable", "--dry-run"]);
    assert_eq!(code, Some(0));
    assert!(!login.unit().exists());
    let (code, said, _) = login.startup(&["enable", "--yes"]);
    assert_eq!(code, Some(0), "{said}");
    let unit = fs::read_to_string(login.unit()).unwrap();
    assert!(shown.contains(&unit) && said.contains(&unit), "the file was shown before: {shown}");
    assert_eq!(fs::metadata(login.unit()).unwrap().permissions().mode() & 0o777, 0o644);
    assert!(
        unit.contains(&format!("ExecStart=\"{}\" restore --all\n", fs::canonicalize(OUTLAST).unwrap().display())),
        "{unit}"
    );
    assert!(unit.contains(&format!("Environment=\"PATH={}\"\n", login.bin.path().display())), "{unit}");
    let calls = || fs::read_to_string(login.home.path().join("systemctl.log")).unwrap();
    assert_eq!(calls(), "--user daemon-reload\n--user enable outlast-restore.service\n");
    let (_, said, _) = login.startup(&["status", "--json"]);
    let status: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&status["enabled"], &status["current"]), (&json!(true), &json!(true)));
    let (_, said, _) = login.startup(&["enable", "--yes"]);
    assert!(said.starts_with("Enabled already: ~/.config/systemd/user/"), "{said}");
    // Another version wrote it.
    fs::write(login.unit(), unit.replace("TimeoutStopSec=15", "TimeoutStopSec=5")).unwrap();
    let (_, said, _) = login.startup(&["status"]);
    assert!(said.contains("differs from what this outlast would write"), "{said}");

    let (code, said, _) = login.startup(&["disable"]);
    assert_eq!((code, said.starts_with("Disabled: ")), (Some(0), true), "{said}");
    assert!(calls().ends_with("--user disable outlast-restore.service\n--user daemon-reload\n"), "{}", calls());
    let left = ["./.config", "./.config/systemd", "./.config/systemd/user", "./systemctl.log"];
    assert_eq!(login.files(), left, "only directories are left");
    assert_eq!(login.startup(&["disable"]).1, "Not enabled: there is nothing to remove.\n");

    // A file of the user is not touched.
    fs::write(login.unit(), "[Unit]\n").unwrap();
    for action in [&["enable", "--yes"][..], &["disable"]] {
        let (code, _, why) = login.startup(action);
        assert_eq!(code, Some(1));
        assert!(why.contains("is not touched\n  because: outlast did not write it\n  hint: "), "{why}");
    }
    assert_eq!(fs::read_to_string(login.unit()).unwrap(), "[Unit]\n");
}

#[test]
fn a_missing_or_failing_systemd_is_reported() {
    let login = Login::new(None);
    let (code, _, why) = login.startup(&["enable", "--yes"]);
    assert_eq!(code, Some(1));
    assert!(why.contains("is written, but systemd does not start it\n  because: `systemctl` cannot be run: "), "{why}");
    assert!(login.startup(&["status"]).1.contains("is written, but systemd does not start it"));
    assert_eq!(login.startup(&["disable"]).0, Some(0));
    assert!(!login.unit().exists());

    let login = Login::new(Some("#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n"));
    let (code, _, why) = login.startup(&["enable", "--yes"]);
    assert_eq!(code, Some(1));
    assert!(why.contains("\n  because: failed to connect to bus\n  hint: "), "{why}");
}

/// The limit of file sizes stands in for a full disk.
#[test]
fn a_full_disk_leaves_no_unit_behind() {
    let login = Login::new(Some(SYSTEMCTL));
    let script = format!("trap '' XFSZ; ulimit -f 0; exec '{}' startup enable --yes", OUTLAST);
    let mut command = Command::new("/bin/sh");
    command.env_clear().env("HOME", login.home.path()).env("PATH", login.bin.path()).args(["-c", &script]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let why = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{why}");
    assert!(
        why.starts_with("error: cannot write ~/.config/systemd/user/outlast-restore.service\n  because: "),
        "{why}"
    );
    assert!(why.contains("\n  hint: nothing was changed"), "{why}");
    assert_eq!(login.files(), ["./.config", "./.config/systemd", "./.config/systemd/user"]);
}

/// A record that cannot be written is reported once in the log; the session continues, and the record is written later.
#[test]
fn a_session_survives_that_its_record_cannot_be_written() {
    let world = World::new(&["s"]);
    world.run(&["--session", "s", "--", "./claude"]);
    let sessions = world.record("s").parent().unwrap().to_owned();
    // Not writable, for root neither.
    let away = sessions.with_extension("away");
    fs::rename(&sessions, &away).unwrap();
    fs::write(&sessions, "").unwrap();
    let restart = || assert!(world.outlast(&["restart", "s"]).status.success());
    restart();
    restart();
    let log = || fs::read_to_string(world.path().join(".outlast/logs/s.log")).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while log().matches("the record of this session cannot be written (").count() != 1 {
        assert!(Instant::now() < deadline, "{}", log());
        thread::sleep(Duration::from_millis(20));
    }
    fs::remove_file(&sessions).unwrap();
    fs::rename(&away, &sessions).unwrap();
    restart();
    assert_eq!(log().matches("cannot be written (").count(), 1, "{}", log());
    let record: Value = serde_json::from_slice(&fs::read(world.record("s")).unwrap()).unwrap();
    assert_eq!(record["state"], "running");
}
