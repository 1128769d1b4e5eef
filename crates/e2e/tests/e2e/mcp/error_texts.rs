//! O5: the complete output and the exit code when a command line or a server is wrong.

use std::{
    fs,
    process::{Command, Stdio},
};

use serde_json::json;

use super::client::{Client, OUTLAST, Place, Setup, text};

/// Times, process ids and paths differ from run to run; everything else is as users see it.
fn redact(words: &str, place: &Place) -> String {
    let words = words.replace(&place.path().display().to_string(), "DIR").replace("outlast-under-test", "outlast");
    let lines = words.lines().map(|line| {
        let line = match line.strip_prefix('[').and_then(|line| line.split_once("Z] ")) {
            Some((_, rest)) => format!("[TIME] {rest}"),
            None => line.to_owned(),
        };
        line.split(' ').map(redact_pid(&line)).collect::<Vec<_>>().join(" ")
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Numbers are process ids only in lines that name one.
fn redact_pid(line: &str) -> impl Fn(&str) -> String {
    let has_pid = line.contains("PID");
    move |word| {
        let digits = word.trim_matches(|letter: char| !letter.is_ascii_digit());
        let is_number = has_pid && digits.len() > 1 && digits.bytes().all(|byte| byte.is_ascii_digit());
        if is_number { word.replace(digits, "N") } else { word.to_owned() }
    }
}

fn run(place: &Place, arguments: &[&str]) -> (String, Option<i32>) {
    let output = Command::new(OUTLAST)
        .args(arguments)
        .current_dir(place.path())
        .env("HOME", place.path())
        .stdin(Stdio::null())
        .output()
        .expect("the program starts");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "", "stdout is for the protocol");
    (redact(&String::from_utf8_lossy(&output.stderr), place), output.status.code())
}

#[test]
fn a_wrong_command_line_is_explained() {
    let place = Place::new();
    let table = [
        (&["mpc", "--", "cat"][..], "error: unknown command `mpc`\n  hint: did you mean `mcp`?"),
        (&["frobnicate"], "error: unknown command `frobnicate`\n  hint: `outlast --help` lists the options"),
        (&["mcp", "--wath", "src", "--", "cat"], "error: unknown option `--wath`\n  hint: did you mean `--watch`?"),
        (
            &["mcp", "--drain", "soon", "--", "cat"],
            "error: `soon` is not a valid value of `--drain <DURATION>`\n  because: expected a duration such as 30s, 1m, 1h30m or 250ms, or a number of seconds\n  hint: `outlast mcp --help` lists the options",
        ),
        (
            &["mcp", "--drain=-1", "--", "cat"],
            "error: `-1` is not a valid value of `--drain <DURATION>`\n  because: a duration cannot be negative\n  hint: `outlast mcp --help` lists the options",
        ),
        (
            &["mcp", "--reload", "sideways", "--", "cat"],
            "error: `sideways` is not a valid value of `--reload <RELOAD>`\n  hint: use `blue-green` or `replace`",
        ),
        (
            &["mcp", "--retry", "--", "cat"],
            "error: `--retry <RETRY>` needs a value\n  hint: use `never` or `annotated`",
        ),
        (
            &["mcp"],
            "error: no command is given for the server\n  hint: write the server's command after `--`: outlast mcp -- python -m my_server",
        ),
        (
            &["mcp", "--"],
            "error: no command is given for the server\n  hint: write the server's command after `--`: outlast mcp -- python -m my_server",
        ),
        (
            &["mcp", "server"],
            "error: unexpected argument `server`\n  hint: write the server's command after `--`: outlast mcp -- python -m my_server",
        ),
        (
            &["mcp", "--inherit", "--watch", ".", "--", "cat"],
            "error: `--inherit` and `--watch <PATH>...` cannot be used together\n  hint: `outlast mcp --help` lists the options",
        ),
        (
            &["mcp", "--watch", "nowhere", "--", "cat"],
            "error: cannot watch `nowhere`: there is no such file or directory\n  hint: a relative path counts from the working directory",
        ),
    ];
    for (arguments, words) in table {
        assert_eq!(run(&place, arguments), (words.to_owned(), Some(2)), "{arguments:?}");
    }
    assert!(!place.path().join(".outlast").exists(), "nothing is left of a mistake");
}

/// All output until its client leaves, and the exit code.
fn parting(place: &Place, mut client: Client) -> (String, Option<i32>) {
    place.recorded("server_crashed", 1);
    client.says("crash #1");
    client.close_stdin();
    let code = client.wait().code();
    (redact(&client.last_words(), place), code)
}

#[test]
fn a_command_that_cannot_be_started_is_explained() {
    let table = [
        (
            "no-such-command-anywhere",
            127,
            "no program named `no-such-command-anywhere`",
            "the command is searched on PATH; clients often start servers with a shorter PATH than your shell",
        ),
        ("./absent", 127, "no program named `./absent`", "a relative path counts from the working directory"),
        ("./plain", 126, "`DIR/./plain` exists, but is not executable", "make it executable: chmod +x ./plain"),
        ("./folder", 126, "`DIR/./folder` is a directory", "name the program inside it"),
        (
            "./lost",
            127,
            "`DIR/./lost` exists, but its interpreter `/no/such/interpreter` does not",
            "install the interpreter, or fix the first line of the file",
        ),
    ];
    for (program, code, cause, hint) in table {
        let place = Place::new();
        place.write("plain", "#!/bin/sh\n");
        place.script("lost", "#!/no/such/interpreter -x\n");
        fs::create_dir(place.path().join("folder")).expect("the project is ours");
        let client = Setup::new(&place).command([program]).start();
        let version = env!("CARGO_PKG_VERSION");
        let words = format!(
            "[TIME] [SUPERVISOR] Starting: outlast {version}, PID N, in DIR: {program}
error: cannot start `{program}`
  because: {cause}
  hint: {hint}
[TIME] [SUPERVISOR] ERROR: MCP server crashed: could not be started: {cause} (crash #1; restarting in 1.0 s)
[TIME] [SUPERVISOR] Ended (code: {code})"
        );
        assert_eq!(parting(&place, client), (words, Some(code)));
    }
}

#[test]
fn the_log_of_a_crash_and_a_reload_is_stable() {
    let place = Place::new();
    let mut client = Setup::new(&place).options(["--name", "weather"]).ready();
    client.call("stderr", json!({"text": "out of memory"}));
    client.result("crash", json!({"code": 3}));
    client.call("echo", json!({"text": "back"}));
    client.restart();
    place.recorded("server_stopped", 1);
    client.close_stdin();
    assert_eq!(client.wait().code(), Some(0));
    let words = redact(&client.last_words(), &place).replace(super::client::PUPPET, "PUPPET");
    let version = env!("CARGO_PKG_VERSION");
    let expected = format!(
        "[TIME] [SUPERVISOR] Starting: outlast {version}, PID N, in DIR: PUPPET
[TIME] [SUPERVISOR] MCP server running (PID: N) (restart #0, generation 1)
[TIME] [SUPERVISOR] MCP server ready (generation 1)
[weather] out of memory
[TIME] [SUPERVISOR] ERROR: MCP server crashed (PID: N): exit code 3 (crash #1; restarting in 1.0 s)
[TIME] [SUPERVISOR] MCP server running (PID: N) (restart #1, generation 2)
[TIME] [SUPERVISOR] MCP server ready (generation 2)
[TIME] [SUPERVISOR] Restart requested by tool (reason: a test)
[TIME] [SUPERVISOR] Restart marker written to DIR/.outlast/restart_marker
[TIME] [SUPERVISOR] MCP server running (PID: N) (restart #2, generation 3)
[TIME] [SUPERVISOR] Stopping the old MCP server (PID: N) (reason: a test)
[TIME] [SUPERVISOR] MCP server ready (generation 3)
[TIME] [SUPERVISOR] MCP server ended (PID: N): exit code 0
[TIME] [SUPERVISOR] MCP server ended (PID: N): exit code 0
[TIME] [SUPERVISOR] Ended (code: 0)"
    );
    assert_eq!(words, expected);
}

#[test]
fn a_failed_build_is_quoted_in_the_answer() {
    let place = Place::new();
    let build = "echo checking; echo 'error: expected `;`' >&2; exit 101";
    let mut client = Setup::new(&place).options(["--build", build]).ready();
    let pid = client.server_pid();
    let result = client.result("restart_server", json!({}));
    assert_eq!(result["isError"], true);
    let words = format!(
        "The restart failed: the build failed: exit code 101. The old server (pid {pid}) keeps serving.

output of the build:
checking
error: expected `;`"
    );
    assert_eq!(text(&result), words);
    client.end();
}
