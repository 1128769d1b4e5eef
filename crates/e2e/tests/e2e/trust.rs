//! A directory that the user does not trust: what its files cannot make outlast do.

use std::{
    fs,
    io::{Read, Write},
    os::unix::fs::{PermissionsExt, chown, symlink},
    path::Path,
    process::{Command, Output, Stdio},
};

use nix::unistd::geteuid;
use serde_json::{Value, json};

use crate::mcp::client::{Client, OUTLAST, PUPPET, Place, Setup, until};

/// A user with a home directory, and a project that came from elsewhere.
struct Clone {
    home: Place,
    project: Place,
}

impl Clone {
    fn new() -> Clone {
        Clone { home: Place::new(), project: Place::new() }
    }

    fn with(name: &str, text: &str) -> Clone {
        let clone = Clone::new();
        clone.project.write(name, text);
        clone
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(OUTLAST);
        command.args(args).current_dir(self.project.path()).env("HOME", self.home.path());
        command.env("GITHUB_TOKEN", "gh-s3cret").env_remove("OUTLAST_CHILD").stdin(Stdio::null());
        command
    }

    fn outlast(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("the program starts")
    }

    fn stdout(&self, args: &[&str]) -> String {
        let output = self.outlast(args);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("words").replace(&self.project.join(""), "PROJECT/")
    }

    fn setup(&self) -> Setup {
        Setup::new(&self.project).home(self.home.path()).env("GITHUB_TOKEN", "gh-s3cret")
    }

    /// Ends the session `s`.
    fn end_session(&self) {
        self.stdout(&["stop", "s"]);
        until("the session to end", || (self.stdout(&["ps", "--json"]).trim() == "[]").then_some(()));
    }

    fn is_there(&self, name: &str) -> bool {
        self.project.path().join(name).exists()
    }

    fn record(&self) -> std::path::PathBuf {
        let dir = self.home.path().join(".local/state/outlast/trusted");
        fs::read_dir(dir).expect("records").next().expect("one").expect("a file").path()
    }
}

/// Ends a client; returns the warnings about files on its stderr.
fn warnings(mut client: Client) -> Vec<String> {
    client.close_stdin();
    assert_eq!(client.wait().code(), Some(0));
    let text = client.last_words();
    text.lines().filter_map(|line| line.split_once("warning: ")).map(|(_, warning)| warning.to_owned()).collect()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Only root can create files of another user.
fn is_root(test: &str) -> bool {
    let is_root = geteuid().is_root();
    if !is_root {
        eprintln!("{test}: skipped, as only root can make another user's file");
    }
    is_root
}

const OTHER_USER: u32 = 65534;

#[test]
fn a_build_command_runs_only_if_the_file_is_trusted() {
    let outside = tempfile::tempdir().unwrap();
    let watch = format!("watch = [\".\", {:?}]", outside.path());
    let clone = Clone::with("outlast.toml", &format!("[mcp]\nname = \"weather\"\n{watch}\nbuild = \"touch built\"\n"));
    let client = clone.setup().ready();
    clone.stdout(&["restart", "weather"]);
    assert!(!clone.is_there("built"));
    let said = warnings(client);
    assert_eq!(said.len(), 1, "{said:?}");
    let file = clone.project.join("outlast.toml");
    assert_eq!(
        said[0],
        format!(
            "`outlast.toml` is not trusted, so `mcp.watch` and `mcp.build` in it are ignored; `outlast trust --show \
             {file}` lists the values, `outlast trust {file}` trusts them"
        )
    );

    clone.stdout(&["trust"]);
    let client = clone.setup().ready();
    clone.stdout(&["restart", "weather"]);
    assert!(clone.is_there("built"));
    assert_eq!(warnings(client), [""; 0]);

    // Other edits need no confirmation; a changed command does.
    clone
        .project
        .write("outlast.toml", &format!("[mcp]\nbuild = \"touch built\"\n{watch}\nhold = 5\nname = \"weather\""));
    let client = clone.setup().ready();
    assert_eq!(warnings(client), [""; 0]);
    clone.project.write("outlast.toml", &format!("[mcp]\nbuild = \"touch owned\"\n{watch}\nname = \"weather\""));
    let client = clone.setup().ready();
    clone.stdout(&["restart", "weather"]);
    let said = warnings(client);
    assert!(!clone.is_there("owned"));
    assert!(said[0].starts_with("`outlast.toml` was changed since you trusted it, so "), "{said:?}");

    // A file that is named explicitly is trusted.
    let client = clone.setup().options(["--config", "outlast.toml"]).ready();
    clone.stdout(&["restart", "weather"]);
    client.end();
    assert!(clone.is_there("owned"));
}

#[test]
fn the_environment_and_paths_outside_are_out_of_reach() {
    let clone = Clone::new();
    let outside = clone.home.join("marker");
    clone.project.write(
        "outlast.toml",
        &format!("[mcp]\nname = \"${{GITHUB_TOKEN}}\"\nmarker = {outside:?}\nno_tools = true\n"),
    );
    let mut client = clone.setup().ready();
    let seen = clone.stdout(&["ps", "--json"]);
    assert!(!seen.contains("s3cret"), "{seen}");
    assert!(!client.tool_names().contains(&"restart_server".to_owned()), "what needs no trust is in force");
    let id = serde_json::from_str::<Value>(&seen).expect("JSON")[0]["id"].as_str().expect("an id").to_owned();
    clone.stdout(&["restart", &id]);
    clone.project.recorded("restart_marker_written", 1);
    assert!(!Path::new(&outside).exists());
    client.end();
    assert!(!fs::read_to_string(clone.project.join(".outlast/audit.jsonl")).expect("a log").contains("s3cret"));
}

#[test]
fn an_agent_gets_no_environment_and_no_command_from_a_found_file() {
    let clone = Clone::with(
        "outlast.toml",
        "[run]\nenv = \"all\"\nenv_pass = \"GITHUB*\"\nnotify = \"touch owned\"\ndetach = true\n[agent.sh]\nfresh = [\"-c\", \"touch owned\"]\n",
    );
    let output = clone.outlast(&["run", "--session", "s", "--", "sh", "-c", "env > seen; touch done; exit 3"]);
    assert!(output.status.success(), "{output:?}");
    let said = stderr(&output);
    assert_eq!(said.matches("warning: ").count(), 1, "{said}");
    assert!(said.contains("`run.env`, `run.env_pass`, `run.notify` and `agent.sh.fresh` in it are ignored"), "{said}");
    until("the agent", || clone.is_there("done").then_some(()));
    assert!(!fs::read_to_string(clone.project.join("seen")).expect("variables").contains("s3cret"));
    clone.end_session();
    assert!(!clone.is_there("owned"));
}

#[test]
fn a_merge_conflict_in_a_found_file_is_a_warning() {
    let conflict = "[mcp]\n<<<<<<< HEAD\nhold = 5\n=======\nhold = 6\n>>>>>>> other\n";
    let clone = Clone::with("outlast.toml", conflict);
    let client = clone.setup().ready();
    let said = warnings(client);
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].starts_with("outlast.toml:2:") && said[0].contains("nothing in this file is used"), "{said:?}");
    let output = clone.outlast(&["run", "--detach", "--session", "s", "--", "true"]);
    assert!(output.status.success(), "{output:?}");
    assert!(stderr(&output).contains("nothing in this file is used"), "{output:?}");
    clone.end_session();
    // A file that is named explicitly must be valid.
    let output = clone.outlast(&["mcp", "--config", "outlast.toml", "--", "cat"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    // A FIFO of that name is not a configuration.
    fs::remove_file(clone.project.join("outlast.toml")).expect("it is ours");
    nix::unistd::mkfifo(clone.project.join("outlast.toml").as_str(), nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    let client = clone.setup().ready();
    client.end();
}

/// If a found file has an error, the server runs without it; a file that is named explicitly must be valid.
#[test]
fn a_mistake_in_a_found_file_is_a_warning() {
    let table = [
        // file                                             says
        ("[mcp]\nhold = \"soon\"\n", "`mcp.hold`"),
        ("[mcp]\nhodl = 5\n", "`mcp.hodl`"),
        ("mcp = 5\n", "expected a table"),
        ("[mcp]\nhold = \n", "outlast.toml:2:"),
        ("[mcp]\nheartbeat = \"1ms\"\n", "too short for a heartbeat"),
        ("[mcp]\ninherit = true\nhold = 5\ndrain = 5\n", "(and 1 more mistake)"),
        ("[mcp]\nbuild = 5\nhold = true\n", "nothing in this file is used"),
        // The parser would overflow the stack on it.
        (&format!("x = {}", "{{}a=".repeat(10_000)), "nested more than 32 levels deep"),
    ];
    for (file, says) in table {
        let clone = Clone::with("outlast.toml", file);
        let mut client = clone.setup().ready();
        assert_eq!(client.call("echo", json!({"text": "it runs"})), "it runs", "{file}");
        let said = warnings(client);
        assert_eq!(said.len(), 1, "{file}: {said:?}");
        assert!(said[0].contains(says) && said[0].contains("nothing in this file is used"), "{file}: {said:?}");
        let output = clone.outlast(&["mcp", "--config", "outlast.toml", "--", "cat"]);
        assert_eq!(output.status.code(), Some(2), "{file}: {output:?}");
    }
    for file in [
        "[run]\ndetach_key = \"x\"\n",
        "[run]\nagent = \"none\"\n",
        "[run]\nhang_timeout = \"soon\"\n",
        "[agent.claude]\n",
    ] {
        let clone = Clone::with("outlast.toml", file);
        let output = clone.outlast(&["run", "--detach", "--session", "s", "--", "true"]);
        assert!(output.status.success(), "{file}: {output:?}");
        assert!(stderr(&output).contains("nothing in this file is used"), "{file}: {output:?}");
        clone.end_session();
        let output = clone.outlast(&["run", "--config", "outlast.toml", "--detach", "--session", "t", "--", "true"]);
        assert_eq!(output.status.code(), Some(2), "{file}: {output:?}");
    }
    // A server that the file restricts is not started without its sandbox.
    let clone = Clone::with("outlast.toml", "[mcp]\nhold = \"soon\"\nsandbox = { read = [\".\"] }\n");
    assert_eq!(clone.outlast(&["mcp", "--", "cat"]).status.code(), Some(2));
    // A gateway has no backends without its file.
    let clone = Clone::with("outlast.toml", "[gateway]\nsession_idle = \"soon\"\n");
    assert_eq!(clone.outlast(&["gateway", "--stdio"]).status.code(), Some(2));
    // A value that needs trust is not read before the file is trusted, so it is not reported as a mistake.
    let clone = Clone::with("outlast.toml", "[gateway]\nlisten = 5\n");
    let output = clone.outlast(&["gateway", "--stdio"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(stderr(&output).contains("is not trusted, so `gateway.listen` in it is ignored"), "{output:?}");
    clone.stdout(&["trust"]);
    assert_eq!(clone.outlast(&["gateway", "--stdio"]).status.code(), Some(2));
}

#[test]
fn another_users_file_above_is_a_warning() {
    if !is_root("another_users_file_above_is_a_warning") {
        return;
    }
    let clone = Clone::with("outlast.toml", "[mcp]\nbuild = \"touch built\"\nname = \"theirs\"\n");
    chown(clone.project.join("outlast.toml"), Some(OTHER_USER), Some(OTHER_USER)).expect("we are root");
    fs::create_dir(clone.project.join("below")).expect("a directory");
    let client = clone.setup().cwd(Path::new(&clone.project.join("below"))).ready();
    let said = warnings(client);
    let file = clone.project.join("outlast.toml");
    assert_eq!(
        said,
        [format!("`{file}` belongs to another user and is not used; if you trust it, name it with `--config`")]
    );
    let output = clone.outlast(&["gateway", "--stdio"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let output = clone.outlast(&["trust"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(stderr(&output).contains("belongs to another user"), "{output:?}");
}

fn backend(more: &str) -> String {
    format!("[[backend]]\nname = \"one\"\ncommand = {PUPPET:?}\nargs = []\n{more}\n")
}

#[test]
fn a_gateway_starts_nothing_from_a_file_that_is_not_trusted() {
    let clone = Clone::with("outlast.toml", &backend(""));
    let output = clone.outlast(&["gateway", "--stdio"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let words = stderr(&output).replace(&clone.project.join(""), "PROJECT/");
    insta::assert_snapshot!(words, @r"
    error: `outlast.toml` is not trusted, so `backend.one.command` and `backend.one.args` in it are ignored
      hint: `outlast trust --show PROJECT/outlast.toml` lists the values, `outlast trust PROJECT/outlast.toml` trusts them
    ");
    assert!(!clone.is_there(".outlast"), "nothing was begun");
    let checked = clone.stdout(&["gateway", "check"]);
    assert!(checked.contains("one ") && checked.contains("is not trusted"), "{checked}");

    clone.stdout(&["trust"]);
    let mut client = clone.setup_gateway().ready();
    // The first list does not wait long for a backend without a cached catalogue.
    until("its tools", || client.tool_names().contains(&"one__echo".to_owned()).then_some(()));
    // A running gateway does not accept a changed command either, and its backends continue.
    clone.project.write("outlast.toml", &backend("env = { LD_PRELOAD = \"x.so\" }"));
    let output = clone.outlast(&["reload"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(stderr(&output).contains("was changed since you trusted it"), "{output:?}");
    assert!(client.tool_names().contains(&"one__echo".to_owned()));
    client.end();
}

impl Clone {
    fn setup_gateway(&self) -> Setup {
        Setup::gateway(&self.project).home(self.home.path()).found().options(["--stdio"]).hasty()
    }
}

#[test]
fn values_that_need_trust_are_shown() {
    let clone = Clone::with(
        "outlast.toml",
        "[mcp]\nhold = 5\nbuild = \"make KEY=abc\"\n[[backend]]\nname = \"git\"\ncommand = \"npx\"\nargs = [\"--api-key\", \"abc\"]\nenv = { TOKEN = \"${GITHUB_TOKEN}\", API_KEY = \"abc\", LD_PRELOAD = \"x.so\" }\n",
    );
    insta::assert_snapshot!(clone.stdout(&["trust", "--show"]), @r#"
    KEY                  VALUE                                                          FROM
    mcp.build            "make KEY=…"                                                   outlast.toml:3
    backend.git.command  "npx"                                                          outlast.toml:6
    backend.git.args     ["--api-key","…"]                                              outlast.toml:7
    backend.git.env      {"API_KEY":"…","LD_PRELOAD":"x.so","TOKEN":"${GITHUB_TOKEN}"}  outlast.toml:8
    Not trusted: `outlast trust PROJECT/outlast.toml` trusts these values
    "#);
    let shown = clone.stdout(&["config", "show", "--", "mcp", "--", "cat"]);
    let line = shown.lines().find(|line| line.starts_with("mcp.build ")).unwrap_or_else(|| panic!("{shown}"));
    assert!(line.ends_with("outlast.toml:3, ignored: not trusted"), "{line}");
    let shown: Value = serde_json::from_str(&clone.stdout(&["config", "show", "--json"])).expect("JSON");
    let ignored: Vec<&Value> =
        shown["values"].as_array().expect("values").iter().filter(|value| value["ignored"] == "untrusted").collect();
    assert_eq!(ignored.len(), 4, "{ignored:?}");
    assert!(!shown.to_string().contains("abc"), "{shown}");
    assert!(!clone.home.path().join(".local").exists(), "looking writes nothing");

    assert!(clone.stdout(&["trust", "."]).ends_with("Trusted: PROJECT/./outlast.toml\n"));
    let record = clone.record();
    assert_eq!(fs::metadata(&record).expect("a record").permissions().mode() & 0o777, 0o600);
    assert!(!fs::read_to_string(&record).expect("text").contains("abc"), "a record holds no values");
    let told: Value = serde_json::from_str(&clone.stdout(&["trust", "--show", "--json"])).expect("JSON");
    assert_eq!((&told["trusted"], &told["why"]), (&json!(true), &Value::Null));
    assert!(!clone.stdout(&["config", "show"]).contains("not trusted"));
    assert_eq!(clone.stdout(&["trust", "--remove"]), "No longer trusted: PROJECT/outlast.toml\n");
    assert_eq!(clone.stdout(&["trust", "--remove"]), "Was not trusted: PROJECT/outlast.toml\n");
    assert!(clone.stdout(&["trust", "--show"]).contains("Not trusted"));
    clone.project.write("outlast.toml", "[mcp]\nhold = 5\n");
    assert_eq!(clone.stdout(&["trust"]), "PROJECT/outlast.toml sets nothing that needs trust.\n");
    fs::remove_file(clone.project.join("outlast.toml")).expect("it is ours");
    let output = clone.outlast(&["trust"]);
    assert_eq!(output.status.code(), Some(1));
    insta::assert_snapshot!(stderr(&output), @r"
    error: no outlast.toml in this directory or above
      hint: name a file or a directory: `outlast trust FILE`
    ");
}

#[test]
fn a_record_that_others_can_write_is_not_used() {
    let clone = Clone::with("outlast.toml", "[mcp]\nname = \"x\"\nbuild = \"touch built\"\n");
    clone.stdout(&["trust"]);
    let record = clone.record();
    let warning = |why: &str| {
        let client = clone.setup().ready();
        clone.stdout(&["restart", "x"]);
        let said = warnings(client);
        assert!(!clone.is_there("built"), "{why}");
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains(&format!("cannot be used: {why})")), "{said:?}");
    };
    fs::set_permissions(&record, fs::Permissions::from_mode(0o660)).expect("it is ours");
    warning("other users can write to it");
    fs::set_permissions(&record, fs::Permissions::from_mode(0o600)).expect("it is ours");
    let moved = clone.home.join("moved");
    fs::rename(&record, &moved).expect("it is ours");
    symlink(&moved, &record).expect("a link");
    warning("it is a symbolic link");
    if is_root("a_record_that_others_can_write_is_not_used") {
        fs::remove_file(&record).expect("it is ours");
        fs::rename(&moved, &record).expect("it is ours");
        chown(&record, Some(OTHER_USER), Some(OTHER_USER)).expect("we are root");
        warning("it belongs to another user");
    }
}

fn servers(clone: &Clone) -> String {
    let script = format!("echo ran >> {}; exec {PUPPET}", clone.project.join("ran"));
    json!({"mcpServers": {"theirs": {"command": "sh", "args": ["-c", script]}}}).to_string()
}

#[test]
fn doctor_starts_only_servers_that_the_user_chose() {
    let clone = Clone::new();
    let config = servers(&clone);
    clone.project.write(".mcp.json", &config);
    let says = || {
        let output = clone.outlast(&["doctor", "--json"]);
        let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let findings = told["findings"].as_array().expect("findings").clone();
        let found = findings.into_iter().find(|finding| finding["subject"] == "theirs").expect("the server");
        found["says"].as_str().expect("words").to_owned()
    };
    assert_eq!(says(), "not wrapped; not tested: you have neither wrapped nor trusted this file");
    assert!(!clone.is_there("ran"));
    clone.stdout(&["trust", ".mcp.json"]);
    assert!(says().starts_with("not wrapped; answers in "), "{}", says());
    assert!(clone.is_there("ran"));

    // Another server in the same file is trusted separately.
    clone.project.write(".mcp.json", &config.replace("theirs", "others").replace("echo ran", "echo other"));
    let output = clone.outlast(&["doctor", "--json"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("neither wrapped nor trusted"), "{output:?}");
    clone.stdout(&["trust", "--remove", ".mcp.json"]);

    // A wrapped server is known; one that was added to the file since is not.
    fs::remove_file(clone.project.join("ran")).expect("it is ours");
    clone.project.write(".mcp.json", &config);
    clone.stdout(&["wrap", "--yes", ".mcp.json"]);
    assert!(says().starts_with("wrapped; answers in ") || says().contains("answers in "), "{}", says());
    let wrapped = fs::read_to_string(clone.project.join(".mcp.json")).expect("a file");
    clone.project.write(".mcp.json", &wrapped.replace("echo ran", "echo owned >> owned; echo ran"));
    assert!(says().contains("neither wrapped nor trusted"), "{}", says());
    assert!(!clone.is_there("owned"));
}

#[test]
fn doctor_asks_on_a_terminal() {
    for (answer, is_started) in [("y\n", true), ("\n", false)] {
        let clone = Clone::new();
        clone.project.write(".mcp.json", &servers(&clone).replace("\"theirs\"", "\"the\\u001b[8mirs\""));
        let terminal = nix::pty::openpty(None, None).expect("a terminal");
        let mut command = clone.command(&["doctor"]);
        let slave = || terminal.slave.try_clone().expect("a descriptor");
        let mut child = command.stdin(slave()).stderr(slave()).stdout(Stdio::null()).spawn().expect("it starts");
        let mut screen = fs::File::from(terminal.master);
        let (mut seen, mut piece) = (String::new(), [0; 1024]);
        while !seen.contains("Start them for a test? [y/N] ") {
            let count = screen.read(&mut piece).expect("a question");
            seen.push_str(&String::from_utf8_lossy(&piece[..count]));
        }
        assert!(seen.contains("neither wrapped nor trusted") && !seen.contains("\x1b[8m"), "{seen:?}");
        screen.write_all(answer.as_bytes()).expect("it reads");
        child.wait().expect("it ends");
        assert_eq!(clone.is_there("ran"), is_started, "{answer:?}");
    }
}

#[test]
fn a_link_to_a_trusted_file_is_not_trusted() {
    let trusted = Clone::with("outlast.toml", "[mcp]\nname = \"x\"\nbuild = \"touch built\"\n");
    trusted.stdout(&["trust"]);
    // The same command would run in a directory with files of another user.
    let other = Clone { home: Place::new(), project: Place::new() };
    symlink(trusted.project.join("outlast.toml"), other.project.join("outlast.toml")).expect("a link");
    let client = other.setup().home(trusted.home.path()).ready();
    assert!(trusted.outlast(&["restart", "x"]).status.success());
    let said = warnings(client);
    assert!(said.len() == 1 && said[0].starts_with("`outlast.toml` is not trusted"), "{said:?}");
    assert!(!other.is_there("built"));
}

/// An error in the table of another command causes no warning.
#[test]
fn only_ignored_values_of_the_commands_own_table_are_reported() {
    let clone = Clone::with("outlast.toml", &format!("{}[run]\nnotify = \"x\"\n", backend("")));
    let client = clone.setup().ready();
    assert_eq!(warnings(client), [""; 0]);
}
