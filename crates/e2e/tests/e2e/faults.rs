//! The complete output and the exit code when something about a session is wrong; and unusual places in which it
//! works.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use super::support::{OUTLAST, PUPPET};

const PATIENCE: Duration = Duration::from_secs(60);

struct World {
    home: PathBuf,
    project: PathBuf,
    _scratch: TempDir,
}

impl World {
    /// A home directory with such a path.
    fn new(home: &str) -> World {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().canonicalize().unwrap();
        let world = World { home: path.join(home), project: path.join("project"), _scratch: scratch };
        fs::create_dir_all(&world.home).unwrap();
        fs::create_dir_all(&world.project).unwrap();
        world
    }

    fn outlast(&self, args: &[&str]) -> Output {
        let mut command = Command::new(OUTLAST);
        command.args(args).current_dir(&self.project).env_clear().env("HOME", &self.home).env("COLUMNS", "100");
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.stdin(Stdio::null()).output().unwrap()
    }

    /// All output, and the exit code.
    fn words(&self, args: &[&str]) -> String {
        let output = self.outlast(args);
        let words = format!("{}{}", text(&output.stdout), text(&output.stderr));
        let words = words.replace(self.project.to_str().unwrap(), "DIR");
        format!("$ outlast {}\n{words}exit code {}\n\n", args.join(" "), output.status.code().unwrap())
    }

    fn until_ready(&self, id: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !text(&self.outlast(&["state", id, "--json"]).stdout).contains("\"state\": \"ready\"") {
            assert!(Instant::now() < deadline, "it does not come up");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_wrong_session_is_explained() {
    let world = World::new("home");
    fs::write(world.project.join("block.md"), "---\nenv:\n  TOKEN: x\n  1BAD: y\n---\n# Plan\n").unwrap();
    fs::write(world.project.join("open.md"), "---\noutlast_cwd: .\n\n# Plan\n").unwrap();
    fs::write(world.project.join("unset.md"), "---\n\n\nenv:\n  A: ${NOWHERE_TO_BE_FOUND}\n---\n").unwrap();
    fs::write(world.project.join("lost.md"), "---\noutlast_cwd: nowhere\n---\n").unwrap();
    fs::write(world.project.join("file"), "").unwrap();
    let table: [&[&str]; 8] = [
        &["run", "none.md", "--", "sh"],
        &["run", "block.md", "--", "sh"],
        &["run", "open.md", "--", "sh"],
        &["run", "unset.md", "--", "sh"],
        &["run", "lost.md", "--", "sh"],
        &["run", "--cwd", "file", "--", "sh"],
        &["run", "--session", "No Good", "--", "sh"],
        &["run", "-d", "--", "no-such-agent"],
    ];
    let words: String = table.iter().map(|args| world.words(args)).collect();
    insta::assert_snapshot!(words, @"
    $ outlast run none.md -- sh
    error: cannot read the document DIR/none.md
      because: no such file or directory
      hint: the document is the argument before `--`; the agent's command follows `--`
    exit code 2

    $ outlast run block.md -- sh
    error: the front matter of DIR/block.md has an error in line 4: `1BAD` is not a valid name of a variable
      hint: front matter has lines of `key: value` between two lines of `---`
    exit code 2

    $ outlast run open.md -- sh
    error: the front matter of DIR/open.md has an error in line 1: the front matter that begins here has no end
      hint: front matter has lines of `key: value` between two lines of `---`
    exit code 2

    $ outlast run unset.md -- sh
    error: the front matter of the document has an error in line 5: the environment variable `NOWHERE_TO_BE_FOUND` is not set
      hint: set it before, or give a default: `${NAME:-value}`
    exit code 2

    $ outlast run lost.md -- sh
    error: the front matter of the document names the working directory `nowhere`, which does not exist
      hint: a relative path counts from the directory of the document
    exit code 2

    $ outlast run --cwd file -- sh
    error: `--cwd` names the working directory `file`, which is not a directory
    exit code 2

    $ outlast run --session No Good -- sh
    error: `No Good` is not a valid session id
      hint: use up to 40 of a-z, 0-9, - and _; no - at the beginning or end
    exit code 2

    $ outlast run -d -- no-such-agent
    error: cannot start `no-such-agent`
      because: no program named `no-such-agent`
      hint: the command is searched on PATH; clients often start servers with a shorter PATH than your shell
    exit code 127
    ");
}

#[test]
fn a_session_name_without_a_match_is_explained() {
    let world = World::new("home");
    let before: String = [&["attach", "night"][..], &["send", "night", "hello"]].map(|args| world.words(args)).concat();
    insta::assert_snapshot!(before, @r#"
    $ outlast attach night
    error: no instance named `night` is running
      hint: nothing else runs either; `outlast run -- AGENT` starts an agent, `outlast mcp -- SERVER` a server
    exit code 1

    $ outlast send night hello
    error: no instance named `night` is running
      hint: nothing else runs either; `outlast run -- AGENT` starts an agent, `outlast mcp -- SERVER` a server
    exit code 1
    "#);

    assert!(world.outlast(&["run", "-d", "--session", "night-shift", "--", "cat"]).status.success());
    let mut server = Command::new(OUTLAST)
        .args(["mcp", "--name", "server", "--", PUPPET])
        .current_dir(&world.project)
        .env("HOME", &world.home)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + PATIENCE;
    while !text(&world.outlast(&["ps"]).stdout).contains("server-") {
        assert!(Instant::now() < deadline, "the server does not come up");
        thread::sleep(Duration::from_millis(20));
    }
    let server_id = text(&world.outlast(&["ps"]).stdout);
    let server_id = server_id.split_whitespace().find(|word| word.starts_with("server-")).unwrap().to_owned();
    let table: [&[&str]; 7] = [
        &["state", "nigth-shift"],
        &["send", "nihgt", "hello"],
        &["screen", "day"],
        // There is no terminal to attach with.
        &["attach", "night"],
        &["inject", "server", "hello"],
        &["send", "server", "hello"],
        &["send", "night"],
    ];
    let words: String = table.iter().map(|args| world.words(args).replace(&server_id, "SERVER")).collect();
    world.outlast(&["stop", "night", "--force"]);
    drop(server.stdin.take());
    server.wait().unwrap();
    insta::assert_snapshot!(words, @r#"
    $ outlast state nigth-shift
    error: no instance named `nigth-shift` is running
      hint: did you mean `night-shift`?
    exit code 1

    $ outlast send nihgt hello
    error: no instance named `nihgt` is running
      hint: did you mean `night-shift`?
    exit code 1

    $ outlast screen day
    error: no instance named `day` is running
      hint: `outlast ps` lists the 2 running instances
    exit code 1

    $ outlast attach night
    error: `outlast attach` needs a terminal
      because: stdin or stdout is not a terminal
      hint: `outlast screen night-shift` prints its screen
    exit code 2

    $ outlast inject server hello
    error: `SERVER` is a server and has no terminal
      hint: only agents of `outlast run` have a terminal
    exit code 2

    $ outlast send server hello
    error: `SERVER` is a server and has no terminal
      hint: only agents of `outlast run` have a terminal
    exit code 2

    $ outlast send night
    error: the text did not reach `night-shift`
      because: there is nothing to send
      hint: give the text after the id, `outlast send night-shift TEXT`, or on stdin
    exit code 2
    "#);
}

#[test]
fn a_home_too_deep_for_a_socket_works() {
    let world = World::new(&"a-rather-deep-folder/".repeat(10));
    assert!(world.home.as_os_str().len() > 200);
    let started = world.outlast(&["run", "-d", "--session", "deep-in-there", "--", "sh", "-c", "echo hello; cat"]);
    assert!(started.status.success(), "{}", text(&started.stderr));
    world.until_ready("deep");
    let state: serde_json::Value = serde_json::from_slice(&world.outlast(&["state", "deep", "--json"]).stdout).unwrap();
    let socket = PathBuf::from(state["socket"].as_str().unwrap());
    assert!(socket.exists() && socket.as_os_str().len() < 104, "{socket:?}");
    assert!(world.outlast(&["inject", "deep", "x", "--enter"]).status.success());
    assert!(world.outlast(&["stop", "deep"]).status.success());
    assert!(!socket.exists());
}
